"""`carver snapshot send` and `carver volume receive`.

This process, the command, reads and writes the devices and the stream. The service runs lvm2: it
creates, activates and finishes the volumes.
"""

import argparse
import fcntl
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from io import BufferedIOBase
from itertools import chain
from typing import Any, BinaryIO, Protocol, cast

import grpc
from google.protobuf.message import Message

from agent.cli import terminal
from agent.cli.volume_verbs import VolumeVerbs
from agent.core import errors, ids
from agent.csi.client import Client
from agent.extras.changed_blocks import comparing
from agent.extras.changed_blocks.comparing import Spool
from agent.extras.changed_blocks.extents import Extent
from agent.extras.streams import form, reading, sending
from agent.extras.streams.form import Header
from agent.extras.streams.reading import Reader, Target
from agent.extras.transfer.move import ABSENT
from agent.extras.transfer.paced import paced
from agent.extras.transfer.turns import CHECKSUM, RECEIVE, SEND
from agent.volumes import backing
from lvm import lvm_errors as lvm_errors
from mount.block_io import Bytes, Opened
from proto import carver_pb2 as carver
from proto.carver_pb2_grpc import TransferStub

# Interval at which progress is printed as JSON, in seconds.
_JSON_SECONDS = 1.0
# Question before a volume is kept that its source has not released.
_SOURCE_IS_LOST = (
    "Is the node that {name} moves from lost for good, with its disks? Then {name} becomes a volume"
    " of this node, with what the last whole stream brought; what was written later is lost. Keep"
    " it?"
)

# Function that shows progress. Its argument is the offset in the volume that was reached, in bytes.
Tell = Callable[[int], None]
# Function that begins to show the progress of an action. Its arguments are the name of the action,
# the offset in the volume where the action begins, and the size of the volume, both in bytes.
Display = Callable[[str, int, int], AbstractContextManager[Tell]]


@contextmanager
def shown(action: str, start_bytes: int, size_bytes: int, *, as_json: bool) -> Iterator[Tell]:
    """Show progress on standard error during the `with`; yield the function that shows an offset.

    With `as_json`, progress is printed as lines of JSON. Otherwise progress is a bar if standard
    error is a terminal, and is not shown at all if it is not.
    """
    if as_json:
        yield _lines(action, start_bytes, size_bytes)
    elif sys.stderr.isatty():
        with terminal.progress(action, start_bytes, size_bytes) as tell:
            yield tell
    else:
        yield lambda _offset_bytes: None


# Display of progress for a person, on standard error if that is a terminal.
shown_as_text: Display = partial(shown, as_json=False)


def display_of(*, as_json: bool) -> Display:
    """Return the display of progress on standard error, as lines of JSON or for a person."""
    return partial(shown, as_json=as_json)


def _lines(action: str, start_bytes: int, size_bytes: int) -> Tell:
    began = printed_at = time.monotonic()

    def tell(offset_bytes: int) -> None:
        nonlocal printed_at
        now = time.monotonic()
        if now - printed_at < _JSON_SECONDS and offset_bytes < size_bytes:
            return
        printed_at = now
        rate = (offset_bytes - start_bytes) / max(now - began, 0.001)
        state = {
            "what": action,
            "offset_bytes": offset_bytes,
            "size_bytes": size_bytes,
            # Number of bytes of the volume that are done in a second, including those that are
            # skipped and not sent.
            "bytes_per_second": round(rate),
            "seconds_left": round((size_bytes - offset_bytes) / rate) if rate > 0 else None,
        }
        print(json.dumps(state), file=sys.stderr, flush=True)

    return tell


