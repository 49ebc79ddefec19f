"""Where the data of an encrypted volume begin, by the LUKS2 header that a snapshot itself has.

Two snapshots are compared as they lie, encrypted. AES-XTS makes of the same plaintext at the same
place the same ciphertext, as long as the master key is the same: then what differs encrypted is
what differs to who reads. So both headers must agree on where the data are and on that key; which
passphrases open them does not matter.
"""

from collections.abc import Sequence

from agent import errors, fact
from agent.delta.extents import BLOCK_BYTES, LogicalOffset
from agent.engine.records import Snapshot, Volume
from mount import luks
from mount.luks import Header
from mount.syscalls import Kernel

_Read = tuple[Snapshot | Volume, str]


def user_start(kernel: Kernel, those: Sequence[_Read]) -> LogicalOffset:
    """Where the user's first byte is in all of these, of one volume each with its device.

    Raises BlocksUnknown where they do not agree, or what they hold is not to be read; OSError.
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


def _start(kernel: Kernel, one: Snapshot | Volume, device: str) -> tuple[LogicalOffset, str]:
    """Where its data begin, and what stands for how they are encrypted."""
    if not one.is_encrypted:
        return LogicalOffset(0), ""
    header = luks.read(kernel, device)
    if header is None:
        return _unused_start(kernel, one, device), ""
    _require_settled(one, header)
    return LogicalOffset(header.offset_bytes), header.reading


def _unused_start(kernel: Kernel, one: Snapshot | Volume, device: str) -> LogicalOffset:
    """Where the data of a volume will begin that nobody used yet: then it has no header."""
    was_used = {fact.SEALED, fact.FORMATTED} & one.facts.keys()
    if was_used or not one.header_bytes or luks.bears_any(kernel, device):
        raise errors.BlocksUnknown(
            str(one.id),
            "its LUKS2 header is not there, or not whole",
            "restore the volume's header (`carver volume header restore`), take another snapshot",
        )
    return LogicalOffset(one.header_bytes)


def _require_settled(one: Snapshot | Volume, header: Header) -> None:
    if header.is_reencrypting:
        raise errors.BlocksUnknown(
            str(one.id),
            "it is of amidst a re-encryption",
            "take another snapshot when that is over, and make a full backup of it",
        )
    if header.offset_bytes % BLOCK_BYTES:
        raise errors.BlocksUnknown(
            str(one.id),
            f"its data begin at byte {header.offset_bytes}, amidst a block of {BLOCK_BYTES} bytes",
            "back it up by reading all of it",
        )
