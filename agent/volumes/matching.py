"""Whether a volume that is there is the one that is asked for."""

from dataclasses import replace

from agent import errors, fact
from agent.config.classes import DeviceClass
from agent.config.settings import Config
from agent.engine.inventory import require_own
from agent.engine.records import Volume
from agent.requests import keys
from agent.requests.capabilities import BLOCK
from agent.requests.volumes import CreateVolume, SizeRange, ValidateVolume
from agent.volumes import modifying, plan
from mount import filesystem


def require_same(call: CreateVolume, one: DeviceClass, found: Volume) -> None:
    """Raise Incompatible where the volume that is there is not what is asked for now.

    Raises OperationPending while it is being wiped, Receiving and Moved as `require_own`.
    """
    if found.wiping:
        raise errors.OperationPending(f"{found.id} (being wiped)")
    require_own(found)
    told = call.source.id if call.source is not None else ""
    if (was := found.facts.get(fact.FROM, "")) != told:
        raise errors.Incompatible(
            f"volume {call.name!r} exists, made of {was or 'nothing'}, not {told or 'nothing'}"
        )
    made_bytes = found.made_bytes
    # One that is not complete may have to grow to the size that it was made for.
    header = found.header_bytes
    if not call.size.allows(size_bytes := max(found.size_bytes, made_bytes) - header):
        raise errors.Incompatible(
            f"volume {call.name!r} exists with a size of {size_bytes} bytes, not of"
            f" {call.size.required_bytes} to {call.size.limit_bytes or 'any number of'}"
        )
    # All else is compared as of a call for the size with which it was made.
    call = replace(call, size=SizeRange(made_bytes - header))
    # What it was made of gave the file system, and may be gone by now.
    held = found.facts.get(fact.FS_TYPE) if told else None
    _, facts = plan.of(call, one, found.group, header, held)
    compared = (fact.LAYOUT, fact.CACHE, fact.CAPABILITIES)
    for key in (*compared, *keys.PARAMETERS):
        if (was := found.facts.get(key, "")) != (wanted := facts.get(key, "")):
            raise errors.Incompatible(
                f"volume {facts[fact.NAME]!r} exists with {key} {was or 'none'!r},"
                f" not {wanted or 'none'!r}"
            )


def refusal(config: Config, volume: Volume, call: ValidateVolume) -> str:
    """Why the volume cannot be used as wanted; empty where it can."""
    try:
        present = volume.group.volume(volume.name).tuning
        modifying.check(call.tuning, volume.layout, present)
        _check_made_so(config, volume, call)
    except errors.BadField as error:
        return str(error)
    formatted = volume.facts.get(fact.FORMATTED)
    for capability in call.capabilities:
        if capability.is_block:
            continue
        if volume.facts[fact.ACCESS] == BLOCK:
            return "the volume was made for raw block access"
        if formatted and capability.fs_type not in {"", formatted}:
            return f"the volume is formatted with {formatted}, not {capability.fs_type}"
        fs_type = capability.fs_type or formatted or volume.facts.get(fact.FS_TYPE, "")
        minimum = filesystem.FILE_SYSTEMS[fs_type].minimum_bytes if fs_type else 0
        if volume.capacity_bytes < minimum:
            return f"{fs_type} needs {minimum} bytes, the volume has {volume.capacity_bytes}"
    return ""


def _check_made_so(config: Config, volume: Volume, call: ValidateVolume) -> None:
    """Raise BadField for what a caller has of a volume, or says of its class, and is not so.

    What is not given is not compared: a class may have changed since.
    """
    facts, given = volume.facts, call.parameters
    if call.context and call.context != (own := plan.context_of(facts)):
        raise errors.BadField("volume_context", f"{call.context} is not the volume's, {own}")
    if facts[fact.ACCESS] == BLOCK or any(one.fs_type for one in call.capabilities):
        # A raw block volume has none, and a capability's goes before it.
        given = replace(given, fs_type="")
    wanted = {key.removeprefix(keys.PARAMETER_PREFIX): v for key, v in given.context().items()}
    made = {key: facts.get(key, "") for key in wanted}
    for key, (part, _) in keys.LAYOUT_PARAMETERS.items():
        if part in given.layout:
            wanted[key] = str(given.layout[part])
            made[key] = str(getattr(volume.layout, part))
    if given.cache_size is not None:
        named = replace(given, device_class=given.device_class or facts.get(fact.CLASS, ""))
        # It has one, or else the parameter is refused.
        cache, extent = (
            plan.device_class(config, "parameters", named).cache,
            volume.group.extent_size_bytes,
        )
        wanted[keys.CACHE_SIZE] = cache.fact(volume.made_bytes, extent) if cache else ""
        made[keys.CACHE_SIZE] = facts.get(fact.CACHE, "")
    for key, value in wanted.items():
        if value != made[key]:
            was = made[key] or "none"
            raise errors.BadField(f"parameters[{key}]", f"{value!r}, the volume has {was!r}")
