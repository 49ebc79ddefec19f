"""The control group of all pods: limits and counters of the pods' I/O on each block device.

The kernel limits and counts the I/O of a cgroup together with that of all cgroups below it, for
each block device (Documentation/admin-guide/cgroup-v2.rst, "IO"). Writes through the page cache
count for the cgroup of the writing process if the file system supports cgroup writeback.
"""

import errno
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mount import mount_errors
from mount.table import DeviceNumber

# Directory at which the cgroup v2 hierarchy is mounted.
ROOT = Path("/sys/fs/cgroup")
# Name of kubelet's cgroup of all pods, as kubelet's systemd or cgroupfs driver gives it
# (pkg/kubelet/cm/cgroup_manager_linux.go). Where kubelet runs in a container, as in kind, a
# parent's name precedes it.
_OF_PODS = re.compile(r"(.*-)?kubepods(\.slice)?")
# Depth of the search for the cgroup of all pods, in directories.
_DEPTH = 2
# Word for no limit in io.max.
_NO_LIMIT = "max"
# Pattern of a device's number, which begins a line of io.max and io.stat.
_NUMBER = re.compile(r"\d+:\d+")
# Error numbers of a write to a cgroup's file after the device or cgroup was removed.
_GONE = {errno.ENODEV, errno.ENXIO}


def _kind(in_stat: str, in_max: str) -> Any:
    """Make the dataclass field of a kind of I/O, with the kind's keys in io.stat and io.max."""
    return field(default=0, metadata={"stat": in_stat, "max": in_max})


@dataclass(frozen=True)
class IoCount:
    """The I/O of all pods on a device, since the I/O controller was enabled for the pods.

    Each field is a kind of I/O that the kernel also limits: io.max refuses other keys.
    """

    read_bytes: int = _kind("rbytes", "rbps")
    write_bytes: int = _kind("wbytes", "wbps")
    reads: int = _kind("rios", "riops")
    writes: int = _kind("wios", "wiops")


class IoMax(IoCount):
    """Limits of the pods' I/O on a device, per second; 0 for no limit."""

    def __bool__(self) -> bool:
        return self != UNLIMITED

    def words(self) -> str:
        """The limits in the form of io.max."""
        parts = ((kind.metadata["max"], vars(self)[kind.name]) for kind in fields(self))
        return " ".join(f"{key}={value or _NO_LIMIT}" for key, value in parts)

    @classmethod
    def parse(cls, words: list[str]) -> "IoMax":
        """Parse the limits of a device in io.max; unknown keys are left out."""
        return cls(*_values(words, "max"))


UNLIMITED = IoMax()


