"""The cluster's certificate authority: kept in a Secret, published to the nodes in a ConfigMap.

The controller makes and renews all certificates; none is made by hand. Authorities overlap. A new
authority is published an hour before it signs, unless the current authority is not valid. An
authority that has ceased to sign stays published until another authority ceases to sign. So a node
that reads the ConfigMap late trusts both authorities.

Crash points: each step of a refresh is one write to the API server, which refuses the write if
another controller wrote first. The next refresh does the remaining steps.
"""

import base64
import datetime
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from agent.core import errors
from agent.extras.kubernetes.objects import Objects
from agent.extras.tls.certificates import Certificates

_log = logging.getLogger(__name__)

# Lifetime of an authority in days, and of a certificate in hours.
_AUTHORITY_DAYS, _CERTIFICATE_HOURS = 365, 24
# Time between the making of an authority's successor and the end of the authority's validity.
_OVERLAP = datetime.timedelta(days=90)
# Time between the publication of a new authority and its first signature. Kubelet brings a changed
# ConfigMap to pods within two minutes.
_PUBLISHED_FOR = datetime.timedelta(hours=1)
# Time before the present at which the validity of a new authority begins. The clock of the machine
# that makes the authority may be ahead of other clocks, for instance set to local time until NTP
# corrects it.
_BEFORE = datetime.timedelta(hours=24)
# Time before the present at which the validity of a new certificate begins. The time is shorter
# than for an authority, because nodes with an older version of Carver renew a certificate after
# half of its lifetime.
_CERTIFICATE_BEFORE = datetime.timedelta(hours=14)
_PEM = serialization.Encoding.PEM
_CURRENT, _NEXT, _PREVIOUS = "current", "next", "previous"


def new_key() -> ec.EllipticCurvePrivateKey:
    """Return a new private key, on the elliptic curve P-256."""
    return ec.generate_private_key(ec.SECP256R1())


def key_as_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key as PEM (PKCS #8, not encrypted)."""
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def certificate_request(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a certificate signing request, as DER, for a key.

    The request has no subject name: the controller chooses the name in the certificate.
    """
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


@dataclass(frozen=True)
class _Signer:
    """The certificate and the private key of one authority, both as PEM."""

    certificate: bytes
    key: bytes

    @classmethod
    def new(cls, now: datetime.datetime) -> Self:
        key = new_key()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"carver {now.isoformat()}")])
        builder = (
            _builder(
                name,
                key.public_key(),
                now - _BEFORE,
                now + datetime.timedelta(days=_AUTHORITY_DAYS),
            )
            .issuer_name(name)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        )
        signed = builder.sign(key, hashes.SHA256())
        return cls(signed.public_bytes(_PEM), key_as_pem(key))

    @property
    def parsed(self) -> x509.Certificate:
        return x509.load_pem_x509_certificate(self.certificate)

    def is_valid(self, now: datetime.datetime) -> bool:
        """Return whether the authority's validity has begun, and not ended, at the time `now`."""
        parsed = self.parsed
        return parsed.not_valid_before_utc <= now < parsed.not_valid_after_utc

    def sign(
        self, dns_name: str, public_key: ec.EllipticCurvePublicKey, now: datetime.datetime
    ) -> bytes:
        """Return a certificate, as PEM, for a DNS name and a public key, signed by this authority.

        Servers and clients can use the certificate. Raises BadConfig if the authority's key is not
        on an elliptic curve.
        """
        key = serialization.load_pem_private_key(self.key, password=None)
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = (
            _builder(
                x509.Name([]),
                public_key,
                now - _CERTIFICATE_BEFORE,
                now + datetime.timedelta(hours=_CERTIFICATE_HOURS),
            )
            .issuer_name(self.parsed.subject)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(dns_name)]), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        )
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise errors.BadConfig("the authority", "key", "is not one of Carver's")
        return builder.sign(key, hashes.SHA256()).public_bytes(_PEM)


def _builder(
    subject: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    not_before: datetime.datetime,
    not_after: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(not_before)
        .not_valid_after(not_after)
    )


