"""Nodes with volumes that move, in memory: what moving.py, receiving.py and holds.py decide.

tests/fast/extras/evacuation/test_moving_model.py holds the model against real services. A volume's
content is a tuple of lines. Of a volume that a stream was cut off in, the content is None.
"""

import hashlib
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
from baton import Baton

from agent.core import ids, tag
from agent.extras.controller.node_moves import NodeFailed
from agent.extras.transfer.move import ABSENT, Differ, Move, Progress, Sent, There, prefix_of
from agent.extras.transfer.moving import HELD_SECONDS
from proto import carver_pb2 as carver

T = TypeVar("T")
Code = grpc.StatusCode
Content = tuple[str, ...]
WITHDRAWN = "withdrawn"


class Refusal(Exception):
    """What a service answers a call with that it refuses."""

    def __init__(self, code: Code, why: str) -> None:
        super().__init__(f"{code.name}: {why}")
        self.code, self.why = code, why


def digest(word: str) -> str:
    return hashlib.sha256(word.encode()).hexdigest() if word else ""


@dataclass
class Snapshot:
    """A snapshot; of one whose area was full nothing can be read."""

    content: Content
    serial: int
    is_lost: bool = False
    of_move: bool = True
    group: str = ""

    def chain(self, snapshot_id: str) -> str:
        return hashlib.sha256(f"{snapshot_id} {self.serial}".encode()).hexdigest()


@dataclass
class Volume:
    """A volume, as its tags and its device are."""

    volume_id: str
    content: Content | None = field(repr=False)
    size_bytes: int = 1 << 30
    device_class: str = "linear"
    state: str = tag.READY
    move_to: str = ""
    word: str = ""
    move_ended: bool = False
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    # Of a volume that is received.
    chain: str = ""
    into: str = ""
    offset: int = 0
    release: str = ""
    finishing: str = ""
    received: str = ""
    released: str = ""
    # The digest of the word of the move that left what is being replaced.
    replaces: str = ""
    # What the volume is mounted for, and the number of streams that are applied to it.
    users: set[str] = field(default_factory=set)
    streams: int = 0

    @property
    def is_coming(self) -> bool:
        return self.state == tag.RECEIVING

    @property
    def is_usable(self) -> bool:
        return self.state == tag.READY

    @property
    def has_kept_snapshots(self) -> bool:
        """Whether it has snapshots that are lost with it; those of a thin volume are not."""
        return bool(self.snapshots) and self.device_class != "thin"


@dataclass
class Lease:
    """A hold of a volume."""

    token: str
    until: float
    serial: int


