"""What is an orphan, and above all what is none."""

import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import api_server
import configured
import pytest
from api_server import (
    CAPACITIES,
    CLAIMS,
    KINDS,
    NODES,
    PODS,
    VOLUMES,
    ApiServer,
    changed,
    hang_up,
    kubeconfig,
    status,
)
from csi_client import Client
from fakes.host import FakeHost
from fakes.kernel import FakeKernel

from agent.cli import status as status_command
from agent.core import errors, ids
from agent.core.host import Host
from agent.core.settings import Config
from agent.csi.client import mounted
from agent.daemon.server import Service
from agent.extras.orphans import command as orphans
from agent.extras.orphans import references
from agent.extras.orphans.candidates import Kind
from agent.extras.orphans.look import Clock, Finder, History, Orphan, OrphanWatch
from agent.extras.orphans.service import Orphans
from lvm import report, volumes
from lvm import volumes as snapshots
from mount import table

MIB = 1 << 20
GRACE = 600
OWN = {"driver": "lvm.csi.carver", "volumeHandle": "x"}
KEY = "topology.lvm.csi.carver/node"


class Node:
    """A machine with Carver and a cluster, a clock that only the test moves, and looks."""

    def __init__(self, directory: Path, api: ApiServer) -> None:
        self.api = api
        self.host = FakeHost(directory)
        self.host.lvm2.add_group("data", [400])
        file = kubeconfig(directory / "kubeconfig", api.url)
        self.config = configured.carver(
            directory, orphan_grace_seconds=GRACE, kubeconfig=file, inline_volume_limit=0
        )
        self.machine = Host(self.host.run, self.host.kernel, self.host.devices, self.host.disks)
        self.service = Service(self.config, self.machine, self.host.lvm)
        self.service.start(self.config.endpoint)
        self.client = Client(self.config.endpoint)
        self.seconds = 0.0
        self.boot = "first"
        api.add(NODES, "here")

    def stop(self) -> None:
        self.client.__exit__(None, None, None)
        self.service.stop()

    def finder(self, config: Config | None = None) -> Finder:
        """One of a process of its own."""
        config = config or self.config
        made = Finder(config, self.host.kernel, status_command.known_to(config, self.machine))
        # Its clock and its patience are the test's.
        clock = Clock(lambda: self.seconds, lambda: self.boot)
        made._history = History(self.config.endpoint.parent / "orphans.json", clock)
        return made

    def look(self) -> list[Orphan]:
        return list(self.finder().look())

    def sure(self) -> dict[str, Kind]:
        """What a look finds that was seen a grace ago, too."""
        return {one.candidate.name: one.candidate.kind for one in self.look() if one.sure}

    def after_a_grace(self) -> dict[str, Kind]:
        """The same, by two looks."""
        self.look()
        self.seconds += GRACE
        return self.sure()

    def delete(self, name: str, *, confirmed: bool = True) -> None:
        finder = self.finder()
        orphans.delete(self.config, self.host.kernel, finder, name, confirmed=confirmed)

    def volume(self, name: str) -> str:
        """A volume that no PersistentVolume names."""
        return self.client.create(name, 4 * MIB, mounted()).volume_id

    def named(self, handle: str, name: str = "pv", **more: object) -> None:
        csi = {"driver": "lvm.csi.carver", "volumeHandle": handle}
        self.api.add(VOLUMES, name, spec={"csi": csi, **more})

    def volumes(self) -> set[str]:
        return set(report.read(self.host.lvm).group("data").volumes)


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with api_server.running(ApiServer()) as made:
        yield made


@pytest.fixture
def node(tmp_path: Path, api: ApiServer) -> Iterator[Node]:
    made = Node(tmp_path, api)
    yield made
    made.stop()


# Volumes


def test_a_volume_that_nothing_names_is_one_at_the_second_sight(node: Node) -> None:
    lost = node.volume("pvc-1")
    [seen] = node.look()
    assert (seen.candidate.name, seen.sure) == (lost, False)
    node.seconds += GRACE - 1
    assert node.sure() == {}
    node.seconds += 1
    assert node.sure() == {lost: Kind.VOLUME}


