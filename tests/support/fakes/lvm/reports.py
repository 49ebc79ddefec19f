"""What `lvm fullreport` says."""

import json
from collections.abc import Iterator

from fakes.lvm.allocation import longest_run
from fakes.lvm.arguments import Arguments
from fakes.lvm.kernel import KernelSide
from fakes.lvm.machine import LABEL
from fakes.lvm.records import (
    LABEL_BYTES,
    METADATA_BYTES,
    FakeDisk,
    FakeGroup,
    FakePool,
    FakeThin,
    FakeVolume,
    ranges_of,
)

# lib/report/values.h: what stands for yes, where a column knows yes and no only.
_BINARY = {
    *("vg_exported", "pv_missing", "pv_allocatable", "pv_in_use"),
    *("lv_suspended", "lv_snapshot_invalid"),
}
_LISTS = {"vg_tags", "pv_tags", "lv_tags", "lv_layout"}


class Reports(KernelSide):
    """The report."""

    def _fullreport(self, arguments: Arguments) -> str:
        assert arguments.take("--reportformat") == "json"
        assert arguments.take("--units") == "b"
        assert arguments.flag("--nosuffix")
        columns = {}
        while part := arguments.take("--configreport"):
            columns[part] = arguments.take("--options").split(",")
        rows = [self._report(group) for group in [*self.groups.values()] if self._sees(group)]
        if orphans := self._orphans():
            rows.append({"pv": orphans, "pvseg": []})
        chosen = [
            {
                part: [{key: row[key] for key in columns[part]} for row in rows_of_part]
                for part, rows_of_part in one.items()
            }
            for one in rows
        ]
        return json.dumps({"report": [_formatted(one, self._told.settings) for one in chosen]})

    def _report(self, group: FakeGroup) -> dict[str, list[dict[str, str]]]:
        missing = {one.name for one in group.disks if one.missing or not self._reaches(one)}
        # Of one moment: another command may add one meanwhile, which lvm2's lock would keep back.
        volumes = [*group.volumes.values()]
        return {
            "vg": [
                {
                    "vg_name": group.name,
                    "vg_uuid": group.uuid,
                    "vg_extent_size": str(group.extent_size_bytes),
                    "vg_tags": ",".join(sorted(group.tags)),
                    "vg_missing_pv_count": str(len(missing)),
                    "vg_exported": "exported" if group.exported else "",
                    "vg_lock_type": group.lock_type,
                    "vg_mda_size": str(group.metadata_bytes),
                    "vg_mda_free": str(max(0, group.metadata_free_bytes)),
                    "max_lv": str(group.max_lv),
                    "vg_allocation_policy": group.policy,
                }
            ],
            "pv": [
                {
                    "pv_name": "[unknown]" if disk.name in missing else disk.name,
                    "pv_uuid": disk.uuid,
                    "pv_pe_count": str(disk.extents),
                    "pv_pe_alloc_count": str(disk.extents - group.free(disk)),
                    "pv_missing": "missing" if disk.name in missing else "",
                    "pv_allocatable": "allocatable" if disk.allocatable else "",
                    "pv_in_use": "used",
                    "pv_tags": ",".join(sorted(disk.tags)),
                    "pe_start": str(disk.pe_start_bytes),
                    "pv_mda_size": str(0 if disk.name in missing else disk.metadata_bytes),
                    "pv_mda_used_count": str(int(disk.name not in missing)),
                }
                for disk in group.disks
            ],
            "lv": [self._row(group, volume) for volume in volumes],
            "pvseg": [
                {"pv_uuid": disk.uuid, "lv_name": name, "pvseg_size": str(size)}
                for disk in group.disks
                for name, size in (*_segments(group, disk.name), *_free(group, disk))
                if size
            ],
            "seg": [
                {
                    "lv_name": volume.name,
                    "seg_start": "0",
                    "seg_pe_ranges": ranges_of(group, volume),
                    "stripes": str(_stripes(volume)),
                    "thin_id": str(volume.number) if isinstance(volume, FakeThin) else "",
                    "transaction_id": str(volume.transaction)
                    if isinstance(volume, FakeThin | FakePool)
                    else "",
                }
                for volume in volumes
            ],
        }

    def _row(self, group: FakeGroup, volume: FakeVolume) -> dict[str, str]:
        metadata, pool = "", volume.pool if isinstance(volume, FakeThin) else ""
        origin = volume.origin
        if isinstance(volume, FakePool):
            metadata = str(sum(volume.metadata.values()) * group.extent_size_bytes)
        elif volume.cache:
            # Not a pool but a part of it has the cache.
            pool, origin = f"[{volume.cache.name}_cvol]", origin or f"[{_origin(volume)}]"
        is_suspended = self.is_suspended(group.name, volume.name)
        return {
            "lv_name": volume.name,
            "lv_uuid": volume.uuid,
            "lv_size": str(volume.length * group.extent_size_bytes),
            "lv_tags": ",".join(sorted(volume.tags)),
            "lv_active": "active" if volume.active else "",
            "lv_layout": _layout_words(volume),
            "pool_lv": pool,
            "origin": origin,
            "lv_health_status": volume.health,
            "lv_suspended": "suspended" if is_suspended else "",
            "lv_metadata_size": metadata,
            **_status(volume),
            "lv_read_ahead": str(volume.tuning.read_ahead_bytes),
            # A rate of 0 is none, and reported so.
            "raid_min_recovery_rate": str(volume.tuning.minimum_recovery_kib or ""),
            "raid_max_recovery_rate": str(volume.tuning.maximum_recovery_kib or ""),
        }

    def _sees(self, group: FakeGroup) -> bool:
        """Whether reports show it: they leave out other nodes' (vgs(8), --foreign and --shared)."""
        is_there = any(self._reaches(disk) for disk in group.disks)
        return is_there and not self._is_foreign(group) and not group.lock_type

    def _orphans(self) -> list[dict[str, str]]:
        """Disks that lvm2 has labelled, and no group has: they are reported without a group."""
        taken = {disk.name for group in self.groups.values() for disk in group.disks}
        return [
            {
                "pv_name": device.path,
                "pv_uuid": device.contents.uuid,
                **dict.fromkeys(("pv_pe_count", "pv_pe_alloc_count"), "0"),
                **dict.fromkeys(("pv_missing", "pv_allocatable", "pv_tags"), ""),
                # A label of a group that is not there any more.
                "pv_in_use": "used" if device.contents.label == "used" else "",
                "pe_start": str(LABEL_BYTES + METADATA_BYTES),
                "pv_mda_size": str(METADATA_BYTES),
                "pv_mda_used_count": "1",
            }
            for device in self.devices
            if device.contents is not None
            and device.contents.fs_type == LABEL
            and device.path not in taken
            and (not self._told.devices or device.path in self._told.devices)
        ]


