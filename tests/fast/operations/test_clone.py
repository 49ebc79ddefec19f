"""Copies that take longer than the caller waits, fail, are called off, or outlive their process."""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import expect
import grpc
import pytest
import serving
from fakes.host import FakeHost

from agent.core.errors import OperationPending
from agent.core.settings import Config
from agent.core.task_queue import Job, TaskQueue
from agent.csi.client import Client, block, mounted, of_snapshot, of_volume
from agent.daemon.server import Service
from lvm import errors as lvm_errors
from mount import command
from mount import errors as mount_errors
from mount.command import Result
from proto import csi_pb2 as csi

MIB = 1 << 20
SIZE = 200 * MIB
DATA = b"contents" * 512


@pytest.fixture
def fake(tmp_path: Path) -> FakeHost:
    host = FakeHost(tmp_path)
    host.lvm2.add_group("data", [300])
    return host


def start(config: Config, fake: FakeHost, socket: str = "csi.sock") -> Service:
    config = replace(config, endpoint=config.endpoint.with_name(socket))
    return serving.start(config, fake, eraser=20, copier=0.05)


@pytest.fixture
def service(config: Config, fake: FakeHost) -> Iterator[Service]:
    running = start(config, fake)
    yield running
    running.stop()


class Disk:
    """A disk that copies as many chunks as the test lets it."""

    def __init__(self, fake: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allowed = threading.Semaphore(0)
        self.reached = threading.Semaphore(0)
        self.error: OSError | None = None
        self._real = fake.kernel.copy
        monkeypatch.setattr(fake.kernel, "copy", self._copy)

    def _copy(
        self, source: str, target: str, offset_bytes: int, length_bytes: int, *, blank: bool
    ) -> None:
        self.reached.release()
        assert self.allowed.acquire(timeout=20)
        if self.error is not None:
            raise self.error
        self._real(source, target, offset_bytes, length_bytes, blank=blank)

    def let(self, chunks: int = 100) -> None:
        self.allowed.release(chunks)

    def wait(self, chunks: int) -> None:
        """Until the copy has come to so many chunks, of which the last waits."""
        for _ in range(chunks):
            assert self.reached.acquire(timeout=20)


@pytest.fixture
def disk(fake: FakeHost, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(fake, monkeypatch)


@pytest.fixture
def snapshot(client: Client, fake: FakeHost) -> csi.Snapshot:
    volume = client.create("pvc-1", SIZE, block())
    fake.write_bytes("/dev/mapper/data-vol--pvc--1", 64 * MIB, DATA)
    return client.snapshot("1", volume.volume_id)


def names(fake: FakeHost) -> set[str]:
    return set(fake.lvm2.groups["data"].volumes)


def copied(fake: FakeHost) -> bytes:
    return fake.read_bytes("/dev/mapper/data-vol--pvc--2", 64 * MIB, len(DATA))


def settle(service: Service) -> None:
    service.copier.jobs.shutdown()
    service.eraser.jobs.shutdown()


def look_again(service: Service, snapshot: csi.Snapshot) -> None:
    """What is done some time after the copy to pvc-2 failed."""
    jobs = service.copier.jobs
    jobs._retry_now(jobs._jobs[snapshot.source_volume_id.replace("pvc-1", "pvc-2")])


def test_a_long_copy_is_put_off_with_its_progress_until_it_is_ready(
    client: Client, fake: FakeHost, disk: Disk, snapshot: csi.Snapshot, service: Service
) -> None:
    source = of_snapshot(snapshot.snapshot_id)
    with expect.code("ABORTED", "copied", "0 %"):
        client.create("pvc-2", 0, block(), source=source)
    disk.let(1)
    disk.wait(2)
    with expect.code("ABORTED", "32 %", str(SIZE)):
        client.create("pvc-2", 0, block(), source=source)
    assert service.copier.jobs.counts() == {"queued": 0, "running": 1, "failed": 0}
    disk.let()
    service.copier.grace_seconds = 20
    assert client.create("pvc-2", 0, block(), source=source).capacity_bytes == SIZE
    assert copied(fake) == DATA
    # The volume is ready a moment before the job has ended.
    wait([job.ended for job in list(service.copier.jobs._jobs.values())], 20)
    assert service.copier.jobs.counts() == {"queued": 0, "running": 0, "failed": 0}


def test_a_volume_that_is_not_complete_is_none_yet(
    client: Client, disk: Disk, snapshot: csi.Snapshot, tmp_path: Path
) -> None:
    with expect.code("ABORTED"):
        client.create("pvc-2", 0, block(), source=of_snapshot(snapshot.snapshot_id))
    volume_id = snapshot.source_volume_id.replace("pvc-1", "pvc-2")
    assert [one.volume_id for one in client.volumes()] == [snapshot.source_volume_id]
    with expect.code("ABORTED", "not complete"):
        client.stage(csi.Volume(volume_id=volume_id), tmp_path / "staging", block())
    with expect.code("ABORTED", "not complete"):
        client.expand(volume_id, 2 * SIZE)
    with expect.code("ABORTED", "not complete"):
        client.snapshot("2", volume_id)
    with expect.code("ABORTED", "not complete"):
        client.create("pvc-3", 0, block(), source=of_volume(volume_id))
    disk.let()


def test_a_source_is_kept_while_it_is_copied(
    client: Client, disk: Disk, snapshot: csi.Snapshot, service: Service
) -> None:
    with expect.code("ABORTED"):
        client.create("pvc-2", 0, block(), source=of_snapshot(snapshot.snapshot_id))
    with expect.code("ABORTED"):
        client.create("pvc-3", 0, block(), source=of_volume(snapshot.source_volume_id))
    with expect.code("FAILED_PRECONDITION", "pvc-2", "copied"):
        client.delete_snapshot(snapshot.snapshot_id)
    with expect.code("FAILED_PRECONDITION", "pvc-3", "copied"):
        client.delete(snapshot.source_volume_id)
    disk.let()
    settle(service)
    assert not service.copier.jobs.counts()["failed"]


def test_deleting_what_is_not_complete_ends_the_copy_and_leaves_nothing(
    client: Client, fake: FakeHost, disk: Disk, snapshot: csi.Snapshot, service: Service
) -> None:
    for source in (of_snapshot(snapshot.snapshot_id), of_volume(snapshot.source_volume_id)):
        with expect.code("ABORTED"):
            client.create("pvc-2", 0, block(), source=source)
        disk.wait(1)
        volume_id = snapshot.source_volume_id.replace("pvc-1", "pvc-2")
        job = service.copier.jobs._jobs[volume_id]
        with ThreadPoolExecutor(1) as caller:
            deleted = caller.submit(client.delete, volume_id)
            assert job.cancelled.wait(20)
            disk.let(1)
            deleted.result(20)
        assert names(fake) == {"vol-pvc-1", "snap-1"}


def test_a_copy_that_cannot_be_ended_now_may_begin_again(
    client: Client,
    fake: FakeHost,
    disk: Disk,
    snapshot: csi.Snapshot,
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent.core.task_queue._ENDING_SECONDS", 0.01)
    source = of_snapshot(snapshot.snapshot_id)
    with expect.code("ABORTED"):
        client.create("pvc-2", 0, block(), source=source)
    disk.wait(1)
    [job] = service.copier.jobs._jobs.values()
    with expect.code("ABORTED", "in progress"):
        client.delete(job.key)
    disk.let()
    assert wait([job.ended], 20).done
    service.copier.grace_seconds = 20
    client.create("pvc-2", 0, block(), source=source)
    assert copied(fake) == DATA


def test_a_copy_that_a_restart_interrupts_is_made_anew(
    client: Client, fake: FakeHost, disk: Disk, snapshot: csi.Snapshot, config: Config
) -> None:
    first = start(config, fake, "2.sock")
    with Client(config.endpoint.with_name("2.sock")) as caller:
        for name, source in (
            ("pvc-2", of_snapshot(snapshot.snapshot_id)),
            ("pvc-3", of_volume(snapshot.source_volume_id)),
        ):
            with expect.code("ABORTED"):
                caller.create(name, 0, block(), source=source)
    disk.wait(2)
    disk.let(2)
    first.copier.jobs._stopping.set()
    first.stop()
    assert "copy-pvc-3" in names(fake)
    assert not copied(fake).strip(b"\0")
    disk.let()
    second = start(config, fake, "3.sock")
    settle(second)
    assert copied(fake) == DATA
    assert names(fake) == {"vol-pvc-1", "vol-pvc-2", "vol-pvc-3", "snap-1"}
    second.stop()


def test_a_copy_that_fails_is_tried_again(
    client: Client, fake: FakeHost, disk: Disk, snapshot: csi.Snapshot, service: Service
) -> None:
    service.copier.grace_seconds = 20
    disk.error = OSError(5, "Input/output error")
    disk.let(1)
    source = of_snapshot(snapshot.snapshot_id)
    with expect.code("INTERNAL", "Input/output error"):
        client.create("pvc-2", 0, block(), source=source)
    assert service.copier.jobs.counts()["failed"] == 1
    disk.error = None
    disk.let()
    look_again(service, snapshot)
    client.create("pvc-2", 0, block(), source=source)
    assert copied(fake) == DATA


def test_a_copy_that_failed_and_was_made_by_the_next_call_is_not_tried_again(
    client: Client, fake: FakeHost, disk: Disk, snapshot: csi.Snapshot, service: Service
) -> None:
    service.copier.grace_seconds = 20
    disk.error = OSError(5, "Input/output error")
    disk.let()
    source = of_snapshot(snapshot.snapshot_id)
    with expect.code("INTERNAL"):
        client.create("pvc-2", 0, block(), source=source)
    [failed] = service.copier.jobs._jobs.values()
    disk.error = None
    client.create("pvc-2", 0, block(), source=source)
    fake.write_bytes("/dev/mapper/data-vol--pvc--2", 64 * MIB, DATA[::-1])
    service.copier.jobs._retry_now(failed)
    settle(service)
    assert copied(fake) == DATA[::-1]


def test_a_snapshot_that_overflows_while_it_is_copied_gives_no_volume_and_leaves_none(
    client: Client, fake: FakeHost, disk: Disk, snapshot: csi.Snapshot, service: Service
) -> None:
    service.copier.grace_seconds = 20
    for number, source in enumerate(
        (of_snapshot(snapshot.snapshot_id), of_volume(snapshot.source_volume_id))
    ):
        with ThreadPoolExecutor(1) as caller, expect.code("FAILED_PRECONDITION", "lost"):
            made = caller.submit(client.create, f"pvc-2-{number}", 0, block(), source=source)
            disk.wait(1)
            fake.write_bytes("/dev/mapper/data-vol--pvc--1", 0, bytes(range(256)) * 16 * 11000)
            # All was read before, so that only the last look tells.
            for one in fake.lvm2.groups["data"].volumes.values():
                one.media.unreadable = False
            disk.let(4)
            made.result(20)
        assert names(fake) == {"vol-pvc-1", "snap-1"}
        while disk.reached.acquire(blocking=False):
            pass


def test_what_can_never_be_completed_goes_when_the_caller_hears_of_it(
    client: Client, fake: FakeHost, disk: Disk, snapshot: csi.Snapshot, service: Service
) -> None:
    source = of_snapshot(snapshot.snapshot_id)
    service.copier.grace_seconds = 20
    disk.error = OSError(5, "Input/output error")
    disk.let()
    with expect.code("INTERNAL"):
        client.create("pvc-2", 0, block(), source=source)
    fake.lvm("lvremove", "--yes", "--", "data/snap-1")
    look_again(service, snapshot)
    assert names(fake) == {"vol-pvc-1", "vol-pvc-2"}
    with expect.code("NOT_FOUND", "snap-1"):
        client.create("pvc-2", 0, block(), source=source)
    assert names(fake) == {"vol-pvc-1"}


def test_a_larger_copy_whose_file_system_did_not_grow_is_grown_by_the_next_stage(
    fake: FakeHost, client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(path: str, blocks: int) -> None:
        raise OSError(5, "Input/output error")

    staging, other = tmp_path / "staging", tmp_path / "other"
    origin = client.create("pvc-1", 64 * MIB, mounted("ext4"))
    client.stage(origin, other, mounted("ext4"))
    source = of_volume(origin.volume_id)
    copy = client.create("pvc-2", 128 * MIB, mounted("ext4"), source=source)
    with monkeypatch.context() as broken:
        broken.setattr(fake.kernel, "grow_ext4", fails)
        # Not once: it is not OK as long as the file system is too small.
        for _ in range(2):
            with expect.code("FAILED_PRECONDITION", "Input/output error"):
                client.stage(copy, staging, mounted("ext4"))
    assert client.stats(copy.volume_id, staging).usage[0].total == 64 * MIB
    fake.commands.clear()
    client.stage(copy, staging, mounted("ext4"))
    assert client.stats(copy.volume_id, staging).usage[0].total == 128 * MIB
    assert fake.commands == []


def test_a_bridge_without_a_copy_goes_at_the_next_start(
    client: Client, fake: FakeHost, snapshot: csi.Snapshot, service: Service
) -> None:
    bridge = fake.lvm2.groups["data"].volumes["snap-1"]
    fake.lvm2.groups["data"].volumes = {
        name.replace("snap-1", "copy-pvc-9"): one
        for name, one in fake.lvm2.groups["data"].volumes.items()
    }
    fake.lvm2.deactivate("data", "vol-pvc-1")
    bridge.name = "copy-pvc-9"
    assert client.snapshots() == []
    service.inventory.state()
    # A start waits no longer than this for what goes on behind it.
    service.copier.grace_seconds = 0
    service.copier.resume()
    idle(service)
    assert names(fake) == {"vol-pvc-1"}


def idle(service: Service) -> None:
    """What goes on behind the answers has ended, or failed."""
    for jobs in (service.copier.jobs, service.copier.bridges, service.eraser.jobs):
        wait([job.ended for job in list(jobs._jobs.values())], 20)


class Deadline:
    """The caller's time is over at an lvcreate, before or after that did its work."""

    def __init__(self, fake: FakeHost, of: str, *, made: bool) -> None:
        self._fake, self._of, self._made = fake, of, made
        self.sweeps_fail = False
        self.over = False
        fake.intercept = self._intercept

    def _intercept(self, words: Sequence[str]) -> Result | None:
        of_caller = command.remaining_seconds() is not None
        if words[1] == "lvconvert" and self.sweeps_fail:
            return Result(5, "", "  it does not work today\n")
        if of_caller and words[1] == "lvcreate" and self._of in words:
            self.over = True
            if self._made:
                self._fake.lvm2_program(words)
        if of_caller and self.over:
            raise mount_errors.CommandTimedOut(words, 1.0)
        return None


CLONED = {("copy-pvc-2", False), ("copy-pvc-2", True), ("vol-pvc-2", False)}


@pytest.mark.parametrize(("of", "made"), sorted(CLONED))
def test_a_clone_whose_time_is_over_leaves_no_bridge(
    client: Client, fake: FakeHost, service: Service, of: str, made: bool
) -> None:
    service.copier.grace_seconds = 20
    volume = client.create("pvc-1", SIZE, block())
    deadline = Deadline(fake, of, made=made)
    with expect.code("DEADLINE_EXCEEDED"):
        client.create("pvc-2", 0, block(), source=of_volume(volume.volume_id))
    assert deadline.over
    fake.intercept = lambda _words: None
    idle(service)
    assert names(fake) == {"vol-pvc-1"}
    client.delete(volume.volume_id)


def test_a_clone_whose_volume_was_made_in_time_keeps_its_bridge_and_is_completed(
    client: Client, fake: FakeHost, service: Service
) -> None:
    volume = client.create("pvc-1", SIZE, block())
    Deadline(fake, "vol-pvc-2", made=True)
    with expect.code("DEADLINE_EXCEEDED"):
        client.create("pvc-2", 0, block(), source=of_volume(volume.volume_id))
    fake.intercept = lambda _words: None
    service.copier.grace_seconds = 20
    client.create("pvc-2", 0, block(), source=of_volume(volume.volume_id))
    idle(service)
    assert names(fake) == {"vol-pvc-1", "vol-pvc-2"}


def test_a_bridge_that_could_not_be_taken_away_is_copied_from_by_the_next_call(
    client: Client, fake: FakeHost, service: Service
) -> None:
    service.copier.grace_seconds = 20
    volume = client.create("pvc-1", SIZE, block())
    fake.write_bytes("/dev/mapper/data-vol--pvc--1", 64 * MIB, DATA)
    deadline = Deadline(fake, "vol-pvc-2", made=False)
    deadline.sweeps_fail = True
    with expect.code("DEADLINE_EXCEEDED"):
        client.create("pvc-2", 0, block(), source=of_volume(volume.volume_id))
    idle(service)
    assert names(fake) == {"vol-pvc-1", "copy-pvc-2"}
    fake.intercept = lambda _words: None
    client.create("pvc-2", 0, block(), source=of_volume(volume.volume_id))
    assert copied(fake) == DATA
    assert names(fake) == {"vol-pvc-1", "vol-pvc-2"}


def test_a_bridge_of_another_volume_is_not_copied_from(
    client: Client, fake: FakeHost, service: Service
) -> None:
    service.copier.grace_seconds = 20
    first, second = (client.create(f"pvc-{one}", SIZE, block()).volume_id for one in (1, 3))
    deadline = Deadline(fake, "vol-pvc-2", made=False)
    deadline.sweeps_fail = True
    with expect.code("DEADLINE_EXCEEDED"):
        client.create("pvc-2", 0, block(), source=of_volume(first))
    idle(service)
    fake.intercept = lambda _words: None
    with expect.code("ABORTED", "copy-pvc-2"):
        client.create("pvc-2", 0, block(), source=of_volume(second))
    idle(service)
    assert names(fake) == {"vol-pvc-1", "vol-pvc-3"}


def test_a_bridge_that_cannot_be_taken_away_is_tried_again(
    client: Client, fake: FakeHost, disk: Disk, snapshot: csi.Snapshot, service: Service
) -> None:
    service.copier.bridges.retry_seconds = 0.05
    service.copier.grace_seconds = 20
    disk.let()
    refused = iter([Result(5, "", "  it does not work today\n")] * 2)
    gone = threading.Event()

    def intercept(words: Sequence[str]) -> Result | None:
        if words[1] == "lvconvert":
            return next(refused, None)
        if words[1] == "lvremove":
            gone.set()
        return None

    fake.intercept = intercept
    client.create("pvc-2", 0, block(), source=of_volume(snapshot.source_volume_id))
    assert gone.wait(20)
    idle(service)
    assert not list(refused)
    assert names(fake) == {"vol-pvc-1", "vol-pvc-2", "snap-1"}


@pytest.mark.parametrize("lost", ["lvchange", "lvconvert"], ids=["complete", "parted"])
def test_a_copy_of_which_nobody_knows_that_it_was_ended_is_not_made_again(
    client: Client, fake: FakeHost, disk: Disk, service: Service, lost: str
) -> None:
    """Until that is known nobody may use the volume; and nobody else asks for its bridge."""
    service.copier.jobs.soon_seconds = service.copier.bridges.soon_seconds = 0.05
    service.copier.grace_seconds = 20
    disk.let()
    source = client.create("pvc-1", SIZE, block())
    answers = iter([True])

    def intercept(words: Sequence[str]) -> Result | None:
        if words[1] == lost and next(answers, False):
            fake.lvm2_program(words)
            raise lvm_errors.SessionLost(words, "it ended")
        return None

    fake.intercept = intercept
    for _ in range(2):
        with suppress(grpc.RpcError):
            client.create("pvc-2", 0, block(), source=of_volume(source.volume_id))
    assert not list(answers)
    fake.write_bytes("/dev/mapper/data-vol--pvc--2", 64 * MIB, DATA)
    expect.soon(lambda: names(fake) == {"vol-pvc-1", "vol-pvc-2"})
    idle(service)
    assert copied(fake) == DATA
    assert not service.copier.jobs.has(f"data@{fake.lvm2.groups['data'].uuid[:8]}/vol-pvc-2")


def test_what_a_killed_lvcreate_left_in_the_place_of_a_snapshot_is_wiped_by_the_next_call(
    client: Client, fake: FakeHost, service: Service
) -> None:
    service.copier.grace_seconds = 20
    volume = client.create("pvc-1", SIZE, block())
    for name in ("copy-pvc-2", "snap-2"):
        client.snapshot("9", volume.volume_id)
        fake.lvm("lvconvert", "--yes", "--splitsnapshot", "--", "data/snap-9")
        fake.deactivate("data", "snap-9")
        left = fake.lvm2.groups["data"].volumes.pop("snap-9")
        left.name = name
        fake.lvm2.groups["data"].volumes[name] = left
    with expect.code("ABORTED", "being erased"):
        client.create("pvc-2", 0, block(), source=of_volume(volume.volume_id))
    with expect.code("ABORTED", "being erased"):
        client.snapshot("2", volume.volume_id)
    wait([job.ended for job in list(service.eraser.jobs._jobs.values())], 20)
    client.create("pvc-2", 0, block(), source=of_volume(volume.volume_id))
    client.snapshot("2", volume.volume_id)


def test_a_job_that_was_called_off_does_not_begin_before_it_is_allowed() -> None:
    done: list[str] = []
    jobs = TaskQueue("test", lambda job: done.append(job.key), Job, "%s failed: %s", workers=1)
    with jobs.halted("one"), pytest.raises(OperationPending):
        jobs.start(Job("one"))
    jobs.start(Job("one")).ended.result(20)
    assert done == ["one"]
    jobs.stop()


def request(name: str, source: csi.VolumeContentSource) -> csi.CreateVolumeRequest:
    return csi.CreateVolumeRequest(
        name=name, volume_capabilities=[block()], volume_content_source=source
    )


def test_a_copy_is_waited_for_until_just_before_the_caller_s_time_is_over(
    client: Client, disk: Disk, snapshot: csi.Snapshot, service: Service
) -> None:
    service.copier.grace_seconds = 600
    wanted, began = request("pvc-2", of_snapshot(snapshot.snapshot_id)), time.monotonic()
    with expect.code("ABORTED", "0 %"):
        client.controller.CreateVolume(wanted, timeout=3)
    assert 1.5 < time.monotonic() - began < 3
    # One who says nothing of his time has some, too.
    with ThreadPoolExecutor(1) as caller:
        patient = caller.submit(client.controller.CreateVolume, wanted)
        with suppress(TimeoutError):
            patient.result(1)
        disk.let()
        assert patient.result(20).volume.capacity_bytes == SIZE


def test_a_volume_that_is_waited_for_can_be_deleted_and_its_caller_is_told_to_call_again(
    client: Client, disk: Disk, snapshot: csi.Snapshot, service: Service, fake: FakeHost
) -> None:
    service.copier.grace_seconds = 600
    source = of_snapshot(snapshot.snapshot_id)
    with ThreadPoolExecutor(2) as callers:
        waiting = callers.submit(client.create, "pvc-2", 0, block(), source=source)
        disk.wait(1)
        deleting = callers.submit(client.delete, snapshot.source_volume_id.replace("-1", "-2"))
        with suppress(TimeoutError):
            deleting.result(0.5)
        disk.let()
        deleting.result(20)
        with expect.code("ABORTED"):
            waiting.result(20)
    settle(service)
    assert names(fake) == {"vol-pvc-1", "snap-1"}


def test_what_cannot_be_completed_is_removed_before_the_caller_who_waited_hears_of_it(
    client: Client, disk: Disk, snapshot: csi.Snapshot, service: Service, fake: FakeHost
) -> None:
    service.copier.grace_seconds = 600
    service.context.locks.grace_seconds = 20
    source = of_snapshot(snapshot.snapshot_id)
    with ThreadPoolExecutor(2) as callers:
        waiting = [
            callers.submit(client.create, "pvc-2", 0, block(), source=source) for _ in range(2)
        ]
        disk.wait(1)
        fake.write_bytes("/dev/mapper/data-vol--pvc--1", 0, bytes(range(256)) * 16 * 11000)
        # All was read before, so that only the last look tells.
        for one in fake.lvm2.groups["data"].volumes.values():
            one.media.unreadable = False
        disk.let()
        for call in waiting:
            with expect.code("FAILED_PRECONDITION", "lost"):
                call.result(20)
    assert names(fake) == {"vol-pvc-1", "snap-1"}


def test_a_hundred_copies_that_wait_leave_a_group_its_places(
    client: Client, disk: Disk, service: Service, tmp_path: Path
) -> None:
    service.copier.grace_seconds = 600
    service.context.locks.grace_seconds = 60
    origin = client.create("pvc-1", 4 * MIB, block())
    source = of_snapshot(client.snapshot("1", origin.volume_id).snapshot_id)

    def clone(number: int) -> str:
        try:
            client.create(f"clone-{number}", 0, block(), source=source)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"

    with ThreadPoolExecutor(100) as callers:
        clones = []
        try:
            for number in range(100):
                clones.append(callers.submit(clone, number))
                while sum(service.copier.jobs.counts().values()) <= number:
                    time.sleep(0.01)
            began = time.monotonic()
            client.stage(origin, tmp_path / "staging", block())
            client.publish(origin, tmp_path / "staging", tmp_path / "target", block())
            client.stats(origin.volume_id, tmp_path / "target")
            assert client.capacity().available_capacity
            late = client.create("pvc-9", 4 * MIB, block())
            client.delete(late.volume_id)
            assert time.monotonic() - began < 5
        finally:
            disk.let(200)
        told = Counter(one.result() for one in clones)
    # A group has three quarters of the places for those who wait; who gets none calls again.
    assert told["OK"] >= 90
    assert told.keys() <= {"OK", "ABORTED"}
