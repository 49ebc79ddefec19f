"""Streams from node to node, for moves that the cluster's controller drives: the service's side.

The controller calls Pull on the node that a volume moves to. That node calls Send, or SendDiffering
where it still has what the volume left there earlier (comparison.py), on the node that has the
volume, and shows the controller's grant there (grants.py). Both services do what the
commands `carver volume receive` and `carver snapshot send` do, by the same functions: each is a
client of its own service, and takes I/O slots as a command does.

A stream has a thread of its own, and lasts as long as its call. When the call ends early, the node
that receives has recorded how much is on its disk, and a later Pull continues there.
"""

import io
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from queue import Empty, Full, Queue
from typing import Any, Generic, TypeVar, cast

import grpc

from agent.core import errors, ids
from agent.csi.client import Client
from agent.daemon.server import Service
from agent.extras.streams.form import Totals
from agent.extras.transfer.comparison import OwnDigests, TheirDigests
from agent.extras.transfer.move import prefix_of
from agent.extras.transfer.moving import Mover
from mount.block_io import Bytes, Opened
from mount.kernel import Kernel
from proto import carver_pb2 as carver
from proto.carver_pb2_grpc import TransferStub

T = TypeVar("T")

# Maximum number of calls of Send, of Pull and of Checksum at the same time, each by itself.
MOST_AT_ONCE = 2
# Maximum number of bytes of a stream in one message.
PART_BYTES = 1 << 20
# Maximum number of messages of a stream that wait to be sent.
_QUEUED = 4
# Interval, in seconds, at which progress is reported, and at which a stream looks whether its
# caller has gone.
_PROGRESS_SECONDS = 1.0
# Time limit, in seconds, for which a call waits until another one has ended. The next round of a
# move may begin while the stream of its last round is being closed, and its pod may be stopped.
_FREE_SECONDS = 5.0
# Time limit, in seconds, for which a call that ends early waits for its thread. A thread that reads
# a disk that hangs is left alone, and still counts towards MOST_AT_ONCE.
_END_SECONDS = 10.0


