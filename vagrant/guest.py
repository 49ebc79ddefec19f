"""The lab's machine from outside: commands over ssh, copies of the tree, reboots and resets."""

import shlex
import subprocess
import time
from collections.abc import Sequence

from vagrant.box import KEY
from vagrant.host import LAB, NAME, PROJECT, in_network, virsh

TREE = "/carver"
_CONFIG = LAB / "ssh_config"
# A socket's path is limited to 108 bytes; /run is short, and forgets its content at a reboot.
_SOCKET = f"/run/{NAME}.ssh"
_LOST = 255  # ssh's own exit code when there is no connection


class GuestError(Exception):
    """The guest did not do what was asked of it."""


def write_ssh_config(address: str) -> None:
    """Write the configuration with which any ssh reaches the guest."""
    _CONFIG.write_text(
        f"# `lab.py up` writes this file: ssh -F {_CONFIG} lab\n"
        "Host lab\n"
        f"  HostName {address}\n"
        "  User root\n"
        f'  IdentityFile "{KEY}"\n'
        "  IdentitiesOnly yes\n"
        # The address is given anew to every box, and nobody is between.
        "  StrictHostKeyChecking no\n"
        "  UserKnownHostsFile /dev/null\n"
        "  LogLevel ERROR\n"
        # A login costs the emulated guest a second and a half, a session on a connection much less.
        "  ControlMaster auto\n"
        f"  ControlPath {_SOCKET}\n"
        "  ControlPersist 600\n"
        "  ServerAliveInterval 30\n"
        "  ServerAliveCountMax 10\n"
    )


def address() -> str | None:
    """Ask libvirt which address the guest was given."""
    for line in virsh("domifaddr", NAME).stdout.splitlines():
        fields = line.split()
        if len(fields) == 4 and fields[2] == "ipv4":
            return fields[3].partition("/")[0]
    return None


def ssh(words: Sequence[str] = (), *, terminal: bool = False, login_only: bool = False) -> list[str]:
    """Say how a command is run in the guest; one word is a shell's line, several are quoted."""
    line = [words[0]] if len(words) == 1 else [shlex.join(words)] if words else []
    options = ["-tt"] if terminal else []
    if login_only:
        options += ["-o", "ControlPath=none", "-o", "ConnectTimeout=10", "-o", "BatchMode=yes"]
    return in_network("ssh", "-F", _CONFIG, *options, "lab", *(["--", *line] if line else []))


def run(
    words: Sequence[str],
    *,
    check: bool = True,
    stdin: str = "",
    timeout_seconds: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command as root in the guest and return what it said.

    One word is a line for the guest's shell; several words reach the program as they are.
    """
    return subprocess.run(
        ssh(words),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=check,
    )


def copy(source: str, target: str, *options: str) -> None:
    """Copy files into the guest, removing at the target what the source does not have."""
    shell = shlex.join(["ssh", "-F", str(_CONFIG)])
    command = in_network(
        *("rsync", "--recursive", "--links", "--perms", "--times", "--delete", *options),
        *("--rsh", shell, "--", source, f"lab:{target}"),
    )
    subprocess.run(command, check=True)


def sync() -> None:
    """Copy the project's tree to /carver in the guest, without what git ignores."""
    # The guest keeps what is excluded, above all its own __pycache__: the next test starts faster.
    copy(f"{PROJECT}/", TREE, "--exclude=/.git", "--filter=:- .gitignore")


def boot_id() -> str | None:
    """Return the id of the guest's present boot, or None if it does not answer."""
    command = ssh(["cat /proc/sys/kernel/random/boot_id"], login_only=True)
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip() or None


def wait_for_boot(previous: str | None, timeout_seconds: float = 600) -> str:
    """Wait until the guest answers from another boot than the previous one; return its id."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        current = boot_id()
        if current and current != previous:
            return current
        time.sleep(0.5)
    raise GuestError(f"the guest did not come back within {timeout_seconds} s; {console()}")


def reboot() -> None:
    """Reboot the guest as an administrator would, and wait for it."""
    previous = boot_id()
    done = run(["systemctl", "reboot"], check=False)
    if done.returncode not in (0, _LOST):
        raise GuestError(f"systemctl reboot: {done.stderr.strip()}")
    disconnect()
    wait_for_boot(previous)


def reset() -> None:
    """Pull the guest's plug and put it in again: nothing is written out, and wait for it."""
    previous = boot_id()
    done = virsh("reset", NAME)
    if done.returncode != 0:
        raise GuestError(f"virsh reset: {done.stderr.strip()}")
    disconnect()
    wait_for_boot(previous)


def disconnect() -> None:
    """End the connection that commands share, if there is one."""
    command = in_network("ssh", "-F", _CONFIG, "-O", "exit", "lab")
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)


def console() -> str:
    """Say where the guest's console is written."""
    return f"its console: {LAB / 'logs' / 'console.log'}"
