"""Grants: the controller's permission for one node to read one volume of another node.

A grant names the volume, its node, the node that may read it, and the time for which it is valid.
The controller signs a grant with the key of its own TLS certificate, and sends it to the node that
is to receive the volume. That node shows the grant to the node that has the volume, which checks:

- The signature is that of the first certificate in the grant, which is the controller's, is valid
  now, and is issued by an authority that this node trusts.
- The grant is valid now, and names this node, and the node that calls.

What it may read is checked by node_streams.py: the snapshots of the volume's move to that node.

This module imports `cryptography`, which takes 12 MiB of memory. Import it only where it is needed.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.x509.oid import ExtensionOID

from agent.core import errors
from agent.extras.tls.certificates import Certificates, controller_name
from proto import carver_pb2 as carver

# Longest time from the beginning of a grant's validity to its end, in seconds.
LONGEST_SECONDS = 3600
# Time before the present at which the validity of a new grant begins, in seconds. The clocks of the
# nodes may differ by so much from the controller's.
_BEFORE_SECONDS = 300
# First key of a grant's text, so that no other text that the controller's key signs is a grant.
_KIND = "carver grant 1"
# Maximum length of a grant's text, in bytes, and maximum number of its certificates.
_MOST_BYTES, _MOST_CERTIFICATES = 4096, 4
_SHA256 = hashes.SHA256()
_PSS = padding.PSS(padding.MGF1(_SHA256), padding.PSS.DIGEST_LENGTH)
# Extensions of certificates that `_require_known` accepts although they are critical: they are
# checked here, or say nothing about the use of the certificate.
_KNOWN = frozenset(
    {
        ExtensionOID.BASIC_CONSTRAINTS,
        ExtensionOID.KEY_USAGE,
        ExtensionOID.EXTENDED_KEY_USAGE,
        ExtensionOID.SUBJECT_ALTERNATIVE_NAME,
    }
)


@dataclass(frozen=True)
class Grant:
    """What a grant says. Times are in seconds since the epoch."""

    driver: str
    volume_id: str
    source: str
    target: str
    not_before: int
    not_after: int
    # The SHA-256 of the certificates that the grant is sent with.
    certificates: str


def new(
    certificates: Certificates,
    driver: str,
    volume_id: str,
    source: str,
    target: str,
    clock: Callable[[], float] = time.time,
) -> carver.Grant:
    """Make and sign a grant: the node `target` may read a volume of the node `source`.

    `certificates` are the controller's. Raises BadConfig if its key is of a kind that cannot sign.
    """
    chain = [
        one.public_bytes(serialization.Encoding.DER)
        for one in x509.load_pem_x509_certificates(certificates.certificate)
    ]
    begin = int(clock()) - _BEFORE_SECONDS
    grant = Grant(driver, volume_id, source, target, begin, begin + LONGEST_SECONDS, _digest(chain))
    text = _text(grant)
    return carver.Grant(text=text, signature=_sign(certificates.key, text), certificates=chain)


def checked(
    signed: carver.Grant,
    certificates: Certificates,
    driver: str,
    node: str,
    clock: Callable[[], float] = time.time,
) -> Grant:
    """Verify a grant that this node, `node`, was shown; return what the grant says.

    `certificates` are this node's. The caller has to check that the node that showed the grant is
    the grant's target. Raises NotGranted.
    """
    if not signed.text:
        raise errors.NotGranted("there is no grant of the cluster's controller")
    try:
        grant = _parsed(signed)
        now = clock()
        leaf = _verified_leaf(signed.certificates, certificates.authority, now)
        _require_controller(leaf, controller_name(driver))
        _verify(leaf, signed.signature, signed.text)
    except Exception as error:
        # Whatever fails while a grant is read, the grant is not valid.
        why = str(error) or "its signature is wrong"
        raise errors.NotGranted(f"the grant is not valid: {why}") from None
    if grant.driver != driver:
        raise errors.NotGranted(f"the grant is for the driver {grant.driver!r}")
    if grant.source != node:
        raise errors.NotGranted(f"the grant is for a volume of node {grant.source!r}")
    if not grant.not_before <= now < grant.not_after:
        raise errors.NotGranted("the grant is not valid at this time")
    return grant


def _text(grant: Grant) -> bytes:
    """Return the one form of a grant as text, which is signed."""
    table = {"kind": _KIND, **asdict(grant)}
    return json.dumps(table, sort_keys=True, separators=(",", ":")).encode()


def _parsed(signed: carver.Grant) -> Grant:
    """Return what a grant says. Raises ValueError unless it has the one form that `_text` gives."""
    if len(signed.text) > _MOST_BYTES or not 0 < len(signed.certificates) <= _MOST_CERTIFICATES:
        raise ValueError("it is too long, or has no certificate")
    table = json.loads(signed.text)
    if not isinstance(table, dict):
        raise ValueError("it is no table")
    table.pop("kind", None)
    grant = Grant(**table)
    if any(type(getattr(grant, one.name)) is not one.type for one in fields(Grant)):
        raise ValueError("a field has the wrong type")
    if _text(grant) != signed.text:
        raise ValueError("it is written otherwise than the controller writes it")
    if not 0 < grant.not_after - grant.not_before <= LONGEST_SECONDS:
        raise ValueError(f"it lasts longer than {LONGEST_SECONDS} seconds")
    if grant.certificates != _digest(signed.certificates):
        raise ValueError("it was signed for other certificates")
    return grant


def _digest(chain: Sequence[bytes]) -> str:
    total = hashlib.sha256()
    for one in chain:
        total.update(len(one).to_bytes(8, "big") + one)
    return total.hexdigest()


def _verified_leaf(chain: Sequence[bytes], authorities: bytes, now: float) -> x509.Certificate:
    """Return the first certificate of a chain; raise ValueError unless the chain can be trusted.

    Each certificate must be valid now and issued by the next one, and the last one by one of the
    trusted authorities, which must be valid now as well.
    """
    parsed = [x509.load_der_x509_certificate(one) for one in chain]
    if b"".join(one.public_bytes(serialization.Encoding.DER) for one in parsed) != b"".join(chain):
        raise ValueError("a certificate is encoded otherwise than DER")
    for depth, certificate in enumerate(parsed):
        _require_valid(certificate, now)
        if depth:
            _require_authority(certificate, depth - 1)
            _require_issued(parsed[depth - 1], certificate)
    problem = "no trusted authority issued the controller's certificate"
    for authority in x509.load_pem_x509_certificates(authorities):
        try:
            _require_issued(parsed[-1], authority)
            _require_valid(authority, now)
            _require_authority(authority, len(parsed) - 1)
        except ValueError as error:
            if authority.subject == parsed[-1].issuer:
                problem = str(error)
        else:
            return parsed[0]
    raise ValueError(problem)


def _require_valid(certificate: x509.Certificate, now: float) -> None:
    moment = datetime.fromtimestamp(now, UTC)
    if not certificate.not_valid_before_utc <= moment < certificate.not_valid_after_utc:
        raise ValueError("a certificate of the controller, or its authority, is not valid now")
    for extension in certificate.extensions:
        if extension.critical and extension.oid not in _KNOWN:
            raise ValueError(f"a certificate has the extension {extension.oid.dotted_string}")


def _require_issued(certificate: x509.Certificate, issuer: x509.Certificate) -> None:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (InvalidSignature, TypeError):
        raise ValueError("a certificate was issued by another authority") from None


def _require_authority(certificate: x509.Certificate, certificates_below: int) -> None:
    """Raise ValueError unless a certificate may issue others.

    `certificates_below` is the number of authorities between it and the controller's certificate.
    """
    try:
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    except x509.ExtensionNotFound:
        raise ValueError("a certificate is not an authority's") from None
    length = constraints.path_length
    if not constraints.ca or (length is not None and length < certificates_below):
        raise ValueError("a certificate is not an authority's")
    try:
        usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
    except x509.ExtensionNotFound:
        return
    if not usage.key_cert_sign:
        raise ValueError("a certificate is not an authority's")


def _require_controller(certificate: x509.Certificate, name: str) -> None:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        names = []
    else:
        names = extension.value.get_values_for_type(x509.DNSName)
    if name not in names:
        raise ValueError(f"it was signed by {', '.join(names) or 'no one'}, and not by {name}")


def _sign(key_pem: bytes, text: bytes) -> bytes:
    key = serialization.load_pem_private_key(key_pem, password=None)
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(text, ec.ECDSA(_SHA256))
    if isinstance(key, rsa.RSAPrivateKey):
        return key.sign(text, _PSS, _SHA256)
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key.sign(text)
    raise errors.BadConfig("tls_directory", "tls.key", "is of no kind that can sign a grant")


def _verify(certificate: x509.Certificate, signature: bytes, text: bytes) -> None:
    """Raise InvalidSignature or ValueError unless a certificate's key made a signature."""
    key = certificate.public_key()
    if isinstance(key, ec.EllipticCurvePublicKey):
        key.verify(signature, text, ec.ECDSA(_SHA256))
    elif isinstance(key, rsa.RSAPublicKey):
        key.verify(signature, text, _PSS, _SHA256)
    elif isinstance(key, ed25519.Ed25519PublicKey):
        key.verify(signature, text)
    else:
        raise ValueError("the controller's key is of an unknown kind")
