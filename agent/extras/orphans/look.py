"""Look for orphans in the order that proves them, remember since when, and again periodically."""

import fcntl
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.core import errors
from agent.core.background import PeriodicTask
from agent.core.inventory import Inventory
from agent.core.settings import Config
from agent.extras.kubernetes import access
from agent.extras.kubernetes.objects import Lists
from agent.extras.orphans import candidates, needs
from agent.extras.orphans.candidates import Candidate, Kind
from mount import table
from mount.kernel import Kernel

_log = logging.getLogger(__name__)


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


# Beside the socket, where Carver's other files are.
SIGHTINGS = "orphans.json"


@dataclass(frozen=True)
class Orphan:
    """A candidate, and for how long it was one at every look; `sure` after a grace of it."""

    candidate: Candidate
    seen_seconds: float
    sure: bool


class Seeker:
    """Looks for orphans. `lists` is made anew for each look: certificates and tokens change."""

    def __init__(
        self,
        config: Config,
        kernel: Kernel,
        inventory: Inventory,
        lists: Callable[[], Lists],
        sightings: Sightings,
    ) -> None:
        self._config = config
        self._kernel = kernel
        self._inventory = inventory
        self._lists = lists
        self._sightings = sightings

    def look(self) -> Sequence[Orphan]:
        """Everything that seems to be an orphan now, the sure ones first.

        Raises what a report raises, and ClusterSilent, BadConfig: then nothing is one, and nothing
        is noted.
        """
        config = self._config
        found_places = candidates.all_of(self._kernel, config.kubelet_dir, config.driver_name)
        known = self._inventory.state()
        wanted = needs.read(self._lists(), config.driver_name, config.node_id, config.topology_key)
        mounts = table.read(self._kernel)
        found = [
            *candidates.of_volumes(self._inventory, known, wanted),
            *candidates.candidates(found_places, mounts, known, config.groups, wanted),
            *candidates.of_objects(wanted),
        ]
        seen = self._sightings.note((one.key for one in found), wanted.versions)
        grace = config.orphan_grace_seconds
        orphans = [Orphan(one, seen[one.key], seen[one.key] >= grace) for one in found]
        return sorted(orphans, key=lambda one: (not one.sure, one.candidate.kind))


def seeker(config: Config, kernel: Kernel, inventory: Inventory) -> Seeker:
    """One that asks the cluster that the configuration names."""
    return Seeker(
        config,
        kernel,
        inventory,
        lambda: Lists(access.find(config.kubeconfig, os.environ)),
        Sightings(config.endpoint.parent / SIGHTINGS),
    )


class OrphanWatch:
    """Looks for orphans each `interval_seconds` in the background."""

    def __init__(
        self,
        look: Callable[[], "Sequence[Orphan]"],
        interval_seconds: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._look = look
        self._clock = clock
        self._counts: Counter[Kind] = Counter()
        self._logged: frozenset[str] = frozenset()
        self._time_seconds = 0.0
        self.task = PeriodicTask(
            "orphans", self._step, interval_seconds, "orphans are not looked for: %s"
        )

    @property
    def time_seconds(self) -> float:
        """When the last complete look was (epoch); 0 where none was."""
        return self._time_seconds

    def counts(self) -> Mapping[Kind, int]:
        """How many of each kind there were at the last complete look, the sure ones only."""
        return {one: self._counts[one] for one in Kind}

    def _step(self) -> None:
        """Look once, and log new orphans."""
        found = [one.candidate for one in self._look() if one.sure]
        self._counts, self._time_seconds = Counter(one.kind for one in found), self._clock()
        for one in found:
            if one.key not in self._logged:
                words = (one.kind, one.name, one.about, one.told_remedy)
                _log.warning("orphan: %s %s: %s; %s", *words)
        self._logged = frozenset(one.key for one in found)
