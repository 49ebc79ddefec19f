"""The runbooks of docs/operations.md, each command on disks that fail, are detached, or still read.

Carver is a process of its own here, as in test_conditions.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import expect
import grpc
import pytest
from faults import leftovers
from faults.bench import Bench
from faults.process import Trial
from model.operations import MIB
from real.disks import Disk
from real.host import RealHost
from vm.reported import EXTENT_BYTES, SIZE, Disks, Raw, Reported

from agent.csi.client import Client, block
from lvm import report
from lvm.room import Room
from mount import loop

GROUP = "carver_repairs"
DISK_BYTES = 41 * EXTENT_BYTES
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
        soon(lambda: not own_group(host).volumes)
        group = own_group(host)
        it.model.total_bytes = Room(group).extents * group.extent_size_bytes


def soon(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def own_group(host: RealHost) -> report.Group:
    return report.read(host.lvm).group(GROUP)


def holding(host: RealHost, disks: Iterable[Disk], name: str) -> Disk:
    """The first of these disks on which a volume lies."""
    lies_on = own_group(host).volume(name).disks
    return next(one for one in disks if own_disks(host)[one.path] in lies_on)


class Written(Raw):
    """A raw block volume in use, and what was written there."""

    def __init__(self, trial: Trial, name: str, device_class: str = "plain") -> None:
        super().__init__(trial, name, device_class)
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


def until_done(step: Callable[[], tuple[bool, str]]) -> None:
    """Call again until all is done, as `carver` does."""
    soon(lambda: step()[0])


def own_disks(host: RealHost) -> dict[str, str]:
    """The UUIDs of the group's disks, by their names."""
    return {one.name: one.uuid for one in report.read(host.lvm).group(GROUP).disks}


@pytest.mark.parametrize(
    "layout",
    [pytest.param(RAID1, id="raid1"), pytest.param(RAID5, id="raid5", marks=pytest.mark.variation)],
)
def test_a_lost_disk_is_replaced_under_a_raid_in_use(
    bench: Bench, host: RealHost, disks: Disks, layout: str
) -> None:
    new = host.new_device(DISK_BYTES)
    with served(bench, host, [one.path for one in disks], layout) as trial:
        client, raw = trial.machine.client, Written(trial, "a")
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
        raw.delete()


@pytest.mark.variation
def test_a_detached_disk_is_replaced(bench: Bench, host: RealHost, disks: Disks) -> None:
    loose, new = host.new_device(DISK_BYTES), host.new_device(DISK_BYTES)
    with served(bench, host, [loose, disks[0].path], RAID1) as trial:
        client, raw = trial.machine.client, Written(trial, "a")
        lost = own_disks(host)[loose]
        trial.machine.client.unpublish(raw.volume.volume_id, raw.target)
        trial.machine.deactivate("a")
        loop.detach(host.kernel, loose)
        host._own.remove(loose)
        until_done(lambda: client.replace_disk(lost, new))
        raw.begin()
        raw.check()
        raw.delete()


@pytest.mark.variation
@pytest.mark.parametrize(
    ("lost", "reason"), [((0, 2), "RaidDegraded"), ((2, 3), "RaidFailed")], ids=str
)
def test_a_raid10_survives_the_loss_of_an_image_of_each_pair(
    bench: Bench, host: RealHost, lost: tuple[int, ...], reason: str
) -> None:
    own, new = ([host.new_device(DISK_BYTES) for _ in range(number)] for number in (4, 2))
    with served(bench, host, own, RAID10) as trial:
        client, raw = trial.machine.client, Written(trial, "a")
        until_done(partial(client.repair, raw.volume.volume_id))
        reported = Reported(trial.machine, "a", look=False)
        client.unpublish(raw.volume.volume_id, raw.target)
        trial.machine.deactivate("a")
        paths = {uuid: path for path, uuid in own_disks(host).items()}
        images = report.read(host.lvm).group(GROUP).volume("vol-a").images
        gone = [next(iter(images[number])) for number in lost]
        files = [_detached(host, paths[one]) for one in gone]
        reported.soon(reason, "vol-a", storage="DiskMissing")
        if reason == "RaidDegraded":
            for one in gone:
                host._own.remove(paths[one])
            pairs = list(zip(gone, new, strict=True))
            until_done(lambda: min(client.replace_disk(*pair) for pair in pairs))
        else:
            with expect.code("FAILED_PRECONDITION", "2 of its images"):
                client.repair(raw.volume.volume_id)
            with expect.code("FAILED_PRECONDITION", "vol-a"):
                client.replace_disk(gone[0], new[0])
            for one, file in zip(gone, files, strict=True):
                host.kernel.loop_configure(
                    paths[one], file, read_only=False, direct_io=False, name=file
                )
            reported.well()
        raw.begin()
        raw.check()
        raw.delete()


def _detached(host: RealHost, device: str) -> str:
    """A loop device let go of; the file that it was on."""
    file = Path("/sys/block", Path(device).name, "loop/backing_file").read_text().strip()
    loop.detach(host.kernel, device)
    return file


