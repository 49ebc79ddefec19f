"""Classes with a cache: volumes and pools on slow disks, what is hot or new on fast ones."""

from collections.abc import Iterator
from dataclasses import replace

import chosen
import expect
import in_background
import pytest
import serving
import tiers
from real.any import AnyHost, device
from real.host import RealHost
from tiers import FAST, SLOW, free

from agent.cli import status
from agent.csi.client import Client, block, of_snapshot, of_volume
from agent.daemon.server import Service
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from lvm import caches, report, volumes
from lvm.caches import Cache
from lvm.layout import Layout, Reserve
from lvm.thin import Policy
from mount import luks
from proto import csi_pb2 as csi

MIB = 1 << 20
EXTENT = 4 * MIB
MARK = b"not-for-the-disk".ljust(4096, b"\1")
CACHES = {
    "cache": Cache(),
    "writeback": Cache(mode="writeback", size=Reserve(size_bytes=20 * MIB)),
    "writecache": Cache("writecache", "writeback", Reserve(percent=50)),
}
# Of 48 slow extents, and of 22 fast ones.
POOL_CACHES = {
    "thin-cache": Cache(),
    "thin-writeback": Cache(mode="writeback", size=Reserve(size_bytes=20 * MIB)),
    "thin-writecache": Cache("writecache", "writeback", Reserve(percent=20)),
}
EXTENTS = {"thin-cache": 5, "thin-writeback": 5, "thin-writecache": 10}
EVERY = pytest.mark.parametrize("name", chosen.kinds(POOL_CACHES, usual=["thin-writeback"]))


@pytest.fixture
def group(host: AnyHost) -> str:
    """Two slow disks, and two fast ones."""
    return tiers.new_group(host)


@pytest.fixture
def config(config: Config, group: str) -> Config:
    classes = [DeviceClass(name=name, group=group, cache=cache) for name, cache in CACHES.items()]
    plain = DeviceClass(name="plain", group=group, default=True)
    striped = DeviceClass(name="striped", group=group, layout=Layout("striped", stripes=2))
    thin = DeviceClass(name="thin", group=group, layout=Layout("thin"), pool=Policy())
    sealed = [
        DeviceClass(**{**vars(one), "name": f"{one.name}-luks2", "encryption": "luks2"})
        for one in classes
    ]
    shredded = [
        DeviceClass(f"{name}-shredded", group, cache=cache, encryption="luks2", erase="crypto")
        for name, cache in (("plain", None), ("writeback", CACHES["writeback"]))
    ]
    pool, shape = Policy(size=Reserve(size_bytes=40 * MIB)), Layout("thin")
    pools = [
        DeviceClass(name, group, layout=shape, pool=pool, cache=cache)
        for name, cache in POOL_CACHES.items()
    ]
    hot = DeviceClass("hot", group, cache=Cache(size=Reserve(size_bytes=sum(FAST) * EXTENT)))
    classes += [*sealed, *shredded, *pools, plain, striped, thin, hot]
    return replace(config, classes=tuple(classes))


@pytest.fixture(autouse=True)
def nothing_is_left(host: AnyHost, group: str, client: Client) -> Iterator[None]:
    """In the end all is deleted, and both tiers are free."""
    yield
    tiers.empty(client)
    assert set(report.read(host.lvm).group(group).volumes) == set()
    assert free(host, group) == (sum(SLOW), sum(FAST))


