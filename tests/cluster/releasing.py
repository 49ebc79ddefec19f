"""The check of claims of a node that is lost for good: they are released, and their data are kept.

The rule is in docs/evacuation.md, "A node that is lost". Only `run.py --lab` runs this check.
"""

import dataclasses
from collections.abc import Sequence

from cluster import checks, controller, nodes
from cluster.kubectl import Object, path
from cluster.site import Failed, Site
from cluster.writers import Writers, claim_of, start_writers

_PODS = 2
# Lines of a writer before the node is lost, and of the one that begins anew.
_LINES = 5
# The grace after which the claim of a node that is forgotten is released, as
# agent/extras/evacuation/lost_claims.py has it, in seconds.
GRACE_SECONDS = 300
# So long before the end of the grace it is seen that nothing was released, in seconds.
_BEFORE_SECONDS = 30
_VOLUMES = "persistentvolumes"


@dataclasses.dataclass(frozen=True)
class _Instance:
    """A pod of the StatefulSet, its claim and its PersistentVolume, before the node is lost."""

    pod: Object
    claim: Object
    volume: Object

    @property
    def name(self) -> str:
        """The pod's name, which the pod that is made in its place has, too."""
        return str(self.pod["metadata"]["name"])

    @property
    def node(self) -> str:
        return str(self.pod["spec"]["nodeName"])


def released_claim(site: Site) -> str:
    """The claim of a node that is lost for good is released, and its pod begins anew elsewhere.

    The data of the lost node are kept, and the other pod of the StatefulSet goes on.
    """
    checks.needs_controller(site)
    with nodes.installed_with(site, "releasing") as releasing:
        releasing.until("all nodes answer", lambda: controller.all_answer(releasing))
        with nodes.added(releasing) as node:
            nodes.is_back(releasing, node)
            return _released(nodes.patient(releasing), node)


def _released(site: Site, node: str) -> str:
    lost, kept = _database(site, node)
    writers, of_lost = Writers(site, [kept.name]), Writers(site, [lost.name])
    for one in (writers, of_lost):
        one.go_on(_LINES)
    nodes.lab(site).power_off(node)
    began = site.clock.monotonic()
    site.persist(f"{node} is deleted", lambda: site.kubectl.delete("nodes", node))
    site.until(f"{lost.name} waits for its claim", lambda: _waits(site, lost))
    early = nodes.FORGOTTEN_SECONDS + GRACE_SECONDS - _BEFORE_SECONDS
    site.clock.sleep(max(0, began + early - site.clock.monotonic()))
    for it in (lost, kept):
        _has_its_claim(site, it, f"{early} s after {node} was deleted, in the grace")
    _is_replaced(site, lost)
    seconds = site.clock.monotonic() - began
    _begins_anew(site, lost, of_lost.lines(lost.name))
    _is_kept(site, lost)
    for name, reason, namespace in (
        (lost.volume["metadata"]["name"], "KeptOnNodeLoss", "default"),
        (claim_of(lost.name), "ReleasedOnNodeLoss", ""),
        (claim_of(lost.name), "ReplacedOnNodeLoss", ""),
    ):
        _is_said(site, name, reason, namespace)
    _has_its_claim(site, kept, f"{claim_of(lost.name)} was released")
    _goes_on(site, kept, writers)
    return f"{seconds:.0f} s after {node} was deleted {lost.name} ran with an empty volume"


def _database(site: Site, node: str) -> tuple[_Instance, _Instance]:
    """Start two writers, one of them on the node, whose claims may be released; that one first."""
    neighbour = site.place.nodes[0]
    wish = {f"release.{site.place.driver}/on-node-loss": "true"}
    with checks.cordoned(site, *nodes.others_than(site, neighbour)):
        names = start_writers(site, _PODS, is_spread=True, annotations=wish)
    found = [_instance(site, one) for one in names]
    found.sort(key=lambda one: one.node != node)
    if (there := [one.node for one in found]) != [node, neighbour]:
        raise Failed(f"the pods run on {', '.join(there)}, and not on {node} and {neighbour}")
    return found[0], found[1]


def _instance(site: Site, name: str) -> _Instance:
    claim = claim_of(name)
    return _Instance(site.ready(name), site.found(claim), site.volume(claim))


