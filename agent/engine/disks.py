"""Which of the node's disks are a volume group's: told by their labels, without lvm2.

A group is its UUID. Disks of other drivers, of guests and of other nodes may bear its name, its
UUID, or a copy of one of its disks. Which is meant is told by proofs, in this order: what was known
of the group before, what the operator listed, who may have written the disk, active volumes,
Carver's tags. Whatever loses is ignored and told. Only where all proofs are the same is neither
used.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from agent import errors
from lvm.disks import Found, Unanswered
from lvm.labels import Kind, PhysicalLabel
from lvm.metadata import Group


@dataclass(frozen=True)
class Location:
    """Where a group is: its UUID, and the paths of those of its disks that are there."""

    uuid: str
    disks: tuple[str, ...]
    # The UUIDs of those that are not.
    missing: frozenset[str] = frozenset()
    # Of the node whose group it is; empty where it is anybody's.
    system_id: str = ""
    # The UUIDs of the disks that are there, in the same order.
    disk_uuids: tuple[str, ...] = ()
    # The paths of disks that claim to be the group's and are not, each with the reason.
    ignored: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    def has(self, path: str, uuid: str) -> bool:
        """Whether the disk at that path was this physical volume of the group."""
        return (path, uuid) in zip(self.disks, self.disk_uuids, strict=False)


def names_of(found: Mapping[str, Found]) -> set[str]:
    """The names of all groups that disks tell of."""
    return {one.group.name for one in _labels(found).values() if one.group is not None}


def locate(
    found: Mapping[str, Found],
    name: str,
    known: Location | None = None,
    listed: Collection[str] = (),
) -> Location | None:
    """Where the group of that name is; None where it is not on this node.

    `known` is where it was when it was here last, `listed` the disks that the operator named for
    it. Raises GroupRefused where it may not be used, and GroupSilent where a disk does not answer
    that may be its.
    """
    silent = sorted(path for path, one in found.items() if isinstance(one, Unanswered))
    told = _Told(_labels(found), name, known, frozenset(listed))
    if (group := told.group()) is None:
        if silent:
            raise errors.GroupSilent(name, silent)
        return None
    _require_usable(group)
    disks = dict(
        sorted((told.disk(uuid, group), uuid) for uuid in group.disk_uuids if told.has(uuid))
    )
    missing = frozenset(group.disk_uuids) - set(disks.values())
    was_missing = known is not None and missing <= known.missing
    if missing and silent and not (was_missing and not set(silent) & set(_paths(known))):
        raise errors.GroupSilent(name, silent)
    ignored = tuple(told.ignored(group, disks))
    uuids = tuple(disks.values())
    return Location(group.uuid, tuple(disks), missing, group.system_id, uuids, ignored)


def _labels(found: Mapping[str, Found]) -> dict[str, PhysicalLabel]:
    return {path: one for path, one in sorted(found.items()) if isinstance(one, PhysicalLabel)}


def _paths(known: Location | None) -> Iterable[str]:
    return () if known is None else known.disks


# The less, the better is the proof.
_Rank = tuple[bool, bool, Kind, bool, bool]


class _Told:
    """What all disks tell of one group, and how well each is proved to be its."""

    def __init__(
        self,
        labels: Mapping[str, PhysicalLabel],
        name: str,
        known: Location | None,
        listed: frozenset[str],
    ) -> None:
        self._labels = labels
        self._name = name
        self._known = None if known is None or _was_given_up(labels, name, known) else known
        self._listed = listed
        self._texts = {
            path: one.group
            for path, one in labels.items()
            # It also has to say that it is one of the group's disks itself.
            if one.group and one.group.name == name and one.uuid in one.group.disk_uuids
        }
        uuids = {one.uuid for one in self._texts.values()}
        self._ranks = {path: self._rank(path, one, uuids) for path, one in labels.items()}
        bearers: defaultdict[str, list[str]] = defaultdict(list)
        for path, one in labels.items():
            bearers[one.uuid].append(path)
        # Of disks that claim to be the same physical volume those that are proved best.
        self._bearers = {uuid: self._best(paths) for uuid, paths in bearers.items()}

    def group(self) -> Group | None:
        """The group as its best proved disks have it; None where none of them is believed.

        Raises GroupRefused where it cannot be told which of several is meant.
        """
        families = [one for one in self._families() if self._is_believed(one)]
        if not families:
            return None
        best = min(map(self._rank_of, families))
        meant = [one for one in families if self._rank_of(one) == best]
        texts = [self._texts[path] for family in meant for path in self._trusted(family)]
        if len({one.uuid for one in texts}) > 1:
            places: defaultdict[str, list[str]] = defaultdict(list)
            for path in sorted(path for family in meant for path in family):
                places[self._texts[path].uuid].append(path)
            said = "; ".join(f"{uuid} on {', '.join(at)}" for uuid, at in sorted(places.items()))
            raise errors.GroupRefused(
                self._name,
                f"there are {len(places)} of that name: {said}. Rename the one that is not meant"
                " (`vgrename UUID NAME`), or detach its disks",
            )
        # A disk that was away may bear older metadata.
        return max(texts, key=lambda group: group.seqno)

    def has(self, uuid: str) -> bool:
        """Whether a physical volume of the group is there."""
        return uuid in self._bearers

    def disk(self, uuid: str, group: Group) -> str:
        """Where it is; raises GroupRefused where that cannot be told."""
        at = self._bearers[uuid]
        if len(at) > 1:
            # What was copied was changed since, or its origin was.
            at = tuple(path for path in at if self._texts.get(path) == group) or at
        if len(at) > 1:
            raise errors.GroupRefused(
                self._name,
                f"{' and '.join(at)} are both its physical volume {uuid}, and one is a copy of the"
                " other. Detach the copy, or give it an identity of its own (`vgimportclone`)",
            )
        return at[0]

    def ignored(self, group: Group, disks: Collection[str]) -> Iterator[tuple[str, str]]:
        """The disks that claim to be the group's and are not among these, with the reason."""
        for path, one in self._labels.items():
            if path in disks:
                continue
            if one.uuid in group.disk_uuids:
                yield path, f"is a copy of {self.disk(one.uuid, group)}"
            elif one.group is not None and one.group.uuid == group.uuid:
                yield path, "has the group's UUID, and the group does not have it"
            elif one.group is not None and one.group.name == group.name:
                yield path, f"is of another group of that name ({one.group.uuid})"

    def _rank(self, path: str, label: PhysicalLabel, uuids: Collection[str]) -> _Rank:
        is_known = self._known is not None and self._known.has(path, label.uuid)
        is_active = not label.active_groups.isdisjoint(uuids)
        is_own = label.group is not None and label.group.has_own_tags
        return (not is_known, path not in self._listed, label.kind, not is_active, not is_own)

    def _best(self, paths: Sequence[str]) -> tuple[str, ...]:
        best = min(self._ranks[path] for path in paths)
        return tuple(path for path in paths if self._ranks[path] == best)

    def _families(self) -> list[set[str]]:
        """The disks that tell of a group of that name: together those with a disk in common."""
        families: list[tuple[set[str], set[tuple[str, str]]]] = []
        for paths in self._bearers.values():
            for path in paths:
                if (text := self._texts.get(path)) is None:
                    continue
                members = {(text.uuid, uuid) for uuid in text.disk_uuids}
                joined = [one for one in families if one[1] & members]
                families = [one for one in families if not one[1] & members]
                whole = set[str]({path}).union(*(one[0] for one in joined))
                families.append((whole, members.union(*(one[1] for one in joined))))
        return [one[0] for one in families]

    def _is_believed(self, family: Collection[str]) -> bool:
        """Whether such disks may be the group's at all."""
        if any(path in self._listed for path in family):
            return True
        if self._known is not None:
            # Another group may have taken its name, or a tenant written it.
            before = {*self._known.disk_uuids, *self._known.missing}
            return any(self._labels[path].uuid in before for path in family)
        worst = Kind.LOCAL if self._listed else Kind.ATTACHED
        return any(self._labels[path].kind <= worst for path in family)

    def _rank_of(self, family: Collection[str]) -> _Rank:
        ranks = [self._ranks[path] for path in family]
        known, listed, kind, active, own = zip(*ranks, strict=True)
        return (min(known), min(listed), min(kind), min(active), min(own))

    def _trusted(self, family: Collection[str]) -> list[str]:
        """Those whose metadata count: one that anybody wrote may name itself among the others.

        A disk with active volumes may bear older metadata, and counts more only beside copies.
        """
        has_copies = any(len(self._bearers[self._labels[path].uuid]) > 1 for path in family)
        proofs = 4 if has_copies else 3
        best = min(self._ranks[path][:proofs] for path in family)
        return [path for path in family if self._ranks[path][:proofs] == best]


