"""Pieces of work that go on side by side, and whose results come in order. Bounded."""

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")

# Reading, hashing, compressing and writing all leave Python's lock to others. More than a disk and
# a few processors can use would only take memory: a piece is up to form.MOST_BYTES.
WORKERS = min(4, os.cpu_count() or 1) + 1
_AHEAD = 2 * WORKERS


def lent(pieces: Iterable[A], most_bytes: int) -> Iterator[tuple[A, memoryview]]:
    """Pieces, each with memory for so many bytes that is its own until `ordered` gave its result.

    What is asked of the kernel anew for each piece is filled with zeroes a page at a time first,
    which takes longer than a disk.
    """
    places = rooms(most_bytes)
    for piece in pieces:
        yield piece, next(places)


def rooms(most_bytes: int) -> Iterator[memoryview]:
    """Places in memory, one after the other, and again when `ordered` is done with them."""
    return cycle([memoryview(mmap.mmap(-1, most_bytes)) for _ in range(_AHEAD + 2)])


def ordered(work: Callable[[A], B], pieces: Iterable[A]) -> Iterator[B]:
    """What `work` makes of each piece, in the order of the pieces; raises what fails first.

    Where there are no further pieces because of an error, what was begun before is given first. No
    more than a few pieces are taken ahead. When it is closed, nothing is under way any more.
    """
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="stream") as pool:
        begun: deque[Future[B]] = deque()
        try:
            taken, problem = iter(pieces), None
            while problem is None:
                try:
                    piece = next(taken)
                except StopIteration:
                    break
                except Exception as error:
                    problem = error
                else:
                    begun.append(pool.submit(work, piece))
                    if len(begun) >= _AHEAD:
                        yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
            if problem is not None:
                raise problem
        finally:
            for one in begun:
                one.cancel()
