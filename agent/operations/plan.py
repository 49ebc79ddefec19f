"""Plan a new volume: class, parameters, size, tags; compare an existing volume with a request."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from agent.core import errors, tag
from agent.requests.parameters import CACHE_SIZE, STORAGE_CLASS, Parameters
from agent.requests.requests import BLOCK, MOUNT, Capability, CreateVolume, SizeRange
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from agent.volumes import records, volume_states
from agent.volumes.allocation import Allocator, ThinAllocator
from agent.volumes.records import Snapshot, Volume
from agent.volumes.volume_states import EndedBy
from lvm import layout, report, tags
from lvm.caches import Cache
from lvm.thin import Policy
from mount import filesystem
from mount import mount_errors as mount_errors

# Minimum size of a LUKS2 header, in bytes.
LEAST_BYTES = 4 << 20
# Keys of the tags that a copy gets from its source.
_COPIED = tag.following(tag.Follows.COPY)
# Default stripe size of lvm2, in bytes (lvmraid(7)).
_STRIPE_BYTES = 64 << 10
# Maximum size of a stripe or chunk, in bytes, to which the data behind a LUKS2 header are aligned.
# Alignment to larger ones would waste more than it saves.
_MOST_UNIT_BYTES = 64 << 20

# Separator between the capabilities of a volume in their tag.
_BETWEEN_CAPABILITIES = "|"


def header_bytes(device_class: DeviceClass, allocator: Allocator, group: report.Group) -> int:
    """Return the size, in bytes, of a new volume's LUKS2 header; 0 without encryption.

    The size keeps the data behind the header aligned to stripes or chunks of at most 64 MiB.
    """
    if not device_class.encryption:
        return 0
    unit = device_class.layout.stripes * (device_class.layout.stripe_size_bytes or _STRIPE_BYTES)
    if isinstance(allocator, ThinAllocator):
        unit = allocator.pool(group).chunk_size_bytes
    if unit > _MOST_UNIT_BYTES:
        return LEAST_BYTES
    return -(-LEAST_BYTES // unit) * unit


# Default size of a volume, in bytes, if the caller requests no size.
DEFAULT_SIZE_BYTES = 1 << 30


def device_class(config: Config, field: str, parameters: Parameters) -> DeviceClass:
    """Return the device class that parameters name, with the values of the other parameters.

    `field` is the name of the parameters' field in the request, for errors. Raises NotAllowed,
    BadField.
    """
    named_class = config.device_class(parameters.device_class)
    if named_class is None:
        class_names = [known_class.name for known_class in config.classes]
        raise errors.NotAllowed(f"{field}[class]", parameters.device_class, class_names)
    return parameters.applied(named_class, field)


def check_stripe_size(device_class: DeviceClass, group: report.Group) -> None:
    """Raise BadField for a stripe larger than an extent, which lvm2 would silently make smaller."""
    if device_class.layout.stripe_size_bytes > group.extent_size_bytes:
        raise errors.BadField(
            "parameters[stripeSize]",
            f"{device_class.layout.stripe_size_bytes} is more than an extent of volume group"
            f" {group.name}, {group.extent_size_bytes} bytes (class {device_class.name})",
        )


def with_defaults(
    parameters: Parameters,
    capabilities: Sequence[Capability],
    device_class: DeviceClass,
    source_fs_type: str = "",
) -> Parameters:
    """Return a request's parameters, completed by the values of the volume's device class.

    A later change of the class does not affect a volume with completed parameters. `source_fs_type`
    is the file system of the source of a copy. The file system is empty if the volume is not
    mounted.
    """
    requested = (
        next((capability.fs_type for capability in capabilities if capability.fs_type), "")
        or parameters.fs_type
    )
    mounted = any(not capability.is_block for capability in capabilities)
    fs_type = (requested or source_fs_type or device_class.fs_type) if mounted else ""
    return parameters.with_class_values(device_class, fs_type)


def size_and_tags(
    request: CreateVolume,
    device_class: DeviceClass,
    allocator: Allocator,
    group: report.Group,
    origin: Snapshot | Volume | None,
) -> tuple[int, dict[str, str]]:
    """Return the size, in bytes, and the tags of a new volume.

    `origin` is the snapshot or volume that the new volume is copied from; None for an empty volume.
    Raises BadField or BadSize for a request that cannot be met.
    """
    if origin is None:
        size, own_tags = _planned(
            request, device_class, group, header_bytes(device_class, allocator, group)
        )
        if tag.ZERO in own_tags:
            # Tag the volume as incomplete: a background job zeroes the volume, as it fills a copy.
            own_tags |= volume_states.tags_for(EndedBy.COPIER)
        return size, own_tags
    requested_bytes = request.size.required_bytes
    request = replace(request, size=_size_of_copy(request.size, origin))
    source_fs_type = origin.own_tags.get(tag.FORMATTED, "")
    size, own_tags = _planned(request, device_class, group, origin.header_bytes, source_fs_type)
    own_tags.pop(tag.REQUESTED, None)
    own_tags |= records.requested(requested_bytes, size, origin.header_bytes)
    own_tags |= _tags_of_copy(own_tags, origin)
    return size, own_tags


def _size_of_copy(size: SizeRange, origin: Snapshot | Volume) -> SizeRange:
    """Return the requested size of a copy, raised to the size of its source.

    The source may have been rounded up, and a caller requires a minimum size. Raises BadSize if the
    limit is less than the source's size.
    """
    source_bytes = origin.capacity_bytes
    if 0 < size.limit_bytes < source_bytes:
        raise errors.BadSize(
            f"capacity_range.limit_bytes: {size.limit_bytes} is less than what"
            f" {str(origin.id)!r} holds, {source_bytes} bytes"
        )
    return SizeRange(max(size.required_bytes, source_bytes), size.limit_bytes)


def _tags_of_copy(own_tags: Mapping[str, str], origin: Snapshot | Volume) -> dict[str, str]:
    """Return the tags that a new volume with `own_tags` gets from its source.

    One of the tags marks the volume as incomplete. Raises BadField if the contents cannot be used
    as requested, and TagsDamaged if the source's tags do not say what kind of volume it is.
    """
    source_id, source_tags = str(origin.id), origin.own_tags
    copied_tags = {**volume_states.tags_for(EndedBy.COPIER), tag.FROM: source_id}
    # Refuse to change the encryption: data are copied as they are on the disk.
    if own_tags.get(tag.ENCRYPTION, "") != (
        source_encryption := source_tags.get(tag.ENCRYPTION, "")
    ):
        raise errors.BadField(
            "volume_content_source",
            f"{source_id!r} {'is encrypted' if source_encryption else 'is not encrypted'}, and what"
            " is made of it must be so, too: ask for"
            f" carver/encryption={source_encryption or 'nothing'}",
        )
    # Copy the tags of the contents: the copied LUKS2 header is the source's, and may have two keys
    # while the source's key is being changed.
    copied_tags |= {key: source_tags[key] for key in _COPIED if key in source_tags}
    formatted = copied_tags.pop(tag.FORMATTED, "")
    fs_type = own_tags.get(tag.FS_TYPE, "")
    if not fs_type:
        # Check no contents for a raw block volume, which may hold anything.
        return copied_tags
    if records.is_block(source_id, source_tags):
        raise errors.BadField(
            "volume_capabilities",
            f"mount: {source_id!r} is of a raw block volume; what it holds is not Carver's",
        )
    if formatted and formatted != fs_type:
        raise errors.BadField(
            "volume_content_source", f"{source_id!r} holds {formatted}, not {fs_type}"
        )
    return copied_tags | ({tag.FORMATTED: formatted} if formatted else {})


def _planned(
    request: CreateVolume,
    device_class: DeviceClass,
    group: report.Group,
    header_bytes: int,
    source_fs_type: str = "",
) -> tuple[int, dict[str, str]]:
    """Return a volume's size in bytes, and the tags with which a repeated request is compared.

    `header_bytes` of the size are a LUKS2 header; `source_fs_type` is the file system of the source
    of a copy.
    """
    parameters = with_defaults(
        request.parameters, request.capabilities, device_class, source_fs_type
    )
    _check_options(request, parameters)
    size = size_bytes(
        request.size, request.capabilities, parameters, group, device_class.layout, header_bytes
    )
    own_tags = {
        tag.NAME: request.name,
        **volume_states.tags_for(EndedBy.CALLER),
        tag.SIZE: str(size),
        tag.LAYOUT: str(device_class.layout),
        # A volume has a file system exactly if it is mounted (`with_defaults`).
        tag.ACCESS: MOUNT if parameters.fs_type else BLOCK,
        tag.CAPABILITIES: _capabilities(request),
        **parameters.own_tags(),
        **parameters.object_tags,
        **records.requested(request.size.required_bytes, size, header_bytes),
    }
    if header_bytes:
        own_tags[tag.HEADER] = str(header_bytes)
    return size, own_tags | of_class(device_class, size, group)


def _capabilities(request: CreateVolume) -> str:
    """Return the value of the tag by which the capabilities of a repeated request are compared."""
    capabilities = _BETWEEN_CAPABILITIES.join(sorted(map(str, request.capabilities)))
    if tags.fits(tag.CAPABILITIES, capabilities):
        return capabilities
    # Return a digest of capabilities that do not fit into a tag. They can be compared, and not read
    # back.
    return f"sha256:{hashlib.sha256(capabilities.encode()).hexdigest()}"


def recorded_capabilities(volume: Volume) -> tuple[Capability, ...]:
    """Return the capabilities with which a volume was created; empty if its tags lack them."""
    text = volume.own_tags.get(tag.CAPABILITIES, "")
    parsed = [Capability.parse(part) for part in text.split(_BETWEEN_CAPABILITIES)]
    known = tuple(capability for capability in parsed if capability is not None)
    return known if len(known) == len(parsed) else ()


def of_class(device_class: DeviceClass, size_bytes: int, group: report.Group) -> dict[str, str]:
    """Return the tags that a device class gives a volume that is created, received or adopted."""
    own_tags = {}
    if device_class.cache is not None and not device_class.layout.is_thin:
        own_tags[tag.CACHE] = device_class.cache.tag_value(size_bytes, group.extent_size_bytes)
    if device_class.zero == tag.FULLY:
        own_tags[tag.ZERO] = tag.FULLY
    return own_tags


def _check_options(request: CreateVolume, parameters: Parameters) -> None:
    """Raise BadField for options that mkfs or mount would refuse when the volume is staged.

    The options of a raw block volume are not checked, nor mkfs options for a copy.
    """
    if not parameters.fs_type:
        # Check no options for raw block access: one StorageClass often serves both kinds of access,
        # and the options in the StorageClass are for mounts.
        return
    for index, capability in enumerate(request.capabilities):
        if capability.fs_type and capability.fs_type != parameters.fs_type:
            raise errors.BadField(
                "volume_capabilities", f"ask for {parameters.fs_type} and for {capability.fs_type}"
            )
        capability.check_for(parameters.fs_type, f"volume_capabilities[{index}]")
    parameters.check_for(parameters.fs_type, "parameters")
    if request.source is not None:
        # Check no options of mkfs for a copy, which has a file system already.
        return
    flags = [flag for capability in request.capabilities for flag in capability.mount_flags]
    if not (mount_options := [*parameters.mount_options, *flags]):
        return
    try:
        filesystem.check_mount_options(parameters.fs_type, parameters.mkfs_options, mount_options)
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
    """Return the size of a new volume, in bytes: whole extents for file system and LUKS2 header.

    Raises BadSize if the size without the header is above the limit.
    """
    fs_types = {
        capability.fs_type or parameters.fs_type
        for capability in capabilities
        if not capability.is_block
    }
    minimum = max(
        (filesystem.FILE_SYSTEMS[fs_type].minimum_bytes for fs_type in fs_types), default=0
    )
    extent, unit = group.extent_size_bytes, group.extent_size_bytes * shape.stripes
    requested = size.required_bytes
    if not requested:
        within_limit = (size.limit_bytes + header_bytes) // unit * unit - header_bytes
        requested = min(DEFAULT_SIZE_BYTES, max(0, within_limit) or DEFAULT_SIZE_BYTES)
    planned = layout.round_up(max(requested, minimum) + header_bytes, extent, shape)
    if size.limit_bytes and planned - header_bytes > size.limit_bytes:
        raise errors.BadSize(
            f"capacity_range.limit_bytes: {size.limit_bytes} is less than the least volume that"
            f" can be made, {planned - header_bytes} bytes: whole extents of {extent} bytes,"
            f" {shape.stripes} at a time"
            + (f", {minimum} bytes for {', '.join(sorted(fs_types))}" if minimum else "")
        )
    return planned


def require_same(request: CreateVolume, volume: Volume) -> None:
    """Raise Incompatible if an existing volume differs from a CreateVolume request.

    Only values that the request contains are compared. The device class may have changed since the
    volume was created, and the caller, which has no id of the volume yet, would leave the volume
    for ever.
    """
    source = request.source.id if request.source is not None else ""
    if (present := volume.own_tags.get(tag.FROM, "")) != source:
        raise errors.Incompatible(
            f"cannot make volume {request.name!r}: it exists, made of {present or 'nothing'}, not"
            f" of {source or 'nothing'}; use another name"
        )
    made_bytes = volume.made_bytes
    # Compare the planned size of an incomplete volume, which may still have to grow to that size.
    header = volume.header_bytes
    if not request.size.allows(size_bytes := max(volume.size_bytes, made_bytes) - header):
        raise errors.Incompatible(
            f"cannot make volume {request.name!r}: it exists with a size of {size_bytes} bytes, not"
            f" of {request.size.required_bytes} to {request.size.limit_bytes or 'any number of'};"
            " use another name"
        )
    fs_types = [capability.fs_type for capability in request.capabilities if capability.fs_type]
    is_mounted = any(not capability.is_block for capability in request.capabilities)
    parameters = request.parameters
    if fs_types or not is_mounted:
        parameters = parameters.with_value(tag.FS_TYPE, fs_types[0] if fs_types else "")
    capabilities = volume.own_tags.get(tag.CAPABILITIES, "")
    compared = [
        (tag.CAPABILITIES, _capabilities(request), capabilities),
        *differing(volume, parameters),
    ]
    for key, requested, present in compared:
        if present != requested:
            raise errors.Incompatible(
                f"cannot make volume {request.name!r}: it exists with {key} {present or 'none'!r},"
                f" not {requested or 'none'!r}; use another name"
            )


def differing(volume: Volume, parameters: Parameters) -> Iterator[tuple[str, str, str]]:
    """Return the parameters that differ from a volume's: key, requested and present value.

    Only parameters that are given are compared, because the device class may have changed since the
    volume was created.
    """
    own_tags = volume.own_tags
    requested = parameters.own_tags()
    present = {key: own_tags.get(key, "") for key in requested}
    for row in STORAGE_CLASS:
        if row.field_name and row.tag == tag.LAYOUT and row.key in parameters.parsed:
            requested[row.key] = str(parameters.parsed[row.key])
            # Compare with the layout that the volume was created with; an operator may have
            # converted the volume since.
            shape = layout.Layout.parse(own_tags.get(tag.LAYOUT, "")) or volume.layout
            present[row.key] = str(getattr(shape, row.field_name))
    if (size := parameters.parsed.get(CACHE_SIZE)) is not None:
        present[CACHE_SIZE] = own_tags.get(tag.CACHE, "") or "no cache"
        cache, extent = Cache.parse(present[CACHE_SIZE]), volume.group.extent_size_bytes
        requested_cache = None if cache is None else replace(cache, size=size)
        requested[CACHE_SIZE] = (
            requested_cache.tag_value(volume.made_bytes, extent) if requested_cache else "a cache"
        )
    return ((key, text, present[key]) for key, text in requested.items() if text != present[key])


def class_of(config: Config, volume: Volume) -> DeviceClass:
    """Return the device class that a volume was created with.

    If the configuration lacks the class, the result is as much of it as the volume's tags and
    layout tell. The group and the layout are always the volume's own, and so is the cache, except
    for a thin volume.
    """
    class_name, shape = volume.own_tags.get(tag.CLASS, ""), volume.layout
    cache = Cache.parse(volume.own_tags.get(tag.CACHE, ""))
    for known_class in config.classes:
        if known_class.name == class_name and (known_class.pool is not None) == volume.is_thin:
            own_cache = known_class.cache if volume.is_thin else cache
            return replace(known_class, group=volume.group.name, layout=shape, cache=own_cache)
    return DeviceClass(
        class_name,
        volume.group.name,
        layout=shape,
        pool=Policy() if volume.is_thin else None,
        cache=cache,
        zero=volume.own_tags.get(tag.ZERO, DeviceClass.zero),
        encryption=volume.own_tags.get(tag.ENCRYPTION, ""),
        fs_type=volume.own_tags.get(tag.FS_TYPE) or DeviceClass.fs_type,
    )
