"""What was seen before, and since when: nothing is believed at the first sight.

On a file beside the socket, so that the command and the service know of each other's looks. Time is
the kernel's since its boot, which no clock that is set changes; after a boot all is seen for the
first time. A file that cannot be understood says nothing, so a kill while it is written costs a
grace and no more.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent import errors

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Clock:
    """Seconds since the boot, asleep or not, and which boot that was."""

    seconds: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)
    boot: Callable[[], str] = lambda: _BOOT.read_text().strip()


@dataclass(frozen=True)
class _Known:
    """What the file says: since when each was seen at every look, in seconds of that boot."""

    boot: str = ""
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    since: Mapping[str, float] = field(default_factory=dict)


class Sightings:
    """What was seen at every look up to now."""

    def __init__(self, file: Path, clock: Clock | None = None) -> None:
        self._file = file
        self._clock = clock or Clock()

    def note(self, seen: Iterable[str], versions: Mapping[str, str]) -> Mapping[str, float]:
        """Note a whole look, and tell for how many seconds each of these was seen, 0 at first.

        `versions` are of the lists that were looked at. Where one is older than at the look before,
        the API server was put back to an earlier moment, or is not whole yet: all that was seen
        then is forgotten. Raises NotReady where the file cannot be used.
        """
        try:
            return self._note(seen, versions)
        except OSError as error:
            raise errors.NotReady(
                f"what was seen before is not known: {self._file}: {error.strerror}"
            ) from None

    def _note(self, seen: Iterable[str], versions: Mapping[str, str]) -> Mapping[str, float]:
        with self._opened() as descriptor:
            known = _parse(_content(descriptor))
            now, boot = self._clock.seconds(), self._clock.boot()
            if known.boot != boot or now < known.seconds or _is_older(versions, known.versions):
                known = _Known()
            since = {one: min(known.since.get(one, now), now) for one in seen}
            noted = {"boot": boot, "seconds": now, "versions": dict(versions), "since": since}
            _replace(descriptor, json.dumps(noted).encode())
        return {one: now - first for one, first in since.items()}

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The file, held so that two looks do not write at once."""
        self._file.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._file, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def _replace(descriptor: int, content: bytes) -> None:
    # In place, as it is the file that is locked. Empty first: half of it is no JSON then.
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, content, 0)


def _parse(content: bytes) -> _Known:
    try:
        told: Any = json.loads(content)
        return _Known(
            str(told["boot"]),
            float(told["seconds"]),
            {str(key): str(value) for key, value in told["versions"].items()},
            {str(key): float(value) for key, value in told["since"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return _Known()


def _is_older(versions: Mapping[str, str], before: Mapping[str, str]) -> bool:
    """Whether a list is of an earlier moment; versions that are no numbers do not tell."""
    return any(
        one.isdecimal() and (then := before.get(key, "")).isdecimal() and int(one) < int(then)
        for key, one in versions.items()
    )
