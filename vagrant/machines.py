"""Machines of one kind in the lab: made of the box by vagrant, booted, and removed.

`Machines` serves the one machine of lab.py and those of a cluster alike. Each kind has a file of
its settings, which the Vagrantfile reads, and vagrant's own record of its machines.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from vagrant import box, host
from vagrant.guest import Guest, GuestError
from vagrant.progress import Step, StepError, step

_LIBVIRT_BOOT = Path("/var/lib/libvirt/boot")
# Beside root and console: the processor may be emulated and shares its host. Side-channel
# mitigations and five-level page tables cost time there, a watchdog mistakes slowness for a hang,
# and any clock but the TSC is a device to emulate.
_COMMAND_LINE = (
    "root=LABEL=carver-lab rw console=ttyS0 loglevel=4 net.ifnames=0 mitigations=off no5lvl"
    " nowatchdog rcupdate.rcu_cpu_stall_suppress=1 tsc=reliable audit=0"
)
# qemu's emulator keeps the code it translated by its address in the guest: a program that lies
# elsewhere each time is translated each time, which took half of an lvm2 command. In one of a dozen
# boots it also kept a breakpoint with which the kernel patches hrtimer_start_range_ns for a moment
# (timers_migration_enabled), and looped there; without nohz that is not patched. `rep movsb` it
# takes a byte at a time: without ERMS the kernel copies by words, four times as fast.
_EMULATED = " norandmaps nohz=off clearcpuid=erms"


class Machines:
    """Machines of one kind: what they have, and which there are."""

    def __init__(self, kind: str, guests: Sequence[Guest], cpus: int, memory_mib: int) -> None:
        """Describe the machines; `kind` names their settings file and vagrant's record of them."""
        self.guests = guests
        self._cpus, self._memory_mib = cpus, memory_mib
        self._settings = host.LAB / f"{kind}.json"
        self._record = host.LAB / kind

    def ensure(self) -> None:
        """Have all machines running, as they are described; quick if they are.

        Raises:
            GuestError: a machine of the name is running that another tree made.

        """
        wanted = self._wanted()
        present = json.loads(self._settings.read_text()) if self._settings.exists() else None
        # Machines may come to those that are there; any other change makes all of them anew.
        same = present is not None and {**present, "machines": []} == {**wanted, "machines": []}
        named = {one["name"] for one in (present or {}).get("machines", [])}
        stopped = [one for one in self.guests if not host.domain_runs(one.name)]
        if same and not stopped and named >= {one.name for one in self.guests}:
            return
        if present is not None and not same:
            with step("the lab's settings changed: remove the old machines", "down") as removing:
                self.remove(removing)
        for guest in self.guests:
            self._remove_if_lost(guest)
        self._settings.write_text(json.dumps(wanted, indent=2))
        what = "the machine" if len(self.guests) == 1 else f"{len(self.guests)} machines"
        with step(f"boot {what} ({wanted['driver']})", "up") as booting:
            if not box.stock():
                self._publish_box(booting, wanted)
            with contextlib.ExitStack() as watched:
                for guest in self.guests:
                    watched.enter_context(guest.revived())
                self._vagrant(booting, "up", "--provider=libvirt")
            for guest in self.guests:
                address = guest.address()
                if address is None:
                    raise GuestError(f"libvirt knows no address of the guest; {guest.console()}")
                guest.write_ssh_config(address)
                guest.wait_for_boot()

    def remove(self, removing: Step) -> None:
        """Remove the machines, and what was recorded of them."""
        for guest in self.guests:
            guest.disconnect()
        with contextlib.suppress(StepError):
            self._vagrant(removing, "destroy", "--force")
        for guest in self.guests:
            # What vagrant lost track of.
            host.virsh("destroy", guest.name)
            host.virsh("undefine", guest.name, "--remove-all-storage")
        host.remove_tree(self._record)
        self._settings.unlink(missing_ok=True)

    def remove_last(self, removing: Step) -> None:
        """Remove the machine that is described last, and no other."""
        last = self.guests[-1]
        last.disconnect()
        self._vagrant(removing, "destroy", "--force", last.name)
        self.guests = self.guests[:-1]
        self._settings.write_text(json.dumps(self._wanted(), indent=2))

    def _wanted(self) -> dict[str, object]:
        """Describe the machines as the Vagrantfile reads it."""
        machines: dict[str, object] = {
            "box": box.name(),
            "driver": host.driver(),
            "cpus": self._cpus,
            "memory": self._memory_mib,
            "keys": [str(box.KEY)],
            "machines": [
                {"name": one.name, "console": str(one.console_log)} for one in self.guests
            ],
        }
        if box.stock():
            machines["keys"] = [str(box.KEY), "/usr/share/vagrant/keys/vagrant"]
            machines["authorize"] = box.KEY.with_suffix(".pub").read_text().strip()
        else:
            # Beside libvirt's images, for qemu's user may not enter a home folder.
            machines["kernel"] = str(_LIBVIRT_BOOT / f"{box.name()}-vmlinuz")
            machines["initrd"] = str(_LIBVIRT_BOOT / f"{box.name()}-initrd.img")
            emulated = machines["driver"] == "qemu"
            machines["command_line"] = _COMMAND_LINE + (_EMULATED if emulated else "")
        return machines

    def _remove_if_lost(self, guest: Guest) -> None:
        """Remove a machine of the name that this tree's vagrant did not make, or does not know.

        A tree that was removed, or an `up` that was killed, leaves one, and vagrant would refuse
        the name.

        Raises:
            GuestError: such a machine is running, so it may be in use from another tree.

        """
        mine = self._record / "machines" / guest.name / "libvirt" / "id"
        domain = host.domain_uuid(guest.name)
        if not domain or (mine.exists() and mine.read_text().strip() == domain):
            return
        if host.domain_runs(guest.name):
            raise GuestError(
                f"a machine {guest.name} of another tree is running: end it there, or by "
                f"`virsh destroy {guest.name}`"
            )
        with step("remove a machine that was left", "down") as removing:
            self.remove(removing)

    def _publish_box(self, booting: Step, machines: dict[str, object]) -> None:
        """Give the box to vagrant, and its kernel to libvirt."""
        name = str(machines["box"])
        boxes = host.LAB / "vagrant" / "boxes"
        if not (boxes / name).exists():
            host.remove_tree(boxes)
            archive = str(box.folder() / "lab.box")
            self._vagrant(booting, "box", "add", "--force", "--name", name, archive)
            host.remove_volumes(host.NAME, keep=name)
        for file_name, target in (("vmlinuz", "kernel"), ("initrd.img", "initrd")):
            source = box.folder() / file_name
            booting.run(*host.as_root("install", "-D", "-m", "644", source, str(machines[target])))

    def _vagrant(self, within: Step, *words: str) -> None:
        environment = {
            "VAGRANT_HOME": host.LAB / "vagrant",
            "VAGRANT_DOTFILE_PATH": self._record,
            "VAGRANT_CWD": host.PROJECT / "vagrant",
            "VAGRANT_CHECKPOINT_DISABLE": "1",
            "CARVER_LAB_MACHINES": self._settings,
        }
        settings = [f"{name}={value}" for name, value in environment.items()]
        within.run(*host.in_network("env", *settings, "vagrant", *words, "--no-color", "--no-tty"))


def prepare() -> None:
    """Have the host's packages, the box and libvirt; quick if all is there."""
    if missing := host.missing_packages():
        with step(f"install {len(missing)} Debian packages", "apt") as apt:
            host.install_packages(apt, missing)
    box.make_key()
    if not box.stock() and not box.is_built():
        with step("download the guest's wheels", "wheels") as fetching:
            box.fetch_wheels(fetching)
        with step("build the box", "box") as building:
            box.build(building)
    if not host.libvirt_answers():
        with step("start libvirt", "libvirt") as starting:
            host.start_libvirt(starting)


@contextlib.contextmanager
def locked(kind: str) -> Iterator[None]:
    """Let one change of a kind's machines happen at a time."""
    host.LAB.mkdir(exist_ok=True)
    name = "lock" if kind == "machine" else f"{kind}.lock"
    with (host.LAB / name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def setting(name: str, default: int) -> int:
    """Read a whole number from the environment."""
    return int(os.environ.get(name, str(default)))
