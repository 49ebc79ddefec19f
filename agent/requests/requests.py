"""CSI requests as frozen records, read and checked by `from_proto`, which raises BadField."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, Self, TypeVar

from google.protobuf.message import Message

from agent.core import errors, ids
from agent.core.ids import VolumeId
from agent.requests import secret
from agent.requests.parameters import (
    EPHEMERAL,
    MUTABLE_FIELD,
    OF_GROUP_SNAPSHOT,
    OF_SNAPSHOT,
    SIZE,
    Parameters,
    check_mount_options,
    snapshot_parameters,
    tuning_of,
)
from agent.requests.secret import Keys
from lvm import names
from lvm.layout import Reserve
from lvm.tuning import AS_IT_IS, Tuning
from mount import filesystem, target
from mount import mount_errors as mount_errors
from proto import csi_pb2 as csi

BLOCK = "block"
MOUNT = "mount"
_MODES = csi.VolumeCapability.AccessMode.Mode
# Supported access modes of a volume capability.
ACCESS_MODES = (
    "SINGLE_NODE_WRITER",
    "SINGLE_NODE_READER_ONLY",
    "SINGLE_NODE_SINGLE_WRITER",
    "SINGLE_NODE_MULTI_WRITER",
    # ReadOnlyMany of Kubernetes. The volume is still on one node, to which its topology binds its
    # pods.
    "MULTI_NODE_READER_ONLY",
)
# Access mode of a volume that is only read, on one node.
READER_ONLY = "SINGLE_NODE_READER_ONLY"
# Access modes that allow no writer.
_READERS = (READER_ONLY, "MULTI_NODE_READER_ONLY")
# Access modes in which several targets may share a volume (CSI spec, NodePublishVolume).
_SHARED = ("SINGLE_NODE_MULTI_WRITER", "MULTI_NODE_READER_ONLY")


@dataclass(frozen=True)
class Capability:
    """A volume capability; `fs_type` is empty if the caller named no file system.

    The last three fields follow from the others.
    """

    access: str
    mode: str
    fs_type: str = ""
    mount_flags: tuple[str, ...] = ()
    # Whether the volume is used as a raw block device.
    is_block: bool = field(init=False, compare=False)
    # Whether the access mode allows no writer.
    read_only: bool = field(init=False, compare=False)
    # Whether the access mode allows several targets at once.
    is_shared: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        vars(self).update(
            is_block=self.access == BLOCK,
            read_only=self.mode in _READERS,
            is_shared=self.mode in _SHARED,
        )

    @classmethod
    def from_proto(cls, message: csi.VolumeCapability, field: str = "volume_capability") -> Self:
        """Read and check a VolumeCapability; raises BadField for an invalid field."""
        mode = _mode(message, field)
        access = message.WhichOneof("access_type")
        if access is None:
            raise errors.BadField(f"{field}.access_type", "block or mount is required")
        if access == BLOCK:
            return cls(BLOCK, mode)
        if message.mount.fs_type and message.mount.fs_type not in filesystem.FILE_SYSTEMS:
            raise errors.NotAllowed(
                f"{field}.mount.fs_type", message.mount.fs_type, filesystem.FILE_SYSTEMS
            )
        if message.mount.volume_mount_group:
            raise errors.BadField(f"{field}.mount.volume_mount_group", "is not supported")
        flags = tuple(message.mount.mount_flags)
        if flags:
            check_mount_options(f"{field}.mount.mount_flags", flags)
        return cls(MOUNT, mode, message.mount.fs_type, flags)

    @classmethod
    def all_from_proto(cls, messages: Sequence[csi.VolumeCapability]) -> tuple[Self, ...]:
        """Read and check the field `volume_capabilities`; raises BadField for an invalid one."""
        return tuple(
            cls.from_proto(capability, f"volume_capabilities[{index}]")
            for index, capability in enumerate(messages)
        )

    def check_for(self, fs_type: str, field: str) -> None:
        """Raise BadField for mount flags that a file system does not have."""
        if self.mount_flags:
            check_mount_options(f"{field}.mount.mount_flags", self.mount_flags, fs_type)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the capability whose text, by `str`, is `text`; None if there is none."""
        parts = text.split(":", maxsplit=3)
        if len(parts) != len(("access", "mode", "fs_type", "mount_flags")):
            return None
        access, mode, fs_type, flags = parts
        if access not in (BLOCK, MOUNT) or mode not in ACCESS_MODES:
            return None
        return cls(access, mode, fs_type, tuple(filter(None, flags.split(","))))

    def __str__(self) -> str:
        return ":".join((self.access, self.mode, self.fs_type, ",".join(self.mount_flags)))


