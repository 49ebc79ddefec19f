"""Volumes that come back while what they left is under quarantine: only what differs is sent."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import clustered
import configured
import expect
import grpc
import histories
import nodes
import pytest
from clustered import Cluster, channel
from fakes.host import FakeHost
from nodes import Node

from agent.core import errors, tag
from agent.csi.client import block
from agent.extras.controller.node_moves import NodeFailed
from agent.extras.streams import form, sending
from agent.extras.tls import certificates
from agent.extras.tls.certificates import Certificates
from agent.extras.transfer import grants, node_streams
from agent.extras.transfer.move import Move
from agent.work import locks
from lvm import report
from mount.block_io import Opened
from proto import carver_pb2 as carver

Code = grpc.StatusCode
LAYOUTS = ("linear", "thin", "raid1", "sealed-linear", "sealed-thin")
PIECE = sending.PIECE_BYTES
OTHER = "ab" * 32
SEND_DIFFERING = "/carver.v2.Transfer/SendDiffering"


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Cluster]:
    config = replace(configured.carver(tmp_path), evacuation=True)
    hosts = {}
    for number, name in enumerate("ab", 1):
        (tmp_path / f"machine-{name}").mkdir()
        hosts[name] = FakeHost(tmp_path / f"machine-{name}", number)
    with clustered.cluster(hosts["a"], config, tmp_path, hosts=hosts) as made:
        yield made


class Away:
    """A volume that moved from node a to node b, and is used there."""

    def __init__(self, two: Cluster, layout: str = "linear", *, keeps: bool = False) -> None:
        self.two, self.layout = two, layout
        self.a, self.b = two.nodes["a"], two.nodes["b"]
        disk = histories.Disk(self.a.client, self.a.service, self.a.host, layout, "db")
        chance = random.Random(layout)
        # The first pieces are noise.
        disk.write(0, chance.randbytes(6 * PIECE))
        histories.write_some(disk, chance)
        if keeps:
            disk.snapshot()
        disk.deactivate()
        self.first_id = disk.id
        self.first = two.controller.moves.move(disk.id, "a", "b", device_class=layout)
        run(self.first)
        self.earlier = self.first.source.state().release
        self.word = self.first.source.state().word
        [self.volume] = self.b.client.volumes()

    def size(self, node: Node) -> int:
        found = node.service.reports.fresh(node.group).group(node.group)
        return found.volume("vol-db").size_bytes

    @property
    def secrets(self) -> dict[str, str]:
        return histories.KEY if self.layout.startswith(histories.SEALED) else {}

    def write(self, *offsets: int, data: bytes = b"x" * 4096) -> None:
        """Write to the volume where it is now, as its user does."""
        staging = self.b.directory / "staging"
        self.b.client.stage(self.volume, staging, block(), self.secrets)
        found = self.b.host.devices.find(self.b.group, "vol-db")
        assert found is not None
        device = self.b.host.devices.mapping(found) or found
        for offset in offsets:
            self.b.host.write_bytes(device.path, offset, data)
        self.b.client.unstage(self.volume.volume_id, staging)

    def back(self, replaces: str | None = None, **more: Any) -> Move:
        more = {"device_class": self.layout, **more}
        replaces = self.earlier if replaces is None else replaces
        return self.two.controller.moves.move(
            self.volume.volume_id, "b", "a", replaces=replaces, **more
        )

    def content(self, node: Node) -> bytes:
        """All that the logical volume on a node holds."""
        found = node.content("vol-db", self.size(node))
        node.host.deactivate(node.group, "vol-db")
        return found

    def tags(self, node: Node) -> dict[str, str]:
        return dict(report.read(node.host.lvm).group(node.group).volume("vol-db").own_tags)

    def require_back(self, content: bytes) -> None:
        """The volume is the first node's, with this content, and can be used."""
        assert self.content(self.a) == content
        [volume] = self.a.client.volumes()
        assert (volume.volume_id, self.b.client.volumes()) == (self.first_id, [])
        staging = self.a.directory / "staging"
        self.a.client.stage(volume, staging, block(), self.secrets)
        self.a.client.unstage(volume.volume_id, staging)

    def require_away(self, content: bytes) -> None:
        """The volume is still the other node's, with this content, and can be used."""
        assert self.a.client.volumes() == []
        assert self.content(self.b) == content
        [volume] = self.b.client.volumes()
        assert volume.volume_id == self.volume.volume_id


