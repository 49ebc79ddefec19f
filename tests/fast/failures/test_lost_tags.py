"""Lost or overwritten tags, and volumes of others with Carver's names: nothing breaks."""

from dataclasses import replace
from pathlib import Path

import configured
import expect
import in_background
import pytest
import serving
from csi_client import Client
from fakes.host import FakeHost

from agent.csi.client import block, of_snapshot
from agent.daemon.server import Service
from agent.settings.settings import Config
from lvm import thin
from lvm.volumes import New

MIB = 1 << 20
EXTENT = 4 * MIB
SIZE = 8 * EXTENT
OWN = b"not Carver's".ljust(4096)
pytestmark = pytest.mark.settings(classes=(configured.PLAIN, configured.THIN))


def start(config: Config, fake: FakeHost) -> Service:
    """A second process, on what the first one made."""
    return serving.start(replace(config, endpoint=config.endpoint.with_name("2.sock")), fake)


THIN = {"class": "thin"}


@pytest.fixture
def made(client: Client, service: Service, fake: FakeHost) -> dict[str, set[str]]:
    """One of each, and the tags that they have."""
    service.copier.grace_seconds = 20
    one = client.create("1", SIZE, block())
    two = client.create("2", SIZE, block(), parameters=THIN)
    client.snapshot("1", one.volume_id)
    client.snapshot("2", two.volume_id)
    client.create("3", 0, block(), source=of_snapshot(client.snapshots()[0].snapshot_id))
    client.group_snapshot("nightly", [one.volume_id, two.volume_id])
    found = fake.lvm2.groups["data"].volumes.values()
    return {one.name: set(one.tags) for one in found}


def test_a_lost_or_overwritten_tag_breaks_no_list_and_no_start(
    client: Client, made: dict[str, set[str]], config: Config, fake: FakeHost
) -> None:
    volumes = fake.lvm2.groups["data"].volumes
    assert sum(len(one) for one in made.values()) > 40
    for name, own in made.items():
        for tag in own:
            key = tag.partition("=")[0]
            for others in (own - {tag}, own - {tag} | {f"{key}=&ff&zz"}):
                if not name.startswith("pool") and key in ("carver.name", "carver.state"):
                    continue  # then it is not Carver's, or is being erased
                volumes[name].tags = set(others)
                client.volumes()
                client.snapshots()
                client.capacity(parameters=THIN)
                again = start(config, fake)
                again.stop()
                assert set(volumes) == set(made), (name, tag)
        volumes[name].tags = set(own)


def test_a_tag_that_a_killed_process_did_not_write_is_written_by_the_next_call(
    client: Client, config: Config, fake: FakeHost, tmp_path: Path
) -> None:
    staging = tmp_path / "staging"
    made = client.create("1", SIZE)
    client.stage(made, staging)
    tags = fake.lvm2.groups["data"].volumes["vol-1"].tags
    tags.discard("carver.formatted=ext4")
    again = start(config, fake)
    with Client(tmp_path / "2.sock") as caller:
        caller.stage(made, staging)
    again.stop()
    assert "carver.formatted=ext4" in fake.lvm2.groups["data"].volumes["vol-1"].tags


def test_a_snapshot_without_its_size_is_as_large_as_its_origin(
    client: Client, made: dict[str, set[str]], fake: FakeHost
) -> None:
    snapshot = fake.lvm2.groups["data"].volumes["snap-1"]
    before = client.snapshots()
    snapshot.tags -= {f"carver.size={SIZE}", "carver.source=vol-1"}
    assert client.snapshots() == before


def test_a_pool_that_is_not_carver_s_is_not_used_and_not_erased(
    client: Client, service: Service, fake: FakeHost, config: Config
) -> None:
    group = fake.lvm2.groups["data"]
    client.create("1", EXTENT, block(), parameters=THIN)
    pool = group.volumes["pool-thin"]
    pool.tags.clear()
    pool.media.write(0, OWN)
    with expect.code("RESOURCE_EXHAUSTED", "data/pool-thin", "lvrename"):
        client.create("2", EXTENT, block(), parameters=THIN)
    assert client.capacity(parameters=THIN).available_capacity == 0
    assert client.capacity().available_capacity > 0
    [volume] = client.volumes()
    client.delete(volume.volume_id)
    start(config, fake).stop()
    assert set(group.volumes) == {"pool-thin"}
    assert pool.media.read(0, len(OWN)) == OWN


