"""Run lvm2 commands in one lvm2 shell that stays open; in processes where that is in doubt."""

import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lvm import errors
from mount import errors as mount_errors
from mount.command import (
    Conversation,
    ConversationOver,
    Converse,
    Finished,
    Result,
    Run,
    patience_seconds,
    remaining_seconds,
)

_log = logging.getLogger(__name__)


# No history is kept, and no line editor's settings are read.
_NO_LINE_EDITOR = dict.fromkeys(("HOME", "EDITRC", "INPUTRC"), "/dev/null")

_REPORTS = {"fullreport", "lvs", "pvs", "vgs"}
_CHANGES = {
    *("lvchange", "lvconvert", "lvcreate", "lvextend", "lvremove", "lvrename"),
    *("pvchange", "pvcreate", "vgchange", "vgcreate", "vgextend", "vgreduce", "vgremove"),
}

# Options that a whole shell has, and not a command of it.
OF_A_SHELL = ("--devices", "--config", "--reportformat")

# tools.h: MAX_ARGS, at which lvm_split() gives up.
_TOO_MANY_WORDS = 64
# What the kernel takes to a terminal at once (tty_write() in drivers/tty/tty_io.c), with the end of
# the line. Of a longer one the shell could be left with a part, and would do that.
_LONGEST_BYTES = 2047
# What a line of a terminal is made of; lvm_split() splits at blanks alone then.
_PLAIN = re.compile(r"[ -~]*")

# What the shell needs otherwise, to tell of each command how it ended.
_OWN = {"log/report_command_log"}

# A device's path as a part of a filter's expression and of a quoted string (lvm.conf(5)): nothing
# there means anything else to either, but for what stands in brackets.
_PATH = re.compile(r"/[A-Za-z0-9_/.+:@=,-]+")
_SPECIAL, _IN_BRACKETS = re.compile(r"[.+]"), r"[\g<0>]"


def only_looks(words: Sequence[str]) -> bool:
    """Whether a command of lvm2's changes nothing."""
    return words[1:2] != () and words[1] in _REPORTS


@dataclass(frozen=True)
class Confinement:
    """What every command of one shell has in common: the devices that it sees, and settings."""

    devices: str = ""
    settings: str = ""

    def covers(self, other: "Confinement") -> bool:
        """Whether a shell with this does what one with `other` would: it may have more settings."""
        return self.devices == other.devices and other._pairs().items() <= self._pairs().items()

    def joined(self, other: "Confinement") -> "Confinement":
        """What covers both, where that can be; else the other."""
        pairs = {**self._pairs(), **other._pairs()}
        if self.devices != other.devices or not self._pairs().items() <= pairs.items():
            return other
        return Confinement(other.devices, " ".join(f"{key}={pairs[key]}" for key in pairs))

    def lines(self) -> list[str]:
        """The same as lines of lvm.conf(5).

        The option --devices is not for a shell: lvm2 2.03.16 keeps the list's memory from one
        command to the next after it has freed it, and crashes or loops at the third. What the
        option overrules is overruled here too.
        """
        lines = [f"{key}={value}" for key, value in self._pairs().items()]
        if self.paths:
            accepted = [f"a|^{_SPECIAL.sub(_IN_BRACKETS, path)}$|" for path in self.paths]
            patterns = ",".join(f'"{pattern}"' for pattern in (*accepted, "r|.*|"))
            lines += [
                f"devices/global_filter=[{patterns}]",
                'devices/filter=["a|.*|"]',
                "devices/use_devicesfile=0",
            ]
        return lines

    def _pairs(self) -> dict[str, str]:
        # What lvm.lvm2 writes: settings without blanks, between blanks.
        pairs = dict(one.split("=", 1) for one in self.settings.split())
        return {key: value for key, value in pairs.items() if key not in _OWN}

    @property
    def paths(self) -> list[str]:
        """The devices that it sees; none for all."""
        return self.devices.split(",") if self.devices else []


