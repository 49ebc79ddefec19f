"""Locks and limits of calls: one call a volume, one change a group, a bounded number in all.

A call on a disk that hangs keeps its thread. So `Admission` bounds the threads that calls may hold,
and `Shares` leave some of them to other groups. `VolumeLocks` hold a call's volume; a `GroupLock`
orders the changes of one group.

A call is admitted when it first needs a group: publish, unpublish and statistics need none.
Background work is not limited.
"""

import contextvars
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import takewhile

from agent.core import errors, trace
from mount import command

# A group alone gets three quarters; of three that hang each some three tenths, and a tenth is left.
TIMES_LEFT = 3


class Shares:
    """A number of places that the calls of all groups share; `most` is for one group at once.

    A group may take three times as many as are left: the more are taken, the less another gets. No
    call waits for a place.
    """

    def __init__(self, places: int, most: int | None = None) -> None:
        self._places = self.left = places
        self._most = places if most is None else most
        # How many places count for each group.
        self.taken: Counter[str] = Counter()
        self._guard = threading.Lock()

    @contextmanager
    def one(self, group: str | None = None) -> Iterator[None]:
        """Take a place within the `with`, for a group if one is named; raises TooManyCalls."""
        self.take()
        groups: list[str] = []
        try:
            if group is not None:
                self.count_for(group)
                groups.append(group)
            yield
        finally:
            self.give_back(groups)

    def take(self) -> None:
        """Take a place, which counts for no group yet; raises TooManyCalls."""
        with self._guard:
            if not self.left:
                raise errors.TooManyCalls(self._places)
            self.left -= 1

    def count_for(self, group: str) -> None:
        """Count a place that was taken as one of a group; raises TooManyCalls."""
        with self._guard:
            # The call's own place counts as left.
            if (taken := self.taken[group]) >= min(self._most, TIMES_LEFT * (self.left + 1)):
                raise errors.TooManyCalls(taken, group)
            self.taken[group] += 1

    def give_back(self, groups: Iterable[str] = ()) -> None:
        """Give back a place that counts for these groups."""
        with self._guard:
            self.left += 1
            self.taken.subtract(groups)
            # Without those of zero: callers may send ids with any group's name.
            self.taken = +self.taken


# How many of the server's threads may be with volume groups, and with volumes otherwise. A node has
# 110 pods, and after a boot most of their volumes are staged at once, or unstaged as it is drained.
PLACES = 112
_OTHERS = 128
# How many calls may wait for a copy, which is made in the background.
_ASIDE = 128
# Maximum of calls that wait for another call to end; those that name no volume have no place yet.
MOST_CALLS_WAITING = 72
# Maximum of streams in total, and of one group: each reads a disk as fast as it can, or waits.
STREAMS, STREAMS_OF_A_GROUP = 24, 8
# Maximum of calls in which both sides stream.
EXCHANGES = 48
# Maximum of calls that are answered once, other than Identity's.
_CALLS = PLACES + _OTHERS + _ASIDE + MOST_CALLS_WAITING
# Number of the server's threads: what each of these limits allows, and some for Identity's calls
# and for calls that are refused. A thread is started when it is needed.
THREADS = _CALLS + STREAMS + EXCHANGES + 16
# Calls that ask for all groups are counted as if these were one more.
_ALL = ""
# How long a call waits for the start, which takes a few commands.
_PATIENCE_SECONDS = 10.0

_current: contextvars.ContextVar["_Call | None"] = contextvars.ContextVar("call", default=None)


