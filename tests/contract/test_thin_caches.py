"""Thin classes whose pool has a cache: data on slow disks, what is hot or new on fast ones."""

from collections.abc import Iterator

import chosen
import expect
import pytest
import tiers
from real.any import AnyHost, device
from real.host import RealHost
from tiers import FAST, SLOW, free

from agent.core.classes import DeviceClass
from agent.core.settings import Config
from agent.csi.client import Client, block, of_snapshot, of_volume
from agent.daemon.server import Service
from lvm import caches, report, tags, volumes
from lvm.caches import Cache
from lvm.layout import Layout, Reserve
from lvm.thin import Policy

MIB = 1 << 20
EXTENT = 4 * MIB
# Of 48 slow extents, and of 22 fast ones.
CACHES = {
    "cache": Cache(),
    "writeback": Cache(mode="writeback", size=Reserve(size_bytes=20 * MIB)),
    "writecache": Cache("writecache", "writeback", Reserve(percent=20)),
}
EXTENTS = {"cache": 5, "writeback": 5, "writecache": 10}
EVERY = pytest.mark.parametrize("name", chosen.kinds(CACHES, usual=["writeback"]))


@pytest.fixture
def group(host: AnyHost) -> str:
    """Two slow disks, and two fast ones."""
    return tiers.new_group(host)


@pytest.fixture
def config(config: Config, group: str) -> Config:
    pool = Policy(size=Reserve(size_bytes=40 * MIB))
    thin = Layout("thin")
    classes = [DeviceClass(one, group, layout=thin, pool=pool, cache=CACHES[one]) for one in CACHES]
    plain = DeviceClass("plain", group, default=True)
    hot = DeviceClass("hot", group, cache=Cache(size=Reserve(size_bytes=sum(FAST) * EXTENT)))
    return Config(**{**vars(config), "classes": (*classes, plain, hot)})


def pool(host: AnyHost, group: str, name: str) -> report.LogicalVolume:
    return report.read(host.lvm).group(group).volume(f"pool-{name}")


@pytest.fixture(autouse=True)
def nothing_is_left(host: AnyHost, group: str, client: Client) -> Iterator[None]:
    """In the end all is deleted, and both tiers are free."""
    yield
    tiers.empty(client)
    assert set(report.read(host.lvm).group(group).volumes) == set()
    assert free(host, group) == (sum(SLOW), sum(FAST))


def started(host: AnyHost) -> list[str]:
    words = [one[1] for one in host.commands if one[0] == "lvm"]
    host.commands.clear()
    return words


@pytest.mark.variation
@EVERY
def test_the_first_volume_makes_the_pool_and_its_cache_and_others_share_both(
    client: Client, host: AnyHost, group: str, name: str
) -> None:
    parameters = {"class": name}
    host.commands.clear()
    client.create("pvc-1", 40 * MIB, block(), parameters=parameters)
    assert started(host) == ["fullreport", "lvcreate", "lvconvert", "lvcreate"]
    client.create("pvc-2", 40 * MIB, block(), parameters=parameters)
    assert started(host) == ["fullreport", "lvcreate"]
    made = pool(host, group, name)
    assert made.layout == {"thin", "pool", CACHES[name].kind}
    mode = CACHES[name].mode
    kept = tags.decode(made.tags)["cache"]
    assert kept == f"{CACHES[name].kind}:{mode}:{EXTENTS[name] * EXTENT}"
    # Ten of data, one of metadata, one of their spare.
    assert free(host, group) == (sum(SLOW) - 12, sum(FAST) - EXTENTS[name])
    if isinstance(host, RealHost) and CACHES[name].kind == "cache":
        modes = host.lvm("lvs", "--noheadings", "-a", "-o", "cache_mode", "--", group).split()
        assert set(modes) == {mode}


@pytest.mark.variation
@EVERY
def test_a_volume_lives_and_grows_while_mounted_and_is_staged_again(
    client: Client, host: AnyHost, group: str, name: str
) -> None:
    tiers.use(client, host, group, name, "vol-pvc-1", f"pool-{name}")


@pytest.mark.variation
@EVERY
def test_a_pool_grows_below_its_cache_and_what_was_written_stays(
    client: Client, host: AnyHost, group: str, service: Service, name: str
) -> None:
    client.create("pvc-1", 80 * MIB, block(), parameters={"class": name})
    path = device(host, group, "vol-pvc-1")
    pieces = [bytes([number]) * MIB for number in range(1, 32)]
    for number, piece in enumerate(pieces):
        host.write_bytes(path, number * MIB, piece)
    assert service.autoextender.step(0)
    grown = pool(host, group, name)
    assert grown.size_bytes > 40 * MIB
    assert CACHES[name].kind in grown.layout
    assert free(host, group)[1] == sum(FAST) - EXTENTS[name]
    for number, piece in enumerate(pieces):
        assert host.read_bytes(path, number * MIB, MIB) == piece
    host.write_bytes(path, 32 * MIB, pieces[0])
    for one in ("vol-pvc-1", f"pool-{name}"):
        host.deactivate(group, one)
    host.lvm("lvchange", "--activate", "y", "--ignoreactivationskip", "--", f"{group}/vol-pvc-1")
    path = device(host, group, "vol-pvc-1")
    for number, piece in enumerate((*pieces, bytes(MIB), pieces[0])):
        assert host.read_bytes(path, number * MIB, MIB) == piece


