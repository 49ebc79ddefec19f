#!/usr/bin/env python3
"""Drive the lab: a virtual machine in which Carver is a service and may break disks.

As a program: `lab.py --help`. As a module, for tests on the host: see __all__.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

# This file is a program as well as a module, and Python would look beside a program only.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vagrant import box, guest, lab_host, machines
from vagrant.guest import reboot, reset, run, sync
from vagrant.machines import Machines
from vagrant.machines_in_user_mode import UserModeMachines
from vagrant.power import GuestError
from vagrant.steps import Step, StepError, step

__all__ = ["down", "is_up", "provision", "reboot", "reset", "run", "sync", "up"]

# Of the settings file and of vagrant's record of the machine.
_KIND = "machine"
# The programs that run in the guest, and the service's own environment, which most of them need.
_INSIDE = f"{guest.TREE}/vagrant/inside"
_PYTHON = "/opt/carver/venv/bin/python"
_PARTS_OF_WHEEL = ("agent", "lvm", "mount", "proto", "pyproject.toml", "README.md", "LICENSE")
_INSTALLERS = ("vagrant/inside/provision.sh", "vagrant/inside/install_wheel.py")


def up() -> None:
    """Bring the machine up with the present tree's Carver in it; quick if all is so already."""
    with machines.locked(_KIND):
        machines.prepare(in_user_mode=lab_host.in_user_mode(lab_host.NAME))
        _remove_that_of_the_other_power()
        _machines().ensure()
        _provision(only_if_changed=True)


def down() -> None:
    """Remove the machine and all that was started for it; the box stays cached."""
    with machines.locked(_KIND):
        _machines().down("the machine")
        _remove_that_of_the_other_power()


def provision() -> None:
    """Install the present tree's Carver anew and restart it."""
    with machines.locked(_KIND):
        _provision(only_if_changed=False)


def is_up() -> bool:
    """Tell whether the machine runs and answers."""
    return _runs() and guest.boot_id() is not None


def _runs() -> bool:
    """Tell whether the machine runs; one of libvirt's does only while libvirt answers."""
    may_run = lab_host.in_user_mode(lab_host.NAME) or lab_host.libvirt_answers()
    return may_run and guest.LAB_GUEST.power.state() == "running"


def _machines() -> "Machines | UserModeMachines":
    """Describe the lab's one machine."""
    return _of_power(in_user_mode=lab_host.in_user_mode(lab_host.NAME))


def _of_power(*, in_user_mode: bool) -> "Machines | UserModeMachines":
    memory_mib = machines.setting("CARVER_LAB_MEMORY", 2048)
    if in_user_mode:
        return UserModeMachines([guest.LAB_GUEST], memory_mib)
    cpus = machines.setting("CARVER_LAB_CPUS", 2)
    return Machines(_KIND, [guest.LAB_GUEST], cpus, memory_mib)


def _remove_that_of_the_other_power() -> None:
    """Remove a machine that was made while CARVER_LAB_POWER was another, if there is one."""
    other = _of_power(in_user_mode=not lab_host.in_user_mode(lab_host.NAME))
    if other.is_left:
        other.down("the machine of another power")


def _provision(*, only_if_changed: bool) -> None:
    digest = lab_host.digest_of(*_PARTS_OF_WHEEL, "systemd", *_INSTALLERS)
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


def _wheel(building: Step, digest: str) -> Path:
    """Build the tree's wheel, or return the one built of the same files before."""
    folder = lab_host.LAB / "dist" / digest[:12]
    if not folder.exists():
        # Of a copy: setuptools writes into the tree it builds from.
        source = lab_host.LAB / "source"
        parts = [str(lab_host.PROJECT / part) for part in _PARTS_OF_WHEEL]
        building.run("rsync", "-a", "--delete", "--exclude=__pycache__", *parts, source)
        lab_host.remove_tree(folder.parent)
        building.run(
            *(box.pip(building), "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
            *("--wheel-dir", folder, source),
        )
    return next(folder.glob("carver-*.whl"))


def _during(work: Callable[[], int]) -> int:
    """Do something while the machine is up, with the present tree in it; return its exit code.

    A machine that was not there before is not there afterwards.
    """
    was_there = _runs()
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
        (lab_host.PROJECT / "docs" / "images" / f"{name}.svg").write_text(picture)
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
    except (StepError, box.BoxError, GuestError, lab_host.HostError) as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"lab: {error}\n{error.stderr or ''}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
