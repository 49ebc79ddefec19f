"""Terminal output: tables, bars, colours, questions. The only module that imports rich."""

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

# Width of output to a pipe, which has no width of its own, in columns; and the maximum width on a
# terminal, because longer lines are hard to read.
_PIPE_COLUMNS, _MOST_COLUMNS = 100, 140
# Width of a bar, in columns.
_BAR_CELLS = 12
# Share of the whole from which a bar is yellow, and share from which it is red.
_FULL, _VERY_FULL = 0.8, 0.95
# Characters that fill 0 to 8 eighths of a column.
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def human(size_bytes: int) -> str:
    """Format a size in bytes for people, such as `64 MiB` or `10.7 GiB`."""
    power = max(0, min((size_bytes.bit_length() - 1) // 10, len(_UNITS) - 1))
    size = size_bytes / (1 << 10 * power)
    # Show three significant digits, and no exponent: the format `.3g` gives 1.02e+03 for 1020.
    return f"{size:.0f} {_UNITS[power]}" if size >= 100 else f"{size:.3g} {_UNITS[power]}"


def console() -> Console:
    """Return the console for standard output: as wide as the terminal, up to 140 columns."""
    output = Console(highlight=False)
    output.width = min(output.width, _MOST_COLUMNS) if output.is_terminal else _PIPE_COLUMNS
    return output


def table(*titles: str, right: Iterable[str] = ()) -> Table:
    """Return an empty table with column titles; columns in `right` are aligned to the right."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="dim")
    numbers = set(right)
    for title in titles:
        grid.add_column(title, justify="right" if title in numbers else "left", overflow="fold")
    return grid


def bar(part: float, whole: float) -> Text:
    """Format the share `part / whole` as a bar and a percentage."""
    share = part / whole if whole else 0.0
    eighths = round(min(share, 1.0) * _BAR_CELLS * 8)
    full_cells, remainder = divmod(eighths, 8)
    filled = "█" * full_cells + (_EIGHTHS[remainder] if remainder else "")
    style = "red" if share >= _VERY_FULL else "yellow" if share >= _FULL else "green"
    return Text.assemble((filled.ljust(_BAR_CELLS, "░"), style), f" {share * 100:3.0f} %")


def status(overview: Overview) -> RenderableType:
    """Format an overview as the output of `carver status`."""
    served = ("serving", "green") if overview.serving else ("not serving", "bold red")
    driver = (f"{overview.driver} {overview.version}", "bold")
    head = Text.assemble(driver, f" on node {overview.node}, ", served, f" {overview.endpoint}")
    parts: list[RenderableType] = [head, "", _groups(overview), "", _classes(overview), ""]
    if overview.pools:
        parts += [_pools(overview), ""]
    if overview.volumes:
        parts.append(_volumes(overview))
    else:
        parts.append(Text("There are no volumes.", style="dim"))
    if overview.snapshots:
        parts += ["", _snapshots(overview)]
    return Group(*parts, *_details(overview))


def _groups(overview: Overview) -> Table:
    grid = table("GROUP", "SIZE", "FREE", "ALLOCATED", "DISKS", right=("SIZE", "FREE"))
    for group in overview.groups:
        if not group.present:
            why = "is not used: see below" if group.problem else "is not on this node"
            grid.add_row(group.name, "", "", Text(why, style="bold red"), "")
            continue
        disks = Text(str(group.disks))
        if group.missing_disks:
            disks.append(f", {group.missing_disks} missing", style="bold red")
        used = bar(group.size_bytes - group.free_bytes, group.size_bytes)
        grid.add_row(group.name, human(group.size_bytes), human(group.free_bytes), used, disks)
    return grid


def _classes(overview: Overview) -> Table:
    grid = table("CLASS", "GROUP", "LAYOUT", "FILE SYSTEM", "LARGEST VOLUME NOW")
    for device_class in overview.classes:
        name = Text(device_class.name).append(
            " (default)" if device_class.default else "", style="dim"
        )
        largest = "" if device_class.largest_bytes is None else human(device_class.largest_bytes)
        grid.add_row(name, device_class.group, device_class.layout, device_class.fs_type, largest)
    return grid


def _pools(overview: Overview) -> Table:
    grid = table("POOL", "GROUP", "SIZE", "DATA", "METADATA", right=("SIZE",))
    for pool in overview.pools:
        shares = (pool.data_percent, pool.metadata_percent)
        size = human(pool.size_bytes)
        grid.add_row(pool.name, pool.group, size, *(_share(percent) for percent in shares))
    return grid


def _share(percent: float | None) -> Text:
    return Text("inactive", style="dim") if percent is None else bar(percent, 100)


def _volumes(overview: Overview) -> Table:
    titles = ("VOLUME", "GROUP", "SIZE", "LAYOUT", "CONTENTS", "USED", "CLAIM")
    grid = table(*titles, right=("SIZE",))
    for volume in overview.volumes:
        used: Text | str = ""
        if volume.used_bytes is not None and volume.total_bytes is not None:
            used = bar(volume.used_bytes, volume.total_bytes)
        contents = volume.contents if volume.state == "ready" else volume.state
        if volume.progress:
            contents += f", {volume.progress}"
        if volume.encryption:
            contents = ", ".join(filter(None, (contents, volume.encryption)))
        size = human(volume.size_bytes)
        grid.add_row(volume.name, volume.group, size, volume.layout, contents, used, volume.claim)
    return grid


def _snapshots(overview: Overview) -> Table:
    grid = table("SNAPSHOT", "VOLUME", "GROUP", "TAKEN", "SIZE", "ITS AREA", right=("SIZE",))
    for snapshot in overview.snapshots:
        time_taken = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(snapshot.taken_seconds))
        area: Text | str = "shares the pool"
        if snapshot.area_bytes is not None:
            area = Text.assemble(_share(snapshot.area_percent), f" of {human(snapshot.area_bytes)}")
        grid.add_row(
            snapshot.name,
            snapshot.volume,
            snapshot.group,
            time_taken,
            human(snapshot.size_bytes),
            area,
        )
    return grid


def _details(overview: Overview) -> Iterable[RenderableType]:
    """Format the lines below the tables: paths and I/O limits of volumes, and all problems."""
    lines = [
        Text.assemble(
            (volume.name, "bold"), f" is at {place.path}{' (read-only)' * place.read_only}"
        )
        for volume in overview.volumes
        for place in volume.places
    ]
    lines += [
        Text.assemble((volume.name, "bold"), f" has limits of I/O: {volume.limits}")
        for volume in overview.volumes
        if volume.limits
    ]
    sentences = [group.problem for group in overview.groups if group.problem]
    sentences += [f"{group.name}: {why}" for group in overview.groups for why in group.ignored]
    health = [(volume.name, volume.health) for volume in overview.volumes]
    health += [(snapshot.name, snapshot.health) for snapshot in overview.snapshots]
    for name, problems in health:
        sentences += [
            f"{name}: {problem.status} {problem.reason}: {problem.message}" for problem in problems
        ]
    lines += [Text(sentence, style="bold red") for sentence in sentences]
    if lines:
        yield ""
        yield from lines


_VERDICTS = {preflight.PASS: "green", preflight.WARN: "yellow", preflight.FAIL: "bold red"}


def doctor(findings: Sequence[preflight.Finding]) -> RenderableType:
    """Format findings, each with its remedy, as the output of `carver doctor`."""
    grid = table("", "CHECK", "FOUND")
    for finding in findings:
        message = Text(finding.message)
        if finding.remedy:
            message.append(f"\n→ {finding.remedy}", style="bold")
        grid.add_row(
            Text(finding.verdict, style=_VERDICTS[finding.verdict]), finding.check, message
        )
    counts = Counter(finding.verdict for finding in findings)
    summary = ", ".join(f"{counts[finding]} {finding}" for finding in _VERDICTS if counts[finding])
    return Group(grid, "", Text(summary))


def watch(render: Callable[[], RenderableType], seconds: float) -> None:
    """Show the result of `render`, refreshed at an interval in seconds, until Ctrl-C."""
    with suppress(KeyboardInterrupt), Live(render(), console=console(), auto_refresh=False) as live:
        while True:
            time.sleep(seconds)
            live.update(render(), refresh=True)


def confirmed(question: str) -> bool:
    """Ask the user a question; return True for yes, and False without a terminal."""
    output = console()
    return output.is_terminal and Confirm.ask(question, console=output, default=False)


@contextmanager
def progress(
    description: str, start_bytes: int, size_bytes: int
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error during the `with`.

    Yields a function to be called with the offset that was reached, in bytes.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(description, total=size_bytes - start_bytes)
        yield lambda offset_bytes: bars.update(task, completed=offset_bytes - start_bytes)
