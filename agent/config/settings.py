"""What an operator decides: /etc/carver/config.toml, CARVER_* variables and flags, checked once.

A flag outweighs a variable, a variable the file, the file the default.
"""

import argparse
import re
import socket
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agent import errors
from lvm import caches, layout, names, pools, tuning
from lvm.caches import Cache
from lvm.layout import LINEAR, NO_RESERVE, Layout, Reserve
from mount import errors as mount_errors
from mount import filesystem

DRIVER_NAME = "lvm.csi.carver"
TOPOLOGY_KEY = f"topology.{DRIVER_NAME}/node"
DEFAULT_FILE = Path("/etc/carver/config.toml")
KUBELET_DIRECTORY = Path("/var/lib/kubelet")
DEFAULT_SOCKET = KUBELET_DIRECTORY / "plugins" / DRIVER_NAME / "csi.sock"
HALF = "half"
REGISTRY = KUBELET_DIRECTORY / "plugins_registry"
EMBEDDED_FILE = Path("/var/lib/carver/carver.img")

# CSI spec, "Size Limits": a string is at most 128 bytes; a node id too.
_MAXIMUM_NODE_ID = 128
# CSI spec, GetPluginInfoResponse: a domain name of at most 63 characters.
_MAXIMUM_DRIVER_NAME = 63
_MAXIMUM_PORT = 65535
_UNITS: Mapping[str, int] = {"": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGTPE", start=1)
    for suffix, base in (("", 1024), ("i", 1024), ("iB", 1024), ("B", 1000))
}


