#!/usr/bin/env python3
"""What of each call's time is Carver's own code: natively, on the machine in memory.

    own.py [--rounds 40]

Times are those of the processor (time.process_time), of all threads, from a call's start to its
answer, less what the fakes took (time.thread_time, in whichever thread they were asked). No gRPC is
between: a call is the interceptor and what is behind it, without a channel and without encoding.
"""

import argparse
import copy
import gc
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from unittest import mock

# This file is a program too, and Python would look beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

# First of all: agent keeps gRPC's fork handlers out, and must come before grpc does.
import agent  # noqa: F401  isort: skip

import configured
import grpc
import serving
from fakes.host import FakeHost
from performance import document, rows, tables
from performance.bare import Life
from performance.rows import Commands, Row
from rich.console import Console

from agent.core.ids import VolumeId
from agent.csi.client import Client
from agent.groups.volume_group import VolumeGroup
from mount.command import Result

_GROUP = "data"
_EXTENTS = 8192
_EXTENT_BYTES = 4 << 20
_SIZE_BYTES = 16 * _EXTENT_BYTES
_WARM_UP = 5
ROUNDS = 40
_LISTED = (400, 800)
_SECONDS = 600.0


class Aside:
    """Time that is not Carver's own: the fakes', in all threads."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._guard = threading.Lock()
        self._within = threading.local()

    def wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, with its time put aside once, also of one within another."""

        def call(*words: Any, **named: Any) -> Any:
            if getattr(self._within, "fake", False):
                return function(*words, **named)
            self._within.fake, started = True, time.thread_time()
            try:
                return function(*words, **named)
            finally:
                seconds, self._within.fake = time.thread_time() - started, False
                with self._guard:
                    self.seconds += seconds

        return call


class Timed:
    """A fake's methods, with their time put aside."""

    def __init__(self, fake: object, aside: Aside) -> None:
        self._fake = fake
        self._aside = aside

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._fake, name)
        wrapped = self._aside.wrapped(found) if callable(found) else found
        # Found the next time without being asked for here.
        self.__dict__[name] = wrapped
        return wrapped


class TimedHost(FakeHost):
    """A machine in memory that puts its own time aside and counts its commands."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.without_slot = Aside()
        self._lines = 0
        self._run = self.without_slot.wrapped(super().run)
        lvm2 = self.lvm2_program

        def program(words: Sequence[str]) -> Result:
            self._lines += 1
            return lvm2(words)

        self.lvm2_program = self.without_slot.wrapped(program)
        self.kernel = cast(Any, Timed(self.kernel, self.without_slot))
        self.devices = cast(Any, Timed(self.devices, self.without_slot))
        self.disks = cast(Any, Timed(self.disks, self.without_slot))

    def run(self, *words: str, stdin: bytearray | None = None) -> Result:
        return cast(Result, self._run(*words, stdin=stdin))

    def count(self) -> Commands:
        """What was run so far; lvm2's commands without a process are those of a session."""
        by_process = sum(words[0] == "lvm" for words in self.commands)
        return Commands(len(self.commands), self._lines - by_process)


class Server:
    """What the service takes for gRPC's server: it keeps handlers, and serves nothing."""

    def __init__(self, _pool: object, interceptors: Sequence[grpc.ServerInterceptor]) -> None:
        self._interceptors = interceptors
        self._handlers: dict[str, Any] = {}

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Take a service's methods from the generated code."""
        self._handlers |= {f"/{service}/{name}": one for name, one in handlers.items()}

    def add_generic_rpc_handlers(self, _handlers: object) -> None:
        """The same in its older form."""

    def add_insecure_port(self, _address: str) -> int:
        return 1

    def start(self) -> None:
        """Nothing comes from outside."""

    def stop(self, _grace: float | None) -> threading.Event:
        ended = threading.Event()
        ended.set()
        return ended

    def method(self, path: str) -> Callable[[object, object], Any]:
        """A method as the server would call it, with all that is around it."""
        details = mock.Mock(method=path, invocation_metadata=())

        def continuation(_details: object) -> Any:
            return self._handlers[path]

        for one in reversed(self._interceptors):
            continuation = partial(one.intercept_service, continuation)
        return cast(Callable[[object, object], Any], continuation(details).unary_unary)


class Context:
    """A handler's context: its caller has time."""

    def time_remaining(self) -> float:
        return _SECONDS

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise AssertionError(f"{code.name}: {details}")


