"""Nodes enrol by their pods' tokens; the API server in the test's process says whose they are."""

import asyncio
import datetime
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import api_server
import grpc
import pytest
import serving
from api_server import Object
from authority import Authority as Issuer
from clustered import Loop, require_only_tls_1_3
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import NameOID
from csi_client import Client
from enrolled import (
    AUDIENCE,
    MAP,
    SECRET,
    SPACE,
    Cluster,
    Token,
    addresses,
    central,
    enrol,
    free_port,
)
from fakes.host import FakeHost
from granted import Rights
from hypothesis import given
from hypothesis import strategies as st

from agent.core import errors
from agent.csi.client import block
from agent.extras.controller import authority
from agent.extras.controller import enrolment as enrolment_module
from agent.extras.controller.authority import Authority, certificate_request, key_as_pem, new_key
from agent.extras.controller.controller_process import ClusterController
from agent.extras.controller.controller_service import NotListening
from agent.extras.controller.enrolling import Enroller, NotEnrolled
from agent.extras.controller.enrolment import Enrolment
from agent.extras.kubernetes import access
from agent.extras.kubernetes.objects import Lists, Objects
from agent.settings.settings import Config
from agent.settings.values import Address


@pytest.fixture
def enrolment(
    api: Cluster, config: Config, server: access.Server, loop: Loop, tmp_path: Path
) -> Iterator[tuple[Enrolment, int]]:
    """A controller's, serving; and its port."""
    api.join("here")
    own = replace(config, enrolment_address=Address("127.0.0.1", 0))
    made = Enrolment(own, Objects(server), Lists(server), SPACE)
    loop.run(made.start())
    yield made, made.port
    loop.run(made.stop())


def of_a_key_that_is_not_known() -> bytes:
    """A signing request for a curve that cryptography does not have."""
    good = certificate_request(new_key())
    # 1.2.840.10045.3.1.7 is secp256r1.
    curve = bytes.fromhex("06082a8648ce3d030107")
    assert good.count(curve) == 1
    return good.replace(curve, curve[:-1] + b"\x63")


def test_a_node_is_named_as_the_node_of_its_pod(
    api: Cluster, enrolment: tuple[Enrolment, int]
) -> None:
    made, port = enrolment
    api.tokens["secret"] = Token()
    answer = enrol(api, port, "secret", request=certificate_request(new_key()))
    certificate = x509.load_pem_x509_certificate(answer.certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["here.node.lvm.csi.carver"]
    assert addresses(made) == {"here": "10.0.0.1:9810"}
    assert enrol(api, port, "secret", address="10.0.0.2:9810").certificate == b""
    assert addresses(made) == {"here": "10.0.0.2:9810"}
    # Asked once, though it enrolled twice.
    assert api.reviews == 1


@pytest.mark.parametrize(
    ("token", "says"),
    [
        # Expired, or of another cluster.
        (None, f"is not one for {AUDIENCE}"),
        (Token(account="system:serviceaccount:storage:tenant"), "not system:serviceaccount"),
        (Token(account="system:serviceaccount:tenant:carver-node"), "not system:serviceaccount"),
        (Token(audience="https://kubernetes.default.svc"), f"is not one for {AUDIENCE}"),
        (Token(pod=""), "is not bound to a pod"),
        (Token(is_on=None), "is gone"),
        (Token(is_on="there"), "is bound to node here, its pod is on there"),
    ],
)
def test_a_token_that_proves_no_node_is_refused(
    api: Cluster,
    enrolment: tuple[Enrolment, int],
    token: Token | None,
    says: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, port = enrolment
    if token is not None:
        api.tokens["very-secret"] = token
    for _ in range(3):
        with caplog.at_level(logging.DEBUG), pytest.raises(grpc.RpcError) as raised:
            enrol(api, port, "very-secret", request=certificate_request(new_key()))
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert says in str(raised.value.details())
    assert addresses(made) == {"here": ""}
    assert "very-secret" not in caplog.text
    assert caplog.text.count("a node was not enrolled") == 1


def test_without_the_node_in_the_token_its_pod_says_which(
    api: Cluster, enrolment: tuple[Enrolment, int]
) -> None:
    """As before Kubernetes 1.32."""
    made, port = enrolment
    api.tokens["secret"] = Token(node="")
    enrol(api, port, "secret")
    assert list(addresses(made)) == ["here"]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("address", {"address": "nonsense"}),
        ("address", {"address": ""}),
        ("certificate_request", {"request": b"nonsense"}),
        ("certificate_request", {"request": of_a_key_that_is_not_known()}),
    ],
)
def test_a_bad_request_changes_nothing(
    api: Cluster, enrolment: tuple[Enrolment, int], field: str, values: dict[str, Any]
) -> None:
    made, port = enrolment
    api.tokens["secret"] = Token()
    with pytest.raises(grpc.RpcError) as raised:
        enrol(api, port, "secret", **values)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(raised.value.details()).startswith(f"{field}: ")
    assert addresses(made) == {"here": ""}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", f"/api/v1/namespaces/{SPACE}/secrets"),
        ("GET", f"/api/v1/namespaces/{SPACE}/secrets/another"),
        ("PATCH", f"/api/v1/namespaces/{SPACE}/configmaps/another"),
        ("DELETE", SECRET),
        ("GET", "/api/v1/secrets"),
        ("GET", "/api/v1/events"),
        ("GET", f"/api/v1/namespaces/{SPACE}/events/another"),
        ("DELETE", "/api/v1/pods/another"),
        ("POST", "/api/v1/nodes"),
        ("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews"),
    ],
)
def test_the_chart_s_rights_end_at_what_the_controller_asks(method: str, path: str) -> None:
    assert Rights().allow("GET", SECRET)
    assert not Rights().allow(method, path)


