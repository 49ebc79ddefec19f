"""Inline volumes: created when a pod's volume is published, deleted when it is unpublished.

Kubelet invents the id of an inline volume, and calls only NodePublishVolume and NodeUnpublishVolume
for it. The logical volume's name is derived from the id, so a call after a crash finds the volume
of an earlier call and continues from whatever step was reached; no process has to remember the
volume.

The volume lives as long as its pod. A reboot does not end a pod: kubelet publishes the volume with
the same id again. So a start of Carver does not delete a volume because it is not mounted.

After an error that is final, kubelet does not unpublish. So a call that fails with such an error
deletes the volume that it created, and deletes a volume that never held data. Crash point: before
that deletion the volume is left without a caller.

Volumes without a caller are swept: deleted once their pod is gone. Kubelet removes a pod's
directory with the pod. If the pod's directory is missing, and the directory of all pods exists, no
call for the volume will follow. Each volume group is swept by its own background thread, so that a
group that hangs delays no other group.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace

from agent.core import codes, errors, ids, tag
from agent.operations import plan
from agent.operations.create import VolumeCreator
from agent.operations.delete import VolumeDeleter
from agent.operations.stage import Stager
from agent.requests.parameters import SIZE
from agent.requests.requests import CreateVolume, PublishInline, SizeRange, StageVolume, Topology
from agent.volumes import backing, users
from agent.volumes.context import Context
from agent.volumes.records import Volume
from agent.volumes.report_age import EveryGroup, Known
from agent.work.group_worker import PeriodicJobs
from lvm import layout, names, tags
from lvm.active_devices import Device
from lvm.room import Room
from mount import command, filesystem, table, target
from mount import mount_errors as mount_errors

_log = logging.getLogger(__name__)

# Interval, in seconds, at which each volume group is searched for inline volumes whose pods are
# gone; also the delay of the first search after the service starts. After a boot, kubelet publishes
# all pods' volumes again within this time.
_TURN_SECONDS = 600.0
# Time limit, in seconds, for which a report or a deletion may make no progress during a search for
# inline volumes whose pods are gone.
_PATIENCE_SECONDS = 60.0


class PendingSizes:
    """Sizes of the inline volumes that calls are creating, which reports of other calls may lack.

    A size is kept until each call has ended that may have read a report without the volume.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._calls = 0
        self._sizes_bytes: dict[str, int] = {}

    @contextmanager
    def count_call(self) -> Iterator[None]:
        """Count a NodePublishVolume call as under way within the `with`.

        The call reads its report within the `with`. When no call is under way any more, all sizes
        are forgotten.
        """
        with self._guard:
            self._calls += 1
        try:
            yield
        finally:
            with self._guard:
                self._calls -= 1
                if not self._calls:
                    self._sizes_bytes.clear()

    def admit(
        self, volume_id: str, size_bytes: int, reported_bytes: Mapping[str, int], limit_bytes: int
    ) -> None:
        """Add a new inline volume's size to the total. Raises InlineTotal if the limit is exceeded.

        `reported_bytes` has the allocated bytes of the volumes in the caller's report, by their
        ids. `limit_bytes` is the limit.
        """
        with self._guard:
            total_bytes = sum({**self._sizes_bytes, volume_id: 0, **reported_bytes}.values())
            if total_bytes + size_bytes > limit_bytes:
                raise errors.InlineTotal(size_bytes, total_bytes, limit_bytes)
            self._sizes_bytes[volume_id] = size_bytes

    def forget(self, volume_id: str) -> None:
        """Remove the size of a volume that was not created, or that is deleted, from the total."""
        with self._guard:
            self._sizes_bytes.pop(volume_id, None)


@dataclass
class _Attempt:
    """Progress of one NodePublishVolume call for an inline volume.

    `has_searched`: the call has looked for the volume. `has_begun`: the call has begun to create
    the volume.
    """

    has_searched: bool = False
    has_begun: bool = False


