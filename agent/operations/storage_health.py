"""Readiness of the service (Probe, /readyz), and the health of its volume groups and lvm2."""

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

# Time, in seconds, for which kubelet counts as watching the storage's health after a
# NodeGetStorageHealth call: three of kubelet's default intervals.
_WATCHED_SECONDS = 180.0


class Readiness:
    """Readiness of the service, by the quick checks of agent/operations/preflight.py and by lvm2.

    A missing volume group does not make a node unready: its device classes have no room, and other
    classes are served. A failure of Probe would make sidecars exit for good.
    """

    def __init__(self, reports: Reports, node: preflight.Node, admission: Admission) -> None:
        self._reports = reports
        self._node = node
        self._admission = admission

    def probe(self) -> bool:
        """Return True once the service has started; raise NotReady if nothing can be served.

        Runs no command.
        """
        for finding in preflight.quick_findings(self._node):
            if finding.verdict == preflight.FAIL:
                raise errors.NotReady(f"{finding.message}; {finding.remedy}")
        for problem in (self._admission.problem, self._reports.problem):
            if isinstance(problem, mount_errors.ProgramMissing):
                raise errors.NotReady(str(problem))
        return self._admission.is_open

    def check(self) -> None:
        """Raise NotReady, with the reason, unless the service has started and lvm2 answers.

        The checks of `probe` are made first. The state of lvm2 is at most a minute old, as the
        method is for frequent callers.
        """
        self.probe()
        try:
            self._admission.require_open()
            self._reports.seen(MONITOR_AGE_SECONDS)
        except (errors.AgentError, mount_errors.CommandError) as error:
            raise errors.NotReady(str(error)) from None


class StorageHealth:
    """NodeGetStorageHealth: the health of a node's storage."""

    def __init__(self, context: Context, diagnosis: Diagnosis, node: preflight.Node) -> None:
        self._volume_groups = context.volume_groups
        self._reports, self._activator = context.reports, context.activator
        self._admission, self._diagnosis, self.node = context.admission, diagnosis, node
        # Reader of the disks' error counters; tests replace it.
        self.disk_errors = DiskErrors()
        # Time (monotonic, seconds) of the last NodeGetStorageHealth call; None before the first
        # call.
        self._asked_seconds: float | None = None

    def is_watched(self) -> bool:
        """Whether kubelet has asked for this node's storage health in the last three minutes.

        Only kubelet calls NodeGetStorageHealth, with the feature gate CSIVolumeHealth. Kubelet
        calls once in its `volumeStatsAggPeriod`, a minute by default, even while no pod has a
        volume on the node (Kubernetes 1.37.2, pkg/kubelet/volumemanager/volumehealth/manager.go).
        """
        asked_seconds = self._asked_seconds
        return asked_seconds is not None and time.monotonic() - asked_seconds < _WATCHED_SECONDS

    def conditions(self) -> Sequence[Condition]:
        """Return the health conditions of the node's storage, each reason once; usually none.

        Also records that kubelet asked, and has the cached state of the volume groups kept fresh.
        """
        self._asked_seconds = time.monotonic()
        self._reports.keep_fresh()
        deadline = time.monotonic() + diagnosis.PATIENCE_SECONDS
        conditions = []
        if (problem := self._admission.problem) is not None:
            why = f"Carver could not begin yet: {problem}; it tries again"
            conditions.append(Condition(Reason.LVM_NOT_ANSWERING, why))
        for volume_group in self._volume_groups:
            conditions += self._of_state(volume_group, deadline)
        return diagnosis.distinct([*conditions, *self._of_programs()])

    def _of_state(self, volume_group: VolumeGroup, until_seconds: float) -> Iterator[Condition]:
        label, problem = f"volume group {volume_group.name}", volume_group.problem
        for path, why in volume_group.metadata.ignored:
            yield Condition(
                Reason.DISK_IGNORED,
                f"{path} is not used for {label}: it {why}; {REMEDY}",
                volume_group.status_seconds,
            )
        if isinstance(problem, errors.GroupRefused):
            yield Condition(Reason.GROUP_REFUSED, str(problem), volume_group.status_seconds)
            return
        if isinstance(problem, errors.GroupSilent):
            yield Condition(Reason.DISK_NOT_RESPONDING, str(problem), volume_group.tried_seconds)
        elif isinstance(problem, mount_errors.CommandError | OSError):
            yield Condition(
                Reason.LVM_NOT_ANSWERING,
                f"{label} could not be looked at: {problem}; look for a disk that hangs (`dmesg`)",
                volume_group.tried_seconds,
            )
        elif problem is None:
            # Report a volume group whose last read had no error, but about which lvm2 has not
            # answered for long since.
            yield from diagnosis.silent_group_conditions(volume_group)
        if volume_group.cached is not None:
            yield from diagnosis.with_time(
                _of_group(volume_group.cached), volume_group.time_seconds
            )
            yield from self._of_kernel(volume_group.cached, until_seconds)
        elif volume_group.status_seconds and self._was_here(volume_group):
            yield Condition(
                Reason.GROUP_MISSING,
                f"{label} is not on this node, and was: attach its disks (`pvs --all`), or correct"
                " the classes that name it",
                volume_group.status_seconds,
            )

    def _was_here(self, volume_group: VolumeGroup) -> bool:
        """Whether a volume group ever was on this node; some clusters have nodes without disks."""
        name = volume_group.name
        if volume_group.last_seen is not None or self._activator.is_any_active(name):
            return True
        # Look for lvm2's backup of the volume group's metadata, which lvm2 keeps until vgremove(8).
        return name in lvm2.backed_up_groups(self.node.lvm_root)

    def _of_kernel(self, group: Group, until_seconds: float) -> Iterator[Condition]:
        for logical in records.all_logical_volumes(group):
            if {"thin", "pool"} <= logical.layout:
                yield from self._diagnosis.of_pool(group, logical.name, until_seconds)
        for disk in group.disks:
            for problem in () if disk.missing else self.disk_errors.of(disk.name):
                yield Condition(
                    Reason.MEDIUM_ERRORS,
                    f"a disk of volume group {group.name}: {problem}; look at `dmesg` and"
                    " `smartctl`, and replace it (`pvmove`) while it can be read",
                )

    def _of_programs(self) -> Iterator[Condition]:
        settings = self.node.settings
        for fs_type in sorted({device_class.fs_type for device_class in settings.classes}):
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
        missing_disks = ", ".join(group.missing_uuids) or f"{group.missing_disks} of them"
        yield Condition(
            Reason.DISK_MISSING,
            f"volume group {group.name} misses a disk ({missing_disks}): attach it again (`pvs`),"
            " or see `A disk is replaced` in docs/operations.md. What lies on it alone cannot be"
            " used",
        )
    if groups.is_text_full(group):
        yield Condition(
            Reason.GROUP_METADATA_FULL,
            f"{groups.about_area(group)} is {groups.text_percent(group):.0f} %"
            " full: nothing new is made there. See `A group's"
            " metadata area is full` in docs/operations.md",
        )
