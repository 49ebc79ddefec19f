"""Mutual TLS between the controller and the nodes: certificates, credentials, checks of names.

Certificates come from files, as cert-manager writes them, or from enrolment (enrolment.py).

The DNS name in a certificate says whose certificate it is: `controller.DRIVER`, or
`NODE.node.DRIVER`. So a node's key gives no access to another node, and a node cannot answer for
another node. If a node's name makes the DNS name too long for TLS, the DNS name has the node's
topology segment in place of the name. That segment ends with a digest of the node's name.
"""

import logging
import ssl
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Any, Self

import grpc

from agent.core import errors, ids
from agent.requests import secret

_log = logging.getLogger(__name__)

# Key in gRPC's ServicerContext.auth_context() of the names in the peer's certificate.
_NAMES = "x509_subject_alternative_name"
# Interval of keepalive pings, and time limit for the answer to one that a client or a server sends,
# in seconds.
_PING_SECONDS, _CLIENT_SECONDS, _SERVER_SECONDS = 30, 5, 20
# Maximum time, in seconds, until a call ends, at either end, whose other end is gone without a
# word, such as a machine without power.
GONE_SECONDS = _PING_SECONDS + max(_CLIENT_SECONDS, _SERVER_SECONDS)


def _pings(answer_seconds: int) -> tuple[tuple[str, int], ...]:
    """Return the options by which a connection is closed whose other end is gone.

    Pings are sent during a call, also while no data are sent. `answer_seconds` is the time limit
    for the answer to a ping.
    """
    return (
        ("grpc.keepalive_time_ms", _PING_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", answer_seconds * 1000),
        # Without this option, the time limit is a minute (grpc 1.85, "Set ping timeout timer").
        ("grpc.http2.ping_timeout_ms", answer_seconds * 1000),
        ("grpc.http2.max_pings_without_data", 0),
    )


# Options of gRPC channels: of the controller's to nodes, of a node's to another node, and of a
# node's to controllers (enrolment).
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 5000),
    *_pings(_CLIENT_SECONDS),
    # Use no HTTP proxy, whatever the environment variables about proxies say.
    ("grpc.enable_http_proxy", 0),
)
# Options of the gRPC servers of a node and of the controller (enrolment). A connection is closed if
# its handshake takes ten seconds, or if it is idle for five minutes.
SERVER_OPTIONS = (
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    # Frequent pings do not count as abuse, as both ends are Carver's.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    *_pings(_SERVER_SECONDS),
    # Only one process may listen on a port. Two processes that shared a port would each answer some
    # of the calls.
    ("grpc.so_reuseport", 0),
)
# Maximum number of characters of a server's name in TLS' SNI (TLSEXT_MAXLEN_host_name of
# BoringSSL).
_MOST_NAME_CHARACTERS = 255
# Maximum size, in bytes, of a request that any node may send to another node.
_MOST_REQUEST_BYTES = 32 << 10
# Time limit, in seconds, of the first request of a call of another node in which both sides stream.
_FIRST_SECONDS = 10.0
_AUTHORITY, _CERTIFICATE, _KEY = "ca.crt", "tls.crt", "tls.key"


def controller_name(driver_name: str) -> str:
    """Return the DNS name in the controller's certificate."""
    return f"controller.{driver_name}"


def node_name(node_id: str, driver_name: str) -> str:
    """Return the DNS name in a node's certificate.

    The DNS name has the node's topology segment in place of the node's name, if the name is too
    long or looks like a shortened topology segment.
    """
    name = f"{node_id}.node.{driver_name}"
    if len(name) > _MOST_NAME_CHARACTERS or ids.looks_shortened(node_id):
        name = f"{ids.node_segment(node_id)}.node.{driver_name}"
    return name.lower()


def peer_names(context: grpc.ServicerContext) -> Sequence[str]:
    """Return the names in the certificate of the caller of an RPC; none without a certificate."""
    names: Iterable[Any] = context.auth_context().get(_NAMES, ())
    return [name.decode() for name in names]


def options(server_name: str) -> Sequence[tuple[str, str | int]]:
    """Return the options of a gRPC channel to a server with this DNS name in its certificate."""
    return (*_OPTIONS, ("grpc.ssl_target_name_override", server_name))


