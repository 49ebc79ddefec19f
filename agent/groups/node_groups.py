"""The volume groups of this node by their names, and operations on several groups."""

import math
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from agent.core import errors
from agent.groups.disk_search import names_of, unknown
from agent.groups.metadata_cache import MetadataCache
from agent.groups.volume_group import VolumeGroup
from agent.settings.configuration import Configuration
from agent.work import locks
from agent.work.background import run_all
from agent.work.group_worker import GroupWorkers
from lvm import candidate_devices, lvm2
from lvm import lvm_errors as lvm_errors
from lvm.active_devices import Devices
from lvm.disk_reader import PATIENCE_SECONDS, Disks, Found
from lvm.labels import Kind, PhysicalLabel
from lvm.lvm2 import Lvm
from lvm.session import Session
from mount import command

# Time limit of the wait for the end of lvm2's shells when the service stops, in seconds.
_CLOSING_SECONDS = 5.0


class HeldGroups:
    """The locks of several volume groups that a caller of `VolumeGroups.hold` holds together.

    Each lock is released at the end of `hold`, or later if `keep` was called for its group.
    """

    def __init__(self) -> None:
        self._of: dict[str, ExitStack] = {}
        self._kept: defaultdict[str, list[Future[None]]] = defaultdict(list)

    def take(self, volume_group: VolumeGroup) -> None:
        """Take the lock of a volume group. Raises GroupBusy if it cannot be taken in time.

        When the lock is released, a group that was changed is refreshed in the background.
        """
        releases = self._of[volume_group.name] = ExitStack()
        # Register the refresh first, so that it begins after the release of the lock: an ExitStack
        # runs its callbacks in reverse order.
        releases.callback(volume_group.refresh_later)
        releases.enter_context(volume_group.lock.hold())

    def enter(self, group: str, context: AbstractContextManager[None]) -> None:
        """Enter a context, and leave it when the lock of a volume group is released."""
        self._of[group].enter_context(context)

    def keep(self, group: str, future: Future[None]) -> None:
        """Have the lock of a volume group released only when `future` is done.

        Before `future` is done, no other caller changes the group.
        """
        self._kept[group].append(future)

    def release(self) -> None:
        """Release all locks now, except those that `keep` delays, which are released later."""
        for group, releases in reversed(self._of.items()):
            _when_done(self._kept[group], releases)


