"""The option `--cluster` of `carver doctor`."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agent.cli.words import CommandLine
from agent.settings.settings import Config

if TYPE_CHECKING:
    from agent.operations.preflight import Finding


def add(command_line: CommandLine) -> None:
    """Add the option `--cluster` to the command `carver doctor`."""
    command_line.doctor.add_argument(
        "--cluster",
        action="store_const",
        dest="findings",
        const=_findings,
        help="check the cluster in place of the node: by --kubeconfig, as an administrator",
    )


def _findings(config: Config) -> "Sequence[Finding]":
    from agent.extras.kubernetes import access, checks
    from agent.extras.kubernetes.objects import Lists, Objects

    server = access.find(config.kubeconfig, os.environ)
    return checks.all_findings(Lists(server), Objects(server))
