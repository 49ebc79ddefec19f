"""The runbooks of docs/operations.md, each command on disks that fail, are detached, or still read.

Carver is a process of its own here, as in test_conditions.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import grpc
import pytest
from faults import leftovers
from faults.bench import Bench
from faults.process import Trial
from model.operations import MIB
from real.disks import Disk
from real.host import RealHost
from vm.told import Told

from agent.csi.client import Client, block
from lvm import report
from mount import loop
from proto import csi_pb2 as csi

GROUP = "carver_repairs"
EXTENT_BYTES = 4 * MIB
DISK_BYTES = 41 * EXTENT_BYTES
SIZE = 32 * MIB
RAID1 = 'layout = "raid1"\n'
RAID5 = 'layout = "raid5"\nstripes = 2\n'
RAID10 = 'layout = "raid10"\nstripes = 2\n'
THIN = 'layout = "thin"\n'
PATIENCE_SECONDS = 300


@contextmanager
def served(bench: Bench, host: RealHost, disks: list[str], layout: str) -> Iterator[Trial]:
    """Carver on these disks; the class of that layout is the default one, `linear` another."""
    classes = (
        f'[[classes]]\nname = "plain"\ngroup = "{GROUP}"\ndefault = true\n{layout}'
        f'[[classes]]\nname = "linear"\ngroup = "{GROUP}"\n'
    )
    with host.own_group(GROUP, disks) as extents, bench.served(host, GROUP, extents, classes) as it:
        yield it
        # The group has other disks by now: as many extents as these have, with nothing on them.
        it.model.total_bytes = _emptied(host)


def _emptied(host: RealHost) -> int:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (group := report.read(host.lvm).group(GROUP)).volumes:
        assert time.monotonic() < deadline, group.volumes.keys()
        time.sleep(0.5)
    return group.extents * group.extent_size_bytes


class Raw:
    """A raw block volume in use, and what was written there."""

    def __init__(self, trial: Trial, name: str, device_class: str = "plain") -> None:
        self._machine, self.name = trial.machine, name
        parameters = {"class": device_class}
        self.volume = trial.machine.client.create(name, SIZE, block(), parameters=parameters)
        staging, target = (trial.machine.place(f"{one}-{name}") for one in ("staging", "target"))
        self._places = staging, target
        trial.machine.client.stage(self.volume, staging, block())
        trial.machine.client.publish(self.volume, staging, target, block())
        self.target = Path(target)
        self.data = b""
        self.write()

    def write(self) -> None:
        self.data = os.urandom(SIZE)
        with self.target.open("r+b", buffering=0) as file:
            file.write(self.data)
            os.fsync(file.fileno())

    def check(self) -> None:
        with self.target.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert file.read() == self.data

    def undo(self) -> None:
        """Out of use, and deleted."""
        staging, target = self._places
        self._machine.client.unpublish(self.volume.volume_id, target)
        self._machine.client.unstage(self.volume.volume_id, staging)
        self._machine.client.delete(self.volume.volume_id)


def until_done(step: Callable[[], tuple[bool, str]]) -> list[str]:
    """What `carver` does: call again until all is done."""
    told: list[str] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        done, message = step()
        told.append(message)
        if done:
            return told
        assert time.monotonic() < deadline, told
        time.sleep(0.5)


def own_disks(host: RealHost) -> dict[str, str]:
    """The UUIDs of the group's disks, by their names."""
    return {one.name: one.uuid for one in report.read(host.lvm).group(GROUP).disks}


