"""Parse values of the configuration and of parameters; each raises ValueError."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from agent.core import errors
from lvm import layout, names, thin, tuning
from lvm.layout import NO_RESERVE, Reserve

HALF = "half"
AUTO = "auto"
# RFC 1123, and so a node of Kubernetes; CSI spec, NodeGetInfoResponse: at most 256 bytes.
_MAXIMUM_NODE_ID = 253
# A DNS subdomain (RFC 1123), as the names of Kubernetes' objects are.
_OBJECT_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
# CSI spec, GetPluginInfoResponse: a domain name of at most 63 characters.
_MAXIMUM_DRIVER_NAME = 63
_MAXIMUM_PORT = 65535
# Less background I/O in a second would take weeks for a disk.
_LEAST_BANDWIDTH = 1 << 20
# The shortest interval between scans, and the shortest grace period.
_SHORTEST_SECONDS = 60
_UNITS: Mapping[str, int] = {"": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGTPE", start=1)
    for suffix, base in (("", 1024), ("i", 1024), ("iB", 1024), ("B", 1000))
}


@dataclass(frozen=True)
class Address:
    """An address to listen at; an empty host for all of the node's."""

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


def parse_file_size(value: object) -> int | None:
    """Bytes; None for `half` of the free space beside the file."""
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


def parse_kernel(value: object) -> tuple[int, int]:
    """A version of Linux, as major and minor number."""
    if not (match := re.fullmatch(r"(\d{1,3})\.(\d{1,4})", str(value))):
        raise ValueError('a version of Linux as text, such as "5.10"')
    return int(match[1]), int(match[2])


def parse_period(value: object) -> int:
    """The interval of a background task in seconds; 0 for never."""
    seconds = parse_count(value)
    if 0 < seconds < _SHORTEST_SECONDS:
        raise ValueError(f"0, or {_SHORTEST_SECONDS} seconds or more")
    return seconds


def parse_grace(value: object) -> int:
    """A grace period in seconds."""
    seconds = parse_count(value)
    if seconds < _SHORTEST_SECONDS:
        raise ValueError(f"{_SHORTEST_SECONDS} seconds or more")
    return seconds


def parse_flag(value: object) -> bool:
    """True or false, from either or from a text."""
    known = {"true": True, "false": False}
    if str(value).lower() not in known:
        raise ValueError("true or false")
    return known[str(value).lower()]


def choice(*allowed: str) -> Callable[[object], str]:
    """A parser of an enumeration."""

    def parse(value: object) -> str:
        if value not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return str(value)

    return parse


def parse_absolute_path(value: object) -> Path:
    """A path that begins at the root, with or without `unix://` before it."""
    path = Path(str(value).removeprefix("unix://"))
    if not path.is_absolute() or "\0" in str(value):
        raise ValueError("an absolute path")
    return path


def parse_optional_path(value: object) -> Path | None:
    """An absolute path; None for an empty text."""
    return parse_absolute_path(value) if value else None


def parse_paths(value: object) -> tuple[str, ...]:
    """Absolute paths, at least one."""
    found = tuple(str(parse_absolute_path(one)) for one in parse_words(value))
    if not found:
        raise ValueError("one absolute path or several")
    return found


def parse_device_names(value: object) -> tuple[str, ...]:
    """Absolute paths without blanks and commas, at least one."""
    found = parse_paths(value)
    if any(re.search(r"[\s,]", one) for one in found):
        raise ValueError("absolute paths without blanks and commas")
    return found


def parse_address(value: object) -> Address | None:
    """Where to listen; None for an empty text."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]*):(\d{1,5})", str(value))
    if not str(value):
        return None
    is_long = match is not None and len(match[1]) > _MAXIMUM_NODE_ID
    if match is None or is_long or int(match[2]) > _MAXIMUM_PORT:
        raise ValueError("an address and a port, such as 127.0.0.1:9898, [::1]:9898 or :9898")
    return Address(match[1].strip("[]"), int(match[2]))


def parse_grpc_address(value: object) -> Address | None:
    """Where gRPC is to listen, which refuses an empty host: `::` is all addresses, IPv4 too."""
    found = parse_address(value)
    return found if found is None or found.host else Address("::", found.port)


def parse_node_id(value: object) -> str:
    """A node's name as Kubernetes allows it."""
    text = str(value)
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", text):
        raise ValueError("letters, digits, dots, dashes and underscores, as in a host name")
    if len(text) > _MAXIMUM_NODE_ID:
        raise ValueError(f"at most {_MAXIMUM_NODE_ID} characters")
    return text


def parse_driver_name(value: object) -> str:
    """A CSI driver's name."""
    text = str(value)
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", text):
        raise ValueError("lower-case letters, digits, dots and dashes, as in a domain name")
    if len(text) > _MAXIMUM_DRIVER_NAME:
        raise ValueError(f"at most {_MAXIMUM_DRIVER_NAME} characters")
    return text


