"""Clusters in which nodes, pods and objects change against an evacuation while it goes on."""

import json
from collections.abc import Callable

import evacuation_histories as histories
import pytest
from evacuation_histories import History
from evacuation_kube import Object
from one_evacuation import calls, cluster, evacuate, run_until, said

from agent.core import tag
from agent.settings.settings import TOPOLOGY_KEY


def problems(history: History) -> list[str]:
    """The problems of all units that are shown now."""
    nodes = [one for controller in history.controllers for one in controller.progress.snapshot()]
    return [unit.problem for node in nodes for unit in node.units if unit.problem]


def requests(history: History) -> Callable[[], int]:
    """Count the requests to the API server from now on."""
    count, answer = [0], history.kube.answer

    def counted(method: str, url: str, body: bytes | None) -> tuple[int, Object]:
        count[0] += 1
        return answer(method, url, body)

    history.kube.answer = counted  # type: ignore[method-assign]
    return lambda: count[0]


def evictions(history: History) -> int:
    return sum(write.endswith("/eviction") for write in history.kube.writes)


# What a rebinding would refuse is refused before the hand-over: a volume that was handed over, and
# whose claim cannot be rebound, can be used by no pod.


def expression(key: str, operator: str, *values: str) -> Object:
    return {"key": key, "operator": operator, "values": list(values)}


@pytest.mark.parametrize(
    "terms",
    [
        [],
        [{"matchExpressions": [expression("kubernetes.io/hostname", "In", "a")]}],
        [{"matchExpressions": [expression(TOPOLOGY_KEY, "In", "a", "b")]}],
        [{"matchExpressions": [expression(TOPOLOGY_KEY, "NotIn", "b")]}],
        [{"matchExpressions": [expression(TOPOLOGY_KEY, "In", "a")]}] * 2,
        [{"matchExpressions": [expression(TOPOLOGY_KEY, "In", "a")] * 2}],
        [
            {
                "matchExpressions": [expression(TOPOLOGY_KEY, "In", "a")],
                "matchFields": [expression("metadata.name", "In", "a")],
            }
        ],
        [{"matchFields": [expression("metadata.name", "In", "a")]}],
    ],
)
def test_a_volume_whose_claim_could_not_be_rebound_is_not_handed_over(terms: list[Object]) -> None:
    with cluster() as history:
        volume = history.kube.volume("pvc-data-db-0")
        assert volume is not None
        volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"] = terms
        commits = calls(history, "commit")
        evacuate(history)
        history.run(900.0)
        assert commits() == 0
        assert evictions(history) == 0
        assert "another node affinity" in said(history, "VolumeStays")[0]


def test_no_volume_goes_to_a_node_on_which_its_pod_could_not_be_placed() -> None:
    with cluster() as history:
        labels = history.kube.node("b")["metadata"]["labels"]
        value = labels.pop(TOPOLOGY_KEY)
        evacuate(history, '{"to": ["b"]}')
        history.run(900.0)
        assert evictions(history) == 0
        assert "b has not the topology label" in said(history, "VolumeStays")[0]
        labels[TOPOLOGY_KEY] = value
        history.settle(lambda: history.is_settled(left="a"))


# Pods that do not leave


def test_a_pod_that_tolerates_a_cordoned_node_is_not_evicted() -> None:
    """It would be placed on the same node again, after each eviction."""
    with cluster() as history:
        history.kube.template = {"tolerations": [{"operator": "Exists"}]}
        for pod in history.kube.all("pods"):
            pod["spec"] |= history.kube.template
        evacuate(history)
        history.run(900.0)
        assert evictions(history) == 0
        assert "tolerates the taint" in said(history, "VolumeStays")[0]
        # An operator scales its controller to no pods: the volume goes.
        claims = history.kube.replicas.pop("db-0")
        history.kube.objects["pods"].clear()
        for volume in history.services["a"].volumes.values():
            volume.users.clear()
        history.settle(lambda: "" if history.kube.place_of("data-db-0") != "a" else "on a")
        history.kube.replicas["db-0"] = claims
        history.settle(lambda: history.is_settled(left="a"))


