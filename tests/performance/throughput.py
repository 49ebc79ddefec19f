"""What encryption costs: a plain volume, an encrypted one, and one that cryptsetup made by hand.

As root, in the lab VM: `PYTHONPATH=.:tests/support python tests/performance/throughput.py`. Written
and read past the page cache, one after the other in each round, so that all meet the same machine.
"""

import agent  # isort: skip  # noqa: F401 - before grpc

import argparse
import mmap
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import configured
from real.host import lab, real_host

from agent.csi.client import Client, block
from agent.engine.host import Host
from agent.service.server import Service
from lvm import names
from mount import cryptsetup

MIB = 1 << 20
PIECE_BYTES = MIB
# The most that an encrypted volume's time may be of that of one made by hand.
MOST = 1.05
PLAIN, OURS, BY_HAND = "plain", "encrypted by Carver", "encrypted by hand"
KEY = "correct horse battery staple"


@contextmanager
def devices(size_bytes: int) -> Iterator[dict[str, str]]:
    """A device of each kind, on one disk."""
    with ExitStack() as ending:
        place = Path(ending.enter_context(tempfile.TemporaryDirectory()))
        (place / "mounts").mkdir()
        shared = ending.enter_context(lab(place))
        host = ending.enter_context(real_host(shared, place / "mounts"))
        group = host.new_group(4 * (size_bytes // (4 * MIB)) + 40)
        config = configured.carver(place, group)
        service = Service(config, Host(host.run, host.kernel, host.devices, host.disks), host.lvm)
        service.start(config.endpoint)
        ending.callback(service.stop)
        client = ending.enter_context(Client(config.endpoint))
        found = {}
        for name, parameters in ((PLAIN, {}), (OURS, {"carver/encryption": "luks2"})):
            volume = client.create(
                name.replace(" ", "-"), size_bytes, block(), parameters=parameters
            )
            secret = {"passphrase": KEY} if parameters else {}
            client.stage(volume, place / "mounts" / "staging", block(), secret)
            device = host.devices.find(group, volume.volume_id.partition("/")[2])
            assert device is not None
            found[name] = (host.devices.mapping(device) or device).path
        host.lvm("lvcreate", "--yes", "--size", f"{size_bytes + 16 * MIB}b", "-n", "hand", group)
        path = f"/dev/mapper/{names.device(group, 'hand')}"
        by_hand = ("cryptsetup", "--batch-mode", "--key-file", "-")
        # Its own defaults, but for what argon2id takes; sectors as the disk has them, as ours.
        made = (*by_hand, "luksFormat", "--pbkdf-force-iterations", "4", "--pbkdf-memory", "65536")
        for words in (
            (*made, "--sector-size", "512", "--cipher", cryptsetup.CIPHER, path),
            (*by_hand, "open", path, "carver-luks-by-hand"),
        ):
            subprocess.run(words, check=True, input=KEY.encode(), capture_output=True)
        ending.callback(
            lambda: subprocess.run(("cryptsetup", "close", "carver-luks-by-hand"), check=True)
        )
        found[BY_HAND] = "/dev/mapper/carver-luks-by-hand"
        yield found


def written(device: str, size_bytes: int) -> float:
    """Seconds to write a device, to its end on the disk."""
    data = mmap.mmap(-1, PIECE_BYTES)
    data.write(os.urandom(PIECE_BYTES))
    descriptor = os.open(device, os.O_WRONLY | os.O_DIRECT)
    began = time.monotonic()
    for at in range(0, size_bytes, PIECE_BYTES):
        os.pwritev(descriptor, [data], at)
    os.fsync(descriptor)
    os.close(descriptor)
    return time.monotonic() - began


def read(device: str, size_bytes: int) -> float:
    """Seconds to read a device."""
    data = mmap.mmap(-1, PIECE_BYTES)
    descriptor = os.open(device, os.O_RDONLY | os.O_DIRECT)
    began = time.monotonic()
    for at in range(0, size_bytes, PIECE_BYTES):
        os.preadv(descriptor, [data], at)
    os.close(descriptor)
    return time.monotonic() - began


def main() -> int:
    """Measure, tell, and say by the exit code whether the promise holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    parsed = parser.parse_args()
    size_bytes, well = parsed.mib * MIB, True
    with devices(size_bytes) as known:
        for what, act in (("write", written), ("read", read)):
            seconds: dict[str, list[float]] = {name: [] for name in known}
            for _ in range(parsed.rounds):
                for name, device in known.items():
                    seconds[name].append(act(device, size_bytes))
            middle = {name: median(every) for name, every in seconds.items()}
            for name, value in middle.items():
                told = ", ".join(f"{one:.2f}" for one in seconds[name])
                print(f"{what:5} {name:20} {parsed.mib / value:7.1f} MiB/s ({told} s)")
            ratio = middle[OURS] / middle[BY_HAND]
            print(f"{what:5} beside by hand: {ratio:.3f}, {MOST} at most", flush=True)
            well = well and ratio <= MOST
    return 0 if well else 1


if __name__ == "__main__":
    raise SystemExit(main())
