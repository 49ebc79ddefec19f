"""What it is to run a program: its words, result and deadline; and a thread for what may hang."""

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
    """Do it, and have what comes of it in the future; the end of the process does not wait for it.

    Raises RuntimeError where no thread can be had.
    """
    ended: Future[T] = Future()
    threading.Thread(target=_do, args=(work, ended), name=name, daemon=True).start()
    return ended


def _do(work: Callable[[], T], ended: "Future[T]") -> None:
    try:
        value = work()
    except BaseException as error:
        # Whoever waits shall see it, whatever it is.
        ended.set_exception(error)
    else:
        ended.set_result(value)


@dataclass(frozen=True)
class Result:
    """How a program ended."""

    exit_code: int
    stdout: str = ""
    stderr: str = ""


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


class Runner(Run, Protocol):
    """The same, for programs that read what nobody else shall see at their standard input."""

    def __call__(self, *words: str, stdin: bytearray | None = None) -> Result:
        """Run a program; it finds `stdin` there, or nothing. lvm2 reads nothing."""
        ...


class Stream(Protocol):
    """Run a program and read what it prints as it comes; the seam for what prints gigabytes.

    Once all is read, the end of the `with` raises CommandFailed where the program failed. Before
    that it ends the program. Raises ProgramMissing, CommandTimedOut.
    """

    def __call__(
        self, *words: str, stdin: bytearray | None = None
    ) -> AbstractContextManager[BinaryIO]:
        """Start the program `words[0]` with the rest as its arguments.

        What it finds at its standard input, at most a page, is its own when this returns.
        """
        ...


class ConversationOver(Exception):
    """The program that was spoken to has ended, or does not stop talking."""


class Conversation(Protocol):
    """A program that is kept running: it is told a line, and answers up to its next prompt."""

    def exchange(self, line: str | None, seconds: float | None) -> str:
        """Say a line, or nothing, and return what was reported until the prompt.

        Raises TimeoutError, after which the program may still answer, and ConversationOver.
        """
        ...

    def is_waiting(self) -> bool:
        """Whether it runs, and has said nothing since its last prompt."""
        ...

    def end(self, seconds: float) -> bool:
        """Have it end, by SIGTERM and by hanging up; whether it has, so many seconds later.

        Nothing can be said any more. Asked again, it looks again.
        """
        ...


class Converse(Protocol):
    """Start a program to be spoken to; the seam at which tests stand in for a shell of lvm2's.

    It finds the number of the descriptor that it reports on in the variable `report`.
    """

    def __call__(
        self, *words: str, prompt: str, environment: Mapping[str, str], report: str
    ) -> Conversation:
        """Start `words`; it has said nothing yet. Raises ProgramMissing."""
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
