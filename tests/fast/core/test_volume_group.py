"""What is known of a volume group, why it may be believed, and which disks are its."""

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.disks import FakeDisks
from fakes.host import FakeHost
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core import errors, metadata_cache
from agent.core import volume_group as module
from agent.core.disks import Location, locate
from agent.core.metadata_cache import MetadataCache
from agent.core.volume_group import VolumeGroup, begin_states
from agent.core.volume_groups import VolumeGroups
from lvm import errors as lvm_errors
from lvm import report, volumes
from lvm.disks import Fingerprint, Found, Unanswered
from lvm.labels import Group, Kind, PhysicalLabel
from mount import errors as mount_errors
from mount.command import Result, time_limit

MIB = 1 << 20
DATA = "AAAAAA-0000-0000-0000-0000-0000-000000"
TWIN = "AAAAAA-0000-1111-0000-0000-0000-000000"


@pytest.fixture
def known(fake: FakeHost) -> VolumeGroup:
    return of(fake)


def of(fake: FakeHost) -> VolumeGroup:
    found = VolumeGroups(fake.lvm, fake.disks, fake.devices, ["data"]).of("data")
    assert found is not None
    return found


def looks(fake: FakeHost) -> int:
    return sum(words[1] == "fullreport" for words in fake.commands)


def disks(fake: FakeHost) -> FakeDisks:
    assert isinstance(fake.disks, FakeDisks)
    return fake.disks


def create(fake: FakeHost, name: str) -> None:
    volumes.create(fake.lvm, "data", volumes.New(name, 4 * MIB, {}))


# What is known


def test_a_group_is_asked_once_for_as_long_as_nothing_is_written_to_it(
    fake: FakeHost, known: VolumeGroup
) -> None:
    for _ in range(5):
        assert known.state() is not None
    assert looks(fake) == 1
    create(fake, "a")
    found = [known.state() for _ in range(3)]
    assert all(one is not None and "a" in one.volumes for one in found)
    assert looks(fake) == 2
    assert known.status == "ready"