def _mode(message: csi.VolumeCapability, field: str) -> str:
    number = message.access_mode.mode
    if number == _MODES.UNKNOWN:
        raise errors.Missing(f"{field}.access_mode.mode")
    name = _MODES.Name(number) if number in _MODES.values() else str(number)
    if name not in ACCESS_MODES:
        raise errors.NotAllowed(f"{field}.access_mode.mode", name, ACCESS_MODES)
    return name


# Maximum size of a string in a request, in bytes (CSI spec, "Size Limits").
_MAXIMUM_STRING_BYTES = 128
# Characters that a name may not have (CSI spec, CreateVolumeRequest.name).
_NOT_IN_A_NAME = re.compile("[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f]")


def required(message: Message, field: str) -> Any:
    """The value of a field of a request; raises Missing if the field is empty."""
    if not (value := getattr(message, field)):
        raise errors.Missing(field)
    return value


def _check_name(field: str, text: str) -> None:
    if not text:
        raise errors.Missing(field)
    if len(text.encode()) > _MAXIMUM_STRING_BYTES:
        raise errors.BadField(field, f"is longer than {_MAXIMUM_STRING_BYTES} bytes")
    if _NOT_IN_A_NAME.search(text):
        raise errors.BadField(field, f"{text!r} has a control character")


def _path(message: Message, field: str) -> str:
    """The path in a field of a request.

    Raises Missing for an empty path, and BadField for a path that is not absolute and normalized.
    """
    try:
        return target.check(required(message, field))
    except mount_errors.BadPath as error:
        raise errors.BadField(field, str(error)) from None


T = TypeVar("T")

# Maximum number of entries in a page of a list. The limit holds even for a caller that set
# none, which the CSI spec allows, because gRPC in Go accepts messages of 4 MiB by default.
MOST_ENTRIES = 2000
# Maximum size of the entries in a page of a list, in bytes: gRPC in Go accepts messages of 4
# MiB by default.
MOST_BYTES = 2 << 20


@dataclass(frozen=True)
class Page:
    """The page of a list that a request asks for.

    A `maximum_entries` of 0 means as many entries as fit into one message.
    """

    maximum_entries: int
    starting_token: str

    @classmethod
    def from_proto(
        cls,
        message: csi.ListVolumesRequest
        | csi.ListSnapshotsRequest
        | csi.ControllerListVolumeHealthRequest,
    ) -> Self:
        """Read and check the page that a list request asks for; raises BadField, BadToken."""
        if message.max_entries < 0:
            raise errors.BadField("max_entries", "must not be negative")
        # Check that the token is an id: `select_page` uses the first id of the next page as the
        # token.
        if message.starting_token and VolumeId.parse(message.starting_token) is None:
            raise errors.BadToken(message.starting_token)
        return cls(message.max_entries, message.starting_token)


@dataclass(frozen=True)
class ListPage(Generic[T]):
    """The entries of a page, and the token of the next page, which is empty after the last page."""

    entries: tuple[T, ...]
    next_token: str


def select_page(entries_by_id: Mapping[str, T], page: Page) -> ListPage[T]:
    """The requested page of a list of volumes or snapshots, sorted by ids.

    `entries_by_id` has all entries of the list by their ids. The token is the first id of the next
    page. So the token stays valid when volumes are created or deleted between the requests for two
    pages.
    """
    entries = [
        (key, entries_by_id[key]) for key in sorted(entries_by_id) if key >= page.starting_token
    ]
    return first_page(entries, page)


