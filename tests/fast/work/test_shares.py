"""Places that the calls of all groups share."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Semaphore, Thread
from typing import Any, TypeVar

import expect
import grpc
import pytest
import serving
from changed_blocks import blocks
from fakes.host import FakeHost
from fakes.kernel import _FakeReader

from agent.core import errors
from agent.csi.client import Client, block, mounted
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from agent.work import locks, pace
from agent.work.locks import Slots
from proto import carver_pb2 as carver
from proto import csi_pb2 as csi
from proto.carver_pb2_grpc import TransferStub

T = TypeVar("T")

EXTENT = 4 << 20
# As many streams as a group may have at once.
STREAMS = 8


def taken(shares: Slots, group: str, kept: ExitStack) -> int:
    """How many places a group gets that takes all it can."""
    for count in range(1000):
        try:
            kept.enter_context(shares.hold(group))
        except errors.TooManyCalls:
            return count
    raise AssertionError


def test_groups_leave_places_to_others() -> None:
    shares = Slots(100)
    with ExitStack() as kept:
        assert taken(shares, "a", kept) == 75
        assert taken(shares, "b", kept) > 15
        assert taken(shares, "c", kept) > 0
    with ExitStack() as kept:
        assert taken(shares, "a", kept) == 75


def test_a_group_has_its_own_limit() -> None:
    with ExitStack() as kept:
        shares = Slots(24, 8)
        assert [taken(shares, one, kept) for one in ("a", "b")] == [8, 8]
        assert taken(shares, "c", kept) > 0


def test_a_place_without_a_group_is_one_of_all_and_counts_for_none() -> None:
    with ExitStack() as kept:
        shares = Slots(4)
        for _ in range(3):
            kept.enter_context(shares.hold())
        assert not shares.taken
        # The last one is had by a group.
        assert taken(shares, "a", kept) == 1
        with pytest.raises(errors.TooManyCalls, match="4 calls are at work on volume groups"):
            kept.enter_context(shares.hold())
    assert (shares.free_slots, shares.taken) == (4, {})


def test_a_refused_place_is_given_back() -> None:
    shares = Slots(8, 1)
    with ExitStack() as kept:
        assert taken(shares, "a", kept) == 1
        assert shares.free_slots == 7


pytestmark = [
    pytest.mark.groups(sick=[200], sound=[200]),
    pytest.mark.settings(classes=(DeviceClass("sick", "sick"), DeviceClass("sound", "sound"))),
]


@pytest.fixture(autouse=True)
def few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service has so few threads that a test can have all of them wait."""
    monkeypatch.setattr(locks, "_OTHERS", 12)
    monkeypatch.setattr(locks, "THREADS", 16)


