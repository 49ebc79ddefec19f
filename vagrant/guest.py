"""A machine of the lab from outside: commands over ssh, copies of the tree, reboots and resets.

How a machine is run is its `Power`: by libvirt here, in user mode in user_mode.py. `LAB_GUEST` is
the one machine in which Carver is a service. This module's functions are its methods.
"""

import hashlib
import shlex
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vagrant import files
from vagrant.box import KEY
from vagrant.lab_host import LAB, NAME, PROJECT, console_log, in_network, in_user_mode
from vagrant.power import ByLibvirt, GuestError, Power
from vagrant.user_mode import InUserMode

TREE = "/carver"
# Words that start a program of tests/ in the guest, with all that tests import.
PYTHON = (
    *("env", f"PYTHONPATH={TREE}:{TREE}/tests:{TREE}/tests/support"),
    "/opt/carver/test-venv/bin/python",
)
# More than a boot takes; after a reset it has twice as long. The emulator of qemu 7.2 can loop for
# ever at a breakpoint with which the kernel patched its code (text_poke_bp).
_STUCK_SECONDS = 90


class Guest:
    """One machine, by the name that its host name and what runs it have."""

    def __init__(self, name: str, config: Path, power: Power) -> None:
        """Name the machine, the file in which its ssh configuration is written, and its power."""
        self.name, self.config, self.power = name, config, power
        # A socket's path is limited to 108 bytes; /run is short, and is empty after a reboot.
        # Another checkout's machine of that name has another: a shared connection would lead to it.
        checkout = hashlib.sha256(str(config).encode()).hexdigest()[:8]
        self._socket = f"/run/{name}-{checkout}.ssh"

    def write_ssh_config(self, address: str) -> None:
        """Write the configuration with which any ssh reaches the guest."""
        files.write(
            self.config,
            f"# vagrant/ writes this file: ssh -F {self.config} lab\n"
            "Host lab\n"
            f"  HostName {address}\n"
            "  User root\n"
            f'  IdentityFile "{KEY}"\n'
            "  IdentitiesOnly yes\n"
            # The address is given anew to every box, and nobody is between.
            "  StrictHostKeyChecking no\n"
            "  UserKnownHostsFile /dev/null\n"
            "  LogLevel ERROR\n"
            # A login costs the emulated guest a second and a half; a session on a connection
            # that is open costs much less.
            "  ControlMaster auto\n"
            f"  ControlPath {self._socket}\n"
            "  ControlPersist 600\n"
            # A shared connection to a boot that is over goes away after two minutes at the latest.
            "  ServerAliveInterval 15\n"
            "  ServerAliveCountMax 8\n",
        )

    def address(self) -> str | None:
        """Return the address that the guest has; None where it has none yet."""
        return self.power.address()

    def ssh(self, words: Sequence[str], *options: str) -> list[str]:
        """Say how a command is run in the guest; one word is a shell's line, several are quoted."""
        line = [words[0]] if len(words) == 1 else [shlex.join(words)] if words else []
        return in_network(
            "ssh", "-F", self.config, *options, "lab", *(["--", *line] if line else [])
        )

    def run(
        self,
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
            self.ssh(words),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=check,
        )

    def copy(self, source: str, target: str, *options: str) -> None:
        """Copy files into the guest, removing at the target what the source does not have."""
        shell = shlex.join(["ssh", "-F", str(self.config)])
        command = in_network(
            # A reset may follow at once: without fsync it leaves files of length zero.
            *(
                "rsync",
                "--recursive",
                "--links",
                "--perms",
                "--times",
                "--delete",
                "--fsync",
                *options,
            ),
            *("--rsh", shell, "--", source, f"lab:{target}"),
        )
        subprocess.run(command, check=True)

    def sync(self) -> None:
        """Copy the project's tree to /carver in the guest, without what git ignores.

        Compiled tests are copied nevertheless: pytest compiles a test anew where it finds no file
        of its own version, which takes the emulated guest minutes.
        """
        compiled = "--include=/tests/**/__pycache__/***"
        self.copy(f"{PROJECT}/", TREE, "--exclude=/.git", compiled, "--filter=:- .gitignore")

    def boot_id(self, timeout_seconds: int = 30) -> str | None:
        """Return the id of the guest's present boot, or None if it does not answer."""
        # A connection of its own: a shared one may belong to a boot that is over.
        options = ("-o", "ControlPath=none", "-o", f"ConnectTimeout={timeout_seconds}")
        done = subprocess.run(
            self.ssh(["cat /proc/sys/kernel/random/boot_id"], *options),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip() or None

    @contextmanager
    def revived(self) -> Iterator[None]:
        """Inside, a guest that has run for a while and still has no address is reset."""
        over = threading.Event()

        def watch() -> None:
            began, stuck_seconds = time.monotonic(), _STUCK_SECONDS
            while not over.wait(2):
                if self.power.state() != "running" or self.address() is not None:
                    began = time.monotonic()
                elif time.monotonic() > began + stuck_seconds:
                    self.power.start_again()
                    began, stuck_seconds = time.monotonic(), 2 * stuck_seconds

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()

    def wait_for_boot(
        self,
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
            if (self.boot_id(patience_seconds) or previous) != previous:
                if previous is not None:
                    self.disconnect()
                return
            if time.monotonic() > began + stuck_seconds:
                self.power.start_again()
                began, stuck_seconds = time.monotonic(), 2 * stuck_seconds
            patience_seconds = min(patience_seconds + 1, 30)
            time.sleep(0.3)
        raise GuestError(f"the guest did not answer within {timeout_seconds} s; {self.console()}")

    def reboot(self) -> None:
        """Shut the guest down in good order, boot it again and wait for it.

        The guest is switched off and on in place of `systemctl reboot`: qemu's emulator keeps the
        code that it translated across a reset, and each boot that finds older boots' code was seen
        to take 5 s longer than the last.
        """
        self.run(["systemctl", "poweroff"], check=False)  # the connection may end before the answer
        self.disconnect()
        deadline = time.monotonic() + 180
        # Between running and this is "in shutdown", when it can not be started.
        while self.power.state() != "shut off":
            if time.monotonic() > deadline:
                raise GuestError(f"the guest does not shut down; {self.console()}")
            time.sleep(0.2)
        self.power_on()

    def reset(self) -> None:
        """Pull the guest's plug, put it in again and wait for it: the guest writes nothing out.

        What the guest had flushed to its disk is there afterwards.
        """
        self.power_off()
        self.power_on()

    def power_off(self) -> None:
        """Pull the guest's plug: it writes nothing out."""
        self.power.cut()
        self.disconnect()

    def power_on(self) -> None:
        """Start the guest and wait until it answers."""
        self.power.start()
        self.wait_for_boot()

    def pause(self) -> None:
        """Stop the guest's processors; its memory and connections stay as they are."""
        self.power.pause()

    def resume(self) -> None:
        """Let the guest's processors go on."""
        self.power.resume()

    def disconnect(self) -> None:
        """End the connection that commands share, if there is one."""
        command = in_network("ssh", "-F", self.config, "-O", "exit", "lab")
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)

    def console(self) -> str:
        """Say where the guest's console is written."""
        return f"its console: {console_log(self.name)}"


def guest_of(name: str) -> Guest:
    """Return the guest that is the machine of a name."""
    config = LAB / ("ssh_config" if name == NAME else f"ssh_config.{name}")
    return Guest(name, config, InUserMode(name) if in_user_mode(name) else ByLibvirt(name))


LAB_GUEST = guest_of(NAME)
write_ssh_config = LAB_GUEST.write_ssh_config
address = LAB_GUEST.address
ssh = LAB_GUEST.ssh
run = LAB_GUEST.run
copy = LAB_GUEST.copy
sync = LAB_GUEST.sync
boot_id = LAB_GUEST.boot_id
revived = LAB_GUEST.revived
wait_for_boot = LAB_GUEST.wait_for_boot
reboot = LAB_GUEST.reboot
reset = LAB_GUEST.reset
disconnect = LAB_GUEST.disconnect
console = LAB_GUEST.console
