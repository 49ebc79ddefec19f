"""The RPCs of the service carver.v2.Evacuation, which the controller serves on its own socket."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message

from agent.core import codes, errors
from agent.extras.controller.nodes import Nodes, Refused
from agent.extras.evacuation.cluster_view import ClusterView
from agent.extras.evacuation.evacuation_request import (
    Annotations,
    BadRequest,
    Kind,
    NoSuchNode,
    Request,
    checked_names,
)
from agent.extras.evacuation.plan import Plan, Unit
from agent.extras.evacuation.progress import NodeProgress, Progress, UnitProgress, VolumeProgress
from agent.extras.kubernetes.objects import Lists, Objects
from agent.settings.settings import Config
from proto import carver_pb2 as carver

_log = logging.getLogger(__name__)
T = TypeVar("T")

_SERVICE = "carver.v2.Evacuation"
_Code = grpc.StatusCode
# Maximum number of characters of the progress that is published in an annotation. All annotations
# of an object have 256 KiB at most (apimachinery, TotalAnnotationSizeLimitB).
_MOST_CHARACTERS = 128 << 10


class EvacuationCalls:
    """Answers Evacuate and Evacuations. The handlers must be used in one event loop."""

    def __init__(
        self,
        config: Config,
        nodes: Nodes,
        objects: Objects,
        lists: Lists,
        progress: Progress,
        other_text: Callable[[], str],
    ) -> None:
        """Make the calls.

        `other_text` returns the progress that another process has published, which evacuates the
        nodes (`text_of_progress`); empty if there is none.
        """
        self._driver_name, self._nodes, self._lists = config.driver_name, nodes, lists
        self._is_enabled = config.evacuation
        self._annotations = Annotations(objects, config.driver_name)
        self._progress, self._other_text = progress, other_text

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler of both RPCs, for a server of grpc.aio."""
        methods: dict[str, Any] = {
            "Evacuate": grpc.unary_unary_rpc_method_handler(self._answered(self._evacuate)),
            "Evacuations": grpc.unary_unary_rpc_method_handler(self._answered(self._evacuations)),
        }
        return grpc.method_handlers_generic_handler(_SERVICE, methods)

    def _answered(self, answer: Callable[[bytes], Message]) -> Any:
        """Return a handler that runs `answer` in a thread, and turns its errors into statuses."""

        async def handle(data: bytes, context: Any) -> bytes | None:
            self._loop = asyncio.get_running_loop()
            try:
                return (await asyncio.to_thread(answer, data)).SerializeToString()
            except Refused as error:
                code, problem = error.code, str(error)
            except DecodeError:
                code, problem = _Code.INVALID_ARGUMENT, "the request cannot be read"
            except BadRequest as error:
                code, problem = _Code.INVALID_ARGUMENT, str(error)
            except NoSuchNode as error:
                code, problem = _Code.NOT_FOUND, str(error)
            except errors.AgentError as error:
                # The API server refuses or does not answer.
                code, problem = _Code.UNAVAILABLE, str(error)
            except Exception as error:
                code, problem = _Code.INTERNAL, f"{type(error).__name__}: {error}"
                _log.error("a call about evacuations raised", exc_info=error)
            await context.abort(code, codes.shorten(problem))
            return None

        return handle

    def _evacuate(self, data: bytes) -> carver.EvacuateResponse:
        """Check a request, plan it unless it stops or undoes, and write the annotation.

        The plan comes first: if the node does not answer, nothing is requested. The evacuation
        itself plans anew. Raises Refused if the setting `evacuation` is off.
        """
        if not self._is_enabled:
            raise Refused(
                _Code.FAILED_PRECONDITION,
                "evacuations are switched off: set `evacuation` (the chart's evacuation.enabled)",
            )
        call = carver.EvacuateRequest.FromString(data)
        request = _request(call)
        self._annotations.require(call.node, *request.to)
        view = ClusterView(self._driver_name, self._nodes, self._lists, self._loop)
        answer = carver.EvacuateResponse(
            node=call.node, annotation=self._annotations.key, request=request.text
        )
        if request.kind is Kind.EVACUATE:
            put_plan(answer, view.plan(call.node, request))
        if not call.dry_run:
            self._annotations.write(call.node, request)
            _log.info("evacuation of node %s: %s was requested", call.node, request.text)
        return answer

    def _evacuations(self, _data: bytes) -> carver.EvacuationsResponse:
        """Return the progress of this process, or what the one that evacuates has published."""
        if not (text := self._other_text()):
            return _response(self._progress)
        try:
            return json_format.Parse(text, carver.EvacuationsResponse(), ignore_unknown_fields=True)
        except json_format.ParseError as error:
            why = f"the progress that another controller has published cannot be read: {error}"
            raise Refused(_Code.UNAVAILABLE, why) from None


