"""Create the volume groups that the configuration defines, on block devices or in a file.

Groups that exist are left as they are. Each step first checks whether it is done already, so the
same code serves the first start and a start after a crash or a reboot. One command creates a group
on all of its disks, and only if each disk is vacant. Otherwise the service starts without the
group, and logs why. Groups do not wait for each other.
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

# Minimum size of the file of a volume group, in bytes. The default size is a multiple of the
# minimum.
_MINIMUM_BYTES = 64 << 20
# Size of one write when the start of a volume group's new file is filled, in bytes.
_PIECE_BYTES = 1 << 20
# Path of a device that is no disk. lvm2 that is confined to this device sees no disk at all.
_NO_DISK = "/dev/null"

# LVM tag of each volume group that Carver created.
_MADE = {"made": "yes"}


@dataclass
class GroupDefinitions:
    """The devices of the volume groups that Carver creates, and why some could not be created.

    These are the groups that the configuration defines; all others are the operator's. `begin` and
    `create` fill in the fields; `create` runs in a thread for each group. `devices` has the devices
    of each defined group, `failures` the error of each group that could not be created, both by the
    group's name.
    """

    configuration: Configuration
    kernel: Kernel
    devices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    # The definition of each group for which `create` has ended, with success or with a failure, by
    # the group's name.
    finished: dict[str, GroupDefinition] = field(default_factory=dict)
    guard: threading.Lock = field(default_factory=threading.Lock)

    @property
    def pending(self) -> Mapping[str, GroupDefinition]:
        """The definitions of the volume groups for which `create` has yet to end, by their names.

        A definition that was changed since `create` ended is included.
        """
        definitions = {
            definition.group: definition for definition in self.configuration.now.definitions
        }
        return {
            name: definition
            for name, definition in definitions.items()
            if self.finished.get(name) != definition
        }

    def group(self, state: report.Report, name: str) -> report.Group:
        """Return the volume group called `name` from a report, if it is the one that is meant.

        Raises GroupRefused if the group is not in the report because it could not be created, or
        if it is not the group that the configuration defines. Raises GroupMissing if the group is
        not in the report for another reason. The check is made on each call, so that a group that
        appears or is repaired needs no restart.
        """
        if name not in state.groups and name in self.failures:
            raise errors.GroupRefused(
                name,
                f"{self.failures[name]}. Then restart Carver, or have it"
                " reload its configuration (SIGHUP)",
            )
        if name not in state.groups:
            allowed = self.configuration.now.devices
            absent = [device for device in allowed if not _numbers(self.kernel, [device])]
            raise lvm_errors.GroupMissing(name, absent)
        group = state.groups[name]
        self.require_expected(group)
        return group

    def require_expected(self, group: report.Group) -> None:
        """Raise GroupRefused for a volume group that is not the one which Carver creates.

        The group has the name of a group that Carver creates, but no listed disk, and not the tag
        of groups that Carver created. Groups that the configuration does not define pass.
        """
        if group.name in self.devices and not self._is_expected(group):
            disks = ", ".join(disk.name for disk in group.disks)
            raise errors.GroupRefused(
                group.name,
                f"there is one on {disks}, which Carver did not make, and none of which is listed;"
                " rename it (`vgrename`), or correct the list",
            )

    def listed(self, group: str) -> Sequence[str]:
        """Return the devices of a volume group that Carver creates; none for other groups."""
        return self.devices.get(group, ())

    def absent(self, group: report.Group) -> list[str]:
        """Return the devices that are listed for a volume group and are not among its disks."""
        present = _numbers(self.kernel, (disk.name for disk in group.disks))
        return [
            device
            for device in self.listed(group.name)
            if not _numbers(self.kernel, [device]) & present
        ]

    def _is_expected(self, group: report.Group) -> bool:
        """Whether a volume group has a listed disk, or the tag of groups that Carver creates."""
        if group.own_tags.items() & _MADE.items():
            return True
        return len(self.absent(group)) < len(self.devices[group.name])


def on_node(run: Run, config: Config) -> Lvm:
    """Return lvm2 with the settings for this node, not yet confined to any devices."""
    root = config.lvm_root
    settings = (*lvm2.without_udev(), *lvm2.without_dbus(root), *lvm2.without_archives(root))
    if config.lvm != "host":
        # Say whether lvm2 uses a devices file, except with `lvm = "host"`: the host's lvm2 reads
        # that from its own /etc/lvm.
        settings += lvm2.with_devices_file(root)
    return Lvm(run, (), settings, root)


def begin(definitions: GroupDefinitions, volume_groups: VolumeGroups) -> None:
    """Confine lvm2 to the configured devices, and note which volume groups are to be created.

    Runs no command. Called at the start and after each reload of the configuration. From then on
    the definition of a group is pending if it is new or changed, or if its creation failed before.
    Groups that are defined no longer are forgotten.
    """
    config = definitions.configuration.now
    for name in list(definitions.failures):
        definitions.finished.pop(name, None)
    for definition in definitions.pending.values():
        _note(
            definitions,
            volume_groups,
            definition,
            definition.devices or definitions.listed(definition.group),
        )
        if (volume_group := volume_groups.known(definition.group)) is not None:
            volume_group.is_awaited = True
    with definitions.guard:
        defined = {definition.group for definition in config.definitions}
        for name in {*definitions.failures, *definitions.finished} - defined:
            definitions.failures.pop(name, None)
            definitions.finished.pop(name, None)
        for name in definitions.devices.keys() - defined:
            if (volume_group := volume_groups.known(name)) is not None:
                volume_group.is_awaited = False
        still_defined = {
            name: group_devices
            for name, group_devices in definitions.devices.items()
            if name in defined
        }
        definitions.devices = still_defined
        _confine(definitions, volume_groups)


def create(definitions: GroupDefinitions, volume_groups: VolumeGroups, name: str) -> None:
    """Create a volume group that the configuration defines, if it is missing.

    Does nothing for a group that is not defined, or whose present definition was dealt with before.
    If the group exists, runs one lvm2 command, marks the configured fast disks, and logs the listed
    devices that are not in the group. A failure is logged and kept in `failures`. Raises
    CommandError or GroupSilent if lvm2 or a disk does not answer; the caller has to call `create`
    again then.
    """
    volume_group, definition = volume_groups.known(name), definitions.pending.get(name)
    if definition is None or volume_group is None:
        return
    kernel, is_here = definitions.kernel, True
    with _keep_failure(definitions.failures, name):
        _note(definitions, volume_groups, definition, _devices(kernel, definition))
        is_here = (
            locate(volume_groups.scan(), name, listed_disks=volume_groups.listed(name)) is not None
        )
    if not is_here:
        lvm = _seeing(volume_groups.node, kernel, definitions.listed(name))
        node_report = report.read(lvm)
        if definitions.pending.get(name) != definition:
            return  # a reload has removed or changed the definition meanwhile
        with _keep_failure(definitions.failures, name):
            _make(lvm, definitions, node_report, definition)
    volume_group.metadata.is_outdated = True
    volume_group.is_awaited = False
    if name not in definitions.failures and (group := volume_group.state()) is not None:
        with _keep_failure(definitions.failures, name):
            definitions.require_expected(group)
            _log_absent(definitions, group)
            fast, slow = (
                _numbers(kernel, definition.fast),
                [disk.name for disk in group.disks if not disk.fast],
            )
            if unmarked := [disk for disk in slow if _numbers(kernel, [disk]) & fast]:
                groups.mark_fast(volume_group.lvm, unmarked)
    if definitions.pending.get(name) == definition:
        definitions.finished[name] = definition


def _seeing(lvm: Lvm, kernel: Kernel, devices: Iterable[str]) -> Lvm:
    """Return lvm2 confined to those of these devices that exist: other devices may not answer.

    On a node with a devices file (lvmdevices(8)) lvm2 is not confined, so that it adds the disks of
    a new volume group to that file.
    """
    if lvm.root is not None and lvm2.listed_disks(lvm.root) is not None:
        return lvm
    paths = [kernel.real_path(device) for device in devices if _numbers(kernel, [device])]
    return replace(lvm, devices=tuple(paths) or (_NO_DISK,))


def _note(
    definitions: GroupDefinitions,
    volume_groups: VolumeGroups,
    definition: GroupDefinition,
    devices: Sequence[str],
) -> None:
    """Note the devices of a volume group that Carver creates, and confine lvm2 anew.

    lvm2 is confined to the devices of all such groups, unless lvm.conf(5) decides (`_confined`).
    """
    with definitions.guard:
        definitions.devices = {**definitions.devices, definition.group: devices}
        _confine(definitions, volume_groups)


def _confine(definitions: GroupDefinitions, volume_groups: VolumeGroups) -> None:
    """Confine lvm2 to the volume groups' devices, unless lvm.conf(5) decides (`_confined`)."""
    config = definitions.configuration.now
    volume_groups.node.devices = _confined(definitions.kernel, config, definitions.devices)


