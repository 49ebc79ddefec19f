"""File systems: probe, make, check, grow, and a new UUID for a copy."""

import errno
import re
import shlex
import struct
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mount import errors, table
from mount.kernel import Kernel

_MIB = 1024 * 1024


class Result(Protocol):
    """What a program that ended left behind."""

    @property
    def exit_code(self) -> int:
        """The exit status; not zero is no exception here."""
        ...

    @property
    def stdout(self) -> str:
        """What it printed."""
        ...

    @property
    def stderr(self) -> str:
        """What it complained about."""
        ...


class Run(Protocol):
    """Runs a program to its end. Raises only if it is missing or takes too long."""

    def __call__(self, *words: str) -> Result:
        """Run `words`, the first of which is the program."""
        ...


Version = tuple[int, int]

OLDEST_KERNEL: Version = (4, 18)


@dataclass(frozen=True)
class Feature:
    """A feature that mkfs switches on by default and kernels before `kernel` cannot mount."""

    option: str
    name: str
    kernel: Version


@dataclass(frozen=True)
class FileSystem:
    """How one file system is made, and what it needs.

    `options` are Carver's own (option letter → value), `allowed` the letters users may give, and
    `merged` those whose values are comma lists, so that a user's words are added to ours.
    `uuid` is the option that gives it one, or of a comma list the word. `duplicate_data` are mount
    options for a copy that has its origin's UUID. `check` is the program
    that looks over a file system before it is mounted, and mends what it can without asking;
    `repair` is what a person does with one that is damaged. `features` are switched off for older
    kernels, in the order in which mkfs learned them.
    """

    program: str
    minimum_bytes: int
    options: Mapping[str, str]
    allowed: str
    flags: str
    merged: str
    repair: str
    uuid: tuple[str, str] = ("-U", "")
    check: tuple[str, ...] = ()
    duplicate_data: tuple[str, ...] = ()
    features: tuple[Feature, ...] = ()


# The features are spelled out: a file system is the same on every node, whatever its mke2fs.conf,
# and a kernel as old as 4.18 can mount it. All are older than e2fsprogs 1.44 and xfsprogs 5.1. What
# newer tools switch on (orphan_file, rmapbt, …) a class may ask for; `features` has what mkfs.xfs
# switches on by itself.
FILE_SYSTEMS: Mapping[str, FileSystem] = {
    "ext4": FileSystem(
        program="mkfs.ext4",
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
        repair="e2fsck -f",
    ),
    "xfs": FileSystem(
        program="mkfs.xfs",
        # xfsprogs 5.19 refuses less: "Filesystem must be larger than 300MB."
        minimum_bytes=300 * _MIB,
        options={"-m": "crc=1,finobt=1,reflink=1,rmapbt=0", "-i": "sparse=1"},
        allowed="-b -d -i -l -n -s -m -L",
        flags="-K",
        merged="-b -d -i -l -n -s -m",
        # fsck.xfs(8) does nothing: mounting replays the log.
        repair="xfs_repair",
        uuid=("-m", "uuid="),
        duplicate_data=("nouuid",),
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
        # mkfs.btrfs is content with 109 MiB, but the kernel resizes to no less than 256 MiB
        # (btrfs_ioctl_resize): a smaller one could not grow by a little.
        minimum_bytes=256 * _MIB,
        options={"-d": "single", "-m": "dup"},
        allowed="-d -m -n -s -O -L -U",
        flags="-K",
        merged="-O",
        # fsck.btrfs(8) does nothing either.
        repair="btrfs check",
    ),
}

# Words that lead out of the device, or put the file system where no probe would find it.
_REFUSED_WORDS = {
    "offset",
    "name",
    "file",
    "logdev",
    "rtdev",
    "test_fs",
    "root_owner",
    "journal_dev",
}
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

    def __str__(self) -> str:
        return f"{self.fs_type} ({self.usage})"


def known(fs_type: str) -> FileSystem:
    """How `fs_type` is made. Raises UnsupportedFileSystem."""
    try:
        return FILE_SYSTEMS[fs_type]
    except KeyError:
        raise errors.UnsupportedFileSystem(fs_type, tuple(FILE_SYSTEMS)) from None


def probe(run: Run, device: str, kernel: Kernel | None = None) -> Signature | None:
    """What the device itself holds, None if it is blank. Raises ProbeFailed when that is unsure.

    The superblocks are read, never udev's database, which is stale or absent at times: in this
    process where a `kernel` is given and has libblkid, else by a program.
    """
    tags = None if kernel is None else _found(kernel, device)
    if tags is None:
        tags = _told(run, device)
    uuid, label = tags.get("UUID", ""), tags.get("LABEL", "")
    if "TYPE" in tags:
        return Signature(tags["TYPE"], tags.get("USAGE", "unknown"), uuid, label)
    if "PTTYPE" in tags:
        return Signature(tags["PTTYPE"], "partition table", tags.get("PTUUID", ""))
    if unknown := {"USAGE", "UUID", "LABEL"} & tags.keys():
        raise errors.ProbeFailed(device, f"blkid tells {', '.join(sorted(unknown))} but no type")
    return None


