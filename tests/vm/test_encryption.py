"""Keys of encrypted volumes in the installed service: nowhere but where they belong."""

import secrets
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from traces import Sampler, places

from agent.csi.client import Client, mounted

MIB = 1 << 20
_PATIENCE_SECONDS = 300
ENCRYPTED = {"carver/encryption": "luks2"}


@pytest.fixture
def key() -> str:
    """A key that is nowhere else."""
    return f"key-{secrets.token_hex(16)}"


def life(caller: Client, directory: Path, key: str) -> None:
    """A volume's whole life by a key: made, staged, grown, closed, opened with a wrong one."""
    staging = directory / "staging"
    volume = caller.create("test-encrypted", 48 * MIB, mounted("ext4"), parameters=ENCRYPTED)
    secret = {"passphrase": key}
    caller.stage(volume, staging, mounted("ext4"), secret)
    caller.node_expand(volume.volume_id, staging, 96 * MIB, secret)
    caller.unstage(volume.volume_id, staging)
    with pytest.raises(grpc.RpcError) as refused:
        caller.stage(volume, staging, mounted("ext4"), {"passphrase": f"{key}-wrong"})
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert key not in (refused.value.details() or "")
    caller.delete(volume.volume_id)


def test_no_process_is_ever_started_with_a_key_and_none_is_logged(
    client: Client, directory: Path, key: str
) -> None:
    began = time.strftime("%Y-%m-%d %H:%M:%S")
    sampler = Sampler(key.encode())
    with sampler.running():
        life(client, directory, key)
    assert sampler.found == set()
    assert "cryptsetup" in sampler.programs
    words = ("journalctl", "--unit=carver", f"--since={began}", "--output=cat")
    log = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert "NodeStageVolume" in log
    assert key not in log


def test_no_long_key_is_in_memory_after_the_volume_is_closed(
    client: Client, directory: Path, main_pid: Callable[[], int]
) -> None:
    # Shorter ones may stay in the memory of Python's own allocator: docs/security.md.
    key = f"key-{secrets.token_hex(300)}"
    life(client, directory, key)
    # What came last stays in gRPC's buffers for as long as a connection does, and channels of one
    # process share theirs. Kubelet has a connection of its own for each call.
    client.__exit__(None, None, None)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while found := places(main_pid(), key.encode()):
        assert time.monotonic() < deadline, found
        time.sleep(1)
