"""A shell of lvm2's on this machine."""

import resource
import signal
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any

from mount.command import Conversation

# What a command needs more than the shell has: some, and less than any has enough of.
_PART_OF_A_COMMAND_BYTES = 1 << 18


class RealShell:
    """What `mount.command.Conversation` is, and what can happen to its process."""

    def __init__(self, conversation: Conversation) -> None:
        self.exchange, self.end = conversation.exchange, conversation.end
        self.is_waiting = conversation.is_waiting
        self.resident_bytes = conversation.resident_bytes
        self._conversation: Any = conversation

    @property
    def _running(self) -> Any:
        return self._conversation._running

    def kill(self, after_seconds: float = 0.0) -> None:
        if not after_seconds:
            self._signal(signal.SIGKILL)
            return
        timer = Timer(after_seconds, self._signal, [signal.SIGKILL])
        timer.daemon = True
        timer.start()

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def starve(self, *, within: bool = False) -> None:
        """Leave it no memory more; or none once it is in the middle of the next command."""
        pid = self._running.pid
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + (_PART_OF_A_COMMAND_BYTES if within else 0)
        resource.prlimit(pid, resource.RLIMIT_AS, (most, most))

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self._running.signal(number)
