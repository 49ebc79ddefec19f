"""What is wrong with a volume: by LVM's report, by device-mapper, and by its file system.

Each finding is a sentence that says what is wrong and what to do, and is gone once that was done.
Nothing here starts a process: the report is one that was read before.
"""

from collections.abc import Iterator, Sequence

from agent import fact, ids
from agent.engine import records
from agent.engine.inventory import Inventory
from agent.engine.records import Volume
from lvm import caches, pools, tags
from lvm.devicemapper import FAILED, Cache, Raid, Snapshot, Status, ThinPool, WriteCache
from mount import health, table
from mount.syscalls import Kernel
from mount.table import Mount

# A pool that is fuller than this has had its warnings; what extends pools does so long before.
_FULL_PERCENT = 90.0

# lv_health_status, by lvmreport(7) and lib/report/report.c of lvm2.
_REMEDIES = {
    "refresh needed": "a disk of it was away; run `lvchange --refresh {0}`",
    "mismatches exist": "its copies differ; run `lvchange --syncaction repair {0}`",
}


class Diagnosis:
    """Looks at volumes of the inventory, on the kernel."""

    def __init__(self, kernel: Kernel, known: Inventory) -> None:
        self._kernel = kernel
        self._inventory = known

    def mounts(self) -> table.Table:
        """The mount table, for who asks about many volumes: then it is read once."""
        return table.read(self._kernel)

    def of(self, volume: Volume, mounts: table.Table | None = None) -> tuple[str, ...]:
        """What is known against a volume of a report, used or not; usually nothing."""
        mounts = mounts or self.mounts()
        device = self._inventory.device(str(volume.id))
        mounted = [] if device is None else mounts.of_device(device.number)
        whole = next((one for one in mounted if one.root == "/"), None)
        return (
            *by_report(volume),
            *self._by_kernel(str(volume.id), volume, mounts, whole),
        )

    def in_use(self, volume_id: str, mounts: table.Table, mounted: Mount | None) -> tuple[str, ...]:
        """The same for a volume at work, seen through a mount of its file system, if it has one.

        What LVM says against it is what it said last: see `Inventory.glimpse`.
        """
        volume = self._inventory.glimpse(volume_id)
        return (
            *(by_report(volume) if volume else ()),
            *self._by_kernel(volume_id, volume, mounts, mounted),
        )

    def _by_kernel(
        self, volume_id: str, volume: Volume | None, mounts: table.Table, mounted: Mount | None
    ) -> Iterator[str]:
        name, found = ids.logical_name(volume_id), self._inventory.status_of(volume_id)
        yield from by_device_mapper(name, found, volume is not None and _has_all(volume))
        if mounted is not None:
            yield from health.problems(self._kernel, mounts, mounted)


def by_report(volume: Volume) -> Iterator[str]:
    """What LVM's report says against a volume and its snapshots."""
    name = f"{volume.group.name}/{volume.name}"
    if volume.health == "partial":
        yield f"logical volume {name} is partial: {_missing(volume)}"
    elif volume.health:
        remedy = _REMEDIES.get(volume.health, "look with `lvs -o +lv_health_status` and at `dmesg`")
        yield f"logical volume {name} is {volume.health}: {remedy.format(name)}"
    if volume.wanted_bytes:
        yield (
            f"logical volume {name} is smaller than the {volume.wanted_bytes} bytes that it shall"
            " grow to: in use it does not grow while it has copy-on-write snapshots. It grows when"
            " it is staged next, if its group has room then: restart its pod"
        )
    for snapshot in records.snapshots_of(volume):
        if snapshot.problem:
            yield f"snapshot {snapshot.id} of it is of no use: {snapshot.problem}; delete it"


def _missing(volume: Volume) -> str:
    holder = volume.on_disks
    gone = [one for one in volume.group.disks if one.missing and one.uuid in holder.disks]
    disks = f"the disk {', '.join(one.uuid for one in gone)}" if gone else "a disk of it"
    again = f"{disks} is missing; attach it again (`pvs`)"
    if volume.layout.kind.startswith("raid"):
        return f"{again}, or replace it: `vgextend`, then `lvconvert --repair`"
    cache = tags.decode(holder.tags).get(fact.CACHE, "")
    if caches.is_copy(cache) and gone and all(one.fast for one in gone):
        return f"{again}, or see `A fast disk is lost` in docs/operations.md: no data are lost"
    return f"{again}, or restore the volume from a backup"


def _has_all(volume: Volume) -> bool:
    """Whether the volume's pool has all the room that it promised: then it may well be full."""
    logical = volume.group.volumes.get(volume.name)
    pool = pools.find(volume.group, logical.pool if logical else "", 0)
    return pool.promised_bytes <= pool.data_extents * volume.group.extent_size_bytes


def by_device_mapper(name: str, found: Sequence[Status], has_all: bool = False) -> Iterator[str]:
    """What device-mapper says against an active volume and what it stands on.

    `has_all` says of its pool that it has all the room that it promised.
    """
    cached, owner = name, f"logical volume {name}"
    if any(isinstance(one, ThinPool) for one in found):
        cached, owner = "GROUP/POOL_tdata", f"the thin pool under {owner}"
    for one in found:
        match one:
            case Raid():
                yield from _of_raid(name, one)
            case ThinPool():
                yield from _of_pool(one, has_all)
            case Snapshot(state=str(state)) if state:
                yield (
                    f"logical volume {name} is a snapshot whose store cannot be read any more"
                    f" ({state}): its data are lost; delete it"
                )
            case Cache(mode=mode, needs_check=needs_check) if mode != "rw" or needs_check:
                yield (
                    f"the cache of {owner} failed ({mode}): its disk has errors; look at `dmesg`,"
                    f" and detach it with `lvconvert --uncache {cached}`"
                )
            case WriteCache(error=error) if error:
                yield (
                    f"the write cache of {owner} met error {error}: writes may be lost; look at"
                    " `dmesg`, and back the data up"
                )


def _of_raid(name: str, raid: Raid) -> Iterator[str]:
    lost = sum(one in "D-" for one in raid.health)
    if lost:
        yield (
            f"logical volume {name} is degraded: {lost} of the {len(raid.health)} images of its"
            f" {raid.kind} failed; attach the disk again and run `lvchange --refresh {name}`, or"
            f" replace it: `vgextend`, then `lvconvert --repair {name}`"
        )
    elif "a" in raid.health:
        yield (
            f"logical volume {name} is resyncing ({raid.action}, {raid.synced_percent:.0f} % done):"
            " until it is in sync the loss of a disk may lose data; nothing is to be done but wait"
        )


def _of_pool(pool: ThinPool, has_all: bool) -> Iterator[str]:
    if pool.mode == FAILED or pool.needs_check:
        yield (
            f"the thin pool under the volume failed ({pool.mode}): look at `dmesg`; take the pool's"
            " volumes out of use, and run `lvconvert --repair` on it"
        )
        return
    for what, percent in (("data", pool.data_percent), ("metadata", pool.metadata_percent)):
        if percent >= _FULL_PERCENT and not (what == "data" and has_all):
            yield (
                f"the {what} of the thin pool under the volume are {percent:.0f} % full, and writes"
                " fail when they are full: add a disk to the group (`vgextend`), to which Carver"
                " extends the pool (`lvextend`), or delete volumes and snapshots"
            )
    if pool.mode != "rw":
        yield (
            f"the thin pool under the volume takes no more writes ({pool.mode}): make room as for a"
            " full one, then take the volume out of use and into use again"
        )
