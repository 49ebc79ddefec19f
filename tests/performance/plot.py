"""The ratios beside their targets, as a picture: one line for each, on a logarithmic scale."""

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from performance.document import Run
from performance.rows import PROMISES, RATIO, Promise, Row

# What is cheaper or dearer than that is drawn at the edge.
_LEAST, _MOST = 0.02, 10.0
_MARKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_LEFT, _WIDTH, _RIGHT = 430, 480, 110
_LINE, _HEAD, _FOOT = 22, 74, 26
_MET, _MISSED, _NO_TARGET = "#1a7f37", "#cf222e", "#57606a"
_STYLE = (
    "text{font:12px sans-serif;fill:#24292f}.faint{fill:#57606a}"
    ".grid{stroke:#d0d7de}.one{stroke:#24292f}.target{stroke:#0969da;stroke-width:3}"
    ".before{stroke:#d4a72c;stroke-width:6;stroke-linecap:round}"
)


def svg(runs: Sequence[Run]) -> str:
    """The picture of some runs' ratios; each run has a shape of its own."""
    promises = [one for one in PROMISES if one.unit == RATIO and one.target is not None]
    width, height = _LEFT + _WIDTH + _RIGHT, _HEAD + _LINE * len(promises) + _FOOT
    bottom = height - _FOOT
    shown = [run for run in runs if any(row.unit == RATIO for row in run.rows)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        f' width="{width}" height="{height}" role="img">',
        "<title>What Carver's calls take, as ratios to bare commands</title>",
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *_legend(shown),
        *_scale(bottom),
    ]
    for number, promise in enumerate(promises):
        parts += _line(promise, shown, _HEAD + _LINE * number + _LINE // 2)
    return "\n".join([*parts, "</svg>"]) + "\n"


def place(ratio: float) -> float:
    """Where on the scale a ratio is, from the picture's left edge."""
    within = min(max(ratio, _LEAST), _MOST)
    return _LEFT + _WIDTH * math.log(within / _LEAST) / math.log(_MOST / _LEAST)


def _scale(bottom: int) -> Iterator[str]:
    for mark in _MARKS:
        x, kind = place(mark), "one" if mark == 1 else "grid"
        yield f'<line class="{kind}" x1="{x:.1f}" y1="{_HEAD}" x2="{x:.1f}" y2="{bottom}"/>'
        yield _text(f"{mark:g}", x, bottom + 17, anchor="middle", kind="faint")


def _legend(runs: Sequence[Run]) -> Iterator[str]:
    yield _text("Ratio to the bare commands: 1 is as fast, left of it faster", 12, 20)
    yield '<line class="target" x1="18" y1="32" x2="18" y2="48"/>'
    yield _text("target, at most", 28, 44)
    yield '<line class="before" x1="150" y1="40" x2="170" y2="40"/>'
    yield _text("before", 180, 44)
    x = 250
    for number, run in enumerate(runs):
        yield _shape(number, x, 40, _MET)
        yield _text(f"{run.name} (red: target missed)", x + 12, 44)
        x += 230


def _line(promise: Promise, runs: Sequence[Run], y: int) -> Iterator[str]:
    yield _text(f"{promise.name} : {promise.beside}", _LEFT - 14, y + 4, anchor="end")
    if promise.before is not None:
        least, most = map(place, promise.before)
        yield f'<line class="before" x1="{least:.1f}" y1="{y}" x2="{most:.1f}" y2="{y}"/>'
    if promise.target is not None:
        x = place(promise.target)
        yield f'<line class="target" x1="{x:.1f}" y1="{y - 8}" x2="{x:.1f}" y2="{y + 8}"/>'
    values = []
    for number, run in enumerate(runs):
        for row in run.rows:
            if row.name == promise.name:
                yield _shape(number, place(row.value), y, colour(row))
                values.append(f"{row.value:.2f}")
    yield _text(" / ".join(values), _LEFT + _WIDTH + 10, y + 4)


def colour(row: Row) -> str:
    return {True: _MET, False: _MISSED, None: _NO_TARGET}[row.is_met]


def _shape(number: int, x: float, y: float, fill: str) -> str:
    if number == 0:
        return f'<circle cx="{x:.1f}" cy="{y}" r="5" fill="{fill}"/>'
    points = f"{x:.1f},{y - 6} {x + 6:.1f},{y} {x:.1f},{y + 6} {x - 6:.1f},{y}"
    return f'<polygon points="{points}" fill="#ffffff" stroke="{fill}" stroke-width="2"/>'


def _text(words: str, x: float, y: float, *, anchor: str = "start", kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
