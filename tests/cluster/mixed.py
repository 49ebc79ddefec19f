"""Pods with a claim that is a copy and one that is new: no node must be without one of them."""

from cluster import objects
from cluster.kubectl import Object
from cluster.site import Failed, NotHere, Off, Site

# Where such a pod finds its new volume.
_NEW_PLACE = "/wal"


def mixed_claims(site: Site) -> str:
    """Pods with a restored or cloned claim and a new one start where the source is.

    They name no node, so that the scheduler sends some of them elsewhere first.
    """
    if not site.place.controllers:
        raise Off("no controller serves the cluster (controller.enabled)")
    if len(site.place.nodes) < 2:
        raise NotHere("a cluster of one node has no other one")
    if site.place.no_snapshots:
        raise NotHere(site.place.no_snapshots)
    data, pod, words = site.used("pod")
    kind = {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot"}
    monday = {**kind, "name": site.snapshot("monday", data)}
    twin = {"kind": "PersistentVolumeClaim", "name": data}
    made = {}
    for name, source in {"first": monday, "second": monday, "twin": twin}.items():
        copy, new = site.claim(name, source=source), site.claim(f"{name}-new")
        # The scheduler takes a pod's claims in the order in which the pod has them.
        spec = _spec(site, copy, new, new_first=name == "second")
        made[called := site.called(f"pod-{name}")] = new
        site.apply(objects.pod(site.run, site.check, called, spec))
    node = site.node_of(pod)
    for other in made:
        site.ready(other)
        site.expect(other, words)
        written = f"printf %s {words} > {_NEW_PLACE}/words && sync && cat {_NEW_PLACE}/words"
        site.until(f"pod {other} writes to its new volume", lambda: site.sh(other, written))  # noqa: B023
        if site.node_of(other) != node:
            raise Failed(f"pod {other} is on {site.node_of(other)}, its source on {node}")
    elsewhere = [one for one in made.values() if site.events(one, "ProvisioningFailed")]
    return f"{len(made)} pods on {node}; {len(elsewhere)} of them were sent elsewhere first"


def _spec(site: Site, copy: str, new: str, *, new_first: bool) -> Object:
    """A pod that has both volumes."""
    spec = site.spec(objects.of_claim(copy))
    [container] = spec["containers"]
    mounts = [*container["volumeMounts"], {"name": "new", "mountPath": _NEW_PLACE}]
    volumes = [*spec["volumes"], {**objects.of_claim(new), "name": "new"}]
    return {
        **spec,
        "volumes": volumes[::-1] if new_first else volumes,
        "containers": [{**container, "volumeMounts": mounts}],
    }
