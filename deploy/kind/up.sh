#!/bin/bash
# Make a kind cluster with Carver in it, on a volume group on a file of this machine. Runs as root.
#
#   up.sh [SIZE]    SIZE of the file, which is sparse; 10G if not given
#
# Needs kind, kubectl, docker, lvm2 and `make image`. down.sh removes everything that this makes:
# the cluster "carver", the group "carver-kind", its loop device and its file.
set -euo pipefail
size=${1:-10G}
here=$(dirname "$(readlink -f "$0")")
project=$(dirname "$(dirname "$here")")
file=/var/lib/carver-kind/carver.img
group=carver-kind

for program in kind kubectl docker losetup vgcreate; do
    command -v "$program" >/dev/null || {
        echo "up.sh: $program is missing" >&2
        exit 1
    }
done
archive=$(find "$project/dist" -name 'carver-*.oci.tar' 2>/dev/null | sort | tail -n 1)
if [ -z "$archive" ]; then
    echo "up.sh: there is no image in dist/: run make image" >&2
    exit 1
fi

# The group; a second run finds what the first one made.
mkdir -p "$(dirname "$file")" /run/lock/lvm /run/lvm
[ -e "$file" ] || truncate --size "$size" "$file"
loop=$(losetup --associated "$file" --noheadings --output NAME | head -n 1)
[ -n "$loop" ] || loop=$(losetup --find --show "$file")
# --devices: no other disk of this machine is looked at.
vgs --devices "$loop" "$group" >/dev/null 2>&1 || vgcreate --devices "$loop" "$group" "$loop"

kind get clusters 2>/dev/null | grep --quiet --line-regexp carver ||
    kind create cluster --config "$here/cluster.yaml"
kind load image-archive --name carver "$archive"

sed "s|/dev/carver-kind|$loop|" "$project/deploy/kubernetes/kind.yaml" |
    kubectl --context kind-carver apply --filename -
kubectl --context kind-carver --namespace carver-system \
    rollout status --timeout=300s daemonset/carver-node

echo "Try: kubectl --context kind-carver apply -f deploy/kubernetes/examples/filesystem.yaml"
