"""The service's periodic search for orphans, and its metrics."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from agent.daemon.extra import Extra, Gauge
from agent.daemon.server import Service

if TYPE_CHECKING:
    from agent.extras.orphans.look import OrphanWatch


class Orphans(Extra):
    """The extra `orphans`: a periodic search for orphans."""

    def __init__(self, watch: "OrphanWatch") -> None:
        self.watch = watch

    def start(self) -> None:
        """Start the periodic search for orphans."""
        self.watch.task.start()

    def stop(self) -> None:
        """Stop the periodic search for orphans."""
        self.watch.task.stop()

    def gauges(self) -> Iterable[Gauge]:
        """Return two gauges: the number of orphans of each kind, and the time of the last search.

        Only a complete search counts.
        """
        return (
            Gauge(
                "carver_orphans",
                "Orphaned volumes and objects, seen twice, a grace period apart.",
                {(str(kind),): count for kind, count in self.watch.counts().items()},
                ("kind",),
            ),
            Gauge(
                "carver_orphans_timestamp_seconds",
                "Time of the last complete look for orphans.",
                {(): self.watch.time_seconds},
            ),
        )


def add(service: Service) -> Extra:
    """Make the extra `orphans` of a service; it does nothing without `orphan_interval_seconds`."""
    interval_seconds = service.configuration.now.orphan_interval_seconds
    if not interval_seconds:
        return Extra()
    # Import the module `look` only here, because it imports a YAML parser, which most services do
    # not need.
    from agent.extras.orphans.look import Finder, OrphanWatch

    finder = Finder(service.configuration, service.context.kernel, service.reports)
    return Orphans(OrphanWatch(finder.search, interval_seconds))
