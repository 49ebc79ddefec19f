"""The Controller's answers, right and wrong requests alike."""

from collections.abc import Mapping

import chosen
import expect
import pytest
from real.any import AnyHost

from agent.core.settings import TOPOLOGY_KEY
from agent.csi.client import Client, Mode, block, mounted
from lvm import report
from proto import csi_pb2 as csi

MIB = 1 << 20
EXTENT = 4 * MIB


def segments(node: str) -> csi.Topology:
    return csi.Topology(segments={TOPOLOGY_KEY: node})


def create_at(client: Client, requirement: csi.TopologyRequirement) -> csi.Volume:
    request = csi.CreateVolumeRequest(
        name="pvc-1",
        capacity_range=csi.CapacityRange(required_bytes=EXTENT),
        volume_capabilities=[block()],
        accessibility_requirements=requirement,
    )
    return client.controller.CreateVolume(request).volume


def test_a_size_is_rounded_up_to_extents(client: Client) -> None:
    assert client.create("pvc-1", EXTENT + 1, block()).capacity_bytes == 2 * EXTENT


@pytest.mark.variation
def test_a_volume_without_a_size_gets_one(client: Client) -> None:
    assert client.create("pvc-1", 0, block(), limit_bytes=10 * MIB).capacity_bytes == 8 * MIB


def test_a_volume_is_made_as_large_as_its_file_system_needs(client: Client) -> None:
    assert client.create("pvc-1", EXTENT, mounted("xfs")).capacity_bytes == 300 * MIB


@pytest.mark.parametrize(
    ("capability", "required", "limit"),
    [(block(), EXTENT + 1, EXTENT + 2), (mounted("xfs"), EXTENT, 200 * MIB)],
    ids=["no whole extents", "too small for xfs"],
)
@pytest.mark.variation
def test_a_limit_that_cannot_be_kept_is_out_of_range(
    client: Client, capability: csi.VolumeCapability, required: int, limit: int
) -> None:
    with expect.code("OUT_OF_RANGE", "limit_bytes"):
        client.create("pvc-1", required, capability, limit_bytes=limit)
    assert client.volumes() == []


def test_the_reported_maximum_can_be_made_and_one_extent_more_cannot(client: Client) -> None:
    maximum = client.capacity().maximum_volume_size.value
    with expect.code("RESOURCE_EXHAUSTED", str(maximum)):
        client.create("pvc-1", maximum + 1, block())
    assert client.create("pvc-1", maximum, block()).capacity_bytes == maximum
    assert client.capacity().available_capacity == 0


def test_the_reported_minimum_can_be_made(client: Client) -> None:
    minimum = client.capacity(None, mounted("ext4")).minimum_volume_size.value
    assert client.create("pvc-1", minimum, limit_bytes=minimum).capacity_bytes == minimum


@pytest.mark.variation
def test_capacity_for_another_node_or_an_unsupported_mode_is_nothing(client: Client) -> None:
    elsewhere = csi.GetCapacityRequest(accessible_topology=segments("there"))
    assert client.controller.GetCapacity(elsewhere).available_capacity == 0
    shared = block(Mode.MULTI_NODE_MULTI_WRITER)
    assert client.capacity(None, shared).available_capacity == 0


@pytest.mark.parametrize(
    "capability", [block(Mode.MULTI_NODE_SINGLE_WRITER), mounted("ntfs"), mounted(flags=["rw,ro"])]
)
@pytest.mark.variation
def test_an_unsupported_capability_is_refused(
    client: Client, capability: csi.VolumeCapability
) -> None:
    with expect.code("INVALID_ARGUMENT", "volume_capabilities[0]"):
        client.create("pvc-1", EXTENT, capability)
    assert client.volumes() == []


@pytest.mark.parametrize("name", ["a\x00b", "a\x07b", "a\x80b", "n" * 129, ""])
@pytest.mark.variation
def test_a_name_that_the_spec_does_not_allow_is_refused(client: Client, name: str) -> None:
    with expect.code("INVALID_ARGUMENT", "name"):
        client.create(name, EXTENT, block())


