"""What readings of thin snapshots reserve and activate, and when that ends."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import configured
import nodes
import pytest
import serving
from fakes.host import FakeHost
from fakes.lvm import FakePool
from histories import Disk
from nodes import Node

from agent.core import errors, ids
from agent.csi.client import Client, block
from agent.daemon.server import Service
from agent.extras.changed_blocks import changed_blocks_service as changed_blocks
from agent.extras.changed_blocks.activations import Reservations
from agent.settings.classes import DeviceClass
from lvm import tags, volumes
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
    seams = serving.machine(host)
    service = Service(config, seams, host.lvm)
    service.start(config.endpoint)
    with Client(config.endpoint) as client:
        client.create("pvc-1", 16 * MIB, block())
        found = host.lvm2.groups[group].volumes["pool-thin"]
        assert isinstance(found, FakePool)
        yield found, changed_blocks.of(service).delta.reservations
    service.stop()


def fail(_self: object, _group: str, _pool: str) -> None:
    raise OSError(5, "Input/output error")


class Reader:
    """A reader of a metadata snapshot, until its `end`."""

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


def test_waiting_readers_share_a_new_metadata_snapshot(
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


def test_a_reader_gives_up_at_its_deadline(pool: tuple[FakePool, Reservations]) -> None:
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


def test_a_failed_reservation_leaves_no_tag(
    host: FakeHost, pool: tuple[FakePool, Reservations], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, reservations = pool
    with monkeypatch.context() as broken:
        broken.setattr(type(host.lvm2), "reserve_metadata", fail)
        for _ in range(2):
            with pytest.raises(OSError, match="Input"), reservations.held("group0", "pool-thin"):
                pass
            assert OWN not in found.tags
    with reservations.held("group0", "pool-thin"):
        assert OWN in found.tags
    assert OWN not in found.tags


def test_a_failed_release_is_logged_and_repeated_by_the_next_reader(
    host: FakeHost,
    pool: tuple[FakePool, Reservations],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    found, reservations = pool
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


def disk_of(node: Node, snapshots: int) -> Disk:
    made = Disk(node.client, node.service, node.host, "thin")
    for _ in range(snapshots):
        made.snapshot()
    return made


@pytest.mark.parametrize("others", [1, 18])
def test_the_commands_of_a_reading_do_not_grow_with_the_snapshots(
    host: FakeHost, tmp_path: Path, others: int
) -> None:
    with nodes.made(host, configured.carver(tmp_path), tmp_path, "here") as node:
        disk = disk_of(node, 2 + others)
        base, target, *_ = disk.snapshots
        node.service.reports.fresh()
        host.commands.clear()
        with changed_blocks.of(disk.service).delta.changed(base, target) as reading:
            assert list(reading.extents()) == []
        said = [words[2:4] if words[0] == "env" else words[:2] for words in host.commands]
        # Two tags and two activations; a look, the pool's tag, thin_delta, its tag again; a look;
        # one command deactivates both, and one takes both tags away.
        assert len(said) == 11, said


def test_three_commands_deactivate_all_that_was_left(host: FakeHost, tmp_path: Path) -> None:
    with nodes.made(host, configured.carver(tmp_path), tmp_path, "here") as node:
        disk = disk_of(node, 20)
        for one in disk.snapshots:
            name = ids.logical_name(one)
            volumes.mark(host.lvm, disk.group, name, old_tags={}, new_tags={"activated": "reading"})
            disk.logical(one)
        host.commands.clear()
        assert changed_blocks.of(node.service).delta.activations.resume() == 20
        assert len(host.commands) == 3
        assert changed_blocks.of(node.service).delta.activations.resume() == 0
        assert [one for one in host.devices.active(disk.group) if one.startswith("snap-")] == []
