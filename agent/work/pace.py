"""Pace of a volume group's background I/O: I/O slots, in which it gives way to other I/O.

An I/O slot is the right to do one piece of background I/O. A piece is a part of a device that is
erased, zeroed, copied, compared, sent or received. Other I/O is that of programs that do not use
this module, such as the pods that use volumes.

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

# Maximum and minimum size of a piece, in bytes (rules 9 and 10). A piece is not interrupted, so the
# maximum limits the wait of CreateVolume for a pool that is being zeroed, and the wait of the
# service's end. Pieces below the minimum spare other programs little, because a disk takes as long
# to seek.
MOST_BYTES, LEAST_BYTES = 64 << 20, 1 << 20
# Maximum time of a piece of work that can end within a piece, and of a shared slot, in seconds
# (rules 9 and 4).
_LONG_SECONDS = 0.5
# Factor by which a piece may be larger than the previous one (rule 9). Assumed size of the previous
# piece, in bytes, if there is none.
_GROWTH, _FIRST_BYTES = 2, 32 << 20
# Pause without other I/O (rule 9): part of the previous piece's time, and maximum in seconds.
_ALONE_PART, _ALONE_SECONDS = 1 / 16, 0.01
# Time after which a piece counts as hanging, in seconds (rule 3).
_HANGING_SECONDS = 2.0
# Time of a piece with a limit, in seconds (rule 6).
_LIMITED_SECONDS = 0.1
# Time for which other I/O is looked for if the last reading of the disks' load is useless, in
# seconds (rule 7).
_FIRST_SECONDS = 0.002
# Time for which other I/O counts as present after it was seen, in seconds (rule 8). The time is
# less than the second after which dm-thin commits its metadata by itself (COMMIT_PERIOD,
# drivers/md/dm-thin.c), or these commits would count as other I/O without end.
_OTHERS_SECONDS = 0.5
# Time of a piece beside other I/O, as a part of that I/O's average time; time of a pause, as a
# multiple of the previous piece's time (rule 8).
_OTHERS_PART, _PAUSE_PER_PIECE = 1 / 2, 2
# Maximum time of a piece and of a pause beside other I/O, in seconds (rules 8 and 10).
_LONGEST_SECONDS, _PAUSE_SECONDS = 0.1, 1.0
# Time of a piece and of a pause beside other I/O whose average time is unknown, in seconds.
_UNKNOWN_SECONDS, _UNKNOWN_PAUSE_SECONDS = 0.002, 0.02
# Weight of a new measurement in an average, and minimum time of a piece in a measurement, in
# seconds.
_NEW_PART, _LEAST_SECONDS = 1 / 4, 1e-5
# Interval at which a waiting worker checks whether its work was cancelled, in seconds.
_CHECK_SECONDS = 0.1


@dataclass
class Piece:
    """Size, in bytes, of the piece that an I/O slot is for.

    A worker that did fewer bytes in the slot sets `length_bytes` to the number of bytes done.
    """

    length_bytes: int


@dataclass(frozen=True)
class Work:
    """Background I/O of one kind on some disks, made by `Pace.work`."""

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
        """Yield the pieces of a range of a device in order, each as a context that does the wait.

        Entering the context waits for an I/O slot, without a time limit, and returns the piece's
        offset and length in bytes. The caller does the piece in the context. It must hold no lock
        when it enters. Between two pieces no slot is held. Raises what `check` raises.
        """
        self.progress.begin(end_bytes, begin_bytes)
        while (offset := self.progress.done_bytes) < end_bytes:
            yield self._chunk(offset, min(end_bytes - offset, self.most_bytes))

    @contextmanager
    def _chunk(self, offset: int, most_bytes: int) -> Iterator[tuple[int, int]]:
        """Wait for an I/O slot for the piece that begins at `offset`, done in the context."""
        with self.piece(most_bytes) as piece:
            yield offset, piece.length_bytes

    @contextmanager
    def piece(self, most_bytes: int) -> Iterator[Piece]:
        """Wait for an I/O slot for a piece of at most `most_bytes`, which is done in the context.

        Raises what `check` raises.
        """
        with self.pace.turn(self, most_bytes) as piece:
            yield piece
        self.progress.add(piece.length_bytes)


@dataclass(eq=False)
class _Shared:
    """An I/O slot that several workers may share, or the place in the queue for a slot."""

    disks: frozenset[str]
    # The rule of the setting at the time when the worker asked for the slot.
    rule: "_Rule"
    may_join: bool
    # The number of workers in the slot, the bytes that they did in total, and the maximum size of a
    # piece, in bytes.
    workers: int = 1
    done_bytes: int = 0
    length_bytes: int = 0
    begun_at: float = -math.inf
    # The time from which the piece counts as hanging. Infinity before the piece begins.
    hangs_at: float = math.inf
    # The time until which other workers may join.
    joined_until: float = -math.inf


class _Rule(Protocol):
    """A rule for the size of pieces and for pauses; only the slot's holder calls its methods."""

    def begin(self, work: Work, pause: Callable[[float], None]) -> int:
        """Pause by calling `pause` with seconds; return the next piece's maximum size in bytes."""

    def end(self, work: Work, length_bytes: int, seconds: float) -> None:
        """Take account of a piece that has just ended: its length, and the seconds it took."""


