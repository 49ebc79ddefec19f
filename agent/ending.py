"""Ends that nobody waits long for: side by side, and what hangs is left to end by itself."""

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait

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


def _begun(name: str, work: Callable[[], object]) -> Future[None]:
    ended: Future[None] = Future()
    try:
        threading.Thread(target=_do, args=(work, ended), name=f"end {name}", daemon=True).start()
    except RuntimeError as error:
        # No thread can be had. Here it could hang, and the rest would wait for it.
        ended.set_exception(error)
    return ended


def _do(work: Callable[[], object], ended: Future[None]) -> None:
    try:
        work()
    except BaseException as error:
        ended.set_exception(error)
    else:
        ended.set_result(None)
