"""Which ranges of a snapshot are allocated, or changed since another snapshot of its volume."""

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


def start_of_user_data(kernel: Kernel, those: Sequence[tuple[_Read, str]]) -> LogicalOffset:
    """The offset of the user's first byte, by the LUKS2 headers of snapshots of one volume.

    Encrypted snapshots are compared as they lie. AES-XTS makes the same ciphertext of the same
    plaintext at the same place as long as the master key is the same: then what differs encrypted
    is what differs to the user. So the headers must agree on the offset and on that key; which
    passphrases open them does not matter.

    Raises BlocksUnknown where they do not agree or cannot be read, OSError.
    """
    found = [_start(kernel, one, device) for one, device in those]
    if len(set(found)) > 1:
        raise errors.BlocksUnknown(
            str(those[-1][0].id),
            f"{those[0][0].id!s} has another master key, has its data elsewhere, or is of before"
            " the volume was used first",
            "make a full backup (GetMetadataAllocated)",
        )
    return found[0][0]


def _start(kernel: Kernel, one: _Read, device: str) -> tuple[LogicalOffset, str]:
    """The offset of its data, and a digest of how they are encrypted."""
    if not one.is_encrypted:
        return LogicalOffset(0), ""
    if (header := luks.read(kernel, device)) is None:
        # An unused volume has no header yet.
        was_used = {tag.SEALED, tag.FORMATTED} & one.own_tags.keys()
        if was_used or not one.header_bytes or luks.bears_any(kernel, device):
            raise errors.BlocksUnknown(
                str(one.id),
                "its LUKS2 header is not there, or not whole",
                "restore the volume's header (`carver volume header restore`), take another"
                " snapshot",
            )
        return LogicalOffset(one.header_bytes), ""
    if header.is_reencrypting:
        raise errors.BlocksUnknown(
            str(one.id),
            "it was taken during a re-encryption",
            "take another snapshot when that is over, and make a full backup of it",
        )
    if header.offset_bytes % BLOCK_BYTES:
        raise errors.BlocksUnknown(
            str(one.id),
            f"its data begin at byte {header.offset_bytes}, inside a block of {BLOCK_BYTES} bytes",
            "back it up by reading all of it",
        )
    return LogicalOffset(header.offset_bytes), header.reading


# The ranges to look at between two offsets, and the filter that picks from them.
_Candidates = Callable[[int, int], Iterable[Extent]]
_Filter = Callable[[Iterable[Extent]], Iterator[Extent]]


def _always() -> bool:
    return True


