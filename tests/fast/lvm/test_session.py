"""The lvm2 shell that is kept open: what is sent to it, and which answers are believed."""

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import expect
import pytest
from fakes import shell as fake
from fakes import shell_program
from hypothesis import given
from hypothesis import strategies as some

from lvm import lvm_errors, session
from lvm.session import Confinement, Line, Session
from mount import command, programs
from mount import mount_errors as mount_errors
from mount.command import Finished, Result, time_limit
from mount.programs import Programs

REPORT = ("lvm", "fullreport", "--reportformat", "json")
CHANGE = ("lvm", "lvremove", "--yes", "--", "group/volume")
# Long enough for whatever is to happen, and never waited for.
AMPLE_SECONDS = 60.0
# In which a shell that runs has read a command on a busy machine, and which is waited for in full.
HANG_SECONDS = 1.0


def texts(*words: str) -> str | None:
    line = Line.of(words)
    return line.text if line else None


# What is sent


@given(some.lists(some.text(alphabet=some.characters(codec="latin-1"), max_size=40), max_size=70))
def test_a_line_is_split_into_its_words_again_or_not_sent(words: list[str]) -> None:
    expected = ["lvchange", *(one for one in words if one not in session.OF_A_SHELL)]
    line = texts("lvm", *expected)
    assert line is None or fake.split(line) == expected


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["group/volume"], "group/volume"),
        (["a b"], '"a b"'),
        (['a="b c"'], "'a=\"b c\"'"),
        (["#tag"], '"#tag"'),
        (["'"], '"\'"'),
        ([""], '""'),
        (["carver.name=a'b\"c"], "carver.name=a'b\"c"),
        # Behind two dashes nothing is an option.
        (["--", "--devices", "/dev/a"], "-- --devices /dev/a"),
        # As many as the shell takes.
        (["word"] * 62, " ".join(["word"] * 62)),
    ],
)
def test_a_word_is_quoted_as_lvm2_splits(words: list[str], line: str) -> None:
    assert texts("lvm", "lvchange", *words) == f"lvchange {line}"


@pytest.mark.parametrize(
    "words",
    [
        ("blkid",),
        ("lvm",),
        ("lvm", "version"),
        ("lvm", "pvmove", "/dev/a"),
        ("lvm", "lvs", "--noheadings"),
        ("lvm", "lvs", "--", "--reportformat", "json"),
        ("lvm", "lvchange", "tab\there"),
        ("lvm", "lvchange", "line\nlvremove"),
        ("lvm", "lvchange", "Größe"),
        ("lvm", "lvchange", "both ' and \""),
        ("lvm", "lvchange", *["word"] * 63),
        ("lvm", "lvchange", "x" * 2048),
        ("lvm", "lvchange", "--devices", '/dev/a"b'),
    ],
)
def test_a_command_that_the_shell_cannot_take_is_left_to_a_process(words: tuple[str, ...]) -> None:
    assert Line.of(words) is None


def test_a_setting_cannot_switch_off_the_reports_of_commands() -> None:
    line = Line.of(("lvm", "lvchange", "--config", "log/report_command_log=0 a/b=1", "--", "g"))
    assert line is not None
    assert line.confinement.lines() == ["a/b=1"]


def test_devices_and_settings_are_options_of_the_shell() -> None:
    words = ("--devices", "/dev/a,/dev/b.c", "--config", "a/b=1 c/d=2", "--addtag", "x", "--", "g")
    line = Line.of(("lvm", "lvchange", *words))
    assert line is not None
    assert line.text == "lvchange --addtag x -- g"
    assert line.confinement.lines() == [
        "a/b=1",
        "c/d=2",
        'devices/global_filter=["a|^/dev/a$|","a|^/dev/b[.]c$|","r|.*|"]',
        'devices/filter=["a|.*|"]',
        "devices/use_devicesfile=0",
    ]


# What is answered


@pytest.mark.parametrize(
    "result", [Result(5, "", "  WARNING: old.\n  Volume group is full.\n"), Result(0, "  Made.\n")]
)
def test_an_answer_is_the_result_of_a_process(result: Result) -> None:
    assert session.answer("lvs", fake.answer("lvs", result)) == result


