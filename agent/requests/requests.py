"""CSI requests as frozen records, checked when read by `from_proto`; that raises BadField."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Self, TypeVar

from google.protobuf.message import Message

from agent.core import errors
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
from lvm.layout import Reserve
from lvm.tuning import AS_IT_IS, Tuning
from mount import filesystem, target
from mount import mount_errors as mount_errors
from proto import csi_pb2 as csi

BLOCK = "block"
MOUNT = "mount"
_MODES = csi.VolumeCapability.AccessMode.Mode
ACCESS_MODES = (
    "SINGLE_NODE_WRITER",
    "SINGLE_NODE_READER_ONLY",
    "SINGLE_NODE_SINGLE_WRITER",
    "SINGLE_NODE_MULTI_WRITER",
    # ReadOnlyMany. The volume is on one node still: its topology keeps its pods there.
    "MULTI_NODE_READER_ONLY",
)
READER_ONLY = "SINGLE_NODE_READER_ONLY"
_READERS = (READER_ONLY, "MULTI_NODE_READER_ONLY")
# The modes in which several targets share a volume (CSI spec, NodePublishVolume).
_SHARED = ("SINGLE_NODE_MULTI_WRITER", "MULTI_NODE_READER_ONLY")


@dataclass(frozen=True)
class Capability:
    """A volume capability. `fs_type` is empty if the caller named none."""

    access: str
    mode: str
    fs_type: str = ""
    mount_flags: tuple[str, ...] = ()

    @classmethod
    def from_proto(cls, wire: csi.VolumeCapability, field: str = "volume_capability") -> Self:
        """Read and check a capability; raises BadField."""
        mode = _mode(wire, field)
        access = wire.WhichOneof("access_type")
        if access is None:
            raise errors.BadField(f"{field}.access_type", "block or mount is required")
        if access == BLOCK:
            return cls(BLOCK, mode)
        if wire.mount.fs_type and wire.mount.fs_type not in filesystem.FILE_SYSTEMS:
            raise errors.NotAllowed(
                f"{field}.mount.fs_type", wire.mount.fs_type, filesystem.FILE_SYSTEMS
            )
        if wire.mount.volume_mount_group:
            raise errors.BadField(f"{field}.mount.volume_mount_group", "is not supported")
        flags = tuple(wire.mount.mount_flags)
        check_mount_options(f"{field}.mount.mount_flags", flags)
        return cls(MOUNT, mode, wire.mount.fs_type, flags)

    @classmethod
    def several(cls, wire: Sequence[csi.VolumeCapability]) -> tuple[Self, ...]:
        """Read and check the field `volume_capabilities`."""
        return tuple(
            cls.from_proto(one, f"volume_capabilities[{index}]") for index, one in enumerate(wire)
        )

    def check_for(self, fs_type: str, field: str) -> None:
        """Check the mount flags against the one file system that they are for."""
        check_mount_options(f"{field}.mount.mount_flags", self.mount_flags, fs_type)

    @property
    def is_block(self) -> bool:
        """Whether the volume is used as a raw block device."""
        return self.access == BLOCK

    @property
    def read_only(self) -> bool:
        """Whether the access mode allows no writer."""
        return self.mode in _READERS

    @property
    def is_shared(self) -> bool:
        """Whether the access mode allows several targets at once."""
        return self.mode in _SHARED

    def __str__(self) -> str:
        return ":".join((self.access, self.mode, self.fs_type, ",".join(self.mount_flags)))


def _mode(wire: csi.VolumeCapability, field: str) -> str:
    number = wire.access_mode.mode
    if number == _MODES.UNKNOWN:
        raise errors.Missing(f"{field}.access_mode.mode")
    name = _MODES.Name(number) if number in _MODES.values() else str(number)
    if name not in ACCESS_MODES:
        raise errors.NotAllowed(f"{field}.access_mode.mode", name, ACCESS_MODES)
    return name


# CSI spec, "Size Limits" and CreateVolumeRequest.name.
_MAXIMUM_STRING_BYTES = 128
_NOT_IN_A_NAME = re.compile("[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f]")


def required(wire: Message, field: str) -> Any:
    """The value of a request's field; raises Missing for an empty one."""
    if not (value := getattr(wire, field)):
        raise errors.Missing(field)
    return value


