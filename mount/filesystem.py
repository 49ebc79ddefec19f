"""File systems: probe, make, check, grow, and give a copy a UUID of its own."""

import errno
import mmap
import re
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from mount import mount_errors, table
from mount.block_io import By
from mount.command import Result, Run
from mount.kernel import OLDEST, Kernel, Version

_MIB = 1024 * 1024


@dataclass(frozen=True)
class Feature:
    """A feature that mkfs enables by default, and that kernels before `kernel` cannot mount."""

    option: str
    name: str
    kernel: Version


@dataclass(frozen=True)
class Unfinished:
    """The position of a flag in the superblock by which an unfinished mkfs is recognized.

    mkfs sets the flag when it begins and clears the flag when it ends. Offsets are in bytes from
    the beginning of the device.
    """

    magic: bytes
    uuid_at: int
    flag_at: int

    def is_on(self, block: bytes, identity: str) -> bool:
        """Whether a device's first block is of an unfinished file system with this UUID."""
        uuid_bytes = uuid.UUID(identity).bytes
        is_own = block.startswith(self.magic) and block[self.uuid_at :].startswith(uuid_bytes)
        return is_own and block[self.flag_at] == 1


@dataclass(frozen=True)
class FileSystem:
    """The record of a file system type; a further type is a further record.

    Creation: `program` is the mkfs, from the package `package`. `options` are Carver's own options
    by their letters. Users may give the options in `allowed`, and those in `flags`, which take no
    value; for the options in `merged`, which are comma lists, the user's words are added to
    Carver's. `uuid` is the option that sets the UUID, and its key within the comma list. `features`
    are disabled if the oldest kernel cannot mount them, in the order in which mkfs learned them.

    Check and growth: `check` runs before each mount, and repairs without questions. Its exit codes
    are those of e2fsck(8): 0 to 2 for whole or repaired, 4 for damage that remains. `repair` is the
    command that messages give for a damaged file system. `grow` fills the device of `size_bytes`
    under a writable mount, or raises OSError.

    `resize` is for a file system that grows only while it is unmounted. `resize` runs after
    `check`, fills the device, and exits with 0 also if there is nothing to do. The `grow` of such a
    file system raises OSError while `f_blocks * f_frsize` of `kernel.statvfs` is below `size_bytes`
    by more than the file system does not count or cannot use. `grow` must not raise after a
    `resize`, as each expansion would fail. With too wide a tolerance a small growth silently waits
    until the next NodeStageVolume.

    Mounting: `mount_options` are the file system's own options; one that ends in "=" takes a value.
    `duplicate_data` are the options for mounting a copy with its origin's UUID. `errors_of_medium`
    says that the kernel's error counters are of the disk, and not of the file system's structures.
    A file system that kernel.error_counters does not know has no counters.

    Blocks: `block_options` are the options that set the sizes of blocks, each with its key within
    the comma list. The first sets the size of I/O; its default is `least_block_bytes`, 0 for the
    device's own. `needs` are mount options that the kernel refuses without an mkfs option, each
    with that option and the word in its comma list.
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
    # How to recognize a file system whose mkfs has not ended, but which libblkid finds already.
    unfinished: Unfinished | None = None
    # Values that the kernel accepts for mount options, as patterns.
    values: Mapping[str, str] = field(default_factory=dict)
    # Pairs of mount options of which the kernel refuses the first without the second.
    only_with: tuple[tuple[str, str], ...] = ()
    # Pairs of mount options that the kernel refuses together.
    never_with: tuple[tuple[str, str], ...] = ()
    # Mount options that the kernel allows for read-only mounts alone.
    only_read: frozenset[str] = frozenset()

    @property
    def programs(self) -> tuple[str, ...]:
        """All programs that Carver runs for the file system."""
        return self.program, *self.check[:1], *self.resize[:1]


def _grow_ext4(kernel: Kernel, mount: table.Mount, size_bytes: int) -> None:
    kernel.grow_ext4(mount.path, size_bytes // kernel.statvfs(mount.path).f_bsize)


def _grow_xfs(kernel: Kernel, mount: table.Mount, size_bytes: int) -> None:
    geometry = kernel.xfs_geometry(mount.path)
    blocks = size_bytes // geometry.block_size_bytes
    # XFS_IOC_FSGROWFSDATA to the present size is EINVAL if the last allocation group would be too
    # short and so was left out.
    if blocks > geometry.blocks:
        kernel.grow_xfs(mount.path, blocks, geometry.max_inode_percent)


def _grow_btrfs(kernel: Kernel, mount: table.Mount, _size_bytes: int) -> None:
    kernel.grow_btrfs(mount.path)


# Table of the supported file systems. The features of ext4 and xfs are given to mkfs in `options`.
# So they do not depend on the node's mke2fs.conf, and each kernel that Carver runs on can mount the
# file system: these features are older than e2fsprogs 1.44, xfsprogs 5.1. `features` are newer ones
# that newer mkfs.xfs enable by default: those that the setting `oldest_kernel` is too old for are
# disabled. btrfs has the default features of mkfs.btrfs. A class may request other features
# (orphan_file, rmapbt, …). The mount options are from the kernel's Documentation/filesystems/ext4/,
# admin-guide/xfs.rst, and btrfs(5).
FILE_SYSTEMS: Mapping[str, FileSystem] = {
    "ext4": FileSystem(
        program="mkfs.ext4",
        package="e2fsprogs",
        # Below 8 MiB mke2fs makes no journal.
        minimum_bytes=8 * _MIB,
        options={
            # Blocks of 4 KiB. The default below 512 MiB is 1 KiB, which is bad for a volume that
            # grows.
            "-b": "4096",
            # No blocks are reserved for root, as a volume is not a root file system.
            "-m": "0",
            # Inode tables are cleared in the background, which is safe with metadata_csum.
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
        # Users may give noacl and nouser_xattr, although newer kernels refuse them, with messages
        # that explain it.
        mount_options=(
            "acl noacl user_xattr nouser_xattr barrier barrier= nobarrier commit= data= delalloc "
            "nodelalloc discard nodiscard dioread_lock dioread_nolock auto_da_alloc "
            "noauto_da_alloc errors=continue errors=remount-ro grpquota usrquota prjquota quota "
            "noquota init_itable init_itable= noinit_itable inode_readahead_blks= "
            "journal_checksum nojournal_checksum journal_ioprio= max_batch_time= max_dir_size_kb= "
            "min_batch_time= noload norecovery i_version stripe="
        ),
        # The error counter of ext4 (s_error_count) is of errors in ext4's own structures.
        error_remedy="then have the volume unstaged and staged again, which checks it",
        block_options=(("-b", ""),),
        least_block_bytes=4096,
        # Without this feature the kernel refuses: "Project quota feature not enabled"
        # (fs/ext4/super.c).
        needs={"prjquota": ("-O", "project")},
        # The kernel knows these values of data=, and refuses a combination: "can't mount with both
        # data=journal and delalloc" (fs/ext4/super.c).
        values={"data": "journal|ordered|writeback"},
        never_with=(("data=journal", "delalloc"),),
    ),
    "xfs": FileSystem(
        program="mkfs.xfs",
        package="xfsprogs",
        # xfsprogs 5.19 refuses a smaller size: "Filesystem must be larger than 300MB."
        minimum_bytes=300 * _MIB,
        options={"-m": "crc=1,finobt=1,reflink=1,rmapbt=0", "-i": "sparse=1"},
        allowed="-b -d -i -l -n -s -m -L",
        flags="-K",
        merged="-b -d -i -l -n -s -m",
        grow=_grow_xfs,
        # There is no check, as fsck.xfs(8) does nothing: mounting replays the log.
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
        # Values of logbsize that xfs_fs_validate_params in fs/xfs/xfs_super.c accepts.
        values={"logbsize": "0|16384|32768|65536|131072|262144|(16|32|64|128|256)[kK]"},
        only_with=(("sunit", "swidth"), ("swidth", "sunit")),
        only_read=frozenset({"norecovery"}),
        # Fields sb_magicnum, sb_uuid and sb_inprogress of struct xfs_dsb
        # (fs/xfs/libxfs/xfs_format.h).
        unfinished=Unfinished(b"XFSB", uuid_at=32, flag_at=126),
        # Features that mkfs.xfs(8) knows since xfsprogs 5.10, 5.19 and 6.10, and enables by default
        # since 5.15, 6.5 and 6.18.
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
        # mkfs.btrfs accepts 109 MiB, but the kernel resizes to no less than 256 MiB
        # (btrfs_ioctl_resize): a smaller file system could not grow by a little.
        minimum_bytes=256 * _MIB,
        options={"-d": "single", "-m": "dup"},
        allowed="-d -m -n -s -O -L -U",
        flags="-K",
        merged="-O",
        grow=_grow_btrfs,
        # There is no check, as fsck.btrfs(8) does nothing either.
        repair="btrfs check",
        mount_options=(
            "acl noacl autodefrag noautodefrag barrier nobarrier commit= compress compress= "
            "compress-force compress-force= datacow nodatacow datasum nodatasum discard discard= "
            "nodiscard flushoncommit noflushoncommit max_inline= metadata_ratio= skip_balance "
            "space_cache= ssd nossd ssd_spread nossd_spread thread_pool= treelog notreelog "
            "user_subvol_rm_allowed"
        ),
        # The error counters of btrfs are of failed reads, writes and flushes, and of wrong
        # checksums (btrfs(5), device stats).
        errors_of_medium=True,
        error_remedy="then scrub it, and reset the counters with `btrfs device stats --reset`",
        block_options=(("-s", ""),),
        least_block_bytes=4096,
        # Kinds of compression that btrfs_parse_compress in fs/btrfs/super.c accepts; newer kernels
        # accept levels, too.
        values=dict.fromkeys(
            ("compress", "compress-force"), r"(zlib|zstd)(:-?\d{1,2})?|lzo|no|none"
        ),
    ),
}

# Words of mkfs options that users may not give: they would use another device or file, or put the
# file system at an offset where no probe finds it.
_REFUSED_WORDS = "offset name file logdev rtdev test_fs root_owner journal_dev"
# Message of mkfs.xfs about an unknown word, which it prints before it opens the device.
_UNKNOWN_OPTION = re.compile(r"unknown option (-\w) (\w+)")
# Pattern of the value of an mkfs option.
_VALUE = re.compile(r"[A-Za-z0-9_^.:+=,][A-Za-z0-9_^.:+=,-]*")


@dataclass(frozen=True)
class Signature:
    """The signature on a device.

    `fs_type` is blkid's TYPE or PTTYPE: ext4, swap, LVM2_member, gpt and so on; `usage` is blkid's
    USAGE (filesystem, raid, crypto, other) or "partition table".
    """

    fs_type: str
    usage: str
    uuid: str = ""
    label: str = ""
    # The unit of a file system's I/O, in bytes (blocks of ext4, sectors of xfs); 0 if unknown.
    block_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.fs_type} ({self.usage})"


def supported(fs_type: str) -> FileSystem:
    """The record of a supported file system type. Raises UnsupportedFileSystem."""
    try:
        return FILE_SYSTEMS[fs_type]
    except KeyError:
        raise mount_errors.UnsupportedFileSystem(fs_type, tuple(FILE_SYSTEMS)) from None


def find(kernel: Kernel, device: str, fs_type: str) -> Signature | None:
    """Find a file system of one type on a formatted device; None if there is none.

    Signatures of other formats do not count on a formatted device: the users of its file system may
    fill any block, such as the last one, with the signature of another format. Raises ProbeFailed
    if the device cannot be read.
    """
    try:
        return _signature(device, kernel.superblock(device, fs_type))
    except OSError as error:
        raise mount_errors.ProbeFailed(device, str(error.strerror)) from error


def probe(kernel: Kernel, device: str, length_bytes: int = 0) -> Signature | None:
    """Find any signature on a device that was never formatted; None for a blank device.

    With `length_bytes` only the first bytes are searched. libblkid is called in this process, which
    takes a tenth of the time of a program; lvm2 and every mkfs need that library, too. udev's
    database is not used, as it may be stale or absent. Raises ProbeFailed.
    """
    try:
        return _signature(device, kernel.signatures(device, length_bytes))
    except OSError as error:
        raise mount_errors.ProbeFailed(device, str(error.strerror)) from error


# Number of bytes at the end of a device in which a signature may be: ZFS has labels in the last 512
# KiB; signatures of MD, DRBD, DDF and GPT are nearer to the end.
_END_BYTES = 1 << 20


def probe_grown(kernel: Kernel, device: str, original_bytes: int) -> Signature | None:
    """Find any signature on a device that may have grown, and was never formatted or used.

    The device had `original_bytes` when lvm2 made it. lvm2 wipes signatures when it makes a volume,
    but not when it extends one, so added extents may have a signature of an earlier volume at their
    end. Raises ProbeFailed.

    1. Probe the whole device. If the device is blank or has not grown, this is the result.
    2. Probe the first `original_bytes`. If these bytes are not blank, the result of step 1 counts.
    3. Zero the end of the added extents, and probe the whole device again.
    """
    size_bytes = kernel.device_size_bytes(device)
    signature, problem = None, None
    try:
        signature = probe(kernel, device)
    except mount_errors.ProbeFailed as error:
        problem = error
    is_blank = signature is None and problem is None
    if (
        is_blank
        or size_bytes <= original_bytes
        or probe(kernel, device, original_bytes) is not None
    ):
        if problem is not None:
            raise problem
        return signature
    start = max(original_bytes, size_bytes - _END_BYTES)
    try:
        # These extents have no data of this volume, as it was never used and is blank up to here.
        kernel.zero_out(device, start, size_bytes - start)
        kernel.flush(device)
    except OSError as error:
        raise mount_errors.ProbeFailed(device, str(error.strerror)) from error
    return probe(kernel, device)


# Length of a device's first block, in bytes. This block has a superblock's flag of an unfinished
# mkfs.
_FIRST_BYTES = 4096


def discard_unfinished(kernel: Kernel, device: str, fs_type: str, identity: str) -> bool:
    """Zero the superblock with UUID `identity` that a killed mkfs left; False if there is none.

    The caller knows from the volume's tags that the device was not formatted. Only a mkfs that
    Carver ran has given this UUID to the device, or to the volume of which the device is a copy. No
    user has written to such a file system, as the kernel does not mount it. Raises ProbeFailed,
    also if the device is in use.
    """
    unfinished = supported(fs_type).unfinished
    try:
        if unfinished is None:
            return False
        if not unfinished.is_on(kernel.read(device, 0, _FIRST_BYTES), identity):
            return False
        kernel.zero_out(device, 0, _FIRST_BYTES, method=By.WRITES)
        kernel.flush(device)
    except OSError as error:
        raise mount_errors.ProbeFailed(device, str(error.strerror)) from error
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
        raise mount_errors.ProbeFailed(
            device, f"libblkid finds {', '.join(sorted(tags))} but no type"
        )
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
    """Make a file system on a device that `probe` has just found blank, with a UUID if given.

    The user's options take precedence over the given UUID, and over the features that are disabled
    for `oldest_kernel`. An old mkfs that does not know such a feature does not enable it either,
    and is run again without the option.

    Call this directly after the probe, so that nothing can write to the device in between. mke2fs
    asks before it overwrites a file system, but only on a terminal, and it has no terminal here.
    mkfs.xfs and mkfs.btrfs refuse to overwrite, as -f is never given. No mkfs writes to a mounted
    device. Raises FormatFailed, BadOption, UnsupportedFileSystem.
    """
    file_system = supported(fs_type)
    option_values = check_options(fs_type, options)
    features_off: Sequence[Feature] = [
        feature for feature in file_system.features if feature.kernel > oldest_kernel
    ]
    while True:
        words = _merged(file_system, option_values, uuid, features_off)
        result = run(file_system.program, "-q", *words, "--", device)
        if result.exit_code == 0:
            return
        still_off = _without_unknown(features_off, result.stderr)
        if len(still_off) == len(features_off):
            raise mount_errors.FormatFailed(device, fs_type, result.stderr)
        features_off = still_off


def check(run: Run, device: str, fs_type: str) -> None:
    """Check an unmounted file system, and repair small damage. Raises Damaged, CheckFailed.

    A file system that grows only while unmounted is then grown to its device's size. Only ext4
    needs a program for the check.
    """
    file_system = supported(fs_type)
    if file_system.check:
        result = run(*file_system.check, "--", device)
        # Exit codes of e2fsck(8): 1 and 2 if all damage was repaired, 4 if damage remains; others
        # if the check failed.
        if result.exit_code == 4:
            raise mount_errors.Damaged(device, fs_type, _said(result), file_system.repair)
        if result.exit_code not in (0, 1, 2):
            raise _check_failed(device, fs_type, result)
    if file_system.resize:
        result = run(*file_system.resize, "--", device)
        if result.exit_code != 0:
            raise _check_failed(device, fs_type, result)


def _said(result: Result) -> str:
    return result.stdout.strip() or result.stderr.strip()


def _check_failed(device: str, fs_type: str, result: Result) -> mount_errors.CheckFailed:
    return mount_errors.CheckFailed(device, fs_type, f"{_said(result)} (exit {result.exit_code})")


def check_options(fs_type: str, options: Sequence[str]) -> dict[str, str]:
    """Parse a user's mkfs options, such as `-m`, `0`, `-K`, into values by option.

    Raises BadOption for an option that is not allowed, is given twice, or has a bad value.

    The value of an option without a value is empty. No device is needed, so a configuration can be
    checked with this function.
    """
    file_system = supported(fs_type)
    checked: dict[str, str] = {}
    words = iter(options)
    for option in words:
        if option in file_system.flags.split():
            checked[option] = ""
            continue
        if option not in file_system.allowed.split() or option in checked:
            allowed = f"{file_system.allowed} {file_system.flags}".strip()
            raise mount_errors.BadOption(
                option, f"is not allowed for {fs_type} or given twice; allowed are {allowed}"
            )
        value = next(words, "")
        if not _VALUE.fullmatch(value):
            raise mount_errors.BadOption(
                f"{option} {value}", "has no value, or one with odd characters"
            )
        keys = {word.partition("=")[0] for word in value.split(",")}
        if refused := keys.intersection(_REFUSED_WORDS.split()):
            raise mount_errors.BadOption(f"{option} {value}", f"may not hold {', '.join(refused)}")
        checked[option] = value
    _check_blocks(file_system, checked)
    return checked


def check_mount_options(fs_type: str, options: Sequence[str], mount_options: Sequence[str]) -> None:
    """Raise BadOption for mount options that the kernel would refuse for a new file system.

    An example is an option that needs a feature which the mkfs options do not enable.
    """
    file_system, option_values = supported(fs_type), check_options(fs_type, options)
    keys = {word.partition("=")[0] for word in mount_options}
    for option_name, other_name in file_system.only_with:
        if option_name in keys and other_name not in keys:
            raise mount_errors.BadOption(option_name, f"needs {other_name} as well")
    for option_name, other_name in file_system.never_with:
        if {option_name, other_name} <= set(mount_options):
            raise mount_errors.BadOption(option_name, f"contradicts {other_name}; give one of them")
    for word in mount_options:
        key, _, value = word.partition("=")
        if value and not re.fullmatch(file_system.values.get(key, ".*"), value):
            raise mount_errors.BadOption(word, f"has no value that the kernel takes for {fs_type}")
        if word in file_system.only_read:
            why = f"mounts {fs_type} for reading only, and a new volume is written to"
            raise mount_errors.BadOption(word, why)
        option, feature = file_system.needs.get(word, ("", ""))
        if feature and feature not in option_values.get(option, "").split(","):
            raise mount_errors.BadOption(
                word, f"needs a file system that is made with mkfs options `{option} {feature}`"
            )


def block_bytes(fs_type: str, options: Sequence[str]) -> int:
    """The unit of I/O, in bytes, of a file system that is made with a user's mkfs options.

    The size is 0 if it is that of the device's logical blocks, or unknown. Raises BadOption for an
    option that is not allowed.
    """
    if fs_type not in FILE_SYSTEMS:
        return 0
    file_system, option_values = FILE_SYSTEMS[fs_type], check_options(fs_type, options)
    option, key = file_system.block_options[0]
    return _size(option_values.get(option, ""), key) or file_system.least_block_bytes


def _check_blocks(file_system: FileSystem, option_values: Mapping[str, str]) -> None:
    """Raise BadOption for blocks that are larger than this node's pages of memory.

    Only new kernels mount such file systems, and not those of every type.
    """
    for option, key in file_system.block_options:
        value = option_values.get(option, "")
        if (size_bytes := _size(value, key)) > mmap.PAGESIZE:
            raise mount_errors.BadOption(
                f"{option} {value}",
                f"makes blocks of {size_bytes} bytes, which the kernel cannot mount: this node's"
                f" pages of memory have {mmap.PAGESIZE}",
            )


# Suffixes of sizes in options of mke2fs(8), mkfs.xfs(8) and mkfs.btrfs(8).
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}
_NUMBER = re.compile(r"(\d{1,12})([km]?)", re.IGNORECASE)


def _size(value: str, key: str) -> int:
    """Parse the size in bytes of an option's value, or of a key in its comma list; 0 for none."""
    words = dict(word.partition("=")[::2] for word in value.split(",")) if key else {"": value}
    if key and words.get("log", "").isdigit():
        return 1 << min(int(words["log"]), 60)
    match = _NUMBER.fullmatch(words.get(key, ""))
    return int(match[1]) * _UNITS[match[2].lower()] if match else 0