class Admission:
    """The cap on calls: how many may be where a disk can keep them; open until `close`.

    Most calls of the Node need no group. They wait for a disk only where it is their own, such as
    the last unmount.
    """

    def __init__(self, places: int = PLACES) -> None:
        self.problem: Exception | None = None
        self.is_open = True
        # Of calls with volume groups, each of which counts for all groups that it uses; of calls
        # with volumes otherwise; of calls that wait for a copy; of all these in total.
        self.places, self._others = Shares(places), Shares(_OTHERS)
        self.aside, self._threads = Shares(_ASIDE), Shares(_CALLS)
        # A stream lasts as long as its caller likes, and as its disk does; calls in which both
        # sides stream only wait, some for hours, beside streams of the same commands.
        self.streams, self.exchanges = Shares(STREAMS, STREAMS_OF_A_GROUP), Shares(EXCHANGES)
        self._closed_at = 0.0
        self._changed = threading.Condition()

    def close(self) -> None:
        """Admit no call until `open`; calls wait for that up to ten seconds."""
        with self._changed:
            self.is_open, self._closed_at = False, time.monotonic()

    def refuse(self, problem: Exception) -> None:
        """Refuse calls at once, with the problem of a start that failed and is retried."""
        with self._changed:
            self.problem = problem
            self._changed.notify_all()

    def open(self) -> None:
        """Admit calls from now on."""
        with self._changed:
            self.is_open, self.problem = True, None
            self._changed.notify_all()

    def thread(self) -> AbstractContextManager[None]:
        """Keep a thread for a call, so that some are left for Identity's; raises TooManyCalls."""
        return self._threads.one()

    @contextmanager
    def call(self, group: str | None = None) -> Iterator[None]:
        """Run a call in this thread; `enter` inside may refuse it.

        `group` is that of the volume that the call names, "" where it is unknown, None for no
        volume. Raises TooManyCalls.
        """
        with ExitStack() as share:
            if group is not None:
                share.enter_context(self._others.one(group))
            call = _Call(self, share)
            token = _current.set(call)
            try:
                yield
            finally:
                _current.reset(token)
                call.leave()

    def admit(self) -> None:
        """Take a place; raises TooManyCalls, Starting."""
        self.places.take()
        patience = command.patience_seconds(_PATIENCE_SECONDS)
        with self._changed, trace.step(trace.WAIT, "start"):
            self._changed.wait_for(lambda: self.is_open or self.problem is not None, patience)
        try:
            self.require_open()
        except errors.Starting:
            self.leave()
            raise

    def join(self, group: str) -> None:
        """Count an admitted call among those of a group; raises TooManyCalls."""
        self.places.count_for(group)

    def require_open(self) -> None:
        """Raise Starting while no call is admitted."""
        if not self.is_open:
            raise errors.Starting(time.monotonic() - self._closed_at, self.problem)

    def leave(self, groups: Iterable[str] = ()) -> None:
        """Give back the place of a call, which counts among those of these groups no more."""
        self.places.give_back(groups)


@dataclass
class _Call:
    """A call under way, whether it has a place, and the groups that it uses."""

    admission: Admission
    # Its place among the calls that are not admitted.
    share: ExitStack
    admitted: bool = False
    groups: set[str] = field(default_factory=set)

    def leave(self) -> None:
        """Give its place back, if any; to use a group again it has to enter anew."""
        if self.admitted:
            self.admission.leave(self.groups)
        self.admitted = False
        self.groups.clear()


@contextmanager
def aside(group: str) -> Iterator[None]:
    """Give the call's place to another while it waits for background work.

    It must use no group inside. Raises TooManyCalls where too many calls wait so.
    """
    require_none_held("background work is waited for")
    call = _current.get()
    if call is None:
        yield
        return
    with call.admission.aside.one(group):
        call.leave()
        yield


def enter(*groups: str) -> None:
    """Admit this thread's call to groups; raises TooManyCalls, and Starting before the start.

    A call that names none uses all groups, and counts as a call of one more group.
    """
    call = _current.get()
    if call is None:
        return
    if not call.admitted:
        call.admission.admit()
        call.admitted = True
        call.share.close()
    for one in sorted({*(groups or (_ALL,))} - call.groups):
        call.admission.join(one)
        call.groups.add(one)


# How long a call waits for its volume: callers back off from a second on; most calls end sooner.
GRACE_SECONDS = 5.0
# The rest of the time to the deadline is left for the work.
_PART = 0.5
_LOOK_SECONDS = 0.1