class _GivingWay:
    """The rule of `auto`: give way to other I/O (rules 7 to 10)."""

    def __init__(
        self, kernel: Kernel, clock: Callable[[], float], changed_at: Callable[[], float]
    ) -> None:
        self._kernel, self._clock, self._changed_at = kernel, clock, changed_at
        self.paused_seconds = 0.0
        # The previous piece: its size, its time, and its end.
        self._length_bytes, self._took_seconds, self._ended_at = _FIRST_BYTES, 0.0, -math.inf
        # The rate of pieces without other I/O, in bytes a second, by the kind of work and the
        # disks.
        self._rates: dict[tuple[str, frozenset[str]], float] = {}
        # The last reading of each disk's load, and the time of that reading.
        self._seen: dict[str, DiskLoad] = {}
        self._looked_at = -math.inf
        # The time when other I/O was last seen, and the average time that such I/O takes.
        self._others_at, self._others_take_seconds = -math.inf, 0.0

    def begin(self, work: Work, pause: Callable[[float], None]) -> int:
        """Wait for other I/O by rule 8; return the next piece's maximum size in bytes."""
        if not work.disks:  # no disk is known, so there are no I/O statistics
            return MOST_BYTES
        if self._clock() - self._ended_at > _OTHERS_SECONDS or work.disks - self._seen.keys():
            # Forget the previous piece and the last reading: they are too old, or of other disks.
            self._length_bytes, self._took_seconds = _FIRST_BYTES, 0.0
            self._looked_at = -math.inf
        self._look(work, pause)
        if self._pause(pause):
            # Look again after the pause: if other I/O is seen now, the pause has to be longer.
            self._look(work, pause)
            self._pause(pause)
        rate, most_bytes = self._rate(work), _GROWTH * self._length_bytes
        if self.is_beside_others and rate:
            seconds = self._others_take_seconds * _OTHERS_PART or _UNKNOWN_SECONDS
            most_bytes = min(most_bytes, int(rate * min(seconds, _LONGEST_SECONDS)))
        longest_bytes = max(min(int(rate * _LONG_SECONDS), work.most_bytes), MOST_BYTES)
        return _rounded(most_bytes, longest_bytes)

    def end(self, work: Work, length_bytes: int, seconds: float) -> None:
        """Measure the rate of a piece that has ended, and read the load of the disks."""
        measured, rate = length_bytes / max(seconds, _LEAST_SECONDS), self._rate(work)
        # A piece beside other I/O waits for that I/O, so its rate counts only if it is above the
        # average. The same holds for a worker that did nothing in its slot.
        is_alone = measured and not self.is_beside_others
        self._rates[work.kind, work.disks] = (_mean if is_alone else max)(rate, measured)
        self._length_bytes, self._took_seconds = length_bytes, seconds
        self._ended_at = self._clock()
        self._pass_over(work)

    @property
    def is_beside_others(self) -> bool:
        """Whether other I/O on the disks was seen in the last half second."""
        return self._clock() - self._others_at < _OTHERS_SECONDS

    def _rate(self, work: Work) -> float:
        """Return the rate of a kind of work on its disks, in bytes a second; 0 if unknown."""
        return self._rates.get((work.kind, work.disks), 0.0)

    def _pause(self, pause: Callable[[float], None]) -> bool:
        """Wait for the rest of the pause after the previous piece; return whether any was left."""
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

    def _look(self, work: Work, pause: Callable[[float], None]) -> None:
        """Look for other I/O that is in flight, or was completed since the last reading."""
        if self._changed_at() >= self._looked_at:
            self._pass_over(work)
            pause(_FIRST_SECONDS)
        for disk, load in self._loads(work).items():
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

    def _pass_over(self, work: Work) -> None:
        """Read the load of the disks, so that only other I/O from now on is noticed."""
        self._seen |= self._loads(work)
        self._looked_at = self._clock()

    def _loads(self, work: Work) -> dict[str, DiskLoad]:
        """Read the load of each disk of a work."""
        return {disk: self._kernel.disk_load(disk) for disk in work.disks}


