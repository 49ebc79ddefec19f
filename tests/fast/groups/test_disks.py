"""Which disks are a group's, and which only claim to be: by labels, and by other proofs."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.images import DASHED, GROUP_UUID, UUIDS, Area, Image, metadata

from agent.core import errors
from agent.groups.disk_search import Location, claims, locate, unknown
from lvm import labels
from lvm.candidate_devices import Excluded, ExclusionReason
from lvm.disk_reader import Found, Unanswered, Unreadable
from lvm.labels import Damaged, Group, Kind, PhysicalLabel

DATA = "AAAAAA-0000-0000-0000-0000-0000-000000"
TWIN = "AAAAAA-0000-1111-0000-0000-0000-000000"
MANY = 10**6


def pv(
    disk: str,
    *disks: str,
    name: str = "data",
    uuid: str = DATA,
    seqno: int = 1,
    status: frozenset[str] = frozenset(),
    lock_type: str = "",
) -> PhysicalLabel:
    """A disk whose metadata have a group."""
    group = Group(name, uuid, seqno, disks or (disk,), status, lock_type=lock_type)
    return PhysicalLabel(disk, 1 << 30, True, group)


def bare(disk: str) -> PhysicalLabel:
    """One of a group whose metadata are on other disks."""
    return PhysicalLabel(disk, 1 << 30, True, None)


def empty(disk: str) -> PhysicalLabel:
    """One that was taken out of its group."""
    return PhysicalLabel(disk, 1 << 30, False, None)


def at(**found: Found) -> dict[str, Found]:
    return {f"/dev/{name}": one for name, one in found.items()}


class Machine:
    """Devices as the kernel has them; by their names those of this machine's own, and others'."""

    def __init__(self, **found: Found) -> None:
        self.found = at(**found)
        self.blank: set[str] = set()
        self.attached: Counter[str] = Counter()
        self.active: dict[str, str] = {}
        self.listed: tuple[str, ...] = ()
        self.backup = ""
        self.before: Location | None = None
        self.ignored: tuple[tuple[str, str], ...] = ()

    def sequences(self, paths: Collection[str]) -> Mapping[str, str]:
        there = (self.found.keys() | self.blank).intersection(paths)
        gone = Excluded(ExclusionReason.EMPTY)
        return {path: str(self.attached[path]) for path in there if self.found.get(path) != gone}

    def add(self, **found: Found) -> None:
        """Devices that come, or say something else from now on."""
        self.found |= at(**found)

    def take(self, *names: str) -> None:
        """Detach devices."""
        for one in names:
            del self.found[f"/dev/{one}"]
            self.attached[f"/dev/{one}"] += 1

    def locate(self) -> Location | None:
        seen = {path: self._seen(path, one) for path, one in self.found.items()}
        found = locate(
            seen,
            "data",
            self.before,
            self.listed,
            sequences=self.sequences,
            backed_up=lambda: self.backup,
        )
        self.ignored = tuple(claims(seen, "data")) if found is None else found.ignored
        self.before = found or self.before
        return found

    def _seen(self, path: str, found: Found) -> Found:
        if not isinstance(found, PhysicalLabel):
            return found
        groups = frozenset({self.active[path]} if path in self.active else ())
        sequence = str(self.attached[path])
        return replace(found, kind=kind(path), active_groups=groups, sequence=sequence)

    def found_on(self, *names: str, missing: Collection[str] = ()) -> None:
        """The group is on these devices."""
        found = self.locate()
        assert found is not None
        assert found.disks == tuple(sorted(f"/dev/{one}" for one in names))
        assert found.missing == set(missing)

    def foreign(self) -> dict[str, str]:
        return {path.removeprefix("/dev/"): why for path, why in self.ignored}


def kind(path: str) -> Kind:
    if path.startswith(("/dev/sd", "/dev/nvme")):
        return Kind.LOCAL
    return Kind.ATTACHED if path.startswith("/dev/loop") else Kind.FOREIGN


# Disks that agree


def test_a_group_is_on_all_its_disks_also_without_metadata() -> None:
    Machine(sda=pv("1", "1", "2"), sdb=bare("2"), sdc=pv("3", name="x")).found_on("sda", "sdb")


def test_a_missing_disk_is_known_by_its_uuid() -> None:
    Machine(sda=pv("1", "1", "2")).found_on("sda", missing={"2"})


def test_a_disk_that_is_another_group_s_by_now_is_missing() -> None:
    machine = Machine(sda=pv("1", "1", "2"), sdb=pv("2", name="x", uuid=TWIN))
    machine.found_on("sda", missing={"2"})


@pytest.mark.parametrize("name", ["sdb", "loop0"])
def test_a_returning_disk_with_older_metadata_does_not_decide(name: str) -> None:
    """It was away while the group lost one disk and was given another."""
    old, new = pv("2", "1", "2", "3", seqno=4), pv("1", "1", "2", "4", seqno=9)
    machine = Machine(sda=new, sdc=bare("3"), sdd=bare("4"), **{name: old})
    machine.found_on("sda", name, "sdd")


@pytest.mark.parametrize("names", [("sda", "sdb"), ("loop0", "loop1")])
def test_a_commit_that_was_cut_off_leaves_one_disk_newer(names: tuple[str, str]) -> None:
    first, second = names
    old, new = pv("1", "1", "2", seqno=4), pv("2", "1", "2", seqno=5)
    machine = Machine(**{first: old, second: new})
    machine.active[f"/dev/{first}"] = DATA
    machine.found_on(*names)


def test_a_disk_removed_while_it_was_away_is_reported() -> None:
    machine = Machine(sda=pv("1", seqno=9), sdb=pv("2", "1", "2", seqno=4))
    machine.found_on("sda")
    assert "the group does not have it" in machine.foreign()["sdb"]


# Disks that contradict each other

OWN = at(sda=pv("1", "1", "2", seqno=100), sdb=pv("2", "1", "2", seqno=100))
INTRUDERS: dict[str, tuple[PhysicalLabel, str]] = {
    "name": (pv("evil", uuid=TWIN, seqno=MANY), "another group of that name"),
    "name and UUID": (pv("evil", seqno=MANY), "the group does not have it"),
    "name and UUID, and it lists ours": (
        pv("evil", "1", "2", "evil", seqno=MANY),
        "the group does not have it",
    ),
    "the same, no newer": (
        pv("evil", "1", "2", "evil", seqno=100),
        "the group does not have it",
    ),
    "the same, older": (pv("evil", "1", "2", "evil", seqno=2), "the group does not have it"),
    "the same text, but exported": (
        pv("evil", "1", "2", seqno=100, status=frozenset({"EXPORTED"})),
        "the group does not have it",
    ),
    "a whole copy": (pv("1", "1", "2", seqno=100), "is a copy of /dev/"),
    "a whole copy, newer": (pv("1", "1", "2", seqno=MANY), "is a copy of /dev/"),
    "a whole copy, alone": (pv("1", seqno=MANY), "is a copy of /dev/"),
    "a copy that lists another disk": (pv("1", "1", "3", seqno=99), "is a copy of /dev/"),
    "a label without metadata": (bare("2"), "is a copy of /dev/"),
}


def attacked(intruder: PhysicalLabel, own: str = "sd", other: str = "nbd0") -> Machine:
    found = {f"{own}a": OWN["/dev/sda"], f"{own}b": OWN["/dev/sdb"], other: intruder}
    return Machine(**found)


@pytest.mark.parametrize("kind", INTRUDERS)
@pytest.mark.parametrize(
    ("proof", "own", "other"),
    [
        ("hardware", "sd", "nbd0"),
        ("hardware", "loop", "nbd0"),
        ("hardware", "sd", "loop9"),
        ("listed", "loop", "loop9"),
        ("listed", "loop", "sdz"),
        ("active", "loop", "loop9"),
    ],
)
def test_at_a_start_the_better_proved_disks_are_the_group_s(
    kind: str, proof: str, own: str, other: str
) -> None:
    intruder, says = INTRUDERS[kind]
    machine = attacked(intruder, own, other)
    disks = (f"/dev/{own}a", f"/dev/{own}b")
    machine.listed = disks if proof == "listed" else ()
    machine.active = dict.fromkeys(disks, DATA) if proof == "active" else {}
    machine.found_on(f"{own}a", f"{own}b")
    assert says in machine.foreign()[other]


# Without the one whose newer metadata list all disks: of two local disks one may name another, as
# after a vgextend by hand.
@pytest.mark.parametrize(
    "kind", [one for one in INTRUDERS if one != "name and UUID, and it lists ours"]
)
def test_of_local_disks_the_active_ones_are_the_group_s(kind: str) -> None:
    machine = attacked(INTRUDERS[kind][0], "sd", "sdz")
    machine.active = dict.fromkeys(("/dev/sda", "/dev/sdb"), DATA)
    machine.found_on("sda", "sdb")
    assert INTRUDERS[kind][1] in machine.foreign()["sdz"]


def test_of_equal_groups_the_one_with_carver_s_tags_is_meant() -> None:
    own = pv("1")
    assert own.group is not None
    machine = Machine(sda=replace(own, group=replace(own.group, has_own_tags=True)))
    machine.add(sdb=pv("2", uuid=TWIN, seqno=MANY))
    machine.found_on("sda")


@pytest.mark.parametrize("kind", INTRUDERS)
@pytest.mark.parametrize("other", ["nbd0", "sdz", "aaa"])
@pytest.mark.parametrize("own", ["sd", "loop"])
def test_a_known_group_keeps_its_disks_and_reports_intruders(
    kind: str, own: str, other: str
) -> None:
    intruder, says = INTRUDERS[kind]
    machine = Machine(**{f"{own}a": OWN["/dev/sda"], f"{own}b": OWN["/dev/sdb"]})
    machine.found_on(f"{own}a", f"{own}b")
    assert machine.foreign() == {}
    machine.add(**{other: intruder})
    # Its volumes may be active, where the node activates whatever comes.
    machine.active[f"/dev/{other}"] = DATA if intruder.group is None else intruder.group.uuid
    for _ in range(2):
        machine.found_on(f"{own}a", f"{own}b")
        assert says in machine.foreign()[other]
    machine.take(other)
    machine.found_on(f"{own}a", f"{own}b")
    assert machine.foreign() == {}


def test_a_local_disk_outweighs_an_active_one() -> None:
    """Where a node activates whatever comes."""
    for intruder in (pv("2", uuid=TWIN), pv("2", seqno=MANY), pv("1", seqno=MANY)):
        machine = Machine(sda=pv("1"), loop0=intruder)
        assert intruder.group is not None
        machine.active["/dev/loop0"] = intruder.group.uuid
        machine.found_on("sda")


def test_of_two_groups_of_one_name_the_backed_up_one_is_meant() -> None:
    for backup, disk in ((DATA, "sda"), (TWIN, "sdb")):
        machine = Machine(sda=pv("1"), sdb=pv("2", uuid=TWIN, seqno=MANY))
        machine.backup = backup
        machine.found_on(disk)


def test_a_copy_lacks_the_writes_that_the_other_disks_have() -> None:
    """Of two disks only the first has volumes that are active; the second one was copied."""
    own, later = pv("1", "1", "2", seqno=9), pv("2", "1", "2", seqno=12)
    machine = Machine(loop0=own, loop1=pv("2", "1", "2", seqno=9), loop2=later, loop3=own)
    machine.active["/dev/loop0"] = DATA
    machine.found_on("loop0", "loop1")
    assert machine.foreign().keys() == {"loop2", "loop3"}


@pytest.mark.parametrize("own", ["sd", "loop"])
def test_a_newer_copy_of_a_disk_is_not_preferred(own: str) -> None:
    machine = Machine(**{f"{own}a": pv("1"), f"{own}b": pv("1", seqno=MANY)})
    with pytest.raises(errors.GroupRefused, match="copy"):
        machine.locate()
    # The other disk of the group has the state of the one.
    both = pv("1", "1", "2"), pv("2", "1", "2"), pv("1", "1", "2", seqno=MANY)
    machine = Machine(**{f"{own}{at}": one for at, one in zip("abc", both, strict=True)})
    machine.found_on(f"{own}a", f"{own}b")
    # All of them were copied.
    machine.add(**{f"{own}d": pv("2", "1", "2", seqno=MANY)})
    machine.before = None
    with pytest.raises(errors.GroupRefused, match="copy"):
        machine.locate()


def test_a_foreign_disk_cannot_be_named_by_another_foreign_one() -> None:
    """An older text that names ours and a newer foreign disk does not join them to ours."""
    machine = Machine(
        sda=pv("1", seqno=100),
        nbd0=pv("a", "a", "1", "b", seqno=2),
        nbd1=pv("b", "b", seqno=MANY),
    )
    machine.found_on("sda")
    assert machine.foreign().keys() == {"nbd0", "nbd1"}


def test_a_remote_disk_in_the_place_of_a_missing_one_decides_nothing() -> None:
    machine = Machine(sda=pv("1", "1", "2", seqno=9), nbd0=pv("2", "2", seqno=MANY))
    machine.found_on("sda", missing={"2"})
    assert "missing disk" in machine.foreign()["nbd0"]


REFUSED: dict[str, tuple[Mapping[str, Found], tuple[str, ...]]] = {
    "two of one name": (
        at(sda=pv("1"), sdb=pv("2", uuid="BBBBBB")),
        ("2 of that name", "/dev/sda", "/dev/sdb", "vgrename", "global_filter"),
    ),
    "two whose ids begin alike": (
        at(sda=pv("1"), sdb=pv("2", uuid=TWIN)),
        (DATA, TWIN, "vgrename"),
    ),
    "a copy of a disk": (at(sda=pv("1"), sdb=pv("1")), ("/dev/sda and /dev/sdb", "copy")),
    "a copy of a disk without metadata": (
        at(sda=pv("1", "1", "2"), sdb=bare("2"), sdc=bare("2")),
        ("/dev/sdb and /dev/sdc", "vgimportclone"),
    ),
    "two attached disks that leave each other out": (
        at(loop0=pv("1"), loop1=pv("2", seqno=2)),
        ("/dev/loop0 and /dev/loop1", "contradict", "Detach"),
    ),
    "an attached disk that names another": (
        at(loop0=pv("1"), loop1=pv("2", "1", "2", seqno=2)),
        ("/dev/loop0 and /dev/loop1", "contradict", "Detach"),
    ),
    "exported": (at(sda=pv("1", status=frozenset({"EXPORTED"}))), ("vgimport",)),
    "shared": (at(sda=pv("1", lock_type="sanlock")), ("sanlock", "vgchange --lock-type none")),
    "shared by an old lvm2": (
        at(sda=pv("1", status=frozenset({"CLUSTERED", "READ", "WRITE"}))),
        ("clvmd", "vgchange --lock-type none", "docs/operations.md"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_ambiguous_and_unusable_groups_are_refused(case: str) -> None:
    found, words = REFUSED[case]
    machine = Machine()
    machine.found = dict(found)
    with pytest.raises(errors.GroupRefused) as refused:
        machine.locate()
    for one in words:
        assert one in str(refused.value)


def test_a_refusal_ends_when_the_other_disk_is_gone() -> None:
    machine = Machine(sda=pv("1"), sdb=pv("1"))
    with pytest.raises(errors.GroupRefused):
        machine.locate()
    machine.take("sdb")
    machine.found_on("sda")
    machine.add(sdb=pv("1", seqno=MANY))
    machine.found_on("sda")


def test_a_silent_disk_proves_no_absence() -> None:
    silent = Unanswered()
    with pytest.raises(errors.GroupSilent, match="/dev/sdb"):
        Machine(sda=pv("1", name="x"), sdb=silent).locate()
    with pytest.raises(errors.GroupSilent):
        Machine(sda=pv("1", "1", "2"), sdb=silent).locate()
    # A complete group needs no other disk.
    Machine(sda=pv("1"), sdb=silent).found_on("sda")
    assert Machine(sda=pv("1", name="x")).locate() is None


def test_a_group_that_missed_a_disk_before_does_not_wait_for_a_foreign_one() -> None:
    machine = known(sda=pv("1", "1", "2"))
    machine.add(rbd0=Unanswered())
    machine.found_on("sda", missing={"2"})
    machine = known(sda=pv("1", "1", "2"), sdb=pv("2", "1", "2"))
    machine.take("sdb")
    machine.add(rbd0=Unanswered())
    with pytest.raises(errors.GroupSilent):
        machine.locate()


# What an operator changes while Carver runs


def known(**found: Found) -> Machine:
    machine = Machine(**found)
    assert machine.locate() is not None
    return machine


def test_a_disk_that_a_known_one_names_is_the_group_s() -> None:
    machine = known(sda=pv("1"))
    machine.add(sda=pv("1", "1", "2", seqno=2), nbd0=pv("2", "1", "2", seqno=2))
    machine.found_on("sda", "nbd0")
    assert machine.foreign() == {}


def test_a_disk_replaces_another_between_two_scans() -> None:
    machine = known(sda=pv("1"))
    machine.add(sda=empty("1"), sdb=pv("2", seqno=5))
    machine.found_on("sdb")
    # Also one that is blank now.
    machine.add(sdc=pv("3", seqno=9))
    del machine.found["/dev/sdb"]
    machine.blank.add("/dev/sdb")
    machine.found_on("sdc")


def test_a_group_is_recreated_on_a_disk_of_the_old_one() -> None:
    machine = known(sda=pv("1", "1", "2"), sdb=pv("2", "1", "2"))
    machine.take("sdb")
    machine.found_on("sda", missing={"2"})
    machine.add(sda=pv("3", uuid=TWIN), nbd0=pv("4", uuid="ELSE", seqno=MANY))
    machine.found_on("sda")
    assert machine.foreign().keys() == {"nbd0"}


def test_a_group_is_renamed_and_another_takes_its_name() -> None:
    machine = known(sda=pv("1"))
    machine.add(sda=pv("1", name="old", seqno=2))
    assert machine.locate() is None
    machine.add(sdb=pv("2", uuid=TWIN))
    machine.found_on("sdb")


@pytest.mark.parametrize("gone", [None, Unreadable("I/O error"), Excluded(ExclusionReason.EMPTY)])
def test_after_all_disks_are_gone_no_newcomer_is_the_group(gone: Found | None) -> None:
    machine = known(sda=pv("1"))
    machine.take("sda")
    if gone is not None:
        machine.found["/dev/sda"] = gone
    machine.add(nbd0=pv("evil", uuid=TWIN), nbd1=pv("evil", seqno=MANY), nbd2=pv("1"))
    for _ in range(2):
        assert machine.locate() is None
        assert machine.foreign().keys() == {"nbd0", "nbd1", "nbd2"}
        assert "restart Carver" in machine.foreign()["nbd0"]
    # Its own disk is believed when it is attached again, also by another name.
    machine.add(sdc=pv("1", seqno=2))
    machine.found_on("sdc")
    assert machine.foreign().keys() == {"nbd0", "nbd1", "nbd2"}


def test_a_loop_device_is_attached_again_by_the_same_name() -> None:
    machine = known(loop0=pv("1"))
    machine.take("loop0")
    assert machine.locate() is None
    machine.add(loop0=pv("1"))
    machine.found_on("loop0")


def test_a_copy_with_the_name_of_a_known_device_is_not_trusted() -> None:
    machine = known(sda=pv("1"))
    machine.take("sda")
    machine.add(sda=pv("1", seqno=MANY), sdb=pv("1"))
    with pytest.raises(errors.GroupRefused, match="copy"):
        machine.locate()


def test_a_missing_disk_returns_but_no_newer_copy_of_it() -> None:
    machine = known(sda=pv("1", "1", "2", seqno=5), sdb=pv("2", "1", "2", seqno=5))
    machine.take("sdb")
    machine.add(sda=pv("1", "1", "2", seqno=6))
    machine.found_on("sda", missing={"2"})
    for name, copy in (("nbd0", pv("2", "1", "2", seqno=5)), ("sdx", pv("2", seqno=7))):
        machine.add(**{name: copy})
        machine.found_on("sda", missing={"2"})
        assert "missing disk" in machine.foreign()[name]
    machine.add(sdc=pv("2", "1", "2", seqno=5))
    machine.found_on("sda", "sdc")
    # Two that may be it are none.
    machine.take("sdc")
    machine.add(sdd=pv("2", "1", "2", seqno=5), sde=pv("2", "1", "2", seqno=5))
    machine.found_on("sda", missing={"2"})


def test_a_disk_missing_from_the_first_is_known_by_the_disk_that_named_it() -> None:
    first, second = pv("1", "1", "2"), pv("2", "1", "2")
    machine = known(sda=first)
    machine.take("sda")
    machine.add(nbd0=second)
    assert machine.locate() is None
    machine.add(sdb=second)
    machine.found_on("sdb", missing={"1"})
    assert machine.foreign().keys() == {"nbd0"}


def test_an_exported_group_keeps_its_disks_when_it_is_imported() -> None:
    machine = known(sda=pv("1"))
    machine.add(sda=pv("1", seqno=2, status=frozenset({"EXPORTED"})))
    with pytest.raises(errors.GroupRefused, match="exported"):
        machine.locate()
    machine.add(sda=pv("1", seqno=3), sdb=pv("1", seqno=MANY))
    machine.found_on("sda")


@pytest.mark.parametrize("disks", [("1",), ("1", "2", "3")])
def test_a_foreign_disk_is_a_group_only_where_it_is_listed(disks: tuple[str, ...]) -> None:
    machine = Machine(nbd0=pv("1", *disks))
    assert machine.locate() is None
    assert "`devices`" in machine.foreign()["nbd0"]
    machine.listed = ("/dev/other",)
    assert machine.locate() is None
    machine.listed = ("/dev/nbd0",)
    assert machine.locate() is not None


def written(seqno: int, uuid: str = GROUP_UUID, disk: str = DASHED[0]) -> bytes:
    """The metadata of the images' group, with another UUID, or of another disk."""
    text = metadata(seqno=seqno).decode()
    return text.replace(GROUP_UUID, uuid).replace(DASHED[0], disk).encode()


