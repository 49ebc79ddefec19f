"""Requests as frozen records: read from the wire and checked once, before anything is done.

Policy takes these records and never sees a protobuf message.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

from agent import errors
from agent.config import settings
from agent.ids import VolumeId
from lvm import tags
from lvm.layout import Reserve
from lvm.tuning import AS_IT_IS, Tuning
from mount import errors as mount_errors
from mount import filesystem, options, target
from proto import csi_pb2 as csi

Number = TypeVar("Number")

PARAMETER_PREFIX = "carver/"
PARAMETERS = ("class", "fsType", "mkfsOptions", "mountOptions")
# What they may override of their class's layout: the field, and how it is read.
LAYOUT_PARAMETERS: Mapping[str, tuple[str, Callable[[str], int]]] = {
    "stripes": ("stripes", settings.parse_count),
    "stripeSize": ("stripe_size_bytes", settings.parse_size),
    "mirrors": ("mirrors", settings.parse_count),
}
CACHE_SIZE = "cacheSize"
STORAGE_CLASS_PARAMETERS = (*PARAMETERS, *LAYOUT_PARAMETERS, CACHE_SIZE)
# What a VolumeAttributesClass may say: the field of a Tuning, and how it is read.
MUTABLE = "mutable_parameters"
MUTABLE_PARAMETERS: Mapping[str, tuple[str, Callable[[str], object]]] = {
    "readAhead": ("read_ahead_bytes", settings.parse_read_ahead),
    "minimumRecoveryRate": ("minimum_recovery_kib", settings.parse_rate),
    "maximumRecoveryRate": ("maximum_recovery_kib", settings.parse_rate),
}
# What a pod may say of an inline volume: as a StorageClass may, and how large it is.
SIZE = "size"
INLINE_PARAMETERS = (*STORAGE_CLASS_PARAMETERS, SIZE)
EPHEMERAL = "csi.storage.k8s.io/ephemeral"
# What a VolumeSnapshotClass may say.
SNAPSHOT_PARAMETERS = (SIZE,)
BLOCK = "block"
MOUNT = "mount"
SNAPSHOT = "snapshot"
VOLUME = "volume"

# CSI spec, "Size Limits" and CreateVolumeRequest.name.
_MAXIMUM_STRING_BYTES = 128
_MAXIMUM_MAP_BYTES = 4096
_NOT_IN_A_NAME = re.compile("[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f]")

_MODES = csi.VolumeCapability.AccessMode.Mode
ACCESS_MODES = (
    "SINGLE_NODE_WRITER",
    "SINGLE_NODE_READER_ONLY",
    "SINGLE_NODE_SINGLE_WRITER",
    "SINGLE_NODE_MULTI_WRITER",
)
READER_ONLY = "SINGLE_NODE_READER_ONLY"
MULTI_WRITER = "SINGLE_NODE_MULTI_WRITER"

# Kubernetes' own keys. Sidecars strip them from some calls (CreateVolume) and leave them in others
# (GetCapacity, pkg/capacity of external-provisioner); kubelet adds some. They are never refused.
_KUBERNETES_PREFIX = "csi.storage.k8s.io/"
# Those that say the file system. The second has no prefix, is deprecated, and still understood by
# external-provisioner.
_FS_TYPE = (f"{_KUBERNETES_PREFIX}fstype", "fstype")
# What the external-provisioner adds with --extra-create-metadata. Kept as tags, for people.
_ABOUT = {
    "csi.storage.k8s.io/pvc/name": "pvc",
    "csi.storage.k8s.io/pvc/namespace": "namespace",
    "csi.storage.k8s.io/pv/name": "pv",
}
# What kubelet adds where the CSIDriver has podInfoOnMount.
_POD = {
    "csi.storage.k8s.io/pod.name": "pod",
    "csi.storage.k8s.io/pod.namespace": "namespace",
    "csi.storage.k8s.io/pod.uid": "podUid",
    "csi.storage.k8s.io/serviceAccount.name": "serviceAccount",
}
# What the external-snapshotter adds, also with --extra-create-metadata.
_ABOUT_SNAPSHOT = {
    "csi.storage.k8s.io/volumesnapshot/name": "snapshot",
    "csi.storage.k8s.io/volumesnapshot/namespace": "namespace",
    "csi.storage.k8s.io/volumesnapshotcontent/name": "content",
}
_ABOUT_GROUP_SNAPSHOT = {
    "csi.storage.k8s.io/volumegroupsnapshot/name": "groupSnapshotName",
    "csi.storage.k8s.io/volumegroupsnapshot/namespace": "namespace",
    "csi.storage.k8s.io/volumegroupsnapshotcontent/name": "content",
}


@dataclass(frozen=True)
class SizeRange:
    """How large a volume shall be; 0 sets no bound."""

    required_bytes: int = 0
    limit_bytes: int = 0

    def allows(self, size_bytes: int) -> bool:
        """Whether a volume of that size is one of these."""
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
class Capability:
    """How a volume is used: as a block device, or mounted with a file system."""

    access: str
    mode: str
    fs_type: str = ""
    mount_flags: tuple[str, ...] = ()

    @classmethod
    def from_proto(cls, wire: csi.VolumeCapability, field: str = "volume_capability") -> Self:
        """Read and check a capability; its fs_type is empty where the caller has no wish."""
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
        _check_mount_options(f"{field}.mount.mount_flags", flags)
        return cls(MOUNT, mode, wire.mount.fs_type, flags)

    def check_for(self, fs_type: str, field: str) -> None:
        """Check the mount flags against the one file system that they are for."""
        _check_mount_options(f"{field}.mount.mount_flags", self.mount_flags, fs_type)

    @property
    def is_block(self) -> bool:
        """Whether the volume is used as a raw block device."""
        return self.access == BLOCK

    @property
    def read_only(self) -> bool:
        """Whether the access mode allows no writer."""
        return self.mode == READER_ONLY

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


@dataclass(frozen=True)
class Parameters:
    """What a StorageClass may say, with or without the prefix `carver/`."""

    device_class: str = ""
    fs_type: str = ""
    mkfs_options: tuple[str, ...] = ()
    mount_options: tuple[str, ...] = ()
    about: Mapping[str, str] | None = None
    # Fields of lvm.layout.Layout that are not to be the class's.
    layout: Mapping[str, int] = field(default_factory=dict)
    cache_size: Reserve | None = None

    @classmethod
    def from_proto(cls, wire: Mapping[str, str], field: str = "parameters") -> Self:
        """Read and check a StorageClass's parameters: each must be known."""
        found, about = _of_volume(wire, field, STORAGE_CLASS_PARAMETERS, _ABOUT)
        return cls._read(found, field, about)

    @classmethod
    def from_pod(cls, wire: Mapping[str, str]) -> tuple[Self, str]:
        """Read an inline volume's attributes and its size, among what kubelet tells of the pod."""
        field = "volume_context"
        found, about = _of_volume(wire, field, INLINE_PARAMETERS, _POD)
        size = found.pop(SIZE, "")
        return cls._read(found, field, about), size

    @classmethod
    def from_context(cls, wire: Mapping[str, str]) -> Self:
        """Read a volume_context: what `context` made, among keys that other programs added."""
        own = {
            key.removeprefix(PARAMETER_PREFIX): value
            for key, value in wire.items()
            if key.startswith(PARAMETER_PREFIX)
        }
        for key in own:
            if key not in PARAMETERS:
                raise errors.NotAllowed("volume_context", PARAMETER_PREFIX + key, PARAMETERS)
        return cls._read(own, "volume_context", {})

    @classmethod
    def _read(cls, found: Mapping[str, str], field: str, about: Mapping[str, str]) -> Self:
        for key, value in (*found.items(), *about.items()):
            _check_fits(field, key, value)
        fs_type = found.get("fsType", "")
        if fs_type and fs_type not in filesystem.FILE_SYSTEMS:
            raise errors.NotAllowed(f"{field}[fsType]", fs_type, filesystem.FILE_SYSTEMS)
        mount_options = tuple(filter(None, found.get("mountOptions", "").split(",")))
        _check_mount_options(f"{field}[mountOptions]", mount_options)
        layout = {
            one: _number(f"{field}[{key}]", found[key], read)
            for key, (one, read) in LAYOUT_PARAMETERS.items()
            if key in found
        }
        cache_size = None
        if CACHE_SIZE in found:
            cache_size = _number(f"{field}[{CACHE_SIZE}]", found[CACHE_SIZE], settings.parse_part)
        return cls(
            device_class=found.get("class", ""),
            fs_type=fs_type,
            mkfs_options=tuple(found.get("mkfsOptions", "").split()),
            mount_options=mount_options,
            about=about,
            layout=layout,
            cache_size=cache_size,
        )

    def check_for(self, fs_type: str, field: str) -> None:
        """Check the options against the one file system that they are for."""
        try:
            filesystem.check_options(fs_type, self.mkfs_options)
        except mount_errors.BadOption as error:
            raise errors.BadField(f"{field}[mkfsOptions]", str(error)) from None
        _check_mount_options(f"{field}[mountOptions]", self.mount_options, fs_type)

    def context(self) -> dict[str, str]:
        """The volume_context that carries what staging needs."""
        values = {
            "class": self.device_class,
            "fsType": self.fs_type,
            "mkfsOptions": " ".join(self.mkfs_options),
            "mountOptions": ",".join(self.mount_options),
        }
        return {PARAMETER_PREFIX + key: value for key, value in values.items() if value}