def _was_given_up(labels: Mapping[str, PhysicalLabel], name: str, known: Location) -> bool:
    """Whether disks that were the group's are where they were, and are its no more.

    It was renamed or removed, or they were taken out, by hand.
    """
    there = [labels[path] for path in known.disks if path in labels]
    own = [one.group for one in there if one.uuid in known.disk_uuids and one.group is not None]
    if own:
        return not any(group.name == name and group.uuid == known.uuid for group in own)
    # Else it may be another's disk that has the path by now.
    return any(one.kind is Kind.LOCAL for one in there)


def _require_usable(group: Group) -> None:
    """Raise GroupRefused for what is not one node's alone (vgexport(8), lvmlockd(8)).

    Also where an lvm2 that speaks to a lock manager would use it: another node may change it
    between two looks, with no trace on the disks that Carver would wait for.
    """
    name = group.name
    if group.is_exported:
        raise errors.GroupRefused(name, f"it is exported; `vgimport {name}` makes it this node's")
    manager = "clvmd" if group.is_clustered else group.lock_type
    if manager not in ("", "none"):
        raise errors.GroupRefused(
            name,
            f"it is shared with other nodes by a lock manager ({manager}), which Carver does not"
            f" speak to; `vgchange --lock-type none {name}` makes it one node's alone, and"
            " docs/lvm2.md says how where the manager is gone",
        )
