"""The plan of an evacuation: what goes where, what stays and why."""

import random
import re
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from evacuated import GIB, HOSTNAME, SOURCE, Cluster, handle, node
from hypothesis import given
from hypothesis import strategies as st

from agent.extras.evacuation import plan as planning
from agent.extras.evacuation import scheduling
from agent.extras.evacuation.plan import (
    Claim,
    Moving,
    Node,
    PersistentVolume,
    Plan,
    Room,
    Snapshot,
    Unit,
    Volume,
    plan,
)
from agent.extras.evacuation.scheduling import NodeTerm, PodTerm, Requirement, Taint, Toleration


@pytest.fixture
def cluster() -> Cluster:
    """A node that is to be evacuated, and two others."""
    return Cluster([node(SOURCE), node("a", created="2026-01-01"), node("b", created="2026-01-02")])


def targets(made: Plan) -> dict[str, str]:
    """The targets of the volumes that go, by their names."""
    return {
        one.volume_id.rpartition("/vol-")[2]: unit.target
        for unit in made.going
        for one in unit.volumes
    }


def reason(made: Plan, name: str) -> str:
    """Why a volume stays."""
    (found,) = [
        unit.reason
        for unit in made.staying
        if handle(name) in [one.volume_id for one in unit.volumes]
    ]
    return found


# Units


def test_volumes_of_one_pod_go_together_and_so_do_those_that_it_shares(cluster: Cluster) -> None:
    for name in ("one", "two", "three", "four"):
        cluster.volume(name)
    cluster.pod("p", "one", "two")
    cluster.pod("q", "two", "three")
    first, second = plan(cluster.view).going
    assert [one.volume_id for one in first.volumes] == [handle("four")]
    assert [one.volume_id for one in second.volumes] == list(map(handle, ("one", "three", "two")))
    assert [one.name for one in second.pods] == ["p", "q"]
    assert second.name == handle("one")


def test_a_pod_that_has_ended_uses_nothing(cluster: Cluster) -> None:
    cluster.volume("one")
    cluster.volume("two")
    cluster.pod("p", "one", "two", is_finished=True, controller="")
    assert len(plan(cluster.view).going) == 2


def test_members_of_a_group_snapshot_go_together_and_leave_it_behind(cluster: Cluster) -> None:
    cluster.volume("one")
    cluster.volume("two")
    cluster.snapshots = [
        Snapshot("s1", handle("one"), "group"),
        Snapshot("s2", handle("two"), "group"),
        Snapshot("s3", handle("two")),
    ]
    (unit,) = plan(cluster.view).going
    assert [one.snapshots for one in unit.volumes] == [("s1",), ("s2", "s3")]
    assert [re.sub(";.*", "", note) for note in unit.notes] == [
        "snapshots of shop/one stay on source: s1",
        "snapshots of shop/two stay on source: s2, s3",
    ]


def test_units_that_no_pod_uses_go_first_then_the_smaller_ones(cluster: Cluster) -> None:
    for name, gib in (("large", 9), ("small", 1), ("used", 2), ("busy", 5), ("begun", 8)):
        cluster.volume(name, gib)
    cluster.pod("p", "used")
    cluster.pod("q", "busy")
    cluster.pod("r", "begun")
    cluster.moves = [Moving(handle("begun"), "b")]
    names = [unit.name.rpartition("-")[2] for unit in plan(cluster.view).going]
    assert names == ["begun", "small", "large", "used", "busy"]


# What stays


def test_a_volume_without_a_persistent_volume_stays(cluster: Cluster) -> None:
    cluster.volumes = [Volume(handle("one"), GIB, "fast")]
    assert reason(plan(cluster.view), "one").startswith("no PersistentVolume names volume")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"is_being_deleted": True}, "PersistentVolume pv-one is being deleted"),
        ({"phase": "Released"}, "is Released, and no claim could follow it"),
        ({"phase": "Released", "reclaim_policy": "Retain"}, "its reclaim policy is Retain"),
        ({"phase": "Available", "claim_uid": ""}, "is Available"),
        ({"claim_uid": "another"}, "claim shop/one, to which .* is gone"),
        ({"is_for_one_node": False}, "another node affinity"),
    ],
)
def test_a_volume_stays_whose_persistent_volume_could_not_follow(
    cluster: Cluster, change: dict[str, Any], expected: str
) -> None:
    cluster.volume("one")
    cluster.persistent_volumes = [replace(cluster.persistent_volumes[0], **change)]
    assert re.search(expected, reason(plan(cluster.view), "one"))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"is_being_deleted": True}, "claim shop/one is being deleted"),
        ({"volume": "pv-other"}, "has another PersistentVolume, pv-other"),
        ({"is_of_pod": True}, "it is deleted with the pod, and made anew"),
    ],
)
def test_a_volume_stays_whose_claim_could_not_follow(
    cluster: Cluster, change: dict[str, Any], expected: str
) -> None:
    cluster.volume("one")
    cluster.claims = [replace(cluster.claims[0], **change)]
    assert expected in reason(plan(cluster.view), "one")


