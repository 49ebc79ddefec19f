"""A Lease: of several processes one holds it, and another takes it over."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

import expect
import pytest
from api_server import ApiServer, Object

from agent.core import errors
from agent.extras.kubernetes.access import Server
from agent.extras.kubernetes.lease import DURATION_SECONDS, KEEP_SECONDS, Lease, LeaseTask
from agent.extras.kubernetes.objects import Objects

LEASES = "/apis/coordination.k8s.io/v1/namespaces/carver-system/leases"
NAME, KEY = "carver-work", "carver/progress"


class Leases(ApiServer):
    """An API server with one Lease; `before` is called before a write: another is faster."""

    def __init__(self) -> None:
        super().__init__()
        self.lease: Object | None = None
        self.is_down = False
        self.before: Callable[[], None] = lambda: None

    @property
    def holder(self) -> str:
        return str(self.lease["spec"]["holderIdentity"]) if self.lease else ""

    @property
    def published(self) -> str:
        assert self.lease is not None
        return str(self.lease["metadata"]["annotations"][KEY])

    def answer(self, path: str, query: Mapping[str, list[str]]) -> tuple[int, Object]:
        assert path == f"{LEASES}/{NAME}"
        if self.is_down:
            return 503, {"kind": "Status"}
        if self.lease is None:
            return 404, {"kind": "Status", "reason": "NotFound"}
        return 200, self.lease

    def write(self, method: str, path: str, body: Object) -> tuple[int, Object]:
        before, self.before = self.before, lambda: None
        before()
        if self.is_down:
            return 503, {"kind": "Status"}
        self.version += 1
        if method == "POST":
            assert path == LEASES
            if self.lease is not None:
                return 409, {"kind": "Status", "reason": "AlreadyExists"}
        else:
            assert (method, path) == ("PUT", f"{LEASES}/{NAME}")
            if self.lease is None:
                return 404, {"kind": "Status", "reason": "NotFound"}
            if body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
                return 409, {"kind": "Status", "reason": "Conflict"}
        # The times are in the form of the API, with microseconds.
        for key in ("renewTime", "acquireTime"):
            datetime.strptime(body["spec"][key], "%Y-%m-%dT%H:%M:%S.%f%z")
        self.lease = {**body, "kind": "Lease"}
        self.lease["metadata"] = {**body["metadata"], "resourceVersion": str(self.version)}
        return 200, self.lease


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Leases]:
    monkeypatch.setattr("agent.extras.kubernetes.objects._OBJECT_PAUSE_SECONDS", 0.0)
    made = Leases()
    made.start()
    yield made
    made.stop()


class Process:
    """A process that may hold the Lease, with clocks of its own."""

    def __init__(self, api: Leases, name: str, begin_seconds: float = 0.0) -> None:
        self.now, self.wall, self.says = begin_seconds, 1e9, f"from {name}"
        self.lease = Lease(
            *(Objects(Server("tests", "127.0.0.1", api.port)), "carver-system", NAME, name),
            key=KEY,
            text=lambda: self.says,
            clock=lambda: self.wall,
            monotonic=lambda: self.now,
        )

    def keep(self) -> bool:
        """Keep the Lease, also where the API server is down; whether it is held then."""
        with suppress(errors.ClusterRefused):
            self.lease.keep()
        return self.lease.is_held


def test_one_holds_it_and_the_other_stands_by_and_reads_what_it_publishes(api: Leases) -> None:
    first, second = Process(api, "pod-1"), Process(api, "pod-2")
    assert (first.keep(), second.keep()) == (True, False)
    assert api.holder.startswith("pod-1_")
    first.says = "half done"
    assert (first.keep(), second.keep()) == (True, False)
    assert (first.lease.other_text, second.lease.other_text) == ("", "half done")


def test_two_processes_of_the_same_name_are_two(api: Leases) -> None:
    """A container that was started again has the name of its pod."""
    first, second = Process(api, "pod-1"), Process(api, "pod-1")
    assert (first.keep(), second.keep()) == (True, False)


def test_a_holder_that_renews_keeps_it_for_ever(api: Leases) -> None:
    first, second = Process(api, "pod-1"), Process(api, "pod-2")
    for _ in range(20):
        assert first.keep()
        second.now += DURATION_SECONDS - 1
        assert not second.keep()


@pytest.mark.parametrize("step_seconds", [-1e8, 0.0, 1e8])
def test_another_takes_it_over_by_its_own_clock_whatever_the_time(
    api: Leases, step_seconds: float
) -> None:
    first, second = Process(api, "pod-1"), Process(api, "pod-2", begin_seconds=1000.0)
    first.wall += step_seconds
    assert first.keep()
    assert not second.keep()
    second.now += DURATION_SECONDS - 0.1
    assert not second.keep()
    second.now += 0.1
    assert second.keep()
    assert not first.keep()
    assert api.lease is not None
    assert api.lease["spec"]["leaseTransitions"] == 1


def test_a_holder_goes_on_while_the_api_server_does_not_answer(api: Leases) -> None:
    first, second = Process(api, "pod-1"), Process(api, "pod-2")
    assert (first.keep(), second.keep()) == (True, False)
    api.is_down = True
    for one in (first, second):
        one.now += 10 * DURATION_SECONDS
    assert (first.keep(), second.keep()) == (True, False)


def test_who_is_slower_does_not_hold_it(api: Leases) -> None:
    """Both make it, or both take it over, at once."""
    first, second = Process(api, "pod-1"), Process(api, "pod-2")
    api.before = lambda: assert_true(second.keep())
    assert not first.keep()
    third = Process(api, "pod-3")
    assert (first.keep(), third.keep()) == (False, False)
    for one in (first, third):
        one.now += DURATION_SECONDS
    api.before = lambda: assert_true(third.keep())
    assert not first.keep()
    assert api.holder.startswith("pod-3_")


def assert_true(value: bool) -> None:
    assert value


def test_a_released_lease_is_taken_at_once_and_one_of_another_is_not_released(api: Leases) -> None:
    first, second = Process(api, "pod-1"), Process(api, "pod-2")
    assert first.keep()
    second.lease.release()
    assert api.holder.startswith("pod-1_")
    first.lease.release()
    assert not first.lease.is_held
    assert second.keep()
    # It does not know yet that another has it.
    first.lease.is_held = True
    first.lease.release()
    assert api.holder.startswith("pod-2_")


def test_what_else_is_in_the_object_stays(api: Leases) -> None:
    first = Process(api, "pod-1")
    first.keep()
    assert api.lease is not None
    metadata: dict[str, Any] = api.lease["metadata"]
    metadata["labels"] = {"a": "b"}
    metadata["annotations"]["theirs"] = "c"
    first.keep()
    assert api.lease["metadata"]["labels"] == {"a": "b"}
    assert api.lease["metadata"]["annotations"]["theirs"] == "c"


def test_the_task_keeps_and_releases_it(api: Leases) -> None:
    task = LeaseTask((first := Process(api, "pod-1")).lease)
    task.start()
    expect.soon(lambda: first.lease.is_held)
    task.stop()
    expect.soon(lambda: api.holder == "")


@pytest.mark.parametrize("seed", range(8))
def test_random_histories_have_one_holder_and_never_none_for_long(api: Leases, seed: int) -> None:
    """Processes die and are started, sleep, and lose the API server; the clocks step."""
    chance, number, vacant_seconds = random.Random(seed), 0, 0.0
    processes: list[Process] = []
    for _ in range(150):
        what = chance.random()
        if what < 0.1 and len(processes) < 3:
            processes.append(Process(api, f"pod-{(number := number + 1)}", chance.random() * 1000))
        elif what < 0.15 and processes:
            dead = processes.pop(chance.randrange(len(processes)))
            if chance.random() < 0.3 and not api.is_down:
                dead.lease.release()
        elif what < 0.2:
            api.is_down = not api.is_down
        for one in processes:
            one.now += KEEP_SECONDS
            one.wall += chance.choice((KEEP_SECONDS, KEEP_SECONDS, -1e6, 1e6))
            is_asleep = chance.random() < 0.3
            if is_asleep or not one.keep() or api.is_down:
                continue
            assert api.holder.startswith(one.lease._holder)
            assert api.published == one.says
        if not api.is_down:
            # All have seen the last write by now, unless they sleep.
            awake = [one for one in processes if one.keep()]
            assert len(awake) <= 1
            vacant_seconds = 0.0 if awake else vacant_seconds + KEEP_SECONDS
            assert not processes or vacant_seconds <= 2 * DURATION_SECONDS
        if api.is_down or not processes:
            vacant_seconds = 0.0
