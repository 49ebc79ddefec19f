"""Volume ids, `group@uuid/name`; names of logical volumes; topology segments."""

import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from agent.core import errors
from lvm import names
from lvm.report import Group

# Prefix of the names of logical volumes that are volumes made by CreateVolume.
VOLUME_PREFIX = "vol"
# Prefix of the names of logical volumes that are inline volumes. Kubelet chooses the id of an
# inline volume, and the volume lives as long as its pod.
INLINE_PREFIX = "eph"
# Prefix of the names of logical volumes that are snapshots.
SNAPSHOT_PREFIX = "snap"
# Prefix of the names in the ids of group snapshots. No logical volume has such a name.
GROUP_SNAPSHOT_PREFIX = "gsnap"
# Prefix of the names of thin pools.
POOL_PREFIX = "pool"
# Prefix of the names of the thin volumes that fill a thin pool in order to overwrite its extents
# before the pool is removed.
WIPE_PREFIX = "wipe"
# Name of the temporary logical volume that holds free extents of a volume group while they are
# zeroed.
SWEEP = "sweep"
# Prefix of the names of logical volumes that reserve the extents by which a volume will grow, while
# these extents are zeroed.
GROWTH_PREFIX = "grow"
# Prefix of the names of temporary snapshots. A volume is copied from the temporary snapshot that
# has the rest of its name in common with the volume.
BRIDGE_PREFIX = "copy"

# Number of characters of a volume group's LVM UUID, from its start, that a volume id has.
_UUID_CHARACTERS = 8
# Maximum length of a topology segment, in characters (CSI spec, Topology). Kubernetes keeps
# topology segments as the values of node labels.
_MOST_SEGMENT_CHARACTERS = 63
# Number of hexadecimal digits of the digest at the end of a node's name that was shortened.
_DIGEST_CHARACTERS = 16
# Pattern of the name of a volume group or logical volume. lvm2 takes at most 127 characters.
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
    """Id of a volume, snapshot or group snapshot.

    The id consists of the volume group's name, the first characters of the group's LVM UUID, and a
    name in the group. For a volume and a snapshot, `name` is the logical volume's name at creation.
    The UUID tells volume groups of the same name on different nodes apart. So a DeleteVolume call
    that arrives at the wrong node is never answered with OK, as for a volume that is gone.
    """

    group: str
    group_uuid: str
    name: str

    @classmethod
    def of(cls, group: Group, name: str) -> Self:
        """Return the id of the object with this name in a volume group.

        The object is a volume, a snapshot or a group snapshot.
        """
        return cls(group.name, start_of(group.uuid), name)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse the text of a volume id; return None if the text is no valid id."""
        match = _FORM.fullmatch(text)
        return None if match is None else cls(match["group"], match["uuid"], match["name"])

    def is_of(self, group_uuid: str) -> bool:
        """Whether this id is of the volume group with this LVM UUID, with or without dashes."""
        return start_of(group_uuid) == self.group_uuid

    def __str__(self) -> str:
        return f"{self.group}@{self.group_uuid}/{self.name}"


def is_name(text: str) -> bool:
    """Whether the text is a valid name of a logical volume."""
    return _IS_NAME(text) is not None


def group_of(volume_id: str) -> str:
    """Return the name of the volume group in a volume id.

    Raises NoSuchVolume for an id that has no volume group: an invalid id, or an inline volume's.
    """
    parsed = VolumeId.parse(volume_id)
    if parsed is None:
        raise errors.NoSuchVolume(volume_id)
    return parsed.group


def logical_name(volume_id: str) -> str:
    """Return the name of the logical volume that a volume was created with, by the volume's id.

    Calls on one volume lock this name. The CO chooses the id of an inline volume, and the logical
    volume's name is derived from that id.
    """
    parsed = VolumeId.parse(volume_id)
    return names.logical_volume(INLINE_PREFIX, volume_id) if parsed is None else parsed.name


def readable_name(volume_id: str) -> str:
    """Return the name under which people are shown the volume with this id.

    The result is the logical volume's name without the prefix VOLUME_PREFIX. A name that contains a
    digest, or that has another prefix, is returned unchanged.
    """
    return names.readable(VOLUME_PREFIX, logical_name(volume_id))


def is_inline(volume_id: str) -> bool:
    """Whether a volume id is that of an inline volume.

    The CO chooses the ids of inline volumes. So an id that is not of the form of Carver's ids
    counts as an inline volume's.
    """
    return names.is_of(INLINE_PREFIX, logical_name(volume_id))


def group_member(name: str, source_id: str) -> str:
    """Return the logical volume's name for the snapshot of one source in a group snapshot.

    `name` is the name that the CO gave the group snapshot, `source_id` the id of the volume.
    """
    return names.logical_volume(SNAPSHOT_PREFIX, f"{name}\0{source_id}")


def looks_shortened(node_id: str) -> bool:
    """Whether a node's name has the form of a node name that `node_segment` shortened."""
    return _IS_SHORTENED(node_id) is not None


def node_segment(node_id: str) -> str:
    """Return the value of the topology key for a node: its name, shortened by a digest if need be.

    A name of more than 63 characters is shortened, and so is a name that looks like a shortened
    one. Therefore two nodes never have the same segment, whatever their names are.
    """
    if len(node_id) <= _MOST_SEGMENT_CHARACTERS and not looks_shortened(node_id):
        return node_id
    digest = hashlib.sha256(node_id.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{node_id[: _MOST_SEGMENT_CHARACTERS - 1 - len(digest)]}-{digest}"


def topology_key(driver_name: str) -> str:
    """Return the key of the node label that holds a driver's topology segment."""
    return f"topology.{driver_name}/node"


def topology(node_id: str, driver_name: str) -> dict[str, str]:
    """Return the topology segments of a node, and so of each volume and snapshot on the node."""
    return {topology_key(driver_name): node_segment(node_id)}


# A node has few volume groups, and each record of a volume asks for the UUID of its group.
@lru_cache(maxsize=256)
def start_of(uuid: str) -> str:
    """Return the first characters of a volume group's LVM UUID, as in volume ids.

    `uuid` is written with or without dashes; the result has no dashes.
    """
    return uuid.replace("-", "")[:_UUID_CHARACTERS]
