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


# Looks: the seconds since the one before, what is seen, versions of lists that are not as usual,
# and for how long each was seen then.
Look = tuple[int, str, dict[str, str], dict[str, float]]
HISTORIES: dict[str, list[Look]] = {
    "seen repeatedly": [
        (0, "a", {}, {"a": 0}),
        (100, "ab", {}, {"a": 100, "b": 0}),
        (50, "ab", {}, {"a": 150, "b": 50}),
    ],
    "absent in between": [(0, "a", {}, {"a": 0}), (100, "", {}, {}), (100, "a", {}, {"a": 0})],
    "a clock set back": [(0, "a", {}, {"a": 0}), (-500, "a", {}, {"a": 0})],
    "a restored server": [
        (0, "a", {}, {"a": 0}),
        (100, "a", {"volumes": "99"}, {"a": 0}),
        (100, "a", {"volumes": "99"}, {"a": 100}),
    ],
    "a longer version": [
        (0, "a", {"volumes": "999"}, {"a": 0}),
        (100, "a", {"volumes": "1000"}, {"a": 100}),
    ],
}


@pytest.mark.parametrize("name", HISTORIES)
def test_a_sighting_is_as_old_as_the_first_of_an_unbroken_row(name: str, machine: Machine) -> None:
    for seconds, seen, versions, expected in HISTORIES[name]:
        machine.seconds += seconds
        assert machine.note(*seen, **versions) == expected


def test_after_a_boot_all_is_new(machine: Machine) -> None:
    machine.note("a")
    machine.boot, machine.seconds = "second", 5000
    assert machine.note("a") == {"a": 0}


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
