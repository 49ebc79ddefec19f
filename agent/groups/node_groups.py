"""The volume groups of this node by their names, and operations on several of them."""

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

# How long the end of the service waits for lvm2's shells.
_CLOSING_SECONDS = 5.0


class HeldGroups:
    """The locks of groups that are held: each released at the end, or later if it is kept."""

    def __init__(self) -> None:
        self._of: dict[str, ExitStack] = {}
        self._kept: defaultdict[str, list[Future[None]]] = defaultdict(list)

    def take(self, volume_group: VolumeGroup) -> None:
        """Take a group's lock. Raises GroupBusy."""
        turn = self._of[volume_group.name] = ExitStack()
        # Called after the release.
        turn.callback(volume_group.refresh_later)
        turn.enter_context(volume_group.lock.hold())

    def enter(self, group: str, inside: AbstractContextManager[None]) -> None:
        """Enter a context that ends with the hold of a group."""
        self._of[group].enter_context(inside)

    def keep(self, group: str, until: Future[None]) -> None:
        """Release a group only when `until` is done: nothing changes it before."""
        self._kept[group].append(until)

    def release(self) -> None:
        """Release all; those that are kept later, without a wait here."""
        for group, turn in reversed(self._of.items()):
            _when_done(self._kept[group], turn)


