"""Mounts when the kernel or a neighbour does not do as expected."""

import errno
import os
import uuid
from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.devices import FakeDevices
from fakes.kernel import FakeKernel

from mount import errors, mounts, options, table
from mount.filesystem import Signature
from mount.options import Options

MIB = 1024 * 1024
NONE = Options()


def formatted(kernel: FakeKernel, name: str, fs_type: str = "ext4") -> str:
    device = kernel.devices.add(f"/dev/data/{name}", 400 * MIB)
    device.contents = Signature(fs_type, "filesystem", str(uuid.uuid4()))
    device.media.fs_size_bytes = device.size_bytes
    return device.path


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "target").mkdir()
    return str(tmp_path / "target")


class Silent(FakeKernel):
    """Says yes to a mount and does nothing."""

    def mount(
        self, device: str, path: str, fs_type: str, attributes: Set[str], parameters: Sequence[str]
    ) -> None:
        pass

    def bind(self, source: str, path: str, attributes: Set[str]) -> None:
        pass


class Careless(FakeKernel):
    """Mounts, but leaves the attributes out, as a remount that had no effect would."""

    def mount(
        self, device: str, path: str, fs_type: str, attributes: Set[str], parameters: Sequence[str]
    ) -> None:
        super().mount(device, path, fs_type, set(), ())

    def bind(self, source: str, path: str, attributes: Set[str]) -> None:
        super().bind(source, path, set())


def test_a_mount_that_the_table_does_not_show_is_an_error(path: str) -> None:
    kernel = Silent(FakeDevices())
    device = formatted(kernel, "web")

    with pytest.raises(errors.MountFailed, match="does not show it"):
        mounts.ensure_mounted(kernel, device, path, "ext4", NONE)
    with pytest.raises(errors.MountFailed, match="does not show it"):
        mounts.ensure_bound(kernel, str(Path(path).parent), path, NONE)


def test_a_mount_that_came_out_writable_is_undone(path: str) -> None:
    kernel = Careless(FakeDevices())
    device = formatted(kernel, "web")

    with pytest.raises(errors.MountFailed, match="the kernel made it rw"):
        mounts.ensure_mounted(kernel, device, path, "ext4", NONE, read_only=True)
    assert table.read(kernel).at(path) == ()
    with pytest.raises(errors.MountFailed, match="the kernel made it rw"):
        mounts.ensure_bound(kernel, str(Path(path).parent), path, NONE, read_only=True)
    assert table.read(kernel).at(path) == ()


def test_one_who_mounts_over_ours_at_once_is_named_and_left_alone(path: str) -> None:
    class Raced(FakeKernel):
        """Another mounts at the same place right after us."""

        def mount(
            self,
            device: str,
            path: str,
            fs_type: str,
            attributes: Set[str],
            parameters: Sequence[str],
        ) -> None:
            super().mount(device, path, fs_type, attributes, parameters)
            self.mount_foreign(path)

    kernel = Raced(FakeDevices())
    device = formatted(kernel, "web")

    with pytest.raises(errors.ForeignMount, match="tmpfs"):
        mounts.ensure_mounted(kernel, device, path, "ext4", NONE)

    assert len(table.read(kernel).at(path)) == 2


def test_a_copy_of_an_xfs_is_mounted_beside_its_origin(tmp_path: Path) -> None:
    kernel = FakeKernel(FakeDevices())
    origin, copy = formatted(kernel, "web", "xfs"), formatted(kernel, "copy", "xfs")
    kernel.devices.get(copy).contents = kernel.devices.get(origin).contents
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    mounts.ensure_mounted(kernel, origin, str(tmp_path / "a"), "xfs", NONE)

    mounts.ensure_mounted(kernel, copy, str(tmp_path / "b"), "xfs", NONE)

    [mounted] = table.read(kernel).of_device(kernel.device_number(copy))
    assert "nouuid" in mounted.super_options
    [mounted] = table.read(kernel).of_device(kernel.device_number(origin))
    assert "nouuid" not in mounted.super_options


