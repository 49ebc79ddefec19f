"""Disks of other kinds than a whole one of 512-byte blocks, made of loop devices. In the lab VM."""

import itertools
import os
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from mount.kernel import Kernel

_serial = itertools.count()
_SECTOR_BYTES = 512
# Where partitions begin, and what LUKS and MD keep in front of their data, with room to spare.
_FIRST_SECTOR = 2048
_LUKS_BYTES = 16 << 20
_MD_BYTES = 4 << 20


def _name() -> str:
    return f"carver-{os.getpid()}-{next(_serial)}"


def _run(*words: str) -> str:
    ended = subprocess.run(words, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, f"{' '.join(words)}: {ended.stderr}"
    return ended.stdout.strip()


@contextmanager
def _loop(directory: Path, size_bytes: int, *options: str, beginning: bytes = b"") -> Iterator[str]:
    file = directory / _name()
    with file.open("wb") as disk:
        disk.write(beginning)
        disk.truncate(size_bytes)
    device = _run("losetup", "--find", "--show", *options, "--", str(file))
    try:
        yield device
    finally:
        # When the last user ends: udev may look at it just now.
        _run("losetup", "--detach", device)
        file.unlink()


@contextmanager
def _of_4_kib(directory: Path, size_bytes: int) -> Iterator[str]:
    """A disk whose logical blocks have 4 KiB."""
    with _loop(directory, size_bytes, "--sector-size", "4096") as device:
        yield device


@contextmanager
def _partition(directory: Path, size_bytes: int) -> Iterator[str]:
    """The one partition of a disk; its type is lvm2's, which looks at the label all the same."""
    place = (_FIRST_SECTOR, size_bytes // _SECTOR_BYTES)
    entry = struct.pack("<8B2I", 0, 0, 0, 0, 0x8E, 0, 0, 0, *place)
    table = bytes(446) + entry + bytes(48) + b"\x55\xaa"
    whole = _FIRST_SECTOR * _SECTOR_BYTES + size_bytes
    with _loop(directory, whole, "--partscan", beginning=table) as device:
        yield f"{device}p1"


@contextmanager
def _luks(directory: Path, size_bytes: int) -> Iterator[str]:
    """What dm-crypt makes of a disk; its key costs no time."""
    name, key = _name(), directory / f"{_name()}.key"
    key.write_bytes(os.urandom(32))
    cheap = ("--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000", "--batch-mode")
    with _loop(directory, _LUKS_BYTES + size_bytes) as disk:
        _run("cryptsetup", "luksFormat", "--type", "luks2", *cheap, disk, str(key))
        _run("cryptsetup", "open", "--key-file", str(key), disk, name)
        try:
            yield f"/dev/mapper/{name}"
        finally:
            _run("cryptsetup", "close", name)
            key.unlink()


@contextmanager
def _md(directory: Path, size_bytes: int) -> Iterator[str]:
    """A mirror of two disks."""
    size = _MD_BYTES + size_bytes
    with _loop(directory, size) as first, _loop(directory, size) as second:
        shape = ("--level=1", "--raid-devices=2", "--metadata=1.2", "--assume-clean", "--run")
        _run("mdadm", "--create", f"/dev/md/{_name()}", *shape, first, second)
        # That name is a link, which udev makes when it comes to it.
        [holder] = Kernel().device_holders(first)
        try:
            yield f"/dev/{holder}"
        finally:
            _run("mdadm", "--stop", f"/dev/{holder}")
            _run("mdadm", "--zero-superblock", first, second)


KINDS: Mapping[str, Callable[[Path, int], AbstractContextManager[str]]] = {
    "4 KiB": _of_4_kib,
    "partition": _partition,
    "LUKS": _luks,
    "MD": _md,
}
