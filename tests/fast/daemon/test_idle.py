"""What an idle service costs, however many watch it."""

import time
from collections.abc import Callable
from pathlib import Path

import configured
import pytest
import serving
from fakes.host import FakeHost

from agent.core.classes import DeviceClass
from agent.core.settings import Config
from agent.csi.client import Client, block
from agent.daemon.metrics import Metrics
from agent.daemon.registration import Registration
from agent.daemon.startup import Recovery
from agent.operations import preflight

SCRAPED_EACH, ASKED_EACH = 15, 10


@pytest.fixture
def config(tmp_path: Path) -> Config:
    classes = (DeviceClass("plain", "data", default=True), DeviceClass("away", "gone"))
    return configured.carver(tmp_path, kubelet_dir=("/",), classes=classes)


def test_ten_idle_minutes_cost_one_command_at_most(
    config: Config, fake: FakeHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(preflight, "CHEAP", ())
    service = serving.start(config, fake)
    with Client(config.endpoint) as client:
        client.create("1", 4 << 20, block())
    metrics = Metrics()
    metrics.watch(service, Registration(tmp_path / "registry", config.endpoint))
    taken_up: Callable[[str], bool] = lambda name: True  # noqa: E731
    resumption = Recovery(service.volume_groups, taken_up)
    metrics.text()
    fake.commands.clear()
    began, real = time.time(), time.monotonic()
    passed = [0.0]
    monkeypatch.setattr(time, "time", lambda: began + passed[0])
    monkeypatch.setattr(time, "monotonic", lambda: real + passed[0])
    for second in range(0, 600, 5):
        passed[0] = float(second)
        if second % SCRAPED_EACH == 0:
            assert b'carver_group_present{group="data"} 1.0' in metrics.text()
        if second % ASKED_EACH == 0:
            service.readiness.check()
        resumption.step()
        service.inventory.refresh(60.0)
    assert len(fake.commands) <= 1
    monkeypatch.undo()
    service.stop()
