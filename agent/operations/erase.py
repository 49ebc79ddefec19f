"""Erase deleted volumes before their extents are freed, and zero extents that a volume grows by."""

import errno
import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, replace

from agent.core import classes, errors, ids, tag, users
from agent.core.allocation import Allocator
from agent.core.context import Context
from agent.core.jobs import Job, Stopping, TaskQueue
from agent.core.luks_devices import Mappings
from agent.core.records import Snapshot, Volume
from agent.operations import erase_freed
from lvm import caches, layout, names, report, snapshots, tags, volumes
from lvm import errors as lvm_errors
from lvm.devicemapper import Raid
from lvm.layout import LINEAR, Layout
from lvm.volumes import New

_log = logging.getLogger(__name__)


_ZERO_CHUNK_BYTES = 64 << 20
_ZERO_WORKERS = 1


@dataclass(kw_only=True)
class _Growth(Job):
    """The key is the volume's id."""

    group: str
    # The logical volume that has the extents, and its UUID.
    name: str
    uuid: str
    size_bytes: int
    done_bytes: int = 0

    def __str__(self) -> str:
        return f"{100 * self.done_bytes // self.size_bytes} % of {self.size_bytes} bytes"


def leftover(group: report.Group, name: str) -> str:
    """The logical volume that has what a volume is to grow by; empty where there is none."""
    own = _name(name)
    return own if own in group.volumes else ""


class GrowthZeroer:
    """Overwrites what volumes grow by."""

    def __init__(self, context: Context) -> None:
        self._volume_groups, self._kernel = context.volume_groups, context.kernel
        self._inventory = context.inventory
        self.grace_seconds = 10.0
        # The UUIDs of those that were overwritten and not taken yet.
        self._done: set[str] = set()
        self.jobs = TaskQueue(
            "zero",
            self._overwrite,
            self._find,
            "what volume %s is to grow by is not overwritten: %s",
            workers=_ZERO_WORKERS,
        )

    def take(self, volume: Volume, more_bytes: int, allocator: Allocator) -> tuple[str, ...]:
        """The extents that a volume grows by, which nobody has any more and which hold zeroes.

        To be called with the group held, and a report that was read within; the caller extends the
        volume at once. Two commands in all, of the first and of the last call. Raises Overwriting
        until it is done, NoRoom.
        """
        group, own = volume.group, _name(volume.name)
        lvm = self._volume_groups.lvm(group.name)
        reserved = group.volumes.get(own)
        if reserved is not None and reserved.size_bytes != _taken_bytes(volume, more_bytes):
            # Another size was asked for before. In use, and so refused, while a piece is written.
            volumes.remove(lvm, group.name, own)
            reserved = None
        if reserved is None:
            if more_bytes > (room := allocator.maximum_growth_bytes(volume)):
                raise errors.NoRoom(
                    group.name, more_bytes, room, f"more {allocator.purpose(group)}"
                )
            reserved = self._reserve(volume, more_bytes)
        if reserved.uuid not in self._done:
            job = self.jobs.start(
                _Growth(
                    key=str(volume.id),
                    on_record=False,
                    group=group.name,
                    name=own,
                    uuid=reserved.uuid,
                    size_bytes=more_bytes,
                )
            )
            raise errors.Overwriting(job.key, str(job))
        volumes.remove(lvm, group.name, own)
        self._done.discard(reserved.uuid)
        return reserved.ranges

    def wait(self, volume_id: str) -> bool:
        """Wait a moment for the overwriting that `take` began; whether it has come to its end."""
        job = self.jobs.of(volume_id)
        return job is None or bool(wait([job.ended], self.grace_seconds).done)

    def stop(self) -> None:
        """End at the next chunk; the next start removes what is left."""
        self.jobs.stop()

    def _reserve(self, volume: Volume, size_bytes: int) -> report.LogicalVolume:
        """Take so many extents from where the volume would grow."""
        group, shape = volume.group, volume.layout
        disks = layout.growth_placement(group, group.volume(volume.name), shape)
        # On each of its disks as much as the volume takes there, parity and copies included.
        spread = LINEAR if shape.is_linear else Layout("striped", stripes=shape.disks)
        taken = _taken_bytes(volume, size_bytes)
        own_tags = {tag.NAME: volume.own_tags[tag.NAME], tag.STATE: tag.WIPING}
        new = New(_name(volume.name), taken, own_tags)
        volumes.create(
            self._volume_groups.lvm(group.name), group.name, new, layout=spread, disks=disks
        )
        return self._inventory.read(group.name).group(group.name).volume(new.name)

    def _find(self, volume_id: str) -> _Growth:
        # Nobody's but the caller's, who calls again.
        raise errors.NoSuchVolume(volume_id)

    def _overwrite(self, job: _Growth) -> None:
        device = self._inventory.ensure_active(job.group, job.name).path
        size_bytes = self._kernel.device_size_bytes(device)
        job.size_bytes = size_bytes
        for offset in range(0, size_bytes, _ZERO_CHUNK_BYTES):
            self.jobs.check(job)
            length = min(_ZERO_CHUNK_BYTES, size_bytes - offset)
            self._kernel.zero_out(device, offset, length)
            job.done_bytes = offset + length
        self._kernel.flush(device)
        self._done.add(job.uuid)


