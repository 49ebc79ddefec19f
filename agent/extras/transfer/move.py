"""The move of one volume from a node to another, in steps that can be repeated.

A move goes in rounds. Each round takes a snapshot, and sends what changed since the snapshot of the
previous round. Once the volume is not in use, it is held, so that no call can use it. A last, short
round is sent, both nodes compare checksums, and the volume becomes the other node's.

Each step first asks both nodes for their state of the move, and does what is left to do. So after a
crash of either node, or of the process that drives the move, a new `Move` continues. docs/backup.md
has the table of states.

Two things drive moves, each with its own ways to the two nodes (`Source` and `Destination`):

- `carver volume move` calls its own node by the socket, and the other node by ssh: move_command.py.
- The cluster's controller calls both nodes over TLS: agent/extras/controller/node_moves.py.
"""

import enum
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import sleep
from types import MappingProxyType
from typing import Any, Protocol

import grpc

from agent.core import errors, tag
from proto import carver_pb2 as carver

# State of a volume that does not exist on the other node.
ABSENT = "absent"
# Interval at which `Move.run` checks whether the volume is in use, in seconds.
_LOOK_SECONDS = 2.0
# Number of checks of a volume in use after which `Move.run` sends another increment, so that the
# last increment is small.
_LOOKS = 150
# Maximum age, in seconds, of the snapshot that was sent before a move's last increment. If the
# snapshot is older, `Move.run` sends another increment first.
_OLD_SECONDS = _LOOKS * _LOOK_SECONDS
# Maximum age, in seconds, of the last snapshot that was sent, for a move to count as caught up.
# What was written since is sent in about this time.
CAUGHT_UP_SECONDS = 30.0
# Interval at which a move renews the hold of its volume, in seconds. The hold ends HELD_SECONDS
# after the last renewal (moving.py).
_KEEP_SECONDS = 8.0
# Maximum number of retries to hold a volume that another command holds, `_LOOK_SECONDS` apart. In
# total they take longer than the hold of a killed command lasts.
_HELD_LOOKS = 20
# Maximum number of times that `Move.run` sends its last increment again because the hold of the
# volume ended before the commit, as on a node that is suspended for a while.
_MOST_LOST_HOLDS = 5
# Maximum number of steps that `approach` and `hand_over` do before the step that sends something: a
# cut-off stream is continued, what cannot be continued is removed, all is sent, contents are
# compared.
_MOST_STEPS = 4
# Prefix of the names of a move's snapshots. The beginning of the move's release digest follows.
_PREFIX = "move-"
# Number of characters of the move's release digest in the name of a move's snapshot.
_PREFIX_CHARACTERS = 12

# The state of a volume on the other node: the fields of ReceiveState by their names. A Carver that
# is older may leave out some.
There = Mapping[str, Any]


class Trouble(enum.Enum):
    """What is wrong with a move. What to do depends on what drives the move (`Move`)."""

    # The other node does not have the volume as its own, so what is left is not to be deleted.
    NOT_THEIRS = enum.auto()
    # The other node has moved the volume on, so that the move cannot be undone.
    MOVED_ON = enum.auto()
    # The other node has moved the volume on, so that the move cannot go on.
    ENDED = enum.auto()
    # No node is known to have the volume, so that the move cannot be undone, or cannot go on.
    NOWHERE = enum.auto()
    LOST = enum.auto()
    # The other node has another volume of that name.
    NAME_TAKEN = enum.auto()
    # The contents on both nodes differ.
    DIFFERENT = enum.auto()


class Differ(Exception):
    """Raised by a `Destination` if the contents on both nodes differ."""


@dataclass(frozen=True)
class Sent:
    """The result of one stream.

    `is_equal` is true if the stream was verified: both nodes read the parts that were sent, and
    found them equal. `data_bytes` is the number of bytes of the volume that the stream has.
    """

    is_equal: bool
    data_bytes: int


@dataclass(frozen=True)
class Progress:
    """The progress of one stream.

    `done_bytes` is the offset in the volume that was reached, of `size_bytes`. `bytes_per_second`
    counts bytes of the volume, also those that need not be sent. `seconds_left` is None while it is
    unknown. `checked_bytes` is how far reading again has got, as an offset in the volume; 0 before
    all is received. `data_bytes` is the number of bytes of the volume that were sent; 0 if that is
    not known.
    """

    action: str
    done_bytes: int
    size_bytes: int
    bytes_per_second: float = 0.0
    seconds_left: float | None = None
    checked_bytes: int = 0
    data_bytes: int = 0


