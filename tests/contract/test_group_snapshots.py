"""Group snapshots: taken at one moment, found, listed, deleted; never there by halves."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import chosen
import configured
import expect
import in_background
import pytest
from csi_client import Client
from fakes import kubelet
from real.any import AnyHost, await_names, device, logical, lvm2_commands, names

from agent.csi.client import block, mounted, of_snapshot
from agent.daemon.server import Service
from agent.groups import quiesce
from agent.settings.settings import TOPOLOGY_KEY
from lvm import report
from lvm.room import Room
from mount.command import Result
from proto import csi_pb2 as csi

MIB = 1 << 20
EXTENT = 4 * MIB


@pytest.fixture
def pair(client: Client, service: Service) -> list[str]:
    """Two raw block volumes; and lvm2 may be as slow as an emulated machine makes it."""
    service.group_snapshotter.quiesce_seconds = 300
    return [client.create(name, 32 * MIB, block()).volume_id for name in ("data", "wal")]


def logical_name(identity: str) -> str:
    return identity.rpartition("/")[2]


def ids(made: csi.VolumeGroupSnapshot) -> list[str]:
    return [one.snapshot_id for one in made.snapshots]


def is_held(host: AnyHost, group: str) -> bool:
    return any(host.is_suspended(group, name) for name in ("vol-data", "vol-wal"))


@contextmanager
def failing(host: AnyHost, subcommand: str, after: int) -> Iterator[None]:
    """So many commands of a kind succeed, then none does."""
    seen = []

    def intercept(words: Sequence[str]) -> Result | None:
        if words[1:2] != (subcommand,):
            return None
        seen.append(words)
        return Result(5, "", "  it does not work today\n") if len(seen) > after else None

    host.intercept = intercept
    yield
    host.intercept = lambda _words: None


@pytest.mark.variation
def test_capabilities_include_group_snapshots(client: Client) -> None:
    plugin = client.identity.GetPluginCapabilities(csi.GetPluginCapabilitiesRequest())
    offered = [one.service.type for one in plugin.capabilities]
    assert csi.PluginCapability.Service.GROUP_CONTROLLER_SERVICE in offered
    answer = client.group_controller.GroupControllerGetCapabilities(
        csi.GroupControllerGetCapabilitiesRequest()
    )
    kinds = csi.GroupControllerServiceCapability.RPC
    assert [one.rpc.type for one in answer.capabilities] == [
        kinds.CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT
    ]


def test_create_runs_one_command_for_each_source(
    client: Client, pair: list[str], host: AnyHost, group: str
) -> None:
    prefix = "csi.storage.k8s.io/volumegroupsnapshot"
    given = {f"{prefix}/name": "weekday", f"{prefix}/namespace": "shop"}
    host.commands.clear()
    made = client.group_snapshot("nightly", pair, {**given, f"{prefix}content/name": "content-1"})
    assert lvm2_commands(host) == ["fullreport", "lvcreate", "lvcreate", "lvchange"]
    assert made.ready_to_use
    expected = {
        "groupSnapshotName": "weekday",
        "namespace": "shop",
        "content": "content-1",
        "name": "nightly",
        "groupSnapshot": made.group_snapshot_id,
    }
    assert sorted(one.source_volume_id for one in made.snapshots) == sorted(pair)
    for one in made.snapshots:
        assert one.group_snapshot_id == made.group_snapshot_id
        assert one.creation_time == made.creation_time
        assert one.ready_to_use
        assert [dict(each.segments) for each in one.accessible_topology] == [{TOPOLOGY_KEY: "here"}]
        own_tags = logical(host, group, logical_name(one.snapshot_id)).own_tags
        assert expected.items() <= own_tags.items()
    assert not is_held(host, group)


@pytest.mark.variation
def test_repeated_create_is_ok(client: Client, pair: list[str], host: AnyHost) -> None:
    other = client.create("other", EXTENT, block()).volume_id
    made = client.group_snapshot("nightly", pair)
    host.commands.clear()
    assert client.group_snapshot("nightly", pair[::-1]) == made
    assert lvm2_commands(host) == ["fullreport"]
    for sources in (pair[:1], [*pair, other]):
        with expect.code("ALREADY_EXISTS", "nightly"):
            client.group_snapshot("nightly", sources)
    with expect.code("ALREADY_EXISTS", "size"):
        client.group_snapshot("nightly", pair, {"size": "50%"})
    assert client.find_group_snapshot(made.group_snapshot_id, ids(made)) == made


@pytest.mark.variation
def test_invalid_requests_are_refused(client: Client, pair: list[str]) -> None:
    for name in ("", "n" * 129, "a\x00b"):
        with expect.code("INVALID_ARGUMENT", "name"):
            client.group_snapshot(name, pair)
    for sources in ([], [""], [pair[0], pair[0]]):
        with expect.code("INVALID_ARGUMENT", "source_volume_ids"):
            client.group_snapshot("nightly", sources)
    for parameters in ({"colour": "red"}, {"size": "much"}):
        with expect.code("INVALID_ARGUMENT", "parameters"):
            client.group_snapshot("nightly", pair, parameters)
    for call in (client.find_group_snapshot, client.delete_group_snapshot):
        with expect.code("INVALID_ARGUMENT", "group_snapshot_id"):
            call("")
    assert client.snapshots() == []


@pytest.mark.variation
def test_missing_source_is_named(
    client: Client, pair: list[str], host: AnyHost, group: str
) -> None:
    for missing in (pair[0] + "x", "no id at all"):
        with expect.code("NOT_FOUND", missing):
            client.group_snapshot("nightly", [*pair, missing])
    elsewhere = f"{group}@00000000/vol-data"
    with expect.code("FAILED_PRECONDITION", elsewhere):
        client.group_snapshot("nightly", [*pair, elsewhere])
    assert client.snapshots() == []
    assert not is_held(host, group)


# One moment


def numbered(number: int) -> bytes:
    return number.to_bytes(8, "little").ljust(4096, b"\0")


def write(host: AnyHost, group: str, number: int) -> None:
    for name in ("vol-data", "vol-wal"):
        host.write_bytes(device(host, group, name), 0, numbered(number))


def number_of(host: AnyHost, path: str) -> int:
    return int.from_bytes(host.read_bytes(path, 0, 4096)[:8], "little")


@pytest.mark.parametrize("order", chosen.kinds(["data wal", "wal data"], usual=["data wal"]))
def test_snapshots_are_of_one_moment(
    client: Client, pair: list[str], host: AnyHost, group: str, order: str
) -> None:
    """A program writes a number to one, waits until it is on the disk, writes it to the other."""
    first, second = (device(host, group, f"vol-{name}") for name in order.split())
    ended = threading.Event()
    written: list[int] = []

    def write() -> None:
        while not ended.is_set():
            number = len(written) + 1
            host.write_bytes(first, 0, numbered(number))
            host.write_bytes(second, 0, numbered(number))
            written.append(number)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while not written:
            ended.wait(0.01)
        made = [client.group_snapshot(str(number), pair) for number in range(3)]
    finally:
        ended.set()
        writer.join()
    for one in made:
        at = {
            snapshot.source_volume_id.rpartition("-")[2]: device(
                host, group, logical_name(snapshot.snapshot_id)
            )
            for snapshot in one.snapshots
        }
        ahead, behind = (number_of(host, at[name]) for name in order.split())
        assert behind <= ahead <= behind + 1, (ahead, behind)
        assert 0 < ahead <= len(written) + 1


@pytest.mark.long_on_lvm
def test_volumes_of_its_snapshots(
    client: Client, pair: list[str], host: AnyHost, group: str
) -> None:
    write(host, group, 7)
    made = client.group_snapshot("nightly", pair)
    for index, name in enumerate(("vol-data", "vol-wal")):
        host.write_bytes(device(host, group, name), 0, numbered(99))
        [snapshot] = [one for one in made.snapshots if one.source_volume_id == pair[index]]
        client.create(f"new-{index}", 0, block(), source=of_snapshot(snapshot.snapshot_id))
        assert number_of(host, device(host, group, f"vol-new-{index}")) == 7


@pytest.mark.variation
def test_mounted_volumes_can_be_written_afterwards(
    client: Client, host: AnyHost, service: Service, group: str
) -> None:
    service.group_snapshotter.quiesce_seconds = 300
    made = []
    for name, fs_type, size in (("a", "ext4", 16 * MIB), ("b", "btrfs", 256 * MIB)):
        volume = client.create(name, size, mounted())
        client.stage(volume, host.directory / name, mounted(fs_type))
        made.append(volume.volume_id)
    (host.directory / "a" / "file").write_text("before")
    taken = client.group_snapshot("nightly", made, {"size": "8MiB"})
    assert taken.ready_to_use
    (host.directory / "a" / "file").write_text("afterwards")
    (host.directory / "a" / "file").unlink()
    for name, volume_id in zip("ab", made, strict=True):
        client.unstage(volume_id, host.directory / name)


@pytest.mark.variation
def test_inactive_source(client: Client, pair: list[str], host: AnyHost, group: str) -> None:
    host.deactivate(group, "vol-wal")
    made = client.group_snapshot("nightly", pair)
    assert made.ready_to_use
    client.delete_group_snapshot(made.group_snapshot_id, ids(made))
    await_names(host, group, {"vol-data", "vol-wal"})


@pytest.mark.long_on_lvm
def test_volume_that_lvm2_reads_is_not_suspended(
    client: Client, pair: list[str], host: AnyHost, group: str, staging: Path, target: Path
) -> None:
    """lvm2 reads a read-only loop device over a volume, and would hang with it."""
    volume = client.volume(pair[1]).volume
    client.stage(volume, staging, block())
    client.publish(volume, staging, target, block(), read_only=True)
    with expect.code("FAILED_PRECONDITION", pair[1], "read-only"):
        client.group_snapshot("nightly", pair)
    assert not is_held(host, group)
    assert client.snapshots() == []
    client.unpublish(pair[1], target)
    client.unstage(pair[1], staging)
    assert client.group_snapshot("nightly", pair).ready_to_use


@pytest.mark.variation
def test_volume_under_a_loop_device_of_kubelet_is_suspended(
    client: Client, pair: list[str], host: AnyHost, staging: Path, target: Path
) -> None:
    """lvm2 that is confined to the disks of the group does not read it."""
    volume = client.volume(pair[1]).volume
    client.stage(volume, staging, block())
    client.publish(volume, staging, target, block())
    with kubelet.Mapped(host.kernel, target, host.directory / "own"):
        assert client.group_snapshot("nightly", pair).ready_to_use


# Too long, or not at all


@pytest.mark.variation
def test_one_failure_undoes_all(client: Client, pair: list[str], host: AnyHost, group: str) -> None:
    with failing(host, "lvcreate", after=1), expect.code("INTERNAL", "today"):
        client.group_snapshot("nightly", pair)
    assert not is_held(host, group)
    assert client.snapshots() == []
    await_names(host, group, {"vol-data", "vol-wal"})
    assert client.group_snapshot("nightly", pair).ready_to_use


@contextmanager
def changing_nothing(host: AnyHost, after: int) -> Iterator[None]:
    """After so many snapshots lvm2 changes nothing any more, as where /etc/lvm/archive is full."""
    taken: list[Sequence[str]] = []

    def intercept(words: Sequence[str]) -> Result | None:
        command = words[1] if words[0] == "lvm" else ""
        if command not in ("lvcreate", "lvconvert", "lvchange", "lvremove"):
            return None
        if len(taken) >= after:
            return Result(5, "", "  /etc/lvm/archive/.lvm: write error: No space left on device\n")
        if command == "lvcreate":
            taken.append(words)
        return None

    host.intercept = intercept
    yield
    host.intercept = lambda _words: None


@pytest.mark.parametrize(("taken", "code"), [(1, "INTERNAL"), (2, "ABORTED")])
def test_what_could_not_be_undone_at_once_is_undone_soon(
    client: Client,
    pair: list[str],
    host: AnyHost,
    group: str,
    service: Service,
    taken: int,
    code: str,
) -> None:
    undone = service.group_snapshotter.undone
    undone.retry_seconds = 0.05
    with changing_nothing(host, taken):
        with expect.code(code, "No space left"):
            client.group_snapshot("nightly", pair)
        assert undone.unfinished()
        with expect.code("FAILED_PRECONDITION", "snapshot"):
            client.delete(pair[0])
    expect.soon(lambda: not undone.unfinished())
    await_names(host, group, {"vol-data", "vol-wal"})
    for one in pair:
        client.delete(one)


@pytest.mark.parametrize(("taken", "code"), [(1, "INTERNAL"), (2, "ABORTED")])
def test_what_a_later_call_made_anew_is_not_undone(
    client: Client, pair: list[str], host: AnyHost, service: Service, taken: int, code: str
) -> None:
    undone = service.group_snapshotter.undone
    with changing_nothing(host, taken):
        with expect.code(code, "No space left"):
            client.group_snapshot("nightly", pair)
        left = {one.snapshot_id: one.creation_time for one in client.snapshots()}
    made = client.group_snapshot("nightly", pair)
    # Those of the failed call may be of two moments.
    assert all(left.get(one.snapshot_id) != one.creation_time for one in made.snapshots)
    [failed] = undone.unfinished()
    expect.soon(failed.future.done)
    in_background.again(undone)
    expect.soon(lambda: not undone.unfinished())
    assert client.group_snapshot("nightly", pair) == made
    assert client.find_group_snapshot(made.group_snapshot_id, ids(made)) == made


@pytest.mark.variation
def test_no_room_is_refused_first(client: Client, pair: list[str], host: AnyHost) -> None:
    client.create("rest", client.capacity().maximum_volume_size.value - 3 * EXTENT, block())
    host.commands.clear()
    # Each of them alone would have room.
    with expect.code("RESOURCE_EXHAUSTED"):
        client.group_snapshot("nightly", pair, {"size": "8MiB"})
    assert lvm2_commands(host) == ["fullreport"]
    assert client.group_snapshot("nightly", pair, {"size": "4MiB"}).ready_to_use


def test_volumes_are_resumed_at_the_time_limit(
    client: Client, pair: list[str], host: AnyHost, group: str, service: Service
) -> None:
    service.group_snapshotter.quiesce_seconds = 0.5
    let_go = threading.Event()

    def intercept(words: Sequence[str]) -> Result | None:
        while words[1] == "lvcreate" and is_held(host, group):
            let_go.wait(0.05)
        return None

    host.intercept = intercept
    with expect.code("DEADLINE_EXCEEDED"):
        client.group_snapshot("nightly", pair)
    host.intercept = lambda _words: None
    assert client.snapshots() == []
    await_names(host, group, {"vol-data", "vol-wal"})


@pytest.mark.variation
def test_other_calls_resume_nothing(
    client: Client, pair: list[str], host: AnyHost, group: str
) -> None:
    """A report that says so before a change is taken as what a killed lvm2 left."""
    looked: list[bool] = []

    def intercept(words: Sequence[str]) -> Result | None:
        if words[1] == "lvcreate":
            client.volume(pair[0])
            looked.append(host.is_suspended(group, "vol-wal"))
        return None

    host.intercept = intercept
    assert client.group_snapshot("nightly", pair).ready_to_use
    host.intercept = lambda _words: None
    assert looked == [True, True]


def test_start_resumes_suspended_volumes(pair: list[str], host: AnyHost, group: str) -> None:
    for name in ("vol-data", "vol-wal"):
        host.suspend(group, name)
    with quiesce.resume_left(host.devices, [group]):
        assert is_held(host, group)
    assert not is_held(host, group)
    host.write_bytes(device(host, group, "vol-data"), 0, numbered(1))


# By halves


@pytest.fixture
def half(client: Client, pair: list[str], host: AnyHost, group: str) -> csi.VolumeGroupSnapshot:
    """One of which a snapshot is missing, as a kill leaves it."""
    made = client.group_snapshot("nightly", pair)
    record = ("--deltag", "carver.committed=yes")
    host.lvm("lvchange", *record, "--", *(f"{group}/{logical_name(one)}" for one in ids(made)))
    host.lvm("lvremove", "--yes", "--", f"{group}/{logical_name(ids(made)[1])}")
    return made


@pytest.mark.variation
def test_half_made_one_is_not_found_and_can_be_deleted(
    client: Client, half: csi.VolumeGroupSnapshot, host: AnyHost, group: str
) -> None:
    kept = ids(half)[0]
    assert client.snapshots() == []
    with expect.code("NOT_FOUND", half.group_snapshot_id):
        client.find_group_snapshot(half.group_snapshot_id, ids(half))
    with expect.code("NOT_FOUND", kept):
        client.controller.GetSnapshot(csi.GetSnapshotRequest(snapshot_id=kept))
    with expect.code("NOT_FOUND", kept):
        client.create("new", 0, block(), source=of_snapshot(kept))
    client.delete_group_snapshot(half.group_snapshot_id, ids(half))
    await_names(host, group, {"vol-data", "vol-wal"})


@pytest.mark.variation
def test_half_made_one_is_replaced(
    client: Client, half: csi.VolumeGroupSnapshot, pair: list[str], host: AnyHost, group: str
) -> None:
    made = client.group_snapshot("nightly", pair)
    assert made.ready_to_use
    assert made.creation_time.ToNanoseconds() > half.creation_time.ToNanoseconds()
    assert len({one.creation_time.ToNanoseconds() for one in made.snapshots}) == 1
    assert len(names(host, group)) == 4


@pytest.mark.long_on_lvm
def test_half_made_one_is_undone_at_start(
    client: Client,
    half: csi.VolumeGroupSnapshot,
    pair: list[str],
    host: AnyHost,
    group: str,
    service: Service,
) -> None:
    whole = client.group_snapshot("other", pair)
    service.reports.fresh()
    assert service.group_snapshotter.resume() == 1
    left = {logical_name(one) for one in ids(whole)}
    await_names(host, group, {"vol-data", "vol-wal", *left})


# What lost a part


@pytest.fixture
def rest(client: Client, pair: list[str], host: AnyHost, group: str) -> csi.VolumeGroupSnapshot:
    """One that was whole, and of which someone removed a snapshot since."""
    write(host, group, 7)
    made = client.group_snapshot("nightly", pair)
    host.lvm("lvremove", "--yes", "--", f"{group}/{logical_name(ids(made)[1])}")
    return made


@pytest.mark.variation
def test_one_that_lost_a_part_is_kept_until_deleted(
    client: Client,
    rest: csi.VolumeGroupSnapshot,
    pair: list[str],
    host: AnyHost,
    group: str,
    service: Service,
) -> None:
    service.reports.fresh()
    assert service.group_snapshotter.resume() == 0
    with expect.code("FAILED_PRECONDITION", rest.group_snapshot_id, "1 of its 2"):
        client.find_group_snapshot(rest.group_snapshot_id, ids(rest))
    with expect.code("FAILED_PRECONDITION", "1 of its 2"):
        client.group_snapshot("nightly", pair)
    assert [one.snapshot_id for one in client.snapshots()] == ids(rest)[:1]
    client.create("new", 0, block(), source=of_snapshot(ids(rest)[0]))
    assert number_of(host, device(host, group, "vol-new")) == 7
    for _ in range(2):
        client.delete_group_snapshot(rest.group_snapshot_id, ids(rest))
    await_names(host, group, {"vol-data", "vol-wal", "vol-new"})


# The end of one


@pytest.mark.variation
def test_snapshots_are_deleted_together(
    client: Client, pair: list[str], host: AnyHost, group: str
) -> None:
    free = Room(report.read(host.lvm).group(group)).free_extents
    made = client.group_snapshot("nightly", pair)
    assert [one.group_snapshot_id for one in client.snapshots()] == [made.group_snapshot_id] * 2
    with expect.code("INVALID_ARGUMENT", made.group_snapshot_id, "DeleteVolumeGroupSnapshot"):
        client.delete_snapshot(ids(made)[0])
    for one in pair:
        with expect.code("FAILED_PRECONDITION"):
            client.delete(one)
    client.delete_group_snapshot(made.group_snapshot_id, ids(made))
    await_names(host, group, {"vol-data", "vol-wal"})
    assert Room(report.read(host.lvm).group(group)).free_extents == free
    client.delete_group_snapshot(made.group_snapshot_id, ids(made))
    with expect.code("NOT_FOUND"):
        client.find_group_snapshot(made.group_snapshot_id, ids(made))
    for one in pair:
        client.delete(one)


@pytest.mark.variation
def test_wrong_snapshot_ids_are_refused(client: Client, pair: list[str]) -> None:
    made = client.group_snapshot("nightly", pair)
    alone = client.snapshot("alone", pair[0]).snapshot_id
    for wrong in ([], ids(made)[:1], [*ids(made), alone], [alone]):
        for call in (client.delete_group_snapshot, client.find_group_snapshot):
            with expect.code("INVALID_ARGUMENT", "snapshot_ids"):
                call(made.group_snapshot_id, wrong)
    assert client.find_group_snapshot(made.group_snapshot_id, ids(made)) == made


@pytest.mark.variation
def test_delete_of_an_unknown_id_is_ok(client: Client, pair: list[str], group: str) -> None:
    own = pair[0].partition("/")[0]
    for identity in ("no id", pair[0], f"{own}/gsnap-none"):
        client.delete_group_snapshot(identity)
        with expect.code("NOT_FOUND"):
            client.find_group_snapshot(identity)
    with expect.code("FAILED_PRECONDITION"):
        client.delete_group_snapshot(f"{group}@00000000/gsnap-nightly")
    assert len(client.volumes()) == 2


# Two at once


@pytest.mark.variation
def test_concurrent_calls_are_aborted(client: Client, pair: list[str], host: AnyHost) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def intercept(words: Sequence[str]) -> Result | None:
        if words[1] == "fullreport":
            reached.set()
            assert go_on.wait(expect.PATIENCE_SECONDS)
        return None

    host.intercept = intercept
    made: list[csi.VolumeGroupSnapshot] = []
    first = threading.Thread(target=lambda: made.append(client.group_snapshot("nightly", pair)))
    first.start()
    assert reached.wait(expect.PATIENCE_SECONDS)
    seconds: tuple[Callable[[], object], ...] = (
        lambda: client.group_snapshot("nightly", pair),
        lambda: client.group_snapshot("weekly", pair[:1]),
        lambda: client.snapshot("alone", pair[0]),
        lambda: client.delete(pair[1]),
    )
    try:
        for second in seconds:
            with expect.code("ABORTED"):
                second()
    finally:
        host.intercept = lambda _words: None
        go_on.set()
        first.join()
    assert made[0].ready_to_use


class TestThin:
    """Of thin volumes that are held, lvm2 can take copy-on-write snapshots only."""

    pytestmark = pytest.mark.settings(classes=(replace(configured.THIN, default=True),))

    @pytest.mark.variation
    def test_snapshots_of_active_volumes_are_copy_on_write(
        self, client: Client, pair: list[str], host: AnyHost, group: str
    ) -> None:
        wal = device(host, group, "vol-wal")
        host.write_bytes(wal, 0, numbered(1))
        host.commands.clear()
        made = client.group_snapshot("nightly", pair)
        assert lvm2_commands(host) == ["fullreport", "lvcreate", "lvcreate", "lvchange"]
        host.write_bytes(wal, 0, numbered(2))
        [taken] = [one for one in made.snapshots if one.source_volume_id == pair[1]]
        found = logical(host, group, logical_name(taken.snapshot_id))
        assert (found.origin, found.pool) == ("vol-wal", "")
        client.create("new", 0, block(), source=of_snapshot(taken.snapshot_id))
        assert number_of(host, device(host, group, "vol-new")) == 1
        # The pool takes snapshots and volumes as before.
        alone = client.snapshot("alone", pair[1])
        client.delete_snapshot(alone.snapshot_id)
        client.delete_group_snapshot(made.group_snapshot_id, ids(made))
        for one in client.volumes():
            client.delete(one.volume_id)

    @pytest.mark.variation
    def test_one_source_gets_a_thin_snapshot(
        self, client: Client, pair: list[str], host: AnyHost, group: str
    ) -> None:
        made = client.group_snapshot("nightly", pair[:1])
        [taken] = ids(made)
        assert logical(host, group, logical_name(taken)).pool
        client.delete_group_snapshot(made.group_snapshot_id, [taken])
