"""One check's place in the cluster: what it makes there, what it waits for, and its removal."""

import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from cluster import objects
from cluster.installation import Installation
from cluster.kubectl import CONTENTS, GROUP_SNAPSHOTS, SNAPSHOTS, Kubectl, Object, Refused, path

MIB = 1 << 20
# How long it is waited between two looks: at first, and when it has taken a while; in seconds.
_FIRST_PAUSE, _LAST_PAUSE = 0.1, 2.0
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    unit: 1 << (10 * power) for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti"), start=1)
}
# Why a container waits that will not start by waiting.
_HOPELESS = frozenset({"ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName"})

T = TypeVar("T")


class Clock(Protocol):
    """What of `time` is needed."""

    def monotonic(self) -> float: ...
    def sleep(self, seconds: float, /) -> None: ...


class Lab(Protocol):
    """What checks may do to the machines of a lab; vagrant/cluster.py has such a one."""

    @property
    def nodes(self) -> Sequence[str]: ...
    @property
    def server(self) -> str: ...
    @property
    def values(self) -> Sequence[str]: ...
    @property
    def gates(self) -> Sequence[str]: ...
    @property
    def image(self) -> str: ...
    def power_off(self, name: str) -> None: ...
    def power_on(self, name: str) -> None: ...
    def reset(self, name: str) -> None: ...
    def reboot(self, name: str) -> None: ...
    def pause(self, name: str) -> None: ...
    def resume(self, name: str) -> None: ...
    def set_clock(self, name: str, ahead_seconds: int) -> None: ...
    def kill(self, name: str, program: str) -> int: ...
    def restart_server(self) -> None: ...
    def shell(self, name: str, script: str) -> str: ...
    def add_node(self, copy_of: str = "") -> str: ...
    def remove_node(self, name: str) -> None: ...
    def install_values(self, names: Sequence[str]) -> None: ...


class Failed(Exception):
    """A check found what must not be."""


class NotHere(Exception):
    """The cluster lacks what a check needs."""


class Off(Exception):
    """A check is about what this installation has switched off."""


