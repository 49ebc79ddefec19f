"""File systems: probe, make, check, grow, and a new UUID for a copy."""

import errno
import mmap
import re
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from mount import errors, table
from mount.blocks import By
from mount.command import Result, Run
from mount.kernel import OLDEST, Kernel, Version

_MIB = 1024 * 1024


@dataclass(frozen=True)
class Feature:
    """A feature that mkfs switches on by default and kernels before `kernel` cannot mount."""

    option: str
    name: str
    kernel: Version


@dataclass(frozen=True)
class Unfinished:
    """What of a superblock, at a device's beginning, says that mkfs has not ended."""

    magic: bytes
    uuid_at: int
    flag_at: int

    def is_on(self, block: bytes, identity: str) -> bool:
        """Whether a first block says so of the file system with this UUID."""
        own = uuid.UUID(identity).bytes
        is_own = block.startswith(self.magic) and block[self.uuid_at :].startswith(own)
        return is_own and block[self.flag_at] == 1


@dataclass(frozen=True)
class FileSystem:
    """Everything that Carver knows of one file system; a further one is one more record here.

    Making one: `program` is its mkfs, from `package`; `options` are Carver's own (letter to value).
    Users may give the letters in `allowed` and `flags` (those without a value); a user's words are
    added to Carver's where the letter is in `merged` (comma lists). `uuid` is the option that sets
    the UUID, and the word within its comma list. `features` are switched off for kernels that
    cannot mount them, in the order in which mkfs learned them.

    Keeping one: `grow` fills the device of `size_bytes` under a writable mount, or raises OSError.
    `check` runs before each mount and mends without asking; it exits as e2fsck does, with 0 to 2
    for whole or mended, and 4 for damage that is left. `repair` is what a person runs on a damaged
    one. `resize` is for one that grows only unmounted: it runs after `check`, fills the device, and
    exits with 0 also where there is nothing to do. The `grow` of such a one raises OSError while
    `f_blocks * f_frsize` of `kernel.statvfs` is below `size_bytes` by more than the file system
    leaves out of its count or cannot use. It must not raise after a `resize`: each expansion would
    fail. Too wide a tolerance only has a small growth wait for the next stage without an error.

    `mount_options` are the file system's own (a word that ends in "=" takes a value);
    `duplicate_data` those that a copy with its origin's UUID is mounted with. The kernel's error
    counters are of the disk or of the structures (`errors_of_medium`);
    one that kernel.error_counters does not know has none.

    `block_options` set the size of its blocks, each by an option and a key within its comma list.
    By the first it is read and written; `least_block_bytes` are the default, 0 where that is the
    device's. `needs` has for a mount option the mkfs option, and the word in its comma list,
    without which the kernel refuses it.
    """

    program: str
    package: str
    minimum_bytes: int
    options: Mapping[str, str]
    allowed: str
    flags: str
    merged: str
    grow: Callable[[Kernel, table.Mount, int], None]
    repair: str
    mount_options: str
    uuid: tuple[str, str] = ("-U", "")
    check: tuple[str, ...] = ()
    resize: tuple[str, ...] = ()
    duplicate_data: tuple[str, ...] = ()
    features: tuple[Feature, ...] = ()
    errors_of_medium: bool = False
    error_remedy: str = ""
    block_options: tuple[tuple[str, str], ...] = ()
    least_block_bytes: int = 0
    needs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    # How to know it before its mkfs has ended, where libblkid finds it by then.
    unfinished: Unfinished | None = None
    # What the kernel refuses of a mount: the values that an option may have, as a pattern; options
    # without another; two together; and those of a file system that is written to.
    values: Mapping[str, str] = field(default_factory=dict)
    only_with: tuple[tuple[str, str], ...] = ()
    never_with: tuple[tuple[str, str], ...] = ()
    only_read: frozenset[str] = frozenset()

    @property
    def programs(self) -> tuple[str, ...]:
        """All that Carver runs for it."""
        return self.program, *self.check[:1], *self.resize[:1]


