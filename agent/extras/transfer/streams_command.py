"""`carver snapshot send` and `receive`: the bytes go through here, LVM is the service's."""

import argparse
import fcntl
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from io import BufferedIOBase
from itertools import chain
from typing import Any, BinaryIO, cast

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
from agent.extras.transfer.paced import paced
from agent.extras.transfer.turns import CHECKSUM, RECEIVE, SEND
from agent.volumes import backing
from lvm import lvm_errors as lvm_errors
from mount.block_io import Bytes, Opened
from proto import carver_pb2 as carver
from proto.carver_pb2_grpc import TransferStub

_JSON_SECONDS = 1.0


# Called with the offset in the volume so far.
Tell = Callable[[int], None]


@contextmanager
def shown(what: str, start_bytes: int, size_bytes: int, *, as_json: bool) -> Iterator[Tell]:
    """Show progress on standard error: as JSON, as a bar on a terminal, or not at all."""
    if as_json:
        yield _lines(what, start_bytes, size_bytes)
    elif sys.stderr.isatty():
        with terminal.progress(what, start_bytes, size_bytes) as tell:
            yield tell
    else:
        yield lambda _offset_bytes: None


def _lines(what: str, start_bytes: int, size_bytes: int) -> Tell:
    began = printed_at = time.monotonic()

    def tell(offset_bytes: int) -> None:
        nonlocal printed_at
        now = time.monotonic()
        if now - printed_at < _JSON_SECONDS and offset_bytes < size_bytes:
            return
        printed_at = now
        rate = (offset_bytes - start_bytes) / max(now - began, 0.001)
        state = {
            "what": what,
            "offset_bytes": offset_bytes,
            "size_bytes": size_bytes,
            # Of the volume's bytes, sent or skipped.
            "bytes_per_second": round(rate),
            "seconds_left": round((size_bytes - offset_bytes) / rate) if rate > 0 else None,
        }
        print(json.dumps(state), file=sys.stderr, flush=True)

    return tell


ABSENT = "absent"


@dataclass(frozen=True)
class Outgoing:
    """A snapshot that is open, and so cannot be removed, and the header of its stream."""

    at: VolumeVerbs
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
        as_json: bool = False,
    ) -> dict[str, Any]:
        """Send it from an offset on; return what was sent. Raises SourceLost, TransferFailed.

        An increment has all that was written since the base, or with `compare` only what differs.
        Either way can continue a stream at an offset: everything before it was received.
        """
        header = replace(self.header, offset_bytes=offset_bytes, release=release)
        if offset_bytes % form.SECTOR_BYTES or not 0 <= offset_bytes <= header.size_bytes:
            why = f"must be a multiple of {form.SECTOR_BYTES} up to {header.size_bytes}"
            raise errors.BadField("offset", why)
        ids_of_both = header.snapshot_id, header.base_snapshot_id
        found = extents(self.at.caller, *ids_of_both, offset_bytes, is_compared=compare)
        first = next(found, None)
        # The service has the base open now, so it can no longer be replaced.
        self.require_same()
        parts = found if first is None else chain([first], found)
        what = f"sending {ids.logical_name(header.snapshot_id)}"
        with (
            shown(what, offset_bytes, header.size_bytes, as_json=as_json) as tell,
            paced(self.at.caller, header.snapshot_id, SEND, self.device) as device,
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
            )
            tell(header.size_bytes)
        return {
            "sent": header.snapshot_id,
            "chain": header.chain,
            "base_chain": header.base_chain,
            "data_bytes": totals.data_bytes,
            "zero_bytes": totals.zero_bytes,
        }

    def checksum(self, *, as_json: bool = False) -> str:
        """The checksum of the whole snapshot."""
        with _explained(f"reading {ids.logical_name(self.header.snapshot_id)}"):
            with self._checked() as device:
                found = _checksum(device, self.header.size_bytes, as_json=as_json)
            self._prove()
            return found

    def checksum_of(self, parts: Spool) -> str:
        """The checksum of the parts that a stream of it named; reads them again."""
        with _explained(f"reading {ids.logical_name(self.header.snapshot_id)}"):
            with self._checked() as device:
                found = sending.of_parts(device, self.header, parts)
            self._prove()
            return found

    def require_same(self) -> None:
        """Raise SourceLost where another snapshot of the same name is open than the header's."""
        was, base_id = self.header, self.header.base_snapshot_id
        now = chain_of(self.at, was.snapshot_id)
        if now != was.chain or (base_id and chain_of(self.at, base_id) != was.base_chain):
            why = "it, or its base, was deleted and taken anew; send it again"
            raise errors.SourceLost(was.snapshot_id, why)

    def _checked(self) -> AbstractContextManager[Opened]:
        return paced(self.at.caller, self.header.snapshot_id, CHECKSUM, self.device)

    def _prove(self) -> None:
        """Raise SourceLost where the data read may be wrong."""
        snapshot_id = self.header.snapshot_id
        if not is_ready(self.at, snapshot_id):
            raise errors.SourceLost(snapshot_id, "it was lost while it was read")


