"""The means by which all policy looks at this node and works on it."""

from dataclasses import dataclass

from agent.config import Config
from agent.inventory import Inventory
from agent.locks import GroupLocks
from lvm.command import Run
from lvm.lvm2 import Lvm
from mount.syscalls import Kernel


@dataclass(frozen=True)
class Means:
    """One of each for a process. `groups` is held around each change of a group."""

    config: Config
    run: Run
    kernel: Kernel
    lvm: Lvm
    inventory: Inventory
    groups: GroupLocks
