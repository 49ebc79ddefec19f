"""What repairs: devices and thin volumes that lvm2 left half done when it was killed.

Only `mend` here does that, and it runs lvchange and lvremove: a call that only looks reads
`Reports.fresh` in its place.
"""

import logging
from collections.abc import Callable, Collection, Iterable
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

# Why what lvm2 left is not repaired, by the group and the logical volume.
_Problems = dict[tuple[str, str], Exception]


class Mender:
    """Repairs what lvm2 left in volume groups, before a call changes them."""

    def __init__(self, volume_groups: VolumeGroups, reports: Reports, activator: Activator) -> None:
        self._volume_groups = volume_groups
        self._reports = reports
        self._activator = activator
        # Why a volume could not be repaired: the same is not logged again.
        self._logged: dict[tuple[str, str], str] = {}

    def mend(self, *groups: str) -> Fresh:
        """Repair what lvm2 left in these groups, or in all; their fresh state then.

        Resumes devices that lvm2 left suspended, and removes thin volumes that it recorded and did
        not make: one command for each, and as a rule none. Where lvm2 refuses that of one volume,
        only calls about that volume fail. Raises as `Reports.fresh`.
        """
        known = self._reports.fresh(*groups)
        present = list(known.groups.values())
        problems = self._resume(present)
        were_some, unmade = self._remove_unmade(present)
        if were_some:
            known = self._reports.fresh(*groups)
        return replace(known, problems=problems | unmade)

    def mended_volume(self, volume_id: str, call: Call) -> Volume:
        """Repair what lvm2 left in a volume's group; the volume, if the call may have it.

        Raises NoSuchVolume, and as `mend` and `Fresh.usable`.
        """
        return self.mend(ids.group_of(volume_id)).usable(volume_id, call)

    def _resume(self, groups: Collection[report.Group]) -> _Problems:
        """Resume devices that lvm2 left suspended; one command for each.

        lvm2 suspends a device while it changes its table. Killed meanwhile (SIGKILL), it leaves it
        so, and reads and writes there wait for ever. lvm2 reports under the group's lock: a device
        that a report shows as suspended is left over, not under way. Returns why those that are
        left could not be resumed.
        """
        for group in groups:
            self._activator.deactivate_parts(group)
        suspended = [
            (group.name, one.name)
            for group in groups
            for one in records.every(group)
            if one.suspended
            and not self._activator.is_kept_suspended(group.name, one.name)
            and records.is_usable(group, one)
        ]
        return self._each(suspended, "resume", volumes.refresh)

    def _remove_unmade(self, groups: Collection[report.Group]) -> tuple[bool, _Problems]:
        """Remove thin volumes that lvm2 recorded and did not make.

        Returns whether there were any, and why those that are left are not removed.

        lvm2 commits its metadata, has the kernel make the volume in the pool, and then counts both
        there as one transaction (thin-provisioning.rst). Killed in between (SIGKILL), it leaves a
        volume that cannot be activated (ENODATA) before the pool's next change; a snapshot would
        hold what is written until then. No data were ever in it: the repeated call makes it anew.
        """
        unmade = [
            (group.name, one.name)
            for group in groups
            for one in records.every(group)
            if self._is_unmade(group, one)
        ]
        for key in unmade:
            if key not in self._logged:
                _log.warning("removing %s/%s, which lvm2 died while making", *key)
        return bool(unmade), self._each(unmade, "remove", volumes.remove)

    def _is_unmade(self, group: report.Group, logical: report.LogicalVolume) -> bool:
        """Whether the kernel's pool lacks the transaction that makes a thin volume.

        It is asked only for an inactive volume that was the last to be made in its pool. An
        inactive pool is activated first: lvm2 may have died before it activated the pool, and where
        it then fails to activate the volume, it deactivates the pool again.
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

    def _each(
        self,
        left: Iterable[tuple[str, str]],
        what: str,
        act: Callable[[Lvm, str, str], object],
    ) -> _Problems:
        """Repair what lvm2 left of each volume; why it refuses, by group and volume.

        A group that does not answer is raised: then no other volume can be repaired either.
        """
        problems: _Problems = {}
        for key in left:
            try:
                act(self._volume_groups.lvm(key[0]), *key)
            except mount_errors.CommandFailed as error:
                problems[key] = error
                if self._logged.get(key) != str(error):
                    _log.error("cannot %s %s/%s yet: %s", what, *key, error)
                self._logged[key] = str(error)
            else:
                self._logged.pop(key, None)
        return problems
