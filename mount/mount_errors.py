"""Errors of programs, file systems and mounts; each message says what to do.

agent/core/codes.py maps these classes to gRPC codes.
"""

from collections.abc import Callable, Sequence


class MountError(Exception):
    """Base class of the errors of file systems, devices and mounts."""


class BadPath(MountError):
    """A path at which Carver refuses to mount, because of its form or its location."""

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
    """A device that is too small for a file system of the requested type."""

    def __init__(self, fs_type: str, size_bytes: int, minimum_bytes: int) -> None:
        super().__init__(
            f"{fs_type} needs {minimum_bytes} bytes, {size_bytes} are too few; "
            "ask for a larger volume or another file system"
        )


class DeviceMissing(MountError):
    """A path has no block device, which does not prove that the device was removed."""

    def __init__(self, device: str, reason: str) -> None:
        super().__init__(
            f"no usable block device at {device}: {reason}; is the logical volume active, and is"
            " /dev the host's?"
        )


class NoCgroup(MountError):
    """The node has no cgroup v2 of all pods with an I/O controller, so I/O cannot be limited."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"cannot limit I/O: {reason}; limits need cgroup v2 with its I/O controller, the host's"
            " /sys/fs/cgroup, and the setting pods_cgroup where kubelet's cgroup is not found"
        )


class NotVacant(MountError):
    """A block device cannot become a volume group's disk, as it is in use or not blank."""

    def __init__(self, device: str, finding: str, remedy: str) -> None:
        super().__init__(f"{device} {finding}; it is left untouched: {remedy}")


class ProbeFailed(MountError):
    """The contents of a device are unknown, so nothing may be written to the device."""

    def __init__(self, device: str, reason: str) -> None:
        super().__init__(
            f"cannot find out what {device} holds: {reason}; look with `blkid --probe {device}` "
            f"and `wipefs --no-act {device}`, and at the kernel log"
        )


class UnexpectedContents(MountError):
    """A device has other contents than the requested file system."""

    def __init__(self, device: str, contents: str, expected_contents: str) -> None:
        super().__init__(
            f"cannot use {device}: it holds {contents}, not {expected_contents}; it is left"
            " untouched: ask for what it holds, or use another volume"
        )


class MadeByOthers(MountError):
    """A device has a file system of the requested type that Carver did not provably make."""

    def __init__(self, device: str, contents: str, uuid: str, tag: str) -> None:
        super().__init__(
            f"cannot use {device}: it holds {contents} with the UUID {uuid}, which was not made for"
            " this volume: lvm2 was killed before it wiped older data, or it was made by hand."
            f" It is left untouched: `lvchange --addtag {tag}` on the volume if it is to be used,"
            " or use another volume"
        )


class FormatFailed(MountError):
    """mkfs failed."""

    def __init__(self, device: str, fs_type: str, stderr: str) -> None:
        super().__init__(
            f"cannot make {fs_type} on {device}: {_first_lines(stderr)}; see `journalctl -k`"
        )


class Damaged(MountError):
    """A file system is damaged, and a person must repair it before it can be mounted."""

    def __init__(self, device: str, fs_type: str, reason: str, repair: str) -> None:
        super().__init__(
            f"the {fs_type} on {device} is damaged and is not mounted: {_first_lines(reason)}; copy"
            f" the device if its data matter, then repair it with `{repair} {device}`"
        )


class CheckFailed(MountError):
    """The check of a file system failed, so the file system is not mounted."""

    def __init__(self, device: str, fs_type: str, reason: str) -> None:
        super().__init__(
            f"cannot check the {fs_type} on {device}: {_first_lines(reason)}; see `journalctl -k`"
        )


class MountFailed(MountError):
    """The kernel refused a mount."""

    def __init__(self, source: str, path: str, reason: str) -> None:
        super().__init__(
            f"cannot mount {source} at {path}: {reason}; the kernel log (journalctl -k) may say"
            " more"
        )


class UnmountFailed(MountError):
    """The kernel refused to unmount a path, or another mount appeared at the path."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"cannot unmount {path}: {reason}")


class Busy(MountError):
    """A mount or device is in use."""

    def __init__(self, path: str, users: Sequence[str] = ()) -> None:
        shown_users = [*users[:8], "and others"][: len(users)]
        by_text = f" by {', '.join(shown_users)}" if shown_users else ""
        super().__init__(f"{path} is in use{by_text}; try again when its last user has ended")


class ForeignMount(MountError):
    """Another file system than the volume's is mounted at a path."""

    def __init__(self, path: str, foreign_mount: str) -> None:
        super().__init__(
            f"{foreign_mount} is mounted at {path}, and it is not this volume; it is neither hidden"
            f" nor unmounted: look with `findmnt {path}`"
        )


class MountConflict(MountError):
    """The volume is mounted at a path already, with other options than requested."""

    def __init__(self, path: str, found_options: str, requested_options: str) -> None:
        self.found_options = found_options
        super().__init__(
            f"{path} is already mounted {found_options}, asked for {requested_options};"
            " unmount it first"
        )


