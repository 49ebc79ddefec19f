"""A group of two tiers: two slow disks, and two fast ones with the tag that says so."""

from collections.abc import Sequence
from pathlib import Path

from real.any import AnyHost
from real.host import RealHost

from agent.csi.client import Client
from lvm import report
from lvm.room import Room
from proto import csi_pb2 as csi

MIB = 1 << 20

# In extents.
SLOW, FAST = (31, 17), (13, 9)


def new_group(host: AnyHost) -> str:
    name = host.new_group(*SLOW, *FAST)
    disks = report.read(host.lvm).group(name).disks
    fast = [disk.name for disk in disks if disk.extents in FAST]
    host.lvm("pvchange", "--addtag", report.FAST, "--", *fast)
    return name


def free(host: AnyHost, group: str) -> tuple[int, int]:
    """The free extents of the slow tier and of the fast one."""
    now = report.read(host.lvm).group(group)
    return Room(now).free_extents, Room(now).fast_extents


def use(client: Client, host: AnyHost, group: str, kind: str, *used: str) -> csi.Volume:
    """Make a volume of a class, grow it while it is mounted, and stage it again.

    `used` are deactivated in between.
    """
    staging, target = host.directory / "staging", host.directory / "target"
    volume = client.create("pvc-1", 40 * MIB, parameters={"class": kind})
    client.stage(volume, staging)
    client.publish(volume, staging, target)
    (staging / "data").write_bytes(b"data" * MIB)
    assert client.node_expand(volume.volume_id, target, 60 * MIB).capacity_bytes == 60 * MIB
    assert (staging / "data").read_bytes() == b"data" * MIB
    (staging / "data").unlink()
    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
    for one in used:
        host.deactivate(group, one)
    client.stage(volume, staging)
    client.unstage(volume.volume_id, staging)
    return volume


def erased(
    client: Client, host: AnyHost, group: str, volume: csi.Volume, cached: str, secret: bytes
) -> Sequence[tuple[int, int]] | None:
    """Delete a volume, after which no disk has the secret; on a fake, what was erased of a cache.

    `cached` is the volume or the pool that has the cache.
    """
    if isinstance(host, RealHost):
        disks = [Path(disk.name) for disk in report.read(host.lvm).group(group).disks]
        assert any(secret in disk.read_bytes() for disk in disks)
        client.delete(volume.volume_id)
        assert not any(secret in disk.read_bytes() for disk in disks)
        return None
    cache = host.lvm2.groups[group].volumes[cached].cache
    assert cache
    client.delete(volume.volume_id)
    return cache.media.zeroed


def empty(client: Client) -> None:
    """Delete all snapshots and volumes."""
    for snapshot in client.snapshots():
        client.delete_snapshot(snapshot.snapshot_id)
    for volume in client.volumes():
        client.delete(volume.volume_id)
