"""Quiesce: suspend several volumes together, so that their snapshots are of one moment.

device-mapper suspends the volumes: it freezes a mounted file system, makes later writes wait, and
has acknowledged writes on the device. So the snapshots together are crash-consistent, however the
files of a database are spread over the volumes: if a write is missing in a snapshot, each write
that was issued after the acknowledgement of that write is missing in all snapshots. lvm2 takes a
copy-on-write snapshot of a suspended volume, and resumes that one volume when its command ends.

No RPC waits here for another RPC; only the writes of the volumes' users wait, for some seconds at
most. A volume that stayed suspended would hang its users. So a timer thread resumes the volumes
after some seconds, whatever lvm2 does meanwhile. After a kill, the next start resumes them.

Suspend and resume both wait for the disk: a suspend flushes the volume, and a file system writes
when it is resumed. So each volume has a thread of its own, and a disk that hangs delays no other
volume. A volume on such a disk is resumed as soon as the disk answers.
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

# Time limit of the cleanup after a kill, in seconds, while volumes stay suspended. After this time
# the volumes are resumed in any case.
_LEFT_SECONDS = 10.0
# Time limit of the wait until suspended volumes are resumed, in seconds. A resume takes
# milliseconds.
_RESUME_SECONDS = 1.0

# Type of a suspended volume: the names of its volume group and of its logical volume.
Held = tuple[str, str]


class Resumer:
    """Resumes suspended volumes, each in a thread of its own, and each at most once at a time."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._guard = threading.Lock()
        self._under_way: dict[Held, Future[None]] = {}

    def resume(self, suspended: Iterable[Held]) -> Mapping[Held, Future[None]]:
        """Begin to resume suspended volumes; return a future for each volume.

        The future is done when the volume is resumed, or when the resume has failed; a failure is
        logged. A volume that lvm2 has resumed meanwhile is no error.
        """
        return {volume: self._begin(volume) for volume in suspended}

    def _begin(self, volume: Held) -> Future[None]:
        """Begin to resume one volume; return the future of this resume, or of one in progress.

        If no thread can be started, the volume is resumed in the present thread.
        """
        with self._guard:
            under_way = self._under_way.get(volume)
            if under_way is not None and not under_way.done():
                return under_way
            with suppress(RuntimeError):
                future = self._under_way[volume] = command.begin("hold", partial(self._do, volume))
                return future
        # Resume the volume in the present thread, since no thread could be started: otherwise the
        # users of the volume would wait for ever.
        self._do(volume)
        future = Future[None]()
        future.set_result(None)
        return future

    def _do(self, volume: Held) -> None:
        try:
            self._devices.resume(*volume)
        except BaseException as error:
            _log.error("volume %s/%s cannot be resumed: %s", *volume, error)
        with self._guard:
            self._under_way.pop(volume, None)


class Quiesce:
    """Context manager within which volumes are suspended (`suspend`), for `seconds` at most.

    All volumes are resumed at the end of the `with`, or by a timer when the time is over.
    """

    def __init__(self, devices: Devices, seconds: float) -> None:
        self._devices = devices
        self._resumer = Resumer(devices)
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._guard = threading.Lock()
        self._held: list[Held] = []
        # For each volume, a future that is done when the volume is no longer suspended.
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
        """A future for each volume that was to be suspended.

        It is done when the volume has been resumed for good, or could not be suspended.
        """
        return dict(self._free)

    def suspend(self, group: str, name: str) -> None:
        """Suspend an active volume until the end of the quiesce.

        Raises QuiesceOver if the volumes were resumed already, or if a disk that hangs delays the
        suspend beyond the time for which the other volumes may be suspended; all volumes are then
        resumed. Raises the OSError of device-mapper if the suspend fails.
        """
        self.check()
        volume = (group, name)
        free = self._free[volume] = Future()
        try:
            suspending = command.begin("hold", partial(self._suspend, volume))
        except BaseException:
            free.set_result(None)
            raise
        wait([suspending], max(0.0, self._until - time.monotonic()))
        if not suspending.done():
            self._end()
            raise errors.QuiesceOver(self._seconds)
        suspending.result()
        self.check()

    def check(self) -> None:
        """Raise QuiesceOver if the volumes have been resumed, because their time was over."""
        if self._over:
            raise errors.QuiesceOver(self._seconds)

    def _suspend(self, volume: Held) -> None:
        """Suspend one volume, and resume it at once if the other volumes were resumed meanwhile."""
        try:
            self._devices.suspend(*volume)
        except BaseException:
            self._free[volume].set_result(None)
            raise
        with self._guard:
            self._held.append(volume)
            is_over = self._over
        if is_over:
            # Resume this volume here: the timer resumed the other volumes before this one was
            # suspended, so no other thread resumes it.
            self._end()

    def _end(self) -> None:
        """Begin to resume all volumes, and let no further volume be suspended."""
        with self._guard:
            self._over = True
            suspended, self._held = self._held, []
        for volume, resumed in self._resumer.resume(suspended).items():
            resumed.add_done_callback(partial(_follow, self._free[volume]))


@contextmanager
def resume_left(
    devices: Devices, groups: Sequence[str], resumer: Resumer | None = None
) -> Iterator[list[Held]]:
    """Resume volumes that a killed process left suspended: after the body, or after ten seconds.

    Yields these volumes. In the body, the caller removes half-made snapshots: as long as a volume
    is suspended, nothing has been written to it since the kill. Runs no command; needs two ioctls
    for each suspended volume, and one for each other volume. Waits one second at most for the
    resumes, so a disk that hangs delays nothing. A caller that retries passes the same `resumer`
    each time.
    """
    suspended = list(_suspended_volumes(devices, groups))
    if not suspended:
        yield suspended
        return
    _log.warning(
        "volumes are suspended since a kill: %s",
        ", ".join("/".join(volume) for volume in suspended),
    )
    resumer = resumer or Resumer(devices)
    timer = threading.Timer(_LEFT_SECONDS, resumer.resume, [suspended])
    timer.daemon = True
    timer.start()
    try:
        yield suspended
    finally:
        timer.cancel()
        wait(resumer.resume(suspended).values(), _RESUME_SECONDS)


def _suspended_volumes(devices: Devices, groups: Sequence[str]) -> Iterator[Held]:
    """Yield the suspended volumes in these volume groups.

    Snapshots are left out, and inline volumes, of which Carver takes no snapshots.
    """
    for group in groups:
        for name in devices.active(group):
            if names.is_of(ids.VOLUME_PREFIX, name) and devices.is_suspended(group, name):
                yield group, name


def _follow(resumed: Future[None], _: Future[None]) -> None:
    """Complete `resumed`, the future that says that a volume is no longer suspended.

    Called when the future of the volume's resume is done.
    """
    resumed.set_result(None)
