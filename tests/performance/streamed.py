"""What a stream takes to bring changed blocks from a snapshot to a volume, beside a plain dd."""

import os
import subprocess
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from performance import rows
from performance.rows import Samples

from agent.cli import streams
from agent.cli.volumes import Manual
from agent.csi.client import Client, block
from agent.engine.host import Host
from agent.ids import VolumeId
from lvm.command import Programs
from lvm.devices import KernelDevices
from lvm.disks import KernelDisks
from mount.syscalls import Kernel

_MIB = 1 << 20
# What changed, in one piece, and what is around it: large enough that a second of calls around
# it does not count for much.
_CHANGED_MIB, _SIZE_MIB, _AT_MIB = 256, 320, 32
_CACHES = Path("/proc/sys/vm/drop_caches")


def measure(client: Client, socket: Path, rounds: Iterable[int], samples: Samples) -> None:
    """An increment sent and received in one pipe, and the same blocks by dd with its flush."""
    programs = Programs()
    host = Host(programs, Kernel(), KernelDevices(), KernelDisks(), stream=programs.stream)
    at = Manual(client, cast(Any, SimpleNamespace(endpoint=socket)), host)
    with _made(client, at) as (source, target):
        # Room for all that changes behind it: the usual area is a fifth.
        area = {"size": str(_SIZE_MIB * _MIB)}
        base = client.snapshot("first", source, area).snapshot_id
        _piped(at, base, "", "streamed")
        _write(_path(host, source))
        changed = client.snapshot("second", source, area).snapshot_id
        for _ in rounds:
            _forget()
            _timed(samples, rows.SENT, lambda: _piped(at, changed, base, "streamed"))
            streams.abort(at, "streamed")
            _piped(at, base, "", "streamed")
            _forget()
            _timed(samples, rows.DD, lambda: _dd(_path(host, changed), _path(host, target)))


@contextmanager
def _made(client: Client, at: Manual) -> Iterator[tuple[str, str]]:
    """A volume to send of, and one for dd; afterwards nothing of it is there."""
    names = ("sent", "copied")
    made = [client.create(one, _SIZE_MIB * _MIB, block()).volume_id for one in names]
    try:
        yield made[0], made[1]
    finally:
        streams.abort(at, "streamed")
        for one in client.snapshots(volume_id=made[0]):
            client.delete_snapshot(one.snapshot_id)
        for identity in made:
            client.delete(identity)


def _piped(at: Manual, snapshot_id: str, base: str, name: str) -> None:
    reading, writing = os.pipe()
    streams.widen(writing)
    with (
        os.fdopen(reading, "rb") as source,
        ThreadPoolExecutor(1) as pool,
        streams.outgoing(at, snapshot_id, base) as going,
    ):
        received = pool.submit(streams.receive, at, name, source)
        with os.fdopen(writing, "wb") as out:
            going.send(out.write)
        received.result()


def _dd(source: str, target: str) -> None:
    words = [f"if={source}", f"of={target}", "bs=1M", f"skip={_AT_MIB}", f"seek={_AT_MIB}"]
    words += [f"count={_CHANGED_MIB}", "conv=fsync,notrunc", "status=none"]
    subprocess.run(["dd", *words], check=True)


def _write(path: str) -> None:
    words = ["if=/dev/urandom", f"of={path}", "bs=1M", f"seek={_AT_MIB}", f"count={_CHANGED_MIB}"]
    subprocess.run(["dd", *words, "conv=fsync,notrunc", "status=none"], check=True)


def _forget() -> None:
    os.sync()
    _CACHES.write_text("3")


def _path(host: Host, identity: str) -> str:
    parsed = VolumeId.parse(identity)
    found = host.devices.find(parsed.group, parsed.name) if parsed else None
    if found is None:
        raise RuntimeError(f"{identity} is not active")
    return found.path


def _timed(samples: Samples, name: str, step: Any) -> None:
    samples.time(name, step, time.monotonic)
