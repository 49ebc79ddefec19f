"""What is wrong with a volume: CSI's statuses, a reason for programs, and what to do."""

import enum
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import NamedTuple

from agent.core import errors, ids, records, tag
from agent.core.background import Probes
from agent.core.capabilities import BLOCK
from agent.core.inventory import Inventory
from agent.core.records import Volume
from lvm import caches, raid, report, tags, thin
from lvm.devicemapper import FAILED, Cache, Raid, Snapshot, Status, ThinPool, WriteCache
from lvm.devices import Device, Devices
from mount import health, table
from mount.kernel import Kernel

# CSI's words: VolumeHealthErrorType and StorageHealthErrorType.
DEGRADED = "DEGRADED"
INACCESSIBLE = "INACCESSIBLE"
DATA_LOSS = "DATA_LOSS"
STORAGE_DEGRADED = "STORAGE_DEGRADED"
STORAGE_UNREACHABLE = "STORAGE_UNREACHABLE"
_WORST_FIRST = (DATA_LOSS, STORAGE_UNREACHABLE, INACCESSIBLE, DEGRADED, STORAGE_DEGRADED)

# What Kubernetes' API server takes (PodVolumeHealth, k8s.io/api/core/v1 of 1.37). With more of
# either it refuses the whole status of the pod, which then cannot even be deleted.
_MOST_CONDITIONS = 16
_MOST_BYTES = 1024
_MOST_BYTES_OF_AGE = 64


class Reason(enum.Enum):
    """Why something is not well: the word, and the status that it gives a volume and the storage.

    A status is empty where the reason is never one of a volume's, or of the storage's. `access` is
    the one kind of use that is affected, "block" or "mount", empty for both: one for each reason,
    since Kubernetes tells two entries apart by status and reason alone.
    """

    RAID_DEGRADED = "RaidDegraded", DEGRADED, ""
    RAID_RESYNCING = "RaidResyncing", DEGRADED, ""
    RAID_MISMATCHES = "RaidMismatches", DEGRADED, ""
    POOL_NEARLY_FULL = "PoolNearlyFull", DEGRADED, STORAGE_DEGRADED
    CACHE_FAILING = "CacheFailing", DEGRADED, ""
    FILE_SYSTEM_ERRORS = "FileSystemErrors", DEGRADED, ""
    EXPANSION_PENDING = "ExpansionPending", DEGRADED, ""
    KEY_ROTATION_PENDING = "KeyRotationPending", DEGRADED, ""
    ENCRYPTION_LEFT_OPEN = "EncryptionLeftOpen", DEGRADED, ""
    LVM_REPORTS = "LvmReports", DEGRADED, ""

    DISK_MISSING = "DiskMissing", INACCESSIBLE, STORAGE_DEGRADED
    RAID_FAILED = "RaidFailed", INACCESSIBLE, ""
    GROUP_MISSING = "GroupMissing", INACCESSIBLE, STORAGE_UNREACHABLE
    GROUP_REFUSED = "GroupRefused", INACCESSIBLE, STORAGE_UNREACHABLE
    DEVICE_SUSPENDED = "DeviceSuspended", INACCESSIBLE, ""
    DEVICE_GONE = "DeviceGone", INACCESSIBLE, ""
    DEVICE_NOT_RESPONDING = "DeviceNotResponding", INACCESSIBLE, STORAGE_DEGRADED
    FILE_SYSTEM_READ_ONLY = "FileSystemReadOnly", INACCESSIBLE, ""
    FILE_SYSTEM_NOT_RESPONDING = "FileSystemNotResponding", INACCESSIBLE, ""
    POOL_FULL = "PoolFull", INACCESSIBLE, STORAGE_DEGRADED
    POOL_READ_ONLY = "PoolReadOnly", INACCESSIBLE, STORAGE_DEGRADED

    POOL_DATA_LOST = "PoolDataLost", DATA_LOSS, STORAGE_DEGRADED
    SNAPSHOT_OVERFLOWED = "SnapshotOverflowed", DATA_LOSS, ""
    WRITE_CACHE_ERRORS = "WriteCacheErrors", DATA_LOSS, ""
    MEDIUM_ERRORS = "MediumErrors", DATA_LOSS, STORAGE_DEGRADED

    DISK_IGNORED = "DiskIgnored", "", STORAGE_DEGRADED
    GROUP_METADATA_FULL = "GroupMetadataFull", "", STORAGE_DEGRADED
    FILE_SYSTEM_TOOLS_MISSING = "FileSystemToolsMissing", "", STORAGE_DEGRADED, "mount"
    LOOP_DEVICES_MISSING = "LoopDevicesMissing", "", STORAGE_DEGRADED, "block"
    DISK_NOT_RESPONDING = "DiskNotResponding", "", STORAGE_UNREACHABLE
    LVM_NOT_ANSWERING = "LvmNotAnswering", "", STORAGE_UNREACHABLE

    def __init__(self, word: str, of_volume: str, of_storage: str, access: str = "") -> None:
        self.word = word
        self.of_volume = of_volume
        self.of_storage = of_storage
        self.access = access

    def __str__(self) -> str:
        return self.word


