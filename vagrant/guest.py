"""The lab's machine from outside: commands over ssh, copies of the tree, reboots and resets."""

import shlex
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from vagrant.box import KEY
from vagrant.host import LAB, NAME, PROJECT, domain_state, in_network, virsh

TREE = "/carver"
# More than a boot takes; after a reset it has twice as long. The emulator of qemu 7.2 can loop for
# ever at a breakpoint with which the kernel patched its code (text_poke_bp).
_STUCK_SECONDS = 90
_CONFIG = LAB / "ssh_config"
# A socket's path is limited to 108 bytes; /run is short, and forgets its content at a reboot.
_SOCKET = f"/run/{NAME}.ssh"


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
        # A shared connection to a boot that is over goes away after two minutes at the latest.
        "  ServerAliveInterval 15\n"
        "  ServerAliveCountMax 8\n"
    )


def address() -> str | None:
    """Ask libvirt which address the guest was given."""
    for line in virsh("domifaddr", NAME).stdout.splitlines():
        fields = line.split()
        if len(fields) == 4 and fields[2] == "ipv4":
            return fields[3].partition("/")[0]
    return None


def ssh(words: Sequence[str], *options: str) -> list[str]:
    """Say how a command is run in the guest; one word is a shell's line, several are quoted."""
    line = [words[0]] if len(words) == 1 else [shlex.join(words)] if words else []
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
        # A reset may follow at once: without fsync it leaves files of length zero.
        *("rsync", "--recursive", "--links", "--perms", "--times", "--delete", "--fsync", *options),
        *("--rsh", shell, "--", source, f"lab:{target}"),
    )
    subprocess.run(command, check=True)


def sync() -> None:
    """Copy the project's tree to /carver in the guest, without what git ignores but compiled tests.

    pytest compiles what it tests with anew where it finds no file of its own version's. What the
    fast tier compiled on the host saves the emulated guest minutes.
    """
    compiled = "--include=/tests/**/__pycache__/***"
    copy(f"{PROJECT}/", TREE, "--exclude=/.git", compiled, "--filter=:- .gitignore")


def boot_id(timeout_seconds: int = 30) -> str | None:
    """Return the id of the guest's present boot, or None if it does not answer."""
    # A connection of its own: a shared one may belong to a boot that is over.
    options = ("-o", "ControlPath=none", "-o", f"ConnectTimeout={timeout_seconds}")
    done = subprocess.run(
        ssh(["cat /proc/sys/kernel/random/boot_id"], *options),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or None


@contextmanager
def revived() -> Iterator[None]:
    """Inside, a guest that has run for a while and still has no address is reset."""
    over = threading.Event()

    def watch() -> None:
        began, stuck_seconds = time.monotonic(), _STUCK_SECONDS
        while not over.wait(2):
            if domain_state() != "running" or address() is not None:
                began = time.monotonic()
            elif time.monotonic() > began + stuck_seconds:
                virsh("reset", NAME)
                began, stuck_seconds = time.monotonic(), 2 * stuck_seconds

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def wait_for_boot(
    previous: str | None = None,
    timeout_seconds: float = 600,
    stuck_seconds: float = _STUCK_SECONDS,
) -> None:
    """Wait until the guest answers, and from another boot than the previous one, if any.

    One that does not within `stuck_seconds` is reset.
    """
    began = time.monotonic()
    deadline = began + timeout_seconds
    # An attempt made while the guest has no network yet notices the boot late: start with short
    # ones; lengthen them, for on a busy host a login may take long.
    patience_seconds = 2
    while time.monotonic() < deadline:
        if (boot_id(patience_seconds) or previous) != previous:
            if previous is not None:
                disconnect()
            return
        if time.monotonic() > began + stuck_seconds:
            virsh("reset", NAME)
            began, stuck_seconds = time.monotonic(), 2 * stuck_seconds
        patience_seconds = min(patience_seconds + 1, 30)
        time.sleep(0.3)
    raise GuestError(f"the guest did not answer within {timeout_seconds} s; {console()}")


def reboot() -> None:
    """Shut the guest down in good order, boot it again and wait for it.

    Off and on in place of `systemctl reboot`: qemu's emulator keeps the code it translated across a
    reset, and each boot that finds older boots' code was seen to take 5 s longer than the last.
    """
    run(["systemctl", "poweroff"], check=False)  # the connection may end before the answer
    disconnect()
    deadline = time.monotonic() + 180
    # Between running and this is "in shutdown", when it can not be started.
    while domain_state() != "shut off":
        if time.monotonic() > deadline:
            raise GuestError(f"the guest does not shut down; {console()}")
        time.sleep(0.2)
    _virsh_or_fail("start", NAME)
    wait_for_boot()


def reset() -> None:
    """Pull the guest's plug, put it in again and wait for it: the guest writes nothing out.

    What the guest had flushed to its disk is there afterwards. Graceful towards qemu only: killed,
    it could lose its own bookkeeping of the disk image.
    """
    _virsh_or_fail("destroy", "--graceful", NAME)
    disconnect()
    _virsh_or_fail("start", NAME)
    wait_for_boot()


def _virsh_or_fail(*words: str) -> None:
    done = virsh(*words)
    if done.returncode != 0:
        raise GuestError(f"virsh {' '.join(words)}: {done.stderr.strip()}")


def disconnect() -> None:
    """End the connection that commands share, if there is one."""
    command = in_network("ssh", "-F", _CONFIG, "-O", "exit", "lab")
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)


def console() -> str:
    """Say where the guest's console is written."""
    return f"its console: {LAB / 'logs' / 'console.log'}"
