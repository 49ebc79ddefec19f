"""What the disks of the fake lvm2's groups say of themselves."""

from collections.abc import Collection, Mapping

from fakes.devices import DEVICE_MAPPER_MAJOR, FakeDevices
from fakes.lvm import FakeDisk, FakeGroup, FakeLvm

from lvm import tags
from lvm.candidate_devices import Excluded, ExclusionReason
from lvm.disk_reader import PATIENCE_SECONDS, Disks, Fingerprint, Found, Unanswered
from lvm.labels import Group, Mark, PhysicalLabel, Position


class FakeDisks(Disks):
    """The seam `lvm.disk_reader.Disks`."""

    def __init__(self, lvm2: FakeLvm, devices: FakeDevices) -> None:
        self._lvm2 = lvm2
        self._devices = devices
        # The disks that do not answer, by their paths.
        self.hanging: set[str] = set()
        # The groups whose disks are not there, with whatever is on them.
        self.lost: set[str] = set()
        # How often all were looked for.
        self.scans = 0

    def scan(
        self,
        patience_seconds: float = PATIENCE_SECONDS,
        only_paths: Collection[str] = (),
    ) -> Mapping[str, Found]:
        """What there is to tell of each block device, by its path; of blank ones nothing."""
        self.scans += 1
        found: dict[str, Found] = {}
        # As lists: commands run meanwhile.
        for device in list(self._devices):
            if device.major == DEVICE_MAPPER_MAJOR:
                found[device.node] = Excluded(
                    ExclusionReason.VOLUME, device.path.removeprefix("/dev/mapper/")
                )
            elif (on_it := device.contents) and on_it.fs_type == "LVM2_member":
                label = PhysicalLabel(on_it.uuid, device.size_bytes, on_it.label == "used", None)
                found[device.path] = label
            elif device.partitions:
                found[device.path] = Excluded(ExclusionReason.PARTITIONED)
            elif device.holders:
                found[device.path] = Excluded(ExclusionReason.TAKEN, device.holders[0])
        found |= {disk.name: _label(group, disk) for group, disk in self._there()}
        found |= {path: Unanswered() for path in self.hanging}
        return {path: one for path, one in found.items() if not only_paths or path in only_paths}

    def fingerprint(
        self, paths: Collection[str], patience_seconds: float = PATIENCE_SECONDS
    ) -> Fingerprint | None:
        """The proof of what a group's metadata on these disks are; None where there is none."""
        wanted = [(group, disk) for group, disk in self._there() if disk.name in paths]
        position = {
            group.name: Position(group.seqno, group.text_bytes, group.checksum)
            for group in {group.name: group for group, _ in wanted}.values()
        }
        marks = {disk.name: Mark(disk.uuid, (position[group.name],)) for group, disk in wanted}
        whole = paths and not self.hanging.intersection(paths) and marks.keys() >= set(paths)
        return tuple(marks[path] for path in sorted(paths)) if whole else None

    def sequences(self, paths: Collection[str]) -> Mapping[str, str]:
        """By which number each of these disks was attached, of those that are there."""
        there = {one.path for one in list(self._devices)}
        there |= {disk.name for _, disk in self._there()}
        return dict.fromkeys(there.intersection(paths), "")

    def _there(self) -> list[tuple[FakeGroup, FakeDisk]]:
        groups = [one for one in list(self._lvm2.groups.values()) if one.name not in self.lost]
        return [(group, disk) for group in groups for disk in group.disks if not disk.missing]


def _label(group: FakeGroup, disk: FakeDisk) -> PhysicalLabel:
    size_bytes = disk.pe_start_bytes + disk.extents * group.extent_size_bytes
    uuids = tuple(one.uuid for one in group.disks)
    status = {"RESIZEABLE", "READ"} | ({"EXPORTED"} if group.exported else set())
    if not group.system_id:
        # Else it is a flag that an lvm2 which knows of no system ids does not know either.
        status.add("WRITE")
    every_tags = [group.tags, *(one.tags for one in group.volumes.values())]
    known = Group(
        group.name,
        group.uuid,
        group.seqno,
        uuids,
        frozenset(status),
        group.system_id,
        group.lock_type,
        has_own_tags=any(tags.decode(frozenset(one)) for one in every_tags),
    )
    active = (one for one in group.volumes.values() if one.active)
    is_active = any(disk.name in one.extents or not one.extents for one in active)
    groups = frozenset({group.uuid} if is_active else ())
    return PhysicalLabel(disk.uuid, size_bytes, True, known, active_groups=groups)