def _taken_bytes(volume: Volume, size_bytes: int) -> int:
    """What so much of a volume takes on all of its disks."""
    shape = volume.layout
    return size_bytes if shape.is_linear else size_bytes // shape.stripes * shape.disks


def _name(name: str) -> str:
    return names.logical_volume(ids.GROWTH_PREFIX, name)


# Small enough to stop soon when the service stops, large enough to cost nothing.
_CHUNK_BYTES = 128 << 20
_WORKERS = 2
# A look at all groups serves those that wait for a disk for so long.
_GLANCE_SECONDS = 1.0


@dataclass(kw_only=True)
class _Wipe(Job):
    volume: Volume
    # Set under the group's lock: nothing is put on record of a volume that is gone.
    removed: bool = False


class Eraser:
    """Wipes and removes volumes, a few at a time."""

    def __init__(self, context: Context) -> None:
        self._volume_groups, self._kernel = context.volume_groups, context.kernel
        self._inventory = context.inventory
        self._classes = context.config.classes
        self._mappings = Mappings(context)
        self.zero = context.config.wipe == "zero"
        # Told of a thin volume, or snapshot, that was removed; of a group in which something was
        # given up.
        self.emptied: Callable[[Volume], object] = lambda _volume: None
        self.given_up: Callable[[str], object] = lambda _group: None
        self.grace_seconds = 2.0
        self._glanced = -math.inf, report.Report({})
        # How long a worker waits for a cache that is written back, and how often it looks.
        self.write_back_seconds = 2.0
        self.look_seconds = 0.5
        self.jobs = TaskQueue(
            "wipe",
            self._work,
            self._find,
            "volume %s is deleted, but not wiped and removed: %s",
            workers=_WORKERS,
        )

    def delete(self, volume: Volume) -> None:
        """Wipe and remove, or leave that to the background on record; raises VolumeInUse."""
        if volume.wiping:
            self._start(volume)
            return
        users.require_unused(self._kernel, self._inventory, volume)
        self._mappings.ensure_closed(volume)
        is_kept = self.overwrites(volume) or volume.layout.is_thin
        if volume.copy_on_write_snapshots or (volume.missing_disks and is_kept):
            # It may be long until the disk is back, or given up: the caller need not wait.
            self._put_on_record(_wipe_of(volume))
            self._start(replace(volume, own_tags={**volume.own_tags, tag.STATE: tag.WIPING}))
            return
        job = self._start(volume)
        wait([job.ended], self.grace_seconds)
        try:
            if not job.ended.done() and self._put_on_record(job):
                return
        except Exception:
            # The caller hears that it is not deleted; who calls again has it begun anew.
            job.called_off.set()
            raise
        job.ended.result()

    def finish(self, volume: Volume) -> None:
        """Wipe and remove what is on record already; most wipes are over when this returns."""
        wait([self._start(volume).ended], self.grace_seconds)

    def _put_on_record(self, job: _Wipe) -> bool:
        """Tag a volume as deleted, unless it is removed already."""
        group, name = job.volume.group.name, job.volume.name
        with self._volume_groups.hold(group):
            # Also where nobody knows what lvm2 did for the job: a look tells.
            if job.removed or name not in self._inventory.read(group).group(group).volumes:
                return False
            old = {tag.STATE: job.volume.own_tags.get(tag.STATE, tag.READY)}
            new = {tag.STATE: tag.WIPING}
            volumes.mark(self._volume_groups.lvm(group), group, name, old=old, new=new)
            job.on_record = True
        if job.ended.done():
            # It failed in between, and nobody else will hear of it.
            self.jobs.try_again(job)
        return True

    def overwrites(self, one: Volume | Snapshot) -> bool:
        """Whether something of it is overwritten: all of it, or a header in it at least."""
        return self.zero or one.is_encrypted

    def is_deleting(self, volume_id: str) -> bool:
        """Whether the volume's data are being overwritten, or were in part."""
        return self.jobs.has(volume_id)

    def counts(self) -> Mapping[str, int]:
        """How many wipes wait for a worker, are under way, and failed and will be tried again."""
        return self.jobs.counts()

    def resume(self, *groups: str) -> int:
        """Go on with the wipes that are left in these groups, or in all; returns how many."""
        own = groups or self._volume_groups.names
        # Held: nothing of what is found is removed, and made anew, before its job is there.
        with self._volume_groups.hold(*own):
            every = self._inventory.doomed(self._inventory.awake(*own))
            left = [one for one in every if one.group.name in own]
            for volume in left:
                self.jobs.start(_wipe_of(volume))
        return len(left)

    def forget(self, volume_id: str) -> None:
        """A new volume has the id now: what is known of an earlier one is void."""
        self.jobs.forget(volume_id)

    def stop(self) -> None:
        """End at the next chunk; the tags tell the next start what is left."""
        self.jobs.stop()

    def _start(self, volume: Volume) -> _Wipe:
        """Begin, or find what is under way; raises Stopping while one that was called off ends."""
        job = self.jobs.start(_wipe_of(volume))
        if job.called_off.is_set():
            raise Stopping(job.key)
        return job

    def _find(self, volume_id: str) -> _Wipe:
        # Those that wait for a disk share one look, however many they are.
        seen_seconds, known = self._glanced
        if time.monotonic() - seen_seconds > _GLANCE_SECONDS:
            known = self._inventory.glance()
            self._glanced = time.monotonic(), known
        with suppress(errors.NoSuchVolume, errors.OtherGroup):
            volume = self._inventory.doomed_one(known, volume_id)
            if _waits_for_disk(volume):
                return _wipe_of(volume)
        return _wipe_of(
            self._inventory.doomed_one(self._inventory.awake(ids.group_of(volume_id)), volume_id)
        )

    def _work(self, job: _Wipe) -> None:
        """Who deletes takes NoSuchVolume for success, so it is none without proof."""
        try:
            self._wipe_and_remove(job)
        except errors.NoSuchVolume:
            volume = job.volume
            group = self._inventory.read(volume.group.name).group(volume.group.name)
            if volume.name in group.volumes:
                why = "it is there, and not on record as deleted; delete it again"
                raise errors.NotOverwritten(str(volume.id), why) from None

    def _wipe_and_remove(self, job: _Wipe) -> None:
        if job.volume.is_encrypted and job.volume.name in job.volume.group.volumes:
            # However it goes, and however long that takes: it opens what is left of the volume.
            self._mappings.copies.forget(job.volume.group.volume(job.volume.name).uuid)
        volume = self._parted(job.volume)
        if volume is None:
            return
        doomed = [volume.name]
        overwrites = self.overwrites(volume)
        if overwrites and _waits_for_disk(volume):
            raise errors.NotOverwritten(str(volume.id), _about_disks(volume))
        if overwrites:
            if volume.read_only:
                with self._volume_groups.hold(volume.group.name):
                    volumes.allow_writing(
                        self._volume_groups.lvm(volume.group.name), volume.group.name, volume.name
                    )
            self._inventory.activate(volume, partial=bool(volume.missing_disks))
            if tag.CACHE in volume.own_tags:
                doomed += self._parted_cache(job, volume)
            self._revive_legs(volume)
            told = [self._wipe(job, replace(volume, name=name)) for name in doomed]
            if dead := self._dead_legs(volume):
                raise errors.NotOverwritten(str(volume.id), _about_legs(volume, dead))
        elif tag.CACHE in volume.own_tags:
            doomed += filter(None, [caches.parted(volume.group, volume.name)])
        is_given_up = overwrites and bool(volume.missing_disks)
        with self._volume_groups.hold(volume.group.name):
            if job.called_off.is_set():
                raise Stopping(job.key)
            if is_given_up:
                # A disk that is back is whole for lvm2 by itself, once nothing lies on it.
                group = self._inventory.read(volume.group.name).group(volume.group.name)
                disks = volume.missing_disks if all(told) else ()
                erase_freed.owe(self._volume_groups.lvm(group.name), group, disks)
            volumes.remove(self._volume_groups.lvm(volume.group.name), volume.group.name, *doomed)
            job.removed = True
        if is_given_up:
            _log.warning(
                "volume %s is removed; what of it lies on the missing disks %s was not overwritten",
                *(volume.id, ", ".join(volume.missing_disks)),
            )
            self.given_up(volume.group.name)

    def _parted(self, volume: Volume) -> Volume | None:
        """What was deleted as a volume on its own, with extents of its own; None where it is gone.

        Of what was deleted while a disk was missing, and could not be parted or removed then.
        """
        found = volume.group.volumes.get(volume.name)
        if found is None or not (found.pool or volume.group.made_of(volume.name) or found.origin):
            return volume
        group = volume.group.name
        with self._volume_groups.hold(group):
            volume = self._inventory.doomed_one(self._inventory.awake(group), str(volume.id))
            logical = volume.group.volume(volume.name)
            if erase_freed.is_given_up(volume.on_disks) and volume.missing_disks:
                self.given_up(group)
                why = "it was given up, and goes when all that goes with it is deleted"
                raise errors.NotOverwritten(str(volume.id), why)
            is_thin = bool(logical.pool)
            if (is_thin and volume.missing_disks) or (not is_thin and volume.group.missing_disks):
                raise errors.NotOverwritten(str(volume.id), _about_disks(volume))
            if volume.group.copy_on_write_of(volume.name):
                raise errors.NotOverwritten(
                    str(volume.id), "its deleted snapshots are overwritten first"
                )
            lvm = self._volume_groups.lvm(group)
            if is_thin:
                if volume.is_encrypted:
                    self._mappings.erase(volume)
                try:
                    volumes.remove(lvm, group, volume.name)
                finally:
                    # Also where nobody knows: its pool is looked at, and nothing else comes back.
                    self.emptied(volume)
            elif logical.is_copy_on_write:
                snapshots.split(lvm, group, volume.name)
        if is_thin:
            return None
        return replace(volume, read_only=volume.read_only or logical.is_copy_on_write)

    def _dead_legs(self, volume: Volume) -> str:
        """How device-mapper tells of the legs of a RAID, where some take no writes. No command.

        Those on missing disks are known; nothing is told where there are no others.
        """
        told = self._inventory.status(volume.group.name, volume.name)
        found = (one.health for one in told if isinstance(one, Raid))
        lost = len(volume.missing_disks)
        return next((one for one in found if one.count("D") + one.count("-") > lost), "")

    def _revive_legs(self, volume: Volume) -> None:
        """Have a leg take writes again whose disk failed only for a while (lvmraid(7))."""
        if self._dead_legs(volume):
            with self._volume_groups.hold(volume.group.name):
                volumes.refresh(
                    self._volume_groups.lvm(volume.group.name), volume.group.name, volume.name
                )

    def _parted_cache(self, job: _Wipe, volume: Volume) -> list[str]:
        """The cache of a volume as one of its own: what was written is there, too.

        Killed afterwards, the volume has none; whoever goes on with it finds the parted one.
        """
        group, logical = volume.group, volume.group.volume(volume.name)
        if not caches.is_cached(logical):
            return list(filter(None, [caches.parted(group, volume.name)]))
        self._make_clean(job, volume)
        with self._volume_groups.hold(group.name):
            caches.split(self._volume_groups.lvm(group.name), logical)
        return [caches.attached(logical)]

    def _make_clean(self, job: _Wipe, volume: Volume) -> None:
        """Have a cache written back before it is parted, while nobody is kept waiting.

        lvm2 would do that itself, but within its command and so under the group's lock: hours,
        where much is dirty and the disk is slow. No worker waits so long either: raises
        NotOverwritten, the kernel writes on, and the job is tried again with other volumes' jobs
        done meanwhile.
        """
        group, name = volume.group.name, volume.name
        if caches.is_clean(self._inventory.status(group, name)):
            return
        try:
            with self._volume_groups.hold(group):
                caches.clean(self._volume_groups.lvm(group), volume.group.volume(name))
        except lvm_errors.CommandFailed as error:
            _log.warning("the cache of %s is written back while it is parted: %s", volume.id, error)
            return
        deadline_seconds = time.monotonic() + self.write_back_seconds
        while not caches.is_clean(self._inventory.status(group, name)):
            self.jobs.check(job)
            if time.monotonic() >= deadline_seconds:
                raise errors.NotOverwritten(str(volume.id), _about_cache(volume))
            time.sleep(self.look_seconds)

    def _wipe(self, job: _Wipe, volume: Volume) -> bool:
        """Overwrite it; whether what was not lies on missing disks, for certain."""
        device = self._inventory.activate(volume).path
        is_partial = bool(job.volume.missing_disks)
        whole_bytes = size_bytes = self._kernel.device_size_bytes(device)
        erasure = self._erasure(job.volume)
        if erasure != classes.ERASE_ZERO:
            size_bytes = min(whole_bytes, volume.header_bytes or _CHUNK_BYTES)
        elif job.volume.is_encrypted and not is_partial:
            # Nobody can read it from then on, however long the rest takes.
            self._mappings.erase(volume)
        is_told = True
        for offset in range(0, size_bytes, _CHUNK_BYTES):
            self.jobs.check(job)
            length = min(_CHUNK_BYTES, size_bytes - offset)
            if is_partial:
                is_told &= self._zero_what_is_there(volume, device, offset, length)
            else:
                self._zero_out(volume, device, offset, length)
        # Once the extents are free, a power loss may not bring back what they held.
        self._kernel.flush(device)
        if erasure == classes.ERASE_DISCARD:
            with suppress(OSError):  # a disk that does not know it
                self._kernel.discard(device, size_bytes, whole_bytes - size_bytes)
        return is_told

    def _erasure(self, volume: Volume) -> str:
        """What is done beside the header to an encrypted volume; all of any other is overwritten.

        So is all of one with a cache, and of what was a snapshot: a copy of a header may be in
        either.
        """
        if not volume.is_encrypted or tag.CACHE in volume.own_tags or not _is_volume(volume.name):
            return classes.ERASE_ZERO
        if not self.zero:
            return classes.ERASE_CRYPTO
        called = volume.own_tags.get(tag.CLASS)
        found = (one.erase for one in self._classes if one.name == called)
        return next(found, classes.ERASE_ZERO)

    def _zero_what_is_there(self, volume: Volume, device: str, offset: int, length: int) -> bool:
        """Overwrite the extents that lie on disks that are there.

        Whether those that failed are all on missing ones, for certain. What is there and fails is
        raised.
        """
        extent, end, is_told = volume.group.extent_size_bytes, offset + length, True
        while offset < end:
            size = min(extent - offset % extent, end - offset)
            try:
                self._zero_out(volume, device, offset, size)
            except OSError as error:
                is_lost = _is_lost(volume, offset // extent)
                if error.errno != errno.EIO or is_lost is False:
                    raise
                is_told &= is_lost is True
            offset += size
        return is_told

    def _zero_out(self, volume: Volume, device: str, offset: int, length: int) -> None:
        try:
            self._kernel.zero_out(device, offset, length)
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise errors.VolumeInUse(str(volume.id), "its device is mounted or held") from None
            raise


def _is_volume(name: str) -> bool:
    return any(names.is_of(one, name) for one in (ids.VOLUME_PREFIX, ids.INLINE_PREFIX))


def _is_lost(volume: Volume, extent: int) -> bool | None:
    """Whether an extent of a volume lies on a missing disk; None where that is not certain.

    What is striped, or has copies, lies on several disks at once.
    """
    logical = volume.group.volumes.get(volume.name)
    if logical is None or logical.layout != {"linear"}:
        return None
    is_missing = {disk.name: disk.missing for disk in volume.group.disks}
    for piece in logical.ranges:
        disk, _, ends = piece.rpartition(":")
        first, _, last = ends.partition("-")
        extent -= int(last) - int(first) + 1
        if extent < 0:
            return is_missing.get(disk)
    return None


def _waits_for_disk(volume: Volume) -> bool:
    """Whether a part of it may come back with a disk, and nobody gave that up."""
    return bool(volume.missing_disks) and tag.GIVEN_UP not in volume.own_tags


def _about_disks(volume: Volume) -> str:
    logical = volume.group.volumes.get(volume.name)
    root = logical.origin if logical is not None and logical.is_copy_on_write else ""
    holder = volume.group.volumes.get(root, volume.on_disks)
    path = f"{volume.group.name}/{holder.pool or holder.name}"
    if not volume.missing_disks:
        gone = ", ".join(one.uuid for one in volume.group.disks if one.missing)
        return f"lvm2 takes nothing apart while the disk {gone} is missing; it goes on afterwards"
    return (
        f"a part of it lies on the missing disk {', '.join(volume.missing_disks)}. It goes on when"
        " the disk is back, or the volume is repaired. If the disk is lost for good, give that part"
        f" up: `lvchange --addtag {tags.format_one(tag.GIVEN_UP, 'yes')} {path}`"
    )


def _about_cache(volume: Volume) -> str:
    path = f"{volume.group.name}/{volume.name}"
    return (
        "its cache is written back first, and it is tried again each minute. Where the dirty blocks"
        f" do not become fewer (`dmsetup status /dev/{path}`), look at `dmesg`, and mend or replace"
        " the disk"
    )


def _about_legs(volume: Volume, health: str) -> str:
    path = f"{volume.group.name}/{volume.name}"
    return (
        f"its legs are {health}, and D takes no writes (`lvs -a {path}`, `dmesg`). It is tried"
        " again; mend or replace that disk"
    )


def _wipe_of(volume: Volume) -> _Wipe:
    # Many may wait, and each would keep a report of all volumes.
    upon = [one.name for one in volume.group.made_of(volume.name)]
    pool = volume.group.volumes[volume.name].pool if volume.name in volume.group.volumes else ""
    parted = caches.parted(volume.group, volume.name)
    group = volume.group.only(volume.name, parted, pool, *upon)
    volume = replace(volume, group=group)
    return _Wipe(key=str(volume.id), volume=volume, on_record=volume.wiping)
