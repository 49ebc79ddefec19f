"""The node's side of enrolment: send its address to each controller, and get certificates.

The node's token and the controllers' authority are files that kubelet renews. The node has no
rights in the cluster's API. The private key is made on the node, never leaves the node's memory,
and is new with each certificate.
"""

import logging
import socket
import time
from collections.abc import Callable

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature

from agent.core import errors
from agent.extras.controller.authority import certificate_request, key_as_pem, new_key
from agent.extras.tls import certificates
from agent.extras.tls.certificates import Certificates
from agent.settings.settings import Config
from agent.settings.values import Address
from agent.work.background import PeriodicTask
from proto import carver_pb2 as carver
from proto import carver_pb2_grpc

_log = logging.getLogger(__name__)

# Seconds between two enrolments.
_INTERVAL_SECONDS = 15.0
# Seconds until a failed enrolment is retried: after the first failure, and at most.
_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 2.0, 15.0
# Time limit of one enrolment at one controller, in seconds.
_PATIENCE_SECONDS = 5.0
# Minimum time, in seconds, until a certificate is renewed because of its age. A certificate that is
# not trusted, or whose validity has not begun, is renewed at the next enrolment.
_LEAST_SECONDS = 3600.0
# Names of two files in the directory of the setting enrolment_directory: the node's token, and the
# controllers' certificate authorities.
_TOKEN, _AUTHORITY = "token", "ca.crt"


class NotEnrolled(errors.AgentError):
    """Error: no controller accepted this node's enrolment."""


class Enroller:
    """The background task that enrols this node at all controllers behind a Service.

    `begin` is called when the node has its first certificate, and again after each enrolment until
    one call of `begin` has succeeded.
    """

    def __init__(self, config: Config, address: str, begin: Callable[[], None]) -> None:
        self._config, self._address, self._begin = config, address, begin
        self._directory = config.enrolment_directory
        # The node's certificate and its key, as PEM. They are one tuple, so that gRPC's threads
        # never read a certificate with another certificate's key.
        self._own = (b"", b"")
        self._renew_at = 0.0
        self._began = False
        self._channels: dict[tuple[str, bytes], grpc.Channel] = {}
        self.task = PeriodicTask(
            "enrolment",
            self._enrol,
            _INTERVAL_SECONDS,
            "this node has not enrolled at the cluster's controllers: %s",
            retry_seconds=_RETRY_SECONDS,
            longest_retry_seconds=_LONGEST_RETRY_SECONDS,
        )

    @property
    def certificates(self) -> Certificates:
        """The node's certificate and key, and the authorities that the node trusts.

        Raises BadConfig if the file with the authorities, ca.crt, cannot be read.
        """
        authority = certificates.read_pem(self._directory / _AUTHORITY)
        return Certificates(authority, *self._own)

    def _enrol(self) -> None:
        """Enrol this node at each controller once, and call `begin` after the first success.

        Raises NotEnrolled, with the reasons, if no controller accepted the node.
        """
        problems, controllers = [], self._controllers()
        for stale_key in [key for key in self._channels if key[0] not in controllers]:
            self._channels.pop(stale_key).close()
        for controller in controllers:
            try:
                self._enrol_at(controller)
            except grpc.RpcError as error:
                problems.append(f"{controller}: {error.code().name}: {error.details()}")
        if len(problems) == len(controllers):
            raise NotEnrolled("; ".join(problems) or "the Service has no address")
        if not self._began:
            self._begin()
            self._began = True

    def _controllers(self) -> list[str]:
        """Return the present addresses of the controllers behind the Service.

        Raises NotEnrolled if the Service's name cannot be resolved.
        """
        service = self._config.controllers
        if service is None:
            return []
        try:
            addresses = socket.getaddrinfo(service.host, service.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise NotEnrolled(f"{service.host}: {error.strerror or error}") from None
        return sorted({str(Address(str(address[4][0]), service.port)) for address in addresses})

    def _enrol_at(self, controller: str) -> None:
        request = carver.EnrolRequest(token=self._token(), address=self._address)
        key = None
        if self._needs_certificate():
            key = new_key()
            request.certificate_request = certificate_request(key)
        stub = carver_pb2_grpc.EnrolmentStub(self._channel(controller))
        answer = stub.Enrol(request, timeout=_PATIENCE_SECONDS)
        if key is None:
            return
        certificate = x509.load_pem_x509_certificate(answer.certificate)
        now, ends = time.time(), certificate.not_valid_after_utc.timestamp()
        self._own = (answer.certificate, key_as_pem(key))
        # Renew the certificate after half of its remaining time, but no sooner than after
        # _LEAST_SECONDS: otherwise a node with a wrong clock would renew it at each enrolment.
        self._renew_at = now + max(_LEAST_SECONDS, (ends - now) / 2)
        _log.info("this node has a certificate until %s", certificate.not_valid_after_utc)

    def _needs_certificate(self) -> bool:
        """Return whether this node needs a new certificate.

        Each of these is a reason:

        1. The node has no certificate yet, or half of the certificate's time is over.
        2. The certificate's validity has not begun: the clock of the controller that signed the
           certificate was ahead.
        3. No trusted authority issued the certificate: the authority was lost or restored, and the
           controllers trust only the new one.
        4. The file with the trusted authorities cannot be parsed.

        Raises BadConfig if that file cannot be read.
        """
        if time.time() >= self._renew_at:
            return True
        certificate = x509.load_pem_x509_certificate(self._own[0])
        if certificate.not_valid_before_utc.timestamp() > time.time():
            return True
        try:
            trusted = x509.load_pem_x509_certificates(
                certificates.read_pem(self._directory / _AUTHORITY)
            )
        except ValueError:
            # The authorities cannot be parsed. Then no controller is trusted either, and the
            # enrolment itself fails.
            return True
        return not any(_issued(authority, certificate) for authority in trusted)

    def _channel(self, controller: str) -> grpc.Channel:
        """Return a gRPC channel to a controller with a certificate that a trusted authority issued.

        If ca.crt has changed since the last enrolment, the old channel is closed.
        """
        authority = certificates.read_pem(self._directory / _AUTHORITY)
        key = (controller, authority)
        if key not in self._channels:
            for old_key in [key for key in self._channels if key[0] == controller]:
                self._channels.pop(old_key).close()
            credentials = grpc.ssl_channel_credentials(authority)
            name = certificates.controller_name(self._config.driver_name)
            self._channels[key] = grpc.secure_channel(
                controller, credentials, certificates.options(name)
            )
        return self._channels[key]

    def _token(self) -> str:
        try:
            return (self._directory / _TOKEN).read_text("ascii").strip()
        except OSError as error:
            raise NotEnrolled(f"{self._directory / _TOKEN}: {error.strerror}") from None


def _issued(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    """Return whether a certificate has an authority's name as its issuer, and its signature."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
