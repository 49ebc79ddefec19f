"""ListVolumes and ControllerGetVolume; lists of volumes and snapshots for `carver volume list`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from agent.core import errors
from agent.groups.volume_group import begin_states
from agent.requests import requests
from agent.requests.requests import ListPage, Page
from agent.volumes.context import Context
from agent.volumes.records import Snapshot, Volume
from agent.volumes.report_age import EveryGroup
from agent.work import locks
from lvm.report import Group, Report
from mount import mount_errors as mount_errors

T = TypeVar("T")

_NO_ANSWER = (
    *(errors.GroupBusy, errors.GroupSilent, errors.GroupAwaited, errors.GroupRefused),
    mount_errors.CommandError,
)


@dataclass(frozen=True)
class NodeListing(Generic[T]):
    """Volumes or snapshots of the readable volume groups, and why other groups could not be read.

    `entries` are sorted by id. `unread_groups` has the reason for each unreadable group, by the
    group's name.
    """

    entries: tuple[T, ...]
    unread_groups: Mapping[str, str]


class Listing:
    """Lists the volumes and snapshots of this node."""

    def __init__(self, context: Context) -> None:
        self._volume_groups = context.volume_groups
        self._reports = context.reports

    def page(self, page: Page) -> ListPage[Volume]:
        """Return one page of the volumes, sorted by id.

        Raises the error of a volume group that cannot be read: GroupBusy, GroupSilent,
        GroupAwaited, GroupRefused; GroupMissing for a configured group that is not on this node.
        """
        all_groups = self._reports.for_lists()
        for name in self._volume_groups.names:
            # Raise GroupMissing if a configured volume group is missing: a list without the group's
            # volumes would say that these were deleted.
            all_groups.group(name)
        return requests.select_page(
            {str(volume.id): volume for volume in all_groups.listed()}, page
        )

    def volumes(self) -> NodeListing[Volume]:
        """Return the volumes of all readable volume groups, and why others cannot be read.

        Raises TooManyCalls if too many calls run, and Starting before the end of the start.
        """
        all_groups, unread_groups = self._read_groups()
        volumes = all_groups.listed()
        return NodeListing(tuple(sorted(volumes, key=lambda volume: str(volume.id))), unread_groups)

    def snapshots(self) -> NodeListing[Snapshot]:
        """Return the snapshots of all readable volume groups, and why others cannot be read.

        Raises TooManyCalls if too many calls run, and Starting before the end of the start.
        """
        all_groups, unread_groups = self._read_groups()
        snapshots = self._reports.listed_snapshots(all_groups)
        return NodeListing(
            tuple(sorted(snapshots, key=lambda snapshot: str(snapshot.id))), unread_groups
        )

    def _read_groups(self) -> tuple[EveryGroup, Mapping[str, str]]:
        """Return the volume groups that can be read, and why the other groups cannot be read.

        A group that takes long to answer is returned as of its last report.
        """
        locks.enter()
        present_groups: dict[str, Group] = {}
        absence_reasons: dict[str, str] = {}
        pending = {
            group.name: begin_states([group], complete=True) for group in self._volume_groups
        }
        for name, await_state in pending.items():
            try:
                # For a volume group that is missing, `Reports.group` raises the reason, including
                # the reason why Carver could not create the group.
                group = await_state()[name] or self._reports.group(Report({}), name)
            except _NO_ANSWER as error:
                absence_reasons[name] = str(error)
            else:
                present_groups[name] = group
        return EveryGroup(present_groups), absence_reasons
