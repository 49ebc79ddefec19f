"""ValidateVolumeCapabilities: whether a volume can be used as described, and why not."""

from dataclasses import replace

from agent.core import errors, fields, tag
from agent.core.capabilities import BLOCK
from agent.core.records import Volume
from agent.core.requests import ValidateVolume
from agent.core.settings import Config
from agent.operations import modify, plan
from mount import filesystem


def refusal(config: Config, volume: Volume, call: ValidateVolume) -> str:
    """Why the volume cannot be used as wanted; empty where it can."""
    try:
        modify.check(call.tuning, volume.layout, volume.group.volume(volume.name).tuning)
        _require_same(config, volume, call)
    except errors.BadField as error:
        return str(error)
    formatted = volume.own_tags.get(tag.FORMATTED)
    for capability in call.capabilities:
        if capability.is_block:
            continue
        if volume.own_tags[tag.ACCESS] == BLOCK:
            return "the volume was made for raw block access"
        if formatted and capability.fs_type not in {"", formatted}:
            return f"the volume is formatted with {formatted}, not {capability.fs_type}"
        fs_type = capability.fs_type or formatted or volume.own_tags.get(tag.FS_TYPE, "")
        minimum = filesystem.FILE_SYSTEMS[fs_type].minimum_bytes if fs_type else 0
        if volume.capacity_bytes < minimum:
            return f"{fs_type} needs {minimum} bytes, the volume has {volume.capacity_bytes}"
    return ""


def _require_same(config: Config, volume: Volume, call: ValidateVolume) -> None:
    """Raise BadField where the call's context or parameters are not the volume's.

    Parameters that are not given are not compared: a class may have changed since.
    """
    own_tags, given = volume.own_tags, call.parameters
    if call.context and call.context != (own := plan.context_of(own_tags)):
        raise errors.BadField("volume_context", f"{call.context} is not the volume's, {own}")
    if own_tags[tag.ACCESS] == BLOCK or any(one.fs_type for one in call.capabilities):
        # A raw block volume has no file system, and a capability's goes before the parameter's.
        given = replace(given, fs_type="")
    wanted = {key.removeprefix(fields.PARAMETER_PREFIX): v for key, v in given.context().items()}
    made = {key: own_tags.get(key, "") for key in wanted}
    for key, (part, _) in fields.LAYOUT_PARAMETERS.items():
        if part in given.layout:
            wanted[key] = str(given.layout[part])
            made[key] = str(getattr(volume.layout, part))
    if given.cache_size is not None:
        named = replace(given, device_class=given.device_class or own_tags.get(tag.CLASS, ""))
        # The class has a cache, or else the parameter is refused.
        cache = plan.device_class(config, "parameters", named).cache
        extent = volume.group.extent_size_bytes
        wanted[fields.CACHE_SIZE] = cache.tag_value(volume.made_bytes, extent) if cache else ""
        made[fields.CACHE_SIZE] = own_tags.get(tag.CACHE, "")
    for key, value in wanted.items():
        if value != made[key]:
            was = made[key] or "none"
            raise errors.BadField(f"parameters[{key}]", f"{value!r}, the volume has {was!r}")
