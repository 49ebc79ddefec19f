"""In the guest: try the faults, and print a row for each as it ends."""

# First of all: agent keeps gRPC's fork handlers out, and must come before grpc does.
import agent  # noqa: F401  isort: skip

import argparse
import random
import shutil
import time
import traceback
import zlib

from faults import killed, load, lvm2, outside
from faults.bench import PLACE, Bench, Fault
from faults.row import Row
from real.host import Lab, lab
from vm import pods

FAULTS: tuple[Fault, ...] = (
    killed.at_a_step_of_every_call,
    load.killed_at_random,
    outside.group_full,
    outside.group_missing,
    outside.group_late,
    outside.metadata_full,
    outside.disk_errors,
    outside.image_failed,
    outside.disk_lost,
    outside.disk_replaced,
    lvm2.lvm2_killed,
    lvm2.lvm2_killed_in_layouts,
    lvm2.lvm2_killed_while_suspended,
    lvm2.lvm2_hangs,
    lvm2.session_killed,
    outside.lvm_directory_read_only,
    outside.disk_full,
    outside.clock_jumps,
    outside.socket_deleted,
    outside.second_instance,
    outside.configuration_changed,
)


def attempt(fault: Fault, shared: Lab, seed: int, cut: bool) -> Row:
    """One row, whatever happens."""
    # The same for a fault that is tried alone.
    own_seed = seed + zlib.crc32(fault.__name__.encode())
    bench = Bench(shared, random.Random(own_seed), cut)
    started = time.monotonic()
    try:
        times, outcome = fault(bench)
    except Exception as error:
        traceback.print_exc()
        times, outcome = 1, f"FAILED: {type(error).__name__}: {error}"
    title = str(fault.__doc__).partition("\n")[0].rstrip(".")
    lost = bench.lost + sum(one.lost for one in bench.trials)
    leaked = bench.leaked + sum(one.leaked for one in bench.trials)
    return Row(title, times, outcome, lost, leaked, time.monotonic() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--cut", action="store_true")
    parser.add_argument("names", nargs="*", choices=[[], *(one.__name__ for one in FAULTS)])
    chosen = parser.parse_args()
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir()
    # Some volumes have limits of I/O, for which there must be a cgroup of pods.
    with lab(PLACE) as shared, pods.pod(pods.SYSTEMD):
        for fault in FAULTS:
            if not chosen.names or fault.__name__ in chosen.names:
                print(attempt(fault, shared, chosen.seed, chosen.cut).line(), flush=True)
    shutil.rmtree(PLACE)


main()
