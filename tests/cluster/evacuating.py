"""The check of an evacuation: a node is emptied by one command, its writers go on elsewhere."""

import json
from collections.abc import Sequence
from itertools import pairwise

from cluster import checks, controller, nodes, objects
from cluster.kubectl import Object, path
from cluster.site import Failed, Site

_PODS = 3
# Goes on where the log ends. A line is written after the line before it is on the disk. The second
# word is the time, in seconds since the epoch.
_WRITER = f"""\
cd {objects.PLACE}
n=0
[ ! -f log ] || while read -r number time; do n=$number; done < log
while n=$((n + 1)); do
    echo "$n $(date +%s)" >> log && sync log || exit 1
    sleep 1
done
"""


def evacuation(site: Site) -> str:
    """A node is emptied by one command, and filled again: every acknowledged line is there."""
    checks.needs_controller(site)
    lab = nodes.lab(site)
    values = [*lab.values]
    node, *others = site.place.nodes
    name = site.called("db")
    names = [f"{name}-{number}" for number in range(_PODS)]
    spec = site.spec(objects.of_claim(""), script=_WRITER)
    made = objects.stateful_set(
        site.run, site.check, name, spec, count=_PODS, size=f"{site.size_mib}Mi"
    )
    lab.install_values([*values, "evacuation"])
    try:
        site = nodes.found_anew(site)
        site.until("all nodes answer", lambda: controller.all_answer(site))
        with checks.cordoned(site, *others):
            site.apply(made)
            for pod in names:
                site.ready(pod)
        before = [_acknowledged(site, pod) for pod in names]
        pauses = [_moved(site, node, others, names, before)]
        there = [_acknowledged(site, pod) for pod in names]
        site.kubectl("uncordon", node)
        for other in {site.node_of(pod) for pod in names}:
            pauses.append(_moved(site, other, [node], names, there))
            site.kubectl("uncordon", other)
        site.until("what was left is erased", lambda: _nothing_left(site, names))
    finally:
        for one in site.place.nodes:
            site.kubectl("uncordon", one)
        lab.install_values(values)
    return f"{_PODS} writers left {node} and came back; the longest pause was {max(pauses)} s"


def _moved(
    site: Site, node: str, targets: Sequence[str], names: Sequence[str], before: Sequence[int]
) -> int:
    """Evacuate a node, and wait until its writers write elsewhere; the longest pause in seconds."""
    here = [pod for pod in names if site.node_of(pod) == node]
    words = [word for target in targets for word in ("--to", target)]
    _command(site, "evacuate", node, *words)

    def gone() -> bool | None:
        for pod in here:
            one = site.kubectl.find("pods", pod, site.namespace)
            if one is None or path(one, "spec", "nodeName") not in targets:
                return None
            if not checks.is_ready(one):
                return None
        return True

    site.until(f"the writers of {node} run elsewhere", gone)
    longest = 0
    for pod, acknowledged in zip(names, before, strict=True):
        _acknowledged(site, pod, acknowledged + 1)
        lines = [tuple(map(int, line.split())) for line in _log(site, pod)]
        if [number for number, _ in lines] != list(range(1, len(lines) + 1)):
            raise Failed(f"the {len(lines)} lines of {pod} are not all there, or not in order")
        times = [time for _, time in lines]
        longest = max(longest, *(late - early for early, late in pairwise(times)))
    return longest


def _acknowledged(site: Site, pod: str, least: int = 5) -> int:
    """Wait until a writer has written so many lines; how many there are."""
    return site.until(
        f"{pod} has written {least} lines",
        lambda: count if (count := len(_log(site, pod))) >= least else None,
    )


def _log(site: Site, pod: str) -> list[str]:
    found = site.until(f"{pod} shows its log", lambda: site.sh(pod, f"cat {objects.PLACE}/log"))
    # The last line may be half written.
    return found[: found.rfind("\n") + 1].splitlines()


def _nothing_left(site: Site, names: Sequence[str]) -> bool | None:
    """Whether each node has of the writers' volumes only those that are in use there."""
    handles = {
        str(path(site.volume(f"data-{pod}"), "spec", "csi", "volumeHandle")) for pod in names
    }
    logical = {handle.partition("/")[2] for handle in handles}
    held = [one for node in site.place.nodes for one in nodes.held(site, node)]
    mine = {one for one in held if one.partition("/")[2] in logical}
    return True if mine == handles else None


def _command(site: Site, *words: str) -> Object:
    """Run `carver node` in a controller's pod; what it prints."""
    pod = site.place.controller_pods(site.kubectl)[0]
    said = controller.inside_of(site, pod, "carver", "node", *words, "--json")
    return dict(json.loads(said))
