"""Control groups: where the pods' processes are, and how much I/O they may do on each device.

The kernel counts and limits the I/O of a cgroup and of all below it, for each block device
(Documentation/admin-guide/cgroup-v2.rst, "IO"). What is written through the page cache counts for
the cgroup that wrote it, if its file system knows of cgroups.
"""

import errno
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mount import errors
from mount.table import DeviceNumber

ROOT = Path("/sys/fs/cgroup")
# What kubelet makes for all pods (pkg/kubelet/cm/cgroup_manager_linux.go), by the systemd or the
# cgroupfs driver; below a parent where it runs in a container, as in kind.
_OF_PODS = re.compile(r"(.*-)?kubepods(\.slice)?")
# How deep it is looked for.
_DEPTH = 2
_NO_LIMIT = "max"
_NUMBER = re.compile(r"\d+:\d+")
# What a write fails with whose device, or whose cgroup, has gone.
_GONE = {errno.ENODEV, errno.ENXIO}


def _kind(in_stat: str, in_max: str) -> Any:
    """A kind of I/O: its keys in io.stat and io.max."""
    return field(default=0, metadata={"stat": in_stat, "max": in_max})


@dataclass(frozen=True)
class IoCount:
    """What the pods did on a device since it is there.

    A further kind is a row, if the kernel limits it: it refuses what io.max has not.
    """

    read_bytes: int = _kind("rbytes", "rbps")
    write_bytes: int = _kind("wbytes", "wbps")
    reads: int = _kind("rios", "riops")
    writes: int = _kind("wios", "wiops")


class IoMax(IoCount):
    """How much of the same they may do in a second; 0 for no limit."""

    def __bool__(self) -> bool:
        return self != UNLIMITED

    def words(self) -> str:
        """As the kernel reads it; it writes the same."""
        parts = ((one.metadata["max"], vars(self)[one.name]) for one in fields(self))
        return " ".join(f"{key}={value or _NO_LIMIT}" for key, value in parts)

    @classmethod
    def parse(cls, words: list[str]) -> "IoMax":
        """The inverse of `words`; what this version does not know is left out."""
        return cls(*_values(words, "max"))


UNLIMITED = IoMax()


class Cgroups:
    """The cgroup of all pods: `configured`, a path such as /kubepods.slice, or found by its name.

    Every method raises NoCgroup where I/O cannot be limited here, with what is missing.
    """

    def __init__(self, configured: str = "", root: Path = ROOT) -> None:
        self._configured, self._root = configured, root
        self._found: Path | None = None
        # What io.max and io.stat said at the last look.
        self._seen = ("", dict[DeviceNumber, IoMax]())
        self._counted = ("", dict[DeviceNumber, IoCount]())

    def look(self) -> Path:
        """The cgroup's directory, in which I/O can be controlled; no write."""
        found = self._pods()
        if "io" not in _words(self._root / "cgroup.controllers"):
            raise errors.NoCgroup(f"{self._root} has no I/O controller")
        return found

    def prepare(self) -> Path:
        """The cgroup's directory, with its I/O controlled; no write where it is already."""
        if self._found is not None and (self._found / "io.max").exists():
            return self._found
        found = self.look()
        above = [self._root / one for one in reversed(found.relative_to(self._root).parents)]
        for is_again in (False, True):
            for parent in above:
                # Again, as a write waits for one that others have begun: its `io` shows before its
                # io.max (cgroup_subtree_control_write() in kernel/cgroup/cgroup.c).
                if is_again or "io" not in _words(parent / "cgroup.subtree_control"):
                    _write(parent / "cgroup.subtree_control", "+io")
            if (found / "io.max").exists():
                self._found = found
                return found
        raise errors.NoCgroup("the kernel has no CONFIG_BLK_DEV_THROTTLING")

    def limits(self) -> Mapping[DeviceNumber, IoMax]:
        """The limits that are set, by the devices; none where I/O is not controlled now.

        The same object as long as they are the same.
        """
        file = (self._found or self._pods()) / "io.max"
        text = _read(file) if file.exists() else ""
        if text != self._seen[0]:
            self._seen = text, {number: IoMax.parse(words) for number, words in _rows(text)}
        return self._seen[1]

    def limit(self, number: DeviceNumber, io_max: IoMax) -> None:
        """Set a device's limits, all of them. No error for a device that is gone."""
        file = self.prepare() / "io.max"
        try:
            _write(file, f"{number[0]}:{number[1]} {io_max.words()}")
        except _Gone:
            if not file.exists():
                raise

    def counts(self) -> Mapping[DeviceNumber, IoCount]:
        """What the pods did on each device, since I/O is controlled.

        The same object as long as it is the same.
        """
        text = _read(self.prepare() / "io.stat")
        if text != self._counted[0]:
            found = {number: IoCount(*_values(words, "stat")) for number, words in _rows(text)}
            self._counted = text, found
        return self._counted[1]

    def _pods(self) -> Path:
        if not (self._root / "cgroup.controllers").exists():
            raise errors.NoCgroup(f"{self._root} is no cgroup v2 hierarchy")
        if self._configured:
            found = self._root / self._configured.strip("/")
            if not found.is_dir():
                raise errors.NoCgroup(f"{found} does not exist")
            return found
        every = sorted(self._named(self._root, _DEPTH))
        if len(every) > 1:
            # Another driver of kubelet's made one before the last reboot, or it is stale.
            every = [one for one in every if "populated 1" in _read(one / "cgroup.events")]
        if len(every) != 1:
            seen = ", ".join(map(str, every)) or "none"
            raise errors.NoCgroup(f"one cgroup of pods is looked for below {self._root}: {seen}")
        return every[0]

    def _named(self, directory: Path, depth: int) -> Iterator[Path]:
        for one in _inside(directory):
            if not one.is_dir():
                continue
            if _OF_PODS.fullmatch(one.name):
                yield one
            elif depth > 1:
                yield from self._named(one, depth - 1)


class _Gone(errors.NoCgroup):
    """What is written to, or for, has gone since it was looked at."""


def _inside(directory: Path) -> list[Path]:
    """The entries of a cgroup; none where it has gone since it was seen."""
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []


def _words(path: Path) -> list[str]:
    return _read(path).split()


def _values(words: list[str], file: str) -> Iterator[int]:
    """The value of each kind of I/O in a row of this file; 0 where there is none, or no limit."""
    said = dict(one.split("=", 1) for one in words)
    for one in fields(IoCount):
        text = said.get(one.metadata[file], _NO_LIMIT)
        yield 0 if text == _NO_LIMIT else int(text)


def _rows(text: str) -> Iterator[tuple[DeviceNumber, list[str]]]:
    """The devices of a file, each with what is said of it; without those of which nothing is.

    Not by lines: kernels before 5.18 end no line after a device without counters
    (blkcg_print_one_stat() in block/blk-cgroup.c).
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
        raise errors.NoCgroup(f"{path}: {error.strerror}") from None


def _write(path: Path, text: str) -> None:
    """One write(2): the kernel takes each as a whole."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        kind = _Gone if error.errno in _GONE else errors.NoCgroup
        raise kind(f"cannot write {text!r} to {path}: {error.strerror}") from None
