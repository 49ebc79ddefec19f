"""Who may work at the same time: one call a volume, one change a group, a bounded number in all.

A call on a disk that hangs keeps its thread for as long as the disk likes. So the threads that
calls may hold are bounded (`Admission`), and each group leaves some of them to the others
(`Shares`). `VolumeLocks` holds a call's volume; `GroupLock` orders the changes of one group.

A call is admitted when it first needs a group: publish, unpublish and statistics need none.
Background work is not held back.
"""

import contextvars
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import takewhile

from agent.core import errors, trace
from mount import command

# A group alone gets three quarters; of three that hang each some three tenths, and a tenth is left.
TIMES_LEFT = 3


class Shares:
    """So many places; `most` of them for a group, be they all free."""

    def __init__(self, places: int, most: int | None = None) -> None:
        self._left = places
        self._most = places if most is None else most
        self._taken: Counter[str] = Counter()
        self._guard = threading.Lock()

    @contextmanager
    def one(self, group: str) -> Iterator[None]:
        """Inside, a place is taken for a group; raises TooManyCalls where it gets none."""
        with self._guard:
            taken = self._taken[group]
            if taken >= min(self._most, TIMES_LEFT * self._left):
                raise errors.TooManyCalls(taken, group)
            self._taken[group] += 1
            self._left -= 1
        try:
            yield
        finally:
            with self._guard:
                self._left += 1
                self._taken[group] -= 1
                # Ids name groups as their callers like.
                self._taken = +self._taken


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
MOST_CALLS_WAITING = (_OTHERS + 16) // 2
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
        with self._changed, trace.step(trace.WAIT, "start"):
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


# A back-off of a caller that is refused begins at a second and doubles; most calls end sooner.
GRACE_SECONDS = 5.0
_LOOK_SECONDS = 0.1


class VolumeLocks:
    """One call per volume.

    Another waits a moment for its turn, and is refused then, as the CSI spec advises
    ("Concurrency"). What waits is given its turn in the order in which it came. Where too many wait
    already, it is refused at once: they must not take all threads.
    """

    def __init__(self) -> None:
        self.grace_seconds = GRACE_SECONDS
        self._changed = threading.Condition()
        self._held: set[str] = set()
        # What each waiting call wants, in the order in which they came.
        self._waiting: dict[object, frozenset[str]] = {}

    @contextmanager
    def hold(self, *names: str) -> Iterator[None]:
        """Hold a volume, and the path it is put at: two volumes at one path would cover each other.

        Raises OperationPending while another call holds one of them.
        """
        with self._changed:
            if self._taken(names):
                with trace.step(trace.WAIT, "volume"):
                    self._await_turn(names)
            self._held.update(names)
        try:
            yield
        finally:
            with self._changed:
                self._held.difference_update(names)
                self._changed.notify_all()

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait a moment, holding nothing, for what the end of other calls brings; it may not come.

        `is_so` is asked again and again, so it must be cheap.
        """
        end = time.monotonic() + self._patience_seconds()
        if is_so():
            return
        with self._changed:
            if len(self._waiting) >= MOST_CALLS_WAITING:
                return
            turn = self._line_up([])
        try:
            while not is_so() and time.monotonic() < end:
                time.sleep(_LOOK_SECONDS)
        finally:
            with self._changed:
                del self._waiting[turn]

    def _await_turn(self, names: Iterable[str]) -> None:
        """Wait until all are free, and nobody who came earlier wants one of them."""
        if len(self._waiting) < MOST_CALLS_WAITING:
            turn = self._line_up(names)
            try:
                is_free = self._changed.wait_for(
                    lambda: not self._taken(names, turn), self._patience_seconds()
                )
            finally:
                del self._waiting[turn]
                # Those who came later waited for this one, too.
                self._changed.notify_all()
            if is_free:
                return
        raise errors.OperationPending(next(one for one in names if one in self._taken(names)))

    def _line_up(self, names: Iterable[str]) -> object:
        turn = object()
        self._waiting[turn] = frozenset(names)
        return turn

    def _taken(self, names: Iterable[str], turn: object = None) -> set[str]:
        """Which of these are held, or wanted by those who wait; by those before a turn, if any."""
        before = takewhile(lambda one: one is not turn, self._waiting)
        return self._held.union(*(self._waiting[one] for one in before)).intersection(names)

    def _patience_seconds(self) -> float:
        """How long to wait: what is left of the caller's time must do for the work."""
        remaining = command.remaining_seconds()
        return self.grace_seconds if remaining is None else min(self.grace_seconds, remaining / 2)


# Of the server's threads that may be with volume groups, what one group may take: others find some.
MOST_WAITING = PLACES // 2
MOST_LOOKING = PLACES * 3 // 8


class GroupLock:
    """Turns at one group: fair, bounded, and nobody waits longer than his caller does.

    Held around lvm2 commands only: never over mkfs, a wipe or a copy.
    """

    def __init__(self, what: str, most: int = MOST_WAITING) -> None:
        self._what = what
        self._most = most
        self._guard = threading.Lock()
        self._taken = False
        # Each is set when its turn has come.
        self._waiting: deque[threading.Event] = deque()

    @property
    def is_taken(self) -> bool:
        """Whether it is someone's turn."""
        return self._taken

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Be the one who changes the group.

        Raises GroupBusy where too many wait already, and at the end of the caller's time.
        """
        self._await()
        try:
            yield
        finally:
            self._pass_on()

    def _await(self) -> None:
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            if len(self._waiting) >= self._most:
                raise errors.GroupBusy(self._what, f"{self._most} calls wait for it already")
            mine = threading.Event()
            self._waiting.append(mine)
        limit = command.remaining_seconds()
        with trace.step(trace.WAIT, self._what):
            mine.wait(limit)
        if mine.is_set():
            return
        with self._guard:
            if not mine.is_set():
                self._waiting.remove(mine)
                raise errors.GroupBusy(self._what, "another call was at work on it all the time")
        # The turn came in the moment in which the time was over: the first command will say so.

    def _pass_on(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._taken = False
