"""Volume capabilities: access type and mode."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from agent.core import errors, fields
from mount import filesystem
from proto import csi_pb2 as csi

BLOCK = "block"
MOUNT = "mount"
_MODES = csi.VolumeCapability.AccessMode.Mode
ACCESS_MODES = (
    "SINGLE_NODE_WRITER",
    "SINGLE_NODE_READER_ONLY",
    "SINGLE_NODE_SINGLE_WRITER",
    "SINGLE_NODE_MULTI_WRITER",
)
READER_ONLY = "SINGLE_NODE_READER_ONLY"
MULTI_WRITER = "SINGLE_NODE_MULTI_WRITER"


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
        fields.mount_options(f"{field}.mount.mount_flags", flags)
        return cls(MOUNT, mode, wire.mount.fs_type, flags)

    @classmethod
    def several(cls, wire: Sequence[csi.VolumeCapability]) -> tuple[Self, ...]:
        """Read and check the field `volume_capabilities`."""
        return tuple(
            cls.from_proto(one, f"volume_capabilities[{index}]") for index, one in enumerate(wire)
        )

    def check_for(self, fs_type: str, field: str) -> None:
        """Check the mount flags against the one file system that they are for."""
        fields.mount_options(f"{field}.mount.mount_flags", self.mount_flags, fs_type)

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
