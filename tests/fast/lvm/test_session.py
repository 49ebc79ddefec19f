"""A shell of lvm2's that is kept open: what it is told, and what is believed of what it answers."""

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import expect
import pytest
from fakes import shell as fake
from fakes import shell_program
from hypothesis import given
from hypothesis import strategies as some

from lvm import errors, session
from lvm.session import Confinement, Line, Session
from mount import command, programs
from mount import errors as mount_errors
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


# What is said


@given(some.lists(some.text(alphabet=some.characters(codec="latin-1"), max_size=40), max_size=70))
def test_what_is_said_is_split_into_the_words_again_or_not_said(words: list[str]) -> None:
    said = texts("lvm", "lvchange", *(one for one in words if one not in session.OF_A_SHELL))
    if said is not None:
        expected = ["lvchange", *(one for one in words if one not in session.OF_A_SHELL)]
        assert fake.split(said) == expected


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("group/volume", "group/volume"),
        ("a b", '"a b"'),
        ('a="b c"', "'a=\"b c\"'"),
        ("#tag", '"#tag"'),
        ("'", '"\'"'),
        ("", '""'),
        ("carver.name=a'b\"c", "carver.name=a'b\"c"),
    ],
)
def test_a_word_is_quoted_as_lvm2_splits(word: str, said: str) -> None:
    assert texts("lvm", "lvchange", word) == f"lvchange {said}"


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
def test_what_a_shell_cannot_be_told_is_left_to_a_process(words: tuple[str, ...]) -> None:
    assert Line.of(words) is None


def test_as_many_words_as_the_shell_takes_are_said() -> None:
    assert texts("lvm", "lvchange", *["word"] * 62) is not None


def test_a_report_s_setting_does_not_switch_off_how_the_shell_tells_of_commands() -> None:
    line = Line.of(("lvm", "lvchange", "--config", "log/report_command_log=0 a/b=1", "--", "g"))
    assert line is not None
    assert line.confinement.lines() == ["a/b=1"]


def test_the_devices_and_the_settings_are_the_shell_s_and_not_the_command_s() -> None:
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


def test_what_stands_behind_two_dashes_is_never_taken_for_an_option() -> None:
    assert texts("lvm", "lvremove", "--", "--devices", "/dev/a") == "lvremove -- --devices /dev/a"


# What is answered


def test_an_answer_is_what_a_process_would_have_told() -> None:
    refused = Result(5, "", "  WARNING: old.\n  Volume group is full.\n")
    assert session.answer("lvs", fake.answer("lvs", refused)) == refused
    done = Result(0, "  Made.\n", "")
    assert session.answer("lvcreate", fake.answer("lvcreate", done)) == done


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
def test_what_is_not_the_one_whole_answer_to_the_command_is_none(reported: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        session.answer("lvs", reported)


def test_a_command_without_success_never_looks_done() -> None:
    odd = '{"log": [{"log_type": "status", "log_object_name": "lvs", "log_ret_code": "0"}]}'
    assert session.answer("lvs", odd).exit_code != 0


# What it finds


def test_a_shell_finds_the_node_s_settings_and_its_own_after_them(tmp_path: Path) -> None:
    node, own = tmp_path / "node/etc/lvm", tmp_path / "own"
    (node / "profile").mkdir(parents=True)
    (node / "lvm.conf").write_text("config")
    (node / "lvmlocal.conf").write_text("local { system_id = 7 }")
    for confinement in (Confinement("/dev/b"), Confinement("/dev/a", "backup/archive=0")):
        session.prepare(own, tmp_path / "node", confinement)
    assert (own / "lvm.conf").readlink() == Path("/etc/lvm/lvm.conf")
    assert (own / "profile").readlink() == Path("/etc/lvm/profile")
    # lvm2 makes these two by itself, but not through a link.
    assert (node / "archive").is_dir()
    assert (own / "backup").readlink() == Path("/etc/lvm/backup")
    text = (own / "lvmlocal.conf").read_text()
    assert text.startswith("local { system_id = 7 }\n")
    assert text.endswith("\n".join([*Confinement("/dev/a", "backup/archive=0").lines(), ""]))
    assert "/dev/b" not in text


def test_the_node_s_settings_may_be_of_any_encoding(tmp_path: Path) -> None:
    own = tmp_path / "node/etc/lvm"
    own.mkdir(parents=True)
    told = "# für diesen Knoten\n".encode("latin-1")
    (own / "lvmlocal.conf").write_bytes(told)
    session.prepare(tmp_path / "own", tmp_path / "node", Confinement())
    assert (tmp_path / "own/lvmlocal.conf").read_bytes().startswith(told)


def test_settings_of_a_host_tag_would_be_over_the_shell_s_so_there_is_none(tmp_path: Path) -> None:
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

    def plan(self, *deeds: str) -> None:
        """What is done at the next commands."""
        (self.directory / "plan").write_text("\n".join(deeds))

    def let_go(self) -> None:
        """What holds a lock may end."""
        (self.directory / "let go").touch()

    def done(self, kind: str) -> list[str]:
        """What was done by a shell (`did`), or by a process; or the shells that were started."""
        file = self.directory / "done"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.partition(" ")[2] for line in lines if line.split()[0] == kind]

    def runs(self) -> bool:
        """Whether the last shell has not ended."""
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


