"""Volumes with a part that cannot be erased: kept, given up, or erased later."""

import errno
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import configured
import expect
import pytest
import serving
from fakes.host import FakeHost
from fakes.lvm.records import FakeVolume

from agent.core import records
from agent.core.classes import DeviceClass
from agent.core.settings import Config
from agent.csi.client import Client, block
from agent.daemon.server import Service
from lvm import report
from lvm.layout import Layout
from mount.command import Result
from proto import csi_pb2 as csi

MIB = 1 << 20
EXTENT = 4 * MIB
SIZE = 40 * EXTENT
MARKER = b"a secret".ljust(4096, b"!")
GIVE_UP = ("lvchange", "--addtag", "carver.givenUp=yes", "--")


@pytest.fixture
def fake(tmp_path: Path) -> FakeHost:
    host = FakeHost(tmp_path)
    host.lvm2.add_group("data", [30, 60, 60])
    return host


@pytest.fixture
def config(tmp_path: Path) -> Config:
    classes = (
        DeviceClass("plain", "data", default=True),
        DeviceClass("raid", "data", layout=Layout("raid1", mirrors=1)),
        DeviceClass("raid3", "data", layout=Layout("raid1", mirrors=2)),
        DeviceClass("striped", "data", layout=Layout("striped", stripes=2)),
    )
    return configured.carver(tmp_path, kubelet_dir=("/",), classes=classes)


@pytest.fixture
def service(config: Config, fake: FakeHost) -> Iterator[Service]:
    running = serving.start(config, fake, eraser=20)
    yield running
    running.stop()


def names(fake: FakeHost) -> set[str]:
    return set(fake.lvm2.groups["data"].volumes)


def ended(service: Service) -> None:
    """Wait until no erase is under way."""
    wait([one.ended for one in list(service.eraser.jobs._jobs.values())], 20)


@pytest.fixture
def volume(client: Client, fake: FakeHost) -> csi.Volume:
    """30 extents on the first disk, 10 on the second, with data on both."""
    made = client.create("pvc-1", SIZE, block())
    for offset in (0, SIZE - len(MARKER)):
        fake.write_bytes("/dev/mapper/data-vol--pvc--1", offset, MARKER)
    return made


def again(service: Service, volume: csi.Volume) -> None:
    """Retry a failed erase, and wait for its end."""
    jobs = service.eraser.jobs
    failed = jobs._jobs[volume.volume_id]
    wait([failed.ended], 20)
    service.inventory.state()
    jobs._retry_now(failed)
    ended(service)


def lose(fake: FakeHost, *, give_up: bool = False) -> None:
    """Lose the first disk, and give the volume up if asked."""
    fake.lose_disk("data", 0)
    if give_up:
        fake.lvm(*GIVE_UP, "data/vol-pvc-1")


def raid(client: Client, fake: FakeHost, device_class: str = "raid") -> csi.Volume:
    made = client.create("pvc-1", 4 * EXTENT, block(), parameters={"class": device_class})
    fake.write_bytes("/dev/mapper/data-vol--pvc--1", 0, MARKER)
    return made


@pytest.fixture
def dead(fake: FakeHost) -> threading.Event:
    """While this is set, a failed image is not brought back by a refresh."""
    is_dead = threading.Event()
    is_dead.set()

    def intercept(words: Sequence[str]) -> Result | None:
        return Result(0, "", "") if "--refresh" in words and is_dead.is_set() else None

    fake.intercept = intercept
    return is_dead


