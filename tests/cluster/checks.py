"""The checks: what a cluster's users do with volumes, and what must come of it.

Each is stand-alone: it makes what it needs, and what it made is removed when it ends. It raises
Failed with what is wrong, NotHere or Off with what it lacks, and returns a note for the table.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise

from cluster import objects, removal
from cluster.kubectl import SNAPSHOTS, Object, path
from cluster.site import Failed, NotHere, Off, Site

Check = Callable[[Site], str]

# Writes a line each second, and ends where a write or its sync fails. The second word is the time.
WRITER = f"""\
n=0
while n=$((n + 1)); do
    read -r up rest < /proc/uptime
    echo "$n $up" >> {objects.PLACE}/log && sync || exit 1
    sleep 1
done
"""


def claim(site: Site) -> str:
    """A claim becomes a volume on the pod's node; what a pod writes, the next one reads."""
    data, first, words = site.used("first")
    volume = site.volume(data)
    if (driver := path(volume, "spec", "csi", "driver")) != site.place.driver:
        raise Failed(f"the volume is of {driver}")
    site.topology(data)
    node = site.node_of(first)
    site.stop(first)
    second = site.start("second", data)
    site.expect(second, words)
    if site.node_of(second) != node:
        raise Failed(f"the second pod is on {site.node_of(second)}, the volume on {node}")
    return f"on {node}"


def block(site: Site) -> str:
    """A raw block volume has its size, and keeps what is written."""
    data, first, words = site.used("first", block=True)
    room = site.room_mib(first, block=True)
    if room < site.size_mib:
        raise Failed(f"the device has {room} MiB, {site.size_mib} were claimed")
    site.stop(first)
    second = site.start("second", data, block=True)
    site.expect(second, words, block=True)
    return f"{room} MiB"


def snapshot(site: Site) -> str:
    """A snapshot of a volume in use becomes ready, and can be deleted then."""
    _needs_snapshots(site)
    data = site.claim("data")
    pod = site.start("pod", data)
    site.write(pod)
    monday = site.snapshot("monday", data)
    words = site.write(pod)
    site.stop(monday, SNAPSHOTS)
    site.expect(pod, words)
    return ""


