"""Interfaces for running programs, and their results; time limits; threads for hanging work.

`Run`, `Runner`, `Stream` and `Converse` are the interfaces. mount/programs.py implements them, and
tests put other objects in their place.
"""

import contextvars
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Protocol, TypeVar

T = TypeVar("T")


def begin(name: str, work: Callable[[], T]) -> "Future[T]":
    """Run work in a thread of its own; return a Future of the result.

    The thread is a daemon thread, so the process can end while the work hangs. Raises RuntimeError
    where no thread can be started.
    """
    future: Future[T] = Future()

    def do() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # any error is for the waiter
            future.set_exception(error)

    threading.Thread(target=do, name=name, daemon=True).start()
    return future


@dataclass(frozen=True)
class Result:
    """The result of a program: its exit code, and what it printed."""

    exit_code: int
    stdout: str = ""
    stderr: str = ""


@dataclass(frozen=True)
class Finished:
    """The record of a program that has ended, for observers such as metrics."""

    words: tuple[str, ...]
    # The exit code; None for a command of lvm2's shell that did not end.
    exit_code: int | None
    seconds: float
    # The name of the error's class for a command of lvm2's shell; empty if there was no error.
    error: str = ""


class Run(Protocol):
    """Interface that runs a program to its end; tests put other objects in its place.

    A non-zero exit code is a result, not an error, as only the caller knows what it means.
    """

    def __call__(self, *words: str) -> Result:
        """Run the program `words[0]` with the other words as its arguments."""


class Runner(Run, Protocol):
    """A `Run` that can also run programs that read a secret from standard input."""

    def __call__(self, *words: str, stdin: bytearray | None = None) -> Result:
        """Run a program whose standard input is `stdin`, or empty; lvm2 reads no input."""


class Stream(Protocol):
    """Interface that runs a program and reads its output while it runs, for gigabytes of output.

    Once all output is read, the end of the `with` raises CommandFailed where the program failed. An
    earlier end of the `with` ends the program. Raises ProgramMissing, CommandTimedOut.
    """

    def __call__(self, *words: str) -> AbstractContextManager[BinaryIO]:
        """Start the program `words[0]` with the other words as its arguments."""


class ConversationOver(Exception):
    """The program of a `Conversation` has ended, or prints without end."""


class Conversation(Protocol):
    """A running program that reads commands line by line, and answers each up to its next prompt.

    lvm2's shell is such a program.
    """

    def exchange(self, line: str | None, seconds: float | None) -> str:
        """Send a line, or nothing; return the program's report up to its next prompt.

        Raises TimeoutError, after which the program may still answer, and ConversationOver.
        """

    def is_waiting(self) -> bool:
        """Whether the program runs and waits at its prompt."""

    def resident_bytes(self) -> int:
        """The program's resident memory, in bytes; 0 where it is not known."""

    def end(self, seconds: float) -> bool:
        """End the program, by SIGTERM and by closing its terminal.

        Returns whether the program ended within so many seconds. From then on the program gets no
        more lines. May be called again.
        """


class Converse(Protocol):
    """Interface that starts a `Conversation`; tests put other objects in its place.

    The program finds the number of the descriptor for its reports in the environment variable whose
    name is `report`.
    """

    def __call__(
        self, *words: str, prompt: str, environment: Mapping[str, str], report: str
    ) -> Conversation:
        """Start the program `words[0]` with the other words as its arguments.

        The caller waits for the program's first prompt. Raises ProgramMissing if the program is
        not installed.
        """


@dataclass
class _Limit:
    """A time limit.

    `until_seconds` is the end of the limit (time.monotonic()). `stall_seconds` is the time by which
    progress extends the limit; None if progress does not extend it.
    """

    until_seconds: float
    stall_seconds: float | None = None
    # The time limit of the enclosing `with` block.
    outer: "_Limit | None" = None


_limit: contextvars.ContextVar[_Limit | None] = contextvars.ContextVar("limit", default=None)


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Limit the time of all programs that this thread starts in the `with`; None sets no limit."""
    limit = None if seconds is None else _Limit(time.monotonic() + seconds, outer=_limit.get())
    token = _limit.set(limit)
    try:
        yield
    finally:
        _limit.reset(token)


@contextmanager
def stall_limit(seconds: float) -> Iterator[None]:
    """Limit the time without progress in the `with`, for work that has no caller.

    `progressed` reports progress. A limit of the total time would end work that takes many steps,
    although it makes progress, and the work would begin anew for ever.
    """
    token = _limit.set(_Limit(time.monotonic() + seconds, seconds, _limit.get()))
    try:
        yield
    finally:
        _limit.reset(token)


def progressed() -> None:
    """Extend the stall limits of this thread, as a step of its work was done."""
    now_seconds, limit = time.monotonic(), _limit.get()
    while limit is not None:
        if limit.stall_seconds is not None:
            limit.until_seconds = now_seconds + limit.stall_seconds
        limit = limit.outer


def remaining_seconds() -> float | None:
    """The seconds left of this thread's time limit, 0 if it has passed; None without a limit."""
    limit = _limit.get()
    return None if limit is None else max(0.0, limit.until_seconds - time.monotonic())


def patience_seconds(most_seconds: float, part: float = 1.0) -> float:
    """The seconds to wait: `most_seconds`, or if less, a part of the remaining time limit."""
    remaining = remaining_seconds()
    return most_seconds if remaining is None else min(most_seconds, remaining * part)
