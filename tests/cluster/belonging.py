"""Nodes that are silent, copied, without certificates, or gone for good, and what they have.

The rule is in docs/cluster.md, "Who belongs, and whose a volume group is". Only `run.py --lab` runs
these checks.
"""

import json

from cluster import checks, controller, nodes, objects
from cluster.kubectl import Object, path
from cluster.site import Failed, Lab, Site

# How long Carver stays away from a node, in seconds: more than five minutes.
_QUIET_SECONDS = 330
# The shortest grace of orphans that Carver accepts, in seconds.
_ORPHAN_SECONDS = 60
# Within this time each node is reached again after the authority was lost, in seconds.
_AUTHORITY_SECONDS = 180


def quiet_node(site: Site) -> str:
    """A node whose Carver ended in good order stays a member, which does not answer."""
    checks.needs_controller(site)
    data, pod, words = site.used("pod")
    node = site.node_of(pod)
    with nodes.without_carver(site, node) as tolerant:
        site.until(f"{node} is silent", lambda: controller.all_answer(site, node))
        site.clock.sleep(_QUIET_SECONDS)
        controller.require_silent_member(site, node)
        controller.restart(site)
        site.until(f"all but {node} answer", lambda: controller.all_answer(site, node))
        controller.require_silent_member(site, node)
        waiting = tolerant.pod("waiting", site.claim("other"), terms=site.topology(data))
        site.expect(pod, words)
    site.ready(waiting)
    site.expect(waiting, site.write(waiting))
    site.expect(pod, words)
    return f"{node} was silent for {_QUIET_SECONDS} s and more, also to new controllers"


def cloned_group(site: Site) -> str:
    """A node is added whose volume group is a copy: the original alone serves what there is.

    New volumes are made on neither, until the copy is gone.
    """
    checks.needs_controller(site)
    data, pod, words = site.used("pod")
    original = site.node_of(pod)
    where = objects.on_nodes([original])
    old = site.claim("old")
    site.stop(site.start("user", old, terms=where))
    doomed = site.volume(old)
    with nodes.added(site, copy_of=original) as clone:
        nodes.is_back(site, clone)
        _is_contested(site, original, clone)
        with checks.cordoned(site, clone):
            controller.restart(site)
        _is_contested(site, original, clone)
        refused = _none_is_made(site, original, clone)
        site.expect(pod, words)
        site.expand(data, 2)
        site.has_size(data, 2)
        _is_deleted_at(site, original, clone, doomed)
        site.expect(pod, words)
    nodes.patient(site).ready(refused)
    site.expect(refused, site.write(refused))
    return f"{clone} had the group of {original}, where a claim was served once {clone} was gone"


def _is_contested(site: Site, original: str, clone: str) -> None:
    """Wait until each controller says of both nodes what is wrong, and what to do."""
    wanted = (
        f"nodes {' and '.join(sorted((original, clone)))} both claim volume group",
        f"PersistentVolumes name {original},",
        "vgchange --uuid, or vgimportclone",
    )

    def said() -> bool | None:
        found = controller.statuses(site) or []
        problems = [str(path(one, it, "problem")) for one in found for it in (original, clone)]
        are_named = all(word in one for one in problems for word in wanted)
        return True if problems and are_named else None

    site.until(f"every controller names {original} and {clone}, and the remedy", said)


def _none_is_made(site: Site, original: str, clone: str) -> str:
    """See that no claim is served on either node; the pod that waits for the original."""
    pods = {
        node: site.pod(f"on-{name}", site.claim(f"new-{name}"), terms=objects.on_nodes([node]))
        for name, node in (("clone", clone), ("original", original))
    }
    for pod in pods.values():
        site.refused(pod, "free storage")
    site.until(f"{clone} has no capacity", lambda: _has_no_capacity(site, clone))
    own = f"{site.namespace}/{site.called('new-')}"
    for node in pods:
        if found := [key for key, it in nodes.held(site, node).items() if it.claim.startswith(own)]:
            raise Failed(f"a volume was made on {node}: {', '.join(found)}")
    site.stop(pods[clone])
    return pods[original]


def _has_no_capacity(site: Site, node: str) -> bool | None:
    key = f"topology.{site.place.driver}/node"
    found = [
        str(one.get("capacity"))
        for one in site.kubectl.all("csistoragecapacities.storage.k8s.io")
        if path(one, "nodeTopology", "matchLabels", key) == node
    ]
    return True if found and {*found} == {"0"} else None


def _is_deleted_at(site: Site, original: str, clone: str, volume: Object) -> None:
    """Delete the claim of a volume that both disks have: it goes on the original alone."""
    handle = path(volume, "spec", "csi", "volumeHandle")
    site.stop(str(path(volume, "spec", "claimRef", "name")), "persistentvolumeclaims")
    _goes(site, volume)
    if handle in nodes.held(site, original):
        raise Failed(f"{handle} was deleted, and is on {original} still")
    if handle not in nodes.held(site, clone):
        raise Failed(f"{handle} was deleted on {clone}, which has a copy of the group")


