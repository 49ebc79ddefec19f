"""Device classes: the volume group, layout, file system and cache of volumes."""

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

# Default size of a COW store: a fifth of the origin, about what changes within some days.
SNAPSHOT_SIZE = Reserve(percent=20)

# Value of `zero` with which lvm2 zeroes only the first sectors of a new volume.
ZERO_FIRST = "first"
# Values of `zero`: how much of a new volume is zeroed before use, its first sectors or all of it.
ZEROS = (ZERO_FIRST, tag.FULLY)
# Values of `repair`: whether RAID volumes are repaired on request only, or automatically.
REPAIRS = MANUAL, AUTO = ("manual", "auto")
# Values of `encryption`: the formats of encrypted volumes.
ENCRYPTIONS = ("luks2",)
# Values of `erase`: how a deleted encrypted volume is erased. Its header is zeroed in any case. The
# data are erased as the setting `wipe` says (`zero`), left (`crypto`), or discarded (`discard`).
ERASURES = ERASE_ZERO, ERASE_CRYPTO, ERASE_DISCARD = ("zero", "crypto", "discard")
# Values of `erase` with which only the header of an encrypted volume is zeroed. Without its header
# the volume cannot be read.
ERASE_HEADER_ONLY = (ERASE_CRYPTO, ERASE_DISCARD)
# Values of `bypass_workqueue`, with the kinds of I/O that bypass dm-crypt's work queues
# (Documentation/admin-guide/device-mapper/dm-crypt.rst).
BYPASSES: Mapping[str, frozenset[str]] = {
    "none": frozenset(),
    "read": frozenset({"read"}),
    "write": frozenset({"write"}),
    "both": frozenset({"read", "write"}),
}


@dataclass(frozen=True)
class DeviceClass:
    """A device class, which a StorageClass names: how the class's volumes are made and treated.

    `pool` is set for a class with the layout thin, and None otherwise.
    """

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
    # How much of a new volume is zeroed before use; with FULLY also all extents by which the
    # volume grows.
    zero: str = ZERO_FIRST
    # Whether RAID volumes are repaired automatically.
    repair: str = MANUAL
    # Time, in seconds, for which a disk must be missing before an automatic repair.
    repair_after_seconds: int = 600
    # Format of the encryption; empty for a class without encryption.
    encryption: str = ""
    # Whether dm-crypt passes discards of encrypted volumes on to the disk.
    discard: bool = False
    # How the data of a deleted encrypted volume are erased.
    erase: str = ERASE_ZERO
    # File with the key of encrypted volumes, for CSI calls that send no key.
    key_file: Path | None = None
    # Kinds of I/O on encrypted volumes that bypass dm-crypt's work queues.
    bypass_workqueue: str = "none"


