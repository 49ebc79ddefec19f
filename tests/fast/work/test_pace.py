"""Background I/O takes turns, gives way to others, and keeps to its limit."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice, pairwise

import expect
import in_turn
import pytest

from agent.work import pace
from agent.work.pace import LEAST_BYTES, MOST_BYTES, IoTask, Pace
from agent.work.progress import Progress
from lvm.layout import NO_RESERVE, Reserve
from mount.disk_load import DiskLoad
from mount.kernel import Kernel

MIB = 1 << 20


class Disk:
    """A disk and a clock: it does one thing at a time, and time goes on by it and by pauses.

    A neighbour writes again and again, `neighbour_seconds` for each, with `pause_seconds` between.
    What is submitted first is done first.
    """

    def __init__(self, bytes_per_second: float = 512 * MIB) -> None:
        self.bytes_per_second = bytes_per_second
        self.now = 1000.0
        self.neighbour_seconds = 0.0
        self.pause_seconds = 0.0
        self.latencies: list[float] = []
        self._completed, self._milliseconds = 0, 0.0
        # When the neighbour's write was submitted, and will be done.
        self._submitted = self._due = 0.0
        self.pieces: list[tuple[float, int]] = []

    def begin_neighbour(self, seconds: float, pause_seconds: float = 0.0) -> None:
        self.neighbour_seconds, self.pause_seconds = seconds, pause_seconds
        self._submitted, self._due = self.now, self.now + seconds

    def end_neighbour(self) -> None:
        self.neighbour_seconds = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Time goes by; the neighbour has the disk."""
        assert seconds > 0
        until = self.now + seconds
        while self.neighbour_seconds and self._due <= until:
            self._complete()
        self.now = until

    def write(self, length_bytes: int) -> None:
        """A piece comes after what the neighbour has on its way, and before its next write."""
        self.pieces.append((self.now, length_bytes))
        if self.neighbour_seconds and self._submitted <= self.now:
            self.now = self._due
            self._complete()
        self.now += length_bytes / self.bytes_per_second
        if self.neighbour_seconds and self._submitted < self.now:
            self._due = self.now + self.neighbour_seconds

    def _complete(self) -> None:
        latency = self._due - self._submitted
        self.latencies.append(latency)
        self._completed += 1
        self._milliseconds += latency * 1000
        self._submitted = self._due + self.pause_seconds
        self._due = self._submitted + self.neighbour_seconds

    def load(self) -> DiskLoad:
        in_flight = int(bool(self.neighbour_seconds) and self._submitted <= self.now)
        return DiskLoad(self._completed, int(self._milliseconds), in_flight)


class OneDisk(Kernel):
    """Every device stands on one disk."""

    def __init__(self, disk: Disk) -> None:
        super().__init__()
        self.disk = disk

    def disks_below(self, device: str) -> frozenset[str]:
        return frozenset({"sda"})

    def disk_load(self, disk: str) -> DiskLoad:
        return self.disk.load()


@pytest.fixture
def disk() -> Disk:
    return Disk()


def paced(disk: Disk, bandwidth: Reserve | None = None) -> Pace:
    return Pace(lambda: bandwidth, OneDisk(disk), disk.clock, disk.sleep)


def work_of(one: Pace, check: Callable[[], None] = lambda: None, kind: str = "erase") -> IoTask:
    return one.task(kind, "/dev/data/a", check=check)


def erase(disk: Disk, one: Pace, size_bytes: int, kind: str = "erase") -> float:
    """Erase so much; returns how long it took."""
    begun = disk.now
    for _, length in in_turn.each(work_of(one, kind=kind).chunks(size_bytes)):
        disk.write(length)
    return disk.now - begun


def test_pieces_cover_all_once(disk: Disk) -> None:
    disk.begin_neighbour(0.002)
    found = list(in_turn.each(work_of(paced(disk)).chunks(1000 * MIB + 4096, 3 * MIB)))
    assert found[0][0] == 3 * MIB
    ends = [offset + length for offset, length in found]
    assert [offset for offset, _ in found[1:]] == ends[:-1]
    assert ends[-1] == 1000 * MIB + 4096
    assert all(length <= MOST_BYTES for _, length in found)


