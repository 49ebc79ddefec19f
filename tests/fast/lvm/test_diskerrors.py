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


@pytest.fixture
def errors(sysfs: Sysfs) -> DiskErrors:
    return DiskErrors(sysfs.root)


def write(sysfs: Sysfs, disk: str, file: str, text: str) -> None:
    (sysfs.root / "class/block" / disk / file).write_text(f"{text}\n")


def test_commands_that_failed_before_the_first_look_do_not_count(
    sysfs: Sysfs, errors: DiskErrors
) -> None:
    assert errors.of("/dev/sda", 0.0) == ()
    write(sysfs, "sda", "device/ioerr_cnt", "0x5")
    assert errors.of("/dev/sda", 10.0) == ("2 command(s) to sda failed within the last hour",)


def test_a_failed_command_is_reported_for_an_hour(sysfs: Sysfs, errors: DiskErrors) -> None:
    errors.of("/dev/sda", 0.0)
    write(sysfs, "sda", "device/ioerr_cnt", "0x4")
    assert errors.of("/dev/sda", 10.0)
    assert errors.of("/dev/sda", HOUR)
    assert errors.of("/dev/sda", HOUR + 10) == ()
    write(sysfs, "sda", "device/ioerr_cnt", "0x5")
    [error] = errors.of("/dev/sda", HOUR + 20)
    assert error.startswith("1 command(s)")
    # A disk that was replaced begins anew.
    write(sysfs, "sda", "device/ioerr_cnt", "0x1")
    assert errors.of("/dev/sda", HOUR + 30) == ()


def test_bad_sectors_are_reported_until_they_are_gone(sysfs: Sysfs, errors: DiskErrors) -> None:
    write(sysfs, "sda", "badblocks", "100 8\n4000 1")
    for _ in range(2):
        assert errors.of("/dev/sda", 0.0) == ("sda has 2 range(s) of sectors that cannot be read",)
    write(sysfs, "sda", "badblocks", "")
    assert errors.of("/dev/sda", 0.0) == ()


def test_the_errors_of_all_disks_below_count(sysfs: Sysfs, errors: DiskErrors) -> None:
    errors.of("/dev/md0", 0.0)
    write(sysfs, "sda", "device/ioerr_cnt", "0x4")
    write(sysfs, "sdb", "device/ioerr_cnt", "0x1")
    assert len(errors.of("/dev/md0", 10.0)) == 2


def test_a_disk_without_counters_and_a_missing_one_have_no_errors(errors: DiskErrors) -> None:
    assert errors.of("/dev/nvme0n1", 0.0) == ()
    assert errors.of("/dev/gone", 0.0) == ()