@pytest.mark.parametrize("driver", ["lvm.csi.carver", "another.name"])
def test_a_volume_that_a_persistent_volume_names_is_none(node: Node, driver: str) -> None:
    csi = {"driver": driver, "volumeHandle": node.volume("by-hand")}
    node.api.add(VOLUMES, "pv", spec={"csi": csi})
    assert node.after_a_grace() == {}


def test_the_name_of_a_persistent_volume_speaks_for_its_volume(node: Node) -> None:
    # As when the group was renamed: then the handle says another id.
    node.volume("pvc-1")
    node.named("old@00000000/vol-pvc-1", "restored")
    assert node.after_a_grace() == {}


def test_a_claim_speaks_for_its_volume(node: Node) -> None:
    claim = node.api.add(CLAIMS, "db", spec={})
    node.volume(f"pvc-{claim['metadata']['uid']}")
    node.volume("chosen")
    node.api.add(CLAIMS, "web", spec={"volumeName": "chosen"})
    assert node.after_a_grace() == {}


def test_a_volume_that_is_named_in_between_begins_anew(node: Node) -> None:
    lost = node.volume("pvc-1")
    node.look()
    node.named(lost)
    node.seconds += GRACE
    assert node.sure() == {}
    node.api.objects[VOLUMES].clear()
    assert node.sure() == {}


def test_a_volume_of_the_same_name_that_is_made_anew_begins_anew(node: Node) -> None:
    lost = node.volume("pvc-1")
    node.look()
    node.client.delete(lost)
    assert node.volume("pvc-1") == lost
    node.seconds += GRACE
    assert node.sure() == {}


def test_what_lacks_carver_s_tags_is_never_one(node: Node) -> None:
    for name, own_tags in (
        ("vol-mine", {}),
        ("others", {"name": "x"}),
        ("vol-2", {"state": "ready"}),
    ):
        volumes.create(node.host.lvm, "data", volumes.New(name, 4 * MIB, own_tags))
    assert node.volumes() == {"vol-mine", "others", "vol-2"}
    assert node.after_a_grace() == {}


def test_a_group_that_is_not_carver_s_is_not_looked_at(node: Node) -> None:
    node.host.lvm2.add_group("other", [100])
    volumes.create(node.host.lvm, "other", volumes.New("vol-x", 4 * MIB, {"name": "x"}))
    assert node.after_a_grace() == {}


def change_state(node: Node, state: str) -> None:
    volumes.mark(node.host.lvm, "data", "vol-pvc-1", old={"state": "ready"}, new={"state": state})


def test_what_is_deleted_and_not_overwritten_is_told_of(node: Node) -> None:
    lost = node.volume("pvc-1")
    change_state(node, "wiping")
    assert node.after_a_grace() == {lost: Kind.WIPING}
    with pytest.raises(errors.NoOrphan, match="docs/operations"):
        node.delete(lost)
    assert node.volumes() == {"vol-pvc-1"}


def test_a_copy_that_nobody_waits_for_is_half_made(node: Node) -> None:
    lost = node.volume("pvc-1")
    change_state(node, "copying")
    assert node.after_a_grace() == {lost: Kind.HALF_MADE}
    node.delete(lost)
    assert node.volumes() == set()


def test_a_bridge_without_its_copy_is_half_made(node: Node) -> None:
    source = node.volume("pvc-1")
    node.named(source)
    own_tags = {"name": "pvc-2", "source": "vol-pvc-1"}
    snapshots.create_snapshot(
        node.host.lvm,
        "data",
        "copy-pvc-2",
        origin="vol-pvc-1",
        size_bytes=4 * MIB,
        own_tags=own_tags,
    )
    name = source.replace("vol-pvc-1", "copy-pvc-2")
    assert node.after_a_grace() == {name: Kind.HALF_MADE}
    with pytest.raises(errors.NoOrphan, match="restart Carver"):
        node.delete(name)
    assert node.volumes() == {"vol-pvc-1", "copy-pvc-2"}


# Inline volumes


def publish_inline(node: Node) -> Path:
    """A volume of the pod that the client of the tests has: its UID is 17."""
    place = node.host.directory / "pods" / "17" / "volumes" / "kubernetes.io~csi" / "tmp" / "mount"
    place.parent.mkdir(parents=True)
    node.client.publish_inline(f"csi-{'ab' * 32}", place, {"size": "4Mi"})
    return place


