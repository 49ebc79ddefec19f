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


@contextmanager
def _usual(directory: Path, size_bytes: int) -> Iterator[str]:
    with _loop(directory, size_bytes) as device:
        yield device


@contextmanager
def _without_write_zeroes(directory: Path, size_bytes: int) -> Iterator[str]:
    """A disk below dm-delay, which delays nothing and takes no REQ_OP_WRITE_ZEROES."""
    name = _name()
    with _loop(directory, size_bytes) as disk:
        table = f"0 {size_bytes // _SECTOR_BYTES} delay {disk} 0 0"
        _run("dmsetup", "create", name, "--table", table)
        try:
            yield f"/dev/mapper/{name}"
        finally:
            _run("dmsetup", "remove", "--retry", name)


@contextmanager
def _scsi(lbprz: int, size_bytes: int, *, falsely: bool = False) -> Iterator[str]:
    """A SCSI disk in memory, unmapped by WRITE SAME, with or without the promise of zeroes.

    Without it, unmapped blocks keep their data (drivers/scsi/scsi_debug.c, unmap_region()). Made
    `falsely`, the kernel takes such a disk for one that promises zeroes, and zeroes by unmapping.
    It is a partition: udev has the kernel look anew at whole disks that were written to
    (BLKRRPART, sd_need_revalidate()).
    """
    given = {"dev_size_mb": (size_bytes >> 20) + 1, "lbpws": 1, "lbprz": lbprz, "delay": 0}
    given["num_parts"] = 1
    _run("modprobe", "scsi_debug", *(f"{name}={value}" for name, value in given.items()))
    try:
        _run("udevadm", "settle")
        [host] = Path("/sys/bus/pseudo/drivers/scsi_debug").glob("adapter*/host*")
        [partition] = host.glob("target*/*/block/*/*1")
        if falsely:
            [driver] = host.glob("target*/*/scsi_disk/*")
            (driver / "zeroing_mode").write_text("writesame_16_unmap")
        yield f"/dev/{partition.name}"
    finally:
        _run("udevadm", "settle")
        _run("modprobe", "--remove", "--wait", "10000", "scsi_debug")


KINDS: Mapping[str, Callable[[Path, int], AbstractContextManager[str]]] = {
    "4 KiB": _of_4_kib,
    "partition": _partition,
    "LUKS": _luks,
    "MD": _md,
    "loop": _usual,
    "no write zeroes": _without_write_zeroes,
    "LBPRZ": lambda _, size_bytes: _scsi(1, size_bytes),
    "no LBPRZ": lambda _, size_bytes: _scsi(0, size_bytes),
    "false LBPRZ": lambda _, size_bytes: _scsi(0, size_bytes, falsely=True),
}
