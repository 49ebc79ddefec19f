"""Which disks may serve, for every combination of what a disk can be: against lvm2's allocation.

The fake's lvm2 takes any open disk where none is named; tests/contract/test_capacity.py asks the
real one.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
from fakes.known import machine
from fakes.lvm import FakeLvm, FakeVolume

from lvm import caches, layout, lvm_errors, report, tags, thin, volumes
from lvm.caches import Cache
from lvm.layout import LINEAR, Layout, Reserve
from lvm.lvm2 import Lvm
from lvm.room import Room
from lvm.volumes import New

EXTENT = 4 << 20
EXTENTS = 12


@dataclass(frozen=True)
class Kind:
    """What a disk can be."""

    fast: bool
    allocatable: bool
    missing: bool
    unclean: bool
    used: int

    @property
    def is_open(self) -> bool:
        return self.allocatable and not self.missing

    def free_for(self, what: str) -> int:
        """The table of lvm/room.py, row by row."""
        match what, self.fast, self.is_open, self.unclean:
            case ("volumes" | "overwriters", False, True, False):
                return EXTENTS - self.used
            case ("overwriters", False, True, True):
                return EXTENTS - self.used
            case ("caches", True, True, False):
                return EXTENTS - self.used
        return 0


KINDS = [
    Kind(fast, allocatable, missing, unclean, used)
    for fast, allocatable, missing, unclean in itertools.product((False, True), repeat=4)
    for used in (0, 5, 12)
]
PAIRS = list(itertools.product(KINDS, repeat=2))
# lvm2 allocates only for images while a disk is missing.
PRESENT = [pair for pair in PAIRS if not any(kind.missing for kind in pair)]


def group_of(*kinds: Kind) -> tuple[Lvm, FakeLvm, report.Group]:
    """A group of such disks, each with a part of one volume where it is used."""
    lvm, fake = machine(*[EXTENTS] * len(kinds))
    there = fake.groups["data"]
    filler = FakeVolume("filler", "0", {})
    for disk, kind in zip(there.disks, kinds, strict=True):
        disk.allocatable, disk.missing = kind.allocatable, kind.missing
        disk.tags = {report.FAST} if kind.fast else set()
        filler.extents[disk.name] = kind.used
    there.volumes["filler"] = filler
    marked = [disk.uuid for disk, kind in zip(there.disks, kinds, strict=True) if kind.unclean]
    if marked:
        there.tags.add(tags.format_one(report.SWEEP_DISKS, report.BETWEEN.join(marked)))
    return lvm, fake, report.read(lvm).group("data")


def taken(fake: FakeLvm, extents: dict[str, int], kinds: Sequence[Kind]) -> Iterator[Kind]:
    """The kinds of the disks that an area lies on."""
    for disk, kind in zip(fake.groups["data"].disks, kinds, strict=True):
        if extents.get(disk.name):
            yield kind


def test_each_disk_serves_for_what_its_row_of_the_table_says() -> None:
    for kinds in PAIRS:
        _, _, group = group_of(*kinds)
        room, every = Room(group), list(zip(group.disks, kinds, strict=True))
        for what, found in (("volumes", room), ("overwriters", room.for_overwriting)):
            assert [found.free_on(one) for one in group.disks] == [
                kind.free_for(what) for kind in kinds
            ], (what, kinds)
            assert found.free_extents == sum(kind.free_for(what) for kind in kinds)
        assert room.fast_extents == sum(kind.free_for("caches") for kind in kinds)
        assert [*room.unclean] == [disk for disk, kind in every if kind.unclean and kind.used < 12]
        assert not {*room.slow} & {*room.fast}
        assert room.planned_extents == sum(EXTENTS for kind in kinds if not kind.fast)
        assert room.extents == sum(EXTENTS for kind in kinds if not (kind.fast or kind.missing))
        is_open = [kind.is_open and not kind.fast for kind in kinds]
        clean = [open_ and not kind.unclean for open_, kind in zip(is_open, kinds, strict=True)]
        assert room.is_unclean == (any(is_open) and not any(clean))


@pytest.mark.parametrize("is_overwriting", [False, True], ids=["a volume", "what overwrites"])
def test_lvm2_takes_no_disk_but_those_that_serve_and_all_that_is_free_there(
    is_overwriting: bool,
) -> None:
    rooms = 0
    for kinds in PRESENT:
        lvm, fake, group = group_of(*kinds)
        room = Room(group).for_overwriting if is_overwriting else Room(group)
        most = layout.maximum_bytes(room)
        assert most == room.free_extents * EXTENT
        with pytest.raises(lvm_errors.NoSpace):
            volumes.create(lvm, "data", New("v", most + EXTENT, {}), disks=room.disk_arguments())
        if most:
            rooms += 1
            volumes.create(lvm, "data", New("v", most, {}), disks=room.disk_arguments())
            what = "overwriters" if is_overwriting else "volumes"
            used = list(taken(fake, fake.groups["data"].volumes["v"].extents, kinds))
            assert used, kinds
            assert all(kind.free_for(what) for kind in used), kinds
    assert rooms > 80


STRIPED = Layout("striped", stripes=2)


def create_striped(lvm: Lvm, room: Room, size_bytes: int) -> None:
    disks = layout.placement(room, STRIPED)
    volumes.create(lvm, "data", New("v", size_bytes, {}), layout=STRIPED, disks=disks)


def test_a_stripe_lies_only_on_disks_that_serve() -> None:
    rooms = 0
    for kinds in PRESENT:
        lvm, fake, group = group_of(*kinds)
        room = Room(group)
        most = layout.maximum_bytes(room, STRIPED)
        with pytest.raises(lvm_errors.NoSpace):
            create_striped(lvm, room, most + 2 * EXTENT)
        if most:
            rooms += 1
            create_striped(lvm, room, most)
            used = list(taken(fake, fake.groups["data"].volumes["v"].extents, kinds))
            assert all(kind.free_for("volumes") for kind in used), kinds
    assert rooms > 3


def test_a_cache_lies_only_on_disks_that_serve_and_lvm2_is_never_left_the_choice() -> None:
    rooms, cache = 0, Cache(size=Reserve(size_bytes=4 * EXTENT))
    for kinds in PRESENT:
        lvm, fake, group = group_of(*kinds)
        most = caches.maximum_bytes(Room(group), cache)
        with pytest.raises(lvm_errors.NoSpace):
            caches.create(lvm, group, New("v", most + EXTENT, {}), cache)
        assert set(fake.groups["data"].volumes) == {"filler"}
        if most:
            rooms += 1
            caches.create(lvm, group, New("v", most, {}), cache)
            made = fake.groups["data"].volumes["v"]
            assert made.cache is not None
            for kind in taken(fake, made.cache.extents, kinds):
                assert kind.free_for("caches"), kinds
            for kind in taken(fake, made.extents, kinds):
                assert kind.free_for("volumes"), kinds
    assert rooms > 5


def test_images_are_rebuilt_on_vacant_disks_with_room_for_one() -> None:
    for kinds in PAIRS:
        _, _, group = group_of(*kinds)
        for own in range(2):
            lost = replace(group.volume("filler"), disks=frozenset({group.disks[own].uuid}))
            for extents in (1, 7, 8, 12, 13):
                expected = [
                    disk
                    for disk, kind in zip(group.disks, kinds, strict=True)
                    if disk.uuid not in lost.disks and kind.free_for("overwriters") >= extents
                ]
                assert Room(group).for_images(lost, extents) == expected


@pytest.mark.parametrize("shape", [LINEAR, STRIPED], ids=str)
def test_where_no_disk_serves_lvm2_is_not_asked_to_choose_one(shape: Layout) -> None:
    plain = Kind(fast=False, allocatable=True, missing=False, unclean=False, used=0)
    fast, unclean = replace(plain, fast=True), replace(plain, unclean=True)
    for kinds in ((fast, fast), (fast, unclean), (unclean, unclean)):
        _, _, group = group_of(*kinds)
        with pytest.raises(lvm_errors.NoDiskServes, match="no disk of volume group data"):
            layout.placement(Room(group), shape)


@pytest.mark.parametrize("kept", [0, 1, 11, 12, 13, 24, 30])
def test_what_is_kept_is_subtracted_once_from_what_is_free(kept: int) -> None:
    for kinds in PRESENT:
        _, _, group = group_of(*kinds)
        room = Room(group, kept)
        assert room.available_extents == max(0, room.free_extents - kept)
        assert room.for_overwriting.kept_extents == kept
        assert layout.maximum_bytes(room) == room.available_extents * EXTENT


def test_the_metadata_of_a_pool_are_sized_by_the_disks_that_it_may_grow_to() -> None:
    lvm, fake = machine(100_000, 400_000)
    assert thin.suitable_metadata_extents(report.read(lvm).group("data"), 1 << 20) == 39
    fake.groups["data"].disks[1].tags = {report.FAST}
    group = report.read(lvm).group("data")
    assert thin.suitable_metadata_extents(group, 1 << 20) == 8
    # A missing disk comes back.
    fake.groups["data"].disks[0].missing = True
    assert thin.suitable_metadata_extents(report.read(lvm).group("data"), 1 << 20) == 8


@pytest.mark.parametrize(
    "shape",
    [Layout("raid1", mirrors=1), Layout("raid5", stripes=2), Layout("raid10", 2, 1)],
    ids=str,
)
def test_an_image_is_counted_with_its_metadata(shape: Layout) -> None:
    lvm, fake = machine(*[40] * 4)
    group = report.read(lvm).group("data")
    new = New("v", 12 * EXTENT, {})
    volumes.create(lvm, "data", new, layout=shape, disks=layout.placement(Room(group), shape))
    made = report.read(lvm).group("data").volume("v")
    assert {layout.image_extents(made, EXTENT)} == {
        *fake.groups["data"].volumes["v"].extents.values()
    }
    assert layout.image_extents(replace(made, layout=frozenset({"raid", "raid4"})), EXTENT) == 1