class _Limited:
    """The rule of a limit in bytes a second, or in percent of the fastest piece (rule 6)."""

    def __init__(self, bandwidth: Reserve, clock: Callable[[], float]) -> None:
        self.bandwidth, self._clock = bandwidth, clock
        self._due_at = -math.inf
        # The rate of the fastest piece, in bytes a second, by the kind of work.
        self._best: dict[str, float] = {}

    def begin(self, work: Work, pause: Callable[[float], None]) -> int:
        """Wait until the limit allows the next piece; return its maximum size, in bytes."""
        if (left_seconds := self._due_at - self._clock()) > 0:
            pause(left_seconds)
        rate = self._rate(work)
        return _FIRST_BYTES if rate is None else _rounded(int(rate * _LIMITED_SECONDS))

    def end(self, work: Work, length_bytes: int, seconds: float) -> None:
        """Note the rate of a piece that has ended, and when the next piece may begin."""
        measured = length_bytes / max(seconds, _LEAST_SECONDS)
        self._best[work.kind] = max(measured, self._best.get(work.kind, 0.0))
        if rate := self._rate(work):
            self._due_at = self._clock() - seconds + length_bytes / rate

    def _rate(self, work: Work) -> float | None:
        """Return the limit for a work, in bytes a second.

        None for a limit in percent, before a piece was measured.
        """
        if not self.bandwidth.percent:
            return self.bandwidth.size_bytes
        best = self._best.get(work.kind)
        return None if best is None else best * self.bandwidth.percent / 100


class _Unlimited:
    """The rule of the setting `0`: no pauses, and pieces as long as asked for (rule 5)."""

    def begin(self, _work: Work, _pause: Callable[[float], None]) -> int:
        """Return a size that limits no piece."""
        return sys.maxsize

    def end(self, work: Work, length_bytes: int, seconds: float) -> None:
        """Do nothing: the next piece does not depend on the previous one."""


_UNLIMITED = _Unlimited()


def _mean(previous_mean: float, measured: float) -> float:
    """Return a mean in which the latest measurements count most.

    `previous_mean` is 0 if there is no earlier measurement.
    """
    return previous_mean + (measured - previous_mean) * _NEW_PART if previous_mean else measured


