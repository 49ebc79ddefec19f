"""Failures of lvm2's shell while a service has it open, at a command that the test chooses.

Each mishap makes one exchange: it sends the line, or not, and lets the session see the result. The
time of a stopped shell is over at once, so that tests need not wait.
"""

import itertools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from model.stopping import Spoken

from lvm import session
from mount.command import Conversation, ConversationOver, Result

# Within a command of an lvm2 that is neither slow nor quick.
_SOON_SECONDS = 0.05
# What is said is there by then.
_SAID_SECONDS = 0.2


class Shell(Conversation, Protocol):
    """A shell, and what can happen to its process."""

    def kill(self, after_seconds: float = 0.0) -> None: ...
    def stop(self) -> None: ...
    def go_on(self) -> None: ...
    def starve(self, *, within: bool = False) -> None: ...


class StartShell(Protocol):
    """The seam `mount.command.Converse`, for such shells."""

    def __call__(
        self, *words: str, prompt: str, environment: Mapping[str, str], report: str
    ) -> Shell: ...


Mishap = Callable[[Shell, str, float | None], str]


def killed_before(one: Shell, line: str, seconds: float | None) -> str:
    one.kill()
    return one.exchange(line, seconds)


def killed_within(one: Shell, line: str, seconds: float | None) -> str:
    one.kill(_SOON_SECONDS)
    one.exchange(line, seconds)
    raise ConversationOver("it ended")


def killed_after(one: Shell, line: str, seconds: float | None) -> str:
    one.exchange(line, seconds)
    one.kill()
    raise ConversationOver("it ended")


def stopped_before(one: Shell, line: str, _seconds: float | None) -> str:
    one.stop()
    return one.exchange(line, _SAID_SECONDS)


def stopped_after(one: Shell, line: str, seconds: float | None) -> str:
    one.exchange(line, seconds)
    one.stop()
    raise TimeoutError


def cut_off(one: Shell, line: str, seconds: float | None) -> str:
    said = one.exchange(line, seconds)
    return said[: len(said) // 2]


def silent(one: Shell, line: str, seconds: float | None) -> str:
    one.exchange(line, seconds)
    return ""


def of_another(one: Shell, line: str, seconds: float | None) -> str:
    said = json.loads(one.exchange(line, seconds))
    said["log"][-1]["log_object_name"] = "pvresize"
    return json.dumps(said)


def starved(one: Shell, line: str, seconds: float | None) -> str:
    one.starve()
    return one.exchange(line, seconds)


def starved_within(one: Shell, line: str, seconds: float | None) -> str:
    one.starve(within=True)
    return one.exchange(line, seconds)


MISHAPS: dict[str, Mishap] = {
    one.__name__.replace("_", " "): one
    for one in (
        *(killed_before, killed_within, killed_after, stopped_before, stopped_after),
        *(cut_off, silent, of_another, starved, starved_within),
    )
}


class Shells:
    """Shells of a service, to one of which something happens at the command with that number.

    `log` has all commands of the service's, said to a shell or processes, in their order.
    """

    def __init__(self, converse: StartShell) -> None:
        self._converse = converse
        self._mishap: Mishap | None = None
        self._at = 0
        self._said = 0
        self.log: list[str] = []
        # At which place in the log it happened, and to which shell.
        self.happened_at: int | None = None
        self.victim: Shell | None = None

    def plan(self, mishap: Mishap, number: int) -> None:
        """Have it happen at that command, counted from now on."""
        self._mishap, self._at, self._said = mishap, number, 0
        self.log.clear()
        self.happened_at = self.victim = None

    def cancel(self) -> None:
        """Have nothing happen any more."""
        self._mishap = None

    def __call__(
        self, *words: str, prompt: str, environment: Mapping[str, str], report: str
    ) -> Conversation:
        begun = self._converse(*words, prompt=prompt, environment=environment, report=report)
        return Spoken(begun, partial(self._exchange, begun))

    def intercept(self, words: Sequence[str]) -> Result | None:
        """Note a process of the service's: the test's own is the main thread."""
        if words[0] == "lvm" and threading.current_thread() is not threading.main_thread():
            self.log.append(" ".join(words[1:]))
        return None

    def _exchange(self, one: Shell, line: str, seconds: float | None) -> str:
        number, self._said = self._said, self._said + 1
        self.log.append(line)
        if self._mishap is None or number != self._at or self.happened_at is not None:
            return one.exchange(line, seconds)
        self.happened_at, self.victim = len(self.log) - 1, one
        return self._mishap(one, line, seconds)

    @property
    def was_looked_first(self) -> bool:
        """Whether a report came before the next change of an object whose change was uncertain."""
        assert self.happened_at is not None
        at, *later = self.log[self.happened_at :]
        blindly = itertools.takewhile(lambda one: not _is_look(one), later)
        return _is_look(at) or not any(
            _changes(one) and _about(one) == _about(at) for one in blindly
        )

    @property
    def changes(self) -> list[str]:
        """The commands that change something."""
        return [one for one in self.log if _changes(one)]


def _is_look(line: str) -> bool:
    return session.is_report(("lvm", line.partition(" ")[0]))


def _about(line: str) -> str:
    """The volume or group that a command is about, which it names last."""
    return line.rpartition(" ")[2]


def _changes(line: str) -> bool:
    return line.startswith(("lv", "vg", "pv")) and not _is_look(line)
