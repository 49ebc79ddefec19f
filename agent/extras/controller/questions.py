"""Questions to the API server from the event loop: few threads, and a queue for each key.

Of one key one question is asked at a time: what takes long for it holds up its own questions only.
A question that no call waits for any more keeps its place until it ends, so that callers who repeat
it have no more threads wait for the API server.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar
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