@pytest.mark.parametrize("text", chosen.kinds(["", "newer:1:1:0"], usual=["newer:1:1:0"]))
@pytest.mark.long_on_lvm
def test_a_volume_whose_layout_nothing_tells_is_used_and_not_changed(
    client: Client, host: AnyHost, config: Config, group: str, text: str
) -> None:
    """Of a volume with a cache lvm2 reports the cache, and not how its data lie on disks."""
    staging = host.directory / "staging"
    volume = client.create("pvc-1", 48 * MIB, block(), parameters={"class": "cache"})
    host.lvm("lvchange", "--deltag", "carver.layout=linear:1:0:0", "--", f"{group}/vol-pvc-1")
    if text:
        host.lvm("lvchange", "--addtag", f"carver.layout={text}", "--", f"{group}/vol-pvc-1")
    before = report.read(host.lvm).group(group).volume("vol-pvc-1")
    with expect.code("FAILED_PRECONDITION", "layout", "cache"):
        client.expand(volume.volume_id, 96 * MIB)
    assert report.read(host.lvm).group(group).volume("vol-pvc-1").ranges == before.ranges
    # A pod starts with it as it is, and its node serves all else.
    client.stage(volume, staging, block())
    assert client.volumes() == [volume]
    assert client.unhealthy() == []
    machine = serving.machine(host)
    [shown] = status.read(replace(config, devices=host.lvm.devices), machine).volumes
    assert shown.layout == "cache"
    client.unstage(volume.volume_id, staging)
    client.delete(volume.volume_id)


def mapping(host: AnyHost, group: str) -> str:
    """The dm-crypt device over the volume."""
    below = host.devices.find(group, "vol-pvc-1")
    assert below is not None
    opened = host.devices.mapping(below)
    assert opened is not None
    return opened.path


def logical(host: AnyHost, group: str, name: str = "vol-pvc-1") -> report.LogicalVolume:
    return report.read(host.lvm).group(group).volume(name)


@pytest.mark.parametrize("name", chosen.kinds(CACHES, usual=["cache"]))
def test_a_cached_volume_lives_and_grows_while_mounted(
    client: Client, host: AnyHost, group: str, name: str
) -> None:
    volume = client.create("pvc-1", 40 * MIB, parameters={"class": name})
    assert tiers.use(client, host, group, name, "vol-pvc-1") == volume
    assert logical(host, group).layout == {CACHES[name].kind}


@pytest.mark.variation
@pytest.mark.parametrize("name", CACHES)
def test_the_cache_is_below_the_encryption(
    client: Client, host: AnyHost, group: str, name: str
) -> None:
    """What lies on the fast disks is ciphertext, as what lies on the slow ones is."""
    staging, key = host.directory / "staging", {"passphrase": "sesame"}
    volume = client.create("pvc-1", 40 * MIB, block(), parameters={"class": f"{name}-luks2"})
    assert volume.capacity_bytes == 40 * MIB
    assert logical(host, group).layout == {CACHES[name].kind}
    client.stage(volume, staging, block(), key)
    path, opened = device(host, group, "vol-pvc-1"), mapping(host, group)
    host.write_bytes(opened, 8 * MIB, MARK)
    assert host.read_bytes(opened, 8 * MIB, len(MARK)) == MARK
    header = luks.read(host.kernel, path)
    assert header is not None
    assert host.read_bytes(path, header.offset_bytes + 8 * MIB, len(MARK)) != MARK
    assert client.expand(volume.volume_id, 60 * MIB).capacity_bytes == 60 * MIB
    client.unstage(volume.volume_id, staging)

    host.deactivate(group, "vol-pvc-1")
    client.stage(volume, staging, block(), key)
    opened = mapping(host, group)
    assert host.kernel.device_size_bytes(opened) == 60 * MIB
    assert host.read_bytes(opened, 8 * MIB, len(MARK)) == MARK
    client.unstage(volume.volume_id, staging)


@pytest.mark.parametrize("name", chosen.kinds(CACHES, usual=["writecache"]))
def test_the_maximum_is_what_both_tiers_have_room_for(
    client: Client, host: AnyHost, group: str, name: str
) -> None:
    extents = 2 * sum(FAST) if name == "writecache" else sum(SLOW)
    parameters = {"class": name}
    assert client.capacity(parameters).maximum_volume_size.value == extents * EXTENT
    with expect.code("RESOURCE_EXHAUSTED", "fast disks"):
        client.create("pvc-1", extents * EXTENT + 1, block(), parameters=parameters)
    client.create("pvc-1", extents * EXTENT, block(), parameters=parameters)
    used = CACHES[name].extents(extents, EXTENT)
    assert free(host, group) == (sum(SLOW) - extents, sum(FAST) - used)


