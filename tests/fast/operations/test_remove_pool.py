"""An empty pool that is overwritten: wanted again meanwhile, failing, or left by a process."""

import errno
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import configured
import expect
import grpc
import in_background
import pytest
import serving
from fakes.disk import Disk
from fakes.host import FakeHost

from agent.csi.client import Client, block, mounted
from agent.daemon.server import Service
from agent.settings.settings import Config
from agent.work import group_worker
from agent.work.group_worker import Job, Stopping
from lvm import lvm_errors
from lvm.layout import Reserve
from lvm.thin import Policy
from mount import command
from mount.command import Result
from proto import csi_pb2 as csi

MIB = 1 << 20
EXTENT = 4 * MIB
# Three pieces of what is overwritten at a time.
POOL = Reserve(size_bytes=192 * MIB)
pytestmark = [
    pytest.mark.groups(data=[120]),
    pytest.mark.settings(
        classes=(
            replace(
                configured.THIN, default=True, pool=Policy(size=POOL, chunk_size_bytes=16 * MIB)
            ),
        )
    ),
]


def start(config: Config, fake: FakeHost) -> Service:
    return serving.start(config, fake, eraser=0.05)


@pytest.fixture
def service(config: Config, fake: FakeHost) -> Iterator[Service]:
    running = start(config, fake)
    yield running
    running.stop()


def names(fake: FakeHost) -> set[str]:
    return set(fake.lvm2.groups["data"].volumes)


def free_extents(fake: FakeHost) -> int:
    group = fake.lvm2.groups["data"]
    return sum(group.free(one) for one in group.disks)


def begin(client: Client, disk: Disk) -> None:
    """Delete the last volume of the pool, and wait until the pool is being zeroed."""
    client.delete(client.create("pvc-1", EXTENT, block()).volume_id)
    assert disk.reached.wait(20)


def zeroing(service: Service) -> Job:
    """The work on the pool."""
    job = service.pool_remover.jobs.of("data/pool-thin")
    assert job is not None
    return job


def free_after(event: threading.Event, disk: Disk) -> None:
    """Let the disk go on once the event is set."""

    def free() -> None:
        assert event.wait(20)
        disk.free.set()

    threading.Thread(target=free, daemon=True).start()


def test_every_chunk_is_zeroed(
    client: Client, service: Service, fake: FakeHost, disk: Disk
) -> None:
    begin(client, disk)
    assert names(fake) == {"pool-thin", "wipe-thin"}
    made = fake.lvm2.groups["data"].volumes["wipe-thin"]
    assert made.tags == {"carver.state=wiping", "carver.class=thin"}
    assert client.volumes() == []
    disk.free.set()
    service.pool_remover.remove_if_empty("data", "pool-thin").result(20)
    expected = [(offset * MIB, 64 * MIB) for offset in (0, 64, 128)]
    assert [(offset, length) for _, offset, length in disk.written] == expected
    assert names(fake) == set()
    assert free_extents(fake) == 120


def test_unknown_outcome_of_the_last_deletion(
    client: Client, service: Service, fake: FakeHost, disk: Disk
) -> None:
    disk.free.set()
    volume = client.create("pvc-1", EXTENT, block())
    first = iter([True])

    def intercept(words: Sequence[str]) -> Result | None:
        if words[1] == "lvremove" and next(first, False):
            fake.lvm2_program(words)
            raise lvm_errors.SessionLost(words, "it ended")
        return None

    fake.intercept = intercept
    with expect.code("UNAVAILABLE"):
        client.delete(volume.volume_id)
    # The caller's next call finds no volume.
    client.delete(volume.volume_id)
    expect.soon(lambda: not names(fake))
    assert free_extents(fake) == 120


