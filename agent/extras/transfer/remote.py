"""Run `carver` on another node by the user's own ssh.

ssh needs the user's environment, agent and terminal, which the service's programs must not have.
"""

import json
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from agent.core import errors
from mount import mount_errors as mount_errors
from mount import programs
from mount.block_io import Bytes

# Writes a stream by the function that it is given.
Write = Callable[[Callable[[Bytes], object]], object]
# The most of the other node's error output that is quoted.
_MOST_CHARACTERS = 2000


class Remote:
    """Another node's `carver`. `ssh` and `carver` are the words of the commands here and there."""

    def __init__(self, node: str, ssh: Sequence[str], carver: Sequence[str]) -> None:
        self.node = node
        self._ssh = tuple(ssh)
        self._carver = tuple(carver)

    def ask(self, *words: str) -> dict[str, Any]:
        """Run `carver` there; return the JSON that it prints. Raises NodeRefused."""
        answer = self._run(words)
        if answer is None:
            why = "it does not answer with JSON; use the same version on both nodes"
            raise self._refused(words, why)
        return answer

    def feed(self, *words: str, write: Write) -> dict[str, Any]:
        """Run `carver` there while `write` writes its input; return its JSON, if any."""
        return self._run(words, write) or {}

    def _run(self, words: Sequence[str], write: Write | None = None) -> dict[str, Any] | None:
        # ssh(1) joins its arguments and gives them to a shell there.
        line = [*self._ssh, "--", self.node, shlex.join((*self._carver, *words))]
        try:
            running = programs.start(line, reads=write is not None, environment=None)
        except (OSError, mount_errors.ProgramMissing) as error:
            raise self._refused(words, str(error)) from None
        problem: BaseException | None = None
        with running:
            stdin, running.stdin = running.stdin, None
            try:
                if write is not None and stdin is not None:
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
            text = said.decode(errors="backslashreplace").strip()[-_MOST_CHARACTERS:]
            raise self._refused(words, text or f"exit {running.returncode}")
        try:
            answer = json.loads(printed)
        except ValueError:
            return None
        return answer if isinstance(answer, dict) else None

    def _refused(self, words: Sequence[str], why: str) -> errors.NodeRefused:
        return errors.NodeRefused(self.node, shlex.join(("carver", *words)), why)
