"""Groups on other disks than whole ones of 512-byte blocks: 4 KiB, partitions, crypt and MD."""

from collections.abc import Iterator
from pathlib import Path

import chosen
import configured
import expect
import pytest
from laying import lay
from real.any import AnyHost, device

from agent.core import errors
from agent.csi.client import Client, block, mounted, of_snapshot
from agent.daemon.server import Service
from agent.operations import preflight
from agent.operations.preflight import PASS, WARN
from agent.settings.configuration import Configuration
from agent.settings.settings import Config, GroupDefinition
from lvm import report
from lvm.candidate_devices import Excluded, ExclusionReason
from lvm.labels import PhysicalLabel
from lvm.layout import Layout
from lvm.room import Room

MIB = 1 << 20
DISK = 201 * MIB
SIZE = 32 * MIB
# Why the disks that each is made of are none.
BELOW = {
    "4 KiB": [],
    "partition": [ExclusionReason.PARTITIONED],
    "LUKS": [ExclusionReason.TAKEN],
    "MD": [ExclusionReason.TAKEN, ExclusionReason.TAKEN],
}
LAYOUTS = {"linear": Layout(), "thin": Layout("thin")}


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """What disk the group is on."""
    return str(getattr(request, "param", "4 KiB"))


@pytest.fixture
def disk(host: AnyHost, kind: str) -> Iterator[str]:
    """A blank disk of that kind."""
    with host.disk(kind, DISK) as made:
        yield made


@pytest.fixture
def usual(host: AnyHost) -> str:
    """A blank disk with blocks of 512 bytes, which the service may see too."""
    return host.new_device(DISK)


@pytest.fixture
def group(host: AnyHost, disk: str, usual: str, tmp_path: Path) -> Iterator[str]:
    name = f"kinds-{tmp_path.parent.name[-6:]}-{tmp_path.name[-12:]}".replace("_", "-")
    with host.own_group(name, [disk]):
        yield name


pytestmark = pytest.mark.settings(classes=configured.classes("data", LAYOUTS))


def made_of(directory: Path, name: str, *disks: str) -> Config:
    """A group that Carver makes of these disks."""
    definitions = (GroupDefinition(name, disks),)
    return configured.carver(directory, name, devices=disks, definitions=definitions)


OF_EACH_KIND = pytest.mark.parametrize("kind", chosen.kinds(BELOW, usual=[]), indirect=True)


@OF_EACH_KIND
def test_volumes_on_it_live_as_on_any_other_disk(
    client: Client, host: AnyHost, group: str, staging: Path, target: Path
) -> None:
    free = Room(report.read(host.lvm).group(group)).free_extents
    volume = client.create("pvc-1", SIZE, mounted("ext4"))
    client.stage(volume, staging, mounted("ext4"))
    client.publish(volume, staging, target, mounted("ext4"))
    client.expand(volume.volume_id, 2 * SIZE)
    client.node_expand(volume.volume_id, target, 2 * SIZE)
    [usage, *_] = client.stats(volume.volume_id, target).usage
    assert usage.total > 1.5 * SIZE
    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)

    raw = client.create("pvc-2", SIZE, block())
    path = device(host, group, "vol-pvc-2")
    data = [b"what was there before".ljust(4096, b"."), b"what came then".ljust(4096, b".")]
    host.write_bytes(path, SIZE - 4096, data[0])
    snapshot = client.snapshot("nightly", raw.volume_id)
    host.write_bytes(path, SIZE - 4096, data[1])
    copy = client.create("pvc-3", SIZE, block(), source=of_snapshot(snapshot.snapshot_id))
    for name, there in (("vol-pvc-3", data[0]), ("vol-pvc-2", data[1])):
        assert host.read_bytes(device(host, group, name), SIZE - 4096, 4096) == there
    # Through a loop device of its own.
    client.stage(copy, staging, block())
    client.publish(copy, staging, target, block(), read_only=True)
    client.unpublish(copy.volume_id, target)
    client.unstage(copy.volume_id, staging)

    client.delete_snapshot(snapshot.snapshot_id)
    for one in (volume, raw, copy):
        client.delete(one.volume_id)
    known = report.read(host.lvm).group(group)
    assert (known.volumes, Room(known).free_extents) == ({}, free)


