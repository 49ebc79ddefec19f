"""Check single fields of requests."""

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from agent.core import errors
from mount import errors as mount_errors
from mount import options, target

T = TypeVar("T")

# CSI spec, "Size Limits" and CreateVolumeRequest.name.
_MAXIMUM_STRING_BYTES = 128
_NOT_IN_A_NAME = re.compile("[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f]")


def volume_id(text: str) -> str:
    """The volume's id, unparsed; raises Missing."""
    if not text:
        raise errors.Missing("volume_id")
    return text


def snapshot_id(text: str) -> str:
    """The snapshot's id, unparsed; raises Missing."""
    if not text:
        raise errors.Missing("snapshot_id")
    return text


def name(field: str, text: str) -> None:
    """Raise Missing or BadField for an invalid name."""
    if not text:
        raise errors.Missing(field)
    if len(text.encode()) > _MAXIMUM_STRING_BYTES:
        raise errors.BadField(field, f"is longer than {_MAXIMUM_STRING_BYTES} bytes")
    if _NOT_IN_A_NAME.search(text):
        raise errors.BadField(field, f"{text!r} has a control character")


def path(field: str, path: str) -> str:
    """The path; raises Missing, BadField for one that is not absolute and normalized."""
    if not path:
        raise errors.Missing(field)
    try:
        return target.check(path)
    except mount_errors.BadPath as error:
        raise errors.BadField(field, str(error)) from None


def parsed(field: str, text: str, read: Callable[[str], T]) -> T:
    """The value that `read` makes of a text; raises BadField for its ValueError."""
    try:
        return read(text)
    except ValueError as error:
        raise errors.BadField(field, f"{text!r} is not allowed: {error}") from None


def mount_options(field: str, flags: Sequence[str], fs_type: str | None = None) -> None:
    """Raise BadField for options that the file system, or any, does not have."""
    try:
        options.parse(flags, fs_type)
    except mount_errors.BadOption as error:
        raise errors.BadField(field, str(error)) from None