def text_of_progress(progress: Progress) -> str:
    """Return the progress as JSON, for other processes; without units if it would be too long."""
    response = _response(progress)
    text = _json(response)
    if len(text) > _MOST_CHARACTERS:
        for node in response.nodes:
            node.ClearField("units")
        text = _json(response)
    return text


def _json(response: carver.EvacuationsResponse) -> str:
    return json_format.MessageToJson(response, preserving_proto_field_name=True, indent=None)


def _response(progress: Progress) -> carver.EvacuationsResponse:
    return carver.EvacuationsResponse(nodes=map(_node, progress.snapshot()))


def _request(call: carver.EvacuateRequest) -> Request:
    """Return the request of a call. Raises BadRequest if it asks for what excludes each other."""
    if call.stop and call.undo:
        raise BadRequest("stop and undo exclude each other")
    if call.stop or call.undo:
        if call.to or call.force:
            raise BadRequest("neither `to` nor `force` goes with stop or undo")
        return Request(Kind.STOP if call.stop else Kind.UNDO)
    to = checked_names(list(call.to))
    if call.node in to:
        raise BadRequest(f"`to`: {call.node} is the node that is to be evacuated")
    return Request(Kind.EVACUATE, to, call.force)


def put_plan(answer: carver.EvacuateResponse, made: Plan) -> None:
    """Write the units of a plan into an answer."""
    answer.going.extend(map(_planned, made.going))
    answer.staying.extend(map(_planned, made.staying))


def _planned(unit: Unit) -> carver.PlannedUnit:
    volumes = [
        carver.PlannedVolume(
            volume_id=volume.volume_id,
            claim=str(volume.claim or ""),
            pv=volume.persistent_volume.name if volume.persistent_volume else "",
            size_bytes=volume.size_bytes,
            device_class=volume.device_class,
            snapshots=volume.snapshots,
        )
        for volume in unit.volumes
    ]
    return carver.PlannedUnit(
        volumes=volumes,
        pods=map(str, unit.pods),
        target=unit.target,
        reason=unit.reason,
        notes=unit.notes,
        under_way=unit.is_under_way,
    )


def _node(node: NodeProgress) -> carver.NodeEvacuation:
    return carver.NodeEvacuation(
        node=node.node,
        kind=node.kind,
        complete=node.is_complete,
        seconds_left=node.seconds_left,
        problem=node.problem,
        units=map(_unit, node.units),
    )


def _unit(unit: UnitProgress) -> carver.UnitEvacuation:
    return carver.UnitEvacuation(
        name=unit.name,
        target=unit.target,
        stage=unit.stage,
        problem=unit.problem,
        seconds_left=unit.seconds_left,
        pods=unit.pods,
        notes=unit.notes,
        volumes=map(_volume, unit.volumes),
    )


def _volume(volume: VolumeProgress) -> carver.VolumeEvacuation:
    return carver.VolumeEvacuation(
        volume_id=volume.volume_id,
        claim=volume.claim,
        stage=volume.stage,
        size_bytes=volume.size_bytes,
        done_bytes=volume.done_bytes,
        total_bytes=volume.total_bytes,
        rounds=volume.rounds,
        rate=volume.rate,
        seconds_left=volume.seconds_left,
        problem=volume.problem,
    )
