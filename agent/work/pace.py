"""Pace of a volume group's background I/O, which gives way to the I/O of other programs.

Background I/O erases, zeroes, copies, compares, sends or receives a device, piece by piece: a piece
is a range of bytes of the device. An I/O slot is the right to do the I/O of one piece. Other I/O is
that of programs that do not use this module, such as the pods that use volumes.

The setting `background_bandwidth` chooses between rule 5, rule 6, and rules 7 to 10:

1. Each piece waits for an I/O slot. Slots are given in the order in which the workers of a volume
   group ask. So the workers share the disks evenly, and between two slots no I/O of theirs is in
   flight.
2. The data that a piece wrote are flushed within its slot. Otherwise the next fsync(2) of another
   program would wait for them.
3. A piece that has taken two seconds no longer keeps the other workers waiting: its disk may hang,
   while their disks do not.
4. Workers that need each other, such as a reader and a writer of the same data, share a slot. For
   half a second each of them may leave the slot and enter it again, as long as no other program
   uses the disks and no other worker waits.
5. With `0`, no worker waits, and a piece is as long as the worker asks.
6. With a limit in bytes a second, or in percent of the fastest piece of the same kind of work, a
   piece is what the limit allows in a tenth of a second. The next piece begins when the limit
   allows it.
7. With `auto`, the load of the disks is read before each piece (mount/disk_load.py). I/O that is in
   flight, or was completed since the last piece, is other I/O, unless lvm2 changed the group since.
8. For half a second after other I/O, a piece takes half as long as the other I/O takes on average.
   Before a piece is a pause, which is twice as long as the previous piece took, and at least as
   long as the other I/O takes. So other programs wait little, and the background work keeps a third
   of the disks' time.
9. Without other I/O, each piece is twice as large as the previous one, up to 64 MiB, or up to half
   a second for work that can end within a piece. Between two pieces is a pause of a sixteenth of
   the earlier piece's time, to look for other I/O.
10. A piece has at least 1 MiB, and a pause for other I/O takes at most a second. So all work comes
    to an end.
"""

import math
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from agent.settings.configuration import Configuration
from agent.work.progress import Progress
from lvm.layout import NO_RESERVE, Reserve
from mount.disk_load import DiskLoad
from mount.kernel import Kernel

# Maximum and minimum size of a piece of background I/O, in bytes (rules 9 and 10). A piece is not
# interrupted, so the maximum limits the wait of CreateVolume for a pool that is being zeroed, and
# the wait for the end of the service. Pieces below the minimum would hardly spare other programs,
# because a disk takes as long to seek.
MOST_BYTES, LEAST_BYTES = 64 << 20, 1 << 20
# Maximum time of a piece of background I/O that can be ended within a piece, and of an I/O slot
# that several workers share, in seconds (rules 9 and 4).
_LONG_SECONDS = 0.5
# Factor by which a piece of background I/O may be larger than the previous piece (rule 9), and size
# that the previous piece is assumed to have if there is none, in bytes.
_GROWTH, _FIRST_BYTES = 2, 32 << 20
# Pause between two pieces of background I/O without other I/O (rule 9): as a part of the previous
# piece's time, and the maximum in seconds.
_ALONE_PART, _ALONE_SECONDS = 1 / 16, 0.01
# Time after which a piece of background I/O counts as hanging, in seconds (rule 3).
_HANGING_SECONDS = 2.0
# Time of a piece of background I/O if the setting limits the bandwidth, in seconds (rule 6).
_LIMITED_SECONDS = 0.1
# Time between two reads of the disks' load that show whether there is other I/O, in seconds. Two
# reads are needed if the load was not read since Carver last changed the volume group (rule 7).
_FIRST_SECONDS = 0.002
# Time for which other I/O counts as present after it was seen, in seconds (rule 8). The time is
# less than the second after which dm-thin commits its metadata by itself (COMMIT_PERIOD,
# drivers/md/dm-thin.c), or these commits would count as other I/O without end.
_OTHERS_SECONDS = 0.5
# Time of a piece of background I/O beside other I/O, as a part of the average time of the other
# I/O; and time of the pause before a piece, as a multiple of the previous piece's time (rule 8).
_OTHERS_PART, _PAUSE_PER_PIECE = 1 / 2, 2
# Maximum time of a piece of background I/O, and of a pause, beside other I/O, in seconds (rules 8
# and 10).
_LONGEST_SECONDS, _PAUSE_SECONDS = 0.1, 1.0
# Time of a piece of background I/O, and of a pause, beside other I/O whose average time is unknown,
# in seconds.
_UNKNOWN_SECONDS, _UNKNOWN_PAUSE_SECONDS = 0.002, 0.02
# Weight of a new measurement in an average of rates or times, and minimum time that a measured
# piece is taken to have needed, in seconds.
_NEW_PART, _LEAST_SECONDS = 1 / 4, 1e-5
# Interval at which a waiting worker checks whether its work was cancelled, in seconds.
_CHECK_SECONDS = 0.1


