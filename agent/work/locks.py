"""Locks and limits of calls: one call at a time for a volume, one change at a time for a group.

A call on a disk that hangs keeps its thread. So `Admission` limits the number of threads that calls
may occupy, and `Slots` keep some of these threads free for other volume groups. `VolumeLocks` lock
the volumes of a call. A `GroupLock` orders the changes of one volume group.

A call needs an admission slot from its first use of a volume group on. NodePublishVolume,
NodeUnpublishVolume and statistics use no group. Background work needs no slot.
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

# Factor that limits the slots of one volume group: the group may hold at most this factor times the
# number of free slots. So a group alone gets three quarters of all slots. Of three groups that
# hang, each gets some three tenths, and a tenth stays free.
TIMES_LEFT = 3


class Slots:
    """Limit on the number of calls in progress, shared by the calls on all volume groups.

    A call takes a slot for its duration. `slots` is the number of slots, `group_limit` the limit
    for one volume group. A group may hold at most TIMES_LEFT times as many slots as are free: the
    more slots are taken, the fewer a further group gets. No call waits for a slot: a call without a
    slot is refused.
    """

    def __init__(self, slots: int, group_limit: int | None = None) -> None:
        self._slots = self.free_slots = slots
        self._group_limit = slots if group_limit is None else group_limit
        # The number of slots that the calls on each volume group hold, by the group's name.
        self.taken: Counter[str] = Counter()
        self._guard = threading.Lock()

    @contextmanager
    def hold(self, group: str | None = None) -> Iterator[None]:
        """Take a slot for the duration of the `with`, for a call on a volume group if one is named.

        Raises TooManyCalls if no slot is free, or if the group has reached its limit.
        """
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
        """Take a slot, for no volume group yet. Raises TooManyCalls if no slot is free."""
        with self._guard:
            if not self.free_slots:
                raise errors.TooManyCalls(self._slots)
            self.free_slots -= 1

    def count_for(self, group: str) -> None:
        """Count a slot that the caller has taken as one of a volume group.

        Raises TooManyCalls if the group has reached its limit; the caller keeps the slot.
        """
        with self._guard:
            # Add 1, since the slot that the caller has taken counts as free here.
            if (taken_slots := self.taken[group]) >= min(
                self._group_limit, TIMES_LEFT * (self.free_slots + 1)
            ):
                raise errors.TooManyCalls(taken_slots, group)
            self.taken[group] += 1

    def give_back(self, groups: Iterable[str] = ()) -> None:
        """Give back a slot, which counts for each of these volume groups."""
        with self._guard:
            self.free_slots += 1
            self.taken.subtract(groups)
            # Remove the entries of volume groups without slots, since callers may send ids with
            # arbitrary names of groups.
            self.taken = +self.taken


# Number of admission slots: the maximum number of calls that use volume groups at the same time. A
# node has 110 pods. After a boot most of their volumes are staged at once, and when the node is
# drained, unstaged at once.
ADMISSION_SLOTS = 112
# Maximum number of calls that name a volume and have not taken an admission slot.
_OTHERS = 128
# Maximum number of calls that wait for background work, such as a copy, without an admission slot.
_ASIDE = 128
# Maximum number of calls that wait for the lock of a volume, or for a condition that other calls
# bring about. Calls that name no volume, such as CreateVolume, need this limit: they hold no slot
# while they wait.
MOST_CALLS_WAITING = 72
# Maximum number of RPCs in which one side streams, in total and for one volume group. Each such RPC
# reads a disk as fast as it can, or waits.
STREAMS, STREAMS_OF_A_GROUP = 24, 8
# Maximum number of RPCs in which both sides stream.
EXCHANGES = 48
# Maximum number of unary calls (one request, one response), Identity's calls not counted.
_CALLS = ADMISSION_SLOTS + _OTHERS + _ASIDE + MOST_CALLS_WAITING
# Number of threads of the gRPC server: the sum of the limits on calls, and some threads for calls
# of the Identity service and for calls that are refused. A thread is started when it is needed.
THREADS = _CALLS + STREAMS + EXCHANGES + 16
# Name of the group for which a call that uses all volume groups counts; no real group has it.
_ALL = ""
# Time limit of a call's wait for the end of Carver's start, in seconds. The start takes a few
# commands.
_PATIENCE_SECONDS = 10.0

_current: contextvars.ContextVar["_Call | None"] = contextvars.ContextVar("call", default=None)


class Admission:
    """The limits on the number of calls in progress. Between `close` and `open`, none is admitted.

    An admission slot is needed by calls that use a volume group, since a hanging disk can keep
    them. Most calls of the Node service use no volume group, and wait for a disk only if it is the
    disk of their own volume, for instance in the last unmount.
    """

    def __init__(self, slots: int = ADMISSION_SLOTS) -> None:
        self.problem: Exception | None = None
        self.is_open = True
        # The admission slots, for calls that use volume groups, and the slots of calls that name a
        # volume and use no volume group yet. A call counts for each group that it uses.
        self.slots, self._others = Slots(slots), Slots(_OTHERS)
        # The slots of calls that wait for background work, and the slots of all unary calls.
        self.without_slot, self._threads = Slots(_ASIDE), Slots(_CALLS)
        # The slots of streams, and of calls in which both sides stream. A stream lasts as long as
        # its caller and its disk take. A call in which both sides stream only waits, some for
        # hours, beside a stream of the same command.
        self.streams, self.exchanges = Slots(STREAMS, STREAMS_OF_A_GROUP), Slots(EXCHANGES)
        self._closed_at = 0.0
        self._changed = threading.Condition()

    def close(self) -> None:
        """Admit no call to volume groups until `open`; calls wait up to ten seconds for `open`."""
        with self._changed:
            self.is_open, self._closed_at = False, time.monotonic()

    def refuse(self, problem: Exception) -> None:
        """Until `open`, refuse calls at once, with the error of a start that is being retried."""
        with self._changed:
            self.problem = problem
            self._changed.notify_all()

    def open(self) -> None:
        """Admit calls to volume groups from now on, and wake the calls that wait for that."""
        with self._changed:
            self.is_open, self.problem = True, None
            self._changed.notify_all()

    def thread(self) -> AbstractContextManager[None]:
        """Return a context that counts a unary call. Entering raises TooManyCalls at the limit.

        The limit leaves some of the server's threads for calls of the Identity service.
        """
        return self._threads.hold()

    @contextmanager
    def call(self, group: str | None = None) -> Iterator[None]:
        """Note that this thread runs a call within the `with`, so that `enter` can admit the call.

        `group` is the volume group of the volume that the call names, "" if the group is unknown,
        None if the call names no volume. A call that names a volume takes a slot until it is
        admitted; raises TooManyCalls if there is none. The admission slot is given back at the end.
        """
        with ExitStack() as volume_slot:
            if group is not None:
                volume_slot.enter_context(self._others.hold(group))
            call = _Call(self, volume_slot)
            token = _current.set(call)
            try:
                yield
            finally:
                _current.reset(token)
                call.leave()

    def admit(self) -> None:
        """Take an admission slot, and wait for the end of Carver's start.

        Raises TooManyCalls if no slot is free. Raises Starting if the start has not ended within
        ten seconds, or has failed; the slot is then given back.
        """
        self.slots.take()
        if self.is_open:
            return
        patience = command.patience_seconds(_PATIENCE_SECONDS)
        with self._changed, trace.step(trace.WAIT, "start"):
            self._changed.wait_for(lambda: self.is_open or self.problem is not None, patience)
        try:
            self.require_open()
        except errors.Starting:
            self.leave()
            raise

    def join(self, group: str) -> None:
        """Count an admitted call among the calls on a volume group.

        Raises TooManyCalls if the group has reached its limit.
        """
        self.slots.count_for(group)

    def require_open(self) -> None:
        """Raise Starting if no call is admitted at present."""
        if not self.is_open:
            raise errors.Starting(time.monotonic() - self._closed_at, self.problem)

    def leave(self, groups: Iterable[str] = ()) -> None:
        """Give back the admission slot of a call, which counts for each of these volume groups."""
        self.slots.give_back(groups)


@dataclass
class _Call:
    """A call in progress: whether it has an admission slot, and the volume groups that it uses."""

    admission: Admission
    # The slot that the call has until it is admitted; closing it gives the slot back.
    volume_slot: ExitStack
    admitted: bool = False
    groups: set[str] = field(default_factory=set)

    def leave(self) -> None:
        """Give the call's admission slot back, if any.

        A later use of a volume group needs a new slot.
        """
        if self.admitted:
            self.admission.leave(self.groups)
        self.admitted = False
        self.groups.clear()


@contextmanager
def without_slot(group: str) -> Iterator[None]:
    """Give back the present call's admission slot, so that the call can wait for background work.

    The body waits, and must use no volume group. A later `enter` takes a new slot. `group` is the
    volume group of the background work. Raises TooManyCalls if too many calls wait like that, and
    AssertionError if the thread holds the lock of a volume group. Outside a call, only the body is
    run.
    """
    require_none_held("background work is waited for")
    call = _current.get()
    if call is None:
        yield
        return
    with call.admission.without_slot.hold(group):
        call.leave()
        yield


def enter(*groups: str) -> None:
    """Admit the call that this thread runs to these volume groups; do nothing outside a call.

    The first `enter` of a call takes the call's admission slot. If no group is named, the call uses
    all groups, and counts for _ALL. Raises TooManyCalls at a limit, and Starting if Carver's start
    has not ended.
    """
    call = _current.get()
    if call is None:
        return
    if not call.admitted:
        call.admission.admit()
        call.admitted = True
        call.volume_slot.close()
    for group in sorted({*(groups or (_ALL,))} - call.groups):
        call.admission.join(group)
        call.groups.add(group)


# Time limit of a call's wait for the lock of its volume, in seconds. Most calls end sooner. Callers
# back off for a second or more before they repeat a refused call.
GRACE_SECONDS = 5.0
# Maximum part of the time to a call's deadline that the call waits for the lock of its volume. The
# rest is for the work.
_PART = 0.5
# Interval at which `VolumeLocks.wait_until` polls its condition, in seconds.
_LOOK_SECONDS = 0.1


class VolumeLocks:
    """Locks of volumes: one call at a time for a volume, in the order in which the calls came.

    A further call on the volume waits up to five seconds, and at most half of the time to its
    deadline. Then it is refused, as the CSI spec advises ("Concurrency"). If too many calls wait
    already, a further call is refused at once, so that threads are left for other calls.
    """

    def __init__(self) -> None:
        self.grace_seconds = GRACE_SECONDS
        self._changed = threading.Condition()
        self._held: set[str] = set()
        # The names that each waiting call wants to lock, in the order in which the calls came.
        self._waiting: dict[object, frozenset[str]] = {}

    @contextmanager
    def hold(self, *names: str) -> Iterator[None]:
        """Hold the locks of these names for the duration of the `with`.

        A name is that of a volume, or a path: two volumes mounted at one path would hide each
        other. Raises OperationPending if another call keeps one of the locks for too long, or if
        too many calls wait already.
        """
        with self._changed:
            if self._taken(names):
                with trace.step(trace.WAIT, "volume"):
                    self._wait_in_queue(names)
            self._held.update(names)
        try:
            yield
        finally:
            with self._changed:
                self._held.difference_update(names)
                self._changed.notify_all()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait up to five seconds for a condition that other calls bring about.

        The wait is also limited to half of the time to the caller's deadline. After the wait, the
        method returns even if the condition is still false. It returns at once if too many calls
        wait already. `condition` is polled ten times a second, so it must be cheap. No lock is
        taken.
        """
        end = time.monotonic() + command.patience_seconds(self.grace_seconds, _PART)
        if condition():
            return
        with self._changed:
            if len(self._waiting) >= MOST_CALLS_WAITING:
                return
            ticket = self._line_up([])
        try:
            while not condition() and time.monotonic() < end:
                time.sleep(_LOOK_SECONDS)
        finally:
            with self._changed:
                del self._waiting[ticket]

    def _wait_in_queue(self, names: Iterable[str]) -> None:
        """Wait until none of the names is locked, and no earlier call waits for one of them.

        The caller holds `_changed`. Raises OperationPending at the time limit, or if too many calls
        wait already.
        """
        if len(self._waiting) < MOST_CALLS_WAITING:
            ticket = self._line_up(names)
            try:
                patience = command.patience_seconds(self.grace_seconds, _PART)
                is_free = self._changed.wait_for(lambda: not self._taken(names, ticket), patience)
            finally:
                del self._waiting[ticket]
                # Wake the later calls in the queue, which waited for this call.
                self._changed.notify_all()
            if is_free:
                return
        raise errors.OperationPending(next(name for name in names if name in self._taken(names)))

    def _line_up(self, names: Iterable[str]) -> object:
        """Append a waiting call, with the names that it wants, to the queue; return its ticket."""
        ticket = object()
        self._waiting[ticket] = frozenset(names)
        return ticket

    def _taken(self, names: Iterable[str], own_ticket: object = None) -> set[str]:
        """Return those of the names that are locked, or that waiting calls want.

        If `own_ticket` is given, only the waiting calls that came before the call with this ticket
        count.
        """
        earlier_tickets = takewhile(lambda ticket: ticket is not own_ticket, self._waiting)
        return self._held.union(
            *(self._waiting[ticket] for ticket in earlier_tickets)
        ).intersection(names)


