"""What programs are run with, and what is made of their answers."""

import errno
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from fakes.devices import FakeDevices
from fakes.filesystems import mkfs
from fakes.kernel import FakeKernel, failing
from hypothesis import given
from hypothesis import strategies as st

from mount import filesystem, mount_errors, table
from mount.command import Result
from mount.filesystem import Signature

MIB = 1024 * 1024


class Script:
    """A runner that gives one answer and remembers the words."""

    def __init__(self, exit_code: int = 0, stdout: str = "", stderr: str = "") -> None:
        self.result = Result(exit_code, stdout, stderr)
        self.words: tuple[str, ...] = ()

    def __call__(self, *words: str) -> Result:
        self.words = words
        return self.result


def options_of(words: Sequence[str]) -> dict[str, str]:
    inner = list(words[2 : words.index("--")])
    return dict(zip(inner[::2], inner[1::2], strict=True))


class Found(FakeKernel):
    """A kernel whose libblkid finds these tags on any device."""

    def __init__(self, tags: dict[str, str]) -> None:
        self._tags = tags

    def signatures(self, device: str, length_bytes: int = 0) -> dict[str, str]:
        return self._tags


@pytest.mark.parametrize(
    ("tags", "signature"),
    [
        ({}, None),
        (
            {"TYPE": "ext4", "USAGE": "filesystem", "UUID": "u", "LABEL": "a b"},
            Signature("ext4", "filesystem", "u", "a b"),
        ),
        ({"TYPE": "LVM2_member", "USAGE": "raid"}, Signature("LVM2_member", "raid")),
        ({"PTTYPE": "gpt", "PTUUID": "p"}, Signature("gpt", "partition table", "p")),
        ({"TYPE": "new"}, Signature("new", "unknown")),
    ],
)
def test_what_a_device_holds_is_named(tags: dict[str, str], signature: Signature | None) -> None:
    assert filesystem.probe(Found(tags), "/dev/x") == signature


def test_a_device_with_tags_but_no_type_is_not_blank() -> None:
    with pytest.raises(mount_errors.ProbeFailed, match="finds USAGE but no type"):
        filesystem.probe(Found({"USAGE": "filesystem"}), "/dev/x")


def made(fs_type: str, options: Sequence[str] = (), **more: Any) -> Sequence[str]:
    """The words that mkfs is run with."""
    run = Script()
    filesystem.make(run, "/dev/x", fs_type, options, **more)
    return run.words


@pytest.mark.parametrize("fs_type", filesystem.FILE_SYSTEMS)
def test_mkfs_never_gets_the_option_to_overwrite(fs_type: str) -> None:
    words = made(fs_type)

    assert words[:2] == (f"mkfs.{fs_type}", "-q")
    assert words[-2:] == ("--", "/dev/x")
    assert not {"-f", "-F"} & set(words)


EXT4_FEATURES = filesystem.FILE_SYSTEMS["ext4"].options["-O"].removesuffix(",metadata_csum")


@pytest.mark.parametrize(
    ("fs_type", "option", "given", "expected"),
    [
        ("ext4", "-m", "5", "5"),
        ("ext4", "-b", "1024", "1024"),
        ("ext4", "-L", "web", "web"),
        ("ext4", "-O", "^metadata_csum,quota", f"{EXT4_FEATURES},^metadata_csum,quota"),
        ("xfs", "-m", "rmapbt=1", "crc=1,finobt=1,reflink=1,bigtime=0,inobtcount=0,rmapbt=1"),
        ("xfs", "-m", "bigtime=1", "crc=1,finobt=1,reflink=1,rmapbt=0,inobtcount=0,bigtime=1"),
        ("xfs", "-n", "size=8192", "parent=0,size=8192"),
    ],
)
def test_a_users_words_take_the_place_of_ours(
    fs_type: str, option: str, given: str, expected: str
) -> None:
    ours, words = options_of(made(fs_type)), options_of(made(fs_type, [option, given]))

    assert words == {**ours, option: expected}


def test_a_flag_has_no_value() -> None:
    words = list(made("xfs", ["-K"]))

    assert words[words.index("-K") + 1] == "--"


@pytest.mark.parametrize(
    ("oldest_kernel", "off"),
    [
        ((5, 8), ["bigtime=0", "inobtcount=0", "nrext64=0", "exchange=0", "parent=0"]),
        ((5, 10), ["nrext64=0", "exchange=0", "parent=0"]),
        ((5, 19), ["exchange=0", "parent=0"]),
        ((6, 9), ["exchange=0", "parent=0"]),
        ((6, 10), []),
    ],
)
def test_xfs_has_no_feature_that_the_oldest_kernel_cannot_mount(
    oldest_kernel: tuple[int, int], off: list[str]
) -> None:
    words = made("xfs", oldest_kernel=oldest_kernel)

    said = [one for word in words for one in word.split(",") if one.endswith("=0")]
    assert [one for one in said if one != "rmapbt=0"] == off


