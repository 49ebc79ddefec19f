"""Health as each call reports it, by Carver on disks that fail on request; volumes in use."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import grpc
from faults.bench import Bench
from faults.process import Process, Trial
from model import operations as do
from model.operations import MIB, Use
from real.disks import Disk
from real.host import RealHost

from agent.csi.client import block, mounted
from mount import loop
from proto import csi_pb2 as csi

T = TypeVar("T")
GROUP = "carver_conditions"
EXTENT_BYTES = 4 * MIB
# What LVM said is at most a minute old while somebody asks (agent/daemon/startup.py), and a look at
# disks that do not answer takes twenty seconds.
INTERVAL_SECONDS = 100
# An answer that waits for no disk: for the kernel it may wait two seconds.
PROMPT_SECONDS = 6
SIZE = 32 * MIB
Disks = tuple[Disk, Disk, Disk]
EXT4 = Use("mount", do.WRITER, "ext4")
BLOCK = Use("block", do.WRITER)


@contextmanager
def served(
    bench: Bench, host: RealHost, disks: tuple[str, ...], layout: str = ""
) -> Iterator[Trial]:
    """Carver on a group of these disks, whose one class is of that layout."""
    classes = f'[[classes]]\nname = "plain"\ngroup = "{GROUP}"\ndefault = true\n{layout}'
    with (
        host.own_group(GROUP, disks) as extents,
        bench.served(host, GROUP, extents, classes) as trial,
    ):
        yield trial


class Reported:
    """A volume's health, as each of the calls reports it, and the storage's.

    The groups are read each second, by lists; without `look` as seldom as health itself asks.
    """

    def __init__(self, machine: Process, volume: str, path: str = "", *, look: bool = True) -> None:
        self._client = machine.client
        self._look = look
        self._id = machine.id_of(volume)
        self._path = path and machine.place(path)
        # What the workload does meanwhile: the kernel finds out by that.
        self.meanwhile: Callable[[], object] = lambda: None

    def now(self) -> dict[str, csi.VolumeHealth]:
        """By the call. None may wait for a disk."""
        listed = {one.volume_id: one for one in self._promptly(self._client.unhealthy)}
        node = self._client.node_health
        answers = {
            "ControllerGetVolumeHealth": self._promptly(
                lambda: self._client.volume_health(self._id)
            ),
            "ControllerListVolumeHealth": listed.get(self._id, csi.VolumeHealth()),
            "NodeGetVolumeHealth": self._promptly(lambda: node(self._id)),
        }
        if self._path:
            answers["with its path"] = self._promptly(lambda: node(self._id, self._path))
        for health in answers.values():
            seen = [(one.status, one.reason) for one in health.health_statuses]
            assert len(set(seen)) == len(seen), health
        return answers

    def storage(self) -> dict[str, str]:
        """The messages by their reasons."""
        found = self._promptly(self._client.storage_health)
        keys = {(one.status, one.reason, str(one.volume_capability)) for one in found}
        assert len(keys) == len(found)
        return {one.reason: one.message for one in found}

    def soon(self, reason: str, *words: str, storage: str = "") -> None:
        """Every call reports one of these reasons (A|B), with all the words, within the interval.

        So does NodeGetStorageHealth report `storage`, if that is named.
        """

        def reports(health: csi.VolumeHealth) -> bool:
            found = [one for one in health.health_statuses if one.reason in reason.split("|")]
            return any(all(word in one.message for word in words) for one in found)

        self._until(
            lambda answers, of_storage: (
                all(map(reports, answers.values())) and (not storage or storage in of_storage)
            )
        )

    def well(self) -> None:
        """Nothing is wrong any more, within the interval, says every call."""
        self._until(
            lambda answers, of_storage: (
                not of_storage and not any(one.health_statuses for one in answers.values())
            )
        )

    def _until(self, is_so: Callable[[dict[str, csi.VolumeHealth], dict[str, str]], bool]) -> None:
        deadline = time.monotonic() + INTERVAL_SECONDS
        while not is_so(answers := self.now(), of_storage := self.storage()):
            assert time.monotonic() < deadline, (answers, of_storage)
            time.sleep(1)
            with suppress(OSError):
                self.meanwhile()
            if self._look:
                with suppress(grpc.RpcError):
                    self._client.volumes()

    def _promptly(self, ask: Callable[[], T]) -> T:
        began = time.monotonic()
        answer = ask()
        assert time.monotonic() - began < PROMPT_SECONDS
        return answer


def in_use(trial: Trial, use: Use) -> tuple[Path, Reported]:
    """A volume of the model's, published; its target, and its health, which is good."""
    trial.make(do.Create("a", SIZE, 0, use))
    trial.make(do.Stage("a", "staging", use))
    trial.make(do.Publish("a", "staging", "target", use))
    reported = Reported(trial.machine, "a", "target")
    reported.well()
    return Path(trial.machine.place("target")), reported


@contextmanager
def idle(trial: Trial) -> Iterator[Reported]:
    """A raw block volume in no use; it is healthy before and after."""
    volume = trial.machine.client.create("a", SIZE, block())
    reported = Reported(trial.machine, "a")
    reported.well()
    yield reported
    reported.well()
    trial.machine.client.delete(volume.volume_id)


@contextmanager
def detached(host: RealHost, device: str) -> Iterator[None]:
    """Inside, a loop device has let go of its file."""
    file = Path("/sys/block", Path(device).name, "loop/backing_file").read_text().strip()
    loop.detach(host.kernel, device)
    try:
        yield
    finally:
        host.kernel.loop_configure(device, file, read_only=False, direct_io=False, name=file)


class Mounted:
    """A staged volume with a file system, which is healthy."""

    def __init__(self, trial: Trial, size_bytes: int, fs_type: str) -> None:
        self._client, self._how = trial.machine.client, mounted(fs_type)
        self._volume = self._client.create("a", size_bytes, self._how)
        self.staging = Path(trial.machine.place("staging"))
        self.begin()
        self.reported = Reported(trial.machine, "a", "staging")
        self.reported.well()

    def begin(self) -> None:
        self._client.stage(self._volume, self.staging, self._how)

    def end(self) -> None:
        self._client.unstage(self._volume.volume_id, self.staging)

    def delete(self) -> None:
        self.end()
        self.staging.rmdir()
        self._client.delete(self._volume.volume_id)


class Raw:
    """A raw block volume in use."""

    def __init__(self, trial: Trial, name: str = "a", device_class: str = "plain") -> None:
        self._client, parameters = trial.machine.client, {"class": device_class}
        self.volume = self._client.create(name, SIZE, block(), parameters=parameters)
        self._staging = trial.machine.place(f"staging-{name}")
        self.target = Path(trial.machine.place(f"target-{name}"))
        self.begin()

    def begin(self) -> None:
        """Into use, as by the start of a pod."""
        self._client.stage(self.volume, self._staging, block())
        self._client.publish(self.volume, self._staging, self.target, block())

    def end(self) -> None:
        """Out of use, as by the end of a pod."""
        self._client.unpublish(self.volume.volume_id, self.target)
        self._client.unstage(self.volume.volume_id, self._staging)

    def delete(self) -> None:
        self.end()
        self._client.delete(self.volume.volume_id)


def write(path: Path) -> None:
    with path.open("r+b" if path.is_block_device() else "wb", buffering=0) as file:
        file.write(os.urandom(MIB))
        os.fsync(file.fileno())
