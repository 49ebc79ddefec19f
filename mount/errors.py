"""Errors of programs, file systems and mounts; each says what to do.

Nothing here knows of gRPC: agent/core/codes.py maps these classes to codes.
"""

from collections.abc import Callable, Sequence


class MountError(Exception):
    """The root of this package's errors."""


class BadPath(MountError):
    """A path that is not one a mount may have, whatever lies there now."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"path {_short(path)} {reason}")


class BadOption(MountError):
    """A mount option or mkfs option that is unknown, contradictory or not allowed here."""

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(f"option {_short(option)} {reason}")


class UnsupportedFileSystem(MountError):
    """A file system that Carver neither makes nor mounts."""

    def __init__(self, fs_type: str, allowed: Sequence[str]) -> None:
        super().__init__(
            f"file system {_short(fs_type)} is not supported; use one of {', '.join(allowed)}"
        )


class TooSmall(MountError):
    """A device with less room than its file system needs. Sizes in bytes."""

    def __init__(self, fs_type: str, size_bytes: int, minimum_bytes: int) -> None:
        super().__init__(
            f"{fs_type} needs {minimum_bytes} bytes, {size_bytes} are too few; "
            "ask for a larger volume or another file system"
        )


class DeviceMissing(MountError):
    """There is no block device at a path where one is expected. Never a proof that it is gone."""

    def __init__(self, device: str, why: str) -> None:
        super().__init__(
            f"no usable block device at {device}: {why}; is the logical volume active, and is /dev "
            "the host's?"
        )


class NoCgroup(MountError):
    """I/O cannot be limited on this node: no cgroup v2 of the pods has an I/O controller."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"cannot limit I/O: {why}; limits need cgroup v2 with its I/O controller, the host's"
            " /sys/fs/cgroup, and the setting pods_cgroup where kubelet's cgroup is not found"
        )


class NotVacant(MountError):
    """A block device that is in use or holds something, so it does not become a group's disk."""

    def __init__(self, device: str, found: str, remedy: str) -> None:
        super().__init__(f"{device} {found}; it is left untouched: {remedy}")


class ProbeFailed(MountError):
    """It is not known what a device holds, so nothing may be written to it."""

    def __init__(self, device: str, why: str) -> None:
        super().__init__(
            f"cannot find out what {device} holds: {why}; look with `blkid --probe {device}` "
            f"and `wipefs --no-act {device}`, and at the kernel log"
        )


class UnexpectedContents(MountError):
    """A device holds something other than the file system that was asked for."""

    def __init__(self, device: str, found: str, wanted: str) -> None:
        super().__init__(
            f"cannot use {device}: it holds {found}, not {wanted}; it is left untouched: ask for"
            " what it holds, or use another volume"
        )


class MadeByOthers(MountError):
    """A device holds the requested file system, but nothing proves that Carver made it there."""

    def __init__(self, device: str, found: str, uuid: str, tag: str) -> None:
        super().__init__(
            f"cannot use {device}: it holds {found} with the UUID {uuid}, which was not made for"
            " this volume: lvm2 was killed before it wiped older data, or it was made by hand."
            f" It is left untouched: `lvchange --addtag {tag}` on the volume if it is to be used,"
            " or use another volume"
        )


class FormatFailed(MountError):
    """mkfs ended with an error."""

    def __init__(self, device: str, fs_type: str, stderr: str) -> None:
        super().__init__(
            f"cannot make {fs_type} on {device}: {_first_lines(stderr)}; see `journalctl -k`"
        )


class Damaged(MountError):
    """A file system that needs a person's repair before it can be mounted."""

    def __init__(self, device: str, fs_type: str, why: str, repair: str) -> None:
        super().__init__(
            f"the {fs_type} on {device} is damaged and is not mounted: {_first_lines(why)}; copy"
            f" the device if its data matter, then repair it with `{repair} {device}`"
        )


class CheckFailed(MountError):
    """A file system could not be checked, so it is not mounted."""

    def __init__(self, device: str, fs_type: str, why: str) -> None:
        super().__init__(
            f"cannot check the {fs_type} on {device}: {_first_lines(why)}; see `journalctl -k`"
        )


class MountFailed(MountError):
    """The kernel refused a mount."""

    def __init__(self, source: str, path: str, why: str) -> None:
        super().__init__(
            f"cannot mount {source} at {path}: {why}; the kernel log (journalctl -k) may say more"
        )


class UnmountFailed(MountError):
    """The kernel refused to unmount, or something is still mounted afterwards."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"cannot unmount {path}: {why}")


class Busy(MountError):
    """A mount or device is in use."""

    def __init__(self, path: str, users: Sequence[str] = ()) -> None:
        shown = [*users[:8], "and others"][: len(users)]
        by = f" by {', '.join(shown)}" if shown else ""
        super().__init__(f"{path} is in use{by}; try again when its last user has ended")


class ForeignMount(MountError):
    """Something that is not ours is mounted at a path."""

    def __init__(self, path: str, found: str) -> None:
        super().__init__(
            f"{found} is mounted at {path}, and it is not this volume; it is neither hidden nor "
            f"unmounted: look with `findmnt {path}`"
        )


class MountConflict(MountError):
    """The volume is mounted at a path already, but otherwise than asked."""

    def __init__(self, path: str, found: str, wanted: str) -> None:
        self.found = found
        super().__init__(f"{path} is already mounted {found}, asked for {wanted}; unmount it first")


class OtherContext(MountError):
    """A file system is mounted with another SELinux context, and has one for all of its mounts."""

    def __init__(self, path: str, found: str, wanted: str) -> None:
        super().__init__(
            f"the file system is mounted at {path} with {_context(found)}, asked for"
            f" {_context(wanted)}; it has one for all of its mounts: unpublish and unstage it"
            " everywhere first"
        )


class NotMounted(MountError):
    """Nothing is mounted at a path where something is expected."""

    def __init__(self, path: str) -> None:
        super().__init__(f"nothing is mounted at {path}; stage or publish the volume first")


class TargetError(MountError):
    """The place for a mount could not be made, used or removed."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}")


