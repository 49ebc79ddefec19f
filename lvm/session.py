"""Run the lvm2 commands of a volume group in one lvm2 shell (lvm(8)) that stays open.

Why: most of an lvm2 command's time is the start of its process. With this shell a volume's whole
life, from CreateVolume to DeleteVolume, takes 0.89 of the time of the same commands by hand. With
lvm2 started anew for each command it takes 1.34 of that time (docs/performance.md, "sessions off").
And each group has its own shell, which sees only the group's own disks: a hung disk keeps the shell
of its group waiting, and no other.

Idea: commands are typed at the prompt of `lvm`, one at a time. lvm2 answers with one JSON document
on a descriptor of its own (LVM_REPORT_FD), which ends with the command's status.

    Lvm.__call__ ---> Session ---+--- line at the prompt ---> shell: lvm> lvcreate ...
                                 |<-- JSON: messages, report, status ---'
                                 |
                                 +--- otherwise ------------> process: lvm lvcreate ...

1. A command that the shell cannot run safely runs as a process. These are commands whose line is
   too long or has characters that a terminal would change, commands of unknown subcommands, and
   reports in another form than JSON (`Line.of`).
2. Options that are equal for all commands are settings of the shell, in its own LVM_SYSTEM_DIR
   (`Confinement`, `prepare`). For a command with other settings the shell is ended, and a new one
   is started.
3. An answer counts only if it is complete and ends with the status of that command (`answer`).
4. In any doubt, such as a missing status or too little memory, the shell is ended by SIGTERM, never
   killed, and commands run as processes for a minute. A report is repeated in a process. A change
   is not repeated: it raises `SessionLost`, and the caller reads a fresh report. A shell whose
   command outlasts its deadline is ended in the same way; the command raises `CommandTimedOut`.
5. While a shell that got SIGTERM has not ended, changes raise `StillRunning`, and reports run as
   processes.

What it would cost to do without: the 1.34 instead of 0.89 above. The memory that a shell takes is
the price; docs/decisions/01-lvm-session.md has the decision and that price.
"""

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

from lvm import lvm_errors
from mount import mount_errors as mount_errors
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


# Environment in which an lvm2 shell's line editor keeps no history, and reads no file of settings.
_NO_LINE_EDITOR = dict.fromkeys(("HOME", "EDITRC", "INPUTRC"), "/dev/null")

# Subcommands that run in a shell: reports, which change nothing.
_REPORTS = {"fullreport", "lvs", "pvs", "vgs"}
# Subcommands that run in a shell: changes.
_CHANGES = {
    *("lvchange", "lvconvert", "lvcreate", "lvextend", "lvremove", "lvrename"),
    *("pvchange", "pvcreate", "vgchange", "vgcreate", "vgextend", "vgreduce", "vgremove"),
}

# Options that become settings of the whole shell, rather than words of one command.
OF_A_SHELL = ("--devices", "--config", "--reportformat")

# Number of words at which lvm2's lvm_split() refuses a line (MAX_ARGS in tools.h).
_TOO_MANY_WORDS = 64
# Length limit of a line for an lvm2 shell, in bytes, without the line's newline. The kernel writes
# no more to a terminal at once (tty_write() in drivers/tty/tty_io.c), and the shell could execute
# the first part of a longer line.
_LONGEST_BYTES = 2047
# Pattern of a word that may be typed at an lvm2 shell's terminal: printable ASCII, of which lvm2's
# lvm_split() splits at the blank alone.
_PLAIN = re.compile(r"[ -~]*")

# Settings that a command may not change, as Carver needs them: with them, the shell reports the
# status of each command.
_OWN = {"log/report_command_log"}

# Device paths that may stand in a filter (lvm.conf(5)), which is a regular expression within a
# quoted string. Of the characters of such a path only `.` and `+` are special in the expression;
# they are put in brackets.
_PATH = re.compile(r"/[A-Za-z0-9_/.+:@=,-]+")
_SPECIAL, _IN_BRACKETS = re.compile(r"[.+]"), r"[\g<0>]"


def is_report(words: Sequence[str]) -> bool:
    """Whether the words of an lvm2 command are those of a report, which changes nothing."""
    return words[1:2] != () and words[1] in _REPORTS