@dataclass(frozen=True)
class Line:
    """A command as it is said to a shell."""

    text: str
    subcommand: str
    confinement: Confinement

    @property
    def changes(self) -> bool:
        """Whether it does more than to look."""
        return self.subcommand not in _REPORTS

    @classmethod
    def of(cls, words: tuple[str, ...]) -> Self | None:
        """The words of a `Run`, or None for what is not said to a shell, or cannot be."""
        if words[0] != "lvm" or words[1:2] == () or words[1] not in _REPORTS | _CHANGES:
            return None
        kept, options = _parted(words[1:])
        if kept[0] in _REPORTS and options.get("--reportformat") != "json":
            return None  # the shell's reports are all of one form
        confinement = Confinement(options.get("--devices", ""), options.get("--config", ""))
        quoted = [one for word in kept if (one := _quoted(word))]
        text = " ".join(quoted)
        can_be_said = len(quoted) == len(kept) < _TOO_MANY_WORDS and len(text) <= _LONGEST_BYTES
        can_be_set = all(_PATH.fullmatch(path) for path in confinement.paths)
        return cls(text, kept[0], confinement) if can_be_said and can_be_set else None


def _parted(words: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """The words without the options of a shell, and those."""
    options = dict.fromkeys(OF_A_SHELL, "")
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--":
            return [*kept, word, *rest], options
        if word in options:
            options[word] = next(rest, "")
        else:
            kept.append(word)
    return kept, options


def _quoted(word: str) -> str | None:
    """A word so that lvm_split() gives it back: quotes around it count, and nothing escapes."""
    if not _PLAIN.fullmatch(word):
        return None
    if word and " " not in word and word[0] not in "\"'#":
        return word
    return next((f"{quote}{word}{quote}" for quote in "\"'" if quote not in word), None)


def answer(subcommand: str, reported: str) -> Result:
    """The result of a command, as a process of its own would have given it.

    Raises ValueError where that is not the one whole answer to that command.
    """
    try:
        document = json.loads(reported)
        *messages, status = document["log"]
        whole = status["log_type"] == "status" and status["log_object_name"] == subcommand
        code = int(status["log_ret_code"])
        printed = _lines(messages, {"print"})
        complaints = _lines(messages, {"fatal", "error", "warn"})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if not whole:
        raise ValueError(f"the answer to {subcommand} says {status}")
    # tools/errors.h: ECMD_PROCESSED, which a process turns into 0.
    exit_code = 0 if code == 1 else code or 5
    return Result(exit_code, reported if "report" in document else printed, complaints)


def _lines(messages: list[Mapping[str, str]], kinds: set[str]) -> str:
    return "".join(f"  {one['log_message']}\n" for one in messages if one["log_type"] in kinds)


# What the shell reads when it starts, besides the node's own settings. Of these, lvm2 takes the
# log's and the report's from files only (CFG_DISALLOW_INTERACTIVE), and any setting that is given
# with a command has it build all that it knows anew, twice.
_SETTINGS = """
# Carver's, for a shell of lvm2's that it keeps open. Written anew whenever it starts one.
log/report_command_log=1
log/command_log_selection="log_type!=status || log_context=shell"
log/command_log_cols="log_seq_num,log_type,log_context,log_object_name,log_message,log_ret_code"
log/command_log_sort="log_seq_num"
log/command_names=0
log/prefix=""
# Questions are answered with no, at once.
log/silent=1
report/output_format="json"
devices/hints="none"
# To take down what asynchronous reads need, the kernel waits for each processor once a command.
global/use_aio=0
"""


def prepare(directory: Path, root: Path, confinement: Confinement) -> None:
    """Make the directory that a shell has in the place of /etc/lvm: that, and settings of its own.

    `root` is where lvm2's own root directory is seen; `directory` has the same path there. Raises
    OSError, also where the node has what cannot be had there too.
    """
    own = root / "etc/lvm"
    settings = "lvmlocal.conf"
    if tagged := sorted(own.glob("lvm_*.conf")):
        raise OSError(f"{tagged[0]} would be over the shell's own settings")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    # lvm2 makes them by itself, but not through a link. Where they cannot be made it says so.
    for name in ("archive", "backup"):
        with suppress(OSError):
            (own / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in own.iterdir():
        link = directory / path.name
        if path.name != settings and not link.is_symlink():
            link.symlink_to(Path("/etc/lvm") / path.name)
    local = own / settings
    # Bytes: lvm2 asks of no encoding, and a comment may be of any.
    text = local.read_bytes() if local.exists() else b""
    lines = "\n".join(confinement.lines())
    (directory / settings).write_bytes(text + f"{_SETTINGS}{lines}\n".encode())


# It is at its prompt after some tenths of a second, on a slow machine.
_START_SECONDS = 10.0
# What lvm2 holds a group's lock for, and so does not end within, is over by then as a rule.
_GRACE_SECONDS = 5.0
# How long those wait for another's command who have a shell renewed, and say no limit.
_LONGEST_TURN_SECONDS = 60.0
_RENEWED = ("lvm", "exit")
# lvm2 keeps memory that it once had: after so many commands, an idle shell is ended.
_MANY_COMMANDS = 100
# The most memory of a shell that is kept while it is idle. One that has just started has 10 MiB. To
# suspend a device, as for each thin volume or snapshot, lvm2 locks all that it has mapped into
# memory (mlock(2) in lib/mm/memlock.c): its buffer for I/O, of 8 MiB or of global/io_memory_size, a
# reserve of 10 MiB, and its libraries; all that stays, and its heap does not shrink.
_MOST_IDLE_BYTES = 40 << 20
_IDLE_SECONDS = 60.0
# Where there is no shell, there will hardly be one soon.
_LACKING_RESTS = 10


class Session:
    """One lvm2 shell, and processes in its place where there is none, or where it is in doubt.

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
        # How many commands the shell was given, and when the last (monotonic, seconds).
        self._commands, self._last_seconds = 0, 0.0
        self._rests_until = 0.0
        self._is_closed = False
        # A shell that did not end in time, what it does, and since when.
        self._stuck: tuple[Conversation, str, float] | None = None

    def __call__(self, *words: str) -> Result:
        """Run a command in the shell if it can, else in a process; a `mount.command.Run`.

        Raises what a process raises, SessionLost, and StillRunning.
        """
        line = Line.of(words)
        if line is None:
            if not only_looks(words):
                with self._my_turn(words):
                    self._look_at_stuck(changes=True)
            return self._run(*words)
        with self._my_turn(words):
            self._look_at_stuck(changes=line.changes)
            ready = self._ready(line.confinement, words)
            result = self._ask(ready, line, words) if ready else None
        return self._run(*words) if result is None else result

    def renew(self) -> None:
        """Have another shell run the next command, for what this one said is in doubt.

        Raises CommandTimedOut where what it does outlasts the caller's time, and a minute.
        """
        with self._my_turn(_RENEWED, _LONGEST_TURN_SECONDS):
            self._hang_up()

    def rest(self) -> None:
        """End a shell that is idle for a minute, if it has run many commands or takes much memory.

        The next command starts another. Its memory is as large as the largest report it ever made,
        and as what lvm2 ever locked. A shell at work is left alone.
        """
        if not self._turn.acquire(blocking=False):
            return
        try:
            is_idle = time.monotonic() - self._last_seconds >= _IDLE_SECONDS
            if self._shell is not None and is_idle:
                is_large = self._shell.resident_bytes() > _MOST_IDLE_BYTES
                if is_large or self._commands >= _MANY_COMMANDS:
                    self._hang_up()
        finally:
            self._turn.release()

    def close(self) -> None:
        """End the shell after its present command; from then on there are only processes.

        A command that takes longer than a moment is left to end by itself.
        """
        self._is_closed = True
        with suppress(mount_errors.CommandTimedOut), self._my_turn(_RENEWED, _GRACE_SECONDS):
            self._hang_up()
            if self._stuck is not None and self._stuck[0].end(_GRACE_SECONDS):
                self._stuck = None

    def _ask(self, ready: Conversation, line: Line, words: tuple[str, ...]) -> Result | None:
        """The shell's answer; None where it gave none, and a process may do the same."""
        started = self._last_seconds = time.monotonic()
        self._commands += 1
        try:
            said = ready.exchange(line.text, remaining_seconds())
            result = answer(line.subcommand, said)
            if result.exit_code and errors.lacks_memory(result.stderr):
                # It would lack it at the next command, too, and a process need not.
                raise ValueError("it lacks memory")
        except TimeoutError:
            self._give_up(line, "its time is over")
            seconds = time.monotonic() - started
            self._observe(Finished(words, None, seconds, mount_errors.CommandTimedOut.__name__))
            raise mount_errors.CommandTimedOut(words, seconds) from None
        except (ConversationOver, ValueError) as doubt:
            self._give_up(line, str(doubt))
            if line.changes:
                seconds = time.monotonic() - started
                self._observe(Finished(words, None, seconds, errors.SessionLost.__name__))
                raise errors.SessionLost(words, str(doubt)) from None
            return None
        code, seconds = result.exit_code, time.monotonic() - started
        error = type(errors.classify(words, code, result.stderr)).__name__ if code else ""
        self._observe(Finished(words, code, seconds, error))
        if result.exit_code and not errors.is_explained(result.stderr):
            # It may have been the shell's own trouble: the next command is said to another.
            self._hang_up(line.subcommand)
        return result

    def _ready(self, confinement: Confinement, words: tuple[str, ...]) -> Conversation | None:
        """A shell with this confinement that is at its prompt; None where there is none."""
        if self._shell is not None:
            is_fit = not self._is_closed and self._confinement.covers(confinement)
            if is_fit and self._shell.is_waiting():
                return self._shell
            self._hang_up()
        if self._stuck is None and not self._is_closed and time.monotonic() >= self._rests_until:
            self._start(confinement, words)
        return self._shell

    def _start(self, confinement: Confinement, words: tuple[str, ...]) -> None:
        limit = remaining_seconds()
        if limit == 0:
            raise mount_errors.CommandTimedOut(words, 0.0)
        # Settings of some commands that mean nothing to others: one shell for all of them.
        self._confinement = self._confinement.joined(confinement)
        try:
            prepare(self._directory, self._root, self._confinement)
            self._shell = self._converse(
                "lvm",
                prompt="lvm> ",
                environment={"LVM_SYSTEM_DIR": str(self._directory), **_NO_LINE_EDITOR},
                report="LVM_REPORT_FD",
            )
            self._shell.exchange(None, min(_START_SECONDS, limit or _START_SECONDS))
        except (OSError, ConversationOver, mount_errors.ProgramMissing) as problem:
            why = str(problem) or "it shows no prompt"
            _log.warning("no shell of lvm2's, but a process for each command: %s", why)
            self._rests_until = time.monotonic() + _LACKING_RESTS * self._rest_seconds
            self._hang_up("its start")

    def _give_up(self, line: Line, why: str) -> None:
        _log.warning("lvm2's shell is given up at %s: %s", line.subcommand, why)
        self._rests_until = time.monotonic() + self._rest_seconds
        self._hang_up(line.subcommand)

    def _hang_up(self, doing: str = "what it did last") -> None:
        """End the shell; where it does not end, remember what it does."""
        if self._shell is not None:
            since = time.monotonic()
            if not self._shell.end(_GRACE_SECONDS):
                self._stuck = (self._shell, doing, since)
            self._shell, self._commands = None, 0

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
        limit = patience_seconds(longest_seconds)
        if not self._turn.acquire(timeout=-1 if limit == math.inf else limit):
            raise mount_errors.CommandTimedOut(words, limit)
        try:
            yield
        finally:
            self._turn.release()
