"""Health and metrics over HTTP: a few pages for kubelet's probes and for Prometheus.

Nothing here can end the service: an address that is taken and a page that fails are logged, not
raised.
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

# Maximum of connections whose request is being read; each page has threads besides.
_READING = 16
# Maximum of requests for one page at a time: while the page hangs, other pages are still served.
_PER_PAGE = 4
# Time limit of a client that neither sends nor reads, and of a connection that waits for a thread.
_PATIENCE_SECONDS = 5.0

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

    def start(self) -> int:
        """Listen, and return the port; log a failure and return 0."""
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
        """Stop listening; a request in progress ends with its page, or with the process."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


class _Server(ThreadingHTTPServer):
    """The standard library's server, with a limit of threads, and without a look-up of its name."""

    # HTTPServer's own asks DNS for the name of the host, which only CGI needs.
    server_bind = TCPServer.server_bind

    def __init__(self, address: Address, pages: Mapping[str, Page]) -> None:
        self.pages = pages
        self.requests = {one: threading.BoundedSemaphore(_PER_PAGE) for one in pages}
        self._threads_left = threading.BoundedSemaphore(_READING + _PER_PAGE * len(pages))
        # By default every address, those of IPv6 included if the node has it.
        everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104
        host = address.host or everywhere
        [found, *_] = socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM)
        self.address_family = found[0]
        super().__init__((host, address.port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection to a thread of its own; raises TimeoutError where none gets free."""
        if not self._threads_left.acquire(timeout=_PATIENCE_SECONDS):
            raise TimeoutError("no thread got free")
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._threads_left.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection, and let the next one have its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._threads_left.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a connection that is closed without an answer; clients go away all day long."""
        level = logging.DEBUG if isinstance(sys.exc_info()[1], OSError) else logging.ERROR
        _log.log(level, "cannot answer %s", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "carver"
    sys_version = ""
    timeout = _PATIENCE_SECONDS

    def do_GET(self) -> None:
        """Answer with a page, 404 for an unknown path, or 503 if it is unhealthy or busy."""
        path = self.path.partition("?")[0]
        page = self.server.pages.get(path)
        if page is None:
            known = ", ".join(self.server.pages)
            self._answer(HTTPStatus.NOT_FOUND, f"see {known}\n".encode())
            return
        requests = self.server.requests[path]
        if not requests.acquire(blocking=False):
            busy = f"{_PER_PAGE} callers wait for it already\n"
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, busy.encode())
            return
        try:
            self._answer(*self._made(page))
        finally:
            requests.release()

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