def _check_name(field: str, text: str) -> None:
    if not text:
        raise errors.Missing(field)
    if len(text.encode()) > _MAXIMUM_STRING_BYTES:
        raise errors.BadField(field, f"is longer than {_MAXIMUM_STRING_BYTES} bytes")
    if _NOT_IN_A_NAME.search(text):
        raise errors.BadField(field, f"{text!r} has a control character")


def _path(wire: Message, field: str) -> str:
    """The path in a field; raises BadField for one that is not absolute and normalized."""
    try:
        return target.check(required(wire, field))
    except mount_errors.BadPath as error:
        raise errors.BadField(field, str(error)) from None


T = TypeVar("T")

# gRPC in Go accepts messages of 4 MiB by default. A caller without a limit may be answered with
# fewer entries and a token (CSI spec).
MOST_ENTRIES = 2000
MOST_BYTES = 2 << 20


@dataclass(frozen=True)
class Page:
    """A page of a list; 0 entries for as many as fit into one message."""

    maximum_entries: int
    starting_token: str

    @classmethod
    def from_proto(
        cls,
        wire: csi.ListVolumesRequest
        | csi.ListSnapshotsRequest
        | csi.ControllerListVolumeHealthRequest,
    ) -> Self:
        """Read and check the request."""
        if wire.max_entries < 0:
            raise errors.BadField("max_entries", "must not be negative")
        # A token is the id that a page begins at (`part`).
        if wire.starting_token and VolumeId.parse(wire.starting_token) is None:
            raise errors.BadToken(wire.starting_token)
        return cls(wire.max_entries, wire.starting_token)


@dataclass(frozen=True)
class Part(Generic[T]):
    """A page's entries, and the token of the next page; empty at the end."""

    entries: tuple[T, ...]
    next_token: str


def part(found: Mapping[str, T], page: Page) -> Part[T]:
    """A page of entries in the order of their ids.

    The token is the first id of the next page, so it stays valid if volumes come and go.
    """
    rest = [(key, found[key]) for key in sorted(found) if key >= page.starting_token]
    return first(rest, page)


def first(
    rest: Iterable[tuple[str, T]], page: Page, weigh_bytes: Callable[[T], int] = lambda _: 0
) -> Part[T]:
    """A page of sorted entries that begin at the token; consumes one entry more than it returns.

    `weigh_bytes` estimates an entry's size in the message.
    """
    most = min(page.maximum_entries or MOST_ENTRIES, MOST_ENTRIES)
    entries: list[T] = []
    size_bytes = 0
    for key, one in rest:
        size_bytes += weigh_bytes(one)
        if len(entries) == most or (entries and size_bytes > MOST_BYTES):
            return Part(tuple(entries), key)
        entries.append(one)
    return Part(tuple(entries), "")


SNAPSHOT = "snapshot"
VOLUME = "volume"


@dataclass(frozen=True)
class SizeRange:
    """The size of a volume; 0 for no bound."""

    required_bytes: int = 0
    limit_bytes: int = 0

    def allows(self, size_bytes: int) -> bool:
        """Whether a size is within the range."""
        return self.required_bytes <= size_bytes <= (self.limit_bytes or size_bytes)

    @classmethod
    def from_proto(cls, wire: csi.CapacityRange, field: str = "capacity_range") -> Self:
        """Read and check a range."""
        for name in ("required_bytes", "limit_bytes"):
            if getattr(wire, name) < 0:
                raise errors.BadField(f"{field}.{name}", "must not be negative")
        if wire.limit_bytes and wire.required_bytes > wire.limit_bytes:
            raise errors.BadField(
                f"{field}.limit_bytes",
                f"{wire.limit_bytes} is less than required_bytes, {wire.required_bytes}",
            )
        return cls(wire.required_bytes, wire.limit_bytes)


