"""The evacuator, step by step, on a cluster in memory."""

from dataclasses import replace
from pathlib import Path

import api_server
import evacuation_histories as histories
import pytest
from evacuation_histories import History, View
from moving_model import Snapshot
from one_evacuation import calls, cluster, evacuate, run_until, said

from agent.core import tag
from agent.extras.controller import controller_process
from agent.extras.controller.controller_process import ClusterController, Files
from agent.extras.evacuation import evacuator
from agent.extras.evacuation.evacuator import EvacuatorTask
from agent.extras.evacuation.progress import Stage
from agent.extras.kubernetes.access import Server
from agent.settings.settings import Config

# Calls of nodes and writes of the API server at which an evacuation is interrupted.
STAGES = (
    *("begin", "take", "Pull", "hold", "commit", "FinishReceive"),
    *("PATCH", "POST volume", "DELETE claim", "DELETE volume"),
)


def test_all_volumes_move_with_their_pods() -> None:
    replicas = {f"db-{number}": {f"data-db-{number}": "thin"} for number in range(3)}
    with cluster(replicas) as history:
        controller = evacuate(history)
        history.settle(lambda: history.is_settled(left="a"))
        history.run(120.0)
        assert history.kube.node("a")["spec"]["unschedulable"]
        [shown] = controller.progress.snapshot()
        assert (shown.node, shown.kind, shown.is_complete) == ("a", "evacuate", True)
        assert {unit.stage for unit in shown.units} == {Stage.MOVED}
        assert not history.left_over(quarantined=True)
        reasons = {reason for reason, _, _ in history.kube.said}
        assert {"EvacuationStarted", "VolumeMoving", "ClaimRebinding"} <= reasons
        assert {"VolumeMoved", "EvacuationFinished"} <= reasons
        # The grace is counted from the new PersistentVolume on.
        history.ahead = histories.GRACE_SECONDS - 3600.0
        history.run(1200.0)
        assert {one.state for one in history.services["a"].volumes.values()} == {tag.MOVED}
        history.ahead = histories.GRACE_SECONDS
        history.settle(lambda: history.left_over(quarantined=False))
        assert len(said(history, "QuarantineEnded")) == 3
        # Nothing is left to be done.
        writes = len(history.kube.writes)
        history.run(3600.0)
        assert len(history.kube.writes) == writes


