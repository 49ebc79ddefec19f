"""Verbs and arguments: what all nouns of the command line share."""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from agent.core import errors
from agent.settings import settings

if TYPE_CHECKING:
    from agent.cli.volume_verbs import VolumeVerbs

# argparse has no public name for the result of add_subparsers.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


@dataclass(frozen=True)
class CommandLine:
    """Where extras add commands, verbs of `carver volume` and `snapshot`, and options of doctor.

    An option of doctor replaces `findings`, a function from settings to findings.
    """

    commands: Commands
    volume: Commands
    snapshot: Commands
    doctor: argparse.ArgumentParser


# The shells with completion, and how each lists names.
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


class Argument:
    """An argument of a verb, as argparse's add_argument takes it."""

    def __init__(self, *flags: str, complete: str = "", **options: Any) -> None:
        self._flags, self._complete, self._options = flags, complete, options

    def add(self, made: argparse._ActionsContainer) -> None:
        """Add it to a parser."""
        action = made.add_argument(*self._flags, **self._options)
        if self._complete:
            # Read by shtab: the functions that complete it.
            vars(action)["complete"] = dict.fromkeys(SHELLS, self._complete)


def flag(name: str, text: str) -> Argument:
    """An argument without a value."""
    return Argument(name, action="store_true", help=text)


def name_of(noun: str, dest: str = "name", text: str = "") -> Argument:
    """An argument that names a volume or a snapshot, and is completed as one."""
    metavar = noun.upper() if dest.startswith("-") else dest.upper()
    text = f"a {noun}'s name or id {text}".strip()
    return Argument(dest, complete=f"_carver_{noun}s", metavar=metavar, help=text)


def noun(commands: Commands, name: str, text: str, description: str) -> Commands:
    """Add a noun; return its verbs."""
    made = commands.add_parser(name, help=text, description=description)
    return made.add_subparsers(required=True, metavar="VERB")


def verb(
    verbs: Commands,
    name: str,
    text: str,
    act: Callable[["VolumeVerbs", argparse.Namespace], None],
    *arguments: Argument | tuple[Argument, ...],
) -> argparse.ArgumentParser:
    """Add a verb on the running service; arguments in a tuple exclude each other."""
    made = verbs.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    settings.add_arguments(made, ("endpoint",))
    made.set_defaults(run=lambda parsed: _on_service(parsed, act))
    for one in arguments:
        if isinstance(one, Argument):
            one.add(made)
        else:
            exclusive = made.add_mutually_exclusive_group()
            for each in one:
                each.add(exclusive)
    return made


def _on_service(
    parsed: argparse.Namespace, act: Callable[["VolumeVerbs", argparse.Namespace], None]
) -> int:
    from agent.cli import volume_verbs
    from agent.daemon.host import this_host

    config = settings.load(parsed, os.environ)
    with volume_verbs.connected(config, this_host(config)) as service:
        act(service, parsed)
    return 0


def require_root() -> None:
    """Raise NotPermitted unless root: unreadable disks would look as if they were absent."""
    if os.geteuid() != 0:
        raise errors.NotPermitted("look at disks, LVM and mounts")
