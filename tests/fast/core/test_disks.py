"""Which disks are a group's, and which only say so: by labels, and by what is on no disk."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.images import DASHED, GROUP_UUID, UUIDS, Area, Image, metadata

from agent.core import errors
from agent.core.disks import Location, claims, locate
from lvm import labels
from lvm.blockdevices import Excluded, Why
from lvm.disks import Found, Unanswered, Unreadable
from lvm.labels import Group, Kind, PhysicalLabel

DATA = "AAAAAA-0000-0000-0000-0000-0000-000000"
TWIN = "AAAAAA-0000-1111-0000-0000-0000-000000"
MANY = 10**6


def told(
    disk: str,
    *disks: str,
    name: str = "data",
    uuid: str = DATA,
    seqno: int = 1,
    status: frozenset[str] = frozenset(),
    lock_type: str = "",
) -> PhysicalLabel:
    """A disk whose metadata tell of a group."""
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
        self.anew: Counter[str] = Counter()
        self.active: dict[str, str] = {}
        self.listed: tuple[str, ...] = ()
        self.backup = ""
        self.before: Location | None = None
        self.ignored: tuple[tuple[str, str], ...] = ()

    def sequences(self, paths: Collection[str]) -> Mapping[str, str]:
        there = (self.found.keys() | self.blank).intersection(paths)
        return {path: str(self.anew[path]) for path in there if not is_empty(self.found.get(path))}

    def add(self, **found: Found) -> None:
        """Devices that come, or say something else from now on."""
        self.found |= at(**found)

    def take(self, *names: str) -> None:
        """Detach devices."""
        for one in names:
            del self.found[f"/dev/{one}"]
            self.anew[f"/dev/{one}"] += 1

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
        sequence = str(self.anew[path])
        return replace(found, kind=kind(path), active_groups=groups, sequence=sequence)

    def found_on(self, *names: str, missing: Collection[str] = ()) -> None:
        """The group is on these devices."""
        found = self.locate()
        assert found is not None
        assert found.disks == tuple(sorted(f"/dev/{one}" for one in names))
        assert found.missing == set(missing)

    def foreign(self) -> dict[str, str]:
        return {path.removeprefix("/dev/"): why for path, why in self.ignored}


def is_empty(found: Found | None) -> bool:
    return found == Excluded(Why.EMPTY)


def kind(path: str) -> Kind:
    if path.startswith(("/dev/sd", "/dev/nvme")):
        return Kind.LOCAL
    return Kind.ATTACHED if path.startswith("/dev/loop") else Kind.FOREIGN


# Disks that agree


def test_a_group_is_where_its_disks_are_also_those_without_metadata() -> None:
    Machine(sda=told("1", "1", "2"), sdb=bare("2"), sdc=told("3", name="x")).found_on("sda", "sdb")


def test_a_disk_that_is_missing_is_known_by_its_uuid() -> None:
    Machine(sda=told("1", "1", "2")).found_on("sda", missing={"2"})


@pytest.mark.parametrize("name", ["sdb", "loop0"])
def test_a_disk_that_comes_back_with_older_metadata_does_not_decide(name: str) -> None:
    """It was away while the group lost one disk and was given another."""
    old, new = told("2", "1", "2", "3", seqno=4), told("1", "1", "2", "4", seqno=9)
    machine = Machine(sda=new, sdc=bare("3"), sdd=bare("4"), **{name: old})
    machine.found_on("sda", name, "sdd")


@pytest.mark.parametrize("names", [("sda", "sdb"), ("loop0", "loop1")])
def test_a_commit_that_was_cut_off_leaves_one_disk_newer(names: tuple[str, str]) -> None:
    first, second = names
    old, new = told("1", "1", "2", seqno=4), told("2", "1", "2", seqno=5)
    machine = Machine(**{first: old, second: new})
    machine.active[f"/dev/{first}"] = DATA
    machine.found_on(*names)


def test_a_disk_that_was_taken_out_while_it_was_away_is_told_of() -> None:
    machine = Machine(sda=told("1", seqno=9), sdb=told("2", "1", "2", seqno=4))
    machine.found_on("sda")
    assert "the group does not have it" in machine.foreign()["sdb"]


# Disks that contradict each other, and what tells them apart

OWN = at(sda=told("1", "1", "2", seqno=100), sdb=told("2", "1", "2", seqno=100))
INTRUDERS: dict[str, tuple[PhysicalLabel, str]] = {
    "name": (told("evil", uuid=TWIN, seqno=MANY), "another group of that name"),
    "name and UUID": (told("evil", seqno=MANY), "the group does not have it"),
    "name and UUID, and it lists ours": (
        told("evil", "1", "2", "evil", seqno=MANY),
        "the group does not have it",
    ),
    "the same, no newer": (told("evil", "1", "2", "evil", seqno=100), "the group does not have it"),
    "the same, older": (told("evil", "1", "2", "evil", seqno=2), "the group does not have it"),
    "the same text, but exported": (
        told("evil", "1", "2", seqno=100, status=frozenset({"EXPORTED"})),
        "the group does not have it",
    ),
    "a whole copy": (told("1", "1", "2", seqno=100), "is a copy of /dev/"),
    "a whole copy, newer": (told("1", "1", "2", seqno=MANY), "is a copy of /dev/"),
    "a whole copy, alone": (told("1", seqno=MANY), "is a copy of /dev/"),
    "a label without metadata": (bare("2"), "is a copy of /dev/"),
}


def attacked(intruder: PhysicalLabel, own: str = "sd", other: str = "nbd0") -> Machine:
    found = {f"{own}a": OWN["/dev/sda"], f"{own}b": OWN["/dev/sdb"], other: intruder}
    return Machine(**found)


def listed(machine: Machine) -> None:
    machine.listed = ("/dev/loopa", "/dev/loopb")


def active(machine: Machine) -> None:
    machine.active = dict.fromkeys(("/dev/loopa", "/dev/loopb"), DATA)


@pytest.mark.parametrize("kind", INTRUDERS)
def test_before_the_start_the_machine_s_own_disks_outweigh_a_foreign_one(kind: str) -> None:
    intruder, says = INTRUDERS[kind]
    machine = attacked(intruder)
    machine.found_on("sda", "sdb")
    assert says in machine.foreign()["nbd0"]


@pytest.mark.parametrize("kind", INTRUDERS)
@pytest.mark.parametrize("proof", [listed, active], ids=lambda one: one.__name__)
def test_before_the_start_what_else_is_on_no_disk_tells_them_apart(
    kind: str, proof: Callable[[Machine], None]
) -> None:
    intruder, says = INTRUDERS[kind]
    machine = attacked(intruder, "loop", "loop9")
    proof(machine)
    machine.found_on("loopa", "loopb")
    assert says in machine.foreign()["loop9"]


@pytest.mark.parametrize("kind", INTRUDERS)
@pytest.mark.parametrize("other", ["nbd0", "sdz", "aaa"])
@pytest.mark.parametrize("own", ["sd", "loop"])
def test_what_is_known_is_kept_whatever_comes_and_the_newcomer_is_told_of(
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


def test_hardware_outweighs_what_is_only_active() -> None:
    """Where a node activates whatever comes."""
    for intruder in (told("2", uuid=TWIN), told("2", seqno=MANY), told("1", seqno=MANY)):
        machine = Machine(sda=told("1"), loop0=intruder)
        assert intruder.group is not None
        machine.active["/dev/loop0"] = intruder.group.uuid
        machine.found_on("sda")


def test_of_two_groups_of_one_name_the_one_is_meant_that_lvm2_had_here() -> None:
    machine = Machine(sda=told("1"), sdb=told("2", uuid=TWIN, seqno=MANY))
    machine.backup = DATA
    machine.found_on("sda")
    machine = Machine(sda=told("1"), sdb=told("2", uuid=TWIN, seqno=MANY))
    machine.backup = TWIN
    machine.found_on("sdb")


def test_a_copy_is_told_by_the_disk_that_was_written_to_with_the_others() -> None:
    """Of two disks only the first has volumes that are active; the second one was copied."""
    own, later = told("1", "1", "2", seqno=9), told("2", "1", "2", seqno=12)
    machine = Machine(loop0=own, loop1=told("2", "1", "2", seqno=9), loop2=later, loop3=own)
    machine.active["/dev/loop0"] = DATA
    machine.found_on("loop0", "loop1")
    assert machine.foreign().keys() == {"loop2", "loop3"}


@pytest.mark.parametrize("own", ["sd", "loop"])
def test_of_a_disk_and_its_copy_the_newer_is_not_taken_for_being_newer(own: str) -> None:
    machine = Machine(**{f"{own}a": told("1"), f"{own}b": told("1", seqno=MANY)})
    with pytest.raises(errors.GroupRefused, match="copy"):
        machine.locate()
    # The other disk of the group has the state of the one.
    both = told("1", "1", "2"), told("2", "1", "2"), told("1", "1", "2", seqno=MANY)
    machine = Machine(**{f"{own}{at}": one for at, one in zip("abc", both, strict=True)})
    machine.found_on(f"{own}a", f"{own}b")
    # All of them were copied.
    machine.add(**{f"{own}d": told("2", "1", "2", seqno=MANY)})
    machine.before = None
    with pytest.raises(errors.GroupRefused, match="copy"):
        machine.locate()


def test_a_foreign_disk_cannot_be_named_by_another_foreign_one() -> None:
    """An older text that names ours and a newer foreign disk joins these to ours for nobody."""
    machine = Machine(
        sda=told("1", seqno=100),
        nbd0=told("a", "a", "1", "b", seqno=2),
        nbd1=told("b", "b", seqno=MANY),
    )
    machine.found_on("sda")
    assert machine.foreign().keys() == {"nbd0", "nbd1"}


def test_a_remote_disk_in_the_place_of_a_missing_one_decides_nothing() -> None:
    machine = Machine(sda=told("1", "1", "2", seqno=9), nbd0=told("2", "2", seqno=MANY))
    machine.found_on("sda", missing={"2"})
    assert "missing disk" in machine.foreign()["nbd0"]


REFUSED: dict[str, tuple[Mapping[str, Found], tuple[str, ...]]] = {
    "two of one name": (
        at(sda=told("1"), sdb=told("2", uuid="BBBBBB")),
        ("2 of that name", "/dev/sda", "/dev/sdb", "vgrename", "global_filter"),
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
    "two attached disks that leave each other out": (
        at(loop0=told("1"), loop1=told("2", seqno=2)),
        ("/dev/loop0 and /dev/loop1", "contradict", "Detach"),
    ),
    "an attached disk that names another": (
        at(loop0=told("1"), loop1=told("2", "1", "2", seqno=2)),
        ("/dev/loop0 and /dev/loop1", "contradict", "Detach"),
    ),
    "exported": (at(sda=told("1", status=frozenset({"EXPORTED"}))), ("vgimport",)),
    "shared": (at(sda=told("1", lock_type="sanlock")), ("sanlock", "vgchange --lock-type none")),
    "shared by an old lvm2": (
        at(sda=told("1", status=frozenset({"CLUSTERED", "READ", "WRITE"}))),
        ("clvmd", "vgchange --lock-type none", "docs/operations.md"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_nothing_tells_apart_or_nobody_can_use_is_refused_and_told(case: str) -> None:
    found, words = REFUSED[case]
    machine = Machine()
    machine.found = dict(found)
    with pytest.raises(errors.GroupRefused) as refused:
        machine.locate()
    for one in words:
        assert one in str(refused.value)


def test_a_refusal_ends_when_the_disk_that_is_not_meant_is_gone() -> None:
    machine = Machine(sda=told("1"), sdb=told("1"))
    with pytest.raises(errors.GroupRefused):
        machine.locate()
    machine.take("sdb")
    machine.found_on("sda")
    machine.add(sdb=told("1", seqno=MANY))
    machine.found_on("sda")


def test_a_disk_that_does_not_answer_leaves_open_whether_a_group_is_here() -> None:
    silent = Unanswered()
    with pytest.raises(errors.GroupSilent, match="/dev/sdb"):
        Machine(sda=told("1", name="x"), sdb=silent).locate()
    with pytest.raises(errors.GroupSilent):
        Machine(sda=told("1", "1", "2"), sdb=silent).locate()
    # What is whole needs no other.
    Machine(sda=told("1"), sdb=silent).found_on("sda")
    assert Machine(sda=told("1", name="x")).locate() is None


# What an operator changes while Carver runs


def known(**found: Found) -> Machine:
    machine = Machine(**found)
    assert machine.locate() is not None
    return machine


def test_a_disk_is_believed_that_a_known_one_names() -> None:
    machine = known(sda=told("1"))
    machine.add(sda=told("1", "1", "2", seqno=2), nbd0=told("2", "1", "2", seqno=2))
    machine.found_on("sda", "nbd0")
    assert machine.foreign() == {}


def test_a_disk_takes_another_s_place_between_two_looks() -> None:
    machine = known(sda=told("1"))
    machine.add(sda=empty("1"), sdb=told("2", seqno=5))
    machine.found_on("sdb")
    # Also one that is blank now.
    machine.add(sdc=told("3", seqno=9))
    del machine.found["/dev/sdb"]
    machine.blank.add("/dev/sdb")
    machine.found_on("sdc")


def test_a_group_is_made_anew_on_a_disk_of_the_old_one() -> None:
    machine = known(sda=told("1", "1", "2"), sdb=told("2", "1", "2"))
    machine.take("sdb")
    machine.found_on("sda", missing={"2"})
    machine.add(sda=told("3", uuid=TWIN), nbd0=told("4", uuid="ELSE", seqno=MANY))
    machine.found_on("sda")
    assert machine.foreign().keys() == {"nbd0"}


def test_a_group_is_renamed_and_another_takes_its_name() -> None:
    machine = known(sda=told("1"))
    machine.add(sda=told("1", name="old", seqno=2))
    assert machine.locate() is None
    machine.add(sdb=told("2", uuid=TWIN))
    machine.found_on("sdb")


@pytest.mark.parametrize("gone", [None, Unreadable("I/O error"), Excluded(Why.EMPTY)])
def test_where_all_its_disks_are_gone_no_newcomer_is_the_group(gone: Found | None) -> None:
    machine = known(sda=told("1"))
    machine.take("sda")
    if gone is not None:
        machine.found["/dev/sda"] = gone
    machine.add(nbd0=told("evil", uuid=TWIN), nbd1=told("evil", seqno=MANY), nbd2=told("1"))
    for _ in range(2):
        assert machine.locate() is None
        assert machine.foreign().keys() == {"nbd0", "nbd1", "nbd2"}
        assert "restart Carver" in machine.foreign()["nbd0"]
    # Its own disk is believed when it is attached again, also by another name.
    machine.add(sdc=told("1", seqno=2))
    machine.found_on("sdc")
    assert machine.foreign().keys() == {"nbd0", "nbd1", "nbd2"}


def test_a_loop_device_is_attached_again_by_the_same_name() -> None:
    machine = known(loop0=told("1"))
    machine.take("loop0")
    assert machine.locate() is None
    machine.add(loop0=told("1"))
    machine.found_on("loop0")


def test_a_copy_that_gets_the_name_of_a_known_device_is_not_known_by_that() -> None:
    machine = known(sda=told("1"))
    machine.take("sda")
    machine.add(sda=told("1", seqno=MANY), sdb=told("1"))
    with pytest.raises(errors.GroupRefused, match="copy"):
        machine.locate()


def test_a_missing_disk_is_believed_that_comes_back_and_no_newer_copy_of_it() -> None:
    machine = known(sda=told("1", "1", "2", seqno=5), sdb=told("2", "1", "2", seqno=5))
    machine.take("sdb")
    machine.add(sda=told("1", "1", "2", seqno=6))
    machine.found_on("sda", missing={"2"})
    for name, copy in (("nbd0", told("2", "1", "2", seqno=5)), ("sdx", told("2", seqno=7))):
        machine.add(**{name: copy})
        machine.found_on("sda", missing={"2"})
        assert "missing disk" in machine.foreign()[name]
    machine.add(sdc=told("2", "1", "2", seqno=5))
    machine.found_on("sda", "sdc")
    # Two that may be it are none.
    machine.take("sdc")
    machine.add(sdd=told("2", "1", "2", seqno=5), sde=told("2", "1", "2", seqno=5))
    machine.found_on("sda", missing={"2"})


def test_a_disk_that_was_missing_from_the_first_is_known_by_those_that_named_it() -> None:
    first, second = told("1", "1", "2"), told("2", "1", "2")
    machine = known(sda=first)
    machine.take("sda")
    machine.add(nbd0=second)
    assert machine.locate() is None
    machine.add(sdb=second)
    machine.found_on("sdb", missing={"1"})
    assert machine.foreign().keys() == {"nbd0"}


def test_an_exported_group_is_known_still_when_it_is_imported() -> None:
    machine = known(sda=told("1"))
    machine.add(sda=told("1", seqno=2, status=frozenset({"EXPORTED"})))
    with pytest.raises(errors.GroupRefused, match="exported"):
        machine.locate()
    machine.add(sda=told("1", seqno=3), sdb=told("1", seqno=MANY))
    machine.found_on("sda")


# By labels as they are on disks


OWN_DASHED = DASHED[0]


def written(seqno: int, uuid: str = GROUP_UUID, disk: str = OWN_DASHED) -> bytes:
    """The metadata of the images' group, with another UUID, or of another disk."""
    text = metadata(seqno=seqno).decode()
    return text.replace(GROUP_UUID, uuid).replace(OWN_DASHED, disk).encode()


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


