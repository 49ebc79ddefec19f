"""The commands `carver node`: call the controller, and show its answer."""

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message

from agent.cli import terminal
from agent.core import errors, sockets
from agent.csi.client import Client
from agent.settings.settings import Config
from proto import carver_pb2 as carver
from proto.carver_pb2_grpc import EvacuationStub

# Time limit, in seconds, of a call to the controller, which may have to ask many nodes.
_PATIENCE_SECONDS = 120.0


def evacuate(config: Config, parsed: argparse.Namespace) -> int:
    """Request, plan, stop or undo the evacuation of a node; return the exit code.

    The code is 1 if a volume stays. Raises NotServed if no controller answers at the socket,
    CallRefused if it refuses.
    """
    request = carver.EvacuateRequest(
        node=parsed.node,
        to=parsed.to,
        force=parsed.force,
        dry_run=parsed.dry_run,
        stop=parsed.stop,
        undo=parsed.undo,
    )
    answer = _called(config, lambda stub: stub.Evacuate(request, timeout=_PATIENCE_SECONDS))
    if parsed.json:
        _show_json(answer)
    else:
        _show_plan(answer, parsed)
    return 1 if answer.staying else 0


def evacuations(config: Config, *, as_json: bool) -> int:
    """Show how far all evacuations are; return the exit code, 1 if one has a problem.

    Raises NotServed if no controller answers at the socket, CallRefused if it refuses.
    """
    answer = _called(config, lambda stub: stub.Evacuations(Empty(), timeout=_PATIENCE_SECONDS))
    if as_json:
        _show_json(answer)
    elif not answer.nodes:
        print("No node is being evacuated.")
    for node in () if as_json else answer.nodes:
        print(heading(node))
        grid = terminal.table(
            *("CLAIM", "TO", "STAGE", "ROUND", "DONE", "RATE", "LEFT"),
            right=("ROUND", "RATE", "LEFT"),
        )
        for row in _rows(node):
            grid.add_row(*row)
        terminal.console().print(grid)
        for line in problems(node):
            print(line)
    return 1 if any(node.problem for node in answer.nodes) else 0


def _called(config: Config, call: Callable[[Any], Any]) -> Any:
    if not sockets.is_served(config.endpoint):
        raise errors.NotServed(str(config.endpoint))
    with Client(config.endpoint) as client:
        try:
            return call(client.stub(EvacuationStub))
        except grpc.RpcError as error:
            raise errors.CallRefused(error.code().name, error.details() or "") from None


def _show_json(answer: Message) -> None:
    json_text = MessageToJson(
        answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    sys.stdout.write(f"{json_text}\n")


def _show_plan(answer: carver.EvacuateResponse, parsed: argparse.Namespace) -> None:
    if not (parsed.stop or parsed.undo):
        grid = terminal.table("VOLUME", "SIZE", "CLASS", "TO", "PODS", right=("SIZE",))
        for unit in (*answer.going, *answer.staying):
            for volume in unit.volumes:
                target = unit.target or "stays"
                grid.add_row(
                    volume.claim or volume.volume_id,
                    terminal.human(volume.size_bytes),
                    volume.device_class,
                    target,
                    ", ".join(unit.pods),
                )
        if grid.row_count:
            terminal.console().print(grid)
        else:
            print(f"Node {answer.node} has no volumes.")
        for line in remarks(answer):
            print(line)
    text = f"{answer.annotation}={answer.request}"
    if parsed.dry_run:
        print(f"Nothing was changed. Without --dry-run, Node {answer.node} is annotated {text}.")
    else:
        print(f"Node {answer.node} is annotated {text}.")
        print("See how far it is by: carver node evacuations")


def remarks(answer: carver.EvacuateResponse) -> Iterator[str]:
    """Yield the lines under a plan: why units stay, and what an operator should know."""
    for unit in answer.staying:
        yield f"{_names(unit)}: stays: {unit.reason}"
    for unit in answer.going:
        for note in unit.notes:
            yield f"{_names(unit)}: {note}"


def _names(unit: carver.PlannedUnit) -> str:
    return ", ".join(volume.claim or volume.volume_id for volume in unit.volumes)


def heading(node: carver.NodeEvacuation) -> str:
    """Return the line above the progress of a node."""
    moved = sum(unit.stage in ("moved", "finished", "undone") for unit in node.units)
    staying = sum(unit.stage == "stays" for unit in node.units)
    state = "complete" if node.complete else f"{_left(node)} left"
    stays = f", {staying} stay" if staying else ""
    return f"{node.node}: {node.kind}: {moved} of {len(node.units)} units done{stays}, {state}"


def _rows(node: carver.NodeEvacuation) -> Iterator[tuple[Any, ...]]:
    for unit in node.units:
        for volume in unit.volumes:
            yield (
                volume.claim or volume.volume_id,
                unit.target,
                volume.stage,
                str(volume.rounds or ""),
                terminal.bar(volume.done_bytes, volume.total_bytes) if volume.total_bytes else "",
                f"{terminal.human(int(volume.rate))}/s" if volume.rate else "",
                _left(volume) if volume.HasField("seconds_left") else "",
            )


def problems(node: carver.NodeEvacuation) -> Iterator[str]:
    """Yield the lines under the progress of a node: its problems, and those of its units."""
    if node.problem:
        yield f"{node.node}: {node.problem}"
    for unit in node.units:
        names = ", ".join(volume.claim or volume.volume_id for volume in unit.volumes)
        if unit.problem:
            yield f"{names}: {unit.problem}"
        for volume in unit.volumes:
            if volume.problem:
                yield f"{volume.claim or volume.volume_id}: {volume.problem}"


def _left(part: "carver.NodeEvacuation | carver.VolumeEvacuation") -> str:
    if not part.HasField("seconds_left"):
        return "an unknown time"
    minutes, seconds = divmod(round(part.seconds_left), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes else f"{seconds} s"