class Delta:
    """Reads snapshots, and volumes as they are now, by their ids.

    LVM's metadata say where to look: a thin pool's, which blocks a volume has, and has alone; a COW
    snapshot's table, which chunks of its origin were overwritten since. The same bytes may have
    been written again, so the ranges found are compared. Which of two snapshots is older has no
    say in where to look: a clock may have stepped.

    The answer for a volume that is written to meanwhile may lack what was written since it began;
    take a snapshot for more. `is_wanted` is polled; NotWanted is raised once it is false.
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
        """A file for ranges, beside the socket."""
        return comparing.opened(self._configuration.now.endpoint.parent)

    @contextmanager
    def allocated(
        self, identity: str, is_wanted: Callable[[], bool] = _always, *, is_compared: bool = True
    ) -> "Iterator[Reading]":
        """The ranges that may hold anything but zeroes; everything else reads as zeroes.

        Unless compared with zeroes, a thick volume is one range; so is an encrypted one, whose
        zeroes are noise to its user. Raises NoSuchSnapshot, NoSuchVolume, OtherGroup, Copying,
        SourceLost, MetadataReserved.
        """
        check = self._check(identity, is_wanted)
        with ExitStack() as ending:
            [(of, reader)] = self._opened(ending, identity)
            compares = is_compared and not of.is_encrypted
            work = self._work(check, of, reader)
            unlike_zeroes = partial(comparing.differing, None, 0, reader, work)
            pick: _Filter = unlike_zeroes if compares else iter
            candidates: _Candidates = _everything
            if pool := _pool(of):
                ranges = ending.enter_context(self._new_spool())
                words = thinmaps.mapped_words
                self._spool(ranges, pool, thinmaps.mapped, words, check, of)
                # Allocated blocks are not searched for zeroes.
                pick, candidates = iter, partial(clipped, ranges)
            yield self._reading([(of, reader)], candidates, pick)

    @contextmanager
    def changed(
        self,
        base_id: str,
        target_id: str,
        is_wanted: Callable[[], bool] = _always,
        *,
        is_compared: bool = True,
    ) -> "Iterator[Reading]":
        """The blocks in which two snapshots of a volume, or a snapshot and the volume, differ.

        Exactly those. A smaller base reads as zeroes behind its end; what an encrypted volume has
        there is in the answer as `allocated` has it. Raises as `allocated`, and NotComparable for
        snapshots of two volumes and for a base that is larger or newer.

        Unless compared, the answer is all that was written, and no device is read. Of a thick
        volume it grows from call to call: it has what was written since the target, too.
        """
        check = self._check(target_id, is_wanted)
        with ExitStack() as ending:
            (base, old), (target, new) = self._opened(ending, base_id, target_id)
            candidates: _Candidates = _everything
            if _pool(base) and _pool(base) == _pool(target):
                ranges = ending.enter_context(self._new_spool())
                words = thinmaps.differing_words
                self._spool(ranges, _pool(base), thinmaps.differing, words, check, base, target)
                candidates = partial(clipped, ranges)
            elif tables := self._tables(base, target):
                candidates = partial(_overwritten, tables, base.size_bytes, check)
            work = self._work(check, target, old, new)
            unlike: _Filter = partial(comparing.differing, old, base.size_bytes, new, work)
            if target.is_encrypted:
                unlike = partial(_up_to, base.size_bytes, unlike)
            pick: _Filter = unlike if is_compared else iter
            yield self._reading([(base, old), (target, new)], candidates, pick)

    def stop(self) -> None:
        """End all readings at their next piece, or block of a table."""
        self._stopping.set()

    def _reading(
        self, those: list[tuple[_Read, Reader]], candidates: _Candidates, pick: _Filter
    ) -> "Reading":
        of, reader = those[-1]
        places = [(one, opened.device) for one, opened in those]

        def require() -> None:
            for one, _ in those:
                # Anything read just before that may have been overwritten already.
                if isinstance(one, Snapshot) and self._activator.has_overflowed(one):
                    raise errors.SourceLost(str(one.id), "its area is full, what it held is lost")

        user_start = partial(start_of_user_data, self._kernel, places)
        return Reading(of, of.size_bytes, reader.device, candidates, pick, require, user_start)

    def _opened(self, ending: ExitStack, *identities: str) -> list[tuple[_Read, Reader]]:
        """Open the devices of these ids; one command for each that is not active."""
        for one in identities:
            if VolumeId.parse(one) is None:
                raise errors.NoSuchSnapshot(one)
        groups = sorted({ids.group_of(one) for one in identities})
        with self._volume_groups.hold(*groups):
            known = self._mender.mend(*groups)
            found = [self._found(known, one) for one in identities]
            if len(found) > 1:
                _require_comparable(*found)
            if thin := sorted({one.group.name for one in found if _pool(one)}):
                # Last, once the devices are closed.
                ending.callback(self.activations.end, *thin)
            readers = [self._kernel.reader(self._activate(ending, one)) for one in found]
            # An open device cannot be removed.
            return [
                (one, ending.enter_context(reader))
                for one, reader in zip(found, readers, strict=True)
            ]

    def _found(self, known: Fresh, identity: str) -> _Read:
        if names.is_of(ids.VOLUME_PREFIX, ids.logical_name(identity)):
            return known.usable(identity, Call.MANAGE)
        found = self._reports.snapshot(known, identity)
        if found.problem:
            raise errors.SourceLost(identity, found.problem)
        return found

    def _check(self, identity: str, is_wanted: Callable[[], bool]) -> Callable[[], None]:
        """A check for each piece; it raises NotWanted, Stopping."""

        def check() -> None:
            if self._stopping.is_set():
                raise Stopping(identity)
            if not is_wanted():
                raise errors.NotWanted(identity)

        return check

    def _work(self, check: Callable[[], None], of: _Read, *readers: Reader) -> Work:
        devices = [one.device for one in readers]
        return self._paces.of(of.group.name).work("compare", *devices, check=check, may_join=True)

    def _activate(self, ending: ExitStack, one: _Read) -> str:
        if isinstance(one, Snapshot):
            return ending.enter_context(self.activations.held(one)).path
        return self._activator.activate(one).path

    def _spool(
        self,
        ranges: Spool,
        pool: str,
        read: Callable[[BinaryIO], Iterator[Run]],
        words: Callable[..., tuple[str, ...]],
        check: Callable[[], None],
        *those: _Read,
    ) -> None:
        """Read a thin-provisioning tool's output to its end at once, as the pool waits for that."""
        group = those[-1].group.name
        numbers = [self._number(group, one.name) for one in those]
        with (
            self.reservations.held(group, pool) as metadata,
            self._stream(*words(metadata, *numbers)) as printed,
        ):
            ranges.fill(merged(_checked(read(printed), check)))

    def _number(self, group: str, name: str) -> int:
        number = self._devices.thin_id(group, name)
        if number is None:
            raise lvm_errors.Inactive(group, name)
        return number

    def _tables(self, base: _Read, target: _Read) -> list[Exceptions]:
        """COW tables whose union has all that differs; empty where the volume has none.

        The older snapshot's table has it, and everything that the other's has.
        """
        those = [base] if isinstance(target, Volume) else [base, target]
        if any(_pool(one) for one in those):
            return []
        tables = [self._devices.exceptions(one.group.name, one.name) for one in those]
        return tables if len({one.chunk_bytes for one in tables}) == 1 else []