@pytest.mark.variation
def test_a_storage_class_overrides_the_size_of_the_cache(
    client: Client, host: AnyHost, group: str
) -> None:
    larger = {"class": "cache", "carver/cacheSize": "44MiB"}
    assert client.capacity(larger).maximum_volume_size.value == sum(SLOW) * EXTENT
    volume = client.create("pvc-1", 40 * MIB, block(), parameters=larger)
    assert free(host, group)[1] == sum(FAST) - 11
    with expect.code("ALREADY_EXISTS", "cache"):
        smaller = {"class": "cache", "carver/cacheSize": "40MiB"}
        client.create("pvc-1", 40 * MIB, block(), parameters=smaller)
    for parameters, is_so in ((larger, True), ({"cacheSize": "8MiB"}, False)):
        request = csi.ValidateVolumeCapabilitiesRequest(
            volume_id=volume.volume_id, volume_capabilities=[block()], parameters=parameters
        )
        answer = client.controller.ValidateVolumeCapabilities(request)
        assert answer.HasField("confirmed") == is_so, answer.message


@pytest.mark.parametrize(
    ("parameters", "word"),
    [
        ({"class": "plain", "cacheSize": "1GiB"}, "has no cache"),
        ({"class": "cache", "cacheSize": "0"}, "larger than 0"),
        ({"class": "cache", "cacheSize": "much"}, "'much'"),
    ],
)
@pytest.mark.variation
def test_a_cache_size_that_cannot_be_is_refused(
    client: Client, parameters: dict[str, str], word: str
) -> None:
    with expect.code("INVALID_ARGUMENT", "parameters[cacheSize]", word):
        client.create("pvc-1", 40 * MIB, block(), parameters=parameters)


@pytest.mark.variation
def test_nothing_but_caches_lies_on_fast_disks(client: Client, host: AnyHost, group: str) -> None:
    fast = {disk.uuid for disk in report.read(host.lvm).group(group).disks if disk.fast}
    assert len(fast) == len(FAST)
    for name, size in (("plain", sum(SLOW)), ("striped", 2 * min(SLOW))):
        parameters = {"class": name}
        assert client.capacity(parameters).maximum_volume_size.value == size * EXTENT
        volume = client.create("pvc-1", 8 * MIB, block(), parameters=parameters)
        assert not logical(host, group).disks & fast
        assert client.expand(volume.volume_id, size * EXTENT).capacity_bytes == size * EXTENT
        assert not logical(host, group).disks & fast
        client.delete(volume.volume_id)


@pytest.mark.variation
def test_no_pool_and_no_snapshot_lies_on_fast_disks(
    client: Client, host: AnyHost, group: str
) -> None:
    client.create("pvc-1", 40 * MIB, block(), parameters={"class": "thin"})
    plain = client.create("pvc-2", 40 * MIB, block(), parameters={"class": "plain"})
    client.snapshot("snapshot-1", plain.volume_id)
    assert free(host, group)[1] == sum(FAST)


@pytest.mark.variation
def test_without_fast_disks_there_is_no_room_for_a_cache(
    client: Client, host: AnyHost, group: str
) -> None:
    client.create("pvc-1", 2 * sum(FAST) * EXTENT, block(), parameters={"class": "writecache"})
    assert client.capacity({"class": "cache"}).maximum_volume_size.value == 0
    with expect.code("RESOURCE_EXHAUSTED", "fast disks, which have 0 bytes free"):
        client.create("pvc-2", MIB, block(), parameters={"class": "cache"})