def test_an_inline_volume_is_one_when_its_pod_is_gone(node: Node) -> None:
    node.api.add(PODS, "web-0", spec={"nodeName": "here"}, metadata={"uid": "17"})
    place = publish_inline(node)
    assert node.after_a_grace() == {}
    node.api.objects[PODS].clear()
    [(name, kind)] = node.after_a_grace().items()
    assert kind is Kind.INLINE
    node.delete(name)
    assert node.volumes() == set()
    assert table.read(node.host.kernel).at(str(place)) == ()


def test_an_inline_volume_that_is_busy_is_kept(node: Node) -> None:
    place = publish_inline(node)
    [name] = node.after_a_grace()
    kernel = node.host.kernel
    assert isinstance(kernel, FakeKernel)
    kernel.busy.add(str(place))
    with pytest.raises(errors.CallRefused):
        node.delete(name)
    assert len(node.volumes()) == 1


def test_a_static_pod_keeps_its_inline_volume(node: Node) -> None:
    about = {"annotations": {"kubernetes.io/config.hash": "17"}}
    node.api.add(PODS, "web-0-here", spec={"nodeName": "here"}, metadata=about)
    publish_inline(node)
    assert node.after_a_grace() == {}


# Places


def staged(node: Node, handle: str, driver: str = "lvm.csi.carver") -> Path:
    """Kubelet's directory for a staged volume."""
    plugins = node.host.directory / "plugins" / "kubernetes.io" / "csi"
    place = plugins / "lvm.csi.carver" / references.digest(handle)
    (place / "globalmount").mkdir(parents=True)
    told = {"driverName": driver, "volumeHandle": handle}
    (place / "vol_data.json").write_text(json.dumps(told))
    return place


def an_id(node: Node, name: str) -> str:
    return node.volume("other").replace("vol-other", name)


def test_a_staging_directory_without_its_volume_is_one(node: Node) -> None:
    node.named(node.volume("other"))
    place = staged(node, an_id(node, "vol-gone"))
    assert node.after_a_grace() == {str(place): Kind.STAGING}
    node.delete(str(place))
    assert not place.exists()


def test_a_staging_directory_that_is_half_removed_is_one(node: Node) -> None:
    node.named(node.volume("other"))
    there, gone = (staged(node, an_id(node, name)) for name in ("vol-other", "vol-gone"))
    for one in (there, gone):
        (one / "vol_data.json").unlink()
    assert node.after_a_grace() == {str(gone): Kind.STAGING}
    node.delete(str(gone))
    assert there.exists()
    assert not gone.exists()


@pytest.mark.parametrize("handle", ["gone@00000000/vol-1", "data@00000000/vol-1"])
def test_a_directory_of_a_volume_in_a_group_that_is_away_proves_nothing(
    node: Node, handle: str
) -> None:
    staged(node, handle)
    assert node.after_a_grace() == {}


def test_a_directory_of_a_volume_that_the_cluster_names_is_none(node: Node) -> None:
    node.named(node.volume("other"))
    handle = an_id(node, "vol-gone")
    node.named(handle, "pvc-gone")
    staged(node, handle)
    assert node.after_a_grace() == {}


def test_another_driver_s_directory_is_none(node: Node) -> None:
    node.named(node.volume("other"))
    staged(node, an_id(node, "vol-gone"), "another.driver")
    (staged(node, an_id(node, "vol-lost")) / "vol_data.json").write_text("{")
    assert node.after_a_grace() == {}


def test_a_directory_with_something_in_it_is_left(node: Node) -> None:
    node.named(node.volume("other"))
    place = staged(node, an_id(node, "vol-gone"))
    (place / "globalmount" / "data").write_text("mine")
    node.after_a_grace()
    with pytest.raises(errors.NoOrphan, match="not empty"):
        node.delete(str(place))
    assert (place / "globalmount" / "data").read_text() == "mine"


