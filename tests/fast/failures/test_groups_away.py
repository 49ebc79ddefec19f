"""Group snapshots of several groups, one of which comes late, is lost, or was replaced."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import expect
import in_background
import pytest
import serving
from csi_client import Client
from fakes.disks import FakeDisks
from fakes.host import FakeHost
from fakes.lvm import FakeGroup

from agent.core import errors
from agent.csi.client import block, of_snapshot
from agent.daemon.server import Service
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from proto import carver_pb2 as carver
from proto import csi_pb2 as csi
from proto.carver_pb2_grpc import TransferStub

MIB = 1 << 20
FIRST, SECOND = DeviceClass("first", "a", default=True), DeviceClass("second", "b")
OLDER = {"carver.committed", "carver.memberGroups"}
pytestmark = [pytest.mark.groups(a=[100], b=[100]), pytest.mark.settings(classes=(FIRST, SECOND))]


class Node:
    """A node whose groups come and go between two starts, with a group snapshot of both."""

    def __init__(self, config: Config, fake: FakeHost) -> None:
        self.config, self.fake = config, fake
        self.number = 0
        self.away: dict[str, FakeGroup] = {}
        self.restart()

    def restart(self, *classes: DeviceClass) -> None:
        """Start another process, of these classes if any are named."""
        if self.number:
            self.service.stop()
        self.number += 1
        endpoint = self.config.endpoint.with_name(f"{self.number}.sock")
        changed = replace(self.config, endpoint=endpoint, classes=classes or self.config.classes)
        self.service: Service = serving.start(changed, self.fake)
        self.client = Client(endpoint).__enter__()

    def snapshot(self) -> None:
        """Take a group snapshot of a volume in each group."""
        first = self.client.create("1", 32 * MIB, block())
        second = self.client.create("2", 32 * MIB, block(), parameters={"class": "second"})
        self.sources = [first.volume_id, second.volume_id]
        self.taken = self.client.group_snapshot("nightly", self.sources)
        self.ids = [one.snapshot_id for one in self.taken.snapshots]

    def find(self) -> csi.VolumeGroupSnapshot:
        return self.client.find_group_snapshot(self.taken.group_snapshot_id, self.ids)

    def delete(self) -> None:
        self.client.delete_group_snapshot(self.taken.group_snapshot_id, self.ids)

    def remove_second(self) -> None:
        """Remove the snapshot in group b by hand."""
        self.fake.lvm("lvremove", "--yes", "--", f"b/{self.ids[1].rpartition('/')[2]}")

    def forget_record(self, *keys: str, only: str = "") -> None:
        """Remove tags, of all groups or of one: as a kill or an older version leaves them."""
        for group in self.fake.lvm2.groups.values():
            if only not in ("", group.name):
                continue
            for one in group.volumes.values():
                one.tags = {tag for tag in one.tags if tag.partition("=")[0] not in keys}

    def take(self, name: str) -> None:
        """Detach the group's disks."""
        for one in list(self.fake.lvm2.groups[name].volumes.values()):
            self.fake.deactivate(name, one.name)
        self.away[name] = self.fake.lvm2.groups.pop(name)

    def bring(self, name: str) -> None:
        self.fake.lvm2.groups[name] = self.away.pop(name)

    def snapshots(self) -> int:
        every = (*self.fake.lvm2.groups.values(), *self.away.values())
        return sum(name.startswith("snap") for one in every for name in one.volumes)


@pytest.fixture
def bare(config: Config, fake: FakeHost) -> Iterator[Node]:
    made = Node(config, fake)
    yield made
    made.service.stop()


@pytest.fixture
def node(bare: Node) -> Node:
    bare.snapshot()
    return bare


@pytest.mark.parametrize("keys", [set(), OLDER], ids=["of this version", "of an older one"])
@pytest.mark.parametrize("late", ["a", "b"])
def test_a_group_that_comes_late_costs_no_snapshot(node: Node, late: str, keys: set[str]) -> None:
    node.forget_record(*keys)
    node.take(late)
    node.restart()
    for call in (node.find, node.delete):
        assert node.snapshots() == 2
        with expect.code("FAILED_PRECONDITION", "volume group"):
            call()
    assert node.snapshots() == 2
    node.bring(late)
    assert node.find() == node.taken
    node.restart()
    assert node.find() == node.taken
    node.delete()
    assert node.snapshots() == 0


def test_an_unfinished_group_snapshot_is_undone_once_all_groups_are_there(node: Node) -> None:
    node.forget_record("carver.committed")
    node.remove_second()
    node.take("b")
    node.restart()
    assert node.snapshots() == 1
    node.bring("b")
    node.restart()
    assert node.snapshots() == 0
    with expect.code("NOT_FOUND"):
        node.find()


@pytest.mark.parametrize("how", ["a restart", "a reload", "the repeated call"])
def test_snapshots_of_which_no_tag_says_that_they_are_of_one_moment_are_taken_anew(
    node: Node, how: str
) -> None:
    """All were taken, and the call failed, or was killed, before it could tell their moment."""
    node.forget_record("carver.committed")
    with expect.code("NOT_FOUND"):
        node.find()
    if how == "a restart":
        node.restart()
    if how == "a reload":
        assert node.service.group_snapshotter.resume("a", "b") == 1
    if how != "the repeated call":
        assert node.snapshots() == 0
    before = node.taken.creation_time.ToNanoseconds()
    sources = [one.source_volume_id for one in node.taken.snapshots]
    node.taken = node.client.group_snapshot("nightly", sources)
    node.ids = [one.snapshot_id for one in node.taken.snapshots]
    assert node.taken.creation_time.ToNanoseconds() > before
    assert node.snapshots() == 2
    assert node.find() == node.taken


