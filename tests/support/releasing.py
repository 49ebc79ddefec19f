"""An API server with a database on local volumes, and what becomes of its claims and pods.

Behind its answers it does what Kubernetes' controllers, the scheduler, the provisioner and the
database's operator do, and it notes each moment at which data could have been lost.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any
from urllib.parse import parse_qs, urlsplit

import api_server
import pytest
from api_server import CLAIMS, KINDS, NODES, PODS, VOLUMES, ApiServer, Object
from binding import _merged
from enrolled import spec_of

from agent.extras.controller.membership import ClusterRecord
from agent.extras.evacuation import release_notes
from agent.extras.evacuation.claim_owners import Volume
from agent.extras.evacuation.lost_claims import LostClaims
from agent.extras.kubernetes import objects
from agent.extras.kubernetes.access import Server
from agent.extras.kubernetes.objects import Lists, Objects
from agent.settings.settings import DRIVER_NAME, TOPOLOGY_KEY

CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
SHOP = "shop"
# The grace period of a deleted Node, after which the controller forgets its volumes.
FORGET_SECONDS = 600.0
_NAMESPACED = re.compile(
    r"/api/v1/namespaces/([^/]+)/(pods|persistentvolumeclaims|events)(?:/([^/]+))?(/eviction)?$"
)
_NOTE, _POLICY = (key(DRIVER_NAME) for key in (release_notes.note_key, release_notes.policy_key))


class Killed(BaseException):
    """The controller's process ended."""


