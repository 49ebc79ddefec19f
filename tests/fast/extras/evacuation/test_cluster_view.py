"""What a plan is made of is read from the API server and from nodes, in few requests."""

import time
from collections import Counter
from typing import Any

import grpc
import pytest
from api_server import CLAIMS, NODES, PODS, VOLUMES
from evacuating import GIB, Api, Site
from simulated import uuid_of

from agent.core import errors
from agent.extras.controller.nodes import Refused
from agent.extras.evacuation.evacuation_request import BadRequest, Kind, Request
from agent.extras.evacuation.plan import Moving, Room, Volume, plan
from agent.extras.evacuation.scheduling import NodeTerm, PodTerm, Requirement, Taint, Toleration
from proto import carver_pb2 as carver
from proto import csi_pb2 as csi


def test_the_view_has_what_the_nodes_say(site: Site) -> None:
    kept = site.source.snapshot("monday", 1, group="g")
    site.source.snapshot(f"move-{'a' * 12}-{'b' * 8}", 1)
    site.source.moving(2, "node-00002")
    site.source.moving(3, "node-00002", handed_over=True)
    there = f"data@{uuid_of(2)}/vol-pvc-0-2"
    site.nodes[2].moves.moves.add(volume_id=there, received=site.source.handle(2))
    site.nodes[2].moves.classes.add(name="other", pool="hdd", encrypts=True)
    site.nodes[2].forge()
    view = site.view.view("node-00000")
    assert next(iter(view.volumes)) == Volume(site.source.handle(0), GIB, "fast")
    assert {one.volume_id for one in view.volumes} == set(map(site.source.handle, range(4)))
    assert [one.snapshot_id for one in view.snapshots] == [kept]
    assert list(view.moves) == [
        Moving(site.source.handle(2), "node-00002", has_space=True),
        Moving(site.source.handle(3), "node-00002", is_handed_over=True),
    ]
    rooms = {node.name: node.rooms for node in view.nodes}
    assert rooms["node-00001"] == {"fast": Room("data", 100 * GIB, 4 << 20)}
    assert rooms["node-00000"] == {}


@pytest.mark.parametrize("sizes", [(6, 50)])
def test_fifty_volumes_take_few_requests_and_seconds(site: Site, api: Api) -> None:
    for number in range(50):
        api.pod(f"pod-{number:02}", "node-00000", f"claim-{number:02}")
        site.source.snapshot(f"s-{number}", number)
    before = site.requests()
    begun = time.monotonic()
    made = site.view.plan("node-00000")
    seconds = time.monotonic() - begun
    assert len(made.going) == 50
    # Lists of Nodes, PersistentVolumes and claims, and three pages of pods.
    assert Counter(path for path, _ in api.asked) == {NODES: 1, VOLUMES: 1, CLAIMS: 1, PODS: 3}
    # Moves, volumes and snapshots of the node; moves and space of five others.
    assert site.requests() - before == 3 + 5 * 2
    assert seconds < 10


def test_a_node_that_cannot_be_a_target_is_not_asked(site: Site, api: Api) -> None:
    api.found("node-00001")["spec"]["unschedulable"] = True
    before = len(site.nodes[1].requests)
    view = site.view.view("node-00000")
    assert len(site.nodes[1].requests) == before
    assert [node.is_schedulable for node in view.nodes] == [True, False, True]
    # A node that is not named is not asked either, unless a volume moves there.
    api.found("node-00001")["spec"].clear()
    site.view.view("node-00000", ["node-00002"])
    assert len(site.nodes[1].requests) == before
    site.source.moving(0, "node-00001")
    site.view.view("node-00000", ["node-00002"])
    assert len(site.nodes[1].requests) > before


def test_nodes_are_read_as_the_scheduler_reads_them(site: Site, api: Api) -> None:
    spec = {
        "taints": [{"key": "k", "value": "v", "effect": "NoExecute"}, {"key": "l", "effect": "x"}]
    }
    api.found("node-00001")["spec"] = spec
    api.found("node-00002")["status"] = {"conditions": [{"type": "Ready", "status": "Unknown"}]}
    api.add(NODES, "bare")
    api.annotate("node-00001", "{}")
    nodes = {node.name: node for node in site.view.view("node-00000").nodes}
    assert nodes["node-00001"].taints == (Taint("k", "NoExecute", "v"), Taint("l", "x"))
    assert nodes["node-00001"].is_evacuated
    assert nodes["node-00001"].labels["kubernetes.io/hostname"] == "node-00001"
    assert not nodes["node-00002"].is_ready
    assert not nodes["bare"].is_ready
    assert nodes["node-00000"].is_ready
    assert nodes["node-00000"].created == "2026-01-01T00:00:00Z"


