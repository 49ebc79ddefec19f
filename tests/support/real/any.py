"""A machine, in memory or this one: the same tests run on either."""

from fakes.host import FakeHost
from real.host import RealHost

AnyHost = FakeHost | RealHost
