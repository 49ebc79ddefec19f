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
import in_background
import pytest
import serving
from fakes.host import FakeHost

from agent.core.errors import OperationPending
from agent.csi.client import Client, block, mounted, of_snapshot, of_volume
from agent.daemon.server import Service
from agent.settings.settings import Config
from agent.work.group_worker import GroupWorkers, Job, Jobs
from lvm import lvm_errors as lvm_errors
from mount import command
from mount import mount_errors as mount_errors
from mount.command import Result
from proto import csi_pb2 as csi
from proto.csi_pb2 import VolumeContentSource as Source

MIB = 1 << 20
SIZE = 200 * MIB
DATA = b"contents" * 512
pytestmark = pytest.mark.groups(data=[300])


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


@pytest.fixture
def source(snapshot: csi.Snapshot) -> Source:
    return of_snapshot(snapshot.snapshot_id)


@pytest.fixture
def patient(service: Service) -> Service:
    """The service; calls wait for copies to end."""
    service.copier.grace_seconds = 20
    return service


def names(fake: FakeHost) -> set[str]:
    return set(fake.lvm2.groups["data"].volumes)


def copied(fake: FakeHost) -> bytes:
    return fake.read_bytes("/dev/mapper/data-vol--pvc--2", 64 * MIB, len(DATA))


def overflow(fake: FakeHost) -> None:
    """Overflow the snapshots; only their status shows it, since all data was read before."""
    fake.write_bytes("/dev/mapper/data-vol--pvc--1", 0, bytes(range(256)) * 16 * 11000)
    for one in fake.lvm2.groups["data"].volumes.values():
        one.media.unreadable = False


def settle(service: Service) -> None:
    in_background.ended(service.copier.jobs)
    in_background.ended(service.eraser.jobs)


def retry(service: Service) -> None:
    """Retry the failed copy, as some time later."""
    in_background.again(service.copier.jobs)


def test_long_copy_answers_with_its_progress(
    client: Client, fake: FakeHost, disk: Disk, source: Source, service: Service
) -> None:
    with expect.code("ABORTED", "being copied"):
        client.create("pvc-2", 0, block(), source=source)
    disk.wait(1)
    with expect.code("ABORTED", "being copied: 0 of 200 MiB"):
        client.create("pvc-2", 0, block(), source=source)
    disk.let(1)
    disk.wait(1)
    with expect.code("ABORTED", "64 of 200 MiB, about", "at the present rate"):
        client.create("pvc-2", 0, block(), source=source)
    assert service.copier.jobs.counts() == {"queued": 0, "running": 1, "failed": 0}
    disk.let()
    service.copier.grace_seconds = 20
    assert client.create("pvc-2", 0, block(), source=source).capacity_bytes == SIZE
    assert copied(fake) == DATA
    # The volume is ready a moment before the job has ended.
    in_background.ended(service.copier.jobs)
    assert service.copier.jobs.counts() == {"queued": 0, "running": 0, "failed": 0}


def test_incomplete_volume_cannot_be_used(
    client: Client, disk: Disk, snapshot: csi.Snapshot, service: Service, tmp_path: Path
) -> None:
    origin, taken = snapshot.source_volume_id, snapshot.snapshot_id
    for name, source in (("pvc-2", of_snapshot(taken)), ("pvc-3", of_volume(origin))):
        with expect.code("ABORTED"):
            client.create(name, 0, block(), source=source)
    copy = origin.replace("pvc-1", "pvc-2")
    assert [one.volume_id for one in client.volumes()] == [origin]
    disk.wait(1)
    with expect.code("ABORTED", "being copied: 0 of 200 MiB"):
        client.stage(csi.Volume(volume_id=copy), tmp_path / "staging", block())
    with expect.code("ABORTED", "being copied: 0 of 200 MiB"):
        client.expand(copy, 2 * SIZE)
    with expect.code("ABORTED", "not complete"):
        client.snapshot("2", copy)
    with expect.code("ABORTED", "not complete"):
        client.create("pvc-4", 0, block(), source=of_volume(copy))
    # Nor are its sources deleted meanwhile.
    with expect.code("FAILED_PRECONDITION", "pvc-2", "copied"):
        client.delete_snapshot(taken)
    with expect.code("FAILED_PRECONDITION", "pvc-3", "copied"):
        client.delete(origin)
    disk.let()
    settle(service)
    assert not service.copier.jobs.counts()["failed"]


