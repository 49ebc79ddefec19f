"""A cluster in the test's process: services over TLS on loopback, and their controller."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar, cast

import expect
import grpc
import nodes
import pytest
from authority import Authority
from csi_client import Client
from nodes import Node
from real.any import AnyHost

from agent.extras.controller.call_records import Call
from agent.extras.controller.controller_process import ClusterController, Files
from agent.extras.controller.controller_service import Listener
from agent.extras.controller.membership import Record
from agent.extras.tls import certificates
from agent.extras.tls.certificates import Certificates
from agent.settings.settings import Config
from agent.settings.values import Address

T = TypeVar("T")


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Awaitable[T]) -> T:
        """Do some work there, and wait for it."""

        async def done() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(done(), self.loop).result(expect.PATIENCE_SECONDS)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(expect.PATIENCE_SECONDS)
        self.loop.close()


@dataclass
class Cluster:
    """Nodes, and a controller, which may be replaced."""

    directory: Path
    authority: Authority
    config: Config
    nodes: dict[str, Node] = field(default_factory=dict)
    # What PersistentVolumes say, to the controllers that start.
    record: Record = field(default_factory=Record)
    loop: Loop = field(default_factory=Loop)
    # The calls to nodes that controllers have counted.
    calls: list[Call] = field(default_factory=list)
    controller: ClusterController = field(init=False)
    client: Client = field(init=False)

    @property
    def nodes_file(self) -> Path:
        return self.directory / "nodes.toml"

    def address(self, name: str) -> str:
        return f"127.0.0.1:{listener(self.nodes[name]).port}"

    def write_nodes(self, *names: str) -> None:
        """Have these nodes in the file, or all."""
        lines = [f'"{one}" = "{self.address(one)}"\n' for one in names or self.nodes]
        self.nodes_file.write_text("[nodes]\n" + "".join(lines))

    def start(self) -> None:
        """A controller, which has asked all nodes."""
        source = Files(self.config)
        source.record = self.record
        self.controller = ClusterController(self.config, source, self.calls.append)
        self.loop.run(self.controller.start())
        self.ask()
        self.client = Client(self.config.endpoint)

    def ask(self) -> None:
        """Ask all nodes now."""

        async def all_asked() -> None:
            await asyncio.gather(*map(self.controller.nodes.ask, self.controller.nodes))

        self.loop.run(all_asked())

    def stop(self) -> None:
        self.client.__exit__(None, None, None)
        self.loop.run(self.controller.stop())

    def restart(self) -> None:
        """The controller ends, and another begins, which knows nothing."""
        self.stop()
        self.config.endpoint.unlink(missing_ok=True)
        self.start()


@contextmanager
def channel(made: Cluster, who: str, to: str = "a") -> Iterator[grpc.Channel]:
    """A connection to a node, by who has the certificate in that directory."""
    shown = Certificates.read(made.directory / who)
    name = certificates.node_name(to, made.config.driver_name)
    options = certificates.options(name)
    with grpc.secure_channel(made.address(to), shown.for_client(), options) as opened:
        yield opened


def listener(node: Node) -> Listener:
    return cast(Listener, node.service.extras["controller"])


@contextmanager
def cluster(
    host: AnyHost,
    config: Config,
    directory: Path,
    names: Sequence[str] = ("a", "b"),
    hosts: Mapping[str, AnyHost] | None = None,
) -> Iterator[Cluster]:
    """A cluster of nodes on one machine, each with a group of its own.

    `hosts` are the machines of nodes that have one of their own.
    """
    authority = Authority()
    own = certificates.controller_name(config.driver_name)
    made = Cluster(
        directory,
        authority,
        replace(
            config,
            endpoint=directory / "controller.sock",
            tls_directory=authority.write(directory / "controller", own),
            nodes_file=directory / "nodes.toml",
        ),
    )
    machines = {name: (hosts or {}).get(name, host) for name in names}
    with _all(machines, config, made, list(names)):
        made.write_nodes()
        made.start()
        try:
            yield made
        finally:
            made.stop()
            made.loop.stop()


@contextmanager
def _all(
    hosts: Mapping[str, AnyHost], config: Config, made: Cluster, names: list[str]
) -> Iterator[None]:
    if not names:
        yield
        return
    name = names[0]
    shown = certificates.node_name(name, config.driver_name)
    own = replace(
        config,
        controller_address=Address("127.0.0.1", 0),
        tls_directory=made.authority.write(made.directory / f"tls-{name}", shown),
    )
    with nodes.made(hosts[name], own, made.directory, name) as node:
        made.nodes[name] = node
        node.service.reports.fresh()
        listener(node).find_other_groups()
        listener(node).serve()
        try:
            with _all(hosts, config, made, names[1:]):
                yield
        finally:
            listener(node).stop()


def require_only_tls_1_3(
    ours: ssl.SSLContext, newest: ssl.TLSVersion, port: int, server_name: str
) -> None:
    """Assert that a server on loopback speaks TLS 1.3, and nothing to who has at most 1.2."""
    ours.set_alpn_protocols(["h2"])
    ours.maximum_version = newest
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        if newest is ssl.TLSVersion.TLSv1_2:
            with pytest.raises(OSError, match=r"(?i)alert|eof|reset|handshake"):
                ours.wrap_socket(plain, server_hostname=server_name)
        else:
            with ours.wrap_socket(plain, server_hostname=server_name) as secured:
                assert secured.version() == "TLSv1.3"