class _Limit:
    """A limit on the number of jobs at the same time."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._free = threading.BoundedSemaphore(MOST_AT_ONCE)

    def take(self) -> None:
        """Take a place; raise TooManyStreams if there is none for _FREE_SECONDS."""
        if not self._free.acquire(timeout=_FREE_SECONDS):
            raise errors.TooManyStreams(self._kind, MOST_AT_ONCE)

    def give_back(self) -> None:
        """Give a place back."""
        self._free.release()


class _Job(Generic[T]):
    """The work of one call in a thread of its own.

    `parts` has the messages of a stream, with None behind the last one.
    """

    def __init__(self, limit: _Limit, kind: str, work: "Callable[[_Job[T]], T]") -> None:
        limit.take()
        self._limit, self._kind, self._work = limit, kind, work
        self.parts: Queue[carver.SendPart | None] = Queue(_QUEUED)
        self.done_bytes = self.size_bytes = 0
        # Offsets up to which this node and the other one have read again for a checksum.
        self.checked_bytes, self.checked_there_bytes = 0, 0
        # The counts of what was received.
        self.totals = Totals()
        self.ended = threading.Event()
        self._is_over = threading.Event()
        self._cancel: Callable[[], object] = lambda: None
        self._guard = threading.Lock()
        self._outcome: list[T] = []
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=kind, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome.append(self._work(self))
        except BaseException as error:
            self._problem = error
        finally:
            self._limit.give_back()
            self.ended.set()
            with suppress(errors.NotWanted):
                self.put(None)

    def check(self) -> None:
        """Raise NotWanted if the caller has gone, or if the service stops."""
        if self._is_over.is_set():
            raise errors.NotWanted(self._kind)

    def put(self, part: carver.SendPart | None) -> None:
        """Append a message to the stream; wait for room. Raises NotWanted as `check` does."""
        while True:
            self.check()
            with suppress(Full):
                self.parts.put(part, timeout=_PROGRESS_SECONDS)
                return

    def cancels(self, cancel: Callable[[], object]) -> None:
        """Name the function that ends what the thread waits for; it is called by `cancel`."""
        with self._guard:
            self._cancel = cancel
            is_over = self._is_over.is_set()
        if is_over:
            cancel()

    def cancel(self) -> None:
        """Have the work end early; its end is not waited for."""
        with self._guard:
            self._is_over.set()
            cancel = self._cancel
        cancel()

    def result(self) -> T:
        """Return the result of the work that has ended, or raise its error."""
        problem = self._problem
        if isinstance(problem, grpc.RpcError):
            # A call to the service's own socket was refused.
            raise errors.CallRefused(problem.code().name, problem.details() or "") from None
        if isinstance(problem, Exception):
            raise problem.with_traceback(None)
        if problem is not None:
            raise errors.TransferFailed(self._kind, repr(problem))
        return self._outcome[0]

    def checked(self, offset_bytes: int) -> None:
        """Note up to which offset this node has read again for a checksum."""
        self.checked_bytes = min(offset_bytes, self.size_bytes)

    def checked_there(self, offset_bytes: int) -> None:
        """Note up to which offset the other node has read again for a checksum, as it says."""
        self.checked_there_bytes = max(self.checked_there_bytes, min(offset_bytes, self.size_bytes))

    def progress(self) -> carver.PullProgress:
        """Return the message with the progress of a stream that is received."""
        return carver.PullProgress(
            done_bytes=self.done_bytes,
            size_bytes=self.size_bytes,
            # The counts are known before the size.
            data_bytes=min(self.totals.data_bytes, self.size_bytes),
            checked_bytes=self.checked_bytes + self.checked_there_bytes,
        )

    @contextmanager
    def display(self, _action: str, start: int, size: int) -> Iterator[Callable[[int], None]]:
        """Keep the progress of an action, which the call reports."""
        self.size_bytes, self.done_bytes = size, start

        yield self.reached

    def reached(self, offset_bytes: int) -> None:
        """Note up to which offset the stream has got; a smaller offset than before is ignored."""
        self.done_bytes = max(self.done_bytes, min(offset_bytes, self.size_bytes))


class NodeStreams:
    """Sends volumes of this node to other nodes, and receives volumes of other nodes."""

    def __init__(self, service: Service, mover: Mover) -> None:
        self._service, self._mover = service, mover
        # Function that returns this node's certificate and the authorities that it trusts; None
        # while this node serves no other node.
        self._certificates: Callable[[], Any] | None = None
        self._sends, self._pulls, self._checksums = map(_Limit, ("Send", "Pull", "Checksum"))
        self._guard = threading.Lock()
        self._jobs: set[_Job[Any]] = set()
        self._is_stopping = False

    def serve(self, certificates: Callable[[], Any]) -> None:
        """Allow streams to and from other nodes; `certificates` returns this node's."""
        self._certificates = certificates

    def stop(self) -> None:
        """End all streams, and begin no more."""
        with self._guard:
            self._is_stopping, jobs = True, list(self._jobs)
        for job in jobs:
            job.cancel()
        # Wait while this service still answers: a stream that ends has its offset recorded.
        until = time.monotonic() + _END_SECONDS
        for job in jobs:
            job.ended.wait(max(0.0, until - time.monotonic()))

    def send(
        self, request: carver.SendRequest, context: grpc.ServicerContext
    ) -> Generator[carver.SendPart, None, None]:
        """Send a snapshot of a volume that moves to the node that calls.

        Raises the errors of `_send`.
        """
        yield from self._send(request, context)

    def send_differing(
        self, requests: Iterator[carver.SendRequest], context: grpc.ServicerContext
    ) -> Generator[carver.SendPart, None, None]:
        """Send the parts of a snapshot that differ from the volume of the node that calls.

        The first request is that of `send`; the others have the digests of that volume. Raises the
        errors of `_send`; BadField if the request names a base, or a request has a wrong number of
        digests; BadStream if there are too few of them.
        """
        request = next(requests)
        if request.base_snapshot_id:
            raise errors.BadField("base_snapshot_id", "must be empty: blocks are compared instead")
        yield from self._send(request, context, requests)

    def _send(
        self,
        request: carver.SendRequest,
        context: grpc.ServicerContext,
        digests: Iterator[carver.SendRequest] | None = None,
    ) -> Generator[carver.SendPart, None, None]:
        """Send a snapshot, or only what differs by the other node's `digests`.

        Raises NotGranted unless the caller is that node, and shows a grant of the controller's;
        TooManyStreams if MOST_AT_ONCE calls are under way. Also raises the errors of
        `Outgoing.send`.
        """
        volume_id = self._granted(request, context)

        def work(job: _Job[None]) -> None:
            from agent.extras.transfer import streams_command

            with ExitStack() as closing:
                verbs = self._verbs(job, closing)
                source = closing.enter_context(
                    streams_command.outgoing(verbs, request.snapshot_id, request.base_snapshot_id)
                )
                if source.header.volume_id != volume_id:
                    raise errors.NotGranted(f"{request.snapshot_id} is of another volume")
                parts = closing.enter_context(streams_command.opened_spool(verbs))
                messages = _Messages(job.put)
                source.send(
                    messages.write,
                    offset_bytes=request.offset_bytes,
                    release=request.release,
                    note=parts.add,
                    display=job.display if digests is None else _reported(job, messages),
                    digests=None if digests is None else TheirDigests(digests, messages.flush),
                )
                messages.flush()
                if request.verify:
                    tell = _at_intervals(
                        lambda offset_bytes: job.put(carver.SendPart(checked_bytes=offset_bytes))
                    )
                    job.put(carver.SendPart(sha256=source.checksum_of(parts, tell)))

        with self._job(self._sends, "Send", work) as job:
            while (part := _next(job, context)) is not None:
                yield part
            job.result()

    def pull(
        self, request: carver.PullRequest, context: grpc.ServicerContext
    ) -> Generator[carver.PullProgress, None, None]:
        """Receive a snapshot from another node; yield the progress each second.

        The last message has the state of the volume. If the volume has all of the snapshot already,
        nothing is received, and the last message has no checksums.

        Raises NodeRefused if the other node refuses, or if its stream ends early; TooManyStreams;
        BadStream if the stream is another one than was asked for; CallRefused if this service
        refuses the stream.
        """

        def work(job: _Job[carver.PullProgress]) -> carver.PullProgress:
            return self._pull(request, job)

        with self._job(self._pulls, "Pull", work) as job:
            while not job.ended.wait(_PROGRESS_SECONDS):
                _require_active(context, "Pull")
                yield job.progress()
            yield job.result()

    def checksum(
        self, request: carver.ChecksumRequest, context: grpc.ServicerContext
    ) -> Generator[carver.ChecksumProgress, None, None]:
        """Compute a checksum of all that a snapshot or a received volume holds.

        Yields the progress each second, and at last the checksum. Raises TooManyStreams, and the
        errors of the commands.
        """

        def work(job: _Job[carver.ChecksumProgress]) -> carver.ChecksumProgress:
            from agent.extras.transfer import streams_command

            with ExitStack() as closing:
                verbs = self._verbs(job, closing)
                if request.snapshot_id:
                    source = closing.enter_context(
                        streams_command.outgoing(verbs, request.snapshot_id)
                    )
                    found = {
                        "chain": source.header.chain,
                        "sha256": source.checksum(job.display),
                    }
                else:
                    found = streams_command.received_checksum(verbs, request.name, job.display)
            return carver.ChecksumProgress(
                done_bytes=job.size_bytes, size_bytes=job.size_bytes, **found
            )

        with self._job(self._checksums, "Checksum", work) as job:
            while not job.ended.wait(_PROGRESS_SECONDS):
                _require_active(context, "Checksum")
                yield carver.ChecksumProgress(done_bytes=job.done_bytes, size_bytes=job.size_bytes)
            yield job.result()

    def _pull(
        self, request: carver.PullRequest, job: _Job[carver.PullProgress]
    ) -> carver.PullProgress:
        from agent.extras.streams.reading import Reader
        from agent.extras.tls import certificates
        from agent.extras.transfer import streams_command

        source = request.source
        own_certificates = self._own_certificates()
        server_name = certificates.node_name(
            source.node, self._service.configuration.now.driver_name
        )
        with ExitStack() as closing:
            verbs = self._verbs(job, closing)
            channel = grpc.secure_channel(
                # Write the scheme `dns:` out, so that gRPC takes no part of the address for one.
                f"dns:///{source.address}",
                own_certificates.for_client(),
                certificates.options(server_name),
            )
            closing.callback(channel.close)
            state = _received(verbs, request.name)
            send_request = carver.SendRequest(
                snapshot_id=source.snapshot_id,
                base_snapshot_id=source.base_snapshot_id,
                release=request.release,
                offset_bytes=request.offset_bytes,
                verify=request.verify,
                grant=request.grant,
            )
            comparison: OwnDigests | None = None
            if replaces := _replaced(request, state):
                comparison = OwnDigests(send_request, replaces)
                call = TransferStub(channel).SendDiffering(iter(comparison))
                closing.callback(comparison.close)
            else:
                call = TransferStub(channel).Send(send_request)
            closing.callback(call.cancel)
            job.cancels(call.cancel)
            incoming = _Incoming(call, job.checked_there, job.reached)
            parts = closing.enter_context(streams_command.opened_spool(verbs))
            try:
                # A BufferedReader reads as much as is asked for, as a file does.
                stream = io.BufferedReader(incoming, PART_BYTES)
                reader = Reader(stream)
                job.totals = reader.totals
                _require_asked(request, reader.header)
                if state.chain == reader.header.chain:
                    # An earlier call has received all of it: its answer was lost, or another
                    # controller made it. The rest of the stream is not read.
                    size_bytes = reader.header.size_bytes
                    return carver.PullProgress(
                        done_bytes=size_bytes, size_bytes=size_bytes, state=state
                    )
                received_sha256 = streams_command.receive_one(
                    verbs,
                    request.name,
                    request.device_class,
                    reader,
                    parts if request.verify else None,
                    job.display,
                    job.checked,
                    comparison,
                )
                if stream.read(1):
                    raise errors.BadStream("further bytes follow its end mark")
                incoming.require_sound()
            except (errors.StreamEnded, grpc.RpcError):
                job.check()
                if (problem := incoming.problem) is not None:
                    why = f"{problem.code().name}: {problem.details()}"
                    method = "Send" if comparison is None else "SendDiffering"
                    raise errors.NodeRefused(source.node, method, why) from None
                raise
            return carver.PullProgress(
                done_bytes=job.size_bytes,
                size_bytes=job.size_bytes,
                checked_bytes=job.progress().checked_bytes,
                state=_received(verbs, request.name),
                data_bytes=reader.totals.data_bytes,
                received_sha256=received_sha256,
                sent_sha256=incoming.sha256,
            )

    def _own_certificates(self) -> Any:
        if self._certificates is None:
            raise errors.BadConfig("this node", "evacuation", "is false: it receives no volumes")
        return self._certificates()

    def _granted(self, request: carver.SendRequest, context: grpc.ServicerContext) -> str:
        """Return the id of the volume that the caller may read; raise NotGranted if there is none.

        1. The grant must be valid, and its target must be the node that calls.
        2. The volume must move to that node, by the tags on this node.
        3. The snapshots must be those of that move.
        """
        from agent.extras.tls import certificates
        from agent.extras.transfer import grants

        if self._certificates is None:
            raise errors.NotGranted("this node sends no volumes to other nodes")
        config = self._service.configuration.now
        grant = grants.checked(
            request.grant, self._certificates(), config.driver_name, config.node_id
        )
        target_name = certificates.node_name(grant.target, config.driver_name)
        if target_name not in certificates.peer_names(context):
            raise errors.NotGranted(f"the grant is for node {grant.target!r}")
        move = self._mover.status(grant.volume_id)
        if move.volume_id != grant.volume_id or move.node != grant.target:
            raise errors.NotGranted(f"{grant.volume_id} does not move to {grant.target}")
        if not move.release or move.release != request.release:
            raise errors.NotGranted("the stream would be of another move")
        place = grant.volume_id.rpartition("/")[0]
        prefix = f"{place}/{ids.SNAPSHOT_PREFIX}-{prefix_of(move.release)}"
        for snapshot_id in (request.snapshot_id, request.base_snapshot_id or prefix):
            if not snapshot_id.startswith(prefix):
                raise errors.NotGranted(f"{snapshot_id} is no snapshot of this move")
        return grant.volume_id

    def _verbs(self, job: _Job[Any], closing: ExitStack) -> Any:
        """Return what a command has: a client of this service, its settings, and the machine."""
        from agent.cli.volume_verbs import VolumeVerbs

        config = self._service.configuration.now
        host = self._service.host
        kernel = cast(Kernel, _CheckedKernel(host.kernel, job.check))
        caller = closing.enter_context(Client(config.endpoint))
        return VolumeVerbs(caller, config, replace(host, kernel=kernel))

    @contextmanager
    def _job(self, limit: _Limit, kind: str, work: Callable[[_Job[T]], T]) -> Iterator[_Job[T]]:
        with self._guard:
            if self._is_stopping:
                raise errors.NotWanted(kind)
            job = _Job(limit, kind, work)
            self._jobs.add(job)
        try:
            yield job
        finally:
            job.cancel()
            job.ended.wait(_END_SECONDS)
            with self._guard:
                self._jobs.discard(job)