def test_delete_cancels_the_copy(
    client: Client, fake: FakeHost, disk: Disk, snapshot: csi.Snapshot, service: Service
) -> None:
    for source in (of_snapshot(snapshot.snapshot_id), of_volume(snapshot.source_volume_id)):
        with expect.code("ABORTED"):
            client.create("pvc-2", 0, block(), source=source)
        disk.wait(1)
        volume_id = snapshot.source_volume_id.replace("pvc-1", "pvc-2")
        job = service.copier.jobs.of(volume_id)
        assert job is not None
        with ThreadPoolExecutor(1) as caller:
            deleted = caller.submit(client.delete, volume_id)
            assert job.cancelled.wait(20)
            disk.let(1)
            deleted.result(20)
        assert names(fake) == {"vol-pvc-1", "snap-1"}


def test_copy_that_does_not_end_can_begin_again(
    client: Client,
    fake: FakeHost,
    disk: Disk,
    source: Source,
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent.work.group_worker._ENDING_SECONDS", 0.01)
    with expect.code("ABORTED"):
        client.create("pvc-2", 0, block(), source=source)
    disk.wait(1)
    [job] = service.copier.jobs.unfinished()
    with expect.code("ABORTED", "in progress"):
        client.delete(job.key)
    disk.let()
    assert wait([job.future], 20).done
    service.copier.grace_seconds = 20
    client.create("pvc-2", 0, block(), source=source)
    assert copied(fake) == DATA


def test_restart_copies_anew(
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
    first.context.workers.halt()
    first.stop()
    assert "copy-pvc-3" in names(fake)
    assert not copied(fake).strip(b"\0")
    disk.let()
    second = start(config, fake, "3.sock")
    settle(second)
    assert copied(fake) == DATA
    assert names(fake) == {"vol-pvc-1", "vol-pvc-2", "vol-pvc-3", "snap-1"}
    second.stop()


def test_failed_copy_is_retried(
    client: Client,
    fake: FakeHost,
    disk: Disk,
    snapshot: csi.Snapshot,
    source: Source,
    patient: Service,
) -> None:
    disk.error = OSError(5, "Input/output error")
    disk.let(1)
    with expect.code("ABORTED", "Input/output error"):
        client.create("pvc-2", 0, block(), source=source)
    assert patient.copier.jobs.counts()["failed"] == 1
    disk.error = None
    disk.let()
    retry(patient)
    client.create("pvc-2", 0, block(), source=source)
    assert copied(fake) == DATA


def test_completed_copy_is_not_retried(
    client: Client, fake: FakeHost, disk: Disk, source: Source, patient: Service
) -> None:
    disk.error = OSError(5, "Input/output error")
    disk.let()
    with expect.code("ABORTED", "cannot complete volume"):
        client.create("pvc-2", 0, block(), source=source)
    disk.error = None
    client.create("pvc-2", 0, block(), source=source)
    fake.write_bytes("/dev/mapper/data-vol--pvc--2", 64 * MIB, DATA[::-1])
    in_background.again(patient.copier.jobs)
    settle(patient)
    assert copied(fake) == DATA[::-1]


def test_overflow_during_the_copy(
    client: Client, fake: FakeHost, disk: Disk, snapshot: csi.Snapshot, patient: Service
) -> None:
    patient.context.locks.grace_seconds = 20
    sources = (of_snapshot(snapshot.snapshot_id), of_volume(snapshot.source_volume_id))
    for calls, source in zip((2, 1), sources, strict=True):
        with ThreadPoolExecutor(calls) as callers:
            name = f"pvc-2-{calls}"
            waiting = [
                callers.submit(client.create, name, 0, block(), source=source) for _ in range(calls)
            ]
            disk.wait(1)
            overflow(fake)
            disk.let(4)
            for call in waiting:
                with expect.code("FAILED_PRECONDITION", "lost"):
                    call.result(20)
        assert names(fake) == {"vol-pvc-1", "snap-1"}
        while disk.reached.acquire(blocking=False):
            pass


def test_volume_that_lost_its_source_is_removed(
    client: Client,
    fake: FakeHost,
    disk: Disk,
    snapshot: csi.Snapshot,
    source: Source,
    patient: Service,
) -> None:
    disk.error = OSError(5, "Input/output error")
    disk.let()
    with expect.code("ABORTED", "cannot complete volume"):
        client.create("pvc-2", 0, block(), source=source)
    fake.lvm("lvremove", "--yes", "--", "data/snap-1")
    retry(patient)
    assert names(fake) == {"vol-pvc-1", "vol-pvc-2"}
    with expect.code("NOT_FOUND", "snap-1"):
        client.create("pvc-2", 0, block(), source=source)
    assert names(fake) == {"vol-pvc-1"}


def test_next_stage_grows_the_file_system(
    fake: FakeHost,
    client: Client,
    patient: Service,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
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
    # Its bridge is removed a moment after the copy is ready.
    idle(patient)
    fake.commands.clear()
    client.stage(copy, staging, mounted("ext4"))
    assert client.stats(copy.volume_id, staging).usage[0].total == 128 * MIB
    assert fake.commands == []


def test_unused_bridge_is_removed_at_start(
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
    service.reports.fresh()
    # A start waits no longer than this for what goes on behind it.
    service.copier.grace_seconds = 0
    service.copier.resume("data")
    idle(service)
    assert names(fake) == {"vol-pvc-1"}


def idle(service: Service) -> None:
    """What goes on behind the answers has ended, or failed."""
    for jobs in (service.copier.jobs, service.copier.bridges, service.eraser.jobs):
        in_background.ended(jobs)


def time_out(client: Client, source_id: str) -> None:
    with expect.code("DEADLINE_EXCEEDED"):
        client.create("pvc-2", 0, block(), source=of_volume(source_id))


class Deadline:
    """The caller's deadline passes at an lvcreate, before or after it took effect."""

    def __init__(self, fake: FakeHost, of: str, *, made: bool) -> None:
        self._fake, self._of, self._made = fake, of, made
        self.sweeps_fail = False
        self.over = False
        # The thread of the call, from when its deadline has passed.
        self._caller = 0
        fake.intercept = self._intercept

    def _intercept(self, words: Sequence[str]) -> Result | None:
        # What goes on behind the answer limits some of its own commands, too.
        of_caller = command.remaining_seconds() is not None
        of_caller = of_caller and self._caller in (0, threading.get_ident())
        if words[1] == "lvconvert" and self.sweeps_fail:
            return Result(5, "", "  it does not work today\n")
        if of_caller and words[1] == "lvcreate" and self._of in words:
            self.over, self._caller = True, threading.get_ident()
            if self._made:
                self._fake.lvm2_program(words)
        if of_caller and self.over:
            raise mount_errors.CommandTimedOut(words, 1.0)
        return None


CLONED = {("copy-pvc-2", False), ("copy-pvc-2", True), ("vol-pvc-2", False)}


@pytest.mark.parametrize(("of", "made"), sorted(CLONED))
def test_timeout_leaves_no_bridge(
    client: Client, fake: FakeHost, patient: Service, of: str, made: bool
) -> None:
    volume = client.create("pvc-1", SIZE, block())
    deadline = Deadline(fake, of, made=made)
    time_out(client, volume.volume_id)
    assert deadline.over
    fake.intercept = lambda _words: None
    idle(patient)
    assert names(fake) == {"vol-pvc-1"}
    client.delete(volume.volume_id)


def test_timeout_after_lvcreate_is_completed(
    client: Client, fake: FakeHost, service: Service
) -> None:
    volume = client.create("pvc-1", SIZE, block())
    Deadline(fake, "vol-pvc-2", made=True)
    time_out(client, volume.volume_id)
    fake.intercept = lambda _words: None
    service.copier.grace_seconds = 20
    client.create("pvc-2", 0, block(), source=of_volume(volume.volume_id))
    idle(service)
    assert names(fake) == {"vol-pvc-1", "vol-pvc-2"}


def test_unused_bridge_is_used_by_the_next_call(
    client: Client, fake: FakeHost, patient: Service
) -> None:
    volume = client.create("pvc-1", SIZE, block())
    fake.write_bytes("/dev/mapper/data-vol--pvc--1", 64 * MIB, DATA)
    deadline = Deadline(fake, "vol-pvc-2", made=False)
    deadline.sweeps_fail = True
    time_out(client, volume.volume_id)
    idle(patient)
    assert names(fake) == {"vol-pvc-1", "copy-pvc-2"}
    fake.intercept = lambda _words: None
    client.create("pvc-2", 0, block(), source=of_volume(volume.volume_id))
    assert copied(fake) == DATA
    assert names(fake) == {"vol-pvc-1", "vol-pvc-2"}


def test_bridge_of_another_volume_is_not_used(
    client: Client, fake: FakeHost, patient: Service
) -> None:
    first, second = (client.create(f"pvc-{one}", SIZE, block()).volume_id for one in (1, 3))
    deadline = Deadline(fake, "vol-pvc-2", made=False)
    deadline.sweeps_fail = True
    time_out(client, first)
    idle(patient)
    fake.intercept = lambda _words: None
    with expect.code("ABORTED", "copy-pvc-2"):
        client.create("pvc-2", 0, block(), source=of_volume(second))
    idle(patient)
    assert names(fake) == {"vol-pvc-1", "vol-pvc-3"}


def test_removal_of_a_bridge_is_retried(
    client: Client, fake: FakeHost, disk: Disk, snapshot: csi.Snapshot, patient: Service
) -> None:
    patient.copier.bridges.retry_seconds = 0.05
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
    idle(patient)
    assert not list(refused)
    assert names(fake) == {"vol-pvc-1", "vol-pvc-2", "snap-1"}


@pytest.mark.parametrize("lost", ["lvchange", "lvconvert"], ids=["complete", "parted"])
def test_copy_of_unknown_outcome_is_not_repeated(
    client: Client, fake: FakeHost, disk: Disk, patient: Service, lost: str
) -> None:
    """Until that is known nobody may use the volume; and nobody else asks for its bridge."""
    patient.copier.jobs.soon_seconds = patient.copier.bridges.soon_seconds = 0.05
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
    idle(patient)
    assert copied(fake) == DATA
    assert not patient.copier.jobs.has(f"data@{fake.lvm2.groups['data'].uuid[:8]}/vol-pvc-2")


def test_remains_of_lvcreate_are_erased(client: Client, fake: FakeHost, patient: Service) -> None:
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
    in_background.ended(patient.eraser.jobs)
    client.create("pvc-2", 0, block(), source=of_volume(volume.volume_id))
    client.snapshot("2", volume.volume_id)


def test_halted_job_does_not_begin() -> None:
    done: list[str] = []
    workers = GroupWorkers()
    jobs: Jobs[Job] = Jobs(workers, "test", lambda job: done.append(job.key), "%s failed: %s")
    with jobs.halted("one"), pytest.raises(OperationPending):
        jobs.start(Job("one"))
    jobs.start(Job("one")).future.result(20)
    assert done == ["one"]
    workers.stop()


def request(name: str, source: Source) -> csi.CreateVolumeRequest:
    return csi.CreateVolumeRequest(
        name=name, volume_capabilities=[block()], volume_content_source=source
    )


def test_call_waits_until_its_deadline(
    client: Client, disk: Disk, snapshot: csi.Snapshot, service: Service
) -> None:
    service.copier.grace_seconds = 600
    wanted, began = request("pvc-2", of_snapshot(snapshot.snapshot_id)), time.monotonic()
    with expect.code("ABORTED", "being copied"):
        client.controller.CreateVolume(wanted, timeout=3)
    assert 1.5 < time.monotonic() - began < 3
    # A caller without a deadline waits for the default time.
    with ThreadPoolExecutor(1) as caller:
        patient = caller.submit(client.controller.CreateVolume, wanted)
        with suppress(TimeoutError):
            patient.result(1)
        disk.let()
        assert patient.result(20).volume.capacity_bytes == SIZE


def test_delete_while_a_call_waits(
    client: Client,
    disk: Disk,
    snapshot: csi.Snapshot,
    source: Source,
    service: Service,
    fake: FakeHost,
) -> None:
    service.copier.grace_seconds = 600
    with ThreadPoolExecutor(2) as callers:
        waiting = callers.submit(client.create, "pvc-2", 0, block(), source=source)
        disk.wait(1)
        # The copy may begin a moment before CreateVolume has left the name to wait for it.
        service.context.locks.grace_seconds = 60
        deleting = callers.submit(client.delete, snapshot.source_volume_id.replace("-1", "-2"))
        with suppress(TimeoutError):
            deleting.result(0.5)
        disk.let()
        deleting.result(20)
        with expect.code("ABORTED"):
            waiting.result(20)
    settle(service)
    assert names(fake) == {"vol-pvc-1", "snap-1"}


def test_waiting_copies_leave_room_for_calls(
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
        codes = Counter(one.result() for one in clones)
    # A group has three quarters of the places for calls that wait; the others are aborted.
    assert codes["OK"] >= 90
    assert codes.keys() <= {"OK", "ABORTED"}
