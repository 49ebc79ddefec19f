"""The demo's table: one row a step, printed as it happens, on a terminal and into a pipe."""

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, ParamSpec, TypeVar

# First of all: agent keeps gRPC's fork handlers out, and must come before grpc does.
import agent  # noqa: F401  isort: skip

import grpc
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vagrant.inside.witness import Surprise

# A pipe has no width; on a terminal a line longer than that is hard to follow.
_PIPE_COLUMNS, _MOST_COLUMNS = 100, 120

P = ParamSpec("P")
T = TypeVar("T")


def console(file: IO[str] | None = None) -> Console:
    """Where a table is printed, as wide as the terminal within reason."""
    found = Console(file=file, highlight=False)
    found.width = min(found.width, _MOST_COLUMNS) if found.is_terminal else _PIPE_COLUMNS
    return found


def told(error: grpc.RpcError) -> str:
    """What the plugin said of a failure."""
    return f"{error.code().name}: {error.details()}"


@dataclass
class Step:
    """One row: what was called, what was seen, how long that took without the looking."""

    title: str
    rpcs: list[str] = field(default_factory=list)
    seen: str = ""
    seconds: float = 0

    def call(self, rpc: str, function: Callable[P, T], *words: P.args, **named: P.kwargs) -> T:
        """Make an RPC, which must succeed."""
        self.rpcs.append(rpc)
        try:
            return self.time(function, *words, **named)
        except grpc.RpcError as error:
            raise Surprise(f"{rpc}: OK", told(error)) from error

    def time(self, function: Callable[P, T], *words: P.args, **named: P.kwargs) -> T:
        """Do something that is no RPC."""
        started = time.monotonic()
        try:
            return function(*words, **named)
        finally:
            self.seconds += time.monotonic() - started


class Show:
    """The table and its sums."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._steps = 0
        self._rpcs = 0
        self._started = time.monotonic()

    def heading(self, text: str) -> None:
        """Say what is shown, and name the columns."""
        self._console.print(Text(text, style="bold"))
        names = ("", "step", "RPC", "what the kernel shows", "ms")
        self._line(*(Text(name, style="dim") for name in names))
        self._console.rule(style="dim")

    def part(self, text: str) -> None:
        """Begin a part of the table."""
        self._console.print(Text(f"   {text}", style="bold cyan"))

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """Do one step and print its row, also where it ends with a surprise."""
        step, failed = Step(title), True
        self._steps += 1
        try:
            # A spinner on a terminal, nothing in a pipe.
            with self._console.status(f"{title} …"):
                yield step
            failed = False
        except (OSError, subprocess.SubprocessError) as error:
            raise Surprise(f"{title}: no error", error) from error
        finally:
            self._rpcs += len(step.rpcs)
            self._row(step, failed=failed)

    def closing(self) -> None:
        """Print the sums."""
        self._console.rule(style="dim")
        seconds = time.monotonic() - self._started
        sums = f"main job: {self._steps} steps, {self._rpcs} RPCs, {seconds:.1f} s"
        self._console.print(Text(sums, style="bold green"))

    def surprise(self, surprise: Surprise, notes: Sequence[str]) -> None:
        """Print what went wrong, and what was done about it."""
        self._console.rule(style="red")
        for title, text in (("expected", surprise.expected), ("saw", surprise.seen)):
            self._console.print(Text(f"{title:>8}: {text}", style="bold red"), soft_wrap=True)
        for note in notes:
            self._console.print(Text(f"{note}"), soft_wrap=True)

    def _row(self, step: Step, *, failed: bool) -> None:
        milliseconds = step.seconds * 1000
        self._line(
            Text("✗", style="bold red") if failed else Text(str(self._steps), style="dim"),
            Text(step.title),
            Text(" ".join(dict.fromkeys(step.rpcs)), style="cyan"),
            Text("a surprise", style="red") if failed else Text(step.seen, style="green"),
            Text(f"{milliseconds:.0f}" if milliseconds >= 10 else f"{milliseconds:.1f}"),
        )

    def _line(self, *cells: Text) -> None:
        """One line: its columns are as wide as in every other line."""
        line = Table(box=None, show_header=False, expand=True, padding=(0, 1, 0, 0))
        line.add_column(width=2, justify="right")
        line.add_column(width=27)
        line.add_column(width=22)
        line.add_column(ratio=1)
        line.add_column(width=6, justify="right")
        line.add_row(*cells)
        self._console.print(line)
