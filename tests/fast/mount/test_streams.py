"""A program whose output is read as it comes: to its end, or not."""

import time

import pytest

from mount import command
from mount import mount_errors as mount_errors
from mount.command import Finished
from mount.programs import Programs

pytestmark = pytest.mark.starts_programs

FOR_EVER = "while :; do echo more; done"


def test_what_a_program_prints_is_read_while_it_runs() -> None:
    seen: list[Finished] = []
    with Programs(observe=seen.append).stream("sh", "-c", "echo first; cat") as printed:
        assert printed.readline() == b"first\n"
        # It was given nothing to read.
        assert printed.read() == b""
    [one] = seen
    assert (one.words[0], one.exit_code) == ("sh", 0)


def test_the_failure_of_a_program_is_an_error_once_all_was_read() -> None:
    with (
        pytest.raises(mount_errors.CommandFailed, match=r"exit code 3: it broke"),
        Programs().stream("sh", "-c", "echo some; echo it broke >&2; exit 3") as printed,
    ):
        assert printed.read() == b"some\n"


def read_as_a_report(script: str) -> None:
    with Programs().stream("sh", "-c", script) as printed:
        raise mount_errors.BadReport(printed.read().decode())


def test_output_that_is_cut_off_is_explained_by_how_the_program_ended() -> None:
    with pytest.raises(mount_errors.CommandFailed, match="exit code 3"):
        read_as_a_report("echo some; exit 3")
    with pytest.raises(mount_errors.BadReport, match="garbage"):
        read_as_a_report("echo garbage")


def test_a_program_is_ended_when_its_reader_stops_or_fails() -> None:
    seen: list[Finished] = []
    with Programs(observe=seen.append).stream("sh", "-c", FOR_EVER) as printed:
        assert printed.readline() == b"more\n"
    assert seen[0].exit_code == -15

    begun = time.monotonic()
    with pytest.raises(KeyError), Programs().stream("sh", "-c", FOR_EVER):
        raise KeyError
    assert time.monotonic() - begun < 60


def test_a_program_is_ended_when_its_caller_s_time_is_over() -> None:
    for seconds, program in ((0.2, "sleep 600"), (0.0, "true")):
        with (
            command.time_limit(seconds),
            pytest.raises(mount_errors.CommandTimedOut),
            Programs().stream("sh", "-c", f"exec {program}") as printed,
        ):
            assert printed.read() == b""


def test_a_program_that_is_not_installed_is_named() -> None:
    with pytest.raises(mount_errors.ProgramMissing, match="no-such"), Programs().stream("no-such"):
        pass
