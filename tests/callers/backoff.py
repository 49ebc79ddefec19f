"""When a caller tries again, by the clock of the cluster and no other."""

_LONGEST_SECONDS = 300


class Backoff:
    """One second after the first failure, twice as long after each other, five minutes at most."""

    def __init__(self) -> None:
        self.now = 0
        self._due: dict[tuple[object, ...], tuple[int, int]] = {}

    def is_due(self, *what: object) -> bool:
        """Whether it is time to try."""
        return self._due.get(what, (0, 0))[0] <= self.now

    def failed(self, *what: object) -> None:
        """Wait longer than before."""
        waited = self._due.get(what, (0, 0))[1]
        longer = min(_LONGEST_SECONDS, 2 * waited or 1)
        self._due[what] = (self.now + longer, longer)

    def succeeded(self, *what: object) -> None:
        """Begin anew."""
        self._due.pop(what, None)
