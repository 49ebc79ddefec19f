"""The main job through the socket: a volume's whole life, and what it costs in commands."""

from collections.abc import Sequence
from pathlib import Path

import chosen
import expect
import pytest
from real.any import AnyHost

from agent.csi.client import Client, Mode, block, mounted
from mount import table
from mount.filesystem import FILE_SYSTEMS
from proto import csi_pb2 as csi

MIB = 1 << 20


def lvm_commands(commands: Sequence[Sequence[str]]) -> int:
    return sum(1 for words in commands if words[0] == "lvm")


def end(client: Client, volume: csi.Volume, staging: Path, target: Path) -> None:
    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
    client.delete(volume.volume_id)
    assert not target.exists()


@pytest.mark.parametrize(
    ("fs_type", "size_bytes"),
    [(one, max(64 * MIB, FILE_SYSTEMS[one].minimum_bytes)) for one in chosen.GROWING],
)
def test_life_of_a_mounted_volume(
    client: Client, host: AnyHost, staging: Path, target: Path, fs_type: str, size_bytes: int
) -> None:
    before = client.capacity().available_capacity
    capability = mounted(fs_type)

    volume = client.create("pvc-1", size_bytes, capability)
    assert client.capacity().available_capacity == before - volume.capacity_bytes
    client.stage(volume, staging, capability)
    client.publish(volume, staging, target, capability)

    stats = client.stats(volume.volume_id, target)
    assert stats.usage[0].total > size_bytes / 2
    assert stats.usage[0].used + stats.usage[0].available <= stats.usage[0].total

    grown = size_bytes + 64 * MIB
    assert client.expand(volume.volume_id, grown).node_expansion_required
    assert client.node_expand(volume.volume_id, target, grown).capacity_bytes == grown
    assert client.stats(volume.volume_id, target).usage[0].total > stats.usage[0].total

    end(client, volume, staging, target)
    assert client.volumes() == []
    assert client.capacity().available_capacity == before
    assert table.read(host.kernel).under(str(host.directory)) == ()


def test_life_of_a_raw_volume(client: Client, host: AnyHost, staging: Path, target: Path) -> None:
    before = client.capacity().available_capacity

    volume = client.create("pvc-1", 32 * MIB, block())
    client.stage(volume, staging, block())
    client.publish(volume, staging, target, block())
    assert host.kernel.device_size_bytes(str(target)) == 32 * MIB
    assert client.stats(volume.volume_id, target).usage[0].total == 32 * MIB

    answer = client.expand(volume.volume_id, 48 * MIB)
    assert (answer.capacity_bytes, answer.node_expansion_required) == (48 * MIB, False)
    assert client.node_expand(volume.volume_id, target, 48 * MIB).capacity_bytes == 48 * MIB
    assert host.kernel.device_size_bytes(str(target)) == 48 * MIB

    end(client, volume, staging, target)
    assert client.capacity().available_capacity == before


def test_the_node_is_asked_to_grow_the_loop_device_of_a_read_only_raw_volume(
    client: Client, host: AnyHost, staging: Path, target: Path
) -> None:
    volume = client.create("pvc-1", 32 * MIB, block())
    client.stage(volume, staging, block())
    client.publish(volume, staging, target, block(), read_only=True)
    assert client.expand(volume.volume_id, 48 * MIB).node_expansion_required
    assert client.node_expand(volume.volume_id, target, 48 * MIB).capacity_bytes == 48 * MIB
    assert host.kernel.device_size_bytes(str(target)) == 48 * MIB
    client.unpublish(volume.volume_id, target)
    assert not client.expand(volume.volume_id, 64 * MIB).node_expansion_required