def test_alone_pieces_are_long_and_nearly_all_of_the_time_is_used(disk: Disk) -> None:
    seconds = erase(disk, paced(disk), 4096 * MIB)
    assert max(length for _, length in disk.pieces) == MOST_BYTES
    assert seconds < 1.1 * 4096 * MIB / disk.bytes_per_second


@pytest.mark.parametrize("neighbour_seconds", [0.004, 0.01])
def test_a_neighbour_waits_little_and_a_good_part_of_the_disk_stays(
    disk: Disk, neighbour_seconds: float
) -> None:
    one = paced(disk)
    disk.begin_neighbour(neighbour_seconds)
    seconds = erase(disk, one, 1024 * MIB)
    late = sorted(disk.latencies)[int(0.99 * len(disk.latencies))]
    assert late <= 2 * neighbour_seconds
    # It has the disk all the time by itself.
    assert seconds < 7 * 1024 * MIB / disk.bytes_per_second
    assert one.paused_seconds > seconds / 8


def test_a_neighbour_that_writes_seldom_is_seen(disk: Disk) -> None:
    disk.begin_neighbour(0.002, pause_seconds=0.1)
    erase(disk, paced(disk), 1024 * MIB)
    late = [one for one in disk.latencies if one > 2 * 0.002]
    assert len(late) <= 2


@pytest.mark.parametrize("is_own", [True, False])
def test_what_lvm2_did_for_carver_is_no_others_io(disk: Disk, is_own: bool) -> None:
    changed_at = [0.0]
    one = Pace(lambda: None, OneDisk(disk), disk.clock, disk.sleep, lambda: changed_at[0])
    work = work_of(one)
    with work.piece(MIB):
        disk.write(MIB)
    disk.begin_neighbour(0.002)
    disk.sleep(0.003)
    disk.end_neighbour()
    if is_own:
        changed_at[0] = disk.now
    with work.piece(MIB):
        disk.write(MIB)
    assert (one.paused_seconds == 0) == is_own


def test_others_are_seen_beside_what_lvm2_does(disk: Disk) -> None:
    # It is at work all the time.
    one = Pace(lambda: None, OneDisk(disk), disk.clock, disk.sleep, disk.clock)
    disk.begin_neighbour(0.004)
    erase(disk, one, 256 * MIB)
    assert disk.pieces[-1][1] < 4 * MIB
    assert one.paused_seconds > 0


def test_pieces_grow_again_once_the_neighbour_is_gone(disk: Disk) -> None:
    one = paced(disk)
    disk.begin_neighbour(0.002)
    erase(disk, one, 512 * MIB)
    assert disk.pieces[-1][1] < 2 * MIB
    disk.end_neighbour()
    erase(disk, one, 2048 * MIB)
    assert disk.pieces[-2][1] == MOST_BYTES


def test_a_neighbour_that_never_leaves_the_disk_does_not_stop_the_work(disk: Disk) -> None:
    disk.begin_neighbour(30.0)
    begun = disk.now
    for offset, length in in_turn.each(work_of(paced(disk)).chunks(16 * MIB)):
        # Its queue is long: a piece takes two seconds, whatever it has.
        disk.sleep(2.0)
        assert length >= LEAST_BYTES
        assert offset < 16 * MIB
    assert disk.now - begun <= 3 * 16 * MIB / LEAST_BYTES


@pytest.mark.parametrize("rate", [8 * MIB, 200 * MIB])
def test_a_limit_is_kept(disk: Disk, rate: int) -> None:
    seconds = erase(disk, paced(disk, Reserve(size_bytes=rate)), 400 * MIB)
    assert seconds == pytest.approx(400 * MIB / rate, rel=0.1)


def test_a_part_of_the_fastest_piece_is_kept_for_each_kind_of_work(disk: Disk) -> None:
    one = paced(disk, Reserve(percent=25.0))
    assert erase(disk, one, 1024 * MIB) == pytest.approx(8.0, rel=0.1)
    disk.bytes_per_second /= 2
    assert erase(disk, one, 1024 * MIB, "copy") == pytest.approx(16.0, rel=0.1)


def test_without_a_limit_there_is_no_pause(disk: Disk) -> None:
    disk.begin_neighbour(0.002)
    assert erase(disk, paced(disk, NO_RESERVE), 1024 * MIB) < 2.05


