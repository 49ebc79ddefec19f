"""What is changed by hand, behind Carver's back, is seen by the next call that depends on it.

lvm2's own commands, in random orders. After each of them a service that knew the group before
answers as one does that was just started.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import chosen
import configured
import grpc
import pytest
from fakes.host import FakeHost
from fakes.lvm import repairs
from real.any import AnyHost
from real.host import RealHost
from serving import served

from agent.csi.client import Client, block
from lvm import report
from lvm.room import Room
from mount import mount_errors as mount_errors

MIB = 1 << 20
EXTENT = 4 * MIB
CHANGES = 5


class Hand:
    """An operator at the node, with a group of two disks and a third one at hand."""

    def __init__(self, host: AnyHost, group: str, disks: list[str], seed: int) -> None:
        self._host, self.group, self._disks = host, group, disks
        # What the group is called now.
        self._name = group
        self._random = random.Random(seed)
        self._serial = 0
        self.done: list[str] = []

    def do(self) -> None:
        """Make one change, or none where lvm2 refuses it."""
        of_volumes = (self._create, self._remove, self._rename, self._resize)
        of_groups = (self._extend, self._move, self._reduce, self._rename_group)
        change = self._random.choice((*of_volumes, *of_groups))
        self.done.append(change.__name__)
        with suppress(mount_errors.CommandFailed):
            change()

    def undo(self) -> None:
        """As it was, but for volumes."""
        if self._name != self.group:
            self._rename_group()
        for one in self._known().volumes:
            self._lvm("lvremove", "--yes", "--", f"{self.group}/{one}")
        there = {disk.name for disk in self._known().disks}
        for disk in set(self._disks[:2]) - there:
            self._lvm("vgextend", "--", self.group, disk)
        if self._disks[2] in there:
            self._lvm("vgreduce", "--", self.group, self._disks[2])

    def _lvm(self, *words: str, settings: Sequence[str] = ()) -> None:
        self._host.lvm(*words, settings=settings)

    def _known(self) -> report.Group:
        return report.read(self._host.lvm).group(self._name)

    def _volume(self) -> str:
        return self._random.choice(sorted(self._known().volumes) or ["none"])

    def _new(self) -> str:
        self._serial += 1
        return f"by-hand-{self._serial}"

    def _create(self) -> None:
        made = ("--wipesignatures", "y", "--zero", "y", "--type", "linear", "--activate", "y")
        size = ("--size", f"{EXTENT}b", "--name", self._new())
        self._lvm("lvcreate", "--yes", *made, *size, "--", self._name)

    def _remove(self) -> None:
        self._lvm("lvremove", "--yes", "--", f"{self._name}/{self._volume()}")

    def _rename(self) -> None:
        if (old := self._volume()) != "none":
            self._lvm("lvrename", "--", self._name, old, self._new())

    def _resize(self) -> None:
        if (found := self._volume()) != "none":
            size = self._known().volumes[found].size_bytes + EXTENT
            self._lvm("lvextend", "--size", f"{size}b", "--", f"{self._name}/{found}")

    def _extend(self) -> None:
        there = {disk.name for disk in self._known().disks}
        for disk in [one for one in self._disks if one not in there][:1]:
            self._lvm("vgextend", "--", self._name, disk)

    def _reduce(self) -> None:
        self._lvm("vgreduce", "--", self._name, self._random.choice(self._disks))

    def _move(self) -> None:
        room = Room(self._known())
        used = [one.name for one in room.group.disks if room.free_on(one) < one.extents]
        free = [one.name for one in room.group.disks if room.free_on(one) == one.extents]
        if used and free:
            if isinstance(self._host, FakeHost):
                repairs.move(self._host.lvm2, used[0], free[0])
                repairs.moved(self._host.lvm2.groups[self._name])
            else:
                polls = ("global/use_lvmpolld=0",)
                self._lvm("pvmove", "--", used[0], free[0], settings=polls)

    def _rename_group(self) -> None:
        new = f"{self.group}-other" if self._name == self.group else self.group
        self._lvm("vgrename", "--", self._name, new)
        self._name = new


def answers(client: Client, ids: list[str], chance: random.Random) -> dict[str, object]:
    """The answers of all calls about the group, in a random order: any may be the next one."""
    calls: dict[str, Callable[[], object]] = {
        "capacity": lambda: client.capacity().available_capacity,
        "list": lambda: [(one.volume_id, one.capacity_bytes) for one in client.volumes()],
        **{one: partial(_size, client, one) for one in ids},
        **{f"valid {one}": partial(client.confirms, one, block()) for one in ids},
    }
    found: dict[str, object] = {}
    for name in chance.sample(sorted(calls), len(calls)):
        try:
            found[name] = calls[name]()
        except grpc.RpcError as error:
            found[name] = error.code().name
    return found


def _size(client: Client, volume_id: str) -> int:
    return client.volume(volume_id).volume.capacity_bytes


@pytest.mark.variation
def test_changes_by_hand_are_seen_by_the_next_call(host: AnyHost, tmp_path: Path) -> None:
    # On real LVM each takes a minute or two.
    orders = 4 if isinstance(host, RealHost) else 100 if chosen.every else 40
    asked = chosen.numbers("CARVER_BY_HAND", seed=1, orders=orders)
    group = f"by-hand-{tmp_path.parent.name[-8:]}"
    disks = [host.new_device(MIB + 12 * EXTENT) for _ in range(3)]
    config = configured.carver(tmp_path, group)
    with host.own_group(group, disks[:2]), served(host, config) as (_, known):
        for order in range(asked["orders"]):
            chance = random.Random(f"{asked['seed']}-{order}")
            hand = Hand(host, group, disks, chance.randrange(1 << 30))
            ids = [known.create(f"v{one}", EXTENT, block()).volume_id for one in range(2)]
            for number in range(CHANGES):
                hand.do()
                fresh = replace(config, endpoint=tmp_path / f"{order}-{number}.sock")
                found = answers(known, ids, chance)
                with served(host, fresh) as (_, beside):
                    assert found == answers(beside, ids, chance), (order, hand.done)
            hand.undo()
            assert known.volumes() == [], (order, hand.done)
