"""What is known without a command: a group's disks, changes of its metadata, status of volumes."""

from functools import partial

import expect
from real.any import AnyHost, device

from lvm import layout, names, report, volumes
from lvm.candidate_devices import Excluded, ExclusionReason
from lvm.devicemapper import Raid
from lvm.disk_reader import Fingerprint
from lvm.labels import PhysicalLabel
from lvm.layout import Layout
from lvm.room import Room

MIB = 1 << 20


def fingerprint(host: AnyHost, group: str) -> Fingerprint:
    """The state of a group's metadata."""
    disks = report.read(host.lvm).group(group).disks
    found = host.disks.fingerprint([disk.name for disk in disks])
    assert found is not None
    return found


def test_a_scan_names_the_disks_of_a_group_as_lvm2_does(host: AnyHost) -> None:
    name = host.new_group(20, 10)
    volumes.create(host.lvm, name, volumes.New("a", 4 * MIB, {}))
    group = report.read(host.lvm).group(name)
    host.commands.clear()
    found = host.disks.scan()
    excluded = [
        (one.reason, one.other_device) for one in found.values() if isinstance(one, Excluded)
    ]
    assert (ExclusionReason.VOLUME, names.device(name, "a")) in excluded
    for disk in group.disks:
        label = found[disk.name]
        assert isinstance(label, PhysicalLabel)
        assert (label.uuid, label.is_used, label.damage) == (disk.uuid, True, ())
        assert label.group is not None
        assert (label.group.name, label.group.uuid) == (group.name, group.uuid)
        assert sorted(label.group.disk_uuids) == sorted(one.uuid for one in group.disks)
        assert not label.group.is_exported
    assert host.commands == []


def test_a_disk_without_a_group_is_found_and_a_blank_one_is_not(host: AnyHost) -> None:
    labelled, blank = host.new_device(33 * MIB), host.new_device(33 * MIB)
    host.label(labelled)
    found = host.disks.scan()
    label = found[labelled]
    assert isinstance(label, PhysicalLabel)
    assert (label.is_used, label.group) == (False, None)
    assert blank not in found
    assert host.disks.fingerprint([labelled]) is None
    assert host.disks.fingerprint([blank]) is None
    assert host.disks.fingerprint([]) is None


def test_a_fingerprint_changes_with_each_change_of_the_metadata(host: AnyHost) -> None:
    group, other = host.new_group(20, 10), host.new_group(9)
    before, of_other = fingerprint(host, group), fingerprint(host, other)
    for change in (
        partial(volumes.create, host.lvm, group, volumes.New("a", 4 * MIB, {})),
        partial(volumes.extend, host.lvm, group, "a", size_bytes=8 * MIB),
        partial(volumes.mark, host.lvm, group, "a", old_tags={}, new_tags={"formatted": "ext4"}),
        partial(volumes.remove, host.lvm, group, "a"),
    ):
        change()
        after = fingerprint(host, group)
        # On each disk.
        assert not set(after) & set(before)
        assert fingerprint(host, group) == after
        before = after
    assert fingerprint(host, other) == of_other


def test_a_fingerprint_stays_while_volumes_come_into_use_and_are_written(host: AnyHost) -> None:
    group = host.new_group(20)
    volumes.create(host.lvm, group, volumes.New("a", 4 * MIB, {}))
    before = fingerprint(host, group)
    host.deactivate(group, "a")
    volumes.activate(host.lvm, group, "a")
    host.write_bytes(device(host, group, "a"), 0, b"x" * 4096)
    assert fingerprint(host, group) == before


def test_a_raid_has_a_status_of_its_images_and_a_linear_volume_none(host: AnyHost) -> None:
    group = host.new_group(20, 20, 20)
    for name, shape in (("web", Layout("raid1", mirrors=1)), ("plain", Layout())):
        disks = layout.placement(Room(report.read(host.lvm).group(group)), shape)
        new = volumes.New(name, 16 * MIB, {})
        volumes.create(host.lvm, group, new, layout=shape, disks=disks)
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
    host.deactivate(group, "web")
    host.deactivate(group, "plain")
    assert host.devices.status(group, "web") == ()
    assert host.devices.active(group) == ()


def test_a_volume_is_closed_while_nothing_has_it_open(host: AnyHost) -> None:
    group = host.new_group(20)
    volumes.create(host.lvm, group, volumes.New("a", 8 * MIB, {}))
    place = host.directory / "a"
    place.mkdir()
    host.write(device(host, group, "a"), "ext4")
    expect.soon(lambda: host.devices.is_closed(group, "a"))
    host.kernel.mount(device(host, group, "a"), str(place), "ext4", set(), ())
    assert host.devices.is_open(group, "a")
    assert not host.devices.is_closed(group, "a")
    host.kernel.unmount(str(place))
    expect.soon(lambda: host.devices.is_closed(group, "a"))
    host.deactivate(group, "a")
    for name in ("a", "none"):
        assert host.devices.is_closed(group, name)
        assert not host.devices.is_open(group, name)