def test_a_pod_that_returns_to_the_node_is_not_evicted_without_end() -> None:
    """As one whose controller sets its nodeName: no plan can know that."""
    with cluster() as history:
        history.kube.template = {"nodeName": "a"}
        # The controller of the pods is faster than any look.
        schedule = history.kube._sync_set

        def tick() -> None:
            schedule()
            history.kube._kubelet()

        history.kube.tick = tick  # type: ignore[method-assign]
        evacuate(history)
        history.run(3600.0)
        assert evictions(history) < 20
        assert any("made anew on a" in problem for problem in problems(history))
        assert "made anew on a" in said(history, "VolumeMoveWaits")[-1]


def test_a_pod_that_does_not_end_is_named_and_asked_for_slowly() -> None:
    with cluster() as history:
        history.kube.objects["pods"]["shop", "db-0"]["metadata"]["finalizers"] = ["some/finalizer"]
        history.moves.stream_seconds = lambda: 0.1
        evacuate(history)
        history.run(600.0)
        count, shown = requests(history), 0
        before = count()
        for _ in range(30):
            history.run(60.0)
            shown += any("does not end" in problem for problem in problems(history))
        assert count() - before < 30 * 40
        assert shown >= 25
        assert "pod shop/db-0" in said(history, "VolumeMoveWaits")[-1]
        del history.kube.objects["pods"]["shop", "db-0"]["metadata"]["finalizers"]
        history.settle(lambda: history.is_settled(left="a"))


def test_the_pods_of_a_namespace_are_not_listed_while_one_on_the_node_is_awaited() -> None:
    """A namespace may have thousands, and a page of them has twenty."""
    with cluster() as history:
        history.kube.refuses = lambda: True
        evacuate(history)
        history.run(60.0)
        whole, answer = [0], history.kube.answer

        def counted(method: str, url: str, body: bytes | None) -> tuple[int, Object]:
            whole[0] += "/namespaces/shop/pods?" in url and "spec.nodeName" not in url
            return answer(method, url, body)

        history.kube.answer = counted  # type: ignore[method-assign]
        history.run(1800.0)
        assert evictions(history) > 100
        assert whole[0] == 0
        history.kube.refuses = lambda: False
        history.settle(lambda: history.is_settled(left="a"))


def test_an_evacuation_that_has_ended_asks_for_little() -> None:
    """Its annotation stays for days, while the machine is repaired."""
    with cluster() as history:
        evacuate(history)
        history.settle(lambda: history.is_settled(left="a"))
        history.run(300.0)
        pods, answer = [0], history.kube.answer

        def counted(method: str, url: str, body: bytes | None) -> tuple[int, Object]:
            pods[0] += "/api/v1/pods" in url
            return answer(method, url, body)

        history.kube.answer = counted  # type: ignore[method-assign]
        count = requests(history)
        history.run(3600.0)
        assert pods[0] <= 7
        assert count() <= 60 * 9
        # A volume that comes all the same, as by a pod that was bound to the node by name, goes.
        history.kube.replica("db-1", {"data-db-1": "linear"}, "a", "Delete")
        history.settle(lambda: history.is_settled(left="a"))


def test_a_volume_that_is_in_use_without_a_pod_is_shown_for_as_long_as_it_is() -> None:
    with cluster() as history:
        volume = history.services["a"].volumes["pvc-data-db-0"]
        volume.users.add("a mount by hand")
        history.kube._kubelet = _without(history, "a mount by hand")  # type: ignore[method-assign]
        evacuate(history)
        history.run(900.0)
        shown, count = 0, requests(history)
        for _ in range(30):
            history.run(60.0)
            shown += any("though no pod uses it" in problem for problem in problems(history))
        assert shown >= 25
        assert count() < 30 * 40
        volume.users.discard("a mount by hand")
        history.settle(lambda: history.is_settled(left="a"))


def _without(history: History, user: str) -> Callable[[], None]:
    """Kubelet, which unmounts nothing that a user mounted."""
    volume, kubelet = history.services["a"].volumes["pvc-data-db-0"], history.kube._kubelet

    def act() -> None:
        was_used = user in volume.users
        kubelet()
        if was_used:
            volume.users.add(user)

    return act


# Admission control

# Writes of a rebinding: method, a part of the path, and a part of the body.
WRITES = [
    ("PATCH", "persistentvolumes/", "persistentVolumeReclaimPolicy"),
    ("POST", "persistentvolumes", ""),
    ("POST", "persistentvolumeclaims", ""),
    ("DELETE", "persistentvolumeclaims/log", ""),
    ("DELETE", "persistentvolumes/", ""),
]


