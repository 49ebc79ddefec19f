"""Where a key must not be: what processes are started with, what is logged, and memory."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class Sampler:
    """Reads what every process was started with, over and over."""

    def __init__(self, *needles: bytes) -> None:
        self._needles = needles
        self.found: set[str] = set()
        self.programs: set[str] = set()
        # How often all processes were read.
        self.rounds = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, all processes are read as often as can be."""
        ended = threading.Event()
        thread = threading.Thread(target=self._until, args=(ended,))
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _until(self, ended: threading.Event) -> None:
        while not ended.is_set():
            for process in Path("/proc").glob("[0-9]*"):
                for name in ("cmdline", "environ"):
                    with suppress(OSError):
                        self._look(process / name)
            self.rounds += 1

    def _look(self, file: Path) -> None:
        text = file.read_bytes()
        if file.name == "cmdline":
            self.programs.add(text.partition(b"\0")[0].rpartition(b"/")[2].decode())
        if any(one in text for one in self._needles):
            self.found.add(f"{file}: {text!r}")


def memory(pid: int) -> Iterator[tuple[str, bytes]]:
    """What a process has in memory now, mapping by mapping, as gcore(1) reads it."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as opened:
        for line in lines:
            mapping = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
            if mapping is None:
                continue
            start, end = (int(one, 16) for one in mapping.groups())
            opened.seek(start)
            with suppress(OSError):  # such as [vvar]
                yield line, opened.read(end - start)


def places(pid: int, needle: bytes) -> list[str]:
    """Where in a process's memory a text is, with what is around it."""
    found = []
    for line, data in memory(pid):
        at = data.find(needle)
        while at >= 0:
            found.append(f"{line}: {data[max(0, at - 48) : at + len(needle) + 16]!r}")
            at = data.find(needle, at + 1)
    return found