@pytest.mark.parametrize(
    "name",
    chosen.kinds(
        [
            "n" * 128,
            "snapshot",
            "pvmove0",
            "a_rimage_0",
            "../../etc",
            "-rf",
            "päivä 1",
            "日本",
            "a/b",
        ],
        usual=["n" * 128, "a_rimage_0", "-rf", "日本"],
    ),
)
def test_any_name_that_the_spec_allows_names_one_volume(client: Client, name: str) -> None:
    volume = client.create(name, EXTENT, block())
    assert client.create(name, EXTENT, block()) == volume
    other = client.create(name[:-1] + "x", EXTENT, block())
    assert other.volume_id != volume.volume_id


@pytest.mark.variation
def test_a_capability_is_required(client: Client) -> None:
    request = csi.CreateVolumeRequest(name="pvc-1")
    with expect.code("INVALID_ARGUMENT", "volume_capabilities", "required"):
        client.controller.CreateVolume(request)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"colour": "red"}, ["colour", "carver/class"]),
        ({"class": "gold"}, ["gold", "plain"]),
        ({"class": "plain", "carver/class": "plain"}, ["prefix"]),
        ({"fsType": "ntfs"}, ["ntfs", "ext4"]),
        ({"mkfsOptions": "-F"}, ["-F"]),
        ({"mkfsOptions": "-L ;reboot"}, ["mkfsOptions"]),
        ({"mountOptions": "bind"}, ["mountOptions"]),
        ({"mkfsOptions": "-L " + "x" * 2000}, ["too long"]),
        ({"csi.storage.k8s.io/fstype": "ntfs"}, ["ntfs", "ext4"]),
        ({"csi.storage.k8s.io/fstype": "xfs", "carver/fsType": "ext4"}, ["xfs", "ext4"]),
    ],
)
@pytest.mark.variation
def test_wrong_parameters_are_refused_by_name(
    client: Client, parameters: dict[str, str], words: list[str]
) -> None:
    with expect.code("INVALID_ARGUMENT", "parameters", *words):
        client.create("pvc-1", EXTENT, mounted("ext4"), parameters=parameters)
    assert client.volumes() == []


@pytest.mark.variation
def test_what_the_provisioner_tells_of_the_claim_is_kept_as_tags(
    client: Client, host: AnyHost, group: str
) -> None:
    about = {"csi.storage.k8s.io/pvc/name": "db", "csi.storage.k8s.io/pvc/namespace": "shop"}
    client.create("pvc-1", EXTENT, block(), parameters=about)
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
def test_capacity_is_told_of_a_storage_class_as_it_is_written(
    client: Client, own: dict[str, str]
) -> None:
    parameters = {**KUBERNETES, **own}
    told = client.capacity(parameters, mounted())
    assert told.available_capacity == client.capacity().available_capacity
    assert told.minimum_volume_size.value == 300 * MIB
    made = client.create("pvc-1", 0, mounted(), limit_bytes=300 * MIB, parameters=parameters)
    assert made.volume_context["carver/fsType"] == "xfs"
    assert made == client.create(
        "pvc-1", 0, mounted(), limit_bytes=300 * MIB, parameters={"carver/fsType": "xfs"}
    )


@pytest.mark.variation
def test_keys_of_kubernetes_own_are_ignored_wherever_they_stand(client: Client) -> None:
    volume = client.create("pvc-1", EXTENT, block(), parameters=KUBERNETES, mutable=KUBERNETES)
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


@pytest.mark.parametrize(("required", "limit"), [(3 * EXTENT, 0), (0, EXTENT), (1, 2 * EXTENT - 1)])
@pytest.mark.variation
def test_a_repeated_create_of_another_size_is_refused(
    client: Client, required: int, limit: int
) -> None:
    client.create("pvc-1", 2 * EXTENT, block())
    with expect.code("ALREADY_EXISTS", "size", str(2 * EXTENT)):
        client.create("pvc-1", required, block(), limit_bytes=limit)


