"""What can be wrong with a request, or with the state it meets."""

from collections.abc import Iterable

# A new pod that comes before the old one is gone, as in a rollout, unstages nothing.
UNSTAGE = (
    "scale what uses it to 0 and wait until it is unstaged (by hand: `carver volume unpublish`)"
)


class AgentError(Exception):
    """Any refusal that this package decides."""


class BadConfig(AgentError):
    """The configuration is not usable; nothing was started."""

    def __init__(self, source: str, key: str, problem: str) -> None:
        super().__init__(f"{source}: {key}: {problem}")
        self.key = key


class BadField(AgentError):
    """A field of a request is missing or wrong."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class Missing(BadField):
    """A required field is empty."""

    def __init__(self, field: str) -> None:
        super().__init__(field, "is required")


class NotAllowed(BadField):
    """A value outside a known set."""

    def __init__(self, field: str, value: object, allowed: Iterable[object]) -> None:
        known = ", ".join(str(one) for one in allowed)
        super().__init__(field, f"{value!r} is not allowed; allowed: {known}")


class BadSize(AgentError):
    """A capacity range that cannot be met by any amount of free space."""


class NoSuchVolume(AgentError):
    """The volume is not there, and a report of its group proves it."""

    def __init__(self, volume_id: str) -> None:
        super().__init__(f"there is no volume {volume_id!r} on this node")


class NoSuchSnapshot(AgentError):
    """The snapshot is not there, and a report of its group proves it."""

    def __init__(self, snapshot_id: str) -> None:
        super().__init__(f"there is no snapshot {snapshot_id!r} on this node")


class PerhapsAway(AgentError):
    """What has that name is in none of the groups that are here, and others are away."""

    def __init__(self, what: str, name: str, away: Iterable[str]) -> None:
        super().__init__(
            f"no {what} {name!r} is in the volume groups that are here, and one that is not may"
            f" have it: {'; '.join(away)}"
        )


class NoSuchGroupSnapshot(AgentError):
    """The group snapshot is not there, whole, and a report proves it."""

    def __init__(self, group_snapshot_id: str) -> None:
        super().__init__(f"there is no group snapshot {group_snapshot_id!r} on this node")


class NotWhole(AgentError):
    """A group snapshot of which a part is not here, and which may be whole for all that."""

    def __init__(self, group_snapshot_id: str, problem: str) -> None:
        super().__init__(f"group snapshot {group_snapshot_id!r} is not whole here: {problem}")


class NoSuchPath(AgentError):
    """The volume is not mounted or published at the path."""

    def __init__(self, volume_id: str, path: str) -> None:
        super().__init__(f"volume {volume_id!r} is not mounted or published at {path!r}")


class Incompatible(AgentError):
    """A volume of that name, or a mount at that path, is there and is not what was asked for."""


class OtherGroup(AgentError):
    """The volume id names a group that is not here, or is another group of the same name."""

    def __init__(self, volume_id: str, problem: str) -> None:
        super().__init__(f"volume {volume_id!r} is not this node's: {problem}")


class Elsewhere(AgentError):
    """The topology asks for other nodes only."""

    def __init__(self, node_id: str) -> None:
        super().__init__(
            f"accessibility_requirements: none of the topologies includes this node ({node_id})"
        )


class GroupBusy(AgentError):
    """Another call is at work on a volume group all the time, too many wait, or none answers."""

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(f"{what}: {problem}; call again")


class GroupSilent(AgentError):
    """A disk does not answer that may be a volume group's, so that nobody can tell."""

    def __init__(self, group: str, disks: Iterable[str]) -> None:
        super().__init__(
            f"volume group {group}: {', '.join(disks)} may be its, and do not answer; see `dmesg`,"
            " and detach what is broken"
        )


class PoolSilent(AgentError):
    """The kernel does not tell how full a thin pool is: nobody knows what may be promised."""

    def __init__(self, group: str, pool: str, seconds: float) -> None:
        super().__init__(
            f"thin pool {group}/{pool}: the kernel has not told of it for {seconds:.0f} s, as when"
            " a disk under it does not answer; look at `dmesg`, and call again"
        )