class VolumeLocks:
    """Locks of volumes: one call at a time, in the order in which calls came.

    Another call waits up to five seconds and is then refused, as the CSI spec advises
    ("Concurrency"). Where too many wait already it is refused at once, to leave threads to others.
    """

    def __init__(self) -> None:
        self.grace_seconds = GRACE_SECONDS
        self._changed = threading.Condition()
        self._held: set[str] = set()
        # What each waiting call wants, in the order in which they came.
        self._waiting: dict[object, frozenset[str]] = {}

    @contextmanager
    def hold(self, *names: str) -> Iterator[None]:
        """Hold a volume and its path: two volumes at one path would cover each other.

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
        """Wait up to five seconds, holding nothing, for a condition that other calls may bring.

        `is_so` is polled ten times a second, so it must be cheap.
        """
        end = time.monotonic() + command.patience_seconds(self.grace_seconds, _PART)
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
        """Wait until all are free, and no earlier call waits for one of them."""
        if len(self._waiting) < MOST_CALLS_WAITING:
            turn = self._line_up(names)
            try:
                patience = command.patience_seconds(self.grace_seconds, _PART)
                is_free = self._changed.wait_for(lambda: not self._taken(names, turn), patience)
            finally:
                del self._waiting[turn]
                # Later calls waited for this one, too.
                self._changed.notify_all()
            if is_free:
                return
        raise errors.OperationPending(next(one for one in names if one in self._taken(names)))

    def _line_up(self, names: Iterable[str]) -> object:
        turn = object()
        self._waiting[turn] = frozenset(names)
        return turn

    def _taken(self, names: Iterable[str], turn: object = None) -> set[str]:
        """The names that are held, or wanted by calls that wait (before `turn`, if given)."""
        before = takewhile(lambda one: one is not turn, self._waiting)
        return self._held.union(*(self._waiting[one] for one in before)).intersection(names)


# How many of the places calls that wait for one group may take.
MOST_WAITING = PLACES // 2
MOST_READING = PLACES * 3 // 8


# The groups that this thread holds.
_held: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar("held", default=frozenset())


@contextmanager
def holding(names: Iterable[str]) -> Iterator[None]:
    """Note that this thread holds these groups, for `require_none_held`."""
    token = _held.set(_held.get() | {*names})
    try:
        yield
    finally:
        _held.reset(token)


def require_none_held(doing: str) -> None:
    """Raise AssertionError where this thread holds a group, and so must not do what may hang.

    That is to read or write a device, to run a program other than lvm2, or to wait for another
    group: each other call to the group would hang with it. Tests ask this before each operation of
    the kernel and each program (tests/support/unheld.py).
    """
    if held := _held.get():
        raise AssertionError(f"{doing} while volume group {', '.join(sorted(held))} is held")


class GroupLock:
    """A lock of a volume group: FIFO; waiters give up at the RPC deadline.

    A group has one for its changes, one for its reports, and one with eight `places` for mkfs and
    fsck. The lock for changes is held around lvm2 commands only: never over mkfs, an erase or a
    copy, nor over a read of a device (`require_none_held`).
    """

    def __init__(self, what: str, most: float = MOST_WAITING, *, places: int = 1) -> None:
        self._what = what
        self._most, self._left = most, places
        self._guard = threading.Lock()
        self._released_at = -math.inf
        # Each is set when its waiter gets the lock.
        self._waiting: deque[threading.Event] = deque()

    @contextmanager
    def hold(self) -> Iterator[bool]:
        """Hold the lock; yield whether that had to wait.

        Raises GroupBusy at the deadline, or where too many wait already.
        """
        had_to_wait = self._await()
        try:
            yield had_to_wait
        finally:
            with self._guard:
                self._released_at = time.monotonic()
                if self._waiting:
                    self._waiting.popleft().set()
                else:
                    self._left += 1

    @property
    def is_taken(self) -> bool:
        """Whether a further caller would have to wait."""
        return not self._left

    @property
    def held_at(self) -> float:
        """When the lock was last held, by the monotonic clock; now where it is."""
        return time.monotonic() if self.is_taken else self._released_at

    def _await(self) -> bool:
        with self._guard:
            if self._left:
                self._left -= 1
                return False
            if len(self._waiting) >= self._most:
                raise errors.GroupBusy(self._what, f"{self._most} calls wait for it already")
            mine = threading.Event()
            self._waiting.append(mine)
        limit = command.remaining_seconds()
        with trace.step(trace.WAIT, self._what):
            mine.wait(limit)
        if mine.is_set():
            return True
        with self._guard:
            if not mine.is_set():
                self._waiting.remove(mine)
                raise errors.GroupBusy(self._what, "another call was at work on it all the time")
        # The lock came at the moment of the deadline: the first command will fail with that.
        return True