@pytest.mark.parametrize("policy", ["Delete", "Retain"])
def test_both_reclaim_policies_go(cluster: Cluster, policy: str) -> None:
    cluster.volume("one")
    cluster.persistent_volumes = [replace(cluster.persistent_volumes[0], reclaim_policy=policy)]
    assert targets(plan(cluster.view)) == {"one": "a"}


def test_two_persistent_volumes_of_one_volume_stay(cluster: Cluster) -> None:
    cluster.volume("one")
    cluster.persistent_volumes.append(replace(cluster.persistent_volumes[0], name="pv-copy"))
    assert "pv-copy, pv-one name the same volume" in reason(plan(cluster.view), "one")


def test_a_pod_s_ephemeral_claim_does_not_keep_its_other_volumes(cluster: Cluster) -> None:
    cluster.volume("data")
    cluster.volume("scratch")
    cluster.claims[1] = replace(cluster.claims[1], is_of_pod=True)
    cluster.pod("p", "data", "scratch")
    made = plan(cluster.view)
    assert targets(made) == {"data": "a"}
    assert "belongs to a pod" in reason(made, "scratch")


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        ({"controller": "DaemonSet"}, "belongs to a DaemonSet"),
        ({"controller": "DaemonSet", "node": ""}, "belongs to a DaemonSet"),
        ({"is_static": True}, "is a static pod"),
        ({"controller": ""}, "evacuate with --force"),
        ({"node": "a"}, "pod shop/p on node a uses its claim"),
    ],
)
def test_a_unit_stays_whose_pod_would_not_come_after_it(
    cluster: Cluster, pod: dict[str, Any], expected: str
) -> None:
    cluster.volume("one")
    cluster.volume("two")
    cluster.pod("p", "one", **pod)
    cluster.pod("q", "one", "two")
    made = plan(cluster.view)
    assert not made.going
    assert expected in reason(made, "two")


@pytest.mark.parametrize(
    "pod",
    [
        # Scheduled to no node yet: it comes when its volume is there.
        {"controller": "", "node": ""},
        {"controller": "", "is_being_deleted": True},
        {"controller": "Job"},
        {"is_being_deleted": True},
    ],
)
def test_a_unit_goes_whose_pods_come_or_end_by_themselves(
    cluster: Cluster, pod: dict[str, Any]
) -> None:
    cluster.volume("one")
    cluster.pod("p", "one", **pod)
    assert targets(plan(cluster.view)) == {"one": "a"}


def test_by_force_a_pod_without_a_controller_is_evicted_and_that_is_said(cluster: Cluster) -> None:
    cluster.volume("one")
    cluster.pod("p", "one", controller="")
    (unit,) = plan(cluster.view, force=True).going
    assert unit.notes == ("pod shop/p has no controller: after its eviction it is gone for good",)
    cluster.pod("q", "one", controller="DaemonSet")
    assert "DaemonSet" in reason(plan(cluster.view, force=True), "one")


