"""Notes in memory of volumes that calls may not use now, for calls that read no report of LVM.

Such volumes are being received, were moved to another node, or are held for the last phase of a
move. A call on such a volume is refused at once.
"""

import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from agent.core import errors, tag
from agent.volumes import volume_states
from agent.volumes.reports import Reports
from agent.volumes.volume_states import Call, EndedBy, Outcome


@dataclass(frozen=True)
class _Lease:
    """A temporary hold of a volume, which its holder has to renew.

    `secret` is what the holder presents to renew the hold, `until_seconds` is the end of the hold
    (monotonic), and `error` is the error of a call that is refused. `logical_uuids` has the LVM
    UUIDs of the logical volumes that the volume group had when the held volume was first known to
    be unused; None before that.
    """

    secret: str
    until_seconds: float
    error: errors.AgentError
    logical_uuids: frozenset[str] | None = None


class Holds:
    """Notes of volumes that calls may not use: volumes being received, moved volumes, and leases.

    At the start, the notes of received and moved volumes are made from tags (`resume`). A lease is
    a temporary note (`hold`): it ends when the holder no longer renews it, and with this process.
    After that, the volume may be used again.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._notes: dict[str, tuple[EndedBy, errors.AgentError]] = {}
        self._held: dict[str, _Lease] = {}

    def check(self, call: Call, volume_id: str) -> None:
        """Raise Receiving or Moved if a call may not use a volume, by the notes in memory.

        A temporary hold (`hold`) counts as well. Runs no command.
        """
        with self._guard:
            note = self._notes.get(volume_id)
            if note is None and (lease := self._lease(volume_id)) is not None:
                note = EndedBy.MOVE, lease.error
        if note is not None and volume_states.outcome(call, note[0]) is Outcome.NOT_OWN:
            raise note[1].with_traceback(None)

    def note_receiving(self, volume_id: str) -> None:
        """Note that a volume is being received as a stream, so that calls are refused."""
        self._note(volume_id, EndedBy.RECEIVER, {})

    def note_moved(self, volume_id: str, node: str) -> None:
        """Note that a volume was moved to another node, so that calls are refused."""
        self._note(volume_id, EndedBy.MOVER, {tag.MOVE_TO: node})

    def _note(self, volume_id: str, ender: EndedBy, own_tags: Mapping[str, str]) -> None:
        """Note that calls may not use a volume, because of the state that is ended by `ender`."""
        why = volume_states.row_of(ender).problem(volume_id, own_tags)
        with self._guard:
            self._notes[volume_id] = ender, why

    def remove_note(self, volume_id: str) -> None:
        """Remove the note of a volume that now belongs to this node and is complete."""
        with self._guard:
            self._notes.pop(volume_id, None)

    def hold(self, volume_id: str, node: str, seconds: float, secret: str = "") -> str:
        """Hold a volume for `seconds`, or renew its hold; return the secret that renews the hold.

        `secret` is what an earlier call returned for the hold to renew, or empty for a new hold.
        `node` is the node in the error of refused calls. Raises Moved if the volume is held by
        another secret, or if the hold to renew has ended; and Receiving or Moved if the volume has
        a note.
        """
        why = errors.Moved(volume_id, node, "is being sent for the last time")
        with self._guard:
            now, lease = time.monotonic(), self._lease(volume_id)
            if final := self._notes.get(volume_id):
                raise final[1].with_traceback(None)
            if (lease.secret if lease else "") != secret:
                raise why
            if lease is None:
                lease = _Lease(secrets.token_hex(8), now + seconds, why)
            self._held[volume_id] = replace(lease, until_seconds=now + seconds)
            return lease.secret

    def release(self, volume_id: str, secret: str) -> None:
        """End the hold of a volume that has this secret, if the hold has not ended already."""
        with self._guard:
            if self._lease(volume_id, secret) is not None:
                del self._held[volume_id]

    def note_unused(self, volume_id: str, secret: str, logical_uuids: frozenset[str]) -> None:
        """Note, once for each hold, that a held volume is unused.

        `logical_uuids` are the present LVM UUIDs of the logical volumes of its volume group. Does
        nothing if the volume has no hold with this secret.
        """
        with self._guard:
            lease = self._lease(volume_id, secret)
            if lease is not None and lease.logical_uuids is None:
                self._held[volume_id] = replace(lease, logical_uuids=logical_uuids)

    def has_all(self, volume_id: str, secret: str, snapshot_uuid: str) -> bool:
        """Whether a snapshot has all writes to a held volume.

        It has if it was taken after `note_unused`, in the present, uninterrupted hold with this
        secret: the snapshot is then not among the logical volumes that `note_unused` recorded.
        Times are not compared, because clocks may be set.
        """
        with self._guard:
            lease = self._lease(volume_id, secret)
            if lease is None or lease.logical_uuids is None:
                return False
            return snapshot_uuid not in lease.logical_uuids

    def resume(self, reports: Reports, *groups: str) -> int:
        """Note which volumes are being received or were moved, by their tags; return their number.

        Reads the fresh state of these volume groups, or of all. Called after a start and a reload.
        The caller holds the groups' locks: the state of a volume must not change between the report
        and the note.
        """
        number = 0
        for volume in reports.fresh(*groups).volumes():
            if volume_states.row_of(volume.ended_by).is_noted:
                self._note(str(volume.id), volume.ended_by, volume.own_tags)
                number += 1
            else:
                self.remove_note(str(volume.id))
        return number

    def _lease(self, volume_id: str, secret: str | None = None) -> _Lease | None:
        """Return the lease of a volume that has not ended; None if the volume is not held.

        If `secret` is given, a lease with another secret counts as none.
        """
        lease = self._held.get(volume_id)
        if (
            lease is None
            or time.monotonic() >= lease.until_seconds
            or secret not in (None, lease.secret)
        ):
            return None
        return lease
