"""What is put off until a call has answered: done at once, by another thread; again if it fails."""

import logging
import threading
from collections.abc import Callable

from lvm import command

_log = logging.getLogger(__name__)

_TIME_LIMIT_SECONDS = 60.0
_RETRY_SECONDS = 60.0
# A service that ends leaves it so much; what was not done then is found and done later.
_ENDING_SECONDS = 5.0


class Behind:
    """Has `work` done soon after each `wake`; however many wake it meanwhile, once more.

    `work` is told whether the service ends. Nothing it raises ends the thread.
    """

    def __init__(self, name: str, work: Callable[[bool], None]) -> None:
        self._name, self._work = name, work
        self._guard = threading.Lock()
        self._woken = threading.Event()
        self._is_ending = False
        self._thread: threading.Thread | None = None
        self._told = ""

    def wake(self) -> None:
        """There is something to do. Where no thread can be had, `catch_up` asks for one again."""
        self._woken.set()
        try:
            self._ensure_thread()
        except RuntimeError as error:
            # Whoever wakes has done what he was asked for: it is none the less done.
            self._tell(str(error))

    def catch_up(self) -> None:
        """Begin what there was no thread for; returns at once."""
        if self._thread is None and self._woken.is_set():
            self.wake()

    def stop(self) -> None:
        """Do what is left to do, unless that takes long."""
        self.catch_up()
        with self._guard:
            self._is_ending = True
            thread = self._thread
        if thread is not None:
            self._woken.set()
            thread.join(_ENDING_SECONDS)

    def _ensure_thread(self) -> None:
        with self._guard:
            if self._thread is None and not self._is_ending:
                thread = threading.Thread(
                    target=self._run, name=f"behind {self._name}", daemon=True
                )
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        patience: float | None = None
        while True:
            self._woken.wait(patience)
            # Before the work: what comes up meanwhile may have been seen by it, or not.
            self._woken.clear()
            is_ending = self._is_ending
            patience = None if self._succeeds(is_ending) else _RETRY_SECONDS
            if is_ending:
                return

    def _succeeds(self, is_ending: bool) -> bool:
        try:
            with command.time_limit(_TIME_LIMIT_SECONDS):
                self._work(is_ending)
        except BaseException as error:
            self._tell(str(error))
            return False
        self._told = ""
        return True

    def _tell(self, problem: str) -> None:
        # The same again each minute is told once.
        if problem != self._told:
            _log.warning("volume group %s, behind the answers: %s", self._name, problem)
        self._told = problem
