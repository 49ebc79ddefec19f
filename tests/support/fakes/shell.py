"""The shell of the fake lvm2: it splits lines, and answers, as lvm2's own does (tools/lvm.c)."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mount.command import ConversationOver, Result

_PROCESSED = 1
_MOST_WORDS = 63
_STARVED = Result(5, "", "  Failed to allocate memory for a command.\n")


class FakeShell:
    """A `mount.command.Conversation` with a fake lvm2; and what can happen to its process."""

    def __init__(self, lvm2: Callable[[Sequence[str]], Result]) -> None:
        self._lvm2 = lvm2
        self.ended = False
        self._is_stopped = self._is_told_to_end = False
        # How many commands it has memory for.
        self._memory: int | None = None

    def exchange(self, line: str | None, _seconds: float | None) -> str:
        """Run one command."""
        if self.ended:
            raise ConversationOver("it ended")
        if self._is_stopped:
            raise TimeoutError
        if line is None:
            return ""
        subcommand, *words = split(line)
        if self._memory == 0:
            return answer(subcommand, _STARVED)
        is_report = subcommand in {"fullreport", "lvs", "pvs", "vgs"}
        form = ["--reportformat", "json"] if is_report else []
        result = self._lvm2(("lvm", subcommand, *form, *words))
        if self._memory is not None:
            # It came as far as to write that down, and no further.
            self._memory, result = 0, _STARVED
        return answer(subcommand, result)

    def resident_bytes(self) -> int:
        return 0

    def is_waiting(self) -> bool:
        """Whether it was not ended: one that is stopped waits, as far as anyone sees."""
        return not self.ended

    def end(self, _seconds: float) -> bool:
        """It ends at once, unless it is stopped."""
        self._is_told_to_end = True
        self.ended = self.ended or not self._is_stopped
        return self.ended

    def kill(self, _after_seconds: float = 0.0) -> None:
        """SIGKILL, at once."""
        self.ended = True

    def stop(self) -> None:
        """SIGSTOP."""
        self._is_stopped = True

    def go_on(self) -> None:
        """SIGCONT: a signal to end that waited is met first."""
        self._is_stopped = False
        self.ended = self.ended or self._is_told_to_end

    def starve(self, *, within: bool = False) -> None:
        """Leave it no memory more; or none once it is in the middle of the next command."""
        self._memory = int(within)


def split(line: str) -> list[str]:
    """lvm_split() of tools/lvmcmdline.c: quotes around a word, and no escapes."""
    words = []
    rest = line.lstrip()
    while rest and rest[0] != "#":
        if rest[0] in "\"'":
            word, _, rest = rest[1:].partition(rest[0])
        else:
            word, _, rest = rest.partition(" ")
        words.append(word)
        rest = rest.lstrip()
    assert len(words) <= _MOST_WORDS, "Too many arguments, sorry."
    return words


def answer(subcommand: str, result: Result) -> str:
    """What the shell reports of a command, its messages with it."""
    document: dict[str, Any] = {}
    messages = [("error", line) for line in result.stderr.splitlines()]
    if result.stdout.startswith("{"):
        document = json.loads(result.stdout)
    else:
        messages = [("print", line) for line in result.stdout.splitlines()] + messages
    messages.append(("status", "failure" if result.exit_code else "success"))
    log = [_row(number, *one, subcommand) for number, one in enumerate(messages)]
    log[-1]["log_ret_code"] = str(result.exit_code or _PROCESSED)
    return json.dumps(document | {"log": log})


def _row(number: int, kind: str, message: str, subcommand: str) -> dict[str, str]:
    return {
        "log_seq_num": str(number),
        "log_type": kind,
        "log_context": "shell",
        "log_object_name": subcommand,
        "log_message": message.strip(),
        "log_ret_code": "0",
    }


def converse(lvm2: Callable[[Sequence[str]], Result]) -> Callable[..., FakeShell]:
    """The seam `mount.command.Converse`, over a fake lvm2."""

    def start(*words: str, prompt: str, environment: Mapping[str, str], report: str) -> FakeShell:
        assert words == ("lvm",)
        assert all((prompt, environment, report))
        return FakeShell(lvm2)

    return start
