"""Carver in the test's own process."""

from fakes.host import FakeHost

from agent import server
from agent.config import Config
from agent.host import Host
from agent.server import Service


def start(config: Config, fake: FakeHost, **grace_seconds: float) -> Service:
    """Go on with what an earlier process left, and serve.

    `wiper` and `copier` are how long a call waits for them, where that is not as usual.
    """
    running = Service(config, Host(fake.run, fake.kernel, fake.devices), fake.lvm)
    for part, seconds in grace_seconds.items():
        getattr(running, part).grace_seconds = seconds
    server._resume(running)
    running.start(config.endpoint)
    return running
