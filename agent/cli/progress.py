"""How far something is that takes long: on a terminal as a bar, for programs as JSON lines."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from agent.cli import terminal

_JSON_SECONDS = 1.0


@dataclass(frozen=True)
class State:
    """How far it is. The rate is of the volume's bytes, gone over or left out, each second."""

    what: str
    offset_bytes: int
    size_bytes: int
    bytes_per_second: int
    seconds_left: int | None


# Told of each byte of the volume up to which it is.
Tell = Callable[[int], None]


@contextmanager
def shown(what: str, start_bytes: int, size_bytes: int, *, as_json: bool) -> Iterator[Tell]:
    """Show how far it is on the standard error, and nothing where that is neither of both."""
    if as_json:
        yield _lines(what, start_bytes, size_bytes)
    elif sys.stderr.isatty():
        with terminal.progress(what, start_bytes, size_bytes) as tell:
            yield tell
    else:
        yield lambda _offset_bytes: None


def _lines(what: str, start_bytes: int, size_bytes: int) -> Tell:
    began = told = time.monotonic()

    def tell(offset_bytes: int) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told < _JSON_SECONDS and offset_bytes < size_bytes:
            return
        told = now
        rate = (offset_bytes - start_bytes) / max(now - began, 0.001)
        left = round((size_bytes - offset_bytes) / rate) if rate > 0 else None
        state = State(what, offset_bytes, size_bytes, round(rate), left)
        print(json.dumps(asdict(state)), file=sys.stderr, flush=True)

    return tell
