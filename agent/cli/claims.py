"""What re-points a Kubernetes claim to a volume that moved: steps for a person, in a safe order."""

from collections.abc import Mapping

_STEPS = """\
In Kubernetes, while nothing runs that uses the claim (the cluster's objects name the node and the
volume, and neither can be changed in place):
 1. keep the data whatever happens:
    kubectl patch pv {pv} --patch '{{"spec":{{"persistentVolumeReclaimPolicy":"Retain"}}}}'
 2. keep both objects:
    kubectl get pv {pv} --output json > pv.json
    kubectl get pvc {pvc} --namespace {namespace} --output json > pvc.json
 3. take them away; Retain leaves the volumes as they are:
    kubectl delete pvc {pvc} --namespace {namespace}
    kubectl delete pv {pv}
 4. make them anew, for the volume where it is now:
    jq '{pv_filter}' pv.json | kubectl create --filename -
    jq '{pvc_filter}' pvc.json | kubectl create --filename -
 5. see that it is Bound, run what uses it, and see that its data are there:
    kubectl get pvc {pvc} --namespace {namespace}
 6. have deletion of the claim delete the volume again, if it did before:
    kubectl patch pv {pv} --patch '{{"spec":{{"persistentVolumeReclaimPolicy":"Delete"}}}}'
 7. here: carver volume move {name} --finish
"""
# What the cluster keeps of an object's life, and is not to be told anew.
_LIFE = "del(.status, .metadata.uid, .metadata.resourceVersion, .metadata.creationTimestamp"
_PV_FILTER = (
    _LIFE + ", .metadata.finalizers, .metadata.deletionTimestamp, .spec.claimRef.uid,"
    " .spec.claimRef.resourceVersion)"
    ' | .spec.csi.volumeHandle = "{handle}"'
    " | .spec.nodeAffinity.required.nodeSelectorTerms ="
    ' [{{"matchExpressions": [{{"key": "topology.{driver}/node", "operator": "In",'
    ' "values": ["{node}"]}}]}}]'
)
_PVC_FILTER = (
    _LIFE + ", .metadata.finalizers, .metadata.deletionTimestamp,"
    ' .metadata.annotations["pv.kubernetes.io/bind-completed"],'
    ' .metadata.annotations["pv.kubernetes.io/bound-by-controller"],'
    ' .metadata.annotations["volume.kubernetes.io/selected-node"])'
)


def steps(claim: Mapping[str, str], handle: str, driver: str, node: str) -> str:
    """The steps for the claim that a volume was made for, whose id is `handle` on `node` now."""
    return _STEPS.format(
        **{key: claim[key] for key in ("pv", "pvc", "namespace")},
        name=claim["volume_id"],
        pv_filter=_PV_FILTER.format(handle=handle, driver=driver, node=node),
        pvc_filter=_PVC_FILTER,
    )
