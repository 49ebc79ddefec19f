"""What `make bench` writes: its document of all figures, and the facts of the machines."""

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from performance.rows import Row

FORMAT = 1
_MIB = 1 << 20


@dataclass(frozen=True)
class Run:
    """All figures of one pass: on which machine, and with which settings of Carver's."""

    name: str
    settings: str
    machine: Mapping[str, Any]
    rows: Sequence[Row]

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "settings": self.settings,
            "machine": dict(self.machine),
            "rows": [one.as_json() for one in self.rows],
        }

    @classmethod
    def of_json(cls, written: Mapping[str, Any]) -> "Run":
        rows = [Row.of_json(one) for one in written["rows"]]
        return cls(written["name"], written["settings"], written["machine"], rows)


@dataclass(frozen=True)
class Document:
    """The runs of one `make bench`."""

    day: str
    runs: Sequence[Run] = field(default_factory=tuple)

    def text(self) -> str:
        written = {
            "format": FORMAT,
            "carver": importlib.metadata.version("carver"),
            "day": self.day,
            "runs": [one.as_json() for one in self.runs],
        }
        return json.dumps(written, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def parse(cls, text: str) -> "Document":
        written = json.loads(text)
        return cls(written["day"], [Run.of_json(one) for one in written["runs"]])


def machine() -> dict[str, Any]:
    """What a figure depends on, of this machine."""
    return {
        "cores": os.cpu_count() or 1,
        "memory_mib": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _MIB,
        "architecture": platform.machine(),
        # systemd-detect-virt(1): qemu is an emulated processor, kvm is none.
        "virtualization": _said("systemd-detect-virt") or "unknown",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "grpcio": importlib.metadata.version("grpcio"),
        "lvm2": _lvm2(),
    }


def any_machine() -> dict[str, Any]:
    """The same of a machine that is not the lab VM: only its kernel's version."""
    written = machine()
    return {**written, "kernel": ".".join(written["kernel"].split(".")[:2])}


def _lvm2() -> str:
    lines = (line.split(":", 1) for line in _said("lvm", "version").splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in lines}.get("LVM version", "none")


def _said(*words: str) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def written(path: Path) -> Document | None:
    return Document.parse(path.read_text()) if path.exists() else None
