"""Two volume groups, one of which does not answer: calls on the other do not notice."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import configured
import expect
import grpc
import laying
import pytest
import serving
from changed_blocks import blocks
from csi_client import Client
from fakes.disks import FakeDisks
from fakes.host import FakeHost
from prometheus_client.parser import text_string_to_metric_families
from started import Started

from agent.csi.client import block, mounted, of_snapshot, of_volume
from agent.daemon import monitor, startup
from agent.daemon.node_metrics import Metrics
from agent.daemon.registration import Registration
from agent.daemon.server import Service
from agent.groups import volume_group
from agent.operations import diagnosis as conditions
from agent.operations import preflight
from agent.settings.classes import DeviceClass
from agent.settings.settings import BackingFile, Config, GroupDefinition
from agent.settings.values import Address
from agent.volumes.reports import MONITOR_AGE_SECONDS
from agent.work import locks
from lvm.layout import Reserve
from mount import command, loop
from mount import mount_errors as mount_errors
from mount.command import Result
from mount.kernel import Kernel
from proto import csi_pb2 as csi

MIB = 1 << 20
CALLS = 40
SICK, SOUND, SEALED = {"class": "sick"}, {"class": "sound"}, {"class": "sealed"}
KEY = {"passphrase": "correct horse battery staple"}
# As kubelet makes it: csi- and a SHA-256.
INLINE = f"csi-{'0123456789abcdef' * 4}"


class Trouble:
    """lvm2 hangs for all that has to do with group a, until it is let go."""

    def __init__(self, fake: FakeHost, *, ends_in_time: bool = False) -> None:
        self.asked, self.over = threading.Event(), threading.Event()
        self._ends_in_time = ends_in_time
        fake.lvm2.groups["a"].seqno += 1
        fake.intercept = self

    def __call__(self, words: Sequence[str]) -> Result | None:
        if words[0] != "lvm" or "/dev/fake-a-" not in " ".join(words) or self.over.is_set():
            return None
        self.asked.set()
        limit = command.remaining_seconds() if self._ends_in_time else None
        if not self.over.wait(30 if limit is None else limit):
            raise mount_errors.CommandTimedOut(tuple(words), limit or 30.0)
        return None


pytestmark = pytest.mark.groups(a=[200], b=[200])


def configuration(directory: Path, *classes: DeviceClass, **settings: Any) -> Config:
    address = Address("127.0.0.1", 0)
    return configured.carver(
        directory, kubelet_dir=("/",), classes=classes, metrics_address=address, **settings
    )


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return configuration(
        tmp_path,
        DeviceClass("sick", "a", default=True),
        DeviceClass("sound", "b"),
        DeviceClass("sealed", "b", encryption="luks2"),
        inline_total_limit=Reserve(percent=50),
    )


@pytest.fixture(autouse=True)
def well(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node without a problem that is not lvm2's."""
    monkeypatch.setattr(preflight, "QUICK_CHECKS", ())
    monkeypatch.setattr(preflight, "CHECKS", {})


