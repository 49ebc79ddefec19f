"""Serve as `carver serve` does, but for a SIGKILL at a step that the harness chooses.

The two seams are wrapped from outside, so nothing in Carver knows of it. The file PLAN tells before
or after which step; SIGUSR1 has it read, after which the file is gone and steps are counted.
"""

# First of all: agent keeps gRPC's fork handlers out, and must come before grpc does.
import agent  # noqa: F401  isort: skip

import json
import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

from model.stopping import Switch

from agent.cli import main as cli
from agent.daemon import log, server, service_process
from agent.daemon.host import this_host
from agent.settings import settings
from lvm.session import Session


class Kill(Switch):
    """Ends the process as kill -9 does."""

    def _die(self) -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("SIGKILL was survived")

    def arm(self, plan: Path) -> None:
        """Count from now on, to the step that the plan tells."""
        self.stop_at, self._before = json.loads(plan.read_text())
        self.taken.clear()
        self.counting = True
        plan.unlink()


def main() -> None:
    """Serve what the command line after the plan's path says."""
    plan, words = Path(sys.argv[1]), sys.argv[2:]
    switch = Kill()
    signal.signal(signal.SIGUSR1, lambda _number, _frame: switch.arm(plan))
    config = settings.load(cli.parser().parse_args(["serve", *words]), {})
    log.configure(config.log_format, config.log_level)
    host = this_host(config)
    through = replace(
        host,
        run=switch.run(host.run),
        kernel=switch.kernel(host.kernel),
        devices=switch.devices(host.devices),
        converse=switch.converse(host.converse) if host.converse else None,
        stream=switch.stream(host.stream),
    )
    # A shell that was given up is followed by another at once: a trial is over within a minute.
    with patch.object(server, "Session", partial(Session, rest_seconds=0)):
        service_process.serve(config, through, lambda: config)


if __name__ == "__main__":
    with cli.ignoring_failed_writes():
        main()
