"""Call lvm2: one command, its output, or the error that says what went wrong."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from lvm import errors
from lvm.command import Run

_UDEV_CONTROL = Path("/run/udev/control")
_ARCHIVES = "etc/lvm"

# "  LVM version:     2.03.16(2) (2022-05-18)"
_VERSION = re.compile(r"LVM version:\s*(\d+)\.(\d+)\.(\d+)")


def without_udev() -> tuple[str, ...]:
    """lvm.conf(5) settings for a node, or a container, in which udev does not run."""
    if _UDEV_CONTROL.exists():
        return ()
    return (
        "activation/udev_sync=0",
        "activation/udev_rules=0",
        "devices/obtain_device_list_from_udev=0",
    )


def without_archives(root: Path) -> tuple[str, ...]:
    """lvm.conf(5) settings for a node whose /etc/lvm is read-only.

    There lvm2 cannot keep copies of a group's metadata, and else would refuse every change ("Cannot
    archive volume group metadata"). `root` is where lvm2's own root directory is seen.
    """
    try:
        is_read_only = os.statvfs(root / _ARCHIVES).f_flag & os.ST_RDONLY
    except OSError:
        return ()
    return ("backup/archive=0", "backup/backup=0") if is_read_only else ()


@dataclass(frozen=True)
class Lvm:
    """lvm2 as this process calls it.

    `devices` confines every command to those block devices, so that no other group is ever seen;
    empty leaves that to lvm.conf(5). `settings` are lvm.conf(5) settings for every command.
    """

    run: Run
    devices: tuple[str, ...] = ()
    settings: tuple[str, ...] = field(default_factory=without_udev)

    def __call__(self, subcommand: str, *words: str) -> str:
        """Run one lvm2 command and return what it printed; raises CommandFailed."""
        confined = ["--devices", ",".join(self.devices)] if self.devices else []
        settings = ["--config", " ".join(self.settings)] if self.settings else []
        result = self.run("lvm", subcommand, *confined, *settings, *words)
        if result.exit_code != 0:
            raise errors.classify(("lvm", subcommand), result.exit_code, result.stderr)
        return result.stdout


def version(run: Run) -> tuple[int, int, int]:
    """Which lvm2 this is, by one command; raises CommandFailed, BadReport."""
    result = run("lvm", "version")
    if result.exit_code != 0:
        raise errors.classify(("lvm", "version"), result.exit_code, result.stderr)
    found = _VERSION.search(result.stdout)
    if found is None:
        raise errors.BadReport(f"no version in {result.stdout.strip()!r}")
    return int(found[1]), int(found[2]), int(found[3])
