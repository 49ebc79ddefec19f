"""A claim is its moved volume's in the end, whatever fails on the way, and no data are at risk."""

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import api_server
import binding
import pytest
from api_server import CLAIMS, NODES, VOLUMES, Object, kubeconfig
from binding import DRIVER, KEY, Cluster

from agent.core import errors, ids
from agent.extras.kubernetes import access
from agent.extras.kubernetes.rebinding import Place, Rebinding
from agent.extras.transfer import claims
from proto import carver_pb2 as carver

WAS, IS = "data@x/vol-pvc-1", "data@y/vol-pvc-1"
PLACE = Place(IS, "b", DRIVER)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with api_server.running(Cluster()) as made:
        yield made


def rebinding(cluster: Cluster, directory: Path, place: Place = PLACE) -> Rebinding:
    server = access.of_file(kubeconfig(directory / "kubeconfig", cluster.url))
    return Rebinding(server, WAS, place)


def run(cluster: Cluster, directory: Path, yes: Callable[[str], bool] = lambda _text: True) -> None:
    rebinding(cluster, directory).run(yes, lambda _text: None)


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


def test_a_claim_gets_the_volume_where_it_is_now(cluster: Cluster, tmp_path: Path) -> None:
    asked: list[str] = []

    def yes(text: str) -> bool:
        asked.append(text)
        return True

    run(cluster, tmp_path, yes)
    require_moved(cluster)
    # Six times, and no two at once.
    assert len(asked) == len(cluster.writes) == 6
    assert cluster.claim["metadata"]["labels"] == {"app": "db"}
    assert cluster.claim["metadata"].get("annotations", {}) == {}
    assert cluster.claim["spec"]["resources"] == {"requests": {"storage": "1Gi"}}
    # The same again: nothing is asked, and nothing written.
    run(cluster, tmp_path, yes)
    assert len(asked) == len(cluster.writes) == 6


def test_what_was_retain_stays_so(tmp_path: Path) -> None:
    with api_server.running(Cluster(policy="Retain")) as cluster:
        run(cluster, tmp_path)
        require_moved(cluster, "Retain")


