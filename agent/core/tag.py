"""Keys of Carver's own LVM tags, and the values of the tags that have a fixed set of values.

A new key also gets a row in FOLLOWS, the table at the end.
"""

from collections.abc import Mapping
from enum import Flag, auto
from types import MappingProxyType

from agent.core import errors
from lvm import report, tags, tuning

# Key of the tag with the name that the CO gave a volume or snapshot. Each volume and snapshot of
# Carver's has this tag; logical volumes of other programs have none.
NAME = "name"
# Key of the tag with the state of a volume or thin pool. The values are READY to MOVED, below.
STATE = "state"
# Key of the tag with the size, in bytes, that a volume or a snapshot was created with.
SIZE = "size"
# Key of the tag of a volume whose size was rounded up, when it was created or expanded. The value
# is the size that the caller asked for, a slash, and the resulting size of the logical volume, both
# in bytes. The tag is void once the logical volume has another size.
REQUESTED = "requested"
# Key of the tag with a volume's access type: block or mount.
ACCESS = "access"
# Key of the tag with the capabilities of the request that created a volume. A repeated request is
# compared with the tag.
CAPABILITIES = "capabilities"
# Key of the tag with the file system that a volume was formatted with.
FORMATTED = "formatted"
# Key of the tag of an inline (ephemeral) volume.
EPHEMERAL = "ephemeral"
# Key of the tag with the target path of an inline volume.
TARGET = "target"
# Key of the tag with a volume's layout, such as raid1.
LAYOUT = "layout"
# Keys of the tags with the parameters of the StorageClass that a volume was created with
# (agent/requests/parameters.py). The tag ENCRYPTION, below, has another such parameter.
CLASS = "class"
FS_TYPE = "fsType"
MKFS_OPTIONS = "mkfsOptions"
MOUNT_OPTIONS = "mountOptions"
# Keys of the tags with the names, or a UID, of the Kubernetes objects that a volume or snapshot
# belongs to, such as the volume's claim and pod. The name of the VolumeSnapshotContent or
# VolumeGroupSnapshotContent is in CONTENT.
SNAPSHOT = "snapshot"
GROUP_SNAPSHOT_NAME = "groupSnapshotName"
PV = "pv"
PVC = "pvc"
NAMESPACE = "namespace"
POD = "pod"
POD_UID = "podUid"
SERVICE_ACCOUNT = "serviceAccount"
# Key of the tag with the kind, mode and size in bytes of a volume's dm-cache or dm-writecache.
CACHE = "cache"
# Key of the tag of a volume that is zeroed as a whole before its first use; its value is FULLY.
ZERO = "zero"
# Value of the tag ZERO.
FULLY = "fully"
# Key of the tag of an encrypted volume; its value is "luks2".
ENCRYPTION = "encryption"
# Key of the tag with the size of an encrypted volume's LUKS2 header, in bytes.
HEADER = "header"
# Key of the tag with the UUID in an encrypted volume's LUKS2 header, once the header is written.
SEALED = "sealed"
# Key of the tag with the name of an encrypted volume's present encryption key: the only key that
# opens the volume, apart from recovery keys.
KEY_GENERATION = "keyGeneration"
# Key of the tag of an encrypted volume whose key is being changed. The tag is written before the
# change, and removed when the new key is proved to open the volume.
ROTATING = "rotating"
# Keys of the tags that describe an encrypted volume's keys.
OF_KEYS = (KEY_GENERATION, ROTATING)
# Key of a tag that versions up to 0.2.0 wrote, "true" where the StorageClass asked that a copy get
# a master key of its own. The tag has no effect any more.
REENCRYPT = "reencrypt"
# Key of a tag that versions up to 0.2.0 wrote: the copy still has its source's master key, and was
# to be re-encrypted before its first use. The tag is removed when the copy is opened.
SHARED_KEY = "sharedKey"
# Key of the tag of a copied volume whose btrfs has got a new UUID, other than its source's.
RENEWED = "renewed"
# Key of the tag of a volume whose file system failed. Where the volume is staged, its file system
# is to be unmounted, checked and mounted again before the next use.
REMOUNT = "remount"
# Key of the tag of a volume that the CO has attached to its node by ControllerPublishVolume; the
# value is a `records.Attachment`.
ATTACHED = "attached"
# Key of the tag of a copy, with the id of the snapshot or volume that it is copied from.
FROM = "from"
# Key of the tag of a volume that is copied from a temporary snapshot, with the time at which that
# snapshot was taken, in the format of TIME.
BRIDGE = "bridge"
# Key of the tag of a temporary snapshot, with the id of the volume that is copied from it.
COPY = "copy"
# Key of the tag of a volume that could not grow while it was in use. The value is the size, in
# bytes, to which the volume is to grow when it is staged next.
WANTED = "wanted"
# Key of the tag with the size, in bytes, of a volume's last expansion, which failed and is not
# retried when the volume is staged. If the logical volume has that size, only its file system or
# its open LUKS mapping is still smaller.
REFUSED = "refused"
# Key of the tag of a snapshot with the name of its source's logical volume.
SOURCE = "source"
# Key of the tag of a snapshot with its time, in nanoseconds since the epoch, to be shown to people.
TIME = "time"
# Key of the tag of a snapshot with its number in the order of its volume group's snapshots.
SEQUENCE = "sequence"
# Key of the tag of a snapshot that belongs to a group snapshot, with the group snapshot's id.
GROUP_SNAPSHOT = "groupSnapshot"
# Key of the tag of a snapshot that belongs to a group snapshot, with the number of snapshots in
# that group snapshot.
MEMBERS = "members"
# Key of the tag with the parameters of the request that created a snapshot's group snapshot. A
# repeated request is compared with the tag.
ASKED = "asked"
# Key of the tag with the volume groups that a group snapshot's snapshots lie in.
MEMBER_GROUPS = "memberGroups"
# Key of the tag of a snapshot whose group snapshot is complete: all its snapshots are taken.
COMMITTED = "committed"
# Key of the tag of a received volume, with the id of the volume that was sent.
RECEIVED = "received"
# Key of the tag of a volume that is being received, with the chain digest of the contents that the
# volume holds (agent/extras/streams/form.py).
CHAIN = "chain"
# Key of the tag of a volume that is being received, with the size of the last complete contents, in
# bytes. In a snapshot, the name of its VolumeSnapshotContent.
CONTENT = "content"
# Key of the tag of a volume that is being received, with the chain digest of the contents that the
# volume will hold at the end of the current stream.
INTO = "into"
# Key of the tag of a volume that is being received, with the number of bytes received so far.
OFFSET = "offset"
# Key of the tag of a volume that is being received, with the SHA-256 of the secret that is needed
# to finish the volume. A finished volume has it in place of RELEASED once that secret is forgotten.
RELEASE = "release"
# Key of the tag of a volume that is being received in place of what an earlier move left, until its
# first stream is whole. The value is the SHA-256 of the secret of that earlier move.
REPLACES = "replaces"
# Key of the tag of a received volume that is being finished.
FINISHING = "finishing"
# Key of the tag of a received volume with the secret that it was finished with.
RELEASED = "released"
# Key of the tag of a volume that is being or was moved, with the node that the volume goes to.
MOVE_TO = "moveTo"
# Key of the tag of a volume that is being or was moved, with the secret that the other node needs
# to finish the received volume.
MOVE_WORD = "moveWord"
# Key of the tag of a moved volume whose remains on this node are being deleted, and may therefore
# be incomplete.
MOVE_ENDED = "moveEnded"
# Key of a tag that an operator sets: erase a deleted volume without waiting for its missing disks.
GIVEN_UP = "givenUp"
# Key of the tag of an adopted volume (one that Carver did not make), with its earlier name.
ADOPTED = "adopted"
# Key of the tag with the properties, separated by commas, that a version of Carver must know to use
# a volume or pool without doing harm. Unknown tags with other keys are ignored.
NEEDS = "needs"
# Values of the tag NEEDS that this version of Carver knows.
KNOWN_NEEDS: frozenset[str] = frozenset()
# Keys of the tags of a volume group that list its unclean disks, and the separator in their values.
# A disk is unclean if its free extents must be overwritten before they are allocated; lvm.report
# derives that from these tags.
SWEEP, SWEEP_DISKS, BETWEEN = report.SWEEP, report.SWEEP_DISKS, report.BETWEEN
# Key of the tag of a volume group while one of its disks is replaced. The value is the UUIDs of
# both disks, and the number of extents that are allocated on the new disk once all of the old
# disk's extents lie there. The tag is written only if no earlier move left data on the new disk.
FILLED = "filled"