def _rounded(length_bytes: int, most_bytes: int = MOST_BYTES) -> int:
    """Return a piece's size in bytes, within its limits and a multiple of LEAST_BYTES."""
    return max(min(length_bytes, most_bytes) // LEAST_BYTES, 1) * LEAST_BYTES


class Pace:
    """The I/O slots for the background I/O of one volume group (see the module's docstring)."""

    def __init__(
        self,
        bandwidth: Callable[[], Reserve | None],
        kernel: Kernel,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        changed_at: Callable[[], float] = lambda: -math.inf,
    ) -> None:
        """Make the pace of a volume group.

        `bandwidth` returns the present value of the setting `background_bandwidth`. `changed_at`
        returns the time at which Carver itself last changed the group, by `clock`.
        """
        self._kernel, self.clock, self._sleep = kernel, clock, sleep
        self._bandwidth = bandwidth
        self._giving_way = _GivingWay(kernel, clock, changed_at)
        self._limited = _Limited(NO_RESERVE, clock)
        self._moved = threading.Condition()
        # The queue for I/O slots. The first element is the slot in use.
        self._queue: deque[_Shared] = deque()
        self._bytes: Counter[str] = Counter()

    @property
    def _rule(self) -> _Rule:
        """The rule of the present setting, by which the next I/O slot is given."""
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
        """Whether no worker waits, neither for another worker nor for other I/O."""
        return self._rule is _UNLIMITED

    @property
    def done_bytes(self) -> Mapping[str, int]:
        """Number of bytes done until now, by the kind of work."""
        return dict(self._bytes)

    @property
    def paused_seconds(self) -> float:
        """Total time for which work was paused because of other I/O, in seconds."""
        return self._giving_way.paused_seconds

    def work(
        self,
        kind: str,
        *devices: str,
        check: Callable[[], None],
        flush: Callable[[], None] | None = None,
        progress: Progress | None = None,
        most_bytes: int = MOST_BYTES,
        may_join: bool = False,
    ) -> Work:
        """Return a `Work` on the devices with these paths, which waits for its I/O slots here.

        `check` raises if the work was cancelled. `flush` writes the data of a piece to the disks;
        it is left out for work that only reads, or flushes by itself. `most_bytes` is larger than
        MOST_BYTES for work that can end within a piece (rule 9). `may_join` is for workers that
        need each other (rule 4).
        """
        disks = set[str]()
        for device in devices:
            disks |= self._kernel.disks_below(device)
        progress = progress or Progress(self.clock)
        return Work(self, kind, frozenset(disks), check, flush, progress, most_bytes, may_join)

    @contextmanager
    def turn(self, work: Work, most_bytes: int) -> Iterator[Piece]:
        """Wait for an I/O slot for a piece of at most `most_bytes`, done in the context.

        The slot ends with the context.
        """
        shared = self._enter(work)
        piece, done_bytes = Piece(min(most_bytes, shared.length_bytes)), 0
        try:
            yield piece
            if piece.length_bytes and work.flush is not None:
                work.flush()
            done_bytes = piece.length_bytes
        finally:
            self._leave(work, shared, done_bytes)

    def _enter(self, work: Work) -> _Shared:
        """Wait for an I/O slot, or for one that can be joined, and return the slot."""
        work.check()
        own_slot = _Shared(work.disks, self._rule, work.may_join)
        try:
            slot = self._wait(own_slot, work.check)
            if slot is own_slot:
                self._begin(own_slot, own_slot.rule.begin(work, partial(self._pause, work.check)))
        except BaseException:
            self._remove(own_slot)
            raise
        return slot

    def _wait(self, own_slot: _Shared, check: Callable[[], None]) -> _Shared:
        """Wait in the queue until the worker's own slot is first, or another slot can be joined."""
        if own_slot.rule is _UNLIMITED:
            return own_slot
        with self._moved:
            self._queue.append(own_slot)
        while True:
            with self._moved:
                if (slot := self._turn_for(own_slot)) is not None:
                    return slot
                self._moved.wait(_CHECK_SECONDS)
            check()

    def _turn_for(self, own_slot: _Shared) -> _Shared | None:
        """Return the slot that a waiting worker may enter now, or None if the worker has to wait.

        The slot is the worker's own. Or it is a shared slot; then the worker leaves the queue.
        """
        first_slot = self._queue[0]
        if first_slot is not own_slot and self.clock() >= first_slot.hangs_at:
            # A slot whose piece hangs leaves the queue. The slot behind it is then the first.
            self._queue.popleft()
            first_slot = self._queue[0]
        if first_slot is own_slot:
            return own_slot
        is_open = self.clock() < first_slot.joined_until and own_slot.disks <= first_slot.disks
        # A worker joins only if all in the queue may: otherwise it would overtake a worker that
        # waits for a slot of its own.
        if not (is_open and all(slot.may_join for slot in self._queue)):
            return None
        self._queue.remove(own_slot)
        first_slot.workers += 1
        return first_slot

    def _begin(self, own_slot: _Shared, length_bytes: int) -> None:
        """Begin the piece of a slot that has become the first, with its maximum size."""
        is_alone = isinstance(own_slot.rule, _GivingWay) and not own_slot.rule.is_beside_others
        with self._moved:
            own_slot.length_bytes, own_slot.begun_at = length_bytes, self.clock()
            own_slot.hangs_at = own_slot.begun_at + _HANGING_SECONDS
            if own_slot.may_join and is_alone:
                own_slot.joined_until = own_slot.begun_at + _LONG_SECONDS
                self._moved.notify_all()

    def _leave(self, work: Work, shared: _Shared, done_bytes: int) -> None:
        """Leave an I/O slot; the slot ends when its last worker leaves."""
        with self._moved:
            if done_bytes:
                self._bytes[work.kind] += done_bytes
            shared.done_bytes += done_bytes
            shared.workers -= 1
            if shared.workers:
                return
            # From now on no worker may join the slot.
            shared.joined_until = -math.inf
        try:
            if shared.done_bytes:
                # The rule gets the bytes of all workers in the slot. Otherwise it would take their
                # I/O for other I/O.
                shared.rule.end(work, shared.done_bytes, self.clock() - shared.begun_at)
        finally:
            self._remove(shared)

    def _remove(self, own_slot: _Shared) -> None:
        """Remove a slot from the queue, so that the slot behind it is the first."""
        with self._moved:
            with suppress(ValueError):  # its piece hung, or no worker waits with the setting 0
                self._queue.remove(own_slot)
            self._moved.notify_all()

    def _pause(self, check: Callable[[], None], seconds: float) -> None:
        """Sleep for some seconds, checking now and then whether the work was cancelled."""
        until_seconds = self.clock() + seconds
        while (left_seconds := until_seconds - self.clock()) > 0:
            check()
            self._sleep(min(left_seconds, _CHECK_SECONDS))
        check()


class Paces:
    """The Pace of each volume group, with the setting of the configuration."""

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
        """Return the pace of a volume group, even of a group that no class names."""
        with self._guard:
            if group not in self._paces:
                self._paces[group] = Pace(
                    lambda: self._configuration.now.bandwidth_of(group),
                    self._kernel,
                    changed_at=partial(self._changed_at, group),
                )
            return self._paces[group]

    def every(self) -> Mapping[str, Pace]:
        """Return the paces that `of` has returned until now, by the names of the groups."""
        with self._guard:
            return dict(self._paces)
