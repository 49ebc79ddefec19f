"""The arguments of `carver snapshot send`, `carver volume receive` and `carver volume move`."""

import argparse
import shlex
import sys
from typing import TYPE_CHECKING

from agent.cli.words import CommandLine, Commands, name_of, verb
from agent.core import errors

if TYPE_CHECKING:
    from agent.cli.volume_verbs import VolumeVerbs


def add(command_line: CommandLine) -> None:
    """Add the commands of the extra `transfer` to the command line."""
    _add_receive(command_line.volume)
    _add_move(command_line.volume)
    _add_send(command_line.snapshot)


def _add_receive(verbs: Commands) -> None:
    """Add the subcommand `carver volume receive` and its arguments."""
    receive = verb(
        verbs,
        "receive",
        "take a volume, or what changed of it, from a stream; when it is whole, --finish it",
        _receive,
    )
    receive.add_argument("name", metavar="NAME", help="its name on this node")
    receive.add_argument("--class", dest="device_class", default="", help="else the default one")
    _add_actions(
        receive,
        ("status", "show its state, and the offset where a stream continues"),
        ("checksum", "show the checksum of all that it holds"),
        ("finish", "make it a volume of this node, which takes no more streams"),
        ("withdraw", "undo --finish, for a move that is undone"),
        ("abort", "erase and remove what was received"),
    )
    receive.add_argument(
        "--verify",
        action="store_true",
        help="read what was received from the disk again, and show its checksum, as JSON",
    )
    receive.add_argument("--release", default="", help="the word by which its source lets it go")
    receive.add_argument(
        "--source-is-lost",
        action="store_true",
        help="with --finish: needs no word, as the node that it moves from is lost with its disks"
        " (asks)",
    )
    _add_kubeconfig(
        receive, "with --finish: rebind the claim of the stream's volume to it, step by step"
    )
    receive.add_argument("--json", action="store_true", help="as JSON, progress too")


def _add_actions(verb: argparse.ArgumentParser, *actions: tuple[str, str]) -> None:
    """Add options that exclude each other to a subcommand; each has a name and a help text."""
    choice = verb.add_mutually_exclusive_group()
    for word, text in actions:
        choice.add_argument(f"--{word}", action="store_true", help=text)


def _add_kubeconfig(verb: argparse.ArgumentParser, text: str) -> None:
    # The option --kubeconfig has the name of a setting, so a wrong path raises that setting's
    # error.
    verb.add_argument("--kubeconfig", metavar="FILE", help=text)
    verb.add_argument("--yes", action="store_true", help="do not ask")


def _receive(verbs: "VolumeVerbs", parsed: argparse.Namespace) -> None:
    from agent.extras.transfer import streams_command

    if parsed.source_is_lost and not parsed.finish:
        raise errors.BadField("--source-is-lost", "goes with --finish")
    if not parsed.kubeconfig:
        result = streams_command.received(verbs, parsed, sys.stdin.buffer)
        streams_command.show(result, as_json=parsed.json or parsed.verify)
        return
    if not parsed.finish:
        raise errors.BadField("--kubeconfig", "goes with --finish")
    # Import `claim_moves` only here. A move runs the other forms of this command again and again,
    # and each run would import the module.
    from agent.extras.transfer import claim_moves

    claim_moves.finish(verbs, parsed)


def _add_send(verbs: Commands) -> None:
    """Add the subcommand `carver snapshot send` and its arguments."""
    send = verb(
        verbs,
        "send",
        "write a snapshot as a stream to the standard output",
        _send,
        name_of("snapshot"),
        name_of("snapshot", "--since", "of the volume, older: only what changed since"),
    )
    send.add_argument(
        "--offset",
        type=int,
        default=0,
        metavar="BYTES",
        help="where to continue, as `carver volume receive NAME --status` shows there",
    )
    send.add_argument(
        "--compare",
        action="store_true",
        help="with --since: read both, and send only what differs, for a slow line",
    )
    send.add_argument("--compress", action="store_true", help="by zstandard")
    send.add_argument(
        "--checksum", action="store_true", help="send nothing; show the checksum of all it holds"
    )
    send.add_argument("--json", action="store_true", help="progress as JSON, a line each second")


def _send(verbs: "VolumeVerbs", parsed: argparse.Namespace) -> None:
    from agent.extras.transfer import streams_command

    if parsed.checksum:
        result = streams_command.checksum_of(verbs, parsed.name, as_json=parsed.json)
        streams_command.show(result, as_json=parsed.json)
        return
    streams_command.send(
        verbs,
        parsed.name,
        sys.stdout.buffer,
        since=parsed.since or "",
        offset_bytes=parsed.offset,
        compare=parsed.compare,
        compress=parsed.compress,
        as_json=parsed.json,
    )


def _add_move(verbs: Commands) -> None:
    """Add the subcommand `carver volume move` and its arguments."""
    move = verb(
        verbs,
        "move",
        "send a volume to another node, while it is in use, and hand it over when it is not",
        _move,
        name_of("volume"),
    )
    move.add_argument("--to", metavar="NODE", help="the other node, as ssh knows it")
    move.add_argument(
        "--as", dest="name_there", metavar="NAME", help="its name there; else its own"
    )
    move.add_argument("--class", dest="device_class", default="", help="there; else the default")
    move.add_argument(
        "--ssh", default="ssh", help="how the node is reached, such as 'ssh -p 22 -l root'"
    )
    move.add_argument(
        "--remote-carver", default="carver", help="what is run there, such as 'sudo carver'"
    )
    move.add_argument("--compress", action="store_true", help="by zstandard")
    _add_kubeconfig(
        move, "rebind its claim in that cluster, step by step; else the steps are printed"
    )
    _add_actions(
        move,
        ("status", "show its state here and there"),
        ("finish", "delete what is left of it here, once the other node has it"),
        ("undo", "make it this node's again, and remove it there"),
        (
            "there-is-none",
            "make it this node's again without asking the other; only if no node has it, such as"
            " after one is gone for good",
        ),
    )
    move.add_argument("--json", action="store_true", help="as JSON, progress too")


def _move(verbs: "VolumeVerbs", parsed: argparse.Namespace) -> None:
    from agent.extras.transfer import move_command
    from agent.extras.transfer.remote import Remote

    def remote(node: str) -> Remote:
        return Remote(node, shlex.split(parsed.ssh), shlex.split(parsed.remote_carver))

    move_command.carry_out(verbs, parsed, remote)
