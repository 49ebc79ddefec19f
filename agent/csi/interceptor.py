"""Around every call: its deadline, its log line without secrets, and its error as a gRPC status."""

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
from agent.work.locks import Admission, Shares
from mount import command
from proto import csi_pb2 as csi

_log = logging.getLogger("carver.calls")
STRIPPED = "***stripped***"


def stripped(message: Message) -> dict[str, Any]:
    """The message as a JSON object, with the values of its secrets replaced, at any depth."""
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
            for one in value if field.is_repeated else [value]:
                _strip(one)


def _replace(message: Message, field: FieldDescriptor) -> None:
    """Keep a secret's keys, which help to find a mistake, and none of its values."""
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        for key in value:
            value[key] = STRIPPED
    else:
        message.ClearField(field.name)


# A call that leaves less than this to lvm2 would only be cut off.
_RESERVE_SECONDS = 0.2
_NO_DEADLINE_SECONDS = 7 * 24 * 3600
_Behaviour = Callable[[Message, grpc.ServicerContext], Any]


class Interceptor(grpc.ServerInterceptor):
    """Map errors to the codes of agent/core/codes.py; `observe` gets each call's trace."""

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
        """Wrap the handler of a call."""
        handler = continuation(handler_call_details)
        if handler is None:
            return _unknown(handler_call_details.method)
        method = handler_call_details.method.rpartition("/")[2]
        wire = (handler.request_deserializer, handler.response_serializer)
        if handler.unary_stream:
            stream = self._stream(method, handler.unary_stream, self._admission.streams)
            return grpc.unary_stream_rpc_method_handler(stream, *wire)
        if handler.stream_stream:
            exchange = self._exchange(method, handler.stream_stream)
            return grpc.stream_stream_rpc_method_handler(exchange, *wire)
        if handler.unary_unary is None:
            return handler
        # Liveness probes are answered also while each other call waits for a disk.
        is_probe = handler_call_details.method.startswith("/csi.v1.Identity/")
        thread = nullcontext if is_probe else self._admission.thread
        call = self._call(method, handler.unary_unary, thread)
        return grpc.unary_unary_rpc_method_handler(call, *wire)

    def _call(
        self,
        method: str,
        behaviour: _Behaviour,
        thread: Callable[[], AbstractContextManager[None]],
    ) -> _Behaviour:
        def call(request: Message, context: grpc.ServicerContext) -> Any:
            made, response = Trace(method, _subject(request)), None
            try:
                with (
                    trace.within(made),
                    command.time_limit(_remaining_seconds(context)),
                    thread(),
                    self._admission.call(_group(made.volume, request)),
                ):
                    response = behaviour(request, context)
            except Exception as error:
                status = self._record(made, request, error)
            else:
                status = self._record(made, request)
            _end(context, *status)
            return response

        return call

    def _stream(self, method: str, behaviour: _Behaviour, shares: Shares) -> _Behaviour:
        def stream(request: Message, context: grpc.ServicerContext) -> Iterator[Any]:
            made = Trace(method, _subject(request))
            try:
                with (
                    shares.one(_group(made.volume, request) or ""),
                    closing(self._answers(made, behaviour, request, context)) as answers,
                ):
                    yield from answers
            except GeneratorExit:
                # The caller has gone: gRPC drops this generator at the next answer.
                self._record(made, request, errors.NotWanted("the rest"))
                raise
            except Exception as error:
                status = self._record(made, request, error)
            else:
                status = self._record(made, request)
            _end(context, *status)

        return stream

    def _exchange(
        self, method: str, behaviour: Callable[[Iterator[Message], grpc.ServicerContext], Any]
    ) -> Callable[[Iterator[Message], grpc.ServicerContext], Iterator[Any]]:
        """Treat a call by its first request, which says what it is about, as one with a stream."""

        def exchange(requests: Iterator[Message], context: grpc.ServicerContext) -> Iterator[Any]:
            first, problem = None, None
            try:
                # The caller may send nothing for as long as it likes.
                with self._admission.exchanges.one(""):
                    first = next(requests, None)
            except errors.TooManyCalls as error:
                problem = error
            if problem is not None:
                _end(context, codes.code_of(problem), str(problem))
            if first is not None:
                every = chain([first], requests)
                stream = self._stream(
                    method,
                    lambda _first, context: behaviour(every, context),
                    self._admission.exchanges,
                )
                yield from stream(first, context)

        return exchange

    def _answers(
        self,
        made: Trace,
        behaviour: _Behaviour,
        request: Message,
        context: grpc.ServicerContext,
    ) -> Generator[Any, None, None]:
        """Make each answer as a call of its own: no deadline runs while the caller reads."""
        with ExitStack() as ending:
            answers: Iterator[Any] | None = None
            while True:
                with (
                    trace.within(made),
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
        self, made: Trace, request: Message, problem: Exception | None = None
    ) -> tuple[grpc.StatusCode, str]:
        """Log and count a call that ended; return its code and message."""
        code, message = grpc.StatusCode.OK, ""
        if problem is not None:
            code, message = codes.code_of(problem), str(problem) or type(problem).__name__
        if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
            _log.debug("%s raised", made.method, exc_info=problem)
        self._traces.end(made, code.name)
        _write(made, request, message)
        self._observe(made)
        return code, message


def _unknown(path: str) -> "grpc.RpcMethodHandler[Any, Any] | None":
    """Refuse a call of Carver's own that this version does not have; gRPC refuses all others."""
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
    """The time to the caller's deadline; None without one, which gRPC reports as centuries."""
    remaining = context.time_remaining()
    if remaining is None or remaining > _NO_DEADLINE_SECONDS:
        return None
    return max(0.0, remaining - _RESERVE_SECONDS)


def _end(context: grpc.ServicerContext, code: grpc.StatusCode, message: str) -> None:
    """End a call that failed. The caller has dropped the error, whose frames may hold a key."""
    if code is not grpc.StatusCode.OK:
        context.abort(code, codes.cut(message))


def _subject(request: Message) -> str:
    """The id or the name that a call is about, if it is about one."""
    for field in _subject_fields(request.DESCRIPTOR):
        if found := getattr(request, field):
            return str(found)
    return ""


@cache
def _subject_fields(kind: Descriptor) -> Sequence[str]:
    """The fields that name the object of such requests, in order of precedence."""
    return [one for one in _SUBJECTS if one in kind.fields_by_name]


def _group(subject: str, request: Message) -> str | None:
    """The group of the volume that a call names: "" where that is not known, None for no volume."""
    found = VolumeId.parse(subject)
    if found is not None:
        return found.group
    return "" if getattr(request, "volume_id", "") else None


def _write(made: Trace, request: Message, message: str) -> None:
    # Probes and capability questions come all day long; they are news only when they fail.
    routine = made.code == grpc.StatusCode.OK.name and made.method in ROUTINE
    level = logging.DEBUG if routine else logging.INFO
    if not _log.isEnabledFor(level):
        return
    fields: dict[str, object] = {
        "method": made.method,
        "volume": made.volume,
        "code": made.code,
        "milliseconds": round(made.seconds * 1000, 1),
    }
    if message:
        fields["error"] = message
    is_debug = _log.isEnabledFor(logging.DEBUG)
    if is_debug and made.steps:
        fields["steps"] = ", ".join(map(str, made.steps))
    _log.log(level, "call", extra={"fields": fields})
    if is_debug:
        _log.debug("request", extra={"fields": {"method": made.method, **stripped(request)}})


# The fields that name a call's object, in order of precedence.
_SUBJECTS = ("volume_id", "snapshot_id", "target_snapshot_id", "group_snapshot_id", "name")

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
