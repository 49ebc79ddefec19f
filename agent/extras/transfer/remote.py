"""Run `carver` on another node by the user's own ssh.

ssh(1) needs the user's environment, agent and terminal. The programs that Carver's service starts
have none of these, so only the command, not the service, connects to another node.
"""

import json
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from agent.core import errors
from mount import mount_errors as mount_errors
from mount import programs
from mount.block_io import Bytes

# Function that writes a stream, by the function that it is given as its argument.
Write = Callable[[Callable[[Bytes], object]], object]
# The most characters of the other node's error output that an error quotes.
_MOST_CHARACTERS = 2000


class Remote:
    """The `carver` of another node, run by ssh.

    `ssh` and `carver` are the words of the two commands, on this node and on the other.
    """

    def __init__(self, node: str, ssh: Sequence[str], carver: Sequence[str]) -> None:
        self.node = node
        self._ssh = tuple(ssh)
        self._carver = tuple(carver)

    def ask(self, *arguments: str) -> dict[str, Any]:
        """Run `carver` on the other node; return the JSON that it prints. Raises NodeRefused."""
        answer = self._run(arguments)
        if answer is None:
            why = "it does not answer with JSON; use the same version on both nodes"
            raise self._refused(arguments, why)
        return answer

    def feed(self, *arguments: str, write: Write) -> dict[str, Any]:
        """Run `carver` on the other node while `write` writes its input; return its JSON.

        Returns an empty dictionary if it prints no JSON. Raises NodeRefused, and what `write`
        raises.
        """
        return self._run(arguments, write) or {}

    def _run(self, arguments: Sequence[str], write: Write | None = None) -> dict[str, Any] | None:
        # ssh(1) joins its arguments, and a shell on the other node parses them: so quote them.
        command = [*self._ssh, "--", self.node, shlex.join((*self._carver, *arguments))]
        try:
            process = programs.start(command, reads=write is not None, environment=None)
        except (OSError, mount_errors.ProgramMissing) as error:
            raise self._refused(arguments, str(error)) from None
        problem: BaseException | None = None
        with process:
            stdin, process.stdin = process.stdin, None
            try:
                if write is not None and stdin is not None:
                    with stdin:
                        write(stdin.write)
            except BrokenPipeError:
                pass  # The other node's error output says why it closed the pipe.
            except BaseException as error:
                problem = error
                # A stream that is cut off has no end mark, so its volume is not finished. The
                # stream can be continued later.
                process.terminate()
            output, error_output = process.communicate()
        if problem is not None:
            raise problem
        if process.returncode:
            text = error_output.decode(errors="backslashreplace").strip()[-_MOST_CHARACTERS:]
            raise self._refused(arguments, text or f"exit {process.returncode}")
        try:
            answer = json.loads(output)
        except ValueError:
            return None
        return answer if isinstance(answer, dict) else None

    def _refused(self, arguments: Sequence[str], why: str) -> errors.NodeRefused:
        return errors.NodeRefused(self.node, shlex.join(("carver", *arguments)), why)
