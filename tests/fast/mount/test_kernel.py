"""The fake kernel covers the real one; block devices and paths of the real one."""

import errno
import inspect
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
from fakes.devices import FakeDevices
from fakes.kernel import DECIDING, FakeKernel

from mount import mount_errors, table
from mount import mounts as nodes
from mount.block_io import By
from mount.kernel import Kernel
from mount.stacks import Stack

# These act on target paths, which are real in the fake as well.
ON_REAL_PATHS = {"make_directory", "make_file"}


def operations() -> set[str]:
    return {name for name in dir(Kernel) if not name.startswith("_")}


def test_the_fake_has_each_operation_with_the_signature_of_the_real_one() -> None:
    assert operations() - set(vars(FakeKernel)) == ON_REAL_PATHS | DECIDING
    for name in set(vars(FakeKernel)) & operations():
        fake, real = getattr(FakeKernel, name), getattr(Kernel, name)
        assert inspect.signature(fake) == inspect.signature(real), name


def test_every_error_has_one_of_two_roots_and_a_sentence_of_its_own() -> None:
    classes = [one for one in vars(mount_errors).values() if inspect.isclass(one)]
    found = [one for one in classes if one.__module__ == mount_errors.__name__]

    roots = (mount_errors.MountError, mount_errors.CommandError)
    assert len(found) > 15
    assert all(issubclass(one, roots) and one.__doc__ for one in found)
    assert "holds swap (other), not ext4" in str(
        mount_errors.UnexpectedContents("/dev/dm-3", "swap (other)", "ext4")
    )


def test_binds_of_a_device_node_are_found_by_its_number(tmp_path: Path) -> None:
    kernel = FakeKernel(FakeDevices())
    first, _ = (kernel.devices.add(f"/dev/data/{name}", 1 << 20) for name in "ab")
    path = tmp_path / "block"
    path.touch()
    kernel.bind(first.path, str(path), set())

    mounts = table.read(kernel)
    bound = [(one.path, number) for one, number in nodes.bound_nodes(kernel, mounts)]
    assert bound == [(str(path), first.number)]


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """A file in the place of a block device."""
    (tmp_path / "device").touch()
    return tmp_path / "device"


class Held:
    """os.open, for which a device is busy so many times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self.left, self._open = times, os.open
        monkeypatch.setattr("mount.block_io.os.open", self)
        monkeypatch.setattr("mount.block_io._BUSY_SECONDS", 0)

    def __call__(
        self, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        if flags & os.O_EXCL and self.left:
            self.left -= 1
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        return self._open(path, flags, mode, dir_fd=dir_fd)


def test_a_device_that_a_child_has_open_until_its_exec_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, device: Path
) -> None:
    Held(monkeypatch, 3)
    Kernel().write(str(device), 0, b"data")
    assert device.read_bytes() == b"data"


def test_a_device_that_stays_held_is_busy(monkeypatch: pytest.MonkeyPatch, device: Path) -> None:
    held = Held(monkeypatch, 1000)
    with pytest.raises(OSError, match="busy") as refused:
        Kernel().zero_out(str(device), 0, 4096)
    assert refused.value.errno == errno.EBUSY
    assert held.left == 950
    # It is no block device.
    with pytest.raises(OSError, match="device") as tried:
        Kernel().zero_out(str(device), 0, 4096, allow_in_use=True)
    assert tried.value.errno != errno.EBUSY


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("real/x", "real/x"),
        ("link/x", "real/x"),
        ("link", "real"),
        ("link/away/there", "real/away/there"),
        ("up/real/x", "real/x"),
        ("broken", "away"),
        ("round", "round"),
        ("ends (deleted)", "ends (deleted)"),
        ("of bytes \udcff", "of bytes \udcff"),
    ],
)
def test_a_path_is_resolved_as_far_as_it_exists(tmp_path: Path, path: str, expected: str) -> None:
    (tmp_path / "real/x").mkdir(parents=True)
    for name in ("ends (deleted)", "of bytes \udcff"):
        (tmp_path / name).mkdir()
    for link, target in {"link": "real", "up": ".", "broken": "away", "round": "round"}.items():
        (tmp_path / link).symlink_to(target)

    assert Kernel().real_path(str(tmp_path / path)) == str(tmp_path / expected)


def test_zero_blocks_are_marked_others_stay_and_both_are_told_from_zeroes(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Kernel, "_unwatched", lambda _, path: nullcontext((path, None)))
    kernel, path = Kernel(), str(device)
    data = b"data".ljust(4096, b"\0")
    device.write_bytes(data + bytes(3 * 4096 + 512))
    assert kernel.are_zero(path, [4096, 8192])
    assert kernel.are_zero(path, [4096], 8192)
    assert not kernel.are_zero(path, [4096, 0])
    # The last is no whole block, and cannot be known.
    kernel.mark(path, [0, 8192, 4 * 4096])
    assert not kernel.are_zero(path, [8192])
    assert not kernel.are_zero(path, [4 * 4096])
    found = device.read_bytes()
    assert found[:8192] == data + bytes(4096)
    assert found[12288:] == bytes(4096 + 512)
    assert any(found[8192:12288])


def test_a_device_that_cannot_be_looked_at_is_zeroed_by_the_kernel(device: Path) -> None:
    assert Kernel().zeroing(str(device)) is By.ZEROES


@pytest.mark.parametrize("distrusted", [By.HOLE, By.DISCARD])
def test_a_distrusted_way_is_not_taken_on_any_volume_of_the_disk(distrusted: By) -> None:
    devices = FakeDevices()
    kernel = FakeKernel(devices)
    for path, disks in (("/dev/a", "sda"), ("/dev/b", "sdb"), ("/dev/ab", "sda sdb")):
        devices.add(path, 1 << 20).stack = Stack(True, disks=frozenset(disks.split()))
    assert kernel.distrust(["sda"], distrusted) == ["sda"]
    assert kernel.distrust(["sda"], distrusted) == []
    is_hole = distrusted is By.HOLE
    for path, is_avoided in (("/dev/a", True), ("/dev/b", False), ("/dev/ab", True)):
        assert kernel.is_distrusted(kernel.stack(path), distrusted) == is_avoided
        assert kernel.zeroing(path) is (By.WRITES if is_avoided and is_hole else By.HOLE)
