"""CreateSnapshot, DeleteSnapshot, GetSnapshot, ListSnapshots.

A snapshot of a thin volume shares its pool and is complete without it; any other has a COW store
for what its origin overwrites, and is nothing without its origin. One lvcreate takes and tags it.
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
from agent.requests.requests import CreateSnapshot, ListSnapshots, Part
from agent.settings.classes import SNAPSHOT_SIZE
from agent.volumes import backing, records, users, volume_states
from agent.volumes.allocation import closed_to_new, full
from agent.volumes.context import Context
from agent.volumes.records import Snapshot, Volume
from agent.volumes.report_age import Known
from agent.volumes.volume_states import Call, Ender
from lvm import caches, layout, names, thin, volumes
from lvm.room import Room

_log = logging.getLogger(__name__)

# Tags of the origin that a volume made of the snapshot needs, as they were when it was taken.
INHERITED = (
    *(tag.REQUESTED, tag.MKFS_OPTIONS),
    *(tag.ACCESS, tag.FORMATTED, tag.CLASS, tag.FS_TYPE),
    *(tag.ENCRYPTION, tag.HEADER, tag.SEALED, *tag.OF_KEYS),
)


class Snapshotter:
    """Takes, finds, lists and deletes snapshots.

    `readers` gives the ids of the volumes that this process is filling from a snapshot: it also
    knows those of a group that does not answer.
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

    def create(self, call: CreateSnapshot) -> Snapshot:
        """Take a snapshot, or find the one that an earlier call took.

        Two commands at most: a report, and lvcreate, which also tags. Raises Elsewhere.
        """
        if not call.topology.includes(self._configuration.now.here):
            raise errors.Elsewhere(self._configuration.now.node_id)
        name = names.logical_volume(ids.SNAPSHOT_PREFIX, call.name)
        source = backing.of_id(call.source_id)
        with self._limiter.lifted(source):
            users.flush(self._kernel, self._activator, source)
        group = ids.group_of(call.source_id)
        self._reports.await_others(group)
        with self._volume_groups.hold(group):
            known = self._mender.mend(group)
            self.require_free(known, name)
            for found in self._reports.listed_snapshots(self._reports.everywhere(known)):
                if found.name == name:
                    return _same(found, call)
            volume = known.volume(call.source_id)
            self._conflicts.require(Call.SNAPSHOT, volume)
            self.make_room(volume)
            # Crash point: a COW store with these tags and without an origin; the next call, or the
            # next start, erases it as deleted.
            return self.take(name, volume, {tag.NAME: call.name, **call.about}, call.size)

    def take(
        self,
        name: str,
        volume: Volume,
        own_tags: Mapping[str, str],
        size: layout.Reserve | None,
        *,
        copy_on_write: bool = False,
    ) -> Snapshot:
        """Take a snapshot under a logical volume's name: one command; the group is held.

        `volume` is of a report that was read within, from which the snapshot's number follows. A
        thin volume gets a thin one, unless `copy_on_write`. Raises NoRoom, NotSnapshotted.
        """
        area_bytes = self.needed_bytes(volume, size, copy_on_write=copy_on_write)
        group = volume.group
        lvm = self._volume_groups.lvm(group.name)
        pool = "" if copy_on_write else group.volume(volume.name).pool
        own_tags = {
            tag.TIME: str(time.time_ns()),
            **own_tags,
            **volume_states.tags_for(Ender.CALLER),
            tag.SIZE: str(volume.size_bytes),
            tag.SOURCE: volume.name,
            tag.SEQUENCE: str(records.next_sequence(group)),
            **{key: volume.own_tags[key] for key in INHERITED if key in volume.own_tags},
        }
        with self._limiter.lifted(volume.backing):
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
                    disks=Room(group).anywhere(),
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
        """Extend the pools of volumes that are too full to suspend one; the groups are held.

        Raises NoRoom, PoolSilent.
        """
        every = ((one, one.group.volume(one.name).pool) for one in volumes)
        pools = {(one.group.name, pool): one for one, pool in every if pool}
        for (group, _), one in pools.items():
            lvm = self._volume_groups.lvm(group)
            self._allocators.of_volume(one).make_room(lvm, one.group)

    def needed_bytes(
        self,
        volume: Volume,
        size: layout.Reserve | None,
        *,
        copy_on_write: bool = False,
        beside_bytes: int = 0,
        beside: int = 0,
    ) -> int:
        """The size of a COW store, or of a thin snapshot's promise, if there is room for it.

        `beside_bytes` of the room are for so many other logical volumes, `beside`. Raises NoRoom,
        NotSnapshotted.
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
            limited = allocator.full(group, beside)
            needed, room = volume.size_bytes, 0 if limited else allocator.maximum_bytes(group)
            purpose = limited or allocator.purpose(group)
        else:
            one = self._configuration.now.device_class(called := volume.own_tags.get(tag.CLASS, ""))
            wish = size or (SNAPSHOT_SIZE if one is None else one.snapshot_size)
            needed = layout.copy_on_write_bytes(volume.size_bytes, wish, group)
            closed = closed_to_new(group) or full(group, 1 + beside)
            room = 0 if closed else self._allocators.beside_bytes(Room(group), called)
            purpose = f"for a snapshot of {volume.name} {closed}".rstrip()
        room = max(0, room - beside_bytes)
        if needed > room:
            raise errors.NoRoom(group.name, needed, room, purpose)
        return needed

    def delete(self, snapshot_id: str) -> None:
        """Split a snapshot from its origin, erase and remove it; no such snapshot is no error.

        Two commands at most before it is erased, which may outlast the call.
        """
        parsed = VolumeId.parse(snapshot_id)
        if parsed is None:
            return
        self._reports.await_others(parsed.group)
        with self._volume_groups.hold(parsed.group):
            known = self._mender.mend(parsed.group)
            try:
                snapshot = self._reports.snapshot(known, snapshot_id)
            except errors.NoSuchSnapshot:
                # Crash point: split, and its COW store is left, tagged as deleted.
                self.go_on(known, snapshot_id)
                return
            if snapshot.group_snapshot_id:
                raise errors.PartOfGroup(snapshot_id, snapshot.group_snapshot_id)
            # A copy in another group reads it, and its extents are erased at once.
            self._reports.everywhere(known).require_not_copied(snapshot_id)
            self.require_unread(snapshot_id)
            self.part(snapshot)
        self.finish(snapshot)

    def require_unread(self, snapshot_id: str) -> None:
        """Raise VolumeInUse while this process fills a volume from it; its group is held."""
        if copies := self._readers(snapshot_id):
            raise errors.VolumeInUse(snapshot_id, f"{', '.join(copies)} is copied from it")

    def go_on(self, known: Known, snapshot_id: str) -> None:
        """Erase in the background what is left of a snapshot that was split from its origin.

        Raises NeedsOther, TagsDamaged where it is not to be erased.
        """
        own_name = ids.logical_name(snapshot_id)
        if not any(names.is_of(one, own_name) for one in (ids.SNAPSHOT_PREFIX, ids.BRIDGE_PREFIX)):
            return
        try:
            remains = known.doomed_volume(snapshot_id)
        except (errors.NoSuchVolume, errors.OtherGroup):
            return
        self._eraser.delete(remains)

    def discard(self, snapshot: Snapshot) -> None:
        """Erase and remove a snapshot that is there; erasing may outlast the call."""
        with self._volume_groups.hold(snapshot.group.name):
            if snapshot.is_thin:
                # Only a fresh report says whether it is the last in its pool.
                name = snapshot.group.name
                snapshot = replace(snapshot, group=self._reports.fresh(name).group(name))
            self.part(snapshot)
        self.finish(snapshot)

    def part(self, snapshot: Snapshot) -> None:
        """Split a snapshot from its origin, or remove it; the group is held.

        While a disk is missing lvm2 splits nothing: the snapshot is tagged as deleted.
        """
        group = snapshot.group.name
        lvm = self._volume_groups.lvm(group)
        if self._is_deferred(snapshot):
            volume_states.hand_over(lvm, group, snapshot.name, snapshot.own_tags, Ender.ERASER)
        elif snapshot.is_thin:
            self._pool_remover.remove(snapshot)
        elif self._eraser.policy.erases(snapshot):
            # Its COW store has data of the origin, and must be erased before it is allocated again.
            volumes.split(lvm, group, snapshot.name)
        else:
            volumes.remove(lvm, group, snapshot.name)

    def finish(self, snapshot: Snapshot) -> None:
        """Erase what `part` left of a snapshot; that may outlast the call."""
        if self._is_deferred(snapshot):
            self._eraser.finish(records.remains_of(snapshot, parted=False))
        elif snapshot.is_thin:
            self._pool_remover.after(snapshot, self._eraser.grace_seconds)
        elif self._eraser.policy.erases(snapshot):
            self._eraser.finish(records.remains_of(snapshot))

    def _is_deferred(self, snapshot: Snapshot) -> bool:
        """Whether lvm2 cannot split it, or change its pool, because a disk is missing."""
        if not snapshot.is_thin:
            return self._eraser.policy.erases(snapshot) and bool(snapshot.group.missing_disks)
        holder = snapshot.group.volumes.get(snapshot.pool)
        return holder is not None and not holder.disks.isdisjoint(snapshot.group.missing_uuids)

    def get(self, snapshot_id: str) -> Snapshot:
        """The snapshot of that id; raises NoSuchSnapshot."""
        parsed = VolumeId.parse(snapshot_id)
        if parsed is None:
            raise errors.NoSuchSnapshot(snapshot_id)
        return self._reports.snapshot(self._reports.fresh(parsed.group), snapshot_id)

    def list(self, call: ListSnapshots) -> Part[Snapshot]:
        """A part of the snapshots, in the order of their ids; of one group where an id names it."""
        named = VolumeId.parse(call.snapshot_id or call.source_id)
        if named is not None and self._volume_groups.of(named.group) is not None:
            # So the external-snapshotter polls one snapshot: another group may hang.
            known: Known = self._reports.fresh(named.group)
            self._reports.group(known, named.group)
        else:
            known = self._reports.lists()
            self._reports.require_groups(known)
        found = {
            str(one.id): one
            for one in self._reports.listed_snapshots(known)
            if call.source_id in ("", str(one.source_id)) and call.snapshot_id in ("", str(one.id))
        }
        return requests.part(found, call.page)

    def require_free(self, known: Known, *logical: str) -> None:
        """Raise OperationPending while a deleted snapshot of one of these names is erased."""
        for doomed in known.doomed():
            if doomed.name in logical:
                # A killed lvcreate leaves one too, for which no job exists yet.
                self._eraser.delete(doomed)
                raise self._eraser.pending(doomed)


def _same(found: Snapshot, call: CreateSnapshot) -> Snapshot:
    """The snapshot that an earlier call took; raises Incompatible for another source."""
    if str(found.source_id) != call.source_id:
        raise errors.Incompatible(
            f"cannot take snapshot {call.name!r}: it exists, of {found.source_id}, not of"
            f" {call.source_id}; use another name"
        )
    if found.problem:
        _log.warning("snapshot %s can no longer be used: %s", found.id, found.problem)
    return found
