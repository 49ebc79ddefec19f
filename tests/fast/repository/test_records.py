"""One place reads the logical volumes of a report, and one knows the states of a volume."""

import re
from pathlib import Path

from agent.volumes.volume_states import State

# What has no tags to go by: the cache's own comparisons, and tags by the volumes' UUIDs.
ALLOWED = {"records.py", "metadata_cache.py", "volume_group.py"}
_EVERY = re.compile(r"\.volumes\.(values|items)\(\)")
_ROOT = Path(__file__).parents[3] / "agent"


def test_no_other_module_goes_through_all_logical_volumes_of_a_group() -> None:
    """The functions `all_logical_volumes` and `usable_logical_volumes` of records.py do that."""
    every = (one for one in _ROOT.rglob("*.py") if one.name not in ALLOWED)
    found = {
        f"{path.relative_to(_ROOT)}: {line.strip()}"
        for path in every
        for line in path.read_text().splitlines()
        if _EVERY.search(line) and "group" in line
    }
    assert found == set()


# The table of states; their values in tags; those on the wire between two nodes of a move.
_NAME_STATES = {"volumes/volume_states.py", "core/tag.py", "extras/transfer/move.py"}
_STATE = re.compile(
    rf"\b(tag\.(READY|COPYING|WIPING|RECEIVING|MOVED)|State\.({'|'.join(State.__members__)}))\b"
)


def test_no_other_module_names_the_states_of_volumes() -> None:
    """Calls and lists go by the table, so that a new state is a row and the code that ends it."""
    named = {
        str(path.relative_to(_ROOT))
        for path in _ROOT.rglob("*.py")
        if _STATE.search(path.read_text())
    }
    assert named <= _NAME_STATES
