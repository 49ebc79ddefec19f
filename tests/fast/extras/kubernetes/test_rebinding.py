"""A claim is its moved volume's in the end, whatever fails on the way, and no data are at risk."""

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import api_server
import binding
import pytest
from api_server import CLAIMS, NODES, VOLUMES, Object
from binding import DRIVER, KEY, Cluster

from agent.core import errors, ids
from agent.extras.kubernetes.access import Server
from agent.extras.kubernetes.rebinding import OF_WORK, Place, Rebinding
from agent.extras.transfer import claim_moves
from proto import carver_pb2 as carver

WAS, IS = "data@x/vol-pvc-1", "data@y/vol-pvc-1"
PLACE = Place(IS, "b", DRIVER)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with api_server.running(Cluster()) as made:
        yield made


def rebinding(cluster: Cluster, place: Place = PLACE, was: str = WAS) -> Rebinding:
    return Rebinding(Server("tests", "127.0.0.1", cluster.port), was, place)


def yes(_text: str) -> bool:
    return True


def ignore(_text: str) -> None:
    pass


def run(cluster: Cluster, confirmed: Callable[[str], bool] = yes) -> None:
    rebinding(cluster).run(confirmed, ignore)


def times(count: int) -> Callable[[str], bool]:
    """Confirm so many times, and then decline."""
    answers = iter([True] * count)
    return lambda _text: next(answers, False)


def run_until(cluster: Cluster, step: int) -> None:
    """Rebind up to a step, which is declined."""
    with pytest.raises(errors.NotConfirmed):
        run(cluster, times(step))


def require_moved(cluster: Cluster, policy: str = "Delete") -> None:
    """The claim has the volume where it is now, and nothing else is left."""
    cluster.settle()
    [volume] = cluster.objects[VOLUMES]
    name = volume["metadata"]["name"]
    assert cluster.claim["status"]["phase"] == "Bound"
    assert cluster.claim["spec"]["volumeName"] == name
    assert volume["spec"]["claimRef"]["uid"] == cluster.claim["metadata"]["uid"]
    assert volume["spec"]["csi"] == {
        "driver": DRIVER,
        "volumeHandle": IS,
        "volumeAttributes": {"carver/class": "linear"},
    }
    [term] = volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"]
    assert term == {"matchExpressions": [{"key": KEY, "operator": "In", "values": ["b"]}]}
    assert volume["spec"]["persistentVolumeReclaimPolicy"] == policy
    assert volume["metadata"]["annotations"] == {"pv.kubernetes.io/provisioned-by": DRIVER}
    require_safe(cluster)


def require_safe(cluster: Cluster) -> None:
    assert (cluster.deleted, cluster.dangers, cluster.blank) == ([], [], [])


def test_a_claim_is_rebound_in_six_confirmed_steps(cluster: Cluster) -> None:
    asked: list[str] = []

    def confirmed(text: str) -> bool:
        asked.append(text)
        return True

    run(cluster, confirmed)
    require_moved(cluster)
    # Six times, and no two at once.
    assert len(asked) == len(cluster.writes) == 6
    assert cluster.claim["metadata"]["labels"] == {"app": "db"}
    assert cluster.claim["metadata"].get("annotations", {}) == {}
    assert cluster.claim["spec"]["resources"] == {"requests": {"storage": "1Gi"}}
    # The same again: nothing is asked, and nothing written.
    run(cluster, confirmed)
    assert len(asked) == len(cluster.writes) == 6


def test_a_retained_volume_stays_retained() -> None:
    with api_server.running(Cluster(policy="Retain")) as cluster:
        run(cluster)
        require_moved(cluster, "Retain")


def test_a_second_move_gives_a_name_of_the_same_length(cluster: Cluster) -> None:
    cluster.add(NODES, "machine-c", metadata={"labels": {KEY: "c"}})
    run(cluster)
    [first] = cluster.volumes
    rebinding(cluster, Place("data@z/vol-pvc-1", "c", DRIVER), IS).run(yes, ignore)
    [second] = cluster.volumes
    assert first != second
    assert len(first) == len(second)
    assert cluster.volume(second)["spec"]["csi"]["volumeHandle"] == "data@z/vol-pvc-1"
    require_safe(cluster)


