"""Reports of volume groups by what may be decided by their age: three types, so that mypy tells.

A report of a group may be older than what is in it. A call that changes something decides by the
state of each group that the decision is about: by `Fresh` for the groups that it names, by `Every`
where any group may matter. `Seen` is for metrics, health and hints.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from agent.core import errors
from lvm import report


@dataclass(frozen=True)
class Fresh(report.Report):
    """Groups that a call named, each read after the call began; `asked` has their names.

    It says nothing of another group, which is not the same as that it is absent: `unasked` has the
    others of the configuration. `problems` has why
    lvm2 could not repair what it left when it was killed, by the group and the logical volume.
    """

    asked: frozenset[str] = frozenset()
    unasked: frozenset[str] = frozenset()
    problems: Mapping[tuple[str, str], Exception] = field(default_factory=dict)


@dataclass(frozen=True)
class Every(report.Report):
    """Each group that this process ever read, with all that Carver did there until now.

    What others did in a group since, such as an operator, may be missing. `silent` has the names of
    groups that Carver changed and that have not answered since, where what it did last may be
    missing, and of those that this process never read, or that are refused, where all of it is.
    `unread` has those that have not answered yet.
    """

    silent: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    problems: Mapping[tuple[str, str], Exception] = field(default_factory=dict)

    def unanswered(self, *groups: str) -> frozenset[str]:
        """Those of these groups, or of all where none is named, that are `silent`."""
        return self.silent & set(groups) if groups else self.silent

    def require_answered(self, *groups: str) -> None:
        """Raise GroupBusy while what Carver did last in one of these groups may be missing.

        Of all groups where none is named.
        """
        if silent := self.unanswered(*groups):
            named = ", ".join(sorted(silent))
            raise errors.GroupBusy(f"volume group {named}", "it has not answered")

    def require_read(self) -> None:
        """Raise GroupBusy while a group was never read: an earlier process may have begun a copy.

        What this process began, also in a group that hangs, its jobs know.
        """
        if self.unread:
            named = ", ".join(sorted(self.unread))
            raise errors.GroupBusy(f"volume group {named}", "it has not answered since the start")


@dataclass(frozen=True)
class Seen(report.Report):
    """Groups as they were when they were read last, perhaps long ago: no decision goes by it."""


# The reports that a decision may go by.
Known = Fresh | Every


def fresh(groups: Iterable[report.Group]) -> Fresh:
    """The state of groups that the caller just read, and holds."""
    every = {one.name: one for one in groups}
    return Fresh(every, asked=frozenset(every))