@pytest.mark.parametrize(
    "reported",
    [
        "",
        "[]",
        "{",
        "{}",
        '{"log": []}',
        '{"log": [{"log_type": "error", "log_object_name": "lvs", "log_ret_code": "1"}]}',
        '{"log": [{"log_type": "status", "log_object_name": "lvcreate", "log_ret_code": "1"}]}',
        '{"log": [{"log_type": "status", "log_object_name": "lvs", "log_ret_code": "?"}]}',
        '{"log": [{"log_type": "status", "log_object_name": "lvs", "log_ret_code": "1"}]}' * 2,
    ],
)
def test_an_incomplete_or_foreign_answer_is_refused(reported: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        session.answer("lvs", reported)


def test_a_command_without_a_return_code_of_success_failed() -> None:
    odd = '{"log": [{"log_type": "status", "log_object_name": "lvs", "log_ret_code": "0"}]}'
    assert session.answer("lvs", odd).exit_code != 0


# Its settings


def test_the_node_s_settings_come_before_the_shell_s_own(tmp_path: Path) -> None:
    node, own = tmp_path / "node/etc/lvm", tmp_path / "own"
    # A comment may be of any encoding.
    local = "# für diesen Knoten\nlocal { system_id = 7 }".encode("latin-1")
    (node / "profile").mkdir(parents=True)
    (node / "lvm.conf").write_text("config")
    (node / "lvmlocal.conf").write_bytes(local)
    for confinement in (Confinement("/dev/b"), Confinement("/dev/a", "backup/archive=0")):
        session.prepare(own, tmp_path / "node", confinement)
    assert (own / "lvm.conf").readlink() == Path("/etc/lvm/lvm.conf")
    assert (own / "profile").readlink() == Path("/etc/lvm/profile")
    # lvm2 makes these two by itself, but not through a link.
    assert (node / "archive").is_dir()
    assert (own / "backup").readlink() == Path("/etc/lvm/backup")
    text = (own / "lvmlocal.conf").read_bytes()
    assert text.startswith(local + b"\n")
    lines = "\n".join([*Confinement("/dev/a", "backup/archive=0").lines(), ""])
    assert text.endswith(lines.encode())
    assert b"/dev/b" not in text


def test_settings_of_a_host_tag_prevent_a_shell(tmp_path: Path) -> None:
    node = tmp_path / "etc/lvm"
    node.mkdir(parents=True)
    (node / "lvm_here.conf").write_text('devices { filter = ["a|.*|"] }')
    with pytest.raises(OSError, match="lvm_here"):
        session.prepare(tmp_path / "own", tmp_path, Confinement())


# A shell that runs


class Place:
    """A node with an lvm2 of the tests' own, and a session."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        program = directory / "lvm"
        code = Path(shell_program.__file__).read_text()
        program.write_text(f"#!{sys.executable} -IS\n{code}")
        program.chmod(0o700)
        self.observed: list[Finished] = []
        self.session = self.new_session()

    def new_session(self, rest_seconds: float = 0) -> Session:
        run, own = Programs(), self.directory / "own"
        self.session = Session(
            run,
            run.converse,
            own,
            root=self.directory / "node",
            rest_seconds=rest_seconds,
            observe=self.observed.append,
        )
        return self.session

    def plan(self, *actions: str) -> None:
        """Choose what the next commands do."""
        (self.directory / "plan").write_text("\n".join(actions))

    def let_go(self) -> None:
        """Let a command that holds a lock end."""
        (self.directory / "let go").touch()

    @contextmanager
    def busy(self) -> Iterator["Future[Result]"]:
        """Another thread's change, which ends well once it is let go."""
        self.session(*REPORT)
        self.plan("hold_lock")
        with ThreadPoolExecutor(1) as other:
            change = other.submit(self.session, *CHANGE)
            expect.soon(lambda: "hangs" in (self.directory / "done").read_text())
            try:
                yield change
            finally:
                self.let_go()
            assert change.result(AMPLE_SECONDS).exit_code == 0

    def done(self, kind: str) -> list[str]:
        """The commands of shells (`did`) or of processes (`process`), or the shells (`shell`)."""
        file = self.directory / "done"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.partition(" ")[2] for line in lines if line.split()[0] == kind]

    def runs(self) -> bool:
        """Whether the last shell runs."""
        started = self.done("shell")
        state = Path("/proc", started[-1], "stat") if started else self.directory / "none"
        return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    path = f"{tmp_path}:{programs.ENVIRONMENT['PATH']}"
    monkeypatch.setitem(programs.ENVIRONMENT, "PATH", path)
    made = Place(tmp_path)
    yield made
    made.let_go()
    if made.runs():
        os.kill(int(made.done("shell")[-1]), signal.SIGCONT)
    made.session.close()


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_GRACE_SECONDS", 0.2)


