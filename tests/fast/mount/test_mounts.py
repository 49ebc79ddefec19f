"""Mounts when the kernel or another process does not do as expected."""

import errno
import os
import uuid
from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.devices import FakeDevices
from fakes.kernel import FakeKernel, failing

from mount import mount_errors, mounts, options, table
from mount.filesystem import Signature
from mount.options import Options

MIB = 1024 * 1024
NONE = Options()


@pytest.fixture
def kernel() -> FakeKernel:
    return FakeKernel(FakeDevices())


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "target").mkdir()
    return str(tmp_path / "target")


def formatted(kernel: FakeKernel, name: str = "web", fs_type: str = "ext4") -> str:
    device = kernel.devices.add(f"/dev/data/{name}", 400 * MIB)
    device.contents = Signature(fs_type, "filesystem", str(uuid.uuid4()))
    device.media.fs_size_bytes = device.size_bytes
    return device.path


def mount(kernel: FakeKernel, path: str, fs_type: str = "ext4") -> None:
    mounts.ensure_mounted(kernel, formatted(kernel, fs_type=fs_type), path, fs_type, NONE)


def test_a_mount_that_the_table_does_not_show_is_an_error(kernel: FakeKernel, path: str) -> None:
    kernel.override(mount=lambda *_: None, bind=lambda *_: None)

    with pytest.raises(mount_errors.MountFailed, match="does not show it"):
        mount(kernel, path)
    with pytest.raises(mount_errors.MountFailed, match="does not show it"):
        mounts.ensure_bound(kernel, str(Path(path).parent), path, NONE)


class Careless(FakeKernel):
    """Mounts, but leaves the attributes out, as a remount that had no effect would."""

    def mount(
        self, device: str, path: str, fs_type: str, attributes: Set[str], parameters: Sequence[str]
    ) -> None:
        super().mount(device, path, fs_type, set(), ())

    def bind(self, source: str, path: str, attributes: Set[str]) -> None:
        super().bind(source, path, set())


def test_a_mount_that_came_out_writable_is_undone(path: str) -> None:
    kernel = Careless(FakeDevices())
    device = formatted(kernel)

    with pytest.raises(mount_errors.MountFailed, match="the kernel made it rw"):
        mounts.ensure_mounted(kernel, device, path, "ext4", NONE, read_only=True)
    assert table.read(kernel).at(path) == ()
    with pytest.raises(mount_errors.MountFailed, match="the kernel made it rw"):
        mounts.ensure_bound(kernel, str(Path(path).parent), path, NONE, read_only=True)
    assert table.read(kernel).at(path) == ()


def test_a_foreign_mount_right_over_ours_is_named_and_left_alone(
    kernel: FakeKernel, path: str
) -> None:
    kernel.follow("mount", lambda *_: kernel.mount_foreign(path))

    with pytest.raises(mount_errors.ForeignMount, match="tmpfs"):
        mount(kernel, path)

    assert len(table.read(kernel).at(path)) == 2


def test_a_copy_of_an_xfs_is_mounted_beside_its_origin(kernel: FakeKernel, tmp_path: Path) -> None:
    origin, copy = formatted(kernel, "web", "xfs"), formatted(kernel, "copy", "xfs")
    kernel.devices.get(copy).contents = kernel.devices.get(origin).contents

    for device, name, has_option in ((origin, "a", False), (copy, "b", True)):
        (tmp_path / name).mkdir()
        mounts.ensure_mounted(kernel, device, str(tmp_path / name), "xfs", NONE)
        [mounted] = table.read(kernel).of_device(kernel.device_number(device))
        assert ("nouuid" in mounted.super_options) == has_option


@pytest.mark.parametrize(("fs_type", "repair"), [("xfs", "xfs_repair"), ("btrfs", "btrfs check")])
def test_the_error_for_a_damaged_file_system_names_its_repair(
    kernel: FakeKernel, path: str, fs_type: str, repair: str
) -> None:
    device = formatted(kernel, "web", fs_type)
    kernel.devices.get(device).media.damage = "much"

    with pytest.raises(mount_errors.Damaged, match=f"`{repair} {device}`"):
        mounts.ensure_mounted(kernel, device, path, fs_type, NONE)


@pytest.mark.parametrize(
    ("fs_type", "number", "why"),
    [
        ("btrfs", errno.EEXIST, "same UUID"),
        ("xfs", errno.ENODEV, "load its module"),
        ("ext4", errno.EPERM, "EPERM"),
    ],
)
def test_the_error_for_a_refused_mount_says_why(
    kernel: FakeKernel, path: str, fs_type: str, number: int, why: str
) -> None:
    kernel.override(mount=failing(number))

    with pytest.raises(mount_errors.MountFailed, match=why):
        mount(kernel, path, fs_type)


