"""Rebind a claim to its volume on the node that the volume moved to, step by step.

The volume id and the node in a PersistentVolume are immutable, and so is the PersistentVolume of a
claim. Therefore both objects are created anew:

1. Set the reclaim policy of the old PersistentVolume to Retain, and note the former policy in an
   annotation.
2. Create the new PersistentVolume. Its reclaim policy is Retain. It is reserved for the claim. An
   annotation has the claim's manifest.
3. Delete the claim, and wait until it is gone.
4. Create the claim anew from the manifest, and wait until it is bound to the new PersistentVolume.
   If a StatefulSet was faster, write the name of the new PersistentVolume into its claim.
5. Delete the old PersistentVolume, and wait until it is gone.
6. Give the new PersistentVolume the former reclaim policy, and remove the annotations.

All state is kept in the cluster's own objects, so the next step follows from reading them. From the
first step on, the old PersistentVolume has the policy Retain. The new one has it until its claim is
bound and the old PersistentVolume is gone.

A claim may be deleted meanwhile by its user, alone or with its namespace:

- If step 4 is refused because the namespace is being deleted or is gone, the rebinding is undone:
  the old PersistentVolume gets its former policy, without a claim.
- If the claim is deleted after it was bound to the new PersistentVolume, steps 5 and 6 follow
  without the claim.

Then the volume is kept or deleted as the former reclaim policy says. A claim that its user deletes
right before step 3 is made anew once: nothing tells that deletion from the one of step 3.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from time import sleep
from typing import Any
from urllib.parse import quote

from agent.core import errors, ids
from agent.extras.kubernetes.access import Server
from agent.extras.kubernetes.objects import (
    NAMESPACE_TERMINATING,
    NODES,
    VOLUMES,
    Lists,
    Object,
    Objects,
    claims_of,
)

_CLAIMS = "persistentvolumeclaims"
_VOLUME, _CLAIM = "PersistentVolume", "PersistentVolumeClaim"
_RETAIN = "Retain"
# Finalizers of claims that are removed only once a copy of the claim's volume is complete: a
# VolumeSnapshot (external-snapshotter, pkg/utils/util.go, PVCFinalizer), or the volume of another
# claim (external-provisioner, pkg/controller/controller.go, pvcCloneFinalizer).
OF_WORK = (
    "snapshot.storage.kubernetes.io/pvc-as-source-protection",
    "provisioner.storage.kubernetes.io/cloning-protection",
)
# Annotations that are not copied to the new objects, as Kubernetes' binder and scheduler set them.
_BINDING = (
    "pv.kubernetes.io/bind-completed",
    "pv.kubernetes.io/bound-by-controller",
    "volume.kubernetes.io/selected-node",
)
# Fields of the spec that may differ between the new PersistentVolume as it is and as this program
# would make it.
_OTHERWISE = ("claimRef", "persistentVolumeReclaimPolicy")
# Pattern of the suffix in the name of a PersistentVolume that was made by a rebinding.
_SUFFIX = re.compile(r"-moved-[0-9a-f]{8}$")
# Type of the condition of a claim whose volume has still to be grown on its node, and the beginning
# of the states that say so in allocatedResourceStatuses (k8s.io/api/core/v1, types.go).
_RESIZE_PENDING, _NODE_RESIZE = "FileSystemResizePending", "NodeResize"
# Maximum number of characters of a PersistentVolume's name before the suffix. A name has at most
# 253 characters (RFC 1123).
_MOST_CHARACTERS = 230
# Why a claim is not made anew, and what to do, as the end of a sentence.
_ENDED = (
    "it cannot be made anew, as its namespace is being deleted or is gone: undo the move (`carver"
    " volume move NAME --undo --kubeconfig FILE`); its volume is then kept or deleted as its"
    " reclaim policy says"
)
# Reasons for which the API server refuses to create a claim in a namespace that is being deleted,
# or that does not exist.
_NAMESPACE_ENDED = (NAMESPACE_TERMINATING, "NotFound")
# Texts of refusals of a trial that say nothing of the write itself. A webhook may take no part in
# trials (apiserver, pkg/admission/plugin/webhook/errors). Of a quota, the claim has its share until
# it is deleted, and the trial wants one more (apiserver, pkg/admission/plugin/resourcequota).
_NO_TRIAL = ("does not support dry run", "exceeded quota")
# Time limit, in seconds, of the wait until a claim is bound, or a deletion has finished, and the
# interval at which that is looked for.
_WAIT_SECONDS, _LOOK_SECONDS = 60.0, 1.0
# The interval at which the end of a claim is looked for. It is short, as a StatefulSet recreates a
# claim at once, and an empty volume may be made for that.
_CLAIM_SECONDS = 0.25


@dataclass(frozen=True)
class Place:
    """The node to which a volume was moved, and the volume's new id.

    `handle` is the id, `node` the node's name, `driver` the CSI driver's name. Raises NotRebound
    without an id: a node gives none while the volume's group is missing there.
    """

    handle: str
    node: str
    driver: str

    def __post_init__(self) -> None:
        if not self.handle:
            why = f"node {self.node} does not show the volume's id now; call again"
            raise errors.NotRebound("of a moved volume", why)

    @property
    def topology_key(self) -> str:
        """The key of the driver's topology label on Nodes."""
        return f"topology.{self.driver}/node"

    @property
    def segment(self) -> str:
        """The value of the driver's topology label on the node."""
        return ids.node_segment(self.node)

    @property
    def affinity(self) -> dict[str, Any]:
        """The node affinity of a PersistentVolume for this node alone."""
        expression = {"key": self.topology_key, "operator": "In", "values": [self.segment]}
        return {"required": {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}}

    @property
    def policy_key(self) -> str:
        """The key of the annotation that keeps a PersistentVolume's former reclaim policy."""
        return f"move.{self.driver}/reclaim-policy"

    @property
    def claim_key(self) -> str:
        """The key of the annotation that keeps the claim's manifest in the new PersistentVolume."""
        return f"move.{self.driver}/claim"


