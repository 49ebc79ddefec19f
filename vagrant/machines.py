"""Machines of one kind in the lab: made of the box by vagrant, booted, and removed.

`Machines` serves the one machine of lab.py and those of a cluster alike. Each kind has a file of
its settings, which the Vagrantfile reads, and vagrant's own record of its machines.
"""

import contextlib
import fcntl
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from vagrant import box, files, lab_host
from vagrant.guest import Guest, guest_of
from vagrant.power import GuestError
from vagrant.steps import Step, StepError, step

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
_EMULATED = " norandmaps nohz=off clearcpuid=erms init_on_alloc=0"


class Machines:
    """Machines of one kind: what they have, and which there are."""

    def __init__(
        self, kind: str, guests: Sequence[Guest], cpus: int, memory_mib: int, family: str = ""
    ) -> None:
        """Describe the machines; `kind` names their settings file and vagrant's record of them.

        A name that is `family` and a number is of this kind, too: a machine that was described
        before, or was added.
        """
        self.guests = [*guests]
        self._cpus, self._memory_mib = cpus, memory_mib
        self._family = family
        self._settings = lab_host.LAB / f"{kind}.json"
        self._record = lab_host.LAB / kind

    def ensure(self) -> None:
        """Have all machines running, as they are described; quick if they are.

        Raises:
            GuestError: a machine of the name is in use that another tree made.

        """
        with libvirt():
            staying = self.fit()
            if all(one.name in staying and lab_host.domain_runs(one.name) for one in self.guests):
                self._write_settings()
            else:
                self._boot(self.guests)

    def fit(self) -> list[str]:
        """Remove each machine that is not as it is described; name those that stay.

        All are removed where their settings changed. Otherwise those are that are not described any
        more, and those that a removed tree or a killed `up` left: vagrant would refuse their names.

        Raises:
            GuestError: a machine of the name is in use that another tree made.

        """
        there = self.there()
        mine = self._mine(there)
        if self._described() != self._wanted():
            if there:
                with step("the lab's settings changed: remove the machines", "down") as removing:
                    self.remove(removing)
            self._settings.unlink(missing_ok=True)
            return []
        described = {one.name for one in self.guests}
        staying = [name for name in there if name in described and name in mine]
        if gone := [name for name in there if name not in staying]:
            with step(f"remove {', '.join(gone)}: not known, or not wanted any more", "down"):
                for name in gone:
                    self._remove_one(name)
        return staying

    def add(self, guest: Guest) -> None:
        """Boot one more machine like the others; one that was left of that name is made anew."""
        if self._described()["box"] != box.name():
            raise GuestError("the machines are of another box: make them anew before one is added")
        with libvirt():
            self._mine(there := self.there())
            if guest.name in there:
                self._remove_one(guest.name)
            self.guests = [*self.guests, guest]
            self._boot([guest])

    def drop(self, name: str) -> None:
        """Remove one machine, and no other."""
        self._mine(there := self.there())
        if name in there:
            self._remove_one(name)
        self.guests = [one for one in self.guests if one.name != name]
        self._write_settings()

    def down(self, what: str) -> None:
        """Remove the machines; stop libvirt where it is the lab's and serves no other one.

        libvirt is started where it may have machines and does not answer, as after a reboot.

        Raises:
            GuestError: a machine is in use that another tree made, or could not be removed.
            StepError: libvirt does not start.

        """
        with locked("libvirt"):
            if self.is_left or lab_host.has_network():
                _ensure_libvirt()
            if lab_host.libvirt_answers():
                with step(f"remove {what}", "down") as removing:
                    self.remove(removing)
            lab_host.stop_libvirt()

    def remove(self, removing: Step) -> None:
        """Remove the machines of this kind, also those not described, and what was recorded."""
        there = self.there()
        self._mine(there)
        for name in there:
            guest_of(name).disconnect()
        with contextlib.suppress(StepError):
            self._vagrant(removing, "destroy", "--force")
        for name in self.there():
            self._remove_one(name)
        lab_host.remove_tree(self._record)
        self._settings.unlink(missing_ok=True)

    @property
    def is_left(self) -> bool:
        """Whether something of the machines is recorded."""
        return self._record.exists() or self._settings.exists()

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Have libvirt running, and let no other program of this tree stop it meanwhile."""
        return libvirt()

    def there(self) -> list[str]:
        """Name the machines of this kind that libvirt knows."""
        described = {one.name for one in self.guests}
        numbered = re.compile(rf"{re.escape(self._family)}[0-9]+")
        return [
            name
            for name in lab_host.domains()
            if name in described or (self._family and numbered.fullmatch(name))
        ]

    def _mine(self, names: Sequence[str]) -> set[str]:
        """Name those of the machines that this tree's vagrant made.

        Raises:
            GuestError: one that it did not make is not switched off, so it may be in use from
                another tree.

        """
        mine = set()
        for name in names:
            recorded = files.read_text(self._record / "machines" / name / "libvirt" / "id").strip()
            if recorded and recorded == lab_host.domain_uuid(name):
                mine.add(name)
            elif lab_host.domain_state(name) not in ("shut off", "crashed"):
                raise GuestError(
                    f"a machine {name} of another tree is running: end it there, or by "
                    f"`virsh destroy {name}`"
                )
        return mine

    def _remove_one(self, name: str) -> None:
        """Remove a machine with its disk, and vagrant's record of it."""
        guest_of(name).disconnect()
        lab_host.virsh("destroy", name)
        lab_host.virsh("undefine", name, "--managed-save", "--remove-all-storage")
        if name in lab_host.domains():
            raise GuestError(f"libvirt does not remove machine {name}: try `virsh undefine {name}`")
        lab_host.remove_tree(self._record / "machines" / name)

    def _boot(self, guests: Sequence[Guest]) -> None:
        """Make and boot machines, those of them that do not run."""
        settings = self._described()
        what = "the machine" if len(guests) == 1 else f"{len(guests)} machines"
        with step(f"boot {what} ({settings['driver']})", "up") as booting:
            self._write_settings()
            there = self.there()
            for guest in guests:
                if guest.name not in there:
                    # A killed vagrant leaves a disk without a machine, and refuses it.
                    lab_host.virsh("vol-delete", "--pool", "default", f"{guest.name}.img")
            if not box.stock():
                self._publish_box(booting, settings)
            # vagrant takes a copy of the box that a kill cut short for a whole one.
            if files.read_text(_uploaded()) != box.name():
                lab_host.remove_box_images()
            _uploaded().unlink(missing_ok=True)
            with contextlib.ExitStack() as watched:
                for guest in guests:
                    watched.enter_context(guest.revived())
                names = [one.name for one in guests]
                self._vagrant(booting, "up", "--provider=libvirt", *names)
            files.write(_uploaded(), box.name())
            for guest in guests:
                address = guest.address()
                if address is None:
                    raise GuestError(f"libvirt knows no address of the guest; {guest.console()}")
                guest.write_ssh_config(address)
                guest.wait_for_boot()

    def _write_settings(self) -> None:
        files.write(self._settings, json.dumps(self._described(), indent=2))

    def _described(self) -> dict[str, object]:
        """Describe the machines with the settings that they were made with, where there are such.

        A program that adds a machine may have other variables in its environment.
        """
        wanted = self._wanted()
        return {**(files.read_json(self._settings) or wanted), "machines": wanted["machines"]}

    def _wanted(self) -> dict[str, object]:
        """Describe the machines as the Vagrantfile reads it."""
        machines: dict[str, object] = {
            "box": box.name(),
            "driver": lab_host.driver(),
            "cpus": self._cpus,
            "memory": self._memory_mib,
            "keys": [str(box.KEY)],
            "machines": [
                {"name": one.name, "console": str(lab_host.console_log(one.name))}
                for one in self.guests
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

    def _publish_box(self, booting: Step, machines: dict[str, object]) -> None:
        """Give the box to vagrant, and its kernel to libvirt."""
        name = str(machines["box"])
        boxes = lab_host.LAB / "vagrant" / "boxes"
        if not (boxes / name).exists():
            lab_host.remove_tree(boxes)
            archive = str(box.folder() / "lab.box")
            self._vagrant(booting, "box", "add", "--force", "--name", name, archive)
        for file_name, target in (("vmlinuz", "kernel"), ("initrd.img", "initrd")):
            source = box.folder() / file_name
            booting.run(
                *lab_host.as_root("install", "-D", "-m", "644", source, str(machines[target]))
            )

    def _vagrant(self, within: Step, *words: str) -> None:
        environment = {
            "VAGRANT_HOME": lab_host.LAB / "vagrant",
            "VAGRANT_DOTFILE_PATH": self._record,
            "VAGRANT_CWD": lab_host.PROJECT / "vagrant",
            "VAGRANT_CHECKPOINT_DISABLE": "1",
            "CARVER_LAB_MACHINES": self._settings,
        }
        settings = [f"{name}={value}" for name, value in environment.items()]
        within.run(
            *lab_host.in_network("env", *settings, "vagrant", *words, "--no-color", "--no-tty")
        )


def _uploaded() -> Path:
    """Return the file that names the box of which libvirt has a whole copy."""
    return lab_host.LAB / "uploaded"


def prepare(*, in_user_mode: bool) -> None:
    """Have the host's packages and the box; quick if all is there."""
    if missing := lab_host.missing_packages(in_user_mode=in_user_mode):
        with step(f"install {len(missing)} Debian packages", "apt") as apt:
            lab_host.install_packages(apt, missing)
    box.make_key()
    with locked("box"):
        if box.stock() or box.is_built():
            return
        with step("download the guest's wheels", "wheels") as fetching:
            box.fetch_wheels(fetching)
        with step("build the box", "box") as building:
            box.build(building)


@contextlib.contextmanager
def libvirt() -> Iterator[None]:
    """Have libvirt running, and let no other program of this tree stop it meanwhile."""
    with locked("libvirt"):
        _ensure_libvirt()
        yield


def _ensure_libvirt() -> None:
    if not lab_host.libvirt_answers():
        with step("start libvirt", "libvirt") as starting:
            lab_host.start_libvirt(starting)


# The locks that this process has.
_held: set[str] = set()


@contextlib.contextmanager
def locked(what: str) -> Iterator[None]:
    """Let one program of this tree at a time make a kind of change; wait for another one's end.

    `machine`: bring up, provision or remove the lab's one machine. `cluster`: bring up or remove
    the cluster, install Carver in it, add or remove a node, switch, pause or reset one. `box`:
    build the box. `libvirt`: start or stop libvirt, which both kinds of machines share, and boot
    the machines without which it would be stopped. Programs that only use machines, such as tests
    and checks, have no lock.

    A process that has a lock may ask for it again.
    """
    if what in _held:
        yield
        return
    lab_host.LAB.mkdir(exist_ok=True)
    path = lab_host.LAB / ("lock" if what == "machine" else f"{what}.lock")
    # For reading only: a lock that root made is its user's, too.
    lock = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"lab: another program has {path}: waiting", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        _held.add(what)
        yield
    finally:
        _held.discard(what)
        os.close(lock)


def setting(name: str, default: int) -> int:
    """Read a whole number above zero from the environment; raises HostError for anything else."""
    text = os.environ.get(name) or str(default)
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise lab_host.HostError(f"{name} is {text!r}: it must be a whole number above zero")
    return int(text)
