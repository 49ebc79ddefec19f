"""Carver on another node, by the user's own ssh: commands that a person could type there.

The one module of the command that starts programs for itself: ssh has the user's environment,
agent and terminal, none of which the service's programs may have. Imports `subprocess`.
"""

import json
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from agent.core import errors
from mount.blocks import Bytes

# What is told of what the other side said.
_MOST_CHARACTERS = 2000


class Remote(Protocol):
    """Another node's `carver`. Raises NodeRefused."""

    @property
    def node(self) -> str:
        """What it is called here."""
        ...

    def ask(self, *words: str) -> dict[str, Any]:
        """Run `carver` with these words; what it prints, which is JSON."""
        ...

    def feed(
        self, *words: str, write: Callable[[Callable[[Bytes], object]], object]
    ) -> dict[str, Any]:
        """Run `carver` with these words while `write` writes what it reads.

        What it prints, where that is JSON.
        """
        ...


class Ssh:
    """The real one. `ssh` and `carver` are words: how the node is reached, what is run there."""

    def __init__(self, node: str, ssh: Sequence[str], carver: Sequence[str]) -> None:
        self.node = node
        self._ssh = tuple(ssh)
        self._carver = tuple(carver)

    def ask(self, *words: str) -> dict[str, Any]:
        """Run `carver` there; what it prints."""
        ended = self._run(words)
        told = _table(ended.stdout)
        if told is None:
            raise self._refused(words, "it answers no JSON; is it this version?")
        return told

    def feed(
        self, *words: str, write: Callable[[Callable[[Bytes], object]], object]
    ) -> dict[str, Any]:
        """Run `carver` there while `write` writes to it; what it prints, where that is JSON."""
        with self._started(words) as running:
            stdin, running.stdin = running.stdin, None
            problem: BaseException | None = None
            try:
                if stdin is not None:
                    with stdin:
                        write(stdin.write)
            except BrokenPipeError:
                pass  # it says why
            except BaseException as error:
                problem = error
                # What is cut off has no end mark, and is taken up again.
                running.terminate()
            printed, said = running.communicate()
        if problem is not None:
            raise problem
        if running.returncode:
            raise self._refused(words, _text(said) or f"exit {running.returncode}")
        return _table(printed) or {}

    def _run(self, words: Sequence[str]) -> "subprocess.CompletedProcess[bytes]":
        try:
            ended = subprocess.run(self._line(words), capture_output=True, check=False)
        except OSError as error:
            raise self._refused(words, str(error)) from None
        if ended.returncode:
            raise self._refused(words, _text(ended.stderr) or f"exit {ended.returncode}")
        return ended

    @contextmanager
    def _started(self, words: Sequence[str]) -> "Iterator[subprocess.Popen[bytes]]":
        try:
            running = subprocess.Popen(
                self._line(words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            raise self._refused(words, str(error)) from None
        with running:
            yield running

    def _line(self, words: Sequence[str]) -> list[str]:
        # ssh(1) joins what it is told and gives it to a shell there.
        return [*self._ssh, "--", self.node, shlex.join((*self._carver, *words))]

    def _refused(self, words: Sequence[str], why: str) -> errors.NodeRefused:
        return errors.NodeRefused(self.node, shlex.join(("carver", *words)), why)


def _table(output: bytes) -> dict[str, Any] | None:
    """What was printed as JSON; None where it is none."""
    try:
        told = json.loads(output)
    except ValueError:
        return None
    return told if isinstance(told, dict) else None


def _text(output: bytes) -> str:
    return output.decode(errors="backslashreplace").strip()[-_MOST_CHARACTERS:]
