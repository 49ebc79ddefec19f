"""ValidateVolumeCapabilities: whether a volume can be used as described, and why not."""

from agent.core import errors, tag
from agent.operations import modify, plan
from agent.requests import parameters
from agent.requests.requests import Capability, ValidateVolume
from agent.volumes.records import Volume
from mount import filesystem


def refusal(volume: Volume, call: ValidateVolume) -> str:
    """Why the volume cannot be used as wanted; empty where it can."""
    try:
        modify.check(call.tuning, volume.layout, volume.group.volume(volume.name).tuning)
        _require_same(volume, call)
    except errors.BadField as error:
        return str(error)
    formatted = volume.own_tags.get(tag.FORMATTED)
    for capability in call.capabilities:
        if why := unfit(volume, capability):
            return why
        if capability.is_block:
            continue
        fs_type = capability.fs_type or formatted or volume.own_tags.get(tag.FS_TYPE, "")
        minimum = filesystem.FILE_SYSTEMS[fs_type].minimum_bytes if fs_type else 0
        if volume.capacity_bytes < minimum:
            return f"{fs_type} needs {minimum} bytes, the volume has {volume.capacity_bytes}"
    return ""


def unfit(volume: Volume, capability: Capability) -> str:
    """Why a volume can never be used as a capability says, by what it holds; empty if it can."""
    if capability.is_block:
        return ""
    if volume.is_block:
        return "the volume was made for raw block access"
    formatted = volume.own_tags.get(tag.FORMATTED)
    if formatted and capability.fs_type not in {"", formatted}:
        return f"the volume is formatted with {formatted}, not {capability.fs_type}"
    return ""


def _require_same(volume: Volume, call: ValidateVolume) -> None:
    """Raise BadField where the call's context or parameters are not the volume's."""
    own_tags, given = volume.own_tags, call.parameters
    if call.context and call.context != (own := parameters.context_of(own_tags)):
        raise errors.BadField("volume_context", f"{call.context} is not the volume's, {own}")
    if volume.is_block or any(one.fs_type for one in call.capabilities):
        # A raw block volume has no file system, and a capability's goes before the parameter's.
        given = given.with_value(tag.FS_TYPE, "")
    for key, wanted, was in plan.differing(volume, given):
        raise errors.BadField(f"parameters[{key}]", f"{wanted!r}, the volume has {was or 'none'!r}")