@dataclass(frozen=True)
class _State:
    """The objects of a rebinding as last read; None for an object that does not exist.

    `old_volume` and `new_volume` are the PersistentVolumes. `namespace` and `name` are those of the
    claim.
    """

    namespace: str
    name: str
    old_volume: Object | None
    new_volume: Object | None
    claim: Object | None

    @property
    def path(self) -> str:
        """The path of the claim in the Kubernetes API."""
        return _path(self.namespace, _CLAIMS, self.name)

    @property
    def claimed(self) -> str:
        """The name of the PersistentVolume that the claim names; empty if it names none."""
        return str(_field_at(self.claim or {}, "spec", "volumeName") or "")

    @property
    def has_ended(self) -> bool:
        """Whether the claim was bound to the new PersistentVolume, and was deleted since.

        Another claim of that name may exist. A rebinding deletes the claim of the old
        PersistentVolume only, so another did that.
        """
        new = self.new_volume or {}
        bound_uid = _field_at(new, "spec", "claimRef", "uid")
        claim_uid = _field_at(self.claim or {}, "metadata", "uid")
        is_another = claim_uid != bound_uid and self.claimed != _name(new)
        return bound_uid is not None and is_another

    @property
    def confirmed_state(self) -> object:
        """The UIDs and specs of the objects; if they change, the user's confirmation is void."""
        objects = (self.old_volume, self.new_volume, self.claim)
        return [item and (item["metadata"]["uid"], item["spec"]) for item in objects]

    def refused(self, reason: str) -> errors.NotRebound:
        """Return the error NotRebound, which says why the claim cannot be rebound."""
        return errors.NotRebound(str(self), reason)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class _Step:
    """The next step of a rebinding: `question` is asked of the user, `action` takes the step.

    If `question` is empty, the user is not asked, as the last confirmation includes this step. No
    step follows the one that `is_last`: the objects may be deleted at once then.
    """

    question: str
    action: Callable[[], None]
    is_last: bool = False


