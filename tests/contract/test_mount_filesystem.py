"""Looking at devices, making file systems and growing them, on the fake and on the real host."""

import ctypes
import os
from typing import Any

import pytest
from fakes.filesystems import label_option
from real.host import RealHost

from mount import filesystem, filesystem_health, mount_errors, mounts, options, table, target

MIB = 1024 * 1024
SIZE = 320 * MIB
FS_TYPES = tuple(filesystem.FILE_SYSTEMS)


def formatted(host: Any, fs_type: str, size_bytes: int = SIZE) -> str:
    device: str = host.new_device(size_bytes)
    filesystem.make(host.run, device, fs_type)
    return device


def mount(host: Any, device: str, fs_type: str) -> str:
    """Where it is mounted."""
    path = str(host.directory / "staging")
    target.ensure_directory(host.kernel, path)
    mounts.ensure_mounted(host.kernel, device, path, fs_type, options.Options())
    return path


@pytest.mark.parametrize("fs_type", FS_TYPES)
def test_a_made_file_system_is_found_by_the_next_probe(host: Any, fs_type: str) -> None:
    device = host.new_device(SIZE)
    assert filesystem.probe(host.kernel, device) is None

    filesystem.make(host.run, device, fs_type, [label_option(fs_type), "web-data"])

    found = filesystem.probe(host.kernel, device)
    assert found is not None
    assert (found.fs_type, found.usage, found.label) == (fs_type, "filesystem", "web-data")
    assert found.uuid


@pytest.mark.parametrize("oldest_kernel", [(5, 8), (5, 10), (5, 19)])
def test_xfs_is_made_for_the_oldest_kernel_and_mounts(
    host: Any, oldest_kernel: tuple[int, int]
) -> None:
    device = host.new_device(SIZE)

    filesystem.make(host.run, device, "xfs", oldest_kernel=oldest_kernel)

    place = mount(host, device, "xfs")
    if isinstance(host, RealHost):
        said = host.run("xfs_info", "--", place).stdout
        for one in filesystem.FILE_SYSTEMS["xfs"].features:
            # Not every version tells of each, nor makes by default what the kernel could mount.
            assert f"{one.name}=1" not in said or one.kernel <= oldest_kernel, said


def test_a_missing_device_is_not_taken_for_a_blank_one(host: Any) -> None:
    with pytest.raises(mount_errors.ProbeFailed):
        filesystem.probe(host.kernel, "/dev/carver-has-no-such-device")


def test_the_probe_finds_a_partition_table_and_the_label_of_lvm2(host: Any) -> None:
    device, other = host.new_device(32 * MIB), host.new_device(32 * MIB)
    host.partition(device)
    host.label(other)

    assert str(filesystem.probe(host.kernel, device)) == "dos (partition table)"
    assert str(filesystem.probe(host.kernel, other)) == "LVM2_member (raid)"


@pytest.mark.parametrize("fs_type", [one for one in FS_TYPES if one != "ext4"])
def test_mkfs_refuses_a_device_that_holds_something(host: Any, fs_type: str) -> None:
    device = formatted(host, "ext4")
    before = filesystem.probe(host.kernel, device)

    with pytest.raises(mount_errors.FormatFailed):
        filesystem.make(host.run, device, fs_type)

    assert filesystem.probe(host.kernel, device) == before


@pytest.mark.parametrize("fs_type", FS_TYPES)
def test_a_mounted_device_is_neither_made_anew_nor_zeroed(host: Any, fs_type: str) -> None:
    device = formatted(host, fs_type)
    mount(host, device, fs_type)

    with pytest.raises(mount_errors.FormatFailed):
        filesystem.make(host.run, device, fs_type)
    with pytest.raises(OSError, match=os.strerror(16)):
        host.kernel.zero_out(device, 0, MIB)


def test_a_device_below_the_minimum_is_refused(host: Any) -> None:
    device = host.new_device(filesystem.FILE_SYSTEMS["xfs"].minimum_bytes - 4 * MIB)

    with pytest.raises(mount_errors.FormatFailed):
        filesystem.make(host.run, device, "xfs")


@pytest.mark.parametrize("fs_type", FS_TYPES)
def test_a_device_of_the_minimum_size_is_enough(host: Any, fs_type: str) -> None:
    device = formatted(host, fs_type, filesystem.FILE_SYSTEMS[fs_type].minimum_bytes)

    path = mount(host, device, fs_type)

    assert len(table.read(host.kernel).at(path)) == 1


@pytest.mark.parametrize("fs_type", FS_TYPES)
def test_usage_counts_bytes_and_inodes_as_df_does(host: Any, fs_type: str) -> None:
    found = filesystem_health.of(host.kernel, mount(host, formatted(host, fs_type), fs_type))

    # A file system may keep some for itself, and count that as used.
    assert SIZE / 2 < found.available_bytes <= found.total_bytes <= SIZE
    assert 0 < found.used_bytes < SIZE / 2
    assert (found.inodes is None) == (fs_type == "btrfs")


@pytest.mark.parametrize("fs_type", FS_TYPES)
def test_zeroing_a_device_makes_it_blank(host: Any, fs_type: str) -> None:
    device = formatted(host, fs_type)

    host.kernel.zero_out(device, 0, SIZE)

    assert filesystem.probe(host.kernel, device) is None


def test_zeroing_does_not_have_udev_look_at_the_device(host: Any) -> None:
    device = host.new_device(32 * MIB)
    closed_after_writing = 0x8  # IN_CLOSE_WRITE, <sys/inotify.h>: what udev watches for
    libc = ctypes.CDLL(None, use_errno=True)
    if isinstance(host, RealHost):
        watch = libc.inotify_init1(os.O_NONBLOCK)
        assert libc.inotify_add_watch(watch, device.encode(), closed_after_writing) > 0
    host.kernel.zero_out(device, 0, 32 * MIB)
    if isinstance(host, RealHost):
        with pytest.raises(BlockingIOError):
            os.read(watch, 4096)
        # The watch works: it sees a write by the node itself.
        host.kernel.write(device, 0, bytes(512))
        assert os.read(watch, 4096)
        os.close(watch)
