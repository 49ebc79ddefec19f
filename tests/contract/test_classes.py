"""Device classes: a volume of each layout, made, found, grown and removed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import chosen
import configured
import expect
import grpc
import pytest
from fakes.host import FakeHost
from real.any import AnyHost

from agent.core import errors, tag
from agent.core.ids import VolumeId
from agent.csi.client import Client, block, mounted, of_snapshot, of_volume
from agent.requests.parameters import STORAGE_CLASS, Parameter, Parameters
from agent.settings.classes import DeviceClass
from agent.volumes import backing
from agent.volumes.records import Volume
from lvm import report
from lvm.caches import Cache
from lvm.layout import Layout, Reserve
from lvm.room import Room
from proto import csi_pb2 as csi

MIB = 1 << 20
EXTENT = 4 * MIB
# Whole extents on every stripe of each layout.
SIZE, GROWN = 24 * MIB, 48 * MIB
LAYOUTS = {
    **configured.LAYOUTS,
    "striped": Layout("striped", stripes=2, stripe_size_bytes=8192),
}
pytestmark = [
    # Six disks, no two of the same size.
    pytest.mark.groups(data=[9, 10, 11, 12, 14, 16]),
    pytest.mark.settings(
        classes=(
            *configured.classes("data", LAYOUTS),
            DeviceClass("spare", "data", reserve=Reserve(percent=50)),
        )
    ),
]


@pytest.fixture
def free(host: AnyHost, group: str) -> Iterator[None]:
    """The group's free extents are the same afterwards."""
    before = Room(report.read(host.lvm).group(group)).free_extents
    yield
    assert Room(report.read(host.lvm).group(group)).free_extents == before


def create(client: Client, kind: str, size: int, name: str = "pvc-1", **more: str) -> csi.Volume:
    """Create a raw block volume of a class, with more parameters."""
    return client.create(name, size, block(), parameters={"class": kind, **more})


def maximum(client: Client, kind: str, **more: str) -> int:
    return client.capacity({"class": kind, **more}).maximum_volume_size.value


def check_maximum(client: Client, size: int, kind: str, **more: str) -> None:
    """The reported maximum can be created, and one byte more cannot."""
    assert maximum(client, kind, **more) == size
    with expect.code("RESOURCE_EXHAUSTED", str(size), kind):
        create(client, kind, size + 1, **more)
    volume = create(client, kind, size, **more)
    assert volume.capacity_bytes == size
    client.delete(volume.volume_id)


@pytest.mark.parametrize("name", chosen.kinds(LAYOUTS, usual=["raid5"]))
def test_a_volume_of_each_layout_lives_and_grows_while_mounted(
    client: Client, host: AnyHost, group: str, name: str, free: None
) -> None:
    staging, target = host.directory / "staging", host.directory / "target"
    volume = client.create("pvc-1", SIZE, parameters={"class": name})
    logical = report.read(host.lvm).group(group).volume("vol-pvc-1")
    assert LAYOUTS[name].kind in logical.layout
    assert LAYOUTS[name].is_thin or len(logical.disks) == LAYOUTS[name].disks
    client.stage(volume, staging)
    client.publish(volume, staging, target)
    (staging / "data").write_bytes(b"data" * MIB)

    assert client.node_expand(volume.volume_id, target, GROWN).capacity_bytes == GROWN
    assert client.stats(volume.volume_id, target).usage[0].total > 32 * MIB

    assert (staging / "data").read_bytes() == b"data" * MIB
    (staging / "data").unlink()
    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
    client.delete(volume.volume_id)


