"""Health of volumes that are not as a report has them: group gone, device left over, no volume."""

import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import configured
import expect
import pytest
from csi_client import Client
from fakes.disks import FakeDisks
from fakes.host import FakeHost
from fakes.kernel import FakeKernel
from fakes.lvm import FakeGroup, FakeVolume

from agent.core.errors import GroupRefused
from agent.csi.client import block
from agent.daemon.server import Service
from agent.groups.volume_group import VolumeGroup
from agent.operations import diagnosis as conditions
from agent.operations.diagnosis import Condition
from agent.requests import requests
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from agent.volumes.records import Volume
from agent.work.background import Probes
from lvm.devicemapper import Status
from mount.table import Mount
from proto import csi_pb2 as csi

MIB = 1 << 20
pytestmark = [
    pytest.mark.groups(data=[200], other=[200]),
    pytest.mark.settings(classes=(configured.PLAIN, DeviceClass("other", "other"))),
]


@pytest.fixture
def config(config: Config, tmp_path: Path) -> Config:
    """Volumes may be mounted below the test's directory, and nowhere else."""
    return replace(config, kubelet_dir=(str(tmp_path),))


@pytest.fixture
def service(service: Service) -> Service:
    service.diagnosis.settling_seconds = 0.0
    return service


@pytest.fixture
def volume(client: Client, service: Service) -> csi.Volume:
    made = client.create("pvc-1", 16 * MIB, block())
    service.reports.fresh()
    return made


@dataclass
class Node:
    """The machine and the service on it."""

    fake: FakeHost
    service: Service

    def group(self, name: str = "data") -> VolumeGroup:
        found = self.service.volume_groups.known(name)
        assert found is not None
        return found

    def volume(self, name: str = "vol-pvc-1") -> FakeVolume:
        return self.fake.lvm2.groups["data"].volumes[name]

    def report(self) -> None:
        """Have the service read a group that was changed behind its back."""
        self.fake.lvm2.groups["data"].seqno += 1
        self.service.reports.fresh()

    def lose_disk_of(self, *names: str) -> None:
        """Have volumes lack a disk, and the service read that."""
        for name in names:
            self.volume(name).health = "partial"
        self.report()

    def take_group(self) -> FakeGroup:
        """The group's disks are gone, and the service saw that."""
        for one in list(self.fake.lvm2.groups["data"].volumes.values()):
            self.fake.deactivate("data", one.name)
        gone = self.fake.lvm2.groups.pop("data")
        self.service.reports.outdate()
        self.group().state()
        return gone

    def hang(self, *disks: str) -> None:
        assert isinstance(self.fake.disks, FakeDisks)
        self.fake.disks.hanging |= set(disks)
        self.service.reports.outdate()


@pytest.fixture
def node(fake: FakeHost, service: Service) -> Node:
    return Node(fake, service)


def words(health: csi.VolumeHealth) -> list[tuple[int, str]]:
    return [(one.status, one.reason) for one in health.health_statuses]


def require_refused(client: Client, volume_id: str, code: str, *text: str) -> None:
    """Both calls for one volume fail with the code."""
    for ask in (client.volume_health, client.node_health):
        with expect.code(code, *text):
            ask(volume_id)


# Groups that are not here


def test_every_call_reports_a_missing_group_until_it_is_back(
    client: Client, node: Node, volume: csi.Volume
) -> None:
    other = client.create("pvc-2", 16 * MIB, block(), parameters={"class": "other"})
    gone = node.take_group()
    node.fake.commands.clear()
    [listed] = client.unhealthy()
    for health in (
        client.volume_health(volume.volume_id),
        client.node_health(volume.volume_id),
        listed,
    ):
        assert health.volume_id == volume.volume_id
        assert words(health) == [(csi.INACCESSIBLE, "GroupMissing")]
        assert "volume group data is not on this node" in health.health_statuses[0].message
    assert not client.node_health(other.volume_id).health_statuses
    assert node.fake.commands == []

    node.fake.lvm2.groups["data"] = gone
    node.service.reports.outdate()
    node.group().state()
    assert client.unhealthy() == []
    assert not client.node_health(volume.volume_id).health_statuses


def test_only_the_node_reports_a_group_that_was_never_here(client: Client, node: Node) -> None:
    node.take_group()
    for one in node.service.volume_groups:
        one.last_seen = None
    elsewhere = "data@abcdefgh/vol-pvc-1"
    assert words(client.node_health(elsewhere)) == [(csi.INACCESSIBLE, "GroupMissing")]
    with expect.code("FAILED_PRECONDITION", "data is not on this node"):
        client.volume_health(elsewhere)
    assert client.unhealthy() == []


