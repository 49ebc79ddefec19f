"""ControllerExpandVolume and NodeExpandVolume: volumes grow now, or when they are staged next.

lvm2 extends the origin of copy-on-write snapshots only while it is not active. A cluster asks a
node to expand a volume when a pod has it, so that moment would never come by itself. So the size is
recorded as the tag `wanted`, and the call is FAILED_PRECONDITION: after this code kubelet lets the
pod go on, or start, and asks again when the volume is mounted next (expandOnPlugin in
pkg/volume/util/operationexecutor/node_expander.go). The same code serves where there is no room:
after any other the pod does not start, and after OK with the present size kubelet, which reads no
size in the answer, marks the claim as grown. The next stage finds the tag and grows the volume
while it is not in use: it is deactivated, extended, and activated as ever. Without room by then, or
where lvm2 refuses, the volume is staged as it is, so that the pod starts, and the tag stays.

A wanted size that the volume has is void, so no step of its own removes the tag. Crash points:
before the tag is written the caller repeats the call; after it, or between deactivation and growth,
the next stage finds it; later, the volume has the size, and staging goes on as after any kill.

Without such snapshots, a size that the volume cannot have is recorded as the tag `refused`, for the
volume's health. A stage does not grow the volume to it: the claim may have been made smaller since,
a volume never shrinks, and kubelet asks for the claim's size as soon as the volume is mounted. The
tag also marks a volume that grew while its file system, or its open LUKS mapping, did not. It is
removed when all three have the size, or when less is asked for.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace

from agent.core import codes, errors, ids, tag
from agent.operations.encrypt import EncryptedDevices
from agent.operations.erase_free import AnotherSize, GrowthZeroer
from agent.operations.node_volumes import NodeVolumes
from agent.requests import secret
from agent.requests.requests import BLOCK, ExpandVolume, SizeRange, VolumeAt
from agent.requests.secret import Keys
from agent.volumes import records, tag_writer, users
from agent.volumes.context import Context
from agent.volumes.luks_mappings import Mappings
from agent.volumes.records import Volume
from agent.volumes.report_age import Fresh
from agent.volumes.volume_states import Call
from lvm import layout, names, volumes
from lvm import lvm_errors as lvm_errors
from mount import filesystem, loop, table
from mount import mount_errors as mount_errors

_log = logging.getLogger(__name__)

_ON_RECORD = (tag.WANTED, tag.REFUSED)
_NO_ROOM = (errors.NoRoom, lvm_errors.NoSpace, lvm_errors.MetadataFull)


class _Open(Exception):
    """A volume that is to be deactivated has a dm-crypt device, which nothing uses."""

    def __init__(self, volume: Volume) -> None:
        super().__init__(str(volume.id))
        self.volume = volume


class Expander:
    """Makes volumes larger, and what is on them."""

    def __init__(
        self,
        context: Context,
        growth_zeroer: GrowthZeroer,
        node_volumes: NodeVolumes,
        encrypted: EncryptedDevices,
    ) -> None:
        self._volume_groups, self._kernel = context.volume_groups, context.kernel
        self._reports, self._activator = context.reports, context.activator
        self._mender = context.mender
        self._growth_zeroer = growth_zeroer
        self._volumes, self._encrypted = node_volumes, encrypted
        self._mappings = Mappings(context)
        self._allocators = context.allocators
        self._limiter, self._conflicts = context.limiter, context.conflicts
        self._configuration = context.configuration

    def expand_in_use(self, call: ExpandVolume, at: VolumeAt, keys: Keys) -> int:
        """Grow a volume where it is smaller than asked, then all on it; its capacity in bytes.

        Raises CannotGrow for each final error of lvm2, the mount or LUKS: a pod must start with the
        present size, because it can run on no other node. Errors after which the operation may
        still be in progress pass unchanged, because the caller repeats the call; so does a volume
        that is not there. The file system of a reader stays as it is until a writer has it staged.
        """
        volume_id, size_bytes = call.volume_id, self._volumes.size_bytes(at)
        try:
            seen = self._reports.cached(volume_id)
            # A claim that is made smaller again withdraws what is on record.
            is_on_record = seen is not None and (
                seen.wanted_bytes or seen.refused_bytes or _lacks_request(seen, call.size)
            )
            if is_on_record or not call.size.allows(size_bytes):
                size_bytes = self.expand(call, is_in_use=True).capacity_bytes
            # Crash point: the volume is larger than what is on it; kubelet repeats the call, and
            # each stage tries it.
            with self._recording(volume_id):
                read_only = call.read_only or self._is_attached_read_only(seen)
                self.fill_device(at, keys, read_only=read_only)
            self.settle(volume_id)
        except errors.TooLarge as error:
            raise errors.CannotGrow(volume_id, error.problem) from None
        except (mount_errors.CommandError, mount_errors.MountError) as error:
            if isinstance(error, lvm_errors.VolumeMissing) or not codes.is_final(error):
                raise
            raise errors.CannotGrow(volume_id, str(error)) from None
        return size_bytes

    def _is_attached_read_only(self, volume: Volume | None) -> bool:
        node_id = self._configuration.now.node_id
        attachment = None if volume is None else volume.attachment_to(node_id)
        return attachment is not None and attachment.read_only

    def expand(self, call: ExpandVolume, *, is_in_use: bool = False) -> Volume:
        """Make the volume at least as large as asked; a larger one keeps its size.

        Two commands at most; with copy-on-write snapshots one more, or two where it is in use: then
        it raises GrowsLater. Raises TooLarge where there is no room; recording that takes two more.
        The latest call counts: a larger size on record is withdrawn. Where the new extents are
        zeroed first, it takes four more commands, and raises Overwriting until that is done; one
        command more ends a growth to another size. While it is copied, a volume in use raises
        Copying, or GrowsLater to a caller that says so, since its pod must start.
        """
        with self._conflicts.enter(Call.EXPAND, call.volume_id):
            return self._zeroed_first(call.volume_id, lambda: self._expand(call, is_in_use))

    def _zeroed_first(self, volume_id: str, expand: Callable[[], Volume]) -> Volume:
        """Expand a volume; wait a moment for new extents that are zeroed first.

        An unused dm-crypt device is closed without the group, which `expand` holds.
        Raises Overwriting, and NotOverwritten where they cannot be zeroed.
        """
        try:
            return expand()
        except _Open as found:
            self._mappings.ensure_closed(found.volume)
            return self._zeroed_first(volume_id, expand)
        except AnotherSize:
            self._growth_zeroer.withdraw(volume_id)
            return self._zeroed_first(volume_id, expand)
        except errors.Overwriting:
            if not self._growth_zeroer.wait(volume_id):
                raise
            if problem := self._growth_zeroer.problem(volume_id):
                raise errors.NotOverwritten(volume_id, f"of what it grows by: {problem}") from None
            return expand()

    def _expand(self, call: ExpandVolume, is_in_use: bool) -> Volume:
        group = ids.group_of(call.volume_id)
        self._reports.await_others(group)
        with self._volume_groups.hold(group):
            known = self._mender.mend(group)
            volume = known.usable(call.volume_id, Call.EXPAND)
            volume.require_header_bytes()
            wanted = _wanted_bytes(volume, call.size)
            if wanted > volume.size_bytes:
                try:
                    self._extend(known, volume, wanted)
                except (errors.VolumeInUse, lvm_errors.InUse) as error:
                    if self._is_only_copied(volume) and not is_in_use:
                        why = "it grows when that is done"
                        raise errors.Copying(call.volume_id, why) from None
                    self._record(volume, wanted)
                    held = volume.copy_on_write_snapshots
                    raise errors.GrowsLater(call.volume_id, wanted, held, str(error)) from None
                except (*_NO_ROOM, mount_errors.CommandFailed) as error:
                    self._refuse(volume, wanted)
                    if not isinstance(error, _NO_ROOM):
                        raise
                    raise errors.TooLarge(call.volume_id, str(error)) from None
            elif (reserved := records.reservation(volume.group, volume.name)) is not None:
                # The growth that it was for is withdrawn.
                self._growth_zeroer.require_none(volume)
                volumes.remove(self._volume_groups.lvm(group), group, reserved.name)
            # Here, as a stage may have extended it: that does not know what was asked for.
            self._record_request(volume, call.size, max(wanted, volume.size_bytes))
            if call.size.required_bytes:
                self._withdraw(volume, wanted)
        volume = replace(volume, size_bytes=max(wanted, volume.size_bytes))
        self._limiter.grown(volume.backing, volume.capacity_bytes)
        return volume

    def needs_node(self, volume: Volume) -> bool:
        """Whether NodeExpandVolume has to follow ControllerExpandVolume. No command.

        It has if anything on the logical volume grows after it: a file system, a dm-crypt device,
        or a loop device, which a read-only raw block volume is published by.
        """
        if volume.own_tags.get(tag.ACCESS) != BLOCK or volume.is_encrypted:
            return True
        device = self._activator.device(volume.backing)
        return device is not None and bool(loop.over(self._kernel, device.number))

    def fill_device(
        self,
        call: VolumeAt,
        keys: Keys = secret.NONE,
        *,
        if_possible: bool = False,
        read_only: bool = False,
    ) -> bool:
        """Grow all that is on the device to its size: ioctls only, also where it has that size.

        One command with its key for an encrypted volume that grew; without the key it raises
        GrowsWithKey or, `if_possible`, returns False. A file system without a writable mount raises
        GrowFailed or, for a caller that is `read_only`, stays as it is.
        """
        known = table.read(self._kernel)
        device, mounted = self._volumes.anywhere(call, known)
        is_whole = True
        if device.below is not None:
            is_whole = self._encrypted.fill(call.volume_id, device, keys, if_possible=if_possible)
        if mounted.device == device.number:
            # The kernel grows a file system through a writable mount only; any of them will do.
            writable = [one for one in known.of_device(device.number) if not one.read_only]
            if writable or not read_only:
                filesystem.grow(self._kernel, (writable or [mounted])[0])
            return is_whole
        for one in loop.over(self._kernel, device.number):
            loop.grow(self._kernel, one)
        return is_whole

    @contextmanager
    def _recording(self, volume_id: str) -> Iterator[None]:
        """Record a final error while a volume's file system or LUKS mapping grows, and raise it."""
        try:
            yield
        except (errors.AgentError, mount_errors.CommandError, mount_errors.MountError) as error:
            if codes.is_final(error):
                with self._logging_refusals(volume_id), self._held(volume_id) as volume:
                    # A larger size on record has each stage grow the file system as well.
                    if max(volume.wanted_bytes, volume.refused_bytes) <= volume.size_bytes:
                        self._refuse(volume, volume.size_bytes)
            raise

    def settle(self, volume_id: str) -> None:
        """Remove the tag `refused` of a volume that has that size; the caller grew all on it.

        No command where there is no tag. A refusal of lvm2 is logged only: the volume is usable,
        and the next stage or expansion tries again.
        """
        seen = self._reports.cached(volume_id)
        if seen is None or not seen.refused_bytes:
            return
        with self._logging_refusals(volume_id), self._held(volume_id) as volume:
            if 0 < volume.refused_bytes <= volume.size_bytes:
                self._record(volume, 0)

    @contextmanager
    def _held(self, volume_id: str) -> Iterator[Volume]:
        """The volume by a fresh report, while the group is held."""
        with self._volume_groups.hold(ids.group_of(volume_id)):
            yield self._mender.mended_volume(volume_id, Call.EXPAND)

    def _logging_refusals(self, volume_id: str) -> AbstractContextManager[None]:
        """Go on where lvm2 refuses a tag that is for the volume's health only."""
        return tag_writer.logging_refusals(volume_id, tag.REFUSED)

    def catch_up(self, volume: Volume) -> Volume:
        """Extend a volume, before it is activated, to the size on record; the volume then.

        No command without a size on record, else four at most. If it cannot grow, that is logged.
        Raises Overwriting while new extents are zeroed: staged before, it would stay as small.
        """
        if not volume.wanted_bytes:
            return volume
        volume_id = str(volume.id)
        with self._conflicts.enter(Call.EXPAND, volume_id):
            try:
                return self._zeroed_first(volume_id, lambda: self._caught_up(volume))
            except errors.NotOverwritten as error:
                _log.warning("volume %s is not grown yet: %s", volume_id, error)
                return volume

    def _caught_up(self, volume: Volume) -> Volume:
        self._reports.await_others(volume.group.name)
        with self._volume_groups.hold(volume.group.name):
            known = self._mender.mend(volume.group.name)
            volume = known.usable(str(volume.id), Call.EXPAND)
            wanted = volume.wanted_bytes
            try:
                self._extend(known, volume, wanted)
            except (mount_errors.OutcomeUnknown, lvm_errors.StillRunning, errors.Overwriting):
                raise  # the next call reads a fresh report first
            except (errors.AgentError, mount_errors.CommandError) as error:
                _log.warning("volume %s is not grown to %d bytes yet: %s", volume.id, wanted, error)
                return volume
        _log.info("volume %s is grown to the %d bytes that were asked for", volume.id, wanted)
        return replace(volume, size_bytes=wanted)

    def _extend(self, known: Fresh, volume: Volume, size_bytes: int) -> None:
        """Extend a volume, which is deactivated first if it must be.

        Raises NoRoom, VolumeInUse, InUse, and Overwriting while its new extents are zeroed.
        """
        group, allocator = volume.group, self._allocators.of_volume(volume)
        lvm = self._volume_groups.lvm(group.name)
        more = size_bytes - volume.size_bytes
        if tag.ZERO in volume.own_tags and not volume.is_thin:
            self._deactivate_origin(known, volume)
            ranges = self._growth_zeroer.take(volume, more, allocator)
            volumes.extend(lvm, group.name, volume.name, size_bytes=size_bytes, disks=ranges)
            return
        if more > (room := allocator.maximum_growth_bytes(volume)):
            raise errors.NoRoom(group.name, more, room, f"more {allocator.purpose(group)}")
        self._deactivate_origin(known, volume)
        allocator.extend(lvm, volume, size_bytes)

    @staticmethod
    def _is_only_copied(volume: Volume) -> bool:
        """Whether it has copy-on-write snapshots, and all are there for copies in progress."""
        held = volume.group.copy_on_write_of(volume.name)
        return bool(held) and all(names.is_of(ids.BRIDGE_PREFIX, one.name) for one in held)

    def _deactivate_origin(self, known: Fresh, volume: Volume) -> None:
        """Deactivate an active origin with its snapshots, without which lvm2 does not extend it."""
        if self._activator.device(volume.backing) is None or not volume.copy_on_write_snapshots:
            return
        users.require_unused(self._kernel, self._activator, volume)
        every = self._reports.everywhere(known)
        for one in (str(volume.id), *volume.copy_on_write_snapshots):
            every.require_not_copied(one)
        if self._activator.mapping(volume) is not None:
            raise _Open(volume)
        volumes.deactivate(
            self._volume_groups.lvm(volume.group.name), volume.group.name, volume.name
        )

    def _refuse(self, volume: Volume, size_bytes: int) -> None:
        """Record a size that a volume, or what is on it, cannot have now.

        With copy-on-write snapshots only a stage can extend the volume, so the size is for that.
        """
        is_for_stage = size_bytes > volume.size_bytes and volume.copy_on_write_snapshots
        with self._logging_refusals(str(volume.id)):
            self._record(volume, size_bytes, tag.WANTED if is_for_stage else tag.REFUSED)

    def _withdraw(self, volume: Volume, size_bytes: int) -> None:
        """Remove from the record a size that is more than was asked for now."""
        if volume.wanted_bytes > size_bytes:
            self._record(volume, 0)  # else a stage would grow the volume to it
        elif volume.refused_bytes > volume.size_bytes:
            with self._logging_refusals(str(volume.id)):
                self._record(volume, 0)

    def _record_request(self, volume: Volume, size: SizeRange, size_bytes: int) -> None:
        """Record what was asked for where that was rounded up to this size; one command then."""
        new = _request(volume, size, size_bytes)
        if new.items() - volume.own_tags.items():
            old = {one: volume.own_tags[one] for one in new if one in volume.own_tags}
            group = volume.group.name
            with tag_writer.logging_refusals(str(volume.id), tag.REQUESTED):
                volumes.mark(self._volume_groups.lvm(group), group, volume.name, old=old, new=new)

    def _record(self, volume: Volume, size_bytes: int, key: str = tag.WANTED) -> None:
        """Replace the sizes on record by one; 0 removes them."""
        group, new = volume.group.name, {key: str(size_bytes)} if size_bytes else {}
        if new and volume.own_tags.get(key) == new[key]:
            return
        old = {key: volume.own_tags[key] for key in _ON_RECORD if key in volume.own_tags}
        volumes.mark(self._volume_groups.lvm(group), group, volume.name, old=old, new=new)
        if new:
            # Refresh the cached state, which is all that staging of a raw block volume reads.
            self._reports.fresh(group)


