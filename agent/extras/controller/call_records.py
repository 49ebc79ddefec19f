"""Records of the controller's calls to nodes, which are logged and counted.

The router records the calls that it passes on, and node_moves.py the calls of moves.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError

from agent.csi.interceptor import ROUTINE
from agent.extras.controller.nodes import Refused

_log = logging.getLogger(__name__)
_Code = grpc.StatusCode


def _without_limit() -> float | None:
    return None


@dataclass
class Call:
    """A call of the controller, with the facts that are logged and counted."""

    method: str
    # Function that returns the seconds until the caller's deadline; None without a deadline.
    time_remaining: Callable[[], float | None] = _without_limit
    # The id or name of the volume or snapshot that the call is about.
    subject: str = ""
    # The name of the last node to which the call was sent.
    node: str = ""
    # For each call to a node, the node's name and the call's duration in seconds.
    nodes_seconds: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    # The duration of a stream, in seconds. The duration is kept apart from `nodes_seconds`, as the
    # reader of the stream may have been slower than the node.
    stream_seconds: float = 0.0
    # The duration of the call, in seconds.
    seconds: float = 0.0
    code: grpc.StatusCode = _Code.OK
    # The text of the error; empty after success.
    problem: str = ""
    # Whether the call is one of many, whose success is logged at the level debug only.
    is_routine: bool = False

    @property
    def node_seconds(self) -> float:
        """The sum of the times, in seconds, that nodes took for this call."""
        return self.stream_seconds + sum(seconds for _, seconds in self.nodes_seconds)


# Type of a function that counts a call that has ended.
Observe = Callable[[Call], None]


def unobserved(_call: Call) -> None:
    """Count nothing."""


@contextmanager
def recorded(call: Call, observe: Observe) -> Iterator[None]:
    """Record the call of the `with`, which may raise the errors of calls, and raises them again."""
    start_seconds = time.monotonic()
    try:
        yield
    except (Exception, asyncio.CancelledError) as error:
        fail(call, error)
        raise
    finally:
        record(call, start_seconds, observe)


def record(call: Call, start_seconds: float, observe: Observe) -> None:
    """Log and count a call that has ended. `start_seconds` is when it began, of time.monotonic."""
    call.seconds = time.monotonic() - start_seconds
    fields: dict[str, object] = {
        "method": call.method,
        "volume": call.subject,
        "node": call.node,
        "code": call.code.name,
        "milliseconds": round(call.seconds * 1000, 1),
        "node_milliseconds": round(call.node_seconds * 1000, 1),
    }
    if call.problem:
        fields["error"] = call.problem
    is_routine = call.code is _Code.OK and (call.is_routine or call.method in ROUTINE)
    _log.log(logging.DEBUG if is_routine else logging.INFO, "call", extra={"fields": fields})
    observe(call)


def fail(call: Call, error: Exception | asyncio.CancelledError) -> None:
    """Note in a call the gRPC code and the text of the error that ended it.

    CancelledError is raised again if the call itself was cancelled.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is None or task.cancelling():
            call.code = _Code.CANCELLED
            raise error
        # The connection to the node was closed during the call. Answer UNAVAILABLE: otherwise gRPC
        # would give the caller no answer.
        call.code = _Code.UNAVAILABLE
        call.problem = (
            f"node {call.node or 'that was asked'} left the cluster, or its address changed, while"
            " it was called; the call may have been carried out: repeat it"
        )
    elif isinstance(error, Refused):
        call.code, call.problem = error.code, str(error)
    elif isinstance(error, grpc.aio.AioRpcError):
        call.code, call.problem = error.code(), error.details() or ""
    elif isinstance(error, DecodeError):
        call.code, call.problem = _Code.INVALID_ARGUMENT, "the request cannot be read"
    else:
        call.code, call.problem = _Code.INTERNAL, f"{type(error).__name__}: {error}"
        _log.error("%s raised", call.method, exc_info=error)