def test_a_volume_of_another_group_of_the_same_name_does_not_count_as_deleted(
    client: Client, volume: csi.Volume
) -> None:
    another = "data@abcdefgh/vol-pvc-1"
    [found] = client.node_health(another).health_statuses
    assert found.reason == "GroupMissing"
    assert "another has its name" in found.message
    with expect.code("FAILED_PRECONDITION"):
        client.volume_health(another)


@pytest.mark.parametrize(
    ("volume_id", "code", "text"),
    [
        ("strange@abcdefgh/vol-pvc-1", "FAILED_PRECONDITION", "group strange is not on this node"),
        ("nothing", "NOT_FOUND", ""),
        ("data@/x", "NOT_FOUND", ""),
        ("csi-unknown", "NOT_FOUND", ""),
        ("", "INVALID_ARGUMENT", "volume_id"),
    ],
)
def test_an_id_that_cannot_be_a_volume_here_is_refused(
    client: Client, volume_id: str, code: str, text: str
) -> None:
    require_refused(client, volume_id, code, text)


def test_a_refused_group_is_reported(client: Client, node: Node, volume: csi.Volume) -> None:
    node.fake.lvm2.groups["data"].exported = True
    node.service.reports.outdate()
    with pytest.raises(GroupRefused):
        node.group().state()
    [found] = client.node_health(volume.volume_id).health_statuses
    assert (found.status, found.reason) == (csi.INACCESSIBLE, "GroupRefused")


# No volume


def test_an_inline_volume_is_found_as_long_as_its_pod_exists(
    client: Client, node: Node, tmp_path: Path
) -> None:
    client.publish_inline("csi-1", tmp_path / "target", {"size": "16Mi"})
    node.fake.commands.clear()
    assert not client.node_health("csi-1").health_statuses
    node.service.reports.fresh()
    node.fake.commands.clear()
    assert not client.node_health("csi-1", tmp_path / "target").health_statuses
    assert node.fake.commands == []
    node.lose_disk_of("eph-csi-1")
    [found] = client.node_health("csi-1", tmp_path / "target").health_statuses
    assert "eph-csi-1 is partial" in found.message
    # The controller does not know it.
    assert client.unhealthy() == []
    with expect.code("NOT_FOUND"):
        client.volume_health("csi-1")
    client.unpublish("csi-1", tmp_path / "target")
    with expect.code("NOT_FOUND"):
        client.node_health("csi-1")


@pytest.mark.parametrize(("state", "code"), [("wiping", "NOT_FOUND"), ("copying", "ABORTED")])
def test_a_deleted_or_incomplete_volume_has_no_health(
    client: Client, node: Node, volume: csi.Volume, state: str, code: str
) -> None:
    logical = node.volume()
    complete = logical.tags
    logical.tags = {one.replace("state=ready", f"state={state}") for one in complete}
    logical.tags |= {"carver.zero=fully"}
    node.report()
    require_refused(client, volume.volume_id, code)
    assert client.unhealthy() == []
    logical.tags = complete
    node.fake.lvm2.groups["data"].seqno += 1
    assert not client.volume_health(volume.volume_id).health_statuses


def test_a_volume_created_since_the_last_report_is_known_without_a_command(
    client: Client, node: Node
) -> None:
    made = client.create("pvc-1", 16 * MIB, block())
    node.fake.commands.clear()
    assert not client.volume_health(made.volume_id).health_statuses
    assert not client.node_health(made.volume_id).health_statuses
    assert node.fake.commands == []


def test_an_inactive_volume_is_known_without_a_command_until_the_group_changes(
    client: Client, node: Node, volume: csi.Volume
) -> None:
    node.fake.deactivate("data", "vol-pvc-1")
    node.fake.commands.clear()
    assert not client.volume_health(volume.volume_id).health_statuses
    assert node.fake.commands == []
    client.create("pvc-2", 16 * MIB, block())
    node.fake.commands.clear()
    for _ in range(3):
        assert not client.volume_health(volume.volume_id).health_statuses
    assert [one[1] for one in node.fake.commands] == ["fullreport"], "proved again after the change"


def test_a_volume_of_a_group_that_hangs_is_reported_by_its_last_state_and_not_as_deleted(
    client: Client, node: Node, volume: csi.Volume
) -> None:
    node.fake.deactivate("data", "vol-pvc-1")
    node.lose_disk_of("vol-pvc-1")
    # What a failed command did is not known before the next report.
    node.group().lvm.run("lvm", "lvremove", "--yes", "--", "data/none")
    assert node.group().is_changed
    node.hang("/dev/fake-data-0")
    assert words(client.node_health(volume.volume_id)) == [(csi.INACCESSIBLE, "DiskMissing")]
    with expect.code("UNAVAILABLE", "do not answer"):
        client.node_health(volume.volume_id.replace("pvc-1", "pvc-9"))