class OldMkfs:
    """A mkfs.xfs that knows some features only, and says so before it opens the device."""

    def __init__(self, *features: str) -> None:
        self.features = features
        self.calls: list[tuple[str, ...]] = []

    def __call__(self, *words: str) -> Result:
        """Refuse the first word that is not known, in the order in which options are read."""
        self.calls.append(words)
        for option, value in pairwise(words):
            for one in value.split(",") if option in ("-m", "-i", "-n") else ():
                if one.partition("=")[0] not in (*self.features, *OLDEST_FEATURES):
                    return Result(1, "", f"unknown option {option} {one}\nUsage: mkfs.xfs\n")
        return Result(0, "", "")


OLDEST_FEATURES = ("crc", "finobt", "reflink", "rmapbt", "sparse")


@pytest.mark.parametrize(
    ("features", "calls"),
    [
        ((), 2),
        (("bigtime", "inobtcount"), 2),
        (("bigtime", "inobtcount", "nrext64"), 2),
        (("bigtime", "inobtcount", "nrext64", "exchange", "parent"), 1),
    ],
)
def test_an_mkfs_that_does_not_know_a_feature_is_run_without_it(
    features: tuple[str, ...], calls: int
) -> None:
    run = OldMkfs(*features)

    filesystem.make(run, "/dev/x", "xfs")

    assert len(run.calls) == calls
    last = " ".join(run.calls[-1])
    assert all(f"{one}=0" in last for one in features)
    assert last.count("=0") == 1 + len(features)  # rmapbt=0


def test_a_users_word_that_mkfs_does_not_know_is_an_error() -> None:
    with pytest.raises(mount_errors.FormatFailed, match="unknown option -m bigtime=1"):
        filesystem.make(OldMkfs(), "/dev/x", "xfs", ["-m", "bigtime=1"])


@pytest.mark.parametrize(
    ("fs_type", "options"),
    [
        *(("ext4", [one]) for one in ("-F", "-n", "/dev/sda", "-m", "-m0")),
        *(("ext4", ["-m", one]) for one in ("-F", "0 -F")),
        *(("ext4", ["-L", one]) for one in ("a/b", "line\nbreak")),
        ("ext4", ["--", "/dev/sda"]),
        ("ext4", ["-m", "0", "-m", "1"]),
        ("ext4", ["-E", "stride=1,offset=1024"]),
        ("ext4", ["-O", "journal_dev"]),
        ("ext4", ["-d", "dir"]),
        ("xfs", ["-d", "name=disk"]),
        ("xfs", ["-l", "logdev=disk"]),
        ("xfs", ["-r", "rtdev=disk"]),
        ("xfs", ["-p", "proto"]),
        *(("xfs", [one]) for one in ("-f", "-N")),
        *(("btrfs", [one]) for one in ("--force", "")),
        ("btrfs", ["-r", "dir"]),
    ],
)
def test_options_that_could_do_harm_are_refused(fs_type: str, options: list[str]) -> None:
    run = Script()

    with pytest.raises(mount_errors.BadOption):
        filesystem.make(run, "/dev/x", fs_type, options)

    assert run.words == ()


@given(st.lists(st.text() | st.sampled_from(["-m", "-L", "-O", "0"]), max_size=6))
def test_any_words_are_checked_options_or_a_bad_option(words: list[str]) -> None:
    run = Script()
    try:
        filesystem.make(run, "/dev/x", "ext4", words)
    except mount_errors.BadOption:
        assert run.words == ()
        return
    assert set(options_of(run.words)) <= set(filesystem.FILE_SYSTEMS["ext4"].allowed.split())


def test_the_error_of_a_failed_mkfs_has_three_of_its_lines() -> None:
    with pytest.raises(mount_errors.FormatFailed) as caught:
        filesystem.make(Script(1, stderr="too small\n\n" + "usage\n" * 40), "/dev/x", "xfs")

    assert str(caught.value).count("usage") == 2
    with pytest.raises(mount_errors.FormatFailed, match="said nothing"):
        filesystem.make(Script(1), "/dev/x", "xfs")


