"""Which of the node's disks are a volume group's: told by their labels, without lvm2.

A group is its UUID. Where two groups have the name that is meant, or two disks claim to be the same
physical volume, nobody can tell which is meant: neither is used, and which they are is said.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agent import errors
from lvm.disks import Found, Unanswered
from lvm.labels import PhysicalLabel
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


def names_of(found: Mapping[str, Found]) -> set[str]:
    """The names of all groups that disks tell of."""
    return {group.name for _, group in _told(found)}


def locate(found: Mapping[str, Found], name: str) -> Location | None:
    """Where the group of that name is; None where it is not on this node.

    Raises GroupRefused where it may not be used, and GroupSilent where a disk does not answer that
    may be its.
    """
    own = [(path, group) for path, group in _told(found) if group.name == name]
    silent = sorted(path for path, one in found.items() if isinstance(one, Unanswered))
    if not own:
        if silent:
            raise errors.GroupSilent(name, silent)
        return None
    by_uuid: defaultdict[str, list[str]] = defaultdict(list)
    for path, group in own:
        by_uuid[group.uuid].append(path)
    if len(by_uuid) > 1:
        places = "; ".join(f"{uuid} on {', '.join(at)}" for uuid, at in sorted(by_uuid.items()))
        raise errors.GroupRefused(
            name,
            f"there are {len(by_uuid)} of that name: {places}. Rename the one that is not meant"
            " (`vgrename UUID NAME`), or detach its disks",
        )
    # A disk that was away may bear older metadata.
    newest = max((group for _, group in own), key=lambda group: group.seqno)
    _require_usable(newest)
    paths = _paths_by_uuid(found, newest.disk_uuids)
    for uuid, at in paths.items():
        if len(at) > 1:
            raise errors.GroupRefused(
                name,
                f"{' and '.join(at)} are both its physical volume {uuid}, and one is a copy of the"
                " other. Detach the copy, or give it an identity of its own (`vgimportclone`)",
            )
    missing = frozenset(newest.disk_uuids) - paths.keys()
    if missing and silent:
        raise errors.GroupSilent(name, silent)
    present = tuple(sorted(at[0] for at in paths.values()))
    return Location(newest.uuid, present, missing, newest.system_id)


def _told(found: Mapping[str, Found]) -> Iterable[tuple[str, Group]]:
    for path, one in sorted(found.items()):
        if isinstance(one, PhysicalLabel) and one.group is not None:
            yield path, one.group


def _paths_by_uuid(found: Mapping[str, Found], uuids: Iterable[str]) -> Mapping[str, list[str]]:
    """The disks that bear these UUIDs, whether or not metadata are on each."""
    wanted = set(uuids)
    paths: defaultdict[str, list[str]] = defaultdict(list)
    for path, one in sorted(found.items()):
        if isinstance(one, PhysicalLabel) and one.uuid in wanted:
            paths[one.uuid].append(path)
    return paths


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