def test_partial_chunk_is_not_zeroed(
    client: Client, service: Service, fake: FakeHost, disk: Disk
) -> None:
    disk.free.set()
    volume = client.create("pvc-1", EXTENT, block())
    fake.lvm("lvextend", "--size", f"{204 * MIB}b", "--", "data/pool-thin")
    client.delete(volume.volume_id)
    service.pool_remover.remove_if_empty("data", "pool-thin").result(20)
    assert disk.written[-1][1:] == (128 * MIB, 64 * MIB)
    assert names(fake) == set()


def test_new_volume_keeps_the_pool(
    client: Client, service: Service, fake: FakeHost, disk: Disk
) -> None:
    begin(client, disk)
    job = zeroing(service)
    free_after(job.cancelled, disk)
    client.create("pvc-2", EXTENT, block())
    assert names(fake) == {"pool-thin", "vol-pvc-2"}
    assert wait([job.future], 20).done
    assert len(disk.written) < 3
    assert names(fake) == {"pool-thin", "vol-pvc-2"}


def test_a_chunk_that_takes_long_keeps_no_other_call_from_the_group(
    client: Client, service: Service, fake: FakeHost, disk: Disk
) -> None:
    begin(client, disk)
    job = zeroing(service)
    with ThreadPoolExecutor(1) as callers:
        making = callers.submit(client.create, "pvc-2", EXTENT, block())
        assert job.cancelled.wait(20)
        with command.time_limit(5), service.volume_groups.hold("data"):
            assert not making.done()
        disk.free.set()
        making.result(20)
    assert names(fake) == {"pool-thin", "vol-pvc-2"}
    service.pool_remover.remove_if_empty("data", "pool-thin").result(20)
    assert names(fake) == {"pool-thin", "vol-pvc-2"}


def test_a_disk_that_does_not_answer_aborts_the_call_and_the_pool_is_removed_later(
    client: Client,
    service: Service,
    fake: FakeHost,
    disk: Disk,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_worker, "_ENDING_SECONDS", 0.1)
    begin(client, disk)
    for _ in range(2):
        with expect.code("ABORTED", "data/pool-thin"):
            client.create("pvc-2", EXTENT, block())
    assert names(fake) == {"pool-thin", "wipe-thin"}
    disk.free.set()
    expect.soon(lambda: not names(fake))
    assert free_extents(fake) == 120
    client.create("pvc-2", EXTENT, block())
    assert names(fake) == {"pool-thin", "vol-pvc-2"}


@pytest.mark.parametrize(("size_bytes", "how"), [(1 << 50, block()), (64 << 20, mounted("none"))])
def test_a_call_that_is_refused_in_any_case_ends_no_job_of_a_pool(
    client: Client,
    service: Service,
    fake: FakeHost,
    disk: Disk,
    size_bytes: int,
    how: csi.VolumeCapability,
) -> None:
    """Or a claim that is tried again and again would keep the pool's room for ever."""
    begin(client, disk)
    job = zeroing(service)
    with pytest.raises(grpc.RpcError):
        client.create("pvc-2", size_bytes, how)
    assert not job.cancelled.is_set()
    disk.free.set()
    expect.soon(lambda: not names(fake))


def test_a_pool_that_several_calls_wanted_in_vain_is_removed(
    client: Client, service: Service, fake: FakeHost, disk: Disk
) -> None:
    begin(client, disk)
    fake.intercept = lambda words: Result(5, "", "  no\n") if "thin" in words else None
    disk.free.set()

    def create(number: int) -> None:
        with expect.code("INTERNAL", "no"):
            client.create(f"pvc-{number + 2}", EXTENT, block())

    with ThreadPoolExecutor(4) as callers:
        list(callers.map(create, range(4)))
    fake.intercept = lambda _words: None
    for job in service.pool_remover.jobs.unfinished():
        expect.soon(job.future.done)
        in_background.again(service.pool_remover.jobs)
    expect.soon(lambda: not names(fake))


