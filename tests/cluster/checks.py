"""The checks: what a cluster's users do with volumes, and what must come of it.

Each is stand-alone: it makes what it needs, and what it made is removed when it ends. It raises
Failed with what is wrong, NotHere or Off with what it lacks, and returns a note for the table.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise

from cluster import objects, removal
from cluster.bench import Bench, Failed, NotHere, Off
from cluster.kubectl import SNAPSHOTS, Object, path

Check = Callable[[Bench], str]

# Writes a line each second, and ends where a write or its sync fails. The second word is the time.
WRITER = f"""\
n=0
while n=$((n + 1)); do
    read -r up rest < /proc/uptime
    echo "$n $up" >> {objects.PLACE}/log && sync || exit 1
    sleep 1
done
"""


def claim(bench: Bench) -> str:
    """A claim becomes a volume on the pod's node; what a pod writes, the next one reads."""
    bench.claim("data")
    first = bench.start("first", "claim-data")
    words = bench.write(first)
    volume = bench.volume("claim-data")
    if (driver := path(volume, "spec", "csi", "driver")) != bench.place.driver:
        raise Failed(f"the volume is of {driver}")
    bench.topology("claim-data")
    node = bench.node_of(first)
    bench.stop(first)
    second = bench.start("second", "claim-data")
    bench.expect(second, words)
    if bench.node_of(second) != node:
        raise Failed(f"the second pod is on {bench.node_of(second)}, the volume on {node}")
    return f"on {node}"


def block(bench: Bench) -> str:
    """A raw block volume has its size, and keeps what is written."""
    data = bench.claim("data", block=True)
    first = bench.start("first", data, block=True)
    words = bench.write(first, block=True)
    room = bench.room_mib(first, block=True)
    if room < bench.size_mib:
        raise Failed(f"the device has {room} MiB, {bench.size_mib} were claimed")
    bench.stop(first)
    second = bench.start("second", data, block=True)
    bench.expect(second, words, block=True)
    return f"{room} MiB"


def snapshot(bench: Bench) -> str:
    """A snapshot of a volume in use becomes ready, and can be deleted then."""
    _needs_snapshots(bench)
    data = bench.claim("data")
    pod = bench.start("pod", data)
    bench.write(pod)
    monday = bench.snapshot("monday", data)
    words = bench.write(pod)
    bench.stop(monday, SNAPSHOTS)
    bench.expect(pod, words)
    return ""