@dataclass
class _Sweep:
    """Results of a volume group's last sweep: a search for inline volumes whose pods are gone.

    `may_have_volumes` is False if the group has no inline volumes. `suspects` are the names of its
    volumes whose pods were gone.
    """

    may_have_volumes: bool = True
    suspects: frozenset[str] = frozenset()


class InlineVolumes:
    """Publishes and unpublishes inline volumes, and deletes those whose pods are gone."""

    def __init__(
        self, context: Context, creator: VolumeCreator, deleter: VolumeDeleter, stager: Stager
    ) -> None:
        self._configuration = context.configuration
        self._kernel = context.kernel
        self._reports, self._activator = context.reports, context.activator
        self._creator, self._deleter = creator, deleter
        self._stager = stager
        self._locks = context.locks
        self._pending_sizes = PendingSizes()
        # Results of the last search for inline volumes whose pods are gone, by the volume group's
        # name.
        self._sweeps: defaultdict[str, _Sweep] = defaultdict(_Sweep)
        self.scans = PeriodicJobs(
            context.workers,
            "inline",
            lambda: self._configuration.now.groups,
            self.sweep,
            _TURN_SECONDS,
            "volume group %s: inline volumes that were left are not removed: %s",
        )

    def publish(self, request: PublishInline) -> None:
        """Create an inline volume, format it and mount it at its target.

        The call continues from whatever step an earlier call reached. Runs five commands at most: a
        report, lvcreate, and the commands of staging. Runs none if the volume is mounted. After a
        final error the volume is deleted if it holds no data.
        """
        config = self._configuration.now
        target_path = target.resolve(self._kernel, request.target_path, config.kubelet_dir)
        own_name = names.logical_volume(ids.INLINE_PREFIX, request.volume_id)
        device_class = self._creator.class_for(
            config, own_name, request.parameters, "volume_context"
        )
        parameters = plan.with_defaults(request.parameters, [request.capability], device_class)
        self._stager.check_keys(request.volume_id, parameters, request.keys)
        object_tags = {**parameters.object_tags, tag.EPHEMERAL: "true"}
        if tags.fits(tag.TARGET, target_path):
            object_tags[tag.TARGET] = target_path
        create_request = CreateVolume(
            name=request.volume_id,
            size=SizeRange(request.size_bytes),
            capabilities=(request.capability,),
            parameters=replace(request.parameters, object_tags=object_tags),
            topology=Topology(),
            tuning=request.parameters.tuning,
            is_ephemeral=True,
        )
        device = self._activator.device(backing.of_id(request.volume_id))
        mounts = table.read(self._kernel)
        self._check_target(request.volume_id, device, target_path, mounts)
        attempt = _Attempt()

        def admit(all_groups: EveryGroup, size_bytes: int) -> None:
            extent = all_groups.group(device_class.group).extent_size_bytes
            allocated = layout.allocated_bytes(size_bytes, extent, device_class.layout)
            self._check_limits(request, all_groups, allocated)
            attempt.has_begun = True

        def find() -> Volume:
            attempt.has_searched = True
            try:
                with self._pending_sizes.count_call():
                    created = self._creator.create(create_request, admit)
            finally:
                for sweep in list(self._sweeps.values()):
                    sweep.may_have_volumes = True
            return self._creator.complete(created, nullcontext)

        try:
            self._stager.ensure_mounted(
                StageVolume(
                    request.volume_id, target_path, request.capability, parameters, request.keys
                ),
                device,
                find,
                mounts,
            )
        except Exception as error:
            if attempt.has_searched and codes.is_final(error):
                self._give_up(request.volume_id, attempt)
                self._pending_sizes.forget(request.volume_id)
            raise

    def ensure_absent(self, volume_id: str) -> None:
        """Erase and remove an unpublished inline volume; a missing volume is no error.

        Raises GroupMissing if a volume group is missing, because the volume may be in it.
        """
        volume = self._find(volume_id)
        if volume is not None:
            self._deleter.delete(str(volume.id))
        self._pending_sizes.forget(volume_id)

    def sweep(self, group: str) -> bool:
        """Erase and remove the inline volumes of a volume group whose pods are gone.

        A volume is removed only if its pod was gone at the last sweep, too. No report is read while
        the group has no inline volumes. Returns False, so that the next sweep runs after the usual
        interval.
        """
        sweep = self._sweeps[group]
        if not sweep.may_have_volumes:
            return False
        # Reset the flag before the report is read: a volume that a call creates meanwhile may be
        # missing from the report, and that call sets the flag again.
        sweep.may_have_volumes = False
        inline_volumes, is_here = [], False
        try:
            with command.stall_limit(_PATIENCE_SECONDS):
                # Read a fresh report, because only a fresh report proves that the volume group has
                # no inline volumes.
                state = self._reports.fresh(group)
            inline_volumes, is_here = self._all(state, group), group in state.groups
        finally:
            if inline_volumes or not is_here:
                sweep.may_have_volumes = True
        forgotten = frozenset(
            volume.own_tags[tag.NAME] for volume in inline_volumes if self._is_forgotten(volume)
        )
        suspects, sweep.suspects = forgotten & sweep.suspects, forgotten
        problems = []
        for name in sorted(suspects):
            try:
                self._remove(name, group)
            except Exception as error:
                problems.append(error)
        if problems:
            raise problems[0]
        return False

    def _check_limits(
        self, request: PublishInline, all_groups: EveryGroup, allocated_bytes: int
    ) -> None:
        """Raise BadField or InlineTotal if an inline volume exceeds the configured limits.

        BadField is for `inline_volume_limit`, which limits the requested size. InlineTotal is for
        `inline_total_limit`, which limits what all inline volumes allocate of their groups;
        `allocated_bytes` is what the new volume will allocate.
        """
        requested = request.size_bytes or plan.DEFAULT_SIZE_BYTES
        limit = self._configuration.now.inline_volume_limit
        if limit and requested > limit:
            raise errors.BadField(
                f"volume_context[{SIZE}]",
                f"{requested} bytes are more than inline_volume_limit, {limit} bytes, allows",
            )
        groups = all_groups.groups.values()
        total = self._configuration.now.inline_total_limit
        limit = total.of(sum(Room(group).extents * group.extent_size_bytes for group in groups))
        if limit:
            # Count only volumes of groups that were read: a volume group that never answered must
            # not delay a pod.
            inline_volumes = (volume for volume in all_groups.shown() if volume.is_ephemeral)
            present = {
                volume.own_tags[tag.NAME]: _allocated_bytes(volume) for volume in inline_volumes
            }
            self._pending_sizes.admit(request.volume_id, allocated_bytes, present, limit)

    def _give_up(self, volume_id: str, attempt: _Attempt) -> None:
        """Delete the inline volume of a call that failed for good, if the volume holds no data.

        The volume holds no data if the call began to create it, or if it never had a file system. A
        volume that may hold data, or that cannot be deleted now, is swept once its pod is gone.
        """
        try:
            volume = self._find(volume_id)
            if volume is None or volume.is_doomed:
                return
            if attempt.has_begun or self._is_blank(volume):
                self._deleter.delete(str(volume.id))
        except Exception as error:
            # Only log the error of the deletion: the call returns the error that it failed with
            # first.
            _log.warning("cannot delete inline volume %s yet: %s", volume_id, error)

    def _is_blank(self, volume: Volume) -> bool:
        """Whether a volume never had a file system, by its tags and by its device.

        The tag `formatted` is written after the response, so the tag may be missing if the process
        was killed. An encrypted volume is never blank, because its device has a LUKS2 header.
        """
        if tag.FORMATTED in volume.own_tags:
            return False
        with self._activator.activated(volume.group.name, volume.name) as device:
            return filesystem.probe(self._kernel, device.path) is None

    def _remove(self, volume_id: str, group: str) -> None:
        """Delete an inline volume whose pod is gone, unless a call for the volume is under way."""
        with (
            command.stall_limit(_PATIENCE_SECONDS),
            suppress(errors.OperationPending),
            self._locks.hold(ids.logical_name(volume_id)),
        ):
            state = self._reports.fresh(group)
            named_volumes = [
                volume
                for volume in self._all(state, group)
                if volume.own_tags[tag.NAME] == volume_id
            ]
            for volume in filter(self._is_forgotten, named_volumes):
                _log.warning(
                    "inline volume %s was left by a pod that is gone; removing it", volume_id
                )
                try:
                    self._deleter.delete(str(volume.id))
                    self._pending_sizes.forget(volume_id)
                except (errors.VolumeInUse, *errors.MUST_NOT_USE) as error:
                    _log.warning("%s", error)

    def _all(self, state: Known, group: str = "") -> list[Volume]:
        """Return the inline volumes in a report, of one volume group or of all groups.

        An empty `group` means all groups.
        """
        inline_volumes = (volume for volume in state.volumes() if volume.is_ephemeral)
        return [volume for volume in inline_volumes if group in ("", volume.group.name)]

    def _find(self, volume_id: str) -> Volume | None:
        own_name = names.logical_volume(ids.INLINE_PREFIX, volume_id)
        volume = self._reports.search(lambda volume: volume.name == own_name)
        if volume is None:
            # Raise an error if the volume may exist all the same: in a volume group that does not
            # answer or is not on this node, or with damaged tags or tags of a newer version.
            state = self._reports.fresh()
            state.require_none_named(own_name)
            self._reports.require_groups(state)
        return volume

    def _is_forgotten(self, volume: Volume) -> bool:
        """Whether kubelet has removed the pod of an inline volume.

        The volume's target is in the directory of its pod, which is in the directory of all pods.
        The pod is gone if its directory is missing and the directory of all pods exists.
        """
        target_path = volume.own_tags.get(tag.TARGET, "")
        if volume.is_doomed or not volume.is_ephemeral or not target_path:
            return False
        for kubelet_dir in self._configuration.now.kubelet_dir:
            root = self._kernel.real_path(kubelet_dir).rstrip("/") + "/"
            all_pods, *below = target_path.removeprefix(root).split("/")
            if target_path.startswith(root) and len(below) > 1 and self._is_there(root + all_pods):
                return not self._is_there(f"{root}{all_pods}/{below[0]}")
        return False

    def _is_there(self, path: str) -> bool:
        """Whether a path exists; False only after ENOENT, as any other error proves nothing."""
        try:
            self._kernel.lstat(path)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return True

    def _check_target(
        self, volume_id: str, device: Device | None, target_path: str, mount_table: table.Table
    ) -> None:
        """Raise an error if a target is taken, or if the volume has another target.

        The errors are ForeignMount if another device is mounted at the target, VolumeInUse for a
        second target, and those of `target.check_directory`.
        """
        number = None if device is None else device.number
        for mount in mount_table.at(target_path):
            if mount.device != number:
                raise mount_errors.ForeignMount(target_path, str(mount))
        target.check_directory(self._kernel, target_path)
        if device is None:
            return
        targets = set(
            users.target_paths(
                self._kernel, mount_table, device, self._configuration.now.kubelet_dir
            )
        )
        if other_targets := targets - {target_path}:
            elsewhere = ", ".join(sorted(other_targets))
            raise errors.VolumeInUse(
                volume_id, f"it is published at {elsewhere}, and an inline volume has one target"
            )


def _allocated_bytes(volume: Volume) -> int:
    """Return the bytes that an inline volume allocates in its volume group.

    A mirrored volume allocates several times its size.
    """
    try:
        return layout.allocated_bytes(
            volume.size_bytes, volume.group.extent_size_bytes, volume.layout
        )
    except errors.LayoutUnknown:
        # Estimate the size of a volume whose layout tag is lost, so that it delays no other pod:
        # each image counts as a whole copy.
        return volume.size_bytes * max(1, len(volume.group.volume(volume.name).images))