pytestmark = pytest.mark.starts_programs


def test_one_shell_does_one_command_after_the_other(place: Place) -> None:
    results = [place.session("lvm", "lvchange", "--addtag", f"a {n}", "--", "g") for n in range(20)]
    assert results[7] == Result(
        0, '  Said: lvchange --addtag "a 7" -- g\n', "  WARNING: as always.\n"
    )
    assert len(place.done("shell")) == 1
    assert place.done("process") == []
    assert len(place.done("did")) == 20
    assert [one.exit_code for one in place.observed] == [0] * 20


def test_a_shell_that_was_told_much_is_ended_when_it_is_idle_and_begun_anew_when_it_is_needed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_MANY_COMMANDS", 3)
    for _ in range(3):
        place.session(*CHANGE)
    place.session.rest()
    assert place.runs(), "it was told something a moment ago"
    monkeypatch.setattr(session, "_IDLE_SECONDS", 0.0)
    place.session.rest()
    assert not place.runs()
    for _ in range(2):
        assert place.session(*CHANGE).exit_code == 0
        place.session.rest()
    assert place.runs(), "it was told little"
    assert len(place.done("shell")) == 2
    assert place.done("process") == []


def test_whoever_has_shells_rest_waits_for_none_at_work(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_MANY_COMMANDS", 1)
    monkeypatch.setattr(session, "_IDLE_SECONDS", 0.0)
    place.session(*REPORT)
    place.plan("hold_lock")
    with ThreadPoolExecutor(2) as others:
        first = others.submit(place.session, *CHANGE)
        expect.soon(lambda: "hangs" in (place.directory / "done").read_text())
        others.submit(place.session.rest).result(AMPLE_SECONDS)
        assert not first.done()
        place.let_go()
        assert first.result(AMPLE_SECONDS).exit_code == 0
    assert len(place.done("shell")) == 1


def test_a_refusal_has_its_exit_code_and_its_words(place: Place) -> None:
    place.plan("refuse")
    result = place.session(*CHANGE)
    assert result.exit_code == 5
    assert isinstance(errors.classify(("lvm", "lvremove"), 5, result.stderr), errors.NoSpace)


def test_a_shell_that_refuses_without_a_known_reason_is_asked_nothing_more(place: Place) -> None:
    place.plan("refuse", "puzzle")
    assert [place.session(*CHANGE).exit_code for _ in range(3)] == [5, 5, 0]
    assert place.session(*CHANGE).exit_code == 0
    assert len(place.done("shell")) == 2
    assert place.done("process") == []


def test_a_report_larger_than_a_pipe_arrives_whole(place: Place) -> None:
    place.plan("much")
    assert "x" * shell_program.MUCH in place.session(*REPORT).stdout


def test_what_the_shell_does_not_do_is_done_by_a_process(place: Place) -> None:
    place.session("lvm", "version")
    assert place.done("process") == ["version"]
    assert place.done("shell") == []


def test_another_confinement_is_another_shell(place: Place) -> None:
    for devices in ("/dev/a", "/dev/a", "/dev/b"):
        place.session("lvm", "lvchange", "--devices", devices, "--", "g")
    assert len(place.done("shell")) == 2
    assert "/dev/b" in (place.directory / "own/lvmlocal.conf").read_text()


def test_a_closed_session_has_ended_its_shell_and_goes_on_with_processes(place: Place) -> None:
    place.session(*CHANGE)
    place.session.close()
    assert not place.runs()
    place.session(*CHANGE)
    assert len(place.done("process")) == 1


def test_commands_of_many_threads_have_each_their_own_answer(place: Place) -> None:
    def ask(number: int) -> bool:
        return f" a{number} " in place.session("lvm", "lvchange", f"a{number}", "--", "g").stdout

    with ThreadPoolExecutor(8) as callers:
        assert all(callers.map(ask, range(100)))
    assert len(place.done("shell")) == 1


def test_no_command_gets_the_shell_s_descriptors_or_its_environment(place: Place) -> None:
    place.session(*CHANGE)
    seen = Programs()("sh", "-c", "env; ls -l /proc/self/fd").stdout
    assert "LVM_" in seen  # what every program has
    for mark in ("LVM_REPORT_FD", "LVM_SYSTEM_DIR", "ptmx", "pts/"):
        assert mark not in seen


# Doubt


@pytest.mark.parametrize(
    "deed", ["die_before", "die_after", "cut", "garble", "other", "silent", "starve"]
)
def test_a_change_of_which_nobody_knows_is_not_said_twice(place: Place, deed: str) -> None:
    place.session(*REPORT)
    place.plan(deed)
    with pytest.raises(errors.SessionLost, match="not known whether lvm lvremove was done"):
        place.session(*CHANGE)
    changes = [line for line in place.done("did") if line.startswith("lvremove")]
    assert len(changes) == (0 if deed in ("die_before", "starve") else 1)
    assert place.done("process") == []
    # The caller looks, and goes on, with a new shell.
    assert place.session(*REPORT).exit_code == 0
    assert place.session(*CHANGE).exit_code == 0
    assert len(place.done("shell")) == 2


@pytest.mark.parametrize("deed", ["die_before", "cut", "garble", "other", "silent", "starve"])
def test_a_look_that_is_in_doubt_is_taken_by_a_process(place: Place, deed: str) -> None:
    place.plan(deed)
    assert place.session(*REPORT) == Result(0, '{"report": []}\n', "")
    assert place.done("process") == ["fullreport --reportformat json"]


def test_a_shell_that_died_between_two_commands_leaves_no_doubt(place: Place) -> None:
    place.session(*CHANGE)
    os.kill(int(place.done("shell")[0]), signal.SIGKILL)
    expect.soon(lambda: not place.runs())
    assert place.session(*CHANGE).exit_code == 0
    assert len(place.done("shell")) == 2


def test_a_shell_that_says_what_nobody_asked_is_not_spoken_to_again(place: Place) -> None:
    place.plan("chatter")
    place.session(*CHANGE)
    expect.soon(lambda: "chattered" in (place.directory / "done").read_text())
    assert place.session(*CHANGE).stdout == "  Said: lvremove --yes -- group/volume\n"
    assert len(place.done("shell")) == 2


def test_after_a_doubt_there_are_processes_for_a_while(place: Place) -> None:
    place.new_session(rest_seconds=AMPLE_SECONDS)
    place.plan("garble")
    with pytest.raises(errors.SessionLost):
        place.session(*CHANGE)
    place.session(*CHANGE)
    assert len(place.done("shell")) == 1
    assert len(place.done("process")) == 1


def test_an_lvm2_without_a_shell_is_used_by_processes(place: Place) -> None:
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


def test_an_lvm2_that_is_not_installed_is_named(tmp_path: Path) -> None:
    def missing(*words: str, **_: object) -> command.Conversation:
        raise mount_errors.ProgramMissing(words[0])

    def run(*words: str) -> Result:
        raise mount_errors.ProgramMissing(words[0])

    with pytest.raises(mount_errors.ProgramMissing, match="lvm is not installed"):
        Session(run, missing, tmp_path / "own", root=tmp_path)(*CHANGE)


# Time


@pytest.mark.parametrize("deed", ["hang", "wait_for_lock"])
def test_a_shell_that_does_not_answer_in_time_is_ended(place: Place, deed: str) -> None:
    place.session(*REPORT)
    place.plan(deed)
    with time_limit(HANG_SECONDS), pytest.raises(mount_errors.CommandTimedOut):
        place.session(*CHANGE)
    assert not place.runs()
    assert place.session(*CHANGE).exit_code == 0


def test_what_does_not_end_holds_neither_its_caller_nor_looks_but_changes(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_GRACE_SECONDS", 0.2)
    place.session(*REPORT)
    place.plan("hold_lock")
    with time_limit(HANG_SECONDS), pytest.raises(mount_errors.CommandTimedOut):
        place.session(*CHANGE)
    with pytest.raises(errors.StillRunning, match="lvremove got SIGTERM"):
        place.session("lvm", "lvcreate", "group")
    # Nor what is not said to a shell at all.
    for words in (("pvmove", "/dev/a"), ("lvchange", "--addtag", "both ' and \"", "--", "g")):
        with pytest.raises(errors.StillRunning, match="lvremove got SIGTERM"):
            place.session("lvm", *words)
    assert place.session(*REPORT).exit_code == 0
    assert len(place.done("process")) == 1  # and of no change
    place.let_go()
    expect.soon(lambda: not place.runs())
    assert place.session(*CHANGE).exit_code == 0
    assert place.done("did").count("lvremove --yes -- group/volume") == 2


def test_a_shell_that_was_given_up_gets_rid_of_what_it_reports(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_GRACE_SECONDS", 0.2)
    place.session(*REPORT)
    place.plan("hold_lock")
    with time_limit(HANG_SECONDS), pytest.raises(mount_errors.CommandTimedOut):
        place.session(*REPORT)
    place.let_go()
    expect.soon(lambda: place.session(*REPORT) and not place.runs())


def test_a_stopped_shell_does_nothing_when_it_is_let_go_on(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_GRACE_SECONDS", 0.2)
    place.session(*REPORT)
    place.plan("stop")
    with time_limit(HANG_SECONDS), pytest.raises(mount_errors.CommandTimedOut):
        place.session(*CHANGE)
    with pytest.raises(errors.StillRunning):
        place.session(*CHANGE)
    os.kill(int(place.done("shell")[0]), signal.SIGCONT)
    expect.soon(lambda: not place.runs())
    assert not [line for line in place.done("did") if line.startswith("lvremove")]
    assert place.session(*CHANGE).exit_code == 0


def test_who_has_no_time_left_is_not_served(place: Place) -> None:
    with time_limit(0.0), pytest.raises(mount_errors.CommandTimedOut):
        place.session(*CHANGE)
    assert place.done("shell") == []


def test_a_caller_waits_for_another_s_command_as_long_as_it_has_time(place: Place) -> None:
    place.session(*REPORT)
    place.plan("hold_lock")
    with ThreadPoolExecutor(1) as other:
        first = other.submit(place.session, *CHANGE)
        expect.soon(lambda: "hangs" in (place.directory / "done").read_text())
        with time_limit(0.2), pytest.raises(mount_errors.CommandTimedOut):
            place.session(*REPORT)
        place.let_go()
        assert first.exception(AMPLE_SECONDS) is None
    assert place.session(*REPORT).exit_code == 0


def test_whoever_has_the_shell_renewed_or_closed_waits_for_no_other_s_command(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_GRACE_SECONDS", 0.2)
    place.session(*REPORT)
    place.plan("hold_lock")
    with ThreadPoolExecutor(1) as other:
        first = other.submit(place.session, *CHANGE)
        expect.soon(lambda: "hangs" in (place.directory / "done").read_text())
        with time_limit(0.2), pytest.raises(mount_errors.CommandTimedOut):
            place.session.renew()
        monkeypatch.setattr(session, "_LONGEST_TURN_SECONDS", 0.2)
        with pytest.raises(mount_errors.CommandTimedOut):
            place.session.renew()
        place.session.close()
        assert not first.done()
        place.let_go()
        assert first.exception(AMPLE_SECONDS) is None
    # What was closed while it was at work is ended by the next.
    place.session(*CHANGE)
    assert place.done("process") == ["lvremove --yes -- group/volume"]
    assert not place.runs()
