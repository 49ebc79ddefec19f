"""Inline volumes: made when a pod's volume is published, deleted when it is unpublished.

Kubelet makes up the volume's id, and calls only NodePublishVolume and NodeUnpublishVolume for it.
The logical volume's name is made of the id, so a call after a crash finds what is there and goes
on, whatever the step; no process has to remember it.

The volume lives as long as its pod. A reboot does not end a pod: kubelet publishes with the same id
again, so a start deletes nothing for not being mounted. After an error that is final, kubelet does
not unpublish: so such a call deletes what it made, and a volume that never held data. Crash point:
before that deletion. The volume is swept when its pod was removed, of which kubelet removes the
directory: where that is gone, though the directory of all pods is there, no call will follow. Each
group has a thread for the sweeps, so that one that hangs stops no other's.
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
from agent.volumes.report_age import Every, Known
from agent.work.group_worker import Looks
from lvm import layout, names, tags
from lvm.active_devices import Device
from lvm.room import Room
from mount import command, filesystem, table, target
from mount import mount_errors as mount_errors

_log = logging.getLogger(__name__)

# After a boot kubelet has published every pod's volumes again within that time.
_TURN_SECONDS = 600.0
# How long a report, or a removal, may come no further.
_PATIENCE_SECONDS = 60.0


class _Admitted:
    """What volumes take that calls may make, and that other calls' reports may lack.

    They are kept until no call is under way that may have such a report.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._calls = 0
        self._sizes_bytes: dict[str, int] = {}

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count a call as under way; its report is read within the `with`."""
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
        self, volume_id: str, size_bytes: int, there: Mapping[str, int], limit_bytes: int
    ) -> None:
        """Add a volume that is about to be made to those there; raises InlineTotal."""
        with self._guard:
            total_bytes = sum({**self._sizes_bytes, volume_id: 0, **there}.values())
            if total_bytes + size_bytes > limit_bytes:
                raise errors.InlineTotal(size_bytes, total_bytes, limit_bytes)
            self._sizes_bytes[volume_id] = size_bytes

    def forget(self, volume_id: str) -> None:
        """Remove a volume that was not made, or is deleted."""
        with self._guard:
            self._sizes_bytes.pop(volume_id, None)


@dataclass
class _Attempt:
    """Progress of a call: whether it looked for the volume, and began to make one."""

    looked: bool = False
    began: bool = False


@dataclass
class _Sweep:
    """Whether a group may have inline volumes, and those of a removed pod at the last look."""

    may_be_some: bool = True
    suspects: frozenset[str] = frozenset()


class InlineVolumes:
    """Publishes, unpublishes and sweeps inline volumes."""

    def __init__(
        self, context: Context, creator: VolumeCreator, deleter: VolumeDeleter, stager: Stager
    ) -> None:
        self._configuration = context.configuration
        self._kernel = context.kernel
        self._reports, self._activator = context.reports, context.activator
        self._creator, self._deleter = creator, deleter
        self._stager = stager
        self._locks = context.locks
        self._admitted = _Admitted()
        # By the group.
        self._sweeps: defaultdict[str, _Sweep] = defaultdict(_Sweep)
        self.looks = Looks(
            context.workers,
            "inline",
            lambda: self._configuration.now.groups,
            self.sweep,
            _TURN_SECONDS,
            "volume group %s: inline volumes that were left are not removed: %s",
        )

    def publish(self, call: PublishInline) -> None:
        """Make the volume, format it and mount it at its target, from whatever step is left.

        Five commands at most: a report, lvcreate, and those of staging. None where it is mounted.
        """
        place = target.resolve(self._kernel, call.target_path, self._configuration.now.kubelet_dir)
        one = self._creator.class_for(
            call.volume_id, call.parameters, "volume_context", is_ephemeral=True
        )
        parameters = plan.with_defaults(call.parameters, [call.capability], one)
        self._stager.check_keys(call.volume_id, parameters, call.keys)
        about = {**parameters.about, tag.EPHEMERAL: "true"}
        if tags.fits(tag.TARGET, place):
            about[tag.TARGET] = place
        wanted = CreateVolume(
            name=call.volume_id,
            size=SizeRange(call.size_bytes),
            capabilities=(call.capability,),
            parameters=replace(call.parameters, about=about),
            topology=Topology(),
            tuning=call.parameters.tuning,
            is_ephemeral=True,
        )
        device = self._activator.device(backing.of_id(call.volume_id))
        known = table.read(self._kernel)
        self._check_place(call.volume_id, device, place, known)
        attempt = _Attempt()

        def admit(here: Every, size_bytes: int) -> None:
            extent = here.group(one.group).extent_size_bytes
            allocated = layout.allocated_bytes(size_bytes, extent, one.layout)
            self._check_limits(call, here, allocated)
            attempt.began = True

        def find() -> Volume:
            attempt.looked = True
            try:
                with self._admitted.call():
                    made = self._creator.create(wanted, admit)
            finally:
                for one in list(self._sweeps.values()):
                    one.may_be_some = True
            return self._creator.complete(made, nullcontext)

        try:
            self._stager.ensure_mounted(
                StageVolume(call.volume_id, place, call.capability, parameters, call.keys),
                device,
                find,
                known,
            )
        except Exception as error:
            if attempt.looked and codes.is_final(error):
                self._give_up(call.volume_id, attempt)
                self._admitted.forget(call.volume_id)
            raise

    def ensure_absent(self, volume_id: str) -> None:
        """Erase and remove an unpublished volume; one that is not there is no error.

        Raises GroupMissing where a group is not there to prove that.
        """
        volume = self._find(volume_id)
        if volume is not None:
            self._deleter.delete(str(volume.id))
        self._admitted.forget(volume_id)

    def sweep(self, group: str) -> bool:
        """Erase and remove a group's volumes of pods that were removed.

        The pod must have been removed at the last sweep, too. No report while there are no inline
        volumes. Returns False: the next sweep is not due at once.
        """
        sweep = self._sweeps[group]
        if not sweep.may_be_some:
            return False
        # Before the report: a volume that is made meanwhile may be missing from it.
        sweep.may_be_some = False
        found, is_here = [], False
        try:
            with command.stall_limit(_PATIENCE_SECONDS):
                # Only a fresh report proves that there are none.
                known = self._reports.fresh(group)
            found, is_here = self._all(known, group), group in known.groups
        finally:
            if found or not is_here:
                sweep.may_be_some = True
        names = frozenset(one.own_tags[tag.NAME] for one in found if self._is_forgotten(one))
        suspects, sweep.suspects = names & sweep.suspects, names
        problems = []
        for name in sorted(suspects):
            try:
                self._remove(name, group)
            except Exception as error:
                problems.append(error)
        if problems:
            raise problems[0]
        return False

    def _check_limits(self, call: PublishInline, known: Every, allocated_bytes: int) -> None:
        """Raise BadField, InlineTotal for a size above the limits of the configuration.

        `allocated_bytes` is what the volume will take of its group: the total is limited by that.
        """
        asked = call.size_bytes or plan.DEFAULT_SIZE_BYTES
        limit = self._configuration.now.inline_volume_limit
        if limit and asked > limit:
            raise errors.BadField(
                f"volume_context[{SIZE}]",
                f"{asked} bytes are more than inline_volume_limit, {limit} bytes, allows",
            )
        groups = known.groups.values()
        total = self._configuration.now.inline_total_limit
        limit = total.of(sum(Room(one).extents * one.extent_size_bytes for one in groups))
        if limit:
            # Those of a group that was never read do not count: they must keep no pod waiting.
            every = (one for one in known.shown() if one.is_ephemeral)
            there = {one.own_tags[tag.NAME]: _allocated_bytes(one) for one in every}
            self._admitted.admit(call.volume_id, allocated_bytes, there, limit)

    def _give_up(self, volume_id: str, attempt: _Attempt) -> None:
        """Delete the volume of a call that failed for good, if it holds no data.

        It holds none if the call began to make it, or if it never had a file system. If the
        deletion fails too, or it may hold some, the volume is swept when the pod was removed.
        """
        try:
            volume = self._find(volume_id)
            if volume is None or volume.is_doomed:
                return
            if attempt.began or self._is_blank(volume):
                self._deleter.delete(str(volume.id))
        except Exception as error:
            # The call answers with its first error.
            _log.warning("cannot delete inline volume %s yet: %s", volume_id, error)

    def _is_blank(self, volume: Volume) -> bool:
        """Whether a volume never had a file system, by its tags and by its device.

        The tag is written after the answer, so a process that was killed may have left none. An
        encrypted volume shows its header, whatever that holds.
        """
        if tag.FORMATTED in volume.own_tags:
            return False
        with self._activator.activated(volume.group.name, volume.name) as device:
            return filesystem.probe(self._kernel, device.path) is None

    def _remove(self, volume_id: str, group: str) -> None:
        """Delete a volume whose pod was removed, unless a call for it is under way."""
        with (
            command.stall_limit(_PATIENCE_SECONDS),
            suppress(errors.OperationPending),
            self._locks.hold(ids.logical_name(volume_id)),
        ):
            known = self._reports.fresh(group)
            every = [one for one in self._all(known, group) if one.own_tags[tag.NAME] == volume_id]
            for volume in filter(self._is_forgotten, every):
                _log.warning(
                    "inline volume %s was left by a pod that is gone; removing it", volume_id
                )
                try:
                    self._deleter.delete(str(volume.id))
                    self._admitted.forget(volume_id)
                except (errors.VolumeInUse, *errors.LEFT_ALONE) as error:
                    _log.warning("%s", error)

    def _all(self, known: Known, group: str = "") -> list[Volume]:
        """The inline volumes of a group, or of all groups."""
        every = (one for one in known.volumes() if one.is_ephemeral)
        return [one for one in every if group in ("", one.group.name)]

    def _find(self, volume_id: str) -> Volume | None:
        own_name = names.logical_volume(ids.INLINE_PREFIX, volume_id)
        volume = self._reports.search(lambda one: one.name == own_name)
        if volume is None:
            # A group that does not answer, or is not here, may have it.
            known = self._reports.fresh()
            known.require_none_named(volume_id, ids.INLINE_PREFIX)
            self._reports.require_groups(known)
        return volume

    def _is_forgotten(self, volume: Volume) -> bool:
        """Whether kubelet has removed the directory of the volume's pod, and not that of all pods.

        The pod's directory is in the directory of all pods, and the target is in it.
        """
        place = volume.own_tags.get(tag.TARGET, "")
        if volume.is_doomed or not volume.is_ephemeral or not place:
            return False
        for one in self._configuration.now.kubelet_dir:
            root = self._kernel.real_path(one).rstrip("/") + "/"
            all_pods, *inside = place.removeprefix(root).split("/")
            if place.startswith(root) and len(inside) > 1 and self._is_there(root + all_pods):
                return not self._is_there(f"{root}{all_pods}/{inside[0]}")
        return False

    def _is_there(self, path: str) -> bool:
        """False only for ENOENT: any other error proves nothing."""
        try:
            self._kernel.lstat(path)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return True

    def _check_place(
        self, volume_id: str, device: Device | None, place: str, known: table.Table
    ) -> None:
        """Raise ForeignMount for a target that is taken, VolumeInUse for a second target."""
        number = None if device is None else device.number
        for mount in known.at(place):
            if mount.device != number:
                raise mount_errors.ForeignMount(place, str(mount))
        target.check_directory(self._kernel, place)
        if device is None:
            return
        found = set(users.targets(self._kernel, known, device, self._configuration.now.kubelet_dir))
        if others := found - {place}:
            elsewhere = ", ".join(sorted(others))
            raise errors.VolumeInUse(
                volume_id, f"it is published at {elsewhere}, and an inline volume has one target"
            )


def _allocated_bytes(one: Volume) -> int:
    """What an inline volume takes of its group: a mirrored one several times its size."""
    try:
        return layout.allocated_bytes(one.size_bytes, one.group.extent_size_bytes, one.layout)
    except errors.LayoutUnknown:
        # One whose tag is lost keeps no other pod waiting: as if each image had all of it.
        return one.size_bytes * max(1, len(one.group.volume(one.name).images))