@dataclass
class Bench:
    """A volume in each group, and callers of both."""

    client: Client
    config: Config
    fake: FakeHost
    callers: ThreadPoolExecutor
    directory: Path
    sick: csi.Volume
    sound: csi.Volume

    def forty(self, client: Client, first: int = 0) -> list[Future[Any]]:
        """Calls on the group that does not answer."""
        sick = self.sick.volume_id
        kinds: list[Callable[[int], object]] = [
            lambda number: client.create(f"new-{number}", 4 * MIB, block(), parameters=SICK),
            lambda _: client.capacity(SICK),
            lambda _: client.volume(sick),
            lambda number: client.delete(sick.replace("of-a", f"none-{number}")),
        ]
        every = range(first, first + CALLS)
        return [self.callers.submit(kinds[one % len(kinds)], one) for one in every]

    def further(self) -> list[Future[Any]]:
        """Calls on it that have to do with more than one volume, or with none by its id."""
        size, inline = {"size": "16Mi", "carver/class": "sick"}, self.client.publish_inline
        return [
            self.callers.submit(self.client.group_snapshot, "of-a", [self.sick.volume_id]),
            *(
                self.callers.submit(
                    inline, f"csi-{number:064x}", self.directory / str(number), size
                )
                for number in range(5)
            ),
        ]

    def whole_life(self) -> None:
        """Every call that needs one group only, on the sound one, and those that need none."""
        client, volume = self.client, self.sound
        staging, target = self.directory / "staging", self.directory / "target"
        client.stage(volume, staging, mounted("ext4"))
        client.publish(volume, staging, target, mounted("ext4"))
        assert client.stats(volume.volume_id, target).usage
        assert client.probe().ready.value
        assert monitor.healthz(self.config.endpoint)() == b"ok\n"
        assert client.capacity(SOUND).available_capacity
        made = client.create("another", 16 * MIB, block(), parameters=SOUND)
        snapshot = client.snapshot("nightly", made.volume_id)
        assert client.volume(made.volume_id).volume.capacity_bytes == 16 * MIB
        assert client.confirms(made.volume_id, block())
        assert client.snapshots(snapshot_id=snapshot.snapshot_id)
        assert client.snapshots(volume_id=made.volume_id)
        assert list(blocks(client, snapshot.snapshot_id)) == []
        for health in (client.volume_health, client.node_health):
            assert health(made.volume_id).volume_id == made.volume_id
        assert client.storage_health() is not None
        assert volume.volume_id not in [one.volume_id for one in client.unhealthy()]
        for source in (of_snapshot(snapshot.snapshot_id), of_volume(made.volume_id)):
            copy = client.create("copy", 16 * MIB, block(), parameters=SOUND, source=source)
            client.delete(copy.volume_id)
        client.delete_snapshot(snapshot.snapshot_id)
        client.expand(made.volume_id, 20 * MIB)
        client.modify(made.volume_id, {"carver/readAhead": "1MiB"})
        group_snapshot(client, [made.volume_id, volume.volume_id])
        client.delete(made.volume_id)
        inline(client, self.directory / "inline")
        replace_disk(client, self.fake)
        encrypted(client, self.directory / "encrypted")
        client.node_expand(volume.volume_id, target)
        client.unpublish(volume.volume_id, target)
        client.unstage(volume.volume_id, staging)
        client.delete(volume.volume_id)


@pytest.fixture
def bench(client: Client, config: Config, fake: FakeHost, tmp_path: Path) -> Iterator[Bench]:
    sick = client.create("of-a", 16 * MIB, block(), parameters=SICK)
    sound = client.create("of-b", 16 * MIB, mounted("ext4"), parameters=SOUND)
    with ThreadPoolExecutor(3 * CALLS) as callers:
        yield Bench(client, config, fake, callers, tmp_path, sick, sound)
        if isinstance(fake.intercept, Trouble):
            fake.intercept.over.set()


def code_of(call: Future[Any]) -> str:
    error = call.exception(60)
    assert error is None or isinstance(error, grpc.RpcError)
    return "OK" if error is None else error.code().name


def group_snapshot(client: Client, volume_ids: list[str]) -> None:
    """A group snapshot, and what may be asked of it."""
    taken = client.group_snapshot("hourly", volume_ids)
    assert taken == client.group_snapshot("hourly", volume_ids)
    identity, snapshots = taken.group_snapshot_id, [one.snapshot_id for one in taken.snapshots]
    assert client.find_group_snapshot(identity, snapshots) == taken
    for one in snapshots:
        assert list(blocks(client, one, one)) == []
    for _ in range(2):
        client.delete_group_snapshot(identity, snapshots)
    with expect.code("NOT_FOUND"):
        client.find_group_snapshot(identity, snapshots)


def inline(client: Client, target: Path) -> None:
    """The life of a volume that lives as long as its pod."""
    for _ in range(2):
        client.publish_inline(INLINE, target, {"size": "64Mi", "carver/class": "sound"})
    assert client.stats(INLINE, target).usage
    assert client.node_health(INLINE, target).volume_id == INLINE
    client.unpublish(INLINE, target)


def replace_disk(client: Client, fake: FakeHost) -> None:
    """A disk of the sound group gives way to another; once more finds it done."""
    new = fake.new_device(210 * 4 * MIB)
    expect.soon(lambda: client.replace_disk("/dev/fake-b-0", new)[0])
    assert client.replace_disk("/dev/fake-b-0", new)[0]
    assert [one.name for one in fake.lvm2.groups["b"].disks] == [new]


