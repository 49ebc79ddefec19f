"""A shell of lvm2's that is kept open: started, watched, given up. It is a `Run` for one group.

A new process for each command costs lvm2 most of its time. What the shell does not answer beyond
doubt is never said to it twice: a look is taken by a process of its own instead, and of a change
the caller is told that nobody knows. So whoever repeats a change begins with a fresh report.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lvm import errors, shell
from lvm.command import (
    Conversation,
    ConversationOver,
    Converse,
    Finished,
    Result,
    Run,
    remaining_seconds,
)
from lvm.shell import Confinement, Line

_log = logging.getLogger(__name__)

# It is at its prompt after some tenths of a second, on a slow machine.
_START_SECONDS = 10.0
# What lvm2 holds a group's lock for, and so does not end within, is over by then as a rule.
_GRACE_SECONDS = 5.0
# How long those wait for another's command who have a shell renewed, and say no limit.
_LONGEST_TURN_SECONDS = 60.0
_RENEWED = ("lvm", "exit")
# What lvm2 had of memory once it keeps: one that was told so much is ended when it is idle so long.
_MANY_COMMANDS = 100
_IDLE_SECONDS = 60.0
# Where there is no shell, there will hardly be one soon.
_LACKING_RESTS = 10


class Session:
    """One shell at a time, and processes in its place: where it is lacking, by doubt.

    One command at a time, the others wait. `directory` is the session's own, and lvm2 must see it
    at the same path; `root` is where lvm2's root directory is seen.
    """

    def __init__(
        self,
        run: Run,
        converse: Converse,
        directory: Path,
        *,
        root: Path = Path("/"),
        rest_seconds: float = 60.0,
        observe: Callable[[Finished], None] = lambda _: None,
    ) -> None:
        self._run = run
        self._converse = converse
        self._directory = directory
        self._root = root
        # How long no shell is started after one failed.
        self._rest_seconds = rest_seconds
        self._observe = observe
        self._turn = threading.Lock()
        self._shell: Conversation | None = None
        self._confinement = Confinement()
        # How much the shell was told, and when last (monotonic, seconds).
        self._told, self._told_seconds = 0, 0.0
        self._rests_until = 0.0
        self._is_closed = False
        # A shell that did not end when it was told to, what it does, and since when.
        self._stuck: tuple[Conversation, str, float] | None = None

    def __call__(self, *words: str) -> Result:
        """Have the shell do what it can do, and a process the rest: the seam `lvm.command.Run`.

        Raises what a process raises, SessionLost, and StillRunning.
        """
        line = Line.of(words)
        if line is None:
            if not shell.only_looks(words):
                with self._my_turn(words):
                    self._look_at_stuck(changes=True)
            return self._run(*words)
        with self._my_turn(words):
            self._look_at_stuck(changes=line.changes)
            ready = self._ready(line.confinement, words)
            result = self._ask(ready, line, words) if ready else None
        return self._run(*words) if result is None else result

    def renew(self) -> None:
        """Have another shell do what comes next: what this one said is in doubt.

        Raises CommandTimedOut where what it does outlasts the caller's time, and a minute.
        """
        with self._my_turn(_RENEWED, _LONGEST_TURN_SECONDS):
            self._hang_up("what it did last")

    def rest(self) -> None:
        """End a shell that was told much, and nothing for a minute; the next has another begun.

        Its memory is as large as the largest report it ever made. Nobody waits for one at work.
        """
        if not self._turn.acquire(blocking=False):
            return
        try:
            is_idle = time.monotonic() - self._told_seconds >= _IDLE_SECONDS
            if self._told >= _MANY_COMMANDS and is_idle:
                self._hang_up("what it did last")
        finally:
            self._turn.release()

    def close(self) -> None:
        """End the shell once it has done what it does; from then on there are processes only.

        What takes longer than a moment is left to end by itself.
        """
        self._is_closed = True
        with suppress(errors.CommandTimedOut), self._my_turn(_RENEWED, _GRACE_SECONDS):
            self._hang_up("what it did last")
            if self._stuck is not None and self._stuck[0].end(_GRACE_SECONDS):
                self._stuck = None

    def _ask(self, ready: Conversation, line: Line, words: tuple[str, ...]) -> Result | None:
        """The shell's answer; None where it gave none, and a process may do the same."""
        started = self._told_seconds = time.monotonic()
        self._told += 1
        try:
            said = ready.exchange(line.text, remaining_seconds())
            result = shell.answer(line.subcommand, said)
            if result.exit_code and errors.lacks_memory(result.stderr):
                # It would lack it at the next command, too, and a process need not.
                raise ValueError("it lacks memory")
        except TimeoutError:
            self._give_up(line, "its time is over")
            raise errors.CommandTimedOut(words, time.monotonic() - started) from None
        except (ConversationOver, ValueError) as doubt:
            self._give_up(line, str(doubt))
            if line.changes:
                raise errors.SessionLost(words, str(doubt)) from None
            return None
        self._observe(Finished(words, result.exit_code, time.monotonic() - started))
        if result.exit_code and not errors.is_explained(result.stderr):
            # It may have been the shell's own trouble: the next command is said to another.
            self._hang_up(line.subcommand)
        return result

    def _ready(self, confinement: Confinement, words: tuple[str, ...]) -> Conversation | None:
        """A shell with this confinement that waits to be told; None where there is none."""
        if self._shell is not None:
            if self._is_usable(self._shell, confinement):
                return self._shell
            self._hang_up("what it did last")
        if self._stuck is None and not self._is_closed and time.monotonic() >= self._rests_until:
            self._start(confinement, words)
        return self._shell

    def _is_usable(self, ready: Conversation, confinement: Confinement) -> bool:
        return not self._is_closed and self._confinement.covers(confinement) and ready.is_waiting()

    def _start(self, confinement: Confinement, words: tuple[str, ...]) -> None:
        limit = remaining_seconds()
        if limit == 0:
            raise errors.CommandTimedOut(words, 0.0)
        # Settings of some commands that mean nothing to others: one shell for all of them.
        self._confinement = self._confinement.joined(confinement)
        try:
            shell.prepare(self._directory, self._root, self._confinement)
            self._shell = self._converse(
                "lvm",
                prompt=shell.PROMPT,
                environment=shell.environment(self._directory),
                report=shell.REPORT,
            )
            self._shell.exchange(None, min(_START_SECONDS, limit or _START_SECONDS))
        except (OSError, ConversationOver, errors.ProgramMissing) as problem:
            why = str(problem) or "it shows no prompt"
            _log.warning("no shell of lvm2's, but a process for each command: %s", why)
            self._rests_until = time.monotonic() + _LACKING_RESTS * self._rest_seconds
            self._hang_up("its start")

    def _give_up(self, line: Line, why: str) -> None:
        _log.warning("lvm2's shell is given up at %s: %s", line.subcommand, why)
        self._rests_until = time.monotonic() + self._rest_seconds
        self._hang_up(line.subcommand)

    def _hang_up(self, doing: str) -> None:
        """End the shell; where it does not end, remember what it does."""
        if self._shell is not None:
            since = time.monotonic()
            if not self._shell.end(_GRACE_SECONDS):
                self._stuck = (self._shell, doing, since)
            self._shell, self._told = None, 0

    def _look_at_stuck(self, *, changes: bool) -> None:
        """Raises StillRunning for a change while a shell that was given up may change something."""
        if self._stuck is None:
            return
        conversation, doing, since = self._stuck
        if conversation.end(0):
            self._stuck = None
        elif changes:
            raise errors.StillRunning(doing, time.monotonic() - since)

    @contextmanager
    def _my_turn(self, words: tuple[str, ...], longest_seconds: float = math.inf) -> Iterator[None]:
        remaining = remaining_seconds()
        limit = min(longest_seconds, math.inf if remaining is None else remaining)
        if not self._turn.acquire(timeout=-1 if limit == math.inf else limit):
            raise errors.CommandTimedOut(words, limit)
        try:
            yield
        finally:
            self._turn.release()
