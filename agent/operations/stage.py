"""Volumes in use: staged, published, measured, grown. What the Node's calls mean.

Publishing, unpublishing, unstaging and statistics start no process: the kernel's mount table and
sysfs say all that they need.
"""

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

from agent.core import errors, ids, secret, tag, users
from agent.core.capabilities import BLOCK, MULTI_WRITER
from agent.core.context import Context
from agent.core.holds import Holds
from agent.core.luks_devices import Mappings
from agent.core.parameters import Parameters
from agent.core.records import Volume
from agent.core.requests import PublishVolume, StageVolume, VolumeAt
from agent.core.secret import Keys
from agent.operations.clone import Copier
from agent.operations.encrypt import EncryptedDevices
from agent.operations.erase import Eraser
from agent.operations.expand import Expander
from agent.operations.reencrypt import Reencrypter
from lvm import tags as lvm_tags
from lvm.devices import Device
from mount import errors as mount_errors
from mount import filesystem, health, loop, mounts, options, table, target

_log = logging.getLogger(__name__)

DEFAULT_FS_TYPE = "ext4"
_NAMESPACE = uuid.UUID("0c0a7d0e-1f9b-4b52-9d37-5b8b6f0a2e61")


@dataclass(frozen=True)
class Statistics:
    """What is known of a volume in use.

    `usage` is None for a raw block volume, and for a file system that does not answer.
    """

    total_bytes: int
    usage: health.Usage | None


_log = logging.getLogger(__name__)


