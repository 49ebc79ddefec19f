"""The backing of a volume: the logical volume that holds its data, whatever the volume's id is."""

from dataclasses import dataclass

from agent.core import ids
from agent.core.ids import VolumeId
from lvm import names, report


@dataclass(frozen=True)
class Backing:
    """Names of the logical volume that holds a volume's data, and of the logical volume's group.

    By these names the volume's device is found.

    `group_uuid` is the start of the group's LVM UUID, as in volume ids. `group` and `group_uuid`
    are empty for an inline volume for which no report was read: the volume may be in any of
    Carver's groups.
    """

    group: str
    group_uuid: str
    name: str

    @property
    def is_inline(self) -> bool:
        """Whether the volume is an inline volume, by the name of its logical volume."""
        return names.is_of(ids.INLINE_PREFIX, self.name)

    def may_be_in(self, group: report.Group) -> bool:
        """Whether this logical volume may be in a volume group, by the group's name and UUID."""
        is_same = self.group_uuid == ids.start_of(group.uuid)
        return not self.group or (self.group == group.name and is_same)


def of(group: report.Group, name: str) -> Backing:
    """Return the backing of the logical volume with this name in a volume group."""
    return Backing(group.name, ids.start_of(group.uuid), name)


def of_id(volume_id: str) -> Backing:
    """Return the backing of a volume or snapshot of which only the id is known.

    It is for calls that read no report of LVM, such as publish and unpublish (invariant 5 of
    docs/design.md). Other code takes the backing from the volume's record. No other code may derive
    a device from an id: an id stays the same for the life of the volume, while the data may later
    be in another logical volume.
    """
    parsed = VolumeId.parse(volume_id)
    if parsed is None:
        return Backing("", "", names.logical_volume(ids.INLINE_PREFIX, volume_id))
    return Backing(parsed.group, parsed.group_uuid, parsed.name)
