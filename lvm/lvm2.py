"""Call lvm2: one command, its output, or the error that says what went wrong."""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from lvm import errors, labels
from mount import errors as mount_errors
from mount.command import Run

_UDEV_CONTROL = Path("/run/udev/control")
_LVM = "etc/lvm"
_BACKUP = f"{_LVM}/backup"
# lvmdevices(8): where the file is, and what it is called where lvm.conf(5) says nothing.
_DEVICES = f"{_LVM}/devices"
DEVICES_FILE = f"{_DEVICES}/system.devices"
_USE_DEVICES_FILE = ("devices", "use_devicesfile")
# What has dbus-daemon(1) start lvmdbusd(8).
_DBUS_SERVICE = "usr/share/dbus-1/system-services/com.redhat.lvmdbus1.service"
# The UUID of a physical volume as the file has it: without dashes.
_LISTED = re.compile(r"^[^#\n]*\bPVID=(\w{32})", re.M)

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


def without_dbus(root: Path) -> tuple[str, ...]:
    """lvm.conf(5) settings for a node that has no lvmdbusd(8), whom lvm2 tells of every change.

    To hear from dbus-daemon(1) that there is none takes a sixth of an lvchange(8)'s time. `root` is
    where lvm2's own root directory is seen.
    """
    return () if (root / _DBUS_SERVICE).exists() else ("global/notify_dbus=0",)


def without_archives(root: Path) -> tuple[str, ...]:
    """lvm.conf(5) settings for a node whose /etc/lvm is read-only.

    There lvm2 cannot keep copies of a group's metadata, and else would refuse every change ("Cannot
    archive volume group metadata"). `root` is where lvm2's own root directory is seen.
    """
    try:
        is_read_only = os.statvfs(root / _LVM).f_flag & os.ST_RDONLY
    except OSError:
        return ()
    return ("backup/archive=0", "backup/backup=0") if is_read_only else ()


def devices_file(root: Path) -> Path | None:
    """Where the node lists what lvm2 may use (lvmdevices(8)); None where it does not."""
    name = configured(root).get(("devices", "devicesfile"), '""').strip('"')
    path = root / (f"{_DEVICES}/{name}" if name and "/" not in name else DEVICES_FILE)
    return path if path.exists() else None


def with_devices_file(root: Path) -> tuple[str, ...]:
    """lvm.conf(5) settings for an lvm2 that works with a node's /etc/lvm, which may be another's.

    Whether a devices file counts where lvm.conf is silent was decided when lvm2 was built: it does
    in the RHEL family, and does not in Debian, of which the image is. Where there is one, and it is
    not switched off, it counts.
    """
    if devices_file(root) is None or _USE_DEVICES_FILE in configured(root):
        return ()
    return ("devices/use_devicesfile=1",)


def listed_disks(root: Path) -> frozenset[str] | None:
    """The UUIDs, without dashes, of the disks that a node's devices file lists.

    None where there is no such file, or it is switched off: then no disk is left out.
    """
    file = devices_file(root)
    if file is None or configured(root).get(_USE_DEVICES_FILE) == "0":
        return None
    return frozenset(_LISTED.findall(_text(file)))


def backed_up(root: Path | None, group: str) -> str:
    """The UUID of the group of that name that lvm2 wrote to on this node last.

    By its own copy of what it wrote (vgcfgbackup(8)); empty where there is none.
    """
    if root is None:
        return ""
    try:
        found = labels.settings(_text(root / _BACKUP / group))
        return next((value.strip('"') for place, value in found if place == (group, "id")), "")
    except (OSError, labels.Damage):
        return ""


def backed_up_groups(root: Path | None) -> frozenset[str]:
    """The groups of whose metadata lvm2 has a copy on this node."""
    if root is None:
        return frozenset()
    try:
        return frozenset(one.name for one in (root / _BACKUP).iterdir())
    except OSError:
        return frozenset()


def is_backed_up(root: Path | None, group: str, name: str) -> bool:
    """Whether a group had a logical volume when lvm2 wrote to it on this node last.

    By its own copy of what it wrote, as `backed_up`. Where that is damaged, its mention is enough.
    """
    if root is None:
        return False
    try:
        text = _text(root / _BACKUP / group)
        if name not in text:
            return False
        return any(at[:3] == (group, "logical_volumes", name) for at, _ in labels.settings(text))
    except labels.Damage:
        return True
    except OSError:
        return False