def _received(verbs: Any, name: str) -> carver.ReceiveState:
    """Return the state of the volume of a name here."""
    request = carver.NameRequest(name=name)
    return cast(carver.ReceiveState, verbs.caller.stub(TransferStub).ReceiveStatus(request))


def _replaced(request: carver.PullRequest, state: carver.ReceiveState) -> str:
    """Return the digest of the earlier move whose rest here becomes, or is, the received volume.

    Empty if the stream is not to be compared with what is here. `state` is the state of the volume
    here.
    """
    if state.replaces:
        return state.replaces
    return request.replaces if request.replaces == state.replaceable else ""


def _reported(job: _Job[Any], messages: "_Messages") -> Any:
    """Make a display that also reports to the other node how far the comparison is."""

    def report(offset_bytes: int) -> None:
        messages.flush()
        job.put(carver.SendPart(reached_bytes=offset_bytes))

    tell_other = _at_intervals(report)

    @contextmanager
    def display(action: str, start: int, size: int) -> Iterator[Callable[[int], None]]:
        with job.display(action, start, size) as tell:

            def tell_both(offset_bytes: int) -> None:
                tell(offset_bytes)
                tell_other(offset_bytes)

            yield tell_both

    return display


def _next(job: _Job[Any], context: grpc.ServicerContext) -> carver.SendPart | None:
    """Wait for the next message of a stream; None at its end."""
    while True:
        _require_active(context, "Send")
        with suppress(Empty):
            return job.parts.get(timeout=_PROGRESS_SECONDS)
        job.check()


