"""Find the ranges of a snapshot that are allocated, or changed since an earlier snapshot."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import BinaryIO

from agent.core import errors, ids, tag
from agent.core.ids import VolumeId
from agent.extras.changed_blocks import comparing
from agent.extras.changed_blocks.activations import Activations, Reservations
from agent.extras.changed_blocks.comparing import Spool
from agent.extras.changed_blocks.extents import (
    BLOCK_BYTES,
    LOGICAL_START,
    USER_START,
    Extent,
    LogicalOffset,
    UserExtent,
    UserOffset,
    clipped,
    merged,
)
from agent.volumes import records
from agent.volumes.context import Context
from agent.volumes.records import Snapshot, Volume
from agent.volumes.report_age import Fresh
from agent.volumes.volume_states import Call
from agent.work.group_worker import Stopping
from agent.work.pace import Work
from lvm import lvm_errors as lvm_errors
from lvm import names
from lvm import thin as thinmaps
from lvm.active_devices import Exceptions
from lvm.thin import Run
from mount import luks
from mount.block_io import Reader
from mount.kernel import Kernel

_Read = Snapshot | Volume


def start_of_user_data(kernel: Kernel, sources: Sequence[tuple[_Read, str]]) -> LogicalOffset:
    """The offset of the user's first byte, which the LUKS2 headers of these devices agree on.

    The devices are of snapshots of one volume, or of the volume itself. The offset is 0 if the
    volume is not encrypted.

    Encrypted snapshots are compared as ciphertext. AES-XTS makes the same ciphertext of the same
    plaintext at the same offset as long as the master key is the same, so the ciphertext differs
    exactly where the plaintext differs. Therefore the headers must agree on the offset and on the
    master key; which passphrases open them does not matter.

    Raises BlocksUnknown where the headers do not agree or cannot be read, OSError.
    """
    starts = [_start(kernel, source, device) for source, device in sources]
    if len(set(starts)) > 1:
        raise errors.BlocksUnknown(
            str(sources[-1][0].id),
            f"{sources[0][0].id!s} has another master key, has its data elsewhere, or is of before"
            " the volume was used first",
            "make a full backup (GetMetadataAllocated)",
        )
    return starts[0][0]


def _start(kernel: Kernel, source: _Read, device: str) -> tuple[LogicalOffset, str]:
    """The offset of the data on one device, and a digest of how the data are encrypted.

    Raises BlocksUnknown where the header is missing, damaged, or of a re-encryption in progress.
    """
    if not source.is_encrypted:
        return LogicalOffset(0), ""
    if (header := luks.read(kernel, device)) is None:
        # A new volume has no header before its first use: only its space is reserved.
        was_used = {tag.SEALED, tag.FORMATTED} & source.own_tags.keys()
        if was_used or not source.header_bytes or luks.bears_any(kernel, device):
            raise errors.BlocksUnknown(
                str(source.id),
                "its LUKS2 header is not there, or not whole",
                "restore the volume's header (`carver volume header restore`), take another"
                " snapshot",
            )
        return LogicalOffset(source.header_bytes), ""
    if header.is_reencrypting:
        raise errors.BlocksUnknown(
            str(source.id),
            "it was taken during a re-encryption",
            "take another snapshot when that is over, and make a full backup of it",
        )
    if header.offset_bytes % BLOCK_BYTES:
        raise errors.BlocksUnknown(
            str(source.id),
            f"its data begin at byte {header.offset_bytes}, inside a block of {BLOCK_BYTES} bytes",
            "back it up by reading all of it",
        )
    return LogicalOffset(header.offset_bytes), header.reading


# Function that yields the ranges to look at between two offsets.
_Candidates = Callable[[int, int], Iterable[Extent]]
# Filter that picks the ranges of the answer from the ranges to look at.
_Filter = Callable[[Iterable[Extent]], Iterator[Extent]]


def _always() -> bool:
    return True


class ChangedRanges:
    """Finds allocated and changed ranges of snapshots, and of volumes, which ids name.

    LVM's metadata say where to look. The metadata of a thin pool say which blocks a volume has, and
    which of them it shares with a snapshot. The table of a COW snapshot says which chunks of the
    origin were overwritten since the snapshot was taken. A block may have been overwritten by the
    same bytes, so the ranges that the metadata name are then compared on the devices. Both
    snapshots' metadata are used whichever snapshot is older, as their times may be wrong after a
    step of the clock.

    A volume may be written to while it is read. The answer may lack data that were written since
    the call began. For an exact answer, take a snapshot and name it.

    Each method polls `is_wanted`, and raises NotWanted once that returns false.
    """

    def __init__(self, context: Context) -> None:
        self._volume_groups = context.volume_groups
        self._reports, self._activator = context.reports, context.activator
        self._mender = context.mender
        self._kernel, self._devices, self._stream = context.kernel, context.devices, context.stream
        self._paces, self._configuration = context.paces, context.configuration
        self.reservations = Reservations(context)
        self.activations = Activations(context)
        self._stopping = threading.Event()

    def _new_spool(self) -> AbstractContextManager[comparing.Spool]:
        """Open a new spool for ranges; beside the socket where /var/tmp cannot be written."""
        return comparing.opened(self._configuration.now.endpoint.parent)

    @contextmanager
    def allocated(
        self, identity: str, is_wanted: Callable[[], bool] = _always, *, is_compared: bool = True
    ) -> "Iterator[Reading]":
        """Find the ranges of a volume that may hold anything but zeroes.

        Everything outside these ranges reads as zeroes. A thick volume has no list of allocated
        blocks: the answer is the whole volume as one range, or with `is_compared` only the blocks
        that are not zeroes. An encrypted thick volume is always one range, as its zeroes are
        ciphertext.

        Raises NoSuchSnapshot, NoSuchVolume, OtherGroup, Copying, SourceLost, MetadataReserved.
        """
        check = self._check(identity, is_wanted)
        with ExitStack() as exit_stack:
            [(source, reader)] = self._opened(exit_stack, identity)
            compares = is_compared and not source.is_encrypted
            work = self._work(check, source, reader)
            unlike_zeroes = partial(comparing.differing, None, 0, reader, work)
            pick: _Filter = unlike_zeroes if compares else iter
            candidates: _Candidates = _everything
            if pool := _pool(source):
                ranges = exit_stack.enter_context(self._new_spool())
                make_command = thinmaps.mapped_words
                self._spool(ranges, pool, thinmaps.mapped, make_command, check, source)
                # The blocks that a thin volume has allocated are not searched for zeroes.
                pick, candidates = iter, partial(clipped, ranges)
            yield self._reading([(source, reader)], candidates, pick)

    @contextmanager
    def changed(
        self,
        base_id: str,
        target_id: str,
        is_wanted: Callable[[], bool] = _always,
        *,
        is_compared: bool = True,
    ) -> "Iterator[Reading]":
        """Find the blocks in which two snapshots of a volume, or a snapshot and its volume, differ.

        With `is_compared`, the answer has exactly the blocks that differ. A base that is smaller
        than the target counts as zeroes behind its end; what an encrypted target has behind the
        base's end is in the answer whatever its contents.

        Without `is_compared`, the answer has all blocks that were written, and no device is read.
        For a thick volume that also includes blocks that were written after the target was taken,
        so the answer grows from call to call.

        Raises as `allocated`, and NotComparable for snapshots of two volumes and for a base that is
        larger or newer than the target.
        """
        check = self._check(target_id, is_wanted)
        with ExitStack() as exit_stack:
            (base, base_reader), (target, target_reader) = self._opened(
                exit_stack, base_id, target_id
            )
            candidates: _Candidates = _everything
            if _pool(base) and _pool(base) == _pool(target):
                ranges = exit_stack.enter_context(self._new_spool())
                make_command = thinmaps.differing_words
                self._spool(
                    ranges, _pool(base), thinmaps.differing, make_command, check, base, target
                )
                candidates = partial(clipped, ranges)
            elif tables := self._tables(base, target):
                candidates = partial(_overwritten, tables, base.size_bytes, check)
            work = self._work(check, target, base_reader, target_reader)
            unlike: _Filter = partial(
                comparing.differing, base_reader, base.size_bytes, target_reader, work
            )
            if target.is_encrypted:
                unlike = partial(_up_to, base.size_bytes, unlike)
            pick: _Filter = unlike if is_compared else iter
            yield self._reading([(base, base_reader), (target, target_reader)], candidates, pick)

    def stop(self) -> None:
        """End all readings at their next piece, or at the next block of a COW table."""
        self._stopping.set()

    def _reading(
        self, sources: list[tuple[_Read, Reader]], candidates: _Candidates, pick: _Filter
    ) -> "Reading":
        source, reader = sources[-1]
        device_paths = [(source, reader.device) for source, reader in sources]

        def require() -> None:
            for source, _ in sources:
                # A COW snapshot whose COW store is full is invalid, and what was read from it just
                # before may already have been wrong.
                if isinstance(source, Snapshot) and self._activator.has_overflowed(source):
                    raise errors.SourceLost(
                        str(source.id), "its area is full, what it held is lost"
                    )

        user_start = partial(start_of_user_data, self._kernel, device_paths)
        return Reading(
            source, source.size_bytes, reader.device, candidates, pick, require, user_start
        )

    def _opened(self, exit_stack: ExitStack, *identities: str) -> list[tuple[_Read, Reader]]:
        """Open the devices of these ids; run one lvm2 command for each that is not active.

        The devices are closed when `exit_stack` is, and their snapshots deactivated after that.
        """
        for identity in identities:
            if VolumeId.parse(identity) is None:
                raise errors.NoSuchSnapshot(identity)
        groups = sorted({ids.group_of(identity) for identity in identities})
        with self._volume_groups.hold(*groups):
            fresh_report = self._mender.mend(*groups)
            sources = [self._found(fresh_report, identity) for identity in identities]
            if len(sources) > 1:
                _require_comparable(*sources)
            if thin_groups := sorted({source.group.name for source in sources if _pool(source)}):
                # `end` is registered first, so that it is called after the devices are closed.
                exit_stack.callback(self.activations.end, *thin_groups)
            readers = [
                self._kernel.reader(self._activate(exit_stack, source)) for source in sources
            ]
            # While these devices are open, lvm2 cannot remove their volumes.
            return [
                (source, exit_stack.enter_context(reader))
                for source, reader in zip(sources, readers, strict=True)
            ]

    def _found(self, fresh_report: Fresh, identity: str) -> _Read:
        if names.is_of(ids.VOLUME_PREFIX, ids.logical_name(identity)):
            return fresh_report.usable(identity, Call.MANAGE)
        snapshot = self._reports.snapshot(fresh_report, identity)
        if snapshot.problem:
            raise errors.SourceLost(identity, snapshot.problem)
        return snapshot

    def _check(self, identity: str, is_wanted: Callable[[], bool]) -> Callable[[], None]:
        """Make the function that a reading calls before each piece.

        The function raises Stopping when the service stops, NotWanted when the caller has gone.
        """

        def check() -> None:
            if self._stopping.is_set():
                raise Stopping(identity)
            if not is_wanted():
                raise errors.NotWanted(identity)

        return check

    def _work(self, check: Callable[[], None], source: _Read, *readers: Reader) -> Work:
        devices = [reader.device for reader in readers]
        return self._paces.of(source.group.name).work(
            "compare", *devices, check=check, may_join=True
        )

    def _activate(self, exit_stack: ExitStack, source: _Read) -> str:
        if isinstance(source, Snapshot):
            return exit_stack.enter_context(self.activations.held(source)).path
        return self._activator.activate(source).path

    def _spool(
        self,
        ranges: Spool,
        pool: str,
        parse_output: Callable[[BinaryIO], Iterator[Run]],
        make_command: Callable[..., tuple[str, ...]],
        check: Callable[[], None],
        *sources: _Read,
    ) -> None:
        """Read the whole output of a thin-provisioning tool at once into a spool file.

        The pool's metadata snapshot is reserved while the tool runs, so the tool must not wait for
        this call's caller. `make_command` makes the tool's command line, and `parse_output` parses
        the tool's output.
        """
        group = sources[-1].group.name
        numbers = [self._number(group, source.name) for source in sources]
        with (
            self.reservations.held(group, pool) as metadata,
            self._stream(*make_command(metadata, *numbers)) as output,
        ):
            ranges.fill(merged(_checked(parse_output(output), check)))

    def _number(self, group: str, name: str) -> int:
        number = self._devices.thin_id(group, name)
        if number is None:
            raise lvm_errors.Inactive(group, name)
        return number

    def _tables(self, base: _Read, target: _Read) -> list[Exceptions]:
        """The COW tables whose union has all chunks that differ; empty for thin volumes.

        The table of the older snapshot lists all chunks that were overwritten since, and thereby
        everything that the newer snapshot's table lists. Both tables are returned, as it is not
        certain which snapshot is older. Also empty where the chunk sizes differ.
        """
        sources = [base] if isinstance(target, Volume) else [base, target]
        if any(_pool(source) for source in sources):
            return []
        tables = [self._devices.exceptions(source.group.name, source.name) for source in sources]
        return tables if len({table.chunk_bytes for table in tables}) == 1 else []


@dataclass(frozen=True)
class Reading:
    """A snapshot or a volume whose device is open while its ranges are read.

    For a comparison, this is the target, not the base.

    - `of` is the snapshot or the volume.
    - `size_bytes` is the size of the logical volume, LUKS header included.
    - `device` is the path of the active block device, which stays open until the reading ends.
    - `candidates` yields the ranges between two offsets to look at; `pick` filters these.
    - `require_readable` raises SourceLost where data that were read may be wrong.
    - `user_start` finds the offset of the user's first byte; raises BlocksUnknown, OSError.
    """

    of: _Read
    size_bytes: int
    device: str
    candidates: _Candidates
    pick: _Filter
    require_readable: Callable[[], None]
    user_start: Callable[[], LogicalOffset]

    def for_user(self) -> "UserReading":
        """Convert this reading to the offsets of the user's device; raises BlocksUnknown."""
        with self._proved():
            begins = self.user_start()
        return UserReading(self, begins)

    def extents(self, starting_offset: LogicalOffset = LOGICAL_START) -> Iterator[Extent]:
        """The sorted ranges of the answer from an offset on.

        The ranges begin and end at multiples of BLOCK_BYTES, but for the starting offset and the
        end. Adjacent ranges are merged. Ranges found by comparing are merged only up to
        MAX_RANGE_BYTES, so that the caller gets each range early. May be called again, also with
        another offset.

        Raises OffsetOutOfRange for an offset behind the end, SourceLost, DeltaFailed, OSError.
        """
        if not 0 <= starting_offset <= self.size_bytes:
            raise errors.OffsetOutOfRange(starting_offset, self.size_bytes)
        return self._extents(starting_offset)

    def _extents(self, start: int) -> Iterator[Extent]:
        with self._proved():
            ranges = self.pick(self.candidates(start, self.size_bytes))
            # Blocks are compared as a whole even if the answer begins inside a block.
            yield from clipped(ranges, start, self.size_bytes)

    @contextmanager
    def _proved(self) -> Iterator[None]:
        """Raise SourceLost at the end of the `with` where data read inside it may be wrong.

        Also where the reading failed: then the loss explains the error, and replaces it.
        """
        try:
            yield
        except (OSError, errors.BlocksUnknown):
            self.require_readable()
            raise
        self.require_readable()