def run(moving: Move) -> None:
    moving.approach()
    assert moving.hand_over()
    moving.complete()


def differing(one: bytes, other: bytes) -> int:
    """The bytes of the pieces in which the second content differs, but for those of zeroes."""
    one = one.ljust(len(other), b"\0")
    return sum(
        len(other[at : at + PIECE])
        for at in range(0, len(other), PIECE)
        if one[at : at + PIECE] != other[at : at + PIECE] and any(other[at : at + PIECE])
    )


# What is sent


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_pieces_that_differ_are_sent_back(two: Cluster, layout: str) -> None:
    away = Away(two, layout)
    left = away.content(away.a)
    away.write(2 * PIECE + 4096, 5 * PIECE)
    away.write(3 * PIECE, data=bytes(PIECE))
    there = away.content(away.b)
    commands = len(cast(FakeHost, away.a.host).commands)
    moving = away.back()
    first = moving.approach()
    assert 0 < first.changed_bytes == differing(left, there) < len(there) // 2
    assert first.is_caught_up
    assert moving.hand_over()
    moving.complete()
    # What was there is used, and nothing was made anew or erased.
    names = {words[0] for words in cast(FakeHost, away.a.host).commands[commands:]}
    assert not names & {"lvcreate", "lvremove"}
    away.require_back(there)
    assert not {tag.REPLACES, tag.MOVE_TO, tag.INTO, tag.CHAIN} & away.tags(away.a).keys()
    moving.finish()
    assert away.b.names() == set()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_sent_of_what_did_not_change(two: Cluster, layout: str) -> None:
    away = Away(two, layout)
    there = away.content(away.b)
    moving = away.back()
    assert moving.approach().changed_bytes == 0
    assert moving.hand_over()
    moving.complete()
    away.require_back(there)