@dataclass(frozen=True)
class Condition:
    """A reason, and a sentence that says what is wrong and what to do.

    `seen_seconds` (epoch) is when that was seen; 0 for what was looked up just now.
    """

    reason: Reason
    message: str
    seen_seconds: float = 0.0

    @property
    def size_bytes(self) -> int:
        """What it takes of a message at most, with its age and its words."""
        return min(_MOST_BYTES, len(self.message.encode()) + _MOST_BYTES_OF_AGE) + 64

    def told(self, now_seconds: float) -> str:
        """The sentence, with its age where it has one.

        Kubelet keeps what it heard first for as long as status and reason are the same, so the age
        is told as a moment, too.
        """
        age = ""
        if self.seen_seconds:
            seconds = max(0.0, now_seconds - self.seen_seconds)
            moment = datetime.fromtimestamp(self.seen_seconds, UTC)
            age = f" (seen {seconds:.0f} s ago, at {moment:%Y-%m-%dT%H:%M:%SZ})"
        return _shortened(self.message, _MOST_BYTES - len(age)) + age


def distinct(found: Iterable[Condition]) -> tuple[Condition, ...]:
    """The same with each reason once, as CSI demands, the oldest age for all; the worst first.

    What has one reason is one condition, with all that is to be said of it.
    """
    merged: dict[Reason, Condition] = {}
    for one in found:
        same = merged.get(one.reason)
        merged[one.reason] = one if same is None else _both(same, one)
    return tuple(sorted(merged.values(), key=_rank)[:_MOST_CONDITIONS])


def _rank(one: Condition) -> int:
    return _WORST_FIRST.index(one.reason.of_volume or one.reason.of_storage)


def _shortened(text: str, most_bytes: int) -> str:
    """A text that is too long loses its end, between two characters."""
    if len(text.encode()) <= most_bytes:
        return text
    return text.encode()[: most_bytes - len("…".encode())].decode(errors="ignore") + "…"


def aged(found: Iterable[Condition], seen_seconds: float) -> Iterator[Condition]:
    """The same, as what was seen then (epoch, seconds)."""
    return (replace(one, seen_seconds=seen_seconds) for one in found)


def _both(first: Condition, second: Condition) -> Condition:
    ages = [one.seen_seconds for one in (first, second) if one.seen_seconds]
    message = first.message
    if second.message not in message.split("; and "):
        message = f"{message}; and {second.message}"
    return replace(first, message=message, seen_seconds=min(ages, default=0.0))


# A pool that is fuller than this has had its warnings; what extends pools does so long before.
_FULL_PERCENT = 90.0
# How long whoever asks waits for the kernel, and from when on a device is taken for dead: a busy
# node is slow at anything.
PATIENCE_SECONDS = 2.0
_DEAD_SECONDS = 10.0
# Nobody holds a volume for so long on purpose, but for a group snapshot, of which Carver knows.
SETTLING_SECONDS = 1.0

