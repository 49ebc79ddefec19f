"""The state of a volume group, and when the cached one is still true."""

import gc
import itertools
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import configured
import expect
import pytest
from fakes.disks import FakeDisks
from fakes.host import FakeHost

from agent.core import errors
from agent.groups import metadata_cache
from agent.groups import volume_group as module
from agent.groups.metadata_cache import MetadataCache
from agent.groups.node_groups import VolumeGroups
from agent.groups.volume_group import VolumeGroup, begin_states
from agent.volumes import records
from agent.volumes.reports import Reports
from agent.work.group_worker import GroupWorkers
from lvm import lvm_errors as lvm_errors
from lvm import report, tags, volumes
from lvm.disk_reader import Fingerprint, Found, Unreadable
from mount import mount_errors as mount_errors
from mount.command import Result

MIB = 1 << 20


@pytest.fixture
def known(fake: FakeHost) -> VolumeGroup:
    return of(fake)


def of(fake: FakeHost) -> VolumeGroup:
    found = VolumeGroups(fake.lvm, fake.disks, fake.devices, configured.on_groups("data")).of(
        "data"
    )
    assert found is not None
    return found


def state(known: VolumeGroup) -> report.Group:
    found = known.state()
    assert found is not None
    return found


def reports(fake: FakeHost) -> int:
    return sum(words[1] == "fullreport" for words in fake.commands)


def create(fake: FakeHost, name: str) -> None:
    volumes.create(fake.lvm, "data", volumes.New(name, 4 * MIB, {}))


def test_a_group_is_reported_once_until_it_is_written_to(
    fake: FakeHost, known: VolumeGroup
) -> None:
    for _ in range(5):
        state(known)
    assert reports(fake) == 1
    create(fake, "a")
    assert all("a" in state(known).volumes for _ in range(3))
    assert reports(fake) == 2
    assert known.status == "ready"


def test_a_group_that_is_refused_is_not_taken_for_one_of_which_all_is_known(
    fake: FakeHost, known: VolumeGroup
) -> None:
    state(known)
    assert known.has_own_changes
    for exported in (True, False):
        fake.lvm2.groups["data"].exported = exported
        fake.lvm2.groups["data"].seqno += 1
        if exported:
            with pytest.raises(errors.GroupRefused):
                known.state()
        else:
            state(known)
        assert known.has_own_changes is not exported


class Clock:
    """The time of day, which a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "time", lambda: self.now)


Change = Callable[[FakeHost], None]


def be_absent(fake: FakeHost) -> None:
    fake.lvm2.groups.pop("data")


def be_refused(fake: FakeHost) -> None:
    fake.lvm2.groups["data"].exported = True
    fake.lvm2.groups["data"].seqno += 1


def be_silent(fake: FakeHost) -> None:
    assert isinstance(fake.disks, FakeDisks)
    fake.disks.hanging.add("/dev/fake-data-0")


@pytest.mark.parametrize(
    ("change", "status"),
    [(be_absent, "absent"), (be_refused, "refused"), (be_silent, "ready")],
)
@pytest.mark.parametrize("is_read_before", [True, False])
def test_the_time_of_a_group_is_that_of_the_last_read_which_found_it(
    fake: FakeHost,
    known: VolumeGroup,
    monkeypatch: pytest.MonkeyPatch,
    change: Change,
    status: str,
    is_read_before: bool,
) -> None:
    clock = Clock(monkeypatch)
    if is_read_before:
        state(known)
    found = 1000.0 if is_read_before else 0.0
    clock.now = 2000.0
    change(fake)
    known.metadata.is_outdated = True
    known.metadata.forget()
    with suppress(errors.AgentError):
        known.state()
    is_answer = change is not be_silent
    assert known.status == (status if is_answer or is_read_before else "unknown")
    assert known.time_seconds == found
    assert known.status_seconds == (2000.0 if is_answer else found)
    assert known.tried_seconds == 2000.0


def test_the_oldest_report_is_that_of_a_group_that_has_one(
    fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that is absent or refused has no rows in the metrics, whose time this is."""
    clock = Clock(monkeypatch)
    fake.lvm2.add_group("other", [100])
    configuration = configured.on_groups("data", "other")
    groups = VolumeGroups(fake.lvm, fake.disks, fake.devices, configuration)
    reports = Reports(groups)
    assert reports.time_seconds == 0
    for number, change in enumerate((None, be_refused, be_absent)):
        if change is not None:
            change(fake)
        reports.outdate()
        for one in groups:
            clock.now = 2000.0 + 10 * number + (one.name == "other")
            with suppress(errors.GroupRefused):
                one.state()
        assert reports.time_seconds == 2000 + 10 * number + (change is not None)
    fake.lvm2.groups.pop("other")
    reports.outdate()
    for one in groups:
        one.state()
    assert reports.time_seconds == 0


