"""The commands `carver node evacuate` and `carver node evacuations`: their arguments."""

import argparse
import os

from agent.cli.words import CommandLine, noun
from agent.core import errors
from agent.settings import settings


def add(command_line: CommandLine) -> None:
    """Add `carver node` to the command line."""
    verbs = noun(
        command_line.commands,
        "node",
        "evacuate nodes of a cluster: move their volumes to other nodes",
        "Evacuate nodes of a cluster, at the controller's socket: all volumes of a node are moved"
        " to other nodes, and the pods that use them follow.",
    )
    evacuate = verbs.add_parser(
        "evacuate",
        help="move all volumes of a node to other nodes",
        description="Plan the evacuation of a node, and request it from the controller, which"
        " cordons the node, copies its volumes while they are in use, evicts their pods, and hands"
        " the volumes over. The exit code is 1 if something stays.",
    )
    evacuate.add_argument("node", metavar="NODE", help="the node that is to be empty")
    evacuate.add_argument(
        "--to",
        action="append",
        default=[],
        metavar="NODE",
        help="only to this node; may be given several times",
    )
    evacuate.add_argument(
        "--force",
        action="store_true",
        help="evict pods without a controller, too: they are gone for good",
    )
    action = evacuate.add_mutually_exclusive_group()
    action.add_argument(
        "--dry-run", action="store_true", help="show what would go where, and change nothing"
    )
    action.add_argument(
        "--stop", action="store_true", help="drive no more moves; what was begun stays as it is"
    )
    action.add_argument(
        "--undo",
        action="store_true",
        help="take back what was begun, and move back what was moved",
    )
    evacuate.add_argument("--json", action="store_true", help="as JSON")
    settings.add_arguments(evacuate, ("endpoint",))
    evacuate.set_defaults(run=_evacuate)
    evacuations = verbs.add_parser(
        "evacuations",
        help="show how far the evacuations of nodes are",
        description="Show how far the evacuations of nodes are, with rates and times left.",
    )
    evacuations.add_argument("--json", action="store_true", help="as JSON")
    settings.add_arguments(evacuations, ("endpoint",))
    evacuations.set_defaults(run=_evacuations)


def _evacuate(parsed: argparse.Namespace) -> int:
    from agent.extras.evacuation import evacuation_verbs

    if (parsed.stop or parsed.undo) and (parsed.to or parsed.force):
        raise errors.BadField("--to, --force", "do not go with --stop or --undo")
    return evacuation_verbs.evacuate(settings.load(parsed, os.environ), parsed)


def _evacuations(parsed: argparse.Namespace) -> int:
    from agent.extras.evacuation import evacuation_verbs

    return evacuation_verbs.evacuations(settings.load(parsed, os.environ), as_json=parsed.json)
