"""Start programs: run them to their end, read their output as a stream, or talk on a terminal."""

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

# Intervals of the checks that a conversation's program is alive, in seconds: in general, and while
# the program is being ended. The terminal does not show that the program has ended, as another
# process may keep the terminal open.
_LOOK_SECONDS, _END_SECONDS = 1.0, 0.01
# Maximum number of bytes that one read of a program's output returns.
_PIECE_BYTES = 1 << 16
# Maximum number of bytes of an answer in a conversation with a program. A report of ten thousand
# volumes has a tenth of that.
_MOST_BYTES = 256 << 20


class Terminal:
    """The implementation of `Conversation`: a program on a terminal of its own.

    A pipe is for the program's reports. The terminal is raw and has no echo, so it passes on each
    line unchanged; and a line editor in the program finds nothing to edit (rl_initialize in
    libedit's readline.c requires ECHO).
    """

    def __init__(
        self,
        start: Callable[..., Any],  # a program as an object of sh, with its arguments
        prompt: bytes,
        environment: Mapping[str, str],
        report: str,
    ) -> None:
        self._prompt = prompt
        terminal, its_terminal = os.openpty()
        reports, its_reports = os.pipe()
        # The ends of terminal and pipe are files and not bare descriptors, as a file can be closed
        # twice. The files are unbuffered, as poll(2) sees only what is not in a buffer.
        self._terminal = os.fdopen(terminal, "r+b", buffering=0)
        self._reports = os.fdopen(reports, "rb", buffering=0)
        with (
            os.fdopen(its_terminal, "r+b", buffering=0) as theirs,
            os.fdopen(its_reports, "wb", buffering=0),
        ):
            tty.setraw(its_terminal, termios.TCSANOW)  # which also switches ECHO off
            os.set_blocking(terminal, False)
            os.set_blocking(reports, False)
            self._running = start(
                _env={**environment, "TERM": "dumb", report: str(its_reports)},
                _in=theirs,
                _out=theirs,
                _err=theirs,
                _pass_fds={its_reports},
                # Make the descriptor inheritable in the child process alone, so that no other
                # program that starts meanwhile inherits it.
                _preexec_fn=lambda: os.set_inheritable(its_reports, True),
                # The program gets a session of its own, so that Ctrl-C at Carver's terminal does
                # not reach the program.
                _new_session=True,
                _bg=True,
                _bg_exc=False,
            )

    def exchange(self, line: str | None, seconds: float | None) -> str:
        """Send a line, or nothing; return the program's report up to its next prompt."""
        unsent = b"" if line is None else line.encode() + b"\n"
        deadline = None if seconds is None else time.monotonic() + seconds
        output, reported = bytearray(), bytearray()
        while unsent or not output.endswith(self._prompt):
            self._wait(deadline, to_say=bool(unsent))
            unsent = unsent[self._say(unsent) :]
            output += _read(self._terminal)
            reported += _read(self._reports)
            if len(output) + len(reported) > _MOST_BYTES:
                raise ConversationOver(f"it said more than {_MOST_BYTES} bytes")
        # The program wrote all of its report before the prompt, so what remains is in the pipe.
        while piece := _read(self._reports):
            reported += piece
        return reported.decode(errors="backslashreplace")

    def is_waiting(self) -> bool:
        """Whether the program runs and waits at its prompt.

        Output that the program printed unasked is read and dropped, and means that it is not.
        """
        try:
            unexpected = _read(self._terminal) + _read(self._reports)
        except ConversationOver:
            return False
        return self._is_running() and not unexpected

    def resident_bytes(self) -> int:
        """The program's resident memory, in bytes (proc_pid_statm(5)); 0 once it has ended."""
        try:
            pages = Path(f"/proc/{self._running.pid}/statm").read_text().split()[1]
        except (OSError, IndexError):
            return 0
        return int(pages) * mmap.PAGESIZE

    def end(self, seconds: float) -> bool:
        """End the program; return whether it ended within `seconds`."""
        deadline = time.monotonic() + seconds
        if not self._terminal.closed:
            # SIGTERM is sent before the terminal is closed: at the end of its input, the shell
            # would execute the part of a line that it has read. lvm2 blocks SIGTERM while it has a
            # volume group's lock, and gives up waiting for a lock; it notices the end of its input
            # only when its command is done.
            with suppress(ProcessLookupError):
                self._running.signal(signal.SIGTERM)
            self._terminal.close()
        while self._is_running():
            # The program may wait for room in the pipe of its reports: empty the pipe.
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
        """Wait until the program has output to read, or its terminal takes more input.

        Raises TimeoutError at the deadline, ConversationOver once the program has ended.
        """
        poll = select.poll()
        poll.register(self._terminal, select.POLLIN | (select.POLLOUT if to_say else 0))
        poll.register(self._reports, select.POLLIN)
        while True:
            seconds = _LOOK_SECONDS if deadline is None else deadline - time.monotonic()
            if seconds <= 0:
                raise TimeoutError
            if poll.poll(min(seconds, _LOOK_SECONDS) * 1000):
                return
            if not self._is_running():
                raise ConversationOver("it ended")

    def _say(self, line: bytes) -> int:
        try:
            return self._terminal.write(line) or 0
        except OSError:
            raise ConversationOver("it ended") from None


