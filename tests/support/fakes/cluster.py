"""A cluster with Carver, as kubectl shows it: objects, and what becomes of them at each look.

Every kubectl is a step in which schedulers, provisioners and kubelets go on by one. Scripts of pods
are run by this machine's sh, with a folder in the place of the volume, so they are tried as well.
"""

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from cluster.checks import is_ready
from cluster.kubectl import Answer, Object, path
from cluster.objects import WITHOUT_CARVER

SERVER = "https://fake:6443"
DRIVER, TOPOLOGY = "lvm.csi.carver", "topology.lvm.csi.carver/node"
# The annotation of a Node that asks for its evacuation.
EVACUATE = f"evacuate.{DRIVER}/request"
# The start of annotations about the release of claims of lost nodes.
_RELEASE = f"release.{DRIVER}"
IMAGE = "localhost/carver:0.1.0"
_MIB = 1 << 20
_STUBS = {
    # The size is the volume's, not that of the disk where its folder is.
    "df": 'echo "Filesystem 1024-blocks Used"; echo "/dev/dm-0 $KIB 0"',
    "sync": "exit 0",
}
_CONTROLLER = {
    "template": {
        "spec": {
            "serviceAccountName": "snapshot-controller",
            "containers": [
                {
                    "name": "snapshot-controller",
                    "image": "registry.k8s.io/sig-storage/snapshot-controller:v8.7.0",
                    "args": ["--leader-election=true", "--enable-distributed-snapshotting=true"],
                }
            ],
        }
    }
}
_SNAPSHOT_KINDS = ("volumesnapshots", "volumesnapshotcontents", "volumesnapshotclasses")
_KINDS = {
    "storage": ("storageclasses", "volumeattributesclasses"),
    "snapshot.storage": _SNAPSHOT_KINDS,
    "groupsnapshot.storage": ("volumegroupsnapshots", "volumegroupsnapshotclasses"),
}

_WIDE = frozenset(
    {"namespaces", "nodes", "storageclasses", "volumesnapshotclasses", "volumesnapshotcontents"}
    | {"volumeattributesclasses", "volumegroupsnapshotclasses"}
)
# What every service account may do.
_EVERYONE = {"verbs": ["create"], "apiGroups": ["authorization.k8s.io"], "resources": ["x"]}
# After so many looks a pod of Carver's is ready.
_START_STEPS = 6
# A volume is sent for so many looks before its pod is evicted, and its copy kept for so many.
_SENDING_STEPS, _GRACE_STEPS = 12, 20
# A claim of a lost node is released after a pod has waited for it for so many looks.
_RELEASE_STEPS = 20
# The authority's Secret and ConfigMap.
_AUTHORITY = "carver-controller"
# No node has room for so much.
_MOST_MIB = 1 << 20

Key = tuple[str, str, str]


