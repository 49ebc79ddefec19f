"""A volume, as kubelet uses it: staged once, published for pods by their names."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from csi_client import Client

from proto import csi_pb2 as csi


@dataclass
class Use:
    """A volume of a client's, and what kubelet does with it below a directory."""

    client: Client
    directory: Path
    volume: csi.Volume
    how: csi.VolumeCapability

    @property
    def staging(self) -> Path:
        return self.directory / "staging"

    def at(self, pod: str) -> Path:
        return self.directory / pod

    def stage(self, secrets: Mapping[str, str] | None = None) -> None:
        self.client.stage(self.volume, self.staging, self.how, secrets)

    def unstage(self) -> None:
        self.client.unstage(self.volume.volume_id, self.staging)

    def publish(self, pod: str, secrets: Mapping[str, str] | None = None) -> None:
        self.client.publish(self.volume, self.staging, self.at(pod), self.how, secrets)

    def unpublish(self, *pods: str) -> None:
        for pod in pods:
            self.client.unpublish(self.volume.volume_id, self.at(pod))

    def reasons(self) -> set[str]:
        """What is wrong with the volume, as the controller and the node report it alike."""
        asked = (self.client.volume_health, self.client.node_health)
        found = [ask(self.volume.volume_id).health_statuses for ask in asked]
        by_controller, by_node = ({one.reason for one in each} for each in found)
        assert by_controller == by_node
        return by_controller
