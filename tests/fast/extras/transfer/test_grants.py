"""Grants: who may read which volume, for how long, and that no byte of a grant may differ."""

import datetime
from collections.abc import Callable
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from agent.core import errors
from agent.extras.tls.certificates import Certificates, controller_name, node_name
from agent.extras.transfer import grants
from proto import carver_pb2 as carver

DRIVER = "local.carver.example"
VOLUME = "data@aaaaaaaa/vol-db"
NOW = datetime.datetime(2026, 11, 30, tzinfo=datetime.UTC)
SECONDS = NOW.timestamp()
DAY = datetime.timedelta(days=1)
_PEM = serialization.Encoding.PEM


class Issuer:
    """An authority, or an intermediate one that another issued."""

    def __init__(
        self,
        name: str,
        by: "Issuer | None" = None,
        *,
        ends: datetime.datetime = NOW + 30 * DAY,
        is_authority: bool = True,
        path_length: int | None = None,
        critical: bool = False,
    ) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        signer = by or self
        builder = (
            x509.CertificateBuilder()
            .subject_name(self.name)
            .issuer_name(signer.name)
            .public_key(self.key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - 60 * DAY)
            .not_valid_after(ends)
            .add_extension(
                x509.BasicConstraints(ca=is_authority, path_length=path_length), critical=True
            )
        )
        if critical:
            dns = x509.DNSName("elsewhere.example")
            constraints = x509.NameConstraints([dns], None)
            builder = builder.add_extension(constraints, critical=True)
        self.certificate = builder.sign(signer.key, hashes.SHA256()).public_bytes(_PEM)

    def issue(
        self,
        dns_name: str,
        key: Any = None,
        *,
        begins: datetime.datetime = NOW - DAY,
        ends: datetime.datetime = NOW + DAY,
        above: bytes = b"",
        trusted: bytes = b"",
    ) -> Certificates:
        """A certificate and its key; `above` are intermediate certificates behind it."""
        own_key: Any = key or ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.DNSName(dns_name)])
        made = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self.name)
            .public_key(own_key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begins)
            .not_valid_after(ends)
            .add_extension(names, critical=True)
            .sign(self.key, hashes.SHA256())
        )
        private = own_key.private_bytes(
            _PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return Certificates(trusted or self.certificate, made.public_bytes(_PEM) + above, private)


AUTHORITY = Issuer("authority")
CONTROLLER = AUTHORITY.issue(controller_name(DRIVER))
OWN = AUTHORITY.issue(node_name("a", DRIVER))


def made(
    controller: Certificates = CONTROLLER, driver: str = DRIVER, at: float = SECONDS
) -> carver.Grant:
    return grants.new(controller, driver, VOLUME, "a", "b", lambda: at)


def check(
    grant: carver.Grant, own: Certificates = OWN, node: str = "a", at: float = SECONDS
) -> grants.Grant:
    return grants.checked(grant, own, DRIVER, node, lambda: at)


def test_a_grant_says_who_may_read_what() -> None:
    found = check(made())
    assert (found.volume_id, found.source, found.target) == (VOLUME, "a", "b")
    assert found.not_after - found.not_before == grants.LONGEST_SECONDS


@pytest.mark.parametrize("kind", ["rsa", "ed25519", "p384"])
def test_keys_of_other_kinds_sign_grants(kind: str) -> None:
    make: dict[str, Callable[[], Any]] = {
        "rsa": lambda: rsa.generate_private_key(65537, 2048),
        "ed25519": ed25519.Ed25519PrivateKey.generate,
        "p384": lambda: ec.generate_private_key(ec.SECP384R1()),
    }
    key = make[kind]()
    grant = made(AUTHORITY.issue(controller_name(DRIVER), key))
    assert check(grant).volume_id == VOLUME
    changed = bytearray(grant.signature)
    changed[-1] ^= 1
    with pytest.raises(errors.NotGranted, match="signature"):
        check(carver.Grant(**{**fields(grant), "signature": bytes(changed)}))


def fields(grant: carver.Grant) -> dict[str, Any]:
    return {
        "text": grant.text,
        "signature": grant.signature,
        "certificates": list(grant.certificates),
    }


def by_intermediate(**given: Any) -> carver.Grant:
    between = Issuer("intermediate", AUTHORITY, **given)
    return made(between.issue(controller_name(DRIVER), above=between.certificate))


def test_an_authority_between_may_have_issued_the_certificate() -> None:
    assert check(by_intermediate()).volume_id == VOLUME


def resigned(text: bytes) -> carver.Grant:
    """Another text, signed by the controller as well."""
    grant = made()
    return carver.Grant(
        text=text,
        signature=grants._sign(CONTROLLER.key, text),
        certificates=grant.certificates,
    )


LAPSED = Issuer("lapsed", ends=NOW - DAY)
SHALLOW = Issuer("shallow", path_length=0)
BELOW = Issuer("below", SHALLOW)
STRANGER = Issuer("authority")

REFUSED: dict[str, tuple[str, Callable[[], object]]] = {
    "none": ("no grant", lambda: check(carver.Grant())),
    "another node's volume": ("of node 'a'", lambda: check(made(), node="c")),
    "expired": ("not valid at this time", lambda: check(made(), at=SECONDS + 3301)),
    "not yet valid": ("not valid at this time", lambda: check(made(), at=SECONDS - 301)),
    "too long": (
        "longer than",
        lambda: check(resigned(made().text.replace(b'"not_before":', b'"not_before":-'))),
    ),
    "another driver": ("for the driver", lambda: check(made(driver="other"))),
    "a node's key": (
        "signed by b.node",
        lambda: check(made(AUTHORITY.issue(node_name("b", DRIVER)))),
    ),
    "another driver's controller": (
        "signed by controller.other",
        lambda: check(made(AUTHORITY.issue(controller_name("other")))),
    ),
    "an unknown authority of that name": (
        "no trusted authority|another authority",
        lambda: check(made(STRANGER.issue(controller_name(DRIVER)))),
    ),
    "a lapsed authority": (
        "not valid now",
        lambda: check(
            made(LAPSED.issue(controller_name(DRIVER))),
            own=AUTHORITY.issue(node_name("a", DRIVER), trusted=LAPSED.certificate),
        ),
    ),
    "a lapsed certificate": (
        "not valid now",
        lambda: check(made(AUTHORITY.issue(controller_name(DRIVER), ends=NOW - DAY / 2))),
    ),
    "a certificate that is not yet valid": (
        "not valid now",
        lambda: check(made(AUTHORITY.issue(controller_name(DRIVER), begins=NOW + DAY / 2))),
    ),
    "a certificate that a node's one issued": (
        "not an authority's",
        lambda: check(by_intermediate(is_authority=False)),
    ),
    "an authority below one that allows none": (
        "not an authority's",
        lambda: check(
            made(BELOW.issue(controller_name(DRIVER), above=BELOW.certificate)),
            own=SHALLOW.issue(node_name("a", DRIVER)),
        ),
    ),
    "an authority with a limit that is not understood": (
        "has the extension",
        lambda: check(by_intermediate(critical=True)),
    ),
    "another key": (
        "signature",
        lambda: check(
            carver.Grant(
                **{
                    **fields(made()),
                    "signature": grants._sign(OWN.key, made().text),
                }
            )
        ),
    ),
    "a text of another form": ("written otherwise", lambda: check(resigned(made().text + b" "))),
    "a text of another kind": (
        "written otherwise",
        lambda: check(resigned(made().text.replace(b"grant 1", b"grant 2"))),
    ),
    "a field of another type": (
        "wrong type",
        lambda: check(resigned(made().text.replace(b'"source":"a"', b'"source":1'))),
    ),
    "a field too many": (
        "unexpected",
        lambda: check(resigned(made().text.replace(b'"source"', b'"more":1,"source"'))),
    ),
    "no table": ("no table", lambda: check(resigned(b"[]"))),
    "no JSON": ("not valid", lambda: check(resigned(b"\xff"))),
    "deep": ("not valid", lambda: check(resigned(b"[" * 4000))),
    "long": ("too long", lambda: check(resigned(b" " * 5000))),
    "many certificates": (
        "too long",
        lambda: check(
            carver.Grant(**{**fields(made()), "certificates": list(made().certificates) * 5})
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_grant_is_refused(name: str) -> None:
    why, use = REFUSED[name]
    with pytest.raises(errors.NotGranted, match=why):
        use()


GRANTS = (made(), by_intermediate())


@given(st.sampled_from(GRANTS), st.data())
def test_whatever_byte_is_altered_a_grant_is_refused(
    grant: carver.Grant, data: st.DataObject
) -> None:
    wire = bytearray(grant.SerializeToString())
    at = data.draw(st.integers(0, len(wire) - 1))
    wire[at] ^= data.draw(st.integers(1, 255))
    require_refused(bytes(wire), grant)


@given(st.sampled_from(GRANTS), st.data())
def test_a_truncated_or_longer_grant_is_refused(grant: carver.Grant, data: st.DataObject) -> None:
    found = fields(grant)
    name = data.draw(st.sampled_from(["text", "signature", "certificate"]))
    value = found["certificates"][0] if name == "certificate" else found[name]
    cut = data.draw(st.integers(0, len(value) - 1))
    changed = data.draw(st.sampled_from([value[:cut], value[cut + 1 :], value + b"\0", value * 2]))
    if name == "certificate":
        found["certificates"][0] = changed
    else:
        found[name] = changed
    if changed != value:
        require_refused(carver.Grant(**found).SerializeToString(), grant)


def require_refused(wire: bytes, grant: carver.Grant) -> None:
    """No message of other bytes passes, unless it says the same."""
    try:
        changed = carver.Grant.FromString(wire)
    except Exception:
        return
    changed.DiscardUnknownFields()
    if changed == grant:
        return
    with pytest.raises(errors.NotGranted):
        check(changed)


@given(st.sampled_from(GRANTS), st.integers(0), st.integers(1, 255))
def test_no_other_signature_or_certificate_fits(grant: carver.Grant, at: int, change: int) -> None:
    for name in ("signature", "certificates"):
        found = fields(grant)
        parts = [found[name]] if name == "signature" else found[name]
        for number, part in enumerate(parts):
            altered = bytearray(part)
            altered[at % len(part)] ^= change
            more = fields(grant)
            if name == "signature":
                more[name] = bytes(altered)
            else:
                more[name][number] = bytes(altered)
            with pytest.raises(errors.NotGranted):
                check(carver.Grant(**more))
