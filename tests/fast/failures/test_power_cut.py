"""What was deleted stays so when the power fails right after: no free extent has it again."""

from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from pathlib import Path

import configured
import pytest
import serving
from fakes.host import FakeHost

from agent.core.classes import DeviceClass
from agent.core.settings import Config
from agent.csi.client import Client, block
from agent.daemon.server import Service
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


@pytest.fixture
def fake(tmp_path: Path) -> FakeHost:
    host = FakeHost(tmp_path)
    group = host.lvm2.add_group("data", [100, 100, 100])
    group.disks[2].tags = {report.FAST}
    return host


@pytest.fixture(params=CLASSES)
def config(tmp_path: Path, request: pytest.FixtureRequest) -> Config:
    return configured.carver(tmp_path, kubelet_dir=("/",), classes=(CLASSES[request.param],))


@pytest.fixture
def service(config: Config, fake: FakeHost) -> Iterator[Service]:
    running = serving.start(config, fake, eraser=20)
    yield running
    running.stop()


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
    service.pool_remover.jobs.shutdown()
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
    service.pool_remover.jobs.shutdown()
    fake.cut_power()
    assert fake.lvm2.groups["data"].volumes == {}
    assert MARKER not in fake.freed_bytes("data")


DIRTY = {
    "cache": DeviceClass("plain", "data", default=True, cache=Cache(mode="writeback")),
    "writecache": DeviceClass(
        "plain", "data", default=True, cache=Cache("writecache", "writeback")
    ),
}


@pytest.mark.parametrize("kind", DIRTY)
def test_a_dirty_cache_is_written_back_before_it_is_parted_and_nobody_waits_for_that(
    tmp_path: Path, fake: FakeHost, kind: str
) -> None:
    config = configured.carver(tmp_path, kubelet_dir=("/",), classes=(DIRTY[kind],))
    running = serving.start(config, fake, eraser=0)
    running.eraser.look_seconds, running.eraser.write_back_seconds = 0.01, 60
    with Client(config.endpoint) as client:
        volume = client.create("pvc-1", SIZE, block())
        write(fake, "vol-pvc-1")
        held = fake.lvm2.groups["data"].volumes["vol-pvc-1"]
        held.dirty_blocks = 1_000_000
        client.delete(volume.volume_id)
        while held.dirty_blocks == 1_000_000:
            pass
        client.create("pvc-2", SIZE, block())
        assert held.cache, "it is still written back"
        held.dirty_blocks = 1
        wait([one.ended for one in list(running.eraser.jobs._jobs.values())], 20)
        assert set(fake.lvm2.groups["data"].volumes) == {"vol-pvc-2"}
        assert MARKER not in fake.freed_bytes("data")
    running.stop()


@pytest.mark.parametrize("kind", DIRTY)
def test_caches_that_are_never_written_back_keep_no_other_volume_from_being_wiped(
    tmp_path: Path, fake: FakeHost, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    classes = (DIRTY[kind], DeviceClass("linear", "data"))
    config = configured.carver(tmp_path, kubelet_dir=("/",), classes=classes)
    running = serving.start(config, fake, eraser=0)
    running.eraser.look_seconds = running.eraser.write_back_seconds = 0.01
    with Client(config.endpoint) as client:
        stuck = [client.create(f"pvc-{number}", SIZE, block()) for number in range(3)]
        other = client.create("other", SIZE, block(), parameters={"class": "linear"})
        volumes = fake.lvm2.groups["data"].volumes
        held = [volumes[f"vol-pvc-{number}"] for number in range(3)]
        for one in held:
            one.dirty_blocks = 10**9
        for made in (*stuck, other):
            client.delete(made.volume_id)
        for _ in range(3):
            jobs = running.eraser.jobs
            _, waiting = wait([job.ended for job in list(jobs._jobs.values())], 20)
            assert not waiting
            jobs._retry_now(*jobs._jobs.values())
        assert "vol-other" not in volumes
        told = [one for one in caplog.messages if "dmsetup status /dev/data/" in one]
        assert len(told) == len(stuck), "once for each, not each minute"
        for one in held:
            one.dirty_blocks = 0
        serving.again(running)
        assert volumes == {}
    running.stop()


def test_where_lvm2_knows_no_cleaner_a_cache_is_written_back_while_it_is_parted(
    tmp_path: Path, fake: FakeHost
) -> None:
    config = configured.carver(tmp_path, kubelet_dir=("/",), classes=(DIRTY["cache"],))
    running = serving.start(config, fake, eraser=20)
    with Client(config.endpoint) as client:
        volume = client.create("pvc-1", SIZE, block())
        held = fake.lvm2.groups["data"].volumes["vol-pvc-1"]
        held.dirty_blocks = 1

        def refuse(words: Sequence[str]) -> Result | None:
            if "--cachepolicy" not in words:
                return None
            held.dirty_blocks = 0
            return Result(3, "", "  unrecognised\n")

        fake.intercept = refuse
        client.delete(volume.volume_id)
    assert fake.lvm2.groups["data"].volumes == {}
    running.stop()
