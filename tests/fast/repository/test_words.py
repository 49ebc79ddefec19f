"""Plain words: the worst mannerisms are used no more, in the product and its documents."""

import ast
import re
from collections.abc import Iterator
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


# A number beside its noun: "1 disks" is wrong, and so is "1 disk(s)".
_COUNTED = (
    *("disk", "volume", "snapshot", "node", "group", "object", "sector", "image", "command"),
    *("range", "call", "failure", "day", "hour", "minute", "pod", "claim", "file", "device"),
    *("extent", "image", "member", "orphan", "header", "key", "entrie", "attempt", "thread"),
)
_PLURAL = rf" (?:(?:logical|free|present|missing|deleted|thin) )*(?:{'|'.join(_COUNTED)})s\b"
# What is never 1, by the expression that is formatted: limits, and a RAID's images.
_NEVER_ONE = {"places", "self._waiter_limit", "len(status.health)"}


def numbers_beside_plurals(path: Path) -> Iterator[str]:
    """The places of a module where a number that may be 1 stands beside a plural."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            for value, after in zip(node.values, node.values[1:], strict=False):
                if not (isinstance(value, ast.FormattedValue) and isinstance(after, ast.Constant)):
                    continue
                expression = ast.unparse(value.value)
                is_other = expression in _NEVER_ONE or re.search(
                    r"\.join\(|^_?[A-Z_]+$", expression
                )
                if re.match(_PLURAL, str(after.value)) and not is_other:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}: {expression}{after.value!r}"
        elif isinstance(node, ast.Constant) and isinstance(text := node.value, str):
            if not re.search(rf"%d{_PLURAL}|[a-z]\((?:s|es)\)", text):
                continue
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {text[:60]}"


def test_a_number_has_its_noun_in_the_singular_where_it_is_one() -> None:
    modules = [path for path in FILES if path.suffix == ".py"]
    assert [one for path in modules for one in numbers_beside_plurals(path)] == [], (
        "write counted(number, noun), of mount/text.py"
    )


def test_a_plural_beside_a_number_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    found = tmp_path / "found.py"
    found.write_text(
        'a = f"has {len(found)} disks"\nb = f"{n} logical volumes, of"\nc = "%d failures"\n'
        'd = f"{n} command(s)"\ne = f"{_MOST} snapshots"\nf = f"{places} calls"\n'
        'g = f"has {counted(n, noun)} left"\n'
    )
    lines = [int(one.split(":")[1]) for one in numbers_beside_plurals(found)]
    assert sorted(lines) == [1, 2, 3, 4]
