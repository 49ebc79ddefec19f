"""A program whose output is read as it comes: to its end, or not."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mount import command
from mount import errors as mount_errors
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


def test_a_program_has_all_of_its_input_once_it_runs() -> None:
    key = bytearray(b"sesame")
    with Programs().stream("sh", "-c", "sleep 0.1; cat", stdin=key) as printed:
        key[:] = bytes(len(key))
        assert printed.read() == b"sesame"
    # One that reads nothing of it ends as it likes.
    with Programs().stream("true", stdin=bytearray(b"sesame")) as printed:
        assert printed.read() == b""


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


# It tells its process's number, and then writes a byte after the other until it is ended.
COUNTS = 'echo $$; while :; do echo >> "$0"; done'


def written(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def state(pid: int) -> str:
    """As proc(5) has it; empty once the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


class Turns:
    """Turns of a program, whose state between them, and how far it is then, is looked at."""

    def __init__(self, file: Path, seconds: float | None, most: int) -> None:
        self._file, self._seconds, self._left = file, seconds, most
        self.pid = 0
        self.is_stopped: list[bool] = []
        self.done: list[int] = []

    @contextmanager
    def __call__(self) -> Iterator[float | None]:
        if self.pid:
            self.is_stopped.append(state(self.pid) == "T")
            before = written(self._file)
            time.sleep(0.05)
            assert not self.is_stopped[-1] or written(self._file) == before
            self.done.append(before)
        if not self._left:
            raise KeyError
        self._left -= 1
        yield self._seconds


def test_a_program_in_turns_is_stopped_between_them_and_ended_while_it_is(tmp_path: Path) -> None:
    file = tmp_path / "written"
    turns = Turns(file, 0.2, 5)
    begun = time.monotonic()
    stream = Programs().stream("sh", "-c", COUNTS, str(file), turn=turns)

    def read() -> None:
        with stream as printed:
            turns.pid = int(printed.readline())
            printed.readline()

    with pytest.raises(KeyError):
        read()
    assert len(turns.is_stopped) >= 4
    assert all(turns.is_stopped[1:])
    assert turns.done == sorted(set(turns.done)), "it went on in each turn"
    assert state(turns.pid) == "", "it has ended"
    assert time.monotonic() - begun < 60


def test_a_program_in_turns_without_a_limit_is_not_stopped() -> None:
    found = list[float | None]()

    @contextmanager
    def turn() -> Iterator[float | None]:
        found.append(None)
        yield None

    script = "echo one; sleep 0.2; cat /proc/$$/stat; exit 3"

    def read() -> None:
        with Programs().stream("sh", "-c", script, turn=turn) as printed:
            assert printed.readline() == b"one\n"
            assert b" T " not in printed.read()

    with pytest.raises(mount_errors.CommandFailed, match="exit code 3"):
        read()
    assert found


def test_what_a_program_in_turns_prints_is_all_read(tmp_path: Path) -> None:
    turns = Turns(tmp_path / "none", 0.02, 1000)
    stream = Programs().stream("seq", "100000", turn=turns)
    with stream as printed:
        assert sum(1 for _ in printed) == 100000


def test_a_program_that_is_stopped_with_its_output_closed_goes_on_to_its_end(
    tmp_path: Path,
) -> None:
    close, end, pids = tmp_path / "close", tmp_path / "end", list[int]()
    script = (
        'echo $$; until [ -e "$0" ]; do :; done; exec >&- 2>&-; until [ -e "$1" ]; do :; done;'
        " exit 3"
    )

    @contextmanager
    def turn() -> Iterator[float | None]:
        if pids:
            close.touch()
        yield 30.0

    def read() -> None:
        with Programs().stream("sh", "-c", script, str(close), str(end), turn=turn) as printed:
            pids.append(int(printed.readline()))
            assert printed.read() == b""
            assert state(pids[0]) == "T"
            end.touch()

    with command.time_limit(60), pytest.raises(mount_errors.CommandFailed, match="exit code 3"):
        read()


# Carver, as far as it streams: the program is stopped for ever after its first turn.
PARENT = """
import sys, time
from contextlib import contextmanager
from mount.programs import Programs
turns = []
@contextmanager
def turn():
    if len(turns) == 3:
        print("stopped", flush=True)
        time.sleep(600)
    turns.append(1)
    yield 0.2
with Programs().stream("sh", "-c", "echo $$; exec sleep 600", turn=turn) as printed:
    print(printed.readline().decode(), end="", flush=True)
    printed.readline()
"""


def test_a_stopped_program_dies_with_its_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert parent.stdout.readline() == b"stopped\n"
        assert state(pid) == "T"
        parent.kill()
    deadline = time.monotonic() + 20
    # Gone, or not fetched by whoever it fell to.
    while state(pid) not in ("", "Z"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
