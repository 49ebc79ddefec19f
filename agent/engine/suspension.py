"""Volumes held at once, so that what is taken of them is of one moment; never for long.

device-mapper holds them: a mounted file system comes to rest, whatever is written afterwards waits,
and what was acknowledged before is on the device. So each write of a database is in all snapshots
or in none that could show it, however its files are spread. lvm2 takes a copy-on-write snapshot of
a volume that is held, and lets go of that one volume as it ends.

What nobody lets go of hangs whoever uses it. So it is let go of after so many seconds by a thread
of its own, whatever lvm2 does meanwhile, and after a kill by the next start.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from agent import errors, ids
from lvm import names
from lvm.devices import Devices

_log = logging.getLogger(__name__)

# How long a start looks after what a kill left half-made before it lets go, at most.
_LEFT_SECONDS = 10.0

# A group and a logical volume in it.
Held = tuple[str, str]


class Standstill:
    """Holds volumes until the end of the `with`, or for so many seconds."""

    def __init__(self, devices: Devices, seconds: float) -> None:
        self._devices = devices
        self._seconds = seconds
        self._guard = threading.Lock()
        self._held: list[Held] = []
        self._over = False
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        self._end()

    def hold(self, group: str, name: str) -> None:
        """Hold an active volume. Raises StandstillOver, and OSError as device-mapper does."""
        self._devices.suspend(group, name)
        with self._guard:
            self._held.append((group, name))
            over = self._over
        if over:
            # That took too long, and nobody else lets go of it.
            self._end()
        self.check()

    def check(self) -> None:
        """Raise StandstillOver unless all have been held until now."""
        if self._over:
            raise errors.StandstillOver(self._seconds)

    def _end(self) -> None:
        with self._guard:
            self._over = True
            held, self._held = self._held, []
        _let_go(self._devices, held)


@contextmanager
def left(devices: Devices, groups: Sequence[str]) -> Iterator[list[Held]]:
    """Let go of what a process that was killed held: at the end, or after ten seconds.

    What it left half-made is to be looked after inside: held volumes prove that nothing was written
    to them since. No command; two ioctls for each of them, one for the others.
    """
    held = list(_held(devices, groups))
    if not held:
        yield held
        return
    _log.warning("volumes are held since a kill: %s", ", ".join("/".join(one) for one in held))
    timer = threading.Timer(_LEFT_SECONDS, _let_go, [devices, held])
    timer.daemon = True
    timer.start()
    try:
        yield held
    finally:
        timer.cancel()
        _let_go(devices, held)


def _held(devices: Devices, groups: Sequence[str]) -> Iterator[Held]:
    for group in groups:
        for name in devices.active(group):
            if names.is_of(ids.VOLUME_PREFIX, name) and devices.is_suspended(group, name):
                yield group, name


def _let_go(devices: Devices, held: Sequence[Held]) -> None:
    """lvm2 may have let go of some by now, which is no error."""
    for group, name in held:
        try:
            devices.resume(group, name)
        except OSError as error:
            _log.error("volume %s/%s cannot be let go of: %s", group, name, error)