def check_size(fs_type: str, size_bytes: int) -> None:
    """Raise TooSmall if a file system of a type needs a larger device."""
    minimum_bytes = supported(fs_type).minimum_bytes
    if size_bytes < minimum_bytes:
        raise mount_errors.TooSmall(fs_type, size_bytes, minimum_bytes)


def grow(kernel: Kernel, mount: table.Mount) -> None:
    """Grow a mounted file system to its device's size, if the file system is smaller.

    Raises GrowFailed if the kernel refuses, or the mount's source is another device.

    `mount` must be writable, as the kernel requires. Each NodeExpandVolume and NodeStageVolume
    calls this, so ioctls are used: a process, such as resize2fs(8), would take most of the time of
    either call (and xfs_growfs and btrfs parse the whole mount table).
    """
    grow_it = supported(mount.fs_type).grow
    try:
        if kernel.device_number(mount.source) != mount.device:
            raise mount_errors.GrowFailed(
                mount.path, mount.fs_type, f"{mount.source} is another device"
            )
        grow_it(kernel, mount, kernel.device_size_bytes(mount.source))
    except OSError as error:
        why = str(error.strerror)
        if error.errno == errno.EPERM and mount.fs_type == "ext4":
            why += _about_refusal(kernel, mount)
        raise mount_errors.GrowFailed(mount.path, mount.fs_type, why) from error