@pytest.mark.parametrize(("fs_type", "repair"), [("xfs", "xfs_repair"), ("btrfs", "btrfs check")])
def test_a_file_system_that_the_kernel_finds_damaged_is_told_with_its_repair(
    path: str, fs_type: str, repair: str
) -> None:
    kernel = FakeKernel(FakeDevices())
    device = formatted(kernel, "web", fs_type)
    kernel.devices.get(device).media.damage = "much"

    with pytest.raises(errors.Damaged, match=f"`{repair} {device}`"):
        mounts.ensure_mounted(kernel, device, path, fs_type, NONE)


def test_a_copy_that_the_kernel_refuses_for_its_uuid_is_told_so(path: str) -> None:
    class Copied(FakeKernel):
        """Has the same btrfs on another device."""

        def mount(
            self,
            device: str,
            path: str,
            fs_type: str,
            attributes: Set[str],
            parameters: Sequence[str],
        ) -> None:
            raise FileExistsError(errno.EEXIST, "File exists", device)

    kernel = Copied(FakeDevices())

    with pytest.raises(errors.MountFailed, match="same UUID"):
        mounts.ensure_mounted(kernel, formatted(kernel, "web", "btrfs"), path, "btrfs", NONE)


def test_those_who_keep_a_mount_busy_are_named_but_not_all() -> None:
    crowd = [f"cat ({number})" for number in range(9)]
    assert "in use by cat (0); try" in str(errors.Busy("/x", crowd[:1]))
    assert "cat (7); try" in str(errors.Busy("/x", crowd[:8]))
    assert "cat (7), and others; try" in str(errors.Busy("/x", crowd))


def test_users_of_a_place_are_those_with_something_open_in_it(tmp_path: Path) -> None:
    kernel = FakeKernel(FakeDevices())
    (tmp_path / "target-not").mkdir()
    with (tmp_path / "target-not" / "file").open("w"):
        assert mounts.of(kernel, str(tmp_path / "target")) == ()
    (tmp_path / "target").mkdir()
    with (tmp_path / "target" / "file").open("w"):
        [found] = mounts.of(kernel, str(tmp_path / "target"))
    assert f"({os.getpid()})" in found


def test_a_second_mount_of_a_device_has_the_first_ones_access(tmp_path: Path) -> None:
    kernel = FakeKernel(FakeDevices())
    device = formatted(kernel, "web")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    mounts.ensure_mounted(kernel, device, str(tmp_path / "a"), "ext4", NONE)
    mounts.ensure_mounted(kernel, device, str(tmp_path / "b"), "ext4", NONE)
    mounts.ensure_unmounted(kernel, str(tmp_path / "a"))
    assert kernel.devices.is_open(device)

    with pytest.raises(errors.Busy):
        mounts.ensure_mounted(kernel, device, str(tmp_path / "a"), "ext4", NONE, read_only=True)

    mounts.ensure_unmounted(kernel, str(tmp_path / "b"))
    kernel.devices.remove(device)


def test_a_kernel_without_the_file_system_says_so(path: str) -> None:
    class Poor(FakeKernel):
        """Built without xfs."""

        def mount(
            self,
            device: str,
            path: str,
            fs_type: str,
            attributes: Set[str],
            parameters: Sequence[str],
        ) -> None:
            raise OSError(19, "No such device", device)

    kernel = Poor(FakeDevices())

    with pytest.raises(errors.MountFailed, match="load its module"):
        mounts.ensure_mounted(kernel, formatted(kernel, "web", "xfs"), path, "xfs", NONE)


@pytest.mark.parametrize("fs_type", ["proc", "", "ext4\n", "fuse.x"])
def test_only_known_file_systems_are_mounted(fs_type: str, path: str) -> None:
    kernel = FakeKernel(FakeDevices())

    with pytest.raises(errors.UnsupportedFileSystem):
        mounts.ensure_mounted(kernel, formatted(kernel, "web"), path, fs_type, NONE)


def test_a_device_node_that_was_made_anew_is_the_same_device(tmp_path: Path) -> None:
    kernel = FakeKernel(FakeDevices())
    device = kernel.devices.add("/dev/data/web", 400 * MIB)
    (tmp_path / "block").touch()
    path = str(tmp_path / "block")
    mounts.ensure_bound(kernel, device.path, path, NONE)
    kernel.mounts[-1] = replace(kernel.mounts[-1], root="/dm-0//deleted")

    mounts.ensure_bound(kernel, device.path, path, NONE)

    assert len(table.read(kernel).at(path)) == 1
    assert table.read(kernel).at(path)[-1].root == "/dm-0//deleted"
    assert mounts.node(kernel, path) == device.number