def test_a_worker_that_pauses_ends_when_it_is_called_off(disk: Disk) -> None:
    one = paced(disk, Reserve(size_bytes=MIB))
    left = iter(range(5))

    def check() -> None:
        if next(left, None) is None:
            raise KeyError

    with one.task("erase", check=lambda: None).piece(MIB) as piece:
        piece.length_bytes = 3600 * MIB
    with pytest.raises(KeyError):
        list(in_turn.each(work_of(one, check).chunks(MIB)))
    assert disk.now < 1000 + 5


@pytest.mark.parametrize("bytes_per_second", [64 * MIB, 600 * MIB, 4096 * MIB])
def test_alone_long_pieces_take_half_a_second_where_they_may(
    disk: Disk, bytes_per_second: int
) -> None:
    disk.bytes_per_second = bytes_per_second
    one = paced(disk)
    work = one.task("send", "/dev/data/a", check=lambda: None, most_bytes=512 * MIB)
    for _, length in in_turn.each(work.chunks(4096 * MIB)):
        disk.write(length)
    longest = max(length for _, length in disk.pieces)
    expected = min(max(bytes_per_second // 2, MOST_BYTES), 512 * MIB)
    assert expected - LEAST_BYTES <= longest <= expected
    disk.begin_neighbour(0.002)
    assert erase(disk, one, 4096 * MIB)
    assert max(length for _, length in disk.pieces[-10:]) <= MOST_BYTES


def test_a_piece_in_which_less_was_done_counts_as_that(disk: Disk) -> None:
    one = paced(disk, Reserve(size_bytes=MIB))
    begun = disk.now
    for done_bytes in (3 * MIB, 0, MIB):
        with work_of(one).piece(64 * MIB) as piece:
            piece.length_bytes = done_bytes
    with work_of(one).piece(64 * MIB):
        assert disk.now - begun == pytest.approx(4.0)
        assert one.done_bytes == {"erase": 4 * MIB}


def test_without_a_limit_a_piece_is_as_long_as_asked_for(disk: Disk) -> None:
    one = paced(disk, NO_RESERVE)
    with work_of(one).piece(1 << 40) as piece, work_of(one).piece(MIB):
        assert piece.length_bytes == 1 << 40


def test_two_workers_have_the_same_share(disk: Disk) -> None:
    one, order, begun = paced(disk), list[str](), threading.Event()

    def run(kind: str, pieces: int) -> None:
        for count, (_, length) in enumerate(
            in_turn.each(work_of(one, kind=kind).chunks(8192 * MIB))
        ):
            while not count and len(one._queue) < 2:
                begun.wait(0.01)
            disk.write(length)
            order.append(kind)
            if count == pieces:
                return

    with ThreadPoolExecutor(2) as both:
        list(both.map(run, ("erase", "copy"), (20, 20)))
    # From when both have begun until the first has ended they take turns.
    first = next(at for at in range(len(order)) if order[at] != order[0])
    last = min(len(order) - order[::-1].index(kind) for kind in ("erase", "copy"))
    shared = order[first:last]
    assert len(shared) > 10
    assert all(this != after for this, after in pairwise(shared))


@pytest.fixture
def busy(disk: Disk) -> Iterator[Pace]:
    """A piece is under way inside, and does not end."""
    one = paced(disk)
    with work_of(one).piece(MIB):
        yield one


def test_a_worker_that_waits_for_its_turn_ends_when_it_is_called_off(busy: Pace) -> None:
    def check() -> None:
        if len(calls) == 2:
            raise KeyError
        calls.append(1)

    calls = list[int]()
    with pytest.raises(KeyError):
        list(in_turn.each(work_of(busy, check).chunks(MIB)))


def test_a_piece_that_hangs_bars_no_other(disk: Disk, busy: Pace) -> None:
    disk.now += 2 * pace._HANGING_SECONDS
    assert list(in_turn.each(work_of(busy).chunks(MIB))) == [(0, MIB)]


def test_a_long_piece_that_has_ended_makes_no_waiter_count_as_hanging(disk: Disk) -> None:
    """The last waiter looks before the first one does, which then had no place in the queue."""
    turns = paced(disk)
    long, first, last = (pace._Slot(frozenset(), pace._UNLIMITED, may_join=False) for _ in range(3))
    turns._queue.extend((long, first, last))
    turns._begin(long, MIB)
    disk.now += 2 * pace._HANGING_SECONDS
    turns._remove(long)
    assert turns._enterable_slot(last) is None
    assert turns._enterable_slot(first) is first
    turns._begin(first, MIB)
    disk.now += 2 * pace._HANGING_SECONDS
    assert turns._enterable_slot(last) is last


def test_of_those_that_wait_for_one_that_hangs_none_is_left_out(disk: Disk, busy: Pace) -> None:
    waiting = [pace._Slot(frozenset(), pace._UNLIMITED, may_join=False) for _ in range(3)]
    busy._queue.extend(waiting)
    disk.now += 2 * pace._HANGING_SECONDS
    # Whoever looks first, the turn is the first one's.
    found = [busy._enterable_slot(one) for one in reversed(waiting)]
    assert found == [None, None, waiting[0]]


def test_a_failed_piece_ends_its_turn(disk: Disk) -> None:
    one = paced(disk)

    def fail() -> None:
        for _ in in_turn.each(work_of(one).chunks(MIB)):
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert list(in_turn.each(work_of(one).chunks(MIB))) == [(0, MIB)]
    assert one.done_bytes == {"erase": MIB}


@pytest.mark.parametrize(
    ("bandwidth", "is_beside"), [(None, False), (None, True), (Reserve(size_bytes=10 * MIB), False)]
)
def test_each_piece_is_flushed_within_its_turn(
    disk: Disk, bandwidth: Reserve | None, is_beside: bool
) -> None:
    if is_beside:
        disk.begin_neighbour(0.002)
    flushed = list[float]()

    def flush() -> None:
        flushed.append(disk.now)
        disk.now += 0.5

    work = paced(disk, bandwidth).task("erase", "/dev/data/a", check=lambda: None, flush=flush)
    begun = [disk.now for _ in in_turn.each(work.chunks(160 * MIB))]
    assert len(flushed) == len(begun) > 1
    assert all(this + 0.5 <= after for this, after in zip(flushed, begun[1:], strict=False))


def test_progress_has_the_rest_at_the_present_rate(disk: Disk) -> None:
    progress = Progress(disk.clock)
    assert str(progress) == "it has not begun"
    progress.begin(8 << 30)
    assert str(progress) == "0 of 8 GiB"
    for _ in range(32):
        disk.now += 1.0
        progress.add(100 * MIB)
    disk.now += 1.0
    assert str(progress) == "3.1 of 8 GiB, about 55 s at the present rate"
    for _ in range(12):
        disk.now += 10.0
        progress.add(100 * MIB)
    assert str(progress) == "4.3 of 8 GiB, about 6 min at the present rate"


class Turns:
    """Workers in threads of their own, each in one turn until it is told to end it."""

    def __init__(self, one: Pace) -> None:
        self._pace = one
        self._pool = ThreadPoolExecutor(4)
        self._told: dict[str, threading.Event] = {}
        self.inside: set[str] = set()
        self.ended: list[str] = []

    def begin(self, kind: str, *, may_join: bool = True) -> None:
        work = self._pace.task(kind, "/dev/data/a", check=lambda: None, may_join=may_join)
        told = self._told[kind] = threading.Event()

        def turn() -> None:
            with work.piece(MIB):
                self.inside.add(kind)
                told.wait(20)
                self.inside.discard(kind)
            self.ended.append(kind)

        self._pool.submit(turn)

    def end(self, kind: str) -> None:
        self._told[kind].set()

    def close(self) -> None:
        for one in self._told.values():
            one.set()
        self._pool.shutdown()


@pytest.fixture
def turns(disk: Disk) -> Iterator[Turns]:
    made = Turns(paced(disk))
    yield made
    made.close()


def test_a_reader_and_what_writes_it_have_their_turn_together(turns: Turns) -> None:
    turns.begin("send")
    expect.soon(lambda: turns.inside == {"send"})
    turns.begin("receive")
    expect.soon(lambda: turns.inside == {"send", "receive"})
    # The one goes and comes, and the other need not end its turn for that.
    turns.end("send")
    expect.soon(lambda: turns.ended == ["send"])
    turns.begin("send")
    expect.soon(lambda: turns.inside == {"send", "receive"})
    # Between turns nothing may be on its way: a third waits for the last of them.
    turns.begin("erase", may_join=False)
    turns.end("receive")
    expect.soon(lambda: turns.inside == {"send"})
    turns.end("send")
    expect.soon(lambda: turns.inside == {"erase"})


def test_a_turn_is_not_joined_for_ever(disk: Disk, turns: Turns) -> None:
    turns.begin("send")
    expect.soon(lambda: turns.inside == {"send"})
    disk.now += pace._LONG_SECONDS
    turns.begin("receive")
    expect.soon(lambda: len(turns._pace._queue) == 2)
    turns.end("send")
    expect.soon(lambda: turns.inside == {"receive"})


def test_those_that_waited_begin_together(turns: Turns) -> None:
    turns.begin("erase", may_join=False)
    expect.soon(lambda: turns.inside == {"erase"})
    for kind in ("send", "compare", "receive"):
        turns.begin(kind)
    expect.soon(lambda: len(turns._pace._queue) == 4)
    turns.end("erase")
    expect.soon(lambda: turns.inside == {"send", "compare", "receive"})


def test_nobody_joins_a_turn_while_another_waits(turns: Turns) -> None:
    turns.begin("send")
    expect.soon(lambda: turns.inside == {"send"})
    turns.begin("erase", may_join=False)
    expect.soon(lambda: len(turns._pace._queue) == 2)
    turns.begin("receive")
    expect.soon(lambda: len(turns._pace._queue) == 3)
    assert turns.inside == {"send"}
    turns.end("send")
    expect.soon(lambda: turns.inside == {"erase"})
    turns.end("erase")
    expect.soon(lambda: turns.inside == {"receive"})


def test_beside_others_nobody_joins(disk: Disk, turns: Turns) -> None:
    disk.begin_neighbour(0.002)
    turns.begin("send")
    expect.soon(lambda: turns.inside == {"send"})
    turns.begin("receive")
    expect.soon(lambda: len(turns._pace._queue) == 2)
    assert turns.inside == {"send"}
    turns.end("send")
    expect.soon(lambda: turns.inside == {"receive"})


def test_what_was_done_in_a_joined_turn_counts(turns: Turns) -> None:
    for kind in ("send", "receive"):
        turns.begin(kind)
        expect.soon(partial(turns.inside.__contains__, kind))
    for kind in ("send", "receive"):
        turns.end(kind)
    expect.soon(lambda: len(turns.ended) == 2)
    assert turns._pace.done_bytes == {"send": MIB, "receive": MIB}


def test_a_turn_in_which_only_who_joined_did_something_is_one_of_the_group(disk: Disk) -> None:
    one = paced(disk)
    first, second = (
        one.task(kind, "/dev/data/a", check=lambda: None, may_join=True)
        for kind in ("send", "receive")
    )
    with first.piece(MIB):
        disk.write(MIB)
    with first.piece(MIB) as nothing, second.piece(MIB):
        disk.begin_neighbour(0.001)
        disk.sleep(0.0015)
        disk.end_neighbour()
        nothing.length_bytes = 0
    assert one.done_bytes["receive"] == MIB
    with first.piece(MIB):
        pass
    # What was completed in that turn is no stranger's.
    assert one.paused_seconds == 0


def test_the_next_turn_goes_by_the_setting_that_holds_then(disk: Disk) -> None:
    setting: list[Reserve | None] = [NO_RESERVE]
    one = Pace(lambda: setting[0], OneDisk(disk), disk.clock, disk.sleep)
    pieces = work_of(one).chunks(1024 * MIB)
    lengths: list[int] = []
    for bandwidth in (NO_RESERVE, Reserve(size_bytes=10 * MIB), None):
        setting[0] = bandwidth
        for _ in range(3):
            with next(pieces) as (_, length):
                disk.write(length)
            lengths.append(length)
        assert one.is_unlimited == (bandwidth == NO_RESERVE)
    assert lengths[:3] == [MOST_BYTES] * 3
    assert lengths[3:6] == [MIB] * 3
    assert lengths[8] > MIB


def test_a_piece_ends_by_the_rule_by_which_it_began(disk: Disk) -> None:
    setting: list[Reserve | None] = [Reserve(percent=50)]
    one = Pace(lambda: setting[0], OneDisk(disk), disk.clock, disk.sleep)
    begun = one._rule
    for piece in islice(work_of(one).chunks(1024 * MIB), 3):
        with piece as (_, length):
            disk.write(length)
            setting[0] = None
    assert isinstance(begun, pace._Limited)
    assert begun._best["erase"] > 0
    assert one.paused_seconds >= 0