class Channel:
    """A client's channel that leads straight into the server's handlers."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def unary_unary(self, path: str, *_codecs: object, **_more: object) -> Callable[..., Any]:
        """A method as the generated stubs call it."""
        method: list[Callable[[object, object], Any]] = []

        def call(request: object, timeout: float | None = None) -> Any:
            if not method:
                method.append(self._server.method(path))
            return method[0](request, Context())

        return call

    # Of a stream each answer is made as it is asked for: what is called is the same.
    unary_stream = stream_stream = unary_unary

    def close(self) -> None:
        """Nothing was opened."""


class Bench:
    """A service on a machine in memory, and the time of its calls."""

    def __init__(self, directory: Path) -> None:
        self.host = TimedHost(directory)
        self.host.lvm2.add_group(_GROUP, [_EXTENTS])
        self.directory = directory
        made: list[Server] = []

        def server(pool: object, interceptors: Sequence[grpc.ServerInterceptor]) -> Server:
            made.append(Server(pool, interceptors))
            return made[-1]

        config = configured.carver(directory, _GROUP, kubelet_dir=("/",))
        with mock.patch.object(grpc, "server", server):
            self.service = serving.start(config, self.host)
        with mock.patch.object(grpc, "insecure_channel", return_value=Channel(made[0])):
            self.client = Client(config.endpoint)
        self.samples = rows.Samples()

    def close(self) -> None:
        self.service.stop()

    def time(self, name: str, call: Callable[[], Any]) -> Any:
        """Make a call; keep its own time and its commands."""
        aside, commands = self.host.without_slot.seconds, self.host.count()
        started = time.process_time()
        answer = call()
        seconds = time.process_time() - started - (self.host.without_slot.seconds - aside)
        after = self.host.count()
        self.samples.seconds[rows.own(name)].append(seconds)
        self.samples.commands[rows.own(name)] = Commands(
            after.processes - commands.processes, after.session - commands.session
        )
        # What is put off until the answer is no part of the call, nor of the next one.
        self.service.volume_groups.run_deferred()
        return answer

    def live(self, number: int) -> None:
        life = Life(self.client, f"own-{number}", self.directory, _SIZE_BYTES)
        life.prepare()
        for call in (rows.CREATE, rows.REPEATED):
            self.time(call, partial(life.do, call))
        self.time(rows.CAPACITY, self.client.capacity)
        for call in (
            *(rows.GET_VOLUME, rows.STAGE, rows.PUBLISH, rows.STATS),
            *(rows.UNPUBLISH, rows.UNSTAGE, rows.DELETE),
        ):
            self.time(call, partial(life.do, call))
        life.undo()

    def list(self, volumes: int) -> None:
        """List so many volumes, once: they are made behind Carver's back, which is quick."""
        first = VolumeId.parse(self.client.create("listed-0000", _EXTENT_BYTES).volume_id)
        assert first is not None
        made = self.host.lvm2.groups[_GROUP].volumes
        for number in range(len(made), volumes):
            one = copy.deepcopy(made[first.name])
            one.name = first.name.replace("0000", f"{number:04}")
            one.uuid = f"{number:04}{one.uuid[4:]}"
            one.active = False
            one.tags = {tag.replace("0000", f"{number:04}") for tag in one.tags}
            made[one.name] = one
        name = f"ListVolumes of {volumes}"
        found = self.time(name, self.client.volumes)
        assert len(found) == volumes, f"{len(found)} of {volumes} volumes are listed"


def measure(rounds: int) -> list[Row]:
    waking = mock.patch.object(VolumeGroup, "wake")
    with TemporaryDirectory(prefix="carver-own-") as name, waking:
        bench = Bench(Path(name))
        try:
            for number in range(_WARM_UP):
                bench.live(number)
            bench.samples = rows.Samples()
            gc.collect()
            for number in range(rounds):
                bench.live(number)
            for volumes in _LISTED:
                bench.list(volumes)
        finally:
            bench.close()
    found = bench.samples
    return [
        row
        for promise in rows.OWN
        for row in rows.of_value(
            promise.name,
            [one * 1e6 for one in found.seconds.get(promise.name, [])],
            found.commands.get(promise.name),
        )
    ]


def run(rounds: int) -> document.Run:
    return document.Run("own code", "", document.any_machine(), measure(rounds))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    Console(width=120, highlight=False).print(tables.on_terminal(run(parser.parse_args().rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
