"""Limits of a volume's I/O: kept as tags, set for all pods together while the volume is in use.

They are set in the cgroup of all pods, for the device that the pods use: the dm-crypt device of an
encrypted volume, else the logical volume. The kernel forgets them with the device. Crash points:
whatever was set or not, the next start sets what the tags say (`resume`). Kubelet or systemd may
take the cgroup's I/O controller away at any time, and all limits with it, so they are checked. No
caller waits for another: those that lift limits are counted.
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

# systemd takes the I/O controller away when it reloads, and when units end that it was there for.
_CHECK_SECONDS = 10.0
# Pods that do so much of what a limit allows wait for it.
_NEARLY = 0.95


@dataclass
class Limited:
    """A volume whose I/O is limited: by its id, which is shown, and by its backing.

    `number` is that of the device which its backing had then: it may be another's by now.
    `limited_seconds`: how long its pods did as much as a limit allows.
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
        """Its limits at its present size."""
        return self.tuning.io_max(self.size_bytes)

    def measure(self, count: IoCount) -> None:
        """Add the time since the last look, if so much was done in it as a limit allows."""
        now = time.monotonic()
        seconds, before = now - self.counted_seconds, self.count
        if self.counted_seconds and any(
            limit and after - there >= _NEARLY * limit * seconds
            for limit, after, there in zip(
                vars(self.io_max).values(),
                vars(count).values(),
                vars(before).values(),
                strict=True,
            )
        ):
            self.limited_seconds += seconds
        self.count, self.counted_seconds = count, now


