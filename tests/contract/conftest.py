"""The same tests on a machine in memory and, with --real, on this one."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import configured
import expect
import pytest
import serving
from clocks import Clock
from csi_client import Client
from real.any import AnyHost

from agent.csi.client import mounted
from agent.daemon.server import Service
from agent.settings.settings import Config
from mount import luks
from mount.command import Result
from proto import csi_pb2 as csi

if TYPE_CHECKING:
    from nodes import Node


@pytest.fixture(autouse=True)
def little_memory_for_keys(monkeypatch: pytest.MonkeyPatch, real: bool) -> None:
    """A key opens its slot at once, by Argon2id with as little memory as cryptsetup allows.

    What it takes by default, emulated seconds each time, the installed service takes (tests/vm).
    """
    if real:
        words = ("--pbkdf-memory", "32", "--pbkdf-parallel", "1", "--pbkdf-force-iterations", "4")
        monkeypatch.setattr(luks, "_PBKDF", ("--pbkdf", "argon2id", *words))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that snapshots are dated by; deadlines have others (time.time, time.monotonic)."""
    made = Clock()
    monkeypatch.setattr(time, "time_ns", made)
    return made


@pytest.fixture
def groups(host: AnyHost, request: pytest.FixtureRequest) -> Mapping[str, str]:
    """What this machine calls the groups of the mark `groups`; without it `data`, of two disks."""
    asked = configured.groups(request, 100, 60)
    return {name: host.new_group(*extents) for name, extents in asked.items()}


@pytest.fixture
def group(groups: Mapping[str, str]) -> str:
    """The group `data`."""
    return groups["data"]


@pytest.fixture
def other(groups: Mapping[str, str]) -> str:
    """The group `other`."""
    return groups["other"]


@pytest.fixture
def config(group: str, tmp_path: Path, request: pytest.FixtureRequest) -> Config:
    """The settings of the mark `settings`; without it one class on `data`. The node is `here`.

    A class that names another group than `data` is on that of the fixture of this name.
    """
    made = configured.settings(request, tmp_path)
    names = {one.group for one in made.classes} - {"data"}
    called = {"data": group} | {name: request.getfixturevalue(name) for name in names}
    placed = [replace(one, group=called[one.group]) for one in made.classes]
    return replace(made, classes=tuple(placed))


@pytest.fixture
def service(host: AnyHost, config: Config) -> Iterator[Service]:
    """Carver, serving on a socket of the test's own."""
    with serving.served(host, config) as (running, _):
        yield running


@pytest.fixture
def client(service: Service, config: Config) -> Iterator[Client]:
    """Kubelet's and the provisioner's side of the socket."""
    with Client(config.endpoint) as caller:
        yield caller


@pytest.fixture
def volume(client: Client) -> csi.Volume:
    """A volume of 64 MiB, to be mounted with ext4."""
    return client.create("pvc-1", 64 << 20, mounted("ext4"))


@pytest.fixture
def staging(host: AnyHost) -> Path:
    """Where kubelet has a volume staged."""
    return host.directory / "staging"


@pytest.fixture
def staged(client: Client, volume: csi.Volume, staging: Path) -> csi.Volume:
    """The volume, staged."""
    client.stage(volume, staging)
    return volume


@pytest.fixture
def target(host: AnyHost) -> Path:
    """Where kubelet has a volume published."""
    return host.directory / "target"


@pytest.fixture
def here(host: AnyHost, config: Config, tmp_path: Path) -> "Iterator[Node]":
    """A service with a group of its own, as a node has."""
    # Only here: nodes are for extras, and the core's tests run without these.
    import nodes

    with nodes.made(host, config, tmp_path, "here") as node:
        yield node


@pytest.fixture
def there(host: AnyHost, config: Config, tmp_path: Path) -> "Iterator[Node]":
    """Another node."""
    import nodes

    with nodes.made(host, config, tmp_path, "there") as node:
        yield node


@pytest.fixture
def mkfs_fails(host: AnyHost) -> threading.Event:
    """The first mkfs of ext4 fails, but not before it is let go on."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(words: Sequence[str]) -> Result | None:
        if words[0] != "mkfs.ext4" or begun.is_set():
            return None
        begun.set()
        assert go_on.wait(expect.PATIENCE_SECONDS)
        return Result(1, "", "no luck")

    host.intercept = slow
    return go_on