def _grow_ext4(kernel: Kernel, mount: table.Mount, size_bytes: int) -> None:
    kernel.grow_ext4(mount.path, size_bytes // kernel.statvfs(mount.path).f_bsize)


def _grow_xfs(kernel: Kernel, mount: table.Mount, size_bytes: int) -> None:
    geometry = kernel.xfs_geometry(mount.path)
    blocks = size_bytes // geometry.block_size_bytes
    # The same size is EINVAL where a last, too short allocation group was left out before.
    if blocks > geometry.blocks:
        kernel.grow_xfs(mount.path, blocks, geometry.max_inode_percent)


def _grow_btrfs(kernel: Kernel, mount: table.Mount, _size_bytes: int) -> None:
    kernel.grow_btrfs(mount.path)


# The features are spelled out: a file system is the same on every node, whatever its mke2fs.conf,
# and any kernel that Carver runs on can mount it. All are older than e2fsprogs 1.44 and xfsprogs
# 5.1. What newer tools switch on (orphan_file, rmapbt, …) a class may ask for; `features` has what
# mkfs.xfs switches on by itself. The mount options are from the kernel's
# Documentation/filesystems/ext4/, admin-guide/xfs.rst, and btrfs(5).
FILE_SYSTEMS: Mapping[str, FileSystem] = {
    "ext4": FileSystem(
        program="mkfs.ext4",
        package="e2fsprogs",
        # Below 8 MiB mke2fs leaves the journal out.
        minimum_bytes=8 * _MIB,
        options={
            # The default below 512 MiB is 1 KiB, which is a poor start for a volume that grows.
            "-b": "4096",
            # No blocks kept for root: a volume is not a root file system.
            "-m": "0",
            # Inode tables are cleared in the background; safe, because metadata_csum marks them.
            "-E": "lazy_itable_init=1",
            "-O": "none,has_journal,ext_attr,resize_inode,dir_index,filetype,extent,64bit,flex_bg,"
            "sparse_super,large_file,huge_file,dir_nlink,extra_isize,metadata_csum",
        },
        allowed="-b -i -I -N -O -E -m -L -T -U",
        flags="",
        merged="-O -E",
        check=("fsck.ext4", "-p"),
        grow=_grow_ext4,
        repair="e2fsck -f",
        # noacl and nouser_xattr: newer kernels refuse them, with messages of their own.
        mount_options=(
            "acl noacl user_xattr nouser_xattr barrier barrier= nobarrier commit= data= delalloc "
            "nodelalloc discard nodiscard dioread_lock dioread_nolock auto_da_alloc "
            "noauto_da_alloc errors=continue errors=remount-ro grpquota usrquota prjquota quota "
            "noquota init_itable init_itable= noinit_itable inode_readahead_blks= "
            "journal_checksum nojournal_checksum journal_ioprio= max_batch_time= max_dir_size_kb= "
            "min_batch_time= noload norecovery i_version stripe="
        ),
        # s_error_count: what ext4 found wrong in its own structures.
        error_remedy="then have the volume unstaged and staged again, which checks it",
        block_options=(("-b", ""),),
        least_block_bytes=4096,
        # "Project quota feature not enabled" (fs/ext4/super.c).
        needs={"prjquota": ("-O", "project")},
        # fs/ext4/super.c, "can't mount with both data=journal and delalloc".
        values={"data": "journal|ordered|writeback"},
        never_with=(("data=journal", "delalloc"),),
    ),
    "xfs": FileSystem(
        program="mkfs.xfs",
        package="xfsprogs",
        # xfsprogs 5.19 refuses less: "Filesystem must be larger than 300MB."
        minimum_bytes=300 * _MIB,
        options={"-m": "crc=1,finobt=1,reflink=1,rmapbt=0", "-i": "sparse=1"},
        allowed="-b -d -i -l -n -s -m -L",
        flags="-K",
        merged="-b -d -i -l -n -s -m",
        grow=_grow_xfs,
        # fsck.xfs(8) does nothing: mounting replays the log.
        repair="xfs_repair",
        mount_options=(
            "allocsize= discard nodiscard filestreams grpid nogrpid inode32 inode64 largeio "
            "nolargeio logbsize= logbufs= noalign norecovery nouuid noquota quota uquota usrquota "
            "uqnoenforce gquota grpquota gqnoenforce pquota prjquota pqnoenforce sunit= swidth= "
            "swalloc wsync"
        ),
        uuid=("-m", "uuid="),
        duplicate_data=("nouuid",),
        block_options=(("-s", "size"), ("-b", "size")),
        # xfs_fs_validate_params in fs/xfs/xfs_super.c.
        values={"logbsize": "0|16384|32768|65536|131072|262144|(16|32|64|128|256)[kK]"},
        only_with=(("sunit", "swidth"), ("swidth", "sunit")),
        only_read=frozenset({"norecovery"}),
        # struct xfs_dsb, fs/xfs/libxfs/xfs_format.h: sb_magicnum, sb_uuid, sb_inprogress.
        unfinished=Unfinished(b"XFSB", uuid_at=32, flag_at=126),
        # mkfs.xfs(8): options since xfsprogs 5.10, 5.19, 6.10, defaults since 5.15, 6.5, 6.18.
        features=(
            Feature("-m", "bigtime", (5, 10)),
            Feature("-m", "inobtcount", (5, 10)),
            Feature("-i", "nrext64", (5, 19)),
            Feature("-i", "exchange", (6, 10)),
            Feature("-n", "parent", (6, 10)),
        ),
    ),
    "btrfs": FileSystem(
        program="mkfs.btrfs",
        package="btrfs-progs",
        # mkfs.btrfs is content with 109 MiB, but the kernel resizes to no less than 256 MiB
        # (btrfs_ioctl_resize): a smaller one could not grow by a little.
        minimum_bytes=256 * _MIB,
        options={"-d": "single", "-m": "dup"},
        allowed="-d -m -n -s -O -L -U",
        flags="-K",
        merged="-O",
        grow=_grow_btrfs,
        # fsck.btrfs(8) does nothing either.
        repair="btrfs check",
        mount_options=(
            "acl noacl autodefrag noautodefrag barrier nobarrier commit= compress compress= "
            "compress-force compress-force= datacow nodatacow datasum nodatasum discard discard= "
            "nodiscard flushoncommit noflushoncommit max_inline= metadata_ratio= skip_balance "
            "space_cache= ssd nossd ssd_spread nossd_spread thread_pool= treelog notreelog "
            "user_subvol_rm_allowed"
        ),
        # btrfs(5), device stats: failed reads, writes and flushes, and data with a wrong checksum.
        errors_of_medium=True,
        error_remedy="then scrub it, and reset the counters with `btrfs device stats --reset`",
        block_options=(("-s", ""),),
        least_block_bytes=4096,
        # fs/btrfs/super.c, btrfs_parse_compress; newer kernels take levels.
        values=dict.fromkeys(
            ("compress", "compress-force"), r"(zlib|zstd)(:-?\d{1,2})?|lzo|no|none"
        ),
    ),
}

# Words that lead out of the device, or put the file system where no probe would find it.
_REFUSED_WORDS = "offset name file logdev rtdev test_fs root_owner journal_dev"
# What mkfs.xfs says of a word that it does not know, before it opens the device.
_UNKNOWN_OPTION = re.compile(r"unknown option (-\w) (\w+)")
_VALUE = re.compile(r"[A-Za-z0-9_^.:+=,][A-Za-z0-9_^.:+=,-]*")


@dataclass(frozen=True)
class Signature:
    """What a device holds.

    `fs_type` is blkid's TYPE or PTTYPE: ext4, swap, LVM2_member, gpt and so on; `usage` is blkid's
    USAGE (filesystem, raid, crypto, other) or "partition table".
    """

    fs_type: str
    usage: str
    uuid: str = ""
    label: str = ""
    # In what size a file system is read and written (ext4: blocks, xfs: sectors); 0 if unknown.
    block_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.fs_type} ({self.usage})"