@dataclass
class Site:
    """A check's namespace is its run's; its objects bear its name."""

    kubectl: Kubectl
    place: Installation
    run: str
    check: str
    size_mib: int
    limit_seconds: float
    clock: Clock = field(default_factory=lambda: time)
    lab: Lab | None = None

    @property
    def namespace(self) -> str:
        return objects.named(self.run)

    @property
    def mine(self) -> str:
        """The selector of the check's own objects."""
        return f"{objects.RUN}={self.run},{objects.CHECK}={self.check}"

    # Waiting

    def until(self, what: str, look: Callable[[], T | None]) -> T:
        """The first answer that is not None; raises Failed at the time limit.

        A cluster that does not answer for a while is asked again; a refusal is raised.
        """
        end, trouble, pause = self.clock.monotonic() + self.limit_seconds, "", _FIRST_PAUSE
        while True:
            try:
                if (found := look()) is not None:
                    return found
                trouble = ""
            except Refused as error:
                if not error.passing:
                    raise
                trouble = f"; {error}"
            if self.clock.monotonic() >= end:
                raise Failed(f"not within {self.limit_seconds:.0f} s: {what}{trouble}")
            self.clock.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)

    def persist(self, what: str, act: Callable[[], None]) -> None:
        """Do what may be done twice, until the cluster takes it."""

        def done() -> bool:
            act()
            return True

        self.until(what, done)

    # Making

    def apply(self, *made: Object) -> None:
        self.persist("the API server takes objects", lambda: self.kubectl.apply(*made))

    def claim(self, name: str, *, times: int = 1, **how: Any) -> str:
        """Make a claim, `times` as large as usual; `how` is as for objects.claim."""
        words = (self.run, self.check, self.called(name), f"{self.size_mib * times}Mi")
        self.apply(objects.claim(*words, **how))
        return self.called(name)

    def spec(self, volume: Object, **how: Any) -> Object:
        """What a pod of this cluster is; `how` is as for objects.pod_spec."""
        return objects.pod_spec(self.place.image, volume, self.place.tolerations, **how)

    def pod(self, name: str, claim: str, *, read_only: bool = False, **how: Any) -> str:
        spec = self.spec(objects.of_claim(claim, read_only=read_only), **how)
        self.apply(objects.pod(self.run, self.check, self.called(name), spec))
        return self.called(name)

    def start(self, name: str, claim: str, **how: Any) -> str:
        made = self.pod(name, claim, **how)
        self.ready(made)
        return made

    def used(self, name: str, *, block: bool = False, **how: Any) -> tuple[str, str, str]:
        """Make a claim and a pod that writes to it; the claim, the pod and the words."""
        data = self.claim("data", block=block, **how)
        pod = self.start(name, data, block=block)
        return data, pod, self.write(pod, block=block)

    def snapshot(self, name: str, claim: str = "", content: str = "") -> str:
        """Make a snapshot of a claim, or an object for one that is there already."""
        called = self.called(name)
        self.apply(objects.snapshot(self.run, self.check, called, claim, content))
        self._taken(SNAPSHOTS, called)
        return called

    def _taken(self, kind: str, name: str) -> None:
        """Wait until a snapshot, or a group snapshot, is ready to use."""

        def is_ready() -> bool | None:
            one = self.kubectl.find(kind, name, self.namespace)
            return True if path(one, "status", "readyToUse") else None

        try:
            self.until(f"snapshot {name} is ready to use", is_ready)
        except Failed as error:
            raise Failed(f"{error}{self._why_no_snapshot(kind, name)}") from error

    def content_of(self, snapshot: str) -> Object:
        """The VolumeSnapshotContent of a snapshot; raises Failed where there is none."""
        one = self.kubectl.find(SNAPSHOTS, snapshot, self.namespace)
        name = str(path(one, "status", "boundVolumeSnapshotContentName"))
        if (content := self.kubectl.find(CONTENTS, name)) is None:
            raise Failed(f"snapshot {snapshot} has no content")
        return content

    def group_snapshot(self, name: str, count: int) -> list[str]:
        """Make a group snapshot of the check's claims, so many; the names of its snapshots."""
        called = self.called(name)
        self.apply(
            objects.group_snapshot_class(self.run, self.check, self.place.driver),
            objects.group_snapshot(self.run, self.check, called),
        )
        self._taken(GROUP_SNAPSHOTS, called)

        def members() -> list[str] | None:
            ready = [one for one in self.members() if path(one, "status", "readyToUse")]
            names = [str(one["metadata"]["name"]) for one in ready]
            return names if len(names) == count else None

        return self.until(f"group snapshot {called} has {count} snapshots", members)

    def members(self) -> list[Object]:
        """The snapshots of the check's group snapshots, which bear no label of the check's."""
        start = self.called("") if self.check else ""
        return [
            one
            for one in self.kubectl.all(SNAPSHOTS, self.namespace)
            if (group := path(one, "status", "volumeGroupSnapshotName"))
            and str(group).startswith(start)
        ]

    def _why_no_snapshot(self, kind: str, name: str) -> str:
        """What a snapshot tells of those who should have made it."""
        one = self.kubectl.find(kind, name, self.namespace) or {}
        if (message := path(one, "status", "error", "message")) is not None:
            return f"; {message}"
        if kind == GROUP_SNAPSHOTS:
            return "; does the snapshot-controller have CSIVolumeGroupSnapshot=true?"
        if (content := path(one, "status", "boundVolumeSnapshotContentName")) is None:
            return "; nobody took it up: does the snapshot-controller run?"
        if self.place.controllers:
            return ""
        labels = path(self.kubectl.find(CONTENTS, content) or {}, "metadata", "labels", default={})
        if "snapshot.storage.kubernetes.io/managed-by" not in labels:
            return "; its content names no node: --enable-distributed-snapshotting is missing"
        return ""

    def called(self, name: str) -> str:
        """Two checks have no object of one name."""
        return f"{self.check}-{name}"

    def is_mine(self, name: str) -> bool:
        """Whether a claim, or another object of the run, is the check's, by its name.

        The check, or a StatefulSet of the check's, made it. Without a check all are.
        """
        starts = (f"{self.check}-", f"{objects.TEMPLATE}-{self.check}-")
        return not self.check or name.startswith(starts)

    # Looking

    def events(self, name: str, reason: str, namespace: str = "") -> list[str]:
        """What events of a reason say of one of the check's objects.

        Events about an object without a namespace are in the namespace `default`.
        """
        return [
            " ".join(str(one.get("message", "")).split())
            for one in self.kubectl.all("events", namespace or self.namespace)
            if path(one, "involvedObject", "name") == name and one.get("reason") == reason
        ]

    def found(self, claim: str) -> Object:
        """A claim as it is now."""
        return self.kubectl.find("persistentvolumeclaims", claim, self.namespace) or {}

    def running(self, name: str) -> Object | None:
        """The pod, if it is ready; raises Failed where it never will be."""
        one = self.kubectl.find("pods", name, self.namespace)
        if one is None:
            raise Failed(f"pod {name} is gone")
        if (phase := path(one, "status", "phase")) in {"Failed", "Succeeded"}:
            raise Failed(f"pod {name} ended: {phase} {path(one, 'status', 'message', default='')}")
        state = path(one, "status", "containerStatuses", 0, default={})
        waiting = path(state, "state", "waiting", default={})
        if waiting.get("reason") in _HOPELESS:
            why = f"{waiting['reason']}: {self.place.image} is not on the node"
            raise Failed(f"{why}; name one that is: --image")
        return one if state.get("ready") else None

    def ready(self, name: str) -> Object:
        return self.until(f"pod {name} is ready", lambda: self.running(name))

    def refused(self, name: str, *words: str) -> str:
        """Wait until the scheduler says why it places a pod nowhere; raises Failed if it does.

        Each of the words must be in what it says.
        """

        def reason() -> str | None:
            one = self.kubectl.find("pods", name, self.namespace) or {}
            if path(one, "spec", "nodeName"):
                raise Failed(f"pod {name} was given a node, and must not be")
            for it in path(one, "status", "conditions", default=[]):
                if it["type"] == "PodScheduled" and it["status"] == "False":
                    message = str(it.get("message", ""))
                    return message if all(word in message for word in words) else None
            return None

        return self.until(f"the scheduler refuses pod {name}: {' '.join(words)}", reason)

    def node_of(self, pod: str) -> str:
        return str(path(self.kubectl.find("pods", pod, self.namespace), "spec", "nodeName"))

    def volume(self, claim: str) -> Object:
        """The PersistentVolume of a claim that is bound; raises Failed."""
        found = self.kubectl.find("persistentvolumeclaims", claim, self.namespace) or {}
        if (name := path(found, "spec", "volumeName")) is None:
            raise Failed(f"claim {claim} is not bound")
        if (volume := self.kubectl.find("persistentvolumes", name)) is None:
            raise Failed(f"claim {claim} is bound to {name}, which is not there")
        return volume

    def topology(self, claim: str) -> list[Any]:
        """Where a claim's volume can be reached, as nodeSelectorTerms."""
        terms = path(self.volume(claim), "spec", "nodeAffinity", "required", "nodeSelectorTerms")
        if not terms:
            raise Failed(f"the volume of claim {claim} says of no node that it is there")
        return list(terms)

    # Inside pods

    def sh(self, pod: str, script: str) -> str:
        return self.kubectl.inside(self.namespace, pod, "main", "sh", "-c", script)

    def write(self, pod: str, *, block: bool = False) -> str:
        """Write words that are new, and have them on the disk; the words."""
        words = secrets.token_hex(16)
        into = f"cat > {objects.PLACE}/words"
        if block:
            into = f"dd of={objects.DEVICE} conv=notrunc 2>/dev/null"
        script = f"printf %s {words} | {into} && sync"
        self.until(f"pod {pod} writes", lambda: self.sh(pod, script))
        return words

    def expect(self, pod: str, words: str, *, block: bool = False) -> None:
        """Raises Failed where a pod does not read the words."""
        script = f"cat {objects.PLACE}/words"
        if block:
            script = f"dd if={objects.DEVICE} bs={len(words)} count=1 2>/dev/null"
        found = self._read(pod, script)
        if found != words:
            raise Failed(f"pod {pod} reads {found[:80]!r}, {words} was written")

    def read(self, pod: str) -> str:
        """The words that a pod finds."""
        return self._read(pod, f"cat {objects.PLACE}/words")

    def _read(self, pod: str, script: str) -> str:
        return self.until(f"pod {pod} reads", lambda: self.sh(pod, script))

    def room_mib(self, pod: str, *, block: bool = False) -> int:
        """How large the file system is, or the device, to the MiB below."""
        if block:
            return self._device_mib(pod)
        found = self.until("df answers", lambda: self.sh(pod, f"df -kP {objects.PLACE}"))
        return int(found.splitlines()[-1].split()[1]) // 1024

    def _device_mib(self, pod: str) -> int:
        """Asked of dd, which every image has: whether there is something at an offset."""
        low, high = 0, 64 * self.size_mib
        while high - low > 1:
            middle = (low + high) // 2
            words = f"dd if={objects.DEVICE} of=/dev/null bs={MIB} count=1 skip={middle - 1} 2>&1"
            said = self.until("dd answers", lambda: self.sh(pod, f"{words} || :"))  # noqa: B023
            if re.search(r"^1\+0 ", said, re.MULTILINE):
                low = middle
            else:
                high = middle
        return low

    def grown(self, pod: str, before_mib: int) -> int:
        """Wait until a volume of twice the usual size is so in its pod; how large it is, in MiB.

        A file system keeps some of it for itself.
        """

        def larger() -> int | None:
            found = self.room_mib(pod)
            return found if found >= before_mib + self.size_mib * 3 // 4 else None

        return self.until(f"the volume in pod {pod} is larger than {before_mib} MiB", larger)

    # Changing

    def stop(self, name: str, kind: str = "pods") -> None:
        """Delete a pod, or another object of the check's, and wait until it is gone."""
        words = f"{kind} {name}"
        self.persist(
            f"{words} is deleted", lambda: self.kubectl.delete(kind, name, namespace=self.namespace)
        )

        def gone() -> bool | None:
            return None if self.kubectl.find(kind, name, self.namespace) else True

        self.until(f"{words} ends", gone)

    def expand(self, claim: str, times: int) -> None:
        """Ask for a volume `times` as large as usual."""
        size = f"{self.size_mib * times}Mi"
        self.change(claim, {"resources": {"requests": {"storage": size}}})

    def change(self, claim: str, spec: Object) -> None:
        """Change a claim's spec."""
        change, kind = {"spec": spec}, "persistentvolumeclaims"
        self.persist(
            "the claim is changed", lambda: self.kubectl.patch(kind, claim, change, self.namespace)
        )

    def has_size(self, claim: str, times: int) -> None:
        """Wait until a claim says that it has been given so much."""

        def is_given() -> bool | None:
            one = self.kubectl.find("persistentvolumeclaims", claim, self.namespace) or {}
            given = path(one, "status", "capacity", "storage", default="0")
            return True if quantity(given) >= self.size_mib * times * MIB else None

        self.until(f"claim {claim} has {self.size_mib * times} MiB", is_given)


def quantity(text: str) -> int:
    """Bytes, of a Kubernetes quantity; raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", text)
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"{text} is no size")
    return int(float(found[1]) * _UNITS[found[2]])
