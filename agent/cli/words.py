"""Building blocks of the command line: commands, their subcommands, and arguments."""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from agent.core import errors
from agent.settings import settings

if TYPE_CHECKING:
    from agent.cli.volume_verbs import VolumeVerbs

# Type of the result of argparse's add_subparsers, for which argparse has no public name.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


@dataclass(frozen=True)
class CommandLine:
    """The parsers to which extras add commands, subcommands and options.

    Extras add commands to `commands`, subcommands to `volume` and `snapshot`, and options of
    `carver doctor` to `doctor`. An option of `carver doctor` replaces the parsed attribute
    `findings`, a function that returns the findings for the settings.
    """

    commands: Commands
    volume: Commands
    snapshot: Commands
    doctor: argparse.ArgumentParser


# Shells with completion of arguments, and the shell functions that complete names of volumes and
# snapshots.
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
    """An argument of a subcommand, with the options of argparse's add_argument.

    `complete` is the name of the shell function that completes the argument.
    """

    def __init__(self, *flags: str, complete: str = "", **options: Any) -> None:
        self._flags, self._complete, self._options = flags, complete, options

    def add(self, parser: argparse._ActionsContainer) -> None:
        """Add the argument to a parser, or to a set of arguments that exclude each other."""
        action = parser.add_argument(*self._flags, **self._options)
        if self._complete:
            # Set the attribute from which shtab takes the shell functions of the completion.
            vars(action)["complete"] = dict.fromkeys(SHELLS, self._complete)


def flag(name: str, help_text: str) -> Argument:
    """A flag: an optional argument without a value."""
    return Argument(name, action="store_true", help=help_text)


def name_of(noun: str, dest: str = "name", help_text: str = "") -> Argument:
    """An argument for the name or id of a volume or snapshot, completed by the shell."""
    metavar = noun.upper() if dest.startswith("-") else dest.upper()
    help_text = f"a {noun}'s name or id {help_text}".strip()
    return Argument(dest, complete=f"_carver_{noun}s", metavar=metavar, help=help_text)


def noun(commands: Commands, name: str, help_text: str, description: str) -> Commands:
    """Add a command, such as `carver volume`; return the object that takes its subcommands."""
    noun_parser = commands.add_parser(name, help=help_text, description=description)
    return noun_parser.add_subparsers(required=True, metavar="VERB")


def verb(
    verbs: Commands,
    name: str,
    help_text: str,
    action: Callable[["VolumeVerbs", argparse.Namespace], None],
    *arguments: Argument | tuple[Argument, ...],
) -> argparse.ArgumentParser:
    """Add a subcommand, such as `carver volume list`; `action` runs it on the running service.

    Arguments that are in one tuple exclude each other.
    """
    verb_parser = verbs.add_parser(
        name, help=help_text, description=f"{help_text[0].upper()}{help_text[1:]}."
    )
    settings.add_arguments(verb_parser, ("endpoint",))
    verb_parser.set_defaults(run=_on_service, action=action)
    for argument in arguments:
        if isinstance(argument, Argument):
            argument.add(verb_parser)
        else:
            exclusive = verb_parser.add_mutually_exclusive_group()
            for choice in argument:
                choice.add(exclusive)
    return verb_parser


def _on_service(parsed: argparse.Namespace) -> int:
    from agent.cli import volume_verbs
    from agent.daemon.host import this_host

    config = settings.load(parsed, os.environ)
    with volume_verbs.connect(config, this_host(config)) as service:
        parsed.action(service, parsed)
    return 0


def require_root() -> None:
    """Raise NotPermitted unless the process runs as root.

    To another user, disks that the user may not read would seem to be absent.
    """
    if os.geteuid() != 0:
        raise errors.NotPermitted("look at disks, LVM and mounts")
