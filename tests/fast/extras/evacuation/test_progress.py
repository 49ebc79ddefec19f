"""How far evacuations are, and how long they take."""

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from evacuated import SOURCE, Cluster, handle, node
from hypothesis import given
from hypothesis import strategies as st

from agent.extras.evacuation.plan import Plan, plan
from agent.extras.evacuation.progress import Estimate, Progress, Stage, VolumeProgress

GIB, MIB = 1 << 30, 1 << 20
CAUGHT_UP = 30.0


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Sample:
    """What an estimate says at one time, and in which round and pass."""

    round_number: int
    pass_number: int
    elapsed: float
    seconds_left: float | None
    now: float


@dataclass(frozen=True)
class Transfer:
    """A move in rounds, whose writer changes so many bytes each second.

    The rate of the line differs by `noise` from second to second. A second pass over the data goes
    at `verify` times that rate; 0 without one.
    """

    size_bytes: int
    rate: float
    change_rate: float
    noise: float
    verify: float = 0.0
    is_measured: bool = False
    seed: int = 0
    # Whether the second pass reports nothing.
    is_silent: bool = False

    def run(self) -> Iterator[Sample]:
        """Send round after round, and report every few seconds; return at the end of the last."""
        source = random.Random(self.seed)
        estimate = Estimate(CAUGHT_UP)
        now, begun, number, is_last = 0.0, 0.0, 0, False
        while True:
            number += 1
            interval, begun = now - begun, now
            changed = self.change_rate * interval if number > 1 else self.size_bytes
            estimate.begin(self.size_bytes, now, passes=2 if self.verify else 1)
            for pass_number, speed in enumerate([1.0, self.verify][: 2 if self.verify else 1], 1):
                done = 0.0
                while done < changed:
                    rate = self.rate * speed * source.uniform(1 - self.noise, 1 + self.noise)
                    seconds = min(source.uniform(0.5, 3.0), (changed - done) / rate)
                    now, done = now + seconds, done + rate * seconds
                    # A later round goes through the whole volume, and sends what has changed.
                    if pass_number == 1 or not self.is_silent:
                        estimate.sent(int(self.size_bytes * min(1.0, done / changed)), now)
                    if self.is_measured:
                        estimate.changed(int(self.change_rate * (now - begun)), now)
                    left = estimate.seconds_left(now)
                    yield Sample(number, pass_number, now - begun, left, now)
            estimate.end(now)
            yield Sample(number, 0, now - begun, estimate.seconds_left(now), now)
            if is_last:
                return
            is_last = now - begun <= CAUGHT_UP


def require_right(samples: list[Sample], first_round: int) -> None:
    """Assert that the time left was right within a quarter, or a short round, at each time.

    Half a minute of a round must have gone by.
    """
    end = samples[-1].now
    for one in samples:
        if one.round_number < first_round or one.elapsed < 30.0:
            continue
        true_left = end - one.now
        assert one.seconds_left is not None
        assert abs(one.seconds_left - true_left) <= max(CAUGHT_UP, true_left / 4), one


rates = st.floats(20 * MIB, 2000 * MIB)


@given(rates, st.floats(0.0, 0.7), st.floats(0.0, 0.2), st.integers(0, 100))
def test_the_time_left_is_right_within_a_quarter_if_changes_are_measured(
    rate: float, writes: float, noise: float, seed: int
) -> None:
    transfer = Transfer(100 * GIB, rate, writes * rate, noise, is_measured=True, seed=seed)
    require_right(list(transfer.run()), 1)


@given(rates, st.floats(0.0, 0.5), st.floats(0.0, 0.1), st.integers(0, 100))
def test_the_time_left_is_right_from_the_second_round_on(
    rate: float, writes: float, noise: float, seed: int
) -> None:
    transfer = Transfer(100 * GIB, rate, writes * rate, noise, seed=seed)
    require_right(list(transfer.run()), 2)


@given(rates, st.floats(0.0, 0.2), st.floats(0.0, 0.2), st.integers(0, 100))
def test_in_the_first_round_the_whole_time_is_right_for_a_writer_of_a_fifth_of_the_rate(
    rate: float, writes: float, noise: float, seed: int
) -> None:
    transfer = Transfer(100 * GIB, rate, writes * rate, noise, seed=seed)
    samples = list(transfer.run())
    end = samples[-1].now
    for one in samples:
        if one.round_number == 1 and one.elapsed > 20.0 and one.seconds_left is not None:
            assert one.now + one.seconds_left == pytest.approx(end, rel=0.25)


@given(rates, st.floats(0.0, 0.2), st.floats(0.4, 1.2), st.integers(0, 100))
def test_verification_counts_as_a_second_pass(
    rate: float, writes: float, verify: float, seed: int
) -> None:
    transfer = Transfer(100 * GIB, rate, writes * rate, 0.1, verify, seed=seed)
    require_right(list(transfer.run()), 2)


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_verification_that_is_as_fast_counts_from_the_start(is_silent: bool) -> None:
    transfer = Transfer(100 * GIB, 400 * MIB, 0, 0.1, 1.0, is_silent=is_silent)
    require_right(list(transfer.run()), 1)


