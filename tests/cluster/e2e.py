#!/usr/bin/env python3
"""Run Kubernetes' own storage tests on Carver, in the cluster of `make cluster`, and judge them.

`e2e.test` is compiled with the cluster's other programs. Specs that may run beside others are
shared out to some processes; the serial and disruptive ones follow in one process.

Exit codes: 0 all passed, or failed for a reason that docs/testing.md gives, as a row of specs and
reasons under "Kubernetes' own e2e suite"; 1 a spec failed, or none ran; 2 there is no cluster; 130
interrupted.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# This file is a program, and Python would look beside it only.
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests"))

from vagrant import venv  # noqa: E402

if __name__ == "__main__":
    venv.enter()

from cluster import record  # noqa: E402
from conformance.run import Spec, specs  # noqa: E402

from vagrant import box, cluster, control_plane, lab_host  # noqa: E402
from vagrant.control_plane import ControlPlaneError  # noqa: E402

_DRIVER = ROOT / "tests" / "cluster" / "driver.yaml"
_ATTRIBUTES = ROOT / "deploy" / "kubernetes" / "examples" / "attributes.yaml"
_RESULTS = ROOT / ".cache" / "e2e"
# Which specs have passed, in which cluster and with which Carver.
_PASSED = _RESULTS / "passed.json"
_FOCUS = "External.Storage.*lvm.csi.carver"
_ALONE = r"\[Serial\]|\[Disruptive\]"
# Specs for which a cluster needs a controller.
_OF_CONTROLLER = r"Pre-provisioned.Snapshot|VolumeAttributesClass"
_WELL, _WRONG, _UNUSABLE, _INTERRUPTED = 0, 1, 2, 130


def main() -> int:
    """Read the command line and run; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--shards", type=int, default=3, help="specs that run at once (%(default)s)"
    )
    parser.add_argument("--focus", default="", help="only specs whose name this expression matches")
    parser.add_argument(
        "--again",
        action="store_true",
        help="leave out specs that have passed before in such a cluster, with this Carver",
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="write the outcome into trials.json and docs/testing.md",
    )
    arguments = parser.parse_args()
    if arguments.focus and arguments.record:
        parser.error("--record is about every spec: leave out --focus")
    try:
        lab = cluster.present()
    except ControlPlaneError as error:
        print(f"e2e.py: {error}", file=sys.stderr)
        return _UNUSABLE
    where, carver = _tried(lab)
    lab.apply(_ATTRIBUTES.read_text().partition("\n---")[0])
    folder = _RESULTS / time.strftime("%Y%m%d-%H%M%S")
    suite, listed = _listed(lab, folder)
    if where.mode != "controller":
        listed = [one for one in listed if not re.search(_OF_CONTROLLER, one)]
    before = passed_before(_PASSED, listed, where.title, carver) if arguments.again else []
    known = {one.name for one in before}
    names = [one for one in listed if one not in known and re.search(arguments.focus, one)]
    alone = [one for one in names if re.search(_ALONE, one)]
    beside = [one for one in names if one not in alone]
    print(f"{len(names)} specs, {len(alone)} of them alone; results: {folder}", flush=True)
    shares = {
        f"shard-{number}": beside[number :: arguments.shards] for number in range(arguments.shards)
    }
    shares = {name: share for name, share in shares.items() if share}
    try:
        _run(lab, folder, {name: focus_on(suite, share) for name, share in shares.items()})
        if alone:
            shares["alone"] = alone
            _run(lab, folder, {"alone": focus_on(suite, alone)})
    except KeyboardInterrupt:
        keep(_PASSED, outcomes(folder, shares), where.title, carver)
        print("e2e.py: interrupted; --again leaves out what has passed", file=sys.stderr)
        return _INTERRUPTED
    found = [*before, *outcomes(folder, shares)]
    keep(_PASSED, found, where.title, carver)
    if arguments.record:
        ran = [one for one in found if one.state not in ("skipped", "pending")]
        passed = sum(one.state == "passed" for one in ran)
        outcome = {record.SUITE: f"{passed} of {len(ran)} specs passed"}
        record.add(where, carver, time.strftime("%Y-%m-%d"), outcome)
    return judge(found)


def keep(file: Path, found: Iterable[Spec], where: str, carver: str) -> None:
    """Remember which specs passed, where and with which Carver; what is known of others stays."""
    ended = {one.name: one.state for one in found}
    passed = _kept(file, where, carver) - ended.keys()
    passed |= {one for one, state in ended.items() if state == "passed"}
    made = {"where": where, "carver": carver, "passed": sorted(passed)}
    file.write_text(json.dumps(made, indent=1))


def passed_before(file: Path, listed: Iterable[str], where: str, carver: str) -> list[Spec]:
    """Return the listed specs that have passed there, with this Carver."""
    kept = _kept(file, where, carver)
    return [Spec(one, "passed", "") for one in listed if one in kept]


def _kept(file: Path, where: str, carver: str) -> set[str]:
    kept = json.loads(file.read_text()) if file.exists() else {}
    is_same = (kept.get("where"), kept.get("carver")) == (where, carver)
    return set(kept["passed"]) if is_same else set()


