"""What is an orphan, and above all what is not."""

import json
import logging
import time
from collections.abc import Callable, Iterator
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

from agent.cli import main as cli
from agent.cli import status as status_command
from agent.core import errors, ids
from agent.csi.client import mounted
from agent.daemon.host import Host
from agent.daemon.server import Service
from agent.extras.orphans import orphan_verbs as orphans
from agent.extras.orphans import references
from agent.extras.orphans.candidates import Kind
from agent.extras.orphans.look import Clock, Finder, History, Orphan, OrphanWatch
from agent.extras.orphans.orphans_service import Orphans
from agent.extras.transfer.move import digest_of
from agent.settings import settings
from agent.settings.configuration import Configuration
from agent.settings.settings import Config
from agent.volumes.reports import Reports
from lvm import report, volumes
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
        made = Finder(
            Configuration(config),
            self.host.kernel,
            Reports(status_command.volume_groups(config, self.machine)),
        )
        # Its clock and its patience are the test's.
        clock = Clock(lambda: self.seconds, lambda: self.boot)
        made._history = History(self.config.endpoint.parent / "orphans.json", clock)
        return made

    def look(self) -> list[Orphan]:
        return list(self.finder().search())

    def sure(self) -> dict[str, Kind]:
        """What a look finds that was seen a grace ago, too."""
        return {one.candidate.name: one.candidate.kind for one in self.look() if one.is_sure}

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


def test_an_unreferenced_volume_is_an_orphan_after_the_grace_period(node: Node) -> None:
    lost = node.volume("pvc-1")
    [seen] = node.look()
    assert (seen.candidate.name, seen.is_sure) == (lost, False)
    node.seconds += GRACE - 1
    assert node.sure() == {}
    node.seconds += 1
    assert node.sure() == {lost: Kind.VOLUME}


def test_a_recreated_volume_of_the_same_name_starts_again(node: Node) -> None:
    lost = node.volume("pvc-1")
    node.look()
    node.client.delete(lost)
    assert node.volume("pvc-1") == lost
    node.seconds += GRACE
    assert node.sure() == {}


def test_volumes_that_are_referenced_or_not_carver_s_are_no_orphans(node: Node) -> None:
    for driver in ("lvm.csi.carver", "another.name"):
        csi = {"driver": driver, "volumeHandle": node.volume(f"of-{driver}")}
        node.api.add(VOLUMES, f"pv-{driver}", spec={"csi": csi})
    # As when the group was renamed: then the handle says another id.
    node.volume("pvc-1")
    node.named("old@00000000/vol-pvc-1", "restored")
    claim = node.api.add(CLAIMS, "db", spec={})
    node.volume(f"pvc-{claim['metadata']['uid']}")
    node.volume("chosen")
    node.api.add(CLAIMS, "web", spec={"volumeName": "chosen"})
    rows = {"vol-mine": {}, "others": {"name": "x"}, "vol-2": {"state": "ready"}}
    for name, own_tags in rows.items():
        volumes.create(node.host.lvm, "data", volumes.New(name, 4 * MIB, own_tags))
    node.host.lvm2.add_group("other", [100])
    volumes.create(node.host.lvm, "other", volumes.New("vol-x", 4 * MIB, {"name": "x"}))
    assert len(node.volumes()) == 8
    assert node.after_a_grace() == {}


def change_state(node: Node, state: str) -> None:
    # A copy of nothing: without a source it would be one whose tags were lost.
    new = {"state": state, **({"zero": "fully"} if state == "copying" else {})}
    volumes.mark(node.host.lvm, "data", "vol-pvc-1", old_tags={"state": "ready"}, new_tags=new)


def test_a_deleted_volume_that_is_not_erased_is_reported(node: Node) -> None:
    lost = node.volume("pvc-1")
    change_state(node, "wiping")
    assert node.after_a_grace() == {lost: Kind.WIPING}
    with pytest.raises(errors.NoOrphan, match="docs/operations"):
        node.delete(lost)
    assert node.volumes() == {"vol-pvc-1"}