@dataclass(frozen=True)
class Outgoing:
    """An open snapshot that is to be sent, and the header of its stream.

    lvm2 cannot remove the snapshot while the snapshot's device is open.
    """

    verbs: VolumeVerbs
    header: Header
    device: Opened

    def send(
        self,
        write: Callable[[Bytes], object],
        *,
        offset_bytes: int = 0,
        release: str = "",
        compare: bool = False,
        compress: bool = False,
        note: Callable[[Extent], None] = lambda _part: None,
        display: Display = shown_as_text,
        digests: sending.Digests | None = None,
    ) -> dict[str, Any]:
        """Send the snapshot from an offset on; return a summary of what was sent.

        With `digests`, those of the other node's volume, only pieces that differ are sent.

        If the header names a base, the stream is an increment. An increment has all blocks that
        were written since the base; with `compare`, it has only the blocks that differ. An
        increment of either kind can continue a stream that was cut off. `offset_bytes` is then the
        offset up to which that stream was received.

        `note` is called with each range that is sent. Raises BadField if the offset is wrong,
        SourceLost if the snapshot or its base became invalid or was replaced, OSError if the device
        cannot be read, grpc.RpcError if the service refuses a call, and what `write` raises.
        """
        header = replace(self.header, offset_bytes=offset_bytes, release=release)
        if offset_bytes % form.SECTOR_BYTES or not 0 <= offset_bytes <= header.size_bytes:
            why = f"must be a multiple of {form.SECTOR_BYTES} up to {header.size_bytes}"
            raise errors.BadField("offset", why)
        snapshot_ids = header.snapshot_id, header.base_snapshot_id
        ranges = extents(self.verbs.caller, *snapshot_ids, offset_bytes, is_compared=compare)
        first_range = next(ranges, None)
        # Check now that the snapshot and its base are those of the header. The service has the base
        # open, so the base cannot be replaced from here on.
        self.require_same()
        parts = ranges if first_range is None else chain([first_range], ranges)
        action = f"sending {ids.logical_name(header.snapshot_id)}"
        with (
            display(action, offset_bytes, header.size_bytes) as tell,
            paced(self.verbs.caller, header.snapshot_id, SEND, self.device) as device,
        ):
            totals = sending.send(
                write,
                header,
                device,
                parts,
                compress=compress,
                prove=self._prove,
                note=note,
                tell=tell,
                digests=digests,
            )
            tell(header.size_bytes)
        return {
            "sent": header.snapshot_id,
            "chain": header.chain,
            "base_chain": header.base_chain,
            "data_bytes": totals.data_bytes,
            "zero_bytes": totals.zero_bytes,
        }

    def checksum(self, display: Display = shown_as_text) -> str:
        """Compute the checksum of the whole snapshot, and show the progress.

        Raises SourceLost if the snapshot became invalid meanwhile, and TransferFailed if the device
        cannot be read.
        """
        with _explained(f"reading {ids.logical_name(self.header.snapshot_id)}"):
            with self._checked() as device:
                digest = _checksum(device, self.header.size_bytes, display)
            self._prove()
            return digest

    def checksum_of(
        self, parts: Spool, tell: Callable[[int], None] = lambda _offset_bytes: None
    ) -> str:
        """Read once more the parts that a stream of this snapshot named; return their checksum.

        The checksum also covers everything beyond the base's end. `tell` is called with the offset
        up to which the parts were read. Raises SourceLost if the snapshot
        became invalid meanwhile, and TransferFailed if the device cannot be read.
        """
        with _explained(f"reading {ids.logical_name(self.header.snapshot_id)}"):
            with self._checked() as device:
                digest = sending.checksum_of_parts(device, self.header, parts, tell)
            self._prove()
            return digest

    def require_same(self) -> None:
        """Raise SourceLost if the snapshot or its base is not the one that the header names.

        A snapshot may have been deleted, and another snapshot taken under the same name.
        """
        header, base_id = self.header, self.header.base_snapshot_id
        current_chain = chain_of(self.verbs, header.snapshot_id)
        if current_chain != header.chain or (
            base_id and chain_of(self.verbs, base_id) != header.base_chain
        ):
            why = "it, or its base, was deleted and taken anew; send it again"
            raise errors.SourceLost(header.snapshot_id, why)

    def _checked(self) -> AbstractContextManager[Opened]:
        return paced(self.verbs.caller, self.header.snapshot_id, CHECKSUM, self.device)

    def _prove(self) -> None:
        """Raise SourceLost if the snapshot has become invalid: data that were read may be wrong."""
        snapshot_id = self.header.snapshot_id
        if not is_ready(self.verbs, snapshot_id):
            raise errors.SourceLost(snapshot_id, "it was lost while it was read")