def test_what_is_equal_is_progress_as_well(two: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent of it. Else the stream would be cut off as one that does not get on."""
    monkeypatch.setattr(node_streams, "_at_intervals", lambda report: report)
    reached: list[int] = []
    note = node_streams._Job.reached

    def noted(self: Any, offset_bytes: int) -> None:
        note(self, offset_bytes)
        if self._kind == "Pull":
            reached.append(self.done_bytes)

    monkeypatch.setattr(node_streams._Job, "reached", noted)
    away = Away(two)
    del reached[:]
    assert away.back().approach().changed_bytes == 0
    size = away.size(away.a)
    assert reached == sorted(reached)
    assert (
        set(range(sending.READ_BYTES, size + 1, sending.READ_BYTES))
        <= set(reached)
        <= {
            *range(0, size + 1, sending.READ_BYTES),
            size,
        }
    )


@pytest.mark.parametrize("layout", ["linear", "thin", "sealed-thin"])
def test_a_volume_that_grew_comes_back_larger(two: Cluster, layout: str) -> None:
    away = Away(two, layout)
    left = away.content(away.a)
    grown = away.b.client.expand(away.volume.volume_id, 2 * histories.SIZE)
    away.write(grown.capacity_bytes - 4096)
    there = away.content(away.b)
    moving = away.back()
    assert moving.approach().changed_bytes == differing(left, there)
    run(moving)
    assert len(there) > len(left)
    away.require_back(there)


def test_a_volume_goes_to_and_fro_by_what_changed(two: Cluster) -> None:
    """Each move back replaces what the one before has left, on either node."""
    away = Away(two)
    where, ids = {"a": away.a, "b": away.b}, {"a": away.first_id, "b": away.volume.volume_id}
    earlier = away.earlier
    for source, target in (("b", "a"), ("a", "b"), ("b", "a"), ("a", "b")):
        node = where[source]
        [volume] = node.client.volumes()
        node.client.stage(volume, node.directory / "staging", block())
        node.host.write_bytes(node.device("vol-db"), PIECE, random.randbytes(4096))
        node.client.unstage(volume.volume_id, node.directory / "staging")
        content = away.content(node)
        moving = two.controller.moves.move(
            ids[source], source, target, device_class="linear", replaces=earlier
        )
        assert moving.approach().changed_bytes == PIECE
        run(moving)
        earlier = moving.source.state().release
        assert away.content(where[target]) == content
        assert [len(where[one].client.volumes()) for one in (source, target)] == [0, 1]


# Streams that are cut off


@pytest.mark.parametrize("layout", ["linear", "thin", "sealed-linear"])
@pytest.mark.parametrize("parts", [1, 3, 6])
def test_a_stream_that_is_cut_off_is_compared_again(
    two: Cluster, monkeypatch: pytest.MonkeyPatch, layout: str, parts: int
) -> None:
    away = Away(two, layout)
    offsets = [at * PIECE for at in (1, 2, 4, 5, 9, 12)]
    away.write(*offsets)
    there, left = away.content(away.b), away.content(away.a)
    monkeypatch.setattr(node_streams, "PART_BYTES", 64 << 10)
    monkeypatch.setattr("agent.extras.streams.reading.RECORD_SECONDS", 0.0)
    flush, counts = node_streams._Messages.flush, [16 * parts]

    def cut(self: Any) -> None:
        counts[0] -= bool(self._waiting)
        if not counts[0]:
            raise OSError("the line is cut")
        flush(self)

    with monkeypatch.context() as patched:
        patched.setattr(node_streams._Messages, "flush", cut)
        with pytest.raises(NodeFailed, match="the line is cut"):
            away.back().approach()
    status = away.back().destination.status()
    assert (status["state"], status["replaces"]) == (tag.RECEIVING, away.earlier)
    away.a.restart()
    listener = clustered.listener(away.a)
    listener.find_other_groups()
    listener.serve()
    two.write_nodes()
    two.loop.run(two.controller.look())
    two.ask()
    moving = away.back()
    sent_bytes = moving.approach().changed_bytes
    # What has arrived is not sent again.
    assert 0 < sent_bytes <= differing(left, there) - (parts - 1) * PIECE
    while not moving.approach().is_caught_up:
        pass
    run(moving)
    away.require_back(there)


def test_a_snapshot_that_was_lost_in_the_first_round_loses_nothing_else(
    two: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = Away(two)
    left = away.content(away.a)
    away.write(PIECE, 4 * PIECE)
    moving = away.back()
    with monkeypatch.context() as patched:
        patched.setattr(
            node_streams, "_Messages", _failing(node_streams._Messages, "the line is cut")
        )
        with pytest.raises(NodeFailed):
            moving.approach()
    assert moving.destination.status()["into"]
    for snapshot in away.b.client.snapshots():
        away.b.client.delete_snapshot(snapshot.snapshot_id)
    there = away.content(away.b)
    moving = away.back()
    assert moving.approach().changed_bytes == differing(left, there)
    run(moving)
    away.require_back(there)


def _failing(kind: type, why: str) -> type:
    """Messages of which only the header of the stream is sent."""

    class Failing(kind):  # type: ignore[misc]
        def write(self, data: Any) -> None:
            if self._is_begun:
                self.flush()
                raise OSError(why)
            self._is_begun = True
            super().write(data)

        _is_begun = False

    return Failing


def test_a_volume_that_cannot_be_read_sends_no_digests(
    two: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = Away(two)
    there = away.content(away.b)
    kernel, opened = away.a.host.kernel, away.a.host.kernel.opened

    class Broken(nodes.Wrapped):
        def read_into(self, offset_bytes: int, place: memoryview) -> None:
            if offset_bytes >= 8 * PIECE:
                raise OSError(5, "Input/output error")
            super().read_into(offset_bytes, place)

    @contextmanager
    def broken(device: str, *, to_write: bool = False) -> Iterator[Opened]:
        with opened(device, to_write=to_write) as found:
            yield Broken(found) if to_write else found

    with monkeypatch.context() as patched:
        patched.setattr(kernel, "opened", broken)
        with pytest.raises(NodeFailed, match="Input/output error"):
            away.back().approach()
    away.require_away(there)
    run(away.back())
    away.require_back(there)


def test_digests_that_lie_are_found_by_the_comparison_of_all(
    two: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a digest would that is of other data than are on the disk."""
    away = Away(two)
    away.write(PIECE)
    there = away.content(away.b)
    every = list(sending.digests_of(_Content(there), 0, len(there)))
    with monkeypatch.context() as patched:
        patched.setattr(sending, "digests_of", lambda *_given: iter(every))
        with pytest.raises(errors.NotMoved, match="something else"):
            away.back().approach()
    assert away.a.names() == set()
    away.require_away(there)
    run(away.back(""))
    away.require_back(there)


class _Content(nodes.Wrapped):
    """A device with these contents."""

    def __init__(self, content: bytes) -> None:
        super().__init__(cast(Opened, None))
        self._content = content

    def read_into(self, offset_bytes: int, place: memoryview) -> None:
        place[:] = self._content[offset_bytes : offset_bytes + len(place)]


# What is not replaced


def _by_another_word(away: Away) -> Move:
    return away.back(OTHER)


def _by_no_word(away: Away) -> Move:
    return away.back("")


def _of_another_class(away: Away) -> Move:
    return away.back(device_class="striped")


def _that_is_being_erased(away: Away) -> Move:
    away.a.host.lvm(
        "lvchange", "--addtag", "carver.moveEnded=wiping", "--", f"{away.a.group}/vol-db"
    )
    return away.back()


def _with_snapshots(away: Away) -> Move:
    assert away.a.client.snapshots()
    return away.back()


@pytest.mark.parametrize(
    "refused",
    [_by_another_word, _by_no_word, _of_another_class, _with_snapshots, _that_is_being_erased],
)
def test_what_is_left_is_replaced_by_the_way_back_only(
    two: Cluster, refused: Callable[[Away], Move]
) -> None:
    away = Away(two, keeps=refused is _with_snapshots)
    moving = refused(away)
    there, left, tags = away.content(away.b), away.content(away.a), away.tags(away.a)
    with pytest.raises(errors.AgentError):
        run(moving)
    assert away.tags(away.a) == tags
    assert away.content(away.a) == left
    away.require_away(there)


@pytest.mark.parametrize("replaces", ["", OTHER])
def test_a_word_that_is_not_meant_is_not_forgotten(two: Cluster, replaces: str) -> None:
    away = Away(two)
    assert away.back(replaces).source.begin("a").replaces == ""
    assert away.tags(away.b)[tag.RELEASED] == away.word


def test_a_volume_whose_word_is_forgotten_is_not_taken_back(two: Cluster) -> None:
    """It would be removed while what is left of it on the other node is overwritten."""
    away = Away(two)
    there = away.content(away.b)
    moving = away.back()
    for _ in range(2):
        assert moving.source.begin("a").replaces == away.earlier
    assert away.word not in away.tags(away.b).values()
    # Also once that move is undone, before a stream has come.
    moving.undo(confirmed=lambda _text: False, is_nowhere=lambda _text: False)
    for word in (away.word, "guess"):
        with pytest.raises(NodeFailed, match="move it back instead"):
            away.first.destination.withdraw(word)
    with pytest.raises(NodeFailed, match="move it back instead"):
        away.first.undo(confirmed=lambda _text: True, is_nowhere=lambda _text: True)
    away.require_away(there)
    # It can be moved back all the same, or what is left be erased.
    assert away.back().source.begin("a").replaces == away.earlier
    away.first.finish()
    assert away.a.names() == set()
    away.require_away(there)


def test_what_is_being_replaced_is_no_volume_to_be_taken_back_or_erased(two: Cluster) -> None:
    away = Away(two)
    there = away.content(away.b)
    moving = away.back()
    moving.approach()
    for end in (away.first.source.undo, away.first.source.finish):
        for release in (away.earlier, ""):
            with pytest.raises(NodeFailed) as raised:
                end(release)
            assert raised.value.code() is Code.FAILED_PRECONDITION
    away.require_away(there)
    # The move back is undone as any other.
    moving.undo(confirmed=lambda _text: False, is_nowhere=lambda _text: False)
    assert away.a.names() == set()
    away.require_away(there)


@pytest.mark.parametrize("made", [False, True])
def test_a_command_without_an_answer_replaces_once(two: Cluster, *, made: bool) -> None:
    away = Away(two)
    away.write(PIECE)
    there, host = away.content(away.b), cast(FakeHost, away.a.host)
    left = [True]

    def intercept(command: Any) -> Any:
        if left and any("carver.replaces" in word for word in command):
            left.clear()
            if made:
                host.lvm2_program(command)
            raise OSError("the answer is lost")
        return None

    host.intercept = intercept
    with pytest.raises(NodeFailed):
        away.back().approach()
    assert not left
    assert (away.tags(away.a)[tag.STATE] == tag.RECEIVING) == made
    away.require_away(there)
    moving = away.back()
    assert moving.approach().changed_bytes == PIECE
    run(moving)
    away.require_back(there)


# Who may ask


class Asked:
    """A move back that has begun, and what the target asks of the source."""

    def __init__(self, two: Cluster) -> None:
        self.away = Away(two)
        source = self.away.back().source
        self.release = source.begin("a").release
        self.snapshot_id = source.take()
        self.two = two

    def grant(self, **more: Any) -> carver.Grant:
        shown = Certificates.read(self.two.directory / "controller")
        given = {"volume_id": self.away.volume.volume_id, "source": "b", "target": "a", **more}
        return grants.new(shown, self.two.config.driver_name, **given)

    def first(self, **more: Any) -> carver.SendRequest:
        given = {"snapshot_id": self.snapshot_id, "release": self.release, **more}
        return carver.SendRequest(**{"grant": self.grant(), **given})

    def ask(self, *requests: carver.SendRequest, who: str = "tls-a") -> bytes:
        with channel(self.two, who, "b") as to:
            call: Any = to.stream_stream(
                SEND_DIFFERING,
                request_serializer=carver.SendRequest.SerializeToString,
                response_deserializer=carver.SendPart.FromString,
            )
            return b"".join(one.data for one in call(iter(requests), timeout=60))

    def require_refused(
        self, code: str, word: str, *requests: carver.SendRequest, who: str = "tls-a"
    ) -> None:
        with expect.code(code, word):
            self.ask(*requests, who=who)


def test_differences_are_sent_by_the_grant_of_a_stream(two: Cluster) -> None:
    asked = Asked(two)
    two.authority.write(
        two.directory / "tls-c", certificates.node_name("c", two.config.driver_name)
    )
    refused = (
        ("there is no grant", asked.first(grant=carver.Grant()), "tls-a"),
        ("is for node 'a'", asked.first(), "tls-c"),
        ("is for node 'a'", asked.first(), "controller"),
        ("does not move to c", asked.first(grant=asked.grant(target="c")), "tls-c"),
        ("of node 'a'", asked.first(grant=asked.grant(source="a")), "tls-a"),
        ("of another move", asked.first(release=OTHER), "tls-a"),
        ("no snapshot of this move", asked.first(snapshot_id="x"), "tls-a"),
        ("at most 32768 bytes", asked.first(release="a" * 33_000), "tls-a"),
    )
    for word, request, who in refused:
        asked.require_refused("PERMISSION_DENIED", word, request, who=who)
    digests = carver.SendRequest(digests=bytes(32 * 16))
    assert asked.ask(asked.first(), digests).startswith(form.MAGIC)


def test_digests_are_as_many_as_blocks_and_few_at_a_time(two: Cluster) -> None:
    asked = Asked(two)
    blocks = asked.away.size(asked.away.b) // PIECE
    one = carver.SendRequest(digests=bytes(32))
    wrong = (
        ("base_snapshot_id", (asked.first(base_snapshot_id=asked.snapshot_id),)),
        ("ended", (asked.first(),)),
        ("ended", (asked.first(), *[one] * (blocks - 1))),
        ("1 to 16384", (asked.first(), carver.SendRequest())),
        ("1 to 16384", (asked.first(), asked.first())),
        ("1 to 16384", (asked.first(), carver.SendRequest(digests=bytes(32 * 513)))),
    )
    for word, requests in wrong:
        asked.require_refused("INVALID_ARGUMENT", word, *requests)
    streams: Any = asked.away.b.service.extras["transfer"]
    expect.soon(lambda: not streams._node_streams._jobs)
    assert asked.ask(asked.first(), *[one] * blocks).startswith(form.MAGIC)
    # Nothing of a snapshot is kept active.
    run(asked.away.back())


def test_a_caller_without_a_first_request_is_ended_and_holds_up_no_other(
    two: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "_FIRST_SECONDS", 1.0)
    asked, is_over = Asked(two), threading.Event()

    def never() -> Iterator[bytes]:
        is_over.wait(expect.PATIENCE_SECONDS)
        yield from ()

    with channel(two, "tls-a", "b") as to:
        call: Any = to.stream_stream(SEND_DIFFERING)
        # More than are served at the same time.
        waiting = [call(never()) for _ in range(locks.EXCHANGES + 1)]
        digests = carver.SendRequest(digests=bytes(32 * 16))
        assert asked.ask(asked.first(), digests).startswith(form.MAGIC)
        for one in waiting:
            with pytest.raises(grpc.RpcError):
                next(one)
        is_over.set()
