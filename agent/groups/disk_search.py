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
from lvm.candidate_devices import Excluded, ExclusionReason
from lvm.disk_reader import Found, Unanswered, Unreadable
from lvm.labels import Damaged, Group, Kind, PhysicalLabel

# Type of how a disk is connected: who may have written the disk, the kernel's sequence number of
# the disk (`lvm.disk_reader.Disks.sequences`), and the disk's path.
_Attached = tuple[Kind, str, str]


@dataclass(frozen=True)
class Location:
    """Location of a volume group: the group's UUID, and the paths of the group's present disks."""

    uuid: str
    disks: tuple[str, ...]
    # The UUIDs of the group's missing disks.
    missing: frozenset[str] = frozenset()
    # The system id of the node that owns the group (lvmsystemid(7)); empty if any node may use the
    # group.
    system_id: str = ""
    # The UUIDs of the volume group's present disks, in the order of `disks`.
    disk_uuids: tuple[str, ...] = ()
    # The paths of disks that claim to be the group's but are ignored, each with the reason.
    ignored: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    # Who may have written each disk of the group, the disk's sequence number and its path, by the
    # disk's UUID. For a missing disk, these are of the time when the disk was last present.
    attached: Mapping[str, _Attached] = field(default_factory=dict, compare=False)

    def has(self, path: str, label: PhysicalLabel) -> bool:
        """Whether the disk at `path` is the same as when the volume group was located.

        The path, the UUID, the sequence number and the kind of the disk must be the same.
        """
        now = (label.kind, label.sequence, path)
        is_at = (path, label.uuid) in zip(self.disks, self.disk_uuids, strict=False)
        return is_at and self.attached.get(label.uuid, now) == now

    def kind_of(self, uuid: str) -> Kind:
        """Return who may have written a disk of the volume group, by the disk's UUID.

        For a disk that was never present, it is the least trusted kind among the group's disks.
        """
        kinds = {disk_uuid: kind for disk_uuid, (kind, _, _) in self.attached.items()}
        return kinds.get(uuid, max(kinds.values(), default=Kind.FOREIGN))


def names_of(scanned_disks: Mapping[str, Found]) -> set[str]:
    """Return the names of all volume groups in the labels of scanned disks."""
    return {
        label.group.name for label in _labels(scanned_disks).values() if label.group is not None
    }


def claims(scanned_disks: Mapping[str, Found], name: str) -> Iterator[tuple[str, str]]:
    """Yield the disks whose labels name a volume group that `locate` did not find.

    Each disk is a pair: the disk's path, and a text for the log that says what is wrong with it.
    """
    for path, label in _labels(scanned_disks).items():
        if label.group is not None and label.group.name == name:
            yield (
                path,
                "bears its name, and nothing else proves that it is the group's: if so, name it in"
                " `devices`, or restart Carver where the group moved to other disks",
            )