class GroupAwaited(AgentError):
    """A group that Carver makes, or whose file it attaches, is not there yet since the start."""

    def __init__(self, group: str) -> None:
        super().__init__(
            f"volume group {group} is not there yet: Carver, which was just started, makes it or"
            " attaches its file. Call again"
        )


class NotHere(AgentError):
    """What a new volume is made in, or of, is not on this node; it may be on another."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"no such volume can be made on this node: {problem}")


class NoRoom(AgentError):
    """The group cannot hold the volume."""

    def __init__(self, group: str, asked_bytes: int, available_bytes: int, purpose: str) -> None:
        super().__init__(
            f"volume group {group} has room for {available_bytes} bytes {purpose},"
            f" {asked_bytes} were asked"
        )


class NoSuchDisk(AgentError):
    """No group of Carver's has the disk."""

    def __init__(self, disk: str, present: Iterable[str], missing: Iterable[str]) -> None:
        gone = f"; missing are {', '.join(missing)}" if missing else ""
        super().__init__(
            f"{disk} is a disk of none of Carver's groups; there are {', '.join(present)}{gone}."
            " Name a missing one by its UUID"
        )


class DiskTooSmall(AgentError):
    """A disk does not hold what lies on the one in whose place it shall be."""

    def __init__(self, disk: str, size_bytes: int, needed_bytes: int) -> None:
        super().__init__(
            f"{disk} has room for {size_bytes} bytes, and {needed_bytes} lie on the disk that it"
            " shall replace; take a larger one, or delete or move volumes first"
        )


class WouldBeLost(AgentError):
    """A disk is not taken out of its group: volumes would be lost with it."""

    def __init__(self, disk: str, volumes: Iterable[str], waiting: Iterable[str]) -> None:
        told = []
        if volumes:
            told.append(
                f"{', '.join(volumes)} lie on it alone: attach it again, or delete them, and"
                " restore them from a backup"
            )
        if waiting:
            told.append(
                f"{', '.join(waiting)} are deleted and wait to be overwritten: attach it again, or"
                " give that up (`A disk is replaced` in docs/operations.md)"
            )
        super().__init__(f"disk {disk} is not taken out: {'; '.join(told)}")


class NotRepairable(AgentError):
    """A volume cannot be made whole as it is; nothing was changed."""

    def __init__(self, volume: str, why: str) -> None:
        super().__init__(f"{volume} is not repaired: {why}")


class InlineTotal(AgentError):
    """With one more, the node's inline volumes would be larger than the configuration allows."""

    def __init__(self, asked_bytes: int, there_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"this node's inline volumes have {there_bytes} bytes, {asked_bytes} more were asked,"
            f" and inline_total_limit is {limit_bytes} bytes; use a claim instead, or have an"
            " operator raise it"
        )


class TooLarge(AgentError):
    """There is no room for a volume to grow into."""

    def __init__(self, volume_id: str, problem: str) -> None:
        self.problem = problem
        super().__init__(
            f"cannot grow volume {volume_id!r}: {problem}; ask for less, or make room (`vgextend`)"
        )


class CannotGrow(AgentError):
    """A volume in use, its file system or its LUKS mapping keeps its size."""

    def __init__(self, volume_id: str, problem: str) -> None:
        super().__init__(
            f"cannot grow volume {volume_id!r}: {problem}; it is used with the size that it has."
            " Make room, or remove the cause, and have it unstaged and staged again (scale to 0 and"
            " wait), or lower the claim's request"
        )


class VolumeInUse(AgentError):
    """Something on this node has the volume open."""

    def __init__(self, volume_id: str, users: str) -> None:
        super().__init__(f"volume {volume_id!r} is in use: {users}")


class NotOverwritten(AgentError):
    """A part of a deleted volume takes no zeroes, so that the volume is kept for now."""

    def __init__(self, volume_id: str, why: str) -> None:
        super().__init__(f"volume {volume_id!r} cannot be overwritten whole: {why}")


class NotSwept(AgentError):
    """A group's free extents cannot be overwritten yet, and so are nobody's."""

    def __init__(self, group: str, why: str) -> None:
        super().__init__(f"what is free in volume group {group} waits to be overwritten: {why}")


