"""Metadata cache of a volume group: lvm2's last report, and the proof that it is still true.

Why: each call of CSI decides by the state of the group, and must not decide by an old state. To ask
lvm2 takes a command, which reads the whole metadata again, and waits behind the group's other
commands. Most calls come when nothing has changed since the last report.

Idea: lvm2 commits metadata by writing them to another place on the disks. So the place, the length
and the checksum of the committed metadata on all disks of the group are a fingerprint of its state
(lvm/labels.py). Equal fingerprints before and after prove that the report is as good as a new one.
Reading a fingerprint takes 380 us for two disks, and no process.

    state() ---> is the fingerprint of the group's disks the one of the cached report?
                   |
                   | yes                              | no, or no report yet
                   v                                  v
                 the cached report                  1. find the group's disks by their labels, if
                                                       they may have changed
                                                    2. read the fingerprint
                                                    3. read a report by lvm2, on these disks alone
                                                    4. read the fingerprint again
                                                         equal in 2 and 4: cache the report
                                                         else: return it, but do not cache it

A new report is read if

1. the fingerprint differs: this process, another program or an operator committed something;
2. a command's outcome is unknown (`forget`);
3. the group's disks are others than before: their labels are read again after an event of udev's,
   each minute, and while a disk of the group is missing;
4. a volume's device is suspended, as a resume writes no metadata;
5. the kernel has no status of a copy-on-write snapshot, as for an inactive one, whose overflow is
   recorded in its own COW store alone;
6. the report is ten minutes old.

The kernel is asked for what metadata do not record, such as whether a volume is active. As the
fingerprint is read after a call began, the cache also proves that a volume is absent.

What it would cost to do without: a report by lvm2 for each call, also for those that change
nothing, such as the probes and statistics that kubelet asks for all the time. With a cache that
only notes Carver's own commands, a call could act on what an operator changed by hand.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agent.core import errors
from agent.groups.disk_search import Location, claims, locate
from lvm import devicemapper, lvm2, report
from lvm.active_devices import Devices, Events
from lvm.disk_reader import PATIENCE_SECONDS, Disks, Fingerprint, Found
from lvm.lvm2 import Lvm
from mount import command

_log = logging.getLogger(__name__)

# How late a problem without a trace in the metadata is found.
_LASTS_SECONDS = 600.0
# How often the labels of disks are read without an event of udev's.
_BLIND_SECONDS = 60.0
# lvm2's default memory for reads and writes (global/io_memory_size in lvm.conf(5)), and what it
# needs beside the metadata text: it could neither read nor write a longer text.
_IO_BYTES, _BESIDE_TEXT_BYTES = 8 << 20, 2 << 20
# Not a disk: lvm2 confined to it sees no group.
_NO_DISK = "/dev/null"


@dataclass(frozen=True)
class _Known:
    """A report of the group, and the proof by which it is still true."""

    group: report.Group
    location: Location
    fingerprint: Fingerprint
    time_seconds: float
    # The generation in which the read began.
    generation: object
    # The events, until then, of copy-on-write snapshots that had not overflowed.
    whole: dict[str, Events] = field(default_factory=dict)


class MetadataCache:
    """The cached state of one group; one read at a time. `node` is lvm2 as called for it.

    `scan` reads the labels of the node's disks; `renew` restarts the session with lvm2, if any;
    `listed` gives the disks that the operator named for the group.
    """

    def __init__(
        self,
        name: str,
        node: Lvm,
        disks: Disks,
        devices: Devices,
        scan: Callable[[], Mapping[str, Found]],
        renew: Callable[[], None] | None = None,
        listed: Callable[[], Collection[str]] = tuple,
    ) -> None:
        # Whether a disk came, went or moved, perhaps: then the next read scans all.
        self.is_outdated = True
        self.name = name
        self.node = node
        self._disks = disks
        self._devices = devices
        self._scan = scan
        self._renew = renew
        self._listed = listed
        self._location: Location | None = None
        # Where it was when last here: another group of its name is not taken for it.
        self._before: Location | None = None
        # The disks that only claim to be the group's, each with the reason.
        self.ignored: Sequence[tuple[str, str]] = ()
        # When its disks were last located (monotonic, seconds).
        self._located = 0.0
        # The length of its metadata text.
        self._text_bytes = 0
        # The events of its devices before the last report was read.
        self._events: Mapping[str, Events] = {}
        self._known: _Known | None = None
        # Replaced by forget(): a report of an earlier generation is not used again.
        self._generation = object()

    @property
    def uuid(self) -> str:
        """The UUID of the group that was located last; empty where none was."""
        return self._location.uuid if self._location is not None else ""

    @property
    def lvm(self) -> Lvm:
        """lvm2, which sees this group's disks and no others."""
        return self._lvm_at(self._location)

    def lvm_with(self, disk: str) -> Lvm:
        """lvm2, which sees this group's disks and another that is to join them."""
        own = self._location.disks if self._location is not None else ()
        return replace(self.lvm, devices=(*own, disk))

    def has(self, disk: str) -> bool:
        """Whether that path was a disk of the group when it was read last."""
        return self._location is not None and disk in self._location.disks

    @property
    def attached(self) -> Mapping[str, str]:
        """By which number each of its disks was attached when it was located last, by the paths."""
        every = self._location.attached.values() if self._location is not None else ()
        return {path: sequence for _, sequence, path in every}

    def forget(self) -> None:
        """Drop the report, and that of a read under way: a command may have done anything."""
        self._generation = object()

    def state(self, *, is_refused: bool) -> report.Group | None:
        """The group as it is now; None where it is not on this node.

        One command where the last report may be outdated, else none. `is_refused`: the last read
        raised GroupRefused. Raises CommandError, GroupRefused, GroupSilent.
        """
        known, self._known, generation = self._known, None, self._generation
        if known is not None and known.generation is not generation:
            known = None
        if known is not None and not self._may_have_moved(known):
            mark = self._fingerprint(known.location)
            if (kept := self._kept(known, mark)) is not None:
                return kept
            # lvm2 sees only these disks: after a commit that changed disks it shows others.
            group = None if mark is None else self._shown(known.location)
            # lvm2 also shows a group exported meanwhile; the disks then say whose it is.
            if group is not None and group.is_one_node_s and _is_whole_on(group, known.location):
                return self._remembered(group, known.location, mark, generation)
        location = self._locate()
        if location is None:
            return None
        mark = self._fingerprint(location)
        if known is not None and location == known.location:
            kept = self._kept(known, mark)
            if kept is not None:
                return kept
        group = self._shown(location)
        if group is None and self._renew and not is_refused:
            # The disks have it: ask another shell before believing that it is absent.
            self._renew()
            group = self._shown(location)
        if group is None:
            raise errors.GroupRefused(self.name, _why_hidden(location))
        return self._remembered(group, location, mark, generation)

    def _may_have_moved(self, known: _Known) -> bool:
        """Whether disks of the group may have come or gone since the report."""
        is_old = time.monotonic() - self._located >= _BLIND_SECONDS
        return self.is_outdated or is_old or bool(known.location.missing)

    def _kept(self, known: _Known, mark: Fingerprint | None) -> report.Group | None:
        """The cached group, with the snapshots that overflowed since, without a commit.

        None where it may be outdated: by the fingerprint of its disks, by its age, or because the
        kernel has no status of a snapshot, as for inactive ones.
        """
        is_old = time.monotonic() - known.time_seconds >= _LASTS_SECONDS
        lost = None if mark != known.fingerprint or is_old else self._lost(known)
        if lost is None:
            return None
        if lost:
            group = known.group
            changed = {one: replace(group.volumes[one], overflowed=True) for one in lost}
            known = replace(known, group=replace(group, volumes={**group.volumes, **changed}))
        self._known = known
        return known.group

    def _lost(self, known: _Known) -> list[str] | None:
        """The snapshots that overflowed since; None where the kernel has no status of one.

        One ioctl for all, and one for each that had an event.
        """
        if not known.group.readable_copy_on_write:
            return []
        events, lost = self._devices.events(self.name), []
        for name in known.group.readable_copy_on_write:
            if (had := events.get(name)) is None:
                return None
            if known.whole.get(name) == had:
                continue
            status = self._devices.own_status(self.name, name)
            if not status:
                return None
            if devicemapper.has_overflowed(status):
                lost.append(name)
            else:
                known.whole[name] = had
        return lost

    def _locate(self) -> Location | None:
        # Before the scan: a later change may be in it, or not.
        self.is_outdated, self._located = False, time.monotonic()
        try:
            disks = self._scan()
            found = locate(
                disks,
                self.name,
                self._before,
                self._listed(),
                sequences=self._disks.sequences,
                backed_up=lambda: lvm2.backed_up(self.node.root, self.name),
            )
        except errors.GroupRefused:
            self.is_outdated, self._location = True, None
            raise
        except BaseException:
            self.is_outdated = True
            raise
        # In one step: commands that begin meanwhile see the disks as they were.
        self._location = found
        self._ignore(claims(disks, self.name) if found is None else found.ignored)
        self._before = found or self._before
        return found

    def _ignore(self, found: Iterable[tuple[str, str]]) -> None:
        """Log once each disk that only claims to be the group's."""
        before, self.ignored = set(self.ignored), tuple(found)
        for path, why in self.ignored:
            if (path, why) not in before:
                _log.warning("volume group %s: %s is ignored: it %s", self.name, path, why)

    def _shown(self, location: Location) -> report.Group | None:
        """lvm2's report of the group on these disks; None where it shows none, or another."""
        # A snapshot that overflows during the report is in it, or has one event more.
        self._events = self._devices.events(self.name)
        every = report.read(self._lvm_at(location), self._devices.overflowed)
        group = every.groups.get(self.name)
        return group if group is not None and group.uuid == location.uuid else None

    def _remembered(
        self,
        group: report.Group,
        location: Location,
        mark: Fingerprint | None,
        generation: object,
    ) -> report.Group:
        """Cache the group if nothing was committed while lvm2 read it; return it."""
        if group.missing_disks != len(location.missing):
            # The labels were read during a write, or lvm2 misses more disks.
            self.is_outdated = True
        # A resume writes no metadata.
        is_suspended = any(one.suspended for one in group.volumes.values())
        if mark is not None and mark == self._fingerprint(location) and not is_suspended:
            whole = {
                one: self._events[one]
                for one in group.readable_copy_on_write
                if one in self._events and group.volumes[one].active
            }
            self._known = _Known(group, location, mark, time.monotonic(), generation, whole)
        return group

    def _fingerprint(self, location: Location) -> Fingerprint | None:
        remaining = command.remaining_seconds()
        patience = PATIENCE_SECONDS if remaining is None else remaining
        found = self._disks.fingerprint(location.disks, patience)
        texts = [text.size_bytes for one in found or () for text in one.texts]
        self._text_bytes = max(texts, default=self._text_bytes)
        return found

    def _lvm_at(self, location: Location | None) -> Lvm:
        disks = (_NO_DISK,) if location is None else location.disks
        return replace(
            self.node, devices=disks, settings=(*self.node.settings, *_memory(self._text_bytes))
        )


def _memory(text_bytes: int) -> tuple[str, ...]:
    """lvm.conf(5) settings for metadata text of this length, which may double.

    In powers of two, as lvm2's shell is restarted for another setting.
    """
    needed, have = 2 * text_bytes + _BESIDE_TEXT_BYTES, _IO_BYTES
    while have < needed:
        have *= 2
    return (f"global/io_memory_size={have >> 10}",) if have > _IO_BYTES else ()


def _is_whole_on(group: report.Group, location: Location) -> bool:
    """Whether lvm2 shows the group on all these disks and on no others."""
    return not group.missing_disks and len(group.disks) == len(location.disks)


def _why_hidden(location: Location) -> str:
    """Why lvm2 may not show a group that is on disks here, by its system id.

    This node's own system id has five sources (lvmsystemid(7)), some of them outside a container.
    """
    if not location.system_id:
        bearers = ", ".join(location.disks)
        return f"{bearers} bear it, and lvm2 does not show it: see `pvs -a` and lvm.conf(5)"
    return (
        f"it is the node's with the system id {location.system_id}, and lvm2 keeps it from this one"
        " (`lvm systemid`); `vgexport` it there and `vgimport` it here, or see `A group of another"
        " node` in docs/operations.md"
    )
