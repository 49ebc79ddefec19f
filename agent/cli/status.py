"""The overview of `carver status`: classes, volume groups, thin pools, volumes, snapshots.

The overview is read from LVM and the kernel by the service's own modules, so it is correct whether
or not the service runs. Reading takes one lvm2 command and changes nothing.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from agent.core import errors, ids, sockets, tag
from agent.daemon.host import Host
from agent.groups import group_definitions
from agent.groups.node_groups import VolumeGroups
from agent.operations import diagnosis as conditions
from agent.operations.diagnosis import Condition, Diagnosis
from agent.settings.classes import DeviceClass
from agent.settings.configuration import Configuration
from agent.settings.settings import Config
from agent.volumes import records, users
from agent.volumes.activator import Activator
from agent.volumes.allocation import Allocators
from agent.volumes.reports import MONITOR_AGE_SECONDS, Reports
from lvm import names, report, tuning
from lvm.active_devices import Device
from lvm.room import Room
from mount import filesystem_health as usage
from mount import mount_errors as mount_errors
from mount import table
from mount.kernel import Kernel
from mount.table import Mount, Table

# Time limit, in seconds, of asking the service for the progress of background work.
_ANSWER_SECONDS = 2.0


@dataclass(frozen=True)
class Class:
    """A device class. `largest_bytes` is the size of the largest volume that it can have now.

    `largest_bytes` is what GetCapacity reports. It is None where the class's volume group is not on
    this node, or the class's thin pool does not answer.
    """

    name: str
    group: str
    layout: str
    fs_type: str
    default: bool
    largest_bytes: int | None


@dataclass(frozen=True)
class Group:
    """A volume group that a device class names. Sizes include only the disks that are present."""

    name: str
    present: bool
    size_bytes: int = 0
    free_bytes: int = 0
    disks: int = 0
    missing_disks: int = 0
    # Reason why the volume group is refused, though a group of that name is present; otherwise
    # empty.
    problem: str = ""
    # Sentences about disks that claim to belong to the volume group and are ignored, each with the
    # reason.
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """A path at which a volume's file system is mounted, or its device is bind-mounted."""

    path: str
    read_only: bool


@dataclass(frozen=True)
class Health:
    """A health problem of a volume or snapshot, in the words of docs/troubleshooting.md."""

    status: str
    reason: str
    message: str


@dataclass(frozen=True)
class Volume:
    """A volume of Carver's.

    `total_bytes` and `used_bytes` are those of the volume's file system, and None while no file
    system is mounted. `claim` is the namespace, a slash and the name of the volume's claim, if the
    caller of CreateVolume sent these. `contents` is the file system, `raw block`, or empty for a
    volume that was never formatted. `encryption` is empty for a volume that is not encrypted.
    """

    id: str
    name: str
    group: str
    size_bytes: int
    layout: str
    contents: str
    state: str
    claim: str
    places: tuple[Place, ...]
    total_bytes: int | None
    used_bytes: int | None
    health: tuple[Health, ...]
    encryption: str = ""
    # I/O limits of the volume at its present size, as the kernel gets them; empty without limits.
    limits: str = ""
    # Progress of erasing, zeroing or copying the volume; empty if no such work is in progress, or
    # the service does not answer.
    progress: str = ""


@dataclass(frozen=True)
class Pool:
    """A thin pool in one of Carver's volume groups.

    `data_percent` and `metadata_percent` are the used parts of the pool, and None while the pool is
    inactive.
    """

    name: str
    group: str
    size_bytes: int
    data_percent: float | None
    metadata_percent: float | None


@dataclass(frozen=True)
class Snapshot:
    """A snapshot of Carver's. `volume` is the name of the snapshot's source volume.

    `area_bytes` is the size of the snapshot's COW store, and `area_percent` its used part; both are
    None for a thin snapshot. `taken_seconds` is the snapshot's time, in seconds since the epoch.
    """

    id: str
    name: str
    volume: str
    group: str
    size_bytes: int
    taken_seconds: int
    area_bytes: int | None
    area_percent: float | None
    health: tuple[Health, ...]


@dataclass(frozen=True)
class Overview:
    """The overview of a node at one moment.

    `serving` is whether a process answers at the CSI socket, whose path is `endpoint`.
    """

    node: str
    driver: str
    version: str
    endpoint: str
    serving: bool
    classes: tuple[Class, ...]
    groups: tuple[Group, ...]
    pools: tuple[Pool, ...]
    volumes: tuple[Volume, ...]
    snapshots: tuple[Snapshot, ...]


def read(settings: Config, host: Host) -> Overview:
    """Read the overview of this node.

    Raises NotReady if the file of a volume group has no loop device, and the errors
    of lvm2's report.
    """
    node_groups = volume_groups(settings, host)
    reports = Reports(node_groups)
    activator = Activator(node_groups, host.devices, reports)
    node_report = reports.seen(MONITOR_AGE_SECONDS)
    allocators = Allocators(Configuration(settings), activator)
    diagnosis = Diagnosis(host.kernel, host.devices, activator)
    mounts = table.read(host.kernel)
    is_serving = sockets.is_served(settings.endpoint)
    progress = _progress(settings.endpoint) if is_serving else {}
    return Overview(
        node=settings.node_id,
        driver=settings.driver_name,
        version=version("carver"),
        endpoint=str(settings.endpoint),
        serving=is_serving,
        classes=tuple(
            _class(device_class, node_report, allocators) for device_class in settings.classes
        ),
        groups=tuple(_group(name, node_report, reports) for name in settings.groups),
        pools=tuple(_pools(node_report.groups.values())),
        volumes=tuple(
            replace(
                _volume(
                    *(host.kernel, mounts, volume, activator.device(volume.backing)),
                    diagnosis.of(volume, mounts),
                ),
                progress=progress.get(str(volume.id), ""),
            )
            for volume in node_report.volumes()
        ),
        snapshots=tuple(
            _snapshot(snapshot) for snapshot in node_report.snapshots() if not snapshot.is_bridge
        ),
    )


