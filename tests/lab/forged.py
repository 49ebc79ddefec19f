"""In the guest: tenants who wrote a group's own label and metadata into their raw volumes.

One has those of the group that the installed service serves, one those of an operator's group, on a
loop device, that a service of this program serves. Over each is a loop device, as kubelet has one.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import configured

from agent.csi.client import Client, block
from agent.daemon.host import Host
from agent.daemon.server import Service
from lvm import report
from lvm.active_devices import Devices
from lvm.disk_reader import Disks
from lvm.lvm2 import Lvm
from mount import loop
from mount.kernel import Kernel
from mount.programs import Programs

MIB = 1 << 20
OPERATORS = "across_reboot"
# Outside of all that is looked through for mounts, and kept by a restart.
DISK = Path("/var/tmp/across-reboot-disk")
VOLUME = "of-the-operator"
# The second sector of a physical volume (label.h).
LABEL_AT, LABEL = 512, b"LABELONE"


@dataclass(frozen=True)
class Tenant:
    """A raw volume of the installed service's."""

    name: str
    place: Path

    @property
    def staging(self) -> Path:
        return self.place / f"staging-{self.name}"

    @property
    def target(self) -> Path:
        return self.place / f"target-{self.name}"

    def use(self, client: Client) -> str:
        """What kubelet does for a pod, and the loop device that it keeps meanwhile; its id."""
        volume = client.create(self.name, 8 * MIB, block())
        client.stage(volume, self.staging, block())
        client.publish(volume, self.staging, self.target, block())
        return volume.volume_id

    def forge(self, disk: str) -> None:
        """Write what a disk of a group begins with, as dd does; it is on the disk then."""
        with Path(disk).open("rb") as source, self.target.open("r+b", buffering=0) as volume:
            volume.write(source.read(MIB))
            os.fsync(volume.fileno())

    def attach(self) -> None:
        """The loop device, through which lvm2 and udev would see what is written there."""
        assert self.label() == LABEL
        loop.attach(Kernel(), str(self.target))

    def label(self) -> bytes:
        with self.target.open("rb") as volume:
            return volume.read(LABEL_AT + len(LABEL))[LABEL_AT:]

    def require_left_alone(self) -> None:
        """Nothing stands on the volume, nor on the loop device over it."""
        kernel = Kernel()
        over = loop.find(kernel, str(self.target))
        assert over, "the loop device is gone"
        for one in (str(self.target), over):
            assert kernel.device_holders(one) == [], one

    def let_go(self, client: Client, volume_id: str) -> None:
        kernel = Kernel()
        if over := loop.find(kernel, str(self.target)):
            loop.detach(kernel, over)
        client.unpublish(volume_id, self.target)
        client.unstage(volume_id, self.staging)
        client.delete(volume_id)


def tenants(place: Path) -> tuple[Tenant, Tenant]:
    return Tenant("across-reboot-forged", place), Tenant("across-reboot-operators", place)


@contextmanager
def operators() -> Iterator[Client]:
    """A service of the operator's group alone, which may see every disk of the node."""
    run = Programs()
    host = Host(run, Kernel(), Devices(), Disks(), stream=run.stream)
    with tempfile.TemporaryDirectory() as directory:
        service = Service(configured.carver(Path(directory), OPERATORS), host, Lvm(run))
        service.start(Path(directory) / "csi.sock")
        try:
            with Client(Path(directory) / "csi.sock", timeout_seconds=300) as client:
                yield client
        finally:
            service.stop()


def before(client: Client, place: Path) -> None:
    """Have both groups' metadata in tenants' volumes."""
    own, other = tenants(place)
    volume_id = own.use(client)
    other.use(client)
    group = report.read(Lvm(Programs())).group(volume_id.partition("@")[0])
    with DISK.open("wb") as file:
        file.truncate(64 * MIB)
    disk = loop.attach(Kernel(), str(DISK))
    Lvm(Programs(), (disk,))("vgcreate", "--yes", "--", OPERATORS, disk)
    with operators() as operator:
        operator.create(VOLUME, 8 * MIB, block())
    own.forge(group.disks[0].name)
    other.forge(disk)
    for one in (own, other):
        one.attach()


def begin_again(client: Client, place: Path) -> list[str]:
    """Bring the tenants' volumes into use before all others; their ids."""
    found = []
    for one in tenants(place):
        found.append(one.use(client))
        one.attach()
    return found


def after(client: Client, place: Path, volume_ids: list[str]) -> None:
    """Both groups are served from their own disks; then nothing of all this is left."""
    # The operator's disk is not attached yet: what a tenant has is not taken for his group.
    with operators() as operator:
        assert operator.capacity().available_capacity == 0
    disk = loop.attach(Kernel(), str(DISK))
    with operators() as operator:
        assert operator.capacity().available_capacity
        operator.create("another", 8 * MIB, block())
        names = {one.volume_id.rpartition("/")[2] for one in operator.volumes()}
        assert names == {f"vol-{VOLUME}", "vol-another"}
        for one in tenants(place):
            one.require_left_alone()
        for volume in operator.volumes():
            operator.delete(volume.volume_id)
    assert client.capacity().available_capacity
    for tenant, volume_id in zip(tenants(place), volume_ids, strict=True):
        tenant.let_go(client, volume_id)
    Lvm(Programs(), (disk,))("vgremove", "--yes", "--", OPERATORS)
    loop.detach(Kernel(), disk)
    DISK.unlink()
