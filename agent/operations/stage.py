"""NodeStageVolume: active, open, formatted once in its life, mounted. NodeUnstageVolume: unmounted.

Unstaging starts no process for a volume that is not encrypted: the kernel's mount table and sysfs
have all that it needs.
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
from agent.requests.requests import StageVolume, VolumeAt
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

DEFAULT_FS_TYPE = "ext4"
_NAMESPACE = uuid.UUID("0c0a7d0e-1f9b-4b52-9d37-5b8b6f0a2e61")
# A copy may be larger than its file system, and so may a volume that is to grow.
_MAY_BE_LARGER = {tag.FROM, tag.WANTED, tag.REFUSED, tag.RECEIVED}
# What has one of these was in use, or holds another volume's data.
_USED = {tag.FORMATTED, tag.FROM, tag.RECEIVED, tag.ADOPTED}
# What has one of these had a whole file system, or one that others made.
_IN_USE = {tag.FORMATTED, tag.ADOPTED}
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

    def stage(self, call: StageVolume) -> None:
        """Activate the volume; format it, once in its life, and mount it at the staging path.

        Two commands at most: a report, and mkfs or a check of the file system; none where it is
        staged, unless that file system met an error and is mounted again. The tag that records mkfs
        is written after the answer. A volume with a larger size on record grows first.
        """
        call = replace(call, staging_path=self._volumes.place(call.staging_path))
        device = self._volumes.device(call.volume_id)
        if call.capability.is_block:
            self._ensure_open(call, device)
        else:
            known = table.read(self._kernel)
            if device is not None and known.top_of(call.staging_path, device.number) is not None:
                # Kubelet stages it so after its own start.
                known = self.without_errors(call, device, known)
            find = partial(self._mender.mended_volume, call.volume_id, Call.USE)
            self.ensure_mounted(call, device, find, known)
        self._encrypted.follow_open(call.volume_id, call.keys)

    def _ensure_open(self, call: StageVolume, device: Device | None) -> None:
        """Activate and open a raw block volume, and complete its growth."""
        if device is None or not self._is_ready(call, device):
            volume, device = self._activated(
                call, self._mender.mended_volume(call.volume_id, Call.USE)
            )
            device, tags = self._encrypted.opened(volume, device, call.keys)
            self._record_later(volume, tags)
        seen = self._reports.cached(call.volume_id)
        if seen is None or not seen.refused_bytes:
            return
        # The size is not refused any more if all of the volume can be used by its device.
        if self._kernel.device_size_bytes(device.path) >= seen.capacity_bytes:
            self._expander.settle(call.volume_id)

    def _is_ready(self, call: StageVolume, device: Device) -> bool:
        """Whether an active raw block volume is as large as is on record, and open or plain."""
        seen = self._reports.cached(call.volume_id)
        if seen is None or seen.wanted_bytes or not seen.is_listed:
            return False
        if self._activator.has_lost_disk(seen):
            return False
        if device.below is not None:
            return self._mappings.is_used(device)
        self._encrypted.check(seen, call.keys)
        return not (seen.is_encrypted or call.parameters.is_encrypted)

    def ensure_mounted(
        self,
        call: StageVolume,
        device: Device | None,
        find: Callable[[], Volume],
        known: table.Table,
    ) -> None:
        """Find or make the volume, activate, open, format and mount it, and grow its file system.

        `find` is called for the volume where it is not mounted at the staging path, by the mount
        table that is `known`. No command where it is.
        """
        seen: Volume | None
        if device is None or (mounted := known.top_of(call.staging_path, device.number)) is None:
            seen = self._mounted(call, find())
        else:
            seen = self._reports.cached(call.volume_id)
            fs_type = call.capability.fs_type or call.parameters.fs_type or mounted.fs_type
            if mounted.fs_type != fs_type:
                raise errors.Incompatible(
                    f"{call.staging_path} is staged with {mounted.fs_type}, not {fs_type}"
                )
            self.mount(call, device, fs_type, known)
            self.record_formatted(seen, fs_type)
        # Crash point: mounted, and its file system smaller. So growth is not only for the first
        # mount. A reader's file system does not grow: the kernel needs a writable mount for it.
        may_be_larger = (
            seen is None
            or seen.size_bytes > seen.made_bytes
            or not _MAY_BE_LARGER.isdisjoint(seen.own_tags)
        )
        if may_be_larger and not call.capability.read_only:
            self._grow(call, seen)
        # Last: what Carver does is not limited. Crash point: the next start limits it.
        if seen is not None:
            self._limiter.apply(seen)

    def record_formatted(self, staged: Volume | None, fs_type: str) -> None:
        """Write the tag of a staged volume's file system later, where an ended process did not.

        `staged` is the volume by the cached state; None where that has not got it yet.
        """
        if staged is not None and tag.FORMATTED not in staged.own_tags:
            self._record_later(staged, {tag.FORMATTED: fs_type})

    def _activated(self, call: StageVolume, volume: Volume) -> tuple[Volume, Device]:
        """Check the keys, grow the volume to the size on record, and activate it."""
        self._encrypted.check(volume, call.keys)
        volume = self._expander.catch_up(volume)
        # Crash point: grown or active, and no more; the next call goes on from there.
        with self._volume_groups.hold(volume.group.name):
            return volume, self._activator.activate(volume)

    def _mounted(self, call: StageVolume, volume: Volume) -> Volume:
        """Activate, open, format and mount a volume; the volume as it was activated."""
        volume, device = self._activated(call, volume)
        if volume.is_block:
            raise errors.BadField(
                "volume_capability.mount",
                "the volume was made for raw block access; what it holds is not Carver's",
            )
        fs_type = (
            call.capability.fs_type
            or call.parameters.fs_type
            or volume.own_tags.get(tag.FORMATTED)
            or DEFAULT_FS_TYPE
        )
        # An earlier call's mkfs or fsck may outlast it.
        self._detached.finish(str(volume.id))
        device, tags = self._encrypted.opened(volume, device, call.keys)
        with self._closing_on_failure(volume, device):
            tags |= self.ensure_formatted(call, volume, device, fs_type)
            self._record_later(volume, tags)
            target.ensure_directory(self._kernel, call.staging_path)
            self.mount(call, device, fs_type)
        return volume

    def _grow(self, call: StageVolume, seen: Volume | None) -> None:
        at = VolumeAt(call.volume_id, call.staging_path)
        try:
            if self._expander.fill_device(at, call.keys, if_possible=True):
                self._expander.settle(call.volume_id)
        except mount_errors.GrowFailed as error:
            # A copy that was never expanded would stay smaller than its claim unnoticed.
            is_on_record = seen is not None and {tag.WANTED, tag.REFUSED} & seen.own_tags.keys()
            if seen is None or (seen.is_copied and not is_on_record):
                raise
            # The pod starts with the present size; NodeExpandVolume reports why it is no more.
            _log.warning("volume %s is staged as it is: %s", call.volume_id, error)

    def ensure_formatted(
        self, call: StageVolume, volume: Volume, device: Device, fs_type: str
    ) -> dict[str, str]:
        """Make a file system on a blank volume, or check the one that is there; the tag for it.

        Raises UnexpectedContents, ContentsLost, MadeByOthers.
        """
        formatted, path = volume.own_tags.get(tag.FORMATTED), device.path
        if formatted and formatted != fs_type:
            raise mount_errors.UnexpectedContents(path, formatted, fs_type)
        find = partial(filesystem.find, self._kernel, path, fs_type)
        found, words = find(), call.parameters.mkfs_options
        # Crash point: between mkfs and the tag; the file system is recognized by its UUID.
        if found is not None and self._discard_unfinished(volume, device, found):
            # Crash point: amid mkfs; or here, where the volume is blank.
            _log.warning("volume %s is formatted anew: its mkfs was killed", volume.id)
            found = find()
        is_own = formatted or volume.is_copied or (found and found.uuid == _own_uuid(device))
        if found is None or not is_own:
            # Only what was never formatted is judged by all that may be on it.
            found = self._in_unformatted(volume, device)
            if found is not None and found.fs_type != fs_type:
                raise mount_errors.UnexpectedContents(path, str(found), fs_type)
            if found is None and formatted:
                raise errors.ContentsLost(call.volume_id, formatted, path)
        if found is None:
            call.parameters.check_for(fs_type, "volume_context")
            filesystem.check_size(fs_type, volume.capacity_bytes)
            probe = partial(filesystem.probe, self._kernel, path)
            look = partial(self._require_same, volume, device, probe, found)
            # Blank by the probe, and never formatted by the tags: only then.
            make = partial(filesystem.make, self._run, path, fs_type, words)
            oldest = self._configuration.now.oldest_kernel
            make = partial(make, uuid=_own_uuid(device), oldest_kernel=oldest)
            self._detached.do(str(volume.id), volume.group.name, MKFS, make, look)
            return {tag.FORMATTED: fs_type}
        if not is_own and not filesystem.gives_uuid(fs_type, words):
            missing = lvm_tags.format_one(tag.FORMATTED, fs_type)
            raise mount_errors.MadeByOthers(path, str(found), found.uuid, missing)
        # e2fsck refuses what another mount namespace has mounted, too; the kernel does not.
        if not self._kernel.device_is_held(path):
            look = partial(self._require_same, volume, device, find, found)
            check = partial(filesystem.check, self._run, path, fs_type)
            self._detached.do(str(volume.id), volume.group.name, "fsck", check, look)
        return {} if formatted else {tag.FORMATTED: fs_type}

    def _discard_unfinished(
        self, volume: Volume, device: Device, found: filesystem.Signature
    ) -> bool:
        """Zero the superblock that a killed mkfs left; whether this was one. Raises ProbeFailed.

        All must say so: no tag that it was in use or is of others, the UUID that no other mkfs
        gave, and the mark in the superblock, with which the kernel mounts none. A copy has what its
        source had, which held no data either: no tag of the source's said that it was formatted.
        """
        is_own = found.uuid == _own_uuid(device)
        is_of_source = volume.is_copied and _is_derived(found.uuid)
        if volume.own_tags.keys() & _IN_USE or not (is_own or is_of_source):
            return False
        self._activator.require_same(volume, device)
        return filesystem.discard_unfinished(self._kernel, device.path, found.fs_type, found.uuid)

    def _in_unformatted(self, volume: Volume, device: Device) -> filesystem.Signature | None:
        """What is on a volume that has no file system by its tags; None if it is blank."""
        made_bytes = volume.made_bytes - volume.header_bytes
        if volume.own_tags.keys() & _USED:
            return filesystem.probe(self._kernel, device.path)
        return filesystem.probe_grown(self._kernel, device.path, made_bytes)

    def _require_same(
        self,
        volume: Volume,
        device: Device,
        look: Callable[[], filesystem.Signature | None],
        found: filesystem.Signature | None,
    ) -> None:
        """Raise NoSuchVolume, UnexpectedContents where a volume changed since `look` found that."""
        self._activator.require_same(volume, device)
        if (now := look()) != found:
            raise mount_errors.UnexpectedContents(device.path, str(now), str(found))

    def mount(
        self, call: StageVolume, device: Device, fs_type: str, before: table.Table | None = None
    ) -> None:
        """Mount the file system at the staging path, if it is not."""
        flags = (*call.parameters.mount_options, *call.capability.mount_flags)
        mounts.ensure_mounted(
            self._kernel,
            device.path,
            call.staging_path,
            fs_type,
            options.parse(flags, fs_type),
            read_only=call.capability.read_only,
            before=before,
        )

    def without_errors(self, call: StageVolume, device: Device, known: table.Table) -> table.Table:
        """Mount the staged file system again after an error, if it is published nowhere.

        Kubelet does not unstage when one pod follows another. Returns the mount table as it is
        then. Raises what staging raises; the file system is unmounted then, and the next call goes
        on.
        """
        everywhere = known.of_device(device.number)
        mounted = next((one for one in everywhere if one.path == call.staging_path), None)
        if mounted is None and not everywhere:
            # Crash point: unmounted, and not mounted again.
            volume = self._to_be_remounted(call.volume_id, device)
            if volume is None:
                return known
            formatted = volume.own_tags.get(tag.FORMATTED)
            fs_type = formatted or call.capability.fs_type or DEFAULT_FS_TYPE
        elif mounted is None or len(everywhere) > 1:
            return known
        elif filesystem_health.is_over_when_mounted_anew(self._kernel, known, mounted):
            fs_type = mounted.fs_type
            try:
                volume = self._mender.mended_volume(call.volume_id, Call.USE)
                self._tag_remount(volume, {tag.REMOUNT: "yes"})
                # Crash point: by the tag, the next call goes on after the unmount.
                mounts.ensure_unmounted(self._kernel, call.staging_path, [device.number])
            except (*_LOOKUP_ERRORS, mount_errors.MountError) as error:
                _log.warning("cannot mount volume %s again: %s", call.volume_id, error)
                return known
        else:
            return known
        _log.warning("volume %s had errors: it is checked and mounted again", volume.id)
        # It was mounted, so a blank device has lost its file system, and must not get another.
        volume = replace(volume, own_tags={**volume.own_tags, tag.FORMATTED: fs_type})
        if self._activator.has_lost_disk(volume):
            # A mapping on what the disk was keeps that from being activated anew.
            self._mappings.close_unused(volume.backing)
            self._mounted(call, volume)
        else:
            self._detached.finish(call.volume_id)
            self.ensure_formatted(call, volume, device, fs_type)
            self.mount(call, device, fs_type)
        with suppress(*_LOOKUP_ERRORS):
            self._tag_remount(volume, {})
        return table.read(self._kernel)

    def _to_be_remounted(self, volume_id: str, device: Device) -> Volume | None:
        """The volume, if an earlier call unmounted it to mount it again."""
        try:
            volume = self._mender.mended_volume(volume_id, Call.USE)
        except _LOOKUP_ERRORS:
            return None
        is_open = device.below is not None or not volume.is_encrypted
        return volume if is_open and tag.REMOUNT in volume.own_tags else None

    def _tag_remount(self, volume: Volume, new: dict[str, str]) -> None:
        self._tag_writer.replace(volume.backing, (tag.REMOUNT,), new)

    def _record_later(self, volume: Volume, tags: dict[str, str]) -> None:
        """Write tags after the answer. If they are lost, the next stage finds the same."""
        if tags:
            self._volume_groups.add_tags_later(volume.group.name, volume.name, tags)

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
        """Raise what staging would raise for want of a key, before there is a volume."""
        is_encrypted = parameters.is_encrypted
        self._encrypted.check_keys(volume_id, parameters.device_class, keys, encrypted=is_encrypted)

    def unstage(self, call: VolumeAt) -> None:
        """Unmount the staging path; a path where nothing is mounted is no error.

        An encrypted volume is closed by one command, unless it is published still.
        """
        path, logical = self._volumes.place(call.path), backing.of_id(call.volume_id)
        with self._limiter.leaving(logical, is_last=True):
            self._volumes.ensure_unmounted(replace(call, path=path))
        seen = self._reports.cached(call.volume_id)
        if seen is not None and tag.REMOUNT in seen.own_tags:
            # A publish was to mount it again, and the next one must not.
            with suppress(errors.AgentError, mount_errors.CommandError):
                self._tag_writer.replace(seen.backing, (tag.REMOUNT,), {})
        self._encrypted.forget(call.volume_id)
        with self._conflicts.enter(Call.UNSTAGE, call.volume_id):
            # Crash point: unmounted and open; the next unstage or stage closes it.
            self._mappings.close_unused(logical)


def _own_uuid(device: Device) -> str:
    """The UUID of the file system that is made on a volume; no copied or older one has it."""
    return str(uuid.uuid5(_NAMESPACE, device.logical.uuid))


def _is_derived(identity: str) -> bool:
    """Whether a UUID is derived from a name, as Carver's are, and none that a mkfs chooses."""
    try:
        return uuid.UUID(identity).version == 5
    except ValueError:
        return False