# lv_health_status, by lvmreport(7) and lib/report/report.c of lvm2: of volumes in whose place
# device-mapper does not speak for itself.
_REPORTED = {
    "refresh needed": (
        Reason.RAID_DEGRADED,
        "a disk of it was away; run `lvchange --refresh {0}`",
    ),
    "mismatches exist": (
        Reason.RAID_MISMATCHES,
        "its copies differ; run `lvchange --syncaction repair {0}`",
    ),
    "out_of_data": (Reason.POOL_FULL, "add a disk to the group (`vgextend`), or delete volumes"),
    "error": (Reason.WRITE_CACHE_ERRORS, "writes may be lost; look at `dmesg`"),
}
_LOOK_CLOSER = "look with `lvs -o +lv_health_status` and at `dmesg`"


class _Kernels(NamedTuple):
    """What the kernel tells of a volume, and whether device-mapper says how its disks are."""

    conditions: tuple[Condition, ...] = ()
    tells: bool = False


class Diagnosis:
    """Looks at volumes of the inventory, on the kernel."""

    def __init__(self, kernel: Kernel, kernel_devices: Devices, known: Inventory) -> None:
        self._kernel = kernel
        self._devices = kernel_devices
        self._inventory = known
        self._looks: Probes[_Kernels] = Probes()
        # For tests.
        self.settling_seconds = SETTLING_SECONDS

    def mounts(self) -> table.Table:
        """The mount table, for who asks about many volumes: then it is read once."""
        return table.read(self._kernel)

    def of(
        self,
        volume: Volume,
        mounts: table.Table | None = None,
        *,
        seen_seconds: float = 0.0,
        until_seconds: float | None = None,
    ) -> tuple[Condition, ...]:
        """What is known against a volume of a report, used or not; usually nothing.

        `seen_seconds` (epoch) is when the report was read. The kernel is waited for until
        `until_seconds` (monotonic), or for a moment.
        """
        by_kernel = self._by_kernel(str(volume.id), volume, mounts, until_seconds)
        reported = by_report(volume, kernel_tells=by_kernel.tells)
        return distinct([*aged(reported, seen_seconds), *by_kernel.conditions])

    def by_kernel(self, volume_id: str) -> tuple[Condition, ...]:
        """The same of a volume that no report has yet, or whose report is of no use."""
        return distinct(self._by_kernel(volume_id, None, None, None).conditions)

    def of_pool(
        self, group: report.Group, name: str, until_seconds: float
    ) -> tuple[Condition, ...]:
        """What device-mapper says against a thin pool itself."""
        named = f"thin pool {group.name}/{name}"

        def look() -> _Kernels:
            told = thin.status_of(self._inventory.status(group.name, name))
            if told is None:
                return _Kernels()
            return _Kernels(tuple(_of_pool(told, named, has_all=has_all(group, name))))

        place = f"{group.name}/{name}"
        return self._waited(f"pool {place}", place, named, look, until_seconds).conditions

    def _by_kernel(
        self,
        volume_id: str,
        volume: Volume | None,
        mounts: table.Table | None,
        until_seconds: float | None,
    ) -> _Kernels:
        def look() -> _Kernels:
            return self._look(volume_id, volume, mounts or self.mounts())

        if until_seconds is None:
            until_seconds = time.monotonic() + PATIENCE_SECONDS
        named = f"logical volume {ids.logical_name(volume_id)}"
        return self._waited(volume_id, _place(volume_id, volume), named, look, until_seconds)

    def _waited(
        self,
        what: str,
        place: str,
        named: str,
        look: Callable[[], _Kernels],
        until_seconds: float,
    ) -> _Kernels:
        seen = self._looks.at(what, look, until_seconds, place)
        known = seen.value or _Kernels()
        if seen.hanging_seconds < _DEAD_SECONDS:
            return known
        silent = Condition(
            Reason.DEVICE_NOT_RESPONDING,
            f"the kernel has not told of {named} for {seen.hanging_seconds:.0f} s, as when a disk"
            " under it does not answer; look at `dmesg`",
        )
        return _Kernels((*known.conditions, silent), known.tells)

    def _look(self, volume_id: str, volume: Volume | None, mounts: table.Table) -> _Kernels:
        name, told = ids.logical_name(volume_id), self._inventory.status_of(volume_id)
        # What a pool has promised, a report says: without one it may well have kept it.
        found = [*by_device_mapper(name, told, volume is None or _has_all(volume))]
        device = self._inventory.device(volume_id)
        if device is not None:
            found += self._of_device(_group_of(volume_id, volume), name, device, mounts)
            if volume is not None and self._is_left_open(volume, device, mounts):
                found.append(
                    Condition(
                        Reason.ENCRYPTION_LEFT_OPEN,
                        f"encrypted volume {volume.name} is open ({device.path}), and nobody has it"
                        " mounted: it is closed when it is staged, unstaged or deleted",
                    )
                )
        for snapshot in records.snapshots_of(volume) if volume is not None else ():
            if not snapshot.problem and self._inventory.has_overflowed(snapshot):
                found.append(overflowed(snapshot))
        return _Kernels(tuple(found), bool(told))

    def _of_device(
        self, group: str, name: str, device: Device, mounts: table.Table
    ) -> Iterator[Condition]:
        if self._is_left_suspended(group, name):
            yield Condition(
                Reason.DEVICE_SUSPENDED,
                f"logical volume {group}/{name} is suspended, and whoever reads or writes there"
                f" waits: run `dmsetup resume {device.logical.path}` if lvm2 is not at work on it;"
                " the next change of the group by Carver does it, too",
            )
        mounted = mounts.of_device(device.number)
        whole = next((one for one in mounted if one.root == "/"), None)
        if whole is not None:
            for problem in health.problems(self._kernel, mounts, whole):
                yield Condition(_OF_FILE_SYSTEMS[problem.kind], problem.message)

    def _is_left_open(self, volume: Volume, device: Device, mounts: table.Table) -> bool:
        """Whether an encrypted volume with a file system is open and not in use, be it by mkfs.

        A raw block volume is open while it is staged, used or not.
        """
        if device.below is None or volume.own_tags.get(tag.ACCESS) == BLOCK:
            return False
        is_used = mounts.of_device(device.number) or self._devices.is_mapping_open(device)
        return not is_used

    def _is_left_suspended(self, group: str, name: str) -> bool:
        """Whether a volume is suspended, and not for the moment that a change of it takes."""
        if not self._is_suspended(group, name):
            return False
        time.sleep(self.settling_seconds)
        return self._is_suspended(group, name)

    def _is_suspended(self, group: str, name: str) -> bool:
        return not self._inventory.is_held(group, name) and self._devices.is_suspended(group, name)


