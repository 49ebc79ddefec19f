"""Run one lvm2 command and return its output; the node's lvm.conf(5) and devices file."""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from lvm import labels, lvm_errors
from mount import mount_errors as mount_errors
from mount.command import Run

# Socket of udev, which exists while udev runs.
_UDEV_CONTROL = Path("/run/udev/control")
# Directories, relative to the root directory: of lvm2's configuration, and of lvm2's backups of the
# metadata of each volume group.
_LVM = "etc/lvm"
_BACKUP = f"{_LVM}/backup"
# Directory of the devices file (lvmdevices(8)), and the file's path by default.
_DEVICES = f"{_LVM}/devices"
DEVICES_FILE = f"{_DEVICES}/system.devices"
_USE_DEVICES_FILE = ("devices", "use_devicesfile")
# File by which dbus-daemon(1) starts lvmdbusd(8).
_DBUS_SERVICE = "usr/share/dbus-1/system-services/com.redhat.lvmdbus1.service"
# Pattern of a line of the devices file with the UUID of a physical volume, without dashes.
_LISTED = re.compile(r"^[^#\n]*\bPVID=(\w{32})", re.M)

# Pattern of the line with the version in the output of `lvm version`, such as
# "  LVM version:     2.03.16(2) (2022-05-18)".
_VERSION = re.compile(r"LVM version:\s*(\d+)\.(\d+)\.(\d+)")


def without_udev() -> tuple[str, ...]:
    """lvm.conf(5) settings for a node, or a container, in which udev does not run; else none."""
    if _UDEV_CONTROL.exists():
        return ()
    return (
        "activation/udev_sync=0",
        "activation/udev_rules=0",
        "devices/obtain_device_list_from_udev=0",
    )


def without_dbus(root: Path) -> tuple[str, ...]:
    """lvm.conf(5) settings for a node without lvmdbusd(8): lvm2 reports no changes to lvmdbusd.

    Otherwise lvm2 asks dbus-daemon(1) for the missing service at each change, which takes a sixth
    of the time of an lvchange(8). `root` is where lvm2's root directory is seen.
    """
    return () if (root / _DBUS_SERVICE).exists() else ("global/notify_dbus=0",)


def without_archives(root: Path) -> tuple[str, ...]:
    """lvm.conf(5) settings for a node whose /etc/lvm is read-only; none for other nodes.

    lvm2 keeps copies of a group's metadata in /etc/lvm, and refuses every change if it cannot
    ("Cannot archive volume group metadata"). `root` is where lvm2's root directory is seen.
    """
    try:
        is_read_only = os.statvfs(root / _LVM).f_flag & os.ST_RDONLY
    except OSError:
        return ()
    return ("backup/archive=0", "backup/backup=0") if is_read_only else ()


def devices_file(root: Path) -> Path | None:
    """The path of the node's devices file (lvmdevices(8)); None where there is no such file."""
    name = configured(root).get(("devices", "devicesfile"), '""').strip('"')
    path = root / (f"{_DEVICES}/{name}" if name and "/" not in name else DEVICES_FILE)
    return path if path.exists() else None


def with_devices_file(root: Path) -> tuple[str, ...]:
    """lvm.conf(5) settings with which lvm2 respects the node's devices file, if there is one.

    How lvm2 was built decides whether it respects the file by default: builds of the RHEL family
    do, Debian's do not. Carver's image has Debian's lvm2, and the node may be of the RHEL family.
    So an existing file is respected unless lvm.conf says otherwise.
    """
    if devices_file(root) is None or _USE_DEVICES_FILE in configured(root):
        return ()
    return ("devices/use_devicesfile=1",)


def listed_disks(root: Path) -> frozenset[str] | None:
    """The UUIDs, without dashes, of the physical volumes in the node's devices file.

    None where the file does not exist, or where lvm.conf switches it off: lvm2 then uses all disks.
    """
    file = devices_file(root)
    if file is None or configured(root).get(_USE_DEVICES_FILE) == "0":
        return None
    return frozenset(_LISTED.findall(_text(file)))


def backed_up(root: Path | None, group: str) -> str:
    """The UUID of the volume group `group`, by lvm2's last backup of metadata on this node.

    lvm2 makes the backup at each change (vgcfgbackup(8)). Empty where there is no backup.
    """
    if root is None:
        return ""
    try:
        metadata = labels.settings(_text(root / _BACKUP / group))
        return next((value.strip('"') for path, value in metadata if path == (group, "id")), "")
    except (OSError, labels.Damage):
        return ""


def backed_up_groups(root: Path | None) -> frozenset[str]:
    """The names of the volume groups whose metadata lvm2 has backed up on this node."""
    if root is None:
        return frozenset()
    try:
        return frozenset(backup.name for backup in (root / _BACKUP).iterdir())
    except OSError:
        return frozenset()


