"""What may hang is not done while a volume group is held: other calls to the group would hang, too.

That is: no device is read or written, no program runs but lvm2, and no other group is waited for.
`tests/support/unheld.py` asks for it before each operation of every test.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import expect
import grpc
import in_background
import pytest
import serving
import unheld
from fakes.host import FakeHost
from fakes.kernel import FakeKernel
from model.machine import Machine
from model.stopping import Switch, stops

from agent.csi.client import Client, block, of_snapshot, of_volume
from agent.daemon.server import Service
from agent.groups.volume_group import VolumeGroup, begin_states
from agent.operations import replace_disk
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from agent.volumes.volume_states import Call
from agent.work import locks
from lvm import groups
from lvm.layout import Layout
from lvm.thin import Policy
from mount import command
from mount.command import Result
from mount.kernel import Kernel
from proto import carver_pb2 as carver
from proto import csi_pb2 as csi

_T = TypeVar("_T")

MIB = 1 << 20
SIZE = 16 * MIB
THERE = {"class": "there"}
KEY = {"passphrase": "correct horse battery staple"}
DATA = b"what a tenant wrote".ljust(4096, b"!")
# A logical volume of another than Carver.
OLD = (
    *("lvcreate", "--yes", "--wipesignatures", "y", "--zero", "y", "--activate", "y"),
    *("--type", "linear", "--size", f"{SIZE}b", "--name", "old", "--", "a"),
)
CLASSES = (
    DeviceClass("here", "a", default=True),
    DeviceClass("there", "b"),
    DeviceClass("sealed", "a", encryption="luks2", layout=Layout("thin"), pool=Policy()),
    DeviceClass("sealed-thick", "a", encryption="luks2"),
)
pytestmark = [pytest.mark.groups(a=[200], b=[200]), pytest.mark.settings(classes=CLASSES)]


@pytest.fixture
def service(config: Config, fake: FakeHost) -> Iterator[Service]:
    running = serving.start(config, fake, eraser=20, copier=20)
    yield running
    running.stop()


@pytest.fixture
def source(client: Client, fake: FakeHost) -> csi.Volume:
    """A volume in the one group, to be copied to the other."""
    made = client.create("source", SIZE, block())
    fake.write_bytes("/dev/mapper/a-vol--source", 0, DATA)
    return made


def names(fake: FakeHost, group: str) -> set[str]:
    return set(fake.lvm2.groups[group].volumes)


def copied(fake: FakeHost) -> bytes:
    return fake.read_bytes("/dev/mapper/b-vol--copy", 0, len(DATA))


def idle(service: Service) -> None:
    """What goes on behind the answers has ended, or failed."""
    for jobs in (service.copier.jobs, service.copier.bridges, service.eraser.jobs):
        in_background.ended(jobs)


class Gate:
    """Something hangs, from when it comes to it until it is let go on."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.reached.set()
        assert self.open.wait(expect.PATIENCE_SECONDS)

    def before(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        """The operation, which hangs first."""

        def hangs(*words: Any, **more: Any) -> Any:
            self.wait()
            return operation(*words, **more)

        return hangs

    @contextmanager
    def call(self, call: Callable[[], object]) -> Iterator[Future[object]]:
        """Inside, the call hangs there."""
        with ThreadPoolExecutor(1) as caller:
            calling = caller.submit(call)
            try:
                expect.soon(lambda: self.reached.is_set() or calling.done())
                assert not calling.done(), calling.exception()
                yield calling
            finally:
                self.open.set()
        with suppress(grpc.RpcError):
            calling.result(expect.PATIENCE_SECONDS)


def live(client: Client, *classes: str) -> None:
    """Calls that change the groups of these classes."""
    for one in classes:
        made = client.create("beside", SIZE, block(), parameters={"class": one})
        client.expand(made.volume_id, 2 * SIZE)
        client.delete(made.volume_id)


# The rule


def test_no_device_is_used_and_no_program_runs_while_a_group_is_held(
    service: Service, fake: FakeHost
) -> None:
    context = service.context
    device = fake.new_device(SIZE)
    with service.volume_groups.hold("a"):
        for name in (one for one in dir(Kernel) if not one.startswith("_")):
            if name in unheld.HARMLESS:
                assert callable(getattr(context.kernel, name))
                continue
            with pytest.raises(AssertionError, match=f"{name} is called while volume group a"):
                getattr(context.kernel, name)
        with pytest.raises(AssertionError, match=r"mkfs\.ext4 is run while"):
            context.run("mkfs.ext4", "-q", "--", device)
        with pytest.raises(AssertionError, match="volume group b is waited for"):
            service.volume_groups.hold("b").__enter__()
        with pytest.raises(AssertionError, match="background work is waited for"):
            locks.without_slot("a").__enter__()
        assert service.reports.fresh("a").group("a").name == "a"
        # Another thread holds nothing, and may be left behind.
        read = command.begin("look", lambda: context.kernel.read(device, 0, 512))
        assert read.result(expect.PATIENCE_SECONDS) == bytes(512)
    assert context.kernel.read(device, 0, 512) == bytes(512)


def test_what_the_rule_lets_pass_is_an_operation_of_the_kernel() -> None:
    assert {*dir(FakeKernel)} >= unheld.HARMLESS


# A copy to another group


@pytest.mark.parametrize("of", ["volume", "snapshot"])
@pytest.mark.parametrize("where", ["a", "b"], ids=["source hangs", "target hangs"])
def test_a_group_that_hangs_holds_up_no_other_in_a_copy_between_both(
    client: Client, fake: FakeHost, source: csi.Volume, service: Service, where: str, of: str
) -> None:
    wanted = of_volume(source.volume_id)
    if of == "snapshot":
        wanted = of_snapshot(client.snapshot("s", source.volume_id).snapshot_id)
    gate = Gate()
    # The first command of the call that has to do with that group.
    service.reports.fresh()
    fake.lvm2.groups[where].seqno += 1

    def hangs(words: Sequence[str]) -> Result | None:
        if f"/dev/fake-{where}-" in " ".join(words) and not gate.open.is_set():
            gate.wait()
        return None

    fake.intercept = hangs
    make = partial(client.create, "copy", SIZE, block(), parameters=THERE, source=wanted)
    with gate.call(make):
        live(client, "there" if where == "a" else "here")
    fake.intercept = lambda _words: None
    assert make().content_source == wanted
    assert copied(fake) == DATA
    idle(service)
    assert "copy-copy" not in names(fake, "a")


def test_the_bridge_of_a_copy_to_another_group_is_taken_without_that_group(
    client: Client, fake: FakeHost, source: csi.Volume
) -> None:
    gate = Gate()

    def hangs(words: Sequence[str]) -> Result | None:
        if words[1] == "lvcreate" and "copy-copy" in words:
            gate.wait()
        return None

    fake.intercept = hangs
    of = of_volume(source.volume_id)
    with gate.call(lambda: client.create("copy", SIZE, block(), parameters=THERE, source=of)):
        live(client, "there")
    assert copied(fake) == DATA


class Between:
    """Acts between the bridge of a copy and its volume, as its volume is about to be made."""

    def __init__(self, fake: FakeHost, act: Callable[[], object]) -> None:
        self._act, self.acted = act, False
        fake.intercept = self

    def __call__(self, words: Sequence[str]) -> Result | None:
        if words[1] == "lvcreate" and "vol-copy" in words and not self.acted:
            self.acted = True
            # By a thread that holds nothing.
            command.begin("between", self._act).result(expect.PATIENCE_SECONDS)
        return None


def test_a_bridge_is_kept_for_the_volume_that_a_call_is_about_to_make(
    client: Client, fake: FakeHost, source: csi.Volume, service: Service
) -> None:
    between = Between(fake, lambda: service.copier.resume("a"))
    of = of_volume(source.volume_id)
    client.create("copy", SIZE, block(), parameters=THERE, source=of)
    assert between.acted
    assert copied(fake) == DATA
    idle(service)
    assert names(fake, "a") == {"vol-source"}


def test_a_source_is_kept_until_the_copy_to_another_group_has_found_it(
    client: Client, fake: FakeHost, source: csi.Volume, service: Service
) -> None:
    snapshot = client.snapshot("s", source.volume_id).snapshot_id
    # A call is about to fill the volume; then the job waits for the source's group.
    readers: list[list[str]] = []
    Between(fake, lambda: readers.append(service.copier.copies_from(snapshot)))
    gate = Gate()
    state = service.reports.fresh

    def hangs(*groups: str, **more: Any) -> Any:
        if groups == ("a",) and threading.current_thread().name.startswith("work"):
            gate.wait()
        return state(*groups, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service.reports, "fresh", hangs)
        of = of_snapshot(snapshot)
        make = partial(client.create, "copy", SIZE, block(), parameters=THERE, source=of)
        with gate.call(make):
            copy = next(iter(service.copier.jobs.unfinished())).key
            expect.soon(lambda: service.copier.copies_from(snapshot) == [copy])
    assert readers == [["copy"]]
    assert copied(fake) == DATA
    idle(service)
    assert service.copier.copies_from(snapshot) == []
    client.delete_snapshot(snapshot)


def test_a_copy_that_finds_no_room_leaves_no_bridge(
    client: Client, fake: FakeHost, source: csi.Volume, service: Service
) -> None:
    fake.commands.clear()
    of = of_volume(source.volume_id)
    with expect.code("RESOURCE_EXHAUSTED"):
        client.create("copy", 900 * MIB, block(), parameters=THERE, source=of)
    # What is known before is not found out by a snapshot of a volume in use.
    assert not any("lvcreate" in words for words in fake.commands)

    def full(words: Sequence[str]) -> Result | None:
        is_made = words[1] == "lvcreate" and "vol-copy" in words
        return Result(5, "", "  insufficient free space\n") if is_made else None

    fake.intercept = full
    with suppress(grpc.RpcError):
        client.create("copy", SIZE, block(), parameters=THERE, source=of)
    idle(service)
    assert names(fake, "a") == {"vol-source"}
    assert names(fake, "b") == set()


@pytest.mark.parametrize("kind", ["here", "there"])
def test_a_copy_has_the_tags_of_the_moment_of_its_bridge(
    client: Client, fake: FakeHost, source: csi.Volume, service: Service, kind: str
) -> None:
    """An earlier call may have taken the bridge, while the source's key was being changed."""
    rotating, path = "carver.rotating=yes", "a/vol-source"
    fake.lvm("lvchange", "--addtag", rotating, "--", path)

    def fails(words: Sequence[str]) -> Result | None:
        is_made = words[1] == "lvcreate" and "vol-copy" in words
        is_removed = words[1] in ("lvconvert", "lvremove")
        return Result(5, "", "  it does not work today\n") if is_made or is_removed else None

    fake.intercept = fails
    of = of_volume(source.volume_id)
    make = partial(client.create, "copy", SIZE, block(), parameters={"class": kind}, source=of)
    with pytest.raises(grpc.RpcError):
        make()
    idle(service)
    assert "copy-copy" in names(fake, "a")
    fake.intercept = lambda _words: None
    fake.lvm("lvchange", "--deltag", rotating, "--", path)
    make()
    [group] = [one for one in "ab" if "vol-copy" in names(fake, one)]
    assert rotating in fake.lvm2.groups[group].volumes["vol-copy"].tags


def test_a_copy_whose_source_s_group_went_away_moves_on_to_another_node(
    client: Client, fake: FakeHost, source: csi.Volume
) -> None:
    copy, snapshot = fake.kernel.copy, client.snapshot("s", source.volume_id)

    def fails(*_words: object, **_more: object) -> None:
        raise OSError(5, "Input/output error")

    fake.kernel.override(copy=fails)  # type: ignore[attr-defined]
    of = of_snapshot(snapshot.snapshot_id)
    make = partial(client.create, "copy", SIZE, block(), parameters=THERE, source=of)
    with expect.code("ABORTED", "Input/output error"):
        make()
    fake.kernel.override(copy=copy)  # type: ignore[attr-defined]
    fake.lvm2.groups.pop("a")
    with expect.code("RESOURCE_EXHAUSTED", "not on this node"):
        make()
    assert names(fake, "b") == set()


def test_a_source_is_looked_at_again_for_a_disk_that_came_meanwhile(
    client: Client,
    fake: FakeHost,
    source: csi.Volume,
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the source holds may not be usable there."""
    prepare, taken = service.copier.prepare, list[str]()

    def preparing(*words: Any) -> Any:
        found = prepare(*words)
        if not taken:
            new, area_bytes = fake.new_device(100 * MIB), MIB - groups.LABEL_BYTES
            groups.extend(fake.lvm, "b", new, area_bytes)
            service.reports.outdate()
        taken.append(str(found.id))
        return found

    monkeypatch.setattr(service.copier, "prepare", preparing)
    of = of_volume(source.volume_id)
    client.create("copy", SIZE, block(), parameters=THERE, source=of)
    assert len(taken) == 2
    assert len(set(taken)) == 1
    assert copied(fake) == DATA
    idle(service)
    assert names(fake, "a") == {"vol-source"}


class Trial:
    """A machine with a source in one group, which is to be copied to another."""

    def __init__(self, directory: Path) -> None:
        (directory / "mounts").mkdir(parents=True)
        self.fake = FakeHost(directory / "mounts")
        for name in ("a", "b"):
            self.fake.lvm2.add_group(name, [200])
        self.machine = Machine(self.fake, "a", directory, settings={"classes": CLASSES[:2]})
        self.source = self.machine.client.create("source", SIZE, block())
        self.fake.write_bytes("/dev/mapper/a-vol--source", 0, DATA)

    def make(self) -> csi.Volume:
        of = of_volume(self.source.volume_id)
        return self.machine.client.create("copy", SIZE, block(), parameters=THERE, source=of)

    def run(self, switch: Switch) -> None:
        self.machine.stop()
        self.machine.grace_seconds = 30 if switch.stop_at < 0 else 0.2
        self.machine.start(switch)
        with suppress(grpc.RpcError):
            self.make()


def killed_at_each_step(directory: Path) -> Iterator[tuple[Trial, str]]:
    """A copy killed at each step, and started again; with when it was."""
    whole, counting = Trial(directory / "whole"), Switch()
    whole.run(counting)
    idle(whole.machine.service)
    whole.machine.stop()
    for number, before in stops(counting.taken):
        trial, switch = Trial(directory / f"{number}{before}"), Switch(number, before=before)
        trial.run(switch)
        assert switch.dead.wait(expect.PATIENCE_SECONDS), (number, switch.taken)
        trial.machine.revive()
        idle(trial.machine.service)
        yield trial, f"killed {'before' if before else 'after'} {counting.taken[number]}"
        trial.machine.stop()


def test_a_copy_to_another_group_that_is_killed_is_completed_or_leaves_nothing(
    tmp_path: Path,
) -> None:
    for number, (trial, when) in enumerate(killed_at_each_step(tmp_path)):
        fake, client = trial.fake, trial.machine.client
        # A bridge that no volume needs does not outlive the start.
        assert "copy-copy" not in names(fake, "a") or "vol-copy" in names(fake, "b"), when
        if number % 2:
            trial.make()
            assert copied(fake) == DATA, when
        for one in client.volumes():
            if one.volume_id != trial.source.volume_id:
                client.delete(one.volume_id)
        idle(trial.machine.service)
        assert names(fake, "a") == {"vol-source"}, when
        assert names(fake, "b") == set(), when
        client.delete(trial.source.volume_id)


def test_what_may_be_in_other_groups_is_read_before_a_group_is_held(
    client: Client, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = list[str]()

    def begins(every: Iterable[VolumeGroup], **more: Any) -> Any:
        found = list(every)
        try:
            locks.require_none_held(f"{[one.name for one in found]} are waited for")
        except AssertionError as error:
            waits.extend([str(error)] if found else [])
        return begin_states(found, **more)

    def call(make: Callable[[], _T]) -> _T:
        # As after a command of Carver's in each, since which it was not read.
        for one in service.volume_groups:
            one.metadata.forget()
            one._is_stale = True
        return make()

    monkeypatch.setattr("agent.volumes.reports.begin_states", begins)
    volume, staging = client.create("1", SIZE), tmp_path / "staging"
    one = volume.volume_id
    client.stage(volume, staging)
    client.unstage(one, staging)
    taken = call(lambda: client.snapshot("1", one)).snapshot_id
    # A volume that is active and has snapshots is deactivated, where nothing is copied from it.
    call(lambda: client.expand(one, 2 * SIZE))
    client.stage(volume, staging)
    with expect.code("FAILED_PRECONDITION", "snap-1"):
        call(lambda: client.node_expand(one, staging, 3 * SIZE))
    client.unstage(one, staging)
    call(lambda: client.stage(volume, staging))
    assert service.context.mender.mended_volume(one, Call.USE).size_bytes == 3 * SIZE
    client.unstage(one, staging)
    call(lambda: client.create("copy", 0, parameters=THERE, source=of_snapshot(taken)))
    call(lambda: client.delete_snapshot(taken))
    call(lambda: client.delete(one))
    assert waits == []


# Reads of devices


def test_a_source_that_hangs_when_its_blocks_are_read_holds_up_no_group(
    client: Client, fake: FakeHost, source: csi.Volume
) -> None:
    snapshot = of_snapshot(client.snapshot("s", source.volume_id).snapshot_id)
    formatted = "carver.formatted=ext4"
    for path in ("a/vol-source", "a/snap-s"):
        fake.lvm("lvchange", "--addtag", formatted, "--deltag", "carver.access=block", "--", path)
        fake.lvm("lvchange", "--addtag", "carver.access=mount", "--", path)
    logical, gate = fake.kernel.logical_block_bytes, Gate()

    def blocks(device: str) -> int:
        return 4096 if device.startswith("/dev/fake-b-") else logical(device)

    fake.kernel.override(  # type: ignore[attr-defined]
        logical_block_bytes=blocks, superblock=gate.before(fake.kernel.superblock)
    )
    make = partial(client.create, "copy", SIZE, parameters=THERE, source=snapshot)
    with gate.call(make):
        live(client, "here", "there")


def test_a_source_that_is_read_stays_active_for_a_copy_that_begins_meanwhile(
    client: Client, fake: FakeHost, source: csi.Volume, service: Service
) -> None:
    work, begin, copying = service.copier.jobs.steps, threading.Event(), Gate()
    # A job begins a moment before its call has left the source's name.
    service.context.locks.grace_seconds = 60

    def waits(job: Any) -> Any:
        assert begin.wait(expect.PATIENCE_SECONDS)
        return work(job)

    service.copier.jobs.steps = waits
    fake.kernel.override(copy=copying.before(fake.kernel.copy))  # type: ignore[attr-defined]
    of, logical = of_volume(source.volume_id), fake.kernel.logical_block_bytes

    def blocks(device: str) -> int:
        if device == "/dev/mapper/a-vol--source":
            # The copy activates its bridge, and with it the source.
            begin.set()
            assert copying.reached.wait(expect.PATIENCE_SECONDS)
        return 4096 if device.startswith("/dev/fake-b-") else logical(device)

    with ThreadPoolExecutor(1) as caller:
        first = caller.submit(client.create, "first", SIZE, block(), source=of)
        expect.soon(service.copier.jobs.unfinished)
        fake.lvm("lvchange", "--activate", "n", "--", "a/vol-source")
        fake.kernel.override(logical_block_bytes=blocks)  # type: ignore[attr-defined]
        with expect.code("INVALID_ARGUMENT", "blocks of 512"):
            client.create("second", SIZE, block(), parameters=THERE, source=of)
        active = service.context.activator.is_active("a", "copy-first")
        copying.open.set()
        assert first.result(expect.PATIENCE_SECONDS).content_source == of
    assert active


def test_a_volume_that_hangs_while_it_is_adopted_holds_up_no_other(
    client: Client, fake: FakeHost
) -> None:
    fake.lvm(*OLD)
    gate = Gate()
    fake.kernel.override(signatures=gate.before(fake.kernel.signatures))  # type: ignore[attr-defined]
    request = carver.AdoptVolumeRequest(group="a", logical_volume="old", block=True)
    with gate.call(lambda: client.adopt(request)):
        live(client, "here")
    assert "vol-old" in names(fake, "a")


def test_a_volume_made_anew_while_it_is_looked_at_is_not_adopted(
    client: Client, fake: FakeHost
) -> None:
    fake.lvm(*OLD)
    signatures = fake.kernel.signatures

    def anew(*words: Any, **more: Any) -> Any:
        fake.lvm("lvremove", "--yes", "--", "a/old")
        fake.lvm(*OLD)
        return signatures(*words, **more)

    fake.kernel.override(signatures=anew)  # type: ignore[attr-defined]
    request = carver.AdoptVolumeRequest(group="a", logical_volume="old", block=True)
    with expect.code("FAILED_PRECONDITION", "made anew", "call again"):
        client.adopt(request)
    assert names(fake, "a") == {"old"}


def test_an_encrypted_thin_volume_that_hangs_when_it_is_deleted_holds_up_no_other(
    client: Client, fake: FakeHost, tmp_path: Path
) -> None:
    volume = client.create("secret", SIZE, block(), parameters={"class": "sealed"})
    client.stage(volume, tmp_path / "staging", block(), KEY)
    client.unstage(volume.volume_id, tmp_path / "staging")
    gate = Gate()
    fake.kernel.override(zero_out=gate.before(fake.kernel.zero_out))  # type: ignore[attr-defined]
    with gate.call(lambda: client.delete(volume.volume_id)):
        beside = client.create("beside", SIZE, block())
        client.expand(beside.volume_id, 2 * SIZE)
    assert "vol-secret" not in names(fake, "a")


def test_a_new_disk_that_hangs_is_refused_and_holds_its_group_for_moments(
    client: Client, fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replace_disk, "_LOOK_SECONDS", 0.05)
    new, gate = fake.new_device(1000 * MIB), Gate()
    fake.kernel.override(signatures=gate.before(fake.kernel.signatures))  # type: ignore[attr-defined]
    try:
        for _ in range(6):
            with expect.code("FAILED_PRECONDITION", "has not answered", "name another"):
                client.replace_disk("/dev/fake-a-0", new)
        live(client, "here")
    finally:
        gate.open.set()
    expect.soon(lambda: client.replace_disk("/dev/fake-a-0", new)[0])
    assert [one.name for one in fake.lvm2.groups["a"].disks] == [new]
