"""Which block devices may be physical volumes: by trees of sysfs, and by filters."""

import os
from pathlib import Path

import pytest
from fakes.sysfs import GROUP_OF_VOLUMES, Sysfs

from lvm import candidate_devices
from lvm.candidate_devices import BlockDevices, Excluded, ExclusionReason
from lvm.labels import Kind


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    """A machine with one disk."""
    made = Sysfs(tmp_path / "sys")
    made.add("sda", "8:0")
    return made


def test_disks_partitions_and_loop_devices_may_be_physical_volumes(sysfs: Sysfs) -> None:
    sysfs.add("nvme0n1", "259:0")
    sysfs.add("nvme0n1p1", "259:1", disk="nvme0n1")
    sysfs.add("loop0", "7:0", loop__backing_file="/var/lib/disk.img")
    sysfs.add("loop1", "7:1", size="0")
    assert BlockDevices(sysfs.root).names == ("loop0", "loop1", "nvme0n1", "nvme0n1p1", "sda")
    assert BlockDevices(sysfs.root).loops_under(["loop0", "loop1"]) == ("loop0",)
    assert sysfs.excluded(loop0=0) == {
        "loop1": Excluded(ExclusionReason.EMPTY),
        "nvme0n1": Excluded(ExclusionReason.PARTITIONED),
    }


def test_the_kind_of_a_disk_depends_on_all_that_is_below_it(sysfs: Sysfs) -> None:
    foreign = ("rbd0", "nbd3", "drbd1000", "zd16")
    for number, name in enumerate(foreign):
        sysfs.add(name, f"24{number}:0")
    sysfs.add("rbd0p1", "240:1", disk="rbd0")
    sysfs.add("loop0", "7:0")
    sysfs.add("dm-0", "253:0", on=("sda",), dm__uuid="CRYPT-LUKS2-x")
    sysfs.add("dm-1", "253:1", on=("loop0",), dm__uuid="CRYPT-LUKS2-y")
    sysfs.add("md0", "9:0", on=("sda", "nbd3"))
    sysfs.add("sdb", "8:16", above="platform/host3/session1/target3:0:0/3:0:0:1/block")
    devices = BlockDevices(sysfs.root)
    kinds = {name: devices.kind(name, {"loop0": 0}) for name in devices.names}
    assert kinds == {
        **dict.fromkeys((*foreign, "rbd0p1", "md0"), Kind.FOREIGN),
        **dict.fromkeys(("loop0", "dm-1", "sdb"), Kind.ATTACHED),
        **dict.fromkeys(("sda", "dm-0"), Kind.LOCAL),
    }


def test_active_volumes_are_no_disks_and_name_the_group_of_theirs(sysfs: Sysfs) -> None:
    sysfs.volume("dm-0", "253:0", "sda")
    sysfs.volume("dm-1", "253:1", "dm-0")
    assert BlockDevices(sysfs.root).active_groups("sda") == {GROUP_OF_VOLUMES}
    assert sysfs.excluded() == {
        "dm-0": Excluded(ExclusionReason.VOLUME, "data-dm-0"),
        "dm-1": Excluded(ExclusionReason.VOLUME, "data-dm-1"),
    }
    assert str(sysfs.excluded()["dm-0"]) == "it is the logical volume data-dm-0"


def test_no_device_above_a_volume_is_read_through_any_stack(sysfs: Sysfs) -> None:
    volume = os.makedev(253, 0)
    sysfs.volume("dm-0", "253:0", "sda")
    # kubelet's loop device over a bind mount of the node, with the guest's partitions.
    sysfs.add("loop0", "7:0", loop__backing_file="/var/lib/kubelet/plugins/x/dev/pod")
    sysfs.add("loop0p2", "259:2", disk="loop0")
    sysfs.add("dm-1", "253:1", on=("loop0p2",), dm__uuid="CRYPT-LUKS2-x", dm__name="guest")
    sysfs.add("md0", "9:0", on=("dm-1",))
    sysfs.add("md0p1", "259:3", disk="md0")
    sysfs.add("loop1", "7:1")
    found = sysfs.excluded(loop0=volume, loop1=os.makedev(259, 3))
    on = Excluded(ExclusionReason.ON_A_VOLUME, "data-dm-0")
    names = ("loop0", "loop0p2", "dm-1", "md0", "md0p1", "loop1")
    assert {name: found[name] for name in names} == dict.fromkeys(names, on)
    assert "sda" not in found


