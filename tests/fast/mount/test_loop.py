"""Loop devices when others want the same ones."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.devices import FakeDevices
from fakes.kernel import FakeKernel

from mount import errors, loop
from mount.block_devices import LoopStatus


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "disk"
    with path.open("wb") as opened:
        opened.truncate(1 << 20)
    return str(path)


class Contended(FakeKernel):
    """Others take the free device so many times before we get one."""

    def __init__(self, times: int) -> None:
        super().__init__(FakeDevices())
        self.times = times

    def loop_configure(
        self, device: str, file: str, *, read_only: bool, direct_io: bool, name: str
    ) -> None:
        if self.times:
            self.times -= 1
            raise OSError(errno.EBUSY, "Device or resource busy", device)
        super().loop_configure(device, file, read_only=read_only, direct_io=direct_io, name=name)


def test_a_free_device_that_another_takes_is_no_failure(file: str) -> None:
    assert loop.attach(Contended(3), file) == "/dev/loop0"


def test_losing_every_race_is_an_error_in_the_end(file: str) -> None:
    with pytest.raises(errors.LoopFailed, match="taken by others"):
        loop.attach(Contended(1000), file)


def test_two_who_attach_one_file_end_with_one_device(file: str) -> None:
    class Twice(FakeKernel):
        """Another attaches the same file just before us, to a lower number."""

        def loop_configure(
            self, device: str, file: str, *, read_only: bool, direct_io: bool, name: str
        ) -> None:
            super().loop_configure(
                device, file, read_only=read_only, direct_io=direct_io, name=name
            )
            second = self.loop_free()
            super().loop_configure(
                second, file, read_only=read_only, direct_io=direct_io, name=name
            )

        def loop_free(self) -> str:
            return super().loop_free() if self.loop_devices() else "/dev/loop5"

    kernel = Twice(FakeDevices())

    assert loop.attach(kernel, file) == "/dev/loop0"
    assert kernel.loop_devices() == ["/dev/loop0"]


def test_a_file_system_without_direct_io_is_used_without(file: str) -> None:
    class Buffered(FakeKernel):
        """The backing file is on tmpfs."""

        def loop_configure(
            self, device: str, file: str, *, read_only: bool, direct_io: bool, name: str
        ) -> None:
            if direct_io:
                raise OSError(errno.EINVAL, "Invalid argument", device)
            super().loop_configure(
                device, file, read_only=read_only, direct_io=direct_io, name=name
            )

    kernel = Buffered(FakeDevices())

    assert not kernel.loop_status(loop.attach(kernel, file)).direct_io
    plain = FakeKernel(FakeDevices())
    assert plain.loop_status(loop.attach(plain, file)).direct_io


def test_a_kernel_without_loop_devices_is_named(file: str) -> None:
    class Bare(FakeKernel):
        """/dev/loop-control is missing."""

        def loop_free(self) -> str:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", "/dev/loop-control")

    with pytest.raises(errors.LoopFailed, match="No such file"):
        loop.attach(Bare(FakeDevices()), file)


class Forgetful(FakeKernel):
    """A device that is listed, and detached by the time it is asked."""

    def loop_status(self, device: str) -> LoopStatus:
        raise OSError(errno.ENXIO, "No such device or address", device)


def test_a_device_detached_while_we_look_is_passed_over(file: str) -> None:
    kernel = Forgetful(FakeDevices())
    kernel.loop_configure("/dev/loop0", file, read_only=False, direct_io=False, name="")

    assert loop.find(kernel, file) is None


def test_a_device_that_cannot_be_asked_is_an_error(file: str) -> None:
    class Denying(FakeKernel):
        """Without the permission."""

        def loop_status(self, device: str) -> LoopStatus:
            raise PermissionError(errno.EACCES, "Permission denied", device)

    kernel = Denying(FakeDevices())
    kernel.loop_configure("/dev/loop0", file, read_only=False, direct_io=False, name="")

    with pytest.raises(errors.LoopFailed, match="Permission denied"):
        loop.find(kernel, file)


def test_a_reader_delays_detaching_and_is_told_of(file: str) -> None:
    class Read(FakeKernel):
        """Someone has the device open, without holding it."""

        def loop_clear(self, device: str) -> None:
            pass

    kernel = Read(FakeDevices())
    device = loop.attach(kernel, file)

    with pytest.raises(errors.Busy):
        loop.detach(kernel, device)


@pytest.mark.parametrize(("number", "fails"), [(errno.ENXIO, False), (errno.EIO, True)])
def test_only_a_device_that_is_gone_already_may_fail_to_detach(
    file: str, number: int, fails: bool
) -> None:
    class Failing(FakeKernel):
        """Detached by another, or broken."""

        def loop_clear(self, device: str) -> None:
            super().loop_clear(device)
            raise OSError(number, "no", device)

    kernel = Failing(FakeDevices())
    device = loop.attach(kernel, file)

    if fails:
        with pytest.raises(errors.LoopFailed):
            loop.detach(kernel, device)
    else:
        loop.detach(kernel, device)
    assert kernel.loop_devices() == []


def test_a_volume_under_a_loop_device_is_held_until_it_is_detached() -> None:
    devices = FakeDevices()
    kernel = FakeKernel(devices)
    volume = devices.add("/dev/data/web", 1 << 20)
    device = loop.attach_read_only(kernel, volume.path)

    with pytest.raises(OSError, match="busy"):
        devices.remove(volume.path)
    devices.resize(volume.path, 2 << 20)
    loop.grow(kernel, device)
    assert kernel.device_size_bytes(device) == 2 << 20
    loop.detach(kernel, device)

    devices.remove(volume.path)


def test_only_what_carver_made_is_a_read_only_way_to_a_device() -> None:
    devices = FakeDevices()
    kernel = FakeKernel(devices)
    volume = devices.add("/dev/mapper/data-" + "long" * 20, 1 << 20)
    for number, read_only in enumerate((False, True)):
        # Kubelet's, and what a person attached to have a look.
        other, name = f"/dev/loop{number}", volume.path
        kernel.loop_configure(other, volume.path, read_only=read_only, direct_io=False, name=name)

    own = loop.attach_read_only(kernel, volume.path)

    assert own == "/dev/loop2"
    assert loop.attach_read_only(kernel, volume.path) == own
    assert loop.over(kernel, volume.number) == (own,)


def test_one_that_is_about_to_go_is_not_handed_out() -> None:
    class Leaving(FakeKernel):
        """The first one was detached while a program had it open."""

        def loop_status(self, device: str) -> LoopStatus:
            return replace(super().loop_status(device), leaving=device == "/dev/loop0")

    devices = FakeDevices()
    kernel = Leaving(devices)
    volume = devices.add("/dev/data/web", 1 << 20)
    assert loop.attach_read_only(kernel, volume.path) == "/dev/loop0"
    assert loop.attach_read_only(kernel, volume.path) == "/dev/loop1"
    # Whoever has the first one reads the volume still.
    assert loop.over(kernel, volume.number) == ("/dev/loop0", "/dev/loop1")


def test_a_device_that_is_missing_has_no_read_only_way_to_it() -> None:
    with pytest.raises(errors.LoopFailed, match="No such file"):
        loop.attach_read_only(FakeKernel(FakeDevices()), "/dev/data/web")
