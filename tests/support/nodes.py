"""Several services on one machine, with groups of their own, as nodes are to each other."""

import argparse
import io
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import configured
import grpc
import histories
import serving
from csi_client import Client
from model.machine import bury, die
from model.stopping import Switch
from real.any import AnyHost, device
from serving import machine

from agent.cli import main
from agent.cli.volume_verbs import VolumeVerbs
from agent.core import errors
from agent.csi.client import block
from agent.daemon.server import Service
from agent.extras.transfer import streams_command
from agent.extras.transfer.remote import Remote, Write
from agent.settings.settings import Config
from lvm import volumes
from mount.block_io import Bytes, Opened
from proto import csi_pb2 as csi
from proto.carver_pb2_grpc import TransferStub

MIB = 1 << 20
SIZE = 24 * MIB
LAYOUTS = configured.layouts("linear", "striped", "raid1", "thin")
PLAIN, THIN = "linear", "thin"


@dataclass
class Node:
    """A service with a group of its own, and a person at its prompt."""

    host: AnyHost
    config: Config
    group: str
    directory: Path
    serial: Iterator[int] = field(default_factory=itertools.count)
    service: Service = field(init=False)
    client: Client = field(init=False)
    at: VolumeVerbs = field(init=False)

    def device(self, name: str) -> str:
        return device(self.host, self.group, name)

    def content(self, name: str, size: int = SIZE) -> bytes:
        if self.host.devices.find(self.group, name) is None:
            # A thin snapshot is inactive while it is not read.
            volumes.activate(self.host.lvm, self.group, name)
        with self.host.kernel.opened(self.device(name)) as opened:
            return opened.read(0, size)

    def start(self, switch: Switch | None = None) -> None:
        """A process, on a socket of its own; its way to the machine leads through a switch."""
        endpoint = self.directory / f"{next(self.serial)}.sock"
        own = replace(self.config, endpoint=endpoint)
        self.service = started(self.host, own, switch)
        self.client = Client(endpoint)
        self.transfer = self.client.stub(TransferStub)
        self.at = VolumeVerbs(self.client, own, machine(self.host))

    def stop(self) -> None:
        """The process ends in good order."""
        self.client.__exit__(None, None, None)
        self.service.stop()

    def restart(self, switch: Switch | None = None) -> None:
        """It ends, and another goes on."""
        self.stop()
        self.start(switch)

    def kill(self) -> None:
        """It is dead already, or dies now; another goes on."""
        self.client.__exit__(None, None, None)
        die(self.service)
        bury(self.service)
        self.start()

    def names(self) -> set[str]:
        """Logical volumes, by lvm2; but for pools."""
        found = self.service.reports.fresh(self.group).group(self.group)
        return {one.name for one in found.volumes.values() if "pool" not in one.layout}


@cache
def command_line() -> argparse.ArgumentParser:
    """The words that carver takes. To put them together takes longer than most calls."""
    return main.parser()


def started(host: AnyHost, config: Config, switch: Switch | None = None) -> Service:
    """Carver, which went on with what was left; from then on its steps are counted."""
    switch = switch or Switch()
    run = switch.run(host.run)
    seen = replace(
        machine(host),
        run=run,
        kernel=switch.kernel(host.kernel),
        devices=switch.devices(host.devices),
    )
    running = Service(config, seen, replace(host.lvm, run=run))
    # A delete has ended when it answers; one that was killed while it erased has not.
    seconds = 600 if switch.stop_at < 0 else 2
    running.eraser.grace_seconds = running.copier.grace_seconds = seconds
    # A move asks for its volume repeatedly, beside what a test does: calls take turns,
    # but where a kill ended one its turn never comes.
    running.context.locks.grace_seconds = 5.0 if switch.stop_at < 0 else 0.0
    switch.on_death = lambda: die(running)
    serving.recover(running)
    running.start(config.endpoint)
    switch.counting = True
    return running


@contextmanager
def made(
    host: AnyHost, config: Config, directory: Path, name: str, group: str = ""
) -> Iterator[Node]:
    """A node of that name, which ends in the end, with a group of its own unless one is given."""
    # Each of another size: the lab gives the same group again for the same disks.
    group = group or host.new_group(60, 60 + sum(name.encode()) % 30)
    own_directory = directory / name
    own_directory.mkdir()
    classes = histories.sealed(configured.classes(group, LAYOUTS))
    changes: dict[str, Any] = {
        "classes": classes,
        "kubelet_dir": (str(directory),),
        "node_id": name,
    }
    node = Node(host, replace(config, **changes), group, own_directory)
    node.start()
    try:
        yield node
    finally:
        node.stop()


