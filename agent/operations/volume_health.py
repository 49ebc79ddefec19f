"""Health of volumes for CSI's health calls, by the cached state of volume groups, with its age.

A call waits for no disk, and starts no process, if the last report or the kernel knows the volume.
Only the absence of a volume has to be proved, by a fresh report of its group.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter, itemgetter

from agent.core import errors, ids
from agent.core.ids import VolumeId
from agent.groups.volume_group import VolumeGroup, begin_states
from agent.operations import diagnosis
from agent.operations.diagnosis import Condition, Diagnosis, Reason
from agent.requests import requests
from agent.requests.requests import GetVolumeHealth, ListPage, Page
from agent.volumes import backing, records
from agent.volumes.context import Context
from agent.volumes.records import Volume
from agent.volumes.report_age import CachedReport
from agent.volumes.volume_states import Call
from agent.work import locks
from lvm import names
from lvm.report import Group
from mount import command, table, target
from mount import mount_errors as mount_errors

# Time limit, in seconds, of a fresh report that proves whether an unknown volume exists.
_PROOF_SECONDS = 5.0
# Errors that say that a volume group could not be read.
_NO_ANSWER = (
    *(errors.GroupBusy, errors.GroupSilent, errors.GroupAwaited, errors.GroupRefused),
    mount_errors.CommandError,
)


@dataclass(frozen=True)
class VolumeHealth:
    """Health of a volume: its id, and its health conditions; a healthy volume has none."""

    volume_id: str
    conditions: tuple[Condition, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Maximum number of bytes that the volume's health takes in a gRPC message."""
        return 16 + len(self.volume_id) + sum(condition.size_bytes for condition in self.conditions)