class Service:
    """A node, and the service on it. What is in memory ends with the process."""

    def __init__(self, name: str, number: int, clock: Callable[[], float]) -> None:
        self.name, self._clock = name, clock
        self.group = f"data@{'abcdefgh'[number] * 8}"
        self.volumes: dict[str, Volume] = {}
        self.free_bytes = 100 << 30
        self.classes = {"linear", "thin", "sealed"}
        self.is_up = True
        # The volume group that is not on the node for now, with all volumes.
        self.missing_group = ""
        self._apart: dict[str, Volume] = {}
        self.epoch = 0
        self._leases: dict[str, Lease] = {}
        # How often what a volume had left here became a volume that is received.
        self.replaced = 0
        # Whether Carver here does not know that this is possible.
        self.is_older = False
        self._serial = itertools.count(1)

    def restart(self) -> None:
        """The process ends, and another begins."""
        self.epoch += 1
        self._leases.clear()

    def lose_group(self) -> None:
        """The volume group is not on the node any more, as its disks are not."""
        self.missing_group = self.group.partition("@")[0]
        self._apart, self.volumes = self.volumes, {}
        for volume in self._apart.values():
            volume.users.clear()

    def find_group(self) -> None:
        """The volume group is back, with all that it had."""
        assert not self.volumes
        self.missing_group, self.volumes = "", self._apart

    def handle(self, name: str) -> str:
        return f"{self.group}/{ids.VOLUME_PREFIX}-{name}"

    def make(self, name: str, device_class: str) -> Volume:
        volume = Volume(self.handle(name), (), device_class=device_class)
        self.volumes[name] = volume
        self.free_bytes -= volume.size_bytes
        return volume

    def _remove(self, volume: Volume) -> None:
        self.free_bytes += volume.size_bytes
        del self.volumes[ids.readable_name(volume.volume_id)]

    def find(self, volume_id: str) -> Volume:
        for volume in self.volumes.values():
            if volume.volume_id == volume_id:
                return volume
        if self.missing_group:
            raise Refusal(Code.FAILED_PRECONDITION, f"{self.missing_group} is not on this node")
        raise Refusal(Code.NOT_FOUND, f"no volume {volume_id}")

    # Use

    def stage(self, volume_id: str, user: str) -> Volume:
        volume = self.find(volume_id)
        if not volume.is_usable or self._lease(volume_id) is not None:
            raise Refusal(Code.FAILED_PRECONDITION, f"{volume_id} is {volume.state}, or held")
        volume.users.add(user)
        return volume

    def delete(self, volume_id: str) -> None:
        try:
            volume = self.find(volume_id)
        except Refusal:
            return
        if not volume.is_usable or volume.users:
            raise Refusal(Code.FAILED_PRECONDITION, f"{volume_id} is {volume.state}, or in use")
        if volume.move_to:
            raise Refusal(Code.FAILED_PRECONDITION, f"{volume_id} moves to {volume.move_to}")
        if volume.has_kept_snapshots:
            raise Refusal(Code.FAILED_PRECONDITION, f"{volume_id} has snapshots")
        if self._lease(volume_id) is not None:
            raise Refusal(Code.FAILED_PRECONDITION, f"{volume_id} is held")
        self._remove(volume)

    # moving.py

    def move_state(self, volume_id: str) -> carver.MoveState:
        volume = self.find(volume_id)
        is_gone = volume.state == tag.MOVED
        word = volume.word if volume.move_to else ""
        return carver.MoveState(
            volume_id=volume.volume_id,
            state=tag.WIPING if is_gone and volume.move_ended else volume.state,
            node=volume.move_to,
            release=digest(word),
            word=word if is_gone else "",
            in_use=bool(volume.users),
            replaces=volume.release if volume.is_usable and not self.is_older else "",
        )

    def begin(self, volume_id: str, node: str, word: str, replaces: str = "") -> carver.MoveState:
        volume = self.find(volume_id)
        if volume.move_to and volume.move_to != node:
            raise Refusal(Code.FAILED_PRECONDITION, f"it moves to {volume.move_to}")
        if not volume.move_to:
            if not volume.is_usable:
                raise Refusal(Code.FAILED_PRECONDITION, f"it is {volume.state}")
            volume.move_to, volume.word = node, word
        is_meant = bool(replaces) and digest(volume.released) == replaces
        if volume.is_usable and is_meant and not self.is_older:
            volume.released, volume.release = "", replaces
        return self.move_state(volume_id)

    def hold(self, volume_id: str, token: str, new_token: str) -> str:
        volume = self._moving(volume_id)
        lease = self._lease(volume_id)
        if volume.state != tag.READY:
            raise Refusal(Code.FAILED_PRECONDITION, f"it is {volume.state}")
        if (lease.token if lease else "") != token:
            raise Refusal(Code.FAILED_PRECONDITION, "it is being sent for the last time")
        if lease is None:
            lease = Lease(new_token, 0.0, next(self._serial))
        lease.until = self._clock() + HELD_SECONDS
        self._leases[volume_id] = lease
        if volume.users:
            del self._leases[volume_id]
            raise Refusal(Code.FAILED_PRECONDITION, "it is in use")
        return lease.token

    def let_go(self, volume_id: str, token: str) -> None:
        lease = self._lease(volume_id)
        if lease is not None and lease.token == token:
            del self._leases[volume_id]

    def commit(self, volume_id: str, snapshot_id: str, token: str) -> carver.MoveState:
        volume = self._moving(volume_id)
        if volume.state == tag.MOVED:
            return self.move_state(volume_id)
        if volume.state != tag.READY:
            raise Refusal(Code.FAILED_PRECONDITION, "it is not this node's any more")
        snapshot = self._snapshot(snapshot_id)
        lease = self._lease(volume_id)
        if lease is None or lease.token != token or snapshot.serial <= lease.serial:
            raise Refusal(Code.FAILED_PRECONDITION, "it may have been used; send another")
        if volume.users:
            raise Refusal(Code.FAILED_PRECONDITION, "it is in use")
        volume.state = tag.MOVED
        return self.move_state(volume_id)

    def undo(self, volume_id: str, release: str = "", *, only_begun: bool = False) -> None:
        volume = self.find(volume_id)
        if volume.state == tag.MOVED and volume.move_ended:
            raise Refusal(Code.FAILED_PRECONDITION, "it is being deleted")
        if volume.is_coming:
            raise Refusal(Code.FAILED_PRECONDITION, "it is received")
        if volume.move_to:
            _require_move(volume, release)
            if only_begun and volume.state == tag.MOVED:
                raise Refusal(Code.FAILED_PRECONDITION, "it was handed over by now")
            if volume.state == tag.MOVED:
                volume.state = tag.READY
            volume.move_to = volume.word = ""

    def finish(self, volume_id: str, release: str = "") -> None:
        try:
            volume = self.find(volume_id)
        except Refusal:
            return
        if volume.state != tag.MOVED:
            raise Refusal(Code.FAILED_PRECONDITION, "it is still this node's")
        _require_move(volume, release)
        if volume.has_kept_snapshots:
            raise Refusal(Code.FAILED_PRECONDITION, "it has snapshots")
        volume.move_ended = True
        self._remove(volume)

    def take(self, volume_id: str, name: str) -> str:
        volume = self.find(volume_id)
        if volume.state != tag.READY:
            raise Refusal(Code.FAILED_PRECONDITION, f"it is {volume.state}")
        assert volume.content is not None
        snapshot_id = f"{self.group}/{ids.SNAPSHOT_PREFIX}-{name}"
        volume.snapshots[snapshot_id] = Snapshot(volume.content, next(self._serial))
        return snapshot_id

    def move_snapshots(self, volume_id: str) -> Mapping[str, str]:
        volume = self.find(volume_id)
        return {
            snapshot.chain(snapshot_id): snapshot_id
            for snapshot_id, snapshot in volume.snapshots.items()
            if self._is_of_move(volume, snapshot_id) and not snapshot.is_lost
        }

    def drop(self, volume_id: str, kept_ids: Sequence[str]) -> None:
        volume = self.find(volume_id)
        for snapshot_id in list(volume.snapshots):
            if self._is_of_move(volume, snapshot_id) and snapshot_id not in kept_ids:
                del volume.snapshots[snapshot_id]

    def _is_of_move(self, volume: Volume, snapshot_id: str) -> bool:
        release = digest(volume.word if volume.move_to else "")
        return f"-{prefix_of(release)}" in snapshot_id

    def require_sendable(self, volume_id: str, snapshot_id: str, node: str) -> None:
        """Refuse what a grant does not allow (grants.py)."""
        volume = self.find(volume_id)
        if volume.move_to != node or not self._is_of_move(volume, snapshot_id):
            raise Refusal(Code.FAILED_PRECONDITION, f"{snapshot_id} is not of a move to {node}")

    def _moving(self, volume_id: str) -> Volume:
        volume = self.find(volume_id)
        if not volume.move_to:
            raise Refusal(Code.FAILED_PRECONDITION, "no move of it was begun")
        return volume

    def _snapshot(self, snapshot_id: str) -> Snapshot:
        for volume in self.volumes.values():
            if (found := volume.snapshots.get(snapshot_id)) is not None and not found.is_lost:
                return found
        raise Refusal(Code.NOT_FOUND, f"no snapshot {snapshot_id}")

    def _lease(self, volume_id: str) -> Lease | None:
        lease = self._leases.get(volume_id)
        return lease if lease is not None and lease.until > self._clock() else None

    # receiving.py

    def receive_state(self, name: str) -> There:
        volume = self.volumes.get(name)
        if volume is None:
            empty = dict.fromkeys(("volume_id", "chain", "into", "received", "release"), "")
            empty |= dict.fromkeys(("replaceable", "replaces", "device_class"), "")
            empty["missing_group"] = self.missing_group
            return {**empty, "state": ABSENT, "offset_bytes": 0, "finishing": False, "verifies": 1}
        return {
            "volume_id": volume.volume_id,
            "state": tag.WIPING if volume.move_ended else volume.state,
            "chain": volume.chain,
            "into": volume.into,
            "offset_bytes": volume.offset,
            "received": volume.received,
            "finishing": bool(volume.finishing),
            "release": volume.release or digest(volume.released),
            "missing_group": "",
            "verifies": True,
            "replaceable": self._replaceable(volume),
            "replaces": volume.replaces,
            "device_class": volume.device_class,
        }

    def _replaceable(self, volume: Volume) -> str:
        is_left = volume.state == tag.MOVED and not volume.move_ended
        if not is_left or volume.has_kept_snapshots or self.is_older:
            return ""
        return digest(volume.word)

    def receive(
        self,
        name: str,
        device_class: str,
        base_chain: str,
        chain: str,
        release: str,
        offset: int,
        source_id: str,
        replaces: str = "",
    ) -> bool:
        """Begin to apply a stream; False if the volume has all of it already."""
        if device_class not in self.classes:
            raise Refusal(Code.INVALID_ARGUMENT, f"no class {device_class}")
        volume = self.volumes.get(name)
        if self.missing_group:
            raise Refusal(Code.FAILED_PRECONDITION, f"{self.missing_group} is not on this node")
        if volume is None:
            if base_chain or offset:
                raise Refusal(Code.FAILED_PRECONDITION, "there is no volume")
            if self.free_bytes < 1 << 30:
                raise Refusal(Code.RESOURCE_EXHAUSTED, "no room")
            volume = self.make(name, device_class)
            volume.state, volume.content = tag.RECEIVING, None
            volume.release, volume.into, volume.received = release, chain, source_id
            return True
        if volume.state == tag.MOVED and replaces:
            self._replace(volume, device_class, release, source_id, replaces)
        if not volume.is_coming:
            raise Refusal(Code.ALREADY_EXISTS, "it exists, and is not being received")
        if volume.chain == chain:
            return False
        if volume.finishing:
            raise Refusal(Code.FAILED_PRECONDITION, "it was withdrawn, or is being finished")
        if volume.release != release:
            raise Refusal(Code.FAILED_PRECONDITION, "it comes by another move")
        if volume.chain != base_chain:
            raise Refusal(Code.FAILED_PRECONDITION, "it has another base")
        if volume.into not in ("", chain) and not volume.replaces:
            raise Refusal(Code.FAILED_PRECONDITION, "another stream was begun")
        if offset > (volume.offset if volume.into == chain else 0):
            raise Refusal(Code.FAILED_PRECONDITION, "the stream begins too late")
        if volume.streams:
            raise Refusal(Code.FAILED_PRECONDITION, "it is in use")
        if volume.into != chain:
            volume.into, volume.offset = chain, 0
        volume.content = None
        return True

    def _replace(
        self, volume: Volume, device_class: str, release: str, source_id: str, replaces: str
    ) -> None:
        if self._replaceable(volume) != replaces or volume.device_class != device_class:
            raise Refusal(Code.FAILED_PRECONDITION, "it cannot be replaced")
        self.replaced += 1
        volume.state, volume.release, volume.received = tag.RECEIVING, release, source_id
        volume.replaces, volume.move_to, volume.word, volume.released = replaces, "", "", ""

    def record(self, name: str, chain: str, offset: int) -> None:
        volume = self._receiving(name)
        if volume.into != chain:
            raise Refusal(Code.FAILED_PRECONDITION, "another stream is being received")
        volume.offset = max(volume.offset, offset)

    def end(self, name: str, chain: str, content: Content) -> None:
        volume = self._receiving(name)
        if volume.chain == chain:
            return
        if volume.into != chain:
            raise Refusal(Code.FAILED_PRECONDITION, "another stream is being received")
        volume.chain, volume.content, volume.into, volume.offset = chain, content, "", 0
        volume.replaces = ""

    def finish_receive(self, name: str, word: str) -> None:
        self._finish_receive(name, word)

    def keep(self, name: str) -> None:
        """What an operator has done whose other node is lost."""
        self._finish_receive(name, None)

    def _finish_receive(self, name: str, word: str | None) -> None:
        volume = self.volumes.get(name)
        if volume is None:
            raise Refusal(Code.INVALID_ARGUMENT, "the volume has no id")
        if volume.is_usable and volume.received:
            return
        volume = self._received_whole(name)
        if word is not None:
            if digest(word) != volume.release:
                raise Refusal(Code.FAILED_PRECONDITION, "its source has not released it")
            volume.released = word
        volume.state = tag.READY
        volume.chain = volume.release = volume.finishing = ""

    def _received_whole(self, name: str) -> Volume:
        volume = self._receiving(name)
        if volume.finishing == WITHDRAWN:
            raise Refusal(Code.FAILED_PRECONDITION, "it was withdrawn")
        if volume.into or not (volume.chain or volume.finishing):
            raise Refusal(Code.FAILED_PRECONDITION, "its stream is incomplete")
        return volume

    def abort(self, name: str, release: str = "") -> None:
        volume = self.volumes.get(name)
        if volume is None:
            return
        if not volume.is_coming:
            raise Refusal(Code.FAILED_PRECONDITION, "it is finished")
        if release and (volume.release or digest(volume.released)) != release:
            raise Refusal(Code.FAILED_PRECONDITION, "it comes by another move")
        if volume.streams and not volume.finishing:
            raise Refusal(Code.FAILED_PRECONDITION, "it is in use")
        self._remove(volume)

    def withdraw(self, name: str, word: str) -> None:
        volume = self.volumes.get(name)
        if volume is None:
            raise Refusal(Code.INVALID_ARGUMENT, "the volume has no id")
        if volume.is_coming:
            return
        if volume.released != word or not word:
            raise Refusal(Code.FAILED_PRECONDITION, "it did not come by this move")
        if volume.move_to:
            raise Refusal(Code.FAILED_PRECONDITION, "it moves on")
        if volume.has_kept_snapshots:
            raise Refusal(Code.FAILED_PRECONDITION, "it has snapshots")
        if volume.users:
            raise Refusal(Code.FAILED_PRECONDITION, "it is in use")
        volume.state, volume.finishing = tag.RECEIVING, WITHDRAWN

    def whole(self, name: str) -> Volume:
        """The volume of a name that is received, of which a stream is whole."""
        volume = self._receiving(name)
        if volume.into or not volume.chain:
            raise Refusal(Code.FAILED_PRECONDITION, "its stream is incomplete")
        return volume

    def _receiving(self, name: str) -> Volume:
        volume = self.volumes.get(name)
        if volume is None:
            raise Refusal(Code.NOT_FOUND, f"no volume {name}")
        if not volume.is_coming:
            raise Refusal(Code.FAILED_PRECONDITION, "it is not being received")
        return volume


