"""Carver's pod under containerd in the guest: started, spoken to, ended."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from container.pod import FOLDER, LOG, NAME, NAMESPACE, PID_FILE, Pod

from deploy.image.build_image import native
from vagrant import guest

ROOT = Path(__file__).parents[2]
PYTHON = "/opt/carver/venv/bin/python"
MANIFESTS = ("container-lvm2", "host-lvm2")
_ARCHIVE = f"{FOLDER}/carver.oci.tar"
_CTR = ("ctr", "--namespace", NAMESPACE)

# Asked from inside the pod's network until nothing lacks but kubelet, which is not there.
_PROBE = """
import sys, time, urllib.error, urllib.request
end = time.monotonic() + 120
while True:
    try:
        urllib.request.urlopen("http://127.0.0.1:9898/readyz", timeout=10)
        break
    except OSError as error:
        answer = error.read().decode() if isinstance(error, urllib.error.HTTPError) else str(error)
        if "kubelet has not registered" in answer:
            print("ok")
            break
        error = answer
        if time.monotonic() > end:
            sys.exit(f"not ready: {error}")
        time.sleep(1)
"""
_STOPPED = f"until {' '.join(_CTR)} tasks list | grep -q '^{NAME} .*STOPPED'; do sleep 0.5; done"


def in_guest(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command in the guest; a failure shows what it said."""
    ended = guest.run(words, check=False)
    assert ended.returncode == 0 or not check, f"{words}\n{ended.stdout}\n{ended.stderr}"
    return ended


@contextmanager
def image() -> Iterator[None]:
    """The image in containerd's store, and the installed service stopped."""
    ours = (ROOT / "dist").glob(f"carver-*-{native()}.oci.tar")
    archive = max(ours, key=lambda path: path.stat().st_mtime)
    in_guest("mkdir", "-p", f"{FOLDER}/config")
    guest.copy(str(archive), _ARCHIVE)
    in_guest("systemctl", "start", "containerd")
    in_guest(*_CTR, "images", "import", _ARCHIVE)
    in_guest("systemctl", "stop", "carver")
    try:
        yield
    finally:
        in_guest("systemctl", "start", "carver")
        names = in_guest(*_CTR, "images", "list", "--quiet", "name~=carver").stdout.split()
        in_guest(*_CTR, "images", "remove", "--sync", *names)
        in_guest("systemctl", "stop", "containerd")
        in_guest("rm", "-r", FOLDER)


@contextmanager
def running(pod: Pod) -> Iterator[None]:
    """The pod, which was started; whether it works is another question.

    One that has not ended a minute after SIGTERM is killed, as by kubelet.
    """
    in_guest("mkdir", "-p", *pod.folders())
    for name, text in pod.files.items():
        guest.run(["tee", f"{FOLDER}/config/{name}"], stdin=text)
    in_guest(*pod.words("lab", CARVER_LOG_LEVEL="debug"))
    pid = in_guest("cat", PID_FILE).stdout
    # containerd's CRI plugin, or the pod network, would have done this; it may have ended by now.
    in_guest("nsenter", "--target", pid, "--net", "ip", "link", "set", "lo", "up", check=False)
    try:
        yield
    finally:
        in_guest(*_CTR, "tasks", "kill", "--signal", "SIGTERM", NAME, check=False)
        in_guest("timeout", "60", "bash", "-c", _STOPPED, check=False)
        in_guest(*_CTR, "tasks", "delete", "--force", NAME, check=False)
        in_guest(*_CTR, "containers", "remove", NAME)
        in_guest("rm", LOG)


def wait_until_ready() -> None:
    """Fail where the pod that runs is not ready in time, with its log."""
    pid = in_guest("cat", PID_FILE).stdout
    ready = in_guest("nsenter", "--target", pid, "--net", PYTHON, "-c", _PROBE, check=False)
    assert ready.returncode == 0, f"{ready.stderr}\n{log()}"


def log() -> str:
    return in_guest("cat", LOG).stdout


def exec_in_pod(*words: str) -> str:
    return in_guest(*_CTR, "tasks", "exec", "--exec-id", "look", NAME, *words).stdout
