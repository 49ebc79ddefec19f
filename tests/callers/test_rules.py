"""callers.md, by which the fake callers act, fits what was recorded of the real ones."""

import re
from pathlib import Path

import pytest
import yaml
from callers import recording, rules
from callers.plugin import METHODS
from callers.rules import Reaction

from agent.core import codes


def test_each_recorded_call_has_a_rule_that_names_the_fields_that_were_filled() -> None:
    filled: dict[str, set[str]] = {}
    for recorded in recording.RECORDINGS.values():
        for one in recorded.read():
            filled.setdefault(one.method, set()).update(one.request)
    assert filled == {method: set(rules.of(method).fields) for method in filled}


def test_each_rule_is_of_a_call_and_of_fields_that_there_are() -> None:
    for one in rules.RULES:
        _, kind = METHODS[one.method]
        assert set(one.fields) <= {field.name for field in kind.DESCRIPTOR.fields}


@pytest.mark.parametrize("method", ["NodeStageVolume", "NodePublishVolume", "NodeExpandVolume"])
def test_kubelet_takes_for_final_what_carver_takes_for_final(method: str) -> None:
    # isFinalError of kubelet's csi_client.go.
    rule = rules.of(method, rules.KUBELET)
    for kind, code in codes.TABLE:
        goes_on = rule.reaction(code.name) is Reaction.REPEATS
        assert goes_on is not codes.is_final(kind.__new__(kind)), code


def test_only_an_answer_that_is_ok_or_asked_for_again_or_elsewhere_is_gone_on_with() -> None:
    create = rules.of("CreateVolume")
    assert create.reaction("OK") is Reaction.GOES_ON
    assert create.reaction("ABORTED") is Reaction.REPEATS
    assert create.reaction("RESOURCE_EXHAUSTED") is Reaction.RESCHEDULES
    assert create.reaction("FAILED_PRECONDITION") is Reaction.STICKS
    going_on = {one for one in Reaction if not one.is_a_stop}
    # Of growth and of another class: see the rules of ControllerExpandVolume, -ModifyVolume.
    same = {Reaction.INSISTS, Reaction.PERSISTS}
    assert going_on == {Reaction.GOES_ON, Reaction.REPEATS, Reaction.RESCHEDULES} | same


_CHART = Path(__file__).parents[2] / "deploy" / "helm" / "carver" / "values.yaml"
# Of Kubernetes the one that the lab's cluster is made of; health is asked for since the other.
_VERSIONS = {"kubernetes": {"v1.36.3", "v1.37.2"}, "csi-lib-utils": {"v0.25.0"}} | {
    "sig-storage-lib-external-provisioner": {"v13.1.0"}
}


def test_what_callers_do_was_read_in_the_versions_that_the_chart_pins() -> None:
    pinned = yaml.safe_load(_CHART.read_text())["sidecars"]
    versions = _VERSIONS | {
        f"external-{one}": {pinned[one]["image"]["tag"]}
        for one in ("provisioner", "snapshotter", "resizer", "attacher")
    }
    rows = [one for one in rules.TABLE.read_text().splitlines() if one.startswith("| ")]
    for row in rows:
        if (place := row.rstrip("| ").rpartition(" | ")[2]) == "where it is written":
            continue
        found = re.findall(r"([a-z-]+) (v[0-9.]+) `", place)
        assert found, row
        assert all(version in versions[name] for name, version in found), row