class HasSnapshots(AgentError):
    """The volume has copy-on-write snapshots, which allow less than it would allow without them."""

    def __init__(self, volume_id: str, snapshots: Iterable[str], problem: str) -> None:
        super().__init__(
            f"volume {volume_id!r} has the snapshots {', '.join(snapshots)}: {problem}"
        )


class GrowsLater(AgentError):
    """A volume in use with copy-on-write snapshots; what it shall grow to is on record."""

    def __init__(
        self, volume_id: str, wanted_bytes: int, snapshots: Iterable[str], users: str
    ) -> None:
        super().__init__(
            f"volume {volume_id!r} has the snapshots {', '.join(snapshots)}, and with them it grows"
            f" only while it is not in use ({users}). {wanted_bytes} bytes are on record: it grows"
            f" when it is staged next, so {UNSTAGE}; or delete the snapshots and expand it again"
        )


class NotSnapshotted(AgentError):
    """A volume of which no snapshot can be taken."""

    def __init__(self, volume_id: str, why: str) -> None:
        super().__init__(f"no snapshot can be taken of volume {volume_id!r}: {why}")


class PartOfGroup(AgentError):
    """A snapshot that comes and goes with the others of its group snapshot."""

    def __init__(self, snapshot_id: str, group_snapshot_id: str) -> None:
        super().__init__(
            f"snapshot_id: {snapshot_id!r} is a part of group snapshot {group_snapshot_id!r} and"
            " goes with it; call DeleteVolumeGroupSnapshot"
        )


class NotTogether(AgentError):
    """Volumes that cannot be brought to a standstill together."""

    def __init__(self, volume_id: str, why: str) -> None:
        super().__init__(
            f"source_volume_ids: volume {volume_id!r} cannot be held while snapshots of it and of"
            f" others are taken: {why}"
        )


class StandstillOver(AgentError):
    """Volumes were let go before the last snapshot of a group was taken, so none is kept."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"the snapshots took longer than the {seconds:g} s for which volumes are held; none of"
            " them is kept. Call again; if it stays, look why lvm2 is slow, or name fewer volumes"
        )


class NotStaged(AgentError):
    """The volume must be staged first."""

    def __init__(self, volume_id: str, problem: str, remedy: str = "call NodeStageVolume") -> None:
        super().__init__(f"volume {volume_id!r} is not staged: {problem}; {remedy}")


class ContentsLost(AgentError):
    """A volume that was formatted is blank now. It is not formatted again."""

    def __init__(self, volume_id: str, fs_type: str) -> None:
        super().__init__(
            f"volume {volume_id!r} was formatted with {fs_type} and has no file system now; its"
            " data were overwritten. Restore it from a backup, or delete the volume"
        )


class KeyMissing(AgentError):
    """An encrypted volume, and nobody gave its key; nothing was changed."""

    def __init__(self, volume_id: str) -> None:
        super().__init__(
            f"volume {volume_id!r} is encrypted, and there is no key for it: have the StorageClass"
            " name a secret with `passphrase` (csi.storage.k8s.io/node-stage-secret-name and"
            " -namespace), or its class a key_file; by hand, `carver volume publish --key-file`"
        )


class HeaderDamaged(AgentError):
    """An encrypted volume whose LUKS2 header is not there, or is another. None is made anew."""

    def __init__(self, volume_id: str, problem: str) -> None:
        super().__init__(
            f"volume {volume_id!r} is encrypted, and {problem}; without its header its data cannot"
            " be read. It is left as it is: restore the header (`carver volume header restore`), or"
            " the volume from a backup, or delete it"
        )


class GrowsWithKey(AgentError):
    """The logical volume of an encrypted volume in use is larger; what is open of it is not."""

    def __init__(self, volume_id: str) -> None:
        super().__init__(
            f"volume {volume_id!r} is encrypted, and grows in use with its key only: have the"
            " StorageClass name a secret for that, too (csi.storage.k8s.io/node-expand-secret-name"
            " and -namespace), or by hand `carver volume expand --key-file`. It grows in any case"
            f" when it is staged next: {UNSTAGE}"
        )


class OperationPending(AgentError):
    """Another call on the same volume, or at the same path, has not ended."""

    def __init__(self, name: str) -> None:
        super().__init__(f"another call on {name!r} is in progress")


class StillAtWork(OperationPending):
    """What an earlier call began for the volume goes on, and has not ended."""

    def __init__(self, volume_id: str, what: str, seconds: float) -> None:
        # Not the sentence of the class above: no other call is in progress.
        AgentError.__init__(
            self,
            f"{what} of volume {volume_id!r} goes on since {seconds:.0f} s; it is not begun anew,"
            " and the next call waits for it too",
        )


class Copying(AgentError):
    """The volume's contents are being copied; it is none before that is done."""

    def __init__(self, volume_id: str, progress: str) -> None:
        super().__init__(f"volume {volume_id!r} is being copied: {progress}; call again")


