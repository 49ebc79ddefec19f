"""`carver orphans`: show orphans, and delete one by name."""

import json
from collections.abc import Sequence

import grpc

from agent.cli import terminal
from agent.core import errors, sockets
from agent.csi.client import Client
from agent.extras.orphans import candidates
from agent.extras.orphans.candidates import Candidate, Kind
from agent.extras.orphans.look import Orphan, OrphanSearch
from agent.settings.settings import Config
from mount.kernel import Kernel
from proto.carver_pb2 import MoveRequest
from proto.carver_pb2_grpc import TransferStub

# Beginnings of the remedies that `delete` carries out.
_DELETIONS = ("carver orphans --delete ", "carver controller orphans --delete ")


def show(orphans: Sequence[Orphan], grace_seconds: int, *, as_json: bool) -> None:
    """Print orphans as a table, followed by the remedies; with `as_json`, print all as JSON.

    The table also has candidates that were not found for the grace period yet; their remedies are
    not printed after it.
    """
    if as_json:
        print(json.dumps([_row(orphan) for orphan in orphans], indent=2, ensure_ascii=False))
        return
    if not orphans:
        print("There are no orphans.")
        return
    table = terminal.table("KIND", "NAME", "SEEN FOR", "WHAT", right=("SEEN FOR",))
    for orphan in orphans:
        seen_text = (
            _duration(orphan.seen_seconds)
            if orphan.is_sure
            else f"{_duration(orphan.seen_seconds)}, wait"
        )
        table.add_row(
            orphan.candidate.kind, orphan.candidate.name, seen_text, orphan.candidate.description
        )
    terminal.console().print(table)
    for orphan in orphans:
        if orphan.is_sure:
            print(f"\n{orphan.candidate.name}:\n    {orphan.candidate.full_remedy}")
    if not all(orphan.is_sure for orphan in orphans):
        print(
            f"\nOne that must wait counts when it is seen again {_duration(grace_seconds)} after it"
            " was first seen."
        )


def delete(
    settings: Config, kernel: Kernel | None, finder: OrphanSearch, name: str, *, confirmed: bool
) -> None:
    """Delete the orphan of a name, by the CSI calls that a cluster would make.

    What a move has left or brought here is deleted by the call that ends the move; the node refuses
    if the volume is in another move by then.

    The orphans are searched for again first. If the orphan is a directory of kubelet's, the
    directory is removed after the CSI call. `kernel` is the kernel of this node; None if the orphan
    cannot be a directory on this node.

    Raises NotConfirmed if `confirmed` is false, NotServed if no service answers at the socket, and
    CallRefused if the service refuses a call. Raises NoOrphan if the search finds no orphan of that
    name, if the grace period has not passed, if Carver cannot delete the orphan, or if a directory
    cannot be removed. Raises OSError if the socket cannot be used, and what `finder.search` raises.
    """
    if not confirmed:
        raise errors.NotConfirmed(name)
    if not sockets.is_served(settings.endpoint):
        raise errors.NotServed(str(settings.endpoint))
    candidate = _sure(finder.search(), name, settings.orphan_grace_seconds)
    with Client(settings.endpoint) as client:
        try:
            _call(client, candidate)
        except grpc.RpcError as error:
            raise errors.CallRefused(error.code().name, error.details() or "") from None
    if kernel is not None and candidate.kind in (Kind.STAGING, Kind.TARGET):
        _clear(kernel, candidate)
    print(f"{name} is deleted")


def _sure(orphans: Sequence[Orphan], name: str, grace_seconds: int) -> Candidate:
    """Return the candidate of a name if Carver may delete that candidate; raise NoOrphan otherwise.

    Carver may delete a candidate that was found for the grace period, and whose remedy is `carver
    orphans --delete` or that of the controller.
    """
    for orphan in orphans:
        if orphan.candidate.name != name:
            continue
        if not orphan.is_sure:
            seen_text = f"it was seen for {_duration(orphan.seen_seconds)}"
            raise errors.NoOrphan(name, f"{seen_text}, and counts after {_duration(grace_seconds)}")
        if not orphan.candidate.full_remedy.startswith(_DELETIONS):
            raise errors.NoOrphan(name, f"--delete cannot; {orphan.candidate.full_remedy}")
        return orphan.candidate
    raise errors.NoOrphan(name, "it is not an orphan; list them for those that are")


def _call(client: Client, candidate: Candidate) -> None:
    if candidate.kind in (Kind.VOLUME, Kind.HALF_MADE):
        client.delete(candidate.handle)
    elif candidate.kind in (Kind.MOVED, Kind.RECEIVING):
        transfer = client.stub(TransferStub)
        request = MoveRequest(volume_id=candidate.handle, release=candidate.release)
        end = transfer.FinishMove if candidate.kind is Kind.MOVED else transfer.AbortReceive
        end(request)
    elif candidate.kind is Kind.STAGING and candidate.handle:
        client.unstage(candidate.handle, candidate.path)
    elif candidate.kind in (Kind.INLINE, Kind.TARGET):
        client.unpublish(candidate.handle, candidate.path)


def _clear(kernel: Kernel, candidate: Candidate) -> None:
    """Remove kubelet's directories for a volume that is gone, and kubelet's file in them.

    A directory or file that does not exist is no error. Raises NoOrphan if the kernel refuses a
    removal, such as that of a mount point or of a directory that is not empty.
    """
    for remove, path in (
        (kernel.remove_directory, candidate.path),
        (kernel.remove_file, f"{candidate.name}/{candidates.VOLUME_DATA}"),
        (kernel.remove_directory, candidate.name),
    ):
        try:
            remove(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise errors.NoOrphan(
                candidate.name, f"{path}: {error.strerror}; see what it is"
            ) from None


def _row(orphan: Orphan) -> dict[str, object]:
    """Return an orphan for `--json`, whose keys are never renamed."""
    candidate = orphan.candidate
    return {
        "kind": candidate.kind,
        "name": candidate.name,
        "identity": candidate.identity,
        "about": candidate.description,
        "handle": candidate.handle,
        "path": candidate.path,
        "remedy": candidate.full_remedy,
        "seen_seconds": int(orphan.seen_seconds),
        "sure": orphan.is_sure,
    }


def _duration(seconds: float) -> str:
    minutes = int(seconds) // 60
    days, hours = divmod(minutes // 60, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"