@pytest.mark.parametrize(("required", "limit"), [(0, 0), (EXTENT, 0), (EXTENT, 3 * EXTENT)])
@pytest.mark.variation
def test_a_repeated_create_is_of_the_volume_that_meets_the_range(
    client: Client, required: int, limit: int
) -> None:
    made = client.create("pvc-1", 2 * EXTENT, block())
    assert client.create("pvc-1", required, block(), limit_bytes=limit) == made


@pytest.mark.variation
def test_a_repeated_create_of_a_volume_that_has_grown_is_of_what_it_has(client: Client) -> None:
    volume = client.create("pvc-1", 2 * EXTENT, block())
    client.expand(volume.volume_id, 4 * EXTENT)
    for required in (2 * EXTENT, 4 * EXTENT):
        assert client.create("pvc-1", required, block()).capacity_bytes == 4 * EXTENT
    with expect.code("ALREADY_EXISTS", "size"):
        client.create("pvc-1", 2 * EXTENT, block(), limit_bytes=2 * EXTENT)


@pytest.mark.variation
def test_a_repeated_create_with_another_capability_is_refused(client: Client) -> None:
    client.create("pvc-1", 16 * MIB, block())
    with expect.code("ALREADY_EXISTS", "capabilities"):
        client.create("pvc-1", 16 * MIB, mounted("ext4"))


@pytest.mark.variation
def test_a_repeated_create_with_other_parameters_is_refused(client: Client) -> None:
    client.create("pvc-1", 16 * MIB, parameters={"mkfsOptions": "-i 8192"})
    with expect.code("ALREADY_EXISTS", "mkfsOptions"):
        client.create("pvc-1", 16 * MIB)


@pytest.mark.variation
def test_very_long_capabilities_are_still_compared(client: Client) -> None:
    def capabilities(count: int) -> list[csi.VolumeCapability]:
        options = ["noatime", "nodiratime", "nosuid", "noexec"]
        return [mounted("ext4", options)] * count

    volume = client.create("pvc-1", 16 * MIB, *capabilities(40))
    assert client.create("pvc-1", 16 * MIB, *capabilities(40)) == volume
    with expect.code("ALREADY_EXISTS", "capabilities"):
        client.create("pvc-1", 16 * MIB, *capabilities(39))


@pytest.mark.parametrize(
    ("required", "limit", "field"),
    [(-1, 0, "required_bytes"), (0, -1, "limit_bytes"), (8 * MIB, 4 * MIB, "limit_bytes")],
)
@pytest.mark.variation
def test_a_size_range_that_makes_no_sense_is_refused(
    client: Client, required: int, limit: int, field: str
) -> None:
    with expect.code("INVALID_ARGUMENT", f"capacity_range.{field}"):
        client.create("pvc-1", required, block(), limit_bytes=limit)


@pytest.mark.variation
def test_a_volume_tells_its_node_and_what_staging_needs(client: Client) -> None:
    volume = client.create("pvc-1", 16 * MIB, mounted(), parameters={"carver/class": "plain"})
    assert [dict(one.segments) for one in volume.accessible_topology] == [{TOPOLOGY_KEY: "here"}]
    assert volume.volume_context == {"carver/class": "plain", "carver/fsType": "ext4"}


@pytest.mark.parametrize("field", ["requisite", "preferred"])
@pytest.mark.variation
def test_a_topology_that_includes_this_node_is_honoured(client: Client, field: str) -> None:
    places = [segments("there"), segments("here")]
    requirement = csi.TopologyRequirement(**{field: places})
    assert create_at(client, requirement).volume_id


@pytest.mark.parametrize("field", ["requisite", "preferred"])
@pytest.mark.variation
def test_a_topology_elsewhere_only_is_exhausted_here(client: Client, field: str) -> None:
    requirement = csi.TopologyRequirement(**{field: [segments("there")]})
    with expect.code("RESOURCE_EXHAUSTED", "here"):
        create_at(client, requirement)
    assert client.volumes() == []


@pytest.mark.variation
def test_a_volume_on_another_node_is_not_a_volume_that_is_gone(
    client: Client, host: AnyHost, group: str
) -> None:
    for volume_id in ("nowhere@12345678/vol-pvc-1", f"{group}@00000000/vol-pvc-1"):
        with expect.code("FAILED_PRECONDITION", "not this node's"):
            client.delete(volume_id)


