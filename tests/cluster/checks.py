"""The checks: what a cluster's users do with volumes, and what must come of it.

Each is stand-alone: it makes what it needs, and what it made is removed when it ends. It raises
Failed with what is wrong, NotHere or Off with what it lacks, and returns a note for the table.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise

from cluster import installation, objects, removal
from cluster.kubectl import ATTRIBUTES, SNAPSHOTS, Object, path
from cluster.mixed import mixed_claims
from cluster.site import MIB, Failed, NotHere, Off, Site, quantity

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

# Makes a volume of Carver's another's, as OpenEBS LocalPV-LVM names it, and has Carver adopt it. In
# one go: meanwhile nothing would delete it. If Carver refuses, it is made Carver's again.
ADOPT = """\
set -e
without= with=
for one in $({lvm} lvs --noheadings --options lv_tags {group}/{name} | tr , ' '); do
    without="$without --deltag $one" with="$with --addtag $one"
done
{lvm} lvchange $without {group}/{name} >&2
{lvm} lvrename {group} {name} {other} >&2
carver volume adopt {group}/{other} --from openebs --claim {claim} {words} && exit
{lvm} lvrename {group} {other} {name} >&2
{lvm} lvchange $with {group}/{name} >&2
exit 1
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
    restored = site.claim("restored", times=2, source=of_snapshot(monday))
    other = site.start("other", restored, terms=site.topology(data))
    site.expect(other, words)
    return f"{before} MiB become {site.grown(other, before)}"


