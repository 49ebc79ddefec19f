"""What the installed service costs while its volumes are in use and there are no calls."""

import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from resident import Resident

from agent.csi.client import Client, block, mounted

MIB = 1 << 20
IDLE_SECONDS = 600
# As often as Prometheus asks by default.
SCRAPED_EACH_SECONDS = 60
# What goes on behind the last answer is over by then.
CALM_SECONDS = 15
MOST_RESIDENT_BYTES = 96 * MIB


def commands() -> float:
    """How many commands ended since the service started: programs, and those of its shells."""
    page = urllib.request.urlopen("http://127.0.0.1:9898/metrics", timeout=60).read().decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "carver_commands_total"
    )


def settled() -> float:
    """How many there are when no more come."""
    before = -1.0
    while before != (now := commands()):
        before = now
        time.sleep(CALM_SECONDS)
    return now


@pytest.mark.variation
@pytest.mark.timeout(IDLE_SECONDS + 600)
def test_ten_idle_minutes_cost_one_command_at_most_and_little_memory(
    client: Client, directory: Path, main_pid: Callable[[], int]
) -> None:
    staging, target, raw_staging, node = (
        directory / one for one in ("staging", "target", "raw-staging", "node")
    )
    volume = client.create("test-idle", 64 * MIB, mounted("ext4"))
    client.stage(volume, staging)
    client.publish(volume, staging, target)
    raw = client.create("test-idle-raw", 16 * MIB, block())
    client.stage(raw, raw_staging, block())
    client.publish(raw, raw_staging, node, block())
    service = psutil.Process(main_pid())

    before = settled()
    assert before, "nothing is counted at all"
    for _ in range(IDLE_SECONDS // SCRAPED_EACH_SECONDS):
        time.sleep(SCRAPED_EACH_SECONDS)
        after = commands()
    assert after - before <= 1
    assert service.pid == main_pid()
    found = Resident.of(service)
    assert found.all_bytes <= MOST_RESIDENT_BYTES, found

    client.unpublish(raw.volume_id, node)
    client.unstage(raw.volume_id, raw_staging)
    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
