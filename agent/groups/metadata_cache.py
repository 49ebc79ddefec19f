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

# Maximum age of a cached report of lvm2's, in seconds. A problem that leaves no trace in the
# metadata is found after this time at the latest.
_LASTS_SECONDS = 600.0
# Maximum time between two scans of the disks' labels if udev reports no event, in seconds.
_BLIND_SECONDS = 60.0
# Default size of lvm2's memory for reads and writes (global/io_memory_size in lvm.conf(5)), and the
# part of that memory which lvm2 needs beside the metadata text; both in bytes. lvm2 can neither
# read nor write metadata that do not fit.
_IO_BYTES, _BESIDE_TEXT_BYTES = 8 << 20, 2 << 20
# Path of a device that is no disk. lvm2 confined to this device sees no volume group.
_NO_DISK = "/dev/null"


@dataclass(frozen=True)
class _Known:
    """A cached report of the volume group, and what proves that the report is still true."""

    group: report.Group
    location: Location
    fingerprint: Fingerprint
    time_seconds: float
    # The generation of the metadata cache (`MetadataCache.forget`) when the read of the report
    # began. In a later generation the report is not used.
    generation: object
    # The number of device-mapper events of each copy-on-write snapshot, by the snapshot's name, at
    # the last check that found that the snapshot's COW store had not overflowed.
    snapshot_events: dict[str, Events] = field(default_factory=dict)


