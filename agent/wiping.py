"""Deletion: a volume's blocks are overwritten before its extents are anyone else's.

A wipe takes as long as the disk takes. DeleteVolume waits a moment for it: most wipes are over by
then, and the space is free when the call answers. A wipe that takes longer is first put on record
as a tag, so that it survives a restart, and then goes on behind the answer.

Killed before that tag is written, the caller has no answer and calls again. Killed after it,
`resume` goes on at start-up. One that fails after the answer is tried again, for nobody else will.
"""

import errno
from collections.abc import Mapping
from concurrent.futures import wait
from dataclasses import dataclass, replace

from agent import errors, holders, inventory
from agent.inventory import Volume
from agent.jobs import Job, Jobs
from agent.means import Means
from lvm import caches, volumes

# Small enough to stop soon when the service stops, large enough to cost nothing.
_CHUNK_BYTES = 128 << 20
_WORKERS = 2


@dataclass(kw_only=True)
class _Wipe(Job):
    volume: Volume
    # Set under the group's lock: nothing is put on record of a volume that is gone.
    removed: bool = False


class Wiper:
    """Wipes and removes volumes, a few at a time."""

    def __init__(self, means: Means) -> None:
        self._lvm, self._kernel = means.lvm, means.kernel
        self._inventory, self._groups = means.inventory, means.groups
        self.zero = means.config.wipe == "zero"
        self.grace_seconds = 2.0
        self.jobs = Jobs(
            "wipe",
            self._wipe_and_remove,
            self._find,
            "volume %s is deleted, but not wiped and removed: %s",
            workers=_WORKERS,
        )

    def delete(self, volume: Volume) -> None:
        """Wipe and remove, or leave that to the background on record; raises VolumeInUse."""
        if volume.wiping:
            self._start(volume)
            return
        holders.require_unused(self._kernel, self._inventory, volume)
        job = self._start(volume)
        wait([job.ended], self.grace_seconds)
        if not job.ended.done() and self._put_on_record(job):
            return
        job.ended.result()

    def finish(self, volume: Volume) -> None:
        """Wipe and remove what is on record already; most wipes are over when this returns."""
        wait([self._start(volume).ended], self.grace_seconds)

    def _put_on_record(self, job: _Wipe) -> bool:
        """Tag a volume as deleted, unless it is removed already."""
        group, name = job.volume.group.name, job.volume.name
        with self._groups.hold(group):
            if job.removed:
                return False
            old = {inventory.STATE: job.volume.facts[inventory.STATE]}
            new = {inventory.STATE: inventory.WIPING}
            volumes.mark(self._lvm, group, name, old=old, new=new)
            job.on_record = True
        if job.ended.done():
            # It failed in between, and nobody else will hear of it.
            self.jobs.try_again(job)
        return True

    def is_deleting(self, volume_id: str) -> bool:
        """Whether the volume's data are being overwritten, or were in part."""
        return self.jobs.has(volume_id)

    def counts(self) -> Mapping[str, int]:
        """How many wipes wait for a worker, are under way, and failed and will be tried again."""
        return self.jobs.counts()

    def resume(self) -> int:
        """Go on with the wipes that an earlier process left; returns how many."""
        left = list(self._inventory.doomed(self._inventory.awake()))
        for volume in left:
            self._start(volume)
        return len(left)

    def forget(self, volume_id: str) -> None:
        """A new volume has the id now: what is known of an earlier one is void."""
        self.jobs.forget(volume_id)

    def stop(self) -> None:
        """End at the next chunk; the tags tell the next start what is left."""
        self.jobs.stop()

    def _start(self, volume: Volume) -> _Wipe:
        return self.jobs.start(_wipe_of(volume))

    def _find(self, volume_id: str) -> _Wipe:
        return _wipe_of(self._inventory.doomed_one(self._inventory.awake(), volume_id))

    def _wipe_and_remove(self, job: _Wipe) -> None:
        volume = job.volume
        doomed = [volume.name]
        if self.zero:
            if volume.read_only:
                with self._groups.hold(volume.group.name):
                    volumes.allow_writing(self._lvm, volume.group.name, volume.name)
            self._inventory.activate(volume)
            if inventory.CACHE in volume.facts:
                doomed += self._parted_cache(volume)
            for name in doomed:
                self._wipe(job, replace(volume, name=name))
        elif inventory.CACHE in volume.facts:
            doomed += filter(None, [caches.parted(volume.group, volume.name)])
        with self._groups.hold(volume.group.name):
            volumes.remove(self._lvm, volume.group.name, *doomed)
            job.removed = True

    def _parted_cache(self, volume: Volume) -> list[str]:
        """The cache of a volume as one of its own: what was written is there, too.

        Killed afterwards, the volume has none; whoever goes on with it finds the parted one.
        """
        group, logical = volume.group, volume.group.volume(volume.name)
        if not caches.is_cached(logical):
            return list(filter(None, [caches.parted(group, volume.name)]))
        with self._groups.hold(group.name):
            caches.split(self._lvm, logical)
        return [caches.attached(logical)]

    def _wipe(self, job: _Wipe, volume: Volume) -> None:
        device = self._inventory.activate(volume).path
        size_bytes = self._kernel.device_size_bytes(device)
        for offset in range(0, size_bytes, _CHUNK_BYTES):
            self.jobs.check(job)
            self._zero_out(volume, device, offset, min(_CHUNK_BYTES, size_bytes - offset))

    def _zero_out(self, volume: Volume, device: str, offset: int, length: int) -> None:
        try:
            self._kernel.zero_out(device, offset, length)
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise errors.VolumeInUse(str(volume.id), "its device is mounted or held") from None
            raise


def _wipe_of(volume: Volume) -> _Wipe:
    # Many may wait, and each would keep a report of all volumes.
    group = volume.group.only(volume.name, caches.parted(volume.group, volume.name))
    volume = replace(volume, group=group)
    return _Wipe(key=str(volume.id), volume=volume, on_record=volume.wiping)
