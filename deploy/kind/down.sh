#!/bin/bash
# Remove what up.sh made: the cluster, every volume in it, the group, its loop device, its file.
# Runs as root.
set -euo pipefail
file=/var/lib/carver-kind/carver.img
group=carver-kind

# First the cluster: its mounts keep the volumes busy, and end with it.
if kind get clusters 2>/dev/null | grep --quiet --line-regexp carver; then
    kind delete cluster --name carver
fi

[ -e "$file" ] || exit 0
loop=$(losetup --associated "$file" --noheadings --output NAME | head -n 1)
if [ -n "$loop" ]; then
    if vgs --devices "$loop" "$group" >/dev/null 2>&1; then
        # Fails, and leaves everything, where something still uses a volume.
        vgchange --devices "$loop" --activate n "$group"
        vgremove --devices "$loop" --yes "$group"
    fi
    losetup --detach "$loop"
fi
rm "$file"
rmdir --ignore-fail-on-non-empty "$(dirname "$file")"
