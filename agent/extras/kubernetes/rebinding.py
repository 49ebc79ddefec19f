"""Rebind a claim to its volume on the node that it moved to, step by step.

A PersistentVolume's handle and node are immutable, and so is a claim's PersistentVolume. Both are
therefore created anew, the PersistentVolume first, reserved for the claim, so the claim gets the
volume even if a StatefulSet recreates it. All state is kept in the cluster's own objects, so a look
at them gives the next step.

From the first step on the old PersistentVolume is Retain; the new one is until its claim is bound.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from agent.core import errors
from agent.extras.kubernetes import manifests
from agent.extras.kubernetes.manifests import CLAIM, RETAIN, VOLUME, Place
from agent.extras.kubernetes.objects import Lists, Object, Objects

# How long to wait for the cluster to bind a claim, or to finish a deletion.
_WAIT_SECONDS = 60
_ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True)
class _State:
    """One look: the old and the new PersistentVolume of the volume, and the claim."""

    namespace: str
    name: str
    old: Object | None
    new: Object | None
    claim: Object | None

    @property
    def claimed(self) -> str:
        """Return the name of the claim's PersistentVolume."""
        return str(manifests.at(self.claim or {}, "spec", "volumeName") or "")

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

    def __init__(
        self,
        lists: Lists,
        objects: Objects,
        was: str,
        place: Place,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._lists, self._objects = lists, objects
        self._old_handle, self._place = was, place
        self._sleep = sleep

    def run(self, confirmed: Callable[[str], bool], report: Callable[[str], None]) -> None:
        """Take the remaining steps; raises NotConfirmed if one is declined."""
        state = self._take_steps(self._next, confirmed, report)
        where = f"{manifests.name(state.new or {})}, the volume on {self._place.node}"
        report(f"the claim {state} is bound to {where}")

    def undo(self, confirmed: Callable[[str], bool], report: Callable[[str], None]) -> None:
        """Undo the steps while the claim has the old PersistentVolume; raises NotConfirmed."""
        state = self._take_steps(self._back, confirmed, report)
        report(f"the claim {state} is as it was, of {manifests.name(state.old or {})}")

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
        for one in self._lists.whole(manifests.VOLUMES, f"{VOLUME}List").items:
            handle = str(manifests.at(one, "spec", "csi", "volumeHandle"))
            if manifests.at(one, "spec", "csi", "driver") != self._place.driver:
                continue
            if handle in (self._old_handle, self._place.handle):
                if handle in found:
                    names = f"{manifests.name(found[handle])} and {manifests.name(one)}"
                    raise errors.NotRebound(handle, f"{names} are both of it")
                found[handle] = one
        old, new = found.get(self._old_handle), found.get(self._place.handle)
        reference = manifests.at(new or old or {}, "spec", "claimRef") or {}
        namespace, name = str(reference.get("namespace", "")), str(reference.get("name", ""))
        if not (namespace and name):
            why = f"no {VOLUME} of this cluster has it for a claim"
            raise errors.NotRebound(self._old_handle, why)
        claim = self._objects.find(manifests.claim_path(namespace, name), CLAIM)
        return _State(namespace, name, old, new, claim)

    def _next(self, state: _State) -> _Step | None:
        """Return the next step; raises NotRebound if the objects are not as expected."""
        old, new, claim = state.old, state.new, state.claim
        if new is not None:
            self._check_new(state, new)
            if manifests.is_going(new):
                raise state.refused(f"{manifests.name(new)} is being deleted")
        if old is not None and claim is not None and state.claimed == manifests.name(old):
            return self._before(state, old, claim)
        if new is None:
            kept = f"it has {state.claimed!r}" if claim else "it is gone, and nothing is kept of it"
            raise state.refused(kept)
        if claim is None:
            return self._anew(state, new)
        if state.claimed not in ("", manifests.name(new)):
            raise state.refused(f"it has another volume, {state.claimed}")
        return self._after(state, new, claim)

    def _back(self, state: _State) -> _Step | None:
        """Return the next step of undoing."""
        old, new, claim = state.old, state.new, state.claim
        if old is None or claim is None or state.claimed != manifests.name(old):
            why = "it is the moved volume's already, or between both: go on with the move, and then"
            raise state.refused(f"{why} move the volume back from {self._place.node}")
        if new is not None:
            self._check_new(state, new)
            if manifests.policy(new) != RETAIN:
                raise state.refused(f"{manifests.name(new)} is not Retain: have it be so")
            if manifests.is_going(new):
                return _Step("", partial(self._await_end, state, new))
            what = f"delete {VOLUME} {manifests.name(new)}, which no claim has yet"
            path, uid = manifests.volume_path(new), new["metadata"]["uid"]
            return _Step(what, partial(self._objects.delete, path, uid))
        if was := manifests.annotations(old).get(self._place.policy_key):
            what = f"have {manifests.name(old)} be {was} again, as it was"
            return _Step(what, partial(self._restore, old))
        return None

    # Steps while the claim has the old PersistentVolume

    def _before(self, state: _State, old: Object, claim: Object) -> _Step:
        new = state.new
        if manifests.is_going(claim):
            if new is None or manifests.policy(old) != RETAIN:
                raise state.refused("it is being deleted")
            return _Step("", partial(self._await_deletion, state, claim))
        self._check_old(state, old, claim)
        self._check_unused(state)
        if (policy := manifests.policy(old)) != RETAIN:
            what = f"have {manifests.name(old)} kept whatever becomes of its claim"
            return _Step(f"{what} (Retain, now {policy})", partial(self._retain, old))
        made = manifests.volume_at(self._place, old, claim)
        if new is None:
            what = f"make {VOLUME} {manifests.name(made)}, reserved for {state}, of the volume on"
            make = partial(self._objects.create, manifests.VOLUMES, made)
            return _Step(f"{what} {self._place.node}", make)
        if not manifests.is_alike(new, made) or manifests.policy(new) != RETAIN:
            why = f"{manifests.name(new)} is not what would be made of {manifests.name(old)} now"
            raise state.refused(f"{why}: delete that, and call again")
        key = self._place.claim_key
        if manifests.annotations(new).get(key) != (kept := manifests.annotations(made)[key]):
            change = {"metadata": {"annotations": {key: kept}}}
            return _Step("", partial(self._change, new, change))
        what = f"delete the claim {state}, which is then made anew, for {manifests.name(new)}"
        # This is safe: the old one is Retain, and the new one keeps the claim's manifest.
        return _Step(what, partial(self._objects.delete, _path(state), claim["metadata"]["uid"]))

    def _check_old(self, state: _State, old: Object, claim: Object) -> None:
        name, key = manifests.name(old), self._place.topology_key
        if manifests.at(old, "spec", "claimRef", "uid") != claim["metadata"]["uid"]:
            raise state.refused(f"{name} is of another claim of that name")
        if manifests.is_going(old):
            raise state.refused(f"{name} is being deleted")
        owners = manifests.at(claim, "metadata", "ownerReferences") or ()
        if any(one.get("kind") == "Pod" for one in owners):
            raise state.refused("it is its pod's, and goes with it")
        if list(manifests.wanted_labels(old)) != [key]:
            raise state.refused(f"{name} is not for a node by {key} alone; rebind it by hand")
        nodes = self._lists.whole(manifests.NODES, "NodeList").items
        wanted = self._place.segment
        if wanted not in (manifests.at(one, "metadata", "labels", key) for one in nodes):
            why = f"no node has the label {key}={wanted}; does Carver run there?"
            raise state.refused(why)

    def _check_unused(self, state: _State) -> None:
        """Refuse while a scheduled pod uses the claim: its kubelet may be about to mount it."""
        for pod in self._lists.whole(manifests.pods_path(state.namespace), "PodList").items:
            if manifests.at(pod, "status", "phase") in _ENDED:
                continue
            if manifests.at(pod, "spec", "nodeName") and state.name in manifests.claims_of(pod):
                raise state.refused(f"the pod {manifests.name(pod)} uses it; stop that")

    def _retain(self, old: Object) -> None:
        kept = {self._place.policy_key: manifests.policy(old)}
        change = {"spec": {"persistentVolumeReclaimPolicy": RETAIN}}
        self._change(old, {**change, "metadata": {"annotations": kept}})

    def _await_deletion(self, state: _State, claim: Object) -> None:
        uid = claim["metadata"]["uid"]

        def is_gone() -> bool:
            found = self._objects.find(_path(state), CLAIM)
            return found is None or bool(found["metadata"]["uid"] != uid)

        self._wait(state, is_gone, f"it is not gone yet, kept by {manifests.finalizers(claim)}")

    # Steps while there is no claim, or it has the new PersistentVolume

    def _check_new(self, state: _State, new: Object) -> None:
        name = manifests.name(new)
        about = manifests.at(new, "spec", "claimRef") or {}
        if (about.get("namespace"), about.get("name")) != (state.namespace, state.name):
            raise state.refused(f"{name} is for another claim")
        if manifests.at(new, "spec", "nodeAffinity") != self._place.affinity:
            raise state.refused(f"{name} is not for {self._place.node}")

    def _anew(self, state: _State, new: Object) -> _Step:
        name = manifests.name(new)
        try:
            made = json.loads(manifests.annotations(new).get(self._place.claim_key, ""))
            about = made["metadata"]
            own = (about["namespace"], about["name"], made["spec"]["volumeName"])
        except (KeyError, TypeError, ValueError):
            raise state.refused(f"it is gone; make it anew, with volumeName {name}") from None
        if own != (state.namespace, state.name, name):
            raise state.refused(f"what {name} keeps of it is another's")
        path = manifests.claims_path(state.namespace)
        what = f"make the claim {state} anew, for {name}"
        return _Step(what, partial(self._objects.create, path, made))

    def _after(self, state: _State, new: Object, claim: Object) -> _Step | None:
        if not manifests.is_bound(new, claim):
            return _Step("", partial(self._await_binding, state, new))
        if (old := state.old) is not None:
            name = manifests.name(old)
            if manifests.policy(old) != RETAIN:
                raise state.refused(f"{name} is not Retain any more: have it be so, and call again")
            if manifests.is_going(old):
                return _Step("", partial(self._await_end, state, old))
            path, uid = manifests.volume_path(old), old["metadata"]["uid"]
            delete = partial(self._objects.delete, path, uid)
            return _Step(f"delete {VOLUME} {name}, an object that no volume goes with", delete)
        name, kept = manifests.name(new), manifests.annotations(new)
        restore = partial(self._restore, new)
        if was := kept.get(self._place.policy_key):
            what = f"have {name} be {was} again, as it was; see first that its data are there"
            return _Step(what, restore)
        return _Step("", restore) if self._place.claim_key in kept else None

    def _await_binding(self, state: _State, new: Object) -> None:
        def is_bound() -> bool:
            claim = self._objects.find(_path(state), CLAIM)
            volume = self._objects.find(manifests.volume_path(new), VOLUME)
            return None not in (claim, volume) and manifests.is_bound(volume or {}, claim or {})

        self._wait(state, is_bound, "it is not bound yet; see `kubectl describe pvc`")

    def _await_end(self, state: _State, old: Object) -> None:
        path, name = manifests.volume_path(old), manifests.name(old)
        why = f"{name} is not gone yet, kept by {manifests.finalizers(old)}"
        self._wait(state, lambda: self._objects.find(path, VOLUME) is None, why)

    def _restore(self, new: Object) -> None:
        """Restore the policy and remove both annotations; this is the last step."""
        keys = (self._place.policy_key, self._place.claim_key)
        change: dict[str, Any] = {"metadata": {"annotations": dict.fromkeys(keys)}}
        if was := manifests.annotations(new).get(self._place.policy_key):
            change["spec"] = {"persistentVolumeReclaimPolicy": was}
        self._change(new, change)

    def _change(self, volume: Object, change: Object) -> None:
        version = str(volume["metadata"]["resourceVersion"])
        self._objects.change(manifests.volume_path(volume), change, version)

    def _wait(self, state: _State, is_so: Callable[[], bool], why: str) -> None:
        for _ in range(_WAIT_SECONDS):
            if is_so():
                return
            self._sleep(1.0)
        raise state.refused(f"{why}; call again")


def _path(state: _State) -> str:
    return manifests.claim_path(state.namespace, state.name)