@dataclass(frozen=True)
class Topology:
    """Where a volume may or should be: topologies as maps of segments."""

    requisite: tuple[Mapping[str, str], ...] = ()
    preferred: tuple[Mapping[str, str], ...] = ()

    @classmethod
    def from_proto(cls, wire: csi.TopologyRequirement) -> Self:
        """Read the requirement."""
        return cls(
            tuple(dict(one.segments) for one in wire.requisite),
            tuple(dict(one.segments) for one in wire.preferred),
        )

    def includes(self, here: Mapping[str, str]) -> bool:
        """Whether a node with these segments is allowed; any is without a requirement."""
        places = self.requisite or self.preferred
        return not places or any(one.items() <= here.items() for one in places)


@dataclass(frozen=True)
class Source:
    """The source of a new volume: a snapshot or a volume, by its id."""

    kind: str
    id: str

    @classmethod
    def from_proto(cls, wire: csi.CreateVolumeRequest) -> Self | None:
        """Read and check a request's source, if it has one."""
        field = "volume_content_source"
        if not wire.HasField("volume_content_source"):
            return None
        kind = wire.volume_content_source.WhichOneof("type")
        if kind is None:
            raise errors.BadField(f"{field}.type", "snapshot or volume is required")
        identity = getattr(getattr(wire.volume_content_source, kind), f"{kind}_id")
        if not identity:
            raise errors.Missing(f"{field}.{kind}.{kind}_id")
        return cls(kind, identity)


@dataclass(frozen=True)
class CreateVolume:
    """CreateVolume."""

    name: str
    size: SizeRange
    capabilities: tuple[Capability, ...]
    parameters: Parameters
    topology: Topology
    # None for an empty volume.
    source: Source | None = None
    tuning: Tuning = AS_IT_IS
    # An inline volume; its name is the CO's id.
    is_ephemeral: bool = False

    @classmethod
    def from_proto(cls, wire: csi.CreateVolumeRequest) -> Self:
        """Read and check the request; a volume that is never written to needs a source."""
        _check_name("name", wire.name)
        parameters = Parameters.from_proto(wire.parameters)
        capabilities = Capability.several(required(wire, "volume_capabilities"))
        source = Source.from_proto(wire)
        if source is None and all(one.read_only for one in capabilities):
            raise errors.BadField(
                "volume_capabilities",
                f"{capabilities[0].mode} alone leaves a new volume empty for ever; give the claim a"
                " dataSource (volume_content_source), or an access mode that writes, such as"
                " ReadWriteOnce",
            )
        return cls(
            name=wire.name,
            capabilities=capabilities,
            size=SizeRange.from_proto(wire.capacity_range),
            parameters=parameters,
            topology=Topology.from_proto(wire.accessibility_requirements),
            source=source,
            # What a VolumeAttributesClass says goes before what the StorageClass does.
            tuning=tuning_of(wire.mutable_parameters).over(parameters.tuning),
        )


@dataclass(frozen=True)
class ValidateVolume:
    """ValidateVolumeCapabilities. `unsupported` says what is wrong with the request."""

    volume_id: str
    capabilities: tuple[Capability, ...]
    unsupported: str
    tuning: Tuning = AS_IT_IS
    # Empty if not given.
    context: Mapping[str, str] = field(default_factory=dict)
    parameters: Parameters = field(default_factory=Parameters)

    @classmethod
    def from_proto(cls, wire: csi.ValidateVolumeCapabilitiesRequest) -> Self:
        """Read the request."""
        volume_id = required(wire, "volume_id")
        asked = required(wire, "volume_capabilities")
        try:
            capabilities = Capability.several(asked)
            parameters = Parameters.from_proto(wire.parameters)
            context = Parameters.from_context(wire.volume_context, newer=False).context()
            tuning = tuning_of(wire.mutable_parameters).over(parameters.tuning)
        except errors.BadField as error:
            return cls(volume_id, (), str(error))
        return cls(volume_id, capabilities, "", tuning, context, parameters)


@dataclass(frozen=True)
class ModifyVolume:
    """ControllerModifyVolume."""

    volume_id: str
    tuning: Tuning

    @classmethod
    def from_proto(cls, wire: csi.ControllerModifyVolumeRequest) -> Self:
        """Read and check the request."""
        volume_id = required(wire, "volume_id")
        return cls(volume_id, tuning_of(required(wire, MUTABLE_FIELD)))