def create_by_hand(fake: FakeHost, name: str, size_bytes: int, *tags: str) -> None:
    fake.lvm(
        *("lvcreate", "--yes", "--wipesignatures", "y", "--zero", "y", "--activate", "y"),
        *("--type", "linear", *tags, "--size", f"{size_bytes}b", "--name", name, "--", "data"),
    )


def test_a_volume_with_the_name_of_a_pool_is_not_used_as_one(
    client: Client, fake: FakeHost
) -> None:
    # All of a pool's tags but one: with that it would be what a killed lvm2 leaves of a pool.
    tags = ("--addtag", "carver.class=thin", "--addtag", "carver.chunk=65536")
    create_by_hand(fake, "pool-thin", EXTENT, *tags)
    with expect.code("RESOURCE_EXHAUSTED", "data/pool-thin"):
        client.create("2", EXTENT, block(), parameters=THIN)


def test_a_volume_with_the_name_of_the_one_that_erases_a_pool_is_not_erased(
    client: Client, service: Service, fake: FakeHost
) -> None:
    create_by_hand(fake, "wipe-thin", SIZE)
    group = fake.lvm2.groups["data"]
    group.volumes["wipe-thin"].media.write(0, OWN)
    client.delete(client.create("1", EXTENT, block(), parameters=THIN).volume_id)
    in_background.ended(service.pool_remover.jobs)
    assert group.volumes["wipe-thin"].media.read(0, len(OWN)) == OWN
    assert set(group.volumes) == {"pool-thin", "wipe-thin"}


def test_a_thin_volume_of_others_is_not_taken_for_a_cache_that_was_parted(
    client: Client, service: Service, fake: FakeHost
) -> None:
    """It lies on no disk itself, and so on none that is not fast."""
    service.eraser.grace_seconds = 20
    client.create("2", EXTENT, block(), parameters=THIN)
    thin.create(fake.lvm, "data", "pool-thin", New("vol-1_cache", EXTENT, {}))
    volumes = fake.lvm2.groups["data"].volumes
    volumes["vol-1_cache"].media.write(0, OWN)
    client.delete(client.create("1", SIZE, block()).volume_id)
    assert set(volumes) == {"pool-thin", "vol-2", "vol-1_cache"}
    assert volumes["vol-1_cache"].media.read(0, len(OWN)) == OWN


@pytest.mark.parametrize("lost", ["class", "class of its own"])
def test_a_thin_volume_without_its_class_grows_in_the_pool_that_it_is_in(
    client: Client, fake: FakeHost, lost: str
) -> None:
    made = client.create("1", EXTENT, block(), parameters=THIN)
    tags = fake.lvm2.groups["data"].volumes["vol-1"].tags
    tags.remove("carver.class=thin")
    if lost != "class":
        tags.add("carver.class=plain")
    most = client.capacity(parameters=THIN).available_capacity
    with expect.code("OUT_OF_RANGE"):
        client.expand(made.volume_id, EXTENT + most + EXTENT)
    with expect.code("RESOURCE_EXHAUSTED"):
        client.create("2", most + EXTENT, block(), parameters=THIN)
    client.expand(made.volume_id, EXTENT + most)
    assert client.capacity(parameters=THIN).available_capacity == 0


@pytest.mark.parametrize("key", ["class", "chunk"])
def test_a_pool_with_two_values_of_a_tag_gets_no_new_volume_and_is_not_erased(
    client: Client, service: Service, fake: FakeHost, key: str
) -> None:
    volume = client.create("1", EXTENT, block(), parameters=THIN)
    pool = fake.lvm2.groups["data"].volumes["pool-thin"]
    pool.tags.add(f"carver.{key}=zzz")
    with expect.code("RESOURCE_EXHAUSTED", "lost a tag"):
        client.create("2", EXTENT, block(), parameters=THIN)
    assert client.capacity(parameters=THIN).available_capacity == 0
    client.delete(volume.volume_id)
    in_background.ended(service.pool_remover.jobs)
    assert set(fake.lvm2.groups["data"].volumes) == {"pool-thin"}
