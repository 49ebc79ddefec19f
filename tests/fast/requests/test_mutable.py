"""Mutable parameters as texts: each is read as it was written."""

import mmap
from dataclasses import replace
from typing import Any

import pytest

from agent.requests.parameters import MUTABLE, texts_of, tuning_of
from lvm.tuning import AS_IT_IS, PLAIN

PAGE = mmap.PAGESIZE
# Values that each parameter can have, by the end of its field's name.
VALUES: dict[str, list[Any]] = {
    "read_ahead_bytes": ["auto", 0, PAGE, 1 << 20],
    "recovery_kib": [0, 1, 1024, (1 << 31) - 1],
    "iops": [0, 10, (1 << 32) - 1],
    "bandwidth": [0, 64 << 10, 1 << 50],
    "iops_per_gib": [0, 1, 100],
    "bandwidth_per_gib": [0, 64 << 10, 1 << 30],
}
CASES = [
    (row.field_name, value)
    for row in MUTABLE
    for end, values in VALUES.items()
    if row.field_name.endswith(end)
    for value in values
]


@pytest.mark.parametrize(("part", "value"), CASES)
def test_a_value_is_read_as_it_was_written(part: str, value: Any) -> None:
    changed = replace(AS_IT_IS, **{part: value})
    texts = texts_of(changed)
    assert len(texts) == 1
    assert tuning_of(texts) == changed


def test_all_parameters_are_among_the_cases() -> None:
    assert {part for part, _ in CASES} == {row.field_name for row in MUTABLE}
    assert texts_of(AS_IT_IS) == {}
    assert tuning_of(texts_of(PLAIN)) == replace(PLAIN, bound_recovery_kib=None)


@pytest.mark.parametrize(
    "changed", [{"read_ahead_bytes": 2 << 30}, {"read_ahead_bytes": 512}, {"read_iops": 1}]
)
def test_what_no_parameter_can_have_is_left_out(changed: dict[str, Any]) -> None:
    assert texts_of(replace(AS_IT_IS, **changed)) == {}
