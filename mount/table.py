"""The kernel's mount table: /proc/self/mountinfo, parsed exactly (proc(5))."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from mount.kernel import Kernel

DeviceNumber = tuple[int, int]

# The file systems that hold device nodes, and how d_path(9) ends for what was unlinked.
NODE_HOLDERS = frozenset({"devtmpfs", "tmpfs"})
_DELETED = "//deleted"

_CONTEXT = re.compile(r'(?:^|,)context=(?:"([^"]*)"|([^,"]*))')
_OCTAL = re.compile(r"\\([0-3][0-7]{2})")
# What may be written otherwise than it is (show_mountinfo in fs/proc_namespace.c).
_ESCAPED = re.compile(r"[ \t\n\\#]")
_BTRFS = " - btrfs "
# What ext4 has after an error: "ro", and since Linux 6.14 one of the others (ext4_emergency_ro and
# ext4_forced_shutdown in fs/ext4/super.c); from 6.12 on, in between, only its count of errors.
_NO_WRITES = frozenset({"ro", "emergency_ro", "shutdown"})


@dataclass(frozen=True)
class Mount:
    """One mount.

    `device` is (major, minor) of the file system's block device. `root` is what of that file system
    is seen: "/", or the directory, file or device node of a bind. `options` are the mount's own,
    `super_options` the file system's. `propagation` holds words such as "shared:12".
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
        """Whether nothing can be written through this mount, by its own or the superblock's ro."""
        return "ro" in self.options or self.takes_no_writes

    @property
    def takes_no_writes(self) -> bool:
        """Whether the superblock is read-only, as it was mounted or after an error."""
        return not _NO_WRITES.isdisjoint(self.super_options)

    @property
    def is_stale_node(self) -> bool:
        """Whether this is the bind of a device node whose device went away.

        It still opens whatever has the device's number now, which may be another volume.
        """
        return self.fs_type in NODE_HOLDERS and self.root.endswith(_DELETED)

    @property
    def context(self) -> str:
        """The SELinux context of all that is in the file system; empty where each has its own.

        The kernel quotes one that has commas (show_sid in security/selinux/hooks.c).
        """
        found = _CONTEXT.search(",".join(self.super_options))
        return (found[1] or found[2]) if found else ""

    def __str__(self) -> str:
        inside = "" if self.root == "/" else f"[{self.root}]"
        return f"{self.source}{inside} ({self.fs_type}, {'ro' if self.read_only else 'rw'})"


class Table:
    """All mounts of this process's mount namespace, in the kernel's order.

    A node may have thousands: the kernel's text is searched, and a line parsed where a question may
    be about it. `device_number` says which device a path is (see `read`).
    """

    def __init__(
        self, text: str, device_number: Callable[[str], DeviceNumber] | None = None
    ) -> None:
        self._text = text if text.endswith("\n") else f"{text}\n"
        self._device_number = device_number
        self._parsed: dict[str, Mount] = {}

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """All of them; ValueError for a line that is not one of mountinfo."""
        return tuple(self._mount(line) for line in self._text.split("\n") if line)

    def at(self, path: str) -> tuple[Mount, ...]:
        """The mounts stacked at `path`, bottom to top."""
        found = self._having(_word(path))
        return _stacked(mount for mount in found if mount.path == path)

    def top(self, path: str) -> Mount | None:
        """What is mounted at `path`, seen from above."""
        stack = self.at(path)
        return stack[-1] if stack else None

    def top_of(self, path: str, device: DeviceNumber) -> Mount | None:
        """What is mounted at `path`, seen from above, if it is the file system of a device."""
        mounted = self.top(path)
        return mounted if mounted is not None and mounted.device == device else None

    def of_device(self, device: DeviceNumber) -> tuple[Mount, ...]:
        """Every mount of the file system on a block device, first mount and binds alike."""
        found = self._having(f" {device[0]}:{device[1]} ", _BTRFS)
        return tuple(mount for mount in found if mount.device == device)

    def of_types(self, fs_types: Collection[str]) -> tuple[Mount, ...]:
        """Every mount of file systems of these types."""
        found = self._having(*(f" - {one} " for one in fs_types))
        return tuple(mount for mount in found if mount.fs_type in fs_types)

    def under(self, path: str) -> tuple[Mount, ...]:
        """The mounts below `path`, those at `path` itself not among them."""
        prefix = path.rstrip("/") + "/"
        found = self._having(_word(prefix, end=""))
        return tuple(one for one in found if one.path.startswith(prefix) and one.path != path)

    def holding(self, path: str) -> Mount | None:
        """The mount through which `path` is seen: the topmost at it or at its nearest parent."""
        while True:
            if found := self.top(path):
                return found
            if path == "/":
                return None
            path = path.rpartition("/")[0] or "/"

    def _having(self, *words: str) -> Iterator[Mount]:
        """The mounts whose lines have one of these words, none of them empty."""
        text = self._text
        for start in sorted({start for word in words for start in _lines_with(text, word)}):
            yield self._mount(text[start : text.index("\n", start)])

    def _mount(self, line: str) -> Mount:
        # A line begins with the mount's own number.
        if (found := self._parsed.get(line)) is None:
            found = _parse_line(line)
            if self._device_number is not None and found.fs_type == "btrfs":
                with suppress(OSError):
                    found = replace(found, device=self._device_number(found.source))
            self._parsed[line] = found
        return found


def read(kernel: Kernel) -> Table:
    """The kernel's table now.

    btrfs has a device number of its own making (0:45) in mountinfo, so there the number is looked
    up by the mount's source; it stays as it is if that node is gone.
    """
    return Table(kernel.mountinfo(), kernel.device_number)


def _lines_with(text: str, word: str) -> Iterator[int]:
    """Where the lines begin that have a word in them."""
    found = text.find(word)
    while found >= 0:
        yield text.rfind("\n", 0, found) + 1
        found = text.find(word, text.index("\n", found))


def _word(path: str, end: str = " ") -> str:
    """What is in each line that has this path, however the kernel writes what is odd in it."""
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
    """The kernel writes blank, tab, newline, backslash and # as octal escapes (seq_escape)."""
    return _OCTAL.sub(lambda match: chr(int(match.group(1), 8)), field)


def _stacked(mounts: Iterable[Mount]) -> tuple[Mount, ...]:
    """Bottom to top: each mount's parent is the one below it (proc(5)), in whatever order read."""
    rest = list(mounts)
    if len(rest) < 2:
        return tuple(rest)
    ordered: list[Mount] = []
    while rest:
        ids = {mount.mount_id for mount in rest}
        # A mount that is its own parent is the root of the namespace.
        lowest = [m for m in rest if m.parent_id not in ids or m.parent_id == m.mount_id]
        ordered += lowest or rest
        rest = [mount for mount in rest if mount not in ordered]
    return tuple(ordered)
