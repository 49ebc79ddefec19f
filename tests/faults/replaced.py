"""A disk is lost for good, and another put in its place."""

import contextlib
import itertools
import os
import time

import grpc
from faults.bench import Bench
from faults.process import Fault, Trial
from model.operations import MIB
from real.disks import Disk

from agent.csi.client import Client, block
from lvm import report

_EXTENT_BYTES = 4 * MIB


def disk_replaced(bench: Bench) -> tuple[int, str]:
    """A disk under a raid1 is lost and another put in its place, while the service is killed."""
    group, times = "carver_replaced", bench.times(4, 1)
    for _ in range(times):
        with (
            bench.host() as host,
            Disk.on(bench.shared.new_device(21 * _EXTENT_BYTES)) as kept,
            Disk.on(bench.shared.new_device(21 * _EXTENT_BYTES)) as gone,
        ):
            new = host.new_device(21 * _EXTENT_BYTES)
            classes = f'[[classes]]\nname = "plain"\ngroup = "{group}"\nlayout = "raid1"\n'
            with (
                host.own_group(group, [kept.path, gone.path]) as total,
                bench.served(host, group, total, f"{classes}default = true\n") as trial,
            ):
                size_bytes = 10 * _EXTENT_BYTES
                volume = trial.machine.client.create("a", size_bytes, block())
                device = host.devices.find(group, "vol-a")
                assert device is not None
                data = os.urandom(size_bytes)
                host.write_bytes(device.path, 0, data)
                disks = report.read(host.lvm).group(group).disks
                lost = next(one.uuid for one in disks if one.name == gone.path)
                gone.fail()
                _replace(bench, trial, lost, new)
                kept.fail()
                if host.read_bytes(device.path, 0, size_bytes) != data:
                    trial.lost += 1
                kept.mend()
                _repaired(trial.machine.client, volume.volume_id)
                trial.machine.client.delete(volume.volume_id)
    return times, "killed at random, gone on with; the data are on the new disk alone, too"


def _replace(bench: Bench, trial: Trial, lost: str, new: str) -> None:
    """Have a disk replaced by a service that is killed once, and then asked again."""
    kill_at, deadline = bench.random.randrange(4), time.monotonic() + 300
    for number in itertools.count():
        if number == kill_at:
            trial.machine.kill()
        with contextlib.suppress(grpc.RpcError):
            done, _ = trial.machine.client.replace_disk(lost, new)
            if done and number >= kill_at:
                return
        if time.monotonic() > deadline:
            raise Fault("the disk is not replaced")
        time.sleep(0.5)


def _repaired(client: Client, volume_id: str) -> None:
    deadline = time.monotonic() + 300
    while not client.repair(volume_id)[0]:
        if time.monotonic() > deadline:
            raise Fault("the volume is not whole again")
        time.sleep(0.5)
