"""The configuration that tests serve: one place to tell of a new setting."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent.core.classes import DeviceClass
from agent.core.settings import Config
from lvm import layout
from lvm.layout import Layout
from lvm.thin import Policy

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