# Targets


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"is_ready": False}, "a is not ready"),
        ({"is_schedulable": False}, "a is cordoned"),
        ({"is_evacuated": True}, "a is being evacuated itself"),
        ({"problem": "does not answer"}, "a does not answer"),
        ({"rooms": {}}, "a has no class fast"),
        ({"has_label": False}, "a has not the topology label of Carver"),
        ({"rooms": {"fast": Room("g", 9 * GIB)}}, "a has 9.0 GiB left for class fast, of 10.0 GiB"),
        ({"rooms": {"fast": Room("g", 10 * GIB, 4 * GIB)}}, "of 12.0 GiB that it needs"),
        ({"rooms": {"fast": Room("g", 0)}}, "a has 0 MiB left"),
        ({"rooms": {"fast": Room("g", 99 * GIB, encrypts=True)}}, "a encrypts volumes of class"),
        ({"taints": (Taint("k", "NoSchedule", "v"),)}, "the taint k=v:NoSchedule, and source has"),
    ],
)
def test_a_node_that_cannot_take_a_volume_is_named_with_the_reason(
    change: dict[str, Any], expected: str
) -> None:
    cluster = Cluster([node(SOURCE), replace(node("a"), **change)])
    cluster.volume("one")
    made = plan(cluster.view)
    assert not made.going
    assert f"no node can take it: {expected}" in reason(made, "one") or expected in (
        reason(made, "one")
    )


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        ({}, "a has the taint k=v:NoSchedule, which pod shop/p does not tolerate"),
        ({"tolerations": (Toleration("k", "Exists"),)}, ""),
        ({"tolerations": (Toleration("k", "Exists"),), "node_selector": {"x": "y"}}, ""),
        (
            {"tolerations": (Toleration("k", "Exists"),), "node_selector": {"x": "z"}},
            "a has not the labels in the nodeSelector of pod shop/p",
        ),
        (
            {
                "tolerations": (Toleration("k", "Exists"),),
                "node_affinity": (NodeTerm((), (Requirement("metadata.name", "In", ("b",)),)),),
            },
            "a does not satisfy the node affinity of pod shop/p",
        ),
    ],
)
def test_a_node_must_be_allowed_to_each_pod(pod: dict[str, Any], expected: str) -> None:
    taint = Taint("k", "NoSchedule", "v")
    cluster = Cluster([node(SOURCE), node("a", taints=(taint,), labels={"x": "y"})])
    cluster.volume("one")
    cluster.pod("p", "one", **pod)
    made = plan(cluster.view)
    if expected:
        assert expected in reason(made, "one")
    else:
        assert targets(made) == {"one": "a"}


def test_a_pod_s_volume_of_another_driver_must_be_there_too(cluster: Cluster) -> None:
    zone = (NodeTerm((Requirement("zone", "In", ("west",)),)),)
    cluster.nodes = [
        node(SOURCE, labels={"zone": "west"}),
        node("a", labels={"zone": "east"}),
        node("b", 20, labels={"zone": "west"}),
    ]
    cluster.volume("one")
    cluster.pod("p", "one", "network", "shared")
    cluster.claims += [
        Claim("shop", "network", "u1", "pv-network"),
        Claim("shop", "shared", "u2", "pv-shared"),
    ]
    cluster.persistent_volumes += [
        PersistentVolume("pv-network", "u3", affinity=zone),
        PersistentVolume("pv-shared", "u4"),
    ]
    assert targets(plan(cluster.view)) == {"one": "b"}
    assert "a cannot have PersistentVolume pv-network" in reason(plan(cluster.view, ["a"]), "one")


def test_an_unused_volume_goes_to_a_taint_that_its_present_node_has_too(cluster: Cluster) -> None:
    taint = Taint("dedicated", "NoSchedule", "storage")
    cluster.nodes = [node(SOURCE, taints=(taint,)), node("a", taints=(taint,))]
    cluster.volume("one")
    assert targets(plan(cluster.view)) == {"one": "a"}


def test_the_targets_are_bounded(cluster: Cluster) -> None:
    cluster.nodes.append(node("c", 1000))
    cluster.volume("one")
    assert targets(plan(cluster.view)) == {"one": "c"}
    assert targets(plan(cluster.view, ["b"])) == {"one": "b"}
    assert reason(plan(cluster.view, [SOURCE]), "one") == (
        "none of the nodes that were named is another node of the cluster"
    )
    cluster.nodes = [node(SOURCE)]
    assert reason(plan(cluster.view), "one") == "there is no other node of the cluster"


def test_space_is_subtracted_and_what_does_not_fit_is_named(cluster: Cluster) -> None:
    cluster.nodes = [node(SOURCE), node("a", 25)]
    for name in ("one", "two", "three"):
        cluster.volume(name)
    made = plan(cluster.view)
    assert targets(made) == {"one": "a", "three": "a"}
    assert reason(made, "two") == (
        "no node can take it: a has 5.0 GiB left for class fast, of 10.0 GiB that it needs"
    )


def test_classes_of_one_group_share_its_space(cluster: Cluster) -> None:
    # Of the mirrored class half as much can be made.
    rooms = {"fast": Room("vg", 100 * GIB), "mirrored": Room("vg", 50 * GIB)}
    cluster.nodes = [node(SOURCE), replace(node("a"), rooms=rooms)]
    cluster.volume("one", 60)
    cluster.volume("two", 20, device_class="mirrored")
    assert len(plan(cluster.view).going) == 2
    cluster.volume("three", 1, device_class="mirrored")
    assert len(plan(cluster.view).going) == 2
    apart = {"fast": Room("vg", 100 * GIB), "mirrored": Room("other", 50 * GIB)}
    cluster.nodes = [node(SOURCE), replace(node("a"), rooms=apart)]
    assert len(plan(cluster.view).going) == 3


