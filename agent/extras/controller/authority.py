"""The cluster's certificate authority: in a Secret of the controller's, published in a ConfigMap.

No certificate is made or renewed by hand. Authorities overlap: a new one is published before it
signs, and the one before it until the next, so that nodes which read the ConfigMap late trust both.
Crash points: each step is one write, refused by the API server if another controller wrote first;
the next look does what is left.
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
from agent.extras.controller.certificates import Certificates
from agent.extras.kubernetes.objects import Objects

_log = logging.getLogger(__name__)

_AUTHORITY_DAYS, _CERTIFICATE_HOURS = 365, 24
# How long before its end an authority gets a successor, and after what time that one signs: kubelet
# brings a changed ConfigMap to pods within two minutes.
_OVERLAP = datetime.timedelta(days=90)
_PUBLISHED_FOR = datetime.timedelta(hours=1)
# By how much an authority and a certificate begin before they are made: the clock that makes them
# may be ahead of the others, as one set to local time until NTP corrects it. A certificate begins
# later, as nodes of older versions renew theirs at half of its time.
_BEFORE = datetime.timedelta(hours=24)
_CERTIFICATE_BEFORE = datetime.timedelta(hours=14)
_PEM = serialization.Encoding.PEM
_CURRENT, _NEXT, _PREVIOUS = "current", "next", "previous"


def new_key() -> ec.EllipticCurvePrivateKey:
    """A new private key."""
    return ec.generate_private_key(ec.SECP256R1())


def key_as_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as it is stored."""
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def certificate_request(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A request for a certificate for a key, without a name: the controller says which."""
    made = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


@dataclass(frozen=True)
class _Signer:
    """An authority's certificate and key, as PEM."""

    certificate: bytes
    key: bytes

    @classmethod
    def new(cls, now: datetime.datetime) -> Self:
        key = new_key()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"carver {now.isoformat()}")])
        made = (
            _builder(
                name,
                key.public_key(),
                now - _BEFORE,
                now + datetime.timedelta(days=_AUTHORITY_DAYS),
            )
            .issuer_name(name)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        )
        signed = made.sign(key, hashes.SHA256())
        return cls(signed.public_bytes(_PEM), key_as_pem(key))

    @property
    def parsed(self) -> x509.Certificate:
        return x509.load_pem_x509_certificate(self.certificate)

    def is_valid(self, now: datetime.datetime) -> bool:
        """Whether it has begun and has not ended."""
        parsed = self.parsed
        return parsed.not_valid_before_utc <= now < parsed.not_valid_after_utc

    def sign(
        self, dns_name: str, public_key: ec.EllipticCurvePublicKey, now: datetime.datetime
    ) -> bytes:
        key = serialization.load_pem_private_key(self.key, password=None)
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        made = (
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
        return made.sign(key, hashes.SHA256()).public_bytes(_PEM)


def _builder(
    subject: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    begins: datetime.datetime,
    ends: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
    )


class Authority:
    """Signs certificates with what is in the Secret."""

    def __init__(self, objects: Objects, namespace: str, name: str) -> None:
        self._objects, self._name = objects, name
        self._secrets = f"/api/v1/namespaces/{namespace}/secrets"
        self._maps = f"/api/v1/namespaces/{namespace}/configmaps"
        self._signers: Mapping[str, _Signer] = {}

    def refresh(self, now: datetime.datetime | None = None) -> None:
        """Read the Secret, make or renew what is in it, and publish it. Raises ClusterRefused."""
        now = now or _now()
        try:
            self._refresh(now)
        except errors.ClusterRefused:
            # Another controller may have written first: what it wrote counts.
            self._refresh(now)

    def _refresh(self, now: datetime.datetime) -> None:
        found = self._objects.find(f"{self._secrets}/{self._name}", "Secret")
        if found is None:
            made = {_CURRENT: _Signer.new(now)}
            self._objects.create(self._secrets, self._object("Secret", _data(made)))
            _log.info("made the cluster's certificate authority, Secret %s", self._name)
        else:
            try:
                known = _signers(found)
                made = _renewed(known, now)
            except ValueError as error:
                problem = f"cannot be read: {error}; delete it, and another is made"
                raise errors.BadConfig("the cluster", f"Secret {self._name}", problem) from None
            if made != known:
                gone = dict.fromkeys(_data(known).keys() - _data(made).keys())
                version = found["metadata"]["resourceVersion"]
                change = {"data": {**_data(made), **gone}}
                self._objects.change(f"{self._secrets}/{self._name}", change, version)
                _log.info("renewed the cluster's certificate authority: %s", ", ".join(made))
        self._signers = made
        self._publish()

    @property
    def bundle(self) -> bytes:
        """The certificates that a peer's certificate must come from, as PEM."""
        return b"".join(sorted(one.certificate for one in self._signers.values()))

    def sign(
        self,
        dns_name: str,
        public_key: ec.EllipticCurvePublicKey,
        now: datetime.datetime | None = None,
    ) -> bytes:
        """A certificate for a name and a key, as PEM."""
        return self._signers[_CURRENT].sign(dns_name, public_key, now or _now())

    def own(self, dns_name: str, now: datetime.datetime | None = None) -> Certificates:
        """A certificate of the controller's own, with a new key, which is never written."""
        key = new_key()
        return Certificates(
            self.bundle, self.sign(dns_name, key.public_key(), now), key_as_pem(key)
        )

    def _publish(self) -> None:
        """Have the ConfigMap say whom to trust."""
        path = f"{self._maps}/{self._name}"
        wanted = {"ca.crt": self.bundle.decode("ascii")}
        found = self._objects.find(path, "ConfigMap")
        if found is None:
            self._objects.create(self._maps, self._object("ConfigMap", wanted))
        elif found.get("data") != wanted:
            version = found["metadata"]["resourceVersion"]
            self._objects.change(path, {"data": wanted}, version)

    def _object(self, kind: str, data: Mapping[str, str]) -> dict[str, Any]:
        about = {"name": self._name}
        return {"apiVersion": "v1", "kind": kind, "metadata": about, "data": dict(data)}


def _renewed(known: Mapping[str, _Signer], now: datetime.datetime) -> dict[str, _Signer]:
    """What the Secret is to hold now.

    This clock may be wrong, and the other controllers' right. So what is not valid by it only
    ceases to sign: it stays beside, as the previous one, until another takes that place. The next
    controller with a right clock has it sign again.
    """
    made = dict(known)
    if _CURRENT not in made or not made[_CURRENT].is_valid(now):
        heirs = [one for one in (_PREVIOUS, _NEXT) if one in made and made[one].is_valid(now)]
        signer = made.pop(heirs[0]) if heirs else _Signer.new(now)
        if _CURRENT in made:
            made[_PREVIOUS] = made[_CURRENT]
        made[_CURRENT] = signer
        return made
    heir = made[_NEXT] if _NEXT in made and made[_NEXT].is_valid(now) else None
    if heir and heir.parsed.not_valid_before_utc + _BEFORE + _PUBLISHED_FOR <= now:
        return {_PREVIOUS: made[_CURRENT], _CURRENT: heir}
    if not heir and made[_CURRENT].parsed.not_valid_after_utc - _OVERLAP <= now:
        made[_NEXT] = _Signer.new(now)
    return made


def _data(signers: Mapping[str, _Signer]) -> dict[str, str]:
    """As a Secret has it."""
    found = {}
    for role, one in signers.items():
        found[f"{role}.crt"] = base64.b64encode(one.certificate).decode("ascii")
        found[f"{role}.key"] = base64.b64encode(one.key).decode("ascii")
    return found


def _signers(secret: Mapping[str, Any]) -> dict[str, _Signer]:
    data = secret.get("data") or {}
    found = {}
    for role in (_CURRENT, _NEXT, _PREVIOUS):
        if f"{role}.crt" in data and f"{role}.key" in data:
            parts = (base64.b64decode(data[f"{role}.{end}"]) for end in ("crt", "key"))
            found[role] = _Signer(*parts)
    return found


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