def is_ready(verbs: VolumeVerbs, snapshot_id: str) -> bool:
    """Return whether a snapshot exists and is valid (`ready_to_use`)."""
    snapshots = verbs.caller.snapshots(snapshot_id=snapshot_id)
    return bool(snapshots) and snapshots[0].ready_to_use


@contextmanager
def outgoing(verbs: VolumeVerbs, snapshot_id: str, base_id: str = "") -> Iterator[Outgoing]:
    """Activate and open a snapshot for the `with`, as the source of a stream; yield the source.

    With `base_id`, the stream is an increment since that snapshot. At the end, the snapshot is
    closed and its lease is ended. Raises grpc.RpcError if the service refuses a call, Inactive if
    the snapshot has no device, and SourceLost if the snapshot or its base was replaced meanwhile.
    """
    request = carver.OpenSnapshotRequest(snapshot_id=snapshot_id, base_snapshot_id=base_id)
    answer = _transfer(verbs).OpenSnapshot(request)
    try:
        with verbs.host.kernel.opened(_device(verbs, snapshot_id)) as device:
            source = Outgoing(verbs, form.header_of(answer.header), device)
            source.require_same()
            yield source
    finally:
        if answer.lease:
            close_request = carver.CloseSnapshotRequest(snapshot_id=snapshot_id, lease=answer.lease)
            # Ignore a failure: the service deactivates the snapshot after its next read in the
            # volume group, or at its next start.
            with suppress(grpc.RpcError):
                _transfer(verbs).CloseSnapshot(close_request)


def chain_of(verbs: VolumeVerbs, snapshot_id: str) -> str:
    """Return a snapshot's chain: a digest that names exactly what the snapshot holds.

    The service is asked. The snapshot need not be active.
    """
    return (
        _transfer(verbs).SnapshotChain(carver.SnapshotChainRequest(snapshot_id=snapshot_id)).chain
    )


def extents(
    caller: Client,
    snapshot_id: str,
    base_id: str = "",
    starting_offset: int = 0,
    *,
    is_compared: bool = False,
) -> Iterator[Extent]:
    """Ask the service for ranges of a snapshot's logical volume, from an offset on; return them.

    Without `base_id`, these are the ranges that were ever written, or the whole volume if it has no
    list of them. With `base_id`, these are the ranges that were written since that snapshot; with
    `is_compared` as well, only the ranges that differ.
    """
    request = carver.RangesRequest(
        snapshot_id=snapshot_id, base_snapshot_id=base_id, starting_offset=starting_offset
    )
    transfer = caller.stub(TransferStub)
    answers = (transfer.GetDiffering if is_compared else transfer.GetWritten)(request)
    return (
        Extent(extent.offset_bytes, extent.length_bytes)
        for answer in answers
        for extent in answer.ranges
    )


def values(message: Message) -> dict[str, Any]:
    """Return all fields of a message by name, also those that are not set, to print as JSON."""
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


def _transfer(verbs: VolumeVerbs) -> TransferStub:
    return verbs.caller.stub(TransferStub)


def received(verbs: VolumeVerbs, parsed: argparse.Namespace, source: BinaryIO) -> dict[str, Any]:
    """Carry out `carver volume receive` with the options in `parsed`; return what is to be printed.

    That is the volume's state, or with --checksum its chain and its checksum.
    """
    name = parsed.name
    if parsed.status:
        return status(verbs, name)
    if parsed.checksum:
        return received_checksum(verbs, name, display_of(as_json=parsed.json))
    if parsed.finish:
        return finish(verbs, name, parsed.release, is_source_lost=parsed.source_is_lost)
    if parsed.withdraw:
        return withdraw(verbs, name, parsed.release)
    if parsed.abort:
        return abort(verbs, name, confirmed=parsed.yes)
    device_class, verify = parsed.device_class, parsed.verify
    return receive(
        verbs, name, source, device_class=device_class, verify=verify, as_json=parsed.json
    )


