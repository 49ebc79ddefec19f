"""Dependencies that all operations share."""

from dataclasses import dataclass, field

from agent.core.activator import Activator
from agent.core.allocation import Allocators
from agent.core.background import DetachedTasks
from agent.core.configuration import Configuration
from agent.core.conflicts import Conflicts
from agent.core.erase_policy import ErasePolicy
from agent.core.group_worker import GroupWorkers
from agent.core.holds import Holds
from agent.core.limiter import Limiter
from agent.core.locks import Admission, VolumeLocks
from agent.core.mender import Mender
from agent.core.pace import Paces
from agent.core.reports import Reports
from agent.core.tag_writer import TagWriter
from agent.core.volume_groups import VolumeGroups
from lvm.devices import Devices
from mount.command import Runner, Stream
from mount.kernel import Kernel


@dataclass(frozen=True)
class Context:
    """One of each for a process, built once and handed on."""

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
    def workers(self) -> GroupWorkers:
        """The loops that do the groups' background work."""
        return self.volume_groups.workers
