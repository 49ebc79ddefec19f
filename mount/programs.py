"""Start programs: to their end, as a stream, or on a terminal for a conversation."""

import io
import logging
import mmap
import os
import select
import signal
import subprocess
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, cast

import sh

from mount import command, mount_errors
from mount.command import (
    Conversation,
    ConversationOver,
    Finished,
    Result,
    remaining_seconds,
)

# How often to check that a program is alive (another process may keep its terminal open), and
# how often while it is being ended.
_LOOK_SECONDS, _END_SECONDS = 1.0, 0.01
_PIECE_BYTES = 1 << 16
# The most of one answer: a report of ten thousand volumes has a tenth of it.
_MOST_BYTES = 256 << 20


class Terminal:
    """The real `Conversation`: a program on a terminal of its own, with a pipe for its reports.

    Raw and without echo, the terminal hands on what is said as it is; a line editor finds nothing
    to edit there (rl_initialize in libedit's readline.c asks for ECHO).
    """

    def __init__(
        self,
        start: Callable[..., Any],  # a program of sh's with its arguments
        prompt: bytes,
        environment: Mapping[str, str],
        report: str,
    ) -> None:
        self._prompt = prompt
        terminal, its_terminal = os.openpty()
        reports, its_reports = os.pipe()
        # Unbuffered files and not numbers: they are closed once, however often that is asked.
        self._terminal = os.fdopen(terminal, "r+b", buffering=0)
        self._reports = os.fdopen(reports, "rb", buffering=0)
        with (
            os.fdopen(its_terminal, "r+b", buffering=0) as theirs,
            os.fdopen(its_reports, "wb", buffering=0),
        ):
            tty.setraw(its_terminal, termios.TCSANOW)  # and no ECHO
            os.set_blocking(terminal, False)
            os.set_blocking(reports, False)
            self._running = start(
                _env={**environment, "TERM": "dumb", report: str(its_reports)},
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
        """Send a line, or nothing, and return the report up to the prompt."""
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
        return reported.decode(errors="backslashreplace")

    def is_waiting(self) -> bool:
        """Whether it runs and waits at its prompt."""
        try:
            unasked = _read(self._terminal) + _read(self._reports)
        except ConversationOver:
            return False
        return self._is_running() and not unasked

    def resident_bytes(self) -> int:
        """How much memory it takes now (proc_pid_statm(5)); 0 once it has ended."""
        try:
            pages = Path(f"/proc/{self._running.pid}/statm").read_text().split()[1]
        except (OSError, IndexError):
            return 0
        return int(pages) * mmap.PAGESIZE

    def end(self, seconds: float) -> bool:
        """End it; whether it ended within so many seconds."""
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
        return bool(self._running.is_alive())

    def _wait(self, deadline: float | None, *, to_say: bool) -> None:
        """Wait for something to read, or for room to write; TimeoutError, ConversationOver."""
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
    """Read what there is now; raises ConversationOver at the end."""
    try:
        piece = stream.read(_PIECE_BYTES)
    except OSError:  # EIO: the program has closed the terminal
        piece = b""
    if piece == b"":
        raise ConversationOver("it ended")
    return piece or b""


# sh announces each process at INFO; Carver's own observer does that better.
logging.getLogger("sh").setLevel(logging.WARNING)

ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C",
    # gRPC's sockets are open in this process; lvm2 would name each in a warning.
    "LVM_SUPPRESS_FD_WARNINGS": "1",
}

# How long a program has to end after SIGTERM; lvm2 completes its present step within that.
_GRACE_SECONDS = 10.0

