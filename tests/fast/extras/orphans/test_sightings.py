"""Seen twice, a grace apart, and what makes a first sight of the second."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from agent.core import errors
from agent.extras.orphans.look import Clock, History

VERSIONS = {"volumes": "100", "pods": "7"}


class Machine:
    """A clock that only the test moves, and boots."""

    def __init__(self, directory: Path) -> None:
        self.seconds = 1000.0
        self.boot = "first"
        self.file = directory / "run" / "orphans.json"

    def note(self, *seen: str, **versions: str) -> Mapping[str, float]:
        """A look of a process of its own."""
        clock = Clock(lambda: self.seconds, lambda: self.boot)
        return History(self.file, clock).record(seen, VERSIONS | versions)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_first_sighting_is_new(machine: Machine) -> None:
    assert machine.note("a", "b") == {"a": 0, "b": 0}


def test_a_repeated_sighting_is_as_old_as_the_first(machine: Machine) -> None:
    machine.note("a")
    machine.seconds += 100
    assert machine.note("a", "b") == {"a": 100, "b": 0}
    machine.seconds += 50
    assert machine.note("a", "b") == {"a": 150, "b": 50}


def test_a_sighting_after_an_absence_is_new(machine: Machine) -> None:
    machine.note("a")
    machine.seconds += 100
    machine.note()
    machine.seconds += 100
    assert machine.note("a") == {"a": 0}


def test_after_a_boot_all_is_new(machine: Machine) -> None:
    machine.note("a")
    machine.boot, machine.seconds = "second", 5000
    assert machine.note("a") == {"a": 0}


def test_a_clock_set_back_makes_nothing_older(machine: Machine) -> None:
    machine.note("a")
    machine.seconds -= 500
    assert machine.note("a") == {"a": 0}


def test_a_restored_server_makes_all_new(machine: Machine) -> None:
    machine.note("a")
    machine.seconds += 100
    assert machine.note("a", volumes="99") == {"a": 0}
    machine.seconds += 100
    assert machine.note("a", volumes="99") == {"a": 100}


def test_a_version_that_grew_in_length_is_no_older_one(machine: Machine) -> None:
    machine.note("a", volumes="999")
    machine.seconds += 100
    assert machine.note("a", volumes="1000") == {"a": 100}


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"boot": 1}', '{"since": []}', "\0"])
def test_a_malformed_file_is_ignored(machine: Machine, content: str) -> None:
    machine.note("a")
    machine.file.write_text(content)
    machine.seconds += 100
    assert machine.note("a") == {"a": 0}


def test_a_truncated_file_is_ignored(machine: Machine) -> None:
    machine.note("a")
    whole = machine.file.read_bytes()
    for length in range(len(whole)):
        machine.file.write_bytes(whole[:length])
        machine.seconds += 1
        assert machine.note("a") == {"a": 0}


def test_the_file_is_root_s_alone_and_no_link_is_followed(machine: Machine) -> None:
    machine.note("a")
    assert machine.file.stat().st_mode & 0o777 == 0o600
    other = machine.file.with_name("other")
    machine.file.rename(other)
    before = other.read_bytes()
    machine.file.symlink_to(other)
    with pytest.raises(errors.NotReady, match="symbolic"):
        machine.note("b")
    assert other.read_bytes() == before
