"""An API server with what binds claims to PersistentVolumes, and what deletes volumes.

It does so behind its answers, as controllers do, and notes each moment at which data could have
been deleted.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from api_server import CLAIMS, KINDS, NODES, PODS, VOLUMES, ApiServer, Object

_NAMESPACED = re.compile(r"/api/v1/namespaces/([^/]+)/(pods|persistentvolumeclaims)(?:/([^/]+))?$")
_IMMUTABLE = ("csi", "nodeAffinity")
_PROTECTED = {VOLUMES: "kubernetes.io/pv-protection", CLAIMS: "kubernetes.io/pvc-protection"}
DRIVER = "lvm.csi.carver"
KEY = f"topology.{DRIVER}/node"
# What becomes of a write: given what carries it out.
Failure = Callable[[Callable[[], tuple[int, Object]]], tuple[int, Object]]


class Cluster(ApiServer):
    """Two nodes, and a claim shop/data of a volume on the first, as a provisioner leaves it."""

    def __init__(
        self,
        handle: str = "data@x/vol-pvc-1",
        policy: str = "Delete",
        nodes: tuple[str, str] = ("a", "b"),
    ) -> None:
        super().__init__()
        # Volumes that were deleted; states in which one could have been; blank ones for claims.
        self.deleted: list[str] = []
        self.dangers: list[str] = []
        self.blank: list[str] = []
        self.writes: list[str] = []
        # What happens in place of the writes of these numbers.
        self.failures: dict[int, Failure] = {}
        # How admission control refuses a write.
        self.policy: Callable[[str, str], tuple[int, Object] | None] = lambda _method, _path: None
        # Requests that the controllers sleep for, after each write.
        self.lag = 0
        # The template by which a claim is recreated, as by a StatefulSet.
        self.template: Object | None = None
        # How many requests a provisioner takes to make a volume, by which no claim was bound.
        self.provisioner_looks = 20
        self._unmatched: dict[str, int] = {}
        # The refusal of what is created in the claim's namespace, if that has ended.
        self.namespace_ended: tuple[int, Object] | None = None
        self._asleep = 0
        for node in nodes:
            self.add(NODES, f"machine-{node}", metadata={"labels": {KEY: node}})
        wanted = {"key": KEY, "operator": "In", "values": [nodes[0]]}
        claim = self._made(
            CLAIMS,
            {
                "metadata": {
                    "name": "data",
                    "namespace": "shop",
                    "labels": {"app": "db"},
                    "annotations": {
                        "pv.kubernetes.io/bind-completed": "yes",
                        "volume.kubernetes.io/selected-node": f"machine-{nodes[0]}",
                    },
                },
                "spec": {
                    "accessModes": ["ReadWriteOnce"],
                    "resources": {"requests": {"storage": "1Gi"}},
                    "storageClassName": "fast",
                    "volumeName": "pvc-1",
                },
            },
        )
        self._made(
            VOLUMES,
            {
                "metadata": {
                    "name": "pvc-1",
                    "annotations": {"pv.kubernetes.io/provisioned-by": DRIVER},
                },
                "spec": {
                    "capacity": {"storage": "1Gi"},
                    "accessModes": ["ReadWriteOnce"],
                    "persistentVolumeReclaimPolicy": policy,
                    "storageClassName": "fast",
                    "csi": {
                        "driver": DRIVER,
                        "volumeHandle": handle,
                        "volumeAttributes": {"carver/class": "linear"},
                    },
                    "claimRef": {
                        "namespace": "shop",
                        "name": "data",
                        "uid": claim["metadata"]["uid"],
                    },
                    "nodeAffinity": {
                        "required": {"nodeSelectorTerms": [{"matchExpressions": [wanted]}]}
                    },
                },
            },
        )
        self.settle()

    # What tests look at

    def volume(self, name: str) -> Object:
        return self._named(VOLUMES, name)

    @property
    def volumes(self) -> dict[str, Object]:
        return {one["metadata"]["name"]: one for one in self.objects[VOLUMES]}

    @property
    def claim(self) -> Object:
        return self._named(CLAIMS, "data")

    def changed(self, one: Object) -> None:
        """Note a change by another client."""
        self.version += 1
        one["metadata"]["resourceVersion"] = str(self.version)

    def end_claim(self) -> None:
        """Its user deletes the claim, if it exists."""
        for claim in self.objects[CLAIMS]:
            claim["metadata"].setdefault("deletionTimestamp", "now")
            self.changed(claim)

    def end_namespace(self, *, is_gone: bool) -> None:
        """The claim's namespace is deleted, with the claim; or is gone already."""
        self.namespace_ended = no_namespace() if is_gone else terminating()
        self.end_claim()

    def pod(self, name: str, node: str = "", phase: str = "Pending") -> Object:
        """One of the claim's."""
        spec = {"volumes": [{"persistentVolumeClaim": {"claimName": "data"}}], "nodeName": node}
        about = {"namespace": "shop"}
        return self.add(PODS, name, metadata=about, spec=spec, status={"phase": phase})

    # Requests

    def collection(self, path: str) -> tuple[str, list[Object]] | None:
        if (found := _NAMESPACED.match(path)) is None or found[3]:
            return super().collection(path)
        whole = f"/api/v1/{found[2]}"
        mine = [one for one in self.objects[whole] if one["metadata"].get("namespace") == found[1]]
        return KINDS[whole], mine

    def answer(self, path: str, query: Mapping[str, list[str]]) -> tuple[int, Object]:
        self._pass()
        where, name = self._place(path)
        if not name:
            # As the real one has it: what is in a list does not say of which kind it is.
            status, found = super().answer(path, query)
            bare = [{k: v for k, v in one.items() if k != "kind"} for one in found.get("items", ())]
            return status, {**found, "items": bare} if "items" in found else found
        if (one := self._find(where, name)) is None:
            return 404, {"kind": "Status", "reason": "NotFound", "message": f"no {name}"}
        return 200, one

    def write(self, method: str, path: str, body: Object) -> tuple[int, Object]:
        self._pass()
        path, _, query = path.partition("?")
        if query:
            assert query == "dryRun=All"
            assert method in ("POST", "PATCH")
            return self._admission(method, path, body) or (201, body)
        if "dryRun" in body:
            assert (method, body["dryRun"]) == ("DELETE", ["All"])
            return self._admission(method, path, body) or (200, body)
        number = len(self.writes)
        self.writes.append(f"{method} {path}")
        failure = self.failures.pop(number, None)
        if failure is None:
            return self._carry_out(method, path, body)
        return failure(lambda: self._carry_out(method, path, body))

    def _carry_out(self, method: str, path: str, body: Object) -> tuple[int, Object]:
        where, name = self._place(path)
        if refusal := self._admission(method, path, body):
            return refusal
        if method == "POST":
            made = self._made(where, json.loads(json.dumps(body)))
            return 201, made
        if (one := self._find(where, name)) is None:
            return _refused(404, "NotFound", f"no {name}")
        if method in ("PATCH", "PUT"):
            return self._change(one, body, is_patch=method == "PATCH")
        if body["preconditions"]["uid"] != one["metadata"]["uid"]:
            return _refused(409, "Conflict", "the UID in the precondition does not match")
        one["metadata"]["deletionTimestamp"] = "now"
        self.changed(one)
        self._asleep = self.lag
        return 200, one

    def _admission(self, method: str, path: str, body: Object) -> tuple[int, Object] | None:
        """The refusal of a write, or of its trial."""
        if problem := self.policy(method, path):
            return problem
        return self._refuse_creation(path, body) if method == "POST" else None

    def _refuse_creation(self, path: str, body: Object) -> tuple[int, Object] | None:
        where, _ = self._place(path)
        about = body["metadata"]
        if set(about) & {"uid", "resourceVersion", "deletionTimestamp"} or "status" in body:
            return _refused(422, "Invalid", "that is the server's to say")
        if _NAMESPACED.match(path) and self.namespace_ended:
            return self.namespace_ended
        if self._find(where, about["name"]):
            return _refused(409, "AlreadyExists", f"{about['name']} already exists")
        return None

    def _change(self, one: Object, body: Object, *, is_patch: bool) -> tuple[int, Object]:
        if body["metadata"].pop("resourceVersion") != one["metadata"]["resourceVersion"]:
            return _refused(409, "Conflict", "the object has been modified")
        merged = _merged(one, body) if is_patch else {**one, "spec": body["spec"]}
        if any(merged["spec"].get(key) != one["spec"].get(key) for key in _IMMUTABLE):
            return _refused(422, "Invalid", "spec is immutable after creation")
        before, after = dict(one["spec"]), dict(merged["spec"])
        if one["kind"] == "PersistentVolumeClaim" and before != after:
            # Its volume may be named once (ValidatePersistentVolumeClaimUpdate).
            after.pop("volumeName")
            if before != after:
                return _refused(422, "Invalid", "spec is immutable after creation")
        one |= merged
        self.changed(one)
        self._asleep = self.lag
        self._look()
        return 200, one

    # What goes on behind

    def _pass(self) -> None:
        if self._asleep:
            self._asleep -= 1
        else:
            self.settle()
        self._look()

    def settle(self) -> None:
        """What the controllers do by and by."""
        for claim in list(self.objects[CLAIMS]):
            if "deletionTimestamp" in claim["metadata"]:
                if not any(one["spec"]["nodeName"] for one in self.objects[PODS]):
                    self._end(claim)
            elif claim["status"]["phase"] != "Bound":
                self._bind(claim)
        for volume in list(self.objects[VOLUMES]):
            is_going = "deletionTimestamp" in volume["metadata"]
            is_released = volume["status"]["phase"] == "Released"
            is_deleted = volume["spec"]["persistentVolumeReclaimPolicy"] == "Delete"
            if is_deleted and (is_going or is_released):
                self.deleted.append(volume["spec"]["csi"]["volumeHandle"])
            if (is_going and volume["status"]["phase"] != "Bound") or (is_deleted and is_released):
                self.objects[VOLUMES].remove(volume)

    def _end(self, claim: Object) -> None:
        self.objects[CLAIMS].remove(claim)
        for volume in self.objects[VOLUMES]:
            if volume["spec"]["claimRef"].get("uid") == claim["metadata"]["uid"]:
                volume["status"]["phase"] = "Released"
                self.changed(volume)
        if self.template:
            self._made(CLAIMS, json.loads(json.dumps(self.template)))

    def _bind(self, claim: Object) -> None:
        about, wanted = claim["metadata"], claim["spec"].get("volumeName")
        for volume in self.objects[VOLUMES]:
            reference = volume["spec"]["claimRef"]
            is_own = (reference["namespace"], reference["name"]) == ("shop", about["name"])
            if wanted in (None, volume["metadata"]["name"]) and is_own:
                if reference.get("uid") not in (None, about["uid"]):
                    continue
                if wanted is None and not _is_match(claim["spec"], volume["spec"]):
                    continue
                reference["uid"] = about["uid"]
                claim["spec"]["volumeName"] = volume["metadata"]["name"]
                claim["status"]["phase"] = volume["status"]["phase"] = "Bound"
                # As updateClaimStatus in pv_controller.go has it for a claim that becomes Bound.
                claim["status"]["capacity"] = dict(volume["spec"]["capacity"])
                self.changed(volume)
                self.changed(claim)
                return
        if wanted is None:
            self._unmatched[about["uid"]] = self._unmatched.get(about["uid"], 0) + 1
            if self._unmatched[about["uid"]] > self.provisioner_looks:
                self.blank.append(about["name"])

    def _look(self) -> None:
        """Note what could be deleted by a controller, or a person, that comes now."""
        claims = {
            one["metadata"]["uid"]: one["spec"].get("volumeName")
            for one in self.objects[CLAIMS]
            if "deletionTimestamp" not in one["metadata"]
        }
        for one in self.objects[VOLUMES]:
            name, uid = one["metadata"]["name"], one["spec"]["claimRef"].get("uid")
            is_held = claims.get(uid) == name and "deletionTimestamp" not in one["metadata"]
            if one["spec"]["persistentVolumeReclaimPolicy"] != "Retain" and not is_held:
                self.dangers.append(name)

    # Objects

    def _made(self, where: str, one: Object) -> Object:
        self.version += 1
        kind = KINDS[where].removesuffix("List")
        one |= {"kind": kind, "apiVersion": "v1"}
        one["metadata"] |= {
            "uid": f"uid-{self.version}",
            "resourceVersion": str(self.version),
            "finalizers": [_PROTECTED[where]],
        }
        one["status"] = {"phase": "Available" if where == VOLUMES else "Pending"}
        self.objects[where].append(one)
        self._asleep = self.lag
        return one

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

    def _named(self, where: str, name: str) -> Object:
        found = self._find(where, name)
        assert found is not None, name
        return found


