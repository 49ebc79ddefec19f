"""Receive volumes as streams: create volumes, apply increments, finish or remove volumes.

A volume that is being received is tagged `receiving` from its lvcreate until it is finished.
Meanwhile the volume is not listed, not staged and not expanded. Only streams write to the volume,
so it holds exactly what its tags say. A chain is a digest that names exactly what a snapshot held.
Each stream brings the volume from one chain to the next:

    nothing ──whole──▶ into=A, offset=… ──all of it──▶ chain=A ──increment──▶ chain=A, into=B … ▶ B

A stream that was cut off continues at the offset in the volume's tags; everything before that
offset is on the disk.

A volume that moved away may come back while what it left here is still there, under quarantine. By
one command that becomes a volume that is being received. Its first stream is whole, but has only
the blocks that differ from what is on the disk (`tag.REPLACES`). If the stream is cut off, or its
snapshot is lost, the blocks are compared again.

Finishing checks the file system. The check may write to the volume, which then no longer holds what
its chain says. So a tag that forbids further streams is set before the check.
"""

import hmac
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from agent.core import errors, ids, tag
from agent.core.ids import VolumeId
from agent.extras.streams.form import Header
from agent.extras.transfer import stream_descriptions
from agent.extras.transfer.move import digest_of
from agent.extras.transfer.moving import is_going, is_gone
from agent.operations import block_sizes, clone, modify
from agent.operations.delete import VolumeDeleter
from agent.operations.remove_pool import PoolRemover
from agent.settings.classes import DeviceClass
from agent.volumes import backing, users, volume_states
from agent.volumes.allocation import pool_name
from agent.volumes.context import Context
from agent.volumes.records import Volume
from agent.volumes.volume_states import EndedBy
from lvm import layout, names, report, tuning, volumes
from lvm.active_devices import Device
from lvm.tuning import PLAIN, Tuning
from lvm.volumes import New
from mount import filesystem, luks
from proto import carver_pb2 as carver

# Keys of the tags that are removed from a received volume when the volume is finished.
_COMING = (
    *(tag.CHAIN, tag.CONTENT, tag.INTO, tag.OFFSET, tag.RELEASE, tag.FINISHING),
    tag.REPLACES,
)
# Keys of the tags that stay as they are when what a volume left becomes a volume that is received:
# they describe the logical volume, and not its contents. A mutable parameter is then set to that of
# the stream.
_OF_LOGICAL_VOLUME = frozenset(
    (
        *(tag.NAME, tag.CLASS, tag.LAYOUT, tag.CACHE, tag.SIZE, tag.NEEDS, tuning.OWN_MAXIMUM),
        *(setting.tag for setting in tuning.SETTINGS if setting.tag),
    )
)
# Value of the tag FINISHING of a volume that can only be removed: the volume was finished and then
# withdrawn, or its removal has begun.
_WITHDRAWN = "withdrawn"