class Cgroups:
    """The cgroup of all pods: that of the path `configured`, or else one found by its name.

    `configured` is a path such as /kubepods.slice. Each method raises NoCgroup, with the reason, on
    a node where I/O cannot be limited.
    """

    def __init__(self, configured: str = "", root: Path = ROOT) -> None:
        self._configured, self._root = configured, root
        self._found: Path | None = None
        # The last texts of io.max and io.stat, and their parsed forms.
        self._seen = ("", dict[DeviceNumber, IoMax]())
        self._counted = ("", dict[DeviceNumber, IoCount]())

    def pods_directory(self) -> Path:
        """Find the directory of the pods' cgroup. Raises NoCgroup without an I/O controller.

        Nothing is written.
        """
        cgroup = self._pods()
        if "io" not in _words(self._root / "cgroup.controllers"):
            raise mount_errors.NoCgroup(f"{self._root} has no I/O controller")
        return cgroup

    def prepare(self) -> Path:
        """Enable the I/O controller for the pods' cgroup; returns the cgroup's directory.

        Nothing is written where the controller is enabled already.
        """
        if self._found is not None and (self._found / "io.max").exists():
            return self._found
        cgroup = self.pods_directory()
        ancestors = [
            self._root / ancestor for ancestor in reversed(cgroup.relative_to(self._root).parents)
        ]
        for is_again in (False, True):
            for parent in ancestors:
                # Another process may be enabling the controller: `io` is shown before io.max
                # exists. A second write waits for the other process's write
                # (cgroup_subtree_control_write() in kernel/cgroup/cgroup.c).
                if is_again or "io" not in _words(parent / "cgroup.subtree_control"):
                    _write(parent / "cgroup.subtree_control", "+io")
            if (cgroup / "io.max").exists():
                self._found = cgroup
                return cgroup
        raise mount_errors.NoCgroup("the kernel has no CONFIG_BLK_DEV_THROTTLING")

    def limits(self) -> Mapping[DeviceNumber, IoMax]:
        """The present limits by device; none while the I/O controller is not enabled.

        While no limit changes, each call returns the same object.
        """
        file = (self._found or self._pods()) / "io.max"
        text = _read(file) if file.exists() else ""
        if text != self._seen[0]:
            self._seen = text, {number: IoMax.parse(words) for number, words in _rows(text)}
        return self._seen[1]

    def limit(self, number: DeviceNumber, io_max: IoMax) -> None:
        """Set all limits of a device's I/O; no error for a device that was removed.

        Enables the I/O controller if it is not enabled yet.
        """
        file = self.prepare() / "io.max"
        try:
            _write(file, f"{number[0]}:{number[1]} {io_max.words()}")
        except _Gone:
            if not file.exists():
                raise

    def counts(self) -> Mapping[DeviceNumber, IoCount]:
        """The I/O of all pods by device, since the I/O controller was enabled.

        Enables the I/O controller if it is not enabled yet. While no counter changes, each call
        returns the same object.
        """
        text = _read(self.prepare() / "io.stat")
        if text != self._counted[0]:
            counts = {number: IoCount(*_values(words, "stat")) for number, words in _rows(text)}
            self._counted = text, counts
        return self._counted[1]

    def _pods(self) -> Path:
        if not (self._root / "cgroup.controllers").exists():
            raise mount_errors.NoCgroup(f"{self._root} is no cgroup v2 hierarchy")
        if self._configured:
            cgroup = self._root / self._configured.strip("/")
            if not cgroup.is_dir():
                raise mount_errors.NoCgroup(f"{cgroup} does not exist")
            return cgroup
        candidates = sorted(self._named(self._root, _DEPTH))
        if len(candidates) > 1:
            # A cgroup without processes is stale, such as that of kubelet's other cgroup driver.
            candidates = [
                candidate
                for candidate in candidates
                if "populated 1" in _read(candidate / "cgroup.events")
            ]
        if len(candidates) != 1:
            candidate_paths = ", ".join(map(str, candidates)) or "none"
            raise mount_errors.NoCgroup(
                f"one cgroup of pods is looked for below {self._root}: {candidate_paths}"
            )
        return candidates[0]

    def _named(self, directory: Path, depth: int) -> Iterator[Path]:
        for entry in _inside(directory):
            if not entry.is_dir():
                continue
            if _OF_PODS.fullmatch(entry.name):
                yield entry
            elif depth > 1:
                yield from self._named(entry, depth - 1)


class _Gone(mount_errors.NoCgroup):
    """The device or cgroup of a write was removed meanwhile."""


def _inside(directory: Path) -> list[Path]:
    """The entries of a cgroup's directory; none for a cgroup that was removed meanwhile."""
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []


def _words(path: Path) -> list[str]:
    return _read(path).split()


def _values(words: list[str], file: str) -> Iterator[int]:
    """Yield the value of each kind of I/O in a device's words of `file`, "stat" or "max".

    A value is 0 for a kind that is missing in the words, or has no limit.
    """
    values_by_key = dict(word.split("=", 1) for word in words)
    for kind in fields(IoCount):
        text = values_by_key.get(kind.metadata[file], _NO_LIMIT)
        yield 0 if text == _NO_LIMIT else int(text)


def _rows(text: str) -> Iterator[tuple[DeviceNumber, list[str]]]:
    """Split the text of io.stat or io.max into devices with their words.

    Devices without words are left out. Line ends do not matter: kernels before 5.18 print none
    after a device without counters (blkcg_print_one_stat() in block/blk-cgroup.c).
    """
    number, words = (0, 0), list[str]()
    for word in text.split():
        if not _NUMBER.fullmatch(word):
            words.append(word)
            continue
        if words:
            yield number, words
        major, _, minor = word.partition(":")
        number, words = (int(major), int(minor)), []
    if words:
        yield number, words


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise mount_errors.NoCgroup(f"{path}: {error.strerror}") from None


def _write(path: Path, text: str) -> None:
    """Write a text by a single write(2), as the kernel requires for files of a cgroup."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        kind = _Gone if error.errno in _GONE else mount_errors.NoCgroup
        raise kind(f"cannot write {text!r} to {path}: {error.strerror}") from None
