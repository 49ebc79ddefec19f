"""Classes with a cache: volumes on slow disks whose hot or new blocks are on fast ones."""

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
    return Config(**{**vars(config), "classes": (*classes, *sealed, plain, striped, thin)})


@pytest.fixture(autouse=True)
def nothing_is_left(host: AnyHost, group: str, client: Client) -> Iterator[None]:
    """In the end all is deleted, and both tiers are free."""
    yield
    tiers.empty(client)
    assert set(report.read(host.lvm).group(group).volumes) == set()
    assert free(host, group) == (sum(SLOW), sum(FAST))


def mapping(host: AnyHost, group: str) -> str:
    """The dm-crypt device over the volume."""
    below = host.devices.find(group, "vol-pvc-1")
    assert below is not None
    opened = host.devices.mapping(below)
    assert opened is not None
    return opened.path


def logical(host: AnyHost, group: str, name: str = "vol-pvc-1") -> report.LogicalVolume:
    return report.read(host.lvm).group(group).volume(name)


@pytest.mark.parametrize("name", chosen.kinds(CACHES, usual=["cache", "writecache"]))
def test_a_cached_volume_lives_and_grows_while_mounted(
    client: Client, host: AnyHost, group: str, name: str
) -> None:
    volume = client.create("pvc-1", 40 * MIB, parameters={"class": name})
    assert tiers.use(client, host, group, name, "vol-pvc-1") == volume
    assert logical(host, group).layout == {CACHES[name].kind}


@pytest.mark.variation
@pytest.mark.parametrize("name", chosen.kinds(CACHES, usual=["writecache"]))
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
        client.create("pvc-1", 40 * MIB, block(), parameters={"class": "cache"})
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


@pytest.mark.parametrize("kept", chosen.kinds(["parted", "never made"], usual=["parted"]))
@pytest.mark.parametrize("name", chosen.kinds(["cache", "writecache"], usual=["writecache"]))
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


def test_a_cache_that_was_parted_from_its_volume_goes_with_it(
    client: Client, host: AnyHost, group: str
) -> None:
    volume = client.create("pvc-1", 40 * MIB, block(), parameters={"class": "cache"})
    caches.split(host.lvm, logical(host, group))
    client.delete(volume.volume_id)
    assert report.read(host.lvm).group(group).volumes == {}


def test_what_is_in_a_cache_is_overwritten_too(client: Client, host: AnyHost, group: str) -> None:
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
def test_a_snapshot_of_a_mounted_volume_with_a_writecache_is_of_what_was_written(
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


@pytest.mark.variation
def test_a_volume_called_like_a_cache_is_not_taken_for_one(client: Client, host: AnyHost) -> None:
    cached = client.create("pvc-1", 40 * MIB, block(), parameters={"class": "cache"})
    other = client.create("pvc-1_cache", 8 * MIB, block(), parameters={"class": "plain"})
    client.delete(cached.volume_id)
    assert [one.volume_id for one in client.volumes()] == [other.volume_id]
