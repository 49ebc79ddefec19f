"""What is wrong with a volume: CSI's statuses, a reason for programs, and what to do."""

import enum
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import NamedTuple

from agent.core import errors, tag
from agent.groups.volume_group import VolumeGroup
from agent.requests.requests import BLOCK
from agent.volumes import backing, records
from agent.volumes.activator import Activator
from agent.volumes.backing import Backing
from agent.volumes.records import Volume
from agent.work.background import Probes
from lvm import caches, raid, report, thin
from lvm.active_devices import Device, Devices
from lvm.devicemapper import FAILED, Cache, Raid, Snapshot, Status, ThinPool, WriteCache
from lvm.groups import VGEXTEND
from mount import filesystem_health, table
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
    """The table of what can be wrong: the word, and its status for a volume and for the storage.

    A status is empty if the reason is never one of a volume's, or of the storage's. `access` is
    the one kind of use that is affected, "block" or "mount", empty for both: one for each reason,
    since Kubernetes distinguishes entries by status and reason only.
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
    LVM_NOT_ANSWERING = "LvmNotAnswering", DEGRADED, STORAGE_UNREACHABLE

    def __init__(self, word: str, of_volume: str, of_storage: str, access: str = "") -> None:
        self.word = word
        self.of_volume = of_volume
        self.of_storage = of_storage
        self.access = access
        self.rank = _WORST_FIRST.index(of_volume or of_storage)

    def __str__(self) -> str:
        return self.word


@dataclass(frozen=True)
class Condition:
    """A reason, what is wrong and what to do; `seen_seconds` (epoch) is 0 for just now."""

    reason: Reason
    message: str
    seen_seconds: float = 0.0

    @property
    def size_bytes(self) -> int:
        """The most that it takes in a gRPC message, with its age and its words."""
        return min(_MOST_BYTES, len(self.message.encode()) + _MOST_BYTES_OF_AGE) + 64

    def text(self, now_seconds: float) -> str:
        """The sentence, with its age if it has one.

        Kubelet keeps the first message as long as status and reason are the same, so the age is
        given as a time, too.
        """
        age = ""
        if self.seen_seconds:
            seconds = max(0.0, now_seconds - self.seen_seconds)
            moment = datetime.fromtimestamp(self.seen_seconds, UTC)
            age = f" (seen {seconds:.0f} s ago, at {moment:%Y-%m-%dT%H:%M:%SZ})"
        message, most_bytes = self.message.encode(), _MOST_BYTES - len(age)
        if len(message) <= most_bytes:
            return self.message + age
        # Cut between two characters.
        cut = message[: most_bytes - len("…".encode())].decode(errors="ignore")
        return f"{cut}…{age}"


def distinct(found: Iterable[Condition]) -> tuple[Condition, ...]:
    """Merge conditions of the same reason, as CSI demands, with the oldest age; the worst first."""
    merged: dict[Reason, Condition] = {}
    for one in found:
        if (same := merged.setdefault(one.reason, one)) is one:
            continue
        message = same.message
        if one.message not in message.split("; and "):
            message = f"{message}; and {one.message}"
        ages = [each.seen_seconds for each in (same, one) if each.seen_seconds]
        merged[one.reason] = Condition(one.reason, message, min(ages, default=0.0))
    worst_first = sorted(merged.values(), key=lambda one: one.reason.rank)
    return tuple(worst_first[:_MOST_CONDITIONS])


def silence(volume_group: VolumeGroup) -> Iterator[Condition]:
    """That a group has not answered for long, which concerns all its volumes; usually nothing.

    Volumes in use may go on, on disks that answer: of each the kernel says whether it does.
    """
    name, seconds = volume_group.name, volume_group.silent_seconds
    if seconds >= SILENT_SECONDS:
        yield Condition(
            Reason.LVM_NOT_ANSWERING,
            f"lvm2 has not answered about volume group {name} for {seconds:.0f} s: until it does,"
            " nothing in the group is made, changed or deleted; look for a disk that hangs"
            " (`dmesg`)",
        )


def aged(found: Iterable[Condition], seen_seconds: float) -> Iterator[Condition]:
    """Set when these conditions were seen (epoch, seconds)."""
    return (replace(one, seen_seconds=seen_seconds) for one in found)


# Carver extends pools long before.
_FULL_PERCENT = 90.0
# How long a call waits for the kernel, and when a device counts as dead: a busy node is slow.
PATIENCE_SECONDS = 2.0
_DEAD_SECONDS = 10.0
# How long a group may be silent: longer than lvm2 needs on a busy node.
SILENT_SECONDS = 30.0
# No change of a volume suspends it for so long, except a group snapshot, which Carver knows.
SETTLING_SECONDS = 1.0

# lv_health_status, by lvmreport(7) and lib/report/report.c of lvm2, where device-mapper does not
# report it itself.
_LOOK_CLOSER = "look with `lvs -o +lv_health_status` and at `dmesg`"
_REPORTED = {
    "refresh needed": (Reason.RAID_DEGRADED, "a disk of it was away; run `lvchange --refresh {0}`"),
    "mismatches exist": (
        Reason.RAID_MISMATCHES,
        "its copies differ; run `lvchange --syncaction repair {0}`",
    ),
    "out_of_data": (
        Reason.POOL_FULL,
        f"add a disk to the group (`{VGEXTEND}`), or move volumes away",
    ),
    "error": (Reason.WRITE_CACHE_ERRORS, "writes may be lost; look at `dmesg`"),
}
# The same words for two things: a thin pool, and a cache.
_REPORTED_OF_POOL = {
    "failed": (Reason.POOL_DATA_LOST, _LOOK_CLOSER),
    "metadata_read_only": (Reason.POOL_READ_ONLY, _LOOK_CLOSER),
}
_REPORTED_OF_CACHE = dict.fromkeys(_REPORTED_OF_POOL, (Reason.CACHE_FAILING, _LOOK_CLOSER))
_OF_FILE_SYSTEMS = {
    filesystem_health.Kind.READ_ONLY: Reason.FILE_SYSTEM_READ_ONLY,
    filesystem_health.Kind.SILENT: Reason.FILE_SYSTEM_NOT_RESPONDING,
    filesystem_health.Kind.ERRORS: Reason.FILE_SYSTEM_ERRORS,
    filesystem_health.Kind.MEDIUM_ERRORS: Reason.MEDIUM_ERRORS,
}


class _Kernels(NamedTuple):
    """What the kernel says; `has_status` if device-mapper reports on the volume."""

    conditions: tuple[Condition, ...] = ()
    has_status: bool = False


class Diagnosis:
    """Finds what is wrong with volumes, by report and by the kernel."""

    def __init__(self, kernel: Kernel, kernel_devices: Devices, activator: Activator) -> None:
        self._kernel = kernel
        self._devices = kernel_devices
        self._activator = activator
        self._looks: Probes[_Kernels] = Probes()
        # For tests.
        self.settling_seconds = SETTLING_SECONDS

    def mounts(self) -> table.Table:
        """The mount table; a caller with many volumes reads it once."""
        return table.read(self._kernel)

    def of(
        self,
        volume: Volume,
        mounts: table.Table | None = None,
        *,
        seen_seconds: float = 0.0,
        until_seconds: float | None = None,
    ) -> tuple[Condition, ...]:
        """What is wrong with a volume of a report, used or not; usually nothing.

        `seen_seconds` (epoch) is when the report was read. It waits for the kernel until
        `until_seconds` (monotonic), or for a moment.
        """
        by_kernel = self._by_kernel(str(volume.id), volume, mounts, until_seconds)
        reported = by_report(volume, has_status=by_kernel.has_status)
        return distinct([*aged(reported, seen_seconds), *by_kernel.conditions])

    def by_kernel(self, volume_id: str) -> tuple[Condition, ...]:
        """What is wrong with a volume that no report has yet, or whose report is of no use."""
        return distinct(self._by_kernel(volume_id, None, None, None).conditions)

    def of_pool(
        self, group: report.Group, name: str, until_seconds: float
    ) -> tuple[Condition, ...]:
        """What device-mapper reports against a thin pool itself."""
        place = f"{group.name}/{name}"
        named = f"thin pool {place}"

        def look() -> _Kernels:
            status = thin.status_of(self._activator.status(group.name, name))
            if status is None:
                return _Kernels()
            return _Kernels(tuple(_of_pool(status, named, has_all=has_all(group, name))))

        return self._waited(f"pool {place}", place, named, look, until_seconds).conditions

    def _by_kernel(
        self,
        volume_id: str,
        volume: Volume | None,
        mounts: table.Table | None,
        until_seconds: float | None,
    ) -> _Kernels:
        logical = backing.of_id(volume_id) if volume is None else volume.backing

        def look() -> _Kernels:
            return self._look(logical, volume, mounts or self.mounts())

        if until_seconds is None:
            until_seconds = time.monotonic() + PATIENCE_SECONDS
        # A volume hangs together with its pool, or with its group.
        pool = _pool_of(volume)
        place = f"{logical.group}/{pool}" if pool else logical.group
        named = f"logical volume {logical.name}"
        return self._waited(volume_id, place, named, look, until_seconds)

    def _waited(
        self, what: str, place: str, named: str, look: Callable[[], _Kernels], until_seconds: float
    ) -> _Kernels:
        seen = self._looks.probe(what, look, until_seconds, place)
        known = seen.value or _Kernels()
        if seen.hanging_seconds < _DEAD_SECONDS:
            return known
        silent = Condition(
            Reason.DEVICE_NOT_RESPONDING,
            f"the kernel has not answered about {named} for {seen.hanging_seconds:.0f} s: a disk"
            " under it may hang; look at `dmesg`",
        )
        return _Kernels((*known.conditions, silent), known.has_status)

    def _look(self, logical: Backing, volume: Volume | None, mounts: table.Table) -> _Kernels:
        status = self._activator.status_of(logical)
        # Only a report has what a pool promised: without one it counts as kept.
        has_room = volume is None or has_all(volume.group, _pool_of(volume))
        found = [*by_device_mapper(logical.name, status, has_room)]
        device = self._activator.device(logical)
        if device is not None:
            found += self._of_device(logical, device, mounts)
            if volume is not None and self._is_left_open(volume, device, mounts):
                found.append(
                    Condition(
                        Reason.ENCRYPTION_LEFT_OPEN,
                        f"encrypted volume {volume.name} is open ({device.path}), and not mounted:"
                        " it is closed when it is staged, unstaged or deleted",
                    )
                )
        for snapshot in records.snapshots_of(volume) if volume is not None else ():
            if not snapshot.problem and self._activator.has_overflowed(snapshot):
                found.append(overflowed(snapshot))
        return _Kernels(tuple(found), bool(status))

    def _of_device(
        self, logical: Backing, device: Device, mounts: table.Table
    ) -> Iterator[Condition]:
        group, name = logical.group, logical.name
        if self._is_left_suspended(group, name):
            yield Condition(
                Reason.DEVICE_SUSPENDED,
                f"logical volume {group}/{name} is suspended, and all I/O on it waits: run"
                f" `dmsetup resume {device.logical.path}` if lvm2 is not at work on it; the next"
                " change of the group by Carver does it, too",
            )
        if self._devices.has_lost_disk(group, name):
            yield Condition(
                Reason.DEVICE_GONE,
                f"logical volume {group}/{name} stands on a disk that went away, and is another"
                f" device if it is back: look at `dmesg`, then {errors.UNSTAGE}; the next staging"
                " activates it anew",
            )
        mounted = mounts.of_device(device.number)
        whole = next((one for one in mounted if one.root == "/"), None)
        if whole is not None:
            for problem in filesystem_health.problems(self._kernel, mounts, whole):
                yield Condition(_OF_FILE_SYSTEMS[problem.kind], problem.message)

    def _is_left_open(self, volume: Volume, device: Device, mounts: table.Table) -> bool:
        """Whether an encrypted volume with a file system is open and not in use, be it by mkfs.

        A raw block volume is open while it is staged, used or not.
        """
        if device.below is None or volume.own_tags.get(tag.ACCESS) == BLOCK:
            return False
        return not (mounts.of_device(device.number) or self._devices.is_mapping_open(device))

    def _is_left_suspended(self, group: str, name: str) -> bool:
        """Whether a volume is suspended for longer than a change of it takes."""
        if not self._is_suspended(group, name):
            return False
        time.sleep(self.settling_seconds)
        return self._is_suspended(group, name)

    def _is_suspended(self, group: str, name: str) -> bool:
        return not self._activator.is_kept_suspended(group, name) and self._devices.is_suspended(
            group, name
        )


def _pool_of(volume: Volume | None) -> str:
    logical = volume.group.volumes.get(volume.name) if volume is not None else None
    return logical.pool if logical is not None else ""


def by_report(volume: Volume, *, has_status: bool = False) -> Iterator[Condition]:
    """What LVM's report says against a volume and its snapshots.

    If device-mapper reports on the volume (`has_status`), what lvm2 has from there is left out:
    the kernel is the first to see that a problem is over, and the metadata has nothing of it.
    """
    name = f"{volume.group.name}/{volume.name}"
    if volume.health == "partial":
        yield _of_missing(volume, f"logical volume {name} is partial")
    elif volume.health and not has_status:
        special = _REPORTED_OF_POOL if volume.is_thin else _REPORTED_OF_CACHE
        unknown = (Reason.LVM_REPORTS, _LOOK_CLOSER)
        reason, remedy = (_REPORTED | special).get(volume.health, unknown)
        yield Condition(reason, f"logical volume {name} is {volume.health}: {remedy.format(name)}")
    if pending := _pending_expansion(volume):
        yield Condition(Reason.EXPANSION_PENDING, f"logical volume {name} {pending}")
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


def _pending_expansion(volume: Volume) -> str:
    """Why a volume, or its file system, is smaller than requested; empty if it is not."""
    no_room = f"volume group {volume.group.name}, or its pool, had no room for that, or"
    make_room = f"make room (`{VGEXTEND}`), and scale its workload to 0 until it is unstaged"
    if volume.refused_bytes > volume.size_bytes:
        return (
            f"is smaller than the {volume.refused_bytes} bytes that its claim asks for: {no_room}"
            f" lvm2 refused it. To expand it, {make_room}; or ask for less (lower the claim's"
            " request)"
        )
    if volume.wanted_bytes and not volume.copy_on_write_snapshots:
        # Its snapshots were deleted since; or an earlier version of Carver had no room for it.
        return (
            f"is smaller than the {volume.wanted_bytes} bytes that it is to grow to: {no_room} it"
            " was in use and had copy-on-write snapshots. It grows when it is staged next, if there"
            f" is room then: {make_room}; or ask for less (lower the claim's request)"
        )
    if volume.wanted_bytes:
        return (
            f"is smaller than the {volume.wanted_bytes} bytes that it is to grow to: in use it does"
            " not grow while it has copy-on-write snapshots. It grows when it is staged next, if"
            f" its group has room then: {errors.UNSTAGE}"
        )
    if volume.refused_bytes:
        mapping = ", or its LUKS mapping for want of a key," if volume.is_encrypted else ""
        return (
            f"grew to {volume.size_bytes} bytes, but its file system{mapping} could not grow: see"
            " `journalctl -k` and Carver's log. It is tried again when it is staged next:"
            f" {errors.UNSTAGE}"
        )
    return ""


def overflowed(snapshot: records.Snapshot) -> Condition:
    """A lost copy-on-write snapshot; its volume reports it, as CSI has no health of snapshots."""
    why = snapshot.problem or "its area for what the volume overwrites was full"
    return Condition(
        Reason.SNAPSHOT_OVERFLOWED,
        f"snapshot {snapshot.id} of it is of no use: {why}. The volume itself is whole",
    )


def _of_missing(volume: Volume, partial: str) -> Condition:
    holder, reason = volume.on_disks, Reason.DISK_MISSING
    if raid.level(holder.layout) is not None:
        reason = Reason.RAID_DEGRADED if volume.group.survives(holder) else Reason.RAID_FAILED
    gone = [one for one in volume.group.disks if one.missing and one.uuid in holder.disks]
    disks = f"the disk {', '.join(one.uuid for one in gone)}" if gone else "a disk of it"
    remedy = "restore the volume from a backup"
    if raid.level(volume.group.volume(volume.name).layout) is not None:
        remedy = f"replace it: `{VGEXTEND}`, then `carver volume repair`"
    elif caches.CACHE in holder.layout and gone and all(one.fast for one in gone):
        # Its mode may have been changed by hand since it was made, and the report has it not.
        remedy = "see `A fast disk is lost` in docs/operations.md: no data are lost if its cache is"
        remedy += f" {caches.WRITETHROUGH}"
    why = f"{disks} is missing; attach it again (`pvs`), or {remedy}"
    return Condition(reason, f"{partial}: {why}")


def has_all(group: report.Group, pool: str) -> bool:
    """Whether a pool has all the room that it promised; then being full is no problem."""
    found = thin.find(group, pool, 0)
    return found.promised_bytes <= found.data_extents * group.extent_size_bytes


def by_device_mapper(
    name: str, found: Sequence[Status], has_all: bool = False
) -> Iterator[Condition]:
    """What device-mapper reports against an active volume and the devices below it.

    `has_all`: its pool has all the room that it promised.
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
                    f" ({state}): its data are lost",
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
    if lost := sum(seen.failed):
        yield Condition(
            Reason.RAID_DEGRADED if seen.survives else Reason.RAID_FAILED,
            f"logical volume {name} is degraded: {lost} of the {len(seen.health)} images of its"
            f" {seen.kind} failed; attach the disk again and run `lvchange --refresh {name}`, or"
            f" replace it: `{VGEXTEND}`, then `carver volume repair`",
        )
    elif seen.is_syncing:
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
            f"{named} failed ({pool.mode}): look at `dmesg`, and {thin.DAMAGED}",
        )
        return
    for what, percent in (("data", pool.data_percent), ("metadata", pool.metadata_percent)):
        if percent >= _FULL_PERCENT and not (what == "data" and has_all):
            yield Condition(
                Reason.POOL_NEARLY_FULL,
                f"the {what} of {named} are {percent:.0f} % full, and writes fail when they are"
                f" full: add a disk to the group (`{VGEXTEND}`), to which Carver extends the pool"
                " (`lvextend`), or move volumes away (`carver volume move`)",
            )
    if pool.mode != "rw":
        yield Condition(
            Reason.POOL_READ_ONLY if pool.mode == "ro" else Reason.POOL_FULL,
            f"{named} takes no more writes ({pool.mode}): make room as for a full one, then"
            f" {errors.UNSTAGE}",
        )