def show(result: dict[str, Any], *, as_json: bool) -> None:
    """Print a result as JSON, or as lines of key and value without the values that are empty."""
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print("\n".join(f"{key}: {value}" for key, value in result.items() if value != ""))


def send(
    verbs: VolumeVerbs,
    name: str,
    output: BinaryIO,
    *,
    since: str = "",
    offset_bytes: int = 0,
    compare: bool = False,
    compress: bool = False,
    as_json: bool = False,
) -> None:
    """Write a stream of a snapshot to `output`, which is a file or a pipe.

    With `since`, the stream has only what changed since that earlier snapshot. Raises
    TransferFailed if `output` is a terminal, if the device cannot be read, or if `output` cannot be
    written; BadField if the offset is wrong, or if `compare` is given without `since`; SourceLost
    if a snapshot became invalid or was replaced.
    """
    if output.isatty():
        raise errors.TransferFailed(
            "a stream is not for a terminal", "have it go to a file or a program: > or |"
        )
    if compare and not since:
        raise errors.BadField("--compare", "goes with --since")
    widen(output)
    base_id = verbs.find_snapshot(since).snapshot_id if since else ""
    with (
        outgoing(verbs, verbs.find_snapshot(name).snapshot_id, base_id) as source,
        _explained(f"sending {name}"),
    ):
        source.send(
            output.write,
            offset_bytes=offset_bytes,
            compare=compare,
            compress=compress,
            display=display_of(as_json=as_json),
        )
        output.flush()


def widen(pipe: BinaryIO | int) -> None:
    """Enlarge the buffer of a pipe from 64 KiB to PIECE_BYTES; do nothing for another file."""
    with suppress(OSError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, sending.PIECE_BYTES)


def checksum_of(verbs: VolumeVerbs, name: str, *, as_json: bool = False) -> dict[str, Any]:
    """Compute the checksum of a whole snapshot; return the checksum and the snapshot's chain."""
    with outgoing(verbs, verbs.find_snapshot(name).snapshot_id) as source:
        return {
            "chain": source.header.chain,
            "sha256": source.checksum(display_of(as_json=as_json)),
        }


def receive(
    verbs: VolumeVerbs,
    name: str,
    source: BinaryIO,
    *,
    device_class: str = "",
    verify: bool = False,
    as_json: bool = False,
) -> dict[str, Any]:
    """Apply the streams that come one after another from `source` to a volume; return its state.

    With `verify`, the state also has the checksum of the last stream's parts, which are read again
    from the disk. That checksum is empty if the volume held the last stream already. Raises
    TransferFailed if `source` is a terminal or if the device fails, NotReceived if another stream
    was received meanwhile, BadStream if a stream was altered or cut off, and grpc.RpcError if the
    service refuses a call.
    """
    if source.isatty():
        raise errors.TransferFailed("a stream does not come from a terminal", "use < or |")
    widen(source)
    # Cast the source: typing.BinaryIO does not declare `readinto`, which each binary file has.
    verified = ""
    for reader in reading.streams(cast("BufferedIOBase", source)):
        with opened_spool(verbs) as parts:
            ranges = parts if verify else None
            display = display_of(as_json=as_json)
            verified = receive_one(verbs, name, device_class, reader, ranges, display)
    return {**status(verbs, name), **({"verified": verified} if verify else {})}


class Comparison(Protocol):
    """Gives the sender of a stream the digests of the volume that the stream is for.

    `replaces` is the digest of the earlier move that left that volume here.
    """

    @property
    def replaces(self) -> str:
        """The digest of the word of the earlier move."""

    def begun(
        self, device: Opened, start_bytes: int, end_bytes: int
    ) -> AbstractContextManager[None]:
        """Read a range of the volume during the `with`, and give the digests of its pieces."""


