"""The configuration that holds now: the one place that has classes, groups and settings."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from agent.settings.settings import SETTINGS, Config


class Configuration:
    """The settings, classes and groups of a process, which a reload of the file replaces.

    Ask `now` at the moment of use and keep no copy: a call that needs a class twice keeps the class
    itself, which is a record that never changes.
    """

    def __init__(self, config: Config) -> None:
        self._now = config
        # Whether the file was taken over when it was loaded last, and when it last was (epoch,
        # seconds).
        self.is_taken, self.taken_seconds = True, time.time()

    @property
    def now(self) -> Config:
        """What holds at this moment."""
        return self._now

    def reload(self, load: Callable[[], Config]) -> Mapping[str, str]:
        """Take over what may change (`Setting.fixed`) of what `load` returns.

        Returns why not, for each setting that differs and waits for a restart. Raises what `load`
        raises, such as BadConfig; then nothing is changed.
        """
        self.is_taken = False
        new, before = load(), self._now
        fixed = {key: getattr(before, key) for key, one in SETTINGS.items() if one.fixed}
        waiting = {
            key: SETTINGS[key].fixed for key, value in fixed.items() if getattr(new, key) != value
        }
        self._now = replace(new, **fixed)
        self.is_taken, self.taken_seconds = True, time.time()
        return waiting
