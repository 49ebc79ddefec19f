"""Reload of the configuration's file while the service runs, as SIGHUP asks for it."""

import logging
from collections.abc import Callable

from agent.core import errors
from agent.daemon import log
from agent.daemon.server import Service
from agent.daemon.startup import Recovery
from agent.groups import group_definitions
from agent.settings.settings import Config

_log = logging.getLogger(__name__)


class Reloader:
    """Has a running service take its file over; `load` reads and checks that as at the start."""

    def __init__(self, service: Service, recovery: Recovery, load: Callable[[], Config]) -> None:
        self._service, self._recovery, self._load = service, recovery, load

    def reload(self) -> None:
        """Take over what may change, and log each other setting that differs, with why it waits.

        A file that is not right is logged and changes nothing. Returns at once: groups are
        recovered by their loops. Raises nothing.
        """
        configuration = self._service.configuration
        before = configuration.now
        try:
            waiting = configuration.reload(self._load)
            self._apply(before)
        except errors.BadConfig as error:
            _log.error("the configuration is not reloaded, and stays as it was: %s", error)
        except Exception:
            configuration.is_taken = False
            _log.exception("the configuration is not reloaded completely")
        else:
            for key, why in waiting.items():
                _log.warning("setting %s waits for a restart of Carver: %s", key, why)
            now = configuration.now
            classes = ", ".join(one.name for one in now.classes)
            groups = ", ".join(now.groups)
            _log.info("configuration reloaded: classes %s, volume groups %s", classes, groups)

    def _apply(self, before: Config) -> None:
        """Have what does not ask at the moment of use follow the configuration."""
        service, now = self._service, self._service.configuration.now
        if (now.log_format, now.log_level) != (before.log_format, before.log_level):
            log.configure(now.log_format, now.log_level)
        group_definitions.begin(service.definitions, service.volume_groups)
        # `devices` may have changed.
        service.volume_groups.outdate()
        for name in before.groups:
            if name not in now.groups:
                _log.warning("volume group %s: no class names it any more; it is let go of", name)
                service.volume_groups.workers.let_go(name)
        # What lvm2 left suspended in a new group its first call resumes, as in any other: here a
        # call by an id may have suspended it on purpose.
        self._recovery.repeat()
        if service.context.admission.is_open:
            for one in service.looks:
                one.start()
