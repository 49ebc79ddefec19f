"""What device-mapper tells of volumes that are active, without a command."""

from real.any import AnyHost

from lvm import layout, report, volumes
from lvm.devicemapper import Raid
from lvm.layout import Layout

MIB = 1 << 20


def make(host: AnyHost, group: str, name: str, shape: Layout) -> None:
    disks = layout.placement(report.read(host.lvm).group(group), shape)
    new = volumes.New(name, 16 * MIB, {})
    volumes.create(host.lvm, group, new, layout=shape, disks=disks)


def test_a_raid_volume_tells_of_its_images_and_a_linear_one_of_nothing(host: AnyHost) -> None:
    group = host.new_group(20, 20, 20)
    make(host, group, "web", Layout("raid1", mirrors=1))
    make(host, group, "plain", Layout())
    host.commands.clear()

    (status,) = host.devices.status(group, "web")
    assert isinstance(status, Raid)
    assert (status.size_bytes, status.kind, len(status.health)) == (16 * MIB, "raid1", 2)
    assert set(status.health) <= {"A", "a"}
    assert host.devices.status(group, "plain") == ()
    assert host.devices.status(group, "none") == ()
    # With lvm2's own parts on a real machine.
    assert {"web", "plain"} <= set(host.devices.active(group))
    assert host.devices.active("no" + group) == ()
    assert host.commands == []


def test_a_volume_that_is_not_active_has_no_status(host: AnyHost) -> None:
    group = host.new_group(20, 20)
    make(host, group, "web", Layout("raid1", mirrors=1))
    host.deactivate(group, "web")
    assert host.devices.status(group, "web") == ()
    assert host.devices.active(group) == ()
