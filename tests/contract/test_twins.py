"""Disks that claim to be a group's: it is used as before, and they are reported and ignored."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import configured
import pytest
from csi_client import Client
from fakes import images
from fakes.host import FakeHost
from fakes.images import Area, Image, metadata
from real.any import AnyHost

from agent.core.host import Host
from agent.core.settings import Config
from agent.csi.client import block, mounted, of_snapshot
from agent.daemon.server import Service
from lvm import report
from lvm.lvm2 import Lvm
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

    def take_away() -> None:
        for one in disks:
            host.erase(one)

    return take_away


def one_disk_copied(host: AnyHost, group: str, disks: Sequence[str]) -> TakeAway:
    """What `dd` of the start of one of the group's disks does: a twin by its full UUID."""
    own = own_disks(host, group)[0]
    if isinstance(host, FakeHost):
        [uuid] = [one.uuid for one in host.lvm2.groups[group].disks if one.name == own]
        host.block.get(disks[0]).contents = Signature("LVM2_member", "raid", uuid, "used")
    else:
        host.write_bytes(disks[0], 0, host.read_bytes(own, 0, MIB))
    return lambda: host.erase(disks[0])


TWINS = (of_its_name, of_its_name_and_uuid, copied_whole, one_disk_copied)
every_twin = pytest.mark.parametrize("twin", TWINS, ids=lambda one: one.__name__)


@contextmanager
def serving(host: AnyHost, config: Config, lvm: Lvm) -> Iterator[tuple[Service, Client]]:
    """Carver as it starts, on a socket of its own."""
    machine = Host(host.run, host.kernel, host.devices, host.disks, stream=host.stream)
    service = Service(config, machine, lvm)
    service.eraser.grace_seconds = service.copier.grace_seconds = 600
    service.start(config.endpoint)
    try:
        with Client(config.endpoint) as client:
            yield service, client
    finally:
        service.stop()


def use(client: Client, name: str, directory: Path) -> None:
    """Each kind of call that changes the group, or tells of it."""
    free = client.capacity()
    volume = client.create(name, 16 * MIB, mounted("ext4"))
    staging, target = directory / f"{name}-staging", directory / f"{name}-target"
    client.stage(volume, staging, mounted("ext4"))
    client.publish(volume, staging, target, mounted("ext4"))
    snapshot = client.snapshot(f"{name}-snapshot", volume.volume_id)
    restored = client.create(
        f"{name}-restored", 0, block(), source=of_snapshot(snapshot.snapshot_id)
    )
    client.delete(restored.volume_id)
    client.delete_snapshot(snapshot.snapshot_id)
    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
    client.expand(volume.volume_id, 32 * MIB)
    assert volume.volume_id in {one.volume_id for one in client.volumes()}
    client.delete(volume.volume_id)
    assert client.capacity() == free


def told(client: Client) -> dict[str, str]:
    """What is said against the storage, by the reason."""
    return {one.reason: one.message for one in client.storage_health()}


@every_twin
def test_a_twin_that_comes_while_the_group_is_in_use_is_reported_and_ignored(
    host: AnyHost,
    group: str,
    service: Service,
    client: Client,
    tmp_path: Path,
    twin: Callable[[AnyHost, str, Sequence[str]], TakeAway],
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
    message = told(client)["DiskIgnored"]
    assert "is not used for volume group" in message
    assert "global_filter" in message
    take_away()
    service.volume_groups.outdate()
    client.delete(volume.volume_id)
    assert "DiskIgnored" not in told(client)


@every_twin
def test_a_twin_that_was_there_at_the_start_is_reported_and_ignored(
    host: AnyHost,
    group: str,
    tmp_path: Path,
    twin: Callable[[AnyHost, str, Sequence[str]], TakeAway],
) -> None:
    config = configured.carver(tmp_path, group)
    with serving(host, config, host.lvm) as (_, client):
        volume = client.create("kept", 16 * MIB, block())
    disks = [host.new_device(480 * MIB) for _ in range(2)]
    take_away = twin(host, group, disks)

    with serving(host, config, host.lvm) as (_, client):
        use(client, "new", tmp_path)
        assert "DiskIgnored" in told(client)
        client.delete(volume.volume_id)
    take_away()
    assert not report.read(host.lvm).group(group).volumes
