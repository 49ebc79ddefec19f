"""What the agent knows of the fake lvm2's groups, without a service."""

from collections.abc import Sequence

import configured
from fakes.devices import FakeDevices
from fakes.disks import FakeDisks
from fakes.lvm import FakeLvm

from agent.groups.node_groups import VolumeGroups
from agent.volumes.activator import Activator
from agent.volumes.reports import Reports
from lvm.lvm2 import Lvm


def machine(*disk_extents: int) -> tuple[Lvm, FakeLvm]:
    """A fake lvm2 with a group `data` of such disks, and how it is called."""
    fake = FakeLvm(FakeDevices())
    fake.add_group("data", disk_extents)
    return Lvm(lambda *words: fake(words), settings=()), fake


def reports(fake: FakeLvm, *groups: str, lvm: Lvm | None = None) -> Reports:
    """The reports of some groups; `lvm` is lvm2 as a test calls it."""
    return Reports(_volume_groups(fake, groups, lvm))


def activator(fake: FakeLvm, *groups: str) -> Activator:
    """The activator of some groups."""
    volume_groups = _volume_groups(fake, groups, None)
    return Activator(volume_groups, fake, Reports(volume_groups))


def _volume_groups(fake: FakeLvm, groups: Sequence[str], lvm: Lvm | None) -> VolumeGroups:
    node = lvm or Lvm(lambda *words: fake(words), settings=())
    return VolumeGroups(node, FakeDisks(fake, fake.devices), fake, configured.on_groups(*groups))