def terminating() -> tuple[int, Object]:
    """What is refused in a namespace that is being deleted (plugin/pkg/admission/namespace)."""
    code, refusal = _refused(403, "Forbidden", "because it is being terminated")
    cause = {"reason": "NamespaceTerminating", "field": "metadata.namespace"}
    return code, {**refusal, "details": {"causes": [cause]}}


def no_namespace() -> tuple[int, Object]:
    """What is refused in a namespace that does not exist."""
    code, refusal = _refused(404, "NotFound", 'namespaces "shop" not found')
    return code, {**refusal, "details": {"name": "shop", "kind": "namespaces"}}


def _is_match(claim: Object, volume: Object) -> bool:
    """Whether the binder takes a volume for a claim that names none, though it is reserved for it.

    As FindMatchingVolume in k8s.io/component-helpers/storage/volume/pv_helpers.go of Kubernetes
    1.34 has it. A claim that names the volume is bound to it without these checks (syncUnboundClaim
    in pkg/controller/volume/persistentvolume/pv_controller.go).
    """
    wanted = claim["resources"]["requests"]["storage"]
    return _gibibytes(volume["capacity"]["storage"]) >= _gibibytes(wanted) and (
        claim.get("volumeAttributesClassName") == volume.get("volumeAttributesClassName")
    )


def _gibibytes(quantity: str) -> int:
    return int(quantity.removesuffix("Gi"))


def _refused(code: int, reason: str, message: str) -> tuple[int, Object]:
    return code, {"kind": "Status", "reason": reason, "message": message}


def _merged(one: Any, change: Any) -> Any:
    """RFC 7386."""
    if not isinstance(change, dict):
        return change
    kept = dict(one) if isinstance(one, dict) else {}
    for key, value in change.items():
        if value is None:
            kept.pop(key, None)
        else:
            kept[key] = _merged(kept.get(key), value)
    return kept
