#!/bin/bash
# Remove what up.sh made: the cluster, every volume in it, the loop devices over them, the group, its
# loop device, its file, the kubeconfig. Runs as root; a second run finds nothing to do.
set -euo pipefail
state=${CARVER_KIND_STATE:-/var/lib/carver-kind}
file=$state/carver.img
group=carver-kind

fail() {
    echo "down.sh: $*" >&2
    exit 1
}

[ "$(id -u)" = 0 ] || fail "run it as root: it removes a loop device and a volume group"
for program in kind docker losetup lvs vgs vgchange vgremove; do
    command -v "$program" >/dev/null || fail "$program is missing"
done
export KUBECONFIG=$state/kubeconfig

# First the cluster: its mounts keep the volumes busy, and end with it.
clusters=$(kind get clusters) || fail "kind does not say which clusters there are"
if grep --quiet --line-regexp carver <<<"$clusters"; then
    kind delete cluster --name carver
fi

[ -e "$state" ] || exit 0

# Kubelet and Carver attach loop devices to raw block volumes. They are this kernel's, and stay when
# the node goes. losetup finds one by the inode of what it is attached to, and a device can have
# several names, each an inode.
detach_from_volumes() {
    local numbers device found
    local -A attached=()
    mapfile -t active < <(lvs --devices "$1" --noheadings --separator : \
        --options lv_kernel_major,lv_kernel_minor "$group" | tr -d ' ')
    mapfile -t devices < <(find /dev -type b)
    for device in "${devices[@]}"; do
        # stat has them in hexadecimal. A device may be gone by now.
        numbers=$(stat --format '0x%t 0x%T' "$device" 2>/dev/null) || continue
        # shellcheck disable=SC2086 # two words
        numbers=$(printf '%d:%d' $numbers)
        [[ " ${active[*]} " == *" $numbers "* ]] || continue
        while read -r found; do
            attached[$found]=yes
        done < <(losetup --associated "$device" --noheadings --output NAME)
    done
    for found in "${!attached[@]}"; do
        losetup --detach "$found"
    done
}

if [ -e "$file" ]; then
    loop=$(losetup --associated "$file" --noheadings --output NAME | head -n 1)
    # After a reboot there is none, and the volumes are as gone as the group is.
    if [ -n "$loop" ]; then
        if vgs --devices "$loop" "$group" >/dev/null 2>&1; then
            detach_from_volumes "$loop"
            # What the node had mounted goes a moment after it. Then this fails, and leaves
            # everything, where something still uses a volume.
            for _ in 1 2 3 4 5; do
                ! vgchange --devices "$loop" --activate n "$group" || break
                sleep 1
            done
            vgremove --devices "$loop" --yes "$group"
        fi
        losetup --detach "$loop"
    fi
fi
rm -f "$file" "$state/kubeconfig" "$state/kind-rendered.yaml"
rmdir --ignore-fail-on-non-empty "$state"
