"""Create the defined groups, on block devices or in a file, if they are missing.

Each step checks first whether it is done, so that the first start and one after a crash or a reboot
are the same code. One command creates a group on all of its disks, only if each is vacant;
otherwise the service starts without the group and logs why. Groups do not wait for each other.
"""

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from agent.core import errors
from agent.groups.disk_search import locate
from agent.groups.node_groups import VolumeGroups
from agent.settings.configuration import Configuration
from agent.settings.settings import BackingFile, Config, GroupDefinition
from lvm import groups, lvm2, report
from lvm import lvm_errors as lvm_errors
from lvm.lvm2 import Lvm
from mount import loop, mounts
from mount import mount_errors as mount_errors
from mount.command import Run
from mount.kernel import Kernel
from mount.table import DeviceNumber

_log = logging.getLogger(__name__)

_MINIMUM_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20
_NO_DISK = "/dev/null"

# The tag of a group that Carver made.
_MADE = {"made": "yes"}


@dataclass
class GroupDefinitions:
    """The devices of the groups that Carver creates, and why some could not be created.

    All other groups are the operator's. `begin` and `create` fill it in, `create` in a thread for
    each group.
    """

    configuration: Configuration
    kernel: Kernel
    devices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    # By which definition `create` has ended for a group, be it with a failure.
    ended: dict[str, GroupDefinition] = field(default_factory=dict)
    guard: threading.Lock = field(default_factory=threading.Lock)

    @property
    def pending(self) -> Mapping[str, GroupDefinition]:
        """The definitions of the groups for which `create` has yet to end."""
        every = {one.group: one for one in self.configuration.now.definitions}
        return {name: one for name, one in every.items() if self.ended.get(name) != one}

    def group(self, known: report.Report, name: str) -> report.Group:
        """The group of that name, if it is the defined one; raises GroupRefused, GroupMissing.

        Checked each time: a group that appears or is repaired needs no restart.
        """
        if name not in known.groups and name in self.failures:
            raise errors.GroupRefused(
                name,
                f"{self.failures[name]}. Then restart Carver, or have it"
                " reload its configuration (SIGHUP)",
            )
        if name not in known.groups:
            allowed = self.configuration.now.devices
            absent = [one for one in allowed if not _numbers(self.kernel, [one])]
            raise lvm_errors.GroupMissing(name, absent)
        group = known.group(name)
        self.require_meant(group)
        return group

    def require_meant(self, group: report.Group) -> None:
        """Raise GroupRefused for another group of the name of a defined one."""
        if group.name in self.devices and not self._is_meant(group):
            disks = ", ".join(disk.name for disk in group.disks)
            raise errors.GroupRefused(
                group.name,
                f"there is one on {disks}, which Carver did not make, and none of which is listed;"
                " rename it (`vgrename`), or correct the list",
            )

    def listed(self, group: str) -> Sequence[str]:
        """The devices of a defined group; none for others."""
        return self.devices.get(group, ())

    def absent(self, group: report.Group) -> list[str]:
        """The listed devices of a group that are not among its disks."""
        there = _numbers(self.kernel, (disk.name for disk in group.disks))
        return [one for one in self.listed(group.name) if not _numbers(self.kernel, [one]) & there]

    def _is_meant(self, group: report.Group) -> bool:
        """Whether Carver made the group, by its tag, or it has a listed disk."""
        if group.own_tags.items() & _MADE.items():
            return True
        return len(self.absent(group)) < len(self.devices[group.name])


def on_node(run: Run, config: Config) -> Lvm:
    """lvm2 on this node, not yet confined to devices."""
    root = config.lvm_root
    settings = (*lvm2.without_udev(), *lvm2.without_dbus(root), *lvm2.without_archives(root))
    if config.lvm != "host":
        # The host's lvm2 reads its own /etc/lvm, which says whether a devices file counts.
        settings += lvm2.with_devices_file(root)
    return Lvm(run, (), settings, root)