def restore(bench: Bench) -> str:
    """A snapshot of a volume in use becomes a larger volume, with what was there at that time.

    Its pod is sent to the node of the snapshot by the topology of the source's volume.
    """
    _needs_snapshots(bench)
    data = bench.claim("data")
    pod = bench.start("pod", data)
    words, before = bench.write(pod), bench.room_mib(pod)
    monday = bench.snapshot("monday", data)
    bench.write(pod)
    source = {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": monday}
    restored = bench.claim("restored", times=2, source=source)
    other = bench.start("other", restored, terms=bench.topology(data))
    bench.expect(other, words)
    return f"{before} MiB become {bench.grown(other, before)}"


def clone(bench: Bench) -> str:
    """A claim made of a claim in use begins with what is in it, and lives by itself then."""
    data = bench.claim("data")
    pod = bench.start("pod", data)
    words = bench.write(pod)
    twin = bench.claim("twin", source={"kind": "PersistentVolumeClaim", "name": data})
    other = bench.start("other", twin, terms=bench.topology(data))
    bench.expect(other, words)
    changed = bench.write(other)
    bench.expect(pod, words)
    bench.expect(other, changed)
    return ""


def expand_online(bench: Bench) -> str:
    """A claim grows while a pod uses it."""
    data = bench.claim("data")
    pod = bench.start("pod", data)
    words, before = bench.write(pod), bench.room_mib(pod)
    bench.expand(data, 2)
    bench.has_size(data, 2)
    after = bench.grown(pod, before)
    bench.expect(pod, words)
    return f"{before} MiB become {after}"


def expand_offline(bench: Bench) -> str:
    """A claim that no pod uses grows when the next pod starts."""
    data = bench.claim("data")
    first = bench.start("first", data)
    words, before = bench.write(first), bench.room_mib(first)
    bench.stop(first)
    bench.expand(data, 2)
    bench.until(f"claim {data} waits for a node", lambda: _waits_for_node(bench, data))
    second = bench.start("second", data)
    bench.has_size(data, 2)
    after = bench.grown(second, before)
    bench.expect(second, words)
    return f"{before} MiB become {after}"


def _waits_for_node(bench: Bench, name: str) -> bool | None:
    status = path(
        bench.kubectl.find("persistentvolumeclaims", name, bench.namespace), "status", default={}
    )
    conditions = {one["type"] for one in status.get("conditions", []) if one["status"] == "True"}
    marked = path(status, "allocatedResourceStatuses", "storage", default="")
    waits = "FileSystemResizePending" in conditions or marked == "NodeResizePending"
    return True if waits else None


def two_pods(bench: Bench) -> str:
    """Two pods of one node read and write one ReadWriteOnce claim."""
    data = bench.claim("data")
    first = bench.start("first", data)
    words = bench.write(first)
    second = bench.start("second", data)
    bench.expect(second, words)
    bench.expect(first, bench.write(second))
    bench.stop(first)
    bench.write(second)
    return ""


def once_pod(bench: Bench) -> str:
    """The scheduler refuses a second pod a ReadWriteOncePod claim, until the first is gone."""
    data = bench.claim("data", mode="ReadWriteOncePod")
    first = bench.start("first", data)
    words = bench.write(first)
    second = bench.pod("second", data)
    bench.refused(second, "ReadWriteOncePod")
    bench.stop(first)
    bench.ready(second)
    bench.expect(second, words)
    return ""


def read_only_block(bench: Bench) -> str:
    """A raw block volume can be read, and not written, by a pod beside the one that writes it."""
    data = bench.claim("data", block=True)
    writer = bench.start("writer", data, block=True)
    words = bench.write(writer, block=True)
    reader = bench.start("reader", data, block=True, read_only=True)
    bench.expect(reader, words, block=True)
    attempt = f"printf x | dd of={objects.DEVICE} conv=notrunc 2>/dev/null && sync"
    said = bench.until(
        "the reader tries to write",
        lambda: bench.sh(reader, f"if {attempt}; then echo written; else echo refused; fi"),
    )
    if said.strip() != "refused":
        raise Failed("the pod that may only read has written")
    bench.expect(writer, words, block=True)
    bench.stop(reader)
    bench.expect(writer, bench.write(writer, block=True), block=True)
    return ""


def inline(bench: Bench) -> str:
    """A pod has a volume without a claim, which goes with it."""
    if not bench.place.inline:
        raise Off("the CSIDriver does not allow Ephemeral (volumeLifecycleModes)")
    volume = objects.inline(bench.place.driver, f"{bench.size_mib}Mi")
    # The scheduler knows nothing of such a volume, so it is told the nodes.
    spec = bench.spec(volume, terms=objects.on_nodes(bench.place.nodes))
    name = "inline-pod"
    bench.apply(objects.pod(bench.run, bench.check, name, spec))
    uid = str(bench.ready(name)["metadata"]["uid"])
    bench.expect(name, bench.write(name))
    node = bench.node_of(name)
    held = bench.place.held(bench.kubectl, node)
    own = [key for key, it in (held or {}).items() if any(uid in one for one in it.places)]
    if held is not None and not own:
        raise Failed(f"Carver on {node} knows no volume of pod {name}")
    bench.stop(name)

    def gone() -> bool | None:
        now = bench.place.held(bench.kubectl, node)
        return None if now is not None and now.keys() & set(own) else True

    bench.until(f"the volume of pod {name} goes: {', '.join(own)}", gone)
    return "" if held is not None else "Carver could not be asked whether the volume went"


def restart(bench: Bench) -> str:
    """Carver's pod is deleted under a writer, which does not notice; the next one serves on."""
    data = bench.claim("data")
    writer = bench.start("writer", data, script=WRITER)
    node = bench.node_of(writer)
    if (old := bench.place.pod_on(bench.kubectl, node)) is None:
        raise NotHere(f"Carver has no pod on {node} that could be deleted")
    where = old["metadata"]["namespace"]
    name = old["metadata"]["name"]
    bench.persist(
        "Carver's pod is deleted", lambda: bench.kubectl.delete("pods", name, namespace=where)
    )

    def replaced() -> Object | None:
        now = bench.place.pod_on(bench.kubectl, node)
        is_new = now is not None and now["metadata"]["uid"] != old["metadata"]["uid"]
        conditions = path(now or {}, "status", "conditions", default=[])
        is_ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
        return now if is_new and is_ready else None

    bench.until(f"another pod of Carver's is ready on {node}", replaced)
    before = len(bench.until("the writer's lines are there", lambda: _lines(bench, writer)))
    lines = bench.until(
        "the writer writes on",
        lambda: found if len(found := _lines(bench, writer)) >= before + 3 else None,
    )
    numbers = [int(line.split()[0]) for line in lines]
    if numbers != list(range(1, len(numbers) + 1)):
        raise Failed(f"the writer's {len(numbers)} lines are not all there, or not in order")
    if restarts := path(bench.running(writer), "status", "containerStatuses", 0, "restartCount"):
        raise Failed(f"the writer was restarted {restarts} times")
    times = [float(line.split()[1]) for line in lines]
    pause = max(late - early for early, late in pairwise(times))
    bench.stop(writer)
    bench.start("next", data)
    other = bench.claim("other")
    bench.write(bench.start("other", other, terms=bench.topology(data)))
    return f"longest pause of a writer with 1 line a second: {pause:.1f} s"


def _lines(bench: Bench, pod: str) -> list[str]:
    """What a writer has written so far; raises Failed where it has ended."""
    if bench.running(pod) is None:
        raise Failed(f"the writer, pod {pod}, is not ready any more")
    return bench.sh(pod, f"cat {objects.PLACE}/log").splitlines()


def drain(bench: Bench) -> str:
    """The check's own pod is evicted from a node that is cordoned, and comes back with its data."""
    data = bench.claim("data")
    spec = bench.spec(objects.of_claim(data))
    bench.apply(objects.deployment(bench.run, bench.check, "drain-set", spec))
    first = bench.until("the deployment has a pod", lambda: _pod_of(bench, without=""))
    bench.ready(first)
    words, node = bench.write(first), bench.node_of(first)
    with _cordoned(bench, node):
        own = f"--pod-selector={bench.mine}"
        limit = f"--timeout={bench.limit_seconds:.0f}s"
        bench.kubectl("drain", node, own, limit, seconds=bench.limit_seconds + 30)
        second = bench.until("the pod is replaced", lambda: _pod_of(bench, without=first))
        bench.refused(second)
    bench.ready(second)
    if bench.node_of(second) != node:
        raise Failed(f"the pod came back on {bench.node_of(second)}, its volume is on {node}")
    bench.expect(second, words)
    return f"{node} was cordoned, and is not any more"


def _pod_of(bench: Bench, without: str) -> str | None:
    """The deployment's pod, if it is another than the one named."""
    found = [
        str(one["metadata"]["name"])
        for one in bench.kubectl.all("pods", bench.namespace, bench.mine)
        if "deletionTimestamp" not in one["metadata"]
    ]
    return next((one for one in found if one != without), None)


@contextmanager
def _cordoned(bench: Bench, node: str) -> Iterator[None]:
    """A node that takes no pods while this lasts. Its label says whose doing that is."""
    kubectl = bench.kubectl
    kubectl("label", "nodes", node, f"{objects.CORDONED}={bench.run}", "--overwrite")
    try:
        kubectl("cordon", node)
        yield
    finally:
        bench.persist(f"{node} is uncordoned", lambda: removal.uncordon(kubectl, bench.run))


def _needs_snapshots(bench: Bench) -> None:
    if bench.place.no_snapshots:
        raise NotHere(bench.place.no_snapshots)


# In the order in which they run: what the others build upon comes first.
ALL: Mapping[str, Check] = {
    "claim": claim,
    "block": block,
    "snapshot": snapshot,
    "restore": restore,
    "clone": clone,
    "expand-online": expand_online,
    "expand-offline": expand_offline,
    "two-pods": two_pods,
    "once-pod": once_pod,
    "read-only-block": read_only_block,
    "inline": inline,
    "restart": restart,
    "drain": drain,
}