@pytest.mark.parametrize(("method", "part", "text"), WRITES)
def test_a_pod_runs_on_while_its_claim_could_not_be_rebound(
    method: str, part: str, text: str
) -> None:
    """Whatever admission control refuses is found before the pod is evicted."""
    with cluster({"db-0": {"data-db-0": "linear", "log-db-0": "thin"}}) as history:
        [pod] = history.kube.all("pods")

        def policy(asked: str, path: str, body: object) -> str:
            is_refused = asked == method and part in path and text in json.dumps(body)
            return "denied by policy" if is_refused else ""

        history.kube.policy = policy
        evacuate(history)
        handed_over = calls(history, "commit")
        history.run(1800.0)
        assert handed_over() == 0
        uids = [one["metadata"]["uid"] for one in history.kube.all("pods")]
        assert uids == [pod["metadata"]["uid"]]
        assert "denied by policy" in said(history, "VolumeMoveWaits")[-1]
        history.kube.policy = lambda *_: ""
        history.settle(lambda: history.is_settled(left="a"))


# Nodes that are deleted, and cordons

BEFORE = ("begin", "take", "Pull", "hold")
AFTER = ("commit", "FinishReceive", "POST volume", "DELETE claim", "DELETE volume")


def cordoned(history: History) -> str:
    """The names of the Nodes that are cordoned."""
    nodes = history.kube.all("nodes")
    return "".join(one["metadata"]["name"] for one in nodes if one["spec"].get("unschedulable"))


@pytest.mark.parametrize("stage", BEFORE)
def test_a_volume_goes_elsewhere_if_its_target_is_deleted_before_the_hand_over(stage: str) -> None:
    with cluster() as history:
        evacuate(history)
        run_until(history, stage)
        target = history.services["a"].volumes["pvc-data-db-0"].move_to
        history.kube.remove_node(target)
        history.settle(lambda: history.is_settled(left="a"))
        assert history.kube.place_of("data-db-0") not in ("a", target)


@pytest.mark.parametrize("text", ['"undo"', '"stop"', None])
@pytest.mark.parametrize("stage", BEFORE)
def test_an_evacuation_whose_target_is_deleted_can_be_ended(stage: str, text: str | None) -> None:
    with cluster() as history:
        evacuate(history)
        run_until(history, stage)
        volume = history.services["a"].volumes["pvc-data-db-0"]
        history.kube.remove_node(volume.move_to)
        history.kube.request("a", text)
        history.settle(lambda: volume.move_to or ", ".join(history.noted))
        history.kube.uncordon("a")
        history.settle(history.is_settled)


@pytest.mark.parametrize("stage", ["commit", "FinishReceive", "POST volume"])
@pytest.mark.parametrize("text", ["{}", '"stop"', None])
def test_what_was_handed_over_to_a_node_that_is_deleted_is_kept_and_shown(
    stage: str, text: str | None
) -> None:
    with cluster() as history:
        evacuate(history)
        run_until(history, stage)
        volume = history.services["a"].volumes["pvc-data-db-0"]
        kept = volume.content
        history.kube.remove_node(volume.move_to)
        history.kube.request("a", text)
        history.ahead = 1e6
        history.run(3600.0)
        assert (volume.state, volume.content) == (tag.MOVED, kept)
        [shown] = set(said(history, "VolumeStays"))
        assert "what is left on a may be the last copy" in shown
        assert any("the last copy" in problem for problem in problems(history))


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("stage", AFTER)
def test_a_claim_follows_its_volume_although_the_source_is_lost(
    stage: str, *, is_killed: bool
) -> None:
    """The target has the data. Without the claim no pod could use them."""
    with cluster() as history:
        controller = evacuate(history, '{"to": ["b"]}')
        run_until(history, stage)
        history.kube.remove_node("a")
        if is_killed:
            history.kill(controller)
            history.start()
        if stage == "commit":
            # The target never got the word. It keeps what it has, and goes on if the node is back.
            history.run(3600.0)
            assert history.services["b"].volumes["pvc-data-db-0"].is_coming
            assert "goes on if a comes back" in said(history, "VolumeMoveWaits")[-1]
            # An operator says that it is never back.
            history.services["b"].keep("pvc-data-db-0")
        history.settle(lambda: history.is_settled(left="a"))


