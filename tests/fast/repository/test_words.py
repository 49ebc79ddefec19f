"""Plain words: the worst mannerisms are used no more, in the product and its documents."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Each word, and what to write for it.
WORDS = {
    r"nobody": "no caller, nothing, or name who",
    r"whoever": "the caller, or name who",
    r"deeds?": "an action",
    r"glances?|glimpses?": "cached state",
    r"behind the answers?": "in the background",
    r"carvings?": "an allocator",
    r"standstills?": "quiesce",
    r"withheld": "held",
    r"legs?": "an image, of a RAID",
    r"engines?": "a volume group",
    r"repoint\w*|re-point\w*": "rebind",
    r"told": "reported, logged, or the value's name",
}
FILES = [
    *(one for top in ("agent", "lvm", "mount") for one in (ROOT / top).rglob("*.py")),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / one for one in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
]


@pytest.mark.parametrize("word", WORDS)
def test_a_word_that_hides_the_idea_is_not_used(word: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(rf"(?<![a-zA-Z]){word}(?![a-zA-Z])", line, re.IGNORECASE)
    ]
    assert not found, f"write {WORDS[word]}"
