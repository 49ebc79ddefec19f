"""Errors that Carver itself raises; agent/core/codes.py gives each its gRPC status code."""

from collections.abc import Iterable

from lvm.groups import VGEXTEND
from mount.text import counted

# Advice in error messages: how a user has a volume unstaged. A rollout of the Deployment is not
# enough: the new pod starts before the old pod is gone, so kubelet does not unstage the volume.
UNSTAGE = (
    "scale what uses it to 0 and wait until it is unstaged (by hand: `carver volume unpublish`)"
)
# Advice in error messages: how a user has an encrypted volume opened again. Kubelet passes the key
# with NodeStageVolume, and with other calls only if the volume's StorageClass names a secret for
# these calls.
STAGE_WITH_KEY = (
    f"{UNSTAGE}; it is staged with its key next. Volumes of a StorageClass that names a secret for"
    " publishing, too (csi.storage.k8s.io/node-publish-secret-name and -namespace), are opened by"
    " this call"
)


class AgentError(Exception):
    """Base class of the errors in this module."""


class BadConfig(AgentError):
    """Raised when the configuration, a file that it names, or an option of a command is invalid."""

    def __init__(self, source: str, key: str, problem: str) -> None:
        super().__init__(f"{source}: {key}: {problem}")
        self.key = key


