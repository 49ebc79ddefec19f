"""What checks do to the nodes of a lab, and how they see that a node is as before."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from cluster import checks, installation, objects, removal
from cluster.installation import Held
from cluster.kubectl import path
from cluster.site import Failed, Lab, Site

# Sidecars try again after this time at the latest, and ask for capacities as often, in seconds.
_RETRY_SECONDS = 300
# The grace after which a controller forgets what was on a deleted node, as
# agent/extras/controller/enrolment.py has it, and the time until it notices; in seconds.
FORGOTTEN_SECONDS, NOTICED_SECONDS = 600, 120


def lab(site: Site) -> Lab:
    """The check's lab; raises Failed where there is none."""
    if site.lab is None:
        raise Failed("there is no lab (--lab)")
    return site.lab


def patient(site: Site) -> Site:
    """The site, with time for what a sidecar does at its next try."""
    return dataclasses.replace(site, limit_seconds=site.limit_seconds + _RETRY_SECONDS)


def found_anew(site: Site) -> Site:
    """The site in the cluster as it is now, as after another installation of Carver."""
    like = str(path(site.place.like, "metadata", "name", default=""))
    place = installation.find(site.kubectl, site.place.driver, site.place.image, like)
    return dataclasses.replace(site, place=place)


@contextmanager
def installed_with(site: Site, values: str) -> Iterator[Site]:
    """Carver with one more file of values while this lasts; the site with that Carver.

    The values are those of tests/cluster/values, over the ones with which Carver is installed.
    """
    of_lab = lab(site)
    before = [*of_lab.values]
    try:
        of_lab.install_values([*before, values])
        yield found_anew(site)
    finally:
        of_lab.install_values(before)


def is_back(site: Site, node: str) -> None:
    """Wait until a node is ready, and Carver serves there with its driver registered."""

    def ready() -> bool | None:
        if not checks.is_ready(site.kubectl.find("nodes", node)):
            return None
        drivers = path(
            site.kubectl.find("csinodes.storage.k8s.io", node), "spec", "drivers", default=[]
        )
        if site.place.driver not in {one["name"] for one in drivers or []}:
            return None
        return True if checks.is_ready(site.place.pod_on(site.kubectl, node)) else None

    site.until(f"{node} is ready, and Carver serves there", ready)
    # What was said of a pod before its node went away is not what is so now.
    held(site, node)


def held(site: Site, node: str) -> dict[str, Held]:
    """What Carver on a node says that the node holds, by the ids; waits until Carver answers."""
    return site.until(f"Carver on {node} answers", lambda: site.place.held(site.kubectl, node))


def without_leader(site: Site) -> str:
    """Choose a node on which no controller's pod runs, or the last one where each has one."""
    pods = site.place.controller_pods(site.kubectl)
    busy = {str(path(one, "spec", "nodeName")) for one in pods}
    return next((one for one in site.place.nodes if one not in busy), site.place.nodes[-1])


def others_than(site: Site, node: str) -> list[str]:
    """All nodes but one; raises Failed where there is no other one."""
    found = [one for one in site.place.nodes if one != node]
    if not found:
        raise Failed("a cluster of one node has no other one")
    return found


@contextmanager
def added(site: Site, copy_of: str = "") -> Iterator[str]:
    """A node that is there while this lasts; where `copy_of` names another one, with its disk."""
    of_lab = lab(site)
    node = of_lab.add_node(copy_of)
    try:
        yield node
    finally:
        try:
            site.persist(f"{node} is deleted", lambda: site.kubectl.delete("nodes", node))
        finally:
            of_lab.remove_node(node)


@contextmanager
def without_carver(site: Site, node: str) -> Iterator[Site]:
    """A node whose Carver ended in good order, and stays away while this lasts.

    The DaemonSet makes no pod for a node with a taint that its pods do not tolerate. Pods of the
    site that this yields may go to the node all the same.
    """
    key, kubectl = objects.WITHOUT_CARVER, site.kubectl
    toleration = {"key": key, "operator": "Exists", "effect": "NoSchedule"}
    place = dataclasses.replace(site.place, tolerations=(*site.place.tolerations, toleration))
    try:
        kubectl("taint", "nodes", node, f"{key}={site.run}:NoSchedule", "--overwrite")

        def gone() -> bool | None:
            every = site.place.pods(kubectl)
            left = [it["metadata"] for it in every if path(it, "spec", "nodeName") == node]
            for one in left:
                if "deletionTimestamp" not in one:
                    kubectl.delete("pods", one["name"], namespace=one["namespace"])
            return None if left else True

        site.until(f"Carver on {node} ends", gone)
        yield dataclasses.replace(site, place=place)
    finally:
        site.persist(f"{node} has Carver again", lambda: removal.untaint(kubectl, site.run))
        is_back(site, node)
