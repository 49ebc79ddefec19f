"""One place reads the logical volumes of a report: no reader can forget what is not Carver's."""

import re
from pathlib import Path

# What has no tags to go by: the cache's own comparisons, and tags by the volumes' UUIDs.
ALLOWED = {"records.py", "metadata_cache.py", "volume_group.py"}
_EVERY = re.compile(r"\.volumes\.(values|items)\(\)")
_ROOT = Path(__file__).parents[3] / "agent"


def test_no_other_module_goes_through_all_logical_volumes_of_a_group() -> None:
    """`records.usable` has those that this version may change, `records.every` all, to be shown."""
    every = (one for one in _ROOT.rglob("*.py") if one.name not in ALLOWED)
    found = {
        f"{path.relative_to(_ROOT)}: {line.strip()}"
        for path in every
        for line in path.read_text().splitlines()
        if _EVERY.search(line) and "group" in line
    }
    assert found == set()
