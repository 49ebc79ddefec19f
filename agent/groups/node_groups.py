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

# Time limit for the end of lvm2's shells when the service stops, in seconds.
_CLOSING_SECONDS = 5.0


class HeldGroups:
    """The locks of several volume groups that a caller of `VolumeGroups.hold` holds together.

    Each lock is released at the end of `hold`, or later if `keep` was called for its group.
    """

    def __init__(self) -> None:
        self._of: dict[str, ExitStack] = {}
        self._kept: defaultdict[str, list[Future[None]]] = defaultdict(list)

    def take(self, volume_group: VolumeGroup) -> None:
        """Take the lock of a volume group. Raises GroupBusy."""
        releases = self._of[volume_group.name] = ExitStack()
        # The refresh begins after the release of the lock: an ExitStack runs its callbacks in
        # reverse order.
        releases.callback(volume_group.refresh_later)
        releases.enter_context(volume_group.lock.hold())

    def enter(self, group: str, context: AbstractContextManager[None]) -> None:
        """Enter a context that ends when the lock of a volume group is released."""
        self._of[group].enter_context(context)

    def keep(self, group: str, future: Future[None]) -> None:
        """Have the lock of a volume group released only when `future` is done.

        Before `future` is done, no other caller changes the group.
        """
        self._kept[group].append(future)

    def release(self) -> None:
        """Release all locks, without waiting for those that `keep` delays."""
        for group, releases in reversed(self._of.items()):
            _when_done(self._kept[group], releases)


