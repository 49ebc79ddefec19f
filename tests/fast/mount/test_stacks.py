"""What sysfs tells of the disks below a device: whether they zero, and what a discard leaves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.sysfs import LVM, Sysfs

from mount import calls, stacks
from mount.stacks import Stack

EXT4, NFS = 0xEF53, 0x6969
WRITE_SAME = {"zeroing_mode": "writesame_16_unmap", "provisioning_mode": "writesame_16"}


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path)


def queue(zeroes: int = 4096, discards: int = 4096) -> dict[str, Any]:
    return {
        "queue__write_zeroes_max_bytes": str(zeroes),
        "queue__discard_max_bytes": str(discards),
    }


def add(sysfs: Sysfs, name: str, **more: Any) -> None:
    sysfs.add(name, f"8:{len(list(sysfs.root.glob('class/block/*')))}", **queue() | more)


def scsi(sysfs: Sysfs, name: str, **attributes: str) -> None:
    """A SCSI disk; `attributes` are those of its driver."""
    add(sysfs, name)
    disk = place(sysfs, name).resolve() / "device/scsi_disk/0:0:0:0"
    disk.mkdir(parents=True)
    for file, text in attributes.items():
        (disk / file).write_text(f"{text}\n")


def volume(sysfs: Sysfs, name: str, *on: str, **more: Any) -> None:
    add(sysfs, name, on=on, dm__uuid=LVM, dm__name=f"data-{name}", **more)


def place(sysfs: Sysfs, name: str) -> Path:
    return sysfs.root / "class/block" / name


def stack(sysfs: Sysfs, name: str) -> Stack:
    return stacks.read(place(sysfs, name))


def unseen(_loop: str, path: str) -> int:
    raise FileNotFoundError(path)


def doubt(sysfs: Sysfs, name: str, look: Callable[[str, str], int] = unseen) -> str:
    """The doubt about one disk, which the volume on it has too."""
    [(disk, why)] = stacks.discard_doubts(place(sysfs, name), look).items() or [(name, "")]
    assert disk == name
    volume(sysfs, "dm-9", name)
    assert stacks.discard_doubts(place(sysfs, "dm-9"), look) == ({name: why} if why else {})
    return why


@pytest.mark.parametrize(("written", "zeroes"), [("0", False), ("65536", True)])
def test_a_device_zeroes_as_its_own_queue_says(sysfs: Sysfs, written: str, zeroes: bool) -> None:
    add(sysfs, "sda")
    volume(sysfs, "dm-0", "sda", queue__write_zeroes_max_bytes=written)
    assert stack(sysfs, "dm-0") == Stack(zeroes, is_plain=True, disks=frozenset({"sda"}))


def test_a_kernel_that_says_nothing_zeroes_nothing(sysfs: Sysfs) -> None:
    sysfs.add("sda", "8:0")
    assert not stack(sysfs, "sda").has_write_zeroes


def test_a_partition_is_what_its_disk_is(sysfs: Sysfs) -> None:
    add(sysfs, "sda")
    sysfs.add("sda1", "8:1", disk="sda")
    volume(sysfs, "dm-0", "sda1")
    for one in ("sda1", "dm-0"):
        assert stack(sysfs, one) == Stack(True, is_plain=True, disks=frozenset({"sda"}))
    assert set(stacks.discard_doubts(place(sysfs, "dm-0"), unseen)) == {"sda"}


@pytest.mark.parametrize("kind", ["RAID", "thin", "cache", "snapshot"])
def test_a_volume_on_others_is_not_plain(sysfs: Sysfs, kind: str) -> None:
    add(sysfs, "sda")
    volume(sysfs, "dm-0", "sda")
    volume(sysfs, "dm-1", "dm-0")
    found = stack(sysfs, "dm-1")
    assert found == Stack(True, is_plain=False, disks=frozenset({"sda"})), kind


def test_a_volume_on_encrypted_disks_is_plain_and_has_doubts(sysfs: Sysfs) -> None:
    for disk in ("sda", "sdb"):
        scsi(sysfs, disk, **WRITE_SAME)
    add(sysfs, "dm-0", on=("sda",), dm__uuid="CRYPT-LUKS2-1", dm__name="sda_crypt")
    volume(sysfs, "dm-1", "dm-0", "sdb")
    assert stack(sysfs, "dm-1") == Stack(True, is_plain=True, disks=frozenset({"sda", "sdb"}))
    found = stacks.discard_doubts(place(sysfs, "dm-1"), unseen)
    assert found == {"dm-0": "it is made of other devices"}


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        (WRITE_SAME, ""),
        ({"zeroing_mode": "writesame_10_unmap", "provisioning_mode": "writesame_10"}, ""),
        ({**WRITE_SAME, "zeroing_mode": "writesame"}, "LBPRZ"),
        ({**WRITE_SAME, "zeroing_mode": "write"}, "LBPRZ"),
        ({**WRITE_SAME, "provisioning_mode": "unmap"}, "UNMAP"),
        ({**WRITE_SAME, "provisioning_mode": "writesame_zero"}, "UNMAP"),
        ({**WRITE_SAME, "provisioning_mode": "full"}, "UNMAP"),
        ({}, "LBPRZ"),
    ],
)
def test_a_scsi_disk_is_certain_where_write_same_unmaps_to_zeroes(
    sysfs: Sysfs, attributes: dict[str, str], said: str
) -> None:
    scsi(sysfs, "sda", **attributes)
    found = doubt(sysfs, "sda")
    assert said in found
    assert bool(said) == bool(found)


def test_a_disk_without_discards_is_in_doubt(sysfs: Sysfs) -> None:
    add(sysfs, "sda", **queue(discards=0))
    assert doubt(sysfs, "sda") == "it takes no discards"


@pytest.mark.parametrize(
    ("name", "said"), [("nvme0n1", "advisory"), ("vda", "nothing tells"), ("nbd0", "nothing tells")]
)
def test_other_disks_are_in_doubt(sysfs: Sysfs, name: str, said: str) -> None:
    add(sysfs, name)
    assert said in doubt(sysfs, name)


@pytest.mark.parametrize(
    ("kind", "said"), [(EXT4, ""), (NFS, "may not have holes"), (None, "no file that can be seen")]
)
def test_a_loop_device_is_certain_over_a_file_with_holes(
    sysfs: Sysfs, kind: int | None, said: str
) -> None:
    def look(loop: str, path: str) -> int:
        assert loop == "/dev/loop0"
        assert path == "/var/lib/carver/carver.img"
        if kind is None:
            raise FileNotFoundError(path)
        return kind

    add(sysfs, "loop0", loop__backing_file="/var/lib/carver/carver.img")
    found = doubt(sysfs, "loop0", look)
    assert said in found
    assert bool(said) == bool(found)


def test_the_kind_of_a_file_system_is_asked_of_the_kernel(tmp_path: Path) -> None:
    assert calls.file_system_kind("/proc/self/stat") == 0x9FA0  # PROC_SUPER_MAGIC
    with pytest.raises(FileNotFoundError):
        calls.file_system_kind(str(tmp_path / "none"))
