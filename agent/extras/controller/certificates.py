"""Mutual TLS between the controller and the nodes, from files as cert-manager writes them.

A certificate says by its DNS name who has it: `controller.DRIVER`, or `NODE.node.DRIVER`. So a
node's key opens no other node, and answers for no other node. A node whose name makes that too long
for TLS has its topology segment there, which ends with a digest of the name.
"""

import logging
import ssl
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Self

import grpc

from agent.core import errors, ids
from agent.requests import secret

_log = logging.getLogger(__name__)

# A key of gRPC's ServicerContext.auth_context.
_NAMES = "x509_subject_alternative_name"
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 5000),
    # A connection whose other end is gone is found within this, however long a call takes.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # The one that counts, by default a minute (grpc 1.85, "Set ping timeout timer").
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Nodes are reached directly, whatever the environment says of proxies.
    ("grpc.enable_http_proxy", 0),
)
# Of the servers at both ends: connections that are only opened are not kept.
SERVER_OPTIONS = (
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    # Both ends are Carver's: the pings above are no abuse.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    # Two services at one port would each answer some of the calls.
    ("grpc.so_reuseport", 0),
)
# Longest name of a server in TLS' SNI (TLSEXT_MAXLEN_host_name of BoringSSL).
_MOST_NAME_CHARACTERS = 255
_AUTHORITY, _CERTIFICATE, _KEY = "ca.crt", "tls.crt", "tls.key"


def controller_name(driver_name: str) -> str:
    """The DNS name in the controller's certificate."""
    return f"controller.{driver_name}"


def node_name(node_id: str, driver_name: str) -> str:
    """The DNS name in a node's certificate."""
    name = f"{node_id}.node.{driver_name}"
    if len(name) > _MOST_NAME_CHARACTERS or ids.looks_shortened(node_id):
        name = f"{ids.node_segment(node_id)}.node.{driver_name}"
    return name.lower()


def options(server_name: str) -> Sequence[tuple[str, str | int]]:
    """A channel's options; the server must have that name in its certificate."""
    return (*_OPTIONS, ("grpc.ssl_target_name_override", server_name))


@dataclass(frozen=True)
class Certificates:
    """A certificate, its key, and the authorities that the other side's must come from, as PEM."""

    authority: bytes
    certificate: bytes
    key: bytes

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read the three files. Raises BadConfig if one cannot be read, or does not fit others."""
        found = cls(*(read_pem(directory / name) for name in (_AUTHORITY, _CERTIFICATE, _KEY)))
        try:
            found.check()
        except (ssl.SSLError, ValueError) as error:
            # As while the files are being replaced one after the other.
            problem = f"{_CERTIFICATE}, {_KEY} and {_AUTHORITY} cannot be used together: {error}"
            raise errors.BadConfig(str(directory), "tls_directory", problem) from None
        return found

    def check(self) -> None:
        """Raise SSLError or ValueError if the certificate is not the key's, or one is broken."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_verify_locations(cadata=self.authority.decode("ascii"))
        # OpenSSL compares them as it loads them.
        with secret.in_file(self.certificate + b"\n" + self.key) as file:
            # A key with a passphrase is refused, instead of asking at the terminal.
            context.load_cert_chain(file, password="")

    @property
    def ends_seconds(self) -> float:
        """When the certificate ends, in seconds of the epoch."""
        # Here, as the node's service does not need it: 12 MiB.
        from cryptography import x509

        return x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc.timestamp()

    def for_client(self) -> grpc.ChannelCredentials:
        """What the controller shows to a node."""
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)

    def for_server(self) -> grpc.ServerCertificateConfiguration:
        """What a node shows to the controller, and whom it lets in."""
        return grpc.ssl_server_certificate_configuration(
            [(self.key, self.certificate)], self.authority
        )


def server_credentials(
    current: Callable[[], Certificates], *, of_any: bool = False
) -> grpc.ServerCredentials:
    """The credentials of a server, which asks for the certificates at each connection.

    Clients must have a certificate, too, except with `of_any`. Raises BadConfig if they cannot be
    read now; later what was read last stays in use.
    """
    known = current()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal known
        try:
            found = current()
        except errors.BadConfig as error:
            _log.warning("the certificates stay as they were: %s", error)
            return None
        if found == known:
            # To give gRPC the same again at each connection is not harmless: where two connect at
            # once it frees what the other uses, and ends the process (issue 36693 of grpc/grpc).
            return None
        known = found
        _log.info("serving with another certificate")
        return found.for_server()

    return grpc.dynamic_ssl_server_credentials(
        known.for_server(),
        renewed,  # type: ignore[arg-type]  # None: as it was (grpc's documentation)
        require_client_authentication=not of_any,
    )


class OnlyFrom(grpc.ServerInterceptor):
    """Refuses each call of a peer whose certificate does not have a DNS name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Check the peer, then go on."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        wire = (handler.request_deserializer, handler.response_serializer)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(self._checked(handler.unary_stream), *wire)
        return grpc.unary_unary_rpc_method_handler(self._checked(handler.unary_unary), *wire)

    def _checked(self, behaviour: Any) -> Callable[..., Any]:
        # With `wraps` it keeps the pool of threads that it runs in.
        @wraps(behaviour)
        def call(request: Any, context: grpc.ServicerContext) -> Any:
            names: Iterable[Any] = context.auth_context().get(_NAMES, ())
            if self._name.encode() not in names:
                had = ", ".join(one.decode() for one in names) or "none"
                context.abort(
                    grpc.StatusCode.PERMISSION_DENIED,
                    f"only {self._name} may call this node; the certificate's names are: {had}",
                )
            return behaviour(request, context)

        return call


def read_pem(path: Path) -> bytes:
    """Read a PEM file; raises BadConfig."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise errors.BadConfig(str(path), "tls_directory", error.strerror or str(error)) from None
    if b"-----BEGIN " not in text:
        raise errors.BadConfig(str(path), "tls_directory", "is no PEM")
    return text
