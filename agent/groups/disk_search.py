"""Find the disks of a volume group by their labels, without lvm2, and rank disks that compete.

Why: Carver confines each lvm2 command to the disks of one group, so that a hung disk stops only its
own group. For that it must know the group's disks before lvm2 runs. But labels are only claims.
Disks of other drivers, of guests and of other nodes may bear the group's name, its UUID, or a copy
of one of its disks. lvm2 would believe the newest metadata that it sees.

Idea: a group is identified by its UUID, not by its name. Among the disks that claim to be the same
physical volume, or that claim the same group, the one with the best proofs wins:

    proof (the first that differs decides)            a copy or forgery rarely has it, because
    1. it was the group's disk before, and is         the kernel counts attachments (diskseq)
       still attached in the same way
    2. the operator listed it for the group           only the operator writes the configuration
    3. who may have written it: the node itself,      guests and tenants write their own volumes,
       the owner of a file or network disk, a guest   which rank last (lvm/candidate_devices.py)
    4. volumes of the group are active on it          only this node activates them
    5. lvm2's backup of the metadata has its UUID     the backup is on this node
    6. the metadata have Carver's tags                a forgery may have them, so this comes last

The search (`locate`) in steps:

1. Read the labels of all disks (lvm/disk_reader.py), and drop the last known location if the
   group's disks are still attached but no longer the group's.
2. Collect the disks whose metadata have the group's name. Disks that have a physical volume in
   common are a family: the same group, whichever disk was written last.
3. Drop the families that may not be the group at all, and keep the best proved ones. If several
   groups remain, raise GroupRefused: neither is used.
4. In the family that remains, the newest metadata of the trusted disks say which disks belong to
   the group. For each of these, take the best proved disk with its UUID.
5. Return the disks, the missing ones, and the disks that are ignored, with the reason for each. If
   a disk that may be the group's does not answer, raise GroupSilent instead.

What it would cost to do without: lvm2 would have to search all disks itself, so one hung disk would
stop all groups of the node; and a guest could take a group from the node by a label in its volume.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from agent.core import errors
from lvm import candidate_devices
from lvm.candidate_devices import Excluded, Why
from lvm.disk_reader import Found, Unanswered, Unreadable
from lvm.labels import Damaged, Group, Kind, PhysicalLabel

# Of a disk: who may have written it, the sequence number of its attachment, and its path.
_Attached = tuple[Kind, str, str]


@dataclass(frozen=True)
class Location:
    """A group's UUID, and the paths of its disks that are there."""

    uuid: str
    disks: tuple[str, ...]
    # The UUIDs of its missing disks.
    missing: frozenset[str] = frozenset()
    # Its node's system id (lvmsystemid(7)); empty for any.
    system_id: str = ""
    # The UUIDs of `disks`, in the same order.
    disk_uuids: tuple[str, ...] = ()
    # The paths of disks that claim to be the group's but are ignored, each with the reason.
    ignored: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    # How its disks are or were last attached, by their UUIDs.
    attached: Mapping[str, _Attached] = field(default_factory=dict, compare=False)

    def has(self, path: str, label: PhysicalLabel) -> bool:
        """Whether this physical volume of the group is at the same device as before."""
        now = (label.kind, label.sequence, path)
        is_at = (path, label.uuid) in zip(self.disks, self.disk_uuids, strict=False)
        return is_at and self.attached.get(label.uuid, now) == now

    def kind_of(self, uuid: str) -> Kind:
        """Who may have written a disk; of an unknown one, who may have written the others."""
        kinds = {one: kind for one, (kind, _, _) in self.attached.items()}
        return kinds.get(uuid, max(kinds.values(), default=Kind.FOREIGN))


def names_of(found: Mapping[str, Found]) -> set[str]:
    """The names of all groups in the labels of disks."""
    return {one.group.name for one in _labels(found).values() if one.group is not None}