def is_backed_up(root: Path | None, group: str, name: str) -> bool:
    """Whether a volume group had a logical volume when this node last wrote the group's metadata.

    lvm2's backup of the metadata decides (`backed_up`). In a damaged backup, the name anywhere in
    the text counts.
    """
    if root is None:
        return False
    try:
        text = _text(root / _BACKUP / group)
        if name not in text:
            return False
        return any(
            path[:3] == (group, "logical_volumes", name) for path, _ in labels.settings(text)
        )
    except labels.Damage:
        return True
    except OSError:
        return False


def configured(root: Path) -> Mapping[tuple[str, ...], str]:
    """The node's settings by their sections and names: lvm.conf(5), overruled by lvmlocal.conf.

    `root` is where lvm2's root directory is seen. A file that cannot be parsed is ignored: lvm2
    itself reports the error.
    """
    files = (root / _LVM / "lvm.conf", root / _LVM / "lvmlocal.conf")
    return _parsed(tuple((file, _stamp(file)) for file in files))


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


# The results are cached by the files' stamps, so that a changed file is read again.
@lru_cache(maxsize=4)
def _parsed(files: tuple[tuple[Path, object], ...]) -> Mapping[tuple[str, ...], str]:
    values: dict[tuple[str, ...], str] = {}
    for file, _ in files:
        with suppress(OSError, labels.Damage):
            # `devices { filter = … }` may be written as `devices/filter = …`.
            for path, value in list(labels.settings(_text(file))):
                values[tuple("/".join(path).split("/"))] = value
    return MappingProxyType(values)


def _text(file: Path) -> str:
    """Read a file of lvm2's; lvm2 requires no encoding, so a comment may have any bytes."""
    return file.read_text(encoding="utf-8", errors="surrogateescape")


# Settings of every lvm2 command, which overrule the node's lvm.conf(5).
_NEEDED = (
    # With other values of these settings lvm2 reports success although lvm2 has changed nothing, or
    # has made a volume that is inactive or read-only, and of which nothing is wiped or zeroed.
    *("global/test=0", "global/activation=1", "activation/read_only_volume_list=[]"),
    # dmeventd(8) monitors volumes by lvm2 commands of its own. These commands take the volume
    # group's lock and read every disk of the machine, and an extension of a thin pool waits 8 s for
    # them, during which writes to the full pool wait, too.
    "activation/monitoring=0",
    # Before each change lvm2 archives the volume group's metadata; by default it keeps each archive
    # for 30 days. lvm2 removes archives older than `retain_days`, except the last `retain_min`
    # (_remove_expired() in lib/format_text/archive.c). With these values lvm2 keeps the last 50.
    *("backup/retain_min=50", "backup/retain_days=0"),
)


@dataclass
class Lvm:
    """Runs lvm2 commands, all with the same devices and settings.

    `devices` are the only block devices that lvm2 sees, so that lvm2 sees no other volume group;
    without any, lvm.conf(5) decides. `settings` are lvm.conf(5) settings of each command. `root` is
    where lvm2's root directory is seen. The devices may be set after construction, once they have
    been found; a copy of this object that was made before does not get them.
    """

    run: Run
    devices: tuple[str, ...] = ()
    settings: tuple[str, ...] = field(default_factory=without_udev)
    root: Path | None = None

    def __call__(self, subcommand: str, *words: str, settings: Sequence[str] = ()) -> str:
        """Run one lvm2 command and return what it printed.

        Raises CommandFailed if the command failed, ProgramMissing if lvm2 is not installed.

        `settings` are further settings for this command alone.
        """
        confined = ["--devices", ",".join(self.devices)] if self.devices else []
        config = _config((*_NEEDED, *self.settings, *settings))
        result = self.run("lvm", subcommand, *confined, "--config", config, *words)
        # nsenter(1), like a shell, ends with exit code 127 where the program is missing.
        if result.exit_code == 127:
            raise mount_errors.ProgramMissing("lvm")
        if result.exit_code != 0:
            raise lvm_errors.classify(("lvm", subcommand), result.exit_code, result.stderr)
        return result.stdout


def change(lvm: Lvm, subcommand: str, changes: Sequence[str], *names: str) -> None:
    """Run lvchange(8) or vgchange(8) with these options on volumes or volume groups.

    Runs no command without options: lvm2 refuses a command line that changes nothing.
    """
    if changes:
        lvm(subcommand, *changes, "--", *names)


@lru_cache(16)
def _config(settings: tuple[str, ...]) -> str:
    """The value of lvm2's option `--config` for settings; the last value of a key counts."""
    # The option gets each key once: lvm2 does not document which of two values would count.
    value_by_key = dict(setting.split("=", 1) for setting in settings)
    return " ".join(f"{key}={value}" for key, value in value_by_key.items())


def version(run: Run) -> tuple[int, int, int]:
    """The version of lvm2, by one command.

    Raises CommandFailed if the command fails, BadReport if it prints no version.
    """
    result = run("lvm", "version")
    if result.exit_code != 0:
        raise lvm_errors.classify(("lvm", "version"), result.exit_code, result.stderr)
    match = _VERSION.search(result.stdout)
    if match is None:
        raise mount_errors.BadReport(f"no version in {result.stdout.strip()!r}")
    return int(match[1]), int(match[2]), int(match[3])