def test_no_tags_are_kept_of_a_volume_that_is_gone(fake: FakeHost, known: VolumeGroup) -> None:
    def kept() -> int:
        gc.collect()
        sets = (one for one in gc.get_objects() if type(one) is frozenset)
        return sum("carver.name=gone" in one for one in sets)

    volumes.create(fake.lvm, "data", volumes.New("a", 4 * MIB, {"name": "gone"}))
    assert state(known).volume("a").own_tags == {"name": "gone"}
    assert kept()
    volumes.remove(fake.lvm, "data", "a")
    assert "a" not in state(known).volumes
    assert not kept()


def test_a_change_is_seen_only_by_a_read_that_began_after_it(
    known: VolumeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    known.state()
    assert not known.is_changed
    run = known._run

    def overtaken(*words: str) -> Result:
        monkeypatch.setattr(known, "_run", run)
        known.state()
        return run(*words)

    monkeypatch.setattr(known, "_run", overtaken)
    volumes.create(known.lvm, "data", volumes.New("a", 4 * MIB, {}))
    assert known.cached is not None
    assert "a" not in known.cached.volumes
    assert known.is_changed
    known.state()
    assert not known.is_changed


def test_a_write_to_a_group_s_own_disk_starts_no_scan(fake: FakeHost) -> None:
    assert isinstance(fake.disks, FakeDisks)
    fake.lvm2.add_group("other", [10])
    volume_groups = VolumeGroups(
        fake.lvm, fake.disks, fake.devices, configured.on_groups("data", "other")
    )
    every = list(volume_groups)
    for one in every:
        one.state()
    scans = fake.disks.scans
    create(fake, "a")
    volume_groups.outdate(written_path=fake.lvm2.groups["data"].disks[0].name)
    data, _ = [state(one) for one in every]
    assert "a" in data.volumes
    assert fake.disks.scans == scans
    volume_groups.outdate(written_path="/dev/unknown")
    assert {one.metadata.is_outdated for one in every} == {True}


def test_a_replaced_disk_is_seen_by_the_commits_alone(fake: FakeHost, known: VolumeGroup) -> None:
    known.state()
    [old], new = known.lvm.devices, fake.new_device(40 * MIB)
    known.metadata.lvm_with(new)("vgextend", "--", "data", new)
    found = state(known)
    assert (len(found.disks), found.missing_disks) == (2, 0)
    assert sorted(known.lvm.devices) == sorted([old, new])
    known.lvm("vgreduce", "--", "data", old)
    found = state(known)
    assert ([one.name for one in found.disks], found.missing_disks) == ([new], 0)
    assert known.lvm.devices == (new,)


def test_a_report_during_a_change_is_not_cached(fake: FakeHost, known: VolumeGroup) -> None:
    def change(words: Sequence[str]) -> Result | None:
        if words[1] == "fullreport":
            fake.intercept = lambda _words: None
            answer = fake.run(*words)
            fake.lvm2.groups["data"].seqno += 1
            return answer
        return None

    fake.intercept = change
    for _ in range(3):
        known.state()
    assert reports(fake) == 2


@pytest.mark.parametrize(
    "outcome",
    [
        mount_errors.CommandTimedOut(("lvm", "lvcreate"), 1.0),
        lvm_errors.SessionLost(("lvm", "lvcreate"), "it died"),
        lvm_errors.StillRunning("lvcreate", 1.0),
        Result(5, "", "half way"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_after_a_failed_change_the_group_is_reported_again(
    fake: FakeHost, known: VolumeGroup, outcome: Exception | Result
) -> None:
    known.state()

    def fail(words: Sequence[str]) -> Result | None:
        if words[1] != "lvcreate":
            return None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    fake.intercept = fail
    with pytest.raises((mount_errors.CommandError, lvm_errors.StillRunning)):
        volumes.create(known.lvm, "data", volumes.New("a", 4 * MIB, {}))
    known.state()
    assert reports(fake) == 2


def test_a_resumed_device_is_seen(fake: FakeHost, known: VolumeGroup) -> None:
    create(fake, "a")
    fake.suspend("data", "a")
    assert state(known).volumes["a"].suspended
    fake.lvm2.resume("data", "a")
    assert not state(known).volumes["a"].suspended


def test_a_report_is_used_for_ten_minutes(
    fake: FakeHost, known: VolumeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A number of which differences are exact.
    now = 1024.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    known.state()
    now += metadata_cache._LASTS_SECONDS - 1
    known.state()
    assert reports(fake) == 1
    now += 1
    known.state()
    assert reports(fake) == 2


def test_a_disk_that_came_or_went_is_seen_by_udev_s_event_or_in_a_minute(
    fake: FakeHost, known: VolumeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    known.state()
    twin = fake.lvm2.add_group("twin", [10])
    twin.name = "data"
    known.state()
    assert not known.metadata.ignored
    now += metadata_cache._BLIND_SECONDS
    known.state()
    [(path, why)] = known.metadata.ignored
    assert path == twin.disks[0].name
    assert "another group of that name" in why
    del fake.lvm2.groups["twin"]
    known.metadata.is_outdated = True
    known.state()
    assert known.status == "ready"
    assert not known.metadata.ignored


@pytest.mark.parametrize("is_read_again", [False, True], ids=["cached", "read again"])
def test_forget_during_a_read_makes_the_next_one_ask_lvm2(
    fake: FakeHost, known: VolumeGroup, monkeypatch: pytest.MonkeyPatch, is_read_again: bool
) -> None:
    create(fake, "a")
    known.state()
    if is_read_again:
        create(fake, "b")
    real, calls = fake.disks.fingerprint, itertools.count()

    def fingerprint(paths: Collection[str], patience_seconds: float = 1.0) -> Fingerprint | None:
        mark = real(paths, patience_seconds)
        # In the second the report was read already, and is about to be kept.
        if next(calls) == is_read_again:
            # Another call's lvm2 is killed during a change: no commit shows the suspended device.
            fake.suspend("data", "a")
            known.metadata.forget()
        return mark

    monkeypatch.setattr(fake.disks, "fingerprint", fingerprint)
    known.state()
    before = reports(fake)
    assert state(known).volumes["a"].suspended
    assert reports(fake) == before + 1


# A group that does not answer


class Hanging:
    """lvm2 does not answer until it is let go."""

    def __init__(self, fake: FakeHost) -> None:
        self.asked, self.over = threading.Semaphore(0), threading.Event()
        fake.intercept = self

    def __call__(self, words: Sequence[str]) -> None:
        self.asked.release()
        assert self.over.wait(30)


def test_quick_reads_do_not_wait_twice_for_a_group_that_hangs(
    fake: FakeHost, known: VolumeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SHORT_WAIT_SECONDS", 0.05)
    seen = known.state()
    fake.lvm2.groups["data"].seqno += 1
    hanging = Hanging(fake)
    assert begin_states([known])()["data"] == seen
    assert hanging.asked.acquire(timeout=20)
    for _ in range(100):
        assert begin_states([known])()["data"] == seen
    assert not hanging.asked.acquire(blocking=False)
    hanging.over.set()
    known.refresh().result(20)
    assert reports(fake) == 2
    create(fake, "a")
    # It answers, and so it is waited for again.
    monkeypatch.setattr(module, "_SHORT_WAIT_SECONDS", 20)
    found = begin_states([known])()["data"]
    assert found is not None
    assert "a" in found.volumes


@pytest.mark.parametrize("is_read", [True, False])
def test_a_list_waits_longer_for_an_answer_that_nothing_can_replace(
    fake: FakeHost, known: VolumeGroup, monkeypatch: pytest.MonkeyPatch, is_read: bool
) -> None:
    monkeypatch.setattr(module, "_SHORT_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(module, "_NEEDED_WAIT_TIMES", 400)
    seen = known.state() if is_read else None
    fake.lvm2.groups["data"].seqno += 1
    hanging = Hanging(fake)
    with ThreadPoolExecutor(1) as caller:
        listed = caller.submit(lambda: begin_states([known], complete=True)()["data"])
        assert hanging.asked.acquire(timeout=20)
        if is_read:
            # What was read before is complete, since Carver has changed nothing.
            assert listed.result(20) == seen
        else:
            # The short wait of a call that began later is over before the list's.
            assert begin_states([known])()["data"] is None
            assert not listed.done()
        hanging.over.set()
        assert listed.result(20) is not None


def test_a_list_waits_longer_also_where_the_state_became_old_while_it_waited(
    fake: FakeHost, known: VolumeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SHORT_WAIT_SECONDS", 0.5)
    monkeypatch.setattr(module, "_NEEDED_WAIT_TIMES", 40)
    known.state()
    fake.lvm2.groups["data"].seqno += 1
    hanging = Hanging(fake)
    with ThreadPoolExecutor(1) as caller:
        listed = caller.submit(lambda: begin_states([known], complete=True)()["data"])
        assert hanging.asked.acquire(timeout=20)
        # A change that began before the list ends now.
        known._is_stale = True
        wait([listed], 1)
        assert not listed.done()
        hanging.over.set()
        assert listed.result(20) is not None


class Endless:
    """Commands of these kinds get SIGTERM and do not end, until they are in `ended`."""

    def __init__(self, fake: FakeHost, *kinds: str) -> None:
        self.kinds = set(kinds)
        self.ended: set[str] = set()
        self.begun: list[str] = []
        fake.intercept = self

    def __call__(self, words: Sequence[str]) -> Result | None:
        self.begun.append(words[1])
        if words[1] not in self.kinds:
            return None
        kind = words[1]
        raise mount_errors.CommandStuck(tuple(words), 1.0, lambda: kind in self.ended)


def test_no_change_begins_while_a_command_hangs(fake: FakeHost, known: VolumeGroup) -> None:
    create(fake, "a")
    known.state()
    endless = Endless(fake, "lvextend", "fullreport")
    with pytest.raises(mount_errors.CommandStuck):
        known.lvm("lvextend", "--extents", "+1", "data/a")
    with pytest.raises(mount_errors.CommandStuck):
        known.state()
    endless.ended.add("fullreport")
    with pytest.raises(lvm_errors.StillRunning, match="lvextend got SIGTERM"):
        known.lvm("lvcreate", "--extents", "1", "--name", "b", "data")
    assert endless.begun == ["lvextend", "fullreport"]
    assert known.is_changed
    endless.kinds.clear()
    assert known.state() is not None, "a report may run beside a change that hangs"
    endless.ended.add("lvextend")
    volumes.create(known.lvm, "data", volumes.New("b", 4 * MIB, {}))
    assert known.state() is not None
    assert not known.is_changed


def test_no_report_begins_while_a_report_hangs(fake: FakeHost, known: VolumeGroup) -> None:
    known.state()
    fake.lvm2.groups["data"].seqno += 1
    endless = Endless(fake, "fullreport")
    for _ in range(20):
        with pytest.raises(mount_errors.CommandStuck, match="lvm fullreport got SIGTERM"):
            known.state()
    assert endless.begun == ["fullreport"]
    endless.ended.add("fullreport")
    endless.kinds.clear()
    assert known.state() is not None


def test_a_refresh_without_a_thread_leaves_the_next_one_to_run(known: VolumeGroup) -> None:
    with expect.no_threads(), pytest.raises(RuntimeError):
        known.refresh()
    known.refresh().result(20)
    assert known.is_answering


def test_a_group_comes_goes_and_is_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeHost(tmp_path)
    known = absent(fake)
    assert (known.state(), known.status) == (None, "absent")
    assert fake.commands == []
    made = fake.lvm2.add_group("data", [10, 10])
    assert known.state() is not None
    made.disks[1].missing = True
    known.metadata.is_outdated = True
    assert (state(known).missing_disks, known.status) == (1, "partial")
    made.disks[1].missing = False
    assert (state(known).missing_disks, known.status) == (0, "ready")
    del fake.lvm2.groups["data"]
    assert (known.state(), known.status) == (None, "absent")
    fake.lvm2.groups["data"] = made
    assert known.state() is not None
    assert caplog.text.count("is not on this node:") == 2
    assert caplog.text.count("is on this node again") == 2


def absent(fake: FakeHost) -> VolumeGroup:
    """A group that may not be there yet."""
    return next(
        iter(VolumeGroups(fake.lvm, fake.disks, fake.devices, configured.on_groups("data")))
    )


def test_a_command_during_a_scan_sees_the_disks_as_they_were(
    fake: FakeHost, known: VolumeGroup
) -> None:
    known.state()
    before = known.lvm.devices
    during = []

    def scan() -> Mapping[str, Found]:
        during.append(known.lvm.devices)
        return fake.disks.scan()

    known.metadata._scan = scan
    known.metadata.is_outdated = True
    known.state()
    assert during == [before]


def test_a_group_that_a_shell_does_not_show_is_asked_of_another_shell(
    fake: FakeHost,
) -> None:
    blind, renewed = [True], []

    def run(*words: str) -> Result:
        return Result(0, '{"report": []}', "") if blind[0] else fake.run(*words)

    def renew() -> None:
        renewed.append("a shell")
        blind[0] = not heals[0]

    heals = [True]
    scan = VolumeGroups(fake.lvm, fake.disks, fake.devices, configured.on_groups()).scan
    volume_group = VolumeGroup(
        MetadataCache("data", replace(fake.lvm, run=run), fake.disks, fake.devices, scan, renew),
        GroupWorkers(),
    )
    assert volume_group.state() is not None
    assert len(renewed) == 1
    # One that stays hidden is refused, after one more shell in all.
    blind[0], heals[0] = True, False
    volume_group.metadata.is_outdated = True
    fake.lvm2.groups["data"].seqno += 1
    for _ in range(3):
        with pytest.raises(errors.GroupRefused, match="does not show it"):
            volume_group.state()
    assert len(renewed) == 2


def test_a_filter_rejects_disks_but_those_that_the_operator_named(
    fake: FakeHost, tmp_path: Path
) -> None:
    conf = tmp_path / "root/etc/lvm/lvm.conf"
    conf.parent.mkdir(parents=True)
    conf.write_text('devices { global_filter = [ "r|.*|" ] }')
    node, own = replace(fake.lvm, root=tmp_path / "root"), fake.lvm2.groups["data"].disks[0].name
    rejected = VolumeGroups(node, fake.disks, fake.devices, configured.on_groups("data"))
    assert rejected.scan() == {}
    assert not rejected.allows(own)
    named = VolumeGroups(
        node, fake.disks, fake.devices, configured.on_groups("data"), listed=lambda _name: [own]
    )
    assert list(named.scan()) == [own]
    assert named.allows(own)
    assert not named.allows("/dev/other")
    conf.write_text("")
    assert rejected.allows("/dev/other")


OTHER = "/dev/fake-other-0"


@pytest.fixture
def other(fake: FakeHost) -> FakeHost:
    """With a group of another node's beside, which has a volume of Carver's."""
    fake.lvm2.add_group("other", [60]).tags = {tags.format_one("origin", "x")}
    return fake


def test_a_group_that_was_asked_for_is_known(other: FakeHost) -> None:
    groups = VolumeGroups(other.lvm, other.disks, other.devices, configured.on_groups("data"))
    assert [path for path, _ in groups.unknown_disks()] == [OTHER]
    found = groups.of("other")
    assert found is not None
    found.state()
    assert groups.unknown_disks() == []


def test_a_disk_that_is_only_missing_from_the_devices_file_is_looked_at(
    other: FakeHost, tmp_path: Path
) -> None:
    """So is one that was just attached, on a node that has such a file."""
    own = other.lvm2.groups["data"].disks[0].name
    with other.listing(tmp_path, own) as node:
        groups = VolumeGroups(node, other.disks, other.devices, configured.on_groups("data"))
        assert list(groups.scan()) == [own]
        assert [path for path, _ in groups.unknown_disks()] == [OTHER]


@pytest.mark.parametrize("how", ["filter", "devices"])
def test_a_disk_that_the_operator_keeps_from_lvm2_is_not_looked_at(
    other: FakeHost, tmp_path: Path, how: str
) -> None:
    node = replace(other.lvm, devices=(other.lvm2.groups["data"].disks[0].name,))
    if how == "filter":
        conf = tmp_path / "etc/lvm/lvm.conf"
        conf.parent.mkdir(parents=True)
        conf.write_text('devices { global_filter = [ "r|other|" ] }')
        node = replace(other.lvm, root=tmp_path)
    assert (
        VolumeGroups(node, other.disks, other.devices, configured.on_groups("data")).unknown_disks()
        == []
    )


def test_a_broken_disk_of_a_known_group_is_no_other_group_s_unless_it_is_attached_anew(
    fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = VolumeGroups(fake.lvm, fake.disks, fake.devices, configured.on_groups("data"))
    next(iter(groups)).state()
    own = fake.lvm2.groups["data"].disks[0].name
    monkeypatch.setattr(fake.disks, "scan", lambda *_: {own: Unreadable("Input/output error")})
    assert groups.unknown_disks() == []
    started = VolumeGroups(fake.lvm, fake.disks, fake.devices, configured.on_groups("data"))
    assert started.unknown_disks() == [(own, "Input/output error")]
    monkeypatch.setattr(fake.disks, "sequences", lambda paths: dict.fromkeys(paths, "another"))
    assert groups.unknown_disks() == [(own, "Input/output error")]


# Several groups


SICK = ["a", "b", "c"]


class SomeHang:
    """lvm2 does not answer for the sick groups, until it is let go."""

    def __init__(self, fake: FakeHost, volume_groups: VolumeGroups) -> None:
        self.asked: set[str] = set()
        self.over = threading.Event()
        self._disks = {volume_groups.lvm(one).devices[0]: one for one in SICK}
        for one in SICK:
            fake.lvm2.groups[one].seqno += 1
        fake.intercept = self

    def __call__(self, words: Sequence[str]) -> None:
        for disk, name in self._disks.items():
            if disk in " ".join(words):
                self.asked.add(name)
                assert self.over.wait(30)


@pytest.fixture
def node(tmp_path: Path) -> tuple[Reports, SomeHang]:
    fake = FakeHost(tmp_path)
    for one in [*SICK, "sound"]:
        fake.lvm2.add_group(one)
    volume_groups = VolumeGroups(
        fake.lvm, fake.disks, fake.devices, configured.on_groups(*SICK, "sound")
    )
    known = Reports(volume_groups)
    known.fresh()
    return known, SomeHang(fake, volume_groups)


def test_groups_that_hang_are_waited_for_together(
    node: tuple[Reports, SomeHang], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SHORT_WAIT_SECONDS", 30)
    known, hanging = node
    with ThreadPoolExecutor(1) as caller:
        read = caller.submit(known.hint)
        expect.soon(lambda: hanging.asked == set(SICK), lambda: hanging.asked)
        hanging.over.set()
        assert set(read.result(20).groups) == {*SICK, "sound"}


def test_tags_are_read_once_for_each_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeHost(tmp_path)
    group = fake.lvm2.add_group("sound")
    volume_groups = VolumeGroups(fake.lvm, fake.disks, fake.devices, configured.on_groups("sound"))
    known = Reports(volume_groups)
    for name in ("a", "b"):
        new = volumes.New(f"vol-{name}", 4 << 20, {"name": name})
        volumes.create(volume_groups.lvm("sound"), "sound", new)
    found = [one.name for one in known.fresh().volumes()]
    assert found == ["vol-a", "vol-b"]
    with monkeypatch.context() as patch:
        patch.setattr(records, "volume", lambda *_: pytest.fail("a volume was read again"))
        assert [one.name for one in known.fresh().volumes()] == found
    del group.volumes["vol-a"]
    group.seqno += 1
    assert [one.name for one in known.fresh().volumes()] == ["vol-b"]
