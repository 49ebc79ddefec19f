"""Labels and metadata of physical volumes, as lvm2's sources say that they stand on a disk."""

import itertools
import os
import struct
from pathlib import Path

import pytest
from fakes.images import (
    AREA_BYTES,
    DASHED,
    DISK_BYTES,
    FIRST,
    GROUP_UUID,
    LAST,
    SMALL,
    UUIDS,
    Area,
    Image,
    checksum,
    metadata,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from lvm import labels
from lvm.labels import Damaged, Group, PhysicalLabel


def put(directory: Path, data: bytes | bytearray) -> str:
    file = directory / "disk"
    file.write_bytes(data)
    return str(file)


def look(directory: Path, image: Image) -> PhysicalLabel:
    found = labels.read(put(directory, image.bytes()))
    assert isinstance(found, PhysicalLabel), found
    return found


def texts(directory: Path, image: Image) -> int:
    """How many committed texts the proof has."""
    mark = labels.mark(put(directory, image.bytes()))
    assert mark is not None
    assert mark.uuid == DASHED[0]
    return len(mark.texts)


def test_a_label_names_the_disk_and_its_group(tmp_path: Path) -> None:
    added = {"system_id": "node 1", "lock_type": "sanlock"}
    status = frozenset({"RESIZEABLE", "READ", "WRITE", "EXPORTED"})
    text = metadata(7, ', "EXPORTED"', **added)
    label = look(tmp_path, Image([Area(text=text)]))
    group = Group("data", GROUP_UUID, 7, DASHED, status, "node 1", "sanlock", has_own_tags=True)
    assert label == PhysicalLabel(DASHED[0], DISK_BYTES, True, group)
    assert label.group is not None
    assert label.group.is_exported
    plain = look(tmp_path, Image()).group
    assert plain is not None
    assert (plain.is_exported, plain.system_id, plain.lock_type) == (False, "", "")


@pytest.mark.parametrize("sector", range(4))
def test_a_label_is_found_in_each_of_the_first_four_sectors(tmp_path: Path, sector: int) -> None:
    assert look(tmp_path, Image(sector=sector)).uuid == DASHED[0]


def test_a_label_behind_a_damaged_one_counts(tmp_path: Path) -> None:
    image = Image(sector=2).bytes()
    image[512:520] = b"LABELONE"
    assert isinstance(labels.read(put(tmp_path, image)), PhysicalLabel)


@pytest.mark.parametrize("size", [0, 100, 1000, 4096, 1 << 16])
def test_a_blank_disk_has_no_label(tmp_path: Path, size: int) -> None:
    disk = put(tmp_path, bytes(size))
    assert (labels.read(disk), labels.mark(disk)) == (None, None)
    beyond = put(tmp_path, Image(sector=1).bytes()[:512] + bytes(1536) + b"LABELONE" + bytes(2048))
    assert labels.read(beyond) is None


@pytest.mark.parametrize(
    ("image", "is_used"),
    [
        (Image([Area()], extension=(2, 0)), False),
        (Image([], extension=(2, 1)), True),
        (Image([Area(text=metadata(), flags=1)]), True),
        # The flag is the second version's.
        (Image([], extension=(1, 1)), False),
    ],
    ids=["in no group", "no metadata area", "metadata ignored", "an old lvm2's"],
)
def test_a_disk_may_name_no_group(tmp_path: Path, image: Image, is_used: bool) -> None:
    label = look(tmp_path, image)
    assert (label.uuid, label.group, label.is_used) == (DASHED[0], None, is_used)
    assert texts(tmp_path, image) == 0


@pytest.mark.parametrize(
    "areas",
    [
        *(
            [Area(text=metadata(a)), Area(LAST, text=metadata(b))]
            for a, b in ((8, 9), (9, 8), (9, 9))
        ),
        # As on a machine with pages of 64 KiB; and where it begins within a block.
        *([Area(start, text=metadata(9))] for start in (65536, 6656)),
        # Text that goes on behind the header, where the area ends.
        *([Area(offset=AREA_BYTES - one, text=metadata(9))] for one in (1, 511, 512, 700)),
    ],
)
def test_the_newest_text_of_all_areas_counts_and_each_is_in_the_mark(
    tmp_path: Path, areas: list[Area]
) -> None:
    label = look(tmp_path, Image(areas))
    assert label.group is not None
    assert (label.group.seqno, label.damage) == (9, ())
    assert texts(tmp_path, Image(areas)) == len(areas)


def test_precommitted_text_is_ignored(tmp_path: Path) -> None:
    plain, begun = Image(), Image([Area(text=metadata(), precommitted=(4096, 900, 77))])
    assert look(tmp_path, begun) == look(tmp_path, plain)
    before = labels.mark(put(tmp_path, plain.bytes()))
    assert labels.mark(put(tmp_path, begun.bytes())) == before


def test_each_commit_changes_the_mark_and_nothing_else_does(tmp_path: Path) -> None:
    disk = put(tmp_path, Image().bytes())
    first = labels.mark(disk)
    assert first == labels.mark(disk)
    put(tmp_path, Image([Area(text=metadata(2))]).bytes())
    # The same place, as after a whole round, and as much of it.
    second = labels.mark(disk)
    put(tmp_path, Image([Area(offset=4096, text=metadata(2))]).bytes())
    assert len({first, second, labels.mark(disk)}) == 3
    other = Image(uuid=UUIDS[1])
    assert labels.mark(put(tmp_path, other.bytes())) != first
    data = Image().bytes()
    data[80000:80008] = b"tenant's"
    assert labels.mark(put(tmp_path, data)) == first


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        (Image(tells_sector=3), "one of sector 3"),
        (Image(kind=b"LVM1 001"), "not LVM2's"),
        (Image(uuid="?" * 32), "no UUID"),
        (Image(uuid=""), "no UUID"),
        (Image(offset=500), "past its sector"),
        (Image(offset=0xFFFFFFFF), "past its sector"),
        (Image([Area(4096 * number) for number in range(1, 28)]), "past its sector"),
    ],
)
def test_a_damaged_label_is_reported(tmp_path: Path, image: Image, problem: str) -> None:
    disk = put(tmp_path, image.bytes())
    found = labels.read(disk)
    assert isinstance(found, Damaged)
    assert problem in str(found)
    assert labels.mark(disk) is None


