"""Volumes moved from one service to another, and what a lost line or a dead process leaves."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import chosen
import expect
import grpc
import histories
import nodes
import pytest
from clocks import Clock
from nodes import LAYOUTS, MIB, SIZE, Node, Stand, usable, volume_of, write
from real.any import AnyHost

from agent.cli import terminal
from agent.core import errors, ids, tag
from agent.csi.client import block, mounted
from agent.extras.streams import reading
from agent.extras.transfer import move as steps_of_moves
from agent.extras.transfer import move_command, streams_command
from agent.extras.transfer.move import Move
from agent.extras.transfer.move_command import Options, move_of
from agent.operations.delete import VolumeDeleter
from agent.settings.settings import Config
from lvm import volumes
from mount.block_io import Opened
from proto import carver_pb2 as carver
from proto import csi_pb2 as csi


def move(here: Node, stand: Stand, volume: csi.Volume) -> Move:
    return move_of(here.at, stand, volume.volume_id, Options("db"), lambda _text: None)


def begin_and_hold(here: Node, volume: csi.Volume) -> carver.HoldMoveRequest:
    """Begin a move and hold its volume; return the request that prolongs and ends that."""
    here.transfer.BeginMove(carver.BeginMoveRequest(volume_id=volume.volume_id, node="there"))
    hold = carver.HoldMoveRequest(volume_id=volume.volume_id)
    hold.token = here.transfer.HoldMove(hold).token
    return hold


class User:
    """Who has a volume open, and lives with it while it moves; then the line is cut at times."""

    def __init__(self, disk: histories.Disk, stand: Stand, clock: Clock, seed: str) -> None:
        self._disk, self._stand, self._clock = disk, stand, clock
        self._chance = random.Random(seed)
        self._left = self._chance.randint(2, 6)
        self._open = ExitStack()
        stand.before = self._cut
        self._use()

    def look(self, _seconds: float) -> None:
        """What happens between two looks of the command that moves the volume."""
        self._open.close()
        self._left -= 1
        if self._left > 0:
            histories.happen(self._disk, self._clock, self._chance)
            self._use()
        elif self._left == 0:
            histories.write_some(self._disk, self._chance)
            self._disk.deactivate()

    def _use(self) -> None:
        kernel = self._disk.host.kernel
        self._open.enter_context(kernel.opened(self._disk.device))

    def _cut(self, words: Sequence[str]) -> None:
        odds = self._chance.random()
        self._stand.most_bytes = self._chance.randrange(1 << 22) if odds < 0.15 else 1 << 40
        if odds > 0.95:
            raise Cut


class Cut(Exception):
    """The line, or the process, ends."""


def die(*_: object, **__: object) -> None:
    raise Cut


def yes(_question: str) -> bool:
    return True


def no(_question: str) -> bool:
    return False


def never(question: str) -> bool:
    raise AssertionError(f"asked: {question}")


def is_last(here: Node, words: Sequence[str]) -> bool:
    """Whether these words belong to the last round, while the volume is held here."""
    return "--verify" in words and bool(here.service.context.holds._held)


def cut_before_the_last(here: Node, there: Node, volume: csi.Volume) -> None:
    """A command that ends when the other node holds all but what changed last."""
    stand = Stand(there)

    def cut(words: Sequence[str]) -> None:
        if is_last(here, words):
            raise Cut

    stand.before = cut
    with pytest.raises(Cut):
        move(here, stand, volume).run()


def publish(here: Node, volume: csi.Volume) -> Callable[[], None]:
    """Use a volume; return what ends that."""
    target, staging = here.directory / "raw", here.directory / "staging"
    here.client.publish(volume, staging, target, block())

    def end() -> None:
        here.client.unpublish(volume.volume_id, target)
        here.client.unstage(volume.volume_id, staging)

    return end


@pytest.fixture
def volume(here: Node) -> csi.Volume:
    """A volume with content that is not in use."""
    made = volume_of(here)
    write(here, "vol-db", random.Random(1))
    here.client.unstage(made.volume_id, here.directory / "staging")
    return made


@pytest.mark.variation
def test_a_volume_moves_and_the_rest_of_it_is_deleted(
    here: Node, there: Node, volume: csi.Volume
) -> None:
    content = here.content("vol-db")
    going = move(here, Stand(there), volume)
    answer = going.run()
    assert answer["state"] == tag.READY
    assert usable(here) == []
    [moved] = usable(there)
    assert moved.volume_id == answer["volume_id"] != volume.volume_id
    assert there.content("vol-db") == content
    with expect.code("FAILED_PRECONDITION", "moved to there"):
        here.client.stage(volume, here.directory / "staging", block())
    with expect.code("FAILED_PRECONDITION", "moved to there"):
        here.client.delete(volume.volume_id)
    here.restart()
    with expect.code("FAILED_PRECONDITION", "moved to there"):
        here.client.publish(volume, here.directory / "staging", here.directory / "raw", block())
    # The same words again: it is so already.
    going = move(here, Stand(there), volume)
    assert going.run()["state"] == tag.READY
    going.finish()
    assert here.names() == set()
    assert there.names() == {"vol-db"}


@pytest.mark.variation
@pytest.mark.parametrize("layout", ["linear", "thin"])
def test_rounds_are_sent_while_it_is_used_and_the_last_one_when_it_is_not(
    here: Node, there: Node, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    volume = volume_of(here, layout)
    end = publish(here, volume)
    chance = random.Random(2)
    write(here, "vol-db", chance)
    looks: list[float] = []

    def look(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) < 7:
            write(here, "vol-db", chance, 3)
        elif len(looks) == 7:
            end()

    monkeypatch.setattr(steps_of_moves, "sleep", look)
    monkeypatch.setattr(steps_of_moves, "_LOOKS", 3)
    stand, sent = Stand(there), []
    stand.before = lambda words: sent.append(words[-1])
    move(here, stand, volume).run()
    # All, two rounds while it was used, the last.
    assert sent.count("--verify") == 4
    require_arrived(here, there)


def require_arrived(here: Node, there: Node) -> None:
    """The other node has one usable volume, with what the one in quarantine here holds."""
    [moved] = usable(there)
    there.client.stage(moved, there.directory / "staging", block())
    here.host.lvm(
        "lvchange", "--activate", "y", "--ignoreactivationskip", "--", f"{here.group}/vol-db"
    )
    content = here.content("vol-db")
    here.host.deactivate(here.group, "vol-db")
    assert there.content("vol-db") == content


@pytest.mark.variation
def test_the_volume_cannot_be_used_during_the_last_round(
    here: Node, there: Node, volume: csi.Volume
) -> None:
    stand, refused = Stand(there), []

    def before(words: Sequence[str]) -> None:
        if is_last(here, words):
            with expect.code("FAILED_PRECONDITION", "last time"):
                here.client.stage(volume, here.directory / "staging", block())
            with expect.code("FAILED_PRECONDITION", "moves to there"):
                here.client.delete(volume.volume_id)
            refused.append(words)

    stand.before = before
    move(here, stand, volume).run()
    assert refused


@pytest.mark.variation
@pytest.mark.parametrize("change", ["a parameter", "the size", "the requested size"])
def test_a_change_during_the_last_round_is_refused_and_not_lost(
    here: Node, there: Node, change: str
) -> None:
    """The other node has what the last stream said; nothing says later what has changed since."""
    asked = SIZE - MIB // 2
    volume = here.client.create("db", asked, block(), parameters={"class": "linear"})
    stand, refused = Stand(there), []

    def make(node: Node, volume_id: str) -> None:
        if change == "a parameter":
            node.client.modify(volume_id, {"readAhead": "2MiB"})
        else:
            wanted = SIZE if change == "the requested size" else SIZE + 8 * MIB
            assert node.client.expand(volume_id, wanted).capacity_bytes >= wanted

    def before(words: Sequence[str]) -> None:
        if is_last(here, words):
            with expect.code("FAILED_PRECONDITION", "last time"):
                make(here, volume.volume_id)
            refused.append(words)

    stand.before = before
    move(here, stand, volume).run()
    assert refused
    [moved] = there.client.volumes()
    make(there, moved.volume_id)


@pytest.mark.variation
def test_a_hold_that_meets_another_call_is_retried(
    here: Node, there: Node, volume: csi.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = here.transfer.HoldMove
    codes: list[str] = []
    compared, kept = threading.Event(), threading.Event()
    grace = here.service.context.locks.grace_seconds

    def meet(request: carver.HoldMoveRequest) -> carver.HoldMoveResponse:
        if not compared.is_set():
            return ask(request)
        # Only then: another call that meets this one waits for it, as it would at any time.
        monkeypatch.setattr(here.service.context.locks, "grace_seconds", grace if codes else 0.0)
        first = here.service.context.locks.hold(ids.logical_name(volume.volume_id))
        with first if not codes else nullcontext():
            try:
                answer = ask(request)
            except grpc.RpcError as error:
                codes.append(error.code().name)
                raise
        codes.append("OK")
        kept.set()
        return answer

    def wait(words: Sequence[str]) -> None:
        if is_last(here, words):
            compared.set()
            assert kept.wait(expect.PATIENCE_SECONDS)

    monkeypatch.setattr(here.transfer, "HoldMove", meet)
    monkeypatch.setattr(steps_of_moves, "_KEEP_SECONDS", 0.01)
    stand = Stand(there)
    stand.before = wait
    assert move(here, stand, volume).run()["state"] == tag.READY
    assert codes[:2] == ["ABORTED", "OK"]


@pytest.mark.variation
def test_a_move_waits_for_the_hold_of_a_killed_one(
    here: Node, there: Node, volume: csi.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = begin_and_hold(here, volume)
    looks: list[float] = []

    def look(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            # As its time does that is over.
            here.transfer.ReleaseMove(hold)

    monkeypatch.setattr(steps_of_moves, "sleep", look)
    move(here, Stand(there), volume).run()
    assert len(looks) == 3
    assert len(usable(there)) == 1


class Overwriting:
    """A workload that writes more than the area of a snapshot holds, so often, and then ends."""

    def __init__(self, here: Node, volume: csi.Volume, times: int) -> None:
        self._here, self._times = here, times
        self.end = publish(here, volume)
        self._chance = random.Random(7)

    def look(self, _seconds: float) -> None:
        if self._times:
            self._times -= 1
            path = self._here.device("vol-db")
            for at in range(0, SIZE, MIB):
                self._here.host.write_bytes(path, at, self._chance.randbytes(MIB))
        else:
            self.end()


@pytest.mark.parametrize("times", chosen.kinds([1, 3], usual=[]))
def test_an_overflowed_base_is_followed_by_a_whole_round(
    here: Node, there: Node, volume: csi.Volume, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    write_over = Overwriting(here, volume, times)
    monkeypatch.setattr(steps_of_moves, "sleep", write_over.look)
    stand, wholes = Stand(there), []
    stand.before = lambda words: wholes.append(words) if "--abort" in words else None
    move(here, stand, volume).run()
    assert len(wholes) == times
    assert here.names() == {"vol-db"}
    require_arrived(here, there)


@pytest.mark.variation
@pytest.mark.parametrize("when", ["after a round", "within a round", "within its rest"])
def test_a_stopped_move_continues_after_its_snapshot_overflowed(
    here: Node, there: Node, volume: csi.Volume, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    writer = Overwriting(here, volume, 9)
    monkeypatch.setattr(steps_of_moves, "sleep", die)
    for _ in range(2):
        stand = Stand(there)
        if when == "within a round":
            stand.most_bytes = 4 * MIB
        with pytest.raises((Cut, errors.NodeRefused)):
            move(here, stand, volume).run()
        if when == "within its rest":
            # There it is the next round that was begun, and here the base is lost, and only that.
            [base] = [one.snapshot_id for one in here.client.snapshots()]
            here.host.write_bytes(here.device("vol-db"), 0, random.Random(4).randbytes(MIB))
            with monkeypatch.context() as patched:
                patched.setattr(steps_of_moves, "_LOOKS", 0)
                stand.most_bytes = 100_000
                with pytest.raises(errors.NodeRefused):
                    move(here, stand, volume).run()
            assert len(here.client.snapshots()) == 2
            here.client.delete_snapshot(base)
        else:
            writer.look(0)
            assert not any(one.ready_to_use for one in here.client.snapshots())
    writer.end()
    move(here, Stand(there), volume).run()
    assert here.names() == {"vol-db"}
    require_arrived(here, there)


@pytest.mark.variation
@pytest.mark.parametrize(
    "layout",
    chosen.kinds(
        [*LAYOUTS, *(f"{histories.SEALED}{one}" for one in LAYOUTS)],
        usual=["sealed-thin"],
        fast=["raid1", "sealed-linear", "striped"],
    ),
)
@pytest.mark.timeout(7200)
def test_random_histories_move_to_the_byte(
    here: Node,
    there: Node,
    layout: str,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    real: bool,
    request: pytest.FixtureRequest,
) -> None:
    every = real and request.config.getoption("--every")
    asked = chosen.numbers("CARVER_MOVES", seed=1, histories=5 if every else 1)
    monkeypatch.setattr(steps_of_moves, "_LOOKS", 2)
    for number in range(asked["histories"]):
        seed = f"{asked['seed']} {layout} {number}"
        kind = histories.SEALED if layout.startswith(histories.SEALED) else ""
        options = Options("db", kind + random.Random(seed).choice(list(LAYOUTS)))
        disk = histories.Disk(here.client, here.service, here.host, layout, "db")
        stand = Stand(there)
        user = User(disk, stand, clock, seed)
        monkeypatch.setattr(steps_of_moves, "sleep", user.look)
        for _ in range(40):
            going = move_of(here.at, stand, disk.id, options, lambda _text: None)
            # Also where an area was full: then the same words go on.
            with suppress(Cut, errors.NodeRefused, errors.SourceLost, grpc.RpcError):
                going.run()
                break
        else:
            raise AssertionError(f"{seed}: the move does not come to an end")
        stand.before = lambda _words: None
        known = here.service.reports.fresh(here.group).group(here.group)
        size = known.volume("vol-db").size_bytes
        assert there.content("vol-db", size) == here.content("vol-db", size), seed
        here.host.deactivate(here.group, "vol-db")
        [moved] = there.client.volumes()
        place = there.directory / "staging"
        there.client.stage(moved, place, block(), histories.KEY if kind else {})
        there.client.unstage(moved.volume_id, place)
        for one in disk.snapshots:
            here.client.delete_snapshot(one)
        going.finish()
        there.client.delete(moved.volume_id)
        assert (here.names(), there.names()) == (set(), set())


@pytest.mark.variation
@pytest.mark.parametrize("hours", [-2, 2])
def test_a_step_of_the_clock_does_not_stop_a_move(
    here: Node, there: Node, volume: csi.Volume, clock: Clock, hours: int
) -> None:
    content = here.content("vol-db")
    stand = Stand(there)
    # Before each word with the other node: between rounds, and while the volume is held.
    stand.before = lambda _words: clock.step(hours * 3600)
    move(here, stand, volume).run()
    assert there.content("vol-db") == content


def test_a_snapshot_taken_before_the_hold_does_not_commit_a_move(
    here: Node, volume: csi.Volume, clock: Clock
) -> None:
    """The snapshot is of a time to come: what was written after it would be lost."""
    clock.step(7200)
    early = here.client.snapshot("early", volume.volume_id)
    clock.step(-7200)
    write(here, "vol-db", random.Random(3))
    hold = begin_and_hold(here, volume)
    commit = carver.CommitMoveRequest(
        volume_id=volume.volume_id, snapshot_id=early.snapshot_id, token=hold.token
    )
    with expect.code("FAILED_PRECONDITION", "send another"):
        here.transfer.CommitMove(commit)
    clock.step(-7200)
    commit.snapshot_id = here.client.snapshot("last", volume.volume_id).snapshot_id
    here.transfer.HoldMove(hold)
    assert here.transfer.CommitMove(commit).state == "moved"


@pytest.mark.variation
@pytest.mark.parametrize(("lost", "is_done"), [(1, True), (5, True), (6, False)])
def test_a_move_whose_hold_ended_sends_another_round_a_few_times(
    here: Node, there: Node, volume: csi.Volume, lost: int, is_done: bool
) -> None:
    stand, held = Stand(there), here.service.context.holds._held
    used: list[Sequence[str]] = []

    def before(words: Sequence[str]) -> None:
        """The hold ends amid the round, and the volume is written to."""
        if is_last(here, words) and len(used) < lost:
            held.clear()
            write(here, "vol-db", random.Random(len(used)))
            used.append(words)

    stand.before = before
    if not is_done:
        with expect.code("FAILED_PRECONDITION", "send another"):
            move(here, stand, volume).run()
        assert usable(here) == [volume]
    # What a command left another goes on with.
    move(here, stand, volume).run()
    assert len(used) == lost
    assert there.content("vol-db") == here.content("vol-db")


@pytest.mark.variation
def test_a_hold_that_is_prolonged_is_not_awaited_forever(
    here: Node, there: Node, volume: csi.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = begin_and_hold(here, volume)
    looks: list[float] = []
    monkeypatch.setattr(steps_of_moves, "sleep", looks.append)
    with expect.code("FAILED_PRECONDITION", "last time"):
        move(here, Stand(there), volume).run()
    assert sum(looks) > 30
    here.transfer.ReleaseMove(hold)
    assert usable(here) == [volume]


@pytest.mark.variation
def test_an_unfinished_move_is_undone_on_confirmation_once_the_volume_is_unused(
    here: Node, there: Node, volume: csi.Volume
) -> None:
    content = here.content("vol-db")
    going = move(here, Stand(there), volume)
    answer = going.run()
    with pytest.raises(errors.NotConfirmed):
        going.undo(confirmed=no, is_nowhere=never)
    [moved] = there.client.volumes()
    assert moved.volume_id == answer["volume_id"]
    staging, target = there.directory / "staging", there.directory / "raw"
    there.client.stage(moved, staging, block())
    there.client.publish(moved, staging, target, block())
    with pytest.raises(errors.NodeRefused, match="in use"):
        going.undo(confirmed=yes, is_nowhere=never)
    there.client.unpublish(moved.volume_id, target)
    going.undo(confirmed=yes, is_nowhere=never)
    assert there.names() == set()
    assert usable(here) == [volume]
    assert here.content("vol-db") == content
    with pytest.raises(errors.NotMoved, match="no move"):
        going.undo(confirmed=yes, is_nowhere=never)


@pytest.fixture
def third(host: AnyHost, config: Config, tmp_path: Path) -> Iterator[Node]:
    """A node that the volume moves on to."""
    with nodes.made(host, config, tmp_path, "third-node") as made:
        yield made


@pytest.mark.variation
@pytest.mark.parametrize("layout", ["linear", "thin"])
def test_a_volume_that_moves_is_deleted_only_once_its_move_is_undone(
    here: Node, there: Node, layout: str
) -> None:
    volume = volume_of(here, layout)
    write(here, "vol-db", random.Random(3))
    here.client.unstage(volume.volume_id, here.directory / "staging")
    cut_before_the_last(here, there, volume)
    content = here.content("vol-db")
    for _ in range(2):
        with expect.code("FAILED_PRECONDITION", "moves to there", "--undo"):
            here.client.delete(volume.volume_id)
        here.restart()
    assert here.content("vol-db") == content
    assert "vol-db" in there.names()
    move(here, Stand(there), volume).undo(confirmed=never, is_nowhere=never)
    here.client.delete(volume.volume_id)
    assert here.names() | there.names() == set()


@pytest.mark.variation
def test_a_volume_that_may_have_moved_on_is_taken_back_only_on_confirmation(
    here: Node,
    there: Node,
    third: Node,
    volume: csi.Volume,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    going = move(here, Stand(there), volume)
    going.run()
    [arrived] = there.client.volumes()
    on = move(there, Stand(third), arrived)
    on.run()
    # Its own word tells it from what never was there.
    with pytest.raises(errors.NotMoved, match="moved it on"):
        going.undo(confirmed=yes, is_nowhere=yes)
    with pytest.raises(errors.NotMoved, match="moved it on"):
        going.run()
    # What is left there is deleted, and is not yet gone: it was a volume of that node.
    with monkeypatch.context() as patched:
        patched.setattr(VolumeDeleter, "_delete", die)
        with pytest.raises(grpc.RpcError):
            on.finish()
    with pytest.raises(errors.NotMoved, match="moved it on"):
        going.undo(confirmed=yes, is_nowhere=yes)
    volumes.mark(
        there.host.lvm,
        there.group,
        "vol-db",
        old_tags={"state": "moved"},
        new_tags={"state": "wiping"},
    )
    with pytest.raises(errors.NotMoved, match="--there-is-none"):
        going.undo(confirmed=yes, is_nowhere=no)
    on.finish()
    asked: list[str] = []

    def doubt(question: str) -> bool:
        asked.append(question)
        return False

    with pytest.raises(errors.NotMoved, match="--there-is-none"):
        going.undo(confirmed=yes, is_nowhere=doubt)
    assert "on no other node" in asked[0]
    with pytest.raises(errors.NotMoved, match="--there-is-none"):
        going.finish()
    assert (usable(here), usable(there), len(usable(third))) == ([], [], 1)
    streams_command.show(move_command.status(going), as_json=True)
    # It is gone there, too, and the user confirms that.
    third.client.delete(usable(third)[0].volume_id)
    going.undo(confirmed=never, is_nowhere=yes)
    assert usable(here) == [volume]


def asked_and_answered(monkeypatch: pytest.MonkeyPatch, answer: bool) -> list[str]:
    """The questions that an operator is asked, who answers them all alike."""
    questions: list[str] = []

    def confirmed(question: str) -> bool:
        questions.append(question)
        return answer

    monkeypatch.setattr(terminal, "confirmed", confirmed)
    return questions


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_lost_node_has_handed_over_can_be_kept_without_its_word(
    here: Node, there: Node, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = volume_of(here, layout)
    write(here, "vol-db", random.Random(5))
    here.client.unstage(volume.volume_id, here.directory / "staging")
    stand = Stand(there)
    going = move(here, stand, volume)

    def cut(words: Sequence[str]) -> None:
        if "--finish" in words:
            raise Cut

    stand.before = cut
    with pytest.raises(Cut):
        going.run()
    # From here on there is no word: the node is lost right after the hand-over.
    content = there.content("vol-db")
    with expect.code("FAILED_PRECONDITION", "has not released it"):
        streams_command.finish(there.at, "db")
    questions = asked_and_answered(monkeypatch, answer=False)
    with pytest.raises(errors.NotConfirmed):
        streams_command.finish(there.at, "db", is_source_lost=True)
    assert usable(there) == []
    assert ["lost for good" in question for question in questions] == [True]
    asked_and_answered(monkeypatch, answer=True)
    for _ in range(2):
        state = streams_command.finish(there.at, "db", is_source_lost=True)
        assert (state["state"], state["received"]) == ("ready", volume.volume_id)
        there.restart()
    [kept] = usable(there)
    assert kept.volume_id == state["volume_id"]
    if not layout.startswith("sealed"):
        assert there.content("vol-db") == content
    # The node is back after all. Neither side removes what the other has, and nothing that is there
    # is overwritten.
    stand.before = lambda _words: None
    for act in (going.run, going.finish, lambda: going.undo(confirmed=yes, is_nowhere=no)):
        with pytest.raises(errors.NotMoved):
            act()
    assert usable(there) == [kept]
    assert "vol-db" in here.names()
    going.undo(confirmed=never, is_nowhere=yes)
    assert (usable(here), usable(there)) == ([volume], [kept])


@pytest.mark.variation
def test_a_mixture_of_two_moments_is_not_kept(
    here: Node, there: Node, volume: csi.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = Stand(there)
    stand.most_bytes = 1 << 16
    with pytest.raises((errors.AgentError, grpc.RpcError)):
        move(here, stand, volume).run()
    asked_and_answered(monkeypatch, answer=True)
    assert "vol-db" in there.names()
    with expect.code("FAILED_PRECONDITION", "its stream is incomplete"):
        streams_command.finish(there.at, "db", is_source_lost=True)
    assert usable(there) == []


@pytest.mark.variation
def test_a_volume_that_is_moving_on_is_not_taken_back(
    here: Node, there: Node, third: Node, volume: csi.Volume
) -> None:
    going = move(here, Stand(there), volume)
    going.run()
    [arrived] = there.client.volumes()
    stand = Stand(third)
    on = move(there, stand, arrived)

    def before(words: Sequence[str]) -> None:
        with pytest.raises(errors.AgentError, match=r"moves on to|has moved it on"):
            going.undo(confirmed=yes, is_nowhere=never)

    stand.before = before
    on.run()
    # What is there is only its quarantine: what is here need not be kept for it.
    going.finish()
    assert (here.names(), usable(there), len(usable(third))) == (set(), [], 1)


@pytest.mark.variation
@pytest.mark.parametrize("state", ["nothing", "some", "withdrawn"])
def test_a_volume_that_was_never_usable_there_is_taken_back_without_confirmation(
    here: Node, there: Node, volume: csi.Volume, state: str
) -> None:
    stand = Stand(there)
    going = move(here, stand, volume)

    def cut(words: Sequence[str]) -> None:
        if (state == "nothing" and "--json" not in words) or "--finish" in words:
            raise Cut

    stand.before = cut
    with pytest.raises(Cut):
        going.run()
    if state == "withdrawn":
        # An undo was cut off where all that is left there is overwritten.
        word = here.transfer.MoveStatus(carver.NameRequest(name="db")).word
        stand.before = lambda _words: None
        going.run()
        streams_command.withdraw(there.at, "db", word)
    going.undo(confirmed=never, is_nowhere=never)
    assert usable(here) == [volume]
    assert there.names() == set()


@pytest.mark.variation
def test_a_volume_that_is_being_deleted_here_is_not_taken_back(
    here: Node, there: Node, volume: csi.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    going = move(here, Stand(there), volume)
    going.run()
    content = there.content("vol-db")

    with monkeypatch.context() as patched:
        # From here on it is overwritten.
        patched.setattr(VolumeDeleter, "_delete", die)
        with pytest.raises(grpc.RpcError):
            going.finish()
    with pytest.raises(errors.NotMoved, match="being deleted"):
        going.undo(confirmed=yes, is_nowhere=yes)
    with expect.code("FAILED_PRECONDITION", "being deleted"):
        going.take_back(going.source.state().release)
    assert there.content("vol-db") == content
    going.finish()
    assert (here.names(), len(usable(there))) == (set(), 1)


@pytest.mark.variation
def test_another_volume_of_that_name_is_left(here: Node, there: Node, volume: csi.Volume) -> None:
    other = there.client.create("db", SIZE, block())
    with pytest.raises(errors.NotMoved, match="--as"):
        move(here, Stand(there), volume).run()
    move(here, Stand(there), volume).undo(confirmed=yes, is_nowhere=never)
    assert [one.volume_id for one in usable(there)] == [other.volume_id]
    assert usable(here) == [volume]


@pytest.mark.variation
def test_it_moves_to_one_node_at_a_time(here: Node, there: Node, volume: csi.Volume) -> None:
    stand = Stand(there)
    stand.most_bytes = 100
    with pytest.raises(errors.NodeRefused, match="ends"):
        move(here, stand, volume).run()
    with expect.code("FAILED_PRECONDITION", "moves to there"):
        here.transfer.BeginMove(
            carver.BeginMoveRequest(volume_id=volume.volume_id, node="elsewhere")
        )
    with pytest.raises(errors.NodeRefused):
        move(here, stand, volume).run()
    assert usable(here) == [volume]


@pytest.mark.variation
def test_a_move_is_not_committed_when_contents_differ(
    here: Node, there: Node, volume: csi.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_before_the_last(here, there, volume)
    # What is there was not seen to be the same by the command that goes on.
    there.host.write_bytes(there.device("vol-db"), 4096, b"x" * 4096)
    stand = Stand(there)
    with pytest.raises(errors.NotMoved, match="something else"):
        move(here, stand, volume).run()
    assert there.names() == set()
    assert usable(here) == [volume]
    # A part that does not get to the disk, in any round.
    parts = reading._parts
    monkeypatch.setattr(reading, "_parts", lambda *given: list(parts(*given))[1:])
    with pytest.raises(errors.NotMoved, match="something else"):
        move(here, stand, volume).run()
    monkeypatch.undo()
    assert there.names() == set()
    assert usable(here) == [volume]
    move(here, stand, volume).run()
    assert len(usable(there)) == 1


class Counted(nodes.Wrapped):
    """An open device that counts how much is read of it."""

    def __init__(self, device: Opened, count: Callable[[int], None]) -> None:
        super().__init__(device)
        self._count = count

    def read_into(self, offset_bytes: int, place: memoryview) -> None:
        self._count(len(place))
        super().read_into(offset_bytes, place)


@pytest.mark.parametrize("layout", chosen.kinds(["linear", "thin"], usual=["linear"]))
@pytest.mark.parametrize("begun", chosen.kinds(["now", "before"], usual=["now"]))
@pytest.mark.long_on_lvm
def test_during_the_hold_only_the_last_changes_are_read(
    here: Node, there: Node, monkeypatch: pytest.MonkeyPatch, layout: str, begun: str
) -> None:
    volume = volume_of(here, layout)
    end = publish(here, volume)
    chance, reads = random.Random(5), {True: 0, False: 0}
    write(here, "vol-db", chance)
    opened = here.host.kernel.opened

    def count(length: int) -> None:
        reads[bool(here.service.context.holds._held)] += length

    @contextmanager
    def counting(device: str, *, to_write: bool = False) -> Iterator[Opened]:
        with opened(device, to_write=to_write) as found:
            yield Counted(found, count)

    monkeypatch.setattr(here.host.kernel, "opened", counting)

    def write_and_end(_seconds: float) -> None:
        write(here, "vol-db", chance, 5, (1,))
        end()

    if begun == "before":
        monkeypatch.setattr(steps_of_moves, "sleep", die)
        with pytest.raises(Cut):
            move(here, Stand(there), volume).run()
        reads[False] = 0
    monkeypatch.setattr(steps_of_moves, "sleep", write_and_end)
    move(here, Stand(there), volume).run()
    # Before: all of both.
    assert reads[False] >= 2 * SIZE
    # Five blocks of the pool at most, or chunks: sent, and read again here and there.
    assert 0 < reads[True] <= 3 * 5 * (64 << 10)
    require_arrived(here, there)


class Older(Stand):
    """Carver 0.1.0 in the other node's place."""

    def ask(self, *words: str) -> dict[str, Any]:
        answer = super().ask(*words)
        answer.pop("verifies", None)
        return answer

    def feed(self, *words: str, **more: Any) -> dict[str, Any]:
        if "--verify" in words:
            raise errors.NodeRefused(self.node, " ".join(words), "unrecognized arguments")
        super().feed(*words, **more)
        return {}