EVIL = "EviLpv" + "evil" * 5 + "EviLpv"
EVIL_DASHED = "EviLpv-evil-evil-evil-evil-evil-EviLpv"
IMAGES = {
    "name": Image(uuid=EVIL, areas=[Area(text=written(1, TWIN, EVIL_DASHED))]),
    "name and UUID": Image(uuid=EVIL, areas=[Area(text=written(MANY, disk=EVIL_DASHED))]),
    "a whole copy": Image(uuid=UUIDS[0], areas=[Area(text=written(MANY))]),
}


@pytest.mark.parametrize("is_running", [False, True], ids=["before the start", "while it runs"])
@pytest.mark.parametrize("kind", IMAGES)
def test_a_forged_label_takes_no_group_over(tmp_path: Path, kind: str, is_running: bool) -> None:
    def read(name: str, image: Image) -> PhysicalLabel:
        (tmp_path / name).write_bytes(image.bytes())
        found = labels.read(str(tmp_path / name))
        assert isinstance(found, PhysicalLabel)
        return found

    own = [Image(uuid=one, areas=[Area(text=metadata(seqno=100))]) for one in UUIDS]
    machine = Machine(nvme0n1=read("nvme0n1", own[0]), nvme1n1=read("nvme1n1", own[1]))
    if is_running:
        machine.found_on("nvme0n1", "nvme1n1")
    machine.add(rbd0=read("rbd0", IMAGES[kind]))
    machine.found_on("nvme0n1", "nvme1n1")
    assert machine.foreign().keys() == {"rbd0"}


