"""Carver's volumes and snapshots, as LVM's tags and the kernel's devices tell of them."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from agent import errors, founding
from agent.founding import Foundations
from agent.ids import VolumeId
from lvm import command, devicemapper, devices, names, report, tags, volumes
from lvm import errors as lvm_errors
from lvm.layout import Layout
from lvm.lvm2 import Lvm

VOLUME_PREFIX = "vol"
# Inline volumes, which have ids of kubelet's and live as long as their pods.
INLINE_PREFIX = "eph"
SNAPSHOT_PREFIX = "snap"
POOL_PREFIX = "pool"
WIPE_PREFIX = "wipe"
# A snapshot for as long as a volume is copied, whose name it has.
BRIDGE_PREFIX = "copy"

# The facts that are kept as tags. NAME is on every volume of Carver's, and on no other.
NAME = "name"
STATE = "state"
SIZE = "size"
ACCESS = "access"
CAPABILITIES = "capabilities"
FORMATTED = "formatted"
EPHEMERAL = "ephemeral"
TARGET = "target"
LAYOUT = "layout"
CACHE = "cache"
# Of a volume that was made of something: the id of that.
FROM = "from"
# Of a snapshot: the logical volume it was taken of, and when (nanoseconds of the epoch).
SOURCE = "source"
TIME = "time"
# Of a snapshot of a group: the group snapshot's id, how many snapshots it has, what was asked for.
GROUP_SNAPSHOT = "groupSnapshot"
MEMBERS = "members"
ASKED = "asked"

READY = "ready"
COPYING = "copying"
WIPING = "wiping"

# Those who only watch are served from a report of this age, and wait for a new one so long.
_RECENT_SECONDS = 60.0
_WATCHING_SECONDS = 5.0
# What is read behind everyone's back keeps nobody waiting.
_BEHIND_SECONDS = 60.0


@dataclass(frozen=True)
class Volume:
    """A volume that Carver made: what LVM says of it, and its facts."""

    id: VolumeId
    group: report.Group
    name: str
    size_bytes: int
    facts: Mapping[str, str]
    open: bool = False
    health: str = ""
    read_only: bool = False

    @property
    def layout(self) -> Layout:
        """How it lies on disks, as its class said when it was made."""
        return Layout.parse(self.facts.get(LAYOUT, ""))

    @property
    def on_disks(self) -> report.LogicalVolume:
        """What of it lies on disks, and has a cache if any has: itself, or its pool."""
        return _lies_on(self.group, self.group.volume(self.name))

    @property
    def is_ephemeral(self) -> bool:
        """Whether it is an inline volume, which no CreateVolume made and no DeleteVolume ends."""
        return EPHEMERAL in self.facts

    @property
    def is_listed(self) -> bool:
        """Whether it is a volume for the callers of the Controller."""
        return not (self.wiping or self.copying or self.is_ephemeral)

    @property
    def copying(self) -> bool:
        """Whether it has not yet what it shall be made of; then it is no volume yet."""
        return self.facts.get(STATE) == COPYING

    @property
    def wiping(self) -> bool:
        """Whether it was deleted, and only its wiping is left to do."""
        return self.facts.get(STATE) == WIPING


@dataclass(frozen=True)
class Snapshot:
    """A volume as it was once. `size_bytes` is the volume's then, `area_bytes` its own."""

    id: VolumeId
    group: report.Group
    name: str
    source_id: VolumeId
    size_bytes: int
    time_nanoseconds: int
    area_bytes: int
    facts: Mapping[str, str]
    overflowed: bool | None = False
    pool: str = ""

    @property
    def is_thin(self) -> bool:
        """Whether it shares a pool with its source, and does not need it any more."""
        return bool(self.pool)

    @property
    def is_bridge(self) -> bool:
        """Whether it is there only for a volume to be copied from it."""
        return names.is_of(BRIDGE_PREFIX, self.name)

    @property
    def is_ready(self) -> bool:
        """Whether something can be made of it; not where its disk does not tell."""
        return self.overflowed is False

    @property
    def group_snapshot_id(self) -> str:
        """The group snapshot that it was taken for; empty where it was taken alone."""
        return self.facts.get(GROUP_SNAPSHOT, "")

    @property
    def problem(self) -> str:
        """Why nothing can be made of it, now and for ever; empty where something can."""
        if not self.overflowed:
            return ""
        return (
            f"its area of {self.area_bytes} bytes for what {self.source_id} overwrites was full,"
            " and what it held is lost"
        )


