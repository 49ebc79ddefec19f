"""The rule that nothing which may hang is done while a volume group is held, asked at one border.

All operations have the kernel and programs from `Context`, which `Service` fills by way of
`agent.core.trace`: there each operation is asked. lvm2 has a way of its own.
"""

from typing import Any, TypeVar, cast

import pytest

from agent.core import trace
from agent.work import locks

_T = TypeVar("_T")

# What the kernel answers from its memory, or from sysfs, procfs and devtmpfs. Any other operation
# opens a device, or goes by a file system on one.
HARMLESS = frozenset(
    {
        *("version", "mountinfo", "lstat", "real_path", "has_new_mount_calls", "has_selinux"),
        *("device_number", "device_title", "device_partitions", "device_holders"),
        *("device_is_swap", "logical_block_bytes", "stack", "zeroing"),
        *("is_distrusted", "distrust"),
        *("disks_below", "disk_load", "error_counters"),
        # They name their devices, and ask the driver alone.
        *("loop_devices", "loop_free", "loop_status"),
        # It opens a device, so that it stays, and reads nothing yet.
        "reader",
    }
)


def watch(patch: pytest.MonkeyPatch) -> None:
    """Have an operation raise AssertionError where its thread holds a group."""
    traced, traced_run = trace.traced, trace.traced_run

    def watched(interface: _T) -> _T:
        made = traced(interface)
        # A kernel behind a switch (model.stopping) is of no class of its own.
        return cast(_T, _Watched(made)) if hasattr(interface, "mountinfo") else made

    def watched_run(run: Any) -> Any:
        made = traced_run(run)

        def asking(*words: str, **more: Any) -> Any:
            if words[0] != "lvm":
                locks.require_none_held(f"{words[0]} is run")
            return made(*words, **more)

        return asking

    patch.setattr(trace, "traced", watched)
    patch.setattr(trace, "traced_run", watched_run)


class _Watched:
    def __init__(self, made: object) -> None:
        self._made = made

    def __getattr__(self, name: str) -> Any:
        if name not in HARMLESS:
            locks.require_none_held(f"the kernel's {name} is called")
        return getattr(self._made, name)
