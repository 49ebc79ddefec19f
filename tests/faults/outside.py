"""What goes wrong outside Carver: disks, lvm2, files, the clock, the operator."""

import contextlib
import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import grpc
from faults import leftovers
from faults.bench import Bench
from faults.process import Fault, Trial, class_of, until
from model import operations as do
from model.operations import MIB, Use
from real.disks import Disk
from real.host import RealHost

from agent.core import tag
from agent.csi.client import Client, block
from lvm import report, tags
from mount import loop

EXT4 = Use("mount", do.MULTI_WRITER, "ext4")
BLOCK = Use("block", do.MULTI_WRITER)
_EXTENT_BYTES = 4 * MIB


def group_full(bench: Bench) -> tuple[int, str]:
    """The group is full."""
    with bench.trial(20) as trial:
        wishes = [do.Create(f"full-{number}", 16 * MIB, 0, BLOCK) for number in range(8)]
        with ThreadPoolExecutor(8) as pool:
            outcomes = list(pool.map(trial.machine.call, wishes))
        for call, outcome in zip(wishes, outcomes, strict=True):
            if outcome.code == "OK":
                trial.model.apply(call)
            elif outcome.code != "RESOURCE_EXHAUSTED":
                raise Fault(f"{call}: {outcome}")
        trial.compare()
        if len(trial.model.volumes) != 5:
            raise Fault(f"{len(trial.model.volumes)} volumes in place of 5")
        trial.make(do.Capacity())
        trial.refused(do.Expand(next(iter(trial.model.volumes)), 32 * MIB), "OUT_OF_RANGE")
        trial.make(do.Delete(next(iter(trial.model.volumes))))
        trial.make(do.Create("again", 16 * MIB, 0, BLOCK))
    return 1, "8 at once: as many as fit, RESOURCE_EXHAUSTED to the others"


def group_missing(bench: Bench) -> tuple[int, str]:
    """The group is missing."""
    with bench.host() as host:
        group = host.new_group(40)
        ((_, (disk,)),) = host._groups
        file = loop_file(disk)
        with bench.served(host, group, 40) as trial:
            trial.make(do.Create("a", 16 * MIB, 0, BLOCK))
            trial.machine.deactivate("a")
            trial.model.deactivate("a")
            loop.detach(host.kernel, disk)
            for call in (do.Delete("a"), do.Get("a"), do.Volumes()):
                trial.refused(call, "FAILED_PRECONDITION")
            trial.refused(do.Create("b", 0, 0, BLOCK), "RESOURCE_EXHAUSTED")
            trial.refused(do.Stage("a", "staging", BLOCK), "FAILED_PRECONDITION")
            host.kernel.loop_configure(disk, file, read_only=False, direct_io=False, name=file)
            trial.compare()
            trial.make(do.Stage("a", "staging", BLOCK))
            trial.make(do.Create("b", 16 * MIB, 0, BLOCK))
    return 1, "FAILED_PRECONDITION, nothing taken for gone; all there when it is back"


def group_late(bench: Bench) -> tuple[int, str]:
    """A group comes after the start, with a deletion and a snapshot in it."""
    with bench.host() as host:
        group = host.new_group(40)
        ((_, (disk,)),) = host._groups
        file = loop_file(disk)
        with bench.served(host, group, 40) as trial:
            machine = trial.machine
            for name in ("a", "b"):
                trial.make(do.Create(name, 16 * MIB, 0, BLOCK))
            snapshot = machine.client.snapshot("1", id_of(machine.client, "a"))
            machine.stop()
            # As a kill leaves it, right after the deletion was put on record.
            (new,) = tags.encode({tag.STATE: tag.WIPING})
            (old,) = tags.encode({tag.STATE: tag.READY})
            host.lvm("lvchange", "--addtag", new, "--deltag", old, "--", f"{group}/vol-b")
            host.lvm("vgchange", "--activate", "n", "--", group)
            trial.model.deactivate("a")
            trial.model.apply(do.Delete("b"))
            loop.detach(host.kernel, disk)
            machine.start(machine.switch)
            for call in (do.Delete("a"), do.Get("a"), do.Volumes()):
                trial.refused(call, "FAILED_PRECONDITION", "UNAVAILABLE")
            trial.refused(do.Create("c", 16 * MIB, 0, BLOCK), "RESOURCE_EXHAUSTED", "UNAVAILABLE")
            host.kernel.loop_configure(disk, file, read_only=False, direct_io=False, name=file)
            trial.patiently(do.Stage("a", "staging", BLOCK))
            if [one.snapshot_id for one in machine.client.snapshots()] != [snapshot.snapshot_id]:
                trial.lost += 1
            machine.client.delete_snapshot(snapshot.snapshot_id)
            trial.compare()
            trial.patiently(do.Create("c", 16 * MIB, 0, BLOCK))
    return 1, "refused until it comes; then the deletion goes on, and the rest is there"


