"""The main job through the socket: a volume's whole life, each call once and again."""

from pathlib import Path

import grpc
import pytest
from fakes.host import FakeHost
from real.host import RealHost

from agent.client import Client, Mode, block, mounted

AnyHost = FakeHost | RealHost
MIB = 1 << 20


def code(error: pytest.ExceptionInfo[grpc.RpcError]) -> grpc.StatusCode:
    found: grpc.StatusCode = error.value.code()  # type: ignore[attr-defined]
    return found


@pytest.fixture
def paths(host: AnyHost) -> tuple[Path, Path]:
    return host.directory / "staging", host.directory / "target"


def test_a_volume_lives_from_create_to_delete(
    client: Client, host: AnyHost, paths: tuple[Path, Path]
) -> None:
    staging, target = paths
    before = client.capacity().available_capacity

    volume = client.create("pvc-1", 64 * MIB, mounted("ext4"))
    client.stage(volume, staging, mounted("ext4"))
    client.publish(volume, staging, target, mounted("ext4"))

    usage = client.stats(volume.volume_id, target).usage
    assert usage[0].total > 32 * MIB
    assert client.capacity().available_capacity == before - 64 * MIB

    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
    client.delete(volume.volume_id)

    assert client.volumes() == []
    assert client.capacity().available_capacity == before
    assert not target.exists()
