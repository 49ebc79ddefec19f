"""Whatever happens on two nodes, no claim is stuck and nothing is left.

The same seed gives the same histories; it is printed. `CARVER_CALLERS=seed=7,examples=1000` chooses
others. What hypothesis prints of a failure is the shortest history that fails.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import chosen
import pytest
from callers import machines
from callers.cluster import Cluster
from callers.machines import Machine
from callers.objects import Claim, Pod, Snapshot
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from agent.csi.client import Mode, block, mounted

MIB = 1 << 20
_GROUPS = ("group0", "group1")
_which = st.integers(0, 9)
_nodes = st.sampled_from("ab")
_actions = st.one_of(
    st.tuples(st.just("claim"), st.sampled_from(("fast", "slow")), st.booleans()),
    st.tuples(st.just("claim"), st.sampled_from(("fast", "slow")), st.booleans()),
    st.tuples(st.sampled_from(("restore", "clone", "second_pod", "expand")), _which),
    st.tuples(st.sampled_from(("take", "take", "restore", "restore")), _which),
    st.tuples(st.sampled_from(("end_pod", "drop_claim", "drop_snapshot")), _which),
    st.tuples(st.sampled_from(("restart", "reboot", "restart_kubelet")), _nodes),
    st.tuples(st.just("kill"), _nodes, st.integers(0, 12)),
    st.tuples(st.just("lose"), _nodes, st.sampled_from(_GROUPS)),
    st.tuples(st.just("find_again"), _nodes),
    st.tuples(st.just("wait"), st.integers(1, 40)),
)


class History:
    """What people do, and what happens to their nodes."""

    def __init__(self, cluster: Cluster, nodes: dict[str, Machine]) -> None:
        self._cluster = cluster
        self._nodes = nodes

    def claim(self, storage_class: str, raw: bool) -> None:
        mode = Mode.SINGLE_NODE_MULTI_WRITER
        capability = block(mode) if raw else mounted("ext4", mode=mode)
        self._cluster.pod(self._cluster.claim(storage_class, capability=capability))

    def restore(self, which: int) -> None:
        found = [one for one in self._cluster.snapshots if not one.is_deleted]
        if found:
            one = found[which % len(found)]
            self._copy(one.claim, one)

    def clone(self, which: int) -> None:
        if (one := self._claim(which)) is not None:
            self._copy(one, one)

    def second_pod(self, which: int) -> None:
        if (one := self._claim(which)) is not None:
            self._cluster.pod(one)

    def expand(self, which: int) -> None:
        one = self._claim(which)
        if one is not None and one.volume is not None and one.size_bytes < 100 * MIB:
            self._cluster.expand(one, one.size_bytes + 16 * MIB)

    def take(self, which: int) -> None:
        if (one := self._claim(which)) is not None:
            self._cluster.snapshot(one)

    def end_pod(self, which: int) -> None:
        self._end(self._cluster.pods, which)

    def drop_claim(self, which: int) -> None:
        if (one := self._claim(which)) is not None:
            one.is_deleted = True
            for of in [of for of in self._cluster.pods if one in of.claims]:
                of.is_deleted = True

    def drop_snapshot(self, which: int) -> None:
        self._end(self._cluster.snapshots, which)

    def restart(self, node: str) -> None:
        self._nodes[node].restart()

    def kill(self, node: str, after_steps: int) -> None:
        self._nodes[node].kill(after_steps)

    def reboot(self, node: str) -> None:
        self._nodes[node].reboot()

    def restart_kubelet(self, node: str) -> None:
        self._cluster.nodes[node].kubelet.restart()

    def lose(self, node: str, group: str) -> None:
        self._nodes[node].lose(group)

    def find_again(self, node: str) -> None:
        self._nodes[node].find_again()

    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self._cluster.step()

    def _claim(self, which: int) -> Claim | None:
        found = [one for one in self._cluster.claims if not one.is_deleted]
        return found[which % len(found)] if found else None

    def _copy(self, of: Claim, source: Claim | Snapshot) -> None:
        made = self._cluster.claim(
            of.storage_class,
            capability=of.capability,
            size_bytes=of.size_bytes,
            source=source,
        )
        self._cluster.pod(made)

    @staticmethod
    def _end(found: Sequence[Pod] | Sequence[Snapshot], which: int) -> None:
        if found:
            found[which % len(found)].is_deleted = True


@pytest.mark.timeout(600)
def test_no_claim_is_stuck_whatever_happened(tmp_path: Path) -> None:
    examples = 100 if chosen.every else 30
    numbers = chosen.numbers("CARVER_CALLERS", seed=1, examples=examples, steps=14, shrink=1)
    serial = itertools.count()

    @random_histories(numbers, _actions)
    def lived(actions: list[tuple[Any, ...]]) -> None:
        cluster, nodes = machines.pair(tmp_path / str(next(serial)))
        try:
            live(History(cluster, nodes), actions)
            for node in nodes.values():
                node.find_again()
            assert cluster.run_until(lambda: not cluster.waiting()), cluster.waiting()
            cluster.delete_everything()
            assert cluster.run_until(cluster.is_empty)
            assert [node.left() for node in nodes.values()] == [[], []]
        finally:
            for node in nodes.values():
                node.stop()

    lived()


def random_histories(
    numbers: Mapping[str, int], actions: st.SearchStrategy[tuple[Any, ...]]
) -> Callable[[Callable[[list[tuple[Any, ...]]], None]], Callable[[], None]]:
    """Run a test on lists of actions, as many and as long as the numbers say."""

    def around(test: Callable[[list[tuple[Any, ...]]], None]) -> Callable[[], None]:
        limits = settings(
            max_examples=numbers["examples"],
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            phases=[Phase.generate, *([Phase.shrink] if numbers["shrink"] else [])],
            suppress_health_check=list(HealthCheck),
        )
        chosen_ones = given(st.lists(actions, min_size=4, max_size=numbers["steps"]))
        return seed(numbers["seed"])(limits(chosen_ones(test)))

    return around


def live(history: History, actions: Sequence[tuple[Any, ...]]) -> None:
    """Do what a history is of, and wait a moment after each."""
    for name, *how in actions:
        getattr(history, name)(*how)
        history.wait(1)
