"""Carver in the test's own process."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import in_background
from csi_client import Client
from real.any import AnyHost

from agent.daemon import server
from agent.daemon.host import Host
from agent.daemon.server import Service
from agent.daemon.startup import Recovery
from agent.settings.settings import Config
from agent.work.group_worker import Jobs
from lvm.lvm2 import Lvm


def machine(host: AnyHost) -> Host:
    """The machine as the product sees it."""
    return Host(
        host.run, host.kernel, host.devices, host.disks, stream=host.stream, cgroups=host.cgroups
    )


def start(config: Config, host: AnyHost, **grace_seconds: float) -> Service:
    """Go on with what an earlier process left, and serve.

    `eraser` and `copier` are how long a call waits for them, where that is not as usual.
    """
    running = Service(config, machine(host), host.lvm)
    for part, seconds in grace_seconds.items():
        getattr(running, part).grace_seconds = seconds
    recover(running)
    running.start(config.endpoint)
    return running


def recover(running: Service) -> None:
    """Recover each group by itself, as a process does at its start; wait until each was tried."""
    recovery = Recovery(running.volume_groups, partial(server.resume, running))
    recovery.begin()
    in_background.ended(recovery.jobs)


@contextmanager
def served(
    host: AnyHost, config: Config, lvm: Lvm | None = None
) -> Iterator[tuple[Service, Client]]:
    """Serve on a socket of the test's own.

    A delete has ended when it answers, however slow the disk: what is left is the test's to see.
    """
    running = Service(config, machine(host), lvm or host.lvm)
    running.eraser.grace_seconds = running.copier.grace_seconds = 600
    running.start(config.endpoint)
    try:
        with Client(config.endpoint) as client:
            yield running, client
    finally:
        running.stop()


def again(service: Service) -> None:
    """What is done a minute later behind the answers, until it has come to its end."""
    every: list[Jobs[Any]] = [service.eraser.jobs, service.freed_eraser.jobs]
    every.append(service.pool_remover.jobs)
    for _ in range(4):
        for jobs in every:
            in_background.ended(jobs)
            service.reports.fresh()
            in_background.again(jobs)
            in_background.ended(jobs)