class MetadataCache:
    """The cached state of one volume group; at most one thread at a time may call `state`.

    `node` is lvm2 as called for the group, before it is confined to the group's disks. `scan` reads
    the labels of the node's disks. `renew` restarts the session with lvm2, if there is one.
    `listed` returns the disks that the operator named for the group.
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
        # Whether a disk may have been connected or disconnected. If so, the next read of the state
        # scans the labels of all disks.
        self.is_outdated = True
        self.name = name
        self.node = node
        self._disks = disks
        self._devices = devices
        self._scan = scan
        self._renew = renew
        self._listed = listed
        self._location: Location | None = None
        # The group's location when the group was last present. By this location another group of
        # the same name is recognized.
        self._before: Location | None = None
        # The paths of disks whose labels claim that they are the group's but which do not count as
        # the group's, each with the reason.
        self.ignored: Sequence[tuple[str, str]] = ()
        # The time when the group's disks were last located (monotonic, seconds).
        self._located = 0.0
        # The length of the group's metadata text, in bytes.
        self._text_bytes = 0
        # The device-mapper events of the group's devices, read before the last report.
        self._events: Mapping[str, Events] = {}
        self._known: _Known | None = None
        # Generation of the cache: a token that `forget` replaces. A report whose read began in an
        # earlier generation is not used again.
        self._generation = object()

    @property
    def uuid(self) -> str:
        """UUID of the volume group by its last location; empty if the group was not found then."""
        return self._location.uuid if self._location is not None else ""

    @property
    def lvm(self) -> Lvm:
        """lvm2 as called for this volume group: it sees the disks of this group and no others."""
        return self._lvm_at(self._location)

    def lvm_with(self, disk: str) -> Lvm:
        """Return lvm2 confined to the volume group's disks and to the disk that is to join."""
        disks = self._location.disks if self._location is not None else ()
        return replace(self.lvm, devices=(*disks, disk))

    def has(self, disk: str) -> bool:
        """Whether the disk with this path was in the volume group when it was last located."""
        return self._location is not None and disk in self._location.disks

    @property
    def attached(self) -> Mapping[str, str]:
        """The kernel's sequence number of each disk of the volume group, by the disk's path.

        These are the numbers when the group was located last (`Disks.sequences`). For a missing
        disk, number and path are those of the time when the disk was last present.
        """
        attachments = self._location.attached.values() if self._location is not None else ()
        return {path: sequence for _, sequence, path in attachments}

    def forget(self) -> None:
        """Drop the cached report of the volume group; do not cache one that is being read either.

        Called after a command whose effect on the volume group is unknown.
        """
        self._generation = object()

    def state(self, *, is_refused: bool) -> report.Group | None:
        """Return the volume group as it is now; None if the group is not on this node.

        Runs one command if the last report may be outdated, else none; in rare cases two commands.
        `is_refused` tells that the last read raised GroupRefused. Raises GroupRefused if the group
        must not be used or lvm2 hides it, GroupSilent if a disk that may be the group's does not
        answer, and CommandError.

        1. If no disk can have changed and the fingerprint of the group's disks is that of the last
           report, the cached group is returned, unless it is too old (`_confirm_cached`).
        2. If no disk can have changed, lvm2 is asked for a report of the disks known so far. The
           report counts if it shows the group, whole and for this node alone.
        3. Otherwise all disks are scanned and the group is located anew. If that proves the cached
           report to be true, the cached group is returned.
        4. lvm2 is asked for a report of the located disks, if need be once more by a new session.
        """
        cached, self._known, generation = self._known, None, self._generation
        if cached is not None and cached.generation is not generation:
            cached = None
        if cached is not None and not self._may_have_moved(cached):
            fingerprint = self._fingerprint(cached.location)
            if (unchanged := self._confirm_cached(cached, fingerprint)) is not None:
                return unchanged
            # Have lvm2 report on the disks known so far. If a commit added or removed disks, the
            # report differs from the location, and all disks are scanned below.
            group = None if fingerprint is None else self._read_report(cached.location)
            # Use the report only if the group is this node's alone: lvm2 also shows a group that
            # was exported meanwhile. Such a group is located anew below, and refused there.
            if group is not None and group.is_one_node_s and _is_whole_on(group, cached.location):
                return self._remembered(group, cached.location, fingerprint, generation)
        location = self._locate()
        if location is None:
            return None
        fingerprint = self._fingerprint(location)
        if cached is not None and location == cached.location:
            unchanged = self._confirm_cached(cached, fingerprint)
            if unchanged is not None:
                return unchanged
        group = self._read_report(location)
        if group is None and self._renew and not is_refused:
            # Ask a new shell of lvm2's before the group counts as hidden: the group is on the
            # disks, but lvm2 did not show it.
            self._renew()
            group = self._read_report(location)
        if group is None:
            raise errors.GroupRefused(self.name, _why_hidden(location))
        return self._remembered(group, location, fingerprint, generation)

    def _may_have_moved(self, cached: _Known) -> bool:
        """Whether disks of the volume group may have come or gone since the last scan.

        True also if the last scan is a minute old, or if a disk of the group is missing.
        """
        is_old = time.monotonic() - self._located >= _BLIND_SECONDS
        return self.is_outdated or is_old or bool(cached.location.missing)

    def _confirm_cached(
        self, cached: _Known, fingerprint: Fingerprint | None
    ) -> report.Group | None:
        """Return the cached volume group if it is still true, and keep it cached; else return None.

        The cached group is not used if the fingerprint of its disks has changed, if the report is
        ten minutes old, or if the kernel has no status of a copy-on-write snapshot, as for an
        inactive one. Snapshots whose COW store overflowed since the report are marked in the
        result: an overflow changes no metadata, and so no fingerprint.
        """
        is_old = time.monotonic() - cached.time_seconds >= _LASTS_SECONDS
        overflowed = None if fingerprint != cached.fingerprint or is_old else self._lost(cached)
        if overflowed is None:
            return None
        if overflowed:
            group = cached.group
            changed = {name: replace(group.volumes[name], overflowed=True) for name in overflowed}
            cached = replace(cached, group=replace(group, volumes={**group.volumes, **changed}))
        self._known = cached
        return cached.group

    def _lost(self, cached: _Known) -> list[str] | None:
        """Return the names of the copy-on-write snapshots that overflowed since the report.

        The result is None if the kernel has no status of one of the snapshots. One ioctl reads the
        numbers of events of all devices, and one more ioctl the status of each snapshot that had an
        event.
        """
        if not cached.group.readable_copy_on_write:
            return []
        events, overflowed = self._devices.events(self.name), []
        for name in cached.group.readable_copy_on_write:
            if (present_events := events.get(name)) is None:
                return None
            if cached.snapshot_events.get(name) == present_events:
                continue
            status = self._devices.own_status(self.name, name)
            if not status:
                return None
            if devicemapper.has_overflowed(status):
                overflowed.append(name)
            else:
                cached.snapshot_events[name] = present_events
        return overflowed

    def _locate(self) -> Location | None:
        """Scan all disks and locate the volume group anew; return None if the group is absent.

        Logs disks that are ignored. After an error, which is raised as by `locate`, the next read
        scans all disks again.
        """
        # Clear the flag before the scan, because the scan may miss a change that happens during the
        # scan.
        self.is_outdated, self._located = False, time.monotonic()
        try:
            disks = self._scan()
            location = locate(
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
        # Replace the location in one assignment: commands that begin during the scan see the disks
        # of the earlier location.
        self._location = location
        self._ignore(claims(disks, self.name) if location is None else location.ignored)
        self._before = location or self._before
        return location

    def _ignore(self, ignored_disks: Iterable[tuple[str, str]]) -> None:
        """Keep the disks that claim to be the volume group's but are ignored, and log each new one.

        A disk is logged again if the reason is another one than before.
        """
        logged, self.ignored = set(self.ignored), tuple(ignored_disks)
        for path, why in self.ignored:
            if (path, why) not in logged:
                _log.warning("volume group %s: %s is ignored: it %s", self.name, path, why)

    def _read_report(self, location: Location) -> report.Group | None:
        """Run lvm2's report on the disks of this location, and return the volume group.

        The result is None if lvm2 shows no group of the name, or a group with another UUID.
        """
        # Read the numbers of events before the report. So a snapshot that overflows during the
        # report is either reported as overflowed, or has one more event at the next check.
        self._events = self._devices.events(self.name)
        node_report = report.read(self._lvm_at(location), self._devices.overflowed)
        group = node_report.groups.get(self.name)
        return group if group is not None and group.uuid == location.uuid else None

    def _remembered(
        self,
        group: report.Group,
        location: Location,
        fingerprint: Fingerprint | None,
        generation: object,
    ) -> report.Group:
        """Return a volume group that lvm2 has just reported; also cache it if it is proved true.

        The group is cached only if its fingerprint is the same before and after the report, and no
        device of the group is suspended.
        """
        if group.missing_disks != len(location.missing):
            # Scan again at the next read: the labels were read during a write, or lvm2 found other
            # disks missing than the scan of the labels did.
            self.is_outdated = True
        # Do not cache a group with a suspended device: a resume writes no metadata, so the cache
        # would not notice the resume.
        is_suspended = any(volume.suspended for volume in group.volumes.values())
        if (
            fingerprint is not None
            and fingerprint == self._fingerprint(location)
            and not is_suspended
        ):
            snapshot_events = {
                name: self._events[name]
                for name in group.readable_copy_on_write
                if name in self._events and group.volumes[name].active
            }
            self._known = _Known(
                group, location, fingerprint, time.monotonic(), generation, snapshot_events
            )
        return group

    def _fingerprint(self, location: Location) -> Fingerprint | None:
        """Read the fingerprint of the metadata on the disks of this location; None if unknown.

        Also notes the length of the metadata text, for the memory that lvm2 is given.
        """
        remaining = command.remaining_seconds()
        patience = PATIENCE_SECONDS if remaining is None else remaining
        fingerprint = self._disks.fingerprint(location.disks, patience)
        sizes_bytes = [text.size_bytes for mark in fingerprint or () for text in mark.texts]
        self._text_bytes = max(sizes_bytes, default=self._text_bytes)
        return fingerprint

    def _lvm_at(self, location: Location | None) -> Lvm:
        """Return lvm2 confined to the disks of this location; to no disk if it is None.

        lvm2 gets enough memory for the metadata text of the volume group.
        """
        disks = (_NO_DISK,) if location is None else location.disks
        return replace(
            self.node, devices=disks, settings=(*self.node.settings, *_memory(self._text_bytes))
        )


def _memory(text_bytes: int) -> tuple[str, ...]:
    """Return lvm.conf(5) settings that give lvm2 memory for metadata text of this length, in bytes.

    None are needed as long as lvm2's default is enough. The text may double in length until the
    next report. The memory is a power of two, so that the setting changes rarely: lvm2's shell is
    restarted for another setting.
    """
    needed_bytes, memory_bytes = 2 * text_bytes + _BESIDE_TEXT_BYTES, _IO_BYTES
    while memory_bytes < needed_bytes:
        memory_bytes *= 2
    return (f"global/io_memory_size={memory_bytes >> 10}",) if memory_bytes > _IO_BYTES else ()


def _is_whole_on(group: report.Group, location: Location) -> bool:
    """Whether lvm2's report of the volume group has as many disks as the location, none missing."""
    return not group.missing_disks and len(group.disks) == len(location.disks)


def _why_hidden(location: Location) -> str:
    """Return a text for error messages: why lvm2 may hide a volume group whose disks are present.

    A group with the system id of another node is hidden. This node's own system id is not compared:
    it has five sources (lvmsystemid(7)), some of them outside a container.
    """
    if not location.system_id:
        bearers = ", ".join(location.disks)
        return f"{bearers} bear it, and lvm2 does not show it: see `pvs -a` and lvm.conf(5)"
    return (
        f"it is the node's with the system id {location.system_id}, and lvm2 keeps it from this one"
        " (`lvm systemid`); `vgexport` it there and `vgimport` it here, or see `A group of another"
        " node` in docs/operations.md"
    )
