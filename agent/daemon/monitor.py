"""The HTTP server of health and metrics: a few pages for kubelet's probes and for Prometheus.

A failure of the HTTP server does not end the service: an address that is in use, or a page that
fails, is only logged.
"""

import logging
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any

import grpc

from agent.core import errors
from agent.csi.client import Client
from agent.settings.values import Address

_log = logging.getLogger(__name__)

# Maximum number of connections whose request is being read; the threads that serve pages come on
# top.
_READING = 16
# Maximum number of requests for one page at a time: while one page hangs, other pages are still
# served.
_PER_PAGE = 4
# Time limit, in seconds, of each wait for a client to send or to read, of a connection's wait for a
# thread, and of the liveness check's RPC.
_PATIENCE_SECONDS = 5.0

TEXT = "text/plain; charset=utf-8"


class Unhealthy(Exception):
    """A health check failed; the message says why."""


@dataclass(frozen=True)
class Page:
    """A page of the HTTP server.

    `make_content` returns the content of each answer, or raises Unhealthy.
    """

    make_content: Callable[[], bytes]
    content_type: str = TEXT


def healthz(endpoint: Path) -> Callable[[], bytes]:
    """Return the liveness check: it raises Unhealthy unless the CSI socket answers an RPC."""

    def check() -> bytes:
        try:
            with Client(endpoint, timeout_seconds=_PATIENCE_SECONDS) as client:
                client.info()
        except grpc.RpcError as error:
            raise Unhealthy(f"{endpoint}: {error.code().name}: {error.details()}") from None
        return b"ok\n"

    return check


def readyz(*checks: Callable[[], None]) -> Callable[[], bytes]:
    """Return the readiness check: it raises Unhealthy if one of `checks` raises NotReady."""

    def check() -> bytes:
        try:
            for require_ready in checks:
                require_ready()
        except errors.NotReady as error:
            raise Unhealthy(str(error)) from None
        return b"ok\n"

    return check


class Monitor:
    """The HTTP server of health and metrics; `pages` are by their URL paths."""

    def __init__(self, address: Address, pages: Mapping[str, Page]) -> None:
        self._address = address
        self._pages = pages
        self._server: _Server | None = None

    def start(self) -> int:
        """Start to serve and return the port; if the address is in use, log that and return 0."""
        try:
            server = _Server(self._address, self._pages)
        except OSError as error:
            _log.error(
                "no metrics and no health: cannot listen on %s: %s", self._address, error.strerror
            )
            return 0
        self._server = server
        threading.Thread(target=server.serve_forever, name="monitor", daemon=True).start()
        port: int = server.server_address[1]
        _log.info("serving %s on %s", ", ".join(self._pages), self._address)
        return port

    def stop(self) -> None:
        """Stop listening; a request in progress ends when its page is sent, or with the process."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


class _Server(ThreadingHTTPServer):
    """The standard library's HTTP server with limits of threads, and no DNS query at start."""

    # Replace HTTPServer.server_bind, which asks DNS for the host's name; only CGI needs that name.
    server_bind = TCPServer.server_bind

    def __init__(self, address: Address, pages: Mapping[str, Page]) -> None:
        self.pages = pages
        self.requests = {path: threading.BoundedSemaphore(_PER_PAGE) for path in pages}
        self._threads_left = threading.BoundedSemaphore(_READING + _PER_PAGE * len(pages))
        # Without a host, listen on all addresses of the node, IPv6 included if the node has IPv6.
        everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104
        host = address.host or everywhere
        [address_info, *_] = socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM)
        self.address_family = address_info[0]
        super().__init__((host, address.port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a new thread; raise TimeoutError while too many threads run."""
        if not self._threads_left.acquire(timeout=_PATIENCE_SECONDS):
            raise TimeoutError("no thread got free")
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._threads_left.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection's request, and release the connection's thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._threads_left.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a connection that got no answer; at debug level if the client disconnected."""
        level = logging.DEBUG if isinstance(sys.exc_info()[1], OSError) else logging.ERROR
        _log.log(level, "cannot answer %s", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "carver"
    sys_version = ""
    timeout = _PATIENCE_SECONDS

    def do_GET(self) -> None:
        """Answer with a page, or with an error as a page of text.

        The errors are 404 for an unknown path, 503 for an unhealthy or busy page, and 500 for a
        page that fails.
        """
        path = self.path.partition("?")[0]
        page = self.server.pages.get(path)
        if page is None:
            paths = ", ".join(self.server.pages)
            self._answer(HTTPStatus.NOT_FOUND, f"see {paths}\n".encode())
            return
        requests = self.server.requests[path]
        if not requests.acquire(blocking=False):
            busy = f"{_PER_PAGE} callers wait for it already\n"
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, busy.encode())
            return
        try:
            self._answer(*self._make_content(page))
        finally:
            requests.release()

    def _make_content(self, page: Page) -> tuple[HTTPStatus, bytes, str]:
        try:
            return HTTPStatus.OK, page.make_content(), page.content_type
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
        """Log a request at debug level, because probes come all day long."""
        _log.debug(template, *values)
