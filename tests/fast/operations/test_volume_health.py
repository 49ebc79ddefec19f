"""Health of volumes that are not as a report has them: group gone, device left over, no volume."""

import threading
import time
from pathlib import Path
from typing import Any

import configured
import expect
import pytest
from csi_client import Client
from fakes.disks import FakeDisks
from fakes.host import FakeHost
from fakes.kernel import FakeKernel
from fakes.lvm import FakeGroup

from agent.core import requests
from agent.core.background import Probes
from agent.core.classes import DeviceClass
from agent.core.errors import GroupRefused
from agent.core.records import Volume
from agent.core.settings import Config
from agent.core.volume_group import VolumeGroup
from agent.csi.client import block
from agent.daemon.server import Service
from agent.operations import health as conditions
from agent.operations.health import Condition
from lvm.devicemapper import Status
from mount.table import Mount
from proto import csi_pb2 as csi

MIB = 1 << 20


@pytest.fixture
def config(tmp_path: Path) -> Config:
    classes = (DeviceClass("plain", "data", default=True), DeviceClass("other", "other"))
    return configured.carver(tmp_path, kubelet_dir=(str(tmp_path),), classes=classes)


@pytest.fixture
def fake(tmp_path: Path) -> FakeHost:
    host = FakeHost(tmp_path)
    host.lvm2.add_group("data", [200])
    host.lvm2.add_group("other", [200])
    return host


@pytest.fixture
def service(service: Service) -> Service:
    service.diagnosis.settling_seconds = 0.0
    return service


@pytest.fixture
def volume(client: Client, service: Service) -> csi.Volume:
    made = client.create("pvc-1", 16 * MIB, block())
    service.inventory.state()
    return made


def volume_group(service: Service, name: str = "data") -> VolumeGroup:
    found = service.volume_groups.known(name)
    assert found is not None
    return found


def words(health: csi.VolumeHealth) -> list[tuple[int, str]]:
    return [(one.status, one.reason) for one in health.health_statuses]


def take(fake: FakeHost, service: Service, name: str = "data") -> FakeGroup:
    """The group's disks are gone, and that was seen."""
    for one in list(fake.lvm2.groups[name].volumes.values()):
        fake.deactivate(name, one.name)
    gone = fake.lvm2.groups.pop(name)
    service.inventory.outdate()
    volume_group(service, name).state()
    return gone


# Groups that are not here


def test_a_group_that_is_gone_is_told_of_its_volumes_by_every_call_until_it_is_back(
    client: Client, service: Service, fake: FakeHost, volume: csi.Volume
) -> None:
    other = client.create("pvc-2", 16 * MIB, block(), parameters={"class": "other"})
    gone = take(fake, service)
    fake.commands.clear()
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
    assert fake.commands == []

    fake.lvm2.groups["data"] = gone
    service.inventory.outdate()
    volume_group(service).state()
    assert client.unhealthy() == []
    assert not client.node_health(volume.volume_id).health_statuses


def test_a_group_that_never_was_here_is_told_of_by_the_node_alone(
    client: Client, service: Service, fake: FakeHost
) -> None:
    take(fake, service)
    for one in service.volume_groups:
        one.last_seen = None
    elsewhere = "data@abcdefgh/vol-pvc-1"
    assert words(client.node_health(elsewhere)) == [(csi.INACCESSIBLE, "GroupMissing")]
    with expect.code("FAILED_PRECONDITION", "data is not on this node"):
        client.volume_health(elsewhere)
    assert client.unhealthy() == []


def test_a_volume_of_another_group_of_that_name_is_not_taken_for_deleted(
    client: Client, volume: csi.Volume
) -> None:
    another = "data@abcdefgh/vol-pvc-1"
    [found] = client.node_health(another).health_statuses
    assert found.reason == "GroupMissing"
    assert "another has its name" in found.message
    with expect.code("FAILED_PRECONDITION"):
        client.volume_health(another)


