"""The Controller's requests for volumes, read from the wire and checked once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from agent import errors
from agent.requests import checks, keys
from agent.requests.capabilities import Capability
from agent.requests.parameters import Parameters, tuning_of
from lvm.tuning import AS_IT_IS, Tuning
from proto import csi_pb2 as csi

SNAPSHOT = "snapshot"
VOLUME = "volume"


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
class CreateVolume:
    """What CreateVolume asks for."""

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
        checks.name("name", wire.name)
        if not wire.volume_capabilities:
            raise errors.Missing("volume_capabilities")
        return cls(
            name=wire.name,
            size=SizeRange.from_proto(wire.capacity_range),
            capabilities=Capability.several(wire.volume_capabilities),
            parameters=Parameters.from_proto(wire.parameters),
            topology=Topology.from_proto(wire.accessibility_requirements),
            source=Source.from_proto(wire),
            tuning=tuning_of(wire.mutable_parameters),
        )


@dataclass(frozen=True)
class ValidateVolume:
    """What ValidateVolumeCapabilities asks for."""

    volume_id: str
    capabilities: tuple[Capability, ...]
    unsupported: str
    tuning: Tuning = AS_IT_IS
    # Nothing where they are not given.
    context: Mapping[str, str] = field(default_factory=dict)
    parameters: Parameters = field(default_factory=Parameters)

    @classmethod
    def from_proto(cls, wire: csi.ValidateVolumeCapabilitiesRequest) -> Self:
        """Read the request: what is asked for and well-formed, or why it cannot be had."""
        volume_id = checks.volume_id(wire.volume_id)
        if not wire.volume_capabilities:
            raise errors.Missing("volume_capabilities")
        try:
            capabilities = Capability.several(wire.volume_capabilities)
            parameters = Parameters.from_proto(wire.parameters)
            context = Parameters.from_context(wire.volume_context).context()
            tuning = tuning_of(wire.mutable_parameters)
        except errors.BadField as error:
            return cls(volume_id, (), str(error))
        return cls(volume_id, capabilities, "", tuning, context, parameters)


@dataclass(frozen=True)
class ModifyVolume:
    """What ControllerModifyVolume asks for."""

    volume_id: str
    tuning: Tuning

    @classmethod
    def from_proto(cls, wire: csi.ControllerModifyVolumeRequest) -> Self:
        """Read and check the request."""
        volume_id = checks.volume_id(wire.volume_id)
        if not wire.mutable_parameters:
            raise errors.Missing(keys.MUTABLE)
        return cls(volume_id, tuning_of(wire.mutable_parameters))


@dataclass(frozen=True)
class ExpandVolume:
    """What ControllerExpandVolume asks for, and what it shares with NodeExpandVolume."""

    volume_id: str
    size: SizeRange

    @classmethod
    def from_proto(
        cls, wire: csi.ControllerExpandVolumeRequest | csi.NodeExpandVolumeRequest
    ) -> Self:
        """Read and check the request."""
        volume_id = checks.volume_id(wire.volume_id)
        if wire.HasField("volume_capability"):
            Capability.from_proto(wire.volume_capability)
        size = SizeRange.from_proto(wire.capacity_range)
        if isinstance(wire, csi.ControllerExpandVolumeRequest) and size == SizeRange():
            raise errors.Missing("capacity_range")
        return cls(volume_id, size)


@dataclass(frozen=True)
class GetCapacity:
    """What GetCapacity asks for."""

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
            capabilities = Capability.several(wire.volume_capabilities)
        except errors.BadField:
            return cls((), parameters, where, unsupported=True)
        return cls(capabilities, parameters, where, unsupported=False)