@dataclass
class Piece:
    """A piece of background I/O, for which an I/O slot was given; `length_bytes` is its size.

    A worker that did fewer bytes in the slot sets `length_bytes` to the number of bytes done.
    """

    length_bytes: int


@dataclass(frozen=True)
class IoTask:
    """One task of background I/O, such as the zeroing of a device; made by `Pace.task`.

    `kind` names the kind of the task, and `disks` has the disks below its devices. `Pace.task`
    explains the other fields.
    """

    pace: "Pace"
    kind: str
    disks: frozenset[str]
    check: Callable[[], None]
    flush: Callable[[], None] | None
    progress: Progress
    most_bytes: int = MOST_BYTES
    may_join: bool = False

    def chunks(
        self, end_bytes: int, begin_bytes: int = 0
    ) -> Iterator[AbstractContextManager[tuple[int, int]]]:
        """Yield the pieces of a device's range in order, each as a context that holds an I/O slot.

        The range is from `begin_bytes` to `end_bytes`. Entering the context waits for an I/O slot,
        without a time limit, and returns the piece's offset and length in bytes. The caller must
        hold no lock when it enters, and does the I/O of the piece within the `with`. Between two
        pieces no slot is held. Raises the error of `check` if the work was cancelled.
        """
        self.progress.begin(end_bytes, begin_bytes)
        while (offset := self.progress.done_bytes) < end_bytes:
            yield self._chunk(offset, min(end_bytes - offset, self.most_bytes))

    @contextmanager
    def _chunk(self, offset: int, most_bytes: int) -> Iterator[tuple[int, int]]:
        """Hold an I/O slot for the piece that begins at `offset`; yield its offset and length."""
        with self.piece(most_bytes) as piece:
            yield offset, piece.length_bytes

    @contextmanager
    def piece(self, most_bytes: int) -> Iterator[Piece]:
        """Wait for an I/O slot and hold it within the `with`; yield the piece that may be done.

        The piece has at most `most_bytes`. At the end, its bytes are added to `progress`. Raises
        the error of `check` if the work was cancelled.
        """
        with self.pace.hold_slot(self, most_bytes) as piece:
            yield piece
        self.progress.add(piece.length_bytes)


@dataclass(eq=False)
class _Slot:
    """An entry of the queue for I/O slots: a slot in use, or a worker that waits for its slot.

    Several workers may share the slot in use.
    """

    disks: frozenset[str]
    # The rule by the setting `background_bandwidth` when the worker asked for the slot.
    rule: "_Rule"
    may_join: bool
    # The number of workers that share the slot, the number of bytes that they did in total, and the
    # maximum size of a piece in the slot, in bytes.
    workers: int = 1
    done_bytes: int = 0
    length_bytes: int = 0
    begun_at: float = -math.inf
    # The time from which the slot's I/O counts as hanging (rule 3); infinity before the I/O begins.
    hangs_at: float = math.inf
    # The time until which other workers may join the slot (rule 4).
    joined_until: float = -math.inf


class _Rule(Protocol):
    """Rule for the size of pieces of background I/O, and for the pauses between them.

    Only the holder of the I/O slot calls the methods.
    """

    def begin(self, task: IoTask, pause: Callable[[float], None]) -> int:
        """Make the pause before the next piece, and return the piece's maximum size, in bytes.

        `pause` sleeps for a number of seconds, and raises if the work was cancelled.
        """

    def end(self, task: IoTask, length_bytes: int, seconds: float) -> None:
        """Measure a piece that has just ended: its length, and its duration in seconds."""