@pytest.mark.parametrize("there", [True, False])
def test_a_target_without_its_volume_is_one_when_its_pod_is_gone(node: Node, there: bool) -> None:
    node.named(node.volume("other"))
    pod = node.api.add(PODS, "web", spec={"nodeName": "here" if there else "there"})
    uid = pod["metadata"]["uid"]
    place = node.host.directory / "pods" / uid / "volumes" / "kubernetes.io~csi" / "pvc-1"
    (place / "mount").mkdir(parents=True)
    told = {"driverName": "lvm.csi.carver", "volumeHandle": an_id(node, "vol-gone")}
    (place / "vol_data.json").write_text(json.dumps(told))
    assert node.after_a_grace() == ({} if there else {str(place): Kind.TARGET})
    if not there:
        node.delete(str(place))
        assert not place.exists()


# The cluster's objects


def affinity(*nodes: str) -> dict[str, object]:
    wanted = {"key": KEY, "operator": "In", "values": list(nodes)}
    return {"required": {"nodeSelectorTerms": [{"matchExpressions": [wanted]}]}}


def test_objects_of_nodes_that_are_gone_are_told_of_and_not_touched(node: Node) -> None:
    node.api.add(NODES, "vm-7", metadata={"labels": {KEY: "seven"}})
    for name in ("here", "gone", "seven"):
        topology = {"matchLabels": {KEY: name}}
        about = {"namespace": "carver-system"}
        node.api.add(CAPACITIES, f"csisc-{name}", nodeTopology=topology, metadata=about)
        node.named(f"x@00000000/{name}", f"pv-{name}", nodeAffinity=affinity(name))
    node.api.add(CAPACITIES, "others", nodeTopology={"matchLabels": {"zone": "gone"}})
    spec = {"csi": {"driver": "other", "volumeHandle": "x"}, "nodeAffinity": affinity("gone")}
    node.api.add(VOLUMES, "others", spec=spec)
    assert node.after_a_grace() == {
        "carver-system/csisc-gone": Kind.CAPACITY,
        "pv-gone": Kind.PERSISTENT_VOLUME,
    }
    for name in ("carver-system/csisc-gone", "pv-gone"):
        with pytest.raises(errors.NoOrphan, match="kubectl delete"):
            node.delete(name)
    assert node.api.methods == {"GET"}


def test_objects_of_nodes_with_long_names_are_their_node_s_though_it_lost_its_label(
    node: Node,
) -> None:
    here, there, gone = (f"{one}.{'n' * 63}.{'o' * 63}" for one in ("here", "there", "gone"))
    node.config = replace(node.config, node_id=here)
    node.api.add(NODES, here)
    node.api.add(NODES, there, metadata={"labels": {KEY: ids.node_segment(there)}})
    for name in (here, there, gone):
        place = ids.node_segment(name)
        about = {"namespace": "carver-system"}
        topology = {"matchLabels": {KEY: place}}
        node.api.add(CAPACITIES, f"csisc-{name[:4]}", nodeTopology=topology, metadata=about)
        node.named(f"x@00000000/{name[:4]}", f"pv-{name[:4]}", nodeAffinity=affinity(place))
    assert node.after_a_grace() == {
        "carver-system/csisc-gone": Kind.CAPACITY,
        "pv-gone": Kind.PERSISTENT_VOLUME,
    }


WAITING = {
    "volume.kubernetes.io/selected-node": "gone",
    "volume.kubernetes.io/storage-provisioner": "lvm.csi.carver",
}


def claim(
    node: Node, name: str = "data", phase: str = "Pending", **annotations: str | None
) -> api_server.Object:
    """A claim that waits; `annotations` are others than usual, by what their keys end with."""
    said = {
        key: annotations.get(key.rpartition("/")[2].replace("-", "_"), WAITING[key])
        for key in WAITING
    }
    about = {"namespace": "shop", "annotations": {k: v for k, v in said.items() if v}}
    return node.api.add(CLAIMS, name, metadata=about, status={"phase": phase})


def ready(status: str) -> dict[str, object]:
    others = {"type": "MemoryPressure", "status": "False"}
    return {"conditions": [others, {"type": "Ready", "status": status}]}


