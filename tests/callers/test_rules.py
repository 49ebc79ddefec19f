"""callers.md, by which the fake callers act, fits what was recorded of the real ones."""

import pytest
from callers import recording, rules
from callers.plugin import METHODS
from callers.rules import Reaction

from agent.core import codes


def test_each_recorded_call_has_a_rule_that_names_the_fields_that_were_filled() -> None:
    filled: dict[str, set[str]] = {}
    for one in recording.read():
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
    insists = {Reaction.INSISTS}  # of growth; see the rule of ControllerExpandVolume
    assert going_on == {Reaction.GOES_ON, Reaction.REPEATS, Reaction.RESCHEDULES} | insists
