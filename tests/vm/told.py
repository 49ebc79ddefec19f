"""What each of the calls tells of health, by Carver on disks that fail when they are told to."""

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
from real.host import RealHost

from proto import csi_pb2 as csi

T = TypeVar("T")
GROUP = "carver_conditions"
EXTENT_BYTES = 4 * MIB
# What LVM said is at most a minute old while somebody asks (agent/daemon/startup.py), and a look at
# disks that do not answer takes twenty seconds.
INTERVAL_SECONDS = 100
# An answer that waits for no disk: for the kernel it may wait two seconds.
PROMPT_SECONDS = 6
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


class Told:
    """A volume's health, as each of the calls tells it, and the storage's.

    The groups are looked at each second, by lists; without `look` as seldom as health itself asks.
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
        told = {
            "ControllerGetVolumeHealth": self._promptly(
                lambda: self._client.volume_health(self._id)
            ),
            "ControllerListVolumeHealth": listed.get(self._id, csi.VolumeHealth()),
            "NodeGetVolumeHealth": self._promptly(lambda: node(self._id)),
        }
        if self._path:
            told["with its path"] = self._promptly(lambda: node(self._id, self._path))
        for health in told.values():
            seen = [(one.status, one.reason) for one in health.health_statuses]
            assert len(set(seen)) == len(seen), health
        return told

    def storage(self) -> dict[str, str]:
        """The messages by their reasons."""
        found = self._promptly(self._client.storage_health)
        assert len({(one.status, one.reason, str(one.volume_capability)) for one in found}) == len(
            found
        )
        return {one.reason: one.message for one in found}

    def soon(self, reason: str, *words: str, storage: str = "") -> None:
        """Every call tells of one of these reasons (A|B), with all the words, within the interval.

        So does NodeGetStorageHealth of `storage`, if that is named.
        """

        def tells(health: csi.VolumeHealth) -> bool:
            found = [one for one in health.health_statuses if one.reason in reason.split("|")]
            return any(all(word in one.message for word in words) for one in found)

        self._until(
            lambda told, of_storage: (
                all(map(tells, told.values())) and (not storage or storage in of_storage)
            )
        )

    def well(self) -> None:
        """Nothing is wrong any more, within the interval, says every call."""
        self._until(
            lambda told, of_storage: (
                not of_storage and not any(one.health_statuses for one in told.values())
            )
        )

    def _until(self, is_so: Callable[[dict[str, csi.VolumeHealth], dict[str, str]], bool]) -> None:
        deadline = time.monotonic() + INTERVAL_SECONDS
        while not is_so(told := self.now(), of_storage := self.storage()):
            assert time.monotonic() < deadline, (told, of_storage)
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


def in_use(trial: Trial, use: Use) -> Path:
    trial.make(do.Create("a", 32 * MIB, 0, use))
    trial.make(do.Stage("a", "staging", use))
    trial.make(do.Publish("a", "staging", "target", use))
    return Path(trial.machine.place("target"))


def write(path: Path) -> None:
    with path.open("r+b" if path.is_block_device() else "wb", buffering=0) as file:
        file.write(os.urandom(MIB))
        os.fsync(file.fileno())