class Clock:
    """Seconds that go by as a test says."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Shop(ApiServer):
    """A database of three instances, each with two claims on a node of its own; and a spare node.

    `kind` is who makes claims and pods: `StatefulSet`, which gives them the same names again, or
    `Cluster`, an operator such as CloudNativePG, which gives a new instance another number.
    """

    def __init__(
        self, kind: str = "StatefulSet", replicas: int = 3, policy: str = "Delete"
    ) -> None:
        super().__init__()
        self.kind, self.replicas, self.policy = kind, replicas, policy
        self.events: dict[tuple[str, str], Object] = {}
        self.writes: list[str] = []
        # Volumes whose data were deleted, and what went wrong.
        self.deleted: list[str] = []
        self.dangers: list[str] = []
        # The UIDs of the claims that the controller deleted, and their instances, in this order.
        self.released: dict[str, str] = {}
        # Nodes that came back when the deletion of a claim was on its way already.
        self.excused: set[str] = set()
        # Nodes on which no pod becomes ready.
        self.slow: set[str] = set()
        # Whether the controllers behind rest: then claims stay deleted.
        self.is_asleep = False
        self._number = 0
        self.class_parameters = {"carver/class": "linear", "carver/releaseOnNodeLoss": "true"}
        for number in range(4):
            self.join(f"n{number}")
        self.settle()
        self.settle()

    # What happens to nodes

    def join(self, node: str) -> None:
        if not any(one["metadata"]["name"] == node for one in self.objects[NODES]):
            self.add(NODES, node, metadata={"labels": {TOPOLOGY_KEY: node}})

    def leave(self, node: str) -> None:
        self.objects[NODES] = [
            one for one in self.objects[NODES] if one["metadata"]["name"] != node
        ]

    @property
    def nodes(self) -> set[str]:
        return {one["metadata"]["name"] for one in self.objects[NODES]}

    # What tests look at

    def one(self, where: str, name: str) -> Object:
        found = self._find(where, name)
        assert found is not None, name
        return found

    def node_of(self, pod: str) -> str:
        return str(self.one(PODS, pod)["spec"]["nodeName"])

    def names(self, where: str) -> list[str]:
        return sorted(one["metadata"]["name"] for one in self.objects[where])

    def volume_of(self, claim: str) -> Object:
        return self.one(VOLUMES, self.one(CLAIMS, claim)["spec"]["volumeName"])

    def instance_claims(self, instance: str) -> list[str]:
        if self.kind == "StatefulSet":
            return [f"data-{instance}", f"wal-{instance}"]
        return [instance, f"{instance}-wal"]

    def is_running(self, instance: str) -> bool:
        pod = self._find(PODS, instance)
        return pod is not None and pod["spec"]["nodeName"] in self.nodes and _is_ready(pod)

    def reasons(self) -> set[str]:
        return {one["reason"] for one in self.events.values()}

    def message(self, reason: str) -> str:
        [found] = {one["message"] for one in self.events.values() if one["reason"] == reason}
        return str(found)

    def notes(self) -> dict[str, Any]:
        return {
            one["metadata"]["name"]: json.loads(note)
            for one in self.objects[VOLUMES]
            if (note := (one["metadata"].get("annotations") or {}).get(_NOTE))
        }

    # Requests

    def collection(self, path: str) -> tuple[str, list[Object]] | None:
        if (found := _NAMESPACED.match(path)) is None or found[3]:
            return super().collection(path)
        whole = f"/api/v1/{found[2]}"
        mine = [one for one in self.objects[whole] if one["metadata"].get("namespace") == found[1]]
        return KINDS[whole], mine

    def answer(self, path: str, query: Mapping[str, list[str]]) -> tuple[int, Object]:
        if path.startswith(f"{CLASSES}/"):
            about = {"name": path.removeprefix(f"{CLASSES}/"), "uid": "uid-of-class"}
            own = {"provisioner": DRIVER_NAME, "parameters": self.class_parameters}
            return 200, {"kind": "StorageClass", "metadata": about, **own}
        where, name = self._place(path)
        if not name:
            return super().answer(path, query)
        if (one := self._find(where, name)) is None:
            return 404, {"kind": "Status", "reason": "NotFound"}
        return 200, {"kind": KINDS[where].removesuffix("List"), **one}

    def write(self, method: str, path: str, body: Object) -> tuple[int, Object]:
        found = _NAMESPACED.match(path)
        if found is not None and found[2] == "events":
            name = found[3] or body["metadata"]["name"]
            known = self.events.get((found[1], name))
            if method == "POST" and known is not None:
                return 409, {"kind": "Status", "reason": "AlreadyExists"}
            self.events[found[1], name] = {**(known or {}), **body}
            return 201, body
        self.writes.append(f"{method} {path}")
        where, name = self._place(path)
        one = self._find(where, name)
        if one is None:
            return 404, {"kind": "Status", "reason": "NotFound", "message": f"no {name}"}
        if found is not None and found[4]:
            return self._evict(one, body)
        if method == "PATCH":
            return self._patch(where, one, body)
        assert (method, where) == ("DELETE", CLAIMS), "no other object may be deleted"
        if body["preconditions"]["uid"] != one["metadata"]["uid"]:
            return 409, {"kind": "Status", "reason": "Conflict", "message": "another UID"}
        self._judge(one)
        one["metadata"]["deletionTimestamp"] = "now"
        self._changed(one)
        self._protect()
        return 200, one

    def _evict(self, pod: Object, body: Object) -> tuple[int, Object]:
        assert body["deleteOptions"]["preconditions"]["uid"] == pod["metadata"]["uid"]
        if pod["spec"]["nodeName"]:
            self.dangers.append(f"{pod['metadata']['name']} was evicted, though it has a node")
        self.objects[PODS].remove(pod)
        return 201, {"kind": "Status", "status": "Success"}

    def _patch(self, where: str, one: Object, body: Object) -> tuple[int, Object]:
        assert where == VOLUMES, "nothing but PersistentVolumes may be changed"
        if body["metadata"].pop("resourceVersion") != one["metadata"]["resourceVersion"]:
            return 409, {"kind": "Status", "reason": "Conflict", "message": "it was modified"}
        merged = _merged(one, body)
        assert {key: merged["spec"][key] for key in ("csi", "nodeAffinity", "claimRef")} == {
            key: one["spec"][key] for key in ("csi", "nodeAffinity", "claimRef")
        }
        one |= merged
        self._changed(one)
        return 200, one

    def _judge(self, claim: Object) -> None:
        """Note what is wrong if the controller deletes this claim now."""
        name = claim["metadata"]["name"]
        volume = self.one(VOLUMES, claim["spec"]["volumeName"])
        if volume["spec"]["persistentVolumeReclaimPolicy"] != "Retain":
            self.dangers.append(f"{name} is deleted, and its volume with it")
        if _node_named(volume) in self.nodes - self.excused:
            self.dangers.append(f"{name} is deleted, though its node is there")
        for pod in self.objects[PODS]:
            if pod["spec"]["nodeName"] and name in _claims(pod):
                self.dangers.append(f"{name} is deleted, though a pod with a node uses it")
        lost = {
            self._instance(one["metadata"]["name"])
            for one in self.objects[CLAIMS]
            if "deletionTimestamp" not in one["metadata"]
            and (bound := self._find(VOLUMES, one["spec"].get("volumeName", "")))
            and _node_named(bound) not in self.nodes - self.excused
        }
        running = {one for one in self.names(PODS) if self.is_running(one)}
        # None is on the way: each instance runs, or waits for its release with its claims.
        if len(lost | running) < self.replicas:
            self.dangers.append(f"{name} is deleted while another instance is not back")
        if self.replicas > 1 and not running:
            self.dangers.append(f"{name} is deleted, though no other instance runs")
        self.released[claim["metadata"]["uid"]] = self._instance(name)

    # What goes on behind

    def settle(self) -> None:
        """What the others do by and by."""
        if self.is_asleep:
            return
        # Kubernetes' pod garbage collector.
        self.objects[PODS] = [
            pod
            for pod in self.objects[PODS]
            if not pod["spec"]["nodeName"] or pod["spec"]["nodeName"] in self.nodes
        ]
        self._protect()
        if self.kind == "StatefulSet":
            self._make_as_a_set()
        else:
            self._make_as_an_operator()
        for pod in self.objects[PODS]:
            self._schedule(pod)

    def _make_as_a_set(self) -> None:
        for number in range(self.replicas):
            instance = f"db-{number}"
            if (pod := self._find(PODS, instance)) is None:
                pod = self._pod(instance)
            if not pod["spec"]["nodeName"]:
                for claim in self.instance_claims(instance):
                    self._claim(claim)

    def _make_as_an_operator(self) -> None:
        """As CloudNativePG: a pod whose claims are gone is left alone."""
        owned = {self._instance(name) for name in self.names(CLAIMS)}
        whole = {one for one in owned if set(self.instance_claims(one)) <= set(self.names(CLAIMS))}
        for instance in whole:
            if self._find(PODS, instance) is None:
                self._pod(instance)
        every = whole | set(self.names(PODS))
        while len(every) < self.replicas:
            self._number += 1
            instance = f"db-{self._number}"
            for claim in self.instance_claims(instance):
                self._claim(claim, instance)
            self._pod(instance)
            every.add(instance)

    def _pod(self, instance: str) -> Object:
        volumes = [
            {"name": name.partition("-")[0], "persistentVolumeClaim": {"claimName": name}}
            for name in self.instance_claims(instance)
        ]
        owner = {"kind": self.kind, "name": "db", "controller": True}
        return self.add(
            PODS,
            instance,
            metadata={"namespace": SHOP, "ownerReferences": [owner]},
            spec={"nodeName": "", "volumes": volumes},
            status={"phase": "Pending"},
        )

    def _claim(self, name: str, instance: str = "") -> None:
        if self._find(CLAIMS, name) is not None:
            return
        about: Object = {"namespace": SHOP, "resourceVersion": "1"}
        if instance:
            owner = {"kind": self.kind, "name": "db", "controller": True}
            about |= {"labels": {"cnpg.io/instanceName": instance}, "ownerReferences": [owner]}
        self.add(CLAIMS, name, metadata=about, spec={}, status={"phase": "Pending"})

    def _schedule(self, pod: Object) -> None:
        if pod["status"]["phase"] == "Succeeded":
            return
        if pod["spec"]["nodeName"]:
            is_ready = "False" if pod["spec"]["nodeName"] in self.slow else "True"
            conditions = [{"type": "Ready", "status": is_ready}]
            pod["status"] = {"phase": "Running", "conditions": conditions}
            return
        claims = [self._find(CLAIMS, name) for name in _claims(pod)]
        if not all(claims) or any("deletionTimestamp" in one["metadata"] for one in claims if one):
            return
        bound = [one for one in claims if one and one["spec"].get("volumeName")]
        places = {_node_named(self.one(VOLUMES, one["spec"]["volumeName"])) for one in bound}
        used = {one["spec"]["nodeName"] for one in self.objects[PODS]}
        free = sorted(places or self.nodes - used)
        if len(places) > 1 or not free or free[0] not in self.nodes:
            return
        for one in claims:
            if one is not None and one not in bound:
                self._provision(one, free[0])
        pod["spec"]["nodeName"] = free[0]

    def _provision(self, claim: Object, node: str) -> None:
        uid = claim["metadata"]["uid"]
        handle = f"data@{node:h>8}/vol-pvc-{uid}"
        name = claim["metadata"]["name"]
        self.add(
            VOLUMES,
            f"pvc-{uid}",
            metadata={"resourceVersion": "1"},
            spec={
                **spec_of(handle, node),
                "persistentVolumeReclaimPolicy": self.policy,
                "storageClassName": "fast",
                "claimRef": {"namespace": SHOP, "name": name, "uid": uid},
            },
            status={"phase": "Bound"},
        )
        claim["spec"]["volumeName"] = f"pvc-{uid}"
        claim["status"]["phase"] = "Bound"

    def _protect(self) -> None:
        """Kubernetes' protection of claims that pods with a node use, and what then follows."""
        if self.is_asleep:
            return
        used = {
            name for pod in self.objects[PODS] if pod["spec"]["nodeName"] for name in _claims(pod)
        }
        for claim in list(self.objects[CLAIMS]):
            if "deletionTimestamp" in claim["metadata"] and claim["metadata"]["name"] not in used:
                self.objects[CLAIMS].remove(claim)
        uids = {one["metadata"]["uid"] for one in self.objects[CLAIMS]}
        for volume in list(self.objects[VOLUMES]):
            if volume["spec"]["claimRef"]["uid"] in uids:
                continue
            if volume["status"]["phase"] != "Released":
                volume["status"]["phase"] = "Released"
                self._changed(volume)
            if volume["spec"]["persistentVolumeReclaimPolicy"] == "Delete":
                self.deleted.append(volume["metadata"]["name"])
                self.objects[VOLUMES].remove(volume)

    # Objects

    def _instance(self, claim: str) -> str:
        if self.kind == "StatefulSet":
            return claim.partition("-")[2]
        return claim.removesuffix("-wal")

    def _changed(self, one: Object) -> None:
        self.version += 1
        one["metadata"]["resourceVersion"] = str(self.version)

    def _place(self, path: str) -> tuple[str, str]:
        if found := _NAMESPACED.match(path):
            return f"/api/v1/{found[2]}", found[3] or ""
        if path in KINDS:
            return path, ""
        where, _, name = path.rpartition("/")
        return where, name

    def _find(self, where: str, name: str) -> Object | None:
        found = [one for one in self.objects[where] if one["metadata"]["name"] == name]
        return found[0] if found else None


