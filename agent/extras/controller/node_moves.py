"""Moves of volumes from node to node, driven by the controller: its ways to the two nodes.

The steps of a move are those of agent/extras/transfer/move.py, as of `carver volume move`. Both
nodes are called over mutual TLS. The data do not pass through the controller: it has the node that
the volume moves to read them from the other node, with a grant that it signs (grants.py).

A `Move` is used in a thread of its own. Its calls run in the controller's event loop.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import Message

from agent.core import errors, ids
from agent.extras.controller.answer_rules import Untrue
from agent.extras.controller.call_records import Call, Observe, recorded, unobserved
from agent.extras.controller.node_answers import Answers, refused_answer
from agent.extras.controller.nodes import Node, Nodes, Refused, problem_of, require_node_error
from agent.extras.controller.transfer_rules import TRANSFER, Advance
from agent.extras.tls.certificates import Certificates
from agent.extras.transfer.move import ABSENT, Differ, Move, Progress, Sent, There, prefix_of
from proto import carver_pb2 as carver
from proto import csi_pb2 as csi

T = TypeVar("T")

# Time limit, in seconds, of one unary call to a node, and of the wait for the next message of a
# stream, which reports its progress each second.
_CALL_SECONDS, _MESSAGE_SECONDS = 120.0, 60.0
# Time, in seconds, after which a stream that makes no progress is cut off. Before the first byte a
# node makes the volume, and waits for other work in its volume group.
_IDLE_SECONDS = 900.0
# Time, in seconds, for which a call is repeated that meets another call for the same volume, or
# work that has not ended, and the pause before it is repeated.
_AGAIN_SECONDS, _PAUSE_SECONDS = 60.0, 1.0
# Pause, in seconds, after each message of a stream: a node that sends one after the other without
# end takes no more of the event loop.
_BETWEEN_SECONDS = 0.05
# Interval, in seconds, at which the thread of a move looks whether the move is still wanted.
_LOOK_SECONDS = 1.0
_CONTROLLER = "csi.v1.Controller"
# Calls that are made also if the move is not wanted any more: a hold is ended.
_ALWAYS = frozenset({f"{TRANSFER}/ReleaseMove"})


class NodeFailed(errors.NodeRefused, grpc.RpcError):
    """Raised when a call to a node fails: the node refuses, is silent, or answers what is untrue.

    `code` returns the gRPC code, and `details` the text, as those of any grpc.RpcError do.
    """

    def __init__(self, node: str, method: str, code: grpc.StatusCode, details: str) -> None:
        super().__init__(node, method, f"{code.name}: {details}")
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        """Return the gRPC code of the failed call."""
        return self._code

    def details(self) -> str:
        """Return the text of the failed call's error."""
        return self._details


