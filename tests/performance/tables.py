"""The figures as tables: on a terminal, and in docs/performance.md."""

from collections.abc import Iterator, Mapping, Sequence

from performance.document import Run
from performance.rows import OWN, PROMISES, RATIO, Promise, Row
from rich import box
from rich.table import Table

MISSED = "missed"
NOTHING = "-"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def number(value: float, unit: str) -> str:
    """A value as people read it: no more digits than count."""
    digits = f"{value:.0f}" if value >= 100 else f"{value:.{1 if value >= 10 else 2}f}"
    if "." in digits:
        digits = digits.rstrip("0").rstrip(".")
    return digits if unit == RATIO else f"{digits} {unit}".removesuffix(" commands")


def value(row: Row) -> str:
    text = number(row.value, row.unit)
    return f"{text}, {MISSED}" if row.is_met is False else text


def on_terminal(run: Run) -> Table:
    drawn = Table(box=box.SIMPLE_HEAD, title=f"{run.name}: {machine(run)}", title_justify="left")
    for title in ("", "beside", "Carver ms", "ms", "programs", "session", "", "target"):
        drawn.add_column(title, justify="left" if title == "beside" else "right")
    drawn.columns[0].justify = "left"
    for row in run.rows:
        ms = [NOTHING if one is None else f"{one:.1f}" for one in (row.carver_ms, row.beside_ms)]
        counts = [NOTHING, NOTHING]
        if row.commands is not None:
            counts = [str(row.commands.processes), str(row.commands.session)]
        colour = {True: "[green]", False: "[bold red]", None: ""}[row.is_met]
        target = NOTHING if row.target is None else f"≤ {number(row.target, row.unit)}"
        drawn.add_row(row.name, row.beside, *ms, *counts, colour + value(row), target)
    return drawn


def machine(run: Run) -> str:
    facts = run.machine
    settings = f", {run.settings}" if run.settings else ""
    return (
        f"{facts['cores']} cores, {facts['virtualization']}, Linux {facts['kernel']},"
        f" lvm2 {facts['lvm2']}, Python {facts['python']}{settings}"
    )


def markdown(runs: Sequence[Run]) -> str:
    """Each figure that a run has, with its target, and what the runs say of it."""
    lines: list[str] = []
    for run in runs:
        lines += [f"- *{run.name}*: {machine(run)}"]
    if runs:
        lines += [""]
    own = [run for run in runs if {row.name for row in run.rows} & {one.name for one in OWN}]
    for promises, measured in ((PROMISES, [run for run in runs if run not in own]), (OWN, own)):
        lines += [*_section(promises, measured), ""]
    return "\n".join(lines).rstrip() + "\n"


def recorded(page: str, runs: Sequence[Run]) -> str:
    """A page with the figures between its two marks made anew; raises ValueError without marks."""
    head, found, rest = page.partition(BEGIN)
    _, also_found, tail = rest.partition(END)
    if not found or not also_found:
        raise ValueError(f"the page has no {BEGIN} and {END}")
    return f"{head}{BEGIN}\n\n{markdown(runs)}\n{END}{tail}"


def _section(promises: Sequence[Promise], runs: Sequence[Run]) -> Iterator[str]:
    has_beside = any(one.beside for one in promises)
    titles = ["figure", *["beside"] * has_beside, "target", *(run.name for run in runs)]
    for with_counts in runs[:1]:
        if any(row.commands for row in with_counts.rows):
            titles.append("programs + session commands")
    yield f"| {' | '.join(titles)} |"
    yield "|" + "---|" * len(titles)
    rows = [{row.name: row for row in run.rows} for run in runs]
    for promise in promises:
        if not any(promise.name in found for found in rows):
            continue
        beside = [promise.beside or NOTHING] * has_beside
        cells = [promise.name, *beside, _target(promise)]
        cells += [_measured(found.get(promise.name)) for found in rows]
        if len(titles) > len(cells):
            cells.append(_counts(rows[0], promise.name))
        yield f"| {' | '.join(cells)} |"


def _target(promise: Promise) -> str:
    return NOTHING if promise.target is None else f"≤ {number(promise.target, promise.unit)}"


def _measured(row: Row | None) -> str:
    if row is None:
        return NOTHING
    return f"**{value(row)}**" if row.is_met is False else value(row)


def _counts(rows: Mapping[str, Row], name: str) -> str:
    row = rows.get(name)
    if row is None or row.commands is None:
        return NOTHING
    return f"{row.commands.processes} + {row.commands.session}"