@dataclass(frozen=True)
class ExpandVolume:
    """ControllerExpandVolume and NodeExpandVolume; `read_only` for a reader's access mode."""

    volume_id: str
    size: SizeRange
    read_only: bool = False

    @classmethod
    def from_proto(
        cls, wire: csi.ControllerExpandVolumeRequest | csi.NodeExpandVolumeRequest
    ) -> Self:
        """Read and check the request."""
        volume_id = required(wire, "volume_id")
        read_only = (
            wire.HasField("volume_capability")
            and Capability.from_proto(wire.volume_capability).read_only
        )
        size = SizeRange.from_proto(wire.capacity_range)
        if isinstance(wire, csi.ControllerExpandVolumeRequest) and size == SizeRange():
            raise errors.Missing("capacity_range")
        return cls(volume_id, size, read_only)


@dataclass(frozen=True)
class GetCapacity:
    """GetCapacity."""

    capabilities: tuple[Capability, ...]
    parameters: Parameters
    segments: Mapping[str, str] | None
    unsupported: bool

    @classmethod
    def from_proto(cls, wire: csi.GetCapacityRequest) -> Self:
        """Read the request; for unsupported capabilities the capacity is 0."""
        segments = dict(wire.accessible_topology.segments)
        where = segments if wire.HasField("accessible_topology") else None
        parameters = Parameters.from_proto(wire.parameters)
        try:
            capabilities = Capability.several(wire.volume_capabilities)
        except errors.BadField:
            return cls((), parameters, where, unsupported=True)
        return cls(capabilities, parameters, where, unsupported=False)


@dataclass(frozen=True)
class CreateSnapshot:
    """CreateSnapshot. `size` is the COW store's; None for the class's."""

    name: str
    source_id: str
    size: Reserve | None
    about: Mapping[str, str]
    topology: Topology

    @classmethod
    def from_proto(cls, wire: csi.CreateSnapshotRequest) -> Self:
        """Read and check the request."""
        _check_name("name", wire.name)
        source_id = required(wire, "source_volume_id")
        size, about = snapshot_parameters(wire.parameters, OF_SNAPSHOT)
        topology = Topology.from_proto(wire.accessibility_requirements)
        return cls(wire.name, source_id, size, about, topology)


@dataclass(frozen=True)
class CreateGroupSnapshot:
    """CreateVolumeGroupSnapshot; the source ids are sorted."""

    name: str
    source_ids: tuple[str, ...]
    size: Reserve | None
    about: Mapping[str, str]

    @classmethod
    def from_proto(cls, wire: csi.CreateVolumeGroupSnapshotRequest) -> Self:
        """Read and check the request."""
        _check_name("name", wire.name)
        field = "source_volume_ids"
        sources = required(wire, field)
        for index, one in enumerate(sources):
            if not one:
                raise errors.Missing(f"{field}[{index}]")
            if one in sources[:index]:
                raise errors.BadField(f"{field}[{index}]", f"{one!r} is named twice")
        size, about = snapshot_parameters(wire.parameters, OF_GROUP_SNAPSHOT)
        return cls(wire.name, tuple(sorted(sources)), size, about)


@dataclass(frozen=True)
class KnownGroupSnapshot:
    """GetVolumeGroupSnapshot and DeleteVolumeGroupSnapshot."""

    id: str
    snapshot_ids: tuple[str, ...]

    @classmethod
    def from_proto(
        cls, wire: csi.GetVolumeGroupSnapshotRequest | csi.DeleteVolumeGroupSnapshotRequest
    ) -> Self:
        """Read and check the request."""
        return cls(required(wire, "group_snapshot_id"), tuple(wire.snapshot_ids))