# Enters the namespaces in which the host's own lvm2, udev and locks live.
HOST_NAMESPACES = ("nsenter", "--target", "1", "--mount", "--uts", "--ipc", "--")


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
        program still runs after SIGTERM.
        """
        words = self._reached(words)
        remaining = remaining_seconds()
        if remaining == 0:
            raise mount_errors.CommandTimedOut(words, 0.0)
        started = time.monotonic()
        result, in_time = _execute(words, remaining, stdin)
        self._observe(Finished(words, result.exit_code, time.monotonic() - started))
        if not in_time:
            raise mount_errors.CommandTimedOut(words, remaining or 0.0)
        return result

    def converse(
        self, *words: str, prompt: str, environment: Mapping[str, str], report: str
    ) -> Conversation:
        """Start a program to be spoken to: the real `Converse`."""
        program, *arguments = self._reached(words)
        start = partial(_program(program), *arguments)
        return Terminal(start, prompt.encode(), {**ENVIRONMENT, **environment}, report)

    @contextmanager
    def stream(self, *words: str) -> Iterator[BinaryIO]:
        """Read what a program prints, as it comes: the real `Stream`."""
        remaining, started = remaining_seconds(), time.monotonic()
        if remaining == 0:
            raise mount_errors.CommandTimedOut(words, 0.0)
        problem: mount_errors.CommandError | None = None
        with (
            TemporaryFile() as stderr,
            start(words, reads=False, stderr=stderr) as running,
            _ended_in(running),
        ):
            output = cast("BinaryIO", running.stdout)
            try:
                yield output
            except mount_errors.CommandError as error:
                # Output that is cut off is explained by how the program ended.
                problem = error
            is_read = not output.read(1)
            if not is_read:
                running.terminate()
            code = running.wait()
            self._observe(Finished(words, code, time.monotonic() - started))
            stderr.seek(0)
            complaints = _text(stderr.read())
        if remaining_seconds() == 0:
            raise mount_errors.CommandTimedOut(words, remaining or 0.0)
        if is_read and code:
            raise mount_errors.CommandFailed(words, code, complaints)
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


def start(
    words: Sequence[str],
    *,
    reads: bool,
    stderr: BinaryIO | int = subprocess.PIPE,
    environment: Mapping[str, str] | None = ENVIRONMENT,
) -> "subprocess.Popen[bytes]":
    """Start a program other than lvm2, with pipes; its input is one if it reads, else is empty.

    Without an environment the program has this process's. Raises ProgramMissing, OSError.
    """
    try:
        return subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.PIPE if reads else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
    except FileNotFoundError:
        raise mount_errors.ProgramMissing(words[0]) from None


def _by_subprocess(
    words: Sequence[str], timeout_seconds: float | None, stdin: bytearray | None = None
) -> tuple[Result, bool]:
    """Run mkfs and the like, which sh would take longer to start than they run.

    It forks a process of this one's size, and has threads to read what the program prints; Popen
    has neither (vfork(2)).
    """
    running, in_time = start(words, reads=stdin is not None), True
    try:
        # Written from where it is: nothing copies it.
        stdout, stderr = running.communicate(cast(bytes, stdin), timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        in_time = False
        running.terminate()
        try:
            stdout, stderr = running.communicate(timeout=_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            # The caller need not wait for its end.
            command.begin("program", running.communicate)
            raise mount_errors.CommandStuck(
                words, timeout_seconds or 0.0, lambda: running.returncode is not None
            ) from None
    return Result(running.returncode, _text(stdout), _text(stderr)), in_time


@contextmanager
def _ended_in(running: "subprocess.Popen[bytes]") -> Iterator[None]:
    """End a program when its reader fails, or at the deadline."""
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
    """Run lvm2."""
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
    """The exit code, and whether the program was in time; SIGTERM at the deadline."""
    if timeout_seconds is None:
        return _exit_code(running), True
    ended = command.begin("program", lambda: _exit_code(running))
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
        # It waits for a disk in the kernel, and no signal ends that: the caller need not wait.
        raise mount_errors.CommandStuck(words, timeout_seconds, ended.done) from None


def _exit_code(running: sh.RunningCommand) -> int:
    try:
        return int(running.exit_code)
    except sh.ErrorReturnCode as error:
        return int(error.exit_code)


def _program(name: str) -> sh.Command:
    try:
        # Looked up at each call: a program installed meanwhile is found.
        return sh.Command(name, search_paths=ENVIRONMENT["PATH"].split(":"))
    except sh.CommandNotFound:
        raise mount_errors.ProgramMissing(name) from None


def _text(output: bytes) -> str:
    return output.decode(errors="backslashreplace")
