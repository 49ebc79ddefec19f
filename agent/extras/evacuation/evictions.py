"""Evict pods by the Eviction API, which heeds PodDisruptionBudgets."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from agent.core import errors
from agent.extras.kubernetes.events import Subject
from agent.extras.kubernetes.objects import Lists, Objects, claims_of

# Reason in the API server's answer to an eviction that a PodDisruptionBudget forbids for now
# (pkg/registry/core/pod/storage/eviction.go, createTooManyRequestsError).
_TOO_MANY = "TooManyRequests"
# Reasons in its answer if the pod is gone, or if another pod has its name by now.
_GONE = ("NotFound", "Conflict")


@dataclass(frozen=True)
class UsingPod:
    """A pod that has a node and uses a claim."""

    namespace: str
    name: str
    uid: str
    node: str
    is_being_deleted: bool

    @property
    def subject(self) -> Subject:
        """The object of Events about the pod."""
        return Subject("Pod", self.namespace, self.name, self.uid)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Evictions:
    """Finds and evicts pods. Its methods wait for the API server.

    They raise ClusterRefused or ClusterSilent if it refuses or does not answer.
    """

    def __init__(self, lists: Lists, objects: Objects) -> None:
        self._lists, self._objects = lists, objects

    def users(self, claims: Collection[tuple[str, str]], node: str = "") -> Sequence[UsingPod]:
        """Return the pods that use claims, have a node and have not ended.

        A claim is given by its namespace and name. With `node`, only the pods on that node are
        listed, otherwise all pods of the claims' namespaces.
        """
        pods = []
        # The API server takes an empty selector for none.
        selector = f"spec.nodeName={node}" if node else ""
        for namespace in sorted({namespace for namespace, _ in claims}):
            path = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods"
            for pod in self._lists.whole(path, "PodList", fieldSelector=selector).items:
                place = (pod.get("spec") or {}).get("nodeName")
                if place and any((namespace, name) in claims for name in claims_of(pod)):
                    metadata = pod["metadata"]
                    is_going = bool(metadata.get("deletionTimestamp"))
                    found = UsingPod(namespace, metadata["name"], metadata["uid"], place, is_going)
                    pods.append(found)
        return pods

    def evict(self, pod: UsingPod) -> str:
        """Request the eviction of a pod; return why it is refused for now, or an empty text.

        The pod's UID is a precondition, so that no later pod of that name is evicted.
        """
        path = (
            f"/api/v1/namespaces/{quote(pod.namespace, safe='')}/pods/{quote(pod.name, safe='')}"
            "/eviction"
        )
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod.name, "namespace": pod.namespace},
            "deleteOptions": {"preconditions": {"uid": pod.uid}},
        }
        try:
            self._objects.create(path, eviction)
        except errors.ClusterRefused as error:
            if error.reason in _GONE:
                return ""
            if error.reason == _TOO_MANY:
                return str(error)
            raise
        return ""
