"""What device-mapper tells and does: the seam `lvm.active_devices.Devices`."""

import errno
import os
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from fakes.devices import BLOCK_BYTES, LEFTOVER, FakeDevice, Media
from fakes.lvm import repairs
from fakes.lvm.machine import Machine, data_node_of, node_of
from fakes.lvm.records import FakeGroup, FakePool, FakeThin, FakeVolume, first_extent

from lvm import lvm_errors as lvm_errors
from lvm.active_devices import Device, Devices, Events, Exceptions, Written, mapping_name
from lvm.devicemapper import Cache, Mirror, Raid, Snapshot, Status, WriteCache
from mount import mount_errors as mount_errors


@dataclass
class FakeExceptions(Exceptions):
    """What of an origin was written since a snapshot of it was taken."""

    origin: Media
    kept: Media
    chunk_bytes: int = BLOCK_BYTES

    def chunks(self) -> Iterator["array[int]"]:
        """In no order that helps, a few at a time."""
        those = self.origin.blocks.keys() | self.kept.blocks.keys()
        every = [
            one for one in those if self.origin.blocks.get(one) is not self.kept.blocks.get(one)
        ]
        for at in range(0, len(every), 256):
            yield array("Q", every[at : at + 256])


class KernelSide(Machine, Devices):
    """The seam `lvm.active_devices.Devices`: what the kernel has of the volumes that are active."""

    targets_are_loaded = False

    def _volumes(self, group: str) -> Mapping[str, FakeVolume]:
        # A copy: it is looked at while lvm2 is at work.
        return dict(self.groups[group].volumes) if group in self.groups else {}

    def _seen(self, group: str, name: str) -> FakeVolume | None:
        return self.groups[group].volumes.get(name) if group in self.groups else None

    def load_targets(self) -> None:
        """The targets are there from now on."""
        self.targets_are_loaded = True

    def find(self, group: str, name: str) -> Device | None:
        volume = self._seen(group, name)
        if volume is None or not volume.active:
            return None
        try:
            device = self.devices.get(node_of(group, name))
        except FileNotFoundError:  # it is removed beside this look, here and below
            return None
        uuid = self.groups[group].uuid.replace("-", "")
        own = volume.uuid.replace("-", "")
        return Device(device.path, (device.major, device.minor), uuid, own)

    def mapping(self, device: Device) -> Device | None:
        name = mapping_name(device)
        for one in list(self.devices):
            if one.of is not None and one.of.path == device.path and one.path.endswith(f"/{name}"):
                return replace(device, path=one.path, number=one.number, name=name, below=device)
        return None

    def close_leftovers(self, device: Device) -> None:
        for one in list(self.devices):
            is_left = one.path.startswith(LEFTOVER) and not self.devices.is_open(one.path)
            if is_left and one.of is not None and one.of.path == device.path:
                self.devices.remove(one.path)
                one.of.held -= 1

    def is_mapping_open(self, mapping: Device) -> bool:
        return self.devices.knows(mapping.path) and self.devices.is_open(mapping.path)

    def active(self, group: str) -> tuple[str, ...]:
        found = self._volumes(group).values()
        whole = [one.name for one in found if one.active]
        return (*whole, *(f"{one.name}{part}" for one in found for part in one.left))

    def events(self, group: str) -> Mapping[str, Events]:
        found = self._volumes(group)
        return {
            one: (number, int(one in found and found[one].overflowed))
            for number, one in enumerate(self.active(group))
        }

    def written(self, group: str) -> Mapping[str, Written]:
        found = self._volumes(group).values()
        snapshots = (one for one in found if one.is_copy_on_write and one.active)
        return {one.name: ((253, 0), int(1000 * one.data_percent)) for one in snapshots}

    def own_status(self, group: str, name: str) -> tuple[Status, ...]:
        return self.status(group, name)

    def status(self, group: str, name: str) -> tuple[Status, ...]:
        if name.startswith("pvmove"):
            return self._move_status(self.groups[group])
        volume = self._seen(group, name)
        if volume is None or not volume.active:
            return ()
        if isinstance(volume, FakeThin):
            volume = self.groups[group].volumes[volume.pool]
        if isinstance(volume, FakePool):
            return (volume.status(self.groups[group].extent_size_bytes),)
        if volume.is_copy_on_write:
            size = self._size(self.groups[group], volume)
            sectors = volume.length * self.groups[group].extent_size_bytes // 512
            used = int(volume.data_percent / 100 * sectors)
            return (Snapshot(size, "Invalid" if volume.overflowed else "", used, sectors),)
        if volume.cache:
            return (self._cache_status(group, volume),)
        if not volume.layout.metadata_extents:
            return ()
        missing = {disk.name for disk in self.groups[group].disks if disk.missing}
        dead = missing | set(volume.failed)
        size = volume.length * self.groups[group].extent_size_bytes
        health = "".join(
            "D" if disk in dead else "a" if disk in volume.rebuilding else "A"
            for disk in volume.extents
        )
        left = max(volume.rebuilding.values(), default=0)
        action = "recover" if left else "idle"
        volume.rebuilding = {disk: one - 1 for disk, one in volume.rebuilding.items() if one > 1}
        sectors = size // 512
        synced, differ = sectors // (left + 1), 8 * (volume.health == "mismatches exist")
        return (Raid(size, volume.layout.kind, health, synced, sectors, action, differ),)

    def _move_status(self, group: FakeGroup) -> tuple[Status, ...]:
        """Each look finds it further; then lvm2's process puts it on record."""
        if group.moving is None:
            return ()
        group.move_looks -= 1
        if not group.move_looks:
            repairs.moved(group)
            return ()
        return (Mirror(group.extent_size_bytes, repairs.LOOKS - group.move_looks, repairs.LOOKS),)

    def _cache_status(self, group: str, volume: FakeVolume) -> Cache | WriteCache:
        """Where it is written back, a block is done between two looks."""
        size = volume.length * self.groups[group].extent_size_bytes
        dirty = volume.dirty_blocks
        volume.dirty_blocks -= bool(volume.cleaning and dirty)
        if volume.cache_kind == "cache":
            return Cache(size, "rw", dirty_blocks=dirty)
        return WriteCache(size, 0, 4096, 4096 - dirty, 0)

    def has_lost_disk(self, group: str, name: str) -> bool:
        with suppress(OSError):
            return self._active(group, name).has_lost_disk
        return False

    def overflowed(self, disk: str, offset_bytes: int) -> bool | None:
        for name, group in self.groups.items():
            for volume in self._volumes(name).values():
                starts = {one.name: one.pe_start_bytes for one in group.disks}
                before = first_extent(volume) * group.extent_size_bytes
                if disk in volume.extents and starts[disk] + before == offset_bytes:
                    return volume.overflowed
        return None

    def suspend(self, group: str, name: str) -> None:
        self._active(group, name).suspend()

    def resume(self, group: str, name: str) -> None:
        self._active(group, name).resume()

    def is_suspended(self, group: str, name: str) -> bool:
        with suppress(OSError):
            return self._active(group, name).suspended
        return False

    def is_open(self, group: str, name: str) -> bool:
        with suppress(FileNotFoundError):
            return self.find(group, name) is not None and self.devices.is_open(node_of(group, name))
        return False

    def is_closed(self, group: str, name: str) -> bool:
        return not self.is_open(group, name)

    def thin_id(self, group: str, name: str) -> int | None:
        volume = self.groups[group].volumes.get(name)
        return volume.number if isinstance(volume, FakeThin) and volume.active else None

    def pool_data(self, group: str, pool: str) -> str:
        self._active_pool(group, pool)
        return data_node_of(group, pool)

    def pool_metadata(self, group: str, pool: str) -> str:
        self._active_pool(group, pool)
        return f"/dev/mapper/{group}-{pool}_tmeta"

    def reserve_metadata(self, group: str, pool: str) -> None:
        found = self._active_pool(group, pool)
        if found.held is not None:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), pool)
        found.held = {
            one.number: dict(one.media.blocks) for one in self.groups[group].thin(found.name)
        }

    def release_metadata(self, group: str, pool: str) -> None:
        found = self._active_pool(group, pool)
        if found.held is None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), pool)
        found.held = None

    def _active_pool(self, group: str, pool: str) -> FakePool:
        found = self.groups[group].volumes.get(pool)
        if not isinstance(found, FakePool) or not found.active:
            raise lvm_errors.Inactive(group, pool)
        return found

    def exceptions(self, group: str, name: str) -> Exceptions:
        volume = self.groups[group].volumes[name]
        if not volume.active or not volume.is_copy_on_write:
            raise lvm_errors.Inactive(group, name)
        if volume.overflowed:
            raise mount_errors.BadReport("it is no store of a snapshot that can be read")
        return FakeExceptions(self.groups[group].volumes[volume.origin].media, volume.media)

    def _active(self, group: str, name: str) -> FakeDevice:
        if self.find(group, name) is None:
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO), f"{group}/{name}")
        return self.devices.get(node_of(group, name))

    def wrote(self, device: str, length_bytes: int) -> None:
        """So many bytes were written on a device for the first time since its snapshots."""
        for group in self.groups.values():
            for volume in self._volumes(group.name).values():
                if not volume.active or node_of(group.name, volume.name) != device:
                    continue
                if isinstance(volume, FakeThin):
                    self._fill(group, volume, length_bytes)
                for one in self._snapshots(group, volume):
                    area = one.length * group.extent_size_bytes
                    one.data_percent += 100 * length_bytes / area
                    if one.data_percent >= 100:
                        one.overflowed = one.media.unreadable = True

    @staticmethod
    def _fill(group: FakeGroup, volume: FakeThin, length_bytes: int) -> None:
        pool = group.volumes[volume.pool]
        assert isinstance(pool, FakePool)
        pool.used_data_blocks += -(-length_bytes // pool.chunk_size_bytes)
        whole = pool.status(group.extent_size_bytes).data_blocks
        assert pool.used_data_blocks <= whole, "a writer would wait for room"