def refused(call: Callable[[], object], code: str, *words: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code().name == code, caught.value.details()
    assert all(one in (caught.value.details() or "") for one in words), caught.value.details()


@pytest.mark.parametrize(
    "layout",
    [pytest.param(RAID1, id="raid1"), pytest.param(RAID5, id="raid5", marks=pytest.mark.variation)],
)
def test_a_disk_that_is_lost_is_replaced_under_a_raid_in_use(
    bench: Bench, host: RealHost, disks: tuple[Disk, Disk, Disk], layout: str
) -> None:
    new = host.new_device(DISK_BYTES)
    with served(bench, host, [one.path for one in disks], layout) as trial:
        client, raw = trial.machine.client, Raw(trial, "a")
        lost = own_disks(host)[disks[0].path]
        disks[0].fail()
        with suppress(OSError):
            raw.write()
        until_done(lambda: client.replace_disk(lost, new))
        raw.check()
        assert lost not in own_disks(host).values()
        assert new in own_disks(host)
        raw.write()
        disks[1].fail()
        raw.check()
        disks[1].mend()
        until_done(lambda: client.repair(raw.volume.volume_id))
        raw.undo()


@pytest.mark.variation
def test_a_disk_that_was_detached_is_replaced(
    bench: Bench, host: RealHost, disks: tuple[Disk, Disk, Disk]
) -> None:
    loose, new = host.new_device(DISK_BYTES), host.new_device(DISK_BYTES)
    with served(bench, host, [loose, disks[0].path], RAID1) as trial:
        client, raw = trial.machine.client, Raw(trial, "a")
        lost = own_disks(host)[loose]
        trial.machine.client.unpublish(raw.volume.volume_id, raw.target)
        trial.machine.deactivate("a")
        loop.detach(host.kernel, loose)
        host._own.remove(loose)
        until_done(lambda: client.replace_disk(lost, new))
        staging = trial.machine.place("staging-a")
        client.stage(raw.volume, staging, block())
        client.publish(raw.volume, staging, raw.target, block())
        raw.check()
        raw.undo()


@pytest.mark.variation
@pytest.mark.parametrize(
    ("lost", "reason"), [((0, 2), "RaidDegraded"), ((2, 3), "RaidFailed")], ids=str
)
def test_a_raid10_survives_the_loss_of_an_image_of_each_pair(
    bench: Bench, host: RealHost, lost: tuple[int, ...], reason: str
) -> None:
    own, new = ([host.new_device(DISK_BYTES) for _ in range(number)] for number in (4, 2))
    with served(bench, host, own, RAID10) as trial:
        client, raw = trial.machine.client, Raw(trial, "a")
        until_done(partial(client.repair, raw.volume.volume_id))
        told = Told(trial.machine, "a", look=False)
        client.unpublish(raw.volume.volume_id, raw.target)
        trial.machine.deactivate("a")
        paths = {uuid: path for path, uuid in own_disks(host).items()}
        images = report.read(host.lvm).group(GROUP).volume("vol-a").images
        gone = [next(iter(images[number])) for number in lost]
        files = [_detached(host, paths[one]) for one in gone]
        told.soon(reason, "vol-a", storage="DiskMissing")
        if reason == "RaidDegraded":
            for one in gone:
                host._own.remove(paths[one])
            pairs = list(zip(gone, new, strict=True))
            until_done(lambda: min(client.replace_disk(*pair) for pair in pairs))
        else:
            call = partial(client.repair, raw.volume.volume_id)
            refused(call, "FAILED_PRECONDITION", "2 of its images")
            refused(partial(client.replace_disk, gone[0], new[0]), "FAILED_PRECONDITION", "vol-a")
            for one, file in zip(gone, files, strict=True):
                host.kernel.loop_configure(
                    paths[one], file, read_only=False, direct_io=False, name=file
                )
            told.well()
        staging = trial.machine.place("staging-a")
        client.stage(raw.volume, staging, block())
        client.publish(raw.volume, staging, raw.target, block())
        raw.check()
        raw.undo()


def _detached(host: RealHost, device: str) -> str:
    """A loop device let go of; the file that it was on."""
    file = Path("/sys/block", Path(device).name, "loop/backing_file").read_text().strip()
    loop.detach(host.kernel, device)
    return file


@pytest.mark.variation
def test_a_disk_that_still_reads_is_emptied_under_what_uses_it_also_across_a_kill(
    bench: Bench, host: RealHost, disks: tuple[Disk, Disk, Disk]
) -> None:
    new = host.new_device(DISK_BYTES * 2)
    with served(bench, host, [one.path for one in disks], THIN) as trial:
        every = [Raw(trial, "a"), Raw(trial, "b", "linear")]
        snapshot = trial.machine.client.snapshot("1", every[1].volume.volume_id)
        old = disks[0].path
        done, _ = trial.machine.client.replace_disk(old, new)
        if not done:
            trial.machine.kill()
            until_done(lambda: trial.machine.client.replace_disk(old, new))
        assert old not in own_disks(host)
        for raw in every:
            raw.check()
            raw.write()
            raw.check()
        trial.machine.client.delete_snapshot(snapshot.snapshot_id)
        for raw in every:
            raw.undo()


@pytest.mark.variation
def test_what_would_be_lost_with_a_disk_is_named_and_given_up_in_turn(
    bench: Bench, host: RealHost, disks: tuple[Disk, Disk, Disk]
) -> None:
    new = host.new_device(DISK_BYTES)
    with served(bench, host, [one.path for one in disks[:2]], RAID1) as trial:
        client = trial.machine.client
        kept, gone = Raw(trial, "a"), Raw(trial, "b", "linear")
        on = report.read(host.lvm).group(GROUP).volume("vol-b").disks
        lost = next(one for one in disks[:2] if own_disks(host)[one.path] in on)
        uuid = own_disks(host)[lost.path]
        lost.fail()
        refused(lambda: client.replace_disk(uuid, new), "FAILED_PRECONDITION", "vol-b")
        assert new not in own_disks(host)
        gone.undo()
        refused(lambda: client.replace_disk(uuid, new), "FAILED_PRECONDITION", "vol-b", "deleted")
        host.lvm("lvchange", "--addtag", "carver.givenUp=yes", "--", f"{GROUP}/vol-b")
        client.delete(gone.volume.volume_id)
        deadline = time.monotonic() + 120
        while "vol-b" in report.read(host.lvm).group(GROUP).volumes:
            assert time.monotonic() < deadline
            time.sleep(1)
        until_done(lambda: client.replace_disk(uuid, new))
        kept.check()
        kept.undo()


@pytest.mark.variation
def test_a_pool_on_a_lost_disk_is_given_up_and_what_it_leaves_is_overwritten(
    bench: Bench, host: RealHost, disks: tuple[Disk, Disk, Disk]
) -> None:
    new = host.new_device(DISK_BYTES)
    paths = [one.path for one in disks[:2]]
    with served(bench, host, paths, THIN + 'pool_size = "80%"\n') as trial:
        client, mark = trial.machine.client, leftovers.marker("a")
        volume, other = (client.create(one, SIZE, block()) for one in ("a", "b"))
        snapshot = client.snapshot("1", volume.volume_id)
        for name in ("vol-a", "vol-b"):
            device = host.devices.find(GROUP, name)
            assert device is not None
            for offset in range(0, SIZE, MIB):
                host.write_bytes(device.path, offset, mark)
        # The pool lies on both, and what was written first on either of them.
        lost, kept = sorted(disks[:2], key=_is_marked)
        assert _is_marked(kept)
        uuid = own_disks(host)[lost.path]
        lost.fail()
        client.delete_snapshot(snapshot.snapshot_id)
        for one in (volume, other):
            client.delete(one.volume_id)
        assert client.volumes() == []
        refused(lambda: client.replace_disk(uuid, new), "FAILED_PRECONDITION", "deleted", "vol-a")
        host.lvm("lvchange", "--addtag", "carver.givenUp=yes", "--", f"{GROUP}/pool-plain")
        _emptied(host)
        until_done(lambda: client.replace_disk(uuid, new))
        _until_it_answers(client)
        assert not _is_marked(kept)


def _is_marked(disk: Disk) -> bool:
    return bool(leftovers.on(disk.path, MIB, disk.sectors * 512))


def test_a_volume_is_repaired_on_the_group_s_other_disk(
    bench: Bench, host: RealHost, disks: tuple[Disk, Disk, Disk]
) -> None:
    with served(bench, host, [one.path for one in disks], RAID1) as trial:
        client, raw = trial.machine.client, Raw(trial, "a")
        on = report.read(host.lvm).group(GROUP).volume("vol-a").disks
        lost = next(one for one in disks if own_disks(host)[one.path] in on)
        lost.fail()
        with suppress(OSError):
            raw.write()
        assert client.capacity().available_capacity == 0, "lvm2 makes nothing meanwhile"
        until_done(lambda: client.repair(raw.volume.volume_id))
        raw.check()
        host.lvm("vgreduce", "--removemissing", "--", GROUP)
        lost.mend()
        assert client.capacity().available_capacity
        raw.undo()


@pytest.mark.variation
def test_a_volume_is_repaired_unasked_after_a_while(
    bench: Bench, host: RealHost, disks: tuple[Disk, Disk, Disk]
) -> None:
    layout = RAID1 + 'repair = "auto"\nrepair_after_seconds = 5\n'
    with served(bench, host, [one.path for one in disks], layout) as trial:
        raw = Raw(trial, "a")
        group = report.read(host.lvm).group(GROUP)
        lost = next(
            one for one in disks if own_disks(host)[one.path] in group.volume("vol-a").disks
        )
        lost.fail()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while report.read(host.lvm).group(GROUP).volume("vol-a").health == "partial":
            assert time.monotonic() < deadline
            time.sleep(2)
        raw.check()
        lost.mend()
        raw.undo()


@pytest.mark.variation
def test_a_pool_s_metadata_are_written_anew_when_that_is_said(
    bench: Bench, host: RealHost, disks: tuple[Disk, Disk, Disk]
) -> None:
    with served(bench, host, [disks[0].path], THIN) as trial:
        client = trial.machine.client
        volume = client.create("a", SIZE, block())
        staging, target = (trial.machine.place(one) for one in ("staging", "target"))
        client.stage(volume, staging, block())
        client.publish(volume, staging, target, block())
        data = os.urandom(MIB)
        with Path(target).open("r+b", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())
        disks[0].fail()
        # Chunks that are new: that they are given out cannot be put on record.
        with suppress(OSError), Path(target).open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), data, 16 * MIB)
            os.fsync(file.fileno())
        disks[0].mend()
        client.unpublish(volume.volume_id, target)
        client.unstage(volume.volume_id, staging)
        _until_it_answers(client)
        status = host.devices.status(GROUP, "pool-plain")
        assert status, "the pool is active, and the kernel says what it is like"
        if "needs_check=True" not in str(status) and "mode='fail'" not in str(status):
            assert client.repair(volume.volume_id)[0], "whole, and left alone"
        else:
            refused(
                lambda: client.repair(volume.volume_id), "FAILED_PRECONDITION", "--pool-metadata"
            )
            done, told = client.repair(volume.volume_id, pool_metadata=True)
            assert done
            assert "pool-plain_meta0" in told
            host.lvm("lvremove", "--yes", "--", f"{GROUP}/pool-plain_meta0")
        client.stage(volume, staging, block())
        client.publish(volume, staging, target, block())
        with Path(target).open("rb") as file:
            assert file.read(MIB) == data
        client.unpublish(volume.volume_id, target)
        client.unstage(volume.volume_id, staging)
        client.delete(volume.volume_id)


def _until_it_answers(client: Client) -> csi.GetCapacityResponse:
    """A disk that failed is looked for again within a minute, and so is what waits for one."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        with suppress(grpc.RpcError):
            found = client.capacity()
            if found.available_capacity:
                return found
        assert time.monotonic() < deadline
        time.sleep(1)
