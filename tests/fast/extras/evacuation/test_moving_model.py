"""The model of nodes for histories of evacuations answers as real services do, call by call."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import chosen
import clustered
import configured
import expect
import grpc
import histories
import pytest
from baton import Baton
from clustered import Cluster
from fakes.host import FakeHost
from moving_model import ModelMoves, Refusal, Service
from nodes import Node

from agent.core import ids
from agent.extras.controller.node_moves import NodeFailed
from agent.extras.transfer.move import Differ, Move, is_own
from proto import carver_pb2 as carver

CALLS = (
    *("begin", "begin", "take", "take", "send", "send", "send", "more", "more", "hold", "hold"),
    *("renew", "release", "commit", "commit", "undo", "finish", "finish there", "finish there"),
    *("withdraw", "abort", "drop", "compare", "use", "unuse", "restart", "restart there"),
    *("elsewhere", "undo begun", "undo other", "finish other", "abort other", "delete"),
    "keep there",
)
# Calls of the move of what arrived back to where it came from, once it was begun by `turn`.
CALLS_BACK = (
    *("begin", "begin", "take", "take", "send", "send", "send", "more", "hold", "hold"),
    *("commit", "commit", "undo", "finish", "finish there", "finish there", "withdraw", "abort"),
    *("drop", "compare"),
)
# What leads to a volume that is the other node's.
HANDED_OVER = ("begin", "take", "send", "hold", "take", "more", "commit", "drop", "finish there")
# Digest of the word of another move than those of the test.
OTHER = "ab" * 32


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Cluster]:
    config = replace(configured.carver(tmp_path), evacuation=True)
    hosts = {}
    for number, name in enumerate(("a", "b")):
        (tmp_path / f"machine-{name}").mkdir()
        hosts[name] = FakeHost(tmp_path / f"machine-{name}", number)
    with clustered.cluster(hosts["a"], config, tmp_path, hosts=hosts) as made:
        yield made


class Side:
    """A volume on a node, its move, and what a caller remembers of it."""

    def __init__(self, move: Move) -> None:
        self.move = move
        self.taken: list[str] = []
        self.token = self.word = self.problem = ""
        self.use: Callable[[], None] = lambda: None
        self.unuse: Callable[[], None] = lambda: None
        self.delete: Callable[[], str] = str
        self.keep: Callable[[], str] = str
        self.restart: Callable[[], None] = lambda: None
        self.restart_there: Callable[[], None] = lambda: None
        # Makes the move back that replaces what the move with this digest left.
        self.turn: Callable[[str, str], Move]
        self.back: Side | None = None

    def call(self, name: str, which: int) -> str:
        """What comes of a call, in words that are the same for model and service."""
        try:
            return f"{name}: {self._call(name, which)}"
        except NodeFailed as error:
            self.problem = str(error)
            if name.endswith("compare"):
                # Both nodes are asked at once, and either may refuse first.
                return f"{name}: refused"
            return f"{name}: {error.code().name}"
        except Differ:
            return f"{name}: differ"

    def _snapshot(self, which: int) -> str:
        return self.taken[which % len(self.taken)]

    def _call(self, name: str, which: int) -> Any:
        source, there = self.move.source, self.move.destination
        if name.startswith("back "):
            return self.back and self.back._call(name.removeprefix("back "), which)
        match name:
            case "turn":
                found = there.status()
                if is_own(found) and self.release:
                    self.back = self.back or Side(self.turn(found["volume_id"], self.release))
            case "begin":
                state = source.begin(there.node)
                return f"{_state(state)} {bool(state.replaces)}"
            case "elsewhere":
                return _state(source.begin("c"))
            case "take":
                if self.release:
                    self.taken.append(source.take())
            case "send" | "more":
                return self._send(name == "more", which)
            case "hold":
                self.token = source.hold()
            case "renew":
                return source.hold(self.token or "0123") == self.token
            case "release":
                source.release(self.token or "0123")
            case "commit":
                if self.taken:
                    state = source.commit(self._snapshot(-1), self.token or "0123")
                    self.word = state.word
                    return _state(state)
            case "undo":
                source.undo("")
            case "finish":
                source.finish("")
            case "undo begun":
                source.undo("", only_begun=True)
            case "undo other":
                source.undo(OTHER)
            case "finish other":
                source.finish(OTHER)
            case "drop":
                source.drop(self.taken[-1:])
            case "compare":
                if self.taken:
                    there.compare(self._snapshot(-1))
            case "finish there":
                there.finish(self.word or "0123")
            case "keep there":
                return self.keep()
            case "withdraw":
                there.withdraw(self.word or "0123")
            case "abort":
                there.abort("")
            case "abort other":
                there.abort(OTHER)
            case "delete":
                # Not before the move begins: nothing would be left to be compared.
                return self.delete() if self.release else ""
            case "use":
                self.use()
            case "unuse":
                self.unuse()
            case "restart":
                self.restart()
            case "restart there":
                self.restart_there()
        return ""

    @property
    def release(self) -> str:
        return str(self.move.source.state().release)

    def _send(self, is_more: bool, which: int) -> str:
        if not self.taken or (is_more and len(self.taken) < 2) or not self.release:
            return ""
        base = self._snapshot(-2) if is_more else ""
        last = self._snapshot(-1)
        sent = self.move.destination.send(last, base, self.release, 0, is_verified=bool(which % 2))
        return str(sent.is_equal)

    def states(self) -> tuple[str, str]:
        """The states on both nodes."""
        try:
            own = _state(self.move.source.state())
        except NodeFailed as error:
            own = error.code().name
        there = self.move.destination.status()
        keys = ("chain", "into", "replaces", "replaceable")
        taken = ["none" if there[key] == "" else "some" for key in keys]
        is_own = bool(there["release"]) and bool(own) and there["release"] == self._own_release()
        back = self.back.states() if self.back else ""
        return own, f"{there['state']} {taken} {there['finishing']} {is_own} {back}"

    def _own_release(self) -> str:
        try:
            return self.release
        except NodeFailed:
            return "?"


def _code(call: Callable[[], object]) -> str:
    """Name of the code of a call that is refused; empty for one that succeeds."""
    try:
        call()
    except Refusal as error:
        return error.code.name
    except grpc.RpcError as error:
        return error.code().name
    return ""


def _state(state: Any) -> str:
    return f"{state.state} to {state.node!r} {bool(state.word)} {state.in_use}"


@pytest.mark.parametrize("layout", ["linear", "thin", "sealed-linear"])
def test_the_model_answers_as_services_do(two: Cluster, layout: str) -> None:
    asked = chosen.numbers("CARVER_MODEL", seed=1, histories=4)
    for number in range(asked["histories"]):
        seed = f"{asked['seed']} {layout} {number}"
        _compare(two, layout, random.Random(seed), seed, f"db{number}")


def _compare(two: Cluster, layout: str, chance: random.Random, seed: str, name: str) -> None:
    a = two.nodes["a"]
    disk = histories.Disk(a.client, a.service, a.host, layout, name)
    histories.write_some(disk, chance)
    disk.deactivate()
    real = Side(two.controller.moves.move(disk.id, "a", "b", device_class=layout))
    services = {one: Service(one, number, lambda: 0.0) for number, one in enumerate("abc")}
    kind = "thin" if layout == "thin" else "linear"
    volume = services["a"].make(name, kind)
    moves = ModelMoves(services, Baton(chance))
    modelled = Side(moves.move(volume.volume_id, "a", "b", device_class=kind))
    modelled.turn = lambda volume_id, replaces: moves.move(
        volume_id, "b", "a", device_class=kind, replaces=replaces
    )
    real.turn = lambda volume_id, replaces: two.controller.moves.move(
        volume_id, "b", "a", device_class=layout, replaces=replaces
    )
    with ExitStack() as ending:

        def use() -> None:
            # As what is mounted: by the device of the logical volume.
            if a.host.devices.find(a.group, ids.logical_name(disk.id)):
                ending.enter_context(a.host.kernel.opened(disk.logical(disk.id)))

        def use_modelled() -> None:
            if a.host.devices.find(a.group, ids.logical_name(disk.id)):
                volume.users.add("pod")

        real.use, real.unuse = use, ending.close
        real.delete = lambda: _code(lambda: a.client.delete(disk.id))
        modelled.delete = lambda: _code(lambda: services["a"].delete(volume.volume_id))
        real.keep = lambda: _code(lambda: keep(two.nodes["b"], name))
        modelled.keep = lambda: _code(lambda: services["b"].keep(name))
        real.restart = lambda: _restart(two, "a", disk)
        real.restart_there = lambda: _restart(two, "b")
        modelled.use, modelled.unuse = use_modelled, volume.users.clear
        modelled.restart, modelled.restart_there = services["a"].restart, services["b"].restart
        played: list[str] = []
        for call in _drawn(chance):
            which = chance.getrandbits(8)
            expected = modelled.call(call, which)
            # A node closes a snapshot only after the end of its stream was seen.
            expect.soon(lambda: not any(map(_streams, two.nodes.values())))
            found = real.call(call, which)
            played.append(found)
            assert found == expected, (seed, played, real.problem)
            assert real.states() == modelled.states(), (seed, played)


def keep(node: Node, name: str) -> None:
    """Keep what a node has received, as an operator does whose other node is lost."""
    volume_id = node.transfer.ReceiveStatus(carver.NameRequest(name=name)).volume_id
    node.transfer.KeepReceived(carver.VolumeRequest(volume_id=volume_id))


def _streams(node: Node) -> int:
    """The number of a node's streams."""
    transfer: Any = node.service.extras["transfer"]
    return len(transfer._node_streams._jobs)


def _drawn(chance: random.Random) -> Iterator[str]:
    """The calls of a history, of which every other one has a move back."""
    if chance.random() < 0.5:
        yield from (chance.choice(CALLS) for _ in range(30))
        return
    yield from HANDED_OVER
    yield "turn"
    for _ in range(30):
        is_back = chance.random() < 0.8
        yield f"back {chance.choice(CALLS_BACK)}" if is_back else chance.choice(CALLS)


def _restart(two: Cluster, name: str, disk: histories.Disk | None = None) -> None:
    node = two.nodes[name]
    for task in clustered.listener(node)._tasks:
        task.stop()
    node.service.extras["transfer"].stop()
    server = clustered.listener(node)._server
    assert server is not None
    server.stop(1).wait()
    node.restart()
    node.service.reports.fresh()
    clustered.listener(node).find_other_groups()
    clustered.listener(node).serve()
    two.write_nodes()
    two.loop.run(two.controller.look())
    two.ask()
    if disk is not None:
        disk.client, disk.service = node.client, node.service
