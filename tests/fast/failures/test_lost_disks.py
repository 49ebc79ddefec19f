"""Volumes with a part that cannot be erased: kept, given up, or erased later."""

import errno
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import configured
import expect
import in_background
import pytest
import serving
from fakes.host import FakeHost
from fakes.lvm import FakeGroup, FakeVolume

from agent.csi.client import Client, block
from agent.daemon.server import Service
from agent.settings.classes import DeviceClass
from agent.volumes import records
from lvm import report
from lvm.layout import Layout
from mount.command import Result

MIB = 1 << 20
EXTENT = 4 * MIB
SIZE = 40 * EXTENT
MARKER = b"a secret".ljust(4096, b"!")
pytestmark = [
    pytest.mark.usefixtures("waiting_eraser"),
    pytest.mark.groups(data=[30, 60, 60]),
    pytest.mark.settings(
        classes=(
            configured.PLAIN,
            configured.RAID,
            DeviceClass("raid3", "data", layout=Layout("raid1", mirrors=2)),
            configured.STRIPED,
        )
    ),
]


@dataclass
class Node:
    """A volume with data at its start and end, on disks that are lost."""

    client: Client
    service: Service
    fake: FakeHost

    @property
    def group(self) -> FakeGroup:
        return self.fake.lvm2.groups["data"]

    @property
    def names(self) -> set[str]:
        return set(self.group.volumes)

    def create(self, device_class: str = "plain", size_bytes: int = SIZE) -> None:
        """A plain one has 30 extents on the first disk, and 10 on the second."""
        parameters = {"class": device_class}
        self.volume = self.client.create("pvc-1", size_bytes, block(), parameters=parameters)
        for offset in (0, size_bytes - len(MARKER)):
            self.fake.write_bytes("/dev/mapper/data-vol--pvc--1", offset, MARKER)

    def lose(self, number: int = 0) -> None:
        self.fake.lose_disk("data", number)

    def give_up(self) -> None:
        self.fake.lvm("lvchange", "--addtag", "carver.givenUp=yes", "--", "data/vol-pvc-1")

    def delete(self) -> None:
        self.client.delete(self.volume.volume_id)

    def wait(self) -> None:
        """Wait until no erase is under way."""
        in_background.ended(self.service.eraser.jobs)

    def retry(self) -> None:
        """Retry a failed erase, and wait for its end."""
        self.wait()
        self.service.reports.fresh()
        jobs = self.service.eraser.jobs
        in_background.again(jobs)
        self.wait()

    def is_erased(self) -> bool:
        return not self.names and MARKER not in self.fake.freed_bytes("data")


@pytest.fixture
def node(client: Client, service: Service, fake: FakeHost) -> Node:
    return Node(client, service, fake)


@pytest.fixture
def dead(fake: FakeHost) -> threading.Event:
    """While this is set, a failed image is not brought back by a refresh."""
    is_dead = threading.Event()
    is_dead.set()

    def intercept(words: Sequence[str]) -> Result | None:
        return Result(0, "", "") if "--refresh" in words and is_dead.is_set() else None

    fake.intercept = intercept
    return is_dead


