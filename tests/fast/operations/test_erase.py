"""Deletion, where it takes longer than the caller waits, fails, or is killed between two steps."""

import gc
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import expect
import in_background
import pytest
import serving
from csi_client import Client
from fakes.disk import Disk
from fakes.host import FakeHost

from agent.cli import status
from agent.csi.client import block, of_volume
from agent.daemon.server import Service
from agent.settings.settings import Config
from lvm import lvm_errors as lvm_errors
from lvm import report
from mount.command import Result
from proto import csi_pb2 as csi

MIB = 1 << 20
SIZE = 300 * MIB


@pytest.fixture
def service(config: Config, fake: FakeHost) -> Iterator[Service]:
    running = start(config, fake)
    yield running
    running.stop()


def start(config: Config, fake: FakeHost) -> Service:
    return serving.start(config, fake, eraser=0.05)


@pytest.fixture
def volume(client: Client) -> csi.Volume:
    return client.create("pvc-1", SIZE, block())


@pytest.fixture
def failed(client: Client, volume: csi.Volume, disk: Disk) -> csi.Volume:
    """A volume whose erasing failed while the call waited."""
    disk.error = OSError(5, "Input/output error")
    disk.free.set()
    with expect.code("INTERNAL", "Input/output error"):
        client.delete(volume.volume_id)
    return volume


def idle(service: Service) -> None:
    """Wait until the jobs have ended."""
    in_background.ended(service.eraser.jobs)


def tags(fake: FakeHost) -> dict[str, set[str]]:
    return {name: one.tags for name, one in fake.lvm2.groups["data"].volumes.items()}


def until_removed(fake: FakeHost, removed: threading.Event) -> None:
    assert removed.wait(20)
    assert tags(fake) == {}


@pytest.fixture
def removed(fake: FakeHost) -> threading.Event:
    """Set when the background has removed a volume."""
    done = threading.Event()
    remove = fake.lvm2.__call__

    def lvm2(words: Sequence[str]) -> Result:
        result = remove(words)
        if words[1] == "lvremove":
            done.set()
        return result

    fake.lvm2_program = lvm2
    return done


def test_every_byte_is_overwritten(
    client: Client, volume: csi.Volume, fake: FakeHost, disk: Disk
) -> None:
    disk.free.set()
    client.delete(volume.volume_id)
    end = 0
    for _, offset, length in disk.written:
        assert offset == end
        end += length
    assert end == SIZE


def test_long_erasing_continues_in_the_background(
    client: Client, volume: csi.Volume, fake: FakeHost, disk: Disk, removed: threading.Event
) -> None:
    client.delete(volume.volume_id)

    assert "carver.state=wiping" in tags(fake)["vol-pvc-1"]
    assert client.volumes() == []
    assert client.capacity().available_capacity == 200 * 4 * MIB - SIZE
    client.delete(volume.volume_id)
    with expect.code("NOT_FOUND"):
        client.stage(volume, "/staging", block())
    with expect.code("NOT_FOUND"):
        client.controller.ControllerGetVolume(
            csi.ControllerGetVolumeRequest(volume_id=volume.volume_id)
        )
    with expect.code("ABORTED", "being erased"):
        client.create("pvc-1", SIZE, block())

    disk.free.set()
    until_removed(fake, removed)
    assert sum(length for _, _, length in disk.written) == SIZE


def reports() -> list[report.Group]:
    gc.collect()
    return [one for one in gc.get_objects() if isinstance(one, report.Group)]


def test_queued_jobs_keep_no_reports(client: Client, disk: Disk) -> None:
    # What other tests' dead processes still hold is none of this one's.
    earlier = {id(one): one for one in reports()}
    for number in range(6):
        client.delete(client.create(f"pvc-{number}", 4 * MIB, block()).volume_id)

    kept = [one for one in reports() if id(one) not in earlier]
    disk.free.set()
    assert sum(len(one.volumes) > 1 for one in kept) <= 1, "the last report, for who only watch"


@pytest.mark.usefixtures("waiting_eraser")
def test_failed_deletion_can_only_be_repeated(
    client: Client, failed: csi.Volume, fake: FakeHost, disk: Disk
) -> None:
    assert list(tags(fake)) == ["vol-pvc-1"]
    assert "carver.state=ready" in tags(fake)["vol-pvc-1"]
    # A part of it may be overwritten, also where a repetition finds the device held.
    for error in (None, OSError(16, "Device or resource busy")):
        with expect.code("ABORTED", "being erased"):
            client.publish(failed, "/staging", "/target", block())
        with expect.code("ABORTED", failed.volume_id):
            client.create("pvc-2", 0, block(), source=of_volume(failed.volume_id))
        disk.error = error
        if error is not None:
            with expect.code("FAILED_PRECONDITION", "held"):
                client.delete(failed.volume_id)
            with expect.code("ABORTED", "being erased"):
                client.snapshot("s", failed.volume_id)
    disk.error = None
    client.delete(failed.volume_id)
    assert tags(fake) == {}