def _read(stream: io.RawIOBase) -> bytes:
    """Read what a stream has now; raises ConversationOver at the end of the stream."""
    try:
        piece = stream.read(_PIECE_BYTES)
    except OSError:  # EIO: the program has closed the terminal
        piece = b""
    if piece == b"":
        raise ConversationOver("it ended")
    return piece or b""


# sh logs each process at INFO. This log is switched off, as Carver logs programs by its own
# observer.
logging.getLogger("sh").setLevel(logging.WARNING)

# Environment of all programs.
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C",
    # Without this variable, lvm2 would print a warning about each open socket of gRPC.
    "LVM_SUPPRESS_FD_WARNINGS": "1",
}

# Time that a program has to end after SIGTERM, in seconds. In this time lvm2 completes its present
# step.
_GRACE_SECONDS = 10.0

# Command that runs a program in the host's namespaces, with the host's lvm2, udev and locks.
HOST_NAMESPACES = ("nsenter", "--target", "1", "--mount", "--uts", "--ipc", "--")


class Programs:
    """The implementation of `Runner`: it runs programs on this machine.

    With `lvm_on_host`, lvm2 is the host's own, reached from a container that shares the host's
    process namespace. All other programs are the container's.
    """

    def __init__(
        self, *, lvm_on_host: bool = False, observe: Callable[[Finished], None] | None = None
    ) -> None:
        self._lvm_prefix: Sequence[str] = HOST_NAMESPACES if lvm_on_host else ()
        self._observe = observe or (lambda _: None)

    def __call__(self, *words: str, stdin: bytearray | None = None) -> Result:
        """Run a program to its end, and return its result.

        Raises ProgramMissing, and CommandTimedOut if the time limit passes before the program ends.
        Raises CommandStuck if the program does not end after SIGTERM either.
        """
        words = self._with_namespace(words)
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
        """Start a program for a conversation; the implementation of `Converse`."""
        program, *arguments = self._with_namespace(words)
        start = partial(_program(program), *arguments)
        return Terminal(start, prompt.encode(), {**ENVIRONMENT, **environment}, report)

    @contextmanager
    def stream(self, *words: str) -> Iterator[BinaryIO]:
        """Yield the output of a program while it runs; the implementation of `Stream`."""
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
                # The reader's error may follow from cut-off output. How the program ended explains
                # that better, so the reader's error is raised only if the program did not fail.
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

    def _with_namespace(self, words: tuple[str, ...]) -> tuple[str, ...]:
        return (*self._lvm_prefix, *words) if words[0] == "lvm" else words


