"""What is wrong with volumes, as CSI's health calls ask: by what is known, with its age.

No disk is waited for, and no process is started for a volume that the last report or the kernel
knows. Only that there is no volume of an id has to be proved, as ever, by a look at its group.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter, itemgetter

from agent.core import errors, ids, locks, requests
from agent.core.ids import VolumeId
from agent.core.inventory import Inventory
from agent.core.records import Volume
from agent.core.requests import HealthAt, Page, Part
from agent.core.volume_group import VolumeGroup, begin_states
from agent.core.volume_groups import VolumeGroups
from agent.operations import health
from agent.operations.health import Condition, Diagnosis, Reason
from lvm import names
from lvm.report import Group, Report
from mount import command, table, target
from mount import errors as mount_errors
from mount.kernel import Kernel

# How long whoever asks for a volume that nothing tells of waits for its group.
_PROOF_SECONDS = 5.0
_NO_ANSWER = (
    *(errors.GroupBusy, errors.GroupSilent, errors.GroupAwaited, errors.GroupRefused),
    mount_errors.CommandError,
)


@dataclass(frozen=True)
class VolumeHealth:
    """A volume, by its id, and what is known against it: nothing, where it is well."""

    volume_id: str
    conditions: tuple[Condition, ...] = ()

    @property
    def size_bytes(self) -> int:
        """What it takes of a message at most."""
        return 16 + len(self.volume_id) + sum(one.size_bytes for one in self.conditions)


class VolumesHealth:
    """Carries out ControllerGetVolumeHealth, ControllerListVolumeHealth and NodeGetVolumeHealth.

    `check` raises for a volume that is being deleted, or is not complete. `inside` are the
    directories in which kubelet may have volumes.
    """

    def __init__(
        self,
        kernel: Kernel,
        volume_groups: VolumeGroups,
        known: Inventory,
        diagnosis: Diagnosis,
        check: Callable[[str], None],
        inside: Iterable[str],
    ) -> None:
        self._kernel = kernel
        self._volume_groups = volume_groups
        self._inventory = known
        self._diagnosis = diagnosis
        self._check = check
        self._inside = tuple(inside)

    def get(self, volume_id: str) -> VolumeHealth:
        """What is known against a volume of CreateVolume's.

        Raises NoSuchVolume, which is proved, and OtherGroup for one of a group that was never here.
        """
        if (parsed := VolumeId.parse(volume_id)) is None:
            raise errors.NoSuchVolume(volume_id)
        return self._of(volume_id, parsed, by_node=False)

    def on_node(self, call: HealthAt) -> VolumeHealth:
        """The same of any volume that this node shall have, staged or not, inline ones too.

        Of a group that is not here it says so. Where paths are told, what is at them counts, too.
        Raises NoSuchVolume, BadPath.
        """
        places = [target.resolve(self._kernel, one, self._inside) for one in call.paths]
        if (parsed := VolumeId.parse(call.volume_id)) is None:
            found = self._inline(call.volume_id)
        else:
            found = self._of(call.volume_id, parsed, by_node=True)
        gone = self._gone(places) if places else ()
        return VolumeHealth(call.volume_id, health.distinct([*found.conditions, *gone]))

    def list(self, page: Page) -> Part[VolumeHealth]:
        """The volumes of Carver's groups that something is known against, also of those away.

        No more of them are looked at than it takes for the part that is asked for.
        Raises BadToken, and for a group that never answered what a look at it raises.
        """
        requests.check(page)
        self._inventory.keep_fresh()
        every: list[tuple[str, VolumeGroup, Volume]] = []
        self._require_seen(*self._volume_groups)
        for volume_group in self._volume_groups:
            every += [(str(one.id), volume_group, one) for one in self._volumes(volume_group)]
        rest = sorted((one for one in every if one[0] >= page.starting_token), key=itemgetter(0))
        return requests.first(self._ill(rest), page, attrgetter("size_bytes"))

    def _ill(
        self, every: Iterable[tuple[str, VolumeGroup, Volume]]
    ) -> Iterator[tuple[str, VolumeHealth]]:
        """Those of these volumes that something is known against, by their ids."""
        mounts, until = self._diagnosis.mounts(), time.monotonic() + health.PATIENCE_SECONDS
        for volume_id, volume_group, volume in every:
            told = [*_away(volume_group), *self._told(volume_group, volume, mounts, until)]
            if told:
                yield volume_id, VolumeHealth(volume_id, health.distinct(told))

    def _volumes(self, volume_group: VolumeGroup) -> Iterable[Volume]:
        group = volume_group.cached or volume_group.seen
        known = Report({} if group is None else {group.name: group})
        return [
            one
            for one in self._inventory.present(known)
            if one.is_listed and self._is_there(str(one.id))
        ]

    def _is_there(self, volume_id: str) -> bool:
        """Whether a volume of the last report was not deleted since."""
        try:
            self._check(volume_id)
        except (errors.NoSuchVolume, errors.Copying):
            return False
        return True

    def _of(self, volume_id: str, parsed: VolumeId, *, by_node: bool) -> VolumeHealth:
        self._check(volume_id)
        self._inventory.keep_fresh()
        volume_group = self._volume_groups.known(parsed.group) or self._volume_groups.of(
            parsed.group
        )
        if volume_group is None:
            raise errors.OtherGroup(volume_id, f"group {parsed.group} is not on this node")
        self._require_seen(volume_group)
        if volume_group.cached is None or not parsed.is_of(volume_group.cached.uuid):
            return self._of_away(volume_id, parsed, volume_group, by_node=by_node)
        try:
            volume = self._reported(volume_group.cached, volume_id)
        except errors.Copying:
            volume = None  # as it was then; perhaps that is over
        active = self._inventory.device(volume_id) is not None
        is_new = parsed.name not in volume_group.cached.volumes
        if is_new and active and names.is_of(ids.VOLUME_PREFIX, parsed.name):
            # Made since the last report.
            return VolumeHealth(volume_id, self._diagnosis.by_kernel(volume_id))
        if volume is None or (volume_group.is_changed and not active):
            # Not there, not complete; or perhaps deleted since the last report.
            volume = self._proved(volume_group, volume_id, volume)
        return VolumeHealth(volume_id, self._told(volume_group, volume))

    def _of_away(
        self, volume_id: str, parsed: VolumeId, volume_group: VolumeGroup, *, by_node: bool
    ) -> VolumeHealth:
        """Of a volume whose group is not here now, or is another of that name."""
        was = (
            volume_group.seen
            if volume_group.seen and parsed.is_of(volume_group.seen.uuid)
            else None
        )
        if was is None and not by_node:
            # It may be well on the node where it is.
            raise errors.OtherGroup(volume_id, f"its group {parsed.group} is not on this node")
        volume = None if was is None else self._reported(was, volume_id)
        told = self._diagnosis.by_kernel(volume_id) if volume is None else ()
        if volume is not None:
            told = self._told(volume_group, volume)
        missing = _away(volume_group) or (_other_group(volume_group),)
        return VolumeHealth(volume_id, health.distinct([*missing, *told]))

    def _inline(self, volume_id: str) -> VolumeHealth:
        """Of a volume whose id is kubelet's: which group it is in has to be seen."""
        volume = self._inventory.cached(volume_id)
        if self._inventory.device(volume_id) is not None:
            if volume is None:
                return VolumeHealth(volume_id, self._diagnosis.by_kernel(volume_id))
        elif volume is None or self._engine_of(volume).is_changed:
            volume = self._found_anywhere(volume_id)
        return VolumeHealth(volume_id, self._told(self._engine_of(volume), volume))

    def _found_anywhere(self, volume_id: str) -> Volume:
        """An inline volume by a look at each group; raises NoSuchVolume, where that is proved."""
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

    def _engine_of(self, volume: Volume) -> VolumeGroup:
        return next(one for one in self._volume_groups if one.name == volume.group.name)

    def _told(
        self,
        volume_group: VolumeGroup,
        volume: Volume,
        mounts: table.Table | None = None,
        until_seconds: float | None = None,
    ) -> tuple[Condition, ...]:
        return self._diagnosis.of(
            volume, mounts, seen_seconds=volume_group.seen_seconds, until_seconds=until_seconds
        )

    def _reported(self, group: Group, volume_id: str) -> Volume | None:
        """The volume, as a report of its group has it; one that is being deleted is none."""
        try:
            return self._inventory.usable(Report({group.name: group}), volume_id)
        except errors.NoSuchVolume:
            return None

    def _proved(self, volume_group: VolumeGroup, volume_id: str, before: Volume | None) -> Volume:
        """The volume by a look of now; raises NoSuchVolume where the look proves that.

        Where the group does not answer, it is still what it was `before`.
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
        remaining = command.remaining_seconds()
        patience = _PROOF_SECONDS if remaining is None else min(_PROOF_SECONDS, remaining)
        with command.time_limit(patience):
            group = volume_group.state()
        if group is None:
            return None
        if VolumeId.parse(volume_id) is None:
            known = Report({group.name: group})
            return self._inventory.named(known, volume_id, ids.INLINE_PREFIX)
        return self._reported(group, volume_id)

    def _require_seen(self, *volume_groups: VolumeGroup) -> None:
        """Have groups looked at that this process never saw; raises what keeps it from that."""
        unknown = [one for one in volume_groups if one.status == "unknown"]
        if not unknown:
            return
        locks.enter(*(one.name for one in unknown))
        begin_states(unknown)()
        for one in unknown:
            if one.status == "unknown":
                raise one.silence

    def _gone(self, places: Iterable[str]) -> Iterable[Condition]:
        mounts = table.read(self._kernel)
        for place in places:
            if any(one.is_stale_node for one in mounts.at(place)):
                yield Condition(
                    Reason.DEVICE_GONE,
                    f"{place} shows a device that went away; look at `dmesg`, stop the workload,"
                    " and have the volume unpublished and published again",
                )


def _away(volume_group: VolumeGroup) -> tuple[Condition, ...]:
    """What is to be said of a group that is not here, or cannot be told from another."""
    if volume_group.cached is not None:
        return ()
    if volume_group.status == "refused":
        refused = Condition(
            Reason.GROUP_REFUSED, str(volume_group.problem), volume_group.time_seconds
        )
        return (refused,)
    return (
        Condition(
            Reason.GROUP_MISSING,
            f"volume group {volume_group.name} is not on this node: attach its disks (`pvs --all`)",
            volume_group.time_seconds,
        ),
    )


def _other_group(volume_group: VolumeGroup) -> Condition:
    return Condition(
        Reason.GROUP_MISSING,
        f"its volume group is not on this node; another has its name, {volume_group.name}",
        volume_group.time_seconds,
    )
