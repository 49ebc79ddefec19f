"""A machine, in memory or this one: the same tests run on either."""

import expect
from fakes.host import FakeHost
from real.host import RealHost

from lvm import report

AnyHost = FakeHost | RealHost


def device(host: AnyHost, group: str, name: str) -> str:
    """The path of a volume's device; the volume is active."""
    found = host.devices.find(group, name)
    assert found is not None, name
    return found.path


def logical(host: AnyHost, group: str, name: str) -> report.LogicalVolume:
    """A logical volume, as lvm2 reports it now."""
    return report.read(host.lvm).group(group).volume(name)


def names(host: AnyHost, group: str) -> set[str]:
    """The names of a group's logical volumes."""
    return set(report.read(host.lvm).group(group).volumes)


def await_names(host: AnyHost, group: str, expected: set[str]) -> None:
    """Wait until a group has these logical volumes: an erasure may outlast a call."""
    expect.soon(lambda: names(host, group) == expected, lambda: names(host, group))


def lvm2_commands(host: AnyHost) -> list[str]:
    """The lvm2 commands since `host.commands` was cleared."""
    return [words[1] for words in host.commands if words[0] == "lvm"]