def test_no_call_asks_lvm2_or_reads_a_disk_for_a_known_volume(
    client: Client, node: Node, volume: csi.Volume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.stage(volume, tmp_path / "staging", block())
    # Disks that may hang are not even asked.
    asked: list[str] = []
    for name in ("scan", "fingerprint"):
        monkeypatch.setattr(node.fake.disks, name, lambda *_words, one=name: asked.append(one))
    node.fake.commands.clear()
    assert not client.volume_health(volume.volume_id).health_statuses
    assert not client.node_health(volume.volume_id).health_statuses
    assert not client.node_health(volume.volume_id, "", tmp_path / "staging").health_statuses
    assert client.unhealthy() == []
    client.storage_health()
    assert (node.fake.commands, asked) == ([], [])
    monkeypatch.undo()


def test_a_group_that_was_never_seen_is_read_and_one_that_hangs_is_an_error(
    client: Client, node: Node
) -> None:
    made = client.create("pvc-1", 16 * MIB, block())

    def forget() -> None:
        for one in node.service.volume_groups:
            one.cached, one.status_seconds = None, 0.0
            one.metadata.forget()

    forget()
    assert not client.volume_health(made.volume_id).health_statuses
    forget()
    node.hang("/dev/fake-data-0", "/dev/fake-other-0")
    require_refused(client, made.volume_id, "UNAVAILABLE", "do not answer")
    with expect.code("UNAVAILABLE", "do not answer"):
        client.unhealthy()


def test_an_inline_volume_without_a_report_is_searched_for_in_each_group_that_answers(
    client: Client, node: Node, tmp_path: Path
) -> None:
    client.publish_inline("csi-1", tmp_path / "target", {"size": "16Mi"})
    node.fake.kernel.unmount(str(tmp_path / "target"))
    node.fake.deactivate("data", "eph-csi-1")
    assert not client.node_health("csi-1").health_statuses
    node.hang("/dev/fake-other-0")
    with expect.code("UNAVAILABLE", "do not answer"):
        client.node_health("csi-unknown")


# Pages


def page(client: Client, token: str = "", most: int = 0) -> tuple[list[str], str, int]:
    """The ids on a page of ControllerListVolumeHealth, the next token, and the message's size."""
    request = csi.ControllerListVolumeHealthRequest(max_entries=most, starting_token=token)
    found = client.controller.ControllerListVolumeHealth(request)
    return [one.volume_id for one in found.entries], found.next_token, found.ByteSize()


def create(client: Client, number: int) -> list[str]:
    return [client.create(f"{one}", 16 * MIB, block()).volume_id for one in range(number)]


def test_the_list_has_pages_and_an_unknown_token_is_refused(client: Client, node: Node) -> None:
    first, second, _, third, _ = create(client, 5)
    node.lose_disk_of("vol-0", "vol-1", "vol-3")
    ids, token, _ = page(client, most=2)
    assert ids == [first, second]
    assert page(client, token, most=2)[:2] == ([third], "")
    unknown = token.replace("@", "/")
    with expect.code("ABORTED", unknown):
        page(client, unknown, most=2)
    with expect.code("INVALID_ARGUMENT", "max_entries"):
        page(client, most=-1)


def test_an_unbounded_list_comes_in_parts_that_fit_a_message_and_visits_each_volume_once(
    client: Client, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = create(client, 9)
    node.lose_disk_of(*(f"vol-{one}" for one in range(9)))
    whole, _, size = page(client)
    assert whole == ids
    monkeypatch.setattr(requests, "MOST_BYTES", most := size // 2)
    looked: list[str] = []
    real = node.service.diagnosis.of

    def of(volume: Volume, *words: Any, **named: Any) -> tuple[Condition, ...]:
        looked.append(str(volume.id))
        return real(volume, *words, **named)

    monkeypatch.setattr(node.service.diagnosis, "of", of)
    seen, token, size = page(client)
    while token:
        assert size <= most
        # The volume that did not fit is diagnosed again.
        assert looked.pop() == token
        part, token, size = page(client, token)
        assert part
        seen += part
    assert seen == ids == looked
    assert [one.volume_id for one in client.unhealthy()] == ids


def test_unbounded_lists_of_volumes_and_snapshots_come_in_parts(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MOST_ENTRIES", 2)
    ids = create(client, 5)
    snapshots = [client.snapshot(f"{one}", ids[0]).snapshot_id for one in range(3)]
    part = client.controller.ListVolumes(csi.ListVolumesRequest(max_entries=4))
    assert [one.volume.volume_id for one in part.entries] == ids[:2]
    assert part.next_token
    assert [one.volume_id for one in client.volumes()] == ids
    assert [one.snapshot_id for one in client.snapshots()] == snapshots


# What the kernel reports


def test_a_volume_suspended_for_a_group_snapshot_or_for_a_moment_is_healthy(
    client: Client, node: Node, volume: csi.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.fake.suspend("data", "vol-pvc-1")
    with node.service.context.activator.keep_suspended([("data", "vol-pvc-1")]):
        assert client.unhealthy() == []
    node.service.diagnosis.settling_seconds = moment = 0.5
    real = time.sleep

    def sleep(seconds: float) -> None:
        if seconds == moment:
            node.fake.devices.resume("data", "vol-pvc-1")
        else:
            real(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    assert client.unhealthy() == []


def test_a_device_that_hangs_delays_no_call_and_is_reported(
    client: Client, node: Node, volume: csi.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, hanging = threading.Event(), threading.Event()

    def hang(_volume: object) -> tuple[Status, ...]:
        hanging.set()
        assert go_on.wait(60)
        return ()

    monkeypatch.setattr(conditions, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(node.service.context.activator, "status_of", hang)
    began = time.monotonic()
    assert client.node_health(volume.volume_id).health_statuses == []
    assert hanging.wait(20)
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 11)
    [found] = client.node_health(volume.volume_id).health_statuses
    monkeypatch.setattr(time, "monotonic", real)
    assert (found.status, found.reason) == (csi.INACCESSIBLE, "DeviceNotResponding")
    assert time.monotonic() - began < 20
    go_on.set()
    monkeypatch.undo()
    node.service.diagnosis._probes = Probes()
    assert not client.node_health(volume.volume_id).health_statuses


def test_a_path_with_a_device_that_went_away_is_reported(
    client: Client, node: Node, volume: csi.Volume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.publish(volume, tmp_path / "staging", tmp_path / "target", block())
    assert isinstance(node.fake.kernel, FakeKernel)
    assert not client.node_health(volume.volume_id, tmp_path / "target").health_statuses
    monkeypatch.setattr(Mount, "is_stale_node", property(lambda one: one.path.endswith("target")))
    found = client.node_health(volume.volume_id, tmp_path / "target", tmp_path / "staging")
    assert words(found) == [(csi.INACCESSIBLE, "DeviceGone")]
    assert not client.node_health(volume.volume_id).health_statuses


def test_health_does_not_need_the_paths_of_the_call_to_exist(
    client: Client, node: Node, volume: csi.Volume, tmp_path: Path
) -> None:
    node.fake.deactivate("data", "vol-pvc-1")
    node.lose_disk_of("vol-pvc-1")
    found = client.node_health(volume.volume_id, tmp_path / "pods/x", tmp_path / "plugins/y")
    assert words(found) == [(csi.INACCESSIBLE, "DiskMissing")]


@pytest.mark.parametrize("path", ["relative", "/", "/a/../b", "/outside/of/it"])
def test_an_invalid_path_is_refused(client: Client, volume: csi.Volume, path: str) -> None:
    with expect.code("INVALID_ARGUMENT"):
        client.node_health(volume.volume_id, path)
    with expect.code("INVALID_ARGUMENT"):
        client.node_health(volume.volume_id, staging_path=path)


def test_two_problems_are_two_entries(client: Client, node: Node, volume: csi.Volume) -> None:
    assert client.snapshot("s", volume.volume_id).snapshot_id
    node.lose_disk_of("vol-pvc-1")
    node.fake.lvm2.wrote("/dev/mapper/data-vol--pvc--1", 16 * MIB)
    assert words(client.volume_health(volume.volume_id)) == [
        (csi.DATA_LOSS, "SnapshotOverflowed"),
        (csi.INACCESSIBLE, "DiskMissing"),
    ]


# Capabilities


def test_the_health_calls_are_offered_and_the_old_condition_capability_is_not(
    client: Client,
) -> None:
    controller = client.controller.ControllerGetCapabilities(csi.ControllerGetCapabilitiesRequest())
    rpc = csi.ControllerServiceCapability.RPC
    offered = {one.rpc.type for one in controller.capabilities}
    assert {rpc.GET_VOLUME_HEALTH, rpc.LIST_VOLUME_HEALTH} <= offered
    assert 11 not in offered
    node = client.node.NodeGetCapabilities(csi.NodeGetCapabilitiesRequest())
    of_node = csi.NodeServiceCapability.RPC
    offered_by_node = {one.rpc.type for one in node.capabilities}
    assert {of_node.GET_VOLUME_HEALTH, of_node.GET_STORAGE_HEALTH} <= offered_by_node
    assert 4 not in offered_by_node