class OtherContext(MountError):
    """A file system is mounted with another SELinux context, which all its mounts share."""

    def __init__(self, path: str, found_context: str, requested_context: str) -> None:
        super().__init__(
            f"the file system is mounted at {path} with {_context(found_context)}, asked for"
            f" {_context(requested_context)}; it has one for all of its mounts: unpublish"
            " and unstage it everywhere first"
        )


class NotMounted(MountError):
    """Nothing is mounted at a path where a volume should be."""

    def __init__(self, path: str) -> None:
        super().__init__(f"nothing is mounted at {path}; stage or publish the volume first")


class TargetError(MountError):
    """The directory or file for a mount cannot be made, used or removed."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")


class PathChanged(TargetError):
    """A directory in a resolved path was replaced by a symbolic link during the call."""

    def __init__(self, path: str) -> None:
        super().__init__(
            path, "a symbolic link is on the way that was not there before; nothing was done"
        )


class NotADirectory(TargetError):
    """A target that must be a directory is something else."""

    def __init__(self, path: str) -> None:
        super().__init__(path, "exists and is not a directory; it is not Carver's: move it away")


class NotAFile(TargetError):
    """A target that must be a regular file or device node is something else."""

    def __init__(self, path: str) -> None:
        super().__init__(path, "exists and is not a file; it is not Carver's: move it away")


class TargetInUse(TargetError):
    """A target is not removed, as it has data or is still a mount point."""


class RenewFailed(MountError):
    """A copied file system could not be given a UUID of its own."""

    def __init__(self, device: str, reason: str) -> None:
        super().__init__(f"the file system on {device} keeps the id of its origin: {reason}")


class GrowFailed(MountError):
    """A file system could not be grown to its device's size."""

    def __init__(self, path: str, fs_type: str, reason: str) -> None:
        super().__init__(
            f"cannot grow {fs_type} at {path}: {reason}; the volume itself may be larger already,"
            " and calling again is safe"
        )


class LoopFailed(MountError):
    """A loop device could not be attached, grown or detached."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"loop device for {path}: {reason}; look with `losetup --list`")


def _context(context: str) -> str:
    return f"the SELinux context {context}" if context else "no SELinux context"


def _short(text: str) -> str:
    """Quote and shorten a text from a caller, which may be long or unprintable."""
    return ascii(text if len(text) <= 200 else text[:200] + "…")


def _first_lines(text: str) -> str:
    """The first three lines of an output: mkfs.xfs prints its whole usage after the reason."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(lines[:3]) or "it said nothing"


class WrongKey(MountError):
    """A key opens none of the key slots of a device's LUKS2 header."""

    def __init__(self, device: str) -> None:
        super().__init__(
            f"the key does not open {device}; give the one that the volume was made with, or that"
            " `carver volume rekey` gave it"
        )


class CryptBusy(MountError):
    """A dm-crypt device cannot be closed, as a process or another device has it open."""

    def __init__(self, name: str, stderr: str) -> None:
        super().__init__(f"dm-crypt device {name} is in use: {stderr}")


class CryptFailed(MountError):
    """cryptsetup failed."""

    def __init__(self, action: str, device: str, stderr: str) -> None:
        super().__init__(f"cryptsetup {action} of {device} failed: {stderr}")


class CryptPending(MountError):
    """A volume must wait, as opening other volumes takes all the memory for key derivation."""

    def __init__(self, device: str) -> None:
        super().__init__(f"{device} is opened when others are: each takes memory; call again")


class CommandError(Exception):
    """Base class of the errors of programs, most of them lvm2's."""


class ProgramMissing(CommandError):
    """A program is not installed."""

    def __init__(self, program: str) -> None:
        super().__init__(f"{program} is not installed on this node, or not on the PATH")


class OutcomeUnknown(CommandError):
    """The outcome of a command is unknown, until a fresh report shows it."""


class CommandTimedOut(OutcomeUnknown):
    """The caller's deadline passed before a command ended."""

    def __init__(self, words: Sequence[str], seconds: float) -> None:
        super().__init__(f"no time left for {' '.join(words[:3])} (ended after {seconds:.1f} s)")


class CommandStuck(CommandTimedOut):
    """A command got SIGTERM at the deadline and still runs; `ended()` says whether it has ended."""

    def __init__(self, words: Sequence[str], seconds: float, has_ended: Callable[[], bool]) -> None:
        super().__init__(words, seconds)
        self.args = (
            f"{' '.join(words[:2])} got SIGTERM after {seconds:.1f} s, and still runs: see"
            " `dmesg` for a disk that does not answer",
        )
        self.ended = has_ended


class CommandFailed(CommandError):
    """An lvm2 command failed. Derived classes are for the reasons that are recognized."""

    def __init__(self, words: Sequence[str], exit_code: int, stderr: str) -> None:
        super().__init__(
            f"{' '.join(words[:2])} failed with exit code {exit_code}: {_complaints(stderr)}"
        )
        self.exit_code = exit_code
        self.stderr = stderr


class BadReport(CommandError):
    """The output of lvm2 or a tool for thin pools, or a COW store, cannot be parsed."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"lvm2's report is not understood: {problem}")


def _complaints(stderr: str) -> str:
    """lvm2's messages in one line; without its warnings, unless there are only warnings."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if not line.startswith("WARNING:")] or lines
    return "; ".join(errors) or "it said nothing"
