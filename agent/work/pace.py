"""Pace: turns of a volume group's background I/O on its disks, in which it gives way to other I/O.

A piece is a part of a device that is erased, zeroed, copied, compared, sent or received. The rule,
of which the setting `background_bandwidth` chooses 5, 6, or 7 to 10:

1. Each piece waits for its turn, in the order in which the workers of a group ask: so they share
   the disks evenly, and between two turns nothing of theirs is on its way.
2. What a piece wrote is flushed within its turn, or others' next fsync(2) would pay for it.
3. A piece that has taken two seconds bars the other workers no more: its disk may hang, and not
   theirs.
4. Workers that need one another, as one that reads what another writes, share a turn, which each
   may leave and enter again for half a second, while no one else uses the disks or waits.
5. `0`: no worker waits, and a piece is as long as asked for.
6. A limit in bytes a second, or a part of the fastest piece of that kind of work: a piece is what
   the limit allows in a tenth of a second, and the next piece begins once it is allowed.
7. `auto`: before each piece the disks are looked at (mount/disk_load.py), and what is in flight, or
   was completed since the last piece, is others' I/O, unless lvm2 changed the group meanwhile.
8. For half a second after others' I/O a piece takes half as long as theirs does on average, and
   follows a pause twice as long as the piece before it, and as one of theirs: so others wait
   little, and the work keeps a third of the disks' time.
9. Alone pieces grow twofold to 64 MiB, of work that can end within a piece to half a second, and
   between two is a pause of a sixteenth of the first, in which others are looked for.
10. A piece has at least 1 MiB, and a pause beside others takes at most a second: so all work ends.
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

# Rule 9, and how much is not interrupted: CreateVolume, which may want a pool that is being zeroed,
# and the end of the service wait for one piece at most. Smaller ones than LEAST_BYTES (rule 10)
# spare others little: a disk takes as long to find the place.
MOST_BYTES, LEAST_BYTES = 64 << 20, 1 << 20
_LONG_SECONDS = 0.5
_GROWTH, _FIRST_BYTES = 2, 32 << 20
_ALONE_PART, _ALONE_SECONDS = 1 / 16, 0.01
# Rule 3.
_HANGING_SECONDS = 2.0
# Rule 6.
_LIMITED_SECONDS = 0.1
# Rule 7: where the last look is no use, for how long others' I/O is looked for.
_FIRST_SECONDS = 0.002
# Rule 8. Others are at work for less than the second after which dm-thin commits its metadata by
# itself (COMMIT_PERIOD, drivers/md/dm-thin.c). Until one of their I/Os has completed the piece and
# the pause are the UNKNOWN ones.
_OTHERS_SECONDS = 0.5
_OTHERS_PART, _PAUSE_PER_PIECE = 1 / 2, 2
_LONGEST_SECONDS, _PAUSE_SECONDS = 0.1, 1.0
_UNKNOWN_SECONDS, _UNKNOWN_PAUSE_SECONDS = 0.002, 0.02
# Part of a new measurement in an average, and the least time that a piece counts as.
_NEW_PART, _LEAST_SECONDS = 1 / 4, 1e-5
# How soon a worker that waits finds that it is called off.
_CHECK_SECONDS = 0.1


@dataclass
class Piece:
    """How many bytes a turn is for. A worker that did fewer in it says so here."""

    length_bytes: int


@dataclass(frozen=True)
class Work:
    """Background I/O of one kind on some disks; `Pace.work` makes it."""

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
        """Pieces, one after the other, each of which is done within its `with`.

        That waits for a turn, as long as that takes, and gives the piece's offset and length in
        bytes; no lock is held to enter it. Between two pieces there is no turn. Raises what `check`
        raises.
        """
        self.progress.begin(end_bytes, begin_bytes)
        while (offset := self.progress.done_bytes) < end_bytes:
            yield self._chunk(offset, min(end_bytes - offset, self.most_bytes))

    @contextmanager
    def _chunk(self, offset: int, most_bytes: int) -> Iterator[tuple[int, int]]:
        with self.piece(most_bytes) as piece:
            yield offset, piece.length_bytes

    @contextmanager
    def piece(self, most_bytes: int) -> Iterator[Piece]:
        """Wait for a turn, as `chunks` does, for a piece of at most that length, done inside.

        Raises what `check` raises.
        """
        with self.pace.turn(self, most_bytes) as piece:
            yield piece
        self.progress.add(piece.length_bytes)


@dataclass(eq=False)
class _Shared:
    """A turn that workers may share, or the place of one in the queue for it."""

    disks: frozenset[str]
    # The one that held when the worker came.
    rule: "_Rule"
    may_join: bool
    # How many are in it, and what they did; how long a piece of theirs may be.
    workers: int = 1
    done_bytes: int = 0
    length_bytes: int = 0
    begun_at: float = -math.inf
    # When its piece counts as hanging; never before the piece begins.
    hangs_at: float = math.inf
    # Others may join until then.
    joined_until: float = -math.inf


class _Rule(Protocol):
    """How large pieces are, and what is paused between them; used by whose turn it is."""

    def begin(self, work: Work, pause: Callable[[float], None]) -> int:
        """Pause, by `pause` with seconds; return how many bytes the next piece may have."""

    def end(self, work: Work, length_bytes: int, seconds: float) -> None:
        """Take account of the piece that has just ended, and took so long."""


class _GivingWay:
    """`auto`: rules 7 to 10."""

    def __init__(
        self, kernel: Kernel, clock: Callable[[], float], changed_at: Callable[[], float]
    ) -> None:
        self._kernel, self._clock, self._changed_at = kernel, clock, changed_at
        self.paused_seconds = 0.0
        # The last piece.
        self._length_bytes, self._took_seconds, self._ended_at = _FIRST_BYTES, 0.0, -math.inf
        # How fast pieces are where they need not wait for others, in bytes a second.
        self._rates: dict[tuple[str, frozenset[str]], float] = {}
        # What each disk had done when it was looked at last, and when that was.
        self._seen: dict[str, DiskLoad] = {}
        self._looked_at = -math.inf
        # When others were seen last, and how long their I/O takes on average.
        self._others_at, self._others_take_seconds = -math.inf, 0.0

    def begin(self, work: Work, pause: Callable[[float], None]) -> int:
        if not work.disks:  # there are no statistics
            return MOST_BYTES
        if self._clock() - self._ended_at > _OTHERS_SECONDS or work.disks - self._seen.keys():
            # What was, does not tell what is now.
            self._length_bytes, self._took_seconds = _FIRST_BYTES, 0.0
            self._looked_at = -math.inf
        self._look(work, pause)
        if self._pause(pause):
            # Others may be seen in it, and then it is longer.
            self._look(work, pause)
            self._pause(pause)
        rate, most_bytes = self._rate(work), _GROWTH * self._length_bytes
        if self.is_beside_others and rate:
            seconds = self._others_take_seconds * _OTHERS_PART or _UNKNOWN_SECONDS
            most_bytes = min(most_bytes, int(rate * min(seconds, _LONGEST_SECONDS)))
        longest_bytes = max(min(int(rate * _LONG_SECONDS), work.most_bytes), MOST_BYTES)
        return _rounded(most_bytes, longest_bytes)

    def end(self, work: Work, length_bytes: int, seconds: float) -> None:
        measured, rate = length_bytes / max(seconds, _LEAST_SECONDS), self._rate(work)
        # Beside others a piece waits for theirs. A worker may have done nothing in its turn.
        is_alone = measured and not self.is_beside_others
        self._rates[work.kind, work.disks] = (_mean if is_alone else max)(rate, measured)
        self._length_bytes, self._took_seconds = length_bytes, seconds
        self._ended_at = self._clock()
        self._pass_over(work)

    @property
    def is_beside_others(self) -> bool:
        """Whether others used the disks a moment ago."""
        return self._clock() - self._others_at < _OTHERS_SECONDS

    def _rate(self, work: Work) -> float:
        return self._rates.get((work.kind, work.disks), 0.0)

    def _pause(self, pause: Callable[[float], None]) -> bool:
        """Pause since the last piece; whether there was anything left of that."""
        if is_for_others := self.is_beside_others:
            others = self._others_take_seconds or _UNKNOWN_PAUSE_SECONDS
            seconds = min(max(_PAUSE_PER_PIECE * self._took_seconds, others), _PAUSE_SECONDS)
        else:
            seconds = min(self._took_seconds * _ALONE_PART, _ALONE_SECONDS)
        if (left_seconds := self._ended_at + seconds - self._clock()) <= 0:
            return False
        pause(left_seconds)
        self.paused_seconds += is_for_others * left_seconds
        return True

    def _look(self, work: Work, pause: Callable[[float], None]) -> None:
        """Look for I/O of others: completed since the last look, or on its way."""
        if self._changed_at() >= self._looked_at:
            self._pass_over(work)
            pause(_FIRST_SECONDS)
        for disk, now in self._loads(work).items():
            before = self._seen[disk]
            completed = now.completed - before.completed
            if completed > 0:
                waited_milliseconds = now.waited_milliseconds - before.waited_milliseconds
                measured = waited_milliseconds / completed / 1000
                self._others_take_seconds = _mean(self._others_take_seconds, measured)
            if completed > 0 or now.in_flight:
                self._others_at = self._clock()
            self._seen[disk] = now
        self._looked_at = self._clock()

    def _pass_over(self, work: Work) -> None:
        """Look for I/O of others from now on."""
        self._seen |= self._loads(work)
        self._looked_at = self._clock()

    def _loads(self, work: Work) -> dict[str, DiskLoad]:
        return {disk: self._kernel.disk_load(disk) for disk in work.disks}


class _Limited:
    """A limit: rule 6."""

    def __init__(self, bandwidth: Reserve, clock: Callable[[], float]) -> None:
        self.bandwidth, self._clock = bandwidth, clock
        self._due_at = -math.inf
        # Bytes a second by the kind of work.
        self._best: dict[str, float] = {}

    def begin(self, work: Work, pause: Callable[[float], None]) -> int:
        if (left_seconds := self._due_at - self._clock()) > 0:
            pause(left_seconds)
        rate = self._rate(work)
        return _FIRST_BYTES if rate is None else _rounded(int(rate * _LIMITED_SECONDS))

    def end(self, work: Work, length_bytes: int, seconds: float) -> None:
        measured = length_bytes / max(seconds, _LEAST_SECONDS)
        self._best[work.kind] = max(measured, self._best.get(work.kind, 0.0))
        if rate := self._rate(work):
            self._due_at = self._clock() - seconds + length_bytes / rate

    def _rate(self, work: Work) -> float | None:
        """Bytes a second; None before anything was measured."""
        if not self.bandwidth.percent:
            return self.bandwidth.size_bytes
        best = self._best.get(work.kind)
        return None if best is None else best * self.bandwidth.percent / 100


class _Unlimited:
    """`0`: rule 5."""

    def begin(self, _work: Work, _pause: Callable[[float], None]) -> int:
        return sys.maxsize

    def end(self, work: Work, length_bytes: int, seconds: float) -> None:
        """Nothing follows from it."""


_UNLIMITED = _Unlimited()


def _mean(before: float, measured: float) -> float:
    """A mean of measurements, the last ones above all; 0 for none before."""
    return before + (measured - before) * _NEW_PART if before else measured


def _rounded(length_bytes: int, most_bytes: int = MOST_BYTES) -> int:
    return max(min(length_bytes, most_bytes) // LEAST_BYTES, 1) * LEAST_BYTES


class Pace:
    """Turns for the background I/O of one volume group."""

    def __init__(
        self,
        bandwidth: Callable[[], Reserve | None],
        kernel: Kernel,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        changed_at: Callable[[], float] = lambda: -math.inf,
    ) -> None:
        """`bandwidth` is the setting at each moment.

        `changed_at` is when Carver itself last changed the group, by the clock.
        """
        self._kernel, self.clock, self._sleep = kernel, clock, sleep
        self._bandwidth = bandwidth
        self._giving_way = _GivingWay(kernel, clock, changed_at)
        self._limited = _Limited(NO_RESERVE, clock)
        self._moved = threading.Condition()
        # The first one's turn is under way.
        self._queue: deque[_Shared] = deque()
        self._bytes: Counter[str] = Counter()

    @property
    def _rule(self) -> _Rule:
        """The rule of the present setting, by which the next turn goes."""
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
        """Whether no worker waits for another, nor for anyone else."""
        return self._rule is _UNLIMITED

    @property
    def done_bytes(self) -> Mapping[str, int]:
        """What was done until now, by the kind of work."""
        return dict(self._bytes)

    @property
    def paused_seconds(self) -> float:
        """How long work was paused for others."""
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
        """Make work on devices, by their paths, which waits for its turns here.

        `check` raises where it is called off. `flush` has on the disks what was written; leave it
        out for what only reads, or flushes itself. `most_bytes` is more than MOST_BYTES for what
        can end within a piece (rule 9). `may_join` is for workers that need one another (rule 4).
        """
        disks = set[str]()
        for one in devices:
            disks |= self._kernel.disks_below(one)
        progress = progress or Progress(self.clock)
        return Work(self, kind, frozenset(disks), check, flush, progress, most_bytes, may_join)

    @contextmanager
    def turn(self, work: Work, most_bytes: int) -> Iterator[Piece]:
        """Wait for a turn for a piece of at most that length, done inside."""
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
        """Wait for a turn, or for one to join."""
        work.check()
        own = _Shared(work.disks, self._rule, work.may_join)
        try:
            found = self._wait(own, work.check)
            if found is own:
                self._begin(own, own.rule.begin(work, partial(self._pause, work.check)))
        except BaseException:
            self._remove(own)
            raise
        return found

    def _wait(self, own: _Shared, check: Callable[[], None]) -> _Shared:
        """Wait in the queue until its turn comes, or it may join the one under way."""
        if own.rule is _UNLIMITED:
            return own
        with self._moved:
            self._queue.append(own)
        while True:
            with self._moved:
                if (found := self._turn_for(own)) is not None:
                    return found
                self._moved.wait(_CHECK_SECONDS)
            check()

    def _turn_for(self, own: _Shared) -> _Shared | None:
        """Its own turn, or one that it joins, which it leaves the queue for; None: it waits."""
        first = self._queue[0]
        if first is not own and self.clock() >= first.hangs_at:
            # One that hangs is first no more; the next one has not begun.
            self._queue.popleft()
            first = self._queue[0]
        if first is own:
            return own
        is_open = self.clock() < first.joined_until and own.disks <= first.disks
        # One that waits for a turn of its own is passed by none.
        if not (is_open and all(one.may_join for one in self._queue)):
            return None
        self._queue.remove(own)
        first.workers += 1
        return first

    def _begin(self, own: _Shared, length_bytes: int) -> None:
        is_alone = isinstance(own.rule, _GivingWay) and not own.rule.is_beside_others
        with self._moved:
            own.length_bytes, own.begun_at = length_bytes, self.clock()
            own.hangs_at = own.begun_at + _HANGING_SECONDS
            if own.may_join and is_alone:
                own.joined_until = own.begun_at + _LONG_SECONDS
                self._moved.notify_all()

    def _leave(self, work: Work, shared: _Shared, done_bytes: int) -> None:
        """Leave a turn; it ends with the last worker in it: between turns nothing is on its way."""
        with self._moved:
            if done_bytes:
                self._bytes[work.kind] += done_bytes
            shared.done_bytes += done_bytes
            shared.workers -= 1
            if shared.workers:
                return
            # It is joined no more.
            shared.joined_until = -math.inf
        try:
            if shared.done_bytes:
                # Of all in it, or it would look like I/O of strangers.
                shared.rule.end(work, shared.done_bytes, self.clock() - shared.begun_at)
        finally:
            self._remove(shared)

    def _remove(self, own: _Shared) -> None:
        """The next one in the queue is the first."""
        with self._moved:
            with suppress(ValueError):  # it hung, or none waits for another
                self._queue.remove(own)
            self._moved.notify_all()

    def _pause(self, check: Callable[[], None], seconds: float) -> None:
        until = self.clock() + seconds
        while (left_seconds := until - self.clock()) > 0:
            check()
            self._sleep(min(left_seconds, _CHECK_SECONDS))
        check()


class Paces:
    """The Pace of each volume group, by the configuration."""

    def __init__(
        self,
        configuration: Configuration,
        kernel: Kernel,
        changed_at: Callable[[str], float],
    ) -> None:
        """`changed_at` is when Carver last changed a group, by the monotonic clock."""
        self._configuration, self._kernel = configuration, kernel
        self._changed_at = changed_at
        self._guard = threading.Lock()
        self._paces: dict[str, Pace] = {}

    def of(self, group: str) -> Pace:
        """The one of a group, also of one that no class names any more."""
        with self._guard:
            if group not in self._paces:
                self._paces[group] = Pace(
                    lambda: self._configuration.now.bandwidth_of(group),
                    self._kernel,
                    changed_at=partial(self._changed_at, group),
                )
            return self._paces[group]

    def every(self) -> Mapping[str, Pace]:
        """Those that were asked for, by their groups."""
        with self._guard:
            return dict(self._paces)
