#!/bin/bash
# Install Carver as the guest's service, or anew. Runs as root in the guest; builds nothing.
#
#   provision.sh TREE WHEEL
set -euo pipefail
tree=$1
wheel=$2

if ! [ -x /opt/carver/venv/bin/python ]; then
    # A stock box: it has an uplink for Debian's packages, and the wheels were copied to it.
    export DEBIAN_FRONTEND=noninteractive
    apt-get --yes --quiet update
    grep -v '^#' "$tree/vagrant/box/packages" | xargs apt-get --yes --quiet install --no-install-recommends
    bash "$tree/vagrant/box/setup.sh" /opt/carver/wheels /root/.ssh/authorized_keys
fi

# Stopped while its files are replaced, or systemd restarts half of them. There may be no unit yet.
systemctl stop carver.service 2>/dev/null || true
/opt/carver/venv/bin/python -I "$tree/vagrant/inside/install_wheel.py" "$wheel"
ln -sfn /opt/carver/venv/bin/carver /usr/local/bin/carver

unit=/etc/systemd/system/carver.service
if ! cmp --quiet "$tree/systemd/carver.service" "$unit"; then
    install -m 644 "$tree/systemd/carver.service" "$unit"
    systemctl daemon-reload
fi
# So that the hardened unit is tested with all that the service can do.
echo CARVER_METRICS_ADDRESS=127.0.0.1:9898 > /etc/default/carver
systemctl enable --quiet carver.service
# With Type=notify this returns once the socket is served.
systemctl reset-failed carver.service 2>/dev/null || true
if ! systemctl start carver.service; then
    systemctl stop carver.service # it would try for ever
    journalctl --unit carver.service --boot --lines 25 --no-pager >&2
    exit 1
fi
