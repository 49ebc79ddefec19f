"""The chart's provisioner writes the capacities of a large cluster within two minutes."""

from pathlib import Path

import pytest
from callers.capacities import Limits, Sweep
from manifest import container, flags, is_central

_MANIFESTS = Path(__file__).parents[2] / "deploy" / "kubernetes"
_CENTRAL = [one for one in sorted(_MANIFESTS.glob("*.yaml")) if is_central(one)]
_NODES, _CLASSES = 1000, 3


def test_with_its_own_defaults_a_thousand_nodes_take_the_provisioner_most_of_an_hour() -> None:
    [*_, last] = Sweep(Limits()).written_seconds(_NODES, _CLASSES)
    assert 45 * 60 < last < 55 * 60


@pytest.mark.parametrize("path", _CENTRAL, ids=lambda one: one.stem)
def test_the_capacities_of_a_thousand_nodes_are_written_within_two_minutes(path: Path) -> None:
    limits = Limits.of_flags(flags(container(path, "provisioner")))
    sweep = Sweep(limits)
    seconds = sweep.written_seconds(_NODES, _CLASSES)
    assert len(seconds) == _NODES * _CLASSES
    assert seconds[-1] <= 120
    # The API server and the controller are not flooded either.
    assert limits.writes_each_second <= 100
    assert sweep.questions <= 4 * _NODES * _CLASSES


def test_a_burst_is_written_at_once_and_the_rest_at_the_rate() -> None:
    limits = Limits(writes_each_second=10, burst=20, workers=10, poll_seconds=300)
    seconds = Sweep(limits, 0.0, 0.0).written_seconds(nodes=30, classes=1)
    assert seconds[:20] == pytest.approx([0.0] * 20)
    assert seconds[20:] == pytest.approx([0.1 * one for one in range(1, 11)])


def test_slow_answers_hold_up_the_writes_where_there_are_few_workers() -> None:
    for workers, most in ((1, 100.0), (10, 10.0)):
        limits = Limits(writes_each_second=100, burst=100, workers=workers, poll_seconds=300)
        [*_, last] = Sweep(limits, answer_seconds=1.0, write_seconds=0.0).written_seconds(100, 1)
        assert last == pytest.approx(most)