def id_of(client: Client, name: str) -> str:
    (found,) = [one for one in client.volumes() if one.volume_id.endswith(name)]
    return found.volume_id


def metadata_full(bench: Bench) -> tuple[int, str]:
    """The group's metadata area is full."""
    with bench.host() as host:
        disk = host.new_device(200 * _EXTENT_BYTES)
        small = ("--metadatasize", "128k", "--dataalignment", "4k")
        with (
            host.own_group("carver_small", [disk], *small) as total,
            bench.served(host, "carver_small", total) as trial,
        ):
            # A text has half of the area. What others keep there leaves room for a few volumes
            # above the 16 KiB that Carver keeps for deletions.
            for number in range(42):
                tag = f"other{number:02}" * 140
                host.lvm("vgchange", "--addtag", tag, "--", "carver_small")
            for number in range(20):
                call = do.Create(f"volume-{number}", 4 * MIB, 0, BLOCK)
                if trial.machine.call(call).code != "OK":
                    break
                trial.model.apply(call)
            else:
                raise Fault("the metadata area holds 20 volumes")
            if not trial.model.volumes:
                raise Fault("the metadata area holds no volume")
            trial.refused(call, "RESOURCE_EXHAUSTED")
            trial.compare()
            trial.make(do.Delete(next(iter(trial.model.volumes))))
            trial.make(call)
    return 1, f"RESOURCE_EXHAUSTED after {number} volumes; room again after a deletion"


def disk_errors(bench: Bench) -> tuple[int, str]:
    """A disk gives I/O errors."""
    kinds: tuple[Callable[[Disk], None], ...] = (Disk.fail, Disk.flake)
    with (
        bench.host() as host,
        Disk.on(bench.shared.new_device(41 * _EXTENT_BYTES)) as disk,
        host.own_group("carver_fault", [disk.path]) as total,
        bench.served(host, "carver_fault", total) as trial,
    ):
        trial.make(do.Create("a", 16 * MIB, 0, BLOCK))
        trial.make(do.Stage("a", "staging", BLOCK))
        trial.make(do.Publish("a", "staging", "target", BLOCK))
        target = Path(trial.machine.place("target"))
        data = os.urandom(MIB)
        write(target, data)
        for break_it in kinds:
            break_it(disk)
            # Where lvm2 cannot read the disk, there is no group.
            trial.refused(do.Create("b", 16 * MIB, 0, BLOCK), "INTERNAL", "RESOURCE_EXHAUSTED")
            trial.refused(do.Expand("a", 64 * MIB), "INTERNAL", "FAILED_PRECONDITION")
            disk.mend()
            trial.make(do.Create("b", 16 * MIB, 0, BLOCK))
            trial.make(do.Delete("b"))
            if read(target, len(data)) != data:
                trial.lost += 1
            trial.compare()
    return len(kinds), "refused while it lasts; everything as before when the disk answers again"


