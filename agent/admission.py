"""Which calls may ask for volume groups now: none before the start is over, and never too many.

What asks lvm2, or waits for a lock or for mkfs, holds a thread of the server's for as long as a
disk likes. So many calls do that at most that the others, such as unpublishing and statistics, find
one. And each group's calls leave some of that to those of the others, whatever they wait for.

A call is admitted when it first needs a group, not as it comes in: most of the Node's need none.
Those wait for a disk only where it is theirs, as the last unmounting does; they have threads of
their own, of which each group's calls leave some to those of the others, too.

Work that no call waits for, such as the start itself, is not held back.
"""

import contextvars
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from agent import errors
from agent.shares import TIMES_LEFT, Shares
from lvm import command

# How many of the server's threads may be with volume groups, and with volumes otherwise. A node has
# 110 pods, and after a boot most of their volumes are staged at once, or unstaged as it is drained.
PLACES = 112
_OTHERS = 128
# How many may wait for a copy, which is made behind the answers, and ask for nothing meanwhile.
_ASIDE = 128
# Some calls name no volume.
THREADS = PLACES + _OTHERS + _ASIDE + 16
# Of those, what may wait for another call to end; each has one of the threads for calls without a
# place.
MOST_WAITING = (_OTHERS + 16) // 2
# Calls that ask for all groups are counted as if these were one more.
_ALL = ""
# A start takes a few commands; who comes a moment too early need not come again.
_PATIENCE_SECONDS = 10.0

_visit: contextvars.ContextVar["_Visit | None"] = contextvars.ContextVar("visit", default=None)


class Admission:
    """Admits calls, from the beginning unless `close` says otherwise."""

    def __init__(self, places: int = PLACES) -> None:
        self.problem: Exception | None = None
        self.is_open = True
        self._places = self._free = places
        # How many of those that are taken are with a group.
        self._with: Counter[str] = Counter()
        self._others = Shares(_OTHERS)
        self.aside = Shares(_ASIDE)
        self._closed_at = 0.0
        self._changed = threading.Condition()

    def close(self) -> None:
        """Admit none until `open`: those who come meanwhile wait a moment."""
        with self._changed:
            self.is_open, self._closed_at = False, time.monotonic()

    def refuse(self, problem: Exception) -> None:
        """Have nobody wait for what did not come off, and will be tried again."""
        with self._changed:
            self.problem = problem
            self._changed.notify_all()

    def open(self) -> None:
        """Admit calls from now on."""
        with self._changed:
            self.is_open, self.problem = True, None
            self._changed.notify_all()

    @contextmanager
    def call(self, group: str | None = None) -> Iterator[None]:
        """Inside, this thread carries out a call, which `enter` may stop.

        One that names a volume tells its `group`, or "" where that is not known; raises
        TooManyCalls.
        """
        with ExitStack() as share:
            if group is not None:
                share.enter_context(self._others.one(group))
            visit = _Visit(self, share)
            token = _visit.set(visit)
            try:
                yield
            finally:
                _visit.reset(token)
                visit.leave()

    def admit(self) -> None:
        """Take a place; raises TooManyCalls, Starting."""
        with self._changed:
            if not self._free:
                raise errors.TooManyCalls(self._places)
            self._free -= 1
        remaining = command.remaining_seconds()
        patience = _PATIENCE_SECONDS if remaining is None else min(_PATIENCE_SECONDS, remaining)
        with self._changed:
            self._changed.wait_for(lambda: self.is_open or self.problem is not None, patience)
        try:
            self.require_open()
        except errors.Starting:
            self.leave()
            raise

    def join(self, group: str) -> None:
        """Count a call that has a place among a group's; raises TooManyCalls."""
        with self._changed:
            # As if it came only now.
            if self._with[group] >= TIMES_LEFT * (self._free + 1):
                raise errors.TooManyCalls(self._with[group], group)
            self._with[group] += 1

    def require_open(self) -> None:
        """Raise Starting while no call is admitted."""
        if not self.is_open:
            raise errors.Starting(time.monotonic() - self._closed_at, self.problem)

    def leave(self) -> None:
        """Give a place back."""
        with self._changed:
            self._free += 1

    def part(self, groups: set[str]) -> None:
        """Count a call among these groups' no more."""
        with self._changed:
            self._with.subtract(groups)
            # Ids name groups as their callers like.
            self._with = +self._with


class _Visit:
    """A call under way, whether it has a place, and the groups that it is with."""

    def __init__(self, admission: Admission, share: ExitStack) -> None:
        self.admission = admission
        # What it keeps of the threads for those that are not admitted.
        self.share = share
        self.admitted = False
        self.groups: set[str] = set()

    def leave(self) -> None:
        """Give its place back, if it has one: it asks for no group any more, or enters anew."""
        if self.admitted:
            self.admission.leave()
            self.admitted = False
        self.admission.part(self.groups)
        self.groups.clear()


@contextmanager
def aside(group: str) -> Iterator[None]:
    """Inside, a call waits for what is done behind the answers, and another has its place.

    It asks for no group inside. Raises TooManyCalls where too many wait so.
    """
    visit = _visit.get()
    if visit is None:
        yield
        return
    with visit.admission.aside.one(group):
        visit.leave()
        yield


def enter(*groups: str) -> None:
    """What follows asks for volume groups; raises TooManyCalls, Starting where no call may.

    Where none is named it asks all of them, and is counted among those that do.
    """
    visit = _visit.get()
    if visit is None:
        return
    if not visit.admitted:
        visit.admission.admit()
        visit.admitted = True
        visit.share.close()
    for one in sorted({*(groups or (_ALL,))} - visit.groups):
        visit.admission.join(one)
        visit.groups.add(one)
