"""Names of logical volumes and of their device-mapper devices."""

import hashlib
import re

# Words that lvm2 reserves in the names of its hidden volumes (lvm(8)).
_RESERVED = re.compile(
    r"_(cdata|cmeta|corig|cpool|cvol|iorig|mimage|mlog|pmspare|rimage|rmeta|tdata|tmeta|vdata"
    r"|vorigin|wcorig|imeta"
    # lvm2 does not reserve the word `_cache`, but gives it to cachevols (lvm/caches.py).
    r"|cache)"
)
# Escaped name of a volume group or volume. A single dash would be the separator between the two, or
# before a suffix of lvm2's.
_ESCAPED = re.compile(r"([^-]|--)+")
_ALLOWED = re.compile(r"[A-Za-z0-9_+.-]+")

# Length limits of the escaped names of a volume and of a volume group. A device's name is
# `group-volume` with every dash of both doubled, and lvm2 appends suffixes such as "_rmeta_0" or
# "-cow". device-mapper allows 127 characters in total (DM_NAME_LEN). Half of these are for the
# volume, so that a volume's name does not depend on the length of its group's.
MAXIMUM_ESCAPED_LENGTH = 63
MAXIMUM_ESCAPED_GROUP_LENGTH = 127 - len("-") - MAXIMUM_ESCAPED_LENGTH - len("_cache_cvol-cmeta")
_DIGEST_CHARACTERS = 32


def logical_volume(prefix: str, name: str) -> str:
    """The name of the logical volume for the object that the CO calls `name`.

    The name is `prefix-name` where lvm(8) allows that, so that a person finds the object in `lvs`;
    otherwise it is `prefix.digest`. No two objects get the same name.
    """
    readable = f"{prefix}-{name}"
    allowed = _ALLOWED.fullmatch(name) and not _RESERVED.search(readable)
    if allowed and len(escaped(readable)) <= MAXIMUM_ESCAPED_LENGTH:
        return readable
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f"{prefix}.{digest[:_DIGEST_CHARACTERS]}"


def is_of(prefix: str, name: str) -> bool:
    """Whether a logical volume's name may be one that `logical_volume` made with the prefix."""
    return name.startswith((f"{prefix}-", f"{prefix}."))


def is_part(name: str) -> bool:
    """Whether a name is one that lvm2 gives to parts of volumes, and `logical_volume` never does.

    A part is visible only for moments while lvm2 makes a volume, or where lvm2 was killed then.
    """
    return bool(_RESERVED.search(name))


def readable(prefix: str, logical: str) -> str:
    """The CO's name for a logical volume, if the volume's name has it; else the volume's name."""
    return logical.removeprefix(f"{prefix}-")


def escaped(name: str) -> str:
    """Double the dashes of a volume group's or volume's name, as in the names of devices."""
    return name.replace("-", "--")


def device(group: str, name: str) -> str:
    """The device-mapper name of a logical volume."""
    return f"{escaped(group)}-{escaped(name)}"


def of_device(group: str, device_name: str) -> str:
    """The name of a volume group's logical volume, by its device's name; empty if impossible."""
    prefix, escaped_name = f"{escaped(group)}-", device_name.removeprefix(f"{escaped(group)}-")
    if not device_name.startswith(prefix) or not _ESCAPED.fullmatch(escaped_name):
        return ""
    return escaped_name.replace("--", "-")
