"""The overview of `carver status`: classes, groups, pools, volumes, snapshots.

Read from LVM and the kernel by the service's own modules, so it is correct whether or not the
service runs. It takes one lvm2 command and changes nothing.
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

_ANSWER_SECONDS = 2.0


@dataclass(frozen=True)
class Class:
    """A device class; `largest_bytes` is the largest volume it can make now, as GetCapacity says.

    It is None where the class's group is not on this node, or its pool does not answer.
    """

    name: str
    group: str
    layout: str
    fs_type: str
    default: bool
    largest_bytes: int | None


@dataclass(frozen=True)
class Group:
    """A volume group that a class names. Sizes are of the disks that are there."""

    name: str
    present: bool
    size_bytes: int = 0
    free_bytes: int = 0
    disks: int = 0
    missing_disks: int = 0
    # Why it is not used though it is present.
    problem: str = ""
    # Disks that claim to be part of it and are not, and why.
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """Where a volume is mounted, or its device bound."""

    path: str
    read_only: bool


@dataclass(frozen=True)
class Health:
    """A problem, in the words of docs/troubleshooting.md."""

    status: str
    reason: str
    message: str


@dataclass(frozen=True)
class Volume:
    """A volume of Carver's. Used and total bytes are None unless a file system is mounted.

    `claim` is namespace/name of its claim, if the caller gave that. `contents`
    is the file system, `raw block`, or empty if it was never formatted. `encryption` is empty
    if it is not encrypted.
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
    # The limits of its I/O at its size, as the kernel gets them; empty for none.
    limits: str = ""
    # How far it is erased or filled, where the service answers; empty where it is not.
    progress: str = ""


@dataclass(frozen=True)
class Pool:
    """A thin pool in one of Carver's groups; shares are in percent, None while it is inactive."""

    name: str
    group: str
    size_bytes: int
    data_percent: float | None
    metadata_percent: float | None


@dataclass(frozen=True)
class Snapshot:
    """A snapshot of Carver's. `volume` is its source.

    `area_bytes` and `area_percent` describe its COW store, and are None for a thin snapshot.
    `taken_seconds` is since the epoch.
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
    """Everything at one moment; `serving`: a process answers at the socket."""

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
    """Read everything once; raises NotReady, what lvm2's report raises."""
    own = volume_groups(settings, host)
    reports = Reports(own)
    activator = Activator(own, host.devices, reports)
    now = reports.seen(MONITOR_AGE_SECONDS)
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
        classes=tuple(_class(one, now, allocators) for one in settings.classes),
        groups=tuple(_group(name, now, reports) for name in settings.groups),
        pools=tuple(_pools(now.groups.values())),
        volumes=tuple(
            replace(
                _volume(
                    *(host.kernel, mounts, one, activator.device(one.backing)),
                    diagnosis.of(one, mounts),
                ),
                progress=progress.get(str(one.id), ""),
            )
            for one in now.volumes()
        ),
        snapshots=tuple(_snapshot(one) for one in now.snapshots() if not one.is_bridge),
    )


def _progress(endpoint: Path) -> Mapping[str, str]:
    """How far background work is, by volume id; empty where the service does not say."""
    # Imported only where a service answers: it takes longer than all else here.
    import grpc

    from agent.csi.client import Client

    with suppress(grpc.RpcError), Client(endpoint, timeout_seconds=_ANSWER_SECONDS) as client:
        return client.background_work()
    return {}


def volume_groups(settings: Config, host: Host) -> VolumeGroups:
    """Make the volume groups as the service does; raises NotReady."""
    lvm, devices = group_definitions.look(host.run, host.kernel, settings)
    configuration = Configuration(settings)
    return VolumeGroups(
        lvm, host.disks, host.devices, configuration, listed=lambda name: devices.get(name, ())
    )


def _class(one: DeviceClass, now: report.Report, allocators: Allocators) -> Class:
    group = now.groups.get(one.group)
    largest = None
    with suppress(errors.PoolSilent):  # its volumes' health reports it
        largest = allocators.of(one).maximum_bytes(group) if group is not None else None
    return Class(one.name, one.group, one.layout.kind, one.fs_type, one.default, largest)


def _group(name: str, now: report.Report, reports: Reports) -> Group:
    group = now.groups.get(name)
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


def _pools(found: Iterable[report.Group]) -> Iterator[Pool]:
    for group in found:
        for one in records.every(group):
            if {"thin", "pool"} <= one.layout:
                shares = one.data_percent, one.metadata_percent
                yield Pool(one.name, group.name, one.size_bytes, *shares)


def _snapshot(one: records.Snapshot) -> Snapshot:
    logical = one.group.volume(one.name)
    kept = logical.is_copy_on_write
    return Snapshot(
        id=str(one.id),
        name=one.own_tags[tag.NAME],
        volume=names.readable(ids.VOLUME_PREFIX, one.source_id.name),
        group=one.group.name,
        size_bytes=one.size_bytes,
        taken_seconds=one.time_nanoseconds // 10**9,
        area_bytes=one.area_bytes if kept else None,
        area_percent=logical.data_percent if kept else None,
        health=tuple(_health([conditions.overflowed(one)])) if one.problem else (),
    )


def _volume(
    kernel: Kernel,
    mounts: Table,
    one: records.Volume,
    device: Device | None,
    found_wrong: Iterable[Condition],
) -> Volume:
    found = [] if device is None else users.places(kernel, mounts, device)
    use = _use(kernel, found)
    own_tags = one.own_tags
    io_max = tuning.limits(own_tags).io_max(one.capacity_bytes)
    raw = "raw block" if own_tags.get(tag.ACCESS) == "block" else ""
    return Volume(
        id=str(one.id),
        name=own_tags[tag.NAME],
        group=one.group.name,
        size_bytes=one.size_bytes,
        layout=_layout(one),
        contents=raw or own_tags.get(tag.FORMATTED, ""),
        state=own_tags.get(tag.STATE, ""),
        claim=one.claim,
        places=tuple(Place(place.path, place.read_only) for place in found),
        total_bytes=use.total_bytes if use else None,
        used_bytes=use.used_bytes if use else None,
        health=tuple(_health(found_wrong)),
        encryption=own_tags.get(tag.ENCRYPTION, ""),
        limits=io_max.words() if io_max else "",
    )


def _layout(one: records.Volume) -> str:
    """Its kind; lvm2's words for one that Carver makes none of, or that lies below a cache."""
    try:
        return one.layout.kind
    except errors.LayoutUnknown:
        return ",".join(sorted(one.group.volume(one.name).layout))


def _health(found: Iterable[Condition]) -> Iterator[Health]:
    for one in found:
        yield Health(one.reason.of_volume, one.reason.word, one.message)


def _use(kernel: Kernel, found: Sequence[Mount]) -> usage.Usage | None:
    """Return the usage of the file system at the volume's first mount, if that is one."""
    if found and found[0].root == "/":
        with suppress(mount_errors.MountError):  # it does not answer, as its health reports
            return usage.of(kernel, found[0].path)
    return None
