"""A call reads the groups that it is about, and no other (docs/design.md, Invariants)."""

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import configured
import pytest
import serving
from csi_client import Client
from fakes.host import FakeHost

from agent.csi.client import block, mounted, of_snapshot, of_volume
from agent.daemon.server import Service
from agent.settings.classes import DeviceClass

MIB = 1 << 20
SIZE = 24 * MIB


class Machine:
    """Carver on the groups a and b; `read` has the groups whose disks were looked at."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = FakeHost(directory)
        for name in "ab":
            self.host.lvm2.add_group(name, [200])
        self.config = configured.carver(
            directory,
            classes=(DeviceClass("sound", "b", default=True), DeviceClass("sick", "a")),
        )
        self.read: set[str] = set()
        self.made: dict[str, str] = {}
        look = self.host.disks.fingerprint

        def fingerprint(disks: Collection[str], *more: Any) -> Any:
            self.read |= {name for name in "ab" if any(f"fake-{name}-" in one for one in disks)}
            return look(disks, *more)

        monkeypatch.setattr(self.host.disks, "fingerprint", fingerprint)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.fixture
def service(machine: Machine) -> Iterator[Service]:
    running = serving.start(machine.config, machine.host)
    yield running
    running.stop()


@pytest.fixture
def client(machine: Machine, service: Service) -> Iterator[Client]:
    with Client(machine.config.endpoint) as caller:
        sick = caller.create("other", SIZE, block(), parameters={"class": "sick"})
        caller.snapshot("of-other", sick.volume_id)
        volume = caller.create("pvc-1", SIZE, mounted("ext4"))
        machine.made["pvc-1"] = volume.volume_id
        machine.made["snap"] = caller.snapshot("snap", volume.volume_id).snapshot_id
        service.reports.fresh()
        service.volume_groups.run_deferred()
        machine.read.clear()
        yield caller


CALLS: dict[str, Callable[[Client, dict[str, str]], object]] = {
    "create": lambda client, _: client.create("new", SIZE, block()),
    "create again": lambda client, _: client.create("pvc-1", SIZE, mounted("ext4")),
    "restore": lambda client, made: client.create(
        "new", SIZE, mounted("ext4"), source=of_snapshot(made["snap"])
    ),
    "clone": lambda client, made: client.create(
        "new", SIZE, mounted("ext4"), source=of_volume(made["pvc-1"])
    ),
    "capacity": lambda client, _: client.capacity(),
    "snapshot": lambda client, made: client.snapshot("new", made["pvc-1"]),
    "snapshot again": lambda client, made: client.snapshot("snap", made["pvc-1"]),
    "delete a snapshot": lambda client, made: client.delete_snapshot(made["snap"]),
    "validate": lambda client, made: client.confirms(made["pvc-1"], mounted("ext4")),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_one_group_looks_at_no_disk_of_another(
    machine: Machine, client: Client, name: str
) -> None:
    """A disk that begins to hang there would keep the first call of this group waiting."""
    CALLS[name](client, machine.made)
    assert machine.read <= {"b"}


def test_what_carver_changed_in_another_group_is_seen(machine: Machine, client: Client) -> None:
    made = client.create("twice", SIZE, block(), parameters={"class": "sick"})
    # The class that a call does not name is not compared.
    assert client.create("twice", SIZE, block()).volume_id == made.volume_id