def test_looks_that_take_long_end_all_quarantines(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each look comes so late that the notes are read anew for that reason alone.
    monkeypatch.setattr(evacuator, "_PLAN_SECONDS", 1.0)
    replicas = {f"db-{number}": {f"data-db-{number}": "linear"} for number in range(5)}
    with cluster(replicas) as history:
        evacuate(history)
        history.settle(lambda: history.is_settled(left="a"))
        history.ahead = histories.GRACE_SECONDS
        history.settle(lambda: history.left_over(quarantined=False))
        assert len(said(history, "QuarantineEnded")) == 5


def test_a_plan_changes_nothing() -> None:
    replicas = {f"db-{number}": {f"data-db-{number}": "linear"} for number in range(50)}
    with cluster(replicas) as history:
        writes, called = len(history.kube.writes), calls(history, "begin")
        made = View(history, Server("history", "127.0.0.1", 1)).plan("a")
        assert len(made.going) == 50
        assert (len(history.kube.writes), called()) == (writes, 0)


def test_writes_that_outrun_the_transfer_are_followed_slowly_and_shown() -> None:
    with cluster() as history:
        history.moves.stream_seconds = lambda: 30.0
        pulls = calls(history, "Pull")
        controller = evacuate(history)
        history.run(1200.0, lambda: bool(said(history, "WritesOutrunTransfer")))
        [text] = set(said(history, "WritesOutrunTransfer"))
        assert "background_bandwidth" in text
        before = pulls()
        assert before <= 12
        history.run(3600.0)
        # One round takes a minute, and five minutes are waited.
        assert 8 <= pulls() - before <= 12
        [unit] = controller.progress.snapshot()[0].units
        assert unit.volumes[0].stage in (Stage.FOLLOWING, Stage.COPYING)
        assert history.kube.objects["pods"]["shop", "db-0"]["spec"]["nodeName"] == "a"
        history.moves.stream_seconds = lambda: 0.1
        history.settle(lambda: history.is_settled(left="a"))


def test_a_budget_that_never_yields_is_asked_again_and_the_volume_followed() -> None:
    with cluster() as history:
        history.kube.refuses = lambda: True
        history.moves.stream_seconds = lambda: 0.1
        pulls = calls(history, "Pull")
        evacuate(history)
        history.run(7200.0)
        assert "disruption budget" in said(history, "EvictionRefused")[0]
        assert not history.is_settled()
        evictions = [one for one in history.kube.writes if one.endswith("/eviction")]
        assert 500 < len(evictions) < 730
        assert 20 < pulls() < 60
        history.kube.refuses = lambda: False
        history.settle(lambda: history.is_settled(left="a"))


def test_the_volumes_of_a_pod_move_together() -> None:
    with cluster({"db-0": {"data-db-0": "linear", "log-db-0": "thin"}}) as history:
        evacuate(history)
        history.settle(lambda: history.is_settled(left="a"))
        assert history.kube.place_of("data-db-0") == history.kube.place_of("log-db-0")


def test_claims_of_a_replica_without_a_pod_move_together() -> None:
    with cluster({"db-0": {"data-db-0": "linear", "log-db-0": "thin"}}) as history:
        claims = history.kube.replicas.pop("db-0")
        history.kube.objects["pods"].clear()
        for volume in history.services["a"].volumes.values():
            volume.users.clear()
        history.services["b"].free_bytes = 100 << 30
        history.services["c"].free_bytes = 100 << 30
        evacuate(history)
        history.settle(lambda: "" if history.kube.place_of("log-db-0") != "a" else "on a")
        history.kube.replicas["db-0"] = claims
        history.settle(lambda: history.is_settled(left="a"))


def test_all_pods_that_use_a_claim_are_evicted() -> None:
    with cluster() as history:
        history.kube.replicas["db-1"] = {"data-db-0": "linear"}
        history.settle(history.is_settled)
        evacuate(history)
        history.settle(lambda: history.is_settled(left="a"))
        evicted = {one for one in history.kube.writes if one.endswith("/eviction")}
        assert len(evicted) == 2


def test_members_of_a_group_snapshot_move_together_and_their_snapshots_stay() -> None:
    replicas = {f"db-{number}": {f"data-db-{number}": "thin"} for number in range(2)}
    with cluster(replicas) as history:
        service = history.services["a"]
        for number in range(2):
            volume = service.volumes[f"pvc-data-db-{number}"]
            assert volume.content is not None
            taken = f"{service.group}/snap-of-{number}"
            volume.snapshots[taken] = Snapshot(volume.content, 0, group="monday")
        evacuate(history)
        history.settle(lambda: history.is_settled(left="a"))
        assert history.kube.place_of("data-db-0") == history.kube.place_of("data-db-1")
        history.ahead = 2 * histories.GRACE_SECONDS
        history.run(3600.0)
        # They can still be restored from: what they are of is not erased.
        for volume in service.volumes.values():
            assert volume.state == tag.MOVED
            assert len(volume.snapshots) == 1
        problem = history.controllers[0].progress.snapshot()[0].problem
        assert "snapshots" in problem
        for volume in service.volumes.values():
            volume.snapshots.clear()
        history.settle(lambda: history.left_over(quarantined=False))


def test_a_class_that_a_node_lacks_rules_it_out() -> None:
    replicas = {"db-0": {"data-db-0": "linear"}, "db-1": {"data-db-1": "thin"}}
    with cluster(replicas) as history:
        history.services["b"].classes = {"linear"}
        history.services["c"].classes = {"sealed"}
        evacuate(history)
        history.settle(lambda: "" if history.kube.place_of("data-db-0") == "b" else "not yet")
        history.run(600.0)
        assert history.kube.place_of("data-db-1") == "a"
        assert "has no class thin" in said(history, "VolumeStays")[0]
        history.services["c"].classes = {"thin"}
        history.settle(lambda: history.is_settled(left="a"))
        assert history.kube.place_of("data-db-1") == "c"


@pytest.mark.parametrize("silent", ["source", "target"])
@pytest.mark.parametrize("stage", ["begin", "Pull", "commit", "FinishReceive"])
def test_nothing_is_decided_while_a_node_is_silent(silent: str, stage: str) -> None:
    with cluster() as history:
        evacuate(history, '{"to": ["b"]}')
        run_until(history, stage)
        service = history.services["a" if silent == "source" else "b"]
        service.is_up = False
        history.run(60.0)
        states = [{**vars(one)} for at in history.services.values() for one in at.volumes.values()]
        history.run(3600.0)
        after = [{**vars(one)} for at in history.services.values() for one in at.volumes.values()]
        assert [one["state"] for one in states] == [one["state"] for one in after]
        service.is_up = True
        history.settle(lambda: history.is_settled(left="a"))
        assert not history.left_over(quarantined=True)


@pytest.mark.parametrize("text", ["{}", '"undo"'])
@pytest.mark.parametrize("stage", ["commit", "FinishReceive", "POST volume", "DELETE claim"])
def test_a_volume_in_a_group_that_is_missing_for_a_while_is_not_lost(stage: str, text: str) -> None:
    """It would be taken back, and be on two nodes when the group comes back."""
    with cluster() as history:
        controller = evacuate(history, '{"to": ["b"]}')
        run_until(history, stage)
        history.kill(controller)
        history.services["b"].lose_group()
        history.kube.request("a", text)
        history.start()
        history.run(1200.0)
        assert history.services["a"].volumes["pvc-data-db-0"].state == tag.MOVED
        problems = str(history.controllers[0].progress.snapshot())
        history.services["b"].find_group()
        history.run(1.0)
        history.kube.uncordon("b")
        history.settle(lambda: history.is_settled(left="b" if "undo" in text else "a"))
        assert not history.left_over(quarantined=True)
        if stage in ("commit", "FinishReceive"):
            assert "group data is missing there" in problems


@pytest.mark.parametrize("policy", ["Delete", "Retain"])
@pytest.mark.parametrize("stage", STAGES)
def test_an_evacuation_is_undone_at_each_stage(stage: str, policy: str) -> None:
    with cluster({"db-0": {"data-db-0": "linear", "log-db-0": "thin"}}, policy=policy) as history:
        evacuate(history)
        run_until(history, stage)
        history.kube.request("a", '"undo"')
        history.settle(lambda: history.is_settled(left="b") or history.is_settled(left="c"))
        history.settle(lambda: history.left_over(quarantined=True))
        assert {history.kube.place_of(one) for one in history.kube.lines} == {"a"}
        history.run(120.0)
        assert all(not history.kube.node(one)["spec"].get("unschedulable") for one in "abc")
        history.ahead = 2 * histories.GRACE_SECONDS
        history.settle(lambda: history.left_over(quarantined=False))


def test_an_evacuation_is_undone_after_its_end() -> None:
    with cluster() as history:
        evacuate(history)
        history.settle(lambda: history.is_settled(left="a"))
        written = len(history.kube.lines["data-db-0"])
        history.run(600.0)
        history.kube.request("a", '"undo"')
        history.settle(lambda: history.is_settled(left="b") or history.is_settled(left="c"))
        assert len(history.kube.lines["data-db-0"]) > written


@pytest.mark.parametrize("text", ['"stop"', None])
@pytest.mark.parametrize("stage", STAGES)
def test_an_evacuation_that_is_stopped_leaves_no_claim_between_nodes(
    stage: str, text: str | None
) -> None:
    with cluster({"db-0": {"data-db-0": "linear", "log-db-0": "thin"}}) as history:
        evacuate(history)
        run_until(history, stage)
        history.kube.request("a", text)
        history.run(60.0)
        history.kube.uncordon("a")
        history.settle(history.is_settled)
        pulls = calls(history, "Pull")
        history.run(1200.0)
        assert pulls() == 0
        history.kube.request("a", "{}")
        history.settle(lambda: history.is_settled(left="a"))
        assert not history.left_over(quarantined=True)


def gone(history: History, claim: str) -> str:
    """What is still there of a claim that was deleted; empty if nothing is."""
    kube = history.kube
    names = [name for _, name in kube.objects["persistentvolumes"] if f"pvc-{claim}" in name]
    names += [name for _, name in kube.objects["persistentvolumeclaims"] if name == claim]
    for service in history.services.values():
        names += [str(one) for one in service.volumes.values() if claim in one.volume_id]
    return ", ".join(names)


@pytest.mark.parametrize("request_text", ["{}", '"stop"', '"undo"'])
@pytest.mark.parametrize("layout", ["linear", "thin"])
@pytest.mark.parametrize(
    "stage", ["begin", "take", "Pull", "hold", "commit", "FinishReceive", "PATCH"]
)
def test_nothing_is_left_of_a_claim_that_is_deleted_before_it_is_rebound(
    stage: str, layout: str, request_text: str
) -> None:
    """Its volume could not be deleted because of the move, or what the target has received."""
    replicas = {"db-0": {"data-db-0": layout}, "db-1": {"data-db-1": "linear"}}
    with cluster(replicas) as history:
        evacuate(history)
        run_until(history, stage)
        history.kube.abandon("db-0")
        history.kube.request("a", request_text)
        history.settle(lambda: gone(history, "data-db-0"))
        if request_text != "{}":
            history.kube.uncordon("a")
        history.settle(lambda: history.is_settled(left="a" if request_text == "{}" else ""))


def test_what_an_undo_could_not_remove_does_not_hold_up_the_next_move() -> None:
    with cluster() as history:
        evacuate(history, '{"to": ["b"]}')
        run_until(history, "Pull")
        history.services["b"].lose_group()
        history.kube.request("a", '"undo"')
        history.settle(lambda: "" if said(history, "VolumeTakenBack") else "not yet")
        history.services["b"].find_group()
        assert history.services["b"].volumes["pvc-data-db-0"].is_coming
        history.kube.request("a", '{"to": ["b"]}')
        history.settle(lambda: history.is_settled(left="a"))
        assert not history.left_over(quarantined=True)


def test_an_undo_does_not_lose_a_claim_whose_deletion_another_s_finalizer_delays() -> None:
    """As while a VolumeSnapshot of it is taken. The deletion cannot be stopped any more."""
    with cluster() as history:
        history.kube.kept.add("data-db-0")
        evacuate(history)
        run_until(history, "DELETE claim")
        history.kube.request("a", '"undo"')
        history.run(1200.0)
        history.kube.kept.clear()
        history.settle(lambda: history.is_settled(left="b") or history.is_settled(left="c"))
        assert history.kube.place_of("data-db-0") == "a"
        assert not history.left_over(quarantined=True)


def test_a_volume_moves_to_a_node_where_its_copy_is_under_quarantine() -> None:
    with cluster() as history:
        evacuate(history, '{"to": ["b"]}')
        history.settle(lambda: history.is_settled(left="a"))
        history.kube.request("a", None)
        history.kube.uncordon("a")
        history.kube.request("b", '{"to": ["a"]}')
        history.settle(lambda: history.is_settled(left="b"))
        assert history.kube.place_of("data-db-0") == "a"
        assert "erased" in said(history, "QuarantineEnded")[0]
        history.ahead = 2 * histories.GRACE_SECONDS
        history.settle(lambda: history.left_over(quarantined=False))


def test_a_wrong_annotation_is_refused_and_changes_nothing() -> None:
    with cluster() as history:
        controller = evacuate(history, "yes, please")
        history.run(600.0)
        assert not history.is_settled(left="b")
        assert not history.kube.node("a")["spec"].get("unschedulable")
        assert "no request" in said(history, "EvacuationRefused")[0]
        assert "no request" in controller.progress.snapshot()[0].problem


def test_a_controller_that_is_killed_anywhere_is_continued() -> None:
    replicas = {"db-0": {"data-db-0": "linear", "log-db-0": "thin"}}
    number, is_over = 0, False
    while not is_over:
        with cluster(replicas, seed=f"kill {number}") as history:
            steps = [0]

            def called(_node: str, _name: str, steps: list[int] = steps) -> None:
                steps[0] += 1

            history.moves.called = called
            controller = evacuate(history)
            begun = len(history.kube.writes)

            def is_there(
                history: History = history, steps: list[int] = steps, begun: int = begun
            ) -> bool:
                return steps[0] + len(history.kube.writes) - begun >= number  # noqa: B023

            history.run(1800.0, is_there)
            is_over = not is_there()
            history.kill(controller)
            history.start()
            history.settle(lambda: history.is_settled(left="a"))
            assert not history.left_over(quarantined=True)
        number += 3
    assert number > 60


@pytest.mark.parametrize("evacuation", [False, True])
def test_the_task_begins_only_where_it_is_set(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, evacuation: bool
) -> None:
    monkeypatch.setattr(Files, "_read", lambda _self: None)
    monkeypatch.setattr(Files, "certificates", None, raising=False)
    file = api_server.kubeconfig(tmp_path / "kubeconfig", "http://127.0.0.1:1")
    own = replace(
        config,
        kubeconfig=file,
        evacuation=evacuation,
        nodes_file=tmp_path / "nodes",
        tls_directory=tmp_path,
    )
    controller = ClusterController(own, Files(own))
    own = replace(own, nodes_file=None)
    handlers, task = controller_process.evacuation(own, controller)
    assert len(handlers) == 1
    assert isinstance(task, EvacuatorTask) is evacuation