def first_page(
    remaining: Iterable[tuple[str, T]], page: Page, weigh_bytes: Callable[[T], int] = lambda _: 0
) -> ListPage[T]:
    """The requested page of a list that is already sorted by ids.

    `remaining` has the ids and entries of the list from the page's token on. `remaining` is
    consumed up to the first entry of the next page. `weigh_bytes` estimates the size of an entry in
    the message, in bytes.
    """
    maximum_entries = min(page.maximum_entries or MOST_ENTRIES, MOST_ENTRIES)
    entries: list[T] = []
    size_bytes = 0
    for key, entry in remaining:
        size_bytes += weigh_bytes(entry)
        if len(entries) == maximum_entries or (entries and size_bytes > MOST_BYTES):
            return ListPage(tuple(entries), key)
        entries.append(entry)
    return ListPage(tuple(entries), "")


SNAPSHOT = "snapshot"
VOLUME = "volume"


@dataclass(frozen=True)
class SizeRange:
    """The range in which the size of a volume must be, in bytes; 0 means no bound."""

    required_bytes: int = 0
    limit_bytes: int = 0

    def allows(self, size_bytes: int) -> bool:
        """Whether a size in bytes is within the range."""
        return self.required_bytes <= size_bytes <= (self.limit_bytes or size_bytes)

    @classmethod
    def from_proto(cls, message: csi.CapacityRange, field: str = "capacity_range") -> Self:
        """Read and check a CapacityRange; raises BadField for an invalid field."""
        for name in ("required_bytes", "limit_bytes"):
            if getattr(message, name) < 0:
                raise errors.BadField(f"{field}.{name}", "must not be negative")
        if message.limit_bytes and message.required_bytes > message.limit_bytes:
            raise errors.BadField(
                f"{field}.limit_bytes",
                f"{message.limit_bytes} is less than required_bytes, {message.required_bytes}",
            )
        return cls(message.required_bytes, message.limit_bytes)


@dataclass(frozen=True)
class Topology:
    """The nodes on which a volume may or should be, as topologies: maps of segments."""

    requisite: tuple[Mapping[str, str], ...] = ()
    preferred: tuple[Mapping[str, str], ...] = ()

    @classmethod
    def from_proto(cls, message: csi.TopologyRequirement) -> Self:
        """Read a TopologyRequirement."""
        return cls(
            tuple(dict(topology.segments) for topology in message.requisite),
            tuple(dict(topology.segments) for topology in message.preferred),
        )

    def includes(self, node_segments: Mapping[str, str]) -> bool:
        """Whether a node with the topology segments `node_segments` is allowed.

        Without a requirement any node is allowed.
        """
        topologies = self.requisite or self.preferred
        return not topologies or any(
            segments.items() <= node_segments.items() for segments in topologies
        )


@dataclass(frozen=True)
class Source:
    """The source of a new volume: the id of a snapshot or of a volume."""

    kind: str
    id: str

    @classmethod
    def from_proto(cls, message: csi.CreateVolumeRequest) -> Self | None:
        """Read and check the source in a request; return None for a request without a source."""
        field = "volume_content_source"
        if not message.HasField("volume_content_source"):
            return None
        kind = message.volume_content_source.WhichOneof("type")
        if kind is None:
            raise errors.BadField(f"{field}.type", "snapshot or volume is required")
        identity = getattr(getattr(message.volume_content_source, kind), f"{kind}_id")
        if not identity:
            raise errors.Missing(f"{field}.{kind}.{kind}_id")
        return cls(kind, identity)