@pytest.mark.parametrize("state", ["gone", "False", "Unknown"])
def test_a_claim_that_waits_for_a_node_that_died_is_told_of_with_what_to_do(
    node: Node, state: str
) -> None:
    if state != "gone":
        node.api.add(NODES, "gone", status=ready(state))
    claim(node)
    assert node.after_a_grace() == {"shop/data": Kind.CLAIM}
    [found] = node.look()
    assert found.candidate.about == (
        f"waits for gone, which is {'gone' if state == 'gone' else 'not ready'}"
    )
    with pytest.raises(errors.NoOrphan) as refused:
        node.delete("shop/data")
    command = "kubectl annotate persistentvolumeclaim --namespace shop data"
    assert f"{command} volume.kubernetes.io/selected-node-" in str(refused.value)
    assert node.api.methods == {"GET"}


def test_a_claim_is_no_orphan_that_has_a_volume_or_waits_for_a_node_that_lives(node: Node) -> None:
    node.api.add(NODES, "well", status=ready("True"))
    node.api.add(NODES, "new")
    claim(node, "bound", phase="Bound")
    claim(node, "of-a-living-node", selected_node="well")
    claim(node, "of-a-new-node", selected_node="new")
    claim(node, "of-this-node", selected_node="here")
    claim(node, "not-chosen-yet", selected_node=None)
    claim(node, "of-another-driver", storage_provisioner="other.csi")
    claim(node, "of-no-driver", storage_provisioner=None)
    assert node.after_a_grace() == {}


def test_a_claim_that_another_node_is_chosen_for_or_whose_node_comes_back_begins_anew(
    node: Node,
) -> None:
    claim(node)
    node.look()
    node.seconds += GRACE
    [waiting] = node.api.objects[CLAIMS]
    waiting["metadata"]["annotations"]["volume.kubernetes.io/selected-node"] = "gone too"
    assert node.sure() == {}
    node.api.add(NODES, "gone too", status=ready("True"))
    assert node.look() == []
    node.api.objects[NODES][-1]["status"] = ready("Unknown")
    node.seconds += GRACE
    assert node.sure() == {}
    node.seconds += GRACE
    assert node.sure() == {"shop/data": Kind.CLAIM}


# What proves nothing


@pytest.mark.parametrize("path", KINDS)
@pytest.mark.parametrize(
    "lie",
    [
        status(500),
        status(403),
        hang_up,
        changed(lambda one: one["metadata"].update({"continue": "100.0"})),
        changed(lambda one: one.update(items=None)),
    ],
    ids=["error", "forbidden", "cut off", "more to come", "empty"],
)
def test_one_list_that_is_not_whole_and_nothing_is_an_orphan(
    node: Node, path: str, lie: api_server.Lie
) -> None:
    lost = node.volume("pvc-1")
    node.look()
    node.seconds += GRACE
    node.api.lie(path, *[lie] * 50)
    with pytest.raises(errors.ClusterSilent):
        node.look()
    with pytest.raises(errors.ClusterSilent):
        node.delete(lost)
    assert node.volumes() == {"vol-pvc-1"}
    node.api.lies.clear()
    assert node.sure() == {lost: Kind.VOLUME}


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (VOLUMES, {"spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": 5}}, "csi": OWN}}),
        (
            VOLUMES,
            {
                "spec": {
                    "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": 5}]}},
                    "csi": OWN,
                }
            },
        ),
        (VOLUMES, {"spec": {"claimRef": {"name": "x"}, "csi": OWN}, "metadata": {"name": 5}}),
        (CLAIMS, {"metadata": {"uid": ["x"]}}),
    ],
)
def test_an_object_that_is_not_understood_proves_nothing(
    node: Node, path: str, more: dict[str, object]
) -> None:
    node.volume("pvc-1")
    node.api.add(path, "strange", **more)
    with pytest.raises(errors.ClusterSilent):
        node.look()


def test_a_cluster_without_this_node_is_another_one(node: Node) -> None:
    node.volume("pvc-1")
    node.api.objects[NODES].clear()
    node.api.add(NODES, "there")
    with pytest.raises(errors.ClusterSilent, match="this node, here, is not among them"):
        node.look()


def test_a_server_that_was_put_back_makes_all_new(node: Node) -> None:
    node.volume("pvc-1")
    node.look()
    node.seconds += GRACE
    node.api.version -= 1
    assert node.sure() == {}


