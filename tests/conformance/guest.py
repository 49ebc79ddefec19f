"""Run csi-sanity against what is installed and leave nothing of it behind. In the lab's guest.

    guest.py CLASS

The class `default` is that of the installed service. For the class `thin` the installed program is
started once more, on a socket and a group of its own.

The report is written beside the program, as report.json. The exit code is csi-sanity's own; 3 if
all specs passed and yet a volume or a mount was left, which is cleaned up all the same.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Behind everything else: Carver is the one that is installed.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from agent.client import Client  # before grpc, see agent/__init__.py
from agent.config import DEFAULT_SOCKET
from mount import table
from mount.syscalls import Kernel

import grpc  # isort: skip

DIRECTORY = Path("/var/tmp/carver-conformance")
# Volumes are mounted inside kubelet's directory only.
_WORK = Path("/var/lib/kubelet/plugins/carver-conformance")
_MIB = 1 << 20
_DISK = DIRECTORY / "disk.img"
_GROUP = "carver_conformance"
_CONFIGURATION = f"""
endpoint = "{DIRECTORY / "csi.sock"}"
registration = "none"
[[groups]]
name = "{_GROUP}"
file = "{_DISK}"
file_size = "4GiB"
[[classes]]
name = "thin"
group = "{_GROUP}"
default = true
layout = "thin"
"""
_LEFT_SOMETHING = 3


def main(device_class: str) -> int:
    """Run all specs with one device class; return the exit code."""
    unmount_all()
    _WORK.mkdir()
    parameters = DIRECTORY / "parameters.yaml"
    parameters.write_text(json.dumps({"carver/class": device_class}))
    mutable = DIRECTORY / "mutable.yaml"
    mutable.write_text(json.dumps({"carver/readAhead": "1MiB"}))
    with serving(device_class) as endpoint:
        return hold(endpoint, parameters, mutable)


@contextmanager
def serving(device_class: str) -> Iterator[Path]:
    """The socket of a service that has the class; one that is started here leaves no trace."""
    if device_class != "thin":
        yield DEFAULT_SOCKET
        return
    configuration = DIRECTORY / "config.toml"
    configuration.write_text(_CONFIGURATION)
    program = Path(sys.executable).with_name("carver")
    process = subprocess.Popen([program, "serve", f"--config={configuration}"])
    try:
        endpoint = DIRECTORY / "csi.sock"
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


def hold(endpoint: Path, parameters: Path, mutable: Path) -> int:
    """Run all specs against a socket; return the exit code."""
    before = volumes(endpoint)
    try:
        ended = subprocess.run(
            [
                DIRECTORY / "csi-sanity",
                f"--csi.endpoint=unix://{endpoint}",
                # csi-sanity makes and removes both; only their parent may exist.
                f"--csi.mountdir={_WORK / 'target'}",
                f"--csi.stagingdir={_WORK / 'staging'}",
                f"--csi.testvolumesize={64 * _MIB}",
                f"--csi.testvolumeexpandsize={128 * _MIB}",
                f"--csi.testvolumeparameters={parameters}",
                f"--csi.testvolumemutableparameters={mutable}",
                f"--ginkgo.json-report={DIRECTORY / 'report.json'}",
                "--ginkgo.no-color",
            ],
            check=False,
        )
    finally:
        left = unmount_all() + delete_all_but(endpoint, before)
    for one in left:
        print(f"left behind: {one}")
    return ended.returncode or (_LEFT_SOMETHING if left else 0)


def volumes(endpoint: Path) -> frozenset[str]:
    """The ids of the service's volumes."""
    with Client(endpoint) as client:
        return frozenset(one.volume_id for one in client.volumes())


def unmount_all() -> list[str]:
    """Unmount whatever a run left mounted; returns what that was."""
    kernel = Kernel()
    left = table.read(kernel).under(str(_WORK))
    for mount in reversed(left):
        kernel.unmount(mount.path)
    shutil.rmtree(_WORK, ignore_errors=True)
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