def _require_active(context: grpc.ServicerContext, kind: str) -> None:
    if not context.is_active():
        raise errors.NotWanted(kind)


def _require_asked(request: carver.PullRequest, header: Any) -> None:
    """Raise BadStream unless the header of a stream is of the stream that was asked for."""
    source = request.source
    expected = {
        "volume_id": source.volume_id,
        "snapshot_id": source.snapshot_id,
        "base_snapshot_id": source.base_snapshot_id,
        "release": request.release,
        "offset_bytes": request.offset_bytes,
    }
    for name, value in expected.items():
        if (found := getattr(header, name)) != value:
            raise errors.BadStream(f"its {name} is {found!r}, and {value!r} was asked for")


def _at_intervals(tell: Callable[[int], object]) -> Callable[[int], None]:
    """Make a function that passes a number on, at most each _PROGRESS_SECONDS."""
    noted_at = [time.monotonic()]

    def tell_at_intervals(number: int) -> None:
        now = time.monotonic()
        if now - noted_at[0] >= _PROGRESS_SECONDS:
            noted_at[0] = now
            tell(number)

    return tell_at_intervals


class _Messages:
    """Makes messages of at most PART_BYTES of the bytes of a stream, which come in any pieces."""

    def __init__(self, put: Callable[[carver.SendPart], None]) -> None:
        self._put = put
        self._waiting = bytearray()
        self._flushed = time.monotonic()

    def write(self, data: Bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), PART_BYTES):
            piece = view[start : start + PART_BYTES]
            if len(self._waiting) + len(piece) > PART_BYTES:
                self.flush()
            self._waiting += piece
        # Frames of zeroes are short: send them before they fill a message.
        if time.monotonic() - self._flushed >= _PROGRESS_SECONDS:
            self.flush()

    def flush(self) -> None:
        self._flushed = time.monotonic()
        if self._waiting:
            self._put(carver.SendPart(data=bytes(self._waiting)))
            self._waiting.clear()


