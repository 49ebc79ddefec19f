"""The interfaces to the machine: programs, system calls, devices and disks."""

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
    """The interfaces to a machine: programs, system calls, devices and disks. Tests use fakes."""

    run: Runner
    kernel: Kernel
    devices: Devices
    disks: Disks
    # Function that starts an interactive program, such as lvm2's shell; None if each lvm2 command
    # is a process.
    converse: Converse | None = None
    # Function that is called with each command that ended in an interactive lvm2 shell.
    observe: Callable[[Finished], None] = field(
        default=lambda finished: log_command(finished, session=True)
    )
    # Function that runs a program, whose output the caller reads while the program runs.
    stream: Stream = field(default_factory=lambda: Programs().stream)
    cgroups: Cgroups = field(default_factory=Cgroups)


def this_host(config: Config) -> Host:
    """Return the interfaces to the machine that Carver runs on, by the settings in `config`."""
    run = Programs(lvm_on_host=config.lvm == "host", observe=log_command)
    converse = run.converse if config.lvm_session else None
    cgroups = Cgroups(config.pods_cgroup)
    return Host(run, Kernel(), Devices(), Disks(), converse, stream=run.stream, cgroups=cgroups)


def log_command(finished: Finished, **extra_fields: object) -> None:
    """Log a command that ended, at debug level, with `extra_fields` added to the log line."""
    fields = {
        "command": " ".join(finished.words),
        "exit_code": finished.exit_code,
        "milliseconds": round(finished.seconds * 1000, 1),
        **extra_fields,
    }
    _log.debug("command", extra={"fields": fields})