def test_two_controllers_have_one_authority(api: Cluster, server: access.Server) -> None:
    first, second = (Authority(Objects(server), SPACE, "carver-controller") for _ in range(2))
    first.refresh()
    second.refresh()
    assert first.bundle == second.bundle
    assert api.single[MAP]["data"]["ca.crt"].encode() == first.bundle
    # One that starts at the same moment sees no Secret, and cannot make it.
    third = Authority(Objects(server), SPACE, "carver-controller")
    gone = b'{"kind": "Status", "reason": "NotFound"}'
    api.lie(SECRET, lambda handler, _: handler.send(404, gone))
    third.refresh()
    assert third.bundle == first.bundle
    # What the ConfigMap says is put right.
    api.single[MAP]["data"] = {"ca.crt": "a thief's"}
    second.refresh()
    assert api.single[MAP]["data"]["ca.crt"].encode() == first.bundle


def test_an_authority_is_followed_by_one_that_is_published_first(
    api: Cluster, server: access.Server
) -> None:
    made = Authority(Objects(server), SPACE, "carver-controller")
    begun = datetime.datetime.now(datetime.UTC)

    def after(days: float) -> tuple[bytes, bytes]:
        """What is trusted then, and who signs."""
        now = begun + datetime.timedelta(days=days)
        made.refresh(now)
        signed = made.sign("here", new_key().public_key(), now)
        issuer = x509.load_pem_x509_certificate(signed).issuer
        [signer] = [
            one.public_bytes(authority._PEM)
            for one in x509.load_pem_x509_certificates(made.bundle)
            if one.subject == issuer
        ]
        return made.bundle, signer

    first, signer = after(0)
    assert first == signer
    assert after(270) == (first, first)
    both, signer = after(276)
    assert len(both) > len(first)
    assert signer == first
    # From an hour later, and the old one is trusted until its end.
    again, signer = after(276.1)
    assert again == both
    assert signer in both
    assert signer != first
    assert after(366) == (both, signer)
    # After years without a controller.
    last, newest = after(5000)
    assert newest not in both
    assert last == b"".join(sorted((signer, newest)))


@given(
    st.lists(
        st.tuples(
            # By how many days one controller's clock is wrong, after so many days.
            st.sampled_from((0.1, 1, 5, 100, 300, 364, 366, 400, 5000, -0.1, -1, -400, -5000)),
            st.sampled_from((0, 0.01, 0.1, 1, 30, 200)),
        ),
        max_size=10,
    )
)
def test_a_clock_that_was_wrong_costs_the_cluster_no_authority(
    steps: list[tuple[float, float]],
) -> None:
    """Once a controller with a right clock looks, a valid one signs; the one before is trusted."""
    day, now = datetime.timedelta(days=1), datetime.datetime.now(datetime.UTC)
    made = authority._renewed({}, now)
    for error, days in steps:
        now += days * day
        made = authority._renewed(made, now)
        signer = made["current"]
        made = authority._renewed(made, now + error * day)
        made = authority._renewed(made, now)
        assert made["current"].is_valid(now)
        assert signer in made.values()
        made = authority._renewed(made, now)
        assert authority._renewed(made, now) == made