@dataclass(frozen=True)
class GetMetadata:
    """GetMetadataAllocated, for which `base_id` is empty, and GetMetadataDelta."""

    base_id: str
    snapshot_id: str
    starting_offset: int
    maximum_results: int

    @classmethod
    def from_proto(
        cls, wire: csi.GetMetadataAllocatedRequest | csi.GetMetadataDeltaRequest
    ) -> Self:
        """Read and check the request."""
        if isinstance(wire, csi.GetMetadataDeltaRequest):
            base_id = required(wire, "base_snapshot_id")
            snapshot_id = required(wire, "target_snapshot_id")
        else:
            base_id, snapshot_id = "", required(wire, "snapshot_id")
        if wire.starting_offset < 0:
            raise errors.NotBeyond(wire.starting_offset)
        if wire.max_results < 0:
            raise errors.BadField("max_results", "must not be negative")
        return cls(base_id, snapshot_id, wire.starting_offset, wire.max_results)


@dataclass(frozen=True)
class ListSnapshots:
    """ListSnapshots; empty ids select all."""

    page: Page
    source_id: str
    snapshot_id: str

    @classmethod
    def from_proto(cls, wire: csi.ListSnapshotsRequest) -> Self:
        """Read and check the request."""
        return cls(Page.from_proto(wire), wire.source_volume_id, wire.snapshot_id)


_GENERATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


# The key of a publish context: the volume was attached for reading only.
ATTACHED_READ_ONLY = "carver/readOnly"


def publish_context(*, read_only: bool) -> Mapping[str, str]:
    """What ControllerPublishVolume has the CO pass on to stage and publish: always the same."""
    return {ATTACHED_READ_ONLY: "true"} if read_only else {}


def _is_attached_read_only(
    wire: csi.NodeStageVolumeRequest | csi.NodePublishVolumeRequest,
) -> bool:
    """Whether a publish context says that the volume was attached for reading only."""
    text = wire.publish_context.get(ATTACHED_READ_ONLY, "false")
    if text not in {"true", "false"}:
        raise errors.NotAllowed(f"publish_context[{ATTACHED_READ_ONLY}]", text, ("true", "false"))
    return text == "true"


@dataclass(frozen=True)
class AttachVolume:
    """ControllerPublishVolume."""

    volume_id: str
    node_id: str
    capability: Capability
    read_only: bool

    @classmethod
    def from_proto(cls, wire: csi.ControllerPublishVolumeRequest) -> Self:
        """Read and check the request."""
        volume_id, node_id = required(wire, "volume_id"), required(wire, "node_id")
        capability = _capability(wire)
        # NodeStageVolume gets the same context, and would refuse it only then.
        Parameters.from_context(wire.volume_context)
        return cls(volume_id, node_id, capability, wire.readonly)


@dataclass(frozen=True)
class DetachVolume:
    """ControllerUnpublishVolume; an empty `node_id` is any node."""

    volume_id: str
    node_id: str

    @classmethod
    def from_proto(cls, wire: csi.ControllerUnpublishVolumeRequest) -> Self:
        """Read and check the request."""
        return cls(required(wire, "volume_id"), wire.node_id)


@dataclass(frozen=True)
class StageVolume:
    """NodeStageVolume."""

    volume_id: str
    staging_path: str
    capability: Capability
    parameters: Parameters
    keys: Keys = secret.NONE

    @classmethod
    def from_proto(cls, wire: csi.NodeStageVolumeRequest) -> Self:
        """Read and check the request; an attachment for reading becomes the mode READER_ONLY."""
        volume_id, staging_path = required(wire, "volume_id"), _path(wire, "staging_target_path")
        capability = _capability(wire)
        if _is_attached_read_only(wire):
            capability = replace(capability, mode=READER_ONLY)
        return cls(
            volume_id=volume_id,
            staging_path=staging_path,
            capability=capability,
            parameters=Parameters.from_context(wire.volume_context),
            keys=keys_of(wire.secrets),
        )


@dataclass(frozen=True)
class PublishVolume:
    """NodePublishVolume."""

    volume_id: str
    staging_path: str
    target_path: str
    capability: Capability
    parameters: Parameters
    read_only: bool
    keys: Keys = secret.NONE

    @classmethod
    def from_proto(cls, wire: csi.NodePublishVolumeRequest) -> Self:
        """Read and check the request."""
        volume_id = required(wire, "volume_id")
        target_path = _path(wire, "target_path")
        capability = _capability(wire)
        return cls(
            volume_id=volume_id,
            staging_path=_path(wire, "staging_target_path"),
            target_path=target_path,
            capability=capability,
            parameters=Parameters.from_context(wire.volume_context),
            read_only=wire.readonly or capability.read_only or _is_attached_read_only(wire),
            keys=keys_of(wire.secrets),
        )


