"""The command line, for people and for shells."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes.host import FakeHost

from agent.cli import main as cli
from agent.cli import status, terminal
from agent.engine.host import Host

MIB = 1 << 20


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    """The machine that the command looks at."""
    host = FakeHost(tmp_path)
    host.new_group(100)
    machine = Host(host.run, host.kernel, host.devices, host.disks)
    monkeypatch.setattr("agent.engine.host.this_host", lambda _settings: machine)
    return host


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A configuration for that machine."""
    path = tmp_path / "config.toml"
    path.write_text('node_id = "here"\n[[classes]]\nname = "plain"\ngroup = "group0"\n')
    return str(path)


def test_status_is_shown_as_text_and_as_json(
    fake: FakeHost, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["status", "--config", file]) == 0
    text = capsys.readouterr().out
    assert "on node here, not serving" in text
    assert max(map(len, text.splitlines())) <= 100
    assert cli.main(["status", "--config", file, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["groups"][0]["free_bytes"] == 400 * MIB


def test_status_is_watched_until_it_is_interrupted(
    fake: FakeHost, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    assert cli.main(["status", "--config", file, "--watch", "2"]) == 0
    assert looks == [2.0] * 3
    assert sum(words[:2] == ("lvm", "fullreport") for words in fake.commands) == 3


@pytest.mark.parametrize("seconds", ["0", "never", "3601"])
def test_a_watch_that_nobody_can_follow_is_refused(seconds: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["status", "--watch", seconds])


@pytest.mark.parametrize(("user", "hint"), [(0, False), (1000, True)])
def test_a_failure_is_told_in_a_sentence_and_others_than_root_are_told_why(
    user: int,
    hint: bool,
    fake: FakeHost,
    file: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "/run/lock/lvm")

    monkeypatch.setattr(status, "read", refuse)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert cli.main(["status", "--config", file]) == 1
    told = capsys.readouterr().err
    assert "carver: [Errno 13] Permission denied: '/run/lock/lvm'" in told
    assert ("run it as root" in told) is hint


def test_what_the_kernel_refuses_is_told_with_its_file(
    fake: FakeHost, file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise NotADirectoryError(20, "Not a directory", "/run/carver")

    monkeypatch.setattr(status, "read", refuse)
    assert cli.main(["status", "--config", file]) == 1
    assert capsys.readouterr().err == "carver: [Errno 20] Not a directory: '/run/carver'\n"


def test_an_interrupted_command_ends_as_shells_expect(
    fake: FakeHost, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(status, "read", interrupt)
    assert cli.main(["status", "--config", file]) == 130


def test_the_service_loads_nothing_that_is_for_people() -> None:
    code = (
        "import sys; import agent.cli.main, agent.service.process, agent.service.metrics;"
        " print({'rich', 'shtab', 'yaml'} & set(sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "set()"


@pytest.mark.starts_programs
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_s_completion_is_a_script_of_that_shell(
    shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "status" in script
    assert "--watch" in script
    if program := shutil.which(shell):
        path = tmp_path / "carver"
        path.write_text(script)
        subprocess.run([program, "-n", str(path)], check=True)


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (0, 0, "░░░░░░░░░░░░   0 %"),
        (1, 2, "██████░░░░░░  50 %"),
        (1, 3, "████░░░░░░░░  33 %"),
        (1, 32, "▍░░░░░░░░░░░   3 %"),
        (3, 2, "████████████ 150 %"),
    ],
)
def test_a_bar_is_as_long_as_what_it_measures(part: int, whole: int, text: str) -> None:
    assert terminal.bar(part, whole).plain == text


@pytest.mark.parametrize(("part", "style"), [(79, "green"), (80, "yellow"), (95, "red")])
def test_a_bar_warns_before_it_is_full(part: int, style: str) -> None:
    assert str(terminal.bar(part, 100).spans[0].style) == style


@pytest.mark.starts_programs
@pytest.mark.parametrize(
    ("typed", "offered"),
    [(["sta"], "status"), (["volume", "cr"], "create"), (["volume", "show", "d"], "db")],
)
def test_bash_completes_commands_and_the_names_of_volumes(
    typed: list[str], offered: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["completion", "bash"]) == 0
    before = typed[-2] if len(typed) > 1 else "carver"
    words = " ".join(["carver", *typed])
    script = f"""
        {capsys.readouterr().out}
        carver() {{ printf '%s\\n' db logs; }}
        COMP_WORDS=({words}); COMP_CWORD={len(typed)}
        COMP_LINE='{words}'; COMP_POINT=${{#COMP_LINE}}
        _shtab_carver carver {typed[-1]} {before}
        echo "${{COMPREPLY[@]}}"
    """
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == offered