def image_failed(bench: Bench) -> tuple[int, str]:
    """An image of a RAID fails for a while."""
    with two_disks(bench, "raid1") as (trial, first, second, _):
        host, group = trial.machine.host, trial.machine.group
        volume = trial.machine.client.create("a", 16 * MIB, block())
        device = host.devices.find(group, "vol-a")
        assert device is not None
        host.write_bytes(device.path, 0, leftovers.marker("before"))
        second.fail()
        host.write_bytes(device.path, 8 * MIB, leftovers.marker("while"))
        second.mend()
        trial.machine.client.delete(volume.volume_id)
        trial.leaked += sum(len(_marked(one)) for one in (first, second))
    return 1, "the volume is overwritten on both images"


def disk_lost(bench: Bench) -> tuple[int, str]:
    """A disk is lost, and what was on it given up."""
    with two_disks(bench) as (trial, kept, gone, _):
        host, group = trial.machine.host, trial.machine.group
        client, size_bytes = trial.machine.client, 30 * _EXTENT_BYTES
        volume = client.create("a", size_bytes, block())
        device = host.devices.find(group, "vol-a")
        assert device is not None
        mark = leftovers.marker("a")
        for offset in (0, size_bytes - len(mark)):
            host.write_bytes(device.path, offset, mark)
        gone.fail()
        client.delete(volume.volume_id)
        if client.volumes() or "vol-a" not in report.read(host.lvm).group(group).volumes:
            raise Fault("it is not on record as deleted")
        host.lvm("lvchange", "--addtag", "carver.givenUp=yes", "--", f"{group}/vol-a")

        def is_removed() -> bool:
            client.delete(volume.volume_id)
            return "vol-a" not in report.read(host.lvm).group(group).volumes

        until(is_removed, "what was given up stays", 120)
        trial.leaked += len(_marked(kept))
        host.lvm("vgreduce", "--removemissing", "--", group)
        trial.model.total_bytes = 20 * _EXTENT_BYTES
    return 1, "deleted; what is there is overwritten, the rest named in the log"


def disk_replaced(bench: Bench) -> tuple[int, str]:
    """A disk under a raid1 is lost and another put in its place, while the service is killed."""
    times, size_bytes = bench.times(4, 1), 10 * _EXTENT_BYTES
    for _ in range(times):
        with two_disks(bench, "raid1") as (trial, kept, gone, new):
            host, group = trial.machine.host, trial.machine.group
            volume = trial.machine.client.create("a", size_bytes, block())
            device = host.devices.find(group, "vol-a")
            assert device is not None
            data = os.urandom(size_bytes)
            host.write_bytes(device.path, 0, data)
            disks = report.read(host.lvm).group(group).disks
            lost = next(one.uuid for one in disks if one.name == gone.path)
            gone.fail()
            _replace(bench, trial, lost, new)
            kept.fail()
            if host.read_bytes(device.path, 0, size_bytes) != data:
                trial.lost += 1
            kept.mend()
            client = trial.machine.client
            until(partial(_is_whole, client, volume.volume_id), "the volume is not whole", 300)
            client.delete(volume.volume_id)
    return times, "killed at random, gone on with; the data are on the new disk alone, too"


def _replace(bench: Bench, trial: Trial, lost: str, new: str) -> None:
    """Have a disk replaced by a service that is killed once, and then asked again."""
    kill_at, numbers = bench.random.randrange(4), itertools.count()

    def is_replaced() -> bool:
        number = next(numbers)
        if number == kill_at:
            trial.machine.kill()
        with contextlib.suppress(grpc.RpcError):
            done, _ = trial.machine.client.replace_disk(lost, new)
            return done and number >= kill_at
        return False

    until(is_replaced, "the disk is not replaced", 300)


def _is_whole(client: Client, volume_id: str) -> bool:
    return client.repair(volume_id)[0]


def _marked(disk: Disk) -> list[str]:
    return leftovers.on(disk.path, MIB, disk.sectors * 512)


def lvm_directory_read_only(bench: Bench) -> tuple[int, str]:
    """/etc/lvm is read-only."""
    with read_only("/etc/lvm"), bench.trial(40) as trial:
        trial.make(do.Create("a", 16 * MIB, 0, EXT4))
        trial.make(do.Stage("a", "staging", EXT4))
        trial.make(do.Expand("a", 32 * MIB))
        trial.make(do.NodeExpand("a", "staging"))
        trial.make(do.Unstage("a", "staging"))
        trial.make(do.Unpublish("a", "staging"))
        trial.make(do.Delete("a"))
        trial.compare()
    return 1, "every call succeeds"


