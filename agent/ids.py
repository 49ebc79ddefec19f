"""Volume ids: `group@uuid/name`, enough to find a volume and to know another node's."""

import re
from dataclasses import dataclass
from typing import Self

from lvm.report import Group

_UUID_CHARACTERS = 8
_FORM = re.compile(
    rf"(?P<group>[A-Za-z0-9_+.][A-Za-z0-9_+.-]*)"
    rf"@(?P<uuid>[A-Za-z0-9]{{{_UUID_CHARACTERS}}})"
    rf"/(?P<name>[A-Za-z0-9_+.][A-Za-z0-9_+.-]*)"
)


@dataclass(frozen=True)
class VolumeId:
    """A group by its name and the start of its LVM UUID, then the logical volume.

    A group of the same name on another node has another UUID, so a call that reaches the wrong
    node is never answered "already gone".
    """

    group: str
    group_uuid: str
    name: str

    @classmethod
    def of(cls, group: Group, name: str) -> Self:
        """The id of a volume in a group."""
        return cls(group.name, _start(group.uuid), name)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The id that a text is, or None where no volume can have such an id."""
        match = _FORM.fullmatch(text)
        return None if match is None else cls(match["group"], match["uuid"], match["name"])

    def is_of(self, group_uuid: str) -> bool:
        """Whether the id names the group with that LVM UUID, with or without its dashes."""
        return _start(group_uuid) == self.group_uuid

    def __str__(self) -> str:
        return f"{self.group}@{self.group_uuid}/{self.name}"


def _start(uuid: str) -> str:
    return uuid.replace("-", "")[:_UUID_CHARACTERS]
