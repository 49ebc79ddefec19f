"""Calls that meet background work do as the table says (agent/volumes/conflicts.py): each cell.

Those of mkfs are in tests/fast/work/test_detached_tasks.py: it can be made to last there alone.
"""

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import configured
import expect
import grpc
import in_background
import pytest
import serving
from csi_client import Client
from real.any import AnyHost, device, names

from agent.csi.client import block, of_snapshot, of_volume
from agent.daemon.server import Service
from agent.settings.settings import Config
from agent.volumes.volume_states import Call, EndedBy, Outcome, Work, outcome
from agent.work.group_worker import Jobs
from lvm import report
from lvm.layout import Reserve
from lvm.thin import Policy
from proto import carver_pb2 as carver
from proto import csi_pb2 as csi

MIB = 1 << 20
EXTENT = 4 * MIB
SIZE, WANTED, OTHER = 4 * EXTENT, 8 * EXTENT, 6 * EXTENT

EXPANSIONS = (Call.EXPAND, Call.EXPAND_OTHER)
CODES = {
    Outcome.BESIDE: "OK",
    Outcome.JOINS: "OK",
    Outcome.WAITS: "ABORTED",
    Outcome.ABORTED: "ABORTED",
    Outcome.ABSENT: "NOT_FOUND",
    Outcome.REFUSED: "FAILED_PRECONDITION",
}
POOL = Policy(size=Reserve(size_bytes=4 * EXTENT))
pytestmark = [
    # Carver's record decides here; lvm2 is asked for nothing that other tests do not ask it for.
    pytest.mark.variation,
    pytest.mark.settings(
        controller_expand=True,
        classes=(
            configured.PLAIN,
            configured.FULL,
            replace(configured.THIN, pool=POOL),
            replace(configured.THIN, name="gone", pool=POOL),
        ),
    ),
]


