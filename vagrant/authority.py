"""The certificate authority of a cluster in the lab, and what it signs.

Everything lies in one folder and is made once: the authority, the API server's certificate, the
client certificate with which it asks kubelets, and the key of service accounts.
"""

import base64 as encoding
import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_SERVER_NAMES = (
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
)
# Valid from the day before, as a guest's clock may be behind, for longer than a lab lives.
_BEFORE, _AFTER = datetime.timedelta(days=1), datetime.timedelta(days=3650)


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key, both in PEM."""

    certificate: bytes
    key: bytes


class Files:
    """The paths of what the API server reads."""

    def __init__(self, folder: Path) -> None:
        """Name the files in a folder."""
        self.authority, self.authority_key = folder / "ca.crt", folder / "ca.key"
        self.server_certificate, self.server_key = folder / "server.crt", folder / "server.key"
        self.kubelet_client_certificate = folder / "kubelet-client.crt"
        self.kubelet_client_key = folder / "kubelet-client.key"
        self.accounts_key = folder / "accounts.key"


def ensure(folder: Path, addresses: Sequence[str]) -> None:
    """Make the authority and what the API server reads, where it is not there yet."""
    files = Files(folder)
    if files.accounts_key.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "the lab's authority")])
    certificate = (
        _builder(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(files.authority, files.authority_key, Pair(_pem(certificate), _pem_key(key)))
    alternatives = [
        *(x509.DNSName(one) for one in _SERVER_NAMES),
        *(x509.IPAddress(ipaddress.ip_address(one)) for one in addresses),
    ]
    server = _signed(files, "kube-apiserver", [], ExtendedKeyUsageOID.SERVER_AUTH, alternatives)
    _write(files.server_certificate, files.server_key, server)
    asks = client(folder, "kube-apiserver-kubelet-client", ["system:masters"])
    _write(files.kubelet_client_certificate, files.kubelet_client_key, asks)
    _private(files.accounts_key, _pem_key(ec.generate_private_key(ec.SECP256R1())))


def client(folder: Path, user: str, groups: Sequence[str]) -> Pair:
    """Sign a client certificate for a user and the groups that it is in."""
    return _signed(Files(folder), user, groups, ExtendedKeyUsageOID.CLIENT_AUTH, [])


def bundle(folder: Path) -> bytes:
    """Return the authority's certificate, in PEM."""
    return Files(folder).authority.read_bytes()


def base64(content: bytes) -> str:
    """Encode bytes as a kubeconfig has them."""
    return encoding.b64encode(content).decode()


def _signed(
    files: Files,
    user: str,
    groups: Sequence[str],
    usage: x509.ObjectIdentifier,
    alternatives: Sequence[x509.GeneralName],
) -> Pair:
    issuer_key = cast(
        ec.EllipticCurvePrivateKey,
        serialization.load_pem_private_key(files.authority_key.read_bytes(), None),
    )
    issuer = x509.load_pem_x509_certificate(files.authority.read_bytes())
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name(
        [
            *(x509.NameAttribute(NameOID.ORGANIZATION_NAME, one) for one in groups),
            x509.NameAttribute(NameOID.COMMON_NAME, user),
        ]
    )
    builder = _builder(subject, issuer.subject, key.public_key()).add_extension(
        x509.ExtendedKeyUsage([usage]), critical=False
    )
    if alternatives:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    return Pair(_pem(builder.sign(issuer_key, hashes.SHA256())), _pem_key(key))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + _AFTER)
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _pem_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        # As an EC PRIVATE KEY (RFC 5915): of a PKCS #8 key the API server derives no public one.
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )


def _write(certificate: Path, key: Path, pair: Pair) -> None:
    certificate.write_bytes(pair.certificate)
    _private(key, pair.key)


def _private(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)