def test_an_unknown_file_system_is_neither_made_nor_measured_nor_grown(
    kernel: FakeKernel, tmp_path: str
) -> None:
    mounted = mount(kernel, "ext4", str(tmp_path))
    for fs_type in ("ntfs", "", "ext4 -F", "../ext4"):
        with pytest.raises(mount_errors.UnsupportedFileSystem):
            filesystem.make(Script(), "/dev/x", fs_type)
        with pytest.raises(mount_errors.UnsupportedFileSystem):
            filesystem.check_size(fs_type, 1 << 40)
        with pytest.raises(mount_errors.UnsupportedFileSystem):
            filesystem.grow(kernel, replace(mounted, fs_type=fs_type))


def test_too_small_a_volume_is_refused_before_it_is_made() -> None:
    filesystem.check_size("xfs", 300 * MIB)
    with pytest.raises(mount_errors.TooSmall, match="xfs needs 314572800 bytes"):
        filesystem.check_size("xfs", 300 * MIB - 1)


@pytest.mark.parametrize(
    ("number", "why"), [(errno.EROFS, "Read-only"), (errno.EPERM, "CAP_SYS_RESOURCE")]
)
def test_the_error_of_a_refused_growth_says_why(
    kernel: FakeKernel, tmp_path: str, number: int, why: str
) -> None:
    mounted = mount(kernel, "ext4", str(tmp_path))
    kernel.override(grow_ext4=failing(number))

    with pytest.raises(mount_errors.GrowFailed, match=why):
        filesystem.grow(kernel, mounted)


def test_an_ext4_with_errors_is_not_said_to_lack_a_capability(
    kernel: FakeKernel, tmp_path: str
) -> None:
    """ext4_resize_begin answers EPERM to both."""
    mounted = mount(kernel, "ext4", str(tmp_path))
    kernel.devices.get("/dev/data/web").media.errors = 2
    kernel.override(grow_ext4=failing(errno.EPERM))

    with pytest.raises(mount_errors.GrowFailed, match=r"met errors.*unstaged and staged") as raised:
        filesystem.grow(kernel, mounted)
    assert "CAP_SYS_RESOURCE" not in str(raised.value)


def test_growing_refuses_a_source_that_is_another_device_now(
    kernel: FakeKernel, tmp_path: str
) -> None:
    mounted = mount(kernel, "ext4", str(tmp_path))
    kernel.devices.get("/dev/data/web").minor += 1

    with pytest.raises(mount_errors.GrowFailed, match="another device"):
        filesystem.grow(kernel, mounted)


@pytest.mark.parametrize("exit_code", [0, 1, 2])
def test_a_file_system_that_is_whole_or_was_mended_passes_the_check(exit_code: int) -> None:
    filesystem.check(Script(exit_code, "/dev/x: clean\n"), "/dev/x", "ext4")


def test_damage_is_another_error_than_a_check_that_failed() -> None:
    with pytest.raises(mount_errors.Damaged, match=r"inconsistent; copy .* `e2fsck -f /dev/x`"):
        filesystem.check(Script(4, "inconsistent\n"), "/dev/x", "ext4")
    for exit_code in (8, 12, 32):
        with pytest.raises(mount_errors.CheckFailed, match=f"busy .exit {exit_code}."):
            filesystem.check(Script(exit_code, stderr="busy\n"), "/dev/x", "ext4")


@pytest.mark.parametrize(
    "fs_type", [key for key, one in filesystem.FILE_SYSTEMS.items() if not one.programs[1:]]
)
def test_what_the_kernel_checks_at_the_mount_is_not_checked_before(fs_type: str) -> None:
    run = Script(4)
    filesystem.check(run, "/dev/x", fs_type)
    assert run.words == ()


def test_one_that_cannot_grow_mounted_is_grown_before_the_mount(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offline = replace(filesystem.FILE_SYSTEMS["btrfs"], resize=("resize.new", "-s"))
    monkeypatch.setitem(filesystem.FILE_SYSTEMS, "new", offline)
    run = Script()

    filesystem.check(run, "/dev/x", "new")

    assert run.words == ("resize.new", "-s", "--", "/dev/x")
    with pytest.raises(mount_errors.CheckFailed, match=r"busy .exit 1."):
        filesystem.check(Script(1, stderr="busy\n"), "/dev/x", "new")


@pytest.fixture
def kernel() -> FakeKernel:
    devices = FakeDevices()
    devices.add("/dev/data/web", 400 * MIB)
    return FakeKernel(devices)


def mount(kernel: FakeKernel, fs_type: str, path: str) -> table.Mount:
    mkfs([f"mkfs.{fs_type}", "-q", "--", "/dev/data/web"], kernel.devices)
    kernel.mount("/dev/data/web", path, fs_type, set(), ())
    return table.read(kernel).at(path)[-1]
