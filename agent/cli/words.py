"""What the words of all of Carver's verbs by hand have in common."""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from agent.core import errors, settings

if TYPE_CHECKING:
    from agent.cli.volumes import Manual

# argparse has no public name for what add_subparsers returns.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


@dataclass(frozen=True)
class CommandLine:
    """Where extras add words: commands, verbs of `carver volume` and `snapshot`, doctor's options.

    A doctor's option puts a function from settings to findings in the place of `findings`.
    """

    commands: Commands
    volume: Commands
    snapshot: Commands
    doctor: argparse.ArgumentParser


# The shells that are completed, and how each finds the names of what there is.
SHELLS = {
    "bash": """
_carver_volumes() { compgen -W "$(carver volume list --names 2>/dev/null)" -- "$1"; }
_carver_snapshots() { compgen -W "$(carver snapshot list --names 2>/dev/null)" -- "$1"; }
""",
    "zsh": """
_carver_volumes() { compadd -- ${(f)"$(carver volume list --names 2>/dev/null)"} }
_carver_snapshots() { compadd -- ${(f)"$(carver snapshot list --names 2>/dev/null)"} }
""",
}


def verb(
    verbs: Commands,
    name: str,
    text: str,
    act: Callable[["Manual", argparse.Namespace], None],
) -> argparse.ArgumentParser:
    """A verb on the service that runs."""
    made = verbs.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    settings.add_arguments(made, ("endpoint",))
    made.set_defaults(run=lambda parsed: _by_hand(parsed, act))
    return made


def add_name(
    made: argparse._ActionsContainer, noun: str = "volume", dest: str = "name", text: str = ""
) -> None:
    """An argument that is a volume's or a snapshot's name, and is completed as one."""
    metavar = noun.upper() if dest.startswith("-") else dest.upper()
    action = made.add_argument(dest, metavar=metavar, help=f"a {noun}'s name or id {text}".strip())
    # Read by shtab: the functions that complete it.
    vars(action)["complete"] = dict.fromkeys(SHELLS, f"_carver_{noun}s")


def _by_hand(
    parsed: argparse.Namespace, act: Callable[["Manual", argparse.Namespace], None]
) -> int:
    from agent.cli import volumes
    from agent.core.host import this_host

    config = settings.load(parsed, os.environ)
    with volumes.connected(config, this_host(config)) as verbs:
        act(verbs, parsed)
    return 0


def require_root() -> None:
    """Raise NotPermitted: without root, what may not be read would look as if it were absent."""
    if os.geteuid() != 0:
        raise errors.NotPermitted("look at disks, LVM and mounts")
