"""Start programs: every process that Carver starts, lvm2 or mkfs, starts here.

The only module that imports sh.
"""

import contextvars
import io
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import sh

from lvm import errors

# sh announces each process at INFO; Carver's own observer does that better.
logging.getLogger("sh").setLevel(logging.WARNING)

ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C",
    # gRPC's sockets are open in this process; lvm2 would name each in a warning.
    "LVM_SUPPRESS_FD_WARNINGS": "1",
}

# Enters the namespaces in which the host's own lvm2, udev and locks live.
HOST_NAMESPACES = ("nsenter", "--target", "1", "--mount", "--uts", "--ipc", "--")


@dataclass(frozen=True)
class Result:
    """How a program ended."""

    exit_code: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Finished:
    """What an observer is told of each program that ended."""

    words: tuple[str, ...]
    exit_code: int
    seconds: float


class Run(Protocol):
    """Run a program to its end; the seam at which tests stand in for the machine.

    A non-zero exit code is a result, not an error: only the caller knows what it means.
    """

    def __call__(self, *words: str) -> Result:
        """Run the program `words[0]` with the rest as its arguments."""
        ...


_deadline: contextvars.ContextVar[float | None] = contextvars.ContextVar("deadline", default=None)


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Bound every program that this thread starts inside; None sets no bound."""
    token = _deadline.set(None if seconds is None else time.monotonic() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


def remaining_seconds() -> float | None:
    """What is left of the limit that holds here, 0 if it is over; None where none does."""
    deadline = _deadline.get()
    return None if deadline is None else max(0.0, deadline - time.monotonic())


class Programs:
    """The real `Run`.

    With `lvm_on_host` lvm2 is the host's own, reached from a container that shares the host's
    process namespace; all other programs are the container's.
    """

    def __init__(
        self, *, lvm_on_host: bool = False, observe: Callable[[Finished], None] | None = None
    ) -> None:
        self._lvm_prefix: Sequence[str] = HOST_NAMESPACES if lvm_on_host else ()
        self._observe = observe or (lambda _: None)

    def __call__(self, *words: str) -> Result:
        """Run a program and return how it ended.

        Raises ProgramMissing, or CommandTimedOut when `time_limit` is over.
        """
        if words[0] == "lvm":
            words = (*self._lvm_prefix, *words)
        remaining = remaining_seconds()
        if remaining == 0:
            raise errors.CommandTimedOut(words, 0.0)
        started = time.monotonic()
        result, in_time = _execute(words, remaining)
        self._observe(Finished(words, result.exit_code, time.monotonic() - started))
        if not in_time:
            raise errors.CommandTimedOut(words, remaining or 0.0)
        return result


def _execute(words: Sequence[str], timeout_seconds: float | None) -> tuple[Result, bool]:
    """How the program ended, and whether it did so by itself."""
    try:
        # Looked up at each call: a program installed meanwhile is found.
        program = sh.Command(words[0], search_paths=ENVIRONMENT["PATH"].split(":"))
    except sh.CommandNotFound:
        raise errors.ProgramMissing(words[0]) from None
    # Buffers of our own: sh's objects refer to each other, and would keep what a program printed
    # until Python's collector comes by, which counts objects and not bytes.
    with io.BytesIO() as stdout, io.BytesIO() as stderr:
        # In the background only for the limit: with sh's own, which looks ten times a second
        # whether the program has ended, every program takes a multiple of 0.1 s.
        running = program(
            *words[1:],
            _env=ENVIRONMENT,
            _out=stdout,
            _err=stderr,
            _tty_out=False,
            _bg=True,
            _bg_exc=False,
        )
        with _limited(running, timeout_seconds) as told_to_end:
            try:
                exit_code = running.exit_code
            except sh.ErrorReturnCode as error:
                exit_code = error.exit_code
        result = Result(exit_code, _text(stdout.getvalue()), _text(stderr.getvalue()))
        return result, not told_to_end.is_set()


@contextmanager
def _limited(
    running: sh.RunningCommand, timeout_seconds: float | None
) -> Iterator[threading.Event]:
    """Inside, the program is told to end when its time is over; the event says if it was."""
    told_to_end = threading.Event()

    def tell() -> None:
        told_to_end.set()
        # lvm2 blocks TERM while it holds a group's lock, so TERM lands at a safe point.
        # KILL could land between two metadata writes.
        with suppress(ProcessLookupError):
            running.signal(signal.SIGTERM)

    seconds = threading.TIMEOUT_MAX if timeout_seconds is None else timeout_seconds
    timer = threading.Timer(seconds, tell)
    timer.start()
    try:
        yield told_to_end
    finally:
        timer.cancel()


def _text(output: bytes) -> str:
    return output.decode(errors="backslashreplace")
