"""What is wrong with volumes, for CSI's health calls: by the cached state, with its age.

No call waits for a disk, or starts a process, if the last report or the kernel knows the volume.
Only the absence of a volume has to be proved, as ever, by fresh state of its group.
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
from agent.requests.requests import HealthAt, Page, Part
from agent.volumes import backing, records
from agent.volumes.context import Context
from agent.volumes.records import Volume
from agent.volumes.report_age import Seen
from agent.volumes.volume_states import Call
from agent.work import locks
from lvm import names
from lvm.report import Group
from mount import command, table, target
from mount import mount_errors as mount_errors

# How long a call waits for the group of a volume of which nothing is known.
_PROOF_SECONDS = 5.0
_NO_ANSWER = (
    *(errors.GroupBusy, errors.GroupSilent, errors.GroupAwaited, errors.GroupRefused),
    mount_errors.CommandError,
)


@dataclass(frozen=True)
class VolumeHealth:
    """A volume's id and what is wrong with it: nothing for a healthy one."""

    volume_id: str
    conditions: tuple[Condition, ...] = ()

    @property
    def size_bytes(self) -> int:
        """The most that it takes in a gRPC message."""
        return 16 + len(self.volume_id) + sum(one.size_bytes for one in self.conditions)


class VolumesHealth:
    """ControllerGetVolumeHealth, ControllerListVolumeHealth and NodeGetVolumeHealth.

    They meet a volume that is being deleted, is incomplete, or is another node's, as its use does.
    """

    def __init__(self, context: Context, diagnosis: Diagnosis) -> None:
        self._kernel = context.kernel
        self._reports, self._activator = context.reports, context.activator
        self._volume_groups = context.volume_groups
        self._diagnosis, self._conflicts = diagnosis, context.conflicts
        # The directories in which kubelet may have volumes.
        self._configuration = context.configuration

    def get(self, volume_id: str) -> VolumeHealth:
        """What is wrong with a volume that CreateVolume made.

        Raises NoSuchVolume if its absence is proved, OtherGroup if its group was never here.
        """
        if (parsed := VolumeId.parse(volume_id)) is None:
            raise errors.NoSuchVolume(volume_id)
        return self._of(volume_id, parsed, by_node=False)

    def on_node(self, call: HealthAt) -> VolumeHealth:
        """What is wrong with a volume of this node, staged or not, inline or not.

        A missing group is a condition, and so is a dead device at the paths of the call. Raises
        NoSuchVolume, BadPath.
        """
        inside = self._configuration.now.kubelet_dir
        places = [target.resolve(self._kernel, one, inside) for one in call.paths]
        if (parsed := VolumeId.parse(call.volume_id)) is None:
            found = self._inline(call.volume_id)
        else:
            found = self._of(call.volume_id, parsed, by_node=True)
        mounts = table.read(self._kernel)
        gone = [
            Condition(
                Reason.DEVICE_GONE,
                f"{one} shows a device that went away; look at `dmesg`, stop the workload, and have"
                " the volume unpublished and published again",
            )
            for one in places
            if any(mounted.is_stale_node for mounted in mounts.at(one))
        ]
        return VolumeHealth(call.volume_id, diagnosis.distinct([*found.conditions, *gone]))

    def list(self, page: Page) -> Part[VolumeHealth]:
        """The unhealthy volumes of Carver's groups, also of groups that are away.

        It looks at no more volumes than the page needs, and waits for groups that do not answer as
        `begin_states` does, for all together. Of one that never did it has the active volumes, once
        it has been silent for long. Raises where no group ever answered what a look at one raises.
        """
        self._reports.keep_fresh()
        silent = [one for one in self._volume_groups if one.silent_seconds]
        unread = [one for one in self._volume_groups if one.status == "unknown"]
        if unread:
            locks.enter(*(one.name for one in unread))
        begin_states({*silent, *unread})()
        unknown = [one for one in unread if one.status == "unknown"]
        if unknown and len(unknown) == len(self._volume_groups.names):
            raise unknown[0].silence
        every: list[tuple[str, VolumeGroup, Volume | None]] = [
            (str(one.id), volume_group, one)
            for volume_group in self._volume_groups
            for one in self._volumes(volume_group)
        ]
        every += (
            (str(one), volume_group, None)
            for volume_group in unknown
            for one in self._activator.active_ids(ids.VOLUME_PREFIX, volume_group.name)
        )
        rest = sorted((one for one in every if one[0] >= page.starting_token), key=itemgetter(0))
        return requests.first(self._unhealthy(rest), page, attrgetter("size_bytes"))

    def _unhealthy(
        self, every: Iterable[tuple[str, VolumeGroup, Volume | None]]
    ) -> Iterator[tuple[str, VolumeHealth]]:
        mounts, until = self._diagnosis.mounts(), time.monotonic() + diagnosis.PATIENCE_SECONDS
        for volume_id, volume_group, volume in every:
            if volume is None:
                found = [*diagnosis.silence(volume_group)]
            else:
                away = _away(volume_group)
                found = [*away, *self._conditions(volume_group, volume, mounts, until)]
            if found:
                yield volume_id, VolumeHealth(volume_id, diagnosis.distinct(found))

    def _volumes(self, volume_group: VolumeGroup) -> Iterable[Volume]:
        """The volumes of the last report that may be used: not deleted, held or moved since."""
        group = volume_group.cached or volume_group.last_seen
        for one in Seen({} if group is None else {group.name: group}).volumes():
            if one.is_listed:
                # Whatever it is that one may not be used for, the others are listed.
                with suppress(errors.AgentError):
                    self._conflicts.check(Call.USE, str(one.id))
                    yield one

    def _of(self, volume_id: str, parsed: VolumeId, *, by_node: bool) -> VolumeHealth:
        self._conflicts.check(Call.USE, volume_id)
        self._reports.keep_fresh()
        groups, name = self._volume_groups, parsed.group
        if (volume_group := groups.known(name) or groups.of(name)) is None:
            raise errors.OtherGroup(volume_id, f"group {name} is not on this node")
        self._require_seen(volume_group)
        if volume_group.cached is None or not parsed.is_of(volume_group.cached.uuid):
            return self._of_away(volume_id, parsed, volume_group, by_node=by_node)
        try:
            volume = self._reported(volume_group.cached, volume_id)
        except errors.Copying:
            volume = None  # by that report; it may be complete by now
        logical = backing.of_id(volume_id) if volume is None else volume.backing
        active = self._activator.device(logical) is not None
        is_new = logical.name not in volume_group.cached.volumes
        if is_new and active and names.is_of(ids.VOLUME_PREFIX, logical.name):
            # Made since the last report.
            return VolumeHealth(volume_id, self._by_kernel(volume_group, volume_id))
        if volume is None or (volume_group.is_changed and not active):
            # Absent or incomplete, or perhaps deleted since the last report.
            volume = self._proved(volume_group, volume_id, volume)
        return VolumeHealth(volume_id, self._conditions(volume_group, volume))

    def _of_away(
        self, volume_id: str, parsed: VolumeId, volume_group: VolumeGroup, *, by_node: bool
    ) -> VolumeHealth:
        """The health of a volume whose group is away, or whose group's name another has now."""
        was, volume = volume_group.last_seen, None
        if was is not None and parsed.is_of(was.uuid):
            volume = self._reported(was, volume_id)
        elif not by_node:
            # It may be well on the node where it is.
            raise errors.OtherGroup(volume_id, f"its group {parsed.group} is not on this node")
        if volume is None:
            found = self._by_kernel(volume_group, volume_id)
        else:
            found = self._conditions(volume_group, volume)
        away = _away(volume_group) or (
            Condition(
                Reason.GROUP_MISSING,
                f"its volume group is not on this node; another has its name, {volume_group.name}",
                volume_group.time_seconds,
            ),
        )
        return VolumeHealth(volume_id, diagnosis.distinct([*away, *found]))

    def _inline(self, volume_id: str) -> VolumeHealth:
        """The health of an inline volume: its id is kubelet's and does not say its group."""
        volume = self._reports.cached(volume_id)
        logical = backing.of_id(volume_id) if volume is None else volume.backing
        if self._activator.device(logical) is not None:
            if volume is None:
                return VolumeHealth(volume_id, self._diagnosis.by_kernel(volume_id))
        elif volume is None or self._group_of(volume).is_changed:
            volume = self._found_anywhere(volume_id)
        return VolumeHealth(volume_id, self._conditions(self._group_of(volume), volume))

    def _found_anywhere(self, volume_id: str) -> Volume:
        """Find an inline volume by fresh state; raises NoSuchVolume if its absence is proved."""
        problems: list[Exception] = []
        for volume_group in self._volume_groups:
            try:
                volume = self._looked(volume_group, volume_id)
            except _NO_ANSWER as error:
                problems.append(error)
                continue
            if volume is not None:
                return volume
        raise next(iter(problems), errors.NoSuchVolume(volume_id))

    def _group_of(self, volume: Volume) -> VolumeGroup:
        return next(one for one in self._volume_groups if one.name == volume.group.name)

    def _conditions(
        self,
        volume_group: VolumeGroup,
        volume: Volume,
        mounts: table.Table | None = None,
        until_seconds: float | None = None,
    ) -> tuple[Condition, ...]:
        found = self._diagnosis.of(
            volume, mounts, seen_seconds=volume_group.last_seen_seconds, until_seconds=until_seconds
        )
        return diagnosis.distinct([*found, *diagnosis.silence(volume_group)])

    def _by_kernel(self, volume_group: VolumeGroup, volume_id: str) -> tuple[Condition, ...]:
        """The same of a volume that no report has."""
        found = self._diagnosis.by_kernel(volume_id)
        return diagnosis.distinct([*found, *diagnosis.silence(volume_group)])

    def _reported(self, group: Group, volume_id: str) -> Volume | None:
        """A volume by a report of its group; None if it is absent or being deleted."""
        try:
            return Seen({group.name: group}).volume(volume_id)
        except errors.NoSuchVolume:
            return None

    def _proved(self, volume_group: VolumeGroup, volume_id: str, before: Volume | None) -> Volume:
        """A volume by fresh state; raises NoSuchVolume if that proves its absence.

        If the group does not answer, the volume is what it was `before`.
        """
        try:
            found = self._looked(volume_group, volume_id)
        except _NO_ANSWER:
            if before is None:
                raise
            found = before
        if found is None:
            raise errors.NoSuchVolume(volume_id)
        return found

    def _looked(self, volume_group: VolumeGroup, volume_id: str) -> Volume | None:
        locks.enter(volume_group.name)
        with command.time_limit(command.patience_seconds(_PROOF_SECONDS)):
            group = volume_group.state()
        if group is None:
            return None
        if VolumeId.parse(volume_id) is None:
            return records.named(group, volume_id, ids.INLINE_PREFIX)
        return self._reported(group, volume_id)

    def _require_seen(self, volume_group: VolumeGroup) -> None:
        """Look at a group that this process never saw; raises why it does not answer."""
        if volume_group.status != "unknown":
            return
        locks.enter(volume_group.name)
        begin_states([volume_group])()
        if volume_group.status == "unknown":
            raise volume_group.silence


def _away(volume_group: VolumeGroup) -> tuple[Condition, ...]:
    """Why a group cannot be used here: absent, or one of several with its name; usually nothing."""
    if volume_group.cached is not None:
        return ()
    reason, why = Reason.GROUP_REFUSED, str(volume_group.problem)
    if volume_group.status != "refused":
        reason, name = Reason.GROUP_MISSING, volume_group.name
        why = f"volume group {name} is not on this node: attach its disks (`pvs --all`)"
    return (Condition(reason, why, volume_group.time_seconds),)
