"""Repair RAID volumes and pools with damaged metadata: on request, and automatically."""

from dataclasses import replace
from pathlib import Path

import configured
import expect
import pytest
import serving
from fakes.host import FakeHost
from fakes.lvm import FakePool

from agent.csi.client import Client, block
from agent.daemon.server import Service
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from lvm import report
from lvm.layout import Layout, Reserve

MIB = 1 << 20
EXTENT = 4 * MIB
pytestmark = [
    pytest.mark.groups(data=[60, 50, 40], wide=[60] * 6),
    pytest.mark.settings(
        classes=(
            configured.PLAIN,
            configured.RAID,
            replace(configured.RAID, name="auto", repair="auto", repair_after_seconds=600),
            DeviceClass("raid10", "wide", layout=Layout("raid10", stripes=2, mirrors=1)),
            configured.THIN,
        )
    ),
]


def make(client: Client, name: str, device_class: str, extents: int = 4) -> str:
    parameters = {"class": device_class}
    return client.create(name, extents * EXTENT, block(), parameters=parameters).volume_id


def repaired(
    client: Client, volume_id: str, *, pool_metadata: bool = False, differing_images: bool = False
) -> list[str]:
    messages = []
    for _ in range(20):
        done, message = client.repair(
            volume_id, pool_metadata=pool_metadata, differing_images=differing_images
        )
        messages.append(message)
        if done:
            return messages
    raise AssertionError(messages)


def test_a_whole_volume_costs_one_report_at_most(client: Client, fake: FakeHost) -> None:
    for name in ("plain", "raid", "thin"):
        volume = make(client, name, name)
        fake.commands.clear()
        assert client.repair(volume)[0]
        assert {words[1] for words in fake.commands} <= {"fullreport"}


def test_a_lost_image_is_rebuilt_on_a_disk_with_room(client: Client, fake: FakeHost) -> None:
    volume = make(client, "a", "raid")
    fake.lose_disk("data", 0)
    messages = repaired(client, volume)
    assert any("%" in one for one in messages), messages
    assert list(fake.lvm2.groups["data"].volumes["vol-a"].extents) == [
        "/dev/fake-data-2",
        "/dev/fake-data-1",
    ]


def test_without_room_on_another_disk_nothing_is_begun(client: Client, fake: FakeHost) -> None:
    volume = make(client, "a", "raid", 30)
    make(client, "b", "plain", 50)
    fake.lvm2.groups["data"].volumes["vol-b"].extents = {"/dev/fake-data-2": 39}
    fake.lose_disk("data", 0)
    with expect.code("RESOURCE_EXHAUSTED", "replace-disk"):
        client.repair(volume)


def test_a_volume_without_a_copy_is_not_repaired(client: Client, fake: FakeHost) -> None:
    ids = {name: make(client, name, name) for name in ("plain", "thin")}
    lost = fake.lvm2.groups["data"].disks[0]
    fake.lose_disk("data", 0)
    for volume in ids.values():
        with expect.code("FAILED_PRECONDITION", lost.uuid, "backup"):
            client.repair(volume)


@pytest.mark.parametrize("then_created", [(), ("b",)], ids=["", "metadata changed since"])
def test_an_image_that_failed_for_a_while_is_refreshed(
    client: Client, fake: FakeHost, then_created: tuple[str, ...]
) -> None:
    """The metadata have nothing of the failure, also after a later change of the group."""
    volume = make(client, "a", "raid")
    fake.fail_image("data", "vol-a", 1)
    for name in then_created:
        make(client, name, "raid")
    repaired(client, volume)
    assert not fake.lvm2.groups["data"].volumes["vol-a"].failed


@pytest.fixture
def striped(client: Client, fake: FakeHost) -> str:
    """A raid10 of four images on six disks: 0 and 1 are a pair, and so are 2 and 3."""
    volume = make(client, "a", "raid10", 8)
    assert len(images(fake)) == 4
    return volume


def images(fake: FakeHost) -> list[str]:
    return list(fake.lvm2.groups["wide"].volumes["vol-a"].extents)


def lose_images(fake: FakeHost, *numbers: int) -> list[str]:
    """The UUIDs of the disks that these images were on."""
    group, lies_on = fake.lvm2.groups["wide"], images(fake)
    lost = [[one.name for one in group.disks].index(lies_on[number]) for number in numbers]
    for one in lost:
        fake.lose_disk("wide", one)
    return [group.disks[one].uuid for one in lost]


