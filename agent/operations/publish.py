"""NodePublishVolume: the staged file system, or the device, bound to a pod's path; and the reverse.

Neither starts a process, except where a file system that had errors is mounted again, and where a
volume is not staged any more. Kubelet stages each volume anew after its own start
(MarkDeviceAsUncertain in pkg/kubelet/volumemanager/reconciler/reconstruct.go). While it runs it
repeats a failed publish for ever without staging (GetDeviceMountState in
pkg/volume/util/operationexecutor/operation_generator.go). So a publish stages what was unmounted,
deactivated or closed by hand, or with a mount namespace that ended.
"""

import logging
from dataclasses import replace

from agent.core import errors, ids
from agent.operations.encrypt import EncryptedDevices
from agent.operations.node_volumes import NodeVolumes
from agent.operations.stage import Stager
from agent.requests.requests import PublishVolume, StageVolume, VolumeAt
from agent.volumes import backing, users
from agent.volumes.context import Context
from agent.volumes.volume_states import Call
from lvm.active_devices import Device
from mount import loop, mounts, options, table, target
from mount import mount_errors as mount_errors

_log = logging.getLogger(__name__)


class Publisher:
    """Publishes and unpublishes volumes."""

    def __init__(
        self,
        context: Context,
        node_volumes: NodeVolumes,
        encrypted: EncryptedDevices,
        stager: Stager,
    ) -> None:
        self._kernel = context.kernel
        self._reports, self._mender = context.reports, context.mender
        self._limiter = context.limiter
        self._volumes = node_volumes
        self._encrypted = encrypted
        self._stager = stager

    def publish(self, call: PublishVolume) -> None:
        """Bind the staged file system, or the device itself, to the target path."""
        call = replace(
            call,
            staging_path=self._volumes.place(call.staging_path),
            target_path=self._volumes.place(call.target_path),
        )
        device = self._volumes.device(call.volume_id)
        if call.capability.is_block:
            self._publish_device(call, device)
        else:
            self._publish_directory(call, device)
        self._encrypted.follow_open(call.volume_id, call.keys)

    def _staged_again(self, call: PublishVolume) -> Device:
        """Stage a volume that is not staged any more; its device. Raises what staging raises."""
        try:
            self._stager.stage(_as_stage(call))
        except errors.KeyMissing:
            why = "it is encrypted, and the call to publish it has no key to open it with"
            raise errors.NotStaged(call.volume_id, why, errors.STAGE_WITH_KEY) from None
        device = self._volumes.device(call.volume_id)
        if device is None:
            raise errors.NotStaged(call.volume_id, "it was deactivated meanwhile", "call again")
        _log.warning("volume %s was not staged at %s any more", call.volume_id, call.staging_path)
        return device

    def _publish_directory(self, call: PublishVolume, device: Device | None) -> None:
        known = table.read(self._kernel)
        if device is not None:
            known = self._stager.without_errors(_as_stage(call), device, known)
        if device is None or (staged := known.top_of(call.staging_path, device.number)) is None:
            # Crash point: staged, and not published; the next call goes on.
            device = self._staged_again(call)
            known = table.read(self._kernel)
            staged = known.top_of(call.staging_path, device.number)
            if staged is None:
                raise errors.NotStaged(call.volume_id, "it was unmounted meanwhile", "call again")
        else:
            # Crash point: an earlier publication staged it, and ended before it wrote the tag.
            self._stager.record_formatted(self._reports.cached(call.volume_id), staged.fs_type)
        flags = options.parse(call.capability.mount_flags)
        asked = {*flags.attributes, *call.parameters.mount_options}
        if staged.read_only and not call.read_only and "ro" not in asked:
            raise errors.NotStaged(
                call.volume_id, f"{call.staging_path} is read-only: {staged}", errors.UNSTAGE
            )
        if known.top_of(call.target_path, device.number) is None:
            self._require_single(call, device, known)
        # Crash point: an empty directory, or a bind whose flags are not set yet; the next call
        # completes it.
        target.ensure_directory(self._kernel, call.target_path)
        mounts.ensure_bound(
            self._kernel, call.staging_path, call.target_path, flags, call.read_only, known
        )

    def _publish_device(self, call: PublishVolume, device: Device | None) -> None:
        if device is None or (device.below is None and self._is_encrypted(call.volume_id)):
            device = self._staged_again(call)
        known = table.read(self._kernel)
        top = known.top(call.target_path)
        if top is not None and top.is_stale_node:
            # Of the device that the volume had before it was deactivated.
            mounts.ensure_unmounted(self._kernel, call.target_path, [])
            known = table.read(self._kernel)
        published = mounts.node(self._kernel, call.target_path)
        if published is None or published not in users.numbers(self._kernel, device):
            self._require_single(call, device, known)
        elif (published == device.number) == call.read_only:
            raise errors.Incompatible(
                f"{call.target_path} is published {'read-write' if call.read_only else 'read-only'}"
            )
        target.ensure_file(self._kernel, call.target_path)
        try:
            source = self._kernel.real_path(device.path)
            if call.read_only:
                # A read-only bind of a device node does not prevent writes to the device; a
                # read-only loop device over it does. Crash point: a loop device that is bound
                # nowhere; the next publish uses it, the next unpublish detaches it.
                source = loop.attach_read_only(self._kernel, device.path)
            flags = options.Options()
            mounts.ensure_bound(self._kernel, source, call.target_path, flags, call.read_only)
            # Crash point: bound and not limited; the next start limits it.
            if (seen := self._reports.cached(call.volume_id)) is not None:
                self._limiter.apply(seen)
        except mount_errors.MountError:
            self._volumes.detach_unused(loop.over(self._kernel, device.number))
            raise

    def _is_encrypted(self, volume_id: str) -> bool:
        volume = self._reports.cached(volume_id)
        if volume is None or not volume.is_listed:
            volume = self._mender.mended_volume(volume_id, Call.USE)
        return volume.is_encrypted

    def _require_single(self, call: PublishVolume, device: Device, known: table.Table) -> None:
        """Raise VolumeInUse for a second target, unless the access mode allows several."""
        if call.capability.is_shared:
            return
        found = set(users.targets(self._kernel, known, device, self._volumes.inside))
        if others := found - {call.staging_path, call.target_path}:
            raise errors.VolumeInUse(
                call.volume_id,
                f"it is published at {', '.join(sorted(others))}, and {call.capability.mode}"
                " allows one target",
            )

    def unpublish(self, call: VolumeAt) -> None:
        """Unmount and remove the target path; a path that is not there is no error."""
        call = replace(call, path=self._volumes.place(call.path))
        with self._limiter.leaving(
            backing.of_id(call.volume_id), is_last=ids.is_inline(call.volume_id)
        ):
            self._volumes.ensure_unmounted(call)
        # Crash point: unmounted, and the path is left; kubelet repeats the call.
        target.ensure_absent(self._kernel, call.path)


def _as_stage(call: PublishVolume) -> StageVolume:
    """The call that staged what is to be published."""
    return StageVolume(
        call.volume_id, call.staging_path, call.capability, call.parameters, call.keys
    )
