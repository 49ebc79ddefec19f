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
from agent.work.pace import IoTask
from lvm import lvm_errors as lvm_errors
from lvm import names
from lvm import thin as thinmaps
from lvm.active_devices import Exceptions
from lvm.thin import Run
from mount import luks
from mount.block_io import Reader
from mount.kernel import Kernel

_Source = Snapshot | Volume


def start_of_user_data(kernel: Kernel, sources: Sequence[tuple[_Source, str]]) -> LogicalOffset:
    """Return the logical offset of the user's first byte, on which the LUKS2 headers have to agree.

    `sources` are snapshots of one volume, or the volume itself, each with the path of its device.
    The offset is 0 if the volume is not encrypted.

    Encrypted snapshots are compared as ciphertext. AES-XTS makes the same ciphertext of the same
    plaintext at the same offset as long as the master key is the same, so the ciphertext differs
    exactly where the plaintext differs. Therefore the headers must agree on the offset of the data
    and on the master key. The passphrases that open the headers may differ.

    Raises BlocksUnknown if the headers do not agree, and as `_start`; OSError if a device cannot be
    read.
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


def _start(kernel: Kernel, source: _Source, device: str) -> tuple[LogicalOffset, str]:
    """Return the offset of the data on one device, and a digest of how the data are encrypted.

    If the volume is not encrypted, the offset is 0 and the digest is empty. If the volume was never
    used, it has no LUKS2 header yet: the offset is then the size of the space that is reserved for
    the header, and the digest is empty.

    Raises BlocksUnknown if the header of a used volume is missing, if the header is damaged, if the
    snapshot was taken during a re-encryption, or if the data do not begin at a multiple of
    BLOCK_BYTES. Raises OSError if the device cannot be read.
    """
    if not source.is_encrypted:
        return LogicalOffset(0), ""
    if (header := luks.read(kernel, device)) is None:
        # A new volume has no LUKS2 header before its first use; only the space for the header is
        # reserved.
        was_used = {tag.SEALED, tag.FORMATTED} & source.own_tags.keys()
        if was_used or not source.header_bytes or luks.has_header_copy(kernel, device):
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
    return LogicalOffset(header.offset_bytes), header.decryption_digest


# Function of two offsets that yields the candidates between them: the ranges that may belong to the
# answer.
_Candidates = Callable[[int, int], Iterable[Extent]]
# Function that yields those parts of the candidate ranges that belong to the answer.
_Filter = Callable[[Iterable[Extent]], Iterator[Extent]]


def _always() -> bool:
    return True


class ChangedRanges:
    """Finds the allocated and the changed ranges of snapshots and volumes, which are given by id.

    LVM's metadata have the candidate ranges:

    - The metadata of a thin pool say which blocks a volume has, and which of these blocks the
      volume shares with a snapshot.
    - The table of a COW snapshot says which chunks of the origin were overwritten since the
      snapshot was taken.

    A block may have been overwritten by the same bytes, so the candidate ranges are then compared
    on the devices. The metadata of both snapshots are used, whichever snapshot is older: the times
    of the snapshots may be wrong, because a clock may have been set.

    A volume may be written to while it is read. The answer may then lack data that were written
    since the call began. For an exact answer, the caller names a snapshot.

    A call of `allocated` or `changed` calls `is_wanted` again and again, and raises NotWanted once
    the result is false.
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
        """Open an empty spool; its file is beside Carver's socket if /var/tmp cannot be written."""
        return comparing.opened(self._configuration.now.endpoint.parent)

    @contextmanager
    def allocated(
        self, identity: str, is_wanted: Callable[[], bool] = _always, *, is_compared: bool = True
    ) -> "Iterator[Reading]":
        """Open a snapshot or volume; yield a `Reading` of the ranges that may not be zeroes.

        Everything outside these ranges reads as zeroes. The device is open for the `with`.

        - The ranges of a thin volume are its allocated blocks, which may hold zeroes, too.
        - A thick volume has no list of allocated blocks. With `is_compared`, its ranges are the
          blocks that are not zeroes. Without `is_compared`, the whole volume is one range.
        - An encrypted thick volume is always one range, because its zeroes are stored as
          ciphertext.

        Raises NoSuchSnapshot, NoSuchVolume or OtherGroup if this node has no volume of that id;
        Copying if the volume is not complete; SourceLost if the snapshot is invalid;
        MetadataReserved if another program has reserved the metadata snapshot of the thin pool;
        CommandError if thin_dump(8) fails.
        """
        check = self._check(identity, is_wanted)
        with ExitStack() as exit_stack:
            [(source, reader)] = self._open_devices(exit_stack, identity)
            compares = is_compared and not source.is_encrypted
            task = self._task(check, source, reader)
            unlike_zeroes = partial(comparing.differing, None, 0, reader, task)
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
        """Open a target and its base snapshot; yield a `Reading` of the ranges that differ.

        The target is a snapshot or a volume. The base is an earlier snapshot of the same volume.
        The devices are open for the `with`.

        With `is_compared`, the ranges are exactly the blocks that differ. A base that is smaller
        than the target counts as zeroes from its end on. Everything that an encrypted target has
        from the base's end on is in the ranges, whatever its contents.

        Without `is_compared`, the ranges are all blocks that were written, and the data on the
        devices are not compared. The ranges of a thick volume then include blocks that were written
        after the target was taken, so they grow from call to call. If the COW stores of two
        snapshots have different chunk sizes, the whole target is one range.

        Raises NotComparable if the snapshots are of two volumes, or if the base is larger or newer
        than the target. Raises the errors of `allocated`, too.
        """
        check = self._check(target_id, is_wanted)
        with ExitStack() as exit_stack:
            (base, base_reader), (target, target_reader) = self._open_devices(
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
            task = self._task(check, target, base_reader, target_reader)
            unlike: _Filter = partial(
                comparing.differing, base_reader, base.size_bytes, target_reader, task
            )
            if target.is_encrypted:
                unlike = partial(_up_to, base.size_bytes, unlike)
            pick: _Filter = unlike if is_compared else iter
            yield self._reading([(base, base_reader), (target, target_reader)], candidates, pick)

    def stop(self) -> None:
        """Make all calls that find or compare ranges raise Stopping.

        A call raises Stopping at the next piece of a comparison, at the next block of a COW table,
        or at the next range that a thin-provisioning tool prints.
        """
        self._stopping.set()

    def _reading(
        self, sources: list[tuple[_Source, Reader]], candidates: _Candidates, range_filter: _Filter
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
            source, source.size_bytes, reader.device, candidates, range_filter, require, user_start
        )

    def _open_devices(
        self, exit_stack: ExitStack, *identities: str
    ) -> list[tuple[_Source, Reader]]:
        """Open the devices of the snapshots or volumes with these ids, and activate inactive ones.

        Runs at most two lvm2 commands for each inactive one, and commands that repair what a killed
        lvm2 left in their volume groups. When `exit_stack` is closed, the devices are closed, and
        the thin snapshots that were activated are deactivated after that. Raises NotComparable if
        the first of two ids cannot be the base of the second, and the errors of `allocated`.
        """
        for identity in identities:
            if VolumeId.parse(identity) is None:
                raise errors.NoSuchSnapshot(identity)
        groups = sorted({ids.group_of(identity) for identity in identities})
        with self._volume_groups.hold(*groups):
            fresh_report = self._mender.mend(*groups)
            sources = [self._find_source(fresh_report, identity) for identity in identities]
            if len(sources) > 1:
                _require_comparable(*sources)
            if thin_groups := sorted({source.group.name for source in sources if _pool(source)}):
                # Register `end` first, so that it is called last: after the devices are closed.
                exit_stack.callback(self.activations.end, *thin_groups)
            readers = [
                self._kernel.reader(self._activate(exit_stack, source)) for source in sources
            ]
            # While these devices are open, lvm2 cannot remove their volumes.
            return [
                (source, exit_stack.enter_context(reader))
                for source, reader in zip(sources, readers, strict=True)
            ]

    def _find_source(self, fresh_report: Fresh, identity: str) -> _Source:
        if names.is_of(ids.VOLUME_PREFIX, ids.logical_name(identity)):
            return fresh_report.usable(identity, Call.MANAGE)
        snapshot = self._reports.snapshot(fresh_report, identity)
        if snapshot.problem:
            raise errors.SourceLost(identity, snapshot.problem)
        return snapshot

    def _check(self, identity: str, is_wanted: Callable[[], bool]) -> Callable[[], None]:
        """Return a function that raises once the service stops, or once an RPC's caller has gone.

        A call has to call that function before each piece that it reads. The function raises
        Stopping if the service stops, and NotWanted if the caller has gone.
        """

        def check() -> None:
            if self._stopping.is_set():
                raise Stopping(identity)
            if not is_wanted():
                raise errors.NotWanted(identity)

        return check

    def _task(self, check: Callable[[], None], source: _Source, *readers: Reader) -> IoTask:
        devices = [reader.device for reader in readers]
        return self._paces.of(source.group.name).task(
            "compare", *devices, check=check, may_join=True
        )

    def _activate(self, exit_stack: ExitStack, source: _Source) -> str:
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
        *sources: _Source,
    ) -> None:
        """Run a thin-provisioning tool, and append the ranges in its output to a spool.

        `make_command` makes the tool's command line, and `parse_output` parses the tool's output.
        The whole output is read at once. The pool's metadata snapshot is reserved while the tool
        runs, so the tool must not wait for the caller of this RPC. Raises MetadataReserved,
        CommandError if the tool fails, Inactive if a device is missing, and what `check` raises.
        """
        group = sources[-1].group.name
        numbers = [self._number(group, source.name) for source in sources]
        with (
            self.reservations.held(group, pool) as metadata,
            self._stream(*make_command(metadata, *numbers)) as output,
        ):
            ranges.fill(merged(_checked_runs(parse_output(output), check)))

    def _number(self, group: str, name: str) -> int:
        number = self._devices.thin_id(group, name)
        if number is None:
            raise lvm_errors.Inactive(group, name)
        return number

    def _tables(self, base: _Source, target: _Source) -> list[Exceptions]:
        """Return COW tables that together contain all chunks in which a base and a target differ.

        The table of the older snapshot contains all chunks that were overwritten since, and thereby
        everything that the newer snapshot's table contains. It is not certain which snapshot is
        older, so both tables are returned. If the target is a volume, only the base's table is
        returned. The result is empty for thin volumes, and if the chunk sizes of the two tables
        differ.
        """
        sources = [base] if isinstance(target, Volume) else [base, target]
        if any(_pool(source) for source in sources):
            return []
        tables = [self._devices.exceptions(source.group.name, source.name) for source in sources]
        return tables if len({table.chunk_bytes for table in tables}) == 1 else []


