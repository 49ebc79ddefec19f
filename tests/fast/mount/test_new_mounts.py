"""Mount options that each stage of a new volume would fail by are refused before it is made."""

from collections.abc import Sequence

import pytest

from mount import filesystem, mount_errors

UUID = "11111111-2222-3333-4444-555555555555"


@pytest.mark.parametrize(
    ("fs_type", "words"),
    [
        ("xfs", ["norecovery"]),
        ("xfs", ["sunit=8"]),
        ("xfs", ["swidth=8"]),
        ("xfs", ["logbsize=7"]),
        ("ext4", ["data=journal", "delalloc"]),
        ("ext4", ["data=nonsense"]),
        ("btrfs", ["compress=nonsense"]),
        ("btrfs", ["compress-force=zstd:abc"]),
    ],
)
def test_what_the_kernel_refuses_is_refused(fs_type: str, words: Sequence[str]) -> None:
    with pytest.raises(mount_errors.BadOption):
        filesystem.check_mount_options(fs_type, [], words)


@pytest.mark.parametrize(
    ("fs_type", "words"),
    [
        ("xfs", ["sunit=8", "swidth=16"]),
        *(("xfs", [f"logbsize={size}"]) for size in ("16k", "256k", "32768")),
        ("ext4", ["data=journal"]),
        ("ext4", ["delalloc", "commit=30"]),
        *(("btrfs", [f"compress={one}"]) for one in ("lzo", "zlib:9", "zstd", "zstd:15", "no")),
        ("btrfs", ["compress", "ssd"]),
    ],
)
def test_what_the_kernel_takes_is_not_refused(fs_type: str, words: Sequence[str]) -> None:
    filesystem.check_mount_options(fs_type, [], words)


@pytest.mark.parametrize(
    ("fs_type", "options", "fixed"),
    [
        ("ext4", ["-U", UUID], UUID),
        ("ext4", ["-U", "random"], ""),
        ("ext4", ["-m", "0"], ""),
        ("btrfs", ["-U", UUID], UUID),
        ("xfs", ["-m", f"reflink=1,uuid={UUID}"], UUID),
        ("xfs", ["-m", "reflink=1"], ""),
    ],
)
def test_which_uuid_mkfs_would_give_each_file_system(
    fs_type: str, options: Sequence[str], fixed: str
) -> None:
    assert filesystem.fixed_uuid(fs_type, options) == fixed
