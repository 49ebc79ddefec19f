"""`carver volume move`: send snapshots of a volume while it is in use, then hand the volume over.

A move goes in rounds. Each round takes a snapshot, and sends what changed since the snapshot of the
previous round. Once the volume is not in use, the command holds the volume, so that no call can use
it. A last, short round is sent, both nodes compare checksums, and the volume becomes the other
node's.

Each step first asks both nodes for their state of the move, and does what is left to do. So after a
crash of either node, or of this command, the same command continues the move. docs/backup.md has
the table of states.
"""

import argparse
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any

import grpc

from agent.cli import terminal
from agent.cli.volume_verbs import VolumeVerbs
from agent.core import errors, ids, tag
from agent.extras.kubernetes import access
from agent.extras.kubernetes.rebinding import Place
from agent.extras.transfer import claim_moves, streams_command
from agent.extras.transfer.remote import Remote
from mount.block_io import Bytes
from proto import carver_pb2 as carver
from proto.carver_pb2_grpc import TransferStub

# Interval at which a move checks whether its volume is in use, in seconds.
_LOOK_SECONDS = 2.0
# Number of checks of a volume in use after which a move sends another increment, so that the last
# increment is small.
_LOOKS = 150
# Maximum age, in seconds, of the snapshot that was sent before a move's last increment. If the
# snapshot is older, another increment is sent first.
_OLD_SECONDS = _LOOKS * _LOOK_SECONDS
# Interval at which a move renews the hold of its volume, in seconds. The hold ends HELD_SECONDS
# after the last renewal (moving.py).
_KEEP_SECONDS = 8.0
# Maximum number of retries to hold a volume that another command holds, `_LOOK_SECONDS` apart. In
# total they take longer than the hold of a killed command lasts.
_HELD_LOOKS = 20
# Maximum number of times that a move sends its last increment again because the hold of the volume
# ended before the commit, as on a node that is suspended for a while.
_MOST_LOST_HOLDS = 5
# Prefix of the names of a move's snapshots. The beginning of the move's release digest follows.
_PREFIX = "move-"
# Number of characters of the move's release digest in the name of a move's snapshot.
_PREFIX_CHARACTERS = 12


@dataclass(frozen=True)
class Options:
    """Options of a move.

    `name` and `device_class` are the volume's name and class on the other node. An empty class
    means the default class of the other node. `compress` compresses the streams, and `as_json`
    prints the progress as JSON.
    """

    name: str
    device_class: str = ""
    compress: bool = False
    as_json: bool = False