@dataclass(frozen=True)
class Seen:
    """The last report, when lvm2 was asked last, and the error if that brought none."""

    time_seconds: float
    report: report.Report | None
    error: lvm_errors.LvmError | None = None

    def is_recent(self) -> bool:
        """Whether it need not be read again for those who only watch."""
        return 0 <= time.time() - self.time_seconds < _RECENT_SECONDS


class Inventory:
    """Finds volumes and snapshots: by id, by name, all of them.

    Each call reads anew what it decides by. The last report is kept for those who only watch.
    """

    def __init__(
        self,
        lvm: Lvm,
        kernel_devices: devices.Devices,
        groups: Sequence[str],
        foundations: Foundations = founding.NONE,
    ) -> None:
        self._lvm = lvm
        self._devices = kernel_devices
        self._groups = groups
        self._foundations = foundations
        self._seen = Seen(0.0, None)
        self._watching = threading.Lock()
        self._held: frozenset[tuple[str, str]] = frozenset()
        # Whether a disk changed since the last report was asked for, and whether anyone cares.
        self._outdated = False
        self._glimpsed = False

    def read(self) -> report.Report:
        """All that lvm2 knows now: one command."""
        # Before the look: what changes meanwhile may be in it, or not.
        self._outdated = False
        known = report.read(self._lvm, self._devices.overflowed)
        self._seen = Seen(time.time(), known)
        return known

    def awake(self) -> report.Report:
        """The same, before a change; one more command for each device that was left suspended.

        lvm2 suspends a device while it changes its table. Killed meanwhile (SIGKILL), it leaves it
        so, and whoever reads or writes there waits for ever. lvm2 reports under the group's lock:
        what a report says is suspended is left over, not under way.
        """
        known = self.read()
        for group, logical in self._logical(known):
            held = (group.name, logical.name) in self._held
            if logical.suspended and not held and tags.decode(logical.tags):
                volumes.refresh(self._lvm, group.name, logical.name)
        return known

    @contextmanager
    def holding(self, volumes: Iterable[tuple[str, str]]) -> Iterator[None]:
        """Inside, these are suspended on purpose: they are not resumed. One call at a time.

        Each is a group's name and a logical volume's.
        """
        self._held = frozenset(volumes)
        try:
            yield
        finally:
            self._held = frozenset()

    def recent(self) -> tuple[report.Report, float]:
        """What lvm2 knew at most a minute ago, and when (epoch, seconds), to watch it by.

        However many ask, and however often, it is one command a minute, and none where calls
        read reports anyway. An error is raised again for as long.
        """
        with self._watching:
            if not self._seen.is_recent():
                self._look(_WATCHING_SECONDS)
            seen = self._seen
        if seen.report is None or seen.error is not None:
            # The same error each time: without the traces of those who met it before.
            raise (seen.error or lvm_errors.BadReport("none was read")).with_traceback(None)
        return seen.report, seen.time_seconds

    def glimpse(self, volume_id: str) -> Volume | None:
        """A volume as the last report has it, without asking lvm2; None where none tells of it.

        Whoever looks so has `renew` look anew when it is due.
        """
        self._glimpsed = True
        known = self._seen.report
        if known is None:
            return None
        if VolumeId.parse(volume_id) is None:
            return self.named(known, volume_id, INLINE_PREFIX)
        try:
            return self.get(known, volume_id)
        except (errors.NoSuchVolume, errors.OtherGroup):
            return None

    def outdate(self) -> None:
        """A disk changed, or may have: the last report need not be true any more."""
        self._outdated = True

    def renew(self, slow_seconds: float) -> None:
        """Read a report for those who glimpse, if the last one is old; an outdated one is sooner.

        Carver's own changes outdate it too, so it is not read anew each time.
        """
        age_seconds = abs(time.time() - self._seen.time_seconds)
        due_seconds = _RECENT_SECONDS if self._outdated else slow_seconds
        if self._glimpsed and age_seconds >= due_seconds:
            self._glimpsed = False
            with self._watching:
                self._look(_BEHIND_SECONDS)

    def _look(self, patience_seconds: float) -> None:
        try:
            with command.time_limit(patience_seconds):
                self.read()
        except lvm_errors.LvmError as error:
            self._seen = Seen(time.time(), self._seen.report, error)

    def require_group_of(self, known: report.Report, identity: str) -> None:
        """Raise OtherGroup for an id of a group that is not here: then nothing is proved."""
        _find(known, identity)

    def group(self, known: report.Report, name: str) -> report.Group:
        """A group to make volumes in; raises GroupMissing, GroupRefused."""
        return self._foundations.group(known, name)

    def require_groups(self, known: report.Report) -> None:
        """Raise GroupMissing, GroupRefused for one of Carver's groups that cannot be used."""
        for name in self._groups:
            self.group(known, name)

    def all(self, known: report.Report) -> list[Volume]:
        """Every volume in Carver's groups, also those that are being wiped.

        Raises GroupMissing: a list that lacks a group's volumes would say they are gone.
        """
        for name in self._groups:
            known.group(name)
        return list(self.present(known))

    def present(self, known: report.Report) -> Iterator[Volume]:
        """Every volume in those of Carver's groups that are there."""
        for group, logical in self._logical(known):
            if (volume := _volume(group, logical)) is not None:
                yield volume

    def own_groups(self, known: report.Report) -> Iterator[report.Group]:
        """Those of Carver's groups that are there."""
        return (known.groups[one] for one in self._groups if one in known.groups)

    def named(self, known: report.Report, name: str, prefix: str = VOLUME_PREFIX) -> Volume | None:
        """The volume that the CO calls `name`, in whichever of Carver's groups it is."""
        own_name = names.logical_volume(prefix, name)
        return next((one for one in self.present(known) if one.name == own_name), None)

    def get(self, known: report.Report, volume_id: str) -> Volume:
        """The volume of that id, even one that is being wiped.

        Raises NoSuchVolume when the report proves that it is not there, OtherGroup when its
        group is not here: then nothing is proved.
        """
        found = _find(known, volume_id)
        volume = None if found is None else _volume(*found)
        if volume is None:
            raise errors.NoSuchVolume(volume_id)
        return volume

    def snapshot(self, known: report.Report, snapshot_id: str) -> Snapshot:
        """The snapshot of that id; raises NoSuchSnapshot or OtherGroup, as `get` does."""
        found = _find(known, snapshot_id)
        snapshot = None if found is None else _snapshot(*found)
        if snapshot is None or snapshot.is_bridge:
            raise errors.NoSuchSnapshot(snapshot_id)
        own = snapshot.group_snapshot_id
        if own and own in self.half_made(known):
            raise errors.NoSuchSnapshot(snapshot_id)
        return snapshot

    def snapshots(self, known: report.Report) -> Iterator[Snapshot]:
        """Every snapshot that a caller asked for, in those of Carver's groups that are there."""
        half_made = self.half_made(known)
        for one in self.all_snapshots(known):
            if not one.is_bridge and one.group_snapshot_id not in half_made:
                yield one

    def members(self, known: report.Report, group_snapshot_id: str) -> list[Snapshot]:
        """The snapshots of a group that are there, be it whole or not."""
        every = self.all_snapshots(known)
        return [one for one in every if one.group_snapshot_id == group_snapshot_id]

    def half_made(self, known: report.Report) -> set[str]:
        """The group snapshots that are not whole; none of their snapshots is for callers."""
        found: defaultdict[str, list[Snapshot]] = defaultdict(list)
        for one in self.all_snapshots(known):
            if one.group_snapshot_id:
                found[one.group_snapshot_id].append(one)
        return {identity for identity, members in found.items() if not is_whole(members)}

    def all_snapshots(self, known: report.Report) -> Iterator[Snapshot]:
        """These, and those that volumes are copied from."""
        for group, logical in self._logical(known):
            if (snapshot := _snapshot(group, logical)) is not None:
                yield snapshot

    def copies_of(self, known: report.Report, source_id: str) -> list[str]:
        """The ids of the volumes that are being copied from a snapshot or a volume."""
        return [
            str(one.id)
            for one in self.present(known)
            if one.copying and one.facts.get(FROM) == source_id
        ]

    def doomed(self, known: report.Report) -> Iterator[Volume]:
        """All that is on record as deleted, and is only there to be wiped."""
        for group, logical in self._logical(known):
            volume = _volume(group, logical) or _remains(group, logical)
            if volume is not None and volume.wiping:
                yield volume

    def doomed_one(self, known: report.Report, identity: str) -> Volume:
        """What is on record as deleted under an id; raises NoSuchVolume, OtherGroup."""
        found = _find(known, identity)
        volume = None if found is None else _volume(*found) or _remains(*found)
        if volume is None or not volume.wiping:
            raise errors.NoSuchVolume(identity)
        return volume

    def _logical(self, known: report.Report) -> Iterator[tuple[report.Group, report.LogicalVolume]]:
        for group in self.own_groups(known):
            yield from ((group, logical) for logical in group.volumes.values())

    def require(self, volume_id: str) -> Volume:
        """The volume of that id, by a fresh report; one that was deleted is not there."""
        return self.usable(self.awake(), volume_id)

    def usable(self, known: report.Report, volume_id: str) -> Volume:
        """The volume of that id, as CreateVolume made it; one that was deleted is not there.

        Raises NoSuchVolume, OtherGroup, and Copying for one that is not complete.
        """
        volume = self.get(known, volume_id)
        if volume.wiping or volume.is_ephemeral:
            raise errors.NoSuchVolume(volume_id)
        if volume.copying:
            raise errors.Copying(volume_id, "it is not complete")
        return volume

    def device(self, volume_id: str) -> devices.Device | None:
        """The device of an active volume, found without a command; None proves nothing."""
        parsed = VolumeId.parse(volume_id)
        if parsed is None:
            name = names.logical_volume(INLINE_PREFIX, volume_id)
            found_in = (self._devices.find(group, name) for group in self._groups)
            return next(filter(None, found_in), None)
        found = self._devices.find(parsed.group, parsed.name)
        return found if found is not None and parsed.is_of(found.group_uuid) else None

    def activate(self, volume: Volume) -> devices.Device:
        """The volume's device; a command only where it is not active. Raises Inactive."""
        return self.ensure_active(volume.group.name, volume.name)

    def ensure_active(self, group: str, name: str, by: str = "") -> devices.Device:
        """The device of any logical volume; a command only where it is not active.

        `by` is whose activation brings it, where that is another's. Raises Inactive.
        """
        found = self._devices.find(group, name)
        if found is None:
            volumes.activate(self._lvm, group, by or name)
            found = self._devices.find(group, name)
        if found is None:
            raise lvm_errors.Inactive(group, name)
        return found

    def active(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Group and name of each active logical volume with a prefix; no command."""
        for group in self._groups:
            for name in self._devices.active(group):
                if names.is_of(prefix, name):
                    yield group, name

    def status(self, group: str, name: str) -> tuple[devices.Status, ...]:
        """What device-mapper says of an active logical volume, and of all that it stands on."""
        return self._devices.status(group, name)

    def status_of(self, volume_id: str) -> tuple[devices.Status, ...]:
        """The same of an active volume, by the CO's id."""
        parsed = VolumeId.parse(volume_id)
        name = logical_name(volume_id)
        found_in = (self.status(one, name) for one in ([parsed.group] if parsed else self._groups))
        return next(filter(None, found_in), ())

    def activate_snapshot(self, snapshot: Snapshot) -> devices.Device:
        """The snapshot's device, which is there whenever its source's is. Raises Inactive."""
        # For a copy-on-write snapshot lvm2 would ask whether its origin may be activated, too.
        by = "" if snapshot.is_thin else snapshot.source_id.name
        return self.ensure_active(snapshot.group.name, snapshot.name, by)

    def has_overflowed(self, snapshot: Snapshot) -> bool:
        """Whether an active snapshot was lost until now, as device-mapper says; no command."""
        told = self.status(snapshot.group.name, snapshot.name)
        return any(isinstance(one, devicemapper.Snapshot) and one.state for one in told)


def _find(known: report.Report, identity: str) -> tuple[report.Group, report.LogicalVolume] | None:
    """What has an id; None where nothing can have it, or the report proves that nothing has.

    Raises OtherGroup when the group is not here: then nothing is proved.
    """
    parsed = VolumeId.parse(identity)
    if parsed is None:
        return None
    group = known.groups.get(parsed.group)
    if group is None:
        raise errors.OtherGroup(identity, f"group {parsed.group} is not on this node")
    if not parsed.is_of(group.uuid):
        raise errors.OtherGroup(identity, f"group {parsed.group} here has another UUID")
    logical = group.volumes.get(parsed.name)
    return None if logical is None else (group, logical)


def _volume(group: report.Group, logical: report.LogicalVolume) -> Volume | None:
    facts = tags.decode(logical.tags)
    prefixes = (VOLUME_PREFIX, INLINE_PREFIX)
    if NAME not in facts or not any(names.is_of(one, logical.name) for one in prefixes):
        return None
    return _as_volume(group, logical, facts)


def _remains(group: report.Group, logical: report.LogicalVolume) -> Volume | None:
    """What is left of a snapshot that was parted from its origin, or did not come to have one.

    Its area holds what the origin held once, and is nobody's: being there is its record.
    """
    facts = tags.decode(logical.tags)
    if NAME not in facts or not _is_snapshot(logical.name) or logical.origin or logical.pool:
        return None
    return _as_volume(group, logical, {**facts, STATE: WIPING})


def _is_snapshot(name: str) -> bool:
    return names.is_of(SNAPSHOT_PREFIX, name) or names.is_of(BRIDGE_PREFIX, name)


def _as_volume(
    group: report.Group, logical: report.LogicalVolume, facts: Mapping[str, str]
) -> Volume:
    return Volume(
        VolumeId.of(group, logical.name),
        group,
        logical.name,
        logical.size_bytes,
        facts,
        open=logical.open,
        health=logical.health or _lies_on(group, logical).health,
        read_only=logical.read_only,
    )


def _lies_on(group: report.Group, logical: report.LogicalVolume) -> report.LogicalVolume:
    """What of a volume lies on disks: itself, or its pool."""
    return group.volumes.get(logical.pool, logical)


def _snapshot(group: report.Group, logical: report.LogicalVolume) -> Snapshot | None:
    facts = tags.decode(logical.tags)
    if NAME not in facts or not _is_snapshot(logical.name):
        return None
    if not (logical.origin or logical.pool):
        return None
    return Snapshot(
        id=VolumeId.of(group, logical.name),
        group=group,
        name=logical.name,
        source_id=VolumeId.of(group, facts[SOURCE]),
        size_bytes=int(facts[SIZE]),
        time_nanoseconds=int(facts[TIME]),
        area_bytes=logical.size_bytes,
        facts=facts,
        overflowed=logical.overflowed,
        pool=logical.pool,
    )


def snapshots_of(volume: Volume) -> Iterator[Snapshot]:
    """The snapshots of a volume, in the report that the volume is of."""
    every = (_snapshot(volume.group, one) for one in volume.group.volumes.values())
    return (one for one in every if one is not None and one.source_id == volume.id)


def is_whole(members: Sequence[Snapshot]) -> bool:
    """Whether these snapshots of a group are all that it has."""
    return bool(members) and len(members) == int(members[0].facts[MEMBERS])


def remains_of(snapshot: Snapshot) -> Volume:
    """What is left of a snapshot once it is parted from its origin: read-only, to be wiped."""
    facts = {**snapshot.facts, STATE: WIPING}
    return Volume(
        snapshot.id, snapshot.group, snapshot.name, snapshot.area_bytes, facts, read_only=True
    )


def group_of(volume_id: str) -> str:
    """The name of the group in a volume id; raises NoSuchVolume for what is no id."""
    parsed = VolumeId.parse(volume_id)
    if parsed is None:
        raise errors.NoSuchVolume(volume_id)
    return parsed.group


def logical_name(volume_id: str) -> str:
    """The logical volume's name, which is what calls on the same volume have in common."""
    parsed = VolumeId.parse(volume_id)
    return names.logical_volume(INLINE_PREFIX, volume_id) if parsed is None else parsed.name


def is_inline(volume_id: str) -> bool:
    """Whether the id can be an inline volume's only: such ids are the CO's, not Carver's."""
    return names.is_of(INLINE_PREFIX, logical_name(volume_id))
