"""The programs of a cluster, compiled from Go modules by name and version, once for each version.

tests/cluster/programs has a folder with go.mod and go.sum for each set of programs whose versions
agree. What is compiled lies in .cache/programs, in a folder named by what it was made of.
"""

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.render import go
from vagrant.lab_host import PROJECT
from vagrant.steps import Step, step

MODULES = PROJECT / "tests" / "cluster" / "programs"
_CACHE = PROJECT / ".cache" / "programs"
_KUBERNETES = "k8s.io/kubernetes"
# Packages that keep the version which `kubelet --version` and the API server's /version show.
_STAMPED = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
_ENVIRONMENT = {
    "CGO_ENABLED": "0",  # static programs, for the guests and for images without a libc
    # Kubernetes' own JSON library does not compile /openapi with the newer standard library's.
    "GOEXPERIMENT": "nojsonv2",
    "GOFLAGS": "",
}
_FLAGS = ("-trimpath", "-buildvcs=false")


@dataclass(frozen=True)
class Program:
    """One program: the package that it is compiled from, and whether that is a package of tests."""

    package: str
    is_test: bool = False


# The programs of each module, by the names under which they are compiled.
PROGRAMS: Mapping[str, Mapping[str, Program]] = {
    "kubernetes": {
        **{
            name: Program(f"{_KUBERNETES}/cmd/{name}")
            for name in (
                *("kube-apiserver", "kube-controller-manager", "kube-scheduler"),
                *("kubelet", "kubectl"),
            )
        },
        "agnhost": Program(f"{_KUBERNETES}/test/images/agnhost"),
        "e2e.test": Program(f"{_KUBERNETES}/test/e2e", is_test=True),
    },
    "foundation": {
        "etcd": Program("go.etcd.io/etcd/server/v3"),
        "coredns": Program("github.com/coredns/coredns"),
        **{
            name: Program(f"github.com/containerd/containerd/v2/cmd/{name}")
            for name in ("containerd", "containerd-shim-runc-v2", "ctr")
        },
        **{
            name.rpartition("/")[2]: Program(
                f"github.com/containernetworking/plugins/plugins/{name}"
            )
            for name in ("main/bridge", "main/loopback", "ipam/host-local")
        },
    },
    # Fills a volume from an object that is no volume, in one of Kubernetes' storage tests.
    "populator": {
        "hello-populator": Program(
            "github.com/kubernetes-csi/lib-volume-populator/example/hello-populator"
        ),
    },
    "sidecars": {
        "csi-provisioner": Program(
            "github.com/kubernetes-csi/external-provisioner/v6/cmd/csi-provisioner"
        ),
        "csi-resizer": Program("github.com/kubernetes-csi/external-resizer/v2/cmd/csi-resizer"),
        **{
            name: Program(f"github.com/kubernetes-csi/external-snapshotter/v8/cmd/{name}")
            for name in ("csi-snapshotter", "snapshot-controller")
        },
    },
}


