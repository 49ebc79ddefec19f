"""The reasons: those of the document, each used and provoked, and merged as CSI demands."""

import re
from pathlib import Path

import pytest

from agent.operations import diagnosis
from agent.operations.diagnosis import Condition, Reason
from proto import csi_pb2 as csi

ROOT = Path(__file__).parents[3]
TABLE = (ROOT / "docs/troubleshooting.md").read_text().partition("## The reasons")[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TABLE.splitlines()
    if line.startswith("| `")
]


def test_every_reason_is_documented_with_its_statuses_a_cause_and_a_remedy() -> None:
    documented = [(word.strip("`"), volume, storage) for word, volume, storage, *_ in ROWS]
    assert documented == [(one.word, one.volume_status, one.storage_status) for one in Reason]
    assert all(cause and remedy for *_, cause, remedy in ROWS)


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_is_camel_case_and_its_statuses_are_csi_s(reason: Reason) -> None:
    assert re.fullmatch(r"([A-Z][a-z]+)+", reason.word)
    assert reason.volume_status or reason.storage_status
    if reason.volume_status:
        assert csi.VolumeHealthErrorType.Value(reason.volume_status) > 0
    if reason.storage_status:
        assert csi.StorageHealthErrorType.Value(reason.storage_status) > 0


def test_no_two_reasons_have_the_same_word() -> None:
    words = [one.word for one in Reason]
    assert len(set(words)) == len(words)


@pytest.mark.parametrize("reason", Reason, ids=str)
def test_every_reason_is_used_and_provoked_on_real_lvm(reason: Reason) -> None:
    modules = (ROOT / "agent/operations").glob("*.py")
    assert any(f"Reason.{reason.name}" in one.read_text() for one in modules)
    tests = [*(ROOT / "tests/contract").glob("test_*.py"), *(ROOT / "tests/vm").glob("test_*.py")]
    # One of two that may come is written as "A|B".
    named = re.compile(rf'["|]{reason.word}["|]')
    is_provoked = any(named.search(one.read_text()) for one in tests)
    # It is unknown what lvm2 would report.
    assert is_provoked is (reason is not Reason.LVM_REPORTS)


def test_conditions_of_one_reason_are_merged_with_the_oldest_age() -> None:
    first = Condition(Reason.DISK_MISSING, "a is missing", 20.0)
    other = Condition(Reason.RAID_RESYNCING, "it is resyncing")
    second = Condition(Reason.DISK_MISSING, "b is missing", 10.0)
    merged = diagnosis.distinct([first, other, second, first])
    assert merged == (Condition(Reason.DISK_MISSING, "a is missing; and b is missing", 10.0), other)


def test_the_worst_comes_first_and_no_more_than_kubernetes_takes() -> None:
    every = [Condition(one, "it is so") for one in Reason]
    found = diagnosis.distinct(every)
    assert len(found) == 16
    statuses = [one.reason.volume_status or one.reason.storage_status for one in found]
    order = ["DATA_LOSS", "STORAGE_UNREACHABLE", "INACCESSIBLE", "DEGRADED", "STORAGE_DEGRADED"]
    assert statuses == sorted(statuses, key=order.index)
    assert statuses[0] == "DATA_LOSS"


def test_only_an_earlier_condition_shows_its_age() -> None:
    seen = Condition(Reason.DISK_MISSING, "gone", 1e9)
    assert seen.text(1e9 + 42.4) == "gone (seen 42 s ago, at 2001-09-09T01:46:40Z)"
    assert seen.text(1e9 - 10).startswith("gone (seen 0 s ago")
    assert Condition(Reason.DISK_MISSING, "gone").text(1e9) == "gone"


@pytest.mark.parametrize("seen_seconds", [0.0, 1e9])
@pytest.mark.parametrize("letter", ["x", "ü", "…"])
def test_no_message_is_longer_than_kubernetes_takes(letter: str, seen_seconds: float) -> None:
    text = Condition(Reason.DISK_MISSING, letter * 2000, seen_seconds).text(1e9)
    assert 1000 < len(text.encode()) <= 1024
    assert text.startswith(letter * 300)
    assert "…" in text
    assert text.endswith("Z)") == bool(seen_seconds)