def test_a_volume_on_a_missing_disk_is_deleted_and_stays_on_record(
    client: Client,
    service: Service,
    fake: FakeHost,
    volume: csi.Volume,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lose(fake)
    client.delete(volume.volume_id)
    assert client.volumes() == []
    group = fake.lvm2.groups["data"]
    assert "carver.state=wiping" in group.volumes["vol-pvc-1"].tags
    for _ in range(2):
        again(service, volume)
    assert names(fake) == {"vol-pvc-1"}
    [logged] = [one for one in caplog.messages if "missing disk" in one]
    assert group.disks[0].uuid in logged
    assert "lvchange --addtag carver.givenUp=yes data/vol-pvc-1" in logged
    client.delete(volume.volume_id)
    assert names(fake) == {"vol-pvc-1"}


def test_the_cost_of_retrying_an_erase_does_not_grow_with_their_number(
    service: Service, fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, number = fake.lvm2.groups["data"], 100
    for name in (f"vol-{one}" for one in range(number)):
        own_tags = {f"carver.name={name}", "carver.state=wiping"}
        group.volumes[name] = FakeVolume(
            name, f"{len(group.volumes)}-0", {group.disks[0].name: 1}, own_tags
        )
    group.disks[0].extents = number
    fake.lose_disk("data", 0)
    assert service.eraser.resume() == number
    jobs = service.eraser.jobs
    ended(service)
    made, make = Counter[str](), records._as_volume

    def counted(*words: Any) -> records.Volume:
        made["volumes"] += 1
        return make(*words)

    def state(*groups: str, **options: bool) -> report.Report:
        made["reads"] += "quick" in options
        return read(*groups)

    read = service.inventory.state
    monkeypatch.setattr(service.inventory, "state", state)
    monkeypatch.setattr(records, "_as_volume", counted)
    jobs._retry_now(*jobs._jobs.values())
    ended(service)
    assert len(jobs._jobs) == number
    assert made["volumes"] <= 5 * number
    assert made["reads"] <= 10


def test_an_erase_goes_on_when_the_disk_is_back(
    client: Client, service: Service, fake: FakeHost, volume: csi.Volume
) -> None:
    lose(fake)
    client.delete(volume.volume_id)
    fake.bring_disk("data", 0)
    again(service, volume)
    assert names(fake) == set()
    assert MARKER not in fake.freed_bytes("data")


@pytest.mark.parametrize("is_deleted_first", [True, False])
def test_the_reachable_part_of_a_given_up_volume_is_erased(
    client: Client,
    service: Service,
    fake: FakeHost,
    volume: csi.Volume,
    caplog: pytest.LogCaptureFixture,
    is_deleted_first: bool,
) -> None:
    lose(fake, give_up=not is_deleted_first)
    media = fake.lvm2.groups["data"].volumes["vol-pvc-1"].media
    client.delete(volume.volume_id)
    if is_deleted_first:
        fake.lvm(*GIVE_UP, "data/vol-pvc-1")
        again(service, volume)
    ended(service)
    assert names(fake) == set()
    assert list(media.blocks) == [0], "on the lost disk"
    uuid = fake.lvm2.groups["data"].disks[0].uuid
    assert [one for one in caplog.messages if "was not overwritten" in one and uuid in one]


def test_a_failed_image_is_refreshed_before_it_is_erased(client: Client, fake: FakeHost) -> None:
    volume = raid(client, fake)
    fake.fail_image("data", "vol-pvc-1", 2)
    client.delete(volume.volume_id)
    assert names(fake) == set()
    assert MARKER not in fake.freed_bytes("data")


def test_a_volume_with_an_image_that_stays_dead_is_kept(
    client: Client, fake: FakeHost, dead: threading.Event
) -> None:
    volume = raid(client, fake)
    fake.fail_image("data", "vol-pvc-1", 2)
    with expect.code("FAILED_PRECONDITION", "images", "AD"):
        client.delete(volume.volume_id)
    assert names(fake) == {"vol-pvc-1"}
    dead.clear()
    client.delete(volume.volume_id)
    assert MARKER not in fake.freed_bytes("data")


def test_a_raid_with_an_image_on_a_missing_disk_is_kept_until_it_is_given_up(
    client: Client, service: Service, fake: FakeHost
) -> None:
    volume = raid(client, fake)
    fake.lose_disk("data", 2)
    client.delete(volume.volume_id)
    assert names(fake) == {"vol-pvc-1"}
    fake.lvm(*GIVE_UP, "data/vol-pvc-1")
    again(service, volume)
    assert names(fake) == set()


def test_a_disk_that_is_there_and_fails_is_not_given_up_with_a_lost_one(
    client: Client,
    service: Service,
    fake: FakeHost,
    volume: csi.Volume,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    zero_out = fake.kernel.zero_out

    def refuse(device: str, offset: int, length: int, *, held: bool = False) -> None:
        if offset <= SIZE - EXTENT < offset + length:
            raise OSError(errno.EIO, "I/O error", device)
        zero_out(device, offset, length, held=held)

    lose(fake, give_up=True)
    with monkeypatch.context() as failing:
        failing.setattr(fake.kernel, "zero_out", refuse)
        client.delete(volume.volume_id)
        again(service, volume)
        assert names(fake) == {"vol-pvc-1"}
    media = fake.lvm2.groups["data"].volumes["vol-pvc-1"].media
    again(service, volume)
    assert names(fake) == set()
    assert list(media.blocks) == [0], "on the lost disk"


def test_a_volume_striped_over_a_lost_disk_is_erased_with_all_free_extents(
    client: Client, service: Service, fake: FakeHost
) -> None:
    volume = client.create("pvc-1", SIZE, block(), parameters={"class": "striped"})
    fake.lose_disk("data", 1)
    fake.lvm(*GIVE_UP, "data/vol-pvc-1")
    client.delete(volume.volume_id)
    ended(service)
    assert names(fake) == set()
    assert fake.lvm2.groups["data"].tags == {"carver.sweep=yes"}


def test_a_failed_image_is_not_given_up_with_a_lost_disk(
    client: Client, service: Service, fake: FakeHost, dead: threading.Event
) -> None:
    volume = raid(client, fake, "raid3")
    lose(fake, give_up=True)
    fake.fail_image("data", "vol-pvc-1", 1)
    client.delete(volume.volume_id)
    again(service, volume)
    assert names(fake) == {"vol-pvc-1"}
    dead.clear()
    again(service, volume)
    assert names(fake) == set()
    assert MARKER not in fake.freed_bytes("data")


def test_a_given_up_part_is_erased_when_its_disk_comes_back(
    client: Client, service: Service, fake: FakeHost, volume: csi.Volume
) -> None:
    group = fake.lvm2.groups["data"]
    lose(fake, give_up=True)
    client.delete(volume.volume_id)
    ended(service)
    assert group.tags == {f"carver.sweepDisks={group.disks[0].uuid}"}
    fake.bring_disk("data", 0)
    jobs = service.freed_eraser.jobs
    for job in list(jobs._jobs.values()):
        wait([job.ended], 20)
        jobs._retry_now(job)
    wait([one.ended for one in list(jobs._jobs.values())], 20)
    assert (group.tags, names(fake)) == (set(), set())
    assert sum(end - start for start, end in group.swept) == 30 * EXTENT
