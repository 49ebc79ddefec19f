"""Ends that nobody waits long for: side by side, and what hangs is left to end by itself."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait

from lvm import threads

_log = logging.getLogger(__name__)


def side_by_side(works: Mapping[str, Callable[[], object]], seconds: float) -> None:
    """Do all of it at once, each under its name, and wait for it so long at most.

    What one raises is logged, and so is which has not ended by then; neither keeps the others.
    """
    begun = {name: _begun(name, work) for name, work in works.items()}
    wait(begun.values(), seconds)
    for name, ended in begun.items():
        if not ended.done():
            _log.warning("%s has not ended after %g s, and is left to itself", name, seconds)
        elif (error := ended.exception()) is not None:
            _log.error("%s has not ended well: %s", name, error)


def _begun(name: str, work: Callable[[], object]) -> Future[object]:
    try:
        return threads.begin(f"end {name}", work)
    except RuntimeError as error:
        # No thread can be had. Here it could hang, and the rest would wait for it.
        ended = Future[object]()
        ended.set_exception(error)
        return ended
