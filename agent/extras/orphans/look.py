"""Find orphans in the order that proves them, record since when they are seen, and repeat."""

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
from typing import Any, Protocol

from agent.core import boot, errors
from agent.extras.kubernetes import access
from agent.extras.kubernetes.objects import Lists
from agent.extras.orphans import candidates, references
from agent.extras.orphans.candidates import Candidate, Kind
from agent.extras.orphans.references import References
from agent.settings.configuration import Configuration
from agent.volumes.reports import Reports
from agent.work.background import PeriodicTask
from mount import table
from mount.kernel import Kernel

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Clock:
    """Seconds since the boot, suspended time included, and the id of the boot."""

    seconds: Callable[[], float] = boot.seconds
    boot: Callable[[], str] = boot.identity


@dataclass(frozen=True)
class _Known:
    """The file's content: since when each orphan was always seen, in seconds of that boot."""

    boot: str = ""
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    since: Mapping[str, float] = field(default_factory=dict)


class History:
    """A file of what every look up to now has seen, and since when."""

    def __init__(self, file: Path, clock: Clock | None = None) -> None:
        self._file = file
        self._clock = clock or Clock()

    def record(self, seen: Iterable[str], versions: Mapping[str, str]) -> Mapping[str, float]:
        """Record a complete look; return for how many seconds each was seen, 0 at first.

        `versions` are those of the cluster's lists. If one is older than before, the API server was
        restored from a backup or is not complete yet, so the history is dropped. Raises NotReady if
        the file cannot be used.
        """
        with self._opened() as descriptor:
            known = _parse(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
            now, boot = self._clock.seconds(), self._clock.boot()
            if known.boot != boot or now < known.seconds or _is_older(versions, known.versions):
                known = _Known()
            since = {one: min(known.since.get(one, now), now) for one in seen}
            noted = {"boot": boot, "seconds": now, "versions": dict(versions), "since": since}
            # In place, as this is the locked file. Empty first: half of it is not JSON then.
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(noted).encode(), 0)
        return {one: now - first for one, first in since.items()}

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Open the file and lock it, so that two looks do not write at once."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._file.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            descriptor = os.open(self._file, flags, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield descriptor
            finally:
                os.close(descriptor)
        except OSError as error:
            why = f"{self._file}: {error.strerror}"
            raise errors.NotReady(f"cannot use the history of orphans: {why}") from None


def _parse(content: bytes) -> _Known:
    try:
        data: Any = json.loads(content)
        return _Known(
            str(data["boot"]),
            float(data["seconds"]),
            {str(key): str(value) for key, value in data["versions"].items()},
            {str(key): float(value) for key, value in data["since"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return _Known()


def _is_older(versions: Mapping[str, str], before: Mapping[str, str]) -> bool:
    """Whether a list is older than before; versions that are not numbers are ignored."""
    return any(
        one.isdecimal() and (then := before.get(key, "")).isdecimal() and int(one) < int(then)
        for key, one in versions.items()
    )


@dataclass(frozen=True)
class Orphan:
    """A candidate, and for how long every look has seen it; `sure` after the grace period."""

    candidate: Candidate
    seen_seconds: float
    sure: bool


def judged(
    found: Sequence[Candidate], history: History, wanted: References, grace_seconds: float
) -> Sequence[Orphan]:
    """Record the candidates of a complete look; return them, the sure ones first."""
    seen = history.record((one.key for one in found), wanted.versions)
    orphans = [Orphan(one, seen[one.key], seen[one.key] >= grace_seconds) for one in found]
    return sorted(orphans, key=lambda one: (not one.sure, one.candidate.kind))


class Looking(Protocol):
    """What finds orphans: on a node, or in the whole cluster."""

    def look(self) -> Sequence[Orphan]:
        """Return all candidates, the sure ones first."""


class Finder:
    """Finds orphans by the cluster that the configuration names."""

    def __init__(self, configuration: Configuration, kernel: Kernel, reports: Reports) -> None:
        self._configuration = configuration
        self._kernel = kernel
        self._reports = reports
        # Beside the socket, like Carver's other files.
        self._history = History(configuration.now.endpoint.parent / "orphans.json")

    def look(self) -> Sequence[Orphan]:
        """Return all candidates, the sure ones first.

        Raises ClusterSilent, BadConfig, NotReady and what a report raises; nothing is recorded
        then.
        """
        config = self._configuration.now
        found_places = candidates.all_of(self._kernel, config.kubelet_dir, config.driver_name)
        known = self._reports.fresh()
        wanted = references.read(
            self._lists(),
            config.driver_name,
            config.topology_key,
            [config.node_id],
            pods_on=config.node_id,
        )
        mounts = table.read(self._kernel)
        found = [
            *candidates.of_volumes(self._reports, known, wanted),
            *candidates.candidates(found_places, mounts, known, config.groups, wanted),
            *candidates.of_objects(wanted),
        ]
        return judged(found, self._history, wanted, config.orphan_grace_seconds)

    def _lists(self) -> Lists:
        # For each look, as certificates and tokens change.
        return Lists(access.find(self._configuration.now.kubeconfig, os.environ))


class OrphanWatch:
    """Looks for orphans periodically in the background."""

    def __init__(
        self,
        look: Callable[[], "Sequence[Orphan]"],
        interval_seconds: float,
        clock: Callable[[], float] = time.time,
        first_seconds: float = 0.0,
    ) -> None:
        self._look = look
        self._clock = clock
        self._counts: Counter[Kind] = Counter()
        self._logged: frozenset[str] = frozenset()
        # The time of the last complete look, since the epoch; 0 before the first.
        self.time_seconds = 0.0
        self.task = PeriodicTask(
            "orphans",
            self._step,
            interval_seconds,
            "cannot look for orphans: %s",
            first_seconds=first_seconds,
        )

    def counts(self) -> Mapping[Kind, int]:
        """Count the sure ones of each kind at the last complete look."""
        return {one: self._counts[one] for one in Kind}

    def _step(self) -> None:
        """Look once, and log new orphans."""
        found = [one.candidate for one in self._look() if one.sure]
        self._counts, self.time_seconds = Counter(one.kind for one in found), self._clock()
        for one in found:
            if one.key not in self._logged:
                words = (one.kind, one.name, one.about, one.full_remedy)
                _log.warning("orphan: %s %s: %s; %s", *words)
        self._logged = frozenset(one.key for one in found)