@pytest.mark.variation
@pytest.mark.parametrize("kept", ["parted", "never made"])
@pytest.mark.parametrize("name", ["cache", "writecache"])
def test_a_volume_without_its_cache_gets_it_when_the_call_is_made_again(
    client: Client, host: AnyHost, group: str, name: str, kept: str
) -> None:
    volume = client.create("pvc-1", 40 * MIB, block(), parameters={"class": name})
    caches.split(host.lvm, logical(host, group))
    if kept == "never made":
        volumes.remove(host.lvm, group, "vol-pvc-1_cache")
    assert logical(host, group).layout == {"linear"}
    assert client.create("pvc-1", 40 * MIB, block(), parameters={"class": name}) == volume
    assert logical(host, group).layout == {name}


@pytest.mark.variation
def test_a_cache_that_was_parted_from_its_volume_goes_with_it(
    client: Client, host: AnyHost, group: str
) -> None:
    volume = client.create("pvc-1", 40 * MIB, block(), parameters={"class": "cache"})
    caches.split(host.lvm, logical(host, group))
    client.delete(volume.volume_id)
    assert report.read(host.lvm).group(group).volumes == {}


@pytest.mark.variation
def test_the_contents_of_a_cache_are_overwritten_too(
    client: Client, host: AnyHost, group: str
) -> None:
    volume = client.create("pvc-1", 40 * MIB, block(), parameters={"class": "writecache"})
    secret = b"tenant's secret\n" * 256
    host.write_bytes(device(host, group, "vol-pvc-1"), 8 * MIB, secret)
    zeroed = tiers.erased(client, host, group, volume, "vol-pvc-1", secret[:4096])
    assert zeroed in (None, [(0, 5 * EXTENT)])


@pytest.mark.variation
def test_a_snapshot_of_a_volume_with_a_writecache_lies_on_slow_disks_and_keeps_its_data(
    client: Client, host: AnyHost, group: str
) -> None:
    volume = client.create("pvc-1", 40 * MIB, block(), parameters={"class": "writecache"})
    before, after = b"before  " * 512, b"after   " * 512
    path = device(host, group, "vol-pvc-1")
    host.write_bytes(path, 8 * MIB, before)
    slow, fast = free(host, group)
    snapshot = client.snapshot("snapshot-1", volume.volume_id, {"size": "8MiB"})
    assert free(host, group) == (slow - 2, fast)
    host.write_bytes(path, 8 * MIB, after)
    assert host.read_bytes(path, 8 * MIB, 4096) == after
    assert host.read_bytes(device(host, group, "snap-snapshot-1"), 8 * MIB, 4096) == before
    host.deactivate(group, "vol-pvc-1")
    parameters = {"class": "plain"}
    source = of_snapshot(snapshot.snapshot_id)
    client.create("pvc-2", 0, block(), parameters=parameters, source=source)
    assert host.read_bytes(device(host, group, "vol-pvc-2"), 8 * MIB, 4096) == before
    with expect.code("FAILED_PRECONDITION", snapshot.snapshot_id):
        client.delete(volume.volume_id)
    assert client.expand(volume.volume_id, 48 * MIB).capacity_bytes == 48 * MIB
    client.delete_snapshot(snapshot.snapshot_id)
    client.create("pvc-3", 0, block(), parameters=parameters, source=of_volume(volume.volume_id))
    assert host.read_bytes(device(host, group, "vol-pvc-3"), 8 * MIB, 4096) == after


@pytest.mark.variation
def test_a_snapshot_of_a_mounted_volume_with_a_writecache_has_all_that_was_written(
    client: Client, host: AnyHost, group: str
) -> None:
    staging, restored = host.directory / "staging", host.directory / "restored"
    parameters = {"class": "writecache"}
    volume = client.create("pvc-1", 40 * MIB, parameters=parameters)
    client.stage(volume, staging)
    (staging / "data").write_bytes(b"data" * MIB)
    snapshot = client.snapshot("snapshot-1", volume.volume_id)
    (staging / "data").unlink()
    source = of_snapshot(snapshot.snapshot_id)
    copy = client.create("pvc-2", 0, parameters={"class": "plain"}, source=source)
    client.stage(copy, restored)
    if isinstance(host, RealHost):
        assert (restored / "data").read_bytes() == b"data" * MIB
    client.unstage(copy.volume_id, restored)
    client.unstage(volume.volume_id, staging)