class _GivingWay:
    """Pacing rule for `background_bandwidth = auto`: give way to other I/O (rules 7 to 10)."""

    def __init__(
        self, kernel: Kernel, clock: Callable[[], float], changed_at: Callable[[], float]
    ) -> None:
        self._kernel, self._clock, self._changed_at = kernel, clock, changed_at
        self.paused_seconds = 0.0
        # The previous piece's size, its duration, and the time of its end.
        self._length_bytes, self._took_seconds, self._ended_at = _FIRST_BYTES, 0.0, -math.inf
        # The rate of pieces without other I/O, in bytes a second, by the kind of work and the
        # disks.
        self._rates: dict[tuple[str, frozenset[str]], float] = {}
        # The load of each disk when it was last read, and the time when loads were last read.
        self._seen: dict[str, DiskLoad] = {}
        self._looked_at = -math.inf
        # The time when other I/O was last seen, and the average duration of a request of such I/O.
        self._others_at, self._others_take_seconds = -math.inf, 0.0

    def begin(self, task: IoTask, pause: Callable[[float], None]) -> int:
        """Make the pause by rules 8 and 9; return the next piece's maximum size in bytes.

        There is no pause if no disk below the devices is known.
        """
        if not task.disks:  # no disk is known, so there are no I/O statistics
            return MOST_BYTES
        if self._clock() - self._ended_at > _OTHERS_SECONDS or task.disks - self._seen.keys():
            # Forget the previous piece and the last read load: they are too old, or of other disks.
            self._length_bytes, self._took_seconds = _FIRST_BYTES, 0.0
            self._looked_at = -math.inf
        self._detect_other_io(task, pause)
        if self._pause(pause):
            # Look again for other I/O after the pause: if there is some, the pause must be longer.
            self._detect_other_io(task, pause)
            self._pause(pause)
        rate, most_bytes = self._rate(task), _GROWTH * self._length_bytes
        if self.is_beside_others and rate:
            seconds = self._others_take_seconds * _OTHERS_PART or _UNKNOWN_SECONDS
            most_bytes = min(most_bytes, int(rate * min(seconds, _LONGEST_SECONDS)))
        longest_bytes = max(min(int(rate * _LONG_SECONDS), task.most_bytes), MOST_BYTES)
        return _rounded(most_bytes, longest_bytes)

    def end(self, task: IoTask, length_bytes: int, seconds: float) -> None:
        """Measure the rate of a piece that has ended, and read the load of the disks anew.

        So the I/O of the piece itself does not count as other I/O.
        """
        measured, rate = length_bytes / max(seconds, _LEAST_SECONDS), self._rate(task)
        # Count the rate of a piece beside other I/O, which waits for that I/O, only if the rate is
        # above the average. The same holds for a worker that did nothing in its slot.
        is_alone = measured and not self.is_beside_others
        self._rates[task.kind, task.disks] = (_mean if is_alone else max)(rate, measured)
        self._length_bytes, self._took_seconds = length_bytes, seconds
        self._ended_at = self._clock()
        self._discount_load(task)

    @property
    def is_beside_others(self) -> bool:
        """Whether other I/O on the disks was seen in the last half second."""
        return self._clock() - self._others_at < _OTHERS_SECONDS

    def _rate(self, task: IoTask) -> float:
        """Return the rate of a kind of work on its disks, in bytes a second; 0 if unknown."""
        return self._rates.get((task.kind, task.disks), 0.0)

    def _pause(self, pause: Callable[[float], None]) -> bool:
        """Wait for the rest of the pause after the previous piece (rules 8 and 9).

        Returns whether any of the pause was left.
        """
        if is_for_others := self.is_beside_others:
            others_seconds = self._others_take_seconds or _UNKNOWN_PAUSE_SECONDS
            seconds = min(
                max(_PAUSE_PER_PIECE * self._took_seconds, others_seconds), _PAUSE_SECONDS
            )
        else:
            seconds = min(self._took_seconds * _ALONE_PART, _ALONE_SECONDS)
        if (left_seconds := self._ended_at + seconds - self._clock()) <= 0:
            return False
        pause(left_seconds)
        self.paused_seconds += is_for_others * left_seconds
        return True

    def _detect_other_io(self, task: IoTask, pause: Callable[[float], None]) -> None:
        """Read the disks' load; note other I/O in flight, or completed since the last such read.

        If Carver changed the volume group since the load was last read, the load is read twice, two
        milliseconds apart: the change itself must not count as other I/O.
        """
        if self._changed_at() >= self._looked_at:
            self._discount_load(task)
            pause(_FIRST_SECONDS)
        for disk, load in self._disk_loads(task).items():
            previous_load = self._seen[disk]
            completed = load.completed - previous_load.completed
            if completed > 0:
                waited_milliseconds = load.waited_milliseconds - previous_load.waited_milliseconds
                measured = waited_milliseconds / completed / 1000
                self._others_take_seconds = _mean(self._others_take_seconds, measured)
            if completed > 0 or load.in_flight:
                self._others_at = self._clock()
            self._seen[disk] = load
        self._looked_at = self._clock()

    def _discount_load(self, task: IoTask) -> None:
        """Read the load of the disks, so that only I/O from now on can count as other I/O."""
        self._seen |= self._disk_loads(task)
        self._looked_at = self._clock()

    def _disk_loads(self, task: IoTask) -> dict[str, DiskLoad]:
        """Return the present load of each disk below the devices of a task, by the disk."""
        return {disk: self._kernel.disk_load(disk) for disk in task.disks}