class _Incoming(io.RawIOBase):
    """The bytes of a stream that another node sends, as a file.

    If the call fails, the file ends there, and `problem` has the error: what was received before
    is then recorded, as where a pipe is closed. `checked` is called with the offset up to which
    the other node has read again for its checksum, `reached` with that up to which it has compared.
    """

    def __init__(
        self,
        messages: Iterator[carver.SendPart],
        checked: Callable[[int], None],
        reached: Callable[[int], None],
    ) -> None:
        self._messages, self._checked, self._reached = messages, checked, reached
        self._part = memoryview(b"")
        # The checksum in the last message that was read; empty if it had none.
        self.sha256 = ""
        self.problem: Any = None

    def readable(self) -> bool:
        """Return True: the stream is only read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some of the next bytes into a buffer; return their number, 0 at the end."""
        while not self._part:
            try:
                message = next(self._messages, None)
            except grpc.RpcError as error:
                self.problem = error
                return 0
            if message is None:
                return 0
            self._part = memoryview(message.data)
            self.sha256 = message.sha256
            if message.checked_bytes:
                self._checked(message.checked_bytes)
            if message.reached_bytes:
                self._reached(message.reached_bytes)
        room = memoryview(buffer)
        length = min(len(room), len(self._part))
        room[:length] = self._part[:length]
        self._part = self._part[length:]
        return length

    def require_sound(self) -> None:
        """Raise grpc.RpcError if the call has failed."""
        if self.problem is not None:
            raise self.problem


class _CheckedKernel:
    """The kernel, whose devices call `check` before each read.

    So the reading of a large volume for a checksum ends soon after its caller has gone. Writes are
    not checked: a stream that is being received ends with its call, and what was written is then
    recorded.
    """

    def __init__(self, kernel: Kernel, check: Callable[[], None]) -> None:
        self._kernel, self._check = kernel, check

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    @contextmanager
    def opened(self, device: str, *, to_write: bool = False) -> Iterator[Opened]:
        with self._kernel.opened(device, to_write=to_write) as opened:
            yield _Checked(opened, self._check)


class _Checked(Opened):
    """An open device that calls `check` before each read."""

    def __init__(self, device: Opened, check: Callable[[], None]) -> None:
        super().__init__("checked", -1)
        self._opened, self._check = device, check

    def read_into(self, offset_bytes: int, target: memoryview) -> None:
        self._check()
        self._opened.read_into(offset_bytes, target)

    def write(self, offset_bytes: int, data: Bytes) -> None:
        self._opened.write(offset_bytes, data)

    def zero_out(self, offset_bytes: int, length_bytes: int) -> None:
        self._opened.zero_out(offset_bytes, length_bytes)

    def flush(self) -> None:
        self._opened.flush()
