"""Volume ids: `group@uuid/name`, enough to find a volume and to know another node's.

And the names of logical volumes, which are their last part, and of nodes in the topology.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Self

from agent.core import errors
from lvm import names
from lvm.report import Group

# How the names of logical volumes begin.
VOLUME_PREFIX = "vol"
# Inline volumes, which have ids of kubelet's and live as long as their pods.
INLINE_PREFIX = "eph"
SNAPSHOT_PREFIX = "snap"
POOL_PREFIX = "pool"
WIPE_PREFIX = "wipe"
# All that is free in a group, while it is overwritten; the whole of a logical volume's name.
SWEEP = "sweep"
# What a volume is to grow by, while that is overwritten.
GROWTH_PREFIX = "grow"
# A snapshot for as long as a volume is copied, whose name it has.
BRIDGE_PREFIX = "copy"

_UUID_CHARACTERS = 8
# CSI spec, Topology; Kubernetes has the values as labels of its nodes.
_MOST_SEGMENT_CHARACTERS = 63
_DIGEST_CHARACTERS = 16
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


def group_of(volume_id: str) -> str:
    """The name of the group in a volume id; raises NoSuchVolume for what is no id."""
    parsed = VolumeId.parse(volume_id)
    if parsed is None:
        raise errors.NoSuchVolume(volume_id)
    return parsed.group


def logical_name(volume_id: str) -> str:
    """The logical volume's name, which is what calls on the same volume have in common."""
    parsed = VolumeId.parse(volume_id)
    return names.logical_volume(INLINE_PREFIX, volume_id) if parsed is None else parsed.name


def readable_name(volume_id: str) -> str:
    """What a person calls the volume: its name, or the logical volume where it has a digest."""
    return names.readable(VOLUME_PREFIX, logical_name(volume_id))


def is_inline(volume_id: str) -> bool:
    """Whether the id can be an inline volume's only: such ids are the CO's, not Carver's."""
    return names.is_of(INLINE_PREFIX, logical_name(volume_id))


def node_segment(node_id: str) -> str:
    """The value of the topology key for a node: its name, shortened by a digest if over 63."""
    if len(node_id) <= _MOST_SEGMENT_CHARACTERS:
        return node_id
    digest = hashlib.sha256(node_id.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{node_id[: _MOST_SEGMENT_CHARACTERS - 1 - len(digest)]}-{digest}"


def _start(uuid: str) -> str:
    return uuid.replace("-", "")[:_UUID_CHARACTERS]