@dataclass(frozen=True)
class Address:
    """Where to listen; an empty host is every address of the node's."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_size(value: object) -> int:
    """Bytes, from a number or from a text such as `512MiB`, `10G` (1024) or `2TB` (1000)."""
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", str(value).strip())
    if match is None or match[2] not in _UNITS:
        raise ValueError("a size is a number of bytes, or such as 512MiB, 10GiB or 2TB")
    unit: int = _UNITS[match[2]]
    return int(match[1]) * unit


def _file_size(value: object) -> int | None:
    if value == HALF:
        return None
    if (size := parse_size(value)) == 0:
        raise ValueError("must be larger than 0")
    return size


def parse_count(value: object) -> int:
    """A whole number, from a number or a text."""
    if isinstance(value, bool) or not re.fullmatch(r"\d+", str(value)):
        raise ValueError("a whole number, 0 or more")
    return int(str(value))


def _flag(value: object) -> bool:
    known = {"true": True, "false": False}
    if str(value).lower() not in known:
        raise ValueError("true or false")
    return known[str(value).lower()]


def _choice(*allowed: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if value not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return str(value)

    return parse


def _absolute_path(value: object) -> Path:
    path = Path(str(value).removeprefix("unix://"))
    if not path.is_absolute() or "\0" in str(value):
        raise ValueError("an absolute path")
    return path


def _paths(value: object) -> tuple[str, ...]:
    found = tuple(str(_absolute_path(one)) for one in _words(value))
    if not found:
        raise ValueError("one absolute path or several")
    return found


def _device_names(value: object) -> tuple[str, ...]:
    found = _paths(value)
    # lvm2 is given them as one list.
    if any(re.search(r"[\s,]", one) for one in found):
        raise ValueError("absolute paths without blanks and commas")
    return found


def _address(value: object) -> Address | None:
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]*):(\d{1,5})", str(value))
    if not str(value):
        return None
    if match is None or int(match[2]) > _MAXIMUM_PORT:
        raise ValueError("an address and a port, such as 127.0.0.1:9898, [::1]:9898 or :9898")
    return Address(match[1].strip("[]"), int(match[2]))


def _node_id(value: object) -> str:
    text = str(value)
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", text):
        raise ValueError("letters, digits, dots, dashes and underscores, as in a host name")
    if len(text) > _MAXIMUM_NODE_ID:
        raise ValueError(f"at most {_MAXIMUM_NODE_ID} characters")
    return text


def _driver_name(value: object) -> str:
    text = str(value)
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", text):
        raise ValueError("lower-case letters, digits, dots and dashes, as in a domain name")
    if len(text) > _MAXIMUM_DRIVER_NAME:
        raise ValueError(f"at most {_MAXIMUM_DRIVER_NAME} characters")
    return text


def _words(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(filter(None, re.split(r"[,\s]+", value)))
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return tuple(value)
    raise ValueError("a list of texts")


def _lvm_name(value: object) -> str:
    text = str(value)
    if not re.fullmatch(r"[A-Za-z0-9_+.][A-Za-z0-9_+.-]*", text) or text in {".", ".."}:
        raise ValueError("a name as lvm(8) allows it: letters, digits and _ + . -")
    if len(names.escaped(text)) > names.MAXIMUM_ESCAPED_GROUP_LENGTH:
        raise ValueError(
            f"at most {names.MAXIMUM_ESCAPED_GROUP_LENGTH} characters, where a dash counts twice"
        )
    return text


def _reserve(value: object) -> Reserve:
    percent = layout.parse_percent(str(value))
    return Reserve(size_bytes=parse_size(value)) if percent is None else Reserve(percent=percent)


def parse_part(value: object) -> Reserve:
    """A size, or a part of the volume that it is for, such as `20%`: a snapshot's, a cache's."""
    size = _reserve(value)
    if size == NO_RESERVE:
        raise ValueError("must be larger than 0")
    return size


def parse_read_ahead(value: object) -> int | Literal["auto"]:
    """Bytes that are read ahead, 0 for none, or `auto`: as the kernel chooses."""
    if value == tuning.AUTO:
        return tuning.AUTO
    try:
        size = parse_size(value)
    except ValueError as error:
        raise ValueError(f"{tuning.AUTO}, 0 for none, or a size: {error}") from None
    unit, most = tuning.READ_AHEAD_UNIT_BYTES, tuning.MOST_READ_AHEAD_BYTES
    if size > most or size % unit:
        raise ValueError(f"{tuning.AUTO}, or 0 to {most >> 30}GiB in steps of {unit >> 10}KiB")
    return size


def parse_rate(value: object) -> int:
    """KiB a second, from a size; 0 for no limit."""
    size = parse_size(value)
    if size > tuning.MOST_RECOVERY_KIB << 10 or size % 1024:
        raise ValueError(f"whole KiB a second, up to {tuning.MOST_RECOVERY_KIB}KiB; 0 for no limit")
    return size >> 10


def _percent(value: object) -> float:
    percent = layout.parse_percent(str(value).removesuffix("%") + "%")
    if not percent:
        raise ValueError("a percentage above 0 and up to 100, such as 70")
    return percent


def _ratio(value: object) -> float:
    if isinstance(value, bool) or not re.fullmatch(r"\d+(\.\d+)?", str(value)):
        raise ValueError("a number of 1 or more, such as 1.5")
    if float(str(value)) < 1:
        raise ValueError("1 or more: what volumes may hold together, as a multiple of the pool")
    return float(str(value))


def _chunk_size(value: object) -> int:
    size = parse_size(value)
    least, most = pools.LEAST_CHUNK_BYTES, pools.MOST_CHUNK_BYTES
    if not least <= size <= most or size & (size - 1):
        raise ValueError("a power of two from 64KiB to 1GiB")
    return size


@dataclass(frozen=True)
class Setting:
    """One thing that can be set in the file, by a variable or by a flag."""

    parse: Callable[[Any], Any]
    default: Callable[[], Any]
    help: str


SETTINGS: Mapping[str, Setting] = {
    "node_id": Setting(_node_id, socket.gethostname, "this node's name, as the cluster knows it"),
    "driver_name": Setting(
        _driver_name,
        lambda: DRIVER_NAME,
        "the name by which the cluster knows this driver; another one for a second Carver",
    ),
    "endpoint": Setting(_absolute_path, lambda: DEFAULT_SOCKET, "the unix socket to serve"),
    "registration": Setting(
        _choice("self", "none"),
        lambda: "self",
        "who registers Carver with kubelet; none: nobody, or a node-driver-registrar",
    ),
    "registration_directory": Setting(
        _absolute_path, lambda: REGISTRY, "where kubelet looks for sockets of plugins"
    ),
    "kubelet_dir": Setting(
        _paths,
        lambda: (str(KUBELET_DIRECTORY),),
        "where volumes may be staged and published; /: anywhere",
    ),
    "metrics_address": Setting(
        _address,
        lambda: "",
        "serve /metrics, /healthz and /readyz there, such as 127.0.0.1:9898; empty: nowhere",
    ),
    "health_address": Setting(
        _address,
        lambda: "",
        "serve /healthz and /readyz there too, without metrics; empty: only where the metrics are",
    ),
    "log_format": Setting(_choice("text", "json"), lambda: "text", "text or json"),
    "log_level": Setting(
        _choice("debug", "info", "warning", "error"), lambda: "info", "the least that is logged"
    ),
    "controller_expand": Setting(
        _flag,
        lambda: True,
        "advertise the controller's EXPAND_VOLUME; false in a cluster, where NodeExpandVolume"
        " grows the volume on its node",
    ),
    "max_volumes_per_node": Setting(parse_count, lambda: 0, "volumes on this node; 0: no limit"),
    "inline_volume_limit": Setting(
        parse_size, lambda: "10GiB", "how large an inline volume may be; 0: no limit"
    ),
    "inline_total_limit": Setting(
        _reserve,
        lambda: "50%",
        "how large a node's inline volumes may be together: a size, or a part of all groups;"
        " 0: no limit",
    ),
    "lvm": Setting(
        _choice("direct", "host"), lambda: "direct", "where lvm2 is; host: through nsenter"
    ),
    "lvm_session": Setting(
        _flag,
        lambda: True,
        "keep a shell of lvm2's open for each group; false: a process for each command",
    ),
    "devices": Setting(
        lambda value: _device_names(value) if value else (),
        lambda: (),
        "confine lvm2 to these block devices; empty: as lvm.conf says",
    ),
    "wipe": Setting(
        _choice("zero", "none"), lambda: "zero", "what is done to a deleted volume's blocks"
    ),
    "file": Setting(
        _absolute_path,
        lambda: EMBEDDED_FILE,
        "the sparse file that holds the group where no class is configured",
    ),
    "file_size": Setting(
        _file_size,
        lambda: HALF,
        f"the file's size when it is made, such as 100GiB; {HALF}: of what is free beside it",
    ),
}


# A fifth of the origin: what changes in the life of a snapshot that is kept for days, by habit.
SNAPSHOT_SIZE = Reserve(percent=20)

# How much of a new volume is overwritten before it is anyone's: its first sectors, as lvm2 does it,
# or all of it.
ZEROS = ZERO_FIRST, ZERO_FULLY = ("first", "fully")
REPAIRS = MANUAL, AUTO = ("manual", "auto")


@dataclass(frozen=True)
class DeviceClass:
    """A group and how to carve it. A StorageClass names one. `pool` is set for layout thin."""

    name: str
    group: str
    default: bool = False
    layout: Layout = LINEAR
    reserve: Reserve = NO_RESERVE
    snapshot_size: Reserve = SNAPSHOT_SIZE
    fs_type: str = "ext4"
    mkfs_options: tuple[str, ...] = ()
    pool: pools.Policy | None = None
    cache: Cache | None = None
    # Whether all of a new volume, and of what it grows by, is overwritten before it is anyone's.
    zero: str = ZERO_FIRST
    # Whether a RAID volume that lacks a disk for so long is repaired unasked.
    repair: str = MANUAL
    repair_after_seconds: int = 600


@dataclass(frozen=True)
class BackingFile:
    """A sparse file that a loop device turns into the one disk of a group.

    Without a size it is made half as large as what is free in its file system.
    """

    path: Path
    size_bytes: int | None = None


@dataclass(frozen=True)
class Foundation:
    """What a group is made of where it is not there yet: block devices, or a file.

    Those of its devices that are `fast` are for caches, whether or not Carver made the group.
    """

    group: str
    devices: tuple[str, ...] = ()
    file: BackingFile | None = None
    fast: tuple[str, ...] = ()


@dataclass(frozen=True)
class Config:
    """All that an operator decides. `foundations` are those of the groups that Carver makes."""

    node_id: str
    endpoint: Path
    kubelet_dir: tuple[str, ...]
    log_format: str
    log_level: str
    controller_expand: bool
    max_volumes_per_node: int
    lvm: str
    lvm_session: bool
    devices: tuple[str, ...]
    wipe: str
    classes: tuple[DeviceClass, ...]
    foundations: tuple[Foundation, ...] = ()
    registration: str = "none"
    registration_directory: Path = REGISTRY
    metrics_address: Address | None = None
    inline_volume_limit: int = 0
    inline_total_limit: Reserve = NO_RESERVE
    health_address: Address | None = None
    driver_name: str = DRIVER_NAME

    def device_class(self, name: str) -> DeviceClass | None:
        """The class of that name, or the default one for an empty name."""
        for one in self.classes:
            if one.name == name or (not name and one.default):
                return one
        return None

    @property
    def topology_key(self) -> str:
        """The label by which the cluster tells the nodes of this driver apart."""
        return f"topology.{self.driver_name}/node"

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of all classes, each once, in the classes' order."""
        return tuple(dict.fromkeys(one.group for one in self.classes))


