"""Founding: the groups that Carver is to make, of block devices or on a file, made where missing.

Every step is looked for first, so the first start, a restart, one after a crash and one after a
reboot are the same code. A group is made by one command on all of its disks, and only if each is
vacant; otherwise nothing is changed, the service starts without the group, and says why. Each group
is made for itself: one whose disk hangs keeps no other from being there.
"""

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from agent.core import errors
from agent.core.disks import locate
from agent.core.settings import BackingFile, Config, GroupDefinition
from agent.core.volume_groups import VolumeGroups
from lvm import groups, lvm2, report, tags
from lvm.lvm2 import Lvm
from mount import errors as mount_errors
from mount import in_use, loop
from mount.command import Run
from mount.kernel import Kernel
from mount.table import DeviceNumber

_log = logging.getLogger(__name__)

_MINIMUM_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20
_NO_DISK = "/dev/null"

# The tag that tells a group that Carver made from an operator's, whatever its disks are called.
_MADE = {"made": "yes"}


@dataclass
class GroupDefinitions:
    """The groups that Carver makes: their devices, and why some of them could not be made.

    A group that is in none of them is the operator's, and is taken as it is. `begin` and `lay` fill
    it in, `lay` for one group in each thread; those it has not been done for are `pending`.
    """

    kernel: Kernel
    devices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    pending: set[str] = field(default_factory=set)
    guard: threading.Lock = field(default_factory=threading.Lock)

    def group(self, known: report.Report, name: str) -> report.Group:
        """The group of that name, if it is the one that is meant.

        Raises GroupRefused, GroupMissing. What is wrong is seen anew each time: a group that
        appears, or is put right, needs no restart.
        """
        if name not in known.groups and name in self.failures:
            raise errors.GroupRefused(name, f"{self.failures[name]}. Then restart Carver")
        group = known.group(name)
        self.require_meant(group)
        return group

    def require_meant(self, group: report.Group) -> None:
        """Raise GroupRefused for a group of the name of one that Carver makes, which is another."""
        if group.name in self.devices and not self._is_meant(group):
            disks = ", ".join(disk.name for disk in group.disks)
            raise errors.GroupRefused(
                group.name,
                f"there is one on {disks}, which Carver did not make, and none of which is listed;"
                " rename it (`vgrename`), or correct the list",
            )

    def listed(self, group: str) -> Sequence[str]:
        """The devices that Carver makes a group of; none where it does not make it."""
        return self.devices.get(group, ())

    def absent(self, group: report.Group) -> list[str]:
        """The devices that are listed for a group, and are none of its disks."""
        there = self._numbers(disk.name for disk in group.disks)
        listed = self.devices.get(group.name, ())
        return [one for one in listed if not self._numbers([one]) & there]

    def _is_meant(self, group: report.Group) -> bool:
        """Whether Carver made it, by its tag, or it has one of the disks that are listed."""
        if tags.decode(group.tags).items() & _MADE.items():
            return True
        return len(self.absent(group)) < len(self.devices[group.name])

    def _numbers(self, paths: Iterable[str]) -> set[DeviceNumber]:
        return _numbers(self.kernel, paths)


# Where every group is the operator's.
NONE = GroupDefinitions(Kernel())


def on_node(run: Run, config: Config) -> Lvm:
    """lvm2 as it is called on this node, before it is known what devices it is to see."""
    return Lvm(run, (), _settings(config), config.lvm_root)


def begin(lvm: Lvm, laid: GroupDefinitions, config: Config, volume_groups: VolumeGroups) -> None:
    """Say what lvm2 sees from now on, and which groups are to be laid. No command."""
    lvm.devices = _confined(laid.kernel, config, laid.devices)
    for one in config.definitions:
        _found_on(lvm, laid, config, one, one.devices)
        laid.pending.add(one.group)
        if (volume_group := volume_groups.known(one.group)) is not None:
            volume_group.is_awaited = True


def lay(
    lvm: Lvm, laid: GroupDefinitions, config: Config, volume_groups: VolumeGroups, name: str
) -> None:
    """Make what is missing of a group, once in the life of a process.

    One command where the group is there, none where Carver is not to make it. One that cannot be
    made is told in the log, and by Foundations to whoever needs the group. Where lvm2 or a disk
    does not answer, CommandError or GroupSilent is raised and all is to be done again: each step
    is looked for first.
    """
    volume_group = volume_groups.known(name)
    if name not in laid.pending or volume_group is None:
        return
    one = next(one for one in config.definitions if one.group == name)
    kernel, is_here = laid.kernel, True
    with _noted(laid.failures, name):
        _found_on(lvm, laid, config, one, _devices(kernel, one))
        is_here = locate(volume_groups.scan(), name, listed=volume_groups.listed(name)) is not None
    if not is_here:
        own = _seeing(lvm, kernel, laid.devices[name])
        known = report.read(own)
        with _noted(laid.failures, name):
            _make(own, laid, known, one)
    volume_group.outdate()
    volume_group.is_awaited = False
    if name not in laid.failures and (group := volume_group.state()) is not None:
        with _noted(laid.failures, name):
            laid.require_meant(group)
            _tell_of_absent(laid, group)
            slow = [disk.name for disk in group.disks if not disk.fast]
            if unmarked := _same_as(kernel, slow, one.fast):
                groups.mark_fast(volume_group.lvm, unmarked)
    laid.pending.discard(name)