def begin(definitions: GroupDefinitions, volume_groups: VolumeGroups) -> None:
    """Confine lvm2 to the devices, and note which groups are to be created. No command.

    At the start, and after each reload of the configuration: a definition that is new or changed,
    and one that failed, is pending from then on.
    """
    config = definitions.configuration.now
    for name in list(definitions.failures):
        definitions.ended.pop(name, None)
    for one in definitions.pending.values():
        _note(definitions, volume_groups, one, one.devices or definitions.listed(one.group))
        if (volume_group := volume_groups.known(one.group)) is not None:
            volume_group.is_awaited = True
    with definitions.guard:
        defined = {one.group for one in config.definitions}
        for name in definitions.devices.keys() - defined:
            definitions.failures.pop(name, None)
            definitions.ended.pop(name, None)
            if (volume_group := volume_groups.known(name)) is not None:
                volume_group.is_awaited = False
        kept = {name: one for name, one in definitions.devices.items() if name in defined}
        definitions.devices = kept
        _confine(definitions, volume_groups)


def create(definitions: GroupDefinitions, volume_groups: VolumeGroups, name: str) -> None:
    """Create a defined group if it is missing, once for each definition of it.

    One command if it exists, none for other groups. A failure is logged and kept in `failures`.
    If lvm2 or a disk does not answer, raises CommandError or GroupSilent; then call again.
    """
    volume_group, one = volume_groups.known(name), definitions.pending.get(name)
    if one is None or volume_group is None:
        return
    kernel, is_here = definitions.kernel, True
    with _noted(definitions.failures, name):
        _note(definitions, volume_groups, one, _devices(kernel, one))
        is_here = locate(volume_groups.scan(), name, listed=volume_groups.listed(name)) is not None
    if not is_here:
        own = _seeing(volume_groups.node, kernel, definitions.listed(name))
        known = report.read(own)
        with _noted(definitions.failures, name):
            _make(own, definitions, known, one)
    volume_group.metadata.is_outdated = True
    volume_group.is_awaited = False
    if name not in definitions.failures and (group := volume_group.state()) is not None:
        with _noted(definitions.failures, name):
            definitions.require_meant(group)
            _log_absent(definitions, group)
            fast, slow = _numbers(kernel, one.fast), [d.name for d in group.disks if not d.fast]
            if unmarked := [disk for disk in slow if _numbers(kernel, [disk]) & fast]:
                groups.mark_fast(volume_group.lvm, unmarked)
    definitions.ended[name] = one


def _seeing(lvm: Lvm, kernel: Kernel, devices: Iterable[str]) -> Lvm:
    """lvm2 confined to these devices, since others may not answer.

    With a devices file it is not confined: lvm2 adds the disks of a new group to that file.
    """
    if lvm.root is not None and lvm2.listed_disks(lvm.root) is not None:
        return lvm
    there = [kernel.real_path(one) for one in devices if _numbers(kernel, [one])]
    return replace(lvm, devices=tuple(there) or (_NO_DISK,))


def _note(
    definitions: GroupDefinitions,
    volume_groups: VolumeGroups,
    one: GroupDefinition,
    devices: Sequence[str],
) -> None:
    """Note the devices of a group, and confine lvm2 to all."""
    with definitions.guard:
        definitions.devices = {**definitions.devices, one.group: devices}
        _confine(definitions, volume_groups)


def _confine(definitions: GroupDefinitions, volume_groups: VolumeGroups) -> None:
    config = definitions.configuration.now
    volume_groups.node.devices = _confined(definitions.kernel, config, definitions.devices)


def look(run: Run, kernel: Kernel, config: Config) -> tuple[Lvm, Mapping[str, Sequence[str]]]:
    """lvm2 confined as by `create`, and the devices of each defined group; creates nothing.

    Raises NotReady.
    """
    devices = {one.group: _found(kernel, one) for one in config.definitions}
    return replace(on_node(run, config), devices=_confined(kernel, config, devices)), devices


@contextmanager
def _noted(failures: dict[str, str], name: str) -> Iterator[None]:
    """Log and keep a failure, and go on; raise what did not answer, since it proves nothing."""
    failures.pop(name, None)
    try:
        yield
    except (mount_errors.OutcomeUnknown, errors.GroupSilent):
        raise
    except (errors.AgentError, mount_errors.CommandError, mount_errors.MountError) as error:
        _log.error("volume group %s is not made: %s", name, error)
        failures[name] = str(error)


