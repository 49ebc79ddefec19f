"""The states of several groups, some of which hang."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import expect
import pytest
from fakes.host import FakeHost

from agent.core import records
from agent.core import volume_group as module
from agent.core.inventory import Inventory
from agent.core.volume_groups import VolumeGroups
from lvm import volumes

SICK = ["a", "b", "c"]


class Hanging:
    """lvm2 does not answer for the sick groups, until it is let go."""

    def __init__(self, fake: FakeHost, volume_groups: VolumeGroups) -> None:
        self.asked: set[str] = set()
        self.over = threading.Event()
        self._disks = {volume_groups.lvm(one).devices[0]: one for one in SICK}
        for one in SICK:
            fake.lvm2.groups[one].seqno += 1
        fake.intercept = self

    def __call__(self, words: Sequence[str]) -> None:
        for disk, name in self._disks.items():
            if disk in " ".join(words):
                self.asked.add(name)
                assert self.over.wait(30)


@pytest.fixture
def node(tmp_path: Path) -> tuple[Inventory, Hanging]:
    fake = FakeHost(tmp_path)
    for one in [*SICK, "sound"]:
        fake.lvm2.add_group(one)
    volume_groups = VolumeGroups(fake.lvm, fake.disks, fake.devices, [*SICK, "sound"])
    known = Inventory(volume_groups, fake.devices)
    known.state()
    return known, Hanging(fake, volume_groups)


@pytest.mark.parametrize("group", ["sound", ""])
def test_groups_that_hang_are_waited_for_together(
    node: tuple[Inventory, Hanging], monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    monkeypatch.setattr(module, "_SHORT_WAIT_SECONDS", 30)
    known, hanging = node
    with ThreadPoolExecutor(1) as caller:
        read = caller.submit(known.state, *filter(None, [group]), quick=not group)
        expect.soon(lambda: hanging.asked == set(SICK), lambda: hanging.asked)
        hanging.over.set()
        assert set(read.result(20).groups) == {*SICK, "sound"}


def test_tags_are_read_once_for_each_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeHost(tmp_path)
    group = fake.lvm2.add_group("sound")
    volume_groups = VolumeGroups(fake.lvm, fake.disks, fake.devices, ["sound"])
    known = Inventory(volume_groups, fake.devices)
    for name in ("a", "b"):
        new = volumes.New(f"vol-{name}", 4 << 20, {"name": name})
        volumes.create(volume_groups.lvm("sound"), "sound", new)
    found = [one.name for one in known.all(known.state())]
    assert found == ["vol-a", "vol-b"]
    with monkeypatch.context() as patch:
        patch.setattr(records, "volume", lambda *_: pytest.fail("a volume was read again"))
        assert [one.name for one in known.all(known.state())] == found
    del group.volumes["vol-a"]
    group.seqno += 1
    assert [one.name for one in known.all(known.state())] == ["vol-b"]
