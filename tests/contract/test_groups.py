"""Groups that Carver makes of vacant devices or on a file; it refuses anything else."""

import logging
from dataclasses import replace
from pathlib import Path

import configured
import pytest
from fakes.host import FakeHost
from laying import lay
from real.any import AnyHost

from agent.core import errors
from agent.groups.group_definitions import GroupDefinitions
from agent.settings.classes import DeviceClass
from agent.settings.settings import BackingFile, Config, GroupDefinition
from lvm import report
from lvm.lvm2 import Lvm
from lvm.room import Room
from mount import loop

MIB = 1 << 20
DISK = 33 * MIB


def of_devices(tmp_path: Path, group: str, *devices: str) -> Config:
    """A group to be made of devices, to which lvm2 is confined."""
    return configured.carver(
        tmp_path, group, devices=devices, definitions=(GroupDefinition(group, devices),)
    )


def disks(lvm: Lvm, group: str) -> list[str]:
    return sorted(disk.name for disk in report.read(lvm).group(group).disks)


def refusal(lvm: Lvm, laid: GroupDefinitions, group: str) -> str:
    with pytest.raises(errors.GroupRefused) as refused:
        laid.group(report.read(lvm), group)
    return str(refused.value)


def refused(host: AnyHost, tmp_path: Path, group: str, *devices: str) -> str:
    """Why a group of these devices is not made."""
    return refusal(*lay(host, of_devices(tmp_path, group, *devices)), group)


@pytest.fixture
def name(tmp_path: Path) -> str:
    """A group that is not there."""
    return f"made-{tmp_path.parent.name[-6:]}-{tmp_path.name[-20:]}".replace("_", "-")[:40]


def test_a_group_is_made_of_blank_devices_by_one_command_once(
    host: AnyHost, tmp_path: Path, name: str
) -> None:
    devices = [host.new_device(DISK) for _ in range(3)]
    config = of_devices(tmp_path, name, *devices)

    lvm, laid = lay(host, config)
    assert disks(lvm, name) == sorted(devices)
    assert laid.failures == {}
    made = laid.group(report.read(lvm), name)
    assert Room(made).free_extents == 3 * 8
    assert [words[1] for words in host.commands if words[0] == "lvm"].count("vgcreate") == 1

    host.commands.clear()
    again, laid = lay(host, config)
    assert len(host.commands) == 1
    assert laid.group(report.read(again), name).uuid == made.uuid


@pytest.mark.parametrize("contents", ["ext4", "dos"])
def test_a_device_that_holds_something_is_refused_and_no_other_is_touched(
    host: AnyHost, tmp_path: Path, name: str, contents: str
) -> None:
    blank, other, last = (host.new_device(DISK) for _ in range(3))
    if contents == "dos":
        host.partition(other)
    else:
        host.write(other, contents)
    why = refused(host, tmp_path, name, blank, other, last)
    for word in (name, other, "restart Carver", f"holds {contents}", "docs/install.md"):
        assert word in why
    assert not [words for words in host.commands if "vgcreate" in words]
    assert name not in report.read(host.lvm).groups


def test_a_device_that_is_mounted_is_refused(host: AnyHost, tmp_path: Path, name: str) -> None:
    device, place = host.new_device(DISK), host.directory / "place"
    place.mkdir()
    host.write(device, "ext4")
    host.kernel.mount(device, str(place), "ext4", set(), [])
    assert f"{device} is mounted at {place}" in refused(host, tmp_path, name, device)
    host.kernel.unmount(str(place))


def test_a_device_that_is_read_only_missing_or_no_device_is_refused(
    host: AnyHost, tmp_path: Path, name: str
) -> None:
    file = tmp_path / "disk"
    file.write_bytes(bytes(MIB))
    device = host.kernel.loop_free()
    host.kernel.loop_configure(device, str(file), read_only=True, direct_io=False, name="")
    try:
        for path, word in (
            (device, "is read-only"),
            (str(file), "is not a usable block device"),
            ("/dev/carver-none", "is not there"),
        ):
            assert f"{path} {word}" in refused(host, tmp_path, name, path)
    finally:
        loop.detach(host.kernel, device)


def test_a_device_of_another_group_is_refused(host: AnyHost, tmp_path: Path, name: str) -> None:
    first, second = host.new_device(DISK), host.new_device(DISK)
    lay(host, of_devices(tmp_path, f"{name}-1", first))
    config = replace(of_devices(tmp_path, name, second, first), devices=(first, second))
    lvm, laid = lay(host, config)
    assert f"{first} holds LVM2_member" in refusal(lvm, laid, name)
    assert set(report.read(lvm).groups) == {f"{name}-1"}


def test_one_device_by_two_names_is_refused(host: AnyHost, tmp_path: Path, name: str) -> None:
    device, link = host.new_device(DISK), tmp_path / "link"
    link.symlink_to(device)
    if isinstance(host, FakeHost):
        host.block.link(str(link), device)
    assert "same device" in refused(host, tmp_path, name, device, str(link))


def test_a_vgcreate_that_was_killed_half_way_is_finished(
    host: AnyHost, group: str, tmp_path: Path, name: str
) -> None:
    devices = [host.new_device(DISK) for _ in range(2)]
    host.label(devices[0])
    known = report.read(host.lvm)
    assert group in known.groups
    assert known.orphans == (devices[0],)
    lvm, laid = lay(host, of_devices(tmp_path, name, *devices))
    assert laid.failures == {}
    assert disks(lvm, name) == sorted(devices)


