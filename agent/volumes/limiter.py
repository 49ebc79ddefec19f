"""I/O limits of volumes: kept as tags, set for all pods together while the volume is in use.

The limits are set in the cgroup of all pods, for the device that the pods use: the dm-crypt device
of an encrypted volume, else the logical volume. The kernel forgets the limits with the device.

Crash points: after a kill, the next start sets the limits that the tags say (`resume`), and removes
others.

Kubelet or systemd may remove the cgroup's I/O controller at any time, and with it all limits. So
the limits are checked periodically.

A caller that lifts limits for a moment does not wait for another such caller: the callers are
counted.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from agent.volumes import users
from agent.volumes.activator import Activator
from agent.volumes.backing import Backing
from agent.volumes.records import Volume
from agent.volumes.reports import Reports
from agent.work.background import Attempts, PeriodicTask
from lvm.active_devices import Device
from lvm.tuning import PLAIN, Tuning, limits
from mount import mount_errors as mount_errors
from mount import table
from mount.cgroups import UNLIMITED, Cgroups, IoCount, IoMax
from mount.kernel import Kernel
from mount.table import DeviceNumber

_log = logging.getLogger(__name__)

# Interval of the checks that the I/O limits are still set, in seconds. systemd removes the I/O
# controller when systemd reloads, and when the units end that needed the controller.
_CHECK_SECONDS = 10.0
# Part of an I/O limit from which on the pods' I/O counts as having reached the limit.
_NEARLY = 0.95


@dataclass
class Limited:
    """A volume whose I/O is limited; `volume_id` is shown to people.

    `number` is the number that the volume's device had when the limits were set. By now another
    device may have this number. `count` is the pods' I/O until the last measurement, made at
    `counted_seconds` (monotonic). `limited_seconds` is the total time for which the pods' I/O
    reached a limit.
    """

    volume_id: str
    backing: Backing
    number: DeviceNumber
    tuning: Tuning
    size_bytes: int
    count: IoCount = field(default_factory=IoCount)
    counted_seconds: float = 0.0
    limited_seconds: float = 0.0

    @property
    def io_max(self) -> IoMax:
        """The volume's limits at its present size."""
        return self.tuning.io_max(self.size_bytes)

    def measure(self, count: IoCount) -> None:
        """Add the time since the last check to `limited_seconds`, if the I/O since reached a limit.

        `count` is the pods' I/O on the device until now.
        """
        now = time.monotonic()
        seconds, last_count = now - self.counted_seconds, self.count
        if self.counted_seconds and any(
            limit and present - earlier >= _NEARLY * limit * seconds
            for limit, present, earlier in zip(
                vars(self.io_max).values(),
                vars(count).values(),
                vars(last_count).values(),
                strict=True,
            )
        ):
            self.limited_seconds += seconds
        self.count, self.counted_seconds = count, now