def _group_of(volume_id: str, volume: Volume | None) -> str:
    """The group's name; empty for an inline volume that no report has yet."""
    parsed = ids.VolumeId.parse(volume_id)
    if parsed is not None:
        return parsed.group
    return volume.group.name if volume is not None else ""


def _place(volume_id: str, volume: Volume | None) -> str:
    """What a volume hangs with: its pool, or its group."""
    group = _group_of(volume_id, volume)
    logical = volume.group.volumes.get(volume.name) if volume is not None else None
    return f"{group}/{logical.pool}" if logical is not None and logical.pool else group


_OF_FILE_SYSTEMS = {
    health.Kind.READ_ONLY: Reason.FILE_SYSTEM_READ_ONLY,
    health.Kind.SILENT: Reason.FILE_SYSTEM_NOT_RESPONDING,
    health.Kind.ERRORS: Reason.FILE_SYSTEM_ERRORS,
    health.Kind.MEDIUM_ERRORS: Reason.MEDIUM_ERRORS,
}


def by_report(volume: Volume, *, kernel_tells: bool = False) -> Iterator[Condition]:
    """What LVM's report says against a volume and its snapshots.

    What lvm2 itself has from device-mapper is left to that, where it speaks (`kernel_tells`): it
    is the first to know that something is over, and nothing of it is in the metadata.
    """
    name = f"{volume.group.name}/{volume.name}"
    if volume.health == "partial":
        yield Condition(
            _of_missing(volume), f"logical volume {name} is partial: {_missing(volume)}"
        )
    elif volume.health and not kernel_tells:
        reason, remedy = _reported(volume)
        yield Condition(reason, f"logical volume {name} is {volume.health}: {remedy.format(name)}")
    if volume.refused_bytes > volume.size_bytes:
        yield Condition(
            Reason.EXPANSION_PENDING,
            f"logical volume {name} is smaller than the {volume.refused_bytes} bytes that its claim"
            f" asks for: volume group {volume.group.name}, or its pool, had no room for that, or"
            " lvm2 refused it. Make room (`vgextend`), and scale its workload to 0 until it is"
            " unstaged; or ask for less (lower the claim's request)",
        )
    elif volume.wanted_bytes and not volume.copy_on_write_snapshots:
        # Its snapshots were deleted since; or it was an earlier version that had no room for it.
        yield Condition(
            Reason.EXPANSION_PENDING,
            f"logical volume {name} is smaller than the {volume.wanted_bytes} bytes that it is to"
            f" grow to: volume group {volume.group.name}, or its pool, had no room for that, or it"
            " was in use and had copy-on-write snapshots. It grows when it is staged next, if there"
            " is room then: make room (`vgextend`), and scale its workload to 0 until it is"
            " unstaged; or ask for less (lower the claim's request)",
        )
    elif volume.wanted_bytes:
        yield Condition(
            Reason.EXPANSION_PENDING,
            f"logical volume {name} is smaller than the {volume.wanted_bytes} bytes that it shall"
            " grow to: in use it does not grow while it has copy-on-write snapshots. It grows when"
            f" it is staged next, if its group has room then: {errors.UNSTAGE}",
        )
    elif volume.refused_bytes:
        mapping = ", or its LUKS mapping for want of a key," if volume.is_encrypted else ""
        yield Condition(
            Reason.EXPANSION_PENDING,
            f"logical volume {name} grew to {volume.size_bytes} bytes, but its file system{mapping}"
            " could not grow: see `journalctl -k` and Carver's log. It is tried again when it is"
            f" staged next: {errors.UNSTAGE}",
        )
    if tag.ROTATING in volume.own_tags:
        yield Condition(
            Reason.KEY_ROTATION_PENDING,
            f"encrypted volume {name} may still open by the key before, or by none that its secret"
            " has: keep the old key, and have the volume published or staged with both"
            " (docs/encryption.md, Rotation)",
        )
    for snapshot in records.snapshots_of(volume):
        if snapshot.problem:
            yield overflowed(snapshot)


