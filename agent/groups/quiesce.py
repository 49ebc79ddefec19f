"""Quiesce: volumes suspended together, so that their snapshots are of one moment.

device-mapper suspends them: a mounted file system is frozen, later writes wait, and acknowledged
writes are on the device. So each write of a database is in all snapshots or in none that could show
it, however its files are spread. lvm2 takes a copy-on-write snapshot of a suspended volume, and
resumes that one volume as it ends.

No call waits here for another: what waits are the writes of the volumes' users, some seconds at
most. A volume that stays suspended hangs its users. So a thread resumes it after some seconds,
whatever lvm2 does meanwhile, and the next start does after a kill.

Both wait for the disk: a suspend flushes it, and a file system writes as it is resumed. So each
volume has a thread for that, and a disk that hangs delays no other volume. A volume that hangs is
resumed as soon as its disk answers.
"""

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Self

from agent.core import errors, ids
from lvm import names
from lvm.active_devices import Devices
from mount import command

_log = logging.getLogger(__name__)

# How long a start may clean up after a kill before volumes are resumed, at most.
_LEFT_SECONDS = 10.0
# How long a resume, which takes milliseconds, is waited for.
_RESUME_SECONDS = 1.0

# A group and a logical volume in it.
Held = tuple[str, str]


class Resumer:
    """Resumes volumes, each in a thread of its own and once at a time."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._guard = threading.Lock()
        self._under_way: dict[Held, Future[None]] = {}

    def resume(self, held: Iterable[Held]) -> Mapping[Held, Future[None]]:
        """Resume volumes; a future is done when its volume is resumed, or cannot be (logged).

        A volume that lvm2 has resumed meanwhile is no error.
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
        # No thread can be had, and users of the volume would wait for ever.
        self._do(one)
        ended = Future[None]()
        ended.set_result(None)
        return ended

    def _do(self, one: Held) -> None:
        try:
            self._devices.resume(*one)
        except BaseException as error:
            _log.error("volume %s/%s cannot be resumed: %s", *one, error)
        with self._guard:
            self._under_way.pop(one, None)


class Quiesce:
    """Suspends volumes until the end of the `with`, or for so many seconds."""

    def __init__(self, devices: Devices, seconds: float) -> None:
        self._devices = devices
        self._resumer = Resumer(devices)
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._guard = threading.Lock()
        self._held: list[Held] = []
        # For each volume: done when it is not suspended any more.
        self._free: dict[Held, Future[None]] = {}
        self._over = False
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._until = time.monotonic() + self._seconds
        self._timer.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._timer.cancel()
        self._end()
        wait(self._free.values(), _RESUME_SECONDS)

    @property
    def free(self) -> Mapping[Held, Future[None]]:
        """For each volume a future: done when it is not suspended, and will not be any more."""
        return dict(self._free)

    def suspend(self, group: str, name: str) -> None:
        """Suspend an active volume. Raises QuiesceOver, and OSError as device-mapper does.

        A disk that hangs is waited for no longer than the other volumes are suspended.
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
            raise errors.QuiesceOver(self._seconds)
        held.result()
        self.check()

    def check(self) -> None:
        """Raise QuiesceOver unless all have been suspended until now."""
        if self._over:
            raise errors.QuiesceOver(self._seconds)

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
            # It came too late, and is resumed by no other thread.
            self._end()

    def _end(self) -> None:
        with self._guard:
            self._over = True
            held, self._held = self._held, []
        for one, ended in self._resumer.resume(held).items():
            ended.add_done_callback(partial(_follow, self._free[one]))


@contextmanager
def resume_left(
    devices: Devices, groups: Sequence[str], resumer: Resumer | None = None
) -> Iterator[list[Held]]:
    """Resume volumes that a killed process left suspended: at the end, or after ten seconds.

    Inside, the caller cleans up half-made snapshots: suspended volumes prove that nothing was
    written since. No command; two ioctls for each of them, one for others. A disk that hangs is not
    waited for. A caller that retries gives the same `resumer` each time.
    """
    held = list(_held(devices, groups))
    if not held:
        yield held
        return
    _log.warning("volumes are suspended since a kill: %s", ", ".join("/".join(one) for one in held))
    resumer = resumer or Resumer(devices)
    timer = threading.Timer(_LEFT_SECONDS, resumer.resume, [held])
    timer.daemon = True
    timer.start()
    try:
        yield held
    finally:
        timer.cancel()
        wait(resumer.resume(held).values(), _RESUME_SECONDS)


def _held(devices: Devices, groups: Sequence[str]) -> Iterator[Held]:
    for group in groups:
        for name in devices.active(group):
            if names.is_of(ids.VOLUME_PREFIX, name) and devices.is_suspended(group, name):
                yield group, name


def _follow(free: Future[None], _: Future[None]) -> None:
    free.set_result(None)
