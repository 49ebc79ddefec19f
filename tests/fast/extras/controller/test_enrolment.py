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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import api_server
import grpc
import pytest
import serving
from api_server import ApiServer, Object
from authority import Authority as Issuer
from clustered import Loop, require_only_tls_1_3
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import NameOID
from csi_client import Client
from fakes.host import FakeHost
from granted import Rights

from agent.core import errors
from agent.core.ids import VolumeId
from agent.core.settings import Config
from agent.core.values import Address
from agent.csi.client import block
from agent.extras.controller import authority, deleted_nodes
from agent.extras.controller.authority import Authority, certificate_request, key_as_pem, new_key
from agent.extras.controller.deleted_nodes import DeletedNodes
from agent.extras.controller.enrolling import Enroller, NotEnrolled
from agent.extras.controller.enrolment import Enrolment
from agent.extras.controller.process import ClusterController
from agent.extras.controller.service import NotListening
from agent.extras.kubernetes import access
from agent.extras.kubernetes.objects import Lists, Objects
from proto import carver_pb2 as carver
from proto import carver_pb2_grpc

SPACE = "storage"
SECRET = f"/api/v1/namespaces/{SPACE}/secrets/carver-controller"
MAP = f"/api/v1/namespaces/{SPACE}/configmaps/carver-controller"
CSI_NODES = "/apis/storage.k8s.io/v1/csinodes"
ACCOUNT = f"system:serviceaccount:{SPACE}:carver-node"
AUDIENCE = "controller.lvm.csi.carver"


@dataclass
class Token:
    """What the API server says of a token."""

    node: str = "here"
    account: str = ACCOUNT
    audience: str = AUDIENCE
    pod: str = "pod-1"
    uid: str = "uid-1"
    # Where the pod is by its own object; None: it is gone.
    is_on: str | None = "here"


class Cluster(ApiServer):
    """An API server with single objects, tokens and CSINodes, and the chart's rights."""

    def __init__(self) -> None:
        super().__init__()
        self.rights = Rights()
        self.single: dict[str, Object] = {}
        self.tokens: dict[str, Token] = {}
        self.reviews = 0
        self.objects[CSI_NODES] = []

    def collection(self, path: str) -> tuple[str, list[Object]] | None:
        if path == CSI_NODES:
            return "CSINodeList", self.objects[CSI_NODES]
        return super().collection(path)

    def register(self, *nodes: str) -> None:
        """Have kubelet register the driver on these nodes, and on no others."""
        self.objects[CSI_NODES].clear()
        for one in nodes:
            self.add(CSI_NODES, one, spec={"drivers": [{"name": "lvm.csi.carver"}]})

    def answer(self, path: str, query: Any) -> tuple[int, Object]:
        if not self.rights.allow("GET", path):
            return 403, {"kind": "Status", "message": f"the chart does not allow GET {path}"}
        if "/pods/" in path:
            name = path.rpartition("/")[2]
            for one in self.tokens.values():
                if one.pod == name and one.is_on is not None:
                    about = {"name": name, "uid": one.uid}
                    return 200, {
                        "kind": "Pod",
                        "metadata": about,
                        "spec": {"nodeName": one.is_on},
                    }
        if path in self.single:
            return 200, self.single[path]
        for volume in self.objects[api_server.VOLUMES]:
            if path == f"{api_server.VOLUMES}/{volume['metadata']['name']}":
                return 200, {"kind": "PersistentVolume", **volume}
        if "/namespaces/" in path or path.startswith(f"{api_server.VOLUMES}/"):
            return 404, {"kind": "Status", "reason": "NotFound"}
        return super().answer(path, query)

    def write(self, method: str, path: str, body: Object) -> tuple[int, Object]:
        if not self.rights.allow(method, path):
            return 403, {"kind": "Status", "message": f"the chart does not allow {method} {path}"}
        if path.endswith("/tokenreviews"):
            return 201, self._review(body["spec"])
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            if path in self.single:
                return 409, {"kind": "Status", "message": "it exists"}
            self._store(path, body)
            return 201, body
        known = self.single[path]
        if body["metadata"]["resourceVersion"] != known["metadata"]["resourceVersion"]:
            return 409, {"kind": "Status", "message": "it was changed"}
        data = {**known["data"], **body["data"]}
        kept = {key: value for key, value in data.items() if value is not None}
        self._store(path, {**known, "data": kept})
        return 200, self.single[path]

    def _store(self, path: str, body: Object) -> None:
        self.version += 1
        about = {**body["metadata"], "uid": path, "resourceVersion": str(self.version)}
        self.single[path] = {**body, "metadata": about}

    def _review(self, asked: Object) -> Object:
        self.reviews += 1
        known = self.tokens.get(asked["token"])
        if known is None or known.audience not in asked["audiences"]:
            return {"kind": "TokenReview", "status": {"authenticated": False}}
        extra = {
            "authentication.kubernetes.io/pod-name": [known.pod],
            "authentication.kubernetes.io/pod-uid": [known.uid],
            "authentication.kubernetes.io/node-name": [known.node],
        }
        user = {"username": known.account, "extra": {k: v for k, v in extra.items() if v != [""]}}
        status = {"authenticated": True, "audiences": [known.audience], "user": user}
        return {"kind": "TokenReview", "status": status}


