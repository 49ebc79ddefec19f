"""The gRPC interceptor of all RPCs: admission, deadline, trace, log line, and status code."""

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import cache
from importlib.metadata import version
from itertools import chain
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from agent.core import codes, errors, trace
from agent.core.ids import VolumeId
from agent.core.trace import Trace, Traces
from agent.work.locks import Admission, Slots
from mount import command
from proto import csi_pb2 as csi

_log = logging.getLogger("carver.calls")
STRIPPED = "***stripped***"


def stripped(message: Message) -> dict[str, Any]:
    """A message as a JSON object without the values of its secrets, at any depth.

    Each value of a map of secrets is replaced by STRIPPED; any other secret field is left out.
    """
    copy = type(message)()
    copy.CopyFrom(message)
    _strip(copy)
    return json_format.MessageToDict(copy, preserving_proto_field_name=True)


def _strip(message: Message) -> None:
    for field, value in message.ListFields():
        if field.GetOptions().Extensions[csi.csi_secret]:
            _replace(message, field)
        elif field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        else:
            for part in value if field.is_repeated else [value]:
                _strip(part)


def _replace(message: Message, field: FieldDescriptor) -> None:
    """Remove a secret from a message; of a map the keys stay, as they help to find a mistake."""
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        for key in value:
            value[key] = STRIPPED
    else:
        message.ClearField(field.name)


# Time, in seconds, by which the commands of an RPC must end before the caller's deadline. A command
# of lvm2 that has only so little time left would just be interrupted.
_RESERVE_SECONDS = 0.2
# Time to a deadline, in seconds, above which an RPC counts as one without a deadline.
_NO_DEADLINE_SECONDS = 7 * 24 * 3600
_Behaviour = Callable[[Message, grpc.ServicerContext], Any]


class Interceptor(grpc.ServerInterceptor):
    """Admit, time-limit, trace and log each RPC, and map the RPC's error to a gRPC status.

    The codes are those of agent/core/codes.py. `observe` is called with the trace of each RPC that
    ended. `admission` limits the number of concurrent RPCs. `traces` keeps the last traces.
    """

    def __init__(
        self,
        observe: Callable[[Trace], None] | None = None,
        admission: Admission | None = None,
        traces: Traces | None = None,
    ) -> None:
        self._observe = observe or (lambda _trace: None)
        self._traces = traces or Traces()
        self._admission = admission or Admission()

    def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Return the wrapped handler of an RPC, or None to let gRPC refuse an unknown RPC."""
        handler = continuation(handler_call_details)
        if handler is None:
            return _unknown(handler_call_details.method)
        method = handler_call_details.method.rpartition("/")[2]
        serialization = (handler.request_deserializer, handler.response_serializer)
        if handler.unary_stream:
            stream = self._stream(method, handler.unary_stream, self._admission.streams)
            return grpc.unary_stream_rpc_method_handler(stream, *serialization)
        if handler.stream_stream:
            exchange = self._bidirectional(method, handler.stream_stream)
            return grpc.stream_stream_rpc_method_handler(exchange, *serialization)
        if handler.unary_unary is None:
            return handler
        # RPCs of Identity take no thread from the admission: liveness probes are answered even
        # while each other RPC waits for a disk.
        is_probe = handler_call_details.method.startswith("/csi.v1.Identity/")
        thread = nullcontext if is_probe else self._admission.thread
        call = self._call(method, handler.unary_unary, thread)
        return grpc.unary_unary_rpc_method_handler(call, *serialization)

    def _call(
        self,
        method: str,
        behaviour: _Behaviour,
        thread: Callable[[], AbstractContextManager[None]],
    ) -> _Behaviour:
        def call(request: Message, context: grpc.ServicerContext) -> Any:
            rpc_trace, response = Trace(method, _identity_of(request)), None
            limit_seconds, group = _remaining_seconds(context), _group(rpc_trace.volume, request)
            try:
                with (
                    trace.within(rpc_trace),
                    command.time_limit(limit_seconds),
                    thread(),
                    self._admission.call(group),
                ):
                    response = behaviour(request, context)
            except Exception as error:
                status = self._record(rpc_trace, request, error)
            else:
                status = self._record(rpc_trace, request)
            _end(context, *status)
            return response

        return call

    def _stream(self, method: str, behaviour: _Behaviour, slots: Slots) -> _Behaviour:
        def stream(request: Message, context: grpc.ServicerContext) -> Iterator[Any]:
            rpc_trace = Trace(method, _identity_of(request))
            try:
                with (
                    slots.hold(_group(rpc_trace.volume, request) or ""),
                    closing(self._answers(rpc_trace, behaviour, request, context)) as answers,
                ):
                    yield from answers
            except GeneratorExit:
                # gRPC closes this generator, after the present answer, once the caller has gone.
                self._record(rpc_trace, request, errors.NotWanted("the rest"))
                raise
            except Exception as error:
                status = self._record(rpc_trace, request, error)
            else:
                status = self._record(rpc_trace, request)
            _end(context, *status)

        return stream

    def _bidirectional(
        self, method: str, behaviour: Callable[[Iterator[Message], grpc.ServicerContext], Any]
    ) -> Callable[[Iterator[Message], grpc.ServicerContext], Iterator[Any]]:
        """Wrap the handler of an RPC in which both sides stream.

        The first request names the volume of the RPC. The wrapped handler waits for that request,
        and then treats the RPC as `_stream` treats an RPC with one request.
        """

        def exchange(requests: Iterator[Message], context: grpc.ServicerContext) -> Iterator[Any]:
            first_request, problem = None, None
            try:
                # Count the wait against the limit of RPCs in which both sides stream: the caller
                # may not send its first request for a long time.
                with self._admission.exchanges.hold(""):
                    first_request = next(requests, None)
            except errors.TooManyCalls as error:
                problem = error
            if problem is not None:
                _end(context, codes.code_of(problem), str(problem))
            if first_request is not None:
                all_requests = chain([first_request], requests)
                stream = self._stream(
                    method,
                    lambda _first_request, context: behaviour(all_requests, context),
                    self._admission.exchanges,
                )
                yield from stream(first_request, context)

        return exchange

    def _answers(
        self,
        rpc_trace: Trace,
        behaviour: _Behaviour,
        request: Message,
        context: grpc.ServicerContext,
    ) -> Generator[Any, None, None]:
        """Yield the responses of a streaming RPC; trace, admit and time-limit the making of each.

        The RPC holds no admission slot, and no time limit runs, while the caller reads a response.
        """
        with ExitStack() as ending:
            answers: Iterator[Any] | None = None
            while True:
                with (
                    trace.within(rpc_trace),
                    command.time_limit(_remaining_seconds(context)),
                    self._admission.call(),
                ):
                    if answers is None:
                        answers = ending.enter_context(closing(behaviour(request, context)))
                    answer = next(answers, None)
                if answer is None:
                    return
                yield answer

    def _record(
        self, rpc_trace: Trace, request: Message, problem: Exception | None = None
    ) -> tuple[grpc.StatusCode, str]:
        """Log and count an RPC that ended; return the RPC's gRPC code and error message."""
        code, message = grpc.StatusCode.OK, ""
        if problem is not None:
            code, message = codes.code_of(problem), str(problem) or type(problem).__name__
        if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
            _log.debug("%s raised", rpc_trace.method, exc_info=problem)
        self._traces.end(rpc_trace, code.name)
        _write(rpc_trace, request, message)
        self._observe(rpc_trace)
        return code, message