@pytest.mark.parametrize("verify", [0.5, 1.0, 3.0])
def test_a_verification_that_reports_nothing_is_known_after_the_first_round(verify: float) -> None:
    transfer = Transfer(100 * GIB, 400 * MIB, 40 * MIB, 0.1, verify, is_silent=True)
    require_right(list(transfer.run()), 2)


@dataclass(frozen=True)
class Line:
    """A move of 100 GiB as the product shows it, by Progress, over a line whose rate changes.

    `rates` has the rates of the line and of reading again, from times on. A writer changes
    `change_rate` bytes each second, in all of the volume or in the first tenth (`is_clustered`).
    """

    rates: tuple[tuple[float, float], ...]
    change_rate: float
    is_clustered: bool = False
    size_bytes: int = 100 * GIB

    def run(self, progress: Progress, clock: Clock, shown: str) -> list[Sample]:
        """Send round after round; return what was shown for the volume each second."""
        samples: list[Sample] = []
        start = begun = clock.now
        number, is_last = 0, False

        def advance(pass_number: int, changed: float, data: float) -> None:
            done, share = 0.0, 0.1 if self.is_clustered and number > 1 else 1.0
            while done < changed:
                rate = [rate for at, rate in self.rates if at <= clock.now - start][-1]
                seconds = min(1.0, (changed - done) / rate)
                clock.now, done = clock.now + seconds, done + rate * seconds
                reached = self.size_bytes * (done / changed * share if done < changed else 1.0)
                progress.sent(SOURCE, shown, int(reached), int(data or done))
                left = volumes(progress)["one"].seconds_left
                elapsed, now = clock.now - begun, clock.now - start
                samples.append(Sample(number, pass_number, elapsed, left, now))

        while True:
            number += 1
            changed = self.change_rate * (clock.now - begun) if number > 1 else self.size_bytes
            begun = clock.now
            progress.begin_round(SOURCE, shown, self.size_bytes)
            advance(1, changed, 0)
            advance(2, changed, changed)
            progress.end_round(SOURCE, shown)
            if is_last:
                return samples
            is_last = clock.now - begun <= CAUGHT_UP


@pytest.mark.parametrize("is_clustered", [False, True])
@pytest.mark.parametrize("factor", [0.5, 0.7, 1.5, 2.5])
@pytest.mark.parametrize("at", [100.0, 900.0, 1900.0, 2300.0, 3600.0, 1e9])
@pytest.mark.parametrize("share", [0.02, 0.1])
def test_a_rate_that_changes_is_followed_within_two_rounds(
    progress: Progress,
    cluster: Cluster,
    clock: Clock,
    factor: float,
    at: float,
    share: float,
    *,
    is_clustered: bool,
) -> None:
    begin(progress, cluster)
    rate = 60.0 * MIB
    line = Line(((0.0, rate), (at, factor * rate)), share * rate, is_clustered)
    samples = line.run(progress, clock, handle("one"))
    # Where only a part of the volume is written, how much that is must be known from a round.
    first = 3 if is_clustered else 2
    round_of_change = next((one.round_number for one in samples if one.now >= at), 0)
    if round_of_change:
        is_whole = any(
            (one.round_number, one.pass_number) == (round_of_change, 2) and one.now < at
            for one in samples
        )
        first = max(first, round_of_change + (2 if is_whole else 1))
    require_right(samples, first)


def test_while_the_first_round_is_sent_its_end_is_shown(
    progress: Progress, cluster: Cluster, clock: Clock
) -> None:
    begin(progress, cluster)
    line = Line(((0.0, 100.0 * MIB),), 20.0 * MIB)
    samples = line.run(progress, clock, handle("one"))
    end = next(one.now for one in samples if one.round_number == 2) - 1.0
    for one in samples:
        if one.round_number == 1 and one.elapsed >= 30.0:
            assert one.seconds_left == pytest.approx(end - one.now, rel=0.25, abs=30.0)


