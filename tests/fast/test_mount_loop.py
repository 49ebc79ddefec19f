"""Loop devices when others want the same ones."""

import errno
from pathlib import Path

import pytest
from fakes.devices import FakeDevices
from fakes.kernel import FakeKernel

from mount import errors, loop
from mount.syscalls import LoopStatus


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

    def loop_configure(self, device: str, file: str, *, read_only: bool, direct_io: bool) -> None:
        if self.times:
            self.times -= 1
            raise OSError(errno.EBUSY, "Device or resource busy", device)
        super().loop_configure(device, file, read_only=read_only, direct_io=direct_io)


def test_a_free_device_that_another_takes_is_no_failure(file: str) -> None:
    assert loop.attach(Contended(3), file) == "/dev/loop0"


def test_losing_every_race_is_an_error_in_the_end(file: str) -> None:
    with pytest.raises(errors.LoopFailed, match="taken by others"):
        loop.attach(Contended(1000), file)


def test_two_who_attach_one_file_end_with_one_device(file: str) -> None:
    class Twice(FakeKernel):
        """Another attaches the same file just before us, to a lower number."""

        def loop_configure(
            self, device: str, file: str, *, read_only: bool, direct_io: bool
        ) -> None:
            super().loop_configure(device, file, read_only=read_only, direct_io=direct_io)
            second = self.loop_free()
            super().loop_configure(second, file, read_only=read_only, direct_io=direct_io)

        def loop_free(self) -> str:
            return super().loop_free() if self.loop_devices() else "/dev/loop5"

    kernel = Twice(FakeDevices())

    assert loop.attach(kernel, file) == "/dev/loop0"
    assert kernel.loop_devices() == ["/dev/loop0"]


def test_a_file_system_without_direct_io_is_used_without(file: str) -> None:
    class Buffered(FakeKernel):
        """The backing file is on tmpfs."""

        def loop_configure(
            self, device: str, file: str, *, read_only: bool, direct_io: bool
        ) -> None:
            if direct_io:
                raise OSError(errno.EINVAL, "Invalid argument", device)
            super().loop_configure(device, file, read_only=read_only, direct_io=direct_io)

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
    kernel.loop_configure("/dev/loop0", file, read_only=False, direct_io=False)

    assert loop.find(kernel, file) is None


def test_a_device_that_cannot_be_asked_is_an_error(file: str) -> None:
    class Denying(FakeKernel):
        """Without the permission."""

        def loop_status(self, device: str) -> LoopStatus:
            raise PermissionError(errno.EACCES, "Permission denied", device)

    kernel = Denying(FakeDevices())
    kernel.loop_configure("/dev/loop0", file, read_only=False, direct_io=False)

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
    device = loop.attach(kernel, volume.path, read_only=True)

    with pytest.raises(OSError, match="busy"):
        devices.remove(volume.path)
    devices.resize(volume.path, 2 << 20)
    loop.grow(kernel, device)
    assert kernel.device_size_bytes(device) == 2 << 20
    loop.detach(kernel, device)

    devices.remove(volume.path)
