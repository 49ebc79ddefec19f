#!/usr/bin/env python3
"""Make a Kubernetes cluster of the lab's machines, with Carver in it: `make cluster`.

As a program: `cluster.py --help`. As a module, for the checks that want a lab: `Cluster`.

The machines are of the lab's box. The control plane runs on the host, inside the lab's network
(control_plane.py); each machine is a node with containerd and kubelet (node.py). Every program is
compiled from Go modules (programs.py), every image is made here (images.py). Carver is installed as
the README says: its image, and the committed manifest, unchanged.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

# This file is a program as well as a module, and Python would look beside a program only.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vagrant import venv

if __name__ == "__main__":
    venv.enter()

from deploy import render
from vagrant import (
    box,
    cluster_node,
    control_plane,
    files,
    images,
    lab_authority,
    lab_host,
    machines,
)
from vagrant.cluster_programs import Programs
from vagrant.control_plane import ControlPlane, ControlPlaneError
from vagrant.guest import Guest, guest_of
from vagrant.machines import Machines
from vagrant.machines_in_user_mode import UserModeMachines
from vagrant.power import GuestError
from vagrant.steps import Step, StepError, step

_KIND = "cluster-machines"
_SETTINGS = control_plane.FOLDER / "settings.json"
_SERVED = control_plane.FOLDER / "served"
_MANIFEST = lab_host.PROJECT / "deploy" / "kubernetes" / "container-lvm2.yaml"
_MANIFEST_VALUES = lab_host.PROJECT / "deploy" / "helm" / "values" / "container-lvm2.yaml"
_VALUES = lab_host.PROJECT / "tests" / "cluster" / "values"
# The key of the encrypted class in values/everything.yaml; nothing of worth is encrypted by it.
_SECRET = {
    "apiVersion": "v1",
    "kind": "Secret",
    "metadata": {"name": "carver-lab-key", "namespace": "carver-system"},
    "stringData": {"passphrase": "the lab's volumes hold nothing of worth"},
}
NAMESPACE = "carver-system"
# What Carver's image is made of.
_PARTS_OF_IMAGE = (
    *("agent", "lvm", "mount", "proto", "deploy/image", "pyproject.toml", "constraints.txt"),
    *("README.md", "LICENSE"),
)
_SNAPSHOT_CLIENT = "github.com/kubernetes-csi/external-snapshotter/client/v8"
# What is in the names of images that pods of Kubernetes' storage tests use, among all that
# `e2e.test --list-images` prints.
_WANTED_BY_TESTS = ("agnhost", "busybox", "glibc-dns-testing", "nginx", "nonroot")
# The image of a program that one of these tests installs, as its manifest names it; the program is
# newer, as that version's module is not to be had.
_POPULATOR = {"hello-populator": "registry.k8s.io/sig-storage/hello-populator:v1.0.1"}
# An emulated guest's clock ran four times as fast once. A guest is reset where its clock is sure to
# run slower or faster than this.
_CLOCK_RATES = (0.5, 2.0)

# Marks the lab's routes in the host's table (ip-route(8), proto).
_ROUTES = "139"
_NAME = "carver-node-"

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


def _alone(
    change: Callable[Concatenate["Cluster", P], R],
) -> Callable[Concatenate["Cluster", P], R]:
    """Have a method change the machines while no other program does (machines.locked)."""

    @wraps(change)
    def locked(self: "Cluster", /, *args: P.args, **named: P.kwargs) -> R:
        with machines.locked("cluster"):
            return change(self, *args, **named)

    return locked


def clock_may_be_right(passed: float, least: float, most: float) -> bool:
    """Tell whether a guest's clock may keep pace with the host's.

    By the guest's `passed` seconds went by, by the host's at least `least` and at most `most`: how
    long each question to a busy guest was on its way is not known.
    """
    slowest, fastest = _CLOCK_RATES
    return passed > slowest * least and passed < fastest * most


class Cluster:
    """The cluster of this checkout: its nodes, its versions, and how it is brought up."""

    def __init__(
        self,
        nodes: int,
        kubernetes: str = "",
        gates: Sequence[str] = (),
        values: Sequence[str] = (),
    ) -> None:
        """Describe a cluster.

        `kubernetes` is a version such as 1.37.2, or empty for the one that go.mod requires; `gates`
        are feature gates of Kubernetes, each NAME=true or NAME=false; `values` are those files of
        tests/cluster/values with which Carver is installed over the manifest's values.
        """
        self.guests = [guest_of(f"{_NAME}{number}") for number in range(1, nodes + 1)]
        self.programs = Programs(kubernetes)
        self.gates = gates
        self.values = list(values)
        self.control_plane = ControlPlane(self.programs, gates)
        self.machines = _machines(self.guests, in_user_mode=_in_user_mode())

    @cached_property
    def _image_digest(self) -> str:
        """What Carver's image is made of, as it was when it was asked for first."""
        return lab_host.digest_of(*_PARTS_OF_IMAGE)[:16]

    @property
    def server(self) -> str:
        """The URL of the API server."""
        return control_plane.SERVER

    @property
    def kubectl(self) -> Callable[..., subprocess.CompletedProcess[str]]:
        """kubectl, as an administrator."""
        return self.control_plane.kubectl

    def guest(self, name: str) -> Guest:
        """Return the machine of a node, by the node's name."""
        for one in self.guests:
            if one.name == name:
                return one
        names = ", ".join(one.name for one in self.guests)
        raise GuestError(f"no machine of the cluster is called {name!r}: there are {names}")

    @_alone
    def up(self) -> None:
        """Bring the cluster up with the present tree's Carver in it.

        What is there already is left as it is, so that an interrupted `up` goes on where it was.
        libvirt is started last, as it is stopped while it has no machine.
        """
        machines.prepare(in_user_mode=_in_user_mode())
        self.programs.build(
            [
                *("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl"),
                *(
                    "coredns",
                    "snapshot-controller",
                    *cluster_node.PROGRAMS,
                    *cluster_node.PLUGINS,
                    *sidecars(),
                ),
                *("agnhost", "e2e.test", "hello-populator"),
            ]
        )
        if not render.HELM.exists():
            # Checks install Carver by helm, from the lab's network, which has no way out.
            with step("compile helm", "compile-helm"):
                render.ensure_helm()
        archives = self._archives()
        self._make_store(archives)
        _remove_those_of_the_other_power()
        self._ensure_machines()
        self._check_clocks(self.guests)
        bridge = self._connect(self.guests)
        with step("start the control plane", "control-plane"):
            self.control_plane.ensure()
            self._apply_snapshot_kinds()
        with step("copy programs to the nodes", "nodes"):
            _at_once(self.guests, lambda it: self._install(it, bridge))
        with step("import images that changed", "images"):
            _at_once(self.guests, lambda it: cluster_node.import_images(it, bridge, archives))
        with step("start kubelets", "kubelets"):
            self._join(self.guests)
        self.install_carver()

    def _ensure_machines(self) -> None:
        """Have the machines running; machines, their authority and etcd's objects go together.

        A machine keeps what another authority signed, and volumes that new objects do not know; old
        objects would be taken for the state of machines that are new.
        """
        with self.machines.running():
            if self.machines.there() and not lab_authority.exists(control_plane.FOLDER):
                with step("remove machines of another authority", "down") as removing:
                    self.machines.remove(removing)
            self.control_plane.prepare()
            if not self.machines.fit():
                control_plane.forget_objects()
            self.machines.ensure()

    def _install(self, guest: Guest, bridge: str) -> None:
        gates = {
            name: value == "true" for name, _, value in (one.partition("=") for one in self.gates)
        }
        cluster_node.install(guest, _number(guest), bridge, gates)

    def _join(self, guests: Sequence[Guest]) -> None:
        """Start kubelets, and wait until their nodes are ready; forget nodes that are gone.

        An object of a node on whose disk no kubelet has run yet is that of an earlier machine.
        """
        have_run = zip(guests, _at_once(guests, cluster_node.has_run), strict=True)
        old = set(self.nodes) - {one.name for one, has_run in have_run if not has_run}
        for one in self.control_plane.objects("nodes"):
            if (name := one["metadata"]["name"]) not in old:
                self._forget(name)
        _at_once(guests, cluster_node.start)
        self.wait_for_nodes(guests)

    def _forget(self, name: str) -> None:
        """Delete what Kubernetes knows of a node."""
        self.kubectl("delete", "--ignore-not-found", f"nodes/{name}", f"csinodes/{name}")

    def _write_settings(self) -> None:
        """Remember what the cluster is, for those who find it up."""
        settings = {
            "nodes": len(self.guests),
            "kubernetes": self.programs.kubernetes,
            "gates": [*self.gates],
            "values": self.values,
        }
        files.write(_SETTINGS, json.dumps(settings))

    @_alone
    def down(self) -> None:
        """Remove the cluster and all that was started for it; programs and box stay cached.

        The authority goes last: while a machine is left, the next `up` needs it.
        """
        control_plane.end_all()
        for own in (control_plane.API_ADDRESS, control_plane.DNS_ADDRESS):
            _try("ip", "address", "delete", f"{own}/32", "dev", "lo")
        _try("ip", "route", "flush", "proto", _ROUTES)
        self.machines.down("the machines")
        _remove_those_of_the_other_power()
        lab_host.remove_tree(control_plane.FOLDER)

    # Carver

    def install_carver(self) -> None:
        """Apply the committed manifest, and wait until every node has enrolled.

        What helm has installed meanwhile goes back to the manifest's values by helm.
        """
        is_of_helm = self._is_of_helm()
        if is_of_helm:
            self.install_values([])
        with step("install Carver", "carver") as installing:
            if not self._namespace():
                self.kubectl("create", "namespace", NAMESPACE)
                self._mark_image()
            if not is_of_helm:
                self.apply(_MANIFEST.read_text())
            if self.image != self._image_digest:
                # Another image has the same name, so no pod's template changed. The mark comes
                # last: whoever is interrupted before it restarts the pods once more.
                workloads = self._workloads()
                self.kubectl("--namespace", NAMESPACE, "rollout", "restart", *workloads)
                self._mark_image()
            self.wait_for_carver(installing)
        self.values = []
        self._write_settings()

    @_alone
    def install_values(self, names: Sequence[str]) -> None:
        """Install or upgrade Carver by helm, with tests/cluster/values over the manifest's values.

        Helm takes over what the committed manifest made; only what it has taken over does it remove
        where the new values leave it out. A CSIDriver that may not be changed in place is made
        anew, as docs/install.md says.
        """
        files = [_VALUES / f"{name}.yaml" for name in names]
        if missing := [one.name for one in files if not one.exists()]:
            there = ", ".join(sorted(one.stem for one in _VALUES.glob("*.yaml")))
            raise ControlPlaneError(f"tests/cluster/values has no {missing[0]}: it has {there}")
        with step(
            f"install Carver with values {', '.join(names) or 'of the manifest'}", "helm"
        ) as it:
            by_nodes = "sidecars" in names
            self.control_plane.distribute_snapshots(by_nodes)
            self.apply(json.dumps(_SECRET))
            if not self._is_of_helm():
                self._helm(it, [])
            self._helm(it, files)
            self.wait_for_carver(it)
        self.values = [*names]
        self._write_settings()

    def _helm(self, installing: Step, files: Sequence[Path]) -> None:
        """Have helm install or upgrade Carver with the manifest's values and these files."""
        values = [f"--values={one}" for one in (_MANIFEST_VALUES, *files)]
        helm, chart = str(render.ensure_helm()), str(render.CHART)
        # Without it, helm takes the cluster for one of the oldest Kubernetes that it knows.
        version = f"--kube-version={self.programs.kubernetes}"
        only = "--show-only=templates/csidriver.yaml"
        shown = subprocess.run(
            [helm, "template", "carver", chart, *values, version, only],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        try:
            self.kubectl("apply", "--dry-run=server", "--filename=-", stdin=shown)
        except ControlPlaneError:
            self.kubectl("delete", "csidriver", "lvm.csi.carver", "--ignore-not-found")
        installing.run(
            *lab_host.in_network(
                *("env", f"HOME={_SERVED}"),
                *(helm, "upgrade", "--install", "carver", chart, *values),
                *("--namespace", NAMESPACE, "--take-ownership"),
                f"--kubeconfig={control_plane.kubeconfig()}",
            ),
        )

    def _is_of_helm(self) -> bool:
        """Return whether helm has installed Carver, and not the manifest alone."""
        words = (f"--namespace={NAMESPACE}", "--selector=owner=helm,name=carver")
        return bool(self.control_plane.objects("secrets", *words))

    def apply(self, text: str) -> None:
        """Apply objects as an administrator."""
        self.kubectl("apply", "--filename=-", stdin=text)

    def wait_for_carver(self, waiting: Step, limit_seconds: float = 900) -> None:
        """Wait until Carver's pods are ready and every node has its driver and its capacity."""
        timeout = f"--timeout={limit_seconds:.0f}s"
        for workload in self._workloads():
            done = self.kubectl("--namespace", NAMESPACE, "rollout", "status", workload, timeout)
            with waiting.log.open("a") as log:
                log.write(done.stdout)
        self._until("every node has the driver", self._have_driver, limit_seconds)
        self._until("every node has a capacity", self._have_capacity, limit_seconds)

    def _workloads(self) -> list[str]:
        """Name the DaemonSets and Deployments of the installed Carver, each as KIND/NAME."""
        return [
            f"{kind}/{one['metadata']['name']}"
            for kind in ("daemonset", "deployment")
            for one in self.control_plane.objects(f"{kind}s", f"--namespace={NAMESPACE}")
        ]

    def _mark_image(self) -> None:
        """Have the namespace's label say what the image of the installed Carver was made of."""
        mark = f"carver.lab/image={self._image_digest}"
        self.kubectl("label", "namespace", NAMESPACE, mark, "--overwrite")

    @property
    def image(self) -> str:
        """A digest of what the image of the installed Carver was made of; empty without Carver."""
        labels = self._namespace().get("metadata", {}).get("labels", {})
        return str(labels.get("carver.lab/image", ""))

    def _namespace(self) -> dict[str, Any]:
        """Return the namespace of Carver; empty where there is none."""
        words = ("get", "namespace", NAMESPACE, "--ignore-not-found", "--output=json")
        shown: dict[str, Any] = json.loads(self.kubectl(*words).stdout or "{}")
        return shown

    def _have_driver(self) -> bool:
        served = {
            one["metadata"]["name"]
            for one in self.control_plane.objects("csinodes")
            if any(it["name"] == "lvm.csi.carver" for it in one["spec"].get("drivers") or [])
        }
        return served >= {one.name for one in self.guests}

    def _have_capacity(self) -> bool:
        found = set()
        for one in self.control_plane.objects("csistoragecapacities", f"--namespace={NAMESPACE}"):
            terms = one.get("nodeTopology", {}).get("matchLabels", {})
            if one.get("capacity", "0") != "0":
                found.update(terms.values())
        return found >= {one.name for one in self.guests}

    # Nodes

    @property
    def nodes(self) -> list[str]:
        """Name the nodes."""
        return [one.name for one in self.guests]

    def wait_for_nodes(self, guests: Sequence[Guest], limit_seconds: float = 900) -> None:
        """Wait until nodes are ready, each said by the kubelet of its machine's present boot."""
        wanted = {*_at_once(guests, lambda it: (it.name, cluster_node.boot_id(it)))}

        def all_ready() -> bool:
            ready = {
                (one["metadata"]["name"], one["status"].get("nodeInfo", {}).get("bootID"))
                for one in self.control_plane.objects("nodes")
                for it in one["status"].get("conditions", [])
                if (it["type"], it["status"]) == ("Ready", "True")
            }
            return ready >= wanted

        self._until("every node is ready", all_ready, limit_seconds)

    @_alone
    def power_off(self, name: str) -> None:
        """Pull a node's plug; nothing is written out."""
        self.guest(name).power_off()

    @_alone
    def power_on(self, name: str) -> None:
        """Start a node that was off, and wait until its kubelet has been started."""
        self.guest(name).power_on()
        self._check_clocks([self.guest(name)])

    @_alone
    def reset(self, name: str) -> None:
        """Cut a node's power and give it back."""
        self.guest(name).reset()

    @_alone
    def reboot(self, name: str) -> None:
        """Reboot a node in good order."""
        self.guest(name).reboot()

    def kill(self, name: str, program: str) -> int:
        """End by SIGKILL the processes of a node whose command line has these words; count them."""
        done = self.guest(name).run(
            ["pkill", "--signal", "KILL", "--count", "--full", program], check=False
        )
        return int(done.stdout.strip() or 0)

    def restart_server(self) -> None:
        """Kill the API server, and start it again."""
        control_plane.end_process("kube-apiserver", number=signal.SIGKILL)
        self.control_plane.ensure()

    def shell(self, name: str, script: str) -> str:
        """Run lines of a shell as root on a node, and return what they print; raises GuestError."""
        return cluster_node.run(self.guest(name), script)

    @_alone
    def add_node(self, copy_of: str = "") -> str:
        """Boot one more machine, join it to the cluster as a node, and return its name.

        Where a node is named by `copy_of`, the new one has a copy of that node's disk, as a cloned
        machine has, and so the same volume group.

        It gets what `up` served last. If a step fails, it is removed.
        """
        guest = guest_of(f"{_NAME}{len(self.guests) + 1}")
        self.guests.append(guest)
        try:
            self.machines.add(guest)
            self._check_clocks([guest])
            bridge = self._connect([guest])
            with step(f"copy programs to {guest.name}", "nodes"):
                self._install(guest, bridge)
            if copy_of:
                with step(f"copy the disk of {copy_of} to {guest.name}", "copy"):
                    cluster_node.copy_disk(self.guest(copy_of), guest)
            with step(f"start kubelet on {guest.name}", "kubelets"):
                self._join([guest])
        except BaseException:
            self.remove_node(guest.name)
            raise
        return guest.name

    @_alone
    def remove_node(self, name: str) -> None:
        """Remove the machine that was added last, and all that makes it a node."""
        if name != self.guests[-1].name:
            raise ControlPlaneError(f"{name} is not the node that was added last")
        with step(f"remove {name}", "remove"):
            self.machines.drop(name)
            gone = self.guests.pop()
            _try("ip", "route", "delete", cluster_node.pods_of(_number(gone)))
            self._forget(name)

    @_alone
    def pause(self, name: str) -> None:
        """Stop a node's processors, so that it answers nothing and loses nothing."""
        self.guest(name).pause()

    @_alone
    def resume(self, name: str) -> None:
        """Let a paused node go on."""
        self.guest(name).resume()

    def set_clock(self, name: str, ahead_seconds: int) -> None:
        """Set a node's clock ahead of the host's, or behind it where the number is negative."""
        self.guest(name).run([f"date --utc --set=@{int(time.time()) + ahead_seconds}"])

    def _connect(self, guests: Sequence[Guest]) -> str:
        """Give the host addresses, and routes to nodes; return the bridge's address."""
        addresses = {_number(one): str(one.address()) for one in guests}
        shown = _output("ip", "-json", "route", "get", next(iter(addresses.values())))
        [route] = json.loads(shown)
        bridge = str(route["prefsrc"])
        # Not on the bridge: at each of its addresses libvirt's DNS server answers.
        for own in (control_plane.API_ADDRESS, control_plane.DNS_ADDRESS):
            _output("ip", "address", "replace", f"{own}/32", "dev", "lo")
        for number, address in addresses.items():
            pods = cluster_node.pods_of(number)
            _output("ip", "route", "replace", pods, "via", address, "proto", _ROUTES)
        configuration = control_plane.FOLDER / "rsyncd.conf"
        files.write(configuration, cluster_node.served(_SERVED, cluster_node.PORT, bridge))
        control_plane.ensure_process(
            "rsync", ["rsync", "--daemon", "--no-detach", f"--config={configuration}"]
        )
        return bridge

    def _check_clocks(self, guests: Sequence[Guest]) -> None:
        """Reset each guest whose clock runs faster or slower than the host's."""

        def check(one: Guest) -> None:
            for _ in range(3):
                began = time.monotonic()
                before = float(one.run(["cat /proc/uptime"]).stdout.split()[0])
                pause_began = time.monotonic()
                time.sleep(5)
                pause_ended = time.monotonic()
                after = float(one.run(["cat /proc/uptime"]).stdout.split()[0])
                most = time.monotonic() - began
                if clock_may_be_right(after - before, pause_ended - pause_began, most):
                    return
                one.reset()

        _at_once(guests, check)

    # What is served to the nodes

    def _archives(self) -> list[str]:
        """Make what nodes fetch, and return the names of the image archives."""
        for folder in ("bin", "cni", "images"):
            (_SERVED / folder).mkdir(parents=True, exist_ok=True)
        for name in cluster_node.PROGRAMS:
            _serve(_SERVED / "bin" / name, self.programs.path(name))
        for name in cluster_node.PLUGINS:
            _serve(_SERVED / "cni" / name, self.programs.path(name))
        return [
            self._stand_ins(),
            *(self._of_program(name, tag) for name, tag in {**sidecars(), **_POPULATOR}.items()),
            self._carver(),
        ]

    def _make_store(self, archives: Sequence[str]) -> None:
        """Make the store of containerd that a new node gets, where an archive changed."""
        folder, stamps = _SERVED / "images", _SERVED / "stamps"
        stamps.mkdir(exist_ok=True)
        made_of = {}
        for name in archives:
            status = (folder / name).stat()
            made_of[name] = f"{status.st_mtime_ns} {status.st_size}\n"
            if not (stamps / name).exists() or (stamps / name).read_text() != made_of[name]:
                (stamps / name).write_text(made_of[name])
        done = control_plane.FOLDER / "store.json"
        if files.read_json(done) == made_of:
            return
        done.unlink(missing_ok=True)
        with step("import images", "store") as making:
            images.make_store(
                making,
                _SERVED / "store",
                self.programs.path("containerd"),
                self.programs.path("ctr"),
                [folder / name for name in archives],
            )
        files.write(done, json.dumps(made_of))

    def _of_program(self, name: str, tag: str) -> str:
        """Make an image of one program, as the sidecars' own are."""
        program = self.programs.path(name)

        def make(archive: Path) -> None:
            image = images.Image([tag], entrypoint=[f"/{name}"])
            images.write_archive(archive, [image], {name: program})

        return _archive(program.with_name(f"{name}.tar"), [tag], make)

    def _stand_ins(self) -> str:
        """Make the images that Kubernetes' tests want, and pause."""
        agnhost = self.programs.path("agnhost")

        def make(archive: Path) -> None:
            shown = subprocess.run(
                [str(self.programs.path("e2e.test")), "--list-images"],
                check=True,
                capture_output=True,
                text=True,
                env={**os.environ, "HOME": str(control_plane.FOLDER)},
            )
            names = sorted(
                one for one in shown.stdout.split() if any(it in one for it in _WANTED_BY_TESTS)
            )
            with step("make images for tests", "stand-ins") as making:
                images.make_stand_ins(making, archive, agnhost, names)

        return _archive(agnhost.with_name("stand-ins.tar"), _WANTED_BY_TESTS, make)

    def _carver(self) -> str:
        """Make Carver's own image, where what it is made of changed since it was made last."""
        stamp = lab_host.PROJECT / ".cache" / "image-of-cluster"
        archive = _newest_image()
        made = f"{self._image_digest} {archive.stat().st_mtime_ns if archive else 0}"
        if archive is None or not stamp.exists() or stamp.read_text() != made:
            with step("make Carver's image", "image") as making:
                build = lab_host.PROJECT / "deploy" / "image" / "build_image.py"
                making.run(*lab_host.as_root(sys.executable, build))
            if (archive := _newest_image()) is None:
                raise ControlPlaneError(f"{build} left no image in dist")
            stamp.write_text(f"{self._image_digest} {archive.stat().st_mtime_ns}")
        _serve(_SERVED / "images" / "carver.tar", archive)
        return "carver.tar"

    def _apply_snapshot_kinds(self) -> None:
        folder = self.programs.files_of("sidecars", _SNAPSHOT_CLIENT) / "config" / "crd"
        for path in sorted(folder.glob("*.io_*.yaml")):
            self.kubectl("apply", "--server-side", f"--filename={path}")

    def _until(self, what: str, look: Callable[[], bool], limit_seconds: float) -> None:
        deadline = time.monotonic() + limit_seconds
        while not look():
            if time.monotonic() > deadline:
                raise ControlPlaneError(f"not within {limit_seconds:.0f} s: {what}")
            time.sleep(2)


def _in_user_mode() -> bool:
    """Tell whether the machines run in user mode."""
    return lab_host.in_user_mode(f"{_NAME}1")


def _machines(guests: Sequence[Guest], *, in_user_mode: bool) -> "Machines | UserModeMachines":
    """Describe the machines of all nodes, by one power or the other."""
    memory_mib = machines.setting("CARVER_CLUSTER_MEMORY", 3072)
    if in_user_mode:
        return UserModeMachines(guests, memory_mib, _NAME)
    # With two, an emulated processor spins while it waits for the other one, which the host may not
    # be running.
    cpus = machines.setting("CARVER_CLUSTER_CPUS", 1)
    return Machines(_KIND, guests, cpus, memory_mib, family=_NAME)


def _remove_those_of_the_other_power() -> None:
    """Remove machines that were made while CARVER_CLUSTER_POWER was another, if there are any."""
    others = _machines([], in_user_mode=not _in_user_mode())
    if others.is_left:
        others.down("the machines of another power")


def present() -> Cluster:
    """Return the cluster that is up, as its settings describe it."""
    settings = files.read_json(_SETTINGS)
    if settings is None:
        raise ControlPlaneError("there is no cluster: `make cluster` makes one")
    return Cluster(
        settings["nodes"], settings["kubernetes"], settings["gates"], settings.get("values", ())
    )


def sidecars() -> dict[str, str]:
    """Return the images of the sidecars that the manifest names, by the names of their programs."""
    found = re.findall(r"image: (\S+/(csi-[a-z-]+):v\S+)", _MANIFEST.read_text())
    return {program: image for image, program in found}


def _number(guest: Guest) -> int:
    """Return the number of a node, which its range of pods' addresses has."""
    return int(guest.name.removeprefix(_NAME))


def _archive(archive: Path, parts: Sequence[str], make: Callable[[Path], None]) -> str:
    """Have an archive of images that was made by the present recipe of these parts; serve it.

    The folder that it is in is named by the program that is in it. Returns the archive's name.
    """
    stamp = archive.with_suffix(".made")
    made_of = "\n".join([lab_host.digest_of("vagrant/images.py"), *parts])
    if not archive.exists() or files.read_text(stamp) != made_of:
        make(archive)
        files.write(stamp, made_of)
    _serve(_SERVED / "images" / archive.name, archive)
    return archive.name


def _serve(name: Path, source: Path) -> None:
    """Have a file under another name: by a hard link, as rsync's daemon follows no other one."""
    name.unlink(missing_ok=True)
    try:
        name.hardlink_to(source)
    except OSError:
        # They are not of one file system.
        shutil.copy2(source, name)


def _output(*words: str) -> str:
    done = subprocess.run(lab_host.in_network(*words), check=True, capture_output=True, text=True)
    return done.stdout


def _try(*words: str) -> None:
    """Run a command in the lab's network that has nothing to do where it fails."""
    subprocess.run(lab_host.in_network(*words), check=False, capture_output=True)


def _at_once(items: Sequence[T], act: Callable[[T], R]) -> list[R]:
    """Do something for each item side by side; the first failure is raised in the end."""
    with ThreadPoolExecutor(len(items)) as pool:
        return [future.result() for future in [pool.submit(act, one) for one in items]]


def _newest_image() -> Path | None:
    """Return Carver's image that was made last."""
    found = (lab_host.PROJECT / "dist").glob("carver-*-amd64.oci.tar")
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def main() -> int:
    """Run one command; return the exit code."""
    parser = _parser()
    arguments, words = parser.parse_known_args()
    if arguments.command in _OF_OTHERS:
        arguments.words = words
    elif words:
        parser.error(f"unrecognized arguments: {' '.join(words)}")
    try:
        return _COMMANDS[arguments.command](arguments)
    except (StepError, box.BoxError, GuestError, ControlPlaneError, lab_host.HostError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"cluster: {error}\n{error.stderr or ''}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _up(_: argparse.Namespace) -> int:
    """Bring the cluster up, with the present tree's Carver in it; quick if all is so already."""
    nodes = machines.setting("CARVER_CLUSTER_NODES", 3)
    version = _variable("CARVER_CLUSTER_KUBERNETES", r"\d+\.\d+\.\d+", "a version such as 1.37.2")
    gate = r"\w+=(true|false)"
    gates = _variable("CARVER_CLUSTER_GATES", f"{gate}(,{gate})*", "NAME=true,OTHER=false")
    Cluster(nodes, version, gates.split(",") if gates else []).up()
    print(f"cluster: {lab_host.PROJECT / 'vagrant/cluster.py'} kubectl get pods --all-namespaces")
    return 0


def _variable(name: str, form: str, example: str) -> str:
    """Read a variable of the environment, which may be empty or missing, and must have a form."""
    text = os.environ.get(name, "")
    if text and not re.fullmatch(form, text):
        raise lab_host.HostError(f"{name} is {text!r}: it must be {example}")
    return text


def _down(_: argparse.Namespace) -> int:
    """Remove the cluster and all that was started for it."""
    # What there is to remove is what there is, whatever was written down.
    Cluster(0).down()
    return 0


def _kubectl(arguments: argparse.Namespace) -> int:
    """Run kubectl as an administrator of the cluster."""
    program = str(present().programs.path("kubectl"))
    words = [program, f"--kubeconfig={control_plane.kubeconfig()}", *arguments.words]
    return subprocess.run(lab_host.in_network(*words), check=False).returncode


def _check(arguments: argparse.Namespace) -> int:
    """Run tests/cluster/run.py on the cluster; the options are its own."""
    program = lab_host.PROJECT / "tests" / "cluster" / "run.py"
    kubectl = present().programs.path("kubectl").parent
    environment = {
        "KUBECONFIG": str(control_plane.kubeconfig()),
        "PATH": f"{kubectl}{os.pathsep}{os.environ['PATH']}",
    }
    settings = [f"{name}={value}" for name, value in environment.items()]
    # An emulated node takes minutes where another takes seconds; so do copies of large volumes, as
    # they give way to what else is on the node's only disk.
    usual = ("--size-mib=128", "--limit=900")
    words = lab_host.in_network(
        *("env", *settings, sys.executable, str(program), *usual), *arguments.words
    )
    # In place of this process: after an interrupt the checks have to remove what they have made.
    os.execvp(words[0], words)  # noqa: S606


def _monitor(arguments: argparse.Namespace) -> int:
    """Run tests/cluster/monitoring.py, with Prometheus, on the cluster; the options are its own."""
    present()
    tests = lab_host.PROJECT / "tests"
    # By apt, which the lab's network does not reach.
    subprocess.run([sys.executable, tests / "prometheus" / "programs.py"], check=True)
    program = tests / "cluster" / "monitoring.py"
    file = f"--kubeconfig={control_plane.kubeconfig()}"
    words = lab_host.in_network(sys.executable, str(program), file, *arguments.words)
    os.execvp(words[0], words)  # noqa: S606


def _run(arguments: argparse.Namespace) -> int:
    """Run a command as root on a node; one word is a line for its shell."""
    words = present().guest(arguments.node).ssh(arguments.words)
    return subprocess.run(words, check=False).returncode


def _change(arguments: argparse.Namespace) -> int:
    """Change a node's power."""
    cluster = present()
    changes: dict[str, Callable[[str], None]] = {
        "power-off": cluster.power_off,
        "power-on": cluster.power_on,
        "pause": cluster.pause,
        "resume": cluster.resume,
        "reboot": cluster.reboot,
        "reset": cluster.reset,
    }
    changes[arguments.command](arguments.node)
    return 0


def _clock(arguments: argparse.Namespace) -> int:
    """Set a node's clock so many seconds ahead of the host's."""
    present().set_clock(arguments.node, arguments.seconds)
    return 0


def _install(arguments: argparse.Namespace) -> int:
    """Install Carver anew by helm, with tests/cluster/values over the manifest's values."""
    present().install_values(arguments.values)
    return 0


# What each change of a node's power is.
_CHANGES = {
    "power-off": "Cut a node's power.",
    "power-on": "Start a node that is off.",
    "reset": "Cut a node's power, and start it again.",
    "reboot": "Reboot a node in good order.",
    "pause": "Stop a node's processors.",
    "resume": "Let a paused node go on.",
}
_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "up": _up,
    "down": _down,
    "kubectl": _kubectl,
    "check": _check,
    "monitor": _monitor,
    "run": _run,
    "clock": _clock,
    "install": _install,
    **dict.fromkeys(_CHANGES, _change),
}


# Whose words are those of another program, options and all.
_OF_OTHERS = frozenset({"check", "kubectl", "monitor"})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cluster.py", description="Drive the lab's cluster; see docs/testing.md."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, function in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=_CHANGES.get(name, (function.__doc__ or "").partition("\n")[0]),
            add_help=name not in _OF_OTHERS,
            allow_abbrev=False,
        )
        if name in ("run", "clock") or function is _change:
            command.add_argument("node")
        if name == "clock":
            command.add_argument("seconds", type=int)
        if name == "install":
            names = ", ".join(sorted(one.stem for one in _VALUES.glob("*.yaml")))
            command.add_argument("values", nargs="*", help=f"any of {names}; none: the manifest's")
        if name == "run":
            # The command's options are not ours.
            command.add_argument("words", nargs=argparse.REMAINDER)
    return parser


if __name__ == "__main__":
    sys.exit(main())
