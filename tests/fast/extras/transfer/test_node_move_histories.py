"""Random histories of moves that the controller drives: calls cut off, services that die.

At each moment at most one node lists the volume as its own. Whatever was cut off, another `Move`
continues, and in the end one node has all that was written. Then the volume is used there, and
moves back to what it has left on its first node.
"""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import chosen
import clustered
import configured
import histories
import pytest
from clocks import Clock
from clustered import Cluster
from fakes.host import FakeHost
from nodes import Node

from agent.core import errors, tag
from agent.csi.client import block
from agent.extras.controller.node_moves import Calls
from agent.extras.transfer import move, node_streams
from agent.extras.transfer.move import Move

LAYOUTS = ("linear", "thin", "raid1", "sealed-linear", "sealed-thin")


class Cut(Exception):
    """The controller ends before a call, or before it has the answer."""


class Dead(BaseException):
    """A node's service ends where it is."""


class History:
    """One volume with its user, a move of it, and what happens to both."""

    def __init__(self, two: Cluster, clock: Clock, seed: str, layout: str) -> None:
        self.two, self.clock, self.seed, self.layout = two, clock, seed, layout
        self.chance = random.Random(seed)
        self.source, self.target = two.nodes["a"], two.nodes["b"]
        source = self.source
        self.disk = histories.Disk(source.client, source.service, source.host, layout, "db")
        self.is_quiet = False
        # Number of looks after which the volume is used no more.
        self.looks_left = self.chance.randint(0, 4)
        self.events = self.chance.randint(0, 6)
        self._open = ExitStack()
        # The digest of the word of the move that left what a move back replaces, and whether what
        # was left is removed by now.
        self.replaces, self.is_removed = "", False
        # Parts of the present stream until its line is cut or a service dies, and which.
        self._parts_left, self._end = -1, ""
        self._dead: set[str] = set()
        histories.write_some(self.disk, self.chance)
        if not self.looks_left:
            self.disk.deactivate()

    # What the volume's user does.

    def use(self) -> None:
        """Have the volume open until `look`."""
        if self.looks_left:
            self._open.enter_context(self.source.host.kernel.opened(self.disk.device))

    def look(self) -> None:
        """Write, take snapshots, grow; at last the volume is unused."""
        self._open.close()
        if not self.looks_left:
            return
        self.looks_left -= 1
        histories.happen(self.disk, self.clock, self.chance)
        if not self.looks_left:
            self.disk.deactivate()
        self.use()

    # What happens to the controller and to the nodes.

    def around(self, name: str, call: Callable[[], Any]) -> Any:
        """Make a call of the controller, which may be cut off before or after it."""
        if self.is_quiet or "ReleaseMove" in name or threading.current_thread().name == "keep":
            return call()
        self.require_one_owner()
        odds = self.chance.random() if self.events else 1.0
        if odds < 0.24:
            self.events -= 1
        if odds < 0.05:
            raise Cut
        if odds < 0.09:
            self.restart(self.chance.choice("ab"))
        if odds > 0.5 and self.events and ("Pull" in name or "Checksum" in name):
            self.events -= 1
            self._parts_left = self.chance.randint(0, 40)
            self._end = self.chance.choice(("line", "cancel", "a", "b"))
        try:
            answer = call()
        finally:
            self._parts_left = -1
            self.bury()
        if 0.09 <= odds < 0.16:
            raise Cut
        return answer

    def part(self, who: str) -> None:
        """Count a part of a stream, which a node sends or takes; it may be the last one."""
        if self._parts_left < 0:
            return
        self._parts_left -= 1
        if self._parts_left >= 0:
            return
        if self._end == "line":
            raise OSError("the line is cut")
        if self._end == "cancel":
            for future in list(self.two.controller.moves._futures):
                future.cancel()
        elif self._end == who:
            self._dead.add(who)
            server = clustered.listener(self.two.nodes[who])._server
            assert server is not None
            # As the end of its process closes its connections.
            server.stop(0)
            raise Dead
        else:
            # The other end counts the next part.
            self._parts_left = 0

    def bury(self) -> None:
        for name in sorted(self._dead):
            self._dead.discard(name)
            self.restart(name, is_kill=True)

    def restart(self, name: str, *, is_kill: bool = False) -> None:
        """A node's service ends, in good order or not, and another begins."""
        node = self.two.nodes[name]
        listener = clustered.listener(node)
        if is_kill:
            server = listener._server
            assert server is not None
            server.stop(0).wait()
        else:
            for task in listener._tasks:
                task.stop()
            node.service.extras["transfer"].stop()
            server = listener._server
            assert server is not None
            server.stop(1).wait()
        (node.kill if is_kill else node.restart)()
        node.service.reports.fresh()
        listener = clustered.listener(node)
        listener.find_other_groups()
        listener.serve()
        self.two.write_nodes()
        self.two.loop.run(self.two.controller.look())
        self.two.ask()
        if name == self.source.config.node_id:
            self.disk.client, self.disk.service = node.client, node.service

    # What must be so.

    def require_one_owner(self) -> None:
        owners = [
            node.config.node_id
            for node in (self.source, self.target)
            if any("vol-db" in one.volume_id for one in node.client.volumes())
        ]
        assert len(owners) <= 1, f"{self.seed}: {owners}"

    def require_usable(self, node: Node) -> None:
        """The volume can be used on a node."""
        [volume] = node.client.volumes()
        secrets = histories.KEY if self.disk.is_sealed else {}
        node.client.stage(volume, node.directory / "staging", block(), secrets)
        node.client.unstage(volume.volume_id, node.directory / "staging")

    def require_held(self, node: Node) -> None:
        """What its user wrote is there: all of it, or of a volume with a key its ciphertext."""
        assert self._lies(node) == self.expected, self.seed

    def _lies(self, node: Node) -> bytes:
        return node.content("vol-db", len(self.expected))

    @property
    def expected(self) -> bytes:
        if not self.disk.is_sealed:
            return bytes(self.disk.held)
        return self._sealed

    def note_held(self) -> None:
        """Note what the volume holds, which is used no more."""
        if self.disk.is_sealed:
            group = self.source.service.reports.fresh(self.source.group).group(self.source.group)
            size = group.volume("vol-db").size_bytes
            self._sealed = self.source.content("vol-db", size)
            self.source.host.deactivate(self.source.group, "vol-db")

    # The move.

    def move(self) -> Move:
        return self.two.controller.moves.move(
            self.disk.id,
            self.source.config.node_id,
            self.target.config.node_id,
            device_class=self.layout,
            replaces=self.replaces,
            tell=self.note,
        )

    def note(self, text: str) -> None:
        """Note whether the move removes what is on the target."""
        self.is_removed = self.is_removed or "sending all of it again" in text

    def run(self) -> None:
        """Move the volume, and sometimes back before its claim would be rebound."""
        is_undone = self.chance.random() < 0.3
        undo_at = self.chance.randint(1, 6)
        self.use()
        for attempt in range(60):
            # The last ones meet no more mishaps.
            self.events *= attempt < 40
            try:
                if is_undone and attempt >= undo_at:
                    self.undo()
                    is_undone = False
                if self.drive():
                    break
            except (Cut, errors.AgentError):
                pass
            self.require_one_owner()
        else:
            raise AssertionError(f"{self.seed}: the move does not come to an end")

    def drive(self) -> bool:
        """Do what the evacuation does with a move: return whether the volume is the other's."""
        moving = self.move()
        for _ in range(8):
            found = moving.approach()
            if found.is_moved or (found.is_caught_up and not found.in_use):
                break
            self.look()
        else:
            return False
        if not found.is_moved:
            self.note_held()
        if not moving.hand_over():
            return False
        assert moving.complete()["state"] == tag.READY
        return True

    def undo(self) -> None:
        with suppress(errors.NotMoved):
            self.move().undo(confirmed=lambda _question: True, is_nowhere=lambda _question: False)
        self.is_quiet = True
        if self.replaces and not self.is_removed:
            # What was left there is under quarantine still, or is removed.
            self.is_removed = not self.target.names()
            if not self.is_removed:
                assert self.move().destination.status()["replaceable"] == self.replaces
        else:
            assert self.target.names() == set(), self.seed
        if not self.looks_left and not self.disk.is_sealed:
            self.require_held(self.source)
            self.source.host.deactivate(self.source.group, "vol-db")
        if not self.looks_left:
            # As thirty seconds later: the answer to a hold may have been lost.
            self.source.service.context.holds._held.clear()
            self.require_usable(self.source)
        self.is_quiet = False

    def turn_round(self) -> None:
        """Have the volume be used where it is now, for a move back."""
        self.is_quiet = True
        self.require_held(self.target)
        self.target.host.deactivate(self.target.group, "vol-db")
        for one in list(self.disk.snapshots):
            self.source.client.delete_snapshot(one)
        self.disk.snapshots.clear()
        self.disk.written_at.clear()
        self.replaces, self.is_removed = self.move().source.state().release, False
        self.uuid = _uuid(self.source)
        self.source, self.target = self.target, self.source
        node, disk = self.source, self.disk
        [disk.volume] = node.client.volumes()
        disk.client, disk.service, disk.host = node.client, node.service, node.host
        disk.id, disk.group = disk.volume.volume_id, node.group
        if disk.is_sealed:
            # To open it may write at its ends.
            disk.held[:] = disk.read(disk.id)
        self.looks_left, self.events = self.chance.randint(0, 4), self.chance.randint(0, 6)
        histories.write_some(disk, self.chance)
        if not self.looks_left:
            disk.deactivate()
            self.note_held()
        self.is_quiet = False

    def end(self) -> None:
        self.is_quiet = True
        if self.replaces and not self.is_removed:
            # It was used, and not made anew.
            assert _uuid(self.target) == self.uuid, self.seed
        # To open a volume with a key may write at its ends: so it is looked at before.
        self.require_held(self.target)
        self.target.host.deactivate(self.target.group, "vol-db")
        self.require_usable(self.target)
        for one in self.disk.snapshots:
            self.source.client.delete_snapshot(one)
        self.move().finish()
        [moved] = self.target.client.volumes()
        self.target.host.deactivate(self.target.group, "vol-db")
        self.target.client.delete(moved.volume_id)
        assert (self.source.names(), self.target.names()) == (set(), set()), self.seed