def test_a_claim_moves_between_nodes_whose_names_no_label_can_hold() -> None:
    a, b = (f"{one}.{'n' * 63}.{'o' * 63}" for one in "ab")
    there = ids.node_segment(b)
    with api_server.running(Cluster(nodes=(ids.node_segment(a), there))) as cluster:
        rebinding(cluster, Place(IS, b, DRIVER)).run(yes, ignore)
        cluster.settle()
        [volume] = cluster.objects[VOLUMES]
        [term] = volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"]
        assert term == {"matchExpressions": [{"key": KEY, "operator": "In", "values": [there]}]}
        assert cluster.claim["status"]["phase"] == "Bound"
        require_safe(cluster)
    moved = carver.MoveState(pv="pvc-1", pvc="data", namespace="shop", volume_id=WAS)
    assert f'"values": ["{there}"]' in claim_moves.steps(moved, Place(IS, b, DRIVER))


@pytest.mark.parametrize("at", range(6))
def test_each_step_waits_for_confirmation_and_continues_later(cluster: Cluster, at: int) -> None:
    run_until(cluster, at)
    cluster.settle()
    assert len(cluster.writes) == at
    require_safe(cluster)
    run(cluster)
    require_moved(cluster)


@pytest.mark.parametrize("at", range(3))
def test_steps_before_the_claim_changes_are_undone(cluster: Cluster, at: int) -> None:
    before = json.loads(json.dumps(cluster.volume("pvc-1")["spec"]))
    run_until(cluster, at)
    # Also where each step of that is declined.
    for left in (0, 1, 2, 3):
        with suppress(errors.NotConfirmed):
            rebinding(cluster).undo(times(left), ignore)
        require_safe(cluster)
    assert list(cluster.volumes) == ["pvc-1"]
    assert cluster.volume("pvc-1")["spec"] == before
    assert len(cluster.volume("pvc-1")["metadata"]["annotations"]) == 1
    assert cluster.claim["spec"]["volumeName"] == "pvc-1"


@pytest.mark.parametrize("at", range(3, 7))
def test_steps_after_the_claim_changes_are_not_undone(cluster: Cluster, at: int) -> None:
    with suppress(errors.NotConfirmed):
        run(cluster, times(at))
    writes = list(cluster.writes)
    with pytest.raises(errors.NotRebound, match="back from b"):
        rebinding(cluster).undo(yes, ignore)
    assert cluster.writes == writes
    run(cluster)
    require_moved(cluster)


def nothing_done(_act: object) -> tuple[int, Object]:
    return 500, {"kind": "Status", "message": "etcd has no leader"}


def refused(_act: object) -> tuple[int, Object]:
    return 403, {"kind": "Status", "reason": "Forbidden", "message": "this account may not"}


def done_and_silent(act: Callable[[], tuple[int, Object]]) -> tuple[int, Object]:
    act()
    return 504, {"kind": "Status", "message": "the request timed out"}


@pytest.mark.parametrize("lag", [0, 3])
@pytest.mark.parametrize("failure", [nothing_done, refused, done_and_silent])
@pytest.mark.parametrize("at", range(6))
def test_a_failed_step_leaves_all_safe_and_is_repeated(
    cluster: Cluster, at: int, failure: binding.Failure, lag: int
) -> None:
    cluster.lag = lag
    cluster.failures[at] = failure
    with pytest.raises(errors.ClusterRefused):
        run(cluster)
    require_safe(cluster)
    run(cluster)
    require_moved(cluster)


