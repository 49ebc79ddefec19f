"""Thin snapshots that Carver activates to read them: inactive again when the readings end."""

import threading
from contextlib import ExitStack

import expect
import grpc
import in_background
import nodes
import pytest
from changed_blocks import allocated_extents, blocks, delta_of
from histories import Disk
from nodes import MIB, Node

from agent.core import ids
from agent.csi.client import block, of_snapshot
from agent.extras.changed_blocks import changed_blocks_service as changed_blocks
from agent.extras.transfer import streams_command
from agent.work.group_worker import Job
from lvm import report, volumes
from proto import carver_pb2 as carver

TAG = "activated"


@pytest.fixture
def disk(here: Node) -> Disk:
    made = Disk(here.client, here.service, here.host, "thin")
    made.write(0, b"a" * 4096)
    return made


def active(disk: Disk) -> list[str]:
    """The snapshots that are active."""
    return sorted(one for one in disk.host.devices.active(disk.group) if one.startswith("snap-"))


def tagged(disk: Disk) -> list[str]:
    """Those that Carver says it activated."""
    found = report.read(disk.host.lvm).group(disk.group).volumes.values()
    return sorted(one.name for one in found if TAG in one.own_tags)


def require_left_alone(disk: Disk, *names: str) -> None:
    """These are active, and no others; of none Carver says that it is to be deactivated."""
    assert active(disk) == sorted(names)
    assert tagged(disk) == []


def name_of(snapshot_id: str) -> str:
    return ids.logical_name(snapshot_id)


@pytest.mark.variation
def test_a_backup_leaves_no_snapshot_active(disk: Disk) -> None:
    base = ""
    for number in range(4):
        disk.write(number * MIB, b"b" * 4096)
        taken = disk.snapshot()
        with delta_of(disk).allocated(taken) as reading:
            assert active(disk) == tagged(disk) == [name_of(taken)]
            assert list(reading.extents())
        require_left_alone(disk)
        if base:
            assert list(blocks(disk.client, taken, base))
            require_left_alone(disk)
        base = taken


@pytest.mark.variation
def test_a_snapshot_that_was_active_stays_active(disk: Disk) -> None:
    older, newer = disk.snapshot(), disk.snapshot()
    path = disk.logical(older)
    with delta_of(disk).changed(older, newer):
        assert tagged(disk) == [name_of(newer)]
    require_left_alone(disk, name_of(older))
    in_background.resume(disk.service)
    require_left_alone(disk, name_of(older))
    assert disk.logical(older) == path


@pytest.mark.variation
def test_a_snapshot_read_twice_is_deactivated_after_the_last_reading(disk: Disk) -> None:
    one, two, three = (disk.snapshot() for _ in range(3))
    with ExitStack() as ending:
        ending.enter_context(delta_of(disk).changed(two, three))
        with delta_of(disk).changed(one, two) as reading:
            assert len(active(disk)) == 3
            assert list(reading.extents()) == []
        assert active(disk) == [name_of(two), name_of(three)]
        # A look of a start that comes meanwhile, as for a group that was away.
        delta_of(disk).activations.resume()
        assert active(disk) == [name_of(two), name_of(three)]
    require_left_alone(disk)


@pytest.mark.variation
def test_concurrent_readings_leave_none_active(disk: Disk) -> None:
    taken = [disk.snapshot() for _ in range(3)]
    problems: list[BaseException] = []

    def read(number: int) -> None:
        try:
            for turn in range(3):
                base, target = taken[0], taken[1 + (number + turn) % 2]
                assert list(blocks(disk.client, target, base)) == []
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert problems == []
    require_left_alone(disk)


@pytest.mark.variation
def test_a_snapshot_left_open_is_deactivated_after_a_later_reading(disk: Disk) -> None:
    taken, other = disk.snapshot(), disk.snapshot()
    with ExitStack() as user:
        with delta_of(disk).allocated(taken) as reading:
            user.enter_context(disk.host.kernel.opened(reading.device))
        assert active(disk) == tagged(disk) == [name_of(taken)]
        allocated_extents(disk, other)
        assert active(disk) == [name_of(taken)]
    allocated_extents(disk, other)
    require_left_alone(disk)


