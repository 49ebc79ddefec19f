"""By which of the kernel's ways deleted data are erased, and what is done where a device lies."""

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import configured
import expect
import pytest
import serving
from csi_client import Client
from fakes.devices import Media
from fakes.host import FakeHost
from fakes.lvm.records import FakeGroup, FakeVolume

from agent.csi.client import block, of_volume
from agent.daemon.server import Service
from agent.settings.classes import DeviceClass
from agent.settings.settings import WIPES
from agent.volumes.erase_policy import PROVED_BYTES, sample
from agent.work.pace import MOST_BYTES
from lvm.layout import Layout
from lvm.thin import Policy
from mount.block_io import By
from mount.stacks import Stack

MIB = 1 << 20
EXTENT = 4 * MIB
SIZE = 3 * MOST_BYTES
DISKS = [f"/dev/fake-data-{number}" for number in range(2)]
WHOLE = [(at, MOST_BYTES) for at in range(0, SIZE, MOST_BYTES)]

ZEROING = [name for name, one in WIPES.items() if one.zeroes]
DISCARDING = [name for name, one in WIPES.items() if one.discards]

CLASSES = (
    DeviceClass("plain", "data", default=True),
    DeviceClass("striped", "data", layout=Layout("striped", stripes=2)),
    DeviceClass("raid", "data", layout=Layout("raid1", mirrors=1)),
    DeviceClass("thin", "data", layout=Layout("thin"), pool=Policy()),
    DeviceClass("sealed", "data", encryption="luks2"),
    DeviceClass("zeroed", "data", zero="fully"),
)