class Rebinding:
    """The rebinding of one claim to its volume, which was moved to `place`.

    `old_handle` is the volume's id before it was moved. `left_node` is the node that it has left
    for good, so that no pod there can use it; empty if that is not known. A repeated call of a
    method goes on where the last call ended. Methods raise NotRebound if the objects do not allow
    the next step; ClusterRefused, ClusterSilent if the API server refuses or does not answer.
    """

    def __init__(
        self, server: Server, old_handle: str, place: Place, *, left_node: str = ""
    ) -> None:
        self._lists, self._objects = Lists(server), Objects(server)
        self._old_handle, self._place, self._left_node = old_handle, place, left_node

    def run(self, confirmed: Callable[[str], bool], report: Callable[[str], None]) -> None:
        """Rebind the claim: take the steps that remain, each after the user has confirmed it.

        `confirmed` asks the user. `report` is called with the text of each step, and of the result.
        Raises NotConfirmed if the user declines a step, ClaimEnded if the claim cannot be made anew
        because its namespace is being deleted.
        """
        state = self._take_steps(self._next, confirmed, report)
        where = f"{_name(state.new_volume or {})}, the volume on {self._place.node}"
        if state.has_ended:
            report(f"the claim {state} was deleted meanwhile, which had {where}")
        else:
            report(f"the claim {state} is bound to {where}")

    def rehearse(self) -> None:
        """Have the API server check each write of a rebinding that has not begun; change nothing.

        Its admission control may refuse to create or delete an object, and its limits a claim that
        is too large to be kept in an annotation. Call this before a pod loses the volume. Raises
        NotRebound if the claim could not be rebound now.
        """
        state = self._read_state()
        old, claim = state.old_volume, state.claim
        if old is None or claim is None or state.new_volume is not None:
            return
        if _is_going(claim) or state.claimed != _name(old):
            return
        self._check_old(state, old, claim)
        expected, objects = _volume_at(self._place, old, claim), self._objects
        self._try(state, partial(self._retain, old, is_trial=True))
        self._try(state, partial(objects.create, VOLUMES, expected, is_trial=True))
        self._try_claim(state, expected)
        for path, item in ((state.path, claim), (_volume_path(old), old)):
            self._try(state, partial(objects.delete, path, item["metadata"]["uid"], is_trial=True))

    def undo(self, confirmed: Callable[[str], bool], report: Callable[[str], None]) -> None:
        """Undo the steps of a rebinding, each after the user has confirmed it.

        This is possible only while the claim has the old PersistentVolume, or cannot be made anew
        (ClaimEnded). Raises NotConfirmed if the user declines a step.
        """
        state = self._take_steps(self._next_undo, confirmed, report)
        if _is_present(state.claim, state.old_volume or {}):
            report(f"the claim {state} is as it was, of {_name(state.old_volume or {})}")
        else:
            report(f"{_name(state.old_volume or {})} is as it was; its claim {state} is gone")

    def _take_steps(
        self,
        next_step: Callable[[_State], _Step | None],
        confirmed: Callable[[str], bool],
        report: Callable[[str], None],
    ) -> _State:
        """Take the steps that `next_step` returns, and return the final state.

        `next_step` returns the next step in a state; None if no step is left. The user confirms
        each step that has a question. Raises NotConfirmed if the user declines, NotRebound if the
        objects change while the user is asked.
        """
        while (step := next_step(state := self._read_state())) is not None:
            if step.question:
                if not confirmed(f"In Kubernetes: {step.question}?"):
                    raise errors.NotConfirmed(str(state), "rebound any further")
                # Read the objects again, as the user may have taken a while to confirm.
                current = self._read_state()
                if current.confirmed_state != state.confirmed_state:
                    raise state.refused("its objects changed meanwhile: look, and call again")
                step = next_step(current)
                if step is None:
                    continue
                report(f"in Kubernetes: {step.question}")
            step.action()
            if step.is_last:
                break
        return state

    def _read_state(self) -> _State:
        volumes: dict[str, Object] = {}
        for volume in self._lists.whole(VOLUMES, f"{_VOLUME}List").items:
            handle = str(_field_at(volume, "spec", "csi", "volumeHandle"))
            if _field_at(volume, "spec", "csi", "driver") != self._place.driver:
                continue
            if handle in (self._old_handle, self._place.handle):
                if handle in volumes:
                    names = f"{_name(volumes[handle])} and {_name(volume)}"
                    raise errors.NotRebound(handle, f"{names} are both of it")
                volumes[handle] = volume
        old, new = volumes.get(self._old_handle), volumes.get(self._place.handle)
        reference = _field_at(new or old or {}, "spec", "claimRef") or {}
        namespace, name = str(reference.get("namespace", "")), str(reference.get("name", ""))
        if not (namespace and name):
            why = f"no {_VOLUME} of this cluster has it for a claim"
            raise errors.NotRebound(self._old_handle, why)
        claim = self._objects.find(_path(namespace, _CLAIMS, name), _CLAIM)
        return _State(namespace, name, old, new, claim)

    def _next(self, state: _State) -> _Step | None:
        """Return the next step of rebinding the claim; None if no step is left.

        Raises NotRebound if the objects do not allow a next step.
        """
        old, new, claim = state.old_volume, state.new_volume, state.claim
        if new is not None:
            self._check_new(state, new)
        if old is not None and claim is not None and state.claimed == _name(old):
            return self._next_with_old_volume(state, old, claim)
        if state.has_ended and new is not None:
            return self._next_without_claim(state, new)
        if new is not None and _is_going(new):
            raise state.refused(f"{_name(new)} is being deleted")
        if new is None:
            problem = (
                f"it has {state.claimed!r}" if claim else "it is gone, and nothing is kept of it"
            )
            raise state.refused(problem)
        if claim is None:
            return self._recreate_claim(state, new)
        if state.claimed not in ("", _name(new)):
            raise state.refused(f"it has another volume, {state.claimed}")
        return self._next_with_new_volume(state, new, claim)

    def _next_undo(self, state: _State) -> _Step | None:
        """Return the next step of undoing the rebinding; None if no step is left.

        If the claim of the old PersistentVolume was deleted, and there is no new one, only the
        former reclaim policy is restored. So it is if the claim cannot be made anew. Raises
        NotRebound if the claim does not have the old PersistentVolume any more, or if the new
        PersistentVolume is not as a rebinding makes it.
        """
        old, new, claim = state.old_volume, state.new_volume, state.claim
        if old is not None and new is None and not _is_present(claim, old):
            return self._restoring(old)
        # Once the claim's deletion has begun, it cannot be stopped: only the new PersistentVolume
        # keeps what the claim is made anew from.
        is_going = claim is not None and new is not None and _is_going(claim)
        if old is not None and new is not None and claim is None and not state.has_ended:
            self._require_ended(state, new)
        elif old is None or claim is None or state.claimed != _name(old) or is_going:
            raise self._too_late(state, "it is the moved volume's already, or between both")
        if new is not None:
            self._check_new(state, new)
            if _policy(new) != _RETAIN:
                raise state.refused(f"{_name(new)} is not Retain: have it be so")
            return self._end_of(state, new, "which no claim has yet")
        return self._restoring(old)

    def _restoring(self, old_volume: Object) -> _Step | None:
        """Return the step that restores the old reclaim policy; None if it is as it was."""
        if policy := _annotations(old_volume).get(self._place.policy_key):
            question = f"have {_name(old_volume)} be {policy} again, as it was"
            return _Step(question, partial(self._restore, old_volume))
        return None

    # Steps of a rebinding while the claim has the old PersistentVolume

    def _next_with_old_volume(self, state: _State, old_volume: Object, claim: Object) -> _Step:
        new = state.new_volume
        if _is_going(claim):
            if new is None or _policy(old_volume) != _RETAIN:
                raise state.refused("it is being deleted")
            return _Step("", partial(self._await_end, state, state.path, claim))
        self._check_old(state, old_volume, claim)
        self._check_unused(state)
        if (policy := _policy(old_volume)) != _RETAIN:
            question = f"have {_name(old_volume)} kept whatever becomes of its claim"
            return _Step(f"{question} (Retain, now {policy})", partial(self._retain, old_volume))
        expected = _volume_at(self._place, old_volume, claim)
        if new is None:
            question = f"make {_VOLUME} {_name(expected)}, reserved for {state}, of the volume on"
            make = partial(self._objects.create, VOLUMES, expected)
            return _Step(f"{question} {self._place.node}", make)
        if _policy(new) != _RETAIN:
            raise state.refused(f"{_name(new)} is not Retain: have it be so, and call again")
        if _field_at(new, "spec", "claimRef", "uid") is not None:
            # Kubernetes binds no other claim to it, also none of the same name.
            raise state.refused(f"{_name(new)} is of an earlier claim: delete that, and call again")
        if _is_going(new) or not _is_alike(new, expected):
            # The old one was changed since, such as by external-resizer, which writes the capacity
            # after the volume has grown. Make the new one anew: no claim has it.
            reason = f"which is not what would be made of {_name(old_volume)} now"
            return self._end_of(state, new, reason)
        key = self._place.claim_key
        if _annotations(new).get(key) != (manifest := _annotations(expected)[key]):
            change = {"metadata": {"annotations": {key: manifest}}}
            return _Step("", partial(self._change, new, change))
        question = f"delete the claim {state}, which is then made anew, for {_name(new)}"
        # Delete the claim now: the old PersistentVolume has the policy Retain, and the new one
        # keeps the claim's manifest.
        return _Step(question, partial(self._delete_claim, state, claim, new))

    def _delete_claim(self, state: _State, claim: Object, new_volume: Object) -> None:
        """Delete the claim, unless the API server would refuse to create it anew."""
        self._try_claim(state, new_volume)
        self._objects.delete(state.path, claim["metadata"]["uid"])

    def _try_claim(self, state: _State, new_volume: Object) -> None:
        """Raise NotRebound if the API server would refuse to create the claim anew.

        The trial has another name, as the claim exists.
        """
        manifest = self._manifest(state, new_volume)
        metadata = {**manifest["metadata"], "name": moved_name(state.name, self._place.handle)}
        path, trial = _path(state.namespace, _CLAIMS), {**manifest, "metadata": metadata}
        self._try(state, partial(self._objects.create, path, trial, is_trial=True))

    def _try(self, state: _State, write: Callable[[], None]) -> None:
        """Raise NotRebound if the API server refuses a trial of a write."""
        try:
            write()
        except errors.ClusterRefused as error:
            if not error.is_refusal:
                raise
            # An object that was changed meanwhile is read anew by the write itself.
            is_no_trial = any(text in str(error) for text in _NO_TRIAL)
            if not is_no_trial and error.reason != "Conflict":
                raise state.refused(f"{error}; this was a trial, and changed nothing") from None

    def _check_old(self, state: _State, old_volume: Object, claim: Object) -> None:
        name, key = _name(old_volume), self._place.topology_key
        if _field_at(old_volume, "spec", "claimRef", "uid") != claim["metadata"]["uid"]:
            raise state.refused(f"{name} is of another claim of that name")
        if _is_going(old_volume):
            raise state.refused(f"{name} is being deleted")
        owners = _field_at(claim, "metadata", "ownerReferences") or ()
        if any(owner.get("kind") == "Pod" for owner in owners):
            raise state.refused("it is its pod's, and goes with it")
        finalizers = _field_at(claim, "metadata", "finalizers") or ()
        if finalizer := next((one for one in OF_WORK if one in finalizers), ""):
            # Once it is deleted, neither could the claim be made anew, nor the copy be completed.
            why = f"a VolumeSnapshot or a clone of it is not complete ({finalizer}): see why"
            raise state.refused(why)
        if not is_for_one_node(old_volume["spec"], key):
            raise state.refused(f"{name} is not for one node by {key} alone; rebind it by hand")
        nodes = self._lists.whole(NODES, "NodeList").items
        segment = self._place.segment
        if segment not in (_field_at(node, "metadata", "labels", key) for node in nodes):
            why = f"no node has the label {key}={segment}; does Carver run there?"
            raise state.refused(why)

    def _check_unused(self, state: _State) -> None:
        """Raise NotRebound if a pod that has a node uses the claim.

        Kubelet on the pod's node may be about to mount the volume. A pod on the node that the
        volume has left only keeps the claim from ending until it is evicted itself. The scheduler
        places no other one for a claim that is being deleted.
        """
        for pod in self._lists.whole(_path(state.namespace, "pods"), "PodList").items:
            node = _field_at(pod, "spec", "nodeName")
            if node and node != self._left_node and state.name in claims_of(pod):
                raise state.refused(f"the pod {_name(pod)} uses it; stop that")

    def _retain(self, old_volume: Object, *, is_trial: bool = False) -> None:
        annotations = {self._place.policy_key: _policy(old_volume)}
        change = {
            "spec": {"persistentVolumeReclaimPolicy": _RETAIN},
            "metadata": {"annotations": annotations},
        }
        self._change(old_volume, change, is_trial=is_trial)

    # Steps of a rebinding while there is no claim, or the claim has the new PersistentVolume

    def _check_new(self, state: _State, new_volume: Object) -> None:
        name = _name(new_volume)
        reference = _field_at(new_volume, "spec", "claimRef") or {}
        if (reference.get("namespace"), reference.get("name")) != (state.namespace, state.name):
            raise state.refused(f"{name} is for another claim")
        if _field_at(new_volume, "spec", "nodeAffinity") != self._place.affinity:
            raise state.refused(f"{name} is not for {self._place.node}")

    def _recreate_claim(self, state: _State, new_volume: Object) -> _Step:
        create = partial(self._create_claim, state, self._manifest(state, new_volume))
        return _Step(f"make the claim {state} anew, for {_name(new_volume)}", create)

    def _create_claim(
        self, state: _State, manifest: dict[str, Any], *, is_trial: bool = False
    ) -> None:
        """Create the claim; a trial creates nothing.

        Raises ClaimEnded if the claim's namespace is being deleted or does not exist.
        """
        try:
            self._objects.create(_path(state.namespace, _CLAIMS), manifest, is_trial=is_trial)
        except errors.ClusterRefused as error:
            if error.reason not in _NAMESPACE_ENDED:
                raise
            raise errors.ClaimEnded(str(state), _ENDED) from None

    def _require_ended(self, state: _State, new_volume: Object) -> None:
        """Raise NotRebound if the claim, which does not exist, can be made anew."""
        try:
            self._create_claim(state, self._manifest(state, new_volume), is_trial=True)
        except errors.ClaimEnded:
            return
        raise self._too_late(state, "it is gone, and can be made anew")

    def _too_late(self, state: _State, problem: str) -> errors.NotRebound:
        """Return the error that says that the rebinding cannot be undone any more."""
        node = self._place.node
        advice = f"go on with the move, and then move the volume back from {node}"
        return state.refused(f"{problem}: {advice}")

    def _manifest(self, state: _State, new_volume: Object) -> dict[str, Any]:
        """Return the manifest of the claim that the new PersistentVolume keeps.

        Raises NotRebound if it keeps none, or that of another claim.
        """
        name = _name(new_volume)
        try:
            manifest: dict[str, Any] = json.loads(
                _annotations(new_volume).get(self._place.claim_key, "")
            )
            metadata = manifest["metadata"]
            names = (metadata["namespace"], metadata["name"], manifest["spec"]["volumeName"])
        except (KeyError, TypeError, ValueError):
            raise state.refused(f"it is gone; make it anew, with volumeName {name}") from None
        if names != (state.namespace, state.name, name):
            raise state.refused(f"what {name} keeps of it is another's")
        return manifest

    def _end_of(self, state: _State, volume: Object, reason: str) -> _Step:
        """Return the step that deletes a PersistentVolume, or that waits until it is gone."""
        if _is_going(volume):
            return _Step("", partial(self._await_end, state, _volume_path(volume), volume))
        question = f"delete {_VOLUME} {_name(volume)}, {reason}"
        return self._deletion(question, _volume_path(volume), volume)

    def _next_without_claim(self, state: _State, new_volume: Object) -> _Step:
        """Return the next step after the claim of the new PersistentVolume was deleted.

        Raises NotRebound if no step is left.
        """
        if (old := state.old_volume) is not None:
            return self._end_of_old(state, old)
        name, annotations = _name(new_volume), _annotations(new_volume)
        restore = partial(self._restore, new_volume)
        if policy := annotations.get(self._place.policy_key):
            what = f"have {name}, whose claim was deleted, be {policy} again, as it was"
            return _Step(what, restore, is_last=True)
        if self._place.claim_key not in annotations:
            raise state.refused(f"it was deleted after {name} was its volume")
        return _Step("", restore, is_last=True)

    def _end_of_old(self, state: _State, old_volume: Object) -> _Step:
        """Return the step that deletes the old PersistentVolume, which must be Retain."""
        name = _name(old_volume)
        if _policy(old_volume) != _RETAIN:
            raise state.refused(f"{name} is not Retain any more: have it be so, and call again")
        return self._end_of(state, old_volume, "an object that no volume goes with")

    def _next_with_new_volume(
        self, state: _State, new_volume: Object, claim: Object
    ) -> _Step | None:
        if not state.claimed:
            return _Step("", partial(self._name_volume, state, new_volume, claim))
        if not _is_bound(new_volume, claim):
            return _Step("", partial(self._await_binding, state, new_volume))
        if (old := state.old_volume) is not None:
            return self._end_of_old(state, old)
        name, annotations = _name(new_volume), _annotations(new_volume)
        restore = partial(self._restore, new_volume)
        if policy := annotations.get(self._place.policy_key):
            question = (
                f"have {name} be {policy} again, as it was; see first that its data are there"
            )
            return _Step(question, restore)
        return _Step("", restore) if self._place.claim_key in annotations else None

    def _name_volume(self, state: _State, new_volume: Object, claim: Object) -> None:
        """Write the new PersistentVolume into a claim that names none.

        The claim is one that a StatefulSet made from its template. Without the name, Kubernetes
        binds it only if the PersistentVolume is as large as the template asks, and has the
        template's VolumeAttributesClass; else it has an empty volume made (FindMatchingVolume in
        k8s.io/component-helpers/storage/volume/pv_helpers.go). The name can be written once.
        """
        # Replace the claim, and do not patch it: external-provisioner needs that right, too.
        named = {**claim, "spec": {**claim["spec"], "volumeName": _name(new_volume)}}
        try:
            self._objects.replace(state.path, named)
        except errors.ClusterRefused as error:
            # The claim was changed since: it may have been bound.
            if error.reason != "Conflict":
                raise

    def _await_binding(self, state: _State, new_volume: Object) -> None:
        def is_bound() -> bool:
            claim = self._objects.find(state.path, _CLAIM)
            volume = self._objects.find(_volume_path(new_volume), _VOLUME)
            return None not in (claim, volume) and _is_bound(volume or {}, claim or {})

        self._wait(state, is_bound, "it is not bound yet; see `kubectl describe pvc`")

    def _await_end(self, state: _State, path: str, terminating: Object) -> None:
        is_claim = path == state.path

        def is_gone() -> bool:
            remaining = self._objects.find(path, _CLAIM if is_claim else _VOLUME)
            return remaining is None or bool(
                remaining["metadata"]["uid"] != terminating["metadata"]["uid"]
            )

        finalizers = (
            ", ".join(_field_at(terminating, "metadata", "finalizers") or ())
            or "nothing that it names"
        )
        subject = "it" if is_claim else _name(terminating)
        interval_seconds = _CLAIM_SECONDS if is_claim else _LOOK_SECONDS
        reason = f"{subject} is not gone yet, kept by {finalizers}"
        self._wait(state, is_gone, reason, interval_seconds)

    def _deletion(self, question: str, path: str, item: Object) -> _Step:
        return _Step(question, partial(self._objects.delete, path, item["metadata"]["uid"]))

    def _restore(self, volume: Object) -> None:
        """Give a PersistentVolume its former reclaim policy, and remove both annotations.

        This is the last step, of a rebinding and of undoing it.
        """
        keys = (self._place.policy_key, self._place.claim_key)
        change: dict[str, Any] = {"metadata": {"annotations": dict.fromkeys(keys)}}
        if policy := _annotations(volume).get(self._place.policy_key):
            change["spec"] = {"persistentVolumeReclaimPolicy": policy}
        self._change(volume, change)

    def _change(self, volume: Object, change: Object, *, is_trial: bool = False) -> None:
        version = str(volume["metadata"]["resourceVersion"])
        self._objects.change(_volume_path(volume), change, version, is_trial=is_trial)

    def _wait(
        self,
        state: _State,
        condition: Callable[[], bool],
        reason: str,
        interval_seconds: float = _LOOK_SECONDS,
    ) -> None:
        for _ in range(int(_WAIT_SECONDS / interval_seconds)):
            if condition():
                return
            sleep(interval_seconds)
        raise state.refused(f"{reason}; call again")