@OF_EACH_KIND
def test_thin_volumes_on_it_share_a_pool_with_their_snapshots(
    client: Client, service: Service, host: AnyHost, group: str, staging: Path
) -> None:
    volume = client.create("pvc-1", SIZE, mounted("ext4"), parameters={"class": "thin"})
    client.stage(volume, staging, mounted("ext4"))
    client.unstage(volume.volume_id, staging)
    snapshot = client.snapshot("nightly", volume.volume_id)
    client.delete_snapshot(snapshot.snapshot_id)
    client.delete(volume.volume_id)
    service.pool_remover.remove_if_empty(group, "pool-thin").result(600)
    assert not report.read(host.lvm).group(group).volumes


@OF_EACH_KIND
def test_it_is_found_and_the_disks_below_it_are_excluded(host: AnyHost, kind: str) -> None:
    with host.disk(kind, DISK) as disk:
        path = host.kernel.real_path(disk)
        host.label(disk)
        found = host.disks.scan()
        assert isinstance(found[path], PhysicalLabel)
        reasons = [
            one.reason
            for path_below, one in found.items()
            if isinstance(one, Excluded)
            if one == Excluded(ExclusionReason.TAKEN, Path(path).name)
            or (one == Excluded(ExclusionReason.PARTITIONED) and path.startswith(path_below))
        ]
        assert reasons == BELOW[kind]


@OF_EACH_KIND
def test_carver_makes_a_group_of_it(host: AnyHost, tmp_path: Path, disk: str) -> None:
    name = f"kinds-made-{tmp_path.parent.name[-6:]}"
    config = made_of(tmp_path, name, disk)
    lvm, laid = lay(host, config)
    assert laid.failures == {}
    assert Room(laid.group(report.read(lvm), name)).free_extents == 50
    # It is found by the same path again, and left alone.
    lvm, laid = lay(host, config)
    assert (laid.failures, laid.absent(laid.group(report.read(lvm), name))) == ({}, [])
    lvm("vgremove", "--yes", "--", name)


def test_a_group_is_not_made_of_disks_with_blocks_of_two_sizes(
    host: AnyHost, tmp_path: Path, disk: str, usual: str
) -> None:
    name = f"kinds-mixed-{tmp_path.parent.name[-6:]}"
    lvm, laid = lay(host, made_of(tmp_path, name, disk, usual))
    known = report.read(lvm)
    with pytest.raises(errors.GroupRefused) as refused:
        laid.group(known, name)
    for word in (f"{disk}: 4096", f"{usual}: 512", "of one size"):
        assert word in str(refused.value)
    assert (known.groups, known.orphans) == ({}, ()), "nothing was written"


def test_a_disk_with_other_blocks_is_no_replacement_and_stays_blank(
    client: Client, host: AnyHost, disk: str, usual: str
) -> None:
    with expect.code("FAILED_PRECONDITION", usual, "blocks of 512 bytes", "4096", "untouched"):
        client.replace_disk(disk, usual)
    assert usual not in host.disks.scan()


@pytest.mark.variation
def test_the_doctor_reports_a_group_of_mixed_block_sizes(
    host: AnyHost, tmp_path: Path, group: str, usual: str
) -> None:
    forced = ("devices/allow_mixed_block_sizes=1",)
    host.lvm("vgextend", "--quiet", "--quiet", "--", group, usual, settings=forced)
    config, known = configured.carver(tmp_path, group), report.read(host.lvm)
    node = preflight.Node(Configuration(config), host.kernel, host.run, lambda: known, tmp_path)
    (verdict, message, remedy), (whole, *_), *_ = preflight.CHECKS["groups"](node)
    assert (verdict, whole) == (WARN, PASS)
    for word in (f"512 bytes: {usual}", "4096 bytes", "pvmove"):
        assert word in message + remedy