def failing(known_sequence: int, other_sequence: int) -> Machine:
    """A group on two disks, one of which cannot be read any more, and a device with its label."""
    machine = Machine(sda=pv("1", "1", "2"), sdb=pv("2", "1", "2"))
    machine.attached["/dev/sdb"], machine.attached["/dev/sdc"] = known_sequence, other_sequence
    machine.found_on("sda", "sdb")
    machine.add(sdb=Unreadable("Input/output error"), sdc=pv("2", "1", "2"))
    return machine


def test_the_device_below_a_failed_one_is_not_that_disk_until_it_is_gone() -> None:
    machine = failing(known_sequence=44, other_sequence=42)
    for _ in range(3):
        machine.found_on("sda", missing={"2"})
        assert "missing disk" in machine.foreign()["sdc"]
    machine.take("sdb")
    machine.found_on("sda", "sdc")


def test_a_disk_attached_again_beside_its_dead_device_is_back() -> None:
    failing(known_sequence=44, other_sequence=45).found_on("sda", "sdc")


# Disks that may have groups that are not known


def tagged(disk: str, *disks: str, uuid: str = TWIN, name: str = "data") -> PhysicalLabel:
    """A disk of a group that has something of Carver's."""
    made = pv(disk, *disks, uuid=uuid, name=name)
    assert made.group is not None
    return replace(made, group=replace(made.group, has_own_tags=True))


