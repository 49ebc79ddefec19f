"""Health and metrics over HTTP: a few pages for kubelet's probes and for Prometheus.

Nothing here can end the service: an address that is taken and a page that fails are logged, not
raised.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer
from typing import Any

import grpc

from agent.core import errors
from agent.core.values import Address
from agent.csi.client import Client

_log = logging.getLogger(__name__)

# Connections that are read from at one time; others wait in the kernel's queue.
_READING = 4
# Requests for one page at a time: while that hangs, other pages are still served.
_PER_PAGE = 4
# A client that neither sends nor reads is disconnected after this.
_PATIENCE_SECONDS = 5.0
# How often a wait for a thread looks for the end, and how long the end waits for the threads.
_TURN_SECONDS = 0.5
_ENDING_SECONDS = 5.0

TEXT = "text/plain; charset=utf-8"


class Unhealthy(Exception):
    """A check that did not pass, and why."""


@dataclass(frozen=True)
class Page:
    """A page that is made for each request; `make` may raise Unhealthy."""

    make: Callable[[], bytes]
    content_type: str = TEXT


def healthz(endpoint: Path) -> Callable[[], bytes]:
    """Make the liveness check: the process answers a plain call over its own socket."""

    def check() -> bytes:
        try:
            with Client(endpoint, timeout_seconds=_PATIENCE_SECONDS) as client:
                client.info()
        except grpc.RpcError as error:
            raise Unhealthy(f"{endpoint}: {error.code().name}: {error.details()}") from None
        return b"ok\n"

    return check


def readyz(*checks: Callable[[], None]) -> Callable[[], bytes]:
    """Make the readiness check: each of `checks` passes, or raises NotReady."""

    def check() -> bytes:
        try:
            for one in checks:
                one()
        except errors.NotReady as error:
            raise Unhealthy(str(error)) from None
        return b"ok\n"

    return check


class Monitor:
    """Serves pages, by their paths."""

    def __init__(self, address: Address, pages: Mapping[str, Page]) -> None:
        self._address = address
        self._pages = pages
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> int:
        """Listen, and return the port; log a failure and return 0."""
        try:
            self._server = _Server(self._address, self._pages)
        except OSError as error:
            _log.error(
                "no metrics and no health: cannot listen on %s: %s", self._address, error.strerror
            )
            return 0
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="monitor", daemon=True
        )
        self._thread.start()
        port: int = self._server.server_address[1]
        _log.info("serving %s on %s", ", ".join(self._pages), self._address)
        return port

    def stop(self) -> None:
        """Stop listening, and wait a few seconds for requests in progress."""
        if self._server is None or self._thread is None:
            return
        self._server.is_ending = True
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(TCPServer):
    """Accepts in one thread and answers in a few, however many clients connect.

    All are daemon threads, so one that hangs does not keep the process.
    """

    allow_reuse_address = True

    def __init__(self, address: Address, pages: Mapping[str, Page]) -> None:
        self.pages = pages
        self.is_ending = False
        self._reading = threading.BoundedSemaphore(_READING)
        self.requests = {one: threading.BoundedSemaphore(_PER_PAGE) for one in pages}
        self._at_work: set[threading.Thread] = set()
        # By default every address, those of IPv6 included if the node has it.
        everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104
        host = address.host or everywhere
        [found, *_] = socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM)
        self.address_family = found[0]
        # Handlers are made in `_work`.
        super().__init__((host, address.port), BaseHTTPRequestHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection to a thread, or wait until one is free."""
        while not self._reading.acquire(timeout=_TURN_SECONDS):
            if self.is_ending:
                self.shutdown_request(request)
                return
        mine = threading.Thread(
            target=self._work, args=(request, client_address), name="monitor_", daemon=True
        )
        self._at_work.add(mine)
        try:
            mine.start()
        except BaseException:
            self._at_work.discard(mine)
            self._reading.release()
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a connection that got no thread; it is closed."""
        _log.error("cannot answer %s", client_address, exc_info=True)

    def _work(self, request: Any, client_address: Any) -> None:
        with ExitStack() as reading:
            reading.callback(self._reading.release)
            try:
                _Handler(request, client_address, self, reading)
            except OSError as error:
                _log.debug("%s went away: %s", client_address, error)
            finally:
                self.shutdown_request(request)
                self._at_work.discard(threading.current_thread())

    def server_close(self) -> None:
        """Close the socket, and wait a while for requests in progress."""
        super().server_close()
        end = time.monotonic() + _ENDING_SECONDS
        for one in list(self._at_work):
            one.join(max(0.0, end - time.monotonic()))


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "carver"
    sys_version = ""
    timeout = _PATIENCE_SECONDS

    def __init__(
        self, request: Any, client_address: Any, server: _Server, reading: ExitStack
    ) -> None:
        self._reading = reading
        super().__init__(request, client_address, server)

    def do_GET(self) -> None:
        """Answer with a page, 404 for an unknown path, or 503 if it is unhealthy or busy."""
        path = self.path.partition("?")[0]
        page = self.server.pages.get(path)
        if page is None:
            known = ", ".join(self.server.pages)
            self._answer(HTTPStatus.NOT_FOUND, f"see {known}\n".encode())
            return
        turn = self.server.requests[path]
        if not turn.acquire(blocking=False):
            busy = f"{_PER_PAGE} callers wait for it already\n"
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, busy.encode())
            return
        try:
            # From here on another connection may be read from.
            self._reading.close()
            self._answer(*self._made(page))
        finally:
            turn.release()

    def _made(self, page: Page) -> tuple[HTTPStatus, bytes, str]:
        try:
            return HTTPStatus.OK, page.make(), page.content_type
        except Unhealthy as problem:
            return HTTPStatus.SERVICE_UNAVAILABLE, f"{problem}\n".encode(), TEXT
        except Exception as error:
            _log.error("%s failed: %s", self.path, error)
            return HTTPStatus.INTERNAL_SERVER_ERROR, b"see the log\n", TEXT

    def _answer(self, status: HTTPStatus, body: bytes, content_type: str = TEXT) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, template: str, *values: Any) -> None:
        """Log requests at debug level: probes come all day long."""
        _log.debug(template, *values)
