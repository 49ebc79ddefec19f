"""The cost of calls that kubelet makes often for each volume."""

import threading
from pathlib import Path

import pytest
from fakes.host import FakeHost

from agent.csi.client import Client, mounted

MIB = 1 << 20


@pytest.fixture
def read(fake: FakeHost, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A word for each time that the mount table is read."""
    found: list[str] = []
    mountinfo = fake.kernel.mountinfo

    def table() -> str:
        found.append("table")
        return mountinfo()

    monkeypatch.setattr(fake.kernel, "mountinfo", table)
    return found


def test_statistics_read_the_mount_table_once_and_start_no_process_or_thread(
    client: Client, fake: FakeHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: list[str]
) -> None:
    volume = client.create("pvc-1", 32 * MIB, mounted("ext4"))
    client.stage(volume, tmp_path / "staging", mounted("ext4"))
    started: list[str] = []
    start = threading.Thread.start

    def record(self: threading.Thread) -> None:
        # The server's own wait for calls.
        if not self.name.startswith("rpc"):
            started.append(self.name)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", record)
    fake.commands.clear()
    read.clear()
    client.stats(volume.volume_id, tmp_path / "staging")
    assert (read, started, fake.commands) == (["table"], [], [])


def test_repeated_stage_and_publish_read_the_mount_table_once_each(
    client: Client, tmp_path: Path, read: list[str]
) -> None:
    staging, target = tmp_path / "staging", tmp_path / "target"
    volume = client.create("pvc-1", 32 * MIB, mounted("ext4"))
    client.stage(volume, staging, mounted("ext4"))
    read.clear()
    client.publish(volume, staging, target, mounted("ext4"))
    assert len(read) == 2, "before and after"
    read.clear()
    client.stage(volume, staging, mounted("ext4"))
    client.publish(volume, staging, target, mounted("ext4"))
    assert len(read) == 2, "once each"
