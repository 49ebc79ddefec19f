"""Rebind a claim to its volume on the node that it moved to, step by step.

A PersistentVolume's handle and node are immutable, and so is a claim's PersistentVolume. Both are
therefore created anew, the PersistentVolume first, reserved for the claim, so the claim gets the
volume even if a StatefulSet recreates it. All state is kept in the cluster's own objects, so a look
at them gives the next step.

From the first step on the old PersistentVolume is Retain; the new one is until its claim is bound.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from time import sleep
from typing import Any
from urllib.parse import quote

from agent.core import errors, ids
from agent.extras.kubernetes.access import Server
from agent.extras.kubernetes.objects import NODES, VOLUMES, Lists, Object, Objects, claims_of

_CLAIMS = "persistentvolumeclaims"
_VOLUME, _CLAIM = "PersistentVolume", "PersistentVolumeClaim"
_RETAIN = "Retain"
# Annotations that Kubernetes' binder and scheduler set again.
_BINDING = (
    "pv.kubernetes.io/bind-completed",
    "pv.kubernetes.io/bound-by-controller",
    "volume.kubernetes.io/selected-node",
)
# Fields that differ between the old and the new PersistentVolume.
_OTHERWISE = ("claimRef", "persistentVolumeReclaimPolicy")
# A name is at most 253 characters (RFC 1123).
_SUFFIX = re.compile(r"-moved-[0-9a-f]{8}$")
_MOST_CHARACTERS = 230
# How long to wait for the cluster to bind a claim, or to finish a deletion.
_WAIT_SECONDS = 60


@dataclass(frozen=True)
class Place:
    """Where a volume is: its id there, the node's name, the driver's name."""

    handle: str
    node: str
    driver: str

    @property
    def topology_key(self) -> str:
        """Return the label of the driver's topology."""
        return f"topology.{self.driver}/node"

    @property
    def segment(self) -> str:
        """Return the value of that label on the node."""
        return ids.node_segment(self.node)

    @property
    def affinity(self) -> dict[str, Any]:
        """Return the node affinity of a PersistentVolume for this node alone."""
        wanted = {"key": self.topology_key, "operator": "In", "values": [self.segment]}
        return {"required": {"nodeSelectorTerms": [{"matchExpressions": [wanted]}]}}

    @property
    def policy_key(self) -> str:
        """Return the annotation that keeps the old reclaim policy."""
        return f"move.{self.driver}/reclaim-policy"

    @property
    def claim_key(self) -> str:
        """Return the annotation that keeps the claim's manifest."""
        return f"move.{self.driver}/claim"


@dataclass(frozen=True)
class _State:
    """One look: the old and the new PersistentVolume of the volume, and the claim."""

    namespace: str
    name: str
    old: Object | None
    new: Object | None
    claim: Object | None

    @property
    def path(self) -> str:
        """Return the claim's path."""
        return _path(self.namespace, _CLAIMS, self.name)

    @property
    def claimed(self) -> str:
        """Return the name of the claim's PersistentVolume."""
        return str(_at(self.claim or {}, "spec", "volumeName") or "")

    @property
    def confirmed_state(self) -> object:
        """Return what a confirmation is about; if it changes, the confirmation is void."""
        every = (self.old, self.new, self.claim)
        return [one and (one["metadata"]["uid"], one["spec"]) for one in every]

    def refused(self, why: str) -> errors.NotRebound:
        """Make the error that says why it cannot go on."""
        return errors.NotRebound(str(self), why)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class _Step:
    """The next step. If `what` is empty, the last confirmation includes it."""

    what: str
    act: Callable[[], None]


