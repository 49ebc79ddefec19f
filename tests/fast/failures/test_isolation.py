"""Two volume groups, one of which does not answer: nobody notices who has to do with the other."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
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

from agent.core import volume_group
from agent.core.classes import DeviceClass
from agent.core.inventory import MONITOR_AGE_SECONDS
from agent.core.settings import BackingFile, Config, GroupDefinition
from agent.core.values import Address
from agent.csi.client import block, mounted, of_snapshot, of_volume
from agent.daemon import monitor, startup
from agent.daemon.metrics import Metrics
from agent.daemon.registration import Registration
from agent.daemon.server import Service
from agent.operations import preflight
from lvm.layout import Reserve
from mount import command, loop
from mount import errors as mount_errors
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
    """lvm2 hangs for all that has to do with one group, until it is let go."""

    def __init__(self, fake: FakeHost, *, ends_in_time: bool) -> None:
        self.asked, self.over = threading.Event(), threading.Event()
        self._ends_in_time = ends_in_time
        fake.intercept = self

    def __call__(self, words: Sequence[str]) -> Result | None:
        if words[0] != "lvm" or "/dev/fake-a-0" not in " ".join(words) or self.over.is_set():
            return None
        self.asked.set()
        limit = command.remaining_seconds() if self._ends_in_time else None
        if not self.over.wait(30 if limit is None else limit):
            raise mount_errors.CommandTimedOut(tuple(words), limit or 30.0)
        return None


@pytest.fixture
def fake(tmp_path: Path) -> FakeHost:
    host = FakeHost(tmp_path)
    host.lvm2.add_group("a", [200])
    host.lvm2.add_group("b", [200])
    return host


@pytest.fixture
def config(tmp_path: Path) -> Config:
    classes = (
        DeviceClass("sick", "a", default=True),
        DeviceClass("sound", "b"),
        DeviceClass("sealed", "b", encryption="luks2"),
    )
    return configured.carver(
        tmp_path,
        kubelet_dir=("/",),
        classes=classes,
        metrics_address=Address("127.0.0.1", 0),
        inline_total_limit=Reserve(percent=50),
    )


@pytest.fixture(autouse=True)
def well(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node on which all is well that lvm2 is not asked about."""
    monkeypatch.setattr(preflight, "CHEAP", ())
    monkeypatch.setattr(preflight, "CHECKS", {})


@pytest.fixture
def of_both(client: Client) -> tuple[csi.Volume, csi.Volume]:
    """A volume in each group."""
    return client.create("of-a", 16 * MIB, block(), parameters=SICK), client.create(
        "of-b", 16 * MIB, mounted("ext4"), parameters=SOUND
    )


@pytest.fixture
def callers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2 * CALLS) as pool:
        yield pool


def forty(
    callers: ThreadPoolExecutor, client: Client, volume: csi.Volume, first: int = 0
) -> list[Future[Any]]:
    """Calls on the group that does not answer."""
    kinds: list[Callable[[int], object]] = [
        lambda number: client.create(f"new-{number}", 4 * MIB, block(), parameters=SICK),
        lambda _: client.capacity(SICK),
        lambda _: client.volume(volume.volume_id),
        lambda number: client.delete(volume.volume_id.replace("of-a", f"none-{number}")),
    ]
    return [callers.submit(kinds[one % len(kinds)], one) for one in range(first, first + CALLS)]


def further(
    callers: ThreadPoolExecutor, client: Client, volume: csi.Volume, place: Path
) -> list[Future[Any]]:
    """Calls on it that have to do with more than one volume, or with none by its id."""
    size = {"size": "16Mi", "carver/class": "sick"}
    return [
        callers.submit(client.group_snapshot, "of-a", [volume.volume_id]),
        *(
            callers.submit(client.publish_inline, f"csi-{number:064x}", place / str(number), size)
            for number in range(5)
        ),
    ]


