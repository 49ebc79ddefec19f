"""DeleteVolume: a volume is erased and removed, or its deletion is on record.

Erasing may outlast the call: agent/operations/erase_deleted.py does that, and
agent/operations/remove_pool.py for thin volumes.
"""

from contextlib import suppress

from agent.core import errors, ids
from agent.operations.clone import Copier
from agent.operations.erase_deleted import Eraser
from agent.operations.remove_pool import PoolRemover
from agent.volumes import backing, records, users, volume_states
from agent.volumes.context import Context
from agent.volumes.luks_mappings import Mappings
from agent.volumes.volume_states import Call, Outcome
from lvm import volumes


class VolumeDeleter:
    """Deletes volumes of this node's groups."""

    def __init__(
        self,
        context: Context,
        eraser: Eraser,
        pool_remover: PoolRemover,
        copier: Copier,
    ) -> None:
        self._volume_groups, self._kernel = context.volume_groups, context.kernel
        self._reports, self._activator = context.reports, context.activator
        self._mender = context.mender
        self._detached = context.detached
        self._mappings = Mappings(context)
        self._eraser = eraser
        self._pool_remover = pool_remover
        self._copier = copier
        self._conflicts = context.conflicts

    def is_mounted(self, volume_id: str) -> bool:
        """Whether a volume that CreateVolume made is staged or published; no command."""
        if ids.is_inline(volume_id):
            return False
        return bool(users.mounted_at(self._kernel, self._activator, backing.of_id(volume_id)))

    def delete(self, volume_id: str, *, is_own: bool = True) -> None:
        """Erase and remove a volume; no volume of that id is no error.

        One that is being received, or was moved, is deleted only by what ends that: not `is_own`.
        Raises VolumeInUse, HasSnapshots, Receiving, Moved.
        """
        self._detached.cancel(volume_id)
        with suppress(errors.NoSuchVolume), self._conflicts.enter(Call.DELETE, volume_id):
            self._delete(volume_id, is_own=is_own)

    def _delete(self, volume_id: str, *, is_own: bool) -> None:
        group = ids.group_of(volume_id)
        self._reports.await_others(group)
        # Held from the report on: of two deletions at once, one sees that its volume is the last
        # in the pool.
        with self._volume_groups.hold(group):
            known = self._mender.mend(group)
            volume = known.volume(volume_id)
            if is_own:
                self._conflicts.require(Call.DELETE, volume)
            self._reports.everywhere(known).require_not_copied(volume_id)
            if held := volume.kept_snapshots:
                raise errors.HasSnapshots(
                    volume_id, held, "they are nothing without it, so it is deleted after them"
                )
            lvm = self._volume_groups.lvm(group)
            if (growth := records.reservation(volume.group, volume.name)) is not None:
                volumes.remove(lvm, group, growth.name)
            # The pool zeroes what it allocates, so a thin volume is removed at once; while a disk
            # of the pool is missing lvm2 cannot change it.
            at_once = volume.is_thin and not (
                volume.missing_disks or volume.is_doomed or volume.copy_on_write_snapshots
            )
            is_bare = volume_states.meets(Call.DELETE, volume, Outcome.AT_ONCE)
            if is_bare:
                # It was never active, so there are no data to erase, and it cannot be activated.
                volumes.remove(lvm, group, volume.name)
            elif at_once:
                users.require_unused(self._kernel, self._activator, volume)
                if not volume.is_encrypted:
                    # Crash point: the pool may be empty; the next start removes it.
                    self._pool_remover.remove(volume)
        if at_once and volume.is_encrypted:
            # Without the group, which a disk that hangs would hold up.
            self._mappings.ensure_closed(volume)
            self._mappings.erase(volume)
            # Crash point: without its header, and there; the caller repeats the call.
            with self._volume_groups.hold(group):
                known = self._mender.mend(group)
                volume = known.volume(volume_id)
                self._pool_remover.remove(volume)
        if at_once:
            self._pool_remover.after(volume, self._eraser.grace_seconds)
        elif not is_bare:
            # Crash point: before the tag `wiping` the caller repeats the call; after it the next
            # start goes on.
            self._eraser.delete(volume)
        # Crash point: the bridge of the volume is left; the next start removes it.
        self._copier.clear(volume)