class Rebinding:
    """The rebinding of one claim; `was` is the volume's old id.

    Raises NotRebound, ClusterRefused, ClusterSilent; call it again to continue.
    """

    def __init__(self, server: Server, was: str, place: Place) -> None:
        self._lists, self._objects = Lists(server), Objects(server)
        self._old_handle, self._place = was, place

    def run(self, confirmed: Callable[[str], bool], report: Callable[[str], None]) -> None:
        """Take the remaining steps; raises NotConfirmed if one is declined."""
        state = self._take_steps(self._next, confirmed, report)
        where = f"{_name(state.new or {})}, the volume on {self._place.node}"
        report(f"the claim {state} is bound to {where}")

    def undo(self, confirmed: Callable[[str], bool], report: Callable[[str], None]) -> None:
        """Undo the steps while the claim has the old PersistentVolume; raises NotConfirmed."""
        state = self._take_steps(self._back, confirmed, report)
        report(f"the claim {state} is as it was, of {_name(state.old or {})}")

    def _take_steps(
        self,
        next_of: Callable[[_State], _Step | None],
        confirmed: Callable[[str], bool],
        report: Callable[[str], None],
    ) -> _State:
        """Take the remaining steps; return the final state."""
        while (step := next_of(state := self._look())) is not None:
            if step.what:
                if not confirmed(f"In Kubernetes: {step.what}?"):
                    raise errors.NotConfirmed(str(state), "rebound any further")
                # The answer may have taken a while.
                now = self._look()
                if now.confirmed_state != state.confirmed_state:
                    raise state.refused("its objects changed meanwhile: look, and call again")
                step = next_of(now)
                if step is None:
                    continue
                report(f"in Kubernetes: {step.what}")
            step.act()
        return state

    def _look(self) -> _State:
        found: dict[str, Object] = {}
        for one in self._lists.whole(VOLUMES, f"{_VOLUME}List").items:
            handle = str(_at(one, "spec", "csi", "volumeHandle"))
            if _at(one, "spec", "csi", "driver") != self._place.driver:
                continue
            if handle in (self._old_handle, self._place.handle):
                if handle in found:
                    names = f"{_name(found[handle])} and {_name(one)}"
                    raise errors.NotRebound(handle, f"{names} are both of it")
                found[handle] = one
        old, new = found.get(self._old_handle), found.get(self._place.handle)
        reference = _at(new or old or {}, "spec", "claimRef") or {}
        namespace, name = str(reference.get("namespace", "")), str(reference.get("name", ""))
        if not (namespace and name):
            why = f"no {_VOLUME} of this cluster has it for a claim"
            raise errors.NotRebound(self._old_handle, why)
        claim = self._objects.find(_path(namespace, _CLAIMS, name), _CLAIM)
        return _State(namespace, name, old, new, claim)

    def _next(self, state: _State) -> _Step | None:
        """Return the next step; raises NotRebound if the objects are not as expected."""
        old, new, claim = state.old, state.new, state.claim
        if new is not None:
            self._check_new(state, new)
            if _is_going(new):
                raise state.refused(f"{_name(new)} is being deleted")
        if old is not None and claim is not None and state.claimed == _name(old):
            return self._before(state, old, claim)
        if new is None:
            kept = f"it has {state.claimed!r}" if claim else "it is gone, and nothing is kept of it"
            raise state.refused(kept)
        if claim is None:
            return self._anew(state, new)
        if state.claimed not in ("", _name(new)):
            raise state.refused(f"it has another volume, {state.claimed}")
        return self._after(state, new, claim)

    def _back(self, state: _State) -> _Step | None:
        """Return the next step of undoing."""
        old, new, claim = state.old, state.new, state.claim
        if old is None or claim is None or state.claimed != _name(old):
            why = "it is the moved volume's already, or between both: go on with the move, and then"
            raise state.refused(f"{why} move the volume back from {self._place.node}")
        if new is not None:
            self._check_new(state, new)
            if _policy(new) != _RETAIN:
                raise state.refused(f"{_name(new)} is not Retain: have it be so")
            return self._end_of(state, new, "which no claim has yet")
        if was := _annotations(old).get(self._place.policy_key):
            what = f"have {_name(old)} be {was} again, as it was"
            return _Step(what, partial(self._restore, old))
        return None

    # Steps while the claim has the old PersistentVolume

    def _before(self, state: _State, old: Object, claim: Object) -> _Step:
        new = state.new
        if _is_going(claim):
            if new is None or _policy(old) != _RETAIN:
                raise state.refused("it is being deleted")
            return _Step("", partial(self._await_end, state, state.path, claim))
        self._check_old(state, old, claim)
        self._check_unused(state)
        if (policy := _policy(old)) != _RETAIN:
            what = f"have {_name(old)} kept whatever becomes of its claim"
            return _Step(f"{what} (Retain, now {policy})", partial(self._retain, old))
        made = _volume_at(self._place, old, claim)
        if new is None:
            what = f"make {_VOLUME} {_name(made)}, reserved for {state}, of the volume on"
            make = partial(self._objects.create, VOLUMES, made)
            return _Step(f"{what} {self._place.node}", make)
        if not _is_alike(new, made) or _policy(new) != _RETAIN:
            why = f"{_name(new)} is not what would be made of {_name(old)} now"
            raise state.refused(f"{why}: delete that, and call again")
        key = self._place.claim_key
        if _annotations(new).get(key) != (kept := _annotations(made)[key]):
            change = {"metadata": {"annotations": {key: kept}}}
            return _Step("", partial(self._change, new, change))
        what = f"delete the claim {state}, which is then made anew, for {_name(new)}"
        # This is safe: the old one is Retain, and the new one keeps the claim's manifest.
        return self._deletion(what, state.path, claim)

    def _check_old(self, state: _State, old: Object, claim: Object) -> None:
        name, key = _name(old), self._place.topology_key
        if _at(old, "spec", "claimRef", "uid") != claim["metadata"]["uid"]:
            raise state.refused(f"{name} is of another claim of that name")
        if _is_going(old):
            raise state.refused(f"{name} is being deleted")
        owners = _at(claim, "metadata", "ownerReferences") or ()
        if any(one.get("kind") == "Pod" for one in owners):
            raise state.refused("it is its pod's, and goes with it")
        if list(_wanted_labels(old)) != [key]:
            raise state.refused(f"{name} is not for a node by {key} alone; rebind it by hand")
        nodes = self._lists.whole(NODES, "NodeList").items
        wanted = self._place.segment
        if wanted not in (_at(one, "metadata", "labels", key) for one in nodes):
            why = f"no node has the label {key}={wanted}; does Carver run there?"
            raise state.refused(why)

    def _check_unused(self, state: _State) -> None:
        """Refuse while a scheduled pod uses the claim: its kubelet may be about to mount it."""
        for pod in self._lists.whole(_path(state.namespace, "pods"), "PodList").items:
            if _at(pod, "spec", "nodeName") and state.name in claims_of(pod):
                raise state.refused(f"the pod {_name(pod)} uses it; stop that")

    def _retain(self, old: Object) -> None:
        kept = {self._place.policy_key: _policy(old)}
        change = {"spec": {"persistentVolumeReclaimPolicy": _RETAIN}}
        self._change(old, {**change, "metadata": {"annotations": kept}})

    # Steps while there is no claim, or it has the new PersistentVolume

    def _check_new(self, state: _State, new: Object) -> None:
        name = _name(new)
        about = _at(new, "spec", "claimRef") or {}
        if (about.get("namespace"), about.get("name")) != (state.namespace, state.name):
            raise state.refused(f"{name} is for another claim")
        if _at(new, "spec", "nodeAffinity") != self._place.affinity:
            raise state.refused(f"{name} is not for {self._place.node}")

    def _anew(self, state: _State, new: Object) -> _Step:
        name = _name(new)
        try:
            made = json.loads(_annotations(new).get(self._place.claim_key, ""))
            about = made["metadata"]
            own = (about["namespace"], about["name"], made["spec"]["volumeName"])
        except (KeyError, TypeError, ValueError):
            raise state.refused(f"it is gone; make it anew, with volumeName {name}") from None
        if own != (state.namespace, state.name, name):
            raise state.refused(f"what {name} keeps of it is another's")
        create = partial(self._objects.create, _path(state.namespace, _CLAIMS), made)
        return _Step(f"make the claim {state} anew, for {name}", create)

    def _end_of(self, state: _State, volume: Object, why: str) -> _Step:
        """Return the deletion of a PersistentVolume, or the wait for its end."""
        if _is_going(volume):
            return _Step("", partial(self._await_end, state, _volume_path(volume), volume))
        what = f"delete {_VOLUME} {_name(volume)}, {why}"
        return self._deletion(what, _volume_path(volume), volume)

    def _after(self, state: _State, new: Object, claim: Object) -> _Step | None:
        if not _is_bound(new, claim):
            return _Step("", partial(self._await_binding, state, new))
        if (old := state.old) is not None:
            name = _name(old)
            if _policy(old) != _RETAIN:
                raise state.refused(f"{name} is not Retain any more: have it be so, and call again")
            return self._end_of(state, old, "an object that no volume goes with")
        name, kept = _name(new), _annotations(new)
        restore = partial(self._restore, new)
        if was := kept.get(self._place.policy_key):
            what = f"have {name} be {was} again, as it was; see first that its data are there"
            return _Step(what, restore)
        return _Step("", restore) if self._place.claim_key in kept else None

    def _await_binding(self, state: _State, new: Object) -> None:
        def is_bound() -> bool:
            claim = self._objects.find(state.path, _CLAIM)
            volume = self._objects.find(_volume_path(new), _VOLUME)
            return None not in (claim, volume) and _is_bound(volume or {}, claim or {})

        self._wait(state, is_bound, "it is not bound yet; see `kubectl describe pvc`")

    def _await_end(self, state: _State, path: str, going: Object) -> None:
        is_claim = path == state.path

        def is_gone() -> bool:
            found = self._objects.find(path, _CLAIM if is_claim else _VOLUME)
            return found is None or bool(found["metadata"]["uid"] != going["metadata"]["uid"])

        kept = ", ".join(_at(going, "metadata", "finalizers") or ()) or "nothing that it names"
        who = "it" if is_claim else _name(going)
        self._wait(state, is_gone, f"{who} is not gone yet, kept by {kept}")

    def _deletion(self, what: str, path: str, one: Object) -> _Step:
        return _Step(what, partial(self._objects.delete, path, one["metadata"]["uid"]))

    def _restore(self, new: Object) -> None:
        """Restore the policy and remove both annotations; this is the last step."""
        keys = (self._place.policy_key, self._place.claim_key)
        change: dict[str, Any] = {"metadata": {"annotations": dict.fromkeys(keys)}}
        if was := _annotations(new).get(self._place.policy_key):
            change["spec"] = {"persistentVolumeReclaimPolicy": was}
        self._change(new, change)

    def _change(self, volume: Object, change: Object) -> None:
        version = str(volume["metadata"]["resourceVersion"])
        self._objects.change(_volume_path(volume), change, version)

    def _wait(self, state: _State, is_so: Callable[[], bool], why: str) -> None:
        for _ in range(_WAIT_SECONDS):
            if is_so():
                return
            sleep(1.0)
        raise state.refused(f"{why}; call again")