def code_of(call: Future[Any]) -> str:
    error = call.exception(60)
    assert error is None or isinstance(error, grpc.RpcError)
    return "OK" if error is None else error.code().name


def moment(client: Client, volumes: list[csi.Volume]) -> None:
    """A group snapshot, and what may be asked of it."""
    taken = client.group_snapshot("hourly", [one.volume_id for one in volumes])
    assert taken == client.group_snapshot("hourly", [one.volume_id for one in volumes])
    identity, snapshots = taken.group_snapshot_id, [one.snapshot_id for one in taken.snapshots]
    assert client.find_group_snapshot(identity, snapshots) == taken
    for one in snapshots:
        assert list(blocks(client, one, one)) == []
    client.delete_group_snapshot(identity, snapshots)
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


def whole_life(client: Client, config: Config, volume: csi.Volume, place: Path) -> None:
    """Every call that needs one group only, on the one that answers, and those that need none."""
    staging, target = place / "staging", place / "target"
    client.stage(volume, staging, mounted("ext4"))
    client.publish(volume, staging, target, mounted("ext4"))
    assert client.stats(volume.volume_id, target).usage
    assert client.probe().ready.value
    assert monitor.healthz(config.endpoint)() == b"ok\n"
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
    copies = {"restored": of_snapshot(snapshot.snapshot_id), "cloned": of_volume(made.volume_id)}
    for name, source in copies.items():
        copy = client.create(name, 16 * MIB, block(), parameters=SOUND, source=source)
        client.delete(copy.volume_id)
    client.delete_snapshot(snapshot.snapshot_id)
    client.expand(made.volume_id, 20 * MIB)
    client.modify(made.volume_id, {"carver/readAhead": "1MiB"})
    moment(client, [made, volume])
    client.delete(made.volume_id)
    inline(client, place / "inline")
    encrypted(client, place / "encrypted")
    client.node_expand(volume.volume_id, target)
    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
    client.delete(volume.volume_id)


@pytest.mark.parametrize("ends_in_time", [True, False], ids=["told to end", "for ever"])
def test_forty_calls_on_a_group_whose_lvm2_hangs_leave_the_other_as_it_was(
    client: Client,
    config: Config,
    fake: FakeHost,
    of_both: tuple[csi.Volume, csi.Volume],
    callers: ThreadPoolExecutor,
    tmp_path: Path,
    ends_in_time: bool,
) -> None:
    fake.lvm2.groups["a"].seqno += 1
    trouble = Trouble(fake, ends_in_time=ends_in_time)
    sick = forty(callers, client, of_both[0]) + further(callers, client, of_both[0], tmp_path)
    assert trouble.asked.wait(20)
    whole_life(client, config, of_both[1], tmp_path)
    assert not any(one.done() for one in sick)
    assert "vol-of-b" not in fake.lvm2.groups["b"].volumes
    trouble.over.set()
    assert {code_of(one) for one in sick} == {"OK"}


def test_what_uses_a_volume_of_a_group_that_hangs_can_end(
    client: Client, fake: FakeHost, callers: ThreadPoolExecutor, tmp_path: Path
) -> None:
    staging, target = tmp_path / "staging", tmp_path / "target"
    volume = client.create("of-a", 16 * MIB, mounted("ext4"), parameters=SICK)
    client.stage(volume, staging, mounted("ext4"))
    client.publish(volume, staging, target, mounted("ext4"))
    fake.lvm2.groups["a"].seqno += 1
    trouble = Trouble(fake, ends_in_time=False)
    sick = forty(callers, client, volume)
    assert trouble.asked.wait(20)
    assert client.stats(volume.volume_id, target).usage
    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
    assert not any(one.done() for one in sick)
    trouble.over.set()
    wait(sick)