def known(fs_type: str) -> FileSystem:
    """How `fs_type` is made. Raises UnsupportedFileSystem."""
    try:
        return FILE_SYSTEMS[fs_type]
    except KeyError:
        raise errors.UnsupportedFileSystem(fs_type, tuple(FILE_SYSTEMS)) from None


def find(kernel: Kernel, device: str, fs_type: str) -> Signature | None:
    """Find the file system of one type on a device; None if it is not there. Raises ProbeFailed.

    For a device that was formatted: its file system's users may fill any block with what some
    other format has there, such as the last one, and no other signature counts.
    """
    try:
        return _signature(device, kernel.superblock(device, fs_type))
    except OSError as error:
        raise errors.ProbeFailed(device, str(error.strerror)) from error


def probe(kernel: Kernel, device: str, length_bytes: int = 0) -> Signature | None:
    """Find what a device holds, by its superblocks; None if it is blank. Raises ProbeFailed.

    For a device that was never formatted; with `length_bytes` for its first bytes alone. By
    libblkid in this process, which takes a tenth of the time of a program; lvm2 and every mkfs
    need that library too. Never by udev's database, which may be stale or absent.
    """
    try:
        return _signature(device, kernel.signatures(device, length_bytes))
    except OSError as error:
        raise errors.ProbeFailed(device, str(error.strerror)) from error


