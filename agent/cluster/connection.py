"""One connection to the API server: a request, and its answer whole, within bounds."""

import http.client
import time
from collections.abc import Mapping

from agent.cluster.access import Server

_LARGEST_ANSWER_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 16


class Unproved(Exception):
    """An answer that is no proof; the next attempt may bring a better one."""


class Connection:
    """One connection, closed in the end; answers are read within bounds of time and size."""

    def __init__(self, server: Server, silence_seconds: float) -> None:
        self._server = server
        where, port = server.host, server.port
        self._http = (
            http.client.HTTPConnection(where, port, timeout=silence_seconds)
            if server.tls is None
            else http.client.HTTPSConnection(
                where, port, timeout=silence_seconds, context=server.tls
            )
        )

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str, until: float) -> tuple[int, bytes]:
        """Status and body; raises TimeoutError, Unproved, what http.client raises."""
        return self.request("GET", path, until)

    def request(
        self,
        method: str,
        path: str,
        until: float,
        body: bytes | None = None,
        content: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """The same of any request; `content` are the headers of its body."""
        if time.monotonic() >= until:
            raise TimeoutError
        headers = {"Accept": "application/json", "User-Agent": "carver", **(content or {})}
        if self._server.token is not None:
            headers["Authorization"] = f"Bearer {self._server.token()}"
        self._http.request(method, self._server.path + path, body=body, headers=headers)
        response = self._http.getresponse()
        parts, size, promised = [], 0, response.length
        # In pieces: a server that sends a byte now and then is never silent.
        while promised is None or size < promised:
            if not (part := response.read1(_CHUNK_BYTES)):
                break
            parts.append(part)
            size += len(part)
            if size > _LARGEST_ANSWER_BYTES:
                raise Unproved(f"an answer of it has more than {_LARGEST_ANSWER_BYTES} bytes")
            if time.monotonic() >= until:
                raise TimeoutError
        # http.client says so by itself only of what is read in one piece.
        if promised is not None and size < promised:
            raise Unproved(f"its answer was cut off, {promised - size} bytes before its end")
        # Before 3.11.8 read1 leaves it open, and the connection is of no use (gh-113199).
        response.close()
        return response.status, b"".join(parts)