class BadField(AgentError):
    """Raised when a field of a request is missing or invalid."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class Missing(BadField):
    """Raised when a required field of a request is empty."""

    def __init__(self, field: str) -> None:
        super().__init__(field, "is required")


class NotAllowed(BadField):
    """Raised when the value of a request's field is not one of the field's allowed values."""

    def __init__(self, field: str, value: object, allowed: Iterable[object]) -> None:
        allowed_values = ", ".join(str(value) for value in allowed)
        super().__init__(field, f"{value!r} is not allowed; allowed: {allowed_values}")


class BadSize(AgentError):
    """Raised when no amount of free space can satisfy the capacity range in a request."""


class NoSuchVolume(AgentError):
    """Raised when a volume that a call names certainly does not exist on this node.

    Its absence is proved, the id is none of Carver's, or the volume is deleted and only has to be
    erased.
    """

    def __init__(self, volume_id: str) -> None:
        super().__init__(f"there is no volume {volume_id!r} on this node")


class NoSuchSnapshot(AgentError):
    """Raised when a snapshot that a call names certainly does not exist on this node.

    Temporary snapshots, and the snapshots of an incomplete group snapshot, count as absent.
    """

    def __init__(self, snapshot_id: str) -> None:
        super().__init__(f"there is no snapshot {snapshot_id!r} on this node")


class AbsenceNotProved(AgentError):
    """Raised by the command line when a volume or snapshot may be in a missing volume group.

    No present volume group has the volume or snapshot, but its absence is not proved.
    """

    def __init__(self, kind: str, name: str, reasons: Iterable[str]) -> None:
        super().__init__(
            f"cannot prove that there is no {kind} {name!r}: a missing volume group may have it:"
            f" {'; '.join(reasons)}"
        )


class NoSuchGroupSnapshot(AgentError):
    """Raised when a group snapshot that a call names certainly does not exist on this node."""

    def __init__(self, group_snapshot_id: str) -> None:
        super().__init__(f"there is no group snapshot {group_snapshot_id!r} on this node")


class NotWhole(AgentError):
    """Raised when a group snapshot is not complete on this node.

    Its other snapshots may be in volume groups that are missing now, or were deleted one by one.
    """

    def __init__(self, group_snapshot_id: str, problem: str) -> None:
        super().__init__(f"group snapshot {group_snapshot_id!r} is not whole here: {problem}")


class NoSuchPath(AgentError):
    """Raised when a volume is neither mounted nor published at the path in a request."""

    def __init__(self, volume_id: str, path: str) -> None:
        super().__init__(f"volume {volume_id!r} is not mounted or published at {path!r}")


class Incompatible(AgentError):
    """Raised when an existing object or mount has the requested name or path, but differs."""


class AttachedOtherwise(Incompatible):
    """Raised when a volume is attached already, with other access than a request needs.

    The volume has another access mode, or is attached read-only and the request wants to write to
    it.
    """

    def __init__(self, volume_id: str, attachment: object, requested: object) -> None:
        super().__init__(
            f"cannot attach volume {volume_id!r} as {requested}: it is attached as {attachment};"
            " detach it first: scale what uses it to 0 and wait until its VolumeAttachment is gone"
        )


class NoSuchNode(AgentError):
    """Raised when a volume is to be attached to a node that this service does not know.

    A node's service knows its own node only.
    """

    def __init__(self, node_id: str, known_nodes: str) -> None:
        super().__init__(f"node_id: there is no node {node_id!r}: {known_nodes}")


class AttachedElsewhere(AgentError):
    """Raised when a volume is to be attached to another node than the node whose disks hold it."""

    def __init__(self, volume_id: str, node_id: str, owner: str) -> None:
        super().__init__(
            f"cannot attach volume {volume_id!r} to node {node_id!r}: it is on the disks of node"
            f" {owner!r}, and can be used there only; schedule its pods to that node"
        )


class TooManyAttached(AgentError):
    """Raised when the node has as many attached volumes as `max_volumes_per_node` allows."""

    def __init__(self, volume_id: str, node_id: str, limit: int) -> None:
        super().__init__(
            f"cannot attach volume {volume_id!r}: node {node_id} has {counted(limit, 'volume')}"
            " attached, as many as max_volumes_per_node allows; wait until one is detached, or have"
            " an operator raise it"
        )


class OtherGroup(AgentError):
    """Raised when a volume id names a volume group that is absent, or present with another UUID."""

    def __init__(self, volume_id: str, problem: str) -> None:
        super().__init__(f"volume {volume_id!r} is not this node's: {problem}")


class ExcludedByTopology(AgentError):
    """Raised when the topology in a request excludes this node."""

    def __init__(self, node_id: str) -> None:
        super().__init__(
            f"accessibility_requirements: none of the topologies includes this node ({node_id})"
        )


class GroupBusy(AgentError):
    """Raised when a call needs a volume group that is locked for too long or does not answer."""

    def __init__(self, lock_name: str, problem: str) -> None:
        super().__init__(f"{lock_name}: {problem}; call again")


class GroupSilent(AgentError):
    """Raised when a disk that may belong to a volume group does not respond to reads."""

    def __init__(self, group: str, disks: Iterable[str]) -> None:
        super().__init__(
            f"cannot find volume group {group}: {', '.join(disks)} may belong to it, and do not"
            " answer; see `dmesg`, and detach broken disks"
        )


class PoolSilent(AgentError):
    """Raised when the kernel does not report in time how full a thin pool is.

    No volume is created in the pool then.
    """

    def __init__(self, group: str, pool: str, seconds: float) -> None:
        super().__init__(
            f"cannot read how full thin pool {group}/{pool} is: the kernel has not answered for"
            f" {seconds:.0f} s, as when a disk below does not answer; see `dmesg`, and call again"
        )


class GroupAwaited(AgentError):
    """Raised while Carver has yet to create a volume group, or to attach the loop device below it.

    Carver does both after its start, and after each reload of its configuration.
    """

    def __init__(self, group: str) -> None:
        super().__init__(
            f"cannot use volume group {group} yet: Carver has just started, and creates it or"
            " attaches its file; call again"
        )


class PerhapsOnAnotherNode(AgentError):
    """Raised when a volume cannot be created on this node, but perhaps on another node.

    The volume group or the source of the volume cannot be used on this node.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(f"cannot create the volume on this node: {problem}")


class NoRoom(AgentError):
    """Raised when a volume group cannot allocate what is requested now.

    The group has too few free extents, or takes no new volume, for instance while a disk is
    missing.
    """

    def __init__(
        self, group: str, requested_bytes: int, available_bytes: int, purpose: str
    ) -> None:
        super().__init__(
            f"volume group {group} has room for {available_bytes} bytes {purpose},"
            f" {requested_bytes} were asked"
        )


