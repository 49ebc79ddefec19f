"""What each released version left behind is served to its end, by its volumes' attributes too.

tests/data/state-VERSION.json has the lvm2 commands by which that version made a volume of each
kind, and for each what Kubernetes keeps of it: its StorageClass's parameters and its
PersistentVolume's attributes. They are never made anew; a release adds its own.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import configured
import left_behind
import pytest
import serving
from csi_client import Client
from real.any import AnyHost, names

from agent.csi.client import block, mounted, of_volume
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from lvm.layout import Layout
from lvm.thin import Policy
from proto import csi_pb2 as csi

DATA = Path(__file__).parents[1] / "data"
STATES = sorted(DATA.glob("state-*.json"))
MIB = 1 << 20
KEY = {"passphrase": "correct horse battery staple"}


# On real LVM the first alone is the usual one: all are of one form.
@pytest.fixture(
    params=[STATES[0], *(pytest.param(one, marks=pytest.mark.variation) for one in STATES[1:])],
    ids=lambda path: path.stem,
)
def kept(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(request.param.read_text())
    return found


@pytest.fixture
def group(kept: dict[str, Any], host: AnyHost) -> str:
    """The group as that version left it."""
    return left_behind.group_of(kept, host)


@pytest.fixture
def client(host: AnyHost, group: str, tmp_path: Path) -> Iterator[Client]:
    """Today's version, with the classes of then."""
    classes = (
        DeviceClass(name="plain", group=group, default=True),
        DeviceClass(name="striped", group=group, layout=Layout("striped", stripes=2)),
        DeviceClass(name="mirrored", group=group, layout=Layout("raid1", mirrors=1)),
        DeviceClass(name="thin", group=group, layout=Layout("thin"), pool=Policy()),
        DeviceClass(name="sealed", group=group, encryption="luks2"),
    )
    config: Config = configured.carver(tmp_path, group, classes=classes)
    with serving.served(host, config), Client(config.endpoint) as caller:
        yield caller


@pytest.mark.variation
def test_each_volume_is_known_by_what_kubernetes_keeps_of_it(
    client: Client, kept: dict[str, Any]
) -> None:
    found = {one.volume_id.partition("/vol-pvc-")[2]: one for one in client.volumes()}
    assert found.keys() == kept["volumes"].keys()
    for name, one in kept["volumes"].items():
        assert dict(found[name].volume_context) == one["context"], name
        capability = mounted(one["fs_type"]) if one["fs_type"] else block()
        again = client.create(
            f"pvc-{name}",
            one["size_bytes"],
            capability,
            parameters=one["parameters"],
            mutable=one["mutable"],
            source=of_volume(found[one["source"]].volume_id) if one["source"] else None,
        )
        assert again.volume_id == found[name].volume_id
        assert dict(again.volume_context) == one["context"]
        confirmed = client.controller.ValidateVolumeCapabilities(
            csi.ValidateVolumeCapabilitiesRequest(
                volume_id=again.volume_id,
                volume_context=one["context"],
                volume_capabilities=[capability],
                parameters=one["parameters"],
                mutable_parameters=one["mutable"],
            )
        )
        assert confirmed.HasField("confirmed"), confirmed.message


def test_each_volume_is_used_and_deleted(
    host: AnyHost, group: str, client: Client, kept: dict[str, Any]
) -> None:
    for snapshot in client.snapshots():
        client.delete_snapshot(snapshot.snapshot_id)
    for volume in client.volumes():
        name = volume.volume_id.partition("/vol-pvc-")[2]
        one = kept["volumes"][name]
        capability = mounted(one["fs_type"]) if one["fs_type"] else block()
        secret = KEY if one["class"] == "sealed" else {}
        staging, target = (host.directory / f"{name}-{part}" for part in ("staging", "target"))
        volume.volume_context.clear()
        volume.volume_context.update(one["context"])
        client.stage(volume, staging, capability, secret)
        client.publish(volume, staging, target, capability, secret)
        size = one["size_bytes"] + 16 * MIB
        client.expand(volume.volume_id, size)
        client.node_expand(volume.volume_id, target, size, secret)
        assert client.volume(volume.volume_id).volume.capacity_bytes == size
        client.unpublish(volume.volume_id, target)
        client.unstage(volume.volume_id, staging)
        client.delete(volume.volume_id)
    assert not [one for one in names(host, group) if one.startswith(("vol-", "snap-"))]