@contextmanager
def timing_out(seconds: float = HANG_SECONDS) -> Iterator[None]:
    """The calls inside run out of time."""
    with time_limit(seconds), pytest.raises(mount_errors.CommandTimedOut):
        yield


pytestmark = pytest.mark.starts_programs


def test_one_shell_runs_one_command_after_the_other(place: Place) -> None:
    results = [place.session("lvm", "lvchange", "--addtag", f"a {n}", "--", "g") for n in range(20)]
    assert results[7] == Result(
        0, '  Said: lvchange --addtag "a 7" -- g\n', "  WARNING: as always.\n"
    )
    assert len(place.done("shell")) == 1
    assert place.done("process") == []
    assert len(place.done("did")) == 20
    assert [one.exit_code for one in place.observed] == [0] * 20


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize(
    ("action", "error"),
    [
        ("", ""),
        ("refuse", "NoSpace"),
        ("hang", "CommandTimedOut"),
        ("hold_lock", "CommandTimedOut"),
        ("die_before", "SessionLost"),
    ],
)
def test_observers_see_each_command_of_the_shell_and_its_error(
    place: Place, action: str, error: str
) -> None:
    place.session(*REPORT)
    place.plan(action)
    with suppress(mount_errors.OutcomeUnknown), time_limit(HANG_SECONDS):
        place.session(*CHANGE)
    place.let_go()
    assert [(one.words, one.error) for one in place.observed] == [(REPORT, ""), (CHANGE, error)]


