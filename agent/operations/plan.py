"""Plan a new volume: class, parameters, size, tags; and whether an existing one matches."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from agent.core import errors, tag
from agent.requests.parameters import CACHE_SIZE, STORAGE_CLASS, Parameters
from agent.requests.requests import BLOCK, MOUNT, Capability, CreateVolume, SizeRange
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from agent.volumes import records, volume_states
from agent.volumes.allocation import Allocator, Thin
from agent.volumes.records import Snapshot, Volume
from agent.volumes.volume_states import Ender
from lvm import layout, report, tags
from lvm.caches import Cache
from lvm.thin import Policy
from mount import filesystem
from mount import mount_errors as mount_errors

LEAST_BYTES = 4 << 20
# The default of lvm2 (lvmraid(7)).
_STRIPE_BYTES = 64 << 10
# Larger chunks would cost more than they save.
_MOST_UNIT_BYTES = 64 << 20


def header_bytes(one: DeviceClass, allocator: Allocator, group: report.Group) -> int:
    """The size of a LUKS header that keeps data aligned to stripes or chunks; 0 without one."""
    if not one.encryption:
        return 0
    unit = one.layout.stripes * (one.layout.stripe_size_bytes or _STRIPE_BYTES)
    if isinstance(allocator, Thin):
        unit = allocator.pool(group).chunk_size_bytes
    if unit > _MOST_UNIT_BYTES:
        return LEAST_BYTES
    return -(-LEAST_BYTES // unit) * unit


# The size of a volume for which the caller requests none.
DEFAULT_SIZE_BYTES = 1 << 30


def device_class(config: Config, field: str, parameters: Parameters) -> DeviceClass:
    """The class that parameters name, as the other parameters change it.

    `field` is their field in the request, for errors. Raises NotAllowed, BadField.
    """
    found = config.device_class(parameters.device_class)
    if found is None:
        known = [one.name for one in config.classes]
        raise errors.NotAllowed(f"{field}[class]", parameters.device_class, known)
    return parameters.applied(found, field)


def check_stripe_size(one: DeviceClass, group: report.Group) -> None:
    """Refuse what lvm2 would silently make smaller: a stripe is no larger than an extent."""
    if one.layout.stripe_size_bytes > group.extent_size_bytes:
        raise errors.BadField(
            "parameters[stripeSize]",
            f"{one.layout.stripe_size_bytes} is more than an extent of volume group {group.name},"
            f" {group.extent_size_bytes} bytes (class {one.name})",
        )


def with_defaults(
    parameters: Parameters, capabilities: Sequence[Capability], one: DeviceClass, held: str = ""
) -> Parameters:
    """The parameters completed by the class's, so that they no longer depend on it.

    `held` is the file system of the source, for a copy.
    """
    asked = next((c.fs_type for c in capabilities if c.fs_type), "") or parameters.fs_type
    mounted = any(not capability.is_block for capability in capabilities)
    fs_type = (asked or held or one.fs_type) if mounted else ""
    return parameters.completed(one, fs_type)


def new(
    call: CreateVolume,
    one: DeviceClass,
    allocator: Allocator,
    group: report.Group,
    origin: Snapshot | Volume | None,
) -> tuple[int, dict[str, str]]:
    """The size and the tags of a new volume, which is made of `origin`, or empty.

    Raises BadField, BadSize.
    """
    if origin is None:
        size, own_tags = _planned(call, one, group, header_bytes(one, allocator, group))
        if tag.ZERO in own_tags:
            # It is overwritten in the background, as a copy is written.
            own_tags |= volume_states.tags_for(Ender.COPIER)
        return size, own_tags
    asked_bytes = call.size.required_bytes
    call = replace(call, size=_size_of_copy(call.size, origin))
    held = origin.own_tags.get(tag.FORMATTED, "")
    size, own_tags = _planned(call, one, group, origin.header_bytes, held)
    own_tags.pop(tag.REQUESTED, None)
    own_tags |= records.requested(asked_bytes, size, origin.header_bytes)
    own_tags |= _tags_of_copy(own_tags, origin)
    return size, own_tags


def _size_of_copy(size: SizeRange, origin: Snapshot | Volume) -> SizeRange:
    """The requested size, and no less than the source's; raises BadSize for a limit below that.

    The source may have been rounded up, and what a caller requires is the least that it takes.
    """
    least = origin.capacity_bytes
    if 0 < size.limit_bytes < least:
        raise errors.BadSize(
            f"capacity_range.limit_bytes: {size.limit_bytes} is less than what"
            f" {str(origin.id)!r} holds, {least} bytes"
        )
    return SizeRange(max(size.required_bytes, least), size.limit_bytes)


def _tags_of_copy(own_tags: Mapping[str, str], origin: Snapshot | Volume) -> dict[str, str]:
    """Tags that a new volume with these tags gets from its source; it is not ready yet.

    Raises BadField where the contents cannot be used as requested, TagsDamaged.
    """
    source_id, source = str(origin.id), origin.own_tags
    copied = {**volume_states.tags_for(Ender.COPIER), tag.FROM: source_id}
    # Data are copied as they are on the disk.
    if own_tags.get(tag.ENCRYPTION, "") != (has := source.get(tag.ENCRYPTION, "")):
        raise errors.BadField(
            "volume_content_source",
            f"{source_id!r} {'is encrypted' if has else 'is not encrypted'}, and what is made of it"
            f" must be so, too: ask for carver/encryption={has or 'nothing'}",
        )
    # Of a change of keys that was under way, the copied header may have both.
    copied |= {key: source[key] for key in (tag.SEALED, tag.ROTATING) if key in source}
    fs_type = own_tags.get(tag.FS_TYPE, "")
    if not fs_type:
        return copied  # a raw block device may hold anything
    if records.is_block(source_id, source):
        raise errors.BadField(
            "volume_capabilities",
            f"mount: {source_id!r} is of a raw block volume; what it holds is not Carver's",
        )
    formatted = source.get(tag.FORMATTED, "")
    if formatted and formatted != fs_type:
        raise errors.BadField(
            "volume_content_source", f"{source_id!r} holds {formatted}, not {fs_type}"
        )
    return copied | ({tag.FORMATTED: formatted} if formatted else {})


def _planned(
    call: CreateVolume, one: DeviceClass, group: report.Group, header_bytes: int, held: str = ""
) -> tuple[int, dict[str, str]]:
    """The size of a volume, and the tags with which a repeated request is compared.

    `header_bytes` of it are a LUKS header; `held` is the file system of the source, for a copy.
    """
    parameters = with_defaults(call.parameters, call.capabilities, one, held)
    _check_options(call, parameters)
    size = size_bytes(call.size, call.capabilities, parameters, group, one.layout, header_bytes)
    own_tags = {
        tag.NAME: call.name,
        **volume_states.tags_for(Ender.CALLER),
        tag.SIZE: str(size),
        tag.LAYOUT: str(one.layout),
        tag.ACCESS: BLOCK if all(one.is_block for one in call.capabilities) else MOUNT,
        tag.CAPABILITIES: _capabilities(call),
        **parameters.own_tags(),
        **parameters.about,
        **records.requested(call.size.required_bytes, size, header_bytes),
    }
    if header_bytes:
        own_tags[tag.HEADER] = str(header_bytes)
    return size, own_tags | of_class(one, size, group)


def _capabilities(call: CreateVolume) -> str:
    """The tag by which the capabilities of a repeated request are compared."""
    capabilities = "|".join(sorted(map(str, call.capabilities)))
    if tags.fits(tag.CAPABILITIES, capabilities):
        return capabilities
    # They are only compared, never read back, so a digest is enough.
    return f"sha256:{hashlib.sha256(capabilities.encode()).hexdigest()}"


def of_class(one: DeviceClass, size_bytes: int, group: report.Group) -> dict[str, str]:
    """The tags that a class gives a volume of that size, made or received."""
    own_tags = {}
    if one.cache is not None and not one.layout.is_thin:
        own_tags[tag.CACHE] = one.cache.tag_value(size_bytes, group.extent_size_bytes)
    if one.zero == tag.FULLY:
        own_tags[tag.ZERO] = tag.FULLY
    return own_tags


def _check_options(call: CreateVolume, parameters: Parameters) -> None:
    """Raise BadField for options that mkfs or mount would refuse when the volume is staged."""
    if not parameters.fs_type:
        return  # raw block: one StorageClass often serves both, and its options are for mount
    for index, one in enumerate(call.capabilities):
        if one.fs_type and one.fs_type != parameters.fs_type:
            raise errors.BadField(
                "volume_capabilities", f"ask for {parameters.fs_type} and for {one.fs_type}"
            )
        one.check_for(parameters.fs_type, f"volume_capabilities[{index}]")
    parameters.check_for(parameters.fs_type, "parameters")
    if call.source is not None:
        return  # its file system is there
    flags = [word for one in call.capabilities for word in one.mount_flags]
    try:
        filesystem.check_mount_options(
            parameters.fs_type, parameters.mkfs_options, [*parameters.mount_options, *flags]
        )
    except mount_errors.BadOption as error:
        raise errors.BadField("volume_capabilities", str(error)) from None


def size_bytes(
    size: SizeRange,
    capabilities: Sequence[Capability],
    parameters: Parameters,
    group: report.Group,
    shape: layout.Layout,
    header_bytes: int = 0,
) -> int:
    """The size of a volume in whole extents, large enough for its file system and its header.

    Raises BadSize where the size without the header is above the limit.
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


