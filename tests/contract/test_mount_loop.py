"""Loop devices on files, on the fake and on the real host."""

import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chosen
import pytest
from real.host import RealHost

from mount import filesystem, filesystem_health, loop, mount_errors, mounts, table, target
from mount.options import Options

MIB = 1024 * 1024
# FS_IOC_FIEMAP with FIEMAP_FLAG_SYNC, as in linux/fiemap.h: a head, and this many extents.
_FIEMAP, _SYNC, _EXTENTS = 0xC020660B, 1, 1024
_HEAD, _EXTENT = struct.Struct("=QQIIII"), struct.Struct("=QQQQQIIII")


@pytest.fixture
def file(host: Any) -> Iterator[str]:
    path = host.directory.parent / "backing file"
    with path.open("wb") as opened:
        opened.truncate(32 * MIB)
    yield str(path)
    while device := loop.find(host.kernel, str(path)):
        loop.detach(host.kernel, device)


def mount(host: Any, device: str, fs_type: str) -> str:
    """Where a new file system on a device is mounted."""
    filesystem.make(host.run, device, fs_type)
    path = str(host.directory / "staging")
    target.ensure_directory(host.kernel, path)
    mounts.ensure_mounted(host.kernel, device, path, fs_type, Options())
    return path


def test_a_file_is_attached_once(host: Any, file: str) -> None:
    assert loop.find(host.kernel, file) is None

    device = loop.attach(host.kernel, file)

    assert loop.attach(host.kernel, file) == device
    assert loop.find(host.kernel, file) == device
    assert filesystem_health.device_size_bytes(host.kernel, device) == 32 * MIB
    assert not host.kernel.device_is_read_only(device)
    with pytest.raises(mount_errors.LoopFailed):
        loop.attach(host.kernel, file + ".missing")


def test_a_file_is_recognised_under_another_name(host: Any, file: str) -> None:
    device = loop.attach(host.kernel, file)
    link = Path(file).with_name("link")
    link.symlink_to(file)
    hard_link = Path(file).with_name("hard link")
    hard_link.hardlink_to(file)

    assert loop.find(host.kernel, str(link)) == device
    assert loop.find(host.kernel, str(hard_link)) == device


def test_a_read_only_attachment_is_not_handed_out_for_writing(host: Any, file: str) -> None:
    device = host.kernel.loop_free()
    host.kernel.loop_configure(device, file, read_only=True, direct_io=False, name=file)

    assert host.kernel.device_is_read_only(device)
    with pytest.raises(mount_errors.LoopFailed):
        loop.attach(host.kernel, file)


def test_what_was_written_is_there_when_attached_again(host: Any, file: str) -> None:
    filesystem.make(host.run, loop.attach(host.kernel, file), "ext4")
    loop.detach(host.kernel, loop.attach(host.kernel, file))

    found = filesystem.probe(host.kernel, loop.attach(host.kernel, file))

    assert found is not None
    assert found.fs_type == "ext4"


def test_detaching_twice_succeeds(host: Any, file: str) -> None:
    device = loop.attach(host.kernel, file)

    loop.detach(host.kernel, device)
    loop.detach(host.kernel, device)

    assert loop.find(host.kernel, file) is None


def test_growing_a_detached_loop_device_fails(host: Any, file: str) -> None:
    device = loop.attach(host.kernel, file)
    loop.detach(host.kernel, device)

    # At once: a test beside this one may be given the device.
    with pytest.raises(mount_errors.LoopFailed):
        loop.grow(host.kernel, device)


def test_a_mounted_loop_device_is_not_detached(host: Any, file: str) -> None:
    device = loop.attach(host.kernel, file)
    path = mount(host, device, "ext4")

    with pytest.raises(mount_errors.Busy):
        loop.detach(host.kernel, device)

    mounts.ensure_unmounted(host.kernel, path)


def allocated(path: str) -> list[tuple[int, int]]:
    """The ranges of a file that have blocks on the disk, in bytes, without the holes between."""
    buffer = bytearray(_HEAD.size + _EXTENTS * _EXTENT.size)
    _HEAD.pack_into(buffer, 0, 0, (1 << 64) - 1, _SYNC, 0, _EXTENTS, 0)
    with Path(path).open("rb") as opened:
        fcntl.ioctl(opened, _FIEMAP, buffer)
    count = _HEAD.unpack_from(buffer)[3]
    assert 0 < count < _EXTENTS
    ranges: list[tuple[int, int]] = []
    for number in range(count):
        start, _, length, *_ = _EXTENT.unpack_from(buffer, _HEAD.size + number * _EXTENT.size)
        end = start + length
        if ranges and ranges[-1][1] == start:
            start, _ = ranges.pop()
        ranges.append((start, end))
    return ranges


def test_a_range_that_is_zeroed_is_a_hole_in_the_file(host: Any, file: str) -> None:
    device = loop.attach(host.kernel, file)
    for offset in range(0, 32 * MIB, MIB):
        host.kernel.write(device, offset, b"x" * MIB)

    host.kernel.zero_out(device, 4 * MIB, 8 * MIB)
    host.kernel.flush(device)

    for offset in range(0, 32 * MIB, MIB):
        byte = bytes(1) if 4 * MIB <= offset < 12 * MIB else b"x"
        assert host.kernel.read(device, offset, MIB) == byte * MIB
    if isinstance(host, RealHost):
        assert allocated(file) == [(0, 4 * MIB), (12 * MIB, 32 * MIB)]


def test_a_loop_device_grows_with_its_file(host: Any, file: str) -> None:
    device = loop.attach(host.kernel, file)
    os.truncate(file, 64 * MIB)

    loop.grow(host.kernel, device)
    loop.grow(host.kernel, device)

    assert filesystem_health.device_size_bytes(host.kernel, device) == 64 * MIB


@pytest.mark.parametrize("fs_type", [one for one in chosen.GROWING if one != "ext4"])
def test_a_file_system_grows_with_its_device(host: Any, file: str, fs_type: str) -> None:
    # ext4 asks for CAP_SYS_RESOURCE besides, which the machines of this tier may lack.
    os.truncate(file, 320 * MIB)
    device = loop.attach(host.kernel, file)
    path = mount(host, device, fs_type)
    before = filesystem_health.of(host.kernel, path).total_bytes
    os.truncate(file, 640 * MIB)
    loop.grow(host.kernel, device)

    sizes = []
    for _ in range(2):
        filesystem.grow(host.kernel, table.read(host.kernel).at(path)[-1])
        sizes.append(filesystem_health.of(host.kernel, path).total_bytes)

    assert sizes[0] == sizes[1] > before + 250 * MIB
    mounts.ensure_unmounted(host.kernel, path)
