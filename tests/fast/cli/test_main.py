"""The command line, for people and for shells."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes.host import FakeHost
from serving import machine

from agent.cli import main as cli
from agent.cli import status, terminal
from agent.settings import settings

MIB = 1 << 20


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    host = FakeHost(tmp_path)
    host.new_group(100)
    monkeypatch.setattr("agent.daemon.host.this_host", lambda _settings: machine(host))
    return host


@pytest.fixture
def file(tmp_path: Path) -> str:
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
def test_an_interval_out_of_range_is_refused(seconds: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["status", "--watch", seconds])


@pytest.mark.parametrize("words", ["status", "status --json", "doctor", "doctor --json", "orphans"])
def test_commands_that_need_root_refuse_other_users_before_any_command(
    words: str,
    fake: FakeHost,
    file: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To a user who may not read a disk, its group would seem absent."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cli.main([*words.split(), "--config", file]) == 1
    complaint = "carver: only root may look at disks, LVM and mounts: run it as root (sudo)\n"
    assert capsys.readouterr() == ("", complaint)
    assert fake.commands == []


@pytest.mark.parametrize("words", ["volume list", "volume create db --size 1GiB", "snapshot list"])
@pytest.mark.parametrize("refused", ["directory", "socket"])
def test_a_socket_without_permission_is_named_in_one_line(
    words: str,
    refused: str,
    fake: FakeHost,
    file: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As root nothing is refused: the kernel's answers are put in its place."""
    endpoint = tmp_path / "csi.sock"

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with socket.socket(socket.AF_UNIX) as served:
        served.bind(str(endpoint))
        served.listen()
        if refused == "directory":
            monkeypatch.setattr(Path, "is_socket", refuse)
        else:
            monkeypatch.setattr(socket.socket, "connect", refuse)
        assert cli.main([*words.split(), "--config", file, "--endpoint", str(endpoint)]) == 1
    assert capsys.readouterr().err == (
        f"carver: only root may use {endpoint}: run it as root (sudo), or as a user who may"
        " write to that socket\n"
    )


# A process that prints as many lines as given, and whose checks pass or fail.
PRINTING = """
import sys
from agent.cli import main
from agent.operations.preflight import Finding
lines, verdict, *words = sys.argv[1:]
main.os.geteuid = lambda: 0
main._node_findings = lambda _config: [Finding("lvm2", verdict, "as it is")] * int(lines)
sys.exit(main.main(words))
"""


def run_without_reader(
    script: str, *words: str, also_stderr: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a script whose standard output is a pipe that was closed at its other end."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        return subprocess.run(
            [sys.executable, "-c", script, *words],
            stdout=pipe,
            stderr=pipe if also_stderr else subprocess.PIPE,
            text=True,
            check=False,
        )


@pytest.mark.starts_programs
@pytest.mark.parametrize(
    ("lines", "form", "verdict", "code", "closed"),
    [
        (1, [], "pass", 0, "stdout"),
        (1, ["--json"], "fail", 1, "stdout"),
        (3000, [], "pass", 0, "both"),
        (3000, ["--json"], "pass", 0, "stdout"),
        (3000, ["--json"], "fail", 1, "stdout"),
    ],
)
def test_a_reader_that_ends_early_does_not_fail_a_check(
    file: str, lines: int, form: list[str], verdict: str, code: int, closed: str
) -> None:
    """As in `carver doctor | true`; 3000 checks are more than a pipe holds."""
    words = [str(lines), verdict, "doctor", "--config", file, *form]
    ended = run_without_reader(PRINTING, *words, also_stderr=closed == "both")
    assert (ended.returncode, ended.stderr or "") == (code, "")


# What `carver snapshot send` does, without a snapshot.
SENDING = """
import sys
from agent.cli import main
from agent.extras.transfer import streams_command
def send(_parsed):
    with streams_command._explained("sending monday"):
        sys.stdout.buffer.write(b"x" * int(sys.argv[1]))
        sys.stdout.buffer.flush()
main._completion = send
sys.exit(main.main(["completion", "bash"]))
"""


@pytest.mark.starts_programs
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_stream_whose_reader_ends_fails_with_a_reason(size: int) -> None:
    ended = run_without_reader(SENDING, str(size))
    assert ended.returncode == 1
    [line] = ended.stderr.splitlines()
    assert "its reader has ended" in line


@pytest.mark.starts_programs
def test_a_reader_of_one_line_gets_that_line(file: str) -> None:
    line = '"$@" | head -1; echo "${PIPESTATUS[0]}"'
    words = [sys.executable, "-c", PRINTING, "3000", "pass", "doctor", "--json", "--config", file]
    ended = subprocess.run(
        ["bash", "-c", line, "bash", *words], capture_output=True, text=True, check=True
    )
    assert (ended.stdout, ended.stderr) == ("{\n0\n", "")


@pytest.mark.parametrize(
    ("error", "user", "complaint"),
    [
        (NotADirectoryError(20, "Not a directory", "/a"), 0, "[Errno 20] Not a directory: '/a'"),
        (PermissionError(13, "Not permitted", "/a"), 0, "[Errno 13] Not permitted: '/a'"),
        (
            PermissionError(13, "Not permitted", "/a"),
            1000,
            "[Errno 13] Not permitted: '/a'; run it as root (sudo)",
        ),
    ],
)
def test_an_error_of_the_kernel_is_one_line_with_its_file(
    error: OSError,
    user: int,
    complaint: str,
    file: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(settings, "load", refuse)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert cli.main(["volume", "list", "--config", file]) == 1
    assert capsys.readouterr().err == f"carver: {complaint}\n"


def test_an_interrupted_command_ends_as_shells_expect(
    fake: FakeHost, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(status, "read", interrupt)
    assert cli.main(["status", "--config", file]) == 130


def test_the_service_does_not_import_the_command_s_libraries() -> None:
    code = (
        "import sys; import agent.cli.main, agent.daemon.service_process;"
        " import agent.daemon.node_metrics; print({'rich', 'shtab', 'yaml'} & set(sys.modules))"
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
def test_a_bar_is_as_long_as_its_share(part: int, whole: int, text: str) -> None:
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


@pytest.mark.parametrize("words", [["status", "--endpoint", "/nonexistent"], ["no-such-command"]])
def test_a_log_on_a_full_disk_changes_no_exit_code(words: list[str]) -> None:
    """Python itself exits with 120 where what is left in a buffer cannot be written."""
    usual = subprocess.run(
        [sys.executable, "-m", "agent", *words], capture_output=True, check=False
    )
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([sys.executable, "-m", "agent", *words], stderr=full, check=False)
    assert usual.returncode == ended.returncode != 0
