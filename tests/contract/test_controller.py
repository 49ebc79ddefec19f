"""The Controller's answers to right and wrong requests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import chosen
import expect
import pytest
from real.any import AnyHost

from agent.csi.client import Client, Mode, block, mounted
from agent.settings.settings import TOPOLOGY_KEY
from lvm import report
from proto import csi_pb2 as csi

MIB = 1 << 20
EXTENT = 4 * MIB


def segments(node: str) -> csi.Topology:
    return csi.Topology(segments={TOPOLOGY_KEY: node})


def create_at(client: Client, field: str, *nodes: str) -> csi.Volume:
    places = [segments(one) for one in nodes]
    request = csi.CreateVolumeRequest(
        name="pvc-1",
        capacity_range=csi.CapacityRange(required_bytes=EXTENT),
        volume_capabilities=[block()],
        accessibility_requirements=csi.TopologyRequirement(**{field: places}),
    )
    return client.controller.CreateVolume(request).volume


def create(client: Client, **asked: Any) -> csi.Volume:
    """Create `pvc-1`, a raw block volume of one extent unless asked otherwise."""
    name, size = asked.pop("name", "pvc-1"), asked.pop("size", EXTENT)
    return client.create(name, size, *asked.pop("uses", [block()]), **asked)


@pytest.mark.parametrize(
    ("asked", "size"),
    [
        pytest.param({"size": EXTENT + 1}, 2 * EXTENT, id="rounded up to extents"),
        pytest.param({"uses": [mounted("xfs")]}, 300 * MIB, id="what xfs needs"),
        pytest.param(
            *({"size": 0, "limit_bytes": 10 * MIB}, 8 * MIB),
            id="only a limit",
            marks=pytest.mark.variation,
        ),
    ],
)
def test_create_chooses_the_size(client: Client, asked: dict[str, Any], size: int) -> None:
    assert create(client, **asked).capacity_bytes == size


def test_the_reported_maximum_can_be_made_and_one_extent_more_cannot(client: Client) -> None:
    maximum = client.capacity().maximum_volume_size.value
    with expect.code("RESOURCE_EXHAUSTED", str(maximum)):
        create(client, size=maximum + 1)
    assert create(client, size=maximum).capacity_bytes == maximum
    assert client.capacity().available_capacity == 0


def test_the_reported_minimum_can_be_made(client: Client) -> None:
    minimum = client.capacity(None, mounted("ext4")).minimum_volume_size.value
    assert client.create("pvc-1", minimum, limit_bytes=minimum).capacity_bytes == minimum


@pytest.mark.variation
def test_capacity_for_another_node_or_an_unsupported_mode_is_zero(client: Client) -> None:
    elsewhere = csi.GetCapacityRequest(accessible_topology=segments("there"))
    assert client.controller.GetCapacity(elsewhere).available_capacity == 0
    shared = block(Mode.MULTI_NODE_MULTI_WRITER)
    assert client.capacity(None, shared).available_capacity == 0


EXT4 = [mounted("ext4")]
CAPABILITY, PARAMETERS = "volume_capabilities[0]", "parameters"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"uses": [block(Mode.MULTI_NODE_SINGLE_WRITER)]}, [CAPABILITY]),
        ({"uses": [mounted("ntfs")]}, [CAPABILITY]),
        ({"uses": [mounted(flags=["rw,ro"])]}, [CAPABILITY]),
        ({"uses": [mounted("ext4", ["nouuid"])]}, ["mount_flags", "nouuid"]),
        ({"uses": [mounted("ext4"), mounted("xfs")]}, ["ext4", "xfs"]),
        ({"name": "a\x00b"}, ["name"]),
        ({"name": "a\x07b"}, ["name"]),
        ({"name": "a\x80b"}, ["name"]),
        ({"name": "n" * 129}, ["name"]),
        ({"name": ""}, ["name"]),
        ({"size": -1}, ["capacity_range.required_bytes"]),
        ({"size": 0, "limit_bytes": -1}, ["capacity_range.limit_bytes"]),
        ({"size": 8 * MIB, "limit_bytes": 4 * MIB}, ["capacity_range.limit_bytes"]),
        ({"source": csi.VolumeContentSource()}, ["volume_content_source"]),
        ({"parameters": {"colour": "red"}}, [PARAMETERS, "colour", "carver/class"]),
        ({"parameters": {"class": "gold"}}, [PARAMETERS, "gold", "plain"]),
        ({"parameters": {"class": "plain", "carver/class": "plain"}}, [PARAMETERS, "prefix"]),
        ({"parameters": {"fsType": "ntfs"}}, [PARAMETERS, "ntfs", "ext4"]),
        ({"uses": EXT4, "parameters": {"mkfsOptions": "-F"}}, [PARAMETERS, "-F"]),
        ({"uses": EXT4, "parameters": {"mkfsOptions": "-L ;reboot"}}, [PARAMETERS, "mkfsOptions"]),
        ({"parameters": {"mkfsOptions": "-L " + "x" * 2000}}, [PARAMETERS, "too long"]),
        ({"parameters": {"mountOptions": "bind"}}, [PARAMETERS, "mountOptions"]),
        ({"uses": EXT4, "parameters": {"mountOptions": "nouuid"}}, ["mountOptions", "nouuid"]),
        ({"parameters": {"csi.storage.k8s.io/fstype": "ntfs"}}, [PARAMETERS, "ntfs", "ext4"]),
        (
            {"parameters": {"csi.storage.k8s.io/fstype": "xfs", "carver/fsType": "ext4"}},
            [PARAMETERS, "xfs", "ext4"],
        ),
    ],
    ids=str,
)
@pytest.mark.variation
def test_create_refuses_invalid_fields_by_name(
    client: Client, asked: dict[str, Any], words: list[str]
) -> None:
    with expect.code("INVALID_ARGUMENT", *words):
        create(client, **asked)
    assert client.volumes() == []


@pytest.mark.parametrize(
    "asked",
    [
        {"size": EXTENT + 1, "limit_bytes": EXTENT + 2},
        {"uses": [mounted("xfs")], "limit_bytes": 200 * MIB},
    ],
    ids=["no whole extents", "too small for xfs"],
)
@pytest.mark.variation
def test_a_limit_that_cannot_be_kept_is_out_of_range(client: Client, asked: dict[str, Any]) -> None:
    with expect.code("OUT_OF_RANGE", "limit_bytes"):
        create(client, **asked)
    assert client.volumes() == []


@pytest.mark.parametrize(
    ("method", "given", "missing"),
    [
        ("CreateVolume", {"name": "v"}, "volume_capabilities"),
        ("ControllerExpandVolume", {"volume_id": "v"}, "capacity_range"),
        ("ControllerExpandVolume", {"capacity_range": {"required_bytes": 1}}, "volume_id"),
        ("ValidateVolumeCapabilities", {"volume_id": "v"}, "volume_capabilities"),
    ],
)
@pytest.mark.variation
def test_a_missing_field_is_named(
    client: Client, method: str, given: dict[str, Any], missing: str
) -> None:
    with expect.code("INVALID_ARGUMENT", missing, "required"):
        getattr(client.controller, method)(getattr(csi, f"{method}Request")(**given))


NAMES = [
    "n" * 128,
    "snapshot",
    "pvmove0",
    "a_rimage_0",
    "../../etc",
    "-rf",
    "päivä 1",
    "日本",
    "a/b",
]


@pytest.mark.parametrize(
    "name", chosen.kinds(NAMES, usual=["n" * 128, "a_rimage_0", "-rf", "日本"])
)
def test_any_name_that_the_spec_allows_names_one_volume(client: Client, name: str) -> None:
    volume = create(client, name=name)
    assert create(client, name=name) == volume
    assert create(client, name=name[:-1] + "x").volume_id != volume.volume_id


@pytest.mark.variation
def test_metadata_of_the_claim_are_kept_as_tags(client: Client, host: AnyHost, group: str) -> None:
    about = {"csi.storage.k8s.io/pvc/name": "db", "csi.storage.k8s.io/pvc/namespace": "shop"}
    create(client, parameters=about)
    tags = report.read(host.lvm).group(group).volume("vol-pvc-1").tags
    assert {"carver.pvc=db", "carver.namespace=shop"} <= tags


# As a StorageClass may have them; external-provisioner strips them from CreateVolume's parameters
# only, where `fstype` is the capability's by then.
KUBERNETES = {
    "csi.storage.k8s.io/fstype": "xfs",
    "csi.storage.k8s.io/provisioner-secret-name": "key",
    "csi.storage.k8s.io/provisioner-secret-namespace": "shop",
    "csi.storage.k8s.io/node-expand-secret-name": "key",
    "csi.storage.k8s.io/of-a-later-release": "yes",
}


@pytest.mark.parametrize("own", [{}, {"carver/fsType": "xfs"}, {"fstype": "xfs"}])
@pytest.mark.variation
def test_capacity_takes_a_storage_class_as_it_is_written(
    client: Client, own: dict[str, str]
) -> None:
    parameters = {**KUBERNETES, **own}
    capacity = client.capacity(parameters, mounted())
    assert capacity.available_capacity == client.capacity().available_capacity
    assert capacity.minimum_volume_size.value == 300 * MIB
    asked: dict[str, Any] = {"size": 0, "limit_bytes": 300 * MIB, "uses": [mounted()]}
    made = create(client, **asked, parameters=parameters)
    assert made.volume_context["carver/fsType"] == "xfs"
    assert made == create(client, **asked, parameters={"carver/fsType": "xfs"})


@pytest.mark.variation
def test_keys_of_kubernetes_are_ignored_in_every_call(client: Client) -> None:
    volume = create(client, parameters=KUBERNETES, mutable=KUBERNETES)
    client.modify(volume.volume_id, KUBERNETES)
    assert client.snapshot("1", volume.volume_id, KUBERNETES).ready_to_use
    client.delete_snapshot(client.snapshots()[0].snapshot_id)
    answer = client.controller.ValidateVolumeCapabilities(
        csi.ValidateVolumeCapabilitiesRequest(
            volume_id=volume.volume_id,
            volume_context={**volume.volume_context, **KUBERNETES},
            volume_capabilities=[block()],
            parameters=KUBERNETES,
            mutable_parameters=KUBERNETES,
        )
    )
    assert answer.confirmed.parameters == KUBERNETES


LONG = [mounted("ext4", ["noatime", "nodiratime", "nosuid", "noexec"])] * 40
TWO: dict[str, Any] = {"size": 2 * EXTENT}
WITH_OPTIONS: dict[str, Any] = {"uses": EXT4, "parameters": {"mkfsOptions": "-i 8192"}}


@pytest.mark.parametrize(
    ("asked", "again", "words"),
    [
        (TWO, {"size": 3 * EXTENT}, ["size", str(2 * EXTENT)]),
        (TWO, {"size": 0, "limit_bytes": EXTENT}, ["size", str(2 * EXTENT)]),
        (TWO, {"size": 1, "limit_bytes": 2 * EXTENT - 1}, ["size", str(2 * EXTENT)]),
        (TWO, {**TWO, "uses": EXT4}, ["capabilities"]),
        (WITH_OPTIONS, {**WITH_OPTIONS, "parameters": {"mkfsOptions": "-i 4096"}}, ["mkfsOptions"]),
        ({"uses": EXT4}, WITH_OPTIONS, ["mkfsOptions"]),
        ({"uses": LONG}, {"uses": LONG[1:]}, ["capabilities"]),
    ],
    ids=[
        "larger",
        "below, no size",
        "below",
        "capability",
        "parameters",
        "more parameters",
        "long capabilities",
    ],
)
@pytest.mark.variation
def test_a_repeated_create_that_differs_is_refused(
    client: Client, asked: dict[str, Any], again: dict[str, Any], words: list[str]
) -> None:
    made = create(client, **asked)
    with expect.code("ALREADY_EXISTS", *words):
        create(client, **again)
    assert create(client, **asked) == made


@pytest.mark.variation
def test_a_repeated_create_returns_the_volume_that_meets_the_range(client: Client) -> None:
    volume = create(client, **TWO)
    for required, limit in ((0, 0), (EXTENT, 0), (EXTENT, 3 * EXTENT)):
        assert create(client, size=required, limit_bytes=limit) == volume
    client.expand(volume.volume_id, 4 * EXTENT)
    for required in (2 * EXTENT, 4 * EXTENT):
        assert create(client, size=required).capacity_bytes == 4 * EXTENT
    with expect.code("ALREADY_EXISTS", "size"):
        create(client, **TWO, limit_bytes=2 * EXTENT)


@pytest.mark.variation
def test_a_volume_has_its_topology_and_the_context_for_staging(client: Client) -> None:
    volume = create(client, uses=[mounted()], size=16 * MIB, parameters={"carver/class": "plain"})
    assert [dict(one.segments) for one in volume.accessible_topology] == [{TOPOLOGY_KEY: "here"}]
    assert volume.volume_context == {"carver/class": "plain", "carver/fsType": "ext4"}


@pytest.mark.parametrize("field", ["requisite", "preferred"])
@pytest.mark.variation
def test_a_volume_is_made_only_where_its_topology_includes_this_node(
    client: Client, field: str
) -> None:
    with expect.code("RESOURCE_EXHAUSTED", "here"):
        create_at(client, field, "there")
    assert client.volumes() == []
    assert create_at(client, field, "there", "here").volume_id


@pytest.mark.variation
def test_only_an_id_that_no_volume_can_have_is_taken_for_deleted(
    client: Client, group: str
) -> None:
    for volume_id in ("made-up", "x@y/z", "../../etc/passwd", "a@12345678/b/c"):
        client.delete(volume_id)
    for volume_id in ("nowhere@12345678/vol-pvc-1", f"{group}@00000000/vol-pvc-1"):
        with expect.code("FAILED_PRECONDITION", "not this node's"):
            client.delete(volume_id)


@pytest.mark.parametrize(
    ("use", "read_only"),
    [(mounted("ext4"), False), (block(), False), (block(), True)],
    ids=["mounted", "block", "block, read-only"],
)
def test_a_volume_in_use_is_not_deleted(
    client: Client, staging: Path, target: Path, use: csi.VolumeCapability, read_only: bool
) -> None:
    volume = create(client, size=64 * MIB, uses=[use])
    client.stage(volume, staging, use)
    if use.HasField("block"):
        client.publish(volume, staging, target, use, read_only=read_only)
    path = target if use.HasField("block") else staging
    with expect.code("FAILED_PRECONDITION", "in use", str(path)):
        client.delete(volume.volume_id)
    assert [one.volume_id for one in client.volumes()] == [volume.volume_id]
    client.stats(volume.volume_id, path)


def page(client: Client, most: int = 0, token: str = "") -> tuple[dict[str, int], str]:
    """The volumes of a page with their sizes, and the token of the next."""
    request = csi.ListVolumesRequest(max_entries=most, starting_token=token)
    found = client.controller.ListVolumes(request)
    sizes = {one.volume.volume_id: one.volume.capacity_bytes for one in found.entries}
    assert len(sizes) == len(found.entries)
    return sizes, found.next_token


@pytest.mark.variation
def test_volumes_are_listed_in_pages_while_they_are_deleted(client: Client) -> None:
    made = {create(client, name=f"pvc-{number}").volume_id for number in range(5)}
    seen: list[str] = []
    token, is_first = "", True
    while token or is_first:
        found, token = page(client, 2, token)
        is_first = False
        assert len(found) <= 2
        seen += found
        if token:
            client.delete(token)
            made.discard(token)
    assert sorted(seen) == sorted(made)


@pytest.mark.variation
def test_a_repeated_list_has_what_changed_since(client: Client) -> None:
    sizes = {create(client, name=f"pvc-{number}").volume_id: EXTENT for number in range(2)}
    assert page(client) == page(client) == (sizes, "")
    least, greatest = sorted(sizes)
    assert page(client, 1) == ({least: EXTENT}, greatest)
    client.expand(least, 3 * EXTENT)
    assert page(client, 1) == ({least: 3 * EXTENT}, greatest)
    client.delete(greatest)
    assert page(client, 1) == page(client) == ({least: 3 * EXTENT}, "")
    client.delete(least)
    assert page(client) == ({}, "")
    again = create(client, name="pvc-0")
    assert page(client) == ({again.volume_id: EXTENT}, "")


@pytest.mark.variation
def test_an_invalid_page_is_refused(client: Client) -> None:
    with expect.code("ABORTED", "starting_token"):
        page(client, 0, "made-up")
    with expect.code("INVALID_ARGUMENT", "max_entries"):
        page(client, -1)


@pytest.mark.variation
def test_get_volume_finds_one_volume(client: Client) -> None:
    volume = create(client)
    assert client.volume(volume.volume_id).volume == volume
    with expect.code("NOT_FOUND"):
        client.volume(volume.volume_id + "x")


def refusal(
    client: Client,
    volume: csi.Volume,
    *capabilities: csi.VolumeCapability,
    context: Mapping[str, str] | None = None,
    parameters: Mapping[str, str] | None = None,
) -> str:
    """Why ValidateVolumeCapabilities does not confirm; empty if it does, with the context."""
    request = csi.ValidateVolumeCapabilitiesRequest(
        volume_id=volume.volume_id,
        volume_capabilities=capabilities,
        volume_context=context,
        parameters=parameters,
    )
    answer = client.controller.ValidateVolumeCapabilities(request)
    if answer.HasField("confirmed"):
        assert answer.confirmed.volume_context == volume.volume_context
        return ""
    assert answer.message
    return answer.message


@pytest.mark.variation
def test_capabilities_are_confirmed_or_refused_with_a_reason(client: Client, staging: Path) -> None:
    volume = create(client, size=64 * MIB, uses=[mounted()])
    assert refusal(client, volume, mounted("ext4"), block()) == ""
    assert "xfs needs" in refusal(client, volume, mounted("xfs"))
    shared = block(Mode.MULTI_NODE_MULTI_WRITER)
    assert "MULTI_NODE_MULTI_WRITER" in refusal(client, volume, shared)
    client.stage(volume, staging)
    assert "ext4" in refusal(client, volume, mounted("btrfs"))
    raw = create(client, name="pvc-2", size=64 * MIB)
    assert "raw block" in refusal(client, raw, mounted("ext4"))
    with expect.code("NOT_FOUND"):
        refusal(client, csi.Volume(volume_id="made-up"), block())


MADE = {"carver/class": "plain", "carver/fsType": "ext4", "carver/mkfsOptions": "-i  8192"}
PROVISIONER = {"storage.kubernetes.io/csiProvisionerIdentity": "1"}


@pytest.mark.parametrize(
    ("context", "parameters", "words"),
    [
        ({}, {}, []),
        ({}, MADE, []),
        ({}, {"class": "plain"}, []),
        ({}, {"csi.storage.k8s.io/fstype": "ext4", "mkfsOptions": "-i 8192"}, []),
        (PROVISIONER, {}, []),
        ({**MADE, **PROVISIONER}, MADE, []),
        ({}, {"class": "gold"}, ["class", "gold", "plain"]),
        ({}, {"fsType": "xfs"}, ["fsType", "xfs", "ext4"]),
        ({}, {"mountOptions": "noatime"}, ["mountOptions", "noatime", "none"]),
        ({}, {"mkfsOptions": "-i 4096"}, ["mkfsOptions", "-i 4096", "-i 8192"]),
        ({}, {"stripes": "2"}, ["stripes", "2", "1"]),
        ({}, {"cacheSize": "4MiB"}, ["cacheSize", "no cache"]),
        ({"carver/class": "gold"}, {}, ["volume_context", "gold", "plain"]),
        ({**MADE, "carver/fsType": "xfs"}, {}, ["volume_context", "xfs", "ext4"]),
        ({"carver/unheard": "of"}, {}, ["volume_context", "unheard"]),
    ],
    ids=str,
)
@pytest.mark.variation
def test_only_what_a_volume_was_made_with_is_confirmed(
    client: Client, context: dict[str, str], parameters: dict[str, str], words: list[str]
) -> None:
    volume = create(client, size=16 * MIB, uses=[mounted()], parameters=MADE)
    found = refusal(client, volume, mounted(), context=context, parameters=parameters)
    assert bool(found) == bool(words), found
    assert all(word in found for word in words), found


@pytest.mark.parametrize(
    ("use", "parameters"),
    [(block(), MADE), (mounted("xfs"), {"fsType": "ext4"})],
    ids=["a class for both is confirmed for block", "the capability's file system has precedence"],
)
@pytest.mark.variation
def test_a_volume_is_confirmed_for_the_class_that_it_was_made_with(
    client: Client, use: csi.VolumeCapability, parameters: dict[str, str]
) -> None:
    volume = create(client, size=300 * MIB, uses=[use], parameters=parameters)
    context = dict(volume.volume_context)
    assert refusal(client, volume, use, context=context, parameters=parameters) == ""


def test_a_volume_grows_and_never_shrinks(client: Client) -> None:
    volume = create(client, **TWO)
    assert client.expand(volume.volume_id, 2 * EXTENT + 1).capacity_bytes == 3 * EXTENT
    assert client.expand(volume.volume_id, EXTENT).capacity_bytes == 3 * EXTENT


@pytest.mark.parametrize(("required", "limit"), [(2 * EXTENT + 1, 2 * EXTENT + 2), (1, EXTENT)])
@pytest.mark.variation
def test_growth_above_the_limit_is_out_of_range(client: Client, required: int, limit: int) -> None:
    request = csi.ControllerExpandVolumeRequest(
        volume_id=create(client, **TWO).volume_id,
        capacity_range=csi.CapacityRange(required_bytes=required, limit_bytes=limit),
    )
    with expect.code("OUT_OF_RANGE", "limit_bytes"):
        client.controller.ControllerExpandVolume(request)


@pytest.mark.variation
def test_expanding_needs_a_volume_and_a_size(client: Client) -> None:
    volume = create(client)
    with expect.code("NOT_FOUND"):
        client.expand("made-up", EXTENT)
    with expect.code("INVALID_ARGUMENT", "capacity_range"):
        client.expand(volume.volume_id, 0)


@pytest.mark.variation
def test_controller_publish_is_unimplemented(client: Client) -> None:
    with expect.code("UNIMPLEMENTED"):
        client.controller.ControllerPublishVolume(csi.ControllerPublishVolumeRequest())
