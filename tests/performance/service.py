"""Carver as a process of its own, with the configuration that is measured."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from faults.process import await_begun
from performance.rows import Commands
from resident import Resident

from agent.core import sockets
from agent.csi.client import Client

# A class whose volumes pass dm-crypt's work queues by.
BYPASSING = "bypassing"
_START_SECONDS = 120
_STOP_SECONDS = 60
_CALL_SECONDS = 300
_QUIET_SECONDS = 5.0
# The kernel counts the processor's time in hundredths.
_LOOK_SECONDS, _QUIET_LOOKS = 0.03, 4
# Deferred work begins a tenth of a second after its call (agent/groups/volume_group.py).
_DEFERRED_SECONDS = 0.15
_MIB = 1 << 20


@dataclass
class Served:
    """A service that answers, and how long it took to."""

    client: Client
    process: psutil.Process
    log: Path
    start_seconds: float

    def mark(self) -> int:
        return self.log.stat().st_size

    def commands(self, since: int) -> Commands:
        """What it had run since, where it logs that."""
        with self.log.open("rb") as log:
            log.seek(since)
            return counted(log.read().decode())

    def resident_mib(self) -> float:
        """What it and the programs that it keeps open have in memory."""
        return Resident.of(self.process).all_bytes / _MIB

    def busy_percent(self, seconds: float) -> float:
        """What of one processor it takes, with all its threads and programs, in so long."""
        before = self._worked()
        time.sleep(seconds)
        # A session that rests has ended.
        worked = [now - before.get(one, 0.0) for one, now in self._worked().items()]
        return 100 * sum(worked) / seconds

    def settle(self) -> None:
        """Wait until it is idle: background work, and the refresh after a bare command's change.

        Neither is the next call's time: on a node only Carver changes the group.
        """
        time.sleep(_DEFERRED_SECONDS)
        subprocess.run(["udevadm", "settle"], check=True)
        self.client.capacity()
        deadline, before, quiet = time.monotonic() + _QUIET_SECONDS, self._worked(), 0
        while time.monotonic() < deadline and quiet < _QUIET_LOOKS:
            time.sleep(_LOOK_SECONDS)
            now = self._worked()
            quiet, before = (quiet + 1 if now == before else 0), now

    def _worked(self) -> dict[int, float]:
        """The processor's time, in seconds, of it and of each of its programs (proc(5))."""
        worked, left = dict[int, float](), [self.process.pid]
        while left:
            of = Path("/proc", str(pid := left.pop()))
            # Not psutil's children(), which reads every process of the machine.
            with suppress(OSError):
                for children in of.glob("task/*/children"):
                    left += map(int, children.read_text().split())
                behind_name = (of / "stat").read_text().rpartition(")")[2].split()
                worked[pid] = sum(map(int, behind_name[11:13])) / os.sysconf("SC_CLK_TCK")
        return worked


def configuration(place: Path, group: str, settings: str, level: str) -> str:
    """The configuration's text; `settings` are lines of it, such as `wipe = "none"`."""
    return (
        f'node_id = "bench"\nendpoint = "{place}/csi.sock"\nregistration = "none"\n'
        f'kubelet_dir = "{place}"\nlog_format = "json"\nlog_level = "{level}"\n{settings}\n\n'
        f'[[classes]]\nname = "plain"\ngroup = "{group}"\ndefault = true\n\n'
        f'[[classes]]\nname = "{BYPASSING}"\ngroup = "{group}"\nencryption = "luks2"\n'
        'bypass_workqueue = "both"\n'
    )


def counted(log: str) -> Commands:
    """The commands in a log: with `session` those of a session, else programs."""
    found = Commands(0, 0)
    for line in log.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event.get("message") == "command":
            by_session = bool(event.get("session"))
            found += Commands(int(not by_session), int(by_session))
    return found


@contextmanager
def served(place: Path, group: str, settings: str, *, counting: bool = False) -> Iterator[Served]:
    """Carver on a socket in `place`; where `counting`, its log tells of each command."""
    text = configuration(place, group, settings, "debug" if counting else "warning")
    with started(place, text, Path(__file__).resolve().parents[2]) as made:
        yield made


@contextmanager
def started(place: Path, text: str, tree: Path) -> Iterator[Served]:
    """The Carver of a tree with this configuration, whose socket is `place`/csi.sock."""
    file, socket, log = place / "config.toml", place / "csi.sock", place / "log"
    file.write_text(text)
    words = [sys.executable, "-m", "agent", "serve", "--config", str(file)]
    begun = time.monotonic()
    with log.open("wb") as target:
        running = subprocess.Popen(
            words, stderr=target, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}
        )
    try:
        _await_served(socket, running, log, begun + _START_SECONDS)
        with Client(socket, timeout_seconds=_CALL_SECONDS) as client:
            await_begun(client)
            seconds = time.monotonic() - begun
            yield Served(client, psutil.Process(running.pid), log, seconds)
    finally:
        running.terminate()
        running.wait(_STOP_SECONDS)


def _await_served(socket: Path, running: subprocess.Popen[bytes], log: Path, end: float) -> None:
    while not sockets.is_served(socket):
        if running.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"Carver does not serve: {log.read_text()}")
        time.sleep(_LOOK_SECONDS)