@dataclass(frozen=True)
class Certificates:
    """A certificate, its private key, and the trusted authorities, each as PEM.

    One of the authorities must have issued the peer's certificate.
    """

    authority: bytes
    certificate: bytes
    key: bytes

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read ca.crt, tls.crt and tls.key in a directory.

        Raises BadConfig if a file cannot be read, or if the files do not match.
        """
        certificates = cls(
            *(read_pem(directory / name) for name in (_AUTHORITY, _CERTIFICATE, _KEY))
        )
        try:
            certificates.check()
        except (ssl.SSLError, ValueError) as error:
            # The certificate, the key and the authorities do not match, for instance, while their
            # files are being replaced one after the other.
            problem = f"{_CERTIFICATE}, {_KEY} and {_AUTHORITY} cannot be used together: {error}"
            raise errors.BadConfig(str(directory), "tls_directory", problem) from None
        return certificates

    def check(self) -> None:
        """Raise SSLError or ValueError unless the certificate fits the key.

        Raises them also if the authorities cannot be parsed, or if the key has a passphrase.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_verify_locations(cadata=self.authority.decode("ascii"))
        # Load the certificate and its key together: OpenSSL then compares them.
        with secret.in_file(self.certificate + b"\n" + self.key) as file:
            # Refuse a key with a passphrase: without this argument, OpenSSL would ask for the
            # passphrase at the terminal.
            context.load_cert_chain(file, password="")

    @property
    def ends_seconds(self) -> float:
        """The end of the certificate's validity, in seconds since the epoch."""
        # Import cryptography here: it takes 12 MiB of memory, and the node's service does not need
        # it.
        from cryptography import x509

        return x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc.timestamp()

    def for_client(self) -> grpc.ChannelCredentials:
        """Return the controller's credentials for a channel to a node.

        One of the authorities must have issued the node's certificate.
        """
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)

    def for_server(self) -> grpc.ServerCertificateConfiguration:
        """Return the certificate that a server shows to its clients, with the authorities.

        The server is a node's, for the controller, or the controller's, for enrolment. If the
        server asks for a client's certificate, one of the authorities must have issued that
        certificate.
        """
        return grpc.ssl_server_certificate_configuration(
            [(self.key, self.certificate)], self.authority
        )


def server_credentials(
    current: Callable[[], Certificates], *, any_client: bool = False
) -> grpc.ServerCredentials:
    """Return a server's credentials, for which `current` returns the certificates.

    `current` is called now, and at each connection. Clients must have a certificate, too, except
    with `any_client`. Raises BadConfig if `current` raises it now. If `current` raises BadConfig
    later, the last certificates stay in use.
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
            # Do not give gRPC the same certificates again at each connection: if two clients
            # connect at once, gRPC frees memory that the other connection uses, and the process
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
    """Interceptor that refuses each call of a client without a certificate of this DNS name.

    The handlers of the RPCs in `checked_otherwise`, by their paths, check the caller themselves.
    They get no request of more than _MOST_REQUEST_BYTES, as its texts are logged before that.
    """

    def __init__(self, name: str, checked_otherwise: Collection[str] = ()) -> None:
        self._name, self._checked_otherwise = name, frozenset(checked_otherwise)

    def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Return the call's handler, with a check of the names in the peer's certificate before it.

        None if the server has no handler for the call.
        """
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        wire = (handler.request_deserializer, handler.response_serializer)
        if handler_call_details.method in self._checked_otherwise:
            if handler.stream_stream:
                exchange = _bounded_exchange(handler.stream_stream)
                return grpc.stream_stream_rpc_method_handler(exchange, *wire)
            return grpc.unary_stream_rpc_method_handler(_bounded(handler.unary_stream), *wire)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(self._checked(handler.unary_stream), *wire)
        return grpc.unary_unary_rpc_method_handler(self._checked(handler.unary_unary), *wire)

    def _checked(self, behaviour: Any) -> Callable[..., Any]:
        # Copy the handler's attributes: one of them says in which pool of threads the handler runs.
        @wraps(behaviour)
        def call(request: Any, context: grpc.ServicerContext) -> Any:
            names = peer_names(context)
            if self._name not in names:
                shown_names = ", ".join(names) or "none"
                context.abort(
                    grpc.StatusCode.PERMISSION_DENIED,
                    f"only {self._name} may call this node; the certificate's names are:"
                    f" {shown_names}",
                )
            return behaviour(request, context)

        return call


def _bounded(behaviour: Any) -> Callable[..., Any]:
    @wraps(behaviour)
    def call(request: Any, context: grpc.ServicerContext) -> Any:
        _require_bounded(request, context)
        return behaviour(request, context)

    return call


def _bounded_exchange(behaviour: Any) -> Callable[..., Any]:
    """Bound the first request of a call in which both sides stream, and the wait for it.

    The caller has shown no grant by then, so nothing but a thread waits. The handler bounds further
    requests.
    """

    @wraps(behaviour)
    def exchange(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
        timer = threading.Timer(_FIRST_SECONDS, context.cancel)
        timer.daemon = True
        timer.start()
        try:
            first_request = next(requests, None)
        finally:
            timer.cancel()
        if first_request is not None:
            _require_bounded(first_request, context)
            yield from behaviour(chain([first_request], requests), context)

    return exchange


def _require_bounded(request: Any, context: grpc.ServicerContext) -> None:
    if request.ByteSize() > _MOST_REQUEST_BYTES:
        why = f"a request has at most {_MOST_REQUEST_BYTES} bytes"
        context.abort(grpc.StatusCode.PERMISSION_DENIED, why)


def read_pem(path: Path) -> bytes:
    """Read a PEM file. Raises BadConfig if the file cannot be read, or has no PEM text."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise errors.BadConfig(str(path), "tls_directory", error.strerror or str(error)) from None
    if b"-----BEGIN " not in text:
        raise errors.BadConfig(str(path), "tls_directory", "is no PEM")
    return text