def _pod_now(site: Site, one: _Instance) -> Object | None:
    """The pod that was made in place of an instance's pod; None while there is none."""
    pod = site.kubectl.find("pods", one.name, site.namespace)
    return None if pod is None or _uid(pod) == _uid(one.pod) else pod


def _waits(site: Site, lost: _Instance) -> bool | None:
    """True once Kubernetes has removed the pod of the lost node, and the one in its place waits."""
    pod = _pod_now(site, lost)
    return True if pod is not None and not path(pod, "spec", "nodeName") else None


def _has_its_claim(site: Site, one: _Instance, when: str) -> None:
    """Raise Failed where a claim is another one than before, or none, or is being deleted."""
    name = claim_of(one.name)
    found = site.until(f"claim {name} is read", lambda: site.found(name))
    is_same = found and _uid(found) == _uid(one.claim)
    if not is_same or "deletionTimestamp" in found["metadata"]:
        raise Failed(f"claim {name} on {one.node} is not what it was: {when}")


def _is_replaced(site: Site, lost: _Instance) -> None:
    """Wait until another claim has the place of the lost one, and a pod runs with it."""
    name, late = claim_of(lost.name), nodes.NOTICED_SECONDS + GRACE_SECONDS
    # A look that comes late begins the grace anew.
    patient = dataclasses.replace(site, limit_seconds=site.limit_seconds + late)

    def is_other() -> bool | None:
        found = site.found(name)
        return True if found and _uid(found) != _uid(lost.claim) else None

    patient.until(f"claim {name} is released and made anew", is_other)

    def runs() -> bool | None:
        pod = _pod_now(site, lost)
        node = str(path(pod, "spec", "nodeName"))
        is_there = checks.is_ready(pod) and site.kubectl.find("nodes", node)
        return True if is_there else None

    site.until(f"{lost.name} runs on a node that is there", runs)


def _begins_anew(site: Site, lost: _Instance, before: Sequence[str]) -> None:
    """See that the pod in place of the lost one writes from the first line on, to another volume.

    `before` has the lines of the lost one.
    """
    bound = site.volume(claim_of(lost.name))["metadata"]
    if bound["name"] == lost.volume["metadata"]["name"]:
        raise Failed(f"claim {claim_of(lost.name)} has its old PersistentVolume {bound['name']}")
    writers = Writers(site, [lost.name])
    writers.go_on(_LINES)
    writers.longest_pause()
    if writers.lines(lost.name)[0] == before[0]:
        raise Failed(f"{lost.name} goes on where it was on {lost.node}: its volume was not empty")


def _goes_on(site: Site, kept: _Instance, writers: Writers) -> None:
    """See that a pod is the one of before, and has written all the time."""
    pod = site.ready(kept.name)
    if _uid(pod) != _uid(kept.pod):
        raise Failed(f"{kept.name} on {kept.node} was made anew")
    writers.go_on()
    writers.longest_pause()


def _is_kept(site: Site, lost: _Instance) -> None:
    """See that the PersistentVolume of the released claim is there, and can be given back to it."""
    name = lost.volume["metadata"]["name"]
    found = site.kubectl.find(_VOLUMES, name)
    if found is None or "deletionTimestamp" in found["metadata"]:
        raise Failed(f"PersistentVolume {name} of the released claim is not kept")
    if (policy := path(found, "spec", "persistentVolumeReclaimPolicy")) != "Retain":
        raise Failed(f"PersistentVolume {name} of the released claim is {policy}, not Retain")
    if path(found, "spec", "claimRef", "uid") != _uid(lost.claim):
        raise Failed(f"PersistentVolume {name} is not that of the released claim any more")
    said = path(found, "metadata", "annotations", default={})
    prefix = f"release.{site.place.driver}"
    former = path(lost.volume, "spec", "persistentVolumeReclaimPolicy")
    if said.get(f"{prefix}/reclaim-policy") != former or f"{prefix}/claim" not in said:
        raise Failed(f"PersistentVolume {name} has no note that it was {former}: {said}")


def _is_said(site: Site, name: str, reason: str, namespace: str) -> None:
    site.until(
        f"an Event on {name} says {reason}",
        lambda: site.events(name, reason, namespace) or None,
    )


def _uid(one: Object) -> str:
    return str(one["metadata"]["uid"])
