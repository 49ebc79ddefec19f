"""mountinfo is parsed exactly."""

import re
from contextlib import suppress

import pytest
from fakes.devices import FakeDevices
from fakes.kernel import FakeKernel, render
from hypothesis import given
from hypothesis import strategies as st

from mount import table
from mount.table import Mount, Table

# A line of proc(5), and ones as the kernel writes them.
EXAMPLE = (
    "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n"
    "40 36 253:3 / /mnt2/a\\040b\\134c ro,relatime shared:7 master:2 - xfs /dev/dm-3 rw,nouuid\n"
    "41 36 0:6 /dm-3 /mnt2/block rw - devtmpfs devtmpfs rw,size=4k\n"
)

_words = st.text(
    st.characters(exclude_characters="\0,", exclude_categories=["Cs"]), min_size=1, max_size=12
)
_plain = st.from_regex(r"[a-z][a-z0-9_.:=-]{0,11}", fullmatch=True).filter(lambda word: word != "-")
# As the kernel writes them: each slash once, none at the end.
_paths = _words.map(lambda word: re.sub("/+", "/", f"/{word}").rstrip("/") or "/")
_numbers = st.integers(0, 2**20)
_mounts = st.builds(
    Mount,
    mount_id=_numbers,
    parent_id=_numbers,
    device=st.tuples(_numbers, _numbers),
    root=_paths,
    path=_paths,
    options=st.lists(_plain, min_size=1).map(tuple),
    propagation=st.lists(_plain).map(tuple),
    fs_type=_plain,
    source=_words,
    super_options=st.lists(_words, min_size=1).map(tuple),
)


def mount(mount_id: int, parent_id: int, path: str, **fields: str) -> Mount:
    source = fields.get("source", "/dev/dm-3")
    device = (253, int(source.rpartition("-")[2]))
    return Mount(mount_id, parent_id, device, "/", path, ("rw",), (), "ext4", source, ("rw",))


def rendered(*mounts: Mount) -> Table:
    return Table("".join(render(one) + "\n" for one in mounts))


def test_every_field_of_a_line_is_parsed() -> None:
    first, second, third = Table(EXAMPLE).mounts

    assert first == Mount(
        mount_id=36,
        parent_id=35,
        device=(98, 0),
        root="/mnt1",
        path="/mnt2",
        options=("rw", "noatime"),
        propagation=("master:1",),
        fs_type="ext3",
        source="/dev/root",
        super_options=("rw", "errors=continue"),
    )
    assert second.path == "/mnt2/a b\\c"
    assert second.propagation == ("shared:7", "master:2")
    assert third.propagation == ()
    assert str(second) == "/dev/dm-3 (xfs, ro)"
    assert str(third) == "devtmpfs[/dm-3] (devtmpfs, rw)"
    [sourceless] = Table("1 1 0:5 / / rw - tmpfs  rw\n").mounts
    assert sourceless.source == ""


@pytest.mark.parametrize(
    ("own", "superblock", "read_only"),
    [("rw", "rw,errors=remount-ro", False), ("ro", "rw", True), ("rw", "ro", True)],
)
def test_a_mount_is_read_only_by_itself_or_by_its_superblock(
    own: str, superblock: str, read_only: bool
) -> None:
    [found] = Table(f"1 1 8:1 / / {own} - ext4 /dev/sda1 {superblock}\n").mounts
    assert found.read_only == read_only


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1",
        "36 35 98 /mnt1 /mnt2 rw - ext3 /dev/root rw",
        "x 35 98:0 /mnt1 /mnt2 rw - ext3 /dev/root rw",
        "36 35 98:0 /mnt1 /mnt2 rw - ext3 /dev/root",
    ],
)
def test_the_error_of_another_line_shows_it(line: str) -> None:
    with pytest.raises(ValueError, match="not a line of mountinfo"):
        _ = Table(line).mounts


@given(st.lists(_mounts, max_size=3))
def test_what_is_rendered_is_parsed_back(mounts: list[Mount]) -> None:
    text = "".join(render(mount) + "\n" for mount in mounts)

    assert Table(text).mounts == tuple(mounts)


@given(st.text())
def test_any_text_is_a_table_or_a_value_error(text: str) -> None:
    with suppress(ValueError):
        assert len(Table(text).mounts) == len([line for line in text.split("\n") if line])


@given(st.permutations([mount(5, 1, "/a"), mount(6, 5, "/a"), mount(7, 6, "/a")]))
def test_stacked_mounts_are_listed_bottom_to_top_in_any_order(mounts: list[Mount]) -> None:
    found = rendered(*mounts).at("/a")

    assert [one.mount_id for one in found] == [5, 6, 7]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6))
def test_even_a_table_that_cannot_be_is_listed_whole(links: list[tuple[int, int]]) -> None:
    mounts = tuple(mount(own, parent, "/a") for own, parent in dict.fromkeys(links))

    assert set(rendered(*mounts).at("/a")) == set(mounts)


@given(st.lists(_mounts, max_size=6, unique=True), _mounts)
def test_a_question_finds_what_a_look_at_every_mount_finds(rest: list[Mount], one: Mount) -> None:
    mounts = [*rest, one]
    known = rendered(*mounts)

    assert set(known.at(one.path)) == {m for m in mounts if m.path == one.path}
    assert known.top(one.path) in known.at(one.path)
    assert set(known.of_device(one.device)) == {m for m in mounts if m.device == one.device}
    assert set(known.of_types({one.fs_type})) == {m for m in mounts if m.fs_type == one.fs_type}
    parent = one.path.rpartition("/")[0]
    assert set(known.under(parent)) == {
        m for m in mounts if m.path.startswith(f"{parent}/") and m.path != parent
    }


def test_mounts_are_found_by_path_device_and_parent() -> None:
    root, inner, other = (
        mount(1, 1, "/"),
        mount(2, 1, "/a/b"),
        mount(3, 1, "/ab", source="/dev/x-9"),
    )
    mounts = rendered(root, inner, other)

    assert mounts.at("/a") == ()
    assert mounts.of_device((253, 9)) == (other,)
    assert mounts.under("/a") == (inner,)
    assert mounts.under("/") == (inner, other)
    assert mounts.holding("/a/b/c") == inner
    assert mounts.holding("/a/c") == root
    assert rendered(inner).holding("/x") is None


def test_btrfs_is_found_by_its_block_device() -> None:
    devices = FakeDevices()
    device = devices.add("/dev/data/web", 1 << 30)
    kernel = FakeKernel(devices)
    line = "50 1 0:45 / /mnt rw - btrfs /dev/data/web rw"
    kernel.mounts += Table(line + "\n" + line.replace("/web", "/gone")).mounts

    found = table.read(kernel)

    assert [one.source for one in found.of_device(device.number)] == ["/dev/data/web"]
    assert [one.source for one in found.of_device((0, 45))] == ["/dev/data/gone"]
