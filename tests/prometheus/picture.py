"""Panels of the dashboard as one picture: lines over time, and tiles with a number."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from prometheus.server import Series

_WIDTH, _HEIGHT, _GAP, _HEAD = 470, 210, 14, 34
_LEFT, _TOP, _RIGHT, _BOTTOM = 62, 30, 12, 58
_TILE = 62
_TILES = 5
_MOST_SERIES = 6
_COLOURS = ("#0969da", "#1a7f37", "#bc4c00", "#8250df", "#cf222e", "#57606a")
_STYLE = (
    "text{font:11px sans-serif;fill:#24292f}.title{font-weight:bold}.faint{fill:#57606a}"
    ".number{font:bold 20px sans-serif}.frame{fill:#fff;stroke:#d0d7de}.grid{stroke:#eaeef2}"
    ".line{fill:none;stroke-width:1.5}"
)
# What a value is multiplied by, and what is written after it.
_UNITS: Mapping[str, tuple[float, str]] = {
    "bytes": (1 / (1 << 20), " MiB"),
    "Bps": (1 / (1 << 20), " MiB/s"),
    "percentunit": (100, " %"),
    "percent": (1, " %"),
    "s": (1, " s"),
    "ops": (1, "/s"),
}


@dataclass(frozen=True)
class Drawn:
    """A panel and what it shows: series by their legends."""

    title: str
    unit: str
    series: Sequence[tuple[str, Series]]


def legend(template: str, labels: Mapping[str, str]) -> str:
    """A series' name in its panel, as Grafana makes it of a template."""
    for label, value in labels.items():
        template = template.replace(f"{{{{{label}}}}}", value)
    return " ".join(template.split())


def svg(title: str, tiles: Sequence[Drawn], panels: Sequence[Drawn]) -> str:
    """The picture: tiles above, panels in two columns below."""
    rows = (len(panels) + 1) // 2
    width = 2 * _WIDTH + 3 * _GAP
    below = _HEAD + (_TILE + _GAP if tiles else 0)
    height = below + rows * (_HEIGHT + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        f' width="{width}" height="{height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#f6f8fa"/>',
        _text(title, _GAP, 22, kind="title"),
    ]
    across = (width - _GAP) / _TILES
    for number, tile in enumerate(tiles[:_TILES]):
        parts += _tile(tile, _GAP + number * across, _HEAD, across - _GAP)
    for number, panel in enumerate(panels):
        x = _GAP + (number % 2) * (_WIDTH + _GAP)
        parts += _panel(panel, x, below + (number // 2) * (_HEIGHT + _GAP))
    return "\n".join([*parts, "</svg>"]) + "\n"


def shown(value: float, unit: str) -> str:
    """A value as a reader has it."""
    factor, after = _UNITS.get(unit, (1.0, ""))
    value *= factor
    if after.startswith(" MiB") and abs(value) >= 1024:
        value, after = value / 1024, after.replace("MiB", "GiB")
    elif after == " s" and 0 < abs(value) < 1:
        value, after = value * 1000, " ms"
    return f"{value:.3g}{after}" if abs(value) < 1000 else f"{value:.0f}{after}"


def _factor(unit: str) -> float:
    return _UNITS.get(unit, (1.0, ""))[0]


def _tile(tile: Drawn, x: float, y: float, width: float) -> Iterator[str]:
    yield _frame(x, y, width, _TILE)
    yield _text(tile.title, x + 10, y + 20, kind="faint")
    values = [one.values[-1][1] for _, one in tile.series if one.values]
    # One number for all: each node's is the same where all is well.
    number = " / ".join(shown(value, tile.unit) for value in dict.fromkeys(values)) or "no data"
    yield _text(number, x + 10, y + 48, kind="number")


def _panel(panel: Drawn, x: float, y: float) -> Iterator[str]:
    yield _frame(x, y, _WIDTH, _HEIGHT)
    yield _text(panel.title, x + 10, y + 19, kind="title")
    lines = [(name, _numbers(one)) for name, one in panel.series]
    lines = [(name, numbers) for name, numbers in lines if numbers]
    if not lines:
        yield _text("no data", x + _WIDTH / 2, y + _HEIGHT / 2, anchor="middle", kind="faint")
        return
    times = [seconds for _, numbers in lines for seconds, _ in numbers]
    start, end = min(times), max(times)
    # Where all is zero, the scale is one of the unit.
    most = max(value for _, numbers in lines for _, value in numbers) or 1 / _factor(panel.unit)
    across, up = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    bottom = y + _TOP + up
    for part in (0.0, 0.5, 1.0):
        level = bottom - part * up
        yield (
            f'<line class="grid" x1="{x + _LEFT}" y1="{level:.1f}"'
            f' x2="{x + _WIDTH - _RIGHT}" y2="{level:.1f}"/>'
        )
        words = shown(part * most, panel.unit)
        yield _text(words, x + _LEFT - 6, level + 4, anchor="end", kind="faint")
    long = end - start
    length = f"{long / 60:.0f} min" if long >= 60 else f"{long:.0f} s"
    yield _text("0", x + _LEFT, bottom + 14, kind="faint")
    yield _text(length, x + _WIDTH - _RIGHT, bottom + 14, anchor="end", kind="faint")
    for number, (name, numbers) in enumerate(lines[:_MOST_SERIES]):
        colour = _COLOURS[number]
        places = [
            f"{x + _LEFT + across * (seconds - start) / ((end - start) or 1):.1f},"
            f"{bottom - up * value / most:.1f}"
            for seconds, value in numbers
        ]
        yield f'<polyline class="line" stroke="{colour}" points="{" ".join(places)}"/>'
        left, line = x + 12 + (number % 3) * 152, bottom + 30 + (number // 3) * 15
        yield f'<rect x="{left}" y="{line - 8:.1f}" width="8" height="8" fill="{colour}"/>'
        more = len(lines) - _MOST_SERIES
        is_last = number == _MOST_SERIES - 1 and more > 0
        yield _text(_short(name) + (f" (+{more})" if is_last else ""), left + 12, line)


def _numbers(series: Series) -> Sequence[tuple[float, float]]:
    """The values without those that are no number, as a quantile of nothing is."""
    return [(seconds, value) for seconds, value in series.values if value == value]


def _short(name: str) -> str:
    return name if len(name) <= 22 else name[:21] + "…"


def _frame(x: float, y: float, width: float, height: float) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}"'
    return f'<rect class="frame" {place} rx="4"/>'


def _text(words: str, x: float, y: float, *, anchor: str = "start", kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