@pytest.mark.parametrize("lost", [(0, 2), (0, 3), (1, 2), (1, 3), (2,)])
def test_a_raid10_that_lost_an_image_of_each_pair_is_degraded_and_repaired(
    client: Client, fake: FakeHost, striped: str, lost: tuple[int, ...]
) -> None:
    before = images(fake)
    lose_images(fake, *lost)
    assert reasons(client, striped) == {"RaidDegraded"}
    repaired(client, striped)
    after = images(fake)
    assert [one for one in range(4) if after[one] != before[one]] == list(lost)
    assert reasons(client, striped) == set()


@pytest.mark.parametrize("lost", [(0, 1), (2, 3), (0, 1, 2)])
def test_a_raid10_that_lost_both_images_of_a_pair_has_failed_and_is_not_repaired(
    client: Client, fake: FakeHost, striped: str, lost: tuple[int, ...]
) -> None:
    before = images(fake)
    first, *_ = lose_images(fake, *lost)
    assert reasons(client, striped) == {"RaidFailed"}
    with expect.code("FAILED_PRECONDITION", f"{len(lost)} of its images"):
        client.repair(striped)
    with expect.code("FAILED_PRECONDITION", "vol-a"):
        client.replace_disk(first, fake.new_device(61 * EXTENT))
    assert images(fake) == before


def test_the_disks_of_an_image_of_each_pair_are_replaced(
    client: Client, fake: FakeHost, striped: str
) -> None:
    group = fake.lvm2.groups["wide"]
    group.disks = [one for one in group.disks if one.name in images(fake)]
    pairs = [(one, fake.new_device(61 * EXTENT)) for one in lose_images(fake, 0, 2)]
    lost = [one for one, _ in pairs]
    messages = [client.replace_disk(*pairs[0])[1] for _ in range(10)]
    assert "replace each" in messages[-1], "its disk has the other lost image, and takes no second"
    for pair in pairs * 10:
        client.replace_disk(*pair)
    assert all(client.replace_disk(*pair)[0] for pair in pairs)
    assert not {one.uuid for one in group.disks} & set(lost)
    assert reasons(client, striped) == set()


def reasons(client: Client, volume_id: str) -> set[str]:
    return {one.reason for one in client.volume_health(volume_id).health_statuses}


def test_images_that_differ_are_overwritten_only_on_request(
    client: Client, fake: FakeHost, service: Service
) -> None:
    """Neither an older client, which does not know the field, nor `repair = "auto"` asks for it."""
    volume = make(client, "a", "auto")
    made = fake.lvm2.groups["data"].volumes["vol-a"]
    made.health = "mismatches exist"
    with expect.code("FAILED_PRECONDITION", "8 sectors", "backup", "`carver volume repair`"):
        client.repair(volume)
    with expect.code("FAILED_PRECONDITION", "differing_images"):
        client.repair(volume, pool_metadata=True)
    for now in (0, 600, 1200):
        service.auto_repair.step(now)
    assert made.health
    repaired(client, volume, differing_images=True)
    assert not made.health


def pool_of(fake: FakeHost) -> FakePool:
    found = fake.lvm2.groups["data"].volumes["pool-thin"]
    assert isinstance(found, FakePool)
    return found


def test_pool_metadata_are_rewritten_only_on_request(client: Client, fake: FakeHost) -> None:
    volume = make(client, "a", "thin")
    make(client, "b", "thin")
    pool = pool_of(fake)
    pool.damaged, pool.mode = True, "fail"
    with expect.code("FAILED_PRECONDITION", "vol-a, vol-b", "--pool-metadata"):
        client.repair(volume)
    assert pool.damaged
    [message] = repaired(client, volume, pool_metadata=True)
    assert "pool-thin_meta0" in message
    assert (pool.damaged, pool.mode, pool.active) == (False, "rw", True)
    assert client.repair(volume)[0]


def test_a_pool_that_cannot_be_activated_counts_as_damaged(client: Client, fake: FakeHost) -> None:
    volume = make(client, "a", "thin")
    fake.deactivate("data", "vol-a")
    fake.deactivate("data", "pool-thin")
    pool_of(fake).damaged = True
    with expect.code("FAILED_PRECONDITION", "Manual repair required"):
        client.repair(volume)
    repaired(client, volume, pool_metadata=True)


