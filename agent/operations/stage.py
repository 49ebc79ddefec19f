"""NodeStageVolume: activate, open, format once, and mount a volume. NodeUnstageVolume: unmount it.

Unstaging starts no process for a volume that is not encrypted: the kernel's mount table and sysfs
have all that is needed. The exception is the removal of the tag `remount`, which an interrupted
call left.
"""

import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from agent.core import errors, tag
from agent.operations.encrypt import EncryptedDevices
from agent.operations.expand import Expander
from agent.operations.node_volumes import NodeVolumes
from agent.requests.parameters import Parameters
from agent.requests.requests import StageVolume, VolumePath
from agent.requests.secret import Keys
from agent.volumes import backing
from agent.volumes.context import Context
from agent.volumes.luks_mappings import Mappings
from agent.volumes.records import Volume
from agent.volumes.volume_states import Call
from agent.work.background import MKFS
from lvm import tags as lvm_tags
from lvm.active_devices import Device
from mount import filesystem, filesystem_health, mounts, options, table, target
from mount import mount_errors as mount_errors

_log = logging.getLogger(__name__)

# Default file system of a volume whose class, request and tags name none.
DEFAULT_FS_TYPE = "ext4"
# Namespace of the UUIDs (version 5) that Carver gives to the file systems that it makes.
_NAMESPACE = uuid.UUID("0c0a7d0e-1f9b-4b52-9d37-5b8b6f0a2e61")
# Tags of volumes whose file systems may be smaller than the volumes: copies, volumes received from
# another node, and volumes that are to grow.
_MAY_BE_LARGER = {tag.FROM, tag.WANTED, tag.REFUSED, tag.RECEIVED}
# Tags of volumes that may hold data: they were in use, or hold another volume's data.
_USED = {tag.FORMATTED, tag.FROM, tag.RECEIVED, tag.ADOPTED}
# Tags of volumes that had a complete file system, or a file system that another program made.
_IN_USE = {tag.FORMATTED, tag.ADOPTED}
# Errors of finding a volume, or of writing its tags, that are logged or ignored when a file system
# with errors is to be mounted again.
_LOOKUP_ERRORS = (errors.AgentError, mount_errors.CommandError)


