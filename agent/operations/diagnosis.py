"""Health conditions of volumes: CSI's status, a machine-readable reason, a remedy for people."""

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
from mount.text import counted

# Statuses of CSI's health calls: VolumeHealthErrorType and StorageHealthErrorType.
DEGRADED = "DEGRADED"
INACCESSIBLE = "INACCESSIBLE"
DATA_LOSS = "DATA_LOSS"
STORAGE_DEGRADED = "STORAGE_DEGRADED"
STORAGE_UNREACHABLE = "STORAGE_UNREACHABLE"
# All statuses, from the worst to the least severe; `Reason.rank` is an index into this tuple.
_WORST_FIRST = (DATA_LOSS, STORAGE_UNREACHABLE, INACCESSIBLE, DEGRADED, STORAGE_DEGRADED)

# Maximum number of health conditions of a volume in a pod's status (PodVolumeHealth,
# k8s.io/api/core/v1 of Kubernetes 1.37). With more conditions the API server refuses the whole
# status of the pod, and the pod cannot even be deleted.
_MOST_CONDITIONS = 16
# Maximum length of a health condition's message, in bytes; the API server refuses a longer message
# like a further condition.
_MOST_BYTES = 1024
# Maximum length, in bytes, of the age that is appended to the message of a health condition.
_MOST_BYTES_OF_AGE = 64


