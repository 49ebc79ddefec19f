"""The command as a person types it, on the test's machine and its running service."""

import shlex
from pathlib import Path

import pytest
from fakes.host import FakeHost
from serving import machine

from agent.cli import main as cli
from agent.cli import terminal
from agent.daemon.server import Service
from agent.settings import settings
from agent.settings.settings import Config


class Shell:
    """A prompt, with keys in files."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._directory = directory
        self._capsys = capsys
        self.complaint = ""

    def __call__(self, line: str, exit_code: int = 0, noun: str = "volume") -> str:
        """Type a line without `carver volume`; return its output, or the complaint if it fails."""
        ended = cli.main([noun, *shlex.split(line)])
        output, self.complaint = self._capsys.readouterr()
        assert ended == exit_code, self.complaint
        return self.complaint if exit_code else output

    def key(self, name: str, key: bytes) -> Path:
        file = self._directory / name
        file.write_bytes(key)
        file.chmod(0o400)
        return file


@pytest.fixture
def prompt(
    fake: FakeHost,
    config: Config,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Shell:
    monkeypatch.setattr("agent.daemon.host.this_host", lambda _settings: machine(fake))
    monkeypatch.setattr(settings, "load", lambda _arguments, _environment: config)
    return Shell(tmp_path, capsys)


@pytest.fixture
def shell(prompt: Shell, service: Service) -> Shell:
    return prompt


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The questions that were asked; the answer is no."""
    asked: list[str] = []

    def no(question: str) -> bool:
        asked.append(question)
        return False

    monkeypatch.setattr(terminal, "confirmed", no)
    return asked
