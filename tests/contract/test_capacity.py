"""lvm2 allocates the reported capacity, and not one row of extents more.

tests/fast/lvm/test_layout.py checks the arithmetic ten thousand times; here lvm2's own allocation
is asked, for random states of seven uneven disks (CARVER_STATES: how many). Fillers are never
activated, and `lvcreate --test` writes nothing, which saves time; each twentieth volume is created
in earnest.
"""

import os
import random
from dataclasses import dataclass, field

import configured
import pytest
from real.any import AnyHost

from lvm import groups, layout, lvm_errors, report, volumes
from lvm.layout import Layout
from lvm.lvm2 import Lvm
from lvm.room import Room
from mount import mount_errors as mount_errors

STATES = int(os.environ.get("CARVER_STATES", "12"))
IN_EARNEST_EVERY = 20
DISKS = (40, 33, 29, 21, 17, 9, 5)
LAYOUTS = configured.THICK


@dataclass
class Group:
    """A group whose disks are filled at random."""

    lvm: Lvm
    name: str
    chance: random.Random
    fillers: list[str] = field(default_factory=list)
    serial: int = 0

    def now(self) -> report.Group:
        return report.read(self.lvm).group(self.name)

    def change(self, known: report.Group) -> None:
        """Fill a part of a disk, remove fillers, or change which disks serve.

        A disk is closed or opened, kept for caches or not, marked as unclean or not.
        """
        # By size, since names of devices differ: the same seed gives the same states.
        disks = sorted(known.disks, key=lambda disk: disk.extents)
        roomy = [disk for disk in disks if Room(known).free_on(disk)]
        kind = self.chance.choice(("fill", "fill", "free", "allow", "keep", "mark"))
        if kind == "fill" and roomy:
            self._fill(self.chance.choice(roomy))
        elif kind == "keep":
            fast = [disk.name for disk in disks if disk.fast]
            option = "--deltag" if fast else "--addtag"
            chosen = fast or [self.chance.choice(disks).name]
            self.lvm("pvchange", option, report.FAST, "--", *chosen)
        elif kind == "mark":
            old, new = known.own_tags, {report.SWEEP_DISKS: self.chance.choice(disks).uuid}
            groups.mark(self.lvm, self.name, old_tags=old, new_tags={} if old else new)
        elif kind == "allow" or not self.fillers:
            names = [disk.name for disk in disks]
            some = self.chance.sample(names, self.chance.randint(1, 3))
            # More often allocatable, or nothing would be left soon.
            answer = self.chance.choice("yyn")
            self.lvm("pvchange", "--allocatable", answer, "--", *some)
        else:
            some = self.chance.sample(
                self.fillers, self.chance.randint(1, -(-len(self.fillers) // 2))
            )
            self.lvm("lvremove", "--yes", "--", *(f"{self.name}/{one}" for one in some))
            self.fillers = [one for one in self.fillers if one not in some]

    def _fill(self, disk: report.PhysicalVolume) -> None:
        self.serial += 1
        name, extents = f"filler{self.serial}", self.chance.randint(1, disk.unallocated_extents)
        idle = ("--activate", "n", "--zero", "n", "--wipesignatures", "n")
        self.lvm(
            *("lvcreate", "--yes", *idle, "--type", "linear"),
            *("--size", f"{extents * (4 << 20)}b", "--name", name, "--", self.name, disk.name),
        )
        self.fillers.append(name)


def trying(lvm: Lvm) -> Lvm:
    """lvm2 that allocates, and writes nothing."""
    return Lvm(lambda *words: lvm.run(*words[:2], "--test", *words[2:]), lvm.devices, lvm.settings)


def make(lvm: Lvm, group: report.Group, size_bytes: int, shape: Layout) -> None:
    disks = layout.placement(Room(group), shape)
    new = volumes.New("largest", size_bytes, {})
    volumes.create(lvm, group.name, new, layout=shape, disks=disks)


@pytest.mark.timeout(20 * STATES)
def test_lvm2_makes_what_is_reported_and_nothing_larger(host: AnyHost) -> None:
    name = host.new_group(*DISKS)
    group = Group(host.lvm, name, random.Random(7))
    seen = dict.fromkeys(LAYOUTS, 0)
    try:
        for number in range(STATES):
            known, shape = group.now(), LAYOUTS[number % len(LAYOUTS)]
            maximum = layout.maximum_bytes(Room(known), shape)
            in_earnest = number % IN_EARNEST_EVERY == 0
            lvm = group.lvm if in_earnest else trying(group.lvm)
            state = [Room(known).free_on(disk) for disk in known.disks]
            with pytest.raises(lvm_errors.NoSpace):
                make(lvm, known, maximum + known.extent_size_bytes * shape.stripes, shape)
            if maximum:
                seen[shape] += 1
                try:
                    make(lvm, known, maximum, shape)
                except mount_errors.CommandError as error:
                    raise AssertionError(f"state {number}, {shape}: {state}") from error
            if maximum and in_earnest:
                serving = {disk.uuid for disk in Room(known).slow}
                assert group.now().volume("largest").disks <= serving
                volumes.remove(lvm, name, "largest")
            group.change(known)
        assert min(seen.values()) > STATES // len(LAYOUTS) // 2, "most states have room"
    finally:
        every = [disk.name for disk in group.now().disks]
        host.lvm("pvchange", "--allocatable", "y", "--", *every)
        host.lvm("pvchange", "--deltag", report.FAST, "--", *every)
        groups.mark(host.lvm, name, old_tags=group.now().own_tags)