def _volume_at(place: Place, old_volume: Object, claim: Object) -> dict[str, Any]:
    """Return the new PersistentVolume that is to be created, made from the old one.

    Its reclaim policy is Retain, and it is reserved for the claim. One of its annotations keeps the
    manifest by which the claim is created anew.
    """
    volume = _copy_under_name(_VOLUME, old_volume, moved_name(_name(old_volume), place.handle))
    manifest = json.dumps(_claim_of(claim, _name(volume)), sort_keys=True)
    volume["metadata"].pop("ownerReferences", None)
    volume["metadata"]["annotations"] = {**_annotations(volume), place.claim_key: manifest}
    reference = {"apiVersion": "v1", "kind": _CLAIM, "name": _name(claim)}
    volume["spec"] |= {
        "csi": {**old_volume["spec"]["csi"], "volumeHandle": place.handle},
        "nodeAffinity": place.affinity,
        "claimRef": {**reference, "namespace": claim["metadata"]["namespace"]},
        "persistentVolumeReclaimPolicy": _RETAIN,
    }
    if capacity := _capacity_before_growth(claim):
        volume["spec"]["capacity"] = capacity
    return volume


def _capacity_before_growth(claim: Object) -> Object | None:
    """Return a claim's capacity if its volume has still to be grown on its node; else None.

    The PersistentVolume has the new size by then. A claim gets the capacity of its PersistentVolume
    when it is bound (updateClaimStatus in pkg/controller/volume/persistentvolume/pv_controller.go),
    so with the new size nothing would ask the node to grow the volume any more. With the size
    before, external-resizer begins with the growth again.
    """
    growth = str(_field_at(claim, "status", "allocatedResourceStatuses", "storage") or "")
    is_pending = growth.startswith(_NODE_RESIZE) or any(
        (condition.get("type"), condition.get("status")) == (_RESIZE_PENDING, "True")
        for condition in _field_at(claim, "status", "conditions") or ()
    )
    return _field_at(claim, "status", "capacity") if is_pending else None


