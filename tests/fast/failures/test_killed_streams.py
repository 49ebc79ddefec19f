"""Killed before and after every step while volumes come as streams and move: nothing is lost."""

import io
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import configured
import grpc
import nodes
import pytest
from changed_blocks import blocks
from fakes.host import FakeHost
from google.protobuf.message import Message
from model.stopping import Killed, Switch
from nodes import Node, Stand, volume_of, write

from agent.core import errors, tag
from agent.csi.client import block
from agent.extras.streams import reading
from agent.extras.transfer import streams_command
from agent.extras.transfer.move_command import Move, Options
from mount.blocks import Bytes, Opened
from proto import carver_pb2

# A stream whose caller died is dropped by gRPC, and what it does then may be the step that dies.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <generator object Interceptor"
    ":pytest.PytestUnraisableExceptionWarning"
)

LAYOUTS = [nodes.PLAIN, pytest.param(nodes.THIN, marks=pytest.mark.long)]

# What a command ends with when the service that it asks dies.
DIED = (grpc.RpcError, errors.AgentError)


def yes(_question: str) -> bool:
    return True


class Trial:
    """Two nodes, and a volume with two snapshots on the first."""

    def __init__(self, directory: Path, stack: ExitStack, layout: str) -> None:
        directory.mkdir(parents=True)
        host = FakeHost(directory)
        config = configured.carver(directory)
        self.here = stack.enter_context(nodes.made(host, config, directory, "here"))
        self.there = stack.enter_context(nodes.made(host, config, directory, "there"))
        self.layout = layout
        self.volume = volume_of(self.here, layout)
        chance = random.Random(1)
        write(self.here, "vol-db", chance, 2, (1,))
        self.here.client.unstage(self.volume.volume_id, self.here.directory / "staging")
        self.chance = chance

    def streams(self) -> list[bytes]:
        """A whole one, and what came after."""
        self.here.client.snapshot("1", self.volume.volume_id)
        write(self.here, "vol-db", self.chance, 1, (1,))
        self.here.client.snapshot("2", self.volume.volume_id)
        return [nodes.stream(self.here, "1"), nodes.stream(self.here, "2", since="1")]

    def move(self) -> Move:
        options = Options("db", self.layout)
        stand = Stand(self.there)
        return Move(self.here.at, stand, self.volume.volume_id, options, lambda _text: None)