class FakeCluster:
    """Two nodes. What tests may change is public, and set before the first kubectl."""

    def __init__(self, root: Path) -> None:
        self.root, self.steps, self.calls = root, 0, 0
        self.snapshots = True
        # Groups of the API that are not there.
        self.missing: set[str] = set()
        # What is wrong with it; each word is looked for where it matters.
        self.wrong: set[str] = set()
        # Words of a command, how often it fails, and what it says then.
        self.errors: list[tuple[str, int, str]] = []
        # Words of a command in which the caller is interrupted, or the number of a call.
        self.interrupts: list[str | int] = []
        self.signal = signal.SIGINT
        self.objects: dict[Key, Object] = {}
        self.applied: list[Object] = []
        self.commands: list[str] = []
        self._ages: dict[Key, int] = {}
        self._count = 0
        # Nodes whose power is off.
        self.off: set[str] = set()
        # Nodes that run, and whose Carver never answers.
        self.silent: set[str] = set()
        # By a node that was made with a copy of another's disk: that other, and what the copy has.
        self.copies: dict[str, tuple[str, set[str]]] = {}
        # Nodes in whose group a check has a disk of its own, and those where it hangs.
        self.disks: set[str] = set()
        self.hung: set[str] = set()
        # Whether what was on a node that was deleted is forgotten.
        self.forgets = False
        # What the liar was asked to create, and how many answers of a node were refused.
        self.asked: set[str] = set()
        self.refused_answers: dict[str, int] = {}
        # The step in which every node has a certificate of the present authority.
        self._enrolled = 0
        # By the PersistentVolume's or snapshot's name: where it is and how large its device is.
        self.held: dict[str, tuple[str, int]] = {}
        # The claims that volumes were made for, as Carver knows them.
        self._claimed: dict[str, str] = {}
        # Whether the controller evacuates nodes.
        self.evacuates = False
        # Whether claims of lost nodes are released; for how many looks a pod has waited for each;
        # and the PersistentVolumes of those that are released and not in use again.
        self.releases = False
        self._waited: dict[Key, int] = {}
        self._released: dict[Key, str] = {}
        # For how many looks volumes have been sent to another node.
        self._sent: dict[str, int] = {}
        # By the id of a volume that was moved: its node, its claim, and when it is erased there.
        self.copies_left: dict[str, tuple[str, str, int]] = {}
        (root / "bin").mkdir()
        for name, script in _STUBS.items():
            (root / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
            (root / "bin" / name).chmod(0o755)
        self._install()

    def _install(self) -> None:
        spec = {"volumeLifecycleModes": ["Persistent", "Ephemeral"]}
        self._add("CSIDriver", DRIVER, spec=spec)
        self._add("StorageClass", "carver", provisioner=DRIVER, parameters={"class": "fast"})
        for node in ("one", "two"):
            self.add_node(node)
        self._add("Node", "control", spec={})
        self._add("CSINode", "control", spec={"drivers": None})
        pod: Object = {
            "serviceAccountName": "carver-node",
            "containers": [{"name": "carver", "image": IMAGE}],
            "volumes": [
                {"name": "config", "configMap": {"name": "carver-config"}},
                {"name": "s", "hostPath": {"path": f"/var/lib/kubelet/plugins/{DRIVER}"}},
            ],
        }
        selector, template = {"matchLabels": {"app": "carver"}}, {"spec": pod}
        own: Object = {"selector": selector, "template": template}
        self._add("DaemonSet", "carver-node", "carver-system", spec=own)
        self._add("Namespace", "carver-system")
        self._add("Deployment", "snapshot-controller", "kube-system", spec=_CONTROLLER)
        containers: list[Object] = [
            {
                "name": "controller",
                "image": IMAGE,
                "args": ["controller"],
                "env": [
                    {"name": "CARVER_DRIVER_NAME", "value": DRIVER},
                    {"name": "CARVER_CONTROLLER_AUTHORITY", "value": _AUTHORITY},
                ],
                "ports": [{"name": "metrics", "containerPort": 9898}],
            },
            {"name": "provisioner", "image": "csi-provisioner:v6"},
            {
                "name": "snapshotter",
                "image": "csi-snapshotter:v8",
                "args": ["--feature-gates=CSIVolumeGroupSnapshot=true"],
            },
        ]
        labels = {"app": "controller"}
        central: Object = {
            "selector": {"matchLabels": labels},
            "template": {"spec": {"containers": containers}},
        }
        self._add("Deployment", "carver-controller", "carver-system", spec=central)
        self._serve()

    def add_node(self, name: str) -> None:
        """Have a node with Carver, which is ready."""
        spec = {"taints": [{"key": "mine", "effect": "NoSchedule"}]}
        self._add("Node", name, spec=spec)
        ready = {"type": "Ready", "status": "True"}
        self.objects["nodes", "", name]["status"] = {"conditions": [ready]}
        self._add("CSINode", name, spec={"drivers": [{"name": DRIVER}]})

    def carver_nodes(self) -> list[str]:
        """Name the nodes that have Carver, in their order."""
        return [name for kind, _, name in self.objects if kind == "nodes" and name != "control"]

    def distribute(self) -> dict[Key, Object]:
        """Have no controller: each node has its own sidecars. Return the controller's objects."""
        keys = [key for key in self.objects if key[2].startswith("carver-controller")]
        keys = [key for key in keys if key[0] in ("deployments", "pods")]
        central = {key: self.objects.pop(key) for key in keys}
        daemonset = self.objects["daemonsets", "carver-system", "carver-node"]
        spec = daemonset["spec"]["template"]["spec"]
        spec["containers"].append({"name": "snapshotter", "image": "csi-snapshotter:v8"})
        return central

    @property
    def is_central(self) -> bool:
        return ("deployments", "carver-system", "carver-controller") in self.objects

    # kubectl

    def execute(self, words: Sequence[str], stdin: str, seconds: float) -> Answer:
        """What kubectl answers; KeyboardInterrupt where it shall be."""
        assert words[0] == "kubectl"
        assert seconds > 0
        line = " ".join(words[1:])
        self.commands.append(line)
        self.calls += 1
        self._step()
        for one in list(self.interrupts):
            if one == self.calls or (isinstance(one, str) and one in line):
                self.interrupts.remove(one)
                raise KeyboardInterrupt
        for index, (needle, times, text) in enumerate(self.errors):
            if needle in line and times:
                self.errors[index] = (needle, times - 1, text)
                return Answer(1, "", text)
        split = list(words[1:])
        inside = split[split.index("--") + 1 :] if "--" in split else []
        split = split[: split.index("--")] if "--" in split else split
        options = dict(
            one.removeprefix("--").partition("=")[::2] for one in split if one.startswith("--")
        )
        plain = [one for one in split if not one.startswith("--")]
        verb: Any = getattr(self, f"_do_{plain[0]}")
        return Answer(*verb(plain[1:], options, inside or stdin))

    def _do_version(self, *_: Any) -> tuple[int, str, str]:
        return 0, json.dumps({"serverVersion": {"gitVersion": "v1.36.0"}}), ""

    def _do_config(self, *_: Any) -> tuple[int, str, str]:
        return 0, json.dumps({"clusters": [{"cluster": {"server": SERVER}}]}), ""

    def _do_get(self, words: list[str], options: dict[str, str], _: str) -> tuple[int, str, str]:
        if options.get("raw", "").endswith("/proxy/metrics"):
            return 0, self._metrics(), ""
        if "raw" in options:
            group = options["raw"].split("/")[2].removesuffix(".k8s.io")
            if group in self.missing or (not self.snapshots and group != "storage"):
                missing = "Error from server (NotFound): the server could not find the resource"
                return 1, "", missing
            return 0, json.dumps({"resources": [{"name": one} for one in _KINDS[group]]}), ""
        kind, namespace = self._kind(words[0]), options.get("namespace", "")
        # As kubectl does, which takes a namespace for what has none.
        namespace = "" if kind in _WIDE else namespace
        if len(words) == 2:
            found = self.objects.get((kind, namespace, words[1]))
            assert "ignore-not-found" in options
            return 0, json.dumps(found) if found else "", ""
        items = [one for _, one in self._chosen(kind, options)]
        if kind == "csistoragecapacities":
            items = self._capacities()
        return 0, json.dumps({"items": items}), ""

    def _do_apply(self, words: list[str], _: dict[str, str], stdin: str) -> tuple[int, str, str]:
        assert not words
        for one in json.loads(stdin)["items"]:
            kind = one["kind"].lower()
            kind += "es" if kind.endswith("s") else "s"
            key = (kind, one["metadata"].get("namespace", ""), one["metadata"]["name"])
            assert not key[1] or ("namespaces", "", key[1]) in self.objects
            self.applied.append(json.loads(json.dumps(one)))
            if key not in self.objects:
                one["metadata"]["uid"] = self._uid()
                self.objects[key] = one
        return 0, "applied", ""

    def _do_create(
        self, words: list[str], options: dict[str, str], stdin: str
    ) -> tuple[int, str, str]:
        assert not words
        asked = json.loads(stdin)
        if asked["kind"] == "SelfSubjectRulesReview":
            assert asked["spec"]["namespace"]
            rules: list[Object] = [_EVERYONE]
            if "rights" in self.wrong and options["as"].endswith(":carver-node"):
                rules.append(
                    {"verbs": ["get", "list"], "apiGroups": [""], "resources": ["secrets"]}
                )
            # As the node authorizer has it.
            status: Object = {"resourceRules": rules, "nonResourceRules": None, "incomplete": True}
            return 0, json.dumps(asked | {"status": status}), ""
        assert asked["kind"] == "SubjectAccessReview"
        attributes = asked["spec"]["resourceAttributes"]
        assert "system:serviceaccounts:kube-system" in asked["spec"]["groups"]
        is_refused = "nodes" in self.wrong and attributes == {"verb": "watch", "resource": "nodes"}
        return 0, json.dumps(asked | {"status": {"allowed": not is_refused}}), ""

    def _do_patch(self, words: list[str], options: dict[str, str], _: str) -> tuple[int, str, str]:
        one = self.objects[self._kind(words[0]), options.get("namespace", ""), words[1]]
        change = json.loads(options["patch"])
        one["spec"] |= change["spec"]
        if "finalizers" in change.get("metadata", {}):
            assert change["metadata"] == {"finalizers": None}
            one["metadata"].pop("finalizers", None)
        return 0, "patched", ""

    def _do_delete(self, words: list[str], options: dict[str, str], _: str) -> tuple[int, str, str]:
        assert options["wait"] == "false"
        kind = self._kind(words[0])
        if "selector" in options:
            assert not words[1:]
        for key, one in self._chosen(kind, options):
            if "selector" in options or key[2] in words[1:]:
                one["metadata"]["deletionTimestamp"] = "now"
        return 0, "deleted", ""

    def _do_label(self, words: list[str], _: dict[str, str], __: str) -> tuple[int, str, str]:
        labels = self.objects["nodes", "", words[1]]["metadata"]["labels"]
        key, _equals, value = words[2].partition("=")
        labels.update({key: value} if value else {})
        if key.endswith("-"):
            del labels[key.removesuffix("-")]
        return 0, "labelled", ""

    def _do_annotate(self, words: list[str], _: dict[str, str], __: str) -> tuple[int, str, str]:
        assert words[0] == "nodes"
        assert words[2].endswith("-")
        about = self.objects["nodes", "", words[1]]["metadata"]
        about.get("annotations", {}).pop(words[2].removesuffix("-"), None)
        return 0, "annotated", ""

    def _do_taint(self, words: list[str], *_: Any) -> tuple[int, str, str]:
        assert words[0] == "nodes"
        taints = self.objects["nodes", "", words[1]]["spec"]["taints"]
        key, _equals, rest = words[2].removesuffix("-").partition("=")
        if words[2].endswith("-") and all(one["key"] != key for one in taints):
            return 1, "", f'error: taint "{key}" not found'
        taints[:] = [one for one in taints if one["key"] != key]
        if rest:
            value, _colon, effect = rest.partition(":")
            taints.append({"key": key, "value": value, "effect": effect})
        return 0, "tainted", ""

    def _do_cordon(self, words: list[str], *_: Any) -> tuple[int, str, str]:
        self.objects["nodes", "", words[0]]["spec"]["unschedulable"] = True
        return 0, "cordoned", ""

    def _do_uncordon(self, words: list[str], *_: Any) -> tuple[int, str, str]:
        self.objects["nodes", "", words[0]]["spec"].pop("unschedulable", None)
        return 0, "uncordoned", ""

    def _do_drain(self, words: list[str], options: dict[str, str], _: str) -> tuple[int, str, str]:
        self._do_cordon(words)
        for _key, one in self._chosen("pods", {"selector": options["pod-selector"]}):
            if one["spec"].get("nodeName") == words[0]:
                one["metadata"]["deletionTimestamp"] = "now"
        self._step()
        return 0, "drained", ""

    def _do_logs(self, words: list[str], options: dict[str, str], _: str) -> tuple[int, str, str]:
        pod = self.objects["pods", options["namespace"], words[0]]
        if self._lies(pod):
            return 0, "\n".join(f"CreateVolume {name}" for name in sorted(self.asked)), ""
        lines = [f'{options["container"]} says "CreateVolume" of {name}' for name in self.held]
        return 0, "\n".join([*lines, "a line about something else"]), ""

    def _do_exec(
        self, words: list[str], options: dict[str, str], inside: list[str]
    ) -> tuple[int, str, str]:
        pod = self.objects["pods", options["namespace"], words[0]]
        if options["container"] == "controller":
            return self._central(" ".join(inside))
        if inside == ["carver", "status", "--json"]:
            return self._status(pod)
        assert inside[:2] == ["sh", "-c"]
        if "carver volume adopt" in inside[2]:
            return self._adopt(inside[2])
        if "vgextend" in inside[2] or "vgreduce" in inside[2]:
            return self._change_group(inside[2], pod)
        volume = self._volume_of(pod)
        script = inside[2].replace("/data", str(volume / "files"))
        if (new := self._bound(pod, "new")) is not None:
            script = script.replace("/wal", str(new / "files"))
        script = script.replace("/dev/carver", str(volume / "device"))
        if "/proc/self/mountinfo" in script:
            script = self._show_read_ahead(script, pod, volume)
        if "n=$((n + 1))" in pod["spec"]["containers"][0]["command"][2]:
            self._write_on(pod, volume / "files" / "log")
        environment = {"PATH": f"{self.root / 'bin'}:{os.defpath}"}
        environment["KIB"] = str(self.held[volume.name][1] * 1024 * 19 // 20)
        if "read-only" not in self.wrong and self._is_read_only(pod):
            script = re.sub(r"\| (dd of=|cat > )\S+", "| false", script)
        ended = subprocess.run(
            ["sh", "-c", script], capture_output=True, text=True, env=environment, check=False
        )
        if (volume / "device").exists():
            # Writing has neither cut it off nor made it longer.
            assert (volume / "device").stat().st_size % _MIB == 0
        said = f"command terminated with exit code {ended.returncode}\n"
        return ended.returncode, ended.stdout, ended.stderr + (said if ended.returncode else "")

    def _adopt(self, script: str) -> tuple[int, str, str]:
        """What Carver prints of a volume that was made another's: it has the same name again."""
        [(group, name)] = re.findall(r"carver volume adopt (\S+)/(\S+) --from openebs", script)
        assert group == "data"
        assert name in self.held
        if "not adopted" in self.wrong:
            return 1, "", "carver: cannot adopt it\ncommand terminated with exit code 1\n"
        other = "-2" if "other handle" in self.wrong else ""
        return 0, f'volumeHandle: "data@x/{name}{other}"', ""

    def _change_group(self, script: str, carver: Object) -> tuple[int, str, str]:
        """A check adds a disk of its own to the group of a node, or takes it out again."""
        node = carver["spec"]["nodeName"]
        (self.disks.add if "vgextend" in script else self.disks.discard)(node)
        return 0, "", ""

    def harm_disk(self, node: str) -> None:
        """Say of the volume on a check's own disk that the disk is gone.

        Its claim has an Event, and its pod either an Event or what a kubelet writes that asks.
        """
        assert node in self.disks
        if "no event" in self.wrong:
            return
        reason = "DiskMissing"
        for key in [one for one in self.objects if one[0] == "persistentvolumeclaims"]:
            if key[2].endswith("-data"):
                self._event(key, "Warning", reason, "the disk")
        for key in [one for one in self.objects if one[0] == "pods"]:
            pod = self.objects[key]
            if not any(claim.endswith("-data") for claim in self._claims(pod)):
                continue
            if "kubelet asks" in self.wrong:
                health = {"name": "volume", "healthConditions": [{"reason": reason}]}
                pod["status"]["volumeHealth"] = [health]
            if "said twice" in self.wrong or not self.wrong & {"kubelet asks", "unsaid to the pod"}:
                self._event(key, "Warning", reason, "the disk")

    def _show_read_ahead(self, script: str, pod: Object, volume: Path) -> str:
        """What the kernel tells a pod of its device."""
        [name] = self._claims(pod)
        claim = self.objects["persistentvolumeclaims", pod["metadata"]["namespace"], name]
        by_class = claim["status"]["currentVolumeAttributesClassName"]
        if "in name only" in self.wrong:
            by_class = by_class.replace("lookups", "scans")
        chosen = self.objects["volumeattributesclasses", "", by_class]["parameters"]
        queue = self.root / "sys" / "253:0" / "queue"
        queue.mkdir(parents=True, exist_ok=True)
        kib = {"4MiB": 4096, "0": 0}[chosen["carver/readAhead"]]
        (queue / "read_ahead_kb").write_text(f"{kib}\n")
        (self.root / "mountinfo").write_text(f"1 2 253:0 / {volume / 'files'} rw - ext4 x rw\n")
        script = script.replace("/sys/dev/block", str(self.root / "sys"))
        return script.replace("/proc/self/mountinfo", str(self.root / "mountinfo"))

    def _status(self, carver: Object) -> tuple[int, str, str]:
        node = carver["spec"]["nodeName"]
        here = [name for name, (where, _) in self.held.items() if where == node]
        here += self.copies.get(node, ("", set()))[1]
        places: dict[str, list[Object]] = {name: [] for name in here}
        for (kind, _, _), one in self.objects.items():
            if kind == "pods" and path(one, "spec", "volumes", 0, "csi"):
                name = f"csi-{one['metadata']['uid']}"
                if name in places:
                    uid = one["metadata"]["uid"]
                    places[name].append({"path": f"/var/lib/kubelet/pods/{uid}/volumes/x"})
        volumes = [
            {"id": self._handle(name), "places": places[name], "claim": self._claimed.get(name, "")}
            for name in here
        ]
        volumes += [
            {"id": handle, "places": [], "claim": claim}
            for handle, (where, claim, _) in self.copies_left.items()
            if where == node
        ]
        return 0, json.dumps({"volumes": volumes, "snapshots": []}), ""

    # The controller

    def _central(self, line: str) -> tuple[int, str, str]:
        """What a command prints in a controller's pod."""
        away = [one for one in self.carver_nodes() if self._is_away(one)]
        if "carver controller status --json" in line:
            every = {one: self._problem(one) for one in self.carver_nodes()}
            if "left out" in self.wrong:
                every = {one: it for one, it in every.items() if one not in away}
            shown = [
                {"name": one, "problem": it, "groups": {f"uuid-{one}": "data"}}
                for one, it in every.items()
            ]
            return 0, json.dumps({"nodes": shown}), ""
        if line.startswith("python -c"):
            volume = line.rpartition("/")[2]
            gone = f"node {self.held[volume][0]} was deleted"
            if away and "forgotten soon" not in self.wrong:
                return 0, f"UNAVAILABLE {gone}; nodes that do not answer: {', '.join(away)}", ""
            return 0, "OK", ""
        if line.startswith("carver node evacuate "):
            return self._evacuate(line.split())
        assert "carver controller orphans" in line
        if away and "shorter" not in self.wrong:
            return 0, f"carver: node {', '.join(away)} does not answer", ""
        found = [self._handle(name) for name in self.held if not self._is_named(name)]
        if " --delete " in line:
            [name] = [one for one in found if f" --delete {one} --yes" in line]
            del self.held[name.partition("/")[2]]
        shown = [{"name": one, "kind": "volume"} for one in found]
        return 0, json.dumps(shown) if "--json" in line else "There are no orphans.", ""

    def _evacuate(self, words: list[str]) -> tuple[int, str, str]:
        """What `carver node evacuate NODE --to NODE --json` prints; the Node is annotated."""
        if not self.evacuates:
            return 1, "", "carver: UNIMPLEMENTED: the controller does not evacuate nodes"
        assert words[-1] == "--json"
        asked = json.dumps({"to": [name for word, name in pairwise(words) if word == "--to"]})
        node = self.objects["nodes", "", words[3]]
        node["metadata"].setdefault("annotations", {})[EVACUATE] = asked
        answer = {"node": words[3], "staying": [], "annotation": EVACUATE, "request": asked}
        return 0, json.dumps(answer), ""

    def _is_named(self, volume: str) -> bool:
        """Whether an object of the cluster names a volume or snapshot."""
        kinds = ("persistentvolumes", "volumesnapshotcontents")
        return any((kind, "", volume) in self.objects for kind in kinds)

    def _problem(self, node: str) -> str:
        """Why a node does not answer, or what is wrong with its group; empty if nothing is."""
        if (lies := self._liar_on(node)) is not None:
            return "it answers what Carver does not: its topology is x" if lies["as_other"] else ""
        if self._is_away(node) or self.steps < self._enrolled:
            return "UNAVAILABLE: failed to connect"
        for clone, original in self._contested():
            if node in (clone, original):
                both = " and ".join(sorted((clone, original)))
                remedy = "vgchange --uuid, or vgimportclone"
                said = f"nodes {both} both claim volume group data"
                return f"{said}, PersistentVolumes name {original}, and none is made: {remedy}"
        return ""

    def _contested(self) -> list[tuple[str, str]]:
        """The nodes with a copy of another's group, and that other, while both are there."""
        there = self.carver_nodes()
        return [(one, it[0]) for one, it in self.copies.items() if {one, it[0]} <= {*there}]

    def _metrics(self) -> str:
        lines = [
            f'carver_controller_node_answers{{node="{one}"}} {float(not self._is_away(one))}\n'
            f'carver_controller_refused_answers_total{{node="{one}"}} '
            f"{float(self.refused_answers.get(one, 0))}"
            for one in self.carver_nodes()
        ]
        return "\n".join(lines)

    def _capacities(self) -> list[Object]:
        """The room of each node."""
        contested = {one for it in self._contested() for one in it}
        if "made on the copy" in self.wrong:
            contested = set()
        return [
            {
                "nodeTopology": {"matchLabels": {TOPOLOGY: one}},
                "capacity": "0" if one in contested else "8Gi",
            }
            for one in self.carver_nodes()
        ]

    @staticmethod
    def _lies(pod: Object) -> Object | None:
        """What a pod is to lie; None for one that is not the liar's."""
        command = path(pod, "spec", "containers", 0, "command", default=[])
        return dict(json.loads(command[3])) if command[:2] == ["python", "-c"] else None

    def _liar_on(self, node: str) -> Object | None:
        """What the liar on a node says, where one runs."""
        for one in self._pods("carver-system"):
            is_there = one["spec"].get("nodeName") == node and path(one, "status", "conditions")
            if is_there and (lies := self._lies(one)) is not None:
                return lies
        return None

    def _chosen(self, kind: str, options: dict[str, str]) -> Iterator[tuple[Key, Object]]:
        for key, one in list(self.objects.items()):
            labels = one["metadata"].get("labels", {})
            where = "" if kind in _WIDE else options.get("namespace", key[1])
            if key[0] != kind or where != key[1]:
                continue
            wanted = [it.partition("=")[::2] for it in options.get("selector", "").split(",") if it]
            if all(k in labels and v in ("", labels[k]) for k, v in wanted):
                yield key, one

    def _kind(self, word: str) -> str:
        kind = word.partition(".")[0]
        assert self.snapshots or kind not in _SNAPSHOT_KINDS, "no such kind in this cluster"
        return kind

    # What goes on by itself

    def _step(self) -> None:
        self.steps += 1
        self._collect_pods()
        for key, one in list(self.objects.items()):
            self._ages[key] = self._ages.get(key, 0) + 1
            if "deletionTimestamp" in one["metadata"]:
                self._end(key, one)
        self._serve()
        self._keep_authority()
        self._erase_copies()
        self._release_claims()
        for key, one in list(self.objects.items()):
            going_on = getattr(self, f"_go_on_{key[0]}", None)
            if going_on is not None and self._ages.get(key, 0) > 1 and key in self.objects:
                going_on(key, one)

    def _end(self, key: Key, one: Object) -> None:
        """What becomes of an object that was deleted."""
        kind, namespace, name = key
        if kind in self.wrong and f"{kind} stay" not in self.wrong:
            return
        if kind == "persistentvolumeclaims":
            if any(name in self._claims(it) for it in self._pods(namespace)):
                return
            volume = one["spec"].get("volumeName")
            bound = self.objects.get(("persistentvolumes", "", volume))
            if bound and bound["spec"]["persistentVolumeReclaimPolicy"] == "Delete":
                bound["metadata"]["deletionTimestamp"] = "1"
        if kind == "namespaces" and any(it[1] == name for it in self.objects):
            for it, other in self.objects.items():
                if it[1] == name:
                    other["metadata"]["deletionTimestamp"] = "now"
            return
        if kind == "volumegroupsnapshots":
            members = [it for it in self._snapshots(namespace) if _group_of(it) == name]
            for member in members:
                member["metadata"]["deletionTimestamp"] = "now"
            if members:
                return
        if kind == "volumesnapshots":
            content = f"snapcontent-{one['metadata']['uid']}"
            self.objects.pop(("volumesnapshotcontents", "", content), None)
            self.held.pop(content, None)
        needs_deletion = kind == "persistentvolumes" and "finalizers" in one["metadata"]
        if needs_deletion and not self._deletes(name):
            return
        if kind == "pods" and "inline kept" not in self.wrong:
            self.held.pop(f"csi-{one['metadata']['uid']}", None)
        del self.objects[key]
        self._ages.pop(key, None)

    def _deletes(self, volume: str) -> bool:
        """Whether DeleteVolume of a PersistentVolume succeeds, and what comes of it."""
        node = self._node_of(volume)
        if node not in self.carver_nodes():
            # It is on the node still, which was deleted.
            silent = any(self._is_away(one) for one in self.carver_nodes())
            if "forgotten soon" in self.wrong:
                return self.forgets
            return self.forgets and not silent and "never forgotten" not in self.wrong
        copies = [it[1] for one, it in self.copies.items() if (one, node) in self._contested()]
        if copies and "deleted on the copy" in self.wrong:
            copies[0].discard(volume)
        elif "volume kept" not in self.wrong:
            self.held.pop(volume, None)
        return True

    def _keep_authority(self) -> None:
        """The controller makes another authority where there is none; nodes enrol later."""
        key = ("secrets", "carver-system", _AUTHORITY)
        if key not in self.objects and self.is_central:
            self._count += 1
            number = 0 if "same authority" in self.wrong else self._count
            data = {"ca.crt": f"authority {number}"}
            self._add("Secret", _AUTHORITY, "carver-system")
            self._add("ConfigMap", _AUTHORITY, "carver-system", data=data)
            if self.steps > 1:
                never = "never enrolled" in self.wrong
                self._enrolled = self.steps + (1 << 30 if never else _START_STEPS)

    def _collect_pods(self) -> None:
        """Remove pods of nodes that were deleted, as Kubernetes does."""
        for one in self._pods(""):
            node = one["spec"].get("nodeName")
            if node and ("nodes", "", node) not in self.objects:
                one["metadata"]["deletionTimestamp"] = "now"

    def _serve(self) -> None:
        """Carver has a controller, and a pod on each node that is not tainted, as installed."""
        self._serve_controller()
        if ("daemonsets", "carver-system", "carver-node") not in self.objects:
            return
        there = [it for it in self.carver_nodes() if not self._is_tainted(it)]
        own_pods = self._pods("carver-system")
        pods = {it["spec"].get("nodeName") for it in own_pods if not self._lies(it)}
        spec = self.objects["daemonsets", "carver-system", "carver-node"]["spec"]
        for node in {*there} - pods:
            self._count += 1
            own = {**spec["template"]["spec"], "nodeName": node}
            labels = {"app": "carver"}
            self._add("Pod", f"carver-{self._count}", "carver-system", labels=labels, spec=own)

    def _serve_controller(self) -> None:
        if self.is_central and not self._pods("carver-system", "carver-controller-"):
            self._count += 1
            spec = self.objects["deployments", "carver-system", "carver-controller"]["spec"]
            own = {**spec["template"]["spec"], "nodeName": "control"}
            name, labels = f"carver-controller-{self._count}", spec["selector"]["matchLabels"]
            self._add("Pod", name, "carver-system", labels=labels, spec=own)

    def _is_tainted(self, node: str) -> bool:
        taints = self.objects["nodes", "", node]["spec"]["taints"]
        return any(one["key"] == WITHOUT_CARVER for one in taints)

    def _is_away(self, node: str) -> bool:
        """Whether the Carver of a node does not answer; by systemd it always does."""
        if node in self.off | self.silent:
            return True
        if ("daemonsets", "carver-system", "carver-node") not in self.objects:
            return False
        return not any(
            path(it, "status", "conditions")
            for it in self._pods("carver-system")
            if it["spec"].get("nodeName") == node and "deletionTimestamp" not in it["metadata"]
        )

    def _go_on_pods(self, key: Key, pod: Object) -> None:
        status = pod.setdefault("status", {"phase": "Pending"})
        if key[1] == "carver-system":
            # Kubelet, the container's start and the probe take their time.
            if self._ages[key] > _START_STEPS:
                is_hung = pod["spec"].get("nodeName") in self.hung
                status["conditions"] = [{"type": "Ready", "status": str(not is_hung)}]
            return
        if "nodeName" not in pod["spec"]:
            if "never scheduled" in self.wrong:
                return
            node, why = self._schedule(key, pod)
            if not node:
                false = {"type": "PodScheduled", "status": "False", "message": why}
                status["conditions"] = [false]
                return
            unbound = [
                name
                for name in self._claims(pod)
                if "volumeName" not in self.objects["persistentvolumeclaims", key[1], name]["spec"]
            ]
            for waiting in unbound:
                about = self.objects["persistentvolumeclaims", key[1], waiting]["metadata"]
                selected = {"volume.kubernetes.io/selected-node": node}
                about["annotations"] = about.get("annotations", {}) | selected
            lies = self._liar_on(node) if unbound else None
            if lies is not None and not lies["as_other"] and "believed" not in self.wrong:
                self._refuse(key, node, unbound[0])
                return
            if any((it := self._liar_on(one)) and it["as_other"] for one in self.carver_nodes()):
                self.asked.update(unbound if "drawn" in self.wrong else ())
            if lies is None and unbound and (self._is_away(node) or "claim lost" in self.wrong):
                why = f"node {node} does not answer"
                place = ("persistentvolumeclaims", key[1], unbound[0])
                if self._is_away(node) and "says nothing" not in self.wrong:
                    self._event(place, "Warning", "ProvisioningFailed", why)
                if self._is_away(node) or key[2] == "stopped-waiting":
                    return
            pod["spec"]["nodeName"] = node
            self._provision(pod, node)
            return
        state: Object = {"ready": True, "restartCount": 0, "state": {"running": {}}}
        claims = [
            self.objects["persistentvolumeclaims", key[1], name] for name in self._claims(pod)
        ]
        stuck = any("allocatedResourceStatuses" in it.get("status", {}) for it in claims)
        if "never ready" in self.wrong or (
            "stuck" in self.wrong and stuck and not path(status, "containerStatuses", 0, "ready")
        ):
            state = {"ready": False, "state": {"waiting": {"reason": "ContainerCreating"}}}
            self._event(key, "Warning", "FailedMount", "mkfs failed:\n no room")
        if "no image" in self.wrong:
            state = {"ready": False, "state": {"waiting": {"reason": "ImagePullBackOff"}}}
        if "writer dies" in self.wrong and key[2] == "restart-writer":
            gone = not any(it["metadata"]["name"] == "carver-1" for it in self._pods(""))
            status["phase"] = "Failed" if gone else "Running"
        else:
            status["phase"] = "Running"
        status["containerStatuses"] = [state]
        status["conditions"] = [{"type": "Ready", "status": str(state["ready"])}]

    def _go_on_deployments(self, key: Key, one: Object) -> None:
        if key[1] in ("kube-system", "carver-system"):
            return
        if all("deletionTimestamp" in it["metadata"] for it in self._pods(key[1], "drain-set")):
            self._count += 1
            template = json.loads(json.dumps(one["spec"]["template"]))
            name, labels = f"drain-set-{self._count}", template["metadata"]["labels"]
            self._add("Pod", name, key[1], labels=labels, spec=template["spec"])

    def _go_on_statefulsets(self, key: Key, one: Object) -> None:
        for number in range(one["spec"]["replicas"]):
            name = f"{key[2]}-{number}"
            if ("pods", key[1], name) in self.objects:
                continue
            pod = json.loads(json.dumps(one["spec"]["template"]))
            volumes = pod["spec"].setdefault("volumes", [])
            for template in json.loads(json.dumps(one["spec"]["volumeClaimTemplates"])):
                volume, labels = template["metadata"]["name"], template["metadata"]["labels"]
                claim = f"{volume}-{name}"
                if ("persistentvolumeclaims", key[1], claim) not in self.objects:
                    of_claim = template["spec"]
                    self._add("PersistentVolumeClaim", claim, key[1], labels, spec=of_claim)
                    made = self.objects["persistentvolumeclaims", key[1], claim]
                    made["metadata"]["annotations"] = template["metadata"]["annotations"]
                volumes.append({"name": volume, "persistentVolumeClaim": {"claimName": claim}})
            self._add("Pod", name, key[1], pod["metadata"]["labels"], spec=pod["spec"])

    def _go_on_nodes(self, key: Key, node: Object) -> None:
        """Go on with the evacuation of a node, where its Node asks for one."""
        asked = path(node, "metadata", "annotations", EVACUATE)
        if not self.evacuates or asked is None:
            return
        node["spec"]["unschedulable"] = True
        targets = [
            one
            for one in json.loads(asked)["to"]
            if not self.objects["nodes", "", one]["spec"].get("unschedulable")
        ]
        for place, claim in list(self.objects.items()):
            volume = str(path(claim, "spec", "volumeName"))
            if place[0] != "persistentvolumeclaims" or volume not in self.held or not targets:
                continue
            is_forgotten = "left behind" in self.wrong and place[2].endswith("-1")
            if self.held[volume][0] != key[2] or is_forgotten:
                continue
            self._sent[volume] = self._sent.get(volume, 0) + 1
            pods = [it for it in self._pods(place[1]) if place[2] in self._claims(it)]
            using = [it for it in pods if "nodeName" in it["spec"]]
            if not using:
                self._move(place, claim, targets[-1])
            elif self._sent[volume] > _SENDING_STEPS:
                for pod in using:
                    pod["metadata"]["deletionTimestamp"] = "now"

    def _move(self, place: Key, claim: Object, target: str) -> None:
        """Have a volume on another node: its claim is made anew, for another PersistentVolume."""
        old = claim["spec"]["volumeName"]
        due = self.steps + (1 << 30 if "never erased" in self.wrong else _GRACE_STEPS)
        left = self._handle(old), (self.held[old][0], self._claimed[old], due)
        new = f"{_logical(old)}-moved-{self._uid()}"
        (self.root / old).rename(self.root / new)
        self.held[new] = (target, self.held.pop(old)[1])
        self._claimed[new] = self._claimed.pop(old)
        self.copies_left |= [left]
        del self.objects["persistentvolumes", "", old]
        claim["spec"]["volumeName"], claim["metadata"]["uid"] = new, self._uid()
        self._add_volume(new, place)
        log = self.root / new / "files" / "log"
        if "last line lost" in self.wrong:
            log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))

    def _erase_copies(self) -> None:
        """Erase what was left of moved volumes, after its time."""
        if self.evacuates:
            every = self.copies_left.items()
            self.copies_left = {handle: it for handle, it in every if it[2] > self.steps}

    def _release_claims(self) -> None:
        """Release claims of deleted nodes, a while after a pod began to wait for them."""
        for key, claim in list(self.objects.items()) if self.releases else ():
            if key[0] != "persistentvolumeclaims":
                continue
            users = [it for it in self._pods(key[1]) if key[2] in self._claims(it)]
            if key in self._released and any(map(is_ready, users)):
                self._event(key, "Normal", "ReplacedOnNodeLoss", "it is in use")
                del self._released[key]
            allows = path(claim, "metadata", "annotations", f"{_RELEASE}/on-node-loss") == "true"
            volume = claim["spec"].get("volumeName")
            is_lost = volume and self._node_of(volume) not in self.carver_nodes()
            if not (allows and is_lost and users) or "nodeName" in users[0]["spec"]:
                continue
            self._waited[key] = self._waited.get(key, 0) + 1
            if self._waited[key] > _RELEASE_STEPS or "released soon" in self.wrong:
                self._release(key)

    def _release(self, key: Key) -> None:
        """Release a claim: the PersistentVolume is kept, and its pod is made anew with a claim."""
        if "never released" in self.wrong:
            return
        also = [it for it in self.objects if it[:2] == key[:2] and "both released" in self.wrong]
        for one in dict.fromkeys((key, *also)):
            claim = self.objects.pop(one)
            volume = self._released[one] = claim["spec"]["volumeName"]
            of = self.objects["persistentvolumes", "", volume]
            if "not retained" not in self.wrong:
                of["spec"]["persistentVolumeReclaimPolicy"] = "Retain"
            note = {f"{_RELEASE}/reclaim-policy": "Delete", f"{_RELEASE}/claim": "{}"}
            of["metadata"]["annotations"] = {} if "no note" in self.wrong else note
            self._event(("persistentvolumes", "", volume), "Warning", "KeptOnNodeLoss", "Retain")
            if "unsaid" not in self.wrong:
                self._event(one, "Warning", "ReleasedOnNodeLoss", "the claim is deleted")
            if "not kept" in self.wrong:
                del self.objects["persistentvolumes", "", volume]
            for pod in [it for it in self._pods(key[1]) if one[2] in self._claims(it)]:
                del self.objects["pods", key[1], pod["metadata"]["name"]]

    def _go_on_persistentvolumeclaims(self, key: Key, claim: Object) -> None:
        volume = claim["spec"].get("volumeName")
        if not volume or "deletionTimestamp" in claim["metadata"]:
            return
        wanted = int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Mi"))
        status = claim.setdefault("status", {"phase": "Bound"})
        has = int(status.get("capacity", {"storage": "0Mi"})["storage"].removesuffix("Mi"))
        used = any(
            key[2] in self._claims(it) and path(it, "status", "phase") == "Running"
            for it in self._pods(key[1])
        )
        if "volumeAttributesClassName" in claim["spec"] and "never modified" not in self.wrong:
            chosen = claim["spec"]["volumeAttributesClassName"]
            status["currentVolumeAttributesClassName"] = chosen
        status.pop("allocatedResourceStatuses", None)
        if wanted > _MOST_MIB:
            status["allocatedResourceStatuses"] = {"storage": "ControllerResizeInfeasible"}
            if "no reason" not in self.wrong:
                self._event(key, "Warning", "VolumeResizeFailed", "data has no room for it")
            if "enlarged" in self.wrong:
                spec = self.objects["persistentvolumes", "", volume]["spec"]
                spec["capacity"]["storage"] = f"{wanted}Mi"
        elif has and wanted > has and not used:
            status["conditions"] = [{"type": "FileSystemResizePending", "status": "True"}]
        elif wanted > has and "never grows" not in self.wrong:
            status["conditions"] = []
            status["capacity"] = {"storage": f"{wanted}Mi"}
            if volume in self.held and (not has or "small inside" not in self.wrong):
                self.held[volume] = (self.held[volume][0], wanted)

    def _go_on_volumegroupsnapshots(self, key: Key, one: Object) -> None:
        if "status" in one or "no group" in self.wrong:
            return
        labels = one["spec"]["source"]["selector"]["matchLabels"].items()
        claims = [
            name
            for (kind, where, name), it in self.objects.items()
            if (kind, where) == ("persistentvolumeclaims", key[1])
            and labels <= it["metadata"]["labels"].items()
        ]
        for claim in claims[: 1 if "half a group" in self.wrong else None]:
            self._count += 1
            name, source = f"snapshot-{self._count}", {"persistentVolumeClaimName": claim}
            self._add("VolumeSnapshot", name, key[1], spec={"source": source})
            made = self.objects["volumesnapshots", key[1], name]
            made["status"] = {"volumeGroupSnapshotName": key[2]}
        one["status"] = {"readyToUse": True}

    def _go_on_volumesnapshots(self, key: Key, one: Object) -> None:
        if name := one["spec"]["source"].get("volumeSnapshotContentName"):
            content = self.objects["volumesnapshotcontents", "", name]
            handle = content["spec"]["source"]["snapshotHandle"]
            content["status"] = {"snapshotHandle": handle}
            ready = handle.partition("/")[2] in self.held and "not found" not in self.wrong
            one["status"] = {"readyToUse": ready, "boundVolumeSnapshotContentName": name}
            return
        name = f"snapcontent-{one['metadata']['uid']}"
        source = one["spec"]["source"]["persistentVolumeClaimName"]
        volume = self.objects["persistentvolumeclaims", key[1], source]["spec"]["volumeName"]
        if name not in self.held:
            self.held[name] = self.held[volume]
            shutil.copytree(self.root / volume, self.root / name)
            reference = {"namespace": key[1], "name": key[2]}
            self._add("VolumeSnapshotContent", name, spec={"volumeSnapshotRef": reference})
            content = self.objects["volumesnapshotcontents", "", name]
            content["status"] = {"snapshotHandle": f"data@x/{name}"}
        ready = "snapshots" not in self.wrong
        said = {"readyToUse": ready, "boundVolumeSnapshotContentName": name}
        one["status"] = one.get("status", {}) | said

    # Scheduling and volumes

    def _schedule(self, key: Key, pod: Object) -> tuple[str, str]:
        """A node, or why there is none. Of several it is the last: seldom the right one."""
        tolerated = {it["key"] for it in pod["spec"].get("tolerations", [])}
        found = []
        contested = {one for it in self._contested() for one in it}
        for node in self.carver_nodes():
            spec = self.objects["nodes", "", node]["spec"]
            taints = {it["key"] for it in spec["taints"]}
            if not spec.get("unschedulable") and taints <= tolerated:
                found.append(node)
        terms = ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
        for term in [path(pod["spec"], *terms, "nodeSelectorTerms", default=[])]:
            found = [it for it in found if not term or any(_matches(one, it) for one in term)]
        if contested and "made on the copy" not in self.wrong and self._wants_room(key, pod):
            found = [it for it in found if it not in contested]
            if not found:
                return "", "1 node(s) did not have enough free storage"
        apart = path(pod["spec"], "affinity", "podAntiAffinity", terms[2], 0, default={})
        if wanted := path(apart, "labelSelector", "matchLabels"):
            alike = [it for it in self._pods(key[1]) if wanted.items() <= _labels(it).items()]
            busy = {it["spec"].get("nodeName") for it in alike}
            found = [it for it in found if it not in busy]
        if "apart" in self.wrong and len(self._claims(pod)) > 1:
            return "", "2 node(s) didn't match PersistentVolume's node affinity"
        for name in self._claims(pod):
            claim = self.objects["persistentvolumeclaims", key[1], name]
            if volume := claim["spec"].get("volumeName"):
                found = [it for it in found if it == self._node_of(volume)]
            others = [it for it in self._pods(key[1]) if it is not pod and "nodeName" in it["spec"]]
            once = claim["spec"]["accessModes"] == ["ReadWriteOncePod"] and "once" not in self.wrong
            if once and any(name in self._claims(it) for it in others):
                return "", "node has pod using the same claim and ReadWriteOncePod access mode"
            source = claim["spec"].get("dataSource")
            if source and not volume and "by luck" not in self.wrong and self.is_central:
                # After a further cycle, whatever the scheduler chose first.
                found = [it for it in found if it == self.held[self._source(key[1], source)][0]]
            elif source and not volume:
                found = found[:1]
                found = [it for it in found if it == self.held[self._source(key[1], source)][0]]
                if found != ["one"] and found != ["two"]:
                    return "", "the source is on another node"
        return (found[-1], "") if found else ("", "no node is left")

    def _wants_room(self, key: Key, pod: Object) -> bool:
        """Whether a volume is to be made for a pod."""
        claims = [self.objects["persistentvolumeclaims", key[1], it] for it in self._claims(pod)]
        return any("volumeName" not in it["spec"] for it in claims)

    def _source(self, namespace: str, source: Object) -> str:
        if source["kind"] == "VolumeSnapshot":
            one = self.objects["volumesnapshots", namespace, source["name"]]
            bound = one["status"]["boundVolumeSnapshotContentName"]
            content = self.objects["volumesnapshotcontents", "", bound]
            return str(content["status"]["snapshotHandle"]).partition("/")[2]
        one = self.objects["persistentvolumeclaims", namespace, source["name"]]
        return str(one["spec"]["volumeName"])

    def _provision(self, pod: Object, node: str) -> None:
        namespace = pod["metadata"]["namespace"]
        if csi := path(pod, "spec", "volumes", 0, "csi"):
            size = int(csi["volumeAttributes"]["size"].removesuffix("Mi"))
            self._make(f"csi-{pod['metadata']['uid']}", node, size, block=False)
        for name in self._claims(pod):
            claim = self.objects["persistentvolumeclaims", namespace, name]
            if "volumeName" in claim["spec"]:
                if "data lost" in self.wrong:
                    (self.root / claim["spec"]["volumeName"] / "files" / "words").write_text("")
                continue
            volume = claim["spec"]["volumeName"] = f"pvc-{claim['metadata']['uid']}"
            size = int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Mi"))
            self._make(volume, node, size, block=claim["spec"]["volumeMode"] == "Block")
            self._claimed[volume] = f"{namespace}/{name}"
            old = self._released.get(("persistentvolumeclaims", namespace, name))
            if old and "not empty" in self.wrong:
                shutil.copytree(self.root / old, self.root / volume, dirs_exist_ok=True)
            if "no object" in self.wrong:
                del claim["spec"]["volumeName"], pod["spec"]["nodeName"]
                self.wrong.add("never scheduled")
                return
            if (source := claim["spec"].get("dataSource")) and "empty copy" not in self.wrong:
                shutil.rmtree(self.root / volume)
                shutil.copytree(self.root / self._source(namespace, source), self.root / volume)
            self._add_volume(volume, ("persistentvolumeclaims", namespace, name))

    def _add_volume(self, name: str, claim: Key) -> None:
        """Have a PersistentVolume of a claim for what a node holds."""
        node, size = self.held[name]
        of = self.objects[claim]["metadata"]
        key = {"key": TOPOLOGY, "operator": "In", "values": [node]}
        spec: Object = {
            "csi": {"driver": DRIVER, "volumeHandle": self._handle(name)},
            "claimRef": {"namespace": claim[1], "name": claim[2], "uid": of["uid"]},
            "persistentVolumeReclaimPolicy": "Delete",
            "capacity": {"storage": f"{size}Mi"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [key]}]}},
        }
        self._add("PersistentVolume", name, spec=spec)
        made = self.objects["persistentvolumes", "", name]
        made["metadata"]["finalizers"] = ["kubernetes.io/pv-protection"]

    def _node_of(self, volume: str) -> str:
        """The node that a PersistentVolume names; empty where there is no such object."""
        affinity = ("spec", "nodeAffinity", "required", "nodeSelectorTerms")
        values = (*affinity, 0, "matchExpressions", 0, "values", 0)
        return str(path(self.objects.get(("persistentvolumes", "", volume)), *values, default=""))

    def _handle(self, name: str) -> str:
        """The id of a volume or snapshot; a volume that was moved is in its new node's group."""
        group = "x" if _logical(name) == name else self.held[name][0]
        return f"data@{group}/{_logical(name)}"

    def _make(self, name: str, node: str, size: int, *, block: bool) -> None:
        (self.root / name / "files").mkdir(parents=True)
        if block:
            with (self.root / name / "device").open("wb") as file:
                file.truncate((size - ("small device" in self.wrong)) * _MIB)
        self.held[name] = (node, size)

    def _volume_of(self, pod: Object) -> Path:
        if path(pod, "spec", "volumes", 0, "csi"):
            return self.root / f"csi-{pod['metadata']['uid']}"
        found = self._bound(pod, "data")
        assert found is not None
        return found

    def _bound(self, pod: Object, volume: str) -> Path | None:
        """Where one of a pod's volumes is that a claim is for, by its name in the pod."""
        for one in pod["spec"]["volumes"]:
            if one["name"] == volume and (name := path(one, "persistentVolumeClaim", "claimName")):
                claim = self.objects["persistentvolumeclaims", pod["metadata"]["namespace"], name]
                return self.root / str(claim["spec"]["volumeName"])
        return None

    def _write_on(self, pod: Object, log: Path) -> None:
        """What a writer has written until now: a line for each step."""
        if "date +%s" in pod["spec"]["containers"][0]["command"][2]:
            # It goes on where the log ends, also as another pod.
            before = log.read_text().splitlines() if log.exists() else []
            times = range(pod.get("_written", self.steps - 3), self.steps)
            first = len(before) + (2 if "gap" in self.wrong and len(before) > 1 else 1)
            more = [f"{n} {100 + time}" for n, time in enumerate(times, first)]
            log.write_text("".join(f"{line}\n" for line in [*before, *more]))
            pod["_written"] = self.steps
            return
        started = pod.setdefault("_started", self.steps - 3)
        numbers = [n for n in range(1, self.steps - started) if "gap" not in self.wrong or n != 2]
        log.write_text("".join(f"{n} {100 + n}.50\n" for n in numbers))

    def _is_read_only(self, pod: Object) -> bool:
        claims = [
            self.objects["persistentvolumeclaims", pod["metadata"]["namespace"], name]
            for name in self._claims(pod)
        ]
        by_mode = any(one["spec"]["accessModes"] == ["ReadOnlyMany"] for one in claims)
        by_pod = path(pod, "spec", "volumes", 0, "persistentVolumeClaim", "readOnly")
        return by_mode or bool(by_pod)

    # Objects

    def _pods(self, namespace: str, start: str = "") -> list[Object]:
        return [
            one
            for (kind, where, name), one in self.objects.items()
            if kind == "pods" and namespace in ("", where) and name.startswith(start)
        ]

    def _snapshots(self, namespace: str) -> list[Object]:
        return [
            one
            for (kind, where, _), one in self.objects.items()
            if (kind, where) == ("volumesnapshots", namespace)
        ]

    def _claims(self, pod: Object) -> list[str]:
        volumes = pod["spec"].get("volumes", [])
        names = [path(one, "persistentVolumeClaim", "claimName") for one in volumes]
        return [name for name in names if name]

    def _refuse(self, key: Key, node: str, claim: str) -> None:
        """The liar on a node is asked for a claim's volume; its answers are refused."""
        place = ("persistentvolumeclaims", key[1], claim)
        self.asked.add(f"pvc-{self.objects[place]['metadata']['uid']}")
        for number, field in enumerate(("volume.volume_id", "volume.accessible_topology")):
            why = f"code = Internal desc = cannot pass on the answer of node {node} to x: {field}"
            self._event(place, "Warning", "ProvisioningFailed", why, f"-{number}")
            if "uncounted" not in self.wrong:
                self.refused_answers[node] = self.refused_answers.get(node, 0) + 1

    def _event(self, key: Key, sort: str, reason: str, message: str, number: str = "") -> None:
        kinds = {"pods": "Pod", "persistentvolumeclaims": "PersistentVolumeClaim"}
        kinds |= {"persistentvolumes": "PersistentVolume"}
        of = {"kind": kinds[key[0]], "name": key[2]}
        event: Object = {"type": sort, "reason": reason, "message": message, "involvedObject": of}
        name = f"{key[2]}.{reason}{number}"
        self._add("Event", name, key[1] or "default", count=3, lastTimestamp="1", **event)

    def _add(
        self,
        kind: str,
        name: str,
        namespace: str = "",
        labels: dict[str, str] | None = None,
        **fields: Any,
    ) -> None:
        plural = kind.lower() + ("es" if kind.endswith("s") else "s")
        of = {"name": name, "namespace": namespace, "labels": labels or {}, "uid": self._uid()}
        self.objects[plural, namespace, name] = {"kind": kind, "metadata": of, **fields}

    def _uid(self) -> str:
        self._count += 1
        return f"uid-{self._count}-"


