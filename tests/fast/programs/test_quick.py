"""`make quick` finds the tests of what was edited."""

from pathlib import Path

import pytest
import quick

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("room", quick.TESTS)
def test_each_room_is_there_and_has_tests(room: str) -> None:
    assert (ROOT / room).is_dir()
    for pattern in quick.TESTS[room]:
        assert list((ROOT / "tests").glob(pattern)), pattern


def test_every_folder_of_the_product_is_in_a_room() -> None:
    folders = {
        str(path.parent.relative_to(ROOT))
        for top in ("agent", "lvm", "mount")
        for path in (ROOT / top).rglob("*.py")
        if not path.stem.startswith("__")
    }
    assert folders == {one for one in quick.TESTS if one not in ("docs", "deploy")}


def test_an_edited_module_has_its_room_s_tests_run_and_an_edited_test_itself() -> None:
    found = quick.chosen([], ["lvm/report.py", "tests/fast/cli/test_main.py", "README.md"])
    assert "tests/fast/lvm" in found
    assert "tests/fast/cli/test_main.py" in found
    assert "tests/fast/mount" not in found