EMBEDDED_CLASS = DeviceClass(name="default", group="carver", default=True)


def add_arguments(parser: argparse.ArgumentParser, keys: Iterable[str] = tuple(SETTINGS)) -> None:
    """Give a parser the flags that `load` reads, or those of some settings."""
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"default: {DEFAULT_FILE}")
    for key in keys:
        flag = f"--{key.replace('_', '-')}"
        parser.add_argument(flag, metavar=key.upper(), help=SETTINGS[key].help)


def load(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Config:
    """The checked configuration; raises BadConfig, which names the source and the key."""
    file = arguments.config or Path(environment.get("CARVER_CONFIG", DEFAULT_FILE))
    optional = file == DEFAULT_FILE
    table = _read(file, optional=optional)
    given = _classes(str(file), table.pop("classes", []))
    classes = given or (EMBEDDED_CLASS,)
    foundations = _foundations(str(file), table.pop("groups", []), classes)
    for key in table:
        if key not in SETTINGS:
            allowed = ", ".join([*SETTINGS, "classes", "groups"])
            raise errors.BadConfig(str(file), key, f"is not a setting; allowed: {allowed}")
    values = {
        key: _value(key, setting, arguments, environment, file, table)
        for key, setting in SETTINGS.items()
    }
    embedded = BackingFile(values.pop("file"), values.pop("file_size"))
    if not given and not foundations:
        foundations = (Foundation(EMBEDDED_CLASS.group, file=embedded),)
    return Config(**values, classes=classes, foundations=foundations)


def _read(file: Path, *, optional: bool) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except FileNotFoundError:
        if optional:
            return {}
        raise errors.BadConfig(str(file), "file", "does not exist") from None
    except (OSError, ValueError) as error:
        raise errors.BadConfig(str(file), "file", f"cannot be read: {error}") from None


def _value(
    key: str,
    setting: Setting,
    arguments: argparse.Namespace,
    environment: Mapping[str, str],
    file: Path,
    table: Mapping[str, Any],
) -> Any:
    flag, variable = f"--{key.replace('_', '-')}", f"CARVER_{key.upper()}"
    for source, raw in (
        (flag, getattr(arguments, key, None)),
        (variable, environment.get(variable)),
        (str(file), table.get(key)),
    ):
        if raw is not None:
            return _checked(source, key, setting.parse, raw)
    return _checked("default", key, setting.parse, setting.default())


def _checked(source: str, key: str, parse: Callable[[Any], Any], raw: object) -> Any:
    try:
        return parse(raw if not isinstance(raw, tuple) else list(raw))
    except ValueError as error:
        raise errors.BadConfig(source, key, f"{raw!r} is not allowed: {error}") from None


CLASS_KEYS: Mapping[str, Callable[[Any], Any]] = {
    "name": _lvm_name,
    "group": _lvm_name,
    "default": _flag,
    "layout": _choice(*layout.KINDS),
    "stripes": parse_count,
    "mirrors": parse_count,
    "stripe_size": parse_size,
    "reserve": _reserve,
    "snapshot_size": parse_part,
    "over_provisioning": _ratio,
    "pool_size": _reserve,
    "autoextend_threshold": _percent,
    "autoextend_percent": _percent,
    "refuse_above": _percent,
    "chunk_size": _chunk_size,
    "cache": _choice(*caches.KINDS),
    "cache_mode": _choice(*caches.MODES),
    "cache_size": parse_part,
    "fs_type": _choice(*filesystem.FILE_SYSTEMS),
    "mkfs_options": _words,
    "zero": _choice(*ZEROS),
    "repair": _choice(*REPAIRS),
    "repair_after_seconds": parse_count,
}


GROUP_KEYS: Mapping[str, Callable[[Any], Any]] = {
    "name": _lvm_name,
    "devices": _device_names,
    "fast": _device_names,
    "file": _absolute_path,
    "file_size": _file_size,
}


def _tables(
    source: str,
    name: str,
    tables: object,
    keys: Mapping[str, Callable[[Any], Any]],
    required: Sequence[str],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tables of a list such as [[classes]], checked key by key, each with where it stands."""
    if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
        raise errors.BadConfig(source, name, f"is a list of tables: [[{name}]]")
    for index, table in enumerate(tables):
        where = f"{name}[{index}]"
        for key in table:
            if key not in keys:
                allowed = ", ".join(keys)
                raise errors.BadConfig(
                    source, f"{where}.{key}", f"is not a key; allowed: {allowed}"
                )
        for key in required:
            if key not in table:
                raise errors.BadConfig(source, f"{where}.{key}", "is required")
        yield (
            where,
            {key: _checked(source, f"{where}.{key}", keys[key], raw) for key, raw in table.items()},
        )


def _classes(source: str, tables: object) -> tuple[DeviceClass, ...]:
    checked = _tables(source, "classes", tables, CLASS_KEYS, ("name", "group"))
    classes = [_class(source, where, values) for where, values in checked]
    if len({one.name for one in classes}) != len(classes):
        raise errors.BadConfig(source, "classes", "two classes have the same name")
    defaults = [one for one in classes if one.default]
    if len(defaults) > 1:
        names = ", ".join(one.name for one in defaults)
        raise errors.BadConfig(source, "classes", f"more than one is the default: {names}")
    return tuple(classes)


def _class(source: str, where: str, values: dict[str, Any]) -> DeviceClass:
    key = "layout"
    try:
        shape = values["layout"] = _layout(values)
        values["pool"] = _pool(values, shape)
        key = "cache"
        values["cache"] = _cache(values, shape)
    except ValueError as error:
        raise errors.BadConfig(source, f"{where}.{key}", str(error)) from None
    one = DeviceClass(**values)
    if not shape.is_raid and values.keys() & {"repair", "repair_after_seconds"}:
        why = "is for layouts with copies or parity: raid1, raid5, raid6 and raid10"
        raise errors.BadConfig(source, f"{where}.repair", why)
    if shape.is_thin and "zero" in values:
        why = "is for layouts with extents of their own: a thin pool zeroes what it gives out"
        raise errors.BadConfig(source, f"{where}.zero", why)
    try:
        filesystem.check_options(one.fs_type, one.mkfs_options)
    except mount_errors.BadOption as error:
        raise errors.BadConfig(source, f"{where}.mkfs_options", str(error)) from None
    return one


def _foundations(
    source: str, tables: object, classes: Sequence[DeviceClass]
) -> tuple[Foundation, ...]:
    used = {one.group for one in classes}
    found: list[Foundation] = []
    places: set[str] = set()
    for where, values in _tables(source, "groups", tables, GROUP_KEYS, ("name",)):
        one = _foundation(source, where, values)
        if one.group not in used:
            raise errors.BadConfig(source, f"{where}.name", f"no class uses the group {one.group}")
        if one.group in {other.group for other in found}:
            raise errors.BadConfig(source, f"{where}.name", f"{one.group} is listed twice")
        for place in (str(one.file.path),) if one.file else one.devices:
            if place in places:
                raise errors.BadConfig(source, where, f"{place} is listed twice")
            places.add(place)
        found.append(one)
    return tuple(found)


def _foundation(source: str, where: str, values: Mapping[str, Any]) -> Foundation:
    devices, file = values.get("devices", ()), values.get("file")
    if bool(devices) == bool(file):
        raise errors.BadConfig(source, where, "has either devices or a file")
    if file is None and "file_size" in values:
        raise errors.BadConfig(source, f"{where}.file_size", "is for a group on a file")
    fast = values.get("fast", ())
    if not set(fast) <= set(devices):
        raise errors.BadConfig(source, f"{where}.fast", "are some of the group's `devices`")
    backing = BackingFile(file, values.get("file_size")) if file else None
    return Foundation(values["name"], tuple(devices), backing, tuple(fast))


def _layout(values: dict[str, Any]) -> Layout:
    """The layout that a class's keys amount to; they are taken out of `values`."""
    kind = values.pop("layout", LINEAR.kind)
    return Layout(
        kind,
        stripes=values.pop("stripes", 1),
        mirrors=values.pop("mirrors", 1 if kind in {"raid1", "raid10"} else 0),
        stripe_size_bytes=values.pop("stripe_size", 0),
    )


# The keys of a thin class's pool, and the field of its policy that each is.
POOL_KEYS: Mapping[str, str] = {
    "over_provisioning": "over_provisioning",
    "pool_size": "size",
    "autoextend_threshold": "autoextend_threshold",
    "autoextend_percent": "autoextend_percent",
    "refuse_above": "refuse_above",
    "chunk_size": "chunk_size_bytes",
}


def _pool(values: dict[str, Any], shape: Layout) -> pools.Policy | None:
    """The pool that a class's keys amount to; they are taken out of `values`."""
    given = {field: values.pop(key) for key, field in POOL_KEYS.items() if key in values}
    if not shape.is_thin:
        if given:
            keys = ", ".join(key for key, field in POOL_KEYS.items() if field in given)
            raise ValueError(f"{keys}: only for layout thin, this is {shape.kind}")
        return None
    policy = pools.Policy(**given)
    if policy.autoextend_threshold >= policy.refuse_above:
        raise ValueError("autoextend_threshold must be less than refuse_above")
    return policy


def _cache(values: dict[str, Any], shape: Layout) -> Cache | None:
    """The cache that a class's keys amount to; they are taken out of `values`."""
    given = {key: values.pop(key) for key in ("cache_mode", "cache_size") if key in values}
    kind = values.pop("cache", None)
    if kind is None:
        if given:
            raise ValueError(f"{', '.join(given)}: only for a class with a cache")
        return None
    if not (shape.is_linear or shape.is_thin):
        raise ValueError(f"cache: only for layouts linear and thin, this is {shape.kind}")
    mode = caches.WRITEBACK if kind == caches.WRITECACHE else caches.WRITETHROUGH
    size = given.get("cache_size", Cache.size)
    return Cache(kind, given.get("cache_mode", mode), size)