def test_a_pool_in_use_is_not_repaired(client: Client, fake: FakeHost, tmp_path: Path) -> None:
    volume = client.create("a", 4 * EXTENT, block(), parameters={"class": "thin"})
    client.stage(volume, tmp_path / "staging", block())
    client.publish(volume, tmp_path / "staging", tmp_path / "target", block())
    pool = pool_of(fake)
    pool.mode = "fail"
    with expect.code("FAILED_PRECONDITION", "vol-a", "target"):
        client.repair(volume.volume_id, pool_metadata=True)
    assert pool.active


def test_a_volume_is_repaired_automatically_after_the_delay_of_its_class(
    client: Client, fake: FakeHost, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    for name, device_class in (("a", "auto"), ("b", "raid"), ("c", "plain")):
        make(client, name, device_class)
    fake.lose_disk("data", 0)
    service.reports.fresh()
    volumes = fake.lvm2.groups["data"].volumes
    for now in (0, 300, 599):
        service.auto_repair.step(now)
        assert volumes["vol-a"].health == "partial"
    service.auto_repair.step(600)
    assert volumes["vol-a"].health == ""
    assert volumes["vol-b"].health == "partial"
    assert [one for one in caplog.messages if "vol-a" in one and "rebuilt" in one]


def test_a_disk_that_returns_in_time_begins_no_rebuild(
    client: Client, fake: FakeHost, service: Service
) -> None:
    make(client, "a", "auto")
    before = dict(fake.lvm2.groups["data"].volumes["vol-a"].extents)
    for now, lose in ((0, True), (500, False), (550, True), (1100, True)):
        (fake.lose_disk if lose else fake.bring_disk)("data", 0)
        service.reports.fresh()
        service.auto_repair.step(now)
    assert fake.lvm2.groups["data"].volumes["vol-a"].extents == before
    service.auto_repair.step(1150)
    assert fake.lvm2.groups["data"].volumes["vol-a"].extents != before


def test_an_automatic_repair_without_room_is_logged_once_and_retried(
    client: Client, fake: FakeHost, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    make(client, "a", "auto", 39)
    fake.lose_disk("data", 0)
    fake.lvm2.groups["data"].disks[2].allocatable = False
    service.reports.fresh()
    for now in range(0, 3000, 30):
        service.auto_repair.step(now)
    assert len([one for one in caplog.messages if "not repaired yet" in one]) == 1
    fake.lvm2.groups["data"].disks[2].allocatable = True
    service.auto_repair.step(3300)
    assert fake.lvm2.groups["data"].volumes["vol-a"].health == ""


def test_without_a_class_for_automatic_repair_nothing_runs(tmp_path: Path, fake: FakeHost) -> None:
    service = serving.start(configured.carver(tmp_path), fake)
    service.auto_repair.scans.start()
    assert not service.auto_repair.scans.is_alive
    service.stop()


def rates(fake: FakeHost) -> tuple[int | None, int | None]:
    """The maximum rate of recovery of `a`, and the bound that it has, in KiB a second."""
    found = report.read(fake.lvm).group("data").volume("vol-a").tuning
    return found.maximum_recovery_kib, found.bound_recovery_kib


@pytest.mark.parametrize("own", [0, 8192])
def test_a_repair_keeps_to_the_bound_that_the_volume_has(
    fake: FakeHost, config: Config, own: int
) -> None:
    bounded = replace(config, background_bandwidth=Reserve(size_bytes=4 * MIB))
    service = serving.start(bounded, fake)
    with Client(bounded.endpoint) as client:
        volume = make(client, "a", "raid")
        client.modify(volume, {"maximumRecoveryRate": f"{own}KiB"})
        fake.lose_disk("data", 0)
        repaired(client, volume)
    assert rates(fake) == (own, 4096)
    service.stop()


def test_a_volume_from_before_the_setting_is_bounded_once_its_lost_disk_is_replaced(
    fake: FakeHost, config: Config
) -> None:
    service = serving.start(config, fake)
    with Client(config.endpoint) as client:
        make(client, "a", "raid")
    service.stop()
    lost = fake.lvm2.groups["data"].disks[0].uuid
    fake.lose_disk("data", 0)
    bounded = replace(config, background_bandwidth=Reserve(size_bytes=4 * MIB))
    service, new = serving.start(bounded, fake), fake.new_device(61 * EXTENT)
    assert rates(fake) == (0, 0), "lvm2 changes no rates while a disk is missing"
    with Client(config.endpoint) as client:
        for _ in range(20):
            if client.replace_disk(lost, new)[0]:
                break
    assert rates(fake) == (0, 4096)
    service.stop()
