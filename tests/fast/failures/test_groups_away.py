"""Group snapshots over several groups, one of which comes late, is lost, or is another by now."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import configured
import expect
import pytest
import serving
from csi_client import Client
from fakes.disks import FakeDisks
from fakes.host import FakeHost
from fakes.lvm import FakeGroup

from agent.core.classes import DeviceClass
from agent.core.settings import Config
from agent.csi.client import block
from agent.daemon.server import Service
from proto import carver_pb2 as carver
from proto import csi_pb2 as csi
from proto.carver_pb2_grpc import TransferStub

MIB = 1 << 20
FIRST, SECOND = DeviceClass("first", "a", default=True), DeviceClass("second", "b")
OLDER = {"carver.committed", "carver.memberGroups"}


@pytest.fixture
def fake(tmp_path: Path) -> FakeHost:
    host = FakeHost(tmp_path)
    for name in ("a", "b"):
        host.lvm2.add_group(name, [100])
    return host


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return configured.carver(tmp_path, kubelet_dir=("/",), classes=(FIRST, SECOND))


class Node:
    """A node whose groups come and go between two starts."""

    def __init__(self, config: Config, fake: FakeHost) -> None:
        self.config, self.fake = config, fake
        self.number = 0
        self.away: dict[str, FakeGroup] = {}

    def start(self, *classes: DeviceClass) -> Client:
        """Another process, of these classes if any are named."""
        self.number += 1
        endpoint = self.config.endpoint.with_name(f"{self.number}.sock")
        changed = replace(self.config, endpoint=endpoint, classes=classes or self.config.classes)
        self.service: Service = serving.start(changed, self.fake)
        return Client(endpoint).__enter__()

    def take(self, name: str) -> None:
        """The group's disks are not there."""
        for one in list(self.fake.lvm2.groups[name].volumes.values()):
            self.fake.deactivate(name, one.name)
        self.away[name] = self.fake.lvm2.groups.pop(name)

    def bring(self, name: str) -> None:
        self.fake.lvm2.groups[name] = self.away.pop(name)

    def snapshots(self) -> int:
        every = (*self.fake.lvm2.groups.values(), *self.away.values())
        return sum(name.startswith("snap") for one in every for name in one.volumes)


@pytest.fixture
def node(config: Config, fake: FakeHost) -> Node:
    return Node(config, fake)


def made(caller: Client) -> csi.VolumeGroupSnapshot:
    sources = [
        caller.create("1", 32 * MIB, block()).volume_id,
        caller.create("2", 32 * MIB, block(), parameters={"class": "second"}).volume_id,
    ]
    return caller.group_snapshot("nightly", sources)


def ids(taken: csi.VolumeGroupSnapshot) -> list[str]:
    return [one.snapshot_id for one in taken.snapshots]


def forget_record(fake: FakeHost, *keys: str) -> None:
    """As a kill before the record leaves it, or an older version."""
    for group in fake.lvm2.groups.values():
        for one in group.volumes.values():
            one.tags = {tag for tag in one.tags if tag.partition("=")[0] not in keys}


@pytest.mark.parametrize("keys", [set(), OLDER], ids=["as it is taken now", "as it once was"])
@pytest.mark.parametrize("late", ["a", "b"])
def test_a_group_that_comes_late_costs_no_snapshot(
    node: Node, fake: FakeHost, late: str, keys: set[str]
) -> None:
    taken = made(node.start())
    forget_record(fake, *keys)
    node.service.stop()
    node.take(late)
    caller = node.start()
    assert node.snapshots() == 2
    with expect.code("FAILED_PRECONDITION", "volume group"):
        caller.find_group_snapshot(taken.group_snapshot_id, ids(taken))
    with expect.code("FAILED_PRECONDITION", "volume group"):
        caller.delete_group_snapshot(taken.group_snapshot_id, ids(taken))
    assert node.snapshots() == 2
    node.bring(late)
    assert caller.find_group_snapshot(taken.group_snapshot_id, ids(taken)) == taken
    node.service.stop()
    caller = node.start()
    assert caller.find_group_snapshot(taken.group_snapshot_id, ids(taken)) == taken
    caller.delete_group_snapshot(taken.group_snapshot_id, ids(taken))
    assert node.snapshots() == 0
    node.service.stop()


