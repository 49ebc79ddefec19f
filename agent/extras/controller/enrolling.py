"""The node's side of enrolment: tell each controller where this node serves, and get certificates.

The token and the controllers' authority are files that kubelet renews; the node has no rights in
the cluster's API. The key is made here, never leaves memory, and is new with each certificate.
"""

import logging
import socket
import time
from collections.abc import Callable

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature

from agent.core import errors
from agent.extras.controller import certificates
from agent.extras.controller.authority import certificate_request, key_as_pem, new_key
from agent.extras.controller.certificates import Certificates
from agent.settings.settings import Config
from agent.settings.values import Address
from agent.work.background import PeriodicTask
from proto import carver_pb2 as carver
from proto import carver_pb2_grpc

_log = logging.getLogger(__name__)

_INTERVAL_SECONDS = 15.0
_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 2.0, 15.0
_PATIENCE_SECONDS = 5.0
# The least time between two certificates.
_LEAST_SECONDS = 3600.0
_TOKEN, _AUTHORITY = "token", "ca.crt"


class NotEnrolled(errors.AgentError):
    """No controller took this node."""


class Enroller:
    """Enrols at all controllers behind a Service, for as long as the service runs.

    `begin` is called once, with the first certificate.
    """

    def __init__(self, config: Config, address: str, begin: Callable[[], None]) -> None:
        self._config, self._address, self._begin = config, address, begin
        self._directory = config.enrolment_directory
        # The certificate and its key as PEM, replaced together: gRPC's threads read them.
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
        """What this node shows, and whom it lets in. Raises BadConfig where ca.crt is missing."""
        authority = certificates.read_pem(self._directory / _AUTHORITY)
        return Certificates(authority, *self._own)

    def _enrol(self) -> None:
        """Enrol once. Raises NotEnrolled with the reasons of all controllers if none took it."""
        problems, controllers = [], self._controllers()
        for gone in [one for one in self._channels if one[0] not in controllers]:
            self._channels.pop(gone).close()
        for one in controllers:
            try:
                self._enrol_at(one)
            except grpc.RpcError as error:
                problems.append(f"{one}: {error.code().name}: {error.details()}")
        if len(problems) == len(controllers):
            raise NotEnrolled("; ".join(problems) or "the Service has no address")
        if not self._began:
            self._begin()
            self._began = True

    def _controllers(self) -> list[str]:
        """The addresses of the controllers that the Service has now. Raises NotEnrolled."""
        service = self._config.controllers
        if service is None:
            return []
        try:
            found = socket.getaddrinfo(service.host, service.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise NotEnrolled(f"{service.host}: {error.strerror or error}") from None
        return sorted({str(Address(str(one[4][0]), service.port)) for one in found})

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
        made = x509.load_pem_x509_certificate(answer.certificate)
        now, ends = time.time(), made.not_valid_after_utc.timestamp()
        self._own = (answer.certificate, key_as_pem(key))
        # Half of what is left of it; not at each enrolment where this node's clock is wrong.
        self._renew_at = now + max(_LEAST_SECONDS, (ends - now) / 2)
        _log.info("this node has a certificate until %s", made.not_valid_after_utc)

    def _needs_certificate(self) -> bool:
        """Whether the certificate is half over, or no authority that is trusted now issued it.

        So it is where the authority was lost or restored: controllers trust the other one alone.
        And where a controller made it whose clock was ahead: it has not begun.
        """
        if time.time() >= self._renew_at:
            return True
        made = x509.load_pem_x509_certificate(self._own[0])
        if made.not_valid_before_utc.timestamp() > time.time():
            return True
        try:
            trusted = x509.load_pem_x509_certificates(
                certificates.read_pem(self._directory / _AUTHORITY)
            )
        except ValueError:
            # Then no controller is trusted either, and its call fails.
            return True
        return not any(_issued(one, made) for one in trusted)

    def _channel(self, controller: str) -> grpc.Channel:
        """A channel to a controller, which must have a certificate of the authority's."""
        authority = certificates.read_pem(self._directory / _AUTHORITY)
        wanted = (controller, authority)
        if wanted not in self._channels:
            for known in [one for one in self._channels if one[0] == controller]:
                self._channels.pop(known).close()
            credentials = grpc.ssl_channel_credentials(authority)
            name = certificates.controller_name(self._config.driver_name)
            self._channels[wanted] = grpc.secure_channel(
                controller, credentials, certificates.options(name)
            )
        return self._channels[wanted]

    def _token(self) -> str:
        try:
            return (self._directory / _TOKEN).read_text("ascii").strip()
        except OSError as error:
            raise NotEnrolled(f"{self._directory / _TOKEN}: {error.strerror}") from None


def _issued(authority: x509.Certificate, made: x509.Certificate) -> bool:
    """Whether a certificate is of an authority, by name and signature."""
    try:
        made.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
