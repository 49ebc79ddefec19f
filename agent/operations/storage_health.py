"""Whether the service is ready (Probe, /readyz), and what is wrong with the groups and lvm2."""

import time
from collections.abc import Iterator, Sequence

from agent.core import errors
from agent.groups.disk_search import REMEDY
from agent.groups.volume_group import VolumeGroup
from agent.operations import diagnosis, preflight
from agent.operations.diagnosis import Condition, Diagnosis, Reason
from agent.volumes import records
from agent.volumes.context import Context
from agent.volumes.reports import MONITOR_AGE_SECONDS, Reports
from agent.work.locks import Admission
from lvm import groups, lvm2
from lvm.disk_reader import DiskErrors
from lvm.report import Group
from mount import filesystem
from mount import mount_errors as mount_errors

# For how long after a call of kubelet's it counts as one who asks: three of its default intervals.
_WATCHED_SECONDS = 180.0


class Readiness:
    """Readiness by the cheap checks of the preflight and the last state of lvm2.

    A missing group makes no node unready: its classes have no room, and others are served. If
    Probe failed, sidecars would exit for good.
    """

    def __init__(self, reports: Reports, node: preflight.Node, admission: Admission) -> None:
        self._reports = reports
        self._node = node
        self._admission = admission

    def probe(self) -> bool:
        """Whether the start is over; raises NotReady if nothing can be served. No command."""
        for found in preflight.cheap(self._node):
            if found.verdict == preflight.FAIL:
                raise errors.NotReady(f"{found.message}; {found.remedy}")
        for problem in (self._admission.problem, self._reports.problem):
            if isinstance(problem, mount_errors.ProgramMissing):
                raise errors.NotReady(str(problem))
        return self._admission.is_open

    def check(self) -> None:
        """Raise NotReady, with the reason, unless lvm2 answers and all else is in order.

        By state at most a minute old, for frequent callers.
        """
        self.probe()
        try:
            self._admission.require_open()
            self._reports.seen(MONITOR_AGE_SECONDS)
        except (errors.AgentError, mount_errors.CommandError) as error:
            raise errors.NotReady(str(error)) from None