class Reason(enum.Enum):
    """Reasons of health conditions: each with its name, and its status for volumes and for storage.

    A status is empty if the reason never concerns a volume, or never the storage of a node.
    `access` is the one kind of use that the reason affects, "block" or "mount", or empty for both.
    A reason has one kind of use only, since Kubernetes distinguishes entries by status and reason
    alone.
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

    def __init__(
        self, word: str, volume_status: str, storage_status: str, access: str = ""
    ) -> None:
        self.word = word
        self.volume_status = volume_status
        self.storage_status = storage_status
        self.access = access
        self.rank = _WORST_FIRST.index(volume_status or storage_status)

    def __str__(self) -> str:
        return self.word


@dataclass(frozen=True)
class Condition:
    """A health condition: its reason, a message with a remedy, and when it was seen.

    `seen_seconds` is Unix time, in seconds, or 0 if the condition was seen just now.
    """

    reason: Reason
    message: str
    seen_seconds: float = 0.0

    @property
    def size_bytes(self) -> int:
        """Maximum number of bytes that the health condition takes in a gRPC message.

        The message of the condition, its age and its reason are included.
        """
        return min(_MOST_BYTES, len(self.message.encode()) + _MOST_BYTES_OF_AGE) + 64

    def text(self, now_seconds: float) -> str:
        """Return the message, with its age if the health condition has one, in at most 1024 bytes.

        The age is given as a time, too, because kubelet keeps the first message as long as status
        and reason stay the same.
        """
        age = ""
        if self.seen_seconds:
            seconds = max(0.0, now_seconds - self.seen_seconds)
            moment = datetime.fromtimestamp(self.seen_seconds, UTC)
            age = f" (seen {seconds:.0f} s ago, at {moment:%Y-%m-%dT%H:%M:%SZ})"
        message, most_bytes = self.message.encode(), _MOST_BYTES - len(age)
        if len(message) <= most_bytes:
            return self.message + age
        # Cut a long message between two characters of its UTF-8.
        shortened = message[: most_bytes - len("…".encode())].decode(errors="ignore")
        return f"{shortened}…{age}"


def distinct(conditions: Iterable[Condition]) -> tuple[Condition, ...]:
    """Merge health conditions of the same reason, as CSI demands, and sort the worst ones first.

    A merged condition has the oldest age of its parts. At most 16 conditions are returned.
    """
    merged: dict[Reason, Condition] = {}
    for condition in conditions:
        if (earlier := merged.setdefault(condition.reason, condition)) is condition:
            continue
        message = earlier.message
        if condition.message not in message.split("; and "):
            message = f"{message}; and {condition.message}"
        ages = [part.seen_seconds for part in (earlier, condition) if part.seen_seconds]
        merged[condition.reason] = Condition(condition.reason, message, min(ages, default=0.0))
    worst_first = sorted(merged.values(), key=lambda condition: condition.reason.rank)
    return tuple(worst_first[:_MOST_CONDITIONS])


def silent_group_conditions(volume_group: VolumeGroup) -> Iterator[Condition]:
    """Yield a health condition if a volume group has not answered for long; usually yield nothing.

    The condition concerns all volumes of the group. Volumes in use may work all the same, on disks
    that answer: for each volume the kernel reports whether its disks answer.
    """
    name, seconds = volume_group.name, volume_group.silent_seconds
    if seconds >= SILENT_SECONDS:
        yield Condition(
            Reason.LVM_NOT_ANSWERING,
            f"lvm2 has not answered about volume group {name} for {seconds:.0f} s: until it does,"
            " nothing in the group is made, changed or deleted; look for a disk that hangs"
            " (`dmesg`)",
        )


def with_time(conditions: Iterable[Condition], seen_seconds: float) -> Iterator[Condition]:
    """Yield health conditions with `seen_seconds` set to this Unix time."""
    return (replace(condition, seen_seconds=seen_seconds) for condition in conditions)


# Fill level of a thin pool's data or metadata, in percent, from which the pool counts as nearly
# full. Carver extends pools long before.
_FULL_PERCENT = 90.0
# Time limit, in seconds, for which one health call waits for answers of the kernel.
PATIENCE_SECONDS = 2.0
# Time without an answer of the kernel, in seconds, after which a device counts as dead. A busy node
# is slow, so a shorter time proves nothing.
_DEAD_SECONDS = 10.0
# Time, in seconds, without an answer of lvm2, after which a volume group counts as silent: longer
# than lvm2 needs on a busy node.
SILENT_SECONDS = 30.0
# Time, in seconds, after which a suspended device counts as left suspended. No change of a volume
# suspends the volume for so long, except a group snapshot, during which the volume does not count
# as suspended.
SETTLING_SECONDS = 1.0

# Remedy for a status in lv_health_status that Carver does not know, or that has no simple remedy.
_LOOK_CLOSER = "look with `lvs -o +lv_health_status` and at `dmesg`"
# Advice about copies of a RAID volume that differ. The kernel does not know which copy of a raid1
# or raid10 is right: a repair overwrites the others with one (md(4)).
_WHICH_COPY = "compare with a backup and find the faulty disk (`dmesg`) first, as"
# Reasons and remedies by lv_health_status, as in lvmreport(7) and lib/report/report.c of lvm2; used
# if device-mapper does not report the problem itself.
_REPORTED = {
    "refresh needed": (Reason.RAID_DEGRADED, "a disk of it was away; run `lvchange --refresh {0}`"),
    "mismatches exist": (
        Reason.RAID_MISMATCHES,
        f"its copies differ; {_WHICH_COPY} `lvchange --syncaction repair {{0}}` takes one for"
        " right",
    ),
    "out_of_data": (
        Reason.POOL_FULL,
        f"add a disk to the group (`{VGEXTEND}`), or see {thin.FULL}",
    ),
    "error": (Reason.WRITE_CACHE_ERRORS, "writes may be lost; look at `dmesg`"),
}
# Reasons and remedies by lv_health_status of a thin volume, where the status is its pool's.
_REPORTED_OF_POOL = {
    "failed": (Reason.POOL_DATA_LOST, _LOOK_CLOSER),
    "metadata_read_only": (Reason.POOL_READ_ONLY, _LOOK_CLOSER),
}
# Reasons and remedies by lv_health_status of a thick volume, where the same statuses are its
# cache's.
_REPORTED_OF_CACHE = dict.fromkeys(_REPORTED_OF_POOL, (Reason.CACHE_FAILING, _LOOK_CLOSER))
# Reasons of health conditions, by the kind of a file system's problem.
_OF_FILE_SYSTEMS = {
    filesystem_health.Kind.READ_ONLY: Reason.FILE_SYSTEM_READ_ONLY,
    filesystem_health.Kind.SILENT: Reason.FILE_SYSTEM_NOT_RESPONDING,
    filesystem_health.Kind.ERRORS: Reason.FILE_SYSTEM_ERRORS,
    filesystem_health.Kind.MEDIUM_ERRORS: Reason.MEDIUM_ERRORS,
}


class KernelConditions(NamedTuple):
    """Health conditions that the kernel reports about a volume.

    `has_status` is True if device-mapper reports on the volume.
    """

    conditions: tuple[Condition, ...] = ()
    has_status: bool = False


class Diagnosis:
    """Finds what is wrong with volumes, by lvm2's report and by the kernel."""

    def __init__(self, kernel: Kernel, kernel_devices: Devices, activator: Activator) -> None:
        self._kernel = kernel
        self._devices = kernel_devices
        self._activator = activator
        self._probes: Probes[KernelConditions] = Probes()
        # Time after which a suspended device counts as left suspended, in seconds; tests change it.
        self.settling_seconds = SETTLING_SECONDS

    def mounts(self) -> table.Table:
        """Return the mount table, which a caller with many volumes reads once."""
        return table.read(self._kernel)

    def of(
        self,
        volume: Volume,
        mounts: table.Table | None = None,
        *,
        seen_seconds: float = 0.0,
        until_seconds: float | None = None,
    ) -> tuple[Condition, ...]:
        """Return the health conditions of a volume in a report, used or not; usually none.

        `seen_seconds` is the Unix time of the report. The method waits for the kernel until
        `until_seconds` (monotonic), or for two seconds by default.
        """
        by_kernel = self._by_kernel(str(volume.id), volume, mounts, until_seconds)
        reported = conditions_by_report(volume, has_status=by_kernel.has_status)
        return distinct([*with_time(reported, seen_seconds), *by_kernel.conditions])

    def conditions_by_kernel(self, volume_id: str) -> tuple[Condition, ...]:
        """Return the health conditions that the kernel reports of a volume.

        The method is for a volume that no report has yet, or whose report is of no use.
        """
        return distinct(self._by_kernel(volume_id, None, None, None).conditions)

    def of_pool(
        self, group: report.Group, name: str, until_seconds: float
    ) -> tuple[Condition, ...]:
        """Return the health conditions that device-mapper reports about a thin pool itself."""
        pool_path = f"{group.name}/{name}"
        description = f"thin pool {pool_path}"

        def probe() -> KernelConditions:
            status = thin.status_of(self._activator.status(group.name, name))
            if status is None:
                return KernelConditions()
            return KernelConditions(
                tuple(_of_pool(status, description, has_all=has_all(group, name)))
            )

        return self._waited(
            f"pool {pool_path}", pool_path, description, probe, until_seconds
        ).conditions

    def _by_kernel(
        self,
        volume_id: str,
        volume: Volume | None,
        mounts: table.Table | None,
        until_seconds: float | None,
    ) -> KernelConditions:
        logical = backing.of_id(volume_id) if volume is None else volume.backing

        def probe() -> KernelConditions:
            return self._kernel_conditions(logical, volume, mounts or self.mounts())

        if until_seconds is None:
            until_seconds = time.monotonic() + PATIENCE_SECONDS
        # Group the probes of volumes by thin pool, or else by volume group: if one probe of a pool
        # or volume group hangs, all its other probes hang, too.
        pool = _pool_of(volume)
        pool_or_group = f"{logical.group}/{pool}" if pool else logical.group
        description = f"logical volume {logical.name}"
        return self._waited(volume_id, pool_or_group, description, probe, until_seconds)

    def _waited(
        self,
        probe_key: str,
        pool_or_group: str,
        description: str,
        probe: Callable[[], KernelConditions],
        until_seconds: float,
    ) -> KernelConditions:
        result = self._probes.probe(probe_key, probe, until_seconds, pool_or_group)
        reported = result.value or KernelConditions()
        if result.hanging_seconds < _DEAD_SECONDS:
            return reported
        silent = Condition(
            Reason.DEVICE_NOT_RESPONDING,
            f"the kernel has not answered about {description} for {result.hanging_seconds:.0f} s: a"
            " disk under it may hang; look at `dmesg`",
        )
        return KernelConditions((*reported.conditions, silent), reported.has_status)

    def _kernel_conditions(
        self, logical: Backing, volume: Volume | None, mounts: table.Table
    ) -> KernelConditions:
        status = self._activator.status_of(logical)
        # Assume, without a report, that the thin pool has room for all its volumes: only a report
        # says how large the volumes are.
        has_room = volume is None or has_all(volume.group, _pool_of(volume))
        conditions = [*conditions_by_device_mapper(logical.name, status, has_room)]
        device = self._activator.device(logical)
        if device is not None:
            conditions += self._of_device(logical, device, mounts)
            if volume is not None and self._is_left_open(volume, device, mounts):
                conditions.append(
                    Condition(
                        Reason.ENCRYPTION_LEFT_OPEN,
                        f"encrypted volume {volume.name} is open ({device.path}), and not mounted:"
                        " it is closed when it is staged, unstaged or deleted",
                    )
                )
        for snapshot in records.snapshots_of(volume) if volume is not None else ():
            if not snapshot.problem and self._activator.has_overflowed(snapshot):
                conditions.append(overflowed(snapshot))
        return KernelConditions(tuple(conditions), bool(status))

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
        whole_mount = next((mount for mount in mounted if mount.root == "/"), None)
        if whole_mount is not None:
            for problem in filesystem_health.problems(self._kernel, mounts, whole_mount):
                yield Condition(_OF_FILE_SYSTEMS[problem.kind], problem.message)

    def _is_left_open(self, volume: Volume, device: Device, mounts: table.Table) -> bool:
        """Whether an encrypted volume with a file system is open without being in use.

        Such a volume is neither mounted nor opened by mkfs. The result is False for a raw block
        volume, which is open while it is staged, used or not.
        """
        if device.below is None or volume.own_tags.get(tag.ACCESS) == BLOCK:
            return False
        return not (mounts.of_device(device.number) or self._devices.is_mapping_open(device))

    def _is_left_suspended(self, group: str, name: str) -> bool:
        """Whether a volume is suspended for longer than any change of the volume takes.

        Waits for a second if the volume is suspended. Volumes that Carver itself keeps suspended,
        for a group snapshot, do not count.
        """
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


