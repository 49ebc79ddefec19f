"""A shell that a service keeps open, and what it is told led through something else."""

from collections.abc import Callable

from mount.command import Conversation


class Spoken:
    """The seam `mount.command.Conversation`: `tell` has each line said, and returns the answer."""

    def __init__(self, one: Conversation, tell: Callable[[str, float | None], str]) -> None:
        self._one, self._tell = one, tell
        self.is_waiting, self.end = one.is_waiting, one.end

    def exchange(self, line: str | None, seconds: float | None) -> str:
        if line is None:
            return self._one.exchange(None, seconds)
        return self._tell(line, seconds)
