"""A copy in the background whose process is killed: the next start makes it whole."""

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path

import grpc
import pytest

from agent.core.ids import VolumeId
from agent.core.settings import DEFAULT_SOCKET
from agent.csi.client import Client, block, of_snapshot
from lvm.devices import Devices
from proto import csi_pb2 as csi

MIB = 1 << 20
SIZE = 192 * MIB
# Where the copy is when it is killed: at its beginning, in the middle, near its end.
PLACES = {"beginning": 0, "middle": 96 * MIB, "end": 176 * MIB}
PATIENCE_SECONDS = 120


@contextmanager
def published(caller: Client, volume: csi.Volume, directory: Path) -> Iterator[Path]:
    """The volume's device, where a workload would have it."""
    staging, node = directory / "staging", directory / "node"
    caller.stage(volume, staging, block())
    caller.publish(volume, staging, node, block())
    yield node
    caller.unpublish(volume.volume_id, node)
    caller.unstage(volume.volume_id, staging)


@contextmanager
def creating(name: str, source: csi.VolumeContentSource) -> Iterator[None]:
    """A caller who asks for the copy, and whose service is gone before it is made."""
    codes = []

    def ask() -> None:
        with Client(DEFAULT_SOCKET) as caller, pytest.raises(grpc.RpcError) as caught:
            caller.create(name, SIZE, block(), source=source)
        codes.append(caught.value.code().name)

    thread = threading.Thread(target=ask)
    thread.start()
    yield
    thread.join()
    assert codes in (["UNAVAILABLE"], ["ABORTED"]), codes


def wait_until_copied(volume_id: str, at: int, page: bytes) -> None:
    """Look at the disk, past every cache, until a page of the copy is there."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    known, seen = VolumeId.parse(volume_id), mmap(-1, len(page))
    assert known is not None
    while (found := Devices().find(known.group, known.name)) is None:
        assert time.monotonic() < deadline, f"{volume_id} is not made"
    disk = os.open(found.path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        while os.preadv(disk, [seen], at) and seen[:] != page:
            assert time.monotonic() < deadline, f"{volume_id} is not copied as far as {at}"
    finally:
        os.close(disk)


def made_after_all(caller: Client, name: str, source: csi.VolumeContentSource) -> csi.Volume:
    """The copy, asked for as a provisioner does: again while the answer is that it is not ready."""
    for _ in range(100):
        try:
            return caller.create(name, SIZE, block(), source=source)
        except grpc.RpcError as error:
            if error.code().name != "ABORTED" or "%" not in (error.details() or ""):
                raise
    raise AssertionError("the copy is never made")


@pytest.mark.variation
def test_a_copy_killed_anywhere_is_completed_and_leaves_nothing(
    client: Client, directory: Path, main_pid: Callable[[], int], answering: Callable[[], None]
) -> None:
    free = client.capacity().available_capacity
    origin = client.create("test-origin", SIZE, block())
    data = os.urandom(SIZE)
    with published(client, origin, directory) as node, node.open("r+b", buffering=0) as disk:
        for at in range(0, SIZE, MIB):
            disk.write(data[at : at + MIB])
        os.fsync(disk.fileno())
    snapshot = client.snapshot("test-snapshot", origin.volume_id)
    assert snapshot.ready_to_use
    source = of_snapshot(snapshot.snapshot_id)

    for place, at in PLACES.items():
        name, killed = f"test-copy-{place}", main_pid()
        with creating(name, source):
            copy_id = origin.volume_id.replace("test-origin", name)
            wait_until_copied(copy_id, at, data[at : at + 4096])
            os.kill(killed, signal.SIGKILL)
        while main_pid() in (0, killed):
            pass
        answering()

        with Client(DEFAULT_SOCKET) as caller:
            copy = made_after_all(caller, name, source)
            with published(caller, copy, directory) as node:
                found = hashlib.sha256(node.read_bytes())
            assert found.digest() == hashlib.sha256(data).digest()
            caller.delete(copy.volume_id)

    with Client(DEFAULT_SOCKET) as caller:
        caller.delete_snapshot(snapshot.snapshot_id)
        caller.delete(origin.volume_id)
        assert caller.snapshots() == []
        # What is deleted may still be overwritten, and is counted until then.
        while caller.capacity().available_capacity < free:
            pass
        assert caller.capacity().available_capacity == free