@pytest.mark.parametrize("done", [False, True])
def test_a_rebinding_killed_at_any_request_is_continued(tmp_path: Path, done: bool) -> None:
    class Killed(BaseException):
        """The process ended."""

    for step in itertools.count():
        with api_server.running(Cluster()) as cluster:
            left = iter(range(step, -1, -1))
            going = rebinding(cluster)
            ask = going._objects._ask

            def dying(*words: object, left: Iterator[int] = left, ask=ask) -> object:  # type: ignore[no-untyped-def]
                if next(left, 0) > 0:
                    return ask(*words)
                if done:
                    ask(*words)
                raise Killed

            going._objects._ask = dying  # type: ignore[method-assign, assignment]
            ended = False
            with suppress(Killed):
                going.run(yes, ignore)
                ended = True
            require_safe(cluster)
            run(cluster)
            require_moved(cluster)
        if ended:
            assert step > 6
            return


# Writes of a rebinding, as admission control may refuse them: by method and a part of the path.
WRITES = [
    ("PATCH", "persistentvolumes/"),
    ("POST", "persistentvolumes"),
    ("POST", "persistentvolumeclaims"),
    ("DELETE", "persistentvolumeclaims/"),
    ("DELETE", "persistentvolumes/"),
]


def refusing(
    method: str, part: str, text: str = "denied by policy"
) -> Callable[[str, str], tuple[int, Object] | None]:
    """A policy of the API server's admission control."""
    answer = {"kind": "Status", "reason": "Forbidden", "message": text}

    def policy(asked: str, path: str) -> tuple[int, Object] | None:
        return (403, answer) if asked == method and part in path else None

    return policy


@pytest.mark.parametrize(("method", "part"), WRITES)
def test_a_rehearsal_finds_each_write_that_would_be_refused_and_changes_nothing(
    cluster: Cluster, method: str, part: str
) -> None:
    before = json.dumps(cluster.objects)
    rebinding(cluster).rehearse()
    cluster.policy = refusing(method, part)
    with pytest.raises(errors.NotRebound, match="denied by policy; this was a trial"):
        rebinding(cluster).rehearse()
    assert (json.dumps(cluster.objects), cluster.writes) == (before, [])
    cluster.policy = lambda _method, _path: None
    run(cluster)
    require_moved(cluster)


@pytest.mark.parametrize(
    "text",
    [
        'admission webhook "claims.example.com" does not support dry run',
        'persistentvolumeclaims "data" is forbidden: exceeded quota: claims, requested: 1',
    ],
)
def test_what_a_trial_alone_is_refused_for_does_not_matter(cluster: Cluster, text: str) -> None:
    cluster.policy = refusing("POST", "persistentvolumeclaims", text)
    rebinding(cluster).rehearse()
    # The claim is deleted, and its share of the quota is free by then.
    with pytest.raises(errors.ClusterRefused):
        run(cluster)
    cluster.policy = lambda _method, _path: None
    run(cluster)
    require_moved(cluster)


@pytest.mark.parametrize(("method", "part"), WRITES)
def test_an_object_that_is_changed_during_its_trial_does_not_matter(
    cluster: Cluster, method: str, part: str
) -> None:
    answer = {"kind": "Status", "reason": "Conflict", "message": "the object has been modified"}

    def policy(asked: str, path: str) -> tuple[int, Object] | None:
        return (409, answer) if asked == method and part in path else None

    cluster.policy = policy
    rebinding(cluster).rehearse()


def test_a_claim_that_could_not_be_made_anew_is_not_deleted(cluster: Cluster) -> None:
    cluster.policy = refusing("POST", "persistentvolumeclaims")
    uid = cluster.claim["metadata"]["uid"]
    with pytest.raises(errors.NotRebound, match="denied by policy"):
        run(cluster)
    assert cluster.claim["metadata"]["uid"] == uid
    assert "deletionTimestamp" not in cluster.claim["metadata"]
    rebinding(cluster).undo(yes, ignore)
    require_safe(cluster)


@pytest.mark.parametrize("step", range(2, 6))
def test_a_rebinding_that_has_begun_is_not_rehearsed(cluster: Cluster, step: int) -> None:
    run_until(cluster, step)
    cluster.policy = lambda _method, _path: (403, {"kind": "Status", "reason": "Forbidden"})
    rebinding(cluster).rehearse()


