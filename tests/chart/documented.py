"""What values.yaml offers: each value's place, and whether a comment stands above it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "carver"
VALUES = CHART / "values.yaml"

Place = tuple[str, ...]

# Of a list: its first item, which shows what each may have.
ITEM = "[]"


def places(*, commented: bool | None = None) -> Iterator[Place]:
    """The values, those with others in them left out; `commented` for a part of them.

    What stands in braces or brackets is one value, whatever is in it.
    """
    above: list[tuple[int, Place]] = []
    has_comment = False
    for line in VALUES.read_text().splitlines():
        if not line.strip():
            has_comment = False
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
            has_comment = True
        elif match := re.fullmatch(r"\s*(\w+):(.*)", text):
            place = (*(above[-1][1] if above else ()), match[1])
            if match[2].strip():
                if commented in (None, has_comment):
                    yield place
            else:
                above.append((indent, place))
            has_comment = False
        else:
            has_comment = False


def at(values: Any, place: Place) -> list[tuple[Any, str]]:
    """The maps in which there is a value of that place, and its key there."""
    if not values:
        return []
    if len(place) == 1:
        return [(values, place[0])] if place[0] in values else []
    if place[0] == ITEM:
        return [found for one in values for found in at(one, place[1:])]
    return at(values.get(place[0]), place[1:])