# Values of the tag STATE, the state of a volume or thin pool (agent/volumes/volume_states.py).
READY = "ready"
COPYING = "copying"
WIPING = "wiping"
RECEIVING = "receiving"
MOVED = "moved"

# Key of the tag of a thin snapshot that Carver activated to read it. The snapshot is deactivated
# after the read.
ACTIVATED = "activated"

# Key of the tag of a thin pool with its chunk size, in bytes. A pool also has the tags STATE and
# CLASS, and has no tag NAME.
CHUNK = "chunk"
# Key of the tag of a thin pool that grew into extents that were not overwritten. When the pool is
# removed, the extents that are then free must be overwritten before they are allocated again.
UNCLEAN = "unclean"
# Key of the tag of a thin pool whose metadata snapshot, if the pool has one, belongs to Carver.
METADATA_SNAPSHOT = "metadataSnapshot"


class Follows(Flag):
    """Where the value of a volume's tag goes besides the volume itself, unchanged."""

    NOWHERE = 0
    # To the volume on another node that a stream makes, by a move or a backup.
    MOVE = auto()
    # To a snapshot of the volume, as it was when the snapshot was taken.
    SNAPSHOT = auto()
    # To a volume that is restored from the snapshot, or cloned.
    COPY = auto()


_EVERYWHERE = Follows.MOVE | Follows.SNAPSHOT | Follows.COPY
# Table of all tags: which of them follow a volume. What describes the contents follows them, and
# what a class or a parameter gave follows a move unless it is bound to the node or the class there.
# A restore and a clone have parameters of their own. Mutable parameters follow a move, also those
# that lvm2 keeps without a tag (agent/extras/transfer/stream_descriptions.py).
FOLLOWS: Mapping[str, Follows] = MappingProxyType(
    {
        # The contents.
        ACCESS: Follows.MOVE | Follows.SNAPSHOT,
        FORMATTED: _EVERYWHERE,
        ENCRYPTION: Follows.MOVE | Follows.SNAPSHOT,
        # A restore and a clone are planned with a header of this size (agent/operations/plan.py).
        HEADER: Follows.MOVE | Follows.SNAPSHOT,
        SEALED: _EVERYWHERE,
        ROTATING: _EVERYWHERE,
        # The first stage of a received or copied volume finds out the name of its key.
        KEY_GENERATION: Follows.SNAPSHOT,
        # Parameters, and what the caller asked for.
        CLASS: Follows.MOVE | Follows.SNAPSHOT,
        FS_TYPE: Follows.MOVE | Follows.SNAPSHOT,
        MKFS_OPTIONS: Follows.MOVE | Follows.SNAPSHOT,
        MOUNT_OPTIONS: Follows.MOVE,
        CAPABILITIES: Follows.MOVE,
        REQUESTED: Follows.MOVE | Follows.SNAPSHOT,
        **{setting.tag: Follows.MOVE for setting in tuning.SETTINGS if setting.tag},
        # The names of a volume's claim; those of other objects are not a volume's that moves.
        PV: Follows.MOVE,
        PVC: Follows.MOVE,
        NAMESPACE: Follows.MOVE,
        **dict.fromkeys((POD, POD_UID, SERVICE_ACCOUNT, EPHEMERAL, TARGET), Follows.NOWHERE),
        **dict.fromkeys((SNAPSHOT, GROUP_SNAPSHOT_NAME, CONTENT), Follows.NOWHERE),
        # Made anew for each volume and snapshot, by its name and its class on its node.
        **dict.fromkeys((NAME, STATE, SIZE, LAYOUT, CACHE, ZERO), Follows.NOWHERE),
        tuning.OWN_MAXIMUM: Follows.NOWHERE,
        # How the volume itself was made, and what it awaits on its node. `needs` has no value that
        # this version knows; a property of the contents would need a new form of streams.
        **dict.fromkeys((FROM, BRIDGE, COPY, ADOPTED, RENEWED), Follows.NOWHERE),
        **dict.fromkeys((ATTACHED, REMOUNT, WANTED, REFUSED, GIVEN_UP, NEEDS), Follows.NOWHERE),
        # Tags of versions up to 0.2.0, without effect.
        **dict.fromkeys((REENCRYPT, SHARED_KEY), Follows.NOWHERE),
        # A snapshot's own.
        **dict.fromkeys((SOURCE, TIME, SEQUENCE, ACTIVATED), Follows.NOWHERE),
        **dict.fromkeys(
            (GROUP_SNAPSHOT, MEMBERS, ASKED, MEMBER_GROUPS, COMMITTED), Follows.NOWHERE
        ),
        # A stream's and a move's own.
        **dict.fromkeys((RECEIVED, CHAIN, INTO, OFFSET, RELEASE, FINISHING), Follows.NOWHERE),
        **dict.fromkeys((REPLACES, RELEASED, MOVE_TO, MOVE_WORD, MOVE_ENDED), Follows.NOWHERE),
        # A volume group's and a thin pool's.
        **dict.fromkeys((SWEEP, SWEEP_DISKS, FILLED), Follows.NOWHERE),
        **dict.fromkeys((CHUNK, UNCLEAN, METADATA_SNAPSHOT), Follows.NOWHERE),
    }
)


def following(place: Follows) -> tuple[str, ...]:
    """Return the keys of the tags whose values go to a place, by the table."""
    return tuple(key for key, places in FOLLOWS.items() if place in places)


def require_fits(field: str, key: str, text: str) -> None:
    """Raise BadField if the tag with this key and value, `text`, would be too long for LVM.

    `field` is the name of the request's field that the error names.
    """
    if not tags.fits(key, text):
        raise errors.BadField(field, "is too long to be kept in an LVM tag")
