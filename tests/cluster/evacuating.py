"""The checks of evacuations: a node is emptied by one command, its writers go on elsewhere."""

import dataclasses
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from cluster import checks, controller, nodes, objects, removal
from cluster.kubectl import Object, Refused, path
from cluster.site import Failed, Site
from cluster.writers import Writers, claim_of, start_writers

_PODS = 3
# Lines of a writer before its node is evacuated.
_LINES = 5
# Faults during one evacuation, how long one lasts at most, and the longest pause between two of
# them, in seconds.
_FAULTS, _DOWN_SECONDS, _BETWEEN_SECONDS = 5, 40, 25
# How much longer than usual is waited for writers whose nodes and controllers are interrupted.
_PATIENCE = 5


def evacuation(site: Site) -> str:
    """A node is emptied by one command, and filled again: every acknowledged line is there."""
    with _written_on_one_node(site) as (site, node, writers):
        _there_and_back(site, node, writers, lambda _source, _targets: None)
        pause, own = writers.longest_pause(), _longest_stop(site, writers.names)
    return (
        f"{_PODS} writers left {node} and came back; the longest pause was {pause} s, and Carver's"
        f" part of a pause at most {own} s"
    )


def evacuation_interrupted(site: Site) -> str:
    """Nodes, controllers and the API server are killed in evacuations: nothing is lost."""
    chance, faults = random.Random(site.run), _Faults(site)
    site = dataclasses.replace(site, limit_seconds=_PATIENCE * site.limit_seconds)

    def interrupt(source: str, targets: Sequence[str]) -> None:
        for _ in range(_FAULTS):
            site.clock.sleep(chance.uniform(1, _BETWEEN_SECONDS))
            faults.at_random(chance, source, targets)
        for name in (source, *targets):
            nodes.is_back(site, name)

    with _written_on_one_node(site) as (site, node, writers):
        _there_and_back(site, node, writers, interrupt)
    return f"{_PODS} writers left {node} and came back, under {faults}"


class _Faults:
    """What goes wrong at random, and how often it did."""

    def __init__(self, site: Site) -> None:
        self._site, self._lab = site, nodes.lab(site)
        self._counts: dict[str, int] = {}

    def __str__(self) -> str:
        return ", ".join(f"{count} of {what}" for what, count in sorted(self._counts.items()))

    def at_random(self, chance: random.Random, source: str, targets: Sequence[str]) -> None:
        """Have one thing go wrong: at a node, at the controllers, or at the API server."""
        target, lab = chance.choice([*targets]), self._lab
        kinds: dict[str, Callable[[], object]] = {
            "the source's power cut": lambda: lab.reset(source),
            "a target's power cut": lambda: lab.reset(target),
            "the source switched off": lambda: self._off(source, chance),
            "a target switched off": lambda: self._off(target, chance),
            "the controllers killed": lambda: [
                lab.kill(one, "carver controller") for one in lab.nodes
            ],
            "the nodes' services killed": lambda: [
                lab.kill(one, "carver serve") for one in (source, target)
            ],
            "the API server killed": lab.restart_server,
        }
        what = chance.choice([*kinds])
        kinds[what]()
        self._counts[what] = self._counts.get(what, 0) + 1

    def _off(self, node: str, chance: random.Random) -> None:
        self._lab.power_off(node)
        try:
            self._site.clock.sleep(chance.uniform(1, _DOWN_SECONDS))
        finally:
            self._lab.power_on(node)


@contextmanager
def _written_on_one_node(site: Site) -> Iterator[tuple[Site, str, Writers]]:
    """A StatefulSet whose pods all write on one node; Carver has the values `evacuation`."""
    checks.needs_controller(site)
    node, *others = site.place.nodes
    names: list[str] = []
    with nodes.installed_with(site, "evacuation") as site:
        try:
            site.until("all nodes answer", lambda: controller.all_answer(site))
            with checks.cordoned(site, *others):
                names = start_writers(site, _PODS)
            yield site, node, Writers(site, names)
            _erased(site, names)
        finally:
            _give_back(site, *site.place.nodes)
            # While the setting is off, nothing erases them.
            with suppress(Failed):
                _erased(site, names)


