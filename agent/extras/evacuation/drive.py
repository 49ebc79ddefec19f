"""Work of an evacuation in a thread of its own, which is repeated until it is done or unwanted."""

import logging
import threading
from collections.abc import Callable
from enum import Enum, auto

from agent.extras.evacuation.evacuation_context import EXPECTED, Context, text_of

_log = logging.getLogger(__name__)

# Seconds until failed work is repeated; doubled with each further failure up to the second number.
_AGAIN_SECONDS, _LONGEST_SECONDS = 5.0, 60.0


class Unwanted(Exception):
    """Raised in a thread whose work is not to go on."""


class Wish(Enum):
    """What is wanted of a unit's move by the request that it is driven for."""

    # Go on.
    GO = auto()
    # Go on only if a volume was handed over: its pods can start nowhere before all are rebound.
    ONLY_IF_HANDED_OVER = auto()
    # End before the next step.
    END = auto()


class Drive:
    """Runs `work` until it returns; after an error it is repeated.

    `tell` is called with each problem. `node` is the node under which the problem is shown as one
    of the evacuation as a whole, as long as the work fails; empty if only `tell` shows it.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        volume_ids: frozenset[str],
        *,
        tell: Callable[[str], None] = lambda _problem: None,
        node: str = "",
    ) -> None:
        self._context, self.name, self.volume_ids, self._tell = context, name, volume_ids, tell
        self.node = node
        self._end_event = threading.Event()
        self.is_over = self.is_done = False
        # The last problem, until the work is repeated successfully; empty if none.
        self.problem = ""

    def start(self, work: Callable[["Drive"], None]) -> None:
        """Begin the work in a thread of its own. `work` gets this object."""
        self._context.begin(f"evacuate {self.name}", lambda: self._run(work))

    def end(self) -> None:
        """Have the work end before its next step."""
        self._end_event.set()

    @property
    def is_ending(self) -> bool:
        """Whether the work is to end before its next step."""
        return self._end_event.is_set()

    def wait(self, seconds: float) -> None:
        """Wait so long. Raises Unwanted if the work is to end."""
        if not self.is_ending:
            self._context.wait(self._end_event, seconds)
        self.require_wanted()

    def require_wanted(self) -> None:
        """Raise Unwanted if the work is to end."""
        if self.is_ending:
            raise Unwanted

    def _run(self, work: Callable[["Drive"], None]) -> None:
        seconds = _AGAIN_SECONDS
        try:
            while not self.is_ending:
                try:
                    work(self)
                    self.is_done = True
                    return
                except EXPECTED as error:
                    self._note(text_of(error))
                    _log.info("%s waits: %s", self.name, text_of(error))
                except Unwanted:
                    raise
                except Exception as error:
                    self._note(f"{type(error).__name__}: {error}")
                    _log.error("the evacuation of %s raised", self.name, exc_info=error)
                self.wait(seconds)
                seconds = min(2 * seconds, _LONGEST_SECONDS)
        except Unwanted:
            pass
        finally:
            self.is_over = True

    def _note(self, problem: str) -> None:
        self.problem = problem
        self._tell(problem)