def test_a_group_snapshot_with_a_part_in_a_group_that_hangs_is_not_judged(
    client: Client,
    config: Config,
    fake: FakeHost,
    of_both: tuple[csi.Volume, csi.Volume],
) -> None:
    taken = client.group_snapshot("hourly", [one.volume_id for one in of_both])
    identity, snapshots = taken.group_snapshot_id, [one.snapshot_id for one in taken.snapshots]
    before = {name: set(group.volumes) for name, group in fake.lvm2.groups.items()}
    fake.lvm2.groups["a"].seqno += 1
    trouble = Trouble(fake, ends_in_time=True)
    with Client(config.endpoint, timeout_seconds=2) as hasty:
        for call in (hasty.find_group_snapshot, hasty.delete_group_snapshot):
            with expect.code("DEADLINE_EXCEEDED"):
                call(identity, snapshots)
    assert {name: set(group.volumes) for name, group in fake.lvm2.groups.items()} == before
    trouble.over.set()
    assert client.find_group_snapshot(identity, snapshots) == taken
    with expect.code("ALREADY_EXISTS"):
        client.group_snapshot("hourly", [of_both[1].volume_id])
    client.delete_group_snapshot(identity, snapshots)


def test_calls_on_a_group_that_hangs_end_with_their_deadlines_and_keep_no_place(
    client: Client,
    service: Service,
    config: Config,
    fake: FakeHost,
    of_both: tuple[csi.Volume, csi.Volume],
    callers: ThreadPoolExecutor,
) -> None:
    fake.lvm2.groups["a"].seqno += 1
    trouble = Trouble(fake, ends_in_time=True)
    with Client(config.endpoint, timeout_seconds=1.5) as hasty:
        sick = forty(callers, hasty, of_both[0])
        assert {code_of(one) for one in sick} <= {"DEADLINE_EXCEEDED", "UNAVAILABLE"}
    expect.soon(lambda: service.context.admission._free == service.context.admission._places)
    trouble.over.set()
    assert client.volume(of_both[0].volume_id).volume.capacity_bytes == 16 * MIB
    assert client.capacity(SICK).available_capacity
    client.delete(of_both[0].volume_id)


def test_however_many_calls_one_group_takes_others_find_a_place(
    client: Client,
    service: Service,
    fake: FakeHost,
    of_both: tuple[csi.Volume, csi.Volume],
    config: Config,
    tmp_path: Path,
) -> None:
    fake.lvm2.groups["a"].seqno += 1
    trouble = Trouble(fake, ends_in_time=False)
    with ThreadPoolExecutor(3 * CALLS) as many:
        sick = [call for one in range(3) for call in forty(many, client, of_both[0], one * CALLS)]
        try:
            # What is one too many is refused at once, and says so.
            expect.soon(lambda: any(one.done() for one in sick))
            whole_life(client, config, of_both[1], tmp_path)
            refused = [one for one in sick if one.done()]
            assert {code_of(one) for one in refused} == {"UNAVAILABLE"}
            assert len(refused) < len(sick)
        finally:
            trouble.over.set()
            wait(sick)


