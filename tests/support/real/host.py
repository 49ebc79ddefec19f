"""The machine itself: real programs, LVM on loop devices, mounts. As root, in the lab VM."""

import itertools
import os
import re
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, ClassVar

from real import kinds, mounts
from real.disks import let_go_of_left_behind
from real.shell import RealShell

from lvm import lvm2, names, report, volumes
from lvm.active_devices import Device, Devices, mapping_name
from lvm.disk_reader import Disks
from lvm.layout import Layout
from lvm.lvm2 import Lvm
from lvm.session import Session
from mount import loop, table
from mount import mount_errors as mount_errors
from mount.cgroups import Cgroups
from mount.command import Result, Runner
from mount.kernel import Kernel
from mount.mount_errors import CommandError, MountError
from mount.programs import Programs

_EXTENT_BYTES = 4 << 20
_LOOK_SECONDS = 0.02
# How long a program runs between looks at what it is doing.
_STEP_SECONDS = 0.001
_TRIES = 20
_CLEAN_UP_TRIES = 15
_BLOCK_BYTES = 4096
# Of what they change lvm2 keeps no copies in /etc/lvm: the more there are the longer each takes.
_SETTINGS = (
    *lvm2.without_udev(),
    *lvm2.without_dbus(Path("/")),
    *("backup/archive=0", "backup/backup=0"),
)
# lvm2 keeps its metadata in the first megabyte of a disk.
_METADATA_BYTES = 1 << 20
_NO_SPACE_TIMEOUT = Path("/sys/module/dm_thin_pool/parameters/no_space_timeout")
# The number of a thin volume has 24 bits, and lvm2 counts from one.
_UNKNOWN_TO_LVM2 = 1 << 20


@dataclass
class Lab:
    """What tests share, since it takes seconds to make: groups by the sizes of their disks."""

    directory: Path
    kernel: Kernel = field(default_factory=Kernel)
    programs: Programs = field(default_factory=Programs)
    groups: dict[tuple[int, ...], tuple[str, list[str]]] = field(default_factory=dict)
    # The files of loop devices.
    files: dict[str, str] = field(default_factory=dict)
    cgroup: Path = Path(f"/sys/fs/cgroup/carver-test-{os.getpid()}")
    _session: Session | None = None
    _unclean: list[tuple[str, list[str]]] = field(default_factory=list)
    _serial: Iterator[int] = field(default_factory=itertools.count)

    def new_device(self, size_bytes: int) -> str:
        file = self.directory / f"disk{next(self._serial)}"
        with file.open("wb") as disk:
            disk.truncate(size_bytes)
        device = loop.attach(self.kernel, str(file))
        self.files[device] = str(file)
        return device

    def group(self, disk_extents: tuple[int, ...]) -> tuple[str, list[str]]:
        """An empty group and its disks, so many extents of 4 MiB each."""
        if disk_extents not in self.groups:
            name = f"carver_test_{os.getpid()}_{len(self.groups) + len(self._unclean)}"
            disks = [self.new_device(_METADATA_BYTES + one * _EXTENT_BYTES) for one in disk_extents]
            # Else udev has `vgchange -aay` run some time later, which asks dmeventd to watch.
            words = ("--quiet", "--quiet", "--setautoactivation", "n", "--", name, *disks)
            Lvm(self.programs, tuple(disks))("vgcreate", *words)
            self.groups[disk_extents] = (name, disks)
        return self.groups[disk_extents]

    def set_aside(self, group: tuple[str, list[str]]) -> None:
        """Give no other test this group, which could not be emptied."""
        self._unclean.append(group)
        self.groups = {size: one for size, one in self.groups.items() if one != group}

    @property
    def session(self) -> Session:
        """The shell of lvm2's that all tests say their commands to."""
        if self._session is None:
            run = self.programs
            self._session = Session(run, run.converse, self.directory / "session", rest_seconds=0)
        return self._session

    def clean_up(self) -> None:
        """Leave the machine without the groups and their disks."""
        if self._session is not None:
            self._session.close()
        if self.cgroup.exists():
            self.cgroup.rmdir()
        for name, disks in (*self._unclean, *self.groups.values()):
            Lvm(self.programs, tuple(disks))("vgremove", "--force", "--yes", "--", name)
            for disk in disks:
                loop.detach(self.kernel, disk)


