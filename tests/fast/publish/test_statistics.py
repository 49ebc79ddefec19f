"""What NodeGetVolumeStats costs: kubelet asks for it once a minute for each volume."""

import threading
from pathlib import Path

import pytest
from fakes.host import FakeHost

from agent.csi.client import Client, mounted

MIB = 1 << 20


def test_a_call_reads_the_mount_table_once_and_starts_neither_process_nor_thread(
    client: Client, fake: FakeHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = client.create("pvc-1", 32 * MIB, mounted("ext4"))
    client.stage(volume, tmp_path / "staging", mounted("ext4"))
    read: list[str] = []
    mountinfo = fake.kernel.mountinfo
    started: list[str] = []
    start = threading.Thread.start

    def table() -> str:
        read.append("table")
        return mountinfo()

    def told(self: threading.Thread) -> None:
        # The server's own wait for calls.
        if not self.name.startswith("rpc"):
            started.append(self.name)
        start(self)

    monkeypatch.setattr(fake.kernel, "mountinfo", table)
    monkeypatch.setattr(threading.Thread, "start", told)
    fake.commands.clear()
    client.stats(volume.volume_id, tmp_path / "staging")
    assert (read, started, fake.commands) == (["table"], [], [])