def _about_refusal(kernel: Kernel, mount: table.Mount) -> str:
    """Explain the EPERM of an ext4 that refused to grow.

    ext4 returns EPERM both for a missing capability and for a file system that has met errors
    (ext4_resize_begin in fs/ext4/resize.c).
    """
    counters: Mapping[str, int] = {}
    with suppress(OSError):
        counters = kernel.error_counters(mount.fs_type, mount.device)
    if any(counters.values()):
        return f" (it has met errors; stop the workload, {supported(mount.fs_type).error_remedy})"
    return " (ext4 asks for CAP_SYS_RESOURCE; is Carver privileged?)"


def gives_uuid(fs_type: str, options: Sequence[str]) -> bool:
    """Whether a user's mkfs options set a UUID. Raises BadOption for an option not allowed."""
    option, word = supported(fs_type).uuid
    value = check_options(fs_type, options).get(option)
    return value is not None and any(part.startswith(word) for part in value.split(","))


def fixed_uuid(fs_type: str, options: Sequence[str]) -> str:
    """The UUID that a user's mkfs options set; empty if they set none, or a random UUID."""
    option, word = supported(fs_type).uuid
    for part in check_options(fs_type, options).get(option, "").split(","):
        with suppress(ValueError):
            if part.startswith(word):
                return str(uuid.UUID(part.removeprefix(word)))
    return ""