def test_pods_are_read_with_all_that_bounds_where_they_run(site: Site, api: Api) -> None:
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    made = api.pod(
        *("p", "node-00000", "claim-00"),
        nodeSelector={"disk": "fast"},
        tolerations=[{"operator": "Exists"}, {"key": "k", "value": "v", "effect": "NoExecute"}],
        topologySpreadConstraints=[
            {"topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"},
            {"topologyKey": "rack", "whenUnsatisfiable": "ScheduleAnyway"},
        ],
        affinity={
            "nodeAffinity": {
                required: {
                    "nodeSelectorTerms": [
                        {
                            "matchExpressions": [{"key": "a", "operator": "Exists"}],
                            "matchFields": [
                                {"key": "metadata.name", "operator": "NotIn", "values": ["x"]}
                            ],
                        }
                    ]
                }
            },
            "podAffinity": {required: [{"topologyKey": "zone"}]},
            "podAntiAffinity": {
                required: [
                    {
                        "topologyKey": "host",
                        "labelSelector": {
                            "matchLabels": {"app": "db"},
                            "matchExpressions": [{"key": "b", "operator": "Exists"}],
                        },
                    },
                    {"topologyKey": "zone", "labelSelector": {}, "namespaces": ["one", "two"]},
                    {"topologyKey": "rack", "namespaceSelector": {}},
                ]
            },
        },
    )
    made["spec"]["volumes"].append({"name": "scratch", "ephemeral": {}})
    made["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    ended = api.pod("ended", "node-00000", "claim-01")
    ended["status"]["phase"] = "Succeeded"
    mirror = api.pod("mirror", "node-00000")
    mirror["metadata"] |= {"annotations": {"kubernetes.io/config.mirror": "x"}}
    mirror["metadata"].pop("ownerReferences")
    pod, static = site.view.view("node-00000").pods
    assert (pod.namespace, pod.name, pod.node, pod.labels) == (
        *("shop", "p", "node-00000"),
        {"app": "db"},
    )
    assert pod.claims == ("claim-00", "p-scratch")
    assert (pod.controller, pod.is_static, pod.is_being_deleted) == ("StatefulSet", False, True)
    assert pod.node_selector == {"disk": "fast"}
    assert pod.tolerations == (
        Toleration(operator="Exists"),
        Toleration("k", "", "v", "NoExecute"),
    )
    name = Requirement("metadata.name", "NotIn", ("x",))
    assert pod.node_affinity == (NodeTerm((Requirement("a", "Exists"),), (name,)),)
    requirements = Requirement("app", "In", ("db",)), Requirement("b", "Exists")
    assert pod.anti_affinity == (
        PodTerm("host", requirements, frozenset({"shop"})),
        PodTerm("zone", (), frozenset({"one", "two"})),
        PodTerm("rack", None, None),
    )
    assert (pod.spread_keys, pod.needs_neighbours) == (("zone",), True)
    assert (static.is_static, static.controller, static.node_affinity) == (True, "", None)


def test_claims_and_persistent_volumes_are_read(site: Site, api: Api) -> None:
    owner = {"kind": "Pod", "name": "p", "uid": "u", "controller": True}
    claims = {one["metadata"]["name"]: one for one in api.objects[CLAIMS]}
    claims["claim-00"]["metadata"]["ownerReferences"] = [owner]
    claims["claim-01"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    claims["claim-02"]["spec"].clear()
    volumes = {one["metadata"]["name"]: one for one in api.objects[VOLUMES]}
    volumes["pv-claim-03"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    volumes["pv-claim-03"]["status"]["phase"] = "Released"
    zonal = api.claimed("disk-1", "network", "node-00000", driver="other")
    api.add(VOLUMES, "nfs", spec={"nfs": {"server": "x"}}, status={"phase": "Bound"})
    view = site.view.view("node-00000")
    found = {claim.name: claim for claim in view.claims}
    assert found["claim-00"].is_of_pod
    assert found["claim-01"].is_being_deleted
    assert found["claim-02"].volume == ""
    own, other = (
        next(one for one in view.persistent_volumes if one.name == name)
        for name in ("pv-claim-03", "pv-network")
    )
    assert (own.handle, own.phase, own.is_being_deleted) == (
        *(site.source.handle(3), "Released"),
        True,
    )
    assert (own.claim_namespace, own.claim_name, own.reclaim_policy) == (
        *("shop", "claim-03"),
        "Delete",
    )
    assert own.affinity == other.affinity
    assert other.handle == ""
    assert zonal
    # One that is for no node, and of another driver, bounds nothing.
    assert "nfs" not in [one.name for one in view.persistent_volumes]


@pytest.mark.parametrize(
    ("path", "change"),
    [
        (PODS, {"spec": None}),
        (PODS, {"metadata": {"labels": "x"}}),
        (VOLUMES, {"spec": {"csi": "x"}}),
        (NODES, {"spec": {"taints": [{}]}}),
        (CLAIMS, {"metadata": {"ownerReferences": ["x"]}}),
    ],
)
def test_an_object_that_cannot_be_parsed_is_an_error(
    site: Site, api: Api, path: str, change: dict[str, Any]
) -> None:
    made = api.add(path, "odd", **change)
    made["metadata"].setdefault("namespace", "shop")
    with pytest.raises(errors.ClusterSilent, match="odd cannot be parsed"):
        site.view.view("node-00000")


def test_requests_are_read_by_one_list(site: Site, api: Api) -> None:
    api.annotate("node-00001", '{"to": ["node-00002"]}')
    api.annotate("node-00000", "stop")
    api.found("node-00000")["spec"]["unschedulable"] = True
    first, second = site.view.requests()
    assert (first.node, first.is_schedulable) == ("node-00000", False)
    assert isinstance(first.request, BadRequest)
    assert (second.node, second.is_schedulable) == ("node-00001", True)
    assert second.request == Request(Kind.EVACUATE, ("node-00002",))
    assert second.uid == api.found("node-00001")["metadata"]["uid"]
    assert [path for path, _ in api.asked] == [NODES]


# Nodes that do not answer, or not the truth


def test_an_unknown_node_and_one_that_does_not_answer_are_errors(site: Site) -> None:
    with pytest.raises(Refused, match="no Carver on a node 'x' is known") as raised:
        site.view.view("x")
    assert raised.value.code is grpc.StatusCode.NOT_FOUND
    site.source.fails["ListVolumes"] = grpc.StatusCode.UNAVAILABLE
    with pytest.raises(Refused, match="node node-00000 does not say what it has: UNAVAILABLE"):
        site.view.view("node-00000")
    site.source.fails["GetPluginInfo"] = grpc.StatusCode.UNAVAILABLE
    site.ask()
    with pytest.raises(Refused, match=r"node node-00000 .* does not answer") as raised:
        site.view.view("node-00000")
    assert raised.value.code is grpc.StatusCode.UNAVAILABLE


def test_a_node_that_serves_no_moves_is_an_error_or_no_target(site: Site) -> None:
    del site.nodes[1].forged["Moves"]
    made = site.view.plan("node-00000", Request(to=("node-00001",)))
    assert "Carver there does not serve moves: set `evacuation` on it" in made.staying[0].reason
    del site.source.forged["Moves"]
    with pytest.raises(Refused, match="does not serve moves: set `evacuation`"):
        site.view.view("node-00000")


def test_a_target_that_fails_is_named_and_the_others_are_planned_with(site: Site) -> None:
    site.nodes[1].fails["GetCapacity"] = grpc.StatusCode.UNAVAILABLE
    view = site.view.view("node-00000")
    assert "does not say how much space it has: UNAVAILABLE" in view.nodes[1].problem
    assert {unit.target for unit in plan(view).going} == {"node-00002"}
    site.nodes[2].fails["GetPluginInfo"] = grpc.StatusCode.UNAVAILABLE
    site.ask()
    made = site.view.plan("node-00000")
    assert "node-00002 does not answer: UNAVAILABLE" in made.staying[0].reason


def lie(**move: Any) -> carver.MovesResponse:
    made = carver.MovesResponse()
    made.moves.add(**{"volume_id": f"data@{uuid_of(0)}/vol-x", **move})
    return made


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"\xff\xff", "it cannot be read"),
        (bytes((1 << 20) + 1), "more than 1048576 bytes"),
        (lie(volume_id="x"), "it is in no volume group of node"),
        (lie(volume_id=f"data@{uuid_of(0)}/snap-x"), "it must be the id of a 'vol'"),
        (lie(volume_id=f"data@{uuid_of(1)}/vol-x"), "it is in no volume group of node"),
        (lie(received="x" * 513), "more than 512 characters"),
        (lie(size_bytes=(8 << 60) + 1), "a volume has at most"),
        (lie(node="a\nb"), "it is not printable"),
        (lie(node="a" * 254), "more than 253 characters"),
        (lie(device_class="\x00"), "it is not printable"),
        (carver.MovesResponse(moves=[*lie().moves, *lie().moves]), "a volume is there twice"),
        (
            carver.MovesResponse(classes=[carver.MoveClass(name=str(n)) for n in range(1001)]),
            "at most 1000",
        ),
        (carver.MovesResponse(classes=[carver.MoveClass(name="a", pool="\n")]), "not printable"),
    ],
)
def test_an_answer_about_moves_that_cannot_be_true_is_refused_and_counted(
    site: Site, answer: carver.MovesResponse | bytes, expected: str
) -> None:
    data = answer if isinstance(answer, bytes) else answer.SerializeToString()
    site.source.forged["Moves"] = data
    with pytest.raises(Refused, match=expected) as raised:
        site.view.view("node-00000")
    assert raised.value.code is grpc.StatusCode.INTERNAL
    node = site.controller.nodes.get("node-00000")
    assert node is not None
    assert node.refused_answers == 1


def test_a_target_that_lies_is_no_target(site: Site) -> None:
    site.nodes[1].forged["Moves"] = lie().SerializeToString()
    view = site.view.view("node-00000")
    assert "of node node-00001 to Moves" in view.nodes[1].problem


def test_a_list_that_does_not_end_is_an_error(site: Site) -> None:
    page = csi.ListVolumesResponse.FromString(site.source.volumes)
    page.next_token = str(1)
    site.source.forged["ListVolumes"] = page.SerializeToString()
    with pytest.raises(Refused, match="cannot pass on the answer of node node-00000"):
        site.view.view("node-00000")