def parse_words(value: object) -> tuple[str, ...]:
    """Texts, from a list or from one text, parted at blanks and commas."""
    if isinstance(value, str):
        return tuple(filter(None, re.split(r"[,\s]+", value)))
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return tuple(value)
    raise ValueError("a list of texts")


def parse_lvm_name(value: object) -> str:
    """A volume group's name."""
    text = str(value)
    if not re.fullmatch(r"[A-Za-z0-9_+.][A-Za-z0-9_+.-]*", text) or text in {".", ".."}:
        raise ValueError("a name as lvm(8) allows it: letters, digits and _ + . -")
    if len(names.escaped(text)) > names.MAXIMUM_ESCAPED_GROUP_LENGTH:
        raise ValueError(
            f"at most {names.MAXIMUM_ESCAPED_GROUP_LENGTH} characters, where a dash counts twice"
        )
    return text


def parse_reserve(value: object) -> Reserve:
    """A size, or a percentage of the group."""
    percent = layout.parse_percent(str(value))
    return Reserve(size_bytes=parse_size(value)) if percent is None else Reserve(percent=percent)


def parse_background_bandwidth(value: object) -> Reserve | None:
    """Bytes a second, or a part of what the disks do; 0 for no limit, None for `auto`."""
    if value == AUTO:
        return None
    try:
        found = parse_reserve(value)
    except ValueError:
        found = Reserve(size_bytes=1)
    if found != NO_RESERVE and found.size_bytes < _LEAST_BANDWIDTH and found.percent < 1:
        raise ValueError(f"{AUTO}, a size a second of 1MiB or more, 1% to 100%, or 0 for no limit")
    return found


def parse_part(value: object) -> Reserve:
    """A size, or a percentage of a volume: of a COW store or a cache."""
    size = parse_reserve(value)
    if size == NO_RESERVE:
        raise ValueError("must be larger than 0")
    return size


def parse_read_ahead(value: object) -> int | Literal["auto"]:
    """Bytes to read ahead, 0 for none, or `auto` for the kernel's choice."""
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


def parse_object_name(text: str) -> str:
    """The name, or the UID, of an object in Kubernetes."""
    if not _OBJECT_NAME.fullmatch(text):
        raise ValueError("a name of an object in Kubernetes: lower-case letters, digits, - and .")
    return text


def parse_iops(value: object) -> int:
    """Operations a second; 0 for no limit."""
    return _limit(parse_count(value), tuning.LEAST_IOPS, tuning.MOST_IOPS)


def parse_bandwidth(value: object) -> int:
    """Bytes a second, from a size with or without `/s`; 0 for no limit."""
    size = parse_size(str(value).removesuffix("/s"))
    return _limit(size, tuning.LEAST_BANDWIDTH_BYTES, tuning.MOST_BANDWIDTH_BYTES)


def parse_iops_per_gib(value: object) -> int:
    """Operations a second for each GiB of a volume; 0 for no limit."""
    return _limit(parse_count(value), 0, tuning.MOST_IOPS)


def parse_bandwidth_per_gib(value: object) -> int:
    """Bytes a second for each GiB of a volume; 0 for no limit."""
    return _limit(parse_size(str(value).removesuffix("/s")), 0, tuning.MOST_BANDWIDTH_BYTES)


def _limit(limit: int, least: int, most: int) -> int:
    if limit and not least <= limit <= most:
        raise ValueError(f"0 for no limit, or {least} to {most} a second")
    return limit


def parse_percent(value: object) -> float:
    """A percentage above 0."""
    percent = layout.parse_percent(str(value).removesuffix("%") + "%")
    if not percent:
        raise ValueError("a percentage above 0 and up to 100, such as 70")
    return percent


def parse_ratio(value: object) -> float:
    """The ratio of over-provisioning, 1 for none."""
    if isinstance(value, bool) or not re.fullmatch(r"\d+(\.\d+)?", str(value)):
        raise ValueError("a number of 1 or more, such as 1.5")
    if float(str(value)) < 1:
        raise ValueError("1 or more: what volumes may hold together, as a multiple of the pool")
    return float(str(value))


def parse_chunk_size(value: object) -> int:
    """The bytes of a thin pool's chunks."""
    size = parse_size(value)
    least, most = thin.LEAST_CHUNK_BYTES, thin.MOST_CHUNK_BYTES
    if not least <= size <= most or size & (size - 1):
        raise ValueError("a power of two from 64KiB to 1GiB")
    return size


def checked(source: str, key: str, parse: Callable[[Any], Any], raw: object) -> Any:
    """Parse a value; raises BadConfig for a ValueError."""
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
    """Parse a list of tables such as [[classes]]; yields each with its position as text.

    `removed` has keys of earlier versions, with the problem that each is now.
    """
    if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
        raise errors.BadConfig(source, name, f"is a list of tables: [[{name}]]")
    for index, table in enumerate(tables):
        where = f"{name}[{index}]"
        for key in table:
            if key in removed:
                raise errors.BadConfig(source, f"{where}.{key}", removed[key])
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
            {key: checked(source, f"{where}.{key}", keys[key], raw) for key, raw in table.items()},
        )
