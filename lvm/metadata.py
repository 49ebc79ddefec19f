"""The text of a volume group's metadata, as it stands on the group's disks: no lvm2, no process."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from lvm import tags

# lvm2's form of configuration (lvm.conf(5)): `name { … }` and `name = value`, where a value is a
# number, a string or a list. Nothing here goes back to try again, so that no text takes long.
_BLANK = r"(?:\s|\#[^\n]*+)*+"
_WORD = r"[^\s\#{}=\"\[\],]++"
_STRING = r"\"(?:[^\"\\]|\\.)*+\""
_VALUE = rf"{_STRING}|\[(?:[^\"\]]|{_STRING})*+\]|{_WORD}"
_STATEMENT = re.compile(
    rf"{_BLANK}(?:(?P<end>\}})|(?P<word>{_WORD}){_BLANK}(?:\{{|={_BLANK}(?P<value>{_VALUE})))",
    re.DOTALL,
)
_STRINGS = re.compile(_STRING, re.DOTALL)
_NOTHING_MORE = re.compile(_BLANK)


class Damage(Exception):
    """What was read is not what lvm2 writes."""


@dataclass(frozen=True)
class Group:
    """A group, as the metadata on one of its disks tell."""

    name: str
    uuid: str
    seqno: int
    # Of its physical volumes.
    disk_uuids: tuple[str, ...]
    # Such as RESIZEABLE, READ, WRITE, EXPORTED.
    status: frozenset[str] = frozenset()
    system_id: str = ""
    lock_type: str = ""
    # Whether it, or something in it, bears a tag of Carver's.
    has_own_tags: bool = False

    @property
    def is_exported(self) -> bool:
        """Whether it was made ready for another machine: vgexport(8)."""
        return "EXPORTED" in self.status

    @property
    def is_clustered(self) -> bool:
        """Whether an lvm2 before 2.03 shared it with other nodes (clvmd)."""
        return "CLUSTERED" in self.status


def group(text: str) -> Group:
    """What the beginning of the metadata says, which is of the group and its disks; or Damage."""
    name, found = "", dict[tuple[str, ...], str]()
    for place, value in settings(text):
        name = name or place[0]
        if place[1:2] == ("logical_volumes",):
            break
        if place[0] == name:
            found[place[1:]] = value
    try:
        return Group(
            name,
            _string(found["id",]),
            int(found["seqno",]),
            tuple(
                _string(value)
                for place, value in found.items()
                if place[0] == "physical_volumes" and place[2:] == ("id",)
            ),
            frozenset(strings(found.get(("status",), ""))),
            _string(found.get(("system_id",), "")),
            _string(found.get(("lock_type",), "")),
            f'"{tags.PREFIX}' in text,
        )
    except (KeyError, ValueError):
        raise Damage("the metadata tell of no group") from None


def settings(text: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Each setting with the sections that it is in, in the order of the text; or Damage."""
    sections: list[str] = []
    at = 0
    while statement := _STATEMENT.match(text, at):
        at = statement.end()
        word, value = statement["word"], statement["value"]
        if value is not None:
            yield (*sections, word), value
        elif word is not None:
            sections.append(word)
        elif sections:
            sections.pop()
        else:
            raise Damage("the metadata end what was not begun")
    if sections or not _NOTHING_MORE.fullmatch(text, at):
        raise Damage("the metadata are not in lvm2's form")


def strings(value: str) -> list[str]:
    """The strings in a list."""
    return [_string(one) for one in _STRINGS.findall(value)]


def _string(value: str) -> str:
    """A string without its quotes."""
    return re.sub(r"\\(.)", r"\1", value.strip('"'), flags=re.DOTALL)