class Node:
    """A node whose disks zero, and lie, as a test says; `asked` is what was asked of each."""

    def __init__(self, fake: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
        fake.lvm2.add_group("data", [200, 200])
        for path in DISKS:
            fake.block.add(path, 200 * EXTENT, major=8)
        self.host = fake
        self.asked: list[tuple[int, int, By]] = []
        self._real = fake.kernel.zero_out
        monkeypatch.setattr(fake.kernel, "zero_out", self._zero_out)

    def _zero_out(self, device: str, offset: int, length: int, **how: Any) -> None:
        self._real(device, offset, length, **how)
        self.asked.append((offset, length, how.get("method") or self.host.kernel.zeroing(device)))

    def disks(self, *, lies: Sequence[By] = (), doubt: str = "", zeroes: bool = True) -> None:
        for path in DISKS:
            disk = self.host.block.get(path)
            disk.lies, disk.stack = set(lies), Stack(has_write_zeroes=zeroes)
            disk.doubts = {path: doubt} if doubt else {}

    @contextmanager
    def served(self, wipe: str) -> Iterator[tuple[Service, Client]]:
        config = configured.carver(
            self.host.directory, kubelet_dir=("/",), classes=CLASSES, wipe=wipe
        )
        with serving.served(self.host, config) as running:
            yield running

    def written(self, client: Client, name: str, device_class: str = "plain") -> tuple[str, Media]:
        """A volume, and its medium, which has data in its first piece, its last, and between."""
        parameters = {"class": device_class}
        volume = client.create(name, SIZE, block(), parameters=parameters).volume_id
        media = self.host.lvm2.groups["data"].volumes[f"vol-{name}"].media
        for at in (0, 20 * MIB, MOST_BYTES, SIZE - 4096):
            media.write(at, b"secret".ljust(4096, b"\0"))
        self.asked.clear()
        return volume, media


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(FakeHost(tmp_path), monkeypatch)


def by(way: By) -> list[tuple[int, int, By]]:
    return [(*one, way) for one in WHOLE]


def test_a_hole_is_taken_where_the_device_zeroes(node: Node) -> None:
    with node.served("zero") as (_, client):
        volume, media = node.written(client, "a")
        client.delete(volume)
    assert node.asked == by(By.HOLE)
    assert not media.blocks


@pytest.mark.parametrize("device_class", ["plain", "raid"])
def test_a_device_that_does_not_zero_is_written_by_the_kernel(
    node: Node, device_class: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A RAID never zeroes by itself, whatever its disks do."""
    node.disks(zeroes=device_class == "raid")
    monkeypatch.setattr(node.host.kernel, "mark", None)
    with node.served("zero") as (_, client):
        volume, media = node.written(client, "a", device_class)
        client.delete(volume)
    assert node.asked == by(By.ZEROES)
    assert not media.blocks


def test_a_disk_that_lies_is_written_from_the_beginning_and_not_asked_again(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.disks(lies=[By.HOLE])
    with node.served("zero") as (_, client):
        volume, media = node.written(client, "a")
        client.delete(volume)
        assert node.asked == [(*WHOLE[0], By.HOLE), *by(By.WRITES)]
        assert not media.blocks

        volume, media = node.written(client, "b")
        client.delete(volume)
        assert node.asked == by(By.WRITES)
        assert not media.blocks
    said = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    [only] = said
    assert "/dev/fake-data-0" in only
    assert "write zeroes" in only


def test_a_disk_that_lies_further_on_is_found_in_the_end(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = node.host.kernel.zero_out

    def lie_later(device: str, offset: int, length: int, **how: Any) -> None:
        node.host.block.get(device).lies = {By.HOLE} if offset else set()
        real(device, offset, length, **how)

    monkeypatch.setattr(node.host.kernel, "zero_out", lie_later)
    with node.served("zero") as (_, client):
        volume, media = node.written(client, "a")
        client.delete(volume)
    assert node.asked == by(By.HOLE) + by(By.WRITES)
    assert not media.blocks


def looked_at(node: Node, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """In how many places a disk is looked at, each time from now on."""
    looks: list[int] = []
    real = node.host.kernel.mark

    def mark(device: str, offsets: Sequence[int], **how: Any) -> None:
        looks.append(len(offsets))
        real(device, offsets, **how)

    monkeypatch.setattr(node.host.kernel, "mark", mark)
    return looks


@pytest.mark.parametrize(
    ("wipe", "way", "then"),
    [("zero", By.HOLE, range(3, 4)), ("discard", By.DISCARD, range(21, 33))],
)
def test_disks_that_were_proved_to_zero_are_looked_at_in_fewer_places_and_still_found_out(
    node: Node, monkeypatch: pytest.MonkeyPatch, wipe: str, way: By, then: range
) -> None:
    """A disk may ignore some discards: it is looked at in as many places each time."""
    looks = looked_at(node, monkeypatch)
    with node.served(wipe) as (_, client):
        for name in ("a", "b"):
            volume, _ = node.written(client, name)
            client.delete(volume)
        assert looks[0] > 20
        assert looks[1] in then
        node.disks(lies=[By.DISCARD, By.HOLE])
        volume, media = node.written(client, "c")
        client.delete(volume)
    assert node.asked[0] == (*WHOLE[0], way)
    assert node.asked[-3:] == by(By.WRITES)
    assert not media.blocks


@pytest.mark.parametrize("first", ["deleted", "zeroed", "copied"])
def test_a_disk_is_proved_once_for_all_work(
    node: Node, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Whatever work saw a disk zero, other work looks at it in fewer places, or not at all."""
    looks: list[int] = []

    def zeroed(client: Client) -> None:
        client.create(f"zeroed-{len(looks)}", SIZE, block(), parameters={"class": "zeroed"})

    def copied(client: Client) -> None:
        client.create(f"copied-{len(looks)}", SIZE, block(), source=of_volume(source))

    def deleted(client: Client) -> None:
        volume, _ = node.written(client, f"deleted-{len(looks)}")
        client.delete(volume)

    works = {"deleted": deleted, "zeroed": zeroed, "copied": copied}
    with node.served("zero") as (_, client):
        source, _ = node.written(client, "source")
        looks = looked_at(node, monkeypatch)
        works.pop(first)(client)
        assert looks[0] > 10
        looks.clear()
        for work in works.values():
            work(client)
    assert all(count < 5 for count in looks)


def test_a_volume_that_was_never_written_shows_the_lie_too(node: Node) -> None:
    node.disks(lies=[By.HOLE])
    with node.served("zero") as (_, client):
        volume = client.create("a", SIZE, block()).volume_id
        client.delete(volume)
    assert node.asked == [(*WHOLE[0], By.HOLE), *by(By.WRITES)]


def test_a_block_that_cannot_be_read_back_counts_as_data(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node.served("zero") as (_, client):
        volume, _ = node.written(client, "a")
        monkeypatch.setattr(node.host.kernel, "are_zero", lambda *_: False)
        client.delete(volume)
    assert node.asked == [(*WHOLE[0], By.HOLE), *by(By.WRITES)]


@pytest.mark.parametrize("device_class", ["plain", "striped"])
@pytest.mark.parametrize(
    ("wipe", "doubt"),
    [("discard", ""), ("discard-unguaranteed", ""), ("discard-unguaranteed", "it is a guess")],
)
def test_plain_volumes_are_discarded_where_the_setting_says_so(
    node: Node, wipe: str, doubt: str, device_class: str
) -> None:
    node.disks(doubt=doubt)
    with node.served(wipe) as (_, client):
        volume, media = node.written(client, "a", device_class)
        client.delete(volume)
    assert node.asked == by(By.DISCARD)
    assert not media.blocks


def test_without_certain_zeroes_nothing_is_discarded_and_the_reason_is_said_once(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.disks(doubt="it is a guess")
    with node.served("discard") as (_, client):
        for name in ("a", "b"):
            volume, media = node.written(client, name)
            client.delete(volume)
            assert node.asked == by(By.HOLE)
            assert not media.blocks
    said = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert said == ["deleted data on /dev/fake-data-0 is zeroed, not discarded: it is a guess"]


@pytest.mark.parametrize("wipe", DISCARDING)
@pytest.mark.parametrize(
    ("lies", "ways"),
    [
        ([By.DISCARD], [(*WHOLE[0], By.DISCARD), *by(By.HOLE)]),
        (
            [By.DISCARD, By.HOLE],
            [(*WHOLE[0], By.DISCARD), (*WHOLE[0], By.HOLE), *by(By.WRITES)],
        ),
    ],
)
def test_what_a_discard_leaves_is_zeroed(
    node: Node, wipe: str, lies: Sequence[By], ways: Sequence[object]
) -> None:
    node.disks(lies=lies)
    with node.served(wipe) as (_, client):
        volume, media = node.written(client, "a")
        client.delete(volume)
    assert node.asked == ways
    assert not media.blocks


@pytest.mark.parametrize("wipe", DISCARDING)
@pytest.mark.parametrize("device_class", ["raid", "sealed"])
def test_raid_and_encrypted_volumes_are_not_discarded(
    node: Node, wipe: str, device_class: str
) -> None:
    with node.served(wipe) as (_, client):
        volume, media = node.written(client, "a", device_class)
        client.delete(volume)
    assert By.DISCARD not in {way for *_, way in node.asked}
    assert not media.blocks


@pytest.mark.parametrize("wipe", ZEROING)
def test_a_pool_is_zeroed_through_a_volume_never_discarded(node: Node, wipe: str) -> None:
    """A thin volume that is discarded reads as zeroes, and its pool's extents keep the data."""
    node.disks(lies=[By.HOLE, By.DISCARD])
    with node.served(wipe) as (service, client):
        parameters = {"class": "thin"}
        client.delete(client.create("a", 4 * MIB, block(), parameters=parameters).volume_id)
        service.pool_remover.remove_if_empty("data", "pool-thin").result(20)
        expect.soon(lambda: not node.host.lvm2.groups["data"].volumes)
    assert {way for *_, way in node.asked} == {By.ZEROES}


@pytest.mark.parametrize(
    ("wipe", "ways"), [("zero", [By.HOLE, By.WRITES]), ("discard", [By.DISCARD, By.HOLE])]
)
def test_free_extents_that_are_marked_are_erased_likewise(
    node: Node, wipe: str, ways: Sequence[By]
) -> None:
    node.disks(lies=ways[:1])
    with node.served(wipe) as (service, client):
        node.host.lvm("vgchange", "--addtag", "carver.sweep=yes", "--", "data")
        service.freed_eraser.start("data").result(20)
        assert client.volumes() == []
    first, *rest = node.asked
    assert first == (*WHOLE[0], ways[0])
    assert {way for *_, way in rest} == {ways[1]}
    assert sum(length for _, length, _ in rest) == 400 * EXTENT


def test_a_new_volume_that_must_be_zero_is_never_discarded(node: Node) -> None:
    node.disks(lies=[By.HOLE])
    with node.served("discard-unguaranteed") as (_, client):
        client.create("a", SIZE, block(), parameters={"class": "zeroed"})
    assert node.asked == [(*WHOLE[0], By.HOLE), *by(By.WRITES)]


@pytest.mark.parametrize("wipe", ["zero", "discard-unguaranteed"])
def test_a_copy_has_zeroes_where_its_source_has_also_on_a_disk_that_lies(
    node: Node, wipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is free has data of someone else's."""
    node.disks(lies=[By.HOLE])
    activate = node.host.lvm2._activate_one

    def activate_used(group: FakeGroup, volume: FakeVolume) -> None:
        if volume.name.endswith("copied") and not volume.media.blocks:
            volume.media.write(20 * MIB, b"of someone else's".ljust(4096, b"\0"))
        activate(group, volume)

    monkeypatch.setattr(node.host.lvm2, "_activate_one", activate_used)
    with node.served(wipe) as (_, client):
        source = client.create("source", SIZE, block()).volume_id
        media = node.host.lvm2.groups["data"].volumes["vol-source"].media
        media.write(0, b"its own".ljust(4096, b"\0"))
        client.create("copied", SIZE, block(), source=of_volume(source))
        copied = node.host.lvm2.groups["data"].volumes["vol-copied"].media
        assert copied.blocks == media.blocks
    assert node.asked[0] == (0, PROVED_BYTES, By.HOLE)
    assert (0, PROVED_BYTES, By.HOLE) not in node.asked[1:]


@pytest.mark.parametrize("wipe", ["zero", "discard-unguaranteed"])
def test_the_header_of_an_encrypted_volume_is_written_where_a_disk_lies(
    node: Node, wipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.disks(lies=[By.HOLE])
    with node.served(wipe) as (_, client):
        volume, media = node.written(client, "a", "sealed")
        client.delete(volume)
        (_, length, _) = node.asked[0]
        assert node.asked[:2] == [(0, length, By.HOLE), (0, length, By.WRITES)]
    assert not media.blocks


@pytest.mark.parametrize("blocks", [0, 1, 2, 15, 16, 17, 1000, 1 << 28])
@pytest.mark.parametrize("rest", [0, 512])
def test_a_sample_has_the_first_block_and_the_last_and_16_at_most(blocks: int, rest: int) -> None:
    begin = 64 * MIB
    found = sample(begin, begin + blocks * 4096 + rest)
    assert len(found) == len(set(found)) == min(blocks, 16)
    assert list(found) == sorted(found)
    if blocks:
        assert (found[0], found[-1]) == (begin, begin + (blocks - 1) * 4096)
    assert all(not one % 4096 for one in found)
    gaps = {later - one for one, later in itertools.pairwise(found)}
    assert not gaps or max(gaps) - min(gaps) <= 4096