@dataclass(frozen=True)
class Topology:
    """Where a volume may be, or should be: one map of segments for each place."""

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
        """Whether a node whose segments are `here` is asked for; any is where nothing is said."""
        places = self.requisite or self.preferred
        return not places or any(
            all(here.get(key) == value for key, value in one.items()) for one in places
        )


@dataclass(frozen=True)
class Source:
    """A snapshot's id, or a volume's, of which a volume is made."""

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
class Create:
    """CreateVolume."""

    name: str
    size: SizeRange
    capabilities: tuple[Capability, ...]
    parameters: Parameters
    topology: Topology
    # What it is made of; None for an empty volume.
    source: Source | None = None
    tuning: Tuning = AS_IT_IS
    # An inline volume, which has the CO's id for a name.
    is_ephemeral: bool = False

    @classmethod
    def from_proto(cls, wire: csi.CreateVolumeRequest) -> Self:
        """Read and check the request."""
        _check_name("name", wire.name)
        if not wire.volume_capabilities:
            raise errors.Missing("volume_capabilities")
        return cls(
            name=wire.name,
            size=SizeRange.from_proto(wire.capacity_range),
            capabilities=_capabilities(wire.volume_capabilities),
            parameters=Parameters.from_proto(wire.parameters),
            topology=Topology.from_proto(wire.accessibility_requirements),
            source=Source.from_proto(wire),
            tuning=_tuning(wire.mutable_parameters),
        )