def _goes(site: Site, volume: Object) -> None:
    name = volume["metadata"]["name"]
    site.until(
        f"PersistentVolume {name} goes",
        lambda: None if site.kubectl.find("persistentvolumes", name) else True,
    )


def forgotten_node(site: Site) -> str:
    """What was on a node that was deleted is forgotten, once every member says it is not there."""
    checks.needs_controller(site)
    with nodes.installed_with(site, "forgetting") as forgetting:
        return _forgotten(forgetting, nodes.lab(forgetting))


def _forgotten(site: Site, lab: Lab) -> str:
    node = nodes.without_leader(site)
    silent = nodes.others_than(site, node)[0]
    data = site.claim("data")
    pod = site.start("pod", data, terms=objects.on_nodes([node]))
    site.write(pod)
    volume = site.volume(data)
    handle = str(path(volume, "spec", "csi", "volumeHandle"))
    site.stop(pod)
    lab.power_off(node)
    try:
        site.kubectl.delete("nodes", node)
        with nodes.without_carver(site, silent):
            site.stop(data, "persistentvolumeclaims")
            site.clock.sleep(nodes.FORGOTTEN_SECONDS + nodes.NOTICED_SECONDS)
            wanted = ("UNAVAILABLE", f"node {node} was deleted", silent)
            for said in controller.delete_volume(site, handle):
                if not all(one in said for one in wanted):
                    raise Failed(f"while {silent} is silent a controller says of {handle}: {said}")
            if site.kubectl.find("persistentvolumes", volume["metadata"]["name"]) is None:
                raise Failed(f"{handle} was forgotten while {silent} was silent")
        _goes(nodes.patient(site), volume)
    finally:
        lab.power_on(node)
        nodes.is_back(site, node)
        # In this order: the deletion of what was not forgotten may succeed now.
        is_named = site.kubectl.find("persistentvolumes", volume["metadata"]["name"]) is not None
        is_orphan = not is_named and handle in nodes.held(site, node)
        if is_orphan:
            _erase_orphan(site, node, handle)
    if not is_orphan:
        raise Failed(f"{node} came back without {handle}, which nothing named any more")
    return f"{node} was deleted and {handle} forgotten; {node} came back with it, as an orphan"


def _erase_orphan(site: Site, node: str, handle: str) -> None:
    """Have a controller erase a volume that nothing in the cluster names any more."""
    site.until("every node answers", lambda: controller.all_answer(site))
    [pod, *_] = site.place.controller_pods(site.kubectl)
    grace = f"--orphan-grace-seconds={_ORPHAN_SECONDS}"
    found = {one["name"] for one in json.loads(controller.orphans(site, pod, "--json", grace))}
    if handle not in found:
        raise Failed(f"{handle} is no orphan: {', '.join(sorted(found)) or 'there is none'}")
    site.clock.sleep(_ORPHAN_SECONDS + 1)
    controller.orphans(site, pod, grace, "--delete", handle, "--yes")

    def erased() -> bool | None:
        return None if handle in nodes.held(site, node) else True

    site.until(f"{handle}, an orphan, goes from {node}", erased)


def authority_lost(site: Site) -> str:
    """The authority's Secret is deleted: within minutes each node has another's certificate."""
    checks.needs_controller(site)
    _, pod, words = site.used("pod")
    before = _trusted(site)
    where, name = _authority(site)
    site.persist(
        "the authority is deleted", lambda: site.kubectl.delete("secrets", name, namespace=where)
    )
    controller.restart(site)
    began = site.clock.monotonic()
    site.until("every controller reaches every node", lambda: controller.all_answer(site))
    seconds = site.clock.monotonic() - began
    if _trusted(site) == before:
        raise Failed("nodes and controllers trust the authority that was lost")
    if seconds > _AUTHORITY_SECONDS:
        raise Failed(f"the nodes were reached after {seconds:.0f} s, not {_AUTHORITY_SECONDS}")
    for node in site.place.nodes:
        one = site.start(f"pod-{node}", site.claim(node), terms=objects.on_nodes([node]))
        site.expect(one, site.write(one))
    site.expect(pod, words)
    return f"all nodes were reached {seconds:.0f} s after the controllers had started"


def _authority(site: Site) -> tuple[str, str]:
    """The namespace and the name of the authority's Secret and ConfigMap."""
    [deployment, *_] = site.place.controllers
    for one in deployment["spec"]["template"]["spec"]["containers"]:
        for it in one.get("env", ()):
            if it["name"] == "CARVER_CONTROLLER_AUTHORITY":
                return str(deployment["metadata"]["namespace"]), str(it["value"])
    raise Failed("the controller names no authority (CARVER_CONTROLLER_AUTHORITY)")


def _trusted(site: Site) -> str:
    """The certificates that nodes and controllers trust, as they are published."""
    where, name = _authority(site)
    return str(path(site.kubectl.find("configmaps", name, where), "data", "ca.crt"))
