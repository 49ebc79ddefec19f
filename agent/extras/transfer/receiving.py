"""Receive volumes as streams: create them, take increments, finish or remove them.

A volume is tagged `receiving` from its lvcreate until it is finished: not listed, not staged, not
grown. Only streams write to it, so it holds exactly what its tags say. Each stream brings it from
one chain, the name of exactly what a snapshot held, to the next:

    nothing ──whole──▶ into=A, offset=… ──all of it──▶ chain=A ──increment──▶ chain=A, into=B … ▶ B

A stream that was cut off continues at the recorded offset, before which all is on the disk; the
records are tags. Finishing checks the file system, which may write to it: then the volume no longer
holds what its chain says, so the record that it takes no more streams comes first.
"""

import hashlib
import hmac
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from agent.core import errors, ids, tag
from agent.core.ids import VolumeId
from agent.extras.streams.form import Header
from agent.extras.transfer import stream_descriptions
from agent.operations import block_sizes, clone, modify
from agent.operations.delete import VolumeDeleter
from agent.operations.remove_pool import PoolRemover
from agent.settings.classes import DeviceClass
from agent.volumes import backing, users, volume_states
from agent.volumes.allocation import pool_name
from agent.volumes.context import Context
from agent.volumes.records import Volume
from agent.volumes.volume_states import Ender
from lvm import layout, names, report, volumes
from lvm.active_devices import Device
from lvm.volumes import New
from mount import filesystem, luks
from proto import carver_pb2 as carver

# The tags that are removed when it is finished.
_COMING = (tag.CHAIN, tag.CONTENT, tag.INTO, tag.OFFSET, tag.RELEASE, tag.FINISHING)
# The value of FINISHING for a volume that can only be removed.
_WITHDRAWN = "withdrawn"