def test_restart_resumes_zeroing(
    client: Client, service: Service, fake: FakeHost, disk: Disk, config: Config
) -> None:
    begin(client, disk)
    free_after(zeroing(service).cancelled, disk)
    service.stop()
    assert names(fake) == {"pool-thin", "wipe-thin"}
    fake.deactivate("data", "wipe-thin")
    again = start(config, fake)
    again.pool_remover.remove_if_empty("data", "pool-thin").result(20)
    assert names(fake) == set()
    again.stop()


def test_failed_first_volume_removes_the_pool(
    client: Client, service: Service, fake: FakeHost, disk: Disk
) -> None:
    disk.free.set()
    fake.intercept = lambda words: Result(5, "", "  no\n") if "vol-pvc-1" in words else None
    with expect.code("INTERNAL"):
        client.create("pvc-1", EXTENT, block())
    in_background.ended(service.pool_remover.jobs)
    assert any("thin-pool" in words for words in fake.commands)
    assert names(fake) == set()


def test_used_pool_is_kept(
    client: Client, service: Service, fake: FakeHost, disk: Disk, config: Config
) -> None:
    disk.free.set()
    client.create("pvc-1", EXTENT, block())
    service.pool_remover.remove_if_empty("data", "pool-thin").result(20)
    assert names(fake) == {"pool-thin", "vol-pvc-1"}
    fake.lvm(
        "lvcreate",
        *("--yes", "--type", "thin", "--activate", "y", "--ignoreactivationskip"),
        *("--virtualsize", f"{EXTENT}b", "--addtag", "carver.state=wiping"),
        *("--thinpool", "pool-thin", "--name", "wipe-thin", "--", "data"),
    )
    service.reports.fresh()
    assert in_background.look(service, service.pool_remover.jobs) == 1
    service.pool_remover.remove_if_empty("data", "pool-thin").result(20)
    assert names(fake) == {"pool-thin", "vol-pvc-1"}
    assert disk.written == []


def test_failed_zeroing_is_retried(
    client: Client,
    service: Service,
    fake: FakeHost,
    disk: Disk,
    caplog: pytest.LogCaptureFixture,
) -> None:
    service.pool_remover.jobs.retry_seconds = 0.01
    disk.error = OSError(errno.EIO, "no")
    disk.free.set()
    removed, lvm2 = threading.Event(), fake.lvm2.__call__

    def program(words: Sequence[str]) -> Result:
        if "not removed yet" in caplog.text:
            disk.error = None
        result = lvm2(words)
        if words[-1] == "data/pool-thin" and words[1] == "lvremove":
            removed.set()
        return result

    fake.lvm2_program = program
    client.delete(client.create("pvc-1", EXTENT, block()).volume_id)
    assert removed.wait(20)
    assert "pool data/pool-thin is empty, but not removed yet" in caplog.text
    assert names(fake) == set()


def test_wipe_none_zeroes_nothing(config: Config, fake: FakeHost, disk: Disk) -> None:
    running = start(replace(config, wipe="none"), fake)
    running.eraser.grace_seconds = 20
    with Client(config.endpoint) as client:
        client.delete(client.create("pvc-1", EXTENT, block()).volume_id)
    assert names(fake) == set()
    assert not disk.reached.is_set()
    running.stop()


def test_concurrent_deletions(client: Client, service: Service, fake: FakeHost, disk: Disk) -> None:
    disk.free.set()
    service.eraser.grace_seconds = 20
    found = [client.create(f"pvc-{number}", EXTENT, block()) for number in range(6)]
    with ThreadPoolExecutor(6) as callers:
        list(callers.map(client.delete, [one.volume_id for one in found]))
    assert names(fake) == set()


def test_no_job_begins_after_stop(client: Client, service: Service, fake: FakeHost) -> None:
    client.create("pvc-1", EXTENT, block())
    service.stop()
    with pytest.raises(Stopping):
        service.pool_remover.remove_if_empty("data", "pool-thin").result(0)