def test_a_group_that_no_class_names_and_that_is_not_here_proves_nothing(client: Client) -> None:
    for ask in (client.volume_health, client.node_health):
        with expect.code("FAILED_PRECONDITION", "group strange is not on this node"):
            ask("strange@abcdefgh/vol-pvc-1")


def test_a_group_that_is_refused_is_told_with_why(
    client: Client, service: Service, fake: FakeHost, volume: csi.Volume
) -> None:
    fake.lvm2.groups["data"].exported = True
    service.inventory.outdate()
    with pytest.raises(GroupRefused):
        volume_group(service).state()
    [found] = client.node_health(volume.volume_id).health_statuses
    assert (found.status, found.reason) == (csi.INACCESSIBLE, "GroupRefused")


# No volume


@pytest.mark.parametrize("volume_id", ["nothing", "data@/x", "csi-unknown"])
def test_what_can_be_no_volume_is_not_found(client: Client, volume_id: str) -> None:
    for ask in (client.volume_health, client.node_health):
        with expect.code("NOT_FOUND"):
            ask(volume_id)


def test_no_volume_id_is_a_missing_field(client: Client) -> None:
    for ask in (client.volume_health, client.node_health):
        with expect.code("INVALID_ARGUMENT", "volume_id"):
            ask("")


def test_a_volume_that_was_deleted_since_the_last_report_is_not_found(
    client: Client, volume: csi.Volume
) -> None:
    client.delete(volume.volume_id)
    for ask in (client.volume_health, client.node_health):
        with expect.code("NOT_FOUND"):
            ask(volume.volume_id)


def test_an_inline_volume_is_found_as_long_as_its_pod_is_there(
    client: Client, service: Service, fake: FakeHost, tmp_path: Path
) -> None:
    client.publish_inline("csi-1", tmp_path / "target", {"size": "16Mi"})
    fake.commands.clear()
    assert not client.node_health("csi-1").health_statuses
    service.inventory.state()
    fake.commands.clear()
    assert not client.node_health("csi-1", tmp_path / "target").health_statuses
    assert fake.commands == []
    client.unpublish("csi-1", tmp_path / "target")
    with expect.code("NOT_FOUND"):
        client.node_health("csi-1")


def test_a_volume_that_is_being_wiped_is_no_volume_any_more(
    client: Client, service: Service, fake: FakeHost, volume: csi.Volume
) -> None:
    logical = fake.lvm2.groups["data"].volumes["vol-pvc-1"]
    logical.tags = {one.replace("state=ready", "state=wiping") for one in logical.tags}
    fake.lvm2.groups["data"].seqno += 1
    service.inventory.state()
    for ask in (client.volume_health, client.node_health):
        with expect.code("NOT_FOUND"):
            ask(volume.volume_id)
    assert client.unhealthy() == []


def test_a_volume_that_was_not_complete_then_and_is_now_is_one(
    client: Client, service: Service, fake: FakeHost, volume: csi.Volume
) -> None:
    logical = fake.lvm2.groups["data"].volumes["vol-pvc-1"]
    complete = logical.tags
    logical.tags = {one.replace("state=ready", "state=copying") for one in complete}
    fake.lvm2.groups["data"].seqno += 1
    service.inventory.state()
    for ask in (client.volume_health, client.node_health):
        with expect.code("ABORTED"):
            ask(volume.volume_id)
    assert client.unhealthy() == []
    logical.tags = complete
    fake.lvm2.groups["data"].seqno += 1
    assert not client.volume_health(volume.volume_id).health_statuses


def test_a_volume_that_was_made_since_the_last_report_is_known_without_a_process(
    client: Client, fake: FakeHost
) -> None:
    made = client.create("pvc-1", 16 * MIB, block())
    fake.commands.clear()
    assert not client.volume_health(made.volume_id).health_statuses
    assert not client.node_health(made.volume_id).health_statuses
    assert fake.commands == []


