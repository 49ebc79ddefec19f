"""Mount options are sorted to where they belong, or refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mount import kernel, mount_errors, options
from mount.filesystem import FILE_SYSTEMS
from mount.options import Options

_known = [
    *kernel.ATTRIBUTES,
    *options.SUPERBLOCK,
    *" ".join(one.mount_options for one in FILE_SYSTEMS.values()).split(),
    "rw",
    "defaults",
]


def test_options_are_sorted_by_where_they_belong() -> None:
    found = options.parse(["ro,noexec", "lazytime", "discard", "commit=30", "noatime"], "ext4")

    assert found == Options(
        frozenset({"ro", "noexec", "noatime"}), frozenset({"lazytime"}), ("discard", "commit=30")
    )
    for word in ("acl", "noacl", "user_xattr", "nouser_xattr"):
        assert options.parse([word], "ext4").data == (word,)


def test_defaults_are_no_options_and_the_same_option_twice_counts_once() -> None:
    assert options.parse([]) == Options()
    assert options.parse(["rw", "defaults", "async", "exec"]) == Options()
    assert options.parse(["discard", "discard", "noexec,noexec"], "xfs").data == ("discard",)


@pytest.mark.parametrize(
    "flags",
    [
        *("ro,rw", "exec,noexec", "noatime,relatime", "sync,async", "discard,nodiscard"),
        *("commit=5,commit=10", "barrier=0,barrier=1"),
    ],
)
def test_contradictions_are_refused(flags: str) -> None:
    for words in ([flags], flags.split(",")):
        with pytest.raises(mount_errors.BadOption, match="contradicts"):
            options.parse(words, "ext4")


@pytest.mark.parametrize(
    "word",
    [
        *("bind", "rbind", "remount", "move", "loop", "loop=/dev/loop0", "shared", "rshared"),
        *("private", "slave", "unbindable", "x-systemd.automount", "X-mount.mkdir", "nofail"),
        *("user", "errors=panic", "journal_path=/dev/sda", "logdev=/dev/sda", "device=/dev/sda"),
        *("subvolid=5", "context=system_u", "noexec=1", "commit", "uid=0"),
    ],
)
def test_what_is_not_listed_is_refused_and_the_list_is_shown(word: str) -> None:
    with pytest.raises(mount_errors.BadOption) as caught:
        options.parse([word])

    assert ascii(word) in str(caught.value)
    assert "noexec" in str(caught.value) or "form" in str(caught.value)


@pytest.mark.parametrize(
    "word", ["-o", "--bind", "", "ro\n", "no\0exec", "ro rw", "commit=5\\054x", "commit=", "café"]
)
def test_what_has_odd_characters_is_refused(word: str) -> None:
    with pytest.raises(mount_errors.BadOption):
        options.parse([word])


def test_another_file_systems_options_are_refused() -> None:
    assert options.parse(["nouuid"], "xfs").data == ("nouuid",)
    with pytest.raises(mount_errors.BadOption, match="nouuid"):
        options.parse(["nouuid"], "ext4")


def test_an_unknown_file_system_is_refused() -> None:
    with pytest.raises(mount_errors.UnsupportedFileSystem, match=", ".join(FILE_SYSTEMS)):
        options.parse([], "ntfs")


def test_a_long_option_is_shown_short() -> None:
    with pytest.raises(mount_errors.BadOption) as caught:
        options.parse(["a" * 4096])

    assert len(str(caught.value).split(" is ")[0]) < 300


@given(st.lists(st.text() | st.sampled_from(_known) | st.just("commit=5")))
def test_any_flags_are_options_or_a_bad_option(flags: list[str]) -> None:
    try:
        found = options.parse(flags)
    except mount_errors.BadOption:
        return
    assert found.attributes <= set(kernel.ATTRIBUTES)
    assert found.superblock <= set(options.SUPERBLOCK)
    assert '"' not in found.context
    for word in found.data:
        assert word.isprintable()
        assert not set(word) & set(', \\/"')
