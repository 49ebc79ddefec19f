"""A cluster's control plane: processes on the host, inside the lab's network, without containers.

etcd, the API server, the controller manager, the scheduler, the snapshot-controller and CoreDNS run
natively, where they cost little beside emulated machines. Each has a log. The API server and the
DNS server have addresses of the cluster's range of Services, on the host's loopback interface, to
which nodes have a route: pods reach them as in any cluster, without a proxy for Services.

The lab's network is a namespace, or the host's own where the host runs libvirtd itself. So what
nodes need not reach listens on 127.0.0.1 alone, and etcd wants a certificate of each client.
"""

import json
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vagrant import files, lab_authority, lab_host
from vagrant.cluster_programs import Programs

FOLDER = lab_host.LAB / "cluster"
SERVICES = "10.99.16.0/24"
API_ADDRESS, DNS_ADDRESS = "10.99.16.1", "10.99.16.10"
SERVER = f"https://{API_ADDRESS}"
DOMAIN = "cluster.local"
_ETCD = "https://127.0.0.1:12379"
# The processes, in the order in which they need each other.
_PROCESSES = (
    *("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "coredns"),
    *("snapshot-controller", "rsync"),
)
# A node is taken for lost after this time without a sign of life, in seconds: an emulated one that
# has much to do may be silent for longer than Kubernetes' default of 50.
_GRACE_SECONDS = 180


class ControlPlaneError(Exception):
    """The control plane does not do what was asked of it."""


def kubeconfig() -> Path:
    """Return the administrator's kubeconfig."""
    return client_kubeconfig("administrator", "administrator", ["system:masters"])


def client_kubeconfig(name: str, user: str, groups: Sequence[str]) -> Path:
    """Return a user's kubeconfig, made where there is none of the present authority.

    It holds a certificate and its key.
    """
    path = FOLDER / f"{name}.kubeconfig"
    if _trusted(files.read_json(path)) != lab_authority.base64(lab_authority.bundle(FOLDER)):
        text = _kubeconfig_text(lab_authority.client(FOLDER, user, groups))
        files.write(path, text, mode=0o600)
    return path


def _trusted(kubeconfig: dict[str, Any] | None) -> str:
    """Return the authority's certificate that a kubeconfig has; empty without a kubeconfig."""
    clusters = (kubeconfig or {}).get("clusters") or [{}]
    return str(clusters[0].get("cluster", {}).get("certificate-authority-data", ""))


def _kubeconfig_text(user: lab_authority.Pair) -> str:
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "lab",
            "clusters": [
                {
                    "name": "lab",
                    "cluster": {
                        "server": SERVER,
                        "certificate-authority-data": lab_authority.base64(
                            lab_authority.bundle(FOLDER)
                        ),
                    },
                }
            ],
            "users": [
                {
                    "name": "user",
                    "user": {
                        "client-certificate-data": lab_authority.base64(user.certificate),
                        "client-key-data": lab_authority.base64(user.key),
                    },
                }
            ],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "user"}}],
        },
        indent=1,
    )


