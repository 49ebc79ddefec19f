"""How deleted data is erased, by the setting `wipe` and by what the disks are good at."""

import enum
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from agent.core import ids, tag
from agent.settings import classes
from agent.settings.configuration import Configuration
from agent.settings.settings import WIPES, Config, Wipe
from agent.volumes.records import Snapshot, Volume, is_encrypted
from agent.work.group_worker import AGAIN, Steps
from agent.work.pace import Work
from lvm import names, report
from mount.block_devices import SAMPLE_BYTES
from mount.block_io import By
from mount.kernel import Kernel
from mount.stacks import Stack

_log = logging.getLogger(__name__)

# Zeroed of an encrypted volume where neither its tag nor its LUKS header says how long that is.
LONGEST_HEADER_BYTES = 128 << 20

# How many blocks of 4 KiB prove that a device zeroes: so many of its first piece, and of it all;
# and how many where its disks were proved before. Not after a discard, of which a disk may ignore
# some. Each is read twice, and written once where it was zero before.
_SAMPLE, _SAMPLE_AGAIN = 16, 2
# How much is zeroed to see whether a device does, where nothing need be zeroed itself.
PROVED_BYTES = 1 << 20


class Purpose(enum.Enum):
    """Why a device is zeroed."""

    # A new volume, or its growth, must read as zeroes.
    NEW = enum.auto()
    # A volume, pool or free extent that was deleted.
    DELETED = enum.auto()
    # A deleted volume whose data were encrypted; no setting has it discarded.
    ENCRYPTED = enum.auto()
    # A deleted volume that lacks disks: each write shows whether that extent can be reached.
    PARTIAL = enum.auto()