class PathChanged(TargetError):
    """A symbolic link took the place of a directory on the way while the call was at work."""

    def __init__(self, path: str) -> None:
        super().__init__(
            path, "a symbolic link is on the way that was not there before; nothing was done"
        )


class NotADirectory(TargetError):
    """Something other than a directory lies where a directory is wanted."""

    def __init__(self, path: str) -> None:
        super().__init__(path, "exists and is not a directory; it is not Carver's: move it away")


class NotAFile(TargetError):
    """Something other than a plain file or device lies where a file is wanted."""

    def __init__(self, path: str) -> None:
        super().__init__(path, "exists and is not a file; it is not Carver's: move it away")


class TargetInUse(TargetError):
    """A target that holds data or is still mounted, so it is not removed."""


class RenewFailed(MountError):
    """A copied file system did not get an identity of its own."""

    def __init__(self, device: str, why: str) -> None:
        super().__init__(f"the file system on {device} keeps the id of its origin: {why}")


class GrowFailed(MountError):
    """A file system could not be grown to its device's size."""

    def __init__(self, path: str, fs_type: str, why: str) -> None:
        super().__init__(
            f"cannot grow {fs_type} at {path}: {why}; the volume itself may be larger already, and "
            "calling again is safe"
        )


class LoopFailed(MountError):
    """A loop device could not be attached, grown or detached."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"loop device for {path}: {why}; look with `losetup --list`")


def _context(context: str) -> str:
    return f"the SELinux context {context}" if context else "no SELinux context"


def _short(text: str) -> str:
    """Quoted and bounded: what a caller sent may be long or unprintable."""
    return ascii(text if len(text) <= 200 else text[:200] + "…")


def _first_lines(text: str) -> str:
    """The first three lines: mkfs.xfs prints its whole usage after the reason."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(lines[:3]) or "it said nothing"


class WrongKey(MountError):
    """A key that opens none of the slots of a device's LUKS2 header."""

    def __init__(self, device: str) -> None:
        super().__init__(
            f"the key does not open {device}; give the one that the volume was made with, or that"
            " `carver volume rekey` gave it"
        )


class CryptBusy(MountError):
    """A dm-crypt device that something has open."""

    def __init__(self, name: str, said: str) -> None:
        super().__init__(f"dm-crypt device {name} is in use: {said}")


class CryptFailed(MountError):
    """cryptsetup did not do what it was asked for."""

    def __init__(self, action: str, device: str, said: str) -> None:
        super().__init__(f"cryptsetup {action} of {device} failed: {said}")


class CryptPending(MountError):
    """Other volumes are being opened, and take the memory that there is for it."""

    def __init__(self, device: str) -> None:
        super().__init__(f"{device} is opened when others are: each takes memory; call again")


class CommandError(Exception):
    """A program, lvm2 above all, did not do or report what it should; the root of these errors."""


class ProgramMissing(CommandError):
    """A program is not installed."""

    def __init__(self, program: str) -> None:
        super().__init__(f"{program} is not installed on this node, or not on the PATH")


class OutcomeUnknown(CommandError):
    """It is not known whether a command was carried out: see a fresh report."""


class CommandTimedOut(OutcomeUnknown):
    """The caller's time was over before the command ended."""

    def __init__(self, words: Sequence[str], seconds: float) -> None:
        super().__init__(f"no time left for {' '.join(words[:3])} (ended after {seconds:.1f} s)")


class CommandStuck(CommandTimedOut):
    """A command that did not end at SIGTERM; `ended` says whether it has by now."""

    def __init__(self, words: Sequence[str], seconds: float, ended: Callable[[], bool]) -> None:
        super().__init__(words, seconds)
        self.args = (
            f"{' '.join(words[:2])} got SIGTERM after {seconds:.1f} s, and still runs: see"
            " `dmesg` for a disk that does not answer",
        )
        self.ended = ended


class CommandFailed(CommandError):
    """lvm2 refused or failed, for a reason that has no class of its own."""

    def __init__(self, words: Sequence[str], exit_code: int, stderr: str) -> None:
        super().__init__(
            f"{' '.join(words[:2])} failed with exit code {exit_code}: {_complaints(stderr)}"
        )
        self.exit_code = exit_code
        self.stderr = stderr


class BadReport(CommandError):
    """lvm2 reported something that is not understood."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"lvm2's report is not understood: {problem}")


def _complaints(stderr: str) -> str:
    """lvm2's own words, less its warnings, on one line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if not line.startswith("WARNING:")] or lines
    return "; ".join(errors) or "it said nothing"
