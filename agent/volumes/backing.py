"""The logical volume that backs a volume: its data are there, whatever its id is."""

from dataclasses import dataclass

from agent.core import ids
from agent.core.ids import VolumeId
from lvm import names, report


@dataclass(frozen=True)
class Backing:
    """A logical volume by its group and its name: what a device is found by.

    `group_uuid` is the start of the group's LVM UUID, as ids have it. Both are empty for an inline
    volume that no report was asked for: any group of Carver's may have it.
    """

    group: str
    group_uuid: str
    name: str

    def may_be_in(self, group: report.Group) -> bool:
        """Whether a group is the one that has it, by the group's name and UUID."""
        is_same = self.group_uuid == ids.start_of(group.uuid)
        return not self.group or (self.group == group.name and is_same)


def of(group: report.Group, name: str) -> Backing:
    """A logical volume of a group in a report."""
    return Backing(group.name, ids.start_of(group.uuid), name)


def of_id(volume_id: str) -> Backing:
    """The logical volume of a volume or snapshot of which only the id is known.

    For calls that read no report, as publish and unpublish (invariant 5 of docs/design.md); the
    record of a volume has its backing. No other code says what a device is by what an id says: an
    id is given once, and the data may come to lie elsewhere.
    """
    parsed = VolumeId.parse(volume_id)
    if parsed is None:
        return Backing("", "", names.logical_volume(ids.INLINE_PREFIX, volume_id))
    return Backing(parsed.group, parsed.group_uuid, parsed.name)
