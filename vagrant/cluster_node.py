"""A machine of the lab as a node of the cluster: containerd, CNI plugins, kubelet, a volume group.

What a node needs is fetched from the host by rsync, which transfers only what changed. Its units
start containerd and kubelet at each boot, after `prepare.sh` has given back what a reboot takes:
the routes, and the loop device of the volume group.
"""

import json
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from vagrant import control_plane, images, lab_authority
from vagrant.guest import Guest
from vagrant.power import GuestError

# The port of the host's rsync daemon, at the bridge's address.
PORT = 18730
# The folder of a node's programs, and what is served to it.
HOME = "/opt/cluster"
PROGRAMS = ("containerd", "containerd-shim-runc-v2", "ctr", "kubelet")
PLUGINS = ("bridge", "loopback", "host-local")
GROUP = "carver"
_DISK, _DISK_SIZE = "/var/lib/cluster-disk.img", "12G"
_CONTAINERD = "/run/containerd/containerd.sock"
_STORE = "/var/lib/containerd"

_PREPARE = """\
#!/bin/sh
# Give a node what a reboot takes: routes, and the loop device of its volume group.
set -eu
sysctl --quiet --write net.ipv4.ip_forward=1
ip route replace {pods} via {bridge}
if ! [ -e {disk} ]; then truncate --size {size} {disk}; fi
# Past the memory of the machine: lvm2 does not flush what it writes, and where a power cut followed
# within half a minute, volumes that had been deleted came back.
if [ -z "$(losetup --associated {disk})" ]; then losetup --direct-io=on --find {disk}; fi
device=$(losetup --associated {disk} --noheadings --output NAME | head --lines 1)
# cadvisor wants to know the processor's clock, which a kernel in user mode does not tell.
if ! grep --quiet 'cpu MHz' /proc/cpuinfo; then
    {{ cat /proc/cpuinfo; printf 'cpu MHz\\t\\t: 2000.000\\n'; }} | sed '/^$/d' > /run/cpuinfo
    mount --bind /run/cpuinfo /proc/cpuinfo
fi
udevadm settle
if ! vgs {group} >/dev/null 2>&1; then
    # Only a file that has just been made is made a physical volume.
    if [ -n "$(blkid --probe "$device" || true)" ]; then exit 1; fi
    vgcreate --metadatasize 80m {group} "$device"
fi
"""

_CONTAINERD_TOML = """\
version = 3
[plugins.'io.containerd.cri.v1.images']
snapshotter = "overlayfs"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "{pause}"
[plugins.'io.containerd.cri.v1.runtime']
stats_collect_period = "1h"
stats_retention_period = "2h"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
SystemdCgroup = false
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ["{home}/cni"]
conf_dir = "/etc/cni/net.d"
"""

# An emulated processor is so slow that Go interrupts every function by a signal: a seventh of
# kubelet's time. Rare garbage collection saves as much again; so does rare reading of cgroups, by
# kubelet and by containerd, which reads those of all containers each second for numbers that nobody
# asks for. A Go program at work looks after its threads each 20 microseconds, a third of kubelet's
# time here: with a timer's slack (prctl(2), PR_SET_TIMERSLACK) it does so at the next tick.
# Containers inherit the slack.
_GO = "GOGC=400 GODEBUG=asyncpreemptoff=1"

# kubelet and containerd never rest on such a processor, and pods' processes, which have the weight
# 39 together (kubelet's cpu.weight of one processor), got what system.slice's 100 left: `carver
# status` took 99 seconds where it takes 35 by these weights. udevd, for which lvm2 waits, keeps its
# own.
_SLICE = "cluster.slice"
_SLICE_UNIT = """\
[Slice]
CPUWeight=10
"""

_CONTAINERD_UNIT = """\
[Unit]
Description=containerd of the lab's cluster
After=network.target

[Service]
Slice={slice}
Type=notify
Environment=PATH={home}/bin:/usr/sbin:/usr/bin:/sbin:/bin {go}
ExecStart={home}/bin/containerd --config /etc/containerd/config.toml
Delegate=yes
KillMode=process
TimerSlackNSec=4ms
Restart=always
RestartSec=2
LimitNOFILE=1048576

[Install]
WantedBy=multi-user.target
"""

_KUBELET_UNIT = """\
[Unit]
Description=kubelet of the lab's cluster
After=containerd.service network-online.target
Wants=containerd.service

[Service]
Slice={slice}
Environment=PATH={home}/bin:/usr/sbin:/usr/bin:/sbin:/bin {go}
ExecStartPre={home}/prepare.sh
ExecStart={home}/bin/kubelet --config=/etc/kubernetes/kubelet.json \\
    --kubeconfig=/etc/kubernetes/kubeconfig --hostname-override={name} --node-ip={address} \\
    --housekeeping-interval=1m
TimerSlackNSec=4ms
Restart=always
RestartSec=2

[Install]
WantedBy=multi-user.target
"""


def pods_of(number: int) -> str:
    """Return the range of addresses of a node's pods; nodes are counted from 1."""
    return f"10.99.{number + 20}.0/24"