def claims(found: Mapping[str, Found], name: str) -> Iterator[tuple[str, str]]:
    """The disks that claim to be of a group that `locate` did not find."""
    for path, one in _labels(found).items():
        if one.group is not None and one.group.name == name:
            yield (
                path,
                "bears its name, and nothing else proves that it is the group's: if so, name it in"
                " `devices`, or restart Carver where the group moved to other disks",
            )


def unknown(
    found: Mapping[str, Found], uuids: Collection[str], own: Collection[str]
) -> Iterator[tuple[str, str]]:
    """The disks that may have volumes of Carver's in a group with none of these UUIDs, and why.

    `own` are disks that are known to be of such a group, whatever they say now. Left out are groups
    without Carver's tags, as the operator's, and disks of guests and other drivers (Kind.FOREIGN),
    where no group is ever found.
    """
    labels = {path: one for path, one in _labels(found).items() if one.kind is not Kind.FOREIGN}
    members = {uuid for one in labels.values() if one.group for uuid in one.group.disk_uuids}
    for path, one in sorted(found.items()):
        if isinstance(one, PhysicalLabel):
            why = _unknown_group(one, uuids, members) if path in labels else ""
        elif candidate_devices.is_foreign(path) or (
            isinstance(one, Excluded) and one.why is not Why.UNKNOWN
        ):
            why = ""
        else:
            why = str(one)
        is_of_another = isinstance(one, PhysicalLabel) and one.group is not None
        if why and (is_of_another or path not in own):
            yield path, why


def _unknown_group(label: PhysicalLabel, uuids: Collection[str], members: Collection[str]) -> str:
    """Why a disk may be of a group of Carver's with none of these UUIDs; empty if it is not.

    `members` are the disks that some group names as its own.
    """
    if (group := label.group) is not None:
        is_known = group.uuid in uuids or not group.has_own_tags
        return "" if is_known else f"volume group {group.name} ({group.uuid}) is not in use here"
    may_be_used = label.is_used or bool(label.damage)
    is_unknown = may_be_used and label.uuid not in members
    return "it does not say of which volume group it is" if is_unknown else ""


def locate(
    found: Mapping[str, Found],
    name: str,
    known: Location | None = None,
    listed: Collection[str] = (),
    *,
    sequences: Callable[[Collection[str]], Mapping[str, str]] = lambda _paths: {},
    backed_up: Callable[[], str] = lambda: "",
) -> Location | None:
    """Locate the group of that name; None if it is not on this node.

    `known` is its last location, `listed` the disks that the operator named for it; `sequences`
    is `lvm.disk_reader.Disks.sequences`, `backed_up` returns the UUID of the group of that name in
    lvm2's backups. Raises GroupRefused if it may not be used, GroupSilent if a disk that may be its
    does not answer.
    """
    silent = sorted(path for path, one in found.items() if isinstance(one, Unanswered))
    unreadable = frozenset[str]()
    if known is not None:
        now = sequences({*known.disks, *(path for _, _, path in known.attached.values())})
        if _was_given_up(found, name, known, now):
            known = None
        else:
            unreadable = _unreadable(found, known, now)
    labels = _Labels(_labels(found), name, known, frozenset(listed), unreadable, backed_up)
    if (group := labels.group()) is None:
        if silent:
            raise errors.GroupSilent(name, silent)
        return None
    _require_usable(group)
    disks = labels.disks(group)
    missing = frozenset(group.disk_uuids) - set(disks.values())
    was_missing = known is not None and missing <= known.missing
    # Where it missed the same before, the silent disks are others', unless they were its own.
    is_known_silent = known is not None and not set(silent).isdisjoint(known.disks)
    if missing and silent and (is_known_silent or not was_missing):
        raise errors.GroupSilent(name, silent)
    return Location(
        group.uuid,
        tuple(disks),
        missing,
        group.system_id,
        tuple(disks.values()),
        tuple(labels.ignored(group, disks)),
        labels.attached(group, disks),
    )


def _labels(found: Mapping[str, Found]) -> dict[str, PhysicalLabel]:
    return {path: one for path, one in sorted(found.items()) if isinstance(one, PhysicalLabel)}