@pytest.mark.variation
@pytest.mark.parametrize("text", ["", "raid7:1:1:0"], ids=["lost", "unreadable"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_without_its_tag_a_volume_grows_in_the_layout_that_it_has(
    client: Client, host: AnyHost, group: str, name: str, text: str
) -> None:
    volume = create(client, name, SIZE)
    before = report.read(host.lvm).group(group).volume("vol-pvc-1")
    host.lvm("lvchange", "--deltag", f"carver.layout={LAYOUTS[name]}", "--", f"{group}/vol-pvc-1")
    if text:
        host.lvm("lvchange", "--addtag", f"carver.layout={text}", "--", f"{group}/vol-pvc-1")
    # By a size that is whole extents on every stripe, or else it is rounded up to one.
    assert client.expand(volume.volume_id, GROWN - 1).capacity_bytes == GROWN
    after = report.read(host.lvm).group(group).volume("vol-pvc-1")
    assert (after.layout, after.size_bytes) == (before.layout, GROWN)
    assert LAYOUTS[name].is_linear or after.disks == before.disks
    client.delete(volume.volume_id)


@pytest.mark.variation
def test_a_volume_that_was_converted_by_hand_grows_in_the_layout_that_it_has_now(
    client: Client, host: AnyHost, group: str, free: None
) -> None:
    """Its tag says what it was made as; its images stay on their own disks."""
    volume = create(client, "linear", SIZE)
    host.lvm("lvconvert", "--yes", "--type", "raid1", "--mirrors", "1", "--", f"{group}/vol-pvc-1")
    before = report.read(host.lvm).group(group)
    made = before.volume("vol-pvc-1")
    own = [disk.unallocated_extents for disk in before.disks if disk.uuid in made.disks]
    assert len(own) == 2
    most = SIZE + min(own) * EXTENT
    with expect.code("OUT_OF_RANGE", "raid1"):
        client.expand(volume.volume_id, most + 1)
    assert client.expand(volume.volume_id, most).capacity_bytes == most
    after = report.read(host.lvm).group(group).volume("vol-pvc-1")
    assert (after.layout, after.disks) == (made.layout, made.disks)
    # A repeated call asks for what it was made as, and finds it so.
    assert client.confirms(volume.volume_id, block())
    client.delete(volume.volume_id)


def _write_tree(place: Path) -> None:
    """Files of many sizes, in directories of their own."""
    for number in range(20):
        directory = place / f"directory-{number}"
        directory.mkdir()
        (directory / "file").write_bytes(bytes([number]) * (number * 7919))


def _is_tree(place: Path) -> bool:
    return all(
        (place / f"directory-{number}" / "file").read_bytes() == bytes([number]) * (number * 7919)
        for number in range(20)
    )


@pytest.mark.parametrize("name", chosen.kinds(LAYOUTS, usual=["thin"]))
def test_a_volume_of_each_layout_is_snapshotted_restored_larger_and_cloned(
    client: Client, host: AnyHost, name: str, free: None
) -> None:
    use, parameters = mounted("ext4"), {"class": name}
    origin = client.create("pvc-1", 12 * MIB, use, parameters=parameters)
    client.stage(origin, host.directory / "origin", use)
    _write_tree(host.directory / "origin")
    client.node_expand(origin.volume_id, host.directory / "origin", 24 * MIB)
    snapshot = client.snapshot("1", origin.volume_id)
    sources = {40: of_snapshot(snapshot.snapshot_id), 24: of_volume(origin.volume_id)}
    for mebibytes, source in sources.items():
        size = mebibytes * MIB
        copy = client.create(f"copy-{size}", size, use, parameters=parameters, source=source)
        assert copy.capacity_bytes >= size
        client.stage(copy, host.directory / "copy", use)
        assert client.stats(copy.volume_id, host.directory / "copy").usage[0].total > size * 0.6
        # A file system in memory holds no files.
        assert isinstance(host, FakeHost) or _is_tree(host.directory / "copy")
        client.unstage(copy.volume_id, host.directory / "copy")
        client.delete(copy.volume_id)
    client.unstage(origin.volume_id, host.directory / "origin")
    client.delete_snapshot(snapshot.snapshot_id)
    client.delete(origin.volume_id)


@pytest.mark.parametrize("name", chosen.kinds(["raid1", "raid5"], usual=["raid1"]))
@pytest.mark.parametrize(
    "is_wanted", chosen.kinds([True, False], usual=[True]), ids=["created", "deleted"]
)
def test_a_half_made_raid_is_made_anew_or_deleted(
    client: Client, host: AnyHost, group: str, free: None, name: str, is_wanted: bool
) -> None:
    volume = client.create("pvc-1", SIZE, parameters={"class": name})
    host.half_make_raid(group, "vol-pvc-1", LAYOUTS[name])
    assert [one.volume_id for one in client.volumes()] == [volume.volume_id]
    if is_wanted:
        assert client.create("pvc-1", SIZE, parameters={"class": name}) == volume
        staging = host.directory / "staging"
        client.stage(volume, staging)
        client.unstage(volume.volume_id, staging)
    client.delete(volume.volume_id)
    assert client.volumes() == []


@pytest.mark.parametrize("name", chosen.kinds(LAYOUTS, usual=["raid6"]))
def test_the_maximum_of_each_layout_can_be_made_and_one_extent_more_cannot(
    client: Client, name: str, free: None
) -> None:
    check_maximum(client, maximum(client, name), name)


@pytest.mark.variation
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_volume_of_each_layout_grows_to_the_reported_room(
    client: Client, name: str, free: None
) -> None:
    volume = create(client, name, SIZE)
    with pytest.raises(grpc.RpcError, match="has room for") as refused:
        client.expand(volume.volume_id, 1 << 40)
    room = int(str(refused.value).partition("has room for ")[2].partition(" ")[0])
    with expect.code("OUT_OF_RANGE"):
        client.expand(volume.volume_id, SIZE + room + 1)
    assert client.expand(volume.volume_id, SIZE + room).capacity_bytes == SIZE + room
    client.delete(volume.volume_id)


@pytest.mark.variation
def test_sizes_are_whole_extents_on_every_stripe(client: Client) -> None:
    assert create(client, "raid6", 1).capacity_bytes == 3 * EXTENT
    with expect.code("OUT_OF_RANGE", "3 at a time"):
        client.create("pvc-2", 1, block(), limit_bytes=2 * EXTENT, parameters={"class": "raid6"})


@pytest.mark.variation
def test_capacity_create_and_growth_keep_the_reserve(client: Client) -> None:
    assert maximum(client, "spare") == 36 * EXTENT
    volume = create(client, "spare", 30 * EXTENT)
    with expect.code("RESOURCE_EXHAUSTED"):
        create(client, "spare", 7 * EXTENT, "pvc-2")
    with expect.code("OUT_OF_RANGE"):
        client.expand(volume.volume_id, 37 * EXTENT)
    assert client.expand(volume.volume_id, 36 * EXTENT).capacity_bytes == 36 * EXTENT
    assert maximum(client, "spare") == 0
    assert maximum(client, "linear") == 36 * EXTENT


@pytest.mark.variation
def test_a_storage_class_overrides_the_layout_of_its_class(
    client: Client, host: AnyHost, group: str, free: None
) -> None:
    wider = {"carver/stripes": "3", "carver/stripeSize": "16KiB"}
    volume = create(client, "striped", 24 * MIB, **wider)
    found = report.read(host.lvm).group(group).volume("vol-pvc-1")
    assert len(found.disks) == 3
    assert create(client, "striped", 24 * MIB, **wider) == volume
    # What a call does not say is not compared.
    assert create(client, "striped", 24 * MIB) == volume
    with expect.code("ALREADY_EXISTS", "stripes"):
        create(client, "striped", 24 * MIB, **{**wider, "carver/stripes": "2"})
    assert client.expand(volume.volume_id, 36 * MIB).capacity_bytes == 36 * MIB
    client.delete(volume.volume_id)


@pytest.mark.variation
def test_capacity_is_that_of_the_overridden_layout(client: Client, free: None) -> None:
    # The extents of the smallest disk that is used, on each stripe, without those for metadata.
    check_maximum(client, 11 * 4 * EXTENT, "striped", stripes="4")
    check_maximum(client, (12 - 1) * EXTENT, "raid1", mirrors="2")
    check_maximum(client, (10 - 1) * 4 * EXTENT, "raid5", stripes="4")


@pytest.mark.parametrize(
    "row", [row for row in STORAGE_CLASS if row.tag == tag.LAYOUT], ids=lambda row: row.key
)
def test_a_class_that_is_not_created_by_its_layout_takes_no_part_of_one(row: Parameter) -> None:
    asked = Parameters({row.key: "another"})
    for one in (
        DeviceClass("thin", "data", layout=Layout("thin")),
        DeviceClass("cached", "data", cache=Cache("cache", "writethrough")),
    ):
        with pytest.raises(errors.BadField, match=rf"{row.key}.*thin or has a cache"):
            asked.applied(one, "parameters")


@pytest.mark.variation
def test_an_override_that_needs_more_disks_than_there_are_says_how_many(client: Client) -> None:
    assert maximum(client, "striped", stripes="7") == 0
    with expect.code("RESOURCE_EXHAUSTED", "striped on 7 of 6 disks"):
        create(client, "striped", 28 * MIB, stripes="7")


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"class": "linear", "stripes": "2"}, ["parameters[stripes]", "linear has no stripes"]),
        ({"class": "linear", "stripeSize": "8Ki"}, ["parameters[stripeSize]", "no stripes"]),
        ({"class": "striped", "stripes": "1"}, ["parameters[stripes]", "2 stripes or more"]),
        ({"class": "striped", "mirrors": "1"}, ["parameters[mirrors]", "no mirrors"]),
        ({"class": "striped", "stripeSize": "5000"}, ["parameters[stripeSize]", "power of two"]),
        ({"class": "striped", "stripeSize": "8MiB"}, ["parameters[stripeSize]", "extent"]),
        ({"class": "striped", "stripes": "-2"}, ["parameters[stripes]", "'-2'", "0 or more"]),
        ({"class": "striped", "stripes": ""}, ["parameters[stripes]", "0 or more"]),
        ({"class": "raid1", "mirrors": "0"}, ["parameters[mirrors]", "1 mirror or more"]),
        ({"class": "raid6", "stripes": "2"}, ["parameters[stripes]", "3 stripes or more"]),
        ({"class": "striped", "layout": "linear"}, ["parameters", "'layout'", "carver/stripes"]),
    ],
    ids=str,
)
@pytest.mark.variation
def test_an_invalid_override_is_refused_by_its_name(
    client: Client, parameters: dict[str, str], words: list[str]
) -> None:
    with expect.code("INVALID_ARGUMENT", *words):
        client.create("pvc-1", SIZE, block(), parameters=parameters)
    with expect.code("INVALID_ARGUMENT", *words):
        client.capacity(parameters)