def restore(site: Site) -> str:
    """A snapshot of a volume in use becomes a larger volume, with what was there at that time.

    Its pod is sent to the node of the snapshot by the topology of the source's volume.
    """
    _needs_snapshots(site)
    data, pod, words = site.used("pod")
    before = site.room_mib(pod)
    monday = site.snapshot("monday", data)
    site.write(pod)
    source = {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": monday}
    restored = site.claim("restored", times=2, source=source)
    other = site.start("other", restored, terms=site.topology(data))
    site.expect(other, words)
    return f"{before} MiB become {site.grown(other, before)}"


def clone(site: Site) -> str:
    """A claim made of a claim in use begins with what is in it, and lives by itself then."""
    data, pod, words = site.used("pod")
    twin = site.claim("twin", source={"kind": "PersistentVolumeClaim", "name": data})
    other = site.start("other", twin, terms=site.topology(data))
    site.expect(other, words)
    changed = site.write(other)
    site.expect(pod, words)
    site.expect(other, changed)
    return ""


def expand_online(site: Site) -> str:
    """A claim grows while a pod uses it."""
    data, pod, words = site.used("pod")
    before = site.room_mib(pod)
    site.expand(data, 2)
    site.has_size(data, 2)
    after = site.grown(pod, before)
    site.expect(pod, words)
    return f"{before} MiB become {after}"


def expand_offline(site: Site) -> str:
    """A claim that no pod uses grows when the next pod starts."""
    data, first, words = site.used("first")
    before = site.room_mib(first)
    site.stop(first)
    site.expand(data, 2)
    site.until(f"claim {data} waits for a node", lambda: _waits_for_node(site, data))
    second = site.start("second", data)
    site.has_size(data, 2)
    after = site.grown(second, before)
    site.expect(second, words)
    return f"{before} MiB become {after}"


def _waits_for_node(site: Site, name: str) -> bool | None:
    status = path(
        site.kubectl.find("persistentvolumeclaims", name, site.namespace), "status", default={}
    )
    conditions = {one["type"] for one in status.get("conditions", []) if one["status"] == "True"}
    marked = path(status, "allocatedResourceStatuses", "storage", default="")
    waits = "FileSystemResizePending" in conditions or marked == "NodeResizePending"
    return True if waits else None


def two_pods(site: Site) -> str:
    """Two pods of one node read and write one ReadWriteOnce claim."""
    data, first, words = site.used("first")
    second = site.start("second", data)
    site.expect(second, words)
    site.expect(first, site.write(second))
    site.stop(first)
    site.write(second)
    return ""


def once_pod(site: Site) -> str:
    """The scheduler refuses a second pod a ReadWriteOncePod claim, until the first is gone."""
    data, first, words = site.used("first", mode="ReadWriteOncePod")
    second = site.pod("second", data)
    site.refused(second, "ReadWriteOncePod")
    site.stop(first)
    site.ready(second)
    site.expect(second, words)
    return ""


def read_only_block(site: Site) -> str:
    """A raw block volume can be read, and not written, by a pod beside the one that writes it."""
    data, writer, words = site.used("writer", block=True)
    reader = site.start("reader", data, block=True, read_only=True)
    site.expect(reader, words, block=True)
    attempt = f"printf x | dd of={objects.DEVICE} conv=notrunc 2>/dev/null && sync"
    said = site.until(
        "the reader tries to write",
        lambda: site.sh(reader, f"if {attempt}; then echo written; else echo refused; fi"),
    )
    if said.strip() != "refused":
        raise Failed("the pod that may only read has written")
    site.expect(writer, words, block=True)
    site.stop(reader)
    site.expect(writer, site.write(writer, block=True), block=True)
    return ""


def inline(site: Site) -> str:
    """A pod has a volume without a claim, which goes with it."""
    if not site.place.inline:
        raise Off("the CSIDriver does not allow Ephemeral (volumeLifecycleModes)")
    volume = objects.inline(site.place.driver, f"{site.size_mib}Mi")
    # The scheduler knows nothing of such a volume, so the pod names the nodes.
    spec = site.spec(volume, terms=objects.on_nodes(site.place.nodes))
    name = "inline-pod"
    site.apply(objects.pod(site.run, site.check, name, spec))
    uid = str(site.ready(name)["metadata"]["uid"])
    site.expect(name, site.write(name))
    node = site.node_of(name)
    held = site.place.held(site.kubectl, node)
    own = [key for key, it in (held or {}).items() if any(uid in one for one in it.places)]
    if held is not None and not own:
        raise Failed(f"Carver on {node} knows no volume of pod {name}")
    site.stop(name)

    def gone() -> bool | None:
        now = site.place.held(site.kubectl, node)
        return None if now is not None and now.keys() & set(own) else True

    site.until(f"the volume of pod {name} goes: {', '.join(own)}", gone)
    return "" if held is not None else "Carver could not be asked whether the volume went"


def restart(site: Site) -> str:
    """Carver's pod is deleted under a writer, which does not notice; the next one serves on."""
    data = site.claim("data")
    writer = site.start("writer", data, script=WRITER)
    node = site.node_of(writer)
    if (old := site.place.pod_on(site.kubectl, node)) is None:
        raise NotHere(f"Carver has no pod on {node} that could be deleted")
    where = old["metadata"]["namespace"]
    name = old["metadata"]["name"]
    site.persist(
        "Carver's pod is deleted", lambda: site.kubectl.delete("pods", name, namespace=where)
    )

    def replaced() -> Object | None:
        now = site.place.pod_on(site.kubectl, node)
        is_new = now is not None and now["metadata"]["uid"] != old["metadata"]["uid"]
        conditions = path(now or {}, "status", "conditions", default=[])
        is_ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
        return now if is_new and is_ready else None

    site.until(f"another pod of Carver's is ready on {node}", replaced)
    before = len(site.until("the writer's lines are there", lambda: _lines(site, writer)))
    lines = site.until(
        "the writer writes on",
        lambda: found if len(found := _lines(site, writer)) >= before + 3 else None,
    )
    numbers = [int(line.split()[0]) for line in lines]
    if numbers != list(range(1, len(numbers) + 1)):
        raise Failed(f"the writer's {len(numbers)} lines are not all there, or not in order")
    if restarts := path(site.running(writer), "status", "containerStatuses", 0, "restartCount"):
        raise Failed(f"the writer was restarted {restarts} times")
    times = [float(line.split()[1]) for line in lines]
    pause = max(late - early for early, late in pairwise(times))
    site.stop(writer)
    site.start("next", data)
    other = site.claim("other")
    site.write(site.start("other", other, terms=site.topology(data)))
    return f"longest pause of a writer with 1 line a second: {pause:.1f} s"


def _lines(site: Site, pod: str) -> list[str]:
    """What a writer has written so far; raises Failed where it has ended."""
    if site.running(pod) is None:
        raise Failed(f"the writer, pod {pod}, is not ready any more")
    return site.sh(pod, f"cat {objects.PLACE}/log").splitlines()


def drain(site: Site) -> str:
    """The check's own pod is evicted from a node that is cordoned, and comes back with its data."""
    data = site.claim("data")
    spec = site.spec(objects.of_claim(data))
    site.apply(objects.deployment(site.run, site.check, "drain-set", spec))
    first = site.until("the deployment has a pod", lambda: _pod_of(site, without=""))
    site.ready(first)
    words, node = site.write(first), site.node_of(first)
    with _cordoned(site, node):
        own = f"--pod-selector={site.mine}"
        limit = f"--timeout={site.limit_seconds:.0f}s"
        site.kubectl("drain", node, own, limit, seconds=site.limit_seconds + 30)
        second = site.until("the pod is replaced", lambda: _pod_of(site, without=first))
        site.refused(second)
    site.ready(second)
    if site.node_of(second) != node:
        raise Failed(f"the pod came back on {site.node_of(second)}, its volume is on {node}")
    site.expect(second, words)
    return f"{node} was cordoned, and is not any more"


def _pod_of(site: Site, without: str) -> str | None:
    """The deployment's pod, if it is another than the one named."""
    found = [
        str(one["metadata"]["name"])
        for one in site.kubectl.all("pods", site.namespace, site.mine)
        if "deletionTimestamp" not in one["metadata"]
    ]
    return next((one for one in found if one != without), None)


@contextmanager
def _cordoned(site: Site, node: str) -> Iterator[None]:
    """A node that takes no pods while this lasts. Its label says whose doing that is."""
    kubectl = site.kubectl
    kubectl("label", "nodes", node, f"{objects.CORDONED}={site.run}", "--overwrite")
    try:
        kubectl("cordon", node)
        yield
    finally:
        site.persist(f"{node} is uncordoned", lambda: removal.uncordon(kubectl, site.run))


def _needs_snapshots(site: Site) -> None:
    if site.place.no_snapshots:
        raise NotHere(site.place.no_snapshots)


# In the order in which they run: what the others build upon comes first.
ALL: Mapping[str, Check] = {
    check.__name__.replace("_", "-"): check
    for check in (
        *(claim, block, snapshot, restore, clone, expand_online, expand_offline),
        *(two_pods, once_pod, read_only_block, inline, restart, drain),
    )
}
