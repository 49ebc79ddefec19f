"""The present boot of the machine: its id, and the time since it."""

import time
from pathlib import Path

_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the id of the present boot: a UUID that changes with each boot (random(4))."""
    return _ID.read_text().strip()


def uptime_seconds() -> float:
    """Return the seconds since the machine's boot, suspended time included (clock_gettime(2))."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
