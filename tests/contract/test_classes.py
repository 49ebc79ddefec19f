"""Device classes: a volume of each layout, made, found, grown and removed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import chosen
import configured
import expect
import pytest
from fakes.host import FakeHost
from real.any import AnyHost

from agent.core.classes import DeviceClass
from agent.core.ids import VolumeId
from agent.core.records import Volume
from agent.core.settings import Config
from agent.csi.client import Client, block, mounted, of_snapshot, of_volume
from lvm import report, tags
from lvm.layout import Layout, Reserve

MIB = 1 << 20
EXTENT = 4 * MIB
# Whole extents on every stripe of each layout.
SIZE, GROWN = 24 * MIB, 48 * MIB
LAYOUTS = {
    **configured.LAYOUTS,
    "striped": Layout("striped", stripes=2, stripe_size_bytes=8192),
}


@pytest.fixture
def group(host: AnyHost) -> str:
    """Six disks, no two of the same size."""
    return host.new_group(9, 10, 11, 12, 14, 16)


@pytest.fixture
def config(config: Config, group: str) -> Config:
    classes = configured.classes(group, LAYOUTS)
    spare = DeviceClass(name="spare", group=group, reserve=Reserve(percent=50))
    return Config(**{**vars(config), "classes": (*classes, spare)})


@pytest.fixture
def free(host: AnyHost, group: str) -> Iterator[None]:
    """The group's free extents are the same afterwards."""
    before = report.read(host.lvm).group(group).free_extents
    yield
    assert report.read(host.lvm).group(group).free_extents == before


def maximum(client: Client, name: str) -> int:
    return client.capacity({"class": name}).maximum_volume_size.value