def _uuid(node: Node) -> str:
    """The UUID of the volume's logical volume on a node."""
    return node.service.reports.fresh(node.group).group(node.group).volume("vol-db").uuid


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Cluster]:
    config = replace(configured.carver(tmp_path), evacuation=True)
    hosts = {}
    for number, name in enumerate("ab", 1):
        (tmp_path / f"machine-{name}").mkdir()
        hosts[name] = FakeHost(tmp_path / f"machine-{name}", number)
    with clustered.cluster(hosts["a"], config, tmp_path, hosts=hosts) as made:
        yield made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("time.time_ns", made)
    return made


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.timeout(7200)
def test_random_histories_leave_one_whole_volume(
    two: Cluster, layout: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = chosen.numbers("CARVER_NODE_MOVES", seed=1, histories=2)
    monkeypatch.setattr(node_streams, "PART_BYTES", 64 << 10)
    monkeypatch.setattr(node_streams, "_PROGRESS_SECONDS", 0.05)
    monkeypatch.setattr("agent.extras.streams.reading.RECORD_SECONDS", 0.05)
    monkeypatch.setattr("agent.extras.controller.node_moves._PAUSE_SECONDS", 0.05)
    monkeypatch.setattr("agent.extras.controller.node_moves._AGAIN_SECONDS", 3.0)
    monkeypatch.setattr(move, "_KEEP_SECONDS", 0.2)
    present: list[History] = []
    call, streams = Calls.call, Calls.streams
    flush, readinto = node_streams._Messages.flush, node_streams._Incoming.readinto

    def called(self: Calls, node: str, method: str, *given: Any, **more: Any) -> Any:
        return present[-1].around(method, lambda: call(self, node, method, *given, **more))

    def streamed(self: Calls, *calls: Any, **more: Any) -> Sequence[Any]:
        found: Sequence[Any] = present[-1].around(
            calls[0][1], lambda: streams(self, *calls, **more)
        )
        return found

    def flushed(self: Any) -> None:
        present[-1].part("a")
        flush(self)

    def read(self: Any, buffer: Any) -> int:
        present[-1].part("b")
        return readinto(self, buffer)

    monkeypatch.setattr(Calls, "call", called)
    monkeypatch.setattr(Calls, "streams", streamed)
    monkeypatch.setattr(node_streams._Messages, "flush", flushed)
    monkeypatch.setattr(node_streams._Incoming, "readinto", read)
    for number in range(asked["histories"]):
        history = History(two, clock, f"{asked['seed']} {layout} {number}", layout)
        present.append(history)
        history.run()
        history.turn_round()
        history.run()
        history.end()
