"""A reload while CreateVolume waits for its source: what a reload sets everywhere is set, too."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import configured
import expect
import pytest
from csi_client import Client

from agent.csi.client import block, of_volume
from agent.daemon.server import Service
from agent.operations import modify
from agent.volumes import users
from lvm.layout import Reserve

MIB = 1 << 20
BEFORE, AFTER = Reserve(size_bytes=64 * MIB), Reserve(size_bytes=8 * MIB)


@pytest.mark.groups(data=[100, 100, 100])
@pytest.mark.settings(classes=(configured.PLAIN, configured.RAID), background_bandwidth=BEFORE)
def test_the_bound_of_raid_recovery_is_that_of_the_reload(
    service: Service, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    raid = {"class": "raid"}
    source = client.create("source", 32 * MIB, block(), parameters=raid).volume_id
    waits, goes_on = threading.Event(), threading.Event()
    flush = users.flush

    def slow(*words: object) -> None:
        waits.set()
        goes_on.wait(expect.PATIENCE_SECONDS)
        flush(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(users, "flush", slow)
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(
            lambda: client.create(
                "copy", 32 * MIB, block(), parameters=raid, source=of_volume(source)
            )
        )
        assert waits.wait(expect.PATIENCE_SECONDS)
        reloaded = replace(service.configuration.now, background_bandwidth=AFTER)
        service.configuration.reload(lambda: reloaded)
        modify.resume(service.context, "data")
        goes_on.set()
        made.result(expect.PATIENCE_SECONDS)
    group = service.reports.fresh("data").group("data")
    bounds = {
        name: group.volume(name).tuning.bound_recovery_kib for name in ("vol-source", "vol-copy")
    }
    assert bounds == dict.fromkeys(bounds, 8 * 1024)
