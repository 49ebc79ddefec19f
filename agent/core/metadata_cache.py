"""A volume group as its disks and lvm2 show it, and the proof by which that is still true.

What lvm2 reported is kept, and is as good as a new report for as long as nothing was written to the
group: each commit of metadata moves the place on the disks where they are (lvm.labels), and looking
there takes microseconds, and no process. So absence is proved too, by a look after the question.
The report is read anew after a commit, whoever made it; after a command of which nobody knows what
it did; where a disk came or went; where a device was left suspended, or a snapshot is not active;
and when it is old. What the metadata do not say, such as whether a volume is active, is asked of
the kernel.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agent.core import errors
from agent.core.disks import Location, claims, locate
from lvm import devicemapper, lvm2, report
from lvm.devices import Devices, Events
from lvm.disks import Disks, Fingerprint, Found
from lvm.lvm2 import Lvm
from mount import command

_log = logging.getLogger(__name__)

# What is wrong without a trace in the metadata is found out this late.
_LASTS_SECONDS = 600.0
# So often the disks' labels are read where udev tells of none that came or went.
_BLIND_SECONDS = 60.0
# What lvm2 has for all that it reads and writes if nothing is said (global/io_memory_size in
# lvm.conf(5)), and needs beside a text: a longer one it could neither read nor write.
_IO_BYTES, _BESIDE_TEXT_BYTES = 8 << 20, 2 << 20
# A path that is no disk: lvm2 that is confined to it sees no group.
_NO_DISK = "/dev/null"


@dataclass(frozen=True)
class _Known:
    """A report of the group, and the proof by which it is still true."""

    group: report.Group
    location: Location
    fingerprint: Fingerprint
    time_seconds: float
    # The generation that the look which read it began in.
    generation: object
    # Of copy-on-write snapshots that were whole then: the events that they had had before.
    whole: dict[str, Events] = field(default_factory=dict)


class MetadataCache:
    """Looks at one group; one look at a time. `node` is how lvm2 is called for it.

    `scan` tells of the node's disks, `listed` which of them the operator named for the group;
    `renew` has a session with lvm2, if any, begun anew.
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
        # Whether a disk came, went or moved, perhaps.
        self.is_outdated = True
        self._name = name
        self._node = node
        self._disks = disks
        self._devices = devices
        self._scan = scan
        self._renew = renew
        self._location: Location | None = None
        # Where it was when it was here last: what is no more than called like it is not believed.
        self._before: Location | None = None
        # The disks that claim to be the group's and are not, each with the reason.
        self.ignored: Sequence[tuple[str, str]] = ()
        self._listed = listed
        # When its disks were looked for last (monotonic, seconds).
        self._located = 0.0
        # How long its metadata are, as they were seen last.
        self._text_bytes = 0
        # Of its devices, before the last report was read.
        self._events: Mapping[str, Events] = {}
        self._known: _Known | None = None
        # Replaced by forget(): what a look of an earlier generation read is not used again.
        self._generation = object()

    @property
    def lvm(self) -> Lvm:
        """lvm2, which sees this group's disks and no others."""
        return self._lvm_at(self._location)

    def lvm_with(self, disk: str) -> Lvm:
        """The same, which sees a disk more: one that is to become the group's."""
        # A group that is not here has no disk to be put beside.
        own = self._location.disks if self._location is not None else ()
        return replace(self.lvm, devices=(*own, disk))

    def has(self, disk: str) -> bool:
        """Whether that path was a disk of the group when it was looked at last."""
        return self._location is not None and disk in self._location.disks

    def forget(self) -> None:
        """A command may have done anything: what is known of the group is true no more.

        Nor is what a look finds that is under way.
        """
        self._generation = object()

    def state(self, *, is_refused: bool) -> report.Group | None:
        """The group as it is now; None where it is not on this node.

        One command where what is known of it may be true no more, else none. `is_refused`: it was
        when it was looked at last. Raises CommandError, GroupRefused, GroupSilent.
        """
        known, self._known, generation = self._known, None, self._generation
        if known is not None and known.generation is not generation:
            known = None
        if known is not None and not self._may_have_moved(known):
            mark = self._fingerprint(known.location)
            if (kept := self._kept(known, mark)) is not None:
                return kept
            # lvm2 sees these disks only: after a commit that was about disks it shows others.
            group = None if mark is None else self._shown(known.location)
            # What was exported meanwhile it shows too; the disks tell whose it is then.
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
            # The disks bear it: before a shell is believed that it is not, another is asked.
            self._renew()
            group = self._shown(location)
        if group is None:
            raise errors.GroupRefused(self._name, _why_hidden(location))
        return self._remembered(group, location, mark, generation)

    def _may_have_moved(self, known: _Known) -> bool:
        """Whether disks of the group may have come or gone since it was looked at."""
        is_old = time.monotonic() - self._located >= _BLIND_SECONDS
        return self.is_outdated or is_old or bool(known.location.missing)

    def _kept(self, known: _Known, mark: Fingerprint | None) -> report.Group | None:
        """The group that is known, with what came over its snapshots since, without a commit.

        None where it may be true no more: its disks have not that proof, it is old, or the kernel
        does not tell of a snapshot, as of inactive ones.
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
        """The snapshots that were lost since; None where the kernel does not tell of all.

        One ioctl for all, and one for each of which an event came.
        """
        if not known.group.readable_copy_on_write:
            return []
        events, lost = self._devices.events(self._name), []
        for name in known.group.readable_copy_on_write:
            if (had := events.get(name)) is None:
                return None
            if known.whole.get(name) == had:
                continue
            told = self._devices.own_status(self._name, name)
            if not told:
                return None
            if devicemapper.has_overflowed(told):
                lost.append(name)
            else:
                known.whole[name] = had
        return lost

    def _locate(self) -> Location | None:
        # Before the look: what changes meanwhile may be in it, or not.
        self.is_outdated, self._located = False, time.monotonic()
        try:
            disks = self._scan()
            found = locate(
                disks,
                self._name,
                self._before,
                self._listed(),
                sequences=self._disks.sequences,
                backed_up=lambda: lvm2.backed_up(self._node.root, self._name),
            )
        except errors.GroupRefused:
            self.is_outdated, self._location = True, None
            raise
        except BaseException:
            self.is_outdated = True
            raise
        # In one step: a command that others begin meanwhile sees the disks as they were.
        self._location = found
        self._ignore(claims(disks, self._name) if found is None else found.ignored)
        self._before = found or self._before
        return found

    def _ignore(self, found: Iterable[tuple[str, str]]) -> None:
        """Log once which disks only claim to be the group's."""
        before, self.ignored = set(self.ignored), tuple(found)
        for path, why in self.ignored:
            if (path, why) not in before:
                _log.warning("volume group %s: %s is ignored: it %s", self._name, path, why)

    def _shown(self, location: Location) -> report.Group | None:
        """What lvm2 says of the group there; None where it says of none, or of one on others."""
        # What is lost while lvm2 asks is in the report, or has one event more.
        self._events = self._devices.events(self._name)
        told = report.read(self._lvm_at(location), self._devices.overflowed)
        group = told.groups.get(self._name)
        return group if group is not None and group.uuid == location.uuid else None

    def _remembered(
        self,
        group: report.Group,
        location: Location,
        mark: Fingerprint | None,
        generation: object,
    ) -> report.Group:
        """The group, which is known from now on if nothing was committed while lvm2 read it."""
        if group.missing_disks != len(location.missing):
            # The labels were read while they were written, or lvm2 misses more.
            self.is_outdated = True
        if mark is not None and mark == self._fingerprint(location) and not _suspended(group):
            whole = {
                one: self._events[one]
                for one in group.readable_copy_on_write
                if one in self._events and group.volumes[one].active
            }
            self._known = _Known(group, location, mark, time.monotonic(), generation, whole)
        return group

    def _fingerprint(self, location: Location) -> Fingerprint | None:
        remaining = command.remaining_seconds()
        if remaining is None:
            found = self._disks.fingerprint(location.disks)
        else:
            found = self._disks.fingerprint(location.disks, remaining)
        texts = [text.size_bytes for one in found or () for text in one.texts]
        self._text_bytes = max(texts, default=self._text_bytes)
        return found

    def _lvm_at(self, location: Location | None) -> Lvm:
        disks = (_NO_DISK,) if location is None else location.disks
        return replace(
            self._node, devices=disks, settings=(*self._node.settings, *_memory(self._text_bytes))
        )