def opened_spool(verbs: VolumeVerbs) -> AbstractContextManager[Spool]:
    """Open a spool for the ranges of a stream's parts; the spool is deleted when it is closed."""
    return comparing.opened(verbs.settings.endpoint.parent)


def receive_one(
    verbs: VolumeVerbs,
    name: str,
    device_class: str,
    reader: Reader,
    parts: Spool | None,
    display: Display,
    checked: Callable[[int], None] = lambda _offset_bytes: None,
    comparison: Comparison | None = None,
) -> str:
    """Apply one stream to a volume; return the checksum of the stream's parts.

    With `comparison`, the stream leaves out what the volume has already, and its sender needs the
    digests of the volume to go on. The ranges of the parts are added to the spool `parts`.
    `checked` is called with the offset up to which the parts were read again for the checksum. The
    checksum is empty if `parts` is None, and if the volume held the stream already.
    """
    header = reader.header
    text = form.text_of(header).decode()
    transfer = _transfer(verbs)
    replaces = comparison.replaces if comparison else ""
    state = transfer.BeginReceive(
        carver.BeginReceiveRequest(
            name=name, device_class=device_class, header=text, replaces=replaces
        )
    )
    volume_id = state.volume_id
    if comparison is not None and not state.replaces:
        raise errors.NotReceived(name, "another stream was received meanwhile")
    if state.chain == header.chain:
        # The volume holds this stream already. Read the stream to its end all the same, so that its
        # sender does not fail.
        with display(f"receiving {name}", header.offset_bytes, header.size_bytes) as tell:
            for _ in reader.frames():
                pass
            tell(header.size_bytes)
        return ""
    path = _device(verbs, volume_id)
    kernel = verbs.host.kernel
    with _explained(f"receiving {name}"), kernel.opened(path, to_write=True) as device:
        # The device is opened exclusively, so no other process writes to it now. Another process
        # may have done so just before: check again which stream the volume expects.
        current_state = transfer.ReceiveStatus(carver.NameRequest(name=name))
        if current_state.volume_id != volume_id or current_state.into != header.chain:
            raise errors.NotReceived(name, "another stream was received meanwhile")

        def record(offset_bytes: int) -> None:
            request = carver.RecordReceiveRequest(volume_id=volume_id, into=header.chain)
            request.offset_bytes = offset_bytes
            transfer.RecordReceive(request)

        start, end = header.offset_bytes, header.size_bytes
        with (
            display(f"receiving {name}", start, end) as tell,
            paced(verbs.caller, volume_id, RECEIVE, device) as paced_device,
            paced(verbs.caller, volume_id, CHECKSUM, device) as compared_device,
            comparison.begun(compared_device, start, end) if comparison else nullcontext(),
        ):
            target = Target(paced_device, kernel.device_size_bytes(path), state.blank)
            note = (lambda _part: None) if parts is None else parts.add
            reading.apply(
                reader,
                target,
                record=record,
                note=note,
                tell=tell,
                is_compared=comparison is not None,
            )
            tell(end)
        transfer.EndReceive(carver.EndReceiveRequest(volume_id=volume_id, header=text))
        if parts is None:
            return ""
        # The device is still open exclusively, so no other process writes to it before the
        # checksum.
        with paced(verbs.caller, volume_id, CHECKSUM, device) as checked_device:
            return sending.checksum_of_parts(checked_device, header, parts, checked)


def status(verbs: VolumeVerbs, name: str) -> dict[str, Any]:
    """Return the state of a received volume, with the offset where a cut-off stream continues."""
    state = _transfer(verbs).ReceiveStatus(carver.NameRequest(name=name))
    # `verifies` tells the other node that this Carver takes --verify, which 0.1.0 does not.
    return {**values(state), "name": name, "verifies": True}