# ZFS has its labels in the last 512 KiB; MD, DRBD, DDF and a GPT are nearer to the end.
_END_BYTES = 1 << 20


def probe_grown(kernel: Kernel, device: str, made_bytes: int) -> Signature | None:
    """Probe a device that was made with that size, and never formatted or opened by a user.

    lvm2 wipes signatures when it makes a volume, not when it extends one. Where the device is
    blank without the extents that it grew by, their end is zeroed if it has the signature of an
    earlier volume. Raises ProbeFailed.
    """
    size_bytes = kernel.device_size_bytes(device)
    found, problem = None, None
    try:
        found = probe(kernel, device)
    except errors.ProbeFailed as error:
        problem = error
    is_blank = found is None and problem is None
    if is_blank or size_bytes <= made_bytes or probe(kernel, device, made_bytes) is not None:
        if problem is not None:
            raise problem
        return found
    start = max(made_bytes, size_bytes - _END_BYTES)
    try:
        # No volume has had these extents since they were free, and blank is all before them.
        kernel.zero_out(device, start, size_bytes - start)
        kernel.flush(device)
    except OSError as error:
        raise errors.ProbeFailed(device, str(error.strerror)) from error
    return probe(kernel, device)


_FIRST_BYTES = 4096


def discard_unfinished(kernel: Kernel, device: str, fs_type: str, identity: str) -> bool:
    """Zero the superblock that a killed mkfs left; whether there was one, with that UUID.

    The kernel mounts no such file system, so no user has written to it. For a device that was never
    formatted by its tags, and was given that UUID by a mkfs of Carver's alone: its own, or that of
    the volume that it is a copy of. Raises ProbeFailed, also where the device is in use.
    """
    unfinished = known(fs_type).unfinished
    try:
        if unfinished is None:
            return False
        if not unfinished.is_on(kernel.read(device, 0, _FIRST_BYTES), identity):
            return False
        kernel.zero_out(device, 0, _FIRST_BYTES, by=By.WRITES)
        kernel.flush(device)
    except OSError as error:
        raise errors.ProbeFailed(device, str(error.strerror)) from error
    return True


def _signature(device: str, tags: Mapping[str, str]) -> Signature | None:
    uuid, label = tags.get("UUID", ""), tags.get("LABEL", "")
    if "TYPE" in tags:
        blocks = tags.get("BLOCK_SIZE", "")
        block_bytes = int(blocks) if blocks.isascii() and blocks.isdigit() else 0
        return Signature(tags["TYPE"], tags.get("USAGE", "unknown"), uuid, label, block_bytes)
    if "PTTYPE" in tags:
        return Signature(tags["PTTYPE"], "partition table", tags.get("PTUUID", ""))
    if tags:
        raise errors.ProbeFailed(device, f"libblkid finds {', '.join(sorted(tags))} but no type")
    return None


def make(
    run: Run,
    device: str,
    fs_type: str,
    options: Sequence[str] = (),
    *,
    uuid: str = "",
    oldest_kernel: Version = OLDEST,
) -> None:
    """Make a file system on a device that `probe` has just found blank, with this UUID if any.

    Options that give it one go before that, and before what `oldest_kernel` needs switched off. A
    mkfs too old to know such a feature makes none, and is run again without the word.

    Call it on the line below that check: mke2fs asks before it overwrites only on a terminal, and
    there is none. mkfs.xfs and mkfs.btrfs refuse by themselves, for they are never given -f. No
    tool touches a mounted device. Raises FormatFailed, BadOption, UnsupportedFileSystem.
    """
    file_system = known(fs_type)
    chosen = check_options(fs_type, options)
    off: Sequence[Feature] = [one for one in file_system.features if one.kernel > oldest_kernel]
    while True:
        words = _merged(file_system, chosen, uuid, off)
        result = run(file_system.program, "-q", *words, "--", device)
        if result.exit_code == 0:
            return
        known_words = _without_unknown(off, result.stderr)
        if len(known_words) == len(off):
            raise errors.FormatFailed(device, fs_type, result.stderr)
        off = known_words


