"""The command `carver`."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from agent import config, errors, log
from lvm import errors as lvm_errors
from mount import errors as mount_errors


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 is success, 1 a failure that is told, 2 a wrong command line."""
    parsed = parser().parse_args(arguments)
    try:
        return _serve(parsed)
    except (errors.AgentError, lvm_errors.LvmError, mount_errors.MountError) as error:
        print(f"carver: {error}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="carver", description="A CSI driver that carves LVM volumes on the node it runs on."
    )
    top.add_argument("--version", action="version", version=f"carver {version('carver')}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve CSI on a unix socket",
        description="Serve CSI on a unix socket. Each flag can also be set in the file, and as"
        " CARVER_<NAME> in the environment; a flag outweighs the environment, that the file.",
    )
    config.add_arguments(serve)
    return top


def _serve(parsed: argparse.Namespace) -> int:
    # Imported here: gRPC and its threads are for the service only.
    from agent import server

    settings = config.load(parsed, os.environ)
    log.configure(settings.log_format, settings.log_level)
    server.serve(settings, server.this_host(settings))
    return 0