def of_snapshot(name: str) -> Mapping[str, str]:
    return {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": name}


def _of_claim(name: str) -> Mapping[str, str]:
    return {"kind": "PersistentVolumeClaim", "name": name}


def restore_anywhere(site: Site) -> str:
    """Claims of a snapshot and of a claim are made on its node, though their pods name none."""
    needs_controller(site)
    _needs_snapshots(site)
    data, pod, words = site.used("pod")
    monday = of_snapshot(site.snapshot("monday", data))
    sources = {"first": monday, "second": monday, "twin": _of_claim(data)}
    # All at once, as the scheduler sends them to different nodes.
    others = [
        site.pod(f"pod-{name}", site.claim(name, source=source)) for name, source in sources.items()
    ]
    for other in others:
        site.ready(other)
        site.expect(other, words)
    return f"{len(others)} pods on {site.node_of(pod)}"


def clone(site: Site) -> str:
    """A claim made of a claim in use begins with what is in it, and lives by itself then."""
    data, pod, words = site.used("pod")
    twin = site.claim("twin", source=_of_claim(data))
    other = site.start("other", twin, terms=site.topology(data))
    site.expect(other, words)
    changed = site.write(other)
    site.expect(pod, words)
    site.expect(other, changed)
    return ""


def pre_provisioned(site: Site) -> str:
    """A snapshot that is there already gets objects, by its handle, and is restored."""
    needs_controller(site)
    _needs_snapshots(site)
    data, pod, words = site.used("pod")
    first = site.content_of(site.snapshot("monday", data))
    site.write(pod)
    # The other content goes on to own the snapshot, so that it goes in any case.
    content = objects.snapshot_content(
        *(site.run, site.check, "content", site.place.driver),
        handle=str(path(first, "status", "snapshotHandle")),
        snapshot_name=site.called("found"),
    )
    site.apply(content)
    found = site.snapshot("found", content=content["metadata"]["name"])
    site.expect(site.start("other", site.claim("restored", source=of_snapshot(found))), words)
    return ""


def group_snapshot(site: Site) -> str:
    """Two claims are taken in one group snapshot, and each of its snapshots is restored."""
    needs_controller(site)
    if site.place.no_groups:
        raise NotHere(site.place.no_groups)
    if not site.place.groups:
        raise Off("Carver's snapshotter makes no group snapshots (sidecars.snapshotter.groups)")
    data, pod, words = site.used("pod")
    second = site.start("second", site.claim("log"), terms=site.topology(data))
    wanted = sorted([words, site.write(second)])
    members = site.group_snapshot("monday", count=2)
    for one in (pod, second):
        site.write(one)
    found = []
    for number, member in enumerate(members):
        restored = site.claim(f"restored-{number}", source=of_snapshot(member))
        found.append(site.read(site.start(f"other-{number}", restored)))
    if sorted(found) != wanted:
        raise Failed(f"{found} were restored, {wanted} were in the volumes")
    return ""


# What the kernel reads ahead of a pod's volume, in KiB: nothing where it does not tell.
READ_AHEAD = f"""\
while read -r id parent device root place rest; do
    file=/sys/dev/block/$device/queue/read_ahead_kb
    if [ "$place" = {objects.PLACE} ] && [ -e "$file" ]; then cat "$file"; fi
done < /proc/self/mountinfo
"""


def attributes(site: Site) -> str:
    """A claim gets another VolumeAttributesClass, and so does its volume, under its pod."""
    needs_controller(site)
    if ATTRIBUTES not in site.place.kinds:
        raise NotHere("the API server has no VolumeAttributesClass of storage.k8s.io/v1")
    classes = [
        objects.attributes_class(site.run, site.check, name, site.place.driver, {_KEY: value})
        for name, value in (("scans", "4MiB"), ("lookups", "0"))
    ]
    site.apply(*classes)
    first, second = (str(one["metadata"]["name"]) for one in classes)
    data = site.claim("data", attributes=first)
    pod = site.start("pod", data)
    words = site.write(pod)
    _has_class(site, data, first)
    seen = [_read_ahead(site, pod)]
    site.change(data, {"volumeAttributesClassName": second})
    _has_class(site, data, second)
    seen.append(_read_ahead(site, pod))
    site.expect(pod, words)
    if not all(seen):
        return "the kernel does not show its read-ahead to pods"
    # What is above an encrypted volume has its own.
    if not site.place.is_encrypted and seen != ["4096", "0"]:
        raise Failed(f"the kernel reads {seen[0]} KiB ahead and then {seen[1]}, not 4096 and 0")
    return f"{seen[0]} KiB are read ahead, then {seen[1]}"


_KEY = "carver/readAhead"


def _read_ahead(site: Site, pod: str) -> str:
    return site.until(f"pod {pod} tells of its device", lambda: site.sh(pod, READ_AHEAD)).strip()


def _has_class(site: Site, claim: str, name: str) -> None:
    def is_changed() -> bool | None:
        status = path(site.found(claim), "status", default={})
        done = "modifyVolumeStatus" not in status
        return True if status.get("currentVolumeAttributesClassName") == name and done else None

    site.until(f"claim {claim} has the VolumeAttributesClass {name}", is_changed)


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


# Of the usual size: a PiB and more.
_TOO_MANY_TIMES = 1 << 22


def expand_impossible(site: Site) -> str:
    """A claim that cannot grow says why; its next pod starts, and it can ask for less."""
    needs_controller(site)
    data, first, words = site.used("first")
    before = site.room_mib(first)
    site.expand(data, _TOO_MANY_TIMES)
    why = site.until(f"claim {data} says why it cannot grow", lambda: _why_not_grown(site, data))
    size = quantity(str(path(site.volume(data), "spec", "capacity", "storage")))
    if size >= _TOO_MANY_TIMES * site.size_mib * MIB:
        raise Failed(f"the PersistentVolume says that it has {size} bytes: {why}")
    site.expect(first, words)
    site.stop(first)
    second = site.start("second", data)
    site.expect(second, words)
    site.expand(data, 2)
    site.has_size(data, 2)
    after = site.grown(second, before)
    return f"{before} MiB became {after} in the end; before: {why}"


def _why_not_grown(site: Site, name: str) -> str | None:
    status = path(site.found(name), "status", default={})
    marked = str(path(status, "allocatedResourceStatuses", "storage", default=""))
    said = [
        str(one.get("message") or "")
        for one in status.get("conditions", [])
        if one["type"].endswith("ResizeError") and one["status"] == "True"
    ]
    said = [one for one in (*said, *site.events(name, "VolumeResizeFailed")) if one]
    return said[0] if marked.endswith("Infeasible") and said else None


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
    _cannot_write(site, reader, f"dd of={objects.DEVICE} conv=notrunc")
    site.expect(writer, words, block=True)
    site.stop(reader)
    site.expect(writer, site.write(writer, block=True), block=True)
    return ""


def read_only_many(site: Site) -> str:
    """Two pods read a ReadOnlyMany claim of a snapshot, as for a backup, and cannot write to it."""
    _needs_snapshots(site)
    data, pod, words = site.used("pod")
    source = of_snapshot(site.snapshot("monday", data))
    site.write(pod)
    restored = site.claim("restored", mode="ReadOnlyMany", source=source)
    readers = [site.start(one, restored, terms=site.topology(data)) for one in ("first", "second")]
    for reader in readers:
        _cannot_write(site, reader, f"cat > {objects.PLACE}/more")
        site.expect(reader, words)
    return ""


def _cannot_write(site: Site, reader: str, into: str) -> None:
    """Raise Failed where a pod that may only read can write into a file or device."""
    attempt = f"{{ printf x | {into} && sync; }} 2>/dev/null"
    said = site.until(
        f"pod {reader} tries to write",
        lambda: site.sh(reader, f"if {attempt}; then echo written; else echo refused; fi"),
    )
    if said.strip() != "refused":
        raise Failed(f"pod {reader}, which may only read, has written")


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
        return now if is_new and is_ready(now) else None

    site.until(f"another pod of Carver's is ready on {node}", replaced)
    before = len(site.until("the writer's lines are there", lambda: lines_of(site, writer)))
    lines = site.until(
        "the writer writes on",
        lambda: found if len(found := lines_of(site, writer)) >= before + 3 else None,
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


def is_ready(one: Object | None) -> bool:
    """Whether a pod, or a node, has the condition Ready."""
    conditions = path(one, "status", "conditions", default=[])
    return any(it["type"] == "Ready" and it["status"] == "True" for it in conditions)


def stopped(site: Site) -> str:
    """A claim that is made while Carver is away on its node says so, and is served afterwards."""
    needs_controller(site)
    data, pod, words = site.used("pod")
    node = site.node_of(pod)
    if site.place.pod_on(site.kubectl, node) is None:
        raise NotHere(f"Carver has no pod on {node} that could be deleted")

    def is_away() -> bool | None:
        """Delete Carver's pod there again, as the DaemonSet makes another; True if none serves."""
        if (now := site.place.pod_on(site.kubectl, node)) is None:
            return True
        about = now["metadata"]
        site.kubectl.delete("pods", about["name"], namespace=about["namespace"])
        return None if is_ready(now) else True

    site.until(f"Carver on {node} ends", is_away)
    other = site.claim("other")
    waiting = site.pod("waiting", other, terms=site.topology(data))

    def said() -> str | None:
        if path(site.found(other), "spec", "volumeName"):
            return "the claim was bound before it was refused"
        is_away()
        return next((one for one in site.events(other, "ProvisioningFailed") if node in one), None)

    why = site.until(f"claim {other} says that {node} does not answer", said)
    site.ready(waiting)
    site.expect(waiting, site.write(waiting))
    site.expect(pod, words)
    return why


def adopt(site: Site) -> str:
    """A volume that is another driver's by name and tags is adopted, and a pod has its data."""
    if site.place.is_encrypted:
        raise NotHere("a volume that is encrypted is not adopted: its key is not Carver's")
    data, first, words = site.used("first")
    volume, node = site.volume(data), site.node_of(first)
    if (pod := site.place.pod_on(site.kubectl, node)) is None:
        raise NotHere(f"Carver has no pod on {node}")
    site.stop(first)
    source = path(volume, "spec", "csi", default={})
    place, _, name = str(source["volumeHandle"]).partition("/")
    if not name.removeprefix("vol-").startswith("pvc-"):
        raise NotHere(f"volume {name} is not called as OpenEBS does (--volume-name-prefix)")
    device_class = path(source, "volumeAttributes", "carver/class", default="")
    script = ADOPT.format(
        lvm=installation.lvm_of(pod),
        group=place.partition("@")[0],
        name=name,
        other=name.removeprefix("vol-"),
        claim=f"{site.namespace}/{data}",
        words=f"--class {device_class}" if device_class else "",
    )
    printed = installation.inside(site.kubectl, pod, "sh", "-c", script)
    # By the same name it is the same volume.
    if json.dumps(source["volumeHandle"]) not in printed:
        raise Failed(f"{name} was adopted as another: {printed}")
    second = site.start("second", data)
    site.expect(second, words)
    return f"{name} on {node}"


def rights(site: Site) -> str:
    """What the nodes' account may do in the cluster is what every account may do."""
    needs_controller(site)
    accounts = {
        (
            str(one["metadata"]["namespace"]),
            str(path(one, "spec", "template", "spec", "serviceAccountName", default="default")),
        )
        for one in site.place.daemonsets
    }
    if not accounts:
        raise NotHere("the nodes run Carver by systemd, without an account of the cluster's")
    for where, account in sorted(accounts):
        for namespace in (where, site.namespace, "kube-system"):
            may = site.kubectl.rules(where, account, namespace)
            if more := may - site.kubectl.rules(where, objects.NOBODY, namespace):
                rule = json.loads(min(more))
                what = rule.get("resources") or rule.get("nonResourceURLs")
                words = f"{', '.join(rule['verbs'])} {', '.join(what)}"
                raise Failed(f"{where}/{account}, which nodes have, may in {namespace}: {words}")
    return ", ".join(f"{where}/{account}" for where, account in sorted(accounts))


def lines_of(site: Site, pod: str) -> list[str]:
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
    with cordoned(site, node):
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
def cordoned(site: Site, *nodes: str) -> Iterator[None]:
    """Nodes that take no pods while this lasts. Their label says whose doing that is."""
    kubectl = site.kubectl
    try:
        for node in nodes:
            kubectl("label", "nodes", node, f"{objects.CORDONED}={site.run}", "--overwrite")
            kubectl("cordon", node)
        yield
    finally:
        names = ", ".join(nodes)
        site.persist(f"{names} are uncordoned", lambda: removal.uncordon(kubectl, site.run))


def needs_controller(site: Site) -> None:
    if not site.place.controllers:
        raise Off("no controller serves the cluster (controller.enabled)")


def _needs_snapshots(site: Site) -> None:
    if site.place.no_snapshots:
        raise NotHere(site.place.no_snapshots)


# In the order in which they run: what the others build upon comes first.
ALL: Mapping[str, Check] = {
    check.__name__.replace("_", "-"): check
    for check in (
        *(claim, block, snapshot, restore, restore_anywhere, clone, pre_provisioned),
        *(group_snapshot, attributes, expand_online, expand_offline, expand_impossible),
        *(two_pods, once_pod, read_only_block, read_only_many),
        *(inline, restart, stopped, drain, adopt, rights),
        mixed_claims,
    )
}
