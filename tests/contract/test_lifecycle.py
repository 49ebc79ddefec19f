"""The main job through the socket: a volume's whole life, and what it costs in commands."""

from collections.abc import Sequence
from pathlib import Path

import expect
import pytest
from real.any import AnyHost

from agent.csi.client import Client, Mode, block, mounted
from mount import table

MIB = 1 << 20
BOTH_WRITERS = Mode.SINGLE_NODE_MULTI_WRITER


def lvm_commands(commands: Sequence[Sequence[str]]) -> int:
    return sum(1 for words in commands if words[0] == "lvm")


@pytest.mark.parametrize(
    ("fs_type", "size_bytes"), [("ext4", 64 * MIB), ("xfs", 300 * MIB), ("btrfs", 256 * MIB)]
)
def test_a_mounted_volume_lives_from_create_to_delete(
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

    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
    client.delete(volume.volume_id)

    assert client.volumes() == []
    assert client.capacity().available_capacity == before
    assert not target.exists()
    assert table.read(host.kernel).under(str(host.directory)) == ()


def test_a_raw_block_volume_lives_from_create_to_delete(
    client: Client, host: AnyHost, staging: Path, target: Path
) -> None:
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

    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
    client.delete(volume.volume_id)
    assert client.capacity().available_capacity == before
    assert not target.exists()


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


def test_every_call_repeated_answers_the_same_and_changes_nothing(
    client: Client, host: AnyHost, staging: Path, target: Path
) -> None:
    first = client.create("pvc-1", 64 * MIB)
    assert client.create("pvc-1", 64 * MIB) == first
    assert len(client.volumes()) == 1

    client.stage(first, staging)
    client.publish(first, staging, target)
    mounts = table.read(host.kernel).mounts
    client.stage(first, staging)
    client.publish(first, staging, target)
    assert table.read(host.kernel).mounts == mounts

    assert client.expand(first.volume_id, 80 * MIB) == client.expand(first.volume_id, 80 * MIB)
    grown = client.node_expand(first.volume_id, target, 80 * MIB)
    assert client.node_expand(first.volume_id, target, 80 * MIB) == grown

    for _ in range(2):
        client.unpublish(first.volume_id, target)
    for _ in range(2):
        client.unstage(first.volume_id, staging)
    for _ in range(2):
        client.delete(first.volume_id)
    assert client.volumes() == []


def test_a_volume_is_published_to_two_targets_one_of_them_read_only(
    client: Client, host: AnyHost, staging: Path
) -> None:
    writer, reader = host.directory / "writer", host.directory / "reader"
    capability = mounted("ext4", mode=BOTH_WRITERS)
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


def test_a_read_only_raw_block_volume_cannot_be_written(
    client: Client, host: AnyHost, staging: Path, target: Path
) -> None:
    volume = client.create("pvc-1", 32 * MIB, block())
    client.stage(volume, staging, block())
    client.publish(volume, staging, target, block(), read_only=True)
    client.publish(volume, staging, target, block(), read_only=True)

    assert host.kernel.device_is_read_only(str(target))
    assert host.kernel.device_size_bytes(str(target)) == 32 * MIB
    client.node_expand(volume.volume_id, target, 48 * MIB)
    assert host.kernel.device_size_bytes(str(target)) == 48 * MIB

    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
    client.delete(volume.volume_id)


def test_mount_options_of_capability_and_parameters_are_honoured(
    client: Client, host: AnyHost, staging: Path
) -> None:
    capability = mounted("ext4", ["noatime"])
    volume = client.create("pvc-1", 64 * MIB, capability, parameters={"mountOptions": "nodev"})
    client.stage(volume, staging, capability)
    found = table.read(host.kernel).at(str(staging))[-1].options
    assert {"noatime", "nodev"} <= set(found)


def test_mkfs_options_reach_mkfs(client: Client, host: AnyHost, staging: Path) -> None:
    parameters = {"carver/mkfsOptions": "-L data -i 8192"}
    volume = client.create("pvc-1", 64 * MIB, mounted("ext4"), parameters=parameters)
    client.stage(volume, staging)
    made = next(words for words in host.commands if words[0] == "mkfs.ext4")
    assert made[made.index("-L") + 1] == "data"
    assert made[made.index("-i") + 1] == "8192"