class _Limited:
    """Pacing rule for a limit in bytes a second, or in percent of the best rate (rule 6)."""

    def __init__(self, bandwidth: Reserve, clock: Callable[[], float]) -> None:
        self.bandwidth, self._clock = bandwidth, clock
        self._due_at = -math.inf
        # The highest measured rate, in bytes a second, by the kind of background I/O.
        self._best: dict[str, float] = {}

    def begin(self, task: IoTask, pause: Callable[[float], None]) -> int:
        """Wait until the limit allows the next piece; return the piece's maximum size, in bytes."""
        if (left_seconds := self._due_at - self._clock()) > 0:
            pause(left_seconds)
        rate = self._rate(task)
        return _FIRST_BYTES if rate is None else _rounded(int(rate * _LIMITED_SECONDS))

    def end(self, task: IoTask, length_bytes: int, seconds: float) -> None:
        """Note the rate of a piece that has ended, and when the next piece may begin."""
        measured = length_bytes / max(seconds, _LEAST_SECONDS)
        self._best[task.kind] = max(measured, self._best.get(task.kind, 0.0))
        if rate := self._rate(task):
            self._due_at = self._clock() - seconds + length_bytes / rate

    def _rate(self, task: IoTask) -> float | None:
        """Return the limit for this kind of background I/O, in bytes a second.

        None if the limit is in percent and no piece of the kind was measured yet.
        """
        if not self.bandwidth.percent:
            return self.bandwidth.size_bytes
        best = self._best.get(task.kind)
        return None if best is None else best * self.bandwidth.percent / 100


class _Unlimited:
    """Pacing rule for `background_bandwidth = 0`: no pauses, and no limit on a piece (rule 5)."""

    def begin(self, _task: IoTask, _pause: Callable[[float], None]) -> int:
        """Return at once; the returned maximum size is larger than any piece."""
        return sys.maxsize

    def end(self, task: IoTask, length_bytes: int, seconds: float) -> None:
        """Do nothing: the next piece does not depend on the previous one."""


_UNLIMITED = _Unlimited()


def _mean(previous_mean: float, measured: float) -> float:
    """Return the moving average after a new measurement; the latest measurements count most.

    `previous_mean` is 0 if there is no earlier measurement.
    """
    return previous_mean + (measured - previous_mean) * _NEW_PART if previous_mean else measured


