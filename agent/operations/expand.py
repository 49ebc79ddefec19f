"""ControllerExpandVolume and NodeExpandVolume: grow volumes now, or when they are staged next.

A volume with copy-on-write snapshots grows at its next NodeStageVolume call: lvm2 extends the
origin of such snapshots only while the origin is inactive, and a cluster asks a node to expand a
volume while a pod uses it. So Carver records the size in the tag `wanted` and answers
FAILED_PRECONDITION. After that code kubelet lets the pod go on, or start, and asks again when the
volume is mounted next (expandOnPlugin in pkg/volume/util/operationexecutor/node_expander.go).
FAILED_PRECONDITION is also the answer if there is no room. After any other error code the pod would
not start. After OK with the present size kubelet would mark the claim as grown, because kubelet
reads no size in the answer.

The next NodeStageVolume call finds the tag `wanted` and grows the volume while it is not in use:
the volume is deactivated, extended, and activated as usual. If there is still no room, or lvm2
refuses, the volume is staged with its present size, so that the pod starts, and the tag stays.

A wanted size that the volume has is void, so no separate step removes the tag. Crash points: before
the tag is written the caller repeats the call. After the tag is written, or between deactivation
and growth, the next NodeStageVolume call finds the tag. After the growth the volume has the size,
and staging continues as after any crash.

For a volume without such snapshots, a size that it cannot have is recorded in the tag `refused`,
for the calls that report a volume's health. A NodeStageVolume call does not grow the volume to the
refused size: the claim may have been made smaller since, a volume never shrinks, and kubelet asks
for the claim's size as soon as the volume is mounted. The tag also marks a volume that grew while
its file system, or its open LUKS mapping, did not. The tag is removed when the volume, the mapping
and the file system have the size, or when a smaller size is requested.
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
from agent.requests.requests import BLOCK, ExpandVolume, SizeRange, VolumePath
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

# Tags that record a size which a volume does not have yet; a volume has at most one of the two.
_ON_RECORD = (tag.WANTED, tag.REFUSED)
# Errors for a lack of free extents, of space in a thin pool, or of metadata area of the volume
# group.
_NO_ROOM = (errors.NoRoom, lvm_errors.NoSpace, lvm_errors.MetadataFull)


class _Open(Exception):
    """Raised if an unused dm-crypt device is open on a volume that has to be deactivated."""

    def __init__(self, volume: Volume) -> None:
        super().__init__(str(volume.id))
        self.volume = volume


class Expander:
    """Grows volumes, and the LUKS mappings and file systems on them."""

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

    def expand_in_use(self, request: ExpandVolume, volume_path: VolumePath, keys: Keys) -> int:
        """Grow a volume to the requested size, and all layers on it; return its capacity in bytes.

        Raises CannotGrow for each final error of lvm2, the mount or LUKS: a pod must start with the
        present size, because it can run on no other node. Two kinds of errors pass unchanged. After
        errors that leave the operation possibly in progress the caller repeats the call.
        VolumeMissing says that the volume does not exist. If the call is for a reader, the file
        system stays as it is until a writer stages the volume.
        """
        volume_id, size_bytes = request.volume_id, self._volumes.size_bytes(volume_path)
        try:
            cached_volume = self._reports.cached(volume_id)
            # Call `expand` also for a size that the volume has. After the claim was made smaller
            # again, `expand` removes a larger recorded size (tags `wanted` and `refused`), and
            # records the requested size if the tag for that is missing.
            is_on_record = cached_volume is not None and (
                cached_volume.wanted_bytes
                or cached_volume.refused_bytes
                or _lacks_request(cached_volume, request.size)
            )
            if is_on_record or not request.size.allows(size_bytes):
                size_bytes = self.expand(request, is_in_use=True).capacity_bytes
            # Crash point: the volume is larger than its file system; kubelet repeats the call, and
            # each NodeStageVolume call tries to grow the file system.
            with self._recording(volume_id):
                read_only = request.read_only or self._is_attached_read_only(cached_volume)
                self.fill_device(volume_path, keys, read_only=read_only)
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

    def expand(self, request: ExpandVolume, *, is_in_use: bool = False) -> Volume:
        """Make a volume at least as large as requested; a larger volume keeps its size.

        The latest call counts: a larger size that an earlier call recorded (tags `wanted` and
        `refused`) is removed.

        - Runs two commands at most. With copy-on-write snapshots it runs one more, or two more for
          a volume in use, for which it raises GrowsLater.
        - Raises TooLarge if there is no room; the record of that takes two more commands.
        - If new extents are zeroed before they are allocated, it runs four more commands, and
          raises Overwriting until the extents are zeroed. One more command ends a growth to another
          size.
        - While a volume in use is being copied, it raises Copying. With `is_in_use` it raises
          GrowsLater instead, because the caller's pod must start.
        """
        with self._conflicts.enter(Call.EXPAND, request.volume_id):
            return self._zeroed_first(request.volume_id, lambda: self._expand(request, is_in_use))

    def _zeroed_first(self, volume_id: str, expand: Callable[[], Volume]) -> Volume:
        """Expand a volume; if its new extents are zeroed first, wait up to ten seconds for that.

        `expand` holds the group's lock. An unused dm-crypt device is closed without that lock. A
        growth to another size that is under way is cancelled. Raises Overwriting while the extents
        are being zeroed, and NotOverwritten if they cannot be zeroed.
        """
        try:
            return expand()
        except _Open as error:
            self._mappings.ensure_closed(error.volume)
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

    def _expand(self, request: ExpandVolume, is_in_use: bool) -> Volume:
        group = ids.group_of(request.volume_id)
        self._reports.await_others(group)
        with self._volume_groups.hold(group):
            state = self._mender.mend(group)
            volume = state.usable(request.volume_id, Call.EXPAND)
            self._conflicts.check(Call.EXPAND, request.volume_id)
            volume.require_header_bytes()
            wanted_bytes = _wanted_bytes(volume, request.size)
            if wanted_bytes > volume.size_bytes:
                try:
                    self._extend(state, volume, wanted_bytes)
                except (errors.VolumeInUse, lvm_errors.InUse) as error:
                    if self._is_only_copied(volume) and not is_in_use:
                        why = "it grows when that is done"
                        raise errors.Copying(request.volume_id, why) from None
                    self._record(volume, wanted_bytes)
                    snapshot_ids = volume.copy_on_write_snapshots
                    raise errors.GrowsLater(
                        request.volume_id, wanted_bytes, snapshot_ids, str(error)
                    ) from None
                except (*_NO_ROOM, mount_errors.CommandFailed) as error:
                    self._refuse(volume, wanted_bytes)
                    if not isinstance(error, _NO_ROOM):
                        raise
                    raise errors.TooLarge(request.volume_id, str(error)) from None
            elif (reserved := records.reservation(volume.group, volume.name)) is not None:
                # Release the extents reserved for a growth that this call withdraws.
                self._growth_zeroer.require_none(volume)
                volumes.remove(self._volume_groups.lvm(group), group, reserved.name)
            # Record the requested size also for a volume that has it: a NodeStageVolume call may
            # have extended the volume, and a NodeStageVolume call does not know the size that the
            # caller requested.
            self._record_request(volume, request.size, max(wanted_bytes, volume.size_bytes))
            if request.size.required_bytes:
                self._withdraw(volume, wanted_bytes)
        volume = replace(volume, size_bytes=max(wanted_bytes, volume.size_bytes))
        self._limiter.adapt_to_size(volume.backing, volume.capacity_bytes)
        return volume

    def needs_node(self, volume: Volume) -> bool:
        """Whether NodeExpandVolume has to follow ControllerExpandVolume; runs no command.

        True if a layer on the logical volume grows separately: a file system, a dm-crypt device, or
        the loop device by which a read-only raw block volume is published.
        """
        if volume.own_tags.get(tag.ACCESS) != BLOCK or volume.is_encrypted:
            return True
        device = self._activator.device(volume.backing)
        return device is not None and bool(loop.loop_devices_over(self._kernel, device.number))

    def fill_device(
        self,
        request: VolumePath,
        keys: Keys = secret.NONE,
        *,
        if_possible: bool = False,
        read_only: bool = False,
    ) -> bool:
        """Grow all layers on a volume's device to the size of the device.

        The layers are the dm-crypt device, the file system and loop devices. Growing uses ioctls
        only, which are also called for layers that have the size. An encrypted volume that grew
        takes one command with its key. Without the key the method raises GrowsWithKey or, with
        `if_possible`, returns False. A file system without a writable mount raises GrowFailed or,
        with `read_only`, stays as it is.
        """
        mounts = table.read(self._kernel)
        device, mounted = self._volumes.find_mount(request, mounts)
        is_whole = True
        if device.below is not None:
            is_whole = self._encrypted.fill(
                request.volume_id, device, keys, if_possible=if_possible
            )
        if mounted.device == device.number:
            # Grow the file system through any of its writable mounts: the kernel accepts no other
            # mount.
            writable = [mount for mount in mounts.of_device(device.number) if not mount.read_only]
            if writable or not read_only:
                filesystem.grow(self._kernel, (writable or [mounted])[0])
            return is_whole
        for loop_device in loop.loop_devices_over(self._kernel, device.number):
            loop.grow(self._kernel, loop_device)
        return is_whole

    @contextmanager
    def _recording(self, volume_id: str) -> Iterator[None]:
        """Record a final error that the `with` block raises while a file system or mapping grows.

        The error is raised again.
        """
        try:
            yield
        except (errors.AgentError, mount_errors.CommandError, mount_errors.MountError) as error:
            if codes.is_final(error):
                with self._logging_refusals(volume_id), self._locked_volume(volume_id) as volume:
                    # Record nothing if the tag `wanted` or `refused` has a size larger than the
                    # volume's: with such a tag each NodeStageVolume call grows the file system,
                    # too.
                    if max(volume.wanted_bytes, volume.refused_bytes) <= volume.size_bytes:
                        self._refuse(volume, volume.size_bytes)
            raise

    def settle(self, volume_id: str) -> None:
        """Remove the tag `refused` of a volume that has the refused size.

        The caller has grown all layers on the volume. Runs no command if there is no tag. A refusal
        of lvm2 to remove the tag is only logged: the volume is usable, and the next NodeStageVolume
        or expansion tries again.
        """
        cached_volume = self._reports.cached(volume_id)
        if cached_volume is None or not cached_volume.refused_bytes:
            return
        with self._logging_refusals(volume_id), self._locked_volume(volume_id) as volume:
            if 0 < volume.refused_bytes <= volume.size_bytes:
                self._record(volume, 0)

    @contextmanager
    def _locked_volume(self, volume_id: str) -> Iterator[Volume]:
        """Lock a volume's volume group within the `with`, repair the group, and provide the volume.

        What is repaired is only what a killed lvm2 left in the group. The volume is of a fresh
        report. Raises an error if the volume may not be expanded.
        """
        with self._volume_groups.hold(ids.group_of(volume_id)):
            yield self._mender.mended_volume(volume_id, Call.EXPAND)

    def _logging_refusals(self, volume_id: str) -> AbstractContextManager[None]:
        """Return a context manager that only logs errors of lvm2 about the tag `refused`.

        Nothing but the calls for a volume's health depends on that tag.
        """
        return tag_writer.logging_refusals(volume_id, tag.REFUSED)

    def catch_up(self, volume: Volume) -> Volume:
        """Extend a volume, before it is activated, to the size in its tag `wanted`.

        Returns the volume with its present size. Runs no command without that tag, else four at
        most. If the volume cannot grow, that is logged and the volume is returned unchanged. Raises
        Overwriting while new extents are being zeroed: a volume that was staged meanwhile would
        keep its present size.
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
            state = self._mender.mend(volume.group.name)
            volume = state.usable(str(volume.id), Call.EXPAND)
            wanted_bytes = volume.wanted_bytes
            try:
                self._extend(state, volume, wanted_bytes)
            except (mount_errors.OutcomeUnknown, lvm_errors.StillRunning, errors.Overwriting):
                # Let the caller repeat the call, which reads a fresh report first.
                raise
            except (errors.AgentError, mount_errors.CommandError) as error:
                _log.warning(
                    "volume %s is not grown to %d bytes yet: %s", volume.id, wanted_bytes, error
                )
                return volume
        _log.info("volume %s is grown to the %d bytes that were asked for", volume.id, wanted_bytes)
        return replace(volume, size_bytes=wanted_bytes)

    def _extend(self, state: Fresh, volume: Volume, size_bytes: int) -> None:
        """Extend a volume; deactivate an active volume with copy-on-write snapshots first.

        Raises NoRoom, VolumeInUse, or InUse of lvm2; Overwriting while the new extents are being
        zeroed.
        """
        group, allocator = volume.group, self._allocators.of_volume(volume)
        lvm = self._volume_groups.lvm(group.name)
        growth_bytes = size_bytes - volume.size_bytes
        if tag.ZERO in volume.own_tags and not volume.is_thin:
            self._deactivate_origin(state, volume)
            ranges = self._growth_zeroer.take_extents(volume, growth_bytes, allocator)
            volumes.extend(lvm, group.name, volume.name, size_bytes=size_bytes, disks=ranges)
            return
        if growth_bytes > (free_bytes := allocator.maximum_growth_bytes(volume)):
            raise errors.NoRoom(
                group.name, growth_bytes, free_bytes, f"more {allocator.purpose(group)}"
            )
        self._deactivate_origin(state, volume)
        allocator.extend(lvm, volume, size_bytes)

    @staticmethod
    def _is_only_copied(volume: Volume) -> bool:
        """Whether a volume has copy-on-write snapshots, all of them for copies in progress."""
        snapshots = volume.group.copy_on_write_of(volume.name)
        return bool(snapshots) and all(
            names.is_of(ids.BRIDGE_PREFIX, snapshot.name) for snapshot in snapshots
        )

    def _deactivate_origin(self, state: Fresh, volume: Volume) -> None:
        """Deactivate an active origin with its copy-on-write snapshots, to let lvm2 extend it.

        Does nothing for an inactive volume or one without copy-on-write snapshots. Raises
        VolumeInUse for a volume in use, and _Open if a dm-crypt device is open on the volume.
        """
        if self._activator.device(volume.backing) is None or not volume.copy_on_write_snapshots:
            return
        users.require_unused(self._kernel, self._activator, volume)
        all_groups = self._reports.every_group(state)
        for source_id in (str(volume.id), *volume.copy_on_write_snapshots):
            all_groups.require_not_copied(source_id)
        if self._activator.mapping(volume) is not None:
            raise _Open(volume)
        volumes.deactivate(
            self._volume_groups.lvm(volume.group.name), volume.group.name, volume.name
        )

    def _refuse(self, volume: Volume, size_bytes: int) -> None:
        """Record a size that a volume, or its file system or mapping, cannot have now.

        If the volume has copy-on-write snapshots, only a NodeStageVolume call can extend it, so the
        size is recorded for the next NodeStageVolume call.
        """
        is_for_stage = size_bytes > volume.size_bytes and volume.copy_on_write_snapshots
        with self._logging_refusals(str(volume.id)):
            self._record(volume, size_bytes, tag.WANTED if is_for_stage else tag.REFUSED)

    def _withdraw(self, volume: Volume, size_bytes: int) -> None:
        """Remove a recorded size (tags `wanted`, `refused`) that is larger than requested now."""
        if volume.wanted_bytes > size_bytes:
            # Remove the tag `wanted`, or the next NodeStageVolume call would grow the volume to the
            # recorded size.
            self._record(volume, 0)
        elif volume.refused_bytes > volume.size_bytes:
            with self._logging_refusals(str(volume.id)):
                self._record(volume, 0)

    def _record_request(self, volume: Volume, size: SizeRange, size_bytes: int) -> None:
        """Record the requested size as a tag, if the volume's size was rounded up from it.

        Runs one command if the tag has to be written. `size_bytes` is the volume's size.
        """
        new_tags = _request(volume, size, size_bytes)
        if new_tags.items() - volume.own_tags.items():
            old_tags = {key: volume.own_tags[key] for key in new_tags if key in volume.own_tags}
            group = volume.group.name
            with tag_writer.logging_refusals(str(volume.id), tag.REQUESTED):
                volumes.mark(
                    self._volume_groups.lvm(group),
                    group,
                    volume.name,
                    old_tags=old_tags,
                    new_tags=new_tags,
                )

    def _record(self, volume: Volume, size_bytes: int, key: str = tag.WANTED) -> None:
        """Record a size in the tag `wanted` or `refused`, and remove the other of these tags.

        `key` is the tag to write. A size of 0 removes both tags.
        """
        group, new_tags = volume.group.name, {key: str(size_bytes)} if size_bytes else {}
        if new_tags and volume.own_tags.get(key) == new_tags[key]:
            return
        old_tags = {key: volume.own_tags[key] for key in _ON_RECORD if key in volume.own_tags}
        volumes.mark(
            self._volume_groups.lvm(group), group, volume.name, old_tags=old_tags, new_tags=new_tags
        )
        if new_tags:
            # Refresh the cached state, so that it has the new tag: staging of a raw block volume
            # decides by the cached state alone.
            self._reports.fresh(group)


