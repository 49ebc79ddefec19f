"""What the controller finds to be orphans in its cluster, and above all what it does not."""

import json
import re
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import api_server
import clustered
import pytest
from api_server import CAPACITIES, CLAIMS, KINDS, NODES, PODS, VOLUMES, ApiServer, kubeconfig
from clustered import Cluster
from fakes.host import FakeHost

from agent.cli import main as cli
from agent.core import errors
from agent.csi.client import Client, mounted
from agent.extras.controller import controller_process
from agent.extras.controller.controller_metrics import Metrics
from agent.extras.controller.orphans import ClusterFinder
from agent.extras.orphans import orphan_verbs
from agent.extras.orphans.candidates import Kind
from agent.extras.orphans.look import Clock, History
from agent.extras.orphans.orphans_service import Orphans
from agent.settings import settings
from agent.settings.settings import Config
from proto import csi_pb2 as csi

MIB = 1 << 20
GRACE = 600
KEY = "topology.lvm.csi.carver/node"


class Site:
    """Two nodes, their controller, the API server, and a clock that only the test moves."""

    def __init__(self, cluster: Cluster, api: ApiServer) -> None:
        self.cluster, self.api, self.config = cluster, api, cluster.config
        self.seconds = 0.0
        for one in cluster.nodes:
            api.add(NODES, one)

    def finder(self) -> ClusterFinder:
        made = ClusterFinder(self.config)
        clock = Clock(lambda: self.seconds, lambda: "boot")
        made._history = History(self.config.endpoint.parent / "orphans.json", clock)
        return made

    def sure(self) -> dict[str, Kind]:
        found = self.finder().search()
        return {one.candidate.name: one.candidate.kind for one in found if one.is_sure}

    def after_a_grace(self) -> dict[str, Kind]:
        self.finder().search()
        self.seconds += GRACE
        return self.sure()

    def delete(self, name: str, *, confirmed: bool = True) -> None:
        orphan_verbs.delete(self.config, None, self.finder(), name, confirmed=confirmed)

    def volume(self, name: str, node: str = "a") -> str:
        """A volume that no PersistentVolume names."""
        first = csi.Topology(segments=self.cluster.nodes[node].config.here)
        request = csi.CreateVolumeRequest(
            name=name,
            capacity_range=csi.CapacityRange(required_bytes=4 * MIB),
            volume_capabilities=[mounted()],
            accessibility_requirements=csi.TopologyRequirement(preferred=[first]),
        )
        return self.cluster.client.controller.CreateVolume(request).volume.volume_id

    def named(self, handle: str, name: str = "pv", **more: object) -> None:
        csi = {"driver": "lvm.csi.carver", "volumeHandle": handle}
        self.api.add(VOLUMES, name, spec={"csi": csi, **more})

    def volumes(self) -> set[str]:
        return {one for node in self.cluster.nodes.values() for one in node.names()}


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with api_server.running(ApiServer()) as made:
        yield made


@pytest.fixture
def site(api: ApiServer, fake: FakeHost, config: Config, tmp_path: Path) -> Iterator[Site]:
    file = kubeconfig(tmp_path / "kubeconfig", api.url)
    own = replace(config, kubeconfig=file, orphan_grace_seconds=GRACE)
    with clustered.cluster(fake, own, tmp_path) as made:
        yield Site(made, api)


def test_volumes_of_all_nodes_that_nothing_refers_to_are_orphans(site: Site) -> None:
    lost = {site.volume("pvc-1", "a"), site.volume("pvc-2", "b")}
    assert site.sure() == {}
    site.seconds += GRACE - 1
    assert site.sure() == {}
    site.seconds += 1
    assert site.sure() == dict.fromkeys(lost, Kind.VOLUME)
    wheres = {
        one.candidate.description.partition(" bytes on ")[2] for one in site.finder().search()
    }
    assert wheres == {"a", "b"}


def test_volumes_that_are_referred_to_are_no_orphans(site: Site) -> None:
    site.named(site.volume("pvc-1"))
    # As when the group was renamed, and of another driver's name.
    site.volume("pvc-2", "b")
    csi = {"driver": "another.name", "volumeHandle": "old@00000000/vol-pvc-2"}
    site.api.add(VOLUMES, "restored", spec={"csi": csi})
    claim = site.api.add(CLAIMS, "db", spec={})
    site.volume(f"pvc-{claim['metadata']['uid']}")
    # Of a name that is in the volume's id by its digest only.
    long = "n" * 100
    assert long not in site.volume(long, "b")
    site.api.add(CLAIMS, "web", spec={"volumeName": long})
    assert site.after_a_grace() == {}


