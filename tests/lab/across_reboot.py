"""In the guest: make volumes with known data before a restart, find them all after it."""

import hashlib
import os
import sys
from pathlib import Path

import grpc

import agent  # noqa: F401 - before grpc
from agent.client import Client, block
from agent.config import DEFAULT_SOCKET
from mount import table
from mount.syscalls import Kernel

MIB = 1 << 20
PLACE = Path("/var/lib/kubelet/plugins/across-reboot")
STAGING, TARGET, NODE = PLACE / "staging", PLACE / "target", PLACE / "node"
DATA = hashlib.shake_256(b"across a reboot").digest(4 * MIB)


def before(client: Client) -> None:
    PLACE.mkdir(parents=True, exist_ok=True)
    volume = client.create("across-reboot", 64 * MIB)
    client.stage(volume, STAGING)
    client.publish(volume, STAGING, TARGET)
    write(TARGET / "data")
    write(TARGET / "data")
    raw = client.create("across-reboot-raw", 16 * MIB, block())
    client.stage(raw, STAGING, block())
    client.publish(raw, STAGING, NODE, block())
    write(NODE)


def after(client: Client) -> None:
    assert table.read(Kernel()).under(str(PLACE)) == (), "stale mounts"
    names = {volume.volume_id.rpartition("/")[2] for volume in client.volumes()}
    assert names >= {"vol-across-reboot", "vol-across-reboot-raw"}, names
    # In kubelet's order, with what it left of the directories before.
    volume = client.create("across-reboot", 64 * MIB)
    client.stage(volume, STAGING)
    client.publish(volume, STAGING, TARGET)
    assert (TARGET / "data").read_bytes() == DATA
    raw = client.create("across-reboot-raw", 16 * MIB, block())
    client.stage(raw, STAGING, block())
    client.publish(raw, STAGING, NODE, block())
    with NODE.open("rb") as device:
        assert device.read(len(DATA)) == DATA
    for one, target in ((volume, TARGET), (raw, NODE)):
        client.unpublish(one.volume_id, target)
        client.unstage(one.volume_id, STAGING)
        client.delete(one.volume_id)
    STAGING.rmdir()
    PLACE.rmdir()


def write(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | (0 if path == NODE else os.O_CREAT))
    with os.fdopen(descriptor, "wb") as file:
        file.write(DATA)
        file.flush()
        os.fsync(file.fileno())


def main() -> None:
    with grpc.insecure_channel(f"unix://{DEFAULT_SOCKET}") as channel:
        grpc.channel_ready_future(channel).result(timeout=200)
    with Client(DEFAULT_SOCKET) as client:
        {"before": before, "after": after}[sys.argv[1]](client)


main()
