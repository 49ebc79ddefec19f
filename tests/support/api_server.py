"""An API server on this machine that pages, and answers wrong where a test asks for it."""

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import pytest

from agent.extras.kubernetes import objects, rebinding

A = TypeVar("A", bound="ApiServer")

TLS = Path(__file__).parents[1] / "data" / "tls"
Object = dict[str, Any]
# What is done with an answer in place of sending it: the request's handler, and the document.
Lie = Callable[["Handler", Object], None]

NODES, PODS = "/api/v1/nodes", "/api/v1/pods"
CLAIMS, VOLUMES = "/api/v1/persistentvolumeclaims", "/api/v1/persistentvolumes"
CAPACITIES = "/apis/storage.k8s.io/v1/csistoragecapacities"
KINDS = {
    NODES: "NodeList",
    PODS: "PodList",
    CLAIMS: "PersistentVolumeClaimList",
    VOLUMES: "PersistentVolumeList",
    CAPACITIES: "CSIStorageCapacityList",
}


class ApiServer:
    """Objects by the paths of their lists. `lies` are used one a request, of one path each."""

    def __init__(self) -> None:
        self.objects: dict[str, list[Object]] = {path: [] for path in KINDS}
        self.version = 100
        self.token = ""
        self.lies: list[tuple[str, Lie]] = []
        self.asked: list[tuple[str, Mapping[str, list[str]]]] = []
        self.methods: set[str] = set()
        self.port = 0
        self._tls: ssl.SSLContext | None = None
        self._expired: set[str] = set()
        self._running: ThreadingHTTPServer | None = None

    def add(self, path: str, name: str, **more: Any) -> Object:
        """An object, with a UID of its own."""
        self.version += 1
        about = {"name": name, "uid": f"uid-{self.version}", **more.pop("metadata", {})}
        made = {"metadata": about, **more}
        self.objects[path].append(made)
        return made

    def lie(self, path: str, *lies: Lie) -> None:
        """Tell these at the next requests of that path."""
        self.lies += [(path, one) for one in lies]

    def expire(self) -> None:
        """Forget what pages that were begun go on with."""
        self._expired.add(str(self.version))

    @property
    def url(self) -> str:
        scheme = "https" if self._tls else "http"
        return f"{scheme}://127.0.0.1:{self.port}"

    def start(self, *, tls: bool = False, client_certificates: bool = False) -> None:
        """Listen; after a stop at the same port."""
        if tls:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(TLS / "server.pem", TLS / "server.key")
            if client_certificates:
                self._tls.verify_mode = ssl.CERT_REQUIRED
                self._tls.load_verify_locations(TLS / "ca.pem")
        handler = type("Bound", (Handler,), {"api": self})
        self._running = _Quiet(("127.0.0.1", self.port), handler)
        self.port = self._running.server_address[1]
        if self._tls:
            self._running.socket = self._tls.wrap_socket(
                self._running.socket, server_side=True, do_handshake_on_connect=False
            )
        threading.Thread(
            target=self._running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def stop(self) -> None:
        """Be gone, with all connections."""
        if self._running is not None:
            self._running.shutdown()
            self._running.server_close()
            self._running = None

    def collection(self, path: str) -> tuple[str, list[Object]] | None:
        """The kind of the list at a path, and what is in it."""
        return (KINDS[path], self.objects[path]) if path in KINDS else None

    def write(self, method: str, path: str, body: Object) -> tuple[int, Object]:
        """What an honest server does that is asked for something else than what it has."""
        return 405, {"kind": "Status"}

    def answer(self, path: str, query: Mapping[str, list[str]]) -> tuple[int, Object]:
        """What an honest server says."""
        if (found := self.collection(path)) is None:
            return 404, {"kind": "Status"}
        kind, items = found
        for selector in query.get("fieldSelector", []):
            field, _, wanted = selector.partition("=")
            section, _, key = field.partition(".")
            items = [one for one in items if one.get(section, {}).get(key) == wanted]
        limit, start, version = int(query.get("limit", ["0"])[0]), 0, str(self.version)
        for token in query.get("continue", []):
            version, _, begin = token.partition(".")
            if version in self._expired:
                return 410, {"kind": "Status", "reason": "Expired"}
            start = int(begin)
        page = items[start : start + limit] if limit else items[start:]
        about: Object = {"resourceVersion": version}
        if rest := len(items) - start - len(page):
            about |= {"continue": f"{version}.{start + len(page)}", "remainingItemCount": rest}
        return 200, {"kind": kind, "metadata": about, "items": page}


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up does not matter."""


class Handler(BaseHTTPRequestHandler):
    """One request."""

    api: ApiServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer, or lie."""
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        self.api.asked.append((url.path, query))
        if self._is_known():
            status, document = self.api.answer(url.path, query)
            if "as=PartialObjectMetadataList" in self.headers["Accept"] and "items" in document:
                document = as_metadata(document)
            self._tell(url.path, status, document)

    def do_POST(self) -> None:
        """Do it, or refuse, or lie."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._is_known():
            self._tell(self.path, *self.api.write(self.command, self.path, body))

    do_PUT = do_PATCH = do_DELETE = do_POST  # noqa: N815 - the names are http.server's

    def _is_known(self) -> bool:
        self.api.methods.add(self.command)
        known = not self.api.token or self.headers["Authorization"] == f"Bearer {self.api.token}"
        if not known:
            self.send(401, b"{}")
        return known

    def _tell(self, asked: str, status: int, document: Object) -> None:
        for index, (path, lie) in enumerate(self.api.lies):
            if path == asked:
                del self.api.lies[index]
                lie(self, document)
                return
        self.send(status, json.dumps(document).encode())

    def send(self, status: int, body: bytes, length: int | None = None) -> None:
        """An answer; `length` is what is promised, where that is not what comes."""
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = length is not None

    def log_message(self, *_: object) -> None:
        """Nothing."""


def as_metadata(found: Object) -> Object:
    """A list without its objects' specs and statuses."""
    items = [{"metadata": one["metadata"]} for one in found["items"]]
    # Where there are none, as an API server does: no empty list.
    return {**found, "kind": "PartialObjectMetadataList", "items": items or None}


# Lies


def status(code: int) -> Lie:
    """An error."""
    return lambda handler, _: handler.send(code, b'{"kind": "Status"}')


def body(text: str) -> Lie:
    """Another body, as if all were well."""
    return lambda handler, _: handler.send(200, text.encode())


def changed(change: Callable[[Object], object]) -> Lie:
    """The answer, with something in it changed."""

    def tell(handler: Handler, document: Object) -> None:
        copy = json.loads(json.dumps(document))
        change(copy)
        handler.send(200, json.dumps(copy).encode())

    return tell


def cut_off(handler: Handler, document: Object) -> None:
    """The connection ends within the answer."""
    whole = json.dumps(document).encode()
    handler.send(200, whole[: len(whole) // 2], len(whole))


def hang_up(handler: Handler, document: Object) -> None:
    """The connection ends, without an answer."""
    handler.close_connection = True


def silence(seconds: float) -> Lie:
    """Nothing for so long, and then the truth."""

    def tell(handler: Handler, document: Object) -> None:
        time.sleep(seconds)
        handler.send(200, json.dumps(document).encode())

    return tell


@contextmanager
def running(made: A, *, page_items: int = 2, **how: bool) -> Iterator[A]:
    """A started server, which Carver reads in small pages and retries without a pause."""
    made.start(**how)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(objects, "_PAGE_ITEMS", page_items)
        patched.setattr(objects, "_SILENCE_SECONDS", 5.0)
        patched.setattr(objects, "sleep", no_pause)
        patched.setattr(rebinding, "sleep", no_pause)
        try:
            yield made
        finally:
            made.stop()


def no_pause(_seconds: float) -> None:
    pass


def kubeconfig(
    file: Path, url: str, cluster: Mapping[str, Any] | None = None, user: Object | None = None
) -> Path:
    """A kubeconfig for it; JSON is YAML."""
    whole = {
        "current-context": "tests",
        "contexts": [{"name": "tests", "context": {"cluster": "one", "user": "me"}}],
        "clusters": [{"name": "one", "cluster": {"server": url, **(cluster or {})}}],
        "users": [{"name": "me", "user": user or {}}],
    }
    file.write_text(json.dumps(whole))
    return file
