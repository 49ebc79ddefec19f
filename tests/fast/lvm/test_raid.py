"""One table of RAID levels says which images may be lost, to health, repair and replacement."""

from collections.abc import Callable, Mapping
from itertools import product

import pytest

from lvm import raid

# Which images each piece of data is on, by md(4): of a raid10 with two copies, "near".
HOLDERS: Mapping[str, Callable[[int], list[set[int]]]] = {
    "raid1": lambda images: [set(range(images))],
    "raid10": lambda images: [
        {2 * piece % images, (2 * piece + 1) % images} for piece in range(2 * images)
    ],
}


@pytest.mark.parametrize(
    ("name", "images"),
    [*(("raid10", images) for images in (4, 6, 8)), *(("raid1", images) for images in (2, 3, 4))],
)
def test_data_are_lost_with_the_last_image_of_a_piece(name: str, images: int) -> None:
    for lost in product((False, True), repeat=images):
        left = {number for number, gone in enumerate(lost) if not gone}
        is_whole = all(one & left for one in HOLDERS[name](images))
        assert raid.LEVELS[name].survives(lost) == is_whole, lost


@pytest.mark.parametrize(
    ("name", "parity"), [("raid0", 0), ("raid4", 1), ("raid5", 1), ("raid6", 2)]
)
def test_as_many_images_may_be_lost_as_there_is_parity(name: str, parity: int) -> None:
    for lost in product((False, True), repeat=6):
        assert raid.LEVELS[name].survives(lost) == (sum(lost) <= parity)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["raid10"], "raid10"),
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
