"""Parsers of values in the configuration and in parameters: each parse_* raises ValueError."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from agent.core import errors
from lvm import layout, names, thin, tuning
from lvm.layout import NO_RESERVE, Reserve

# Value of a file's size: half of the free space.
HALF = "half"
# Value of the setting `background_bandwidth`: no limit, but background I/O gives way to other I/O.
AUTO = "auto"
# Maximum length of a node id, in characters: that of a name by RFC 1123, and so of a Kubernetes
# node. The CSI spec allows 256 bytes (NodeGetInfoResponse).
_MAXIMUM_NODE_ID = 253
# Form of the names of Kubernetes objects: a DNS subdomain (RFC 1123).
_OBJECT_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
# Maximum length of a driver's name, in characters (CSI spec, GetPluginInfoResponse).
_MAXIMUM_DRIVER_NAME = 63
# Largest port number of TCP.
_MAXIMUM_PORT = 65535
# Smallest limit of background I/O, in bytes a second: with less, erasing a disk would take weeks.
_LEAST_BANDWIDTH = 1 << 20
# Shortest interval between background scans, and shortest grace period, in seconds.
_SHORTEST_SECONDS = 60
# Number of bytes of each unit of a size.
_UNITS: Mapping[str, int] = {"": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGTPE", start=1)
    for suffix, base in (("", 1024), ("i", 1024), ("iB", 1024), ("B", 1000))
}


@dataclass(frozen=True)
class Address:
    """An address to listen on; an empty host means all addresses of the node."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_size(value: object) -> int:
    """Parse a size into bytes: a number, or `512MiB`, `10G` (powers of 1024), `2TB` (of 1000)."""
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", str(value).strip())
    if match is None or match[2] not in _UNITS:
        raise ValueError("a size is a number of bytes, or such as 512MiB, 10GiB or 2TB")
    unit: int = _UNITS[match[2]]
    return int(match[1]) * unit


def parse_file_size(value: object) -> int | None:
    """Parse a sparse file's size into bytes; None for `half`, meaning half of the free space."""
    if value == HALF:
        return None
    if (size := parse_size(value)) == 0:
        raise ValueError("must be larger than 0")
    return size


def parse_count(value: object) -> int:
    """Parse a whole number that is not negative, from a number or a text."""
    if isinstance(value, bool) or not re.fullmatch(r"\d+", str(value)):
        raise ValueError("a whole number, 0 or more")
    return int(str(value))


def parse_kernel(value: object) -> tuple[int, int]:
    """Parse a version of Linux, such as "5.10", into major and minor number."""
    if not (match := re.fullmatch(r"(\d{1,3})\.(\d{1,4})", str(value))):
        raise ValueError('a version of Linux as text, such as "5.10"')
    return int(match[1]), int(match[2])


def parse_period(value: object) -> int:
    """Parse the interval of a background task, in seconds; 0 for never."""
    seconds = parse_count(value)
    if 0 < seconds < _SHORTEST_SECONDS:
        raise ValueError(f"0, or {_SHORTEST_SECONDS} seconds or more")
    return seconds


def parse_grace(value: object) -> int:
    """Parse a grace period, in seconds."""
    seconds = parse_count(value)
    if seconds < _SHORTEST_SECONDS:
        raise ValueError(f"{_SHORTEST_SECONDS} seconds or more")
    return seconds


def parse_flag(value: object) -> bool:
    """Parse true or false, from a bool or a text."""
    flags = {"true": True, "false": False}
    if str(value).lower() not in flags:
        raise ValueError("true or false")
    return flags[str(value).lower()]


def choice(*allowed: str) -> Callable[[object], str]:
    """Return a parser that accepts only the texts in `allowed`."""

    def parse(value: object) -> str:
        if value not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return str(value)

    return parse


def parse_absolute_path(value: object) -> Path:
    """Parse an absolute path; a prefix `unix://` is removed."""
    path = Path(str(value).removeprefix("unix://"))
    if not path.is_absolute() or "\0" in str(value):
        raise ValueError("an absolute path")
    return path


def parse_optional_path(value: object) -> Path | None:
    """Parse an absolute path; None for an empty text."""
    return parse_absolute_path(value) if value else None


def parse_paths(value: object) -> tuple[str, ...]:
    """Parse one or more absolute paths."""
    paths = tuple(str(parse_absolute_path(word)) for word in parse_words(value))
    if not paths:
        raise ValueError("one absolute path or several")
    return paths


