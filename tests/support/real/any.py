"""A machine, in memory or this one: the same tests run on either."""

from fakes.host import FakeHost
from real.host import RealHost

AnyHost = FakeHost | RealHost


def device(host: AnyHost, group: str, name: str) -> str:
    """The path of a volume's device; the volume is active."""
    found = host.devices.find(group, name)
    assert found is not None, name
    return found.path
