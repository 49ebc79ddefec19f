"""The machine's present boot."""

import time
from pathlib import Path

_ID = Path("/proc/sys/kernel/random/boot_id")


def identity() -> str:
    """The id of the boot, a UUID (random(4)); each boot has another."""
    return _ID.read_text().strip()


def seconds() -> float:
    """For how long the machine is up, suspended time included (clock_gettime(2))."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