@dataclass(frozen=True)
class CreateVolume:
    """A checked CreateVolume request, or the request for an inline volume."""

    name: str
    size: SizeRange
    capabilities: tuple[Capability, ...]
    parameters: Parameters
    topology: Topology
    # Source of the volume's contents; None for an empty volume.
    source: Source | None = None
    tuning: Tuning = AS_IT_IS
    # Whether the request is for an inline volume, whose name is the id that the CO chose.
    is_ephemeral: bool = False

    @cached_property
    def own_name(self) -> str:
        """Name of the volume's logical volume."""
        prefix = ids.INLINE_PREFIX if self.is_ephemeral else ids.VOLUME_PREFIX
        return names.logical_volume(prefix, self.name)

    @classmethod
    def from_proto(cls, message: csi.CreateVolumeRequest) -> Self:
        """Read and check a CreateVolume request; raises BadField.

        A volume whose access modes allow no writer needs a source.
        """
        _check_name("name", message.name)
        parameters = Parameters.from_proto(message.parameters)
        capabilities = Capability.all_from_proto(required(message, "volume_capabilities"))
        source = Source.from_proto(message)
        if source is None and all(capability.read_only for capability in capabilities):
            raise errors.BadField(
                "volume_capabilities",
                f"{capabilities[0].mode} alone leaves a new volume empty for ever; give the claim a"
                " dataSource (volume_content_source), or an access mode that writes, such as"
                " ReadWriteOnce",
            )
        return cls(
            name=message.name,
            capabilities=capabilities,
            size=SizeRange.from_proto(message.capacity_range),
            parameters=parameters,
            topology=Topology.from_proto(message.accessibility_requirements),
            source=source,
            # Settings of a VolumeAttributesClass take precedence over those of the StorageClass.
            tuning=tuning_of(message.mutable_parameters).applied_to(parameters.tuning),
        )


@dataclass(frozen=True)
class ValidateVolume:
    """A checked ValidateVolumeCapabilities request.

    `unsupported` is the reason why no volume can have what the request names, or empty.
    """

    volume_id: str
    capabilities: tuple[Capability, ...]
    unsupported: str
    tuning: Tuning = AS_IT_IS
    # The volume_context to compare with the volume's; empty if the caller gave none.
    context: Mapping[str, str] = field(default_factory=dict)
    parameters: Parameters = field(default_factory=Parameters)

    @classmethod
    def from_proto(cls, message: csi.ValidateVolumeCapabilitiesRequest) -> Self:
        """Read a ValidateVolumeCapabilities request; an invalid field becomes `unsupported`.

        Raises Missing for a request without a volume id or capabilities.
        """
        volume_id = required(message, "volume_id")
        wire_capabilities = required(message, "volume_capabilities")
        try:
            capabilities = Capability.all_from_proto(wire_capabilities)
            parameters = Parameters.from_proto(message.parameters)
            context = Parameters.from_context(message.volume_context, newer=False).context()
            tuning = tuning_of(message.mutable_parameters).applied_to(parameters.tuning)
        except errors.BadField as error:
            return cls(volume_id, (), str(error))
        return cls(volume_id, capabilities, "", tuning, context, parameters)


@dataclass(frozen=True)
class ModifyVolume:
    """A checked ControllerModifyVolume request."""

    volume_id: str
    tuning: Tuning

    @classmethod
    def from_proto(cls, message: csi.ControllerModifyVolumeRequest) -> Self:
        """Read and check a ControllerModifyVolume request; raises BadField for an invalid field."""
        volume_id = required(message, "volume_id")
        return cls(volume_id, tuning_of(required(message, MUTABLE_FIELD)))


@dataclass(frozen=True)
class ExpandVolume:
    """A checked ControllerExpandVolume or NodeExpandVolume request.

    `read_only` is whether the access mode in the request allows no writer.
    """

    volume_id: str
    size: SizeRange
    read_only: bool = False

    @classmethod
    def from_proto(
        cls, message: csi.ControllerExpandVolumeRequest | csi.NodeExpandVolumeRequest
    ) -> Self:
        """Read and check a request to expand a volume; raises BadField for an invalid field."""
        volume_id = required(message, "volume_id")
        read_only = (
            message.HasField("volume_capability")
            and Capability.from_proto(message.volume_capability).read_only
        )
        size = SizeRange.from_proto(message.capacity_range)
        if isinstance(message, csi.ControllerExpandVolumeRequest) and size == SizeRange():
            raise errors.Missing("capacity_range")
        return cls(volume_id, size, read_only)


@dataclass(frozen=True)
class GetCapacity:
    """A checked GetCapacity request; `unsupported` is whether its capabilities are invalid."""

    capabilities: tuple[Capability, ...]
    parameters: Parameters
    segments: Mapping[str, str] | None
    unsupported: bool

    @classmethod
    def from_proto(cls, message: csi.GetCapacityRequest) -> Self:
        """Read a GetCapacity request; raises BadField for invalid parameters.

        Invalid capabilities are no error: the capacity for them is 0.
        """
        segments = dict(message.accessible_topology.segments)
        requested_segments = segments if message.HasField("accessible_topology") else None
        parameters = Parameters.from_proto(message.parameters)
        try:
            capabilities = Capability.all_from_proto(message.volume_capabilities)
        except errors.BadField:
            return cls((), parameters, requested_segments, unsupported=True)
        return cls(capabilities, parameters, requested_segments, unsupported=False)