def check(run: Run, device: str, fs_type: str) -> None:
    """Look over an existing file system that is not mounted; small damage is mended.

    One that grows only then fills its device. A command for ext4 only. Raises Damaged, CheckFailed.
    """
    file_system = known(fs_type)
    if file_system.check:
        result = run(*file_system.check, "--", device)
        # e2fsck(8): 1 and 2 say that all was mended, 4 that something is left, the rest that it
        # failed.
        if result.exit_code == 4:
            raise errors.Damaged(device, fs_type, _said(result), file_system.repair)
        if result.exit_code not in (0, 1, 2):
            raise _check_failed(device, fs_type, result)
    if file_system.resize:
        result = run(*file_system.resize, "--", device)
        if result.exit_code != 0:
            raise _check_failed(device, fs_type, result)


def _said(result: Result) -> str:
    return result.stdout.strip() or result.stderr.strip()


def _check_failed(device: str, fs_type: str, result: Result) -> errors.CheckFailed:
    return errors.CheckFailed(device, fs_type, f"{_said(result)} (exit {result.exit_code})")


def check_options(fs_type: str, options: Sequence[str]) -> dict[str, str]:
    """A user's mkfs options as option → value ("" for one that takes none); else BadOption.

    Given as words: `-m`, `0`, `-K`. It can check a configuration before there is a device.
    """
    file_system = known(fs_type)
    checked: dict[str, str] = {}
    words = iter(options)
    for option in words:
        if option in file_system.flags.split():
            checked[option] = ""
            continue
        if option not in file_system.allowed.split() or option in checked:
            allowed = f"{file_system.allowed} {file_system.flags}".strip()
            raise errors.BadOption(
                option, f"is not allowed for {fs_type} or given twice; allowed are {allowed}"
            )
        value = next(words, "")
        if not _VALUE.fullmatch(value):
            raise errors.BadOption(f"{option} {value}", "has no value, or one with odd characters")
        keys = {word.partition("=")[0] for word in value.split(",")}
        if refused := keys.intersection(_REFUSED_WORDS.split()):
            raise errors.BadOption(f"{option} {value}", f"may not hold {', '.join(refused)}")
        checked[option] = value
    _check_blocks(file_system, checked)
    return checked


def check_mount_options(fs_type: str, options: Sequence[str], mount_options: Sequence[str]) -> None:
    """Raise BadOption for mount options that the kernel would refuse for a new file system.

    Such as one that needs an mkfs option that is not given.
    """
    file_system, chosen = known(fs_type), check_options(fs_type, options)
    keys = {word.partition("=")[0] for word in mount_options}
    for one, other in file_system.only_with:
        if one in keys and other not in keys:
            raise errors.BadOption(one, f"needs {other} as well")
    for one, other in file_system.never_with:
        if {one, other} <= set(mount_options):
            raise errors.BadOption(one, f"contradicts {other}; give one of them")
    for word in mount_options:
        key, _, value = word.partition("=")
        if value and not re.fullmatch(file_system.values.get(key, ".*"), value):
            raise errors.BadOption(word, f"has no value that the kernel takes for {fs_type}")
        if word in file_system.only_read:
            why = f"mounts {fs_type} for reading only, and a new volume is written to"
            raise errors.BadOption(word, why)
        option, feature = file_system.needs.get(word, ("", ""))
        if feature and feature not in chosen.get(option, "").split(","):
            raise errors.BadOption(
                word, f"needs a file system that is made with mkfs options `{option} {feature}`"
            )


def block_bytes(fs_type: str, options: Sequence[str]) -> int:
    """The size in which a file system made with a user's options is read and written.

    0 where that is its device's, or not known. Raises BadOption.
    """
    if fs_type not in FILE_SYSTEMS:
        return 0
    file_system, chosen = FILE_SYSTEMS[fs_type], check_options(fs_type, options)
    option, key = file_system.block_options[0]
    return _size(chosen.get(option, ""), key) or file_system.least_block_bytes