@dataclass(frozen=True)
class Confinement:
    """The devices and settings that all commands of one shell share."""

    # The paths of the devices that the commands see, separated by commas; empty for all devices.
    devices: str = ""
    # Settings of lvm.conf(5) as `key=value`, separated by blanks.
    settings: str = ""

    def covers(self, other_confinement: "Confinement") -> bool:
        """Whether a shell with this confinement can run the commands for another confinement.

        Additional settings do no harm, as each command uses only the settings that concern it.
        """
        return (
            self.devices == other_confinement.devices
            and other_confinement._pairs().items() <= self._pairs().items()
        )

    def joined(self, other_confinement: "Confinement") -> "Confinement":
        """A confinement with the settings of both confinements, if one shell can have all of them.

        Otherwise the result is `other_confinement`.
        """
        pairs = {**self._pairs(), **other_confinement._pairs()}
        if self.devices != other_confinement.devices or not self._pairs().items() <= pairs.items():
            return other_confinement
        return Confinement(
            other_confinement.devices, " ".join(f"{key}={pairs[key]}" for key in pairs)
        )

    def lines(self) -> list[str]:
        """The settings as lines of lvm.conf(5).

        A filter takes the place of the option --devices, with which the shell of lvm2 2.03.16
        crashes or loops at the third command: it uses the memory of the list after it has freed
        that memory. The lines also overrule the settings that --devices overrules.
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
        # lvm.lvm2 separates settings by blanks, and no setting has a blank within.
        pairs = dict(pair.split("=", 1) for pair in self.settings.split())
        return {key: value for key, value in pairs.items() if key not in _OWN}

    @property
    def paths(self) -> list[str]:
        """The paths of the devices that the commands see; none for all devices."""
        return self.devices.split(",") if self.devices else []


@dataclass(frozen=True)
class Line:
    """An lvm2 command as a line that is typed at the prompt of an lvm2 shell."""

    text: str
    subcommand: str
    confinement: Confinement

    @property
    def changes(self) -> bool:
        """Whether the command is a change, rather than a report."""
        return self.subcommand not in _REPORTS

    @classmethod
    def of(cls, words: tuple[str, ...]) -> Self | None:
        """Turn the words of a command into a line; None for a command that must be a process."""
        if words[0] != "lvm" or words[1:2] == () or words[1] not in _REPORTS | _CHANGES:
            return None
        command_words, options = _split_options(words[1:])
        if command_words[0] in _REPORTS and options.get("--reportformat") != "json":
            return None  # the shell's settings have it print each report as JSON
        confinement = Confinement(options.get("--devices", ""), options.get("--config", ""))
        quoted = [quoted_word for word in command_words if (quoted_word := _quoted(word))]
        text = " ".join(quoted)
        can_be_said = (
            len(quoted) == len(command_words) < _TOO_MANY_WORDS and len(text) <= _LONGEST_BYTES
        )
        can_be_set = all(_PATH.fullmatch(path) for path in confinement.paths)
        return cls(text, command_words[0], confinement) if can_be_said and can_be_set else None


def _split_options(words: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """Separate an lvm2 command's words from the options of a whole shell (OF_A_SHELL)."""
    options = dict.fromkeys(OF_A_SHELL, "")
    command_words: list[str] = []
    remaining = iter(words)
    for word in remaining:
        if word == "--":
            return [*command_words, word, *remaining], options
        if word in options:
            options[word] = next(remaining, "")
        else:
            command_words.append(word)
    return command_words, options


def _quoted(word: str) -> str | None:
    """Quote a word for lvm2's lvm_split(), which has quotes but no escapes; None if impossible."""
    if not _PLAIN.fullmatch(word):
        return None
    if word and " " not in word and word[0] not in "\"'#":
        return word
    return next((f"{quote}{word}{quote}" for quote in "\"'" if quote not in word), None)


def answer(subcommand: str, reported: str) -> Result:
    """Parse an lvm2 shell's JSON into the result that a process of the command would have had.

    Raises ValueError unless the JSON is complete and ends with the status of `subcommand`.
    """
    try:
        document = json.loads(reported)
        *messages, status = document["log"]
        is_own_status = status["log_type"] == "status" and status["log_object_name"] == subcommand
        code = int(status["log_ret_code"])
        printed = _lines(messages, {"print"})
        complaints = _lines(messages, {"fatal", "error", "warn"})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if not is_own_status:
        raise ValueError(f"the answer to {subcommand} says {status}")
    # tools/errors.h: ECMD_PROCESSED, which a process turns into 0.
    exit_code = 0 if code == 1 else code or 5
    return Result(exit_code, reported if "report" in document else printed, complaints)


def _lines(messages: list[Mapping[str, str]], kinds: set[str]) -> str:
    return "".join(
        f"  {message['log_message']}\n" for message in messages if message["log_type"] in kinds
    )


