"""Mounts and binds that are as asked or an error, on the fake and on the real host."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mount import filesystem, filesystem_health, loop, mount_errors, mounts, options, table, target
from mount.kernel import Kernel
from mount.options import Options

MIB = 1024 * 1024
NONE = Options()


def formatted(host: Any, fs_type: str = "ext4") -> str:
    """A device with a file system."""
    device: str = host.new_device(320 * MIB if fs_type != "ext4" else 32 * MIB)
    filesystem.make(host.run, device, fs_type)
    return device


def staged(host: Any, fs_type: str = "ext4", flags: tuple[str, ...] = ()) -> tuple[str, str]:
    """A device with a file system, and the path where it is mounted."""
    device, path = formatted(host, fs_type), new_directory(host, "staging")
    mounts.ensure_mounted(host.kernel, device, path, fs_type, options.parse(flags, fs_type))
    return device, path


def new_directory(host: Any, name: str) -> str:
    path = str(host.directory / name)
    target.ensure_directory(host.kernel, path)
    return path


def new_file(host: Any, name: str) -> str:
    path = str(host.directory / name)
    target.ensure_file(host.kernel, path)
    return path


def at(host: Any, path: str) -> tuple[table.Mount, ...]:
    return table.read(host.kernel).at(path)


@pytest.mark.parametrize("fs_type", filesystem.FILE_SYSTEMS)
def test_mounting_twice_makes_one_mount(host: Any, fs_type: str) -> None:
    device, path = staged(host, fs_type)

    mounts.ensure_mounted(host.kernel, device, path, fs_type, NONE)

    found = at(host, path)
    assert [mount.fs_type for mount in found] == [fs_type]
    assert found[0].device == host.kernel.device_number(device)
    assert not found[0].read_only


@pytest.mark.parametrize("fs_type", filesystem.FILE_SYSTEMS)
def test_options_reach_the_mount_the_superblock_and_the_file_system(
    host: Any, fs_type: str
) -> None:
    flags = ("nosuid,nodev", "noexec", "noatime", "nodiratime", "lazytime", "discard")

    _, path = staged(host, fs_type, flags)

    found = at(host, path)[0]
    assert {"nosuid", "nodev", "noexec", "noatime", "nodiratime"} <= set(found.options)
    assert "lazytime" in found.super_options
    assert any(option.startswith("discard") for option in found.super_options)


@pytest.mark.parametrize("word", ["relatime", "strictatime", "noatime", "nosymfollow"])
def test_only_the_same_attributes_asked_again_are_no_conflict(host: Any, word: str) -> None:
    device, path = staged(host, flags=(word,))

    mounts.ensure_mounted(host.kernel, device, path, "ext4", options.parse([word]))
    with pytest.raises(mount_errors.MountConflict):
        mounts.ensure_mounted(host.kernel, device, path, "ext4", options.parse([word, "noexec"]))

    assert len(at(host, path)) == 1


def test_a_read_only_mount_is_read_only_for_the_file_system_too(host: Any) -> None:
    device, path = formatted(host), new_directory(host, "staging")

    mounts.ensure_mounted(host.kernel, device, path, "ext4", NONE, read_only=True)
    mounts.ensure_mounted(host.kernel, device, path, "ext4", options.parse(["ro"]))

    found = at(host, path)[0]
    assert "ro" in found.options
    assert "ro" in found.super_options
    with pytest.raises(mount_errors.MountConflict):
        mounts.ensure_mounted(host.kernel, device, path, "ext4", NONE)


def test_nothing_is_mounted_or_bound_over_another_volume(host: Any) -> None:
    _, path = staged(host)
    published = new_directory(host, "published")
    mounts.ensure_mounted(host.kernel, formatted(host), published, "ext4", NONE)

    with pytest.raises(mount_errors.ForeignMount):
        mounts.ensure_mounted(host.kernel, formatted(host), path, "ext4", NONE)
    with pytest.raises(mount_errors.ForeignMount):
        mounts.ensure_bound(host.kernel, path, published, NONE)

    assert [len(at(host, place)) for place in (path, published)] == [1, 1]


def test_mounting_a_blank_device_fails_and_leaves_no_mount(host: Any) -> None:
    device = host.new_device(32 * MIB)
    path = new_directory(host, "staging")

    with pytest.raises(mount_errors.MountFailed):
        mounts.ensure_mounted(host.kernel, device, path, "ext4", NONE)

    assert at(host, path) == ()


def test_an_option_of_another_file_system_is_named_in_the_error(host: Any) -> None:
    device, path = formatted(host), new_directory(host, "staging")

    with pytest.raises(mount_errors.MountFailed, match="ext4: Unknown parameter 'nouuid'"):
        mounts.ensure_mounted(host.kernel, device, path, "ext4", options.parse(["nouuid"]))


def test_mounting_what_is_missing_or_no_device_fails(host: Any) -> None:
    path = new_directory(host, "staging")

    for device in ("/dev/carver-no-such", path):
        with pytest.raises(mount_errors.DeviceMissing):
            mounts.ensure_mounted(host.kernel, device, path, "ext4", NONE)
    missing = str(host.directory / "no")
    with pytest.raises(mount_errors.MountFailed):
        mounts.ensure_mounted(host.kernel, formatted(host), missing, "ext4", NONE)


def test_a_path_below_a_symbolic_link_is_the_path_it_leads_to(host: Any) -> None:
    device, path = staged(host)
    link = host.directory.parent / "link"
    link.symlink_to(host.directory)

    place = target.resolve(host.kernel, str(link / "staging"))
    mounts.ensure_mounted(host.kernel, device, place, "ext4", NONE)
    assert len(at(host, path)) == 1
    mounts.ensure_unmounted(host.kernel, place)

    assert at(host, path) == ()


@pytest.mark.parametrize("old_calls", [False, True])
def test_a_link_that_took_the_place_of_a_directory_is_not_followed(
    host: Any, real: bool, old_calls: bool
) -> None:
    kernel = Kernel(old_calls=old_calls) if real else host.kernel
    device, path = staged(host)
    pods, outside = host.directory / "pods", host.directory / "outside"
    pods.mkdir()
    (outside / "target").mkdir(parents=True)
    place = target.resolve(kernel, f"{pods}/target")
    pods.rmdir()
    pods.symlink_to(outside)

    acts: list[Callable[[], None]] = [
        lambda: mounts.ensure_mounted(kernel, device, place, "ext4", NONE),
        lambda: mounts.ensure_bound(kernel, path, place, NONE),
        lambda: mounts.ensure_bound(kernel, place, new_directory(host, "other"), NONE),
        lambda: target.ensure_directory(kernel, place),
        lambda: target.ensure_file(kernel, place),
        lambda: target.ensure_absent(kernel, place),
    ]
    for act in acts:
        with pytest.raises(mount_errors.PathChanged, match="was not there before"):
            act()

    assert table.read(kernel).under(str(outside)) == ()
    assert len(table.read(kernel).of_device(kernel.device_number(device))) == 1
    assert (outside / "target").is_dir()


@pytest.mark.parametrize("fs_type", filesystem.FILE_SYSTEMS)
@pytest.mark.parametrize("read_only", [False, True])
def test_binding_twice_makes_one_bind(host: Any, fs_type: str, read_only: bool) -> None:
    device, path = staged(host, fs_type)
    published = new_directory(host, "published")

    for _ in range(2):
        mounts.ensure_bound(host.kernel, path, published, NONE, read_only)

    found = at(host, published)
    assert [mount.read_only for mount in found] == [read_only]
    assert found[0].device == host.kernel.device_number(device)
    assert not at(host, path)[0].read_only


@pytest.mark.parametrize("read_only", [False, True])
def test_a_bind_asked_for_with_other_access_is_a_conflict(host: Any, read_only: bool) -> None:
    _, path = staged(host)
    published = new_directory(host, "published")
    mounts.ensure_bound(host.kernel, path, published, NONE, read_only)

    with pytest.raises(mount_errors.MountConflict):
        mounts.ensure_bound(host.kernel, path, published, NONE, not read_only)

    assert [mount.read_only for mount in at(host, published)] == [read_only]


@pytest.mark.parametrize("flags", [("nodev", "noatime"), ("ro",)])
def test_a_bind_has_its_own_attributes_and_those_of_its_source(
    host: Any, flags: tuple[str, ...]
) -> None:
    _, path = staged(host, flags=flags)
    published = new_directory(host, "published")

    for _ in range(2):
        mounts.ensure_bound(host.kernel, path, published, options.parse(["noexec"]))

    [found] = at(host, published)
    assert {*flags, "noexec"} <= set(found.options)
    assert "noexec" not in at(host, path)[0].options


def test_a_directory_below_the_staging_path_can_be_bound(host: Any) -> None:
    _, path = staged(host)
    Path(path, "inner").mkdir()
    published = new_directory(host, "published")

    for _ in range(2):
        mounts.ensure_bound(host.kernel, f"{path}/inner", published, NONE)

    assert [mount.root for mount in at(host, published)] == ["/inner"]
    with pytest.raises(mount_errors.ForeignMount):
        mounts.ensure_bound(host.kernel, path, published, NONE)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_device_node_is_bound_once_to_a_file(host: Any, read_only: bool) -> None:
    device = host.new_device(32 * MIB)
    published = new_file(host, "block")

    for _ in range(2):
        mounts.ensure_bound(host.kernel, device, published, NONE, read_only)

    assert [mount.read_only for mount in at(host, published)] == [read_only]
    assert host.kernel.device_number(published) == host.kernel.device_number(device)
    assert filesystem_health.device_size_bytes(host.kernel, published) == 32 * MIB
    target.ensure_file(host.kernel, published)


def test_another_device_at_the_file_is_foreign(host: Any) -> None:
    first, second = host.new_device(32 * MIB), host.new_device(32 * MIB)
    published = new_file(host, "block")
    mounts.ensure_bound(host.kernel, first, published, NONE)
    number = host.kernel.device_number(first)

    with pytest.raises(mount_errors.ForeignMount):
        mounts.ensure_bound(host.kernel, second, published, NONE)
    with pytest.raises(mount_errors.ForeignMount):
        mounts.ensure_unmounted(host.kernel, published, [host.kernel.device_number(second)])

    assert host.kernel.device_number(published) == number


@pytest.mark.parametrize("old_calls", [False, True])
def test_a_failed_bind_leaves_no_mount(host: Any, real: bool, old_calls: bool) -> None:
    kernel = Kernel(old_calls=old_calls) if real else host.kernel
    directory, block = new_directory(host, "published"), new_file(host, "block")

    for source, place in ((str(host.directory / "no"), directory), (directory, block)):
        with pytest.raises(mount_errors.MountFailed):
            mounts.ensure_bound(kernel, source, place, NONE, read_only=True)
        assert at(host, place) == ()


def test_unmounting_twice_or_at_a_missing_path_succeeds(host: Any) -> None:
    device, path = staged(host)

    for _ in range(2):
        mounts.ensure_unmounted(host.kernel, path, [host.kernel.device_number(device)])
        assert at(host, path) == ()
    mounts.ensure_unmounted(host.kernel, str(host.directory / "no"))


@pytest.mark.parametrize("known", [False, True])
def test_binds_of_the_volume_that_were_stacked_all_go(host: Any, known: bool) -> None:
    device, path = staged(host)
    devices = [host.kernel.device_number(device)]
    published, block = new_directory(host, "published"), new_file(host, "block")

    for source, place, of in (
        (path, published, devices if known else None),
        (device, block, devices),
    ):
        for _ in range(3):
            host.kernel.bind(source, place, set())
        assert len(at(host, place)) == 3
        mounts.ensure_unmounted(host.kernel, place, of)
        assert at(host, place) == ()

    assert len(at(host, path)) == 1


def test_a_foreign_mount_is_not_unmounted_nor_ours_below_it(host: Any) -> None:
    device, path = staged(host)
    other = formatted(host)
    with pytest.raises(mount_errors.ForeignMount):
        mounts.ensure_unmounted(host.kernel, path, [host.kernel.device_number(other)])
    assert len(at(host, path)) == 1

    host.kernel.mount(other, path, "ext4", set(), ())
    for devices in (None, [], [host.kernel.device_number(device)]):
        with pytest.raises(mount_errors.ForeignMount):
            mounts.ensure_unmounted(host.kernel, path, devices)
    assert len(at(host, path)) == 2


def test_a_busy_mount_stays_and_says_so(host: Any) -> None:
    _, path = staged(host)
    opened = os.open(path, os.O_RDONLY)

    with pytest.raises(mount_errors.Busy, match=rf"\({os.getpid()}\)"):
        mounts.ensure_unmounted(host.kernel, path)

    assert len(at(host, path)) == 1
    os.close(opened)
    mounts.ensure_unmounted(host.kernel, path)


def test_a_target_that_is_mounted_is_not_removed(host: Any) -> None:
    _, path = staged(host)

    with pytest.raises(mount_errors.TargetInUse):
        target.ensure_absent(host.kernel, path)

    mounts.ensure_unmounted(host.kernel, path)
    target.ensure_absent(host.kernel, path)
    assert not Path(path).exists()


def test_a_read_only_loop_over_a_device_makes_it_read_only(host: Any) -> None:
    device = formatted(host)
    number = host.kernel.device_number(device)
    path = new_directory(host, "staging")

    read_only = loop.attach_read_only(host.kernel, device)
    try:
        assert loop.attach_read_only(host.kernel, device) == read_only
        assert loop.loop_devices_over(host.kernel, number) == (read_only,)
        assert host.kernel.device_is_read_only(read_only)
        with pytest.raises(mount_errors.MountFailed):
            mounts.ensure_mounted(host.kernel, read_only, path, "ext4", NONE)
        mounts.ensure_mounted(host.kernel, read_only, path, "ext4", NONE, read_only=True)
        assert at(host, path)[0].device == host.kernel.device_number(read_only)
        mounts.ensure_unmounted(host.kernel, path)
    finally:
        loop.detach(host.kernel, read_only)
    assert loop.loop_devices_over(host.kernel, number) == ()


def test_the_calls_of_older_kernels_end_in_the_same_mounts(host: Any, real: bool) -> None:
    old = Kernel(old_calls=True) if real else host.kernel
    device = formatted(host)
    path, published = new_directory(host, "staging"), new_directory(host, "published")
    block = new_file(host, "block")
    chosen = options.parse(["noatime,nosymfollow", "lazytime", "commit=30"], "ext4")

    # The newer calls, which come after, find nothing left to do.
    for kernel in (old, host.kernel):
        mounts.ensure_mounted(kernel, device, path, "ext4", chosen)
        mounts.ensure_bound(kernel, path, published, options.parse(["nodev"]), read_only=True)
        mounts.ensure_bound(kernel, device, block, NONE, read_only=True)

    found = table.read(host.kernel)
    assert {"commit=30", "lazytime"} <= set(found.at(path)[0].super_options)
    assert {"ro", "nodev", "noatime", "nosymfollow"} <= set(found.at(published)[0].options)
    for place in (block, published, path):
        mounts.ensure_unmounted(old, place)