def _listed(lab: cluster.Cluster, folder: Path) -> tuple[str, list[str]]:
    """Return the suite's name, and the names of its specs that are about Carver."""
    _run(lab, folder, {"list": _FOCUS}, "--ginkgo.dry-run")
    report = json.loads((folder / "list" / "report.json").read_text())
    names = [one.name for one in specs(report) if re.search(_FOCUS, one.name)]
    return str(report[0]["SuiteDescription"]), names


def focus_on(suite: str, names: Iterable[str]) -> str:
    """Return the expression that focuses on these specs of a suite and on no other ones.

    Ginkgo matches it against the suite's name, a space and the spec's name.
    """
    return f"^{re.escape(suite)} ({'|'.join(map(re.escape, names))})$"


def _run(lab: cluster.Cluster, folder: Path, focuses: Mapping[str, str], *options: str) -> None:
    """Run the suite's program once for each focus, side by side."""
    processes = []
    for name, focus in focuses.items():
        here = folder / name
        here.mkdir(parents=True)
        words = [
            # The suite's kubectl wants a place for its cache. By ssh it stops a node's kubelet;
            # specs that need this skip themselves without a key.
            *("env", f"HOME={here}", f"KUBE_SSH_KEY_PATH={box.KEY}", "KUBE_SSH_USER=root"),
            str(lab.programs.path("e2e.test")),
            f"--kubeconfig={control_plane.kubeconfig()}",
            f"--kubectl-path={lab.programs.path('kubectl')}",
            f"--storage.testdriver={_DRIVER}",
            f"--ginkgo.json-report={here / 'report.json'}",
            f"--ginkgo.focus={focus}",
            "--ginkgo.timeout=6h",
            "--ginkgo.no-color",
            "--dump-logs-on-failure=false",
            *options,
        ]
        with (here / "log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    lab_host.in_network(*words),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=here,
                )
            )
    try:
        for process in processes:
            process.wait()
    except KeyboardInterrupt:
        # The terminal has interrupted each of them too. A second signal would keep the suite from
        # removing what it has made.
        for process in processes:
            process.wait()
        raise


def outcomes(folder: Path, shares: Mapping[str, Sequence[str]]) -> list[Spec]:
    """Return how each spec of each share ended, as the reports of the suite's program say.

    A spec that no report names did not run, and a share whose program failed without a spec that
    failed is a failure of its own: neither may pass for success.
    """
    found: list[Spec] = []
    for share, names in shares.items():
        report = folder / share / "report.json"
        suites = json.loads(report.read_text()) if report.exists() else []
        by_name = {one.name: one for one in specs(suites)}
        why = f"no report names it; the log: {folder / share / 'log'}"
        ended = [by_name.get(name, Spec(name, "not run", why)) for name in names]
        found += ended
        is_well = all(one["SuiteSucceeded"] for one in suites)
        if is_well or any(one.state not in ("passed", "skipped", "pending") for one in ended):
            continue
        said = "; ".join(why for one in suites for why in one["SpecialSuiteFailureReasons"] or ())
        found.append(Spec(share, "failed", f"its program failed, and no spec did: {said}"))
    return found


def reasons(document: str) -> dict[str, str]:
    """Return the specs that may fail, by their names, each with the document's reason."""
    section = document.partition("### Kubernetes' own e2e suite")[2].partition("\n#")[0]
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \|$", section, re.MULTILINE)
    return dict(rows)


def judge(found: Sequence[Spec]) -> int:
    """Print how the specs ended; return 1 if one failed without a known reason, or none ran."""
    ran = [one for one in found if one.state not in ("skipped", "pending")]
    failed = [one for one in ran if one.state != "passed"]
    known = reasons((ROOT / "docs" / "testing.md").read_text())
    for one in failed:
        print(f"{one.state}: {one.name}\n    {one.message.strip()[:600]}")
        if one.name in known:
            print(f"    known: {known[one.name]}")
    print(f"{len(ran) - len(failed)} passed, {len(failed)} failed")
    unknown = [one for one in failed if one.name not in known]
    return _WRONG if unknown or len(ran) == len(failed) else _WELL


def _tried(lab: cluster.Cluster) -> tuple[record.Configuration, str]:
    """Say in which cluster the suite runs, and with which Carver."""
    [daemonset] = lab.control_plane.objects(
        "daemonsets", f"--namespace={cluster.NAMESPACE}", "--selector=app.kubernetes.io/name=carver"
    )
    [image] = [
        one["image"]
        for one in daemonset["spec"]["template"]["spec"]["containers"]
        if one["name"] == "carver"
    ]
    deployments = lab.control_plane.objects("deployments", f"--namespace={cluster.NAMESPACE}")
    is_central = any(one["metadata"]["name"] == "carver-controller" for one in deployments)
    where = record.Configuration(
        kubernetes=f"v{lab.programs.kubernetes}",
        mode="controller" if is_central else "sidecars on each node",
        nodes=len(lab.guests),
        storage_class="carver",
        values=record.with_effect(lab.values),
        gates=tuple(lab.gates),
    )
    return where, f"{image.rpartition(':')[2]}, image {lab.image}"


if __name__ == "__main__":
    sys.exit(main())