class Limiter:
    """Sets, keeps and removes the I/O limits of volumes in use."""

    def __init__(
        self, cgroups: Cgroups, reports: Reports, activator: Activator, kernel: Kernel
    ) -> None:
        self._cgroups, self._kernel = cgroups, kernel
        self._reports, self._activator = reports, activator
        # The lock for writes to cgroupfs. Such writes wait for no disk.
        self._guard = threading.Lock()
        self._limited: dict[DeviceNumber, Limited] = {}
        # The number of callers that want a device to have no limits for a moment, by the device's
        # number. It is not a field of `Limited`, because that record may be replaced meanwhile.
        self._lifted: Counter[DeviceNumber] = Counter()
        # The kernel's limits when they were last found to be as they should be; None if limits were
        # set since. If the kernel's limits are the same object again, they are not compared:
        # comparing the limits of 200 volumes each time would take more than a percent of a core.
        self._kept: Mapping[DeviceNumber, IoMax] | None = None
        # The pods' I/O at the last check.
        self._counts: Mapping[DeviceNumber, IoCount] | None = None
        self.task = PeriodicTask(
            "limits", self.check, _CHECK_SECONDS, "limits of I/O are not checked: %s"
        )

    @property
    def limited(self) -> Sequence[Limited]:
        """The volumes that have I/O limits now."""
        return list(self._limited.values())

    def require(self, tuning: Tuning) -> None:
        """Raise NoCgroup if `tuning` has I/O limits and this node cannot set any."""
        if tuning.is_limited:
            self._cgroups.prepare()

    def apply(self, volume: Volume, tuning: Tuning | None = None) -> None:
        """Set a volume's I/O limits if the volume is in use: those of its tags, or of `tuning`.

        `tuning` are mutable parameters that are not in the tags yet. Writes nothing if the volume
        has these limits already. A failure to set limits must not make the volume unusable: it is
        logged, and the periodic check tries again.
        """
        requested = limits(volume.own_tags) if tuning is None else tuning
        if not requested.is_limited and not self._limited:
            return
        device = self._activator.device(volume.backing)
        if device is None or not self._is_used(device):
            return
        new_limits = Limited(
            str(volume.id), volume.backing, device.number, requested, volume.capacity_bytes
        )
        with self._guard:
            previous = self._limited.pop(new_limits.number, None)
            if previous is not None and previous.volume_id == new_limits.volume_id:
                new_limits.count, new_limits.counted_seconds = (
                    previous.count,
                    previous.counted_seconds,
                )
                new_limits.limited_seconds = previous.limited_seconds
            if new_limits.io_max:
                self._limited[new_limits.number] = new_limits
            if new_limits.io_max != (UNLIMITED if previous is None else previous.io_max):
                self._set_own(new_limits)

    def adapt_to_size(self, volume: Backing, size_bytes: int) -> None:
        """Adapt the I/O limits of a volume to its new size.

        `size_bytes` is the size as users see it, without a LUKS2 header.
        """
        with self._guard:
            for limited in self._limited_list(volume):
                if limited.size_bytes != size_bytes:
                    limited.size_bytes = size_bytes
                    self._set_own(limited)

    @contextmanager
    def remove_after(self, volume: Backing, *, is_last: bool) -> Iterator[None]:
        """After the body, which unmounts a volume, remove the volume's limits if it is unused.

        With `is_last` the volume has no limits during the body either: the last unmount writes the
        data that is still in memory.
        """
        with self.lift(*[volume] * is_last):
            try:
                yield
            finally:
                self._forget_unused(volume)

    def _forget_unused(self, volume: Backing) -> None:
        """Remove the I/O limits of a volume, if the volume is not mounted or published any more."""
        for limited in self._limited_list(volume):
            if not self._is_used(self._activator.device(volume)):
                with self._guard:
                    self._limited.pop(limited.number, None)
                    self._set(limited, UNLIMITED)

    @contextmanager
    def lift(self, *volumes: Backing) -> Iterator[None]:
        """Lift the I/O limits of volumes within the `with`.

        Several callers may lift the limits of a volume at the same time: the limits are set again
        when the last of these callers is done. Used for snapshots: a snapshot makes the file system
        write all data that is in memory, while other calls wait for the volume group.
        """
        with self._guard:
            limited = [entry for volume in volumes for entry in self._limited_list(volume)]
            for entry in limited:
                self._lifted[entry.number] += 1
                self._set(entry, UNLIMITED)
        try:
            yield
        finally:
            with self._guard:
                for entry in limited:
                    self._lifted[entry.number] -= 1
                    if (now := self._limited.get(entry.number)) is not None:
                        self._set_own(now)
                self._lifted = +self._lifted

    def resume(self, *groups: str) -> int:
        """Set the I/O limits of volumes in use by their tags, in these volume groups or in all.

        Returns the number of limited volumes. Called after a start, and when a volume group is
        back. Limits that a killed process set, and that no tag has, are removed. Reads the fresh
        state of the groups; raises an ExceptionGroup of the errors for single volumes.
        """
        present = list(self._reports.fresh(*groups).volumes())
        with Attempts() as attempts:
            for volume in present:
                with attempts.attempt():
                    self.apply(volume)
            with attempts.attempt():
                self._lift_others(present)
        return sum(1 for volume in present if any(self._limited_list(volume.backing)))

    def _lift_others(self, own_volumes: Sequence[Volume]) -> None:
        """Remove I/O limits that a killed process left on volumes and that no tag records."""
        try:
            present = self._cgroups.limits()
        except mount_errors.NoCgroup:
            present = {}
        with self._guard:
            for volume in own_volumes if present.keys() - self._limited.keys() else ():
                device = self._activator.device(volume.backing)
                if device is None or device.number in self._limited:
                    continue
                if device.number in present:
                    leftover = Limited(str(volume.id), volume.backing, device.number, PLAIN, 0)
                    self._set(leftover, UNLIMITED)

    def check(self) -> None:
        """Set I/O limits again that other programs removed, and measure which volumes reached one.

        Volumes that are no longer active are forgotten. Raises NoCgroup if the limits cannot be
        read or set.
        """
        if not self._limited:
            return
        present = self._cgroups.limits()
        self._measure()
        if present is self._kept:
            return
        with self._guard:
            self._kept = present
            for entry in self.limited:
                if self._lifted[entry.number] or present.get(entry.number) == entry.io_max:
                    continue
                device = self._activator.device(entry.backing)
                if device is None or device.number != entry.number:
                    # Forget the volume: it is not active any more, and another device may have its
                    # number.
                    del self._limited[entry.number]
                    continue
                self._kept = None
                self._cgroups.limit(entry.number, entry.io_max)
                _log.warning(
                    "volume %s lost its limits of I/O; they are set again", entry.volume_id
                )

    def _measure(self) -> None:
        """Measure for each limited volume whether its I/O since the last check reached a limit."""
        now, counts = time.monotonic(), self._cgroups.counts()
        for limited in self.limited:
            # Count no I/O if the counts are the same object as before: the pods had none since.
            if limited.counted_seconds and counts is self._counts:
                limited.counted_seconds = now
            else:
                limited.measure(counts.get(limited.number, limited.count))
        self._counts = counts

    def _is_used(self, device: Device | None) -> bool:
        """Whether the volume with this device is mounted or published."""
        return device is not None and bool(
            users.mounts_of_volume(self._kernel, table.read(self._kernel), device)
        )

    def _limited_list(self, volume: Backing) -> Sequence[Limited]:
        """Return the record of a volume's I/O limits, in a list; an empty list if there are none.

        The record is found by the volume's device number, because the backing of an inline volume
        may have no group.
        """
        device = self._activator.device(volume) if self._limited else None
        limited = None if device is None else self._limited.get(device.number)
        return [] if limited is None else [limited]

    def _set_own(self, limited: Limited) -> None:
        """Set the I/O limits of a volume, unless the limits are lifted at the moment (`lift`)."""
        if not self._lifted[limited.number]:
            self._set(limited, limited.io_max)

    def _set(self, limited: Limited, io_max: IoMax) -> None:
        """Set these I/O limits for the device of a volume; a failure is only logged."""
        self._kept = None
        try:
            self._cgroups.limit(limited.number, io_max)
        except mount_errors.NoCgroup as error:
            _log.warning("limits of volume %s, %s: %s", limited.volume_id, io_max.words(), error)
        else:
            _log.debug("limits of volume %s: %s", limited.volume_id, io_max.words())