def clock_jumps(bench: Bench) -> tuple[int, str]:
    """The clock jumps, a day on and two back."""
    with bench.trial(40) as trial:
        trial.make(do.Create("a", 16 * MIB, 0, EXT4))
        for jump_seconds in (86_400, -2 * 86_400):
            with ThreadPoolExecutor(1) as pool:
                begun = pool.submit(trial.make, do.Create("b", 16 * MIB, 0, BLOCK))
                time.sleep(bench.random.uniform(0, 0.5))
                with clock(jump_seconds):
                    begun.result()
            trial.make(do.Delete("b"))
            with clock(jump_seconds):
                trial.make(do.Stage("a", "staging", EXT4))
                trial.make(do.Publish("a", "staging", "target", EXT4))
                trial.make(do.Stats("a", "target"))
                trial.make(do.Volumes())
                trial.make(do.Unpublish("a", "target"))
                trial.make(do.Unstage("a", "staging"))
        trial.compare()
    return 2, "every call succeeds"


def socket_deleted(bench: Bench) -> tuple[int, str]:
    """The socket is deleted."""
    with bench.trial(40) as trial:
        trial.make(do.Create("a", 16 * MIB, 0, EXT4))
        trial.make(do.Stage("a", "staging", EXT4))
        trial.machine.endpoint.unlink()
        started = time.monotonic()
        if trial.machine.process.wait(60) == 0:
            raise Fault("the process ended as if all were well")
        seconds = time.monotonic() - started
        trial.machine.died()
        trial.compare()
        trial.make(do.Stage("a", "staging", EXT4))
    return 1, f"the process ends after {seconds:.0f} s, to be started again with a new socket"


def second_instance(bench: Bench) -> tuple[int, str]:
    """A second instance is started."""
    with bench.trial(40) as trial:
        trial.make(do.Create("a", 16 * MIB, 0, BLOCK))
        if trial.machine.launch().wait(120) != 1:
            raise Fault("the second instance did not give up")
        trial.make(do.Volumes())
        trial.compare()
    return 1, "it ends with 1; the first one serves on"


def configuration_changed(bench: Bench) -> tuple[int, str]:
    """The configuration changes under volumes."""
    with bench.trial(40) as trial:
        machine = trial.machine
        trial.make(do.Create("a", 32 * MIB, 0, Use("mount", do.MULTI_WRITER)))
        trial.make(do.Stage("a", "staging", EXT4))
        machine.stop()
        machine.classes = (
            f'[[classes]]\nname = "other"\ngroup = "{machine.group}"\ndefault = true\n'
            'fs_type = "xfs"\nreserve = "10%"\n'
        )
        machine.start(machine.switch)
        trial.make(do.Stage("a", "staging", EXT4))
        trial.make(do.Publish("a", "staging", "target", EXT4))
        trial.make(do.Get("a"))
        trial.make(do.Volumes())
        trial.make(do.NodeExpand("a", "target", 48 * MIB))
        trial.make(do.Unpublish("a", "target"))
        trial.make(do.Unstage("a", "staging"))
        trial.make(do.Unpublish("a", "staging"))
        trial.make(do.Delete("a"))
        trial.compare()
    return 1, "the class gone, its file system another: volumes are served on"


