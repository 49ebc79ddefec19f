"""Deleted data stay erased when the power fails right after."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import configured
import grpc
import in_background
import pytest
import serving
from fakes.host import FakeHost
from fakes.lvm import FakeVolume

from agent.csi.client import Client, block
from agent.daemon.server import Service
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from lvm import report
from lvm.caches import Cache
from lvm.layout import Layout, Reserve
from lvm.thin import Policy
from mount.command import Result

MIB = 1 << 20
SIZE = 32 * MIB
MARKER = b"a secret".ljust(4096, b"!")
POOL = Policy(size=Reserve(size_bytes=64 * MIB))

CLASSES = {
    "linear": DeviceClass("plain", "data", default=True),
    "raid1": DeviceClass("plain", "data", default=True, layout=Layout("raid1", mirrors=1)),
    "cached": DeviceClass("plain", "data", default=True, cache=Cache()),
    "thin": DeviceClass("plain", "data", default=True, layout=Layout("thin"), pool=POOL),
    "thin, cached": DeviceClass(
        "plain", "data", default=True, layout=Layout("thin"), pool=POOL, cache=Cache()
    ),
}

pytestmark = pytest.mark.usefixtures("waiting_eraser")


@pytest.fixture
def fake(tmp_path: Path) -> FakeHost:
    host = FakeHost(tmp_path)
    group = host.lvm2.add_group("data", [100, 100, 100])
    group.disks[2].tags = {report.FAST}
    return host


@pytest.fixture(params=CLASSES)
def config(tmp_path: Path, request: pytest.FixtureRequest) -> Config:
    return configured.carver(tmp_path, kubelet_dir=("/",), classes=(CLASSES[request.param],))


def write(fake: FakeHost, name: str) -> None:
    device = fake.devices.find("data", name)
    assert device is not None
    for offset in (0, SIZE - len(MARKER)):
        fake.write_bytes(device.path, offset, MARKER)


def test_no_sector_of_a_deleted_volume_comes_back(
    client: Client, service: Service, fake: FakeHost
) -> None:
    volume = client.create("pvc-1", SIZE, block())
    write(fake, "vol-pvc-1")
    client.delete(volume.volume_id)
    fake.cut_power()
    in_background.ended(service.pool_remover.jobs)
    assert fake.lvm2.groups["data"].volumes == {}
    fake.cut_power()
    assert MARKER not in fake.freed_bytes("data")


@pytest.mark.parametrize("config", ["linear", "raid1", "thin"], indirect=True)
def test_no_sector_of_a_deleted_snapshot_comes_back(
    client: Client, service: Service, fake: FakeHost
) -> None:
    volume = client.create("pvc-1", SIZE, block())
    write(fake, "vol-pvc-1")
    client.delete_snapshot(client.snapshot("1", volume.volume_id, {"size": "100%"}).snapshot_id)
    client.delete(volume.volume_id)
    in_background.ended(service.pool_remover.jobs)
    fake.cut_power()
    assert fake.lvm2.groups["data"].volumes == {}
    assert MARKER not in fake.freed_bytes("data")


DIRTY = {
    kind: DeviceClass("plain", "data", default=True, cache=Cache(kind, "writeback"))
    for kind in ("cache", "writecache")
}


@dataclass
class Dirty:
    """A service with a class of dirty caches, and one without a cache."""

    service: Service
    client: Client
    fake: FakeHost

    def create(self, name: str, dirty_blocks: int) -> FakeVolume:
        """A volume with data, so many blocks of which are only in the cache."""
        self.client.create(name, SIZE, block())
        write(self.fake, f"vol-{name}")
        made = self.fake.lvm2.groups["data"].volumes[f"vol-{name}"]
        made.dirty_blocks = dirty_blocks
        return made

    def delete(self, *names: str) -> None:
        for one in self.client.volumes():
            if one.volume_id.rpartition("vol-")[2] in names:
                self.client.delete(one.volume_id)


@pytest.fixture(params=DIRTY)
def dirty(tmp_path: Path, fake: FakeHost, request: pytest.FixtureRequest) -> Iterator[Dirty]:
    classes = (DIRTY[request.param], DeviceClass("linear", "data"))
    config = configured.carver(tmp_path, kubelet_dir=("/",), classes=classes)
    running = serving.start(config, fake, eraser=0)
    running.eraser.look_seconds = 0.01
    with Client(config.endpoint) as client:
        yield Dirty(running, client, fake)
    running.stop()


def test_a_dirty_cache_is_written_back_in_the_background_before_it_is_detached(
    dirty: Dirty, fake: FakeHost
) -> None:
    dirty.service.eraser.write_back_seconds = 60
    held = dirty.create("pvc-1", 1_000_000)
    dirty.delete("pvc-1")
    while held.dirty_blocks == 1_000_000:
        pass
    dirty.create("pvc-2", 0)
    assert held.cache, "it is still written back"
    held.dirty_blocks = 1
    in_background.ended(dirty.service.eraser.jobs)
    assert set(fake.lvm2.groups["data"].volumes) == {"vol-pvc-2"}
    assert MARKER not in fake.freed_bytes("data")


def test_caches_that_are_never_written_back_delay_no_other_volume_s_erase(
    dirty: Dirty, fake: FakeHost, caplog: pytest.LogCaptureFixture
) -> None:
    dirty.service.eraser.write_back_seconds = 0.01
    names = [f"pvc-{number}" for number in range(3)]
    held = [dirty.create(one, 10**9) for one in names]
    dirty.client.create("other", SIZE, block(), parameters={"class": "linear"})
    for one in names:
        # A call that finds its job failed already says so; the volume is deleted all the same.
        with suppress(grpc.RpcError):
            dirty.delete(one)
    dirty.delete("other")
    for _ in range(3):
        jobs = dirty.service.eraser.jobs
        in_background.ended(jobs)
        in_background.again(jobs)
    volumes = fake.lvm2.groups["data"].volumes
    assert "vol-other" not in volumes
    logged = [one for one in caplog.messages if "dmsetup status /dev/data/" in one]
    assert len(logged) == len(names), "once for each, not each minute"
    for volume in held:
        volume.dirty_blocks = 0
    serving.again(dirty.service)
    assert volumes == {}


@pytest.mark.parametrize("dirty", ["cache"], indirect=True)
def test_without_a_cleaner_a_cache_is_written_back_while_it_is_detached(
    dirty: Dirty, fake: FakeHost
) -> None:
    dirty.service.eraser.grace_seconds = 20
    held = dirty.create("pvc-1", 1)

    def refuse(words: Sequence[str]) -> Result | None:
        if "--cachepolicy" not in words:
            return None
        held.dirty_blocks = 0
        return Result(3, "", "  unrecognised\n")

    fake.intercept = refuse
    dirty.delete("pvc-1")
    assert fake.lvm2.groups["data"].volumes == {}