class NodeMoves:
    """Makes the moves that the controller drives.

    `certificates` returns the controller's. `observe` is called with each call to a node that has
    ended.
    """

    def __init__(
        self,
        nodes: Nodes,
        driver_name: str,
        certificates: Callable[[], Certificates],
        observe: Observe = unobserved,
    ) -> None:
        self.nodes, self.driver_name, self.certificates = nodes, driver_name, certificates
        self._answers, self._observe = Answers(nodes), observe
        self._loop: asyncio.AbstractEventLoop | None = None
        self._guard = Lock()
        self._futures: set[Future[Any]] = set()
        self._is_stopping = False

    def start(self) -> None:
        """Note the running event loop, in which calls are made."""
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """Cancel the calls in progress; later calls fail, too. A move can be continued later."""
        with self._guard:
            self._is_stopping, futures = True, list(self._futures)
        for future in futures:
            future.cancel()

    def move(
        self,
        volume_id: str,
        source: str,
        target: str,
        *,
        name: str = "",
        device_class: str = "",
        replaces: str = "",
        tell: Callable[[str], None] = lambda _text: None,
        show: Callable[[Progress], None] = lambda _progress: None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Move:
        """Return the move of a volume from the node `source` to the node `target`.

        `name` and `device_class` are the volume's name and class there; by default its own name,
        and the default class. With `replaces`, the digest of the word of the move by which the
        volume came from there, what it left there is replaced (`Move`). `tell` is called with a
        text at each step, `show` with the progress of a stream each second; both in the thread that
        uses the move. If `is_wanted` returns False, which it is asked before each call and each
        second of a stream, the move is cut off with NodeFailed (CANCELLED), and can be continued
        later. All errors of the move are AgentErrors.
        """
        name = name or ids.readable_name(volume_id)
        calls = Calls(self, volume_id, is_wanted)
        return Move(
            SourceNode(calls, volume_id, source, replaces),
            TargetNode(calls, volume_id, source, target, name, device_class, replaces, show),
            volume_id,
            tell,
            replaces=replaces,
        )

    def names(self) -> Sequence[str]:
        """Return the names of all nodes of the cluster that have Carver."""

        async def names() -> Sequence[str]:
            return sorted(node.name for node in self.nodes)

        return self.run("the controller", "names", names)

    def run(self, node: str, method: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine about a node in the event loop; return its result. Raises NodeFailed."""
        return self.result(self.begin(lambda: _named(node, method, work)))

    def begin(self, work: Callable[[], Coroutine[Any, Any, T]]) -> "Future[T]":
        """Begin to run a coroutine in the event loop. Raises NodeFailed if the controller stops."""
        with self._guard:
            if self._is_stopping or self._loop is None:
                raise _stopping()
            future = asyncio.run_coroutine_threadsafe(work(), self._loop)
            self._futures.add(future)
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: "Future[Any]") -> None:
        with self._guard:
            self._futures.discard(future)

    @staticmethod
    def result(future: "Future[T]") -> T:
        """Wait for the end of a coroutine; return its result, or raise its error."""
        try:
            return future.result()
        except CancelledError:
            raise _stopping() from None

    async def unary(
        self, name: str, method: str, request: Message, owned: Sequence[str], subject: str
    ) -> Any:
        """Call a node, check its answer, and return it. Raises AioRpcError or Refused.

        `subject` is the id of the volume that moves.
        """
        data, path = request.SerializeToString(), f"/{method}"
        call = _call(method, subject)
        with recorded(call, self._observe):
            node = self._node(name)
            call.node, start_seconds = name, time.monotonic()
            try:
                _, answer = await self._answers.of(
                    node, path, request, data, _CALL_SECONDS, owned=owned
                )
            finally:
                call.nodes_seconds.append((name, time.monotonic() - start_seconds))
        return answer

    async def read(
        self, name: str, method: str, request: Message, put: Callable[[Any], None], subject: str
    ) -> Any:
        """Call a node that answers by a stream; check each message, and return the last one.

        `put` is called with each message. `subject` is the id of the volume that moves. Raises
        AioRpcError, or Refused, also if the node sends nothing for _MESSAGE_SECONDS, or if the
        stream makes no progress for _IDLE_SECONDS.
        """
        call = _call(method, subject)
        with recorded(call, self._observe):
            node = self._node(name)
            call.node, start_seconds = name, time.monotonic()
            try:
                return await self._read(node, f"/{method}", request, put)
            finally:
                call.stream_seconds = time.monotonic() - start_seconds

    async def _read(
        self, node: Node, path: str, request: Message, put: Callable[[Any], None]
    ) -> Any:
        last = None
        asked, advance = self._answers.asked(node, request), Advance(time.monotonic())
        stream: grpc.aio.UnaryStreamMultiCallable[bytes, Any] = node.connected.unary_stream(path)
        call = stream(request.SerializeToString())
        try:
            while True:
                async with asyncio.timeout(_MESSAGE_SECONDS):
                    data = await call.read()
                if data is grpc.aio.EOF:
                    break
                last = await self._answers.read(node, path, asked, cast(bytes, data))
                put(last)
                if advance.idle_seconds(last, time.monotonic()) > _IDLE_SECONDS:
                    code = grpc.StatusCode.DEADLINE_EXCEEDED
                    why = f"there was no progress for {_IDLE_SECONDS:.0f} s; the call was cut off"
                    raise Refused(code, why)
                await asyncio.sleep(_BETWEEN_SECONDS)
        except grpc.aio.AioRpcError as error:
            require_node_error(node, error)
            raise
        except TimeoutError:
            why = f"node {node.name} has sent nothing for {_MESSAGE_SECONDS:.0f} s"
            raise Refused(grpc.StatusCode.UNAVAILABLE, why) from None
        except grpc.aio.UsageError:  # raised if the channel is closed
            code = grpc.StatusCode.UNAVAILABLE
            raise Refused(code, f"node {node.name} left the cluster") from None
        finally:
            call.cancel()
        if last is None:
            raise refused_answer(node, path, Untrue("the answer", last, "it has no message"))
        return last

    def _node(self, name: str) -> Node:
        """Return a node that answers. Raises Refused."""
        node = self.nodes.get(name)
        if node is None:
            raise Refused(grpc.StatusCode.UNAVAILABLE, f"the cluster has no node {name}")
        node.require_answering()
        return node

    def address(self, name: str) -> str:
        """Return the address at which a node serves. Raises NodeFailed if it does not answer."""

        async def address() -> str:
            return self._node(name).address

        return self.run(name, "Send", address)

    def require_owner(self, name: str, volume_id: str) -> None:
        """Raise NodeFailed unless it is certain that a node has a volume."""

        async def require() -> None:
            owner = await self.nodes.owner(volume_id, "volume_id")
            if owner.name != name:
                code = grpc.StatusCode.FAILED_PRECONDITION
                raise Refused(code, f"{volume_id} is a volume of node {owner.name}")

        self.run(name, "BeginMove", require)


def _stopping() -> NodeFailed:
    """Return the error of calls that the end of the controller cuts off."""
    code = grpc.StatusCode.CANCELLED
    return NodeFailed("the controller", "move", code, "it stops; another one continues")


async def _named(node: str, method: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Await a coroutine about a node. Raises NodeFailed for each error that a call may raise."""
    try:
        return await work()
    except grpc.aio.AioRpcError as error:
        code, why = error.code(), error.details() or ""
    except Refused as error:
        code, why = error.code, str(error)
    except (TimeoutError, asyncio.CancelledError) as error:
        code, why = grpc.StatusCode.UNAVAILABLE, problem_of(error)
    raise NodeFailed(node, method, code, why)


def _call(method: str, subject: str) -> Call:
    """Return the record of a call that begins. `method` is `SERVICE/METHOD`."""
    return Call(method.rpartition("/")[2], subject=subject, is_routine=True)


class Calls:
    """The calls of one move to nodes, from the thread of the move.

    `is_wanted` returns whether the move of the volume is to go on.
    """

    def __init__(self, moves: NodeMoves, volume_id: str, is_wanted: Callable[[], bool]) -> None:
        self.moves, self._volume_id, self._is_wanted = moves, volume_id, is_wanted

    def call(self, node: str, method: str, request: Message, *, owned: Sequence[str] = ()) -> Any:
        """Call a node, check its answer, and return it. `method` is `SERVICE/METHOD`.

        A call that meets another call for the volume (ABORTED) is repeated for _AGAIN_SECONDS.
        Raises NodeFailed.
        """
        until = time.monotonic() + _AGAIN_SECONDS
        while True:
            if method not in _ALWAYS:
                self._require_wanted(node, method)
            try:
                return self.moves.run(
                    node,
                    method,
                    lambda: self.moves.unary(node, method, request, owned, self._volume_id),
                )
            except NodeFailed as error:
                if error.code() is not grpc.StatusCode.ABORTED or time.monotonic() > until:
                    raise
            time.sleep(_PAUSE_SECONDS)

    def streams(
        self, *calls: tuple[str, str, Message], show: Callable[[Any], None]
    ) -> Sequence[Any]:
        """Call nodes that answer by streams, all at once; return the last message of each.

        A call is a node, `SERVICE/METHOD`, and the request. All messages are checked. `show` is
        called in this thread with each message of the last one of the calls. If one call fails, or
        this thread is interrupted, all are cut off. Raises NodeFailed.
        """
        messages: SimpleQueue[Any] = SimpleQueue()

        async def all_read() -> Sequence[Any]:
            tasks = [
                asyncio.ensure_future(
                    _named(
                        node,
                        method,
                        partial(
                            self.moves.read,
                            *(node, method, request),
                            messages.put if number == len(calls) else lambda _message: None,
                            self._volume_id,
                        ),
                    )
                )
                for number, (node, method, request) in enumerate(calls, 1)
            ]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

        future = self.moves.begin(all_read)
        future.add_done_callback(lambda _future: messages.put(None))
        try:
            while (message := self._next(messages)) is not None:
                show(message)
        finally:
            future.cancel()
        return self.moves.result(future)

    def _next(self, messages: "SimpleQueue[Any]") -> Any:
        """Wait for the next message of a stream; None at its end."""
        while True:
            self._require_wanted("the controller", "move")
            with suppress(Empty):
                return messages.get(timeout=_LOOK_SECONDS)

    def _require_wanted(self, node: str, method: str) -> None:
        if not self._is_wanted():
            raise NodeFailed(node, method, grpc.StatusCode.CANCELLED, "the move is stopped")


class SourceNode:
    """The node that has the volume, as the `Source` of a move. Its methods raise NodeFailed."""

    def __init__(self, calls: Calls, volume_id: str, node: str, replaces: str) -> None:
        self._calls, self._volume_id, self._node = calls, volume_id, node
        self._replaces = replaces

    def begin(self, node: str) -> carver.MoveState:
        """Record that the volume moves to a node. Raises NodeFailed if it is another node's."""
        self._calls.moves.require_owner(self._node, self._volume_id)
        request = carver.BeginMoveRequest(
            volume_id=self._volume_id, node=node, replaces=self._replaces
        )
        return cast(carver.MoveState, self._transfer("BeginMove", request))

    def state(self) -> carver.MoveState:
        """Return the state of the volume and of its move."""
        request = carver.NameRequest(name=self._volume_id)
        return cast(carver.MoveState, self._transfer("MoveStatus", request))

    def snapshots(self) -> Mapping[str, str]:
        """Return the ids of the move's readable snapshots, by their chains."""
        by_chain = {}
        for snapshot in self._snapshots():
            request = carver.SnapshotChainRequest(snapshot_id=snapshot.snapshot_id)
            try:
                by_chain[self._transfer("SnapshotChain", request).chain] = snapshot.snapshot_id
            except NodeFailed:
                # Leave out a snapshot that was lost since it was listed.
                if any(
                    found.ready_to_use and found.snapshot_id == snapshot.snapshot_id
                    for found in self._snapshots()
                ):
                    raise
        return by_chain

    def take(self) -> str:
        """Take a snapshot of the volume under a new name; return the snapshot's id."""
        name = f"{prefix_of(self.state().release)}{secrets.token_hex(4)}"
        request = csi.CreateSnapshotRequest(source_volume_id=self._volume_id, name=name)
        answer = self._csi("CreateSnapshot", request)
        return str(answer.snapshot.snapshot_id)

    def drop(self, kept_ids: Sequence[str]) -> None:
        """Delete the move's snapshots, except those whose ids are in `kept_ids`."""
        for snapshot in self._snapshots():
            if snapshot.snapshot_id not in kept_ids:
                request = csi.DeleteSnapshotRequest(snapshot_id=snapshot.snapshot_id)
                self._csi("DeleteSnapshot", request)

    def hold(self, token: str = "") -> str:
        """Hold the volume, or renew the hold with a token; return the token."""
        request = carver.HoldMoveRequest(volume_id=self._volume_id, token=token)
        return str(self._transfer("HoldMove", request).token)

    def release(self, token: str) -> None:
        """End the hold with a token."""
        request = carver.HoldMoveRequest(volume_id=self._volume_id, token=token)
        self._transfer("ReleaseMove", request)

    def commit(self, snapshot_id: str, token: str) -> carver.MoveState:
        """Record that the volume is the other node's; return the state, with the word."""
        request = carver.CommitMoveRequest(
            volume_id=self._volume_id, snapshot_id=snapshot_id, token=token
        )
        return cast(carver.MoveState, self._transfer("CommitMove", request))

    def undo(self, release: str, *, only_begun: bool = False) -> None:
        """Make the volume this node's again, and forget the move."""
        request = carver.MoveRequest(
            volume_id=self._volume_id, release=release, only_begun=only_begun
        )
        self._transfer("UndoMove", request)

    def finish(self, release: str) -> None:
        """Delete what is left of the volume."""
        request = carver.MoveRequest(volume_id=self._volume_id, release=release)
        self._transfer("FinishMove", request)

    def _snapshots(self) -> list[csi.Snapshot]:
        """Return this move's snapshots."""
        prefix = prefix_of(self.state().release)
        found: list[csi.Snapshot] = []
        request = csi.ListSnapshotsRequest(source_volume_id=self._volume_id)
        while True:
            answer = self._csi("ListSnapshots", request)
            found += (
                entry.snapshot
                for entry in answer.entries
                if f"/{ids.SNAPSHOT_PREFIX}-{prefix}" in entry.snapshot.snapshot_id
            )
            if not answer.next_token:
                return found
            request.starting_token = answer.next_token

    def _transfer(self, method: str, request: Message) -> Any:
        return self._calls.call(
            self._node, f"{TRANSFER}/{method}", request, owned=[self._volume_id]
        )

    def _csi(self, method: str, request: Message) -> Any:
        return self._calls.call(
            self._node, f"{_CONTROLLER}/{method}", request, owned=[self._volume_id]
        )


class TargetNode:
    """The node that the volume moves to, as the `Destination` of a move; raises NodeFailed."""

    def __init__(
        self,
        calls: Calls,
        volume_id: str,
        source: str,
        target: str,
        name: str,
        device_class: str,
        replaces: str,
        show: Callable[[Progress], None],
    ) -> None:
        self._calls, self._volume_id, self._source = calls, volume_id, source
        self.node, self.name = target, name
        self._device_class, self._replaces = device_class, replaces
        self._show = show

    def status(self) -> There:
        """Return the state of the volume there."""
        return _there(self._transfer("ReceiveStatus", carver.NameRequest(name=self.name)))

    def send(
        self, snapshot_id: str, base_id: str, release: str, offset_bytes: int, *, is_verified: bool
    ) -> Sent:
        """Have the node read a snapshot from the other node. Raises Differ if it arrived altered.

        `release` is the digest of the move's word.
        """
        # Import the module here: only moves need its library.
        from agent.extras.transfer import grants

        moves = self._calls.moves
        grant = grants.new(
            moves.certificates(), moves.driver_name, self._volume_id, self._source, self.node
        )
        request = carver.PullRequest(
            name=self.name,
            device_class=self._device_class,
            source=carver.PullSource(
                node=self._source,
                address=moves.address(self._source),
                volume_id=self._volume_id,
                snapshot_id=snapshot_id,
                base_snapshot_id=base_id,
            ),
            release=release,
            offset_bytes=offset_bytes,
            verify=is_verified,
            grant=grant,
            replaces="" if base_id else self._replaces,
        )
        [last] = self._calls.streams(
            (self.node, f"{TRANSFER}/Pull", request), show=_Rate("sending", self._show)
        )
        is_equal = bool(is_verified and last.received_sha256 and last.sent_sha256)
        if is_equal and last.received_sha256 != last.sent_sha256:
            raise Differ
        return Sent(is_equal, last.data_bytes)

    def compare(self, snapshot_id: str) -> None:
        """Compare the checksums of a whole snapshot and of what is there, read at the same time."""
        method = f"{TRANSFER}/Checksum"
        own, there = self._calls.streams(
            (self._source, method, carver.ChecksumRequest(snapshot_id=snapshot_id)),
            (self.node, method, carver.ChecksumRequest(name=self.name)),
            show=_Rate("comparing", self._show),
        )
        if not own.sha256 or own.sha256 != there.sha256:
            raise Differ

    def finish(self, word: str) -> There:
        """Make the volume one of that node; return its state there."""
        self._transfer("FinishReceive", self._release(word))
        return self.status()

    def withdraw(self, word: str) -> None:
        """Undo `finish`, so that the volume can only be removed."""
        self._transfer("WithdrawReceive", self._release(word))

    def abort(self, release: str) -> None:
        """Erase and remove what was received by the move with the digest `release`."""
        there_state = self.status()
        if there_state["state"] != ABSENT:
            request = carver.MoveRequest(volume_id=there_state["volume_id"], release=release)
            self._transfer("AbortReceive", request)

    def _release(self, word: str) -> carver.ReleaseRequest:
        return carver.ReleaseRequest(volume_id=self.status()["volume_id"], release=word)

    def _transfer(self, method: str, request: Message) -> Any:
        return self._calls.call(self.node, f"{TRANSFER}/{method}", request)


class _Rate:
    """Makes the progress of a stream from its messages, and shows it."""

    def __init__(self, action: str, show: Callable[[Progress], None]) -> None:
        self._action, self._show = action, show
        self._first: tuple[float, int] | None = None

    def __call__(self, message: Any) -> None:
        if not message.size_bytes:
            return
        now, done_bytes = time.monotonic(), message.done_bytes
        if self._first is None:
            self._first = now, done_bytes
        began, first_bytes = self._first
        rate = (done_bytes - first_bytes) / max(now - began, 0.001)
        left = (message.size_bytes - done_bytes) / rate if rate > 0 else None
        # Both nodes read again at the same time.
        checked_bytes = getattr(message, "checked_bytes", 0) // 2
        data_bytes = getattr(message, "data_bytes", 0)
        self._show(
            Progress(
                *(self._action, done_bytes, message.size_bytes, max(rate, 0.0), left),
                checked_bytes,
                data_bytes,
            )
        )


def _there(state: carver.ReceiveState) -> There:
    fields = {field.name: getattr(state, field.name) for field in state.DESCRIPTOR.fields}
    return {**fields, "verifies": True}
