"""A program on a terminal of its own, which is told a line and answers up to its next prompt."""

import io
import os
import select
import signal
import termios
import time
import tty
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from lvm.command import ConversationOver

# How often it is looked whether a program is alive whose terminal something else has open too.
_LOOK_SECONDS = 1.0
# How often while it is to end.
_END_SECONDS = 0.01
_PIECE_BYTES = 1 << 16
# More is no answer: a report of ten thousand volumes has a tenth of it.
_MOST_BYTES = 256 << 20


class Terminal:
    """The real `Conversation`: a program on a terminal of its own, with a pipe for its reports.

    Raw and without echo, the terminal hands on what is said as it is; a line editor finds nothing
    to edit there (rl_initialize in libedit's readline.c asks for ECHO).
    """

    def __init__(
        self,
        start: Callable[..., Any],
        prompt: bytes,
        environment: Mapping[str, str],
        report: str,
    ) -> None:
        # `start` is a program of sh's with its arguments.
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
        """Say a line, or nothing; what it reported until its prompt."""
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
        """Whether it runs, and has said nothing since its last prompt."""
        try:
            unasked = _read(self._terminal) + _read(self._reports)
        except ConversationOver:
            return False
        return self._is_running() and not unasked

    def end(self, seconds: float) -> bool:
        """Have it end; whether it has, so many seconds later."""
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
