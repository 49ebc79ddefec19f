"""Carver's pod of a committed manifest, as containerd's ctr runs it, without Kubernetes.

What kubelet reads from the DaemonSet is read here: image, arguments, environment, privileges, the
namespaces of the host, the mounts with their propagation, the configuration.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import manifest

NAMESPACE = "k8s.io"
NAME = "carver-pod"
# The files that kubelet would keep for the pod.
FOLDER = "/run/carver-pod"
PID_FILE = f"{FOLDER}/pid"
LOG = f"{FOLDER}/log"
KUBELET = "/var/lib/kubelet/"
# Who is neither root nor anybody that root's groups are of.
NOBODY = 65534

Object = Mapping[str, Any]


@dataclass(frozen=True)
class Pod:
    """The DaemonSet's pod, and the ConfigMap that it names."""

    spec: Object
    files: Mapping[str, str]

    @property
    def container(self) -> Object:
        """Carver's own container: the sidecars need a cluster."""
        [found] = [one for one in self.spec["containers"] if one["name"] == "carver"]
        return dict(found)

    def granted(self) -> list[str]:
        """Each single thing that the pod has of the node; in words that `without` understands."""
        context = self.container["securityContext"]
        found = [key for key in ("hostPID", "hostIPC", "hostNetwork") if self.spec.get(key)]
        found += ["privileged"] * bool(context.get("privileged"))
        # An image without a user of its own is root's.
        found += ["runAsUser"] * ("runAsUser" not in context)
        hosts = {one["name"] for one in self.spec["volumes"] if "hostPath" in one}
        for mount in self.container["volumeMounts"]:
            found += [mount["mountPath"]] * (mount["name"] in hosts)
            if "mountPropagation" in mount:
                found.append(f"{mount['mountPath']}: {mount['mountPropagation']}")
        return found

    def without(self, privilege: str) -> "Pod":
        """The same pod but for one thing that is granted; a folder of the node's is empty then.

        /dev is not, but the container's own, with the devices that the node had at its start.
        """
        spec = copy.deepcopy(dict(self.spec))
        [one] = [each for each in spec["containers"] if each["name"] == "carver"]
        place, _, propagation = privilege.partition(": ")
        mounts = {mount["mountPath"]: mount for mount in one["volumeMounts"]}
        if propagation:
            del mounts[place]["mountPropagation"]
        elif place == "/dev":
            one["volumeMounts"].remove(mounts[place])
        elif place in mounts:
            name = mounts[place]["name"]
            others = [each for each in spec["volumes"] if each["name"] != name]
            spec["volumes"] = [*others, {"name": name, "emptyDir": {}}]
            # Kubernetes has no propagation out of a folder that is the pod's own.
            mounts[place].pop("mountPropagation", None)
        elif privilege == "privileged":
            one["securityContext"]["privileged"] = False
        elif privilege == "runAsUser":
            one["securityContext"]["runAsUser"] = NOBODY
        else:
            del spec[privilege]
        return replace(self, spec=spec)

    def configured(self, classes: str) -> "Pod":
        """The same pod with these classes, and groups, in the place of its own."""
        settings = self.files["config.toml"].partition("[[")[0]
        return replace(self, files={"config.toml": settings + classes})

    def folders(self) -> list[str]:
        """The folders that kubelet makes on the node: its own, and DirectoryOrCreate."""
        hosts = [one["hostPath"] for one in self.spec["volumes"] if "hostPath" in one]
        return [
            one["path"]
            for one in hosts
            if one["type"] == "DirectoryOrCreate" or one["path"].startswith(KUBELET)
        ]

    def words(self, node_name: str, **environment: str) -> list[str]:
        """The command that runs it on a node of that name; `environment` comes on top."""
        one = self.container
        given = {each["name"]: each.get("value", node_name) for each in one["env"]}
        variables = given | environment
        return [
            *("ctr", "--namespace", NAMESPACE, "run", "--detach"),
            *("--pid-file", PID_FILE, "--log-uri", f"file://{LOG}"),
            *self._privileges(),
            *(word for key, value in variables.items() for word in ("--env", f"{key}={value}")),
            *(word for mount in self._mounts() for word in ("--mount", mount)),
            *(one["image"], NAME),
            # ctr puts these in place of the image's entry point, kubelet behind it.
            *(*self._as_user(), "carver", *one["args"]),
        ]

    def _as_user(self) -> Iterator[str]:
        """What runs a command as the pod's user: ctr of Debian 12 has no option for that."""
        context = self.container["securityContext"]
        if "runAsUser" in context:
            number = str(context["runAsUser"])
            yield from ("setpriv", "--reuid", number, "--regid", number, "--clear-groups", "--")

    def _privileges(self) -> Iterator[str]:
        context = self.container["securityContext"]
        if context["privileged"]:
            yield from ("--privileged", "--allow-new-privs")
        if context["readOnlyRootFilesystem"]:
            yield "--read-only"
        # As containerd does for a pod that has a Bidirectional mount.
        yield from ("--rootfs-propagation", "rshared")
        for field, kind in (("hostPID", "pid"), ("hostIPC", "ipc"), ("hostNetwork", "network")):
            if self.spec.get(field):
                path = "net" if kind == "network" else kind
                yield from ("--with-ns", f"{kind}:/proc/1/ns/{path}")

    def _mounts(self) -> Iterator[str]:
        volumes = {one["name"]: one for one in self.spec["volumes"]}
        # Outer places first.
        for mount in sorted(self.container["volumeMounts"], key=lambda one: one["mountPath"]):
            volume, place = volumes[mount["name"]], mount["mountPath"]
            # Without a cluster there is no token to enrol with.
            if "emptyDir" in volume or "projected" in volume:
                yield f"type=tmpfs,src=tmpfs,dst={place},options=nosuid:nodev"
                continue
            source = f"{FOLDER}/config" if "configMap" in volume else volume["hostPath"]["path"]
            access = "ro" if mount.get("readOnly") else "rw"
            # Names as in the API and in mount(8).
            propagation = {"Bidirectional": "rshared", "None": "rprivate"}[
                mount.get("mountPropagation", "None")
            ]
            yield f"type=bind,src={source},dst={place},options=rbind:{propagation}:{access}"


def of(path: Path) -> Pod:
    return Pod(manifest.node_pod(path), manifest.the(path, "ConfigMap")["data"])
