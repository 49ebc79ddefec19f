"""Work in a thread of its own: what may hang for ever, on a disk or a command that does not end."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def begin(name: str, work: Callable[[], T]) -> "Future[T]":
    """Do it, and have what comes of it in the future; the end of the process does not wait for it.

    Raises RuntimeError where no thread can be had.
    """
    ended: Future[T] = Future()
    threading.Thread(target=_do, args=(work, ended), name=name, daemon=True).start()
    return ended


def _do(work: Callable[[], T], ended: "Future[T]") -> None:
    try:
        value = work()
    except BaseException as error:
        # Whoever waits shall see it, whatever it is.
        ended.set_exception(error)
    else:
        ended.set_result(value)
