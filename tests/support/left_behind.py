"""Groups as an earlier version of Carver left them: tests/data has its lvm2 commands."""

from collections.abc import Mapping
from typing import Any

from real.any import AnyHost

from lvm import report


def group_of(kept: Mapping[str, Any], host: AnyHost) -> str:
    """Make a group by the commands that a file of tests/data has; return its name."""
    made = host.new_group(*kept["disks_extents"])
    known = report.read(host.lvm).group(made)
    assert known.extent_size_bytes == kept["extent_bytes"]
    named = {
        "{group}": made,
        "{uuid}": known.uuid.replace("-", "")[:8],
        "{directory}": str(host.directory),
        **{f"{{disk{number}}}": disk.name for number, disk in enumerate(known.disks)},
    }
    for command in kept["commands"]:
        words = list(command)
        for name, value in named.items():
            words = [word.replace(name, value) for word in words]
        host.lvm(*words)
    return made