def _reported(volume: Volume) -> tuple[Reason, str]:
    """The reason and the remedy for what lvm2 says of a volume's health."""
    if volume.health in ("failed", "metadata_read_only"):
        if not volume.layout.is_thin:
            return Reason.CACHE_FAILING, _LOOK_CLOSER
        is_lost = volume.health == "failed"
        return Reason.POOL_DATA_LOST if is_lost else Reason.POOL_READ_ONLY, _LOOK_CLOSER
    return _REPORTED.get(volume.health, (Reason.LVM_REPORTS, _LOOK_CLOSER))


def overflowed(snapshot: records.Snapshot) -> Condition:
    """A copy-on-write snapshot is lost; its volume tells of it, as nobody else can."""
    why = snapshot.problem or "its area for what the volume overwrites was full"
    return Condition(
        Reason.SNAPSHOT_OVERFLOWED,
        f"snapshot {snapshot.id} of it is of no use: {why}; delete it. The volume itself is whole",
    )


def _of_missing(volume: Volume) -> Reason:
    holder = volume.on_disks
    if raid.level(holder.layout) is None:
        return Reason.DISK_MISSING
    return Reason.RAID_DEGRADED if volume.group.survives(holder) else Reason.RAID_FAILED


def _missing(volume: Volume) -> str:
    holder = volume.on_disks
    gone = [one for one in volume.group.disks if one.missing and one.uuid in holder.disks]
    disks = f"the disk {', '.join(one.uuid for one in gone)}" if gone else "a disk of it"
    again = f"{disks} is missing; attach it again (`pvs`)"
    if volume.layout.kind.startswith("raid"):
        return f"{again}, or replace it: `vgextend`, then `lvconvert --repair`"
    cache = tags.decode(holder.tags).get(tag.CACHE, "")
    if caches.is_copy(cache) and gone and all(one.fast for one in gone):
        return f"{again}, or see `A fast disk is lost` in docs/operations.md: no data are lost"
    return f"{again}, or restore the volume from a backup"


