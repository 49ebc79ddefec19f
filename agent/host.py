"""The seams to the machine: commands, system calls, devices."""

import logging
from dataclasses import dataclass

from agent.config import Config
from lvm.command import Finished, Programs, Run
from lvm.devices import Devices, KernelDevices
from mount.syscalls import Kernel

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Host:
    """A machine to work on. Tests put a fake of it here."""

    run: Run
    kernel: Kernel
    devices: Devices


def this_host(config: Config) -> Host:
    """The machine that Carver runs on."""
    run = Programs(lvm_on_host=config.lvm == "host", observe=_log_command)
    return Host(run, Kernel(), KernelDevices())


def _log_command(finished: Finished) -> None:
    fields = {
        "command": " ".join(finished.words),
        "exit_code": finished.exit_code,
        "milliseconds": round(finished.seconds * 1000, 1),
    }
    _log.debug("command", extra={"fields": fields})