@pytest.mark.variation
def test_the_cache_that_a_volume_lost_is_not_given_back_below_its_snapshots(
    client: Client, host: AnyHost, group: str
) -> None:
    parameters = {"class": "writecache"}
    volume = client.create("pvc-1", 40 * MIB, block(), parameters=parameters)
    caches.split(host.lvm, logical(host, group))
    snapshot = client.snapshot("snapshot-1", volume.volume_id)
    assert client.create("pvc-1", 40 * MIB, block(), parameters=parameters) == volume
    assert logical(host, group).layout == {"linear"}
    client.delete_snapshot(snapshot.snapshot_id)
    client.create("pvc-1", 40 * MIB, block(), parameters=parameters)
    assert logical(host, group).layout == {"writecache"}


@pytest.mark.variation
def test_a_volume_with_a_dm_cache_is_a_copy_but_never_a_source(
    client: Client, host: AnyHost, group: str
) -> None:
    plain = client.create("pvc-1", 40 * MIB, block(), parameters={"class": "plain"})
    host.write_bytes(device(host, group, "vol-pvc-1"), 8 * MIB, data := b"data" * 1024)
    source = of_volume(plain.volume_id)
    copy = client.create("pvc-2", 0, block(), parameters={"class": "cache"}, source=source)
    assert host.read_bytes(device(host, group, "vol-pvc-2"), 8 * MIB, len(data)) == data
    assert logical(host, group, "vol-pvc-2").layout == {"cache"}
    with expect.code("FAILED_PRECONDITION", "lvm2 cannot"):
        client.create("pvc-3", 0, block(), source=of_volume(copy.volume_id))
    with expect.code("FAILED_PRECONDITION", "lvm2 cannot", "writecache"):
        client.snapshot("snapshot-1", copy.volume_id)


HOW = pytest.mark.parametrize(
    "how", chosen.kinds(["by its class", "its tag is lost", "by hand"], usual=["by hand"])
)


def with_dm_cache(client: Client, host: AnyHost, group: str, how: str, kind: str) -> csi.Volume:
    """A volume that has a dm-cache in writeback mode, whatever its tags say."""
    name = "plain" if how == "by hand" else "writeback"
    volume = client.create("pvc-1", 40 * MIB, block(), parameters={"class": name + kind})
    if how == "by hand":
        now = report.read(host.lvm).group(group)
        caches.attach(host.lvm, now, "vol-pvc-1", CACHES["writeback"], 5)
    elif how == "its tag is lost":
        lost = f"carver.cache={logical(host, group).own_tags['cache']}"
        host.lvm("lvchange", "--deltag", lost, "--", f"{group}/vol-pvc-1")
    assert logical(host, group).layout == {"cache"}
    return volume


@HOW
@pytest.mark.long_on_lvm
def test_what_has_a_dm_cache_by_lvm2_is_no_source_whatever_its_tags_say(
    client: Client, host: AnyHost, group: str, how: str
) -> None:
    volume = with_dm_cache(client, host, group, how, "")
    with expect.code("FAILED_PRECONDITION", "without damage to its data"):
        client.snapshot("snapshot-1", volume.volume_id)
    with expect.code("FAILED_PRECONDITION", "without damage to its data"):
        client.create("pvc-2", 0, block(), source=of_volume(volume.volume_id))
    # And it is one as soon as it has none.
    caches.split(host.lvm, logical(host, group))
    client.snapshot("snapshot-1", volume.volume_id)