ENDS: dict[str, Callable[[Cluster], None]] = {
    "its namespace is being deleted": lambda cluster: cluster.end_namespace(is_gone=False),
    "its namespace is gone": lambda cluster: cluster.end_namespace(is_gone=True),
    "its user deletes it": Cluster.end_claim,
}


def end(cluster: Cluster) -> None:
    """What drives a rebinding whose claim was deleted: it goes on, or undoes what was done."""
    try:
        run(cluster)
    except errors.NotRebound:
        # Without a PersistentVolume nothing is left to be undone.
        with suppress(errors.NotRebound):
            rebinding(cluster).undo(yes, ignore)
    cluster.settle()


@pytest.mark.parametrize("policy", ["Delete", "Retain"])
@pytest.mark.parametrize("ending", ENDS)
@pytest.mark.parametrize("lag", [0, 3])
@pytest.mark.parametrize("at", range(7))
def test_a_volume_whose_claim_is_deleted_between_steps_follows_its_reclaim_policy(
    at: int, lag: int, ending: str, policy: str
) -> None:
    with api_server.running(Cluster(policy=policy)) as cluster:
        with suppress(errors.NotConfirmed):
            # One that is Retain before needs no first step.
            run(cluster, times(at if policy == "Delete" else max(0, at - 1)))
        cluster.settle()
        cluster.lag = lag
        ENDS[ending](cluster)
        end(cluster)
        if "user" in ending and at in (2, 3):
            # Nothing tells this deletion from that of the rebinding itself: it is made anew once.
            assert cluster.deleted == []
            assert cluster.claim["status"]["phase"] == "Bound"
            cluster.end_claim()
            end(cluster)
        assert cluster.objects[CLAIMS] == []
        # The rebinding is undone, or was too far for that.
        kept = WAS if at < 4 and ("user" not in ending or at < 2) else IS
        if policy == "Delete":
            assert (cluster.deleted, cluster.volumes) == ([kept], {})
        else:
            [volume] = cluster.objects[VOLUMES]
            assert (cluster.deleted, volume["spec"]["csi"]["volumeHandle"]) == ([], kept)
            assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
            assert not any(key.startswith("move.") for key in volume["metadata"]["annotations"])
        # No step is left, so nothing is repeated.
        writes = len(cluster.writes)
        with suppress(errors.NotRebound):
            run(cluster)
        assert len(cluster.writes) == writes


@pytest.mark.parametrize("ending", ["its namespace is being deleted", "its namespace is gone"])
def test_a_claim_whose_namespace_ended_is_named_with_what_to_do(
    cluster: Cluster, ending: str
) -> None:
    run_until(cluster, 3)
    ENDS[ending](cluster)
    for _ in range(2):
        with pytest.raises(errors.ClaimEnded, match=r"shop/data: .*--undo --kubeconfig"):
            run(cluster)
    require_safe(cluster)


@pytest.mark.parametrize("failure", [nothing_done, refused])
def test_a_refusal_for_another_reason_is_no_proof_that_a_claim_has_ended(
    cluster: Cluster, failure: binding.Failure
) -> None:
    run_until(cluster, 3)
    cluster.failures[len(cluster.writes)] = failure
    with pytest.raises(errors.ClusterRefused):
        run(cluster)
    cluster.namespace_ended = failure(lambda: (200, {}))
    with pytest.raises(errors.ClusterRefused):
        rebinding(cluster).undo(yes, ignore)
    cluster.namespace_ended = None
    with pytest.raises(errors.NotRebound, match="can be made anew"):
        rebinding(cluster).undo(yes, ignore)
    run(cluster)
    require_moved(cluster)


@pytest.mark.parametrize("is_bound", [False, True])
def test_another_claim_of_the_name_does_not_hold_up_a_volume_whose_claim_was_deleted(
    cluster: Cluster, is_bound: bool
) -> None:
    run_until(cluster, 4)
    cluster.settle()
    cluster.end_claim()
    cluster.settle()
    assert cluster.objects[CLAIMS] == []
    spec: Object = {"storageClassName": "fast", **({"volumeName": "pvc-9"} if is_bound else {})}
    cluster._made(CLAIMS, {"metadata": {"name": "data", "namespace": "shop"}, "spec": spec})
    end(cluster)
    assert (cluster.deleted, cluster.volumes) == ([IS], {})
    assert cluster.claim["spec"] == spec


