"""`carver orphans`, as it is typed, beside a service and a cluster."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import api_server
import configured
import pytest
from api_server import NODES, VOLUMES, ApiServer, kubeconfig, status
from fakes.host import FakeHost

from agent.cli import main as cli
from agent.core import settings
from agent.core.host import Host
from agent.csi.client import Client, mounted
from agent.daemon.server import Service

MIB = 1 << 20
Shell = Callable[..., str]


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with api_server.running(ApiServer()) as made:
        made.add(NODES, "here")
        yield made


@pytest.fixture
def volume(tmp_path: Path, api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A volume that nothing names; the service that made it runs."""
    host = FakeHost(tmp_path)
    host.lvm2.add_group("data", [100])
    config = configured.carver(
        tmp_path, kubeconfig=kubeconfig(tmp_path / "kubeconfig", api.url), orphan_grace_seconds=600
    )
    machine = Host(host.run, host.kernel, host.devices, host.disks)
    monkeypatch.setattr("agent.core.host.this_host", lambda _settings: machine)
    monkeypatch.setattr(settings, "load", lambda *_: config)
    service = Service(config, machine, host.lvm)
    service.start(config.endpoint)
    with Client(config.endpoint) as client:
        yield client.create("pvc-1", 4 * MIB, mounted()).volume_id
    service.stop()


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    def type_in(*words: str, exit_code: int = 0) -> str:
        ended = cli.main(["orphans", *words])
        seen = capsys.readouterr()
        assert ended == exit_code, seen.err
        return seen.err if exit_code else seen.out

    return type_in


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets so many seconds go by."""

    def go_on(seconds: float) -> None:
        real = time.clock_gettime
        monkeypatch.setattr(time, "clock_gettime", lambda clock: real(clock) + seconds)

    return go_on


def test_orphans_are_shown_and_one_is_deleted_by_name(
    shell: Shell, volume: str, later: Callable[[float], None]
) -> None:
    shown = shell()
    assert "wait" in shown
    assert "--delete" not in shown
    assert "10 min" in shown
    assert "cannot delete" in shell("--delete", volume, "--yes", exit_code=1)
    later(7500)
    shown = shell()
    assert "2 h 5 min" in shown
    assert f"carver orphans --delete {volume} --yes" in shown
    assert "--yes" in shell("--delete", volume, exit_code=1)
    [found] = json.loads(shell("--json"))
    assert found["kind"] == "volume"
    assert found["sure"]
    assert found["seen_seconds"] >= 7500
    assert shell("--delete", volume, "--yes") == f"{volume} is deleted\n"
    assert shell() == "There are no orphans.\n"


def test_a_cluster_that_refuses_is_a_failure(shell: Shell, volume: str, api: ApiServer) -> None:
    api.lie(VOLUMES, status(403))
    assert "nothing counts as an orphan" in shell(exit_code=1)
    api.objects[NODES].clear()
    assert "this node, here, is not among them" in shell("--json", exit_code=1)


def test_a_grace_period_below_a_minute_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["orphans", "--orphan-grace-seconds", "59"]) == 1
    assert "60 seconds or more" in capsys.readouterr().err
    assert cli.main(["orphans", "--kubeconfig", "relative"]) == 1
    assert "an absolute path" in capsys.readouterr().err