@pytest.fixture
def api() -> Iterator[Cluster]:
    with api_server.running(Cluster()) as made:
        yield made


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.stop()


@pytest.fixture
def server(api: Cluster, tmp_path: Path) -> access.Server:
    return access.of_file(api_server.kubeconfig(tmp_path / "kubeconfig", api.url))


@pytest.fixture
def enrolment(
    config: Config, server: access.Server, loop: Loop, tmp_path: Path
) -> Iterator[tuple[Enrolment, int]]:
    """A controller's, serving; and its port."""
    own = replace(config, enrolment_address=Address("127.0.0.1", 0))
    made = Enrolment(own, Objects(server), Lists(server), SPACE)
    loop.run(made.start())
    yield made, made.port
    loop.run(made.stop())


def free_port() -> int:
    """A port that nothing has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def enrol(
    api: Cluster, port: int, token: str, address: str = "10.0.0.1:9810", request: bytes = b""
) -> carver.EnrolResponse:
    """As a node does."""
    trusted = api.single[MAP]["data"]["ca.crt"].encode()
    options = (("grpc.ssl_target_name_override", AUDIENCE),)
    credentials = grpc.ssl_channel_credentials(trusted)
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        wanted = carver.EnrolRequest(token=token, address=address, certificate_request=request)
        return carver_pb2_grpc.EnrolmentStub(channel).Enrol(wanted, timeout=10)


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
    assert made.addresses == {"here": "10.0.0.1:9810"}
    assert enrol(api, port, "secret", address="10.0.0.2:9810").certificate == b""
    assert made.addresses == {"here": "10.0.0.2:9810"}
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
    assert made.addresses == {}
    assert "very-secret" not in caplog.text
    assert caplog.text.count("a node was not enrolled") == 1


def test_without_the_node_in_the_token_its_pod_says_which(
    api: Cluster, enrolment: tuple[Enrolment, int]
) -> None:
    """As before Kubernetes 1.32."""
    made, port = enrolment
    api.tokens["secret"] = Token(node="")
    enrol(api, port, "secret")
    assert list(made.addresses) == ["here"]


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
    assert made.addresses == {}


def test_registered_nodes_that_have_not_enrolled_are_known_by_name(
    api: Cluster, enrolment: tuple[Enrolment, int], loop: Loop
) -> None:
    made, port = enrolment
    api.tokens["secret"] = Token()
    enrol(api, port, "secret")
    api.register("here", "there")
    made._listed = 0.0
    loop.run(made.look())
    assert made.addresses == {"here": "10.0.0.1:9810", "there": ""}
    # Its Node was deleted, and its CSINode with it.
    api.register("there")
    made._listed, made._seen["here"] = 0.0, -1000.0
    loop.run(made.look())
    assert made.addresses == {"there": ""}


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
    assert sorted(again) == sorted(both)
    assert signer in both
    assert signer != first
    after_end, _ = after(366)
    assert after_end == signer
    # After years without a controller.
    last, signer = after(5000)
    assert last == signer


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
    api.register("here")
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
        service.inventory.state()
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


GROUP = "data@abcdefgh"


def central(config: Config, tmp_path: Path, **more: Any) -> Config:
    """The settings of a controller."""
    return replace(
        config,
        endpoint=tmp_path / "controller.sock",
        enrolment_address=Address("127.0.0.1", 0),
        **more,
    )


def add_volume(api: Cluster, name: str, node: str) -> str:
    """A PersistentVolume of a node's group; its id."""
    identity = f"{GROUP}/vol-{name}"
    place = {"key": "topology.lvm.csi.carver/node", "operator": "In", "values": [node]}
    terms = [{"matchExpressions": [place]}]
    spec = {
        "csi": {"driver": "lvm.csi.carver", "volumeHandle": identity},
        "nodeAffinity": {"required": {"nodeSelectorTerms": terms}},
    }
    api.add(api_server.VOLUMES, name, spec=spec)
    return identity


