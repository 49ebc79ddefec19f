"""The groups that Carver makes, made as at its start."""

from real.any import AnyHost

from agent.core import group_definitions
from agent.core.group_definitions import GroupDefinitions
from agent.core.settings import Config
from agent.core.volume_groups import VolumeGroups
from lvm.lvm2 import Lvm
from mount.command import Run
from mount.kernel import Kernel


def lay(
    host: AnyHost, config: Config, run: Run | None = None, kernel: Kernel | None = None
) -> tuple[Lvm, GroupDefinitions]:
    """How lvm2 is called from then on, and what came of it."""
    lvm, laid = (
        group_definitions.on_node(run or host.run, config),
        GroupDefinitions(kernel or host.kernel),
    )
    volume_groups = VolumeGroups(lvm, host.disks, host.devices, config.groups)
    group_definitions.begin(lvm, laid, config, volume_groups)
    for group in config.groups:
        group_definitions.create(lvm, laid, config, volume_groups, group)
    return lvm, laid