@dataclass(frozen=True)
class CreateSnapshot:
    """A checked CreateSnapshot request.

    `size` is the size of the COW store; None for the size that the device class sets.
    """

    name: str
    source_id: str
    size: Reserve | None
    object_tags: Mapping[str, str]
    topology: Topology

    @classmethod
    def from_proto(cls, message: csi.CreateSnapshotRequest) -> Self:
        """Read and check a CreateSnapshot request; raises BadField for an invalid field."""
        _check_name("name", message.name)
        source_id = required(message, "source_volume_id")
        size, object_tags = snapshot_parameters(message.parameters, OF_SNAPSHOT)
        topology = Topology.from_proto(message.accessibility_requirements)
        return cls(message.name, source_id, size, object_tags, topology)


@dataclass(frozen=True)
class CreateGroupSnapshot:
    """A checked CreateVolumeGroupSnapshot request; the ids of the source volumes are sorted."""

    name: str
    source_ids: tuple[str, ...]
    size: Reserve | None
    object_tags: Mapping[str, str]

    @classmethod
    def from_proto(cls, message: csi.CreateVolumeGroupSnapshotRequest) -> Self:
        """Read and check a CreateVolumeGroupSnapshot request; BadField for an invalid field."""
        _check_name("name", message.name)
        field = "source_volume_ids"
        sources = required(message, field)
        for index, source_id in enumerate(sources):
            if not source_id:
                raise errors.Missing(f"{field}[{index}]")
            if source_id in sources[:index]:
                raise errors.BadField(f"{field}[{index}]", f"{source_id!r} is named twice")
        size, object_tags = snapshot_parameters(message.parameters, OF_GROUP_SNAPSHOT)
        return cls(message.name, tuple(sorted(sources)), size, object_tags)


@dataclass(frozen=True)
class KnownGroupSnapshot:
    """A checked GetVolumeGroupSnapshot or DeleteVolumeGroupSnapshot request."""

    id: str
    snapshot_ids: tuple[str, ...]

    @classmethod
    def from_proto(
        cls, message: csi.GetVolumeGroupSnapshotRequest | csi.DeleteVolumeGroupSnapshotRequest
    ) -> Self:
        """Read and check a request about an existing group snapshot; raises Missing."""
        return cls(required(message, "group_snapshot_id"), tuple(message.snapshot_ids))


@dataclass(frozen=True)
class GetMetadata:
    """A checked GetMetadataAllocated or GetMetadataDelta request.

    `base_id` is empty for GetMetadataAllocated.
    """

    base_id: str
    snapshot_id: str
    starting_offset: int
    maximum_results: int

    @classmethod
    def from_proto(
        cls, message: csi.GetMetadataAllocatedRequest | csi.GetMetadataDeltaRequest
    ) -> Self:
        """Read and check a request for allocated or changed blocks.

        Raises BadField and OffsetOutOfRange.
        """
        if isinstance(message, csi.GetMetadataDeltaRequest):
            base_id = required(message, "base_snapshot_id")
            snapshot_id = required(message, "target_snapshot_id")
        else:
            base_id, snapshot_id = "", required(message, "snapshot_id")
        if message.starting_offset < 0:
            raise errors.OffsetOutOfRange(message.starting_offset)
        if message.max_results < 0:
            raise errors.BadField("max_results", "must not be negative")
        return cls(base_id, snapshot_id, message.starting_offset, message.max_results)


@dataclass(frozen=True)
class ListSnapshots:
    """A checked ListSnapshots request; an empty id selects all snapshots."""

    page: Page
    source_id: str
    snapshot_id: str

    @classmethod
    def from_proto(cls, message: csi.ListSnapshotsRequest) -> Self:
        """Read and check a ListSnapshots request; raises BadField, BadToken."""
        return cls(Page.from_proto(message), message.source_volume_id, message.snapshot_id)


