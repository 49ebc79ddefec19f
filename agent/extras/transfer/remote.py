"""Run `carver` on another node by the user's own ssh.

The only part of the command that starts programs itself: ssh needs the user's environment, agent
and terminal, which the service's programs must not have. Imports `subprocess`.
"""

import json
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from agent.core import errors
from mount.blocks import Bytes

# The most of the other node's error output that is quoted.
_MOST_CHARACTERS = 2000


class Remote(Protocol):
    """Another node's `carver`. Raises NodeRefused."""

    @property
    def node(self) -> str:
        """Its name for ssh."""
        ...

    def ask(self, *words: str) -> dict[str, Any]:
        """Run `carver` with these words; return the JSON that it prints."""
        ...

    def feed(
        self, *words: str, write: Callable[[Callable[[Bytes], object]], object]
    ) -> dict[str, Any]:
        """Run `carver` while `write` writes its input; return the JSON that it prints, if any."""
        ...


class Ssh:
    """The real one. `ssh` and `carver` are the words of the commands here and there."""

    def __init__(self, node: str, ssh: Sequence[str], carver: Sequence[str]) -> None:
        self.node = node
        self._ssh = tuple(ssh)
        self._carver = tuple(carver)

    def ask(self, *words: str) -> dict[str, Any]:
        """Run `carver` there; return the JSON that it prints."""
        ended = self._run(words)
        answer = _table(ended.stdout)
        if answer is None:
            raise self._refused(
                words, "it does not answer with JSON; use the same version on both nodes"
            )
        return answer

    def feed(
        self, *words: str, write: Callable[[Callable[[Bytes], object]], object]
    ) -> dict[str, Any]:
        """Run `carver` there while `write` writes its input; return its JSON, if any."""
        with self._started(words) as running:
            stdin, running.stdin = running.stdin, None
            problem: BaseException | None = None
            try:
                if stdin is not None:
                    with stdin:
                        write(stdin.write)
            except BrokenPipeError:
                pass  # Its error output says why.
            except BaseException as error:
                problem = error
                # A stream that is cut off has no end mark, and can be continued.
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
        # ssh(1) joins its arguments and gives them to a shell there.
        return [*self._ssh, "--", self.node, shlex.join((*self._carver, *words))]

    def _refused(self, words: Sequence[str], why: str) -> errors.NodeRefused:
        return errors.NodeRefused(self.node, shlex.join(("carver", *words)), why)


def _table(output: bytes) -> dict[str, Any] | None:
    """Decode a JSON object; None where it is none."""
    try:
        answer = json.loads(output)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _text(output: bytes) -> str:
    return output.decode(errors="backslashreplace").strip()[-_MOST_CHARACTERS:]