class NoSuchDisk(AgentError):
    """Raised when a disk that a request names is in no configured volume group."""

    def __init__(
        self, disk: str, present_disks: Iterable[str], missing_disks: Iterable[str]
    ) -> None:
        missing_ones = f"; missing are {', '.join(missing_disks)}" if missing_disks else ""
        super().__init__(
            f"cannot find disk {disk}: the configured groups have {', '.join(present_disks)}"
            f"{missing_ones}; name a missing one by its UUID"
        )


class DiskTooSmall(AgentError):
    """Raised when a new disk has too few extents to replace another disk."""

    def __init__(self, disk: str, size_bytes: int, needed_bytes: int) -> None:
        super().__init__(
            f"cannot use disk {disk}: it has room for {size_bytes} bytes, and {needed_bytes} lie on"
            " the disk to be replaced; take a larger one, or move volumes to another node first"
            " (`carver volume move`)"
        )


class WouldBeLost(AgentError):
    """Raised when the removal of a disk from its volume group would lose volumes."""

    def __init__(self, disk: str, volumes: Iterable[str], waiting: Iterable[str]) -> None:
        reasons = []
        if volumes:
            reasons.append(
                f"{', '.join(volumes)} lie on it alone: attach it again; if it is lost for good,"
                " `A disk is replaced` in docs/operations.md says what to do"
            )
        if waiting:
            reasons.append(
                f"{', '.join(waiting)} are deleted and wait to be overwritten: attach it again, or"
                " give that up (`A disk is replaced` in docs/operations.md)"
            )
        super().__init__(f"cannot remove disk {disk}: {'; '.join(reasons)}")


class NotRepairable(AgentError):
    """Raised when a RAID volume or a thin pool cannot be repaired, or a disk cannot be replaced.

    Nothing was changed, unless the message says that a pool is damaged even after the repair.
    """

    def __init__(self, volume: str, reason: str) -> None:
        super().__init__(f"cannot repair {volume}: {reason}")


class ImagesDiffer(AgentError):
    """Raised when a repair would overwrite differing images of a RAID without a confirmation.

    Nothing was changed. The message names the field of the call, by which a client recognizes the
    error.
    """

    FIELD = "differing_images"

    def __init__(self, volume: str, sectors: int) -> None:
        super().__init__(
            f"cannot repair {volume}: its images differ in {counted(sectors, 'sector')}, and which"
            " of them is right is not known. Compare the data with a backup, then confirm that"
            " images may be overwritten: with `carver volume repair` of the service's version, or"
            f" `{self.FIELD}` in the call"
        )


class InlineTotal(AgentError):
    """Raised when all inline volumes of the node would together exceed `inline_total_limit`."""

    def __init__(self, requested_bytes: int, present_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"this node's inline volumes take {present_bytes} bytes of its volume groups, this one"
            f" would take {requested_bytes} more (with the copies or parity of its class), and"
            f" inline_total_limit is {limit_bytes} bytes; use a claim instead, or have an operator"
            " raise it"
        )


class TooLarge(AgentError):
    """Raised when the volume group has no room for a volume to grow."""

    def __init__(self, volume_id: str, problem: str) -> None:
        self.problem = problem
        super().__init__(
            f"cannot grow volume {volume_id!r}: {problem}; ask for less, or make room"
            f" (`{VGEXTEND}`)"
        )


class CannotGrow(AgentError):
    """Raised when a volume in use, its file system or its LUKS mapping cannot grow.

    The volume is used with its present size.
    """

    def __init__(self, volume_id: str, problem: str) -> None:
        super().__init__(
            f"cannot grow volume {volume_id!r}: {problem}; it is used with the size that it has."
            " Make room, or remove the cause, and have it unstaged and staged again (scale to 0 and"
            " wait), or lower the claim's request"
        )


class VolumeInUse(AgentError):
    """Raised when a volume is open, mounted or published on this node, or is being copied."""

    def __init__(self, volume_id: str, users: str) -> None:
        super().__init__(f"volume {volume_id!r} is in use: {users}")