def _unknown(path: str) -> "grpc.RpcMethodHandler[Any, Any] | None":
    """Return a handler that refuses an unknown RPC of Carver's own services.

    The error names the version of this service. Returns None for an RPC of another service: gRPC
    refuses such an RPC itself.
    """
    if not path.startswith("/carver."):
        return None

    def refuse(_request: bytes, context: grpc.ServicerContext) -> bytes:
        message = (
            f"cannot answer {path}: this service is Carver {version('carver')}, and does not have"
            " that call; use the command and the service of the same version"
        )
        context.abort(grpc.StatusCode.UNIMPLEMENTED, message)

    return grpc.unary_unary_rpc_method_handler(refuse)


def _remaining_seconds(context: grpc.ServicerContext) -> float | None:
    """The time limit of an RPC's commands, in seconds: shortly before the caller's deadline.

    None for an RPC without a deadline, whose remaining time gRPC reports as centuries.
    """
    remaining = context.time_remaining()
    if remaining is None or remaining > _NO_DEADLINE_SECONDS:
        return None
    return max(0.0, remaining - _RESERVE_SECONDS)


def _end(context: grpc.ServicerContext, code: grpc.StatusCode, message: str) -> None:
    """Abort an RPC with a code and a message; do nothing for the code OK.

    Call this function outside the `except` block of the RPC's error. The frames of that error may
    hold an encryption key, and the exception that `abort` raises would keep the frames alive.
    """
    if code is not grpc.StatusCode.OK:
        context.abort(code, codes.shorten(message))


def _identity_of(request: Message) -> str:
    """The id or name of the volume or snapshot that a request names; empty if there is none."""
    for field in _identity_fields(request.DESCRIPTOR):
        if identity := getattr(request, field):
            return str(identity)
    return ""


@cache
def _identity_fields(kind: Descriptor) -> Sequence[str]:
    """The fields in which requests of a type name a volume or snapshot, by precedence."""
    return [field for field in _IDENTITY_FIELDS if field in kind.fields_by_name]


def _group(identity: str, request: Message) -> str | None:
    """The volume group of the volume that a request names.

    Empty for a volume whose volume group is not known, None for a request that names no volume.
    """
    volume_id = VolumeId.parse(identity)
    if volume_id is not None:
        return volume_id.group
    return "" if getattr(request, "volume_id", "") else None


def _write(rpc_trace: Trace, request: Message, message: str) -> None:
    # Log routine RPCs, such as probes, at debug level unless they fail: they come all day long.
    routine = rpc_trace.code == grpc.StatusCode.OK.name and rpc_trace.method in ROUTINE
    level = logging.DEBUG if routine else logging.INFO
    if not _log.isEnabledFor(level):
        return
    fields: dict[str, object] = {
        "method": rpc_trace.method,
        "volume": rpc_trace.volume,
        "code": rpc_trace.code,
        "milliseconds": round(rpc_trace.seconds * 1000, 1),
    }
    if message:
        fields["error"] = message
    is_debug = _log.isEnabledFor(logging.DEBUG)
    if is_debug and rpc_trace.steps:
        fields["steps"] = ", ".join(map(str, rpc_trace.steps))
    _log.log(level, "call", extra={"fields": fields})
    if is_debug:
        _log.debug("request", extra={"fields": {"method": rpc_trace.method, **stripped(request)}})


# Fields of requests that name the volume or snapshot of an RPC, in order of precedence.
_IDENTITY_FIELDS = ("volume_id", "snapshot_id", "target_snapshot_id", "group_snapshot_id", "name")

# Methods that callers use all day long; a successful RPC of these is logged at debug level.
ROUTINE = frozenset(
    {
        "Probe",
        "GetPluginInfo",
        "GetPluginCapabilities",
        "ControllerGetCapabilities",
        "GroupControllerGetCapabilities",
        "NodeGetCapabilities",
        "NodeGetVolumeStats",
        "GetCapacity",
        "ControllerListVolumeHealth",
    }
)