@dataclass(frozen=True)
class Validate:
    """ValidateVolumeCapabilities."""

    volume_id: str
    capabilities: tuple[Capability, ...]
    unsupported: str
    tuning: Tuning = AS_IT_IS
    # Nothing where they are not given.
    context: Mapping[str, str] = field(default_factory=dict)
    parameters: Parameters = Parameters()

    @classmethod
    def from_proto(cls, wire: csi.ValidateVolumeCapabilitiesRequest) -> Self:
        """Read the request: what is asked for and well-formed, or why it cannot be had."""
        volume_id = _volume_id(wire.volume_id)
        if not wire.volume_capabilities:
            raise errors.Missing("volume_capabilities")
        try:
            capabilities = _capabilities(wire.volume_capabilities)
            parameters = Parameters.from_proto(wire.parameters)
            context = Parameters.from_context(wire.volume_context).context()
            tuning = _tuning(wire.mutable_parameters)
        except errors.BadField as error:
            return cls(volume_id, (), str(error))
        return cls(volume_id, capabilities, "", tuning, context, parameters)


@dataclass(frozen=True)
class Modify:
    """ControllerModifyVolume."""

    volume_id: str
    tuning: Tuning

    @classmethod
    def from_proto(cls, wire: csi.ControllerModifyVolumeRequest) -> Self:
        """Read and check the request."""
        volume_id = _volume_id(wire.volume_id)
        if not wire.mutable_parameters:
            raise errors.Missing(MUTABLE)
        return cls(volume_id, _tuning(wire.mutable_parameters))


