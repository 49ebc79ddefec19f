"""The configuration that tests serve, and how a test asks for another.

    pytestmark = [
        pytest.mark.groups(data=[60, 60], other=[20]),
        pytest.mark.settings(classes=(configured.PLAIN, configured.THIN), wipe="none"),
    ]

`groups` are the machine's volume groups: how many extents of 4 MiB each of their disks has.
`settings` are those that differ from the usual ones. Either mark may also stand above one test, or
in a class of tests; the nearest is heeded.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.settings.classes import DeviceClass
from agent.settings.configuration import Configuration
from agent.settings.settings import Config
from lvm import layout
from lvm.layout import Layout
from lvm.thin import Policy

if TYPE_CHECKING:
    # Not while it runs: programs that are no tests, whose memory is measured, are configured here.
    import pytest

# One of each kind that Carver knows, by its name, with as few disks as show what it is.
LAYOUTS: Mapping[str, Layout] = {
    name: Layout(name, stripes=kind.least_stripes, mirrors=int(kind.mirrored))
    for name, kind in layout._KINDS.items()
}
RAIDS = {name: one for name, one in LAYOUTS.items() if one.kind.startswith("raid")}
# What the widest of them lies on.
MOST_DISKS = max(one.disks for one in LAYOUTS.values())
# For the arithmetic of room: each layout of volumes that have all their extents, and two wider.
THICK = (
    *(one for one in LAYOUTS.values() if not one.is_thin),
    Layout("striped", stripes=3, stripe_size_bytes=8192),
    Layout("raid1", mirrors=2),
)
# Classes that many tests use.
PLAIN = DeviceClass("plain", "data", default=True)
FULL = DeviceClass("full", "data", zero="fully")
STRIPED = DeviceClass("striped", "data", layout=LAYOUTS["striped"])
RAID = DeviceClass("raid", "data", layout=LAYOUTS["raid1"])
THIN = DeviceClass("thin", "data", layout=LAYOUTS["thin"], pool=Policy())
SEALED = DeviceClass("sealed", "data", encryption="luks2")


def groups(request: "pytest.FixtureRequest", *usual: int) -> Mapping[str, Sequence[int]]:
    """The groups that a test asks for; without that `data`, with disks of the usual extents."""
    mark = request.node.get_closest_marker("groups")
    return {"data": usual} if mark is None else mark.kwargs


def settings(request: "pytest.FixtureRequest", directory: Path, **usual: Any) -> Config:
    """The configuration that a test asks for. Paths that are not absolute are in its directory."""
    mark = request.node.get_closest_marker("settings")
    asked = {} if mark is None else mark.kwargs
    inside = {
        name: directory / value if isinstance(value, Path) else value
        for name, value in asked.items()
    }
    return carver(directory, **usual | inside)


def carver(directory: Path, group: str = "data", **changes: Any) -> Config:
    """One class, `plain`, on a group, and a node called `here`, all inside a directory."""
    values: dict[str, Any] = {
        "node_id": "here",
        "endpoint": directory / "csi.sock",
        "kubelet_dir": (str(directory),),
        "log_format": "text",
        "log_level": "info",
        "controller_expand": True,
        "max_volumes_per_node": 0,
        "lvm": "direct",
        "lvm_session": False,
        "devices": (),
        "wipe": "zero",
        "classes": (DeviceClass(name="plain", group=group, default=True),),
    }
    return Config(**values | changes)


def on_groups(*groups: str) -> Configuration:
    """A class on each of these groups, by the groups' names."""
    return of_classes(*(DeviceClass(one, one) for one in groups))


def of_classes(*classes: DeviceClass) -> Configuration:
    return Configuration(carver(Path("/nowhere"), classes=classes))


def layouts(*names: str) -> dict[str, Layout]:
    return {name: LAYOUTS[name] for name in names}


def classes(
    group: str, layouts: Mapping[str, Layout], default: str = "linear"
) -> tuple[DeviceClass, ...]:
    """A class of each layout on a group, by the layouts' names; thin ones with a pool."""
    return tuple(
        DeviceClass(
            name=name,
            group=group,
            layout=shape,
            default=name == default,
            pool=Policy() if shape.is_thin else None,
        )
        for name, shape in layouts.items()
    )