def _formatted(
    part: dict[str, list[dict[str, str]]], settings: dict[str, str]
) -> dict[str, list[dict[str, str]]]:
    """The rows of a group in the form that lvm.conf's `report` section asks for."""

    def value(column: str, text: str) -> str:
        if settings.get("report/binary_values_as_numeric") == "1" and column in _BINARY:
            return "01"[bool(text)] if text != "unknown" else "-1"
        if settings.get("report/mark_hidden_devices") == "0":
            text = text.strip("[]")
        if column in _LISTS:
            text = text.replace(",", settings.get("report/list_item_separator", ","))
        return text

    compact = settings.get("report/compact_output") == "1"
    return {
        name: [
            {
                column: value(column, text)
                for column, text in row.items()
                if not compact or any(other[column] for other in rows)
            }
            for row in rows
        ]
        for name, rows in part.items()
    }


def _status(volume: FakeVolume) -> dict[str, str]:
    """What lvm2 asks the kernel; of what is not active it knows nothing."""
    if isinstance(volume, FakePool) and volume.active:
        status = volume.status(4 << 20)
        return {
            "data_percent": f"{status.data_percent:.2f}",
            "metadata_percent": f"{status.metadata_percent:.2f}",
            "lv_snapshot_invalid": "",
            "lv_permissions": "writeable",
        }
    known = volume.is_copy_on_write and volume.active
    percent = f"{100.0 if volume.overflowed else volume.data_percent:.2f}" if known else ""
    invalid = "snapshot invalid" if volume.overflowed else ""
    writable = "writeable" if volume.active else "unknown"
    return {
        "data_percent": percent,
        "metadata_percent": "",
        "lv_snapshot_invalid": invalid if known else "unknown",
        "lv_permissions": "read-only" if volume.read_only else writable,
    }


def _origin(volume: FakeVolume) -> str:
    """What a cached volume, or a pool, holds its data in."""
    part = "_tdata" if isinstance(volume, FakePool) else ""
    if volume.cache:
        part += "_corig" if volume.cache_kind == "cache" else "_wcorig"
    return volume.name + part


def _layout_words(volume: FakeVolume) -> str:
    if isinstance(volume, FakePool):
        return "thin,pool"
    if volume.cache:
        return volume.cache_kind
    if isinstance(volume, FakeThin):
        return "thin,sparse"
    return f"raid,{volume.layout.kind}" if volume.layout.is_raid else volume.layout.kind


def _stripes(volume: FakeVolume) -> int:
    """How many stripes or images lvm2 reports: none of what is in a pool."""
    if isinstance(volume, FakeThin):
        return 0
    return 1 if volume.cache else volume.layout.disks


def _free(group: FakeGroup, disk: FakeDisk) -> Iterator[tuple[str, int]]:
    """The runs of free extents of a disk: the longest, and the rest in runs of one extent."""
    longest = longest_run(group, disk)
    yield "", longest
    yield from [("", 1)] * (group.free(disk) - longest)


def _segments(group: FakeGroup, disk: str) -> Iterator[tuple[str, int]]:
    """What lies on a disk, by the names that lvm2 reports, and how many extents of it."""
    if group.moving is not None and disk in group.moving:
        [source] = (one for one in group.disks if one.name == group.moving[0])
        yield "[pvmove0]", source.extents - group.free(source)
        if disk == source.name:
            return
    for volume in [*group.volumes.values()]:
        size = volume.extents.get(disk, 0)
        if isinstance(volume, FakePool):
            yield f"[{volume.name}_tmeta]", volume.metadata.get(disk, 0)
        if volume.layout.metadata_extents and size:
            index, of_metadata = list(volume.extents).index(disk), volume.layout.metadata_extents
            yield f"[{volume.name}_rimage_{index}]", size - of_metadata
            yield f"[{volume.name}_rmeta_{index}]", of_metadata
        else:
            name = _origin(volume)
            yield (name if name == volume.name else f"[{name}]"), size
        if volume.cache:
            yield f"[{volume.cache.name}_cvol]", volume.cache.taken(disk)
    yield "[lvol0_pmspare]", group.spare.get(disk, 0)
