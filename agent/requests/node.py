"""The Node's requests, read from the wire and checked once."""

from dataclasses import dataclass, replace
from typing import Self

from agent import errors
from agent.config import values
from agent.ids import VolumeId
from agent.requests import checks, keys
from agent.requests.capabilities import READER_ONLY, Capability
from agent.requests.parameters import Parameters
from proto import csi_pb2 as csi


@dataclass(frozen=True)
class StageVolume:
    """What NodeStageVolume asks for."""

    volume_id: str
    staging_path: str
    capability: Capability
    parameters: Parameters

    @classmethod
    def from_proto(cls, wire: csi.NodeStageVolumeRequest) -> Self:
        """Read and check the request."""
        return cls(
            volume_id=checks.volume_id(wire.volume_id),
            staging_path=checks.path("staging_target_path", wire.staging_target_path),
            capability=_capability(wire),
            parameters=Parameters.from_context(wire.volume_context),
        )


@dataclass(frozen=True)
class PublishVolume:
    """What NodePublishVolume asks for."""

    volume_id: str
    staging_path: str
    target_path: str
    capability: Capability
    parameters: Parameters
    read_only: bool

    @classmethod
    def from_proto(cls, wire: csi.NodePublishVolumeRequest) -> Self:
        """Read and check the request."""
        volume_id = checks.volume_id(wire.volume_id)
        target_path = checks.path("target_path", wire.target_path)
        capability = _capability(wire)
        return cls(
            volume_id=volume_id,
            staging_path=checks.path("staging_target_path", wire.staging_target_path),
            target_path=target_path,
            capability=capability,
            parameters=Parameters.from_context(wire.volume_context),
            read_only=wire.readonly or capability.read_only,
        )


@dataclass(frozen=True)
class PublishInline:
    """NodePublishVolume of a volume that lives as long as its pod: no CreateVolume came before."""

    volume_id: str
    target_path: str
    capability: Capability
    parameters: Parameters
    size_bytes: int

    @staticmethod
    def is_meant(wire: csi.NodePublishVolumeRequest) -> bool:
        """Whether kubelet says that the volume is an inline one."""
        told = wire.volume_context.get(keys.EPHEMERAL, "false")
        if told not in {"true", "false"}:
            raise errors.NotAllowed(f"volume_context[{keys.EPHEMERAL}]", told, ("true", "false"))
        return told == "true"

    @classmethod
    def from_proto(cls, wire: csi.NodePublishVolumeRequest) -> Self:
        """Read and check the request. A read-only one has the mode that allows no writer."""
        checks.name("volume_id", wire.volume_id)
        if VolumeId.parse(wire.volume_id) is not None:
            raise errors.BadField("volume_id", "is one that CreateVolume gave, not an inline one")
        target_path = checks.path("target_path", wire.target_path)
        capability = _capability(wire)
        if capability.is_block:
            raise errors.BadField("volume_capability", "an inline volume is mounted, never block")
        if wire.readonly:
            capability = replace(capability, mode=READER_ONLY)
        parameters, size = Parameters.from_pod(wire.volume_context)
        size_bytes = checks.number(f"volume_context[{keys.SIZE}]", size, _size) if size else 0
        return cls(wire.volume_id, target_path, capability, parameters, size_bytes)


@dataclass(frozen=True)
class VolumeAt:
    """A volume and the path where it is staged or published."""

    volume_id: str
    path: str

    @classmethod
    def from_unstage(cls, wire: csi.NodeUnstageVolumeRequest) -> Self:
        """Read and check NodeUnstageVolume."""
        path = checks.path("staging_target_path", wire.staging_target_path)
        return cls(checks.volume_id(wire.volume_id), path)

    @classmethod
    def from_unpublish(cls, wire: csi.NodeUnpublishVolumeRequest) -> Self:
        """Read and check NodeUnpublishVolume."""
        return cls(checks.volume_id(wire.volume_id), checks.path("target_path", wire.target_path))

    @classmethod
    def from_volume_path(
        cls, wire: csi.NodeGetVolumeStatsRequest | csi.NodeExpandVolumeRequest
    ) -> Self:
        """Read NodeGetVolumeStats, or where NodeExpandVolume finds the volume.

        The path is only looked for: one that cannot be a mount's is one where no volume is.
        """
        if not wire.volume_path:
            raise errors.Missing("volume_path")
        return cls(checks.volume_id(wire.volume_id), wire.volume_path)


def _capability(wire: csi.NodeStageVolumeRequest | csi.NodePublishVolumeRequest) -> Capability:
    if not wire.HasField("volume_capability"):
        raise errors.Missing("volume_capability")
    return Capability.from_proto(wire.volume_capability)


def _size(text: str) -> int:
    size_bytes = values.parse_size(text)
    if size_bytes == 0:
        raise ValueError("must be larger than 0")
    return size_bytes
