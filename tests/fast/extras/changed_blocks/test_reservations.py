"""A pool's metadata snapshot: one at a time, never older than who reads by it, always let go of."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import configured
import pytest
from fakes.host import FakeHost
from fakes.lvm import FakePool

from agent.core import errors
from agent.core.classes import DeviceClass
from agent.core.host import Host
from agent.csi.client import Client, block
from agent.daemon.server import Service
from agent.extras.changed_blocks import service as changed_blocks
from agent.extras.changed_blocks.activations import Reservations
from lvm import tags
from lvm.layout import Layout
from lvm.thin import Policy
from mount import command

MIB = 1 << 20
OWN = "carver.metadataSnapshot=reserved"


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path)


@pytest.fixture
def pool(host: FakeHost, tmp_path: Path) -> Iterator[tuple[FakePool, Reservations]]:
    group = host.new_group(100)
    thin = DeviceClass("thin", group, default=True, layout=Layout("thin"), pool=Policy())
    config = configured.carver(tmp_path, classes=(thin,))
    seams = Host(host.run, host.kernel, host.devices, host.disks, stream=host.stream)
    service = Service(config, seams, host.lvm)
    service.start(config.endpoint)
    with Client(config.endpoint) as client:
        client.create("pvc-1", 16 * MIB, block())
        found = host.lvm2.groups[group].volumes["pool-thin"]
        assert isinstance(found, FakePool)
        yield found, changed_blocks.of(service).delta.reservations
    service.stop()


class Reader:
    """Who reads by a metadata snapshot until it is told to end."""

    def __init__(self, reservations: Reservations, threads: ThreadPoolExecutor) -> None:
        self.has, self.ends = threading.Event(), threading.Event()
        self.ended: Future[None] = threads.submit(self._read, reservations)

    def _read(self, reservations: Reservations) -> None:
        with reservations.held("group0", "pool-thin"):
            self.has.set()
            assert self.ends.wait(60)

    def end(self) -> None:
        self.ends.set()
        self.ended.result(60)


def test_who_comes_while_others_read_waits_and_those_who_wait_share_one(
    host: FakeHost, pool: tuple[FakePool, Reservations]
) -> None:
    found, reservations = pool
    with ThreadPoolExecutor(3) as threads:
        first = Reader(reservations, threads)
        assert first.has.wait(60)
        kept = found.held
        others = [Reader(reservations, threads) for _ in range(2)]
        # What is reserved is older than they are.
        assert not any(one.has.wait(0.1) for one in others)
        host.commands.clear()
        first.end()
        assert all(one.has.wait(60) for one in others)
        assert found.held is not None
        assert found.held is not kept
        others[0].end()
        assert found.held is not None
        others[1].end()
    assert found.held is None
    assert OWN not in found.tags
    marks = [word for words in host.commands for word in words if word in ("--addtag", "--deltag")]
    assert marks == ["--deltag", "--addtag", "--deltag"]


def test_who_has_no_time_to_wait_is_put_off(pool: tuple[FakePool, Reservations]) -> None:
    _, reservations = pool
    with ThreadPoolExecutor(1) as threads:
        first = Reader(reservations, threads)
        assert first.has.wait(60)
        with (
            command.time_limit(0.05),
            pytest.raises(errors.OperationPending),
            reservations.held("group0", "pool-thin"),
        ):
            pass
        # What is in use is not taken for left over.
        assert reservations.resume() == 0
        first.end()


def test_what_cannot_be_reserved_leaves_no_mark_and_keeps_nobody_waiting(
    host: FakeHost, pool: tuple[FakePool, Reservations], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, reservations = pool

    def fail(_self: object, _group: str, _pool: str) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(type(host.lvm2), "reserve_metadata", fail)
        for _ in range(2):
            with pytest.raises(OSError, match="Input"), reservations.held("group0", "pool-thin"):
                pass
            assert OWN not in found.tags
    with reservations.held("group0", "pool-thin"):
        assert OWN in found.tags
    assert OWN not in found.tags


def test_what_cannot_be_let_go_of_is_told_and_let_go_of_by_the_next(
    host: FakeHost,
    pool: tuple[FakePool, Reservations],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    found, reservations = pool

    def fail(_self: object, _group: str, _pool: str) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(type(host.lvm2), "release_metadata", fail)
        with reservations.held("group0", "pool-thin"):
            pass
    assert "keeps old metadata for now" in caplog.text
    kept = found.held
    assert kept is not None
    assert "metadataSnapshot" in tags.decode(frozenset(found.tags))
    with reservations.held("group0", "pool-thin"):
        assert found.held is not kept
    assert (found.held, OWN in found.tags) == (None, False)
