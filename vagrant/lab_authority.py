"""The certificate authority of a cluster in the lab, and what it signs.

Everything lies in one folder and is made once: the authority, the certificates of the API server
and of etcd, those with which the API server asks kubelets and etcd, and the key of service
accounts.
"""

import base64 as encoding
import datetime
import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from vagrant import files

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
    """The paths of what the control plane reads."""

    def __init__(self, folder: Path) -> None:
        """Name the files in a folder."""
        self.authority, self.authority_key = folder / "ca.crt", folder / "ca.key"
        self.server_certificate, self.server_key = folder / "server.crt", folder / "server.key"
        self.kubelet_client_certificate = folder / "kubelet-client.crt"
        self.kubelet_client_key = folder / "kubelet-client.key"
        self.etcd_certificate, self.etcd_key = folder / "etcd.crt", folder / "etcd.key"
        self.etcd_client_certificate = folder / "etcd-client.crt"
        self.etcd_client_key = folder / "etcd-client.key"
        self.accounts_key = folder / "accounts.key"


def exists(folder: Path) -> bool:
    """Tell whether a folder has an authority, with its key."""
    paths = Files(folder)
    return _is_sound(paths.authority, paths.authority_key, paths.authority)


def ensure(folder: Path, addresses: Sequence[str]) -> None:
    """Make the authority and what it signs for the control plane, except what is there and sound.

    `addresses` are the API server's.
    """
    paths = Files(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not exists(folder):
        _write(paths.authority, paths.authority_key, _authority())
    wanted: list[tuple[Path, Path, Callable[[], Pair]]] = [
        (
            paths.server_certificate,
            paths.server_key,
            lambda: _server(paths, "kube-apiserver", _SERVER_NAMES, addresses),
        ),
        (
            paths.kubelet_client_certificate,
            paths.kubelet_client_key,
            lambda: client(folder, "kube-apiserver-kubelet-client", ["system:masters"]),
        ),
        (
            paths.etcd_certificate,
            paths.etcd_key,
            lambda: _server(paths, "etcd", ["localhost"], ["127.0.0.1"]),
        ),
        (
            paths.etcd_client_certificate,
            paths.etcd_client_key,
            lambda: client(folder, "kube-apiserver-etcd-client", []),
        ),
    ]
    for certificate, key, make in wanted:
        if not _is_sound(certificate, key, paths.authority):
            _write(certificate, key, make())
    if _key(paths.accounts_key) is None:
        made = ec.generate_private_key(ec.SECP256R1())
        files.write(paths.accounts_key, _pem_key(made), mode=0o600)


def client(folder: Path, user: str, groups: Sequence[str]) -> Pair:
    """Sign a client certificate for a user and the groups that it is in."""
    return _signed(Files(folder), user, groups, [ExtendedKeyUsageOID.CLIENT_AUTH], [])


def bundle(folder: Path) -> bytes:
    """Return the authority's certificate, in PEM."""
    return Files(folder).authority.read_bytes()


def base64(content: bytes) -> str:
    """Encode bytes as a kubeconfig has them."""
    return encoding.b64encode(content).decode()


def _authority() -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "the lab's authority")])
    certificate = (
        _builder(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Pair(_pem(certificate), _pem_key(key))


def _server(paths: Files, user: str, names: Sequence[str], addresses: Sequence[str]) -> Pair:
    """Sign a server's certificate; etcd shows its own to itself, as a client."""
    alternatives = [
        *(x509.DNSName(one) for one in names),
        *(x509.IPAddress(ipaddress.ip_address(one)) for one in addresses),
    ]
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return _signed(paths, user, [], usages, alternatives)


def _is_sound(certificate: Path, key: Path, authority: Path) -> bool:
    """Tell whether certificate and key are there, belong together and are the authority's."""
    held = _key(key)
    try:
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
        found.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.read_bytes()))
    except (FileNotFoundError, ValueError, InvalidSignature):
        return False
    return held is not None and held.public_key() == found.public_key()


def _key(path: Path) -> ec.EllipticCurvePrivateKey | None:
    """Read a private key; None where there is none, or it is damaged."""
    try:
        found = serialization.load_pem_private_key(path.read_bytes(), None)
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, ec.EllipticCurvePrivateKey) else None


def _signed(
    paths: Files,
    user: str,
    groups: Sequence[str],
    usages: Sequence[x509.ObjectIdentifier],
    alternatives: Sequence[x509.GeneralName],
) -> Pair:
    issuer_key = cast(
        ec.EllipticCurvePrivateKey,
        serialization.load_pem_private_key(paths.authority_key.read_bytes(), None),
    )
    issuer = x509.load_pem_x509_certificate(paths.authority.read_bytes())
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name(
        [
            *(x509.NameAttribute(NameOID.ORGANIZATION_NAME, one) for one in groups),
            x509.NameAttribute(NameOID.COMMON_NAME, user),
        ]
    )
    builder = _builder(subject, issuer.subject, key.public_key()).add_extension(
        x509.ExtendedKeyUsage(usages), critical=False
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
    files.write(key, pair.key, mode=0o600)
    files.write(certificate, pair.certificate)