# Tags of a volume that moves, or has moved, or is received; by the kind of an orphan, if it is one.
WORD, OTHER_WORD = "secret", "another"
OF_MOVES: dict[str, tuple[Kind | None, dict[str, str]]] = {
    "moves": (Kind.MOVING, {"state": "ready", "moveTo": "b", "moveWord": WORD}),
    "has moved": (Kind.MOVED, {"state": "moved", "moveTo": "b", "moveWord": WORD}),
    "comes by a move": (
        Kind.RECEIVING,
        {"state": "receiving", "received": "data@00000002/vol-was", "release": digest_of(WORD)},
    ),
    "came by a move": (
        Kind.VOLUME,
        {"state": "ready", "received": "data@00000002/vol-was", "released": WORD},
    ),
    "was restored from a stream": (
        Kind.VOLUME,
        {"state": "ready", "received": "data@00000002/vol-was"},
    ),
    "is kept up to date by streams": (
        None,
        {"state": "receiving", "received": "data@00000002/vol-was", "chain": "a"},
    ),
}


def retag(node: Node, old_tags: dict[str, str], new_tags: dict[str, str]) -> None:
    volumes.mark(node.host.lvm, "data", "vol-pvc-1", old_tags=old_tags, new_tags=new_tags)


@pytest.mark.parametrize("what", OF_MOVES)
@pytest.mark.parametrize("named", ["", "data@00000001/vol-pvc-1", "data@00000002/vol-was"])
def test_what_a_move_leaves_is_an_orphan_if_no_object_names_the_volume_on_any_node(
    node: Node, named: str, what: str
) -> None:
    kind, new_tags = OF_MOVES[what]
    volume = node.volume("pvc-1")
    retag(node, {"state": "ready"}, new_tags)
    if named:
        node.named(named, "pvc-1-moved" if "pvc" in named else "was")
    is_by_move = {"release", "released"} & new_tags.keys()
    is_named = "pvc" in named or bool("was" in named and is_by_move)
    expected = {} if is_named or kind is None else {volume: kind}
    assert node.after_a_grace() == expected
    # The remedy of one that moves is the end of its move.
    if expected and kind is Kind.MOVING:
        [found] = node.look()
        assert found.candidate.full_remedy.startswith(f"carver volume move {volume} --undo")
        with pytest.raises(errors.NoOrphan, match="--undo"):
            node.delete(volume)
    elif expected:
        node.delete(volume)
    else:
        with pytest.raises(errors.NoOrphan):
            node.delete(volume)
    is_deleted = bool(expected) and kind is not Kind.MOVING
    assert node.volumes() == (set() if is_deleted else {"vol-pvc-1"})


@pytest.mark.parametrize("what", ["has moved", "comes by a move"])
def test_what_another_move_has_left_since_is_not_deleted(node: Node, what: str) -> None:
    volume = node.volume("pvc-1")
    retag(node, {"state": "ready"}, OF_MOVES[what][1])
    assert node.after_a_grace() == {volume: OF_MOVES[what][0]}
    key, old, new = (
        ("moveWord", WORD, OTHER_WORD)
        if what == "has moved"
        else ("release", digest_of(WORD), digest_of(OTHER_WORD))
    )

    class Finding:
        """A search right after which another move begins."""

        def search(self) -> list[Orphan]:
            found = node.look()
            retag(node, {key: old}, {key: new})
            return found

    with pytest.raises(errors.CallRefused, match="another move"):
        orphans.delete(node.config, node.host.kernel, Finding(), volume, confirmed=True)
    assert node.volumes() == {"vol-pvc-1"}


def test_what_is_left_of_a_volume_is_kept_while_it_has_snapshots(node: Node) -> None:
    volume = node.volume("pvc-1")
    node.client.snapshot("monday", volume)
    retag(node, {"state": "ready"}, OF_MOVES["has moved"][1])
    assert node.after_a_grace() == {volume: Kind.MOVED}
    with pytest.raises(errors.CallRefused, match="snap-monday"):
        node.delete(volume)
    assert "vol-pvc-1" in node.volumes()


def test_an_unreferenced_copy_is_half_made(node: Node) -> None:
    lost = node.volume("pvc-1")
    change_state(node, "copying")
    assert node.after_a_grace() == {lost: Kind.HALF_MADE}
    node.delete(lost)
    assert node.volumes() == set()


def test_a_bridge_without_its_copy_is_half_made(node: Node) -> None:
    source = node.volume("pvc-1")
    node.named(source)
    volumes.create_snapshot(
        *(node.host.lvm, "data", "copy-pvc-2"),
        origin="vol-pvc-1",
        size_bytes=4 * MIB,
        own_tags={"name": "pvc-2", "source": "vol-pvc-1"},
    )
    name = source.replace("vol-pvc-1", "copy-pvc-2")
    assert node.after_a_grace() == {name: Kind.HALF_MADE}
    with pytest.raises(errors.NoOrphan, match="restart Carver"):
        node.delete(name)
    assert node.volumes() == {"vol-pvc-1", "copy-pvc-2"}


