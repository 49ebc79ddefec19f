"""Policy of how deleted data is erased, by the setting `wipe` and by the abilities of the disks."""

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
from agent.work.group_worker import AGAIN, Job, Steps
from agent.work.pace import IoTask, Pace
from lvm import names, report
from mount.block_devices import SAMPLE_BYTES
from mount.block_io import By
from mount.kernel import Kernel
from mount.stacks import Stack

_log = logging.getLogger(__name__)

# Number of bytes that are zeroed at the beginning of an encrypted volume if neither its tag nor its
# LUKS header says how long the header is.
LONGEST_HEADER_BYTES = 128 << 20

# Number of sampled blocks, of 4 KiB each, by which a device is proved to zero by itself, without
# the data being written: so many blocks of the first piece, and so many of the whole range. The
# second number is for disks that were proved before; it does not apply to discards, since a disk
# may ignore some of these. A sampled block is read twice, and written once if it was zero before.
_SAMPLE, _SAMPLE_AGAIN = 16, 2
# Number of bytes that are zeroed on a device, at most, only to prove that the device zeroes by
# itself (`ErasePolicy.prove`).
PROVED_BYTES = 1 << 20


class Purpose(enum.Enum):
    """Why a device is zeroed."""

    # Purpose: a new volume, or the extents that a volume grows by, must read as zeroes.
    NEW = enum.auto()
    # Purpose: a volume or a thin pool was deleted, or free extents hold deleted data.
    DELETED = enum.auto()
    # Purpose: an encrypted volume was deleted. It is zeroed, and never discarded by `wipe`.
    ENCRYPTED = enum.auto()
    # Purpose: a volume with missing disks was deleted. It is overwritten by plain writes, which
    # show which extents can be reached.
    PARTIAL = enum.auto()