def _memory(text_bytes: int) -> tuple[str, ...]:
    """lvm.conf(5) settings for a group whose metadata are so long, and may become twice as long.

    In powers of two: with another setting lvm2's shell is begun anew.
    """
    needed, have = 2 * text_bytes + _BESIDE_TEXT_BYTES, _IO_BYTES
    while have < needed:
        have *= 2
    return (f"global/io_memory_size={have >> 10}",) if have > _IO_BYTES else ()


def _is_whole_on(group: report.Group, location: Location) -> bool:
    """Whether lvm2 shows the group on all these disks, and none of it anywhere else."""
    return not group.missing_disks and len(group.disks) == len(location.disks)


def _why_hidden(location: Location) -> str:
    """Why lvm2 may not show a group that is on disks here: only lvm2 knows whose it takes it for.

    This node's own system id has five sources (lvmsystemid(7)), some elsewhere in a container.
    """
    if not location.system_id:
        bearers = ", ".join(location.disks)
        return f"{bearers} bear it, and lvm2 does not show it: see `pvs -a` and lvm.conf(5)"
    return (
        f"it is the node's with the system id {location.system_id}, and lvm2 keeps it from this one"
        " (`lvm systemid`); `vgexport` it there and `vgimport` it here, or see `A group of another"
        " node` in docs/operations.md"
    )


def _suspended(group: report.Group) -> bool:
    """Whether a device was left suspended: whatever ends that writes no metadata."""
    return any(one.suspended for one in group.volumes.values())
