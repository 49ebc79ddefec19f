"""Names of logical volumes and of their devices."""

import hashlib
import re

# lvm(8) reserves these words inside a name, and these beginnings, for its own volumes.
_RESERVED = re.compile(
    r"_(cdata|cmeta|corig|cpool|cvol|iorig|mimage|mlog|pmspare|rimage|rmeta|tdata|tmeta|vdata"
    r"|vorigin|wcorig|imeta"
    # Not reserved, but what lvm2 calls the cache of a volume: lvm/caches.py.
    r"|cache)"
)
# A dash that is not doubled parts the group from the volume, or lvm2's own appendix from both.
_ESCAPED = re.compile(r"([^-]|--)+")
_ALLOWED = re.compile(r"[A-Za-z0-9_+.-]+")

# The device's name is `group-name` with every dash of both doubled, and lvm2 appends such as
# "_rmeta_0" or "-cow" to it. device-mapper allows 127 characters in all (DM_NAME_LEN); half of
# them are the volume's, so that its name does not depend on its group's.
MAXIMUM_ESCAPED_LENGTH = 63
MAXIMUM_ESCAPED_GROUP_LENGTH = 127 - len("-") - MAXIMUM_ESCAPED_LENGTH - len("_cache_cvol-cmeta")
_DIGEST_CHARACTERS = 32


def logical_volume(prefix: str, name: str) -> str:
    """The name of the logical volume that holds what the CO calls `name`.

    `prefix-name` where lvm(8) allows it, so that a person finds it in `lvs`; otherwise
    `prefix.digest`. The two forms cannot meet, and each name has exactly one.
    """
    readable = f"{prefix}-{name}"
    allowed = _ALLOWED.fullmatch(name) and not _RESERVED.search(readable)
    if allowed and len(escaped(readable)) <= MAXIMUM_ESCAPED_LENGTH:
        return readable
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f"{prefix}.{digest[:_DIGEST_CHARACTERS]}"


def is_of(prefix: str, name: str) -> bool:
    """Whether `logical_volume` gives such names with the prefix."""
    return name.startswith((f"{prefix}-", f"{prefix}."))


def is_part(name: str) -> bool:
    """Whether it is one of lvm2's for a part of a volume: `logical_volume` gives no such name.

    Such a part is a volume of its own for moments only, or where lvm2 died over it.
    """
    return bool(_RESERVED.search(name))


def readable(prefix: str, logical: str) -> str:
    """What the CO called it, where the logical volume's name tells; else the logical volume."""
    return logical.removeprefix(f"{prefix}-")


def escaped(name: str) -> str:
    """A group's or a volume's name as it stands in a device's."""
    return name.replace("-", "--")


def device(group: str, name: str) -> str:
    """The device-mapper name of a logical volume."""
    return f"{escaped(group)}-{escaped(name)}"


def of_device(group: str, device_name: str) -> str:
    """The logical volume of the group that has a device's name; empty where none can have it."""
    prefix, rest = f"{escaped(group)}-", device_name.removeprefix(f"{escaped(group)}-")
    if not device_name.startswith(prefix) or not _ESCAPED.fullmatch(rest):
        return ""
    return rest.replace("--", "-")
