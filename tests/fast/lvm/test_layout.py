"""The capacity that is reported can be made, and one extent more cannot: the arithmetic.

tests/contract/test_capacity.py holds the same to lvm2's own allocation.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import chosen
import configured
import pytest
from fakes.known import machine
from fakes.lvm import FakeVolume
from hypothesis import given, settings
from hypothesis import strategies as st

from lvm import layout, lvm_errors, report, volumes
from lvm.layout import Layout, Reserve
from lvm.lvm2 import Lvm
from lvm.room import Room

LAYOUTS = configured.THICK
EXTENT = 4 << 20
EXAMPLES = 1000 if chosen.every else 300


def make(lvm: Lvm, group: report.Group, name: str, size_bytes: int, shape: Layout) -> None:
    disks = layout.placement(Room(group), shape)
    new = volumes.New(name, size_bytes, {})
    volumes.create(lvm, "data", new, layout=shape, disks=disks)


def check(disks: Sequence[tuple[int, int, bool]], shape: Layout) -> None:
    """What is reported can be made, and one row more cannot; disks are free, used, allocatable."""
    lvm, fake = machine(*(free + used for free, used, _ in disks))
    there = fake.groups["data"]
    filler = FakeVolume("filler", "0", {})
    for disk, (_, used, allocatable) in zip(there.disks, disks, strict=True):
        filler.extents[disk.name], disk.allocatable = used, allocatable
    there.volumes["filler"] = filler
    group = report.read(lvm).group("data")
    maximum = layout.maximum_bytes(Room(group), shape)
    assert maximum % (EXTENT * shape.stripes) == 0
    with pytest.raises(lvm_errors.NoSpace):
        make(lvm, group, "too-large", maximum + EXTENT * shape.stripes, shape)
    if maximum:
        make(lvm, group, "largest", maximum, shape)
        assert there.volumes["largest"].length * EXTENT == maximum


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    disks=st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 30), st.booleans()), min_size=1, max_size=7
    ),
    shape=st.sampled_from(LAYOUTS),
)
def test_the_maximum_can_be_made_and_one_row_of_extents_more_cannot(
    disks: list[tuple[int, int, bool]], shape: Layout
) -> None:
    check(disks, shape)


def test_the_same_holds_for_thousands_of_states() -> None:
    # Hypothesis is the better one at finding a case, and takes four times as long for one.
    chance = random.Random(1)
    for number in range(10_000 if chosen.every else 2_500):
        disks = [
            (chance.randint(0, 60), chance.randint(0, 30), chance.random() < 0.9)
            for _ in range(chance.randint(1, 8))
        ]
        check(disks, LAYOUTS[number % len(LAYOUTS)])


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    free=st.lists(st.integers(2, 60), min_size=6, max_size=7),
    shape=st.sampled_from(LAYOUTS),
    rows=st.integers(1, 3),
)
def test_a_volume_grows_by_the_maximum_and_no_further(
    free: list[int], shape: Layout, rows: int
) -> None:
    lvm, _ = machine(*(one + 5 for one in free))
    size = rows * shape.stripes * EXTENT
    make(lvm, report.read(lvm).group("data"), "v", size, shape)
    group = report.read(lvm).group("data")
    volume = group.volume("v")
    more = layout.maximum_growth_bytes(Room(group), volume, shape)
    disks = layout.growth_placement(Room(group), volume, shape)
    beyond = size + more + EXTENT * shape.stripes
    with pytest.raises(lvm_errors.NoSpace):
        volumes.extend(lvm, "data", "v", size_bytes=beyond, disks=disks)
    if more:
        volumes.extend(lvm, "data", "v", size_bytes=size + more, disks=disks)
    assert report.read(lvm).group("data").volume("v").size_bytes == size + more


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    free=st.lists(st.integers(0, 60), min_size=1, max_size=7),
    shape=st.sampled_from(LAYOUTS),
    reserve=st.integers(0, 80),
)
def test_the_reserve_stays_free(free: list[int], shape: Layout, reserve: int) -> None:
    lvm, fake = machine(*free)
    group = report.read(lvm).group("data")
    maximum = layout.maximum_bytes(Room(group, reserve), shape)
    if maximum:
        make(lvm, group, "v", maximum, shape)
        left = sum(fake.groups["data"].free(disk) for disk in fake.groups["data"].disks)
        assert left >= reserve


@pytest.mark.parametrize(
    ("reserve", "extents"),
    [(Reserve(), 0), (Reserve(size_bytes=1), 1), (Reserve(percent=10), 10), (Reserve(0, 0.5), 1)],
)
def test_a_reserve_is_rounded_up_to_extents(reserve: Reserve, extents: int) -> None:
    lvm, _ = machine(60, 40)
    assert reserve.extents(report.read(lvm).group("data")) == extents


@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
def test_a_layout_survives_being_a_tag(shape: Layout) -> None:
    assert Layout.parse(str(shape)) == shape


@pytest.mark.parametrize(
    "text",
    [
        "",
        "raid7:1:1:0",
        "striped",
        "striped:x:0:0",
        "raid1:1:-1:0",
        "linear:2",
        "raid1",
        "a:b:c",
        ":1",
    ],
)
def test_a_text_that_is_no_layout_is_never_taken_for_one(text: str) -> None:
    assert Layout.parse(text) is None


@given(st.text(max_size=30))
def test_whatever_a_tag_has_only_the_text_of_a_layout_is_one(text: str) -> None:
    found = Layout.parse(text)
    assert found is None or text.split(":")[0] == found.kind


@dataclass(frozen=True)
class Newer(Layout):
    """The layout of a newer version, with a field more."""

    further: int = 0


def test_a_further_field_is_in_the_tag_once_it_is_set_and_an_older_version_passes_over_it() -> None:
    older, newer = Layout("raid1", mirrors=1), Newer("raid1", mirrors=1, further=8192)
    assert Newer.parse(str(newer)) == newer
    assert Layout.parse(str(newer)) == older
    assert str(replace(newer, further=0)) == str(older) == "raid1:1:1:0"
    assert Newer.parse(str(older)) == replace(newer, further=0)
    assert Layout.parse(f"{newer}:a-word") == older


@pytest.mark.parametrize(
    ("kind", "stripes", "mirrors", "size", "words"),
    [
        ("linear", 2, 0, 0, "no stripes"),
        ("linear", 1, 1, 0, "no mirrors"),
        ("linear", 1, 0, 4096, "no stripe size"),
        ("striped", 1, 0, 0, "2 stripes"),
        ("striped", 2, 0, 5000, "power of two"),
        ("raid1", 1, 0, 0, "1 mirror"),
        ("raid5", 1, 0, 0, "2 stripes"),
        ("raid6", 2, 0, 0, "3 stripes"),
        ("raid10", 2, 0, 0, "1 mirror"),
        ("raid10", 2, 2, 0, "1 mirror, and no more"),
    ],
)
def test_a_layout_that_cannot_be_says_why(
    kind: str, stripes: int, mirrors: int, size: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Layout(kind, stripes, mirrors, size)


def test_disks_are_chosen_by_their_room_and_equal_ones_by_their_order() -> None:
    lvm, _ = machine(5, 9, 9, 7)
    group = report.read(lvm).group("data")
    chosen = layout.placement(Room(group), Layout("striped", stripes=3))
    assert chosen == tuple(group.disks[index].name for index in (1, 2, 3))
    assert layout.placement(Room(group), Layout()) == ()


def test_too_few_disks_have_room_for_nothing() -> None:
    for count, shape in itertools.product((1, 2, 3), LAYOUTS[1:]):
        lvm, _ = machine(*[50] * count)
        maximum = layout.maximum_bytes(Room(report.read(lvm).group("data")), shape)
        assert (maximum > 0) == (count >= shape.disks)


@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
@pytest.mark.parametrize("recorded", [*LAYOUTS, None], ids=str)
def test_the_layout_that_lvm2_reports_counts_and_what_is_recorded_where_it_is_the_same(
    shape: Layout, recorded: Layout | None
) -> None:
    """Whatever a volume was made as, and converted to by hand."""
    lvm, _ = machine(*[20] * 8)
    make(lvm, report.read(lvm).group("data"), "one", 12 * EXTENT, shape)
    made = report.read(lvm).group("data").volume("one")
    alike = replace(shape, stripe_size_bytes=0)
    is_same = recorded is not None and replace(recorded, stripe_size_bytes=0) == alike
    assert layout.actual(made, recorded) == (recorded if is_same else alike)
    # Of the last image nothing is left on any disk, or a stripe was moved to two.
    left = replace(made, images=made.images[:-1], disks=made.disks | {"another"})
    assert layout.actual(left, recorded) == (recorded if is_same else alike)


@pytest.mark.parametrize("kind", ["mirror", "raid,raid0", "raid,raid4", "thick,pool"])
@pytest.mark.parametrize("recorded", LAYOUTS, ids=str)
def test_a_layout_that_carver_does_not_make_is_not_taken_for_the_recorded_one(
    kind: str, recorded: Layout
) -> None:
    lvm, _ = machine(20, 20)
    make(lvm, report.read(lvm).group("data"), "one", 4 * EXTENT, layout.LINEAR)
    made = report.read(lvm).group("data").volume("one")
    assert layout.actual(replace(made, layout=frozenset(kind.split(","))), recorded) is None
