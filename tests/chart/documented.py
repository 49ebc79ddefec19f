"""What values.yaml offers: each value's place, and whether a comment stands above it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "carver"
VALUES = CHART / "values.yaml"

Place = tuple[str, ...]

# Of a list: its first item, which shows what each may have.
ITEM = "[]"


@dataclass(frozen=True)
class Value:
    """A value of the chart, or a section of values, and the comment above it."""

    place: Place
    comment: str
    is_section: bool = False


def explained() -> Iterator[Value]:
    """Yield each section and each value, in the order of the file.

    What stands in braces or brackets is one value, whatever is in it.
    """
    above: list[tuple[int, Place]] = []
    comment: list[str] = []
    for line in VALUES.read_text().splitlines():
        if not line.strip():
            comment.clear()
            continue
        # An item's dash is a blank, and a place of its own.
        is_item = line.lstrip().startswith("- ")
        text = line.replace("- ", "  ", 1) if is_item else line
        indent = len(text) - len(text.lstrip())
        while above and above[-1][0] >= (indent - 1 if is_item else indent):
            above.pop()
        if is_item and above:
            above.append((indent - 1, (*above[-1][1], ITEM)))
        if text.lstrip().startswith("#"):
            comment.append(text.strip().removeprefix("#").strip())
        elif match := re.fullmatch(r"\s*(\w+):(.*)", text):
            place = (*(above[-1][1] if above else ()), match[1])
            is_section = not match[2].strip()
            yield Value(place, " ".join(comment), is_section)
            if is_section:
                above.append((indent, place))
            comment.clear()
        else:
            comment.clear()


def places(*, commented: bool | None = None) -> Iterator[Place]:
    """The values, those with others in them left out; `commented` for a part of them."""
    for one in explained():
        if not one.is_section and commented in (None, bool(one.comment)):
            yield one.place


def at(values: Any, place: Place) -> list[tuple[Any, str]]:
    """The maps in which there is a value of that place, and its key there."""
    if not values:
        return []
    if len(place) == 1:
        return [(values, place[0])] if place[0] in values else []
    if place[0] == ITEM:
        return [found for one in values for found in at(one, place[1:])]
    return at(values.get(place[0]), place[1:])