@dataclass(frozen=True)
class Expand:
    """ControllerExpandVolume, and what it shares with NodeExpandVolume."""

    volume_id: str
    size: SizeRange

    @classmethod
    def from_proto(
        cls, wire: csi.ControllerExpandVolumeRequest | csi.NodeExpandVolumeRequest
    ) -> Self:
        """Read and check the request."""
        volume_id = _volume_id(wire.volume_id)
        if wire.HasField("volume_capability"):
            Capability.from_proto(wire.volume_capability)
        size = SizeRange.from_proto(wire.capacity_range)
        if isinstance(wire, csi.ControllerExpandVolumeRequest) and size == SizeRange():
            raise errors.Missing("capacity_range")
        return cls(volume_id, size)


@dataclass(frozen=True)
class Capacity:
    """GetCapacity."""

    capabilities: tuple[Capability, ...]
    parameters: Parameters
    segments: Mapping[str, str] | None
    unsupported: bool

    @classmethod
    def from_proto(cls, wire: csi.GetCapacityRequest) -> Self:
        """Read the request. Nothing fits a capability that is not supported."""
        segments = dict(wire.accessible_topology.segments)
        where = segments if wire.HasField("accessible_topology") else None
        parameters = Parameters.from_proto(wire.parameters)
        try:
            capabilities = _capabilities(wire.volume_capabilities)
        except errors.BadField:
            return cls((), parameters, where, unsupported=True)
        return cls(capabilities, parameters, where, unsupported=False)


@dataclass(frozen=True)
class Page:
    """Which part of a list; 0 entries sets no bound."""

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
        return cls(wire.max_entries, wire.starting_token)


@dataclass(frozen=True)
class CreateSnapshot:
    """CreateSnapshot. `size` is what its area for old data gets, None: as its class says."""

    name: str
    source_id: str
    size: Reserve | None
    about: Mapping[str, str]
    topology: Topology = Topology()

    @classmethod
    def from_proto(cls, wire: csi.CreateSnapshotRequest) -> Self:
        """Read and check the request."""
        _check_name("name", wire.name)
        if not wire.source_volume_id:
            raise errors.Missing("source_volume_id")
        size, about = _of_snapshot(wire.parameters, _ABOUT_SNAPSHOT)
        topology = Topology.from_proto(wire.accessibility_requirements)
        return cls(wire.name, wire.source_volume_id, size, about, topology)


@dataclass(frozen=True)
class CreateGroupSnapshot:
    """CreateVolumeGroupSnapshot. The sources are in the order of their ids."""

    name: str
    source_ids: tuple[str, ...]
    size: Reserve | None
    about: Mapping[str, str]

    @classmethod
    def from_proto(cls, wire: csi.CreateVolumeGroupSnapshotRequest) -> Self:
        """Read and check the request."""
        _check_name("name", wire.name)
        field = "source_volume_ids"
        if not wire.source_volume_ids:
            raise errors.Missing(field)
        for index, one in enumerate(wire.source_volume_ids):
            if not one:
                raise errors.Missing(f"{field}[{index}]")
            if one in wire.source_volume_ids[:index]:
                raise errors.BadField(f"{field}[{index}]", f"{one!r} is named twice")
        size, about = _of_snapshot(wire.parameters, _ABOUT_GROUP_SNAPSHOT)
        return cls(wire.name, tuple(sorted(wire.source_volume_ids)), size, about)