def test_without_a_rate_and_with_a_writer_that_is_as_fast_nothing_is_said() -> None:
    estimate = Estimate()
    assert estimate.seconds_left(0) is None
    estimate.begin(GIB, 0)
    assert estimate.seconds_left(1) is None
    estimate.sent(GIB // 2, 100)
    assert estimate.seconds_left(100) == 100
    estimate.changed(GIB // 2, 100)
    assert estimate.seconds_left(100) is None


def test_an_attempt_that_goes_on_has_the_rate_of_what_it_sends() -> None:
    estimate = Estimate()
    estimate.begin(100 * GIB, 0, 90 * GIB)
    estimate.sent(91 * GIB, 10)
    assert estimate.seconds_left(10) == pytest.approx(90)
    assert estimate.rate == pytest.approx(GIB / 10)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def progress(clock: Clock) -> Progress:
    return Progress(clock)


@pytest.fixture
def cluster() -> Cluster:
    made = Cluster([node(SOURCE), node("a")])
    for name in ("one", "two", "three"):
        made.volume(name)
    made.pod("p", "three")
    made.volume("huge", 1000)
    return made


def begin(progress: Progress, cluster: Cluster) -> Plan:
    made = plan(cluster.view)
    progress.begin(SOURCE, "evacuate", made)
    return made


def volumes(progress: Progress) -> dict[str, VolumeProgress]:
    (found,) = progress.snapshot()
    every = [one for unit in found.units for one in unit.volumes]
    return {one.volume_id.rpartition("/vol-")[2]: one for one in every}


def test_a_plan_shows_what_waits_and_what_stays(progress: Progress, cluster: Cluster) -> None:
    begin(progress, cluster)
    (found,) = progress.snapshot()
    assert (found.node, found.kind, found.is_complete, found.seconds_left) == (
        *(SOURCE, "evacuate", False),
        None,
    )
    stages = {unit.name.rpartition("-")[2]: unit.stage for unit in found.units}
    assert stages == {
        **dict.fromkeys(("one", "two", "three"), Stage.WAITING),
        "huge": Stage.STAYS,
    }
    assert "no node can take it" in found.units[-1].problem
    assert [unit.pods for unit in found.units if "three" in unit.name] == [("shop/p",)]
    assert volumes(progress)["one"].claim == "shop/one"


def test_a_node_s_time_left_counts_what_waits_on_two_workers(
    progress: Progress, cluster: Cluster, clock: Clock
) -> None:
    begin(progress, cluster)
    progress.unit(SOURCE, handle("one"), Stage.COPYING)
    progress.begin_round(SOURCE, handle("one"), 10 * GIB)
    clock.now += 10
    progress.sent(SOURCE, handle("one"), GIB)
    one = volumes(progress)["one"]
    assert (one.stage, one.done_bytes, one.total_bytes, one.rounds) == (
        *(Stage.COPYING, GIB, 10 * GIB),
        1,
    )
    # What is sent is read again: 100 s for each.
    assert one.seconds_left == pytest.approx(190)
    assert volumes(progress)["two"].seconds_left == pytest.approx(200)
    (found,) = progress.snapshot()
    # 190 s and 200 s at once, and then 200 s.
    assert found.seconds_left == pytest.approx(390)
    for name in ("one", "two", "three"):
        progress.unit(SOURCE, handle(name), Stage.MOVED)
    (found,) = progress.snapshot()
    assert found.seconds_left == 0
    assert volumes(progress)["two"].seconds_left == 0


def test_a_new_plan_keeps_stages_rates_and_what_has_moved(
    progress: Progress, cluster: Cluster, clock: Clock
) -> None:
    begin(progress, cluster)
    progress.begin_round(SOURCE, handle("one"), 10 * GIB)
    clock.now += 10
    progress.sent(SOURCE, handle("one"), GIB)
    progress.end_round(SOURCE, handle("one"))
    progress.unit(SOURCE, handle("one"), Stage.EVICTING, "refused by a PodDisruptionBudget")
    progress.unit(SOURCE, handle("two"), Stage.MOVED)
    cluster.volumes = [one for one in cluster.volumes if one.volume_id != handle("two")]
    cluster.nodes[1] = node("a", 2000)
    begin(progress, cluster)
    found = volumes(progress)
    assert (found["one"].stage, found["one"].rounds) == (Stage.EVICTING, 1)
    assert found["two"].stage is Stage.MOVED
    assert found["huge"].stage is Stage.WAITING
    (node_progress,) = progress.snapshot()
    (unit,) = [one for one in node_progress.units if one.name == handle("one")]
    assert unit.problem == "refused by a PodDisruptionBudget"


def test_problems_are_kept_until_they_are_over(progress: Progress, cluster: Cluster) -> None:
    begin(progress, cluster)
    progress.volume(SOURCE, handle("one"), Stage.FOLLOWING, "writes outrun the transfer")
    assert volumes(progress)["one"].problem == "writes outrun the transfer"
    progress.volume(SOURCE, handle("one"))
    assert volumes(progress)["one"].problem == ""
    assert volumes(progress)["one"].stage is Stage.FOLLOWING
    progress.problem(SOURCE, "the node does not answer")
    assert progress.snapshot()[0].problem == "the node does not answer"
    progress.end(SOURCE)
    assert progress.snapshot()[0].is_complete
    progress.begin(SOURCE, "undo")
    assert not progress.snapshot()[0].is_complete
    progress.end(SOURCE, forget=True)
    assert progress.snapshot() == ()


def test_what_is_not_known_is_passed_over(progress: Progress, cluster: Cluster) -> None:
    progress.unit("x", "y", Stage.MOVED)
    progress.volume("x", "y", Stage.MOVED)
    progress.begin_round("x", "y", 1)
    progress.sent("x", "y", 1)
    progress.changed("x", "y", 1)
    progress.end_round("x", "y")
    progress.problem("x", "y")
    progress.end("x")
    assert progress.snapshot() == ()


def test_threads_may_write_while_others_read(progress: Progress, cluster: Cluster) -> None:
    begin(progress, cluster)
    failures = list[BaseException]()

    def write(name: str) -> None:
        try:
            for number in range(300):
                progress.begin_round(SOURCE, handle(name), 1000)
                progress.sent(SOURCE, handle(name), number)
                progress.snapshot()
                begin(progress, cluster)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