def is_ready(at: VolumeVerbs, snapshot_id: str) -> bool:
    """Whether a snapshot is there and not lost."""
    found = at.caller.snapshots(snapshot_id=snapshot_id)
    return bool(found) and found[0].ready_to_use


@contextmanager
def outgoing(at: VolumeVerbs, snapshot_id: str, base_id: str = "") -> Iterator[Outgoing]:
    """Open a snapshot; raises grpc.RpcError."""
    request = carver.OpenSnapshotRequest(snapshot_id=snapshot_id, base_snapshot_id=base_id)
    opened = _transfer(at).OpenSnapshot(request)
    try:
        with at.host.kernel.opened(_device(at, snapshot_id)) as device:
            source = Outgoing(at, form.header_of(opened.header), device)
            source.require_same()
            yield source
    finally:
        if opened.lease:
            close = carver.CloseSnapshotRequest(snapshot_id=snapshot_id, lease=opened.lease)
            # On failure, the next reading or the next start deactivates it.
            with suppress(grpc.RpcError):
                _transfer(at).CloseSnapshot(close)


def chain_of(at: VolumeVerbs, snapshot_id: str) -> str:
    """Name exactly what a snapshot holds; it need not be active."""
    return _transfer(at).SnapshotChain(carver.SnapshotChainRequest(snapshot_id=snapshot_id)).chain


def extents(
    caller: Client,
    snapshot_id: str,
    base_id: str = "",
    starting_offset: int = 0,
    *,
    is_compared: bool = False,
) -> Iterator[Extent]:
    """The ranges of a snapshot's logical volume that were written, at all or since its base.

    Or those that differ from its base, where `is_compared`.
    """
    request = carver.RangesRequest(
        snapshot_id=snapshot_id, base_snapshot_id=base_id, starting_offset=starting_offset
    )
    transfer = caller.stub(TransferStub)
    answers = (transfer.GetDiffering if is_compared else transfer.GetWritten)(request)
    return (
        Extent(one.offset_bytes, one.length_bytes) for answer in answers for one in answer.ranges
    )


def values(message: Message) -> dict[str, Any]:
    """The fields of a message, those that are not set as well, for JSON."""
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


def _transfer(at: VolumeVerbs) -> TransferStub:
    return at.caller.stub(TransferStub)


def received(at: VolumeVerbs, parsed: argparse.Namespace, source: BinaryIO) -> dict[str, Any]:
    """Do what the flags of `carver volume receive` ask for; return the volume's state."""
    name = parsed.name
    if parsed.status:
        return status(at, name)
    if parsed.checksum:
        return received_checksum(at, name, as_json=parsed.json)
    if parsed.finish:
        return finish(at, name, parsed.release)
    if parsed.withdraw:
        return withdraw(at, name, parsed.release)
    if parsed.abort:
        return abort(at, name, confirmed=parsed.yes)
    word, verify = parsed.device_class, parsed.verify
    return receive(at, name, source, device_class=word, verify=verify, as_json=parsed.json)


