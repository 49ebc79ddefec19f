"""CSI for the sidecars of a whole cluster: pass each call on to the node of its volume.

The bytes of a call about one volume or snapshot are passed on unchanged, and so are the bytes of
its answer once the answer was checked (answer_rules.py). So fields that this version does not know
reach the node and the caller. The caller's deadline and cancellation are passed on, too. If a node
answers with an error, the caller gets that error, with the node's name before its text. Of each
request, only the method and the id or name are kept and logged.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import BoolValue

from agent.core import codes
from agent.core.ids import VolumeId
from agent.csi import controller, group_controller, identity
from agent.extras.controller import attachments, lists, routes
from agent.extras.controller.call_records import Call, Observe, fail, record, unobserved
from agent.extras.controller.claims import ClaimQuestions
from agent.extras.controller.node_answers import Answers
from agent.extras.controller.nodes import Forgotten, Gone, Node, Nodes, Refused, require_node_error
from agent.extras.controller.placement import Attempts, Placement
from proto import csi_pb2 as csi

_log = logging.getLogger("carver.calls")

_Code = grpc.StatusCode
_CONTROLLER = "csi.v1.Controller"
# gRPC codes of errors after which a volume group may be on another node than before: those of
# OtherGroup and GroupMissing, and of PerhapsOnAnotherNode about the source of a copy.
_MAY_HAVE_MOVED = (
    *(_Code.FAILED_PRECONDITION, _Code.NOT_FOUND, _Code.UNAVAILABLE),
    _Code.RESOURCE_EXHAUSTED,
)
# Calls that succeed if the volume or snapshot of their id does not exist.
_DELETIONS = ("DeleteVolume", "DeleteSnapshot", "DeleteVolumeGroupSnapshot")
# gRPC codes of errors of a node that may have ceased to answer.
_MAY_BE_SILENT = (_Code.UNAVAILABLE, _Code.DEADLINE_EXCEEDED)
# The calls that list what all nodes have, with the class of their answer.
_LISTS = {
    "ListVolumes": csi.ListVolumesResponse,
    "ListSnapshots": csi.ListSnapshotsResponse,
    "ControllerListVolumeHealth": csi.ControllerListVolumeHealthResponse,
}
# Fields of requests that say which volume or snapshot a call is about. The first field that is set
# is logged.
_SUBJECTS = ("name", "volume_id", "source_volume_id", "snapshot_id", "group_snapshot_id")


@dataclass(frozen=True)
class _Sent:
    """A request to a node: the path of the RPC, the parsed request, and its bytes.

    `owned` are those ids in the request because of which the request is sent to this node.
    """

    path: str
    request: Message
    data: bytes
    owned: Sequence[str] = ()


# Type of a function that answers a call: by the bytes of the request, it returns those of the
# answer.
_Answer = Callable[[Call, bytes], Awaitable[bytes]]


class Router:
    """Answers the calls of all CSI services but Node.

    When a call has ended, `observe` is called with it.
    """

    def __init__(
        self,
        nodes: Nodes,
        driver_name: str,
        version: str,
        observe: Observe = unobserved,
        questions: ClaimQuestions | None = None,
        *,
        attach: bool = False,
    ) -> None:
        """Make the gRPC handlers of all calls that the controller answers.

        With `attach` the controller offers ControllerPublishVolume and ControllerUnpublishVolume.
        The nodes must have the same setting.
        """
        self._nodes, self._answers, self._observe = nodes, Answers(nodes), observe
        self._attempts, self._questions = Attempts(), questions
        info = csi.GetPluginInfoResponse(name=driver_name, vendor_version=version)
        offered = (csi.PluginCapability.Service.SNAPSHOT_METADATA_SERVICE,)
        # Calls that the controller itself answers, with constant answers: sidecars send these calls
        # at their start, before any node is known.
        constants: Mapping[str, Mapping[str, Message]] = {
            "csi.v1.Identity": {
                "GetPluginInfo": info,
                "GetPluginCapabilities": identity.capabilities(offered),
                "Probe": csi.ProbeResponse(ready=BoolValue(value=True)),
            },
            _CONTROLLER: {
                "ControllerGetCapabilities": controller.capabilities(expand=True, attach=attach)
            },
            "csi.v1.GroupController": {
                "GroupControllerGetCapabilities": group_controller.capabilities()
            },
        }
        self._handlers: dict[str, dict[str, Any]] = {}
        for service, answers in constants.items():
            for method, message in answers.items():
                self._add(service, method, _constant(message.SerializeToString()))
        for service, fields in routes.FIELDS.items():
            for method, field in fields.items():
                self._add(service, method, self._by_id(service, method, field))
        for method in _LISTS:
            self._add(_CONTROLLER, method, self._list(method))
        self._add(_CONTROLLER, "CreateVolume", self._create_volume)
        self._add(_CONTROLLER, "GetCapacity", self._get_capacity)
        if attach:
            self._add(_CONTROLLER, "ControllerPublishVolume", self._attach)
            self._add(_CONTROLLER, "ControllerUnpublishVolume", self._detach)
        for service, fields in routes.STREAMS.items():
            for method, field in fields.items():
                stream = self._streamed(method, self._stream(service, method, field))
                handler: Any = grpc.unary_stream_rpc_method_handler(stream)
                self._handlers.setdefault(service, {})[method] = handler

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the handlers of all services at a gRPC server."""
        server.add_generic_rpc_handlers(
            tuple(
                grpc.method_handlers_generic_handler(service, handlers)
                for service, handlers in self._handlers.items()
            )
        )

    def _add(self, service: str, method: str, answer: _Answer) -> None:
        handler: Any = grpc.unary_unary_rpc_method_handler(self._answered(method, answer))
        self._handlers.setdefault(service, {})[method] = handler

    def _by_id(self, service: str, method: str, field: str) -> _Answer:
        """Return the handler of a call about one volume or snapshot, or about several on one node.

        The handler sends the call to the node of the ids in the request's field `field`. If an id
        names nothing, a deletion succeeds, and other calls fail with NOT_FOUND. A volume whose node
        was deleted can be deleted only after its snapshots.
        """
        request_class, path = routes.request_class(service, method), f"/{service}/{method}"

        async def answer(call: Call, data: bytes) -> bytes:
            request = request_class.FromString(data)
            _name(call, request)
            identities = routes.ids_in(request, field)
            try:
                node = await self._owner_of_all(identities, field)
            except Gone as error:
                if method not in _DELETIONS:
                    raise
                if isinstance(error, Forgotten):
                    if method == "DeleteVolume":
                        await self._nodes.require_no_snapshots(identities[0])
                    _log.warning("%s", error)
                return b""
            return await self._send(call, node, _Sent(path, request, data, identities), field)

        return answer

    async def _owner_of_all(self, identities: Sequence[str], field: str) -> Node:
        owners = {
            identity: await self._nodes.owner(identity, field) for identity in identities or [""]
        }
        if len({node.name for node in owners.values()}) > 1:
            where = ", ".join(f"{identity} is on {node.name}" for identity, node in owners.items())
            raise Refused(
                _Code.INVALID_ARGUMENT,
                f"{field}: all volumes of a group snapshot must be on one node; {where}",
            )
        return next(iter(owners.values()))

    async def _create_volume(self, call: Call, data: bytes) -> bytes:
        request = csi.CreateVolumeRequest.FromString(data)
        _name(call, request)
        placement, path = self._placement(call), f"/{_CONTROLLER}/CreateVolume"
        if (node := await placement.given(request)) is not None:
            identity, field = routes.source_of(request)
            return await self._send(call, node, _Sent(path, request, data, [identity]), field)
        # Choose a node: the volume has no source, and the scheduler chose no node.
        async with self._attempts.only(request.name):
            node = await placement.anywhere(request)
            answer, _ = await self._once(call, node, _Sent(path, request, data))
            return answer

    async def _get_capacity(self, call: Call, data: bytes) -> bytes:
        request = csi.GetCapacityRequest.FromString(data)
        return (await self._placement(call).capacity(request)).SerializeToString()

    async def _attach(self, call: Call, data: bytes) -> bytes:
        request = csi.ControllerPublishVolumeRequest.FromString(data)
        _name(call, request)
        node = await attachments.to_attach(self._nodes, request)
        path = f"/{_CONTROLLER}/ControllerPublishVolume"
        sent = _Sent(path, request, data, [request.volume_id])
        return await self._send(call, node, sent, "volume_id")

    async def _detach(self, call: Call, data: bytes) -> bytes:
        request = csi.ControllerUnpublishVolumeRequest.FromString(data)
        _name(call, request)
        node = await attachments.to_detach(self._nodes, request)
        path = f"/{_CONTROLLER}/ControllerUnpublishVolume"
        if node is None:
            return b""
        sent = _Sent(path, request, data, [request.volume_id])
        answer, _ = await self._once(call, node, sent)
        return answer

    def _placement(self, call: Call) -> Placement:
        return Placement(self._nodes, self._attempts, self._asking(call), self._questions)

    def _list(self, method: str) -> _Answer:
        request_class, path = routes.request_class(_CONTROLLER, method), f"/{_CONTROLLER}/{method}"

        async def answer(call: Call, data: bytes) -> bytes:
            request: Any = request_class.FromString(data)
            for field in ("snapshot_id", "source_volume_id"):
                if identity := getattr(request, field, ""):
                    call.subject = identity
                    if VolumeId.parse(identity) is None:
                        return b""
                    node = await self._nodes.owner(identity, field)
                    sent = _Sent(path, request, data, [identity])
                    return await self._send(call, node, sent, field)
            ask = self._asking(call)
            page: Message = await lists.page(
                self._nodes, request, _LISTS[method](), lambda node, part: ask(method, node, part)
            )
            return page.SerializeToString()

        return answer

    def _asking(self, call: Call) -> Callable[[str, Node, Any], Awaitable[Any]]:
        """Return a function that sends a parsed request to a node, and returns the parsed answer.

        The function's first argument is the name of a method of the Controller service. The node
        and its time are recorded in `call`.
        """

        async def ask(method: str, node: Node, request: Message) -> Any:
            sent = _Sent(f"/{_CONTROLLER}/{method}", request, request.SerializeToString())
            _, answer = await self._once(call, node, sent)
            return answer

        return ask

    async def _send(self, call: Call, node: Node, sent: _Sent, field: str) -> bytes:
        """Send a call to a node; if the volume group has moved to another node, to that node.

        After an error that such a move can cause, the node of the first id is looked up again; if
        it is another node, the call is sent to that node, once. Otherwise the error is raised.
        `field` is the request's field with the ids, for errors; it may be empty.
        """
        try:
            answer, _ = await self._once(call, node, sent)
        except grpc.aio.AioRpcError as error:
            identity = next(iter(sent.owned), "")
            if not identity or error.code() not in _MAY_HAVE_MOVED:
                raise
            new_node = await self._nodes.moved_on(node, identity, field)
            if new_node is None:
                raise
            answer, _ = await self._once(call, new_node, sent)
        return answer

    async def _once(self, call: Call, node: Node, sent: _Sent) -> tuple[bytes, Any]:
        """Call a node once; return the bytes of its answer, and the parsed answer.

        The node and its time are recorded in `call`. If the node may have ceased to answer, it is
        asked for its volume groups (GetPluginInfo) in the background. Raises AioRpcError, with the
        node's name in the text, for an error of the node; Refused if the node does not answer, or
        if its answer is refused.
        """
        node.require_answering()
        call.node, start_seconds = node.name, time.monotonic()
        try:
            remaining = call.time_remaining()
            sent_parts = (sent.path, sent.request, sent.data, remaining)
            return await self._answers.of(node, *sent_parts, owned=sent.owned)
        except grpc.aio.AioRpcError as error:
            if error.code() in _MAY_BE_SILENT:
                self._nodes.ask(node)
            call.node = node.name
            raise _of_node(node, error) from None
        except asyncio.CancelledError:
            # Ask the node whether it still answers. The call may have been cancelled because the
            # caller's deadline passed before the node answered with an error.
            self._nodes.ask(node)
            raise
        finally:
            call.nodes_seconds.append((node.name, time.monotonic() - start_seconds))

    def _stream(
        self, service: str, method: str, field: str
    ) -> Callable[[Call, bytes], AsyncIterator[bytes]]:
        """Return the handler of a call that is answered by a stream of messages.

        The handler checks each message of the node and passes it on. The node sends no further
        messages while the caller does not read.
        """
        request_class, path = routes.request_class(service, method), f"/{service}/{method}"

        async def stream(call: Call, data: bytes) -> AsyncIterator[bytes]:
            request = request_class.FromString(data)
            call.subject = getattr(request, field)
            node = await self._nodes.owner(call.subject, field)
            call.node, start_seconds = node.name, time.monotonic()
            call_node: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
            call_node = node.connected.unary_stream(path)
            checked_call = self._answers.asked(node, request, [call.subject])
            answers = call_node(data, timeout=call.time_remaining())
            try:
                async for message in answers:
                    await self._answers.read(node, path, checked_call, message)
                    yield message
            except grpc.aio.AioRpcError as error:
                if error.code() in _MAY_BE_SILENT:
                    self._nodes.ask(node)
                require_node_error(node, error)
                raise _of_node(node, error) from None
            finally:
                answers.cancel()
                call.stream_seconds = time.monotonic() - start_seconds

        return stream

    def _answered(self, method: str, answer: _Answer) -> Any:
        """Return the gRPC handler of a call that `answer` answers.

        The handler logs and counts the call, and turns an error of `answer` into a gRPC status.
        """

        async def handle(data: bytes, context: Any) -> bytes | None:
            call, start_seconds = Call(method, context.time_remaining), time.monotonic()
            try:
                return await answer(call, data)
            except (Exception, asyncio.CancelledError) as error:
                fail(call, error)
            finally:
                record(call, start_seconds, self._observe)
            await context.abort(call.code, codes.shorten(call.problem))
            return None

        return handle

    def _streamed(self, method: str, answers: Callable[[Call, bytes], AsyncIterator[bytes]]) -> Any:
        async def handle(data: bytes, context: Any) -> AsyncIterator[bytes]:
            call, start_seconds = Call(method, context.time_remaining), time.monotonic()
            try:
                async for message in answers(call, data):
                    yield message
            except GeneratorExit:
                call.code = _Code.CANCELLED
                raise
            except (Exception, asyncio.CancelledError) as error:
                fail(call, error)
            finally:
                record(call, start_seconds, self._observe)
            if call.code is not _Code.OK:
                await context.abort(call.code, codes.shorten(call.problem))

        return handle


def _of_node(node: Node, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
    """Return a node's error with the node's name before its text.

    The name is there because the controller may ask several nodes to answer one call.
    """
    metadata = error.initial_metadata(), error.trailing_metadata()
    return grpc.aio.AioRpcError(error.code(), *metadata, f"node {node.name}: {error.details()}")


def _name(call: Call, request: Any) -> None:
    call.subject = next(filter(None, (getattr(request, field, "") for field in _SUBJECTS)), "")


def _constant(answer: bytes) -> _Answer:
    async def same(_call: Call, _data: bytes) -> bytes:
        return answer

    return same