class Programs:
    """The programs of one version of Kubernetes, and those around it."""

    def __init__(self, kubernetes: str = "") -> None:
        """Choose the version of Kubernetes, such as 1.37.2; empty: the one that go.mod requires."""
        self.kubernetes = kubernetes or pinned_version("kubernetes", _KUBERNETES)

    def path(self, name: str) -> Path:
        """Return where a program lies once it is compiled."""
        module = next(one for one, programs in PROGRAMS.items() if name in programs)
        return self._folder(module) / name

    def build(self, names: Sequence[str]) -> None:
        """Compile what is not compiled yet of the named programs, each in a step of its own."""
        for module, programs in PROGRAMS.items():
            for name in [one for one in programs if one in names]:
                if not self.path(name).exists():
                    with step(f"compile {name}", f"compile-{name}") as compiling:
                        self._compile(compiling, module, name)

    def files_of(self, module: str, package: str) -> Path:
        """Return the folder of a Go module that one of ours requires, as it was downloaded."""
        words = [go(), "list", "-m", "-json", package]
        folder = self._module(module)
        subprocess.run([go(), "mod", "download", package], cwd=folder, check=True, env=_environ())
        shown = subprocess.run(
            words, cwd=folder, check=True, capture_output=True, text=True, env=_environ()
        )
        return Path(json.loads(shown.stdout)["Dir"])

    def _compile(self, compiling: Step, module: str, name: str) -> None:
        program = PROGRAMS[module][name]
        target = self.path(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        made = target.with_suffix(".part")
        verb = ("test", "-c") if program.is_test else ("build",)
        linked = " ".join(["-s", "-w", *(self._stamps() if module == "kubernetes" else ())])
        compiling.run(
            *(go(), *verb, *_FLAGS, "-ldflags", linked, "-o", made, program.package),
            cwd=self._module(module),
            environment=_environ(),
        )
        made.rename(target)

    def _stamps(self) -> list[str]:
        """Say by linker flags which version the programs are; unstamped they are v0.0.0."""
        major, minor, _ = self.kubernetes.split(".")
        values = {
            "gitVersion": f"v{self.kubernetes}",
            "gitMajor": major,
            "gitMinor": minor,
            "gitCommit": "unknown",
            "gitTreeState": "clean",
            "buildDate": "1970-01-01T00:00:00Z",
        }
        return [f"-X {one}.{key}={value}" for one in _STAMPED for key, value in values.items()]

    def _module(self, module: str) -> Path:
        """Return the folder of a module's go.mod; another version of Kubernetes has one made."""
        committed = MODULES / module
        if module != "kubernetes" or self.kubernetes == pinned_version(module, _KUBERNETES):
            return committed
        text = (committed / "go.mod").read_text()
        made_of = hashlib.sha256(text.encode()).hexdigest()[:12]
        folder = _CACHE / "modules" / f"kubernetes-{self.kubernetes}-{made_of}"
        if not (folder / "go.sum").exists():
            with step(f"resolve the modules of Kubernetes {self.kubernetes}", "modules") as solving:
                folder.mkdir(parents=True, exist_ok=True)
                wanted = self.go_mod(text, self._staging(solving))
                (folder / "go.mod").write_text(wanted)
                solving.run(go(), "mod", "tidy", cwd=folder, environment=_environ())
        return folder

    def go_mod(self, committed: str, staging: Sequence[str]) -> str:
        """Write a go.mod like the committed one for this version, with its staging modules."""
        head = committed.partition("\nrequire")[0]
        replaced = "".join(f"\t{one} => {one} v0{self.kubernetes[1:]}\n" for one in staging)
        return f"{head}\nrequire {_KUBERNETES} v{self.kubernetes}\n\nreplace (\n{replaced})\n"

    def _staging(self, solving: Step) -> list[str]:
        """Name the modules that Kubernetes keeps in its own tree (go.mod, replace)."""
        module = f"{_KUBERNETES}@v{self.kubernetes}"
        solving.run(go(), "mod", "download", module, environment=_environ())
        shown = subprocess.run(
            [go(), "mod", "download", "-json", module],
            check=True,
            capture_output=True,
            text=True,
            env=_environ(),
        )
        text = Path(json.loads(shown.stdout)["GoMod"]).read_text()
        return re.findall(r"^\t(\S+) => \./staging/", text, re.MULTILINE)

    def _folder(self, module: str) -> Path:
        """Return the folder of a module's programs, named by what they are made of."""
        made_of = hashlib.sha256()
        for name in ("go.mod", "go.sum"):
            made_of.update((MODULES / module / name).read_bytes())
        words = (_compiler(), *_FLAGS, *(f"{key}={it}" for key, it in _ENVIRONMENT.items()))
        made_of.update("\n".join(words).encode())
        if module == "kubernetes":
            made_of.update("\n".join(self._stamps()).encode())
        return _CACHE / f"{module}-{made_of.hexdigest()[:12]}"


def pinned_version(module: str, package: str) -> str:
    """Return the version of a package that one of our modules requires, without its v."""
    text = (MODULES / module / "go.mod").read_text()
    found = re.search(rf"^(?:require )?\s*{re.escape(package)} v(\S+)", text, re.MULTILINE)
    if found is None:
        raise LookupError(f"tests/cluster/programs/{module}/go.mod requires no {package}")
    return found[1]


def _compiler() -> str:
    shown = subprocess.run([go(), "env", "GOVERSION"], check=True, capture_output=True, text=True)
    return shown.stdout.strip()


def _environ() -> dict[str, str]:
    return {**os.environ, **_ENVIRONMENT}
