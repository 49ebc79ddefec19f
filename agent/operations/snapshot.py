"""CreateSnapshot, DeleteSnapshot, GetSnapshot, ListSnapshots.

A snapshot of a thin volume is a thin volume in the same pool, and complete without its origin. A
snapshot of any other volume has a COW store for the blocks that are overwritten in the origin, and
is lost without its origin. One lvcreate takes and tags a snapshot.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from agent.core import errors, ids, tag
from agent.core.ids import VolumeId
from agent.operations.erase_deleted import Eraser
from agent.operations.remove_pool import PoolRemover
from agent.requests import requests
from agent.requests.requests import CreateSnapshot, ListPage, ListSnapshots
from agent.settings.classes import SNAPSHOT_SIZE
from agent.volumes import backing, records, users, volume_states
from agent.volumes.allocation import reason_closed_to_new, reason_full
from agent.volumes.context import Context
from agent.volumes.records import Snapshot, Volume
from agent.volumes.report_age import Known
from agent.volumes.volume_states import Call, EndedBy
from lvm import caches, layout, names, thin, volumes
from lvm.room import Room

_log = logging.getLogger(__name__)

# Tags that a snapshot copies from its origin, as they were when it was taken, because a volume that
# is created from the snapshot needs them.
INHERITED = tag.following(tag.Follows.SNAPSHOT)


class Snapshotter:
    """Takes, finds, lists and deletes snapshots.

    `readers` returns the ids of the volumes that this process is filling from a snapshot, including
    volumes in a volume group that does not answer.
    """

    def __init__(
        self,
        context: Context,
        eraser: Eraser,
        pool_remover: PoolRemover,
        *,
        readers: Callable[[str], Collection[str]],
    ) -> None:
        self._configuration = context.configuration
        self._readers = readers
        self._volume_groups, self._kernel = context.volume_groups, context.kernel
        self._reports, self._activator = context.reports, context.activator
        self._mender = context.mender
        self._eraser = eraser
        self._pool_remover = pool_remover
        self._allocators = context.allocators
        self._limiter, self._conflicts = context.limiter, context.conflicts

    def create(self, request: CreateSnapshot) -> Snapshot:
        """Take a snapshot, or find the one that an earlier call took.

        Runs two commands at most: a report, and lvcreate, which also adds the tags. Raises
        ExcludedByTopology if the request excludes this node, Incompatible if the snapshot exists
        with another source, OperationPending while a deleted snapshot of that name is being erased,
        NoRoom, NotSnapshotted.
        """
        if not request.topology.includes(self._configuration.now.here):
            raise errors.ExcludedByTopology(self._configuration.now.node_id)
        name = names.logical_volume(ids.SNAPSHOT_PREFIX, request.name)
        source = backing.of_id(request.source_id)
        with self._limiter.lift(source):
            users.flush(self._kernel, self._activator, source)
        group = ids.group_of(request.source_id)
        self._reports.await_others(group)
        with self._volume_groups.hold(group):
            state = self._mender.mend(group)
            self.require_free(state, name)
            for snapshot in self._reports.listed_snapshots(self._reports.every_group(state)):
                if snapshot.name == name:
                    return _require_same_source(snapshot, request)
            volume = state.volume(request.source_id)
            self._conflicts.require(Call.SNAPSHOT, volume)
            self.make_room(volume)
            # Crash point: a COW store with these tags and without an origin is left; the next call
            # or the next start of Carver erases the COW store as a deleted snapshot.
            return self.take_snapshot(
                name, volume, {tag.NAME: request.name, **request.object_tags}, request.size
            )

    def take_snapshot(
        self,
        name: str,
        volume: Volume,
        own_tags: Mapping[str, str],
        size: layout.Reserve | None,
        *,
        copy_on_write: bool = False,
    ) -> Snapshot:
        """Take a snapshot of a volume, in a logical volume called `name`; runs one command.

        The caller holds the group's lock. `volume` is of a report that was read under that lock;
        the snapshot's sequence number follows from it. A thin volume gets a thin snapshot, unless
        `copy_on_write`. Raises NoRoom, and NotSnapshotted for a volume that lvm2 cannot take a
        snapshot of.
        """
        area_bytes = self.needed_bytes(volume, size, copy_on_write=copy_on_write)
        group = volume.group
        lvm = self._volume_groups.lvm(group.name)
        pool = "" if copy_on_write else group.volume(volume.name).pool
        own_tags = {
            tag.TIME: str(time.time_ns()),
            **own_tags,
            **volume_states.tags_for(EndedBy.CALLER),
            tag.SIZE: str(volume.size_bytes),
            tag.SOURCE: volume.name,
            tag.SEQUENCE: str(records.next_sequence(group)),
            **{key: volume.own_tags[key] for key in INHERITED if key in volume.own_tags},
        }
        with self._limiter.lift(volume.backing):
            if pool:
                thin.snapshot(
                    lvm, group.name, name, origin=volume.name, own_tags=own_tags, read_only=True
                )
            else:
                volumes.create_snapshot(
                    lvm,
                    group.name,
                    name,
                    origin=volume.name,
                    size_bytes=area_bytes,
                    own_tags=own_tags,
                    disks=Room(group).disk_arguments(),
                )
        return Snapshot(
            VolumeId.of(group, name),
            backing.of(group, name),
            group,
            volume.id,
            volume.size_bytes,
            int(own_tags[tag.TIME]),
            area_bytes,
            own_tags,
            pool=pool,
            origin=volume.name,
        )

    def make_room(self, *volumes: Volume) -> None:
        """Extend the thin pools of volumes, if a pool is too full to suspend a volume in it.

        The caller holds the locks of the volume groups. Raises NoRoom, or PoolSilent if a pool does
        not report how full it is.
        """
        pooled = ((volume, volume.group.volume(volume.name).pool) for volume in volumes)
        pools = {(volume.group.name, pool): volume for volume, pool in pooled if pool}
        for (group, _), volume in pools.items():
            lvm = self._volume_groups.lvm(group)
            self._allocators.of_volume(volume).make_room(lvm, volume.group)

    def needed_bytes(
        self,
        volume: Volume,
        size: layout.Reserve | None,
        *,
        copy_on_write: bool = False,
        further_bytes: int = 0,
        further_count: int = 0,
    ) -> int:
        """Return the bytes that a new snapshot needs; raise NoRoom if these are not available.

        For a copy-on-write snapshot these are the size of its COW store. For a thin snapshot they
        are the size of its volume, which the thin pool must be able to allocate. `further_bytes` of
        the room are for `further_count` other logical volumes. Raises NotSnapshotted for a volume
        that lvm2 cannot take a snapshot of.
        """
        group = volume.group
        if not caches.can_be_origin(group.volume(volume.name)):
            raise errors.NotSnapshotted(
                str(volume.id),
                f"it has a cache of the kind {caches.CACHE}, and lvm2 cannot take one of it without"
                f" damage to its data. Of volumes with a {caches.WRITECACHE}, and of thin ones, it"
                " can",
            )
        is_thin = bool(group.volume(volume.name).pool) and not copy_on_write
        if is_thin:
            allocator = self._allocators.of_volume(volume)
            limited = allocator.reason_full(group, further_count)
            needed_bytes, free_bytes = (
                volume.size_bytes,
                0 if limited else allocator.maximum_bytes(group),
            )
            purpose = limited or allocator.purpose(group)
        else:
            device_class = self._configuration.now.device_class(
                class_name := volume.own_tags.get(tag.CLASS, "")
            )
            store_size = size or (
                SNAPSHOT_SIZE if device_class is None else device_class.snapshot_size
            )
            needed_bytes = layout.copy_on_write_bytes(volume.size_bytes, store_size, group)
            closed = reason_closed_to_new(group) or reason_full(group, 1 + further_count)
            free_bytes = (
                0 if closed else self._allocators.available_cow_bytes(Room(group), class_name)
            )
            purpose = f"for a snapshot of {volume.name} {closed}".rstrip()
        free_bytes = max(0, free_bytes - further_bytes)
        if needed_bytes > free_bytes:
            raise errors.NoRoom(group.name, needed_bytes, free_bytes, purpose)
        return needed_bytes

    def delete(self, snapshot_id: str) -> None:
        """Split a snapshot from its origin, erase and remove it; a missing snapshot is no error.

        Runs two commands at most before the erasing, which may outlast the call. Raises PartOfGroup
        for a snapshot of a group snapshot, and VolumeInUse while a volume is copied from the
        snapshot.
        """
        parsed = VolumeId.parse(snapshot_id)
        if parsed is None:
            return
        self._reports.await_others(parsed.group)
        with self._volume_groups.hold(parsed.group):
            state = self._mender.mend(parsed.group)
            try:
                snapshot = self._reports.snapshot(state, snapshot_id)
            except errors.NoSuchSnapshot:
                # Crash point: the snapshot was split from its origin, and its COW store is left,
                # tagged as deleted. Erase the COW store.
                self.go_on(state, snapshot_id)
                return
            if snapshot.group_snapshot_id:
                raise errors.PartOfGroup(snapshot_id, snapshot.group_snapshot_id)
            # Refuse to delete a snapshot that is being copied to a volume, in whichever volume
            # group that volume is: the snapshot's extents are erased at once.
            self._reports.every_group(state).require_not_copied(snapshot_id)
            self.require_unread(snapshot_id)
            self.split_or_remove(snapshot)
        self.erase_split(snapshot)

    def require_unread(self, snapshot_id: str) -> None:
        """Raise VolumeInUse while this process fills a volume from a snapshot.

        The caller holds the lock of the snapshot's group.
        """
        if copies := self._readers(snapshot_id):
            raise errors.VolumeInUse(snapshot_id, f"{', '.join(copies)} is copied from it")

    def go_on(self, state: Known, snapshot_id: str) -> None:
        """Erase, in the background, the rest of a snapshot that was split from its origin.

        Does nothing if no rest is left. Raises NeedsOther or TagsDamaged for a snapshot that must
        not be erased.
        """
        own_name = ids.logical_name(snapshot_id)
        if not any(
            names.is_of(prefix, own_name) for prefix in (ids.SNAPSHOT_PREFIX, ids.BRIDGE_PREFIX)
        ):
            return
        try:
            remains = state.doomed_volume(snapshot_id)
        except (errors.NoSuchVolume, errors.OtherGroup):
            return
        self._eraser.delete(remains)

    def discard(self, snapshot: Snapshot) -> None:
        """Erase and remove an existing snapshot; erasing may outlast the call."""
        with self._volume_groups.hold(snapshot.group.name):
            if snapshot.is_thin:
                # Read a fresh report, which says if the snapshot is the last volume in its pool.
                name = snapshot.group.name
                snapshot = replace(snapshot, group=self._reports.fresh(name).group(name))
            self.split_or_remove(snapshot)
        self.erase_split(snapshot)

    def split_or_remove(self, snapshot: Snapshot) -> None:
        """Take the first step of a snapshot's deletion: split it from its origin, or remove it.

        The caller holds the group's lock. A copy-on-write snapshot is split if it has to be erased;
        `erase_split` erases it afterwards. Other snapshots are removed. While a disk is missing
        lvm2 splits nothing, so the snapshot is tagged as deleted.
        """
        group = snapshot.group.name
        lvm = self._volume_groups.lvm(group)
        if self._is_deferred(snapshot):
            volume_states.hand_over(lvm, group, snapshot.name, snapshot.own_tags, EndedBy.ERASER)
        elif snapshot.is_thin:
            self._pool_remover.remove(snapshot)
        elif self._eraser.policy.erases(snapshot):
            # Split the snapshot: its COW store has data of the origin, and must be erased before
            # the extents are allocated again.
            volumes.split(lvm, group, snapshot.name)
        else:
            volumes.remove(lvm, group, snapshot.name)

    def erase_split(self, snapshot: Snapshot) -> None:
        """Erase a COW store that `split_or_remove` split from its origin; may outlast the call.

        For a thin snapshot, remove its pool if the snapshot was the last volume in it.
        """
        if self._is_deferred(snapshot):
            self._eraser.finish(records.remains_of(snapshot, is_split=False))
        elif snapshot.is_thin:
            self._pool_remover.remove_after(snapshot, self._eraser.grace_seconds)
        elif self._eraser.policy.erases(snapshot):
            self._eraser.finish(records.remains_of(snapshot))

    def _is_deferred(self, snapshot: Snapshot) -> bool:
        """Whether the deletion of a snapshot has to wait until no disk is missing.

        While a disk is missing, lvm2 neither splits a copy-on-write snapshot from its origin nor
        changes a thin pool on that disk. A snapshot that is removed without erasing need not be
        split.
        """
        if not snapshot.is_thin:
            return self._eraser.policy.erases(snapshot) and bool(snapshot.group.missing_disks)
        holder = snapshot.group.volumes.get(snapshot.pool)
        return holder is not None and not holder.disks.isdisjoint(snapshot.group.missing_uuids)

    def get(self, snapshot_id: str) -> Snapshot:
        """Return the snapshot that has an id; raises NoSuchSnapshot."""
        parsed = VolumeId.parse(snapshot_id)
        if parsed is None:
            raise errors.NoSuchSnapshot(snapshot_id)
        return self._reports.snapshot(self._reports.fresh(parsed.group), snapshot_id)

    def list(self, request: ListSnapshots) -> ListPage[Snapshot]:
        """Return one page of the snapshots, sorted by id.

        If the request names a snapshot or a source, only the group of that id is read.
        """
        parsed = VolumeId.parse(request.snapshot_id or request.source_id)
        if parsed is not None and self._volume_groups.of(parsed.group) is not None:
            # Read only the volume group that the id in the request names: the external-snapshotter
            # polls a snapshot this way, and another volume group may hang.
            state: Known = self._reports.fresh(parsed.group)
            self._reports.group(state, parsed.group)
        else:
            state = self._reports.for_lists()
            self._reports.require_groups(state)
        snapshots = {
            str(snapshot.id): snapshot
            for snapshot in self._reports.listed_snapshots(state)
            if request.source_id in ("", str(snapshot.source_id))
            and request.snapshot_id in ("", str(snapshot.id))
        }
        return requests.select_page(snapshots, request.page)

    def require_free(self, state: Known, *logical: str) -> None:
        """Raise OperationPending while a deleted snapshot of one of these names is being erased.

        Starts the job that erases the snapshot, if there is none.
        """
        for doomed in state.doomed():
            if doomed.name in logical:
                # Start a job, as none may exist yet: a killed lvcreate leaves a COW store, too.
                self._eraser.delete(doomed)
                raise self._eraser.pending(doomed)


def _require_same_source(existing: Snapshot, request: CreateSnapshot) -> Snapshot:
    """Return the snapshot of an earlier call; raise Incompatible if it has another source.

    A snapshot whose data are lost is returned, too, with a warning in the log.
    """
    if str(existing.source_id) != request.source_id:
        raise errors.Incompatible(
            f"cannot take snapshot {request.name!r}: it exists, of {existing.source_id}, not of"
            f" {request.source_id}; use another name"
        )
    if existing.problem:
        _log.warning("snapshot %s can no longer be used: %s", existing.id, existing.problem)
    return existing