@pytest.mark.parametrize("stage", ["take", "hold"])
def test_what_was_received_before_the_source_was_lost_can_be_kept(stage: str) -> None:
    with cluster() as history:
        evacuate(history, '{"to": ["b"]}')
        run_until(history, stage)
        received = history.services["b"].volumes.get("pvc-data-db-0")
        while received is None or not received.chain or received.into:
            history.run(1.0)
            received = history.services["b"].volumes.get("pvc-data-db-0")
        history.kube.remove_node("a")
        history.run(3600.0)
        kept = received.content or ()
        # Its disks are lost, too.
        history.services["a"].volumes.clear()
        history.services["b"].keep("pvc-data-db-0")
        history.settle(
            lambda: "" if history.kube.place_of("data-db-0") == "b" else "it is not rebound"
        )
        assert (received.content or ())[: len(kept)] == kept


@pytest.mark.parametrize("text", [None, "{}", '"undo"'])
@pytest.mark.parametrize("stage", ["hold", "commit"])
def test_a_source_that_comes_back_after_all_keeps_what_only_it_has(
    stage: str, text: str | None
) -> None:
    """An operator has said that its disks are lost, and the target has what it had received."""
    with cluster() as history:
        evacuate(history, '{"to": ["b"]}')
        run_until(history, stage)
        received = history.services["b"].volumes["pvc-data-db-0"]
        while not received.chain or received.into:
            history.run(1.0)
        node = json.loads(json.dumps(history.kube.node("a")))
        history.kube.remove_node("a")
        disks = dict(history.services["a"].volumes)
        history.services["a"].volumes.clear()
        history.services["b"].keep("pvc-data-db-0")
        # What was written later is lost.
        history.kube.lines["data-db-0"] = list(received.content or ())
        history.kube.check = lambda: None  # type: ignore[method-assign]
        history.settle(
            lambda: "" if history.kube.place_of("data-db-0") == "b" else "it is not rebound"
        )
        content = disks["pvc-data-db-0"].content
        history.services["a"].volumes.update(disks)
        history.services["a"].is_up = True
        history.kube.make("nodes", node)
        history.kube.request("a", text)
        history.ahead = 2 * histories.GRACE_SECONDS
        history.run(3600.0)
        if stage == "commit" and text == '"undo"':
            assert history.kube.place_of("data-db-0") == "a"
            return
        assert history.services["b"].volumes["pvc-data-db-0"] is received
        assert received.is_usable
        # All that was handed over is on the target.
        left = history.services["a"].volumes.get("pvc-data-db-0")
        assert (left and left.content) == (None if stage == "commit" else content)


@pytest.mark.parametrize("text", ["{}", '"undo"', '"stop"'])
@pytest.mark.parametrize("stage", [*BEFORE, *AFTER])
def test_nothing_is_shown_or_cordoned_for_a_node_that_was_deleted(stage: str, text: str) -> None:
    with cluster() as history:
        controller = evacuate(history, '{"to": ["b"]}')
        run_until(history, stage)
        history.kube.request("a", text)
        history.run(90.0)
        history.kube.remove_node("a")
        history.run(300.0)
        assert not cordoned(history)
        assert "a" not in [one.node for one in controller.progress.snapshot()]


def test_a_cordon_for_an_undo_is_lifted_if_the_node_is_deleted_in_its_middle() -> None:
    with cluster() as history:
        controller = evacuate(history, '{"to": ["b"]}')
        history.settle(lambda: history.is_settled(left="a"))
        history.kube.refuses = lambda: True
        history.kube.request("a", '"undo"')
        history.settle(lambda: "" if cordoned(history) == "b" else "not yet")
        history.kube.remove_node("a")
        history.settle(lambda: cordoned(history))
        # The same if the controller has not seen the Node at all.
        history.kube.node("b")["spec"]["unschedulable"] = True
        history.kube.node("b")["metadata"]["annotations"] = {
            "evacuate.lvm.csi.carver/cordoned-for": "a"
        }
        history.kill(controller)
        history.start()
        history.settle(lambda: cordoned(history))
        history.kube.refuses = lambda: False
        history.settle(history.is_settled)