def test_an_incomplete_list_changes_nothing(cluster: Cluster) -> None:
    cluster.lie(VOLUMES, *[api_server.changed(lambda one: one.update(items=None))] * 3)
    with pytest.raises(errors.ClusterSilent, match="nothing was changed"):
        run(cluster)
    assert cluster.writes == []


def test_a_claim_recreated_by_a_statefulset_gets_the_volume(cluster: Cluster) -> None:
    spec = {key: value for key, value in cluster.claim["spec"].items() if key != "volumeName"}
    cluster.template = {"metadata": {"name": "data", "namespace": "shop"}, "spec": spec}
    run(cluster)
    require_moved(cluster)
    assert not any(one.startswith("POST /api/v1/namespaces") for one in cluster.writes)


@pytest.mark.parametrize("field", ["larger", "another class", "no class"])
def test_a_claim_recreated_otherwise_than_it_was_gets_no_empty_volume(
    cluster: Cluster, field: str
) -> None:
    """The binder would have a new volume made for it, and its pod would begin anew.

    A StatefulSet's template never changes with its claims: these have grown since, or got another
    VolumeAttributesClass, or the StatefulSet was made anew with a larger template.
    """
    spec = {key: value for key, value in cluster.claim["spec"].items() if key != "volumeName"}
    cluster.template = {"metadata": {"name": "data", "namespace": "shop"}, "spec": spec}
    if field == "larger":
        spec["resources"] = {"requests": {"storage": "2Gi"}}
    elif field == "another class":
        spec["volumeAttributesClassName"] = "silver"
    else:
        for one in (cluster.claim, cluster.volume("pvc-1")):
            one["spec"]["volumeAttributesClassName"] = "gold"
            cluster.changed(one)
    run(cluster)
    require_moved(cluster)
    assert not any(one.startswith("POST /api/v1/namespaces") for one in cluster.writes)


def test_a_claim_that_is_bound_while_its_volume_is_written_into_it_is_left(
    cluster: Cluster,
) -> None:
    spec = {key: value for key, value in cluster.claim["spec"].items() if key != "volumeName"}
    cluster.template = {"metadata": {"name": "data", "namespace": "shop"}, "spec": spec}
    cluster.lag = 3

    def is_late(_act: object) -> tuple[int, Object]:
        cluster.settle()
        return 409, {"kind": "Status", "reason": "Conflict", "message": "it has been modified"}

    cluster.failures[3] = is_late
    run(cluster)
    require_moved(cluster)
    assert sum(one.startswith("PUT") for one in cluster.writes) == 1


@pytest.mark.parametrize("finalizer", OF_WORK)
def test_a_claim_that_is_kept_until_a_copy_of_its_volume_is_complete_is_not_deleted(
    cluster: Cluster, finalizer: str
) -> None:
    """The copy would never be complete, as the volume is another node's, nor would the claim go."""
    cluster.claim["metadata"]["finalizers"].append(finalizer)
    with pytest.raises(errors.NotRebound, match=finalizer):
        run(cluster)
    assert cluster.writes == []
    cluster.claim["metadata"]["finalizers"].remove(finalizer)
    run_until(cluster, 2)
    cluster.claim["metadata"]["finalizers"].append(finalizer)
    with pytest.raises(errors.NotRebound, match=finalizer):
        run(cluster)
    # Nothing is lost: the steps can be undone, and the volume can be taken back.
    rebinding(cluster).undo(yes, ignore)
    assert cluster.volume("pvc-1")["spec"]["persistentVolumeReclaimPolicy"] == "Delete"
    assert list(cluster.volumes) == ["pvc-1"]
    require_safe(cluster)


