"""What users need of the pod, deed by deed: each fails where the pod lacks one privilege.

`CASES` has a row for each privilege of the DaemonSets in deploy/kubernetes. docs/security.md has
the same rows, and the fast tier compares them. As a program, in the guest, this does one deed while
the pod runs, and undoes what is left of it.
"""

# First of all: agent keeps gRPC's fork handlers out, and must come before grpc does.
import agent  # noqa: F401  isort: skip

import argparse
import concurrent.futures
import fcntl
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
from csi_client import Client, wait_until_served
from vm import pods
from vm.privileges import (
    FAILURES,
    MIB,
    Deed,
    mount_a_volume,
    serve,
    staged,
    use_an_encrypted_volume,
    within,
)

from agent.csi.client import block, mounted
from agent.daemon.registration import Registration
from agent.settings.settings import DEFAULT_SOCKET, KUBELET_DIRECTORY
from mount import table
from mount.cgroups import Cgroups, IoMax
from mount.kernel import Kernel
from proto import pluginregistration_pb2 as kubelet
from proto import pluginregistration_pb2_grpc as kubelet_grpc

# What the program ends with where the deed failed, and not the program.
FAILED = 3
# For a pod that works; one may wait for what never comes.
PATIENCE_SECONDS = 60
# Longer than any change of a group takes that need not wait.
LOCKED_SECONDS = 20
_PLACES = tuple(KUBELET_DIRECTORY / one / "test-privileges" for one in ("plugins", "pods"))
_REGISTRY = KUBELET_DIRECTORY / "plugins_registry"
# The group that the manifests name, and what a case has in its place.
_GROUP, _OWN_GROUP = "carver", "carver_privileges"
_FILE = Path("/var/lib/carver/test-privileges.img")
_ON_A_FILE = f"""
[[groups]]
name = "{_OWN_GROUP}"
file = "{_FILE}"
file_size = "128MiB"

[[classes]]
name = "default"
group = "{_OWN_GROUP}"
default = true
"""


@dataclass(frozen=True)
class Case:
    """A privilege of the pod, in `Pod.without`'s words, and what fails where it is taken away.

    `classes` is what the configuration must have in the place of the manifest's for the deed to be
    tried at all.
    """

    privilege: str
    deed: Deed
    classes: str = ""


def publish_a_volume(client: Client, directory: Path) -> None:
    """Mount a volume where its pod has it."""
    with staged(client, directory, 64 * MIB) as (volume, staging):
        target = _PLACES[1] / "target"
        client.publish(volume, staging, target, mounted("ext4"))
        assert table.read(Kernel()).at(str(target)), "the mount is not seen on the node"
        client.unpublish(volume.volume_id, target)


def register_with_kubelet(client: Client, directory: Path) -> None:
    """Answer at the socket that kubelet finds."""
    socket = Registration(_REGISTRY, DEFAULT_SOCKET).socket
    with grpc.insecure_channel(f"unix://{socket}") as channel:
        info = kubelet_grpc.RegistrationStub(channel).GetInfo(kubelet.InfoRequest(), timeout=30)
    assert info.endpoint == str(DEFAULT_SOCKET)


def keep_a_group_on_a_file(client: Client, directory: Path) -> None:
    """Have volumes outlive the pod where the group is on a file: that is one of the node's."""
    within(PATIENCE_SECONDS, lambda: bool(client.capacity().available_capacity), "no group")
    assert _FILE.exists(), "the file is not the node's"


def have_udev_name_a_volume(client: Client, directory: Path) -> None:
    """Leave the node's /dev to udev: programs there find volumes by its links."""
    with staged(client, directory, 64 * MIB):
        [node] = Path("/dev/mapper").glob("*-vol--test--privilege")
        assert node.is_symlink(), f"{node} is no link of udev's"


def keep_copies_of_the_metadata(client: Client, directory: Path) -> None:
    """Have the node's vgcfgrestore know of each volume."""
    copy = Path("/etc/lvm/backup", _GROUP)
    before = copy.stat().st_mtime_ns
    client.create("test-privilege", 64 * MIB, block())
    within(PATIENCE_SECONDS, lambda: copy.stat().st_mtime_ns > before, "no copy of it")
    assert "vol-test-privilege" in copy.read_text()


