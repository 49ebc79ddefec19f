"""A node lies: a program with its token answers the controller in Carver's place (liar.py)."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster import checks, controller, nodes, objects
from cluster.installation import container
from cluster.kubectl import Object, path
from cluster.site import Failed, Site

_PROGRAM = Path(__file__).with_name("liar.py")
# What a container keeps that runs another program in Carver's place: no probe, no port.
_KEPT = (
    *("name", "image", "imagePullPolicy", "env", "securityContext", "volumeMounts"),
    # The default path is in /dev, which is the node's there.
    *("terminationMessagePath", "terminationMessagePolicy"),
)
# Of an answer: what it must not name of another node's.
_FIELDS = ("volume.volume_id", "volume.accessible_topology")


def lying_node(site: Site) -> str:
    """What a node says of another's volumes and topology is refused, and changes nothing there."""
    checks.needs_controller(site)
    data, pod, words = site.used("pod")
    victim = site.node_of(pod)
    node = nodes.others_than(site, victim)[0]
    known, *_ = site.until("the controllers say what they know", lambda: controller.statuses(site))
    lies = {
        "groups": known[node]["groups"],
        "topology": _segments(site, data),
        "volume_id": str(path(site.volume(data), "spec", "csi", "volumeHandle")),
    }
    refused = controller.refused_answers(site, node)
    with nodes.without_carver(site, node) as tolerant:
        with _liar(site, node, {**lies, "as_other": True}) as asked:
            _is_heard(site, node, "its topology is")
            _serves_as_before(site, victim, "first")
            if heard := asked():
                raise Failed(f"a node that claims the topology of {victim} was asked for {heard}")
        with _liar(site, node, {**lies, "as_other": False}) as asked:
            _is_heard(site, node, "")
            waiting = tolerant.pod("waiting", site.claim("late"), terms=objects.on_nodes([node]))
            for field in _FIELDS:
                site.until(f"{field} is refused", lambda: _refusal(site, "late", node, field))  # noqa: B023
            _serves_as_before(site, victim, "second")
            site.expect(pod, words)
            own = f"pvc-{site.found(site.called('late'))['metadata']['uid']}"
            if {*asked()} != {own}:
                raise Failed(f"the liar was asked for {asked()}, and not for {own} alone")
        count = controller.refused_answers(site, node) - refused
        if count < len(_FIELDS):
            raise Failed(f"{count:.0f} refused answers of {node} were counted, not {len(_FIELDS)}")
    site.ready(waiting)
    site.expect(waiting, site.write(waiting))
    site.expect(pod, words)
    return f"{node} lied of {victim}; {count:.0f} answers were refused"


def _segments(site: Site, claim: str) -> dict[str, str]:
    """The topology segments of the node of a claim's volume."""
    terms = [it for one in site.topology(claim) for it in one["matchExpressions"]]
    return {str(one["key"]): str(one["values"][0]) for one in terms}


def _is_heard(site: Site, node: str, problem: str) -> None:
    """Wait until each controller has a problem with what the liar says of itself; or none."""

    def heard() -> bool | None:
        found = [path(one, node, "problem") for one in controller.statuses(site) or ()]
        as_expected = all(one == problem if not problem else problem in str(one) for one in found)
        return True if found and as_expected else None

    site.until(f"every controller has heard the liar on {node}", heard)


def _serves_as_before(site: Site, node: str, name: str) -> None:
    """See that a claim of a node becomes a volume of that node's."""
    data = site.claim(name)
    pod = site.start(f"pod-{name}", data, terms=objects.on_nodes([node]))
    site.expect(pod, site.write(pod))
    handle = path(site.volume(data), "spec", "csi", "volumeHandle")
    if handle not in nodes.held(site, node):
        raise Failed(f"claim {data} was sent to {node}, which does not have {handle}")


def _refusal(site: Site, name: str, node: str, field: str) -> str | None:
    """The event that says which field of the node's answer was refused; None while there is none.

    Raises Failed where the claim was bound all the same.
    """
    if volume := path(site.found(site.called(name)), "spec", "volumeName"):
        raise Failed(f"a claim was bound to {volume} by a lie of {node}")
    wanted = ("code = Internal", f"cannot pass on the answer of node {node} ", field)
    said = site.events(site.called(name), "ProvisioningFailed")
    return next((one for one in said if all(it in one for it in wanted)), None)


@contextmanager
def _liar(site: Site, node: str, lies: Mapping[str, Any]) -> Iterator[Callable[[], list[str]]]:
    """The liar's pod on a node without Carver; yields what it was asked to create."""
    pod = program_in_place(site, node, [_PROGRAM.read_text(), json.dumps(lies)])
    about, name = pod["metadata"], container(pod["spec"])["name"]

    def printed() -> list[str]:
        words = (f"--namespace={about['namespace']}", f"--container={name}")
        return site.kubectl("logs", about["name"], *words).splitlines()

    def asked() -> list[str]:
        calls = [line.split() for line in printed() if line.startswith("CreateVolume ")]
        return sorted({words[1] for words in calls})

    def found() -> Object | None:
        return site.kubectl.find("pods", about["name"], about["namespace"])

    try:
        site.apply(pod)
        site.until("the liar runs", lambda: found() if checks.is_ready(found()) else None)
        yield asked
    except Failed as error:
        lines = site.until("the liar's log is read", printed)
        raise Failed(f"{error}; the liar's log ends: {' | '.join(lines[-5:])}") from error
    finally:
        site.persist(
            "the liar is deleted",
            lambda: site.kubectl.delete("pods", about["name"], namespace=about["namespace"]),
        )
        site.until("the liar ends", lambda: None if found() else True)


def program_in_place(site: Site, node: str, words: list[str]) -> Object:
    """A pod like Carver's on a node, in which Python runs a program with its arguments."""
    [daemonset, *_] = site.place.daemonsets
    template = daemonset["spec"]["template"]["spec"]
    own = container(template)
    kept = {key: own[key] for key in _KEPT if key in own}
    spec = {
        **{key: it for key, it in template.items() if key not in ("affinity", "nodeSelector")},
        "nodeName": node,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 5,
        "tolerations": [{"operator": "Exists"}],
        "containers": [{**kept, "command": ["python", "-c", *words]}],
    }
    made = objects.pod(site.run, site.check, f"{objects.named(site.run)}-liar", spec)
    made["metadata"]["namespace"] = daemonset["metadata"]["namespace"]
    return made