def _progress(endpoint: Path) -> Mapping[str, str]:
    """The progress of background work, by volume id; empty if the service does not answer."""
    # Import gRPC only if a service answers: the import takes longer than the rest of the overview.
    import grpc

    from agent.csi.client import Client

    with suppress(grpc.RpcError), Client(endpoint, timeout_seconds=_ANSWER_SECONDS) as client:
        return client.background_work()
    return {}


def volume_groups(settings: Config, host: Host) -> VolumeGroups:
    """Return this node's volume groups, with the same settings as the service.

    Raises NotReady if the file of a volume group has no loop device.
    """
    lvm, devices = group_definitions.service_lvm(host.run, host.kernel, settings)
    configuration = Configuration(settings)
    return VolumeGroups(
        lvm, host.disks, host.devices, configuration, listed=lambda name: devices.get(name, ())
    )


def _class(device_class: DeviceClass, node_report: report.Report, allocators: Allocators) -> Class:
    group = node_report.groups.get(device_class.group)
    largest = None
    with suppress(errors.PoolSilent):  # the health of the pool's volumes reports a silent pool
        largest = allocators.of(device_class).maximum_bytes(group) if group is not None else None
    return Class(
        device_class.name,
        device_class.group,
        device_class.layout.kind,
        device_class.fs_type,
        device_class.default,
        largest,
    )


def _group(name: str, node_report: report.Report, reports: Reports) -> Group:
    group = node_report.groups.get(name)
    if group is None:
        return Group(name, present=False, problem=str(reports.refused.get(name, "")))
    return Group(
        name,
        present=True,
        size_bytes=Room(group).extents * group.extent_size_bytes,
        free_bytes=Room(group).free_extents * group.extent_size_bytes,
        disks=len(group.disks),
        missing_disks=group.missing_disks,
        ignored=tuple(reports.ignored.get(name, ())),
    )


def _pools(groups: Iterable[report.Group]) -> Iterator[Pool]:
    for group in groups:
        for logical in records.all_logical_volumes(group):
            if {"thin", "pool"} <= logical.layout:
                percents = logical.data_percent, logical.metadata_percent
                yield Pool(logical.name, group.name, logical.size_bytes, *percents)


def _snapshot(snapshot: records.Snapshot) -> Snapshot:
    logical = snapshot.group.volume(snapshot.name)
    is_copy_on_write = logical.is_copy_on_write
    return Snapshot(
        id=str(snapshot.id),
        name=snapshot.own_tags[tag.NAME],
        volume=names.readable(ids.VOLUME_PREFIX, snapshot.source_id.name),
        group=snapshot.group.name,
        size_bytes=snapshot.size_bytes,
        taken_seconds=snapshot.time_nanoseconds // 10**9,
        area_bytes=snapshot.area_bytes if is_copy_on_write else None,
        area_percent=logical.data_percent if is_copy_on_write else None,
        health=tuple(_health([conditions.overflowed(snapshot)])) if snapshot.problem else (),
    )


def _volume(
    kernel: Kernel,
    mounts: Table,
    volume: records.Volume,
    device: Device | None,
    found_conditions: Iterable[Condition],
) -> Volume:
    volume_mounts = [] if device is None else users.mounts_of_volume(kernel, mounts, device)
    use = _file_system_usage(kernel, volume_mounts)
    own_tags = volume.own_tags
    io_max = tuning.limits(own_tags).io_max(volume.capacity_bytes)
    raw = "raw block" if own_tags.get(tag.ACCESS) == "block" else ""
    return Volume(
        id=str(volume.id),
        name=own_tags[tag.NAME],
        group=volume.group.name,
        size_bytes=volume.size_bytes,
        layout=_layout(volume),
        contents=raw or own_tags.get(tag.FORMATTED, ""),
        state=own_tags.get(tag.STATE, ""),
        claim=volume.claim,
        places=tuple(Place(mount.path, mount.read_only) for mount in volume_mounts),
        total_bytes=use.total_bytes if use else None,
        used_bytes=use.used_bytes if use else None,
        health=tuple(_health(found_conditions)),
        encryption=own_tags.get(tag.ENCRYPTION, ""),
        limits=io_max.words() if io_max else "",
    )


def _layout(volume: records.Volume) -> str:
    """The layout of a volume, such as `linear`.

    Returns lvm2's words for a layout that Carver never makes, or that lies below a cache.
    """
    try:
        return volume.layout.kind
    except errors.LayoutUnknown:
        return ",".join(sorted(volume.group.volume(volume.name).layout))


def _health(found_conditions: Iterable[Condition]) -> Iterator[Health]:
    for condition in found_conditions:
        yield Health(condition.reason.volume_status, condition.reason.word, condition.message)


def _file_system_usage(kernel: Kernel, volume_mounts: Sequence[Mount]) -> usage.Usage | None:
    """The usage of a volume's file system, by the first place where the volume is mounted.

    None for a volume that is not mounted, for a volume whose device is bind-mounted, and for a file
    system that does not answer.
    """
    if volume_mounts and volume_mounts[0].root == "/":
        with suppress(mount_errors.MountError):  # the volume's health reports a mount that fails
            return usage.of(kernel, volume_mounts[0].path)
    return None
