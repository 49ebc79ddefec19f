"""Nodes enrol by their pods' tokens; the API server in the test's process says whose they are."""

import asyncio
import datetime
import logging
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import api_server
import grpc
import pytest
import serving
from api_server import ApiServer, Object
from clustered import Loop
from cryptography import x509
from csi_client import Client
from fakes.host import FakeHost
from granted import Rights

from agent.core.ids import VolumeId
from agent.core.settings import Config
from agent.core.values import Address
from agent.csi.client import block
from agent.extras.controller import authority, deleted_nodes
from agent.extras.controller.authority import Authority, certificate_request, new_key
from agent.extras.controller.deleted_nodes import DeletedNodes
from agent.extras.controller.enrolment import Enrolment
from agent.extras.controller.process import ClusterController
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
    token: Token,
    says: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, port = enrolment
    api.tokens["very-secret"] = token
    with caplog.at_level(logging.DEBUG), pytest.raises(grpc.RpcError) as raised:
        enrol(api, port, "very-secret", request=certificate_request(new_key()))
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert says in str(raised.value.details())
    assert made.addresses == {}
    assert "very-secret" not in caplog.text


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
        ("GET", "/api/v1/pods"),
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
    api: Cluster, config: Config, server: access.Server, loop: Loop, fake: FakeHost, tmp_path: Path
) -> None:
    """From nothing but a token and the controllers' address, to a volume."""
    api.tokens["secret"] = Token()
    api.register("here")
    own = central(config, tmp_path)
    source = Enrolment(own, Objects(server), Lists(server), SPACE)
    controller = ClusterController(own, source)
    loop.run(controller.start())
    directory = tmp_path / "enrolment"
    directory.mkdir()
    (directory / "token").write_text("secret\n")
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
        listener.stop()
    loop.run(controller.stop())


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
