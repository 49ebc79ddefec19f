"""What it costs to deactivate snapshots that were read."""

from pathlib import Path

import configured
import nodes
import pytest
from fakes.host import FakeHost
from histories import Disk
from nodes import Node

from agent.core import ids
from agent.extras.changed_blocks import service as changed_blocks
from lvm import volumes


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    (tmp_path / "mounts").mkdir()
    return FakeHost(tmp_path / "mounts")


def disk_of(node: Node, snapshots: int) -> Disk:
    made = Disk(node.client, node.service, node.host, "thin")
    for _ in range(snapshots):
        made.snapshot()
    return made


@pytest.mark.parametrize("others", [1, 18])
def test_the_commands_of_a_reading_do_not_grow_with_the_snapshots(
    host: FakeHost, tmp_path: Path, others: int
) -> None:
    with nodes.made(host, configured.carver(tmp_path), tmp_path, "here") as node:
        disk = disk_of(node, 2 + others)
        base, target, *_ = disk.snapshots
        node.service.inventory.state()
        host.commands.clear()
        with changed_blocks.of(disk.service).delta.changed(base, target) as reading:
            assert list(reading.extents()) == []
        said = [words[2:4] if words[0] == "env" else words[:2] for words in host.commands]
        # Two tags and two activations; a look, the pool's tag, thin_delta, its tag again; a look;
        # one command deactivates both, and one takes both tags away.
        assert len(said) == 11, said


def test_three_commands_deactivate_all_that_was_left(host: FakeHost, tmp_path: Path) -> None:
    with nodes.made(host, configured.carver(tmp_path), tmp_path, "here") as node:
        disk = disk_of(node, 20)
        for one in disk.snapshots:
            name = ids.logical_name(one)
            volumes.mark(host.lvm, disk.group, name, old={}, new={"activated": "reading"})
            disk.logical(one)
        host.commands.clear()
        assert changed_blocks.of(node.service).delta.activations.resume() == 20
        assert len(host.commands) == 3
        assert changed_blocks.of(node.service).delta.activations.resume() == 0
        assert [one for one in host.devices.active(disk.group) if one.startswith("snap-")] == []
