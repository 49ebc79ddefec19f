"""Write docs/chart.md: every value of the chart with its default and what it is for.

The meaning is the comment above the value in deploy/helm/carver/values.yaml.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
# This file is a program, and Python would look beside it only.
sys.path.insert(0, str(ROOT / "tests"))

from chart import documented  # noqa: E402
from chart.documented import Place, Value  # noqa: E402

PAGE = ROOT / "docs" / "chart.md"
_HEAD = """\
# Values of the chart

`make reference` writes this page from the comments of `deploy/helm/carver/values.yaml`.
[Install](install.md#with-helm) has the values that an installation needs,
[requirements](requirements.md) the ports and rights that they make. The chart refuses a value that
is not listed here.

A name such as `storageClasses[].class` is a key of each item of a list.
"""
# The heading of the values that are in no section.
_TOP = "The release"


def page() -> str:
    """Return the page's text."""
    defaults: dict[str, Any] = yaml.safe_load(documented.VALUES.read_text())
    every = list(documented.explained())
    parts = [_HEAD]
    for heading, own in _sections(every):
        parts.append(f"\n## {heading}\n")
        if own[0].is_section and own[0].comment:
            parts.append(f"\n{_linked(own[0].comment)}\n")
        parts.append("\n| value | default | meaning |\n|---|---|---|\n")
        for one in own[own[0].is_section :]:
            default = "" if one.is_section else _shown(_default(defaults, one.place))
            if one.comment:
                parts.append(f"| `{_name(one.place)}` | {default} | {_linked(one.comment)} |\n")
    return "".join(parts)


def _sections(every: list[Value]) -> Iterator[tuple[str, list[Value]]]:
    """Yield a heading and its values: those of no section first, each sidecar by itself."""
    parted: dict[str, list[Value]] = {_TOP: []}
    sections = {one.place for one in every if one.is_section}
    for one in every:
        place = one.place
        depth = 2 if place[:2] in sections and place[0] == "sidecars" else 1
        heading = "`" + ".".join(place[:depth]) + "`" if place[:1] in sections else _TOP
        parted.setdefault(heading, []).append(one)
    for heading, own in parted.items():
        if any(not one.is_section for one in own):
            yield heading, own


def _name(place: Place) -> str:
    return ".".join(place).replace(f".{documented.ITEM}", documented.ITEM)


def _default(values: Any, place: Place) -> Any:
    [(holder, key), *_] = documented.at(values, place)
    return holder[key]


def _shown(value: Any) -> str:
    """Return a default as it would be written in a file of values, on one line."""
    if value == "":
        return "empty"
    text = yaml.safe_dump(value, default_flow_style=True, width=1 << 20, sort_keys=False)
    return f"`{text.removesuffix('...' + chr(10)).strip()}`"


def _linked(comment: str) -> str:
    """Return a comment as Markdown in a cell; a file of docs/ that it names is a link."""
    return re.sub(r"docs/(\w+)\.md(#[\w-]+)?", r"[\1](\1.md\2)", comment)


if __name__ == "__main__":
    PAGE.write_text(page())