def test_a_bridge_whose_copy_may_be_in_a_group_that_does_not_answer_is_no_orphan(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = node.volume("pvc-1")
    node.named(source)
    volumes.create_snapshot(
        *(node.host.lvm, "data", "copy-pvc-2"),
        origin="vol-pvc-1",
        size_bytes=4 * MIB,
        own_tags={"name": "pvc-2", "source": "vol-pvc-1", "copy": "other@01234567/vol-pvc-2"},
    )
    everywhere, silent = Reports.every_group, {"other"}
    monkeypatch.setattr(
        Reports,
        "every_group",
        lambda own, known: replace(everywhere(own, known), silent=frozenset(silent)),
    )
    assert node.after_a_grace() == {}
    # Another group that does not answer cannot have it.
    silent |= {"third"}
    silent.remove("other")
    name = source.replace("vol-pvc-1", "copy-pvc-2")
    assert node.after_a_grace() == {name: Kind.HALF_MADE}


# Inline volumes


def publish_inline(node: Node) -> Path:
    """A volume of the pod that the client of the tests has: its UID is 17."""
    place = node.host.directory / "pods" / "17" / "volumes" / "kubernetes.io~csi" / "tmp" / "mount"
    place.parent.mkdir(parents=True)
    node.client.publish_inline(f"csi-{'ab' * 32}", place, {"size": "4Mi"})
    return place


def test_an_inline_volume_is_an_orphan_when_its_pod_is_gone(node: Node) -> None:
    node.api.add(PODS, "web-0", spec={"nodeName": "here"}, metadata={"uid": "17"})
    place = publish_inline(node)
    assert node.after_a_grace() == {}
    node.api.objects[PODS].clear()
    [(name, kind)] = node.after_a_grace().items()
    assert kind is Kind.INLINE
    node.delete(name)
    assert node.volumes() == set()
    assert table.read(node.host.kernel).at(str(place)) == ()


def test_a_busy_inline_volume_is_kept(node: Node) -> None:
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


def directory(place: Path, inside: str, handle: str, driver: str = OWN["driver"]) -> Path:
    """Make kubelet's directory of a volume."""
    (place / inside).mkdir(parents=True)
    data = {"driverName": driver, "volumeHandle": handle}
    (place / "vol_data.json").write_text(json.dumps(data))
    return place


def staged(node: Node, handle: str, driver: str = OWN["driver"]) -> Path:
    plugins = node.host.directory / "plugins" / "kubernetes.io" / "csi"
    place = plugins / OWN["driver"] / references.digest(handle)
    return directory(place, "globalmount", handle, driver)


def an_id(node: Node, name: str) -> str:
    return node.volume("other").replace("vol-other", name)


def test_a_staging_directory_without_its_volume_is_an_orphan(node: Node) -> None:
    node.named(node.volume("other"))
    place = staged(node, an_id(node, "vol-gone"))
    assert node.after_a_grace() == {str(place): Kind.STAGING}
    node.delete(str(place))
    assert not place.exists()


def test_a_half_removed_staging_directory_is_an_orphan(node: Node) -> None:
    node.named(node.volume("other"))
    there, gone = (staged(node, an_id(node, name)) for name in ("vol-other", "vol-gone"))
    for one in (there, gone):
        (one / "vol_data.json").unlink()
    assert node.after_a_grace() == {str(gone): Kind.STAGING}
    node.delete(str(gone))
    assert there.exists()
    assert not gone.exists()


def test_directories_that_are_no_orphans(node: Node) -> None:
    node.named(node.volume("other"))
    # Of groups that are missing.
    staged(node, "gone@00000000/vol-1")
    staged(node, "data@00000000/vol-1")
    referenced = an_id(node, "vol-referenced")
    node.named(referenced, "pvc-referenced")
    staged(node, referenced)
    staged(node, an_id(node, "vol-gone"), "another.driver")
    (staged(node, an_id(node, "vol-lost")) / "vol_data.json").write_text("{")
    assert node.after_a_grace() == {}


def test_a_directory_that_is_not_empty_is_left(node: Node) -> None:
    node.named(node.volume("other"))
    place = staged(node, an_id(node, "vol-gone"))
    (place / "globalmount" / "data").write_text("mine")
    node.after_a_grace()
    with pytest.raises(errors.NoOrphan, match="not empty"):
        node.delete(str(place))
    assert (place / "globalmount" / "data").read_text() == "mine"


@pytest.mark.parametrize("there", [True, False])
def test_a_target_without_volume_and_pod_is_an_orphan(node: Node, there: bool) -> None:
    node.named(node.volume("other"))
    pod = node.api.add(PODS, "web", spec={"nodeName": "here" if there else "there"})
    uid = pod["metadata"]["uid"]
    place = node.host.directory / "pods" / uid / "volumes" / "kubernetes.io~csi" / "pvc-1"
    directory(place, "mount", an_id(node, "vol-gone"))
    assert node.after_a_grace() == ({} if there else {str(place): Kind.TARGET})
    if not there:
        node.delete(str(place))
        assert not place.exists()


# The cluster's objects


def affinity(*nodes: str) -> dict[str, object]:
    wanted = {"key": KEY, "operator": "In", "values": list(nodes)}
    return {"required": {"nodeSelectorTerms": [{"matchExpressions": [wanted]}]}}


OF_GONE = {"carver-system/csisc-gone": Kind.CAPACITY, "pv-gone": Kind.PERSISTENT_VOLUME}


def add_objects(node: Node, name: str, segment: str) -> None:
    """Add a node's CSIStorageCapacity and a PersistentVolume for it."""
    topology, about = {"matchLabels": {KEY: segment}}, {"namespace": "carver-system"}
    node.api.add(CAPACITIES, f"csisc-{name}", nodeTopology=topology, metadata=about)
    node.named(f"x@00000000/{name}", f"pv-{name}", nodeAffinity=affinity(segment))


def test_objects_of_nodes_that_are_gone_are_reported_and_left(node: Node) -> None:
    node.api.add(NODES, "vm-7", metadata={"labels": {KEY: "seven"}})
    for name in ("here", "gone", "seven"):
        add_objects(node, name, name)
    node.api.add(CAPACITIES, "others", nodeTopology={"matchLabels": {"zone": "gone"}})
    spec = {"csi": {"driver": "other", "volumeHandle": "x"}, "nodeAffinity": affinity("gone")}
    node.api.add(VOLUMES, "others", spec=spec)
    assert node.after_a_grace() == OF_GONE
    for name in OF_GONE:
        with pytest.raises(errors.NoOrphan, match="kubectl delete"):
            node.delete(name)
    assert node.api.methods == {"GET"}


def test_objects_belong_to_nodes_with_long_names(
    node: Node,
) -> None:
    here, there, gone = (f"{one}.{'n' * 63}.{'o' * 63}" for one in ("here", "there", "gone"))
    node.config = replace(node.config, node_id=here)
    node.api.add(NODES, here)
    node.api.add(NODES, there, metadata={"labels": {KEY: ids.node_segment(there)}})
    for name in (here, there, gone):
        add_objects(node, name[:4], ids.node_segment(name))
    assert node.after_a_grace() == OF_GONE


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
def test_a_claim_that_waits_for_a_dead_node_is_reported_with_a_remedy(
    node: Node, state: str
) -> None:
    if state != "gone":
        node.api.add(NODES, "gone", status=ready(state))
    claim(node)
    assert node.after_a_grace() == {"shop/data": Kind.CLAIM}
    [found] = node.look()
    assert found.candidate.description == (
        f"waits for gone, which is {'gone' if state == 'gone' else 'not ready'}"
    )
    with pytest.raises(errors.NoOrphan) as refused:
        node.delete("shop/data")
    command = "kubectl annotate persistentvolumeclaim --namespace shop data"
    assert f"{command} volume.kubernetes.io/selected-node-" in str(refused.value)
    assert node.api.methods == {"GET"}


def test_other_claims_are_no_orphans(node: Node) -> None:
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


def test_a_claim_starts_again_when_its_node_changes_or_returns(
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
def test_nothing_is_an_orphan_when_one_list_is_incomplete(
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


MALFORMED_TERMS = {"nodeSelectorTerms": [{"matchExpressions": 5}]}


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (VOLUMES, {"spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": 5}}, "csi": OWN}}),
        (VOLUMES, {"spec": {"nodeAffinity": {"required": MALFORMED_TERMS}, "csi": OWN}}),
        (VOLUMES, {"spec": {"claimRef": {"name": "x"}, "csi": OWN}, "metadata": {"name": 5}}),
        (CLAIMS, {"metadata": {"uid": ["x"]}}),
    ],
)
def test_a_malformed_object_is_an_error(node: Node, path: str, more: dict[str, object]) -> None:
    node.volume("pvc-1")
    node.api.add(path, "strange", **more)
    with pytest.raises(errors.ClusterSilent):
        node.look()