class Move:
    """The move of one volume to another node, as the command sees it.

    `tell` is called with a line for the operator at each step. The methods raise NodeRefused if the
    other node cannot be reached or refuses a command, and grpc.RpcError if the service of this node
    refuses a call.
    """

    def __init__(
        self,
        verbs: VolumeVerbs,
        remote: Remote,
        volume_id: str,
        options: Options,
        tell: Callable[[str], None],
    ) -> None:
        self._verbs, self._caller = verbs, verbs.caller
        self._transfer = verbs.caller.stub(TransferStub)
        self._remote = remote
        self._volume_id = volume_id
        self._options = options
        self._tell = tell
        # Whether Carver on the other node has the option --verify, which version 0.1.0 does not
        # have.
        self._verifies = False
        # The id of the last snapshot whose contents this run has found equal on both nodes; empty
        # if the last snapshot that was sent was not compared.
        self._proved = ""
        # The time at which this run took each snapshot (time.monotonic()), by the snapshot's id.
        self._taken: dict[str, float] = {}
        # Number of last increments that were sent in vain, because the hold of the volume ended
        # before the commit.
        self._lost_holds = 0

    def run(self) -> dict[str, Any]:
        """Move the volume; return the volume's state on the other node.

        Waits until the volume is not in use. What is left of the volume on this node stays, and
        cannot be used, until `finish` or `undo`. Raises NotMoved if the other node has another
        volume of that name, if both nodes' contents differ, or if the other node has lost the moved
        volume or moved it on.
        """
        request = carver.BeginMoveRequest(volume_id=self._volume_id, node=self._remote.node)
        move = self._transfer.BeginMove(request)
        while move.state != tag.MOVED:
            move = self._round(move) or move
        return self._complete(move)

    def status(self) -> dict[str, Any]:
        """Return the state of the move on this node (`here`) and on the other node (`there`).

        The secret word of the move is left out.
        """
        own_state = streams_command.values(self._here())
        # `in_use` was a string in the JSON output of 0.1.0, so it is still a string.
        own_state["in_use"] = str(own_state["in_use"])
        return {"here": {**own_state, "word": ""}, "there": self._ask("--status")}

    def finish(self) -> None:
        """Delete what is left on this node of a volume that was moved to the other node.

        The snapshots of the move are deleted, too. If the deletion has begun already, it is
        continued; otherwise the other node is asked first. Raises NotMoved if the other node does
        not have the volume as its own. Raises grpc.RpcError if the volume is still this node's; the
        snapshots of the move are then deleted all the same.
        """
        own_state = self._here()
        if own_state.state == tag.MOVED:
            there_state = self._ask("--status")
            is_theirs = there_state["release"] == own_state.release
            if not is_theirs or there_state["state"] not in (tag.READY, tag.MOVED):
                raise self._refused(
                    f"{self._remote.node} does not have it as a volume of its own: go on with the"
                    " move, or --undo it. What is here may be the only copy. Only where another"
                    " node has it by now, and its pod reads its data there, --there-is-none and"
                    " then `carver volume delete` remove what is here"
                )
        self._drop(kept_ids=())
        self._transfer.FinishMove(carver.VolumeRequest(volume_id=self._volume_id))

    def undo(self, *, confirmed: Callable[[str], bool], is_nowhere: Callable[[str], bool]) -> None:
        """Make the volume this node's again, and remove it from the other node.

        The operator is asked in two cases:

        - `confirmed` is called if the other node has finished the volume: what was written to the
          volume there is lost.
        - `is_nowhere` is called if the volume was moved, and the other node has no volume that came
          by this move. The other node may have finished the volume and moved it on, so the volume
          may be a third node's by now.

        Raises NotConfirmed if `confirmed` returns False. Raises NotMoved if `is_nowhere` returns
        False, if no move was begun, if what is left of the volume on this node is being deleted, or
        if the other node has moved the volume on.
        """
        name, node = self._options.name, self._remote.node
        own_state = self._here()
        if not own_state.node:
            raise self._refused("no move of it was begun")
        if own_state.state == tag.WIPING:
            raise self._refused("what is left of it here is being deleted")
        there_state = self._ask("--status")
        # The other node may have a volume of the same name that did not come by this move. Such a
        # volume is left alone.
        is_theirs = (
            there_state["state"] != streams_command.ABSENT
            and there_state["release"] == own_state.release
        )
        if is_theirs and there_state["state"] == tag.MOVED:
            raise self._refused(f"{node} has moved it on; --undo that move there first")
        if is_theirs and there_state["state"] == tag.READY:
            question = f"What was written to {name} on {node} since it moved is lost. Take it back?"
            if not confirmed(question):
                raise errors.NotConfirmed(name, "taken back")
            self._ask("--withdraw", "--release", own_state.word)
        elif own_state.state == tag.MOVED and not (
            # No question is needed if the other node never finished the volume, or if an --undo
            # withdrew the volume there.
            is_theirs and (there_state["state"] == tag.RECEIVING or there_state["finishing"])
        ):
            problem = f"{node} has no {name} that came by this move"
            if not is_nowhere(f"{problem}. Is it on no other node either?"):
                raise self._refused(
                    f"{problem}, but may have had it, and moved it on or deleted it. Look on each"
                    " node (`carver volume list`); where none has it, --there-is-none takes it"
                    " back"
                )
        if is_theirs:
            self._ask("--abort", "--yes")
        self.take_back()
        self._tell(f"{name} is this node's, and {node} has none of it")

    def take_back(self) -> None:
        """Make the volume this node's again, and delete the snapshots of the move.

        The other node is not asked. The caller knows that no other node has the volume.
        """
        # Delete the snapshots first: their names contain the move's release digest, which this node
        # forgets with the move.
        self._drop(kept_ids=())
        self._transfer.UndoMove(carver.VolumeRequest(volume_id=self._volume_id))

    def place_there(self, there_state: Mapping[str, Any]) -> Place:
        """Return the volume's id, node and driver on the other node, for its PersistentVolume.

        `there_state` is the volume's state on the other node.
        """
        node = self._remote.ask("status", "--json")
        return Place(there_state["volume_id"], node["node"], node["driver"])

    def _round(self, move: carver.MoveState) -> carver.MoveState | None:
        """Do one step of the move; return the move's state if the move was committed, else None.

        Raises NotMoved if the other node has another volume of that name, or if the contents
        differ.
        """
        there_state, own_snapshots = self._ask("--status"), self._own()
        release = move.release
        if there_state["state"] != streams_command.ABSENT and there_state["release"] != release:
            raise self._refused(
                f"{self._remote.node} has another volume {self._options.name!r}; name it otherwise:"
                " --as NAME"
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
            return None
        if there_state["into"] or not has_base:
            # A snapshot of this move was lost, for example because its COW store was full. Remove
            # what the other node has received, and begin anew.
            self._tell("cannot continue from what was sent; sending all of it again")
            self._ask("--abort", "--yes")
            return None
        self._drop(kept_ids=(base_id,))
        if not base_id:
            self._tell("sending all of it")
            self._send(self._take(), "", release)
            return None
        if self._verifies and base_id != self._proved:
            self._tell("comparing what both hold")
            self._compare(base_id)
        if self._is_old(base_id):
            # The snapshot is old, so much may have changed since. Send another increment first, so
            # that the last increment is small.
            self._send(self._take(), base_id, release)
            return None
        if self._waits(base_id, release):
            return None
        return self._last(base_id, release)

    def _is_old(self, base_id: str) -> bool:
        """Return whether much may have changed since a snapshot was taken, by the snapshot's age.

        True also for a snapshot that an earlier run of the command took.
        """
        taken_at = self._taken.get(base_id)
        return taken_at is None or time.monotonic() - taken_at > _OLD_SECONDS

    def _waits(self, base_id: str, release: str) -> bool:
        """Wait while the volume is in use; return True if it may still be in use at the end.

        True after another increment was sent because the volume stayed in use, and true if the base
        snapshot was lost because its COW store is full. False once the volume is not in use, so
        that the last round can follow.
        """
        for attempt in range(_LOOKS):
            own_state = self._here()
            if base_id not in self._own().values():
                return True
            if not own_state.in_use:
                return False
            if not attempt:
                self._tell("it is in use: stop what uses it; meanwhile what changes is sent")
            sleep(_LOOK_SECONDS)
        self._send(self._take(), base_id, release)
        return True

    def _last(self, base_id: str, release: str) -> carver.MoveState | None:
        """Hold the volume, send the last increment, compare both nodes, and commit the move.

        Returns the state of the committed move. Returns None if the hold ended before the commit,
        so that another round is needed. If that happened `_MOST_LOST_HOLDS` times before, the error
        of the refused commit is raised instead.
        """
        self._tell("it is not in use: sending what changed since, while it cannot be used")
        with _kept(self._transfer, self._volume_id) as token:
            snapshot_id = self._take()
            self._send(snapshot_id, base_id, release)
            if self._proved != snapshot_id:
                # The other node's Carver is 0.1.0 and has no --verify, so the stream was not
                # verified.
                self._tell(f"Carver on {self._remote.node} is older: now both read all of it")
                self._compare(snapshot_id)
            self._tell("both hold the same")
            request = carver.CommitMoveRequest(
                volume_id=self._volume_id, snapshot_id=snapshot_id, token=token
            )
            try:
                return self._transfer.CommitMove(request)
            except grpc.RpcError as error:
                is_refused = error.code() is grpc.StatusCode.FAILED_PRECONDITION
                is_last = self._lost_holds == _MOST_LOST_HOLDS
                if not is_refused or is_last or self._is_held(token):
                    raise
        self._lost_holds += 1
        self._tell("it could be used meanwhile: sending what changed since once more")
        return None

    def _is_held(self, token: str) -> bool:
        """Return whether the hold with a token still lasts, and renew that hold.

        True also if the service does not answer.
        """
        request = carver.HoldMoveRequest(volume_id=self._volume_id, token=token)
        try:
            self._transfer.HoldMove(request)
        except grpc.RpcError as error:
            return error.code() is not grpc.StatusCode.FAILED_PRECONDITION
        return True

    def _compare(self, snapshot_id: str) -> None:
        """Compare the checksums of all that both nodes hold; raise NotMoved if they differ.

        If the checksums differ, the volume is removed from the other node first. If they are equal,
        the snapshot is noted as the base of verified streams.
        """
        with streams_command.outgoing(self._verbs, snapshot_id) as source:
            own_checksum = source.checksum(as_json=self._options.as_json)
        self._require_same(own_checksum, self._ask("--checksum")["sha256"])
        self._proved = snapshot_id

    def _require_same(self, own_checksum: str, their_checksum: str) -> None:
        if own_checksum == their_checksum:
            return
        self._ask("--abort", "--yes")
        raise self._refused(
            f"{self._remote.node} holds something else than was sent, and it was removed"
            " there; look for a disk or memory with errors, then call again"
        )

    def _complete(self, move: carver.MoveState) -> dict[str, Any]:
        """Finish a committed move on the other node; return the volume's state there.

        The snapshots of the move are deleted on this node. Raises NotMoved if the other node no
        longer has the volume, or has moved the volume on.
        """
        there_state = self._ask("--status")
        if there_state["state"] == streams_command.ABSENT or there_state["release"] != move.release:
            raise self._refused(
                f"it is {self._remote.node}'s, which does not have it any more; --undo takes it"
                " back where no other node has it"
            )
        if there_state["state"] == tag.MOVED:
            raise self._refused(
                f"{self._remote.node} has moved it on; --finish deletes what is left here"
            )
        if there_state["state"] != tag.READY:
            there_state = self._ask("--finish", "--release", move.word)
        self._drop(kept_ids=())
        self._tell(
            f"{self._options.name} is {self._remote.node}'s; what is left here is under quarantine"
            " until --finish or --undo"
        )
        return there_state

    def _send(self, snapshot_id: str, base_id: str, release: str, offset_bytes: int = 0) -> None:
        """Send a snapshot to the other node; with `base_id`, only what changed since that snapshot.

        The stream is verified if it is of the whole volume, or if both nodes were found to hold the
        same base. Both nodes then read the parts that were sent again, and compare the checksums of
        the parts. A stream that continues at an offset is not verified, and neither is a stream to
        a version of Carver without --verify. Raises NotMoved if the checksums differ; the volume is
        removed from the other node first.
        """
        options = self._options
        arguments = ["volume", "receive", options.name]
        if options.device_class:
            arguments += ["--class", options.device_class]
        is_verified = self._verifies and base_id in ("", self._proved) and not offset_bytes
        if is_verified:
            arguments += ["--verify"]
        self._proved = ""
        with (
            streams_command.outgoing(self._verbs, snapshot_id, base_id) as source,
            streams_command.opened_spool(self._verbs) as parts,
        ):

            def write(put: Callable[[Bytes], object]) -> None:
                source.send(
                    put,
                    offset_bytes=offset_bytes,
                    release=release,
                    compress=options.compress,
                    note=parts.add,
                    as_json=options.as_json,
                )

            answer = self._remote.feed(*arguments, write=write)
            if is_verified and answer.get("verified"):
                self._require_same(source.checksum_of(parts), answer["verified"])
                self._proved = snapshot_id

    def _take(self) -> str:
        """Take a snapshot of the volume under a new name; return the snapshot's id.

        No name is used twice, because an earlier snapshot of that name may still be being erased.
        """
        taken_at = time.monotonic()
        snapshot_id = self._caller.snapshot(
            f"{self._prefix()}{secrets.token_hex(4)}", self._volume_id
        ).snapshot_id
        self._taken[snapshot_id] = taken_at
        return snapshot_id

    def _prefix(self) -> str:
        """Return the prefix of the names of this move's snapshots."""
        state = self._here()
        return f"{_PREFIX}{state.release[:_PREFIX_CHARACTERS]}-"

    def _snapshots(self) -> list[str]:
        """Return the ids of this move's snapshots."""
        prefix = self._prefix()
        snapshot_ids = (
            snapshot.snapshot_id for snapshot in self._caller.snapshots(volume_id=self._volume_id)
        )
        return [snapshot_id for snapshot_id in snapshot_ids if prefix in snapshot_id]

    def _own(self) -> dict[str, str]:
        """Return the ids of this move's readable snapshots, by their chains (`form.chain_of`)."""
        by_chain = {}
        for snapshot_id in self._snapshots():
            try:
                by_chain[streams_command.chain_of(self._verbs, snapshot_id)] = snapshot_id
            except grpc.RpcError:
                if streams_command.is_ready(self._verbs, snapshot_id):
                    raise
        return by_chain

    def _drop(self, kept_ids: tuple[str, ...]) -> None:
        """Delete this move's snapshots on this node, except those whose ids are in `kept_ids`."""
        for snapshot_id in self._snapshots():
            if snapshot_id not in kept_ids:
                self._caller.delete_snapshot(snapshot_id)

    def _refused(self, why: str) -> errors.NotMoved:
        return errors.NotMoved(self._volume_id, why)

    def _ask(self, *arguments: str) -> dict[str, Any]:
        return self._remote.ask("volume", "receive", self._options.name, *arguments, "--json")

    def _here(self) -> carver.MoveState:
        return self._transfer.MoveStatus(carver.NameRequest(name=self._volume_id))


def carry_out(
    verbs: VolumeVerbs, parsed: argparse.Namespace, remote_of: Callable[[str], Remote]
) -> None:
    """Carry out `carver volume move` with the options in `parsed`."""
    # Read the kubeconfig first: a wrong kubeconfig raises BadConfig before anything was done.
    cluster = access.of_file(Path(parsed.kubeconfig)) if parsed.kubeconfig else None
    state = verbs.caller.stub(TransferStub).MoveStatus(carver.NameRequest(name=parsed.name))
    node = parsed.to or state.node
    if not node:
        raise errors.Missing("--to")
    name = parsed.name_there or ids.readable_name(state.volume_id)
    options = Options(name, parsed.device_class, parsed.compress, parsed.json)
    move = Move(verbs, remote_of(node), state.volume_id, options, claim_moves.say)
    if state.node not in ("", node):
        raise errors.NotMoved(parsed.name, f"it moves to {state.node}")

    def confirmed(question: str) -> bool:
        return bool(parsed.yes) or terminal.confirmed(question)

    if parsed.status:
        streams_command.show(move.status(), as_json=parsed.json)
    elif parsed.finish:
        if not confirmed(f"Delete what is left of {parsed.name} here?"):
            raise errors.NotConfirmed(parsed.name)
        move.finish()
    elif parsed.undo:
        # Rebind the claim first, because the other node's volume must not be bound when it is
        # removed.
        if cluster and (there_state := move.status()["there"])["release"] == state.release:
            place = move.place_there(there_state)
            claim_moves.rebind(cluster, state.volume_id, place, yes=parsed.yes, undo=True)
        # The option --yes confirms only that the data on the other node may be lost. Whether the
        # volume is on no other node is a second question, which the operator is always asked.
        move.undo(confirmed=confirmed, is_nowhere=terminal.confirmed)
    elif parsed.there_is_none:
        if not confirmed(f"Is {name} on no other node any more, {node} or another?"):
            raise errors.NotConfirmed(parsed.name, "taken back")
        move.take_back()
    else:
        there_state = move.run()
        streams_command.show(there_state, as_json=parsed.json)
        if cluster or state.pv:
            place = move.place_there(there_state)
            if cluster:
                claim_moves.rebind(cluster, state.volume_id, place, yes=parsed.yes)
            else:
                claim_moves.say(claim_moves.steps(state, place))


@contextmanager
def _kept(transfer: TransferStub, volume_id: str) -> Iterator[str]:
    """Hold the volume for the `with`, so that no call can use the volume; yield the hold's token.

    A thread of this process renews the hold. So if this process is killed, the hold ends within
    HELD_SECONDS (moving.py).
    """
    request = carver.HoldMoveRequest(volume_id=volume_id, token=_hold(transfer, volume_id))
    end_event = threading.Event()

    def keep() -> None:
        while not end_event.wait(_KEEP_SECONDS):
            # A renewal of the hold fails while another call for the volume is running. The renewal
            # is repeated before the hold ends. If the hold is lost all the same, CommitMove refuses
            # the move.
            with suppress(grpc.RpcError):
                transfer.HoldMove(request)

    keeper = threading.Thread(target=keep, name="keep", daemon=True)
    keeper.start()
    try:
        yield request.token
    finally:
        end_event.set()
        keeper.join()
        transfer.ReleaseMove(request)


def _hold(transfer: TransferStub, volume_id: str) -> str:
    """Begin to hold the volume; return the hold's token.

    While another command holds the volume, such as a move that was killed, the call is retried up
    to `_HELD_LOOKS` times. Raises grpc.RpcError if the volume is in use, if the other hold does not
    end, or if the service refuses for another reason.
    """
    attempts = 0
    while True:
        try:
            return transfer.HoldMove(carver.HoldMoveRequest(volume_id=volume_id)).token
        except grpc.RpcError as error:
            state = transfer.MoveStatus(carver.NameRequest(name=volume_id))
            is_held = error.code() is grpc.StatusCode.FAILED_PRECONDITION
            if not is_held or state.in_use or attempts == _HELD_LOOKS:
                raise
        attempts += 1
        sleep(_LOOK_SECONDS)