# What is seen beside the group that is known, and whether it may have volumes of Carver's.
MAY_HAVE: Mapping[str, tuple[Found, bool]] = {
    "another of its name": (tagged("9"), True),
    "one of another name": (tagged("9", name="other"), True),
    "one that a network may have": (replace(tagged("9"), kind=Kind.ATTACHED), True),
    "unreadable": (Unreadable("Input/output error"), True),
    "silent": (Unanswered(), True),
    "a damaged label": (Damaged("wrong checksum"), True),
    "metadata that are elsewhere": (bare("9"), True),
    "damaged metadata": (replace(empty("9"), damage=("wrong checksum",)), True),
    "not known what it is over": (Excluded(ExclusionReason.UNKNOWN, "loop0"), True),
    "the group's own": (tagged("9", "1", "9", uuid=DATA), False),
    "the group's without metadata": (bare("2"), False),
    "the operator's": (pv("9", uuid=TWIN, name="root"), False),
    "in no group": (empty("9"), False),
    "a guest's or another driver's": (replace(tagged("9"), kind=Kind.FOREIGN), False),
    "a guest's damaged": (replace(bare("9"), kind=Kind.FOREIGN), False),
    **{
        f"no disk: {why.name}": (Excluded(why, "x"), why is ExclusionReason.UNKNOWN)
        for why in ExclusionReason
    },
}


@pytest.mark.parametrize("one", MAY_HAVE.values(), ids=MAY_HAVE)
@pytest.mark.parametrize("is_own", [False, True])
def test_a_disk_may_have_volumes_that_are_not_known(one: tuple[Found, bool], is_own: bool) -> None:
    """A disk that is known to be the group's own may be broken; it is no other group's for that."""
    seen, may_have = one
    found = at(sda=tagged("1", "1", "2", uuid=DATA), sdz=seen)
    named = [path for path, why in unknown(found, {DATA}, {"/dev/sdz"} if is_own else ()) if why]
    is_another_s = isinstance(seen, PhysicalLabel) and seen.group is not None
    assert named == (["/dev/sdz"] if may_have and (is_another_s or not is_own) else [])


def test_no_guest_s_disk_says_of_which_group_another_is() -> None:
    guest = replace(tagged("8", "8", "9", uuid=DATA), kind=Kind.FOREIGN)
    assert [path for path, _ in unknown(at(nbd0=guest, sdz=bare("9")), {DATA}, ())] == ["/dev/sdz"]