def _execute(
    words: Sequence[str], timeout_seconds: float | None, stdin: bytearray | None = None
) -> tuple[Result, bool]:
    """Run a program; return its result, and whether the program ended within the time limit.

    Raises CommandStuck if the program does not end after SIGTERM.
    """
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
    """Start a program other than lvm2, with pipes for its output and errors.

    If `reads`, the program's standard input is a pipe, else it is empty. If `environment` is None,
    the program has this process's environment. Raises ProgramMissing, OSError.
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
    """Run mkfs or another short program by `subprocess`, with SIGTERM at the time limit.

    By `sh`, starting such a program would take longer than the program runs: sh forks a process as
    large as this one, and starts threads to read the output. Popen needs neither (vfork(2)).
    """
    running, in_time = start(words, reads=stdin is not None), True
    try:
        # The key in `stdin` is written from its own memory, so that no copy of it remains.
        stdout, stderr = running.communicate(cast(bytes, stdin), timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        in_time = False
        running.terminate()
        try:
            stdout, stderr = running.communicate(timeout=_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            # Another thread waits for the program's end, so that the caller need not.
            command.begin("program", running.communicate)
            raise mount_errors.CommandStuck(
                words, timeout_seconds or 0.0, lambda: running.returncode is not None
            ) from None
    return Result(running.returncode, _text(stdout), _text(stderr)), in_time


@contextmanager
def _ended_in(running: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Terminate a program when its reader fails, or at the deadline of the thread."""
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
    """Run lvm2 by `sh`, with SIGTERM at the time limit."""
    program = _program(words[0])
    # The output goes to buffers made here. sh's own objects refer to each other, so they would keep
    # the output until Python's garbage collector runs, which counts objects and not bytes.
    stdout, stderr = io.BytesIO(), io.BytesIO()
    # sh runs the program in the background only because of the time limit. With sh's own time
    # limit, sh looks ten times a second whether the program has ended, so each program would take a
    # multiple of 0.1 s.
    running = program(
        *words[1:],
        _env=ENVIRONMENT,
        _out=stdout,
        _err=stderr,
        _tty_out=False,
        _bg=True,
        _bg_exc=False,
    )
    exit_code, in_time = _wait_for_end(running, words, timeout_seconds)
    result = Result(exit_code, _text(stdout.getvalue()), _text(stderr.getvalue()))
    stdout.close()
    stderr.close()
    return result, in_time


def _wait_for_end(
    running: sh.RunningCommand, words: Sequence[str], timeout_seconds: float | None
) -> tuple[int, bool]:
    """Wait for a program; return its exit code, and whether the program ended in time.

    Sends SIGTERM at the time limit. Raises CommandStuck if the program does not end after SIGTERM.
    """
    if timeout_seconds is None:
        return _exit_code(running), True
    future = command.begin("program", lambda: _exit_code(running))
    try:
        return future.result(timeout_seconds), True
    except TimeoutError:
        # SIGTERM is safe, as lvm2 blocks it while it has a volume group's lock. SIGKILL could come
        # between two writes of metadata.
        with suppress(ProcessLookupError):
            running.signal(signal.SIGTERM)
    try:
        return future.result(_GRACE_SECONDS), False
    except TimeoutError:
        # The program waits for a disk in the kernel, where no signal ends it. The caller need not
        # wait for it.
        raise mount_errors.CommandStuck(words, timeout_seconds, future.done) from None


def _exit_code(running: sh.RunningCommand) -> int:
    try:
        return int(running.exit_code)
    except sh.ErrorReturnCode as error:
        return int(error.exit_code)


def _program(name: str) -> sh.Command:
    try:
        # The program is looked up at each call, so that one that was installed meanwhile is found.
        return sh.Command(name, search_paths=ENVIRONMENT["PATH"].split(":"))
    except sh.CommandNotFound:
        raise mount_errors.ProgramMissing(name) from None


def _text(output: bytes) -> str:
    return output.decode(errors="backslashreplace")
