"""Compare a volume with a snapshot on another node by digests, so that only differences are sent.

The node that receives reads its volume, and sends the digests of its pieces (`OwnDigests`). The
node that sends compares them with those of its snapshot's pieces (`TheirDigests`), which
agent/extras/streams/sending.py leaves out where they are equal. A piece is written on the node that
receives only after its digest was sent, since the other node waits for that.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, Full, Queue

import grpc

from agent.core import errors
from agent.extras.streams import sending
from mount.block_io import Opened
from proto import carver_pb2 as carver

# Maximum number of digests in one request, and of requests that wait to be sent.
_MOST_DIGESTS, _QUEUED = 512, 8
# Interval, in seconds, at which a thread that waits looks whether it is to end.
_LOOK_SECONDS = 0.5


class OwnDigests:
    """The requests of a call of SendDiffering: the first one, and then this node's digests.

    `replaces` is the digest of the word of the earlier move that left the volume here.
    """

    def __init__(self, first: carver.SendRequest, replaces: str) -> None:
        self.replaces = replaces
        self._requests: Queue[carver.SendRequest | None] = Queue(_QUEUED)
        self._requests.put(first)
        self._end_event = threading.Event()

    def __iter__(self) -> Iterator[carver.SendRequest]:
        """Iterate over the requests, which end with the last digest or with `close`."""
        return iter(self._requests.get, None)

    @contextmanager
    def begun(self, device: Opened, start_bytes: int, end_bytes: int) -> Iterator[None]:
        """Read a range of a device in a thread during the `with`, and send its digests.

        At the end of the `with` the device is read no more. If it cannot be read, the requests end,
        and so does the other node's stream. In place of the error of that stream, the error of the
        device is then raised.
        """
        problems: list[Exception] = []

        def read() -> None:
            try:
                for digests in sending.digests_of(device, start_bytes, end_bytes):
                    self._put(carver.SendRequest(digests=digests))
                self._put(None)
            except _Ended:
                pass
            except Exception as error:
                problems.append(error)
                self.close()

        reader = threading.Thread(target=read, name="digests", daemon=True)
        reader.start()
        try:
            yield
        except errors.BadStream:
            if problems:
                raise problems[0] from None
            raise
        finally:
            self.close()
            reader.join()

    def close(self) -> None:
        """End the requests, also if not all were sent."""
        self._end_event.set()
        while True:
            with suppress(Empty):
                while True:
                    self._requests.get_nowait()
            with suppress(Full):
                self._requests.put_nowait(None)
                return

    def _put(self, request: carver.SendRequest | None) -> None:
        while not self._end_event.is_set():
            with suppress(Full):
                self._requests.put(request, timeout=_LOOK_SECONDS)
                return
        raise _Ended


class _Ended(Exception):
    """Raised in the thread that reads, if no more digests are wanted."""


class TheirDigests:
    """The digests of the other node's volume, from the requests of a call of SendDiffering.

    `before_wait` is called before the next request is waited for: the other node may wait for what
    was not sent yet.
    """

    def __init__(
        self, requests: Iterator[carver.SendRequest], before_wait: Callable[[], None]
    ) -> None:
        self._requests, self._before_wait = requests, before_wait
        self._waiting = bytearray()

    def __call__(self, count: int) -> bytes:
        """Return the digests of the next `count` pieces.

        Raises BadStream if there are too few, BadField if a request has more digests than one may
        have, or none, and NotWanted if the caller has gone.
        """
        length = count * sending.DIGEST_BYTES
        while len(self._waiting) < length:
            self._before_wait()
            try:
                request = next(self._requests, None)
            except grpc.RpcError:
                raise errors.NotWanted("SendDiffering") from None
            if request is None:
                raise errors.BadStream("the digests of the other node's volume ended")
            if not 0 < len(request.digests) <= _MOST_DIGESTS * sending.DIGEST_BYTES:
                most_bytes = _MOST_DIGESTS * sending.DIGEST_BYTES
                raise errors.BadField("digests", f"must have 1 to {most_bytes} bytes")
            self._waiting += request.digests
        found = bytes(self._waiting[:length])
        del self._waiting[:length]
        return found
