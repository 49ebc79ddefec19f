#!/bin/bash
# Make a Debian system the lab's guest: the two virtual environments, the users, the quiet.
# Runs inside the system: natively in the box's chroot, or in a guest made from a stock box.
#
#   setup.sh WHEELS PUBLIC_KEY    WHEELS holds the wheels, carver.txt and test.txt
set -euo pipefail
wheels=$1
public_key=$2

make_environment() { # name, requirements
    python3 -m venv "/opt/carver/$1"
    "/opt/carver/$1/bin/python" -m pip --isolated install --quiet --no-index --find-links "$wheels" \
        --compile --requirement "$wheels/$2"
}

authorize() { # user, home
    install -d -m 700 -o "$1" -g "$1" "$2/.ssh"
    install -m 600 -o "$1" -g "$1" "$public_key" "$2/.ssh/authorized_keys"
}

make_environment venv carver.txt
make_environment test-venv test.txt

id vagrant >/dev/null 2>&1 || useradd --create-home --shell /bin/bash vagrant
# Without PAM sshd refuses an account whose password is locked by "!".
usermod --password '*' vagrant
authorize root /root
authorize vagrant /home/vagrant

# 110 kB of comments, which each lvm2 command would read: the emulated processor takes a third of a
# short command's time for them. What it says is as before.
sed -i -E '/^[[:space:]]*(#|$)/d' /etc/lvm/lvm.conf

# Timers that would wake up in the middle of a measurement, and services nobody waits for.
# containerd stays installed; the tests that need it start it.
for unit in apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer \
    e2scrub_reap.service fstrim.timer man-db.timer systemd-networkd-wait-online.service \
    systemd-logind.service getty@tty1.service serial-getty@ttyS0.service; do
    ln -sfn /dev/null "/etc/systemd/system/$unit"
done
# The tests' disks are files there: of Debian 13 it is in memory otherwise, and not large enough.
ln -sfn /dev/null /etc/systemd/system/tmp.mount
# Each time lvm2 has written to a disk, udev would look at all of that disk: with the contract tests'
# disks (Makefile, --basetemp) that took more time than lvm2. All other disks are watched as ever.
cat > /etc/udev/rules.d/99-contract-tests.rules <<'RULE'
SUBSYSTEM=="block", KERNEL=="loop*", ATTR{loop/backing_file}=="/tmp/t/*", OPTIONS+="nowatch"
RULE
systemctl disable --quiet containerd.service rsync.service 2>/dev/null || true

mkdir -p /var/log/journal /var/lib/kubelet/plugins /var/lib/kubelet/plugins_registry \
    /var/lib/kubelet/pods /etc/carver
