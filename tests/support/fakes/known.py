"""What the agent knows of the fake lvm2's groups, without a service."""

import configured
from fakes.devices import FakeDevices
from fakes.disks import FakeDisks
from fakes.lvm import FakeLvm

from agent.core.inventory import Inventory
from agent.core.volume_groups import VolumeGroups
from lvm.lvm2 import Lvm


def machine(*disk_extents: int) -> tuple[Lvm, FakeLvm]:
    """A fake lvm2 with a group `data` of such disks, and how it is called."""
    fake = FakeLvm(FakeDevices())
    fake.add_group("data", disk_extents)
    return Lvm(lambda *words: fake(words), settings=()), fake


def inventory(fake: FakeLvm, *groups: str, lvm: Lvm | None = None) -> Inventory:
    """The inventory of some groups; `lvm` is lvm2 as a test calls it."""
    node = lvm or Lvm(lambda *words: fake(words), settings=())
    return Inventory(
        VolumeGroups(node, FakeDisks(fake, fake.devices), fake, configured.on_groups(*groups)), fake
    )