def test_all_go_where_one_order_leaves_room_and_another_does_not(cluster: Cluster) -> None:
    cluster.nodes = [node(SOURCE), node("a", 10), node("b", 10)]
    for name, gib in (("one", 4), ("two", 4), ("three", 8)):
        cluster.volume(name, gib)
    assert len(plan(cluster.view).going) == 3
    # Here the smallest first.
    cluster = Cluster([node(SOURCE), node("a", 10)])
    for name, gib in (("one", 4), ("two", 4), ("three", 8)):
        cluster.volume(name, gib)
    assert targets(plan(cluster.view)) == {"one": "a", "two": "a"}


def excluding(name: str, app: str = "db", key: str = HOSTNAME) -> dict[str, Any]:
    """What a pod has that is on no node with another of its app."""
    term = PodTerm(key, (Requirement("app", "In", (app,)),), frozenset({"shop"}))
    return {"labels": {"app": name}, "anti_affinity": (term,)}


def test_pods_that_exclude_each_other_are_not_planned_on_one_node(cluster: Cluster) -> None:
    for name in ("db-0", "db-1", "db-2"):
        cluster.volume(name)
        cluster.pod(name, name, **excluding("db"))
    made = plan(cluster.view)
    assert sorted(targets(made).values()) == ["a", "b"]
    (stays,) = made.staying
    assert "by an anti-affinity for kubernetes.io/hostname" in stays.reason


def test_a_pod_on_the_target_excludes_or_is_excluded(cluster: Cluster) -> None:
    cluster.volume("one")
    cluster.pod("p", "one", labels={"app": "db"})
    # The pod on a excludes, that on b is excluded.
    cluster.pod("q", node="a", **excluding("other"))
    assert targets(plan(cluster.view)) == {"one": "b"}
    cluster.pods[0] = replace(cluster.pods[0], **excluding("db"))
    cluster.pod("r", node="b", labels={"app": "db"})
    assert "a is where pod shop/q runs" in reason(plan(cluster.view), "one")
    assert "b is where pod shop/r runs" in reason(plan(cluster.view), "one")
    # Pods that have ended do not count, nor do those of another namespace.
    cluster.pods[1:] = [
        replace(cluster.pods[1], is_finished=True),
        replace(cluster.pods[2], namespace="other"),
    ]
    assert targets(plan(cluster.view)) == {"one": "a"}


def test_an_anti_affinity_of_a_zone_counts_the_pods_of_its_nodes(cluster: Cluster) -> None:
    cluster.nodes = [
        node(SOURCE, labels={"zone": "west"}),
        node("a", labels={"zone": "east"}),
        node("b", labels={"zone": "west"}),
        node("c", labels={"zone": "east"}),
        node("d"),
    ]
    cluster.volume("one")
    cluster.pod("p", "one", **excluding("db", key="zone"))
    cluster.pod("q", node="c", labels={"app": "db"})
    assert targets(plan(cluster.view, ["a", "b"])) == {"one": "b"}
    # A node without the label is in no topology.
    assert targets(plan(cluster.view, ["a", "d"])) == {"one": "d"}
    # A pod on the node itself that does not go counts as well.
    cluster.pod("r", labels={"app": "db"})
    assert "b is where pod shop/r runs" in reason(plan(cluster.view, ["a", "b"]), "one")


def test_spread_and_neighbours_are_only_warned_of(cluster: Cluster) -> None:
    cluster.volume("one")
    cluster.pod("p", "one", spread_keys=("zone",), needs_neighbours=True)
    (unit,) = plan(cluster.view).going
    assert unit.notes == (
        "pod shop/p is spread by zone: the scheduler may refuse a",
        "pod shop/p must run beside other pods: the scheduler may refuse a",
    )


def test_what_bounds_a_pod_that_ends_for_good_bounds_nothing(cluster: Cluster) -> None:
    cluster.nodes = [node(SOURCE), node("a", taints=(Taint("k", "NoSchedule"),))]
    cluster.volume("one")
    cluster.pod("p", "one", controller="", is_being_deleted=True)
    assert targets(plan(cluster.view)) == {"one": "a"}
    # One that is made anew must run there.
    cluster.pods = [replace(cluster.pods[0], controller="ReplicaSet")]
    assert "which pod shop/p does not tolerate" in reason(plan(cluster.view), "one")