class Limiter:
    """Sets, keeps and removes the limits of volumes in use."""

    def __init__(
        self, cgroups: Cgroups, reports: Reports, activator: Activator, kernel: Kernel
    ) -> None:
        self._cgroups, self._kernel = cgroups, kernel
        self._reports, self._activator = reports, activator
        # Held for writes to cgroupfs, which wait for no disk.
        self._guard = threading.Lock()
        self._limited: dict[DeviceNumber, Limited] = {}
        # How many callers want each device without limits for a moment. A count of its own, as its
        # record may be replaced meanwhile.
        self._lifted: Counter[DeviceNumber] = Counter()
        # What the kernel has while each is as it should be: with 200 volumes a comparison of all is
        # more than a percent of a core.
        self._kept: Mapping[DeviceNumber, IoMax] | None = None
        # What the pods had done at the last look.
        self._counts: Mapping[DeviceNumber, IoCount] | None = None
        self.task = PeriodicTask(
            "limits", self.check, _CHECK_SECONDS, "limits of I/O are not checked: %s"
        )

    @property
    def limited(self) -> Sequence[Limited]:
        """The volumes that are limited now."""
        return list(self._limited.values())

    def require(self, tuning: Tuning) -> None:
        """Raise NoCgroup for limits where there can be none."""
        if tuning.is_limited:
            self._cgroups.prepare()

    def apply(self, volume: Volume, tuning: Tuning | None = None) -> None:
        """Limit a volume, if it is in use, by its tags, or by these mutable parameters.

        No write where it is limited so already. A volume must not become unusable for its limits:
        where they cannot be set that is logged, and checks try it again.
        """
        said = limits(volume.own_tags) if tuning is None else tuning
        if not said.is_limited and not self._limited:
            return
        device = self._activator.device(volume.backing)
        if device is None or not self._is_used(device):
            return
        new = Limited(str(volume.id), volume.backing, device.number, said, volume.capacity_bytes)
        with self._guard:
            before = self._limited.pop(new.number, None)
            if before is not None and before.volume_id == new.volume_id:
                new.count, new.counted_seconds = before.count, before.counted_seconds
                new.limited_seconds = before.limited_seconds
            if new.io_max:
                self._limited[new.number] = new
            if new.io_max != (UNLIMITED if before is None else before.io_max):
                self._set_own(new)

    def grown(self, volume: Backing, size_bytes: int) -> None:
        """Limit a volume by its new size, in bytes as its users see it."""
        with self._guard:
            for one in self._of(volume):
                if one.size_bytes != size_bytes:
                    one.size_bytes = size_bytes
                    self._set_own(one)

    @contextmanager
    def leaving(self, volume: Backing, *, is_last: bool) -> Iterator[None]:
        """Unmount a volume within the `with`; then limits are gone unless it is in use still.

        `is_last`: without limits meanwhile, as the last unmount writes what is left.
        """
        with self.lifted(*[volume] * is_last):
            try:
                yield
            finally:
                self._forget_unused(volume)

    def _forget_unused(self, volume: Backing) -> None:
        for one in self._of(volume):
            if not self._is_used(self._activator.device(volume)):
                with self._guard:
                    self._limited.pop(one.number, None)
                    self._set(one, UNLIMITED)

    @contextmanager
    def lifted(self, *volumes: Backing) -> Iterator[None]:
        """Have volumes without limits within the `with`, until the last of those that overlap ends.

        A snapshot has a file system write all that is in memory, while its group waits.
        """
        with self._guard:
            found = [one for volume in volumes for one in self._of(volume)]
            for one in found:
                self._lifted[one.number] += 1
                self._set(one, UNLIMITED)
        try:
            yield
        finally:
            with self._guard:
                for one in found:
                    self._lifted[one.number] -= 1
                    if (now := self._limited.get(one.number)) is not None:
                        self._set_own(now)
                self._lifted = +self._lifted

    def resume(self, *groups: str) -> int:
        """Limit the volumes in use of these groups, or of all, by their tags; how many are.

        After a start, or when a group is back. What a process set that was killed, and the tags do
        not say, is removed.
        """
        own = list(self._reports.fresh(*groups).volumes())
        with Attempts() as attempts:
            for volume in own:
                with attempts.one():
                    self.apply(volume)
            with attempts.one():
                self._lift_others(own)
        return sum(1 for one in own if any(self._of(one.backing)))

    def _lift_others(self, own: Sequence[Volume]) -> None:
        """Remove limits of these volumes that no tag has: a killed process left them."""
        try:
            present = self._cgroups.limits()
        except mount_errors.NoCgroup:
            present = {}
        with self._guard:
            for volume in own if present.keys() - self._limited.keys() else ():
                device = self._activator.device(volume.backing)
                if device is None or device.number in self._limited:
                    continue
                if device.number in present:
                    left = Limited(str(volume.id), volume.backing, device.number, PLAIN, 0)
                    self._set(left, UNLIMITED)

    def check(self) -> None:
        """Set again what others took away, and measure who is at a limit. Raises NoCgroup."""
        if not self._limited:
            return
        present = self._cgroups.limits()
        self._measure()
        if present is self._kept:
            return
        with self._guard:
            self._kept = present
            for one in self.limited:
                if self._lifted[one.number] or present.get(one.number) == one.io_max:
                    continue
                device = self._activator.device(one.backing)
                if device is None or device.number != one.number:
                    # It is not active any more, and its number may be another's.
                    del self._limited[one.number]
                    continue
                self._kept = None
                self._cgroups.limit(one.number, one.io_max)
                _log.warning("volume %s lost its limits of I/O; they are set again", one.volume_id)

    def _measure(self) -> None:
        now, counts = time.monotonic(), self._cgroups.counts()
        for one in self.limited:
            if one.counted_seconds and counts is self._counts:  # the pods are idle
                one.counted_seconds = now
            else:
                one.measure(counts.get(one.number, one.count))
        self._counts = counts

    def _is_used(self, device: Device | None) -> bool:
        return device is not None and bool(
            users.places(self._kernel, table.read(self._kernel), device)
        )

    def _of(self, volume: Backing) -> Sequence[Limited]:
        """The volume, if it is limited; by its device, as a backing may lack its group."""
        device = self._activator.device(volume) if self._limited else None
        found = None if device is None else self._limited.get(device.number)
        return [] if found is None else [found]

    def _set_own(self, one: Limited) -> None:
        """Set a volume's own limits, unless it is without any for a moment: then later."""
        if not self._lifted[one.number]:
            self._set(one, one.io_max)

    def _set(self, one: Limited, io_max: IoMax) -> None:
        self._kept = None
        try:
            self._cgroups.limit(one.number, io_max)
        except mount_errors.NoCgroup as error:
            _log.warning("limits of volume %s, %s: %s", one.volume_id, io_max.words(), error)
        else:
            _log.debug("limits of volume %s: %s", one.volume_id, io_max.words())
