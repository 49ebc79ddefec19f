"""The nodes of the cluster as the controller knows them: which answers, and who has which group.

Nothing is kept on disk: each node is asked again after a start. A group is the node's that claimed
it first, until that node says that it no longer has it or leaves the cluster: another's claim is
logged and ignored. If that other was silent before, nothing says which was first: then calls for
the group are refused until one of them gives it up.
"""

import asyncio
import json
import logging
import time
import tomllib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from agent.core import errors, ids, values
from agent.core.ids import VolumeId
from agent.extras.controller import routes
from proto import csi_pb2 as csi

_log = logging.getLogger(__name__)

_INFO = "/csi.v1.Identity/GetPluginInfo"
# How often a node that answers is asked, and one that does not.
_INTERVAL_SECONDS, _SILENT_INTERVAL_SECONDS = 60.0, 5.0
_PATIENCE_SECONDS = 3.0
# A node's answer that is younger is not asked for again to find a group.
_FRESH_SECONDS = 10.0
# Nodes that are asked at once.
_AT_ONCE = 64
_MOST_NAMED = 5
# Characters that are shown of what a node says and cannot be so, of its version and its errors, and
# the most that its topology and its groups may take.
_MOST_SHOWN, _MOST_TEXT, _MOST_MANIFEST = 100, 1000, 1 << 16
_NOT_ASKED = "it has not been asked yet"
# How long calls in flight may take when their connection is replaced: a stream may last for hours.
_GRACE_SECONDS = 24 * 3600.0
# Makes a channel to a node by its name and address.
Connect = Callable[[str, str], grpc.aio.Channel]


def read(path: Path) -> Mapping[str, str]:
    """The addresses of the nodes, by their names, from the table `nodes` of a TOML file.

    Raises BadConfig.
    """
    try:
        table = tomllib.loads(path.read_text()).get("nodes", {})
    except (OSError, ValueError) as error:
        raise errors.BadConfig(str(path), "nodes", f"cannot be read: {error}") from None
    if not isinstance(table, dict):
        raise errors.BadConfig(str(path), "nodes", "is no table of addresses by nodes' names")
    for name, address in table.items():
        values.checked(str(path), f"nodes.{name}", values.parse_node_id, name)
        if values.checked(str(path), f"nodes.{name}", values.parse_address, address) is None:
            raise errors.BadConfig(str(path), f"nodes.{name}", "is empty; give address:port")
    return dict(table)


class Refused(Exception):
    """A call that the controller answers itself, with a code and a sentence."""

    def __init__(self, code: grpc.StatusCode, problem: str) -> None:
        super().__init__(problem)
        self.code = code


class NoOwner(Refused):
    """No node that answers has the volume group of an id."""

    def __init__(self, problem: str) -> None:
        super().__init__(grpc.StatusCode.UNAVAILABLE, problem)


def unavailable(problem: str) -> Refused:
    """What a caller is to try again."""
    return Refused(grpc.StatusCode.UNAVAILABLE, problem)


@dataclass
class Node:
    """A node: its connection, and what it said of itself last."""

    name: str
    # Empty while it is not known; then there is no channel.
    address: str
    channel: grpc.aio.Channel | None = None
    version: str = ""
    segments: Mapping[str, str] = field(default_factory=dict)
    # The names of its volume groups, by the start of their UUIDs as ids have it.
    groups: Mapping[str, str] = field(default_factory=dict)
    # When it answered last, and when it was asked last (monotonic, seconds); 0 for never.
    answered_seconds: float = 0.0
    asked_seconds: float = 0.0
    # Why it did not answer when it was asked last; empty if it did.
    problem: str = _NOT_ASKED
    # Answers that were not passed on, as they cannot be true.
    refused_answers: int = 0
    # Since when it is known (monotonic, seconds).
    joined_seconds: float = field(default_factory=lambda: time.monotonic())
    asking: "asyncio.Task[None] | None" = None

    @property
    def connected(self) -> grpc.aio.Channel:
        """Its channel. Raises Refused for a node whose address is not known."""
        if self.channel is None:
            raise unavailable(
                f"node {self.name} has not enrolled at this controller: see Carver's log there"
            )
        return self.channel

    async def close(self, grace_seconds: float | None = None) -> None:
        """Close its connection."""
        if self.asking is not None and grace_seconds is None:
            self.asking.cancel()
        if self.channel is not None:
            await self.channel.close(grace_seconds)

    @property
    def is_being_asked(self) -> bool:
        """Whether a question is under way."""
        return self.asking is not None and not self.asking.done()

    @property
    def is_due(self) -> bool:
        """Whether it is to be asked again."""
        interval = _SILENT_INTERVAL_SECONDS if self.problem else _INTERVAL_SECONDS
        return not self.asked_seconds or time.monotonic() - self.asked_seconds >= interval

    @property
    def silent_seconds(self) -> float:
        """For how long it has not answered, since it is known; 0 where it answers."""
        if not self.problem:
            return 0.0
        return time.monotonic() - max(self.answered_seconds, self.joined_seconds)

    def require_answering(self) -> None:
        """Raise Refused for a node that did not answer: a call would only wait for it."""
        if self.problem and self.connected:
            raise unavailable(
                f"node {self.name} ({self.address}) does not answer: {self.problem}; see Carver's"
                " log there. It is asked again every few seconds"
            )


