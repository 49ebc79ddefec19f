"""The means by which all policy looks at this node and works on it."""

from dataclasses import dataclass, field

from agent.core.background import DetachedTasks
from agent.core.inventory import Inventory
from agent.core.settings import Config
from agent.core.volume_groups import VolumeGroups
from lvm.devices import Devices
from mount.command import Runner, Stream
from mount.kernel import Kernel


@dataclass(frozen=True)
class Context:
    """One of each for a process. An engine is held around each change of its group."""

    config: Config
    run: Runner
    kernel: Kernel
    volume_groups: VolumeGroups
    inventory: Inventory
    devices: Devices
    stream: Stream
    detached: DetachedTasks = field(default_factory=DetachedTasks)