def unknown(
    scanned_disks: Mapping[str, Found], uuids: Collection[str], own_paths: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield the disks that may hold volumes of Carver's in a volume group that is not in use here.

    Each disk is a pair: the disk's path, and the reason. Disks that cannot be read are included.
    `uuids` are the UUIDs of the volume groups in use. `own_paths` are the paths of disks that are
    known to be in one of these groups, although their labels may not say so now.

    Left out are disks of groups without Carver's tags, which are the operator's, and disks of
    guests and other drivers (Kind.FOREIGN), on which Carver never searches for a group.
    """
    labels = {
        path: label
        for path, label in _labels(scanned_disks).items()
        if label.kind is not Kind.FOREIGN
    }
    members = {uuid for label in labels.values() if label.group for uuid in label.group.disk_uuids}
    for path, disk in sorted(scanned_disks.items()):
        if isinstance(disk, PhysicalLabel):
            why = _unknown_group(disk, uuids, members) if path in labels else ""
        elif candidate_devices.is_foreign(path) or (
            isinstance(disk, Excluded) and disk.reason is not ExclusionReason.UNKNOWN
        ):
            why = ""
        else:
            why = str(disk)
        is_of_another = isinstance(disk, PhysicalLabel) and disk.group is not None
        if why and (is_of_another or path not in own_paths):
            yield path, why


def _unknown_group(label: PhysicalLabel, uuids: Collection[str], members: Collection[str]) -> str:
    """Return why a disk may be in a volume group of Carver's that is not in use; empty if not.

    A volume group is in use if its UUID is in `uuids`. `members` are the UUIDs of all disks that
    the metadata on some disk list as disks of a group.
    """
    if (group := label.group) is not None:
        is_known = group.uuid in uuids or not group.has_own_tags
        return "" if is_known else f"volume group {group.name} ({group.uuid}) is not in use here"
    may_be_used = label.is_used or bool(label.damage)
    is_unknown = may_be_used and label.uuid not in members
    return "it does not say of which volume group it is" if is_unknown else ""


def locate(
    scanned_disks: Mapping[str, Found],
    name: str,
    last_location: Location | None = None,
    listed_disks: Collection[str] = (),
    *,
    sequences: Callable[[Collection[str]], Mapping[str, str]] = lambda _paths: {},
    backed_up: Callable[[], str] = lambda: "",
) -> Location | None:
    """Locate the volume group called `name`; return None if the group is not on this node.

    `scanned_disks` is the result of a scan, `last_location` the group's last location.
    `listed_disks` are the disks that the operator named for the group. `sequences` is
    `lvm.disk_reader.Disks.sequences`. `backed_up` returns the UUID of the group of that name in
    lvm2's backups.

    Raises GroupRefused if the group must not be used: it is exported or shared, or several groups
    or disks are equally well proved. Raises GroupSilent if the group, or one of its disks, was not
    found, and a disk that may be the group's does not answer.
    """
    silent = sorted(path for path, disk in scanned_disks.items() if isinstance(disk, Unanswered))
    unreadable = frozenset[str]()
    if last_location is not None:
        now = sequences(
            {*last_location.disks, *(path for _, _, path in last_location.attached.values())}
        )
        if _was_given_up(scanned_disks, name, last_location, now):
            last_location = None
        else:
            unreadable = _unreadable(scanned_disks, last_location, now)
    labels = _Labels(
        _labels(scanned_disks), name, last_location, frozenset(listed_disks), unreadable, backed_up
    )
    if (group := labels.group()) is None:
        if silent:
            raise errors.GroupSilent(name, silent)
        return None
    _require_usable(group)
    disks = labels.disks(group)
    missing = frozenset(group.disk_uuids) - set(disks.values())
    was_missing = last_location is not None and missing <= last_location.missing
    # Assume that the disks which do not answer belong to other groups, if the same disks of this
    # group were missing before, unless a disk of this group is among those that do not answer.
    is_known_silent = last_location is not None and not set(silent).isdisjoint(last_location.disks)
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


def _labels(scanned_disks: Mapping[str, Found]) -> dict[str, PhysicalLabel]:
    return {
        path: label
        for path, label in sorted(scanned_disks.items())
        if isinstance(label, PhysicalLabel)
    }


# Type of a disk's rank: how well the disk is proved to be the group's. A rank has one element for
# each proof in this module's docstring. A lower rank is a better proof.
_Rank = tuple[bool, bool, Kind, bool, bool, bool]
# Number of elements at the start of a rank that say who may have written the disk's metadata.
_TRUST = 3


class _Labels:
    """The labels of scanned disks, each ranked by the proofs that the disk is a volume group's."""

    def __init__(
        self,
        labels: Mapping[str, PhysicalLabel],
        name: str,
        last_location: Location | None,
        listed_disks: frozenset[str],
        unreadable: Collection[str],
        backed_up: Callable[[], str],
    ) -> None:
        self._unreadable = unreadable
        self._labels = labels
        self._name = name
        self._known = last_location
        self._listed = listed_disks
        self._texts = {
            path: label.group
            for path, label in labels.items()
            # Count a disk only if its own UUID is among the disks in its copy of the metadata.
            if label.group and label.group.name == name and label.uuid in label.group.disk_uuids
        }
        uuids = {label.uuid for label in self._texts.values()}
        backup_uuid = backed_up() if len(uuids) > 1 else ""
        self._ranks = {
            path: self._rank(path, label, uuids, backup_uuid) for path, label in labels.items()
        }
        bearers: defaultdict[str, list[str]] = defaultdict(list)
        for path, label in labels.items():
            bearers[label.uuid].append(path)
        # The paths of the best proved disks with each UUID. Several disks with one UUID are copies
        # of the same physical volume.
        self._bearers = {uuid: self._best_ranked(paths) for uuid, paths in bearers.items()}

    def group(self) -> Group | None:
        """Return the volume group by the newest metadata of its best proved disks.

        None if no disk may be the group's. Raises GroupRefused if several groups are equally well
        proved, or if the metadata of trusted disks contradict each other (`_require_agreed`).
        """
        families = [family for family in self._families() if self._is_believed(family)]
        if not families:
            return None
        best_rank = min(map(self._rank_of, families))
        best_families = [family for family in families if self._rank_of(family) == best_rank]
        trusted = [path for family in best_families for path in self._trusted(family)]
        if len({self._texts[path].uuid for path in trusted}) > 1:
            places: defaultdict[str, list[str]] = defaultdict(list)
            for path in sorted(path for family in best_families for path in family):
                places[self._texts[path].uuid].append(path)
            groups = "; ".join(
                f"{uuid} on {', '.join(paths)}" for uuid, paths in sorted(places.items())
            )
            raise errors.GroupRefused(
                self._name,
                f"there are {len(places)} of that name: {groups}. Rename the one that is not"
                f" meant (`vgrename UUID NAME`), detach its disks, or keep lvm2 from them"
                f" {_FILTER}",
            )
        # Take the newest metadata, since a disk that was missing may bear older metadata. Among
        # disks with equally new metadata, take the best proved disk's.
        newest = min(trusted, key=lambda path: (-self._texts[path].seqno, self._ranks[path], path))
        if self._known is None and best_rank[_TRUST - 1] > Kind.LOCAL:
            self._require_agreed(newest, trusted)
        return self._texts[newest]

    def _require_agreed(self, newest: str, trusted: Iterable[str]) -> None:
        """Raise GroupRefused if the metadata of one of these disks contradict the newest metadata.

        Metadata contradict the newest if they differ, unless they are older and list the disk that
        bears the newest. The caller leaves the check out for local disks, which only this node
        writes, and for a group that was located before: there the newest metadata count, as for
        lvm2.
        """
        newest_text = self._texts[newest]
        for path in trusted:
            text = self._texts[path]
            is_named = (
                text.seqno < newest_text.seqno and self._labels[newest].uuid in text.disk_uuids
            )
            if text != newest_text and not is_named:
                raise errors.GroupRefused(
                    self._name,
                    f"{path} and {newest} claim to be its disks, and contradict each other. Detach"
                    f" the one that is not meant, or keep lvm2 from it {_FILTER}",
                )

    def disks(self, group: Group) -> Mapping[str, str]:
        """Return the UUIDs of the volume group's present disks, by the disks' paths.

        Raises GroupRefused if two disks are copies of each other and equally well proved. If the
        group was located before and has other disks, such disks are left out instead.
        """
        present, unclear = dict[str, str](), dict[str, tuple[str, ...]]()
        for uuid in group.disk_uuids:
            paths = self._claims(uuid, group)
            if len(paths) == 1:
                present[paths[0]] = uuid
            elif paths:
                unclear[uuid] = paths
        # Do not refuse a group that was located before because of a doubtful disk.
        if unclear and (self._known is None or not present):
            uuid, paths = next(iter(unclear.items()))
            raise errors.GroupRefused(
                self._name,
                f"{' and '.join(paths)} are both its physical volume {uuid}, and one is a copy of"
                " the other. Detach the copy, give it an identity of its own (`vgimportclone`), or"
                f" keep lvm2 from it {_FILTER}",
            )
        return dict(sorted(present.items()))

    def ignored(self, group: Group, disks: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Yield the disks that claim to be the volume group's but are not in `disks`.

        Each disk is a pair: the disk's path, and the reason.
        """
        paths = {uuid: path for path, uuid in disks.items()}
        for path, label in self._labels.items():
            if path in disks:
                continue
            if label.uuid in paths:
                yield path, f"is a copy of {paths[label.uuid]}"
            elif label.uuid in group.disk_uuids:
                why = "and is attached otherwise, or its metadata are newer than the group's"
                yield path, f"claims to be the missing disk {label.uuid}, {why}"
            elif label.group is not None and label.group.uuid == group.uuid:
                yield path, "has the group's UUID, and the group does not have it"
            elif label.group is not None and label.group.name == group.name:
                yield path, f"is of another group of that name ({label.group.uuid})"

    def attached(self, group: Group, disks: Mapping[str, str]) -> Mapping[str, _Attached]:
        """Return kind, sequence number and path of each disk of a volume group, by the disk's UUID.

        The kind says who may have written the disk.

        For a missing disk, they are those of the time when the disk was last present.
        """
        last_attached = {} if self._known is None else self._known.attached
        members_attached = {
            uuid: attached for uuid, attached in last_attached.items() if uuid in group.disk_uuids
        }
        present_labels = {path: self._labels[path] for path in disks}
        return members_attached | {
            label.uuid: (label.kind, label.sequence, path) for path, label in present_labels.items()
        }

    def _claims(self, uuid: str, group: Group) -> tuple[str, ...]:
        """Return the paths of the best proved disks that may be the physical volume `uuid`.

        There are several if disks are copies of each other, and none if the disk is missing.
        """
        bearers = [path for path, label in self._labels.items() if label.uuid == uuid]
        candidates = [path for path in bearers if self._may_be_of(group, path)]
        if not candidates:
            return ()
        best_paths = self._best_ranked(candidates)
        uncopied_paths = [paths[0] for paths in self._bearers.values() if len(paths) == 1]
        if len(best_paths) == 1 or not any(
            self._texts.get(path) == group for path in uncopied_paths
        ):
            return best_paths
        # Prefer the disks with the group's present metadata. They are the originals: they were
        # written together with the group's other disks, and a copy was not.
        return tuple(path for path in best_paths if self._texts.get(path) == group) or best_paths

    def _may_be_of(self, group: Group, path: str) -> bool:
        """Whether a disk may be in the volume group, by its label and how it is connected.

        A disk with newer metadata than the group's is refused, unless the group was not located
        before and the disk is no guest's. This node writes to all present disks of the group, so
        newer metadata were written elsewhere; lvm2 would believe the newest metadata that it sees.
        """
        label, text = self._labels[path], self._labels[path].group
        if self._known is not None and self._known.has(path, label):
            return True
        if text is not None and (text.name, text.uuid) != (group.name, group.uuid):
            return False
        is_newer = text is not None and text.seqno > group.seqno
        if self._known is None:
            return not (is_newer and label.kind is Kind.FOREIGN)
        return not is_newer and (label.uuid not in self._last_uuids or self._may_return(path))

    @property
    def _last_uuids(self) -> Collection[str]:
        """UUIDs of the volume group's disks at its last location, missing disks included."""
        return () if self._known is None else {*self._known.disk_uuids, *self._known.missing}

    def _may_return(self, path: str) -> bool:
        """Whether a disk may be one of the volume group's disks that was missing and came back.

        The disk's kind must not be less trusted than before. If the known disk with this UUID is
        still connected and cannot be read, the disk must have been connected after the known disk.
        A disk that was connected earlier is a copy, or lies below a device that failed.
        """
        label = self._labels[path]
        if self._known is None or label.kind > self._known.kind_of(label.uuid):
            return False
        if label.uuid not in self._unreadable:
            return True
        sequence = self._known.attached[label.uuid][1]
        return _number(label.sequence) > _number(sequence)

    def _rank(
        self, path: str, label: PhysicalLabel, uuids: Collection[str], backup_uuid: str
    ) -> _Rank:
        """Return the rank of a disk: how well the disk is proved to be the volume group's.

        `uuids` are the UUIDs of all groups of this name, `backup_uuid` is the one in lvm2's backup.
        """
        group = label.group
        return (
            self._known is None or not self._known.has(path, label),
            path not in self._listed,
            label.kind,
            label.active_groups.isdisjoint(uuids),
            group is None or group.uuid != backup_uuid,
            group is None or not group.has_own_tags,
        )

    def _best_ranked(self, paths: Sequence[str]) -> tuple[str, ...]:
        """Return those of the paths whose disks have the best rank."""
        best_rank = min(self._ranks[path] for path in paths)
        return tuple(path for path in paths if self._ranks[path] == best_rank)

    def _families(self) -> list[set[str]]:
        """Divide the disks that bear the volume group's name into families, that is, sets of disks.

        Two disks are in the same family if their metadata are of the same group UUID and list a
        physical volume in common, or if a third disk of the family links them so.
        """
        families: list[tuple[set[str], set[tuple[str, str]]]] = []
        for paths in self._bearers.values():
            for path in paths:
                if (text := self._texts.get(path)) is None:
                    continue
                members = {(text.uuid, uuid) for uuid in text.disk_uuids}
                joined_families = [family for family in families if family[1] & members]
                families = [family for family in families if not family[1] & members]
                paths_of_family = set[str]({path}).union(*(family[0] for family in joined_families))
                families.append(
                    (paths_of_family, members.union(*(family[1] for family in joined_families)))
                )
        return [family[0] for family in families]

    def _is_believed(self, family: Collection[str]) -> bool:
        """Whether a family of disks may belong to the volume group at all.

        1. A family with a disk that the operator listed may.
        2. If the group was located before, a family may if it has one of the disks known from then,
           or a known disk that was missing and came back.
        3. Otherwise a family may if it has a disk of a trusted kind: a local disk, or if the
           operator listed no disk, also a file or network disk.
        """
        if any(path in self._listed for path in family):
            return True
        if self._known is not None:
            # Count only disks known from before: the group's name on other disks may be another
            # group's, or written by a tenant.
            return any(
                self._known.has(path, self._labels[path])
                or (
                    self._texts[path].uuid == self._known.uuid
                    and self._labels[path].uuid in self._last_uuids
                    and self._may_return(path)
                )
                for path in family
            )
        worst_kind = Kind.LOCAL if self._listed else Kind.ATTACHED
        return any(self._labels[path].kind <= worst_kind for path in family)

    def _rank_of(self, family: Collection[str]) -> _Rank:
        """Return the rank of a family of disks: for each proof, the best among the disks."""
        ranks = [self._ranks[path] for path in family]
        was_known, listed, kind, active, backed_up, has_tags = zip(*ranks, strict=True)
        return (min(was_known), min(listed), min(kind), min(active), min(backed_up), min(has_tags))

    def _trusted(self, family: Collection[str]) -> list[str]:
        """Return the disks of a family whose metadata are trusted.

        A tenant may have forged metadata that make a disk one of the family, so:

        1. Take the disks that are best proved by who may have written their metadata.
        2. If these are local disks without copies, they are the result.
        3. Otherwise leave out disks that have copies, unless all disks have copies. Take the disks
           with active volumes if there are any, else all.
        4. Add each disk that the metadata of the result name, until no more is added.
        """
        best_proof = min(self._ranks[path][:_TRUST] for path in family)
        trusted = [path for path in family if self._ranks[path][:_TRUST] == best_proof]
        copied = [path for path in trusted if len(self._bearers[self._labels[path].uuid]) > 1]
        if not copied and best_proof[-1] is Kind.LOCAL:
            return trusted
        trusted = [path for path in trusted if path not in copied] or trusted
        best_rank = min(self._ranks[path][: _TRUST + 1] for path in trusted)
        counted = [path for path in trusted if self._ranks[path][: _TRUST + 1] == best_rank]
        remaining = [path for path in trusted if path not in counted]
        while joining := [path for path in remaining if self._is_named(path, counted)]:
            counted += joining
            remaining = [path for path in remaining if path not in joining]
        return counted

    def _is_named(self, path: str, naming_paths: Iterable[str]) -> bool:
        return any(
            self._labels[path].uuid in self._texts[namer].disk_uuids for namer in naming_paths
        )


# Advice in messages about a disk that Carver ignores, and leaves unchanged.
REMEDY = "detach it, or keep lvm2 from it (`global_filter` in lvm.conf(5), or lvmdevices(8))"
_FILTER = "(`global_filter` in lvm.conf(5), or lvmdevices(8))"


def _unreadable(
    scanned_disks: Mapping[str, Found], last_location: Location, sequences: Mapping[str, str]
) -> frozenset[str]:
    """Return the UUIDs of the volume group's disks that are still connected but cannot be read now.

    `sequences` has the present sequence number of each disk, by the disk's path.
    """
    return frozenset(
        uuid
        for uuid, (_, sequence, path) in last_location.attached.items()
        if sequences.get(path) == sequence
        and isinstance(scanned_disks.get(path), Unreadable | Damaged)
    )


def _number(sequence: str) -> int:
    """Return a disk's sequence number as an integer; 0 if the kernel has no number for the disk."""
    return int(sequence) if sequence.isdigit() else 0


def _was_given_up(
    scanned_disks: Mapping[str, Found],
    name: str,
    last_location: Location,
    sequences: Mapping[str, str],
) -> bool:
    """Whether the disks of a volume group's last location prove that it was renamed or removed.

    1. A disk of the location that bears the group's UUID decides: the group was renamed if it has
       another name there.
    2. If no disk bears the UUID, the group was removed by hand, or the disks were removed from the
       group. That is proved only if all the disks are still connected and can be read. A blank disk
       counts as one that can be read.
    """
    labels, is_any_away = _labels(scanned_disks), False
    for path, uuid in zip(last_location.disks, last_location.disk_uuids, strict=False):
        _, sequence, _ = last_location.attached.get(uuid, (None, sequences.get(path), path))
        if path not in sequences or sequences[path] != sequence:
            is_any_away = True
            continue
        is_any_away = is_any_away or isinstance(scanned_disks.get(path), Unreadable | Damaged)
        label = labels.get(path)
        if label is None or label.group is None or label.group.uuid != last_location.uuid:
            continue
        # Decide by this disk: its metadata have the group's present name.
        return label.group.name != name
    return not is_any_away


def _require_usable(group: Group) -> None:
    """Raise GroupRefused for an exported or a shared volume group (vgexport(8), lvmlockd(8)).

    Another node may change a shared group at any time, and no trace of that is on the disks.
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
