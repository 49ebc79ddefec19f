#!/bin/bash
# Make a kind cluster with Carver in it, on a volume group on a file of this machine. Runs as root.
#
#   up.sh [--size SIZE] [--controller] [--snapshotter DIRECTORY]
#
#   --size         size of the file, which is sparse; 10G if not given
#   --controller   one controller for the cluster, as by the chart's default, in place of sidecars beside
#                  the node's Carver; needs helm
#   --snapshotter  a checkout of kubernetes-csi/external-snapshotter, for snapshots; needs helm
#
# Needs kind, kubectl, docker, lvm2 and `make image`, and downloads nothing itself. kind and the node
# pull their images where docker has not got them. Your own kubeconfig is not touched. A second run
# goes on from where the first one ended.
#
# down.sh removes all that this makes: the cluster "carver", the group "carver-kind", its loop device,
# and /var/lib/carver-kind with its file and the kubeconfig.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
project=$(dirname "$(dirname "$here")")
state=${CARVER_KIND_STATE:-/var/lib/carver-kind}
file=$state/carver.img
group="carver-kind"
size=10G
controller=
snapshotter=

fail() {
    echo "up.sh: $*" >&2
    exit 1
}

while [ $# -gt 0 ]; do
    case $1 in
        --size) size=${2:?--size wants a size, such as 10G} && shift 2 ;;
        --controller) controller=yes && shift ;;
        --snapshotter) snapshotter=${2:?--snapshotter wants a directory} && shift 2 ;;
        *) fail "what is $1? It takes --size, --controller and --snapshotter" ;;
    esac
done

[ "$(id -u)" = 0 ] || fail "run it as root: it makes a loop device and a volume group"
[[ $size =~ ^[0-9]+[KMGT]?$ ]] || fail "$size is no size; such as 10G is"
needed=(kind kubectl docker losetup dmsetup vgs vgcreate)
[ -z "$controller$snapshotter" ] || needed+=(helm)
for program in "${needed[@]}"; do
    command -v "$program" >/dev/null || fail "$program is missing"
done
docker info >/dev/null 2>&1 || fail "docker does not answer: does its daemon run?"
dmsetup version >/dev/null 2>&1 || fail "device-mapper does not answer: modprobe dm_mod"
case $(uname -m) in
    x86_64) processor=amd64 ;;
    aarch64) processor=arm64 ;;
    *) fail "there is no image for a processor like this: $(uname -m)" ;;
esac
archive=$(find "$project/dist" -name "carver-*-$processor.oci.tar" 2>/dev/null |
    sort --version-sort | tail -n 1 || true)
[ -n "$archive" ] || fail "there is no image for $processor in dist/: run make image"
if [ -n "$snapshotter" ]; then
    for part in client/config/crd deploy/kubernetes/snapshot-controller; do
        [ -d "$snapshotter/$part" ] || fail "$snapshotter has no $part"
    done
fi
trap 'echo "up.sh: it ended half-way; run it again, or down.sh" >&2' ERR

# The group; a second run finds what the first one made.
mkdir -p "$state" /run/lock/lvm
[ -e "$file" ] || truncate --size "$size" "$file"
loop=$(losetup --associated "$file" --noheadings --output NAME | head -n 1)
[ -n "$loop" ] || loop=$(losetup --find --show "$file")
# --devices: no other disk of this machine is looked at.
vgs --devices "$loop" "$group" >/dev/null 2>&1 ||
    vgcreate --devices "$loop" --metadatasize 8m "$group" "$loop"

# The cluster. Its node is a container, and has this kernel: modules are loaded here or nowhere.
for module in dm_snapshot dm_thin_pool dm_raid; do
    modprobe "$module" 2>/dev/null || echo "up.sh: no module $module; its volumes will not be made"
done
export KUBECONFIG=$state/kubeconfig
if grep --quiet --line-regexp carver <<<"$(kind get clusters 2>/dev/null)"; then
    kind export kubeconfig --name carver
else
    kind create cluster --config "$here/cluster.yaml" --wait 180s
fi
chmod 600 "$KUBECONFIG"

# The manifests; the loop device has another number each time.
manifest=$project/deploy/kubernetes/kind.yaml
options=()
[ -z "$controller" ] || options+=(--set controller.enabled=true,sidecars.resizer.modify=auto)
[ -z "$snapshotter" ] || options+=(--set sidecars.snapshotter.enabled=true)
if [ "${#options[@]}" -gt 0 ]; then
    manifest=$state/kind-rendered.yaml
    helm template carver "$project/deploy/helm/carver" --namespace carver-system \
        --values "$project/deploy/helm/values/kind.yaml" "${options[@]}" >"$manifest"
fi

# The images: Carver's from its archive; the others where docker has them.
kind load image-archive --name carver "$archive"
own=$(awk '$1 == "image:" && $2 ~ "/carver:" { print $2 }' "$manifest" | sort -u)
docker exec carver-control-plane crictl inspecti "$own" >/dev/null ||
    fail "the node has no $own after $archive was loaded: is it of this version?"
mapfile -t others < <(awk '$1 == "image:" && $2 !~ "/carver:" { print $2 }' "$manifest" | sort -u)
for image in "${others[@]}"; do
    if docker image inspect "$image" >/dev/null 2>&1; then
        kind load docker-image --name carver "$image"
    else
        echo "up.sh: docker has no $image: the node pulls it"
    fi
done

if [ -n "$snapshotter" ]; then
    kubectl apply --server-side --kustomize "$snapshotter/client/config/crd"
    kubectl apply --server-side --kustomize "$snapshotter/deploy/kubernetes/snapshot-controller"
fi
if [ -n "$snapshotter" ] && [ -z "$controller" ]; then
    # Each node's sidecar sees its own snapshots; so the snapshot-controller must know nodes.
    kubectl apply --filename - <<'ROLE'
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: snapshot-controller-nodes
rules:
  - apiGroups: [""]
    resources: [nodes]
    verbs: [get, list, watch]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: snapshot-controller-nodes
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: ClusterRole
  name: snapshot-controller-nodes
subjects:
  - kind: ServiceAccount
    name: snapshot-controller
    namespace: kube-system
ROLE
    argument=--enable-distributed-snapshotting=true
    kubectl --namespace kube-system get deployment snapshot-controller --output yaml |
        grep -e "$argument" >/dev/null ||
        kubectl --namespace kube-system patch deployment snapshot-controller --type json --patch \
            '[{"op": "add", "path": "/spec/template/spec/containers/0/args/-", "value": "'$argument'"}]'
fi

carver=(kubectl --namespace carver-system)
again=
if "${carver[@]}" get daemonset carver-node >/dev/null 2>&1; then again=yes; fi
sed "s|/dev/carver-kind|$loop|" "$manifest" | kubectl apply --filename -
# Its configuration may name another loop device than before.
[ -z "$again" ] || "${carver[@]}" rollout restart daemonset/carver-node
parts=(daemonset/carver-node)
[ -z "$controller" ] || parts+=(deployment/carver-controller)
for part in "${parts[@]}"; do
    "${carver[@]}" rollout status --timeout=300s "$part" && continue
    "${carver[@]}" get pods --output wide >&2
    "${carver[@]}" logs --all-containers --prefix --tail 20 "$part" >&2 || true
    fail "Carver is not ready: $part"
done

echo "It is up. Try:"
echo "    export KUBECONFIG=$KUBECONFIG"
echo "    $project/tests/cluster/run.py"
