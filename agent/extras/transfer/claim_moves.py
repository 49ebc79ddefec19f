"""Rebind a Kubernetes claim to a volume that moved, or print the steps for the operator."""

import argparse
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from agent.cli import terminal
from agent.cli.volume_verbs import VolumeVerbs
from agent.extras.kubernetes import access, rebinding
from agent.extras.kubernetes.access import Server
from agent.extras.kubernetes.rebinding import Place, Rebinding
from agent.extras.transfer import streams_command
from proto import carver_pb2 as carver

# Template of the steps by which an operator rebinds the claim of a moved volume by hand.
_STEPS = """\
In Kubernetes, while nothing runs that uses the claim. The same words with --kubeconfig FILE carry
these steps out; by hand, in this order:
 1. keep the data whatever happens:
    PV=$(kubectl get pvc {pvc} --namespace {namespace} --output jsonpath='{{.spec.volumeName}}')
    kubectl patch pv "$PV" --patch '{{"spec":{{"persistentVolumeReclaimPolicy":"Retain"}}}}'
 2. keep both objects:
    kubectl get pv "$PV" --output json > pv.json
    kubectl get pvc {pvc} --namespace {namespace} --output json > pvc.json
 3. make another PersistentVolume, for the volume where it is now, reserved for the claim:
    jq {pv_filter} pv.json | kubectl create --filename -
 4. make the claim anew, for that one; Retain leaves the volumes as they are:
    kubectl delete pvc {pvc} --namespace {namespace}
    jq {pvc_filter} pvc.json | kubectl create --filename -
 5. see that it is Bound, run what uses it, and see that its data are there:
    kubectl get pvc {pvc} --namespace {namespace}
 6. delete the old object, and have deletion of the claim delete the volume again, if it did before:
    kubectl delete pv "$PV"
    kubectl patch pv {new} --patch '{{"spec":{{"persistentVolumeReclaimPolicy":"Delete"}}}}'
 7. here: carver volume move {name} --finish
"""
# Beginning of the jq filters for the PersistentVolume and for the claim. It deletes the fields that
# the cluster sets during an object's life.
_LIFE = (
    "del(.status, .metadata.uid, .metadata.resourceVersion, .metadata.creationTimestamp,"
    " .metadata.finalizers, .metadata.deletionTimestamp"
)
# jq filter that makes the new PersistentVolume from the old one.
_PV_FILTER = (
    _LIFE + ", .spec.claimRef.uid, .spec.claimRef.resourceVersion,"
    ' .metadata.annotations["pv.kubernetes.io/bound-by-controller"])'
    " | .metadata.name = {new}"
    ' | .spec.persistentVolumeReclaimPolicy = "Retain"'
    " | .spec.csi.volumeHandle = {handle}"
    " | .spec.nodeAffinity.required.nodeSelectorTerms ="
    ' [{{"matchExpressions": [{{"key": {key}, "operator": "In",'
    ' "values": [{node}]}}]}}]'
)
# jq filter that makes the new claim from the old one.
_PVC_FILTER = (
    _LIFE + ', .metadata.annotations["pv.kubernetes.io/bind-completed"],'
    ' .metadata.annotations["pv.kubernetes.io/bound-by-controller"],'
    ' .metadata.annotations["volume.kubernetes.io/selected-node"])'
    " | .spec.volumeName = {new}"
)


def steps(state: carver.MoveState, place: Place) -> str:
    """Return the steps to rebind the claim of a moved volume by hand, as commands for a shell.

    `place` says where the volume is now. Each value in the commands is quoted for the shell.
    """
    new = rebinding.moved_name(state.pv, place.handle)
    pv_values = {
        "new": new,
        "handle": place.handle,
        "key": place.topology_key,
        "node": place.segment,
    }
    values = {
        "pvc": state.pvc,
        "namespace": state.namespace,
        "name": state.volume_id,
        "new": new,
        "pv_filter": _PV_FILTER.format(**_as_json(pv_values)),
        "pvc_filter": _PVC_FILTER.format(**_as_json({"new": new})),
    }
    return _STEPS.format(**{key: shlex.quote(text) for key, text in values.items()})


def _as_json(texts: Mapping[str, str]) -> dict[str, str]:
    return {key: json.dumps(text) for key, text in texts.items()}


def say(text: str) -> None:
    """Print a line for the operator to standard error; standard output is for the result."""
    print(text, file=sys.stderr, flush=True)


def rebind(cluster: Server, old_id: str, place: Place, *, yes: bool, undo: bool = False) -> None:
    """Bind the claim of a moved volume to the new volume; with `undo`, to the old one again.

    `old_id` is the volume's id on the node that the volume left, and `place` is where the volume is
    now. The operator is asked before each step, unless `yes` is true. Raises NotConfirmed if the
    operator declines a step, NotRebound if the objects of the cluster do not fit, and
    ClusterRefused or ClusterSilent if the API server refuses or does not answer.
    """

    def confirmed(question: str) -> bool:
        return yes or terminal.confirmed(question)

    rebinding_steps = Rebinding(cluster, old_id, place)
    (rebinding_steps.undo if undo else rebinding_steps.run)(confirmed, say)


def finish(verbs: VolumeVerbs, parsed: argparse.Namespace) -> None:
    """Finish a received volume, print its state, and rebind the claim of the sent volume to it.

    This is `carver volume receive --finish --kubeconfig`.
    """
    cluster = access.of_file(Path(parsed.kubeconfig))
    result = streams_command.finish(
        verbs, parsed.name, parsed.release, is_source_lost=parsed.source_is_lost
    )
    streams_command.show(result, as_json=parsed.json)
    place = Place(result["volume_id"], verbs.settings.node_id, verbs.settings.driver_name)
    rebind(cluster, result["received"], place, yes=parsed.yes)
