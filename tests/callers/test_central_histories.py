"""Whatever happens on three nodes and to two controllers, no claim is stuck and nothing is left.

The same seed gives the same histories; it is printed. `CARVER_CENTRAL=seed=7,examples=1000` chooses
others. What hypothesis prints of a failure is the shortest history that fails.
"""

import itertools
from pathlib import Path
from typing import Any

import chosen
import pytest
from callers.controllers import Central, central
from callers.objects import Claim, Snapshot
from callers.test_histories import History, live, random_histories
from hypothesis import strategies as st

_which = st.integers(0, 9)
_nodes = st.sampled_from("abc")
_kinds = st.tuples(st.just("claim"), st.sampled_from(("fast", "slow", "now")), st.booleans())
_ATTRIBUTES = {"much": {"carver/readAhead": "1MiB"}, "little": {"carver/readAhead": "128KiB"}}
_actions = st.one_of(
    *(_kinds, _kinds),
    st.tuples(st.sampled_from(("restore", "clone", "second_pod", "expand")), _which),
    st.tuples(st.sampled_from(("take", "take", "restore", "clone")), _which),
    st.tuples(
        st.sampled_from(("restore_beside", "clone_beside")),
        _which,
        st.sampled_from(("fast", "slow")),
    ),
    st.tuples(st.sampled_from(("end_pod", "drop_claim", "drop_snapshot")), _which),
    st.tuples(st.just("modify"), _which, st.sampled_from(list(_ATTRIBUTES))),
    st.tuples(st.sampled_from(("restart", "reboot", "restart_kubelet")), _nodes),
    st.tuples(st.just("kill"), _nodes, st.integers(0, 12)),
    st.tuples(st.just("switch_off"), _nodes, st.integers(1, 100)),
    st.tuples(st.just("delete_node"), _nodes),
    st.tuples(st.just("kill_controller"), st.integers(0, 12)),
    st.tuples(st.just("change_leader")),
    st.tuples(st.just("lose"), _nodes, st.sampled_from(("group0", "group1"))),
    st.tuples(st.just("find_again"), _nodes),
    st.tuples(st.just("wait"), st.integers(1, 40)),
)


class CentralHistory(History):
    """What people do, and what happens to nodes and controllers."""

    def __init__(self, three: Central) -> None:
        super().__init__(three.cluster, three.machines)
        self._three = three

    def modify(self, which: int, attributes: str) -> None:
        if (one := self._claim(which)) is not None:
            one.attributes_class = attributes

    def restore_beside(self, which: int, storage_class: str) -> None:
        """A pod with a claim that is restored and one that is new, as a database has them.

        Of a claim that is bound: where others will be nothing says.
        """
        found = [one for one in self._cluster.snapshots if not one.is_deleted and one.claim.volume]
        if found:
            self._beside(found[which % len(found)], storage_class)

    def clone_beside(self, which: int, storage_class: str) -> None:
        found = [one for one in self._cluster.claims if not one.is_deleted and one.volume]
        if found:
            self._beside(found[which % len(found)], storage_class)

    def _beside(self, source: Claim | Snapshot, storage_class: str) -> None:
        of = source.claim if isinstance(source, Snapshot) else source
        copy = self._cluster.claim(
            "slow" if of.storage_class == "slow" else "fast",
            capability=of.capability,
            size_bytes=of.size_bytes,
            source=source,
        )
        new = self._cluster.claim(storage_class)
        self._cluster.pod([copy, new] if len(self._cluster.pods) % 2 else [new, copy])

    def delete_node(self, node: str) -> None:
        """A node is lost, and people give up what was on it; what only waits for it goes on."""
        cluster = self._cluster
        if len(cluster.nodes) == 1 or node not in cluster.nodes:
            return
        self._three.delete_node(node)
        lost = [one for one in cluster.claims if one.volume and one.volume.node == node]
        cluster.snapshots[:] = [
            one for one in cluster.snapshots if one.node != node and one.claim not in lost
        ]
        gone: set[Claim] = set()
        while lost:
            gone |= set(lost)
            # A copy of what is lost will never be made.
            sources = {None, *cluster.snapshots, *cluster.claims} - gone
            waiting = [one for one in cluster.claims if one.volume is None and one not in gone]
            lost = [one for one in waiting if one.source not in sources]
        cluster.claims[:] = [one for one in cluster.claims if one not in gone]
        cluster.pods[:] = [one for one in cluster.pods if not set(one.claims) & gone]
        cluster.released[:] = [one for one in cluster.released if one.node != node]

    def switch_off(self, node: str, seconds: int) -> None:
        if node in self._cluster.nodes:
            self._nodes[node].switch_off(seconds)

    def restart_kubelet(self, node: str) -> None:
        if node in self._cluster.nodes:
            super().restart_kubelet(node)

    def kill_controller(self, after_steps: int) -> None:
        """A step is a call to a node, or its answer."""
        leader = self._three.leader
        leader.dies_after = leader.steps + after_steps

    def change_leader(self) -> None:
        self._three.change_leader()

    def restart(self, node: str) -> None:
        if not self._nodes[node].node.is_off:
            super().restart(node)

    def kill(self, node: str, after_steps: int) -> None:
        if not self._nodes[node].node.is_off:
            super().kill(node, after_steps)

    def reboot(self, node: str) -> None:
        if not self._nodes[node].node.is_off:
            super().reboot(node)


def name_in(volume_id: str) -> str:
    return f"/{volume_id.rpartition('/')[2]}"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("examples", [8, pytest.param(200, marks=pytest.mark.long)])
def test_no_claim_is_stuck_whatever_happened(examples: int, tmp_path: Path) -> None:
    numbers = chosen.numbers("CARVER_CENTRAL", seed=1, examples=examples, steps=14, shrink=1)
    serial = itertools.count()

    @random_histories(numbers, _actions)
    def lived(actions: list[tuple[Any, ...]]) -> None:
        with central(tmp_path / str(next(serial))) as three:
            cluster, history = three.cluster, CentralHistory(three)
            cluster.attributes_classes |= _ATTRIBUTES
            live(history, actions)
            three.let_live()
            assert cluster.run_until(lambda: not cluster.waiting()), cluster.report()
            client = three.leader.client
            found = {one.volume_id for one in client.volumes()}
            known = {one.id: one for one in cluster.volumes()}
            assert found >= known.keys()
            for orphan in found - known.keys():
                # docs/cluster.md: only another controller may have an Immediate volume made twice.
                twins = [one for one in known.values() if one.id.endswith(name_in(orphan))]
                assert [one.storage_class for one in twins] == ["now"]
                assert {name for name, *_ in actions} & {"kill_controller", "change_leader"}
                client.delete(orphan)
            taken = sorted(one.snapshot_id for one in client.snapshots())
            assert taken == sorted(one.id for one in cluster.snapshots if one.id)
            cluster.delete_everything()
            assert cluster.run_until(cluster.is_empty), cluster.report()
            assert [one for each in three.machines.values() for one in each.left()] == []

    lived()