@dataclass(frozen=True)
class Approach:
    """The result of `Move.approach`.

    - `is_moved`: the volume is the other node's already; only `complete` is left.
    - `is_caught_up`: the other node has a verified copy that is at most CAUGHT_UP_SECONDS old.
    - `in_use`: the volume is in use.
    - `changed_bytes`: number of bytes in the last stream that was sent; 0 before the first one.
    - `rounds`: number of streams that this object has sent.
    """

    is_moved: bool
    is_caught_up: bool
    in_use: bool
    changed_bytes: int
    rounds: int


class Source(Protocol):
    """The node that has the volume. Its methods raise grpc.RpcError if the node refuses."""

    def begin(self, node: str) -> carver.MoveState:
        """Record that the volume moves to a node."""

    def state(self) -> carver.MoveState:
        """Return the state of the volume and of its move."""

    def snapshots(self) -> Mapping[str, str]:
        """Return the ids of the move's readable snapshots, by their chains (`form.chain_of`)."""

    def take(self) -> str:
        """Take a snapshot of the volume under a new name; return the snapshot's id.

        No name is used twice, because an earlier snapshot of that name may still be being erased.
        """

    def drop(self, kept_ids: Sequence[str]) -> None:
        """Delete the move's snapshots, except those whose ids are in `kept_ids`."""

    def hold(self, token: str = "") -> str:
        """Hold the volume, so that no call can use it; return the token of the hold.

        With `token`, the hold with that token is renewed.
        """

    def release(self, token: str) -> None:
        """End the hold with a token."""

    def commit(self, snapshot_id: str, token: str) -> carver.MoveState:
        """Record that the volume is the other node's; return the state, with the word."""

    def undo(self, release: str, *, only_begun: bool = False) -> None:
        """Make the volume this node's again, and forget the move.

        The node refuses if the volume is in another move than the one with the digest `release`;
        with `only_begun`, also if the volume was handed over.
        """

    def finish(self, release: str) -> None:
        """Delete what is left of the volume; refused as `undo`."""


class Destination(Protocol):
    """The node that the volume moves to. Its methods raise NodeRefused if the node refuses."""

    @property
    def node(self) -> str:
        """The node's name."""

    @property
    def name(self) -> str:
        """The volume's name there."""

    def status(self) -> There:
        """Return the state of the volume there."""

    def send(
        self, snapshot_id: str, base_id: str, release: str, offset_bytes: int, *, is_verified: bool
    ) -> Sent:
        """Have a snapshot sent; with `base_id`, only what changed since that snapshot.

        `release` is the digest of the move's word. With `offset_bytes`, a stream is continued. With
        `is_verified`, both nodes read the parts that were sent, and compare them. Raises Differ if
        they are not equal.
        """

    def compare(self, snapshot_id: str) -> None:
        """Compare all of a snapshot with all that is there. Raises Differ if they are not equal."""

    def finish(self, word: str) -> There:
        """Make the volume one of that node; return its state there."""

    def withdraw(self, word: str) -> None:
        """Undo `finish`, so that the volume can only be removed."""

    def abort(self, release: str) -> None:
        """Erase and remove what was received by the move with the digest `release`.

        What another move brings is left alone, and the call is refused.
        """


def digest_of(word: str) -> str:
    """Return the digest of a move's word, SHA-256 in hexadecimal digits; empty without a word."""
    return hashlib.sha256(word.encode()).hexdigest() if word else ""


def prefix_of(release: str) -> str:
    """Return the prefix of the names of a move's snapshots, by the digest of the move's word."""
    return f"{_PREFIX}{release[:_PREFIX_CHARACTERS]}-"


def is_moved(own_state: carver.MoveState) -> bool:
    """Return whether a volume is not its old node's any more, by that node's state of it."""
    return own_state.state == tag.MOVED


def is_usable(own_state: carver.MoveState) -> bool:
    """Return whether a volume can be used on its old node, by that node's state of it."""
    return own_state.state == tag.READY


def is_receiving(there_state: There) -> bool:
    """Return whether a volume cannot be used yet on the node that it moves to."""
    return bool(there_state["state"] == tag.RECEIVING)