@dataclass(frozen=True)
class GroupSnapshot:
    """GetVolumeGroupSnapshot and DeleteVolumeGroupSnapshot: which, and what the caller has of it.

    Which snapshots are its own is compared where there is one of that id.
    """

    id: str
    snapshot_ids: tuple[str, ...]

    @classmethod
    def from_proto(
        cls, wire: csi.GetVolumeGroupSnapshotRequest | csi.DeleteVolumeGroupSnapshotRequest
    ) -> Self:
        """Read and check the request."""
        if not wire.group_snapshot_id:
            raise errors.Missing("group_snapshot_id")
        return cls(wire.group_snapshot_id, tuple(wire.snapshot_ids))


@dataclass(frozen=True)
class ListSnapshots:
    """ListSnapshots: which part, and of which source or with which id, where one is named."""

    page: Page
    source_id: str
    snapshot_id: str

    @classmethod
    def from_proto(cls, wire: csi.ListSnapshotsRequest) -> Self:
        """Read and check the request."""
        return cls(Page.from_proto(wire), wire.source_volume_id, wire.snapshot_id)


@dataclass(frozen=True)
class Stage:
    """NodeStageVolume."""

    volume_id: str
    staging_path: str
    capability: Capability
    parameters: Parameters

    @classmethod
    def from_proto(cls, wire: csi.NodeStageVolumeRequest) -> Self:
        """Read and check the request."""
        return cls(
            volume_id=_volume_id(wire.volume_id),
            staging_path=_path("staging_target_path", wire.staging_target_path),
            capability=_capability(wire),
            parameters=Parameters.from_context(wire.volume_context),
        )


@dataclass(frozen=True)
class Publish:
    """NodePublishVolume."""

    volume_id: str
    staging_path: str
    target_path: str
    capability: Capability
    parameters: Parameters
    read_only: bool

    @classmethod
    def from_proto(cls, wire: csi.NodePublishVolumeRequest) -> Self:
        """Read and check the request."""
        volume_id = _volume_id(wire.volume_id)
        target_path = _path("target_path", wire.target_path)
        capability = _capability(wire)
        return cls(
            volume_id=volume_id,
            staging_path=_path("staging_target_path", wire.staging_target_path),
            target_path=target_path,
            capability=capability,
            parameters=Parameters.from_context(wire.volume_context),
            read_only=wire.readonly or capability.read_only,
        )


@dataclass(frozen=True)
class Inline:
    """NodePublishVolume of a volume that lives as long as its pod: no CreateVolume came before."""

    volume_id: str
    target_path: str
    capability: Capability
    parameters: Parameters
    size_bytes: int

    @staticmethod
    def is_meant(wire: csi.NodePublishVolumeRequest) -> bool:
        """Whether kubelet says that the volume is an inline one."""
        told = wire.volume_context.get(EPHEMERAL, "false")
        if told not in {"true", "false"}:
            raise errors.NotAllowed(f"volume_context[{EPHEMERAL}]", told, ("true", "false"))
        return told == "true"

    @classmethod
    def from_proto(cls, wire: csi.NodePublishVolumeRequest) -> Self:
        """Read and check the request. A read-only one has the mode that allows no writer."""
        _check_name("volume_id", wire.volume_id)
        if VolumeId.parse(wire.volume_id) is not None:
            raise errors.BadField("volume_id", "is one that CreateVolume gave, not an inline one")
        target_path = _path("target_path", wire.target_path)
        capability = _capability(wire)
        if capability.is_block:
            raise errors.BadField("volume_capability", "an inline volume is mounted, never block")
        if wire.readonly:
            capability = replace(capability, mode=READER_ONLY)
        parameters, size = Parameters.from_pod(wire.volume_context)
        size_bytes = _number(f"volume_context[{SIZE}]", size, _size) if size else 0
        return cls(wire.volume_id, target_path, capability, parameters, size_bytes)