def test_of_equal_nodes_the_oldest_is_taken(cluster: Cluster) -> None:
    cluster.nodes = [
        node(SOURCE),
        node("a", created="2026-01-03"),
        node("b", created="2026-01-02"),
        node("c", created="2026-01-02"),
    ]
    cluster.volume("one")
    assert targets(plan(cluster.view)) == {"one": "b"}
    assert targets(plan(cluster.view, ["a", "c", "b"])) == {"one": "a"}


# Moves under way


@pytest.mark.parametrize(
    ("left", "fits"),
    [
        (Volume("data@bbbbbbbb/vol-one", 10 * GIB, "fast"), True),
        (Volume("data@bbbbbbbb/vol-one", 20 * GIB, "fast"), True),
        # It has grown since, is of another class by now, or is another volume.
        (Volume("data@bbbbbbbb/vol-one", 9 * GIB, "fast"), False),
        (Volume("data@bbbbbbbb/vol-one", 10 * GIB, "slow"), False),
        (Volume("data@bbbbbbbb/vol-two", 10 * GIB, "fast"), False),
    ],
)
def test_what_a_volume_has_left_on_a_node_is_space_for_it(
    cluster: Cluster, left: Volume, fits: bool
) -> None:
    cluster.nodes = [node(SOURCE), node("b", 1, left=(left,))]
    cluster.volume("one", 10)
    assert targets(plan(cluster.view)) == ({"one": "b"} if fits else {})


def test_a_move_to_a_node_that_is_not_named_any_more_goes_on_and_is_noted(
    cluster: Cluster,
) -> None:
    cluster.volume("one")
    cluster.moves = [Moving(handle("one"), "a")]
    (unit,) = plan(cluster.view, ["b"]).going
    assert unit.target == "a"
    assert "not among the nodes that were named" in unit.notes[0]
    (unit,) = plan(cluster.view, ["a"]).going
    assert not unit.notes


def test_a_move_under_way_keeps_its_target_and_its_space_counts_once(cluster: Cluster) -> None:
    cluster.nodes = [node(SOURCE), node("a", 100), node("b", 5, is_schedulable=False)]
    cluster.volume("one", 10)
    cluster.moves = [Moving(handle("one"), "b", has_space=True)]
    (unit,) = plan(cluster.view).going
    assert (unit.target, unit.notes) == ("b", ("its move waits for b, which is cordoned",))
    assert plan(cluster.view, ["a"]).going[0].target == "b"
    cluster.moves = [Moving(handle("one"), "b")]
    assert reason(plan(cluster.view), "one") == (
        "its move to b was begun, but b has 5.0 GiB left for class fast, of 10.0 GiB that it needs"
    )


def test_the_other_volumes_of_a_unit_follow_its_move(cluster: Cluster) -> None:
    cluster.nodes.append(node("c", 1000))
    cluster.volume("one")
    cluster.volume("two")
    cluster.pod("p", "one", "two")
    cluster.moves = [Moving(handle("two"), "b")]
    assert targets(plan(cluster.view)) == {"one": "b", "two": "b"}


def test_a_unit_goes_where_its_pod_s_other_volume_is_moved(cluster: Cluster) -> None:
    cluster.volume("one")
    cluster.pod("p", "one", "other")
    cluster.claims.append(Claim("shop", "other", "u1", "pv-other"))
    elsewhere = (NodeTerm((Requirement("zone", "In", ("west",)),)),)
    other = PersistentVolume("pv-other", "u2", affinity=elsewhere)
    cluster.persistent_volumes.append(other)
    assert "cannot have PersistentVolume pv-other" in reason(plan(cluster.view), "one")
    cluster.persistent_volumes[-1] = replace(other, moves_to="b")
    assert targets(plan(cluster.view)) == {"one": "b"}


def test_a_unit_that_was_handed_over_in_part_goes_on_whatever_became_of_it(
    cluster: Cluster,
) -> None:
    cluster.volume("one")
    cluster.volume("two")
    cluster.pod("p", "one", "two", controller="")
    cluster.moves = [Moving(handle("one"), "b", is_handed_over=True)]
    taints = (Taint("k", "NoSchedule"),)
    cluster.nodes[2] = node("b", 0, problem="does not answer", taints=taints)
    (unit,) = plan(cluster.view).going
    assert unit.target == "b"
    assert "it goes on, since it was handed over in part, although pod shop/p" in unit.notes[0]
    assert "its move waits for b, which does not answer" in unit.notes


