"""Names of logical volumes and of their devices."""

import hashlib
import re

# lvm(8) reserves these words inside a name, and these beginnings, for its own volumes.
_RESERVED = re.compile(
    r"_(cdata|cmeta|corig|cpool|cvol|iorig|mimage|mlog|pmspare|rimage|rmeta|tdata|tmeta|vdata"
    r"|vorigin|wcorig|imeta)"
)
_ALLOWED = re.compile(r"[A-Za-z0-9_+.-]+")

# The device's name is `group-name` with every dash doubled, and lvm2 appends such as "_rmeta_0"
# or "-cow" to it; device-mapper allows 127 characters in all (DM_NAME_LEN).
_MAXIMUM_DEVICE_NAME = 127 - len("-rmeta_00-real")
_DIGEST_CHARACTERS = 32


def logical_volume(prefix: str, group: str, name: str) -> str:
    """The name of the logical volume that holds what the CO calls `name`.

    `prefix-name` where lvm(8) allows it, so that a person finds it in `lvs`; otherwise
    `prefix.digest`. The two forms cannot meet, and each name has exactly one.
    """
    readable = f"{prefix}-{name}"
    plain = _ALLOWED.fullmatch(name) and not _RESERVED.search(readable)
    if plain and len(device(group, readable)) <= _MAXIMUM_DEVICE_NAME:
        return readable
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f"{prefix}.{digest[:_DIGEST_CHARACTERS]}"


def device(group: str, name: str) -> str:
    """The device-mapper name of a logical volume: `group-name`, with dashes of both doubled."""
    return f"{group.replace('-', '--')}-{name.replace('-', '--')}"