def test_a_source_under_no_mount_is_not_bound(path: str) -> None:
    class Bare(FakeKernel):
        """A mount table without a root, as seen from a strange chroot."""

        def mountinfo(self) -> str:
            return ""

    with pytest.raises(errors.NotMounted):
        mounts.ensure_bound(Bare(FakeDevices()), path, path, NONE)


def test_a_mount_that_another_unmounts_first_is_unmounted(path: str) -> None:
    class Beaten(FakeKernel):
        """Another unmounts between our look and our call."""

        def unmount(self, path: str) -> None:
            super().unmount(path)
            super().unmount(path)

    kernel = Beaten(FakeDevices())
    mounts.ensure_mounted(kernel, formatted(kernel, "web"), path, "ext4", NONE)

    mounts.ensure_unmounted(kernel, path)

    assert table.read(kernel).at(path) == ()


def test_a_mount_that_comes_back_at_once_is_not_called_unmounted(path: str) -> None:
    class Stubborn(FakeKernel):
        """Another mounts again right after our call."""

        def unmount(self, path: str) -> None:
            super().unmount(path)
            self.mount_foreign(path)

    kernel = Stubborn(FakeDevices())
    mounts.ensure_mounted(kernel, formatted(kernel, "web"), path, "ext4", NONE)

    with pytest.raises(errors.UnmountFailed, match="again"):
        mounts.ensure_unmounted(kernel, path)


def test_a_mount_marked_busy_names_its_path(path: str) -> None:
    kernel = FakeKernel(FakeDevices())
    mounts.ensure_mounted(kernel, formatted(kernel, "web"), path, "ext4", NONE)
    kernel.busy.add(path)

    with pytest.raises(errors.Busy, match=f"{path} is in use"):
        mounts.ensure_unmounted(kernel, path)

    assert "by pid 7 (sh)" in str(errors.Busy(path, ["pid 7 (sh)"]))


def test_a_mount_that_was_looked_at_for_a_moment_is_unmounted(path: str) -> None:
    class Looked(FakeKernel):
        """Someone's statfs of the mount is under way when it is to be unmounted first."""

        looks = 1

        def unmount(self, path: str) -> None:
            if self.looks:
                self.looks -= 1
                raise OSError(16, "Device or resource busy", path)
            super().unmount(path)

    kernel = Looked(FakeDevices())
    mounts.ensure_mounted(kernel, formatted(kernel, "web"), path, "ext4", NONE)

    mounts.ensure_unmounted(kernel, path)

    assert not table.read(kernel).at(path)


def test_an_unmount_that_the_kernel_refuses_is_told(path: str) -> None:
    class Refusing(FakeKernel):
        """Without the capability."""

        def unmount(self, path: str) -> None:
            raise OSError(1, "Operation not permitted", path)

    kernel = Refusing(FakeDevices())
    mounts.ensure_mounted(kernel, formatted(kernel, "web"), path, "ext4", NONE)

    with pytest.raises(errors.UnmountFailed, match="EPERM"):
        mounts.ensure_unmounted(kernel, path)


def test_a_mount_below_keeps_the_one_above_it_mounted(path: str) -> None:
    kernel = FakeKernel(FakeDevices())
    mounts.ensure_mounted(kernel, formatted(kernel, "web"), path, "ext4", NONE)
    Path(path, "inner").mkdir()
    kernel.mount_foreign(f"{path}/inner")

    with pytest.raises(errors.Busy):
        mounts.ensure_unmounted(kernel, path)


def test_an_option_that_a_copy_needs_may_be_given_by_its_user(path: str) -> None:
    kernel = FakeKernel(FakeDevices())
    device = formatted(kernel, "web", "xfs")
    chosen = options.parse(["nouuid", "sync", "discard"], "xfs")

    mounts.ensure_mounted(kernel, device, path, "xfs", chosen)

    assert table.read(kernel).at(path)[0].super_options == ("rw", "sync", "nouuid", "discard")