def _request(volume: Volume, size: SizeRange, size_bytes: int) -> dict[str, str]:
    """The tag of what is asked for, where a volume of so many bytes is that, rounded up."""
    extent, header = volume.group.extent_size_bytes, volume.header_bytes
    asked = size.required_bytes
    with suppress(errors.LayoutUnknown):
        if layout.round_up(asked + header, extent, volume.layout) == size_bytes:
            return records.requested(asked, size_bytes, header)
    return {}


def _lacks_request(volume: Volume, size: SizeRange) -> bool:
    """Whether a volume that has the size lacks the record of what is asked for."""
    new = _request(volume, size, volume.size_bytes)
    return bool(new.items() - volume.own_tags.items())


def _wanted_bytes(volume: Volume, size: SizeRange) -> int:
    """The requested size in whole extents; raises BadSize where it is above the limit."""
    extent, header = volume.group.extent_size_bytes, volume.header_bytes
    wanted = layout.round_up(size.required_bytes + header, extent, volume.layout)
    larger = max(wanted, volume.size_bytes) - header
    if size.limit_bytes and larger > size.limit_bytes:
        raise errors.BadSize(
            f"capacity_range.limit_bytes: {size.limit_bytes} is less than the volume's size would"
            f" be, {larger} bytes"
        )
    return wanted
