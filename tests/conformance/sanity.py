"""Run csi-sanity against what is installed and leave nothing of it behind. In the lab's guest.

    sanity.py CLASS

The class `default` is that of the installed service. For each of the others the installed program
is started once more, on a socket and a group of its own: `thin`, and `attach`, whose volumes are
attached before they are staged. So the classes can be tried side by side.

The report is written to a folder of the class's beside the program, as report.json. The exit code
is csi-sanity's own; 3 if all specs passed and yet a volume or a mount was left, which is cleaned up
all the same.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# Behind everything else: Carver is the one that is installed.
sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

# First of all: agent keeps gRPC's fork handlers out, and must come before grpc does.
import agent  # noqa: F401  isort: skip

from csi_client import Asking, wait_until_served

from agent.settings.settings import DEFAULT_SOCKET
from mount import table
from mount.kernel import Kernel

# Specs that no driver of Carver's kind can pass, for a mistake of their own: specs.md.
SKIPPED = (
    "CreateSnapshot [Controller Server] should succeed when creating a snapshot with accessibility"
    " requirements",
)
PROGRAM = Path("/var/tmp/carver-conformance/csi-sanity")
_MIB = 1 << 20
_CONFIGURATION = """
endpoint = "{directory}/csi.sock"
registration = "none"
pods_cgroup = "{pods}"
{settings}
[[groups]]
name = "{group}"
file = "{disk}"
file_size = "4GiB"
[[classes]]
name = "{device_class}"
group = "{group}"
default = true
layout = "{layout}"
"""
_INSTALLED = "default"
# Of each class that is started here: its layout, the settings beside it, more flags of csi-sanity.
_STARTED: Mapping[str, tuple[str, str, Sequence[str]]] = {
    "thin": ("thin", "", ()),
    "attach": (
        "linear",
        "attach = true\nmax_volumes_per_node = 4",
        ("--csi.testnodevolumeattachlimit",),
    ),
}
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
        name = "kubepods" if self.device_class == _INSTALLED else f"carver-{self.device_class}"
        return Path("/sys/fs/cgroup", name)

    @property
    def disk(self) -> Path:
        """The disk of the group that is made for it."""
        return PROGRAM.with_name(f"{self.device_class}.img")

    @property
    def group(self) -> str:
        return f"carver_conformance_{self.device_class}"


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
    if places.device_class == _INSTALLED:
        yield DEFAULT_SOCKET
        return
    layout, settings, _ = _STARTED[places.device_class]
    configuration = places.files / "config.toml"
    configuration.write_text(
        _CONFIGURATION.format(
            directory=places.files,
            group=places.group,
            disk=places.disk,
            pods=f"/{places.pods.name}",
            device_class=places.device_class,
            layout=layout,
            settings=settings,
        )
    )
    program = Path(sys.executable).with_name("carver")
    process = subprocess.Popen([program, "serve", f"--config={configuration}"])
    try:
        endpoint = places.files / "csi.sock"
        wait_until_served(endpoint)
        yield endpoint
    finally:
        process.terminate()
        process.wait()
        remove_group(places)


def remove_group(places: Places) -> None:
    """Leave neither the group, nor its disk, nor the file of that."""
    listed = subprocess.run(
        ["losetup", "--noheadings", "--output=NAME", f"--associated={places.disk}"],
        check=True,
        capture_output=True,
        text=True,
    )
    for disk in listed.stdout.split():
        words = ["lvm", "vgremove", "--devices", disk, "--yes", "--force", "--", places.group]
        subprocess.run(words, check=True)
        subprocess.run(["losetup", "--detach", disk], check=True)
    places.disk.unlink(missing_ok=True)


def hold(endpoint: Path, places: Places) -> int:
    parameters = places.files / "parameters.yaml"
    parameters.write_text(json.dumps({"carver/class": places.device_class}))
    mutable = places.files / "mutable.yaml"
    mutable.write_text(json.dumps({"carver/readAhead": "1MiB", "carver/writeIOPS": "10000"}))
    report = places.files / "report.json"
    report.unlink(missing_ok=True)
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
                f"--ginkgo.json-report={report}",
                "--ginkgo.no-color",
                *(f"--ginkgo.skip={re.escape(one)}" for one in SKIPPED),
                *_STARTED.get(places.device_class, ("", "", ()))[2],
            ],
            check=False,
        )
    finally:
        left = unmount_all(places) + delete_all_but(endpoint, before)
    for one in left:
        print(f"left behind: {one}")
    return ended.returncode or (_LEFT_SOMETHING if left else 0)


def volumes(endpoint: Path) -> frozenset[str]:
    with Asking(endpoint) as client:
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
    with Asking(endpoint) as client:
        for volume_id in left:
            client.delete(volume_id)
    return [f"the volume {volume_id}" for volume_id in left]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