@dataclass(frozen=True)
class Reading:
    """A snapshot or a volume whose device is open while its ranges are read.

    In a comparison, this is the target, not the base.

    - `source` is the snapshot or the volume.
    - `size_bytes` is the size of the logical volume, LUKS header included.
    - `device` is the path of the active block device, which is open during the `with` that yielded
      this object.
    - `candidates` yields the ranges between two offsets that may belong to the answer.
      `range_filter` yields the parts of these ranges that belong to the answer.
    - `require_readable` raises SourceLost if data that were read may be wrong.
    - `user_start` returns the logical offset of the user's first byte; raises BlocksUnknown,
      OSError.
    """

    source: _Source
    size_bytes: int
    device: str
    candidates: _Candidates
    range_filter: _Filter
    require_readable: Callable[[], None]
    user_start: Callable[[], LogicalOffset]

    def for_user(self) -> "UserReading":
        """Return this object's ranges in offsets of the user's device, which has no LUKS header.

        Raises BlocksUnknown if the offset of the user's first byte cannot be determined, OSError if
        the header cannot be read, and SourceLost if the snapshot is invalid.
        """
        with self._proved():
            begins = self.user_start()
        return UserReading(self, begins)

    def extents(self, starting_offset: LogicalOffset = LOGICAL_START) -> Iterator[Extent]:
        """Return an iterator of the allocated or changed ranges from an offset on, sorted.

        The ranges begin and end at multiples of BLOCK_BYTES, except at the starting offset and at
        the end of the device. Adjacent ranges are merged. Ranges that a comparison found are merged
        only up to MAX_RANGE_BYTES, so that the caller gets each range early. The method may be
        called again, also with another offset.

        Raises OffsetOutOfRange if the offset is beyond the end. The iterator raises SourceLost if
        data that were read may be wrong, OSError if a device cannot be read, NotWanted if the
        caller has gone, and Stopping if the service stops.
        """
        if not 0 <= starting_offset <= self.size_bytes:
            raise errors.OffsetOutOfRange(starting_offset, self.size_bytes)
        return self._extents(starting_offset)

    def _extents(self, start: int) -> Iterator[Extent]:
        with self._proved():
            ranges = self.range_filter(self.candidates(start, self.size_bytes))
            # Clip the ranges: whole blocks are compared, even if the answer begins inside a block.
            yield from clipped(ranges, start, self.size_bytes)

    @contextmanager
    def _proved(self) -> Iterator[None]:
        """Raise SourceLost at the end of the `with` if data that were read inside it may be wrong.

        If the `with` fails with OSError or BlocksUnknown, the loss explains that error, and
        SourceLost replaces it.
        """
        try:
            yield
        except (OSError, errors.BlocksUnknown):
            self.require_readable()
            raise
        self.require_readable()


