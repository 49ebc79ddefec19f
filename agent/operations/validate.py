"""ValidateVolumeCapabilities: whether a volume can be used as a request describes, or why not."""

from agent.core import errors, tag
from agent.operations import modify, plan
from agent.requests import parameters
from agent.requests.requests import Capability, ValidateVolume
from agent.volumes.records import Volume
from mount import filesystem


def refusal(volume: Volume, request: ValidateVolume) -> str:
    """Return why a volume cannot be used as the request describes; empty if it can."""
    try:
        modify.check(request.tuning, volume.layout, volume.group.volume(volume.name).tuning)
        _require_same(volume, request)
    except errors.BadField as error:
        return str(error)
    formatted = volume.own_tags.get(tag.FORMATTED)
    for capability in request.capabilities:
        if why := reason_unfit(volume, capability):
            return why
        if capability.is_block:
            continue
        fs_type = capability.fs_type or formatted or volume.own_tags.get(tag.FS_TYPE, "")
        minimum = filesystem.FILE_SYSTEMS[fs_type].minimum_bytes if fs_type else 0
        if volume.capacity_bytes < minimum:
            return f"{fs_type} needs {minimum} bytes, the volume has {volume.capacity_bytes}"
    return ""


def reason_unfit(volume: Volume, capability: Capability) -> str:
    """Return why a volume's contents rule out a capability for good; empty if the volume fits it.

    The contents are either raw blocks or a file system of one type, and neither ever changes.
    """
    if capability.is_block:
        return ""
    if volume.is_block:
        return "the volume was made for raw block access"
    formatted = volume.own_tags.get(tag.FORMATTED)
    if formatted and capability.fs_type not in {"", formatted}:
        return f"the volume is formatted with {formatted}, not {capability.fs_type}"
    return ""


def _require_same(volume: Volume, request: ValidateVolume) -> None:
    """Raise BadField if the request's volume_context or parameters differ from the volume's."""
    own_tags, requested_parameters = volume.own_tags, request.parameters
    if request.context and request.context != (own_context := parameters.context_of(own_tags)):
        raise errors.BadField(
            "volume_context", f"{request.context} is not the volume's, {own_context}"
        )
    if volume.is_block or any(capability.fs_type for capability in request.capabilities):
        # Do not compare the parameter `fs_type` here: a raw block volume has no file system, and
        # the `fs_type` of a capability takes precedence over that of the parameters.
        requested_parameters = requested_parameters.with_value(tag.FS_TYPE, "")
    for key, requested, present in plan.differing(volume, requested_parameters):
        raise errors.BadField(
            f"parameters[{key}]", f"{requested!r}, the volume has {present or 'none'!r}"
        )