class NodeVolumes:
    """Carries out the Node's calls."""

    def __init__(
        self,
        context: Context,
        eraser: Eraser,
        copier: Copier,
        expander: Expander,
        reencrypter: Reencrypter,
        holds: Holds,
    ) -> None:
        self._run = context.run
        self._volume_groups, self._kernel = context.volume_groups, context.kernel
        self._inventory = context.inventory
        self._eraser = eraser
        self._copier = copier
        self._expander = expander
        self._mappings = Mappings(context)
        self._reencrypter = reencrypter
        self._opening = EncryptedDevices(context, self._mappings, reencrypter)
        self._holds = holds
        self._detached = context.detached
        # The directories in which kubelet may have volumes mounted.
        self._inside = context.config.kubelet_dir
        self._oldest_kernel = context.config.oldest_kernel

    def stage(self, call: StageVolume) -> None:
        """Activate the volume; format it, once in its life, and mount it at the staging path.

        Two commands at most: report, and mkfs, or a check of the file system that is there.
        The tag that tells of mkfs is written behind the answer. None where it is staged. Before, it
        is made as large as is on record.
        """
        call = replace(call, staging_path=self.place(call.staging_path))
        device = self._device(call.volume_id)
        if not call.capability.is_block:
            self.ensure_mounted(call, device, lambda: self._inventory.require(call.volume_id))
        elif device is None or not self._is_ready(call, device):
            volume = self._inventory.require(call.volume_id)
            self._opening.check(volume, call.keys)
            volume = self._expander.catch_up(volume)
            device, tags = self._opening.opened(volume, self._activate(volume), call.keys)
            self._promise(volume, tags)
        if call.capability.is_block and device is not None:
            self._settle_whole(call.volume_id, device)
        self._follow(call.volume_id, call.keys)

    def _settle_whole(self, volume_id: str, device: Device) -> None:
        """Drop a refused size from the record if all of the volume can be used by its device."""
        seen = self._inventory.cached(volume_id)
        if seen is None or not seen.refused_bytes:
            return
        if self._kernel.device_size_bytes(device.path) >= seen.capacity_bytes:
            self._expander.settle(volume_id)

    def _follow(self, volume_id: str, keys: Keys) -> None:
        """Have an encrypted volume that stays open take the key that its secret has now."""
        if keys.present and (device := self._inventory.device(volume_id)) is not None:
            self._opening.follow(volume_id, device, keys)

    def _is_ready(self, call: StageVolume, device: Device) -> bool:
        """Whether an active raw block volume is as large as is on record, and open or plain."""
        seen = self._inventory.cached(call.volume_id)
        if seen is None or seen.wanted_bytes or not seen.is_listed:
            return False
        if device.below is not None:
            return self._mappings.is_used(device)
        self._opening.check(seen, call.keys)
        return not (seen.is_encrypted or call.parameters.is_encrypted)

    def ensure_mounted(
        self, call: StageVolume, device: Device | None, find: Callable[[], Volume]
    ) -> None:
        """Have the volume's file system at a place: found or made, active, formatted, mounted.

        `find` is asked for the volume where it is not mounted there; no command runs where it is.
        """
        fs_type = call.capability.fs_type or call.parameters.fs_type
        known = table.read(self._kernel)
        mounted = known.top(call.staging_path)
        seen: Volume | None
        if device is None or mounted is None or mounted.device != device.number:
            volume = find()
            self._opening.check(volume, call.keys)
            volume = self._expander.catch_up(volume)
            device, seen = self._activate(volume), volume
            if volume.own_tags[tag.ACCESS] == BLOCK:
                raise errors.BadField(
                    "volume_capability.mount",
                    "the volume was made for raw block access; what it holds is not Carver's",
                )
            fs_type = fs_type or volume.own_tags.get(tag.FORMATTED) or DEFAULT_FS_TYPE
            # A call that was given up may have left mkfs or fsck at work.
            self._detached.finish(str(volume.id))
            device, tags = self._opening.opened(volume, device, call.keys)
            with self._closing_where_it_fails(call.volume_id, device):
                self._promise(volume, tags | self._ensure_formatted(call, volume, device, fs_type))
                target.ensure_directory(self._kernel, call.staging_path)
                self._mount(call, device, fs_type)
        else:
            seen = self._inventory.cached(call.volume_id)
            if mounted.fs_type != (fs_type := fs_type or mounted.fs_type):
                raise errors.Incompatible(
                    f"{call.staging_path} is staged with {mounted.fs_type}, not {fs_type}"
                )
            self._mount(call, device, fs_type, known)
            if seen is not None and tag.FORMATTED not in seen.own_tags:
                # An earlier call's promise was lost with its process.
                self._promise(seen, {tag.FORMATTED: fs_type})
        if _may_be_larger(seen) and not call.capability.read_only:
            # Each time, also where it is mounted: an earlier call may have ended before this.
            at = VolumeAt(call.volume_id, call.staging_path)
            try:
                if self.fill_device(at, call.keys, if_possible=True):
                    self._expander.settle(call.volume_id)
            except mount_errors.GrowFailed as error:
                # A copy that was never expanded would stay smaller than its claim unnoticed.
                if seen is None or not {tag.WANTED, tag.REFUSED} & seen.own_tags.keys():
                    raise
                # A pod shall start with what there is; NodeExpandVolume tells why it is no more.
                _log.warning("volume %s is staged as it is: %s", call.volume_id, error)

    def _mount(
        self, call: StageVolume, device: Device, fs_type: str, before: table.Table | None = None
    ) -> None:
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

    @contextmanager
    def _closing_where_it_fails(self, volume_id: str, device: Device) -> Iterator[None]:
        """Inside, an encrypted volume does not stay open for nobody; mkfs that goes on keeps it."""
        try:
            yield
        except Exception:
            if device.below is not None:
                with suppress(mount_errors.MountError, mount_errors.CommandError):
                    self._mappings.close_unused(volume_id)
            raise

    def check_keys(self, volume_id: str, parameters: Parameters, keys: Keys) -> None:
        """Raise what staging would raise for want of a key, before there is a volume."""
        encrypted = parameters.is_encrypted
        self._opening.check_keys(volume_id, parameters.device_class, keys, encrypted=encrypted)

    def unstage(self, call: VolumeAt) -> None:
        """Unmount the staging path; a path where nothing is mounted is no error.

        An encrypted volume is closed, unless it is published still: one command. One that is being
        re-encrypted goes on when it is staged next.
        """
        self._ensure_unmounted(replace(call, path=self.place(call.path)))
        self._forget_remount(call.volume_id)
        self._opening.forget(call.volume_id)
        with self._reencrypter.halted(call.volume_id):
            self._mappings.close_unused(call.volume_id)

    def _forget_remount(self, volume_id: str) -> None:
        """What is unstaged is not mounted anew by a publish; a command where that was begun."""
        seen = self._inventory.cached(volume_id)
        if seen is not None and tag.REMOUNT in seen.own_tags:
            with suppress(errors.AgentError, mount_errors.CommandError):
                self._mark_remount(seen, {})

    def publish(self, call: PublishVolume) -> None:
        """Bind the staged file system, or the device itself, to the target path."""
        call = replace(
            call,
            staging_path=self.place(call.staging_path),
            target_path=self.place(call.target_path),
        )
        device = self._device(call.volume_id)
        if device is None:
            self._inventory.require(call.volume_id)
            raise errors.NotStaged(call.volume_id, "its logical volume is not active")
        if call.capability.is_block:
            self._publish_device(call, device)
        else:
            self._publish_directory(call, device)
        self._follow(call.volume_id, call.keys)

    def _publish_directory(self, call: PublishVolume, device: Device) -> None:
        known = self._mounted_well(call, device, table.read(self._kernel))
        staged = known.top(call.staging_path)
        if staged is None or staged.device != device.number:
            raise errors.NotStaged(call.volume_id, f"it is not at {call.staging_path}")
        flags = options.parse(call.capability.mount_flags)
        asked = {*flags.attributes, *call.parameters.mount_options}
        if staged.read_only and not call.read_only and "ro" not in asked:
            raise errors.NotStaged(
                call.volume_id, f"{call.staging_path} is read-only: {staged}", errors.UNSTAGE
            )
        mounted = known.top(call.target_path)
        if mounted is None or mounted.device != device.number:
            self._require_single(call, device, known)
        target.ensure_directory(self._kernel, call.target_path)
        mounts.ensure_bound(
            self._kernel, call.staging_path, call.target_path, flags, call.read_only, known
        )

    def _mounted_well(self, call: PublishVolume, device: Device, known: table.Table) -> table.Table:
        """Have the staged file system mounted anew after an error, where nobody uses it.

        Kubelet stages nothing anew when one pod follows another. The mount table, as it is then.
        Raises what staging raises; it is unmounted then, and the next call goes on.
        """
        everywhere = known.of_device(device.number)
        mounted = next((one for one in everywhere if one.path == call.staging_path), None)
        if mounted is None and not everywhere:
            volume = self._begun_to_remount(call.volume_id, device)
            if volume is None:
                return known
            fs_type = (
                volume.own_tags.get(tag.FORMATTED) or call.capability.fs_type or DEFAULT_FS_TYPE
            )
        elif mounted is None or len(everywhere) > 1:
            return known
        elif health.is_over_when_mounted_anew(self._kernel, known, mounted):
            fs_type = mounted.fs_type
            try:
                volume = self._inventory.require(call.volume_id)
                # By this the next call goes on, where this one ends between two steps.
                self._mark_remount(volume, {tag.REMOUNT: "yes"})
                mounts.ensure_unmounted(self._kernel, call.staging_path, [device.number])
            except (errors.AgentError, mount_errors.CommandError, mount_errors.MountError) as error:
                _log.warning("volume %s is not mounted anew: %s", call.volume_id, error)
                return known
        else:
            return known
        _log.warning("volume %s had errors: it is checked and mounted anew", volume.id)
        # It was mounted: what is blank now was lost.
        volume = replace(volume, own_tags={**volume.own_tags, tag.FORMATTED: fs_type})
        again = StageVolume(call.volume_id, call.staging_path, call.capability, call.parameters)
        self._detached.finish(call.volume_id)
        self._ensure_formatted(again, volume, device, fs_type)
        self._mount(again, device, fs_type)
        with suppress(errors.AgentError, mount_errors.CommandError):
            self._mark_remount(volume, {})
        return table.read(self._kernel)

    def _begun_to_remount(self, volume_id: str, device: Device) -> Volume | None:
        """The volume, where an earlier call unmounted it to mount it anew."""
        try:
            volume = self._inventory.require(volume_id)
        except (errors.AgentError, mount_errors.CommandError):
            return None
        is_open = device.below is not None or not volume.is_encrypted
        return volume if is_open and tag.REMOUNT in volume.own_tags else None

    def _mark_remount(self, volume: Volume, new: Mapping[str, str]) -> None:
        self._inventory.replace_tags(volume.group.name, volume.name, (tag.REMOUNT,), new)

    def _require_plain(self, volume_id: str) -> None:
        """Raise NotStaged where a device is that of a volume that is encrypted, and not open.

        And what `require` does where the device is of what is no volume, or was none a while ago.
        """
        volume = self._inventory.cached(volume_id)
        if volume is None or not volume.is_listed:
            volume = self._inventory.require(volume_id)
        if volume.is_encrypted:
            raise errors.NotStaged(volume_id, "it is encrypted, and not open")

    def _publish_device(self, call: PublishVolume, device: Device) -> None:
        if device.below is None:
            self._require_plain(call.volume_id)
        published = mounts.node(self._kernel, call.target_path)
        if published is None or published not in users.numbers(self._kernel, device):
            self._require_single(call, device, table.read(self._kernel))
        elif (published == device.number) == call.read_only:
            raise errors.Incompatible(
                f"{call.target_path} is published {'read-write' if call.read_only else 'read-only'}"
            )
        target.ensure_file(self._kernel, call.target_path)
        try:
            source = self._kernel.real_path(device.path)
            if call.read_only:
                # A read-only bind of a device node does not keep the device itself from being
                # written; a read-only loop device over it does.
                source = loop.attach_read_only(self._kernel, device.path)
            flags = options.Options()
            mounts.ensure_bound(self._kernel, source, call.target_path, flags, call.read_only)
        except mount_errors.MountError:
            self._drop_unused(loop.over(self._kernel, device.number))
            raise

    def unpublish(self, call: VolumeAt) -> None:
        """Unmount and remove the target path; a path that is not there is no error."""
        call = replace(call, path=self.place(call.path))
        self._ensure_unmounted(call)
        target.ensure_absent(self._kernel, call.path)

    def statistics(self, call: VolumeAt) -> Statistics:
        """How large and how full the volume is where it is staged or published."""
        device, mounted = self._at(call, table.read(self._kernel))
        seen = mounted if mounted.device == device.number else None
        if seen is not None:
            with suppress(mount_errors.TargetError):  # it does not answer, as its health says
                found = health.of(self._kernel, seen.path)
                return Statistics(found.total_bytes, found)
        return Statistics(health.device_size_bytes(self._kernel, device.path), None)

    def check(self, volume_id: str) -> None:
        """Raise NoSuchVolume, Copying, Receiving, Moved for what is no volume now.

        Also before a report says so.
        """
        self._holds.require_free(volume_id)
        if self._eraser.is_deleting(volume_id):
            raise errors.NoSuchVolume(volume_id)
        if self._copier.is_copying(volume_id):
            raise errors.Copying(volume_id, "it is not complete")

    def size_bytes(self, call: VolumeAt) -> int:
        """The device's size, if the volume is staged or published, at the path or elsewhere."""
        device, _ = self._anywhere(call, table.read(self._kernel))
        return health.device_size_bytes(self._kernel, device.path)

    def fill_device(
        self, call: VolumeAt, keys: Keys = secret.NONE, *, if_possible: bool = False
    ) -> bool:
        """Have what uses the device use all of it: ioctls only, also where it does already.

        Of an encrypted volume that grew, a command with its key; without one it raises GrowsWithKey
        or, `if_possible`, returns False.
        """
        known = table.read(self._kernel)
        device, mounted = self._anywhere(call, known)
        is_whole = True
        if device.below is not None:
            is_whole = self._opening.fill(call.volume_id, device, keys, if_possible=if_possible)
        for read_only in loop.over(self._kernel, device.number):
            loop.grow(self._kernel, read_only)
        if mounted.device == device.number:
            # The kernel grows a file system through a writable mount only; any of them will do.
            writable = [one for one in known.of_device(device.number) if not one.read_only]
            filesystem.grow(self._kernel, (writable or [mounted])[0])
        return is_whole

    def _device(self, volume_id: str) -> Device | None:
        """The device of a volume that CreateVolume made, without a command.

        None where it is not active.
        """
        if ids.is_inline(volume_id):
            raise errors.NoSuchVolume(volume_id)
        self.check(volume_id)
        return self._inventory.device(volume_id)

    def _activate(self, volume: Volume) -> Device:
        with self._volume_groups.hold(volume.group.name):
            return self._inventory.activate(volume)

    def _ensure_formatted(
        self, call: StageVolume, volume: Volume, device: Device, fs_type: str
    ) -> dict[str, str]:
        """Look, refuse the surprising, make; or look over what is there. The tag that tells it."""
        formatted = volume.own_tags.get(tag.FORMATTED)
        found = filesystem.probe(self._run, device.path, self._kernel)
        look = partial(self._require_same, volume, device, found)
        if found is not None and found.fs_type != fs_type:
            raise mount_errors.UnexpectedContents(device.path, str(found), fs_type)
        if found is None and formatted:
            raise errors.ContentsLost(call.volume_id, formatted)
        words = call.parameters.mkfs_options
        if found is None:
            call.parameters.check_for(fs_type, "volume_context")
            filesystem.check_size(fs_type, volume.capacity_bytes)
            # Blank by the probe, and never formatted by the tags: only then.
            make = partial(
                filesystem.make,
                self._run,
                device.path,
                fs_type,
                words,
                uuid=_own_uuid(device),
                oldest_kernel=self._oldest_kernel,
            )
            self._detached.do(str(volume.id), volume.group.name, "mkfs", make, look)
            return {tag.FORMATTED: fs_type}
        # A crash came between mkfs and the tag: then what is there is known by its UUID.
        is_known = bool(formatted) or volume.is_copied or found.uuid == _own_uuid(device)
        if not is_known and not filesystem.gives_uuid(fs_type, words):
            missing = lvm_tags.format_one(tag.FORMATTED, fs_type)
            raise mount_errors.MadeByOthers(device.path, str(found), found.uuid, missing)
        if not table.read(self._kernel).of_device(device.number):
            check = partial(filesystem.check, self._run, device.path, fs_type)
            self._detached.do(str(volume.id), volume.group.name, "fsck", check, look)
        return {} if formatted else {tag.FORMATTED: fs_type}

    def _require_same(
        self, volume: Volume, device: Device, found: filesystem.Signature | None
    ) -> None:
        """Raise NoSuchVolume, UnexpectedContents where a volume is not as it was a while ago."""
        self._inventory.require_same(volume, device)
        now = filesystem.probe(self._run, device.path, self._kernel)
        if now != found:
            raise mount_errors.UnexpectedContents(device.path, str(now), str(found))

    def _promise(self, volume: Volume, tags: dict[str, str]) -> None:
        if tags:
            # Where it is not written any more, the next staging finds what was made here.
            self._volume_groups.promise(volume.group.name, volume.name, tags)

    def place(self, path: str) -> str:
        """A path of a request, resolved; raises BadPath unless it is inside kubelet's directory."""
        return target.resolve(self._kernel, path, self._inside)

    def _require_single(self, call: PublishVolume, device: Device, known: table.Table) -> None:
        """Only SINGLE_NODE_MULTI_WRITER allows a second target (CSI spec, NodePublishVolume)."""
        if call.capability.mode == MULTI_WRITER:
            return
        found = set(users.targets(self._kernel, known, device, self._inside))
        if others := found - {call.staging_path, call.target_path}:
            raise errors.VolumeInUse(
                call.volume_id,
                f"it is published at {', '.join(sorted(others))}, and {call.capability.mode}"
                " allows one target",
            )

    def _anywhere(self, call: VolumeAt, known: table.Table) -> tuple[Device, table.Mount]:
        """The volume's device, and its mount at the path or else any; raises NoSuchPath.

        For growth: of a raw block volume that several pods have, kubelet tells the path of the one
        that came last, also after that pod ended (DevicePath in its actual state of the world).
        """
        try:
            return self._at(call, known)
        except (errors.NoSuchPath, errors.NotStaged):
            device = self._inventory.device(call.volume_id)
            found = [] if device is None else users.places(self._kernel, known, device)
            if device is None or not found:
                raise
            return device, found[0]

    def _at(self, call: VolumeAt, known: table.Table) -> tuple[Device, table.Mount]:
        """The volume's device and its mount at the path; raises NoSuchPath."""
        inline = ids.is_inline(call.volume_id)
        device = (self._inventory.device if inline else self._device)(call.volume_id)
        try:
            mounted = known.top(self.place(call.path))
        except mount_errors.BadPath:
            mounted = None
        if device is not None and mounted is not None:
            if mounted.device == device.number:
                return device, mounted
            if mounts.node(self._kernel, mounted.path) in users.numbers(self._kernel, device):
                return device, mounted
        if mounted is not None and mounted.is_stale_node:
            raise errors.NotStaged(
                call.volume_id,
                f"{mounted.path} shows a device that went away; look at `dmesg`, and have it"
                " unpublished first",
            )
        raise errors.NoSuchPath(call.volume_id, call.path)

    def _ensure_unmounted(self, call: VolumeAt) -> None:
        device = self._inventory.device(call.volume_id)
        if device is None:
            # Whatever is mounted there is not this volume, or a node that it had.
            mounts.ensure_unmounted(self._kernel, call.path, [])
            return
        loops = loop.over(self._kernel, device.number)
        numbers = users.numbers(self._kernel, device, loops)
        mounts.ensure_unmounted(self._kernel, call.path, numbers)
        self._drop_unused(loops)

    def _drop_unused(self, loops: Sequence[str]) -> None:
        """Detach read-only loop devices through which nothing is published any more."""
        for one in loops:
            known = table.read(self._kernel)
            if not mounts.bound(self._kernel, known, [self._kernel.device_number(one)]):
                loop.detach(self._kernel, one)


def _may_be_larger(volume: Volume | None) -> bool:
    """Whether a volume may be larger than its file system; so may one of which nothing is known."""
    # Than what was copied or sent to it, or than it was when it was staged before.
    grew = {tag.FROM, tag.WANTED, tag.REFUSED, tag.RECEIVED}
    return volume is None or bool(grew & volume.own_tags.keys())


def _own_uuid(device: Device) -> str:
    """The UUID of the file system that is made on a volume; none that was there before has it."""
    return str(uuid.uuid5(_NAMESPACE, device.logical.uuid))
