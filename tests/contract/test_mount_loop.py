"""Loop devices on files, on the fake and on the real host."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chosen
import pytest
from real.host import RealHost

from mount import filesystem, filesystem_health, loop, mount_errors, mounts, table, target
from mount.options import Options

MIB = 1024 * 1024


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


def test_a_range_that_is_zeroed_is_a_hole_in_the_file(host: Any, file: str) -> None:
    device = loop.attach(host.kernel, file)
    for offset in range(0, 32 * MIB, MIB):
        host.kernel.write(device, offset, b"x" * MIB)
    before = Path(file).stat().st_blocks

    host.kernel.zero_out(device, 4 * MIB, 8 * MIB)
    host.kernel.flush(device)

    for offset in range(0, 32 * MIB, MIB):
        byte = bytes(1) if 4 * MIB <= offset < 12 * MIB else b"x"
        assert host.kernel.read(device, offset, MIB) == byte * MIB
    if isinstance(host, RealHost):
        assert before - Path(file).stat().st_blocks == 8 * MIB // 512


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
