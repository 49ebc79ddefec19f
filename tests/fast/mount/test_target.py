"""Places for mounts are made and removed with care."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.devices import FakeDevices
from fakes.kernel import FakeKernel, failing
from hypothesis import given
from hypothesis import strategies as st

from mount import filesystem_health, mount_errors, target
from mount.kernel import Kernel

Ensure = Callable[[Kernel, str], None]
ALL = (target.ensure_directory, target.ensure_file, target.ensure_absent)


@pytest.fixture
def kernel() -> FakeKernel:
    return FakeKernel(FakeDevices())


@pytest.mark.parametrize(
    "path",
    [
        *("", "/", "relative", "./x", "/a/../b", "/a/./b", "/a//b", "//a", "/a/"),
        *("/a\nb", "/a\0b", "/a\x7fb", "/\udcff"),
        *("/" + "a" * 256, "/" + "é" * 128, "/a" * 2048),
    ],
)
def test_a_path_that_is_not_normalised_is_refused(path: str) -> None:
    with pytest.raises(mount_errors.BadPath) as caught:
        target.check(path)

    assert str(caught.value).isprintable()


@pytest.mark.parametrize("path", ["/a", "/a b/ü", "/" + "a" * 255, "/a" * 2047])
def test_a_normalised_path_is_returned(path: str) -> None:
    assert target.check(path) == path


@given(st.text() | st.text("/.a").map(lambda text: "/" + text))
def test_any_text_is_a_normalised_path_or_a_bad_path(path: str) -> None:
    try:
        target.check(path)
    except mount_errors.BadPath:
        return
    assert path.startswith("/")
    assert path == os.path.normpath(path)
    assert path.isprintable() or "\\" in ascii(path)


@pytest.mark.parametrize(
    ("ensure", "mode"), [(target.ensure_directory, 0o750), (target.ensure_file, 0o640)]
)
def test_a_target_is_made_once_and_its_mode_left_alone(
    kernel: FakeKernel, tmp_path: Path, ensure: Ensure, mode: int
) -> None:
    path = tmp_path / "target"

    ensure(kernel, str(path))
    assert stat.S_IMODE(path.stat().st_mode) & ~mode == 0
    path.chmod(0o777)
    ensure(kernel, str(path))

    assert stat.S_IMODE(path.stat().st_mode) == 0o777


def test_a_file_is_not_taken_for_a_directory_nor_the_reverse(
    kernel: FakeKernel, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()

    with pytest.raises(mount_errors.NotADirectory):
        target.ensure_directory(kernel, str(tmp_path / "file"))
    with pytest.raises(mount_errors.NotAFile):
        target.ensure_file(kernel, str(tmp_path / "directory"))


def test_a_missing_parent_is_an_error(kernel: FakeKernel, tmp_path: Path) -> None:
    path = str(tmp_path / "missing" / "target")

    for ensure in (target.ensure_directory, target.ensure_file):
        with pytest.raises(mount_errors.TargetError, match="cannot be made"):
            ensure(kernel, path)
    target.ensure_absent(kernel, path)


def test_another_process_may_do_the_same_meanwhile(kernel: FakeKernel, tmp_path: Path) -> None:
    for name in ("make_directory", "make_file", "remove_directory"):
        kernel.follow(name)

    target.ensure_directory(kernel, str(tmp_path / "directory"))
    target.ensure_file(kernel, str(tmp_path / "file"))
    target.ensure_absent(kernel, str(tmp_path / "directory"))

    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_empty_directory_and_an_empty_file_are_removed(
    kernel: FakeKernel, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()

    for name in ("file", "directory", "never there"):
        target.ensure_absent(kernel, str(tmp_path / name))
        target.ensure_absent(kernel, str(tmp_path / name))

    assert list(tmp_path.iterdir()) == []


def test_what_holds_data_stays(kernel: FakeKernel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("data")
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "inner").touch()
    os.mkfifo(tmp_path / "fifo")

    for name in ("file", "directory", "fifo"):
        with pytest.raises(mount_errors.TargetInUse):
            target.ensure_absent(kernel, str(tmp_path / name))

    assert (tmp_path / "file").read_text() == "data"
    assert (tmp_path / "directory" / "inner").exists()


def test_a_removal_that_the_kernel_refuses_is_an_error(kernel: FakeKernel, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    kernel.override(remove_directory=failing(errno.EROFS))

    with pytest.raises(mount_errors.TargetError, match="Read-only"):
        target.ensure_absent(kernel, str(tmp_path / "target"))


def test_a_link_at_the_end_of_a_path_is_refused(kernel: FakeKernel, tmp_path: Path) -> None:
    outside, link = tmp_path / "outside", tmp_path / "link"
    outside.mkdir()
    link.symlink_to(outside)

    with pytest.raises(mount_errors.BadPath, match="symbolic link"):
        target.resolve(kernel, str(link))
    for ensure in ALL:
        with pytest.raises(mount_errors.TargetError):
            ensure(kernel, str(link))

    assert outside.is_dir()
    assert link.is_symlink()


def test_a_place_must_be_inside_whatever_links_are_on_the_way(
    kernel: FakeKernel, tmp_path: Path
) -> None:
    inside, outside = tmp_path / "kubelet", tmp_path / "kubelet-not"
    (inside / "pods").mkdir(parents=True)
    outside.mkdir()
    (inside / "out").symlink_to(outside)
    (inside / "in").symlink_to("pods")
    (tmp_path / "var").symlink_to("kubelet")
    roots = ["/elsewhere", str(tmp_path / "var")]

    for path in ("kubelet/pods/x", "kubelet/in/x", "var/pods/x"):
        found = target.resolve(kernel, str(tmp_path / path), roots)
        assert found == str(inside / "pods/x")
    for path in ("kubelet", "kubelet-not/x", "kubelet/out/x", "x"):
        with pytest.raises(mount_errors.BadPath, match="leads out of /elsewhere and "):
            target.resolve(kernel, str(tmp_path / path), roots)


@pytest.mark.parametrize("old_calls", [False, True])
def test_the_kernel_follows_no_link_on_the_way_to_a_place(tmp_path: Path, old_calls: bool) -> None:
    real = Kernel(old_calls=old_calls)
    (tmp_path / "outside" / "empty").mkdir(parents=True)
    (tmp_path / "outside" / "file").touch()
    (tmp_path / "link").symlink_to("outside")
    (tmp_path / "here").mkdir()
    link = f"{tmp_path}/link"

    for operation in (
        lambda: real.make_directory(f"{link}/new", 0o700),
        lambda: real.make_file(f"{link}/new", 0o600),
        lambda: real.remove_directory(f"{link}/empty"),
        lambda: real.remove_file(f"{link}/file"),
        lambda: real.lstat(f"{link}/file"),
        lambda: real.statvfs(link),
        lambda: real.bind(link, f"{tmp_path}/here", set()),
        lambda: real.unmount(f"{link}/empty"),
    ):
        with pytest.raises(OSError, match="symbolic links"):
            operation()

    assert {one.name for one in (tmp_path / "outside").iterdir()} == {"empty", "file"}
    assert stat.S_ISLNK(real.lstat(link).st_mode)
    assert real.statvfs("/").f_bsize
    real.make_directory(f"{tmp_path}/here/new", 0o700)
    real.remove_directory(f"{tmp_path}/here/new")
    with pytest.raises(FileNotFoundError):
        real.statvfs(f"{tmp_path}/here/new")


def test_a_file_system_that_was_shut_down_is_still_found(
    kernel: FakeKernel, tmp_path: Path
) -> None:
    path = str(tmp_path / "target")
    for name in ("lstat", "statvfs"):
        kernel.override(**{name: failing(errno.EIO)})

    assert target.resolve(kernel, path) == path
    for ask in (target.ensure_directory, filesystem_health.of):
        with pytest.raises(mount_errors.TargetError, match="Input/output error"):
            ask(kernel, path)


def test_what_is_not_mounted_or_no_device_has_no_size(kernel: FakeKernel, tmp_path: Path) -> None:
    with pytest.raises(mount_errors.NotMounted):
        filesystem_health.of(kernel, str(tmp_path / "missing"))
    with pytest.raises(mount_errors.DeviceMissing):
        filesystem_health.device_size_bytes(kernel, str(tmp_path))
