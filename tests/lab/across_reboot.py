"""In the guest: bring volumes with known data into use before a restart, and again after it."""

# First of all: agent keeps gRPC's fork handlers out, and must come before grpc does.
import agent  # noqa: F401  isort: skip

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
from csi_client import Asking, wait_until_served
from lab import forged
from real.host import reencrypting
from vm import pods

from agent.core import ids
from agent.core.settings import DEFAULT_SOCKET
from agent.csi.client import Client, block, mounted, of_volume
from mount import luks, table
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


@dataclass(frozen=True)
class Copy:
    """A copy that is being given a master key of its own when the machine ends.

    Where the machine `is_cut`, its cryptsetup is stopped until then, and the service, which has it
    run in turns: however fast the machine is, the copy does not come to its end before.
    """

    source: Kept
    is_cut: bool
    name: str = "across-reboot-copy"
    staging: Path = PLACE / "staging-copy"
    target: Path = PLACE / "target-copy"

    def create(self, client: Client) -> tuple[csi.Volume, str, str]:
        """The copy, and the logical volumes that it and its source are, active."""
        encrypted = {"carver/encryption": "luks2"}
        of = client.create(self.source.name, self.source.size_bytes, block(), parameters=encrypted)
        parameters = {**encrypted, "carver/reencrypt": "true"}
        what = of_volume(of.volume_id)
        made = client.create(self.name, 0, block(), parameters=parameters, source=what)
        group = ids.group_of(made.volume_id)
        paths = f"/dev/{group}/vol-{self.name}", f"/dev/{group}/vol-{self.source.name}"
        activate = ("lvchange", "--activate", "y", "--ignoreactivationskip", *paths)
        subprocess.run(activate, check=True, capture_output=True)
        return made, *paths

    def before(self, volume: csi.Volume, path: str) -> None:
        """Have it begun by calls that end with how far it is, or in vain."""
        with ThreadPoolExecutor(1) as pool, Client(DEFAULT_SOCKET, CALL_SECONDS) as caller:
            calls = [pool.submit(self._is_staged, caller, volume)]

            def is_over() -> bool:
                call = calls[-1]
                if not call.done():
                    return False
                if not call.result():
                    # It may have ended before it began anything; kubelet calls again.
                    calls.append(pool.submit(self._is_staged, caller, volume))
                return call.result()

            self._until(lambda: is_over() or any(reencrypting(path)))
            workers = list(reencrypting(path))
            self._until(lambda: is_over() or header(path).is_reencrypting)
            if self.is_cut:
                assert workers
                for process in (service(), *workers):
                    os.kill(process, signal.SIGSTOP)
            assert not (self.is_cut and calls[-1].result()), "it came to its end"

    def after(self, client: Client) -> None:
        """Have it finished, find the data by another master key, and let go of it."""
        volume, path, source = self.create(client)
        found = header(path)
        assert found.is_reencrypting or not self.is_cut, found
        self._until(lambda: self._is_staged(client, volume))
        client.publish(volume, self.staging, self.target, block())
        with self.target.open("rb") as file:
            assert file.read(MIB) == self.source.data
        assert not header(path).is_reencrypting
        assert header(path).uuid != header(source).uuid
        assert beneath(path) != beneath(source)
        client.unpublish(volume.volume_id, self.target)
        client.unstage(volume.volume_id, self.staging)
        client.delete(volume.volume_id)

    def _is_staged(self, client: Client, volume: csi.Volume) -> bool:
        try:
            client.stage(volume, self.staging, block(), self.source.secret)
        except grpc.RpcError as error:
            if error.code() not in (grpc.StatusCode.ABORTED, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise
            return False
        return True

    @staticmethod
    def _until(is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not is_so():
            assert time.monotonic() < deadline
            time.sleep(0.001)


def header(path: str) -> luks.Header:
    found = luks.read(Kernel(), path)
    assert found is not None, path
    return found


def beneath(path: str) -> bytes:
    """How the first sector of what an encrypted volume holds lies on the disk."""
    return Kernel().read(path, header(path).offset_bytes, SECTOR_BYTES)


def service() -> int:
    """The process id of the installed service."""
    words = ("systemctl", "show", "--property", "MainPID", "--value", "carver")
    return int(subprocess.run(words, check=True, capture_output=True).stdout)


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


def before(client: Client, volumes: Sequence[Kept], copy: Copy) -> None:
    PLACE.mkdir(parents=True, exist_ok=True)
    _at_once(lambda one: one.before(client), volumes)
    assert len(opened()) == sum(one.is_encrypted for one in volumes)
    # Before lvm2 sees the forged disks, which it refuses.
    volume, path, _ = copy.create(client)
    forged.before(client, PLACE)
    # The last: it may stop the service.
    copy.before(volume, path)


def after(client: Client, volumes: Sequence[Kept], copy: Copy) -> None:
    assert table.read(Kernel()).under(str(PLACE)) == (), "stale mounts"
    assert not Cgroups().limits()
    assert opened() == [], "left open"
    there = {volume.volume_id.rpartition("/")[2] for volume in client.volumes()}
    names = [*(one.name for one in volumes), copy.name]
    names += [one.name for one in forged.tenants(PLACE)]
    assert there == {f"vol-{one}" for one in names}
    copy.after(client)
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
    step, is_cut, volumes = sys.argv[1], sys.argv[2] == "cut", kept(int(sys.argv[3]))
    # The last is raw, and encrypted.
    copy = Copy(volumes[-1], is_cut)
    wait_until_served(DEFAULT_SOCKET)
    with Asking(DEFAULT_SOCKET, timeout_seconds=300) as client, pods.pod(pods.SYSTEMD):
        {"before": before, "after": after}[step](client, volumes, copy)


main()
