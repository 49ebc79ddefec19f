"""The evacuator, step by step, on a cluster in memory."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import evacuation_histories as histories
import pytest
from evacuation_histories import History, View
from moving_model import Snapshot
from one_evacuation import ONE, calls, cluster, evacuate, run_until, said

from agent.core import tag
from agent.extras.evacuation import evacuator
from agent.extras.evacuation.progress import Stage
from agent.extras.kubernetes.access import Server
from agent.extras.kubernetes.rebinding import OF_WORK

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
        for text in said(history, "VolumeMoved"):
            stop = re.search(r"; this took (\d+) s in which no pod could use it$", text)
            # A stream takes at most 20 s here.
            assert stop is not None
            assert int(stop[1]) < 60
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


def test_a_quarantine_is_ended_soon_after_an_answer_was_lost() -> None:
    with cluster() as history:
        evacuate(history)
        history.settle(lambda: history.is_settled(left="a"))
        lost: list[str] = []
        is_lost = [False]

        def called(_node: str, call: str) -> None:
            is_lost[0] = call == "finish" and not lost
            lost.extend([call] * is_lost[0])

        history.moves.called, history.moves.fails = called, lambda: is_lost[0]
        history.ahead = histories.GRACE_SECONDS
        # The evacuator looks for what is to be erased once a minute.
        history.run(150.0)
        assert lost
        assert not history.left_over(quarantined=False)


def test_a_quarantine_that_cannot_be_ended_is_tried_seldom() -> None:
    with cluster() as history:
        evacuate(history)
        history.settle(lambda: history.is_settled(left="a"))
        left = history.services["a"].volumes["pvc-data-db-0"]
        left.snapshots[f"{history.services['a'].group}/snap-kept"] = Snapshot((), 0, of_move=False)
        history.ahead = histories.GRACE_SECONDS
        tried = calls(history, "drop")
        history.run(6 * 3600.0)
        assert 35 < tried() < 60
        left.snapshots.clear()
        history.settle(lambda: history.left_over(quarantined=False))


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
        assert (
            "The disruption budget db needs 3 healthy pods" in said(history, "EvictionRefused")[0]
        )
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
    replicas = {f"db-{number}": {f"data-db-{number}": "linear"} for number in range(2)}
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


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("first", "ab")
@pytest.mark.parametrize("stage", STAGES)
def test_the_volumes_of_a_pod_are_on_one_node_again_after_two_undos(
    stage: str, first: str, *, is_late: bool
) -> None:
    """Each undo alone would move them to its own node, and an undo may begin between them."""
    with cluster({"db-0": {"data-db-0": "linear", "log-db-0": "thin"}}) as history:
        evacuate(history, '{"to": ["b"]}')
        history.settle(lambda: history.is_settled(left="a"))
        history.kube.request("b", '{"to": ["c"]}')
        run_until(history, stage)
        history.kube.request(first, '"undo"')
        if is_late:
            history.run(200.0)
        history.kube.request("b" if first == "a" else "a", '"undo"')
        history.settle(lambda: history.is_settled(left="b") or history.is_settled(left="c"))
        assert {history.kube.place_of(one) for one in history.kube.lines} == {"a"}
        history.settle(lambda: history.left_over(quarantined=True))


@pytest.mark.parametrize("text", ['"stop"', None])
@pytest.mark.parametrize("seconds", range(60, 200, 10))
@pytest.mark.parametrize("stage", ["POST volume", "DELETE claim", "DELETE volume"])
def test_a_pod_runs_also_after_an_undo_that_was_stopped(
    stage: str, seconds: int, text: str | None
) -> None:
    """One of its volumes may have been taken back, and the other one be on the way."""
    with cluster({"db-0": {"data-db-0": "linear", "log-db-0": "thin"}}) as history:
        evacuate(history, '{"to": ["c"]}')
        run_until(history, stage)
        history.kube.request("a", '"undo"')
        history.run(float(seconds))
        history.kube.request("a", text)
        for node in "abc":
            history.kube.uncordon(node)
        history.settle(lambda: history.is_settled(left="a") and history.is_settled(left="c"))
        assert len({history.kube.place_of(one) for one in history.kube.lines}) == 1


@pytest.mark.parametrize("text", ["{}", '"stop"', '"undo"', None])
@pytest.mark.parametrize("stage", ["commit", "FinishReceive", "POST volume", "DELETE claim"])
def test_a_claim_is_rebound_although_its_pod_is_placed_on_the_source_at_once(
    stage: str, text: str | None
) -> None:
    """Its node was uncordoned by hand, and the scheduler is faster than the evacuator."""
    with cluster() as history:
        evacuate(history)
        run_until(history, stage)
        history.kube.request("a", text)
        between = history.baton.between

        def at_once() -> None:
            if text != "{}":
                history.kube.uncordon("a")
            history.kube._sync_set()
            history.kube._schedule()
            between()

        history.baton.between = at_once
        left = "" if text in (None, '"undo"', '"stop"') else "a"
        history.settle(lambda: history.is_settled(left=left))


def test_a_group_that_is_lost_right_after_a_volume_was_finished_is_waited_for() -> None:
    with cluster() as history:
        evacuate(history, '{"to": ["b"]}')
        run_until(history, "FinishReceive")
        history.services["b"].lose_group()
        history.run(1200.0)
        assert history.kube.volume("pvc-data-db-0") is not None
        assert not said(history, "VolumeMoved")
        history.services["b"].find_group()
        history.settle(lambda: history.is_settled(left="a"))


def test_an_evacuation_is_undone_after_its_end() -> None:
    with cluster() as history:
        evacuate(history)
        history.settle(lambda: history.is_settled(left="a"))
        written = len(history.kube.lines["data-db-0"])
        history.run(600.0)
        history.kube.request("a", '"undo"')
        history.settle(lambda: history.is_settled(left="b") or history.is_settled(left="c"))
        assert len(history.kube.lines["data-db-0"]) > written
        # What was left was brought up to date.
        assert history.services["a"].replaced == 1
        assert not said(history, "QuarantineEnded")


TWO: Mapping[str, Mapping[str, str]] = {"db-0": {"data-db-0": "linear", "log-db-0": "thin"}}


@contextmanager
def moved(
    replicas: Mapping[str, Mapping[str, str]] = TWO, *, policy: str = "Delete", seed: str = "one"
) -> Iterator[History]:
    """A cluster whose volumes were moved from node a to node b, and are used there."""
    with cluster(replicas, policy=policy, seed=seed) as history:
        controller = evacuate(history, '{"to": ["b"]}')
        history.settle(lambda: history.is_settled(left="a"))
        history.run(300.0)
        history.kill(controller)
        yield history


def require_moved_back(history: History) -> None:
    """The volumes come back to node a, and nothing is left elsewhere after the time of grace."""
    history.settle(lambda: history.is_settled(left="b"))
    assert {history.kube.place_of(one) for one in history.kube.lines} == {"a"}
    history.settle(lambda: history.left_over(quarantined=True))
    history.ahead = 2 * histories.GRACE_SECONDS
    history.settle(lambda: history.left_over(quarantined=False))


def test_a_controller_that_is_killed_anywhere_in_a_move_back_is_continued() -> None:
    number, is_over = 0, False
    while not is_over:
        with moved(seed=f"kill {number}") as history:
            steps = [0]

            def called(_node: str, _name: str, steps: list[int] = steps) -> None:
                steps[0] += 1

            history.moves.called = called
            history.kube.request("a", '"undo"')
            controller = history.start()
            begun = len(history.kube.writes)

            def is_there(
                history: History = history, steps: list[int] = steps, begun: int = begun
            ) -> bool:
                return steps[0] + len(history.kube.writes) - begun >= number  # noqa: B023

            history.run(1800.0, is_there)
            is_over = not is_there()
            history.kill(controller)
            history.start()
            if number % 2:
                # Two at once.
                history.start()
            require_moved_back(history)
            assert history.services["a"].replaced == 2
            assert not {text for text in said(history, "QuarantineEnded") if "@aaaa" in text}
        number += 3
    assert number > 60


@pytest.mark.parametrize("node", ["a", "b"])
@pytest.mark.parametrize("stage", ["begin", "take", "Pull", "hold", "commit", "FinishReceive"])
def test_a_node_that_restarts_in_a_move_back_loses_nothing(stage: str, node: str) -> None:
    with moved() as history:
        history.kube.request("a", '"undo"')
        history.start()
        run_until(history, stage)
        history.services[node].restart()
        require_moved_back(history)
        assert history.services["a"].replaced == 2


@pytest.mark.parametrize("stage", STAGES)
def test_a_move_back_is_given_up_at_each_stage(stage: str) -> None:
    """By evacuating the node again: what is not rebound stays where it is."""
    with moved() as history:
        history.kube.request("a", '"undo"')
        history.start()
        run_until(history, stage)
        history.kube.request("a", "{}")
        history.kube.uncordon("b")
        history.settle(lambda: history.is_settled(left="a"))
        history.settle(lambda: history.left_over(quarantined=True))
        history.kube.request("a", '"undo"')
        history.settle(lambda: history.is_settled(left="b") or history.is_settled(left="c"))
        history.ahead = 2 * histories.GRACE_SECONDS
        history.settle(lambda: history.left_over(quarantined=False))


@pytest.mark.parametrize("stage", ["begin", "take", "Pull", "hold", "commit", "FinishReceive"])
def test_nothing_is_left_of_a_claim_that_is_deleted_in_a_move_back(stage: str) -> None:
    replicas = {"db-0": {"data-db-0": "linear"}, "db-1": {"data-db-1": "linear"}}
    with moved(replicas) as history:
        history.kube.request("a", '"undo"')
        history.start()
        run_until(history, stage)
        history.kube.abandon("db-0")

        def volumes() -> str:
            """What is usable, or coming, of the claim; a copy under quarantine has no owner."""
            found = [
                str(one)
                for service in history.services.values()
                for name, one in service.volumes.items()
                if "data-db-0" in name and one.state != tag.MOVED
            ]
            return ", ".join(found)

        history.settle(volumes)
        history.settle(lambda: history.is_settled(left="b"))


@pytest.mark.parametrize("stage", ["begin", "Pull", "FinishReceive"])
def test_a_volume_that_is_kept_without_its_claim_holds_up_no_move_back(stage: str) -> None:
    replicas = {"db-0": {"data-db-0": "linear"}, "db-1": {"data-db-1": "linear"}}
    with moved(replicas, policy="Retain") as history:
        history.kube.request("a", '"undo"')
        controller = history.start()
        run_until(history, stage)
        history.kube.abandon("db-0")
        history.settle(lambda: "" if history.kube.place_of("data-db-1") == "a" else "on b")
        history.run(1200.0)
        [volume] = (
            one
            for service in history.services.values()
            for name, one in service.volumes.items()
            if "data-db-0" in name and one.is_usable
        )
        assert (volume.move_to, volume.snapshots) == ("", {})
        [shown] = controller.progress.snapshot()
        assert shown.is_complete
        writes = len(history.kube.writes)
        history.run(3600.0)
        assert len(history.kube.writes) == writes


def test_a_volume_comes_back_to_a_node_without_other_space() -> None:
    with moved() as history:
        history.services["a"].free_bytes = 0
        history.kube.request("a", '"undo"')
        history.start()
        require_moved_back(history)


@pytest.mark.parametrize("older", ["a", "b"])
def test_all_is_sent_back_if_a_node_is_older(older: str) -> None:
    with moved() as history:
        history.services[older].is_older = True
        history.kube.request("a", '"undo"')
        history.start()
        require_moved_back(history)
        assert history.services["a"].replaced == 0
        assert len(said(history, "QuarantineEnded")) >= 2


def test_a_move_back_to_a_volume_with_snapshots_waits_until_they_are_deleted() -> None:
    with moved(ONE) as history:
        [left] = history.services["a"].volumes.values()
        left.snapshots[f"{history.services['a'].group}/snap-kept"] = Snapshot((), 0)
        history.kube.request("a", '"undo"')
        controller = history.start()
        history.run(1200.0)
        assert history.kube.place_of("data-db-0") == "b"
        [unit] = controller.progress.snapshot()[0].units
        assert "snapshots" in unit.problem
        left.snapshots.clear()
        require_moved_back(history)


def test_a_volume_that_has_moved_on_is_sent_back_as_a_whole() -> None:
    """What it left on its first node is of the move before the last."""
    with moved(ONE) as history:
        history.kube.request("a", None)
        history.kube.uncordon("a")
        history.kube.request("b", '{"to": ["c"]}')
        history.start()
        history.settle(lambda: history.is_settled(left="b"))
        history.kube.request("c", '{"to": ["a"]}')
        history.settle(lambda: history.is_settled(left="c"))
        assert history.kube.place_of("data-db-0") == "a"
        assert history.services["a"].replaced == 0
        history.ahead = 2 * histories.GRACE_SECONDS
        history.settle(lambda: history.left_over(quarantined=False))


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


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("policy", ["Delete", "Retain"])
@pytest.mark.parametrize("stage", STAGES)
def test_volumes_of_a_namespace_that_is_deleted_follow_their_reclaim_policy(
    stage: str, policy: str, is_killed: bool
) -> None:
    """No claim can be made anew there. What was rebound leaves its copy under quarantine."""
    with cluster({"db-0": {"data-db-0": "thin"}}, policy=policy) as history:
        controller = evacuate(history)
        run_until(history, stage)
        if is_killed:
            history.kill(controller)
        history.kube.end_namespace()
        if is_killed:
            history.run(600.0)
            history.start()

        def unsettled() -> str:
            volumes = history.kube.all("persistentvolumes")
            if len(volumes) != (policy == "Retain"):
                return f"{volumes}"
            for volume in volumes:
                annotations = volume["metadata"]["annotations"]
                if any(key.startswith("move.") for key in annotations):
                    return f"{annotations}"
            return "" if controller.evacuator.is_idle or is_killed else "busy"

        history.settle(unsettled)
        history.run(600.0)
        assert not unsettled()
        states = [
            one.state for service in history.services.values() for one in service.volumes.values()
        ]
        usable = [state for state in states if state == tag.READY]
        assert len(usable) == (policy == "Retain"), states
        assert set(states) <= {tag.READY, tag.MOVED}, states
        writes = len(history.kube.writes)
        history.run(3600.0)
        later = history.kube.writes[writes:]
        # The Event about what stays is renewed.
        assert [write for write in later if "/events" not in write] == []
        assert len(later) <= 4


@pytest.mark.parametrize("layout", ["linear", "thin"])
@pytest.mark.parametrize("stage", ["begin", "take", "Pull", "hold"])
def test_another_controller_takes_back_a_volume_whose_claim_was_deleted(
    stage: str, layout: str
) -> None:
    """The deletion waits for that: what the target has received would stay otherwise."""
    replicas = {"db-0": {"data-db-0": layout}, "db-1": {"data-db-1": "linear"}}
    with cluster(replicas) as history:
        controller = evacuate(history)
        run_until(history, stage)
        history.kill(controller)
        history.kube.abandon("db-0")
        history.run(600.0)
        assert "data-db-0" in gone(history, "data-db-0")
        history.start()
        history.settle(lambda: gone(history, "data-db-0"))
        history.settle(lambda: history.is_settled(left="a"))
        assert not history.left_over(quarantined=True)


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


@pytest.mark.parametrize("finalizer", OF_WORK)
def test_no_pod_is_evicted_while_a_copy_of_its_volume_is_not_complete(finalizer: str) -> None:
    """A VolumeSnapshot, or a claim that is a clone: it may wait for space for ever."""
    with cluster() as history:
        claim = history.kube.claim("data-db-0")
        assert claim is not None
        claim["metadata"]["finalizers"] = ["kubernetes.io/pvc-protection", finalizer]
        pulls = calls(history, "Pull")
        evacuate(history)
        history.run(3600.0)
        assert history.kube.objects["pods"]["shop", "db-0"]["spec"]["nodeName"] == "a"
        assert not any(one.endswith("/eviction") for one in history.kube.writes)
        assert finalizer in said(history, "VolumeMoveWaits")[0]
        assert pulls() > 5
        claim["metadata"]["finalizers"].remove(finalizer)
        history.settle(lambda: history.is_settled(left="a"))


def test_a_claim_is_left_if_a_copy_of_its_volume_began_after_the_hand_over() -> None:
    with cluster() as history:
        evacuate(history)
        run_until(history, "commit")
        claim = history.kube.claim("data-db-0")
        assert claim is not None
        claim["metadata"]["finalizers"] = list(OF_WORK)
        history.run(1200.0)
        assert "deletionTimestamp" not in claim["metadata"]
        history.kube.request("a", '"undo"')
        history.run(1200.0)
        # With the volume the copy can be made, and then the evacuation be requested again.
        assert history.kube.claim("data-db-0") is claim
        assert history.kube.place_of("data-db-0") == "a"
        assert history.kube.objects["pods"]["shop", "db-0"]["status"]["phase"] == "Running"


def test_a_volume_moves_to_a_node_where_its_copy_is_under_quarantine() -> None:
    with cluster() as history:
        evacuate(history, '{"to": ["b"]}')
        history.settle(lambda: history.is_settled(left="a"))
        history.kube.request("a", None)
        history.kube.uncordon("a")
        history.kube.request("b", '{"to": ["a"]}')
        history.settle(lambda: history.is_settled(left="b"))
        assert history.kube.place_of("data-db-0") == "a"
        # What was left there was not erased, but brought up to date.
        assert not said(history, "QuarantineEnded")
        assert history.services["a"].replaced == 1
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