def encrypted(client: Client, staging: Path) -> None:
    """The life of an encrypted volume."""
    volume = client.create("sealed", 16 * MIB, mounted("ext4"), parameters=SEALED)
    for _ in range(2):
        client.stage(volume, staging, mounted("ext4"), KEY)
    assert client.stats(volume.volume_id, staging).usage
    client.expand(volume.volume_id, 20 * MIB)
    client.node_expand(volume.volume_id, staging, secrets=KEY)
    for _ in range(2):
        client.unstage(volume.volume_id, staging)
    client.delete(volume.volume_id)


@pytest.mark.parametrize("ends_in_time", [True, False], ids=["ends in time", "for ever"])
def test_forty_calls_on_a_group_whose_lvm2_hangs_leave_the_other_alone(
    bench: Bench, fake: FakeHost, ends_in_time: bool
) -> None:
    trouble = Trouble(fake, ends_in_time=ends_in_time)
    sick = bench.forty(bench.client) + bench.further()
    assert trouble.asked.wait(20)
    bench.whole_life()
    assert not any(one.done() for one in sick)
    assert "vol-of-b" not in fake.lvm2.groups["b"].volumes
    trouble.over.set()
    assert {code_of(one) for one in sick} == {"OK"}


def test_a_published_volume_of_a_group_that_hangs_can_be_unpublished(
    bench: Bench, client: Client, fake: FakeHost, tmp_path: Path
) -> None:
    staging, target = tmp_path / "staging", tmp_path / "target"
    volume = client.create("used", 16 * MIB, mounted("ext4"), parameters=SICK)
    client.stage(volume, staging, mounted("ext4"))
    client.publish(volume, staging, target, mounted("ext4"))
    trouble = Trouble(fake)
    sick = bench.forty(client)
    assert trouble.asked.wait(20)
    assert client.stats(volume.volume_id, target).usage
    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
    assert not any(one.done() for one in sick)
    trouble.over.set()
    wait(sick)


def test_a_group_snapshot_with_a_part_in_a_group_that_hangs_is_kept(
    bench: Bench, client: Client, fake: FakeHost
) -> None:
    taken = client.group_snapshot("hourly", [bench.sick.volume_id, bench.sound.volume_id])
    identity, snapshots = taken.group_snapshot_id, [one.snapshot_id for one in taken.snapshots]
    before = {name: set(group.volumes) for name, group in fake.lvm2.groups.items()}
    trouble = Trouble(fake, ends_in_time=True)
    with Client(bench.config.endpoint, timeout_seconds=2) as hasty:
        for call in (hasty.find_group_snapshot, hasty.delete_group_snapshot):
            with expect.code("DEADLINE_EXCEEDED"):
                call(identity, snapshots)
    assert {name: set(group.volumes) for name, group in fake.lvm2.groups.items()} == before
    trouble.over.set()
    assert client.find_group_snapshot(identity, snapshots) == taken
    with expect.code("ALREADY_EXISTS"):
        client.group_snapshot("hourly", [bench.sound.volume_id])
    client.delete_group_snapshot(identity, snapshots)


def test_calls_on_a_group_that_hangs_end_at_their_deadlines_and_hold_no_place(
    bench: Bench, client: Client, service: Service, fake: FakeHost
) -> None:
    trouble = Trouble(fake, ends_in_time=True)
    with Client(bench.config.endpoint, timeout_seconds=1.5) as hasty:
        sick = bench.forty(hasty)
        assert {code_of(one) for one in sick} <= {"DEADLINE_EXCEEDED", "UNAVAILABLE"}
    expect.soon(lambda: service.context.admission.slots.free_slots == locks.ADMISSION_SLOTS)
    trouble.over.set()
    assert client.volume(bench.sick.volume_id).volume.capacity_bytes == 16 * MIB
    assert client.capacity(SICK).available_capacity
    client.delete(bench.sick.volume_id)


def refused_beside(bench: Bench, calls: list[Future[Any]]) -> int:
    """How many of these calls are refused at once, while the other group serves all."""
    expect.soon(lambda: any(one.done() for one in calls))
    bench.whole_life()
    refused = [one for one in calls if one.done()]
    assert {code_of(one) for one in refused} == {"UNAVAILABLE"}
    return len(refused)