def test_an_inactive_volume_is_known_without_a_process_until_the_group_is_changed(
    client: Client, fake: FakeHost, volume: csi.Volume
) -> None:
    fake.deactivate("data", "vol-pvc-1")
    fake.commands.clear()
    assert not client.volume_health(volume.volume_id).health_statuses
    assert fake.commands == []
    client.create("pvc-2", 16 * MIB, block())
    fake.commands.clear()
    for _ in range(3):
        assert not client.volume_health(volume.volume_id).health_statuses
    assert [one[1] for one in fake.commands] == ["fullreport"], "and then it is proved again"


def test_what_lvm2_does_not_tell_any_more_is_told_as_it_was_and_never_taken_for_deleted(
    client: Client, service: Service, fake: FakeHost, volume: csi.Volume
) -> None:
    fake.deactivate("data", "vol-pvc-1")
    fake.lvm2.groups["data"].volumes["vol-pvc-1"].health = "partial"
    fake.lvm2.groups["data"].seqno += 1
    service.inventory.state()
    # What a command did that failed is not known before the next look.
    volume_group(service).lvm.run("lvm", "lvremove", "--yes", "--", "data/none")
    assert volume_group(service).is_changed
    assert isinstance(fake.disks, FakeDisks)
    fake.disks.hanging.add("/dev/fake-data-0")
    assert words(client.node_health(volume.volume_id)) == [(csi.INACCESSIBLE, "DiskMissing")]
    with expect.code("UNAVAILABLE", "do not answer"):
        client.node_health(volume.volume_id.replace("pvc-1", "pvc-9"))


