"""What the lab needs of the machine it runs on: packages, root, libvirt, a network of its own."""

import contextlib
import hashlib
import os
import signal
import subprocess
import time
from pathlib import Path

from vagrant.steps import Step, StepError

PROJECT = Path(__file__).resolve().parent.parent
LAB = PROJECT / "vagrant" / ".lab"
NAME = "carver-lab"  # of the one machine, of its domain and of the network namespace
PACKAGES = (
    "vagrant",
    "vagrant-libvirt",
    "libvirt-daemon-system",
    "libvirt-clients",
    "qemu-system-x86",
    "qemu-utils",
    "mmdebstrap",
    "rsync",
    "dnsmasq-base",
    "e2fsprogs",
    "iproute2",
    "iptables",
    "openssh-client",
    "python3-venv",
)
_USER_MODE_PACKAGE = "user-mode-linux"
# The program in it that a machine in user mode is.
USER_MODE = "linux.uml"
# Those of libvirt and its machines, as /proc/PID/comm has them.
_OF_LIBVIRT = {"libvirtd", "qemu-system-x86"}
_NAMESPACE = Path("/run/netns") / NAME
# Between the name of a box and its version, in the name of libvirt's copy (vagrant-libvirt's
# HandleBoxImage).
_BOX_IMAGE = "_vagrant_box_image_"
_URI = "qemu:///system"
_KVM = Path("/dev/kvm")
# Where root can open a /dev/kvm that is of no use, and qemu's user cannot, libvirtd takes what it
# found out of qemu for out of date, and asks again, for four seconds, at each of thirty looks
# (virQEMUCapsIsValid). So it finds out without; qemu's own namespace bears no mount on a node.
_WITHOUT_KVM = """
touch "$1"
chmod 0 "$1"
mount --bind "$1" "$2"
libvirtd --daemon
virsh --quiet --connect "$3" domcapabilities >/dev/null || :
umount "$2"
"""


class HostError(Exception):
    """The machine or its environment variables do not have what the lab needs."""


def as_root(*words: str | Path) -> list[str]:
    """Say how a command is run as root."""
    sudo = [] if os.geteuid() == 0 else ["sudo"]
    return [*sudo, *map(str, words)]


def in_network(*words: str | Path) -> list[str]:
    """Say how a command is run where the guest's address can be reached."""
    enter = ["ip", "netns", "exec", NAME] if _NAMESPACE.exists() else []
    return as_root(*enter, *words)


def virsh(*words: str) -> subprocess.CompletedProcess[str]:
    """Ask libvirt; the caller looks at the exit code."""
    command = as_root("virsh", "--connect", _URI, "--quiet", *words)
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
    )


def in_user_mode(name: str) -> bool:
    """Tell whether a machine runs in user mode: a cluster's where the host has no virtualization.

    A variable says otherwise; raises HostError for a value that is not known.
    """
    variable = "CARVER_LAB_POWER" if name == NAME else "CARVER_CLUSTER_POWER"
    usual = "libvirt" if name == NAME or driver() == "kvm" else "user-mode"
    chosen = os.environ.get(variable) or usual
    if chosen not in ("libvirt", "user-mode"):
        raise HostError(f"{variable} is {chosen!r}: it is libvirt or user-mode")
    return chosen == "user-mode"


def console_log(name: str) -> Path:
    """Return the file into which a guest's console is written."""
    return LAB / "logs" / ("console.log" if name == NAME else f"{name}.console.log")


def domain_state(name: str) -> str:
    """What libvirt calls a machine's state (virsh(1), domstate); empty without such a machine."""
    return virsh("domstate", name).stdout.strip()


def domain_uuid(name: str) -> str:
    """The UUID that libvirt gave a machine; empty without such a machine."""
    return virsh("domuuid", name).stdout.strip()


def domain_runs(name: str) -> bool:
    """Tell whether a machine is running."""
    return domain_state(name) == "running"


def domains() -> list[str]:
    """Name every machine that libvirt knows; raises HostError where it does not answer."""
    listed = virsh("list", "--all", "--name")
    if listed.returncode != 0:
        raise HostError(f"libvirt does not list its machines: {listed.stderr.strip()}")
    return listed.stdout.split()


def driver() -> str:
    """Name libvirt's driver: kvm only where the processor can, else software emulation.

    /dev/kvm alone proves nothing: it can exist on a machine without the extensions, and then a
    stock kernel hangs in it.
    """
    words = Path("/proc/cpuinfo").read_text().split()
    return "kvm" if ("vmx" in words or "svm" in words) and _KVM.exists() else "qemu"


