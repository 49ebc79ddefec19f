"""A whole machine in memory: lvm2, programs, devices, kernel, all on one state."""

import io
import itertools
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, ClassVar

from fakes import filesystems, shell, thin_tools
from fakes.cgroups import FakeCgroups
from fakes.cryptsetup import FakeCryptsetup
from fakes.devices import BLOCK_BYTES, FakeDevices
from fakes.disks import FakeDisks
from fakes.kernel import FakeKernel
from fakes.lvm import FakeLvm, FakePool, FakeVolume
from fakes.lvm.machine import node_of
from fakes.lvm.records import FakeThin

from lvm import groups, lvm2, lvm_errors
from lvm.active_devices import Device, Devices
from lvm.disk_reader import Disks
from lvm.layout import Layout
from lvm.lvm2 import Lvm
from lvm.session import Session
from mount import table
from mount.block_io import By
from mount.cgroups import Cgroups
from mount.command import Result
from mount.filesystem import Signature
from mount.kernel import Kernel
from mount.stacks import Stack

_DISK_MAJOR = 8


@dataclass(frozen=True)
class Zeroing:
    """How a kind of disk zeroes: `lies` has the ways that leave data where they were."""

    has_write_zeroes: bool = True
    lies: Sequence[By] = ()
    # Why a discard of it is not certain to leave zeroes.
    doubt: str = ""


# As tests/support/real/kinds.py has them.
ZEROING = {
    "loop": Zeroing(),
    "no write zeroes": Zeroing(has_write_zeroes=False, doubt="it is made of other devices"),
    "LBPRZ": Zeroing(),
    "no LBPRZ": Zeroing(lies=(By.DISCARD,), doubt="LBPRZ"),
    "false LBPRZ": Zeroing(lies=(By.DISCARD, By.HOLE)),
}