@dataclass(frozen=True)
class UserReading:
    """A reading in offsets of the user's device, which begins at the logical offset `begins`."""

    logical: Reading
    begins: LogicalOffset

    @property
    def size_bytes(self) -> int:
        """The size of the user's device, in bytes."""
        return self.logical.size_bytes - self.begins

    def extents(self, starting_offset: UserOffset = USER_START) -> Iterator[UserExtent]:
        """The sorted ranges of the answer in offsets of the user's device; as `Reading.extents`."""
        if not 0 <= starting_offset <= self.size_bytes:
            raise errors.OffsetOutOfRange(starting_offset, self.size_bytes)
        return (
            UserExtent(UserOffset(extent.offset_bytes - self.begins), extent.length_bytes)
            for extent in self.logical.extents(LogicalOffset(self.begins + starting_offset))
        )


def _require_comparable(base: _Read, target: _Read) -> None:
    source_id = target.source_id if isinstance(target, Snapshot) else target.id
    why = ""
    if not isinstance(base, Snapshot):
        raise errors.NoSuchSnapshot(str(base.id))
    if base.source_id != source_id:
        why = f"it is of {base.source_id}, the other of {source_id}"
    elif records.is_older(base, target) is False:
        why = "it was taken later"
    elif base.size_bytes > target.size_bytes:
        why = f"it has {base.size_bytes} bytes, the other {target.size_bytes}"
    if why:
        raise errors.NotComparable(str(base.id), str(target.id), why)