def test_objects_of_nodes_that_are_gone_are_reported_and_left(site: Site) -> None:
    waits = {
        "volume.kubernetes.io/selected-node": "gone",
        "volume.kubernetes.io/storage-provisioner": "lvm.csi.carver",
    }
    for node in ("a", "gone"):
        wanted = {"key": KEY, "operator": "In", "values": [node]}
        terms = {"nodeSelectorTerms": [{"matchExpressions": [wanted]}]}
        site.named(f"x@00000000/{node}", f"pv-{node}", nodeAffinity={"required": terms})
        topology = {"matchLabels": {KEY: node}}
        about = {"namespace": "carver-system"}
        site.api.add(CAPACITIES, f"csisc-{node}", nodeTopology=topology, metadata=about)
    of_claim = {"namespace": "shop", "annotations": waits}
    site.api.add(CLAIMS, "data", metadata=of_claim, status={"phase": "Pending"})
    assert site.after_a_grace() == {
        "carver-system/csisc-gone": Kind.CAPACITY,
        "pv-gone": Kind.PERSISTENT_VOLUME,
        "shop/data": Kind.CLAIM,
    }
    with pytest.raises(errors.NoOrphan, match="kubectl delete pv pv-gone"):
        site.delete("pv-gone")
    assert site.api.methods == {"GET"}
    # Inline volumes, which pods have, are for the nodes.
    assert PODS not in {path for path, _ in site.api.asked}


