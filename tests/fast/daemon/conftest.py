"""A service that is started as a process is, and ended with the test."""

from collections.abc import Callable, Iterator

import pytest
from fakes.host import FakeHost
from started import Started

from agent.operations import preflight
from agent.settings.settings import Config

Start = Callable[..., Started]


@pytest.fixture
def start(
    config: Config, fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Started]]:
    """Start, with the test's configuration or another; wait until the groups are recovered."""
    started: list[Started] = []

    def one(settings: Config = config, *, recovers: bool = True) -> Started:
        started.append(Started(settings, fake, monkeypatch))
        assert not recovers or started[-1].begun.wait(20)
        return started[-1]

    yield one
    for running in started:
        running.end()


@pytest.fixture
def well(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose checks pass, but for those that ask lvm2."""
    monkeypatch.setattr(preflight, "QUICK_CHECKS", ())
    monkeypatch.setattr(preflight, "CHECKS", {})