def test_at_most_eight_processes_that_keep_a_mount_busy_are_named() -> None:
    crowd = [f"cat ({number})" for number in range(9)]
    assert "in use by cat (0); try" in str(mount_errors.Busy("/x", crowd[:1]))
    assert "cat (7); try" in str(mount_errors.Busy("/x", crowd[:8]))
    assert "cat (7), and others; try" in str(mount_errors.Busy("/x", crowd))


def test_users_of_a_place_have_something_open_in_it(kernel: FakeKernel, path: str) -> None:
    Path(f"{path}-not").mkdir()
    with Path(f"{path}-not", "file").open("w"):
        assert mounts.processes(kernel, path) == ()
    with Path(path, "file").open("w"):
        [found] = mounts.processes(kernel, path)
    assert f"({os.getpid()})" in found


def test_a_second_mount_of_a_device_has_the_access_of_the_first(
    kernel: FakeKernel, tmp_path: Path
) -> None:
    device = formatted(kernel)
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    for place in (first, second):
        Path(place).mkdir()
        mounts.ensure_mounted(kernel, device, place, "ext4", NONE)
    mounts.ensure_unmounted(kernel, first)
    assert kernel.devices.is_open(device)

    with pytest.raises(mount_errors.Busy):
        mounts.ensure_mounted(kernel, device, first, "ext4", NONE, read_only=True)

    mounts.ensure_unmounted(kernel, second)
    kernel.devices.remove(device)


@pytest.mark.parametrize("fs_type", ["proc", "", "ext4\n", "fuse.x"])
def test_only_known_file_systems_are_mounted(kernel: FakeKernel, fs_type: str, path: str) -> None:
    with pytest.raises(mount_errors.UnsupportedFileSystem):
        mounts.ensure_mounted(kernel, formatted(kernel), path, fs_type, NONE)


def test_a_device_node_that_was_made_anew_is_the_same_device(
    kernel: FakeKernel, tmp_path: Path
) -> None:
    device = kernel.devices.add("/dev/data/web", 400 * MIB)
    (tmp_path / "block").touch()
    path = str(tmp_path / "block")
    mounts.ensure_bound(kernel, device.path, path, NONE)
    kernel.mounts[-1] = replace(kernel.mounts[-1], root="/dm-0//deleted")

    mounts.ensure_bound(kernel, device.path, path, NONE)

    [mounted] = table.read(kernel).at(path)
    assert mounted.root == "/dm-0//deleted"
    assert mounts.node(kernel, path) == device.number


def test_a_source_under_no_mount_is_not_bound(kernel: FakeKernel, path: str) -> None:
    # A mount table without a root, as seen from a strange chroot.
    kernel.override(mountinfo=lambda: "")

    with pytest.raises(mount_errors.NotMounted):
        mounts.ensure_bound(kernel, path, path, NONE)


def test_a_mount_that_another_process_unmounts_first_is_unmounted(
    kernel: FakeKernel, path: str
) -> None:
    mount(kernel, path)
    kernel.follow("unmount")

    mounts.ensure_unmounted(kernel, path)

    assert table.read(kernel).at(path) == ()


def test_a_place_that_is_mounted_again_at_once_is_not_unmounted(
    kernel: FakeKernel, path: str
) -> None:
    mount(kernel, path)
    kernel.follow("unmount", kernel.mount_foreign)

    with pytest.raises(mount_errors.UnmountFailed, match="again"):
        mounts.ensure_unmounted(kernel, path)


def test_a_mount_that_was_busy_for_a_moment_is_unmounted(kernel: FakeKernel, path: str) -> None:
    # A statfs of the mount is under way at the first try.
    mount(kernel, path)
    tries = iter([failing(errno.EBUSY), kernel.unmount])
    kernel.override(unmount=lambda place: next(tries)(place))

    mounts.ensure_unmounted(kernel, path)

    assert not table.read(kernel).at(path)


def test_an_unmount_that_the_kernel_refuses_is_an_error(kernel: FakeKernel, path: str) -> None:
    mount(kernel, path)
    kernel.override(unmount=failing(errno.EPERM))

    with pytest.raises(mount_errors.UnmountFailed, match="EPERM"):
        mounts.ensure_unmounted(kernel, path)


def test_a_mount_below_keeps_the_one_above_it_mounted(kernel: FakeKernel, path: str) -> None:
    mount(kernel, path)
    Path(path, "inner").mkdir()
    kernel.mount_foreign(f"{path}/inner")

    with pytest.raises(mount_errors.Busy, match=f"{path} is in use"):
        mounts.ensure_unmounted(kernel, path)


def test_an_option_that_a_copy_needs_may_be_given_by_its_user(
    kernel: FakeKernel, path: str
) -> None:
    chosen = options.parse(["nouuid", "sync", "discard"], "xfs")

    mounts.ensure_mounted(kernel, formatted(kernel, "web", "xfs"), path, "xfs", chosen)

    assert table.read(kernel).at(path)[0].super_options == ("rw", "sync", "nouuid", "discard")
