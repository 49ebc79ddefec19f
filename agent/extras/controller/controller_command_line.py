"""The commands `carver controller`, `carver controller status` and `carver controller orphans`."""

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING

from agent.cli.words import CommandLine
from agent.core import errors, sockets
from agent.daemon import log
from agent.settings import settings
from mount.text import counted

if TYPE_CHECKING:
    from proto import carver_pb2 as carver

# Settings that are options of the command `carver controller`.
_SETTINGS = (
    "endpoint",
    "driver_name",
    "nodes_file",
    "tls_directory",
    "kubeconfig",
    "enrolment_address",
    "controller_authority",
    "node_account",
    "attach",
    "forget_deleted_nodes",
    "release_lost_claims",
    "evacuation",
    "evacuation_grace_seconds",
    "orphan_interval_seconds",
    "orphan_grace_seconds",
    "health_interval_seconds",
    "log_format",
    "log_level",
    "metrics_address",
    "health_address",
)


def add(command_line: CommandLine) -> None:
    """Add the command `controller` to the command line."""
    parser = command_line.commands.add_parser(
        "controller",
        help="serve CSI for a whole cluster: pass each call on to its node",
        description="Serve CSI on a unix socket for the sidecars of a whole cluster: each call is"
        " passed on, over TLS, to the node that it is about. `status` shows the nodes of the"
        " controller that serves the socket; `orphans` lists volumes that nothing in the cluster"
        " refers to and objects of nodes that are gone, and deletes one by its name.",
    )
    parser.add_argument(
        "verb", nargs="?", choices=("status", "orphans"), help="ask the one that serves, and end"
    )
    parser.add_argument("--json", action="store_true", help="status, orphans: as JSON")
    parser.add_argument("--delete", metavar="NAME", help="orphans: delete the one of that name")
    parser.add_argument("--yes", action="store_true", help="orphans: confirm --delete")
    settings.add_arguments(parser, _SETTINGS)
    parser.set_defaults(run=_controller)


def _controller(parsed: argparse.Namespace) -> int:
    config = settings.load(parsed, os.environ)
    if parsed.verb != "orphans" and (parsed.delete or parsed.yes):
        raise errors.BadConfig("carver controller", "--delete, --yes", "are of `orphans`")
    if parsed.verb is None and parsed.json:
        raise errors.BadConfig("carver controller", "--json", "is of `status` and `orphans`")
    if parsed.verb is not None:
        if not sockets.is_served(config.endpoint):
            raise errors.NotServed(str(config.endpoint))
        return _orphans(config, parsed) if parsed.verb == "orphans" else _status(config, parsed)
    from agent.extras.controller import controller_process

    log.configure(config.log_format, config.log_level)
    controller_process.run(config)
    return 0


def _status(config: settings.Config, parsed: argparse.Namespace) -> int:
    import grpc
    from google.protobuf.empty_pb2 import Empty
    from google.protobuf.json_format import MessageToJson

    from agent.csi.client import Client
    from proto.carver_pb2_grpc import ClusterStub

    with Client(config.endpoint) as client:
        try:
            answer = client.stub(ClusterStub).Nodes(Empty())
        except grpc.RpcError as error:
            raise errors.CallRefused(error.code().name, error.details() or "") from None
    if parsed.json:
        json_text = MessageToJson(
            answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        sys.stdout.write(f"{json_text}\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in lines(answer, time.time()))
    return 1 if any(node.problem for node in answer.nodes) else 0


def _orphans(config: settings.Config, parsed: argparse.Namespace) -> int:
    from agent.extras.controller.orphans import ClusterFinder
    from agent.extras.orphans import orphan_verbs

    finder = ClusterFinder(config)
    if parsed.delete:
        orphan_verbs.delete(config, None, finder, parsed.delete, confirmed=parsed.yes)
    else:
        orphan_verbs.show(finder.search(), config.orphan_grace_seconds, as_json=parsed.json)
    return 0


def lines(answer: "carver.NodesResponse", now_seconds: float) -> list[str]:
    """Return the lines that `carver controller status` prints: a heading, and one line per node."""
    days = (answer.certificate_ends_seconds - now_seconds) / 86400
    nodes_text, days_text = counted(len(answer.nodes), "node"), counted(round(days), "day")
    table = [f"{nodes_text}; the controller's certificate ends in {days_text}"]
    for node in answer.nodes:
        groups = ", ".join(sorted(f"{name}@{uuid}" for uuid, name in node.groups.items()))
        last = (
            f"{now_seconds - node.answered_seconds:.0f} s ago" if node.answered_seconds else "never"
        )
        state = node.problem or "answers"
        table.append(
            f"{node.name}  {node.address}  {node.version or '-'}  {last}  {groups or '-'}  {state}"
        )
    return table
