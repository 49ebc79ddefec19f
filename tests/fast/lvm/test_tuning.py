"""Settings of a volume: which of them limit its I/O, and by how much."""

from dataclasses import fields, replace
from typing import Any

import pytest

from agent.requests import parameters
from lvm import tuning
from lvm.tuning import AS_IT_IS, PLAIN, SETTINGS, Tuning
from mount.cgroups import UNLIMITED, IoMax

GIB = 1 << 30
LIMITS = [setting for setting in SETTINGS if setting.limit]
# Each kind of I/O, by the settings that limit it: the fixed one and the one for each GiB.
KINDS = {
    "reads": ("read_iops", "read_iops_per_gib"),
    "writes": ("write_iops", "write_iops_per_gib"),
    "read_bytes": ("read_bandwidth", "read_bandwidth_per_gib"),
    "write_bytes": ("write_bandwidth", "write_bandwidth_per_gib"),
}


def of(**values: Any) -> Tuning:
    return replace(AS_IT_IS, **values)


def test_the_settings_that_are_limits_are_those_of_the_parameters() -> None:
    assert {one.field_name for one in LIMITS} == {row.field_name for row in parameters.LIMITS}
    assert {one.limit.of for one in LIMITS if one.limit} == {one.name for one in fields(IoMax)}
    assert {one.limit.of: None for one in LIMITS if one.limit}.keys() == KINDS.keys()


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.field_name)
def test_only_a_setting_with_a_limit_limits(setting: tuning.Setting) -> None:
    limited = of(**{setting.field_name: 1 << 20})
    assert limited.is_limited == bool(setting.limit)
    assert bool(limited.io_max(GIB)) == bool(setting.limit)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size_bytes", [4 << 20, GIB, 10 * GIB])
@pytest.mark.parametrize("fixed", [None, 0, 5 << 20])
@pytest.mark.parametrize("per_gib", [None, 0, 1 << 20])
def test_the_lower_limit_counts(
    kind: str, size_bytes: int, fixed: int | None, per_gib: int | None
) -> None:
    of_kind = dict(zip(KINDS[kind], (fixed, per_gib), strict=True))
    values = [fixed] if fixed else []
    if per_gib:
        least = 64 << 10 if "bytes" in kind else 10
        values.append(max(least, per_gib * size_bytes // GIB))
    assert of(**of_kind).io_max(size_bytes) == replace(
        UNLIMITED, **({kind: min(values)} if values else {})
    )


def test_a_setting_with_a_tag_need_not_be_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is to come: it is read and written with the others, and limits nothing."""
    coming = tuning.Setting("minimum_recovery_kib", tag="coming")
    rows = [coming if one.field_name == coming.field_name else one for one in SETTINGS]
    monkeypatch.setattr(tuning, "SETTINGS", rows)
    monkeypatch.setattr(tuning, "_TAGGED", [row for row in rows if row.tag])
    own_tags = {"coming": "5", "readIOPS": "100"}
    assert tuning.limits(own_tags).tags() == {"readIOPS": "100"}
    assert not tuning.limits({"coming": "5"}).is_limited
    reported = tuning.reported(dict.fromkeys(tuning.COLUMNS, "0"), own_tags)
    assert reported == replace(PLAIN, read_ahead_bytes=0, minimum_recovery_kib=5, read_iops=100)
    assert reported.tags() == own_tags