@pytest.mark.parametrize("volume_id", ["made-up", "x@y/z", "../../etc/passwd", "a@12345678/b/c"])
@pytest.mark.variation
def test_deleting_what_cannot_be_a_volume_succeeds(client: Client, volume_id: str) -> None:
    client.delete(volume_id)


def test_a_staged_volume_is_not_deleted(client: Client, host: AnyHost) -> None:
    staging = host.directory / "staging"
    volume = client.create("pvc-1", 64 * MIB)
    client.stage(volume, staging)
    with expect.code("FAILED_PRECONDITION", "in use", str(staging)):
        client.delete(volume.volume_id)
    assert [one.volume_id for one in client.volumes()] == [volume.volume_id]
    client.stats(volume.volume_id, staging)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_published_raw_block_volume_is_not_deleted(
    client: Client, host: AnyHost, read_only: bool
) -> None:
    staging, target = host.directory / "staging", host.directory / "target"
    volume = client.create("pvc-1", 16 * MIB, block())
    client.stage(volume, staging, block())
    client.publish(volume, staging, target, block(), read_only=read_only)
    with expect.code("FAILED_PRECONDITION", "in use"):
        client.delete(volume.volume_id)
    assert host.kernel.device_size_bytes(str(target)) == 16 * MIB


@pytest.mark.variation
def test_volumes_are_listed_part_by_part(client: Client) -> None:
    made = {client.create(f"pvc-{number}", EXTENT, block()).volume_id for number in range(5)}
    seen, token = [], ""
    while True:
        request = csi.ListVolumesRequest(max_entries=2, starting_token=token)
        part = client.controller.ListVolumes(request)
        assert len(part.entries) <= 2
        seen += [entry.volume.volume_id for entry in part.entries]
        token = part.next_token
        if not token:
            break
        client.delete(token)
        made.discard(token)
    assert set(seen) == made
    assert len(seen) == len(set(seen))


@pytest.mark.variation
def test_a_list_that_was_told_before_has_what_changed_since(client: Client) -> None:
    def listed(most: int = 0) -> tuple[dict[str, int], str]:
        part = client.controller.ListVolumes(csi.ListVolumesRequest(max_entries=most))
        found = {one.volume.volume_id: one.volume.capacity_bytes for one in part.entries}
        return found, part.next_token

    first, second = (client.create(f"pvc-{number}", EXTENT, block()) for number in range(2))
    all_of_it = {one.volume_id: one.capacity_bytes for one in (first, second)}
    assert listed() == listed() == (all_of_it, "")
    least, greatest = sorted(all_of_it)
    assert listed(1) == ({least: EXTENT}, greatest)
    client.expand(least, 3 * EXTENT)
    assert listed(1) == ({least: 3 * EXTENT}, greatest)
    client.delete(greatest)
    assert listed(1) == listed() == ({least: 3 * EXTENT}, "")
    client.delete(least)
    assert listed() == ({}, "")
    again = client.create("pvc-0", EXTENT, block())
    assert listed() == ({again.volume_id: EXTENT}, "")


@pytest.mark.variation
def test_a_token_that_was_not_given_out_is_aborted(client: Client) -> None:
    with expect.code("ABORTED", "starting_token"):
        client.controller.ListVolumes(csi.ListVolumesRequest(starting_token="made-up"))  # noqa: S106


@pytest.mark.variation
def test_a_negative_page_is_refused(client: Client) -> None:
    with expect.code("INVALID_ARGUMENT", "max_entries"):
        client.controller.ListVolumes(csi.ListVolumesRequest(max_entries=-1))


@pytest.mark.variation
def test_one_volume_can_be_looked_up(client: Client, group: str) -> None:
    volume = client.create("pvc-1", 16 * MIB)
    request = csi.ControllerGetVolumeRequest(volume_id=volume.volume_id)
    assert client.controller.ControllerGetVolume(request).volume == volume
    request.volume_id += "x"
    with expect.code("NOT_FOUND"):
        client.controller.ControllerGetVolume(request)


