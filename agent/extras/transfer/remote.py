"""Run `carver` on another node by the user's own ssh.

ssh(1) needs the user's environment, agent and terminal. The programs that Carver's service starts
have none of these. So only the command, not the service, connects to another node.
"""

import json
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from agent.core import errors
from mount import mount_errors as mount_errors
from mount import programs
from mount.block_io import Bytes

# Function that writes a stream. Its argument is the function that sends bytes to the other node.
Write = Callable[[Callable[[Bytes], object]], object]
# Maximum length, in characters, of the other node's error output in an error message.
_MOST_CHARACTERS = 2000


class Remote:
    """The command `carver` of another node, run by ssh.

    `ssh` has the words of the ssh command on this node, and `carver` the words of the command that
    ssh runs on the other node.
    """

    def __init__(self, node: str, ssh: Sequence[str], carver: Sequence[str]) -> None:
        self.node = node
        self._ssh = tuple(ssh)
        self._carver = tuple(carver)

    def ask(self, *arguments: str) -> dict[str, Any]:
        """Run `carver` on the other node; return the JSON object that the command prints.

        Raises NodeRefused if the node cannot be reached, if the command fails, or if the command
        prints no JSON object.
        """
        answer = self._run(arguments)
        if answer is None:
            why = "it does not answer with JSON; use the same version on both nodes"
            raise self._refused(arguments, why)
        return answer

    def feed(self, *arguments: str, write: Write) -> dict[str, Any]:
        """Run `carver` on the other node with a stream as its input; return the JSON it prints.

        `write` writes the stream, while the command runs.

        Returns an empty dictionary if the command prints no JSON object. Raises NodeRefused if the
        node cannot be reached or the command fails, and what `write` raises.
        """
        return self._run(arguments, write) or {}

    def _run(self, arguments: Sequence[str], write: Write | None = None) -> dict[str, Any] | None:
        # Quote the arguments, because ssh(1) joins them, and a shell on the other node parses the
        # result.
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
                # End the program. The other node then gets a stream without an end mark, and does
                # not finish the volume. The stream can be continued later.
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
