"""Volumes held at once, so that what is taken of them is of one moment; never for long.

device-mapper holds them: a mounted file system comes to rest, whatever is written afterwards waits,
and what was acknowledged before is on the device. So each write of a database is in all snapshots
or in none that could show it, however its files are spread. lvm2 takes a copy-on-write snapshot of
a volume that is held, and lets go of that one volume as it ends.

What nobody lets go of hangs whoever uses it. So it is let go of after so many seconds by a thread
of its own, whatever lvm2 does meanwhile, and after a kill by the next start.

Both wait for the disk: what is on its way to it is awaited before a volume is held, and a file
system writes as it is let go of. So each volume has a thread for that, and one whose disk does not
answer keeps no other from being let go of. What hangs is let go of as soon as it no longer does.
"""

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Self

from agent.core import errors, ids
from lvm import names
from lvm.devices import Devices
from mount import command

_log = logging.getLogger(__name__)

# How long a start looks after what a kill left half-made before it lets go, at most.
_LEFT_SECONDS = 10.0
# How long those are waited for that are let go of; it is a matter of milliseconds.
_RELEASE_SECONDS = 1.0

# A group and a logical volume in it.
Held = tuple[str, str]


class Release:
    """Lets go of volumes, of each in a thread of its own and once at a time."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._guard = threading.Lock()
        self._under_way: dict[Held, Future[None]] = {}

    def of(self, held: Iterable[Held]) -> Mapping[Held, Future[None]]:
        """Let go of these; each is done when it is let go of, or cannot be, which is logged.

        lvm2 may have let go of some by now, which is no error.
        """
        return {one: self._begin(one) for one in held}

    def _begin(self, one: Held) -> Future[None]:
        with self._guard:
            under_way = self._under_way.get(one)
            if under_way is not None and not under_way.done():
                return under_way
            with suppress(RuntimeError):
                ended = self._under_way[one] = command.begin("hold", partial(self._do, one))
                return ended
        # No thread can be had, and whoever uses the volume would wait for ever.
        self._do(one)
        return _done()

    def _do(self, one: Held) -> None:
        try:
            self._devices.resume(*one)
        except BaseException as error:
            _log.error("volume %s/%s cannot be let go of: %s", *one, error)
        with self._guard:
            self._under_way.pop(one, None)


class Standstill:
    """Holds volumes until the end of the `with`, or for so many seconds."""

    def __init__(self, devices: Devices, seconds: float) -> None:
        self._devices = devices
        self._release = Release(devices)
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._guard = threading.Lock()
        self._held: list[Held] = []
        # Of each that was to be held: done when nothing holds it any more.
        self._free: dict[Held, Future[None]] = {}
        self._over = False
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._until = time.monotonic() + self._seconds
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
        wait(self._free.values(), _RELEASE_SECONDS)

    @property
    def free(self) -> Mapping[Held, Future[None]]:
        """Of each that was to be held: done when it is not held, and will not be any more."""
        return dict(self._free)

    def hold(self, group: str, name: str) -> None:
        """Hold an active volume. Raises StandstillOver, and OSError as device-mapper does.

        Nobody waits for a disk that does not answer longer than the rest is held.
        """
        self.check()
        one = (group, name)
        free = self._free[one] = Future()
        try:
            held = command.begin("hold", partial(self._suspend, one))
        except BaseException:
            free.set_result(None)
            raise
        wait([held], max(0.0, self._until - time.monotonic()))
        if not held.done():
            self._end()
            raise errors.StandstillOver(self._seconds)
        held.result()
        self.check()

    def check(self) -> None:
        """Raise StandstillOver unless all have been held until now."""
        if self._over:
            raise errors.StandstillOver(self._seconds)

    def _suspend(self, one: Held) -> None:
        try:
            self._devices.suspend(*one)
        except BaseException:
            self._free[one].set_result(None)
            raise
        with self._guard:
            self._held.append(one)
            over = self._over
        if over:
            # That took too long, and nobody else lets go of it.
            self._end()

    def _end(self) -> None:
        with self._guard:
            self._over = True
            held, self._held = self._held, []
        for one, ended in self._release.of(held).items():
            ended.add_done_callback(partial(_follow, self._free[one]))


@contextmanager
def left(
    devices: Devices, groups: Sequence[str], release: Release | None = None
) -> Iterator[list[Held]]:
    """Let go of what a process that was killed held: at the end, or after ten seconds.

    What it left half-made is to be looked after inside: held volumes prove that nothing was written
    to them since. No command; two ioctls for each of them, one for the others. Nobody waits for
    one whose disk does not answer; who may begin anew gives the same `release` each time.
    """
    held = list(_held(devices, groups))
    if not held:
        yield held
        return
    _log.warning("volumes are held since a kill: %s", ", ".join("/".join(one) for one in held))
    release = release or Release(devices)
    timer = threading.Timer(_LEFT_SECONDS, release.of, [held])
    timer.daemon = True
    timer.start()
    try:
        yield held
    finally:
        timer.cancel()
        wait(release.of(held).values(), _RELEASE_SECONDS)


def _held(devices: Devices, groups: Sequence[str]) -> Iterator[Held]:
    for group in groups:
        for name in devices.active(group):
            if names.is_of(ids.VOLUME_PREFIX, name) and devices.is_suspended(group, name):
                yield group, name


def _follow(free: Future[None], _: Future[None]) -> None:
    free.set_result(None)


def _done() -> Future[None]:
    ended = Future[None]()
    ended.set_result(None)
    return ended