def test_no_call_asks_lvm2_or_reads_a_disk_for_a_volume_that_is_known(
    client: Client,
    fake: FakeHost,
    volume: csi.Volume,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client.stage(volume, tmp_path / "staging", block())
    # Disks that may hang are not even asked.
    asked: list[str] = []
    for name in ("scan", "fingerprint"):
        monkeypatch.setattr(fake.disks, name, lambda *_words, one=name: asked.append(one))
    fake.commands.clear()
    assert not client.volume_health(volume.volume_id).health_statuses
    assert not client.node_health(volume.volume_id).health_statuses
    assert not client.node_health(volume.volume_id, "", tmp_path / "staging").health_statuses
    assert client.unhealthy() == []
    client.storage_health()
    assert (fake.commands, asked) == ([], [])
    monkeypatch.undo()


def test_before_a_group_was_ever_seen_it_is_looked_at_and_what_hangs_is_told(
    client: Client, service: Service, fake: FakeHost
) -> None:
    made = client.create("pvc-1", 16 * MIB, block())
    for one in service.volume_groups:
        one.cached, one.time_seconds = None, 0.0
        one.metadata.forget()
    assert not client.volume_health(made.volume_id).health_statuses
    for one in service.volume_groups:
        one.cached, one.time_seconds = None, 0.0
        one.metadata.forget()
    service.inventory.outdate()
    assert isinstance(fake.disks, FakeDisks)
    fake.disks.hanging |= {"/dev/fake-data-0", "/dev/fake-other-0"}
    for ask in (client.volume_health, client.node_health):
        with expect.code("UNAVAILABLE", "do not answer"):
            ask(made.volume_id)
    with expect.code("UNAVAILABLE", "do not answer"):
        client.unhealthy()


def test_an_inline_volume_that_no_report_has_is_looked_for_in_each_group_that_answers(
    client: Client, service: Service, fake: FakeHost, tmp_path: Path
) -> None:
    client.publish_inline("csi-1", tmp_path / "target", {"size": "16Mi"})
    fake.kernel.unmount(str(tmp_path / "target"))
    fake.deactivate("data", "eph-csi-1")
    assert not client.node_health("csi-1").health_statuses
    assert isinstance(fake.disks, FakeDisks)
    fake.disks.hanging.add("/dev/fake-other-0")
    service.inventory.outdate()
    with expect.code("UNAVAILABLE", "do not answer"):
        client.node_health("csi-unknown")


# Pages


def test_the_list_comes_in_pages_and_a_token_that_is_none_is_refused(
    client: Client, service: Service, fake: FakeHost
) -> None:
    ids = [client.create(f"{one}", 16 * MIB, block()).volume_id for one in range(5)]
    for number in (0, 1, 3):
        fake.lvm2.groups["data"].volumes[f"vol-{number}"].health = "partial"
    service.inventory.state()
    request = csi.ControllerListVolumeHealthRequest(max_entries=2)
    first = client.controller.ControllerListVolumeHealth(request)
    assert [one.volume_id for one in first.entries] == [ids[0], ids[1]]
    request.starting_token = first.next_token
    rest = client.controller.ControllerListVolumeHealth(request)
    assert [one.volume_id for one in rest.entries] == [ids[3]]
    assert rest.next_token == ""
    request.starting_token = first.next_token.replace("@", "/")
    with expect.code("ABORTED", request.starting_token):
        client.controller.ControllerListVolumeHealth(request)
    with expect.code("INVALID_ARGUMENT", "max_entries"):
        client.controller.ControllerListVolumeHealth(
            csi.ControllerListVolumeHealthRequest(max_entries=-1)
        )


def test_a_list_without_a_bound_comes_in_parts_that_fit_in_a_message_and_none_is_looked_at_twice(
    client: Client, service: Service, fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [client.create(f"{one}", 16 * MIB, block()).volume_id for one in range(9)]
    for number in range(9):
        fake.lvm2.groups["data"].volumes[f"vol-{number}"].health = "partial"
    service.inventory.state()
    whole = client.controller.ControllerListVolumeHealth(csi.ControllerListVolumeHealthRequest())
    assert [one.volume_id for one in whole.entries] == ids
    most = whole.ByteSize() // 2
    monkeypatch.setattr(requests, "_MOST_BYTES", most)
    looked: list[str] = []
    real = service.diagnosis.of

    def of(volume: Volume, *words: Any, **named: Any) -> tuple[Condition, ...]:
        looked.append(str(volume.id))
        return real(volume, *words, **named)

    monkeypatch.setattr(service.diagnosis, "of", of)
    request, seen = csi.ControllerListVolumeHealthRequest(), list[str]()
    while True:
        part = client.controller.ControllerListVolumeHealth(request)
        assert part.entries
        assert part.ByteSize() <= most
        seen += [one.volume_id for one in part.entries]
        if not (token := part.next_token):
            break
        # The one that did not fit is looked at again.
        assert looked.pop() == token
        request.starting_token = token
    assert seen == ids == looked
    assert [one.volume_id for one in client.unhealthy()] == ids


def test_lists_without_a_bound_come_in_parts_and_who_wants_all_asks_for_all(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "_MOST_ENTRIES", 2)
    ids = [client.create(f"{one}", 16 * MIB, block()).volume_id for one in range(5)]
    snapshots = [client.snapshot(f"{one}", ids[0]).snapshot_id for one in range(3)]
    part = client.controller.ListVolumes(csi.ListVolumesRequest(max_entries=4))
    assert [one.volume.volume_id for one in part.entries] == ids[:2]
    assert part.next_token
    assert [one.volume_id for one in client.volumes()] == ids
    assert [one.snapshot_id for one in client.snapshots()] == snapshots


# What the kernel tells


def test_a_volume_that_was_left_suspended_is_inaccessible_until_it_is_resumed(
    client: Client, fake: FakeHost, volume: csi.Volume
) -> None:
    fake.suspend("data", "vol-pvc-1")
    fake.commands.clear()
    [listed] = client.unhealthy()
    for health in (client.volume_health(volume.volume_id), listed):
        assert words(health) == [(csi.INACCESSIBLE, "DeviceSuspended")]
        assert "dmsetup resume" in health.health_statuses[0].message
    assert fake.commands == []
    fake.devices.resume("data", "vol-pvc-1")
    assert client.unhealthy() == []


def test_a_volume_that_is_held_for_a_group_snapshot_or_for_a_moment_is_well(
    client: Client,
    service: Service,
    fake: FakeHost,
    volume: csi.Volume,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake.suspend("data", "vol-pvc-1")
    with service.inventory.keep_suspended([("data", "vol-pvc-1")]):
        assert client.unhealthy() == []
    service.diagnosis.settling_seconds = moment = 0.5
    real = time.sleep

    def sleep(seconds: float) -> None:
        if seconds == moment:
            fake.devices.resume("data", "vol-pvc-1")
        else:
            real(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    assert client.unhealthy() == []


def test_a_volume_whose_device_does_not_answer_keeps_nobody_waiting_and_is_told_of(
    client: Client, service: Service, volume: csi.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, hanging = threading.Event(), threading.Event()

    def hang(_volume_id: str) -> tuple[Status, ...]:
        hanging.set()
        assert go_on.wait(60)
        return ()

    monkeypatch.setattr(conditions, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(service.inventory, "status_of", hang)
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
    service.diagnosis._looks = Probes()
    assert not client.node_health(volume.volume_id).health_statuses


def test_a_path_that_shows_a_device_that_went_away_is_told_of(
    client: Client,
    fake: FakeHost,
    volume: csi.Volume,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client.publish(volume, tmp_path / "staging", tmp_path / "target", block())
    assert isinstance(fake.kernel, FakeKernel)
    assert not client.node_health(volume.volume_id, tmp_path / "target").health_statuses
    monkeypatch.setattr(Mount, "is_stale_node", property(lambda one: one.path.endswith("target")))
    found = client.node_health(volume.volume_id, tmp_path / "target", tmp_path / "staging")
    assert words(found) == [(csi.INACCESSIBLE, "DeviceGone")]
    assert not client.node_health(volume.volume_id).health_statuses


def test_a_volume_that_could_never_be_staged_is_answered_for_at_paths_that_are_not_there(
    client: Client, service: Service, fake: FakeHost, volume: csi.Volume, tmp_path: Path
) -> None:
    fake.deactivate("data", "vol-pvc-1")
    fake.lvm2.groups["data"].volumes["vol-pvc-1"].health = "partial"
    fake.lvm2.groups["data"].seqno += 1
    service.inventory.state()
    found = client.node_health(volume.volume_id, tmp_path / "pods/x", tmp_path / "plugins/y")
    assert words(found) == [(csi.INACCESSIBLE, "DiskMissing")]


@pytest.mark.parametrize("path", ["relative", "/", "/a/../b", "/outside/of/it"])
def test_a_path_that_can_be_no_volume_s_is_refused(
    client: Client, volume: csi.Volume, path: str
) -> None:
    with expect.code("INVALID_ARGUMENT"):
        client.node_health(volume.volume_id, path)
    with expect.code("INVALID_ARGUMENT"):
        client.node_health(volume.volume_id, staging_path=path)


def test_two_things_that_are_wrong_are_two_entries(
    client: Client, service: Service, fake: FakeHost, volume: csi.Volume
) -> None:
    snapshot = client.snapshot("s", volume.volume_id)
    fake.lvm2.groups["data"].volumes["vol-pvc-1"].health = "partial"
    service.inventory.state()
    fake.lvm2.wrote("/dev/mapper/data-vol--pvc--1", 16 * MIB)
    assert snapshot.snapshot_id
    assert words(client.volume_health(volume.volume_id)) == [
        (csi.DATA_LOSS, "SnapshotOverflowed"),
        (csi.INACCESSIBLE, "DiskMissing"),
    ]


# Capabilities


def test_the_health_calls_are_offered_and_the_old_condition_is_not(client: Client) -> None:
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
