"""Running programs: the seams, the result, the deadline; and threads for what may hang."""

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
    """Run work in a thread of its own, which does not keep the process from ending.

    Raises RuntimeError where no thread can be had.
    """
    ended: Future[T] = Future()

    def do() -> None:
        try:
            ended.set_result(work())
        except BaseException as error:  # any error is for the waiter
            ended.set_exception(error)

    threading.Thread(target=do, name=name, daemon=True).start()
    return ended


@dataclass(frozen=True)
class Result:
    """How a program ended."""

    exit_code: int
    stdout: str = ""
    stderr: str = ""


@dataclass(frozen=True)
class Finished:
    """What observers get of each program that ended."""

    words: tuple[str, ...]
    # None for a command of lvm2's shell that did not end.
    exit_code: int | None
    seconds: float
    # The class of the error of a command of lvm2's shell; empty where it has none.
    error: str = ""


class Run(Protocol):
    """Run a program to its end; the seam at which tests replace the machine.

    A non-zero exit code is a result, not an error: only the caller knows what it means.
    """

    def __call__(self, *words: str) -> Result:
        """Run the program `words[0]` with the rest as its arguments."""


class Runner(Run, Protocol):
    """A `Run` for programs that read a secret at their standard input."""

    def __call__(self, *words: str, stdin: bytearray | None = None) -> Result:
        """Run a program that reads `stdin`, or nothing there; lvm2 never reads."""


class Stream(Protocol):
    """Run a program and read what it prints as it comes; the seam for what prints gigabytes.

    Once all is read, the end of the `with` raises CommandFailed where the program failed. Before
    that it ends the program. Raises ProgramMissing, CommandTimedOut.
    """

    def __call__(self, *words: str) -> AbstractContextManager[BinaryIO]:
        """Start the program `words[0]` with the rest as its arguments."""


class ConversationOver(Exception):
    """The program that was spoken to has ended, or does not stop talking."""


class Conversation(Protocol):
    """A program that keeps running: it reads a line, and answers up to its next prompt."""

    def exchange(self, line: str | None, seconds: float | None) -> str:
        """Send a line, or nothing, and return the report up to the prompt.

        Raises TimeoutError, after which the program may still answer, and ConversationOver.
        """

    def is_waiting(self) -> bool:
        """Whether it runs and waits at its prompt."""

    def resident_bytes(self) -> int:
        """How much memory it takes now; 0 where that is not known."""

    def end(self, seconds: float) -> bool:
        """End it, by SIGTERM and by hanging up; whether it ended within so many seconds.

        It reads nothing any more. May be called again.
        """


class Converse(Protocol):
    """Start a conversation; the seam at which tests replace lvm2's shell.

    It finds the number of the descriptor that it reports on in the variable `report`.
    """

    def __call__(
        self, *words: str, prompt: str, environment: Mapping[str, str], report: str
    ) -> Conversation:
        """Start `words`, before its first prompt. Raises ProgramMissing."""


@dataclass
class _Limit:
    """A time limit; `stall_seconds` is what progress extends it to, if that extends it."""

    until_seconds: float
    stall_seconds: float | None = None
    # The limit around this one.
    outer: "_Limit | None" = None


_limit: contextvars.ContextVar[_Limit | None] = contextvars.ContextVar("limit", default=None)


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Limit the time of all programs that this thread starts inside; None sets no limit."""
    limit = None if seconds is None else _Limit(time.monotonic() + seconds, outer=_limit.get())
    token = _limit.set(limit)
    try:
        yield
    finally:
        _limit.reset(token)


@contextmanager
def stall_limit(seconds: float) -> Iterator[None]:
    """Limit the time without progress (`progressed`) inside: for work that has no caller.

    Of work that takes many steps a limit in all would end what moves, and begin it anew for ever.
    """
    token = _limit.set(_Limit(time.monotonic() + seconds, seconds, _limit.get()))
    try:
        yield
    finally:
        _limit.reset(token)


def progressed() -> None:
    """Extend the stall limits of this thread: a step of its work was done."""
    now, limit = time.monotonic(), _limit.get()
    while limit is not None:
        if limit.stall_seconds is not None:
            limit.until_seconds = now + limit.stall_seconds
        limit = limit.outer


def remaining_seconds() -> float | None:
    """The seconds left of this thread's time limit, 0 if it is over; None without one."""
    limit = _limit.get()
    return None if limit is None else max(0.0, limit.until_seconds - time.monotonic())


def patience_seconds(most_seconds: float, part: float = 1.0) -> float:
    """How long to wait: so long at most, and at most that part of what the time limit leaves."""
    remaining = remaining_seconds()
    return most_seconds if remaining is None else min(most_seconds, remaining * part)
