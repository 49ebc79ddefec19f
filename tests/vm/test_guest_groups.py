"""A guest's own volume group inside a raw block volume, and kubelet's loop device over it.

udev sees the label on the loop device, and the node's lvm2 activates the guest's volumes there
(69-lvm.rules: `vgchange -aay`). From then on the loop device cannot be detached, and the volume is
in use until they are deactivated by hand, as docs/operations.md says.
"""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import expect
import pytest
from csi_client import Client

from agent.csi.client import block
from mount.block_devices import attribute

MIB = 1 << 20
GUEST = "zzguest"
ROOT = f"{GUEST}-root"
# The rule waits for its unit.
ACTIVATED_SECONDS = 60.0


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def make_group(path: str) -> None:
    """What the guest does inside."""
    settings = "devices/scan_lvs=1 activation/udev_sync=0 backup/backup=0 backup/archive=0"
    inner = ("--devices", path, "--config", settings)
    run("lvm", "pvcreate", *inner, "--yes", path)
    run("lvm", "vgcreate", *inner, GUEST, path)
    run("lvm", "lvcreate", *inner, "-an", "-Zn", "-Wn", "-L", "32m", "-n", "root", GUEST)


def is_activated() -> bool:
    return ROOT in run("dmsetup", "ls")


@pytest.fixture
def loop() -> Iterator[list[str]]:
    """Loop devices that a test attaches."""
    attached: list[str] = []
    yield attached
    if is_activated():
        run("dmsetup", "remove", "--retry", ROOT)
    for one in attached:
        subprocess.run(["losetup", "--detach", one])


def test_what_a_guests_group_keeps_in_use_is_named_and_the_runbook_frees_it(
    client: Client, directory: Path, loop: list[str]
) -> None:
    staging, target = directory / "staging", directory / "target"
    volume = client.create("test-guest", 128 * MIB, block())
    client.stage(volume, staging, block())
    client.publish(volume, staging, target, block())
    number = target.stat().st_rdev
    name = attribute(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/dm/name")
    make_group(f"/dev/mapper/{name}")
    # What kubelet does for the next pod, over a path of its own to the same device.
    loop.append(run("losetup", "--find", "--show", f"/dev/mapper/{name}"))
    run("udevadm", "trigger", "--action=change", "--settle", loop[0])
    end = time.monotonic() + ACTIVATED_SECONDS
    while not is_activated() and time.monotonic() < end:
        time.sleep(1)
    if not is_activated():
        # A node whose lvm2 passes over loop devices: as it would be by hand.
        run("lvm", "vgchange", "-aay", "--devices", loop[0], GUEST)
    subprocess.run(["losetup", "--detach", loop[0]])
    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)

    with expect.code("FAILED_PRECONDITION", loop[0], ROOT, "A guest's volume group"):
        client.delete(volume.volume_id)

    run("dmsetup", "remove", "--retry", ROOT)
    subprocess.run(["losetup", "--detach", loop[0]])
    client.delete(volume.volume_id)


def test_doctor_says_what_the_node_would_do() -> None:
    found = subprocess.run(
        ["/opt/carver/venv/bin/carver", "doctor"], capture_output=True, text=True
    ).stdout
    assert "guests' groups" in found
