"""The words in which Carver says what is wrong, and each finding that uses one of them.

docs/health.md has the same words, with cause and remedy; a test compares the two. A reason is for
programs, and once released it is neither renamed nor given another meaning.
"""

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime

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