def _rounded(length_bytes: int, most_bytes: int = MOST_BYTES) -> int:
    """Round a piece's size, in bytes, down to a multiple of LEAST_BYTES.

    The result is at least LEAST_BYTES, and at most `most_bytes`.
    """
    return max(min(length_bytes, most_bytes) // LEAST_BYTES, 1) * LEAST_BYTES


class Pace:
    """The queue for the I/O slots of one volume group's background I/O.

    The module's docstring has the rules.
    """

    def __init__(
        self,
        bandwidth: Callable[[], Reserve | None],
        kernel: Kernel,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        changed_at: Callable[[], float] = lambda: -math.inf,
    ) -> None:
        """Make the queue for the I/O slots of one volume group.

        `bandwidth` returns the present value of the setting `background_bandwidth`. `changed_at`
        returns the time at which Carver itself last changed the group, by `clock`.
        """
        self._kernel, self.clock, self._sleep = kernel, clock, sleep
        self._bandwidth = bandwidth
        self._giving_way = _GivingWay(kernel, clock, changed_at)
        self._limited = _Limited(NO_RESERVE, clock)
        self._moved = threading.Condition()
        # The queue for I/O slots. The first element is the slot in use, or about to be used.
        self._queue: deque[_Slot] = deque()
        self._bytes: Counter[str] = Counter()

    @property
    def _rule(self) -> _Rule:
        """Pacing rule for the next I/O slot, by the present setting `background_bandwidth`."""
        bandwidth = self._bandwidth()
        if bandwidth is None:
            return self._giving_way
        if bandwidth == NO_RESERVE:
            return _UNLIMITED
        if self._limited.bandwidth != bandwidth:
            self._limited = _Limited(bandwidth, self.clock)
        return self._limited

    @property
    def is_unlimited(self) -> bool:
        """Whether background I/O never waits, neither for a slot nor for other I/O (rule 5)."""
        return self._rule is _UNLIMITED

    @property
    def done_bytes(self) -> Mapping[str, int]:
        """Number of bytes of background I/O done until now, by the kind of I/O."""
        return dict(self._bytes)

    @property
    def paused_seconds(self) -> float:
        """Total time for which background I/O was paused because of other I/O, in seconds."""
        return self._giving_way.paused_seconds

    def task(
        self,
        kind: str,
        *devices: str,
        check: Callable[[], None],
        flush: Callable[[], None] | None = None,
        progress: Progress | None = None,
        most_bytes: int = MOST_BYTES,
        may_join: bool = False,
    ) -> IoTask:
        """Return a task of background I/O on the devices with these paths, which is paced here.

        `check` raises if the task was cancelled. `flush` writes the data of a piece to the disks;
        callers leave it out for a task that only reads, or that flushes by itself. `most_bytes` is
        larger than MOST_BYTES for a task that can be ended within a piece (rule 9). `may_join` is
        true for workers that need each other (rule 4). Without `progress`, a new Progress is made.
        """
        disks = set[str]()
        for device in devices:
            disks |= self._kernel.disks_below(device)
        progress = progress or Progress(self.clock)
        return IoTask(self, kind, frozenset(disks), check, flush, progress, most_bytes, may_join)

    @contextmanager
    def hold_slot(self, task: IoTask, most_bytes: int) -> Iterator[Piece]:
        """Wait for an I/O slot and hold it within the `with`; yield the piece that may be done.

        The piece has at most `most_bytes`, and is flushed at the end of the `with`. If several
        workers share the slot, it ends when the last of them leaves.
        """
        slot = self._enter(task)
        piece, done_bytes = Piece(min(most_bytes, slot.length_bytes)), 0
        try:
            yield piece
            if piece.length_bytes and task.flush is not None:
                task.flush()
            done_bytes = piece.length_bytes
        finally:
            self._leave(task, slot, done_bytes)

    def _enter(self, task: IoTask) -> _Slot:
        """Wait for an I/O slot of the worker's own, or for one that can be joined; return the slot.

        Raises the error of the work's `check` if the work was cancelled.
        """
        task.check()
        own_slot = _Slot(task.disks, self._rule, task.may_join)
        try:
            slot = self._wait(own_slot, task.check)
            if slot is own_slot:
                self._begin(own_slot, own_slot.rule.begin(task, partial(self._pause, task.check)))
        except BaseException:
            self._remove(own_slot)
            raise
        return slot

    def _wait(self, own_slot: _Slot, check: Callable[[], None]) -> _Slot:
        """Wait in the queue until the worker's own slot is first, or another slot can be joined.

        Returns that slot. With the setting `0`, returns the worker's own slot at once.
        """
        if own_slot.rule is _UNLIMITED:
            return own_slot
        with self._moved:
            self._queue.append(own_slot)
        while True:
            with self._moved:
                if (slot := self._enterable_slot(own_slot)) is not None:
                    return slot
                self._moved.wait(_CHECK_SECONDS)
            check()

    def _enterable_slot(self, own_slot: _Slot) -> _Slot | None:
        """Return the slot that a waiting worker may enter now, or None if the worker has to wait.

        The slot is the worker's own, or a shared slot. In the second case the worker's own slot is
        removed from the queue. A slot whose I/O hangs is removed as well (rule 3).
        """
        first_slot = self._queue[0]
        if first_slot is not own_slot and self.clock() >= first_slot.hangs_at:
            # Remove a slot whose I/O hangs from the queue. The slot behind it is then the first.
            self._queue.popleft()
            first_slot = self._queue[0]
        if first_slot is own_slot:
            return own_slot
        is_open = self.clock() < first_slot.joined_until and own_slot.disks <= first_slot.disks
        # Let the worker join only if all workers in the queue may join: otherwise the worker would
        # overtake another one that waits for a slot of its own.
        if not (is_open and all(slot.may_join for slot in self._queue)):
            return None
        self._queue.remove(own_slot)
        first_slot.workers += 1
        return first_slot

    def _begin(self, own_slot: _Slot, length_bytes: int) -> None:
        """Begin the use of an I/O slot that has become the first in the queue.

        `length_bytes` is the maximum size of the slot's piece.

        If the workers may share the slot and no other I/O is seen, others may join from now on.
        """
        is_alone = isinstance(own_slot.rule, _GivingWay) and not own_slot.rule.is_beside_others
        with self._moved:
            own_slot.length_bytes, own_slot.begun_at = length_bytes, self.clock()
            own_slot.hangs_at = own_slot.begun_at + _HANGING_SECONDS
            if own_slot.may_join and is_alone:
                own_slot.joined_until = own_slot.begun_at + _LONG_SECONDS
                self._moved.notify_all()

    def _leave(self, task: IoTask, slot: _Slot, done_bytes: int) -> None:
        """Count a worker's bytes, and leave an I/O slot; the slot ends with its last worker."""
        with self._moved:
            if done_bytes:
                self._bytes[task.kind] += done_bytes
            slot.done_bytes += done_bytes
            slot.workers -= 1
            if slot.workers:
                return
            # From now on no worker may join the I/O slot.
            slot.joined_until = -math.inf
        try:
            if slot.done_bytes:
                # Pass the bytes of all workers in the slot to the rule. Otherwise the rule would
                # take the workers' I/O for other I/O.
                slot.rule.end(task, slot.done_bytes, self.clock() - slot.begun_at)
        finally:
            self._remove(slot)

    def _remove(self, own_slot: _Slot) -> None:
        """Remove an I/O slot from the queue, if it is in the queue; wake the waiting workers."""
        with self._moved:
            with suppress(ValueError):  # its piece hung, or no worker waits with the setting 0
                self._queue.remove(own_slot)
            self._moved.notify_all()

    def _pause(self, check: Callable[[], None], seconds: float) -> None:
        """Sleep for `seconds`; call `check` ten times a second, which raises for cancelled work."""
        until_seconds = self.clock() + seconds
        while (left_seconds := until_seconds - self.clock()) > 0:
            check()
            self._sleep(min(left_seconds, _CHECK_SECONDS))
        check()


class Paces:
    """The `Pace` of each volume group, with the setting `background_bandwidth` of the group."""

    def __init__(
        self,
        configuration: Configuration,
        kernel: Kernel,
        changed_at: Callable[[str], float],
    ) -> None:
        """Make the paces of all volume groups.

        `changed_at` returns the time at which Carver last changed a group (monotonic, seconds).
        """
        self._configuration, self._kernel = configuration, kernel
        self._changed_at = changed_at
        self._guard = threading.Lock()
        self._paces: dict[str, Pace] = {}

    def of(self, group: str) -> Pace:
        """Return the `Pace` of a volume group, made at its first use.

        The group need not be one that a device class of the configuration names.
        """
        with self._guard:
            if group not in self._paces:
                self._paces[group] = Pace(
                    lambda: self._configuration.now.bandwidth_of(group),
                    self._kernel,
                    changed_at=partial(self._changed_at, group),
                )
            return self._paces[group]

    def every(self) -> Mapping[str, Pace]:
        """Return each `Pace` that `of` has made until now, by the name of its volume group."""
        with self._guard:
            return dict(self._paces)
