"""Write docs/modules.md: every module in one sentence, which is the first line of its docstring."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The folders that Carver is made of, each with its heading.
_FOLDERS = {
    "agent": "Carver above LVM and the kernel",
    "lvm": "LVM",
    "mount": "The kernel",
    "vagrant": "The lab",
    "tests": "What the tests share, and tests that are programs",
}
_HEAD = """\
# Every module in one sentence

`make modules` writes this page from the first lines of the modules' docstrings.
[where.md](where.md) says how each kind of change is made, [design.md](design.md) how the rooms
stand on each other.
"""
# Folders whose modules are one kind of test each, which docs/testing.md describes.
_TESTS = (
    "fast",
    "contract",
    "callers/test_",
    "vm",
    "chart",
    "container",
    "lab",
    "prometheus/test_",
)


def page() -> str:
    """Return the page's text."""
    parts = [_HEAD]
    for folder, heading in _FOLDERS.items():
        parts.append(f"\n## {heading}\n")
        rooms: dict[str, list[str]] = {}
        for path in _modules(folder):
            rooms.setdefault(str(path.parent), []).append(f"- `{path.name}`: {first_line(path)}")
        for room, lines in sorted(rooms.items()):
            parts.append(f"\n### {room}\n\n" + "\n".join(lines) + "\n")
    return "".join(parts)


def first_line(module: Path) -> str:
    """Return the first line of a module's docstring; empty where it has none."""
    document = ast.get_docstring(ast.parse((ROOT / module).read_text())) or ""
    return document.partition("\n")[0]


def _modules(folder: str) -> list[Path]:
    every = (path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py"))
    return sorted(
        path
        for path in every
        if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
        and not path.name.startswith("test_")
        and not any(part.startswith(".") for part in path.parts)
        and not str(path).startswith(tuple(f"tests/{one}" for one in _TESTS))
        and first_line(path)
    )


if __name__ == "__main__":
    (ROOT / "docs" / "modules.md").write_text(page())
