"""Run blocking requests to the API server in threads, with a queue for each key.

The event loop of the controller must not block, so 32 threads wait for the API server.

A *question* is a function that sends requests to the API server. At most one question for each key,
such as a namespace, runs at a time. So questions that take long delay only those with the same key.
A question that runs holds the lock of its key until it ends, even if its caller has given up. So a
caller that retries does not occupy more threads.
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

# Maximum number of questions that run at once, and of threads.
_AT_ONCE = 32
# Time limit, in seconds, of the wait until a question begins, and again of the wait for its result.
# The limit is a third of the time that the external-provisioner waits for a CSI call. The
# provisioner retries a call that fails by this limit.
PATIENCE_SECONDS = 20.0


class NotInTime(errors.AgentError):
    """Error: a question to the API server did not begin, or did not end, within its time limit."""


class SharedReading(Generic[_T]):
    """A slow read whose result is shared by the calls that began before the read began.

    A hundred concurrent calls cause one or two reads. No call uses a result that was read before
    the call began. If a read fails with an AgentError, all calls that share the read get that
    error. So they do not retry one after the other.
    """

    def __init__(self, read: Callable[[], _T], clock: Callable[[], float]) -> None:
        self._read, self._clock = read, clock
        self._lock = threading.Lock()
        # When the last read began, and its result or its error. The result is not set before the
        # first read.
        self._begun = float("-inf")
        self._result: _T | errors.AgentError

    def since(self, moment: float) -> _T:
        """Return the result of a read that began after `moment`; if there is none yet, read now.

        Raises the error of that read. Other threads that call this method wait meanwhile.
        """
        with self._lock:
            if self._begun <= moment:
                read_start = self._clock()
                try:
                    self._result = self._read()
                except errors.AgentError as error:
                    # Remove the traceback: its frames would keep the partly read data in memory.
                    self._result = error.with_traceback(None)
                self._begun = read_start
            result = self._result
        if isinstance(result, errors.AgentError):
            raise result
        return result


class Questions:
    """A pool of threads that wait for the API server on behalf of one event loop."""

    def __init__(self, name: str, limit_seconds: float) -> None:
        """Make the threads, with `name` as the prefix of their names.

        The requests that a question sends to the API server end soon after `limit_seconds`.
        """
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix=name)
        self._limit_seconds = limit_seconds
        self._free = asyncio.Semaphore(_AT_ONCE)
        # The lock of each key. An entry exists only while a question waits for the lock or holds
        # it.
        self._queues = WeakValueDictionary[str, asyncio.Lock]()

    async def ask(self, key: str, question: Callable[..., _T], *arguments: object) -> _T:
        """Run `question(*arguments)` in a thread, after the earlier questions with the same key.

        Returns the question's result. Raises NotInTime if the question does not begin within
        PATIENCE_SECONDS, or then does not end within the same time; and what the question raises.
        """
        problem = f"other questions about {key} come first"
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._take(queue := self._queues.setdefault(key, asyncio.Lock()))
            problem = "the API server does not answer in time"
            async with asyncio.timeout(PATIENCE_SECONDS):
                return await self._begin(queue, question, *arguments)
        except TimeoutError:
            raise NotInTime(problem) from None

    async def _take(self, queue: asyncio.Lock) -> None:
        """Wait for the lock of the key, and then for a free thread."""
        await queue.acquire()
        try:
            await self._free.acquire()
        except asyncio.CancelledError:
            queue.release()
            raise

    def _begin(
        self, queue: asyncio.Lock, question: Callable[..., _T], *arguments: object
    ) -> "asyncio.Future[_T]":
        """Run a question in a thread; when it ends, release the thread and the lock of the key.

        Both are released only then, even if the caller has been cancelled meanwhile.
        """
        loop = asyncio.get_running_loop()

        def release() -> None:
            queue.release()
            self._free.release()

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # raised if the loop is closed
                loop.call_soon_threadsafe(release)

        future = self._threads.submit(self._in_time, question, *arguments)
        future.add_done_callback(ended)
        return asyncio.wrap_future(future)

    def _in_time(self, question: Callable[..., _T], *arguments: object) -> _T:
        with command.time_limit(self._limit_seconds):
            return question(*arguments)

    def stop(self) -> None:
        """Cancel the questions that have not begun, and accept no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