class Node:
    """A node with a volume `v`, and a pool that is to grow, whose work waits at a safe point."""

    def __init__(self, host: AnyHost, group: str, config: Config, ending: ExitStack) -> None:
        self.host, self.group, self.config, self._ending = host, group, config, ending
        self.go = threading.Event()
        # The end of the name of the device that is waited at.
        self.at, self.began = "", threading.Event()
        self.queue: Jobs[Any] | None = None
        uuid = report.read(host.lvm).group(group).uuid.replace("-", "")[:8]
        self.volume_id = f"{group}@{uuid}/vol-v"
        self.name = "v"
        self.parameters = {"class": "plain"}
        self.source: csi.VolumeContentSource | None = None
        self.service = self._serve()
        self.client = ending.enter_context(Client(config.endpoint))
        # For calls that wait until their deadline, for work that waits here.
        self.hasty = ending.enter_context(Client(config.endpoint, timeout_seconds=5))
        self.client.create("full", 20 * EXTENT, block(), parameters={"class": "thin"})
        for at in range(0, 15 * MIB, MIB):
            host.write_bytes(device(host, group, "vol-full"), at, b"contents" * (MIB // 8))

    def _serve(self) -> Service:
        running = Service(self.config, serving.machine(self.host), self.host.lvm)
        running.eraser.grace_seconds = running.growth_zeroer.grace_seconds = 0.2
        running.start(self.config.endpoint)
        self._ending.callback(running.stop)
        self._ending.callback(self.go.set)
        return running

    def restart(self) -> None:
        self.service.stop()
        self.service = self._serve()

    def block(self, at: str, queue: Jobs[Any]) -> None:
        self.at, self.queue = at, queue

    def pause(self, path: str) -> None:
        """Wait where the work is to, until it is called off or the test is over."""
        if self.queue is None or not path.replace("--", "-").endswith(self.at):
            return
        jobs = self.queue.unfinished()
        self.began.set()
        expect.soon(lambda: self.go.is_set() or any(one.cancelled.is_set() for one in jobs))

    def create(self, client: Client | None = None) -> object:
        client = client or self.client
        return client.create(
            self.name, SIZE, block(), parameters=self.parameters, source=self.source
        )


@pytest.fixture
def node(
    host: AnyHost, group: str, config: Config, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Node]:
    with ExitStack() as ending:
        made = Node(host, group, config, ending)
        zero_out, copy = host.kernel.zero_out, host.kernel.copy

        def zeroing(path: str, *where: Any, **more: Any) -> None:
            made.pause(path)
            zero_out(path, *where, **more)

        def copying(reading: str, writing: str, *where: Any, **more: Any) -> None:
            made.pause(writing)
            copy(reading, writing, *where, **more)

        monkeypatch.setattr(host.kernel, "zero_out", zeroing)
        monkeypatch.setattr(host.kernel, "copy", copying)
        yield made


def code_of(call: Callable[[], object]) -> str:
    """How the call ends, repeated as callers do while it is cut off.

    Where what comes before a wait takes the whole of a short deadline, no answer is ever sent.
    """
    while True:
        try:
            answer = call()
        except grpc.RpcError as error:
            code = error.code()
            if code is not grpc.StatusCode.DEADLINE_EXCEEDED:
                return str(code.name)
        else:
            assert answer is not False, "the pool did not grow"
            return "OK"


def erase(node: Node, _call: Call) -> None:
    node.create()
    node.block("vol-v", node.service.eraser.jobs)
    node.client.delete(node.volume_id)


def copy(node: Node, _call: Call) -> None:
    origin = node.client.create("origin", SIZE, block())
    node.source = of_snapshot(node.client.snapshot("s", origin.volume_id).snapshot_id)
    node.block("vol-v", node.service.copier.jobs)
    assert code_of(partial(node.create, node.hasty)) == "ABORTED"


def copied(node: Node, _call: Call) -> None:
    node.create()
    node.block("vol-clone", node.service.copier.jobs)
    clone = partial(node.hasty.create, "clone", SIZE, block(), source=of_volume(node.volume_id))
    assert code_of(clone) == "ABORTED"


def growth(node: Node, _call: Call) -> None:
    node.parameters = {"class": "full"}
    node.create()
    node.block("grow-vol-v", node.service.growth_zeroer.jobs)
    assert code_of(partial(node.client.expand, node.volume_id, WANTED)) == "ABORTED"


def left_growth(node: Node, call: Call) -> None:
    growth(node, call)
    node.restart()
    node.began.clear()
    node.block("grow-vol-v", node.service.eraser.jobs)
    in_background.resume(node.service)


def sweep(node: Node, call: Call) -> None:
    node.create()
    disk = report.read(node.host.lvm).group(node.group).disks[1].uuid
    # A pool that has other room lets the sweep be.
    mark = "carver.sweep=yes" if call is Call.GROW else f"carver.sweepDisks={disk}"
    node.host.lvm("vgchange", "--addtag", mark, "--", node.group)
    node.block("sweep", node.service.freed_eraser.jobs)
    node.service.freed_eraser.start(node.group)


def empty_pool(node: Node, call: Call) -> None:
    node.create()
    gone = {"class": "gone"}
    made = node.client.create("gone", SIZE, block(), parameters=gone)
    node.block("wipe-gone", node.service.pool_remover.jobs)
    node.client.delete(made.volume_id)
    if call is Call.CREATE:
        node.parameters = gone
        # A new one: `v` is another class's.
        node.name = "new"


SETUPS: dict[EndedBy | Work, Callable[[Node, Call], None]] = {
    EndedBy.ERASER: erase,
    EndedBy.COPIER: copy,
    Work.COPIED: copied,
    Work.GROWTH: growth,
    Work.LEFT_GROWTH: left_growth,
    Work.SWEEP: sweep,
    Work.EMPTY_POOL: empty_pool,
}


def call_of(node: Node, call: Call, client: Client, staging: Path) -> Callable[[], object]:
    one = node.volume_id
    volume = csi.Volume(volume_id=one, capacity_bytes=SIZE)
    match call:
        case Call.CREATE:
            return partial(node.create, client)
        case Call.COPY_FROM:
            return partial(client.create, "c", SIZE, block(), source=of_volume(one))
        case Call.SNAPSHOT:
            return partial(client.snapshot, "s2", one)
        case Call.EXPAND:
            return partial(client.expand, one, WANTED)
        case Call.EXPAND_OTHER:
            return partial(client.expand, one, OTHER)
        case Call.USE:
            return partial(client.stage, volume, staging, block())
        case Call.UNSTAGE:
            return partial(client.unstage, one, staging)
        case Call.DELETE:
            return partial(client.delete, one)
        case Call.GROW:
            return partial(node.service.autoextender.step, 0)
        case Call.MODIFY:
            return partial(client.modify, one, {"readIOPS": "500"})
        case Call.MANAGE:
            return partial(client.volume, one)
        case Call.ADOPT:
            return partial(client.adopt, adopted(node))
        case Call.UNDO_ADOPT:
            return partial(client.undo_adopt, adopted(node))


def adopted(node: Node) -> carver.AdoptVolumeRequest:
    """Have the volume be one that was adopted; the request that asks what a call would do."""
    node.host.lvm("lvchange", "--addtag", "carver.adopted=old", "--", f"{node.group}/vol-v")
    return carver.AdoptVolumeRequest(
        group=node.group, logical_volume="old", block=True, dry_run=True
    )


def test_all_work_is_tried() -> None:
    assert {*SETUPS, Work.FORMAT} == {*Work, EndedBy.ERASER, EndedBy.COPIER}


@pytest.mark.parametrize("call", Call, ids=lambda call: call.name)
@pytest.mark.parametrize("work", SETUPS, ids=lambda work: work.name)
def test_a_call_does_as_the_table_says(
    node: Node, staging: Path, work: EndedBy | Work, call: Call
) -> None:
    SETUPS[work](node, call)
    assert node.began.wait(expect.PATIENCE_SECONDS)
    assert node.queue is not None
    [job] = [one for one in node.queue.unfinished() if not one.future.done()]
    expected = outcome(call, work)
    # These wait for work that waits here, the call's own or another's: only the deadline ends them.
    # All others get the time that a loaded machine may need.
    waits = (
        expected is Outcome.WAITS
        or (expected is Outcome.HALTS and call in EXPANSIONS)
        or (expected is Outcome.BESIDE and call is Call.COPY_FROM)
    )
    client = node.hasty if waits else node.client
    code = code_of(call_of(node, call, client, staging))
    if expected is Outcome.HALTS:
        assert job.cancelled.is_set()
        # What the call itself then begins waits as well.
        assert code in ("OK", "ABORTED")
        assert code == "OK" or call in EXPANSIONS
    elif (call, expected) == (Call.COPY_FROM, Outcome.BESIDE):
        # It waits for its own copy, which waits for a disk that is busy with the other work.
        assert (code in ("OK", "ABORTED"), job.cancelled.is_set()) == (True, False)
        assert "vol-c" in names(node.host, node.group)
    else:
        assert (code, job.cancelled.is_set()) == (CODES[expected], False)


@pytest.mark.parametrize("call", Call, ids=lambda call: call.name)
def test_a_volume_whose_deletion_failed_before_its_record_is_there(
    node: Node, staging: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.create()

    def held(path: str, *_where: object, **_how: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", path)

    with monkeypatch.context() as patch:
        for write in ("mark", "zero_out"):
            patch.setattr(node.host.kernel, write, held)
        with expect.code("FAILED_PRECONDITION", "is in use"):
            node.client.delete(node.volume_id)
    assert code_of(call_of(node, call, node.client, staging)) == "OK"
