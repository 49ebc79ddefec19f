"""The checks that want a lab: nodes lose power, stop, come back late, or are gone for good.

Only `run.py --lab` runs them, in the cluster of `make cluster`: no other cluster's power is cut. As
the other checks, each makes what it needs and leaves nothing; each gives the nodes back as it found
them, also where it fails.
"""

from collections.abc import Callable, Mapping

from cluster import checks, nodes, objects, removal
from cluster.belonging import authority_lost, cloned_group, forgotten_node, quiet_node
from cluster.checks import Check, lines_of
from cluster.evacuating import evacuation, evacuation_interrupted
from cluster.kubectl import path
from cluster.lying import lying_node
from cluster.releasing import released_claim
from cluster.sick import sick_disk
from cluster.site import Failed, Lab, Site

# How long a node is paused, in seconds: longer than a call of a sidecar may take, shorter than the
# time after which Kubernetes takes a node of the lab for lost.
_AWAY_SECONDS = 60
# How far a node's clock is set ahead, in seconds: more than the validity of a token of a pod.
_AHEAD_SECONDS = 3600
# Within this time a pod that waits for a node which was deleted runs elsewhere, in seconds.
_ELSEWHERE_SECONDS = 180


def power_cut(site: Site) -> str:
    """A node loses its power under a writer: each acknowledged line is there afterwards."""
    return _interrupted(site, lambda lab, node: lab.reset(node))


def reboot(site: Site) -> str:
    """A node is rebooted in good order under a writer: every line is there afterwards."""
    return _interrupted(site, lambda lab, node: lab.reboot(node))


def _interrupted(site: Site, interrupt: Callable[[Lab, str], None]) -> str:
    data = site.claim("data")
    writer = site.start("writer", data, script=checks.WRITER)
    node = site.node_of(writer)
    acknowledged = site.until(
        "the writer has written some lines",
        lambda: len(lines) if len(lines := lines_of(site, writer)) >= 5 else None,
    )
    interrupt(nodes.lab(site), node)
    nodes.is_back(site, node)
    site.stop(writer)
    following = site.start("next", data, terms=site.topology(data))
    found = site.sh(following, f"cat {objects.PLACE}/log").splitlines()
    numbers = [int(line.split()[0]) for line in found]
    if numbers != list(range(1, len(numbers) + 1)):
        raise Failed(f"the writer's {len(numbers)} lines are not all there, or not in order")
    if len(numbers) < acknowledged:
        raise Failed(f"{acknowledged} lines were acknowledged, {len(numbers)} are there")
    return f"{acknowledged} lines acknowledged, {len(numbers)} there"


def pause(site: Site) -> str:
    """While a node answers nothing the others serve; afterwards its claims are served too."""
    _, pod, words = site.used("pod")
    node = site.node_of(pod)
    others = nodes.others_than(site, node)
    lab = nodes.lab(site)
    lab.pause(node)
    try:
        elsewhere = site.start("elsewhere", site.claim("other"), terms=objects.on_nodes(others))
        site.expect(elsewhere, site.write(elsewhere))
        waiting = site.pod("waiting", site.claim("late"), terms=objects.on_nodes([node]))
        site.clock.sleep(_AWAY_SECONDS)
    finally:
        lab.resume(node)
    site.ready(waiting)
    site.expect(waiting, site.write(waiting))
    site.expect(pod, words)
    return f"{node} was paused"


def clock(site: Site) -> str:
    """A node whose clock is an hour ahead makes, serves and deletes volumes as before."""
    data, pod, words = site.used("pod")
    node = site.node_of(pod)
    lab = nodes.lab(site)
    lab.set_clock(node, _AHEAD_SECONDS)
    try:
        where = objects.on_nodes([node])
        other = site.start("other", site.claim("other"), terms=where)
        written = site.write(other)
        if not site.place.no_snapshots:
            source = checks.of_snapshot(site.snapshot("monday", data))
            restored = site.start("third", site.claim("restored", source=source), terms=where)
            site.expect(restored, words)
        site.stop(other)
        site.expect(site.start("fourth", site.called("other"), terms=where), written)
    finally:
        lab.set_clock(node, 0)
    site.expect(pod, words)
    return f"{node} was {_AHEAD_SECONDS} s ahead"


def controller_killed(site: Site) -> str:
    """The controller's process is killed while claims are made: every claim gets its volume."""
    checks.needs_controller(site)
    names = [f"data-{number}" for number in range(4)]
    pods = [site.pod(f"pod-{one}", site.claim(one)) for one in names]
    killed = _kill_controllers(site)
    for pod in pods:
        site.ready(pod)
        site.expect(pod, site.write(pod))
    return f"{killed} processes were killed"


