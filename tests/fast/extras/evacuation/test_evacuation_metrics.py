"""What the controller's metrics say of evacuations."""

from evacuated import SOURCE, Cluster, handle, node

from agent.daemon.node_metrics import of_extra
from agent.extras.evacuation.evacuation_metrics import gauges
from agent.extras.evacuation.plan import plan
from agent.extras.evacuation.progress import Progress, Stage

GIB = 1 << 30


def samples(progress: Progress) -> dict[tuple[str, ...], float]:
    """Each sample's value by the gauge's name, without its prefix, and the labels' values."""
    return {
        (sample.name.removeprefix("carver_evacuation_"), *sample.labels.values()): sample.value
        for gauge in gauges(progress.snapshot())
        for sample in of_extra(gauge).samples
    }


def test_volumes_are_counted_by_stage_and_by_whether_they_wait() -> None:
    cluster = Cluster([node(SOURCE), node("b", 50)])
    for name, gib in (("first", 10), ("second", 20), ("large", 100)):
        cluster.volume(name, gib)
    progress = Progress(lambda: 0.0)
    assert samples(progress) == {}
    progress.begin(SOURCE, "evacuate", plan(cluster.view))
    assert samples(progress) == {
        ("volumes", SOURCE, "waiting", "false"): 2,
        ("volumes", SOURCE, "stays", "true"): 1,
        ("bytes_left", SOURCE): 30 * GIB,
        ("has_problem", SOURCE): 0,
    }
    progress.unit(SOURCE, handle("first"), Stage.EVICTING, "pod shop/db-0 cannot be evicted yet")
    progress.unit(SOURCE, handle("second"), Stage.COPYING)
    progress.begin_round(SOURCE, handle("second"), 20 * GIB, 5 * GIB)
    progress.problem(SOURCE, "node source does not answer")
    found = samples(progress)
    assert found["volumes", SOURCE, "evicting", "true"] == 1
    assert found["volumes", SOURCE, "copying", "false"] == 1
    assert found["bytes_left", SOURCE] == 25 * GIB
    assert found["has_problem", SOURCE] == 1
    progress.volume(SOURCE, handle("second"), Stage.FOLLOWING, "more is written than is sent")
    assert samples(progress)["volumes", SOURCE, "following", "true"] == 1
    progress.unit(SOURCE, handle("first"), Stage.MOVED)
    progress.unit(SOURCE, handle("second"), Stage.MOVED)
    assert samples(progress)["bytes_left", SOURCE] == 0
    progress.end(SOURCE, forget=True)
    assert samples(progress) == {}