def _without_unknown(features: Sequence[Feature], stderr: str) -> Sequence[Feature]:
    """The features that an mkfs knows, by its error message about the first unknown feature."""
    unknown = _UNKNOWN_OPTION.search(stderr)
    for index, feature in enumerate(features):
        if unknown is not None and unknown.groups() == (feature.option, feature.name):
            return features[:index]
    return features


def _merged(
    file_system: FileSystem,
    option_values: Mapping[str, str],
    uuid: str,
    features_off: Sequence[Feature] = (),
) -> list[str]:
    """The words of all mkfs options: Carver's options, then the user's.

    Carver's options include the UUID, and those that disable the features in `features_off`.
    """
    options = dict(file_system.options)
    added = [(feature.option, f"{feature.name}=0") for feature in features_off]
    if uuid:
        option, word = file_system.uuid
        added.append((option, f"{word}{uuid}"))
    for option, word in added:
        options[option] = ",".join(filter(None, (options.get(option), word)))
    for option, value in option_values.items():
        if option in file_system.merged.split() and option in options:
            options[option] = _merged_list(options[option], value)
        else:
            options[option] = value
    return [word for option, value in options.items() for word in (option, value) if word]


def _merged_list(own_list: str, user_list: str) -> str:
    """Merge two comma lists; for a key in both, the user's (`user_list`) replaces Carver's.

    mkfs.xfs refuses a key that is given twice.
    """

    def key(word: str) -> str:
        return word.removeprefix("^").partition("=")[0]

    keys = {key(word) for word in user_list.split(",")}
    kept_words = [word for word in own_list.split(",") if key(word) not in keys]
    return ",".join([*kept_words, user_list])


