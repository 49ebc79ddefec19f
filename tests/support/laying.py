"""The groups that Carver makes, made as at its start."""

from real.any import AnyHost

from agent.config.settings import Config
from agent.engine import sources
from agent.engine.engines import Engines
from agent.engine.sources import Foundations
from lvm.command import Run
from lvm.lvm2 import Lvm
from mount.syscalls import Kernel


def lay(
    host: AnyHost, config: Config, run: Run | None = None, kernel: Kernel | None = None
) -> tuple[Lvm, Foundations]:
    """How lvm2 is called from then on, and what came of it."""
    lvm, laid = sources.on_node(run or host.run, config), Foundations(kernel or host.kernel)
    engines = Engines(lvm, host.disks, host.devices, config.groups)
    sources.begin(lvm, laid, config, engines)
    for group in config.groups:
        sources.lay(lvm, laid, config, engines, group)
    return lvm, laid
