"""In the guest: bring volumes with known data into use before a restart, and again after it."""

# First of all: agent keeps gRPC's fork handlers out, and must come before grpc does.
import agent  # noqa: F401  isort: skip

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from csi_client import Asking, wait_until_served
from lab import forged
from vm import pods

from agent.csi.client import Client, block, mounted
from agent.settings.settings import DEFAULT_SOCKET
from mount import table
from mount.cgroups import Cgroups, IoMax
from mount.filesystem import FILE_SYSTEMS
from mount.kernel import Kernel
from proto import csi_pb2 as csi

MIB = 1 << 20
SECTOR_BYTES = 4096
PATIENCE_SECONDS = 300
# What waits for a service that is stopped ends after that. Trying a key takes seconds in software
# emulation, so a shorter call may end before it has begun anything.
CALL_SECONDS = 20.0
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

    @property
    def write_iops(self) -> int:
        """What its pods may do; no other volume has the same."""
        return 1000 + self.number

    @property
    def secret(self) -> dict[str, str]:
        return {"passphrase": f"key of {self.name}"} if self.is_encrypted else {}

    def use(self, client: Client) -> csi.Volume:
        """The calls that kubelet and the provisioner make for a pod, in their order."""
        parameters = {"carver/encryption": "luks2"} if self.is_encrypted else {}
        volume = client.create(
            self.name,
            self.size_bytes,
            self.capability,
            parameters=parameters,
            mutable={"writeIOPS": str(self.write_iops)},
        )
        client.stage(volume, self.staging, self.capability, self.secret)
        client.publish(volume, self.staging, self.target, self.capability)
        assert IoMax(writes=self.write_iops) in Cgroups().limits().values(), self.name
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


FS_TYPES = ("ext4", "ext4", "ext4", *FILE_SYSTEMS)
SIZES = {key: max(16 * MIB, one.minimum_bytes) for key, one in FILE_SYSTEMS.items()}


def kept(count: int) -> list[Kept]:
    """So many volumes, raw ones and a few of each file system; every second one is encrypted."""
    fs_types = FS_TYPES if count > len(FS_TYPES) else FS_TYPES[:2]
    every = [*fs_types, *[""] * (count - len(fs_types))]
    return [
        Kept(number, one, SIZES.get(one, 8 * MIB), number % 2 == 1)
        for number, one in enumerate(every)
    ]


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
    assert not Cgroups().limits()
    assert opened() == [], "left open"
    there = {volume.volume_id.rpartition("/")[2] for volume in client.volumes()}
    names = [one.name for one in volumes]
    names += [one.name for one in forged.tenants(PLACE)]
    assert there == {f"vol-{one}" for one in names}
    tenants = forged.begin_again(client, PLACE)
    _at_once(lambda one: one.after(client), volumes)
    forged.after(client, PLACE, tenants)
    assert client.volumes() == []
    assert opened() == []
    assert table.read(Kernel()).under(str(PLACE)) == ()
    PLACE.rmdir()


def _at_once(do: Callable[[Kept], None], volumes: Iterable[Kept]) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(do, volumes))


def main() -> None:
    step, volumes = sys.argv[1], kept(int(sys.argv[2]))
    wait_until_served(DEFAULT_SOCKET)
    with Asking(DEFAULT_SOCKET, timeout_seconds=300) as client, pods.pod(pods.SYSTEMD):
        {"before": before, "after": after}[step](client, volumes)


main()
