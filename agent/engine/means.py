"""The means by which all policy looks at this node and works on it."""

from dataclasses import dataclass, field

from agent.config.settings import Config
from agent.engine.chores import Chores
from agent.engine.engines import Engines
from agent.engine.inventory import Inventory
from lvm.command import Runner, Stream
from lvm.devices import Devices
from mount.syscalls import Kernel


@dataclass(frozen=True)
class Means:
    """One of each for a process. An engine is held around each change of its group."""

    config: Config
    run: Runner
    kernel: Kernel
    engines: Engines
    inventory: Inventory
    devices: Devices
    stream: Stream
    chores: Chores = field(default_factory=Chores)
