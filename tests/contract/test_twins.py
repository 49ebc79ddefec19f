"""Disks that claim to be a group's: it is used as before, and they are reported and ignored."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import configured
import pytest
from csi_client import Client
from fakes import images
from fakes.host import FakeHost
from fakes.images import Area, Image, metadata
from real.any import AnyHost
from serving import served

from agent.csi.client import block, mounted, of_snapshot
from agent.daemon.server import Service
from lvm import report
from mount.filesystem import Signature

MIB = 1 << 20
TakeAway = Callable[[], object]


def own_disks(host: AnyHost, group: str) -> list[str]:
    return sorted(one.name for one in report.read(host.lvm).group(group).disks)


def of_its_name(host: AnyHost, group: str, disks: Sequence[str]) -> TakeAway:
    """What comes with a disk of another node: a group of the same name."""
    if isinstance(host, FakeHost):
        host.lvm2.add_group("twin", [10]).name = group
        return lambda: host.lvm2.groups.pop("twin")
    return forged(host, group, "Forged-p234-5678-9abc-defg-hijk-lmnopq", disks[0])


def of_its_name_and_uuid(host: AnyHost, group: str, disks: Sequence[str]) -> TakeAway:
    """What a tenant writes who knows both: newer than the group's own metadata."""
    uuid = report.read(host.lvm).group(group).uuid
    if isinstance(host, FakeHost):
        take_away = of_its_name(host, group, disks)
        twin = host.lvm2.groups["twin"]
        twin.uuid, twin.seqno = uuid, 10_000
        return take_away
    return forged(host, group, uuid, disks[0])


def forged(host: AnyHost, group: str, uuid: str, disk: str) -> TakeAway:
    """A label of a group of one disk, written without lvm2."""
    text = metadata(10_000).decode().replace(images.GROUP_UUID, uuid)
    text = re.sub(r"^data {", f"{group} {{", text, count=1, flags=re.MULTILINE)
    host.write_bytes(disk, 0, bytes(Image([Area(text=text.encode())]).bytes()))
    return lambda: host.erase(disk)


def copied_whole(host: AnyHost, group: str, disks: Sequence[str]) -> TakeAway:
    """What `dd` of the group's disks makes, changed since."""
    if isinstance(host, FakeHost):
        data = host.lvm2.groups[group]
        twins = [replace(one, name=f"/dev/fake-twin-{at}") for at, one in enumerate(data.disks)]
        host.lvm2.groups["twin"] = replace(data, disks=twins, seqno=data.seqno + 99, volumes={})
        return lambda: host.lvm2.groups.pop("twin")
    for own, copy in zip(own_disks(host, group), disks, strict=True):
        host.write_bytes(copy, 0, host.read_bytes(own, 0, MIB))
    copies = replace(host.lvm, devices=tuple(disks))
    for number in range(9):
        copies("vgchange", "--addtag", f"copy{number}", "--", group)
    return lambda: list(map(host.erase, disks))


def one_disk_copied(host: AnyHost, group: str, disks: Sequence[str]) -> TakeAway:
    """What `dd` of the start of one of the group's disks does: a twin by its full UUID."""
    own = own_disks(host, group)[0]
    if isinstance(host, FakeHost):
        [uuid] = [one.uuid for one in host.lvm2.groups[group].disks if one.name == own]
        host.block.get(disks[0]).contents = Signature("LVM2_member", "raid", uuid, "used")
    else:
        host.write_bytes(disks[0], 0, host.read_bytes(own, 0, MIB))
    return lambda: host.erase(disks[0])


Twin = Callable[[AnyHost, str, Sequence[str]], TakeAway]
TWINS: tuple[Twin, ...] = (of_its_name, of_its_name_and_uuid, copied_whole, one_disk_copied)
every_twin = pytest.mark.parametrize(
    "twin",
    [pytest.param(one, marks=[pytest.mark.variation] * (one is not of_its_name)) for one in TWINS],
    ids=lambda one: one.__name__,
)


def use(client: Client, name: str, directory: Path) -> None:
    """Make each kind of call that changes the group, or reports on it."""
    free = client.capacity()
    volume = client.create(name, 16 * MIB, mounted("ext4"))
    staging, target = directory / f"{name}-staging", directory / f"{name}-target"
    client.stage(volume, staging, mounted("ext4"))
    client.publish(volume, staging, target, mounted("ext4"))
    snapshot = client.snapshot(f"{name}-snapshot", volume.volume_id)
    source = of_snapshot(snapshot.snapshot_id)
    client.delete(client.create(f"{name}-restored", 0, block(), source=source).volume_id)
    client.delete_snapshot(snapshot.snapshot_id)
    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
    client.expand(volume.volume_id, 32 * MIB)
    assert volume.volume_id in {one.volume_id for one in client.volumes()}
    client.delete(volume.volume_id)
    assert client.capacity() == free


def problems(client: Client) -> dict[str, str]:
    """The problems of the storage, by the reason."""
    return {one.reason: one.message for one in client.storage_health()}


@every_twin
def test_a_twin_of_a_group_in_use_is_reported_and_ignored(
    host: AnyHost, group: str, service: Service, client: Client, tmp_path: Path, twin: Twin
) -> None:
    disks = [host.new_device(480 * MIB) for _ in range(2)]
    # lvm2 may see all disks of this host that are there by now.
    service.volume_groups.node.devices = host.lvm.devices
    volume = client.create("kept", 16 * MIB, block())
    take_away = twin(host, group, disks)
    # As udev tells.
    service.volume_groups.outdate()

    use(client, "new", tmp_path)

    assert [one.volume_id for one in client.volumes()] == [volume.volume_id]
    message = problems(client)["DiskIgnored"]
    assert "is not used for volume group" in message
    assert "global_filter" in message
    take_away()
    service.volume_groups.outdate()
    client.delete(volume.volume_id)
    assert "DiskIgnored" not in problems(client)


@pytest.mark.variation
@every_twin
def test_a_twin_from_before_the_start_is_reported_and_ignored(
    host: AnyHost, group: str, tmp_path: Path, twin: Twin
) -> None:
    config = configured.carver(tmp_path, group)
    with served(host, config) as (_, client):
        volume = client.create("kept", 16 * MIB, block())
    disks = [host.new_device(480 * MIB) for _ in range(2)]
    take_away = twin(host, group, disks)

    with served(host, config) as (_, client):
        use(client, "new", tmp_path)
        assert "DiskIgnored" in problems(client)
        client.delete(volume.volume_id)
    take_away()
    assert not report.read(host.lvm).group(group).volumes