def _check_blocks(file_system: FileSystem, chosen: Mapping[str, str]) -> None:
    """Raise BadOption for blocks that are larger than this node's pages of memory.

    Only new kernels mount some of those, and not with every file system.
    """
    for option, key in file_system.block_options:
        value = chosen.get(option, "")
        if (size_bytes := _size(value, key)) > mmap.PAGESIZE:
            raise errors.BadOption(
                f"{option} {value}",
                f"makes blocks of {size_bytes} bytes, which the kernel cannot mount: this node's"
                f" pages of memory have {mmap.PAGESIZE}",
            )


# mke2fs(8), mkfs.xfs(8) and mkfs.btrfs(8) take these after a number.
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}
_NUMBER = re.compile(r"(\d{1,12})([km]?)", re.IGNORECASE)


def _size(value: str, key: str) -> int:
    """The size in bytes that an option's value has, or a key of its comma list; 0 for none."""
    words = dict(word.partition("=")[::2] for word in value.split(",")) if key else {"": value}
    if key and words.get("log", "").isdigit():
        return 1 << min(int(words["log"]), 60)
    match = _NUMBER.fullmatch(words.get(key, ""))
    return int(match[1]) * _UNITS[match[2].lower()] if match else 0


def check_size(fs_type: str, size_bytes: int) -> None:
    """Raise TooSmall if `fs_type` needs a larger device."""
    minimum_bytes = known(fs_type).minimum_bytes
    if size_bytes < minimum_bytes:
        raise errors.TooSmall(fs_type, size_bytes, minimum_bytes)


def grow(kernel: Kernel, mount: table.Mount) -> None:
    """Have a mounted file system fill its device; nothing happens if it does. Raises GrowFailed.

    `mount` must be writable: the kernel grows through no other. By ioctls and not by resize2fs and
    the like: each NodeExpandVolume and NodeStageVolume calls this, and a process would cost most
    of either's time (and xfs_growfs and btrfs parse the mount table anew).
    """
    grow_it = known(mount.fs_type).grow
    try:
        if kernel.device_number(mount.source) != mount.device:
            raise errors.GrowFailed(mount.path, mount.fs_type, f"{mount.source} is another device")
        grow_it(kernel, mount, kernel.device_size_bytes(mount.source))
    except OSError as error:
        why = str(error.strerror)
        if error.errno == errno.EPERM and mount.fs_type == "ext4":
            why += _about_refusal(kernel, mount)
        raise errors.GrowFailed(mount.path, mount.fs_type, why) from error


def _about_refusal(kernel: Kernel, mount: table.Mount) -> str:
    """Why ext4 grants no growth: to one that has met errors it answers as to a missing capability.

    ext4_resize_begin in fs/ext4/resize.c.
    """
    counted: Mapping[str, int] = {}
    with suppress(OSError):
        counted = kernel.error_counters(mount.fs_type, mount.device)
    if any(counted.values()):
        return f" (it has met errors; stop the workload, {known(mount.fs_type).error_remedy})"
    return " (ext4 asks for CAP_SYS_RESOURCE; is Carver privileged?)"


def gives_uuid(fs_type: str, options: Sequence[str]) -> bool:
    """Whether a user's mkfs options say which UUID the file system gets. Raises BadOption."""
    option, word = known(fs_type).uuid
    value = check_options(fs_type, options).get(option)
    return value is not None and any(one.startswith(word) for one in value.split(","))


def fixed_uuid(fs_type: str, options: Sequence[str]) -> str:
    """The UUID that mkfs options give each file system; empty for none, or one made anew."""
    option, word = known(fs_type).uuid
    for one in check_options(fs_type, options).get(option, "").split(","):
        with suppress(ValueError):
            if one.startswith(word):
                return str(uuid.UUID(one.removeprefix(word)))
    return ""


def _without_unknown(features: Sequence[Feature], said: str) -> Sequence[Feature]:
    """The features that an mkfs knows that said this: none from the one that it does not know."""
    unknown = _UNKNOWN_OPTION.search(said)
    for index, one in enumerate(features):
        if unknown is not None and unknown.groups() == (one.option, one.name):
            return features[:index]
    return features