@pytest.mark.parametrize("place", ["backup-host", SOURCE])
def test_a_move_to_what_is_no_other_node_stays(cluster: Cluster, place: str) -> None:
    cluster.volume("one")
    cluster.moves = [Moving(handle("one"), place)]
    assert "no other node of the cluster" in reason(plan(cluster.view), "one")


def test_a_unit_whose_volumes_move_apart_stays(cluster: Cluster) -> None:
    cluster.volume("one")
    cluster.volume("two")
    cluster.pod("p", "one", "two")
    cluster.moves = [Moving(handle("one"), "a"), Moving(handle("two"), "b")]
    assert "its volumes move to different nodes, a, b" in reason(plan(cluster.view), "one")


@given(
    st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.booleans()), min_size=1, max_size=4),
    st.booleans(),
)
def test_what_was_handed_over_goes_on_whatever_joins_it_later(
    moves: list[tuple[str, bool]], is_group: bool
) -> None:
    """Otherwise its claim is bound to a volume that is another node's, and no pod can use it."""
    cluster = Cluster([node(SOURCE), node("a"), node("b")])
    names = [f"v{number}" for number in range(len(moves))]
    for name in names:
        cluster.volume(name, 1)
    cluster.moves = [
        Moving(handle(name), target, is_over)
        for name, (target, is_over) in zip(names, moves, strict=True)
        if target
    ]
    if is_group:
        cluster.snapshots = [Snapshot(f"s-{name}", handle(name), "monday") for name in names]
    else:
        cluster.pod("p", *names)
    made = plan(cluster.view)
    going = {one.volume_id: unit for unit in made.going for one in unit.volumes}
    for move in cluster.moves:
        if move.is_handed_over:
            assert going[move.volume_id].target == move.node
    for unit in made.going:
        assert {one.move.node for one in unit.volumes if one.move} <= {unit.target}


def test_a_volume_that_moved_and_that_no_object_names_is_under_quarantine(
    cluster: Cluster,
) -> None:
    cluster.volume("one")
    cluster.persistent_volumes = []
    cluster.moves = [Moving(handle("one"), "a", is_handed_over=True)]
    made = plan(cluster.view)
    assert (made.going, made.staying) == ((), ())
    assert [one.volume_id for one in made.moved] == [handle("one")]


# Generated clusters

# Taint of a node that is cordoned.
CORDONED = Taint("node.kubernetes.io/unschedulable", "NoSchedule")
APPS = ("db", "web")