def _seeing(lvm: Lvm, kernel: Kernel, devices: Iterable[str]) -> Lvm:
    """lvm2, which sees these devices alone, as far as they are there: others may not answer.

    Where the node lists the disks that lvm2 may use, it is lvm2 as it is on the node, which puts
    those of a new group on the list.
    """
    if lvm.root is not None and lvm2.listed_disks(lvm.root) is not None:
        return lvm
    there = [kernel.real_path(one) for one in devices if _numbers(kernel, [one])]
    return replace(lvm, devices=tuple(there) or (_NO_DISK,))


def _found_on(
    lvm: Lvm, laid: GroupDefinitions, config: Config, one: GroupDefinition, devices: Sequence[str]
) -> None:
    """Note the devices of a group, to which lvm2 may be confined."""
    with laid.guard:
        laid.devices = {**laid.devices, one.group: devices}
        lvm.devices = _confined(laid.kernel, config, laid.devices)


def look(run: Run, kernel: Kernel, config: Config) -> Lvm:
    """lvm2 as `lay` would have it called, without making anything; raises NotReady."""
    devices = found(kernel, config)
    return replace(on_node(run, config), devices=_confined(kernel, config, devices))


def found(kernel: Kernel, config: Config) -> Mapping[str, Sequence[str]]:
    """The devices of each group that Carver makes, without making anything; raises NotReady."""
    return {one.group: _found(kernel, one) for one in config.definitions}


@contextmanager
def _noted(failures: dict[str, str], name: str) -> Iterator[None]:
    """Keep a failure as the reason for which a group is not there, and go on.

    What does not answer proves nothing of its group.
    """
    failures.pop(name, None)
    try:
        yield
    except (mount_errors.OutcomeUnknown, errors.GroupSilent):
        raise
    except (errors.AgentError, mount_errors.CommandError, mount_errors.MountError) as error:
        _log.error("volume group %s is not made: %s", name, error)
        failures[name] = str(error)


def _make(
    lvm: Lvm, laid: GroupDefinitions, known: report.Report, definition: GroupDefinition
) -> None:
    """Make a group of its devices, each of which is vacant; raises NotVacant, ProbeFailed."""
    name, kernel = definition.group, laid.kernel
    devices = laid.devices[name]
    for device in devices:
        in_use.require_unused(kernel, device)
    if len(_numbers(kernel, devices)) < len(devices):
        raise errors.NotReady(f"two of {', '.join(devices)} are the same device; list it once")
    _require_equal_blocks(kernel, devices)
    sizes = [kernel.device_size_bytes(device) for device in devices]
    metadata_bytes = groups.suitable_metadata_bytes(sum(sizes))
    # Labelled by lvm2 and in no group: what vgcreate leaves when it is killed half-way.
    orphans = _numbers(kernel, known.orphans)
    for device in devices:
        if not _numbers(kernel, [device]) & orphans:
            in_use.require_blank(kernel, device)
            if definition.file is not None:
                _fill(kernel, device, groups.LABEL_BYTES + metadata_bytes)
    # lvm2 knows devices by the names of their nodes, not by every link that leads to them.
    paths = [kernel.real_path(one) for one in devices]
    groups.create(lvm, name, paths, _MADE, metadata_bytes)
    _log.info("made volume group %s on %s", name, ", ".join(devices))


def _require_equal_blocks(kernel: Kernel, devices: Sequence[str]) -> None:
    """Raise NotReady for disks of 512 bytes beside such of 4 KiB, which lvm2 refuses too.

    A file system's blocks may be no smaller than its disk's: what was made on the one could not be
    mounted once it lies on the other (lvm.conf(5), devices/allow_mixed_block_sizes).
    """
    sizes = {device: kernel.logical_block_bytes(device) for device in devices}
    if len(set(sizes.values())) > 1:
        told = ", ".join(f"{device}: {size}" for device, size in sizes.items())
        raise errors.NotReady(
            f"the devices' logical blocks differ ({told} bytes): a group is of disks with blocks of"
            " one size; list the others for a group of their own"
        )