class VolumeGroups:
    """One VolumeGroup for each group of the configuration, and for others that ids name.

    `session` makes a group's session with lvm2. `listed` gives the devices of a group that Carver
    creates.
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
        # The loops that do the groups' background work.
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
        """The names of the groups of the configuration."""
        return self.configuration.now.groups

    def __iter__(self) -> Iterator[VolumeGroup]:
        """The groups of the configuration."""
        return map(self._ensure, self.names)

    def of(self, name: str) -> VolumeGroup | None:
        """A group by its name; None where no disk on this node has such a group.

        An id may name a group that no class names any more.
        """
        found = self.known(name)
        return self._ensure(name) if found is None and self.has(name) else found

    def known(self, name: str) -> VolumeGroup | None:
        """A group by its name, without a scan of disks.

        None for one that no class names and no id has named yet.
        """
        found = self._volume_groups.get(name)
        return self._ensure(name) if found is None and name in self.names else found

    def changed_at(self, name: str) -> float:
        """When Carver last changed a group, by the monotonic clock: now where it does so."""
        found = self.known(name)
        return -math.inf if found is None else found.lock.held_at

    def has(self, name: str) -> bool:
        """Whether a group of that name is on this node, also one that no class names."""
        return name in names_of(self.scan())

    def was_in(self, group: str, name: str) -> bool:
        """Whether a group had a logical volume when lvm2 wrote to it last: by lvm2's own copy."""
        return lvm2.is_backed_up(self.node.root, group, name)

    def why_unsure(self, silent: Collection[str], name: str) -> str:
        """Why a logical volume may be in one of these groups, which do not answer; empty if not.

        It is if it is active there, or was there when lvm2 wrote to the group last.
        """
        for one in sorted(silent):
            is_active = self._devices.find(one, name) or self._devices.status(one, name)
            if is_active or self.was_in(one, name):
                volume_group = self.known(one)
                problem = None if volume_group is None else volume_group.problem
                why = f", and does not answer: {problem}" if problem else ", and does not answer"
                return f"volume group {one} may have {name}{why}"
        return ""

    def left_with(self, name: str) -> str | None:
        """The group that no class names any more and that had a logical volume of that name.

        Raises GroupBusy where it may be on disks that cannot be read. No command.
        """
        for one in sorted(lvm2.backed_up_groups(self.node.root) - {*self.names}):
            if not self.was_in(one, name):
                continue
            if self.of(one) is not None:
                return one
            if unread := self.unknown_disks():
                disks = ", ".join(path for path, _ in unread)
                why = f"it had {name}, and may be on {disks}, which cannot be read"
                raise errors.GroupBusy(f"volume group {one}", why)
        return None

    def uuids(self) -> Mapping[str, str]:
        """The UUIDs of the groups that were here when they were asked for last, by their names."""
        every = list(self._volume_groups.values())
        return {one.name: one.metadata.uuid for one in every if one.metadata.uuid}

    def lvm(self, name: str) -> Lvm:
        """lvm2 for one group; it sees no disk of a group that is not here."""
        found = self.of(name)
        return found.lvm if found is not None else self.node

    def lvm_with(self, name: str, disk: str) -> Lvm:
        """lvm2 for one group, which also sees a disk that is to join it.

        On a node with a devices file (lvmdevices(8)) it is lvm2 as on the node, which adds the disk
        to that file.
        """
        found = self.of(name)
        is_listed = self.node.root is not None and lvm2.listed_disks(self.node.root) is not None
        return self.node if found is None or is_listed else found.metadata.lvm_with(disk)

    def allows(self, disk: str) -> bool:
        """Whether lvm2 may see a disk: by the configuration, or else by lvm.conf.

        A disk that a filter rejects would be missing from its group at the next read.
        """
        path = os.path.realpath(disk)
        if allowed := {os.path.realpath(one) for one in self.node.devices}:
            return path in allowed
        root = self.node.root
        accepts = None
        if root is not None and lvm2.listed_disks(root) is None:
            accepts = candidate_devices.read(root)
        return accepts is None or accepts(path) or path in self._every_listed()

    @contextmanager
    def hold(self, *names: str) -> Iterator[HeldGroups]:
        """Hold the locks of groups; all callers take them in the same order, and all at once.

        Inside, nothing is done that may hang but lvm2's commands (`locks.require_none_held`).
        Raises GroupBusy, TooManyCalls, Starting.
        """
        locks.require_none_held(f"volume group {', '.join(names)} is waited for")
        locks.enter(*names)
        found = [self.of(one) for one in sorted(set(names))]
        held = HeldGroups()
        try:
            for one in found:
                if one is not None:
                    held.take(one)
            with locks.holding(names):
                yield held
        finally:
            held.release()

    def unknown_disks(self) -> Sequence[tuple[str, str]]:
        """The disks that may have volumes in a group that is not among `uuids`, each with why.

        Also those that are only missing from the devices file, as what was just attached; not those
        that `devices` or filters keep from lvm2.
        """
        found = self.scan(with_unlisted=True)
        every = list(self._volume_groups.values())
        before = {path: at for one in every for path, at in one.metadata.attached.items()}
        now = self._disks.sequences(before)
        own = {path for path, at in before.items() if now.get(path) == at}
        return list(unknown(found, set(self.uuids().values()), own))

    def scan(self, *, with_unlisted: bool = False) -> Mapping[str, Found]:
        """The labels of the disks that lvm2 may see on this node.

        Or would see if they were in its devices file, `with_unlisted`.
        """
        # A disk that does not answer, perhaps another group's, leaves time for the rest.
        patience = command.patience_seconds(PATIENCE_SECONDS, 0.5)
        paths = {os.path.realpath(one) for one in self.node.devices}
        found = self._disks.scan(patience, paths)
        if paths:
            return {path: _trusted(one, Kind.LOCAL) for path, one in found.items()}
        root = self.node.root
        if root is None:
            return found
        if (listed := lvm2.listed_disks(root)) is not None:
            # lvm2 ignores filters then. A copied disk has the listed UUID, too.
            own = {p for p, one in found.items() if _is_listed(one, listed)}
            every = {p: one for p, one in found.items() if with_unlisted or p in own}
            return {
                p: _trusted(one, Kind.ATTACHED) if p in own else one for p, one in every.items()
            }
        if (accepts := candidate_devices.read(root)) is None:
            return found
        named = self._every_listed()
        return {p: one for p, one in found.items() if p in named or accepts(p)}

    def _every_listed(self) -> frozenset[str]:
        """The disks that the operator named for any group; filters do not apply to them."""
        return frozenset[str]().union(*map(self.listed, self.names))

    def listed(self, name: str) -> frozenset[str]:
        """The disks that the operator named for a group, by their own paths."""
        return frozenset(os.path.realpath(one) for one in self._listed(name))

    def add_tags_later(self, group: str, name: str, own_tags: Mapping[str, str]) -> None:
        """Add tags to a volume soon (`VolumeGroup.add_tags_later`)."""
        if (volume_group := self.of(group)) is None:
            raise lvm_errors.GroupMissing(group)
        volume_group.add_tags_later(name, own_tags)

    def run_deferred(self) -> None:
        """Do the deferred work of all groups now (`VolumeGroup.run_deferred`)."""
        for one in list(self._volume_groups.values()):
            one.run_deferred()

    def catch_up(self) -> None:
        """Begin work for which there was no thread, and go on beside a step that takes long."""
        self.workers.oversee()

    def outdate(self, written: str | None = None) -> None:
        """Have all disks scanned: one came or went, or may have, or `written` has other contents.

        A group sees by itself, at its next read, a write to its own disks.
        """
        every = list(self._volume_groups.values())
        if written is not None and any(one.metadata.has(written) for one in every):
            return
        for one in every:
            one.metadata.is_outdated = True

    def stop(self) -> None:
        """End background work at its next safe points, and do the deferred work that is left.

        A group that hangs is left to itself.
        """
        self.workers.stop()

    def rest(self) -> None:
        """Have idle sessions with lvm2 release the memory of earlier work."""
        for one in list(self._sessions):
            one.rest()

    def close(self) -> None:
        """End the sessions with lvm2; one that hangs is left to end by itself."""
        works = {f"lvm2's shell {number}": one.close for number, one in enumerate(self._sessions)}
        run_all(works, _CLOSING_SECONDS)

    def _ensure(self, name: str) -> VolumeGroup:
        """The one of a name for the life of the process: its lock must not be replaced."""
        if (found := self._volume_groups.get(name)) is None:
            with self._guard:
                found = self._volume_groups.get(name) or self._made(name)
        return found

    def _made(self, name: str) -> VolumeGroup:
        node, renew = self.node, None
        if self._session is not None:
            session = self._session(name)
            self._sessions.append(session)
            node, renew = replace(node, run=session), session.renew
        listed = partial(self.listed, name)
        metadata = MetadataCache(name, node, self._disks, self._devices, self.scan, renew, listed)
        made = self._volume_groups[name] = VolumeGroup(metadata, self.workers)
        return made


def _when_done(awaited: Sequence[Future[None]], turn: ExitStack) -> None:
    """Release a lock once all of these are done."""
    if awaited:
        awaited[0].add_done_callback(lambda _: _when_done(awaited[1:], turn))
    else:
        turn.close()


def _trusted(found: Found, kind: Kind) -> Found:
    """A disk that the operator allowed: its kind is at least that."""
    if not isinstance(found, PhysicalLabel):
        return found
    return replace(found, kind=min(found.kind, kind))


def _is_listed(found: Found, listed: frozenset[str]) -> bool:
    """Whether a disk is, or may be, in the node's devices file (lvmdevices(8))."""
    return not isinstance(found, PhysicalLabel) or found.uuid.replace("-", "") in listed