def digest_of(*parts: str) -> str:
    """Hash files and folders of the project, with their names, without what Python compiled."""
    content = hashlib.sha256()
    for part in parts:
        top = PROJECT / part
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                content.update(str(path.relative_to(PROJECT)).encode())
                content.update(path.read_bytes())
    return content.hexdigest()


def missing_packages(*, in_user_mode: bool) -> list[str]:
    """Name the packages the lab needs that are not installed."""
    wanted = [*PACKAGES, *([_USER_MODE_PACKAGE] if in_user_mode else [])]
    query = ["dpkg-query", "--show", "--showformat", "${db:Status-Status} ${Package}\n", *wanted]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)  # 1: some unknown
    lines = (line.split() for line in answer.stdout.splitlines())
    installed = {name for status, name in lines if status == "installed"}
    return [name for name in wanted if name not in installed]


def install_packages(step: Step, names: list[str]) -> None:
    """Install Debian packages."""
    apt = as_root("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "--yes", "--quiet")
    step.run(*apt, "update")
    step.run(*apt, "install", "--no-install-recommends", *names)


def libvirt_answers() -> bool:
    """Tell whether a libvirtd answers, the machine's own or the lab's."""
    try:
        return virsh("version").returncode == 0
    except (subprocess.TimeoutExpired, FileNotFoundError):
        return False


def start_libvirt(step: Step) -> None:
    """Start virtlogd and libvirtd in a network namespace of the lab's own.

    The bridge, the DHCP server and the guest's address live and die in there, and nothing of the
    machine's own network is touched.
    """
    make_network(step)
    # It outlives a libvirtd that crashed, and does not start twice.
    if not any(_program(one) == "virtlogd" for one in _namespace_pids()):
        step.run(*in_network("virtlogd", "--daemon"))
    if driver() == "kvm" or not _KVM.exists():
        step.run(*in_network("libvirtd", "--daemon"))
    else:
        step.run(*in_network("sh", "-ec", _WITHOUT_KVM, "sh", LAB / "no-kvm", _KVM, _URI))
    for _ in range(60):
        if libvirt_answers():
            return
        time.sleep(0.5)
    raise StepError(["libvirtd", "--daemon"], "does not answer", step.log)


def make_network(step: Step) -> None:
    """Have the lab's network namespace."""
    if not has_network():
        step.run(*as_root("ip", "netns", "add", NAME))
        step.run(*as_root("ip", "-netns", NAME, "link", "set", "lo", "up"))


def stop_libvirt() -> None:
    """End every process in the lab's namespace, then the namespace.

    Without a namespace, or while a machine is left in it, nothing is done: the one machine and
    those of a cluster share it. Raises HostError where libvirt does not say whether one is.
    """
    if not has_network():
        return
    programs = {_program(one) for one in _namespace_pids()}
    if USER_MODE in programs or (programs & _OF_LIBVIRT and domains()):
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + 10
        while (pids := _namespace_pids()) and time.monotonic() < deadline:
            subprocess.run(as_root("kill", f"-{number}", *pids), capture_output=True, check=False)
            time.sleep(0.3)
    subprocess.run(as_root("ip", "netns", "delete", NAME), check=True)


def has_network() -> bool:
    """Tell whether the lab has a network namespace: not where the machine's own libvirtd serves."""
    return _NAMESPACE.exists()


def _namespace_pids() -> list[str]:
    command = as_root("ip", "netns", "pids", NAME)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def _program(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def remove_box_images() -> None:
    """Remove libvirt's copies of the lab's boxes that no machine's disk is built on.

    Such a disk has only what differs from its box's copy.
    """
    listed = [line.split() for line in virsh("vol-list", "default").stdout.splitlines()]
    paths = {fields[0]: fields[1] for fields in listed if len(fields) == 2}
    described = {name: virsh("vol-dumpxml", "--pool", "default", name) for name in paths}
    if any(one.returncode != 0 for one in described.values()):
        return
    for name, path in paths.items():
        others = [one.stdout for other, one in described.items() if other != name]
        is_ours = name.startswith(f"{NAME}-") and _BOX_IMAGE in name
        if is_ours and not any(path in one for one in others):
            virsh("vol-delete", "--pool", "default", name)


def remove_tree(path: Path) -> None:
    """Remove a folder in which root has written."""
    with contextlib.suppress(FileNotFoundError):
        subprocess.run(as_root("rm", "-rf", "--one-file-system", path), check=True)
