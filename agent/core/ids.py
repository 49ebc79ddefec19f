"""Volume ids, `group@uuid/name`; names of logical volumes; topology segments."""

import hashlib
import re
from dataclasses import dataclass
from typing import Self

from agent.core import errors
from lvm import names
from lvm.report import Group

# Prefixes of logical volumes' names.
VOLUME_PREFIX = "vol"
# Inline volumes, which have ids of kubelet's and live as long as their pods.
INLINE_PREFIX = "eph"
SNAPSHOT_PREFIX = "snap"
# Of the names in group snapshots' ids, which no logical volume has.
GROUP_SNAPSHOT_PREFIX = "gsnap"
POOL_PREFIX = "pool"
WIPE_PREFIX = "wipe"
# The name of the logical volume that holds free extents of a group while they are zeroed.
SWEEP = "sweep"
# Extents that a volume is to grow by, while they are zeroed.
GROWTH_PREFIX = "grow"
# A temporary snapshot while the volume of that name is copied from it.
BRIDGE_PREFIX = "copy"

_UUID_CHARACTERS = 8
# CSI spec, Topology; Kubernetes keeps the values as labels of nodes.
_MOST_SEGMENT_CHARACTERS = 63
_DIGEST_CHARACTERS = 16
# At most 127 characters, as lvm2 takes: what is longer can be the name of nothing.
_NAME = r"[A-Za-z0-9_+.][A-Za-z0-9_+.-]{0,126}"
_FORM = re.compile(
    rf"(?P<group>{_NAME})@(?P<uuid>[A-Za-z0-9]{{{_UUID_CHARACTERS}}})/(?P<name>{_NAME})"
)
_IS_NAME = re.compile(_NAME).fullmatch
_IS_SHORTENED = re.compile(
    rf".{{{_MOST_SEGMENT_CHARACTERS - 1 - _DIGEST_CHARACTERS}}}-[0-9a-f]{{{_DIGEST_CHARACTERS}}}"
).fullmatch


@dataclass(frozen=True)
class VolumeId:
    """A group by its name and the start of its LVM UUID, then the logical volume.

    A group of the same name on another node has another UUID, so a call at the wrong node is never
    answered "already gone".
    """

    group: str
    group_uuid: str
    name: str

    @classmethod
    def of(cls, group: Group, name: str) -> Self:
        """The id of a volume in a group."""
        return cls(group.name, start_of(group.uuid), name)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse an id; None for a text that cannot be one."""
        match = _FORM.fullmatch(text)
        return None if match is None else cls(match["group"], match["uuid"], match["name"])

    def is_of(self, group_uuid: str) -> bool:
        """Whether the id names the group with that LVM UUID, with or without its dashes."""
        return start_of(group_uuid) == self.group_uuid

    def __str__(self) -> str:
        return f"{self.group}@{self.group_uuid}/{self.name}"


def is_name(text: str) -> bool:
    """Whether a logical volume can have the name."""
    return _IS_NAME(text) is not None


def group_of(volume_id: str) -> str:
    """The name of the group in a volume id; raises NoSuchVolume for an invalid id."""
    parsed = VolumeId.parse(volume_id)
    if parsed is None:
        raise errors.NoSuchVolume(volume_id)
    return parsed.group


def logical_name(volume_id: str) -> str:
    """The logical volume's name; calls on one volume lock it."""
    parsed = VolumeId.parse(volume_id)
    return names.logical_volume(INLINE_PREFIX, volume_id) if parsed is None else parsed.name


def readable_name(volume_id: str) -> str:
    """The name to show: without the prefix, or the logical volume's if that has a digest."""
    return names.readable(VOLUME_PREFIX, logical_name(volume_id))


def is_inline(volume_id: str) -> bool:
    """Whether the id is an inline volume's, which the CO chose."""
    return names.is_of(INLINE_PREFIX, logical_name(volume_id))


def group_member(name: str, source_id: str) -> str:
    """The logical volume of a source's snapshot in the group snapshot that the CO calls `name`."""
    return names.logical_volume(SNAPSHOT_PREFIX, f"{name}\0{source_id}")


def looks_shortened(node_id: str) -> bool:
    """Whether a node's name may be what another's is shortened to."""
    return _IS_SHORTENED(node_id) is not None


def node_segment(node_id: str) -> str:
    """The value of the topology key for a node: its name, or that shortened by a digest.

    So is a name of over 63 characters, and one that looks like a shortened one: no node is taken
    for another, whatever it is called.
    """
    if len(node_id) <= _MOST_SEGMENT_CHARACTERS and not looks_shortened(node_id):
        return node_id
    digest = hashlib.sha256(node_id.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{node_id[: _MOST_SEGMENT_CHARACTERS - 1 - len(digest)]}-{digest}"


def topology_key(driver_name: str) -> str:
    """The label of nodes that holds a driver's topology segment."""
    return f"topology.{driver_name}/node"


def topology(node_id: str, driver_name: str) -> dict[str, str]:
    """The topology segments of a node, and of each volume and snapshot on it."""
    return {topology_key(driver_name): node_segment(node_id)}


def start_of(uuid: str) -> str:
    """The part of a group's LVM UUID that ids have."""
    return uuid.replace("-", "")[:_UUID_CHARACTERS]