# The lower, the better proved.
_Rank = tuple[bool, bool, Kind, bool, bool, bool]
# The first so many say who may have written the metadata.
_TRUST = 3


class _Labels:
    """The labels that mention one group, each ranked by how well it is proved."""

    def __init__(
        self,
        labels: Mapping[str, PhysicalLabel],
        name: str,
        known: Location | None,
        listed: frozenset[str],
        unreadable: Collection[str],
        backed_up: Callable[[], str],
    ) -> None:
        self._unreadable = unreadable
        self._labels = labels
        self._name = name
        self._known = known
        self._listed = listed
        self._texts = {
            path: one.group
            for path, one in labels.items()
            # Its own UUID must be among the group's disks.
            if one.group and one.group.name == name and one.uuid in one.group.disk_uuids
        }
        uuids = {one.uuid for one in self._texts.values()}
        own = backed_up() if len(uuids) > 1 else ""
        self._ranks = {path: self._rank(path, one, uuids, own) for path, one in labels.items()}
        bearers: defaultdict[str, list[str]] = defaultdict(list)
        for path, one in labels.items():
            bearers[one.uuid].append(path)
        # Of disks that claim to be the same physical volume, the best proved.
        self._bearers = {uuid: self._best(paths) for uuid, paths in bearers.items()}

    def group(self) -> Group | None:
        """The group by its best proved disks; None if none is trustworthy.

        Raises GroupRefused if several groups are equally proved.
        """
        families = [one for one in self._families() if self._is_believed(one)]
        if not families:
            return None
        best = min(map(self._rank_of, families))
        meant = [one for one in families if self._rank_of(one) == best]
        trusted = [path for family in meant for path in self._trusted(family)]
        if len({self._texts[path].uuid for path in trusted}) > 1:
            places: defaultdict[str, list[str]] = defaultdict(list)
            for path in sorted(path for family in meant for path in family):
                places[self._texts[path].uuid].append(path)
            said = "; ".join(f"{uuid} on {', '.join(at)}" for uuid, at in sorted(places.items()))
            raise errors.GroupRefused(
                self._name,
                f"there are {len(places)} of that name: {said}. Rename the one that is not meant"
                f" (`vgrename UUID NAME`), detach its disks, or keep lvm2 from them {_FILTER}",
            )
        # A disk that was missing may bear older metadata; of equally new ones the better proved.
        newest = min(trusted, key=lambda at: (-self._texts[at].seqno, self._ranks[at], at))
        if self._known is None and best[_TRUST - 1] > Kind.LOCAL:
            self._require_agreed(newest, trusted)
        return self._texts[newest]

    def _require_agreed(self, newest: str, trusted: Iterable[str]) -> None:
        """Raise GroupRefused if one of these disks does not name the one with the newest metadata.

        Local disks are written by this node only: there the newest counts, as for lvm2.
        """
        last = self._texts[newest]
        for path in trusted:
            text = self._texts[path]
            is_named = text.seqno < last.seqno and self._labels[newest].uuid in text.disk_uuids
            if text != last and not is_named:
                raise errors.GroupRefused(
                    self._name,
                    f"{path} and {newest} claim to be its disks, and contradict each other. Detach"
                    f" the one that is not meant, or keep lvm2 from it {_FILTER}",
                )

    def disks(self, group: Group) -> Mapping[str, str]:
        """The UUIDs of the disks that are there, by their paths; raises GroupRefused."""
        found, unclear = dict[str, str](), dict[str, tuple[str, ...]]()
        for uuid in group.disk_uuids:
            at = self._claims(uuid, group)
            if len(at) == 1:
                found[at[0]] = uuid
            elif at:
                unclear[uuid] = at
        # A working group is not refused for a doubtful disk.
        if unclear and (self._known is None or not found):
            uuid, at = next(iter(unclear.items()))
            raise errors.GroupRefused(
                self._name,
                f"{' and '.join(at)} are both its physical volume {uuid}, and one is a copy of the"
                " other. Detach the copy, give it an identity of its own (`vgimportclone`), or keep"
                f" lvm2 from it {_FILTER}",
            )
        return dict(sorted(found.items()))

    def ignored(self, group: Group, disks: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """The disks that claim to be the group's but are not in `disks`, with the reason."""
        paths = {uuid: path for path, uuid in disks.items()}
        for path, one in self._labels.items():
            if path in disks:
                continue
            if one.uuid in paths:
                yield path, f"is a copy of {paths[one.uuid]}"
            elif one.uuid in group.disk_uuids:
                why = "and is attached otherwise, or its metadata are newer than the group's"
                yield path, f"claims to be the missing disk {one.uuid}, {why}"
            elif one.group is not None and one.group.uuid == group.uuid:
                yield path, "has the group's UUID, and the group does not have it"
            elif one.group is not None and one.group.name == group.name:
                yield path, f"is of another group of that name ({one.group.uuid})"

    def attached(self, group: Group, disks: Mapping[str, str]) -> Mapping[str, _Attached]:
        """How the group's disks are or were last attached, by their UUIDs."""
        before = {} if self._known is None else self._known.attached
        kept = {uuid: one for uuid, one in before.items() if uuid in group.disk_uuids}
        now = {path: self._labels[path] for path in disks}
        return kept | {one.uuid: (one.kind, one.sequence, path) for path, one in now.items()}

    def _claims(self, uuid: str, group: Group) -> tuple[str, ...]:
        """The best proved disks that may be a physical volume of the group."""
        every = [path for path, one in self._labels.items() if one.uuid == uuid]
        may_be = [path for path in every if self._may_be_of(group, path)]
        if not may_be:
            return ()
        at = self._best(may_be)
        single = [one[0] for one in self._bearers.values() if len(one) == 1]
        if len(at) == 1 or not any(self._texts.get(path) == group for path in single):
            return at
        # The original was written to together with the group's other disks, the copy was not.
        return tuple(path for path in at if self._texts.get(path) == group) or at

    def _may_be_of(self, group: Group, path: str) -> bool:
        """Whether a disk may be one of the group's, by its label and its attachment.

        lvm2 would believe the newest metadata that it sees. This node writes to all disks that are
        there, so newer metadata were written elsewhere.
        """
        label, text = self._labels[path], self._labels[path].group
        if self._known is not None and self._known.has(path, label):
            return True
        if text is not None and (text.name, text.uuid) != (group.name, group.uuid):
            return False
        is_newer = text is not None and text.seqno > group.seqno
        if self._known is None:
            return not (is_newer and label.kind is Kind.FOREIGN)
        return not is_newer and (label.uuid not in self._before or self._may_return(path))

    @property
    def _before(self) -> Collection[str]:
        """The UUIDs of the group's disks when it was located last."""
        return () if self._known is None else {*self._known.disk_uuids, *self._known.missing}

    def _may_return(self, path: str) -> bool:
        """Whether a disk may be a returning one of the group: attached no less safely.

        And anew, if the known one is still attached and cannot be read: one that was there before
        is not that disk again, but a copy of it, or what a device that failed has below.
        """
        label = self._labels[path]
        if self._known is None or label.kind > self._known.kind_of(label.uuid):
            return False
        if label.uuid not in self._unreadable:
            return True
        sequence = self._known.attached[label.uuid][1]
        return _number(label.sequence) > _number(sequence)

    def _rank(self, path: str, label: PhysicalLabel, uuids: Collection[str], own: str) -> _Rank:
        group = label.group
        return (
            self._known is None or not self._known.has(path, label),
            path not in self._listed,
            label.kind,
            label.active_groups.isdisjoint(uuids),
            group is None or group.uuid != own,
            group is None or not group.has_own_tags,
        )

    def _best(self, paths: Sequence[str]) -> tuple[str, ...]:
        best = min(self._ranks[path] for path in paths)
        return tuple(path for path in paths if self._ranks[path] == best)

    def _families(self) -> list[set[str]]:
        """The disks that name the group, in sets that have a physical volume in common."""
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
        """Whether these disks may be the group's at all."""
        if any(path in self._listed for path in family):
            return True
        if self._known is not None:
            # Another group may have got its name, or a tenant may have written it.
            return any(
                self._known.has(path, self._labels[path])
                or (
                    self._texts[path].uuid == self._known.uuid
                    and self._labels[path].uuid in self._before
                    and self._may_return(path)
                )
                for path in family
            )
        worst = Kind.LOCAL if self._listed else Kind.ATTACHED
        return any(self._labels[path].kind <= worst for path in family)

    def _rank_of(self, family: Collection[str]) -> _Rank:
        ranks = [self._ranks[path] for path in family]
        known, listed, kind, active, backed, own = zip(*ranks, strict=True)
        return (min(known), min(listed), min(kind), min(active), min(backed), min(own))

    def _trusted(self, family: Collection[str]) -> list[str]:
        """The disks whose metadata count, since a forged one may name itself among the others.

        If others may write to them, or there are copies, which then do not count: those with active
        volumes, and the disks that these name.
        """
        best = min(self._ranks[path][:_TRUST] for path in family)
        trusted = [path for path in family if self._ranks[path][:_TRUST] == best]
        copied = [path for path in trusted if len(self._bearers[self._labels[path].uuid]) > 1]
        if not copied and best[-1] is Kind.LOCAL:
            return trusted
        trusted = [path for path in trusted if path not in copied] or trusted
        first = min(self._ranks[path][: _TRUST + 1] for path in trusted)
        named = [path for path in trusted if self._ranks[path][: _TRUST + 1] == first]
        left = [path for path in trusted if path not in named]
        while joining := [path for path in left if self._is_named(path, named)]:
            named += joining
            left = [path for path in left if path not in joining]
        return named

    def _is_named(self, path: str, by: Iterable[str]) -> bool:
        return any(self._labels[path].uuid in self._texts[one].disk_uuids for one in by)


# The remedy for an ignored disk, which is left as it is.
REMEDY = "detach it, or keep lvm2 from it (`global_filter` in lvm.conf(5), or lvmdevices(8))"
_FILTER = "(`global_filter` in lvm.conf(5), or lvmdevices(8))"


def _unreadable(
    found: Mapping[str, Found], known: Location, sequences: Mapping[str, str]
) -> frozenset[str]:
    """The UUIDs of the group's disks that are attached as before and cannot be read now."""
    return frozenset(
        uuid
        for uuid, (_, sequence, path) in known.attached.items()
        if sequences.get(path) == sequence and isinstance(found.get(path), Unreadable | Damaged)
    )


def _number(sequence: str) -> int:
    """A sequence number; 0 where the kernel has none."""
    return int(sequence) if sequence.isdigit() else 0


def _was_given_up(
    found: Mapping[str, Found], name: str, known: Location, sequences: Mapping[str, str]
) -> bool:
    """Whether the group's disks are still there but no longer its.

    It was renamed or removed by hand, or they were removed from it. A blank disk proves that, too;
    an unreadable or missing one does not.
    """
    labels, away = _labels(found), False
    for path, uuid in zip(known.disks, known.disk_uuids, strict=False):
        _, sequence, _ = known.attached.get(uuid, (None, sequences.get(path), path))
        if path not in sequences or sequences[path] != sequence:
            away = True
            continue
        away = away or isinstance(found.get(path), Unreadable | Damaged)
        label = labels.get(path)
        if label is None or label.group is None or label.group.uuid != known.uuid:
            continue
        # Its own metadata have its present name.
        return label.group.name != name
    return not away


def _require_usable(group: Group) -> None:
    """Raise GroupRefused for an exported or a shared group (vgexport(8), lvmlockd(8)).

    Another node may change a shared group at any time, without a trace on the disks.
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
            " docs/operations.md says how where the manager is gone",
        )