def test_a_raid_in_use_is_not_half_made_while_it_gets_images(
    client: Client, host: AnyHost, group: str
) -> None:
    create(client, "raid1", SIZE)
    found = report.read(host.lvm).group(group)
    parts = {f"vol-pvc-1_rmeta_{number}": found.volume("vol-pvc-1") for number in range(2)}
    first, second = parts
    own_tags = found.volume("vol-pvc-1").own_tags

    def seen(*bare: str, **more: str) -> Volume:
        within = replace(found, volumes={**found.volumes, **{one: parts[one] for one in bare}})
        return Volume(
            VolumeId.of(found, "vol-pvc-1"),
            backing.of(found, "vol-pvc-1"),
            within,
            SIZE,
            {**own_tags, **more},
        )

    assert seen(first, second).is_half_made
    assert not seen(first).is_half_made
    assert not seen(second).is_half_made
    assert not seen(first, second, formatted="ext4").is_half_made
    assert not seen(first, second, layout="linear:1:0:0").is_half_made


@pytest.mark.parametrize(
    "is_wanted", chosen.kinds([True, False], usual=[True]), ids=["staged", "deleted"]
)
def test_a_raid_with_active_parts_is_activated(
    client: Client, host: AnyHost, group: str, free: None, is_wanted: bool
) -> None:
    volume = create(client, "raid1", SIZE)
    host.leave_parts(group, "vol-pvc-1", "_rimage_0", "_rmeta_0")
    if is_wanted:
        client.stage(volume, host.directory / "staging", block())
        client.unstage(volume.volume_id, host.directory / "staging")
    client.delete(volume.volume_id)