@pytest.mark.variation
def test_a_volume_staged_while_it_is_read_stays_active(disk: Disk, here: Node) -> None:
    taken, staging = disk.snapshot(), here.directory / "staging"
    here.host.deactivate(disk.group, disk.name)
    with delta_of(disk).changed(taken, disk.id):
        disk.client.stage(disk.volume, staging, block())
    require_left_alone(disk)
    assert disk.host.devices.find(disk.group, disk.name) is not None
    disk.client.unstage(disk.id, staging)


@pytest.mark.variation
@pytest.mark.parametrize("step", ["tagged", "activated", "deactivated"])
def test_the_next_start_deactivates_what_a_kill_left(disk: Disk, step: str) -> None:
    taken, own = disk.snapshot(), disk.snapshot()
    disk.logical(own)
    name = name_of(taken)
    volumes.mark(disk.host.lvm, disk.group, name, old_tags={}, new_tags={TAG: "reading"})
    if step != "tagged":
        disk.logical(taken)
    if step == "deactivated":
        disk.host.deactivate(disk.group, name)
    in_background.resume(disk.service)
    require_left_alone(disk, name_of(own))


@pytest.mark.variation
def test_a_stream_leaves_no_snapshot_active(
    disk: Disk, here: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer = disk.snapshot(), disk.snapshot()
    nodes.stream(here, "s-1", since="s-0")
    require_left_alone(disk)

    def killed(_request: carver.CloseSnapshotRequest) -> None:
        """The command ends before it says that it does."""
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(here.transfer, "CloseSnapshot", killed)
        with pytest.raises(KeyboardInterrupt):
            nodes.stream(here, "s-0")
    assert tagged(disk) == [name_of(older)]
    # The command may not have opened it yet.
    allocated_extents(disk, newer)
    assert active(disk) == [name_of(older)]
    # Its time is over.
    leases = changed_blocks.of(here.service).delta.activations._leases
    leases.update({word: (key, 0.0) for word, (key, _) in leases.items()})
    allocated_extents(disk, newer)
    require_left_alone(disk)


@pytest.mark.variation
def test_a_snapshot_that_a_command_reads_stays_active(disk: Disk, here: Node) -> None:
    taken = disk.snapshot()
    with streams_command.outgoing(here.at, taken) as first:
        with streams_command.outgoing(here.at, taken):
            pass
        allocated_extents(disk, taken)
        assert active(disk) == [name_of(taken)]
        # Of a service that knows nothing of it.
        here.restart()
        assert active(disk) == [name_of(taken)]
        assert first.device.read(0, 4096) == b"a" * 4096
        first.verbs.caller = here.client
    require_left_alone(disk)


@pytest.mark.variation
def test_a_snapshot_that_is_copied_stays_active(
    disk: Disk, here: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy has its source open for a moment at a time."""
    taken = disk.snapshot()
    begun, ended = threading.Event(), threading.Event()
    codes: list[grpc.StatusCode] = []

    def between_two_pieces(_job: object) -> None:
        begun.set()
        assert ended.wait(expect.PATIENCE_SECONDS)

    def restore() -> None:
        source, wanted = of_snapshot(taken), {"class": "linear"}
        try:
            here.client.create("copy", len(disk.held), block(), source=source, parameters=wanted)
        except grpc.RpcError as error:
            codes.append(error.code())

    monkeypatch.setattr(Job, "check", between_two_pieces)
    monkeypatch.setattr(here.service.copier, "grace_seconds", 60)
    restoring = threading.Thread(target=restore)
    with delta_of(disk).allocated(taken):
        restoring.start()
        assert begun.wait(expect.PATIENCE_SECONDS)
    assert active(disk) == [name_of(taken)]
    ended.set()
    restoring.join()
    assert codes == []
    assert here.content("vol-copy", len(disk.held)) == disk.held
    allocated_extents(disk, taken)
    require_left_alone(disk)