# Size of a btrfs superblock, in bytes. The positions below are of fields in struct
# btrfs_super_block (<linux/btrfs_tree.h>).
_SIZE = 4096
# Offsets of the copies of a superblock on a device, in bytes (btrfs_sb_offset).
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

# Polynomial of crc32c, reversed.
_POLYNOMIAL = 0x82F63B78


def is_on(kernel: Kernel, device: str) -> bool:
    """Whether a device has the magic number of a btrfs, even of a damaged btrfs."""
    size_bytes, offset = kernel.device_size_bytes(device), _OFFSETS[0]
    return offset + _SIZE <= size_bytes and kernel.read(device, offset, _SIZE)[_MAGIC_AT] == _MAGIC


def renew_uuid(kernel: Kernel, device: str) -> None:
    """Give the btrfs on an unmounted device a new random UUID.

    Raises RenewFailed if no superblock is undamaged, with a checksum of type crc32c.
    """
    identity = uuid.uuid4().bytes
    superblocks = list(_superblocks(kernel, device))
    if not superblocks:
        raise mount_errors.RenewFailed(device, "no superblock with a good checksum of type crc32c")
    # The kernel mounts by the first copy. The first copy is written last, so that the new UUID
    # counts only once all copies have it.
    for offset, block in reversed(superblocks):
        kernel.write(device, offset, _renewed(block, identity))