class StorageHealth:
    """Carries out NodeGetStorageHealth."""

    def __init__(self, context: Context, diagnosis: Diagnosis, node: preflight.Node) -> None:
        self._volume_groups = context.volume_groups
        self._reports, self._activator = context.reports, context.activator
        self._admission, self._diagnosis, self.node = context.admission, diagnosis, node
        # For tests.
        self.disk_errors = DiskErrors()
        # When it was last asked, in monotonic seconds.
        self._asked_seconds: float | None = None

    def is_watched(self) -> bool:
        """Whether kubelet asks for health itself, by this service's last minutes.

        Only kubelet calls NodeGetStorageHealth, with the feature gate CSIVolumeHealth: once in its
        `volumeStatsAggPeriod`, which is a minute by default, also while no pod has a volume here
        (Kubernetes 1.37.2, pkg/kubelet/volumemanager/volumehealth/manager.go).
        """
        asked = self._asked_seconds
        return asked is not None and time.monotonic() - asked < _WATCHED_SECONDS

    def conditions(self) -> Sequence[Condition]:
        """What is wrong with the storage, each reason once; usually nothing."""
        self._asked_seconds = time.monotonic()
        self._reports.keep_fresh()
        until = time.monotonic() + diagnosis.PATIENCE_SECONDS
        found = []
        if (problem := self._admission.problem) is not None:
            why = f"Carver could not begin yet: {problem}; it tries again"
            found.append(Condition(Reason.LVM_NOT_ANSWERING, why))
        for volume_group in self._volume_groups:
            found += self._of_state(volume_group, until)
        return diagnosis.distinct([*found, *self._of_programs()])

    def _of_state(self, volume_group: VolumeGroup, until_seconds: float) -> Iterator[Condition]:
        named, problem = f"volume group {volume_group.name}", volume_group.problem
        for path, why in volume_group.metadata.ignored:
            yield Condition(
                Reason.DISK_IGNORED,
                f"{path} is not used for {named}: it {why}; {REMEDY}",
                volume_group.time_seconds,
            )
        if isinstance(problem, errors.GroupRefused):
            yield Condition(Reason.GROUP_REFUSED, str(problem), volume_group.time_seconds)
            return
        if isinstance(problem, errors.GroupSilent):
            yield Condition(Reason.DISK_NOT_RESPONDING, str(problem), volume_group.tried_seconds)
        elif isinstance(problem, mount_errors.CommandError | OSError):
            yield Condition(
                Reason.LVM_NOT_ANSWERING,
                f"{named} could not be looked at: {problem}; look for a disk that hangs (`dmesg`)",
                volume_group.tried_seconds,
            )
        elif problem is None:
            # The first read that has no answer goes on.
            yield from diagnosis.silence(volume_group)
        if volume_group.cached is not None:
            yield from diagnosis.aged(_of_group(volume_group.cached), volume_group.time_seconds)
            yield from self._of_kernel(volume_group.cached, until_seconds)
        elif volume_group.time_seconds and self._was_here(volume_group):
            yield Condition(
                Reason.GROUP_MISSING,
                f"{named} is not on this node, and was: attach its disks (`pvs --all`), or correct"
                " the classes that name it",
                volume_group.time_seconds,
            )

    def _was_here(self, volume_group: VolumeGroup) -> bool:
        """Whether the group ever was on this node; some clusters have nodes without disks."""
        name = volume_group.name
        if volume_group.last_seen is not None or self._activator.is_any_active(name):
            return True
        # lvm2 keeps a backup of the metadata of each group; vgremove(8) removes it.
        return name in lvm2.backed_up_groups(self.node.lvm_root)

    def _of_kernel(self, group: Group, until_seconds: float) -> Iterator[Condition]:
        for one in records.every(group):
            if {"thin", "pool"} <= one.layout:
                yield from self._diagnosis.of_pool(group, one.name, until_seconds)
        for disk in group.disks:
            for problem in () if disk.missing else self.disk_errors.of(disk.name):
                yield Condition(
                    Reason.MEDIUM_ERRORS,
                    f"a disk of volume group {group.name}: {problem}; look at `dmesg` and"
                    " `smartctl`, and replace it (`pvmove`) while it can be read",
                )

    def _of_programs(self) -> Iterator[Condition]:
        settings = self.node.settings
        for fs_type in sorted({one.fs_type for one in settings.classes}):
            if missing := preflight.missing_programs(self.node, fs_type):
                yield Condition(
                    Reason.FILE_SYSTEM_TOOLS_MISSING,
                    f"{', '.join(missing)} is missing, so no volume can have {fs_type}: install"
                    f" {filesystem.FILE_SYSTEMS[fs_type].package}",
                )
        if not self.node.at("/dev/loop-control").exists():
            yield Condition(
                Reason.LOOP_DEVICES_MISSING,
                "there are no loop devices, which read-only raw block volumes need: `modprobe"
                " loop`; in a container, mount the host's /dev",
            )


def _of_group(group: Group) -> Iterator[Condition]:
    if group.missing_uuids or group.missing_disks:
        gone = ", ".join(group.missing_uuids) or f"{group.missing_disks} of them"
        yield Condition(
            Reason.DISK_MISSING,
            f"volume group {group.name} misses a disk ({gone}): attach it again (`pvs`), or see"
            " `A disk is replaced` in docs/operations.md. What lies on it alone cannot be used",
        )
    if groups.is_text_full(group):
        yield Condition(
            Reason.GROUP_METADATA_FULL,
            f"{groups.about_area(group)} is {groups.text_percent(group):.0f} %"
            " full: nothing new is made there. See `A group's"
            " metadata area is full` in docs/operations.md",
        )