class ControlPlane:
    """The processes of the control plane, by their names."""

    def __init__(self, programs: Programs, gates: Sequence[str] = ()) -> None:
        """Choose the programs and Kubernetes' feature gates, each NAME=true or NAME=false."""
        self._programs = programs
        self._gates = [f"--feature-gates={','.join(gates)}"] if gates else []
        self._distributes = FOLDER / "distributes-snapshots"

    def prepare(self) -> None:
        """Make the authority and what it signs, where they are not there yet."""
        lab_authority.ensure(FOLDER, [API_ADDRESS, "127.0.0.1"])

    def ensure(self) -> None:
        """Have every process running as it is described, and the API server ready."""
        self.prepare()
        described = self._words()
        if running("etcd") != described["etcd"]:
            # Without etcd the API server does not end by itself.
            end_process("kube-apiserver")
        for name, words in described.items():
            ensure_process(name, words)
            if name == "kube-apiserver":
                self.wait()
        time.sleep(1)
        for name in described:
            if running(name) is None:
                raise ControlPlaneError(f"{name} has ended; its log: {log(name)}")

    def distribute_snapshots(self, by_nodes: bool) -> None:
        """Have the snapshot-controller name each snapshot's node, as sidecars on each node want."""
        if by_nodes:
            files.write(self._distributes, "")
        else:
            self._distributes.unlink(missing_ok=True)
        self.ensure()

    def wait(self, limit_seconds: float = 180) -> None:
        """Wait until the API server says that it is ready; raise ControlPlaneError at the limit."""
        deadline = time.monotonic() + limit_seconds
        while self.kubectl("get", "--raw=/readyz", check=False).returncode != 0:
            if running("kube-apiserver") is None or time.monotonic() > deadline:
                raise ControlPlaneError(
                    f"the API server has ended, or is not ready after {limit_seconds:.0f} s;"
                    f" its log: {log('kube-apiserver')}"
                )
            time.sleep(0.5)

    def kubectl(
        self, *words: str, stdin: str = "", check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl as an administrator.

        Raises:
            ControlPlaneError: kubectl failed, and `check` is not False.

        """
        program = str(self._programs.path("kubectl"))
        done = subprocess.run(
            lab_host.in_network(program, f"--kubeconfig={kubeconfig()}", *words),
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        if check and done.returncode != 0:
            raise ControlPlaneError(f"kubectl {' '.join(words[:4])}: {done.stderr.strip()}")
        return done

    def objects(self, *words: str) -> list[dict[str, Any]]:
        """Return the objects that `kubectl get` lists."""
        items: list[dict[str, Any]] = json.loads(
            self.kubectl("get", *words, "--output=json").stdout
        )["items"]
        return items

    def _words(self) -> Mapping[str, list[str]]:
        """Say how each process is started, in the order in which they need each other."""
        at = self._programs.path
        keys = lab_authority.Files(FOLDER)
        configs = {
            name: client_kubeconfig(name, user, groups)
            for name, user, groups in (
                ("kube-controller-manager", "system:kube-controller-manager", []),
                ("kube-scheduler", "system:kube-scheduler", []),
                ("snapshot-controller", "snapshot-controller", ["system:masters"]),
                ("coredns", "coredns", ["system:masters"]),
            )
        }
        corefile = FOLDER / "Corefile"
        files.write(corefile, _COREFILE.format(kubeconfig=configs["coredns"]))
        alone = "--leader-elect=false"
        inside = "--bind-address=127.0.0.1"
        return {
            "etcd": [
                str(at("etcd")),
                f"--data-dir={FOLDER / 'etcd'}",
                f"--listen-client-urls={_ETCD}",
                f"--advertise-client-urls={_ETCD}",
                "--client-cert-auth",
                f"--trusted-ca-file={keys.authority}",
                f"--cert-file={keys.etcd_certificate}",
                f"--key-file={keys.etcd_key}",
                "--listen-peer-urls=https://127.0.0.1:12380",
                "--peer-client-cert-auth",
                f"--peer-trusted-ca-file={keys.authority}",
                f"--peer-cert-file={keys.etcd_certificate}",
                f"--peer-key-file={keys.etcd_key}",
                # A lab may lose its objects with its power, and its disk is busy.
                "--unsafe-no-fsync",
                "--log-level=warn",
            ],
            "kube-apiserver": [
                str(at("kube-apiserver")),
                f"--etcd-servers={_ETCD}",
                f"--etcd-cafile={keys.authority}",
                f"--etcd-certfile={keys.etcd_client_certificate}",
                f"--etcd-keyfile={keys.etcd_client_key}",
                f"--bind-address={API_ADDRESS}",
                "--secure-port=443",
                f"--service-cluster-ip-range={SERVICES}",
                "--endpoint-reconciler-type=none",
                "--authorization-mode=Node,RBAC",
                "--enable-admission-plugins=NodeRestriction",
                "--allow-privileged=true",
                f"--client-ca-file={keys.authority}",
                f"--tls-cert-file={keys.server_certificate}",
                f"--tls-private-key-file={keys.server_key}",
                f"--kubelet-client-certificate={keys.kubelet_client_certificate}",
                f"--kubelet-client-key={keys.kubelet_client_key}",
                "--kubelet-preferred-address-types=InternalIP",
                "--kubelet-timeout=60s",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-signing-key-file={keys.accounts_key}",
                f"--service-account-key-file={keys.accounts_key}",
                *self._gates,
            ],
            "kube-controller-manager": [
                str(at("kube-controller-manager")),
                f"--kubeconfig={configs['kube-controller-manager']}",
                f"--authentication-kubeconfig={configs['kube-controller-manager']}",
                f"--authorization-kubeconfig={configs['kube-controller-manager']}",
                f"--root-ca-file={keys.authority}",
                f"--service-account-private-key-file={keys.accounts_key}",
                "--use-service-account-credentials=true",
                f"--node-monitor-grace-period={_GRACE_SECONDS}s",
                alone,
                inside,
                *self._gates,
            ],
            "kube-scheduler": [
                str(at("kube-scheduler")),
                f"--kubeconfig={configs['kube-scheduler']}",
                f"--authentication-kubeconfig={configs['kube-scheduler']}",
                f"--authorization-kubeconfig={configs['kube-scheduler']}",
                alone,
                inside,
                *self._gates,
            ],
            "coredns": [str(at("coredns")), f"-conf={corefile}"],
            "snapshot-controller": [
                str(at("snapshot-controller")),
                f"--kubeconfig={configs['snapshot-controller']}",
                "--feature-gates=CSIVolumeGroupSnapshot=true",
                "--http-endpoint=127.0.0.1:19802",
                # A snapshot that is made and deleted takes it a dozen requests. At its default of 5
                # a second, work on a few snapshots waits for seconds between two of them.
                "--kube-api-qps=50",
                "--kube-api-burst=100",
                # What it decides of each object is in its log from this level on.
                "--v=5",
                f"--enable-distributed-snapshotting={str(self._distributes.exists()).lower()}",
            ],
        }


_COREFILE = f"""\
.:53 {{{{
    bind {DNS_ADDRESS}
    errors
    kubernetes {DOMAIN} in-addr.arpa ip6.arpa {{{{
        kubeconfig {{kubeconfig}}
        pods insecure
        ttl 5
    }}}}
    cache 5 {{{{
        disable denial
    }}}}
}}}}
"""

# What this very program started, and has to wait for in the end.
_started: dict[str, subprocess.Popen[bytes]] = {}


def log(name: str) -> Path:
    """Return the log of a process."""
    return lab_host.LAB / "logs" / f"{name}.log"


def ensure_process(name: str, words: Sequence[str]) -> None:
    """Have a process running with just these words; another one of the name is ended before.

    One of the words must be an option that names a file in the cluster's folder.
    """
    if [*words] in _found(name).values():
        return
    end_process(name)
    log(name).parent.mkdir(parents=True, exist_ok=True)
    with log(name).open("a") as output:
        files.give_to_owner(log(name))
        process = _started[name] = subprocess.Popen(
            # By env: sudo hands no variable on.
            lab_host.in_network("env", "GOMAXPROCS=2", *words),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
        )
    # sudo, ip and env run before the program itself.
    deadline = time.monotonic() + 60
    while process.poll() is None and not _found(name) and time.monotonic() < deadline:
        time.sleep(0.02)


def running(name: str) -> list[str] | None:
    """Return the words with which the process of a name was started; None where it does not run."""
    return next(iter(_found(name).values()), None)


def end_process(name: str, limit_seconds: float = 20, number: int = signal.SIGTERM) -> None:
    """End a process by a signal, and by SIGKILL where that takes longer than the limit."""
    deadline = time.monotonic()
    while pids := [*_found(name)]:
        if time.monotonic() >= deadline:
            command = lab_host.as_root("kill", f"-{number}", *map(str, pids))
            subprocess.run(command, capture_output=True, check=False)
            number, deadline = signal.SIGKILL, time.monotonic() + limit_seconds
        time.sleep(0.1)
    if (own := _started.pop(name, None)) is not None:
        own.wait(limit_seconds)


def end_all() -> None:
    """End every process of the cluster: the API server before etcd, or it would hang."""
    for name in reversed(_PROCESSES):
        end_process(name)


def forget_objects() -> None:
    """End every process and remove etcd's data: no object is left, and what was signed stays."""
    end_all()
    lab_host.remove_tree(FOLDER / "etcd")


def _found(name: str) -> dict[int, list[str]]:
    """Return the words of the processes of a name that have files in the cluster's folder, by id.

    No record is kept of processes: it could be lost, or name a process id that is another's by now.
    """
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue  # it has ended
        words = line.split("\0")[:-1]
        if words and Path(words[0]).name == name and any(f"={FOLDER}/" in one for one in words):
            found[int(entry.name)] = words
    return found
