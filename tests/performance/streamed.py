"""What a stream takes to bring changed blocks from a snapshot to a volume, beside a plain dd."""

import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from performance import rows
from performance.rows import Samples

from agent.cli.volume_verbs import VolumeVerbs
from agent.core.ids import VolumeId
from agent.csi.client import Client, block
from agent.daemon.host import Host
from agent.extras.transfer import streams_command
from lvm.active_devices import Devices
from lvm.disk_reader import Disks
from mount.kernel import Kernel
from mount.programs import Programs

_MIB = 1 << 20
# What changed, in one piece, and what is around it: large enough that a second of calls around
# it does not count for much.
_CHANGED_MIB, _SIZE_MIB, _AT_MIB = 256, 320, 32
# A snapshot's room: all that changes after it was taken, and the table of that.
_ROOM = {"size": str(_SIZE_MIB * _MIB)}
_SENT, _COPIED, _STREAMED = "bench-sent", "bench-copied", "bench-streamed"
_CACHES = Path("/proc/sys/vm/drop_caches")


def person(client: Client, socket: Path) -> VolumeVerbs:
    """Whoever types the commands, on this machine."""
    programs = Programs()
    host = Host(programs, Kernel(), Devices(), Disks(), stream=programs.stream)
    return VolumeVerbs(client, cast(Any, SimpleNamespace(endpoint=socket)), host)


def measure(
    at: VolumeVerbs, rounds: Iterable[int], samples: Samples, settle: Callable[[], None]
) -> None:
    """An increment sent and received in one pipe, and the same blocks by dd with its flush.

    The increment as it is sent by default, and by --compare. `settle` is called before each is
    timed.
    """
    with _made(at) as source:
        base = at.caller.snapshot("bench-first", source, _ROOM).snapshot_id
        _fill(_path(at, source))
        changed = at.caller.snapshot("bench-second", source, _ROOM).snapshot_id
        for number in rounds:
            steps = [
                (rows.SENT, lambda: _piped(at, changed, base)),
                (rows.DD, lambda: _dd(_path(at, changed), _path(at, _sibling(source)))),
                (rows.COMPARED, lambda: _piped(at, changed, base, compare=True)),
            ]
            for name, step in reversed(steps) if number % 2 else steps:
                if name != rows.DD:
                    # What the increment applies to, as it was.
                    streams_command.abort(at, _STREAMED, confirmed=True)
                    _piped(at, base, "")
                _forget()
                settle()
                samples.time(name, step, time.monotonic)


@contextmanager
def _made(at: VolumeVerbs) -> Iterator[str]:
    """A volume to send of, and one for dd beside it; afterwards nothing of it is there."""
    made: list[str] = []
    try:
        for name in (_SENT, _COPIED):
            made.append(at.caller.create(name, _SIZE_MIB * _MIB, block()).volume_id)
        yield made[0]
    finally:
        streams_command.abort(at, _STREAMED, confirmed=True)
        for one in at.caller.snapshots(volume_id=made[0]) if made else ():
            at.caller.delete_snapshot(one.snapshot_id)
        for identity in made:
            at.caller.delete(identity)


def _sibling(source: str) -> str:
    return source.replace(_SENT, _COPIED)


@dataclass
class _Receiving:
    """The other end of a pipe, which is closed when it wants no more."""

    at: VolumeVerbs
    descriptor: int

    def __call__(self) -> None:
        with os.fdopen(self.descriptor, "rb") as source:
            streams_command.receive(self.at, _STREAMED, source)


def _piped(at: VolumeVerbs, snapshot_id: str, base: str, *, compare: bool = False) -> None:
    reading, writing = os.pipe()
    streams_command.widen(writing)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(_Receiving(at, reading))
        try:
            with (
                os.fdopen(writing, "wb") as out,
                streams_command.outgoing(at, snapshot_id, base) as going,
            ):
                going.send(out.write, compare=compare)
        except BrokenPipeError:
            pass  # the receiver says why
        received.result()


def _dd(source: str, target: str) -> None:
    _run(
        *("dd", f"if={source}", f"of={target}", "bs=1M", f"skip={_AT_MIB}", f"seek={_AT_MIB}"),
        *(f"count={_CHANGED_MIB}", "conv=fsync,notrunc"),
    )


def _fill(path: str) -> None:
    _run(
        *("dd", "if=/dev/urandom", f"of={path}", "bs=1M", f"seek={_AT_MIB}"),
        *(f"count={_CHANGED_MIB}", "conv=fsync,notrunc"),
    )


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def _forget() -> None:
    """Have neither find in memory what it reads."""
    os.sync()
    _CACHES.write_text("3")


def _path(at: VolumeVerbs, identity: str) -> str:
    parsed = VolumeId.parse(identity)
    found = at.host.devices.find(parsed.group, parsed.name) if parsed else None
    if found is None:
        raise RuntimeError(f"{identity} is not active")
    return found.path
