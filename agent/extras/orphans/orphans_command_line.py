"""The command `carver orphans`: its arguments."""

import argparse
import os

from agent.cli.words import CommandLine, require_root
from agent.settings import settings
from agent.settings.configuration import Configuration


def add(command_line: CommandLine) -> None:
    """Add `carver orphans` to the command line."""
    orphans = command_line.commands.add_parser(
        "orphans",
        help="list orphaned volumes and objects; delete one by name",
        description="List orphans: volumes that no PersistentVolume names, inline volumes of pods"
        " that are gone, what moves have left, volumes left half-made, directories without a"
        " volume, objects of nodes that are gone, claims that wait for one. An orphan counts when"
        " it was seen twice, a grace period apart. Reads the cluster's API and changes nothing"
        " there. The exit code is 1 if the cluster or LVM does not answer.",
    )
    orphans.add_argument("--json", action="store_true", help="as JSON")
    orphans.add_argument("--delete", metavar="NAME", help="delete the orphan of that name")
    orphans.add_argument("--yes", action="store_true", help="confirm --delete")
    settings.add_arguments(orphans, ("endpoint", "kubeconfig", "orphan_grace_seconds"))
    orphans.set_defaults(run=_orphans)


def _orphans(parsed: argparse.Namespace) -> int:
    from agent.cli import status
    from agent.daemon.host import this_host
    from agent.extras.orphans import orphan_verbs
    from agent.extras.orphans.look import Finder
    from agent.volumes.reports import Reports

    require_root()
    config = settings.load(parsed, os.environ)
    host = this_host(config)
    # This process reads LVM and the kernel itself, so the service need not run for a list of
    # orphans.
    reports = Reports(status.volume_groups(config, host))
    finder = Finder(Configuration(config), host.kernel, reports)
    if parsed.delete:
        orphan_verbs.delete(config, host.kernel, finder, parsed.delete, confirmed=parsed.yes)
    else:
        orphan_verbs.show(finder.search(), config.orphan_grace_seconds, as_json=parsed.json)
    return 0