# Form of a passphrase's name (secret.GENERATION): a text that a tag can hold.
_GENERATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


# Key in a publish_context, whose value "true" means that the volume is attached read-only.
ATTACHED_READ_ONLY = "carver/readOnly"


def publish_context(*, read_only: bool) -> Mapping[str, str]:
    """The publish_context that ControllerPublishVolume returns; the CO passes it to the Node RPCs.

    The context depends on `read_only` alone, so a repeated call returns the same context.
    """
    return {ATTACHED_READ_ONLY: "true"} if read_only else {}


def _is_attached_read_only(
    message: csi.NodeStageVolumeRequest | csi.NodePublishVolumeRequest,
) -> bool:
    """Whether the publish_context of a request says that the volume is attached read-only.

    Raises NotAllowed for another value than "true" and "false".
    """
    text = message.publish_context.get(ATTACHED_READ_ONLY, "false")
    if text not in {"true", "false"}:
        raise errors.NotAllowed(f"publish_context[{ATTACHED_READ_ONLY}]", text, ("true", "false"))
    return text == "true"


@dataclass(frozen=True)
class AttachVolume:
    """A checked ControllerPublishVolume request."""

    volume_id: str
    node_id: str
    capability: Capability
    read_only: bool

    @classmethod
    def from_proto(cls, message: csi.ControllerPublishVolumeRequest) -> Self:
        """Read and check a ControllerPublishVolume request; BadField for an invalid field."""
        volume_id, node_id = required(message, "volume_id"), required(message, "node_id")
        capability = _capability(message)
        # Check the volume_context before the volume is attached: NodeStageVolume gets the same
        # context, and would refuse an invalid one.
        Parameters.from_context(message.volume_context)
        return cls(volume_id, node_id, capability, message.readonly)


@dataclass(frozen=True)
class DetachVolume:
    """A checked ControllerUnpublishVolume request; an empty `node_id` means any node."""

    volume_id: str
    node_id: str

    @classmethod
    def from_proto(cls, message: csi.ControllerUnpublishVolumeRequest) -> Self:
        """Read and check a ControllerUnpublishVolume request; raises Missing."""
        return cls(required(message, "volume_id"), message.node_id)


@dataclass(frozen=True)
class StageVolume:
    """A checked NodeStageVolume request."""

    volume_id: str
    staging_path: str
    capability: Capability
    parameters: Parameters
    keys: Keys = secret.NONE

    @classmethod
    def from_proto(cls, message: csi.NodeStageVolumeRequest) -> Self:
        """Read and check a NodeStageVolume request; raises BadField.

        The capability of a volume that is attached read-only gets the access mode READER_ONLY.
        """
        volume_id, staging_path = (
            required(message, "volume_id"),
            _path(message, "staging_target_path"),
        )
        capability = _capability(message)
        if _is_attached_read_only(message):
            capability = replace(capability, mode=READER_ONLY)
        return cls(
            volume_id=volume_id,
            staging_path=staging_path,
            capability=capability,
            parameters=Parameters.from_context(message.volume_context),
            keys=keys_of(message.secrets),
        )


@dataclass(frozen=True)
class PublishVolume:
    """A checked NodePublishVolume request for a volume that CreateVolume created."""

    volume_id: str
    staging_path: str
    target_path: str
    capability: Capability
    parameters: Parameters
    read_only: bool
    keys: Keys = secret.NONE

    @classmethod
    def from_proto(cls, message: csi.NodePublishVolumeRequest) -> Self:
        """Read and check a NodePublishVolume request; raises BadField for an invalid field."""
        volume_id = required(message, "volume_id")
        target_path = _path(message, "target_path")
        capability = _capability(message)
        return cls(
            volume_id=volume_id,
            staging_path=_path(message, "staging_target_path"),
            target_path=target_path,
            capability=capability,
            parameters=Parameters.from_context(message.volume_context),
            read_only=message.readonly or capability.read_only or _is_attached_read_only(message),
            keys=keys_of(message.secrets),
        )


