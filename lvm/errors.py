"""Errors of LVM; the one file that knows lvm2's messages."""

import re
from collections.abc import Sequence

from mount.errors import CommandError, CommandFailed, OutcomeUnknown


class SessionLost(OutcomeUnknown):
    """lvm2's shell ended before it answered a command, or gave no whole answer."""

    def __init__(self, words: Sequence[str], problem: str) -> None:
        super().__init__(
            f"it is not known whether {' '.join(words[:2])} was done: of lvm2's shell, {problem};"
            " call again, and what is there is looked at first"
        )


class StillRunning(CommandError):
    """A change is refused while an earlier command has not ended at SIGTERM."""

    def __init__(self, subcommand: str, seconds: float) -> None:
        super().__init__(
            f"{subcommand} got SIGTERM {seconds:.0f} s ago and still runs; until it has"
            " ended nothing else is changed: see `dmesg` for a disk that does not answer"
        )


class NoSpace(CommandFailed):
    """The group has too few free extents.

    A kind of this derives from it: growth catches it, and says its sentence.
    """


class MetadataFull(CommandFailed):
    """The group's metadata area has no room for one volume, snapshot or tag more."""


class NameTaken(CommandFailed):
    """A volume or group of that name exists."""


class InUse(CommandFailed):
    """Something has the volume open."""


class DisksMissing(CommandFailed):
    """A disk of the group is missing, and lvm2 refuses such a change until it is back."""


class KeptInactive(CommandFailed):
    """The node's lvm.conf keeps the volume from being active, so that nothing can be done to it."""

    def __init__(self, words: Sequence[str], exit_code: int, stderr: str) -> None:
        super().__init__(words, exit_code, stderr)
        self.args = (
            f"lvm.conf's activation/volume_list lacks the group ({self}): put it there, or have no"
            " such list; see lvm.conf(5)",
        )


class NoDeviceMapper(CommandFailed):
    """The kernel's device-mapper does not answer."""


class GroupMissing(CommandError):
    """No group of that name is on this node."""

    def __init__(self, group: str) -> None:
        super().__init__(
            f"volume group {group} is not on this node; if its disks are attached, see `pvs`"
        )


class VolumeMissing(CommandError):
    """A successful report of the group does not have the volume."""

    def __init__(self, group: str, name: str) -> None:
        super().__init__(f"there is no logical volume {name} in volume group {group}")


class Inactive(CommandError):
    """A volume was activated, yet the kernel does not have its device."""

    def __init__(self, group: str, name: str) -> None:
        super().__init__(
            f"logical volume {group}/{name} was activated but has no device; see `dmesg`, and"
            " activation/volume_list in lvm.conf(5)"
        )


# What lvm2 2.03 prints in the C locale. Its exit code is 5 for nearly everything. The first that
# matches counts, so a kind of an error stands before its base.
_MESSAGES: tuple[tuple[re.Pattern[str], type[CommandFailed]], ...] = (
    (
        re.compile(
            r"insufficient (free|suitable)|No specified PVs have space"
            r"|stripes \(\d+\) must not exceed number of physical volumes",
            re.I,
        ),
        NoSpace,
    ),
    (re.compile(r"exceeds maximum metadata size|too large for circular buffer"), MetadataFull),
    (re.compile(r"already exists", re.I), NameTaken),
    (re.compile(r"filesystem in use|used by another device| in use[.:]", re.I), InUse),
    (re.compile(r"while PVs are missing", re.I), DisksMissing),
    (re.compile(r"volume_list activation filter"), KeptInactive),
    (re.compile(r"device-mapper driver|/dev/mapper/control", re.I), NoDeviceMapper),
)


# What lvm2 and libdevmapper print where malloc(3) fails, and what ENOMEM is called.
_NO_MEMORY = re.compile(
    r"out of memory|cannot allocate memory|alloc(ation)? failed"
    r"|(could not|couldn't|failed to|unable to) allocate\b|failed to create bcache",
    re.I,
)


def lacks_memory(stderr: str) -> bool:
    """Whether a failed lvm2 command complained of too little memory."""
    return _NO_MEMORY.search(stderr) is not None


def is_explained(stderr: str) -> bool:
    """Whether a failed lvm2 command said why, in words that are known."""
    return _meant(stderr) is not CommandFailed


def classify(words: Sequence[str], exit_code: int, stderr: str) -> CommandFailed:
    """The error that says what a failed lvm2 command meant."""
    return _meant(stderr)(words, exit_code, stderr)


def _meant(stderr: str) -> type[CommandFailed]:
    """The first that its words are known for."""
    return next((error for pattern, error in _MESSAGES if pattern.search(stderr)), CommandFailed)
