"""Volumes of which a part takes no zeroes when they are deleted: kept, given up, or mended."""

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


def tags(fake: FakeHost) -> set[str]:
    return fake.lvm2.groups["data"].volumes["vol-pvc-1"].tags


@pytest.fixture
def volume(client: Client, fake: FakeHost) -> csi.Volume:
    """30 extents on the first disk, 10 on the second, with data on both."""
    made = client.create("pvc-1", SIZE, block())
    for offset in (0, SIZE - len(MARKER)):
        fake.write_bytes("/dev/mapper/data-vol--pvc--1", offset, MARKER)
    return made


def again(service: Service, volume: csi.Volume) -> None:
    """What is done a minute after a wipe failed; returns when it came to its end."""
    jobs = service.eraser.jobs
    failed = jobs._jobs[volume.volume_id]
    wait([failed.ended], 20)
    service.inventory.state()
    jobs._retry_now(failed)
    wait([one.ended for one in list(jobs._jobs.values())], 20)


def test_a_volume_on_a_missing_disk_is_deleted_and_stays_on_record(
    client: Client,
    service: Service,
    fake: FakeHost,
    volume: csi.Volume,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake.lose_disk("data", 0)
    client.delete(volume.volume_id)
    assert client.volumes() == []
    assert "carver.state=wiping" in tags(fake)
    wait([service.eraser.jobs._jobs[volume.volume_id].ended], 20)
    again(service, volume)
    again(service, volume)
    assert names(fake) == {"vol-pvc-1"}
    told = [one for one in caplog.messages if "missing disk" in one]
    assert len(told) == 1, "and not each minute"
    disk = fake.lvm2.groups["data"].disks[0]
    assert disk.uuid in told[0]
    assert "lvchange --addtag carver.givenUp=yes data/vol-pvc-1" in told[0]
    client.delete(volume.volume_id)
    assert names(fake) == {"vol-pvc-1"}


def test_what_waits_for_a_disk_is_tried_again_at_a_cost_for_each_that_does_not_grow_with_all(
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
    wait([job.ended for job in jobs._jobs.values()], 60)
    made, make = Counter[str](), records._as_volume

    def counted(*words: Any) -> records.Volume:
        made["volumes"] += 1
        return make(*words)

    def state(*groups: str, **options: bool) -> report.Report:
        made["looks"] += "quick" in options
        return look(*groups)

    look = service.inventory.state
    monkeypatch.setattr(service.inventory, "state", state)
    monkeypatch.setattr(records, "_as_volume", counted)
    jobs._retry_now(*jobs._jobs.values())
    wait([job.ended for job in list(jobs._jobs.values())], 60)
    assert len(jobs._jobs) == number
    assert made["volumes"] <= 5 * number
    assert made["looks"] <= 10


def test_it_goes_on_when_the_disk_is_back(
    client: Client, service: Service, fake: FakeHost, volume: csi.Volume
) -> None:
    fake.lose_disk("data", 0)
    client.delete(volume.volume_id)
    fake.bring_disk("data", 0)
    again(service, volume)
    assert names(fake) == set()
    assert MARKER not in fake.freed_bytes("data")


def test_what_can_be_reached_of_one_that_is_given_up_is_overwritten(
    client: Client,
    service: Service,
    fake: FakeHost,
    volume: csi.Volume,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake.lose_disk("data", 0)
    client.delete(volume.volume_id)
    media = fake.lvm2.groups["data"].volumes["vol-pvc-1"].media
    fake.lvm(*GIVE_UP, "data/vol-pvc-1")
    again(service, volume)
    assert names(fake) == set()
    assert list(media.blocks) == [0], "on the lost disk"
    [disk, *_] = fake.lvm2.groups["data"].disks
    assert [one for one in caplog.messages if "was not overwritten" in one and disk.uuid in one]


def test_one_that_is_given_up_before_it_is_deleted_goes_likewise(
    client: Client, service: Service, fake: FakeHost, volume: csi.Volume
) -> None:
    fake.lose_disk("data", 0)
    fake.lvm(*GIVE_UP, "data/vol-pvc-1")
    client.delete(volume.volume_id)
    wait([one.ended for one in list(service.eraser.jobs._jobs.values())], 20)
    assert names(fake) == set()


def test_a_restart_goes_on_with_one_that_waits(
    client: Client, service: Service, fake: FakeHost, volume: csi.Volume, config: Config
) -> None:
    fake.lose_disk("data", 0)
    client.delete(volume.volume_id)
    service.stop()
    fake.bring_disk("data", 0)
    following = serving.start(config, fake)
    wait([one.ended for one in list(following.eraser.jobs._jobs.values())], 20)
    assert names(fake) == set()
    following.stop()


def test_those_that_wait_for_a_disk_ask_lvm2_once_a_minute_together(
    client: Client, service: Service, fake: FakeHost
) -> None:
    ids = [client.create(f"pvc-{number}", EXTENT, block()).volume_id for number in range(3)]
    fake.lose_disk("data", 0)
    for one in ids:
        client.delete(one)
    jobs = service.eraser.jobs
    failed = [jobs._jobs[one] for one in ids]
    wait([job.ended for job in failed], 20)
    service.inventory.state()
    fake.commands.clear()
    for job in failed:
        jobs._retry_now(job)
    wait([one.ended for one in list(jobs._jobs.values())], 20)
    assert fake.commands == []


def test_an_image_that_takes_no_writes_is_brought_back_before_it_is_overwritten(
    client: Client, fake: FakeHost
) -> None:
    volume = client.create("pvc-1", 4 * EXTENT, block(), parameters={"class": "raid"})
    fake.write_bytes("/dev/mapper/data-vol--pvc--1", 0, MARKER)
    fake.fail_image("data", "vol-pvc-1", 2)
    client.delete(volume.volume_id)
    assert names(fake) == set()
    assert MARKER not in fake.freed_bytes("data")


def test_a_volume_with_an_image_that_stays_dead_is_kept(
    client: Client, fake: FakeHost, service: Service
) -> None:
    volume = client.create("pvc-1", 4 * EXTENT, block(), parameters={"class": "raid"})
    fake.write_bytes("/dev/mapper/data-vol--pvc--1", 0, MARKER)
    fake.fail_image("data", "vol-pvc-1", 2)
    dead = threading.Event()
    dead.set()

    def intercept(words: Sequence[str]) -> Result | None:
        if "--refresh" in words and dead.is_set():
            return Result(0, "", "")
        return None

    fake.intercept = intercept
    with expect.code("FAILED_PRECONDITION", "images", "AD"):
        client.delete(volume.volume_id)
    assert names(fake) == {"vol-pvc-1"}
    dead.clear()
    client.delete(volume.volume_id)
    assert MARKER not in fake.freed_bytes("data")


def test_a_raid_with_an_image_on_a_missing_disk_is_kept_until_it_is_whole_or_given_up(
    client: Client, service: Service, fake: FakeHost
) -> None:
    volume = client.create("pvc-1", 4 * EXTENT, block(), parameters={"class": "raid"})
    fake.lose_disk("data", 2)
    client.delete(volume.volume_id)
    assert names(fake) == {"vol-pvc-1"}
    fake.lvm(*GIVE_UP, "data/vol-pvc-1")
    again(service, volume)
    assert names(fake) == set()


class Bad:
    """A part of a volume on a disk that is there, which fails while this is so."""

    def __init__(self, fake: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails = True
        zero_out = fake.kernel.zero_out

        def refuse(device: str, offset: int, length: int, *, held: bool = False) -> None:
            if self.fails and offset <= SIZE - EXTENT < offset + length:
                raise OSError(errno.EIO, "I/O error", device)
            zero_out(device, offset, length, held=held)

        monkeypatch.setattr(fake.kernel, "zero_out", refuse)


def test_with_a_lost_disk_nothing_is_given_up_of_one_that_is_there_and_fails(
    client: Client,
    service: Service,
    fake: FakeHost,
    volume: csi.Volume,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad = Bad(fake, monkeypatch)
    fake.lose_disk("data", 0)
    fake.lvm(*GIVE_UP, "data/vol-pvc-1")
    client.delete(volume.volume_id)
    again(service, volume)
    assert names(fake) == {"vol-pvc-1"}
    bad.fails = False
    media = fake.lvm2.groups["data"].volumes["vol-pvc-1"].media
    again(service, volume)
    assert names(fake) == set()
    assert list(media.blocks) == [0], "on the lost disk"


def test_what_is_striped_over_a_lost_disk_is_overwritten_with_all_that_is_free(
    client: Client, service: Service, fake: FakeHost
) -> None:
    volume = client.create("pvc-1", SIZE, block(), parameters={"class": "striped"})
    fake.lose_disk("data", 1)
    fake.lvm(*GIVE_UP, "data/vol-pvc-1")
    client.delete(volume.volume_id)
    wait([one.ended for one in list(service.eraser.jobs._jobs.values())], 20)
    assert names(fake) == set()
    assert fake.lvm2.groups["data"].tags == {"carver.sweep=yes"}


def test_an_image_that_takes_no_writes_is_not_given_up_with_a_lost_disk(
    client: Client, service: Service, fake: FakeHost
) -> None:
    volume = client.create("pvc-1", 4 * EXTENT, block(), parameters={"class": "raid3"})
    fake.write_bytes("/dev/mapper/data-vol--pvc--1", 0, MARKER)
    fake.lose_disk("data", 0)
    fake.lvm(*GIVE_UP, "data/vol-pvc-1")
    fake.fail_image("data", "vol-pvc-1", 1)
    dead = threading.Event()
    dead.set()

    def intercept(words: Sequence[str]) -> Result | None:
        return Result(0, "", "") if "--refresh" in words and dead.is_set() else None

    fake.intercept = intercept
    client.delete(volume.volume_id)
    again(service, volume)
    assert names(fake) == {"vol-pvc-1"}
    dead.clear()
    again(service, volume)
    assert names(fake) == set()
    assert MARKER not in fake.freed_bytes("data")


def test_what_was_given_up_is_overwritten_when_its_disk_comes_back_all_the_same(
    client: Client, service: Service, fake: FakeHost, volume: csi.Volume
) -> None:
    group = fake.lvm2.groups["data"]
    fake.lose_disk("data", 0)
    fake.lvm(*GIVE_UP, "data/vol-pvc-1")
    client.delete(volume.volume_id)
    wait([one.ended for one in list(service.eraser.jobs._jobs.values())], 20)
    assert group.tags == {f"carver.sweepDisks={group.disks[0].uuid}"}
    fake.bring_disk("data", 0)
    jobs = service.freed_eraser.jobs
    for job in list(jobs._jobs.values()):
        wait([job.ended], 20)
        jobs._retry_now(job)
    wait([one.ended for one in list(jobs._jobs.values())], 20)
    assert (group.tags, names(fake)) == (set(), set())
    assert sum(end - start for start, end in group.swept) == 30 * EXTENT