def test_streams_of_a_group_that_hangs_leave_places_to_others(
    fake: FakeHost, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = {}
    for group in ("sick", "sound"):
        volume = client.create(group, EXTENT, block(), parameters={"class": group})
        snapshots[group] = client.snapshot(f"snap-{group}", volume.volume_id).snapshot_id
    at_work, over, real = Semaphore(0), Event(), _FakeReader.read

    def read(reader: _FakeReader, offset_bytes: int, length_bytes: int) -> bytes:
        if "/sick-" in reader.device:
            at_work.release()
            assert over.wait(60)
        return real(reader, offset_bytes, length_bytes)

    monkeypatch.setattr(_FakeReader, "read", read)
    # They wait so long for the turn of each that hangs (pace.py).
    monkeypatch.setattr(pace, "_HANGING_SECONDS", 0.1)
    streams = [
        Thread(target=lambda: list(blocks(client, snapshots["sick"]))) for _ in range(STREAMS)
    ]
    for one in streams:
        one.start()
    try:
        for _ in streams:
            assert at_work.acquire(timeout=60)
        list(blocks(client, snapshots["sound"]))
        with expect.code("UNAVAILABLE", "calls are at work"):
            list(blocks(client, snapshots["sick"]))
    finally:
        over.set()
        for one in streams:
            one.join(60)


def test_a_node_that_is_drained_of_volumes_on_a_dead_disk_serves_the_others(
    fake: FakeHost, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = client.create("sound", EXTENT, mounted(), parameters={"class": "sound"})
    client.stage(sound, tmp_path / "sound")
    sick = [
        client.create(f"sick-{one}", EXTENT, mounted(), parameters={"class": "sick"})
        for one in range(20)
    ]
    for one in sick:
        client.stage(one, tmp_path / one.volume_id[-8:])
    at_work, over, real = Semaphore(0), Event(), fake.kernel.unmount

    def unmount(path: str) -> None:
        if "sick" in path:
            at_work.release()
            assert over.wait(60)
        real(path)

    monkeypatch.setattr(fake.kernel, "unmount", unmount)
    refused = Semaphore(0)

    def drain(volume: csi.Volume) -> None:
        try:
            client.unstage(volume.volume_id, tmp_path / volume.volume_id[-8:])
        except grpc.RpcError:
            refused.release()

    with ThreadPoolExecutor(len(sick)) as kubelet:
        try:
            every = [kubelet.submit(drain, one) for one in sick]
            assert refused.acquire(timeout=60)
            for _ in range(8):
                assert at_work.acquire(timeout=60)
            assert client.stats(sound.volume_id, tmp_path / "sound").usage
            client.unstage(sound.volume_id, tmp_path / "sound")
        finally:
            over.set()
    for ended in every:
        ended.result()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls, two streams and two exchanges at most, and one thread more."""
    for name, number in {
        "_CALLS": 2,
        "STREAMS": 2,
        "STREAMS_OF_A_GROUP": 2,
        "EXCHANGES": 2,
    }.items():
        monkeypatch.setattr(locks, name, number)


def test_a_probe_is_answered_while_each_other_thread_waits(
    few: None, config: Config, fake: FakeHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(locks, "THREADS", 7)  # and not those of `config`
    service = serving.start(config, fake)
    with Client(config.endpoint) as client:
        volumes = [
            client.create(f"db-{one}", EXTENT, mounted(), parameters={"class": "sick"})
            for one in range(2)
        ]
        for one in volumes:
            client.stage(one, tmp_path / one.volume_id[-8:])
        volume = client.create("raw", EXTENT, block(), parameters={"class": "sick"})
        snapshot = client.snapshot("snap", volume.volume_id).snapshot_id
        at_work, over, says = Semaphore(0), Event(), Event()

        def hanging(work: Callable[..., T]) -> Callable[..., T]:
            def hang(*words: object) -> T:
                at_work.release()
                assert over.wait(60)
                return work(*words)

            return hang

        def silent() -> Iterator[carver.TurnRequest]:
            assert says.wait(60)
            yield from ()

        monkeypatch.setattr(fake.kernel, "unmount", hanging(fake.kernel.unmount))
        monkeypatch.setattr(_FakeReader, "read", hanging(_FakeReader.read))
        turns = client.stub(TransferStub).TakeTurns
        with ThreadPoolExecutor() as callers:
            waiting: list[Future[Any]] = [
                callers.submit(client.unstage, one.volume_id, tmp_path / one.volume_id[-8:])
                for one in volumes
            ]
            waiting += [callers.submit(lambda: list(blocks(client, snapshot))) for _ in range(2)]
            waiting += [callers.submit(lambda: list(turns(silent()))) for _ in range(2)]
            try:
                for _ in range(4):
                    assert at_work.acquire(timeout=60)
                expect.soon(lambda: service.context.admission.exchanges.free_slots == 0)
                for _ in range(20):
                    assert client.info().name
                    for ask in (
                        lambda: client.volume(volume.volume_id),
                        lambda: list(blocks(client, snapshot)),
                        lambda: list(turns(silent())),
                    ):
                        with expect.code("UNAVAILABLE", "calls are at work"):
                            ask()
            finally:
                over.set()
                says.set()
        for ended in waiting:
            ended.result()
    service.stop()