class Authority:
    """The cluster's certificate authority, which signs certificates with the keys in its Secret.

    The Secret has up to three authorities: the current one, which signs; the next one, which is
    only published; and the previous one, which is still published.
    """

    def __init__(self, objects: Objects, namespace: str, name: str) -> None:
        self._objects, self._name = objects, name
        self._secrets = f"/api/v1/namespaces/{namespace}/secrets"
        self._maps = f"/api/v1/namespaces/{namespace}/configmaps"
        self._signers: Mapping[str, _Signer] = {}

    def refresh(self, now: datetime.datetime | None = None) -> None:
        """Read the authorities in the Secret, make or renew them if need be, and publish them.

        The ConfigMap has the published authorities. Waits for the API server. Raises ClusterRefused
        if the API server refuses twice or does not answer, BadConfig if the Secret cannot be
        parsed.
        """
        now = now or _now()
        try:
            self._refresh(now)
        except errors.ClusterRefused:
            # Retry once: another controller may have written first. The retry reads what that
            # controller wrote.
            self._refresh(now)

    def _refresh(self, now: datetime.datetime) -> None:
        secret = self._objects.find(f"{self._secrets}/{self._name}", "Secret")
        if secret is None:
            renewed = {_CURRENT: _Signer.new(now)}
            self._objects.create(self._secrets, self._object("Secret", _data(renewed)))
            _log.info("made the cluster's certificate authority, Secret %s", self._name)
        else:
            try:
                stored = _signers(secret)
                renewed = _renewed(stored, now)
            except ValueError as error:
                problem = f"cannot be read: {error}; delete it, and another is made"
                raise errors.BadConfig("the cluster", f"Secret {self._name}", problem) from None
            if renewed != stored:
                dropped = dict.fromkeys(_data(stored).keys() - _data(renewed).keys())
                version = secret["metadata"]["resourceVersion"]
                change = {"data": {**_data(renewed), **dropped}}
                self._objects.change(f"{self._secrets}/{self._name}", change, version)
                _log.info("renewed the cluster's certificate authority: %s", ", ".join(renewed))
        self._signers = renewed
        self._publish()

    @property
    def bundle(self) -> bytes:
        """The certificates of the current, next and previous authority, which all trust, as PEM."""
        return b"".join(sorted(signer.certificate for signer in self._signers.values()))

    def sign(
        self,
        dns_name: str,
        public_key: ec.EllipticCurvePublicKey,
        now: datetime.datetime | None = None,
    ) -> bytes:
        """Return a certificate, as PEM, for a DNS name and a public key.

        The current authority signs the certificate, which is valid for 24 hours.
        """
        return self._signers[_CURRENT].sign(dns_name, public_key, now or _now())

    def own(self, dns_name: str, now: datetime.datetime | None = None) -> Certificates:
        """Make a new key, and return a certificate for that key with this DNS name.

        The controller uses them itself. The key is never written to disk.
        """
        key = new_key()
        return Certificates(
            self.bundle, self.sign(dns_name, key.public_key(), now), key_as_pem(key)
        )

    def _publish(self) -> None:
        """Write the authorities' certificates into the ConfigMap, unless it has them already."""
        path = f"{self._maps}/{self._name}"
        data = {"ca.crt": self.bundle.decode("ascii")}
        published = self._objects.find(path, "ConfigMap")
        if published is None:
            self._objects.create(self._maps, self._object("ConfigMap", data))
        elif published.get("data") != data:
            version = published["metadata"]["resourceVersion"]
            self._objects.change(path, {"data": data}, version)

    def _object(self, kind: str, data: Mapping[str, str]) -> dict[str, Any]:
        metadata = {"name": self._name}
        return {"apiVersion": "v1", "kind": kind, "metadata": metadata, "data": dict(data)}


def _renewed(stored: Mapping[str, _Signer], now: datetime.datetime) -> dict[str, _Signer]:
    """Return the certificate authorities that the Secret is to hold now, by their roles.

    1. If the Secret has no current authority, or the current one is not valid: a valid previous or
       else next authority becomes the current one; if neither is valid, a new one is made. The
       authority that was current becomes the previous one.
    2. Otherwise, if a valid next authority was made at least an hour ago, it becomes the current
       one. The authority that was current becomes the previous one, in place of the present
       previous one.
    3. Otherwise, if the Secret has no valid next authority and the current one ends within 90 days,
       a new next one is made.

    The clock of this controller may be wrong, and the clocks of other controllers right. So a
    current authority that is not valid by this clock is not deleted: it only ceases to sign, and
    stays as the previous authority until another authority takes that role. A controller with a
    right clock makes it the current one again.
    """
    renewed = dict(stored)
    if _CURRENT not in renewed or not renewed[_CURRENT].is_valid(now):
        heirs = [
            role for role in (_PREVIOUS, _NEXT) if role in renewed and renewed[role].is_valid(now)
        ]
        signer = renewed.pop(heirs[0]) if heirs else _Signer.new(now)
        if _CURRENT in renewed:
            renewed[_PREVIOUS] = renewed[_CURRENT]
        renewed[_CURRENT] = signer
        return renewed
    heir = renewed[_NEXT] if _NEXT in renewed and renewed[_NEXT].is_valid(now) else None
    if heir and heir.parsed.not_valid_before_utc + _BEFORE + _PUBLISHED_FOR <= now:
        return {_PREVIOUS: renewed[_CURRENT], _CURRENT: heir}
    if not heir and renewed[_CURRENT].parsed.not_valid_after_utc - _OVERLAP <= now:
        renewed[_NEXT] = _Signer.new(now)
    return renewed


def _data(signers: Mapping[str, _Signer]) -> dict[str, str]:
    """Return the authorities' certificates and keys as the `data` of a Secret."""
    encoded = {}
    for role, signer in signers.items():
        encoded[f"{role}.crt"] = base64.b64encode(signer.certificate).decode("ascii")
        encoded[f"{role}.key"] = base64.b64encode(signer.key).decode("ascii")
    return encoded


def _signers(secret: Mapping[str, Any]) -> dict[str, _Signer]:
    data = secret.get("data") or {}
    signers = {}
    for role in (_CURRENT, _NEXT, _PREVIOUS):
        if f"{role}.crt" in data and f"{role}.key" in data:
            parts = (base64.b64decode(data[f"{role}.{end}"]) for end in ("crt", "key"))
            signers[role] = _Signer(*parts)
    return signers


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
