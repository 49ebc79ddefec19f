"""Run csi-sanity against the installed service and leave nothing of it behind. In the lab's guest.

    guest.py CLASS

The report is written beside the program, as report.json. The exit code is csi-sanity's own; 3 if
all specs passed and yet a volume or a mount was left, which is cleaned up all the same.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

# Behind everything else: Carver is the one that is installed.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from agent.client import Client
from agent.config import DEFAULT_SOCKET
from mount import table
from mount.syscalls import Kernel

DIRECTORY = Path("/var/tmp/carver-conformance")
# Volumes are mounted inside kubelet's directory only.
_WORK = Path("/var/lib/kubelet/plugins/carver-conformance")
_MIB = 1 << 20
_LEFT_SOMETHING = 3


def main(device_class: str) -> int:
    """Run all specs with one device class; return the exit code."""
    unmount_all()
    _WORK.mkdir()
    parameters = DIRECTORY / "parameters.yaml"
    parameters.write_text(json.dumps({"carver/class": device_class}))
    before = volumes()
    try:
        ended = subprocess.run(
            [
                DIRECTORY / "csi-sanity",
                f"--csi.endpoint=unix://{DEFAULT_SOCKET}",
                # csi-sanity makes and removes both; only their parent may exist.
                f"--csi.mountdir={_WORK / 'target'}",
                f"--csi.stagingdir={_WORK / 'staging'}",
                f"--csi.testvolumesize={64 * _MIB}",
                f"--csi.testvolumeexpandsize={128 * _MIB}",
                f"--csi.testvolumeparameters={parameters}",
                f"--ginkgo.json-report={DIRECTORY / 'report.json'}",
                "--ginkgo.no-color",
            ],
            check=False,
        )
    finally:
        left = unmount_all() + delete_all_but(before)
    for one in left:
        print(f"left behind: {one}")
    return ended.returncode or (_LEFT_SOMETHING if left else 0)


def volumes() -> frozenset[str]:
    """The ids of the service's volumes."""
    with Client(DEFAULT_SOCKET) as client:
        return frozenset(one.volume_id for one in client.volumes())


def unmount_all() -> list[str]:
    """Unmount whatever a run left mounted; returns what that was."""
    kernel = Kernel()
    left = table.read(kernel).under(str(_WORK))
    for mount in reversed(left):
        kernel.unmount(mount.path)
    shutil.rmtree(_WORK, ignore_errors=True)
    return [f"the mount {mount.path}" for mount in left]


def delete_all_but(kept: frozenset[str]) -> list[str]:
    """Delete the volumes that were not there before a run; returns which they were."""
    left = sorted(volumes() - kept)
    with Client(DEFAULT_SOCKET) as client:
        for volume_id in left:
            client.delete(volume_id)
    return [f"the volume {volume_id}" for volume_id in left]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
