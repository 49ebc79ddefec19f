"""Find orphans, record since when each was seen, and repeat that in the background."""

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
    """The clock of the history.

    - `seconds` returns the seconds since the boot, including time while the machine was suspended.
    - `boot` returns the id of the present boot.
    """

    seconds: Callable[[], float] = boot.seconds
    boot: Callable[[], str] = boot.identity


@dataclass(frozen=True)
class _Known:
    """The content of the history's file.

    - `boot` is the id of the boot in which the file was written, `seconds` the time since that
      boot.
    - `versions` has the resource version of each of the cluster's lists at the last look.
    - `since` has, for each candidate's key, the time since that boot at which the candidate was
      first seen; every look since has seen it.
    """

    boot: str = ""
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    since: Mapping[str, float] = field(default_factory=dict)


class History:
    """A file that records which candidates every look has seen so far, and since when."""

    def __init__(self, file: Path, clock: Clock | None = None) -> None:
        self._file = file
        self._clock = clock or Clock()

    def record(
        self, candidate_keys: Iterable[str], versions: Mapping[str, str]
    ) -> Mapping[str, float]:
        """Record a complete look; return for each candidate the seconds for which it was seen.

        A candidate that is new has 0 seconds. `versions` has the resource versions of the cluster's
        lists. The history is dropped, and begins again with this look, in two cases:

        1. The machine was booted since the last look.
        2. A list of the cluster has an older version than at the last look: the API server was
           restored from a backup, or is not complete yet.

        Raises NotReady if the file cannot be used.
        """
        with self._opened() as descriptor:
            previous = _parse(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
            now, boot = self._clock.seconds(), self._clock.boot()
            if (
                previous.boot != boot
                or now < previous.seconds
                or _is_older(versions, previous.versions)
            ):
                previous = _Known()
            since = {key: min(previous.since.get(key, now), now) for key in candidate_keys}
            content = {"boot": boot, "seconds": now, "versions": dict(versions), "since": since}
            # The content is written in place, as this file is the locked one. The file is
            # truncated first: half a content is not valid JSON, and counts as an empty history.
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(content).encode(), 0)
        return {key: now - first_seconds for key, first_seconds in since.items()}

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Open and lock the history's file, so that two looks do not write at the same time."""
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


def _is_older(versions: Mapping[str, str], earlier_versions: Mapping[str, str]) -> bool:
    """Return whether a list's resource version is older than before.

    Versions that are not decimal numbers are ignored.
    """
    return any(
        version.isdecimal()
        and (previous := earlier_versions.get(key, "")).isdecimal()
        and int(version) < int(previous)
        for key, version in versions.items()
    )


@dataclass(frozen=True)
class Orphan:
    """A candidate, and for how long every look has seen it.

    `sure` is true once the candidate has been seen for the grace period.
    """

    candidate: Candidate
    seen_seconds: float
    sure: bool


def judged(
    all_candidates: Sequence[Candidate],
    history: History,
    cluster_references: References,
    grace_seconds: float,
) -> Sequence[Orphan]:
    """Record the candidates of a complete look; return them as orphans, the sure ones first."""
    seen_seconds = history.record(
        (candidate.key for candidate in all_candidates), cluster_references.versions
    )
    orphans = [
        Orphan(candidate, seen_seconds[candidate.key], seen_seconds[candidate.key] >= grace_seconds)
        for candidate in all_candidates
    ]
    return sorted(orphans, key=lambda orphan: (not orphan.sure, orphan.candidate.kind))


class Looking(Protocol):
    """A finder of orphans, on one node or in the whole cluster."""

    def look(self) -> Sequence[Orphan]:
        """Find all candidates; return them, the sure ones first."""


class Finder:
    """Finds orphans on this node, and in the cluster that the configuration names."""

    def __init__(self, configuration: Configuration, kernel: Kernel, reports: Reports) -> None:
        self._configuration = configuration
        self._kernel = kernel
        self._reports = reports
        # The history is in the socket's directory, like Carver's other files.
        self._history = History(configuration.now.endpoint.parent / "orphans.json")

    def look(self) -> Sequence[Orphan]:
        """Find all candidates on this node and in the cluster; return them, the sure ones first.

        1. Find kubelet's directories.
        2. Read the volumes: the report has every volume of the directories found.
        3. Read the cluster's lists: they have every object that refers to a volume found.
        4. Read the mount table, compare all of these, and record the candidates.

        Raises ClusterSilent, BadConfig, NotReady, and what `Reports.fresh` raises. A look that
        raises is not recorded.
        """
        config = self._configuration.now
        kubelet_places = candidates.all_of(self._kernel, config.kubelet_dir, config.driver_name)
        fresh_report = self._reports.fresh()
        cluster_references = references.read(
            self._lists(),
            config.driver_name,
            config.topology_key,
            [config.node_id],
            pods_on=config.node_id,
        )
        mounts = table.read(self._kernel)
        all_candidates = [
            *candidates.find_volumes(self._reports, fresh_report, cluster_references),
            *candidates.candidates(
                kubelet_places, mounts, fresh_report, config.groups, cluster_references
            ),
            *candidates.find_objects(cluster_references),
        ]
        return judged(
            all_candidates, self._history, cluster_references, config.orphan_grace_seconds
        )

    def _lists(self) -> Lists:
        # The connection is made anew for each look, as certificates and tokens change.
        return Lists(access.find(self._configuration.now.kubeconfig, os.environ))


class OrphanWatch:
    """Looks for orphans periodically in the background, logs new ones and counts them."""

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
        # The time of the last complete look, in seconds since the epoch; 0 before the first look.
        self.time_seconds = 0.0
        self.task = PeriodicTask(
            "orphans",
            self._step,
            interval_seconds,
            "cannot look for orphans: %s",
            first_seconds=first_seconds,
        )

    def counts(self) -> Mapping[Kind, int]:
        """Return the number of sure orphans of each kind at the last complete look."""
        return {kind: self._counts[kind] for kind in Kind}

    def _step(self) -> None:
        """Look for orphans once, count the sure ones, and log each that was not logged before."""
        sure_candidates = [orphan.candidate for orphan in self._look() if orphan.sure]
        self._counts, self.time_seconds = (
            Counter(candidate.kind for candidate in sure_candidates),
            self._clock(),
        )
        for candidate in sure_candidates:
            if candidate.key not in self._logged:
                log_fields = (
                    candidate.kind,
                    candidate.name,
                    candidate.about,
                    candidate.full_remedy,
                )
                _log.warning("orphan: %s %s: %s; %s", *log_fields)
        self._logged = frozenset(candidate.key for candidate in sure_candidates)
