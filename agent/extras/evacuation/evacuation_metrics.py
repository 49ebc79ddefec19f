"""Gauges of evacuations for the controller's metrics, from their progress."""

from collections import Counter
from collections.abc import Iterable, Sequence

from agent.daemon.extra import Gauge
from agent.extras.evacuation.progress import BEFORE, NodeProgress, VolumeProgress


def gauges(nodes: Sequence[NodeProgress]) -> Iterable[Gauge]:
    """Return the gauges of all evacuations that are under way; none if there are none.

    The number of volumes is by the stage at which each is, and by whether it waits: something is
    wrong, for which its last step is tried again, or it stays on the node. A node whose evacuation
    has a problem as a whole counts as one that waits, too.
    """
    volumes, bytes_left = Counter[tuple[str, ...]](), dict[tuple[str, ...], float]()
    problems = dict[tuple[str, ...], float]()
    for node in nodes:
        problems[node.node,] = float(bool(node.problem))
        bytes_left[node.node,] = 0.0
        for unit in node.units:
            for volume in unit.volumes:
                is_waiting = bool(volume.problem or unit.problem)
                volumes[node.node, str(volume.stage), str(is_waiting).lower()] += 1
                bytes_left[node.node,] += _bytes_left(volume)
    if not nodes:
        return
    yield Gauge(
        "carver_evacuation_volumes",
        "Volumes of an evacuated node, by their stage and by whether they wait.",
        volumes,
        ("node", "stage", "waits"),
    )
    yield Gauge(
        "carver_evacuation_bytes_left",
        "Bytes of the present rounds that are not sent yet, and sizes of volumes without a round.",
        bytes_left,
        ("node",),
    )
    yield Gauge(
        "carver_evacuation_has_problem",
        "1 if the evacuation of the node as a whole waits, else 0.",
        problems,
        ("node",),
    )


def _bytes_left(volume: VolumeProgress) -> int:
    if volume.stage not in BEFORE:
        return 0
    if not volume.rounds:
        return volume.size_bytes
    return max(0, volume.total_bytes - volume.done_bytes)