class VolumeGroups:
    """The VolumeGroup objects of this node, one for each volume group.

    There is one for each group in the configuration, and for each group that a volume id named and
    that a disk bears. `session` makes a group's session with lvm2. `listed` returns the devices of
    a group that Carver creates, by the group's name.
    """

    def __init__(
        self,
        node: Lvm,
        disks: Disks,
        devices: Devices,
        configuration: Configuration,
        session: Callable[[str], Session] | None = None,
        listed: Callable[[str], Sequence[str]] = lambda _name: (),
    ) -> None:
        self.configuration = configuration
        # The background loops of the volume groups, one for each group.
        self.workers = GroupWorkers()
        self.node = node
        self._disks = disks
        self._devices = devices
        self._session = session
        self._listed = listed
        self._guard = threading.Lock()
        self._volume_groups: dict[str, VolumeGroup] = {}
        self._sessions: list[Session] = []

    @property
    def names(self) -> Sequence[str]:
        """Names of the volume groups in the configuration."""
        return self.configuration.now.groups

    def __iter__(self) -> Iterator[VolumeGroup]:
        """Iterate over the VolumeGroup objects of the volume groups in the configuration."""
        return iter([self._ensure(name) for name in self.names])

    def of(self, name: str) -> VolumeGroup | None:
        """Return the VolumeGroup of a name; None if no such volume group is configured or present.

        A group in the configuration, or one that was found before, has a VolumeGroup even while the
        group is absent. For any other name the disks are scanned: a volume id may name a group that
        is configured no longer.
        """
        volume_group = self.known(name)
        return self._ensure(name) if volume_group is None and self.has(name) else volume_group

    def known(self, name: str) -> VolumeGroup | None:
        """Return the VolumeGroup of a name, without a scan of disks.

        The result is None for a group that is not in the configuration and that `of` has not found
        yet.
        """
        volume_group = self._volume_groups.get(name)
        return self._ensure(name) if volume_group is None and name in self.names else volume_group

    def changed_at(self, name: str) -> float:
        """Return the time at which Carver may last have changed a volume group.

        It is the time at which the group's lock was last held (monotonic, seconds): the present
        time while the lock is held, and minus infinity for a group that was never locked.
        """
        volume_group = self.known(name)
        return -math.inf if volume_group is None else volume_group.lock.held_at

    def has(self, name: str) -> bool:
        """Whether the label of a disk of this node names the volume group, configured or not.

        Reads the labels of all disks that lvm2 may see.
        """
        return name in names_of(self.scan())

    def had_volume(self, group: str, name: str) -> bool:
        """Whether a volume group had the logical volume `name` when lvm2 last wrote its metadata.

        The source is lvm2's own backup of the group's metadata (vgcfgbackup(8)).
        """
        return lvm2.is_backed_up(self.node.root, group, name)

    def reason_unsure(self, silent: Collection[str], name: str) -> str:
        """Return why one of the volume groups `silent`, which do not answer, may have a volume.

        `name` is the name of the logical volume. A group may have it if it is active, or if it was
        in the group when lvm2 last wrote the group's metadata. The result is empty if neither is
        true of any of the groups.
        """
        for group in sorted(silent):
            is_active = self._devices.find(group, name) or self._devices.status(group, name)
            if is_active or self.had_volume(group, name):
                volume_group = self.known(group)
                problem = None if volume_group is None else volume_group.problem
                why = f", and does not answer: {problem}" if problem else ", and does not answer"
                return f"volume group {group} may have {name}{why}"
        return ""

    def unconfigured_group_of(self, name: str) -> str | None:
        """Return the name of an unconfigured volume group on this node that had a logical volume.

        `name` is the name of the logical volume; lvm2's backups of metadata say which groups had
        it. None if no present group that the configuration does not name had the volume. Raises
        GroupBusy if such a group may be on disks whose group is not known. Runs no command.
        """
        for group in sorted(lvm2.backed_up_groups(self.node.root) - {*self.names}):
            if not self.had_volume(group, name):
                continue
            if self.of(group) is not None:
                return group
            if unread := self.unknown_disks():
                disks = ", ".join(path for path, _ in unread)
                why = f"it had {name}, and may be on {disks}, which cannot be read"
                raise errors.GroupBusy(f"volume group {group}", why)
        return None

    def uuids(self) -> Mapping[str, str]:
        """Return the UUID of each volume group that was present when last located, by its name."""
        groups = list(self._volume_groups.values())
        return {group.name: group.metadata.uuid for group in groups if group.metadata.uuid}

    def lvm(self, name: str) -> Lvm:
        """Return lvm2 confined to the disks of one volume group.

        For a configured group that is absent, lvm2 sees no disk at all. For another group that no
        disk bears, return lvm2 as called for the whole node.
        """
        volume_group = self.of(name)
        return volume_group.metadata.lvm if volume_group is not None else self.node

    def lvm_with(self, name: str, disk: str) -> Lvm:
        """Return lvm2 confined to the disks of one volume group and to a disk that is to join it.

        On a node with a devices file (lvmdevices(8)), return lvm2 as called for the whole node, so
        that lvm2 adds the disk to the devices file.
        """
        volume_group = self.of(name)
        is_listed = self.node.root is not None and lvm2.listed_disks(self.node.root) is not None
        return (
            self.node if volume_group is None or is_listed else volume_group.metadata.lvm_with(disk)
        )

    def allows(self, disk: str) -> bool:
        """Whether lvm2 may see a disk, by the setting `devices` or by the filters of lvm.conf(5).

        A disk that the operator named for a group passes the filters, and so does each disk on a
        node with a devices file. A disk that lvm2 may not see would be missing from its group at
        the next read.
        """
        path = os.path.realpath(disk)
        if allowed := {os.path.realpath(device) for device in self.node.devices}:
            return path in allowed
        root = self.node.root
        accepts = None
        if root is not None and lvm2.listed_disks(root) is None:
            accepts = candidate_devices.read(root)
        return accepts is None or accepts(path) or path in self._every_listed()

    @contextmanager
    def hold(self, *names: str) -> Iterator[HeldGroups]:
        """Hold the locks of several volume groups within the `with`.

        All callers take locks in the same order, by the groups' names. Groups that are not on this
        node, and not configured, are left out. The call of this thread is admitted first
        (`locks.enter`). The body must do nothing that may hang, except lvm2's commands
        (`locks.require_none_held`). Raises GroupBusy, TooManyCalls, Starting.
        """
        locks.require_none_held(f"volume group {', '.join(names)} is waited for")
        locks.enter(*names)
        volume_groups = [self.of(name) for name in sorted(set(names))]
        held_groups = HeldGroups()
        try:
            for volume_group in volume_groups:
                if volume_group is not None:
                    held_groups.take(volume_group)
            with locks.holding(names):
                yield held_groups
        finally:
            held_groups.release()

    def unknown_disks(self) -> Sequence[tuple[str, str]]:
        """Return the disks that may hold volumes of a volume group that Carver does not use here.

        Each disk is a pair: the disk's path, and the reason. Disks that cannot be read are
        included, and disks that are not in lvm2's devices file (lvmdevices(8)), such as a disk that
        was just connected. Left out are disks that the setting `devices` or filters of lvm.conf
        hide from lvm2.
        """
        disks = self.scan(with_unlisted=True)
        groups = list(self._volume_groups.values())
        last_sequences = {
            path: sequence for group in groups for path, sequence in group.metadata.attached.items()
        }
        now = self._disks.sequences(last_sequences)
        unmoved = {path for path, sequence in last_sequences.items() if now.get(path) == sequence}
        return list(unknown(disks, set(self.uuids().values()), unmoved))

    def scan(self, *, with_unlisted: bool = False) -> Mapping[str, Found]:
        """Read the labels of the disks that lvm2 may see on this node; return them by path.

        With `with_unlisted`, labels of disks that are not in lvm2's devices file are read as well.
        """
        # Wait at most half of the time to the caller's deadline for an unresponsive disk, so that
        # there is time for the rest of the call.
        patience = command.patience_seconds(PATIENCE_SECONDS, 0.5)
        paths = {os.path.realpath(device) for device in self.node.devices}
        disks = self._disks.scan(patience, paths)
        if paths:
            return {path: _trusted(disk, Kind.LOCAL) for path, disk in disks.items()}
        root = self.node.root
        if root is None:
            return disks
        if (listed_uuids := lvm2.listed_disks(root)) is not None:
            # Apply no filters: with a devices file lvm2 ignores them. Trust a listed disk less than
            # a disk of the setting `devices`, since a copy of the disk has the listed UUID as well.
            listed_paths = {path for path, disk in disks.items() if _is_listed(disk, listed_uuids)}
            chosen = {
                path: disk for path, disk in disks.items() if with_unlisted or path in listed_paths
            }
            return {
                path: _trusted(disk, Kind.ATTACHED) if path in listed_paths else disk
                for path, disk in chosen.items()
            }
        if (accepts := candidate_devices.read(root)) is None:
            return disks
        operator_paths = self._every_listed()
        return {
            path: disk for path, disk in disks.items() if path in operator_paths or accepts(path)
        }

    def _every_listed(self) -> frozenset[str]:
        """Return the paths of the disks that the operator named for any configured volume group.

        Filters of lvm.conf(5) do not apply to these disks. Symbolic links are resolved.
        """
        return frozenset[str]().union(*map(self.listed, self.names))

    def listed(self, name: str) -> frozenset[str]:
        """Return the paths of the disks that the operator named for a volume group.

        Symbolic links are resolved.
        """
        return frozenset(os.path.realpath(device) for device in self._listed(name))

    def add_tags_later(self, group: str, name: str, own_tags: Mapping[str, str]) -> None:
        """Add tags to a volume soon, in the background (`VolumeGroup.add_tags_later`).

        Raises GroupMissing if the group is not known on this node.
        """
        if (volume_group := self.of(group)) is None:
            raise lvm_errors.GroupMissing(group)
        volume_group.add_tags_later(name, own_tags)

    def run_deferred(self) -> None:
        """Do the deferred work of all volume groups now (`VolumeGroup.run_deferred`)."""
        for volume_group in list(self._volume_groups.values()):
            volume_group.run_deferred()

    def catch_up(self) -> None:
        """Start another thread for the jobs of a volume group whose thread is missing or hangs.

        A thread is missing if it could not be started before. It counts as hanging if its step
        takes long and another step is due.
        """
        self.workers.replace_hanging_threads()

    def outdate(self, written_path: str | None = None) -> None:
        """Make the next read of each volume group scan the labels of all disks.

        Called when a disk was, or may have been, connected or disconnected, or when the disk with
        the path `written_path` got other contents. If that disk is in a group already, nothing is
        done: the group notices a write to its own disks at its next read.
        """
        groups = list(self._volume_groups.values())
        if written_path is not None and any(group.metadata.has(written_path) for group in groups):
            return
        for group in groups:
            group.metadata.is_outdated = True

    def stop(self) -> None:
        """Stop the background work of all volume groups at its next safe points.

        Deferred work that is due is done before. The wait has a time limit, so a group that hangs
        does not keep the service from ending.
        """
        self.workers.stop()

    def trim_idle_sessions(self) -> None:
        """Make idle sessions with lvm2 release the memory that earlier commands took."""
        for session in list(self._sessions):
            session.end_if_idle()

    def close(self) -> None:
        """End the sessions with lvm2; do not wait longer than five seconds for one that hangs."""
        works = {
            f"lvm2's shell {number}": session.close for number, session in enumerate(self._sessions)
        }
        run_all(works, _CLOSING_SECONDS)

    def _ensure(self, name: str) -> VolumeGroup:
        """Return the VolumeGroup object of a name; create the object at its first use.

        The object is kept for the life of the process, because its lock must not be replaced.
        """
        if (volume_group := self._volume_groups.get(name)) is None:
            with self._guard:
                volume_group = self._volume_groups.get(name) or self._new_volume_group(name)
        return volume_group

    def _new_volume_group(self, name: str) -> VolumeGroup:
        """Create the VolumeGroup object of a name, with its lvm2 session and metadata cache."""
        node, renew = self.node, None
        if self._session is not None:
            session = self._session(name)
            self._sessions.append(session)
            node, renew = replace(node, run=session), session.renew
        listed = partial(self.listed, name)
        metadata = MetadataCache(name, node, self._disks, self._devices, self.scan, renew, listed)
        volume_group = self._volume_groups[name] = VolumeGroup(metadata, self.workers)
        return volume_group


def _when_done(futures: Sequence[Future[None]], releases: ExitStack) -> None:
    """Close `releases`, which releases the lock of a volume group, when all futures are done."""
    if futures:
        futures[0].add_done_callback(lambda _: _when_done(futures[1:], releases))
    else:
        releases.close()


def _trusted(disk: Found, kind: Kind) -> Found:
    """Return a scanned disk that the operator allowed, trusted at least as much as `kind`.

    A disk without a label is returned unchanged.
    """
    if not isinstance(disk, PhysicalLabel):
        return disk
    return replace(disk, kind=min(disk.kind, kind))


def _is_listed(disk: Found, listed_uuids: frozenset[str]) -> bool:
    """Whether a scanned disk is, or may be, in the node's devices file (lvmdevices(8)).

    The file lists the UUIDs of physical volumes. A disk without a known UUID may be in the file.
    """
    return not isinstance(disk, PhysicalLabel) or disk.uuid.replace("-", "") in listed_uuids
