"""Keys of Carver's own LVM tags, and the values of those that are an enumeration."""

from agent.core import errors
from lvm import report, tags

# NAME is on every volume of Carver's, and on no other.
NAME = "name"
STATE = "state"
SIZE = "size"
# Where that, or what an expansion gave, is more than the caller asked for: the bytes asked for, a
# slash, and the size that they were rounded up to. Void for a volume of another size.
REQUESTED = "requested"
ACCESS = "access"
CAPABILITIES = "capabilities"
FORMATTED = "formatted"
EPHEMERAL = "ephemeral"
TARGET = "target"
LAYOUT = "layout"
# Parameters that it was created with (agent/requests/parameters.py); also ENCRYPTION.
CLASS = "class"
FS_TYPE = "fsType"
MKFS_OPTIONS = "mkfsOptions"
MOUNT_OPTIONS = "mountOptions"
# Its claim, pod or snapshot (its content: CONTENT), as Kubernetes named them.
SNAPSHOT = "snapshot"
GROUP_SNAPSHOT_NAME = "groupSnapshotName"
PV = "pv"
PVC = "pvc"
NAMESPACE = "namespace"
POD = "pod"
POD_UID = "podUid"
SERVICE_ACCOUNT = "serviceAccount"
CACHE = "cache"
# FULLY for a volume that is zeroed before use.
ZERO = "zero"
FULLY = "fully"
# Of an encrypted volume: "luks2"; the bytes of its header; and once formatted, the header's UUID;
ENCRYPTION = "encryption"
HEADER = "header"
SEALED = "sealed"
# the name of the only valid key but those for recovery; and ROTATING from before a change of the
# key until the new one is proved.
KEY_GENERATION = "keyGeneration"
ROTATING = "rotating"
OF_KEYS = (KEY_GENERATION, ROTATING)
# Of volumes that versions up to 0.2.0 made. REENCRYPT is "true" where the StorageClass asked for
# copies with a master key of their own; it has no effect any more. A copy that was to be
# re-encrypted before its first use has SHARED_KEY until it is opened.
REENCRYPT = "reencrypt"
SHARED_KEY = "sharedKey"
# Of a copied btrfs: it has a UUID of its own.
RENEWED = "renewed"
# Of a volume whose file system failed: it is to be unmounted, checked and mounted again where it is
# staged, before use.
REMOUNT = "remount"
# Of a volume that a CO has attached to its node: how (records.Attachment).
ATTACHED = "attached"
# Of a copy: its source's id.
FROM = "from"
# Of a copy by a temporary snapshot: when that was taken (as TIME).
BRIDGE = "bridge"
# Of that temporary snapshot: the id of the volume that is copied from it.
COPY = "copy"
# Of a volume that could not grow by ControllerExpandVolume: the size in bytes to grow to.
WANTED = "wanted"
# The size of an expansion that failed and is not retried at a stage. If the volume has that size,
# its file system or its open LUKS mapping does not.
REFUSED = "refused"
# Of a snapshot: its source's logical volume; its time (nanoseconds of the epoch), for people; its
# number in the order of the group's snapshots.
SOURCE = "source"
TIME = "time"
SEQUENCE = "sequence"
# Of a snapshot of a group snapshot: its id, its number of snapshots, the request;
GROUP_SNAPSHOT = "groupSnapshot"
MEMBERS = "members"
ASKED = "asked"
# the volume groups of its snapshots; and once all are taken, COMMITTED.
MEMBER_GROUPS = "memberGroups"
COMMITTED = "committed"
# Of a received volume: the id of the sent one. While receiving: the chain that it holds, and its
# bytes; the chain that it is being brought to, and the bytes received; the digest of the word that
# is needed to finish it; that it is being finished.
RECEIVED = "received"
CHAIN = "chain"
CONTENT = "content"
INTO = "into"
OFFSET = "offset"
RELEASE = "release"
FINISHING = "finishing"
# Afterwards: the word itself.
RELEASED = "released"
# Of a volume that is being or was moved: the node that it goes to, and the word that releases it.
MOVE_TO = "moveTo"
MOVE_WORD = "moveWord"
# Of what a move left here: it is being deleted, and may be incomplete.
MOVE_ENDED = "moveEnded"
# Set by an operator: erase a deleted volume without waiting for its missing disks.
GIVEN_UP = "givenUp"
# Of a volume that Carver did not make: its name before it was adopted.
ADOPTED = "adopted"
# Of what has a property without which a version of Carver that does not know it would do harm: the
# names of these properties, with commas. Other keys that a version does not know it passes over.
NEEDS = "needs"
# Those that this version knows.
KNOWN_NEEDS: frozenset[str] = frozenset()
# Of a group: lvm.report derives from them which disks are unclean.
SWEEP, SWEEP_DISKS, BETWEEN = report.SWEEP, report.SWEEP_DISKS, report.BETWEEN
# Of a group, while a disk is replaced: both disks' UUIDs, and the extents allocated on the new one
# once all of the old one lies there, if no earlier move left data on it.
FILLED = "filled"

# Values of STATE (agent/volumes/volume_states.py).
READY = "ready"
COPYING = "copying"
WIPING = "wiping"
RECEIVING = "receiving"
MOVED = "moved"

# Of a thin snapshot: Carver activated it for reading, and deactivates it afterwards.
ACTIVATED = "activated"

# Of a pool, beside STATE and CLASS; it has no NAME.
CHUNK = "chunk"
# Of a pool: it grew into extents that were not overwritten yet; what is free after it must be.
UNCLEAN = "unclean"
# Of a pool: its metadata snapshot, if any, is Carver's.
METADATA_SNAPSHOT = "metadataSnapshot"


def require_fits(field: str, key: str, text: str) -> None:
    """Raise BadField, of this field, for a value that no LVM tag can hold."""
    if not tags.fits(key, text):
        raise errors.BadField(field, "is too long to be kept in an LVM tag")