class VolumesHealth:
    """Answers ControllerGetVolumeHealth, ControllerListVolumeHealth and NodeGetVolumeHealth.

    For a volume that is being deleted, is incomplete, or was moved to another node, these calls
    have the same errors as a call that uses the volume (Call.USE in
    agent/volumes/volume_states.py).
    """

    def __init__(self, context: Context, diagnosis: Diagnosis) -> None:
        self._kernel = context.kernel
        self._reports, self._activator = context.reports, context.activator
        self._volume_groups = context.volume_groups
        self._diagnosis, self._conflicts = diagnosis, context.conflicts
        # Configuration, which names the directories in which kubelet may have volumes.
        self._configuration = context.configuration

    def get(self, volume_id: str) -> VolumeHealth:
        """Return the health of a volume that CreateVolume made.

        Raises NoSuchVolume if the volume's absence is proved, OtherGroup if its group was never on
        this node.
        """
        if (parsed := VolumeId.parse(volume_id)) is None:
            raise errors.NoSuchVolume(volume_id)
        return self._health_of(volume_id, parsed, by_node=False)

    def on_node(self, request: GetVolumeHealth) -> VolumeHealth:
        """Return the health of a volume on this node, staged or not, inline or not.

        A missing volume group is reported as a health condition, and so is a device that went away
        at a path of the call. Raises NoSuchVolume, or BadPath for a path outside kubelet's
        directories.
        """
        inside = self._configuration.now.kubelet_dir
        paths = [target.resolve(self._kernel, path, inside) for path in request.paths]
        if (parsed := VolumeId.parse(request.volume_id)) is None:
            health = self._inline(request.volume_id)
        else:
            health = self._health_of(request.volume_id, parsed, by_node=True)
        mounts = table.read(self._kernel)
        gone_devices = [
            Condition(
                Reason.DEVICE_GONE,
                f"{path} shows a device that went away; look at `dmesg`, stop the workload, and"
                " have the volume unpublished and published again",
            )
            for path in paths
            if any(mounted.is_stale_node for mounted in mounts.at(path))
        ]
        return VolumeHealth(
            request.volume_id, diagnosis.distinct([*health.conditions, *gone_devices])
        )

    def list(self, page: Page) -> ListPage[VolumeHealth]:
        """Return one page of the unhealthy volumes of Carver's volume groups.

        Volumes of volume groups that are missing or do not answer are included. The method examines
        no more volumes than the page needs. The wait for groups that do not answer is that of
        `begin_states`, for all of them together. Of a volume group that has never answered, the
        active volumes are listed once the group has been silent for long. If no group has ever
        answered, raises the error of one of them.
        """
        self._reports.keep_fresh()
        silent = [group for group in self._volume_groups if group.silent_seconds]
        unread = [group for group in self._volume_groups if group.status == "unknown"]
        if unread:
            locks.enter(*(group.name for group in unread))
        begin_states({*silent, *unread})()
        unknown = [group for group in unread if group.status == "unknown"]
        if unknown and len(unknown) == len(self._volume_groups.names):
            raise unknown[0].silence_error
        entries: list[tuple[str, VolumeGroup, Volume | None]] = [
            (str(volume.id), volume_group, volume)
            for volume_group in self._volume_groups
            for volume in self._volumes(volume_group)
        ]
        entries += (
            (str(volume_id), volume_group, None)
            for volume_group in unknown
            for volume_id in self._activator.active_ids(ids.VOLUME_PREFIX, volume_group.name)
        )
        page_entries = sorted(
            (entry for entry in entries if entry[0] >= page.starting_token), key=itemgetter(0)
        )
        return requests.first_page(self._unhealthy(page_entries), page, attrgetter("size_bytes"))

    def _unhealthy(
        self, reported_volumes: Iterable[tuple[str, VolumeGroup, Volume | None]]
    ) -> Iterator[tuple[str, VolumeHealth]]:
        mounts, deadline = self._diagnosis.mounts(), time.monotonic() + diagnosis.PATIENCE_SECONDS
        for volume_id, volume_group, volume in reported_volumes:
            if volume is None:
                conditions = [*diagnosis.silent_group_conditions(volume_group)]
            else:
                group_conditions = _away(volume_group)
                conditions = [
                    *group_conditions,
                    *self._conditions(volume_group, volume, mounts, deadline),
                ]
            if conditions:
                yield volume_id, VolumeHealth(volume_id, diagnosis.distinct(conditions))

    def _volumes(self, volume_group: VolumeGroup) -> Iterable[Volume]:
        """Return the volumes of a volume group's last report that may be used.

        Volumes that were deleted, held (agent/volumes/holds.py) or moved since the report are left
        out.
        """
        group = volume_group.cached or volume_group.last_seen
        for volume in CachedReport({} if group is None else {group.name: group}).volumes():
            if volume.is_listed:
                # Skip a volume that may not be used, whatever the reason, and list the other
                # volumes.
                with suppress(errors.AgentError):
                    self._conflicts.check(Call.USE, str(volume.id))
                    yield volume

    def _health_of(self, volume_id: str, parsed_id: VolumeId, *, by_node: bool) -> VolumeHealth:
        self._conflicts.check(Call.USE, volume_id)
        self._reports.keep_fresh()
        groups, name = self._volume_groups, parsed_id.group
        if (volume_group := groups.known(name) or groups.of(name)) is None:
            raise errors.OtherGroup(volume_id, f"group {name} is not on this node")
        self._require_seen(volume_group)
        if volume_group.cached is None or not parsed_id.is_of(volume_group.cached.uuid):
            return self._of_missing_group(volume_id, parsed_id, volume_group, by_node=by_node)
        try:
            volume = self._reported(volume_group.cached, volume_id)
        except errors.Copying:
            # Read the volume again below: the last report says that the volume is incomplete, but
            # its copy may have ended since.
            volume = None
        logical = backing.of_id(volume_id) if volume is None else volume.backing
        active = self._activator.device(logical) is not None
        is_new = logical.name not in volume_group.cached.volumes
        if is_new and active and names.is_of(ids.VOLUME_PREFIX, logical.name):
            # The volume was created after the last report; only the kernel knows it.
            return VolumeHealth(volume_id, self._by_kernel(volume_group, volume_id))
        if volume is None or (volume_group.is_changed and not active):
            # Read the volume group again: by the last report the volume is absent or incomplete, or
            # the volume may have been deleted since.
            volume = self._proved(volume_group, volume_id, volume)
        return VolumeHealth(volume_id, self._conditions(volume_group, volume))

    def _of_missing_group(
        self, volume_id: str, parsed_id: VolumeId, volume_group: VolumeGroup, *, by_node: bool
    ) -> VolumeHealth:
        """Return the health of a volume whose volume group is not on this node.

        Another volume group may have the name of the volume's group now. If `by_node` is False,
        raises OtherGroup for a group that this node never had.
        """
        last_seen, volume = volume_group.last_seen, None
        if last_seen is not None and parsed_id.is_of(last_seen.uuid):
            volume = self._reported(last_seen, volume_id)
        elif not by_node:
            # Raise an error, and report no health condition: the volume may be healthy on another
            # node.
            raise errors.OtherGroup(volume_id, f"its group {parsed_id.group} is not on this node")
        if volume is None:
            conditions = self._by_kernel(volume_group, volume_id)
        else:
            conditions = self._conditions(volume_group, volume)
        group_conditions = _away(volume_group) or (
            Condition(
                Reason.GROUP_MISSING,
                f"its volume group is not on this node; another has its name, {volume_group.name}",
                volume_group.status_seconds,
            ),
        )
        return VolumeHealth(volume_id, diagnosis.distinct([*group_conditions, *conditions]))

    def _inline(self, volume_id: str) -> VolumeHealth:
        """Return the health of an inline volume.

        The id of an inline volume is kubelet's, and does not name the volume's group.
        """
        volume = self._reports.cached(volume_id)
        logical = backing.of_id(volume_id) if volume is None else volume.backing
        if self._activator.device(logical) is not None:
            if volume is None:
                return VolumeHealth(volume_id, self._diagnosis.conditions_by_kernel(volume_id))
        elif volume is None or self._group_of(volume).is_changed:
            volume = self._found_anywhere(volume_id)
        return VolumeHealth(volume_id, self._conditions(self._group_of(volume), volume))

    def _found_anywhere(self, volume_id: str) -> Volume:
        """Find an inline volume by fresh reports of all volume groups.

        Raises NoSuchVolume if the volume's absence is proved, or else the error of a group that
        does not answer.
        """
        problems: list[Exception] = []
        for volume_group in self._volume_groups:
            try:
                volume = self._read_volume(volume_group, volume_id)
            except _NO_ANSWER as error:
                problems.append(error)
                continue
            if volume is not None:
                return volume
        raise next(iter(problems), errors.NoSuchVolume(volume_id))

    def _group_of(self, volume: Volume) -> VolumeGroup:
        return next(group for group in self._volume_groups if group.name == volume.group.name)

    def _conditions(
        self,
        volume_group: VolumeGroup,
        volume: Volume,
        mounts: table.Table | None = None,
        until_seconds: float | None = None,
    ) -> tuple[Condition, ...]:
        conditions = self._diagnosis.of(
            volume, mounts, seen_seconds=volume_group.time_seconds, until_seconds=until_seconds
        )
        return diagnosis.distinct([*conditions, *diagnosis.silent_group_conditions(volume_group)])

    def _by_kernel(self, volume_group: VolumeGroup, volume_id: str) -> tuple[Condition, ...]:
        """Return the health conditions that the kernel shows of a volume that no report has.

        The condition of a volume group that does not answer is added.
        """
        conditions = self._diagnosis.conditions_by_kernel(volume_id)
        return diagnosis.distinct([*conditions, *diagnosis.silent_group_conditions(volume_group)])

    def _reported(self, group: Group, volume_id: str) -> Volume | None:
        """Return a volume as a report of its volume group shows it; None if there is none.

        The result is None for a volume that is being deleted, too. Raises Copying, and other
        errors, for a volume that cannot be used now.
        """
        try:
            return CachedReport({group.name: group}).volume(volume_id)
        except errors.NoSuchVolume:
            return None

    def _proved(
        self, volume_group: VolumeGroup, volume_id: str, last_volume: Volume | None
    ) -> Volume:
        """Read a volume's volume group and return the volume; raise NoSuchVolume if it is absent.

        If the group does not answer, the result is `last_volume`; if that is None, the group's
        error is raised.
        """
        try:
            volume = self._read_volume(volume_group, volume_id)
        except _NO_ANSWER:
            if last_volume is None:
                raise
            volume = last_volume
        if volume is None:
            raise errors.NoSuchVolume(volume_id)
        return volume

    def _read_volume(self, volume_group: VolumeGroup, volume_id: str) -> Volume | None:
        locks.enter(volume_group.name)
        with command.time_limit(command.patience_seconds(_PROOF_SECONDS)):
            group = volume_group.state()
        if group is None:
            return None
        if VolumeId.parse(volume_id) is None:
            return records.find_named(group, names.logical_volume(ids.INLINE_PREFIX, volume_id))
        return self._reported(group, volume_id)

    def _require_seen(self, volume_group: VolumeGroup) -> None:
        """Read a volume group, if this process has never read it.

        Raises an error if the volume group does not answer.
        """
        if volume_group.status != "unknown":
            return
        locks.enter(volume_group.name)
        begin_states([volume_group])()
        if volume_group.status == "unknown":
            raise volume_group.silence_error


def _away(volume_group: VolumeGroup) -> tuple[Condition, ...]:
    """Return the health condition of a volume group that cannot be used on this node; usually none.

    The group is absent, or it is refused because several groups have its name.
    """
    if volume_group.cached is not None:
        return ()
    reason, why = Reason.GROUP_REFUSED, str(volume_group.problem)
    if volume_group.status != "refused":
        reason, name = Reason.GROUP_MISSING, volume_group.name
        why = f"volume group {name} is not on this node: attach its disks (`pvs --all`)"
    return (Condition(reason, why, volume_group.status_seconds),)