class NotOverwritten(AgentError):
    """Raised when deleted data cannot be overwritten yet; its extents are kept, and not reused.

    The extents are those of a deleted volume, or are reserved for the growth of a volume.
    """

    def __init__(self, volume_id: str, reason: str) -> None:
        super().__init__(f"cannot overwrite all of volume {volume_id!r}: {reason}")


class FreeExtentsNotErased(AgentError):
    """Raised when a volume group's free extents cannot be overwritten yet.

    These extents cannot be allocated before that.
    """

    def __init__(self, group: str, reason: str) -> None:
        super().__init__(f"cannot overwrite the free extents of volume group {group} yet: {reason}")


class HasSnapshots(AgentError):
    """Raised when an operation is refused while the volume has copy-on-write snapshots."""

    def __init__(self, volume_id: str, snapshots: Iterable[str], problem: str) -> None:
        super().__init__(
            f"volume {volume_id!r} has the snapshots {', '.join(snapshots)}: {problem}"
        )


class GrowsLater(AgentError):
    """Raised when a volume cannot grow before it is staged next.

    The reason is that the volume is in use and has copy-on-write snapshots.
    """

    def __init__(
        self, volume_id: str, wanted_bytes: int, snapshots: Iterable[str], users: str
    ) -> None:
        super().__init__(
            f"volume {volume_id!r} has the snapshots {', '.join(snapshots)}, and with them it grows"
            f" only while it is not in use ({users}). Its new size, {wanted_bytes} bytes, is"
            f" recorded: it grows when it is staged next, so {UNSTAGE}"
        )


class NotSnapshotted(AgentError):
    """Raised when lvm2 cannot take a snapshot of a volume, because of the volume's cache."""

    def __init__(self, volume_id: str, reason: str) -> None:
        super().__init__(f"cannot take a snapshot of volume {volume_id!r}: {reason}")


class PartOfGroup(AgentError):
    """Raised when a snapshot is to be deleted alone, although it is part of a group snapshot."""

    def __init__(self, snapshot_id: str, group_snapshot_id: str) -> None:
        super().__init__(
            f"snapshot_id: cannot delete {snapshot_id!r} alone: it is a part of group snapshot"
            f" {group_snapshot_id!r}; call DeleteVolumeGroupSnapshot"
        )


class NotTogether(AgentError):
    """Raised when one of several volumes cannot be quiesced together with the others."""

    def __init__(self, volume_id: str, reason: str) -> None:
        super().__init__(
            f"source_volume_ids: cannot quiesce volume {volume_id!r} together with the others:"
            f" {reason}"
        )