# All that is not on the lab's own network: pods of every node, and the cluster's Services.
_CLUSTER_ROUTE = "10.99.0.0/16"


def install(guest: Guest, number: int, bridge: str, gates: Mapping[str, bool]) -> None:
    """Give a machine the files and programs of a node, and start containerd.

    It is quick where the machine has them already.
    """
    address = str(guest.address())
    served_from = f"rsync://{bridge}:{PORT}/node"
    run(
        guest,
        f"hostnamectl set-hostname {guest.name}",
        f"grep -q {guest.name} /etc/hosts || echo 127.0.1.1 {guest.name} >> /etc/hosts",
        "mkdir -p /etc/kubernetes/manifests /etc/cni/net.d /etc/containerd /var/lib/carver",
        f"mkdir -p {HOME}/images {HOME}/images.done {HOME}/stamps",
        f"rsync --recursive --times --perms --delete {served_from}/bin {served_from}/cni {HOME}/",
        *(
            _written(path, text)
            for path, text in _files(guest.name, number, address, bridge, gates).items()
        ),
        # A new node gets containerd's store with every image in it: importing them takes a quarter
        # of an hour on an emulated processor. It comes into its place whole.
        f"if ! [ -e {_STORE}/io.containerd.metadata.v1.bolt ]; then",
        "systemctl stop containerd 2>/dev/null || true",
        f"rsync --archive --hard-links --numeric-ids --delete {served_from}/store/ {_STORE}.part/",
        f"rsync --recursive --times {served_from}/stamps/ {HOME}/images.done/",
        f"sync; rm -rf {_STORE}; mv {_STORE}.part {_STORE}; fi",
        "systemctl daemon-reload",
        "systemctl enable --quiet containerd kubelet",
        _started(
            "containerd",
            ("containerd", "containerd-shim-runc-v2"),
            ("/etc/containerd/config.toml", "/etc/systemd/system/containerd.service"),
        ),
    )


def import_images(guest: Guest, bridge: str, archives: Sequence[str]) -> None:
    """Import those image archives that changed since the last time, by their file names.

    They are imported one after the other: side by side they take longer.
    """
    served_from = f"rsync://{bridge}:{PORT}/node"
    run(
        guest,
        f"rsync --recursive --times --delete {served_from}/stamps/ {HOME}/stamps/",
        *(_imported(served_from, name) for name in archives),
    )


