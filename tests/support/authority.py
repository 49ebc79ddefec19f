"""A certificate authority for tests, as cert-manager would be one."""

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_PEM = serialization.Encoding.PEM


class Authority:
    """Signs certificates, which last for a day."""

    def __init__(self, name: str = "test authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        made = self._builder(self._name, self._key).add_extension(constraints, critical=True)
        self.certificate = made.sign(self._key, hashes.SHA256()).public_bytes(_PEM)

    def write(self, directory: Path, dns_name: str, *also: "Authority") -> Path:
        """Write ca.crt, tls.crt and tls.key for a name into a directory, which is made.

        Those of other authorities are trusted, too.
        """
        directory.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.DNSName(dns_name)])
        made = self._builder(x509.Name([]), key).add_extension(names, critical=True)
        private = key.private_bytes(
            _PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        trusted = b"".join(one.certificate for one in (self, *also))
        (directory / "ca.crt").write_bytes(trusted)
        (directory / "tls.crt").write_bytes(
            made.sign(self._key, hashes.SHA256()).public_bytes(_PEM)
        )
        (directory / "tls.key").write_bytes(private)
        return directory

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )
