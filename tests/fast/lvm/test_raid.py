"""One table of RAID levels says which images may be lost, to health, repair and replacement."""

from collections.abc import Callable, Mapping
from itertools import product

import pytest

from lvm import raid

# Those that Carver makes have their parity in docs/volumes.md, which test_docs.py compares.
BY_HAND = {"raid0": 0, "raid4": 1}
MADE = [one for one in raid.LEVELS.values() if not one.by_hand]

# Which images each piece of data is on, by md(4), without stripes and with: as raid10, "near".
HOLDERS: Mapping[bool, Callable[[int], list[set[int]]]] = {
    False: lambda images: [set(range(images))],
    True: lambda images: [
        {2 * piece % images, (2 * piece + 1) % images} for piece in range(2 * images)
    ],
}


@pytest.mark.parametrize(
    ("name", "images"),
    [
        (one.name, images)
        for one in MADE
        if one.mirrored
        for images in ((4, 6, 8) if one.striped else (2, 3, 4))
    ],
)
def test_data_are_lost_with_the_last_image_of_a_piece(name: str, images: int) -> None:
    for lost in product((False, True), repeat=images):
        left = {number for number, gone in enumerate(lost) if not gone}
        is_whole = all(one & left for one in HOLDERS[raid.LEVELS[name].striped](images))
        assert raid.LEVELS[name].survives(lost) == is_whole, lost


@pytest.mark.parametrize(
    ("name", "parity"),
    [*BY_HAND.items(), *((one.name, one.parity) for one in MADE if not one.mirrored)],
)
def test_as_many_images_may_be_lost_as_there_is_parity(name: str, parity: int) -> None:
    for lost in product((False, True), repeat=6):
        assert raid.LEVELS[name].survives(lost) == (sum(lost) <= parity)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        *(([name], name) for name in raid.LEVELS),
        (["raid10_near"], "raid10"),
        (["raid5_ls"], "raid5"),
        ({"raid", "raid5", "raid5_ls"}, "raid5"),
        ({"raid", "raid6", "raid6_zr"}, "raid6"),
        ({"raid", "raid1"}, "raid1"),
        ({"raid", "raid0", "raid0_meta"}, "raid0"),
        ({"raid", "raid4"}, "raid4"),
    ],
)
def test_lvm2_s_words_and_the_kernel_s_name_give_the_level(words: list[str], name: str) -> None:
    assert raid.level(words) is raid.LEVELS[name]


@pytest.mark.parametrize("words", [["linear"], {"thin", "pool"}, {"raid"}, []])
def test_other_layouts_have_no_raid_level(words: list[str]) -> None:
    assert raid.level(words) is None