def copy_disk(source: Guest, target: Guest) -> None:
    """Give a machine the disk of another one's volume group, as a cloned machine has it.

    The machine must not have a disk yet. The other's volumes may be in use: what is written to them
    meanwhile may be in the copy or not. Holes are not sent.
    """
    folder, _, name = _DISK.rpartition("/")
    unless_there = f"if [ -e {_DISK} ]; then echo {_DISK} is there >&2; exit 1; fi"
    send = source.ssh([f"tar --create --sparse --directory {folder} --file - {name}"])
    receive = target.ssh([f"{unless_there}; tar --extract --directory {folder} --file - && sync"])
    with subprocess.Popen(send, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as sending:
        received = subprocess.run(receive, stdin=sending.stdout, capture_output=True, check=False)
        _, said = sending.communicate()
    # tar(1): 1 where a file was written to while it was read.
    if sending.returncode not in (0, 1) or received.returncode != 0:
        text = (said + received.stderr).decode(errors="replace").strip()
        raise GuestError(f"the disk of {source.name} was not copied to {target.name}: {text}")


def has_run(guest: Guest) -> bool:
    """Tell whether kubelet ever ran on a machine's present disk."""
    # kubelet makes itself a certificate before it registers the node.
    marks = f"[ -e /var/lib/kubelet/pki/kubelet.crt ] || [ -e {HOME}/kubelet.now ]"
    return guest.run([f"if {marks}; then echo yes; else echo no; fi"]).stdout.strip() == "yes"


def boot_id(guest: Guest) -> str:
    """Return the id of a machine's present boot, which its kubelet writes into the Node."""
    return guest.run(["cat /proc/sys/kernel/random/boot_id"]).stdout.strip()


def start(guest: Guest) -> None:
    """Start kubelet, or restart it where its program or its configuration changed."""
    run(
        guest,
        f"{HOME}/prepare.sh",
        _started(
            "kubelet",
            ("kubelet",),
            (
                *("/etc/kubernetes/kubelet.json", "/etc/kubernetes/kubeconfig"),
                *("/etc/kubernetes/ca.crt", "/etc/systemd/system/kubelet.service"),
            ),
        ),
    )


def _started(unit: str, programs: Sequence[str], texts: Sequence[str]) -> str:
    """Say as lines for a shell how a unit is started, anew where what it is made of changed.

    What it was made of is written down when it has been started, so a change is not forgotten by a
    run that is interrupted.
    """
    there, stamp = " ".join(f"{HOME}/bin/{one}" for one in programs), f"{HOME}/{unit}.now"
    return (
        f"now=$(cat {' '.join(texts)} | sha256sum; stat --format '%n %Y %s' {there})\n"
        f'if [ "$now" != "$(cat {stamp} 2>/dev/null)" ]; then systemctl restart {unit}; fi\n'
        f"systemctl start {unit}\n"
        f'printf %s "$now" > {stamp}'
    )


def run(guest: Guest, *lines: str) -> str:
    """Run lines of a shell in the guest, and return what they print.

    Raises GuestError with the end of what they said where one fails.
    """
    text = "\n".join(["set -eu", *lines])
    done = guest.run(["bash -s"], stdin=text, check=False, timeout_seconds=1800)
    if done.returncode != 0:
        said = (done.stdout + done.stderr).splitlines()[-20:]
        raise GuestError(f"{guest.name} refused a step:\n" + "\n".join(said))
    return done.stdout


def _files(
    name: str, number: int, address: str, bridge: str, gates: Mapping[str, bool]
) -> dict[str, str]:
    """Write every file of a node, by its path."""
    kubeconfig = control_plane.client_kubeconfig(name, f"system:node:{name}", ["system:nodes"])
    prepare = _PREPARE.format(
        pods=_CLUSTER_ROUTE, bridge=bridge, disk=_DISK, size=_DISK_SIZE, group=GROUP
    )
    containerd = _CONTAINERD_TOML.format(pause=images.PAUSE, home=HOME)
    return {
        f"{HOME}/prepare.sh": prepare,
        "/etc/containerd/config.toml": containerd,
        f"/etc/systemd/system/{_SLICE}": _SLICE_UNIT,
        "/etc/systemd/system/containerd.service": _CONTAINERD_UNIT.format(
            home=HOME, go=_GO, slice=_SLICE
        ),
        "/etc/systemd/system/kubelet.service": _KUBELET_UNIT.format(
            home=HOME, name=name, address=address, go=_GO, slice=_SLICE
        ),
        "/etc/kubernetes/ca.crt": lab_authority.bundle(control_plane.FOLDER).decode(),
        "/etc/kubernetes/kubeconfig": kubeconfig.read_text(),
        "/etc/kubernetes/kubelet.json": json.dumps(_kubelet(gates), indent=1),
        "/etc/cni/net.d/10-lab.conflist": json.dumps(_network(number), indent=1),
    }


def _kubelet(gates: Mapping[str, bool]) -> dict[str, object]:
    """Configure kubelet (KubeletConfiguration of kubelet.config.k8s.io/v1beta1)."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": "/etc/kubernetes/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        # calls.py reads what was logged in hours.
        "containerLogMaxSize": "200Mi",
        "clusterDNS": [control_plane.DNS_ADDRESS],
        "clusterDomain": control_plane.DOMAIN,
        "containerRuntimeEndpoint": f"unix://{_CONTAINERD}",
        "enforceNodeAllocatable": [],
        "evictionHard": {"memory.available": "0%"},
        "failSwapOn": False,
        "featureGates": dict(gates),
        "imageGCHighThresholdPercent": 100,
        "localStorageCapacityIsolation": False,
        # There is no kube-proxy: no Service but the API and DNS servers has an address.
        "makeIPTablesUtilChains": False,
        "resolvConf": "",
        # An emulated node takes long to start a container.
        "runtimeRequestTimeout": "10m",
        # A volume that is mounted is expanded when its pod is synchronized.
        "syncFrequency": "10s",
    }


def _network(number: int) -> dict[str, object]:
    """Configure the pods' network: a bridge on each node, routes between them on the host."""
    return {
        "cniVersion": "1.0.0",
        "name": "lab",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "pods",
                "isGateway": True,
                "ipMasq": False,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": pods_of(number)}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            },
        ],
    }


def _written(path: str, text: str) -> str:
    """Say as a line for a shell how a file is written; root alone may read what holds a key."""
    mode = "755" if path.endswith(".sh") else "600" if path.endswith("kubeconfig") else "644"
    return f"install -m {mode} /dev/null {path} && printf %s {shlex.quote(text)} > {path}"


def _imported(served_from: str, name: str) -> str:
    """Say how an archive is fetched and imported, unless its present content was imported."""
    there, done = f"{HOME}/images/{name}", f"{HOME}/images.done/{name}"
    return (
        f"if ! cmp --quiet {HOME}/stamps/{name} {done}; then\n"
        f"rsync --times {served_from}/images/{name} {there}\n"
        f"{HOME}/bin/ctr --namespace k8s.io images import --snapshotter overlayfs {there}\n"
        f"rm {there}; cp {HOME}/stamps/{name} {done}; fi"
    )


def served(folder: Path, port: int, address: str) -> str:
    """Write the configuration of the host's rsync daemon, which serves one folder, read-only."""
    return (
        f"address = {address}\nport = {port}\nuse chroot = no\nmunge symlinks = no\n"
        # containerd's store is root's alone, and its files keep their owners.
        "uid = root\ngid = root\n"
        f"[node]\npath = {folder}\nread only = yes\n"
    )
