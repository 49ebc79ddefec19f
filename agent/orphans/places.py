"""Kubelet's directories for Carver's volumes that are not there: staging paths and targets.

Kubelet writes beside each which driver and which volume it is for. What says another driver, or
cannot be read, is not Carver's to judge.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agent.cluster import needs as cluster_needs
from agent.cluster.needs import Needs
from agent.ids import VolumeId
from agent.orphans.candidates import Candidate, Kind, pod_of, proves_absent
from lvm import report
from mount.syscalls import Kernel
from mount.table import Table

# Of pkg/volume/csi in kubelet.
TOLD = "vol_data.json"
_STAGING, _MOUNTED = "plugins/kubernetes.io/csi", "globalmount"
_TARGETS = "pods/*/volumes/kubernetes.io~csi/*"
_TARGET = "mount"


@dataclass(frozen=True)
class Place:
    """A directory of kubelet's; `handle` is empty where kubelet has removed what it wrote there."""

    kind: Kind
    directory: str
    path: str
    identity: str
    handle: str


def all_of(kernel: Kernel, kubelet_dir: Sequence[str], driver_name: str) -> list[Place]:
    """Every place of the driver's, by what kubelet wrote; no command, no call to what is mounted.

    To be read before the volumes: what is made meanwhile is in the report then.
    """
    return [
        place
        for one in kubelet_dir
        for place in (
            *_staging(kernel, Path(one) / _STAGING / driver_name, driver_name),
            *_targets(kernel, Path(one), driver_name),
        )
    ]


def candidates(
    places: Sequence[Place],
    mounts: Table,
    known: report.Report,
    groups: tuple[str, ...],
    needs: Needs,
) -> Iterator[Candidate]:
    """Those whose volumes are proved not to be there, and that the cluster does not speak of."""
    whole = all(one in known.groups for one in groups)
    digests = {
        cluster_needs.digest(str(VolumeId.of(group, name)))
        for group in known.groups.values()
        for name in group.volumes
    }
    for one in places:
        if one.handle:
            lost = proves_absent(known, one.handle, groups)
        else:
            # Its name is all that tells of its volume, which a group that is away may have.
            lost = whole and Path(one.directory).name not in digests
        wanted = (
            pod_of(one.path) in needs.pods
            if one.kind is Kind.TARGET
            else Path(one.directory).name in needs.handle_digests
        )
        if lost and not wanted:
            seen = mounts.top(one.path)
            what = f"has {seen}" if seen else "has nothing mounted"
            about = f"of {one.handle or 'a volume'}, which is not there; {what}"
            yield Candidate(one.kind, one.directory, one.identity, about, one.handle, one.path)


def _staging(kernel: Kernel, directory: Path, driver_name: str) -> Iterator[Place]:
    for one in _inside(directory, "*"):
        told = _told(one / TOLD)
        if told is not None and told.get("driverName", driver_name) == driver_name:
            yield from _place(kernel, Kind.STAGING, one, one / _MOUNTED, told)


def _targets(kernel: Kernel, directory: Path, driver_name: str) -> Iterator[Place]:
    for one in _inside(directory, _TARGETS):
        told = _told(one / TOLD)
        if told and told.get("driverName") == driver_name and told.get("volumeHandle"):
            yield from _place(kernel, Kind.TARGET, one, one / _TARGET, told)


def _place(
    kernel: Kernel, kind: Kind, directory: Path, path: Path, told: dict[str, str]
) -> Iterator[Place]:
    with suppress(OSError):  # gone meanwhile
        seen = kernel.lstat(str(directory))
        identity = f"{seen.st_dev}.{seen.st_ino}"
        yield Place(kind, str(directory), str(path), identity, told.get("volumeHandle", ""))


def _inside(directory: Path, pattern: str) -> list[Path]:
    with suppress(OSError):
        return sorted(one for one in directory.glob(pattern) if not one.is_symlink())
    return []


def _told(file: Path) -> dict[str, str] | None:
    """What kubelet wrote; nothing where there is no such file, None where it is not understood."""
    try:
        told = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        return None
    return {str(key): str(value) for key, value in told.items()} if isinstance(told, dict) else None