def test_however_many_calls_one_group_gets_others_find_a_place(
    bench: Bench, fake: FakeHost
) -> None:
    trouble = Trouble(fake)
    sick = [call for one in range(3) for call in bench.forty(bench.client, one * CALLS)]
    try:
        assert refused_beside(bench, sick) < len(sick)
    finally:
        trouble.over.set()
        wait(sick)


def test_volumes_staged_on_a_dead_disk_leave_places_to_the_other_group_s(
    bench: Bench,
    client: Client,
    service: Service,
    fake: FakeHost,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """mount(2) waits for the disk, and no time limit ends it."""
    service.context.admission.slots = locks.Slots(places := 8)
    names = [f"staged-{number}" for number in range(places)]
    sick = [client.create(one, 16 * MIB, mounted("ext4"), parameters=SICK) for one in names]
    over, real = threading.Event(), fake.kernel.mount

    def mount(device: str, *words: Any) -> None:
        assert "/a-" not in device or over.wait(60)
        real(device, *words)

    monkeypatch.setattr(fake.kernel, "mount", mount)
    calls = [
        bench.callers.submit(client.stage, one, tmp_path / name, mounted("ext4"))
        for name, one in zip(names, sick, strict=True)
    ]
    try:
        assert refused_beside(bench, calls) == places // 4
    finally:
        over.set()
        wait(calls)


def test_a_group_whose_disks_hang_is_unavailable_at_once_and_the_other_serves(
    bench: Bench, client: Client, fake: FakeHost
) -> None:
    assert isinstance(fake.disks, FakeDisks)
    fake.disks.hanging.add("/dev/fake-a-0")
    sick = bench.forty(client)
    bench.whole_life()
    assert {code_of(one) for one in sick} == {"UNAVAILABLE"}
    with expect.code("UNAVAILABLE", "/dev/fake-a-0", "dmesg"):
        client.capacity(SICK)
    fake.disks.hanging.clear()
    assert client.capacity(SICK).available_capacity
    client.delete(bench.sick.volume_id)


def test_an_erase_that_hangs_delays_no_other_group_s(
    client: Client, service: Service, fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.eraser.grace_seconds = 0.1
    names = [f"of-a-{number}" for number in range(3)]
    doomed = [client.create(one, 4 * MIB, block(), parameters=SICK) for one in names]
    other = client.create("of-b", 4 * MIB, block(), parameters=SOUND)
    real, over = fake.kernel.zero_out, threading.Event()

    def zero_out(device: str, offset_bytes: int, length_bytes: int, **how: Any) -> None:
        assert "/b-" in device or over.wait(60)
        real(device, offset_bytes, length_bytes, **how)

    monkeypatch.setattr(fake.kernel, "zero_out", zero_out)
    for one in (*doomed, other):
        client.delete(one.volume_id)
    expect.soon(lambda: not fake.lvm2.groups["b"].volumes)
    assert len(fake.lvm2.groups["a"].volumes) == len(names)
    over.set()
    expect.soon(lambda: not fake.lvm2.groups["a"].volumes)


# Calls that read all groups


LISTS: dict[str, Callable[[Client], object]] = {
    "volumes": Client.volumes,
    "snapshots": Client.snapshots,
    "health": Client.unhealthy,
    "here": Client.volumes_here,
    "capacity": lambda client: client.capacity(parameters=SOUND),
}


@pytest.mark.parametrize("kind", LISTS)
def test_a_list_waits_three_seconds_for_groups_that_hang_and_has_their_cached_state(
    bench: Bench, client: Client, fake: FakeHost, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind != "volumes":
        # The same wait: once as long as it is.
        monkeypatch.setattr(volume_group, "_SHORT_WAIT_SECONDS", 0.3)
    before = LISTS[kind](client)
    Trouble(fake)
    began = time.monotonic()
    assert LISTS[kind](client) == before
    assert time.monotonic() - began < 4.5


@pytest.mark.usefixtures("bench")
@pytest.mark.parametrize("kind", ["volumes", "snapshots"])
def test_a_list_that_would_lack_a_group_is_unavailable_and_names_the_group(
    client: Client, service: Service, fake: FakeHost, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(volume_group, "_SHORT_WAIT_SECONDS", 0.1)
    group = service.volume_groups._volume_groups["a"]
    group.cached, group.status_seconds = None, 0.0
    Trouble(fake)
    with expect.code("UNAVAILABLE", "volume group a"):
        LISTS[kind](client)


def forget(service: Service, group: str) -> None:
    """As after a start at which the group has not answered yet."""
    found = service.volume_groups._volume_groups[group]
    found.cached, found.last_seen, found.status_seconds = None, None, 0.0


@pytest.mark.parametrize("is_read", [True, False], ids=["read before", "never read"])
def test_volumes_of_a_group_whose_lvm2_hangs_are_listed_and_no_list_waits_for_it(
    bench: Bench,
    client: Client,
    service: Service,
    fake: FakeHost,
    monkeypatch: pytest.MonkeyPatch,
    is_read: bool,
) -> None:
    monkeypatch.setattr(volume_group, "_SHORT_WAIT_SECONDS", 0.1)
    monkeypatch.setattr(conditions, "SILENT_SECONDS", 0.5)
    fake.lvm2.groups["b"].volumes["vol-of-b"].health = "partial"
    fake.lvm2.groups["b"].seqno += 1
    service.reports.fresh()
    if not is_read:
        forget(service, "a")
    trouble = Trouble(fake)
    refreshing = service.volume_groups._volume_groups["a"].refresh()
    expect.soon(lambda: len(client.unhealthy()) == 2)
    began = time.monotonic()
    found = {one.volume_id: one for one in client.unhealthy()}
    assert time.monotonic() - began < 5
    [silent] = found[bench.sick.volume_id].health_statuses
    assert (silent.status, silent.reason) == (csi.DEGRADED, "LvmNotAnswering")
    assert "volume group a" in silent.message
    assert [one.reason for one in found[bench.sound.volume_id].health_statuses] == ["DiskMissing"]
    if is_read:
        for one in (client.volume_health, client.node_health):
            [said] = one(bench.sick.volume_id).health_statuses
            assert said.reason == "LvmNotAnswering"
    assert "LvmNotAnswering" in [one.reason for one in client.storage_health()]
    assert not refreshing.done()
    trouble.over.set()
    expect.soon(lambda: [one.volume_id for one in client.unhealthy()] == [bench.sound.volume_id])
    assert not client.volume_health(bench.sick.volume_id).health_statuses


def test_a_group_that_answers_with_an_error_is_not_silent(
    bench: Bench, client: Client, service: Service, fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conditions, "SILENT_SECONDS", 0.0001)
    fake.lvm2.groups["a"].seqno += 1
    fake.intercept = lambda _words: Result(5, "", "  a lock file cannot be written\n")
    with expect.code("INTERNAL"):
        client.capacity(SICK)
    assert client.unhealthy() == []
    assert not service.volume_groups._volume_groups["a"].silent_seconds


@pytest.mark.usefixtures("bench")
def test_a_list_of_health_without_any_group_is_unavailable(
    client: Client, service: Service, fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume_group, "_SHORT_WAIT_SECONDS", 0.1)
    assert isinstance(fake.disks, FakeDisks)
    fake.disks.hanging |= {"/dev/fake-a-0", "/dev/fake-b-0"}
    for one in service.volume_groups:
        forget(service, one.name)
        one.metadata.is_outdated = True
        one.metadata.forget()
    with expect.code("UNAVAILABLE", "/dev/fake-a-0"):
        client.unhealthy()


@pytest.mark.usefixtures("bench")
def test_a_disk_that_may_be_of_a_group_never_read_is_not_called_replaced(
    client: Client, service: Service, fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume_group, "_SHORT_WAIT_SECONDS", 0.1)
    group = service.volume_groups._volume_groups["a"]
    group.cached, group.status_seconds = None, 0.0
    trouble = Trouble(fake)
    # By mistake the new one is a disk of the other group.
    with expect.code("UNAVAILABLE", "volume group a"):
        client.replace_disk("/dev/fake-a-0", "/dev/fake-b-0")
    trouble.over.set()


def test_a_list_never_lacks_a_volume_created_just_before_its_group_hung(
    client: Client, fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume_group, "_SHORT_WAIT_SECONDS", 0.1)
    assert client.volumes() == []
    trouble: list[Trouble] = []

    def hang_after_creation(words: Sequence[str]) -> Result | None:
        if words[1] != "lvcreate":
            return None
        ended = fake.lvm2(words)
        trouble.append(Trouble(fake))
        return ended

    fake.intercept = hang_after_creation
    made = client.create("of-a", 16 * MIB, block(), parameters=SICK)
    with expect.code("UNAVAILABLE", "volume group a"):
        client.volumes()
    trouble[0].over.set()
    expect.soon(lambda: succeeds(client.volumes))
    assert [one.volume_id for one in client.volumes()] == [made.volume_id]


def succeeds(call: Callable[[], object]) -> bool:
    try:
        return bool(call())
    except grpc.RpcError:
        return False


def scraped(service: Service, config: Config, directory: Path) -> dict[tuple[str, ...], float]:
    metrics = Metrics()
    metrics.watch(service, Registration(directory / "registry", config.endpoint))
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


@pytest.mark.parametrize("hangs", ["a", "a and b"])
def test_metrics_and_readiness_while_disks_hang(
    service: Service, config: Config, fake: FakeHost, tmp_path: Path, hangs: str
) -> None:
    assert isinstance(fake.disks, FakeDisks)
    fake.disks.hanging |= {f"/dev/fake-{one}-0" for one in hangs.split(" and ")}
    for one in service.volume_groups:
        one.metadata.is_outdated = True
        one.tried_seconds = 1.0
    found = scraped(service, config, tmp_path)
    if hangs == "a":
        assert found["carver_lvm_up",] == 1
        assert found["carver_group_present", "b"] == 1
        service.readiness._reports.seen(MONITOR_AGE_SECONDS)
    else:
        assert found["carver_lvm_up",] == 0


# The start


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that did not answer are retried at once."""
    monkeypatch.setattr(startup, "_OTHERS_SECONDS", 0.2)
    monkeypatch.setattr(startup, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(startup, "_SOON_SECONDS", 0.01)


@pytest.fixture
def left(config: Config, fake: FakeHost) -> tuple[str, str]:
    """In each group a volume whose erase an earlier process left."""
    running = serving.start(config, fake)
    with Client(config.endpoint) as client:
        for one in (SICK, SOUND):
            client.create(f"deleted-{one['class']}", 16 * MIB, block(), parameters=one)
    running.stop()
    names = ("vol-deleted-sick", "vol-deleted-sound")
    for group, name in zip("ab", names, strict=True):
        volume = fake.lvm2.groups[group].volumes[name]
        volume.tags = {one.replace("state=ready", "state=wiping") for one in volume.tags}
    return names


def hang(fake: FakeHost) -> Callable[[], object]:
    return Trouble(fake).over.set


def silence(fake: FakeHost) -> Callable[[], object]:
    assert isinstance(fake.disks, FakeDisks)
    fake.disks.hanging.add("/dev/fake-a-0")
    return fake.disks.hanging.clear


def take(fake: FakeHost) -> Callable[[], object]:
    fake.deactivate("a", "vol-deleted-sick")
    group = fake.lvm2.groups.pop("a")
    return lambda: fake.lvm2.groups.setdefault("a", group)


def double(fake: FakeHost) -> Callable[[], object]:
    """Another group of the name, as well proved."""
    fake.deactivate("a", "vol-deleted-sick")
    twin = fake.lvm2.add_group("twin", [10])
    twin.name = "a"
    twin.tags.add("carver.made=yes")
    return lambda: fake.lvm2.groups.pop("twin", None)


@contextmanager
def started(
    config: Config, fake: FakeHost, monkeypatch: pytest.MonkeyPatch, mend: Callable[[], object]
) -> Iterator[Client]:
    """A caller of a process that has recovered some groups; at its end all is mended."""
    running = Started(config, fake, monkeypatch)
    try:
        assert running.begun.wait(20)
        with Client(config.endpoint) as client:
            yield client
    finally:
        mend()
        running.end()


@pytest.mark.parametrize("trouble", [hang, silence, take, double])
def test_a_start_serves_the_groups_that_answer_and_recovers_the_others_later(
    config: Config,
    fake: FakeHost,
    left: tuple[str, str],
    soon: None,
    monkeypatch: pytest.MonkeyPatch,
    trouble: Callable[[FakeHost], Callable[[], object]],
) -> None:
    mend = trouble(fake)
    with started(config, fake, monkeypatch, mend) as client:
        assert client.probe().ready.value
        made = client.create("new", 16 * MIB, block(), parameters=SOUND)
        expect.soon(lambda: left[1] not in fake.lvm2.groups["b"].volumes)
        client.delete(made.volume_id)
        assert "a" not in fake.lvm2.groups or left[0] in fake.lvm2.groups["a"].volumes
        mend()
        expect.soon(lambda: left[0] not in fake.lvm2.groups["a"].volumes)
        assert client.create("of-a", 16 * MIB, block(), parameters=SICK).volume_id


@pytest.fixture
def created(tmp_path: Path) -> tuple[FakeHost, Config]:
    """Two groups that Carver made, each of a disk of its own, by an earlier process."""
    host = FakeHost(tmp_path)
    disks = [host.new_device(900 * MIB) for _ in range(2)]
    config = configuration(
        tmp_path,
        DeviceClass("sick", "a", default=True),
        DeviceClass("sound", "b"),
        definitions=(GroupDefinition("a", (disks[0],)), GroupDefinition("b", (disks[1],))),
    )
    _, laid = laying.lay(host, config)
    assert laid.failures == {}
    return host, config


class Unread:
    """lvm2 hangs whenever it looks at a disk, also where it looks at all."""

    def __init__(self, fake: FakeHost, disk: str) -> None:
        self.over = threading.Event()
        self._disk = disk
        fake.intercept = self

    def __call__(self, words: Sequence[str]) -> Result | None:
        is_seen = "--devices" not in words or self._disk in words[words.index("--devices") + 1]
        if words[0] == "lvm" and words[1:2] != ("version",) and is_seen:
            self.over.wait(30)
        return None


@pytest.mark.parametrize("silent", [False, True], ids=["lvm2 hangs", "the disk does not answer"])
def test_a_group_created_by_carver_whose_disk_hangs_at_the_start_delays_no_other(
    created: tuple[FakeHost, Config], soon: None, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    fake, config = created
    sick = config.definitions[0].devices[0]
    trouble = Unread(fake, sick)
    assert isinstance(fake.disks, FakeDisks)
    if silent:
        fake.disks.hanging.add(sick)
    with started(config, fake, monkeypatch, trouble.over.set) as client:
        assert client.probe().ready.value
        assert client.capacity(SOUND).available_capacity
        client.delete(client.create("of-b", 16 * MIB, block(), parameters=SOUND).volume_id)
        fake.disks.hanging.clear()
        trouble.over.set()
        expect.soon(lambda: client.create("of-a", 16 * MIB, block(), parameters=SICK) is not None)


def test_a_group_that_is_not_attached_yet_is_awaited_and_not_absent(
    tmp_path: Path, fake: FakeHost, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a boot its file has no loop device: its volumes are not gone, and no class is empty."""
    attached = threading.Event()
    real = loop.attach

    def attach(kernel: Kernel, path: str) -> str:
        assert attached.wait(30)
        return real(kernel, path)

    monkeypatch.setattr(loop, "attach", attach)
    config = configuration(
        tmp_path,
        DeviceClass("sick", "file", default=True),
        DeviceClass("sound", "b"),
        definitions=(GroupDefinition("file", file=BackingFile(tmp_path / "file", 64 * MIB)),),
    )
    with started(config, fake, monkeypatch, attached.set) as client:
        assert client.capacity(SOUND).available_capacity
        for call in (
            lambda: client.create("new", 4 * MIB, block(), parameters=SICK),
            lambda: client.delete("file@00000000/vol-pvc-1"),
            client.volumes,
        ):
            with expect.code("UNAVAILABLE", "call again"):
                call()
        attached.set()
        expect.soon(lambda: succeeds(lambda: client.capacity(SICK).available_capacity))


def test_an_erase_goes_on_when_its_group_is_back(
    config: Config, fake: FakeHost, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(config, fake, monkeypatch, lambda: None) as client:
        client.create("deleted-sick", 16 * MIB, block(), parameters=SICK)
        volume = fake.lvm2.groups["a"].volumes["vol-deleted-sick"]
        bring = take(fake)
        with expect.code("RESOURCE_EXHAUSTED"):
            client.create("new", 16 * MIB, block(), parameters=SICK)
        volume.tags = {one.replace("state=ready", "state=wiping") for one in volume.tags}
        bring()
        expect.soon(lambda: not fake.lvm2.groups["a"].volumes)