@dataclass(frozen=True)
class UserReading:
    """The ranges of a `Reading` in offsets of the device that the volume's user reads.

    `begins` is the logical offset at which the user's device begins.
    """

    logical: Reading
    begins: LogicalOffset

    @property
    def size_bytes(self) -> int:
        """The size of the user's device, in bytes."""
        return self.logical.size_bytes - self.begins

    def extents(self, starting_offset: UserOffset = USER_START) -> Iterator[UserExtent]:
        """Return an iterator of the allocated or changed ranges, in offsets of the user's device.

        Raises the errors of `Reading.extents`.
        """
        if not 0 <= starting_offset <= self.size_bytes:
            raise errors.OffsetOutOfRange(starting_offset, self.size_bytes)
        return (
            UserExtent(UserOffset(extent.offset_bytes - self.begins), extent.length_bytes)
            for extent in self.logical.extents(LogicalOffset(self.begins + starting_offset))
        )


def _require_comparable(base: _Source, target: _Source) -> None:
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


def _pool(source: _Source) -> str:
    return source.group.volume(source.name).pool


def _overwritten(
    tables: Sequence[Exceptions], base_bytes: int, check: Callable[[], None], start: int, end: int
) -> Iterator[Extent]:
    """Yield the ranges of a target that COW tables contain, and the range beyond the base's end.

    Only ranges between `start` and `end` are yielded. The base has `base_bytes`.
    """
    base_end = min(end, base_bytes)
    if start < base_end:
        yield from comparing.ranges(tables, start, base_end, check)
    yield from _everything(max(start, base_bytes), end)


def _checked_runs(runs: Iterable[Run], check: Callable[[], None]) -> Iterator[Extent]:
    for run in runs:
        check()
        yield Extent(run.offset_bytes, run.length_bytes)


def _everything(start: int, end: int) -> Iterator[Extent]:
    if start < end:
        yield Extent(start, end - start)


def _up_to(end_bytes: int, range_filter: _Filter, extents: Iterable[Extent]) -> Iterator[Extent]:
    """Filter the parts of sorted ranges before an offset; yield the parts behind it unfiltered."""
    remaining, behind = iter(extents), list[Extent]()

    def before() -> Iterator[Extent]:
        for extent in remaining:
            if extent.end_bytes > end_bytes:
                behind.append(extent)
            yield from clipped([extent], 0, end_bytes)
            if behind:
                return

    yield from range_filter(before())
    for extent in chain(behind, remaining):
        yield from clipped([extent], end_bytes, extent.end_bytes)