def test_an_undo_lifts_a_cordon_that_was_set_for_another_undo_before() -> None:
    with cluster() as history:
        evacuate(history, '{"to": ["b"]}')
        history.settle(lambda: history.is_settled(left="a"))
        history.kube.refuses = lambda: True
        history.kube.request("a", '"undo"')
        history.settle(lambda: "" if cordoned(history) == "b" else "not yet")
        history.kube.request("b", "{}")
        history.run(60.0)
        history.kube.request("a", None)
        history.kube.refuses = lambda: False
        history.settle(lambda: history.is_settled(left="b"))
        history.kube.request("b", '"undo"')
        history.settle(lambda: cordoned(history))


# What is requested and shown


@pytest.mark.parametrize("stage", ["commit", "FinishReceive", "POST volume", "DELETE claim"])
def test_a_wrong_request_leaves_no_claim_between_nodes(stage: str) -> None:
    with cluster() as history:
        controller = evacuate(history)
        run_until(history, stage)
        history.kill(controller)
        history.kube.request("a", '{"too": ["b"]}')
        history.start()
        history.settle(lambda: history.is_settled(left="a"))
        [shown] = history.controllers[0].progress.snapshot()
        assert "`too`" in shown.problem or "'too'" in shown.problem


def test_an_evacuation_is_not_complete_once_a_volume_that_stayed_goes() -> None:
    with cluster() as history:
        for name in "bc":
            history.services[name].free_bytes = 0
        controller = evacuate(history)
        history.run(200.0)
        assert [one.is_complete for one in controller.progress.snapshot()] == [True]
        history.moves.stream_seconds = lambda: 60.0
        history.services["b"].free_bytes = 100 << 30
        history.run(100.0)
        assert [one.is_complete for one in controller.progress.snapshot()] == [False]
        history.moves.stream_seconds = lambda: 0.1
        history.settle(lambda: history.is_settled(left="a"))
        history.run(120.0)
        assert [one.is_complete for one in controller.progress.snapshot()] == [True]


def note_otherwise(history: History, target: str) -> None:
    """As another controller does that planned before the first one's move began."""
    key = "evacuate.lvm.csi.carver/moves"
    for volume in history.kube.all("persistentvolumes"):
        annotations = volume["metadata"].get("annotations", {})
        if key in annotations:
            [note] = json.loads(annotations[key])
            annotations[key] = json.dumps([{**note, "to": target}])
            history.kube.touch(volume)


@pytest.mark.parametrize("text", ["{}", '"undo"', '"stop"'])
@pytest.mark.parametrize("stage", ["begin", "take", "hold", "commit", "FinishReceive"])
def test_a_note_that_names_another_target_than_the_move_is_mended(stage: str, text: str) -> None:
    with cluster() as history:
        controller = evacuate(history, '{"to": ["b"]}')
        run_until(history, stage)
        note_otherwise(history, "c")
        if stage != "commit":
            history.kill(controller)
            history.start()
        history.kube.request("a", text)
        if text == '"stop"':
            history.run(600.0)
            history.kube.uncordon("a")
            history.kube.request("a", "{}")
        left = "b" if text == '"undo"' else "a"
        history.settle(lambda: history.is_settled(left=left))
        history.settle(lambda: history.left_over(quarantined=True))
        history.ahead = 2 * 86400.0
        history.settle(lambda: history.left_over(quarantined=False))


def test_a_quarantine_ends_although_its_note_names_another_target() -> None:
    """As an earlier version left it."""
    with cluster() as history:
        evacuate(history, '{"to": ["b"]}')
        history.settle(lambda: history.is_settled(left="a"))
        note_otherwise(history, "c")
        history.ahead = 2 * 86400.0
        history.settle(lambda: history.left_over(quarantined=False))


@pytest.mark.parametrize(
    "field",
    [
        {"capacity": {"storage": "2Gi"}},
        {"mountOptions": ["noatime"]},
        {"volumeAttributesClassName": "gold"},
    ],
)
def test_a_change_of_the_volume_after_the_hand_over_is_taken_along(field: Object) -> None:
    """As by external-resizer, which writes late what it has had changed before."""
    with cluster() as history:
        evacuate(history)
        run_until(history, "POST volume")
        old = history.kube.volume("pvc-data-db-0")
        assert old is not None
        old["spec"] |= field
        history.kube.touch(old)
        history.settle(lambda: history.is_settled(left="a"))
        found = history.kube.volume_of("data-db-0")
        assert found is not None
        assert field.items() <= found["spec"].items()