@dataclass(frozen=True)
class PublishInline:
    """NodePublishVolume of an inline volume: it lives as long as its pod, without CreateVolume."""

    volume_id: str
    target_path: str
    capability: Capability
    parameters: Parameters
    size_bytes: int
    keys: Keys = secret.NONE

    @staticmethod
    def is_meant(wire: csi.NodePublishVolumeRequest) -> bool:
        """Whether kubelet marks the volume as inline."""
        marked = wire.volume_context.get(EPHEMERAL, "false")
        if marked not in {"true", "false"}:
            raise errors.NotAllowed(f"volume_context[{EPHEMERAL}]", marked, ("true", "false"))
        return marked == "true"

    @classmethod
    def from_proto(cls, wire: csi.NodePublishVolumeRequest) -> Self:
        """Read and check the request; `readonly` becomes the access mode READER_ONLY."""
        _check_name("volume_id", wire.volume_id)
        if VolumeId.parse(wire.volume_id) is not None:
            raise errors.BadField("volume_id", "is one that CreateVolume gave, not an inline one")
        target_path = _path(wire, "target_path")
        capability = _capability(wire)
        if capability.is_block:
            raise errors.BadField("volume_capability", "an inline volume is mounted, never block")
        if wire.readonly:
            capability = replace(capability, mode=READER_ONLY)
        parameters = Parameters.from_pod(wire.volume_context)
        size_bytes = parameters.given.get(SIZE, 0)
        own = keys_of(wire.secrets)
        return cls(wire.volume_id, target_path, capability, parameters, size_bytes, own)


@dataclass(frozen=True)
class VolumeAt:
    """A volume and the path where it is staged or published."""

    volume_id: str
    path: str

    @classmethod
    def from_proto(cls, wire: Message, field: str) -> Self:
        """Read a request with a path in `field`; only a `volume_path` may be invalid."""
        path = required(wire, field) if field == "volume_path" else _path(wire, field)
        return cls(required(wire, "volume_id"), path)


@dataclass(frozen=True)
class HealthAt:
    """NodeGetVolumeHealth, with the paths of the volume's stage and publication, if given."""

    volume_id: str
    paths: tuple[str, ...] = ()

    @classmethod
    def from_proto(cls, wire: csi.NodeGetVolumeHealthRequest) -> Self:
        """Read and check the request; both paths are optional."""
        named = ("volume_publish_path", "staging_target_path")
        paths = tuple(_path(wire, field) for field in named if getattr(wire, field))
        return cls(required(wire, "volume_id"), paths)


def keys_of(secrets: Mapping[str, str]) -> Keys:
    """Read the keys of a call; raises BadField. Other secrets are ignored."""
    present, previous = (
        secret.of_text(f"secrets[{name}]", secrets[name]) if name in secrets else None
        for name in (secret.PASSPHRASE, secret.PREVIOUS_PASSPHRASE)
    )
    made = Keys(present, previous, secrets.get(secret.GENERATION, ""))
    try:
        _check_generation(made)
    except errors.BadField:
        with made.used():
            raise
    return made


def _check_generation(sent: Keys) -> None:
    """Raise BadField for a key's name that does not fit a tag, or is the key itself."""
    field = f"secrets[{secret.GENERATION}]"
    if sent.generation and not _GENERATION.fullmatch(sent.generation):
        raise errors.BadField(
            field,
            "must be 1 to 63 letters, digits, '.', '_' and '-', and begin with no sign",
        )
    name = sent.generation.encode()
    if any(one is not None and one.data == name for one in (sent.present, sent.previous)):
        raise errors.BadField(field, "is the key itself, and is kept in the clear; give it a name")


def _capability(
    wire: csi.ControllerPublishVolumeRequest
    | csi.NodeStageVolumeRequest
    | csi.NodePublishVolumeRequest,
) -> Capability:
    if not wire.HasField("volume_capability"):
        raise errors.Missing("volume_capability")
    return Capability.from_proto(wire.volume_capability)
