"""Carver's volumes, as LVM's tags and the kernel's devices tell of them."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from agent import errors
from agent.ids import VolumeId
from lvm import command, devices, names, report, tags, volumes
from lvm import errors as lvm_errors
from lvm.layout import Layout
from lvm.lvm2 import Lvm

VOLUME_PREFIX = "vol"
# Inline volumes, which have ids of kubelet's and live as long as their pods.
INLINE_PREFIX = "eph"

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

READY = "ready"
WIPING = "wiping"

# Those who only watch are served from a report of this age, and wait for a new one so long.
_RECENT_SECONDS = 60.0
_WATCHING_SECONDS = 5.0


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

    @property
    def layout(self) -> Layout:
        """How it lies on disks, as its class said when it was made."""
        return Layout.parse(self.facts.get(LAYOUT, ""))

    @property
    def is_ephemeral(self) -> bool:
        """Whether it is an inline volume, which no CreateVolume made and no DeleteVolume ends."""
        return EPHEMERAL in self.facts

    @property
    def wiping(self) -> bool:
        """Whether it was deleted, and only its wiping is left to do."""
        return self.facts.get(STATE) == WIPING


@dataclass(frozen=True)
class Seen:
    """A report, or the error in place of one, and when that was."""

    time_seconds: float
    report: report.Report | None
    error: lvm_errors.LvmError | None = None

    def is_recent(self) -> bool:
        """Whether it need not be read again for those who only watch."""
        return 0 <= time.time() - self.time_seconds < _RECENT_SECONDS


class Inventory:
    """Finds volumes: by id, by name, all of them.

    Each call reads anew what it decides by. The last report is kept for those who only watch.
    """

    def __init__(self, lvm: Lvm, kernel_devices: devices.Devices, groups: Sequence[str]) -> None:
        self._lvm = lvm
        self._devices = kernel_devices
        self._groups = groups
        self._seen = Seen(0.0, None)
        self._watching = threading.Lock()

    def read(self) -> report.Report:
        """All that lvm2 knows now: one command."""
        known = report.read(self._lvm)
        self._seen = Seen(time.time(), known)
        return known

    def recent(self) -> tuple[report.Report, float]:
        """What lvm2 knew at most a minute ago, and when (epoch, seconds), to watch it by.

        However many ask, and however often, it is one command a minute, and none where calls
        read reports anyway. An error is raised again for as long.
        """
        with self._watching:
            if not self._seen.is_recent():
                self._look()
            seen = self._seen
        if seen.report is None:
            # The same error each time: without the traces of those who met it before.
            raise (seen.error or lvm_errors.BadReport("none was read")).with_traceback(None)
        return seen.report, seen.time_seconds

    def _look(self) -> None:
        try:
            with command.time_limit(_WATCHING_SECONDS):
                self.read()
        except lvm_errors.LvmError as error:
            self._seen = Seen(time.time(), None, error)

    def require_groups(self, known: report.Report) -> None:
        """Raise GroupMissing for one of Carver's groups that is not there."""
        for name in self._groups:
            known.group(name)

    def all(self, known: report.Report) -> list[Volume]:
        """Every volume in Carver's groups, also those that are being wiped.

        Raises GroupMissing: a list that lacks a group's volumes would say they are gone.
        """
        self.require_groups(known)
        return list(self.present(known))

    def present(self, known: report.Report) -> Iterator[Volume]:
        """Every volume in those of Carver's groups that are there."""
        for group in (known.groups[one] for one in self._groups if one in known.groups):
            for logical in group.volumes.values():
                if (volume := _volume(group, logical)) is not None:
                    yield volume

    def named(self, known: report.Report, name: str, prefix: str = VOLUME_PREFIX) -> Volume | None:
        """The volume that the CO calls `name`, in whichever of Carver's groups it is."""
        own_name = names.logical_volume(prefix, name)
        return next((one for one in self.present(known) if one.name == own_name), None)

    def get(self, known: report.Report, volume_id: str) -> Volume:
        """The volume of that id, even one that is being wiped.

        Raises NoSuchVolume when the report proves that it is not there, OtherGroup when its
        group is not here: then nothing is proved.
        """
        parsed = VolumeId.parse(volume_id)
        if parsed is None:
            raise errors.NoSuchVolume(volume_id)
        group = known.groups.get(parsed.group)
        if group is None:
            raise errors.OtherGroup(volume_id, f"group {parsed.group} is not on this node")
        if not parsed.is_of(group.uuid):
            raise errors.OtherGroup(volume_id, f"group {parsed.group} here has another UUID")
        logical = group.volumes.get(parsed.name)
        volume = None if logical is None else _volume(group, logical)
        if volume is None:
            raise errors.NoSuchVolume(volume_id)
        return volume

    def require(self, volume_id: str) -> Volume:
        """The volume of that id, by a fresh report; one that was deleted is not there."""
        volume = self.get(self.read(), volume_id)
        if volume.wiping or volume.is_ephemeral:
            raise errors.NoSuchVolume(volume_id)
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
        group, name = volume.group.name, volume.name
        found = self._devices.find(group, name)
        if found is None:
            volumes.activate(self._lvm, group, name)
            found = self._devices.find(group, name)
        if found is None:
            raise lvm_errors.Inactive(group, name)
        return found


def _volume(group: report.Group, logical: report.LogicalVolume) -> Volume | None:
    facts = tags.decode(logical.tags)
    if NAME not in facts:
        return None
    identity = VolumeId.of(group, logical.name)
    size_bytes, health = logical.size_bytes, logical.health
    return Volume(identity, group, logical.name, size_bytes, facts, logical.open, health)


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
    return logical_name(volume_id).startswith((f"{INLINE_PREFIX}-", f"{INLINE_PREFIX}."))
