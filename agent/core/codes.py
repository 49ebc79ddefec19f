"""The gRPC status code of each error."""

import grpc

import agent.core.errors
import lvm.lvm_errors
import mount.mount_errors

Code = grpc.StatusCode

# Table of the gRPC code of each error class. An error has the code of the first class that it is an
# instance of, so a class stands before its base classes. A class with the same code as its base
# class is left out, unless that code is INTERNAL.
TABLE: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (agent.core.errors.BadField, Code.INVALID_ARGUMENT),
    (agent.core.errors.BadConfig, Code.FAILED_PRECONDITION),
    (agent.core.errors.BadSize, Code.OUT_OF_RANGE),
    (agent.core.errors.NoSuchVolume, Code.NOT_FOUND),
    (agent.core.errors.NoSuchSnapshot, Code.NOT_FOUND),
    (agent.core.errors.NoSuchGroupSnapshot, Code.NOT_FOUND),
    (agent.core.errors.NotWhole, Code.FAILED_PRECONDITION),
    (agent.core.errors.NoSuchPath, Code.NOT_FOUND),
    (agent.core.errors.Incompatible, Code.ALREADY_EXISTS),
    (agent.core.errors.NoSuchNode, Code.NOT_FOUND),
    (agent.core.errors.AttachedElsewhere, Code.FAILED_PRECONDITION),
    # RESOURCE_EXHAUSTED is the code of no other error of ControllerPublishVolume: after this code
    # kubelet fails the pod, if the CSIDriver has nodeAllocatableUpdatePeriodSeconds (csi_plugin.go,
    # VerifyExhaustedResource).
    (agent.core.errors.TooManyAttached, Code.RESOURCE_EXHAUSTED),
    (agent.core.errors.OtherGroup, Code.FAILED_PRECONDITION),
    (agent.core.errors.ExcludedByTopology, Code.RESOURCE_EXHAUSTED),
    (agent.core.errors.PerhapsOnAnotherNode, Code.RESOURCE_EXHAUSTED),
    (agent.core.errors.NoRoom, Code.RESOURCE_EXHAUSTED),
    (agent.core.errors.NoSuchDisk, Code.NOT_FOUND),
    (agent.core.errors.DiskTooSmall, Code.FAILED_PRECONDITION),
    (agent.core.errors.WouldBeLost, Code.FAILED_PRECONDITION),
    (agent.core.errors.NotRepairable, Code.FAILED_PRECONDITION),
    (agent.core.errors.ImagesDiffer, Code.FAILED_PRECONDITION),
    (agent.core.errors.InlineTotal, Code.RESOURCE_EXHAUSTED),
    # OUT_OF_RANGE, not RESOURCE_EXHAUSTED: the external-resizer takes RESOURCE_EXHAUSTED for an
    # operation that may still be in progress. The resizer would ask for the same size for ever,
    # even after the claim was made smaller.
    (agent.core.errors.TooLarge, Code.OUT_OF_RANGE),
    # FAILED_PRECONDITION is the only code after which kubelet lets a pod start with a volume that
    # has not grown.
    (agent.core.errors.CannotGrow, Code.FAILED_PRECONDITION),
    (agent.core.errors.VolumeInUse, Code.FAILED_PRECONDITION),
    (agent.core.errors.NotOverwritten, Code.FAILED_PRECONDITION),
    (agent.core.errors.FreeExtentsNotErased, Code.FAILED_PRECONDITION),
    (agent.core.errors.HasSnapshots, Code.FAILED_PRECONDITION),
    # Kubelet takes FAILED_PRECONDITION for "in use, expand later": the pod continues, and kubelet
    # asks for the expansion again when the pod starts next.
    (agent.core.errors.GrowsLater, Code.FAILED_PRECONDITION),
    (agent.core.errors.NotSnapshotted, Code.FAILED_PRECONDITION),
    (agent.core.errors.PartOfGroup, Code.INVALID_ARGUMENT),
    (agent.core.errors.NotTogether, Code.FAILED_PRECONDITION),
    (agent.core.errors.QuiesceOver, Code.DEADLINE_EXCEEDED),
    (agent.core.errors.NotStaged, Code.FAILED_PRECONDITION),
    (agent.core.errors.ContentsLost, Code.FAILED_PRECONDITION),
    (agent.core.errors.KeyMissing, Code.INVALID_ARGUMENT),
    (agent.core.errors.HeaderDamaged, Code.FAILED_PRECONDITION),
    (agent.core.errors.GrowsWithKey, Code.FAILED_PRECONDITION),
    (agent.core.errors.OperationPending, Code.ABORTED),
    (agent.core.errors.Copying, Code.ABORTED),
    (agent.core.errors.Unfinished, Code.ABORTED),
    (agent.core.errors.Overwriting, Code.ABORTED),
    (agent.core.errors.Reencrypting, Code.FAILED_PRECONDITION),
    (agent.core.errors.Receiving, Code.FAILED_PRECONDITION),
    (agent.core.errors.NeedsOther, Code.FAILED_PRECONDITION),
    (agent.core.errors.TagsDamaged, Code.FAILED_PRECONDITION),
    (agent.core.errors.LayoutUnknown, Code.FAILED_PRECONDITION),
    (agent.core.errors.NotReceived, Code.FAILED_PRECONDITION),
    (agent.core.errors.Moved, Code.FAILED_PRECONDITION),
    (agent.core.errors.Moving, Code.FAILED_PRECONDITION),
    (agent.core.errors.NotMoved, Code.FAILED_PRECONDITION),
    (agent.core.errors.NotAdopted, Code.FAILED_PRECONDITION),
    (agent.core.errors.BadStream, Code.INVALID_ARGUMENT),
    (agent.core.errors.SourceLost, Code.FAILED_PRECONDITION),
    (agent.core.errors.NotComparable, Code.INVALID_ARGUMENT),
    (agent.core.errors.BlocksUnknown, Code.FAILED_PRECONDITION),
    (agent.core.errors.OffsetOutOfRange, Code.OUT_OF_RANGE),
    (agent.core.errors.MetadataReserved, Code.FAILED_PRECONDITION),
    (agent.core.errors.NotWanted, Code.CANCELLED),
    (agent.core.errors.BadToken, Code.ABORTED),
    (agent.core.errors.NotGranted, Code.PERMISSION_DENIED),
    (agent.core.errors.TooManyStreams, Code.RESOURCE_EXHAUSTED),
    # UNAVAILABLE for temporary conditions: each caller repeats the call, without taking the volume
    # for failed.
    (agent.core.errors.Starting, Code.UNAVAILABLE),
    (agent.core.errors.TooManyCalls, Code.UNAVAILABLE),
    (agent.core.errors.GroupBusy, Code.UNAVAILABLE),
    (agent.core.errors.GroupSilent, Code.UNAVAILABLE),
    (agent.core.errors.PoolSilent, Code.UNAVAILABLE),
    (agent.core.errors.GroupAwaited, Code.UNAVAILABLE),
    (agent.core.errors.NotReady, Code.FAILED_PRECONDITION),
    (agent.core.errors.SocketTaken, Code.FAILED_PRECONDITION),
    (agent.core.errors.SocketGone, Code.FAILED_PRECONDITION),
    # The next errors are raised by the command line, not by the service.
    (agent.core.errors.TransferFailed, Code.INTERNAL),
    (agent.core.errors.NodeRefused, Code.FAILED_PRECONDITION),
    (agent.core.errors.NotServed, Code.FAILED_PRECONDITION),
    (agent.core.errors.NotPermitted, Code.FAILED_PRECONDITION),
    (agent.core.errors.AbsenceNotProved, Code.FAILED_PRECONDITION),
    (agent.core.errors.CallRefused, Code.FAILED_PRECONDITION),
    (agent.core.errors.NotPublished, Code.FAILED_PRECONDITION),
    (agent.core.errors.ClusterSilent, Code.UNAVAILABLE),
    (agent.core.errors.ClusterRefused, Code.UNAVAILABLE),
    (agent.core.errors.NotRebound, Code.FAILED_PRECONDITION),
    (agent.core.errors.NoOrphan, Code.FAILED_PRECONDITION),
    (agent.core.errors.NotConfirmed, Code.FAILED_PRECONDITION),
    (agent.core.errors.AgentError, Code.INTERNAL),
    (mount.mount_errors.ProgramMissing, Code.FAILED_PRECONDITION),
    (mount.mount_errors.CommandTimedOut, Code.DEADLINE_EXCEEDED),
    # UNAVAILABLE, since sidecars then repeat the call on the same node. A repeated call first
    # checks what exists.
    (mount.mount_errors.OutcomeUnknown, Code.UNAVAILABLE),
    (lvm.lvm_errors.StillRunning, Code.UNAVAILABLE),
    (lvm.lvm_errors.NoSpace, Code.RESOURCE_EXHAUSTED),
    (lvm.lvm_errors.MetadataFull, Code.RESOURCE_EXHAUSTED),
    # ABORTED, since another process took the logical volume's name after Carver had checked that
    # the name was free.
    (lvm.lvm_errors.NameTaken, Code.ABORTED),
    (lvm.lvm_errors.InUse, Code.FAILED_PRECONDITION),
    (lvm.lvm_errors.DisksMissing, Code.FAILED_PRECONDITION),
    (lvm.lvm_errors.KeptInactive, Code.FAILED_PRECONDITION),
    (lvm.lvm_errors.GroupProtected, Code.FAILED_PRECONDITION),
    (lvm.lvm_errors.UnknownContents, Code.FAILED_PRECONDITION),
    (lvm.lvm_errors.DuplicateDisks, Code.FAILED_PRECONDITION),
    (lvm.lvm_errors.BeingMoved, Code.FAILED_PRECONDITION),
    (lvm.lvm_errors.PoolDamaged, Code.FAILED_PRECONDITION),
    (lvm.lvm_errors.NotArchived, Code.FAILED_PRECONDITION),
    # UNAVAILABLE for LockTaken and SemaphoresUsedUp: both conditions of the node end soon.
    (lvm.lvm_errors.LockTaken, Code.UNAVAILABLE),
    (lvm.lvm_errors.SemaphoresUsedUp, Code.UNAVAILABLE),
    (lvm.lvm_errors.NoDeviceMapper, Code.FAILED_PRECONDITION),
    (mount.mount_errors.CommandFailed, Code.INTERNAL),
    (lvm.lvm_errors.GroupMissing, Code.FAILED_PRECONDITION),
    (lvm.lvm_errors.VolumeMissing, Code.NOT_FOUND),
    (lvm.lvm_errors.Inactive, Code.INTERNAL),
    (mount.mount_errors.BadReport, Code.INTERNAL),
    (mount.mount_errors.CommandError, Code.INTERNAL),
    (mount.mount_errors.BadPath, Code.INVALID_ARGUMENT),
    (mount.mount_errors.BadOption, Code.INVALID_ARGUMENT),
    (mount.mount_errors.UnsupportedFileSystem, Code.INVALID_ARGUMENT),
    (mount.mount_errors.NoCgroup, Code.FAILED_PRECONDITION),
    (mount.mount_errors.TooSmall, Code.OUT_OF_RANGE),
    (mount.mount_errors.DeviceMissing, Code.INTERNAL),
    (mount.mount_errors.NotVacant, Code.FAILED_PRECONDITION),
    (mount.mount_errors.ProbeFailed, Code.INTERNAL),
    (mount.mount_errors.UnexpectedContents, Code.FAILED_PRECONDITION),
    (mount.mount_errors.MadeByOthers, Code.FAILED_PRECONDITION),
    (mount.mount_errors.FormatFailed, Code.INTERNAL),
    (mount.mount_errors.Damaged, Code.FAILED_PRECONDITION),
    (mount.mount_errors.CheckFailed, Code.INTERNAL),
    (mount.mount_errors.MountFailed, Code.INTERNAL),
    (mount.mount_errors.UnmountFailed, Code.INTERNAL),
    (mount.mount_errors.Busy, Code.FAILED_PRECONDITION),
    (mount.mount_errors.ForeignMount, Code.FAILED_PRECONDITION),
    (mount.mount_errors.MountConflict, Code.ALREADY_EXISTS),
    (mount.mount_errors.OtherContext, Code.FAILED_PRECONDITION),
    (mount.mount_errors.NotMounted, Code.FAILED_PRECONDITION),
    (mount.mount_errors.PathChanged, Code.FAILED_PRECONDITION),
    (mount.mount_errors.NotADirectory, Code.FAILED_PRECONDITION),
    (mount.mount_errors.NotAFile, Code.FAILED_PRECONDITION),
    (mount.mount_errors.TargetInUse, Code.FAILED_PRECONDITION),
    (mount.mount_errors.TargetError, Code.INTERNAL),
    (mount.mount_errors.RenewFailed, Code.INTERNAL),
    # FAILED_PRECONDITION, as for CannotGrow above: kubelet lets the pod start with the file system
    # that has not grown.
    (mount.mount_errors.GrowFailed, Code.FAILED_PRECONDITION),
    (mount.mount_errors.LoopFailed, Code.INTERNAL),
    # UNAUTHENTICATED, by the CSI spec, "Error Scheme": the secrets in the request are not valid.
    (mount.mount_errors.WrongKey, Code.UNAUTHENTICATED),
    (mount.mount_errors.CryptPending, Code.ABORTED),
    (mount.mount_errors.CryptBusy, Code.FAILED_PRECONDITION),
    (mount.mount_errors.CryptFailed, Code.INTERNAL),
    (mount.mount_errors.MountError, Code.INTERNAL),
    # The servicers that gRPC generates raise NotImplementedError for each RPC that is not
    # implemented.
    (NotImplementedError, Code.UNIMPLEMENTED),
    (Exception, Code.INTERNAL),
)


