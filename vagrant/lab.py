#!/usr/bin/env python3
"""Drive the lab: a virtual machine in which Carver is a service and may break disks.

As a program: `lab.py --help`. As a module, for tests on the host: see __all__.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# This file is a program as well as a module, and Python would look beside a program only.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vagrant import box, guest, host
from vagrant.guest import reboot, reset, run, sync
from vagrant.progress import Step, StepError, step

__all__ = ["down", "is_up", "provision", "reboot", "reset", "run", "sync", "up"]

_MACHINE = host.LAB / "machine.json"
# The programs that run in the guest, and the service's own environment, which most of them need.
_INSIDE = f"{guest.TREE}/vagrant/inside"
_PYTHON = "/opt/carver/venv/bin/python"
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
_PARTS_OF_WHEEL = ("agent", "lvm", "mount", "proto", "pyproject.toml", "README.md", "LICENSE")


def up() -> None:
    """Bring the machine up with the present tree's Carver in it; quick if all is so already."""
    with _locked():
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
        _ensure_machine(_wanted_machine())
        _provision(only_if_changed=True)


def down() -> None:
    """Remove the machine and all that was started for it; the box stays cached."""
    with _locked():
        if host.libvirt_answers():
            with step("remove the machine", "down") as removing:
                _remove_machine(removing)
        host.stop_libvirt()


def provision() -> None:
    """Install the present tree's Carver anew and restart it."""
    with _locked():
        _provision(only_if_changed=False)


def is_up() -> bool:
    """Tell whether the machine runs and answers."""
    return host.libvirt_answers() and host.domain_runs() and guest.boot_id() is not None


def _wanted_machine() -> dict[str, object]:
    """Describe the machine as the Vagrantfile reads it."""
    machine: dict[str, object] = {
        "box": box.name(),
        "driver": host.driver(),
        "cpus": int(os.environ.get("CARVER_LAB_CPUS", "2")),
        "memory": int(os.environ.get("CARVER_LAB_MEMORY", "2048")),
        "keys": [str(box.KEY)],
        "console": str(host.LAB / "logs" / "console.log"),
    }
    if box.stock():
        machine["keys"] = [str(box.KEY), "/usr/share/vagrant/keys/vagrant"]
        machine["authorize"] = box.KEY.with_suffix(".pub").read_text().strip()
    else:
        # Beside libvirt's images, for qemu's user may not enter a home folder.
        machine["kernel"] = str(_LIBVIRT_BOOT / f"{box.name()}-vmlinuz")
        machine["initrd"] = str(_LIBVIRT_BOOT / f"{box.name()}-initrd.img")
        emulated = machine["driver"] == "qemu"
        machine["command_line"] = _COMMAND_LINE + (_EMULATED if emulated else "")
    return machine


def _ensure_machine(wanted: dict[str, object]) -> None:
    as_it_is = json.loads(_MACHINE.read_text()) if _MACHINE.exists() else None
    if as_it_is == wanted and host.domain_runs():
        return
    if as_it_is is not None and as_it_is != wanted:
        with step("the lab's settings changed: remove the old machine", "down") as removing:
            _remove_machine(removing)
    _remove_what_vagrant_lost()
    _MACHINE.write_text(json.dumps(wanted, indent=2))
    with step(f"boot the machine ({wanted['driver']})", "up") as booting:
        if not box.stock():
            _publish_box(booting, wanted)
        with guest.revived():
            _vagrant(booting, "up", "--provider=libvirt")
        address = guest.address()
        if address is None:
            raise guest.GuestError(f"libvirt knows no address of the guest; {guest.console()}")
        guest.write_ssh_config(address)
        guest.wait_for_boot()


def _remove_what_vagrant_lost() -> None:
    """Remove a machine of the lab's name that this tree's vagrant did not make, or does not know.

    A tree that was removed, or an `up` that was killed, leaves one, and vagrant would refuse the
    name.

    Raises:
        GuestError: such a machine is running, so it may be in use from another tree.

    """
    mine = host.LAB / "machine" / "machines" / host.NAME / "libvirt" / "id"
    domain = host.domain_uuid()
    if not domain or (mine.exists() and mine.read_text().strip() == domain):
        return
    if host.domain_runs():
        raise guest.GuestError(
            f"a machine {host.NAME} of another tree is running: `vagrant/lab.py down` ends it"
        )
    with step("remove a machine that was left", "down") as removing:
        _remove_machine(removing)


def _publish_box(booting: Step, machine: dict[str, object]) -> None:
    """Give the box to vagrant, and its kernel to libvirt."""
    name = str(machine["box"])
    boxes = host.LAB / "vagrant" / "boxes"
    if not (boxes / name).exists():
        host.remove_tree(boxes)
        _vagrant(booting, "box", "add", "--force", "--name", name, str(box.folder() / "lab.box"))
        host.remove_volumes(host.NAME, keep=name)
    for file_name, target in (("vmlinuz", "kernel"), ("initrd.img", "initrd")):
        source = box.folder() / file_name
        booting.run(*host.as_root("install", "-D", "-m", "644", source, str(machine[target])))


def _remove_machine(removing: Step) -> None:
    guest.disconnect()
    with contextlib.suppress(StepError):
        _vagrant(removing, "destroy", "--force")
    # What vagrant lost track of.
    host.virsh("destroy", host.NAME)
    host.virsh("undefine", host.NAME, "--remove-all-storage")
    host.remove_tree(host.LAB / "machine")
    _MACHINE.unlink(missing_ok=True)