def parse_device_names(value: object) -> tuple[str, ...]:
    """Parse one or more paths of devices: absolute paths without blanks and commas."""
    paths = parse_paths(value)
    if any(re.search(r"[\s,]", path) for path in paths):
        raise ValueError("absolute paths without blanks and commas")
    return paths


def parse_address(value: object) -> Address | None:
    """Parse an address to listen on, `host:port`; None for an empty text."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]*):(\d{1,5})", str(value))
    if not str(value):
        return None
    is_long = match is not None and len(match[1]) > _MAXIMUM_NODE_ID
    if match is None or is_long or int(match[2]) > _MAXIMUM_PORT:
        raise ValueError("an address and a port, such as 127.0.0.1:9898, [::1]:9898 or :9898")
    return Address(match[1].strip("[]"), int(match[2]))


def parse_grpc_address(value: object) -> Address | None:
    """Parse an address for gRPC to listen on, `host:port`; None for an empty text.

    gRPC refuses an empty host. In its place the host is `::`, all addresses of the node, IPv4
    included.
    """
    address = parse_address(value)
    return address if address is None or address.host else Address("::", address.port)


def parse_node_id(value: object) -> str:
    """Parse the name of a node: letters, digits, dots, dashes and underscores."""
    text = str(value)
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", text):
        raise ValueError("letters, digits, dots, dashes and underscores, as in a host name")
    if len(text) > _MAXIMUM_NODE_ID:
        raise ValueError(f"at most {_MAXIMUM_NODE_ID} characters")
    return text


def parse_driver_name(value: object) -> str:
    """Parse the name of a CSI driver."""
    text = str(value)
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", text):
        raise ValueError("lower-case letters, digits, dots and dashes, as in a domain name")
    if len(text) > _MAXIMUM_DRIVER_NAME:
        raise ValueError(f"at most {_MAXIMUM_DRIVER_NAME} characters")
    return text


def parse_words(value: object) -> tuple[str, ...]:
    """Parse a list of texts, or split one text at blanks and commas."""
    if isinstance(value, str):
        return tuple(filter(None, re.split(r"[,\s]+", value)))
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        return tuple(value)
    raise ValueError("a list of texts")


def parse_lvm_name(value: object) -> str:
    """Parse the name of a volume group or device class, in a form that lvm(8) allows."""
    text = str(value)
    if not re.fullmatch(r"[A-Za-z0-9_+.][A-Za-z0-9_+.-]*", text) or text in {".", ".."}:
        raise ValueError("a name as lvm(8) allows it: letters, digits and _ + . -")
    if len(names.escaped(text)) > names.MAXIMUM_ESCAPED_GROUP_LENGTH:
        raise ValueError(
            f"at most {names.MAXIMUM_ESCAPED_GROUP_LENGTH} characters, where a dash counts twice"
        )
    return text


def parse_reserve(value: object) -> Reserve:
    """Parse a size in bytes, or a percentage of a volume group."""
    percent = layout.parse_percent(str(value))
    return Reserve(size_bytes=parse_size(value)) if percent is None else Reserve(percent=percent)


def parse_background_bandwidth(value: object) -> Reserve | None:
    """Parse a limit of background I/O: bytes a second, or a percentage of the disks' speed.

    A limit of 0 means no limit. None is returned for `auto`.
    """
    if value == AUTO:
        return None
    try:
        limit = parse_reserve(value)
    except ValueError:
        limit = Reserve(size_bytes=1)
    if limit != NO_RESERVE and limit.size_bytes < _LEAST_BANDWIDTH and limit.percent < 1:
        raise ValueError(f"{AUTO}, a size a second of 1MiB or more, 1% to 100%, or 0 for no limit")
    return limit


def parse_share(value: object) -> Reserve:
    """Parse the size of a COW store or a cache: bytes, or a percentage of the volume."""
    size = parse_reserve(value)
    if size == NO_RESERVE:
        raise ValueError("must be larger than 0")
    return size


def parse_read_ahead(value: object) -> int | Literal["auto"]:
    """Parse a read-ahead in bytes: 0 for none, or `auto` for the kernel's choice."""
    if value == tuning.AUTO:
        return tuning.AUTO
    try:
        size = parse_size(value)
    except ValueError as error:
        raise ValueError(f"{tuning.AUTO}, 0 for none, or a size: {error}") from None
    unit, largest = tuning.READ_AHEAD_UNIT_BYTES, tuning.MOST_READ_AHEAD_BYTES
    if size > largest or size % unit:
        raise ValueError(f"{tuning.AUTO}, or 0 to {largest >> 30}GiB in steps of {unit >> 10}KiB")
    return size