def test_another_driver_s_disk_that_is_not_believed_alone_is_told_of() -> None:
    machine = Machine(nbd0=told("1"))
    assert machine.locate() is None
    assert "`devices`" in machine.foreign()["nbd0"]


def failing(known_sequence: int, other_sequence: int) -> Machine:
    """A group on two disks, one of which cannot be read any more, and a device with its label."""
    machine = Machine(sda=told("1", "1", "2"), sdb=told("2", "1", "2"))
    machine.anew["/dev/sdb"], machine.anew["/dev/sdc"] = known_sequence, other_sequence
    machine.found_on("sda", "sdb")
    machine.add(sdb=Unreadable("Input/output error"), sdc=told("2", "1", "2"))
    return machine


def test_what_a_device_that_fails_has_below_is_not_that_disk_again() -> None:
    machine = failing(known_sequence=44, other_sequence=42)
    for _ in range(3):
        machine.found_on("sda", missing={"2"})
        assert "missing disk" in machine.foreign()["sdc"]


def test_a_disk_that_is_attached_anew_beside_its_dead_device_is_back() -> None:
    failing(known_sequence=44, other_sequence=45).found_on("sda", "sdc")


def test_the_device_below_is_used_once_that_above_is_gone() -> None:
    machine = failing(known_sequence=44, other_sequence=42)
    machine.found_on("sda", missing={"2"})
    machine.take("sdb")
    machine.found_on("sda", "sdc")
