"""Health and metrics over HTTP: a few pages for kubelet's probes and for Prometheus.

Nothing here can end the service: an address that is taken and a page that fails are told, not
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

# So many callers may be about to ask; whoever else comes waits in the kernel's queue.
_ASKING = 4
# So many are answered with one page at a time: where that hangs, the others are answered still.
_ANSWERED = 4
# A caller that neither asks nor reads gives its thread back.
_PATIENCE_SECONDS = 5.0
# How soon who waits for a thread sees that all ends, and how long the end waits for the threads.
_TURN_SECONDS = 0.5
_ENDING_SECONDS = 5.0

TEXT = "text/plain; charset=utf-8"


class Unhealthy(Exception):
    """A check that did not pass, and why."""


@dataclass(frozen=True)
class Page:
    """What is made anew for each caller; it may raise Unhealthy."""

    make: Callable[[], bytes]
    content_type: str = TEXT


def healthz(endpoint: Path) -> Callable[[], bytes]:
    """Whether the process answers a call that needs nothing, over its own socket."""

    def check() -> bytes:
        try:
            with Client(endpoint, timeout_seconds=_PATIENCE_SECONDS) as client:
                client.info()
        except grpc.RpcError as error:
            raise Unhealthy(f"{endpoint}: {error.code().name}: {error.details()}") from None
        return b"ok\n"

    return check


def readyz(*checks: Callable[[], None]) -> Callable[[], bytes]:
    """Whether the node can do what it offers: each check passes, or raises NotReady."""

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
        """Listen, and return the port; 0 where that is not possible, which is logged."""
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
        """Answer no more; those who are being answered are waited for, but not long."""
        if self._server is None or self._thread is None:
            return
        self._server.is_ending = True
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(TCPServer):
    """Accepts in one thread and answers in a few, however many callers come.

    Each is a daemon: what hangs keeps no process.
    """

    allow_reuse_address = True

    def __init__(self, address: Address, pages: Mapping[str, Page]) -> None:
        self.pages = pages
        self.is_ending = False
        self._asking = threading.BoundedSemaphore(_ASKING)
        self.answered = {one: threading.BoundedSemaphore(_ANSWERED) for one in pages}
        self._at_work: set[threading.Thread] = set()
        # Every address: also those of IPv6, where the node has it.
        everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104
        host = address.host or everywhere
        [found, *_] = socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM)
        self.address_family = found[0]
        # Handlers are made in `_work`.
        super().__init__((host, address.port), BaseHTTPRequestHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection to a thread, or wait until there may be one."""
        while not self._asking.acquire(timeout=_TURN_SECONDS):
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
            # No thread is left, for now.
            self._at_work.discard(mine)
            self._asking.release()
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that could not be given a thread is hung up on."""
        _log.error("%s is not answered", client_address, exc_info=True)

    def _work(self, request: Any, client_address: Any) -> None:
        with ExitStack() as asking:
            asking.callback(self._asking.release)
            try:
                _Handler(request, client_address, self, asking)
            except OSError as error:
                _log.debug("%s went away: %s", client_address, error)
            finally:
                self.shutdown_request(request)
                self._at_work.discard(threading.current_thread())

    def server_close(self) -> None:
        """Close the socket, after those who are being answered, or a while."""
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
        self, request: Any, client_address: Any, server: _Server, asking: ExitStack
    ) -> None:
        self._asking = asking
        super().__init__(request, client_address, server)

    def do_GET(self) -> None:
        """Answer with a page; 404 for what is none, 503 for what is not well."""
        path = self.path.partition("?")[0]
        page = self.server.pages.get(path)
        if page is None:
            known = ", ".join(self.server.pages)
            self._answer(HTTPStatus.NOT_FOUND, f"see {known}\n".encode())
            return
        turn = self.server.answered[path]
        if not turn.acquire(blocking=False):
            told = f"{_ANSWERED} callers wait for it already\n"
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, told.encode())
            return
        try:
            # From here on it keeps nobody who asks for another page.
            self._asking.close()
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
        """Probes come all day long."""
        _log.debug(template, *values)
