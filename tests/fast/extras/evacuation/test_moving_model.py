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
import histories
import pytest
from baton import Baton
from clustered import Cluster
from fakes.host import FakeHost
from moving_model import ModelMoves, Service

from agent.core import ids
from agent.extras.controller.node_moves import NodeFailed
from agent.extras.transfer.move import Differ, Move

CALLS = (
    *("begin", "begin", "take", "take", "send", "send", "send", "more", "more", "hold", "hold"),
    *("renew", "release", "commit", "commit", "undo", "finish", "finish there", "finish there"),
    *("withdraw", "abort", "drop", "compare", "use", "unuse", "restart", "restart there"),
    *("elsewhere", "undo begun", "undo other", "finish other", "abort other"),
)
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
        self.restart: Callable[[], None] = lambda: None
        self.restart_there: Callable[[], None] = lambda: None

    def call(self, name: str, which: int) -> str:
        """What comes of a call, in words that are the same for model and service."""
        try:
            return f"{name}: {self._call(name, which)}"
        except NodeFailed as error:
            self.problem = str(error)
            return f"{name}: {error.code().name}"
        except Differ:
            return f"{name}: differ"

    def _snapshot(self, which: int) -> str:
        return self.taken[which % len(self.taken)]

    def _call(self, name: str, which: int) -> Any:
        source, there = self.move.source, self.move.destination
        match name:
            case "begin":
                return _state(source.begin("b"))
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
            case "withdraw":
                there.withdraw(self.word or "0123")
            case "abort":
                there.abort("")
            case "abort other":
                there.abort(OTHER)
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
        taken = ["none" if there[key] == "" else "some" for key in ("chain", "into")]
        is_own = bool(there["release"]) and bool(own) and there["release"] == self._own_release()
        return own, f"{there['state']} {taken} {there['finishing']} {is_own}"

    def _own_release(self) -> str:
        try:
            return self.release
        except NodeFailed:
            return "?"


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
    volume = services["a"].make(name, "linear")
    modelled = Side(
        ModelMoves(services, Baton(chance)).move(volume.volume_id, "a", "b", device_class="linear")
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
        real.restart = lambda: _restart(two, "a", disk)
        real.restart_there = lambda: _restart(two, "b")
        modelled.use, modelled.unuse = use_modelled, volume.users.clear
        modelled.restart, modelled.restart_there = services["a"].restart, services["b"].restart
        played: list[str] = []
        for _ in range(30):
            call, which = chance.choice(CALLS), chance.getrandbits(8)
            expected = modelled.call(call, which)
            found = real.call(call, which)
            played.append(found)
            assert found == expected, (seed, played, real.problem)
            assert real.states() == modelled.states(), (seed, played)


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
