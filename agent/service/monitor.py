"""Health and metrics over HTTP: a few pages for kubelet's probes and for Prometheus.

Nothing here can end the service: an address that is taken and a page that fails are told, not
raised.
"""

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer
from typing import Any

import grpc

from agent import errors
from agent.config.values import Address
from agent.csi.client import Client

_log = logging.getLogger(__name__)

# Kubelet's two probes and two scrapers at once; whoever else comes waits in the kernel's queue.
_WORKERS = 4
# A caller that neither asks nor reads gives its worker back.
_PATIENCE_SECONDS = 5.0

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
        """Answer no more."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(TCPServer):
    """Accepts in one thread and answers in a few, however many callers come."""

    allow_reuse_address = True

    def __init__(self, address: Address, pages: Mapping[str, Page]) -> None:
        self.pages = pages
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="monitor")
        self._free = threading.BoundedSemaphore(_WORKERS)
        # Every address: also those of IPv6, where the node has it.
        everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104
        host = address.host or everywhere
        [found, *_] = socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM)
        self.address_family = found[0]
        super().__init__((host, address.port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection to a worker, or wait until one is free."""
        self._free.acquire()
        self._workers.submit(self._work, request, client_address)

    def _work(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError as error:
            _log.debug("%s went away: %s", client_address, error)
        finally:
            self.shutdown_request(request)
            self._free.release()

    def server_close(self) -> None:
        """Close the socket, after those who are being answered."""
        super().server_close()
        self._workers.shutdown(wait=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "carver"
    sys_version = ""
    timeout = _PATIENCE_SECONDS

    def do_GET(self) -> None:
        """Answer with a page; 404 for what is none, 503 for what is not well."""
        pages = self.server.pages
        page = pages.get(self.path.partition("?")[0])
        content_type = TEXT
        try:
            if page is None:
                status, body = HTTPStatus.NOT_FOUND, f"see {', '.join(pages)}\n".encode()
            else:
                status, body, content_type = HTTPStatus.OK, page.make(), page.content_type
        except Unhealthy as problem:
            status, body = HTTPStatus.SERVICE_UNAVAILABLE, f"{problem}\n".encode()
        except Exception as error:
            _log.error("%s failed: %s", self.path, error)
            status, body = HTTPStatus.INTERNAL_SERVER_ERROR, b"see the log\n"
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, template: str, *values: Any) -> None:
        """Probes come all day long."""
        _log.debug(template, *values)