class QuiesceOver(AgentError):
    """Raised when quiesced volumes were resumed before the last snapshot of them was taken.

    No snapshot is kept then.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"cannot snapshot the volumes together: it took longer than the {seconds:g} s for which"
            " they are quiesced, and no snapshot is kept; call again. If it stays, find out why"
            " lvm2 is slow, or name fewer volumes"
        )


class NotStaged(AgentError):
    """Raised when a volume must be staged, or be staged anew, before the requested operation."""

    def __init__(self, volume_id: str, problem: str, remedy: str) -> None:
        super().__init__(f"volume {volume_id!r} is not staged: {problem}; {remedy}")


class ContentsLost(AgentError):
    """Raised when a formatted volume's file system is not found.

    The volume is not formatted again.
    """

    def __init__(self, volume_id: str, fs_type: str, device: str) -> None:
        super().__init__(
            f"cannot mount volume {volume_id!r}: it was formatted with {fs_type}, which is not"
            f" found on {device}: its beginning was overwritten. It is left as it is: copy the"
            f" device, try to repair the copy, or restore the data from a backup to another volume"
        )


class KeyMissing(AgentError):
    """Raised when a call has no key for an encrypted volume; nothing was changed.

    `removed_class` is the volume's device class if the configuration has no such class any more,
    else empty.
    """

    def __init__(self, volume_id: str, removed_class: str = "") -> None:
        class_sentence = (
            f" The configuration has no class {removed_class!r} any more, which may have had a"
            " key_file"
        )
        super().__init__(
            f"cannot open volume {volume_id!r}: it is encrypted, and there is no key for it;"
            " have the StorageClass name a secret with `passphrase`"
            " (csi.storage.k8s.io/node-stage-secret-name and -namespace), or its class a"
            " key_file; by hand, `carver volume publish --key-file`"
            f"{f'.{class_sentence}' if removed_class else ''}"
        )


class HeaderDamaged(AgentError):
    """Raised when a volume's LUKS2 header is missing, incomplete or another volume's.

    No new header is written.
    """

    def __init__(self, volume_id: str, problem: str) -> None:
        super().__init__(
            f"volume {volume_id!r} is encrypted, and {problem}; without its header its data cannot"
            " be read. It is left as it is: restore the header (`carver volume header restore`), or"
            " the data from a backup to another volume"
        )


class GrowsWithKey(AgentError):
    """Raised when a dm-crypt device in use cannot grow because the call has no key.

    The logical volume below the dm-crypt device has grown already.
    """

    def __init__(self, volume_id: str) -> None:
        super().__init__(
            f"volume {volume_id!r} is encrypted, and grows in use with its key only: have the"
            " StorageClass name a secret for that, too (csi.storage.k8s.io/node-expand-secret-name"
            " and -namespace), or by hand `carver volume expand --key-file`. It grows in any case"
            f" when it is staged next: {UNSTAGE}"
        )


class OperationPending(AgentError):
    """Raised when another call, or background work, on the same volume or path is in progress."""

    def __init__(self, name: str) -> None:
        super().__init__(f"another call on {name!r} is in progress")


class StillAtWork(OperationPending):
    """Raised when the mkfs or fsck that an earlier call started is still running."""

    def __init__(self, volume_id: str, task: str, seconds: float) -> None:
        # Skip the constructor of OperationPending: its message says that another call is in
        # progress.
        AgentError.__init__(
            self,
            f"{task} of volume {volume_id!r} has run for {seconds:.0f} s and goes on; call again",
        )


class Copying(AgentError):
    """Raised when a volume cannot be used, or cannot grow, because a copy is in progress.

    The volume's contents are being copied, or are being zeroed; or the volume is the source of a
    copy.
    """

    def __init__(self, volume_id: str, progress: str) -> None:
        super().__init__(f"volume {volume_id!r} is being copied: {progress}; call again")


class Reencrypting(AgentError):
    """Raised when a volume's LUKS2 header says that a re-encryption was begun and has not ended.

    Versions up to 0.2.0 had cryptsetup re-encrypt a copy before its first use.
    """

    def __init__(self, volume_id: str, device: str) -> None:
        super().__init__(
            f"volume {volume_id!r} cannot be opened: its LUKS2 header says that a re-encryption was"
            " begun and has not ended; finish the re-encryption on this node with the volume's key:"
            f" `cryptsetup reencrypt --resume-only {device}`, and before it `cryptsetup repair"
            f" {device}` where cryptsetup asks for a repair; then stage the volume again"
        )


class Unfinished(AgentError):
    """Raised when a call failed after it created, or may have created, part of an object.

    The object is a volume or a snapshot. The part is kept; only a further call completes the
    object.
    """

    def __init__(self, operation: str, reason: str) -> None:
        super().__init__(
            f"cannot complete {operation} yet: {reason}; what is there of it is kept for the next"
            " call: call again"
        )


class Overwriting(AgentError):
    """Raised when a volume cannot grow yet: the extents for its growth are being overwritten."""

    def __init__(self, volume_id: str, progress: str) -> None:
        super().__init__(
            f"volume {volume_id!r} grows when what it grows by is overwritten: {progress}; call"
            " again"
        )


class SourceLost(AgentError):
    """Raised when a snapshot that is to be copied, sent or compared has lost its data.

    Also raised when the temporary snapshot that a volume is copied from is gone.
    """

    def __init__(self, source_id: str, problem: str) -> None:
        super().__init__(f"cannot create a volume from {source_id!r}: {problem}")


class Receiving(AgentError):
    """Raised when a volume cannot be used yet because it is being received as a stream."""

    def __init__(self, volume_id: str) -> None:
        super().__init__(
            f"cannot use volume {volume_id!r}: it is being received;"
            " `carver volume receive NAME --status` shows the progress, --finish completes it,"
            " --abort removes it"
        )


class NotReceived(AgentError):
    """Raised when a stream cannot be received, or a received volume cannot be finished.

    Nothing was changed.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"cannot receive {name!r}: {reason}")


