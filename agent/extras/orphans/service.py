"""The service's own periodic look for orphans, and their metrics."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from agent.daemon.extra import Extra, Gauge
from agent.daemon.server import Service

if TYPE_CHECKING:
    from agent.extras.orphans.look import OrphanWatch


class Orphans(Extra):
    """The extra: a periodic look, where the settings ask for one."""

    def __init__(self, watch: "OrphanWatch | None" = None) -> None:
        self.watch = watch

    def start(self) -> None:
        """Look from now on."""
        if self.watch is not None:
            self.watch.task.start()

    def stop(self) -> None:
        """Look no more."""
        if self.watch is not None:
            self.watch.task.stop()

    def gauges(self) -> Iterable[Gauge]:
        """How many orphans there are, and when they were looked for."""
        if self.watch is None:
            return ()
        return (
            Gauge(
                "carver_orphans",
                "Volumes and objects that are no longer needed, seen twice, a grace apart.",
                {str(kind): count for kind, count in self.watch.counts().items()},
                label="kind",
            ),
            Gauge(
                "carver_orphans_timestamp_seconds",
                "When the last whole look for orphans ended.",
                {"": self.watch.time_seconds},
            ),
        )


def add(service: Service) -> Orphans:
    """Make the extra of a service."""
    config, kernel, known = service.context.config, service.context.kernel, service.inventory
    if not config.orphan_interval_seconds:
        return Orphans()
    # Only here: it takes a YAML parser, which most services need not load.
    from agent.extras.orphans.look import OrphanWatch, seeker

    return Orphans(OrphanWatch(seeker(config, kernel, known).look, config.orphan_interval_seconds))
