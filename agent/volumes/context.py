"""Objects that all operations share, such as the configuration and the volume groups."""

from dataclasses import dataclass, field

from agent.groups.node_groups import VolumeGroups
from agent.settings.configuration import Configuration
from agent.settings.settings import Config
from agent.volumes.activator import Activator
from agent.volumes.allocation import Allocators
from agent.volumes.conflicts import Conflicts
from agent.volumes.erase_policy import ErasePolicy
from agent.volumes.holds import Holds
from agent.volumes.limiter import Limiter
from agent.volumes.mender import Mender
from agent.volumes.reports import Reports
from agent.volumes.tag_writer import TagWriter
from agent.work.background import DetachedTasks
from agent.work.group_worker import GroupWorkers
from agent.work.locks import Admission, VolumeLocks
from agent.work.pace import Paces
from lvm.active_devices import Devices
from mount.command import Runner, Stream
from mount.kernel import Kernel


@dataclass(frozen=True)
class Context:
    """Objects that all operations share: one of each for a process, built once at the start."""

    configuration: Configuration
    run: Runner
    kernel: Kernel
    volume_groups: VolumeGroups
    reports: Reports
    activator: Activator
    mender: Mender
    tag_writer: TagWriter
    devices: Devices
    stream: Stream
    allocators: Allocators
    limiter: Limiter
    paces: Paces
    erase_policy: ErasePolicy
    holds: Holds
    conflicts: Conflicts
    admission: Admission = field(default_factory=Admission)
    locks: VolumeLocks = field(default_factory=VolumeLocks)
    detached: DetachedTasks = field(default_factory=DetachedTasks)

    @property
    def config(self) -> Config:
        """The present configuration. Callers must read it at each use: a reload replaces it."""
        return self.configuration.now

    @property
    def workers(self) -> GroupWorkers:
        """The loops that do the background work of the volume groups."""
        return self.volume_groups.workers
