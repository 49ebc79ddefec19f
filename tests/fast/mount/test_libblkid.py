"""What libblkid finds in this process, beside what the program blkid finds in the same bytes."""

import errno
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from mount import calls, filesystem, mount_errors
from mount.filesystem import Signature
from mount.kernel import Kernel
from mount.programs import Programs

pytestmark = pytest.mark.starts_programs

MIB = 1 << 20
RUN = Programs()


def by_both(path: Path) -> Signature | None:
    """What is there by the library; the program finds the same type."""
    found = filesystem.probe(Kernel(), str(path))
    words = ("blkid", "--probe", "--output", "export", "--", str(path))
    tags = dict(line.partition("=")[::2] for line in RUN(*words).stdout.splitlines())
    assert tags.get("TYPE", tags.get("PTTYPE")) == (found.fs_type if found else None)
    return found


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Blank, 16 MiB."""
    made = tmp_path / "disk"
    made.touch()
    os.truncate(made, 16 * MIB)
    return made


def put(disk: Path, offset: int, data: bytes) -> None:
    with disk.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def partition(disk: Path) -> None:
    put(disk, 446, struct.pack("<8B2I", 0, 0, 0, 0, 0x83, 0, 0, 0, 2048, 2048))
    put(disk, 510, b"\x55\xaa")


def luks(disk: Path) -> None:
    put(disk, 0, b"LUKS\xba\xbe\x00\x01")


def ext4(disk: Path) -> None:
    ended = RUN("mkfs.ext4", "-q", "-L", "a b=c", "--", str(disk))
    assert ended.exit_code == 0, ended.stderr


def swap(disk: Path) -> None:
    ended = RUN("mkswap", "--", str(disk))
    assert ended.exit_code == 0, ended.stderr


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda _disk: None, "None"),
        (ext4, "ext4 (filesystem)"),
        (swap, "swap (other)"),
        (luks, "crypto_LUKS (crypto)"),
        (partition, "dos (partition table)"),
    ],
)
def test_what_is_there_is_found(disk: Path, write: Callable[[Path], None], expected: str) -> None:
    write(disk)
    assert str(by_both(disk)) == expected


def test_a_label_and_an_id_are_found(disk: Path) -> None:
    ext4(disk)
    found = by_both(disk)
    assert found is not None
    assert found.label == "a b=c"
    assert found.uuid


@pytest.mark.parametrize("blocks", [1024, 2048, 4096])
def test_the_size_of_its_blocks_is_found(disk: Path, blocks: int) -> None:
    ended = RUN("mkfs.ext4", "-q", "-b", str(blocks), "--", str(disk))
    assert ended.exit_code == 0, ended.stderr
    for found in (by_both(disk), filesystem.find(Kernel(), str(disk), "ext4")):
        assert found is not None
        assert found.block_bytes == blocks


def test_two_things_in_one_place_are_an_error(disk: Path) -> None:
    ext4(disk)
    put(disk, 0, b"hsqs" + bytes(24) + struct.pack("<2H", 4, 0))  # squashfs
    with pytest.raises(mount_errors.ProbeFailed, match="more than one thing"):
        filesystem.probe(Kernel(), str(disk))


def test_what_cannot_be_read_is_never_blank(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    for path in (tmp_path / "missing", empty, tmp_path):
        with pytest.raises(mount_errors.ProbeFailed):
            filesystem.probe(Kernel(), str(path))


def test_without_the_library_no_device_is_blank(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise OSError(errno.ENOSYS, "libblkid: no such file")

    monkeypatch.setattr(calls, "_library", missing)
    with pytest.raises(mount_errors.ProbeFailed, match="libblkid: no such file"):
        filesystem.probe(Kernel(), str(disk))


def drbd(size: int) -> tuple[int, bytes]:
    return size - 4096, struct.pack(">Q4QQQII", *range(1, 8), 0, 0x83740267 + 4)


def md(size: int) -> tuple[int, bytes]:
    """A superblock of MD, version 1.0, which says where it stands."""
    at = ((size >> 9) - 16) & ~7
    block = bytearray(256)
    struct.pack_into("<II", block, 0, 0xA92B4EFC, 1)
    struct.pack_into("<Q", block, 144, at)
    return at << 9, bytes(block)


def zfs(size: int) -> tuple[int, bytes]:
    """Its last two labels."""
    label = bytearray(0x80000)
    for start in (0x20000, 0x60000):
        for number in range(8):
            struct.pack_into("<5Q", label, start + number * 1024, 0x00BAB10C, 28, 1, 1, 1)
    return size - len(label), bytes(label)


# libblkid looks for ZFS on no smaller device.
LARGE = 64 * MIB
At = Callable[[int], tuple[int, bytes]]
AT_THE_END = pytest.mark.parametrize("left", [drbd, md, zfs])


@AT_THE_END
def test_a_formatted_device_has_its_file_system_whatever_is_at_its_end(
    disk: Path, left: At
) -> None:
    os.truncate(disk, LARGE)
    ext4(disk)
    before = filesystem.find(Kernel(), str(disk), "ext4")
    put(disk, *left(LARGE))
    assert filesystem.find(Kernel(), str(disk), "ext4") == before
    assert before is not None
    assert before.uuid
    assert filesystem.find(Kernel(), str(disk), "xfs") is None


@pytest.mark.parametrize("write", [lambda _disk: None, swap, luks, partition])
def test_no_file_system_is_found_where_none_is(disk: Path, write: Callable[[Path], None]) -> None:
    write(disk)
    for fs_type in filesystem.FILE_SYSTEMS:
        assert filesystem.find(Kernel(), str(disk), fs_type) is None


@AT_THE_END
@pytest.mark.parametrize("made", [4, 8, 63])
def test_the_end_of_what_a_blank_device_grew_by_is_zeroed(
    disk: Path, monkeypatch: pytest.MonkeyPatch, left: At, made: int
) -> None:
    os.truncate(disk, LARGE)
    zeroed = of_file(monkeypatch)
    put(disk, *left(LARGE))
    assert filesystem.probe(Kernel(), str(disk)) is not None
    assert filesystem.probe_grown(Kernel(), str(disk), made * MIB) is None
    assert zeroed == [(63 * MIB, MIB)]


@AT_THE_END
@pytest.mark.parametrize(("write", "made"), [(ext4, 8), (swap, 8), (lambda _disk: None, 64)])
def test_nothing_is_zeroed_on_a_device_that_holds_something_or_did_not_grow(
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    left: At,
    write: Callable[[Path], None],
    made: int,
) -> None:
    os.truncate(disk, LARGE)
    zeroed = of_file(monkeypatch)
    write(disk)
    put(disk, *left(LARGE))
    before = disk.read_bytes()
    with suppress(mount_errors.ProbeFailed):  # more than one thing
        found = filesystem.probe_grown(Kernel(), str(disk), made * MIB)
        assert found is not None
    assert not zeroed
    assert disk.read_bytes() == before


def of_file(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Have a file in a block device's place; what is zeroed of it."""
    zeroed = []

    def zero_out(_kernel: Kernel, device: str, offset_bytes: int, length_bytes: int) -> None:
        zeroed.append((offset_bytes, length_bytes))
        put(Path(device), offset_bytes, bytes(length_bytes))

    monkeypatch.setattr(
        Kernel, "device_size_bytes", lambda _kernel, path: Path(path).stat().st_size
    )
    monkeypatch.setattr(Kernel, "zero_out", zero_out)
    return zeroed