def test_of_what_nodes_list_no_more_is_kept_than_a_look_needs(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node may list a hundred thousand volumes and snapshots, each with texts of kilobytes."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0

    class Entry:
        def __init__(self, **fields: Any) -> None:
            vars(self).update(fields)
            alive.add(self)

    def listed(make: Callable[[str], Entry]) -> Iterator[Entry]:
        nonlocal most
        for at in range(100):
            yield make(f"data@abcdefgh/vol-{at}")
            most = max(most, len(alive))

    def volumes(_: Client) -> Iterator[Entry]:
        return listed(lambda one: Entry(volume_id=one, capacity_bytes=1, accessible_topology=[]))

    def snapshots(_: Client) -> Iterator[Entry]:
        return listed(lambda one: Entry(source_volume_id=one))

    monkeypatch.setattr(Client, "every_volume", volumes)
    monkeypatch.setattr(Client, "every_snapshot", snapshots)
    found = site.finder().search()
    assert len(found) == 100
    assert all("with 1 snapshot to be deleted" in one.candidate.description for one in found)
    assert most < 5


# What proves nothing


def refused(site: Site, says: str, lost: str) -> None:
    """A look, and a deletion, end with a sentence; the volume stays."""
    with pytest.raises(errors.ClusterSilent, match=says):
        site.finder().search()
    with pytest.raises(errors.ClusterSilent, match=says):
        site.delete(lost)
    assert "vol-pvc-1" in site.volumes()


@pytest.mark.parametrize("path", sorted(set(KINDS) - {PODS}))
@pytest.mark.parametrize(
    "lie",
    [
        api_server.status(500),
        api_server.status(403),
        api_server.cut_off,
        api_server.changed(lambda one: one["metadata"].update({"continue": "100.0"})),
        api_server.changed(lambda one: one.update(items=None)),
    ],
    ids=["error", "forbidden", "cut off", "more to come", "empty"],
)
def test_a_list_of_the_cluster_s_that_is_not_whole_makes_no_orphan(
    site: Site, path: str, lie: api_server.Lie
) -> None:
    lost = site.volume("pvc-1")
    site.finder().search()
    site.seconds += GRACE
    site.api.lie(path, *[lie] * 50)
    refused(site, "nothing counts as an orphan", lost)
    site.api.lies.clear()
    assert site.sure() == {lost: Kind.VOLUME}


def test_a_node_that_does_not_answer_makes_no_orphan_and_hides_none(site: Site) -> None:
    lost = site.volume("pvc-1", "a")
    site.volume("pvc-2", "b")
    site.finder().search()
    site.seconds += GRACE
    clustered.listener(site.cluster.nodes["b"]).stop()
    site.cluster.ask()
    refused(site, "node b .*does not answer.*nothing counts as an orphan", lost)


@pytest.mark.parametrize("gone", ["a", "b"])
def test_an_api_server_without_one_of_the_nodes_is_refused(site: Site, gone: str) -> None:
    lost = site.volume("pvc-1")
    site.finder().search()
    site.seconds += GRACE
    site.api.objects[NODES][:] = [
        one for one in site.api.objects[NODES] if one["metadata"]["name"] != gone
    ]
    refused(site, f"a node of the controller, {gone}, is not among them", lost)


def test_a_controller_that_knows_no_node_finds_nothing(site: Site) -> None:
    lost = site.volume("pvc-1")
    site.after_a_grace()
    site.cluster.nodes_file.write_text("[nodes]\n")
    site.cluster.loop.run(site.cluster.controller.look())
    refused(site, "the controller knows no node", lost)


def test_the_socket_of_a_node_is_no_controller_s(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.volume("pvc-1")
    site.config = replace(
        site.config, endpoint=next(site.cluster.nodes["a"].directory.glob("*.sock"))
    )
    with pytest.raises(errors.ClusterSilent, match="UNIMPLEMENTED"):
        site.finder().search()
    assert cli.main(["controller", "status", "--endpoint", str(site.config.endpoint)]) == 1
    assert "UNIMPLEMENTED" in capsys.readouterr().err


# Deletion


def test_an_orphan_is_deleted_on_its_node_if_confirmed_and_in_time(site: Site) -> None:
    lost, kept = site.volume("pvc-1", "b"), site.volume("pvc-2", "b")
    site.named(kept)
    site.finder().search()
    site.seconds += GRACE - 1
    with pytest.raises(errors.NotConfirmed):
        site.delete(lost, confirmed=False)
    with pytest.raises(errors.NoOrphan, match="counts after 10 min"):
        site.delete(lost)
    site.seconds += 1
    with pytest.raises(errors.NoOrphan, match="it is not an orphan"):
        site.delete(kept)
    assert site.volumes() == {"vol-pvc-1", "vol-pvc-2"}
    site.delete(lost)
    assert site.volumes() == {"vol-pvc-2"}


def test_a_volume_referred_to_at_the_last_moment_or_in_use_is_kept(site: Site) -> None:
    lost, used = site.volume("pvc-1"), site.volume("pvc-2", "b")
    node = site.cluster.nodes["b"]
    node.client.stage(csi.Volume(volume_id=used), node.directory / "staging", mounted())
    site.after_a_grace()
    site.named(lost)
    with pytest.raises(errors.NoOrphan, match="it is not an orphan"):
        site.delete(lost)
    with pytest.raises(errors.CallRefused, match="in use"):
        site.delete(used)
    assert site.volumes() == {"vol-pvc-1", "vol-pvc-2"}
    node.client.unstage(used, node.directory / "staging")


def test_an_orphan_with_snapshots_says_so_and_is_kept(site: Site) -> None:
    lost = site.volume("pvc-1")
    site.cluster.client.snapshot("snap-1", lost)
    site.after_a_grace()
    [found] = site.finder().search()
    assert found.candidate.description.endswith("with 1 snapshot to be deleted first")
    with pytest.raises(errors.CallRefused, match="snap-1"):
        site.delete(lost)


# As it is typed, and in the service


def test_orphans_are_shown_and_one_is_deleted_by_name(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(settings, "load", lambda *_: site.config)
    lost = site.volume("pvc-1", "b")

    def type_in(*words: str, exit_code: int = 0) -> str:
        ended = cli.main(["controller", "orphans", *words])
        seen = capsys.readouterr()
        assert ended == exit_code, seen.err
        return seen.err if exit_code else seen.out

    assert "--delete" not in type_in()
    assert "cannot delete" in type_in("--delete", lost, "--yes", exit_code=1)
    real = time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda clock: real(clock) + GRACE)
    assert f"carver controller orphans --delete {lost} --yes" in type_in()
    assert "--yes" in type_in("--delete", lost, exit_code=1)
    [found] = json.loads(type_in("--json"))
    assert (found["kind"], found["sure"]) == ("volume", True)
    assert type_in("--delete", lost, "--yes") == f"{lost} is deleted\n"
    assert type_in() == "There are no orphans.\n"


@pytest.mark.parametrize("words", [["--yes"], ["--json"], ["status", "--yes"], ["--delete", "x"]])
def test_its_options_are_refused_without_it(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["controller", *words]) == 1
    assert "`orphans`" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["orphans", "status"])
def test_without_a_controller_nothing_is_asked(
    tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["controller", verb, "--endpoint", str(tmp_path / "none.sock")]) == 1
    assert "no Carver answers at" in capsys.readouterr().err


def test_the_controller_counts_orphans_if_it_is_configured(site: Site) -> None:
    assert list(controller_process.orphan_watch(site.config).gauges()) == []
    made = controller_process.orphan_watch(replace(site.config, orphan_interval_seconds=60))
    assert isinstance(made, Orphans)
    site.volume("pvc-1")
    made.watch.task.run_once()
    text = Metrics(site.cluster.controller.nodes, made.gauges).text().decode()
    assert 'carver_orphans{kind="volume"} 0.0' in text
    assert re.search(r"^carver_orphans_timestamp_seconds \d\.\d+e\+09$", text, re.MULTILINE)
