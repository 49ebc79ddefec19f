"""Errors of LVM; the only module that recognizes lvm2's messages."""

import re
from collections.abc import Sequence

from mount.mount_errors import CommandError, CommandFailed, OutcomeUnknown


class SessionLost(OutcomeUnknown):
    """Raised if lvm2's shell ended, or gave an incomplete answer, while it ran a change."""

    def __init__(self, words: Sequence[str], problem: str) -> None:
        super().__init__(
            f"it is not known whether {' '.join(words[:2])} was done: of lvm2's shell, {problem};"
            " call again, and what is there is looked at first"
        )


class StillRunning(CommandError):
    """Raised for a change while an earlier command, which got SIGTERM, has not ended yet."""

    def __init__(self, subcommand: str, seconds: float) -> None:
        super().__init__(
            f"{subcommand} got SIGTERM {seconds:.0f} s ago and still runs; until it has"
            " ended nothing else is changed: see `dmesg` for a disk that does not answer"
        )


class NoSpace(CommandFailed):
    """The volume group has too few free extents, or lvm2 cannot allocate for another reason.

    Errors for other reasons derive from this class: callers that grow a volume catch all of them,
    and report the sentence of the error.
    """


class NoDiskServes(NoSpace):
    """No disk of the volume group may be used for an allocation; lvm2 was not run."""

    def __init__(self, group: str) -> None:
        CommandError.__init__(
            self,
            f"no disk of volume group {group} may be used for that: see `pvs -o +pv_allocatable,"
            "pv_tags` for disks that are closed or kept for caches, and `vgs -o +vg_tags` for free"
            " extents that are overwritten first",
        )
        self.exit_code, self.stderr = 5, ""


class PoolKeptFree(NoSpace):
    """A thin pool gets no new volume, as it is fuller than a threshold in lvm.conf(5)."""

    explained = (
        "the thin pool is fuller than lvm.conf's activation/thin_pool_autoextend_threshold: make"
        " room in the group, so that Carver extends the pool, or set the threshold to 100"
    )


class GroupLimited(NoSpace):
    """The volume group has reached its limit of logical or physical volumes."""

    explained = (
        "the volume group has a limit of its own (`vgs -o +max_lv,max_pv`): lift it by `vgchange"
        " --logicalvolume 0` or `vgchange --maxphysicalvolumes 0`"
    )


class VolumeTooLarge(NoSpace):
    """The volume would have more extents than lvm2's 32-bit count allows."""


class GroupProtected(CommandFailed):
    """The volume group is read-only, exported or another node's, or lvm2 itself is read-only."""

    explained = (
        "lvm2 changes nothing in the volume group: see its permission, exported and system id by"
        " `vgs -o +vg_permissions,vg_exported,vg_systemid`, and global/metadata_read_only in"
        " lvm.conf(5)"
    )


class UnknownContents(CommandFailed):
    """The volume group has a volume of a kind that is unknown to this node's lvm2."""

    explained = (
        "the volume group has volumes of a kind that this node's lvm2 does not know, and it is not"
        " changed: install a newer lvm2"
    )


class DuplicateDisks(CommandFailed):
    """Two disks have the same UUID, such as a disk and its copy; lvm2 changes no such group."""

    explained = (
        "two disks are copies of each other (`pvs --all`): detach the copy, or give it a UUID of"
        " its own (`vgimportclone`)"
    )


class BeingMoved(CommandFailed):
    """lvm2 refuses to change a volume while pvmove(8) moves its extents."""

    explained = (
        "the volume is being moved to another disk (`lvs --all`, pvmove(8)): call again then"
    )


class PoolDamaged(CommandFailed):
    """A thin pool's metadata fail thin_check(8), or have another transaction than LVM records."""

    explained = (
        "the thin pool's metadata are damaged: see `A thin pool's metadata are damaged` in"
        " docs/operations.md"
    )


class LockTaken(CommandFailed):
    """Another lvm2 has the volume group's lock, or lvm2 cannot make the lock's file."""

    explained = (
        "lvm2 cannot lock the volume group: see what else runs lvm2, and whether /run/lock/lvm can"
        " be written to"
    )


class NotArchived(CommandFailed):
    """lvm2 cannot archive the volume group's metadata in /etc/lvm, and so refuses the change."""

    explained = (
        "lvm2 cannot keep a copy of the metadata in /etc/lvm/archive: make room there, or make it"
        " writable, or set backup/archive to 0 in lvm.conf(5)"
    )


class SemaphoresUsedUp(CommandFailed):
    """The kernel has no semaphore left; lvm2 needs one to wait for udev."""

    explained = (
        "the node has no semaphores left: see `dmsetup udevcookies`, and raise the limit in"
        " /proc/sys/kernel/sem"
    )


class MetadataFull(CommandFailed):
    """The volume group's metadata areas have no room for a further volume, snapshot or tag."""


class NameTaken(CommandFailed):
    """A volume or volume group of the requested name exists already."""


class InUse(CommandFailed):
    """A process or another device has the volume open."""


class DisksMissing(CommandFailed):
    """lvm2 refuses a change while a disk of the volume group is missing."""