class NeedsOther(AgentError):
    """Raised when a volume, snapshot or pool has properties that only a newer Carver knows."""

    def __init__(self, identity: str, unknown: Iterable[str]) -> None:
        super().__init__(
            f"cannot use {identity!r}: a newer version of Carver made it, with"
            f" {', '.join(sorted(unknown))}, which this version does not know and leaves alone;"
            " use that version or a newer one on this node"
        )


class TagsDamaged(AgentError):
    """Raised when the tags of a volume or snapshot are such as no version of Carver writes.

    Tags were lost, or changed by hand.
    """

    def __init__(self, identity: str, faults: Iterable[str]) -> None:
        super().__init__(
            f"cannot use {identity!r}: tags of it were lost, or changed by hand:"
            f" {', '.join(sorted(faults))}. It is left alone; see `lvs -o +tags`, and put them"
            " right with `lvchange --addtag` and `--deltag`"
        )


# Errors that say that Carver must not use a volume or snapshot, until a person mends its tags or a
# newer version of Carver runs.
MUST_NOT_USE = (NeedsOther, TagsDamaged)


class LayoutUnknown(AgentError):
    """Raised when a volume's layout is not in lvm2's report, or is none that Carver makes."""

    def __init__(self, volume_id: str, text: str, words: Iterable[str]) -> None:
        tagged = f"its tag `layout` is {text!r}" if text else "its tag `layout` is lost"
        super().__init__(
            f"cannot tell how volume {volume_id!r} lies on its disks: {tagged}, and lvm2 reports"
            f" {', '.join(words) or 'nothing of it'}; it is used as it is, and not changed. Use a"
            " version of Carver that knows the layout, or, of a volume with a cache, give it the"
            " tag that another volume of its class has (`lvs -o +lv_tags`, `lvchange --addtag`);"
            " one that was converted by hand is extended by hand (`lvextend`)"
        )


class Moved(AgentError):
    """Raised when a volume cannot be used: it was, or is being, moved to another node."""

    def __init__(self, volume_id: str, node: str, reason: str = "was moved") -> None:
        super().__init__(
            f"cannot use volume {volume_id!r}: it {reason} to {node}; `carver volume move NAME"
            " --status` shows the progress, --finish deletes what is left here, --undo takes it"
            " back"
        )


class Moving(AgentError):
    """Raised when a volume cannot be removed from a node because it moves to another node.

    Nothing was changed. The other node may have received a part of the volume, which only the end
    of the move removes.
    """

    def __init__(self, volume_id: str, node: str) -> None:
        super().__init__(
            f"cannot remove volume {volume_id!r}: it moves to {node}; end the move first, by"
            " `carver volume move NAME --undo` here, which removes what the other node has"
            " received, then call again. An evacuation by the controller does that by itself once"
            " the claim is deleted"
        )


class NotMoved(AgentError):
    """Raised when a volume's move to another node cannot be begun or ended; nothing was changed."""

    def __init__(self, volume: str, reason: str) -> None:
        super().__init__(f"cannot move {volume!r}: {reason}")


class NotAdopted(AgentError):
    """Raised when a logical volume cannot be adopted, or its adoption cannot be undone.

    Nothing was changed.
    """

    def __init__(self, volume: str, reason: str, *, undo: bool = False) -> None:
        verb = "undo the adoption of" if undo else "adopt"
        super().__init__(f"cannot {verb} {volume}: {reason}")