def _make(
    lvm: Lvm, definitions: GroupDefinitions, known: report.Report, definition: GroupDefinition
) -> None:
    """Create a group on its devices if each is vacant; raises NotVacant, ProbeFailed."""
    name, kernel = definition.group, definitions.kernel
    devices = definitions.devices[name]
    for device in devices:
        mounts.require_unused(kernel, device)
    if len(_numbers(kernel, devices)) < len(devices):
        raise errors.NotReady(f"two of {', '.join(devices)} are the same device; list it once")
    _require_equal_blocks(kernel, devices)
    sizes = [kernel.device_size_bytes(device) for device in devices]
    metadata_bytes = groups.suitable_metadata_bytes(sum(sizes))
    # A killed vgcreate leaves physical volumes without a group.
    orphans = _numbers(kernel, known.orphans)
    for device in devices:
        if not _numbers(kernel, [device]) & orphans:
            mounts.require_blank(kernel, device)
            if definition.file is not None:
                _fill(kernel, device, groups.LABEL_BYTES + metadata_bytes)
    # lvm2 knows devices by their nodes' names, not by all links.
    paths = [kernel.real_path(one) for one in devices]
    groups.create(lvm, name, paths, _MADE, metadata_bytes)
    _log.info("made volume group %s on %s", name, ", ".join(devices))


def _require_equal_blocks(kernel: Kernel, devices: Sequence[str]) -> None:
    """Raise NotReady for disks with different sizes of logical blocks, which lvm2 refuses too.

    A file system with smaller blocks than its disk's cannot be mounted (lvm.conf(5),
    devices/allow_mixed_block_sizes).
    """
    sizes = {device: kernel.logical_block_bytes(device) for device in devices}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{device}: {size}" for device, size in sizes.items())
        raise errors.NotReady(
            f"the devices' logical blocks differ ({listed} bytes): a group is of disks with"
            " blocks of one size; list the others for a group of their own"
        )


def _fill(kernel: Kernel, device: str, size_bytes: int) -> None:
    """Allocate the start of a sparse file, where lvm2 keeps its metadata.

    lvm2 writes it without a flush (lib/device/bcache.c). In a hole, the file system would record
    the new block seconds later, and a power loss before would lose the group's metadata.
    """
    try:
        for offset in range(0, size_bytes, _PIECE_BYTES):
            kernel.write(device, offset, bytes(min(_PIECE_BYTES, size_bytes - offset)))
    except OSError as error:
        raise errors.NotReady(f"{device} cannot be written: {error.strerror}") from None


def _log_absent(definitions: GroupDefinitions, group: report.Group) -> None:
    """Log listed devices that the group lacks; adding them is hard to undo, so left to people."""
    for device in definitions.absent(group):
        try:
            mounts.require_unused(definitions.kernel, device)
            mounts.require_blank(definitions.kernel, device)
        except mount_errors.MountError as error:
            _log.warning("%s is listed for volume group %s: %s", device, group.name, error)
        else:
            _log.warning(
                "%s is listed for volume group %s, and blank; add it with `%s %s`",
                *(device, group.name, groups.vgextend(group), device),
            )


def _found(kernel: Kernel, definition: GroupDefinition) -> Sequence[str]:
    """The devices of a group; for a file its loop device. Raises NotReady without one."""
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
    """The devices of a group; for a file its loop device, which is attached if missing."""
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
    """The size of a new file: at most the free space, or writes would fail later."""
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


def _confined(
    kernel: Kernel, config: Config, devices: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """The devices that lvm2 is confined to; none for those of lvm.conf(5).

    Confined if all groups are in files of Carver's; to others an operator may have added disks.
    """
    on_files = {one.group for one in config.definitions if one.file is not None}
    if not config.devices and not on_files.issuperset(config.groups):
        return ()
    own = [kernel.real_path(device) for listed in devices.values() for device in listed]
    # With an empty list, lvm2 would scan all devices; one that is no disk prevents that.
    return (*config.devices, *own) or (_NO_DISK,)


def _numbers(kernel: Kernel, paths: Iterable[str]) -> set[DeviceNumber]:
    """The numbers of the devices that exist."""
    found = set()
    for path in paths:
        with suppress(OSError):
            found.add(kernel.device_number(path))
    return found