def _kill_controllers(site: Site) -> int:
    """Kill `carver controller` on every node by SIGKILL; return how many there were."""
    lab = nodes.lab(site)
    killed = sum(lab.kill(node, "carver controller") for node in lab.nodes)
    if not killed:
        raise Failed("no process of `carver controller` was found on any node")
    return killed


def dead_node(site: Site) -> str:
    """A pod whose claim waits for a node that is gone for good runs elsewhere, by itself.

    The node's power is cut, its Node object deleted. In the end it comes back, as another would.
    """
    checks.needs_controller(site)
    lab = nodes.lab(site)
    node = nodes.without_leader(site)
    others = nodes.others_than(site, node)
    lab.power_off(node)
    try:
        with checks.cordoned(site, *others):
            # The scheduler does not know yet that the node is off, and has no other one.
            waiting = site.pod("waiting", site.claim("data"))
            site.until("the claim is sent to the node", lambda: _is_sent(site, "data", node))
        site.kubectl.delete("nodes", node)
        began = site.clock.monotonic()
        site.ready(waiting)
        seconds = site.clock.monotonic() - began
        if (found := site.node_of(waiting)) == node:
            raise Failed(f"pod {waiting} is said to run on {node}, which is off")
        if seconds > _ELSEWHERE_SECONDS:
            raise Failed(f"it ran elsewhere after {seconds:.0f} s, not {_ELSEWHERE_SECONDS}")
    finally:
        lab.power_on(node)
        nodes.is_back(site, node)
    site.expect(waiting, site.write(waiting))
    return f"{node} was deleted; {seconds:.0f} s later the pod ran on {found}"


def modes(site: Site) -> str:
    """Carver goes from one controller to sidecars on each node, and back, under a writer."""
    checks.needs_controller(site)
    data = site.claim("data")
    writer = site.start("writer", data, script=checks.WRITER)
    kept, pod, words = site.used("pod")
    monday = "" if site.place.no_snapshots else site.snapshot("monday", kept)
    with nodes.installed_with(site, "sidecars") as distributed:
        if distributed.place.controllers:
            raise Failed("the controller is still installed")
        _serves(distributed, "there", kept, pod, words, monday)
    _serves(nodes.found_anew(site), "back", kept, pod, words, monday)
    numbers = [int(line.split()[0]) for line in lines_of(site, writer)]
    if numbers != list(range(1, len(numbers) + 1)):
        raise Failed(f"the writer's {len(numbers)} lines are not all there, or not in order")
    return f"a writer wrote {len(numbers)} lines meanwhile"


def _serves(site: Site, name: str, kept: str, pod: str, words: str, monday: str) -> None:
    """See that old volumes and snapshots serve, and that new ones are made and go."""
    site.expect(pod, words)
    where = site.topology(kept)
    fresh = site.start(f"{name}-fresh", site.claim(f"{name}-data"), terms=where)
    site.expect(fresh, site.write(fresh))
    if monday:
        claim = site.claim(f"{name}-restored", source=checks.of_snapshot(monday))
        site.expect(site.start(f"{name}-reader", claim, terms=where), words)
    site.stop(fresh)
    site.stop(site.called(f"{name}-data"), "persistentvolumeclaims")


def added_node(site: Site) -> str:
    """A node that is added later gets Carver and serves claims; it is removed in the end."""
    with nodes.added(site) as node:
        nodes.is_back(site, node)
        pod = site.start("pod", site.claim("data"), terms=objects.on_nodes([node]))
        site.expect(pod, site.write(pod))
        site.stop(pod)
        site.stop(site.called("data"), "persistentvolumeclaims")
        _no_volume(site)
    return f"{node} came and went"


def _no_volume(site: Site) -> None:
    def gone() -> bool | None:
        return None if removal.volumes_left(site) else True

    site.until("the volume goes before its node does", gone)


def _is_sent(site: Site, name: str, node: str) -> bool | None:
    claim = site.found(site.called(name))
    selected = path(claim, "metadata", "annotations", "volume.kubernetes.io/selected-node")
    said = site.events(site.called(name), "ProvisioningFailed")
    return True if selected == node and any(node in one for one in said) else None


# In the order in which they run: what costs more comes later.
ALL: Mapping[str, Check] = {
    check.__name__.replace("_", "-"): check
    for check in (
        *(controller_killed, pause, clock, modes, reboot, power_cut, sick_disk),
        *(dead_node, evacuation, evacuation_interrupted, authority_lost, lying_node, quiet_node),
        *(added_node, cloned_group, forgotten_node, released_claim),
    )
}