def test_a_boot_makes_all_new(node: Node) -> None:
    node.volume("pvc-1")
    node.look()
    node.seconds, node.boot = 10 * GRACE, "second"
    assert node.sure() == {}


def test_many_pages_of_persistent_volumes_speak_for_theirs(node: Node) -> None:
    for number in range(7):
        node.named(node.volume(f"by-hand-{number}"), f"pv-{number}")
    assert node.after_a_grace() == {}


# Deletion


def test_nothing_is_deleted_without_a_yes_or_before_its_time(node: Node) -> None:
    lost = node.volume("pvc-1")
    node.look()
    node.seconds += GRACE - 1
    with pytest.raises(errors.NotConfirmed):
        node.delete(lost, confirmed=False)
    with pytest.raises(errors.NoOrphan, match="counts after 10 min"):
        node.delete(lost)
    node.seconds += 1
    with pytest.raises(errors.NoOrphan, match="it is not an orphan"):
        node.delete("data@00000000/vol-other")
    assert node.volumes() == {"vol-pvc-1"}
    node.delete(lost)
    assert node.volumes() == set()
    with pytest.raises(errors.NoOrphan, match="it is not an orphan"):
        node.delete(lost)


def test_what_is_claimed_at_the_last_moment_is_kept(node: Node) -> None:
    lost = node.volume("pvc-1")
    node.after_a_grace()
    node.named(lost)
    with pytest.raises(errors.NoOrphan):
        node.delete(lost)
    assert node.volumes() == {"vol-pvc-1"}


def test_a_volume_in_use_is_kept(node: Node) -> None:
    made = node.client.create("pvc-1", 4 * MIB, mounted())
    node.client.stage(made, node.host.directory / "staging", mounted())
    node.after_a_grace()
    with pytest.raises(errors.CallRefused, match="in use"):
        node.delete(made.volume_id)
    assert node.volumes() == {"vol-pvc-1"}


def test_without_the_service_nothing_is_deleted(node: Node, tmp_path: Path) -> None:
    config = replace(node.config, endpoint=tmp_path / "other" / "csi.sock")
    with pytest.raises(errors.NotServed):
        orphans.delete(config, node.host.kernel, node.finder(), "x", confirmed=True)


# The service


def test_the_service_counts_the_sure_ones_and_tells_each_once(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    watch = OrphanWatch(lambda: node.finder().look(), 600, clock=lambda: 42.0)
    node.volume("pvc-1")
    watch.task.run_once()
    assert set(watch.counts().values()) == {0}
    node.seconds += GRACE
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            watch.task.run_once()
    assert watch.counts()[Kind.VOLUME] == 1
    assert watch.time_seconds == 42
    assert caplog.text.count("carver orphans --delete") == 1
    assert node.volumes() == {"vol-pvc-1"}


def test_a_look_that_fails_changes_no_count_and_is_told_once(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    now = iter((1.0, 2.0))
    watch = OrphanWatch(lambda: node.finder().look(), 600, clock=lambda: next(now))
    watch.task.run_once()
    node.api.lie(VOLUMES, *[status(403)] * 3)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            watch.task.run_once()
    assert watch.time_seconds == 1
    assert caplog.text.count("cannot look for orphans") == 1
    watch.task.run_once()
    assert watch.time_seconds == 2


def test_nothing_that_a_look_raises_ends_the_looks(caplog: pytest.LogCaptureFixture) -> None:
    problems = iter([RuntimeError("can't start new thread"), KeyError("kind"), MemoryError()])
    enough = threading.Event()

    def look() -> list[Orphan]:
        for problem in problems:
            raise problem
        enough.set()
        return []

    watch = OrphanWatch(look, 0.001)
    watch.task.start()
    assert enough.wait(60)
    watch.task.stop()
    assert caplog.text.count("cannot look for orphans") == 3


def test_a_service_looks_by_itself_where_it_is_told_to(node: Node) -> None:
    assert not isinstance(node.service.extras["orphans"], Orphans)
    config = replace(node.config, orphan_interval_seconds=60)
    service = Service(config, node.machine, node.host.lvm)
    watch = cast(Orphans, service.extras["orphans"]).watch
    watch.task.run_once()
    assert watch.time_seconds > 0
    service.stop()
