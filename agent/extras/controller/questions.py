"""Questions to the API server from the event loop: few threads, and a queue for each key.

Of one key one question is asked at a time: what takes long for it holds up its own questions only.
A question that no call waits for any more keeps its place until it ends, so that callers who repeat
it have no more threads wait for the API server.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from agent.core import errors
from mount import command

_T = TypeVar("_T")

# How many questions are asked at once.
_AT_ONCE = 32
# How long a call waits until its question begins, and for the answer. It is a third of what the
# provisioner waits for the call in all: what is not answered in this time is asked for anew.
PATIENCE_SECONDS = 20.0


class NotInTime(errors.AgentError):
    """A question did not begin in time, or was not answered in time."""


class SharedReading(Generic[_T]):
    """Something that takes long to read, for all questions of calls that began before its reading.

    So a hundred calls at once have it read once or twice, and none goes by what was read before it
    began. A reading that fails has failed for all of these, too: they do not fail one by one.
    """

    def __init__(self, read: Callable[[], _T], clock: Callable[[], float]) -> None:
        self._read, self._clock = read, clock
        self._lock = threading.Lock()
        # When the last reading began, and what came of it.
        self._begun = float("-inf")
        self._found: _T | errors.AgentError

    def since(self, moment: float) -> _T:
        """What a reading found that began after a moment. Raises what the reading raised."""
        with self._lock:
            if self._begun <= moment:
                begun = self._clock()
                try:
                    self._found = self._read()
                except errors.AgentError as error:
                    # Without what was read, which a traceback would keep.
                    self._found = error.with_traceback(None)
                self._begun = begun
            found = self._found
        if isinstance(found, errors.AgentError):
            raise found
        return found


class Questions:
    """Asks questions that wait for the API server. For one event loop."""

    def __init__(self, name: str, limit_seconds: float) -> None:
        """Each question's requests end soon after `limit_seconds`; `name` is its threads'."""
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix=name)
        self._limit_seconds = limit_seconds
        self._free = asyncio.Semaphore(_AT_ONCE)
        # By the key; kept by those that wait for it or have it.
        self._queues = WeakValueDictionary[str, asyncio.Lock]()

    async def ask(self, key: str, question: Callable[..., _T], *about: object) -> _T:
        """Run a question in a thread, after the others of its key.

        Raises NotInTime, which names the key, and what the question raises.
        """
        problem = f"other questions about {key} come first"
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._take(queue := self._queues.setdefault(key, asyncio.Lock()))
            problem = "the API server does not answer in time"
            async with asyncio.timeout(PATIENCE_SECONDS):
                return await self._begin(queue, question, *about)
        except TimeoutError:
            raise NotInTime(problem) from None

    async def _take(self, queue: asyncio.Lock) -> None:
        """Wait for the others of the key, and for a thread."""
        await queue.acquire()
        try:
            await self._free.acquire()
        except asyncio.CancelledError:
            queue.release()
            raise

    def _begin(
        self, queue: asyncio.Lock, question: Callable[..., _T], *about: object
    ) -> "asyncio.Future[_T]":
        """Ask in a thread; the next one of the key begins after that, also if no call waits."""
        loop = asyncio.get_running_loop()

        def release() -> None:
            queue.release()
            self._free.release()

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(release)

        begun = self._threads.submit(self._in_time, question, *about)
        begun.add_done_callback(ended)
        return asyncio.wrap_future(begun)

    def _in_time(self, question: Callable[..., _T], *about: object) -> _T:
        with command.time_limit(self._limit_seconds):
            return question(*about)

    def stop(self) -> None:
        """Ask no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