class ErasePolicy:
    """Policy of how deleted data is erased, by the setting `wipe`; its methods also erase devices.

    No other class reads the setting. Its values are in settings.WIPES. There is one object for a
    process: a disk that was proved to zero by itself need not be proved again by other work.

    | setting `wipe`       | a volume, thin pool or free extent    | an encrypted volume           |
    | -------------------- | ------------------------------------- | ----------------------------- |
    | zero                 | zeroed                                | header zeroed, then by its    |
    |                      |                                       | class's `erase`: zero, crypto |
    |                      |                                       | or discard                    |
    | discard              | discarded where zeroes are certain    | as with zero                  |
    |                      | after that, else zeroed               |                               |
    | discard-unguaranteed | discarded                             | as with zero                  |
    | none                 | left as it is                         | header zeroed                 |

    A device is discarded only if each of its blocks is a block of a disk: dm-raid passes on only
    part of a discard, and a thin pool keeps the data of its chunks. `_methods` chooses among the
    kernel's ways to zero a device, and `overwrite` proves that a way did zero.

    Each piece ends with fsync(2) (agent/work/pace.py). So a power loss after the extents are free
    does not bring the data back, and a piece is on the disk before the next piece begins.

    Extents on a missing disk are erased when that disk is back. If an operator gives the disk up
    (tag `givenUp`), the volume group is tagged instead, so that its free extents are zeroed before
    they are reused.

    A LUKS header is zeroed first, whatever the setting, and read back as a whole
    (agent/volumes/luks_mappings.py).
    """

    def __init__(self, configuration: Configuration, kernel: Kernel) -> None:
        self._configuration, self._kernel = configuration, kernel
        # The disks that were proved to zero by themselves, each with the kernel's way to do so.
        self._proved: set[tuple[str, By]] = set()

    @property
    def _wipe(self) -> Wipe:
        """The present value of the setting `wipe`."""
        return WIPES[self._configuration.now.wipe]

    @property
    def zeroes(self) -> bool:
        """Whether the setting `wipe` demands that deleted data are erased; false for `none`."""
        return self._wipe.zeroes

    def erases(self, deleted: Volume | Snapshot) -> bool:
        """Whether a deleted volume or snapshot is erased, as a whole or only its LUKS header.

        An encrypted one always is.
        """
        return self.zeroes or deleted.is_encrypted

    def erases_any(self, logical_volumes: Iterable[report.LogicalVolume]) -> bool:
        """Whether the extents of any of these logical volumes must be erased before their reuse.

        True if the setting `wipe` demands it, or if one of the volumes is encrypted.
        """
        return self.zeroes or any(is_encrypted(logical.own_tags) for logical in logical_volumes)

    def method(self, volume: Volume) -> str:
        """Return the method by which a deleted volume is erased, one of classes.ERASURES.

        1. A volume that is not encrypted is zeroed as a whole.
        2. An encrypted volume is zeroed as a whole if it has or had a cache, or if it was a
           snapshot: the cache, even one that was removed by hand, and the snapshot may hold a copy
           of the header.
        3. With `wipe = none`, only the header of another encrypted volume is zeroed.
        4. Otherwise the setting `erase` of the volume's device class decides. If the class is gone,
           the volume is zeroed as a whole.
        """
        is_volume = any(
            names.is_of(prefix, volume.name) for prefix in (ids.VOLUME_PREFIX, ids.INLINE_PREFIX)
        )
        was_cached = volume.has_cache or tag.CACHE in volume.own_tags
        if not volume.is_encrypted or was_cached or not is_volume:
            return classes.ERASE_ZERO
        if not self.zeroes:
            return classes.ERASE_CRYPTO
        class_name = volume.own_tags.get(tag.CLASS)
        erasures = (
            device_class.erase
            for device_class in self._configuration.now.classes
            if device_class.name == class_name
        )
        return next(erasures, classes.ERASE_ZERO)

    def zeroed_bytes(self, volume: Volume, size_bytes: int) -> int:
        """Return how many bytes of a deleted volume are zeroed, from its beginning.

        They are all of its `size_bytes`, or only the LUKS header, by `method`.
        """
        if self.method(volume) in classes.ERASE_HEADER_ONLY:
            return min(size_bytes, volume.header_bytes or LONGEST_HEADER_BYTES)
        return size_bytes

    def purpose(self, volume: Volume) -> Purpose:
        """Return why a deleted volume is zeroed: PARTIAL if it lacks disks, even if encrypted."""
        if volume.missing_disks:
            return Purpose.PARTIAL
        return Purpose.ENCRYPTED if volume.is_encrypted else Purpose.DELETED

    def _methods(self, device: str, stack: Stack, purpose: Purpose) -> Sequence[By]:
        """Return the kernel's ways to zero a device, in the order in which they are to be tried.

        Each way is tried if the device was not zero after the one before. A way that is not proved
        may leave data: the device may report success and do nothing. By.WRITES always overwrites.
        """
        if purpose is Purpose.PARTIAL:
            return [By.WRITES]
        default = self._kernel.zeroing(device, stack)
        ways = [default] if default.is_proved else [default, By.WRITES]
        is_discarded = purpose is Purpose.DELETED and self._is_discarded(device, stack)
        return [By.DISCARD, *ways] if is_discarded else ways

    def _is_discarded(self, device: str, stack: Stack) -> bool:
        """Whether deleted data on a device is discarded, by the setting `wipe` and the disks.

        With `wipe = discard`, disks that are not certain to return zeroes after a discard are
        logged, and from then on not discarded.
        """
        if not self._wipe.discards:
            return False
        if not stack.is_plain or self._kernel.is_distrusted(stack, By.DISCARD):
            return False
        doubts = self._kernel.discard_doubts(device) if self._wipe.only_if_certain else {}
        for disk in self._kernel.distrust(doubts, By.DISCARD):
            _log.warning("deleted data on %s is zeroed, not discarded: %s", disk, doubts[disk])
        return not doubts

    def task(self, pace: Pace, kind: str, device: str, job: Job) -> IoTask:
        """Return the paced I/O of a job that overwrites a device, which is flushed by each piece.

        `kind` is the kind of I/O, "erase" or "zero".
        """
        flush = partial(self._kernel.flush, device)
        return pace.task(kind, device, check=job.check, flush=flush, progress=job.progress)

    def overwrite(
        self,
        task: IoTask,
        device: str,
        end_bytes: int,
        begin_bytes: int = 0,
        *,
        purpose: Purpose,
        is_held: bool = False,
        zero_piece: Callable[[int, int, By], None] | None = None,
        piece_context: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> Steps:
        """Zero a range of a device, one piece in each step of a background job.

        1. Take the next way to zero the device (`_methods`). A way in which the device zeroes by
           itself, or discards, has to be proved: write other data to sampled blocks that are zero.
        2. Zero all pieces of the range in that way.
        3. Read the sampled blocks after the first piece and after the last (`_SAMPLE`: 64 reads in
           total, and up to 32 writes; 8 reads and 4 writes on disks that were proved before).
        4. If a sampled block is not zero, never use that way on the disks again, and begin again
           with step 1.

        Each operation on the device is done within the context `piece_context`. `zero_piece` is
        called with a piece's offset and length in bytes, and the way; the default is
        Kernel.zero_out. With `is_held`, the device may be in use by another device of
        device-mapper, such as a thin pool.
        """
        if end_bytes <= begin_bytes:
            return
        zero_piece = zero_piece or partial(self._zero, device, is_held)
        stack = self._kernel.stack(device)
        for way in self._methods(device, stack, purpose):
            disks = frozenset[str]() if way.is_proved else stack.disks
            tried = {(disk, way) for disk in disks}
            is_known = way is By.HOLE and bool(tried) and tried <= self._proved
            blocks = _SAMPLE_AGAIN if is_known else _SAMPLE
            all_samples, is_zero = sample(begin_bytes, end_bytes, blocks), True
            for piece in task.chunks(end_bytes, begin_bytes):
                with piece as (offset, length):
                    is_first, is_last = offset == begin_bytes, offset + length == end_bytes
                    first_samples = sample(offset, offset + length, blocks) if is_first else []
                    if is_first and not way.is_proved:
                        with piece_context():
                            self._kernel.mark(
                                device, sorted({*first_samples, *all_samples}), allow_in_use=is_held
                            )
                    with piece_context():
                        zero_piece(offset, length, way)
                    if not way.is_proved and (is_first or is_last):
                        with piece_context():
                            is_zero = self._kernel.are_zero(
                                device, all_samples if is_last else first_samples
                            )
                if not is_zero:
                    break
                yield AGAIN
            else:
                self._proved |= tried
                return
            self._proved -= tried
            self._distrust(device, way, disks)

    def _zero(self, device: str, is_held: bool, offset: int, length: int, method: By) -> None:
        """Zero one piece of a device, in one of the kernel's ways."""
        self._kernel.zero_out(device, offset, length, allow_in_use=is_held, method=method)

    def prove(self, device: str, size_bytes: int) -> None:
        """Test whether a device zeroes by itself, before a copy onto it relies on that.

        The copy has the device zero blocks where the source has zeroes. The first bytes of the
        device, which the copy overwrites later, are zeroed, and sampled blocks of these are read.
        Nothing is done for a device that does not zero by itself, or whose disks were proved
        before. A disk that did not zero is never again asked to. `size_bytes` is the number of
        bytes that the copy overwrites.
        """
        stack, way = self._kernel.stack(device), By.HOLE
        disks = stack.disks
        tried = {(disk, way) for disk in disks}
        if self._kernel.zeroing(device, stack) is not way or (tried and tried <= self._proved):
            return
        length = min(size_bytes, PROVED_BYTES)
        places = sample(0, length)
        self._kernel.mark(device, places)
        self._kernel.zero_out(device, 0, length, method=way)
        if self._kernel.are_zero(device, places):
            self._proved |= tried
        else:
            self._distrust(device, way, disks)

    def _distrust(self, device: str, method: By, disks: Iterable[str]) -> None:
        """Never again use this way to zero these disks; log each disk once."""
        if newly_distrusted := self._kernel.distrust(disks, method):
            _log.error(
                "%s: data were still there after %s on %s, which reported success; they are"
                " overwritten, and this is not tried there again. Look for newer firmware",
                *(device, method.value, ", ".join(newly_distrusted)),
            )

    @staticmethod
    def waits_for_disk(volume: Volume) -> bool:
        """Whether a deleted volume has a missing disk that the operator has not given up.

        Part of the volume's data may come back with that disk.
        """
        return bool(volume.missing_disks) and tag.GIVEN_UP not in volume.own_tags


def sample(begin_bytes: int, end_bytes: int, blocks: int = _SAMPLE) -> Sequence[int]:
    """Return the offsets, in bytes, of blocks that are spread evenly over a range.

    The first and the last of the `blocks` blocks are those of the range. A short range has fewer.
    """
    last_block = (end_bytes - begin_bytes) // SAMPLE_BYTES - 1
    steps = min(blocks - 1, last_block)
    if steps <= 0:
        return [begin_bytes] * (last_block == 0)
    return [begin_bytes + step * last_block // steps * SAMPLE_BYTES for step in range(steps + 1)]


def zeroing_method(config: Config, kernel: Kernel, disk: str) -> tuple[By | None, str]:
    """Return the way in which deleted linear volumes on a disk are zeroed first, and doubts.

    The way is None if the setting `wipe` has deleted volumes left as they are. The doubts say why
    a discard of the disk may leave data; empty if there are none, or if the setting asks for no
    discards.
    """
    wipe_setting = WIPES[config.wipe]
    if not wipe_setting.zeroes:
        return None, ""
    doubts = kernel.discard_doubts(disk) if wipe_setting.discards else {}
    is_discarded = wipe_setting.discards and not (doubts and wipe_setting.only_if_certain)
    way = By.DISCARD if is_discarded else kernel.zeroing(disk)
    return way, "; ".join(doubts.values())