class Stager:
    """Stages and unstages volumes."""

    def __init__(
        self,
        context: Context,
        node_volumes: NodeVolumes,
        encrypted: EncryptedDevices,
        expander: Expander,
    ) -> None:
        self._run, self._kernel = context.run, context.kernel
        self._volume_groups = context.volume_groups
        self._reports, self._activator = context.reports, context.activator
        self._mender, self._tag_writer = context.mender, context.tag_writer
        self._detached = context.detached
        self._configuration = context.configuration
        self._mappings = Mappings(context)
        self._limiter = context.limiter
        self._volumes = node_volumes
        self._encrypted = encrypted
        self._expander = expander
        self._conflicts = context.conflicts
        context.conflicts.add_mkfs(context.detached)

    def stage(self, request: StageVolume) -> None:
        """Activate a volume, format it once in its life, and mount it at the staging path.

        Runs two commands at most: a report, and mkfs or a check of the file system. Opening an
        encrypted volume and growing a volume take further commands. Runs none for a volume that is
        staged, unless its file system met an error and is mounted again, or its key is changed. The
        tag that records mkfs is written after the response. A volume that is smaller than its tag
        `wanted` says grows first. A raw block volume is activated and opened only.
        """
        request = replace(request, staging_path=self._volumes.resolve(request.staging_path))
        device = self._volumes.device(request.volume_id)
        if request.capability.is_block:
            self._ensure_open(request, device)
        else:
            mount_table = table.read(self._kernel)
            if (
                device is not None
                and mount_table.top_of(request.staging_path, device.number) is not None
            ):
                # Mount the file system of a staged volume again if the file system had errors.
                # Kubelet stages a staged volume again after kubelet's own start.
                mount_table = self.without_errors(request, device, mount_table)
            find = partial(self._mender.mended_volume, request.volume_id, Call.USE)
            self.ensure_mounted(request, device, find, mount_table)
        self._encrypted.follow_open(request.volume_id, request.keys)

    def _ensure_open(self, request: StageVolume, device: Device | None) -> None:
        """Activate and open a raw block volume, and complete its growth, if it is not staged yet.

        Also remove the record of a refused size that the volume has now.
        """
        if device is None or not self._is_ready(request, device):
            volume, device = self._activated(
                request, self._mender.mended_volume(request.volume_id, Call.USE)
            )
            device, tags = self._encrypted.opened(volume, device, request.keys)
            self._record_later(volume, tags)
        cached_volume = self._reports.cached(request.volume_id)
        if cached_volume is None or not cached_volume.refused_bytes:
            return
        # Remove the record of a refused size (tag `refused`) if the device now shows the whole
        # volume.
        if self._kernel.device_size_bytes(device.path) >= cached_volume.capacity_bytes:
            self._expander.settle(request.volume_id)

    def _is_ready(self, request: StageVolume, device: Device) -> bool:
        """Whether an active raw block volume is large enough, and open if it is encrypted."""
        cached_volume = self._reports.cached(request.volume_id)
        if cached_volume is None or cached_volume.wanted_bytes or not cached_volume.is_listed:
            return False
        if self._activator.has_lost_disk(cached_volume):
            return False
        if device.below is not None:
            return self._mappings.is_used(device)
        self._encrypted.check(cached_volume, request.keys)
        return not (cached_volume.is_encrypted or request.parameters.is_encrypted)

    def ensure_mounted(
        self,
        request: StageVolume,
        device: Device | None,
        find_volume: Callable[[], Volume],
        mount_table: table.Table,
    ) -> None:
        """Find or create a volume, activate, open, format and mount it, and grow its file system.

        `find_volume` is called for the volume only if the volume is not mounted at the staging path
        according to `mount_table`; no command runs if the volume is mounted there.
        """
        volume: Volume | None
        if (
            device is None
            or (mounted := mount_table.top_of(request.staging_path, device.number)) is None
        ):
            volume = self._mounted(request, find_volume())
        else:
            volume = self._reports.cached(request.volume_id)
            fs_type = request.capability.fs_type or request.parameters.fs_type or mounted.fs_type
            if mounted.fs_type != fs_type:
                raise errors.Incompatible(
                    f"{request.staging_path} is staged with {mounted.fs_type}, not {fs_type}"
                )
            self.mount(request, device, fs_type, mount_table)
            self.record_formatted(volume, fs_type)
        # Grow the file system of a mounted volume, too. Crash point: the volume is mounted, and its
        # file system is smaller. A reader's file system does not grow: the kernel needs a writable
        # mount for that.
        may_be_larger = (
            volume is None
            or volume.size_bytes > volume.made_bytes
            or not _MAY_BE_LARGER.isdisjoint(volume.own_tags)
        )
        if may_be_larger and not request.capability.read_only:
            self._grow(request, volume)
        # Set the volume's I/O limits last, so that the I/O of Carver itself is not limited. Crash
        # point: the limits are not set; the next start of Carver sets the limits.
        if volume is not None:
            self._limiter.apply(volume)

    def record_formatted(self, volume: Volume | None, fs_type: str) -> None:
        """Write the tag `formatted` of a staged volume after the response, if it is missing.

        The tag is missing if the process that formatted the volume was killed. `volume` is the
        volume by the cached state, or None if the cache does not have the volume yet.
        """
        if volume is not None and tag.FORMATTED not in volume.own_tags:
            self._record_later(volume, {tag.FORMATTED: fs_type})

    def _activated(self, request: StageVolume, volume: Volume) -> tuple[Volume, Device]:
        """Check the keys, grow a volume to the size in its tag `wanted`, and activate it.

        Returns the volume with its present size, and its device.
        """
        self._encrypted.check(volume, request.keys)
        volume = self._expander.catch_up(volume)
        # Crash point: the volume may have been grown and activated, and is not staged yet; the next
        # NodeStageVolume call continues from that state.
        with self._volume_groups.hold(volume.group.name):
            return volume, self._activator.activate(volume)

    def _mounted(self, request: StageVolume, volume: Volume) -> Volume:
        """Activate, open, format and mount a volume; return the volume as it was activated."""
        volume, device = self._activated(request, volume)
        if volume.is_block:
            raise errors.BadField(
                "volume_capability.mount",
                "the volume was made for raw block access; what it holds is not Carver's",
            )
        fs_type = (
            request.capability.fs_type
            or request.parameters.fs_type
            or volume.own_tags.get(tag.FORMATTED)
            or DEFAULT_FS_TYPE
        )
        # Wait for an mkfs or fsck of an earlier call, which may outlast that call.
        self._detached.wait_for(str(volume.id))
        device, tags = self._encrypted.opened(volume, device, request.keys)
        with self._closing_on_failure(volume, device):
            tags |= self.ensure_formatted(request, volume, device, fs_type)
            self._record_later(volume, tags)
            target.ensure_directory(self._kernel, request.staging_path)
            self.mount(request, device, fs_type)
        return volume

    def _grow(self, request: StageVolume, volume: Volume | None) -> None:
        volume_path = VolumePath(request.volume_id, request.staging_path)
        try:
            if self._expander.fill_device(volume_path, request.keys, if_possible=True):
                self._expander.settle(request.volume_id)
        except mount_errors.GrowFailed as error:
            # Raise the error for a copy that was never expanded, which would stay smaller than its
            # claim unnoticed.
            is_on_record = volume is not None and {tag.WANTED, tag.REFUSED} & volume.own_tags.keys()
            if volume is None or (volume.is_copied and not is_on_record):
                raise
            # Go on, so that the pod starts with the present size; NodeExpandVolume reports why the
            # volume did not grow.
            _log.warning("volume %s is staged as it is: %s", request.volume_id, error)

    def ensure_formatted(
        self, request: StageVolume, volume: Volume, device: Device, fs_type: str
    ) -> dict[str, str]:
        """Make a file system on a blank volume, or check the existing one; return the tag for it.

        A file system that a killed mkfs left is replaced. Raises UnexpectedContents for other
        contents than the file system, ContentsLost if a formatted volume is blank, MadeByOthers for
        a file system with a UUID that neither Carver nor an mkfs option gave, and StillAtWork if
        mkfs or a check outlasts the call.
        """
        formatted, path = volume.own_tags.get(tag.FORMATTED), device.path
        if formatted and formatted != fs_type:
            raise mount_errors.UnexpectedContents(path, formatted, fs_type)
        find = partial(filesystem.find, self._kernel, path, fs_type)
        signature, mkfs_options = find(), request.parameters.mkfs_options
        # Find the file system. Crash point: if the process dies between mkfs and the tag, the file
        # system is recognized by its UUID.
        if signature is not None and self._discard_unfinished(volume, device, signature):
            # Format the volume anew. Crash point: mkfs was killed amid its work; or the process
            # dies here, with the volume blank.
            _log.warning("volume %s is formatted anew: its mkfs was killed", volume.id)
            signature = find()
        is_own = (
            formatted or volume.is_copied or (signature and signature.uuid == _own_uuid(device))
        )
        if signature is None or not is_own:
            # Probe for any contents only if the volume was never formatted, or its file system was
            # not found.
            signature = self._in_unformatted(volume, device)
            if signature is not None and signature.fs_type != fs_type:
                raise mount_errors.UnexpectedContents(path, str(signature), fs_type)
            if signature is None and formatted:
                raise errors.ContentsLost(request.volume_id, formatted, path)
        if signature is None:
            request.parameters.check_for(fs_type, "volume_context")
            filesystem.check_size(fs_type, volume.capacity_bytes)
            probe = partial(filesystem.probe, self._kernel, path)
            recheck = partial(self._require_same, volume, device, probe, signature)
            # Run mkfs only on a volume that is blank by the probe, and was never formatted by its
            # tags.
            make = partial(filesystem.make, self._run, path, fs_type, mkfs_options)
            oldest = self._configuration.now.oldest_kernel
            make = partial(make, uuid=_own_uuid(device), oldest_kernel=oldest)
            self._detached.do(str(volume.id), volume.group.name, MKFS, make, recheck)
            return {tag.FORMATTED: fs_type}
        if not is_own and not filesystem.gives_uuid(fs_type, mkfs_options):
            missing = lvm_tags.format_one(tag.FORMATTED, fs_type)
            raise mount_errors.MadeByOthers(path, str(signature), signature.uuid, missing)
        # Check the file system unless the device is in use: e2fsck refuses a device that another
        # mount namespace has mounted, although the kernel would mount it.
        if not self._kernel.device_is_held(path):
            recheck = partial(self._require_same, volume, device, find, signature)
            check = partial(filesystem.check, self._run, path, fs_type)
            self._detached.do(str(volume.id), volume.group.name, "fsck", check, recheck)
        return {} if formatted else {tag.FORMATTED: fs_type}

    def _discard_unfinished(
        self, volume: Volume, device: Device, signature: filesystem.Signature
    ) -> bool:
        """Zero the superblock that a killed mkfs left; return whether `signature` was one.

        The superblock is zeroed only if all of these say so:

        - No tag says that the volume was in use, or that other programs made its file system.
        - The file system has the UUID that only Carver's mkfs gives.
        - The superblock has the mark of an unfinished mkfs, with which the kernel does not mount
          it.

        A copy may have the superblock of its source, which held no data either: no tag of the
        source said that it was formatted. Raises ProbeFailed.
        """
        is_own = signature.uuid == _own_uuid(device)
        is_of_source = volume.is_copied and _is_derived(signature.uuid)
        if volume.own_tags.keys() & _IN_USE or not (is_own or is_of_source):
            return False
        self._activator.require_same(volume, device)
        return filesystem.discard_unfinished(
            self._kernel, device.path, signature.fs_type, signature.uuid
        )

    def _in_unformatted(self, volume: Volume, device: Device) -> filesystem.Signature | None:
        """Return the file system or other contents that a probe finds on a volume; None if blank.

        The method is for a volume that was never formatted, or whose file system was not found.
        Contents in the extents that a growth added do not count if the volume never held data: they
        are an earlier volume's, and are zeroed.
        """
        made_bytes = volume.made_bytes - volume.header_bytes
        if volume.own_tags.keys() & _USED:
            return filesystem.probe(self._kernel, device.path)
        return filesystem.probe_grown(self._kernel, device.path, made_bytes)

    def _require_same(
        self,
        volume: Volume,
        device: Device,
        read_signature: Callable[[], filesystem.Signature | None],
        signature: filesystem.Signature | None,
    ) -> None:
        """Raise an error if a volume or its contents changed since `signature` was read.

        `read_signature` reads the present signature. The errors are NoSuchVolume and
        UnexpectedContents.
        """
        self._activator.require_same(volume, device)
        if (contents := read_signature()) != signature:
            raise mount_errors.UnexpectedContents(device.path, str(contents), str(signature))

    def mount(
        self,
        request: StageVolume,
        device: Device,
        fs_type: str,
        mount_table: table.Table | None = None,
    ) -> None:
        """Mount a volume's file system at the staging path, if it is not mounted there."""
        flags = (*request.parameters.mount_options, *request.capability.mount_flags)
        mounts.ensure_mounted(
            self._kernel,
            device.path,
            request.staging_path,
            fs_type,
            options.parse(flags, fs_type),
            read_only=request.capability.read_only,
            mount_table=mount_table,
        )

    def without_errors(
        self, request: StageVolume, device: Device, mount_table: table.Table
    ) -> table.Table:
        """Mount a staged file system again after an error, if it is published nowhere.

        The file system is checked first. Kubelet does not unstage a volume when one pod follows
        another, so that no other call mounts the file system again. Returns the mount table
        afterwards. Raises the errors of staging; the file system is then unmounted, and the next
        call mounts it.
        """
        all_mounts = mount_table.of_device(device.number)
        mounted = next((mount for mount in all_mounts if mount.path == request.staging_path), None)
        if mounted is None and not all_mounts:
            # Crash point: an earlier call unmounted the file system, and did not mount it again.
            volume = self._to_be_remounted(request.volume_id, device)
            if volume is None:
                return mount_table
            formatted = volume.own_tags.get(tag.FORMATTED)
            fs_type = formatted or request.capability.fs_type or DEFAULT_FS_TYPE
        elif mounted is None or len(all_mounts) > 1:
            return mount_table
        elif filesystem_health.is_over_when_mounted_anew(self._kernel, mount_table, mounted):
            fs_type = mounted.fs_type
            try:
                volume = self._mender.mended_volume(request.volume_id, Call.USE)
                self._tag_remount(volume, {tag.REMOUNT: "yes"})
                # Crash point: after the unmount, the next call finds the tag `remount` and mounts
                # the file system.
                mounts.ensure_unmounted(self._kernel, request.staging_path, [device.number])
            except (*_LOOKUP_ERRORS, mount_errors.MountError) as error:
                _log.warning("cannot mount volume %s again: %s", request.volume_id, error)
                return mount_table
        else:
            return mount_table
        _log.warning("volume %s had errors: it is checked and mounted again", volume.id)
        # Record in memory that the volume is formatted: the volume was mounted, so if its device is
        # blank, the file system is lost, and must not be replaced by a new one.
        volume = replace(volume, own_tags={**volume.own_tags, tag.FORMATTED: fs_type})
        if self._activator.has_lost_disk(volume):
            # Close the volume's dm-crypt device, if any, which uses the lost disk: an open dm-crypt
            # device keeps the volume from being activated anew.
            self._mappings.close_unused(volume.backing)
            self._mounted(request, volume)
        else:
            self._detached.wait_for(request.volume_id)
            self.ensure_formatted(request, volume, device, fs_type)
            self.mount(request, device, fs_type)
        with suppress(*_LOOKUP_ERRORS):
            self._tag_remount(volume, {})
        return table.read(self._kernel)

    def _to_be_remounted(self, volume_id: str, device: Device) -> Volume | None:
        """Return a volume that an earlier call unmounted in order to mount it again, else None."""
        try:
            volume = self._mender.mended_volume(volume_id, Call.USE)
        except _LOOKUP_ERRORS:
            return None
        is_open = device.below is not None or not volume.is_encrypted
        return volume if is_open and tag.REMOUNT in volume.own_tags else None

    def _tag_remount(self, volume: Volume, new_tags: dict[str, str]) -> None:
        self._tag_writer.replace(volume.backing, (tag.REMOUNT,), new_tags)

    def _record_later(self, volume: Volume, own_tags: dict[str, str]) -> None:
        """Write tags to a volume after the response.

        If the tags are lost, the next NodeStageVolume call finds the same tags.
        """
        if own_tags:
            self._volume_groups.add_tags_later(volume.group.name, volume.backing.name, own_tags)

    @contextmanager
    def _closing_on_failure(self, volume: Volume, device: Device) -> Iterator[None]:
        """Close an encrypted volume on an exception, unless mkfs goes on and keeps it open."""
        try:
            yield
        except Exception:
            if device.below is not None:
                with suppress(mount_errors.MountError, mount_errors.CommandError):
                    self._mappings.close_unused(volume.backing)
            raise

    def check_keys(self, volume_id: str, parameters: Parameters, keys: Keys) -> None:
        """Raise, before the volume exists, the error that staging without a key would raise."""
        is_encrypted = parameters.is_encrypted
        self._encrypted.check_keys(volume_id, parameters.device_class, keys, encrypted=is_encrypted)

    def unstage(self, request: VolumePath) -> None:
        """Unmount the staging path of a volume; a path without a mount is no error.

        An encrypted volume is closed by one command, unless it is still published.
        """
        path, logical = self._volumes.resolve(request.path), backing.of_id(request.volume_id)
        with self._limiter.remove_after(logical, is_last=True):
            self._volumes.ensure_unmounted(replace(request, path=path))
        cached_volume = self._reports.cached(request.volume_id)
        if cached_volume is not None and tag.REMOUNT in cached_volume.own_tags:
            # Remove the tag `remount` that an interrupted NodePublishVolume call left, so that the
            # next NodePublishVolume call does not mount the file system again.
            with suppress(errors.AgentError, mount_errors.CommandError):
                self._tag_writer.replace(cached_volume.backing, (tag.REMOUNT,), {})
        self._encrypted.forget(request.volume_id)
        with self._conflicts.enter(Call.UNSTAGE, request.volume_id):
            # Crash point: the volume is unmounted and open; the next NodeUnstageVolume or
            # NodeStageVolume call closes the volume.
            self._mappings.close_unused(logical)


def _own_uuid(device: Device) -> str:
    """Return the UUID of the file system that Carver makes on a volume.

    The UUID is derived from the logical volume's, so no copied or older file system has it.
    """
    return str(uuid.uuid5(_NAMESPACE, device.logical.uuid))


def _is_derived(identity: str) -> bool:
    """Whether a UUID is derived from a name, as Carver's are, unlike those that mkfs chooses."""
    try:
        return uuid.UUID(identity).version == 5
    except ValueError:
        return False