def is_own(there_state: There) -> bool:
    """Return whether a node has a volume as its own, which can be used there."""
    return bool(there_state["state"] == tag.READY)


class Move:
    """The move of one volume to another node.

    `tell` is called with a line of text at each step. `advice` has what to do in case of trouble,
    as the end of a sentence: its reader may be one who called a command, or who looks at what the
    controller does by itself. `replaces` is the digest of the word of an earlier move, by which the
    volume came from the other node. What it left there is replaced, and only what differs from that
    is sent. The source and the destination have to know that digest, too.

    The methods raise NodeRefused if the other node cannot be reached or refuses a call,
    grpc.RpcError if the node that has the volume refuses a call, and NotMoved if the move cannot go
    on by itself.

    Use one object for one move, by one thread at a time: it remembers which snapshot was found
    equal on both nodes. A new object compares both copies once before the last round.
    """

    def __init__(
        self,
        source: Source,
        destination: Destination,
        volume_id: str,
        tell: Callable[[str], None],
        advice: Mapping[Trouble, str] = MappingProxyType({}),
        replaces: str = "",
    ) -> None:
        self.source, self.destination = source, destination
        self._replaces = replaces
        self._advice = advice
        self._volume_id = volume_id
        self._tell = tell
        # Whether Carver on the other node can verify a stream, which version 0.1.0 cannot.
        self._verifies = False
        # The id of the last snapshot whose contents this object has found equal on both nodes;
        # empty if the last snapshot that was sent was not compared.
        self._proved = ""
        # The time at which this object took each snapshot (time.monotonic()), by the snapshot's id.
        self._taken: dict[str, float] = {}
        # Number of last increments that `run` sent in vain, because the hold of the volume ended
        # before the commit.
        self._lost_holds = 0
        # Number of streams that were sent, and number of bytes in the last one.
        self._rounds = self._changed_bytes = 0

    def run(self) -> There:
        """Move the volume; return the volume's state on the other node.

        Waits until the volume is not in use. What is left of the volume on its old node stays, and
        cannot be used, until `finish` or `undo`. Raises NotMoved if the other node has another
        volume of that name, if both nodes' contents differ, or if the other node has lost the moved
        volume or moved it on.
        """
        move = self.source.begin(self.destination.node)
        while move.state != tag.MOVED:
            base_id = self._follow(move.release, _OLD_SECONDS)
            if base_id and not self._waits(base_id, move.release):
                may_lose = self._lost_holds < _MOST_LOST_HOLDS
                self._tell("it is not in use: sending what changed since, while it cannot be used")
                committed = self._last(base_id, move.release, self._hold(), may_lose=may_lose)
                if committed is None:
                    self._lost_holds += 1
                    self._tell("it could be used meanwhile: sending what changed since once more")
                move = committed or move
        return self._complete(move)

    def approach(self) -> Approach:
        """Begin or continue the move by one round, which needs no stop of what uses the volume.

        Sends one stream, unless the last one is at most CAUGHT_UP_SECONDS old. Never waits for the
        volume to be unused.
        """
        move = self.source.begin(self.destination.node)
        if move.state == tag.MOVED:
            return Approach(True, True, False, self._changed_bytes, self._rounds)
        rounds_before = self._rounds
        for _ in range(_MOST_STEPS):
            base_id = self._follow(move.release, CAUGHT_UP_SECONDS)
            if base_id or self._rounds > rounds_before:
                break
        is_caught_up = bool(self._proved) and not self._is_old(self._proved, CAUGHT_UP_SECONDS)
        in_use = self.source.state().in_use
        return Approach(False, is_caught_up, in_use, self._changed_bytes, self._rounds)

    def hand_over(self) -> bool:
        """Make the volume the other node's, if it is not in use; return whether it is.

        Holds the volume, sends the last round, compares, and commits. False, with the volume still
        its old node's, if the volume is in use, if another command holds it, or if the hold ended
        before the commit. Call `approach` before: all that it left undone is done here, too.
        """
        move = self.source.state()
        if move.state == tag.MOVED:
            return True
        if move.in_use or not move.node:
            return False
        for _ in range(_MOST_STEPS):
            if base_id := self._follow(move.release, float("inf")):
                break
        else:
            return False
        try:
            token = self.source.hold()
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED):
                return False
            raise
        return self._last(base_id, move.release, token, may_lose=True) is not None

    def complete(self) -> There:
        """Finish a volume that was handed over, on the other node; return its state there.

        The volume can be used there from then on. Raises NotMoved if the volume was not handed
        over, or if the other node no longer has it, or has moved it on.
        """
        move = self.source.state()
        if move.state != tag.MOVED:
            raise self._refused("it was not handed over yet; go on with the move")
        return self._complete(move)

    def finish(self, is_elsewhere: Callable[[], bool] = lambda: False) -> None:
        """Delete what is left on the old node of a volume that was moved.

        The snapshots of the move are deleted, too. If the deletion has begun already, it is
        continued; otherwise the other node is asked first. If that does not have the volume,
        `is_elsewhere` is asked whether it has moved the volume on, and a third node has it as its
        own. Raises NotMoved if neither has the volume as its own. Raises grpc.RpcError if the
        volume is still the old node's; the snapshots of the move are then deleted all the same.
        """
        own_state = self.source.state()
        if own_state.state == tag.MOVED:
            there_state = self.destination.status()
            is_theirs = there_state["release"] == own_state.release
            has_it = is_theirs and there_state["state"] in (tag.READY, tag.MOVED)
            if not (has_it or is_elsewhere()):
                raise self._refused(
                    f"{self.destination.node} does not have it as a volume of its own, so what is"
                    " left on its old node may be the only copy",
                    Trouble.NOT_THEIRS,
                )
        self.source.drop(())
        self.source.finish(own_state.release)

    def undo(self, *, confirmed: Callable[[str], bool], is_nowhere: Callable[[str], bool]) -> None:
        """Make the volume its old node's again, and remove it from the other node.

        The caller is asked in two cases:

        - `confirmed` is called if the other node has finished the volume: what was written to the
          volume there is lost.
        - `is_nowhere` is called if the volume was moved, and the other node has no volume that came
          by this move. The other node may have finished the volume and moved it on, so the volume
          may be a third node's by now.

        Raises NotConfirmed if `confirmed` returns False. Raises NotMoved if `is_nowhere` returns
        False, if no move was begun, if what is left of the volume on its old node is being deleted,
        or if the other node has moved the volume on.
        """
        name, node = self.destination.name, self.destination.node
        own_state = self.source.state()
        if not own_state.node:
            raise self._refused("no move of it was begun")
        if own_state.state == tag.WIPING:
            raise self._refused("what is left of it on its old node is being deleted")
        there_state = self.destination.status()
        # The other node may have a volume of the same name that did not come by this move. Such a
        # volume is left alone.
        is_theirs = there_state["state"] != ABSENT and there_state["release"] == own_state.release
        if is_theirs and there_state["state"] == tag.MOVED:
            raise self._refused(f"{node} has moved it on", Trouble.MOVED_ON)
        if is_theirs and there_state["state"] == tag.READY:
            question = f"What was written to {name} on {node} since it moved is lost. Take it back?"
            if not confirmed(question):
                raise errors.NotConfirmed(name, "taken back")
            self.destination.withdraw(own_state.word)
        elif own_state.state == tag.MOVED and not (
            # No question is needed if the other node never finished the volume, or if an undo
            # withdrew the volume there.
            is_theirs and (there_state["state"] == tag.RECEIVING or there_state["finishing"])
        ):
            problem = f"{node} has no {name} that came by this move"
            if not is_nowhere(f"{problem}. Is it on no other node either?"):
                raise self._refused(
                    f"{problem}, but may have had it, and moved it on or deleted it",
                    Trouble.NOWHERE,
                )
        if is_theirs:
            self.destination.abort(own_state.release)
        self.take_back(own_state.release)
        self._tell(f"{name} is this node's, and {node} has none of it")

    def take_back(self, release: str, *, only_begun: bool = False) -> None:
        """Make the volume its old node's again, and delete the snapshots of the move.

        The other node is not asked. The caller knows that no other node has the volume by the move
        with the digest `release`; with `only_begun` the volume's node refuses if the volume was
        handed over, so nothing need be known of others. If the volume is in another move by then,
        its node refuses.
        """
        # Delete the snapshots first: their names contain the move's release digest, which the node
        # forgets with the move.
        self.source.drop(())
        self.source.undo(release, only_begun=only_begun)

    def _follow(self, release: str, old_seconds: float) -> str:
        """Do one step towards a base that is at most `old_seconds` old and equal on both nodes.

        Returns the base's id, or an empty string if a step was done. Raises NotMoved if the other
        node has another volume of that name, or if the contents differ.
        """
        there_state, own_snapshots = self.destination.status(), self.source.snapshots()
        is_replaceable = bool(self._replaces) and there_state["replaceable"] == self._replaces
        is_other = there_state["state"] != ABSENT and there_state["release"] != release
        if is_other and not is_replaceable:
            raise self._refused(
                f"{self.destination.node} has another volume {self.destination.name!r}",
                Trouble.NAME_TAKEN,
            )
        self._verifies = bool(there_state.get("verifies"))
        base_id = own_snapshots.get(there_state["chain"], "")
        has_base = bool(base_id) or not there_state["chain"]
        if there_state["into"] in own_snapshots and has_base:
            # The last stream was cut off. Continue the stream at the offset that the other node has
            # recorded.
            self._send(
                own_snapshots[there_state["into"]], base_id, release, there_state["offset_bytes"]
            )
            return ""
        # What an earlier move left there is compared anew with any snapshot.
        is_compared = is_replaceable or bool(there_state.get("replaces"))
        if (there_state["into"] and not is_compared) or not has_base:
            # A snapshot of this move was lost, for example because its COW store was full. Remove
            # what the other node has received, and begin anew.
            self._tell("cannot continue from what was sent; sending all of it again")
            self.destination.abort(release)
            return ""
        self.source.drop((base_id,))
        if not base_id:
            self._tell("sending what differs" if is_compared else "sending all of it")
            self._send(self._take(), "", release)
            return ""
        if self._verifies and base_id != self._proved:
            self._tell("comparing what both hold")
            self._compare(base_id, release)
        if self._is_old(base_id, old_seconds):
            # The snapshot is old, so much may have changed since. Send another increment first, so
            # that the last increment is small.
            self._send(self._take(), base_id, release)
            return ""
        return base_id

    def _is_old(self, base_id: str, old_seconds: float) -> bool:
        """Return whether much may have changed since a snapshot was taken, by the snapshot's age.

        True also for a snapshot that another object took, unless `old_seconds` is infinite.
        """
        taken_at = self._taken.get(base_id, float("-inf"))
        return time.monotonic() - taken_at > old_seconds

    def _waits(self, base_id: str, release: str) -> bool:
        """Wait while the volume is in use; return True if it may still be in use at the end.

        True after another increment was sent because the volume stayed in use, and true if the base
        snapshot was lost because its COW store is full. False once the volume is not in use, so
        that the last round can follow.
        """
        for attempt in range(_LOOKS):
            own_state = self.source.state()
            if base_id not in self.source.snapshots().values():
                return True
            if not own_state.in_use:
                return False
            if not attempt:
                self._tell("it is in use: stop what uses it; meanwhile what changes is sent")
            sleep(_LOOK_SECONDS)
        self._send(self._take(), base_id, release)
        return True

    def _last(
        self, base_id: str, release: str, token: str, *, may_lose: bool
    ) -> carver.MoveState | None:
        """Send the last increment of a volume that is held, compare both nodes, commit the move.

        `token` is that of the hold, which is ended. Returns the state of the committed move.
        Returns None if the hold ended before the commit, so that another round is needed; without
        `may_lose`, the error of the refused commit is raised instead.
        """
        with _kept(self.source, token):
            snapshot_id = self._take()
            self._send(snapshot_id, base_id, release)
            if self._proved != snapshot_id:
                # The other node's Carver is 0.1.0 and has no --verify, so the stream was not
                # verified.
                self._tell(f"Carver on {self.destination.node} is older: now both read all of it")
                self._compare(snapshot_id, release)
            self._tell("both hold the same")
            try:
                return self.source.commit(snapshot_id, token)
            except grpc.RpcError as error:
                is_refused = error.code() is grpc.StatusCode.FAILED_PRECONDITION
                if not is_refused or not may_lose or self._is_held(token):
                    raise
        return None

    def _hold(self) -> str:
        """Begin to hold the volume; return the hold's token.

        While another command holds the volume, such as a move that was killed, the call is retried
        up to `_HELD_LOOKS` times. Raises grpc.RpcError if the volume is in use, if the other hold
        does not end, or if the node refuses for another reason.
        """
        attempts = 0
        while True:
            try:
                return self.source.hold()
            except grpc.RpcError as error:
                state = self.source.state()
                is_held = error.code() is grpc.StatusCode.FAILED_PRECONDITION
                if not is_held or state.in_use or attempts == _HELD_LOOKS:
                    raise
            attempts += 1
            sleep(_LOOK_SECONDS)

    def _is_held(self, token: str) -> bool:
        """Return whether the hold with a token still lasts, and renew that hold.

        True also if the node does not answer.
        """
        try:
            self.source.hold(token)
        except grpc.RpcError as error:
            return error.code() is not grpc.StatusCode.FAILED_PRECONDITION
        return True

    def _compare(self, snapshot_id: str, release: str) -> None:
        """Compare all that both nodes hold; raise NotMoved if they differ.

        If they differ, the volume is removed from the other node first. If they are equal, the
        snapshot is noted as the base of verified streams.
        """
        try:
            self.destination.compare(snapshot_id)
        except Differ:
            self._remove_different(release)
        self._proved = snapshot_id

    def _remove_different(self, release: str) -> None:
        """Remove the volume from the other node, which holds something else; raise NotMoved."""
        self.destination.abort(release)
        raise self._refused(
            f"{self.destination.node} holds something else than was sent, and it was removed"
            " there; look for a disk or memory with errors",
            Trouble.DIFFERENT,
        ) from None

    def _complete(self, move: carver.MoveState) -> There:
        """Finish a committed move on the other node; return the volume's state there.

        The snapshots of the move are deleted. Raises NotMoved if the other node no longer has the
        volume, or has moved the volume on.
        """
        node = self.destination.node
        there_state = self.destination.status()
        if there_state["state"] == ABSENT or there_state["release"] != move.release:
            raise self._refused(f"it is {node}'s, which does not have it any more", Trouble.LOST)
        if there_state["state"] == tag.MOVED:
            raise self._refused(f"{node} has moved it on", Trouble.ENDED)
        if not is_own(there_state):
            there_state = self.destination.finish(move.word)
        if not is_own(there_state):
            # Its volume group may be missing since then.
            raise self._refused(f"{node} does not show it after it was finished", Trouble.LOST)
        self.source.drop(())
        self._tell(
            f"{self.destination.name} is {node}'s; what is left on its old node is under quarantine"
        )
        return there_state

    def _send(self, snapshot_id: str, base_id: str, release: str, offset_bytes: int = 0) -> None:
        """Send a snapshot to the other node; with `base_id`, only what changed since that snapshot.

        The stream is verified if it is of the whole volume, or if both nodes were found to hold the
        same base. A stream that continues at an offset is not verified, and neither is a stream to
        a version of Carver that cannot verify. Raises NotMoved if the contents differ; the volume
        is removed from the other node first.
        """
        is_verified = self._verifies and base_id in ("", self._proved) and not offset_bytes
        self._proved = ""
        try:
            sent = self.destination.send(
                snapshot_id, base_id, release, offset_bytes, is_verified=is_verified
            )
        except Differ:
            self._remove_different(release)
        self._rounds += 1
        self._changed_bytes = sent.data_bytes
        if sent.is_equal:
            self._proved = snapshot_id

    def _take(self) -> str:
        taken_at = time.monotonic()
        snapshot_id = self.source.take()
        self._taken[snapshot_id] = taken_at
        return snapshot_id

    def _refused(self, why: str, trouble: Trouble | None = None) -> errors.NotMoved:
        advice = self._advice.get(trouble, "") if trouble else ""
        return errors.NotMoved(self._volume_id, why + advice)


@contextmanager
def _kept(source: Source, token: str) -> Iterator[None]:
    """Keep a volume held for the `with`, and end the hold with that token at its end.

    A thread of this process renews the hold. So if this process is killed, the hold ends within
    HELD_SECONDS (moving.py).
    """
    end_event = threading.Event()

    def keep() -> None:
        while not end_event.wait(_KEEP_SECONDS):
            # A renewal of the hold fails while another call for the volume is running. The renewal
            # is repeated before the hold ends. If the hold is lost all the same, the commit is
            # refused.
            with suppress(grpc.RpcError):
                source.hold(token)

    keeper = threading.Thread(target=keep, name="keep", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        end_event.set()
        keeper.join()
        source.release(token)