def test_an_idle_shell_is_replaced_after_many_commands(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_MANY_COMMANDS", 3)
    for _ in range(3):
        place.session(*CHANGE)
    place.session.end_if_idle()
    assert place.runs(), "it is not idle"
    monkeypatch.setattr(session, "_IDLE_SECONDS", 0.0)
    place.session.end_if_idle()
    assert not place.runs()
    for _ in range(2):
        assert place.session(*CHANGE).exit_code == 0
        place.session.end_if_idle()
    assert place.runs(), "it ran few commands"
    assert len(place.done("shell")) == 2
    assert place.done("process") == []


def test_an_idle_shell_that_takes_much_memory_is_replaced(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.session(*CHANGE)
    monkeypatch.setattr(session, "_IDLE_SECONDS", 0.0)
    place.session.end_if_idle()
    assert place.runs(), "it takes little"
    monkeypatch.setattr(session, "_MOST_IDLE_BYTES", 1 << 20)
    monkeypatch.setattr(session, "_IDLE_SECONDS", 60.0)
    place.session.end_if_idle()
    assert place.runs(), "it is not idle"
    monkeypatch.setattr(session, "_IDLE_SECONDS", 0.0)
    place.session.end_if_idle()
    assert not place.runs()
    assert place.session(*CHANGE).exit_code == 0
    assert len(place.done("shell")) == 2


def test_rest_does_not_wait_for_a_busy_shell(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_MANY_COMMANDS", 1)
    monkeypatch.setattr(session, "_IDLE_SECONDS", 0.0)
    with place.busy() as change:
        place.session.end_if_idle()
        assert not change.done()
    assert len(place.done("shell")) == 1


def test_a_shell_that_refuses_without_a_known_reason_is_replaced(place: Place) -> None:
    place.plan("refuse", "puzzle")
    refused, *more = (place.session(*CHANGE) for _ in range(4))
    assert isinstance(
        lvm_errors.classify(("lvm", "lvremove"), 5, refused.stderr), lvm_errors.NoSpace
    )
    assert [one.exit_code for one in (refused, *more)] == [5, 5, 0, 0]
    assert len(place.done("shell")) == 2
    assert place.done("process") == []


def test_a_report_larger_than_a_pipe_arrives_whole(place: Place) -> None:
    place.plan("much")
    assert "x" * shell_program.MUCH in place.session(*REPORT).stdout


def test_other_commands_run_in_a_process(place: Place) -> None:
    place.session("lvm", "version")
    assert place.done("process") == ["version"]
    assert place.done("shell") == []


def test_other_devices_need_another_shell(place: Place) -> None:
    for devices in ("/dev/a", "/dev/a", "/dev/b"):
        place.session("lvm", "lvchange", "--devices", devices, "--", "g")
    assert len(place.done("shell")) == 2
    assert "/dev/b" in (place.directory / "own/lvmlocal.conf").read_text()


def test_a_closed_session_uses_processes(place: Place) -> None:
    place.session(*CHANGE)
    place.session.close()
    assert not place.runs()
    place.session(*CHANGE)
    assert len(place.done("process")) == 1


def test_each_of_many_threads_gets_its_own_answer(place: Place) -> None:
    def ask(number: int) -> bool:
        return f" a{number} " in place.session("lvm", "lvchange", f"a{number}", "--", "g").stdout

    with ThreadPoolExecutor(8) as callers:
        assert all(callers.map(ask, range(100)))
    assert len(place.done("shell")) == 1


def test_other_programs_do_not_inherit_the_shell_s_descriptors_or_environment(
    place: Place,
) -> None:
    place.session(*CHANGE)
    seen = Programs()("sh", "-c", "env; ls -l /proc/self/fd").stdout
    assert "LVM_" in seen  # what every program has
    for mark in ("LVM_REPORT_FD", "LVM_SYSTEM_DIR", "ptmx", "pts/"):
        assert mark not in seen


# Doubt


@pytest.mark.parametrize(
    "action", ["die_before", "die_after", "cut", "garble", "other", "silent", "starve"]
)
def test_a_change_with_an_unknown_outcome_is_not_repeated(place: Place, action: str) -> None:
    place.session(*REPORT)
    place.plan(action)
    with pytest.raises(lvm_errors.SessionLost, match="not known whether lvm lvremove was done"):
        place.session(*CHANGE)
    changes = [line for line in place.done("did") if line.startswith("lvremove")]
    assert len(changes) == (0 if action in ("die_before", "starve") else 1)
    assert place.done("process") == []
    # The caller reads a report, and goes on, with a new shell.
    assert [place.session(*one).exit_code for one in (REPORT, CHANGE)] == [0, 0]
    assert len(place.done("shell")) == 2


@pytest.mark.parametrize("action", ["die_before", "cut", "garble", "other", "silent", "starve"])
def test_a_report_in_doubt_is_read_by_a_process(place: Place, action: str) -> None:
    place.plan(action)
    assert place.session(*REPORT) == Result(0, '{"report": []}\n', "")
    assert place.done("process") == ["fullreport --reportformat json"]


def test_a_shell_that_died_between_two_commands_is_replaced(place: Place) -> None:
    place.session(*CHANGE)
    os.kill(int(place.done("shell")[0]), signal.SIGKILL)
    expect.soon(lambda: not place.runs())
    assert place.session(*CHANGE).exit_code == 0
    assert len(place.done("shell")) == 2


def test_a_shell_with_unexpected_output_is_replaced(place: Place) -> None:
    place.plan("chatter")
    place.session(*CHANGE)
    expect.soon(lambda: "chattered" in (place.directory / "done").read_text())
    assert place.session(*CHANGE).stdout == "  Said: lvremove --yes -- group/volume\n"
    assert len(place.done("shell")) == 2


def test_after_a_doubt_commands_run_in_processes_for_a_while(place: Place) -> None:
    place.new_session(rest_seconds=AMPLE_SECONDS)
    place.plan("garble")
    with pytest.raises(lvm_errors.SessionLost):
        place.session(*CHANGE)
    place.session(*CHANGE)
    assert len(place.done("shell")) == 1
    assert len(place.done("process")) == 1


def test_without_a_shell_commands_run_in_processes(place: Place) -> None:
    place.new_session(rest_seconds=AMPLE_SECONDS)
    place.plan("no-shell")
    for _ in range(3):
        assert place.session(*CHANGE).stdout == "  Done.\n"
    assert len(place.done("shell")) == 1


def test_a_shell_without_a_prompt_is_not_waited_for(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_START_SECONDS", 0.5)
    place.plan("mute")
    assert place.session(*CHANGE).stdout == "  Done.\n"
    assert not place.runs()


def test_a_missing_lvm2_is_named(tmp_path: Path) -> None:
    def missing(*words: str, **_: object) -> command.Conversation:
        raise mount_errors.ProgramMissing(words[0])

    def run(*words: str) -> Result:
        raise mount_errors.ProgramMissing(words[0])

    with pytest.raises(mount_errors.ProgramMissing, match="lvm is not installed"):
        Session(run, missing, tmp_path / "own", root=tmp_path)(*CHANGE)


# Time


@pytest.mark.parametrize("action", ["hang", "wait_for_lock"])
def test_a_shell_that_does_not_answer_in_time_is_ended(place: Place, action: str) -> None:
    place.session(*REPORT)
    place.plan(action)
    with timing_out():
        place.session(*CHANGE)
    assert not place.runs()
    assert place.session(*CHANGE).exit_code == 0


@pytest.mark.usefixtures("short_grace")
def test_a_command_that_does_not_end_blocks_changes_but_not_reports(place: Place) -> None:
    place.session(*REPORT)
    place.plan("hold_lock")
    with timing_out():
        place.session(*CHANGE)
    # Also changes that no shell would take.
    both = ("lvchange", "--addtag", "both ' and \"", "--", "g")
    for words in (("lvcreate", "group"), ("pvmove", "/dev/a"), both):
        with pytest.raises(lvm_errors.StillRunning, match="lvremove got SIGTERM"):
            place.session("lvm", *words)
    assert place.session(*REPORT).exit_code == 0
    assert len(place.done("process")) == 1  # and of no change
    place.let_go()
    expect.soon(lambda: not place.runs())
    assert place.session(*CHANGE).exit_code == 0
    assert place.done("did").count("lvremove --yes -- group/volume") == 2


@pytest.mark.usefixtures("short_grace")
def test_an_abandoned_shell_can_write_its_report_and_end(place: Place) -> None:
    place.session(*REPORT)
    place.plan("hold_lock")
    with timing_out():
        place.session(*REPORT)
    place.let_go()
    expect.soon(lambda: place.session(*REPORT) and not place.runs())


@pytest.mark.usefixtures("short_grace")
def test_a_stopped_shell_runs_nothing_after_sigcont(place: Place) -> None:
    place.session(*REPORT)
    place.plan("stop")
    with timing_out():
        place.session(*CHANGE)
    with pytest.raises(lvm_errors.StillRunning):
        place.session(*CHANGE)
    os.kill(int(place.done("shell")[0]), signal.SIGCONT)
    expect.soon(lambda: not place.runs())
    assert not [line for line in place.done("did") if line.startswith("lvremove")]
    assert place.session(*CHANGE).exit_code == 0


def test_a_call_without_time_left_runs_nothing(place: Place) -> None:
    with timing_out(0.0):
        place.session(*CHANGE)
    assert place.done("shell") == []


def test_a_caller_waits_for_another_command_until_its_deadline(place: Place) -> None:
    with place.busy(), timing_out(0.2):
        place.session(*REPORT)
    assert place.session(*REPORT).exit_code == 0


@pytest.mark.usefixtures("short_grace")
def test_renew_and_close_do_not_wait_long_for_another_command(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with place.busy() as change:
        with timing_out(0.2):
            place.session.renew()
        monkeypatch.setattr(session, "_RENEW_SECONDS", 0.2)
        with pytest.raises(mount_errors.CommandTimedOut):
            place.session.renew()
        place.session.close()
        assert not change.done()
    # A shell that was closed while it was at work is ended by the next call.
    place.session(*CHANGE)
    assert place.done("process") == ["lvremove --yes -- group/volume"]
    assert not place.runs()
