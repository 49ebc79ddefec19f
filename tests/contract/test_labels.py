"""How a group's disks are found, and how it is seen that its metadata changed: by no command."""

from collections.abc import Callable

import pytest
from real.any import AnyHost, device

from lvm import names, report, volumes
from lvm.blockdevices import Excluded, Why
from lvm.disks import Fingerprint
from lvm.labels import PhysicalLabel

MIB = 1 << 20


def fingerprint(host: AnyHost, group: str) -> Fingerprint:
    """What proves a group's metadata."""
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
    excluded = [(one.why, one.by) for one in found.values() if isinstance(one, Excluded)]
    assert (Why.VOLUME, names.device(name, "a")) in excluded
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


CHANGES: dict[str, Callable[[AnyHost, str], object]] = {
    "a volume more": lambda host, group: volumes.create(
        host.lvm, group, volumes.New("b", 4 * MIB, {})
    ),
    "a volume larger": lambda host, group: volumes.extend(host.lvm, group, "a", size_bytes=8 * MIB),
    "a tag more": lambda host, group: volumes.mark(
        host.lvm, group, "a", old={}, new={"formatted": "ext4"}
    ),
    "a volume less": lambda host, group: volumes.remove(host.lvm, group, "a"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_fingerprint_changes_with_the_metadata(host: AnyHost, change: str) -> None:
    group, other = host.new_group(20, 10), host.new_group(9)
    volumes.create(host.lvm, group, volumes.New("a", 4 * MIB, {}))
    before, of_other = fingerprint(host, group), fingerprint(host, other)
    CHANGES[change](host, group)
    after = fingerprint(host, group)
    assert after != before
    # Each disk tells.
    assert not set(after) & set(before)
    assert fingerprint(host, group) == after
    assert fingerprint(host, other) == of_other


def test_a_fingerprint_stays_while_volumes_come_into_use_and_are_written(host: AnyHost) -> None:
    group = host.new_group(20)
    volumes.create(host.lvm, group, volumes.New("a", 4 * MIB, {}))
    before = fingerprint(host, group)
    host.deactivate(group, "a")
    volumes.activate(host.lvm, group, "a")
    host.write_bytes(device(host, group, "a"), 0, b"x" * 4096)
    assert fingerprint(host, group) == before
