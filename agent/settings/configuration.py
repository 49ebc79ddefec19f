"""The present configuration of a process: the one object with settings and device classes."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from agent.settings.settings import SETTINGS, Config


class Configuration:
    """The settings, classes and volume groups of a process; a reload replaces all that may change.

    A call reads `now` when it begins, or when it needs a setting, and hands the immutable record
    down. No object keeps a copy beyond a call.
    """

    def __init__(self, config: Config) -> None:
        # The configuration that is valid at this moment; only `reload` replaces it.
        self.now = config
        # Whether the last load of the configuration file succeeded, and the time of the last
        # successful load, in seconds since the epoch.
        self.is_taken, self.taken_seconds = True, time.time()

    def reload(self, load: Callable[[], Config]) -> Mapping[str, str]:
        """Load the configuration, and take over all that may change while the service runs.

        A setting with `Setting.fixed` keeps its value. Returns the reasons, by the keys of the
        fixed settings whose values differ and so wait for a restart. Raises the errors of `load`,
        such as BadConfig, and changes nothing after such an error.
        """
        self.is_taken = False
        loaded, old_settings = load(), self.now
        fixed = {
            key: getattr(old_settings, key) for key, setting in SETTINGS.items() if setting.fixed
        }
        waiting = {
            key: SETTINGS[key].fixed
            for key, value in fixed.items()
            if getattr(loaded, key) != value
        }
        self.now = replace(loaded, **fixed)
        self.is_taken, self.taken_seconds = True, time.time()
        return waiting
