"""In the guest: bring volumes with known data into use before a restart, and again after it."""

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
from lab import forged

import agent  # noqa: F401 - before grpc
from agent.config.settings import DEFAULT_SOCKET
from agent.csi.client import Client, block, mounted
from mount import table
from mount.syscalls import Kernel
from proto import csi_pb2 as csi

MIB = 1 << 20
PLACE = Path("/var/lib/kubelet/plugins/across-reboot")


@dataclass(frozen=True)
class Kept:
    """A volume that is to outlive the restart, in use."""

    number: int
    fs_type: str
    size_bytes: int
    is_encrypted: bool

    @property
    def name(self) -> str:
        return f"across-reboot-{self.number}"

    @property
    def capability(self) -> csi.VolumeCapability:
        return mounted(self.fs_type) if self.fs_type else block()

    @property
    def staging(self) -> Path:
        return PLACE / f"staging-{self.number}"

    @property
    def target(self) -> Path:
        return PLACE / f"target-{self.number}"

    @property
    def file(self) -> Path:
        return self.target / "data" if self.fs_type else self.target

    @property
    def data(self) -> bytes:
        return hashlib.shake_256(self.name.encode()).digest(MIB)

    def use(self, client: Client) -> csi.Volume:
        """The calls that kubelet and the provisioner make for a pod, in their order."""
        parameters = {"carver/encryption": "luks2"} if self.is_encrypted else {}
        secret = {"passphrase": f"key of {self.name}"} if self.is_encrypted else {}
        volume = client.create(self.name, self.size_bytes, self.capability, parameters=parameters)
        client.stage(volume, self.staging, self.capability, secret)
        client.publish(volume, self.staging, self.target, self.capability)
        return volume

    def before(self, client: Client) -> None:
        """Bring it into use, with data that are on the disk."""
        self.use(client)
        descriptor = os.open(self.file, os.O_WRONLY | (os.O_CREAT if self.fs_type else 0))
        with os.fdopen(descriptor, "wb") as file:
            file.write(self.data)
            file.flush()
            os.fsync(file.fileno())

    def after(self, client: Client) -> None:
        """Bring it into use again, find the data, and let go of it."""
        volume = self.use(client)
        with self.file.open("rb") as file:
            assert file.read(MIB) == self.data, self.name
        client.unpublish(volume.volume_id, self.target)
        client.unstage(volume.volume_id, self.staging)
        client.delete(volume.volume_id)
        if self.fs_type:
            self.staging.rmdir()


FILE_SYSTEMS = ("ext4", "ext4", "ext4", "ext4", "xfs", "btrfs")
SIZES = {"": 8 * MIB, "ext4": 16 * MIB, "xfs": 300 * MIB, "btrfs": 256 * MIB}


def kept(count: int) -> list[Kept]:
    """So many volumes, raw ones and a few of each file system; every second one is encrypted."""
    fs_types = FILE_SYSTEMS if count > len(FILE_SYSTEMS) else FILE_SYSTEMS[:2]
    every = [*fs_types, *[""] * (count - len(fs_types))]
    return [Kept(number, one, SIZES[one], number % 2 == 1) for number, one in enumerate(every)]


def opened() -> list[str]:
    """The dm-crypt devices of volumes, and those that cryptsetup has for itself."""
    names = ("carver-luks-*", "temporary-cryptsetup-*")
    return [str(one) for name in names for one in Path("/dev/mapper").glob(name)]


def before(client: Client, volumes: Sequence[Kept]) -> None:
    PLACE.mkdir(parents=True, exist_ok=True)
    _at_once(lambda one: one.before(client), volumes)
    assert len(opened()) == sum(one.is_encrypted for one in volumes)
    forged.before(client, PLACE)


def after(client: Client, volumes: Sequence[Kept]) -> None:
    assert table.read(Kernel()).under(str(PLACE)) == (), "stale mounts"
    assert opened() == [], "open, and nobody's"
    there = {volume.volume_id.rpartition("/")[2] for volume in client.volumes()}
    names = [one.name for one in volumes] + [one.name for one in forged.tenants(PLACE)]
    assert there == {f"vol-{one}" for one in names}
    ids = forged.begin_again(client, PLACE)
    _at_once(lambda one: one.after(client), volumes)
    forged.after(client, PLACE, ids)
    assert client.volumes() == []
    assert opened() == []
    assert table.read(Kernel()).under(str(PLACE)) == ()
    PLACE.rmdir()


def _at_once(do: Callable[[Kept], None], volumes: Iterable[Kept]) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(do, volumes))


def main() -> None:
    step, count = sys.argv[1], int(sys.argv[2])
    with grpc.insecure_channel(f"unix://{DEFAULT_SOCKET}") as channel:
        grpc.channel_ready_future(channel).result(timeout=200)
    with Client(DEFAULT_SOCKET, timeout_seconds=300) as client:
        {"before": before, "after": after}[step](client, kept(count))


main()
