"""A node says that it has looked at all its disks only while it knows each group there."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import clustered
import grpc
import pytest
from clustered import Cluster, cluster
from fakes.host import FakeHost
from nodes import Node

from agent.core.ids import VolumeId
from agent.csi.client import block
from agent.extras.controller.controller_service import OtherGroups
from agent.extras.controller.membership import Deleted, Record
from agent.settings.settings import Config
from lvm.disk_reader import Found, Unanswered, Unreadable
from lvm.labels import Damaged, PhysicalLabel

SIZE = 24 << 20


class Gone(Record):
    """PersistentVolumes name node a, whose Node was deleted long ago."""

    forgets = True

    @property
    def members(self) -> frozenset[str]:
        return frozenset({"b"})

    def deleted(self, identity: VolumeId, begun: float) -> Deleted | None:
        return Deleted("a", 0.0)


@pytest.fixture
def two(config: Config, tmp_path: Path) -> Iterator[Cluster]:
    """Nodes `a` and `b`, on machines of their own."""
    hosts = {}
    for number, name in enumerate(("a", "b")):
        (tmp_path / f"host-{name}").mkdir()
        hosts[name] = FakeHost(tmp_path / f"host-{name}", number)
    with cluster(hosts["a"], config, tmp_path, hosts=hosts) as made:
        # lvm2 may see all disks of the machine, also those that come later.
        made.nodes["b"].service.volume_groups.node.devices = ()
        yield made


def fake(node: Node) -> FakeHost:
    return cast(FakeHost, node.host)


def shows(found: Found) -> Callable[[Node, Node], Callable[[], None]]:
    """Have a disk of b say this; what undoes it."""

    def attach(_a: Node, b: Node) -> Callable[[], None]:
        disks: Any = b.host.disks
        true = disks.scan
        disks.scan = lambda *some, **more: {**true(*some, **more), "/dev/sdz": found}
        return lambda: setattr(disks, "scan", true)

    return attach


def of_the_same_name(a: Node, b: Node) -> Callable[[], None]:
    """The disk of a is attached to b, whose own group has that name, too."""
    here = fake(b).lvm2
    true, twin = fake(a).lvm2.groups[a.group], here.add_group("twin", [60])
    twin.name, twin.uuid, twin.tags, twin.volumes = b.group, true.uuid, true.tags, true.volumes

    def detach() -> None:
        del here.groups["twin"]

    return detach


# What makes that b does not know all groups on its disks.
ATTACHED = {
    "of the same name": of_the_same_name,
    "unreadable": shows(Unreadable("Input/output error")),
    "silent": shows(Unanswered()),
    "a damaged label": shows(Damaged("wrong checksum")),
    "no metadata": shows(PhysicalLabel("9", SIZE, True, None)),
}


def look(two: Cluster) -> bool:
    """Have b look at its disks; whether it says then that it has looked at all."""
    listener = clustered.listener(two.nodes["b"])
    problem = ""
    try:
        listener.find_other_groups()
    except OtherGroups as error:
        problem = str(error)
    two.ask()
    node = two.controller.nodes.get("b")
    assert node is not None
    assert node.is_whole is not bool(problem)
    return bool(node.is_whole)


@pytest.mark.parametrize("attach", ATTACHED.values(), ids=ATTACHED)
def test_each_look_says_anew_whether_all_groups_are_known(
    two: Cluster, attach: Callable[[Node, Node], Callable[[], None]]
) -> None:
    a, b = two.nodes["a"], two.nodes["b"]
    a.client.create("pvc-1", SIZE, block())
    assert look(two)
    detach = attach(a, b)
    assert not look(two)
    detach()
    assert look(two)


def test_a_node_that_cannot_look_at_its_disks_does_not_say_that_it_has(
    two: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_some: object, **_more: object) -> None:
        raise OSError("no sysfs")

    assert look(two)
    monkeypatch.setattr(two.nodes["b"].host.disks, "scan", fails)
    with pytest.raises(OSError, match="no sysfs"):
        look(two)
    two.ask()
    node = two.controller.nodes.get("b")
    assert node is not None
    assert node.is_whole is False


def test_a_node_with_groups_of_its_operator_and_of_guests_knows_all(two: Cluster) -> None:
    b = two.nodes["b"]
    fake(b).lvm2.add_group("root", [60])
    b.client.create("pvc-2", SIZE, block())
    assert look(two)


@pytest.mark.parametrize("attach", ATTACHED.values(), ids=ATTACHED)
def test_nothing_is_forgotten_whose_disk_may_be_attached_to_a_member(
    two: Cluster, attach: Callable[[Node, Node], Callable[[], None]]
) -> None:
    a, b = two.nodes["a"], two.nodes["b"]
    volume = a.client.create("pvc-1", SIZE, block())
    detach = attach(a, b)
    clustered.listener(a).stop()
    two.record = Gone()
    two.write_nodes("b")
    two.restart()
    assert not look(two)
    with pytest.raises(grpc.RpcError) as raised:
        two.client.delete(volume.volume_id)
    error: grpc.Call = raised.value  # type: ignore[assignment]
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "nodes that have not looked at all their disks: b" in error.details()
    detach()
    assert look(two)
    two.client.delete(volume.volume_id)