# Maximum length of an error message in an RPC's status, in bytes.
_MOST_MESSAGE_BYTES = 2000
# Codes after which an operation may still be in progress: callers repeat the call, or undo the
# operation. agent/operations/leftovers.py has the table of the objects that a failed call leaves,
# and of who completes or removes them.
_IN_PROGRESS = (Code.CANCELLED, Code.DEADLINE_EXCEEDED, Code.UNAVAILABLE, Code.ABORTED)
# Codes that say that the request itself is wrong. A failed request with such a code made nothing,
# so an existing object was made by another request.
_OF_REQUEST = (
    *(Code.INVALID_ARGUMENT, Code.ALREADY_EXISTS, Code.OUT_OF_RANGE),
    *(Code.UNIMPLEMENTED, Code.UNAUTHENTICATED),
)


def is_final(error: Exception) -> bool:
    """Whether kubelet takes a call that failed with this error for finished.

    If so, kubelet forgets the call, and may never undo the operation (isFinalError of
    pkg/volume/csi/csi_client.go).
    """
    return code_of(error) not in (*_IN_PROGRESS, Code.RESOURCE_EXHAUSTED)


def ends_create_volume(error: Exception) -> bool:
    """Whether the external-provisioner ends a CreateVolume call on this node after an error.

    If so, the provisioner gives the volume up, or has the volume created on another node.
    """
    return code_of(error) not in _IN_PROGRESS


def is_of_request(error: Exception) -> bool:
    """Whether an error's code says that the request itself is wrong (`_OF_REQUEST`).

    Such a request created nothing; an object that exists was created by another request.
    """
    return code_of(error) in _OF_REQUEST


def shorten(message: str) -> str:
    """Cut an error message to a length that each gRPC client accepts; return a shorter one as is.

    With headers above 8 KiB a client of gRPC's C core drops the error, and puts RESOURCE_EXHAUSTED
    in its place. gRPC encodes a byte that is not printable ASCII as three bytes.
    """
    text = message.encode(errors="replace")
    if len(text) <= _MOST_MESSAGE_BYTES:
        return message
    return text[: _MOST_MESSAGE_BYTES - len("…".encode())].decode(errors="ignore") + "…"


def code_of(error: Exception) -> grpc.StatusCode:
    """Return the gRPC code of an error: that of the first class in TABLE that the error is of."""
    return next(code for kind, code in TABLE if isinstance(error, kind))