class Controller:
    """A controller of the shop: its record of Nodes, and its look at claims.

    It reads the clock that only goes on. `wall` is the one that may be set.
    """

    def __init__(self, shop: Shop, clock: Clock) -> None:
        self.shop, self.clock, self.wall = shop, clock, 1_800_000_000.0
        server = Server("tests", "127.0.0.1", shop.port)
        self.objects, self.lists = Objects(server), Lists(server)
        self.record = ClusterRecord(
            *(self.objects, self.lists, DRIVER_NAME), grace_seconds=FORGET_SECONDS, clock=clock
        )
        self.claims = LostClaims(
            *(DRIVER_NAME, self.record, self.objects, self.lists, self.why_not_lost),
            clock=lambda: self.wall,
            monotonic=clock,
        )

    def why_not_lost(self, volume: Volume) -> str:
        """As `Nodes.owner` has it, where all members have named all their volume groups."""
        deleted = self.record.deleted(volume.identity, self.clock())
        if deleted is None:
            return "its node is there"
        return f"in {deleted.seconds} s" if deleted.seconds else ""

    def look(self) -> None:
        """Look once, as the process does: at the Nodes if that is due, then at the claims."""
        if self.record.is_due:
            self.record.look()
        self.claims.look()


def _node_named(volume: Object) -> str:
    [term] = volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"]
    [expression] = term["matchExpressions"]
    return str(expression["values"][0])