def _vagrant(within: Step, *words: str) -> None:
    environment = {
        "VAGRANT_HOME": host.LAB / "vagrant",
        "VAGRANT_DOTFILE_PATH": host.LAB / "machine",
        "VAGRANT_CWD": host.PROJECT / "vagrant",
        "VAGRANT_CHECKPOINT_DISABLE": "1",
    }
    settings = [f"{name}={value}" for name, value in environment.items()]
    within.run(*host.in_network("env", *settings, "vagrant", *words, "--no-color", "--no-tty"))


def _provision(*, only_if_changed: bool) -> None:
    digest = _wheel_digest()
    stamp = "/opt/carver/provisioned"
    if only_if_changed and guest.run(["cat", stamp], check=False).stdout == digest:
        return
    with step("install Carver in the guest", "provision") as installing:
        wheel = _wheel(installing, digest)
        sync()
        if box.stock():
            guest.copy(f"{box.wheels()}/", "/opt/carver/wheels/", "--mkpath")
        guest.copy(str(wheel), f"/opt/carver/wheel/{wheel.name}", "--mkpath")
        script = f"{_INSIDE}/provision.sh {guest.TREE} /opt/carver/wheel/{wheel.name}"
        line = f"rm -f {stamp}; bash {script} && echo -n {digest} > {stamp} && sync"
        installing.run(*guest.ssh([line]))


def _wheel_digest() -> str:
    content = hashlib.sha256()
    installers = ("vagrant/inside/provision.sh", "vagrant/inside/install_wheel.py")
    for part in (*_PARTS_OF_WHEEL, "systemd", *installers):
        top = host.PROJECT / part
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                content.update(str(path.relative_to(host.PROJECT)).encode())
                content.update(path.read_bytes())
    return content.hexdigest()


def _wheel(building: Step, digest: str) -> Path:
    """Build the tree's wheel, or return the one built of the same files before."""
    folder = host.LAB / "dist" / digest[:12]
    if not folder.exists():
        # Of a copy: setuptools writes into the tree it builds from.
        source = host.LAB / "source"
        parts = [str(host.PROJECT / part) for part in _PARTS_OF_WHEEL]
        building.run("rsync", "-a", "--delete", "--exclude=__pycache__", *parts, source)
        host.remove_tree(folder.parent)
        building.run(
            *(box.pip(building), "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
            *("--wheel-dir", folder, source),
        )
    return next(folder.glob("carver-*.whl"))


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Let one change of the machine happen at a time."""
    host.LAB.mkdir(exist_ok=True)
    with (host.LAB / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _during(work: Callable[[], int]) -> int:
    """Do something while the machine is up, with the present tree in it; return its exit code.

    A machine that was not there before is not there afterwards.
    """
    was_there = host.libvirt_answers() and host.domain_runs()
    try:
        up()
        with step("copy the tree into the guest", "sync"):
            sync()
        return work()
    finally:
        if not was_there:
            down()


def _take_pictures() -> int:
    """Make docs/images anew from what the guest shows."""
    words = [_PYTHON, f"{_INSIDE}/pictures.py"]
    taken = guest.run(words, check=False)
    if taken.returncode != 0:
        print(taken.stderr, file=sys.stderr)
        return 1
    for name, picture in json.loads(taken.stdout).items():
        (host.PROJECT / "docs" / "images" / f"{name}.svg").write_text(picture)
    return 0


def _present(program: str) -> int:
    """Run a program of vagrant/inside in the guest, with the service's own environment."""
    words = [_PYTHON, f"{_INSIDE}/{program}"]
    return _during(lambda: _session(words))


def _session(words: list[str]) -> int:
    options = ["-t"] if sys.stdin.isatty() and sys.stdout.isatty() else []
    return subprocess.run(guest.ssh(words, *options), check=False).returncode


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lab.py", description="Drive the lab VM; see docs/testing.md."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, function in _COMMANDS.items():
        commands.add_parser(name, help=(function.__doc__ or "").partition("\n")[0])
    for name, text in (
        ("ssh", "Open a shell in the guest, or run a command."),
        ("run", "Run a command in the guest; one word is a line for its shell."),
        ("during", "Run a command on the host while the guest is up; it stays if it was up."),
    ):
        # REMAINDER: the command's options are not ours.
        commands.add_parser(name, help=text).add_argument("words", nargs=argparse.REMAINDER)
    for name, (_, text) in _PROGRAMS.items():
        commands.add_parser(name, help=text)
    commands.add_parser("pictures", help=_take_pictures.__doc__)
    commands.add_parser("status", help=is_up.__doc__)
    return parser


_COMMANDS: dict[str, Callable[[], None]] = {
    "up": up,
    "sync": sync,
    "provision": provision,
    "reboot": reboot,
    "reset": reset,
    "down": down,
}

_PROGRAMS = {
    "demo": ("demo.py", "Show the main job in the guest; the machine stays if it was up."),
}


def main() -> int:
    """Run one command; return the exit code."""
    arguments = _parser().parse_args()
    try:
        if arguments.command in _COMMANDS:
            _COMMANDS[arguments.command]()
            return 0
        if arguments.command in _PROGRAMS:
            return _present(_PROGRAMS[arguments.command][0])
        if arguments.command == "status":
            print("up" if (answer := is_up()) else "down")
            return 0 if answer else 1
        if arguments.command == "pictures":
            return _during(_take_pictures)
        words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
        if arguments.command == "during":
            return _during(lambda: subprocess.run(words, check=False).returncode)
        return _session(words)
    except (StepError, box.BoxError, guest.GuestError) as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"lab: {error}\n{error.stderr or ''}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