def show(result: dict[str, Any], *, as_json: bool) -> None:
    """Print a result."""
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print("\n".join(f"{key}: {value}" for key, value in result.items() if value != ""))


def send(
    at: VolumeVerbs,
    name: str,
    out: BinaryIO,
    *,
    since: str = "",
    offset_bytes: int = 0,
    compare: bool = False,
    compress: bool = False,
    as_json: bool = False,
) -> None:
    """Write a stream of a snapshot, or of what changed since an older one of its volume."""
    if out.isatty():
        raise errors.TransferFailed(
            "a stream is not for a terminal", "have it go to a file or a program: > or |"
        )
    if compare and not since:
        raise errors.BadField("--compare", "goes with --since")
    widen(out)
    base = at.find_snapshot(since).snapshot_id if since else ""
    with (
        outgoing(at, at.find_snapshot(name).snapshot_id, base) as source,
        _explained(f"sending {name}"),
    ):
        source.send(
            out.write,
            offset_bytes=offset_bytes,
            compare=compare,
            compress=compress,
            as_json=as_json,
        )
        out.flush()


def widen(pipe: BinaryIO | int) -> None:
    """Make a pipe hold a whole piece of a volume and not 64 KiB; anything else is left alone."""
    with suppress(OSError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, sending.PIECE_BYTES)


def checksum_of(at: VolumeVerbs, name: str, *, as_json: bool = False) -> dict[str, Any]:
    """The checksum of a whole snapshot."""
    with outgoing(at, at.find_snapshot(name).snapshot_id) as source:
        return {"chain": source.header.chain, "sha256": source.checksum(as_json=as_json)}


def receive(
    at: VolumeVerbs,
    name: str,
    source: BinaryIO,
    *,
    device_class: str = "",
    verify: bool = False,
    as_json: bool = False,
) -> dict[str, Any]:
    """Apply streams that come one after another; return the volume's state.

    With `verify` also the checksum of the last one's parts, read from the disk again; empty where
    that stream was there already.
    """
    if source.isatty():
        raise errors.TransferFailed("a stream does not come from a terminal", "use < or |")
    widen(source)
    # typing.BinaryIO lacks readinto, which each binary file has.
    verified = ""
    for reader in reading.streams(cast("BufferedIOBase", source)):
        with opened_spool(at) as parts:
            noted = parts if verify else None
            verified = _receive_one(at, name, device_class, reader, noted, as_json=as_json)
    return {**status(at, name), **({"verified": verified} if verify else {})}


def opened_spool(at: VolumeVerbs) -> AbstractContextManager[Spool]:
    """A spool for the parts of a stream."""
    return comparing.opened(at.settings.endpoint.parent)


def _receive_one(
    at: VolumeVerbs,
    name: str,
    device_class: str,
    reader: Reader,
    parts: Spool | None,
    *,
    as_json: bool,
) -> str:
    """Apply a stream; return its parts' checksum, if asked for and it was not there already."""
    header = reader.header
    text = form.text_of(header).decode()
    transfer = _transfer(at)
    begun = transfer.BeginReceive(
        carver.BeginReceiveRequest(name=name, device_class=device_class, header=text)
    )
    volume_id = begun.volume_id
    if begun.chain == header.chain:
        # It is there already. Read it to its end, so that its sender ends well.
        for _ in reader.frames():
            pass
        return ""
    path = _device(at, volume_id)
    kernel = at.host.kernel
    with _explained(f"receiving {name}"), kernel.opened(path, to_write=True) as device:
        # Opened for writing, it has no other writer; one may have ended just before.
        now = transfer.ReceiveStatus(carver.NameRequest(name=name))
        if now.volume_id != volume_id or now.into != header.chain:
            raise errors.NotReceived(name, "another stream was received meanwhile")

        def record(offset_bytes: int) -> None:
            request = carver.RecordReceiveRequest(volume_id=volume_id, into=header.chain)
            request.offset_bytes = offset_bytes
            transfer.RecordReceive(request)

        start, end = header.offset_bytes, header.size_bytes
        with (
            shown(f"receiving {name}", start, end, as_json=as_json) as tell,
            paced(at.caller, volume_id, RECEIVE, device) as writing,
        ):
            target = Target(writing, kernel.device_size_bytes(path), begun.blank)
            note = (lambda _part: None) if parts is None else parts.add
            reading.apply(reader, target, record=record, note=note, tell=tell)
            tell(end)
        transfer.EndReceive(carver.EndReceiveRequest(volume_id=volume_id, header=text))
        if parts is None:
            return ""
        # Still open for writing, so that it has no other writer.
        with paced(at.caller, volume_id, CHECKSUM, device) as checked:
            return sending.of_parts(checked, header, parts)