def disk_full(bench: Bench) -> tuple[int, str]:
    """The file system of kubelet's directory and of the group's disk is full."""
    with bench.host() as host, small_file_system(host, 96 * MIB) as small:
        host.directory = small / "mounts"
        host.directory.mkdir()
        with (
            disk_on(host, small / "disk", 164 * MIB) as disk,
            host.own_group("carver_full", [disk]) as total,
            bench.served(host, "carver_full", total) as trial,
        ):
            trial.make(do.Create("a", 32 * MIB, 0, BLOCK))
            trial.make(do.Stage("a", "staging", BLOCK))
            publish = do.Publish("a", "staging", "target", BLOCK)
            with filled(small):
                trial.refused(publish, "INTERNAL")
                # Whether a new volume's first sectors can be written depends on the file system.
                answer = trial.machine.call(do.Create("b", 32 * MIB, 0, BLOCK))
                trial.machine.restart()
                trial.refused(publish, "INTERNAL")
            if answer.code == "OK":
                trial.model.apply(do.Create("b", 32 * MIB, 0, BLOCK))
            trial.compare()
            trial.patiently(publish)
            data = os.urandom(MIB)
            write(Path(trial.machine.place("target")), data)
            trial.patiently(do.Create("b", 32 * MIB, 0, BLOCK))
            trial.compare()
    return 1, "INTERNAL while it lasts, also across a restart; well when there is room"


# What the faults are made of


@contextmanager
def two_disks(bench: Bench, layout: str = "linear") -> Iterator[tuple[Trial, Disk, Disk, str]]:
    """A trial on a group of two disks that can fail, and a spare that the service may use."""
    group, size_bytes = "carver_disks", 21 * _EXTENT_BYTES
    with (
        bench.host() as host,
        Disk.on(bench.shared.new_device(size_bytes)) as first,
        Disk.on(bench.shared.new_device(size_bytes)) as second,
    ):
        # Before the service starts, which is confined to the disks that there are then.
        spare = host.new_device(size_bytes)
        with (
            host.own_group(group, [first.path, second.path]) as total,
            bench.served(host, group, total, class_of(group, layout)) as trial,
        ):
            yield trial, first, second, spare


def loop_file(device: str) -> str:
    return Path("/sys/block", Path(device).name, "loop/backing_file").read_text().strip()


def write(path: Path, data: bytes) -> None:
    with path.open("r+b", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())


def read(path: Path, length: int) -> bytes:
    """What is on the disk, not what memory still has of it."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, length, os.POSIX_FADV_DONTNEED)
        return file.read(length)


def command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def unmount(path: str) -> None:
    """Unmount, as soon as the last command that has a file open there has ended."""
    words = ["umount", path]
    until(
        lambda: subprocess.run(words, capture_output=True).returncode == 0,
        f"{path} cannot be unmounted",
        10,
    )


@contextmanager
def read_only(directory: str) -> Iterator[None]:
    command("mount", "--bind", directory, directory)
    try:
        command("mount", "-o", "remount,bind,ro", directory)
        yield
    finally:
        unmount(directory)


@contextmanager
def clock(jump_seconds: float) -> Iterator[None]:
    """The system's clock, set to another time and back."""
    before, started = time.time(), time.monotonic()
    time.clock_settime(time.CLOCK_REALTIME, before + jump_seconds)
    try:
        yield
    finally:
        time.clock_settime(time.CLOCK_REALTIME, before + time.monotonic() - started)


@contextmanager
def small_file_system(host: RealHost, size_bytes: int) -> Iterator[Path]:
    device = host.new_device(size_bytes)
    place = host.directory.parent / "small"
    place.mkdir()
    command("mkfs.ext4", "-q", "-m", "0", "-N", "64", device)
    command("mount", device, str(place))
    try:
        yield place
    finally:
        unmount(str(place))


@contextmanager
def disk_on(host: RealHost, file: Path, size_bytes: int) -> Iterator[str]:
    """A loop device on a sparse file."""
    with file.open("wb") as opened:
        opened.truncate(size_bytes)
    disk = loop.attach(host.kernel, str(file))
    try:
        yield disk
    finally:
        loop.detach(host.kernel, disk)


@contextmanager
def filled(place: Path) -> Iterator[None]:
    """No free inode and no free block in a file system."""
    filling = place / "filling"
    filling.mkdir()
    try:
        with contextlib.suppress(OSError):
            for number in itertools.count():
                (filling / str(number)).touch()
        for piece_bytes in (64 << 10, 1 << 10):
            with (filling / "0").open("ab", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(piece_bytes))
        yield
    finally:
        shutil.rmtree(filling)