@pytest.mark.parametrize("hours", [1, 8, 13])
def test_what_a_controller_makes_whose_clock_is_ahead_is_valid_at_once(
    api: Cluster, server: access.Server, hours: int
) -> None:
    """As one whose hardware clock has local time, until NTP corrects it."""
    now = datetime.datetime.now(datetime.UTC)
    ahead = now + datetime.timedelta(hours=hours)
    made = Authority(Objects(server), SPACE, "carver-controller")
    made.refresh(ahead)
    first = made.bundle
    signed = made.sign("here", new_key().public_key(), ahead)
    made.refresh(now)
    assert made.bundle == first
    for one in (first, signed):
        assert x509.load_pem_x509_certificate(one).not_valid_before_utc <= now


def test_a_certificate_that_has_not_begun_is_replaced(
    api: Cluster, enrolment: tuple[Enrolment, int], config: Config, tmp_path: Path
) -> None:
    made, _ = enrolment
    node = Enroller(replace(config, enrolment_directory=tmp_path), "10.0.0.1:9810", lambda: None)
    (tmp_path / "ca.crt").write_bytes(made._authority.bundle)
    now = datetime.datetime.now(datetime.UTC)
    for days, needs in ((0, False), (2, True)):
        at = now + datetime.timedelta(days=days)
        signed = made._authority.sign("here", new_key().public_key(), at)
        node._own, node._renew_at = (signed, b""), float("inf")
        assert node._needs_certificate() is needs


