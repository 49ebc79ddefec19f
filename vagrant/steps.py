"""Show what the lab does: one line a step, the whole output in a log, its tail upon failure."""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from vagrant import files

LOGS = Path(__file__).resolve().parent / ".lab" / "logs"
_TAIL_LINES = 40


class StepError(Exception):
    """A command of a step failed; the message holds the end of the step's log."""

    def __init__(self, words: Sequence[str], why: str, log: Path) -> None:
        lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        tail = "".join(f"  | {line}\n" for line in lines)
        super().__init__(f"{' '.join(words)}: {why}\n{tail}The whole log: {log}")


class Step:
    """One step under way: commands run through it write to its log."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def run(
        self,
        *words: str | Path,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        """Run a command, its output into the log; raise StepError unless it succeeds.

        The terminal's Ctrl-C reaches the command, too, which may have something to undo: it is
        waited for. A second Ctrl-C kills it.
        """
        command = [str(word) for word in words]
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                process.wait(timeout_seconds)
            except subprocess.TimeoutExpired as error:
                _kill(process)
                raise StepError(command, f"no end after {timeout_seconds} s", self.log) from error
            except KeyboardInterrupt:
                try:
                    process.wait()
                except KeyboardInterrupt:
                    _kill(process)
                raise
        if process.returncode != 0:
            raise StepError(command, f"exit code {process.returncode}", self.log)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and wait for its end; where it is sudo, have sudo end what it runs."""
    try:
        process.kill()
        process.wait()
    except PermissionError:
        # sudo passes SIGTERM on, as it could not do with SIGKILL.
        subprocess.run(["sudo", "kill", "-TERM", str(process.pid)], check=False)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)


@contextlib.contextmanager
def step(title: str, log_name: str) -> Iterator[Step]:
    """Announce a step, count its seconds while it runs, say how long it took."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{log_name}.log"
    # A log that root wrote is not its user's to empty, but the folder is.
    log.unlink(missing_ok=True)
    log.touch()
    files.give_to_owner(log)
    start = time.monotonic()
    over = threading.Event()
    ticker = threading.Thread(target=_tick, args=(title, start, over), daemon=True)
    if sys.stderr.isatty():
        ticker.start()
    outcome = "failed after"
    try:
        yield Step(log)
        outcome = "done in"
    finally:
        over.set()
        if ticker.is_alive():
            ticker.join()
        back = "\r" if sys.stderr.isatty() else ""
        seconds = time.monotonic() - start
        print(f"{back}lab: {title}: {outcome} {seconds:.1f} s", file=sys.stderr, flush=True)


def _tick(title: str, start: float, over: threading.Event) -> None:
    while not over.wait(0.5):
        seconds = time.monotonic() - start
        print(f"\rlab: {title} … {seconds:.0f} s ", end="", file=sys.stderr, flush=True)
