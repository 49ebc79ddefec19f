"""Mutual TLS between the controller and the nodes, from files as cert-manager writes them.

The DNS name of a certificate says whose it is: `controller.DRIVER`, or `NODE.node.DRIVER`. So a
node's key gives no access to another node, and cannot answer for another node. If a node's name
makes the DNS name too long for TLS, the node's topology segment stands in its place, which ends
with a digest of the name.
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

# Key of gRPC's ServicerContext.auth_context with the names in the peer's certificate.
_NAMES = "x509_subject_alternative_name"
# Options of the controller's channels to nodes.
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 5000),
    # Interval of keepalive pings, by which a connection whose other end is gone is detected,
    # however long a call takes.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Time limit of a ping's answer that counts; its default is a minute (grpc 1.85, "Set ping
    # timeout timer").
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Nodes are reached directly, whatever the environment's variables say about proxies.
    ("grpc.enable_http_proxy", 0),
)
# Options of the servers at both ends. Connections that are opened and not used are closed.
SERVER_OPTIONS = (
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    # Both ends are Carver's, so frequent pings do not count as abuse.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    # Two services that share one port would each answer some of the calls.
    ("grpc.so_reuseport", 0),
)
# Largest length of a server's name in TLS' SNI (TLSEXT_MAXLEN_host_name of BoringSSL).
_MOST_NAME_CHARACTERS = 255
_AUTHORITY, _CERTIFICATE, _KEY = "ca.crt", "tls.crt", "tls.key"


def controller_name(driver_name: str) -> str:
    """Return the DNS name in the controller's certificate."""
    return f"controller.{driver_name}"


def node_name(node_id: str, driver_name: str) -> str:
    """Return the DNS name in a node's certificate."""
    name = f"{node_id}.node.{driver_name}"
    if len(name) > _MOST_NAME_CHARACTERS or ids.looks_shortened(node_id):
        name = f"{ids.node_segment(node_id)}.node.{driver_name}"
    return name.lower()


def options(server_name: str) -> Sequence[tuple[str, str | int]]:
    """Return a channel's options; the server must have that DNS name in its certificate."""
    return (*_OPTIONS, ("grpc.ssl_target_name_override", server_name))


@dataclass(frozen=True)
class Certificates:
    """A certificate, its key, and the authorities that the peer's must come from, as PEM."""

    authority: bytes
    certificate: bytes
    key: bytes

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read the three files. Raises BadConfig if one cannot be read, or they do not match."""
        certificates = cls(
            *(read_pem(directory / name) for name in (_AUTHORITY, _CERTIFICATE, _KEY))
        )
        try:
            certificates.check()
        except (ssl.SSLError, ValueError) as error:
            # The files do not match, for instance, while they are being replaced one after the
            # other.
            problem = f"{_CERTIFICATE}, {_KEY} and {_AUTHORITY} cannot be used together: {error}"
            raise errors.BadConfig(str(directory), "tls_directory", problem) from None
        return certificates

    def check(self) -> None:
        """Check that the certificate fits the key. Raises SSLError or ValueError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_verify_locations(cadata=self.authority.decode("ascii"))
        # OpenSSL compares the certificate with the key when it loads both.
        with secret.in_file(self.certificate + b"\n" + self.key) as file:
            # A key with a passphrase is refused; otherwise OpenSSL would ask at the terminal.
            context.load_cert_chain(file, password="")

    @property
    def ends_seconds(self) -> float:
        """The end of the certificate's validity, in seconds since the epoch."""
        # Imported here, as the node's service does not need the library, which takes 12 MiB.
        from cryptography import x509

        return x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc.timestamp()

    def for_client(self) -> grpc.ChannelCredentials:
        """Return the credentials that the controller shows to a node."""
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)

    def for_server(self) -> grpc.ServerCertificateConfiguration:
        """Return the certificate that a node shows to the controller, with the authorities.

        The controller's certificate must come from one of the authorities.
        """
        return grpc.ssl_server_certificate_configuration(
            [(self.key, self.certificate)], self.authority
        )


def server_credentials(
    current: Callable[[], Certificates], *, any_client: bool = False
) -> grpc.ServerCredentials:
    """Return a server's credentials, which call `current` at each connection.

    Clients must have a certificate, too, except with `any_client`. Raises BadConfig if the
    certificates cannot be read now. If the certificates cannot be read later, the last ones stay in
    use.
    """
    served_certificates = current()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal served_certificates
        try:
            new_certificates = current()
        except errors.BadConfig as error:
            _log.warning("the certificates stay as they were: %s", error)
            return None
        if new_certificates == served_certificates:
            # The same certificates must not be given to gRPC again at each connection: if two
            # clients connect at once, gRPC frees what the other connection uses, and the process
            # crashes (issue 36693 of grpc/grpc).
            return None
        served_certificates = new_certificates
        _log.info("serving with another certificate")
        return new_certificates.for_server()

    return grpc.dynamic_ssl_server_credentials(
        served_certificates.for_server(),
        renewed,  # type: ignore[arg-type]  # None: as it was (grpc's documentation)
        require_client_authentication=not any_client,
    )


class OnlyFrom(grpc.ServerInterceptor):
    """Refuses each call whose peer's certificate does not have the required DNS name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Wrap the call's handler with a check of the peer."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        wire = (handler.request_deserializer, handler.response_serializer)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(self._checked(handler.unary_stream), *wire)
        return grpc.unary_unary_rpc_method_handler(self._checked(handler.unary_unary), *wire)

    def _checked(self, behaviour: Any) -> Callable[..., Any]:
        # `wraps` keeps the attribute that says in which pool of threads the handler runs.
        @wraps(behaviour)
        def call(request: Any, context: grpc.ServicerContext) -> Any:
            names: Iterable[Any] = context.auth_context().get(_NAMES, ())
            if self._name.encode() not in names:
                peer_names = ", ".join(name.decode() for name in names) or "none"
                context.abort(
                    grpc.StatusCode.PERMISSION_DENIED,
                    f"only {self._name} may call this node; the certificate's names are:"
                    f" {peer_names}",
                )
            return behaviour(request, context)

        return call


def read_pem(path: Path) -> bytes:
    """Read a PEM file. Raises BadConfig."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise errors.BadConfig(str(path), "tls_directory", error.strerror or str(error)) from None
    if b"-----BEGIN " not in text:
        raise errors.BadConfig(str(path), "tls_directory", "is no PEM")
    return text
