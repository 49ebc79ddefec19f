"""tests/cluster/monitoring.py whole: an API server that has Carver's pods, and their pages."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pages
import pytest
from cluster import monitoring
from prometheus.server import free_port

from agent.daemon import monitor
from agent.daemon.node_metrics import Metrics
from agent.settings.values import Address

TOKEN, NODE = "a-token", "node-1"


class Pods(BaseHTTPRequestHandler):
    """An API server that lists pods."""

    items: list[Mapping[str, Any]]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.send_error(401)
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        here = self.path.startswith("/api/v1/namespaces/carver-system/pods")
        whole = {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}}
        body = json.dumps({**whole, "items": self.items if here else []}).encode()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def pod(name: str, phase: str, name_of_app: str, **ports: int) -> Mapping[str, Any]:
    labels = {"app.kubernetes.io/name": name_of_app, "app.kubernetes.io/instance": "carver"}
    containers = [
        {"name": port, "ports": [{"name": port, "containerPort": number, "protocol": "TCP"}]}
        for port, number in ports.items()
    ]
    return {
        "metadata": {
            "name": name,
            "namespace": "carver-system",
            "uid": name,
            "labels": labels,
        },
        "spec": {"nodeName": NODE, "containers": containers},
        "status": {"phase": phase, "podIP": "127.0.0.1", "hostIP": "127.0.0.1"},
    }


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The API server's URL."""
    (tmp_path / "mounts").mkdir()
    ports = {name: free_port() for name in ("node", "controller", "provisioner")}
    with ExitStack() as ending:
        node = ending.enter_context(pages.measured(tmp_path / "mounts"))
        pages.fill(node)
        sidecar, controller = pages.Sidecar(), pages.of_the_controller()

        def busy() -> bytes:
            # A cluster in use: something happens between scrapes.
            sidecar.call()
            return sidecar.text()

        def of_the_node() -> bytes:
            pages.call(node)
            return node.metrics.text()

        texts = {"node": of_the_node, "controller": controller.text, "provisioner": busy}
        for name, text in texts.items():
            page = {"/metrics": monitor.Page(text, Metrics.CONTENT_TYPE)}
            served = monitor.Monitor(Address("127.0.0.1", ports[name]), page)
            served.start()
            ending.callback(served.stop)
        items = [
            pod("carver-node-a", "Running", "carver", metrics=ports["node"], carver=1),
            pod(
                "carver-controller-a",
                "Running",
                "carver",
                metrics=ports["controller"],
                provisioner=ports["provisioner"],
            ),
            # None of these is scraped.
            pod("carver-node-ended", "Failed", "carver", metrics=1),
            pod("other", "Running", "other", metrics=1),
        ]
        handler = type("Bound", (Pods,), {"items": items})
        running = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=running.serve_forever, daemon=True).start()
        ending.callback(running.server_close)
        ending.callback(running.shutdown)
        yield f"http://127.0.0.1:{running.server_address[1]}"


def test_the_program_finds_every_page_asks_every_query_and_draws(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token, drawn = tmp_path / "token", tmp_path / "dashboard.svg"
    token.write_text(TOKEN)
    words = [f"--server={server}", f"--token-file={token}", f"--picture={drawn}"]
    assert monitoring.main([*words, "--interval=1", "--seconds=6", "--limit=30"]) == 0
    said = capsys.readouterr().out
    scraped = [line for line in said.splitlines() if line.startswith("scraped:")]
    assert sorted(scraped) == [
        f"scraped: {NODE} carver-controller-a metrics",
        f"scraped: {NODE} carver-controller-a provisioner",
        f"scraped: {NODE} carver-node-a metrics",
    ]
    assert "NO DATA" not in said
    assert drawn.read_text().count("<polyline") >= len(monitoring.LINES)
    assert "no data" not in drawn.read_text()


def test_pages_that_are_not_found_are_named(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    words = [f"--server={server}", f"--token-file={token}", "--limit=1", "--interval=1"]
    assert monitoring.main([*words, "--namespace=another"]) == 1
    assert "no pod of Carver with a port `metrics` was found" in capsys.readouterr().err
    token.write_text("wrong")
    assert monitoring.main(words) == 2
    assert "401" in capsys.readouterr().err