class Receiver:
    """Receives volumes into the volume groups of this node."""

    def __init__(self, context: Context, deleter: VolumeDeleter, pool_remover: PoolRemover) -> None:
        self._configuration, self._run = context.configuration, context.run
        self._volume_groups, self._kernel = context.volume_groups, context.kernel
        self._reports, self._activator = context.reports, context.activator
        self._mender = context.mender
        self._deleter = deleter
        self._pool_remover = pool_remover
        self._holds = context.holds
        self._allocators = context.allocators
        self._detached = context.detached

    def status(self, name: str) -> carver.ReceiveState:
        """Return the state of the volume of a name; the state is `absent` if there is none.

        A volume that is absent may be in a configured volume group that is not on this node now;
        the state names such a group.

        Raises NeedsOther or TagsDamaged if there may be such a volume, but this version of Carver
        cannot read its tags. Until that is known, the node that the volume came from must not use
        its own volume.
        """
        own_name = names.logical_volume(ids.VOLUME_PREFIX, name)
        volume = self._reports.search(lambda candidate: candidate.name == own_name)
        if volume is not None:
            return _state(volume)
        fresh_report = self._reports.fresh()
        fresh_report.require_none_named(own_name)
        missing_groups = fresh_report.named_groups - fresh_report.groups.keys()
        return carver.ReceiveState(state="absent", missing_group=min(missing_groups, default=""))

    def begin(
        self, name: str, device_class: str, header: Header, replaces: str = ""
    ) -> carver.ReceiveState:
        """Create or grow the volume for a stream; return the volume's state.

        With `replaces`, the digest of an earlier move's word, what the volume left here by that
        move becomes the volume that is received. Running one more command, it then can only be
        completed by the move of the stream, or be removed.

        The state has the offset up to which the stream was received already. If the volume already
        holds the chain of the stream, only mutable parameters are changed, and the stream need not
        be applied. Creating the volume runs one lvm2 command, and a further one if the thin pool of
        the class has to be created.

        Raises NotAllowed if no class has the name `device_class`; NotReceived if the stream does
        not fit what the volume holds, or cannot replace it; Incompatible if a volume of that name
        exists and is not being received; OperationPending if the volume is being erased;
        VolumeInUse if another stream is being applied; NoRoom if the volume group has too few free
        extents.
        """
        chosen_class = self._configuration.now.device_class(device_class)
        if chosen_class is None:
            class_names = [known_class.name for known_class in self._configuration.now.classes]
            raise errors.NotAllowed("class", device_class, class_names)

        def begin() -> carver.ReceiveState:
            return self._begin(chosen_class, name, header, replaces)

        return self._pool_remover.retry_holding(
            chosen_class.group, pool_name(chosen_class.name), begin
        )

    def _begin(
        self, device_class: DeviceClass, name: str, header: Header, replaces: str
    ) -> carver.ReceiveState:
        self._reports.await_others(device_class.group)
        with self._volume_groups.hold(device_class.group):
            fresh_report = self._mender.mend(device_class.group)
            own_name = names.logical_volume(ids.VOLUME_PREFIX, name)
            volume = self._reports.every_group(fresh_report).find_named(own_name)
            if volume is None:
                return self._make(fresh_report, device_class, name, header)
            if volume.group.name == device_class.group:
                if replaces and is_gone(volume):
                    volume = self._replace(volume, device_class, name, header, replaces)
                return self._go_on(volume, name, header)
        # The volume is in the volume group of another class, into which an earlier stream was
        # received.
        with self._volume_groups.hold(volume.group.name):
            fresh_report = self._mender.mend(volume.group.name)
            return self._go_on(fresh_report.volume(str(volume.id)), name, header)

    def record(self, volume_id: str, into: str, offset_bytes: int) -> None:
        """Record in the volume's tags that everything before an offset is on the disk.

        Runs one lvm2 command, or none if the recorded offset is not smaller. `into` is the chain
        that the stream leads to. Raises NotReceived if the volume is not being received, or if
        another stream is being received.
        """
        with self._volume_groups.hold(ids.group_of(volume_id)):
            volume = self._receiving(volume_id)
            self._require_into(volume, into)
            if offset_bytes > volume.offset_bytes:
                self._mark(volume, {tag.OFFSET: str(offset_bytes)})

    def end(self, volume_id: str, header: Header) -> None:
        """Record that a whole stream is on the disk, and which contents the volume now has.

        The volume then has the contents that the chain of the stream names. A second call does
        nothing. Raises NotReceived if the volume is not being received, or if another stream is
        being received.
        """
        with self._volume_groups.hold(ids.group_of(volume_id)):
            volume = self._receiving(volume_id)
            if volume.own_tags.get(tag.CHAIN) == header.chain:
                return
            self._require_into(volume, header.chain)
            new_tags = {tag.CHAIN: header.chain, tag.CONTENT: str(header.size_bytes)}
            self._mark(volume, new_tags, removed_keys=(tag.INTO, tag.OFFSET, tag.REPLACES))

    def open(self, volume_id: str) -> None:
        """Activate a volume that is being received, so that its device can be read.

        Raises NotReceived if the volume is not being received.
        """
        with self._volume_groups.hold(ids.group_of(volume_id)):
            self._activator.activate(self._receiving(volume_id))

    def finish(self, volume_id: str, release: str) -> None:
        """Check a volume that was received as a stream, and make it a volume of this node.

        A second call does nothing. `release` is the secret word by which the source of a move lets
        the volume go. Raises NotReceived if the last stream is incomplete, if the word is wrong, or
        if the volume was withdrawn; VolumeInUse if the volume is in use; and the errors of
        `_check`.
        """
        self._finish(volume_id, partial(self._require_released, release=release))

    def keep(self, volume_id: str) -> None:
        """Do as `finish`, without the word of the move by which the volume came.

        An operator says that the node that the volume came from is lost with its disks, so that no
        node can release it any more. The volume then has what its last whole stream brought.
        """
        self._finish(volume_id, lambda _volume: None)

    def _finish(self, volume_id: str, require_released: Callable[[Volume], None]) -> None:
        with self._volume_groups.hold(ids.group_of(volume_id)):
            fresh_report = self._mender.mend(ids.group_of(volume_id))
            volume = fresh_report.volume(volume_id)
            if tag.RECEIVED in volume.own_tags and volume.is_listed:
                # The volume is finished already. Allow its use here as well: the earlier call may
                # have set the tags and yet got an error of lvm2.
                self._holds.remove_note(volume_id)
                return
            volume = self._receiving(volume_id)
            self._require_whole(volume)
            require_released(volume)
            users.require_unused(self._kernel, self._activator, volume)
            device = self._activator.activate(volume)
            if tag.FINISHING not in volume.own_tags:
                new_tags = {tag.FINISHING: volume.own_tags[tag.CHAIN]}
                volume = self._mark(volume, new_tags, removed_keys=(tag.CHAIN,))
        self._check(volume, device)
        with self._volume_groups.hold(ids.group_of(volume_id)):
            volume = self._receiving(volume_id)
            self._mark(volume, volume_states.tags_for(EndedBy.CALLER), removed_keys=_COMING)
        self._holds.remove_note(volume_id)

    def abort(self, volume_id: str, release: str = "") -> None:
        """Erase and remove a volume that is being received; do nothing if it does not exist.

        With `release`, the digest of a move's word, only what came by that move is removed. Raises
        NotReceived for a volume that was finished, or that came by another move or by none;
        VolumeInUse while a stream is applied.
        """
        with self._volume_groups.hold(ids.group_of(volume_id)):
            fresh_report = self._mender.mend(ids.group_of(volume_id))
            try:
                volume = fresh_report.volume(volume_id)
            except errors.NoSuchVolume:
                self._holds.remove_note(volume_id)
                return
            if not (_is_coming(volume) or volume.is_doomed):
                raise errors.NotReceived(volume_id, "it is finished, and a volume like any other")
            if release and not hmac.compare_digest(_release_of(volume), release):
                raise errors.NotReceived(volume_id, "it comes by another move, or by none")
            if _is_coming(volume) and volume.own_tags.get(tag.FINISHING) != _WITHDRAWN:
                users.require_unused(self._kernel, self._activator, volume)
                # Remove the tags of the chain before the first byte is erased. From then on the
                # volume no longer holds what these tags say.
                removed_keys = (tag.CHAIN, tag.INTO, tag.OFFSET)
                self._mark(volume, {tag.FINISHING: _WITHDRAWN}, removed_keys=removed_keys)
        self._deleter.delete(volume_id, is_own=False)
        self._holds.remove_note(volume_id)

    def withdraw(self, volume_id: str, release: str) -> None:
        """Undo `finish`: the volume cannot be used on this node any more; `abort` can remove it.

        `release` is the secret word of the move by which the volume came. A volume that is still
        being received is not changed. Raises NotReceived if the volume came by another move or by
        none, or if it moves on to another node; HasSnapshots if the volume has snapshots;
        VolumeInUse if the volume is in use.
        """
        with self._volume_groups.hold(ids.group_of(volume_id)):
            fresh_report = self._mender.mend(ids.group_of(volume_id))
            volume = fresh_report.volume(volume_id)
            if _is_coming(volume):
                return
            if tag.RELEASE in volume.own_tags:
                why = "it was to replace what it left on the other node; move it back instead"
                raise errors.NotReceived(volume_id, why)
            released = volume.own_tags.get(tag.RELEASED, "")
            if tag.RECEIVED not in volume.own_tags or not hmac.compare_digest(released, release):
                raise errors.NotReceived(volume_id, "it did not come by this move")
            if tag.MOVE_TO in volume.own_tags:
                why = f"it moves on to {volume.own_tags[tag.MOVE_TO]}; take that move back first"
                raise errors.NotReceived(volume_id, why)
            if kept_snapshots := volume.kept_snapshots:
                raise errors.HasSnapshots(
                    volume_id, kept_snapshots, "it is withdrawn only while it has none"
                )
            users.require_unused(self._kernel, self._activator, volume)
            new_tags = {**volume_states.tags_for(EndedBy.RECEIVER), tag.FINISHING: _WITHDRAWN}
            self._holds.note_receiving(volume_id)
            self._mark(volume, new_tags)

    def _make(
        self, fresh_report: report.Report, device_class: DeviceClass, name: str, header: Header
    ) -> carver.ReceiveState:
        if not header.is_whole:
            why = "there is no volume, and the stream needs a base; send a whole one"
            raise errors.NotReceived(name, why)
        if header.offset_bytes:
            why = f"there is no volume, and the stream begins at byte {header.offset_bytes}"
            raise errors.NotReceived(name, why)
        group = self._reports.group(fresh_report, device_class.group)
        self._require_blocks(name, group, stream_descriptions.blocks_of(header))
        size_bytes = layout.round_up(
            header.size_bytes, group.extent_size_bytes, device_class.layout
        )
        own_tags = stream_descriptions.tags_of(name, device_class, header, size_bytes, group)
        sent = stream_descriptions.tuning_of(header, device_class.layout).missing_from(PLAIN)
        tuning = modify.bounded(self._configuration.now, device_class, sent)
        own_tags |= tuning.tags()
        allocator = self._allocators.of(device_class)
        if size_bytes > (maximum := allocator.maximum_bytes(group)):
            raise errors.NoRoom(group.name, size_bytes, maximum, allocator.purpose(group))
        if device_class.layout.is_thin:
            self._pool_remover.require_kept(group.name, pool_name(device_class.name))
        own_name = names.logical_volume(ids.VOLUME_PREFIX, name)
        volume_id = str(VolumeId.of(group, own_name))
        # Before lvcreate runs, note that calls may not use the volume: lvcreate may fail and yet
        # create the volume. `abort` finds out whether the volume exists.
        self._holds.note_receiving(volume_id)
        with ExitStack() as undo:
            if device_class.layout.is_thin:
                self._pool_remover.remove_zeroing_volume(group, pool_name(device_class.name))
                undo.callback(
                    self._pool_remover.remove_if_empty, group.name, pool_name(device_class.name)
                )
            lvm = self._volume_groups.lvm(group.name)
            allocator.create(lvm, group, New(own_name, size_bytes, own_tags, tuning.for_new()))
            undo.pop_all()
        # Crash point: a RAID may lack its minimum recovery rate. A repeated call sets the rate,
        # also if it brings the same stream.
        modify.complete(lvm, group.name, own_name, tuning)
        volume = Volume(
            VolumeId.of(group, own_name), backing.of(group, own_name), group, size_bytes, own_tags
        )
        return _state(volume)

    def _replace(
        self,
        volume: Volume,
        device_class: DeviceClass,
        name: str,
        header: Header,
        replaces: str,
    ) -> Volume:
        """Have what a volume left here become a volume that is being received; return its record.

        The digest `replaces` is that of the move by which the volume left. All tags but those of
        the logical volume become those of a new volume for the stream, by one command. Raises
        NotReceived if it left by another move, cannot be replaced or is of another class, and if
        the stream needs a base; VolumeInUse if it is in use.
        """
        if not hmac.compare_digest(_replaceable(volume), replaces):
            raise errors.NotReceived(name, "what is left of it here cannot be replaced")
        if volume.own_tags.get(tag.CLASS) != device_class.name or not header.is_whole:
            why = f"what is left of it here takes whole streams of class {device_class.name} only"
            raise errors.NotReceived(name, why)
        users.require_unused(self._kernel, self._activator, volume)
        of_new_volume = stream_descriptions.tags_of(
            name, device_class, header, volume.size_bytes, volume.group
        )
        new_tags = {
            key: value
            for key, value in of_new_volume.items()
            # `_go_on` notes the stream.
            if key not in _OF_LOGICAL_VOLUME and key not in (tag.INTO, tag.OFFSET)
        }
        new_tags[tag.REPLACES] = replaces
        removed_keys = volume.own_tags.keys() - new_tags.keys() - _OF_LOGICAL_VOLUME
        self._holds.note_receiving(str(volume.id))
        return self._mark(volume, new_tags, removed_keys=tuple(sorted(removed_keys)))

    def _go_on(self, volume: Volume, name: str, header: Header) -> carver.ReceiveState:
        if volume.is_doomed:
            raise errors.OperationPending(f"{volume.id} (being erased)")
        if not _is_coming(volume):
            raise errors.Incompatible(f"volume {name!r} exists, and is not being received")
        self._holds.note_receiving(str(volume.id))
        if volume.own_tags.get(tag.CHAIN) == header.chain:
            if volume.own_tags.get(tag.RELEASE, "") == header.release:
                self._tune(volume, stream_descriptions.tuning_of(header, volume.layout))
            return _state(volume)
        self._require_fit(volume, name, header)
        # Check the header before anything of the volume is changed. The volume may have been
        # formatted since the last stream.
        added_tags = stream_descriptions.added_tags(header, volume.own_tags)
        tuning = stream_descriptions.tuning_of(header, volume.layout)
        users.require_unused(self._kernel, self._activator, volume)
        group = volume.group
        extent = group.extent_size_bytes
        size_bytes = layout.round_up(header.size_bytes, extent, volume.layout)
        if (growth_bytes := size_bytes - volume.size_bytes) > 0:
            allocator = self._allocators.of_volume(volume)
            if growth_bytes > (maximum_growth := allocator.maximum_growth_bytes(volume)):
                raise errors.NoRoom(
                    group.name, growth_bytes, maximum_growth, f"more {allocator.purpose(group)}"
                )
            allocator.extend(self._volume_groups.lvm(group.name), volume, size_bytes)
            volume = replace(volume, size_bytes=size_bytes)
        self._activator.activate(volume)
        # Set the mutable parameters at each call: an earlier call for the same stream may have
        # failed before it set them, or they have changed since on the node that sends.
        self._tune(volume, tuning)
        if volume.own_tags.get(tag.INTO) != header.chain:
            requested_tag = stream_descriptions.requested(header, size_bytes)
            removed_keys = () if requested_tag else (tag.REQUESTED,)
            new_tags = {tag.INTO: header.chain, tag.OFFSET: "0", **requested_tag, **added_tags}
            volume = self._mark(volume, new_tags, removed_keys=removed_keys)
        return _state(volume)

    def _tune(self, volume: Volume, tuning: Tuning) -> None:
        """Change the mutable parameters in which a volume differs from those of a stream."""
        bound_kib = self._configuration.now.recovery_bound_kib(volume.group.name)
        modify.ensure(self._volume_groups.lvm(volume.group.name), volume, tuning, bound_kib)

    def _require_fit(self, volume: Volume, name: str, header: Header) -> None:
        """Raise NotReceived if the stream does not continue what the volume holds."""
        own_tags = volume.own_tags
        chain, into = own_tags.get(tag.CHAIN, ""), own_tags.get(tag.INTO, "")
        if own_tags.get(tag.FINISHING) == _WITHDRAWN:
            raise errors.NotReceived(name, "it was withdrawn, and is only to be removed")
        if tag.FINISHING in own_tags:
            raise errors.NotReceived(name, "it is being finished, and takes no more streams")
        if own_tags.get(tag.RELEASE, "") != header.release:
            raise errors.NotReceived(name, "it comes by another move, or by none")
        if header.base_chain != chain:
            base_id = header.base_snapshot_id or "it is a whole one"
            why = f"the stream continues {header.base_chain or 'nothing'} ({base_id}), it holds"
            raise errors.NotReceived(name, f"{why} {chain or 'nothing whole'}")
        is_same = into == header.chain
        # Before a stream is applied to what another move left, all of that is compared. So it does
        # not matter what another stream has changed.
        if into and not is_same and tag.REPLACES not in own_tags:
            why = f"a stream to {into} was begun; send that again, or end it with --abort"
            raise errors.NotReceived(name, why)
        if header.offset_bytes > (offset_bytes := volume.offset_bytes if is_same else 0):
            received = f"after byte {offset_bytes}, up to which it was received"
            why = f"the stream begins at byte {header.offset_bytes}, {received}"
            raise errors.NotReceived(name, why)

    @staticmethod
    def _require_whole(volume: Volume) -> None:
        """Raise NotReceived unless the volume has all of its last stream."""
        own_tags, name = volume.own_tags, volume.own_tags[tag.NAME]
        if own_tags.get(tag.FINISHING) == _WITHDRAWN:
            raise errors.NotReceived(name, "it was withdrawn, and is only to be removed")
        if tag.INTO in own_tags or not (tag.CHAIN in own_tags or tag.FINISHING in own_tags):
            raise errors.NotReceived(name, "its stream is incomplete; send it again")

    def _require_released(self, volume: Volume, release: str) -> None:
        """Raise NotReceived unless `release` is the word of the volume's move; record the word."""
        own_tags, name = volume.own_tags, volume.own_tags[tag.NAME]
        release_digest = own_tags.get(tag.RELEASE, "")
        if release_digest and not hmac.compare_digest(digest_of(release), release_digest):
            why = "its source has not released it; `carver volume move` there does both"
            raise errors.NotReceived(name, why)
        if release and release_digest and own_tags.get(tag.RELEASED) != release:
            self._mark(volume, {tag.RELEASED: release})

    def _check(self, volume: Volume, device: Device) -> None:
        """Check a received volume's file system, and give a btrfs a new UUID.

        Of an encrypted volume only the LUKS2 header is checked here, of a raw block volume nothing.
        A volume on which no file system is found is not checked, if Carver never formatted it. The
        btrfs of a copy has the UUID of its source, and the kernel needs different UUIDs. The check
        may repair the file system.

        Raises HeaderDamaged if the header is not the one that was sent, ContentsLost if the file
        system is gone, NotReceived if its blocks are too small for the disks, Damaged if it cannot
        be repaired.
        """
        own_tags, identity = volume.own_tags, str(volume.id)
        if volume.is_encrypted:
            # The file system of an encrypted volume is checked later, when the volume is opened.
            header = luks.read(self._kernel, device.path)
            if (sealed := own_tags.get(tag.SEALED)) and (header is None or header.uuid != sealed):
                raise errors.HeaderDamaged(identity, "it did not come with the stream")
            return
        if volume.is_block:
            return
        self._detached.wait_for(identity)
        formatted = own_tags.get(tag.FORMATTED, "")
        if clone.may_hold_btrfs(own_tags) and filesystem.is_on(self._kernel, device.path):
            filesystem.renew_uuid(self._kernel, device.path)
        if not formatted:
            signature = filesystem.probe(self._kernel, device.path)
            if signature is None or signature.fs_type not in filesystem.FILE_SYSTEMS:
                return
            formatted = signature.fs_type
        elif (signature := filesystem.find(self._kernel, device.path, formatted)) is None:
            raise errors.ContentsLost(identity, formatted, device.path)
        # Check the block size on the device, too. The header of the stream does not have the block
        # size if an earlier version of Carver sent the stream, or if the file system was made after
        # the header.
        self._require_blocks(own_tags[tag.NAME], volume.group, signature.block_bytes)
        check = partial(filesystem.check, self._run, device.path, formatted)
        proof = partial(self._activator.require_same, volume, device)
        self._detached.do(identity, volume.group.name, "fsck", check, proof)

    def _require_blocks(self, name: str, group: report.Group, content_block_bytes: int) -> None:
        """Raise NotReceived if contents cannot be used on the disks of a volume group.

        `content_block_bytes` is the largest logical block size on which the contents can be used,
        in bytes; 0 if any block size will do.
        """
        disk_block_bytes = block_sizes.of_group(self._kernel, group)
        if why := block_sizes.problem(content_block_bytes, group, disk_block_bytes):
            raise errors.NotReceived(name, why)

    def _receiving(self, volume_id: str) -> Volume:
        """Return the volume with an id; raise NotReceived if the volume is not being received.

        The caller holds the volume group's lock.
        """
        fresh_report = self._mender.mend(ids.group_of(volume_id))
        volume = fresh_report.volume(volume_id)
        if not _is_coming(volume):
            raise errors.NotReceived(volume_id, "it is not being received")
        return volume

    @staticmethod
    def _require_into(volume: Volume, into: str) -> None:
        if volume.own_tags.get(tag.INTO) != into:
            raise errors.NotReceived(str(volume.id), "another stream is being received")

    def _mark(
        self, volume: Volume, new_tags: Mapping[str, str], removed_keys: tuple[str, ...] = ()
    ) -> Volume:
        """Change tags of a volume by one lvm2 command, all or none; return the changed volume.

        Tags that have the new value already are left out.
        """
        new_tags = {
            key: value for key, value in new_tags.items() if volume.own_tags.get(key) != value
        }
        old_keys = {key for key in (*new_tags, *removed_keys) if key in volume.own_tags}
        old_tags = {key: volume.own_tags[key] for key in old_keys}
        lvm, group = self._volume_groups.lvm(volume.group.name), volume.group.name
        volumes.mark(lvm, group, volume.name, old_tags=old_tags, new_tags=new_tags)
        kept_tags = {key: value for key, value in volume.own_tags.items() if key not in old_keys}
        return replace(volume, own_tags={**kept_tags, **new_tags})