def _request(volume: Volume, size: SizeRange, size_bytes: int) -> dict[str, str]:
    """Return the tag with the requested size if a volume of `size_bytes` is that size rounded up.

    The result is empty if the volume is larger, or if its layout is unknown.
    """
    extent, header = volume.group.extent_size_bytes, volume.header_bytes
    requested_bytes = size.required_bytes
    with suppress(errors.LayoutUnknown):
        if layout.round_up(requested_bytes + header, extent, volume.layout) == size_bytes:
            return records.requested(requested_bytes, size_bytes, header)
    return {}


def _lacks_request(volume: Volume, size: SizeRange) -> bool:
    """Whether a volume has the requested size, but not the tag that records the request."""
    new_tags = _request(volume, size, volume.size_bytes)
    return bool(new_tags.items() - volume.own_tags.items())


def _wanted_bytes(volume: Volume, size: SizeRange) -> int:
    """Return the requested size, in bytes, in whole extents and with the LUKS header.

    Raises BadSize if the volume would be larger than the limit.
    """
    extent, header = volume.group.extent_size_bytes, volume.header_bytes
    wanted_bytes = layout.round_up(size.required_bytes + header, extent, volume.layout)
    capacity_bytes = max(wanted_bytes, volume.size_bytes) - header
    if size.limit_bytes and capacity_bytes > size.limit_bytes:
        raise errors.BadSize(
            f"capacity_range.limit_bytes: {size.limit_bytes} is less than the volume's size would"
            f" be, {capacity_bytes} bytes"
        )
    return wanted_bytes
