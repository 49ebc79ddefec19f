"""`carver volume move`: move a volume to another node, which is reached by ssh.

This node has the volume. The steps of a move are in move.py; this module has the two ways to the
nodes. The command reads the snapshots' devices itself, and writes each stream to the command
`carver volume receive` of the other node.
"""

import argparse
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from agent.cli import terminal
from agent.cli.volume_verbs import VolumeVerbs
from agent.core import errors, ids
from agent.extras.kubernetes import access
from agent.extras.kubernetes.rebinding import Place
from agent.extras.transfer import claim_moves, streams_command
from agent.extras.transfer.move import Differ, Move, Sent, There, Trouble, prefix_of
from agent.extras.transfer.remote import Remote
from mount.block_io import Bytes
from proto import carver_pb2 as carver
from proto.carver_pb2_grpc import TransferStub


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


# What the reader of an error of the command can do, as the end of its sentence.
_ADVICE = {
    Trouble.NOT_THEIRS: (
        ": go on with the move, or --undo it. If another node has it by now, and its pod reads its"
        " data there, see docs/operations.md: --there-is-none makes what is here a volume again"
    ),
    Trouble.MOVED_ON: "; --undo that move there first",
    Trouble.ENDED: "; --finish ends the move here, once the other node has it",
    Trouble.NOWHERE: (
        ". Look on each node (`carver volume list`), with all its volume groups; where none has it,"
        " --there-is-none takes it back"
    ),
    Trouble.LOST: "; --undo takes it back where no other node has it",
    Trouble.NAME_TAKEN: "; name it otherwise: --as NAME",
    Trouble.DIFFERENT: ", then call again",
}


def move_of(
    verbs: VolumeVerbs,
    remote: Remote,
    volume_id: str,
    options: Options,
    tell: Callable[[str], None],
) -> Move:
    """Return the move of a volume of this node to another node."""
    source, destination = OwnNode(verbs, volume_id), OtherNode(verbs, remote, options)
    return Move(source, destination, volume_id, tell, _ADVICE)


class OwnNode:
    """The node of this command, as the `Source` of a move: calls by the service's socket."""

    def __init__(self, verbs: VolumeVerbs, volume_id: str) -> None:
        self._verbs, self._caller = verbs, verbs.caller
        self._transfer = verbs.caller.stub(TransferStub)
        self._volume_id = volume_id

    def begin(self, node: str) -> carver.MoveState:
        """Record that the volume moves to a node."""
        return self._transfer.BeginMove(
            carver.BeginMoveRequest(volume_id=self._volume_id, node=node)
        )

    def state(self) -> carver.MoveState:
        """Return the state of the volume and of its move."""
        return self._transfer.MoveStatus(carver.NameRequest(name=self._volume_id))

    def snapshots(self) -> Mapping[str, str]:
        """Return the ids of the move's readable snapshots, by their chains."""
        by_chain = {}
        for snapshot_id in self._snapshots():
            try:
                by_chain[streams_command.chain_of(self._verbs, snapshot_id)] = snapshot_id
            except grpc.RpcError:
                if streams_command.is_ready(self._verbs, snapshot_id):
                    raise
        return by_chain

    def take(self) -> str:
        """Take a snapshot of the volume under a new name; return the snapshot's id."""
        name = f"{prefix_of(self.state().release)}{secrets.token_hex(4)}"
        return self._caller.snapshot(name, self._volume_id).snapshot_id

    def drop(self, kept_ids: Sequence[str]) -> None:
        """Delete the move's snapshots, except those whose ids are in `kept_ids`."""
        for snapshot_id in self._snapshots():
            if snapshot_id not in kept_ids:
                self._caller.delete_snapshot(snapshot_id)

    def hold(self, token: str = "") -> str:
        """Hold the volume, or renew the hold with a token; return the token."""
        request = carver.HoldMoveRequest(volume_id=self._volume_id, token=token)
        return self._transfer.HoldMove(request).token

    def release(self, token: str) -> None:
        """End the hold with a token."""
        self._transfer.ReleaseMove(carver.HoldMoveRequest(volume_id=self._volume_id, token=token))

    def commit(self, snapshot_id: str, token: str) -> carver.MoveState:
        """Record that the volume is the other node's; return the state, with the word."""
        return self._transfer.CommitMove(
            carver.CommitMoveRequest(
                volume_id=self._volume_id, snapshot_id=snapshot_id, token=token
            )
        )

    def undo(self, release: str, *, only_begun: bool = False) -> None:
        """Make the volume this node's again, and forget the move."""
        self._transfer.UndoMove(
            carver.MoveRequest(volume_id=self._volume_id, release=release, only_begun=only_begun)
        )

    def finish(self, release: str) -> None:
        """Delete what is left of the volume."""
        self._transfer.FinishMove(carver.MoveRequest(volume_id=self._volume_id, release=release))

    def _snapshots(self) -> list[str]:
        """Return the ids of this move's snapshots."""
        prefix = prefix_of(self.state().release)
        snapshot_ids = (
            snapshot.snapshot_id for snapshot in self._caller.snapshots(volume_id=self._volume_id)
        )
        return [snapshot_id for snapshot_id in snapshot_ids if prefix in snapshot_id]