def wait_for_the_lvm2_of_the_node(client: Client, directory: Path) -> None:
    """Change a group only when no lvm2 of the node's does."""
    lock = Path("/run/lock/lvm", f"V_{_GROUP}")
    with concurrent.futures.ThreadPoolExecutor() as pool, lock.open("a") as file:
        # As lvm2 does it (lib/misc/lvm-flock.c).
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            made = pool.submit(client.create, "test-privilege", 64 * MIB, block())
            with suppress(TimeoutError):
                made.result(timeout=LOCKED_SECONDS)
            assert not made.done(), f"it did not wait: {made.result()}"
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
        made.result()


def limit_the_io_of_pods(client: Client, directory: Path) -> None:
    """Hold the pods of a volume to a limit, in the node's cgroup of all pods."""
    with pods.pod(pods.CGROUPFS) as pod:
        limit = {"writeIOPS": "100"}
        volume = client.create("test-privilege", 64 * MIB, mounted("ext4"), mutable=limit)
        staging = directory / "staging"
        client.stage(volume, staging)
        found = Cgroups(pod.top).limits()
        client.unstage(volume.volume_id, staging)
        assert list(found.values()) == [IoMax(writes=100)]


CASES = (
    Case("privileged", mount_a_volume),
    Case("runAsUser", serve),
    Case("hostPID", mount_a_volume),
    Case("hostIPC", mount_a_volume),
    Case("/var/lib/kubelet/plugins", serve),
    Case("/var/lib/kubelet/plugins: Bidirectional", mount_a_volume),
    Case("/var/lib/kubelet/pods", publish_a_volume),
    Case("/var/lib/kubelet/pods: Bidirectional", publish_a_volume),
    Case("/var/lib/kubelet/plugins_registry", register_with_kubelet),
    Case("/var/lib/carver", keep_a_group_on_a_file, _ON_A_FILE),
    Case("/dev", use_an_encrypted_volume),
    Case("/sys/fs/cgroup", limit_the_io_of_pods),
    Case("/run/udev", have_udev_name_a_volume),
    Case("/etc/lvm", keep_copies_of_the_metadata),
    Case("/run/lock/lvm", wait_for_the_lvm2_of_the_node),
)


def _undo(client: Client) -> None:
    """Remove what a deed left that failed, in this pod or another, as far as this one can."""
    kernel = Kernel()
    for place in _PLACES:
        for mount in reversed(table.read(kernel).under(str(place))):
            kernel.unmount(mount.path)
        shutil.rmtree(place, ignore_errors=True)
    with suppress(grpc.RpcError):
        for volume in client.volumes():
            if "test-privilege" in volume.volume_id:
                client.delete(volume.volume_id)


def _remove_group() -> None:
    """Remove the group of a case, once it is not in use; its file is the node's or a pod's."""
    words = ["losetup", "--noheadings", "--raw", "--output", "NAME,BACK-FILE", "--list"]
    listed = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    for name, *file in (line.split(maxsplit=1) for line in listed.splitlines()):
        if _FILE.name in "".join(file):
            subprocess.run(["vgremove", "--devices", name, "--yes", _OWN_GROUP], check=False)
            subprocess.run(["losetup", "--detach", name], check=True)
    _FILE.unlink(missing_ok=True)


def _try(client: Client, deed: Deed) -> int:
    try:
        _wait_for_an_answer()
        _undo(client)
        for place in _PLACES:
            place.mkdir(parents=True)
        deed(client, _PLACES[0])
    except FAILURES as error:
        print(f"{deed.__name__}: {error!r}", file=sys.stderr)
        return FAILED
    finally:
        _undo(client)
    return 0


def _wait_for_an_answer() -> None:
    try:
        wait_until_served(DEFAULT_SOCKET, PATIENCE_SECONDS)
    except grpc.FutureTimeoutError:
        raise AssertionError("the socket is not served") from None


def main() -> int:
    """Do one deed; FAILED where it cannot be done. `clean` removes what all of them left."""
    deeds = {one.deed.__name__: one.deed for one in CASES}
    parser = argparse.ArgumentParser()
    parser.add_argument("deed", choices=[*deeds, "clean"])
    chosen = parser.parse_args().deed
    with Client(DEFAULT_SOCKET, PATIENCE_SECONDS) as client:
        if chosen != "clean":
            return _try(client, deeds[chosen])
        _undo(client)
        _remove_group()
        return 0


if __name__ == "__main__":
    sys.exit(main())
