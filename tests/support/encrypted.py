"""Encrypted volumes of one group, as their caller and the machine have them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from csi_client import Client
from real.any import AnyHost

from agent.csi.client import mounted
from lvm import report
from lvm.active_devices import Device
from lvm.room import Room
from mount import luks
from mount.luks import Header
from proto import csi_pb2 as csi

EXT4 = mounted("ext4")


@dataclass
class Box:
    """A caller, who stages one volume at a time, and the machine below it."""

    client: Client
    host: AnyHost
    group: str

    @property
    def staging(self) -> Path:
        return self.host.directory / "staging"

    @property
    def target(self) -> Path:
        return self.host.directory / "target"

    def stage(
        self,
        volume: csi.Volume,
        secrets: Mapping[str, str] | None = None,
        how: csi.VolumeCapability = EXT4,
    ) -> None:
        self.client.stage(volume, self.staging, how, secrets)

    def unstage(self, volume: csi.Volume) -> None:
        self.client.unstage(volume.volume_id, self.staging)

    def device(self, name: str = "vol-pvc-1") -> Device:
        """The logical volume's own device, below dm-crypt."""
        found = self.host.devices.find(self.group, name)
        assert found is not None
        return found

    def logical(self, name: str = "vol-pvc-1") -> str:
        return self.device(name).path

    def mapping(self, name: str = "vol-pvc-1") -> Device | None:
        """The dm-crypt device over it, if it is open."""
        found = self.host.devices.find(self.group, name)
        return None if found is None else self.host.devices.mapping(found)

    def opened(self, name: str = "vol-pvc-1") -> str:
        """The dm-crypt device of an open volume."""
        found = self.mapping(name)
        assert found is not None
        return found.path

    def header(self, name: str = "vol-pvc-1") -> Header:
        found = luks.read(self.host.kernel, self.logical(name))
        assert found is not None
        return found

    def tags(self, name: str = "vol-pvc-1") -> dict[str, str]:
        return dict(report.read(self.host.lvm).group(self.group).volume(name).own_tags)

    def used_extents(self) -> int:
        room = Room(report.read(self.host.lvm).group(self.group))
        return room.extents - room.free_extents

    def holds(self, device: str, text: bytes) -> bool:
        """Whether a device has a text within one of its pieces of 4 MiB."""
        size, read = self.host.kernel.device_size_bytes(device), self.host.read_bytes
        return any(text in read(device, at, 4 << 20) for at in range(0, size, 4 << 20))