def test_a_node_enrols_and_is_reached(
    api: Cluster,
    config: Config,
    server: access.Server,
    loop: Loop,
    fake: FakeHost,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From nothing but a token and the controllers' address, to a volume."""
    caplog.set_level(logging.DEBUG)
    api.tokens["kept-dark"] = Token()
    api.join("here")
    own = central(config, tmp_path)
    source = Enrolment(own, Objects(server), Lists(server), SPACE)
    controller = ClusterController(own, source)
    loop.run(controller.start())
    directory = tmp_path / "enrolment"
    directory.mkdir()
    (directory / "token").write_text("kept-dark\n")
    (directory / "ca.crt").write_text(api.single[MAP]["data"]["ca.crt"])
    port = free_port()
    node = replace(
        config,
        controllers=Address("127.0.0.1", source.port),
        controller_address=Address("127.0.0.1", port),
        advertised_host="127.0.0.1",
        enrolment_directory=directory,
    )
    with serving.served(fake, node) as (service, _), Client(own.endpoint) as client:
        service.reports.fresh()
        with pytest.raises(grpc.RpcError) as raised:
            client.volumes()
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "node here has not enrolled at this controller" in str(raised.value.details())
        listener: Any = service.extras["controller"]
        listener._enroller.task.run_once()
        loop.run(controller.look())

        async def asked() -> None:
            await asyncio.gather(*map(controller.nodes.ask, controller.nodes))

        loop.run(asked())
        # No PersistentVolume names its group, so its claim counts once they were read after it.
        with pytest.raises(grpc.RpcError) as raised:
            client.create("pvc-1", 4 << 20, block())
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "are being read" in str(raised.value.details())
        source.record._volumes_read -= 20
        loop.run(controller.look())
        volume = client.create("pvc-1", 4 << 20, block())
        assert [one.volume_id for one in client.volumes()] == [volume.volume_id]
        # The key of the node is renewed while it serves.
        listener._enroller._renew_at = 0.0
        listener._enroller.task.run_once()
        loop.run(asked())
        client.delete(volume.volume_id)
        # Its token expires, which the controller says.
        api.tokens.clear()
        source._reviewed.clear()
        listener._enroller.task.run_once()
        assert "this node has not enrolled" in caplog.text
        assert "UNAUTHENTICATED" in caplog.text
        listener.stop()
    loop.run(controller.stop())
    assert not [one for one in caplog.records if "kept-dark" in repr(vars(one))]


@pytest.mark.parametrize("what", ["lost", "restored", "followed"])
def test_nodes_are_reached_again_after_the_authority_was_replaced(
    api: Cluster,
    config: Config,
    server: access.Server,
    loop: Loop,
    fake: FakeHost,
    tmp_path: Path,
    what: str,
) -> None:
    """Its Secret was deleted, or is one from a backup; or all is as it should be, in a year."""
    api.tokens["t"] = Token()
    api.join("here")
    own = central(config, tmp_path)
    Authority(Objects(server), SPACE, "carver-controller").refresh()
    backup = api.single.pop(SECRET)
    source = Enrolment(own, Objects(server), Lists(server), SPACE)
    controller = ClusterController(own, source)
    loop.run(controller.start())
    directory = tmp_path / "enrolment"
    directory.mkdir()
    (directory / "token").write_text("t\n")
    bundle = directory / "ca.crt"
    bundle.write_text(api.single[MAP]["data"]["ca.crt"])
    node = replace(
        config,
        controllers=Address("127.0.0.1", source.port),
        controller_address=Address("127.0.0.1", free_port()),
        advertised_host="127.0.0.1",
        enrolment_directory=directory,
    )

    async def asked() -> None:
        await asyncio.gather(*map(controller.nodes.ask, controller.nodes))

    with serving.served(fake, node) as (service, _), Client(own.endpoint) as client:
        service.reports.fresh()
        listener: Any = service.extras["controller"]
        enroller = listener._enroller
        enroller.task.run_once()
        loop.run(controller.look())
        loop.run(asked())
        assert client.volumes() == []
        first = enroller._own
        # An enrolment while all is well brings no other certificate.
        enroller.task.run_once()
        assert enroller._own == first
        if what == "lost":
            del api.single[SECRET]
        elif what == "restored":
            api.single[SECRET] = backup
        else:
            data = {**api.single[SECRET]["data"]}
            known = {key.replace("current", "previous"): one for key, one in data.items()}
            api.single[SECRET]["data"] = {**backup["data"], **known}
        source._refreshed = -1e6
        loop.run(controller.look())
        # Kubelet brings the changed ConfigMap.
        bundle.write_text(api.single[MAP]["data"]["ca.crt"])
        enroller.task.run_once()
        assert enroller.task.failures == 0
        assert (enroller._own == first) is (what == "followed")

        async def reached() -> None:
            # The connection that was refused is tried again.
            async with asyncio.timeout(20):
                while True:
                    await asked()
                    if not any(one.problem for one in controller.nodes):
                        return
                    await asyncio.sleep(0.1)

        loop.run(reached())
        assert client.volumes() == []
        listener.stop()
    loop.run(controller.stop())


@pytest.mark.parametrize("text", ["", "nonsense", "-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_a_broken_bundle_ends_no_enrolment_for_good(
    api: Cluster,
    enrolment: tuple[Enrolment, int],
    config: Config,
    tmp_path: Path,
    text: str,
) -> None:
    _, port = enrolment
    api.tokens["secret"] = Token()
    (tmp_path / "token").write_text("secret\n")
    bundle = tmp_path / "ca.crt"
    bundle.write_text(api.single[MAP]["data"]["ca.crt"])
    own = replace(config, controllers=Address("127.0.0.1", port), enrolment_directory=tmp_path)
    made = Enroller(own, "10.0.0.1:9810", lambda: None)
    made.task.run_once()
    assert made.task.failures == 0
    good = bundle.read_text()
    bundle.write_text(text)
    made.task.run_once()
    assert made.task.failures == 1
    bundle.write_text(good)
    made.task.run_once()
    # It counts all failures, and there was no other.
    assert made.task.failures == 1


def test_a_token_counts_no_longer_once_another_came_for_its_node(
    api: Cluster, enrolment: tuple[Enrolment, int]
) -> None:
    """As of a machine that was taken out, and whose name another has now."""
    made, port = enrolment
    api.tokens["old"] = Token()
    enrol(api, port, "old", address="10.0.0.1:9810")
    del api.tokens["old"]
    # It was reviewed a moment ago.
    enrol(api, port, "old", address="10.0.0.1:9810")
    api.tokens["new"] = Token(pod="pod-2", uid="uid-2")
    enrol(api, port, "new", address="10.0.0.2:9810")
    with pytest.raises(grpc.RpcError) as raised:
        enrol(api, port, "old", address="10.0.0.1:9810")
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert addresses(made) == {"here": "10.0.0.2:9810"}


@pytest.mark.parametrize("is_made_again", [True, False])
def test_a_token_counts_no_longer_than_its_node(
    api: Cluster, enrolment: tuple[Enrolment, int], is_made_again: bool
) -> None:
    made, port = enrolment
    api.tokens["old"] = Token()
    enrol(api, port, "old")
    del api.tokens["old"]
    api.leave("here")
    if is_made_again:
        api.join("here")
    made.record._read_nodes()
    with pytest.raises(grpc.RpcError) as raised:
        enrol(api, port, "old")
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert addresses(made) == ({"here": ""} if is_made_again else {})


@pytest.mark.parametrize("is_made_again", [True, False])
def test_a_token_of_an_earlier_node_proves_none(
    api: Cluster, enrolment: tuple[Enrolment, int], is_made_again: bool
) -> None:
    """Its pod is there still, as the Node was made anew at once; no API server compares them."""
    made, port = enrolment
    before = api.uid_of("here")
    api.tokens["old"] = Token(node_uid=before)
    api.leave("here")
    if is_made_again:
        api.join("here")
    made.record._read_nodes()
    with pytest.raises(grpc.RpcError) as raised:
        enrol(api, port, "old", request=certificate_request(new_key()))
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
    says = "an earlier Node here" if is_made_again else "its node here has no Node object"
    assert says in str(raised.value.details())
    assert addresses(made) == ({"here": ""} if is_made_again else {})
    if is_made_again:
        # Kubelet renewed it.
        api.tokens["new"] = Token()
        enrol(api, port, "new")
        assert addresses(made) == {"here": "10.0.0.1:9810"}


@pytest.mark.parametrize("version", ["1.31", "1.32"])
def test_who_enrolled_as_an_earlier_node_is_not_called_as_the_next(
    api: Cluster, enrolment: tuple[Enrolment, int], version: str
) -> None:
    """Whether the Nodes were listed in between or not."""
    made, port = enrolment
    api.tokens["old"] = Token(node_uid="" if version == "1.31" else None)
    enrol(api, port, "old")
    assert addresses(made) == {"here": "10.0.0.1:9810"}
    del api.tokens["old"]
    api.leave("here")
    api.join("here")
    made.record._read_nodes()
    assert addresses(made) == {"here": ""}


def test_a_node_that_is_not_listed_yet_enrols_as_the_one_that_it_proved_to_be(
    api: Cluster, enrolment: tuple[Enrolment, int]
) -> None:
    made, port = enrolment
    api.join("there")
    api.tokens["t"] = Token("there", is_on="there")
    enrol(api, port, "t")
    assert addresses(made) == {"here": ""}
    # Meanwhile it was made anew: the list has another Node than it proved.
    api.leave("there")
    api.join("there")
    made.record._read_nodes()
    assert addresses(made) == {"here": "", "there": ""}


def test_a_node_gets_ten_certificates_at_once_and_then_one_in_ten_seconds(
    api: Cluster, enrolment: tuple[Enrolment, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a thief of its token. Other nodes get theirs, and enrolment goes on without."""
    made, port = enrolment
    now = [1000.0]
    monkeypatch.setattr(enrolment_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    api.join("there")
    api.tokens |= {"t": Token(), "its": Token("there", pod="pod-2", uid="uid-2", is_on="there")}
    request = certificate_request(new_key())
    signed = [0]
    sign = made._authority.sign

    def counted(*arguments: Any) -> bytes:
        signed[0] += 1
        return sign(*arguments)

    monkeypatch.setattr(made._authority, "sign", counted)

    def refused() -> str:
        with pytest.raises(grpc.RpcError) as raised:
            enrol(api, port, "t", request=request)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        return str(raised.value.details())

    for _ in range(10):
        assert enrol(api, port, "t", request=request).certificate
    for _ in range(20):
        assert "ask again in 10 s" in refused()
    assert signed == [10]
    assert enrol(api, port, "its", request=request).certificate
    assert not enrol(api, port, "t", address="10.0.0.3:9810").certificate
    assert addresses(made)["here"] == "10.0.0.3:9810"
    now[0] += 10
    assert enrol(api, port, "t", request=request).certificate
    refused()
    # What is kept of nodes has an end, too.
    now[0] += 1000
    monkeypatch.setattr(enrolment_module, "_MOST_REVIEWED", 2)
    assert enrol(api, port, "t", request=request).certificate
    assert len(made._signed) == 1


def test_a_node_that_enrols_at_another_address_each_time_fills_no_log(
    api: Cluster, enrolment: tuple[Enrolment, int], caplog: pytest.LogCaptureFixture
) -> None:
    """As a thief of its token may, thousands of times in a second."""
    caplog.set_level(logging.INFO)
    made, port = enrolment
    api.tokens["t"] = Token()
    for number in range(30):
        enrol(api, port, "t", address=f"10.0.0.{number}:9810")
    assert caplog.text.count("serves at") == 0
    assert addresses(made) == {"here": "10.0.0.29:9810"}
    with pytest.raises(grpc.RpcError) as raised:
        enrol(api, port, "t", address=f"{'a' * 254}:9810")
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_callers_that_are_no_nodes_fill_no_log(
    enrolment: tuple[Enrolment, int], loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    """Any two pods can ask in turn, each with what is no token."""
    made, _ = enrolment

    async def ask() -> None:
        for number in range(100):
            with pytest.raises(PermissionError, match="UNAUTHENTICATED"):
                await made._node_of(f"nonsense-{number}", Caller(f"10.0.0.{number % 2}"))

    loop.run(ask())
    assert caplog.text.count("a node was not enrolled") == 10


def test_a_signing_request_s_own_names_are_not_signed(
    api: Cluster, enrolment: tuple[Enrolment, int]
) -> None:
    _, port = enrolment
    api.tokens["secret"] = Token()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, AUDIENCE)])
    wanted = x509.SubjectAlternativeName([x509.DNSName(AUDIENCE), x509.DNSName("b.node.x")])
    constraints = x509.BasicConstraints(ca=True, path_length=None)
    asked = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(name)
        .add_extension(wanted, critical=True)
        .add_extension(constraints, critical=True)
        .sign(new_key(), hashes.SHA256())
    )
    request = asked.public_bytes(serialization.Encoding.DER)
    made = x509.load_pem_x509_certificate(enrol(api, port, "secret", request=request).certificate)
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [one.value for one in names] == ["here.node.lvm.csi.carver"]
    assert list(made.subject) == []
    assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_an_address_of_another_host_leads_nowhere(
    api: Cluster, config: Config, server: access.Server, loop: Loop, tmp_path: Path
) -> None:
    """Its calls come to the other host, which has no certificate for its name."""
    api.join("here", "there")
    api.tokens |= {"mine": Token(), "its": Token("there", pod="pod-2", uid="uid-2", is_on="there")}
    source = Enrolment(central(config, tmp_path), Objects(server), Lists(server), SPACE)
    controller = ClusterController(source._config, source)
    loop.run(controller.start())
    key = new_key()
    other = enrol(api, source.port, "its", request=certificate_request(key)).certificate
    bundle = api.single[MAP]["data"]["ca.crt"].encode()
    there = grpc.server(ThreadPoolExecutor(2))
    calls: list[str] = []

    class Noted(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> None:
            calls.append(details.method)

    there.add_generic_rpc_handlers((Noted(),))
    credentials = grpc.ssl_server_credentials([(key_as_pem(key), other)], bundle, True)
    address = f"127.0.0.1:{there.add_secure_port('127.0.0.1:0', credentials)}"
    there.start()

    async def asked() -> None:
        controller.take()
        await asyncio.gather(*map(controller.nodes.ask, controller.nodes))

    enrol(api, source.port, "mine", address=address)
    enrol(api, source.port, "its", address=address)
    loop.run(asked())
    # The other's own were answered, and only they.
    assert calls == ["/csi.v1.Identity/GetPluginInfo"]
    problems = {one.name: one.problem for one in controller.nodes}
    assert problems["here"].startswith("UNAVAILABLE")
    assert problems["there"].startswith("UNIMPLEMENTED")
    there.stop(None)
    loop.run(controller.stop())


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_enrolment_speaks_tls_1_3_only(
    api: Cluster, enrolment: tuple[Enrolment, int], newest: ssl.TLSVersion
) -> None:
    _, port = enrolment
    ours = ssl.create_default_context(cadata=api.single[MAP]["data"]["ca.crt"])
    require_only_tls_1_3(ours, newest, port, AUDIENCE)


def test_large_requests_and_slow_clients_hold_up_no_enrolment(
    api: Cluster, enrolment: tuple[Enrolment, int]
) -> None:
    made, port = enrolment
    api.tokens["secret"] = Token()
    with ExitStack() as ending:
        for number in range(200):
            one = ending.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            one.sendall(b"\x16\x03\x01\x02\x00\x01" if number % 2 else b"")
        with pytest.raises(grpc.RpcError) as raised:
            enrol(api, port, "x" * (1 << 20))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert api.reviews == 0
        enrol(api, port, "secret")
    assert list(addresses(made)) == ["here"]


def test_a_request_that_cannot_be_read_is_refused(
    api: Cluster, enrolment: tuple[Enrolment, int], caplog: pytest.LogCaptureFixture
) -> None:
    _, port = enrolment
    trusted = api.single[MAP]["data"]["ca.crt"].encode()
    options = (("grpc.ssl_target_name_override", AUDIENCE),)
    credentials = grpc.ssl_channel_credentials(trusted)
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        call: Any = channel.unary_unary("/carver.v2.Enrolment/Enrol")
        with pytest.raises(grpc.RpcError) as raised:
            call(b"\xff\xff", timeout=10)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Traceback" not in caplog.text


class Caller:
    """A call's context, as of one host."""

    def __init__(self, host: str) -> None:
        self._host = host

    def peer(self) -> str:
        return f"ipv4:{self._host}:40000"

    async def abort(self, code: grpc.StatusCode, problem: str) -> None:
        raise PermissionError(f"{code.name}: {problem}")


def test_a_host_that_sends_what_is_no_token_delays_no_other(
    config: Config, server: access.Server, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the API server takes its time for those."""
    made = Enrolment(config, Objects(server), Lists(server), SPACE)
    answers = threading.Event()
    asked: list[str] = []

    def review(_path: str, asked_for: Object) -> Object:
        token = asked_for["spec"]["token"]
        asked.append(token)
        if token.startswith("nonsense"):
            answers.wait(20)
        return {}

    monkeypatch.setattr(made._objects, "review", review)
    monkeypatch.setattr(made, "_proved", lambda _review: ("there", "uid-1"))
    monkeypatch.setattr(made.record, "uid_of", lambda _name: "uid-1")

    async def test() -> None:
        first = asyncio.create_task(made._node_of("nonsense-0", Caller("10.0.0.9")))
        while not asked:
            await asyncio.sleep(0.01)
        for number in range(100):
            with pytest.raises(PermissionError, match="RESOURCE_EXHAUSTED"):
                await made._node_of(f"nonsense-{number}", Caller("10.0.0.9"))
        # Also if its callers do not wait.
        first.cancel()
        await asyncio.sleep(0)
        with pytest.raises(PermissionError, match="RESOURCE_EXHAUSTED"):
            await made._node_of("nonsense-1", Caller("10.0.0.9"))
        assert (await made._node_of("good", Caller("10.0.0.1"))).node == "there"
        answers.set()
        # What came late is known by the next call, which asks nobody.
        while made._reviewing:
            await asyncio.sleep(0.01)
        assert (await made._node_of("nonsense-0", Caller("10.0.0.9"))).node == "there"
        assert asked == ["nonsense-0", "good"]

    loop.run(test())
    loop.run(made.stop())


def test_the_controller_s_own_certificate_is_renewed_while_the_api_server_refuses(
    api: Cluster, enrolment: tuple[Enrolment, int], loop: Loop
) -> None:
    made, port = enrolment
    before = made.certificates
    made._own_made = made._refreshed = -1e6
    api.lie(SECRET, *[api_server.status(500)] * 6)
    with pytest.raises(errors.ClusterRefused):
        loop.run(made.look())
    assert made.certificates.certificate != before.certificate
    assert made.certificates.authority == before.authority
    # It is what the next node sees.
    ours = ssl.create_default_context(cadata=before.authority.decode())
    ours.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        ours.wrap_socket(plain, server_hostname=AUDIENCE) as secured,
    ):
        seen = secured.getpeercert(binary_form=True)
    assert seen == ssl.PEM_cert_to_DER_cert(made.certificates.certificate.decode())


@pytest.mark.parametrize("days", [-400, -2, -0.8, 2, 400])
def test_a_controller_whose_clock_is_set_right_gets_another_certificate_at_once(
    api: Cluster, enrolment: tuple[Enrolment, int], loop: Loop, days: float
) -> None:
    """As one that starts before NTP has answered."""
    made, _ = enrolment
    at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    made.certificates = wrong = made._authority.own(made.audience, at)
    loop.run(made.look())
    assert made.certificates != wrong
    # One that is made now stays.
    right = made.certificates
    loop.run(made.look())
    assert made.certificates == right


def test_a_broken_secret_is_said_to_be_one(api: Cluster, server: access.Server) -> None:
    Authority(Objects(server), SPACE, "carver-controller").refresh()
    api.single[SECRET]["data"]["current.crt"] = "bm9uc2Vuc2U="
    with pytest.raises(errors.BadConfig, match=r"cannot be read: .*; delete it"):
        Authority(Objects(server), SPACE, "carver-controller").refresh()


def test_a_node_that_no_controller_takes_says_so_whatever_was_before(
    api: Cluster,
    enrolment: tuple[Enrolment, int],
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two controllers took it, and their pods were replaced by two that do not answer."""
    _, port = enrolment
    api.tokens["secret"] = Token()
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "ca.crt").write_text(api.single[MAP]["data"]["ca.crt"])
    begun: list[int] = []

    def begin() -> None:
        begun.append(1)
        if len(begun) == 1:
            raise NotEnrolled("the address is taken")

    own = replace(config, controllers=Address("controllers", port), enrolment_directory=tmp_path)
    made = Enroller(own, "10.0.0.1:9810", begin)
    now = [f"127.0.0.1:{port}", f"localhost:{port}"]
    monkeypatch.setattr(made, "_controllers", lambda: now)
    made.task.run_once()
    assert made.task.failures == 1
    # An address that is taken is tried again.
    made.task.run_once()
    made.task.run_once()
    assert (made.task.failures, len(begun)) == (1, 2)
    now[1] = f"127.0.0.1:{free_port()}"
    made.task.run_once()
    assert made.task.failures == 1
    now[0] = f"127.0.0.1:{free_port()}"
    made.task.run_once()
    assert made.task.failures == 2
    assert {one for one, _ in made._channels} == set(now)


def test_a_disk_that_hangs_delays_neither_listening_nor_enrolment(
    config: Config, fake: FakeHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer = Issuer()
    node = replace(
        config,
        controller_address=Address("127.0.0.1", 0),
        tls_directory=issuer.write(tmp_path / "tls", "here.node.lvm.csi.carver"),
    )
    with serving.served(fake, node) as (service, _):
        hangs, answers = threading.Event(), threading.Event()

        def scan() -> dict[str, Any]:
            hangs.set()
            answers.wait(20)
            return {}

        monkeypatch.setattr(service.volume_groups, "scan", scan)
        listener: Any = service.extras["controller"]
        listener.start()
        assert hangs.wait(10)
        until = time.monotonic() + 10
        while not listener.port and time.monotonic() < until:
            time.sleep(0.01)
        assert listener.port
        assert not answers.is_set()
        answers.set()
        listener.stop()


def test_an_address_that_is_taken_is_tried_again(
    config: Config, fake: FakeHost, tmp_path: Path
) -> None:
    issuer = Issuer()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        node = replace(
            config,
            controller_address=Address("127.0.0.1", taken.getsockname()[1]),
            tls_directory=issuer.write(tmp_path / "tls", "here.node.lvm.csi.carver"),
        )
        with serving.served(fake, node) as (service, _):
            listener: Any = service.extras["controller"]
            with pytest.raises(NotListening, match=r"127\.0\.0\.1"):
                listener.serve()
            taken.close()
            listener.serve()
            assert listener.port
            listener.stop()