@EVERY
@pytest.mark.variation
def test_the_maximum_can_be_made_and_one_extent_more_cannot(
    client: Client, host: AnyHost, group: str, name: str
) -> None:
    parameters = {"class": name}
    most = client.capacity(parameters).maximum_volume_size.value
    assert most == (sum(SLOW) - 2) * EXTENT
    with expect.code("RESOURCE_EXHAUSTED"):
        client.create("pvc-1", most + 1, block(), parameters=parameters)
    client.create("pvc-1", most, block(), parameters=parameters)
    assert client.capacity(parameters).maximum_volume_size.value == 0


@pytest.mark.variation
def test_without_room_for_its_cache_no_pool_is_made(
    client: Client, host: AnyHost, group: str
) -> None:
    client.create("pvc-1", 20 * MIB, block(), parameters={"class": "hot"})
    assert client.capacity({"class": "cache"}).maximum_volume_size.value == 0
    with expect.code("RESOURCE_EXHAUSTED", "fast disks, which have 0 bytes free"):
        client.create("pvc-2", MIB, block(), parameters={"class": "cache"})
    assert set(report.read(host.lvm).group(group).volumes) == {"vol-pvc-1"}


@pytest.mark.variation
def test_the_cache_of_a_pool_is_not_for_a_storage_class_to_size(client: Client) -> None:
    parameters = {"class": "cache", "cacheSize": "1GiB"}
    with expect.code("INVALID_ARGUMENT", "parameters[cacheSize]", "its pool's"):
        client.create("pvc-1", MIB, block(), parameters=parameters)


@pytest.mark.variation
@pytest.mark.parametrize("keep", [True, False], ids=["parted", "never made"])
@EVERY
def test_a_pool_without_its_cache_gets_it_with_the_next_volume(
    client: Client, host: AnyHost, group: str, name: str, keep: bool
) -> None:
    client.create("pvc-1", 20 * MIB, block(), parameters={"class": name})
    path = device(host, group, "vol-pvc-1")
    host.write_bytes(path, 8 * MIB, data := b"contents" * 512)
    caches.split(host.lvm, pool(host, group, name))
    if not keep:
        volumes.remove(host.lvm, group, f"pool-{name}_cache")
    assert pool(host, group, name).layout == {"thin", "pool"}
    client.create("pvc-2", 20 * MIB, block(), parameters={"class": name})
    assert pool(host, group, name).layout == {"thin", "pool", CACHES[name].kind}
    assert host.read_bytes(path, 8 * MIB, len(data)) == data
    assert free(host, group)[1] == sum(FAST) - EXTENTS[name]


@pytest.mark.variation
@EVERY
def test_snapshots_and_clones_share_the_pool_and_its_cache(
    client: Client, host: AnyHost, group: str, name: str
) -> None:
    parameters = {"class": name}
    volume = client.create("pvc-1", 20 * MIB, block(), parameters=parameters)
    path = device(host, group, "vol-pvc-1")
    before, after = b"before  " * 512, b"after   " * 512
    host.write_bytes(path, 8 * MIB, before)
    snapshot = client.snapshot("1", volume.volume_id)
    host.write_bytes(path, 8 * MIB, after)
    room = free(host, group)
    for source, contents in (
        (of_snapshot(snapshot.snapshot_id), before),
        (of_volume(volume.volume_id), after),
    ):
        made = client.create("pvc-2", 0, block(), parameters=parameters, source=source)
        assert host.read_bytes(device(host, group, "vol-pvc-2"), 8 * MIB, 4096) == contents
        client.delete(made.volume_id)
    assert free(host, group) == room
    copy = client.create("pvc-3", 0, block(), source=of_volume(volume.volume_id))
    assert host.read_bytes(device(host, group, "vol-pvc-3"), 8 * MIB, 4096) == after
    client.delete(copy.volume_id)


@EVERY
def test_what_was_in_a_pool_and_its_cache_is_overwritten_before_it_is_free(
    client: Client, host: AnyHost, group: str, name: str
) -> None:
    volume = client.create("pvc-1", 40 * MIB, block(), parameters={"class": name})
    secret = b"tenant's secret\n" * (MIB // 16)
    path = device(host, group, "vol-pvc-1")
    for at in range(24):
        host.write_bytes(path, at * MIB, secret)
    zeroed = tiers.erased(client, host, group, volume, f"pool-{name}", secret[:4096])
    assert zeroed is None or sum(size for _, size in zeroed) == EXTENTS[name] * EXTENT


@pytest.mark.variation
@EVERY
def test_an_empty_pool_that_is_not_active_is_given_back_with_its_cache(
    client: Client, service: Service, host: AnyHost, group: str, name: str
) -> None:
    """As an earlier process, or a reboot, left it."""
    volume = client.create("pvc-1", 20 * MIB, block(), parameters={"class": name})
    host.write_bytes(device(host, group, "vol-pvc-1"), 0, b"contents" * (MIB // 8))
    host.lvm("lvremove", "--yes", "--", f"{group}/vol-pvc-1")
    host.deactivate(group, f"pool-{name}")
    service.inventory.state()
    assert service.pool_remover.resume() == 1
    service.pool_remover.give_back(group, f"pool-{name}").result(600)
    assert free(host, group) == (sum(SLOW), sum(FAST))
    client.delete(volume.volume_id)
