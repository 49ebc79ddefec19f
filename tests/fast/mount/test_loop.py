"""Loop devices when others want the same ones."""

import errno
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.devices import FakeDevices
from fakes.kernel import FakeKernel, failing

from mount import calls, loop, mount_errors
from mount.block_devices import LoopDevices, LoopStatus


@pytest.fixture
def kernel() -> FakeKernel:
    return FakeKernel(FakeDevices())


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "disk"
    with path.open("wb") as opened:
        opened.truncate(1 << 20)
    return str(path)


@pytest.mark.parametrize(("times", "is_attached"), [(3, True), (1000, False)])
def test_a_free_device_that_others_take_is_tried_again(
    kernel: FakeKernel, file: str, times: int, is_attached: bool
) -> None:
    operations = iter([*[failing(errno.EBUSY)] * times, kernel.loop_configure])
    kernel.override(loop_configure=lambda *words, **options: next(operations)(*words, **options))
    if is_attached:
        assert loop.attach(kernel, file) == "/dev/loop0"
    else:
        with pytest.raises(mount_errors.LoopFailed, match="taken by others"):
            loop.attach(kernel, file)


def test_two_that_attach_one_file_end_with_one_device(kernel: FakeKernel, file: str) -> None:
    configure = kernel.loop_configure

    def raced(device: str, *words: str, **options: Any) -> None:
        """Another process attaches the same file at once, to a lower number."""
        configure(device, *words, **options)
        configure("/dev/loop0", *words, **options)

    kernel.override(loop_free=lambda: "/dev/loop5")
    kernel.override(loop_configure=raced)

    assert loop.attach(kernel, file) == "/dev/loop0"
    assert kernel.loop_devices() == ["/dev/loop0"]


def test_a_device_is_read_in_the_blocks_that_its_user_counts_in(kernel: FakeKernel) -> None:
    """A partition table is found by the number of its block."""
    for name, block_bytes in (("a", 4096), ("b", 512)):
        kernel.devices.add(f"/dev/mapper/{name}", 1 << 20).block_bytes = block_bytes
        one = loop.attach_read_only(kernel, f"/dev/mapper/{name}")
        assert kernel.logical_block_bytes(one) == block_bytes


def test_the_kernel_is_told_the_size_of_the_blocks(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it a loop device has blocks of 512 bytes (loop_configure in drivers/block/loop.c)."""
    told: list[bytes] = []
    monkeypatch.setattr(calls, "ioctl", lambda *words: told.append(words[2]))
    LoopDevices().loop_configure(
        "/dev/loop0", file, read_only=True, direct_io=True, name="", block_bytes=4096
    )
    assert struct.unpack_from("=II", told[0])[1] == 4096


@pytest.mark.parametrize("has_direct_io", [True, False])
def test_direct_io_is_used_where_the_file_system_has_it(
    kernel: FakeKernel, file: str, has_direct_io: bool
) -> None:
    configure = kernel.loop_configure

    def configured(device: str, file: str, *, direct_io: bool, **options: Any) -> None:
        if direct_io and not has_direct_io:  # on tmpfs
            raise OSError(errno.EINVAL, "Invalid argument", device)
        configure(device, file, direct_io=direct_io, **options)

    kernel.override(loop_configure=configured)

    assert kernel.loop_status(loop.attach(kernel, file)).direct_io == has_direct_io


def test_a_kernel_without_loop_devices_is_an_error(kernel: FakeKernel, file: str) -> None:
    kernel.override(loop_free=failing(errno.ENOENT))

    with pytest.raises(mount_errors.LoopFailed, match="No such file"):
        loop.attach(kernel, file)


def test_a_device_detached_since_it_was_listed_is_passed_over(
    kernel: FakeKernel, file: str
) -> None:
    loop.attach(kernel, file)
    kernel.override(loop_status=failing(errno.ENXIO))

    assert loop.find(kernel, file) is None


def test_a_device_whose_status_is_refused_is_an_error(kernel: FakeKernel, file: str) -> None:
    loop.attach(kernel, file)
    kernel.override(loop_status=failing(errno.EACCES))

    with pytest.raises(mount_errors.LoopFailed, match="Permission denied"):
        loop.find(kernel, file)


def test_a_device_that_stays_open_is_busy(kernel: FakeKernel, file: str) -> None:
    # The kernel says yes, and detaches it when its reader has closed it.
    device = loop.attach(kernel, file)
    clear = kernel.loop_clear
    kernel.override(loop_clear=lambda _device: None)
    waits: list[str] = []

    @contextmanager
    def waiting() -> Iterator[None]:
        waits.append("udev")
        yield

    with pytest.raises(mount_errors.Busy):
        loop.detach(kernel, device, waiting)
    assert waits == ["udev"]
    kernel.override(loop_clear=clear)
    loop.detach(kernel, device, waiting)
    assert waits == ["udev"]


def test_a_device_that_another_detaches_first_is_detached(kernel: FakeKernel, file: str) -> None:
    device = loop.attach(kernel, file)
    kernel.follow("loop_clear")

    loop.detach(kernel, device)

    assert kernel.loop_devices() == []


def test_a_device_that_the_kernel_does_not_detach_is_an_error(
    kernel: FakeKernel, file: str
) -> None:
    device = loop.attach(kernel, file)
    kernel.override(loop_clear=failing(errno.EIO))

    with pytest.raises(mount_errors.LoopFailed):
        loop.detach(kernel, device)


def test_a_volume_under_a_loop_device_is_held_until_it_is_detached(kernel: FakeKernel) -> None:
    volume = kernel.devices.add("/dev/data/web", 1 << 20)
    device = loop.attach_read_only(kernel, volume.path)

    with pytest.raises(OSError, match="busy"):
        kernel.devices.remove(volume.path)
    kernel.devices.resize(volume.path, 2 << 20)
    loop.grow(kernel, device)
    assert kernel.device_size_bytes(device) == 2 << 20
    loop.detach(kernel, device)

    kernel.devices.remove(volume.path)


def test_only_read_only_devices_that_carver_made_are_handed_out(kernel: FakeKernel) -> None:
    volume = kernel.devices.add("/dev/mapper/data-" + "long" * 20, 1 << 20)
    # Kubelet's, and one that a person attached.
    for number, read_only in enumerate((False, True)):
        kernel.loop_configure(
            f"/dev/loop{number}",
            volume.path,
            read_only=read_only,
            direct_io=False,
            name=volume.path,
        )

    own = loop.attach_read_only(kernel, volume.path)

    assert own == "/dev/loop2"
    assert loop.attach_read_only(kernel, volume.path) == own
    assert loop.loop_devices_over(kernel, volume.number) == (own,)


def test_a_device_that_is_about_to_go_is_not_handed_out(kernel: FakeKernel) -> None:
    status = kernel.loop_status

    def leaving(device: str) -> LoopStatus:
        """The first one was detached while a program had it open."""
        return replace(status(device), leaving=device == "/dev/loop0")

    kernel.override(loop_status=leaving)
    volume = kernel.devices.add("/dev/data/web", 1 << 20)

    assert loop.attach_read_only(kernel, volume.path) == "/dev/loop0"
    assert loop.attach_read_only(kernel, volume.path) == "/dev/loop1"
    # A program still reads the volume through the first one.
    assert loop.loop_devices_over(kernel, volume.number) == ("/dev/loop0", "/dev/loop1")


def test_a_missing_device_has_no_read_only_loop(kernel: FakeKernel) -> None:
    with pytest.raises(mount_errors.LoopFailed, match="No such file"):
        loop.attach_read_only(kernel, "/dev/data/web")