class FakeLab:
    """What checks do to the machines of a lab, done to the nodes of a FakeCluster."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        # What was done, each as a word and a node.
        self.done: list[tuple[str, str]] = []
        # The controller's objects, while there is none.
        self.central: dict[Key, Object] = {}
        self.server = SERVER
        self.image = "0123456789abcdef"
        self.values: list[str] = []
        self.gates: list[str] = []

    @property
    def nodes(self) -> list[str]:
        return ["control", *self.cluster.carver_nodes()]

    def power_off(self, name: str) -> None:
        self.done.append(("off", name))
        self.cluster.off.add(name)

    def power_on(self, name: str) -> None:
        self.done.append(("on", name))
        self.cluster.off.discard(name)
        if name not in self.cluster.carver_nodes():
            self.cluster.add_node(name)

    def reset(self, name: str) -> None:
        self.done.append(("reset", name))
        if "lines lost" in self.cluster.wrong:
            for log in self.cluster.root.glob("*/files/log"):
                log.write_text("1 100.50\n2 101.50\n")

    def reboot(self, name: str) -> None:
        self.done.append(("reboot", name))

    def pause(self, name: str) -> None:
        self.done.append(("pause", name))
        self.cluster.off.add(name)

    def resume(self, name: str) -> None:
        self.done.append(("resume", name))
        if "stays silent" in self.cluster.wrong:
            self.cluster.silent.add(name)
        self.cluster.off.discard(name)

    def set_clock(self, name: str, ahead_seconds: int) -> None:
        self.done.append((f"clock {ahead_seconds}", name))

    def kill(self, name: str, program: str) -> int:
        self.done.append((f"kill {program}", name))
        return int(name == "control" and "survives" not in self.cluster.wrong)

    def restart_server(self) -> None:
        self.done.append(("restart", "server"))

    def shell(self, name: str, script: str) -> str:
        if "truncate" in script:
            self.done.append(("make disk", name))
            return "/dev/loop7\n"
        if "losetup --detach" in script:
            assert name not in self.cluster.disks
            self.done.append(("unmake disk", name))
        elif script.startswith("dmsetup suspend") and "unsaid" not in self.cluster.wrong:
            self.cluster.hung.add(name)
        elif script.startswith("dmsetup resume"):
            self.cluster.hung.discard(name)
        elif " error" in script:
            self.cluster.harm_disk(name)
        return ""

    def add_node(self, copy_of: str = "") -> str:
        self.done.append(("add", "three"))
        self.cluster.add_node("three")
        if copy_of:
            held = {name for name, (where, _) in self.cluster.held.items() if where == copy_of}
            self.cluster.copies["three"] = copy_of, held
        return "three"

    def install_values(self, names: Sequence[str]) -> None:
        self.done.append(("install", " ".join(names)))
        self.values = [*names]
        self.cluster.releases = "releasing" in names
        self.cluster.forgets = "forgetting" in names or self.cluster.releases
        self.cluster.evacuates = "evacuation" in names
        if "sidecars" in names and "mode stays" not in self.cluster.wrong:
            self.central = self.cluster.distribute()
        elif "sidecars" not in names:
            self.cluster.objects.update(self.central)

    def remove_node(self, name: str) -> None:
        self.done.append(("remove", name))
        self.cluster.copies.pop(name, None)
        self.cluster.objects.pop(("nodes", "", name), None)
        self.cluster.objects.pop(("csinodes", "", name), None)
        self.cluster.off.discard(name)
        # Its disks go with it.
        held = self.cluster.held.items()
        self.cluster.held = {one: it for one, it in held if it[0] != name}


def _logical(name: str) -> str:
    """The name of a logical volume, of its PersistentVolume's; it is the same when it was moved."""
    return name.partition("-moved-")[0]