@pytest.mark.variation
def test_a_volume_moves_to_an_older_carver(here: Node, there: Node, volume: csi.Volume) -> None:
    content = here.content("vol-db")
    stand, compared = Older(there), []

    def before(words: Sequence[str]) -> None:
        if "--checksum" in words:
            compared.append(bool(here.service.context.holds._held))

    stand.before = before
    move(here, stand, volume).run()
    assert compared == [True]
    assert there.content("vol-db") == content
    assert len(usable(there)) == 1


@pytest.mark.variation
def test_a_wrong_release_finishes_nothing(here: Node, there: Node, volume: csi.Volume) -> None:
    cut_before_the_last(here, there, volume)
    for word in ("", "guessed"):
        with expect.code("FAILED_PRECONDITION", "has not released"):
            streams_command.finish(there.at, "db", word)
    assert usable(there) == []
    assert usable(here) == [volume]


@pytest.mark.variation
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", range(12))
def test_one_volume_is_usable_wherever_the_line_is_cut(
    here: Node, there: Node, volume: csi.Volume, step: int, when: str
) -> None:
    content = here.content("vol-db")
    stand, steps = Stand(there), [step]

    def cut(_words: object) -> None:
        steps[0] -= 1
        if steps[0] < 0:
            steps[0] = 1000
            raise Cut

    setattr(stand, when, cut)
    try:
        move(here, stand, volume).run()
    except Cut:
        pass
    else:
        assert step >= 6
    steps[0] = 1000
    assert len(usable(here)) + len(usable(there)) <= 1
    if step % 2:
        there.restart()
    else:
        here.restart()
    # Either way out leaves exactly one, whole.
    if when == "before":
        move(here, stand, volume).run()
        assert (usable(here), len(usable(there))) == ([], 1)
        assert there.content("vol-db") == content
        move(here, stand, volume).finish()
        assert here.names() == set()
    else:
        move(here, stand, volume).undo(confirmed=yes, is_nowhere=never)
        assert (usable(here), usable(there)) == ([volume], [])
        assert here.content("vol-db") == content
        assert (here.names(), there.names()) == ({"vol-db"}, set())


@pytest.mark.variation
def test_a_file_system_moves(here: Node, there: Node) -> None:
    volume = here.client.create("db", 64 * MIB, mounted("ext4"))
    staging = here.directory / "staging"
    here.client.stage(volume, staging, mounted("ext4"))
    here.client.unstage(volume.volume_id, staging)
    move(here, Stand(there), volume).run()
    [moved] = there.client.volumes()
    there.client.stage(moved, there.directory / "staging", mounted("ext4"))
    there.client.unstage(moved.volume_id, there.directory / "staging")
    # And back again, which is a move as any other.
    with pytest.raises(errors.NotMoved, match="--as"):
        move(there, Stand(here), moved).run()
    move(here, Stand(there), volume).finish()


@pytest.mark.long_on_lvm
def test_what_was_asked_for_moves_with_a_volume(here: Node, there: Node) -> None:
    """A claim's snapshot can be restored at the claim's size, on the other node as well."""
    asked = 10_000_000
    volume = here.client.create("db", asked, block(), parameters={"class": "linear"})
    move_of(here.at, Stand(there), volume.volume_id, Options("db"), lambda _text: None).run()
    [moved] = there.client.volumes()
    assert there.client.snapshot("after", moved.volume_id).size_bytes == asked
