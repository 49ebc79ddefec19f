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


def test_what_is_seen_for_the_first_time_is_new(machine: Machine) -> None:
    assert machine.note("a", "b") == {"a": 0, "b": 0}


def test_what_is_seen_again_is_as_old_as_its_first_sight(machine: Machine) -> None:
    machine.note("a")
    machine.seconds += 100
    assert machine.note("a", "b") == {"a": 100, "b": 0}
    machine.seconds += 50
    assert machine.note("a", "b") == {"a": 150, "b": 50}


def test_what_was_not_there_in_between_is_new(machine: Machine) -> None:
    machine.note("a")
    machine.seconds += 100
    machine.note()
    machine.seconds += 100
    assert machine.note("a") == {"a": 0}


def test_after_a_boot_all_is_new(machine: Machine) -> None:
    machine.note("a")
    machine.boot, machine.seconds = "second", 5000
    assert machine.note("a") == {"a": 0}


def test_a_clock_that_went_back_makes_nothing_older(machine: Machine) -> None:
    machine.note("a")
    machine.seconds -= 500
    assert machine.note("a") == {"a": 0}


def test_a_server_that_was_put_back_makes_all_new(machine: Machine) -> None:
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
def test_a_file_that_is_broken_says_nothing(machine: Machine, content: str) -> None:
    machine.note("a")
    machine.file.write_text(content)
    machine.seconds += 100
    assert machine.note("a") == {"a": 0}


def test_every_part_of_the_file_that_a_kill_leaves_says_nothing(machine: Machine) -> None:
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
