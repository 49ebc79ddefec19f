"""The filters of lvm.conf(5), devices/filter and devices/global_filter, without lvm2."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from lvm import metadata, sysfs

# The later file outweighs the earlier, setting by setting.
_FILES = ("lvm.conf", "lvmlocal.conf")
_SETTINGS = (("devices", "global_filter"), ("devices", "filter"))
_CLOSING = {"(": ")", "[": "]", "{": "}"}
# What udev(7) keeps of each device, beside other lines its links in /dev.
_LINK = re.compile(r"^S:(.+)$", re.MULTILINE)

# Whether a pattern accepts what it matches, and the pattern.
Pattern = tuple[bool, re.Pattern[str]]


def read(root: Path) -> Callable[[str], bool] | None:
    """Whether the node's filters accept a disk of that path; None where there are none.

    `root` is where lvm2's own root directory is seen. A file that is not in lvm2's form is passed
    over: lvm2 itself then says so.
    """
    stamps = tuple(_stamp(root / "etc/lvm" / name) for name in _FILES)
    filters = _parsed(root, stamps)
    if not filters:
        return None
    return lambda path: all(_accepts(one, _names(root, path)) for one in filters)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        told = file.stat()
    except OSError:
        return None
    return told.st_ino, told.st_size, told.st_mtime_ns


# Read anew where a file has changed.
@lru_cache(maxsize=4)
def _parsed(root: Path, _stamps: object) -> Sequence[Sequence[Pattern]]:
    values: dict[tuple[str, ...], str] = {}
    for name in _FILES:
        try:
            text = (root / "etc/lvm" / name).read_text(errors="surrogateescape")
            settings = dict(metadata.settings(text))
        except (OSError, metadata.Damage):
            continue
        # `devices { filter = … }` may be written as `devices/filter = …`.
        values |= {tuple("/".join(place).split("/")): value for place, value in settings.items()}
    found = (values.get(one, "") for one in _SETTINGS)
    return tuple(tuple(_patterns(one)) for one in found if one)


def _patterns(value: str) -> Iterator[Pattern]:
    """Each text of a list: `a` or `r`, a pattern between two characters that are not in it."""
    for text in metadata.strings(value):
        kind, opening, rest = text[:1], text[1:2], text[2:]
        closing = _CLOSING.get(opening, opening)
        if kind in ("a", "r") and opening and rest.endswith(closing):
            try:
                yield kind == "a", re.compile(rest.removesuffix(closing))
            except re.error:
                continue


def _accepts(patterns: Iterable[Pattern], names: Sequence[str]) -> bool:
    """As lvm2 decides (lib/filters/filter-regex.c): the first pattern that matches a name counts.

    One name that is accepted is enough; what no pattern matches is accepted.
    """
    patterns = list(patterns)
    told = [next((ok for ok, one in patterns if one.search(name)), None) for name in names]
    return True in told or False not in told


def _names(root: Path, path: str) -> Sequence[str]:
    """What a disk is called: its node, its links, its name in device-mapper."""
    names = [path]
    device = f"/sys/class/block/{Path(path).name}"
    if mapper := sysfs.word(f"{device}/dm/name"):
        names.append(f"/dev/mapper/{mapper}")
    if number := sysfs.word(f"{device}/dev"):
        try:
            kept = (root / "run/udev/data" / f"b{number}").read_text(errors="replace")
        except OSError:
            return names
        names += [f"/dev/{link}" for link in _LINK.findall(kept)]
    return names
