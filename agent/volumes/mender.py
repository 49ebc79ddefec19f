"""Repair devices and thin volumes that lvm2 left in an intermediate state when it was killed.

Calls that change a volume group do so first, by `Mender.mend`, which runs lvchange(8) and
lvremove(8). A call that only reads uses `Reports.fresh` instead, which repairs nothing.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from agent.core import errors, ids, tag
from agent.groups.node_groups import VolumeGroups
from agent.volumes import records
from agent.volumes.activator import Activator
from agent.volumes.records import Volume
from agent.volumes.report_age import Fresh
from agent.volumes.reports import Reports
from agent.volumes.volume_states import Call
from lvm import report, volumes
from lvm.lvm2 import Lvm
from mount import mount_errors as mount_errors

_log = logging.getLogger(__name__)

# Type of the errors of repairs that failed, by the names of the volume group and the logical
# volume.
_Problems = dict[tuple[str, str], Exception]
# Type of a logical volume with its volume group.
_InGroup = tuple[report.Group, report.LogicalVolume]


class Mender:
    """Repairs what a killed lvm2 left in volume groups, before a call changes these groups."""

    def __init__(self, volume_groups: VolumeGroups, reports: Reports, activator: Activator) -> None:
        self._volume_groups = volume_groups
        self._reports = reports
        self._activator = activator
        # The last error of each volume's repair. The same error is not logged again.
        self._logged: dict[tuple[str, str], str] = {}

    def mend(self, *groups: str) -> Fresh:
        """Repair what a killed lvm2 left in these volume groups, or in all; return a fresh report.

        Deactivates parts of RAIDs and pools that lvm2 left active, resumes devices that lvm2 left
        suspended, and removes thin volumes that lvm2 recorded and did not create. Runs one command
        for each; usually there is none. If lvm2 refuses to repair a volume, the error is in the
        report's `problems`, and only calls about that volume fail. Raises as `Reports.fresh`.
        """
        state = self._reports.fresh(*groups)
        present = state.groups.values()
        every = [
            (group, logical) for group in present for logical in records.all_logical_volumes(group)
        ]
        for group in present:
            self._activator.deactivate_parts(group)
        problems = self._resume(every)
        is_any_unmade, unmade = self._remove_unmade(every)
        if is_any_unmade:
            state = self._reports.fresh(*groups)
        return replace(state, problems=problems | unmade)

    def mended_volume(self, volume_id: str, call: Call) -> Volume:
        """Repair what a killed lvm2 left in the volume group of a volume; return the volume.

        Raises as `mend`; as `Fresh.usable` if the volume is absent or the call may not use it; and
        NoSuchVolume for an id without a volume group.
        """
        return self.mend(ids.group_of(volume_id)).usable(volume_id, call)

    def _resume(self, every: Sequence[_InGroup]) -> _Problems:
        """Resume devices that lvm2 left suspended, by one command for each; return the errors.

        lvm2 suspends a device while it changes the device's table. If lvm2 is killed meanwhile
        (SIGKILL), the device stays suspended, and reads and writes wait for ever. A report is made
        under lvm2's lock of the group, so no command is changing a device that a report shows as
        suspended. Devices that Carver itself keeps suspended are left out.
        """
        suspended = [
            (group.name, logical.name)
            for group, logical in every
            if logical.suspended
            and not self._activator.is_kept_suspended(group.name, logical.name)
            and records.is_usable(group, logical)
        ]
        return self._repair_each(suspended, "resume", volumes.refresh)

    def _remove_unmade(self, every: Sequence[_InGroup]) -> tuple[bool, _Problems]:
        """Remove thin volumes that lvm2 recorded in its metadata and did not create in the pool.

        Returns whether there were such volumes, and the errors of those that were not removed.

        lvm2 creates a thin volume in three steps: it commits its metadata, has the kernel create
        the volume in the pool, and then counts one transaction both in its metadata and in the pool
        (thin-provisioning.rst). If lvm2 is killed in between (SIGKILL), it leaves a volume that
        cannot be activated (ENODATA) before the pool's next change. A snapshot of that kind would
        then hold the data that is written until that change. The volume never had any data: the
        repeated call creates it anew.
        """
        unmade = [
            (group.name, logical.name)
            for group, logical in every
            if self._is_unmade(group, logical)
        ]
        for key in unmade:
            if key not in self._logged:
                _log.warning("removing %s/%s, which lvm2 died while making", *key)
        return bool(unmade), self._repair_each(unmade, "remove", volumes.remove)

    def _is_unmade(self, group: report.Group, logical: report.LogicalVolume) -> bool:
        """Whether lvm2 recorded a thin volume and was killed before it created it in the pool.

        The transaction number of the kernel's thin pool shows that. The pool is asked only for an
        inactive volume that was the last to be recorded in the pool, and that has no tag of a used
        volume. An inactive pool is activated first: lvm2 may have been killed before it activated
        the pool, and it deactivates the pool when it fails to activate such a volume. False if the
        kernel does not report a usable pool.
        """
        pool = group.volumes.get(logical.pool)
        if logical.active or pool is None or logical.transaction_id is None:
            return False
        if pool.transaction_id != logical.transaction_id + 1:
            return False
        if {tag.FORMATTED, tag.SEALED} & logical.own_tags.keys():
            return False
        if not records.is_usable(group, logical):
            return False
        try:
            status = self._activator.pool_status(group.name, pool.name)
            if status is None and pool.disks.isdisjoint(group.missing_uuids):
                volumes.activate(self._volume_groups.lvm(group.name), group.name, pool.name)
                status = self._activator.pool_status(group.name, pool.name)
        except (errors.PoolSilent, mount_errors.CommandFailed):
            return False
        if status is None or status.mode != "rw" or status.needs_check:
            return False
        return status.transaction_id == logical.transaction_id

    def _repair_each(
        self,
        volume_names: Iterable[tuple[str, str]],
        action: str,
        repair: Callable[[Lvm, str, str], object],
    ) -> _Problems:
        """Repair each of these volumes; log and return the errors of repairs that lvm2 refuses.

        An error that leaves the outcome unknown is raised: the group does not answer, so the other
        volumes cannot be repaired either.
        """
        problems: _Problems = {}
        for key in volume_names:
            try:
                repair(self._volume_groups.lvm(key[0]), *key)
            except mount_errors.CommandFailed as error:
                problems[key] = error
                if self._logged.get(key) != str(error):
                    _log.error("cannot %s %s/%s yet: %s", action, *key, error)
                self._logged[key] = str(error)
            else:
                self._logged.pop(key, None)
        return problems