def moved_name(old: str, handle: str) -> str:
    """Return the name of the new PersistentVolume, by the old one's name and the new volume id."""
    digest = hashlib.sha256(handle.encode()).hexdigest()
    return f"{_SUFFIX.sub('', old)[:_MOST_CHARACTERS]}-moved-{digest[:8]}"


def _claim_of(claim: Object, volume: str) -> dict[str, Any]:
    copy = _copy_under_name(_CLAIM, claim, _name(claim))
    copy["metadata"]["namespace"] = claim["metadata"]["namespace"]
    copy["spec"]["volumeName"] = volume
    return copy


def _copy_under_name(kind: str, original: Object, name: str) -> dict[str, Any]:
    """Return a copy of an object under the given name, without the fields that the cluster sets."""
    metadata = original["metadata"]
    fields = {
        "name": name,
        "labels": metadata.get("labels"),
        "annotations": {
            key: value for key, value in _annotations(original).items() if key not in _BINDING
        },
        "ownerReferences": metadata.get("ownerReferences"),
    }
    return {
        "apiVersion": "v1",
        "kind": kind,
        "metadata": {key: value for key, value in fields.items() if value},
        "spec": dict(original["spec"]),
    }


def _is_alike(volume: Object, expected: Object) -> bool:
    first, second = (
        {key: value for key, value in item["spec"].items() if key not in _OTHERWISE}
        for item in (volume, expected)
    )
    return first == second


