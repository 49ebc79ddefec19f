"""What encryption costs: a plain volume, encrypted ones, and one that cryptsetup made by hand.

Written and read past the page cache, all kinds in each round, beginning with another each time:
what else the machine does hits all of them.
"""

import mmap
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from performance import rows
from performance.rows import Samples
from performance.service import BYPASSING

from agent.csi.client import Client, block
from lvm import names
from lvm.active_devices import Devices
from mount import luks

_MIB = 1 << 20
_PIECE_BYTES = _MIB
_SIZE_BYTES = rows.THROUGHPUT_MIB * _MIB
# Of those by Carver, by what they are called: what they are made with.
_OURS: Mapping[str, Mapping[str, str]] = {
    rows.PLAIN: {},
    rows.ENCRYPTED: {"carver/encryption": "luks2"},
    rows.BYPASSED: {"carver/class": BYPASSING},
}
_KEY = "correct horse battery staple"
_HAND = "bench-hand"


@contextmanager
def devices(client: Client, place: Path, group: str) -> Iterator[dict[str, str]]:
    """A device of each kind in the group, written once from its start to its end."""
    with ExitStack() as ending:
        found = {}
        for number, (kind, parameters) in enumerate(_OURS.items()):
            made = client.create(f"bench-{number}", _SIZE_BYTES, block(), parameters=parameters)
            ending.callback(client.delete, made.volume_id)
            secret = {} if kind == rows.PLAIN else {"passphrase": _KEY}
            client.stage(made, place / "staging", block(), secret)
            ending.callback(client.unstage, made.volume_id, place / "staging")
            device = Devices().find(group, made.volume_id.partition("/")[2])
            assert device is not None
            found[kind] = (Devices().mapping(device) or device).path
        found[rows.BY_HAND] = ending.enter_context(_by_hand(group))
        for path in found.values():
            write(path)
        yield found


@contextmanager
def _by_hand(group: str) -> Iterator[str]:
    """What an administrator has of lvcreate and cryptsetup: its defaults, but for argon2id's.

    Sectors are as the disk has them, as Carver's are.
    """
    path = f"/dev/mapper/{names.device(group, _HAND)}"
    _run("lvcreate", "--yes", "--size", f"{_SIZE_BYTES + 16 * _MIB}b", "-n", _HAND, group)
    try:
        sector = Path(f"/sys/dev/block/{_number(path)}/queue/physical_block_size").read_text()
        own = ("cryptsetup", "--batch-mode", "--key-file", "-")
        bounds = ("--pbkdf-force-iterations", "4", "--pbkdf-memory", "65536")
        size = "4096" if int(sector) >= 4096 else "512"
        _run(*own, "luksFormat", *bounds, "--sector-size", size, "--cipher", luks.CIPHER, path)
        _run(*own, "open", path, _HAND)
        try:
            yield f"/dev/mapper/{_HAND}"
        finally:
            _run("cryptsetup", "close", _HAND)
    finally:
        _run("lvremove", "--yes", f"{group}/{_HAND}")


def measure(
    client: Client, place: Path, group: str, rounds: Iterator[int], samples: Samples
) -> None:
    """Seconds to write and to read each kind, by the names of the rows."""
    with devices(client, place, group) as known:
        kinds = list(known)
        for number in rounds:
            first = number % len(kinds)
            for action, act in ((rows.WRITTEN, write), (rows.HAS_READ, _read)):
                for kind in kinds[first:] + kinds[:first]:
                    step = partial(act, known[kind])
                    samples.time(rows.moved(kind, action), step, time.monotonic)


def write(device: str, size_bytes: int = _SIZE_BYTES) -> None:
    """Write so much of a device, past the page cache; it is on the disk then."""
    data = mmap.mmap(-1, _PIECE_BYTES)
    data.write(os.urandom(_PIECE_BYTES))
    descriptor = os.open(device, os.O_WRONLY | os.O_DIRECT)
    try:
        for at in range(0, size_bytes, _PIECE_BYTES):
            os.pwritev(descriptor, [data], at)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(device: str) -> None:
    data = mmap.mmap(-1, _PIECE_BYTES)
    descriptor = os.open(device, os.O_RDONLY | os.O_DIRECT)
    try:
        for at in range(0, _SIZE_BYTES, _PIECE_BYTES):
            os.preadv(descriptor, [data], at)
    finally:
        os.close(descriptor)


def _number(path: str) -> str:
    number = Path(path).stat().st_rdev
    return f"{os.major(number)}:{os.minor(number)}"


def _run(*words: str) -> None:
    subprocess.run(words, check=True, input=_KEY, capture_output=True, text=True)
