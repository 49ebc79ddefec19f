"""Machines of one kind in user mode (user_mode.py): made of the box, booted, and removed.

What `Machines` is to libvirt's machines.
"""

import contextlib
import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from vagrant import box, files, lab_host
from vagrant.guest import Guest, guest_of
from vagrant.machines import locked
from vagrant.steps import Step, step
from vagrant.user_mode import BRIDGE, BRIDGE_ADDRESS, MADE_OF, InUserMode, folder, ip

_MODULES = Path("/usr/lib/uml/modules")
# The kernel that a guest's programs see maps each page by itself (mmap(2) on the host), and a Go
# program of some size has more than the usual 65,530 of them.
_MAPS = 1 << 20


class UserModeMachines:
    """Machines in user mode: what they have, and which there are. See `Machines`."""

    def __init__(self, guests: Sequence[Guest], memory_mib: int, family: str = "") -> None:
        """Describe the machines; others of the family, a name and a number, are theirs too."""
        self.guests = [*guests]
        self._memory_mib, self._family = memory_mib, family

    @property
    def is_left(self) -> bool:
        """Whether there is a machine."""
        return bool(self.there())

    def there(self) -> list[str]:
        """Name the machines that there are."""
        described = {one.name for one in self.guests}
        numbered = re.compile(rf"{re.escape(self._family)}[0-9]+")
        return [
            name
            for name in sorted(one.name for one in folder().glob("*"))
            if name in described or (self._family and numbered.fullmatch(name))
        ]

    def fit(self) -> list[str]:
        """Remove machines that are not described, or are made of another box; name those left."""
        described, made_of = {one.name for one in self.guests}, self._made_of()
        there = self.there()
        staying = [
            name
            for name in there
            if name in described and files.read_json(folder() / name / MADE_OF) == made_of
        ]
        if gone := [name for name in there if name not in staying]:
            with step(f"remove {', '.join(gone)}: not as it is wanted any more", "down"):
                for name in gone:
                    _remove(name)
        return staying

    def ensure(self) -> None:
        """Have all machines running, as they are described; quick if they are."""
        with self.running():
            self.fit()
            off = [one for one in self.guests if one.power.state() not in ("running", "paused")]
            if off:
                self._boot(off, self._made_of())

    def _boot(self, guests: Sequence[Guest], made_of: Mapping[str, object]) -> None:
        """Boot machines that are off, or are not there yet."""
        what = "the machine" if len(guests) == 1 else f"{len(guests)} machines"
        with step(f"boot {what} (user mode)", "up") as booting:
            _raise_maps(booting)
            if not Path(str(made_of["base"])).exists():
                _make_base(booting)
            for guest in guests:
                (folder() / guest.name).mkdir(parents=True, exist_ok=True)
                files.write(folder() / guest.name / MADE_OF, json.dumps(made_of))
                guest.write_ssh_config(str(guest.address()))
                guest.power.start()
            for guest in guests:
                guest.wait_for_boot()

    def add(self, guest: Guest) -> None:
        """Boot one more machine like the others; one that was left of that name is made anew.

        The others stay as they are: a program that adds a machine may have other variables in its
        environment, or another box by now.
        """
        _remove(guest.name)
        others = (files.read_json(folder() / one.name / MADE_OF) for one in self.guests)
        made_of = next((one for one in others if one is not None), self._made_of())
        self.guests = [*self.guests, guest]
        with self.running():
            self._boot([guest], made_of)

    def drop(self, name: str) -> None:
        """Remove one machine, and no other."""
        _remove(name)
        self.guests = [one for one in self.guests if one.name != name]

    def remove(self, removing: Step) -> None:
        """Remove every machine."""
        del removing
        for name in self.there():
            _remove(name)

    def down(self, what: str) -> None:
        """Remove the machines, and the network where no other machine is in it."""
        with locked("libvirt"):
            with step(f"remove {what}", "down") as removing:
                self.remove(removing)
            lab_host.stop_libvirt()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Have the network of the machines, and let no other program of this tree end it."""
        with locked("libvirt"):
            if not (lab_host.has_network() and ip("link", "show", BRIDGE, check=False)):
                with step("make the lab's network", "network") as making:
                    lab_host.make_network(making)
                    ip("link", "add", BRIDGE, "type", "bridge")
                    ip("address", "add", f"{BRIDGE_ADDRESS}/24", "dev", BRIDGE)
                    ip("link", "set", BRIDGE, "up")
                    # The nodes' pods reach each other by the host's routes.
                    making.run(*lab_host.in_network("sysctl", "--write", "net.ipv4.ip_forward=1"))
            yield

    def _made_of(self) -> dict[str, object]:
        return {"base": str(_base()), "memory": self._memory_mib}


def _remove(name: str) -> None:
    guest_of(name).disconnect()
    InUserMode(name).remove()


def _box() -> str:
    """The name of the box; raises HostError for one that is not of the lab's own recipe."""
    if box.stock():
        raise lab_host.HostError("a stock box does not run in user mode: leave out CARVER_LAB_BOX")
    return box.name()


def _kernel() -> str:
    """The version of the kernel, which its modules' folder has; there is one in the package."""
    [found] = sorted(one.name for one in _MODULES.iterdir())
    return found


def _base() -> Path:
    """The box's disk, with the kernel's modules in it."""
    return lab_host.LAB / f"{_box()}-{_kernel()}.raw"


_PUT_MODULES = """
mount -o loop "$1" "$2"
trap 'umount "$2"' EXIT
mkdir -p "$2/lib/modules"
cp -a "$3" "$2/lib/modules/"
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
    # A machine's disk has only what differs from its base: also one that is off needs that.
    made_of = [files.read_json(one) or {} for one in folder().glob(f"*/{MADE_OF}")]
    needed = {one.get("base") for one in made_of}
    for old in lab_host.LAB.glob(f"{lab_host.NAME}-*.raw"):
        if str(old) not in needed:
            old.unlink()
    part = base.with_suffix(".part")
    image, mounted = base.with_suffix(".img"), base.with_suffix(".mount")
    with image.open("wb") as unpacked:
        words = ["tar", "--extract", "--to-stdout", f"--file={box.folder() / 'lab.box'}", "box.img"]
        subprocess.run(words, check=True, stdout=unpacked)
    making.run("qemu-img", "convert", "-O", "raw", image, part)
    image.unlink()
    mounted.mkdir(exist_ok=True)
    making.run(
        *lab_host.as_root("sh", "-ec", _PUT_MODULES, "sh", part, mounted, _MODULES / _kernel())
    )
    mounted.rmdir()
    part.rename(base)


def _raise_maps(raising: Step) -> None:
    if int(Path("/proc/sys/vm/max_map_count").read_text()) < _MAPS:
        raising.run(*lab_host.as_root("sysctl", "--write", f"vm.max_map_count={_MAPS}"))
