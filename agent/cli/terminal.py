"""Output for people: tables, bars and colours. The only module that imports rich."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.prompt import Confirm
from rich.table import Table
from rich.text import Text

from agent.cli.status import Overview
from agent.operations import preflight

# A pipe has no width; longer lines on a terminal are hard to read.
_PIPE_COLUMNS, _MOST_COLUMNS = 100, 140
_BAR_CELLS = 12
# From these shares on a bar is yellow, and red.
_FULL, _VERY_FULL = 0.8, 0.95
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def human(size_bytes: int) -> str:
    """Format a size for people: 64 MiB, 10.7 GiB."""
    power = max(0, min((size_bytes.bit_length() - 1) // 10, len(_UNITS) - 1))
    size = size_bytes / (1 << 10 * power)
    # Three digits, but never 1.02e+03.
    return f"{size:.0f} {_UNITS[power]}" if size >= 100 else f"{size:.3g} {_UNITS[power]}"


def console() -> Console:
    """Make the console, as wide as the terminal within reason."""
    found = Console(highlight=False)
    found.width = min(found.width, _MOST_COLUMNS) if found.is_terminal else _PIPE_COLUMNS
    return found


def table(*titles: str, right: Iterable[str] = ()) -> Table:
    """Make a table without lines; the columns named in `right` hold numbers."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="dim")
    numbers = set(right)
    for title in titles:
        made.add_column(title, justify="right" if title in numbers else "left", overflow="fold")
    return made


def bar(part: float, whole: float) -> Text:
    """Show a share as a bar and a percentage."""
    share = part / whole if whole else 0.0
    eighths = round(min(share, 1.0) * _BAR_CELLS * 8)
    full, rest = divmod(eighths, 8)
    filled = "█" * full + (_EIGHTHS[rest] if rest else "")
    style = "red" if share >= _VERY_FULL else "yellow" if share >= _FULL else "green"
    return Text.assemble((filled.ljust(_BAR_CELLS, "░"), style), f" {share * 100:3.0f} %")


def status(seen: Overview) -> RenderableType:
    """Show an overview, as `carver status` does."""
    served = ("serving", "green") if seen.serving else ("not serving", "bold red")
    driver = (f"{seen.driver} {seen.version}", "bold")
    head = Text.assemble(driver, f" on node {seen.node}, ", served, f" {seen.endpoint}")
    parts: list[RenderableType] = [head, "", _groups(seen), "", _classes(seen), ""]
    if seen.pools:
        parts += [_pools(seen), ""]
    if seen.volumes:
        parts.append(_volumes(seen))
    else:
        parts.append(Text("There are no volumes.", style="dim"))
    if seen.snapshots:
        parts += ["", _snapshots(seen)]
    return Group(*parts, *_details(seen))


def _groups(seen: Overview) -> Table:
    made = table("GROUP", "SIZE", "FREE", "ALLOCATED", "DISKS", right=("SIZE", "FREE"))
    for one in seen.groups:
        if not one.present:
            why = "is not used: see below" if one.problem else "is not on this node"
            made.add_row(one.name, "", "", Text(why, style="bold red"), "")
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


def _pools(seen: Overview) -> Table:
    made = table("POOL", "GROUP", "SIZE", "DATA", "METADATA", right=("SIZE",))
    for one in seen.pools:
        shares = (one.data_percent, one.metadata_percent)
        size = human(one.size_bytes)
        made.add_row(one.name, one.group, size, *(_share(percent) for percent in shares))
    return made


def _share(percent: float | None) -> Text:
    return Text("inactive", style="dim") if percent is None else bar(percent, 100)


def _volumes(seen: Overview) -> Table:
    titles = ("VOLUME", "GROUP", "SIZE", "LAYOUT", "CONTENTS", "USED", "CLAIM")
    made = table(*titles, right=("SIZE",))
    for one in seen.volumes:
        used: Text | str = ""
        if one.used_bytes is not None and one.total_bytes is not None:
            used = bar(one.used_bytes, one.total_bytes)
        contents = one.contents if one.state == "ready" else one.state
        if one.progress:
            contents += f", {one.progress}"
        if one.encryption:
            contents = ", ".join(filter(None, (contents, one.encryption)))
        size = human(one.size_bytes)
        made.add_row(one.name, one.group, size, one.layout, contents, used, one.claim)
    return made


def _snapshots(seen: Overview) -> Table:
    made = table("SNAPSHOT", "VOLUME", "GROUP", "TAKEN", "SIZE", "ITS AREA", right=("SIZE",))
    for one in seen.snapshots:
        taken = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.taken_seconds))
        area: Text | str = "shares the pool"
        if one.area_bytes is not None:
            area = Text.assemble(_share(one.area_percent), f" of {human(one.area_bytes)}")
        made.add_row(one.name, one.volume, one.group, taken, human(one.size_bytes), area)
    return made


def _details(seen: Overview) -> Iterable[RenderableType]:
    """Show below the tables what takes a line each."""
    lines = [
        Text.assemble((one.name, "bold"), f" is at {at.path}{' (read-only)' * at.read_only}")
        for one in seen.volumes
        for at in one.places
    ]
    lines += [
        Text.assemble((one.name, "bold"), f" has limits of I/O: {one.limits}")
        for one in seen.volumes
        if one.limits
    ]
    bad = [one.problem for one in seen.groups if one.problem]
    bad += [f"{one.name}: {why}" for one in seen.groups for why in one.ignored]
    health = [(one.name, one.health) for one in seen.volumes]
    health += [(one.name, one.health) for one in seen.snapshots]
    for name, problems in health:
        bad += [f"{name}: {one.status} {one.reason}: {one.message}" for one in problems]
    lines += [Text(problem, style="bold red") for problem in bad]
    if lines:
        yield ""
        yield from lines


_VERDICTS = {preflight.PASS: "green", preflight.WARN: "yellow", preflight.FAIL: "bold red"}


def doctor(found: Sequence[preflight.Finding]) -> RenderableType:
    """Show the findings of checks, as `carver doctor` does, each with its remedy."""
    made = table("", "CHECK", "FOUND")
    for one in found:
        message = Text(one.message)
        if one.remedy:
            message.append(f"\n→ {one.remedy}", style="bold")
        made.add_row(Text(one.verdict, style=_VERDICTS[one.verdict]), one.check, message)
    counts = Counter(one.verdict for one in found)
    summary = ", ".join(f"{counts[one]} {one}" for one in _VERDICTS if counts[one])
    return Group(made, "", Text(summary))


def watch(look: Callable[[], RenderableType], seconds: float) -> None:
    """Show the result of `look`, refreshed at an interval, until the user interrupts it."""
    with suppress(KeyboardInterrupt), Live(look(), console=console(), auto_refresh=False) as live:
        while True:
            time.sleep(seconds)
            live.update(look(), refresh=True)


def confirmed(question: str) -> bool:
    """Ask the user; the answer is no without a terminal."""
    asked = console()
    return asked.is_terminal and Confirm.ask(question, console=asked, default=False)


@contextmanager
def progress(what: str, start_bytes: int, size_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error; yield a function that takes the offset reached."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(what, total=size_bytes - start_bytes)
        yield lambda offset_bytes: bars.update(task, completed=offset_bytes - start_bytes)
