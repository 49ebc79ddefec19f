"""NodePublishVolume: bind a volume to a pod's path. NodeUnpublishVolume: unmount the path.

NodeUnpublishVolume starts no process. NodePublishVolume starts processes only in these cases:

- It mounts a file system again that had errors.
- It stages a volume that is not staged any more.
- It changes the key of an encrypted volume.
- It reads a report, because the cached state does not have the raw block volume.

NodePublishVolume stages a volume if the volume was unmounted, deactivated or closed by hand, or if
its mount was in a mount namespace that ended. After its own start, kubelet stages each volume anew
(MarkDeviceAsUncertain in pkg/kubelet/volumemanager/reconciler/reconstruct.go). But a running
kubelet repeats a failed NodePublishVolume for ever, without staging (GetDeviceMountState in
pkg/volume/util/operationexecutor/operation_generator.go).
"""

import logging
from dataclasses import replace

from agent.core import errors, ids
from agent.operations.encrypt import EncryptedDevices
from agent.operations.node_volumes import NodeVolumes
from agent.operations.stage import Stager
from agent.requests.requests import PublishVolume, StageVolume, VolumePath
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

    def publish(self, request: PublishVolume) -> None:
        """Bind the staged file system of a volume, or its device, to the target path.

        A volume that is not staged any more is staged first. If the call has a new key for an
        encrypted volume, the new key replaces the previous one.
        """
        request = replace(
            request,
            staging_path=self._volumes.resolve(request.staging_path),
            target_path=self._volumes.resolve(request.target_path),
        )
        device = self._volumes.device(request.volume_id)
        if request.capability.is_block:
            self._publish_device(request, device)
        else:
            self._publish_directory(request, device)
        self._encrypted.follow_open(request.volume_id, request.keys)

    def _staged_again(self, request: PublishVolume) -> Device:
        """Stage a volume that is not staged any more, and return its device.

        Raises the errors of staging, and NotStaged if the volume cannot be staged by this call.
        """
        try:
            self._stager.stage(_as_stage(request))
        except errors.KeyMissing:
            why = "it is encrypted, and the call to publish it has no key to open it with"
            raise errors.NotStaged(request.volume_id, why, errors.STAGE_WITH_KEY) from None
        device = self._volumes.device(request.volume_id)
        if device is None:
            raise errors.NotStaged(request.volume_id, "it was deactivated meanwhile", "call again")
        _log.warning(
            "volume %s was not staged at %s any more", request.volume_id, request.staging_path
        )
        return device

    def _publish_directory(self, request: PublishVolume, device: Device | None) -> None:
        mount_table = table.read(self._kernel)
        if device is not None:
            mount_table = self._stager.without_errors(_as_stage(request), device, mount_table)
        if (
            device is None
            or (staged := mount_table.top_of(request.staging_path, device.number)) is None
        ):
            # Crash point: the volume is staged and not published; the next call publishes the
            # volume.
            device = self._staged_again(request)
            mount_table = table.read(self._kernel)
            staged = mount_table.top_of(request.staging_path, device.number)
            if staged is None:
                raise errors.NotStaged(
                    request.volume_id, "it was unmounted meanwhile", "call again"
                )
        else:
            # Crash point: an earlier NodePublishVolume call staged the volume, and died before it
            # wrote the tag `formatted`; write the tag now.
            self._stager.record_formatted(self._reports.cached(request.volume_id), staged.fs_type)
        flags = options.parse(request.capability.mount_flags)
        requested = {*flags.attributes, *request.parameters.mount_options}
        if staged.read_only and not request.read_only and "ro" not in requested:
            raise errors.NotStaged(
                request.volume_id, f"{request.staging_path} is read-only: {staged}", errors.UNSTAGE
            )
        if mount_table.top_of(request.target_path, device.number) is None:
            self._require_single(request, device, mount_table)
        # Crash point: an empty directory, or a bind mount whose flags are not set yet, is left; the
        # next call completes the bind mount.
        target.ensure_directory(self._kernel, request.target_path)
        mounts.ensure_bound(
            self._kernel,
            request.staging_path,
            request.target_path,
            flags,
            request.read_only,
            mount_table,
        )

    def _publish_device(self, request: PublishVolume, device: Device | None) -> None:
        if device is None or (device.below is None and self._is_encrypted(request.volume_id)):
            device = self._staged_again(request)
        mount_table = table.read(self._kernel)
        top = mount_table.top(request.target_path)
        if top is not None and top.is_stale_node:
            # Unmount a stale device node: the node belongs to the device that the volume had before
            # the volume was deactivated.
            mounts.ensure_unmounted(self._kernel, request.target_path, [])
            mount_table = table.read(self._kernel)
        published = mounts.node(self._kernel, request.target_path)
        if published is None or published not in users.device_numbers(self._kernel, device):
            self._require_single(request, device, mount_table)
        elif (published == device.number) == request.read_only:
            raise errors.Incompatible(
                f"{request.target_path} is published"
                f" {'read-write' if request.read_only else 'read-only'}"
            )
        target.ensure_file(self._kernel, request.target_path)
        try:
            source = self._kernel.real_path(device.path)
            if request.read_only:
                # Bind a read-only loop device over the volume's device: a read-only bind mount of a
                # device node does not prevent writes to the device. Crash point: a loop device that
                # is bound nowhere is left; the next NodePublishVolume call uses the loop device, or
                # the next NodeUnpublishVolume call detaches it.
                source = loop.attach_read_only(self._kernel, device.path)
            flags = options.Options()
            mounts.ensure_bound(self._kernel, source, request.target_path, flags, request.read_only)
            # Crash point: the device is bound and its I/O limits are not set; the next start of
            # Carver sets the limits.
            if (volume := self._reports.cached(request.volume_id)) is not None:
                self._limiter.apply(volume)
        except mount_errors.MountError:
            self._volumes.detach_unused(loop.loop_devices_over(self._kernel, device.number))
            raise

    def _is_encrypted(self, volume_id: str) -> bool:
        volume = self._reports.cached(volume_id)
        if volume is None or not volume.is_listed:
            volume = self._mender.mended_volume(volume_id, Call.USE)
        return volume.is_encrypted

    def _require_single(
        self, request: PublishVolume, device: Device, mount_table: table.Table
    ) -> None:
        """Raise VolumeInUse for a second target, unless the access mode allows several targets."""
        if request.capability.is_shared:
            return
        targets = set(
            users.target_paths(self._kernel, mount_table, device, self._volumes.kubelet_directories)
        )
        if other_targets := targets - {request.staging_path, request.target_path}:
            raise errors.VolumeInUse(
                request.volume_id,
                f"it is published at {', '.join(sorted(other_targets))}, and"
                f" {request.capability.mode} allows one target",
            )

    def unpublish(self, request: VolumePath) -> None:
        """Unmount and remove the target path of a volume; a missing path is no error."""
        request = replace(request, path=self._volumes.resolve(request.path))
        with self._limiter.remove_after(
            backing.of_id(request.volume_id), is_last=ids.is_inline(request.volume_id)
        ):
            self._volumes.ensure_unmounted(request)
        # Crash point: the target is unmounted and its path is left; kubelet repeats the call.
        target.ensure_absent(self._kernel, request.path)


def _as_stage(request: PublishVolume) -> StageVolume:
    """Return the NodeStageVolume call that stages the volume of a NodePublishVolume call."""
    return StageVolume(
        request.volume_id,
        request.staging_path,
        request.capability,
        request.parameters,
        request.keys,
    )