def test_what_was_never_taken_to_its_end_is_undone_once_all_groups_are_there(
    node: Node, fake: FakeHost
) -> None:
    caller = node.start()
    taken = made(caller)
    forget_record(fake, "carver.committed")
    fake.lvm("lvremove", "--yes", "--", f"b/{ids(taken)[1].rpartition('/')[2]}")
    node.service.stop()
    node.take("b")
    node.start()
    assert node.snapshots() == 1
    node.service.stop()
    node.bring("b")
    caller = node.start()
    assert node.snapshots() == 0
    with expect.code("NOT_FOUND"):
        caller.find_group_snapshot(taken.group_snapshot_id, ids(taken))
    node.service.stop()


@pytest.mark.parametrize("lost", ["a", "b"])
def test_what_a_lost_group_had_can_be_given_up(node: Node, fake: FakeHost, lost: str) -> None:
    taken = made(node.start())
    node.service.stop()
    node.take(lost)
    node.away.clear()
    left = replace(FIRST, default=True) if lost == "b" else replace(SECOND, default=True)
    caller = node.start(left)
    assert node.snapshots() == 1
    with expect.code("FAILED_PRECONDITION", "1 of its 2"):
        caller.find_group_snapshot(taken.group_snapshot_id, ids(taken))
    caller.delete_group_snapshot(taken.group_snapshot_id, ids(taken))
    assert node.snapshots() == 0
    node.service.stop()


def test_another_group_in_the_place_of_a_lost_one_gives_it_up_too(
    node: Node, fake: FakeHost
) -> None:
    taken = made(node.start())
    node.service.stop()
    node.take("b")
    node.away.clear()
    fake.lvm2.add_group("b", [100])
    caller = node.start()
    assert node.snapshots() == 1
    with expect.code("FAILED_PRECONDITION", "1 of its 2"):
        caller.find_group_snapshot(taken.group_snapshot_id, ids(taken))
    caller.delete_group_snapshot(taken.group_snapshot_id, ids(taken))
    assert node.snapshots() == 0
    node.service.stop()


def test_a_class_that_is_taken_out_of_the_configuration_costs_no_snapshot(
    node: Node, fake: FakeHost
) -> None:
    taken = made(node.start())
    node.service.stop()
    caller = node.start(FIRST)
    assert node.snapshots() == 2
    with expect.code("FAILED_PRECONDITION", "volume group b"):
        caller.delete_group_snapshot(taken.group_snapshot_id, ids(taken))
    node.service.stop()
    caller = node.start()
    assert caller.find_group_snapshot(taken.group_snapshot_id, ids(taken)) == taken
    node.service.stop()


def test_one_of_an_older_version_is_put_on_record_at_the_next_start(
    node: Node, fake: FakeHost
) -> None:
    taken = made(node.start())
    forget_record(fake, *OLDER)
    node.service.stop()
    node.start()
    node.service.stop()
    fake.lvm("lvremove", "--yes", "--", f"b/{ids(taken)[1].rpartition('/')[2]}")
    node.start()
    assert node.snapshots() == 1
    node.service.stop()


def refuse(node: Node) -> None:
    node.fake.lvm2.groups["b"].exported = True


def hang(node: Node) -> None:
    assert isinstance(node.fake.disks, FakeDisks)
    node.fake.disks.hanging.update(one.name for one in node.fake.lvm2.groups["b"].disks)


@pytest.mark.parametrize("is_away", [lambda node: node.take("b"), refuse, hang])
def test_what_moves_or_comes_in_one_group_is_told_of_whatever_another_is(
    node: Node, fake: FakeHost, is_away: Callable[[Node], None]
) -> None:
    caller = node.start()
    volume = caller.create("1", 32 * MIB, block()).volume_id
    is_away(node)
    request = carver.NameRequest(name="1")
    assert caller.stub(TransferStub).MoveStatus(request).volume_id == volume