def _group_of(snapshot: Object) -> str:
    return str(path(snapshot, "status", "volumeGroupSnapshotName", default=""))


def _labels(one: Object) -> dict[str, str]:
    return dict(one["metadata"]["labels"])


def _matches(term: Object, node: str) -> bool:
    said = [*term.get("matchFields", []), *term.get("matchExpressions", [])]
    assert {it["key"] for it in said} <= {"metadata.name", TOPOLOGY}
    return all(node in it["values"] for it in said)


def on_path(cluster: FakeCluster, folder: Path) -> None:
    """Put a kubectl into a folder that is this cluster's; its state is kept between calls."""
    state = folder / "state"
    state.write_bytes(pickle.dumps(cluster))
    support, tests = Path(__file__).resolve().parents[1:3]
    call = f"PYTHONPATH={support}:{tests} exec {sys.executable} -S -c"
    code = "from fakes.cluster import main; main()"
    (folder / "kubectl").write_text(f'#!/bin/sh\n{call} "{code}" {state} "$@"\n')
    (folder / "kubectl").chmod(0o755)


def kept(folder: Path) -> FakeCluster:
    """The cluster of a folder's kubectl, as it is by now."""
    found = pickle.loads((folder / "state").read_bytes())  # noqa: S301
    assert isinstance(found, FakeCluster)
    return found


def main() -> None:
    """Be kubectl. Whom an interrupt would meet is the process that called."""
    folder = Path(sys.argv[1]).parent
    cluster = kept(folder)
    words = sys.argv[2:]
    stdin = sys.stdin.read() if "--filename=-" in words else ""
    try:
        answer = cluster.execute(["kubectl", *words], stdin, 1)
    except KeyboardInterrupt:
        os.kill(os.getppid(), cluster.signal)
        answer = Answer(130, "", "interrupted")
    (folder / "state").write_bytes(pickle.dumps(cluster))
    sys.stdout.write(answer.out)
    sys.stderr.write(answer.err)
    sys.exit(answer.code)
