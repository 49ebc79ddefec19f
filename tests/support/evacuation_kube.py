"""A Kubernetes in memory, whose controllers act between the requests, for histories of evacuations.

What the controllers do is held against Kubernetes' source:

- StatefulSet (pkg/controller/statefulset/stateful_set_control.go, processReplica): a pod that is
  missing is made, one replica after the other unless the policy is Parallel; the claims of a
  pending pod are made from the template if they are missing.
- Binder (pkg/controller/volume/persistentvolume): a claim is bound to the volume that is reserved
  for it; a volume whose claim is gone is Released, and deleted if its policy is Delete.
- Protection (pkg/controller/volume/pvcprotection): a claim that is being deleted stays while a pod
  with a node uses it.
- Scheduler: a pod goes to a node that is schedulable and that the affinity of its volumes allows.
- Evictions (pkg/registry/core/pod/storage/eviction.go): 429 while the budget allows none; a pod
  that is pending or being deleted is deleted without a look at the budget.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from baton import Baton
from binding import _merged, _refused, terminating
from moving_model import Refusal, Service

from agent.settings.settings import DRIVER_NAME, TOPOLOGY_KEY

Object = dict[str, Any]
SHOP = "shop"
_KINDS = {
    "nodes": "Node",
    "pods": "Pod",
    "persistentvolumes": "PersistentVolume",
    "persistentvolumeclaims": "PersistentVolumeClaim",
    "events": "Event",
}
_PATH = re.compile(r"/api/v1(?:/namespaces/([^/]+))?/([a-z]+)(?:/([^/]+))?(?:/(eviction))?$")
_DAY = 86400


class Violation(AssertionError):
    """Something has happened that must never happen."""


class Kube:
    """Nodes, a StatefulSet with its pods, claims and volumes, and those who act on them."""

    def __init__(self, services: Mapping[str, Service], baton: Baton) -> None:
        self.services, self.baton = services, baton
        self.objects: dict[str, dict[tuple[str, str], Object]] = {kind: {} for kind in _KINDS}
        self.version = 100
        # The claims of each replica of the StatefulSet, with their classes.
        self.replicas: dict[str, dict[str, str]] = {}
        self.is_parallel = True
        # Further fields of the spec in the StatefulSet's template of a pod.
        self.template: Object = {}
        # The lines that were acknowledged, by claim.
        self.lines: dict[str, list[str]] = {}
        self.policies: dict[str, str] = {}
        # The claims that their user has deleted.
        self.abandoned: set[str] = set()
        # Whether the namespace of the claims is being deleted: nothing is made in it.
        self.is_ending = False
        # The claims that another one's finalizer keeps, such as while a snapshot is taken.
        self.kept: set[str] = set()
        # Whether an eviction is refused; what becomes of a request; asked each time.
        self.refuses: Callable[[], bool] = lambda: False
        self.is_down = False
        # Why admission control refuses a write, by its method, path and body; empty if it does not.
        self.policy: Callable[[str, str, Any], str] = lambda *_: ""
        self.fails: Callable[[], str] = lambda: ""
        self.writes: list[str] = []
        self.said: list[tuple[str, str, str]] = []
        self.is_writing = True
        for name in services:
            about = {"name": name, "labels": {TOPOLOGY_KEY: name, "kubernetes.io/hostname": name}}
            status = {"conditions": [{"type": "Ready", "status": "True"}]}
            self.make("nodes", {"metadata": about, "spec": {}, "status": status})

    # Objects

    def make(self, kind: str, item: Object) -> Object:
        self.version += 1
        about = item["metadata"]
        made: Object = json.loads(json.dumps(item))
        made |= {"kind": _KINDS[kind], "apiVersion": "v1"}
        made["metadata"] |= {
            "uid": f"uid-{self.version}",
            "resourceVersion": str(self.version),
            "creationTimestamp": self._time(),
        }
        self.objects[kind][about.get("namespace", ""), about["name"]] = made
        return made

    def _time(self) -> str:
        second = int(self.baton.now)
        day, rest = divmod(second, _DAY)
        clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
        return f"2026-01-{1 + day:02}T{clock}Z"

    def touch(self, item: Object) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)

    def all(self, kind: str) -> list[Object]:
        return list(self.objects[kind].values())

    def node(self, name: str) -> Object:
        return self.objects["nodes"]["", name]

    def claim(self, name: str) -> Object | None:
        return self.objects["persistentvolumeclaims"].get((SHOP, name))

    def volume(self, name: str) -> Object | None:
        return self.objects["persistentvolumes"].get(("", name))

    def volume_of(self, claim: str) -> Object | None:
        found = self.claim(claim)
        return self.volume(found["spec"].get("volumeName") or "") if found else None

    def place_of(self, claim: str) -> str:
        """The node of a claim's volume; empty without one."""
        volume = self.volume_of(claim)
        return _segment(volume) if volume else ""

    def request(self, node: str, text: str | None) -> None:
        """An operator annotates a Node."""
        annotations = self.node(node)["metadata"].setdefault("annotations", {})
        key = f"evacuate.{DRIVER_NAME}/request"
        annotations.pop(key, None)
        if text is not None:
            annotations[key] = text
        self.touch(self.node(node))

    def remove_node(self, node: str) -> None:
        """A Node is deleted, its machine is off, and its pods are collected (podgc)."""
        del self.objects["nodes"]["", node]
        self.services[node].is_up = False
        for key, pod in list(self.objects["pods"].items()):
            if pod["spec"].get("nodeName") == node:
                del self.objects["pods"][key]

    def uncordon(self, node: str) -> None:
        self.node(node)["spec"].pop("unschedulable", None)
        self.touch(self.node(node))

    def replica(self, name: str, claims: Mapping[str, str], node: str, policy: str) -> None:
        """A replica that runs on a node, with volumes there."""
        self.replicas[name] = dict(claims)
        for claim, device_class in claims.items():
            made = self.services[node].make(f"pvc-{claim}", device_class)
            self.lines[claim] = []
            self.policies[claim] = policy
            found = self.make("persistentvolumeclaims", self._template(claim))
            found["spec"]["volumeName"] = f"pvc-{claim}"
            found["status"] = {"phase": "Bound"}
            place = {"key": TOPOLOGY_KEY, "operator": "In", "values": [node]}
            terms = [{"matchExpressions": [place]}]
            reference = {"namespace": SHOP, "name": claim, "uid": found["metadata"]["uid"]}
            spec = {
                "capacity": {"storage": "1Gi"},
                "csi": {"driver": DRIVER_NAME, "volumeHandle": made.volume_id},
                "claimRef": reference,
                "nodeAffinity": {"required": {"nodeSelectorTerms": terms}},
                "persistentVolumeReclaimPolicy": policy,
                "storageClassName": device_class,
            }
            about = {"name": f"pvc-{claim}", "annotations": {"by": DRIVER_NAME}}
            volume = self.make("persistentvolumes", {"metadata": about, "spec": spec})
            volume["status"] = {"phase": "Bound"}

    def abandon(self, replica: str) -> None:
        """The set is scaled down, and the claims of a replica are deleted."""
        claims = self.replicas.pop(replica)
        self.abandoned |= set(claims)
        for kind, names in (("pods", [replica]), ("persistentvolumeclaims", list(claims))):
            for name in names:
                if (found := self.objects[kind].get((SHOP, name))) is not None:
                    found["metadata"].setdefault("deletionTimestamp", self._time())
                    self.touch(found)

    def end_namespace(self) -> None:
        """The namespace of the claims is deleted, with all that is in it."""
        self.is_ending = True
        for replica in list(self.replicas):
            self.abandon(replica)

    def _template(self, claim: str) -> Object:
        about = {"name": claim, "namespace": SHOP, "labels": {"app": "db"}}
        return {"metadata": about, "spec": {"storageClassName": "fast"}}

    # Requests

    def answer(self, method: str, url: str, body: bytes | None) -> tuple[int, Object]:
        """Answer a request of Carver's; OSError if it does not come through."""
        self.baton.point()
        fate = "lost before" if self.is_down else self.fails()
        if fate == "lost before":
            raise ConnectionRefusedError("the API server is down")
        if fate == "busy":
            return 503, {"kind": "Status"}
        asked = urlsplit(url)
        if self.is_ending and method == "POST" and f"/{SHOP}/persistentvolumeclaims" in url:
            return terminating()
        sent = json.loads(body or b"null")
        if method != "GET" and (problem := self.policy(method, asked.path, sent)):
            return _refused(403, "Forbidden", problem)
        if "dryRun" in asked.query or (method == "DELETE" and "dryRun" in sent):
            return 201, sent
        status, document = self._answer(method, asked.path, sent)
        [selector] = parse_qs(asked.query).get("fieldSelector", [""])
        if selector and "items" in document:
            name = selector.removeprefix("spec.nodeName=")
            items = [one for one in document["items"] if one["spec"].get("nodeName") == name]
            document = {**document, "items": items}
        self.baton.point()
        if fate == "lost after":
            raise ConnectionResetError("the API server was restarted")
        return status, document

    def _answer(self, method: str, path: str, body: Any) -> tuple[int, Object]:
        found = _PATH.match(path)
        if found is None or found[2] not in _KINDS:
            return 404, {"kind": "Status"}
        namespace, kind, name, sub = found[1] or "", found[2], found[3] or "", found[4]
        table = self.objects[kind]
        if method == "GET" and not name:
            items = [one for (space, _), one in table.items() if namespace in ("", space)]
            items = [{key: one[key] for key in one if key != "kind"} for one in items]
            about = {"resourceVersion": str(self.version)}
            return 200, {"kind": f"{_KINDS[kind]}List", "metadata": about, "items": items}
        if method == "GET":
            if (one := table.get((namespace, name))) is None:
                return _refused(404, "NotFound", f"no {name}")
            return 200, one
        self.writes.append(f"{method} {path}")
        if method == "POST" and sub:
            return self._evict(namespace, name, body)
        if method == "POST":
            name = body["metadata"]["name"]
            if (namespace, name) in table:
                return _refused(409, "AlreadyExists", f"{name} already exists")
            if kind == "events":
                self.said.append((body["reason"], body["involvedObject"]["name"], body["message"]))
            made = self.make(kind, body)
            if kind.startswith("persistent"):
                made["status"] = {"phase": "Pending"}
            return 201, made
        if (one := table.get((namespace, name))) is None:
            return _refused(404, "NotFound", f"no {name}")
        if method == "PUT":
            return self._patch(one, {"metadata": body["metadata"], "spec": body["spec"]})
        if method == "PATCH":
            return self._patch(one, body)
        if body["preconditions"]["uid"] != one["metadata"]["uid"]:
            return _refused(409, "Conflict", "the UID in the precondition does not match")
        one["metadata"].setdefault("deletionTimestamp", self._time())
        self.touch(one)
        return 200, one

    def _patch(self, one: Object, body: Object) -> tuple[int, Object]:
        version = body.get("metadata", {}).pop("resourceVersion", None)
        if version not in (None, one["metadata"]["resourceVersion"]):
            return _refused(409, "Conflict", "the object has been modified")
        if one["kind"] == "Event":
            self.said.append(
                (one["reason"], one["involvedObject"]["name"], body.get("message", ""))
            )
        merged = _merged(one, body)
        for key in ("csi", "nodeAffinity"):
            if merged.get("spec", {}).get(key) != one.get("spec", {}).get(key):
                return _refused(422, "Invalid", "spec is immutable after creation")
        one.clear()
        one.update(merged)
        self.touch(one)
        return 200, one

    def _evict(self, namespace: str, name: str, body: Object) -> tuple[int, Object]:
        if (pod := self.objects["pods"].get((namespace, name))) is None:
            return _refused(404, "NotFound", f"no {name}")
        if body["deleteOptions"]["preconditions"]["uid"] != pod["metadata"]["uid"]:
            return _refused(409, "Conflict", "the UID in the precondition does not match")
        is_going = "deletionTimestamp" in pod["metadata"]
        if pod["status"]["phase"] != "Pending" and not is_going and self.refuses():
            # As pkg/registry/core/pod/storage/eviction.go of Kubernetes 1.36.3 has it.
            text = "Cannot evict pod as it would violate the pod's disruption budget."
            cause = "The disruption budget db needs 3 healthy pods and has 3 currently"
            status, refusal = _refused(429, "TooManyRequests", text)
            causes = [{"reason": "DisruptionBudget", "message": cause}]
            return status, {**refusal, "details": {"causes": causes}}
        pod["metadata"].setdefault("deletionTimestamp", self._time())
        self.touch(pod)
        return 201, {"kind": "Status", "status": "Success"}

    # Those who act

    def tick(self) -> None:
        """One of them does one thing."""
        draw = self.baton.chance
        act = draw.choice(
            (
                *(self._sync_set, self._schedule, self._kubelet, self._kubelet, self._write),
                *(self._write, self._protect, self._bind, self._reclaim),
            )
        )
        act()

    def _users(self, claim: str) -> list[Object]:
        return [pod for pod in self.all("pods") if claim in _claims(pod)]

    def _sync_set(self) -> None:
        for name, claims in self.replicas.items():
            pod = self.objects["pods"].get((SHOP, name))
            if pod is None:
                for claim in claims:
                    self._ensure_claim(claim)
                volumes = [
                    {"name": one, "persistentVolumeClaim": {"claimName": one}} for one in claims
                ]
                owner = {"kind": "StatefulSet", "name": "db", "uid": "u", "controller": True}
                about = {"name": name, "namespace": SHOP, "ownerReferences": [owner]}
                spec = {"volumes": volumes, **self.template}
                made = self.make("pods", {"metadata": about, "spec": spec})
                made["status"] = {"phase": "Pending"}
            elif pod["status"]["phase"] == "Pending":
                for claim in claims:
                    self._ensure_claim(claim)
            if not self.is_parallel:
                pod = self.objects["pods"][SHOP, name]
                if pod["status"]["phase"] != "Running" or "deletionTimestamp" in pod["metadata"]:
                    return

    def _ensure_claim(self, claim: str) -> None:
        if self.claim(claim) is None:
            made = self.make("persistentvolumeclaims", self._template(claim))
            made["status"] = {"phase": "Pending"}

    def _schedule(self) -> None:
        for pod in self.all("pods"):
            if pod["spec"].get("nodeName") or "deletionTimestamp" in pod["metadata"]:
                continue
            places = {node["metadata"]["name"] for node in self.all("nodes")}
            for claim in _claims(pod):
                found, volume = self.claim(claim), self.volume_of(claim)
                # A claim that is being deleted is not scheduled for (volumebinding,
                # FindPodVolumes; preFilter of volumerestrictions).
                if (
                    found is None
                    or volume is None
                    or found["status"]["phase"] != "Bound"
                    or "deletionTimestamp" in found["metadata"]
                ):
                    places = set()
                    break
                places &= {_segment(volume)}
            for name in places:
                is_cordoned = self.node(name)["spec"].get("unschedulable")
                if not is_cordoned or {"operator": "Exists"} in pod["spec"].get("tolerations", ()):
                    pod["spec"]["nodeName"] = name
                    self.touch(pod)

    def _kubelet(self) -> None:
        pods = self.all("pods")
        if not pods:
            return
        pod = self.baton.chance.choice(pods)
        name, uid = pod["spec"].get("nodeName"), pod["metadata"]["uid"]
        if "deletionTimestamp" in pod["metadata"]:
            if pod["metadata"].get("finalizers") or (name and not self.services[name].is_up):
                return
            for service in self.services.values():
                for volume in service.volumes.values():
                    volume.users.discard(uid)
            del self.objects["pods"][SHOP, pod["metadata"]["name"]]
        elif name and pod["status"]["phase"] == "Pending" and self.services[name].is_up:
            self._start(pod, self.services[name], uid)

    def _start(self, pod: Object, service: Service, uid: str) -> None:
        for claim in _claims(pod):
            volume = self.volume_of(claim)
            if volume is None:
                return
            handle = volume["spec"]["csi"]["volumeHandle"]
            try:
                staged = service.stage(handle, uid)
            except Refusal:
                return
            if staged.content != tuple(self.lines[claim]):
                raise Violation(
                    f"{claim} on {service.name} has {staged.content}, not {self.lines[claim]}"
                )
        pod["status"]["phase"] = "Running"
        self.touch(pod)

    def _write(self) -> None:
        if not self.is_writing:
            return
        for pod in self.all("pods"):
            if pod["status"]["phase"] != "Running":
                continue
            service, uid = self.services[pod["spec"]["nodeName"]], pod["metadata"]["uid"]
            for claim in _claims(pod):
                for volume in service.volumes.values():
                    if uid in volume.users and volume.volume_id.endswith(f"pvc-{claim}"):
                        assert volume.content is not None
                        line = f"{len(self.lines[claim])}"
                        volume.content = (*volume.content, line)
                        self.lines[claim].append(line)

    def _protect(self) -> None:
        for claim in self.all("persistentvolumeclaims"):
            name = claim["metadata"]["name"]
            if "deletionTimestamp" not in claim["metadata"] or name in self.kept:
                continue
            if any(pod["spec"].get("nodeName") for pod in self._users(name)):
                continue
            del self.objects["persistentvolumeclaims"][SHOP, name]
            for volume in self.all("persistentvolumes"):
                if volume["spec"]["claimRef"].get("uid") == claim["metadata"]["uid"]:
                    volume["status"]["phase"] = "Released"
                    self.touch(volume)

    def _bind(self) -> None:
        for claim in self.all("persistentvolumeclaims"):
            about = claim["metadata"]
            if claim["status"]["phase"] == "Bound" or "deletionTimestamp" in about:
                continue
            wanted = claim["spec"].get("volumeName")
            fitting = []
            for volume in self.all("persistentvolumes"):
                reference = volume["spec"]["claimRef"]
                if reference["name"] != about["name"] or "deletionTimestamp" in volume["metadata"]:
                    continue
                if reference.get("uid") not in (None, about["uid"]):
                    continue
                if wanted in (None, volume["metadata"]["name"]):
                    fitting.append(volume)
            if fitting:
                volume = fitting[0]
                volume["spec"]["claimRef"]["uid"] = about["uid"]
                claim["spec"]["volumeName"] = volume["metadata"]["name"]
                claim["status"]["phase"] = volume["status"]["phase"] = "Bound"
                self.touch(volume)
                self.touch(claim)
            elif wanted is None:
                raise Violation(f"an empty volume would be made for {about['name']}")

    def _reclaim(self) -> None:
        for volume in self.all("persistentvolumes"):
            is_going = "deletionTimestamp" in volume["metadata"]
            phase = volume["status"]["phase"]
            is_deleted = volume["spec"]["persistentVolumeReclaimPolicy"] == "Delete"
            if is_deleted and phase != "Bound" and (is_going or phase == "Released"):
                handle = volume["spec"]["csi"]["volumeHandle"]
                if volume["spec"]["claimRef"]["name"] not in self.abandoned:
                    raise Violation(f"volume {handle} of {volume['metadata']['name']} is deleted")
                service = self.services[_segment(volume)]
                try:
                    if not service.is_up:
                        continue
                    service.delete(handle)
                except Refusal:
                    continue
                del self.objects["persistentvolumes"]["", volume["metadata"]["name"]]
                continue
            if is_going and phase != "Bound":
                del self.objects["persistentvolumes"]["", volume["metadata"]["name"]]

    def reboot(self, name: str) -> None:
        """A machine is rebooted: its pods start anew."""
        for volume in self.services[name].volumes.values():
            volume.users.clear()
        self.services[name].restart()
        for pod in self.all("pods"):
            if pod["spec"].get("nodeName") == name and pod["status"]["phase"] == "Running":
                pod["status"]["phase"] = "Pending"

    # What must be so

    def check(self) -> None:
        """No volume is usable on two nodes."""
        seen: dict[str, str] = {}
        for name, service in self.services.items():
            for own, volume in service.volumes.items():
                if volume.is_usable:
                    if own in seen:
                        raise Violation(f"{own} is usable on {seen[own]} and {name}")
                    seen[own] = name


def _claims(pod: Object) -> list[str]:
    return [one["persistentVolumeClaim"]["claimName"] for one in pod["spec"]["volumes"]]


def _segment(volume: Object) -> str:
    [term] = volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"]
    return str(term["matchExpressions"][0]["values"][0])
