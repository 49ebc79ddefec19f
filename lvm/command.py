"""Start programs: every process that Carver starts, lvm2 or mkfs, starts here.

The only module that imports sh, and of what is installed the only one that imports subprocess.
"""

import contextvars
import io
import logging
import os
import select
import signal
import subprocess
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import BinaryIO, Protocol, cast

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

# How long a program that was told to end is waited for; lvm2 ends what it is at within that.
_GRACE_SECONDS = 10.0

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


class Programs:
    """The real `Runner`.

    With `lvm_on_host` lvm2 is the host's own, reached from a container that shares the host's
    process namespace; all other programs are the container's.
    """

    def __init__(
        self, *, lvm_on_host: bool = False, observe: Callable[[Finished], None] | None = None
    ) -> None:
        self._lvm_prefix: Sequence[str] = HOST_NAMESPACES if lvm_on_host else ()
        self._observe = observe or (lambda _: None)

    def __call__(self, *words: str, stdin: bytearray | None = None) -> Result:
        """Run a program and return how it ended.

        Raises ProgramMissing, or CommandTimedOut when `time_limit` is over: CommandStuck where the
        program runs on though it was told to end.
        """
        words = self._reached(words)
        remaining = remaining_seconds()
        if remaining == 0:
            raise errors.CommandTimedOut(words, 0.0)
        started = time.monotonic()
        result, in_time = _execute(words, remaining, stdin)
        self._observe(Finished(words, result.exit_code, time.monotonic() - started))
        if not in_time:
            raise errors.CommandTimedOut(words, remaining or 0.0)
        return result

    def converse(
        self, *words: str, prompt: str, environment: Mapping[str, str], report: str
    ) -> Conversation:
        """Start a program to be spoken to: the real `Converse`."""
        return _Terminal(self._reached(words), prompt.encode(), environment, report)

    @contextmanager
    def stream(self, *words: str, stdin: bytearray | None = None) -> Iterator[BinaryIO]:
        """Read what a program prints, as it comes: the real `Stream`."""
        remaining, started = remaining_seconds(), time.monotonic()
        if remaining == 0:
            raise errors.CommandTimedOut(words, 0.0)
        problem: errors.BadReport | None = None
        with TemporaryFile() as stderr, _piped(words, stderr, stdin) as running, _ended_in(running):
            output = cast("BinaryIO", running.stdout)
            try:
                yield output
            except errors.BadReport as error:
                # What is cut off is told by how the program ended.
                problem = error
            is_read = not output.read(1)
            if not is_read:
                running.terminate()
            code = running.wait()
            self._observe(Finished(words, code, time.monotonic() - started))
            stderr.seek(0)
            told = _text(stderr.read())
        if remaining_seconds() == 0:
            raise errors.CommandTimedOut(words, remaining or 0.0)
        if is_read and code:
            raise errors.classify(words, code, told)
        if problem is not None:
            raise problem

    def _reached(self, words: tuple[str, ...]) -> tuple[str, ...]:
        return (*self._lvm_prefix, *words) if words[0] == "lvm" else words


def _execute(
    words: Sequence[str], timeout_seconds: float | None, stdin: bytearray | None = None
) -> tuple[Result, bool]:
    """How the program ended, and whether it did so by itself. Raises CommandStuck."""
    if words[0] in ("lvm", HOST_NAMESPACES[0]):
        return _by_sh(words, timeout_seconds)
    return _by_subprocess(words, timeout_seconds, stdin)