class ErasePolicy:
    """How deleted data is erased; the only reader of the setting `wipe` (settings.WIPES).

    There is one for a process, so that a disk which was seen to zero need not be proved again by
    other work.

    | setting `wipe`       | a volume, thin pool or free extent    | an encrypted volume           |
    | -------------------- | ------------------------------------- | ----------------------------- |
    | zero                 | zeroed                                | header zeroed, then by its    |
    |                      |                                       | class's `erase`: zero, crypto |
    |                      |                                       | or discard                    |
    | discard              | discarded where zeroes are certain    | as with zero                  |
    |                      | after that, else zeroed               |                               |
    | discard-unguaranteed | discarded                             | as with zero                  |
    | none                 | left as it is                         | header zeroed                 |

    Only blocks that are blocks of disks, one for one, are discarded: dm-raid passes on a discard
    in part, and a thin pool keeps its chunks' data. `_ways` says which of the kernel's ways are
    taken, `overwrite` proves them. Each piece ends with fsync(2) (agent/work/pace.py): a power loss
    after the extents are free does not bring the data back, and a piece is on the disk before the
    next begins. What lies on a missing disk waits for that disk, or until an operator gives it up
    (tag `givenUp`); then the group is tagged, and the free extents are zeroed before they are
    reused (mark_for_erase). A LUKS header is zeroed first whatever the setting, and all of it read
    back (agent/volumes/luks_mappings.py).
    """

    def __init__(self, configuration: Configuration, kernel: Kernel) -> None:
        self._configuration, self._kernel = configuration, kernel
        # Disks that were seen to zero so.
        self._proved: set[tuple[str, By]] = set()

    @property
    def _wipe(self) -> Wipe:
        return WIPES[self._configuration.now.wipe]

    @property
    def zeroes(self) -> bool:
        """Whether deleted data is erased by the setting, be it encrypted or not."""
        return self._wipe.zeroes

    def erases(self, one: Volume | Snapshot) -> bool:
        """Whether any of it is overwritten: all, or at least a LUKS header."""
        return self.zeroes or one.is_encrypted

    def erases_any(self, every: Iterable[report.LogicalVolume]) -> bool:
        """Whether the extents of any of these logical volumes must be zeroed before reuse."""
        return self.zeroes or any(is_encrypted(one.own_tags) for one in every)

    def method(self, volume: Volume) -> str:
        """How a volume that is erased is erased (classes.ERASURES).

        An encrypted one with a cache, or made of a snapshot, is zeroed as a whole: either may hold
        a copy of the header, also a cache that was taken away by hand.
        """
        is_volume = any(
            names.is_of(one, volume.name) for one in (ids.VOLUME_PREFIX, ids.INLINE_PREFIX)
        )
        was_cached = volume.has_cache or tag.CACHE in volume.own_tags
        if not volume.is_encrypted or was_cached or not is_volume:
            return classes.ERASE_ZERO
        if not self.zeroes:
            return classes.ERASE_CRYPTO
        called = volume.own_tags.get(tag.CLASS)
        found = (one.erase for one in self._configuration.now.classes if one.name == called)
        return next(found, classes.ERASE_ZERO)

    def zeroed_bytes(self, volume: Volume, size_bytes: int) -> int:
        """How many bytes are zeroed from its beginning: all, or only the LUKS header."""
        if self.method(volume) in classes.ERASE_HEADER_ONLY:
            return min(size_bytes, volume.header_bytes or LONGEST_HEADER_BYTES)
        return size_bytes

    def purpose(self, volume: Volume) -> Purpose:
        """Why a deleted volume is zeroed."""
        if volume.missing_disks:
            return Purpose.PARTIAL
        return Purpose.ENCRYPTED if volume.is_encrypted else Purpose.DELETED

    def _ways(self, device: str, stack: Stack, purpose: Purpose) -> Sequence[By]:
        """The ways by which a device is zeroed, each where the one before was not proved.

        Only WRITES overwrites for certain: a device may do the others by forgetting the blocks.
        """
        if purpose is Purpose.PARTIAL:
            return [By.WRITES]
        default = self._kernel.zeroing(device, stack)
        ways = [default] if default.is_proved else [default, By.WRITES]
        is_discarded = purpose is Purpose.DELETED and self._is_discarded(device, stack)
        return [By.DISCARD, *ways] if is_discarded else ways

    def _is_discarded(self, device: str, stack: Stack) -> bool:
        if not self._wipe.discards:
            return False
        if not stack.is_plain or self._kernel.is_distrusted(stack, By.DISCARD):
            return False
        doubts = self._kernel.discard_doubts(device) if self._wipe.only_if_certain else {}
        for disk in self._kernel.distrust(doubts, By.DISCARD):
            _log.warning("deleted data on %s is zeroed, not discarded: %s", disk, doubts[disk])
        return not doubts

    def overwrite(
        self,
        work: Work,
        device: str,
        end_bytes: int,
        begin_bytes: int = 0,
        *,
        purpose: Purpose,
        held: bool = False,
        zero: Callable[[int, int, By], None] | None = None,
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> Steps:
        """Zero a device, a piece in each step.

        Where the device zeroes by itself, or discards, blocks that are known not to be zero are
        looked at after the first piece and after the last (`_SAMPLE`: 64 reads in all, and up to 32
        writes; 8 and 4 once its disks were seen to zero). If one is not zero, its disks are never
        asked again to do so, and all pieces come once more, for the next way. All that touches the
        device is inside `within`. `zero`, with a piece's offset and length in bytes and the way,
        does more than Kernel.zero_out, to which `held` is given.
        """
        if end_bytes <= begin_bytes:
            return
        zero = zero or partial(self._zero, device, held)
        stack = self._kernel.stack(device)
        for by in self._ways(device, stack, purpose):
            disks = frozenset[str]() if by.is_proved else stack.disks
            tried = {(disk, by) for disk in disks}
            is_known = by is By.HOLE and bool(tried) and tried <= self._proved
            blocks = _SAMPLE_AGAIN if is_known else _SAMPLE
            every, is_zero = sample(begin_bytes, end_bytes, blocks), True
            for piece in work.chunks(end_bytes, begin_bytes):
                with piece as (offset, length):
                    is_first, is_last = offset == begin_bytes, offset + length == end_bytes
                    first = sample(offset, offset + length, blocks) if is_first else []
                    if is_first and not by.is_proved:
                        with within():
                            self._kernel.mark(device, sorted({*first, *every}), held=held)
                    with within():
                        zero(offset, length, by)
                    if not by.is_proved and (is_first or is_last):
                        with within():
                            is_zero = self._kernel.are_zero(device, every if is_last else first)
                if not is_zero:
                    break
                yield AGAIN
            else:
                self._proved |= tried
                return
            self._proved -= tried
            self._distrust(device, by, disks)

    def _zero(self, device: str, held: bool, offset: int, length: int, by: By) -> None:
        self._kernel.zero_out(device, offset, length, held=held, by=by)

    def prove(self, device: str, size_bytes: int) -> None:
        """See that a device zeroes, before a copy overwrites so much of it and leaves holes.

        By blocks at its beginning, once for its disks; they are distrusted where it does not.
        """
        stack, by = self._kernel.stack(device), By.HOLE
        disks = stack.disks
        tried = {(disk, by) for disk in disks}
        if self._kernel.zeroing(device, stack) is not by or (tried and tried <= self._proved):
            return
        length = min(size_bytes, PROVED_BYTES)
        places = sample(0, length)
        self._kernel.mark(device, places)
        self._kernel.zero_out(device, 0, length, by=by)
        if self._kernel.are_zero(device, places):
            self._proved |= tried
        else:
            self._distrust(device, by, disks)

    def _distrust(self, device: str, by: By, disks: Iterable[str]) -> None:
        if new := self._kernel.distrust(disks, by):
            _log.error(
                "%s: data were still there after %s on %s, which reported success; they are"
                " overwritten, and this is not tried there again. Look for newer firmware",
                *(device, by.value, ", ".join(new)),
            )

    @staticmethod
    def waits_for_disk(volume: Volume) -> bool:
        """Whether a part of it may come back with a missing disk that was not given up."""
        return bool(volume.missing_disks) and tag.GIVEN_UP not in volume.own_tags


def sample(begin_bytes: int, end_bytes: int, blocks: int = _SAMPLE) -> Sequence[int]:
    """Where so many blocks are looked at in a range, from its first to its last, spread evenly."""
    last = (end_bytes - begin_bytes) // SAMPLE_BYTES - 1
    steps = min(blocks - 1, last)
    if steps <= 0:
        return [begin_bytes] * (last == 0)
    return [begin_bytes + step * last // steps * SAMPLE_BYTES for step in range(steps + 1)]


def way_on(config: Config, kernel: Kernel, disk: str) -> tuple[By | None, str]:
    """The first of the ways for plain volumes on a disk; None where they are not erased.

    With what speaks against a discard, where the setting asks for it.
    """
    wipe = WIPES[config.wipe]
    if not wipe.zeroes:
        return None, ""
    doubts = kernel.discard_doubts(disk) if wipe.discards else {}
    is_discarded = wipe.discards and not (doubts and wipe.only_if_certain)
    way = By.DISCARD if is_discarded else kernel.zeroing(disk)
    return way, "; ".join(doubts.values())