def test_volumes_that_are_staged_on_a_dead_disk_leave_places_to_the_other_group_s(
    client: Client,
    service: Service,
    fake: FakeHost,
    of_both: tuple[csi.Volume, csi.Volume],
    callers: ThreadPoolExecutor,
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """mount(2) waits for the disk, and no time limit ends it."""
    places = service.context.admission._free = service.context.admission._places = 8
    names = [f"staged-{number}" for number in range(places)]
    sick = [client.create(one, 16 * MIB, mounted("ext4"), parameters=SICK) for one in names]
    over, real = threading.Event(), fake.kernel.mount

    def mount(device: str, *words: Any) -> None:
        assert "/a-" not in device or over.wait(60)
        real(device, *words)

    monkeypatch.setattr(fake.kernel, "mount", mount)
    calls = [
        callers.submit(client.stage, one, tmp_path / name, mounted("ext4"))
        for name, one in zip(names, sick, strict=True)
    ]
    try:
        # What is one too many is refused, and says so.
        expect.soon(lambda: any(one.done() for one in calls))
        whole_life(client, config, of_both[1], tmp_path)
        refused = [one for one in calls if one.done()]
        assert {code_of(one) for one in refused} == {"UNAVAILABLE"}
        assert len(refused) == places // 4
    finally:
        over.set()
        wait(calls)


def test_a_group_whose_disks_hang_is_unavailable_at_once_and_the_other_is_as_it_was(
    client: Client,
    config: Config,
    fake: FakeHost,
    of_both: tuple[csi.Volume, csi.Volume],
    callers: ThreadPoolExecutor,
    tmp_path: Path,
) -> None:
    assert isinstance(fake.disks, FakeDisks)
    fake.disks.hanging.add("/dev/fake-a-0")
    sick = forty(callers, client, of_both[0])
    whole_life(client, config, of_both[1], tmp_path)
    assert {code_of(one) for one in sick} == {"UNAVAILABLE"}
    with expect.code("UNAVAILABLE", "/dev/fake-a-0", "dmesg"):
        client.capacity(SICK)
    fake.disks.hanging.clear()
    assert client.capacity(SICK).available_capacity
    client.delete(of_both[0].volume_id)


def test_a_wipe_that_hangs_keeps_no_other_group_s_waiting(
    client: Client, service: Service, fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.eraser.grace_seconds = 0.1
    names = [f"of-a-{number}" for number in range(3)]
    doomed = [client.create(one, 4 * MIB, block(), parameters=SICK) for one in names]
    other = client.create("of-b", 4 * MIB, block(), parameters=SOUND)
    real, over = fake.kernel.zero_out, threading.Event()

    def zero_out(device: str, offset_bytes: int, length_bytes: int, **how: bool) -> None:
        assert "/b-" in device or over.wait(60)
        real(device, offset_bytes, length_bytes)

    monkeypatch.setattr(fake.kernel, "zero_out", zero_out)
    for one in (*doomed, other):
        client.delete(one.volume_id)
    expect.soon(lambda: not fake.lvm2.groups["b"].volumes)
    assert len(fake.lvm2.groups["a"].volumes) == len(names)
    over.set()
    expect.soon(lambda: not fake.lvm2.groups["a"].volumes)


# Those who look at all groups


LISTS: dict[str, Callable[[Client], object]] = {
    "volumes": Client.volumes,
    "snapshots": Client.snapshots,
    "health": Client.unhealthy,
    "here": Client.volumes_here,
    "capacity": lambda client: client.capacity(parameters=SOUND),
}


@pytest.mark.parametrize("kind", LISTS)
def test_a_list_waits_three_seconds_for_all_groups_that_hang_and_has_what_was_seen_last(
    client: Client, fake: FakeHost, of_both: tuple[csi.Volume, csi.Volume], kind: str
) -> None:
    before = LISTS[kind](client)
    fake.lvm2.groups["a"].seqno += 1
    trouble = Trouble(fake, ends_in_time=False)
    began = time.monotonic()
    assert LISTS[kind](client) == before
    assert time.monotonic() - began < 4.5
    trouble.over.set()


@pytest.mark.parametrize("kind", ["volumes", "snapshots", "health"])
def test_a_list_that_would_lack_a_group_is_unavailable_and_names_the_group(
    client: Client,
    service: Service,
    fake: FakeHost,
    of_both: tuple[csi.Volume, csi.Volume],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    monkeypatch.setattr(volume_group, "_SHORT_WAIT_SECONDS", 0.1)
    group = service.volume_groups._volume_groups["a"]
    group.cached, group.time_seconds = None, 0.0
    fake.lvm2.groups["a"].seqno += 1
    trouble = Trouble(fake, ends_in_time=False)
    with expect.code("UNAVAILABLE", "volume group a"):
        LISTS[kind](client)
    trouble.over.set()


def test_a_list_never_lacks_a_volume_that_was_made_just_before_its_group_hung(
    client: Client, fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume_group, "_SHORT_WAIT_SECONDS", 0.1)
    assert client.volumes() == []
    trouble: list[Trouble] = []

    def hang_after_creation(words: Sequence[str]) -> Result | None:
        if words[1] != "lvcreate":
            return None
        ended = fake.lvm2(words)
        trouble.append(Trouble(fake, ends_in_time=False))
        return ended

    fake.intercept = hang_after_creation
    made = client.create("of-a", 16 * MIB, block(), parameters=SICK)
    with expect.code("UNAVAILABLE", "volume group a"):
        client.volumes()
    trouble[0].over.set()
    expect.soon(lambda: _ids(client) == [made.volume_id])


def _ids(client: Client) -> list[str]:
    try:
        return [one.volume_id for one in client.volumes()]
    except grpc.RpcError:
        return []


def scraped(service: Service, config: Config, directory: Path) -> dict[tuple[str, ...], float]:
    metrics = Metrics()
    metrics.watch(service, Registration(directory / "registry", config.endpoint))
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


@pytest.mark.parametrize("hangs", ["a", "a and b"])
def test_a_scrape_and_readiness_say_what_they_can_while_disks_hang(
    service: Service, config: Config, fake: FakeHost, tmp_path: Path, hangs: str
) -> None:
    assert isinstance(fake.disks, FakeDisks)
    fake.disks.hanging |= {f"/dev/fake-{one}-0" for one in hangs.split(" and ")}
    for one in service.volume_groups:
        one.metadata.is_outdated = True
        one.time_seconds = one.tried_seconds = 1.0
    found = scraped(service, config, tmp_path)
    if hangs == "a":
        assert found["carver_lvm_up",] == 1
        assert found["carver_group_present", "b"] == 1
        service.readiness._inventory.state(max_age=MONITOR_AGE_SECONDS)
    else:
        assert found["carver_lvm_up",] == 0


# The start


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What did not answer is tried again at once."""
    monkeypatch.setattr(startup, "_OTHERS_SECONDS", 0.2)
    monkeypatch.setattr(startup, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(startup, "_SOON_SECONDS", 0.01)


@pytest.fixture
def left(config: Config, fake: FakeHost) -> tuple[str, str]:
    """In each group a volume whose wipe an earlier process left."""
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
    return Trouble(fake, ends_in_time=False).over.set


def silence(fake: FakeHost) -> Callable[[], object]:
    assert isinstance(fake.disks, FakeDisks)
    fake.disks.hanging.add("/dev/fake-a-0")
    return fake.disks.hanging.clear


def take(fake: FakeHost) -> Callable[[], object]:
    fake.deactivate("a", "vol-deleted-sick")
    group = fake.lvm2.groups.pop("a")
    return lambda: fake.lvm2.groups.setdefault("a", group)


def double(fake: FakeHost) -> Callable[[], object]:
    """Another group of the name, which nothing tells apart."""
    fake.deactivate("a", "vol-deleted-sick")
    twin = fake.lvm2.add_group("twin", [10])
    twin.name = "a"
    twin.tags.add("carver.made=yes")
    return lambda: fake.lvm2.groups.pop("twin", None)


@pytest.mark.parametrize("trouble", [hang, silence, take, double])
def test_a_start_serves_the_groups_that_answer_and_takes_up_the_others_when_they_do(
    config: Config,
    fake: FakeHost,
    left: tuple[str, str],
    soon: None,
    monkeypatch: pytest.MonkeyPatch,
    trouble: Callable[[FakeHost], Callable[[], object]],
) -> None:
    mend = trouble(fake)
    running = Started(config, fake, monkeypatch)
    try:
        assert running.begun.wait(20)
        with Client(config.endpoint) as client:
            assert client.probe().ready.value
            made = client.create("new", 16 * MIB, block(), parameters=SOUND)
            expect.soon(lambda: left[1] not in fake.lvm2.groups["b"].volumes)
            client.delete(made.volume_id)
            assert "a" not in fake.lvm2.groups or left[0] in fake.lvm2.groups["a"].volumes
            mend()
            expect.soon(lambda: left[0] not in fake.lvm2.groups["a"].volumes)
            assert client.create("of-a", 16 * MIB, block(), parameters=SICK).volume_id
    finally:
        mend()
        running.end()


@pytest.fixture
def founded(tmp_path: Path) -> tuple[FakeHost, Config]:
    """Two groups that Carver made, each of a disk of its own, by an earlier process."""
    host = FakeHost(tmp_path)
    disks = [host.new_device(900 * MIB) for _ in range(2)]
    config = configured.carver(
        tmp_path,
        kubelet_dir=("/",),
        classes=(DeviceClass("sick", "a", default=True), DeviceClass("sound", "b")),
        metrics_address=Address("127.0.0.1", 0),
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
def test_a_group_of_carver_s_own_whose_disk_hangs_at_the_start_delays_no_other(
    founded: tuple[FakeHost, Config], soon: None, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    fake, config = founded
    sick = config.definitions[0].devices[0]
    trouble = Unread(fake, sick)
    assert isinstance(fake.disks, FakeDisks)
    if silent:
        fake.disks.hanging.add(sick)
    running = Started(config, fake, monkeypatch)
    try:
        assert running.begun.wait(10)
        with Client(config.endpoint) as client:
            assert client.probe().ready.value
            assert client.capacity(SOUND).available_capacity
            client.delete(client.create("of-b", 16 * MIB, block(), parameters=SOUND).volume_id)
            fake.disks.hanging.clear()
            trouble.over.set()
            expect.soon(
                lambda: client.create("of-a", 16 * MIB, block(), parameters=SICK) is not None
            )
    finally:
        trouble.over.set()
        running.end()


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
    config = configured.carver(
        tmp_path,
        kubelet_dir=("/",),
        classes=(DeviceClass("sick", "file", default=True), DeviceClass("sound", "b")),
        metrics_address=Address("127.0.0.1", 0),
        definitions=(GroupDefinition("file", file=BackingFile(tmp_path / "file", 64 * MIB)),),
    )
    running = Started(config, fake, monkeypatch)
    try:
        assert running.begun.wait(10)
        with Client(config.endpoint) as client:
            assert client.capacity(SOUND).available_capacity
            for call in (
                lambda: client.create("new", 4 * MIB, block(), parameters=SICK),
                lambda: client.delete("file@00000000/vol-pvc-1"),
                client.volumes,
            ):
                with expect.code("UNAVAILABLE", "call again"):
                    call()
            attached.set()
            expect.soon(lambda: not service_pending(client))
    finally:
        attached.set()
        running.end()


def service_pending(client: Client) -> bool:
    """Whether the class has no room yet."""
    try:
        return not client.capacity(SICK).available_capacity
    except grpc.RpcError:
        return True


def test_a_wipe_that_failed_because_the_group_went_goes_on_when_it_is_back(
    config: Config, fake: FakeHost, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Started(config, fake, monkeypatch)
    try:
        assert running.begun.wait(20)
        with Client(config.endpoint) as client:
            client.create("deleted-sick", 16 * MIB, block(), parameters=SICK)
            volume = fake.lvm2.groups["a"].volumes["vol-deleted-sick"]
            bring = take(fake)
            with expect.code("RESOURCE_EXHAUSTED"):
                client.create("new", 16 * MIB, block(), parameters=SICK)
            volume.tags = {one.replace("state=ready", "state=wiping") for one in volume.tags}
            bring()
            expect.soon(lambda: not fake.lvm2.groups["a"].volumes)
    finally:
        running.end()