class Reencrypting(AgentError):
    """The volume is given a master key of its own; nobody opens it before that is done."""

    def __init__(self, volume_id: str, progress: str) -> None:
        super().__init__(
            f"volume {volume_id!r} is given a master key of its own: {progress}; call again"
        )


class Overwriting(AgentError):
    """What a volume is to grow by is being overwritten; it is not the volume's before."""

    def __init__(self, volume_id: str, progress: str) -> None:
        super().__init__(
            f"volume {volume_id!r} grows when what it grows by is overwritten: {progress}; call"
            " again"
        )


class SourceLost(AgentError):
    """What a volume shall be made of can never be read again."""

    def __init__(self, source_id: str, problem: str) -> None:
        super().__init__(f"nothing can be made of {source_id!r}: {problem}")


class Receiving(AgentError):
    """A volume that comes as a stream, and is none before it is finished."""

    def __init__(self, volume_id: str) -> None:
        super().__init__(
            f"volume {volume_id!r} is being received, and is no volume before it is finished:"
            " `carver volume receive NAME --status` tells how far it is, --finish makes it one,"
            " --abort removes it"
        )


class NotReceived(AgentError):
    """A stream cannot be received so, or what was received cannot be finished; nothing changed."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name!r} is not received so: {why}")


class Moved(AgentError):
    """A volume that is another node's now, or about to be."""

    def __init__(self, volume_id: str, node: str, why: str = "was moved") -> None:
        super().__init__(
            f"volume {volume_id!r} {why} to {node}: `carver volume move NAME --status` tells how"
            " far that is, --finish deletes what is left of it here, --undo takes it back"
        )


class NotMoved(AgentError):
    """A volume cannot be moved so, or the move be ended so; nothing was changed."""

    def __init__(self, volume: str, why: str) -> None:
        super().__init__(f"{volume!r} is not moved so: {why}")


class BadStream(AgentError):
    """A stream that is none, is of another version, or was altered; what was good of it is kept."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the stream cannot be used: {why}")


class TransferFailed(AgentError):
    """A device could not be read or written, or what a stream goes to or comes from ended."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


class NodeRefused(AgentError):
    """The other node could not be reached, or said no."""

    def __init__(self, node: str, words: str, why: str) -> None:
        super().__init__(f"{node}: `{words}`: {why}")


class StreamEnded(BadStream):
    """A stream that ends before its end mark."""

    def __init__(self, read_bytes: int) -> None:
        super().__init__(
            f"it ends after {read_bytes} bytes, before its end mark; send it again, from the offset"
            " that `carver volume receive NAME --status` tells"
        )


class NotComparable(AgentError):
    """Two snapshots of which the one does not follow from the other."""

    def __init__(self, base_id: str, target_id: str, why: str) -> None:
        super().__init__(f"what changed from {base_id!r} to {target_id!r} cannot be told: {why}")


class BlocksUnknown(AgentError):
    """An encrypted volume of which nobody can tell which blocks its user sees changed."""

    def __init__(self, identity: str, why: str, remedy: str) -> None:
        super().__init__(
            f"cannot tell which blocks of {identity!r}, which is encrypted, are allocated or"
            f" changed: {why}; {remedy}"
        )


class NotBeyond(AgentError):
    """Ranges shall be told from a place on where there is nothing."""

    def __init__(self, offset_bytes: int, size_bytes: int | None = None) -> None:
        allowed = (
            "negative" if size_bytes is None else f"more than the {size_bytes} bytes there are"
        )
        super().__init__(f"starting_offset: {offset_bytes} is {allowed}")


