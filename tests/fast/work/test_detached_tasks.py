"""mkfs and fsck that outlive their calls and their volumes."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import expect
import grpc
import pytest
from csi_client import Client
from fakes.host import FakeHost

from agent.core import errors
from agent.csi.client import mounted, of_snapshot, of_volume
from agent.settings.settings import Config
from agent.work import background
from agent.work.background import DetachedTasks
from mount import command
from mount.command import Result, time_limit

MIB = 1 << 20
DEVICE = "/dev/mapper/data-vol--db"


def nothing() -> None:
    """A recheck that passes, or work that is already done."""


class Work:
    """Work that goes on until the test ends it."""

    def __init__(self) -> None:
        self.begun, self.over = threading.Semaphore(0), threading.Event()

    def __call__(self) -> None:
        self.begun.release()
        assert self.over.wait(60)


@contextmanager
def all_turns_taken(work: DetachedTasks, group: str) -> Iterator[Work]:
    """Inside, and until the work is over, further work for a group waits."""
    long = Work()
    with ThreadPoolExecutor(background._AT_ONCE) as callers:
        for one in range(background._AT_ONCE):
            callers.submit(work.do, f"{group}-{one}", group, "mkfs", long, nothing)
        for _ in range(background._AT_ONCE):
            assert long.begun.acquire(timeout=60)
        try:
            yield long
        finally:
            long.over.set()


def queue(
    work: DetachedTasks, volume: str, done: Callable[[], None], look: Callable[[], None]
) -> None:
    with time_limit(0.01), pytest.raises(errors.StillAtWork):
        work.do(volume, "sick", "mkfs", done, look)


def test_a_group_that_hangs_delays_no_other_group_s_tasks() -> None:
    work = DetachedTasks()
    with all_turns_taken(work, "sick"):
        work.do("sound", "sound", "mkfs", nothing, nothing)
        queue(work, "one-more", nothing, nothing)
    work.wait_for("one-more")


def test_a_waiting_task_is_cancelled_with_its_volume() -> None:
    work, did = DetachedTasks(), threading.Event()
    with all_turns_taken(work, "sick"):
        queue(work, "db", did.set, nothing)
        work.cancel("db")
        queue(work, "next", nothing, nothing)
    work.wait_for("next")
    work.wait_for("db")
    assert not did.is_set()


def test_a_running_task_is_not_cancelled() -> None:
    work, long = DetachedTasks(), Work()
    with ThreadPoolExecutor(1) as caller:
        under_way = caller.submit(work.do, "db", "data", "mkfs", long, nothing)
        assert long.begun.acquire(timeout=60)
        with pytest.raises(errors.StillAtWork):
            work.cancel("db")
        long.over.set()
        assert not wait([under_way], 60).not_done
    work.cancel("db")


def test_a_task_that_waited_rechecks_first() -> None:
    work, did = DetachedTasks(), threading.Event()

    def look() -> None:
        raise errors.NoSuchVolume("db")

    with all_turns_taken(work, "sick"):
        queue(work, "db", did.set, look)
    with pytest.raises(errors.NoSuchVolume):
        work.wait_for("db")
    assert not did.is_set()
    work.do("db", "sick", "mkfs", did.set, look)
    assert did.is_set()


def test_mkfs_of_a_deleted_volume_leaves_the_next_one_of_its_name_alone(
    fake: FakeHost, client: Client, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_AT_ONCE", 1)
    source = client.create("source", 64 * MIB, mounted("ext4"))
    client.stage(source, tmp_path / "source", mounted("ext4"))
    client.unstage(source.volume_id, tmp_path / "source")
    snapshot = client.snapshot("snap", source.volume_id)
    slow = client.create("slow", 64 * MIB, mounted("ext4"))
    first = client.create("db", 64 * MIB, mounted("ext4"))
    long = Work()

    def meet(words: Sequence[str]) -> Result | None:
        if words[0] == "mkfs.ext4" and words[-1].endswith("slow"):
            long()
        return None

    fake.intercept = meet
    with Client(config.endpoint, timeout_seconds=1) as hasty:
        for volume in (slow, first):
            with pytest.raises(grpc.RpcError):
                hasty.stage(volume, tmp_path / volume.volume_id[-4:], mounted("ext4"))
    with expect.code("ABORTED", "mkfs"):
        client.delete(slow.volume_id)
    client.delete(first.volume_id)
    client.create("db", 64 * MIB, mounted("ext4"), source=of_snapshot(snapshot.snapshot_id))
    restored = fake.block.get(DEVICE).contents
    long.over.set()
    client.stage(slow, tmp_path / "slow", mounted("ext4"))

    assert restored is not None
    assert fake.block.get(DEVICE).contents == restored
    assert not [one for one in fake.commands if one[0] == "mkfs.ext4" and one[-1] == DEVICE]


@pytest.mark.parametrize("how", ["snapshot", "group snapshot", "clone"])
def test_nothing_is_copied_of_a_volume_while_its_mkfs_outlives_its_call(
    fake: FakeHost, client: Client, config: Config, tmp_path: Path, how: str
) -> None:
    volume = client.create("slow", 320 * MIB, mounted("xfs"))
    long = Work()

    def meet(words: Sequence[str]) -> Result | None:
        if words[0] == "mkfs.xfs":
            long()
        return None

    def copy() -> object:
        if how == "snapshot":
            return client.snapshot("snap", volume.volume_id)
        if how == "group snapshot":
            return client.group_snapshot("snaps", [volume.volume_id])
        source = of_volume(volume.volume_id)
        return client.create("copy", 320 * MIB, mounted("xfs"), source=source)

    fake.intercept = meet
    try:
        with Client(config.endpoint, timeout_seconds=1) as hasty, pytest.raises(grpc.RpcError):
            hasty.stage(volume, tmp_path / "staging", mounted("xfs"))
        before = set(fake.lvm2.groups["data"].volumes)
        with expect.code("ABORTED", "mkfs"):
            copy()
        assert set(fake.lvm2.groups["data"].volumes) == before
    finally:
        long.over.set()
    client.stage(volume, tmp_path / "staging", mounted("xfs"))
    copy()


def test_a_task_whose_thread_could_not_be_started_is_begun_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work, done = DetachedTasks(), threading.Event()

    def begin(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(command, "begin", begin)
        with pytest.raises(RuntimeError):
            work.do("vol", "data", "mkfs", nothing, nothing)
    assert work.mkfs_of("vol") is None
    work.wait_for("vol")
    work.do("vol", "data", "mkfs", done.set, nothing)
    assert done.is_set()