@dataclass(frozen=True)
class PublishInline:
    """A checked NodePublishVolume request for an inline volume (CSI ephemeral volume).

    An inline volume exists as long as its pod, and no CreateVolume precedes the request.
    """

    volume_id: str
    target_path: str
    capability: Capability
    parameters: Parameters
    size_bytes: int
    keys: Keys = secret.NONE

    @staticmethod
    def is_inline(wire: csi.NodePublishVolumeRequest) -> bool:
        """Whether the request is for an inline volume, as kubelet marks in the volume_context."""
        marked = wire.volume_context.get(EPHEMERAL, "false")
        if marked not in {"true", "false"}:
            raise errors.NotAllowed(f"volume_context[{EPHEMERAL}]", marked, ("true", "false"))
        return marked == "true"

    @classmethod
    def from_proto(cls, message: csi.NodePublishVolumeRequest) -> Self:
        """Read and check a NodePublishVolume request for an inline volume; raises BadField.

        With `readonly` the capability gets the access mode READER_ONLY.
        """
        _check_name("volume_id", message.volume_id)
        if VolumeId.parse(message.volume_id) is not None:
            raise errors.BadField("volume_id", "is one that CreateVolume gave, not an inline one")
        target_path = _path(message, "target_path")
        capability = _capability(message)
        if capability.is_block:
            raise errors.BadField("volume_capability", "an inline volume is mounted, never block")
        if message.readonly:
            capability = replace(capability, mode=READER_ONLY)
        parameters = Parameters.from_pod(message.volume_context)
        size_bytes = parameters.parsed.get(SIZE, 0)
        keys = keys_of(message.secrets)
        return cls(message.volume_id, target_path, capability, parameters, size_bytes, keys)


@dataclass(frozen=True)
class VolumePath:
    """A checked request with a volume and the path where the volume is staged or published."""

    volume_id: str
    path: str

    @classmethod
    def from_proto(cls, message: Message, field: str) -> Self:
        """Read a request with a volume id and a path in `field`; raises BadField.

        A `volume_path` is not checked to be absolute and normalized.
        """
        path = required(message, field) if field == "volume_path" else _path(message, field)
        return cls(required(message, "volume_id"), path)


@dataclass(frozen=True)
class GetVolumeHealth:
    """A checked NodeGetVolumeHealth request.

    `paths` are the publish path and the staging path of the volume, as far as the caller gave them.
    """

    volume_id: str
    paths: tuple[str, ...] = ()

    @classmethod
    def from_proto(cls, message: csi.NodeGetVolumeHealthRequest) -> Self:
        """Read and check a NodeGetVolumeHealth request; raises BadField. The paths are optional."""
        fields = ("volume_publish_path", "staging_target_path")
        paths = tuple(_path(message, field) for field in fields if getattr(message, field))
        return cls(required(message, "volume_id"), paths)


def keys_of(secrets: Mapping[str, str]) -> Keys:
    """Read the keys of an encrypted volume from a call's secrets; ignore other secrets.

    Raises BadField. Keys with an invalid name are overwritten before the error is raised.
    """
    present_key, previous_key = (
        secret.of_text(f"secrets[{name}]", secrets[name]) if name in secrets else None
        for name in (secret.PASSPHRASE, secret.PREVIOUS_PASSPHRASE)
    )
    keys = Keys(present_key, previous_key, secrets.get(secret.GENERATION, ""))
    try:
        _check_generation(keys)
    except errors.BadField:
        with keys.used():
            raise
    return keys


def _check_generation(sent: Keys) -> None:
    """Raise BadField if the name of a key is unfit for a tag, or equals the key itself."""
    field = f"secrets[{secret.GENERATION}]"
    if sent.generation and not _GENERATION.fullmatch(sent.generation):
        raise errors.BadField(
            field,
            "must be 1 to 63 letters, digits, '.', '_' and '-', and begin with no sign",
        )
    name = sent.generation.encode()
    if any(key is not None and key.data == name for key in (sent.present, sent.previous)):
        raise errors.BadField(field, "is the key itself, and is kept in the clear; give it a name")


def _capability(
    message: csi.ControllerPublishVolumeRequest
    | csi.NodeStageVolumeRequest
    | csi.NodePublishVolumeRequest,
) -> Capability:
    if not message.HasField("volume_capability"):
        raise errors.Missing("volume_capability")
    return Capability.from_proto(message.volume_capability)