def test_what_a_command_changed_was_seen_by_a_look_that_began_later_only(
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


def test_what_is_written_to_a_disk_of_a_group_has_nobody_look_for_disks(fake: FakeHost) -> None:
    fake.lvm2.add_group("other", [10])
    volume_groups = VolumeGroups(fake.lvm, fake.disks, fake.devices, ["data", "other"])
    every = list(volume_groups)
    for one in every:
        one.state()
    scans = disks(fake).scans
    create(fake, "a")
    volume_groups.outdate(written=fake.lvm2.groups["data"].disks[0].name)
    found = [one.state() for one in every]
    assert found[0] is not None
    assert "a" in found[0].volumes
    assert disks(fake).scans == scans

    volume_groups.outdate(written="/dev/nobodys")
    assert {one.metadata.is_outdated for one in every} == {True}


def test_a_disk_that_joins_the_group_is_seen_by_the_commit_alone(
    fake: FakeHost, known: VolumeGroup
) -> None:
    known.state()
    fake.lvm("vgextend", "--", "data", fake.new_device(40 * MIB))
    found = known.state()
    assert found is not None
    assert (len(found.disks), found.missing_disks) == (2, 0)
    assert len(known.lvm.devices) == 2


def test_a_disk_that_another_takes_the_place_of_is_seen_by_the_commits_alone(
    fake: FakeHost, known: VolumeGroup
) -> None:
    known.state()
    [old], new = known.lvm.devices, fake.new_device(40 * MIB)
    known.metadata.lvm_with(new)("vgextend", "--", "data", new)
    known.state()
    assert sorted(known.lvm.devices) == sorted([old, new])
    known.lvm("vgreduce", "--", "data", old)
    found = known.state()
    assert found is not None
    assert ([one.name for one in found.disks], found.missing_disks) == ([new], 0)
    assert known.lvm.devices == (new,)


def test_a_report_that_met_a_change_is_not_kept(fake: FakeHost, known: VolumeGroup) -> None:
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
    assert looks(fake) == 2


@pytest.mark.parametrize(
    "doubt",
    [
        mount_errors.CommandTimedOut(("lvm", "lvcreate"), 1.0),
        lvm_errors.SessionLost(("lvm", "lvcreate"), "it died"),
        lvm_errors.StillRunning("lvcreate", 1.0),
    ],
    ids=lambda error: type(error).__name__,
)
def test_after_a_command_of_which_nobody_knows_what_it_did_it_is_asked_anew(
    fake: FakeHost, known: VolumeGroup, doubt: Exception
) -> None:
    known.state()

    def fail(words: Sequence[str]) -> Result | None:
        if words[1] == "lvcreate":
            raise doubt
        return None

    fake.intercept = fail
    with pytest.raises(type(doubt)):
        volumes.create(known.lvm, "data", volumes.New("a", 4 * MIB, {}))
    known.state()
    assert looks(fake) == 2


def test_after_a_change_that_failed_it_is_asked_anew_of_what_it_did(
    fake: FakeHost, known: VolumeGroup
) -> None:
    known.state()
    fake.intercept = lambda words: Result(5, "", "half way") if words[1] == "lvcreate" else None
    with pytest.raises(mount_errors.CommandError):
        volumes.create(known.lvm, "data", volumes.New("a", 4 * MIB, {}))
    known.state()
    assert looks(fake) == 2


def test_a_device_that_was_left_suspended_is_seen_to_be_resumed(
    fake: FakeHost, known: VolumeGroup
) -> None:
    create(fake, "a")
    fake.suspend("data", "a")
    found = known.state()
    assert found is not None
    assert found.volumes["a"].suspended
    fake.lvm2.resume("data", "a")
    found = known.state()
    assert found is not None
    assert not found.volumes["a"].suspended


def test_a_report_is_not_believed_for_ever(
    fake: FakeHost, known: VolumeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A number of which differences are exact.
    now = 1024.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    known.state()
    now += metadata_cache._LASTS_SECONDS - 1
    known.state()
    assert looks(fake) == 1
    now += 1
    known.state()
    assert looks(fake) == 2


def test_a_disk_that_came_or_went_is_seen_without_udev(
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
    [ignored] = known.metadata.ignored
    assert ignored[0] == twin.disks[0].name
    assert "another group of that name" in ignored[1]


def test_udev_s_word_has_the_disks_looked_at_at_once(fake: FakeHost, known: VolumeGroup) -> None:
    known.state()
    fake.lvm2.add_group("twin", [10]).name = "data"
    known.metadata.is_outdated = True
    assert known.state() is not None
    assert len(known.metadata.ignored) == 1
    del fake.lvm2.groups["twin"]
    known.metadata.is_outdated = True
    assert known.state() is not None
    assert known.status == "ready"
    assert not known.metadata.ignored


def test_twins_that_nothing_tells_apart_are_refused_until_one_is_gone(
    fake: FakeHost, known: VolumeGroup
) -> None:
    fake.lvm2.add_group("twin", [10]).name = "data"
    with pytest.raises(errors.GroupRefused):
        known.state()
    assert not known.answers
    del fake.lvm2.groups["twin"]
    assert known.state() is not None
    assert known.status == "ready"


@pytest.mark.parametrize("is_read_anew", [False, True], ids=["still known", "read anew"])
def test_forget_during_a_look_has_the_next_one_ask_lvm2(
    fake: FakeHost, known: VolumeGroup, monkeypatch: pytest.MonkeyPatch, is_read_anew: bool
) -> None:
    create(fake, "a")
    known.state()
    if is_read_anew:
        create(fake, "b")
    real, calls = fake.disks.fingerprint, itertools.count()

    def fingerprint(paths: Collection[str], patience_seconds: float = 1.0) -> Fingerprint | None:
        mark = real(paths, patience_seconds)
        # In the second the report was read already, and is about to be kept.
        if next(calls) == is_read_anew:
            # Another call's lvm2 is killed over a change: no commit tells of the suspended device.
            fake.suspend("data", "a")
            known.metadata.forget()
        return mark

    monkeypatch.setattr(fake.disks, "fingerprint", fingerprint)
    known.state()
    before = looks(fake)
    found = known.state()
    assert found is not None
    assert found.volumes["a"].suspended
    assert looks(fake) == before + 1


# A group that does not answer


class Hanging:
    """lvm2 does not answer until it is let go."""

    def __init__(self, fake: FakeHost) -> None:
        self.asked, self.over = threading.Semaphore(0), threading.Event()
        fake.intercept = self

    def __call__(self, words: Sequence[str]) -> None:
        self.asked.release()
        assert self.over.wait(30)


def test_a_glance_does_not_wait_twice_for_a_group_that_hangs(
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
    assert looks(fake) == 2
    create(fake, "a")
    # It answers, and so it is waited for again.
    monkeypatch.setattr(module, "_SHORT_WAIT_SECONDS", 20)
    found = begin_states([known])()["data"]
    assert found is not None
    assert "a" in found.volumes


def test_who_needs_a_group_that_hangs_waits_as_long_as_his_caller(
    fake: FakeHost, known: VolumeGroup
) -> None:
    hanging = Hanging(fake)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(known.state)
        assert hanging.asked.acquire(timeout=20)
        with time_limit(0.05), pytest.raises(errors.GroupBusy):
            known.state()
        hanging.over.set()
        assert first.result(20) is not None


class Endless:
    """Commands of lvm2's of these kinds do not end, though they are told to, until they are let."""

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


def test_nothing_is_changed_before_all_that_did_not_end_has_ended(
    fake: FakeHost, known: VolumeGroup
) -> None:
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
    endless.ended.add("lvextend")
    endless.kinds.clear()
    volumes.create(known.lvm, "data", volumes.New("b", 4 * MIB, {}))
    assert known.state() is not None
    assert not known.is_changed


def test_beside_a_look_that_does_not_end_none_is_begun(fake: FakeHost, known: VolumeGroup) -> None:
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


def test_beside_a_change_that_does_not_end_it_is_looked(fake: FakeHost, known: VolumeGroup) -> None:
    create(fake, "a")
    known.state()
    Endless(fake, "lvextend")
    with pytest.raises(mount_errors.CommandStuck):
        known.lvm("lvextend", "--extents", "+1", "data/a")
    assert known.state() is not None


def test_where_no_thread_can_be_had_to_look_the_next_one_looks(
    known: VolumeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError):
            known.refresh()
    known.refresh().result(20)
    assert known.answers


# Its disks


def told(
    disk: str,
    *disks: str,
    name: str = "data",
    uuid: str = DATA,
    seqno: int = 1,
    status: frozenset[str] = frozenset(),
    lock_type: str = "",
    kind: Kind = Kind.LOCAL,
    active: bool = False,
    own: bool = False,
) -> PhysicalLabel:
    """A disk whose metadata tell of a group."""
    group = Group(
        name, uuid, seqno, disks or (disk,), status, lock_type=lock_type, has_own_tags=own
    )
    groups = frozenset({uuid} if active else ())
    return PhysicalLabel(disk, 1 << 30, True, group, kind=kind, active_groups=groups)


def bare(disk: str) -> PhysicalLabel:
    """One of a group whose metadata are on other disks."""
    return PhysicalLabel(disk, 1 << 30, True, None)


def at(**found: Found) -> Mapping[str, Found]:
    return {f"/dev/{name}": one for name, one in found.items()}


def test_a_group_is_where_its_disks_are_also_those_without_metadata() -> None:
    found = locate(at(sda=told("1", "1", "2"), sdb=bare("2"), sdc=told("3", name="x")), "data")
    assert found is not None
    assert (found.disks, found.missing) == (("/dev/sda", "/dev/sdb"), frozenset())


def test_a_disk_that_is_missing_is_known_by_its_uuid() -> None:
    found = locate(at(sda=told("1", "1", "2")), "data")
    assert found is not None
    assert (found.disks, found.missing) == (("/dev/sda",), frozenset({"2"}))


def test_a_disk_that_comes_back_with_older_metadata_does_not_decide() -> None:
    """It was away while the group lost one disk and was given another."""
    old, new = told("2", "1", "2", "3", seqno=4), told("1", "1", "2", "4", seqno=9)
    found = locate(at(sda=new, sdb=old, sdc=bare("3"), sdd=bare("4")), "data")
    assert found is not None
    assert found.disks == ("/dev/sda", "/dev/sdb", "/dev/sdd")


REFUSED: dict[str, tuple[Mapping[str, Found], tuple[str, ...]]] = {
    "two of one name": (
        at(sda=told("1"), sdb=told("2", uuid="BBBBBB")),
        ("2 of that name", "/dev/sda", "/dev/sdb", "vgrename"),
    ),
    "two whose ids begin alike": (
        at(sda=told("1"), sdb=told("2", uuid=TWIN)),
        (DATA, TWIN, "vgrename"),
    ),
    "a copy of a disk": (at(sda=told("1"), sdb=told("1")), ("/dev/sda and /dev/sdb", "copy")),
    "a copy of a disk without metadata": (
        at(sda=told("1", "1", "2"), sdb=bare("2"), sdc=bare("2")),
        ("/dev/sdb and /dev/sdc", "vgimportclone"),
    ),
    "exported": (at(sda=told("1", status=frozenset({"EXPORTED"}))), ("vgimport",)),
    "shared": (at(sda=told("1", lock_type="sanlock")), ("sanlock", "vgchange --lock-type none")),
    "shared by an old lvm2": (
        at(sda=told("1", status=frozenset({"CLUSTERED", "READ", "WRITE"}))),
        ("clvmd", "vgchange --lock-type none", "docs/operations.md"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_nobody_can_tell_apart_or_use_is_refused_and_told(case: str) -> None:
    found, words = REFUSED[case]
    with pytest.raises(errors.GroupRefused) as refused:
        locate(found, "data")
    for one in words:
        assert one in str(refused.value)


OTHER = "BBBBBB"
BEFORE = Location(DATA, ("/dev/sda", "/dev/sdb"), disk_uuids=("1", "2"))
INTRUDERS: dict[str, PhysicalLabel] = {
    "the name": told("9", uuid=OTHER, seqno=99),
    "name and UUID": told("9", seqno=99),
    "name and UUID, and says that the group's disks are its own": told(
        "9", "1", "2", "9", seqno=99
    ),
    "a whole copy": told("1", "1", "2", seqno=99),
    "a copy that has another disk": told("1", "1", "9", seqno=99),
}


def own(kind: Kind = Kind.LOCAL, *, active: bool = False, own: bool = False) -> dict[str, Found]:
    """The group's own two disks."""
    return {
        "sda": told("1", "1", "2", kind=kind, active=active, own=own),
        "sdb": told("2", "1", "2", kind=kind, active=active, own=own),
    }


@pytest.mark.parametrize("intruder", INTRUDERS)
@pytest.mark.parametrize("kind", Kind)
def test_a_group_that_is_known_keeps_its_disks(intruder: str, kind: Kind) -> None:
    found = at(**own(), zzz=replace(INTRUDERS[intruder], kind=kind))
    located = locate(found, "data", BEFORE)
    assert located == BEFORE
    assert [path for path, _ in located.ignored] == ["/dev/zzz"]


PROVED: dict[str, tuple[dict[str, Found], Kind]] = {
    "loop": (own(), Kind.ATTACHED),
    "rbd": (own(), Kind.FOREIGN),
    "rbd beside loop": (own(Kind.ATTACHED), Kind.FOREIGN),
    "local, not active": (own(active=True), Kind.LOCAL),
    "local, without tags": (own(own=True), Kind.LOCAL),
    "loop beside loop, not active": (own(Kind.ATTACHED, active=True), Kind.ATTACHED),
}


@pytest.mark.parametrize(
    ("intruder", "case"),
    [
        (intruder, case)
        for intruder in INTRUDERS
        for case in PROVED
        # Of two disks of one kind, each may tell of the other: as after a vgextend by hand.
        if "says that" not in intruder or case in ("loop", "rbd", "rbd beside loop")
    ],
)
def test_at_a_start_the_better_proved_disks_are_the_group_s(intruder: str, case: str) -> None:
    ours, theirs = PROVED[case]
    found = at(**ours, zzz=replace(INTRUDERS[intruder], kind=theirs))
    located = locate(found, "data")
    assert located is not None
    assert located.disks == ("/dev/sda", "/dev/sdb")
    assert [path for path, _ in located.ignored] == ["/dev/zzz"]


@pytest.mark.parametrize("intruder", INTRUDERS)
def test_a_group_is_on_the_disks_that_the_operator_listed(intruder: str) -> None:
    found = at(**own(Kind.ATTACHED), zzz=INTRUDERS[intruder])
    located = locate(found, "data", listed=("/dev/sda", "/dev/sdb"))
    assert located is not None
    assert located.disks == ("/dev/sda", "/dev/sdb")


@pytest.mark.parametrize("intruder", INTRUDERS)
def test_another_driver_s_disk_is_never_a_group_by_itself(intruder: str) -> None:
    found = at(zzz=replace(INTRUDERS[intruder], kind=Kind.FOREIGN))
    assert locate(found, "data") is None
    assert locate(found, "data", listed=("/dev/sda",)) is None
    assert locate(found, "data", listed=("/dev/zzz",)) is not None


def test_a_group_that_went_is_not_replaced_by_one_without_a_disk_in_common() -> None:
    assert locate(at(zzz=INTRUDERS["the name"]), "data", BEFORE) is None
    assert locate(at(zzz=INTRUDERS["name and UUID"]), "data", BEFORE) is None
    # As where it comes back on another path.
    located = locate(at(sdx=told("1", "1", "2"), sdy=told("2", "1", "2")), "data", BEFORE)
    assert located is not None
    assert located.disks == ("/dev/sdx", "/dev/sdy")


def test_a_known_group_follows_what_is_done_to_it_by_hand() -> None:
    grown = (told("1", "1", "2", "3", seqno=2), told("2", "1", "2", "3", seqno=2))
    new = told("3", "1", "2", "3", seqno=2)
    located = locate(at(sda=grown[0], sdb=grown[1], sdc=new), "data", BEFORE)
    assert located is not None
    assert located.disks == ("/dev/sda", "/dev/sdb", "/dev/sdc")
    # One was taken out; it is no physical volume of any group then.
    less = told("2", "2", seqno=5)
    located = locate(at(sda=replace(bare("1"), is_used=False), sdb=less), "data", BEFORE)
    assert located is not None
    assert located.disks == ("/dev/sdb",)
    # It was removed, and made anew of other disks.
    gone = replace(bare("1"), is_used=False)
    found = at(sda=gone, sdc=told("3", uuid=OTHER))
    # The second one is blank.
    located = locate(found, "data", BEFORE, sequences=lambda paths: dict.fromkeys(paths, ""))
    assert located is not None
    assert located.uuid == OTHER
    # It was renamed, and another has the name since.
    renamed = {"sda": told("1", name="old"), "sdc": told("3", uuid=OTHER)}
    located = locate(at(**renamed), "data", BEFORE, sequences=lambda _paths: {"/dev/sda": ""})
    assert located is not None
    assert located.uuid == OTHER


def test_a_foreign_disk_that_hangs_is_no_reason_to_wait_for_a_known_group() -> None:
    before = Location(DATA, ("/dev/sda",), frozenset({"2"}), disk_uuids=("1",))
    found = at(sda=told("1", "1", "2"), rbd0=Unanswered())
    assert locate(found, "data", before) == before
    with pytest.raises(errors.GroupSilent):
        locate(at(sda=told("1", "1", "2"), rbd0=Unanswered()), "data", BEFORE)


def test_a_disk_that_does_not_answer_leaves_open_whether_a_group_is_here() -> None:
    silent = Unanswered()
    with pytest.raises(errors.GroupSilent, match="/dev/sdb"):
        locate(at(sda=told("1", name="x"), sdb=silent), "data")
    with pytest.raises(errors.GroupSilent):
        locate(at(sda=told("1", "1", "2"), sdb=silent), "data")
    # What is whole needs no other.
    assert locate(at(sda=told("1"), sdb=silent), "data") is not None
    assert locate(at(sda=told("1", name="x")), "data") is None


def test_a_group_comes_goes_and_is_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeHost(tmp_path)
    known, seen = of_late(fake), list[str]()

    def states() -> list[str]:
        seen.append(known.status)
        return seen[-1:]

    assert known.state() is None
    assert states() == ["absent"]
    assert fake.commands == []
    made = fake.lvm2.add_group("data", [10, 10])
    assert known.state() is not None
    made.disks[1].missing = True
    known.metadata.is_outdated = True
    found = known.state()
    assert found is not None
    assert found.missing_disks == 1
    assert states() == ["partial"]
    made.disks[1].missing = False
    assert known.state() is not None
    assert states() == ["ready"]
    del fake.lvm2.groups["data"]
    assert known.state() is None
    assert states() == ["absent"]
    fake.lvm2.groups["data"] = made
    assert known.state() is not None
    assert caplog.text.count("is not on this node:") == 2
    assert caplog.text.count("is on this node again") == 2


def of_late(fake: FakeHost) -> VolumeGroup:
    """The engine of a group that is not there yet."""
    return next(iter(VolumeGroups(fake.lvm, fake.disks, fake.devices, ["data"])))


# Behind Carver's back


def _create(fake: FakeHost, serial: Iterator[int]) -> None:
    create(fake, f"by-hand-{next(serial)}")


def _remove(fake: FakeHost, _serial: Iterator[int]) -> None:
    for name in list(fake.lvm2.groups["data"].volumes)[:1]:
        fake.lvm("lvremove", "--yes", "--", f"data/{name}")


def _rename(fake: FakeHost, serial: Iterator[int]) -> None:
    """lvrename, as it is on the disks."""
    found = fake.lvm2.groups["data"].volumes
    for old in [name for name, one in found.items() if not one.active][:1]:
        volume = found.pop(old)
        volume.name = f"renamed-{next(serial)}"
        found[volume.name] = volume
        fake.lvm2.groups["data"].seqno += 1


def _deactivate(fake: FakeHost, _serial: Iterator[int]) -> None:
    for name in list(fake.lvm2.groups["data"].volumes)[-1:]:
        fake.deactivate("data", name)


def _tag(fake: FakeHost, serial: Iterator[int]) -> None:
    for name in list(fake.lvm2.groups["data"].volumes)[:1]:
        fake.lvm("lvchange", "--addtag", f"t{next(serial)}", "--", f"data/{name}")


def _extend_group(fake: FakeHost, _serial: Iterator[int]) -> None:
    fake.lvm("vgextend", "--", "data", fake.new_device(40 * MIB))


def _move(fake: FakeHost, _serial: Iterator[int]) -> None:
    """pvmove, as it is on the disks: the same size on another."""
    group = fake.lvm2.groups["data"]
    for volume in list(group.volumes.values())[:1]:
        size = volume.length
        free = [one for one in group.disks if group.free(one) >= size]
        volume.extents = {free[-1].name: size} if free else volume.extents
        group.seqno += 1


def _rename_group(fake: FakeHost, _serial: Iterator[int]) -> None:
    """vgrename, and back."""
    group = fake.lvm2.groups.get("data") or fake.lvm2.groups["other"]
    for one in list(group.volumes):
        fake.deactivate(group.name, one)
    del fake.lvm2.groups[group.name]
    group.name = "other" if group.name == "data" else "data"
    fake.lvm2.groups[group.name] = group
    group.seqno += 1


DEEDS: dict[str, Callable[[FakeHost, Iterator[int]], None]] = {
    "lvcreate": _create,
    "lvremove": _remove,
    "lvrename": _rename,
    "deactivate": _deactivate,
    "tag": _tag,
    "vgextend": _extend_group,
    "pvmove": _move,
    "vgrename": _rename_group,
}


@settings(max_examples=100)
@given(deeds=st.lists(st.tuples(st.sampled_from(sorted(DEEDS)), st.booleans()), max_size=6))
def test_what_changes_behind_carver_s_back_is_seen_by_the_next_look(
    tmp_path_factory: pytest.TempPathFactory, deeds: list[tuple[str, bool]]
) -> None:
    fake, serial = FakeHost(tmp_path_factory.getbasetemp()), itertools.count()
    fake.lvm2.add_group("data", [30, 30])
    known = of(fake)
    for deed, looked_at in [*deeds, ("tag", True)]:
        if deed != "vgrename" and "data" not in fake.lvm2.groups:
            _rename_group(fake, serial)
        DEEDS[deed](fake, serial)
        if not looked_at:
            continue
        found = known.state()
        fresh = of_late(fake).state()
        if fresh is None or found is None:
            assert found == fresh
            continue
        # Whether one is active the kernel tells, and nobody asks the report.
        assert still(found) == still(fresh)


def still(group: report.Group) -> report.Group:
    """A group without what the kernel is asked for."""
    told = {
        name: replace(one, active=False, read_only=False, overflowed=False)
        for name, one in group.volumes.items()
    }
    return replace(group, volumes=told)


def test_while_the_disks_are_looked_for_a_command_sees_those_that_were_there(
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


def test_a_shell_that_does_not_show_a_group_is_not_believed_before_another_was_asked(
    fake: FakeHost,
) -> None:
    blind, renewed = [True], []

    def run(*words: str) -> Result:
        return Result(0, '{"report": []}', "") if blind[0] else fake.run(*words)

    def renew() -> None:
        renewed.append("a shell")
        blind[0] = not heals[0]

    heals = [True]
    scan = VolumeGroups(fake.lvm, fake.disks, fake.devices, []).scan
    volume_group = VolumeGroup(
        MetadataCache("data", replace(fake.lvm, run=run), fake.disks, fake.devices, scan, renew)
    )
    assert volume_group.state() is not None
    assert len(renewed) == 1
    # One that stays hidden is asked for by one shell at each look, and refused.
    blind[0], heals[0] = True, False
    volume_group.metadata.is_outdated = True
    fake.lvm2.groups["data"].seqno += 1
    for _ in range(3):
        with pytest.raises(errors.GroupRefused, match="does not show it"):
            volume_group.state()
    assert len(renewed) == 2


def test_a_filter_keeps_no_disk_away_that_the_operator_named_and_no_other_joins(
    fake: FakeHost, tmp_path: Path
) -> None:
    conf = tmp_path / "root/etc/lvm/lvm.conf"
    conf.parent.mkdir(parents=True)
    conf.write_text('devices { global_filter = [ "r|.*|" ] }')
    node, own = replace(fake.lvm, root=tmp_path / "root"), fake.lvm2.groups["data"].disks[0].name
    rejected = VolumeGroups(node, fake.disks, fake.devices, ["data"])
    assert rejected.scan() == {}
    assert not rejected.allows(own)
    named = VolumeGroups(node, fake.disks, fake.devices, ["data"], listed=lambda _name: [own])
    assert list(named.scan()) == [own]
    assert named.allows(own)
    assert not named.allows("/dev/other")
    conf.write_text("")
    assert rejected.allows("/dev/other")
