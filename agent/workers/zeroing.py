"""What a volume grows by, overwritten before it is the volume's.

Of a volume whose class says `zero = "fully"` no sector may show what was there before. A device
that has grown is written to at once by whoever uses it, so it is too late then. So the extents are
taken by a logical volume of their own first, as long and on the same disks; that is overwritten;
then it is removed and the volume extended onto the very same extents, with the group held around
both.

That logical volume bears nothing of anyone's, and is on record as to be wiped: killed at any
moment, the next start removes it, and the call that is made again begins anew.
"""

from concurrent.futures import wait
from dataclasses import dataclass

from agent import errors, fact, ids
from agent.engine.allocation import Carving
from agent.engine.jobs import Job, Jobs
from agent.engine.means import Means
from agent.engine.records import Volume
from lvm import layout, names, report, volumes
from lvm.layout import LINEAR, Layout
from lvm.volumes import New

_CHUNK_BYTES = 64 << 20
_WORKERS = 1


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


class Zeroer:
    """Overwrites what volumes grow by."""

    def __init__(self, means: Means) -> None:
        self._engines, self._kernel = means.engines, means.kernel
        self._inventory = means.inventory
        self.grace_seconds = 10.0
        # The UUIDs of those that were overwritten and not taken yet.
        self._done: set[str] = set()
        self.jobs = Jobs(
            "zero",
            self._overwrite,
            self._find,
            "what volume %s is to grow by is not overwritten: %s",
            workers=_WORKERS,
        )

    def take(self, volume: Volume, more_bytes: int, carving: Carving) -> tuple[str, ...]:
        """The extents that a volume grows by, which nobody has any more and which hold zeroes.

        To be called with the group held, and a report that was read within; the caller extends the
        volume at once. Two commands in all, of the first and of the last call. Raises Overwriting
        until it is done, NoRoom.
        """
        group, own = volume.group, _name(volume.name)
        lvm = self._engines.lvm(group.name)
        reserved = group.volumes.get(own)
        if reserved is not None and reserved.size_bytes != _taken_bytes(volume, more_bytes):
            # Another size was asked for before. In use, and so refused, while a piece is written.
            volumes.remove(lvm, group.name, own)
            reserved = None
        if reserved is None:
            if more_bytes > (room := carving.maximum_growth_bytes(volume)):
                raise errors.NoRoom(group.name, more_bytes, room, f"more {carving.purpose(group)}")
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
        facts = {fact.NAME: volume.facts[fact.NAME], fact.STATE: fact.WIPING}
        new = New(_name(volume.name), taken, facts)
        volumes.create(self._engines.lvm(group.name), group.name, new, layout=spread, disks=disks)
        return self._inventory.read(group.name).group(group.name).volume(new.name)

    def _find(self, volume_id: str) -> _Growth:
        # Nobody's but the caller's, who calls again.
        raise errors.NoSuchVolume(volume_id)

    def _overwrite(self, job: _Growth) -> None:
        device = self._inventory.ensure_active(job.group, job.name).path
        size_bytes = self._kernel.device_size_bytes(device)
        job.size_bytes = size_bytes
        for offset in range(0, size_bytes, _CHUNK_BYTES):
            self.jobs.check(job)
            length = min(_CHUNK_BYTES, size_bytes - offset)
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
