"""Machines of a cluster without libvirt: Debian's kernel as a program of the host.

User-mode Linux is the kernel built for its own processes: a guest's programs run on the host's
processor as they are, and only their system calls are its kernel's. So it needs no virtualization,
and where there is none a guest computes twenty times as fast as one that qemu emulates; a new
process costs as much in both. Device-mapper, loop devices, overlays, cgroups and netfilter are
those of Debian's kernel. A guest has one processor, and no controller `cpuset`.

`UserModeMachines` is to these what `Machines` is to libvirt's, and `UserModeGuest` is a `Guest`.
See https://docs.kernel.org/virt/uml/user_mode_linux_howto_v2.html, and Debian's package
user-mode-linux.
"""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from vagrant import box, files, host
from vagrant.guest import Guest, GuestError, guest_of
from vagrant.machines import locked
from vagrant.progress import Step, step

PACKAGE = "user-mode-linux"
_MODULES = Path("/usr/lib/uml/modules")
_BRIDGE, _BRIDGE_ADDRESS, _NETWORK = "user-mode", "10.98.0.1", "10.98.0"
# The kernel that a guest's programs see maps each page by itself (mmap(2) on the host), and a Go
# program of some size has more than the usual 65,530 of them.
_MAPS = 1 << 20
_CONSOLE = "con=null con0=null,fd:1 ssl=null loglevel=4"