DAMAGES: dict[str, tuple[Area, str]] = {
    "magic": (Area(text=metadata(), magic=b"x"), "not the header"),
    "version": (Area(text=metadata(), version=2), "not the header"),
    "start": (Area(text=metadata(), tells_start=8192), "not the header"),
    "offset in the header": (Area(offset=100, tells_length=50), "outside"),
    "offset past the end": (Area(offset=AREA_BYTES, tells_length=50), "outside"),
    "length": (Area(tells_length=AREA_BYTES), "outside"),
    "no room": (Area(size=0, tells_length=5), "outside"),
    "far too long": (Area(size=1 << 60, tells_length=1 << 50), "would have"),
    "past the disk's end": (Area(size=1 << 40, offset=1 << 30, tells_length=90), "disk's end"),
    "where no disk is": (Area(size=1 << 63, offset=(1 << 63) - 90, tells_length=9), "no disk"),
    "empty": (Area(text=b"\0"), "no group"),
    "no form": (Area(text=b'data { id = "a'), "lvm2's form"),
    "not ended": (Area(text=b"data {\nseqno = 1\n"), "lvm2's form"),
    "not begun": (Area(text=b"}"), "not begun"),
    "no id": (Area(text=b"data {\nseqno = 1\n}"), "no group"),
    "no number": (Area(text=b'data {\nid = "a"\nseqno = many\n}'), "no group"),
    "no end of digits": (Area(text=b'd {\nid = "a"\nseqno = %s\n}' % (b"9" * 5000)), "no group"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_of_one_area_is_reported_beside_the_other_area(tmp_path: Path, damage: str) -> None:
    area, problem = DAMAGES[damage]
    alone = look(tmp_path, Image([area]))
    assert (alone.uuid, alone.group) == (DASHED[0], None)
    assert problem in str(alone.damage)
    beside = look(tmp_path, Image([area, Area(LAST, text=metadata(4))]))
    assert beside.group is not None
    assert (beside.group.seqno, beside.damage) == (4, alone.damage)


@pytest.mark.parametrize(
    ("at", "kind", "has_mark"),
    [
        *((512 + at, Damaged, False) for at in (16, 20, 24, 32, 64, 72, 500)),
        *((FIRST + at, PhysicalLabel, False) for at in (0, 4, 20, 24, 32, 40, 48, 56, 500)),
        # The text is not needed to see that it is as it was.
        *((FIRST + 512 + at, PhysicalLabel, True) for at in (0, 40, 600)),
    ],
)
def test_a_bit_that_turned_is_damage(tmp_path: Path, at: int, kind: type, has_mark: bool) -> None:
    image = Image().bytes()
    image[at] ^= 1
    disk = put(tmp_path, image)
    found = labels.read(disk)
    assert isinstance(found, kind)
    assert not isinstance(found, PhysicalLabel) or (found.damage and not found.group)
    assert (labels.mark(disk) is not None) == has_mark


def test_an_area_past_the_disk_s_end_is_damage_without_a_mark(tmp_path: Path) -> None:
    image = Image([Area(), Area(LAST)]).bytes()
    disk = put(tmp_path, image[:LAST])
    found = labels.read(disk)
    assert isinstance(found, PhysicalLabel)
    assert "past the disk's end" in str(found.damage)
    assert labels.mark(disk) is None


def test_a_text_that_changes_during_the_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torn = Image().bytes()
    torn[FIRST + 600] ^= 1
    disk, read = put(tmp_path, torn), os.preadv
    looks = itertools.count()

    def and_then_written(descriptor: int, buffers: list[bytearray], offset: int) -> int:
        if next(looks) == 1:
            put(tmp_path, Image([Area(offset=4096, text=metadata(2))]).bytes())
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", and_then_written)
    found = labels.read(disk)
    assert isinstance(found, PhysicalLabel)
    assert found.group is not None
    assert (found.group.seqno, found.damage) == (2, ())


def test_a_disk_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    for function in (labels.read, labels.mark):
        with pytest.raises(FileNotFoundError):
            function(str(tmp_path / "none"))


def test_a_disk_is_read_by_direct_io_where_possible_and_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = put(tmp_path, Image().bytes())
    opened, flags, real = set(Path("/proc/self/fd").iterdir()), list[int](), os.open

    def refusing(path: str, how: int) -> int:
        flags.append(how)
        if how & os.O_DIRECT:
            raise OSError(22, "no direct I/O", path)
        return real(path, how)

    monkeypatch.setattr(os, "open", refusing)
    assert isinstance(labels.read(disk), PhysicalLabel)
    assert [bool(how & os.O_DIRECT) for how in flags] == [True, False]
    assert {how & os.O_ACCMODE for how in flags} == {os.O_RDONLY}
    assert set(Path("/proc/self/fd").iterdir()) == opened


@settings(max_examples=100, deadline=None)
@given(
    changes=st.lists(
        st.tuples(
            st.one_of(st.integers(0, 2047), st.integers(FIRST, FIRST + 2600)),
            st.binary(min_size=1, max_size=24),
        ),
        max_size=5,
    ),
    mends=st.booleans(),
)
def test_no_bytes_of_a_label_or_a_header_raise(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, bytes]], mends: bool
) -> None:
    image = Image(size=SMALL).bytes()
    for at, data in changes:
        image[at : at + len(data)] = data
    if mends:
        # As if lvm2 had written just that.
        image[528:532] = struct.pack("<I", checksum(bytes(image[532:1024])))
        image[FIRST : FIRST + 4] = struct.pack(
            "<I", checksum(bytes(image[FIRST + 4 : FIRST + 512]))
        )
    disk = put(tmp_path_factory.getbasetemp(), image)
    labels.read(disk)
    labels.mark(disk)


WORDS = st.sampled_from(
    [*'{}[]=#",\\ \n', "data", "id", "seqno", "1", '"a"', "physical_volumes", "pv0", "\xe9", "["]
)


@settings(max_examples=100, deadline=None)
@given(text=st.one_of(st.lists(WORDS, max_size=60).map("".join), st.text(max_size=80)))
def test_no_text_raises(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    data = text.encode(errors="replace") or b"\0"
    disk = put(tmp_path_factory.getbasetemp(), Image([Area(text=data)], size=SMALL).bytes())
    assert isinstance(labels.read(disk), PhysicalLabel)


@pytest.mark.parametrize("part", ["#a", '"', '"a\\', "[", "[ ", '["', "{", "a", "a {", " ", "= ["])
def test_no_text_takes_long(tmp_path: Path, part: str) -> None:
    # Where the parser went back to try again, the first of these would take years.
    for text in (part * 20000, f"data {{\nid = {part * 20000}\n}}"):
        area = Area(size=1 << 18, text=text.encode())
        assert look(tmp_path, Image([area], size=1 << 19)).damage