def _is_bound(volume: Object, claim: Object) -> bool:
    binding = (_field_at(claim, "status", "phase"), _field_at(claim, "spec", "volumeName"))
    claim_uid: object = _field_at(volume, "spec", "claimRef", "uid")
    return binding == ("Bound", _name(volume)) and claim_uid == claim["metadata"]["uid"]


def _is_present(claim: Object | None, volume: Object) -> bool:
    """Return whether the claim that a PersistentVolume was bound to still exists."""
    claim_uid = _field_at(volume, "spec", "claimRef", "uid")
    return claim is not None and bool(claim["metadata"]["uid"] == claim_uid)


def is_for_one_node(spec: Object, topology_key: str) -> bool:
    """Return whether a PersistentVolume has the node affinity that Carver gives, by its spec.

    That is one term with one expression: one value for the driver's topology label. A rebinding
    replaces the value, and no other requirement is lost by that.
    """
    terms: Any = _field_at(spec, "nodeAffinity", "required", "nodeSelectorTerms") or ()
    if len(terms) != 1 or terms[0].get("matchFields"):
        return False
    expressions: Any = terms[0].get("matchExpressions") or ()
    return (
        len(expressions) == 1
        and (expressions[0].get("key"), expressions[0].get("operator")) == (topology_key, "In")
        and len(expressions[0].get("values") or ()) == 1
    )


def _annotations(item: Object) -> Mapping[str, str]:
    return _field_at(item, "metadata", "annotations") or {}


def _policy(volume: Object) -> str:
    return str(_field_at(volume, "spec", "persistentVolumeReclaimPolicy") or "")


def _name(item: Object) -> str:
    return str(_field_at(item, "metadata", "name") or "")


def _is_going(item: Object) -> bool:
    return _field_at(item, "metadata", "deletionTimestamp") is not None


def _volume_path(volume: Object) -> str:
    return f"{VOLUMES}/{quote(_name(volume), safe='')}"


def _path(namespace: str, *parts: str) -> str:
    return "/".join(["/api/v1/namespaces", *(quote(name, safe="") for name in (namespace, *parts))])


def _field_at(item: Object, *keys: str) -> Any:
    value: Any = item
    for key in keys:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value