def received_checksum(
    verbs: VolumeVerbs, name: str, display: Display = shown_as_text
) -> dict[str, Any]:
    """Compute the checksum of a received volume's contents; return it with the volume's chain.

    The volume is activated. Raises NotReceived if the last stream is incomplete or if the volume
    was finished, NoSuchVolume if there is no such volume, and TransferFailed if the device cannot
    be read.
    """
    state = _require_received(verbs, name)
    if not state["chain"] or state["into"]:
        raise errors.NotReceived(name, "its stream is incomplete; send it again")
    _transfer(verbs).OpenReceived(carver.VolumeRequest(volume_id=state["volume_id"]))
    path = _device(verbs, state["volume_id"])
    with (
        _explained(f"reading {name}"),
        verbs.host.kernel.opened(path) as opened,
        paced(verbs.caller, state["volume_id"], CHECKSUM, opened) as device,
    ):
        digest = _checksum(device, state["content_bytes"], display)
    return {"chain": state["chain"], "sha256": digest}


def finish(
    verbs: VolumeVerbs, name: str, release: str = "", *, is_source_lost: bool = False
) -> dict[str, Any]:
    """Check a received volume, make it a volume of this node, and return the volume's state.

    `release` is the secret word of the move by which the volume came; empty without a move. With
    `is_source_lost` no word is needed, and the operator is asked, whatever the options are. Raises
    NotConfirmed if the operator declines.
    """
    if is_source_lost:
        state = _require_received(verbs, name)
        if not terminal.confirmed(_SOURCE_IS_LOST.format(name=name)):
            raise errors.NotConfirmed(name, "kept")
        _transfer(verbs).KeepReceived(carver.VolumeRequest(volume_id=state["volume_id"]))
    else:
        _transfer(verbs).FinishReceive(_release(verbs, name, release))
    # Its volume group may be missing since then.
    return _require_received(verbs, name)


def withdraw(verbs: VolumeVerbs, name: str, release: str) -> dict[str, Any]:
    """Undo `finish`, so that the volume can only be removed; return the volume's state."""
    _transfer(verbs).WithdrawReceive(_release(verbs, name, release))
    return status(verbs, name)


def abort(verbs: VolumeVerbs, name: str, *, confirmed: bool) -> dict[str, Any]:
    """Erase and remove a volume that is being received, if it exists; return the volume's state.

    The operator is asked first, unless `confirmed` is true, because what was received may be the
    work of months. Raises NotConfirmed if the operator declines.
    """
    state = status(verbs, name)
    if state["state"] != ABSENT:
        size = terminal.human(state["content_bytes"])
        question = f"Erase and remove {name}, {size}, and all that was received?"
        if not confirmed and not terminal.confirmed(question):
            raise errors.NotConfirmed(name, "removed")
        # Remove only what the operator was asked about.
        _transfer(verbs).AbortReceive(
            carver.MoveRequest(volume_id=state["volume_id"], release=state["release"])
        )
    return status(verbs, name)


def _release(verbs: VolumeVerbs, name: str, word: str) -> carver.ReleaseRequest:
    return carver.ReleaseRequest(
        volume_id=_require_received(verbs, name)["volume_id"], release=word
    )


def _require_received(verbs: VolumeVerbs, name: str) -> dict[str, Any]:
    state = status(verbs, name)
    if state["state"] == ABSENT:
        raise errors.NoSuchVolume(name)
    return state


def _checksum(device: Opened, size_bytes: int, display: Display) -> str:
    with display("checking", 0, size_bytes) as tell:
        return sending.of(device, size_bytes, tell)


def _device(verbs: VolumeVerbs, identity: str) -> str:
    """Return the path of the device of a volume or snapshot; raise Inactive if it has no device.

    The service has just activated the volume or snapshot.
    """
    logical = backing.of_id(identity)
    device = verbs.host.devices.find(logical.group, logical.name)
    if device is None:
        raise lvm_errors.Inactive(logical.group, logical.name)
    return device.path


@contextmanager
def _explained(action: str) -> Iterator[None]:
    """Turn an OSError raised inside the `with` into TransferFailed, which names the action."""
    try:
        yield
    except BrokenPipeError:
        raise errors.TransferFailed(action, "its reader has ended") from None
    except OSError as error:
        raise errors.TransferFailed(action, str(error)) from error