class VolumeGroups:
    """The VolumeGroup objects of this node, for the configured groups and those that ids name.

    `session` makes a group's session with lvm2. `listed` returns the devices of a group that Carver
    creates, by the group's name.
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
        # The threads that do the background work of the groups, one loop for each group.
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
        """Iterate over the volume groups in the configuration."""
        return map(self._ensure, self.names)

    def of(self, name: str) -> VolumeGroup | None:
        """Return a volume group by its name; None if no disk on this node has such a group.

        The disks are scanned for a group that no device class of the configuration names: a volume
        id may still name such a group.
        """
        volume_group = self.known(name)
        return self._ensure(name) if volume_group is None and self.has(name) else volume_group

    def known(self, name: str) -> VolumeGroup | None:
        """Return a volume group by its name, without a scan of disks.

        The result is None for a group that no device class of the configuration names and that `of`
        has not found yet.
        """
        volume_group = self._volume_groups.get(name)
        return self._ensure(name) if volume_group is None and name in self.names else volume_group

    def changed_at(self, name: str) -> float:
        """Return the time of Carver's last change of a volume group (monotonic, seconds).

        The result is the present time while the group's lock is held, and minus infinity for an
        unknown group.
        """
        volume_group = self.known(name)
        return -math.inf if volume_group is None else volume_group.lock.held_at

    def has(self, name: str) -> bool:
        """Whether a disk of this node bears a volume group of that name, configured or not."""
        return name in names_of(self.scan())

    def was_in(self, group: str, name: str) -> bool:
        """Whether a volume group had a logical volume when lvm2 last wrote the group's metadata.

        lvm2's own backup of the metadata says so (vgcfgbackup(8)).
        """
        return lvm2.is_backed_up(self.node.root, group, name)

    def why_unsure(self, silent: Collection[str], name: str) -> str:
        """Return why a logical volume may be in one of these unresponsive groups; empty if in none.

        A group may have the volume if the volume is active, or if the volume was in the group when
        lvm2 last wrote the group's metadata.
        """
        for group in sorted(silent):
            is_active = self._devices.find(group, name) or self._devices.status(group, name)
            if is_active or self.was_in(group, name):
                volume_group = self.known(group)
                problem = None if volume_group is None else volume_group.problem
                why = f", and does not answer: {problem}" if problem else ", and does not answer"
                return f"volume group {group} may have {name}{why}"
        return ""

    def unconfigured_group_of(self, name: str) -> str | None:
        """Return the name of a volume group that had a logical volume and is no longer configured.

        `name` is the name of the logical volume. None if no such group had the volume. Raises
        GroupBusy if the group may be on disks that cannot be read. Runs no command.
        """
        for group in sorted(lvm2.backed_up_groups(self.node.root) - {*self.names}):
            if not self.was_in(group, name):
                continue
            if self.of(group) is not None:
                return group
            if unread := self.unknown_disks():
                disks = ", ".join(path for path, _ in unread)
                why = f"it had {name}, and may be on {disks}, which cannot be read"
                raise errors.GroupBusy(f"volume group {group}", why)
        return None

    def uuids(self) -> Mapping[str, str]:
        """Return the UUIDs of the volume groups that were present when last located, by name."""
        groups = list(self._volume_groups.values())
        return {group.name: group.metadata.uuid for group in groups if group.metadata.uuid}

    def lvm(self, name: str) -> Lvm:
        """Return lvm2 for one volume group.

        If the group is not on this node, lvm2 sees no disk of the group.
        """
        volume_group = self.of(name)
        return volume_group.lvm if volume_group is not None else self.node

    def lvm_with(self, name: str, disk: str) -> Lvm:
        """Return lvm2 for one volume group that also sees a disk which is to join the group.

        On a node with a devices file (lvmdevices(8)), return lvm2 as called for the whole node:
        that lvm2 adds the disk to the devices file.
        """
        volume_group = self.of(name)
        is_listed = self.node.root is not None and lvm2.listed_disks(self.node.root) is not None
        return (
            self.node if volume_group is None or is_listed else volume_group.metadata.lvm_with(disk)
        )

    def allows(self, disk: str) -> bool:
        """Whether lvm2 may see a disk, by the configuration or by lvm.conf(5).

        A disk that a filter of lvm.conf rejects would be missing from its group at the next read.
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
        """Hold the locks of several volume groups; all callers take locks in the same order.

        The body must do nothing that may hang, except lvm2's commands (`locks.require_none_held`).
        Raises GroupBusy, TooManyCalls, Starting.
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
        """Return the disks that may hold volumes in a group that is not in use here, and why.

        Included are disks that only lack an entry in the devices file (lvmdevices(8)), such as a
        disk that was just connected. Left out are disks that the setting `devices` or filters of
        lvm.conf hide from lvm2.
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
        """Read the labels of the disks that lvm2 may see on this node.

        With `with_unlisted`, also of the disks that lvm2 would see if its devices file listed them.
        """
        # The time limit is half of the time to the caller's deadline, so that an unresponsive disk
        # leaves time for the rest of the call.
        patience = command.patience_seconds(PATIENCE_SECONDS, 0.5)
        paths = {os.path.realpath(device) for device in self.node.devices}
        disks = self._disks.scan(patience, paths)
        if paths:
            return {path: _trusted(disk, Kind.LOCAL) for path, disk in disks.items()}
        root = self.node.root
        if root is None:
            return disks
        if (listed_uuids := lvm2.listed_disks(root)) is not None:
            # With a devices file lvm2 ignores filters. A listed disk is trusted less than a disk of
            # the setting `devices`, since a copy of the disk has the listed UUID as well.
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
        """Return the paths of the disks that the operator named for any volume group.

        Filters of lvm.conf(5) do not apply to these disks.
        """
        return frozenset[str]().union(*map(self.listed, self.names))

    def listed(self, name: str) -> frozenset[str]:
        """Return the paths of the disks that the operator named for a volume group.

        Symbolic links are resolved.
        """
        return frozenset(os.path.realpath(device) for device in self._listed(name))

    def add_tags_later(self, group: str, name: str, own_tags: Mapping[str, str]) -> None:
        """Add tags to a volume soon, in the background (`VolumeGroup.add_tags_later`)."""
        if (volume_group := self.of(group)) is None:
            raise lvm_errors.GroupMissing(group)
        volume_group.add_tags_later(name, own_tags)

    def run_deferred(self) -> None:
        """Do the deferred work of all volume groups now (`VolumeGroup.run_deferred`)."""
        for volume_group in list(self._volume_groups.values()):
            volume_group.run_deferred()

    def catch_up(self) -> None:
        """Start background threads that could not be started before, and replace hanging ones.

        The loop of a group gets a new thread if it has jobs and no thread, or if its thread is in a
        step that takes long.
        """
        self.workers.replace_hanging_threads()

    def outdate(self, written_path: str | None = None) -> None:
        """Have all disks scanned at the next read of each group.

        Called when a disk was, or may have been, connected or disconnected, or when the disk with
        the path `written_path` got other contents. A disk of a group is an exception: the group
        itself notices a write to its own disks at its next read.
        """
        groups = list(self._volume_groups.values())
        if written_path is not None and any(group.metadata.has(written_path) for group in groups):
            return
        for group in groups:
            group.metadata.is_outdated = True

    def stop(self) -> None:
        """Stop the background work at its next safe points, after a last run of the deferred work.

        A group that hangs is not waited for.
        """
        self.workers.stop()

    def rest(self) -> None:
        """Have idle sessions with lvm2 release the memory that earlier work took."""
        for session in list(self._sessions):
            session.rest()

    def close(self) -> None:
        """End the sessions with lvm2; a session that hangs is left to end by itself."""
        works = {
            f"lvm2's shell {number}": session.close for number, session in enumerate(self._sessions)
        }
        run_all(works, _CLOSING_SECONDS)

    def _ensure(self, name: str) -> VolumeGroup:
        """Return the VolumeGroup object of a name, created at the first use.

        The object stays for the life of the process, because its lock must not be replaced.
        """
        if (volume_group := self._volume_groups.get(name)) is None:
            with self._guard:
                volume_group = self._volume_groups.get(name) or self._made(name)
        return volume_group

    def _made(self, name: str) -> VolumeGroup:
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
    """Return a scanned disk that the operator allowed, with a kind no worse than `kind`."""
    if not isinstance(disk, PhysicalLabel):
        return disk
    return replace(disk, kind=min(disk.kind, kind))


def _is_listed(disk: Found, listed_uuids: frozenset[str]) -> bool:
    """Whether a scanned disk is, or may be, in the node's devices file (lvmdevices(8))."""
    return not isinstance(disk, PhysicalLabel) or disk.uuid.replace("-", "") in listed_uuids
