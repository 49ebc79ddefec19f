"""What libblkid finds in this process, beside what the program blkid finds in the same bytes."""

import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from mount import calls, errors, filesystem
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


def test_two_things_in_one_place_are_an_error(disk: Path) -> None:
    ext4(disk)
    put(disk, 0, b"hsqs" + bytes(24) + struct.pack("<2H", 4, 0))  # squashfs
    with pytest.raises(errors.ProbeFailed, match="more than one thing"):
        filesystem.probe(Kernel(), str(disk))


def test_what_cannot_be_read_is_never_blank(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    for path in (tmp_path / "missing", empty, tmp_path):
        with pytest.raises(errors.ProbeFailed):
            filesystem.probe(Kernel(), str(path))


def test_without_the_library_no_device_is_blank(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise OSError(errno.ENOSYS, "libblkid: no such file")

    monkeypatch.setattr(calls, "_library", missing)
    with pytest.raises(errors.ProbeFailed, match="libblkid: no such file"):
        filesystem.probe(Kernel(), str(disk))