class FakeHost:
    """What a `Host` is on a real machine, and the state behind it for tests to see."""

    # Whether lvm2's commands are said to a shell of it (--sessions).
    sessions: ClassVar[bool] = False

    def __init__(self, directory: Path, number: int = 0) -> None:
        """One of several machines has a number, so that its groups have UUIDs of their own."""
        self.directory = directory
        self.block = FakeDevices()
        self.lvm2 = FakeLvm(self.block)
        self.lvm2.number = number
        self.lvm2_program: Callable[[Sequence[str]], Result] = self.lvm2
        self.kernel: Kernel = FakeKernel(self.block)
        self.cryptsetup = FakeCryptsetup(self.block)
        self.cgroups: Cgroups = FakeCgroups(self.block)
        self.devices: Devices = self.lvm2
        self.disks: Disks = FakeDisks(self.lvm2, self.block)
        self.commands: list[tuple[str, ...]] = []
        self.lvm = Lvm(self.run, settings=())
        # Asked before each command: may answer in its place, wait, or raise as a kill does.
        self.intercept: Callable[[Sequence[str]], Result | None] = lambda _words: None

    @cached_property
    def session(self) -> Session:
        """A shell of the fake lvm2."""
        place = Path(tempfile.mkdtemp(prefix="carver-session-"))
        weakref.finalize(self, shutil.rmtree, place)
        return Session(
            lambda *words: self.lvm2_program(words), self.converse, place, root=place / "root"
        )

    def converse(
        self, *words: str, prompt: str, environment: Mapping[str, str], report: str
    ) -> shell.FakeShell:
        """The seam `mount.command.Converse`: a shell to which something can happen."""
        begin = shell.converse(lambda told: self.lvm2_program(told))
        return begin(*words, prompt=prompt, environment=environment, report=report)

    def run(self, *words: str, stdin: bytearray | None = None) -> Result:
        """The seam `mount.command.Runner`."""
        if (answer := self.intercept(words)) is not None:
            return answer
        self.commands.append(words)
        if words[0] == "lvm":
            return self.session(*words) if self.sessions else self.lvm2_program(words)
        if words[:2] == ("env", "DM_DISABLE_UDEV=1"):
            words = words[2:]
        if words[0] == "cryptsetup":
            return self.cryptsetup(words, stdin)
        program = filesystems.PROGRAMS.get(words[0])
        assert program is not None, f"an unfaked command: {' '.join(words)}"
        ended = program(words, self.block)
        return Result(ended.exit_code, ended.stdout, ended.stderr)

    @contextmanager
    def stream(self, *words: str) -> Iterator[BinaryIO]:
        """The seam `mount.command.Stream`."""
        if (answer := self.intercept(words)) is None:
            self.commands.append(words)
            answer = thin_tools.run(words, self.lvm2)
        yield io.BytesIO(answer.stdout.encode())
        if answer.exit_code:
            raise lvm_errors.classify(words, answer.exit_code, answer.stderr)

    def new_device(self, size_bytes: int) -> str:
        """A blank block device."""
        # One that went leaves a gap, so the number of devices may be the name of one.
        taken = {one.path for one in self.block}
        number = next(one for one in itertools.count(len(taken)) if f"/dev/fake{one}" not in taken)
        return self.block.add(f"/dev/fake{number}", size_bytes, major=_DISK_MAJOR).path

    @contextmanager
    def disk(self, kind: str, size_bytes: int) -> Iterator[str]:
        """A blank disk of another kind than usual; what it is made of is not free any more."""
        disk = self.block.get(self.new_device(size_bytes))
        if kind == "4 KiB":
            disk.block_bytes = 4096
        if kind == "partition":
            whole, disk = disk, self.block.add(f"{disk.path}p1", size_bytes, major=_DISK_MAJOR)
            whole.partitions.append(Path(disk.path).name)
        if kind in ZEROING:
            disk.lies = set(ZEROING[kind].lies)
            disk.stack = Stack(has_write_zeroes=ZEROING[kind].has_write_zeroes)
            disk.doubts = {disk.path: ZEROING[kind].doubt} if ZEROING[kind].doubt else {}
        for _ in range({"LUKS": 1, "MD": 2}.get(kind, 0)):
            self.block.get(self.new_device(size_bytes)).holders.append(Path(disk.path).name)
        yield disk.path

    @contextmanager
    def own_group(self, name: str, disks: Sequence[str], *options: str) -> Iterator[int]:
        """A group on such disks as a test has; yields how many extents it has."""
        assert not options
        groups.create(self.lvm, name, disks, {}, (1 << 20) - groups.LABEL_BYTES)
        yield sum(disk.extents for disk in self.lvm2.groups[name].disks)

    def new_group(self, *disk_extents: int) -> str:
        """A group with so many extents of 4 MiB on each of its disks."""
        name = f"group{len(self.lvm2.groups)}"
        self.lvm2.add_group(name, disk_extents)
        return name

    def deactivate(self, group: str, name: str) -> None:
        """Take a volume's device away, as a reboot or an operator does."""
        self.lvm2.deactivate(group, name)

    def half_make(self, group: str, name: str, *, loaded: bool) -> None:
        """Leave a volume a device that cannot be used: here that is none."""
        self.lvm2.deactivate(group, name)

    def half_make_raid(self, group: str, name: str, layout: Layout) -> None:
        """Leave in place of a volume what an lvm2 leaves that dies while it makes such a RAID."""
        self.lvm2.deactivate(group, name)
        found = self.lvm2.groups[group]
        for number in range(layout.disks):
            tags = set(found.volumes[name].tags)
            image = FakeVolume(f"{name}_rmeta_{number}", f"image-{number}", {}, tags)
            found.volumes[image.name] = image
        found.seqno += 1

    def leave_parts(self, group: str, name: str, *parts: str) -> None:
        """Leave of a volume what an lvm2 leaves that dies while it activates it: parts of it."""
        self.lvm2.deactivate(group, name)
        self.lvm2.groups[group].volumes[name].left = parts

    def half_make_pool(self, group: str, pool: str) -> None:
        """Leave in place of an empty pool what an lvm2 leaves that dies while it makes one."""
        found = self.lvm2.groups[group]
        self.lvm2.deactivate(group, pool)
        made = found.volumes[pool]
        found.volumes[pool] = FakeVolume(pool, made.uuid, made.extents, made.tags)
        found.spare.clear()
        found.seqno += 1

    def unmake_thin(self, group: str, pool: str, name: str) -> None:
        """Have the pool be without the last volume of it, as if lvm2 had died before making it."""
        found = self.lvm2.groups[group].volumes[pool]
        assert isinstance(found, FakePool)
        self.lvm2.deactivate(group, name)
        found.transaction_in_kernel -= 1

    def half_open(self, device: Device) -> None:
        """Leave on an active volume what a cryptsetup leaves that dies while it opens it."""
        self.cryptsetup.leave(device.path)

    def break_file_system(self, device: str) -> None:
        """Have a mounted ext4 meet an error: it is counted, and with errors=remount-ro the end."""
        self.block.get(device).media.errors += 1
        mounted = [one for one in table.read(self.kernel).mounts if one.source == device]
        if any("errors=remount-ro" in one.super_options for one in mounted):
            assert isinstance(self.kernel, FakeKernel)
            self.kernel.remount_read_only(device)

    def suspend(self, group: str, name: str) -> None:
        """Have whoever uses a volume wait, as lvm2 does while it changes the volume."""
        self.lvm2.suspend(group, name)

    def is_suspended(self, group: str, name: str) -> bool:
        """Whether whoever uses a volume waits."""
        return self.lvm2.is_suspended(group, name)

    def write(self, device: str, fs_type: str) -> None:
        """Put a file system on a device, behind Carver's back."""
        ended = filesystems.mkfs((f"mkfs.{fs_type}", "-q", "--", device), self.block)
        assert ended.exit_code == 0, ended.stderr

    def write_bytes(self, device: str, offset_bytes: int, data: bytes) -> None:
        """Write whole blocks of data on a device, as the program does that has it."""
        self.block.get(device).write(offset_bytes, data)
        self.lvm2.wrote(device, len(data))

    def read_bytes(self, device: str, offset_bytes: int, length_bytes: int) -> bytes:
        """Read whole blocks of data from a device."""
        return self.block.get(device).media.read(offset_bytes, length_bytes)

    def watched(self, group: str) -> set[str]:
        """The volumes of a group that dmeventd is asked to watch."""
        return {one.name for one in self.lvm2.groups[group].volumes.values() if one.watched}

    def written_bytes(self, device: str) -> int:
        """How much of a device was ever written."""
        return len(self.block.get(device).media.blocks) * BLOCK_BYTES

    @contextmanager
    def impatient(self) -> Iterator[None]:
        """Inside, a full pool fails soon what waits for room: here it always does."""
        yield

    def leak_chunk(self, group: str, pool: str, _name: str) -> None:
        """Have a disk fail just as a chunk of the pool is given out to a volume, and work again."""
        found = self.lvm2.groups[group].volumes[pool]
        assert isinstance(found, FakePool)
        found.chunks.leaked += 1

    def fill_metadata(self, group: str, pool: str, blocks: int) -> None:
        """Have so many more blocks of an active pool's metadata used."""
        found = self.lvm2.groups[group].volumes[pool]
        assert isinstance(found, FakePool)
        found.used_metadata_blocks += blocks

    def share(self, group: str) -> None:
        """Have a group be several nodes'."""
        self.lvm2.groups[group].lock_type = "dlm"

    @contextmanager
    def configured(self, **settings: str) -> Iterator[Lvm]:
        """lvm2 on a node whose lvmlocal.conf has these settings; a list is given as its one item.

        A name has two underscores in the place of the slash.
        """
        self.lvm2.conf = {name.replace("__", "/"): told for name, told in settings.items()}
        yield self.lvm
        self.lvm2.conf = {}

    @contextmanager
    def listing(self, root: Path, *disks: str) -> Iterator[Lvm]:
        """lvm2 on a node whose devices file lists these disks and no others."""
        file = root / lvm2.DEVICES_FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        uuids = {one.name: one.uuid for group in self.lvm2.groups.values() for one in group.disks}
        listed = [f"PVID={uuids[one].replace('-', '')}" for one in disks if one in uuids]
        file.write_text("\n".join(f"IDTYPE=devname IDNAME=x DEVNAME=x {one}" for one in listed))
        self.lvm2.devices_file = set(disks)
        yield replace(self.lvm, settings=("devices/use_devicesfile=1",), root=root)
        self.lvm2.devices_file = None

    def label(self, device: str) -> None:
        """Make a device lvm2's, in no group: what vgcreate leaves when it is killed half-way."""
        self.block.get(device).contents = Signature("LVM2_member", "raid", "label")

    def partition(self, device: str) -> None:
        """Put a partition table on a device; the kernel has not read it."""
        self.block.get(device).contents = Signature("dos", "partition table", "12345678")

    def damage(self, device: str) -> None:
        """Break the ext4 on a device so that no program mends it unasked."""
        self.block.get(device).media.damage = "much"

    def unfinish(self, device: str) -> None:
        filesystems.unfinish(self.block.get(device))

    def lose_disk(self, group: str, number: int) -> None:
        """A disk of a group is not there any more; volumes that are active notice."""
        found = self.lvm2.groups[group]
        found.disks[number].missing = True
        self._see_disks(group)

    def bring_disk(self, group: str, number: int) -> None:
        """It is there again, with what it had, and volumes are activated anew."""
        self.lvm2.groups[group].disks[number].missing = False
        self._see_disks(group)

    def replug_disk(self, group: str, number: int) -> None:
        """A disk goes and comes back, as another device; what is active has the one that it was."""
        volumes = self.lvm2.groups[group].volumes
        disk = self.lvm2.groups[group].disks[number].name
        for one in volumes.values():
            holder = volumes[one.pool] if isinstance(one, FakeThin) else one
            if one.active and disk in holder.extents:
                device = self.block.get(node_of(group, one.name))
                device.has_lost_disk = device.unreadable = True
                device.missing = [(0, device.size_bytes)]

    def _see_disks(self, group: str) -> None:
        missing = {one.name for one in self.lvm2.groups[group].disks if one.missing}
        for one in self.lvm2.groups[group].volumes.values():
            one.health = "partial" if missing & set(one.extents) else ""
            self.lvm2.deactivate(group, one.name)

    def fail_image(self, group: str, name: str, number: int) -> None:
        """An image of a RAID takes no writes from now on; what is on it stays."""
        volume = self.lvm2.groups[group].volumes[name]
        disk = self.lvm2.groups[group].disks[number].name
        volume.failed[disk], volume.health = volume.media.copy(), "refresh needed"

    def mark_free(self, group: str, mark: bytes) -> None:
        """Have a mark at the start of each block of all free extents, as of an earlier owner."""
        self.lvm2.groups[group].old = mark

    def cut_power(self) -> None:
        """What the disks had in their volatile caches alone is lost."""
        for group in self.lvm2.groups.values():
            for media in (*group.freed, *(one.media for one in group.volumes.values())):
                media.cut_power()

    def freed_bytes(self, group: str) -> bytes:
        """What is on the extents that removed volumes had, but for zeroes."""
        return b"".join(
            data for media in self.lvm2.groups[group].freed for data in media.blocks.values()
        )

    def erase(self, device: str) -> None:
        """Overwrite what a device holds, behind Carver's back."""
        self.block.get(device).contents = None