@dataclass(frozen=True)
class At:
    """A volume and the path where it is staged or published."""

    volume_id: str
    path: str

    @classmethod
    def from_unstage(cls, wire: csi.NodeUnstageVolumeRequest) -> Self:
        """Read and check NodeUnstageVolume."""
        path = _path("staging_target_path", wire.staging_target_path)
        return cls(_volume_id(wire.volume_id), path)

    @classmethod
    def from_unpublish(cls, wire: csi.NodeUnpublishVolumeRequest) -> Self:
        """Read and check NodeUnpublishVolume."""
        return cls(_volume_id(wire.volume_id), _path("target_path", wire.target_path))

    @classmethod
    def from_volume_path(
        cls, wire: csi.NodeGetVolumeStatsRequest | csi.NodeExpandVolumeRequest
    ) -> Self:
        """Read NodeGetVolumeStats, or where NodeExpandVolume finds the volume.

        The path is only looked for: one that cannot be a mount's is one where no volume is.
        """
        if not wire.volume_path:
            raise errors.Missing("volume_path")
        return cls(_volume_id(wire.volume_id), wire.volume_path)


@dataclass(frozen=True)
class HealthAt:
    """NodeGetVolumeHealth: a volume, and where it is or should have been staged and published."""

    volume_id: str
    paths: tuple[str, ...] = ()

    @classmethod
    def from_proto(cls, wire: csi.NodeGetVolumeHealthRequest) -> Self:
        """Read and check the request; both paths are optional."""
        fields = ("volume_publish_path", "staging_target_path")
        told = ((one, getattr(wire, one)) for one in fields)
        return cls(
            _volume_id(wire.volume_id), tuple(_path(field, path) for field, path in told if path)
        )


def volume_id(
    wire: csi.DeleteVolumeRequest
    | csi.ControllerGetVolumeRequest
    | csi.ControllerGetVolumeHealthRequest,
) -> str:
    """The volume that a request is about, where it says nothing else."""
    return _volume_id(wire.volume_id)


def snapshot_id(wire: csi.DeleteSnapshotRequest | csi.GetSnapshotRequest) -> str:
    """The snapshot that a request is about."""
    if not wire.snapshot_id:
        raise errors.Missing("snapshot_id")
    return wire.snapshot_id


def _check_fits(field: str, key: str, value: str) -> None:
    if not tags.fits(key, value):
        raise errors.BadField(f"{field}[{key}]", "is too long to be kept in an LVM tag")


def _volume_id(text: str) -> str:
    if not text:
        raise errors.Missing("volume_id")
    return text


def _check_name(field: str, text: str) -> None:
    if not text:
        raise errors.Missing(field)
    if len(text.encode()) > _MAXIMUM_STRING_BYTES:
        raise errors.BadField(field, f"is longer than {_MAXIMUM_STRING_BYTES} bytes")
    if _NOT_IN_A_NAME.search(text):
        raise errors.BadField(field, f"{text!r} has a control character")


def _size(text: str) -> int:
    size_bytes = settings.parse_size(text)
    if size_bytes == 0:
        raise ValueError("must be larger than 0")
    return size_bytes


def _path(field: str, path: str) -> str:
    if not path:
        raise errors.Missing(field)
    try:
        return target.check(path)
    except mount_errors.BadPath as error:
        raise errors.BadField(field, str(error)) from None


def _capability(wire: csi.NodeStageVolumeRequest | csi.NodePublishVolumeRequest) -> Capability:
    if not wire.HasField("volume_capability"):
        raise errors.Missing("volume_capability")
    return Capability.from_proto(wire.volume_capability)


