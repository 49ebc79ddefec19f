"""A twin of a group, or of one of its disks: nobody can tell which is meant, so neither is used."""

from collections.abc import Callable
from dataclasses import replace

import expect
import pytest
from fakes.host import FakeHost
from real.any import AnyHost

from agent.csi.client import Client, block
from agent.service.server import Service
from lvm import report
from mount.filesystem import Signature

MIB = 1 << 20


def copied(host: AnyHost, group: str, disk: str) -> Callable[[], object]:
    """What `dd` of the start of one of the group's disks does: a twin by its full UUID."""
    own = report.read(host.lvm).group(group).disks[0]
    if isinstance(host, FakeHost):
        host.block.get(disk).contents = Signature("LVM2_member", "raid", own.uuid, "used")
    else:
        host.write_bytes(disk, 0, host.read_bytes(own.name, 0, MIB))
    return lambda: host.erase(disk)


def called_alike(host: AnyHost, group: str, disk: str) -> Callable[[], object]:
    """What comes with a disk of another node: a group of the same name."""
    if isinstance(host, FakeHost):
        host.lvm2.add_group("twin", [10]).name = group
        return lambda: host.lvm2.groups.pop("twin")
    # As where nothing of the group's own is active: what its volumes are called is in /dev.
    host.lvm("vgchange", "--activate", "n", "--", group)
    alone = replace(host.lvm, devices=(disk,))
    alone("vgcreate", "--yes", "--", group, disk)

    def take_away() -> None:
        alone("vgremove", "--force", "--yes", "--", group)
        host.lvm("vgchange", "--activate", "y", "--ignoreactivationskip", "--", group)

    return take_away


@pytest.mark.parametrize(
    ("twin", "words"),
    [(copied, ("copy", "vgimportclone")), (called_alike, ("2 of that name", "vgrename"))],
    ids=["a copy of a disk", "a group of its name"],
)
def test_a_twin_is_refused_and_told_and_nothing_has_changed_when_it_is_gone(
    host: AnyHost,
    group: str,
    service: Service,
    client: Client,
    twin: Callable[[AnyHost, str, str], Callable[[], object]],
    words: tuple[str, ...],
) -> None:
    disk = host.new_device(48 * MIB)
    # lvm2 may see all disks of this host that are there by now.
    service.engines.node.devices = host.lvm.devices
    volume = client.create("kept", 16 * MIB, block())
    before = report.read(host.lvm).group(group)
    take_away = twin(host, group, disk)
    # As udev tells.
    service.engines.outdate()
    # The scheduler takes another node for a new one.
    with expect.code("RESOURCE_EXHAUSTED", *words):
        client.create("new", 16 * MIB, block())
    for call in (
        lambda: client.delete(volume.volume_id),
        lambda: client.expand(volume.volume_id, 32 * MIB),
        client.volumes,
    ):
        with expect.code("FAILED_PRECONDITION", *words):
            call()
    take_away()
    service.engines.outdate()
    assert report.read(host.lvm).group(group) == before
    assert [one.volume_id for one in client.volumes()] == [volume.volume_id]
    client.delete(volume.volume_id)