@pytest.fixture(autouse=True)
def all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each frame is put on record."""
    monkeypatch.setattr("agent.extras.streams.reading.RECORD_SECONDS", 0.0)
    # Who is dead holds nothing, or a test says so: nobody is to wait.
    monkeypatch.setattr("agent.extras.transfer.move_command._HELD_LOOKS", 0)
    # The order of steps is to be the same each time.
    monkeypatch.setattr("agent.extras.streams.form.WORKERS", 1)


@contextmanager
def trial(directory: Path, layout: str = nodes.PLAIN) -> Iterator[Trial]:
    with ExitStack() as stack:
        made = Trial(directory, stack, layout)
        yield made


def is_over(switch: Switch) -> bool:
    """Whether it was killed; from now on it is not."""
    with switch._lock:
        switch.counting = False
        return switch.dead.is_set()


def usable(node: Node) -> int:
    """How many volumes whoever asks is given, and can use."""
    found = list(node.client.volumes())
    for one in found:
        place = node.directory / "trial"
        node.client.stage(one, place, block())
        node.client.unstage(one.volume_id, place)
    return len(found)


def receive_all(node: Node, given: list[bytes], layout: str = nodes.PLAIN) -> None:
    """As a person does who sees how far it is."""
    last = next(reading.streams(io.BytesIO(given[-1]))).header
    for one in given:
        if streams_command.status(node.at, "copy")["chain"] != last.chain:
            nodes.receive(node, "copy", one, layout)


DEEDS: dict[str, tuple[list[str], Callable[[Trial, list[bytes]], Any]]] = {
    "receive": ([], lambda made, given: receive_all(made.there, given, made.layout)),
    "finish": (["receive"], lambda made, _given: streams_command.finish(made.there.at, "copy")),
    "abort": (
        ["receive"],
        lambda made, _given: streams_command.abort(made.there.at, "copy", confirmed=True),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("deed", DEEDS)
def test_a_receiver_that_was_killed_at_any_step_goes_on_or_leaves_nothing(
    deed: str, layout: str, tmp_path: Path
) -> None:
    before, act = DEEDS[deed]
    for step in itertools.count():
        ended = False
        for is_before in (True, False):
            with trial(tmp_path / f"{step}{is_before}", layout) as made:
                given = made.streams()
                for one in before:
                    DEEDS[one][1](made, given)
                switch = Switch(step, before=is_before)
                made.there.restart(switch)
                with suppress(*DIED):
                    act(made, given)
                    ended = not is_over(switch)
                if is_over(switch):
                    made.there.kill()
                assert usable(made.there) <= (deed == "finish")
                if is_before or deed == "abort":
                    act(made, given)
                elif streams_command.status(made.there.at, "copy")["state"] != tag.READY:
                    streams_command.abort(made.there.at, "copy", confirmed=True)
                if deed == "abort" or (deed == "receive" and not is_before):
                    assert made.there.names() == set()
                elif is_before:
                    assert made.there.content("vol-copy") == made.here.content("snap-2")
        if ended:
            assert step > 2
            return


@pytest.mark.parametrize("deed", ["send", "compare"])
def test_a_reading_that_was_killed_at_any_step_leaves_no_snapshot_active(
    deed: str, tmp_path: Path
) -> None:
    def act(made: Trial) -> Any:
        if deed == "send":
            return nodes.stream(made.here, "2", since="1")
        first, second = (one.snapshot_id for one in made.here.client.snapshots())
        return list(blocks(made.here.client, second, first))

    for step in itertools.count():
        ended = False
        for is_before in (True, False):
            with trial(tmp_path / f"{step}{is_before}", nodes.THIN) as made:
                made.streams()
                was = act(made)
                switch = Switch(step, before=is_before)
                made.here.restart(switch)
                with suppress(*DIED, StopIteration):
                    act(made)
                    ended = not is_over(switch)
                if is_over(switch):
                    made.here.kill()
                require_inactive(made.here)
                if deed == "compare":
                    assert act(made) == was
                require_inactive(made.here)
        if ended:
            assert step > 7
            return


def require_inactive(node: Node) -> None:
    """No snapshot is active, nor said to be."""
    found = node.service.inventory.state(node.group).group(node.group).volumes.values()
    assert not [one.name for one in found if "carver.activated=reading" in one.tags]
    assert not [one for one in node.host.devices.active(node.group) if one.startswith("snap-")]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("who", [pytest.param("here", marks=pytest.mark.long), "there"])
def test_a_move_whose_service_was_killed_at_any_step_leaves_one_usable(
    who: str, layout: str, tmp_path: Path
) -> None:
    for step in itertools.count():
        ended = False
        for is_before in (True, False):
            with trial(tmp_path / f"{step}{is_before}", layout) as made:
                content = made.here.content("vol-db")
                node = getattr(made, who)
                switch = Switch(step, before=is_before)
                node.restart(switch)
                with suppress(*DIED):
                    made.move().run()
                    ended = not is_over(switch)
                if is_over(switch):
                    node.kill()
                assert usable(made.here) + usable(made.there) <= 1, (step, is_before)
                # On, or back: each of both after every other step.
                if (step + is_before) % 2:
                    made.move().run()
                    assert (usable(made.here), usable(made.there)) == (0, 1)
                    assert made.there.content("vol-db") == content
                    made.move().finish()
                    assert made.here.names() == set()
                else:
                    with suppress(errors.NotMoved):
                        made.move().undo(confirmed=yes, is_nowhere=yes)
                    assert (usable(made.here), usable(made.there)) == (1, 0)
                    assert made.here.content("vol-db") == content
                    assert made.there.names() == set()
                    assert made.here.names() == {"vol-db"}
        if ended:
            assert step > 4
            return


@pytest.mark.parametrize("deed", ["undo", "finish"])
@pytest.mark.parametrize("who", ["here", "there"])
def test_the_end_of_a_move_that_was_killed_at_any_step_comes_by_the_same_words(
    who: str, deed: str, tmp_path: Path
) -> None:
    def act(made: Trial) -> None:
        if deed == "finish":
            made.move().finish()
        else:
            made.move().undo(confirmed=yes, is_nowhere=yes)

    for step in itertools.count():
        ended = False
        for is_before in (True, False):
            with trial(tmp_path / f"{step}{is_before}") as made:
                content = made.here.content("vol-db")
                made.move().run()
                node = getattr(made, who)
                switch = Switch(step, before=is_before)
                node.restart(switch)
                with suppress(*DIED):
                    act(made)
                    ended = not is_over(switch)
                if is_over(switch):
                    node.kill()
                assert usable(made.here) + usable(made.there) <= 1, (step, is_before)
                with suppress(errors.NotMoved, grpc.RpcError):
                    act(made)
                kept = made.there if deed == "finish" else made.here
                gone = made.here if deed == "finish" else made.there
                assert (usable(kept), usable(gone)) == (1, 0), (step, is_before)
                assert kept.content("vol-db") == content
                assert (kept.names(), gone.names()) == ({"vol-db"}, set())
        if ended:
            return


def calls_of(node: Node) -> list[tuple[object, str]]:
    """The calls by which a command changes something, with the object that has each."""
    calls = carver_pb2.DESCRIPTOR.services_by_name["Transfer"].methods
    once = [(node.transfer, one.name) for one in calls if not one.server_streaming]
    return [*once, (node.client, "snapshot"), (node.client, "delete_snapshot")]


@pytest.mark.parametrize(
    ("is_before", "undone"),
    [
        (True, False),
        pytest.param(True, True, marks=pytest.mark.long),
        pytest.param(False, False, marks=pytest.mark.long),
        (False, True),
    ],
)
def test_a_move_whose_own_command_was_killed_at_any_step_is_taken_up_or_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_before: bool, undone: bool
) -> None:
    for step in itertools.count():
        with trial(tmp_path / str(step)) as made:
            content = made.here.content("vol-db")
            left = iter(range(step, -1000, -1))

            def die(act: Callable[[], Any], left: Iterator[int] = left) -> Any:
                """Take a step, or die before or after it; who is dead takes no more."""
                now = next(left)
                if now < 0 or (is_before and now == 0):
                    raise Killed
                answer = act()
                if now == 0:
                    raise Killed
                return answer

            def calling(call: Callable[..., Any], die: Any = die) -> Callable[..., Any]:
                return lambda *words: die(partial(call, *words))

            moving = made.move()
            remote = moving._remote
            ask, feed = remote.ask, remote.feed
            monkeypatch.setattr(remote, "ask", lambda *words, d=die, a=ask: d(partial(a, *words)))
            monkeypatch.setattr(
                remote,
                "feed",
                lambda *words, write, d=die, f=feed: d(partial(f, *words, write=write)),
            )
            ended = False
            with monkeypatch.context() as patched, suppress(Killed):
                for owner, name in calls_of(made.here):
                    patched.setattr(owner, name, calling(getattr(owner, name)))
                moving.run()
                ended = True
            # If it held the volume, its time is over: nobody asks for more of it.
            made.here.service.context.holds._held.clear()
            assert usable(made.here) + usable(made.there) <= 1, step
            if undone:
                with suppress(errors.NotMoved):
                    made.move().undo(confirmed=yes, is_nowhere=yes)
            else:
                made.move().run()
            kept, gone = (made.here, made.there) if undone else (made.there, made.here)
            assert (usable(kept), usable(gone)) == (1, 0), step
            assert kept.content("vol-db") == content
            if undone:
                assert (made.here.names(), made.there.names()) == ({"vol-db"}, set())
            else:
                made.move().finish()
                assert made.here.names() == set()
        if ended:
            assert step > 15
            return


class Dying(Opened):
    """A device that is open in a process that dies at one of its steps."""

    def __init__(self, device: Opened, steps: Iterator[int]) -> None:
        super().__init__("dying", -1)
        self._real = device
        self._steps = steps

    def read_into(self, offset_bytes: int, place: memoryview) -> None:
        self._real.read_into(offset_bytes, place)

    def write(self, offset_bytes: int, data: Bytes) -> None:
        self._step(lambda: self._real.write(offset_bytes, data))

    def zero_out(self, offset_bytes: int, length_bytes: int) -> None:
        self._step(lambda: self._real.zero_out(offset_bytes, length_bytes))

    def flush(self) -> None:
        self._step(self._real.flush)

    def _step(self, take: Callable[[], None]) -> None:
        if next(self._steps) < 0:
            raise Killed
        take()


def test_a_command_that_was_killed_at_any_step_is_taken_up_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in itertools.count():
        with trial(tmp_path / str(step)) as made:
            given = made.streams()
            left = iter(range(step, -1000, -1))

            def calling(call: Callable[..., Any], left: Any = left) -> Callable[..., Any]:
                def dying_call(request: Message) -> Any:
                    if next(left) < 0:
                        raise Killed
                    return call(request)

                return dying_call

            kernel = made.there.at.host.kernel
            opened = kernel.opened

            @contextmanager
            def dying(
                device: str, *, to_write: bool = False, left: Any = left, opened: Any = opened
            ) -> Iterator[Opened]:
                with opened(device, to_write=to_write) as found:
                    yield Dying(found, left)

            ended = False
            with monkeypatch.context() as patched, suppress(Killed):
                for owner, name in calls_of(made.there):
                    if owner is made.there.transfer:
                        patched.setattr(owner, name, calling(getattr(owner, name)))
                patched.setattr(kernel, "opened", dying)
                receive_all(made.there, given)
                ended = True
            told = streams_command.status(made.there.at, "copy")
            first = next(reading.streams(io.BytesIO(given[0]))).header
            if told["into"] == first.chain:
                # From there on only.
                rest = nodes.stream(made.here, "1", offset_bytes=told["offset_bytes"])
                nodes.receive(made.there, "copy", rest)
            receive_all(made.there, given)
            assert made.there.content("vol-copy") == made.here.content("snap-2")
        if ended:
            assert step > 10
            return