@pytest.mark.variation
def test_a_readable_disk_is_emptied_in_use_and_across_a_kill(
    bench: Bench, host: RealHost, disks: Disks
) -> None:
    new = host.new_device(DISK_BYTES * 2)
    with served(bench, host, [one.path for one in disks], THIN) as trial:
        every = [Written(trial, "a"), Written(trial, "b", "linear")]
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
            raw.delete()


@pytest.mark.variation
def test_volumes_lost_with_a_disk_are_named_until_they_are_given_up(
    bench: Bench, host: RealHost, disks: Disks
) -> None:
    new = host.new_device(DISK_BYTES)
    with served(bench, host, [one.path for one in disks[:2]], RAID1) as trial:
        client = trial.machine.client
        kept, gone = Written(trial, "a"), Written(trial, "b", "linear")
        lost = holding(host, disks[:2], "vol-b")
        uuid = own_disks(host)[lost.path]
        lost.fail()
        with expect.code("FAILED_PRECONDITION", "vol-b"):
            client.replace_disk(uuid, new)
        assert new not in own_disks(host)
        gone.delete()
        with expect.code("FAILED_PRECONDITION", "vol-b", "deleted"):
            client.replace_disk(uuid, new)
        host.lvm("lvchange", "--addtag", "carver.givenUp=yes", "--", f"{GROUP}/vol-b")
        client.delete(gone.volume.volume_id)
        soon(lambda: "vol-b" not in own_group(host).volumes)
        until_done(lambda: client.replace_disk(uuid, new))
        kept.check()
        kept.delete()


@pytest.mark.variation
def test_a_pool_on_a_lost_disk_is_given_up_and_its_remains_are_erased(
    bench: Bench, host: RealHost, disks: Disks
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
        with expect.code("FAILED_PRECONDITION", "deleted", "vol-a"):
            client.replace_disk(uuid, new)
        host.lvm("lvchange", "--addtag", "carver.givenUp=yes", "--", f"{GROUP}/pool-plain")
        soon(lambda: not own_group(host).volumes)
        until_done(lambda: client.replace_disk(uuid, new))
        _until_it_answers(client)
        assert not _is_marked(kept)


def _is_marked(disk: Disk) -> bool:
    return bool(leftovers.on(disk.path, MIB, disk.sectors * 512))


@pytest.mark.variation
def test_a_volume_is_repaired_on_another_disk_of_the_group(
    bench: Bench, host: RealHost, disks: Disks
) -> None:
    with served(bench, host, [one.path for one in disks], RAID1) as trial:
        client, raw = trial.machine.client, Written(trial, "a")
        lost = holding(host, disks, "vol-a")
        lost.fail()
        with suppress(OSError):
            raw.write()
        assert client.capacity().available_capacity == 0, "lvm2 makes nothing meanwhile"
        until_done(lambda: client.repair(raw.volume.volume_id))
        raw.check()
        host.lvm("vgreduce", "--removemissing", "--", GROUP)
        lost.mend()
        assert client.capacity().available_capacity
        raw.delete()


@pytest.mark.variation
def test_a_volume_is_repaired_automatically_after_a_delay(
    bench: Bench, host: RealHost, disks: Disks
) -> None:
    layout = RAID1 + 'repair = "auto"\nrepair_after_seconds = 5\n'
    with served(bench, host, [one.path for one in disks], layout) as trial:
        raw = Written(trial, "a")
        lost = holding(host, disks, "vol-a")
        lost.fail()
        soon(lambda: own_group(host).volume("vol-a").health != "partial")
        raw.check()
        lost.mend()
        raw.delete()


@pytest.mark.variation
def test_pool_metadata_are_rewritten_on_request(bench: Bench, host: RealHost, disks: Disks) -> None:
    with served(bench, host, [disks[0].path], THIN) as trial:
        client = trial.machine.client
        raw = Raw(trial)
        volume_id = raw.volume.volume_id
        data = os.urandom(MIB)
        with raw.target.open("r+b", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())
        disks[0].fail()
        # New chunks, whose allocation cannot be recorded.
        with suppress(OSError), raw.target.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), data, 16 * MIB)
            os.fsync(file.fileno())
        disks[0].mend()
        raw.end()
        _until_it_answers(client)
        status = host.devices.status(GROUP, "pool-plain")
        assert status, "the pool is active, and the kernel says what it is like"
        if "needs_check=True" not in str(status) and "mode='fail'" not in str(status):
            assert client.repair(volume_id)[0], "whole, and left alone"
        else:
            with expect.code("FAILED_PRECONDITION", "--pool-metadata"):
                client.repair(volume_id)
            done, message = client.repair(volume_id, pool_metadata=True)
            assert done
            assert "pool-plain_meta0" in message
            host.lvm("lvremove", "--yes", "--", f"{GROUP}/pool-plain_meta0")
        raw.begin()
        with raw.target.open("rb") as file:
            assert file.read(MIB) == data
        raw.delete()


def _until_it_answers(client: Client) -> None:
    """A disk that failed is read again within a minute, and so is what waits for one."""

    def answers() -> int:
        with suppress(grpc.RpcError):
            return client.capacity().available_capacity
        return 0

    soon(answers)