def require_same(call: CreateVolume, found: Volume) -> None:
    """Raise Incompatible for a volume that is not as the call says.

    What the call does not say is not compared: a class may have changed since the volume was made,
    and its caller, which has no id of it yet, would leave it for ever.
    """
    source = call.source.id if call.source is not None else ""
    if (was := found.own_tags.get(tag.FROM, "")) != source:
        raise errors.Incompatible(
            f"cannot make volume {call.name!r}: it exists, made of {was or 'nothing'}, not of"
            f" {source or 'nothing'}; use another name"
        )
    made_bytes = found.made_bytes
    # An incomplete volume may have to grow to the size of its request.
    header = found.header_bytes
    if not call.size.allows(size_bytes := max(found.size_bytes, made_bytes) - header):
        raise errors.Incompatible(
            f"cannot make volume {call.name!r}: it exists with a size of {size_bytes} bytes, not of"
            f" {call.size.required_bytes} to {call.size.limit_bytes or 'any number of'}; use"
            " another name"
        )
    fs_types = [one.fs_type for one in call.capabilities if one.fs_type]
    is_mounted = any(not one.is_block for one in call.capabilities)
    given = call.parameters
    if fs_types or not is_mounted:
        given = given.with_value(tag.FS_TYPE, fs_types[0] if fs_types else "")
    capabilities = found.own_tags.get(tag.CAPABILITIES, "")
    every = [
        (tag.CAPABILITIES, _capabilities(call), capabilities),
        *differing(found, given),
    ]
    for key, wanted, was in every:
        if was != wanted:
            raise errors.Incompatible(
                f"cannot make volume {call.name!r}: it exists with {key} {was or 'none'!r},"
                f" not {wanted or 'none'!r}; use another name"
            )