def _volume_at(place: Place, old: Object, claim: Object) -> dict[str, Any]:
    """Make the new PersistentVolume: Retain, reserved for the claim, with its manifest kept."""
    made = _anew(_VOLUME, old, moved_name(_name(old), place.handle))
    kept = json.dumps(_claim_of(claim, _name(made)), sort_keys=True)
    made["metadata"].pop("ownerReferences", None)
    made["metadata"]["annotations"] = {**_annotations(made), place.claim_key: kept}
    reference = {"apiVersion": "v1", "kind": _CLAIM, "name": _name(claim)}
    made["spec"] |= {
        "csi": {**old["spec"]["csi"], "volumeHandle": place.handle},
        "nodeAffinity": place.affinity,
        "claimRef": {**reference, "namespace": claim["metadata"]["namespace"]},
        "persistentVolumeReclaimPolicy": _RETAIN,
    }
    return made


def moved_name(old: str, handle: str) -> str:
    """Return the name of the new PersistentVolume for the volume of that id."""
    digest = hashlib.sha256(handle.encode()).hexdigest()
    return f"{_SUFFIX.sub('', old)[:_MOST_CHARACTERS]}-moved-{digest[:8]}"


def _claim_of(claim: Object, volume: str) -> dict[str, Any]:
    made = _anew(_CLAIM, claim, _name(claim))
    made["metadata"]["namespace"] = claim["metadata"]["namespace"]
    made["spec"]["volumeName"] = volume
    return made


