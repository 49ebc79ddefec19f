"""A node's groups, the devices of what is active in them, and which groups lvm2 may change."""

import itertools
import threading
from collections.abc import Iterator, Sequence

from fakes.devices import FakeDevice, FakeDevices
from fakes.lvm.arguments import Arguments
from fakes.lvm.records import (
    Failure,
    FakeDisk,
    FakeGroup,
    FakePool,
    FakeThin,
    FakeVolume,
    lost_ranges,
)

from lvm import names
from mount.stacks import Stack

LABEL = "LVM2_member"
_UUID_GROUPS = (6, 4, 4, 4, 4, 4, 6)


class _Told(threading.local):
    """What the command of this thread was told; calls and tasks run commands side by side."""

    def __init__(self) -> None:
        self.settings: dict[str, str] = {}
        # The disks that it may look at; None for those that the machine has.
        self.devices: set[str] | None = None


class Machine:
    """The groups of a node, and what is active."""

    # Of several machines: their groups have UUIDs of their own.
    number = 0

    def __init__(self, devices: FakeDevices) -> None:
        self.groups: dict[str, FakeGroup] = {}
        self.version = "2.03.16(2) (2022-05-18)"
        self.devices = devices
        # The disks that the node's devices file lists; None where there is no such file.
        self.devices_file: set[str] | None = None
        self._told = _Told()
        # What the node's lvm.conf has; of lists, a group's name or nothing.
        self.conf: dict[str, str] = {}
        self._serial = itertools.count(1)
        self._numbers = itertools.count(1)

    def add_group(
        self, name: str, disk_extents: Sequence[int] = (256,), extent_size_bytes: int = 4 << 20
    ) -> FakeGroup:
        """A group with so many extents on each of its disks."""
        disks = [
            FakeDisk(f"/dev/fake-{name}-{number}", self._uuid(), extents)
            for number, extents in enumerate(disk_extents)
        ]
        group = self.groups[name] = FakeGroup(name, self._uuid(), extent_size_bytes, disks)
        return group

    def _reaches(self, disk: FakeDisk) -> bool:
        """Whether a disk is one that lvm2 may look at; it takes others for missing.

        lvmdevices(8): --devices outweighs a devices file, which Debian's lvm2 heeds if told.
        """
        heeded = self._told.settings.get("devices/use_devicesfile") == "1"
        seen = self._told.devices or (self.devices_file if heeded else None)
        return seen is None or disk.name in seen

    @property
    def system_id(self) -> str:
        """What this node has in lvmlocal.conf."""
        source = self._told.settings.get("global/system_id_source")
        return self._told.settings.get("local/system_id", "") if source == "lvmlocal" else ""

    def _is_foreign(self, group: FakeGroup) -> bool:
        return group.system_id not in ("", self.system_id)

    def _require_own(self, group: FakeGroup) -> None:
        """What lvm2 changes nothing of (lib/metadata/metadata.c: access_vg_…, vg_read())."""
        if group.exported:
            raise Failure(f"Volume group {group.name} is exported")
        if group.lock_type:
            which = f"{group.name} with lock type {group.lock_type}"
            raise Failure(f"Cannot access VG {which} that requires lvmlockd.")
        if self._is_foreign(group):
            own = f"local system ID {self.system_id}" if self.system_id else "unknown local system"
            which = f"{group.name} with system ID {group.system_id} with {own}"
            raise Failure(f"Cannot access VG {which}.")

    def deactivate(self, group: str, name: str) -> None:
        """Take a volume's device away, as a reboot or an operator does; a snapshot stays."""
        found = self.groups[group]
        volume = found.volumes[name]
        if not volume.is_copy_on_write:
            for one in (*self._snapshots(found, volume), volume):
                self._deactivate_one(found, one)

    def _deactivate_one(self, group: FakeGroup, volume: FakeVolume) -> None:
        if volume.active:
            self.devices.remove(node_of(group.name, volume.name))
            volume.active = False
            if isinstance(volume, FakePool):
                self.devices.get(data_node_of(group.name, volume.name)).held = 0
                self.devices.remove(data_node_of(group.name, volume.name))

    def _activate(self, group: FakeGroup, volume: FakeVolume) -> None:
        """An origin and its snapshots are active together."""
        top = group.volumes[volume.origin] if volume.is_copy_on_write else volume
        for one in (top, *self._snapshots(group, top)):
            self._activate_one(group, one)

    def _activate_one(self, group: FakeGroup, volume: FakeVolume) -> None:
        path = f"{group.name}/{volume.name}"
        if isinstance(volume, FakePool) and volume.damaged and not volume.active:
            raise Failure(f"Check of pool {path} failed (status:64). Manual repair required!")
        if volume.left:
            raise Failure(
                f"Activation of logical volume {path} is prohibited while logical volume"
                f" {path}{volume.left[0]} is active."
            )
        if any(one.startswith(f"{volume.name}_rmeta_") for one in group.volumes):
            raise Failure(f"Refusing activation of RAID LV {path} with visible SubLVs.")
        if isinstance(volume, FakeThin):
            pool = group.volumes[volume.pool]
            assert isinstance(pool, FakePool)
            if volume.transaction == pool.transaction_in_kernel < pool.transaction:
                raise Failure("device-mapper: reload ioctl on  (253:7) failed: No data available")
        if self._told.settings.get("activation/volume_list", group.name) != group.name:
            return  # and it succeeds
        if not volume.active and self._told.settings.get("global/activation") != "0":
            node, size = node_of(group.name, volume.name), self._size(group, volume)
            device = self.devices.add(node, size, volume.media)
            listed = self._told.settings.get("activation/read_only_volume_list") == group.name
            device.read_only = volume.read_only or listed
            below = [one.name for one in group.disks if self.devices.knows(one.name)]
            device.block_bytes = max(
                (self.devices.get(one).block_bytes for one in below), default=512
            )
            device.missing = lost_ranges(group, volume)
            self._stand(device, group, volume)
            volume.active = True
            self._watch(volume)
            if isinstance(volume, FakePool):
                # Held by the pool, so that nobody has it alone.
                data = data_node_of(group.name, volume.name)
                self._stand(added := self.devices.add(data, size, volume.media), group, volume)
                added.held = 1
            if isinstance(volume, FakeThin):
                self._activate(group, group.volumes[volume.pool])

    def _stand(self, device: FakeDevice, group: FakeGroup, volume: FakeVolume) -> None:
        """Have a device be as its disks are, where its blocks are theirs."""
        is_data = isinstance(volume, FakePool) and device.path.endswith("_tdata")
        below = [self.devices.get(one) for one in volume.extents if self.devices.knows(one)]
        is_plain = is_data or not (
            isinstance(volume, FakeThin | FakePool)
            or volume.layout.is_raid
            or volume.cache is not None
            or volume.origin
            or self._snapshots(group, volume)
        )
        device.stack = Stack(
            has_write_zeroes=is_plain and all(one.stack.has_write_zeroes for one in below),
            is_plain=is_plain,
            disks=frozenset(volume.extents),
        )
        device.doubts = {one.path: why for one in below for why in one.doubts.values()}
        device.lies = {lie for one in below for lie in one.lies}

    def _watch(self, volume: FakeVolume) -> None:
        """Have dmeventd watch what it can, as each command does that resumes such a device."""
        is_watchable = isinstance(volume, FakePool) or volume.layout.is_raid
        if self._told.settings.get("activation/monitoring") != "0":
            volume.watched = is_watchable or volume.is_copy_on_write

    @staticmethod
    def _size(group: FakeGroup, volume: FakeVolume) -> int:
        """What its device has: a snapshot's is as large as its origin."""
        shown = group.volumes[volume.origin] if volume.is_copy_on_write else volume
        return shown.length * group.extent_size_bytes

    @staticmethod
    def _snapshots(group: FakeGroup, volume: FakeVolume) -> list[FakeVolume]:
        every = list(group.volumes.values())
        return [one for one in every if one.is_copy_on_write and one.origin == volume.name]

    def _refuse_open(self, group: FakeGroup, volume: FakeVolume) -> None:
        for one in (volume, *self._snapshots(group, volume)):
            if self._is_open(group, one):
                raise Failure(f"Logical volume {group.name}/{one.name} in use.")

    def _is_open(self, group: FakeGroup, volume: FakeVolume) -> bool:
        return volume.active and self.devices.is_open(node_of(group.name, volume.name))

    def _group(self, name: str) -> FakeGroup:
        if name not in self.groups:
            raise Failure(f'Volume group "{name}" not found')
        self._require_own(self.groups[name])
        return self.groups[name]

    def _volume(self, arguments: Arguments) -> tuple[FakeGroup, FakeVolume]:
        path, *rest = arguments.rest()
        assert not rest, rest
        return self._found(path)

    def _found(self, path: str) -> tuple[FakeGroup, FakeVolume]:
        group_name, _, name = path.partition("/")
        group = self._group(group_name)
        if name not in group.volumes:
            raise Failure(f'Failed to find logical volume "{path}"')
        return group, group.volumes[name]

    def _uuid(self) -> str:
        # Unlike in the first characters, as LVM's own are.
        digits = f"{1000 * self.number + next(self._serial):032d}"[::-1]
        parts: Iterator[str] = iter(digits)
        return "-".join("".join(itertools.islice(parts, size)) for size in _UUID_GROUPS)


def node_of(group: str, name: str) -> str:
    return f"/dev/mapper/{names.device(group, name)}"


def data_node_of(group: str, pool: str) -> str:
    """The node of what a pool keeps its data on."""
    return f"{node_of(group, pool)}_tdata"
