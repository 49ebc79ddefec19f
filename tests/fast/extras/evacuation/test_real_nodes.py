"""The view of a cluster whose nodes are Carver's services, over TLS."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import clustered
import configured
import histories
import pytest
from clustered import Cluster
from evacuating import Api
from fakes.host import FakeHost
from nodes import SIZE

from agent.extras.evacuation.cluster_view import ClusterView
from agent.extras.evacuation.evacuation_request import Request
from agent.extras.kubernetes.access import Server
from agent.extras.kubernetes.objects import Lists
from agent.settings.settings import DRIVER_NAME


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Cluster]:
    config = replace(configured.carver(tmp_path), evacuation=True)
    with clustered.cluster(FakeHost(tmp_path), config, tmp_path) as made:
        yield made


@pytest.fixture
def view(two: Cluster, api: Api) -> ClusterView:
    for name in ("a", "b"):
        api.node(name)
    lists = Lists(Server("tests", "127.0.0.1", api.port))
    return ClusterView(DRIVER_NAME, two.controller.nodes, lists, two.loop.loop)


def test_each_class_is_planned_for_with_its_size_and_space(
    two: Cluster, view: ClusterView, api: Api
) -> None:
    a = two.nodes["a"]
    for layout in ("linear", "thin", "sealed-linear"):
        volume = a.client.create(layout, SIZE, parameters={"class": layout})
        api.claimed(volume.volume_id, layout, "a")
    kept = a.client.snapshot("monday", volume.volume_id)
    made = view.plan("a")
    assert made.staying == ()
    assert {unit.target for unit in made.going} == {"b"}
    volumes = {one.device_class: one for unit in made.going for one in unit.volumes}
    assert volumes["linear"].size_bytes == volumes["thin"].size_bytes == SIZE
    on_disk = a.service.reports.fresh(a.group).volume(volume.volume_id)
    assert volumes["sealed-linear"].size_bytes == on_disk.size_bytes
    assert volumes["sealed-linear"].snapshots == (kept.snapshot_id,)
    rooms = {node.name: node.rooms for node in view.view("a").nodes}["b"]
    # The classes share a group; a thin class has its pool.
    assert rooms["linear"].pool == rooms["sealed-linear"].pool == two.nodes["b"].group
    assert rooms["thin"].pool.startswith(f"{two.nodes['b'].group}/")
    assert rooms["sealed-linear"].encrypts
    free = two.nodes["b"].client.capacity({"class": "linear"}).maximum_volume_size.value
    assert rooms["linear"].free_bytes == free


def test_a_volume_is_followed_through_its_move(two: Cluster, view: ClusterView, api: Api) -> None:
    a = two.nodes["a"]
    disk = histories.Disk(a.client, a.service, a.host, "linear", "db")
    histories.write_some(disk, random.Random(1))
    volume = api.claimed(disk.id, "db", "a")
    moving = two.controller.moves.move(disk.id, "a", "b", device_class="linear")
    moving.approach()
    (unit,) = view.plan("a", Request(to=("a",))).going
    (planned,) = unit.volumes
    assert (unit.target, unit.is_under_way) == ("b", True)
    assert planned.move is not None
    assert (planned.move.has_space, planned.move.is_handed_over) == (True, False)
    # The snapshots of the move itself do not stay behind.
    assert planned.snapshots == ()
    disk.deactivate()
    assert moving.hand_over()
    (unit,) = view.plan("a").going
    assert unit.volumes[0].move is not None
    assert unit.volumes[0].move.is_handed_over
    moving.complete()
    api.objects["/api/v1/persistentvolumes"].remove(volume)
    made = view.plan("a")
    assert (made.going, made.staying) == ((), ())
    assert [one.volume_id for one in made.moved] == [disk.id]
    # It could come back to what it has left, which has its size.
    [there] = two.nodes["b"].client.volumes()
    api.claimed(there.volume_id, "db", "b")
    (unit,) = view.plan("b").going
    (planned,) = unit.volumes
    left = {node.name: node.left for node in view.view("b").nodes}
    assert [(one.volume_id, one.size_bytes) for one in left["a"]] == [(disk.id, planned.size_bytes)]
    moving.finish()
    assert not any(node.left for node in view.view("b").nodes)
    assert view.plan("a").moved == ()


def test_a_node_without_the_setting_is_no_target(tmp_path: Path, api: Api) -> None:
    with clustered.cluster(FakeHost(tmp_path), configured.carver(tmp_path), tmp_path) as made:
        api.node("a")
        lists = Lists(Server("tests", "127.0.0.1", api.port))
        view = ClusterView(DRIVER_NAME, made.controller.nodes, lists, made.loop.loop)
        with pytest.raises(Exception, match="does not serve moves: set `evacuation` on it"):
            view.view("a")