class UserModeGuest(Guest):
    """A machine in user mode. Its folder has its disk, which is what differs from the box's."""

    def __init__(self, name: str, config: Path, number: int, memory_mib: int) -> None:
        """Describe a machine; its address and its network card's name have the number."""
        super().__init__(name, config)
        self._number, self._memory_mib = number, memory_mib

    @property
    def folder(self) -> Path:
        """Where its disk is, and the file with its process's id."""
        return _folder() / self.name

    @property
    def _tap(self) -> str:
        return f"user-mode-{self._number}"

    def address(self) -> str | None:
        """Return the address that its kernel is given."""
        return f"{_NETWORK}.{self._number + 10}"

    @contextlib.contextmanager
    def revived(self) -> Iterator[None]:
        """Nothing is to be watched: a boot does not hang in an emulator."""
        yield

    def state(self) -> str:
        """`running`, `paused` or `shut off`; empty without a machine."""
        if (pid := self._pid()) is not None:
            status = files.read_text(Path(f"/proc/{pid}/status"))
            return "paused" if re.search(r"^State:\s+[Tt]", status, re.M) else "running"
        return "shut off" if self.folder.exists() else ""

    def start(self) -> None:
        """Start a machine that is off."""
        self._link()
        words = [
            *("setsid", "env", f"TMPDIR={_memory()}", host.USER_MODE),
            *(f"umid={self.name}", f"uml_dir={_folder() / 'ids'}", f"mem={self._memory_mib}M"),
            *(f"ubd0={self.folder / 'disk.cow'},{_base()}", "root=/dev/ubda", "rw"),
            f"vec0:transport=tap,ifname={self._tap},depth=128,gro=1,mac={self._mac}",
            # systemd gives the machine its address and its name by these.
            f"ip={self.address()}::{_BRIDGE_ADDRESS}:255.255.255.0:{self.name}:vec0:none",
            *(f"systemd.hostname={self.name}", "audit=0", *_CONSOLE.split()),
        ]
        with self.console_log.open("ab") as console:
            subprocess.Popen(
                host.in_network(*words),
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
        deadline = time.monotonic() + 60
        while self._pid() is not None:
            if time.monotonic() > deadline:
                raise GuestError(f"process {pid} of {self.name} does not end")
            time.sleep(0.1)

    def start_again(self) -> None:
        """Start a machine anew that hangs."""
        self.cut()
        self.start()

    def pause(self) -> None:
        """Stop its kernel; a program that runs meanwhile waits at its next system call."""
        _signal(str(self._running()), signal.SIGSTOP)

    def resume(self) -> None:
        """Let its kernel go on."""
        _signal(str(self._running()), signal.SIGCONT)

    def remove(self) -> None:
        """End the machine, and remove its disk and its network card."""
        self.disconnect()
        self.cut()
        _ip("link", "delete", self._tap, check=False)
        host.remove_tree(self.folder)

    @property
    def _mac(self) -> str:
        # Of those that may be given by hand (IEEE 802, U/L bit).
        return f"02:00:0a:62:00:{self._number + 10:02x}"

    def _link(self) -> None:
        """Have its network card on the lab's bridge."""
        if not _ip("link", "show", self._tap, check=False):
            _ip("tuntap", "add", "dev", self._tap, "mode", "tap")
        _ip("link", "set", self._tap, "master", _BRIDGE, "up")

    def _pid(self) -> int | None:
        """The id of its kernel's process, while that runs."""
        text = files.read_text(_folder() / "ids" / self.name / "pid").strip()
        # Another process may have the id after a reboot of the host.
        known = text.isdigit() and f"umid={self.name}" in files.read_text(
            Path(f"/proc/{text}/cmdline")
        ).split("\0")
        return int(text) if known else None

    def _running(self) -> int:
        if (pid := self._pid()) is None:
            raise GuestError(f"machine {self.name} does not run")
        return pid


class UserModeMachines:
    """Machines in user mode: what they have, and which there are. See `Machines`."""

    def __init__(self, guests: Sequence[Guest], memory_mib: int, family: str) -> None:
        """Describe the machines; others of the family, a name and a number, are theirs too."""
        self.guests = [*guests]
        self._memory_mib, self._family = memory_mib, family

    def there(self) -> list[str]:
        """Name the machines that there are."""
        return sorted(one.name for one in _folder().glob(f"{self._family}*"))

    def fit(self) -> list[str]:
        """Remove machines that are not described, or of another box; name those that stay."""
        described = {one.name for one in self.guests}
        staying = [
            name
            for name in self.there()
            if name in described and files.read_text(_folder() / name / "made") == self._made_of()
        ]
        if gone := [name for name in self.there() if name not in staying]:
            with step(f"remove {', '.join(gone)}: not as it is wanted any more", "down"):
                for name in gone:
                    self._of(name).remove()
        return staying

    def ensure(self) -> None:
        """Have all machines running, as they are described; quick if they are."""
        self.fit()
        off = [one for one in self.guests if one.state() not in ("running", "paused")]
        if not off:
            return
        with step(f"boot {len(off)} machines (in user mode)", "up") as booting:
            for guest in off:
                self._boot(booting, self._of(guest.name))
            for guest in off:
                guest.wait_for_boot()

    def add(self, guest: Guest) -> None:
        """Boot one more machine like the others; one that was left of that name is made anew."""
        self._of(guest.name).remove()
        self.guests = [*self.guests, guest]
        self.ensure()

    def drop(self, name: str) -> None:
        """Remove one machine, and no other."""
        self._of(name).remove()
        self.guests = [one for one in self.guests if one.name != name]

    def remove(self, removing: Step) -> None:
        """Remove every machine."""
        del removing
        for name in self.there():
            self._of(name).remove()

    def down(self, what: str) -> None:
        """Remove the machines, and the network where no other machine is in it."""
        with locked("libvirt"):
            with step(f"remove {what}", "down") as removing:
                self.remove(removing)
            if host.has_network():
                _ip("link", "delete", _BRIDGE, check=False)
            host.stop_libvirt()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Have the network of the machines, and let no other program of this tree end it."""
        with locked("libvirt"):
            if not (host.has_network() and _ip("link", "show", _BRIDGE, check=False)):
                with step("make the lab's network", "network") as making:
                    host.make_network(making)
                    _ip("link", "add", _BRIDGE, "type", "bridge")
                    _ip("address", "add", f"{_BRIDGE_ADDRESS}/24", "dev", _BRIDGE)
                    _ip("link", "set", _BRIDGE, "up")
                    # The nodes' pods reach each other by the host's routes.
                    making.run(*host.in_network("sysctl", "--write", "net.ipv4.ip_forward=1"))
            yield

    def _of(self, name: str) -> UserModeGuest:
        number = int(name.removeprefix(self._family))
        return user_mode_guest(self._family, number, self._memory_mib)

    def _boot(self, booting: Step, guest: UserModeGuest) -> None:
        """Start a machine; one that is new has what the box has."""
        _raise_maps(booting)
        _make_base(booting)
        guest.folder.mkdir(parents=True, exist_ok=True)
        files.write(guest.folder / "made", self._made_of())
        guest.write_ssh_config(str(guest.address()))
        guest.start()

    def _made_of(self) -> str:
        return f"{_base().name} {self._memory_mib}"


def user_mode_guest(family: str, number: int, memory_mib: int) -> UserModeGuest:
    """Return the machine of a family that has a number."""
    name = f"{family}{number}"
    return UserModeGuest(name, guest_of(name).config, number, memory_mib)


def _folder() -> Path:
    """Where the machines are."""
    return host.LAB / "user-mode"


def _memory() -> str:
    """Where the machines' memory is: a file system that is in memory itself."""
    return os.environ.get("TMPDIR") or "/dev/shm"  # noqa: S108


def _kernel() -> str:
    """The version of the kernel, which its modules' folder has; there is one in the package."""
    [found] = sorted(one.name for one in _MODULES.iterdir())
    return found


def _base() -> Path:
    """The box's disk, with the kernel's modules in it."""
    return host.LAB / f"{box.name()}-{_kernel()}.raw"


_PUT_MODULES = """
mount -o loop "$1" "$2"
trap 'umount "$2"' EXIT
mkdir -p "$2/lib/modules"
cp -a "/usr/lib/uml/modules/$3" "$2/lib/modules/"
# It makes network units of the kernel's command line.
mkdir -p "$2/etc/systemd/system/sysinit.target.wants"
ln -sf /lib/systemd/system/systemd-network-generator.service \\
    "$2/etc/systemd/system/sysinit.target.wants/"
"""


def _make_base(making: Step) -> None:
    """Make the disk on which those of all machines are built, once for each box and kernel."""
    base = _base()
    if base.exists():
        return
    for old in host.LAB.glob(f"{host.NAME}-*.raw"):
        old.unlink()
    part = base.with_suffix(".part")
    image, mounted = base.with_suffix(".img"), base.with_suffix(".mount")
    with image.open("wb") as unpacked:
        words = ["tar", "--extract", "--to-stdout", f"--file={box.folder() / 'lab.box'}", "box.img"]
        subprocess.run(words, check=True, stdout=unpacked)
    making.run("qemu-img", "convert", "-O", "raw", image, part)
    image.unlink()
    mounted.mkdir(exist_ok=True)
    making.run(*host.as_root("sh", "-ec", _PUT_MODULES, "sh", part, mounted, _kernel()))
    mounted.rmdir()
    part.rename(base)


def _raise_maps(raising: Step) -> None:
    if int(Path("/proc/sys/vm/max_map_count").read_text()) < _MAPS:
        raising.run(*host.as_root("sysctl", "--write", f"vm.max_map_count={_MAPS}"))


def _ip(*words: str, check: bool = True) -> bool:
    """Run ip(8) in the lab's network; whether it succeeded."""
    command = host.in_network("ip", *words)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise GuestError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.returncode == 0


def _signal(pid: str, number: signal.Signals) -> None:
    subprocess.run(host.as_root("kill", f"-{number.value}", "--", pid), check=True)
