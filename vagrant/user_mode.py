"""A machine of the lab without libvirt: Debian's kernel as a program of the host.

User-mode Linux is the kernel built for its own processes: a guest's programs run on the host's
processor as they are, and only their system calls are its kernel's. So it needs no virtualization,
and where there is none a guest computes twenty times as fast as one that qemu emulates; a new
process costs a third. Device-mapper, loop devices, overlays, cgroups and netfilter are
those of Debian's kernel. A guest has one processor, and no controller `cpuset`.

`InUserMode` runs one; machines_in_user_mode.py makes and removes them. See
https://docs.kernel.org/virt/uml/user_mode_linux_howto_v2.html, and Debian's package
user-mode-linux.
"""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

from vagrant import files, lab_host
from vagrant.power import GuestError, Power

BRIDGE, BRIDGE_ADDRESS, _NETWORK = "user-mode", "10.98.0.1", "10.98.0"
# What a machine was made of: its base and its MiB of memory.
MADE_OF = "made-of.json"
_CONSOLE = "con=null con0=null,fd:1 ssl=null loglevel=4"


# The machines that this process started, by their names: Python warns of a program that still runs
# when nothing refers to it any more.
_started: dict[str, subprocess.Popen[bytes]] = {}


class InUserMode(Power):
    """A machine in user mode. Its folder has its disk, which is what differs from the box's."""

    @property
    def folder(self) -> Path:
        """Where its disk is, and the file of what it was made of."""
        return folder() / self.name

    @property
    def _number(self) -> int:
        """Which machine of its family it is, and 0 without one; its address has it, too."""
        found = re.search(r"[0-9]+$", self.name)
        return int(found[0]) if found else 0

    @property
    def _ids(self) -> Path:
        """Where its kernel writes the id of its process."""
        return folder() / "ids" / self.name

    @property
    def _tap(self) -> str:
        return f"user-mode-{self._number}"

    def address(self) -> str | None:
        """Return the address that its kernel is given."""
        return f"{_NETWORK}.{self._number + 10}"

    def state(self) -> str:
        """`running`, `paused` or `shut off`; empty without a machine."""
        if (pid := self._pid()) is not None:
            status = files.read_text(Path(f"/proc/{pid}/status"))
            return "paused" if re.search(r"^State:\s+[Tt]", status, re.M) else "running"
        return "shut off" if self.folder.exists() else ""

    def start(self) -> None:
        """Start a machine that is off."""
        made_of = files.read_json(self.folder / MADE_OF)
        if made_of is None:
            raise GuestError(f"{self.folder} does not say what {self.name} is made of")
        if (pid := self._pid()) is not None:
            raise GuestError(f"machine {self.name} runs: its process is {pid}")
        self._link()
        # A kernel whose id another one has left takes an id of its own invention.
        lab_host.remove_tree(self._ids)
        words = [
            *("setsid", "env", f"TMPDIR={_memory()}"),
            *("taskset", "--cpu-list", str(processor(self._number)), lab_host.USER_MODE),
            *(f"umid={self.name}", f"uml_dir={folder() / 'ids'}", f"mem={made_of['memory']}M"),
            *(f"ubd0={self.folder / 'disk.cow'},{made_of['base']}", "root=/dev/ubda", "rw"),
            f"vec0:transport=tap,ifname={self._tap},depth=128,gro=1,mac={self._mac}",
            # systemd gives the machine its address and its name by these.
            f"ip={self.address()}::{BRIDGE_ADDRESS}:255.255.255.0:{self.name}:vec0:none",
            *(f"systemd.hostname={self.name}", "audit=0", *_CONSOLE.split()),
        ]
        with lab_host.console_log(self.name).open("ab") as console:
            if (earlier := _started.pop(self.name, None)) is not None:
                earlier.poll()
            _started[self.name] = subprocess.Popen(
                lab_host.in_network(*words),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def cut(self) -> None:
        """End every process of the machine at once; what it wrote to its disk is there."""
        if (pid := self._pid()) is None:
            return
        # Its programs are processes of the same session, which nobody would end with it.
        _signal(f"-{os.getpgid(pid)}", signal.SIGKILL)
        self._until("shut off", "")

    def start_again(self) -> None:
        """Start a machine anew that hangs."""
        self.cut()
        self.start()

    def pause(self) -> None:
        """Stop its kernel; a program that runs meanwhile waits at its next system call."""
        _signal(str(self._running()), signal.SIGSTOP)
        self._until("paused")

    def resume(self) -> None:
        """Let its kernel go on."""
        _signal(str(self._running()), signal.SIGCONT)
        self._until("running")

    def remove(self) -> None:
        """End the machine, and remove its disk and its network card."""
        self.cut()
        if lab_host.has_network():
            ip("link", "delete", self._tap, check=False)
        lab_host.remove_tree(self.folder)

    @property
    def _mac(self) -> str:
        # Of those that may be given by hand (IEEE 802, U/L bit).
        return f"02:00:0a:62:00:{self._number + 10:02x}"

    def _link(self) -> None:
        """Have its network card on the lab's bridge."""
        if not ip("link", "show", self._tap, check=False):
            ip("tuntap", "add", "dev", self._tap, "mode", "tap")
        ip("link", "set", self._tap, "master", BRIDGE, "up")

    def _pid(self) -> int | None:
        """The id of its kernel's process, while that runs."""
        text = files.read_text(self._ids / "pid").strip()
        if not text.isdigit():
            return None
        # Another process may have the id by now.
        words = files.read_text(Path(f"/proc/{text}/cmdline")).split("\0")
        return int(text) if f"umid={self.name}" in words else None

    def _until(self, *states: str) -> None:
        """Wait for what a signal does: it has been sent, and may not have arrived."""
        deadline = time.monotonic() + 60
        while (found := self.state()) not in states:
            if time.monotonic() > deadline:
                raise GuestError(f"machine {self.name} is {found}, not {states[0]}")
            time.sleep(0.1)

    def _running(self) -> int:
        if (pid := self._pid()) is None:
            raise GuestError(f"machine {self.name} does not run")
        return pid


def folder() -> Path:
    """Where the machines are."""
    return lab_host.LAB / "user-mode"


def processor(number: int) -> int:
    """The host's processor on which a machine of that number runs.

    Its kernel and its programs take turns at each system call: on one processor that is a switch,
    on two an interrupt, and a new process takes three times as long.
    """
    usable = sorted(os.sched_getaffinity(0))
    return usable[number % len(usable)]


def _memory() -> str:
    """Where the machines' memory is: a file system that is in memory itself."""
    return os.environ.get("TMPDIR") or "/dev/shm"  # noqa: S108


def ip(*words: str, check: bool = True) -> bool:
    """Configure the lab's network as ip-link(8) and its like do; tell whether that succeeded."""
    command = lab_host.in_network("ip", *words)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise GuestError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.returncode == 0


def _signal(pid: str, number: signal.Signals) -> None:
    subprocess.run(lab_host.as_root("kill", f"-{number.value}", "--", pid), check=True)
