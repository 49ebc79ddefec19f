"""The image under containerd in the VM, as the DaemonSet's pod: the demo, and mounts on the host.

Needs the VM, and the archive that `make image` makes. The service rests meanwhile; its group is
the one that the manifests name.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from container import pod
from container.pod import FOLDER, LOG, NAME, NAMESPACE, PID_FILE

from vagrant import guest

ROOT = Path(__file__).parents[2]
PYTHON = "/opt/carver/venv/bin/python"
ARCHIVE = f"{FOLDER}/carver.oci.tar"
CTR = ("ctr", "--namespace", NAMESPACE)

# Asked from inside the pod's network until nothing lacks but kubelet, which is not there.
PROBE = """
import sys, time, urllib.error, urllib.request
end = time.monotonic() + 120
while True:
    try:
        urllib.request.urlopen("http://127.0.0.1:9898/readyz", timeout=10)
        break
    except OSError as error:
        told = error.read().decode() if isinstance(error, urllib.error.HTTPError) else str(error)
        if "kubelet has not registered" in told:
            print("ok")
            break
        error = told
        if time.monotonic() > end:
            sys.exit(f"not ready: {error}")
        time.sleep(1)
"""
STOPPED = f"until {' '.join(CTR)} tasks list | grep -q '^{NAME} .*STOPPED'; do sleep 0.5; done"

pytestmark = pytest.mark.timeout(900)


def in_guest(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command in the guest; a failure shows what it said."""
    ended = guest.run(words, check=False)
    assert ended.returncode == 0 or not check, f"{words}\n{ended.stdout}\n{ended.stderr}"
    return ended


@pytest.fixture(scope="module")
def imported() -> Iterator[None]:
    """The image in containerd's store, and nobody at Carver's socket."""
    archive = max((ROOT / "dist").glob("carver-*.oci.tar"), key=lambda path: path.stat().st_mtime)
    in_guest("mkdir", "-p", f"{FOLDER}/config")
    guest.copy(str(archive), ARCHIVE)
    in_guest("systemctl", "start", "containerd")
    in_guest(*CTR, "images", "import", ARCHIVE)
    in_guest("systemctl", "stop", "carver")
    yield
    in_guest("systemctl", "start", "carver")
    in_guest(*CTR, "images", "remove", "--sync", *names())
    in_guest("systemctl", "stop", "containerd")
    in_guest("rm", "-r", FOLDER)


def names() -> list[str]:
    return in_guest(*CTR, "images", "list", "--quiet", "name~=carver").stdout.split()


@pytest.fixture(scope="module", params=["container-lvm2", "host-lvm2"])
def running(imported: None, request: pytest.FixtureRequest) -> Iterator[str]:
    """The pod of a manifest, ready."""
    this = pod.of(ROOT / "deploy" / "kubernetes" / f"{request.param}.yaml")
    in_guest("mkdir", "-p", *this.folders())
    for name, text in this.files.items():
        guest.run(["tee", f"{FOLDER}/config/{name}"], stdin=text)
    in_guest(*this.words("lab", CARVER_LOG_LEVEL="debug"))
    pid = in_guest("cat", PID_FILE).stdout
    # containerd's CRI plugin, or the pod network, would have done this.
    network = ("nsenter", "--target", pid, "--net")
    in_guest(*network, "ip", "link", "set", "lo", "up")
    ready = in_guest(*network, PYTHON, "-c", PROBE, check=False)
    assert ready.returncode == 0, f"{ready.stderr}\n{in_guest('cat', LOG).stdout}"
    yield str(request.param)
    in_guest(*CTR, "tasks", "kill", "--signal", "SIGTERM", NAME)
    in_guest("timeout", "60", "bash", "-c", STOPPED)
    in_guest(*CTR, "tasks", "delete", NAME, check=False)
    in_guest(*CTR, "containers", "remove", NAME)
    in_guest("rm", LOG)


def carver(*words: str) -> str:
    """What `kubectl exec` would run in the pod."""
    exec_words = (*CTR, "tasks", "exec", "--exec-id", "look", NAME)
    return in_guest(*exec_words, "carver", *words).stdout


def mount_namespace(pid: str) -> str:
    return in_guest("readlink", f"/proc/{pid}/ns/mnt").stdout


def test_the_demo_passes_against_the_container(running: str) -> None:
    ended = in_guest(PYTHON, f"{guest.TREE}/vagrant/inside/demo.py", check=False)
    log = in_guest("cat", LOG).stdout
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}\n{log[-4000:]}"
    commands = [line for line in log.splitlines() if '"message": "command"' in line]
    made = [line for line in commands if "lvcreate" in line]
    assert made
    # By the shell that is kept open, which is the host's or the container's own.
    assert all('"session": true' in line for line in made)
    shells = in_guest("pgrep", "--exact", "lvm").stdout.split()
    assert shells
    of_host = mount_namespace("1")
    assert {mount_namespace(one) == of_host for one in shells} == {running == "host-lvm2"}


def test_a_mount_made_inside_is_seen_on_the_host(running: str) -> None:
    place = "/var/lib/kubelet/pods/by-hand"
    carver("volume", "create", "by-hand", "--size", "32MiB")
    try:
        carver("volume", "publish", "by-hand", place)
        told = json.loads(in_guest("findmnt", "--json", "--mountpoint", place).stdout)
        assert told["filesystems"][0]["fstype"] == "ext4"
        in_guest("touch", f"{place}/written-on-the-host")
        status = json.loads(carver("status", "--json"))
        assert status["serving"]
        [volume] = [one for one in status["volumes"] if one["name"] == "by-hand"]
        assert place in [one["path"] for one in volume["places"]]
        carver("volume", "unpublish", "by-hand")
        assert in_guest("findmnt", "--mountpoint", place, check=False).returncode == 1
    finally:
        carver("volume", "delete", "by-hand", "--yes")