def conditions_by_report(volume: Volume, *, has_status: bool = False) -> Iterator[Condition]:
    """Yield the health conditions of a volume and its snapshots that lvm2's report shows.

    With `has_status`, device-mapper reports on the volume, and the health status that lvm2 has from
    device-mapper is left out: the kernel is the first to see that a problem is over, and the
    metadata does not record such a status.
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
    """Return why a volume or its file system is smaller than requested; empty if it is not."""
    no_room = f"volume group {volume.group.name}, or its pool, had no room for that, or"
    make_room = f"make room (`{VGEXTEND}`), and scale its workload to 0 until it is unstaged"
    if volume.refused_bytes > volume.size_bytes:
        return (
            f"is smaller than the {volume.refused_bytes} bytes that its claim asks for: {no_room}"
            f" lvm2 refused it. To expand it, {make_room}; or ask for less (lower the claim's"
            " request)"
        )
    if volume.wanted_bytes and not volume.copy_on_write_snapshots:
        # Report a volume without snapshots that is to grow: its snapshots were deleted since, or an
        # earlier version of Carver had no room for the growth.
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
    """Return the health condition of a volume whose copy-on-write snapshot has overflowed.

    CSI reports no health of snapshots, so the volume reports the lost snapshot.
    """
    why = snapshot.problem or "its area for what the volume overwrites was full"
    return Condition(
        Reason.SNAPSHOT_OVERFLOWED,
        f"snapshot {snapshot.id} of it is of no use: {why}. The volume itself is whole",
    )


def _of_missing(volume: Volume, partial: str) -> Condition:
    holder, reason = volume.allocated_volume, Reason.DISK_MISSING
    if raid.level(holder.layout) is not None:
        reason = Reason.RAID_DEGRADED if volume.group.survives(holder) else Reason.RAID_FAILED
    missing_disks = [
        disk for disk in volume.group.disks if disk.missing and disk.uuid in holder.disks
    ]
    disks = (
        f"the disk {', '.join(disk.uuid for disk in missing_disks)}"
        if missing_disks
        else "a disk of it"
    )
    remedy = "restore the volume from a backup"
    if raid.level(volume.group.volume(volume.name).layout) is not None:
        remedy = f"replace it: `{VGEXTEND}`, then `carver volume repair`"
    elif (
        caches.CACHE in holder.layout and missing_disks and all(disk.fast for disk in missing_disks)
    ):
        # Let the operator find out the mode of the cache: the mode may have been changed by hand
        # since the cache was created, and the report does not have it.
        remedy = "see `A fast disk is lost` in docs/operations.md: no data are lost if its cache is"
        remedy += f" {caches.WRITETHROUGH}"
    why = f"{disks} is missing; attach it again (`pvs`), or {remedy}"
    return Condition(reason, f"{partial}: {why}")


def has_all(group: report.Group, pool: str) -> bool:
    """Whether a thin pool's data are as large as all its volumes together.

    Such a pool may be full without a problem, since it never needs more room.
    """
    pool_usage = thin.find(group, pool, 0)
    return pool_usage.promised_bytes <= pool_usage.data_extents * group.extent_size_bytes


def conditions_by_device_mapper(
    name: str, statuses: Sequence[Status], has_all: bool = False
) -> Iterator[Condition]:
    """Yield the health conditions that device-mapper reports about an active volume.

    `statuses` has the status of the volume's device and of the devices below it. `has_all` says
    that the data of the volume's thin pool are as large as all volumes of the pool together.
    """
    cached, owner = name, f"logical volume {name}"
    if any(isinstance(status, ThinPool) for status in statuses):
        cached, owner = "GROUP/POOL_tdata", f"the thin pool under {owner}"
    for status in statuses:
        match status:
            case Raid():
                yield from _of_raid(name, status)
            case ThinPool():
                yield from _of_pool(status, "the thin pool under the volume", has_all=has_all)
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


def _of_raid(name: str, status: Raid) -> Iterator[Condition]:
    if lost_count := sum(status.failed):
        yield Condition(
            Reason.RAID_DEGRADED if status.survives else Reason.RAID_FAILED,
            f"logical volume {name} is degraded: {lost_count} of the {len(status.health)} images of"
            f" its {status.kind} failed; attach the disk again and run `lvchange --refresh"
            f" {name}`, or replace it: `{VGEXTEND}`, then `carver volume repair`",
        )
    elif status.is_syncing:
        yield Condition(
            Reason.RAID_RESYNCING,
            f"logical volume {name} is resyncing ({status.action},"
            f" {status.synced_percent:.0f} % done):"
            " until it is in sync the loss of a disk may lose data; nothing is to be done but wait",
        )
    if status.mismatches:
        yield Condition(
            Reason.RAID_MISMATCHES,
            f"the copies of logical volume {name} differ in {counted(status.mismatches, 'sector')};"
            f" {_WHICH_COPY} `lvchange --syncaction repair {name}` takes one for right",
        )


def _of_pool(pool: ThinPool, description: str, *, has_all: bool) -> Iterator[Condition]:
    if pool.mode == FAILED or pool.needs_check:
        yield Condition(
            Reason.POOL_DATA_LOST,
            f"{description} failed ({pool.mode}): look at `dmesg`, and {thin.DAMAGED}",
        )
        return
    for part, percent in (("data", pool.data_percent), ("metadata", pool.metadata_percent)):
        if percent >= _FULL_PERCENT and not (part == "data" and has_all):
            yield Condition(
                Reason.POOL_NEARLY_FULL,
                f"the {part} of {description} are {percent:.0f} % full, and writes fail when they"
                f" are full: add a disk to the group (`{VGEXTEND}`), to which Carver extends the"
                f" pool (`lvextend`), or see {thin.FULL}",
            )
    if pool.mode != "rw":
        yield Condition(
            Reason.POOL_READ_ONLY if pool.mode == "ro" else Reason.POOL_FULL,
            f"{description} takes no more writes ({pool.mode}): make room as for a full one, then"
            f" {errors.UNSTAGE}",
        )
