"""The beginning, behind the socket: what has to be done before calls may ask for volume groups.

lvm2 may take its time, or wait for a disk that does not answer. Until it has said what is there,
calls that need groups are told to come again; all others are carried out. What fails is tried
again: sooner at first, then each minute.
"""

import logging
import threading
from collections.abc import Callable

from agent.admission import Admission
from lvm import command

_log = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS = 1.0
_LONGEST_RETRY_SECONDS = 60.0
# Whoever waits for a disk shall not hold what the next attempt needs.
_PATIENCE_SECONDS = 60.0


class Beginning:
    """Carries out `begin` until it succeeds, then has calls admitted, then does what comes after.

    `begin` looks before it acts, so it may fail, or be killed, at any step.
    """

    def __init__(
        self, begin: Callable[[], None], admission: Admission, after: Callable[[], None]
    ) -> None:
        self._begin = begin
        self._admission = admission
        self._after = after
        self._stopping = threading.Event()
        self._problem = ""
        # A command that does not end must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="beginning", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Try no more; what is under way is left to end by itself."""
        self._stopping.set()

    def _run(self) -> None:
        pause = _FIRST_RETRY_SECONDS
        while not self._succeeds():
            if self._stopping.wait(pause):
                return
            pause = min(2 * pause, _LONGEST_RETRY_SECONDS)
        self._admission.open()
        self._after()

    def _succeeds(self) -> bool:
        try:
            with command.time_limit(_PATIENCE_SECONDS):
                self._begin()
        except Exception as error:
            if (problem := str(error) or type(error).__name__) != self._problem:
                _log.error("no volume group can be used yet, and it is tried again: %s", problem)
            self._problem = problem
            self._admission.refuse(error)
            return False
        if self._problem:
            _log.warning("lvm2 answers now: volume groups can be used")
        return True