def service_lvm(
    run: Run, kernel: Kernel, config: Config
) -> tuple[Lvm, Mapping[str, Sequence[str]]]:
    """Return lvm2 as the service uses it, and the devices of the volume groups that Carver creates.

    lvm2 is confined to devices as by `create`. No volume group, file or loop device is created.
    Raises NotReady if the file of a group has no loop device.
    """
    devices = {
        definition.group: _existing_devices(kernel, definition) for definition in config.definitions
    }
    return replace(on_node(run, config), devices=_confined(kernel, config, devices)), devices


@contextmanager
def _keep_failure(failures: dict[str, str], name: str) -> Iterator[None]:
    """Log an error of the body, keep it in `failures` as the volume group's, and suppress it.

    An earlier error of the group is removed. OutcomeUnknown and GroupSilent are raised instead:
    they mean that lvm2 or a disk did not answer, which proves nothing about the group.
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
    lvm: Lvm, definitions: GroupDefinitions, state: report.Report, definition: GroupDefinition
) -> None:
    """Create a volume group on its devices if each device is vacant.

    A device that is a physical volume without a group counts as vacant. Raises NotReady if two
    devices are the same or differ in their blocks, NotVacant if a device has contents or is in use,
    and ProbeFailed if the contents cannot be determined.
    """
    name, kernel = definition.group, definitions.kernel
    devices = definitions.devices[name]
    for device in devices:
        mounts.require_unused(kernel, device)
    if len(_numbers(kernel, devices)) < len(devices):
        raise errors.NotReady(f"two of {', '.join(devices)} are the same device; list it once")
    _require_equal_blocks(kernel, devices)
    sizes = [kernel.device_size_bytes(device) for device in devices]
    metadata_bytes = groups.suitable_metadata_bytes(sum(sizes))
    # Take devices that are physical volumes without a group without a check of their contents: a
    # killed vgcreate leaves such devices.
    orphans = _numbers(kernel, state.orphans)
    for device in devices:
        if not _numbers(kernel, [device]) & orphans:
            mounts.require_blank(kernel, device)
            if definition.file is not None:
                _fill(kernel, device, groups.LABEL_BYTES + metadata_bytes)
    # Pass the paths of device nodes to lvm2, since lvm2 does not know each symbolic link.
    paths = [kernel.real_path(device) for device in devices]
    groups.create(lvm, name, paths, _MADE, metadata_bytes)
    _log.info("made volume group %s on %s", name, ", ".join(devices))


def _require_equal_blocks(kernel: Kernel, devices: Sequence[str]) -> None:
    """Raise NotReady if the devices of a volume group differ in the size of their logical blocks.

    lvm2 refuses such a group as well. A file system with smaller blocks than its disk's cannot be
    mounted (lvm.conf(5), devices/allow_mixed_block_sizes).
    """
    sizes = {device: kernel.logical_block_bytes(device) for device in devices}
    if len(set(sizes.values())) > 1:
        sizes_text = ", ".join(f"{device}: {size}" for device, size in sizes.items())
        raise errors.NotReady(
            f"the devices' logical blocks differ ({sizes_text} bytes): a group is of disks with"
            " blocks of one size; list the others for a group of their own"
        )


def _fill(kernel: Kernel, device: str, size_bytes: int) -> None:
    """Allocate the start of a sparse file below a loop device, where lvm2 keeps its metadata.

    lvm2 writes its metadata without a flush (lib/device/bcache.c). In a hole of the file, the file
    system would record the new block only seconds later, and a power loss in these seconds would
    lose the group's metadata. Raises NotReady if the device cannot be written.
    """
    try:
        for offset in range(0, size_bytes, _PIECE_BYTES):
            kernel.write(device, offset, bytes(min(_PIECE_BYTES, size_bytes - offset)))
    except OSError as error:
        raise errors.NotReady(f"{device} cannot be written: {error.strerror}") from None


def _log_absent(definitions: GroupDefinitions, group: report.Group) -> None:
    """Log the devices that are listed for a volume group and are not among its disks.

    Carver does not add such a device to the group, because that is hard to undo: the operator
    decides.
    """
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


def _existing_devices(kernel: Kernel, definition: GroupDefinition) -> Sequence[str]:
    """Return the devices of a volume group that Carver creates, without creating any device.

    For a group in a file, this is the file's loop device. Raises NotReady if the file has no loop
    device.
    """
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
    """Return the devices of a volume group that Carver creates; create the file of a group in one.

    For a group in a file, this is the file's loop device. The file is created, and the loop device
    attached, if they are missing. Raises NotReady if the file cannot be created.
    """
    if definition.file is None:
        return definition.devices
    file = definition.file
    try:
        file.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Open the file without truncating it: an existing file holds volumes, whatever size is
        # configured now.
        with open(file.path, "ab", opener=_private) as opened:
            if opened.seek(0, os.SEEK_END) == 0:
                size_bytes = _planned_bytes(file)
                opened.truncate(size_bytes)
                _log.info("made %s, %d bytes, sparse", file.path, size_bytes)
    except OSError as error:
        raise errors.NotReady(f"{file.path}: {error.strerror}") from None
    return (loop.attach(kernel, str(file.path)),)


def _planned_bytes(file: BackingFile) -> int:
    """Return the size of the file of a new volume group, in bytes.

    The size is the configured one, or half of the file system's free space. Raises NotReady if it
    is more than the free space, since writes to volumes would fail later, or below the minimum.
    """
    status = os.statvfs(file.path.parent)
    free_bytes = status.f_bavail * status.f_frsize
    planned_bytes = file.size_bytes or free_bytes // 2 // _MINIMUM_BYTES * _MINIMUM_BYTES
    if not _MINIMUM_BYTES <= planned_bytes <= free_bytes:
        raise errors.NotReady(
            f"{file.path.parent} has {free_bytes} bytes free; the group's file, of {planned_bytes}"
            f" bytes, must fit there and be {_MINIMUM_BYTES} at least: set another file or"
            " file_size"
        )
    return planned_bytes


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _confined(
    kernel: Kernel, config: Config, devices: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """Return the paths of the devices that lvm2 is confined to; none if lvm.conf(5) decides.

    lvm2 is confined if the setting `devices` names devices, or if all volume groups are in files
    that Carver made. Otherwise an operator may have added disks to a group that Carver does not
    know. `devices` has the devices of each group that Carver creates.
    """
    on_files = {
        definition.group for definition in config.definitions if definition.file is not None
    }
    if not config.devices and not on_files.issuperset(config.groups):
        return ()
    own_paths = [
        kernel.real_path(device) for group_devices in devices.values() for device in group_devices
    ]
    # A path that is no disk stands for an empty list, with which lvm2 would scan all devices.
    return (*config.devices, *own_paths) or (_NO_DISK,)


def _numbers(kernel: Kernel, paths: Iterable[str]) -> set[DeviceNumber]:
    """Return the device numbers (major, minor) of the devices at these paths, if they exist."""
    numbers = set()
    for path in paths:
        with suppress(OSError):
            numbers.add(kernel.device_number(path))
    return numbers