def validate(
    client: Client,
    volume_id: str,
    *capabilities: csi.VolumeCapability,
    context: Mapping[str, str] | None = None,
    parameters: Mapping[str, str] | None = None,
) -> csi.ValidateVolumeCapabilitiesResponse:
    request = csi.ValidateVolumeCapabilitiesRequest(
        volume_id=volume_id,
        volume_capabilities=capabilities,
        volume_context=context,
        parameters=parameters,
    )
    return client.controller.ValidateVolumeCapabilities(request)


@pytest.mark.variation
def test_capabilities_are_confirmed_or_refused_with_a_reason(client: Client, host: AnyHost) -> None:
    volume = client.create("pvc-1", 64 * MIB)
    assert validate(client, volume.volume_id, mounted("ext4"), block()).HasField("confirmed")
    small = validate(client, volume.volume_id, mounted("xfs"))
    assert not small.HasField("confirmed")
    assert "xfs needs" in small.message
    shared = validate(client, volume.volume_id, block(Mode.MULTI_NODE_READER_ONLY))
    assert "MULTI_NODE_READER_ONLY" in shared.message
    client.stage(volume, host.directory / "staging")
    assert "ext4" in validate(client, volume.volume_id, mounted("btrfs")).message


MADE = {"carver/class": "plain", "carver/fsType": "ext4", "carver/mkfsOptions": "-i  8192"}


@pytest.mark.parametrize(
    ("context", "parameters"),
    [
        ({}, {}),
        ({}, MADE),
        ({}, {"class": "plain"}),
        ({}, {"csi.storage.k8s.io/fstype": "ext4", "mkfsOptions": "-i 8192"}),
        ({"storage.kubernetes.io/csiProvisionerIdentity": "1"}, {}),
        ({**MADE, "storage.kubernetes.io/csiProvisionerIdentity": "1"}, MADE),
    ],
)
@pytest.mark.variation
def test_what_a_volume_was_made_with_is_confirmed(
    client: Client, context: dict[str, str], parameters: dict[str, str]
) -> None:
    volume = client.create("pvc-1", 16 * MIB, mounted(), parameters=MADE)
    told = validate(client, volume.volume_id, mounted(), context=context, parameters=parameters)
    assert told.HasField("confirmed"), told.message
    assert told.confirmed.volume_context == volume.volume_context