def _fill(kernel: Kernel, device: str, size_bytes: int) -> None:
    """Have the part of a sparse file in which lvm2 keeps metadata on the disk.

    lvm2 writes there without a flush (lib/device/bcache.c). In a hole that takes a new block, and
    which one is on record in the file's own file system seconds later: a power loss meanwhile would
    leave a header that points to zeroes, and no group.
    """
    try:
        for offset in range(0, size_bytes, _PIECE_BYTES):
            kernel.write(device, offset, bytes(min(_PIECE_BYTES, size_bytes - offset)))
    except OSError as error:
        raise errors.NotReady(f"{device} cannot be written: {error.strerror}") from None


def _tell_of_absent(laid: GroupDefinitions, group: report.Group) -> None:
    """A disk that is listed later is not added unasked: `vgextend` cannot be undone in general."""
    for device in laid.absent(group):
        try:
            in_use.require_unused(laid.kernel, device)
            in_use.require_blank(laid.kernel, device)
        except mount_errors.MountError as error:
            _log.warning("%s is listed for volume group %s: %s", device, group.name, error)
        else:
            _log.warning(
                "%s is listed for volume group %s, and blank; add it with `vgextend %s %s`",
                *(device, group.name, group.name, device),
            )


def _found(kernel: Kernel, definition: GroupDefinition) -> Sequence[str]:
    """The devices that a group is on, as they are now."""
    if definition.file is None:
        return definition.devices
    path = definition.file.path
    device = loop.find(kernel, str(path)) if path.exists() else None
    if device is None:
        raise errors.NotReady(
            f"{path} has no loop device, which Carver makes when it starts: start the service, or"
            " name your own group in a class"
        )
    return (device,)


def _devices(kernel: Kernel, definition: GroupDefinition) -> Sequence[str]:
    """The devices that a group is on; for a file its loop device, made where it is not there."""
    if definition.file is None:
        return definition.devices
    file = definition.file
    try:
        file.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Never truncated: an existing file holds volumes, whatever size is configured now.
        with open(file.path, "ab", opener=_private) as opened:
            if opened.seek(0, os.SEEK_END) == 0:
                size_bytes = _planned_bytes(file)
                opened.truncate(size_bytes)
                _log.info("made %s, %d bytes, sparse", file.path, size_bytes)
    except OSError as error:
        raise errors.NotReady(f"{file.path}: {error.strerror}") from None
    return (loop.attach(kernel, str(file.path)),)


def _planned_bytes(file: BackingFile) -> int:
    """The size for a new file. More than is free would fail its volumes' writes later."""
    status = os.statvfs(file.path.parent)
    free = status.f_bavail * status.f_frsize
    planned = file.size_bytes or free // 2 // _MINIMUM_BYTES * _MINIMUM_BYTES
    if not _MINIMUM_BYTES <= planned <= free:
        raise errors.NotReady(
            f"{file.path.parent} has {free} bytes free; the group's file, of {planned} bytes, must"
            f" fit there and be {_MINIMUM_BYTES} at least: set another file or file_size"
        )
    return planned


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _settings(config: Config) -> tuple[str, ...]:
    root = config.lvm_root
    if config.lvm == "host":
        # It was built for its /etc/lvm, and knows by itself whether a devices file counts.
        return (*lvm2.without_udev(), *lvm2.without_archives(root))
    devices_file = lvm2.with_devices_file(root)
    return (*lvm2.without_udev(), *lvm2.without_archives(root), *devices_file)


def _confined(
    kernel: Kernel, config: Config, devices: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """The devices that lvm2 is confined to; none leaves that to lvm.conf(5).

    Where every group is on a file of Carver's own, lvm2 need look at nothing else. Elsewhere an
    operator may have added disks that are not listed.
    """
    on_files = {one.group for one in config.definitions if one.file is not None}
    if not config.devices and not on_files.issuperset(config.groups):
        return ()
    own = [kernel.real_path(device) for listed in devices.values() for device in listed]
    # Without any, lvm2 would look at all: one that is no disk keeps it from that.
    return (*config.devices, *own) or (_NO_DISK,)


def _same_as(kernel: Kernel, disks: Iterable[str], devices: Iterable[str]) -> list[str]:
    """The disks that are one of the devices, whatever they are called there."""
    wanted = _numbers(kernel, devices)
    return [disk for disk in disks if _numbers(kernel, [disk]) & wanted]


def _numbers(kernel: Kernel, paths: Iterable[str]) -> set[DeviceNumber]:
    """The devices' numbers, which tell whether two names are one device; those that are there."""
    found = set()
    for path in paths:
        with suppress(OSError):
            found.add(kernel.device_number(path))
    return found