def _pool(source: _Read) -> str:
    return source.group.volume(source.name).pool


def _overwritten(
    tables: Sequence[Exceptions], base_bytes: int, check: Callable[[], None], start: int, end: int
) -> Iterator[Extent]:
    """The ranges between two offsets that COW tables contain, and all behind the base's end."""
    base_end = min(end, base_bytes)
    if start < base_end:
        yield from comparing.ranges(tables, start, base_end, check)
    yield from _everything(max(start, base_bytes), end)


def _checked(runs: Iterable[Run], check: Callable[[], None]) -> Iterator[Extent]:
    for run in runs:
        check()
        yield Extent(run.offset_bytes, run.length_bytes)


def _everything(start: int, end: int) -> Iterator[Extent]:
    if start < end:
        yield Extent(start, end - start)


def _up_to(end_bytes: int, pick: _Filter, extents: Iterable[Extent]) -> Iterator[Extent]:
    """Apply a filter to the part of sorted ranges before an offset; keep all that lies behind."""
    remaining, behind = iter(extents), list[Extent]()

    def before() -> Iterator[Extent]:
        for extent in remaining:
            if extent.end_bytes > end_bytes:
                behind.append(extent)
            yield from clipped([extent], 0, end_bytes)
            if behind:
                return

    yield from pick(before())
    for extent in chain(behind, remaining):
        yield from clipped([extent], end_bytes, extent.end_bytes)