@contextmanager
def lab(directory: Path) -> Iterator[Lab]:
    """A lab whose directory is a mount of its own, out of the system's shared propagation."""
    assert os.geteuid() == 0, "the real tier needs root"
    let_go_of_left_behind()
    made = Lab(directory)
    place = str(directory)
    for words in (("--bind", place, place), ("--make-private", place)):
        ended = made.programs("mount", *words)
        assert ended.exit_code == 0, ended.stderr
    try:
        yield made
    finally:
        made.clean_up()
        mounts.unmount(made.kernel, place)


@dataclass
class _Killing:
    """Kills a program as soon as something is there."""

    path: Path

    def __call__(self, *words: str) -> Result:
        program = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not self.path.exists() and program.poll() is None:
            pass
        program.kill()
        return Result(program.wait(), "", "killed")


class RealHost:
    """What a `Host` is, with disks and groups of its own; the machine's are not seen."""

    # Whether lvm2's commands are said to a shell of it (--sessions).
    sessions: ClassVar[bool] = False

    def __init__(self, shared: Lab, directory: Path) -> None:
        self.directory = directory
        self.commands: list[tuple[str, ...]] = []
        # Asked before each command: may answer in its place, wait, or raise as a kill does.
        self.intercept: Callable[[Sequence[str]], Result | None] = lambda _words: None
        self.kernel = shared.kernel
        self.devices: Devices = Devices()
        self.disks: Disks = Disks()
        self._lab = shared
        self._own: list[str] = []
        self._groups: list[tuple[str, list[str]]] = []

    @cached_property
    def cgroups(self) -> Cgroups:
        """The pods' cgroup, in place of kubelet's."""
        self._lab.cgroup.mkdir(exist_ok=True)
        return Cgroups(self._lab.cgroup.name)

    @property
    def lvm(self) -> Lvm:
        """lvm2, confined to the disks of this host's groups and its other devices."""
        disks = [disk for _, disks in self._groups for disk in disks]
        # A device that is no disk keeps lvm2 from looking at all others while there is none yet.
        return Lvm(self.run, (*disks, *self._own) or ("/dev/null",), _SETTINGS)

    def converse(
        self, *words: str, prompt: str, environment: Mapping[str, str], report: str
    ) -> RealShell:
        """The seam `mount.command.Converse`: a shell to which something can happen."""
        begin = self._lab.programs.converse
        return RealShell(begin(*words, prompt=prompt, environment=environment, report=report))

    def run(self, *words: str, stdin: bytearray | None = None) -> Result:
        """The seam `mount.command.Runner`."""
        if (answer := self.intercept(words)) is not None:
            return answer
        self.commands.append(words)
        if self.sessions and words[0] == "lvm":
            return self._lab.session(*words)
        return self._lab.programs(*words, stdin=stdin)

    @contextmanager
    def stream(self, *words: str) -> Iterator[BinaryIO]:
        """The seam `mount.command.Stream`."""
        assert self.intercept(words) is None, "what is streamed has no other answer"
        self.commands.append(words)
        with self._lab.programs.stream(*words) as printed:
            yield printed

    def new_device(self, size_bytes: int) -> str:
        self._own.append(self._lab.new_device(size_bytes))
        return self._own[-1]

    @contextmanager
    def disk(self, kind: str, size_bytes: int) -> Iterator[str]:
        """A blank disk of another kind than usual: see `kinds`; a group of it is `own_group`'s."""
        with kinds.KINDS[kind](self._lab.directory, size_bytes) as path:
            yield path

    def new_group(self, *disk_extents: int) -> str:
        """An empty group with so many extents of 4 MiB on each of its disks."""
        self._groups.append(self._lab.group(disk_extents))
        return self._groups[-1][0]

    @contextmanager
    def own_group(self, name: str, disks: Sequence[str], *options: str) -> Iterator[int]:
        """A group on such disks as a test has, removed afterwards; yields how many extents it has.

        `options` are those of vgcreate(8).
        """
        own = (name, list(disks))
        self._groups.append(own)
        try:
            self.lvm("vgcreate", "--yes", *options, "--", name, *disks)
            yield int(self.lvm("vgs", "--noheadings", "--options", "vg_free_count", "--", name))
        finally:
            self._unmount_all()
            self.lvm("vgremove", "--force", "--yes", "--", name)
            self._groups.remove(own)

    def watched(self, group: str) -> set[str]:
        """The volumes of a group that dmeventd is asked to watch."""
        options = ("--noheadings", "--all", "--options", "lv_name,seg_monitor")
        devices = ("--devices", ",".join(self.lvm.devices))
        shown = self._require("lvm", "lvs", *devices, *options, "--", group)
        rows = [line.split(maxsplit=1) for line in shown.splitlines()]
        return {row[0] for row in rows if row[1:] == ["monitored"]}

    def deactivate(self, group: str, name: str) -> None:
        """Take a volume's device away, as a reboot or an operator does."""
        self.lvm("lvchange", "--activate", "n", "--", f"{group}/{name}")

    def half_make(self, group: str, name: str, *, loaded: bool) -> None:
        """Leave an active volume what an lvm2 leaves that dies while it makes the device.

        It has no table; or, `loaded`, one that does not count yet.
        """
        found = self.devices.find(group, name)
        assert found is not None, name
        table, dm_name = self._dmsetup("table", found.path), names.device(group, name)
        self.deactivate(group, name)
        self._half_make(dm_name, f"LVM-{found.group_uuid}{found.uuid}", table if loaded else "")

    def half_make_raid(self, group: str, name: str, layout: Layout) -> None:
        """Leave in place of a volume what an lvm2 leaves that dies while it makes such a RAID."""
        found = report.read(self.lvm).group(group).volume(name)
        new = volumes.New(name, found.size_bytes, found.own_tags)
        for _ in range(_TRIES):
            self.lvm("lvremove", "--yes", "--", f"{group}/{name}")
            image = Path("/dev/mapper", f"{names.device(group, name)}_rmeta_0")
            with suppress(mount_errors.CommandError):
                volumes.create(replace(self.lvm, run=_Killing(image)), group, new, layout=layout)
            if report.read(self.lvm).group(group).is_bare(name, layout.disks):
                return
        raise AssertionError("lvm2 was always quicker")

    def leave_parts(self, group: str, name: str, *parts: str) -> None:
        """Leave of a volume what an lvm2 leaves that dies while it activates it: parts of it."""
        self.deactivate(group, name)
        # By a process: a shell refuses all changes of tags afterwards ("Cannot change LV properties
        # when activating component LVs").
        lvm = replace(self.lvm, run=self._lab.programs)
        for part in parts:
            lvm("lvchange", "--yes", "--activate", "y", "--", f"{group}/{name}{part}")

    def half_make_pool(self, group: str, pool: str) -> None:
        """Leave in place of an empty pool what an lvm2 leaves that dies while it makes one."""
        made = report.read(self.lvm).group(group).volume(pool)
        self.lvm("lvremove", "--yes", "--", f"{group}/{pool}")
        own_tags = made.own_tags
        volumes.create(self.lvm, group, volumes.New(pool, made.size_bytes, own_tags))

    def unmake_thin(self, group: str, pool: str, name: str) -> None:
        """Have the pool be without the last volume of it, as if lvm2 had died before making it.

        The kernel's pool goes back by a transaction, and lvm2's metadata have the message to make
        the volume, which it sends with the pool's next change.
        """
        known = report.read(self.lvm).group(group)
        last, made = known.volume(pool).transaction_id, known.volume(name)
        assert last is not None
        self.lvm("lvchange", "--activate", "n", "--", f"{group}/{name}")
        device = f"{names.device(group, pool)}-tpool"
        self._dmsetup("message", device, "0", f"delete {made.thin_id}")
        self._dmsetup("message", device, "0", f"set_transaction_id {last} {last - 1}")
        file = self.directory / "metadata"
        self.lvm("vgcfgbackup", "--file", str(file), "--", group)
        message = f'message1 {{\ncreate = "{name}"\n}}\n'
        text = file.read_text().replace(counted := f"transaction_id = {last}\n", counted + message)
        file.write_text(text)
        self.lvm("vgcfgrestore", "--yes", "--force", "--file", str(file), "--", group)

    def half_open(self, device: Device) -> None:
        """Leave on an active volume what a cryptsetup leaves that dies while it opens it."""
        name, sectors = mapping_name(device), self.kernel.device_size_bytes(device.path) // 512
        self._half_make(name, f"CRYPT-LUKS2-0-{name}", f"0 {sectors} linear {device.path} 0")

    def _half_make(self, dm_name: str, uuid: str, table: str) -> None:
        self._dmsetup("create", dm_name, "--notable", "--uuid", uuid)
        if table:
            self._dmsetup("load", dm_name, "--table", table)

    def break_file_system(self, device: str) -> None:
        """Have a mounted ext4 meet an error (Documentation/ABI/testing/sysfs-fs-ext4)."""
        name = Path(device).resolve().name
        Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("by a test")

    def suspend(self, group: str, name: str) -> None:
        """Block all that uses a volume, as lvm2 does while it changes the volume."""
        self._dmsetup("suspend", names.device(group, name))

    def is_suspended(self, group: str, name: str) -> bool:
        device = self.devices.find(group, name)
        assert device is not None
        major, minor = device.number
        return Path(f"/sys/dev/block/{major}:{minor}/dm/suspended").read_text().strip() == "1"

    def write(self, device: str, fs_type: str) -> None:
        """Put a file system on a device, behind Carver's back."""
        self._require(f"mkfs.{fs_type}", "-q", "--", device)

    def write_bytes(self, device: str, offset_bytes: int, data: bytes) -> None:
        """Write whole blocks of data on a device, as the program does that has it."""
        with Path(device).open("r+b", buffering=0) as opened:
            assert os.pwrite(opened.fileno(), data, offset_bytes) == len(data)
            os.fsync(opened.fileno())

    def read_bytes(self, device: str, offset_bytes: int, length_bytes: int) -> bytes:
        """Read whole blocks of data from a device."""
        with Path(device).open("rb", buffering=0) as opened:
            return os.pread(opened.fileno(), length_bytes, offset_bytes)

    def written_bytes(self, device: str) -> int:
        """How much of a loop device's file has blocks."""
        file = Path("/sys/block", Path(device).name, "loop/backing_file").read_text().strip()
        return Path(file).stat().st_blocks * 512

    @contextmanager
    def impatient(self) -> Iterator[None]:
        """Inside, a full pool fails what waits for room after a second, not after a minute."""
        before = _NO_SPACE_TIMEOUT.read_text()
        _NO_SPACE_TIMEOUT.write_text("1")
        try:
            yield
        finally:
            _NO_SPACE_TIMEOUT.write_text(before)

    def leak_chunk(self, group: str, pool: str, name: str) -> None:
        """Have a disk fail just as a chunk of the pool is given out to a volume, and work again.

        It is given out for the last block of the volume, which must be unwritten.
        """
        data, device = f"{names.device(group, pool)}_tdata", self.devices.find(group, name)
        assert device is not None
        table = self._dmsetup("table", data)
        sectors = self.kernel.device_size_bytes(f"/dev/mapper/{data}") // 512
        last = self.kernel.device_size_bytes(device.path) - _BLOCK_BYTES
        self._load(data, f"0 {sectors} error")
        try:
            self.write_bytes(device.path, last, bytes(range(256)) * (_BLOCK_BYTES // 256))
        except OSError:
            return
        finally:
            self._load(data, table)
        raise AssertionError("the disk failed nothing")

    def _load(self, device: str, table: str) -> None:
        """Give a device another table, without a flush: a disk that fails does not wait for one."""
        self._dmsetup("suspend", "--noflush", "--nolockfs", device)
        self._dmsetup("load", device, "--table", table)
        self._dmsetup("resume", device)

    def _dmsetup(self, *words: str) -> str:
        return self._require("dmsetup", *words)

    def _require(self, *words: str) -> str:
        """Run a program that succeeds; return what it printed."""
        ended = self._lab.programs(*words)
        assert ended.exit_code == 0, ended.stderr
        return ended.stdout.strip()

    def fill_metadata(self, group: str, pool: str, blocks: int) -> None:
        """Have so many more blocks of an active pool's metadata used: each by an empty volume.

        They are the kernel's alone (thin-provisioning.rst), with numbers that lvm2 does not reach.
        """
        device = f"{names.device(group, pool)}-tpool"
        for number in range(_UNKNOWN_TO_LVM2, _UNKNOWN_TO_LVM2 + blocks):
            self._dmsetup("message", device, "0", f"create_thin {number}")

    def label(self, device: str) -> None:
        """Make a device lvm2's, in no group: what vgcreate leaves when it is killed half-way."""
        Lvm(self._lab.programs, (device,))("pvcreate", "--", device)

    def share(self, group: str) -> None:
        """Have a group be several nodes', without the lock manager that lvm2 asks for then."""
        file = self.directory / "metadata"
        self.lvm("vgcfgbackup", "--file", str(file), "--", group)
        kept = re.sub(
            r"^(\tseqno = .*)$",
            r'\1\n\tlock_type = "dlm"\n\tlock_args = "1.0.0:carver"',
            file.read_text(),
            count=1,
            flags=re.MULTILINE,
        )
        file.write_text(kept)
        self.lvm("vgcfgrestore", "--force", "--yes", "--file", str(file), "--", group)

    @contextmanager
    def configured(self, **settings: str) -> Iterator[Lvm]:
        """lvm2 on a node whose lvmlocal.conf has these settings; a list is given as its one item.

        A name has two underscores in the place of the slash. It is a system directory of the test's
        own: the machine's is not touched.
        """
        own = self.directory / "lvm"
        own.mkdir()
        (own / "lvm.conf").symlink_to("/etc/lvm/lvm.conf")
        lines = [
            "=".join((name.replace("__", "/"), value if value.isdigit() else f'["{value}"]'))
            for name, value in settings.items()
        ]
        (own / "lvmlocal.conf").write_text("\n".join([*lines, ""]))
        place = f"LVM_SYSTEM_DIR={own}"

        def run(*words: str) -> Result:
            return self.run(*(("env", place, *words) if words[0] == "lvm" else words))

        yield replace(self.lvm, run=run)

    @contextmanager
    def listing(self, root: Path, *disks: str) -> Iterator[Lvm]:
        """lvm2 on a node whose devices file lists these disks and no others, as lvmdevices(8) does.

        The file lies beside the machine's own, which has another name; `root` has a copy.
        """
        name = f"carver-test-{os.getpid()}.devices"
        file, copy = Path("/etc/lvm/devices", name), root / "etc/lvm/devices" / name
        settings = ("devices/use_devicesfile=1", f'devices/devicesfile="{name}"')
        node = Lvm(self.run, (), (*_SETTINGS, *settings), root)
        is_new = not file.parent.exists()
        file.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            for disk in disks:
                node("lvmdevices", "--yes", "--adddev", disk)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(file.read_text())
            (root / "etc/lvm/lvm.conf").write_text("\n".join(settings))
            yield node
        finally:
            file.unlink(missing_ok=True)
            if is_new:
                shutil.rmtree(file.parent)

    def partition(self, device: str) -> None:
        """Put a partition table on a device; the kernel has not read it."""
        entry = struct.pack("<8B2I", 0, 0, 0, 0, 0x83, 0, 0, 0, 2048, 2048)
        with Path(device).open("r+b") as disk:
            disk.write(bytes(446) + entry + bytes(48) + b"\x55\xaa")

    def damage(self, device: str) -> None:
        """Break the ext4 on a device so that no program mends it unasked."""
        # Without its root directory, and marked as having errors so that e2fsck looks at all.
        for request in ("clri <2>", "set_super_value state 2"):
            self._require("debugfs", "-w", "-R", request, device)

    def unfinish(self, device: str) -> None:
        """Leave the XFS on a device as mkfs.xfs does that is killed before its last write."""
        block = bytearray(self.read_bytes(device, 0, _BLOCK_BYTES))
        # struct xfs_dsb, fs/xfs/libxfs/xfs_format.h: sb_sectsize, sb_inprogress, sb_crc (crc32c).
        sector = int.from_bytes(block[102:104], "big")
        block[126], block[224:228], value = 1, bytes(4), 0xFFFFFFFF
        for byte in block[:sector]:
            value ^= byte
            for _ in range(8):
                value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        block[224:228] = (value ^ 0xFFFFFFFF).to_bytes(4, "little")
        self.write_bytes(device, 0, bytes(block))

    def mark_free(self, group: str, mark: bytes) -> None:
        """Have a mark at the start of each block of all free extents, as of an earlier owner."""
        self.lvm("lvcreate", "--yes", "--extents", "100%FREE", "--name", "earlier", "--", group)
        device = f"/dev/mapper/{names.device(group, 'earlier')}"
        piece = mark.ljust(_BLOCK_BYTES, b"\0") * (_EXTENT_BYTES // _BLOCK_BYTES)
        for offset in range(0, self.kernel.device_size_bytes(device), _EXTENT_BYTES):
            self.write_bytes(device, offset, piece)
        self.lvm("lvremove", "--yes", "--", f"{group}/earlier")

    def erase(self, device: str) -> None:
        """Overwrite what a device holds, behind Carver's back."""
        self.kernel.zero_out(device, 0, self.kernel.device_size_bytes(device))

    def clean_up(self) -> None:
        """Leave the lab as it was: no mount, volume or device of this host's stays.

        udev may hold for a while what was just made or closed, so a step that fails is tried again.
        """
        self.intercept = lambda _words: None
        run: Runner = self.run
        for tries_left in reversed(range(_CLEAN_UP_TRIES)):
            try:
                self._clean_up(run)
                return
            except (OSError, AssertionError, MountError, CommandError):
                if not tries_left:
                    # No other test is given a group that is not empty.
                    for group in self._groups:
                        self._lab.set_aside(group)
                    raise
                # The shell may be what fails.
                run = self._lab.programs
                time.sleep(1)

    def _clean_up(self, run: Runner) -> None:
        self._unmount_all()
        for group, disks in self._groups:
            for node in Path("/dev/mapper").glob(f"{names.escaped(group)}-*"):
                number = self.kernel.device_number(str(node))
                self._detach(number)
                self._close(number)
            Lvm(run, tuple(disks), _SETTINGS)("lvremove", "--yes", "--", group)
        while self._own:
            device = self._own[-1]
            # After an earlier try its number may be another's, of a test beside this one.
            if loop.find(self.kernel, self._lab.files[device]) == device:
                loop.detach(self.kernel, device)
            self._own.pop()

    def _detach(self, number: tuple[int, int]) -> None:
        for device in loop.loop_devices_over(self.kernel, number):
            loop.detach(self.kernel, device)

    def _close(self, number: tuple[int, int]) -> None:
        """What of an encrypted volume a test left open."""
        for holder in Path(f"/sys/dev/block/{number[0]}:{number[1]}/holders").iterdir():
            name = (holder / "dm/name").read_text().strip()
            if name.startswith("carver-luks-"):
                self._detach(self.kernel.device_number(f"/dev/{holder.name}"))
                self._require("cryptsetup", "close", "--", name)

    def _unmount_all(self) -> None:
        own = f"{self.directory.parent}/"
        for mount in reversed(table.read(self.kernel).mounts):
            if mount.path.startswith(own):
                self.kernel.unmount(mount.path)


@contextmanager
def real_host(shared: Lab, directory: Path) -> Iterator[RealHost]:
    """A host that is cleaned up afterwards, whatever happened."""
    host = RealHost(shared, directory)
    try:
        yield host
    finally:
        host.clean_up()
