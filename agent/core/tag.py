"""Keys of Carver's own LVM tags, and the values of those that are an enumeration."""

from lvm import report

# NAME is on every volume of Carver's, and on no other.
NAME = "name"
STATE = "state"
SIZE = "size"
ACCESS = "access"
CAPABILITIES = "capabilities"
FORMATTED = "formatted"
EPHEMERAL = "ephemeral"
TARGET = "target"
LAYOUT = "layout"
# What it was made with, by the keys of its class's parameters; and so are ENCRYPTION and REENCRYPT.
CLASS = "class"
FS_TYPE = "fsType"
MKFS_OPTIONS = "mkfsOptions"
MOUNT_OPTIONS = "mountOptions"
# What Kubernetes told of whom it is for.
PV = "pv"
PVC = "pvc"
NAMESPACE = "namespace"
POD = "pod"
POD_UID = "podUid"
CACHE = "cache"
# Of a volume of which no sector may show what was there before: FULLY.
ZERO = "zero"
FULLY = "fully"
# Of a volume that lies encrypted in its logical volume: LUKS2; how many bytes of that are the
# header's; and, once there is a header, its UUID.
ENCRYPTION = "encryption"
HEADER = "header"
SEALED = "sealed"
# The same: copies get a master key of their own.
REENCRYPT = "reencrypt"
# The same: the word by which its secret calls the key that opens it, and no other key does but
# those for recovery; and, from before its key is changed until that is proved, ROTATING.
KEY_GENERATION = "keyGeneration"
ROTATING = "rotating"
OF_KEYS = (KEY_GENERATION, ROTATING)
# Of one that was copied, and has its source's master key still: it is to get its own.
SHARED_KEY = "sharedKey"
# The same, of a copied btrfs: it has an id of its own.
RENEWED = "renewed"
# Of a volume whose file system met an error: it is unmounted, checked and mounted anew where it is
# staged, and nobody uses it until that is done.
REMOUNT = "remount"
# Of a volume that was made of something: the id of that.
FROM = "from"
# Of one that was copied from a snapshot taken for just that: when it was (as TIME).
BRIDGE = "bridge"
# Of a volume that could not grow when it was asked to: the bytes that it grows to.
WANTED = "wanted"
# The same, of one that grows when a call asks for it and not at a stage. If it has that size, its
# file system or its open LUKS mapping does not.
REFUSED = "refused"
# Of a snapshot: the logical volume it was taken of, and when (nanoseconds of the epoch), which is
# for people; and its number in the order in which the group's snapshots were taken.
SOURCE = "source"
TIME = "time"
SEQUENCE = "sequence"
# Of a snapshot of a group: the group snapshot's id, how many snapshots it has, what was asked for.
GROUP_SNAPSHOT = "groupSnapshot"
MEMBERS = "members"
ASKED = "asked"
# The same: the groups that its snapshots are in; and, once all of them are taken, that they were.
MEMBER_GROUPS = "memberGroups"
COMMITTED = "committed"
# Of a volume that came as a stream: the volume that it is of. While it comes, moreover: the chain
# that it holds, with its bytes; the chain that it is being brought to, and up to which byte it is;
# the digest of the word without which it is not finished; that it is being finished.
RECEIVED = "received"
CHAIN = "chain"
CONTENT = "content"
INTO = "into"
OFFSET = "offset"
RELEASE = "release"
FINISHING = "finishing"
# Afterwards: the word itself.
RELEASED = "released"
# Of a volume that is being moved, or was: the node that it goes to, and the word that releases it.
MOVE_TO = "moveTo"
MOVE_WORD = "moveWord"
# Of what such a move left here: it is being deleted, and perhaps not whole any more.
MOVE_ENDED = "moveEnded"
# Put there by an operator: what of a deleted volume lies on missing disks is not waited for.
GIVEN_UP = "givenUp"
# Of a group: see lvm.report, which tells by them which disks are unclean.
SWEEP, SWEEP_DISKS, BETWEEN = report.SWEEP, report.SWEEP_DISKS, report.BETWEEN

# What STATE may say.
READY = "ready"
COPYING = "copying"
WIPING = "wiping"
RECEIVING = "receiving"
MOVED = "moved"

# Of a thin snapshot: Carver activated it to be read, and deactivates it afterwards.
ACTIVATED = "activated"

# Of a pool, beside its state and its class; it has no name of a caller's.
CHUNK = "chunk"
# Of a pool: its metadata snapshot, if it has one, is Carver's.
METADATA_SNAPSHOT = "metadataSnapshot"