class Receiver:
    """Receives volumes into this node's groups."""

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
        """The state of the volume of that name; `absent` where the report proves there is none.

        Raises NeedsOther, TagsDamaged: a volume here may not be usable on its first node.
        """
        own_name = names.logical_volume(ids.VOLUME_PREFIX, name)
        found = self._reports.search(lambda one: one.name == own_name)
        if found is not None:
            return _state(found)
        self._reports.fresh().require_none_named(name, ids.VOLUME_PREFIX)
        return carver.ReceiveState(state="absent")

    def begin(self, name: str, device_class: str, header: Header) -> carver.ReceiveState:
        """Create or grow the volume for a stream, and return its state: where the stream begins.

        The first stream takes two commands. There is nothing to apply where `chain` is the
        stream's already. Raises NotReceived, VolumeInUse, NoRoom.
        """
        one = self._configuration.now.device_class(device_class)
        if one is None:
            known_classes = [each.name for each in self._configuration.now.classes]
            raise errors.NotAllowed("class", device_class, known_classes)

        def begin() -> carver.ReceiveState:
            return self._begin(one, name, header)

        return self._pool_remover.when_kept(one.group, pool_name(one.name), begin)

    def _begin(self, one: DeviceClass, name: str, header: Header) -> carver.ReceiveState:
        self._reports.await_others(one.group)
        with self._volume_groups.hold(one.group):
            known = self._mender.mend(one.group)
            found = self._reports.everywhere(known).named(name)
            if found is None:
                return self._make(known, one, name, header)
            if found.group.name == one.group:
                return self._go_on(found, name, header)
        # It was received into another class's group.
        with self._volume_groups.hold(found.group.name):
            known = self._mender.mend(found.group.name)
            return self._go_on(known.volume(str(found.id)), name, header)

    def record(self, volume_id: str, into: str, offset_bytes: int) -> None:
        """Record that everything before an offset is on the disk. One command."""
        with self._volume_groups.hold(ids.group_of(volume_id)):
            volume = self._coming(volume_id)
            self._require_into(volume, into)
            if offset_bytes > volume.offset_bytes:
                self._mark(volume, {tag.OFFSET: str(offset_bytes)})

    def end(self, volume_id: str, header: Header) -> None:
        """Record that the whole stream is on the disk: the volume holds its chain."""
        with self._volume_groups.hold(ids.group_of(volume_id)):
            volume = self._coming(volume_id)
            if volume.own_tags.get(tag.CHAIN) == header.chain:
                return
            self._require_into(volume, header.chain)
            new = {tag.CHAIN: header.chain, tag.CONTENT: str(header.size_bytes)}
            self._mark(volume, new, without=(tag.INTO, tag.OFFSET))

    def open(self, volume_id: str) -> None:
        """Activate what was received, for reading."""
        with self._volume_groups.hold(ids.group_of(volume_id)):
            self._activator.activate(self._coming(volume_id))

    def finish(self, volume_id: str, release: str) -> None:
        """Make it a volume of this node, its file system checked. A second call does nothing.

        Raises NotReceived where a stream is incomplete or its source has not released it; Damaged,
        ContentsLost.
        """
        with self._volume_groups.hold(ids.group_of(volume_id)):
            known = self._mender.mend(ids.group_of(volume_id))
            volume = known.volume(volume_id)
            if tag.RECEIVED in volume.own_tags and volume.is_listed:
                # An earlier call may have finished it without its answer from lvm2.
                self._holds.allow(volume_id)
                return
            volume = self._coming(volume_id)
            self._require_whole(volume, release)
            users.require_unused(self._kernel, self._activator, volume)
            device = self._activator.activate(volume)
            if tag.FINISHING not in volume.own_tags:
                new = {tag.FINISHING: volume.own_tags[tag.CHAIN]}
                volume = self._mark(volume, new, without=(tag.CHAIN,))
        self._check(volume, device)
        with self._volume_groups.hold(ids.group_of(volume_id)):
            volume = self._coming(volume_id)
            self._mark(volume, volume_states.tags_for(Ender.CALLER), without=_COMING)
        self._holds.allow(volume_id)

    def abort(self, volume_id: str) -> None:
        """Erase and remove what was received; it is no error if there is no such volume.

        Raises NotReceived for one that was finished, VolumeInUse while a stream is applied.
        """
        with self._volume_groups.hold(ids.group_of(volume_id)):
            known = self._mender.mend(ids.group_of(volume_id))
            try:
                volume = known.volume(volume_id)
            except errors.NoSuchVolume:
                self._holds.allow(volume_id)
                return
            if not (_is_coming(volume) or volume.is_doomed):
                raise errors.NotReceived(volume_id, "it is finished, and a volume like any other")
            if _is_coming(volume) and volume.own_tags.get(tag.FINISHING) != _WITHDRAWN:
                users.require_unused(self._kernel, self._activator, volume)
                # Before the first byte is erased: then it no longer holds what its tags say.
                gone = (tag.CHAIN, tag.INTO, tag.OFFSET)
                self._mark(volume, {tag.FINISHING: _WITHDRAWN}, without=gone)
        self._deleter.delete(volume_id, is_own=False)
        self._holds.allow(volume_id)

    def withdraw(self, volume_id: str, release: str) -> None:
        """Undo `finish`: it is no volume of this node any more, and `abort` removes it.

        Raises NotReceived where it did not come by this move, VolumeInUse.
        """
        with self._volume_groups.hold(ids.group_of(volume_id)):
            known = self._mender.mend(ids.group_of(volume_id))
            volume = known.volume(volume_id)
            if _is_coming(volume):
                return
            was = volume.own_tags.get(tag.RELEASED, "")
            if tag.RECEIVED not in volume.own_tags or not hmac.compare_digest(was, release):
                raise errors.NotReceived(volume_id, "it did not come by this move")
            if tag.MOVE_TO in volume.own_tags:
                why = f"it moves on to {volume.own_tags[tag.MOVE_TO]}; --undo that move here first"
                raise errors.NotReceived(volume_id, why)
            if held := volume.kept_snapshots:
                raise errors.HasSnapshots(volume_id, held, "it is withdrawn only while it has none")
            users.require_unused(self._kernel, self._activator, volume)
            new = {**volume_states.tags_for(Ender.RECEIVER), tag.FINISHING: _WITHDRAWN}
            self._holds.receiving(volume_id)
            self._mark(volume, new)

    def _make(
        self, known: report.Report, one: DeviceClass, name: str, header: Header
    ) -> carver.ReceiveState:
        if not header.is_whole:
            why = "there is no volume, and the stream needs a base; send a whole one"
            raise errors.NotReceived(name, why)
        if header.offset_bytes:
            why = f"there is no volume, and the stream begins at byte {header.offset_bytes}"
            raise errors.NotReceived(name, why)
        group = self._reports.group(known, one.group)
        self._require_blocks(name, group, stream_descriptions.blocks_of(header))
        size_bytes = layout.round_up(header.size_bytes, group.extent_size_bytes, one.layout)
        own_tags = stream_descriptions.tags_of(name, one, header, size_bytes, group)
        tuning = modify.bounded(self._configuration.now, one)
        own_tags |= tuning.tags()
        allocator = self._allocators.of(one)
        if size_bytes > (maximum := allocator.maximum_bytes(group)):
            raise errors.NoRoom(group.name, size_bytes, maximum, allocator.purpose(group))
        if one.layout.is_thin:
            self._pool_remover.require_kept(group.name, pool_name(one.name))
        logical = names.logical_volume(ids.VOLUME_PREFIX, name)
        volume_id = str(VolumeId.of(group, logical))
        # Also where lvcreate fails: it may have created it, and `abort` finds out.
        self._holds.receiving(volume_id)
        with ExitStack() as undo:
            if one.layout.is_thin:
                self._pool_remover.empty(group, pool_name(one.name))
                undo.callback(self._pool_remover.give_back, group.name, pool_name(one.name))
            new = New(logical, size_bytes, own_tags, tuning)
            allocator.create(self._volume_groups.lvm(group.name), group, new)
            undo.pop_all()
        made = Volume(
            VolumeId.of(group, logical), backing.of(group, logical), group, size_bytes, own_tags
        )
        return _state(made)

    def _go_on(self, volume: Volume, name: str, header: Header) -> carver.ReceiveState:
        if volume.is_doomed:
            raise errors.OperationPending(f"{volume.id} (being erased)")
        if not _is_coming(volume):
            raise errors.Incompatible(f"volume {name!r} exists, and is not being received")
        self._holds.receiving(str(volume.id))
        if volume.own_tags.get(tag.CHAIN) == header.chain:
            return _state(volume)
        self._require_fit(volume, name, header)
        users.require_unused(self._kernel, self._activator, volume)
        group = volume.group
        extent = group.extent_size_bytes
        size_bytes = layout.round_up(header.size_bytes, extent, volume.layout)
        if (more := size_bytes - volume.size_bytes) > 0:
            allocator = self._allocators.of_volume(volume)
            if more > (room := allocator.maximum_growth_bytes(volume)):
                raise errors.NoRoom(group.name, more, room, f"more {allocator.purpose(group)}")
            allocator.extend(self._volume_groups.lvm(group.name), volume, size_bytes)
            volume = replace(volume, size_bytes=size_bytes)
        self._activator.activate(volume)
        if volume.own_tags.get(tag.INTO) != header.chain:
            asked = stream_descriptions.requested(header, size_bytes)
            without = () if asked else (tag.REQUESTED,)
            new = {tag.INTO: header.chain, tag.OFFSET: "0", **asked}
            if tag.ROTATING in header.facts:
                new[tag.ROTATING] = header.facts[tag.ROTATING]
            volume = self._mark(volume, new, without=without)
        return _state(volume)

    def _require_fit(self, volume: Volume, name: str, header: Header) -> None:
        """Raise NotReceived where the stream does not continue what is there."""
        own_tags = volume.own_tags
        holds, into = own_tags.get(tag.CHAIN, ""), own_tags.get(tag.INTO, "")
        if own_tags.get(tag.FINISHING) == _WITHDRAWN:
            raise errors.NotReceived(name, "it was withdrawn, and is only to be removed")
        if tag.FINISHING in own_tags:
            raise errors.NotReceived(name, "it is being finished, and takes no more streams")
        if own_tags.get(tag.RELEASE, "") != header.release:
            raise errors.NotReceived(name, "it comes by another move, or by none")
        if header.base_chain != holds:
            base_id = header.base_snapshot_id or "it is a whole one"
            why = f"the stream continues {header.base_chain or 'nothing'} ({base_id}), it holds"
            raise errors.NotReceived(name, f"{why} {holds or 'nothing whole'}")
        if into and into != header.chain:
            why = f"a stream to {into} was begun; send that again, or end it with --abort"
            raise errors.NotReceived(name, why)
        if header.offset_bytes > (volume.offset_bytes if into else 0):
            received = f"after byte {volume.offset_bytes}, up to which it was received"
            why = f"the stream begins at byte {header.offset_bytes}, {received}"
            raise errors.NotReceived(name, why)

    def _require_whole(self, volume: Volume, release: str) -> None:
        own_tags, name = volume.own_tags, volume.own_tags[tag.NAME]
        if own_tags.get(tag.FINISHING) == _WITHDRAWN:
            raise errors.NotReceived(name, "it was withdrawn, and is only to be removed")
        if tag.INTO in own_tags or not (tag.CHAIN in own_tags or tag.FINISHING in own_tags):
            raise errors.NotReceived(name, "its stream is incomplete; send it again")
        wanted = own_tags.get(tag.RELEASE, "")
        if wanted and not hmac.compare_digest(_digest(release), wanted):
            why = "its source has not released it; `carver volume move` there does both"
            raise errors.NotReceived(name, why)
        if release and wanted and own_tags.get(tag.RELEASED) != release:
            self._mark(volume, {tag.RELEASED: release})

    def _check(self, volume: Volume, device: Device) -> None:
        """Check the file system, and give it an id of its own where it needs one."""
        own_tags, identity = volume.own_tags, str(volume.id)
        if volume.is_encrypted:
            # Its file system is checked when it is opened.
            header = luks.read(self._kernel, device.path)
            if (sealed := own_tags.get(tag.SEALED)) and (header is None or header.uuid != sealed):
                raise errors.HeaderDamaged(identity, "it did not come with the stream")
            return
        if volume.is_block:
            return
        self._detached.finish(identity)
        formatted = own_tags.get(tag.FORMATTED, "")
        if clone.may_hold_btrfs(own_tags) and filesystem.is_on(self._kernel, device.path):
            filesystem.renew(self._kernel, device.path)
        if not formatted:
            found = filesystem.probe(self._kernel, device.path)
            if found is None or found.fs_type not in filesystem.FILE_SYSTEMS:
                return
            formatted = found.fs_type
        elif (found := filesystem.find(self._kernel, device.path, formatted)) is None:
            raise errors.ContentsLost(identity, formatted, device.path)
        # A stream of an earlier version, or of a file system that was made since, does not tell.
        self._require_blocks(own_tags[tag.NAME], volume.group, found.block_bytes)
        check = partial(filesystem.check, self._run, device.path, formatted)
        proof = partial(self._activator.require_same, volume, device)
        self._detached.do(identity, volume.group.name, "fsck", check, proof)

    def _require_blocks(self, name: str, group: report.Group, held_bytes: int) -> None:
        """Raise NotReceived where the contents cannot be used on a group's disks."""
        wanted = block_sizes.of_group(self._kernel, group)
        if why := block_sizes.problem(held_bytes, group, wanted):
            raise errors.NotReceived(name, why)

    def _coming(self, volume_id: str) -> Volume:
        """A volume that is being received; the group is held. Raises NotReceived."""
        known = self._mender.mend(ids.group_of(volume_id))
        volume = known.volume(volume_id)
        if not _is_coming(volume):
            raise errors.NotReceived(volume_id, "it is not being received")
        return volume

    @staticmethod
    def _require_into(volume: Volume, into: str) -> None:
        if volume.own_tags.get(tag.INTO) != into:
            raise errors.NotReceived(str(volume.id), "another stream is being received")

    def _mark(
        self, volume: Volume, new: Mapping[str, str], without: tuple[str, ...] = ()
    ) -> Volume:
        """Change tags, all or none, in one command; return the changed volume."""
        new = {key: value for key, value in new.items() if volume.own_tags.get(key) != value}
        gone = {key for key in (*new, *without) if key in volume.own_tags}
        old = {key: volume.own_tags[key] for key in gone}
        lvm, group = self._volume_groups.lvm(volume.group.name), volume.group.name
        volumes.mark(lvm, group, volume.name, old=old, new=new)
        kept = {key: value for key, value in volume.own_tags.items() if key not in gone}
        return replace(volume, own_tags={**kept, **new})


def _is_coming(volume: Volume) -> bool:
    """Whether it is being received, and so is no volume yet."""
    return volume.ended_by is Ender.RECEIVER


def _state(volume: Volume) -> carver.ReceiveState:
    """The state of a volume by its tags."""
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
        blank=volume.is_thin,
        release=own_tags.get(tag.RELEASE, "") or _digest(own_tags.get(tag.RELEASED, "")),
    )


def _digest(word: str) -> str:
    return hashlib.sha256(word.encode()).hexdigest() if word else ""
