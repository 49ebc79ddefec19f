"""What `carver status` tells of a node, and how it shows that."""

import io
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import serving
from real.any import AnyHost
from rich.console import Console

from agent.cli import status, terminal
from agent.cli.status import Overview, Place, Pool
from agent.core import errors
from agent.csi.client import Client, Mode, block, mounted
from agent.settings.classes import DeviceClass
from agent.settings.settings import BackingFile, Config, GroupDefinition
from mount.cgroups import IoMax

MIB = 1 << 20


def look(host: AnyHost, config: Config) -> Overview:
    """The status, with lvm2 confined to the disks of the test's own service."""
    machine = serving.machine(host)
    return status.read(replace(config, devices=host.lvm.devices), machine)


def shown(seen: Overview) -> str:
    out = io.StringIO()
    Console(width=200, file=out).print(terminal.status(seen))
    return out.getvalue()


@pytest.mark.variation
def test_groups_and_classes(host: AnyHost, client: Client, config: Config, group: str) -> None:
    seen = look(host, config)
    [one] = seen.groups
    assert (one.name, one.disks, one.free_bytes) == (group, 2, 160 * 4 * MIB)
    [plain] = seen.classes
    assert plain.largest_bytes == client.capacity().maximum_volume_size.value
    assert seen.serving
    assert "plain (default)" in shown(seen)
    assert "There are no volumes." in shown(seen)


def test_places_and_usage_of_a_volume(
    host: AnyHost, client: Client, config: Config, staging: Path, target: Path
) -> None:
    capability = mounted(mode=Mode.SINGLE_NODE_MULTI_WRITER)
    claim = {"csi.storage.k8s.io/pvc/name": "db", "csi.storage.k8s.io/pvc/namespace": "shop"}
    limits = {"writeIOPSPerGiB": "1600"}
    volume = client.create("pvc-1", 64 * MIB, capability, parameters=claim, mutable=limits)
    client.stage(volume, staging, capability)
    client.publish(volume, staging, target, capability, read_only=True)

    [one] = look(host, config).volumes

    assert (one.id, one.name, one.claim) == (volume.volume_id, "pvc-1", "shop/db")
    assert one.contents == "ext4"
    assert one.limits == IoMax(writes=100).words()
    assert f"pvc-1 has limits of I/O: {one.limits}" in shown(look(host, config))
    assert set(one.places) == {Place(str(staging), False), Place(str(target), True)}
    assert one.total_bytes
    assert one.used_bytes is not None
    assert one.health == ()
    text = shown(look(host, config))
    assert "shop/db" in text
    assert f"pvc-1 is at {target} (read-only)" in text
    assert json.loads(json.dumps(asdict(one)))["places"][0]["path"]


@pytest.mark.variation
def test_places_of_a_raw_volume(
    host: AnyHost, client: Client, config: Config, staging: Path, target: Path
) -> None:
    capability = block(Mode.SINGLE_NODE_MULTI_WRITER)
    volume = client.create("raw", 16 * MIB, capability)
    client.stage(volume, staging, capability)
    client.publish(volume, staging, target, capability)
    client.publish(volume, staging, host.directory / "reader", capability, read_only=True)

    [one] = look(host, config).volumes

    assert one.contents == "raw block"
    assert one.used_bytes is None
    assert {place.path for place in one.places} == {str(target), str(host.directory / "reader")}


@pytest.mark.variation
def test_snapshots(host: AnyHost, client: Client, config: Config) -> None:
    volume = client.create("pvc-1", 64 * MIB)
    made = client.snapshot("monday", volume.volume_id)

    seen = look(host, config)

    [one] = seen.snapshots
    assert (one.id, one.name, one.volume) == (made.snapshot_id, "monday", "pvc-1")
    assert one.taken_seconds == made.creation_time.seconds
    assert one.area_bytes
    assert one.area_percent is not None
    assert one.health == ()
    assert "monday" in shown(seen)


def test_pools() -> None:
    pools = (Pool("pool", "data", 1 << 30, 42.0, 7.5), Pool("idle", "data", 1 << 30, None, None))
    text = shown(Overview("here", "driver", "1", "/socket", True, (), (), pools, (), ()))
    assert "42 %" in text
    assert "8 %" in text
    assert text.count("inactive") == 2


@pytest.mark.variation
def test_missing_group_and_service(host: AnyHost, config: Config, tmp_path: Path) -> None:
    classes = (*config.classes, DeviceClass(name="other", group="nowhere"))
    seen = look(host, replace(config, classes=classes, endpoint=tmp_path / "absent.sock"))
    assert not seen.serving
    assert "not serving" in shown(seen)
    assert [one.present for one in seen.groups] == [True, False]
    assert seen.classes[1].largest_bytes is None
    assert "is not on this node" in shown(seen)


@pytest.mark.variation
def test_group_on_a_file_that_was_not_made(host: AnyHost, config: Config, tmp_path: Path) -> None:
    definition = GroupDefinition("carver", file=BackingFile(tmp_path / "carver.img", 64 * MIB))
    with pytest.raises(errors.NotReady, match="start the service"):
        look(host, replace(config, definitions=(definition,)))
