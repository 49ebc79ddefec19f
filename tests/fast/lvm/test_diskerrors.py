"""What the kernel counted against a disk is read from sysfs, through what stands on it."""

from pathlib import Path

import pytest
from fakes.sysfs import Sysfs

from lvm.disks import DiskErrors

HOUR = 3600.0


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    made = Sysfs(tmp_path / "sys")
    made.add("sda", "8:0", device__ioerr_cnt="0x3", badblocks="")
    made.add("sda1", "8:1", disk="sda")
    made.add("sdb", "8:16", device__ioerr_cnt="0x0")
    made.add("md0", "9:0", on=("sda1", "sdb"))
    made.add("nvme0n1", "259:0")
    return made


def write(sysfs: Sysfs, disk: str, file: str, text: str) -> None:
    (sysfs.root / "class/block" / disk / file).write_text(f"{text}\n")


def test_commands_that_failed_before_anyone_looked_do_not_count(sysfs: Sysfs) -> None:
    errors = DiskErrors(sysfs.root)
    assert errors.of("/dev/sda", 0.0) == ()
    write(sysfs, "sda", "device/ioerr_cnt", "0x5")
    assert errors.of("/dev/sda", 10.0) == ("2 command(s) to sda failed within the last hour",)


def test_what_failed_is_told_for_an_hour_and_does_not_come_back_with_what_fails_later(
    sysfs: Sysfs,
) -> None:
    errors = DiskErrors(sysfs.root)
    errors.of("/dev/sda", 0.0)
    write(sysfs, "sda", "device/ioerr_cnt", "0x4")
    assert errors.of("/dev/sda", 10.0)
    assert errors.of("/dev/sda", HOUR)
    assert errors.of("/dev/sda", HOUR + 10) == ()
    write(sysfs, "sda", "device/ioerr_cnt", "0x5")
    [told] = errors.of("/dev/sda", HOUR + 20)
    assert told.startswith("1 command(s)")


def test_a_disk_that_was_replaced_begins_anew(sysfs: Sysfs) -> None:
    errors = DiskErrors(sysfs.root)
    errors.of("/dev/sda", 0.0)
    write(sysfs, "sda", "device/ioerr_cnt", "0x1")
    assert errors.of("/dev/sda", 10.0) == ()


def test_sectors_that_cannot_be_read_are_told_until_they_can(sysfs: Sysfs) -> None:
    errors = DiskErrors(sysfs.root)
    write(sysfs, "sda", "badblocks", "100 8\n4000 1")
    for _ in range(2):
        assert errors.of("/dev/sda", 0.0) == ("sda has 2 range(s) of sectors that cannot be read",)
    write(sysfs, "sda", "badblocks", "")
    assert errors.of("/dev/sda", 0.0) == ()


def test_the_disks_below_a_stack_are_looked_at(sysfs: Sysfs) -> None:
    errors = DiskErrors(sysfs.root)
    errors.of("/dev/md0", 0.0)
    write(sysfs, "sda", "device/ioerr_cnt", "0x4")
    write(sysfs, "sdb", "device/ioerr_cnt", "0x1")
    assert len(errors.of("/dev/md0", 10.0)) == 2


def test_a_disk_without_counters_or_without_itself_has_no_errors(sysfs: Sysfs) -> None:
    errors = DiskErrors(sysfs.root)
    assert errors.of("/dev/nvme0n1", 0.0) == ()
    assert errors.of("/dev/gone", 0.0) == ()
