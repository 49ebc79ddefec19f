"""Around every call: its deadline, its one line in the log, and its error as a gRPC status."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.message import Message

from agent import codes, secret
from agent.admission import Admission
from agent.csi import redaction
from lvm import command

_log = logging.getLogger("carver.calls")

# A call that leaves less than this to lvm2 would only be cut off.
_RESERVE_SECONDS = 0.2
_IDENTITY_THREADS = 2
_NO_DEADLINE_SECONDS = 7 * 24 * 3600


class Interceptor(grpc.ServerInterceptor):
    """The only one. What a service raises becomes the code that agent/codes.py gives it.

    `observe` is told of each call that ended: its method, its code's name, and its seconds.
    """

    def __init__(
        self,
        observe: Callable[[str, str, float], None] | None = None,
        admission: Admission | None = None,
    ) -> None:
        self._observe = observe or (lambda _method, _code, _seconds: None)
        self._admission = admission or Admission()
        # Who asks whether the service lives is answered though each other thread waits for a disk.
        self._identity = ThreadPoolExecutor(_IDENTITY_THREADS, thread_name_prefix="identity")

    def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Wrap a unary call's handler; anything else goes through as it is."""
        handler = continuation(handler_call_details)
        if handler is None or not handler.unary_unary:
            return handler
        method = handler_call_details.method.rpartition("/")[2]
        behaviour = handler.unary_unary

        def call(request: Message, context: grpc.ServicerContext) -> Any:
            started = time.monotonic()
            code, message, response = grpc.StatusCode.OK, "", None
            try:
                with command.time_limit(_remaining_seconds(context)), self._admission.call():
                    response = behaviour(request, context)
            except Exception as error:
                code, message = codes.code_of(error), str(error) or type(error).__name__
                if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
                    _log.debug("%s raised", method, exc_info=error)
            seconds = time.monotonic() - started
            _write(method, request, code, message, seconds)
            self._observe(method, code.name, seconds)
            if code is not grpc.StatusCode.OK:
                context.abort(code, message)
            return response

        if handler_call_details.method.startswith("/csi.v1.Identity/"):
            # grpc/_server.py, _select_thread_pool_for_behavior.
            call.__dict__["experimental_thread_pool"] = self._identity
        deserialize = handler.request_deserializer

        def read(data: bytes) -> Any:
            request = deserialize(data) if deserialize is not None else data
            if request is not data:
                # They may have been a key's; nobody else has them.
                secret.wipe(data)
            return request

        return grpc.unary_unary_rpc_method_handler(call, read, handler.response_serializer)


def _remaining_seconds(context: grpc.ServicerContext) -> float | None:
    """The caller's patience; None where it set no deadline, which gRPC tells as centuries."""
    remaining = context.time_remaining()
    if remaining is None or remaining > _NO_DEADLINE_SECONDS:
        return None
    return max(0.0, remaining - _RESERVE_SECONDS)


def _write(
    method: str, request: Message, code: grpc.StatusCode, message: str, seconds: float
) -> None:
    fields = {
        "method": method,
        "volume": next(filter(None, (getattr(request, one, "") for one in _SUBJECTS)), ""),
        "code": code.name,
        "milliseconds": round(seconds * 1000, 1),
    }
    if message:
        fields["error"] = message
    # Probes and capability questions come all day long; they are news only when they fail.
    routine = code is grpc.StatusCode.OK and method in _ROUTINE
    level = logging.DEBUG if routine else logging.INFO
    _log.log(level, "call", extra={"fields": fields})
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("request", extra={"fields": {"method": method, **redaction.stripped(request)}})


# What a call is about, in the order in which a request is asked for it.
_SUBJECTS = ("volume_id", "snapshot_id", "group_snapshot_id", "name")

_ROUTINE = frozenset(
    {
        "Probe",
        "GetPluginInfo",
        "GetPluginCapabilities",
        "ControllerGetCapabilities",
        "GroupControllerGetCapabilities",
        "NodeGetCapabilities",
        "NodeGetVolumeStats",
        "GetCapacity",
    }
)
