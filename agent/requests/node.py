"""The Node's requests, read from the wire and checked once."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from agent import errors, secret
from agent.config import values
from agent.ids import VolumeId
from agent.requests import checks, keys
from agent.requests.capabilities import READER_ONLY, Capability
from agent.requests.parameters import Parameters
from agent.secret import Keys
from proto import csi_pb2 as csi

_GENERATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True)
class StageVolume:
    """What NodeStageVolume asks for."""

    volume_id: str
    staging_path: str
    capability: Capability
    parameters: Parameters
    keys: Keys = secret.NONE

    @classmethod
    def from_proto(cls, wire: csi.NodeStageVolumeRequest) -> Self:
        """Read and check the request."""
        return cls(
            volume_id=checks.volume_id(wire.volume_id),
            staging_path=checks.path("staging_target_path", wire.staging_target_path),
            capability=_capability(wire),
            parameters=Parameters.from_context(wire.volume_context),
            keys=keys_of(wire.secrets),
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
    keys: Keys = secret.NONE

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
            keys=keys_of(wire.secrets),
        )


@dataclass(frozen=True)
class PublishInline:
    """NodePublishVolume of a volume that lives as long as its pod: no CreateVolume came before."""

    volume_id: str
    target_path: str
    capability: Capability
    parameters: Parameters
    size_bytes: int
    keys: Keys = secret.NONE

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
        own = keys_of(wire.secrets)
        return cls(wire.volume_id, target_path, capability, parameters, size_bytes, own)


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
        paths = tuple(checks.path(field, path) for field, path in told if path)
        return cls(checks.volume_id(wire.volume_id), paths)


def keys_of(secrets: Mapping[str, str]) -> Keys:
    """The keys that a call brings; other secrets are none of Carver's. Raises BadField.

    Each look into the map makes a new text, which is overwritten at once.
    """
    present, previous = (
        secret.of_text(f"secrets[{name}]", secrets[name]) if name in secrets else None
        for name in (keys.PASSPHRASE, keys.PREVIOUS_PASSPHRASE)
    )
    made = Keys(present, previous, secrets.get(keys.GENERATION, ""))
    try:
        _check_generation(made)
    except errors.BadField:
        with made.used():
            raise
    return made


def _check_generation(told: Keys) -> None:
    """Raise BadField for a name of a key that cannot be kept, or is the key itself."""
    field = f"secrets[{keys.GENERATION}]"
    if told.generation and not _GENERATION.fullmatch(told.generation):
        raise errors.BadField(
            field,
            "must be 1 to 63 letters, digits, '.', '_' and '-', and begin with no sign",
        )
    name = told.generation.encode()
    if any(one is not None and one.data == name for one in (told.present, told.previous)):
        raise errors.BadField(field, "is the key itself, and is kept in the clear; give it a name")


def _capability(wire: csi.NodeStageVolumeRequest | csi.NodePublishVolumeRequest) -> Capability:
    if not wire.HasField("volume_capability"):
        raise errors.Missing("volume_capability")
    return Capability.from_proto(wire.volume_capability)


def _size(text: str) -> int:
    size_bytes = values.parse_size(text)
    if size_bytes == 0:
        raise ValueError("must be larger than 0")
    return size_bytes
