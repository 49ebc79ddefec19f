"""DeleteVolume: erase and remove a volume, or record its deletion and finish it in the background.

agent/operations/erase_deleted.py erases and removes thick volumes, which may outlast the call.
agent/operations/remove_pool.py removes thin volumes and their pools.
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
    """Deletes volumes from the volume groups of this node."""

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
        """Whether a volume that CreateVolume made is staged or published; runs no lvm2 command.

        False for an inline volume, which NodeUnpublishVolume deletes.
        """
        if ids.is_inline(volume_id):
            return False
        return bool(users.mount_paths(self._kernel, self._activator, backing.of_id(volume_id)))

    def delete(self, volume_id: str, *, is_own: bool = True) -> None:
        """Erase and remove a volume; a volume that does not exist is no error.

        If erasing takes longer than two seconds, the deletion is recorded and goes on in the
        background. With `is_own`, the volume's state must permit DeleteVolume. A volume that is
        being received as a stream, or was moved to another node, is deleted only by the code that
        ends the transfer, which passes False. Raises VolumeInUse, HasSnapshots, Receiving, Moved or
        Moving for a volume in these states, and StillAtWork while an mkfs or fsck of the volume
        runs.
        """
        self._detached.cancel(volume_id)
        with suppress(errors.NoSuchVolume), self._conflicts.enter(Call.DELETE, volume_id):
            self._delete(volume_id, is_own=is_own)

    def _delete(self, volume_id: str, *, is_own: bool) -> None:
        group = ids.group_of(volume_id)
        self._reports.await_others(group)
        # Lock the volume group before reading it: of two concurrent deletions, the later one must
        # see that its volume is the last in the thin pool.
        with self._volume_groups.hold(group):
            state = self._mender.mend(group)
            volume = state.volume(volume_id)
            if is_own:
                self._conflicts.require(Call.DELETE, volume)
            self._reports.every_group(state).require_not_copied(volume_id)
            if snapshot_ids := volume.kept_snapshots:
                raise errors.HasSnapshots(
                    volume_id,
                    snapshot_ids,
                    "they are nothing without it, so it is deleted after them",
                )
            lvm = self._volume_groups.lvm(group)
            if (growth := records.reservation(volume.group, volume.name)) is not None:
                volumes.remove(lvm, group, growth.name)
            # Remove a thin volume at once, because its pool zeroes each block that the pool
            # allocates. While a disk of the pool is missing, lvm2 cannot change the pool, so the
            # volume is deleted later.
            at_once = volume.is_thin and not (
                volume.missing_disks or volume.is_doomed or volume.copy_on_write_snapshots
            )
            is_bare = volume_states.meets(Call.DELETE, volume, Outcome.AT_ONCE)
            if is_bare:
                # Remove a volume that lvm2 made only in part: the volume was never active, so it
                # has no data to erase, and it cannot be activated.
                volumes.remove(lvm, group, volume.name)
            elif at_once:
                users.require_unused(self._kernel, self._activator, volume)
                if not volume.is_encrypted:
                    # Crash point: the thin pool may be left without volumes; the next start of
                    # Carver removes the pool.
                    self._pool_remover.remove(volume)
        if at_once and volume.is_encrypted:
            # Close the volume and erase its LUKS header without the lock of the volume group: a
            # disk that hangs would keep the lock.
            self._mappings.ensure_closed(volume)
            self._mappings.erase(volume)
            # Crash point: the volume is left without its LUKS header; the caller repeats the call.
            with self._volume_groups.hold(group):
                state = self._mender.mend(group)
                volume = state.volume(volume_id)
                self._pool_remover.remove(volume)
        if at_once:
            self._pool_remover.remove_after(volume, self._eraser.grace_seconds)
        elif not is_bare:
            # Crash point: before the volume has the tag `wiping`, the caller repeats the call;
            # afterwards the next start of Carver continues the deletion.
            self._eraser.delete(volume)
        # Crash point: the volume's bridge (the temporary snapshot that it was copied from) is left;
        # the next start of Carver removes the bridge.
        self._copier.remove_bridge_of(volume)
