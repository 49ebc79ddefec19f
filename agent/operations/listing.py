"""ListVolumes and ControllerGetVolume; and what is here, listed for people."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from agent.core import errors
from agent.groups.volume_group import begin_states
from agent.requests import requests
from agent.requests.requests import Page, Part
from agent.volumes.context import Context
from agent.volumes.records import Snapshot, Volume
from agent.volumes.report_age import Every
from agent.work import locks
from lvm.report import Group, Report
from mount import mount_errors as mount_errors

T = TypeVar("T")

_NO_ANSWER = (
    *(errors.GroupBusy, errors.GroupSilent, errors.GroupAwaited, errors.GroupRefused),
    mount_errors.CommandError,
)


@dataclass(frozen=True)
class Here(Generic[T]):
    """The entries of the groups that are here, by id; and by name, why other groups are not."""

    entries: tuple[T, ...]
    away: Mapping[str, str]


class Listing:
    """Lists volumes and snapshots."""

    def __init__(self, context: Context) -> None:
        self._volume_groups = context.volume_groups
        self._reports = context.reports

    def page(self, page: Page) -> Part[Volume]:
        """A part of the volumes, in the order of their ids; raises what a missing group raises."""
        known = self._reports.lists()
        for name in self._volume_groups.names:
            # A list without a group's volumes would say that they are gone.
            known.group(name)
        return requests.part({str(one.id): one for one in known.listed()}, page)

    def volumes(self) -> Here[Volume]:
        """The volumes of the groups that are here; raises TooManyCalls, Starting."""
        known, away = self._look()
        found = known.listed()
        return Here(tuple(sorted(found, key=lambda one: str(one.id))), away)

    def snapshots(self) -> Here[Snapshot]:
        """The snapshots of the groups that are here; raises TooManyCalls, Starting."""
        known, away = self._look()
        found = self._reports.listed_snapshots(known)
        return Here(tuple(sorted(found, key=lambda one: str(one.id))), away)

    def _look(self) -> tuple[Every, Mapping[str, str]]:
        """All groups as they are now, or were at their last answer; and why others are away."""
        locks.enter()
        here: dict[str, Group] = {}
        away: dict[str, str] = {}
        begun = {one.name: begin_states([one], complete=True) for one in self._volume_groups}
        for name, end in begun.items():
            try:
                # The second call raises the reason, also for a group that Carver could not make.
                group = end()[name] or self._reports.group(Report({}), name)
            except _NO_ANSWER as error:
                away[name] = str(error)
            else:
                here[name] = group
        return Every(here), away