@pytest.mark.parametrize(
    ("context", "parameters", "words"),
    [
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
)
@pytest.mark.variation
def test_what_a_volume_was_not_made_with_is_not_confirmed(
    client: Client, context: dict[str, str], parameters: dict[str, str], words: list[str]
) -> None:
    volume = client.create("pvc-1", 16 * MIB, mounted(), parameters=MADE)
    told = validate(client, volume.volume_id, mounted(), context=context, parameters=parameters)
    assert not told.HasField("confirmed")
    assert all(word in told.message for word in words), told.message


@pytest.mark.variation
def test_a_class_for_both_is_confirmed_for_a_raw_block_volume(client: Client) -> None:
    volume = client.create("pvc-1", 16 * MIB, block(), parameters=MADE)
    context = dict(volume.volume_context)
    told = validate(client, volume.volume_id, block(), context=context, parameters=MADE)
    assert told.HasField("confirmed"), told.message


@pytest.mark.variation
def test_a_capability_s_file_system_goes_before_the_parameters(client: Client) -> None:
    volume = client.create("pvc-1", 300 * MIB, mounted("xfs"), parameters={"fsType": "ext4"})
    told = validate(client, volume.volume_id, mounted("xfs"), parameters={"fsType": "ext4"})
    assert told.HasField("confirmed"), told.message


@pytest.mark.variation
def test_capabilities_of_no_volume_are_not_found(client: Client) -> None:
    with expect.code("NOT_FOUND"):
        validate(client, "made-up", block())
    with expect.code("INVALID_ARGUMENT", "volume_capabilities"):
        validate(client, "made-up")


def test_a_volume_grows_and_never_shrinks(client: Client) -> None:
    volume = client.create("pvc-1", 2 * EXTENT, block())
    assert client.expand(volume.volume_id, 2 * EXTENT + 1).capacity_bytes == 3 * EXTENT
    assert client.expand(volume.volume_id, EXTENT).capacity_bytes == 3 * EXTENT


@pytest.mark.variation
def test_a_volume_does_not_grow_beyond_its_group(client: Client) -> None:
    volume = client.create("pvc-1", EXTENT, block())
    free = client.capacity().available_capacity
    with expect.code("OUT_OF_RANGE", str(free)):
        client.expand(volume.volume_id, EXTENT + free + 1)
    assert client.expand(volume.volume_id, EXTENT + free).capacity_bytes == EXTENT + free


@pytest.mark.variation
def test_growth_above_the_limit_is_out_of_range(client: Client) -> None:
    volume = client.create("pvc-1", 2 * EXTENT, block())
    for required, limit in ((2 * EXTENT + 1, 2 * EXTENT + 2), (1, EXTENT)):
        request = csi.ControllerExpandVolumeRequest(
            volume_id=volume.volume_id,
            capacity_range=csi.CapacityRange(required_bytes=required, limit_bytes=limit),
        )
        with expect.code("OUT_OF_RANGE", "limit_bytes"):
            client.controller.ControllerExpandVolume(request)


@pytest.mark.variation
def test_growing_needs_a_volume_and_a_range(client: Client) -> None:
    with expect.code("NOT_FOUND"):
        client.expand("made-up", EXTENT)
    with expect.code("INVALID_ARGUMENT", "volume_id"):
        client.expand("", EXTENT)
    with expect.code("INVALID_ARGUMENT", "capacity_range"):
        request = csi.ControllerExpandVolumeRequest(volume_id="made-up")
        client.controller.ControllerExpandVolume(request)


@pytest.mark.variation
def test_what_is_not_offered_is_unimplemented(client: Client) -> None:
    with expect.code("UNIMPLEMENTED"):
        client.controller.ControllerPublishVolume(csi.ControllerPublishVolumeRequest())
    source = csi.VolumeContentSource()
    with expect.code("INVALID_ARGUMENT", "volume_content_source"):
        request = csi.CreateVolumeRequest(
            name="pvc-1", volume_capabilities=[block()], volume_content_source=source
        )
        client.controller.CreateVolume(request)


@pytest.mark.variation
def test_options_are_checked_for_their_file_system_before_anything_is_made(
    client: Client,
) -> None:
    with expect.code("INVALID_ARGUMENT", "mount_flags", "nouuid"):
        client.create("pvc-1", 64 * MIB, mounted("ext4", ["nouuid"]))
    with expect.code("INVALID_ARGUMENT", "mountOptions", "nouuid"):
        client.create("pvc-1", 64 * MIB, mounted("ext4"), parameters={"mountOptions": "nouuid"})
    assert client.volumes() == []


@pytest.mark.variation
def test_two_file_systems_at_once_are_refused(client: Client) -> None:
    with expect.code("INVALID_ARGUMENT", "ext4", "xfs"):
        client.create("pvc-1", 512 * MIB, mounted("ext4"), mounted("xfs"))


@pytest.mark.variation
def test_one_class_with_mkfs_options_serves_raw_block_too(client: Client) -> None:
    parameters = {"mkfsOptions": "-i 8192"}
    assert client.create("pvc-1", 16 * MIB, block(), parameters=parameters)


@pytest.mark.variation
def test_a_raw_block_volume_is_not_confirmed_for_a_mount(client: Client) -> None:
    volume = client.create("pvc-1", 64 * MIB, block())
    assert "raw block" in validate(client, volume.volume_id, mounted("ext4")).message


@pytest.mark.variation
def test_an_empty_range_to_grow_into_is_refused(client: Client) -> None:
    volume = client.create("pvc-1", 64 * MIB, block())
    with expect.code("INVALID_ARGUMENT", "capacity_range"):
        client.expand(volume.volume_id, 0)
