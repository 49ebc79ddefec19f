"""A service on a machine in memory, and its caller, for the tests that want no other."""

import os
from collections.abc import Iterator
from pathlib import Path

import configured
import pytest
import serving
from csi_client import Client
from fakes.disk import Disk
from fakes.host import FakeHost
from hypothesis import HealthCheck, settings

from agent.daemon.server import Service
from agent.settings.settings import Config


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis makes the same cases everywhere, each time."""
    settings.register_profile(
        "the-same",
        derandomize=True,
        # A machine that is busy with other work is slow at anything, and no test is about that.
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        max_examples=100 if config.getoption("--every") else 50,
    )
    settings.load_profile("the-same")


@pytest.fixture(autouse=True)
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are for root, these tests for anyone."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)


@pytest.fixture
def fake(tmp_path: Path, request: pytest.FixtureRequest) -> FakeHost:
    """A machine with the groups of the mark `groups`; without it `data`, of 200 extents."""
    host = FakeHost(tmp_path)
    for name, extents in configured.groups(request, 200).items():
        host.lvm2.add_group(name, extents)
    return host


@pytest.fixture
def config(tmp_path: Path, request: pytest.FixtureRequest) -> Config:
    """The settings of the mark `settings`; without it one class on `data`.

    Volumes may be mounted anywhere.
    """
    return configured.settings(request, tmp_path, kubelet_dir=("/",))


@pytest.fixture
def service(config: Config, fake: FakeHost) -> Iterator[Service]:
    """Carver, serving on a socket of the test's own."""
    running = serving.start(config, fake)
    yield running
    running.stop()


@pytest.fixture
def waiting_eraser(service: Service) -> None:
    """A deletion returns when its volume is erased, as far as it can be."""
    service.eraser.grace_seconds = 20


@pytest.fixture
def client(config: Config, service: Service) -> Iterator[Client]:
    """Kubelet's and the provisioner's side of the socket."""
    with Client(config.endpoint) as caller:
        yield caller


@pytest.fixture
def disk(fake: FakeHost, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Where a wipe comes no further than the test lets it."""
    return Disk(fake, monkeypatch)
