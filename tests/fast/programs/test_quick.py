"""`make quick` finds the tests of what was edited."""

import re
from pathlib import Path

import pytest
import quick

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests"
# Rooms that are no folder of the product.
OTHERS = {one for one in quick.TESTS if one.partition("/")[0] not in ("agent", "lvm", "mount")}


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
    assert folders == quick.TESTS.keys() - OTHERS


@pytest.mark.parametrize("one", quick.COMPLETE)
def test_each_test_that_runs_after_every_edit_is_there(one: str) -> None:
    path, _, name = one.partition("::")
    assert (TESTS / path).exists()
    assert not name or f"def {name}(" in (TESTS / path).read_text()


def test_every_test_that_reads_a_document_runs_after_an_edit_of_it() -> None:
    files = [path for tier in ("fast", "contract") for path in (TESTS / tier).rglob("test_*.py")]
    readers = {path for path in files if re.search(r'/ "docs\b', path.read_text())}
    run = {
        path
        for one in quick.chosen(["docs"], [])
        for found in [ROOT / one.partition("::")[0]]
        for path in ([found] if found.is_file() else found.rglob("test_*.py"))
    }
    assert readers - {Path(__file__)} <= run
    assert len(readers) > 5


@pytest.mark.parametrize(
    "name", ["lvm/report.py", "docs/metrics.md", "pyproject.toml", "README.md"]
)
def test_documents_lists_schemas_and_packaging_are_tested_after_any_edit(name: str) -> None:
    assert {f"tests/{one}" for one in quick.COMPLETE} <= {*quick.chosen([], [name])}


def test_an_edited_module_has_its_room_s_tests_run_and_an_edited_test_itself() -> None:
    own = ["tests/fast/cli/test_main.py", "tests/contract/test_thin.py"]
    needs_root = "tests/vm/test_idle.py"
    found = quick.chosen([], ["lvm/report.py", *own, needs_root, "README.md"])
    assert {"tests/fast/lvm", *own} <= {*found}
    assert "tests/fast/mount" not in found
    assert needs_root not in found