def _merged(
    file_system: FileSystem, chosen: Mapping[str, str], uuid: str, off: Sequence[Feature] = ()
) -> list[str]:
    """Carver's options, with these features switched off, and the user's over them, as words."""
    options = dict(file_system.options)
    added = [(one.option, f"{one.name}=0") for one in off]
    if uuid:
        option, word = file_system.uuid
        added.append((option, f"{word}{uuid}"))
    for option, word in added:
        options[option] = ",".join(filter(None, (options.get(option), word)))
    for option, value in chosen.items():
        if option in file_system.merged.split() and option in options:
            options[option] = _merged_list(options[option], value)
        else:
            options[option] = value
    return [word for option, value in options.items() for word in (option, value) if word]


def _merged_list(ours: str, theirs: str) -> str:
    """Two comma lists as one; xfs refuses a key that is given twice, so theirs replaces ours."""

    def key(word: str) -> str:
        return word.removeprefix("^").partition("=")[0]

    keys = {key(word) for word in theirs.split(",")}
    kept = [word for word in ours.split(",") if key(word) not in keys]
    return ",".join([*kept, theirs])


# struct btrfs_super_block, <linux/btrfs_tree.h>, and where its copies are (btrfs_sb_offset).
_SIZE = 4096
_OFFSETS = (64 << 10, 64 << 20, 256 << 30)
_CHECKSUM = struct.Struct("<I")
_CHECKSUM_BYTES = 32
_ID = slice(0x20, 0x30)
_OFFSET = slice(0x30, 0x38)
_MAGIC_AT, _MAGIC = slice(0x40, 0x48), b"_BHRfS_M"
_INCOMPATIBLE = struct.Struct("<Q")
_INCOMPATIBLE_AT = 0xBC
_CHECKSUM_TYPE = slice(0xC4, 0xC6)
_CRC32C = bytes(2)
_METADATA_ID = slice(0x23B, 0x24B)
_HAS_METADATA_ID = 1 << 10

_POLYNOMIAL = 0x82F63B78


def is_on(kernel: Kernel, device: str) -> bool:
    """Whether a device bears a btrfs, be it whole or not."""
    size_bytes, at = kernel.device_size_bytes(device), _OFFSETS[0]
    return at + _SIZE <= size_bytes and kernel.read(device, at, _SIZE)[_MAGIC_AT] == _MAGIC


def renew(kernel: Kernel, device: str) -> None:
    """Give the btrfs on a device that is not mounted a new random id. Raises RenewFailed."""
    identity = uuid.uuid4().bytes
    found = list(_superblocks(kernel, device))
    if not found:
        raise errors.RenewFailed(device, "no superblock with a good checksum of type crc32c")
    # The first is the one that is mounted by; written last, it is what counts.
    for offset, block in reversed(found):
        kernel.write(device, offset, _renewed(block, identity))


def _superblocks(kernel: Kernel, device: str) -> Iterator[tuple[int, bytes]]:
    size_bytes = kernel.device_size_bytes(device)
    for offset in _OFFSETS:
        if offset + _SIZE > size_bytes:
            return
        block = kernel.read(device, offset, _SIZE)
        is_one = block[_MAGIC_AT] == _MAGIC and block[_OFFSET] == offset.to_bytes(8, "little")
        if is_one and block[_CHECKSUM_TYPE] == _CRC32C and _signed(block) == block:
            yield offset, block


def _renewed(block: bytes, identity: bytes) -> bytes:
    changed = bytearray(block)
    (features,) = _INCOMPATIBLE.unpack_from(block, _INCOMPATIBLE_AT)
    if not features & _HAS_METADATA_ID:
        changed[_METADATA_ID] = block[_ID]
        _INCOMPATIBLE.pack_into(changed, _INCOMPATIBLE_AT, features | _HAS_METADATA_ID)
    changed[_ID] = identity
    return _signed(changed)


def _signed(block: bytes | bytearray) -> bytes:
    """A superblock with the checksum of its contents (crc32c, RFC 3720, section B.4)."""
    value = 0xFFFFFFFF
    for byte in block[_CHECKSUM_BYTES:]:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
    checksum = _CHECKSUM.pack(value ^ 0xFFFFFFFF).ljust(_CHECKSUM_BYTES, bytes(1))
    return checksum + bytes(block[_CHECKSUM_BYTES:])
