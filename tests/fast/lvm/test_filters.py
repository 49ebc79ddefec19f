"""Which disks the filters of lvm.conf(5) accept."""

from pathlib import Path

import pytest
from fakes.images import GROUP_UUID, metadata

from lvm import blockdevices, lvm2


def accepted(root: Path, text: str, *paths: str, local: str = "") -> set[str]:
    """Those of the paths that are accepted."""
    (root / "etc/lvm").mkdir(parents=True, exist_ok=True)
    (root / "etc/lvm/lvm.conf").write_text(text)
    (root / "etc/lvm/lvmlocal.conf").write_text(local)
    accepts = blockdevices.read(root)
    return {path for path in paths if accepts is None or accepts(path)}


DISKS = ("/dev/carver-no-sda", "/dev/carver-no-sdb", "/dev/carver-no-rbd0")
A, B, RBD = DISKS


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", DISKS),
        ('# devices/filter = [ "r|.*|" ]\ndevices {\n\tdir = "/dev"\n}\n', DISKS),
        ('devices {\n filter = [ "r|no-rbd|" ]\n}', (A, B)),
        ('devices { filter = [ "a|sda$|", "r|.*|" ] }', (A,)),
        ('devices { filter = "r/sda/" }', (B, RBD)),
        ('devices { filter = [ "r(sda)", "r[sdb]", "a{rbd}" ] }', (RBD,)),
        ('devices/filter = [ "r|/dev/carver-no-sd|" ]', (RBD,)),
        ('devices { global_filter = [ "r|rbd|" ]\n filter = [ "r|sda|" ] }', (B,)),
        ('devices { filter = [ "r|unclosed" ] }', DISKS),
        ('devices { filter = [ "r|rbd|" ]', DISKS),
    ],
    ids=range(10),
)
def test_a_disk_is_accepted_unless_a_pattern_before_rejects_it(
    text: str, found: tuple[str, ...], tmp_path: Path
) -> None:
    assert accepted(tmp_path, text, *DISKS) == set(found)


def test_lvmlocal_conf_outweighs_lvm_conf(tmp_path: Path) -> None:
    text, local = 'devices { filter = [ "r|.*|" ] }', 'devices { filter = [ "r|rbd|" ] }'
    assert accepted(tmp_path, text, *DISKS, local=local) == {A, B}


def test_a_file_that_changed_is_read_anew(tmp_path: Path) -> None:
    assert accepted(tmp_path, 'devices { filter = [ "r|rbd|" ] }', *DISKS) == {A, B}
    assert accepted(tmp_path, "", *DISKS) == set(DISKS)


def test_one_name_that_is_accepted_is_enough() -> None:
    patterns = tuple(blockdevices._patterns('["a|^/dev/disk/by-id/nvme|", "r|.*|"]'))
    assert blockdevices._accepts(patterns, ["/dev/nvme0n1", "/dev/disk/by-id/nvme-x"])
    assert not blockdevices._accepts(patterns, ["/dev/nvme0n1"])


def test_lvm2_s_own_copy_tells_the_uuid_of_a_group(tmp_path: Path) -> None:
    copy = tmp_path / "etc/lvm/backup/data"
    assert lvm2.backed_up(tmp_path, "data") == ""
    copy.parent.mkdir(parents=True)
    about = 'contents = "Text Format Volume Group"\nversion = 1\n\n'
    copy.write_text(about + metadata().decode().rstrip("\0"))
    assert lvm2.backed_up(tmp_path, "data") == GROUP_UUID
    assert lvm2.backed_up(None, "data") == ""
    copy.write_text("data { id = ")
    assert lvm2.backed_up(tmp_path, "data") == ""
