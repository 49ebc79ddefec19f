"""The pods' cgroup: found by its name, controlled, its limits and counts read and written."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mount import cgroups, mount_errors
from mount.cgroups import UNLIMITED, Cgroups, IoCount, IoMax

CONTROLLERS = "cpuset cpu io memory pids\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A hierarchy without pods."""
    (tmp_path / "cgroup.controllers").write_text(CONTROLLERS)
    (tmp_path / "cgroup.subtree_control").write_text("memory pids\n")
    (tmp_path / "system.slice" / "carver.service").mkdir(parents=True)
    return tmp_path


def made(root: Path, path: str, *, is_populated: bool = True) -> Path:
    """A cgroup, with its parents."""
    found = root / path
    found.mkdir(parents=True)
    (found / "cgroup.events").write_text(f"populated {int(is_populated)}\nfrozen 0\n")
    return found


@pytest.mark.parametrize(
    "path",
    [
        *("kubepods.slice", "kubepods"),
        # kind has these.
        *("kubelet.slice/kubelet-kubepods.slice", "kubelet/kubepods"),
    ],
)
def test_the_pods_are_found_where_kubelets_drivers_put_them(root: Path, path: str) -> None:
    pods = made(root, path)
    made(root, f"{path}/besteffort/kubepods")
    assert Cgroups("", root).pods_directory() == pods


def test_of_two_the_one_with_processes_is_taken_unless_one_is_configured(root: Path) -> None:
    old, new = made(root, "kubepods", is_populated=False), made(root, "kubepods.slice")
    assert Cgroups("", root).pods_directory() == new
    assert Cgroups("/kubepods", root).pods_directory() == old
    (old / "cgroup.events").write_text("populated 1\n")
    with pytest.raises(mount_errors.NoCgroup, match=f"{old}, {new}"):
        Cgroups("", root).pods_directory()


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("pods", "none"),
        ("configured", "/gone does not exist"),
        ("controller", "no I/O controller"),
        ("hierarchy", "no cgroup v2 hierarchy"),
    ],
)
def test_what_is_missing_is_said(root: Path, missing: str, words: str) -> None:
    if missing != "pods":
        made(root, "kubepods.slice")
    if missing == "controller":
        (root / "cgroup.controllers").write_text("memory pids\n")
    elif missing == "hierarchy":
        (root / "cgroup.controllers").unlink()
    with pytest.raises(mount_errors.NoCgroup, match=words):
        Cgroups("gone" if missing == "configured" else "", root).prepare()
    assert (root / "cgroup.subtree_control").read_text() == "memory pids\n"


def test_io_is_controlled_down_to_the_pods_and_not_without_throttling(root: Path) -> None:
    pods = made(root, "kubelet.slice/kubelet-kubepods.slice")
    (pods.parent / "cgroup.controllers").write_text(CONTROLLERS)
    (pods.parent / "cgroup.subtree_control").write_text("io\n")
    with pytest.raises(mount_errors.NoCgroup, match="CONFIG_BLK_DEV_THROTTLING"):
        Cgroups("", root).prepare()
    # What is written there adds to what is there; a file has it in place of that.
    assert (root / "cgroup.subtree_control").read_text().startswith("+io")
    (pods.parent / "cgroup.subtree_control").write_text("io\n")
    (pods / "io.max").touch()
    assert Cgroups("", root).prepare() == pods
    assert (pods.parent / "cgroup.subtree_control").read_text() == "io\n"


def test_io_whose_files_are_not_there_yet_is_waited_for_by_a_second_write(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods, written = made(root, "kubepods.slice"), list[str]()

    def write(path: Path, text: str) -> None:
        written.append(text)
        if len(written) == 2:
            path.write_text("io memory pids")
            (pods / "io.max").touch()

    monkeypatch.setattr(cgroups, "_write", write)
    assert Cgroups("", root).prepare() == pods
    assert written == ["+io", "+io"]


def test_limits_are_read_as_they_are_written(root: Path) -> None:
    pods, limit = made(root, "kubepods.slice"), IoMax(read_bytes=1 << 20, writes=100)
    known = Cgroups("", root)
    assert known.limits() == {}
    (pods / "io.max").touch()
    known.limit((252, 7), limit)
    # The kernel's format: Documentation/admin-guide/cgroup-v2.rst.
    written = (pods / "io.max").read_text().split()
    assert written[0] == "252:7"
    assert {"rbps=1048576", "wbps=max", "riops=max", "wiops=100"} <= set(written)
    found = known.limits()
    assert found == {(252, 7): limit}
    assert known.limits() is found
    (pods / "io.max").write_text(f"252:7 {limit.words()}\n252:8 {limit.words()}\n")
    assert known.limits() == {(252, 7): limit, (252, 8): limit}
    assert IoMax.parse(UNLIMITED.words().split()) == UNLIMITED
    assert not UNLIMITED


def test_counts_of_devices_without_any_have_no_line_of_their_own(root: Path) -> None:
    pods = made(root, "kubepods.slice")
    (pods / "io.max").touch()
    (pods / "io.stat").write_text(
        "252:1 252:0 rbytes=10 wbytes=20 rios=1 wios=2 dbytes=0 dios=0\n"
        "8:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=0 dios=0 cost.usage=7\n"
    )
    counted = Cgroups("", root).counts()
    assert counted == {
        (252, 0): IoCount(read_bytes=10, write_bytes=20, reads=1, writes=2),
        (8, 0): IoCount(read_bytes=1, write_bytes=2, reads=3, writes=4),
    }


def test_a_device_that_is_gone_is_no_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (made(root, "kubepods.slice") / "io.max").touch()

    def gone(_descriptor: int, _text: bytes) -> int:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    cgroup = Cgroups("", root)
    cgroup.prepare()
    monkeypatch.setattr(os, "write", gone)
    cgroup.limit((1, 2), UNLIMITED)


METHODS: dict[str, Callable[[Cgroups], object]] = {
    "pods_directory": lambda one: one.pods_directory(),
    "prepare": lambda one: one.prepare(),
    "limits": lambda one: one.limits(),
    "limit": lambda one: one.limit((1, 2), UNLIMITED),
    "counts": lambda one: one.counts(),
}


@pytest.mark.parametrize("number", [errno.ENODEV, errno.ENOENT, errno.EIO])
@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_a_cgroup_that_vanishes_at_any_step_is_said_to_be_missing(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    is_prepared: bool,
    at: int,
    number: int,
) -> None:
    """What a call finds has gone by its next step: kubelet makes it anew when it starts."""
    pods = made(root, "kubepods.slice")
    (pods / "io.max").touch()
    (pods / "io.stat").touch()
    cgroup = Cgroups("", root)
    if is_prepared:
        cgroup.prepare()
    left, read, write, inside = [at], Path.read_text, os.write, Path.iterdir

    def step() -> None:
        left[0] -= 1
        if left[0] < 0:
            shutil.rmtree(pods, ignore_errors=True)
            raise OSError(number, os.strerror(number))

    def reading(path: Path) -> str:
        step()
        return read(path)

    def writing(descriptor: int, text: bytes) -> int:
        step()
        return write(descriptor, text)

    def looking(path: Path) -> Iterator[Path]:
        if left[0] <= 0:
            shutil.rmtree(pods, ignore_errors=True)
            return inside(pods)
        return inside(path)

    monkeypatch.setattr(Path, "read_text", reading)
    monkeypatch.setattr(os, "write", writing)
    monkeypatch.setattr(Path, "iterdir", looking)
    with suppress(mount_errors.NoCgroup):
        METHODS[name](cgroup)
