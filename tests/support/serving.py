"""Carver in the test's own process."""

from concurrent.futures import wait
from typing import Any

from fakes.host import FakeHost

from agent.config.settings import Config
from agent.engine.host import Host
from agent.engine.jobs import Jobs
from agent.service import server
from agent.service.server import Service


def start(config: Config, fake: FakeHost, **grace_seconds: float) -> Service:
    """Go on with what an earlier process left, and serve.

    `wiper` and `copier` are how long a call waits for them, where that is not as usual.
    """
    running = Service(
        config, Host(fake.run, fake.kernel, fake.devices, fake.disks, stream=fake.stream), fake.lvm
    )
    for part, seconds in grace_seconds.items():
        getattr(running, part).grace_seconds = seconds
    server.resume(running)
    running.start(config.endpoint)
    return running


def again(service: Service) -> None:
    """What is done a minute later behind the answers, until it has come to its end."""
    for _ in range(4):
        every: list[Jobs[Any]] = [service.wiper.jobs, service.giving_up.jobs]
        for jobs in every:
            for job in list(jobs._jobs.values()):
                wait([job.ended], 20)
                service.inventory.read()
                jobs._look_again(job)
            wait([one.ended for one in list(jobs._jobs.values())], 20)
        wait([one.ended for one in list(service.reclaimer.jobs._jobs.values())], 20)
