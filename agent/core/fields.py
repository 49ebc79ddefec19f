"""Fields of requests: the keys of parameters and contexts, and checks of single fields."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from agent.core import errors, tag, values
from mount import errors as mount_errors
from mount import options, target

PARAMETER_PREFIX = "carver/"
# Each is kept as a tag of the same name.
PARAMETERS = (
    *(tag.CLASS, tag.FS_TYPE, tag.MKFS_OPTIONS, tag.MOUNT_OPTIONS),
    *(tag.ENCRYPTION, tag.REENCRYPT),
)
# What they may override of their class's layout: the field, and how it is read.
LAYOUT_PARAMETERS: Mapping[str, tuple[str, Callable[[str], int]]] = {
    "stripes": ("stripes", values.parse_count),
    "stripeSize": ("stripe_size_bytes", values.parse_size),
    "mirrors": ("mirrors", values.parse_count),
}
CACHE_SIZE = "cacheSize"
# What a parameter says that is either given so or not at all.
YES = "true"
STORAGE_CLASS_PARAMETERS = (*PARAMETERS, *LAYOUT_PARAMETERS, CACHE_SIZE)
# What a VolumeAttributesClass may say: the field of a Tuning, and how it is read.
MUTABLE = "mutable_parameters"
MUTABLE_PARAMETERS: Mapping[str, tuple[str, Callable[[str], object]]] = {
    "readAhead": ("read_ahead_bytes", values.parse_read_ahead),
    "minimumRecoveryRate": ("minimum_recovery_kib", values.parse_rate),
    "maximumRecoveryRate": ("maximum_recovery_kib", values.parse_rate),
}
# What a pod may say of an inline volume: as a StorageClass may, and how large it is.
SIZE = "size"
INLINE_PARAMETERS = (*STORAGE_CLASS_PARAMETERS, SIZE)
EPHEMERAL = "csi.storage.k8s.io/ephemeral"
# What a secret may hold: the volume's key, and the one that it had before.
PASSPHRASE, PREVIOUS_PASSPHRASE = "passphrase", "previousPassphrase"
# And a name for the key, which is no secret: it is kept in the clear.
GENERATION = "passphraseGeneration"
# What a VolumeSnapshotClass may say.
SNAPSHOT_PARAMETERS = (SIZE,)


Number = TypeVar("Number")

# CSI spec, "Size Limits" and CreateVolumeRequest.name.
_MAXIMUM_STRING_BYTES = 128
_NOT_IN_A_NAME = re.compile("[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f]")


def volume_id(text: str) -> str:
    """A volume's id, whatever it says; raises Missing."""
    if not text:
        raise errors.Missing("volume_id")
    return text


def snapshot_id(text: str) -> str:
    """A snapshot's id, whatever it says; raises Missing."""
    if not text:
        raise errors.Missing("snapshot_id")
    return text


def name(field: str, text: str) -> None:
    """Raise Missing, BadField for what CSI does not allow as a name."""
    if not text:
        raise errors.Missing(field)
    if len(text.encode()) > _MAXIMUM_STRING_BYTES:
        raise errors.BadField(field, f"is longer than {_MAXIMUM_STRING_BYTES} bytes")
    if _NOT_IN_A_NAME.search(text):
        raise errors.BadField(field, f"{text!r} has a control character")


def path(field: str, path: str) -> str:
    """A path, as it is; raises Missing, BadField for one that may lead elsewhere."""
    if not path:
        raise errors.Missing(field)
    try:
        return target.check(path)
    except mount_errors.BadPath as error:
        raise errors.BadField(field, str(error)) from None


def number(field: str, text: str, read: Callable[[str], Number]) -> Number:
    """What `read` makes of a text; raises BadField where it refuses with a ValueError."""
    try:
        return read(text)
    except ValueError as error:
        raise errors.BadField(field, f"{text!r} is not allowed: {error}") from None


def mount_options(field: str, flags: Sequence[str], fs_type: str | None = None) -> None:
    """Raise BadField for options that no file system has, or that this one has not."""
    try:
        options.parse(flags, fs_type)
    except mount_errors.BadOption as error:
        raise errors.BadField(field, str(error)) from None
