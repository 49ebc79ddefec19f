"""Carver in the test's own process."""

from fakes.host import FakeHost

from agent.config.settings import Config
from agent.engine.host import Host
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