class MetadataReserved(AgentError):
    """Someone else keeps a pool's metadata as they were once, and there can be only one such."""

    def __init__(self, group: str, pool: str) -> None:
        super().__init__(
            f"thin pool {group}/{pool} has a metadata snapshot that is not Carver's; whoever reads"
            " by it ends soon, or left it: see `dmsetup status`, and if nobody does,"
            " `dmsetup message … 0 release_metadata_snap`"
        )


class NotWanted(AgentError):
    """Whoever asked has gone."""

    def __init__(self, what: str) -> None:
        super().__init__(f"nobody waits for {what} any more")


class BadToken(AgentError):
    """A starting_token that this plugin did not give out."""

    def __init__(self, token: str) -> None:
        super().__init__(
            f"starting_token: {token!r} is not a token of this plugin; list anew without one"
        )


class Starting(AgentError):
    """The service is up, and lvm2 has not told it yet what is on this node."""

    def __init__(self, seconds: float, problem: Exception | None) -> None:
        said = "it has not answered yet" if problem is None else str(problem)
        super().__init__(
            f"Carver waits for lvm2 since it was started {seconds:.0f} s ago: {said}. Call again"
        )


class TooManyCalls(AgentError):
    """So many calls wait for lvm2, mkfs or each other that one more would take another's thread."""

    def __init__(self, places: int, group: str = "") -> None:
        where = f"volume group {group}" if group else "volume groups"
        super().__init__(
            f"{places} calls are at work on {where} already; call again. If it stays, look for a"
            " disk that does not answer"
        )


class NotReady(AgentError):
    """The node lacks something that Carver needs."""


class GroupRefused(NotReady):
    """A group that Carver could not make; or that is there, and is another or not this node's."""

    def __init__(self, group: str, why: str) -> None:
        super().__init__(f"volume group {group} is not used: {why}")
        self.group = group


class SocketTaken(AgentError):
    """Another process serves the socket."""


class SocketGone(AgentError):
    """The socket that is served was deleted or replaced: nobody can call any more."""

    def __init__(self, path: object) -> None:
        super().__init__(
            f"{path} is not there any more, so nobody can call; end, to be started again"
        )


class NotServed(AgentError):
    """Nobody answers at the socket."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(
            f"no Carver answers at {endpoint}; start it (systemctl start carver), see why it ended"
            " (journalctl --unit carver), or name its socket with --endpoint"
        )


class NotPermitted(AgentError):
    """The user may not do what the command does."""

    def __init__(self, what: str, otherwise: str = "") -> None:
        super().__init__(f"only root may {what}: run it as root (sudo){otherwise}")


class CallRefused(AgentError):
    """The service said no to a call that a person made."""

    def __init__(self, code: str, message: str) -> None:
        # gRPC's own words, of an older service.
        is_unknown = code == "UNIMPLEMENTED" and message == "Method not found!"
        remedy = "; use the command and the service of the same version" if is_unknown else ""
        super().__init__(f"{message} ({code}){remedy}")


class NotPublished(AgentError):
    """The volume is nowhere, and this node's volumes grow where they are in use."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"volume {name!r} is not in use, and with controller_expand = false a volume grows"
            " where it is: publish it, then expand it"
        )


class ClusterSilent(AgentError):
    """The API server gave no whole list of what the cluster has, so nothing is proved by it."""

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(
            f"what the cluster needs is not known: {what}: {problem}. So nothing"
            " counts as an orphan, and nothing is changed"
        )


class ClusterRefused(AgentError):
    """The API server did not answer about one object, or did not do what was asked."""

    def __init__(self, method: str, path: str, problem: str) -> None:
        super().__init__(f"the API server: {method} {path}: {problem}")


class NotRepointed(AgentError):
    """A claim is not, or not yet, the moved volume's; what was done so far is kept."""

    def __init__(self, claim: str, why: str) -> None:
        super().__init__(f"the claim {claim} is not re-pointed: {why}")


class NoOrphan(AgentError):
    """What shall be deleted as an orphan is none, or is not known as one long enough."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name!r} is not deleted: {why}")


class NotConfirmed(AgentError):
    """Nobody said that a volume or a snapshot may be deleted, or a disk taken."""

    def __init__(self, name: str, what: str = "deleted") -> None:
        super().__init__(f"{name!r} is not {what}; say yes, or give --yes")