def differing(volume: Volume, given: Parameters) -> Iterator[tuple[str, str, str]]:
    """What parameters say that a volume has not: each key, what they say, and what it has.

    Parameters that are not given are not compared: a class may have changed since.
    """
    own_tags = volume.own_tags
    wanted = given.own_tags()
    made = {key: own_tags.get(key, "") for key in wanted}
    for row in STORAGE_CLASS:
        if row.part and row.tag == tag.LAYOUT and row.key in given.given:
            wanted[row.key] = str(given.given[row.key])
            # As it was made, also where it was converted by hand since.
            shape = layout.Layout.parse(own_tags.get(tag.LAYOUT, "")) or volume.layout
            made[row.key] = str(getattr(shape, row.part))
    if (size := given.given.get(CACHE_SIZE)) is not None:
        made[CACHE_SIZE] = own_tags.get(tag.CACHE, "") or "no cache"
        cache, extent = Cache.parse(made[CACHE_SIZE]), volume.group.extent_size_bytes
        asked = None if cache is None else replace(cache, size=size)
        wanted[CACHE_SIZE] = asked.tag_value(volume.made_bytes, extent) if asked else "a cache"
    return ((key, text, made[key]) for key, text in wanted.items() if text != made[key])


def class_of(config: Config, volume: Volume) -> DeviceClass:
    """The class that a volume was made by; as far as the volume tells where that is gone."""
    named, shape = volume.own_tags.get(tag.CLASS, ""), volume.layout
    cache = Cache.parse(volume.own_tags.get(tag.CACHE, ""))
    for one in config.classes:
        if one.name == named and (one.pool is not None) == volume.is_thin:
            own = one.cache if volume.is_thin else cache
            return replace(one, group=volume.group.name, layout=shape, cache=own)
    return DeviceClass(
        named,
        volume.group.name,
        layout=shape,
        pool=Policy() if volume.is_thin else None,
        cache=cache,
        zero=volume.own_tags.get(tag.ZERO, DeviceClass.zero),
        encryption=volume.own_tags.get(tag.ENCRYPTION, ""),
        fs_type=volume.own_tags.get(tag.FS_TYPE) or DeviceClass.fs_type,
    )
