"""`carver volume move`: send snapshots of a volume while it is in use, then hand the volume over.

A move goes in rounds. Each round takes a snapshot, and sends what changed since the snapshot of the
round before. Once the volume is not in use, it is held: no call can use it. A last, short round is
sent, both nodes compare checksums, and the volume becomes the other node's.

Each step first reads the records of both nodes and does what is left. So after a crash of either
node, or of this command, the same command continues the move. docs/backup.md has the table of
states.
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

# Interval of the checks whether a volume is in use, in seconds.
_LOOK_SECONDS = 2.0
# Number of checks after which another round is sent, so that the last round is short.
_LOOKS = 150
# Age, in seconds, of a round's snapshot at which another round is sent before the last one.
_OLD_SECONDS = _LOOKS * _LOOK_SECONDS
# Interval at which a hold is renewed, in seconds; the hold ends after HELD_SECONDS (moving.py).
_KEEP_SECONDS = 8.0
# Number of attempts to hold a volume that another command holds. In total they take longer than the
# hold of a command that was killed.
_HELD_LOOKS = 20
# The most last rounds of one command that are repeated because the hold ended before the commit, as
# it does on a node that is suspended for a while.
_MOST_LOST_HOLDS = 5
# Prefix of the names of a move's snapshots, and how many characters of the move's release follow.
_PREFIX = "move-"
_PREFIX_CHARACTERS = 12


@dataclass(frozen=True)
class Options:
    """Options of a move: the volume's name and class on the other node, and the streams' form."""

    name: str
    device_class: str = ""
    compress: bool = False
    as_json: bool = False


class Move:
    """The move of one volume to another node. Raises NodeRefused.

    `tell` is called with a line for the operator at each step.
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
        # Whether Carver on the other node takes --verify (0.1.0 does not).
        self._verifies = False
        # The id of the snapshot whose contents this run has found equal on both nodes.
        self._proved = ""
        # When this run took each snapshot (time.monotonic()), by the snapshot's id.
        self._taken: dict[str, float] = {}
        # Number of last rounds in vain, as the hold ended before the commit.
        self._lost_holds = 0

    def run(self) -> dict[str, Any]:
        """Move the volume; return its state on the other node.

        Waits until the volume is not in use. What is left on this node stays under quarantine until
        `finish` or `undo`. Raises NotMoved, NodeRefused.
        """
        request = carver.BeginMoveRequest(volume_id=self._volume_id, node=self._remote.node)
        move = self._transfer.BeginMove(request)
        while move.state != tag.MOVED:
            move = self._round(move) or move
        return self._complete(move)

    def status(self) -> dict[str, Any]:
        """Return the move's state on this node and on the other one."""
        own_state = streams_command.values(self._here())
        # A string in the JSON output since 0.1.0, and so kept.
        own_state["in_use"] = str(own_state["in_use"])
        return {"here": {**own_state, "word": ""}, "there": self._ask("--status")}

    def finish(self) -> None:
        """Delete what is left on this node of a volume that the other node has.

        Raises NotMoved where the other node does not have the volume as its own.
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

        Asks the operator in two cases:

        - `confirmed`, where the other node has finished the volume: what was written there is lost.
        - `is_nowhere`, where the other node has no such volume, but may have finished it: by now
          the volume may be a third node's.

        Raises NotMoved, NotConfirmed.
        """
        name, node = self._options.name, self._remote.node
        own_state = self._here()
        if not own_state.node:
            raise self._refused("no move of it was begun")
        if own_state.state == tag.WIPING:
            raise self._refused("what is left of it here is being deleted")
        there_state = self._ask("--status")
        # The other node may have a volume of that name that did not come by this move, and which
        # is left alone.
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
            # Safe without a question: the other node never finished it, or an --undo withdrew it.
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
        """Make the volume this node's again, without asking another node.

        The caller knows that no other node has the volume.
        """
        # The snapshots are deleted first, as their names contain the move's release.
        self._drop(kept_ids=())
        self._transfer.UndoMove(carver.VolumeRequest(volume_id=self._volume_id))

    def place_there(self, there_state: Mapping[str, Any]) -> Place:
        """Return the volume's place for Kubernetes: its id, node and driver on the other node.

        `there_state` is the volume's state on the other node.
        """
        node = self._remote.ask("status", "--json")
        return Place(there_state["volume_id"], node["node"], node["driver"])

    def _round(self, move: carver.MoveState) -> carver.MoveState | None:
        """Do one step of the move; return the move's state if that step was the last, else None."""
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
            # A round was cut off. Continue it at the offset that the other node has recorded.
            self._send(
                own_snapshots[there_state["into"]], base_id, release, there_state["offset_bytes"]
            )
            return None
        if there_state["into"] or not has_base:
            # A snapshot was lost, for example because its COW store was full. Begin anew.
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
            # Send another round first, so that the last round is short.
            self._send(self._take(), base_id, release)
            return None
        if self._waits(base_id, release):
            return None
        return self._last(base_id, release)

    def _is_old(self, base_id: str) -> bool:
        """Return whether much may have changed since a snapshot was taken, by its age."""
        taken_at = self._taken.get(base_id)
        return taken_at is None or time.monotonic() - taken_at > _OLD_SECONDS

    def _waits(self, base_id: str, release: str) -> bool:
        """Wait while the volume is in use; return whether to begin again with a further round.

        True after a round that was sent while waiting, and where the base was lost because its COW
        store is full. False once the volume is not in use, so that the last round can follow.
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
        """Hold the volume, send what changed since the last round, compare, and commit the move.

        Returns None where the hold ended meanwhile, so that another round is needed; after
        `_MOST_LOST_HOLDS` times, the refused commit is raised.
        """
        self._tell("it is not in use: sending what changed since, while it cannot be used")
        with _kept(self._transfer, self._volume_id) as token:
            snapshot_id = self._take()
            self._send(snapshot_id, base_id, release)
            if self._proved != snapshot_id:
                # The other node's Carver is 0.1.0 and has no --verify.
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
        """Return whether a token's hold still lasts; also true if the service does not answer."""
        request = carver.HoldMoveRequest(volume_id=self._volume_id, token=token)
        try:
            self._transfer.HoldMove(request)
        except grpc.RpcError as error:
            return error.code() is not grpc.StatusCode.FAILED_PRECONDITION
        return True

    def _compare(self, snapshot_id: str) -> None:
        """Compare the checksums of all that both nodes hold; raises NotMoved if they differ."""
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

        Raises NotMoved where the other node no longer has the volume, or has moved it on.
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
        """Send a snapshot, or what changed since its base, to the other node.

        Where both nodes were found to hold the same base, both then read again only the parts that
        were sent, and compare their checksums. Raises NotMoved where the checksums differ.
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
        """Take a snapshot; return its id.

        Each gets a new name, as an earlier snapshot may still be in the course of being erased.
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
        """Return the ids of this move's readable snapshots, by their chains."""
        by_chain = {}
        for snapshot_id in self._snapshots():
            try:
                by_chain[streams_command.chain_of(self._verbs, snapshot_id)] = snapshot_id
            except grpc.RpcError:
                if streams_command.is_ready(self._verbs, snapshot_id):
                    raise
        return by_chain

    def _drop(self, kept_ids: tuple[str, ...]) -> None:
        """Delete the snapshots of this move, except those in `kept_ids`."""
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
    """Do what the options of `carver volume move` ask for."""
    # The kubeconfig is read first, as a wrong one raises BadConfig before anything was done.
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
        # The claim is rebound first: the other node's volume must not be bound when it is removed.
        if cluster and (there_state := move.status()["there"])["release"] == state.release:
            place = move.place_there(there_state)
            claim_moves.rebind(cluster, state.volume_id, place, yes=parsed.yes, undo=True)
        # --yes answers whether what is on the other node may be lost. Whether the volume is on no
        # other node is a second question, which the operator is always asked.
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
    """Hold the volume for the `with`, so that no call can use it; yield the hold's token.

    A thread of this process renews the hold, so the hold ends soon after this process does.
    """
    request = carver.HoldMoveRequest(volume_id=volume_id, token=_hold(transfer, volume_id))
    end_event = threading.Event()

    def keep() -> None:
        while not end_event.wait(_KEEP_SECONDS):
            # A renewal that meets another call for the volume fails, and is repeated before the
            # hold ends. Where the hold is lost, CommitMove refuses the move.
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
    """Hold the volume; return the hold's token.

    Waits for the end of another hold, such as that of an earlier move that was killed.
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