def _superblocks(kernel: Kernel, device: str) -> Iterator[tuple[int, bytes]]:
    size_bytes = kernel.device_size_bytes(device)
    for offset in _OFFSETS:
        if offset + _SIZE > size_bytes:
            return
        block = kernel.read(device, offset, _SIZE)
        is_superblock = block[_MAGIC_AT] == _MAGIC and block[_OFFSET] == offset.to_bytes(
            8, "little"
        )
        if is_superblock and block[_CHECKSUM_TYPE] == _CRC32C and _signed(block) == block:
            yield offset, block


def _renewed(block: bytes, identity: bytes) -> bytes:
    new_block = bytearray(block)
    (features,) = _INCOMPATIBLE.unpack_from(block, _INCOMPATIBLE_AT)
    if not features & _HAS_METADATA_ID:
        new_block[_METADATA_ID] = block[_ID]
        _INCOMPATIBLE.pack_into(new_block, _INCOMPATIBLE_AT, features | _HAS_METADATA_ID)
    new_block[_ID] = identity
    return _signed(new_block)


def _signed(block: bytes | bytearray) -> bytes:
    """A superblock with the checksum of its contents (crc32c, RFC 3720, section B.4)."""
    value = 0xFFFFFFFF
    for byte in block[_CHECKSUM_BYTES:]:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
    checksum = _CHECKSUM.pack(value ^ 0xFFFFFFFF).ljust(_CHECKSUM_BYTES, bytes(1))
    return checksum + bytes(block[_CHECKSUM_BYTES:])