def parse_rate(value: object) -> int:
    """Parse a rate of RAID recovery, a size a second, into KiB a second; 0 for no limit."""
    size = parse_size(value)
    if size > tuning.MOST_RECOVERY_KIB << 10 or size % 1024:
        raise ValueError(f"whole KiB a second, up to {tuning.MOST_RECOVERY_KIB}KiB; 0 for no limit")
    return size >> 10


def parse_object_name(text: str) -> str:
    """Parse the name or the UID of a Kubernetes object."""
    if not _OBJECT_NAME.fullmatch(text):
        raise ValueError("a name of an object in Kubernetes: lower-case letters, digits, - and .")
    return text


def parse_iops(value: object) -> int:
    """Parse a limit of I/O operations a second; 0 for no limit."""
    return _limit(parse_count(value), tuning.LEAST_IOPS, tuning.MOST_IOPS)


def parse_bandwidth(value: object) -> int:
    """Parse a bandwidth limit, such as `10MiB/s`, into bytes a second; 0 for no limit."""
    size = parse_size(str(value).removesuffix("/s"))
    return _limit(size, tuning.LEAST_BANDWIDTH_BYTES, tuning.MOST_BANDWIDTH_BYTES)


def parse_iops_per_gib(value: object) -> int:
    """Parse a limit of I/O operations a second for each GiB of a volume; 0 for no limit."""
    return _limit(parse_count(value), 0, tuning.MOST_IOPS)


def parse_bandwidth_per_gib(value: object) -> int:
    """Parse a bandwidth limit for each GiB of a volume into bytes a second; 0 for no limit."""
    return _limit(parse_size(str(value).removesuffix("/s")), 0, tuning.MOST_BANDWIDTH_BYTES)


def _limit(limit: int, smallest: int, largest: int) -> int:
    if limit and not smallest <= limit <= largest:
        raise ValueError(f"0 for no limit, or {smallest} to {largest} a second")
    return limit


def parse_percent(value: object) -> float:
    """Parse a percentage above 0 and up to 100."""
    percent = layout.parse_percent(str(value).removesuffix("%") + "%")
    if not percent:
        raise ValueError("a percentage above 0 and up to 100, such as 70")
    return percent


def parse_ratio(value: object) -> float:
    """Parse the over-provisioning ratio of a thin pool; 1 means no over-provisioning."""
    if isinstance(value, bool) or not re.fullmatch(r"\d+(\.\d+)?", str(value)):
        raise ValueError("a number of 1 or more, such as 1.5")
    if float(str(value)) < 1:
        raise ValueError("1 or more: what volumes may hold together, as a multiple of the pool")
    return float(str(value))


def parse_chunk_size(value: object) -> int:
    """Parse the chunk size of a thin pool into bytes."""
    size = parse_size(value)
    smallest, largest = thin.LEAST_CHUNK_BYTES, thin.MOST_CHUNK_BYTES
    if not smallest <= size <= largest or size & (size - 1):
        raise ValueError("a power of two from 64KiB to 1GiB")
    return size


def checked(source: str, key: str, parse: Callable[[Any], Any], raw: object) -> Any:
    """Parse the value of a key in the configuration; raises BadConfig for an invalid value."""
    try:
        return parse(raw if not isinstance(raw, tuple) else list(raw))
    except ValueError as error:
        raise errors.BadConfig(source, key, f"{raw!r} is not allowed: {error}") from None


def read(
    source: str,
    name: str,
    tables: object,
    keys: Mapping[str, Callable[[Any], Any]],
    required: Sequence[str],
    removed: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Parse a list of tables, such as [[classes]]; yield each table with its position as text.

    A position is, for example, `classes[0]`. `required` are keys that each table must have.
    `removed` has the keys of earlier versions, each with the text of the error. Raises BadConfig
    for a key that is unknown, removed, missing or invalid.
    """
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise errors.BadConfig(source, name, f"is a list of tables: [[{name}]]")
    for index, table in enumerate(tables):
        position = f"{name}[{index}]"
        for key in table:
            if key in removed:
                raise errors.BadConfig(source, f"{position}.{key}", removed[key])
            if key not in keys:
                allowed = ", ".join(keys)
                raise errors.BadConfig(
                    source, f"{position}.{key}", f"is not a key; allowed: {allowed}"
                )
        for key in required:
            if key not in table:
                raise errors.BadConfig(source, f"{position}.{key}", "is required")
        yield (
            position,
            {
                key: checked(source, f"{position}.{key}", keys[key], raw)
                for key, raw in table.items()
            },
        )