@st.composite
def nodes(draw: st.DrawFn, number: int) -> Node:
    rooms = {}
    for name in draw(st.sets(st.sampled_from(["fast", "slow"]), min_size=0)):
        pool = draw(st.sampled_from(["vg", f"pool-{name}"]))
        rooms[name] = Room(pool, draw(st.integers(0, 30)), draw(st.sampled_from([1, 1, 4])))
    # The order of the names is not that of the ages.
    name = f"n{9 - number}"
    return Node(
        name,
        f"2026-01-{number + 1:02}",
        {HOSTNAME: name, "zone": draw(st.sampled_from(["east", "west"]))},
        tuple(draw(st.sets(st.sampled_from([Taint("k", "NoSchedule"), Taint("k", "NoExecute")])))),
        is_ready=draw(st.integers(0, 5)) > 0,
        is_schedulable=draw(st.integers(0, 5)) > 0,
        problem="does not answer" if draw(st.integers(0, 7)) == 0 else "",
        rooms=rooms,
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    made = Cluster([node(SOURCE)])
    made.nodes += [draw(nodes(number)) for number in range(draw(st.integers(0, 5)))]
    names = [f"v{number}" for number in range(draw(st.integers(1, 8)))]
    for name in names:
        made.volume(name, 0, device_class=draw(st.sampled_from(["fast", "fast", "slow"])))
        size = draw(st.integers(1, 20))
        made.volumes[-1] = replace(made.volumes[-1], size_bytes=size)
    for number in range(draw(st.integers(0, 6))):
        term = PodTerm(
            draw(st.sampled_from([HOSTNAME, "zone"])),
            (Requirement("app", "In", (draw(st.sampled_from(APPS)),)),),
            draw(st.sampled_from([None, frozenset({"shop"})])),
        )
        selected = Requirement("zone", draw(st.sampled_from(["In", "NotIn"])), ("east",))
        tolerations = (
            (),
            (Toleration("k", "Exists"),),
            (Toleration("", "Exists", effect="NoSchedule"),),
        )
        made.pod(
            f"p{number}",
            *draw(st.lists(st.sampled_from(names), max_size=3, unique=True)),
            labels={"app": draw(st.sampled_from(APPS))},
            controller=draw(st.sampled_from(["ReplicaSet"] * 4 + ["", "DaemonSet"])),
            is_being_deleted=draw(st.integers(0, 5)) == 0,
            is_finished=draw(st.integers(0, 9)) == 0,
            tolerations=draw(st.sampled_from(tolerations)),
            node_selector=draw(st.sampled_from([{}, {}, {"zone": "west"}])),
            node_affinity=draw(st.sampled_from([None, None, (NodeTerm((selected,)),)])),
            anti_affinity=draw(st.sampled_from([(), (), (term,)])),
        )
    others = [one.name for one in made.nodes[1:]]
    for number in range(draw(st.integers(0, 3)) if others else 0):
        made.pod(
            f"other{number}",
            node=draw(st.sampled_from(others)),
            labels={"app": draw(st.sampled_from(APPS))},
            anti_affinity=draw(
                st.sampled_from([(), (PodTerm(HOSTNAME, (Requirement("app", "Exists"),), None),)])
            ),
        )
    if others:
        for name in draw(st.sets(st.sampled_from(names), max_size=2)):
            made.moves.append(
                Moving(
                    *(handle(name), draw(st.sampled_from(others))),
                    is_handed_over=draw(st.integers(0, 3)) == 0,
                    has_space=draw(st.booleans()),
                )
            )
    for number, name in enumerate(draw(st.lists(st.sampled_from(names), max_size=3))):
        made.snapshots.append(Snapshot(f"s{number}", handle(name), "group"))
    return made


def require_sound(made: Plan, cluster: Cluster) -> None:
    """Assert what holds for each plan, by another computation than the planner's."""
    by_name = {one.name: one for one in cluster.nodes}
    units = [*made.going, *made.staying]
    every = [one.volume_id for unit in units for one in unit.volumes]
    assert sorted(every) == sorted(one.volume_id for one in cluster.volumes)
    assert all(bool(unit.reason) != bool(unit.target) for unit in units)
    where = {one.volume_id: unit for unit in units for one in unit.volumes}
    moves = {one.volume_id: one for one in cluster.moves}
    # A unit is never split, but for what was handed over to another node than the rest goes to.
    is_apart = len({one.node for one in cluster.moves}) > 1
    apart = {one.volume_id for one in cluster.moves if one.is_handed_over and is_apart}
    for pod in cluster.pods:
        used = {handle(name) for name in pod.claims if not pod.is_finished} - apart
        assert len({where[one].name for one in used}) <= 1
    members = {one.volume_id for one in cluster.snapshots} - apart
    assert len({where[one].name for one in members}) <= 1
    # No target without space for all that goes there.
    taken = defaultdict[tuple[str, str], Fraction](Fraction)
    for unit in made.going:
        target = by_name[unit.target]
        assert unit.target != SOURCE
        is_handed_over = any(one.move and one.move.is_handed_over for one in unit.volumes)
        for one in unit.volumes:
            move = moves.get(one.volume_id)
            if move:
                assert move.node == unit.target
            if move and move.has_space:
                continue
            room = target.rooms.get(one.device_class)
            if is_handed_over or (unit.is_under_way and room is None and target.problem):
                continue
            assert room is not None
            steps = -(-one.size_bytes // room.step_bytes)
            assert room.free_bytes
            taken[target.name, room.pool] += Fraction(steps * room.step_bytes, room.free_bytes)
        if not unit.is_under_way:
            assert target.is_ready
            assert target.is_schedulable
            assert not target.problem
        if not is_handed_over:
            require_allowed(unit, target)
    assert all(share <= 1 for share in taken.values())
    require_no_conflict(made, cluster)


def require_allowed(unit: Unit, target: Node) -> None:
    for pod in unit.pods:
        assert pod.controller != "DaemonSet"
        assert pod.controller or pod.is_being_deleted
        if pod.controller:
            assert scheduling.untolerated((CORDONED,), pod.tolerations) is not None
            assert scheduling.untolerated(target.taints, pod.tolerations) is None
            assert pod.node_selector.items() <= target.labels.items()
            assert scheduling.satisfies(pod.node_affinity, target.name, target.labels)


@pytest.mark.parametrize(
    ("toleration", "stays"),
    [
        (Toleration("", "Exists"), True),
        (Toleration("", "Exists", effect="NoSchedule"), True),
        (Toleration("", "Exists", effect="NoExecute"), False),
        (Toleration(CORDONED.key, "Exists"), True),
        (Toleration(CORDONED.key, effect="NoSchedule"), True),
        (Toleration(CORDONED.key, value="x"), False),
        (Toleration("k", "Exists"), False),
    ],
)
def test_a_volume_stays_whose_pod_would_be_placed_on_the_cordoned_node_again(
    cluster: Cluster, toleration: Toleration, *, stays: bool
) -> None:
    cluster.volume("one")
    cluster.pod("p", "one", tolerations=(toleration,))
    made = plan(cluster.view)
    assert [bool(made.staying), bool(made.going)] == [stays, not stays]
    if stays:
        assert "p tolerates the taint node.kubernetes.io/unschedulable" in reason(made, "one")
    # A pod that nothing makes anew does not come back.
    cluster.pods = [replace(pod, controller="") for pod in cluster.pods]
    assert plan(cluster.view, force=True).going


def require_no_conflict(made: Plan, cluster: Cluster) -> None:
    """Assert that no two pods exclude each other where they then run."""
    by_name = {one.name: one for one in cluster.nodes}
    places = {pod.uid: pod.node for pod in cluster.pods}
    units = {pod.uid: unit for unit in made.going for pod in unit.pods}
    places.update((uid, unit.target) for uid, unit in units.items())
    for uid, unit in units.items():
        (pod,) = [one for one in cluster.pods if one.uid == uid]
        if any(one.move and one.move.is_handed_over for one in unit.volumes):
            continue
        for other in cluster.pods:
            same = units.get(other.uid) is unit
            handed = other.uid in units and any(
                one.move and one.move.is_handed_over for one in units[other.uid].volumes
            )
            if same or handed or other.is_finished or other.is_being_deleted:
                continue
            for first, second in ((pod, other), (other, pod)):
                for term in first.anti_affinity:
                    key = term.topology_key
                    mine, theirs = (
                        by_name[place].labels.get(key)
                        for place in (places[pod.uid], places[other.uid])
                    )
                    if term.selects(second.namespace, second.labels):
                        assert mine is None or mine != theirs


@given(clusters(), st.randoms(use_true_random=False))
def test_each_plan_is_sound_and_does_not_depend_on_the_order(
    cluster: Cluster, source: random.Random
) -> None:
    made = plan(cluster.view)
    require_sound(made, cluster)
    for one in (cluster.nodes, cluster.volumes, cluster.pods, cluster.moves, cluster.snapshots):
        source.shuffle(one)
    source.shuffle(cluster.claims)
    source.shuffle(cluster.persistent_volumes)
    assert plan(cluster.view) == made


@given(clusters(), st.data())
def test_a_new_node_never_makes_fewer_units_go(cluster: Cluster, data: st.DataObject) -> None:
    before = plan(cluster.view)
    cluster.nodes.append(data.draw(nodes(len(cluster.nodes))))
    after = plan(cluster.view)
    assert len(after.going) >= len(before.going)
    require_sound(after, cluster)
    # So it is with a node that is named, too.
    names = [one.name for one in cluster.nodes if one.name != SOURCE]
    names = data.draw(st.permutations(names))
    counts = [len(plan(cluster.view, names[:count]).going) for count in range(1, len(names) + 1)]
    assert counts == sorted(counts)


@given(clusters())
def test_what_goes_still_goes_when_the_first_unit_has_begun_to_move(cluster: Cluster) -> None:
    before = plan(cluster.view)
    if not before.going:
        return
    first = before.going[0]
    known = {one.volume_id for one in cluster.moves}
    cluster.moves += [
        Moving(one.volume_id, first.target) for one in first.volumes if one.volume_id not in known
    ]
    after = plan(cluster.view)
    assert {unit.name: unit.target for unit in after.going}[first.name] == first.target


def test_a_thousand_nodes_are_planned_for_in_seconds() -> None:
    cluster = Cluster([node(SOURCE)])
    cluster.nodes += [node(f"n{number}", 10, created=f"{number:04}") for number in range(1000)]
    for number in range(50):
        cluster.volume(f"v{number}", 10)
        cluster.pod(f"p{number}", f"v{number}", **excluding("db"))
    # Two that only fit on one node, which has space for one.
    for name in ("x", "y"):
        cluster.volume(name, 50)
    cluster.nodes.append(node("big", 60, created="9999"))
    made = plan(cluster.view)
    assert len(made.going) == 51
    assert len({unit.target for unit in made.going}) == 51
    assert planning._MOST_PREFIXES == 64