def _is_coming(volume: Volume) -> bool:
    """Return whether a volume is being received, or was withdrawn, and so cannot be used."""
    return volume.ended_by is EndedBy.RECEIVER


def _state(volume: Volume) -> carver.ReceiveState:
    """Return the message with the state of a volume, from the volume's tags."""
    own_tags = volume.own_tags
    return carver.ReceiveState(
        volume_id=str(volume.id),
        state=volume_states.word_of(volume.ended_by),
        chain=own_tags.get(tag.CHAIN, ""),
        content_bytes=volume.content_bytes,
        into=own_tags.get(tag.INTO, ""),
        offset_bytes=volume.offset_bytes,
        received=own_tags.get(tag.RECEIVED, ""),
        finishing=tag.FINISHING in own_tags,
        # Old contents may be anywhere in what another move left.
        blank=volume.is_thin and tag.REPLACES not in own_tags,
        release=_release_of(volume),
        replaceable=_replaceable(volume),
        replaces=own_tags.get(tag.REPLACES, "") if _is_coming(volume) else "",
        device_class=own_tags.get(tag.CLASS, ""),
    )


def _replaceable(volume: Volume) -> str:
    """Return the digest of the word of the move by which a volume left this node.

    Empty unless what is left of it here can become a volume that is received: it is whole, and has
    no copy-on-write snapshots, which would be lost when it is written.
    """
    if not is_gone(volume) or is_going(volume):
        return ""
    if volume.kept_snapshots or volume.missing_disks:
        return ""
    return digest_of(volume.own_tags.get(tag.MOVE_WORD, ""))


def _release_of(volume: Volume) -> str:
    """Return the digest of the word of the move that a volume came by; empty without a move."""
    own_tags = volume.own_tags
    return own_tags.get(tag.RELEASE, "") or digest_of(own_tags.get(tag.RELEASED, ""))
