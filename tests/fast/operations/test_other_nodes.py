"""What is on another node, or on none: answers with which a scheduler chooses again.

external-provisioner keeps the node that was selected on any code but RESOURCE_EXHAUSTED.
"""

from collections.abc import Callable

import configured
import expect
import pytest
from fakes.host import FakeHost

from agent.csi.client import Client, block, of_snapshot, of_volume
from agent.daemon.server import Service
from agent.settings.classes import DeviceClass
from proto import csi_pb2 as csi

MIB = 1 << 20
pytestmark = [
    pytest.mark.groups(data=[200], other=[200]),
    pytest.mark.settings(
        classes=(
            configured.PLAIN,
            DeviceClass("other", "other"),
            DeviceClass("elsewhere", "nowhere"),
        )
    ),
]


@pytest.mark.parametrize("of", [of_snapshot, of_volume])
@pytest.mark.parametrize("source", ["nowhere@12345678/snap-1", "data@00000000/snap-1"])
def test_source_on_another_node(
    client: Client, source: str, of: Callable[[str], csi.VolumeContentSource], fake: FakeHost
) -> None:
    with expect.code("RESOURCE_EXHAUSTED", source, "not this node's"):
        client.create("pvc-1", 4 * MIB, block(), source=of(source))
    assert not fake.lvm2.groups["data"].volumes


def test_source_that_does_not_exist(client: Client, fake: FakeHost) -> None:
    uuid = fake.lvm2.groups["data"].uuid.replace("-", "")[:8]
    with expect.code("NOT_FOUND", "snap-1"):
        client.create("pvc-1", 4 * MIB, block(), source=of_snapshot(f"data@{uuid}/snap-1"))


def test_class_whose_group_is_not_here(
    client: Client,
) -> None:
    parameters, free = {"class": "elsewhere"}, client.capacity().available_capacity
    # Also for a class of another pool of nodes.
    for absent in (parameters, {"class": "of-other-nodes"}):
        found = client.capacity(absent)
        assert (found.available_capacity, found.maximum_volume_size.value) == (0, 0)
    with expect.code("RESOURCE_EXHAUSTED", "nowhere", "not on this node"):
        client.create("pvc-1", 4 * MIB, block(), parameters=parameters)
    assert client.capacity().available_capacity == free > 0


def test_capacity_without_groups_costs_no_command(
    client: Client, service: Service, fake: FakeHost
) -> None:
    fake.lvm2.groups.clear()
    service.reports.fresh()
    asked = len(fake.commands)
    assert client.capacity().available_capacity == 0
    assert len(fake.commands) == asked
    fake.lvm2.add_group("other", [200])
    service.reports.outdate()
    assert client.capacity({"class": "other"}).available_capacity > 0


def test_incomplete_copy_of_a_missing_group_is_removed(
    client: Client, fake: FakeHost, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = client.create("pvc-1", 8 * MIB, block(), parameters={"class": "other"})
    source = of_snapshot(client.snapshot("1", volume.volume_id).snapshot_id)

    def broken(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(fake.kernel, "copy", broken)
    with expect.code("ABORTED", "Input/output error"):
        client.create("pvc-2", 8 * MIB, block(), source=source)
    gone = fake.lvm2.groups.pop("other")
    with expect.code("RESOURCE_EXHAUSTED", source.snapshot.snapshot_id):
        client.create("pvc-2", 8 * MIB, block(), source=source)
    assert not fake.lvm2.groups["data"].volumes

    # The disks are back, and the same call succeeds.
    fake.lvm2.groups["other"] = gone
    monkeypatch.undo()
    assert client.create("pvc-2", 8 * MIB, block(), source=source).capacity_bytes == 8 * MIB