def test_it_moves_on_to_a_third_node_under_a_name_of_no_greater_length(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.add(NODES, "machine-c", metadata={"labels": {KEY: "c"}})
    run(cluster, tmp_path)
    [first] = cluster.volumes
    server = access.of_file(kubeconfig(tmp_path / "kubeconfig", cluster.url))
    there = Place("data@z/vol-pvc-1", "c", DRIVER)
    Rebinding(server, IS, there).run(lambda _text: True, lambda _text: None)
    [second] = cluster.volumes
    assert first != second
    assert len(first) == len(second)
    assert cluster.volume(second)["spec"]["csi"]["volumeHandle"] == "data@z/vol-pvc-1"
    require_safe(cluster)


def test_a_claim_moves_between_nodes_whose_names_no_label_can_hold(tmp_path: Path) -> None:
    a, b = (f"{one}.{'n' * 63}.{'o' * 63}" for one in "ab")
    there = ids.node_segment(b)
    with api_server.running(Cluster(nodes=(ids.node_segment(a), there))) as cluster:
        rebinding(cluster, tmp_path, Place(IS, b, DRIVER)).run(
            lambda _text: True, lambda _text: None
        )
        cluster.settle()
        [volume] = cluster.objects[VOLUMES]
        [term] = volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"]
        assert term == {"matchExpressions": [{"key": KEY, "operator": "In", "values": [there]}]}
        assert cluster.claim["status"]["phase"] == "Bound"
        require_safe(cluster)
    told = claims.steps(
        carver.MoveState(pv="pvc-1", pvc="data", namespace="shop", volume_id=WAS),
        Place(IS, b, DRIVER),
    )
    assert f'"values": ["{there}"]' in told


@pytest.mark.parametrize("at", range(6))
def test_each_step_waits_for_a_yes_and_goes_on_later(
    cluster: Cluster, tmp_path: Path, at: int
) -> None:
    numbers = itertools.count()
    with pytest.raises(errors.NotConfirmed):
        run(cluster, tmp_path, lambda _text: next(numbers) < at)
    cluster.settle()
    assert len(cluster.writes) == at
    require_safe(cluster)
    run(cluster, tmp_path)
    require_moved(cluster)


@pytest.mark.parametrize("at", range(3))
def test_what_no_claim_has_yet_is_taken_back(cluster: Cluster, tmp_path: Path, at: int) -> None:
    before = json.loads(json.dumps(cluster.volume("pvc-1")["spec"]))
    numbers = itertools.count()
    with pytest.raises(errors.NotConfirmed):
        run(cluster, tmp_path, lambda _text: next(numbers) < at)
    # Also where whoever does it fails at each step.
    for left in (0, 1, 2, 3):
        answers = iter([True] * left)

        def yes(_text: str, answers: Iterator[bool] = answers) -> bool:
            return next(answers, False)

        with suppress(errors.NotConfirmed):
            rebinding(cluster, tmp_path).undo(yes, lambda _text: None)
        require_safe(cluster)
    assert list(cluster.volumes) == ["pvc-1"]
    assert cluster.volume("pvc-1")["spec"] == before
    assert len(cluster.volume("pvc-1")["metadata"]["annotations"]) == 1
    assert cluster.claim["spec"]["volumeName"] == "pvc-1"


@pytest.mark.parametrize("at", range(3, 7))
def test_what_a_claim_has_is_not_taken_from_it(cluster: Cluster, tmp_path: Path, at: int) -> None:
    numbers = itertools.count()
    with suppress(errors.NotConfirmed):
        run(cluster, tmp_path, lambda _text: next(numbers) < at)
    writes = list(cluster.writes)
    with pytest.raises(errors.NotRebound, match="back from b"):
        rebinding(cluster, tmp_path).undo(lambda _text: True, lambda _text: None)
    assert cluster.writes == writes
    run(cluster, tmp_path)
    require_moved(cluster)


def nothing_done(_act: object) -> tuple[int, Object]:
    return 500, {"kind": "Status", "message": "etcd has no leader"}


def refused(_act: object) -> tuple[int, Object]:
    return 403, {"kind": "Status", "reason": "Forbidden", "message": "whoever asks may not"}


def done_and_silent(act: Callable[[], tuple[int, Object]]) -> tuple[int, Object]:
    act()
    return 504, {"kind": "Status", "message": "the request timed out"}


@pytest.mark.parametrize("lag", [0, 3])
@pytest.mark.parametrize("failure", [nothing_done, refused, done_and_silent])
@pytest.mark.parametrize("at", range(6))
def test_a_server_that_fails_at_a_step_leaves_all_safe_and_the_same_words_go_on(
    cluster: Cluster, tmp_path: Path, at: int, failure: binding.Failure, lag: int
) -> None:
    cluster.lag = lag
    cluster.failures[at] = failure
    with pytest.raises(errors.ClusterRefused):
        run(cluster, tmp_path)
    require_safe(cluster)
    run(cluster, tmp_path)
    require_moved(cluster)


@pytest.mark.parametrize("done", [False, True])
def test_whoever_is_killed_at_any_request_is_followed_by_one_that_goes_on(
    tmp_path: Path, done: bool
) -> None:
    class Killed(BaseException):
        """The process ended."""

    for step in itertools.count():
        with api_server.running(Cluster()) as cluster:
            left = iter(range(step, -1, -1))
            going = rebinding(cluster, tmp_path)
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
                going.run(lambda _text: True, lambda _text: None)
                ended = True
            require_safe(cluster)
            run(cluster, tmp_path)
            require_moved(cluster)
        if ended:
            assert step > 6
            return


def test_a_lie_in_a_list_changes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    cluster.lie(VOLUMES, *[api_server.changed(lambda one: one.update(items=None))] * 3)
    with pytest.raises(errors.ClusterSilent, match="nothing was changed"):
        run(cluster, tmp_path)
    assert cluster.writes == []


def test_a_claim_that_a_statefulset_makes_again_gets_the_volume_too(
    cluster: Cluster, tmp_path: Path
) -> None:
    spec = {key: value for key, value in cluster.claim["spec"].items() if key != "volumeName"}
    cluster.template = {"metadata": {"name": "data", "namespace": "shop"}, "spec": spec}
    run(cluster, tmp_path)
    require_moved(cluster)
    assert not any(one.startswith("POST /api/v1/namespaces") for one in cluster.writes)


def in_use(cluster: Cluster) -> None:
    cluster.pod("db-0", "machine-a", "Running")


def node_unknown(cluster: Cluster) -> None:
    cluster.objects[NODES].pop()


def another_claim(cluster: Cluster) -> None:
    cluster.volume("pvc-1")["spec"]["claimRef"]["uid"] = "uid-0"


def unnamed(cluster: Cluster) -> None:
    cluster.volume("pvc-1")["spec"]["csi"]["volumeHandle"] = "data@x/vol-other"


def another_driver(cluster: Cluster) -> None:
    cluster.volume("pvc-1")["spec"]["csi"]["driver"] = "other.csi"


def of_a_pod(cluster: Cluster) -> None:
    cluster.claim["metadata"]["ownerReferences"] = [{"kind": "Pod", "name": "db-0", "uid": "1"}]


def of_a_zone(cluster: Cluster) -> None:
    [term] = cluster.volume("pvc-1")["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"]
    term["matchExpressions"].append({"key": "zone", "operator": "In", "values": ["1"]})


def twice(cluster: Cluster) -> None:
    copy = json.loads(json.dumps(cluster.volume("pvc-1")))
    copy["metadata"] |= {"name": "pvc-2", "uid": "uid-1"}
    cluster.objects[VOLUMES].append(copy)


def claim_elsewhere(cluster: Cluster) -> None:
    cluster.claim["spec"]["volumeName"] = "pvc-7"


def claim_gone(cluster: Cluster) -> None:
    cluster.volume("pvc-1")["spec"]["persistentVolumeReclaimPolicy"] = "Retain"
    cluster.objects[CLAIMS].clear()


@pytest.mark.parametrize(
    ("fact", "word"),
    [
        (in_use, "db-0"),
        (node_unknown, f"{KEY}=b"),
        (another_claim, "another claim"),
        (unnamed, "no PersistentVolume"),
        (another_driver, "no PersistentVolume"),
        (of_a_pod, "its pod's"),
        (of_a_zone, "by hand"),
        (twice, "pvc-2"),
        (claim_elsewhere, "pvc-7"),
        (claim_gone, "gone"),
    ],
)
def test_where_facts_are_not_as_expected_nothing_is_changed(
    cluster: Cluster, tmp_path: Path, fact: Callable[[Cluster], None], word: str
) -> None:
    fact(cluster)
    with pytest.raises(errors.NotRebound, match=word):
        run(cluster, tmp_path)
    assert cluster.writes == []


def test_pods_that_wait_for_a_node_or_have_ended_do_not_matter(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.pod("db-0")
    run(cluster, tmp_path)
    require_moved(cluster)


def grown(cluster: Cluster) -> None:
    volume = cluster.volume("pvc-1")
    volume["spec"]["capacity"] = {"storage": "2Gi"}
    cluster.changed(volume)


def started(cluster: Cluster) -> None:
    cluster.pod("db-0", "machine-a", "Running")


def deleted(cluster: Cluster) -> None:
    cluster.claim["metadata"]["deletionTimestamp"] = "now"


def test_a_claim_that_somebody_else_deletes_is_left_to_them(
    cluster: Cluster, tmp_path: Path
) -> None:
    # Something keeps it, or it were gone.
    cluster.pod("db-0", "machine-a", "Running")
    deleted(cluster)
    with pytest.raises(errors.NotRebound, match="being deleted"):
        run(cluster, tmp_path)
    assert cluster.writes == []


def test_a_server_that_is_gone_is_told(cluster: Cluster, tmp_path: Path) -> None:
    def yes(_text: str) -> bool:
        return True

    going = rebinding(cluster, tmp_path)
    cluster.lie("/api/v1/namespaces/shop/persistentvolumeclaims/data", *[api_server.hang_up] * 3)
    with pytest.raises(errors.ClusterRefused, match="GET"):
        going.run(yes, lambda _text: None)
    cluster.lie("/api/v1/persistentvolumes/pvc-1", api_server.hang_up)
    with pytest.raises(errors.ClusterRefused, match="may have been done"):
        going.run(yes, lambda _text: None)
    # It was done all the same.
    assert cluster.volume("pvc-1")["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
    going.run(yes, lambda _text: None)
    require_moved(cluster)


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("fact", [grown, started])
def test_what_changes_while_one_thinks_is_noticed(
    cluster: Cluster, tmp_path: Path, fact: Callable[[Cluster], None], at: int
) -> None:
    numbers = itertools.count()

    def yes(_text: str) -> bool:
        if next(numbers) == at:
            fact(cluster)
        return True

    with pytest.raises(errors.NotRebound):
        run(cluster, tmp_path, yes)
    assert len(cluster.writes) == at
    require_safe(cluster)


def test_a_volume_that_grew_since_is_not_given_up_for_an_old_picture(
    cluster: Cluster, tmp_path: Path
) -> None:
    numbers = itertools.count()
    with pytest.raises(errors.NotConfirmed):
        run(cluster, tmp_path, lambda _text: next(numbers) < 2)
    grown(cluster)
    with pytest.raises(errors.NotRebound, match="delete that"):
        run(cluster, tmp_path)
    assert len(cluster.writes) == 2


def test_a_claim_that_changed_since_is_made_anew_as_it_is(cluster: Cluster, tmp_path: Path) -> None:
    numbers = itertools.count()
    with pytest.raises(errors.NotConfirmed):
        run(cluster, tmp_path, lambda _text: next(numbers) < 2)
    cluster.claim["metadata"]["labels"]["tier"] = "gold"
    cluster.changed(cluster.claim)
    run(cluster, tmp_path)
    require_moved(cluster)
    assert cluster.claim["metadata"]["labels"] == {"app": "db", "tier": "gold"}


def test_a_claim_that_is_kept_is_waited_for_but_not_for_ever(
    cluster: Cluster, tmp_path: Path
) -> None:
    numbers = itertools.count()

    def yes(_text: str) -> bool:
        if next(numbers) == 2:
            cluster.lag = 10_000
        return True

    with pytest.raises(errors.NotRebound, match="pvc-protection"):
        run(cluster, tmp_path, yes)
    cluster.lag = cluster._asleep = 0
    run(cluster, tmp_path)
    require_moved(cluster)


def test_one_made_by_hand_is_gone_on_with_or_named(cluster: Cluster, tmp_path: Path) -> None:
    run(cluster, tmp_path)
    [volume] = cluster.objects[VOLUMES]
    volume["spec"]["claimRef"]["name"] = "other"
    with pytest.raises(errors.NotRebound):
        run(cluster, tmp_path)
    volume["spec"]["claimRef"]["name"] = "data"
    cluster.objects[CLAIMS].clear()
    with pytest.raises(errors.NotRebound, match="volumeName"):
        run(cluster, tmp_path)


def test_a_name_that_is_taken_is_told(cluster: Cluster, tmp_path: Path) -> None:
    run(cluster, tmp_path)
    [taken] = cluster.volumes
    with api_server.running(Cluster()) as other:
        foreign = json.loads(json.dumps(other.volume("pvc-1")))
        foreign["metadata"] |= {"name": taken, "uid": "uid-1"}
        foreign["spec"]["csi"]["driver"] = "other.csi"
        foreign["spec"]["persistentVolumeReclaimPolicy"] = "Retain"
        other.objects[VOLUMES].append(foreign)
        with pytest.raises(errors.ClusterRefused, match="already exists"):
            run(other, tmp_path)
        require_safe(other)