class BadStream(AgentError):
    """Raised when a stream is malformed, altered or of another version.

    The valid part of the stream, which came before the fault, is kept.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"cannot use the stream: {reason}")


class TransferFailed(AgentError):
    """Raised by the command line when a device failed, or the other end of a stream is gone."""

    def __init__(self, operation: str, reason: str) -> None:
        super().__init__(f"{operation}: {reason}")


class NodeRefused(AgentError):
    """Raised when the other node of a move is unreachable or refuses."""

    def __init__(self, node: str, words: str, reason: str) -> None:
        super().__init__(f"{node}: `{words}`: {reason}")


class NotGranted(AgentError):
    """Raised when a node asks for a volume's stream without a valid grant of the controller."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"cannot send the volume: {why}. The controller asks for a new grant itself"
        )


class TooManyStreams(AgentError):
    """Raised when as many streams to or from other nodes are under way as the limit allows."""

    def __init__(self, kind: str, limit: int) -> None:
        super().__init__(f"cannot serve {kind}: the limit of {counted(limit, 'call')} is reached")


class StreamEnded(BadStream):
    """Raised when a stream ends before its end mark."""

    def __init__(self, read_bytes: int) -> None:
        super().__init__(
            f"it ends after {read_bytes} bytes, before its end mark; send it again, from the offset"
            " that `carver volume receive NAME --status` shows"
        )


class NotComparable(AgentError):
    """Raised when the changes between two snapshots cannot be listed.

    The snapshots are of different volumes, or the base was taken later or is larger than the
    target.
    """

    def __init__(self, base_id: str, target_id: str, reason: str) -> None:
        super().__init__(f"cannot compare {base_id!r} with {target_id!r}: {reason}")


class BlocksUnknown(AgentError):
    """Raised when the allocated or changed blocks of an encrypted volume cannot be determined."""

    def __init__(self, identity: str, reason: str, remedy: str) -> None:
        super().__init__(
            f"cannot list allocated or changed blocks of {identity!r}, which is encrypted:"
            f" {reason}; {remedy}"
        )


class OffsetOutOfRange(AgentError):
    """Raised when the starting offset in a request is negative, or beyond the snapshot's end."""

    def __init__(self, offset_bytes: int, size_bytes: int | None = None) -> None:
        allowed = (
            "negative" if size_bytes is None else f"more than the {size_bytes} bytes there are"
        )
        super().__init__(f"starting_offset: {offset_bytes} is {allowed}")


class MetadataReserved(AgentError):
    """Raised when another program holds the only metadata snapshot that a thin pool can have."""

    def __init__(self, group: str, pool: str) -> None:
        super().__init__(
            f"cannot read the metadata of thin pool {group}/{pool}: another program holds a"
            " metadata snapshot; wait until it ends, or if none does (`dmsetup status`), run"
            " `dmsetup message … 0 release_metadata_snap`"
        )


class NotWanted(AgentError):
    """Raised when the caller of an RPC no longer waits for the response."""

    def __init__(self, operation: str) -> None:
        super().__init__(f"the caller no longer waits for {operation}")


class BadToken(AgentError):
    """Raised when the starting_token of a list request was not made by this plugin."""

    def __init__(self, token: str) -> None:
        super().__init__(
            f"starting_token: {token!r} is not a token of this plugin; list anew without one"
        )


class Starting(AgentError):
    """Raised after Carver's start, before lvm2 has first reported what is on this node."""

    def __init__(self, seconds: float, problem: Exception | None) -> None:
        why = "it has not answered yet" if problem is None else str(problem)
        super().__init__(
            f"Carver waits for lvm2 since its start {seconds:.0f} s ago: {why}; call again"
        )


class TooManyCalls(AgentError):
    """Raised when as many calls are in progress as the limit for a volume group allows.

    With `group` empty, the limit is that for all volume groups together.
    """

    def __init__(self, places: int, group: str = "") -> None:
        scope = f"volume group {group}" if group else "volume groups"
        super().__init__(
            f"{places} calls are at work on {scope} already; call again. If it stays, look for a"
            " disk that does not answer"
        )