def test_erasing_is_resumed_after_a_restart(
    config: Config, fake: FakeHost, disk: Disk, removed: threading.Event
) -> None:
    first = start(config, fake)
    with Client(config.endpoint) as client:
        volume = client.create("pvc-1", SIZE, block())
        client.delete(volume.volume_id)
        assert disk.reached.wait(20)
    stopping = threading.Thread(target=first.stop)
    stopping.start()
    expect.soon(lambda: first.context.workers.is_ending)
    disk.free.set()
    stopping.join()
    assert "carver.state=wiping" in tags(fake)["vol-pvc-1"]
    assert len(disk.written) < 3

    disk.written.clear()
    fake.deactivate("data", "vol-pvc-1")
    again = start(config, fake)
    until_removed(fake, removed)
    again.stop()
    assert sum(length for _, _, length in disk.written) == SIZE


def test_kill_before_the_tag_leaves_a_volume(
    service: Service, client: Client, volume: csi.Volume, fake: FakeHost
) -> None:
    service.eraser.grace_seconds = 60

    def killed(words: Sequence[str]) -> Result | None:
        if words[1] == "lvremove":
            raise OSError("killed")
        return None

    fake.intercept = killed
    with expect.code("INTERNAL"):
        client.delete(volume.volume_id)
    assert "carver.state=ready" in tags(fake)["vol-pvc-1"]
    fake.intercept = lambda words: None
    client.delete(volume.volume_id)
    assert tags(fake) == {}


def test_wipe_none_overwrites_nothing(config: Config, fake: FakeHost, disk: Disk) -> None:
    running = start(replace(config, wipe="none"), fake)
    with Client(config.endpoint) as client:
        client.delete(client.create("pvc-1", SIZE, block()).volume_id)
    running.stop()
    assert disk.written == []
    assert tags(fake) == {}


@pytest.mark.usefixtures("waiting_eraser")
def test_open_volume_is_not_erased(
    client: Client, volume: csi.Volume, fake: FakeHost, disk: Disk
) -> None:
    disk.free.set()
    fake.block.get("/dev/mapper/data-vol--pvc--1").held = 1
    with expect.code("FAILED_PRECONDITION", "open"):
        client.delete(volume.volume_id)
    assert disk.written == []
    fake.block.get("/dev/mapper/data-vol--pvc--1").held = 0
    disk.error = OSError(16, "Device or resource busy")
    with expect.code("FAILED_PRECONDITION", "held"):
        client.delete(volume.volume_id)


def test_failure_in_the_background_is_retried(
    service: Service,
    client: Client,
    volume: csi.Volume,
    fake: FakeHost,
    disk: Disk,
    removed: threading.Event,
    caplog: pytest.LogCaptureFixture,
) -> None:
    service.eraser.jobs.retry_seconds = 0.05
    client.delete(volume.volume_id)
    disk.fail_once = OSError(5, "Input/output error")
    # Nor does lvm2 answer the first report of the retry.
    refused = iter([Result(5, "", "  broken\n")])
    fake.intercept = lambda words: next(refused, None) if "fullreport" in words else None
    disk.free.set()
    until_removed(fake, removed)
    assert not list(refused)
    assert "Input/output error" in caplog.text
    assert sum(length for _, _, length in disk.written) == SIZE


def test_many_failed_jobs_are_retried(
    service: Service, client: Client, fake: FakeHost, disk: Disk
) -> None:
    jobs = service.eraser.jobs
    jobs.retry_seconds = 0.3
    every = [client.create(f"pvc-{number}", 4 * MIB, block()) for number in range(40)]
    disk.error = OSError(5, "Input/output error")
    for one in every:
        client.delete(one.volume_id)
    disk.free.set()
    expect.soon(lambda: all(one.logged for one in jobs.unfinished()))
    # lvm2 takes longer for a look than so many may wait for it.
    fake.intercept = lambda words: time.sleep(0.2) if "fullreport" in words else None
    disk.error = None
    expect.soon(lambda: not any(jobs.counts().values()), jobs.counts)
    assert tags(fake) == {}


def test_removed_volume_is_not_retried(
    service: Service, client: Client, failed: csi.Volume, fake: FakeHost, disk: Disk
) -> None:
    fake.deactivate("data", "vol-pvc-1")
    fake.lvm2.groups["data"].volumes.clear()
    in_background.again(service.eraser.jobs)
    assert not service.eraser.jobs.has(failed.volume_id)


def test_new_volume_of_the_same_name(
    service: Service, client: Client, failed: csi.Volume, fake: FakeHost, disk: Disk
) -> None:
    fake.deactivate("data", "vol-pvc-1")
    fake.lvm2.groups["data"].volumes.clear()

    again = client.create("pvc-1", SIZE, block())
    assert again.volume_id == failed.volume_id
    client.stage(again, "/staging", block())