def status(at: VolumeVerbs, name: str) -> dict[str, Any]:
    """The state of a volume that is received, and the offset where a stream continues."""
    found = _transfer(at).ReceiveStatus(carver.NameRequest(name=name))
    # Says that it takes --verify, which 0.1.0 does not.
    return {**values(found), "name": name, "verifies": True}


def received_checksum(at: VolumeVerbs, name: str, *, as_json: bool = False) -> dict[str, Any]:
    """The checksum of a whole volume that was received."""
    found = _require_received(at, name)
    if not found["chain"] or found["into"]:
        raise errors.NotReceived(name, "its stream is incomplete; send it again")
    _transfer(at).OpenReceived(carver.VolumeRequest(volume_id=found["volume_id"]))
    path = _device(at, found["volume_id"])
    with (
        _explained(f"reading {name}"),
        at.host.kernel.opened(path) as opened,
        paced(at.caller, found["volume_id"], CHECKSUM, opened) as device,
    ):
        digest = _checksum(device, found["content_bytes"], as_json=as_json)
    return {"chain": found["chain"], "sha256": digest}


def finish(at: VolumeVerbs, name: str, release: str = "") -> dict[str, Any]:
    """Make what was received a volume, its file system checked."""
    _transfer(at).FinishReceive(_release(at, name, release))
    return status(at, name)


def withdraw(at: VolumeVerbs, name: str, release: str) -> dict[str, Any]:
    """Undo `finish`."""
    _transfer(at).WithdrawReceive(_release(at, name, release))
    return status(at, name)


def abort(at: VolumeVerbs, name: str, *, confirmed: bool) -> dict[str, Any]:
    """Erase and remove what was received, if anything.

    Asks first, as it may be the work of months. Raises NotConfirmed.
    """
    found = status(at, name)
    if found["state"] != ABSENT:
        size = terminal.human(found["content_bytes"])
        asked = f"Erase and remove {name}, {size}, and all that was received?"
        if not confirmed and not terminal.confirmed(asked):
            raise errors.NotConfirmed(name, "removed")
        _transfer(at).AbortReceive(carver.VolumeRequest(volume_id=found["volume_id"]))
    return status(at, name)


def _release(at: VolumeVerbs, name: str, word: str) -> carver.ReleaseRequest:
    return carver.ReleaseRequest(volume_id=_require_received(at, name)["volume_id"], release=word)


def _require_received(at: VolumeVerbs, name: str) -> dict[str, Any]:
    found = status(at, name)
    if found["state"] == ABSENT:
        raise errors.NoSuchVolume(name)
    return found


def _checksum(device: Opened, size_bytes: int, *, as_json: bool) -> str:
    with shown("checking", 0, size_bytes, as_json=as_json) as tell:
        return sending.of(device, size_bytes, tell)


def _device(at: VolumeVerbs, identity: str) -> str:
    """The device that the service has just activated; raises Inactive."""
    logical = backing.of_id(identity)
    device = at.host.devices.find(logical.group, logical.name)
    if device is None:
        raise lvm_errors.Inactive(logical.group, logical.name)
    return device.path


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn an OSError into TransferFailed."""
    try:
        yield
    except BrokenPipeError:
        raise errors.TransferFailed(what, "its reader has ended") from None
    except OSError as error:
        raise errors.TransferFailed(what, str(error)) from error