def test_a_volume_on_a_missing_disk_is_deleted_and_stays_on_record(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.create()
    node.lose()
    node.delete()
    assert node.client.volumes() == []
    assert "carver.state=wiping" in node.group.volumes["vol-pvc-1"].tags
    for _ in range(2):
        node.retry()
    assert node.names == {"vol-pvc-1"}
    [logged] = [one for one in caplog.messages if "missing disk" in one]
    assert node.group.disks[0].uuid in logged
    assert "lvchange --addtag carver.givenUp=yes data/vol-pvc-1" in logged
    node.delete()
    assert node.names == {"vol-pvc-1"}


def test_an_erase_goes_on_when_the_disk_is_back(node: Node) -> None:
    node.create()
    node.lose()
    node.delete()
    node.fake.bring_disk("data", 0)
    node.retry()
    assert node.is_erased()


def test_the_cost_of_retrying_an_erase_does_not_grow_with_their_number(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, number = node.group, 100
    for name in (f"vol-{one}" for one in range(number)):
        own_tags = {f"carver.name={name}", "carver.state=wiping"}
        group.volumes[name] = FakeVolume(
            name, f"{len(group.volumes)}-0", {group.disks[0].name: 1}, own_tags
        )
    group.disks[0].extents = number
    node.lose()
    assert in_background.look(node.service, node.service.eraser.jobs) == number
    node.wait()
    made, make, read = Counter[str](), records._as_volume, node.service.reports.fresh

    def counted(*words: Any) -> records.Volume:
        made["volumes"] += 1
        return make(*words)

    def fresh(*groups: str) -> report.Report:
        made["reads"] += 1
        return read(*groups)

    monkeypatch.setattr(node.service.reports, "fresh", fresh)
    monkeypatch.setattr(records, "_as_volume", counted)
    jobs = node.service.eraser.jobs
    in_background.again(jobs)
    node.wait()
    assert len(jobs.unfinished()) == number
    assert made["volumes"] <= 5 * number
    assert made["reads"] <= 10


@pytest.mark.parametrize("is_deleted_first", [True, False])
def test_the_reachable_part_of_a_given_up_volume_is_erased(
    node: Node, caplog: pytest.LogCaptureFixture, is_deleted_first: bool
) -> None:
    node.create()
    media = node.group.volumes["vol-pvc-1"].media
    node.lose()
    if is_deleted_first:
        node.delete()
        node.give_up()
        node.retry()
    else:
        node.give_up()
        node.delete()
        node.wait()
    assert node.names == set()
    assert list(media.blocks) == [0], "on the lost disk"
    uuid = node.group.disks[0].uuid
    assert [one for one in caplog.messages if "was not overwritten" in one and uuid in one]


def test_a_failed_image_is_refreshed_before_it_is_erased(node: Node) -> None:
    node.create("raid", 4 * EXTENT)
    node.fake.fail_image("data", "vol-pvc-1", 2)
    node.delete()
    assert node.is_erased()


def test_a_volume_with_an_image_that_stays_dead_is_kept(node: Node, dead: threading.Event) -> None:
    node.create("raid", 4 * EXTENT)
    node.fake.fail_image("data", "vol-pvc-1", 2)
    with expect.code("FAILED_PRECONDITION", "images", "AD"):
        node.delete()
    assert node.names == {"vol-pvc-1"}
    dead.clear()
    node.delete()
    assert MARKER not in node.fake.freed_bytes("data")


def test_a_raid_with_an_image_on_a_missing_disk_is_kept_until_it_is_given_up(node: Node) -> None:
    node.create("raid", 4 * EXTENT)
    node.lose(2)
    node.delete()
    assert node.names == {"vol-pvc-1"}
    node.give_up()
    node.retry()
    assert node.names == set()


def test_a_disk_that_is_there_and_fails_is_not_given_up_with_a_lost_one(
    node: Node, fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero_out = fake.kernel.zero_out

    def refuse(device: str, offset: int, length: int, **how: Any) -> None:
        if offset <= SIZE - EXTENT < offset + length:
            raise OSError(errno.EIO, "I/O error", device)
        zero_out(device, offset, length, **how)

    node.create()
    node.lose()
    node.give_up()
    with monkeypatch.context() as failing:
        failing.setattr(fake.kernel, "zero_out", refuse)
        node.delete()
        node.retry()
        assert node.names == {"vol-pvc-1"}
    media = node.group.volumes["vol-pvc-1"].media
    node.retry()
    assert node.names == set()
    assert list(media.blocks) == [0], "on the lost disk"


def test_a_volume_striped_over_a_lost_disk_is_erased_with_all_free_extents(node: Node) -> None:
    node.create("striped")
    node.lose(1)
    node.give_up()
    node.delete()
    node.wait()
    assert node.names == set()
    assert node.group.tags == {"carver.sweep=yes"}


def test_a_failed_image_is_not_given_up_with_a_lost_disk(node: Node, dead: threading.Event) -> None:
    node.create("raid3", 4 * EXTENT)
    node.lose()
    node.give_up()
    node.fake.fail_image("data", "vol-pvc-1", 1)
    node.delete()
    node.retry()
    assert node.names == {"vol-pvc-1"}
    dead.clear()
    node.retry()
    assert node.is_erased()


def test_a_given_up_part_is_erased_when_its_disk_comes_back(node: Node) -> None:
    node.create()
    node.lose()
    node.give_up()
    node.delete()
    node.wait()
    assert node.group.tags == {f"carver.sweepDisks={node.group.disks[0].uuid}"}
    node.fake.bring_disk("data", 0)
    serving.again(node.service)
    assert (node.group.tags, node.names) == (set(), set())
    assert sum(end - start for start, end in node.group.swept) == 30 * EXTENT
