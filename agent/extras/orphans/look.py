"""Search for orphans, record since when each was found, and repeat the search periodically."""

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
    """The clock by which the history of searches measures time.

    - `seconds` returns the seconds since the boot, including time while the machine was suspended.
    - `boot` returns the id of the present boot.
    """

    seconds: Callable[[], float] = boot.uptime_seconds
    boot: Callable[[], str] = boot.boot_id


@dataclass(frozen=True)
class _Known:
    """The content of the history's file, as the last search for orphans left it.

    - `boot` is the id of the boot in which the file was written. `seconds` is the time of the last
      search, in seconds since that boot.
    - `versions` has the resource version of each of the cluster's lists at the last search.
    - `since` has the time when each candidate was first found, in seconds since that boot, by the
      candidate's key. Every search since then has found the candidate.
    """

    boot: str = ""
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    since: Mapping[str, float] = field(default_factory=dict)


class History:
    """A file that records which candidates every search for orphans has found, and since when."""

    def __init__(self, file: Path, clock: Clock | None = None) -> None:
        self._file = file
        self._clock = clock or Clock()

    def record(
        self, candidate_keys: Iterable[str], versions: Mapping[str, str]
    ) -> Mapping[str, float]:
        """Record the candidates of a complete search; return for how many seconds each was found.

        The result is by the candidate's key. Its value is 0 for a candidate that the previous
        search did not find. `versions` has the resource versions of the cluster's lists. The
        history is dropped, and begins again with this search, in three cases:

        1. The machine was booted since the last search.
        2. A list of the cluster has an older version than at the last search: the API server was
           restored from a backup, or is not complete yet.
        3. The file is empty or damaged.

        Raises NotReady if the file cannot be opened, locked or written.
        """
        with self._open_locked() as descriptor:
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
            # Write the content in place, because this file is the one that is locked. Truncate the
            # file first: half a content is not valid JSON, and counts as an empty history.
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(content).encode(), 0)
        return {key: now - first_seconds for key, first_seconds in since.items()}

    @contextmanager
    def _open_locked(self) -> Iterator[int]:
        """Open and lock the history's file for the `with`, so that no two searches write at once.

        Yields the file's descriptor. Raises NotReady if the file cannot be used.
        """
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
    """Return whether one of the cluster's lists has an older resource version than before.

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
    """A candidate, and the seconds for which every search for orphans has found the candidate.

    `is_sure` is true once these seconds have reached the grace period: the candidate is then an
    orphan.
    """

    candidate: Candidate
    seen_seconds: float
    is_sure: bool


def judged(
    all_candidates: Sequence[Candidate],
    history: History,
    cluster_references: References,
    grace_seconds: float,
) -> Sequence[Orphan]:
    """Record the candidates that a complete search found; return each as an Orphan.

    The orphans that every search has found for the grace period come first. Raises NotReady if the
    history's file cannot be used.
    """
    seen_seconds = history.record(
        (candidate.key for candidate in all_candidates), cluster_references.versions
    )
    orphans = [
        Orphan(candidate, seen_seconds[candidate.key], seen_seconds[candidate.key] >= grace_seconds)
        for candidate in all_candidates
    ]
    return sorted(orphans, key=lambda orphan: (not orphan.is_sure, orphan.candidate.kind))


class OrphanSearch(Protocol):
    """Interface of a search for orphans, on one node or in the whole cluster."""

    def search(self) -> Sequence[Orphan]:
        """Search for orphans; return those that were found for the grace period first."""


class Finder:
    """Searches for orphans on this node, and in the cluster that the configuration names."""

    def __init__(self, configuration: Configuration, kernel: Kernel, reports: Reports) -> None:
        self._configuration = configuration
        self._kernel = kernel
        self._reports = reports
        # The history's file is in the socket's directory, like Carver's other files.
        self._history = History(configuration.now.endpoint.parent / "orphans.json")

    def search(self) -> Sequence[Orphan]:
        """Search for orphans on this node and in the cluster; record all candidates in the history.

        Returns each candidate as an Orphan. Those that every search has found for the grace period
        come first.

        1. Find kubelet's directories.
        2. Read the volumes. The report has each volume whose directory was found in step 1, unless
           the volume is gone.
        3. Read the cluster's lists. The lists have each object that refers to a volume of step 2.
        4. Read the mount table, compare all of these, and record the candidates.

        Raises ClusterSilent if the API server did not list all objects, BadConfig if the
        configuration names no usable API server, NotReady if the history's file cannot be used, and
        what `Reports.fresh` raises. A search that raises an error is not recorded.
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
        # Make a new connection for each search, because certificates and tokens change.
        return Lists(access.find(self._configuration.now.kubeconfig, os.environ))


class OrphanWatch:
    """Searches for orphans periodically in the background; logs new orphans and counts all."""

    def __init__(
        self,
        search: Callable[[], "Sequence[Orphan]"],
        interval_seconds: float,
        clock: Callable[[], float] = time.time,
        first_seconds: float = 0.0,
    ) -> None:
        self._search = search
        self._clock = clock
        self._counts: Counter[Kind] = Counter()
        self._logged: frozenset[str] = frozenset()
        # The time of the last complete search for orphans, in seconds since the epoch; 0 before the
        # first search.
        self.time_seconds = 0.0
        self.task = PeriodicTask(
            "orphans",
            self._step,
            interval_seconds,
            "cannot look for orphans: %s",
            first_seconds=first_seconds,
        )

    def counts(self) -> Mapping[Kind, int]:
        """Return the number of orphans of each kind that the last complete search found.

        Only candidates that were found for the grace period are counted.
        """
        return {kind: self._counts[kind] for kind in Kind}

    def _step(self) -> None:
        """Search for orphans once, count them, and log those that the previous search did not find.

        Candidates count as orphans once they were found for the grace period.
        """
        sure_candidates = [orphan.candidate for orphan in self._search() if orphan.is_sure]
        self._counts, self.time_seconds = (
            Counter(candidate.kind for candidate in sure_candidates),
            self._clock(),
        )
        for candidate in sure_candidates:
            if candidate.key not in self._logged:
                log_fields = (
                    candidate.kind,
                    candidate.name,
                    candidate.description,
                    candidate.full_remedy,
                )
                _log.warning("orphan: %s %s: %s; %s", *log_fields)
        self._logged = frozenset(candidate.key for candidate in sure_candidates)
