"""A caller's secret is never in an argument or an environment variable of any process.

Every process of the node is read again and again while calls are made, and a trace shows every
program that the service starts.
"""

import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from csi_client import Asking, Client
from google.protobuf.descriptor import Descriptor
from traces import Sampler
from vm.tracing import traced

from agent.csi.client import Mode, mounted
from agent.settings.settings import DEFAULT_SOCKET
from proto import csi_pb2 as csi

MIB = 1 << 20
WRITER = mounted("ext4", mode=Mode.SINGLE_NODE_WRITER)


def secret_fields(message: Descriptor) -> list[str]:
    """The fields of a request that the wire marks as secret."""
    return [one.name for one in message.fields if one.GetOptions().Extensions[csi.csi_secret]]


class SecretSender(grpc.UnaryUnaryClientInterceptor):
    """Adds a secret to each call that may carry one, and keeps which did."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self.calls: set[str] = set()

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        """Fill in the secret."""
        for name in secret_fields(request.DESCRIPTOR):
            getattr(request, name)["token"] = self._secret
            self.calls.add(details.method.rpartition("/")[2])
        return continuation(details, request)


@pytest.fixture
def secret() -> str:
    return f"not-to-be-seen-{uuid.uuid4()}"


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch, secret: str) -> SecretSender:
    """Clients that are made from now on send the secret wherever they may."""
    made, real = SecretSender(secret), grpc.insecure_channel

    def channel(*words: Any, **more: Any) -> grpc.Channel:
        return grpc.intercept_channel(real(*words, **more), made)

    monkeypatch.setattr(grpc, "insecure_channel", channel)
    return made


def test_a_secret_in_an_argument_or_a_variable_would_be_seen(secret: str) -> None:
    idle = [sys.executable, "-c", "import time; time.sleep(60)"]
    for words, variables in (([*idle, secret], None), (idle, {"TOKEN": secret})):
        sampler = Sampler(secret.encode())
        with subprocess.Popen(words, env=variables) as process:
            with sampler.running():
                while not sampler.rounds:
                    pass
            process.kill()
        assert sampler.found


def every_call(caller: Client, directory: Path) -> None:
    """Each call that may carry a secret, each with commands that carry it out."""
    staging, target = directory / "staging", directory / "target"
    volume = caller.create("test-secret", 64 * MIB, WRITER)
    assert caller.confirms(volume.volume_id, WRITER)
    caller.stage(volume, staging, WRITER)
    caller.publish(volume, staging, target, WRITER)
    caller.expand(volume.volume_id, 96 * MIB)
    caller.node_expand(volume.volume_id, target, 96 * MIB)
    caller.modify(volume.volume_id, {"carver/readAhead": "1MiB"})
    caller.volume_health(volume.volume_id)
    caller.unhealthy()
    caller.storage_health()
    snapshot = caller.snapshot("test-secret-single", volume.volume_id)
    caller.snapshots()
    caller.controller.GetSnapshot(csi.GetSnapshotRequest(snapshot_id=snapshot.snapshot_id))
    caller.delete_snapshot(snapshot.snapshot_id)
    group = caller.group_snapshot("test-secret-group", [volume.volume_id])
    members = [one.snapshot_id for one in group.snapshots]
    caller.find_group_snapshot(group.group_snapshot_id, members)
    caller.delete_group_snapshot(group.group_snapshot_id, members)
    caller.unpublish(volume.volume_id, target)
    caller.unstage(volume.volume_id, staging)
    caller.delete(volume.volume_id)
    with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
        caller.controller.ControllerPublishVolume(csi.ControllerPublishVolumeRequest())
    with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
        caller.controller.ControllerUnpublishVolume(csi.ControllerUnpublishVolumeRequest())


def known() -> set[str]:
    """The calls that may carry a secret; streams are not offered."""
    return {
        method.name
        for service in csi.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if secret_fields(method.input_type) and not method.server_streaming
    }


@pytest.mark.long
def test_no_process_has_a_secret_in_an_argument_or_a_variable(
    sender: SecretSender,
    secret: str,
    client: Client,
    directory: Path,
    tmp_path: Path,
    main_pid: Callable[[], int],
) -> None:
    whole = ("--abbrev=none", "--string-limit=65536")
    words = ["journalctl", "--show-cursor", "--lines=0"]
    cursor = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    sampler = Sampler(secret.encode())
    with (
        sampler.running(),
        traced(main_pid(), tmp_path / "trace", *whole) as started,
        Asking(DEFAULT_SOCKET) as caller,
    ):
        every_call(caller, directory)
    assert sender.calls == known()

    assert any("mkfs" in line for line in started), "the trace sees nothing at all"
    assert [line for line in started if secret in line] == []
    assert sampler.rounds > 1
    assert sampler.found == set()
    words = ["journalctl", f"--after-cursor={cursor.rpartition('cursor: ')[2].strip()}", "--all"]
    assert secret not in subprocess.run(words, check=True, capture_output=True, text=True).stdout
