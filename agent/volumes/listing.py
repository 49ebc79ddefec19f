"""What is in the groups that are here, for people: a list that says what it lacks, and why.

A cluster's lists are refused while a group is away (Inventory.all): there a volume that is not told
of is taken for gone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from agent import admission, errors
from agent.engine.engine import listed
from agent.engine.means import Means
from agent.engine.records import Snapshot, Volume
from lvm import errors as lvm_errors
from lvm.report import Group, Report

T = TypeVar("T")

_NO_ANSWER = (
    *(errors.GroupBusy, errors.GroupSilent, errors.GroupAwaited, errors.GroupRefused),
    lvm_errors.LvmError,
)


@dataclass(frozen=True)
class Here(Generic[T]):
    """What is here, by the ids; and why each group that is away is, by their names."""

    entries: tuple[T, ...]
    away: Mapping[str, str]


class Listing:
    """Lists that no group's absence keeps anybody from."""

    def __init__(self, means: Means) -> None:
        self._engines = means.engines
        self._inventory = means.inventory

    def volumes(self) -> Here[Volume]:
        """The volumes that are listed; raises TooManyCalls, Starting."""
        known, away = self._look()
        found = (one for one in self._inventory.present(known) if one.is_listed)
        return Here(tuple(sorted(found, key=lambda one: str(one.id))), away)

    def snapshots(self) -> Here[Snapshot]:
        """The snapshots that are listed; raises TooManyCalls, Starting."""
        known, away = self._look()
        found = self._inventory.snapshots(known)
        return Here(tuple(sorted(found, key=lambda one: str(one.id))), away)

    def _look(self) -> tuple[Report, Mapping[str, str]]:
        """All groups as they are now, or were when they answered last; and those that are away."""
        admission.enter()
        here: dict[str, Group] = {}
        away: dict[str, str] = {}
        for name, told in listed(self._engines):
            try:
                # Of one that Carver could not make the second says why.
                group = told() or self._inventory.group(Report({}), name)
            except _NO_ANSWER as error:
                away[name] = str(error)
            else:
                here[name] = group
        return Report(here), away
