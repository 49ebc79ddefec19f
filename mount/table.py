"""The kernel's mount table: /proc/self/mountinfo, parsed as proc(5) and the kernel define it."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from mount.kernel import Kernel

DeviceNumber = tuple[int, int]

# Types of the file systems in which device nodes are.
NODE_HOLDERS = frozenset({"devtmpfs", "tmpfs"})
# Suffix of the path of a removed file (d_path(9)).
_DELETED = "//deleted"

# Pattern of the SELinux context among superblock options, with or without quotes.
_CONTEXT = re.compile(r'(?:^|,)context=(?:"([^"]*)"|([^,"]*))')
# Pattern of an escaped character in mountinfo: three octal digits.
_OCTAL = re.compile(r"\\([0-3][0-7]{2})")
# Characters that the kernel escapes in some fields (show_mountinfo in fs/proc_namespace.c).
_ESCAPED = re.compile(r"[ \t\n\\#]")
# Part of each line of mountinfo about a btrfs.
_BTRFS = " - btrfs "
# Superblock options of a file system that takes no writes. After an error ext4 shows "ro"; since
# Linux 6.14 one of the others (ext4_emergency_ro and ext4_forced_shutdown in fs/ext4/super.c); from
# 6.12 until then only its error counter shows the error.
_NO_WRITES = frozenset({"ro", "emergency_ro", "shutdown"})


@dataclass(frozen=True)
class Mount:
    """An entry of the mount table.

    `device` is the (major, minor) of the file system's block device. `root` is the path within that
    file system that is mounted: "/", or for a bind its directory, file or device node. `options`
    are those of the mount, `super_options` those of the file system. `propagation` has words such
    as "shared:12".
    """

    mount_id: int
    parent_id: int
    device: DeviceNumber
    root: str
    path: str
    options: tuple[str, ...]
    propagation: tuple[str, ...]
    fs_type: str
    source: str
    super_options: tuple[str, ...]

    @property
    def read_only(self) -> bool:
        """Whether the mount or its superblock is read-only."""
        return "ro" in self.options or self.takes_no_writes

    @property
    def takes_no_writes(self) -> bool:
        """Whether the superblock takes no writes, by a read-only mount or after an error."""
        return not _NO_WRITES.isdisjoint(self.super_options)

    @property
    def is_stale_node(self) -> bool:
        """Whether the mount is a bind of a removed device's node.

        Such a node opens the device that has the number now, which may be another volume's.
        """
        return self.fs_type in NODE_HOLDERS and self.root.endswith(_DELETED)

    @property
    def context(self) -> str:
        """The SELinux context of the whole file system; empty if each file has its own.

        The kernel quotes a context with commas (show_sid in security/selinux/hooks.c).
        """
        match = _CONTEXT.search(",".join(self.super_options))
        return (match[1] or match[2]) if match else ""

    def __str__(self) -> str:
        root_text = "" if self.root == "/" else f"[{self.root}]"
        return f"{self.source}{root_text} ({self.fs_type}, {'ro' if self.read_only else 'rw'})"


class Table:
    """All mounts of a mount namespace, in the kernel's order.

    A node may have thousands of mounts. So each method searches the kernel's text for the lines
    that may matter, and only those lines are parsed. `device_number` returns the number of the
    device whose node is at a path (see `read`).
    """

    def __init__(
        self, text: str, device_number: Callable[[str], DeviceNumber] | None = None
    ) -> None:
        self._text = text if text.endswith("\n") else f"{text}\n"
        self._device_number = device_number
        self._parsed: dict[str, Mount] = {}

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """All mounts. Raises ValueError for a line that cannot be parsed."""
        return tuple(self._mount(line) for line in self._text.split("\n") if line)

    def at(self, path: str) -> tuple[Mount, ...]:
        """The mounts stacked at `path`, from bottom to top."""
        candidates = self._having(_word(path))
        return _stacked(mount for mount in candidates if mount.path == path)

    def top(self, path: str) -> Mount | None:
        """The topmost mount at `path`; None for none."""
        stack = self.at(path)
        return stack[-1] if stack else None

    def top_of(self, path: str, device: DeviceNumber) -> Mount | None:
        """The topmost mount at `path`, if it is of the file system on a device; else None."""
        mounted = self.top(path)
        return mounted if mounted is not None and mounted.device == device else None

    def of_device(self, device: DeviceNumber) -> tuple[Mount, ...]:
        """All mounts of the file system on a block device, binds included."""
        candidates = self._having(f" {device[0]}:{device[1]} ", _BTRFS)
        return tuple(mount for mount in candidates if mount.device == device)

    def of_types(self, fs_types: Collection[str]) -> tuple[Mount, ...]:
        """All mounts of file systems of these types."""
        candidates = self._having(*(f" - {fs_type} " for fs_type in fs_types))
        return tuple(mount for mount in candidates if mount.fs_type in fs_types)

    def under(self, path: str) -> tuple[Mount, ...]:
        """The mounts below `path`, without those at `path` itself."""
        prefix = path.rstrip("/") + "/"
        candidates = self._having(_word(prefix, end=""))
        return tuple(
            mount for mount in candidates if mount.path.startswith(prefix) and mount.path != path
        )

    def holding(self, path: str) -> Mount | None:
        """The mount that a path is in: the topmost mount at the path or at its nearest parent."""
        while True:
            if mount := self.top(path):
                return mount
            if path == "/":
                return None
            path = path.rpartition("/")[0] or "/"

    def _having(self, *words: str) -> Iterator[Mount]:
        """The mounts whose lines contain any of these words, which are not empty."""
        text = self._text
        for start in sorted({start for word in words for start in _lines_with(text, word)}):
            yield self._mount(text[start : text.index("\n", start)])

    def _mount(self, line: str) -> Mount:
        # The lines of mountinfo are unique, as each begins with the id of its mount.
        if (mount := self._parsed.get(line)) is None:
            mount = _parse_line(line)
            if self._device_number is not None and mount.fs_type == "btrfs":
                with suppress(OSError):
                    mount = replace(mount, device=self._device_number(mount.source))
            self._parsed[line] = mount
        return mount


def read(kernel: Kernel) -> Table:
    """Read the kernel's mount table.

    For btrfs mountinfo has an artificial device number, such as 0:45. The artificial number is
    replaced by the number of the node that is the mount's source, unless that node is absent.
    """
    return Table(kernel.mountinfo(), kernel.device_number)


def _lines_with(text: str, word: str) -> Iterator[int]:
    """Yield the start of each line of a text that contains a word."""
    position = text.find(word)
    while position >= 0:
        yield text.rfind("\n", 0, position) + 1
        position = text.find(word, text.index("\n", position))


def _word(path: str, end: str = " ") -> str:
    """A text in each mountinfo line with this path: the path, or its longest unescaped part."""
    plain = _ESCAPED.split(path)
    return f" {path}{end}" if len(plain) == 1 else max(plain, key=len) or " "


def _parse_line(line: str) -> Mount:
    fields = line.split(" ")
    decoded = _decoded if "\\" in line else str
    try:
        separator = fields.index("-", 6)
        fs_type, source, super_options = fields[separator + 1 : separator + 4]
        major, minor = fields[2].split(":")
        return Mount(
            mount_id=int(fields[0]),
            parent_id=int(fields[1]),
            device=(int(major), int(minor)),
            root=decoded(fields[3]),
            path=decoded(fields[4]),
            options=tuple(fields[5].split(",")),
            propagation=tuple(fields[6:separator]),
            fs_type=decoded(fs_type),
            source=decoded(source),
            super_options=tuple(map(decoded, super_options.split(","))),
        )
    except ValueError as error:
        raise ValueError(f"not a line of mountinfo: {line!r}") from error


def _decoded(field: str) -> str:
    """Decode a field in which blank, tab, newline, backslash and # are octal (seq_escape)."""
    return _OCTAL.sub(lambda match: chr(int(match.group(1), 8)), field)


def _stacked(mounts: Iterable[Mount]) -> tuple[Mount, ...]:
    """Sort the mounts at one path from bottom to top.

    The parent of each mount is the mount below it (proc(5)).

    1. A mount whose parent is not among the rest is the lowest.
    2. Move it from the rest to the result, and repeat until nothing is left.
    """
    remaining = list(mounts)
    if len(remaining) < 2:
        return tuple(remaining)
    ordered: list[Mount] = []
    while remaining:
        ids = {mount.mount_id for mount in remaining}
        # A mount that is its own parent is the root of the namespace.
        lowest = [
            mount
            for mount in remaining
            if mount.parent_id not in ids or mount.parent_id == mount.mount_id
        ]
        ordered += lowest or remaining
        remaining = [mount for mount in remaining if mount not in ordered]
    return tuple(ordered)