def refuse_record(words: Sequence[str]) -> Result | None:
    return Result(5, "", "  no luck\n") if "carver.state=wiping" in words else None


def test_job_that_cannot_be_tagged_is_cancelled(
    service: Service, client: Client, volume: csi.Volume, fake: FakeHost, disk: Disk
) -> None:
    fake.intercept = refuse_record
    with expect.code("INTERNAL", "no luck"):
        client.delete(volume.volume_id)
    fake.intercept = lambda _words: None
    # Also while it is overwritten still.
    for _ in range(2):
        with expect.code("ABORTED", "being erased"):
            client.create("pvc-1", SIZE, block())
        disk.free.set()
        idle(service)
    assert len(disk.written) == 1
    assert "carver.state=ready" in tags(fake)["vol-pvc-1"]
    service.eraser.grace_seconds = 20
    client.delete(volume.volume_id)
    assert tags(fake) == {}
    assert client.create("pvc-1", SIZE, block()).volume_id == volume.volume_id


def test_cancelled_job_is_started_again(
    service: Service,
    client: Client,
    volume: csi.Volume,
    fake: FakeHost,
    disk: Disk,
    removed: threading.Event,
) -> None:
    """Of one that was put on record, though nobody knew."""

    def lose(words: Sequence[str]) -> Result | None:
        if "carver.state=wiping" in words:
            fake.lvm2_program(words)
            raise lvm_errors.SessionLost(words, "it ended")
        return None

    fake.intercept = lose
    with expect.code("UNAVAILABLE"):
        client.delete(volume.volume_id)
    fake.intercept = lambda _words: None
    assert "carver.state=wiping" in tags(fake)["vol-pvc-1"]
    with expect.code("ABORTED"):
        client.delete(volume.volume_id)
    disk.free.set()
    idle(service)
    client.delete(volume.volume_id)
    until_removed(fake, removed)


def test_cancelled_job_removes_nothing(
    service: Service, client: Client, fake: FakeHost, disk: Disk
) -> None:
    """Nothing of it is left to be overwritten, and the name may be another volume's by then."""
    volume = client.create("pvc-1", 100 * MIB, block())
    fake.intercept = refuse_record
    with expect.code("INTERNAL", "no luck"):
        client.delete(volume.volume_id)
    disk.free.set()
    idle(service)
    assert list(tags(fake)) == ["vol-pvc-1"]


def test_inline_volume_being_erased_is_not_published(
    service: Service, client: Client, fake: FakeHost, disk: Disk, tmp_path: Path
) -> None:
    pod = f"csi-{'0123456789abcdef' * 4}"
    client.publish_inline(pod, tmp_path / "mount", {"size": "300Mi"})
    fake.intercept = refuse_record
    with expect.code("INTERNAL", "no luck"):
        client.unpublish(pod, tmp_path / "mount")
    fake.intercept = lambda _words: None
    with expect.code("ABORTED", "being erased"):
        client.publish_inline(pod, tmp_path / "mount", {"size": "300Mi"})
    disk.free.set()
    service.eraser.grace_seconds = 20
    idle(service)
    client.unpublish(pod, tmp_path / "mount")
    assert tags(fake) == {}


def test_removed_volume_is_not_tagged(
    service: Service,
    client: Client,
    volume: csi.Volume,
    fake: FakeHost,
    disk: Disk,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its caller waited no longer for the wipe while lvm2 removed it, and lvm2's shell was lost."""
    waited = threading.Event()
    put_on_record = service.eraser._put_on_record

    def put(job: Any) -> bool:
        waited.set()
        return put_on_record(job)

    def lose(words: Sequence[str]) -> Result | None:
        if words[1] == "lvremove":
            assert waited.wait(20)
            fake.lvm2_program(words)
            raise lvm_errors.SessionLost(words, "it ended")
        return None

    monkeypatch.setattr(service.eraser, "_put_on_record", put)
    disk.free.set()
    fake.intercept = lose
    with expect.code("UNAVAILABLE"):
        client.delete(volume.volume_id)
    fake.intercept = lambda _words: None
    assert tags(fake) == {}
    client.delete(volume.volume_id)


def test_the_progress_is_told_to_who_waits_and_shown_by_status(
    client: Client, volume: csi.Volume, disk: Disk, fake: FakeHost, config: Config
) -> None:
    client.delete(volume.volume_id)
    assert disk.reached.wait(20)
    with expect.code("ABORTED", "being erased: 0 of 300 MiB"):
        client.create("pvc-1", SIZE, block())
    [seen] = status.read(config, serving.machine(fake)).volumes
    assert (seen.state, seen.progress) == ("wiping", "0 of 300 MiB")
    disk.free.set()
