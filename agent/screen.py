"""What people see on a terminal: tables, bars and colours. The only module that imports rich."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.prompt import Confirm
from rich.table import Table
from rich.text import Text

from agent import overview, preflight
from agent.overview import Overview

# A pipe has no width; on a terminal a line longer than that is hard to follow.
_PIPE_COLUMNS, _MOST_COLUMNS = 100, 140
_BAR_CELLS = 12
# From here on a bar is a warning, and a reason to act.
_FULL, _VERY_FULL = 0.8, 0.95
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def human(size_bytes: int) -> str:
    """A size as people write it: 64 MiB, 10.7 GiB."""
    power = max(0, min((size_bytes.bit_length() - 1) // 10, len(_UNITS) - 1))
    size = size_bytes / (1 << 10 * power)
    # Three digits, but never 1.02e+03.
    return f"{size:.0f} {_UNITS[power]}" if size >= 100 else f"{size:.3g} {_UNITS[power]}"


def console() -> Console:
    """Where everything is printed, as wide as the terminal within reason."""
    found = Console(highlight=False)
    found.width = min(found.width, _MOST_COLUMNS) if found.is_terminal else _PIPE_COLUMNS
    return found


def table(*titles: str, right: Iterable[str] = ()) -> Table:
    """A table without lines; the columns named in `right` hold numbers."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="dim")
    numbers = set(right)
    for title in titles:
        made.add_column(title, justify="right" if title in numbers else "left", overflow="fold")
    return made


def bar(part: int, whole: int) -> Text:
    """How full something is, as a bar and a percentage."""
    share = part / whole if whole else 0.0
    eighths = round(min(share, 1.0) * _BAR_CELLS * 8)
    full, rest = divmod(eighths, 8)
    filled = "█" * full + (_EIGHTHS[rest] if rest else "")
    style = "red" if share >= _VERY_FULL else "yellow" if share >= _FULL else "green"
    return Text.assemble((filled.ljust(_BAR_CELLS, "░"), style), f" {share * 100:3.0f} %")


def status(seen: Overview) -> RenderableType:
    """An overview, as `carver status` shows it."""
    served = ("serving", "green") if seen.serving else ("not serving", "bold red")
    head = Text.assemble(
        (f"{seen.driver} {seen.version}", "bold"),
        f" on node {seen.node}, ",
        served,
        f" {seen.endpoint}",
    )
    return Group(head, "", _groups(seen), "", _classes(seen), "", *_volumes(seen.volumes))


def _groups(seen: Overview) -> Table:
    made = table("GROUP", "SIZE", "FREE", "ALLOCATED", "DISKS", right=("SIZE", "FREE"))
    for one in seen.groups:
        if not one.present:
            made.add_row(one.name, "", "", Text("is not on this node", style="bold red"), "")
            continue
        disks = Text(str(one.disks))
        if one.missing_disks:
            disks.append(f", {one.missing_disks} missing", style="bold red")
        used = bar(one.size_bytes - one.free_bytes, one.size_bytes)
        made.add_row(one.name, human(one.size_bytes), human(one.free_bytes), used, disks)
    return made


def _classes(seen: Overview) -> Table:
    made = table("CLASS", "GROUP", "LAYOUT", "FILE SYSTEM", "LARGEST VOLUME NOW")
    for one in seen.classes:
        name = Text(one.name).append(" (default)" if one.default else "", style="dim")
        largest = "" if one.largest_bytes is None else human(one.largest_bytes)
        made.add_row(name, one.group, one.layout, one.fs_type, largest)
    return made


def _volumes(volumes: Sequence[overview.Volume]) -> Iterable[RenderableType]:
    if not volumes:
        yield Text("There are no volumes.", style="dim")
        return
    titles = ("VOLUME", "GROUP", "SIZE", "LAYOUT", "CONTENTS", "USED", "CLAIM")
    made = table(*titles, right=("SIZE",))
    for one in volumes:
        used: Text | str = ""
        if one.used_bytes is not None and one.total_bytes is not None:
            used = bar(one.used_bytes, one.total_bytes)
        contents = one.contents if one.state == "ready" else one.state
        size = human(one.size_bytes)
        made.add_row(one.name, one.group, size, one.layout, contents, used, one.claim)
    yield made
    yield ""
    # Below, as each of these is as long as a line.
    for one in volumes:
        for place in one.places:
            access = " (read-only)" if place.read_only else ""
            yield Text.assemble((one.name, "bold"), f" is at {place.path}{access}")
    for one in volumes:
        for problem in one.problems:
            yield Text.assemble((f"{one.name}: {problem}", "bold red"))


_VERDICTS = {preflight.PASS: "green", preflight.WARN: "yellow", preflight.FAIL: "bold red"}


def doctor(found: Sequence[preflight.Finding]) -> RenderableType:
    """What the checks found, as `carver doctor` shows it: each remedy below what it is for."""
    made = table("", "CHECK", "FOUND")
    for one in found:
        told = Text(one.message)
        if one.remedy:
            told.append(f"\n→ {one.remedy}", style="bold")
        made.add_row(Text(one.verdict, style=_VERDICTS[one.verdict]), one.check, told)
    counts = Counter(one.verdict for one in found)
    summary = ", ".join(f"{counts[one]} {one}" for one in _VERDICTS if counts[one])
    return Group(made, "", Text(summary))


def watch(look: Callable[[], RenderableType], seconds: float) -> None:
    """Show what `look` gives, anew every so many seconds, until the user interrupts it."""
    with suppress(KeyboardInterrupt), Live(look(), console=console(), auto_refresh=False) as live:
        while True:
            time.sleep(seconds)
            live.update(look(), refresh=True)


def confirmed(question: str) -> bool:
    """Whether the user says yes; who cannot be asked says no."""
    asked = console()
    return asked.is_terminal and Confirm.ask(question, console=asked, default=False)