async def unary(node: Node, path: str, request: bytes, timeout: float | None) -> bytes:
    """Call a node, with the bytes of a request and of its answer; raises AioRpcError, Refused."""
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = node.connected.unary_unary(path)
    try:
        return await call(request, timeout=timeout)
    except grpc.aio.UsageError:  # the channel is closed
        raise unavailable(f"node {node.name} left the cluster") from None


class Nodes:
    """All nodes of the cluster, for one event loop."""

    def __init__(self, driver_name: str, connect: Connect) -> None:
        self._driver_name, self._connect = driver_name, connect
        self._nodes: dict[str, Node] = {}
        # The name of the node that has a group, by the start of the group's UUID.
        self._owners: dict[str, str] = {}
        # The node whose claim to a group was ignored, or is as good as the first one's.
        self._ignored: set[tuple[str, str]] = set()
        self._contested: dict[str, str] = {}
        # When the one that has a group claimed it (monotonic, seconds).
        self._claimed: dict[str, float] = {}
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Node]:
        """The nodes in the order of their names; a scrape asks in a thread of its own."""
        return iter([node for _, node in sorted(self._nodes.items())])

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, name: str) -> Node | None:
        """A node by its name; None for one that is not in the cluster."""
        return self._nodes.get(name)

    def set(self, addresses: Mapping[str, str]) -> None:
        """Make these the nodes of the cluster.

        One that moved to another address keeps its groups until it says that it has them no more.
        """
        for name, known in list(self._nodes.items()):
            if name not in addresses:
                self._drop(known)
            elif addresses[name] != known.address:
                known.address = addresses[name]
                known.problem, known.asked_seconds = _NOT_ASKED, 0.0
                self._replace_channel(known)
        for name, address in addresses.items():
            if name not in self._nodes:
                self._nodes[name] = Node(name, address, self._channel(name, address))

    def reconnect(self) -> None:
        """Connect to all nodes anew, as with other certificates; calls in flight end as they do."""
        for one in self:
            self._replace_channel(one)

    def _replace_channel(self, node: Node) -> None:
        old, node.channel = node.channel, self._channel(node.name, node.address)
        if old is not None:
            self._later(old.close(_GRACE_SECONDS))

    def _channel(self, name: str, address: str) -> grpc.aio.Channel | None:
        return self._connect(name, address) if address else None

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something in the background; the task is kept until it has ended."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Close all connections."""
        for one in self:
            await one.close()

    def ask_due(self) -> None:
        """Ask those nodes that are due, without waiting for the others' answers."""
        for one in self:
            if one.address and one.is_due:
                self.ask(one)

    def ask(self, node: Node) -> "asyncio.Future[None]":
        """Ask a node what it has; one question at a time, which all callers wait for together.

        A caller that is cancelled stops waiting. The question goes on for the other callers.
        """
        if node.asking is None or node.asking.done():
            node.asking = asyncio.get_running_loop().create_task(self._ask(node))
        return asyncio.shield(node.asking)

    async def ask_anew(self, node: Node) -> None:
        """Ask a node what it has, with a question that begins now."""
        if node.is_being_asked:
            await self.ask(node)
        await self.ask(node)

    async def owner(self, identity: str, what: str) -> Node:
        """The node that has the group of an id, which was read from the field `what`.

        Raises Refused if no node has it or if that one does not answer.
        """
        parsed = VolumeId.parse(identity)
        if parsed is None:
            # No volume has such an id, and any node says that as the call demands.
            return self._any()
        if parsed.group_uuid not in self._owners:
            await self._ask_all()
        node = self._owner(parsed, what)
        node.require_answering()
        return node

    def _owner(self, parsed: VolumeId, what: str) -> Node:
        """The node that has a group. Raises Refused where none has it, or two claim it."""
        uuid = parsed.group_uuid
        name = self._owners.get(uuid)
        if name is None:
            raise NoOwner(self._unknown(parsed, what))
        self.require_undisputed(parsed, what)
        return self._nodes[name]

    def require_undisputed(self, parsed: VolumeId, what: str) -> None:
        """Raise Refused for a group that two nodes claim."""
        uuid = parsed.group_uuid
        other = self._rival(uuid)
        if other is not None:
            raise unavailable(
                f"{what}: nodes {self._owners.get(uuid)} and {other.name} both claim volume group"
                f" {parsed.group} ({uuid}), and which was first is not known: detach its disks from"
                " one, or delete that one's Node object"
            )

    def _rival(self, uuid: str) -> Node | None:
        """The node whose claim to a group is as good as that of the node that has it."""
        other = self._nodes.get(self._contested.get(uuid, ""))
        return other if other is not None and uuid in other.groups else None

    def places(self, node: Node) -> frozenset[str]:
        """The volume groups that are a node's, and no other's, as ids name them: `group@uuid`."""
        return frozenset(
            f"{group}@{uuid}"
            for uuid, group in node.groups.items()
            if self._owners.get(uuid) == node.name and self._rival(uuid) is None
        )

    async def moved_on(self, node: Node, identity: str, what: str) -> Node | None:
        """The node that has the group of an id by now, if that is another; asks the first again.

        Raises NoOwner if the first one no longer has it, and no other does.
        """
        parsed = VolumeId.parse(identity)
        if parsed is None:
            return None
        await self.ask(node)
        if node.problem or parsed.group_uuid in node.groups:
            return None
        await self._ask_all(fresh_seconds=0)
        other = self._owner(parsed, what)
        return other if other is not node else None

    def is_elsewhere(self, node: Node, identity: VolumeId) -> bool:
        """Whether another node has the group of an id; False for a group that no node has."""
        return self._owners.get(identity.group_uuid, node.name) != node.name

    def of_segments(self, segments: Mapping[str, str]) -> Node:
        """The node with these topology segments. Raises Refused if there is none that answers."""
        for one in self._nodes.values():
            if one.segments and segments.items() <= one.segments.items():
                one.require_answering()
                return one
        silent = [one.name for one in self if not one.segments]
        raise unavailable(f"no node says that its topology is {dict(segments)}{_not_asked(silent)}")

    def answering(self) -> Sequence[Node]:
        """The nodes that answered last."""
        return [one for one in self if not one.problem]

    def require_all(self) -> Sequence[Node]:
        """All nodes; raises Refused if one of them does not answer."""
        for one in self:
            one.require_answering()
        return list(self)

    def _any(self) -> Node:
        for one in self:
            if not one.problem:
                return one
        raise unavailable(f"no node of {len(self)} answers; see `carver controller status`")

    async def _ask_all(self, fresh_seconds: float = _FRESH_SECONDS) -> None:
        """Ask all nodes but those that were asked so lately."""
        since = time.monotonic() - fresh_seconds
        known = [one for one in self if one.address]
        due = [one for one in known if one.is_being_asked or one.asked_seconds <= since]
        # A question is cancelled where its node leaves the cluster: the other nodes' answers count.
        await asyncio.gather(*map(self.ask, due), return_exceptions=True)

    async def _ask(self, node: Node) -> None:
        try:
            async with self._turn:
                node.asked_seconds = time.monotonic()
                answer = await unary(node, _INFO, b"", _PATIENCE_SECONDS)
                said = csi.GetPluginInfoResponse.FromString(answer)
            if self._nodes.get(node.name) is not node:
                raise unavailable(f"node {node.name} left the cluster")
            self._believe(node, said)
        except grpc.aio.AioRpcError as error:
            problem = f"{error.code().name}: {error.details()}"
        except Refused as error:
            problem = str(error)
        except (ValueError, RecursionError, DecodeError) as error:
            # Whatever one node says, the others' calls go on.
            problem = f"it answers what Carver does not: {error}"
        else:
            node.answered_seconds = time.monotonic()
            problem = ""
        problem = _printable(problem)
        if bool(problem) != bool(node.problem) or (problem and node.problem == _NOT_ASKED):
            _log.warning("node %s %s", node.name, problem or "answers")
        node.problem = problem

    def _believe(self, node: Node, said: csi.GetPluginInfoResponse) -> None:
        """Take what a node says of itself. Raises ValueError where it cannot be so."""
        manifest = said.manifest
        name = manifest.get(routes.NODE_ID)
        node.version = _printable(said.vendor_version)
        if said.name == self._driver_name and name is None:
            raise ValueError(
                f"its Carver {node.version} is of a version without the controller's part:"
                " update it"
            )
        if (said.name, name) != (self._driver_name, node.name):
            raise ValueError(
                f"it is node {name!r} of driver {said.name!r}, not {node.name!r}"
                f" of {self._driver_name!r}"
            )
        segments, groups = (_texts(manifest, key) for key in (routes.SEGMENTS, routes.GROUPS))
        if segments != (own := ids.topology(node.name, self._driver_name)):
            raise ValueError(f"its topology is {str(segments)[:_MOST_SHOWN]!r}, not {own}")
        for uuid, group in groups.items():
            if VolumeId.parse(f"{group}@{uuid}/any") is None:
                raise ValueError(f"{f'{group}@{uuid}'[:_MOST_SHOWN]!r} is no volume group")
        node.segments, node.groups = segments, groups
        for uuid, owner in list(self._owners.items()):
            if owner == node.name and uuid not in node.groups:
                self._give_up(uuid)
        self._ignored -= {one for one in self._ignored if one[0] == node.name} - {
            (node.name, uuid) for uuid in node.groups
        }
        for uuid in node.groups:
            owner = self._claim(node, uuid)
            if owner != node.name:
                self._refuse_claim(node, uuid, owner)

    def _claim(self, node: Node, uuid: str) -> str:
        """Give a group that no node has to this one; the name of the one that has it."""
        if uuid not in self._owners:
            self._owners[uuid], self._claimed[uuid] = node.name, time.monotonic()
        return self._owners[uuid]

    def _refuse_claim(self, node: Node, uuid: str, owner: str) -> None:
        """Keep a group from a node that claims what another has; log it once.

        A node that was silent until now may have had it before the other claimed it.
        """
        if not node.answered_seconds and node.joined_seconds <= self._claimed[uuid]:
            self._contested[uuid] = node.name
            # It may have given the group up since it was asked last.
            self.ask(self._nodes[owner])
        if (node.name, uuid) not in self._ignored:
            self._ignored.add((node.name, uuid))
            _log.error(
                "node %s claims volume group %s (%s), which node %s has: %s",
                *(node.name, node.groups[uuid], uuid, owner),
                "calls for it are refused" if self._contested.get(uuid) == node.name else "ignored",
            )

    def _drop(self, node: Node) -> None:
        del self._nodes[node.name]
        for uuid, owner in list(self._owners.items()):
            if owner == node.name:
                self._give_up(uuid)
        self._later(node.close())

    def _give_up(self, uuid: str) -> None:
        """Let another node have a group that its node no longer has, if one claims it."""
        del self._owners[uuid]
        self._contested.pop(uuid, None)
        for one in self:
            if uuid in one.groups:
                self._claim(one, uuid)

    def _unknown(self, parsed: VolumeId, what: str) -> str:
        silent = [one.name for one in self if one.problem]
        return (
            f"{what}: no node that answers has volume group {parsed.group} ({parsed.group_uuid})"
            f"{_not_asked(silent)}. Start Carver on its node, or attach its disks to one"
        )


def _texts(manifest: Mapping[str, str], key: str) -> Mapping[str, str]:
    """A JSON object of texts. Raises ValueError, RecursionError."""
    text = manifest.get(key, "")
    if len(text) > _MOST_MANIFEST:
        raise ValueError(f"its {key} is longer than {_MOST_MANIFEST} characters")
    found = json.loads(text)
    if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
        raise ValueError(f"{text[:100]!r} is no JSON object of texts")
    return found


def _printable(text: str) -> str:
    """The beginning of a node's text for log and terminal, with spaces for control characters."""
    return "".join(one if one.isprintable() else " " for one in text[:_MOST_TEXT])


def _not_asked(silent: Sequence[str]) -> str:
    if not silent:
        return ""
    more = f" and {len(silent) - _MOST_NAMED} more" if len(silent) > _MOST_NAMED else ""
    return f"; nodes that do not answer: {', '.join(silent[:_MOST_NAMED])}{more}"