def test_calls_cost_no_more_commands_than_promised(
    client: Client, host: AnyHost, staging: Path, target: Path
) -> None:
    def cost() -> list[tuple[str, ...]]:
        commands, host.commands = host.commands[:], []
        return commands

    host.commands = []
    volume = client.create("pvc-1", 64 * MIB)
    assert lvm_commands(cost()) <= 2
    client.stage(volume, staging)
    assert len(cost()) <= 4
    client.publish(volume, staging, target)
    client.stats(volume.volume_id, target)
    client.unpublish(volume.volume_id, target)
    assert cost() == []
    client.stage(volume, staging)
    assert cost() == []
    client.publish(volume, staging, target)
    client.node_expand(volume.volume_id, target, 64 * MIB)
    assert cost() == []
    client.node_expand(volume.volume_id, target, 80 * MIB)
    assert lvm_commands(cost()) <= 2
    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
    assert cost() == []
    client.delete(volume.volume_id)
    assert lvm_commands(cost()) <= 2
    client.capacity()
    assert lvm_commands(cost()) <= 1


def test_repeated_calls_change_nothing(
    client: Client, host: AnyHost, staging: Path, target: Path
) -> None:
    first = client.create("pvc-1", 64 * MIB)
    assert client.create("pvc-1", 64 * MIB) == first
    assert len(client.volumes()) == 1

    client.stage(first, staging)
    client.publish(first, staging, target)
    mounts = table.read(host.kernel).under(str(host.directory))
    client.stage(first, staging)
    client.publish(first, staging, target)
    assert table.read(host.kernel).under(str(host.directory)) == mounts

    assert client.expand(first.volume_id, 80 * MIB) == client.expand(first.volume_id, 80 * MIB)
    grown = client.node_expand(first.volume_id, target, 80 * MIB)
    assert client.node_expand(first.volume_id, target, 80 * MIB) == grown

    client.unpublish(first.volume_id, target)
    client.unpublish(first.volume_id, target)
    client.unstage(first.volume_id, staging)
    client.unstage(first.volume_id, staging)
    client.delete(first.volume_id)
    client.delete(first.volume_id)
    assert client.volumes() == []


def test_publish_to_two_targets(client: Client, host: AnyHost, staging: Path) -> None:
    writer, reader = host.directory / "writer", host.directory / "reader"
    capability = mounted("ext4", mode=Mode.SINGLE_NODE_MULTI_WRITER)
    volume = client.create("pvc-1", 64 * MIB, capability)
    client.stage(volume, staging, capability)

    client.publish(volume, staging, writer, capability)
    client.publish(volume, staging, reader, capability, read_only=True)

    mounts = table.read(host.kernel)
    assert not mounts.at(str(writer))[-1].read_only
    assert mounts.at(str(reader))[-1].read_only
    with expect.code("ALREADY_EXISTS", str(reader)):
        client.publish(volume, staging, reader, capability)
    client.unpublish(volume.volume_id, reader)
    assert table.read(host.kernel).at(str(writer))


def test_read_only_raw_volume(client: Client, host: AnyHost, staging: Path, target: Path) -> None:
    volume = client.create("pvc-1", 32 * MIB, block())
    client.stage(volume, staging, block())
    client.publish(volume, staging, target, block(), read_only=True)
    client.publish(volume, staging, target, block(), read_only=True)

    assert host.kernel.device_is_read_only(str(target))
    assert host.kernel.device_size_bytes(str(target)) == 32 * MIB
    client.node_expand(volume.volume_id, target, 48 * MIB)
    assert host.kernel.device_size_bytes(str(target)) == 48 * MIB
    end(client, volume, staging, target)


def test_options_of_mount_and_mkfs(client: Client, host: AnyHost, staging: Path) -> None:
    capability = mounted("ext4", ["noatime"])
    parameters = {"mountOptions": "nodev", "carver/mkfsOptions": "-L data -i 8192"}
    volume = client.create("pvc-1", 64 * MIB, capability, parameters=parameters)
    client.stage(volume, staging, capability)
    found = table.read(host.kernel).at(str(staging))[-1].options
    assert {"noatime", "nodev"} <= set(found)
    made = next(words for words in host.commands if words[0] == "mkfs.ext4")
    assert made[made.index("-L") + 1] == "data"
    assert made[made.index("-i") + 1] == "8192"