class OtherNode:
    """The other node, as the `Destination` of a move: commands by ssh."""

    def __init__(self, verbs: VolumeVerbs, remote: Remote, options: Options) -> None:
        self._verbs, self._remote, self._options = verbs, remote, options

    @property
    def node(self) -> str:
        """The node's name, as ssh knows it."""
        return self._remote.node

    @property
    def name(self) -> str:
        """The volume's name there."""
        return self._options.name

    def status(self) -> There:
        """Return the state of the volume there."""
        return self._ask("--status")

    def send(
        self, snapshot_id: str, base_id: str, release: str, offset_bytes: int, *, is_verified: bool
    ) -> Sent:
        """Send a snapshot, or what changed since `base_id`. Raises Differ if it arrived altered."""
        options = self._options
        arguments = ["volume", "receive", options.name]
        if options.device_class:
            arguments += ["--class", options.device_class]
        if is_verified:
            arguments += ["--verify"]
        with (
            streams_command.outgoing(self._verbs, snapshot_id, base_id) as source,
            streams_command.opened_spool(self._verbs) as parts,
        ):
            summary: dict[str, Any] = {}

            def write(put: Callable[[Bytes], object]) -> None:
                summary.update(
                    source.send(
                        put,
                        offset_bytes=offset_bytes,
                        release=release,
                        compress=options.compress,
                        note=parts.add,
                        display=streams_command.display_of(as_json=options.as_json),
                    )
                )

            answer = self._remote.feed(*arguments, write=write)
            is_equal = is_verified and bool(answer.get("verified"))
            if is_equal and source.checksum_of(parts) != answer["verified"]:
                raise Differ
            return Sent(is_equal, summary.get("data_bytes", 0))

    def compare(self, snapshot_id: str) -> None:
        """Compare the checksums of a whole snapshot and of what is there."""
        with streams_command.outgoing(self._verbs, snapshot_id) as source:
            display = streams_command.display_of(as_json=self._options.as_json)
            own_checksum = source.checksum(display)
        if own_checksum != self._ask("--checksum")["sha256"]:
            raise Differ

    def finish(self, word: str) -> There:
        """Make the volume one of that node; return its state there."""
        return self._ask("--finish", "--release", word)

    def withdraw(self, word: str) -> None:
        """Undo `finish`, so that the volume can only be removed."""
        self._ask("--withdraw", "--release", word)

    def abort(self, release: str) -> None:
        """Erase and remove what was received. Raises NodeRefused if another move brings it.

        The command there takes no digest, as that of version 0.1.0 does not.
        """
        found = self.status()["release"]
        if found and found != release:
            raise errors.NodeRefused(self.node, "volume receive --abort", "it is in another move")
        self._ask("--abort", "--yes")

    def _ask(self, *arguments: str) -> dict[str, Any]:
        return self._remote.ask("volume", "receive", self._options.name, *arguments, "--json")


def status(move: Move) -> dict[str, Any]:
    """Return the state of the move on this node (`here`) and on the other node (`there`).

    The secret word of the move is left out.
    """
    own_state = streams_command.values(move.source.state())
    # `in_use` was a string in the JSON output of 0.1.0, so it is still a string.
    own_state["in_use"] = str(own_state["in_use"])
    return {"here": {**own_state, "word": ""}, "there": move.destination.status()}


def _place_there(remote: Remote, there_state: There) -> Place:
    """Return the volume's id, node and driver on the other node, for its PersistentVolume.

    `there_state` is the volume's state on the other node.
    """
    node = remote.ask("status", "--json")
    return Place(there_state["volume_id"], node["node"], node["driver"])


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
    remote = remote_of(node)
    move = move_of(verbs, remote, state.volume_id, options, claim_moves.say)
    if state.node not in ("", node):
        raise errors.NotMoved(parsed.name, f"it moves to {state.node}")

    def confirmed(question: str) -> bool:
        return bool(parsed.yes) or terminal.confirmed(question)

    if parsed.status:
        streams_command.show(status(move), as_json=parsed.json)
    elif parsed.finish:
        if not confirmed(f"Delete what is left of {parsed.name} here?"):
            raise errors.NotConfirmed(parsed.name)
        move.finish()
    elif parsed.undo:
        # Rebind the claim first, because the other node's volume must not be bound when it is
        # removed.
        if cluster and (there_state := move.destination.status())["release"] == state.release:
            place = _place_there(remote, there_state)
            claim_moves.rebind(cluster, state.volume_id, place, yes=parsed.yes, undo=True)
        # The option --yes confirms only that the data on the other node may be lost. Whether the
        # volume is on no other node is a second question, which the operator is always asked.
        move.undo(confirmed=confirmed, is_nowhere=terminal.confirmed)
    elif parsed.there_is_none:
        if not confirmed(f"Is {name} on no other node any more, {node} or another?"):
            raise errors.NotConfirmed(parsed.name, "taken back")
        move.take_back(state.release)
    else:
        there_state = move.run()
        streams_command.show(dict(there_state), as_json=parsed.json)
        if cluster or state.pv:
            place = _place_there(remote, there_state)
            if cluster:
                claim_moves.rebind(cluster, state.volume_id, place, yes=parsed.yes)
            else:
                claim_moves.say(claim_moves.steps(state, place))