@pytest.mark.parametrize("forget", [True, False])
def test_what_was_on_a_deleted_node_is_forgotten_after_a_grace(
    api: Cluster,
    config: Config,
    server: access.Server,
    loop: Loop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    forget: bool,
) -> None:
    own = central(config, tmp_path, forget_deleted_nodes=forget)
    source = Enrolment(own, Objects(server), Lists(server), SPACE)
    controller = ClusterController(own, source)
    loop.run(controller.start())
    volume = add_volume(api, "pvc-1", "gone")
    kept = f"{GROUP}/snap-snapshot-1"
    api.add(api_server.NODES, "gone")
    api.add(api_server.NODES, "here")

    def delete(client: Client) -> str:
        """Delete the volume and a snapshot of it; what was said if they were refused."""
        try:
            client.delete_snapshot(kept)
            client.delete(volume)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
        return ""

    monkeypatch.setattr(deleted_nodes, "_LIST_SECONDS", 0.0)
    with Client(own.endpoint) as client:
        nobody = "no node that answers has volume group data"
        assert nobody in delete(client)
        api.objects[api_server.NODES].pop(0)
        if not forget:
            assert nobody in delete(client)
        else:
            assert "node gone was deleted" in delete(client)
            # It came back, and is deleted again.
            api.add(api_server.NODES, "gone")
            assert nobody in delete(client)
            api.objects[api_server.NODES].pop()
            assert "is believed in 600 s" in delete(client)
            assert source.deleted_nodes is not None
            source.deleted_nodes._since["gone"] -= 601
            assert delete(client) == ""
            # Nothing else is answered for it.
            with pytest.raises(grpc.RpcError) as raised:
                client.volume(volume)
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
            api.lie(api_server.NODES, *[api_server.status(500)] * 3)
            said = delete(client)
            assert said.startswith("UNAVAILABLE: ")
            assert "the API server does not answer" in said
    loop.run(controller.stop())


def test_of_a_group_that_no_object_names_nothing_is_forgotten(
    api: Cluster, server: access.Server
) -> None:
    known = DeletedNodes(Objects(server), Lists(server), "lvm.csi.carver", 0)
    identity = VolumeId("data", "abcdefgh", "vol-pvc-1")
    assert known.of(identity) is None
    add_volume(api, "pvc-2", "gone")
    api.objects[api_server.VOLUMES][0]["spec"]["csi"]["driver"] = "another"
    assert known.of(identity) is None
    api.objects[api_server.VOLUMES][0]["spec"]["csi"]["driver"] = "lvm.csi.carver"
    assert known.of(identity) == ("gone", 0.0)


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
    assert list(made.addresses) == ["here"]


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
    monkeypatch.setattr(made, "_proved", lambda _review: "there")

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
        assert await made._node_of("good", Caller("10.0.0.1")) == "there"
        answers.set()
        # What came late is known by the next call, which asks nobody.
        while made._reviewing:
            await asyncio.sleep(0.01)
        assert await made._node_of("nonsense-0", Caller("10.0.0.9")) == "there"
        assert asked == ["nonsense-0", "good"]

    loop.run(test())
    loop.run(made.stop())


def test_the_controller_s_own_certificate_is_renewed_while_the_api_server_refuses(
    api: Cluster, enrolment: tuple[Enrolment, int], loop: Loop
) -> None:
    made, port = enrolment
    before = made.certificates
    made._own_made = made._refreshed = made._listed = -1e6
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


def test_a_node_that_was_named_anew_for_carver_is_not_taken_for_a_deleted_one(
    api: Cluster, server: access.Server
) -> None:
    """Its Node has that name in the label that kubelet made, not as its own."""
    known = DeletedNodes(Objects(server), Lists(server), "lvm.csi.carver", 0)
    add_volume(api, "pvc-1", "renamed")
    labels = {"topology.lvm.csi.carver/node": "renamed"}
    api.add(api_server.NODES, "machine-7", metadata={"labels": labels})
    assert known.of(VolumeId("data", "abcdefgh", "vol-pvc-1")) is None
