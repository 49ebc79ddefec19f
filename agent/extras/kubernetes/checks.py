"""Checks of what Carver needs in the cluster, for `carver doctor --cluster`."""

from collections.abc import Iterator, Sequence

from agent.extras.kubernetes.objects import Lists, Object, Objects
from agent.operations.preflight import FAIL, PASS, WARN, CheckResult, Finding

# Paths in the Kubernetes API: of the Deployments in all namespaces, and of reviews that tell
# whether an account has a right.
DEPLOYMENTS = "/apis/apps/v1/deployments"
REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
# The name of the snapshot-controller's image, and the option with which the sidecars of the nodes
# take snapshots, each of its own node's volumes.
_CONTROLLER = "snapshot-controller"
_DISTRIBUTED = "--enable-distributed-snapshotting"
_VERBS = ("get", "list", "watch")


def all_findings(lists: Lists, objects: Objects) -> Sequence[Finding]:
    """Check what Carver needs in the cluster, and return the findings.

    Raises ClusterSilent, ClusterRefused if the API server refuses or does not answer.
    """
    return tuple(Finding(_CONTROLLER, *finding) for finding in _snapshot_controller(lists, objects))


def _snapshot_controller(lists: Lists, objects: Objects) -> Iterator[CheckResult]:
    """Check that a snapshot-controller runs, is distributed if need be, and then may list nodes.

    Distributed means that it runs with --enable-distributed-snapshotting. It need not be
    distributed if Carver's controller for the whole cluster runs. A distributed snapshot-controller
    keeps a cache of nodes. Without the right to list nodes the cache never fills, and the
    snapshot-controller serves no driver of the cluster (external-snapshotter,
    cmd/snapshot-controller/main.go).
    """
    containers = [
        (deployment, container)
        for deployment in lists.whole(DEPLOYMENTS, "DeploymentList").items
        for container in deployment["spec"]["template"]["spec"]["containers"]
    ]
    is_central = any(_is_carver_controller(container) for _, container in containers)
    snapshot_controllers = [
        (deployment, container)
        for deployment, container in containers
        if _CONTROLLER in container.get("image", "").rpartition("/")[2]
    ]
    if not snapshot_controllers:
        yield WARN, "there is none: snapshots cannot be made", "see docs/install.md"
    for deployment, container in snapshot_controllers:
        metadata = deployment["metadata"]
        name = f"{metadata['namespace']}/{metadata['name']}"
        if not _is_distributed(container) and is_central:
            yield PASS, f"{name} runs; Carver's controller takes up all snapshots", ""
            continue
        if not _is_distributed(container):
            yield (
                WARN,
                f"{name} runs without {_DISTRIBUTED}: no node's sidecar takes up a snapshot",
                f"let its account get, list and watch nodes, then give it {_DISTRIBUTED}",
            )
            continue
        account = deployment["spec"]["template"]["spec"].get("serviceAccountName", "default")
        user = f"system:serviceaccount:{metadata['namespace']}:{account}"
        refused_verbs = [verb for verb in _VERBS if not _may(objects, user, verb)]
        if refused_verbs:
            yield (
                FAIL,
                f"{name} may not {', '.join(refused_verbs)} nodes, so it serves no driver's"
                " snapshots",
                f"give {user} a ClusterRole with get, list and watch of nodes (docs/install.md)",
            )
        else:
            yield PASS, f"{name} is distributed, and may get, list and watch nodes", ""


def _is_carver_controller(container: Object) -> bool:
    """Return whether a container runs `carver controller`, by a variable that the chart sets."""
    names = {variable.get("name") for variable in container.get("env", ())}
    return "CARVER_CONTROLLER_AUTHORITY" in names


def _is_distributed(container: Object) -> bool:
    arguments = [*container.get("command", ()), *container.get("args", ())]
    return any(argument in (_DISTRIBUTED, f"{_DISTRIBUTED}=true") for argument in arguments)


def _may(objects: Objects, user: str, verb: str) -> bool:
    group = ":".join(["system:serviceaccounts", user.split(":")[2]])
    spec = {
        "user": user,
        "groups": ["system:serviceaccounts", group, "system:authenticated"],
        "resourceAttributes": {"verb": verb, "resource": "nodes"},
    }
    kind = "SubjectAccessReview"
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": spec}
    return objects.review(REVIEWS, review).get("status", {}).get("allowed") is True