def _require_move(volume: Volume, release: str) -> None:
    if release and volume.word and digest(volume.word) != release:
        raise Refusal(Code.FAILED_PRECONDITION, "it is in another move")


class ModelMoves:
    """The controller's way to the nodes, in the place of NodeMoves.

    Each call is a point of the baton before and after it. `fails` says whether an answer is lost
    after a call was carried out, `cuts` whether a stream is cut off.
    """

    def __init__(self, services: Mapping[str, Service], baton: Baton) -> None:
        self.services, self.baton = services, baton
        self.fails: Callable[[], bool] = lambda: False
        self.cuts: Callable[[], bool] = lambda: False
        # How long a stream takes, in seconds.
        self.stream_seconds: Callable[[], float] = lambda: 0.0
        # Called with the name of each call that is carried out.
        self.called: Callable[[str, str], None] = lambda _node, _call: None

    def names(self) -> Sequence[str]:
        return sorted(self.services)

    def move(
        self,
        volume_id: str,
        source: str,
        target: str,
        *,
        name: str = "",
        device_class: str = "",
        replaces: str = "",
        tell: Callable[[str], None] = lambda _text: None,
        show: Callable[[Progress], None] = lambda _progress: None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Move:
        name = name or ids.readable_name(volume_id)
        return Move(
            ModelSource(self, volume_id, source, replaces, is_wanted),
            ModelDestination(
                self, volume_id, source, target, name, device_class, replaces, show, is_wanted
            ),
            volume_id,
            tell,
            replaces=replaces,
        )

    def call(self, node: str, name: str, work: Callable[[Service], T]) -> T:
        """Have a service carry out a call."""
        self.baton.point()
        service = self.services.get(node)
        if service is None or not service.is_up:
            raise NodeFailed(node, name, Code.UNAVAILABLE, "it does not answer")
        try:
            result = work(service)
        except Refusal as refusal:
            raise NodeFailed(node, name, refusal.code, refusal.why) from None
        self.called(node, name)
        self.baton.point()
        if self.fails():
            raise NodeFailed(node, name, Code.UNAVAILABLE, "the answer was lost")
        return result

    @property
    def chance(self) -> random.Random:
        return self.baton.chance


class ModelSource:
    """The node that has the volume, as the `Source` of a move."""

    def __init__(
        self,
        moves: ModelMoves,
        volume_id: str,
        node: str,
        replaces: str,
        is_wanted: Callable[[], bool],
    ) -> None:
        self._moves, self._id, self._node = moves, volume_id, node
        self._replaces, self._is_wanted = replaces, is_wanted

    def _call(self, name: str, work: Callable[[Service], T]) -> T:
        if name != "release" and not self._is_wanted():
            raise NodeFailed(self._node, name, Code.CANCELLED, "it is not wanted any more")
        return self._moves.call(self._node, name, work)

    def _word(self) -> str:
        return f"{self._moves.chance.getrandbits(64):x}"

    def begin(self, node: str) -> carver.MoveState:
        return self._call(
            "begin", lambda at: at.begin(self._id, node, self._word(), self._replaces)
        )

    def state(self) -> carver.MoveState:
        return self._call("state", lambda at: at.move_state(self._id))

    def snapshots(self) -> Mapping[str, str]:
        return self._call("snapshots", lambda at: at.move_snapshots(self._id))

    def take(self) -> str:
        name = f"{prefix_of(self.state().release)}{self._moves.chance.getrandbits(32):08x}"
        return self._call("take", lambda at: at.take(self._id, name))

    def drop(self, kept_ids: Sequence[str]) -> None:
        self._call("drop", lambda at: at.drop(self._id, kept_ids))

    def hold(self, token: str = "") -> str:
        return self._call("hold", lambda at: at.hold(self._id, token, self._word()))

    def release(self, token: str) -> None:
        self._call("release", lambda at: at.let_go(self._id, token))

    def commit(self, snapshot_id: str, token: str) -> carver.MoveState:
        return self._call("commit", lambda at: at.commit(self._id, snapshot_id, token))

    def undo(self, release: str, *, only_begun: bool = False) -> None:
        self._call("undo", lambda at: at.undo(self._id, release, only_begun=only_begun))

    def finish(self, release: str) -> None:
        self._call("finish", lambda at: at.finish(self._id, release))


class ModelDestination:
    """The node that the volume moves to, as the `Destination` of a move."""

    def __init__(
        self,
        moves: ModelMoves,
        volume_id: str,
        source: str,
        target: str,
        name: str,
        device_class: str,
        replaces: str,
        show: Callable[[Progress], None],
        is_wanted: Callable[[], bool],
    ) -> None:
        self._moves, self._id, self._source = moves, volume_id, source
        self._replaces, self._is_wanted = replaces, is_wanted
        self.node, self.name = target, name
        self._class, self._show = device_class, show

    def _call(self, name: str, work: Callable[[Service], T]) -> T:
        if not self._is_wanted():
            raise NodeFailed(self.node, name, Code.CANCELLED, "it is not wanted any more")
        return self._moves.call(self.node, name, work)

    def status(self) -> There:
        return self._call("status", lambda at: at.receive_state(self.name))

    def send(
        self, snapshot_id: str, base_id: str, release: str, offset_bytes: int, *, is_verified: bool
    ) -> Sent:
        moves, source = self._moves, self._moves.services[self._source]

        def stream(at: Service) -> Sent:
            def require() -> None:
                for one, epoch in zip((source, at), epochs, strict=True):
                    if not one.is_up or one.epoch != epoch:
                        raise Refusal(Code.UNAVAILABLE, f"{one.name} is gone")

            if not source.is_up:
                raise Refusal(Code.UNAVAILABLE, f"{source.name} does not answer")
            epochs = (source.epoch, at.epoch)
            source.require_sendable(self._id, snapshot_id, self.node)
            snapshot = source._snapshot(snapshot_id)
            chain = snapshot.chain(snapshot_id)
            base_chain = ""
            if base_id:
                base_chain = source._snapshot(base_id).chain(base_id)
            begun = at.receive(
                *(self.name, self._class, base_chain, chain, release, offset_bytes, self._id),
                replaces="" if base_id else self._replaces,
            )
            if not begun:
                return Sent(False, 0)
            volume = at.volumes[self.name]
            volume.streams += 1
            try:
                for part in range(2):
                    self._show(Progress("sending", part << 29, 1 << 30))
                    moves.baton.sleep(moves.stream_seconds())
                    require()
                    # Read on: a snapshot whose area is full by now cannot be.
                    snapshot = source._snapshot(snapshot_id)
                    at.record(self.name, chain, (part + 1) << 28)
                    if moves.cuts() or not self._is_wanted():
                        raise Refusal(Code.UNAVAILABLE, "the stream was cut off")
                at.end(self.name, chain, snapshot.content)
            finally:
                volume.streams -= 1
            received = volume.content
            if is_verified and received != snapshot.content:
                raise Differ
            return Sent(is_verified, 1 << 20)

        def pull(at: Service) -> Sent:
            try:
                return stream(at)
            except Refusal as refusal:
                # What a service refuses within a stream has one code.
                is_cut = refusal.code is Code.UNAVAILABLE
                code = refusal.code if is_cut else Code.FAILED_PRECONDITION
                raise Refusal(code, refusal.why) from None

        return self._call("Pull", pull)

    def compare(self, snapshot_id: str) -> None:
        snapshot = self._moves.call(self._source, "Checksum", lambda at: at._snapshot(snapshot_id))
        volume = self._call("Checksum", lambda at: at.whole(self.name))
        if volume.content is None or volume.content != snapshot.content:
            raise Differ

    def finish(self, word: str) -> There:
        self._call("FinishReceive", lambda at: at.finish_receive(self.name, word))
        return self.status()

    def withdraw(self, word: str) -> None:
        self._call("WithdrawReceive", lambda at: at.withdraw(self.name, word))

    def abort(self, release: str) -> None:
        if self.status()["state"] != ABSENT:
            self._call("AbortReceive", lambda at: at.abort(self.name, release))


def inventory(services: Mapping[str, Service], node: str, candidates: Sequence[str]) -> Any:
    """What the nodes answer for a plan (NodeInventory.read)."""
    from agent.extras.controller.nodes import Refused
    from agent.extras.evacuation import plan
    from agent.extras.evacuation.node_inventory import Inventory

    own = services.get(node)
    if own is None or not own.is_up:
        raise Refused(Code.UNAVAILABLE, f"node {node} does not answer")
    volumes = [
        plan.Volume(one.volume_id, one.size_bytes, one.device_class)
        for one in own.volumes.values()
        if one.is_usable or one.state == tag.MOVED
    ]
    away = [one for one in own.volumes.values() if one.move_to]
    received = {
        (name, one.received)
        for name, at in services.items()
        if at.is_up
        for one in at.volumes.values()
        if one.received and not one.move_to
    }
    moves = [
        plan.Moving(
            *(one.volume_id, one.move_to, one.state == tag.MOVED),
            has_space=(one.move_to, one.volume_id) in received,
        )
        for one in away
    ]
    rooms, problems = {}, {}
    for name in {*candidates, *(one.move_to for one in away)} - {node}:
        at = services.get(name)
        if at is None or not at.is_up:
            problems[name] = "does not answer"
            continue
        rooms[name] = {
            one: plan.Room("data", at.free_bytes, 1 << 22, one == "sealed") for one in at.classes
        }
    snapshots = [
        plan.Snapshot(snapshot_id, one.volume_id, snapshot.group)
        for one in own.volumes.values()
        for snapshot_id, snapshot in one.snapshots.items()
        if "-move-" not in snapshot_id
    ]
    left = {
        name: [
            plan.Volume(one.volume_id, one.size_bytes, one.device_class)
            for one in services[name].volumes.values()
            if one.state == tag.MOVED and one.move_to == node and not one.move_ended
        ]
        for name in rooms
    }
    # The class of an encrypted volume encrypts.
    volumes = [
        plan.Volume(one.volume_id, one.size_bytes, one.device_class, one.device_class == "sealed")
        for one in volumes
    ]
    return Inventory(volumes, snapshots, moves, rooms, problems, left)
