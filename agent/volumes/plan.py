"""What a volume is to be: its class, its parameters completed, its size, what is kept of it."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent import errors, fact
from agent.config.classes import DeviceClass
from agent.config.settings import Config
from agent.requests import keys
from agent.requests.capabilities import BLOCK, MOUNT, Capability
from agent.requests.parameters import Parameters
from agent.requests.volumes import CreateVolume, SizeRange
from agent.volumes import sealing
from lvm import layout, report, tags
from mount import filesystem

# What a volume is given where the caller names no size.
DEFAULT_SIZE_BYTES = 1 << 30


def device_class(config: Config, field: str, parameters: Parameters) -> DeviceClass:
    """The class that parameters name, with what they have otherwise; raises NotAllowed, BadField.

    `field` is where the parameters stand in the request.
    """
    found = config.device_class(parameters.device_class)
    if found is None:
        known = [one.name for one in config.classes]
        raise errors.NotAllowed(f"{field}[class]", parameters.device_class, known)
    return _overridden(field, found, parameters)


def _overridden(field: str, one: DeviceClass, parameters: Parameters) -> DeviceClass:
    """A class with the layout, and the size of its caches, that the parameters make of its own."""
    if parameters.cache_size is not None:
        why = "has no cache" if one.cache is None else "has one for all, its pool's"
        if one.cache is None or one.layout.is_thin:
            raise errors.BadField(f"{field}[{keys.CACHE_SIZE}]", f"class {one.name} {why}")
        one = replace(one, cache=replace(one.cache, size=parameters.cache_size))
    if parameters.encryption:
        one = replace(one, encryption=parameters.encryption)
    if parameters.reencrypt:
        if not one.encryption:
            why = f"is for volumes that are encrypted; ask for carver/{fact.ENCRYPTION}, too"
            raise errors.BadField(f"{field}[{fact.REENCRYPT}]", f"{why} (class {one.name})")
        one = replace(one, reencrypt=True)
    chosen: dict[str, Any] = dict(parameters.layout)
    try:
        return replace(one, layout=replace(one.layout, **chosen))
    except layout.Impossible as error:
        [key] = [key for key, (part, _) in keys.LAYOUT_PARAMETERS.items() if part == error.part]
        raise errors.BadField(f"{field}[{key}]", f"{error} (class {one.name})") from None


def check_stripe_size(one: DeviceClass, group: report.Group) -> None:
    """Refuse what lvm2 would silently make smaller: a stripe is no larger than an extent."""
    if one.layout.stripe_size_bytes > group.extent_size_bytes:
        raise errors.BadField(
            "parameters[stripeSize]",
            f"{one.layout.stripe_size_bytes} is more than an extent of volume group {group.name},"
            f" {group.extent_size_bytes} bytes (class {one.name})",
        )


def with_defaults(
    parameters: Parameters,
    capabilities: Sequence[Capability],
    one: DeviceClass,
    held: str = "",
) -> Parameters:
    """The parameters as the class completes them, so that they no longer depend on it.

    `held` is the file system that is there already, on what is copied.
    """
    asked = next((c.fs_type for c in capabilities if c.fs_type), "") or parameters.fs_type
    mounted = any(not capability.is_block for capability in capabilities)
    fs_type = (asked or held or one.fs_type) if mounted else ""
    inherits = not parameters.mkfs_options and fs_type == one.fs_type
    return Parameters(
        device_class=one.name,
        fs_type=fs_type,
        mkfs_options=one.mkfs_options if inherits else parameters.mkfs_options,
        mount_options=parameters.mount_options,
        about=parameters.about,
        encryption=one.encryption,
        reencrypt=bool(one.encryption) and one.reencrypt,
    )


def of(
    call: CreateVolume,
    one: DeviceClass,
    group: report.Group,
    header_bytes: int,
    held: str | None = None,
) -> tuple[int, dict[str, str]]:
    """The size and the facts of the volume that is asked for."""
    parameters = with_defaults(call.parameters, call.capabilities, one, held or "")
    _check_options(call, parameters)
    size = size_bytes(call.size, call.capabilities, parameters, group, one.layout, header_bytes)
    facts = _facts(call, parameters, size, one.layout) | sealing.facts(header_bytes)
    return size, facts | of_class(one, size, group)


def of_class(one: DeviceClass, size_bytes: int, group: report.Group) -> dict[str, str]:
    """What is kept of a class with a volume of so many bytes, whoever asked for it."""
    facts = {}
    if one.cache is not None and not one.layout.is_thin:
        facts[fact.CACHE] = one.cache.fact(size_bytes, group.extent_size_bytes)
    if one.zero == fact.FULLY:
        facts[fact.ZERO] = fact.FULLY
    return facts


def _check_options(call: CreateVolume, parameters: Parameters) -> None:
    """Refuse now what mkfs or mount would refuse when the volume is staged."""
    if not parameters.fs_type:
        return  # raw block only: one StorageClass often serves both, its options are for the other
    for index, one in enumerate(call.capabilities):
        if one.fs_type and one.fs_type != parameters.fs_type:
            raise errors.BadField(
                "volume_capabilities", f"ask for {parameters.fs_type} and for {one.fs_type}"
            )
        one.check_for(parameters.fs_type, f"volume_capabilities[{index}]")
    parameters.check_for(parameters.fs_type, "parameters")


def size_bytes(
    size: SizeRange,
    capabilities: Sequence[Capability],
    parameters: Parameters,
    group: report.Group,
    shape: layout.Layout,
    header_bytes: int = 0,
) -> int:
    """The size that a volume gets: whole extents, and enough for its file system and its header.

    Raises BadSize when that, without the header, is above the limit.
    """
    fs_types = {c.fs_type or parameters.fs_type for c in capabilities if not c.is_block}
    minimum = max((filesystem.FILE_SYSTEMS[one].minimum_bytes for one in fs_types), default=0)
    extent, unit = group.extent_size_bytes, group.extent_size_bytes * shape.stripes
    asked = size.required_bytes
    if not asked:
        within_limit = (size.limit_bytes + header_bytes) // unit * unit - header_bytes
        asked = min(DEFAULT_SIZE_BYTES, max(0, within_limit) or DEFAULT_SIZE_BYTES)
    planned = layout.round_up(max(asked, minimum) + header_bytes, extent, shape)
    if size.limit_bytes and planned - header_bytes > size.limit_bytes:
        raise errors.BadSize(
            f"capacity_range.limit_bytes: {size.limit_bytes} is less than the least volume that"
            f" can be made, {planned - header_bytes} bytes: {shape.stripes} times extents of"
            f" {extent} bytes"
            + (f", {minimum} bytes for {', '.join(sorted(fs_types))}" if minimum else "")
        )
    return planned


def _facts(
    call: CreateVolume, parameters: Parameters, size_bytes: int, shape: layout.Layout
) -> dict[str, str]:
    """What is kept of a request: all that a repeated one is compared with."""
    chosen = {
        key.removeprefix(keys.PARAMETER_PREFIX): value
        for key, value in parameters.context().items()
    }
    capabilities = "|".join(sorted(map(str, call.capabilities)))
    if not tags.fits(fact.CAPABILITIES, capabilities):
        # Only compared, never read back: where there is no room, its digest will do.
        capabilities = f"sha256:{hashlib.sha256(capabilities.encode()).hexdigest()}"
    only_block = all(one.is_block for one in call.capabilities)
    return {
        fact.NAME: call.name,
        fact.STATE: fact.READY,
        fact.SIZE: str(size_bytes),
        fact.LAYOUT: str(shape),
        fact.ACCESS: BLOCK if only_block else MOUNT,
        fact.CAPABILITIES: capabilities,
        **chosen,
        **(parameters.about or {}),
    }


def context_of(facts: Mapping[str, str]) -> dict[str, str]:
    """The volume_context that a volume's facts amount to."""
    return {keys.PARAMETER_PREFIX + key: facts[key] for key in keys.PARAMETERS if key in facts}