def test_a_cluster_without_this_node_is_refused(node: Node) -> None:
    node.volume("pvc-1")
    node.api.objects[NODES].clear()
    node.api.add(NODES, "there")
    with pytest.raises(errors.ClusterSilent, match="this node, here, is not among them"):
        node.look()


def test_a_restored_server_starts_all_again(node: Node) -> None:
    node.volume("pvc-1")
    node.look()
    node.seconds += GRACE
    node.api.version -= 1
    assert node.sure() == {}


# Deletion


def test_nothing_is_deleted_without_confirmation_or_too_early(node: Node) -> None:
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


def test_a_volume_referenced_at_the_last_moment_is_kept(node: Node) -> None:
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


def test_the_service_counts_sure_orphans_and_logs_each_once(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    watch = OrphanWatch(lambda: node.finder().search(), 600, clock=lambda: 42.0)
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


def test_a_failed_look_changes_no_count_and_is_logged_once(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    now = iter((1.0, 2.0))
    watch = OrphanWatch(lambda: node.finder().search(), 600, clock=lambda: next(now))
    watch.task.run_once()
    node.api.lie(VOLUMES, *[status(403)] * 3)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            watch.task.run_once()
    assert watch.time_seconds == 1
    assert caplog.text.count("cannot look for orphans") == 1
    watch.task.run_once()
    assert watch.time_seconds == 2


def test_a_service_looks_periodically_if_configured(node: Node) -> None:
    assert not isinstance(node.service.extras["orphans"], Orphans)
    config = replace(node.config, orphan_interval_seconds=60)
    service = Service(config, node.machine, node.host.lvm)
    watch = cast(Orphans, service.extras["orphans"]).watch
    watch.task.run_once()
    assert watch.time_seconds > 0
    service.stop()


# `carver orphans`, as it is typed

Shell = Callable[..., str]


@pytest.fixture
def volume(node: Node, monkeypatch: pytest.MonkeyPatch) -> str:
    """A volume that nothing refers to."""
    monkeypatch.setattr("agent.daemon.host.this_host", lambda _settings: node.machine)
    monkeypatch.setattr(settings, "load", lambda *_: node.config)
    return node.volume("pvc-1")


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    def type_in(*words: str, exit_code: int = 0) -> str:
        ended = cli.main(["orphans", *words])
        seen = capsys.readouterr()
        assert ended == exit_code, seen.err
        return seen.err if exit_code else seen.out

    return type_in


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets so many seconds go by."""

    def go_on(seconds: float) -> None:
        real = time.clock_gettime
        monkeypatch.setattr(time, "clock_gettime", lambda clock: real(clock) + seconds)

    return go_on


def test_orphans_are_shown_and_one_is_deleted_by_name(
    shell: Shell, volume: str, later: Callable[[float], None]
) -> None:
    shown = shell()
    assert "wait" in shown
    assert "--delete" not in shown
    assert "10 min" in shown
    assert "cannot delete" in shell("--delete", volume, "--yes", exit_code=1)
    later(7500)
    shown = shell()
    assert "2 h 5 min" in shown
    assert f"carver orphans --delete {volume} --yes" in shown
    assert "--yes" in shell("--delete", volume, exit_code=1)
    [found] = json.loads(shell("--json"))
    assert found["kind"] == "volume"
    assert found["sure"]
    assert found["seen_seconds"] >= 7500
    assert shell("--delete", volume, "--yes") == f"{volume} is deleted\n"
    assert shell() == "There are no orphans.\n"


def test_a_cluster_that_refuses_is_a_failure(shell: Shell, volume: str, api: ApiServer) -> None:
    api.lie(VOLUMES, status(403))
    assert "nothing counts as an orphan" in shell(exit_code=1)
    api.objects[NODES].clear()
    assert "this node, here, is not among them" in shell("--json", exit_code=1)


def test_a_grace_period_below_a_minute_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["orphans", "--orphan-grace-seconds", "59"]) == 1
    assert "60 seconds or more" in capsys.readouterr().err
    assert cli.main(["orphans", "--kubeconfig", "relative"]) == 1
    assert "an absolute path" in capsys.readouterr().err
