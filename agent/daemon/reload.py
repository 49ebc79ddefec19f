"""Reload of the configuration file at SIGHUP, while the service runs."""

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
    """Applies the configuration file to a running service; `load` reads and checks the file."""

    def __init__(self, service: Service, recovery: Recovery, load: Callable[[], Config]) -> None:
        self._service, self._recovery, self._load = service, recovery, load

    def reload(self) -> None:
        """Load the configuration file, and apply the settings that can change without a restart.

        A setting that differs and cannot change is logged, with the reason. The error of an invalid
        file is logged, and nothing is changed. The method returns at once, because the volume
        groups are recovered in the background. Raises nothing.
        """
        configuration = self._service.configuration
        old_settings = configuration.now
        try:
            waiting = configuration.reload(self._load)
            self._apply(old_settings)
        except errors.BadConfig as error:
            _log.error("the configuration is not reloaded, and stays as it was: %s", error)
        except Exception:
            configuration.is_taken = False
            _log.exception("the configuration is not reloaded completely")
        else:
            for key, why in waiting.items():
                _log.warning("setting %s waits for a restart of Carver: %s", key, why)
            settings = configuration.now
            classes = ", ".join(device_class.name for device_class in settings.classes)
            groups = ", ".join(settings.groups)
            _log.info("configuration reloaded: classes %s, volume groups %s", classes, groups)

    def _apply(self, old_settings: Config) -> None:
        """Apply the new configuration to the parts that do not read it at each use.

        Also has all disks scanned and all volume groups recovered again, and stops the workers of
        volume groups that no class names any more.
        """
        service, settings = self._service, self._service.configuration.now
        if (settings.log_format, settings.log_level) != (
            old_settings.log_format,
            old_settings.log_level,
        ):
            log.configure(settings.log_format, settings.log_level)
        group_definitions.begin(service.definitions, service.volume_groups)
        # Have all disks scanned again, because the setting `devices` may have changed.
        service.volume_groups.outdate()
        for name in old_settings.groups:
            if name not in settings.groups:
                _log.warning("volume group %s: no class names it any more; it is let go of", name)
                service.volume_groups.workers.cancel_jobs(name)
        # Recover all volume groups again, without resuming suspended devices of a new group: an RPC
        # that named the group by a volume's id may have suspended them on purpose. The first RPC in
        # the group resumes the devices that a killed lvm2 left suspended.
        self._recovery.repeat()
        if service.context.admission.is_open:
            for scan in service.scans:
                scan.start()
