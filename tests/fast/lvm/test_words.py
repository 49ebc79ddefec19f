"""Names, tags, extents, and lvm2's messages: the parts that need no lvm2."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.images import GROUP_UUID, metadata
from hypothesis import given
from hypothesis import strategies as st

from agent.core import codes
from lvm import layout, lvm2, lvm_errors, names, tags
from lvm.report import Group, PhysicalVolume
from lvm.room import Room
from mount import mount_errors as mount_errors

TEXT = st.text(max_size=128)
ALLOWED = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_+.-")


@given(TEXT)
def test_any_text_survives_being_a_tag(text: str) -> None:
    tag = tags.format_one("name", text)
    assert set(tag) <= ALLOWED | set("/=!:&#")
    assert tags.decode(frozenset({tag})) == {"name": text}


@given(st.dictionaries(st.text(min_size=1), TEXT, max_size=5))
def test_own_tags_survive_being_encoded(own_tags: dict[str, str]) -> None:
    plain = {key: value for key, value in own_tags.items() if "=" not in key}
    assert tags.decode(frozenset(tags.encode(plain))) == plain


def test_tags_of_others_are_left_out() -> None:
    every = frozenset({"backup", "other.name=x", "carver.name", "carver.state=ready"})
    assert tags.decode(every) == {"state": "ready"}


def test_a_value_that_no_tag_can_hold_does_not_fit() -> None:
    assert tags.fits("name", "x" * 1000)
    assert not tags.fits("name", "x" * 1024)


@given(st.text(min_size=1, max_size=128))
def test_any_name_becomes_one_that_lvm_allows(name: str) -> None:
    made = names.logical_volume("vol", name)
    assert set(made) <= ALLOWED
    assert len(names.escaped(made)) <= names.MAXIMUM_ESCAPED_LENGTH
    assert made == names.logical_volume("vol", name)


@given(st.text(min_size=1, max_size=40), st.text(min_size=1, max_size=40))
def test_two_names_are_two_volumes(one: str, other: str) -> None:
    same = names.logical_volume("vol", one) == names.logical_volume("vol", other)
    assert same == (one == other)


def test_a_readable_name_stays_readable_and_no_name_gives_another_s_digest() -> None:
    claim = "pvc-0b5c3c6e-5a0f-4b8e-9d0f-1c2d3e4f5a6b"
    assert names.logical_volume("vol", claim) == f"vol-{claim}"
    digest = names.logical_volume("vol", "a_rimage_0")
    assert digest.startswith("vol.")
    assert names.logical_volume("vol", digest.removeprefix("vol.")) != digest


@pytest.mark.parametrize(
    ("size", "extent", "rounded"), [(0, 4, 4), (1, 4, 4), (4, 4, 4), (5, 4, 8), (9, 4, 12)]
)
def test_sizes_are_whole_extents(size: int, extent: int, rounded: int) -> None:
    assert layout.round_up(size, extent) == rounded


def test_only_disks_that_can_be_used_count_as_room() -> None:
    disks = (
        PhysicalVolume("/dev/a", "a", 10, 4, missing=False, allocatable=True),
        PhysicalVolume("/dev/b", "b", 10, 0, missing=True, allocatable=True),
        PhysicalVolume("/dev/c", "c", 10, 0, missing=False, allocatable=False),
    )
    group = Group("data", "uuid", 4, frozenset(), 1, disks)
    assert layout.maximum_bytes(Room(group)) == 24


# As lvm2 2.03.16 says them; tests/contract shows that it does.
@pytest.mark.parametrize(
    ("stderr", "error"),
    [
        (
            '  Volume group "d" has insufficient free space (1 extents): 2 required.',
            lvm_errors.NoSpace,
        ),
        ("  Insufficient suitable allocatable extents for logical volume v", lvm_errors.NoSpace),
        (
            "  Number of stripes (3) must not exceed number of physical volumes (2)",
            lvm_errors.NoSpace,
        ),
        ("  No specified PVs have space available.", lvm_errors.NoSpace),
        (
            "  VG d 34 metadata on /dev/loop5 (16003 bytes) exceeds maximum metadata size (15616"
            " bytes)\n  Failed to write VG d.",
            lvm_errors.MetadataFull,
        ),
        (
            "  Insufficient suitable contiguous allocatable extents for logical volume v",
            lvm_errors.NoSpace,
        ),
        ("  Not enough PVs with free space available for parallel allocation.", lvm_errors.NoSpace),
        ("  Not enough space for thin pool creation.", lvm_errors.NoSpace),
        (
            "  Not enough space available for metadata area with index 1 on PV /dev/a.",
            lvm_errors.NoSpace,
        ),
        ("  Unable to create RAID(1)0 LV: insufficient number of devices.", lvm_errors.NoSpace),
        (
            "  Cannot create new thin volume, free space in thin pool d/p reached threshold.",
            lvm_errors.PoolKeptFree,
        ),
        (
            "  Free space in pool d/p is above threshold, new volumes are not allowed.",
            lvm_errors.PoolKeptFree,
        ),
        (
            "  Maximum number of logical volumes (3) reached in volume group d",
            lvm_errors.GroupLimited,
        ),
        (
            "  No space for '/dev/b' - volume group 'd' holds max 1 physical volume(s).",
            lvm_errors.GroupLimited,
        ),
        (
            "  Volume too large (8.00 EiB) for extent size 4.00 MiB. Upper limit is less than x.",
            lvm_errors.VolumeTooLarge,
        ),
        (
            "  Unable to extend d/v by 5 logical extents: exceeds limit (4294967295).",
            lvm_errors.VolumeTooLarge,
        ),
        ("  Volume group d is read-only", lvm_errors.GroupProtected),
        ("  Volume group d is exported", lvm_errors.GroupProtected),
        (
            "  Operation prohibited while global/metadata_read_only is set.",
            lvm_errors.GroupProtected,
        ),
        (
            "  lvcreate: Command not permitted while global/metadata_read_only is set.",
            lvm_errors.GroupProtected,
        ),
        (
            "  Cannot access VG d with system ID other with local system ID this.",
            lvm_errors.GroupProtected,
        ),
        ("  Cannot activate LVs in a foreign VG.", lvm_errors.GroupProtected),
        ("  Cannot change VG d with unknown segments in it!", lvm_errors.UnknownContents),
        ("  Cannot update volume group d with duplicate PV devices.", lvm_errors.DuplicateDisks),
        ("  Can't resize locked logical volume d/v.", lvm_errors.BeingMoved),
        ("  Can't remove locked logical volume d/v.", lvm_errors.BeingMoved),
        ("  Cannot rename locked LV v", lvm_errors.BeingMoved),
        ("  Snapshots of locked devices are not supported.", lvm_errors.BeingMoved),
        # lib/metadata/lv_manip.c, where the kernel refuses to suspend: no move is under way.
        ("  Failed to lock logical volume d/v.", mount_errors.CommandFailed),
        ("  Check of pool d/p failed (status:1). Manual repair required!", lvm_errors.PoolDamaged),
        ("  Thin pool d/p transaction_id is 3, while expected 4.", lvm_errors.PoolDamaged),
        ("  Can't get lock for d.", lvm_errors.LockTaken),
        ("  Cannot open lockfile [/run/lock/lvm/V_d], error was [x]", lvm_errors.LockTaken),
        (
            "  Cannot archive volume group metadata for d to read-only filesystem.",
            lvm_errors.NotArchived,
        ),
        (
            "  Limit for the maximum number of semaphores reached. You can check and set the limits"
            " in /proc/sys/kernel/sem.",
            lvm_errors.SemaphoresUsedUp,
        ),
        ("  Logical volume d/v is already in use by d/pool.", lvm_errors.InUse),
        (
            "  device-mapper: remove ioctl on (254:3) failed: Device or resource busy",
            lvm_errors.InUse,
        ),
        (
            "  Refusing activation of partial LV d/v.  Use '--activationmode partial' to override.",
            lvm_errors.DisksMissing,
        ),
        ('  Logical Volume "v" already exists in volume group "d"', lvm_errors.NameTaken),
        ("  A volume group called d already exists.", lvm_errors.NameTaken),
        ("  Logical volume d/v contains a filesystem in use.", lvm_errors.InUse),
        ("  Logical volume d/v in use.", lvm_errors.InUse),
        ("  Cannot change VG data while PVs are missing.", lvm_errors.DisksMissing),
        ("  Is device-mapper driver missing from kernel?", lvm_errors.NoDeviceMapper),
        ("  Something new.", mount_errors.CommandFailed),
        ("", mount_errors.CommandFailed),
    ],
)
def test_lvm_s_messages_are_understood(
    stderr: str, error: type[mount_errors.CommandFailed]
) -> None:
    found = lvm_errors.classify(("lvm", "lvcreate"), 5, f"  WARNING: noise\n{stderr}\n")
    assert type(found) is error
    assert "WARNING" not in str(found) or not stderr
    assert getattr(found, "explained", "") in str(found)


def test_each_refusal_of_a_full_limited_or_protected_group_has_a_code_of_its_own() -> None:
    """INTERNAL says that something is wrong inside Carver; with these nothing is."""
    kinds = {kind for _, kind in lvm_errors._MESSAGES}
    internal = {one for one in kinds if codes.code_of(one([], 5, "")) is codes.Code.INTERNAL}
    assert internal == set()


@pytest.mark.parametrize(
    ("stderr", "lacks"),
    [
        ("  Failed to allocate memory for a command.", True),
        ("  Couldn't allocate new snapshot segment.", True),
        ("  Failed to create bcache with 64 cache blocks.", True),
        ("  device-mapper: reload ioctl on  (253:1) failed: Cannot allocate memory", True),
        (
            "  Insufficient suitable allocatable extents for logical volume a: 5 more required\n",
            False,
        ),
        ('  Volume group "data" has insufficient free space (1 extents): 2 required.', False),
    ],
)
def test_too_little_memory_is_not_too_little_space(stderr: str, lacks: bool) -> None:
    assert lvm_errors.lacks_memory(stderr) is lacks


@pytest.mark.parametrize(
    ("flags", "settings"),
    [(0, ()), (os.ST_RDONLY, ("backup/archive=0", "backup/backup=0"))],
    ids=["writable", "read-only"],
)
def test_lvm2_archives_no_metadata_where_it_cannot_write(
    flags: int, settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert lvm2.without_archives(tmp_path) == (), "it has no directory there"
    mounts = {Path("/proc/1/root/etc/lvm"): SimpleNamespace(f_flag=flags)}
    monkeypatch.setattr(os, "statvfs", mounts.__getitem__)
    assert lvm2.without_archives(Path("/proc/1/root")) == settings


def test_lvm2_tells_lvmdbusd_of_changes_only_where_it_is_installed(tmp_path: Path) -> None:
    assert lvm2.without_dbus(tmp_path) == ("global/notify_dbus=0",)
    services = tmp_path / "usr/share/dbus-1/system-services"
    services.mkdir(parents=True)
    (services / "com.redhat.lvmdbus1.service").touch()
    assert lvm2.without_dbus(tmp_path) == ()


def test_a_comment_may_be_of_any_encoding(tmp_path: Path) -> None:
    directory = tmp_path / "etc/lvm/devices"
    directory.mkdir(parents=True)
    comment = "# für diesen Knoten\n".encode("latin-1")
    (tmp_path / "etc/lvm/lvmlocal.conf").write_bytes(comment)
    (tmp_path / "etc/lvm/lvm.conf").write_bytes(
        comment + b'devices {\n use_devicesfile = 1\n devicesfile = "own.devices"\n}\n'
    )
    (directory / "own.devices").write_bytes(comment + b"IDTYPE=x PVID=" + b"a" * 32 + b"\n")
    assert lvm2.listed_disks(tmp_path) == frozenset({"a" * 32})
    assert lvm2.with_devices_file(tmp_path) == ()


def test_lvm2_s_own_copy_has_the_uuid_of_a_group(tmp_path: Path) -> None:
    copy = tmp_path / "etc/lvm/backup/data"
    assert lvm2.backed_up(tmp_path, "data") == ""
    copy.parent.mkdir(parents=True)
    about = 'contents = "Text Format Volume Group"\nversion = 1\n\n'
    copy.write_text(about + metadata().decode().rstrip("\0"))
    assert lvm2.backed_up(tmp_path, "data") == GROUP_UUID
    assert lvm2.backed_up(None, "data") == ""
    copy.write_text("data { id = ")
    assert lvm2.backed_up(tmp_path, "data") == ""


def test_lvm2_s_own_copy_has_the_volumes_of_a_group(tmp_path: Path) -> None:
    copy = tmp_path / "etc/lvm/backup/data"
    assert not lvm2.is_backed_up(tmp_path, "data", "vol-pvc-1")
    assert lvm2.backed_up_groups(tmp_path) == frozenset()
    assert lvm2.backed_up_groups(None) == frozenset()
    copy.parent.mkdir(parents=True)
    volumes = 'logical_volumes { vol-pvc-10 { id = "x" tags = ["vol-pvc-1"] } }'
    copy.write_text(f'data {{ id = "y" {volumes} }}\n')
    assert lvm2.backed_up_groups(tmp_path) == {"data"}
    assert lvm2.is_backed_up(tmp_path, "data", "vol-pvc-10")
    assert not lvm2.is_backed_up(tmp_path, "data", "vol-pvc-1")
    assert not lvm2.is_backed_up(None, "data", "vol-pvc-10")
    # Cut off: its mention is enough.
    copy.write_text("data { logical_volumes { vol-pvc-1")
    assert lvm2.is_backed_up(tmp_path, "data", "vol-pvc-1")
    assert not lvm2.is_backed_up(tmp_path, "data", "vol-pvc-2")