def test_a_loop_device_over_something_unknown_is_excluded(sysfs: Sysfs) -> None:
    sysfs.add("loop0", "7:0")
    sysfs.add("loop0p1", "259:1", disk="loop0")
    unknown = Excluded(ExclusionReason.UNKNOWN, "loop0")
    assert sysfs.excluded() == {"loop0": unknown, "loop0p1": unknown}
    # Over a device that is not there any more.
    assert sysfs.excluded(loop0=os.makedev(253, 9))["loop0"] == unknown


def test_a_loop_device_over_a_device_is_not_a_second_disk(sysfs: Sysfs) -> None:
    sysfs.add("loop0", "7:0")
    sysfs.add("loop1", "7:1")
    found = sysfs.excluded(loop0=os.makedev(8, 0), loop1=0)
    assert found == {"loop0": Excluded(ExclusionReason.SECOND_VIEW, "sda")}
    # Over each other: no endless loop.
    found = sysfs.excluded(loop0=os.makedev(7, 1), loop1=os.makedev(7, 0))
    assert found["loop0"] == Excluded(ExclusionReason.SECOND_VIEW, "loop1")


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("md127", {}),
        ("dm-0", {"dm__uuid": "mpath-36", "dm__name": "mpatha"}),
        ("dm-0", {"dm__uuid": "CRYPT-LUKS2-x", "dm__name": "secret"}),
        ("bcache0", {}),
    ],
)
def test_the_disks_below_another_device_are_taken_and_that_device_is_a_disk(
    sysfs: Sysfs, name: str, more: dict[str, str]
) -> None:
    sysfs.add("sdb", "8:16")
    sysfs.add(name, "240:0", on=("sda", "sdb"), **more)
    sysfs.volume("dm-7", "253:7", name)
    taken = Excluded(ExclusionReason.TAKEN, name)
    volume = Excluded(ExclusionReason.VOLUME, "data-dm-7")
    assert sysfs.excluded() == {"sda": taken, "sdb": taken, "dm-7": volume}
    assert BlockDevices(sysfs.root).active_groups("sda") == frozenset()


def test_other_devices_are_excluded(sysfs: Sysfs) -> None:
    for name, number in (("sr0", "11:0"), ("fd0", "2:0"), ("zram0", "252:0")):
        sysfs.add(name, number)
    sysfs.add("nvme0c0n1", "259:0", hidden="1")
    # A device that goes away meanwhile.
    (sysfs.root / "class/block/sdz").symlink_to("../../devices/gone")
    assert {name: one.reason for name, one in sysfs.excluded().items()} == {
        **dict.fromkeys(("sr0", "fd0", "zram0"), ExclusionReason.NO_DISK),
        "nvme0c0n1": ExclusionReason.PATH,
        "sdz": ExclusionReason.EMPTY,
    }


# Filters of lvm.conf(5)


def accepted(root: Path, text: str, *paths: str, local: str = "") -> set[str]:
    """Those of the paths that are accepted."""
    (root / "etc/lvm").mkdir(parents=True, exist_ok=True)
    (root / "etc/lvm/lvm.conf").write_text(text)
    (root / "etc/lvm/lvmlocal.conf").write_text(local)
    accepts = candidate_devices.read(root)
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


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    assert accepted(tmp_path, 'devices { filter = [ "r|rbd|" ] }', *DISKS) == {A, B}
    assert accepted(tmp_path, "", *DISKS) == set(DISKS)


def test_one_name_that_is_accepted_is_enough() -> None:
    patterns = tuple(candidate_devices._patterns('["a|^/dev/disk/by-id/nvme|", "r|.*|"]'))
    assert candidate_devices._accepts(patterns, ["/dev/nvme0n1", "/dev/disk/by-id/nvme-x"])
    assert not candidate_devices._accepts(patterns, ["/dev/nvme0n1"])