@pytest.mark.variation
def test_a_device_that_is_listed_later_is_reported_and_not_added(
    host: AnyHost, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, blank, full = (host.new_device(DISK) for _ in range(3))
    lay(host, of_devices(tmp_path, name, first))
    host.write(full, "ext4")
    with caplog.at_level(logging.WARNING):
        lvm, laid = lay(host, of_devices(tmp_path, name, first, blank, full))
    [area] = {one.metadata_bytes for one in report.read(lvm).group(name).disks}
    assert f"vgextend --metadatasize {area >> 10}k {name} {blank}" in caplog.text
    assert f"{full} holds ext4" in caplog.text
    known = report.read(lvm)
    assert laid.absent(laid.group(known, name)) == [blank, full]
    assert disks(lvm, name) == [first]


@pytest.mark.long_on_lvm
def test_a_group_of_that_name_on_other_disks_is_refused_unless_carver_made_it(
    host: AnyHost, group: str, tmp_path: Path, name: str
) -> None:
    listed, other = host.new_device(DISK), host.new_device(DISK)
    config = of_devices(tmp_path, group, listed)
    there = [disk.name for disk in report.read(host.lvm).group(group).disks]
    lvm, laid = lay(host, replace(config, devices=(listed, *there)))
    assert "which Carver did not make" in refusal(lvm, laid, group)
    assert sorted(there) == disks(lvm, group)

    lay(host, of_devices(tmp_path, name, other))
    renamed = replace(of_devices(tmp_path, name, listed), devices=(listed, other))
    lvm, laid = lay(host, renamed)
    assert laid.group(report.read(lvm), name).name == name


def test_groups_on_files_come_back_when_their_loop_devices_are_gone(
    host: AnyHost, tmp_path: Path, name: str
) -> None:
    names = [f"{name}-{number}" for number in range(2)]
    files = [BackingFile(tmp_path / "state" / one, 65 * MIB) for one in names]
    pairs = zip(names, files, strict=True)
    config = configured.carver(
        tmp_path,
        classes=tuple(DeviceClass(name=one, group=one) for one in names),
        definitions=tuple(GroupDefinition(one, file=file) for one, file in pairs),
    )
    lvm, laid = lay(host, config)
    assert laid.failures == {}
    uuids = {one: laid.group(report.read(lvm), one).uuid for one in names}
    assert set(uuids) == set(report.read(lvm).groups), "lvm2 is confined to the files"
    for file in files:
        assert file.path.stat().st_size == 65 * MIB
        assert file.path.stat().st_blocks * 512 < 8 * MIB, "sparse"

    for device in lvm.devices:
        loop.detach(host.kernel, device)
    lvm, laid = lay(host, config)
    try:
        assert {one: laid.group(report.read(lvm), one).uuid for one in names} == uuids
    finally:
        for device in lvm.devices:
            loop.detach(host.kernel, device)


def test_a_file_has_blocks_of_its_own_where_lvm2_keeps_the_group(
    host: AnyHost, tmp_path: Path, name: str
) -> None:
    # A power loss takes blocks back that were given to a hole just before.
    definition = GroupDefinition(name, file=BackingFile(tmp_path / "f", 65 * MIB))
    lvm, laid = lay(host, configured.carver(tmp_path, name, definitions=(definition,)))
    [device] = lvm.devices
    try:
        assert laid.failures == {}
        assert host.written_bytes(device) >= MIB
    finally:
        loop.detach(host.kernel, device)


def test_a_group_that_cannot_be_made_leaves_the_others_alone(
    host: AnyHost, tmp_path: Path, name: str
) -> None:
    good, bad = host.new_device(DISK), host.new_device(DISK)
    host.write(bad, "ext4")
    classes = DeviceClass("good", name, default=True), DeviceClass("bad", f"{name}-bad")
    definitions = GroupDefinition(f"{name}-bad", (bad,)), GroupDefinition(name, (good,))
    config = configured.carver(
        tmp_path, classes=classes, devices=(good, bad), definitions=definitions
    )
    lvm, laid = lay(host, config)
    assert laid.group(report.read(lvm), name).name == name
    assert "holds ext4" in refusal(lvm, laid, f"{name}-bad")


@pytest.mark.variation
def test_listed_devices_are_marked_as_fast_once(host: AnyHost, tmp_path: Path, name: str) -> None:
    slow, fast = host.new_device(DISK), host.new_device(DISK)
    config = of_devices(tmp_path, name, slow, fast)
    lay(host, config)
    marked = replace(config, definitions=(GroupDefinition(name, (slow, fast), fast=(fast,)),))
    for commands in (2, 1):
        host.commands.clear()
        lvm, laid = lay(host, marked)
        assert len(host.commands) == commands
        group = laid.group(report.read(lvm), name)
        assert [disk.name for disk in group.disks if disk.fast] == [fast]
        assert (Room(group).free_extents, Room(group).fast_extents) == (8, 8)


def test_lvm2_sees_the_listed_devices_alone_where_every_group_is_an_operator_s(
    host: AnyHost, tmp_path: Path
) -> None:
    group, listed = host.new_group(5), host.new_device(24 << 20)
    lvm, _ = lay(host, configured.carver(tmp_path, group, devices=(listed,)))
    assert lvm.devices == (listed,)