# Settings that an lvm2 shell reads when it starts, in addition to the node's own. The settings are
# in a file for two reasons. lvm2 takes settings of log and report only from files, not from options
# (CFG_DISALLOW_INTERACTIVE). And at each command with `--config`, lvm2 rebuilds all its settings
# and caches, twice.
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
    """Make the directory that an lvm2 shell uses as LVM_SYSTEM_DIR, in place of /etc/lvm.

    The directory has links to the files of /etc/lvm, and a copy of lvmlocal.conf with the settings
    of the shell appended. `root` is where lvm2's root directory is seen; `directory` has the same
    path for lvm2. Raises OSError, also where the node has settings that would overrule the shell's.
    """
    etc_directory = root / "etc/lvm"
    settings = "lvmlocal.conf"
    if tagged := sorted(etc_directory.glob("lvm_*.conf")):
        raise OSError(f"{tagged[0]} would be over the shell's own settings")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    # lvm2 would make these directories, but not through a link. Where making them fails here, lvm2
    # itself reports the failure.
    for name in ("archive", "backup"):
        with suppress(OSError):
            (etc_directory / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in etc_directory.iterdir():
        link = directory / path.name
        if path.name != settings and not link.is_symlink():
            link.symlink_to(Path("/etc/lvm") / path.name)
    local = etc_directory / settings
    # The file is read as bytes: lvm2 requires no encoding, so a comment may have any bytes.
    text = local.read_bytes() if local.exists() else b""
    lines = "\n".join(confinement.lines())
    (directory / settings).write_bytes(text + f"{_SETTINGS}{lines}\n".encode())


# Time limit of an lvm2 shell's start, until the shell's first prompt, in seconds. The start usually
# takes some tenths.
_START_SECONDS = 10.0
# Time limit of an lvm2 shell's end after SIGTERM, in seconds. lvm2 blocks SIGTERM while it has the
# lock of a volume group; lvm2's commands rarely have the lock for longer.
_GRACE_SECONDS = 5.0
# Time limit of `renew` for the command that is running, in seconds, if the caller has no deadline.
_RENEW_SECONDS = 60.0
# Words of the command that CommandTimedOut names if lvm2's shell cannot be ended in time.
_RENEWED = ("lvm", "exit")
# Number of commands after which an idle shell is ended: lvm2 does not return memory.
_MANY_COMMANDS = 100
# Limit of an idle shell's memory. A new shell has 10 MiB. To suspend a device, as for each thin
# volume or snapshot, lvm2 locks all its mapped memory (mlock(2) in lib/mm/memlock.c), which is then
# resident for good: the buffer for I/O of 8 MiB or global/io_memory_size, a reserve of 10 MiB, and
# its libraries. The heap does not shrink either.
_MOST_IDLE_BYTES = 40 << 20
# Time after its last command from which a shell counts as idle, in seconds.
_IDLE_SECONDS = 60.0
# Factor by which the pause before the next shell is longer if the start of a shell failed: the
# reason, such as a missing program, rarely goes away soon.
_LACKING_RESTS = 10


class Session:
    """A `mount.command.Run` that runs commands in an lvm2 shell, or in processes while it has none.

    One command runs at a time, and the others wait. `directory` belongs to the session alone, and
    has the same path for lvm2; `root` is where lvm2's root directory is seen.
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
        # The time for which commands run as processes after a shell was given up, in seconds.
        self._rest_seconds = rest_seconds
        self._observe = observe
        # Lock that the thread whose command is running holds.
        self._lock = threading.Lock()
        self._shell: Conversation | None = None
        self._confinement = Confinement()
        # The number of commands that ran in the lvm2 shell, and the time of the last command
        # (monotonic).
        self._commands, self._last_monotonic_seconds = 0, 0.0
        # The time (monotonic) before which no new lvm2 shell is started.
        self._rests_until_monotonic_seconds = 0.0
        self._is_closed = False
        # A shell that did not end in time, the command that it runs, and when it got SIGTERM.
        self._stuck: tuple[Conversation, str, float] | None = None

    def __call__(self, *words: str) -> Result:
        """Run an lvm2 command in the shell if the shell can run it, else in a process.

        Raises the errors of a process. Raises SessionLost if the shell fails during a change, and
        StillRunning for a change while an earlier shell has not ended.
        """
        line = Line.of(words)
        if line is None:
            if not is_report(words):
                with self._locked(words):
                    self._require_none_stuck(changes=True)
            return self._run(*words)
        with self._locked(words):
            self._require_none_stuck(changes=line.changes)
            conversation = self._shell_at_prompt(line.confinement, words)
            result = self._ask(conversation, line, words) if conversation else None
        return self._run(*words) if result is None else result

    def renew(self) -> None:
        """End the lvm2 shell, as its answers are in doubt; the next command starts another shell.

        Raises CommandTimedOut where the shell's command outlasts the caller's deadline; without a
        deadline, a minute.
        """
        with self._locked(_RENEWED, _RENEW_SECONDS):
            self._hang_up()

    def end_if_idle(self) -> None:
        """End the lvm2 shell if it is idle for a minute, and has run many commands or is large.

        The next command starts another shell. lvm2 returns no memory: a shell is as large as its
        largest report, and as all that it ever locked. A shell that runs a command is left alone.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            is_idle = time.monotonic() - self._last_monotonic_seconds >= _IDLE_SECONDS
            if self._shell is not None and is_idle:
                is_large = self._shell.resident_bytes() > _MOST_IDLE_BYTES
                if is_large or self._commands >= _MANY_COMMANDS:
                    self._hang_up()
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the lvm2 shell; from now on commands run as processes alone.

        A running command has five seconds to end; after that the shell is left alone.
        """
        self._is_closed = True
        with suppress(mount_errors.CommandTimedOut), self._locked(_RENEWED, _GRACE_SECONDS):
            self._hang_up()
            if self._stuck is not None and self._stuck[0].end(_GRACE_SECONDS):
                self._stuck = None

    def _ask(self, conversation: Conversation, line: Line, words: tuple[str, ...]) -> Result | None:
        """Run a command in the lvm2 shell; None if the shell failed while it ran a report.

        The caller then repeats the report in a process.
        """
        started = self._last_monotonic_seconds = time.monotonic()
        self._commands += 1
        try:
            reported = conversation.exchange(line.text, remaining_seconds())
            result = answer(line.subcommand, reported)
            if result.exit_code and lvm_errors.lacks_memory(result.stderr):
                # Give the shell up: it would lack memory at the next command, too, while a process
                # need not.
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
                self._observe(Finished(words, None, seconds, lvm_errors.SessionLost.__name__))
                raise lvm_errors.SessionLost(words, str(doubt)) from None
            return None
        code, seconds = result.exit_code, time.monotonic() - started
        error = type(lvm_errors.classify(words, code, result.stderr)).__name__ if code else ""
        self._observe(Finished(words, code, seconds, error))
        if result.exit_code and not lvm_errors.is_explained(result.stderr):
            # End the lvm2 shell, as the failure may be its fault; the next command starts another.
            self._hang_up(line.subcommand)
        return result

    def _shell_at_prompt(
        self, confinement: Confinement, words: tuple[str, ...]
    ) -> Conversation | None:
        """Return an lvm2 shell at its prompt with a confinement's settings; start one if needed.

        A shell with other settings is ended. The result is None if no shell can be used now.
        """
        if self._shell is not None:
            is_fit = not self._is_closed and self._confinement.covers(confinement)
            if is_fit and self._shell.is_waiting():
                return self._shell
            self._hang_up()
        if (
            self._stuck is None
            and not self._is_closed
            and time.monotonic() >= self._rests_until_monotonic_seconds
        ):
            self._start(confinement, words)
        return self._shell

    def _start(self, confinement: Confinement, words: tuple[str, ...]) -> None:
        limit = remaining_seconds()
        if limit == 0:
            raise mount_errors.CommandTimedOut(words, 0.0)
        # Commands have different settings, which do not disturb other commands. So the shell gets
        # the settings of all commands so far, and need not be ended for the next of these commands.
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
            self._rests_until_monotonic_seconds = (
                time.monotonic() + _LACKING_RESTS * self._rest_seconds
            )
            self._hang_up("its start")

    def _give_up(self, line: Line, reason: str) -> None:
        _log.warning("lvm2's shell is given up at %s: %s", line.subcommand, reason)
        self._rests_until_monotonic_seconds = time.monotonic() + self._rest_seconds
        self._hang_up(line.subcommand)

    def _hang_up(self, last_command: str = "what it did last") -> None:
        """End the lvm2 shell; if it does not end in time, remember it, with `last_command`."""
        if self._shell is not None:
            since_monotonic_seconds = time.monotonic()
            if not self._shell.end(_GRACE_SECONDS):
                self._stuck = (self._shell, last_command, since_monotonic_seconds)
            self._shell, self._commands = None, 0

    def _require_none_stuck(self, *, changes: bool) -> None:
        """Raise StillRunning for a change while a shell that got SIGTERM may still change LVM.

        Forgets such a shell once it has ended.
        """
        if self._stuck is None:
            return
        conversation, last_command, since_monotonic_seconds = self._stuck
        if conversation.end(0):
            self._stuck = None
        elif changes:
            raise lvm_errors.StillRunning(last_command, time.monotonic() - since_monotonic_seconds)

    @contextmanager
    def _locked(self, words: tuple[str, ...], longest_seconds: float = math.inf) -> Iterator[None]:
        limit = patience_seconds(longest_seconds)
        if not self._lock.acquire(timeout=-1 if limit == math.inf else limit):
            raise mount_errors.CommandTimedOut(words, limit)
        try:
            yield
        finally:
            self._lock.release()