# Maximum number of calls that wait for the lock of one volume group in order to change the group,
# and maximum number of those that wait to read the group's state. Each is a part of
# ADMISSION_SLOTS.
MOST_WAITING = ADMISSION_SLOTS // 2
MOST_READING = ADMISSION_SLOTS * 3 // 8


# Names of the volume groups whose locks the current thread holds.
_held: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar("held", default=frozenset())


@contextmanager
def holding(names: Iterable[str]) -> Iterator[None]:
    """Note, within the `with`, that this thread holds the locks of these volume groups.

    `require_none_held` reads the note. The locks themselves are taken elsewhere.
    """
    token = _held.set(_held.get() | {*names})
    try:
        yield
    finally:
        _held.reset(token)


def require_none_held(operation: str) -> None:
    """Raise AssertionError if this thread holds the lock of a volume group.

    Called before an operation that may hang: a read or a write of a device, a program other than
    lvm2, or a wait for another volume group. While it hangs, no other call could lock the group.
    `operation` is the operation's name in the error. Tests call this function before each operation
    of the kernel and each program (tests/support/unheld.py).
    """
    if held_groups := _held.get():
        raise AssertionError(
            f"{operation} while volume group {', '.join(sorted(held_groups))} is held"
        )


class GroupLock:
    """Lock of a volume group, with a FIFO queue; a waiter gives up at the deadline of its RPC.

    At most `slots` callers hold the lock at the same time, and at most `waiter_limit` wait for it.
    A volume group has three such locks: for its changes, for its reports, and one with eight
    `slots` for mkfs and fsck. The lock for changes is held around lvm2 commands only, and never
    during mkfs, an erase, a copy or a read of a device (`require_none_held`).
    """

    def __init__(self, name: str, waiter_limit: float = MOST_WAITING, *, slots: int = 1) -> None:
        self._name = name
        self._waiter_limit, self._free_slots = waiter_limit, slots
        self._guard = threading.Lock()
        self._released_at = -math.inf
        # The queue: an event for each waiter, which is set when the waiter gets the lock.
        self._waiting: deque[threading.Event] = deque()

    @contextmanager
    def hold(self) -> Iterator[bool]:
        """Hold the volume group's lock within the `with`; yield whether the caller had to wait.

        Raises GroupBusy at the RPC's deadline, or if too many callers wait already.
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
                    self._free_slots += 1

    @property
    def is_taken(self) -> bool:
        """Whether a further caller would have to wait for the lock."""
        return not self._free_slots

    @property
    def held_at(self) -> float:
        """Time at which the lock was last held (monotonic, seconds).

        The present time if the lock is held now; minus infinity if it was never held.
        """
        return time.monotonic() if self.is_taken else self._released_at

    def _await(self) -> bool:
        """Take the lock, after a wait in the queue if need be; return whether the caller waited.

        Raises GroupBusy at the RPC's deadline, or if too many callers wait already.
        """
        with self._guard:
            if self._free_slots:
                self._free_slots -= 1
                return False
            if len(self._waiting) >= self._waiter_limit:
                raise errors.GroupBusy(
                    self._name, f"{self._waiter_limit} calls wait for it already"
                )
            own_event = threading.Event()
            self._waiting.append(own_event)
        limit = command.remaining_seconds()
        with trace.step(trace.WAIT, self._name):
            own_event.wait(limit)
        if own_event.is_set():
            return True
        with self._guard:
            if not own_event.is_set():
                self._waiting.remove(own_event)
                raise errors.GroupBusy(self._name, "another call was at work on it all the time")
        # The waiter got the lock at the moment of the deadline. Its first command will fail because
        # of the deadline.
        return True
