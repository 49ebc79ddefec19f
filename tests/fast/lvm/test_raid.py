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


@pytest.mark.parametrize("images", [4, 6, 8])
def test_a_raid10_loses_data_with_both_images_of_a_pair_and_with_nothing_less(images: int) -> None:
    _with_copies("raid10", images)


@pytest.mark.parametrize("images", [2, 3, 4])
def test_a_raid1_loses_data_with_its_last_image(images: int) -> None:
    _with_copies("raid1", images)


def _with_copies(name: str, images: int) -> None:
    for lost in product((False, True), repeat=images):
        left = {number for number, gone in enumerate(lost) if not gone}
        is_whole = all(one & left for one in HOLDERS[name](images))
        assert raid.LEVELS[name].survives(lost) == is_whole, lost


@pytest.mark.parametrize(
    ("name", "parity"), [("raid0", 0), ("raid4", 1), ("raid5", 1), ("raid6", 2)]
)
def test_with_parity_any_images_may_be_lost_and_so_many_only(name: str, parity: int) -> None:
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
def test_lvm2_s_words_and_the_kernel_s_name_tell_the_level(words: list[str], name: str) -> None:
    assert raid.level(words) is raid.LEVELS[name]


@pytest.mark.parametrize("words", [["linear"], {"thin", "pool"}, {"raid"}, []])
def test_what_is_no_raid_has_no_level(words: list[str]) -> None:
    assert raid.level(words) is None