def _claims(pod: Object) -> list[str]:
    return [one["persistentVolumeClaim"]["claimName"] for one in pod["spec"]["volumes"]]


def _is_ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions") or ()
    return any(one["status"] == "True" for one in conditions)


class _Direct:
    """A connection without a socket: the same requests, in this thread.

    `before` is called with the number of the request, and may end the process.
    """

    shop: Shop
    before: Callable[[str], object]

    def __init__(self, *_: object) -> None:
        """Nothing is opened."""

    def __enter__(self) -> "_Direct":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is closed."""

    def request(
        self,
        method: str,
        url: str,
        _deadline: float,
        body: bytes | None = None,
        content: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        done = self.before(f"{method} {url}")
        parts = urlsplit(url)
        if method == "GET":
            status, document = self.shop.answer(parts.path, parse_qs(parts.query))
            is_metadata = "as=PartialObjectMetadataList" in (content or {}).get("Accept", "")
            if is_metadata and "items" in document:
                document = api_server.as_metadata(document)
        else:
            status, document = self.shop.write(method, parts.path, json.loads(body or b"{}"))
        if done is not None:
            raise done if isinstance(done, BaseException) else HTTPException
        return status, json.dumps(document).encode()


@contextmanager
def directly(shop: Shop, before: Callable[[str], object] = lambda _: None) -> Iterator[None]:
    """Have all requests go to the shop without a socket.

    `before` is called before each request. It may raise, so that the request is never sent; or
    return an exception that is raised when the request was carried out.
    """
    connection = type("Direct", (_Direct,), {"shop": shop, "before": staticmethod(before)})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(objects, "Connection", connection)
        patched.setattr(objects, "sleep", api_server.no_pause)
        yield
