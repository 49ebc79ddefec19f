"""What the controllers of a cluster say: of each node, in their metrics, and to calls."""

import json
import re

from cluster.checks import is_ready
from cluster.installation import container, inside
from cluster.kubectl import Object, path
from cluster.site import Failed, Site

NODE_ANSWERS = "carver_controller_node_answers"
REFUSED_ANSWERS = "carver_controller_refused_answers_total"
# How the provisioner has a volume deleted; prints the code and the sentence of the answer.
DELETE = """\
import os, sys
from pathlib import Path
from agent.csi.client import Client
import grpc
with Client(Path(os.environ["CARVER_ENDPOINT"])) as caller:
    try:
        caller.delete(sys.argv[1])
    except grpc.RpcError as error:
        print(error.code().name, error.details())
    else:
        print("OK")
"""


def statuses(site: Site) -> list[Object] | None:
    """What each controller says of each node, by the node's name; None while one does not serve."""
    pods = site.place.controller_pods(site.kubectl)
    if not pods or not all(map(is_ready, pods)):
        return None
    # The exit code is 1 while a node does not answer.
    shown = [
        inside_of(site, one, "sh", "-c", "carver controller status --json || :") for one in pods
    ]
    try:
        return [by_node(one) for one in shown]
    except json.JSONDecodeError:
        return None


def by_node(status: str) -> Object:
    """What `carver controller status --json` prints, by the node's name. Raises JSONDecodeError."""
    return {one["name"]: one for one in json.loads(status)["nodes"]}


def all_answer(site: Site, *silent: str) -> bool | None:
    """True if at every controller all nodes answer, apart from some that do not; None if not so."""
    for one in (found := statuses(site) or []):
        if {name for name, it in one.items() if it["problem"]} != {*silent}:
            return None
    return True if found else None


def restart(site: Site) -> None:
    """Delete the controllers' pods, and wait until as many others serve in their place."""
    old = site.place.controller_pods(site.kubectl)
    gone = {one["metadata"]["uid"] for one in old}
    for one in old:
        about = one["metadata"]
        site.persist(
            "a controller's pod is deleted",
            lambda: site.kubectl.delete("pods", about["name"], namespace=about["namespace"]),  # noqa: B023
        )

    def replaced() -> bool | None:
        now = site.place.controller_pods(site.kubectl)
        are_new = gone.isdisjoint(one["metadata"]["uid"] for one in now)
        return True if are_new and len(now) >= len(old) and all(map(is_ready, now)) else None

    site.until("other controllers serve", replaced)
    site.until("other controllers say what they know", lambda: statuses(site))


def refused_answers(site: Site, node: str) -> float:
    """How many answers of a node the controllers refused since they were started."""
    pods = site.place.controller_pods(site.kubectl)
    return sum(_metric(site, one, REFUSED_ANSWERS, node) or 0 for one in pods)


def require_silent_member(site: Site, node: str) -> None:
    """Raise Failed unless every controller has a node as a member that does not answer.

    So its status, its metrics, and a list of all volumes, which is refused with the node's name.
    """
    for one in site.until("the controllers say what they know", lambda: statuses(site)):
        if not (path(one, node, "problem") or ""):
            raise Failed(f"a controller knows {sorted(one)}, and of {node} no problem")
    for pod in site.place.controller_pods(site.kubectl):
        name = pod["metadata"]["name"]
        if (found := _metric(site, pod, NODE_ANSWERS, node)) != 0:
            raise Failed(f"{NODE_ANSWERS} of {node} is {found} at {name}, and not 0")
        # It lists all volumes first, and ends where that list is not whole.
        said = inside_of(site, pod, "sh", "-c", "carver controller orphans 2>&1 || :")
        if node not in said:
            raise Failed(f"{name} lists the volumes of a cluster without {node}: {said.strip()}")


def delete_volume(site: Site, handle: str) -> list[str]:
    """Have every controller delete a volume; what each answers, its code first."""
    pods = site.place.controller_pods(site.kubectl)
    return [inside_of(site, one, "python", "-c", DELETE, handle).strip() for one in pods]


def orphans(site: Site, pod: Object, *words: str) -> str:
    """What `carver controller orphans` prints in a controller's pod; raises Refused."""
    return inside_of(site, pod, "carver", "controller", "orphans", *words)


def inside_of(site: Site, pod: Object, *words: str) -> str:
    """What a command prints in a controller's pod; raises Refused where the command fails."""
    what = f"{pod['metadata']['name']} runs {words[0]}"
    return site.until(what, lambda: inside(site.kubectl, pod, *words))


def _metric(site: Site, pod: Object, name: str, node: str) -> float | None:
    """A metric of a node at one controller; None where it has none."""
    about, ports = pod["metadata"], container(pod["spec"]).get("ports", [])
    [port] = [one["containerPort"] for one in ports if one.get("name") == "metrics"]
    page = f"pods/{about['name']}:{port}/proxy/metrics"
    raw = f"--raw=/api/v1/namespaces/{about['namespace']}/{page}"
    text = site.until(f"{about['name']} shows its metrics", lambda: site.kubectl("get", raw))
    return metric_in(text, name, node)


def metric_in(page: str, name: str, node: str) -> float | None:
    """A metric of a node on a page in Prometheus' text format; None where it has none."""
    found = re.search(rf'^{name}{{node="{re.escape(node)}"}} (\S+)$', page, re.MULTILINE)
    return float(found[1]) if found else None