@HOW
@pytest.mark.long_on_lvm
def test_the_contents_of_a_cache_that_lvm2_reports_are_overwritten_whatever_the_tags_say(
    client: Client, host: AnyHost, group: str, how: str
) -> None:
    volume = with_dm_cache(client, host, group, how, "")
    secret = b"tenant's secret\n" * 256
    host.write_bytes(device(host, group, "vol-pvc-1"), 8 * MIB, secret)
    zeroed = tiers.erased(client, host, group, volume, "vol-pvc-1", secret[:4096])
    assert zeroed in (None, [(0, 5 * EXTENT)])


@HOW
@pytest.mark.long_on_lvm
def test_a_parted_cache_is_overwritten_with_its_volume_whatever_the_tags_say(
    client: Client, host: AnyHost, group: str, how: str
) -> None:
    """As one is that an earlier deletion was killed over."""
    volume = with_dm_cache(client, host, group, how, "")
    caches.split(host.lvm, logical(host, group))
    client.delete(volume.volume_id)
    assert report.read(host.lvm).group(group).volumes == {}


@HOW
@pytest.mark.long_on_lvm
def test_a_key_does_not_stand_for_the_contents_where_a_cache_may_have_its_header(
    client: Client, host: AnyHost, group: str, how: str
) -> None:
    volume = with_dm_cache(client, host, group, how, "-shredded")
    secret = b"not encrypted at all".ljust(4096)
    host.write_bytes(device(host, group, "vol-pvc-1"), 36 * MIB, secret)
    zeroed = tiers.erased(client, host, group, volume, "vol-pvc-1", secret)
    assert zeroed is None or (0, 5 * EXTENT) in zeroed


@pytest.mark.variation
def test_a_volume_called_like_a_cache_is_not_taken_for_one(client: Client, host: AnyHost) -> None:
    cached = client.create("pvc-1", 40 * MIB, block(), parameters={"class": "cache"})
    other = client.create("pvc-1_cache", 8 * MIB, block(), parameters={"class": "plain"})
    client.delete(cached.volume_id)
    assert [one.volume_id for one in client.volumes()] == [other.volume_id]


# Thin classes whose pool has a cache


def pool(host: AnyHost, group: str, name: str) -> report.LogicalVolume:
    return report.read(host.lvm).group(group).volume(f"pool-{name}")


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
    assert made.layout == {"thin", "pool", POOL_CACHES[name].kind}
    mode = POOL_CACHES[name].mode
    kept = made.own_tags["cache"]
    assert kept == f"{POOL_CACHES[name].kind}:{mode}:{EXTENTS[name] * EXTENT}"
    # Ten of data, one of metadata, one of their spare.
    assert free(host, group) == (sum(SLOW) - 12, sum(FAST) - EXTENTS[name])
    if isinstance(host, RealHost) and POOL_CACHES[name].kind == "cache":
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
def test_a_pool_grows_below_its_cache_and_keeps_its_data(
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
    assert POOL_CACHES[name].kind in grown.layout
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
    assert client.capacity({"class": "thin-cache"}).maximum_volume_size.value == 0
    with expect.code("RESOURCE_EXHAUSTED", "fast disks, which have 0 bytes free"):
        client.create("pvc-2", MIB, block(), parameters={"class": "thin-cache"})
    assert set(report.read(host.lvm).group(group).volumes) == {"vol-pvc-1"}


@pytest.mark.variation
def test_the_cache_of_a_pool_is_not_for_a_storage_class_to_size(client: Client) -> None:
    parameters = {"class": "thin-cache", "cacheSize": "1GiB"}
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
    assert pool(host, group, name).layout == {"thin", "pool", POOL_CACHES[name].kind}
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


@pytest.mark.variation
@EVERY
def test_the_contents_of_a_pool_and_its_cache_are_overwritten_before_it_is_free(
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
    service.reports.fresh()
    assert in_background.look(service, service.pool_remover.jobs) == 1
    service.pool_remover.remove_if_empty(group, f"pool-{name}").result(600)
    assert free(host, group) == (sum(SLOW), sum(FAST))
    client.delete(volume.volume_id)
