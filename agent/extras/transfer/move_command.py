"""`carver volume move`: send rounds of snapshots while the volume is used, and a last one.

Each call reads the records of both nodes and does what is left, so repeating the command continues
after a crash of either. docs/backup.md has the table of states.
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

# The interval of checks whether a volume is in use, and the number of checks after which another
# round is sent, so that the last one is short.
_LOOK_SECONDS = 2.0
_LOOKS = 150
_OLD_SECONDS = _LOOKS * _LOOK_SECONDS
# A hold ends after HELD_SECONDS (agent.extras.transfer.moving).
_KEEP_SECONDS = 8.0
# Checks while another command holds it: longer than the hold of one that was killed.
_HELD_LOOKS = 20
# Last rounds of one command whose hold ended, as on a node that was stopped for a while.
_MOST_LOST_HOLDS = 5
_PREFIX = "move-"
_PREFIX_CHARACTERS = 12


@dataclass(frozen=True)
class Options:
    """The volume's name and class there, and the form of its streams."""

    name: str
    device_class: str = ""
    compress: bool = False
    as_json: bool = False


class Move:
    """One volume's move. `tell` is called with each step. Raises NodeRefused."""

    def __init__(
        self,
        at: VolumeVerbs,
        remote: Remote,
        volume_id: str,
        options: Options,
        tell: Callable[[str], None],
    ) -> None:
        self._at, self._caller = at, at.caller
        self._transfer = at.caller.stub(TransferStub)
        self._remote = remote
        self._volume_id = volume_id
        self._options = options
        self._tell = tell
        # Whether the other node's Carver takes --verify; the snapshot that both nodes were found to
        # hold; when each was taken (monotonic). Only by this run of the command.
        self._verifies = False
        self._proved = ""
        self._taken: dict[str, float] = {}
        # How many last rounds were in vain as their hold ended.
        self._lost_holds = 0

    def run(self) -> dict[str, Any]:
        """Move it, and return its state there. The volume here stays in quarantine.

        Waits until it is not in use. Raises NotMoved, NodeRefused.
        """
        request = carver.BeginMoveRequest(volume_id=self._volume_id, node=self._remote.node)
        begun = self._transfer.BeginMove(request)
        while begun.state != tag.MOVED:
            begun = self._round(begun) or begun
        return self._complete(begun)

    def status(self) -> dict[str, Any]:
        """The move's state here and there."""
        here = streams_command.values(self._here())
        # A text in the JSON since 0.1.0.
        here["in_use"] = str(here["in_use"])
        return {"here": {**here, "word": ""}, "there": self._ask("--status")}

    def finish(self) -> None:
        """Delete what is left here, if the other node has the volume; raises NotMoved."""
        here = self._here()
        if here.state == tag.MOVED:
            there = self._ask("--status")
            is_theirs = there["release"] == here.release
            if not is_theirs or there["state"] not in (tag.READY, tag.MOVED):
                raise self._refused(
                    f"{self._remote.node} does not have it as a volume of its own: go on with the"
                    " move, or --undo it. Where another node has it by now, --there-is-none and"
                    " then `carver volume delete` remove what is here"
                )
        self._drop(keep=())
        self._transfer.FinishMove(carver.VolumeRequest(volume_id=self._volume_id))

    def undo(self, *, confirmed: Callable[[str], bool], is_nowhere: Callable[[str], bool]) -> None:
        """Make it this node's again, and remove it there.

        `confirmed` is asked where the other node has finished it: what was written there is lost.
        `is_nowhere` is asked where that node has none but may have finished it: it may be a third
        node's by now. Raises NotMoved, NotConfirmed.
        """
        name, node = self._options.name, self._remote.node
        here = self._here()
        if not here.node:
            raise self._refused("no move of it was begun")
        if here.state == tag.WIPING:
            raise self._refused("what is left of it here is being deleted")
        there = self._ask("--status")
        # A volume of that name that did not come by this move is not touched.
        is_theirs = there["state"] != streams_command.ABSENT and there["release"] == here.release
        if is_theirs and there["state"] == tag.MOVED:
            raise self._refused(f"{node} has moved it on; --undo that move there first")
        if is_theirs and there["state"] == tag.READY:
            lost = f"What was written to {name} on {node} since it moved is lost. Take it back?"
            if not confirmed(lost):
                raise errors.NotConfirmed(name, "taken back")
            self._ask("--withdraw", "--release", here.word)
        elif here.state == tag.MOVED and not (
            # It was never finished there, or an --undo has withdrawn it.
            is_theirs and (there["state"] == tag.RECEIVING or there["finishing"])
        ):
            none = f"{node} has no {name} that came by this move"
            if not is_nowhere(f"{none}. Is it on no other node either?"):
                raise self._refused(
                    f"{none}, but may have had it, and moved it on or deleted it. Look on each"
                    " node (`carver volume list`); where none has it, --there-is-none takes it"
                    " back"
                )
        if is_theirs:
            self._ask("--abort", "--yes")
        self.take_back()
        self._tell(f"{name} is this node's, and {node} has none of it")

    def take_back(self) -> None:
        """Make it this node's again; the caller knows that no other node has it."""
        # First, as their names have the move's release in them.
        self._drop(keep=())
        self._transfer.UndoMove(carver.VolumeRequest(volume_id=self._volume_id))

    def place_there(self, there: Mapping[str, Any]) -> Place:
        """The volume's place for Kubernetes; `there` is its state on the other node."""
        node = self._remote.ask("status", "--json")
        return Place(there["volume_id"], node["node"], node["driver"])

    def _round(self, begun: carver.MoveState) -> carver.MoveState | None:
        """Do one step; return the move's state if that was the last."""
        there, own = self._ask("--status"), self._own()
        release = begun.release
        if there["state"] != streams_command.ABSENT and there["release"] != release:
            raise self._refused(
                f"{self._remote.node} has another volume {self._options.name!r}; name it otherwise:"
                " --as NAME"
            )
        self._verifies = bool(there.get("verifies"))
        base = own.get(there["chain"], "")
        has_base = bool(base) or not there["chain"]
        if there["into"] in own and has_base:
            # A round was cut off: continue it.
            self._send(own[there["into"]], base, release, there["offset_bytes"])
            return None
        if there["into"] or not has_base:
            # For example after a snapshot's area was full.
            self._tell("cannot continue from what was sent; sending all of it again")
            self._ask("--abort", "--yes")
            return None
        self._drop(keep=(base,))
        if not base:
            self._tell("sending all of it")
            self._send(self._take(), "", release)
            return None
        if self._verifies and base != self._proved:
            self._tell("comparing what both hold")
            self._compare(base)
        if self._is_old(base):
            # The last round is to be short.
            self._send(self._take(), base, release)
            return None
        if self._waits(base, release):
            return None
        return self._last(base, release)

    def _is_old(self, base: str) -> bool:
        """Whether much may have changed since a snapshot was taken."""
        taken = self._taken.get(base)
        return taken is None or time.monotonic() - taken > _OLD_SECONDS

    def _waits(self, base: str, release: str) -> bool:
        """Wait while the volume is used; return whether another round is due before the last.

        It is after a round was sent meanwhile, or where the base is lost because its area is full.
        """
        for look in range(_LOOKS):
            here = self._here()
            if base not in self._own().values():
                return True
            if not here.in_use:
                return False
            if not look:
                self._tell("it is in use: stop what uses it; meanwhile what changes is sent")
            sleep(_LOOK_SECONDS)
        self._send(self._take(), base, release)
        return True

    def _last(self, base: str, release: str) -> carver.MoveState | None:
        """Send what changed since the last round while it is held, and commit the move.

        None where the hold ended meanwhile, so that another round is due; a few times at most.
        """
        self._tell("it is not in use: sending what changed since, while it cannot be used")
        with _kept(self._transfer, self._volume_id) as token:
            snapshot_id = self._take()
            self._send(snapshot_id, base, release)
            if self._proved != snapshot_id:
                # 0.1.0 has no --verify.
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
        """Whether the hold of that token goes on for all that is known."""
        request = carver.HoldMoveRequest(volume_id=self._volume_id, token=token)
        try:
            self._transfer.HoldMove(request)
        except grpc.RpcError as error:
            return error.code() is not grpc.StatusCode.FAILED_PRECONDITION
        return True

    def _compare(self, snapshot_id: str) -> None:
        """Compare checksums of all that both hold; raises NotMoved."""
        with streams_command.outgoing(self._at, snapshot_id) as source:
            here = source.checksum(as_json=self._options.as_json)
        self._require_same(here, self._ask("--checksum")["sha256"])
        self._proved = snapshot_id

    def _require_same(self, here: str, there: str) -> None:
        if here == there:
            return
        self._ask("--abort", "--yes")
        raise self._refused(
            f"{self._remote.node} holds something else than was sent, and it was removed"
            " there; look for a disk or memory with errors, then call again"
        )

    def _complete(self, begun: carver.MoveState) -> dict[str, Any]:
        """Finish a committed move on the other node."""
        there = self._ask("--status")
        if there["state"] == streams_command.ABSENT or there["release"] != begun.release:
            raise self._refused(
                f"it is {self._remote.node}'s, which does not have it any more; --undo takes it"
                " back where no other node has it"
            )
        if there["state"] == tag.MOVED:
            raise self._refused(
                f"{self._remote.node} has moved it on; --finish deletes what is left here"
            )
        if there["state"] != tag.READY:
            there = self._ask("--finish", "--release", begun.word)
        self._drop(keep=())
        self._tell(
            f"{self._options.name} is {self._remote.node}'s; what is left here is under quarantine"
            " until --finish or --undo"
        )
        return there

    def _send(self, snapshot_id: str, base: str, release: str, offset_bytes: int = 0) -> None:
        """Send a snapshot, or what changed since its base, to the other node.

        Where both were found to hold the same base, both read again only what was sent, and compare
        that. Raises NotMoved where they differ.
        """
        options = self._options
        words = ["volume", "receive", options.name]
        if options.device_class:
            words += ["--class", options.device_class]
        is_verified = self._verifies and base in ("", self._proved) and not offset_bytes
        if is_verified:
            words += ["--verify"]
        self._proved = ""
        with (
            streams_command.outgoing(self._at, snapshot_id, base) as source,
            streams_command.opened_spool(self._at) as parts,
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

            answer = self._remote.feed(*words, write=write)
            if is_verified and answer.get("verified"):
                self._require_same(source.checksum_of(parts), answer["verified"])
                self._proved = snapshot_id

    def _take(self) -> str:
        """Take a snapshot under a new name, as an earlier one may still be being erased."""
        begun = time.monotonic()
        taken = self._caller.snapshot(
            f"{self._prefix()}{secrets.token_hex(4)}", self._volume_id
        ).snapshot_id
        self._taken[taken] = begun
        return taken

    def _prefix(self) -> str:
        """The prefix of the names of this move's snapshots."""
        begun = self._here()
        return f"{_PREFIX}{begun.release[:_PREFIX_CHARACTERS]}-"

    def _snapshots(self) -> list[str]:
        """The ids of this move's snapshots."""
        prefix = self._prefix()
        found = (one.snapshot_id for one in self._caller.snapshots(volume_id=self._volume_id))
        return [one for one in found if prefix in one]

    def _own(self) -> dict[str, str]:
        """Those of them that are readable, by their chains."""
        found = {}
        for one in self._snapshots():
            try:
                found[streams_command.chain_of(self._at, one)] = one
            except grpc.RpcError:
                if streams_command.is_ready(self._at, one):
                    raise
        return found

    def _drop(self, keep: tuple[str, ...]) -> None:
        """Delete the snapshots of this move except some."""
        for one in self._snapshots():
            if one not in keep:
                self._caller.delete_snapshot(one)

    def _refused(self, why: str) -> errors.NotMoved:
        return errors.NotMoved(self._volume_id, why)

    def _ask(self, *words: str) -> dict[str, Any]:
        return self._remote.ask("volume", "receive", self._options.name, *words, "--json")

    def _here(self) -> carver.MoveState:
        return self._transfer.MoveStatus(carver.NameRequest(name=self._volume_id))


def carry_out(
    at: VolumeVerbs, parsed: argparse.Namespace, remote_of: Callable[[str], Remote]
) -> None:
    """Do what the flags of `carver volume move` ask for."""
    # First, as it raises BadConfig.
    cluster = access.of_file(Path(parsed.kubeconfig)) if parsed.kubeconfig else None
    found = at.caller.stub(TransferStub).MoveStatus(carver.NameRequest(name=parsed.name))
    node = parsed.to or found.node
    if not node:
        raise errors.Missing("--to")
    name = parsed.name_there or ids.readable_name(found.volume_id)
    options = Options(name, parsed.device_class, parsed.compress, parsed.json)
    move = Move(at, remote_of(node), found.volume_id, options, claim_moves.say)
    if found.node not in ("", node):
        raise errors.NotMoved(parsed.name, f"it moves to {found.node}")

    def confirmed(question: str) -> bool:
        return bool(parsed.yes) or terminal.confirmed(question)

    if parsed.status:
        streams_command.show(move.status(), as_json=parsed.json)
    elif parsed.finish:
        if not confirmed(f"Delete what is left of {parsed.name} here?"):
            raise errors.NotConfirmed(parsed.name)
        move.finish()
    elif parsed.undo:
        # First: the other node's volume must not be a claim's when it is removed.
        if cluster and (there := move.status()["there"])["release"] == found.release:
            place = move.place_there(there)
            claim_moves.rebind(cluster, found.volume_id, place, yes=parsed.yes, undo=True)
        # --yes says that what is there may be lost, and not that it is nowhere.
        move.undo(confirmed=confirmed, is_nowhere=terminal.confirmed)
    elif parsed.there_is_none:
        if not confirmed(f"Is {name} on no other node any more, {node} or another?"):
            raise errors.NotConfirmed(parsed.name, "taken back")
        move.take_back()
    else:
        there = move.run()
        streams_command.show(there, as_json=parsed.json)
        if cluster or found.pv:
            place = move.place_there(there)
            if cluster:
                claim_moves.rebind(cluster, found.volume_id, place, yes=parsed.yes)
            else:
                claim_moves.say(claim_moves.steps(found, place))


@contextmanager
def _kept(transfer: TransferStub, volume_id: str) -> Iterator[str]:
    """Inside, the volume cannot be used; gives the token that proves it.

    Where this process ends, so does that.
    """
    request = carver.HoldMoveRequest(volume_id=volume_id, token=_hold(transfer, volume_id))
    ended = threading.Event()

    def keep() -> None:
        while not ended.wait(_KEEP_SECONDS):
            # A call that met another one is repeated in time. Where the hold is lost, CommitMove
            # refuses.
            with suppress(grpc.RpcError):
                transfer.HoldMove(request)

    keeper = threading.Thread(target=keep, name="keep", daemon=True)
    keeper.start()
    try:
        yield request.token
    finally:
        ended.set()
        keeper.join()
        transfer.ReleaseMove(request)


def _hold(transfer: TransferStub, volume_id: str) -> str:
    """Hold it; wait for the hold of a command that was killed, such as an earlier move, to end."""
    looks = 0
    while True:
        try:
            return transfer.HoldMove(carver.HoldMoveRequest(volume_id=volume_id)).token
        except grpc.RpcError as error:
            here = transfer.MoveStatus(carver.NameRequest(name=volume_id))
            is_held = error.code() is grpc.StatusCode.FAILED_PRECONDITION
            if not is_held or here.in_use or looks == _HELD_LOOKS:
                raise
        looks += 1
        sleep(_LOOK_SECONDS)
