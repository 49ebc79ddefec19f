#!/bin/bash
# Build the lab's box from Debian packages: no box is downloaded, no boot loader is needed.
# Runs as root on the host. `lab.py up` calls it; CARVER_LAB_MIRROR names another Debian mirror.
#
#   build.sh RELEASE OUTPUT WHEELS PUBLIC_KEY    leaves OUTPUT/{lab.box,vmlinuz,initrd.img}
set -euo pipefail
release=$1
output=$2
wheels=$3
public_key=$4
here=$(dirname "$(readlink -f "$0")")
root=$output/root
size_gib=24 # sparse; Carver's default group is a file of 10 GiB

# What the tests make of device-mapper, and a TPM; "dm-error" is part of dm-mod.
modules="dm-mod dm-thin-pool dm-raid raid1 raid10 raid456 dm-cache dm-cache-smq dm-writecache
    dm-flakey dm-snapshot dm-crypt dm-integrity loop overlay tpm_vtpm_proxy"

rm -rf "$output"
mkdir -p "$output"

packages=$(grep -v '^#' "$here/packages" | paste -sd,)

# mmdebstrap runs every hook with the chroot as $1. The first one comes before the kernel's
# package, whose initial RAM disk depends on what it copies. What it mounts is gone with it, also
# when it is killed.
export here wheels public_key
unshare --mount mmdebstrap --mode=root --variant=minbase --format=directory --include="$packages" \
    --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='force-confold' --dpkgopt='force-unsafe-io' \
    --essential-hook='cp -rT "$here/rootfs" "$1"' \
    --customize-hook='mkdir "$1/tmp/lab" && cp -r "$here/setup.sh" "$wheels" "$public_key" "$1/tmp/lab"' \
    --customize-hook='chroot "$1" bash /tmp/lab/setup.sh "/tmp/lab/${wheels##*/}" "/tmp/lab/${public_key##*/}"' \
    --customize-hook='rm -r "$1/tmp/lab"' \
    --customize-hook='chroot "$1" systemctl enable --quiet systemd-networkd.service ssh.service' \
    --customize-hook='chroot "$1" systemd-machine-id-setup' \
    --customize-hook='cd "$here/rootfs/etc" && cp hosts hostname resolv.conf fstab "$1/etc/"' \
    "$release" "$root" ${CARVER_LAB_MIRROR:+"$CARVER_LAB_MIRROR"}

kernel=$(ls "$root/lib/modules")
# shellcheck disable=SC2086 # a list of words
chroot "$root" modprobe --set-version "$kernel" --dry-run --all $modules

cp "$root/boot/vmlinuz-$kernel" "$output/vmlinuz"
cp "$root/boot/initrd.img-$kernel" "$output/initrd.img"

mke2fs -q -t ext4 -L carver-lab -d "$root" -E assume_storage_prezeroed=1 \
    "$output/root.raw" "${size_gib}G"
rm -rf "$root"
qemu-img convert -f raw -O qcow2 "$output/root.raw" "$output/box.img"
rm "$output/root.raw"
printf '{"provider": "libvirt", "format": "qcow2", "virtual_size": %d}\n' "$size_gib" \
    > "$output/metadata.json"
tar -C "$output" -cf "$output/lab.box" metadata.json box.img
rm "$output/box.img" "$output/metadata.json"
