"""The groups that Carver makes, made as at its start."""

from real.any import AnyHost

from agent.groups import group_definitions
from agent.groups.group_definitions import GroupDefinitions
from agent.groups.node_groups import VolumeGroups
from agent.settings.configuration import Configuration
from agent.settings.settings import Config
from lvm.lvm2 import Lvm
from mount.command import Run
from mount.kernel import Kernel


def lay(
    host: AnyHost, config: Config, run: Run | None = None, kernel: Kernel | None = None
) -> tuple[Lvm, GroupDefinitions]:
    """How lvm2 is called from then on, and what came of it."""
    configuration = Configuration(config)
    lvm = group_definitions.on_node(run or host.run, config)
    laid = GroupDefinitions(configuration, kernel or host.kernel)
    volume_groups = VolumeGroups(lvm, host.disks, host.devices, configuration)
    group_definitions.begin(laid, volume_groups)
    for group in config.groups:
        group_definitions.create(laid, volume_groups, group)
    return lvm, laid