def _by_subprocess(
    words: Sequence[str], timeout_seconds: float | None, stdin: bytearray | None = None
) -> tuple[Result, bool]:
    """The same for mkfs and the like: sh takes longer than they do to start them.

    It forks a process of this one's size, and has threads to read what the program prints; Popen
    has neither (vfork(2)).
    """
    try:
        running = subprocess.Popen(
            words,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except FileNotFoundError:
        raise errors.ProgramMissing(words[0]) from None
    in_time = True
    try:
        # Written from where it is: nothing copies it.
        stdout, stderr = running.communicate(cast(bytes, stdin), timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        in_time = False
        running.terminate()
        try:
            stdout, stderr = running.communicate(timeout=_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            # Whoever called need not wait until it has ended after all.
            threading.Thread(target=running.communicate, name="program", daemon=True).start()
            raise errors.CommandStuck(
                words, timeout_seconds or 0.0, lambda: running.returncode is not None
            ) from None
    return Result(running.returncode, _text(stdout), _text(stderr)), in_time


def _piped(
    words: Sequence[str], stderr: BinaryIO, stdin: bytearray | None = None
) -> "subprocess.Popen[bytes]":
    """A program whose output is a pipe."""
    try:
        running = subprocess.Popen(
            words,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            # Nothing between keeps a copy of what is written.
            bufsize=0 if stdin is not None else -1,
        )
    except FileNotFoundError:
        raise errors.ProgramMissing(words[0]) from None
    if running.stdin is not None and stdin is not None:
        with suppress(BrokenPipeError), running.stdin:  # it tells itself why it ended
            running.stdin.write(stdin)
    return running


@contextmanager
def _ended_in(running: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Have a program end where nobody reads on, or the time is over."""
    remaining = remaining_seconds()
    timer = threading.Timer(remaining or 0.0, running.terminate)
    timer.daemon = True
    if remaining is not None:
        timer.start()
    try:
        yield
    except BaseException:
        running.terminate()
        raise
    finally:
        timer.cancel()


def _by_sh(words: Sequence[str], timeout_seconds: float | None) -> tuple[Result, bool]:
    """The same for lvm2."""
    program = _program(words[0])
    # Buffers of our own: sh's objects refer to each other, and would keep what a program printed
    # until Python's collector comes by, which counts objects and not bytes.
    stdout, stderr = io.BytesIO(), io.BytesIO()
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
    exit_code, in_time = _ended(running, words, timeout_seconds)
    result = Result(exit_code, _text(stdout.getvalue()), _text(stderr.getvalue()))
    stdout.close()
    stderr.close()
    return result, in_time


def _ended(
    running: sh.RunningCommand, words: Sequence[str], timeout_seconds: float | None
) -> tuple[int, bool]:
    """The program's exit code, and whether it was in time; it is told to end where it is not."""
    if timeout_seconds is None:
        return _exit_code(running), True
    ended: Future[int] = Future()
    threading.Thread(target=_await, args=(running, ended), name="program", daemon=True).start()
    try:
        return ended.result(timeout_seconds), True
    except TimeoutError:
        # lvm2 blocks TERM while it holds a group's lock, so TERM lands at a safe point.
        # KILL could land between two metadata writes.
        with suppress(ProcessLookupError):
            running.signal(signal.SIGTERM)
    try:
        return ended.result(_GRACE_SECONDS), False
    except TimeoutError:
        # It waits for a disk in the kernel, and no signal ends that: whoever called need not wait.
        raise errors.CommandStuck(words, timeout_seconds, ended.done) from None


def _await(running: sh.RunningCommand, ended: Future[int]) -> None:
    try:
        ended.set_result(_exit_code(running))
    except BaseException as error:
        ended.set_exception(error)


def _exit_code(running: sh.RunningCommand) -> int:
    try:
        code: int = running.exit_code
    except sh.ErrorReturnCode as error:
        code = error.exit_code
    return code


def _program(name: str) -> sh.Command:
    try:
        # Looked up at each call: a program installed meanwhile is found.
        return sh.Command(name, search_paths=ENVIRONMENT["PATH"].split(":"))
    except sh.CommandNotFound:
        raise errors.ProgramMissing(name) from None


def _text(output: bytes) -> str:
    return output.decode(errors="backslashreplace")


# How often it is looked whether a program is alive whose terminal something else has open too.
_LOOK_SECONDS = 1.0
# How often while it is to end.
_END_SECONDS = 0.01
_PIECE_BYTES = 1 << 16
# More is no answer: a report of ten thousand volumes has a tenth of it.
_MOST_BYTES = 256 << 20


class _Terminal:
    """The real `Conversation`: a program on a terminal of its own, with a pipe for its reports.

    Raw and without echo, the terminal hands on what is said as it is; a line editor finds nothing
    to edit there (rl_initialize in libedit's readline.c asks for ECHO).
    """

    def __init__(
        self, words: Sequence[str], prompt: bytes, environment: Mapping[str, str], report: str
    ) -> None:
        program = _program(words[0])
        self._prompt = prompt
        terminal, its_terminal = os.openpty()
        reports, its_reports = os.pipe()
        # Unbuffered files and not numbers: they are closed once, however often they are told to.
        self._terminal = os.fdopen(terminal, "r+b", buffering=0)
        self._reports = os.fdopen(reports, "rb", buffering=0)
        with (
            os.fdopen(its_terminal, "r+b", buffering=0) as theirs,
            os.fdopen(its_reports, "wb", buffering=0),
        ):
            tty.setraw(its_terminal, termios.TCSANOW)  # and no ECHO
            os.set_blocking(terminal, False)
            os.set_blocking(reports, False)
            self._running = program(
                *words[1:],
                _env={**ENVIRONMENT, **environment, "TERM": "dumb", report: str(its_reports)},
                _in=theirs,
                _out=theirs,
                _err=theirs,
                _pass_fds={its_reports},
                # In the child: no other program that starts meanwhile may get the descriptor.
                _preexec_fn=lambda: os.set_inheritable(its_reports, True),
                # An interrupt at Carver's own terminal is not for it.
                _new_session=True,
                _bg=True,
                _bg_exc=False,
            )

    def exchange(self, line: str | None, seconds: float | None) -> str:
        unsaid = b"" if line is None else line.encode() + b"\n"
        deadline = None if seconds is None else time.monotonic() + seconds
        said, reported = bytearray(), bytearray()
        while unsaid or not said.endswith(self._prompt):
            self._wait(deadline, to_say=bool(unsaid))
            unsaid = unsaid[self._say(unsaid) :]
            said += _read(self._terminal)
            reported += _read(self._reports)
            if len(said) + len(reported) > _MOST_BYTES:
                raise ConversationOver(f"it said more than {_MOST_BYTES} bytes")
        # All that it reported was written before the prompt was.
        while piece := _read(self._reports):
            reported += piece
        return _text(bytes(reported))

    def is_waiting(self) -> bool:
        try:
            unasked = _read(self._terminal) + _read(self._reports)
        except ConversationOver:
            return False
        return self._is_running() and not unasked

    def end(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        if not self._terminal.closed:
            # TERM first: of a line that was said in part, what there is would be done at the end of
            # the file. lvm2 blocks TERM while it holds a group's lock, and while it waits for one
            # it only gives that up; the end of the file it meets whenever it is done.
            with suppress(ProcessLookupError):
                self._running.signal(signal.SIGTERM)
            self._terminal.close()
        while self._is_running():
            # It may wait for room in the pipe.
            with suppress(ConversationOver):
                while _read(self._reports):
                    pass
            if time.monotonic() >= deadline:
                return False
            time.sleep(_END_SECONDS)
        self._reports.close()
        return True

    def _is_running(self) -> bool:
        running: bool = self._running.is_alive()
        return running

    def _wait(self, deadline: float | None, *, to_say: bool) -> None:
        """Until there is something to read, or to say; raises TimeoutError, ConversationOver."""
        poll = select.poll()
        poll.register(self._terminal, select.POLLIN | (select.POLLOUT if to_say else 0))
        poll.register(self._reports, select.POLLIN)
        while True:
            left = _LOOK_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if poll.poll(min(left, _LOOK_SECONDS) * 1000):
                return
            if not self._is_running():
                raise ConversationOver("it ended")

    def _say(self, line: bytes) -> int:
        try:
            return self._terminal.write(line) or 0
        except OSError:
            raise ConversationOver("it ended") from None


def _read(stream: io.RawIOBase) -> bytes:
    """What there is to read now; raises ConversationOver where there will be no more."""
    try:
        piece = stream.read(_PIECE_BYTES)
    except OSError:  # EIO: nobody has the terminal open any more
        piece = b""
    if piece == b"":
        raise ConversationOver("it ended")
    return piece or b""