# Keys of a table [[classes]], with the parsers of their values.
CLASS_KEYS: Mapping[str, Callable[[Any], Any]] = {
    "name": values.parse_lvm_name,
    "group": values.parse_lvm_name,
    "default": values.parse_flag,
    "layout": values.choice(*layout.KINDS),
    "stripes": values.parse_count,
    "mirrors": values.parse_count,
    "stripe_size": values.parse_size,
    "reserve": values.parse_reserve,
    "snapshot_size": values.parse_share,
    "over_provisioning": values.parse_ratio,
    "pool_size": values.parse_reserve,
    "autoextend_threshold": values.parse_percent,
    "autoextend_percent": values.parse_percent,
    "refuse_above": values.parse_percent,
    "chunk_size": values.parse_chunk_size,
    "cache": values.choice(*caches.KINDS),
    "cache_mode": values.choice(*caches.MODES),
    "cache_size": values.parse_share,
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
# Keys of device classes and StorageClasses that were removed, each with what to do instead.
REMOVED: Mapping[str, str] = {
    tag.REENCRYPT: "was removed after version 0.2.0: leave it out. A clone or restore has the"
    " master key of its source; for another master key copy the data into a new volume",
}
# Keys that only a class with encryption may have.
_OF_ENCRYPTED = {"discard", "erase", "key_file", "bypass_workqueue"}


def parse(source: str, tables: object) -> tuple[DeviceClass, ...]:
    """Parse the tables [[classes]] into device classes; raises BadConfig."""
    checked = values.read(source, "classes", tables, CLASS_KEYS, ("name", "group"), REMOVED)
    classes = [_class(source, position, table) for position, table in checked]
    if len({device_class.name for device_class in classes}) != len(classes):
        raise errors.BadConfig(source, "classes", "two classes have the same name")
    defaults = [device_class for device_class in classes if device_class.default]
    if len(defaults) > 1:
        names = ", ".join(device_class.name for device_class in defaults)
        raise errors.BadConfig(source, "classes", f"more than one is the default: {names}")
    return tuple(classes)


def _class(source: str, position: str, table: dict[str, Any]) -> DeviceClass:
    key = "layout"
    try:
        parsed_layout = table["layout"] = _layout(table)
        table["pool"] = _pool(table, parsed_layout)
        key = "cache"
        table["cache"] = _cache(table, parsed_layout)
    except ValueError as error:
        raise errors.BadConfig(source, f"{position}.{key}", str(error)) from None
    device_class = DeviceClass(**table)
    if not parsed_layout.is_raid and table.keys() & {"repair", "repair_after_seconds"}:
        why = f"is for layouts with copies or parity: {', '.join(layout.RAIDS)}"
        raise errors.BadConfig(source, f"{position}.repair", why)
    if parsed_layout.is_thin and "zero" in table:
        why = "is for layouts with extents of their own: a thin pool zeroes what it gives out"
        raise errors.BadConfig(source, f"{position}.zero", why)
    if not device_class.encryption and (encryption_keys := table.keys() & _OF_ENCRYPTED):
        key = min(encryption_keys)
        raise errors.BadConfig(
            source, f"{position}.{key}", 'is for classes with encryption = "luks2"'
        )
    try:
        filesystem.check_options(device_class.fs_type, device_class.mkfs_options)
    except mount_errors.BadOption as error:
        raise errors.BadConfig(source, f"{position}.mkfs_options", str(error)) from None
    if uuid := filesystem.fixed_uuid(device_class.fs_type, device_class.mkfs_options):
        why = f"would give each volume of the class the same UUID, {uuid}; leave it out"
        raise errors.BadConfig(source, f"{position}.mkfs_options", why)
    return device_class


def _layout(table: dict[str, Any]) -> Layout:
    """Remove the keys of the layout from a class's table, and return the layout."""
    kind = table.pop("layout", LINEAR.kind)
    return Layout(
        kind,
        stripes=table.pop("stripes", 1),
        mirrors=table.pop("mirrors", int(layout.is_mirrored(kind))),
        stripe_size_bytes=table.pop("stripe_size", 0),
    )


# Keys of a class for its thin pool, with the fields of thin.Policy that they set.
POOL_KEYS: Mapping[str, str] = {
    "over_provisioning": "over_provisioning",
    "pool_size": "size",
    "autoextend_threshold": "autoextend_threshold",
    "autoextend_percent": "autoextend_percent",
    "refuse_above": "refuse_above",
    "chunk_size": "chunk_size_bytes",
}


def _pool(table: dict[str, Any], parsed_layout: Layout) -> thin.Policy | None:
    """Remove the keys of the thin pool from a class's table, and return the pool's policy.

    None for another layout than thin. Raises ValueError for keys of a pool with another layout, and
    for thresholds that contradict each other.
    """
    fields = {field: table.pop(key) for key, field in POOL_KEYS.items() if key in table}
    if not parsed_layout.is_thin:
        if fields:
            keys = ", ".join(key for key, field in POOL_KEYS.items() if field in fields)
            raise ValueError(f"{keys}: only for layout thin, this is {parsed_layout.kind}")
        return None
    policy = thin.Policy(**fields)
    if policy.autoextend_threshold >= policy.refuse_above:
        raise ValueError("autoextend_threshold must be less than refuse_above")
    return policy


def _cache(table: dict[str, Any], parsed_layout: Layout) -> Cache | None:
    """Remove the keys of the cache from a class's table, and return the cache.

    None for a class without a cache. Raises ValueError for keys of a cache without a cache, and for
    a layout that can have none.
    """
    options = {key: table.pop(key) for key in ("cache_mode", "cache_size") if key in table}
    kind = table.pop("cache", None)
    if kind is None:
        if options:
            raise ValueError(f"{', '.join(options)}: only for a class with a cache")
        return None
    if not (parsed_layout.is_linear or parsed_layout.is_thin):
        raise ValueError(f"cache: only for layouts linear and thin, this is {parsed_layout.kind}")
    mode = caches.WRITEBACK if kind == caches.WRITECACHE else caches.WRITETHROUGH
    size = options.get("cache_size", Cache.size)
    return Cache(kind, options.get("cache_mode", mode), size)