def _found(kernel: Kernel, device: str) -> Mapping[str, str] | None:
    """What blkid's library tells, None where that is missing."""
    try:
        return kernel.signatures(device)
    except OSError as error:
        if error.errno == errno.ENOSYS:
            return None
        raise errors.ProbeFailed(device, str(error.strerror)) from error


def _told(run: Run, device: str) -> Mapping[str, str]:
    """What blkid tells."""
    # blkid -p alone answers 2 and nothing else for a blank device, a missing one and one that
    # cannot be read alike. With --info it answers 0 and the device's I/O limits, but only once it
    # has opened and read the device: that is what proves a blank one blank (seen on 2.38).
    usages = ("--usages", "filesystem,raid,crypto,other")
    result = run("blkid", "--probe", "--info", *usages, "--output", "export", "--", device)
    if result.exit_code == 8:  # blkid(8): ambivalent
        raise errors.ProbeFailed(device, "it bears the signatures of more than one thing")
    tags = _tags(result.stdout)
    if result.exit_code != 0 or "MINIMUM_IO_SIZE" not in tags:
        why = result.stderr.strip() or "it is missing, or it cannot be read"
        raise errors.ProbeFailed(device, f"{why} (blkid: exit {result.exit_code})")
    return tags


def make(
    run: Run,
    device: str,
    fs_type: str,
    options: Sequence[str] = (),
    *,
    uuid: str = "",
    oldest_kernel: Version = OLDEST_KERNEL,
) -> None:
    """Make a file system on a device that `probe` has just found blank; with a UUID if one is told.

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

    A command for ext4 only. Raises Damaged, CheckFailed.
    """
    words = known(fs_type).check
    if not words:
        return
    result = run(*words, "--", device)
    said = result.stdout.strip() or result.stderr.strip()
    # e2fsck(8): 1 and 2 say that all was mended, 4 that something is left, the rest that it failed.
    if result.exit_code == 4:
        raise errors.Damaged(device, fs_type, said, known(fs_type).repair)
    if result.exit_code not in (0, 1, 2):
        raise errors.CheckFailed(device, fs_type, f"{said} (exit {result.exit_code})")


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
        if refused := _REFUSED_WORDS & {word.partition("=")[0] for word in value.split(",")}:
            raise errors.BadOption(f"{option} {value}", f"may not hold {', '.join(refused)}")
        checked[option] = value
    return checked


def check_size(fs_type: str, size_bytes: int) -> None:
    """Raise TooSmall if `fs_type` needs a larger device."""
    minimum_bytes = known(fs_type).minimum_bytes
    if size_bytes < minimum_bytes:
        raise errors.TooSmall(fs_type, size_bytes, minimum_bytes)


def grow(kernel: Kernel, mount: table.Mount) -> None:
    """Have a mounted file system fill its device; nothing happens if it does. Raises GrowFailed.

    `mount` must be writable: the kernel grows through no other.
    """
    try:
        if kernel.device_number(mount.source) != mount.device:
            raise errors.GrowFailed(mount.path, mount.fs_type, f"{mount.source} is another device")
        size_bytes = kernel.device_size_bytes(mount.source)
        if mount.fs_type == "ext4":
            kernel.grow_ext4(mount.path, size_bytes // kernel.statvfs(mount.path).f_bsize)
        elif mount.fs_type == "xfs":
            _grow_xfs(kernel, mount.path, size_bytes)
        elif mount.fs_type == "btrfs":
            kernel.grow_btrfs(mount.path)
        else:
            raise errors.UnsupportedFileSystem(mount.fs_type, tuple(FILE_SYSTEMS))
    except OSError as error:
        why = str(error.strerror)
        if error.errno == errno.EPERM and mount.fs_type == "ext4":
            why += " (ext4 asks for CAP_SYS_RESOURCE; is Carver privileged?)"
        raise errors.GrowFailed(mount.path, mount.fs_type, why) from error


def _grow_xfs(kernel: Kernel, path: str, size_bytes: int) -> None:
    geometry = kernel.xfs_geometry(path)
    blocks = size_bytes // geometry.block_size_bytes
    # The same size is EINVAL where a last, too short allocation group was left out before.
    if blocks > geometry.blocks:
        kernel.grow_xfs(path, blocks, geometry.max_inode_percent)


def _tags(export: str) -> dict[str, str]:
    """KEY=value lines, blanks and the like escaped with backslashes as for a shell."""
    pairs = (line.partition("=") for line in export.splitlines())
    return {key: _unescaped(value) for key, equals, value in pairs if equals}


def _unescaped(value: str) -> str:
    try:
        return "".join(shlex.split(value))
    except ValueError:
        return value


def gives_uuid(fs_type: str, options: Sequence[str]) -> bool:
    """Whether a user's mkfs options say which UUID the file system gets. Raises BadOption."""
    option, word = known(fs_type).uuid
    told = check_options(fs_type, options).get(option)
    return told is not None and any(one.startswith(word) for one in told.split(","))


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
    keys = {_key(word) for word in theirs.split(",")}
    kept = [word for word in ours.split(",") if _key(word) not in keys]
    return ",".join([*kept, theirs])


def _key(word: str) -> str:
    return word.removeprefix("^").partition("=")[0]


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