def volume_of(node: Node, layout: str = PLAIN, name: str = "db", size: int = SIZE) -> csi.Volume:
    volume = node.client.create(name, size, block(), parameters={"class": layout})
    node.client.stage(volume, node.directory / "staging", block())
    return volume


def usable(node: Node) -> list[csi.Volume]:
    """The volumes that a caller is given, and can use."""
    found = list(node.client.volumes())
    for one in found:
        place = node.directory / "trial"
        node.client.stage(one, place, block())
        node.client.unstage(one.volume_id, place)
    return found


def write(
    node: Node,
    name: str,
    chance: random.Random,
    pieces: int = 8,
    lengths: Sequence[int] = (1, 1, 2, 16, 300),
) -> None:
    """Some blocks, of noise or of zeroes, anywhere."""
    path = node.device(name)
    size = node.host.kernel.device_size_bytes(path)
    for _ in range(pieces):
        length = 4096 * chance.choice(lengths)
        data = bytes(length) if chance.random() < 0.2 else chance.randbytes(length)
        offset = chance.randrange(0, (size - length) // 4096) * 4096
        node.host.write_bytes(path, offset, data)


def stream(node: Node, name: str, **options: object) -> bytes:
    """A snapshot as a stream; asked for again where the group took its time."""
    for _ in range(5):
        out = io.BytesIO()
        # On a machine with other work lvm2 takes longer than a list waits for it.
        with suppress(errors.AbsenceNotProved):
            streams_command.send(node.at, name, out, **options)  # type: ignore[arg-type]
            return out.getvalue()
    raise AssertionError(f"no list in time has {name}")


def receive(node: Node, name: str, data: bytes, device_class: str = "") -> dict[str, object]:
    return streams_command.receive(node.at, name, io.BytesIO(data), device_class=device_class)


class Wrapped(Opened):
    """An open device whose operations a test changes."""

    def __init__(self, device: Opened) -> None:
        super().__init__("wrapped", -1)
        self._real = device

    def read_into(self, offset_bytes: int, place: memoryview) -> None:
        self._real.read_into(offset_bytes, place)

    def write(self, offset_bytes: int, data: Bytes) -> None:
        self._real.write(offset_bytes, data)

    def zero_out(self, offset_bytes: int, length_bytes: int) -> None:
        self._real.zero_out(offset_bytes, length_bytes)

    def flush(self) -> None:
        self._real.flush()


class Stand(Remote):
    """In the place of ssh: the words are understood as a shell there would, on its socket."""

    def __init__(self, there: Node) -> None:
        super().__init__(there.config.node_id, (), ())
        self._there = there
        # Asked before each command with its words, and after it: may raise as a lost line does.
        self.before: Callable[[Sequence[str]], None] = lambda _words: None
        self.after: Callable[[Sequence[str]], None] = lambda _words: None
        # What of a stream gets there.
        self.most_bytes = 1 << 40

    def ask(self, *words: str) -> dict[str, Any]:
        if words == ("status", "--json"):
            return {"node": self.node, "driver": self._there.config.driver_name}
        return self._carry_out(words, io.BytesIO())

    def feed(self, *words: str, write: Write) -> dict[str, Any]:
        out = io.BytesIO()
        problem = None
        try:
            write(out.write)
        except Exception as error:
            problem = error
        answer = self._carry_out(words, io.BytesIO(out.getvalue()[: self.most_bytes]))
        if problem is not None:
            raise problem
        return answer

    def _carry_out(self, words: Sequence[str], source: BinaryIO) -> dict[str, Any]:
        parsed = command_line().parse_args(words)
        self.before(words)
        try:
            answer = streams_command.received(self._there.at, parsed, source)
        except (errors.AgentError, grpc.RpcError) as error:
            why = error.details() if isinstance(error, grpc.RpcError) else str(error)
            raise errors.NodeRefused(self.node, " ".join(words), str(why)) from None
        self.after(words)
        return answer