def configured(root: Path) -> Mapping[tuple[str, ...], str]:
    """The settings of lvm.conf(5), over which lvmlocal.conf is, by their sections and names.

    `root` is where lvm2's own root directory is seen. A file that is not in lvm2's form is passed
    over: lvm2 itself then says so.
    """
    files = (root / _LVM / "lvm.conf", root / _LVM / "lvmlocal.conf")
    return _parsed(tuple((file, _stamp(file)) for file in files))


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


# Read anew where a file has changed.
@lru_cache(maxsize=4)
def _parsed(files: tuple[tuple[Path, object], ...]) -> Mapping[tuple[str, ...], str]:
    values: dict[tuple[str, ...], str] = {}
    for file, _ in files:
        with suppress(OSError, labels.Damage):
            # `devices { filter = … }` may be written as `devices/filter = …`.
            for place, value in list(labels.settings(_text(file))):
                values[tuple("/".join(place).split("/"))] = value
    return MappingProxyType(values)


def _text(file: Path) -> str:
    """What a file of lvm2's says; lvm2 asks of no encoding, and a comment may be of any."""
    return file.read_text(encoding="utf-8", errors="surrogateescape")


_NEEDED = (
    # With other values lvm2 reports success and did something else: nothing at all, a volume that
    # is not active, one that is read-only. Of the last two nothing is wiped or zeroed.
    *("global/test=0", "global/activation=1", "activation/read_only_volume_list=[]"),
    # dmeventd watches by lvm2 commands of its own, which hold the group's lock and look at every
    # disk of the machine; and an extension of a pool waits for these 8 s, while the pool's writers
    # wait for it.
    "activation/monitoring=0",
    # Of each change lvm2 archives the group's metadata as they were, and by default keeps that for
    # 30 days, however many there are. It removes what is older than `retain_days`, but never the
    # last `retain_min` (_remove_expired() in lib/format_text/archive.c): so these are all it keeps.
    *("backup/retain_min=50", "backup/retain_days=0"),
)


@dataclass
class Lvm:
    """lvm2 as this process calls it.

    `devices` confines every command to those block devices, so that no other group is ever seen;
    empty leaves that to lvm.conf(5). `settings` are lvm.conf(5) settings for every command. `root`
    is where lvm2's own root directory is seen. The devices are filled in where they are not known
    from the beginning; who has copied this then has not got them.
    """

    run: Run
    devices: tuple[str, ...] = ()
    settings: tuple[str, ...] = field(default_factory=without_udev)
    root: Path | None = None

    def __call__(self, subcommand: str, *words: str, settings: Sequence[str] = ()) -> str:
        """Run one lvm2 command and return what it printed; `settings` are for this one only.

        Raises CommandFailed, ProgramMissing.
        """
        confined = ["--devices", ",".join(self.devices)] if self.devices else []
        config = _config((*_NEEDED, *self.settings, *settings))
        result = self.run("lvm", subcommand, *confined, "--config", config, *words)
        # What nsenter(1), as a shell, ends with where there is no such program.
        if result.exit_code == 127:
            raise mount_errors.ProgramMissing("lvm")
        if result.exit_code != 0:
            raise errors.classify(("lvm", subcommand), result.exit_code, result.stderr)
        return result.stdout


@lru_cache(16)
def _config(settings: tuple[str, ...]) -> str:
    """lvm2's `--config` for settings, of which the last of a key counts."""
    # Each key once: which of two counts is nowhere promised.
    chosen = dict(one.split("=", 1) for one in settings)
    return " ".join(f"{key}={value}" for key, value in chosen.items())


def version(run: Run) -> tuple[int, int, int]:
    """Which lvm2 this is, by one command; raises CommandFailed, BadReport."""
    result = run("lvm", "version")
    if result.exit_code != 0:
        raise errors.classify(("lvm", "version"), result.exit_code, result.stderr)
    found = _VERSION.search(result.stdout)
    if found is None:
        raise mount_errors.BadReport(f"no version in {result.stdout.strip()!r}")
    return int(found[1]), int(found[2]), int(found[3])