class Part(NamedTuple):
    """What is left of one of the two snapshots: where it is, and which tags it has."""

    place: str
    is_committed: bool


PLACES = ("there", "removed by hand", "in a group that is away")
PARTS = [Part(*each) for each in itertools.product(PLACES, (True, False))]


@pytest.mark.parametrize("is_older", [False, True], ids=["", "of an older version"])
@pytest.mark.parametrize(
    "second", PARTS, ids=lambda part: f"b {part.place} {part.is_committed and 'committed'}"
)
@pytest.mark.parametrize("is_first_committed", [False, True])
def test_snapshots_are_shown_and_kept_unless_they_certainly_were_never_complete(
    node: Node, is_first_committed: bool, second: Part, is_older: bool
) -> None:
    """One rule for lists, single snapshots, restores, the group snapshot, and the next start.

    `committed` of any snapshot says that all were taken at one moment. Versions that did not record
    the groups did not write it; theirs count while none is missing.
    """
    if not is_first_committed:
        node.forget_record("carver.committed", only="a")
    if not second.is_committed:
        node.forget_record("carver.committed", only="b")
    if is_older:
        node.forget_record("carver.memberGroups")
    is_there = second.place == "there"
    if second.place == "removed by hand":
        node.remove_second()
    if second.place == "in a group that is away":
        node.take("b")
    expected_ids = node.ids if is_there else node.ids[:1]
    is_of_one_moment = is_first_committed or (is_there and (second.is_committed or is_older))
    is_kept = is_of_one_moment or second.place == "in a group that is away"
    client = node.client
    for number, snapshot_id in enumerate(expected_ids):
        of_source = client.snapshots(volume_id=node.sources[number])
        assert [one.snapshot_id for one in of_source] == [snapshot_id] * is_kept
        asked, source = csi.GetSnapshotRequest(snapshot_id=snapshot_id), of_snapshot(snapshot_id)
        if is_kept:
            assert client.controller.GetSnapshot(asked).snapshot.snapshot_id == snapshot_id
            client.create(f"restored-{number}", 0, block(), source=source)
            continue
        with expect.code("NOT_FOUND", snapshot_id):
            client.controller.GetSnapshot(asked)
        with expect.code("NOT_FOUND", snapshot_id):
            client.create(f"restored-{number}", 0, block(), source=source)
    if is_there and is_kept:
        assert node.find() == node.taken
    else:
        with expect.code("FAILED_PRECONDITION" if is_kept else "NOT_FOUND"):
            node.find()
    node.restart()
    assert node.snapshots() == (0 if not is_kept else 1 if second.place == "removed by hand" else 2)


def test_a_copy_of_a_snapshot_that_older_versions_showed_is_completed_first(node: Node) -> None:
    """Versions up to 0.2.0 restored from snapshots of which no tag says one moment."""
    node.client.create("restored", 0, block(), source=of_snapshot(node.ids[0]))
    node.forget_record("carver.committed")
    restored = node.fake.lvm2.groups["a"].volumes["vol-restored"]
    restored.tags = restored.tags - {"carver.state=ready"} | {"carver.state=copying"}
    with pytest.raises(ExceptionGroup) as error:
        node.service.group_snapshotter.resume()
    assert error.group_contains(errors.VolumeInUse)
    with expect.code("ABORTED", "vol-restored is copied from it"):
        node.client.group_snapshot("nightly", node.sources)
    assert node.snapshots() == 2
    node.restart()
    in_background.ended(node.service.copier.jobs)
    assert "carver.state=ready" in node.fake.lvm2.groups["a"].volumes["vol-restored"].tags
    node.service.group_snapshotter.resume()
    assert node.snapshots() == 0


@pytest.mark.parametrize("lost", ["a", "b", "b, replaced by another"])
def test_a_group_snapshot_with_a_part_in_a_lost_group_can_be_deleted(
    node: Node, fake: FakeHost, lost: str
) -> None:
    node.take(lost[0])
    node.away.clear()
    left = [replace(SECOND if lost == "a" else FIRST, default=True)]
    if "replaced" in lost:
        fake.lvm2.add_group("b", [100])
        left.append(SECOND)
    node.restart(*left)
    assert node.snapshots() == 1
    with expect.code("FAILED_PRECONDITION", "1 of its 2"):
        node.find()
    node.delete()
    assert node.snapshots() == 0


def test_a_class_that_leaves_the_configuration_costs_no_snapshot(node: Node) -> None:
    for left in (FIRST, replace(SECOND, default=True)):
        node.restart(left)
        assert node.snapshots() == 2
        assert node.find() == node.taken
    node.delete()
    assert node.snapshots() == 0


def test_a_group_snapshot_of_an_older_version_is_recorded_at_the_next_start(node: Node) -> None:
    node.forget_record(*OLDER)
    node.restart()
    node.service.stop()
    node.remove_second()
    node.restart()
    assert node.snapshots() == 1


def refuse(node: Node) -> None:
    node.fake.lvm2.groups["b"].exported = True


def hang(node: Node) -> None:
    assert isinstance(node.fake.disks, FakeDisks)
    node.fake.disks.hanging.update(one.name for one in node.fake.lvm2.groups["b"].disks)


@pytest.mark.parametrize("is_away", [lambda node: node.take("b"), refuse, hang])
def test_the_status_of_a_move_is_known_whatever_another_group_is(
    bare: Node, is_away: Callable[[Node], None]
) -> None:
    volume = bare.client.create("1", 32 * MIB, block()).volume_id
    is_away(bare)
    request = carver.NameRequest(name="1")
    assert bare.client.stub(TransferStub).MoveStatus(request).volume_id == volume