class NotReady(AgentError):
    """Raised when something that Carver needs on the node is missing or unusable.

    Examples are a device, a key file, and the directory of a file below a volume group.
    """


class GroupRefused(NotReady):
    """Raised when a volume group must not be used, or could not be created.

    For instance, the group is another node's, or there are several groups of its name.
    """

    def __init__(self, group: str, reason: str) -> None:
        super().__init__(f"volume group {group} is not used: {reason}")
        self.group = group


class SocketTaken(AgentError):
    """Raised when Carver cannot serve its Unix socket.

    Another process serves the socket, or a file that is no socket is at the path.
    """


class SocketGone(AgentError):
    """Raised when Carver's Unix socket was deleted or replaced, so that no call arrives."""

    def __init__(self, path: object) -> None:
        super().__init__(
            f"cannot serve {path}: it was deleted or replaced; exiting, to be restarted"
        )


class NotServed(AgentError):
    """Raised by the command line when no service answers at the Unix socket."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(
            f"no Carver answers at {endpoint}; start it (systemctl start carver), see why it ended"
            " (journalctl --unit carver), or name its socket with --endpoint"
        )


class NotPermitted(AgentError):
    """Raised when a command needs root, and its user is not root."""

    def __init__(self, action: str, alternative: str = "") -> None:
        super().__init__(f"only root may {action}: run it as root (sudo){alternative}")


class CallRefused(AgentError):
    """Raised by the command line when the service refused a call."""

    def __init__(self, code: str, message: str) -> None:
        # gRPC itself sends this message when an older service does not know the method.
        is_unknown = code == "UNIMPLEMENTED" and message == "Method not found!"
        remedy = "; use the command and the service of the same version" if is_unknown else ""
        super().__init__(f"{message} ({code}){remedy}")


class NotPublished(AgentError):
    """Raised by the command line when a volume is not in use, and volumes grow only in use."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"cannot expand volume {name!r}: it is not in use, and with controller_expand = false a"
            " volume grows only in use; publish it, then expand it"
        )


class ClusterSilent(AgentError):
    """Raised when the cluster's objects, or its nodes' volumes, could not all be listed.

    The absence of an object is not proved then. `is_refusal` tells whether the API server answered
    with a refusal, which it would repeat.
    """

    def __init__(self, request: str, problem: str, *, is_refusal: bool = False) -> None:
        self.is_refusal = is_refusal
        self.problem = f"{request}: {problem}"
        super().__init__(
            f"cannot list what the cluster needs: {self.problem}; nothing counts as an orphan,"
            " and nothing was changed"
        )


class ClusterRefused(AgentError):
    """Raised when the API server did not answer, or refused a request about one object.

    `reason` is the API's word for a refusal, such as AlreadyExists, or empty if the API server gave
    none. `is_refusal` tells whether the API server answered with a refusal, which it would repeat.
    """

    def __init__(
        self, method: str, path: str, problem: str, reason: str = "", *, is_refusal: bool = False
    ) -> None:
        self.reason, self.is_refusal = reason, is_refusal
        super().__init__(f"the API server: {method} {path}: {problem}")


class NotRebound(AgentError):
    """Raised when a claim cannot be bound to the moved volume; the steps done so far are kept."""

    def __init__(self, claim: str, reason: str) -> None:
        super().__init__(f"cannot rebind claim {claim}: {reason}")


class ClaimEnded(NotRebound):
    """Raised when a claim cannot be made anew, because its namespace is being deleted or is gone.

    The claim was deleted for the rebinding, or with its namespace. The moved volume has not been
    used since, so the rebinding and the move can be undone.
    """


class NoOrphan(AgentError):
    """Raised when an object that a command is to delete is not proved to be an orphan.

    The object is in use, or it has not been an orphan for the whole grace period.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"cannot delete {name!r}: {reason}")


class NotConfirmed(AgentError):
    """Raised when the user of a command did not confirm its action, such as a deletion."""

    def __init__(self, name: str, action: str = "deleted") -> None:
        super().__init__(f"{name!r} is not {action}: not confirmed; answer yes, or give --yes")
