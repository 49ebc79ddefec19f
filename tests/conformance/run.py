#!/usr/bin/env python3
"""Hold what is installed to csi-sanity, class by class: `make conformance`. The lab VM is up.

Every spec passes, or is skipped for a reason that specs.md gives; a reason that is no
longer needed is a failure too.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# This file is a program, and Python would look beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from deploy.render import go
from vagrant import guest
from vagrant.lab_host import PROJECT

MODULE, VERSION = "github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity", "v5.6.0"
REASONS = Path(__file__).with_name("specs.md")
# The installed service's own, which is linear, and those that sanity.py serves; of these the one
# whose volumes are attached.
CLASSES = ("default", "thin", "attach")
ATTACHED = "attach"
# What is skipped for this is not where volumes are attached.
_DETACHED = "nothing is attached"
_BIN = PROJECT / ".cache" / "bin"
_IN_GUEST = "/var/tmp/carver-conformance"
# Of what was printed by a class that came to no report: its end says why.
_SHOWN_CHARACTERS = 10_000


@dataclass(frozen=True)
class Spec:
    """One spec and how it ended: passed, failed, skipped, pending and so on."""

    name: str
    state: str
    message: str


def program() -> Path:
    """csi-sanity, installed as its users do, once for each version."""
    installed = _BIN / f"csi-sanity-{VERSION}"
    if not installed.exists():
        environment = {**os.environ, "CGO_ENABLED": "0", "GOBIN": str(_BIN)}
        subprocess.run([go(), "install", f"{MODULE}@{VERSION}"], check=True, env=environment)
        (_BIN / "csi-sanity").rename(installed)
    return installed


def specs(report: Iterable[Mapping[str, Any]]) -> Iterator[Spec]:
    """The specs of a Ginkgo report, in its order."""
    for suite in report:
        for one in suite["SpecReports"]:
            if one["LeafNodeType"] == "It":
                name = " ".join([*one["ContainerHierarchyTexts"], one["LeafNodeText"]])
                yield Spec(name, one["State"], one.get("Failure", {}).get("Message", ""))


def reasons(device_class: str) -> dict[str, str]:
    """The specs of a class that may be skipped, each with its reason, as the document has them."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", REASONS.read_text(), re.M)
    every = {spec: reason for spec, reason in rows if "[" in spec}
    if device_class != ATTACHED:
        return every
    return {spec: reason for spec, reason in every.items() if not reason.startswith(_DETACHED)}


def log(device_class: str) -> Path:
    return PROJECT / ".cache" / f"conformance-{device_class}.log"


def run(device_class: str) -> int:
    program_there = f"{guest.TREE}/tests/conformance/sanity.py"
    words = ["/opt/carver/venv/bin/python", program_there, device_class]
    with log(device_class).open("w") as said:
        ended = subprocess.run(guest.ssh(words), stdout=said, stderr=subprocess.STDOUT, check=False)
    return ended.returncode


def judge(device_class: str, exit_code: int) -> int:
    """Tell how a class went, return the exit code that it deserves."""
    there = ["cat", f"{_IN_GUEST}/{device_class}/report.json"]
    report = guest.run(there, check=False).stdout
    if not report:
        print(f"csi-sanity of the class {device_class} wrote no report; exit code {exit_code}")
        print(log(device_class).read_text()[-_SHOWN_CHARACTERS:])
        return exit_code or 1
    found = list(specs(json.loads(report)))
    passed = [one for one in found if one.state == "passed"]
    skipped = [one for one in found if one.state in ("skipped", "pending")]
    failed = [one for one in found if one not in passed and one not in skipped]
    for one in failed:
        print(f"{one.state}: {one.name}\n    {one.message.strip()}")
    for line in log(device_class).read_text().splitlines():
        if line.startswith("left behind:"):
            print(line)
    code = exit_code or int(bool(failed) or not passed)
    known, names = reasons(device_class), {one.name for one in skipped}
    for one in skipped:
        if one.name not in known:
            print(f"skipped without a reason in {REASONS.name}: {one.name}\n    {one.message}")
            code = code or 1
    for name in known.keys() - names:
        print(f"not skipped, though {REASONS.name} says so: {name}")
        code = code or 1
    if code:
        print(f"all that csi-sanity said: {log(device_class)}")
    print(f"{len(found)} specs, {len(found) - len(skipped)} ran, class {device_class}")
    print(f"{len(passed)} passed, {len(failed)} failed, {len(skipped)} skipped")
    return code


def main() -> int:
    """Read the command line and run: side by side, as each class makes one call after another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--class", dest="classes", action="append", choices=CLASSES)
    parser.add_argument("--build", action="store_true", help="have csi-sanity; run nothing")
    options = parser.parse_args()
    sanity, classes = program(), options.classes or CLASSES
    if options.build:
        return 0
    guest.copy(str(sanity), f"{_IN_GUEST}/csi-sanity", "--mkpath")
    with ThreadPoolExecutor() as run_all:
        exit_codes = list(run_all.map(run, classes))
    return max(judge(*one) for one in zip(classes, exit_codes, strict=True))


if __name__ == "__main__":
    sys.exit(main())