def _anew(kind: str, was: Object, called: str) -> dict[str, Any]:
    """Copy an object without the fields that the cluster sets."""
    about = was["metadata"]
    kept = {
        "name": called,
        "labels": about.get("labels"),
        "annotations": {k: v for k, v in _annotations(was).items() if k not in _BINDING},
        "ownerReferences": about.get("ownerReferences"),
    }
    return {
        "apiVersion": "v1",
        "kind": kind,
        "metadata": {key: value for key, value in kept.items() if value},
        "spec": dict(was["spec"]),
    }


def _is_alike(volume: Object, made: Object) -> bool:
    one, other = (
        {k: v for k, v in each["spec"].items() if k not in _OTHERWISE} for each in (volume, made)
    )
    return one == other


def _is_bound(volume: Object, claim: Object) -> bool:
    said = (_at(claim, "status", "phase"), _at(claim, "spec", "volumeName"))
    own: object = _at(volume, "spec", "claimRef", "uid")
    return said == ("Bound", _name(volume)) and own == claim["metadata"]["uid"]


def _wanted_labels(volume: Object) -> Iterator[str]:
    for term in _at(volume, "spec", "nodeAffinity", "required", "nodeSelectorTerms") or ():
        for wanted in (*(term.get("matchExpressions") or ()), *(term.get("matchFields") or ())):
            yield str(wanted.get("key"))


def _annotations(one: Object) -> Mapping[str, str]:
    return _at(one, "metadata", "annotations") or {}


def _policy(volume: Object) -> str:
    return str(_at(volume, "spec", "persistentVolumeReclaimPolicy") or "")


def _name(one: Object) -> str:
    return str(_at(one, "metadata", "name") or "")


def _is_going(one: Object) -> bool:
    return _at(one, "metadata", "deletionTimestamp") is not None


def _volume_path(volume: Object) -> str:
    return f"{VOLUMES}/{quote(_name(volume), safe='')}"


def _path(namespace: str, *inside: str) -> str:
    return "/".join(["/api/v1/namespaces", *(quote(one, safe="") for one in (namespace, *inside))])


def _at(one: Object, *keys: str) -> Any:
    found: Any = one
    for key in keys:
        if not isinstance(found, dict):
            return None
        found = found.get(key)
    return found
