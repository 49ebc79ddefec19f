"""A cluster that nodes enrol in: an API server with tokens, Nodes and PersistentVolumes."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import api_server
import grpc
from api_server import ApiServer, Object
from granted import Rights

from agent.extras.controller.enrolment import Enrolment
from agent.extras.controller.membership import ClusterRecord
from agent.settings.settings import DRIVER_NAME, TOPOLOGY_KEY, Config
from agent.settings.values import Address
from proto import carver_pb2 as carver
from proto import carver_pb2_grpc

SPACE = "storage"
SECRET = f"/api/v1/namespaces/{SPACE}/secrets/carver-controller"
MAP = f"/api/v1/namespaces/{SPACE}/configmaps/carver-controller"
CONTENTS = "/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents"
ACCOUNT = f"system:serviceaccount:{SPACE}:carver-node"
AUDIENCE = "controller.lvm.csi.carver"
GROUP = "data@abcdefgh"
# A Node that never had Carver.
OTHER = "control-plane"


def addresses(source: Enrolment | ClusterRecord) -> Mapping[str, str]:
    """Where the members serve; an empty address for one that has not enrolled."""
    return {name: one.address for name, one in source.serving.items()}


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
    # The UID of the Node that it was made for: that of the one that is there, without another here;
    # empty before Kubernetes 1.32.
    node_uid: str | None = None


class Cluster(ApiServer):
    """An API server with single objects, tokens and Nodes, and the chart's rights."""

    def __init__(self) -> None:
        super().__init__()
        self.rights = Rights()
        self.single: dict[str, Object] = {}
        self.tokens: dict[str, Token] = {}
        self.reviews = 0
        self.objects[CONTENTS] = []
        # Each cluster has a Node, if only for this API server.
        self.add(api_server.NODES, OTHER)

    def collection(self, path: str) -> tuple[str, list[Object]] | None:
        if path == CONTENTS:
            return "VolumeSnapshotContentList", self.objects[CONTENTS]
        return super().collection(path)

    def join(self, *nodes: str) -> None:
        """Have a Node for each, with the label that kubelet gives it with the driver."""
        for one in nodes:
            self.add(api_server.NODES, one, metadata={"labels": {TOPOLOGY_KEY: one}})

    def leave(self, *nodes: str) -> None:
        """Have no Node of these names."""
        known = self.objects[api_server.NODES]
        known[:] = [one for one in known if one["metadata"]["name"] not in nodes]

    def uid_of(self, node: str) -> str:
        """The UID of the Node of a name; empty where there is none."""
        uids = {one["metadata"]["name"]: one["metadata"] for one in self.objects[api_server.NODES]}
        return str(uids[node]["uid"]) if node in uids else ""

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
        node_uid = self.uid_of(known.node) if known.node_uid is None else known.node_uid
        extra = {
            "authentication.kubernetes.io/pod-name": [known.pod],
            "authentication.kubernetes.io/pod-uid": [known.uid],
            "authentication.kubernetes.io/node-name": [known.node],
            "authentication.kubernetes.io/node-uid": [node_uid],
        }
        user = {"username": known.account, "extra": {k: v for k, v in extra.items() if v != [""]}}
        status = {"authenticated": True, "audiences": [known.audience], "user": user}
        return {"kind": "TokenReview", "status": status}


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


def central(config: Config, tmp_path: Path, **more: Any) -> Config:
    """The settings of a controller."""
    return replace(
        config,
        endpoint=tmp_path / "controller.sock",
        enrolment_address=Address("127.0.0.1", 0),
        **more,
    )


def add_volume(api: Cluster, name: str, node: str, group: str = GROUP) -> str:
    """A PersistentVolume of a node's group; its id."""
    identity = f"{group}/vol-{name}"
    api.add(api_server.VOLUMES, name, spec=spec_of(identity, node))
    return identity


def spec_of(identity: str, node: str) -> Object:
    """The specification of the PersistentVolume of a volume on a node."""
    place = {"key": TOPOLOGY_KEY, "operator": "In", "values": [node]}
    terms = [{"matchExpressions": [place]}]
    return {
        "csi": {"driver": DRIVER_NAME, "volumeHandle": identity},
        "nodeAffinity": {"required": {"nodeSelectorTerms": terms}},
    }
