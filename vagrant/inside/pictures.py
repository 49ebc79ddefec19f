"""Take the pictures in docs/images: what `carver status` and `carver doctor` show, in the guest.

Runs in the lab's guest, by `make pictures`. A Carver of its own, with its own groups on files, is
given some volumes, looked at, and undone. The pictures go to standard output, as one JSON object of
SVG texts.
"""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# Behind everything else: Carver is the one that is installed, the tree adds only vagrant/.
sys.path.append(str(Path(__file__).resolve().parents[2]))

# First of all: agent keeps gRPC's fork handlers out, and must come before grpc does.
import agent  # noqa: F401  isort: skip

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from agent.core import sockets
from agent.csi.client import Client, Mode, mounted

_MIB, _GIB = 1 << 20, 1 << 30
_COLUMNS = 112
_SECONDS = 120
_FOLDER = Path("/var/lib/carver-pictures")
_KUBELET = Path("/var/lib/kubelet/plugins/carver-pictures")
_SOCKET = _KUBELET / "csi.sock"
# The groups are as large as users' groups, on sparse files. Carver itself would refuse to make a
# group on a file that is larger than the file system.
_GROUPS = {"nvme": "1788G", "bulk": "7T"}
_CONFIG = _FOLDER / "config.toml"
_CLASSES = """
[[classes]]
name = "fast"
group = "nvme"
default = true

[[classes]]
name = "thin"
group = "bulk"
layout = "thin"
over_provisioning = 4.0
fs_type = "xfs"
"""
# A class that the picture of `carver doctor` has besides: its group is not on the node.
_DOCTORED = _FOLDER / "doctor.toml"
_MISSING = """
[[classes]]
name = "archive"
group = "sata"
layout = "raid6"
stripes = 4
"""
_VOLUMES = (
    # Its name, class, size and fill in bytes, and its claim.
    ("pvc-orders", "fast", 800 * _GIB, 480 * _GIB, "shop/orders-db"),
    ("pvc-ledger", "fast", 100 * _GIB, 90 * _GIB, "shop/ledger"),
    ("pvc-images", "thin", 4096 * _GIB, 100 * _MIB, "web/images"),
)
_CLAIM = "csi.storage.k8s.io/pvc"


@contextlib.contextmanager
def service() -> Iterator[Client]:
    """A Carver with two groups on files; afterwards neither is there."""
    with contextlib.ExitStack() as undo:
        for folder in (_FOLDER, _KUBELET):
            folder.mkdir()
            undo.callback(shutil.rmtree, folder)
        head = f'node_id = "node-17"\nendpoint = "{_SOCKET}"\nregistration = "none"\n'
        text = "\n".join([head, _CLASSES])
        _CONFIG.write_text(text)
        _DOCTORED.write_text(text + _MISSING)
        undo.callback(_remove_groups)
        _make_groups()
        with (_FOLDER / "log").open("w") as log:
            words = [_program(), "serve", "--config", str(_CONFIG)]
            running = undo.enter_context(subprocess.Popen(words, stderr=log))
        undo.callback(running.terminate)
        deadline = time.monotonic() + _SECONDS
        while not sockets.is_served(_SOCKET):
            if running.poll() is not None or time.monotonic() > deadline:
                sys.exit((_FOLDER / "log").read_text())
            time.sleep(0.2)
        yield undo.enter_context(Client(_SOCKET))


@contextlib.contextmanager
def volumes(carver: Client) -> Iterator[None]:
    """Some volumes in use, and a snapshot; afterwards none."""
    with contextlib.ExitStack() as undo:
        for name, device_class, size, fill, claim in _VOLUMES:
            capability = mounted(mode=Mode.SINGLE_NODE_MULTI_WRITER)
            namespace, _, pvc = claim.partition("/")
            parameters = {"class": device_class}
            parameters |= {f"{_CLAIM}/name": pvc, f"{_CLAIM}/namespace": namespace}
            volume = carver.create(name, size, capability, parameters=parameters)
            undo.callback(carver.delete, volume.volume_id)
            staging, target = _KUBELET / f"{name}.staged", _KUBELET / name
            staging.mkdir()
            carver.stage(volume, staging, capability)
            undo.callback(carver.unstage, volume.volume_id, staging)
            carver.publish(volume, staging, target, capability)
            undo.callback(carver.unpublish, volume.volume_id, target)
            with (target / "data").open("wb") as file:
                if device_class == "thin":
                    # A pool gives out its room when it is written to, and not before.
                    file.write(bytes(fill))
                else:
                    os.posix_fallocate(file.fileno(), 0, fill)
            if name == "pvc-ledger":
                taken = carver.snapshot("before-upgrade", volume.volume_id)
                undo.callback(carver.delete_snapshot, taken.snapshot_id)
        yield


@contextlib.contextmanager
def trouble() -> Iterator[None]:
    """Inside, a file system takes no writes, as after an error (docs/troubleshooting.md)."""
    words = ("mount", "-o", "remount,{}", str(_KUBELET / "pvc-ledger.staged"))
    subprocess.run([one.format("ro") for one in words], check=True)
    try:
        yield
    finally:
        subprocess.run([one.format("rw") for one in words], check=True)


def _make_groups() -> None:
    for name, size in _GROUPS.items():
        file = _FOLDER / f"{name}.img"
        subprocess.run(["truncate", "--size", size, str(file)], check=True)
        words = ["losetup", "--find", "--show", str(file)]
        loop = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
        words = [
            "vgcreate",
            "--devices",
            loop,
            "--quiet",
            "--metadatasize",
            "80m",
            "--",
            name,
            loop,
        ]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def _remove_groups() -> None:
    for name in _GROUPS:
        file = _FOLDER / f"{name}.img"
        words = ["losetup", "--noheadings", "--output", "NAME", "--associated", str(file)]
        loop = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
        if loop:
            subprocess.run(
                ["vgremove", "--devices", loop, "--quiet", "--quiet", "--yes", "--", name],
                check=False,
                stdout=subprocess.DEVNULL,
            )
            subprocess.run(["losetup", "--detach", loop], check=True)


def _program() -> str:
    """The command `carver` of this environment."""
    return str(Path(sys.executable).with_name("carver"))


def picture(command: str, config: Path = _CONFIG) -> str:
    """A terminal on which a command was given, as SVG."""
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": str(_COLUMNS)}
    ended = subprocess.run(
        [_program(), command],
        capture_output=True,
        text=True,
        env={**os.environ, **terminal, "CARVER_CONFIG": str(config)},
        # 1: `carver doctor` has found a failure.
        check=False,
    )
    if ended.returncode not in (0, 1):
        sys.exit(ended.stderr)
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), highlight=False)
    console.print(f"[bold]node-17 #[/bold] carver {command}")
    console.print(Text.from_ansi(ended.stdout))
    # Otherwise the id is made of the contents, and each picture differs in every line.
    return console.export_svg(title="node-17", theme=SVG_EXPORT_THEME, unique_id=command)


def main() -> int:
    """Print the pictures."""
    with service() as carver, volumes(carver):
        with trouble():
            taken = {"status": picture("status")}
        taken["doctor"] = picture("doctor", _DOCTORED)
        json.dump(taken, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