def _capabilities(wire: Sequence[csi.VolumeCapability]) -> tuple[Capability, ...]:
    return tuple(
        Capability.from_proto(one, f"volume_capabilities[{index}]")
        for index, one in enumerate(wire)
    )


def _told(
    wire: Mapping[str, str], names: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """What Kubernetes tells, by the names of the facts that it is kept as, and what is Carver's."""
    about = {names[key]: value for key, value in wire.items() if key in names}
    own = {key: value for key, value in wire.items() if not key.startswith(_KUBERNETES_PREFIX)}
    return about, own


def _of_volume(
    wire: Mapping[str, str], field: str, allowed: Sequence[str], names: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """A volume's parameters, and what Kubernetes tells of it."""
    _check_map(field, wire)
    about, own = _told(wire, names)
    found = _known({key: own[key] for key in own if key not in _FS_TYPE}, field, allowed)
    for key in _FS_TYPE:
        if told := wire.get(key, ""):
            if (other := found.get("fsType") or told) != told:
                raise errors.BadField(
                    f"{field}[{key}]", f"{told!r}, but {other!r} is asked for too"
                )
            found["fsType"] = told
    return found, about


def _of_snapshot(
    parameters: Mapping[str, str], known: Mapping[str, str]
) -> tuple[Reserve | None, dict[str, str]]:
    """The size of a snapshot's area, if the parameters say it, and what they tell about it."""
    field = "parameters"
    _check_map(field, parameters)
    about, rest = _told(parameters, known)
    for key, value in about.items():
        _check_fits(field, key, value)
    found = _known(rest, field, SNAPSHOT_PARAMETERS)
    if SIZE not in found:
        return None, about
    return _number(f"{field}[{SIZE}]", found[SIZE], settings.parse_part), about


def _known(wire: Mapping[str, str], field: str, allowed: Sequence[str]) -> dict[str, str]:
    """Parameters by their names, without the prefix; each must be allowed, and given once."""
    found: dict[str, str] = {}
    for key, value in wire.items():
        name = key.removeprefix(PARAMETER_PREFIX)
        if name not in allowed:
            raise errors.NotAllowed(field, key, [PARAMETER_PREFIX + one for one in allowed])
        if name in found:
            raise errors.BadField(f"{field}[{key}]", "is given with the prefix and without")
        found[name] = value
    return found


def _number(field: str, text: str, read: Callable[[str], Number]) -> Number:
    try:
        return read(text)
    except ValueError as error:
        raise errors.BadField(field, f"{text!r} is not allowed: {error}") from None


def _tuning(wire: Mapping[str, str]) -> Tuning:
    """A VolumeAttributesClass's parameters, beside what sidecars tell of the claim."""
    _check_map(MUTABLE, wire)
    _, rest = _told(wire, _ABOUT)
    found = _known(rest, MUTABLE, tuple(MUTABLE_PARAMETERS))
    said: dict[str, Any] = {
        part: _number(f"{MUTABLE}[{key}]", found[key], read)
        for key, (part, read) in MUTABLE_PARAMETERS.items()
        if key in found
    }
    if why := Tuning(**said).refusal:
        raise errors.BadField(MUTABLE, why)
    return Tuning(**said)


def _check_map(field: str, wire: Mapping[str, str]) -> None:
    if sum(len(key.encode()) + len(value.encode()) for key, value in wire.items()) > (
        _MAXIMUM_MAP_BYTES
    ):
        raise errors.BadField(field, f"are larger than {_MAXIMUM_MAP_BYTES} bytes")


def _check_mount_options(field: str, flags: Sequence[str], fs_type: str | None = None) -> None:
    try:
        options.parse(flags, fs_type)
    except mount_errors.BadOption as error:
        raise errors.BadField(field, str(error)) from None