UNEXPECTED = {
    "in use": "db-0",
    "unknown node": f"{KEY}=b",
    "another claim": "another claim",
    "another handle": "no PersistentVolume",
    "another driver": "no PersistentVolume",
    "a pod's claim": "its pod's",
    "two labels": "by hand",
    "two volumes": "pvc-2",
    "another volume": "pvc-7",
    "no claim": "gone",
}


def change(cluster: Cluster, what: str) -> None:
    volume, claim = cluster.volume("pvc-1"), cluster.claim
    spec = volume["spec"]
    match what:
        case "in use":
            cluster.pod("db-0", "machine-a", "Running")
        case "unknown node":
            cluster.objects[NODES].pop()
        case "another claim":
            spec["claimRef"]["uid"] = "uid-0"
        case "another handle":
            spec["csi"]["volumeHandle"] = "data@x/vol-other"
        case "another driver":
            spec["csi"]["driver"] = "other.csi"
        case "a pod's claim":
            claim["metadata"]["ownerReferences"] = [{"kind": "Pod", "name": "db-0", "uid": "1"}]
        case "two labels":
            [term] = spec["nodeAffinity"]["required"]["nodeSelectorTerms"]
            term["matchExpressions"].append({"key": "zone", "operator": "In", "values": ["1"]})
        case "two volumes":
            copy = json.loads(json.dumps(volume))
            copy["metadata"] |= {"name": "pvc-2", "uid": "uid-1"}
            cluster.objects[VOLUMES].append(copy)
        case "another volume":
            claim["spec"]["volumeName"] = "pvc-7"
        case "no claim":
            spec["persistentVolumeReclaimPolicy"] = "Retain"
            cluster.objects[CLAIMS].clear()
        case "grown":
            spec["capacity"] = {"storage": "2Gi"}
            cluster.changed(volume)


@pytest.mark.parametrize("what", UNEXPECTED)
def test_unexpected_objects_change_nothing(cluster: Cluster, what: str) -> None:
    change(cluster, what)
    with pytest.raises(errors.NotRebound, match=UNEXPECTED[what]):
        run(cluster)
    assert cluster.writes == []


def test_an_unscheduled_pod_does_not_matter(cluster: Cluster) -> None:
    cluster.pod("db-0")
    run(cluster)
    require_moved(cluster)


def test_a_claim_deleted_by_another_is_left(cluster: Cluster) -> None:
    # Something keeps it, or it were gone.
    cluster.pod("db-0", "machine-a", "Running")
    cluster.claim["metadata"]["deletionTimestamp"] = "now"
    with pytest.raises(errors.NotRebound, match="being deleted"):
        run(cluster)
    assert cluster.writes == []


