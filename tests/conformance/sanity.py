"""Run csi-sanity against what is installed and leave nothing of it behind. In the lab's guest.

    sanity.py CLASS

The class `default` is that of the installed service. For the class `thin` the installed program is
started once more, on a socket and a group of its own. So the classes can be tried side by side.

The report is written to a folder of the class's beside the program, as report.json. The exit code
is csi-sanity's own; 3 if all specs passed and yet a volume or a mount was left, which is cleaned up
all the same.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# Behind everything else: Carver is the one that is installed.
sys.path.append(str(Path(__file__).resolve().parents[2]))

# First of all: agent keeps gRPC's fork handlers out, and must come before grpc does.
import agent  # noqa: F401  isort: skip

import grpc

from agent.core.settings import DEFAULT_SOCKET
from agent.csi.client import Client
from mount import table
from mount.kernel import Kernel

# Specs that no driver of Carver's kind can pass, for a mistake of their own: specs.md.
SKIPPED = (
    "CreateSnapshot [Controller Server] should succeed when creating a snapshot with accessibility"
    " requirements",
)
PROGRAM = Path("/var/tmp/carver-conformance/csi-sanity")
_MIB = 1 << 20
_DISK = PROGRAM.with_name("disk.img")
_GROUP = "carver_conformance"
_CONFIGURATION = """
endpoint = "{directory}/csi.sock"
registration = "none"
pods_cgroup = "{pods}"
[[groups]]
name = "{group}"
file = "{disk}"
file_size = "4GiB"
[[classes]]
name = "thin"
group = "{group}"
default = true
layout = "thin"
"""
_LEFT_SOMETHING = 3


@dataclass(frozen=True)
class Places:
    """Where one class is tried: its files, and its volumes' mounts."""

    device_class: str

    @property
    def files(self) -> Path:
        return PROGRAM.parent / self.device_class

    @property
    def mounts(self) -> Path:
        """Inside kubelet's directory, as volumes are mounted nowhere else."""
        return Path(f"/var/lib/kubelet/plugins/carver-conformance-{self.device_class}")

    @property
    def pods(self) -> Path:
        """The cgroup of all pods: one of kubelet's name for the installed service."""
        name = "kubepods" if self.device_class != "thin" else f"carver-{self.device_class}"
        return Path("/sys/fs/cgroup", name)


def main(device_class: str) -> int:
    places = Places(device_class)
    unmount_all(places)
    places.mounts.mkdir()
    places.files.mkdir(exist_ok=True)
    places.pods.mkdir(exist_ok=True)
    try:
        with serving(places) as endpoint:
            return hold(endpoint, places)
    finally:
        places.pods.rmdir()


@contextmanager
def serving(places: Places) -> Iterator[Path]:
    """The socket of a service that has the class; one that is started here leaves no trace."""
    if places.device_class != "thin":
        yield DEFAULT_SOCKET
        return
    configuration = places.files / "config.toml"
    configuration.write_text(
        _CONFIGURATION.format(
            directory=places.files, group=_GROUP, disk=_DISK, pods=f"/{places.pods.name}"
        )
    )
    program = Path(sys.executable).with_name("carver")
    process = subprocess.Popen([program, "serve", f"--config={configuration}"])
    try:
        endpoint = places.files / "csi.sock"
        with grpc.insecure_channel(f"unix://{endpoint}") as channel:
            grpc.channel_ready_future(channel).result(timeout=100)
        yield endpoint
    finally:
        process.terminate()
        process.wait()
        remove_group()


def remove_group() -> None:
    """Leave neither the group, nor its disk, nor the file of that."""
    listed = subprocess.run(
        ["losetup", "--noheadings", "--output=NAME", f"--associated={_DISK}"],
        check=True,
        capture_output=True,
        text=True,
    )
    for disk in listed.stdout.split():
        words = ["lvm", "vgremove", "--devices", disk, "--yes", "--force", "--", _GROUP]
        subprocess.run(words, check=True)
        subprocess.run(["losetup", "--detach", disk], check=True)
    _DISK.unlink(missing_ok=True)


def hold(endpoint: Path, places: Places) -> int:
    parameters = places.files / "parameters.yaml"
    parameters.write_text(json.dumps({"carver/class": places.device_class}))
    mutable = places.files / "mutable.yaml"
    mutable.write_text(json.dumps({"carver/readAhead": "1MiB", "carver/writeIOPS": "10000"}))
    before = volumes(endpoint)
    try:
        ended = subprocess.run(
            [
                PROGRAM,
                f"--csi.endpoint=unix://{endpoint}",
                # csi-sanity makes and removes both; only their parent may exist.
                f"--csi.mountdir={places.mounts / 'target'}",
                f"--csi.stagingdir={places.mounts / 'staging'}",
                f"--csi.testvolumesize={64 * _MIB}",
                f"--csi.testvolumeexpandsize={128 * _MIB}",
                f"--csi.testvolumeparameters={parameters}",
                f"--csi.testvolumemutableparameters={mutable}",
                f"--ginkgo.json-report={places.files / 'report.json'}",
                "--ginkgo.no-color",
                *(f"--ginkgo.skip={re.escape(one)}" for one in SKIPPED),
            ],
            check=False,
        )
    finally:
        left = unmount_all(places) + delete_all_but(endpoint, before)
    for one in left:
        print(f"left behind: {one}")
    return ended.returncode or (_LEFT_SOMETHING if left else 0)


def volumes(endpoint: Path) -> frozenset[str]:
    with Client(endpoint) as client:
        return frozenset(one.volume_id for one in client.volumes())


def unmount_all(places: Places) -> list[str]:
    """Unmount whatever a run left mounted; returns what that was."""
    kernel = Kernel()
    left = table.read(kernel).under(str(places.mounts))
    for mount in reversed(left):
        kernel.unmount(mount.path)
    shutil.rmtree(places.mounts, ignore_errors=True)
    return [f"the mount {mount.path}" for mount in left]


def delete_all_but(endpoint: Path, kept: frozenset[str]) -> list[str]:
    """Delete the volumes that were not there before a run; returns which they were."""
    left = sorted(volumes(endpoint) - kept)
    with Client(endpoint) as client:
        for volume_id in left:
            client.delete(volume_id)
    return [f"the volume {volume_id}" for volume_id in left]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