def _there_and_back(
    site: Site,
    node: str,
    writers: Writers,
    meanwhile: Callable[[str, Sequence[str]], None],
) -> None:
    """Evacuate a node to all others, and then these to it.

    `meanwhile` is called with the source and the targets after each command.
    """
    _evacuated(site, node, nodes.others_than(site, node), writers, meanwhile)
    for other in sorted({site.node_of(pod) for pod in writers.names}):
        _evacuated(site, other, [node], writers, meanwhile)


def _evacuated(
    site: Site,
    node: str,
    targets: Sequence[str],
    writers: Writers,
    meanwhile: Callable[[str, Sequence[str]], None],
) -> None:
    """Evacuate a node, wait until its writers write elsewhere, and let pods onto it again."""
    writers.go_on(_LINES)
    here = [pod for pod in writers.names if site.node_of(pod) == node]
    words = [word for target in targets for word in ("--to", target)]
    # So the end of the run lets pods onto it, however this check ends.
    site.kubectl("label", "nodes", node, f"{objects.CORDONED}={site.run}", "--overwrite")
    # A node that was interrupted answers a while after it is ready. The plan leaves it out before.
    site.until("all nodes answer", lambda: controller.all_answer(site))
    _command(site, "evacuate", node, *words)
    meanwhile(node, targets)

    def gone() -> bool | None:
        found = []
        for pod in here:
            one = site.kubectl.find("pods", pod, site.namespace)
            found.append(checks.is_ready(one) and path(one, "spec", "nodeName") in targets)
            # What it has written by now must be there in the end. It may be gone already.
            with suppress(Refused):
                writers.read(pod)
        return True if all(found) else None

    site.until(f"the writers of {node} run elsewhere", gone)
    writers.go_on()
    writers.longest_pause()
    _give_back(site, node)


def _longest_stop(site: Site, names: Sequence[str]) -> int:
    """The longest time in which no pod could use a volume, in seconds, by Carver's Events."""
    texts = [text for name in names for text in site.events(f"data-{name}", "VolumeMoved")]
    found = [re.search(r"; this took (\d+) s ", text) for text in texts]
    return max((int(one[1]) for one in found if one), default=0)


def _give_back(site: Site, *names: str) -> None:
    """Let pods onto nodes that were evacuated. While a Node asks for it, it is cordoned again."""

    def give_back() -> None:
        for node in names:
            site.kubectl("annotate", "nodes", node, f"evacuate.{site.place.driver}/request-")
        removal.uncordon(site.kubectl, site.run)

    site.persist(f"{', '.join(names)} are given back", give_back)


def _erased(site: Site, names: Sequence[str]) -> None:
    """Wait until no node has copies of the writers' volumes that were moved away."""

    def erased() -> bool | None:
        bound = [path(site.found(claim_of(pod)), "spec", "volumeName") for pod in names]
        found = [site.kubectl.find("persistentvolumes", str(one)) for one in bound if one]
        handles = {str(path(one, "spec", "csi", "volumeHandle")) for one in found if one}
        # The name of the logical volume is the same on each node.
        logical = {handle.partition("/")[2] for handle in handles}
        held = [one for node in site.place.nodes for one in nodes.held(site, node)]
        mine = {one for one in held if one.partition("/")[2] in logical}
        return True if mine <= handles else None

    site.until("what was left is erased", erased)


def _command(site: Site, *words: str) -> Object:
    """Run `carver node` in a controller's pod; what it prints."""
    pod = site.place.controller_pods(site.kubectl)[0]
    said = controller.inside_of(site, pod, "carver", "node", *words, "--json")
    return dict(json.loads(said))