def test_a_server_that_is_gone_is_reported(cluster: Cluster) -> None:
    going = rebinding(cluster)
    cluster.lie("/api/v1/namespaces/shop/persistentvolumeclaims/data", *[api_server.hang_up] * 3)
    with pytest.raises(errors.ClusterRefused, match="GET"):
        going.run(yes, ignore)
    cluster.lie("/api/v1/persistentvolumes/pvc-1", api_server.hang_up)
    with pytest.raises(errors.ClusterRefused, match="may have been done"):
        going.run(yes, ignore)
    # It was done all the same.
    assert cluster.volume("pvc-1")["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
    going.run(yes, ignore)
    require_moved(cluster)


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("what", ["grown", "in use"])
def test_a_change_during_confirmation_is_noticed(cluster: Cluster, what: str, at: int) -> None:
    numbers = itertools.count()

    def confirmed(_text: str) -> bool:
        if next(numbers) == at:
            change(cluster, what)
        return True

    with pytest.raises(errors.NotRebound):
        run(cluster, confirmed)
    assert len(cluster.writes) == at
    require_safe(cluster)


def test_a_volume_that_grew_since_is_rebound_with_its_size(cluster: Cluster) -> None:
    """External-resizer writes the size after the volume has grown, which may take a while."""
    run_until(cluster, 2)
    change(cluster, "grown")
    capacity = cluster.volume("pvc-1")["spec"]["capacity"]
    run(cluster)
    require_moved(cluster)
    [volume] = cluster.volumes.values()
    assert volume["spec"]["capacity"] == capacity


@pytest.mark.parametrize("lag", [0, 3])
@pytest.mark.parametrize(
    "status",
    [
        {"conditions": [{"type": "FileSystemResizePending", "status": "True"}]},
        {"allocatedResourceStatuses": {"storage": "NodeResizePending"}},
        {"allocatedResourceStatuses": {"storage": "NodeResizeInfeasible"}},
    ],
    ids=["condition", "pending", "infeasible"],
)
def test_a_claim_whose_node_has_not_grown_its_volume_yet_is_grown_after_the_move(
    cluster: Cluster, status: Object, lag: int
) -> None:
    """The PersistentVolume has the new size already, and what is pending is in the old claim only.

    Kubelet and external-resizer grow a claim again whose capacity is less than it asks for.
    """
    cluster.lag = lag
    claim = cluster.claim
    claim["spec"]["resources"]["requests"]["storage"] = "2Gi"
    claim["status"] |= status
    cluster.changed(claim)
    change(cluster, "grown")
    run(cluster)
    require_moved(cluster)
    assert cluster.claim["spec"]["resources"]["requests"]["storage"] == "2Gi"
    assert cluster.claim["status"]["capacity"] == {"storage": "1Gi"}
    [volume] = cluster.volumes.values()
    assert volume["spec"]["capacity"] == {"storage": "1Gi"}


def test_a_new_volume_that_is_not_kept_is_not_deleted(cluster: Cluster) -> None:
    run_until(cluster, 2)
    change(cluster, "grown")
    [name] = [name for name in cluster.volumes if name != "pvc-1"]
    cluster.volume(name)["spec"]["persistentVolumeReclaimPolicy"] = "Delete"
    with pytest.raises(errors.NotRebound, match=f"{name} is not Retain"):
        run(cluster)
    assert len(cluster.writes) == 2


def test_a_claim_that_changed_since_is_recreated_as_it_is(cluster: Cluster) -> None:
    run_until(cluster, 2)
    cluster.claim["metadata"]["labels"]["tier"] = "gold"
    cluster.changed(cluster.claim)
    run(cluster)
    require_moved(cluster)
    assert cluster.claim["metadata"]["labels"] == {"app": "db", "tier": "gold"}


def test_a_claim_kept_by_a_finalizer_is_awaited_for_a_limited_time(cluster: Cluster) -> None:
    numbers = itertools.count()

    def confirmed(_text: str) -> bool:
        if next(numbers) == 2:
            cluster.lag = 10_000
        return True

    with pytest.raises(errors.NotRebound, match="pvc-protection"):
        run(cluster, confirmed)
    cluster.lag = cluster._asleep = 0
    run(cluster)
    require_moved(cluster)


def test_a_claim_changed_by_hand_is_named(cluster: Cluster) -> None:
    run(cluster)
    [volume] = cluster.objects[VOLUMES]
    volume["spec"]["claimRef"]["name"] = "other"
    with pytest.raises(errors.NotRebound):
        run(cluster)
    volume["spec"]["claimRef"]["name"] = "data"
    cluster.objects[CLAIMS].clear()
    with pytest.raises(errors.NotRebound, match="it was deleted"):
        run(cluster)


def test_a_taken_name_is_reported(cluster: Cluster) -> None:
    run(cluster)
    [taken] = cluster.volumes
    with api_server.running(Cluster()) as other:
        foreign = json.loads(json.dumps(other.volume("pvc-1")))
        foreign["metadata"] |= {"name": taken, "uid": "uid-1"}
        foreign["spec"]["csi"]["driver"] = "other.csi"
        foreign["spec"]["persistentVolumeReclaimPolicy"] = "Retain"
        other.objects[VOLUMES].append(foreign)
        with pytest.raises(errors.ClusterRefused, match="already exists"):
            run(other)
        require_safe(other)
