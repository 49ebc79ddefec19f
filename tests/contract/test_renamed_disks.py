"""The disk of a group comes back under another name, as an MD array does after a reboot."""

from pathlib import Path

import configured
import pytest
from laying import lay
from real.any import AnyHost

from agent.settings.settings import GroupDefinition
from lvm import lvm_errors, report
from lvm.room import Room

MIB = 1 << 20
# What it was called when the settings were written.
BEFORE = "/dev/md-carver-had-once"


def test_a_path_of_devices_that_is_missing_is_named(
    host: AnyHost, group: str, tmp_path: Path
) -> None:
    """By `devices` lvm2 sees no other disk, so the group is gone."""
    lvm, laid = lay(host, configured.carver(tmp_path, group, devices=(BEFORE,)))
    with pytest.raises(lvm_errors.GroupMissing) as raised:
        laid.group(report.read(lvm), group)
    for word in (group, BEFORE, "`devices`", "/dev/disk/by-id"):
        assert word in str(raised.value)


def test_a_group_that_is_missing_for_another_reason_is_not_blamed_on_the_paths(
    host: AnyHost, tmp_path: Path
) -> None:
    disk = host.new_device(201 * MIB)
    lvm, laid = lay(host, configured.carver(tmp_path, "none", devices=(disk,)))
    with pytest.raises(lvm_errors.GroupMissing) as raised:
        laid.group(report.read(lvm), "none")
    assert disk not in str(raised.value)


def test_a_group_that_carver_makes_is_found_by_its_label(host: AnyHost, tmp_path: Path) -> None:
    disk = host.new_device(201 * MIB)
    with host.own_group("fast", [disk]):
        config = configured.carver(
            tmp_path, "fast", definitions=(GroupDefinition("fast", (BEFORE,)),)
        )
        lvm, _ = lay(host, config)
        assert Room(report.read(lvm).group("fast")).free_extents == 50
