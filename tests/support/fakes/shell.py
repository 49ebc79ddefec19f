"""The shell of the fake lvm2: it splits lines, and answers, as lvm2's own does (tools/lvm.c)."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lvm.command import ConversationOver, Result

_PROCESSED = 1
_MOST_WORDS = 63


class FakeShell:
    """What `lvm.command.Conversation` is, over a fake lvm2."""

    def __init__(self, lvm2: Callable[[Sequence[str]], Result]) -> None:
        self._lvm2 = lvm2
        self.ended = False

    def exchange(self, line: str | None, _seconds: float | None) -> str:
        """Run one command."""
        if self.ended:
            raise ConversationOver("it ended")
        if line is None:
            return ""
        subcommand, *words = split(line)
        is_report = subcommand in {"fullreport", "lvs", "pvs", "vgs"}
        form = ["--reportformat", "json"] if is_report else []
        result = self._lvm2(("lvm", subcommand, *form, *words))
        return answer(subcommand, result)

    def is_waiting(self) -> bool:
        """Whether it was not ended."""
        return not self.ended

    def end(self, _seconds: float) -> bool:
        """It ends at once."""
        self.ended = True
        return True


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
    told = "failure" if result.exit_code else "success"
    log = [
        _row(number, *one, subcommand) for number, one in enumerate([*messages, ("status", told)])
    ]
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
    """The seam `lvm.command.Converse`, over a fake lvm2."""

    def start(*words: str, prompt: str, environment: Mapping[str, str], report: str) -> FakeShell:
        assert words == ("lvm",)
        assert all((prompt, environment, report))
        return FakeShell(lvm2)

    return start