def test_a_reason_that_lasts_is_said_for_as_long_as_it_does() -> None:
    """The API server deletes an Event after an hour."""
    with cluster() as history:
        for name in "bc":
            history.services[name].classes = set()
        # The first Events cannot be written.
        answer = history.kube._answer

        def refusing(method: str, path: str, body: Object) -> tuple[int, Object]:
            return (503, {}) if "/events" in path else answer(method, path, body)

        history.kube._answer = refusing  # type: ignore[method-assign]
        evacuate(history)
        history.run(120.0)
        history.kube._answer = answer  # type: ignore[method-assign]
        history.run(120.0)
        assert said(history, "VolumeStays")
        for _ in range(5):
            history.kube.said.clear()
            history.run(3600.0)
            assert 1 <= len(said(history, "VolumeStays")) <= 3


def test_reasons_whose_numbers_change_are_not_said_at_each_plan() -> None:
    replicas = {f"db-{number}": {f"data-db-{number}": "linear"} for number in range(30)}
    with cluster(replicas) as history:
        evacuate(history)
        for minute in range(60):
            for name in "bc":
                # Other volumes come and go there.
                history.services[name].free_bytes = (minute % 50) << 20
            history.run(60.0)
        assert 30 <= len(said(history, "VolumeStays")) <= 30 * 7


# Targets that change, and evacuations that cross


def is_running(history: History, replica: str = "db-0") -> bool:
    pod = history.kube.objects["pods"].get(("shop", replica))
    return pod is not None and pod["status"]["phase"] == "Running"


@pytest.mark.parametrize("change", ["cordoned", "not ready"])
@pytest.mark.parametrize("stage", BEFORE[:-1])
def test_no_pod_is_evicted_while_the_target_could_start_none(stage: str, change: str) -> None:
    with cluster() as history:
        evacuate(history, '{"to": ["b"]}')
        run_until(history, stage)
        node = history.kube.node("b")
        status = node["status"]
        if change == "cordoned":
            node["spec"]["unschedulable"] = True
        else:
            node["status"] = {"conditions": [{"type": "Ready", "status": "Unknown"}]}
        history.run(1800.0)
        assert evictions(history) == 0
        assert is_running(history)
        assert problems(history) == [f"the move waits for node b, which is {change}"]
        node["status"] = status
        history.kube.uncordon("b")
        history.settle(lambda: history.is_settled(left="a"))


@pytest.mark.parametrize("stage", BEFORE[:-1])
def test_a_volume_does_not_go_to_a_node_that_is_evacuated_since(stage: str) -> None:
    """Its pod would wait there until the volume has moved once more."""
    with cluster() as history:
        evacuate(history)
        run_until(history, stage)
        target = history.services["a"].volumes["pvc-data-db-0"].move_to
        history.kube.request(target, "{}")
        history.settle(lambda: history.is_settled(left="a"))
        assert history.kube.place_of("data-db-0") not in ("a", target)
        assert evictions(history) == 1
        assert not history.left_over(quarantined=True)


@pytest.mark.parametrize("stage", BEFORE[:-1])
def test_two_nodes_that_are_evacuated_to_each_other_keep_their_volumes(stage: str) -> None:
    replicas = {"db-0": {"data-db-0": "linear"}, "db-1": {"data-db-1": "linear"}}
    with cluster(replicas) as history:
        evacuate(history, '{"to": ["b"]}')
        history.settle(lambda: history.is_settled(left="a"))
        history.kube.request("a", None)
        history.kube.uncordon("a")
        # Half of it back, and then both at once.
        history.kube.request("b", '{"to": ["a"]}')
        run_until(history, stage)
        history.kube.request("a", '{"to": ["b"]}')
        history.run(3600.0)
        assert all(is_running(history, replica) for replica in replicas)
        before = evictions(history)
        history.run(3600.0)
        assert evictions(history) == before
        assert said(history, "VolumeStays")
        history.kube.request("a", None)
        history.kube.uncordon("a")
        history.settle(lambda: history.is_settled(left="b"))
