"""Device classes: the group, layout, file system and cache of volumes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.core import errors, tag
from agent.settings import values
from lvm import caches, layout, thin
from lvm.caches import Cache
from lvm.layout import LINEAR, NO_RESERVE, Layout, Reserve
from mount import filesystem
from mount import mount_errors as mount_errors

# A fifth of the origin: about what changes in some days.
SNAPSHOT_SIZE = Reserve(percent=20)

# How much of a new volume is zeroed before use: its first sectors, by lvm2, or all of it.
ZERO_FIRST = "first"
ZEROS = (ZERO_FIRST, tag.FULLY)
REPAIRS = MANUAL, AUTO = ("manual", "auto")
# How a volume is encrypted, and how an encrypted one is erased beside its header: as `wipe` says,
# not at all, or by a discard.
ENCRYPTIONS = ("luks2",)
ERASURES = ERASE_ZERO, ERASE_CRYPTO, ERASE_DISCARD = ("zero", "crypto", "discard")
# Without its header an encrypted volume cannot be read: these methods zero nothing else.
ERASE_HEADER_ONLY = (ERASE_CRYPTO, ERASE_DISCARD)
# What bypasses dm-crypt's work queues (Documentation/admin-guide/device-mapper/dm-crypt.rst).
BYPASSES: Mapping[str, frozenset[str]] = {
    "none": frozenset(),
    "read": frozenset({"read"}),
    "write": frozenset({"write"}),
    "both": frozenset({"read", "write"}),
}


@dataclass(frozen=True)
class DeviceClass:
    """A class, which a StorageClass names. `pool` is set for layout thin."""

    name: str
    group: str
    default: bool = False
    layout: Layout = LINEAR
    reserve: Reserve = NO_RESERVE
    snapshot_size: Reserve = SNAPSHOT_SIZE
    fs_type: str = "ext4"
    mkfs_options: tuple[str, ...] = ()
    pool: thin.Policy | None = None
    cache: Cache | None = None
    # Whether all of a new volume, and of what it grows by, is zeroed before use.
    zero: str = ZERO_FIRST
    # Whether a RAID volume is repaired automatically once a disk is missing for so long.
    repair: str = MANUAL
    repair_after_seconds: int = 600
    # Empty for none. Of an encrypted volume: whether dm-crypt passes discards on; how it is erased;
    # the file with the key for calls without one; which of dm-crypt's work queues are bypassed.
    encryption: str = ""
    discard: bool = False
    erase: str = ERASE_ZERO
    key_file: Path | None = None
    bypass_workqueue: str = "none"


CLASS_KEYS: Mapping[str, Callable[[Any], Any]] = {
    "name": values.parse_lvm_name,
    "group": values.parse_lvm_name,
    "default": values.parse_flag,
    "layout": values.choice(*layout.KINDS),
    "stripes": values.parse_count,
    "mirrors": values.parse_count,
    "stripe_size": values.parse_size,
    "reserve": values.parse_reserve,
    "snapshot_size": values.parse_part,
    "over_provisioning": values.parse_ratio,
    "pool_size": values.parse_reserve,
    "autoextend_threshold": values.parse_percent,
    "autoextend_percent": values.parse_percent,
    "refuse_above": values.parse_percent,
    "chunk_size": values.parse_chunk_size,
    "cache": values.choice(*caches.KINDS),
    "cache_mode": values.choice(*caches.MODES),
    "cache_size": values.parse_part,
    "fs_type": values.choice(*filesystem.FILE_SYSTEMS),
    "mkfs_options": values.parse_words,
    "zero": values.choice(*ZEROS),
    "repair": values.choice(*REPAIRS),
    "repair_after_seconds": values.parse_count,
    "encryption": values.choice(*ENCRYPTIONS),
    "discard": values.parse_flag,
    "erase": values.choice(*ERASURES),
    "key_file": values.parse_absolute_path,
    "bypass_workqueue": values.choice(*BYPASSES),
}
# Keys of classes and StorageClasses that were removed, each with what is to be done about it.
REMOVED: Mapping[str, str] = {
    tag.REENCRYPT: "was removed after version 0.2.0: leave it out. A clone or restore has the"
    " master key of its source; for another master key copy the data into a new volume",
}
# Keys for classes with encryption only.
_OF_ENCRYPTED = {"discard", "erase", "key_file", "bypass_workqueue"}


def parse(source: str, listed: object) -> tuple[DeviceClass, ...]:
    """Read the tables [[classes]]; raises BadConfig."""
    checked = values.read(source, "classes", listed, CLASS_KEYS, ("name", "group"), REMOVED)
    classes = [_class(source, where, table) for where, table in checked]
    if len({one.name for one in classes}) != len(classes):
        raise errors.BadConfig(source, "classes", "two classes have the same name")
    defaults = [one for one in classes if one.default]
    if len(defaults) > 1:
        names = ", ".join(one.name for one in defaults)
        raise errors.BadConfig(source, "classes", f"more than one is the default: {names}")
    return tuple(classes)


def _class(source: str, where: str, table: dict[str, Any]) -> DeviceClass:
    key = "layout"
    try:
        shape = table["layout"] = _layout(table)
        table["pool"] = _pool(table, shape)
        key = "cache"
        table["cache"] = _cache(table, shape)
    except ValueError as error:
        raise errors.BadConfig(source, f"{where}.{key}", str(error)) from None
    one = DeviceClass(**table)
    if not shape.is_raid and table.keys() & {"repair", "repair_after_seconds"}:
        why = f"is for layouts with copies or parity: {', '.join(layout.RAIDS)}"
        raise errors.BadConfig(source, f"{where}.repair", why)
    if shape.is_thin and "zero" in table:
        why = "is for layouts with extents of their own: a thin pool zeroes what it gives out"
        raise errors.BadConfig(source, f"{where}.zero", why)
    if not one.encryption and (beside := table.keys() & _OF_ENCRYPTED):
        key = min(beside)
        raise errors.BadConfig(source, f"{where}.{key}", 'is for classes with encryption = "luks2"')
    try:
        filesystem.check_options(one.fs_type, one.mkfs_options)
    except mount_errors.BadOption as error:
        raise errors.BadConfig(source, f"{where}.mkfs_options", str(error)) from None
    if uuid := filesystem.fixed_uuid(one.fs_type, one.mkfs_options):
        why = f"would give each volume of the class the same UUID, {uuid}; leave it out"
        raise errors.BadConfig(source, f"{where}.mkfs_options", why)
    return one


def _layout(table: dict[str, Any]) -> Layout:
    """Remove the keys of the layout from `table` and return it."""
    kind = table.pop("layout", LINEAR.kind)
    return Layout(
        kind,
        stripes=table.pop("stripes", 1),
        mirrors=table.pop("mirrors", int(layout.is_mirrored(kind))),
        stripe_size_bytes=table.pop("stripe_size", 0),
    )


# The keys of a thin class's pool, with the fields of its policy.
POOL_KEYS: Mapping[str, str] = {
    "over_provisioning": "over_provisioning",
    "pool_size": "size",
    "autoextend_threshold": "autoextend_threshold",
    "autoextend_percent": "autoextend_percent",
    "refuse_above": "refuse_above",
    "chunk_size": "chunk_size_bytes",
}


def _pool(table: dict[str, Any], shape: Layout) -> thin.Policy | None:
    """Remove the keys of the pool from `table` and return it."""
    given = {field: table.pop(key) for key, field in POOL_KEYS.items() if key in table}
    if not shape.is_thin:
        if given:
            keys = ", ".join(key for key, field in POOL_KEYS.items() if field in given)
            raise ValueError(f"{keys}: only for layout thin, this is {shape.kind}")
        return None
    policy = thin.Policy(**given)
    if policy.autoextend_threshold >= policy.refuse_above:
        raise ValueError("autoextend_threshold must be less than refuse_above")
    return policy


def _cache(table: dict[str, Any], shape: Layout) -> Cache | None:
    """Remove the keys of the cache from `table` and return it."""
    given = {key: table.pop(key) for key in ("cache_mode", "cache_size") if key in table}
    kind = table.pop("cache", None)
    if kind is None:
        if given:
            raise ValueError(f"{', '.join(given)}: only for a class with a cache")
        return None
    if not (shape.is_linear or shape.is_thin):
        raise ValueError(f"cache: only for layouts linear and thin, this is {shape.kind}")
    mode = caches.WRITEBACK if kind == caches.WRITECACHE else caches.WRITETHROUGH
    size = given.get("cache_size", Cache.size)
    return Cache(kind, given.get("cache_mode", mode), size)
