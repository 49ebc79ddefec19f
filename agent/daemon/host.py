"""The interface to the machine: commands, system calls, devices."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from agent.settings.settings import Config
from lvm.active_devices import Devices
from lvm.disk_reader import Disks
from mount.cgroups import Cgroups
from mount.command import Converse, Finished, Runner, Stream
from mount.kernel import Kernel
from mount.programs import Programs

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Host:
    """A machine to work on. Tests put a fake of it here."""

    run: Runner
    kernel: Kernel
    devices: Devices
    disks: Disks
    # Starts an interactive program, such as lvm2's shell; None where each command is a process.
    converse: Converse | None = None
    # Called after each command of such a shell.
    observe: Callable[[Finished], None] = field(
        default=lambda finished: log_command(finished, session=True)
    )
    # Runs a program whose output is read as it comes.
    stream: Stream = field(default_factory=lambda: Programs().stream)
    cgroups: Cgroups = field(default_factory=Cgroups)


def this_host(config: Config) -> Host:
    """The machine that Carver runs on."""
    run = Programs(lvm_on_host=config.lvm == "host", observe=log_command)
    converse = run.converse if config.lvm_session else None
    cgroups = Cgroups(config.pods_cgroup)
    return Host(run, Kernel(), Devices(), Disks(), converse, stream=run.stream, cgroups=cgroups)


def log_command(finished: Finished, **more: object) -> None:
    """Log a command that ended, in a process of its own or not."""
    fields = {
        "command": " ".join(finished.words),
        "exit_code": finished.exit_code,
        "milliseconds": round(finished.seconds * 1000, 1),
        **more,
    }
    _log.debug("command", extra={"fields": fields})
