"""No message advises what could destroy data: to delete, empty or make anew what may hold some."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = sorted(path for room in ("agent", "lvm", "mount") for path in (ROOT / room).rglob("*.py"))

_VERBS = (
    "delete|remove|empty|wipe|erase|format|reformat|recreate|re-create|discard|destroy|overwrite"
    "|zero|truncate|purge|drop"
)
# An imperative: at the beginning of a sentence or clause, or after "or", "and", "then".
_ADVICE = re.compile(
    rf"(?:^|[;:.(] ?|, |\b(?:or|and|then|first) )(?:{_VERBS})\b(?![-:;=])"
    rf"|\b(?:{_VERBS}) (?:it|them)\b"
    r"|\blvconvert\b.*--repair"
    r"|wipefs (?!--no-act)|\bmkfs\.|\b(?:lv|vg|pv)remove\b|\bpvcreate\b|--wipe",
    re.IGNORECASE,
)
# What is not advice about what may hold data, by the file and a part of the sentence.
_ALLOWED = {
    # What a command does, as its help has it: its user asks for it.
    ("agent/cli/arguments.py", ""),
    ("agent/extras/controller/controller_command_line.py", "delete the one of that name"),
    ("agent/extras/orphans/orphans_command_line.py", "orphan"),
    ("agent/extras/transfer/transfer_command_line.py", "erase and remove what was received"),
    ("agent/extras/transfer/transfer_command_line.py", "once the other node has it"),
    ("agent/extras/transfer/transfer_command_line.py", "make it this node's again"),
    ("agent/settings/classes.py", "{}.zero"),
    # Objects of the API server, whose PersistentVolume has the policy Retain meanwhile.
    ("agent/extras/transfer/claim_moves.py", "kubectl delete pvc"),
    ("agent/extras/kubernetes/rebinding.py", ""),
    ("agent/extras/controller/placement.py", "delete its Node object"),
    ("agent/extras/controller/nodes.py", "delete its Node if"),
    ("agent/extras/orphans/candidates.py", "delete its Node if"),
    # A key that is made anew.
    ("agent/extras/controller/authority.py", "and another is made"),
    # What Carver itself says that it does.
    ("agent/daemon/server.py", "empty pools"),
    ("agent/operations/adopt.py", "remove the tags"),
    # The pool works with others by then.
    ("agent/operations/repair.py", "once you have checked all volumes"),
    ("agent/core/errors.py", "remove the cause"),
}


def sentences(path: Path) -> Iterator[str]:
    """Every text in a module that has more than a word, but docstrings."""
    tree = ast.parse(path.read_text())
    docstrings = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
    parts: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts |= {id(one) for one in node.values}
            yield "".join(_text(one) for one in node.values)
        elif isinstance(node, ast.Constant) and id(node) not in docstrings | parts:
            yield from (one for one in [node.value] if isinstance(one, str) and " " in one)


def _text(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "{}"


def is_advice(sentence: str) -> bool:
    """Whether a sentence advises such a thing; a question that is to be confirmed does not."""
    return "?" not in sentence and _ADVICE.search(sentence) is not None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_message_advises_what_could_destroy_data(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    allowed = [part for file, part in _ALLOWED if file == name]
    found = [one for one in sentences(path) if is_advice(one)]
    assert not [one for one in found if not any(part in one for part in allowed)]


def test_what_is_allowed_is_still_there() -> None:
    for file, part in _ALLOWED:
        assert any(is_advice(one) and part in one for one in sentences(ROOT / file)), (file, part)


def test_the_table_of_errors_advises_no_such_thing() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text()
    rows = [
        line.split("|")[-2] for line in text.splitlines() if re.match(r"\| `\w+\.\w+` \|", line)
    ]
    assert len(rows) > 100
    assert not [one for one in rows if is_advice(one.strip())]


@pytest.mark.parametrize(
    "sentence",
    [
        "it is left untouched: ask for ext4, or empty the volume yourself",
        "restore it from a backup, or delete the volume",
        "it exists; delete it, or use another name",
        "exists and is not a file; remove it, it is not Carver's",
        "if nothing on it is needed, empty it with `wipefs --all /dev/sdb`",
        "format the device again",
        "pool {} needs a repair (`lvconvert --repair {}/{}`)",
    ],
)
def test_such_advice_is_recognized(sentence: str) -> None:
    assert is_advice(sentence)