@pytest.mark.parametrize("name", chosen.kinds(LAYOUTS, usual=["raid5", "thin"]))
def test_a_volume_of_each_layout_lives_and_grows_while_mounted(
    client: Client, host: AnyHost, group: str, name: str, free: None
) -> None:
    staging, target = host.directory / "staging", host.directory / "target"
    volume = client.create("pvc-1", SIZE, parameters={"class": name})
    kind = report.read(host.lvm).group(group).volume("vol-pvc-1").layout
    assert LAYOUTS[name].kind in kind
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
    for number, (source, size) in enumerate(
        (
            (of_snapshot(snapshot.snapshot_id), 40 * MIB),
            (of_volume(origin.volume_id), 24 * MIB),
        )
    ):
        copy = client.create(f"copy-{number}", size, use, parameters=parameters, source=source)
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
@pytest.mark.parametrize("is_wanted", [True, False], ids=["created", "deleted"])
def test_a_raid_over_whose_making_lvm2_died_is_made_anew_or_deleted(
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
    size = maximum(client, name)
    with expect.code("RESOURCE_EXHAUSTED", str(size), name):
        client.create("pvc-1", size + 1, block(), parameters={"class": name})
    volume = client.create("pvc-1", size, block(), parameters={"class": name})
    assert volume.capacity_bytes == size
    client.delete(volume.volume_id)


@pytest.mark.parametrize("name", chosen.kinds(LAYOUTS, usual=["raid6"]))
def test_a_volume_of_each_layout_grows_as_far_as_its_disks_go(
    client: Client, name: str, free: None
) -> None:
    volume = client.create("pvc-1", SIZE, block(), parameters={"class": name})
    try:
        client.expand(volume.volume_id, 1 << 40)
    except Exception as error:
        room = int(str(error).partition("has room for ")[2].partition(" ")[0])
    with expect.code("OUT_OF_RANGE"):
        client.expand(volume.volume_id, SIZE + room + 1)
    assert client.expand(volume.volume_id, SIZE + room).capacity_bytes == SIZE + room
    client.delete(volume.volume_id)


@pytest.mark.variation
def test_striped_or_mirrored_silently_becoming_linear(
    client: Client, host: AnyHost, group: str
) -> None:
    for number, name in enumerate(("striped", "raid1", "raid5")):
        client.create(f"pvc-{number}", 8 * MIB, block(), parameters={"class": name})
        with expect.code("ALREADY_EXISTS"):
            client.create(f"pvc-{number}", 8 * MIB, block(), parameters={"class": "linear"})
        found = report.read(host.lvm).group(group).volume(f"vol-pvc-{number}")
        assert "linear" not in found.layout
        assert len(found.disks) == LAYOUTS[name].disks


@pytest.mark.variation
def test_sizes_are_whole_extents_on_every_stripe(client: Client) -> None:
    volume = client.create("pvc-1", 1, block(), parameters={"class": "raid6"})
    assert volume.capacity_bytes == 3 * EXTENT
    with expect.code("OUT_OF_RANGE", "3 times"):
        client.create("pvc-2", 1, block(), limit_bytes=2 * EXTENT, parameters={"class": "raid6"})


@pytest.mark.variation
def test_a_reserve_is_kept_by_capacity_create_and_growth(client: Client) -> None:
    parameters = {"class": "spare"}
    assert maximum(client, "spare") == 36 * EXTENT
    volume = client.create("pvc-1", 30 * EXTENT, block(), parameters=parameters)
    with expect.code("RESOURCE_EXHAUSTED"):
        client.create("pvc-2", 7 * EXTENT, block(), parameters=parameters)
    with expect.code("OUT_OF_RANGE"):
        client.expand(volume.volume_id, 37 * EXTENT)
    assert client.expand(volume.volume_id, 36 * EXTENT).capacity_bytes == 36 * EXTENT
    assert maximum(client, "spare") == 0
    assert maximum(client, "linear") == 36 * EXTENT


def test_a_mounted_volume_of_a_mirrored_class_says_what_staging_needs(
    client: Client, tmp_path: Path
) -> None:
    volume = client.create("pvc-1", 8 * MIB, mounted(), parameters={"class": "raid1"})
    assert volume.volume_context["carver/class"] == "raid1"


# What a StorageClass may override


def test_a_storage_class_overrides_the_layout_of_its_class(
    client: Client, host: AnyHost, group: str, free: None
) -> None:
    wider = {"class": "striped", "carver/stripes": "3", "carver/stripeSize": "16KiB"}
    volume = client.create("pvc-1", 24 * MIB, block(), parameters=wider)
    found = report.read(host.lvm).group(group).volume("vol-pvc-1")
    assert len(found.disks) == 3
    assert client.create("pvc-1", 24 * MIB, block(), parameters=wider) == volume
    with expect.code("ALREADY_EXISTS", "layout"):
        client.create("pvc-1", 24 * MIB, block(), parameters={"class": "striped"})
    assert client.expand(volume.volume_id, 36 * MIB).capacity_bytes == 36 * MIB
    client.delete(volume.volume_id)


@pytest.mark.variation
def test_capacity_is_that_of_the_layout_as_it_is_overridden(client: Client, free: None) -> None:
    for overrides, disks, stripes, metadata in (
        ({"class": "striped", "stripes": "4"}, 4, 4, 0),
        ({"class": "raid1", "mirrors": "2"}, 3, 1, 1),
        ({"class": "raid5", "stripes": "4"}, 5, 4, 1),
    ):
        roomiest = sorted((9, 10, 11, 12, 14, 16))[-disks:]
        size = client.capacity(overrides).maximum_volume_size.value
        assert size == (roomiest[0] - metadata) * stripes * EXTENT
        with expect.code("RESOURCE_EXHAUSTED", str(size)):
            client.create("pvc-1", size + 1, block(), parameters=overrides)
        volume = client.create("pvc-1", size, block(), parameters=overrides)
        assert volume.capacity_bytes == size
        client.delete(volume.volume_id)


@pytest.mark.variation
def test_an_override_that_asks_for_more_disks_than_there_are_says_how_many(client: Client) -> None:
    wide = {"class": "striped", "stripes": "7"}
    assert client.capacity(wide).maximum_volume_size.value == 0
    with expect.code("RESOURCE_EXHAUSTED", "striped on 7 of 6 disks"):
        client.create("pvc-1", 28 * MIB, block(), parameters=wide)


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
def test_an_override_that_cannot_be_is_refused_by_its_name(
    client: Client, parameters: dict[str, str], words: list[str]
) -> None:
    with expect.code("INVALID_ARGUMENT", *words):
        client.create("pvc-1", SIZE, block(), parameters=parameters)
    with expect.code("INVALID_ARGUMENT", *words):
        client.capacity(parameters)


def test_a_raid_in_use_that_lvm2_died_over_while_it_got_images_is_not_made_anew(
    client: Client, host: AnyHost, group: str
) -> None:
    client.create("pvc-1", SIZE, block(), parameters={"class": "raid1"})
    found = report.read(host.lvm).group(group)
    parts = {f"vol-pvc-1_rmeta_{number}": found.volume("vol-pvc-1") for number in range(2)}
    first, second = parts
    own_tags = tags.decode(found.volume("vol-pvc-1").tags)

    def seen(*bare: str, **more: str) -> Volume:
        within = replace(found, volumes={**found.volumes, **{one: parts[one] for one in bare}})
        return Volume(
            VolumeId.of(found, "vol-pvc-1"), within, "vol-pvc-1", SIZE, {**own_tags, **more}
        )

    assert seen(first, second).is_half_made
    assert not seen(first).is_half_made
    assert not seen(second).is_half_made
    assert not seen(first, second, formatted="ext4").is_half_made
    assert not seen(first, second, layout="linear:1:0:0").is_half_made


@pytest.mark.parametrize("is_wanted", [True, False], ids=["staged", "deleted"])
def test_a_raid_of_which_parts_were_left_active_is_activated(
    client: Client, host: AnyHost, group: str, free: None, is_wanted: bool
) -> None:
    volume = client.create("pvc-1", SIZE, block(), parameters={"class": "raid1"})
    host.leave_parts(group, "vol-pvc-1", "_rimage_0", "_rmeta_0")
    if is_wanted:
        client.stage(volume, host.directory / "staging", block())
        client.unstage(volume.volume_id, host.directory / "staging")
    client.delete(volume.volume_id)