class KeptInactive(CommandFailed):
    """The node's lvm.conf(5) forbids the activation of the volume."""

    explained = (
        "lvm.conf's activation/volume_list lacks the group: put it there, or have no such list; see"
        " lvm.conf(5)"
    )


class NoDeviceMapper(CommandFailed):
    """lvm2 cannot reach the kernel's device-mapper."""


class GroupMissing(CommandError):
    """No volume group of this name is on the node.

    `absent_disks` are configured devices of the group that are not attached.
    """

    def __init__(self, group: str, absent_disks: Sequence[str] = ()) -> None:
        why = "; if its disks are attached, see `pvs`"
        if absent_disks:
            why = (
                f": {', '.join(absent_disks)}, which the setting `devices` names, is not"
                " there; attach it, or if it has another name since a reboot (`lsblk`), name it by"
                " its link in /dev/disk/by-id"
            )
        super().__init__(f"volume group {group} is not on this node{why}")


class VolumeMissing(CommandError):
    """The volume group has no volume of this name, by a successful report."""

    def __init__(self, group: str, name: str) -> None:
        super().__init__(f"there is no logical volume {name} in volume group {group}")


class Inactive(CommandError):
    """The kernel has no device of a volume that must be active, as after an activation."""

    def __init__(self, group: str, name: str) -> None:
        super().__init__(
            f"logical volume {group}/{name} was activated but has no device; see `dmesg`, and"
            " activation/volume_list in lvm.conf(5)"
        )


# Table of lvm2 2.03's messages in the C locale, and the errors that they mean. (lvm2's exit code is
# 5 for nearly every error.) The first match counts, so a derived error precedes its base.
_MESSAGES: tuple[tuple[re.Pattern[str], type[CommandFailed]], ...] = (
    # Errors derived from NoSpace.
    (re.compile(r"reached threshold|is above threshold"), PoolKeptFree),
    (re.compile(r"Maximum number of (logical|physical) volumes|holds max \d+"), GroupLimited),
    (re.compile(r"Volume too large|exceeds 32 bits|exceeds limit \("), VolumeTooLarge),
    (
        re.compile(
            r"insufficient (free|suitable|number of devices)|No specified PVs have space"
            r"|Not enough (PVs with free space|space (for thin pool|available for metadata area))"
            r"|stripes \(\d+\) must not exceed number of physical volumes",
            re.I,
        ),
        NoSpace,
    ),
    (re.compile(r"exceeds maximum metadata size|too large for circular buffer"), MetadataFull),
    (re.compile(r"already exists", re.I), NameTaken),
    (
        re.compile(
            r"filesystem in use|used by another device| in use([.:]| by )|resource busy", re.I
        ),
        InUse,
    ),
    (re.compile(r"while PVs are missing|of partial LV", re.I), DisksMissing),
    (re.compile(r"\blocked (LV|logical volume|devices)\b", re.I), BeingMoved),
    (
        re.compile(
            r"Volume group \S+ is (read-only|exported)|metadata_read_only|--readonly is set"
            r"|with system ID|foreign VG",
            re.I,
        ),
        GroupProtected,
    ),
    (re.compile(r"unknown segments in it|unrecognised segment"), UnknownContents),
    (re.compile(r"duplicate PV", re.I), DuplicateDisks),
    (re.compile(r"Manual repair required|transaction_id is \d+"), PoolDamaged),
    (re.compile(r"Can't get lock for|Cannot open lockfile"), LockTaken),
    (re.compile(r"Cannot archive volume group metadata"), NotArchived),
    (re.compile(r"number of semaphores reached"), SemaphoresUsedUp),
    (re.compile(r"volume_list activation filter"), KeptInactive),
    (re.compile(r"device-mapper driver|/dev/mapper/control", re.I), NoDeviceMapper),
)


# Messages of lvm2 and libdevmapper where malloc(3) fails, and the text of ENOMEM.
_NO_MEMORY = re.compile(
    r"out of memory|cannot allocate memory|alloc(ation)? failed"
    r"|(could not|couldn't|failed to|unable to) allocate\b|failed to create bcache",
    re.I,
)


def lacks_memory(stderr: str) -> bool:
    """Whether a failed lvm2 command printed that it lacked memory."""
    return _NO_MEMORY.search(stderr) is not None


def is_explained(stderr: str) -> bool:
    """Whether a failed lvm2 command printed a reason that has an error class of its own."""
    return _error_class(stderr) is not CommandFailed


def classify(words: Sequence[str], exit_code: int, stderr: str) -> CommandFailed:
    """The error for a failed lvm2 command, by what the command printed.

    If the error's class has an explanation (`explained`), that precedes lvm2's own words.
    """
    kind = _error_class(stderr)
    error = kind(words, exit_code, stderr)
    if explained := getattr(kind, "explained", ""):
        error.args = (f"{explained} ({error})",)
    return error


def _error_class(stderr: str) -> type[CommandFailed]:
    """The error class of the first of _MESSAGES in a command's output; else CommandFailed."""
    return next((error for pattern, error in _MESSAGES if pattern.search(stderr)), CommandFailed)
