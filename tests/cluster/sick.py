"""A disk of a node's volume group fails and hangs under a pod, and what Kubernetes says of it.

The disk is a file behind the device mapper, which can refuse each read and write, or hold it back.
Only `run.py --lab` runs this: the group has no other room meanwhile.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from cluster import checks, installation, nodes, objects, removal
from cluster.kubectl import path
from cluster.site import Failed, Site

# The area for lvm2's metadata on the disk, in MiB: a smaller one would bound the whole group's.
_METADATA_MIB = 80
# On the node: a disk that is a file, behind the device mapper (dmsetup(8)). Prints its loop device.
_MAKE = """\
set -e
truncate --size {mib}M /var/tmp/{name}
device=$(losetup --find --show --direct-io=on /var/tmp/{name})
dmsetup create {name} --table "0 $(blockdev --getsz $device) linear $device 0"
echo $device
"""
# The device mapper does so with each read and write; it holds back those of a suspended device.
_CHANGE = """\
set -e
dmsetup load {name} --table "0 $(blockdev --getsz {device}) {target}"
dmsetup suspend --nolockfs --noflush {name}
dmsetup resume {name}
"""
_SUSPEND = "dmsetup suspend --nolockfs --noflush {name}"
_RESUME = "dmsetup resume {name}"
_UNMAKE = """\
if dmsetup info {name}; then
    dmsetup remove --retry {name} || exit
fi
for one in $(losetup --associated /var/tmp/{name} --output NAME --noheadings); do
    losetup --detach $one || exit
done
rm -f /var/tmp/{name}
"""
# Where Carver runs: the group's room goes to a volume of the check's own, so that Carver's next one
# is on the disk that fails.
_ADD = """\
set -e
{lvm} lvcreate --yes --zero n --wipesignatures n --extents 100%FREE --name {name} {group}
{lvm} vgextend --metadatasize {metadata_mib}m {group} /dev/mapper/{name}
"""
_REMOVE = """\
if {lvm} pvs /dev/mapper/{name}; then
    {lvm} vgreduce {group} /dev/mapper/{name} || exit
fi
if {lvm} lvs {group}/{name}; then
    {lvm} lvremove --yes {group}/{name}
fi
"""
# What the claim's Event says of a volume whose disk refuses all (agent/operations/diagnosis.py).
_GONE = "DiskMissing"


@dataclass(frozen=True)
class Disk:
    """A disk of a node's group that the check has made, and can let fail."""

    site: Site
    node: str
    group: str
    device: str = ""

    @property
    def name(self) -> str:
        """The name of the disk, and of the volume that takes the group's other room."""
        return objects.named(self.site.run)

    def add(self) -> "Disk":
        """Make the disk, and add it to the group as the only one with room."""
        mib = 2 * self.site.size_mib - 1 + _METADATA_MIB
        made = replace(self, device=self._on_node(_MAKE, mib=mib).splitlines()[-1])
        made._in_carver(_ADD)
        return made

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """While this lasts no read or write ends."""
        self._on_node(_SUSPEND)
        try:
            yield
        finally:
            self._on_node(_RESUME)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """While this lasts each read and write is refused; what was written stays on the disk."""
        self._on_node(_CHANGE, target="error")
        try:
            yield
        finally:
            self._on_node(_CHANGE, target=f"linear {self.device} 0")

    def remove(self) -> None:
        """Remove what there is of the disk, and the volume that took the group's other room."""
        site = self.site
        site.persist(f"{self.group} is without the disk", lambda: self._in_carver(_REMOVE))
        self._on_node(_UNMAKE)

    def _on_node(self, script: str, **words: object) -> str:
        """Run a script on the node's machine; what it prints."""
        line = script.format(name=self.name, device=self.device, **words)
        return nodes.lab(self.site).shell(self.node, line).strip()

    def _in_carver(self, script: str) -> None:
        """Run a script where Carver runs lvm2 on the node. Raises Refused."""
        pod = self.site.until(
            f"Carver runs on {self.node}",
            lambda: self.site.place.pod_on(self.site.kubectl, self.node),
        )
        words = {"lvm": installation.lvm_of(pod), "name": self.name, "group": self.group}
        line = script.format(**words, metadata_mib=_METADATA_MIB)
        installation.inside(self.site.kubectl, pod, "sh", "-c", line)


def sick_disk(site: Site) -> str:
    """A disk hangs under a pod, then fails: Kubernetes is told so, and the data are there.

    While it hangs lvm2 answers nothing, and Carver's pod is not ready; where it fails the claim's
    Event names the reason, and the pod hears it once, by an Event or from its kubelet. A pod whose
    volume is on another disk of the group goes on all the time.
    """
    checks.needs_controller(site)
    node = nodes.without_leader(site)
    where = objects.on_nodes([node])
    well = site.start("well", site.claim("other"), terms=where)
    handle = str(path(site.volume(site.called("other")), "spec", "csi", "volumeHandle"))
    with _added(site, Disk(site, node, handle.partition("@")[0])) as disk:
        data = site.claim("data")
        pod = site.start("pod", data, terms=where)
        words = site.write(pod)
        with disk.hanging():
            site.until(f"Carver on {node} is not ready", lambda: _is_not_ready(site, node))
            _goes_on(site, well)
        nodes.is_back(site, node)
        site.expect(pod, words)
        with disk.failing():
            site.until(f"an Event says {_GONE}", lambda: bool(site.events(data, _GONE)) or None)
            [teller, *_] = site.until(
                f"the pod hears of {_GONE}", lambda: _tellers(site, pod) or None
            )
            _goes_on(site, well)
            if len(tellers := _tellers(site, pod)) > 1:
                raise Failed(f"the pod hears of {_GONE} twice: by {' and by '.join(tellers)}")
        # The file system may have been made read-only by what it met.
        site.stop(pod)
        following = site.start("next", data, terms=where)
        site.expect(following, words)
    return f"Carver on {node} was not ready, then {_GONE} was said of claim and pod, by {teller}"


@contextmanager
def _added(site: Site, disk: Disk) -> Iterator[Disk]:
    """A disk in the group, the only one with room, while this lasts."""
    try:
        yield disk.add()
    finally:
        # The volume goes before its disk does.
        removal.clear(site)
        disk.remove()


def _goes_on(site: Site, pod: str) -> None:
    """See that a pod writes, and that it is on its disk; sync(1) would wait for each disk."""
    file = f"{objects.PLACE}/words"
    site.sh(pod, f"date | dd of={file} conv=fsync 2>/dev/null && cat {file}")


def _tellers(site: Site, pod: str) -> list[str]:
    """All who say to a pod what is wrong with its volume.

    A kubelet with the feature gate CSIVolumeHealth, of Kubernetes 1.37, writes to the pod's status.
    """
    status = path(site.kubectl.find("pods", pod, site.namespace) or {}, "status", default={})
    reasons = [
        condition.get("reason")
        for volume in status.get("volumeHealth") or ()
        for condition in volume.get("healthConditions") or ()
    ]
    of_kubelet = ["the pod's status"] if _GONE in reasons else []
    return of_kubelet + (["an Event"] if site.events(pod, _GONE) else [])


def _is_not_ready(site: Site, node: str) -> bool | None:
    """True where Carver's pod on the node is not ready, None where it is."""
    return None if checks.is_ready(site.place.pod_on(site.kubectl, node)) else True