@dataclass(frozen=True)
class Reading:
    """A snapshot or a volume, or of two the later one, that is held while it is read.

    `size_bytes` has the header included. `device` is its active block device, which is open until
    the reading ends.
    """

    of: _Read
    size_bytes: int
    device: str
    candidates: _Candidates
    pick: _Filter
    require_readable: Callable[[], None]
    user_start: Callable[[], LogicalOffset]

    def for_user(self) -> "UserReading":
        """The reading in the user's offsets; raises BlocksUnknown."""
        with self._proved():
            begins = self.user_start()
        return UserReading(self, begins)

    def extents(self, starting_offset: LogicalOffset = LOGICAL_START) -> Iterator[Extent]:
        """The sorted ranges from an offset on, in whole blocks of BLOCK_BYTES up to the end.

        Ranges are merged, but those found by comparing only in part, to be yielded early. May be
        called again, also with another offset. Raises SourceLost, DeltaFailed, OSError.
        """
        if not 0 <= starting_offset <= self.size_bytes:
            raise errors.NotBeyond(starting_offset, self.size_bytes)
        return self._extents(starting_offset)

    def _extents(self, start: int) -> Iterator[Extent]:
        with self._proved():
            found = self.pick(self.candidates(start, self.size_bytes))
            # Blocks are compared whole, wherever the reading begins.
            yield from clipped(found, start, self.size_bytes)

    @contextmanager
    def _proved(self) -> Iterator[None]:
        """Raise SourceLost where what was read inside may have been lost meanwhile."""
        try:
            yield
        except (OSError, errors.BlocksUnknown):
            self.require_readable()
            raise
        self.require_readable()


@dataclass(frozen=True)
class UserReading:
    """A reading in the user's offsets, which begin at `begins`."""

    logical: Reading
    begins: LogicalOffset

    @property
    def size_bytes(self) -> int:
        """The size that the user sees."""
        return self.logical.size_bytes - self.begins

    def extents(self, starting_offset: UserOffset = USER_START) -> Iterator[UserExtent]:
        """The ranges of the logical volume behind its header."""
        if not 0 <= starting_offset <= self.size_bytes:
            raise errors.NotBeyond(starting_offset, self.size_bytes)
        return (
            UserExtent(UserOffset(one.offset_bytes - self.begins), one.length_bytes)
            for one in self.logical.extents(LogicalOffset(self.begins + starting_offset))
        )


def _require_comparable(base: _Read, target: _Read) -> None:
    of = target.source_id if isinstance(target, Snapshot) else target.id
    why = ""
    if not isinstance(base, Snapshot):
        raise errors.NoSuchSnapshot(str(base.id))
    if base.source_id != of:
        why = f"it is of {base.source_id}, the other of {of}"
    elif records.is_older(base, target) is False:
        why = "it was taken later"
    elif base.size_bytes > target.size_bytes:
        why = f"it has {base.size_bytes} bytes, the other {target.size_bytes}"
    if why:
        raise errors.NotComparable(str(base.id), str(target.id), why)


def _pool(one: _Read) -> str:
    return one.group.volume(one.name).pool


def _overwritten(
    tables: Sequence[Exceptions], base_bytes: int, check: Callable[[], None], start: int, end: int
) -> Iterator[Extent]:
    """What the tables' origin overwrote, and all behind the base's end."""
    own = min(end, base_bytes)
    if start < own:
        yield from comparing.ranges(tables, start, own, check)
    yield from _everything(max(start, base_bytes), end)


def _checked(runs: Iterable[Run], check: Callable[[], None]) -> Iterator[Extent]:
    for one in runs:
        check()
        yield Extent(one.offset_bytes, one.length_bytes)


def _everything(start: int, end: int) -> Iterator[Extent]:
    if start < end:
        yield Extent(start, end - start)


def _up_to(end_bytes: int, pick: _Filter, extents: Iterable[Extent]) -> Iterator[Extent]:
    """Apply a filter to what lies before an offset; keep all that lies behind."""
    left, behind = iter(extents), list[Extent]()

    def before() -> Iterator[Extent]:
        for one in left:
            if one.end_bytes > end_bytes:
                behind.append(one)
            yield from clipped([one], 0, end_bytes)
            if behind:
                return

    yield from pick(before())
    for one in chain(behind, left):
        yield from clipped([one], end_bytes, one.end_bytes)