def _has_all(volume: Volume) -> bool:
    """Whether the volume's pool has all the room that it promised: then it may well be full."""
    logical = volume.group.volumes.get(volume.name)
    return has_all(volume.group, logical.pool if logical else "")


def has_all(group: report.Group, pool: str) -> bool:
    """Whether a pool has all the room that it promised: then it may well be full."""
    found = thin.find(group, pool, 0)
    return found.promised_bytes <= found.data_extents * group.extent_size_bytes


def by_device_mapper(
    name: str, found: Sequence[Status], has_all: bool = False
) -> Iterator[Condition]:
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
                yield from _of_pool(one, "the thin pool under the volume", has_all=has_all)
            case Snapshot(state=str(state)) if state:
                yield Condition(
                    Reason.SNAPSHOT_OVERFLOWED,
                    f"logical volume {name} is a snapshot whose store cannot be read any more"
                    f" ({state}): its data are lost; delete it",
                )
            case Cache(mode=mode, needs_check=needs_check) if mode != "rw" or needs_check:
                yield Condition(
                    Reason.CACHE_FAILING,
                    f"the cache of {owner} failed ({mode}): its disk has errors; look at `dmesg`,"
                    f" and detach it with `lvconvert --uncache {cached}`",
                )
            case WriteCache(error=error) if error:
                yield Condition(
                    Reason.WRITE_CACHE_ERRORS,
                    f"the write cache of {owner} met error {error}: writes may be lost; look at"
                    " `dmesg`, and back the data up",
                )


def _of_raid(name: str, seen: Raid) -> Iterator[Condition]:
    lost = sum(one in "D-" for one in seen.health)
    if lost:
        level = raid.level([seen.kind])
        survives = level is not None and level.survives([one in "D-" for one in seen.health])
        reason = Reason.RAID_DEGRADED if survives else Reason.RAID_FAILED
        yield Condition(
            reason,
            f"logical volume {name} is degraded: {lost} of the {len(seen.health)} images of its"
            f" {seen.kind} failed; attach the disk again and run `lvchange --refresh {name}`, or"
            f" replace it: `vgextend`, then `lvconvert --repair {name}`",
        )
    elif "a" in seen.health:
        yield Condition(
            Reason.RAID_RESYNCING,
            f"logical volume {name} is resyncing ({seen.action}, {seen.synced_percent:.0f} % done):"
            " until it is in sync the loss of a disk may lose data; nothing is to be done but wait",
        )
    if seen.mismatches:
        yield Condition(
            Reason.RAID_MISMATCHES,
            f"the copies of logical volume {name} differ in {seen.mismatches} sectors; run"
            f" `lvchange --syncaction repair {name}`",
        )


def _of_pool(pool: ThinPool, named: str, *, has_all: bool) -> Iterator[Condition]:
    if pool.mode == FAILED or pool.needs_check:
        yield Condition(
            Reason.POOL_DATA_LOST,
            f"{named} failed ({pool.mode}): look at `dmesg`; take the pool's volumes out of use,"
            " and run `lvconvert --repair` on it",
        )
        return
    for what, percent in (("data", pool.data_percent), ("metadata", pool.metadata_percent)):
        if percent >= _FULL_PERCENT and not (what == "data" and has_all):
            yield Condition(
                Reason.POOL_NEARLY_FULL,
                f"the {what} of {named} are {percent:.0f} % full, and writes fail when they are"
                " full: add a disk to the group (`vgextend`), to which Carver extends the pool"
                " (`lvextend`), or delete volumes and snapshots",
            )
    if pool.mode != "rw":
        yield Condition(
            Reason.POOL_READ_ONLY if pool.mode == "ro" else Reason.POOL_FULL,
            f"{named} takes no more writes ({pool.mode}): make room as for a full one, then"
            f" {errors.UNSTAGE}",
        )
