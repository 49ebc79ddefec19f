"""The image under containerd in the VM, as the DaemonSet's pod: the demo, and mounts on the host.

Needs the VM, and the archive that `make image` makes. The service rests meanwhile; its group is
the one that the manifests name.
"""

import json
from collections.abc import Iterator

import pytest
from container import containerd, pod
from container.containerd import MANIFESTS, PYTHON, in_guest

from vagrant import guest

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def imported() -> Iterator[None]:
    with containerd.image():
        yield


@pytest.fixture(scope="module", params=MANIFESTS)
def running(imported: None, request: pytest.FixtureRequest) -> Iterator[str]:
    this = pod.of(containerd.ROOT / "deploy" / "kubernetes" / f"{request.param}.yaml")
    with containerd.running(this):
        containerd.wait_until_ready()
        yield str(request.param)


def carver(*words: str) -> str:
    return containerd.exec_in_pod("carver", *words)


def mount_namespace(pid: str) -> str:
    return in_guest("readlink", f"/proc/{pid}/ns/mnt").stdout


@pytest.mark.parametrize(
    "running",
    ["container-lvm2", pytest.param("host-lvm2", marks=pytest.mark.long)],
    indirect=True,
)
def test_the_demo_passes_against_the_container(running: str) -> None:
    ended = in_guest(PYTHON, f"{guest.TREE}/vagrant/inside/demo.py", check=False)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}\n{containerd.log()[-4000:]}"


def test_lvm2_is_the_manifests_and_a_mount_made_inside_is_seen_on_the_host(running: str) -> None:
    place = "/var/lib/kubelet/pods/by-hand"
    carver("volume", "create", "by-hand", "--size", "32MiB")
    try:
        commands = [one for one in containerd.log().splitlines() if '"message": "command"' in one]
        made = [one for one in commands if "lvcreate" in one]
        assert made
        # By the shell that is kept open, which is the host's or the container's own.
        assert all('"session": true' in one for one in made)
        shells = in_guest("pgrep", "--exact", "lvm").stdout.split()
        assert shells
        of_host = mount_namespace("1")
        assert {mount_namespace(one) == of_host for one in shells} == {running == "host-lvm2"}
        carver("volume", "publish", "by-hand", place)
        mounts = json.loads(in_guest("findmnt", "--json", "--mountpoint", place).stdout)
        assert mounts["filesystems"][0]["fstype"] == "ext4"
        in_guest("touch", f"{place}/written-on-the-host")
        status = json.loads(carver("status", "--json"))
        assert status["serving"]
        [volume] = [one for one in status["volumes"] if one["name"] == "by-hand"]
        assert place in [one["path"] for one in volume["places"]]
        carver("volume", "unpublish", "by-hand")
        assert in_guest("findmnt", "--mountpoint", place, check=False).returncode == 1
    finally:
        carver("volume", "delete", "by-hand", "--yes")
