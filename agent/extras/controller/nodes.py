"""The nodes of the cluster in the controller's memory: their connections and their volume groups.

Nothing is kept on disk: a controller that starts asks each node again for its volume groups
(GetPluginInfo). The terms of this module:

- A *member* is a node that belongs to the cluster (membership.py), whether it answers or not.
- A node *claims* the volume groups that it named in its last answer to GetPluginInfo, for as long
  as the node is a member. While a node has not scanned all its disks, it also claims the groups
  that it named in earlier answers.
- PersistentVolumes *name* nodes for a group, by their node affinity (membership.py).
- A claim is *settled* if only that node claims the group, PersistentVolumes name no other node for
  it, and each other member has reported its groups to this controller.

If a claim is settled, everything in the group belongs to that node. Otherwise, for each call about
an existing volume or snapshot, the PersistentVolume of that volume is read and decides which node
is called. So the order of events does not matter.

No new volume is made on nodes that share a group with another node. While a member has reported no
groups, new volumes wait two minutes for its report, and no longer: one broken node does not keep
new volumes off the other nodes.
"""

import asyncio
import json
import logging
import time
import tomllib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc

from agent.core import errors, ids
from agent.core.ids import VolumeId
from agent.extras.controller import routes
from agent.extras.controller.answer_rules import Untrue
from agent.extras.controller.membership import Record, Serving, WrongSource
from agent.extras.controller.questions import NotInTime, Questions
from agent.settings import values
from proto import csi_pb2 as csi

_log = logging.getLogger(__name__)
T = TypeVar("T")

_INFO = "/csi.v1.Identity/GetPluginInfo"
# Seconds between two GetPluginInfo calls to a node that answers and has scanned all its disks; and
# to any other node.
_INTERVAL_SECONDS, _SILENT_INTERVAL_SECONDS = 60.0, 5.0
# Time limit, in seconds, of a GetPluginInfo call, which asks a node for its volume groups.
_PATIENCE_SECONDS = 3.0
# Age, in seconds, up to which a node's answer to GetPluginInfo is used to find a volume group
# without another call.
_FRESH_SECONDS = 10.0
# Largest number of nodes that are asked at the same time.
_AT_ONCE = 64
# Largest number of names in an error message.
_MOST_NAMED = 5
# Time limit, in seconds, of one look-up of an id at the API server. The limit is longer than that
# of a call, as PersistentVolumes that are read for one call serve the call that repeats it.
_QUESTION_SECONDS = 120.0
# Limits, in characters: of an impossible value that is shown; of a node's version and errors; of a
# node's topology, and of its volume groups, as JSON.
_MOST_SHOWN, _MOST_TEXT, _MOST_MANIFEST = 100, 1000, 1 << 16
# Largest size, in bytes, of a node's answer to GetPluginInfo. A larger answer is not even parsed.
_MOST_BYTES = 4 * _MOST_MANIFEST
# Largest number of volume groups of a node.
_MOST_GROUPS = 200
# Time, in seconds, for which new volumes wait for a new member of the cluster to report its volume
# groups.
_COMING_SECONDS = 120.0
_NOT_ASKED = "it has not been asked yet"
# Time limit, in seconds, of the calls in flight on a connection that is replaced. The limit is long
# because a stream may last for hours.
_GRACE_SECONDS = 24 * 3600.0
# A function that makes a channel to a node, by the node's name and address.
Connect = Callable[[str, str], grpc.aio.Channel]


def read(path: Path) -> Mapping[str, str]:
    """Return the addresses of the nodes, by their names, from the table `nodes` of a TOML file.

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
    """An error with which the controller itself answers a call: a gRPC code and a sentence."""

    def __init__(self, code: grpc.StatusCode, problem: str) -> None:
        super().__init__(problem)
        self.code = code


class NoOwner(Refused):
    """The error UNAVAILABLE: no node that answers has the volume group of an id."""

    def __init__(self, problem: str) -> None:
        super().__init__(grpc.StatusCode.UNAVAILABLE, problem)


class Gone(Refused):
    """The error NOT_FOUND: an id names nothing.

    No volume can have such an id, or its node was deleted.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(grpc.StatusCode.NOT_FOUND, problem)


class Forgotten(Gone):
    """The error NOT_FOUND: what an id names was on a node that was deleted from the cluster."""


def unavailable(problem: str) -> Refused:
    """Return the error UNAVAILABLE, after which the caller retries."""
    return Refused(grpc.StatusCode.UNAVAILABLE, problem)


@dataclass
class Node:
    """A node of the cluster: its connection, and its last answer to GetPluginInfo."""

    name: str
    # The node's address, `host:port`; empty until the node has enrolled. While the address is
    # empty, `channel` is None.
    address: str
    channel: grpc.aio.Channel | None = None
    # The UID of the node's Node object; empty without an API server.
    uid: str = ""
    version: str = ""
    segments: Mapping[str, str] = field(default_factory=dict)
    # The names of the node's volume groups, by the start of their UUIDs as in volume ids.
    groups: Mapping[str, str] = field(default_factory=dict)
    # Whether the node had scanned all its disks when it last answered. None for an older version of
    # Carver, which does not report that.
    is_whole: bool | None = None
    # Whether kubelet on the node asks for the health of its volumes, and shows it in the status of
    # the pods that use them.
    is_watched: bool = False
    # Whether the node has reported its volume groups to this controller after a scan of its disks.
    # True also for an older version of Carver, which does not say whether it has scanned them.
    has_reported: bool = False
    # The times at which the node began to claim each of its volume groups, on the clock of the
    # Record; and the volume groups that the node has a settled claim to. Both by the start of the
    # group's UUID.
    claimed: dict[str, float] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)
    # When the node last answered, and was last asked, for its volume groups (monotonic, seconds); 0
    # for never.
    answered_seconds: float = 0.0
    asked_seconds: float = 0.0
    # Why the node did not answer the last GetPluginInfo call; empty if it answered.
    problem: str = _NOT_ASKED
    # Number of the node's answers that were refused because they cannot be true.
    refused_answers: int = 0
    # When the controller learned of the node (monotonic, seconds).
    joined_seconds: float = field(default_factory=lambda: time.monotonic())
    # The task of the last GetPluginInfo call to the node, which may have ended.
    asking: "asyncio.Task[None] | None" = None

    @property
    def connected(self) -> grpc.aio.Channel:
        """The channel to the node. Raises Refused if the node's address is not known."""
        if self.channel is None:
            raise unavailable(
                f"node {self.name} has not enrolled at this controller: see Carver's log there"
            )
        return self.channel

    async def close(self, grace_seconds: float | None = None) -> None:
        """Cancel the GetPluginInfo call in flight, and close the connection.

        With `grace_seconds`, calls in flight may go on for that time, and so may the GetPluginInfo
        call.
        """
        if self.asking is not None and grace_seconds is None:
            self.asking.cancel()
        if self.channel is not None:
            await self.channel.close(grace_seconds)

    @property
    def is_being_asked(self) -> bool:
        """Whether a GetPluginInfo call to the node is in flight."""
        return self.asking is not None and not self.asking.done()

    @property
    def is_due(self) -> bool:
        """Whether it is time for the next GetPluginInfo call to the node."""
        interval = _SILENT_INTERVAL_SECONDS if self.may_have_more else _INTERVAL_SECONDS
        return not self.asked_seconds or time.monotonic() - self.asked_seconds >= interval

    @property
    def may_have_more(self) -> bool:
        """Whether the node may have more volume groups than it named.

        True if the node does not answer, or has not scanned all its disks.
        """
        return bool(self.problem) or self.is_whole is False

    @property
    def has_all_named(self) -> bool:
        """Whether the node answers, and has scanned all its disks.

        Such a node has no volume group but those that it named.
        """
        return not self.problem and self.is_whole is True

    @property
    def silent_seconds(self) -> float:
        """Time, in seconds, for which the node has not answered; 0 if it answers.

        The time counts from the last answer, or from when the controller learned of the node.
        """
        if not self.problem:
            return 0.0
        return time.monotonic() - max(self.answered_seconds, self.joined_seconds)

    def require_answering(self) -> None:
        """Raise Refused if the node did not answer the last GetPluginInfo call.

        Another call to such a node would only time out.
        """
        if self.problem and self.connected:
            raise unavailable(
                f"node {self.name} ({self.address}) does not answer: {self.problem}; see Carver's"
                " log there. It is asked again every few seconds"
            )


# Texts in gRPC's error for a message from a node that is too large. The code of that error is
# RESOURCE_EXHAUSTED, at which the external-provisioner would make the volume on another node.
_DROPPED = ("larger than max", "metadata size exceeds")


def require_node_error(node: Node, error: grpc.aio.AioRpcError) -> None:
    """Raise Refused if a call failed in gRPC because the node's answer or error is too large.

    The call may have been carried out, so RESOURCE_EXHAUSTED must not be passed on as the node's.
    """
    details = error.details() or ""
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and any(
        text in details for text in _DROPPED
    ):
        raise unavailable(
            f"node {node.name} sends more than gRPC takes: {details}. The call may have been"
            " carried out: repeat it"
        )


def problem_of(error: BaseException) -> str:
    """Return what is wrong with a node, as text, by the error of a call to the node.

    Whatever one of several nodes does fails its own call only. An error that cancels the caller's
    own task is raised again.
    """
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    if isinstance(error, Refused):
        return str(error)
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    if isinstance(error, asyncio.CancelledError):
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise error
        return "it left the cluster, or its address changed"
    return f"it answers what Carver does not: {str(error) or type(error).__name__}"


async def unary(node: Node, path: str, request: bytes, timeout: float | None) -> bytes:
    """Call a node with the bytes of a request, and return the bytes of its answer.

    Raises AioRpcError, Refused, and Untrue if the call succeeded without an answer.
    """
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, Any] = node.connected.unary_unary(path)
    try:
        answer = await call(request, timeout=timeout)
    except grpc.aio.AioRpcError as error:
        require_node_error(node, error)
        raise
    except grpc.aio.UsageError:  # raised if the channel is closed
        raise unavailable(f"node {node.name} left the cluster") from None
    if not isinstance(answer, bytes):
        # grpcio returns None for trailers with the status OK and no message before them.
        raise Untrue("the answer", answer, "it has no message")
    return answer


class Nodes:
    """All nodes of the cluster, used by one event loop."""

    def __init__(self, driver_name: str, connect: Connect, record: Record | None = None) -> None:
        self._driver_name, self._connect = driver_name, connect
        self._record = record or Record()
        self._nodes: dict[str, Node] = {}
        # The names of the nodes that claim a volume group, by the start of the group's UUID.
        self._claims: dict[str, set[str]] = {}
        # The nodes that ceased to claim a volume group, each with the time at which it did so on
        # the clock of the Record, by the start of the group's UUID. PersistentVolumes that were
        # made since the last read may name these nodes.
        self._former_claimants: dict[str, dict[str, float]] = {}
        # A cache: the set of all members of the cluster, and the sorted names of those that have
        # reported no volume groups. Each check of a claim needs these names. None if a node may
        # have reported since.
        self._unreported_members: tuple[frozenset[str], Sequence[str]] | None = None
        # The last error that was logged about a volume group of several nodes, by the start of its
        # UUID.
        self._logged: dict[str, str] = {}
        self._limit = asyncio.Semaphore(_AT_ONCE)
        self._questions = Questions("owners", _QUESTION_SECONDS)
        self._tasks: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Node]:
        """The nodes in the order of their names.

        A scrape of metrics calls this from its own thread.
        """
        return iter([node for _, node in sorted(self._nodes.items())])

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, name: str) -> Node | None:
        """The node of that name; None if the cluster has no such node."""
        return self._nodes.get(name)

    def set(self, serving: Mapping[str, Serving]) -> None:
        """Make the nodes in `serving` the nodes of the cluster.

        A node that moved to another address keeps its volume groups until it reports that it has
        them no more. A node whose Node object was deleted and made anew is another machine: it
        starts without groups.
        """
        for name, node in list(self._nodes.items()):
            if name not in serving or serving[name].uid != node.uid:
                self._drop(node)
            elif serving[name].address != node.address:
                node.address = serving[name].address
                # Logged here, not at enrolment: a node may enrol at thousands of addresses, of
                # which only the last one is taken over.
                _log.info("node %s serves at %s", name, node.address or "no known address")
                node.problem, node.asked_seconds = _NOT_ASKED, 0.0
                self._replace_channel(node)
        for name, member in serving.items():
            if name not in self._nodes:
                channel = self._channel(name, member.address)
                self._nodes[name] = Node(name, member.address, channel, member.uid)
                if member.address:
                    _log.info("node %s serves at %s", name, member.address)

    def reconnect(self) -> None:
        """Replace the connections to all nodes, as after a change of certificates.

        Calls in flight end on their old connections.
        """
        for node in self:
            self._replace_channel(node)

    def _replace_channel(self, node: Node) -> None:
        old_channel, node.channel = node.channel, self._channel(node.name, node.address)
        if old_channel is not None:
            self._later(old_channel.close(_GRACE_SECONDS))

    def _channel(self, name: str, address: str) -> grpc.aio.Channel | None:
        return self._connect(name, address) if address else None

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background.

        A reference to its task is kept until the task ends, against garbage collection.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Close all connections, and send no more requests to the API server."""
        self._questions.stop()
        for node in self:
            await node.close()

    def ask_due(self) -> None:
        """Call GetPluginInfo of each node whose time has come, without waiting for the answers."""
        for node in self:
            if node.address and node.is_due:
                self.ask(node)

    def ask(self, node: Node) -> "asyncio.Future[None]":
        """Ask a node for its volume groups (GetPluginInfo).

        One such call per node is in flight at a time, and all callers wait for its answer. A caller
        that is cancelled stops waiting, and the call goes on for the other callers.
        """
        if node.asking is None or node.asking.done():
            node.asking = asyncio.get_running_loop().create_task(self._ask(node))
        return asyncio.shield(node.asking)

    async def ask_anew(self, node: Node) -> None:
        """Ask a node for its volume groups, by a GetPluginInfo call that begins after this call."""
        if node.is_being_asked:
            await self.ask(node)
        await self.ask(node)

    async def owner(self, identity: str, field_name: str) -> Node:
        """Return the node of the volume or snapshot that an id names.

        `field_name` is the request's field with the id, for errors.

        Raises Refused for an empty id, if no node has the volume group, or if its node does not
        answer; Gone for a text that is no id; Forgotten if the node was deleted.
        """
        volume_id = VolumeId.parse(identity)
        if volume_id is None:
            # The call is refused here and not passed on to any node, because the request may
            # contain another node's secrets.
            raise _not_an_id(identity, field_name)
        node = self._agreed(volume_id.group_uuid)
        if node is None:
            if self._should_ask_again(volume_id.group_uuid):
                await self._ask_all()
            try:
                node = await self._owner(volume_id, field_name)
            except NoOwner as error:
                await self._require_not_forgotten(volume_id, str(error))
                raise
        node.require_answering()
        return node

    def _agreed(self, uuid: str) -> Node | None:
        """The node that everything in a volume group belongs to; None if no node is certain."""
        claimants = self._claims.get(uuid, ())
        node = self._nodes[next(iter(claimants))] if len(claimants) == 1 else None
        return node if node is not None and self._is_settled(node, uuid) else None

    def _is_settled(self, node: Node, uuid: str) -> bool:
        """Return whether a node's claim to a volume group is settled: the whole group is its own.

        No other node may claim the group, and PersistentVolumes may name no other node, not even a
        deleted one. A settled claim stays settled for as long as these two conditions hold, also if
        members join that have reported no groups.
        """
        if self._holders(uuid) != {node.name} or self._record.names_deleted(uuid):
            return False
        if uuid not in node.settled and not self._unsettled(node, uuid, self._unreported(node)):
            node.settled.add(uuid)
        return uuid in node.settled

    def _unsettled(self, node: Node, uuid: str, unreported: Sequence[str]) -> str:
        """Return why the only claim to a volume group does not count yet; empty if it counts.

        `unreported` are the members that have reported no groups, and may have this one. If
        PersistentVolumes must be read first, the Record is asked to read them.
        """
        is_named = node.name in self._record.nodes_of(uuid)
        if not is_named and not self._record.is_newer(node.claimed.get(uuid, 0.0)):
            self._record.request_early_refresh()
            return "PersistentVolumes, which may name another, are being read"
        if unreported:
            return (
                f"it may be that of {_several(unreported)}, without any report of its groups to"
                " this controller. Start Carver there, or delete its Node if it will not come back"
            )
        return ""

    def _unreported(self, node: Node) -> Sequence[str]:
        """The other members of the cluster that have reported no volume groups to this controller.

        Each such member may have any volume group.
        """
        members = self._record.members
        if self._unreported_members is None or self._unreported_members[0] is not members:
            reported = (name for name, member in self._nodes.items() if member.has_reported)
            self._unreported_members = members, sorted(members.difference(reported))
        return [name for name in self._unreported_members[1] if name != node.name]

    def _new_unreported_members(self, node: Node) -> Sequence[str]:
        """The other members that joined less than two minutes ago and reported no volume groups.

        Members that PersistentVolumes name for some group are left out: at a controller's start
        they would otherwise delay volumes on nodes whose groups are new.
        """
        unreported = (name for name in self._unreported(node) if name not in self._record.named)
        return [name for name in unreported if self.is_new(name)]

    def _should_ask_again(self, uuid: str) -> bool:
        """Return whether to ask all nodes for a volume group again before a call is refused.

        True if no node claims the group and PersistentVolumes name none for it; or if a node that
        PersistentVolumes name answers, and does not claim the group.
        """
        named_nodes, claimants = self._named(uuid), self._claims.get(uuid, set())
        if not named_nodes:
            return not claimants
        return any(not self._nodes[name].problem for name in named_nodes - claimants)

    async def _owner(self, volume_id: VolumeId, field_name: str) -> Node:
        """Return the node of the volume or snapshot that an id names.

        Raises Refused where the node is not certain.

        1. If a node's claim to the volume group is settled, return that node.
        2. Read the PersistentVolume of the volume; for a snapshot, the PersistentVolume of its
           volume. The node that this PersistentVolume names is the id's node.
        3. If there is no such PersistentVolume, no node claims the group, and the group's other
           PersistentVolumes name one node, that is the id's node.
        4. If there is no such PersistentVolume, and no PersistentVolume of the group names a
           deleted node, return the only node that can have the group.
        5. If the id's node was deleted, raise NoOwner.
        6. If the id's node claims the group, or does not answer, return that node.
        7. Otherwise the id's node reports that it does not have the group. Raise NoOwner; or
           Refused if the group may be on a disk that the node has not scanned, or on another node.
        """
        uuid = volume_id.group_uuid
        if (settled_owner := self._agreed(uuid)) is not None:
            return settled_owner
        owner_name = await self._asked(self._record.node_of, volume_id)
        # Read again: nodes may have joined or left during the look-up.
        named_nodes, claimants = self._named(uuid), self._claims.get(uuid, set())
        self._record.doubt()
        if owner_name is None and not claimants and len(named_nodes) == 1:
            [owner_name] = named_nodes
        if owner_name is None and not self._record.names_deleted(uuid):
            return self._only_holder(volume_id, field_name)
        if not owner_name:
            raise NoOwner(self._deleted(volume_id, field_name))
        if (node := self._nodes.get(owner_name)) is None:
            raise unavailable(
                f"{field_name}: node {owner_name}, which has {volume_id}, is not known yet"
            )
        if owner_name in claimants or node.problem:
            return node
        if node.is_whole is False:
            raise unavailable(
                f"{field_name}: node {owner_name} has not looked at all its disks by its last look,"
                f" and volume group {volume_id.group} ({uuid}) may be on one: see Carver's log"
                " there"
            )
        if claimants:
            raise unavailable(f"{field_name}: {self._dispute(volume_id.group, uuid)}")
        raise NoOwner(self._unknown(volume_id, field_name))

    def _only_holder(self, volume_id: VolumeId, field_name: str) -> Node:
        """Return the only node that can have the volume group of an id.

        The method is for ids that no PersistentVolume names.

        Raises Refused where another node may have the group, too.
        """
        uuid = volume_id.group_uuid
        named_nodes, claimants = self._named(uuid), self._claims.get(uuid, set())
        if not named_nodes and not claimants:
            raise NoOwner(self._unknown(volume_id, field_name))
        is_possible = len(claimants) == 1 and (not named_nodes or claimants <= named_nodes)
        if not is_possible or not all(
            self._nodes[name].has_all_named for name in named_nodes - claimants
        ):
            raise unavailable(f"{field_name}: {self._dispute(volume_id.group, uuid)}")
        node = self._nodes[next(iter(claimants))]
        if self._unsettled(node, uuid, unreported := self._unreported(node)):
            raise unavailable(f"{field_name}: {self._unproved(node, uuid, unreported)}")
        return node

    def _unproved(self, node: Node, uuid: str, unreported: Sequence[str]) -> str:
        """Return the error text for a volume group whose only claim does not count yet.

        `unreported` are the members of the cluster that may have the group, too.
        """
        return (
            f"node {node.name} alone claims volume group {node.groups[uuid]} ({uuid}), and that"
            " does not count yet for what has no PersistentVolume of its own:"
            f" {self._unsettled(node, uuid, unreported)}"
        )

    def _deleted(self, volume_id: VolumeId, field_name: str) -> str:
        """Return the error text for an id whose PersistentVolume names a node that was deleted."""
        claimants = sorted(self._claims.get(volume_id.group_uuid, ()))
        if not claimants:
            return self._unknown(volume_id, field_name)
        return (
            f"{field_name}: the node that PersistentVolumes name for {volume_id} was deleted, and"
            f" its volume group is on node {' and '.join(claimants)} by now: write its"
            " PersistentVolumes anew (docs/operations.md, Move a group to another node)"
        )

    def _named(self, uuid: str) -> frozenset[str]:
        """The nodes of the cluster that PersistentVolumes of a volume group name, or may name.

        Nodes that ceased to claim the group after PersistentVolumes were last read may be named by
        new ones. A scrape of metrics calls this from its own thread, so nothing may be changed
        here.
        """
        named_nodes = self._record.nodes_of(uuid)
        if former := self._former_claimants.get(uuid):
            former_nodes = tuple(former.items())
            named_nodes = named_nodes.union(
                name for name, moment in former_nodes if not self._record.is_newer(moment)
            )
        return frozenset(name for name in named_nodes if name in self._nodes)

    def _holders(self, uuid: str) -> frozenset[str]:
        """The nodes that a volume group may be on.

        These are the nodes that claim the group, and those that PersistentVolumes name, or may
        name.
        """
        return self._named(uuid).union(self._claims.get(uuid, ()))

    def _lasting_holders(self, uuid: str) -> frozenset[str]:
        """The nodes that a volume group may be on, by the last read of PersistentVolumes.

        These are the nodes that claim the group, and those that PersistentVolumes name. Nodes that
        PersistentVolumes only may name, as they had the group until lately, are left out.
        """
        named_nodes = self._record.nodes_of(uuid) & self._nodes.keys()
        return named_nodes.union(self._claims.get(uuid, ()))

    def conflict(self, node: Node, *, is_lasting: bool = False) -> str:
        """Return the error text for those of a node's volume groups that others may have; or empty.

        With `is_lasting`, conflicts are left out that may end once PersistentVolumes are read
        again.
        """
        holders = self._lasting_holders if is_lasting else self._holders
        disputed_groups = [
            (uuid, group) for uuid, group in sorted(node.groups.items()) if len(holders(uuid)) > 1
        ]
        return "; ".join(
            self._dispute(group, uuid) for uuid, group in disputed_groups[:_MOST_NAMED]
        )

    def why_no_new_volumes(self, node: Node) -> str:
        """Return why no new volume may be made on a node; empty if one may be made.

        There are two reasons:

        1. Another node may have one of the node's volume groups. All of the node's groups count,
           since only the node knows which group a StorageClass uses.
        2. A member that joined a moment ago may still report the node's groups as its own. A member
           that stays silent is not waited for: if both nodes have the same group, PersistentVolumes
           name the node that has volumes in it.
        """
        if problem := self.conflict(node):
            return problem
        if self._has_own(node) or not (unreported := self._new_unreported_members(node)):
            return ""
        return self._unproved(node, min(node.groups), unreported)

    def has_no_capacity(self, node: Node) -> bool:
        """Return whether a node's capacity is 0 because no new volume may be made on it.

        Raises Refused where the reason may be over in a moment: the external-provisioner retries an
        error at once, but keeps a capacity of 0 for minutes.
        """
        problem = self.why_no_new_volumes(node)
        if problem and self._is_transient(node):
            raise unavailable(problem)
        return bool(problem)

    def _is_transient(self, node: Node) -> bool:
        """Return whether the reason that forbids new volumes on a node may be over in a moment.

        True if PersistentVolumes, once they are read again, may end the conflict; or if members
        that joined a moment ago have not reported their volume groups.
        """
        if self.conflict(node):
            return not self.conflict(node, is_lasting=True)
        return bool(self._new_unreported_members(node))

    def is_new(self, name: str) -> bool:
        """Return whether a member joined less than two minutes ago.

        True also for a member that is not in this list of nodes yet.
        """
        node = self._nodes.get(name)
        return node is None or time.monotonic() - node.joined_seconds < _COMING_SECONDS

    def require_own(self, node: Node) -> None:
        """Raise Refused for a node that has volume groups, but none that counts as its own yet."""
        if not self._has_own(node):
            raise unavailable(
                self._unproved(node, min(node.groups), self._new_unreported_members(node))
            )

    def _has_own(self, node: Node) -> bool:
        return not node.groups or any(self._is_own(node, uuid) for uuid in node.groups)

    def contested(self, node: Node) -> int:
        """The number of a node's volume groups that other nodes may have, too."""
        return sum(len(self._holders(uuid)) > 1 for uuid in node.groups)

    def _dispute(self, group: str, uuid: str) -> str:
        """Return the error text for a volume group that several nodes may have, with its remedy."""
        named_nodes, claimants = sorted(self._named(uuid)), sorted(self._claims.get(uuid, ()))
        text = f"PersistentVolumes name {' and '.join(named_nodes) or 'none of them'}"
        if len(claimants) < 2:
            return (
                f"volume group {group} ({uuid}) is on node {' and '.join(claimants) or 'none'}, but"
                f" {text}, where it is not known to be, and no volume is made in it: attach its"
                " disks where they were, or write its PersistentVolumes anew (docs/operations.md,"
                " Move a group to another node)"
            )
        return (
            f"nodes {' and '.join(claimants)} both claim volume group {group} ({uuid}), {text}, and"
            " no volume is made on any of these nodes: one has a copy, as of a machine template"
            " or a restored disk. Find out which, and give the copy another UUID (vgchange"
            " --uuid, or vgimportclone); change nothing on a node that PersistentVolumes name"
            " (docs/operations.md, Machine templates and restored disks)"
        )

    def require_undisputed(self, volume_id: VolumeId, subject: str) -> None:
        """Raise Refused for an id whose volume group several nodes may have.

        Refused is raised also if only one node claims the group, and the claim does not count yet.
        """
        holders = self._holders(uuid := volume_id.group_uuid)
        if len(holders) > 1:
            raise unavailable(f"{subject}: {self._dispute(volume_id.group, uuid)}")
        for holder in map(self._nodes.__getitem__, holders):
            if uuid in holder.groups and not self._is_own(holder, uuid):
                raise unavailable(
                    f"{subject}:"
                    f" {self._unproved(holder, uuid, self._new_unreported_members(holder))}"
                )

    def require_elsewhere(self, node: Node, identity: VolumeId, subject: str) -> None:
        """Raise Refused unless another node than `node` has the volume group of an id as its own.

        That is required where `node` leaves out a volume that the other node must list.
        """
        uuid = identity.group_uuid
        other_nodes = [
            self._nodes[name] for name in self._claims.get(uuid, ()) if name != node.name
        ]
        if not any(self._is_own(other_node, uuid) for other_node in other_nodes):
            self.require_undisputed(identity, subject)
            raise unavailable(f"{subject}: {self._dispute(identity.group, uuid)}")

    def places(self, node: Node) -> frozenset[str]:
        """The volume groups that are a node's own, as volume ids name them: `group@uuid`."""
        return frozenset(
            f"{group}@{uuid}" for uuid, group in node.groups.items() if self._is_own(node, uuid)
        )

    def _is_own(self, node: Node, uuid: str) -> bool:
        """Return whether a volume group is a node's own, for new volumes and in the node's lists.

        Either PersistentVolumes name that node. Or they name no node, only this node claims the
        group, and no new member is expected to report that group. A node that PersistentVolumes
        only may name, as it had the group until lately, does not have the group as its own.
        """
        named_nodes = self._record.nodes_of(uuid) & self._nodes.keys()
        if named_nodes:
            return node.name in named_nodes
        return self._is_settled(node, uuid) or (
            self._holders(uuid) == {node.name}
            and not self._unsettled(node, uuid, self._new_unreported_members(node))
        )

    async def moved_on(self, node: Node, identity: str, field_name: str) -> Node | None:
        """Return the other node that now has an id's volume group; None if `node` may have it.

        `node` is asked again first. Raises NoOwner if neither `node` nor another node has the
        group, and Refused where that is not certain.
        """
        volume_id = VolumeId.parse(identity)
        if volume_id is None:
            return None
        await self.ask(node)
        if node.may_have_more or volume_id.group_uuid in node.groups:
            return None
        await self._ask_all(fresh_seconds=0)
        owner = await self._owner(volume_id, field_name)
        return owner if owner is not node else None

    def is_elsewhere(self, node: Node, identity: VolumeId) -> bool:
        """Return whether what an id names belongs, or may belong, to another node than `node`.

        False if no node has the id's volume group. If PersistentVolumes of two nodes name the
        group, each volume belongs to the node that its own PersistentVolume names.
        """
        uuid = identity.group_uuid
        if bool(self._holders(uuid)) and not self._is_own(node, uuid):
            return True
        return self.is_anothers(node, identity)

    def is_anothers(self, node: Node, identity: VolumeId) -> bool:
        """Return whether a volume's own PersistentVolume, as last read, named another node."""
        return self._record.names_another(identity, node.name)

    def is_possible_holder(self, node: Node, identity: VolumeId) -> bool:
        """Return whether a node may have the volume group of an id.

        True if the node claims the group, or PersistentVolumes name, or may name, the node for the
        group.
        """
        return node.name in self._holders(identity.group_uuid)

    async def _require_not_forgotten(self, volume_id: VolumeId, problem: str) -> None:
        """Raise Forgotten if an id's node was deleted from the cluster.

        Raises Refused while that is not certain.

        Forgotten is raised once all of these hold:

        1. A PersistentVolume names a node that has had no Node object for the grace period.
        2. All members answer, and have scanned all their disks.
        3. No member claims the volume group, or claimed it until a moment ago.

        `problem` is why the id has no owner, for the error. If no node is known to be deleted,
        nothing is raised.
        """
        if not self._record.forgets:
            return
        deleted = await self._asked(self._record.deleted, volume_id, problem)
        if deleted is None:
            return
        # The record's members include those that are not in this list of nodes yet.
        members = self._record.members.union(self._nodes)
        unsure_nodes = sorted(
            name
            for name in members
            if (member := self._nodes.get(name)) is None or not member.has_all_named
        )
        if unsure_nodes:
            raise unavailable(
                f"node {deleted.segment} was deleted, but {volume_id} may be on another node by now"
                f"{self._why_unsure(unsure_nodes)}; that it is gone is believed once all nodes"
                " answer"
            )
        uuid = volume_id.group_uuid
        former = self._former_claimants.get(uuid, {})
        if self._claims.get(uuid):
            raise unavailable(problem)
        if not all(map(self._record.is_newer, former.values())):
            self._record.request_early_refresh()
            raise unavailable(
                f"node {deleted.segment} was deleted, but volume group {volume_id.group} ({uuid})"
                f" was on another node until a moment ago: {_several(sorted(former))}"
            )
        if deleted.seconds:
            raise unavailable(
                f"node {deleted.segment} was deleted, and {volume_id} with it: that is believed in"
                f" {deleted.seconds:.0f} s, unless the node comes back"
            )
        raise Forgotten(f"{volume_id} is forgotten: its node {deleted.segment} was deleted")

    async def require_no_snapshots(self, identity: str) -> None:
        """Raise Refused if snapshots still need the PersistentVolume of a forgotten volume.

        Snapshots are deleted before their volume, as on a node that exists: the PersistentVolume is
        the only proof that the snapshots, too, were on the node that was deleted.
        """
        volume_id = VolumeId.parse(identity)
        if volume_id is None:
            return
        contents = await self._asked(self._record.snapshots_of, volume_id)
        if contents:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"cannot forget {identity} yet: its node was deleted, and it goes after its"
                f" snapshots, of which these VolumeSnapshotContents are left: {_several(contents)}",
            )

    async def _asked(
        self, question: Callable[[VolumeId, float], T], identity: VolumeId, problem: str = ""
    ) -> T:
        """Ask the API server about an id; one question per volume group is in flight at a time.

        Raises Refused if the API server does not answer. `problem` is put before that error.
        """
        prefix = f"{problem}; and " if problem else ""
        key, call_start = f"volume group {identity.group_uuid}", self._record.now()
        try:
            return await self._questions.ask(key, question, identity, call_start)
        except NotInTime as error:
            raise unavailable(f"{prefix}cannot look up {identity}: {error}; ask again") from None
        except (errors.ClusterRefused, errors.ClusterSilent) as error:
            raise unavailable(f"{prefix}the API server does not answer: {error}") from None
        except WrongSource as error:
            raise unavailable(f"{prefix}cannot look up {identity}: {error}") from None

    def of_segments(self, segments: Mapping[str, str]) -> Node:
        """The node with these topology segments. Raises Refused if no such node answers."""
        for node in self._nodes.values():
            if node.segments and segments.items() <= node.segments.items():
                node.require_answering()
                return node
        silent_nodes = [node.name for node in self if not node.segments]
        raise unavailable(
            f"no node says that its topology is {dict(segments)}{_not_asked(silent_nodes)}"
        )

    def answering(self) -> Sequence[Node]:
        """The nodes that answered their last GetPluginInfo call."""
        return [node for node in self if not node.problem]

    def require_asked(self) -> None:
        """Raise Refused while members of the cluster that joined a moment ago have never answered.

        At a controller's start these are all nodes; an earlier controller may have begun to make a
        volume on any of them.
        """
        silent_nodes = [
            node.name for node in self if not node.answered_seconds and self.is_new(node.name)
        ]
        if silent_nodes:
            raise unavailable(
                f"not all nodes have answered this controller{_not_asked(silent_nodes)}"
            )

    def require_all(self) -> Sequence[Node]:
        """All nodes. Raises Refused if one of them does not answer."""
        for node in self:
            node.require_answering()
        return list(self)

    async def _ask_all(self, fresh_seconds: float = _FRESH_SECONDS) -> None:
        """Ask all nodes for their volume groups, unless asked less than `fresh_seconds` ago."""
        since = time.monotonic() - fresh_seconds
        reachable_nodes = [node for node in self if node.address]
        due_nodes = [
            node for node in reachable_nodes if node.is_being_asked or node.asked_seconds <= since
        ]
        # The exceptions are ignored: a GetPluginInfo call is cancelled if its node leaves the
        # cluster, and the answers of the other nodes count.
        await asyncio.gather(*map(self.ask, due_nodes), return_exceptions=True)

    async def _ask(self, node: Node) -> None:
        try:
            async with self._limit:
                node.asked_seconds = time.monotonic()
                address = node.address
                answer = await unary(node, _INFO, b"", _PATIENCE_SECONDS)
                if len(answer) > _MOST_BYTES:
                    raise unavailable(f"it says more of itself than {_MOST_BYTES} bytes")
                report = csi.GetPluginInfoResponse.FromString(answer)
            if self._nodes.get(node.name) is not node:
                raise unavailable(f"node {node.name} left the cluster")
            if node.address != address:
                raise unavailable(_NOT_ASKED)
            self._believe(node, report)
        except Exception as error:
            problem = problem_of(error)
        else:
            node.answered_seconds = time.monotonic()
            problem = ""
        problem = _printable(problem)
        if bool(problem) != bool(node.problem) or (problem and node.problem == _NOT_ASKED):
            _log.warning("node %s %s", node.name, problem or "answers")
        node.problem = problem

    def _believe(self, node: Node, report: csi.GetPluginInfoResponse) -> None:
        """Take over a node's answer to GetPluginInfo. Raises ValueError if it cannot be true."""
        manifest = report.manifest
        name = manifest.get(routes.NODE_ID)
        node.version = _printable(report.vendor_version)
        if report.name == self._driver_name and name is None:
            raise ValueError(
                f"its Carver {node.version} is of a version without the controller's part:"
                " update it"
            )
        if (report.name, name) != (self._driver_name, node.name):
            raise ValueError(
                f"it is node {name!r} of driver {report.name!r}, not {node.name!r}"
                f" of {self._driver_name!r}"
            )
        segments, groups = (_texts(manifest, key) for key in (routes.SEGMENTS, routes.GROUPS))
        if segments != (expected := ids.topology(node.name, self._driver_name)):
            raise ValueError(f"its topology is {str(segments)[:_MOST_SHOWN]!r}, not {expected}")
        for uuid, group in groups.items():
            if VolumeId.parse(f"{group}@{uuid}/any") is None:
                raise ValueError(f"{f'{group}@{uuid}'[:_MOST_SHOWN]!r} is no volume group")
        # An older version of Carver does not report whether these are all its volume groups.
        whole_text = manifest.get(routes.IS_WHOLE)
        is_whole = None if whole_text is None else whole_text == routes.YES
        if is_whole is False:
            # Volume groups that the node named before may be on disks that it has not scanned.
            groups = {**node.groups, **groups}
        if len(groups) > _MOST_GROUPS:
            raise ValueError(f"it has more than {_MOST_GROUPS} volume groups")
        # A node that scanned its disks, and found one that it cannot read, has reported all that it
        # can.
        has_reported = node.has_reported or whole_text != ""
        if has_reported != node.has_reported:
            node.has_reported, self._unreported_members = has_reported, None
        node.is_whole = is_whole
        lost_groups = node.groups.keys() - groups.keys()
        if lost_groups:
            self._forget_former()
        for uuid in lost_groups:
            self._give_up(node, uuid)
            node.claimed.pop(uuid, None)
            node.settled.discard(uuid)
            self._former_claimants.setdefault(uuid, {})[node.name] = self._record.now()
            self._record.doubt()
        node.segments, node.groups = segments, groups
        node.is_watched = manifest.get(routes.IS_WATCHED) == routes.YES
        for uuid in groups:
            if uuid not in node.claimed:
                node.claimed[uuid] = self._record.now()
                if not self._record.nodes_of(uuid):
                    # PersistentVolumes of the volume group may have been made since
                    # PersistentVolumes were last read.
                    self._record.request_early_refresh()
            self._claims.setdefault(uuid, set()).add(node.name)
            # The node claims the volume group again, so it is no longer one that ceased to claim
            # it.
            self._former_claimants.get(uuid, {}).pop(node.name, None)
            self._note_conflict(uuid, groups[uuid])
            self._is_settled(node, uuid)

    def _note_conflict(self, uuid: str, group: str) -> None:
        """Log once that several nodes may have a volume group, if that is likely to last."""
        if len(self._holders(uuid)) < 2:
            self._logged.pop(uuid, None)
            return
        self._record.doubt()
        problem = self._dispute(group, uuid)
        if len(self._lasting_holders(uuid)) > 1 and self._logged.get(uuid) != problem:
            self._logged[uuid] = problem
            _log.error("%s", problem)

    def _give_up(self, node: Node, uuid: str) -> None:
        """Remove a node's claim to a volume group."""
        claimants = self._claims.get(uuid, set())
        claimants.discard(node.name)
        if not claimants:
            self._claims.pop(uuid, None)
            self._logged.pop(uuid, None)

    def _forget_former(self) -> None:
        """Forget claims to volume groups that ended before PersistentVolumes were last read."""
        for uuid, former in list(self._former_claimants.items()):
            for name, moment in list(former.items()):
                if self._record.is_newer(moment):
                    del former[name]
            if not former:
                del self._former_claimants[uuid]

    def _drop(self, node: Node) -> None:
        del self._nodes[node.name]
        self._unreported_members = None
        for uuid in node.groups:
            self._give_up(node, uuid)
        self._later(node.close())

    def _unknown(self, volume_id: VolumeId, field_name: str) -> str:
        unsure_nodes = [node.name for node in self if node.may_have_more]
        return (
            f"{field_name}: no node that answers has volume group {volume_id.group}"
            f" ({volume_id.group_uuid}){self._why_unsure(unsure_nodes)}. Start Carver on its node,"
            " or attach its disks to one"
        )

    def _why_unsure(self, unsure_nodes: Sequence[str]) -> str:
        """Return the names of nodes that may have volume groups they did not name, and why."""
        scanning_nodes = [
            name for name in unsure_nodes if (node := self._nodes.get(name)) and not node.problem
        ]
        silent_text = _not_asked([name for name in unsure_nodes if name not in scanning_nodes])
        if not scanning_nodes:
            return silent_text
        return (
            f"{silent_text}; nodes that have not looked at all their disks:"
            f" {_several(scanning_nodes)}"
        )


def _not_an_id(identity: str, field_name: str) -> Refused:
    """Return the error for a text that is no volume id; a node would answer the same."""
    if not identity:
        return Refused(grpc.StatusCode.INVALID_ARGUMENT, f"{field_name}: is required")
    return Gone(f"{field_name}: there is no volume or snapshot {identity[:_MOST_SHOWN]!r}")


def _texts(manifest: Mapping[str, str], key: str) -> Mapping[str, str]:
    """Parse a JSON object whose values are texts. Raises ValueError, RecursionError."""
    text = manifest.get(key, "")
    if len(text) > _MOST_MANIFEST:
        raise ValueError(f"its {key} is longer than {_MOST_MANIFEST} characters")
    texts = json.loads(text)
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ValueError(f"{text[:100]!r} is no JSON object of texts")
    return texts


def _printable(text: str) -> str:
    """Return the start of a node's text for logs and terminals, spaces for control characters."""
    return "".join(character if character.isprintable() else " " for character in text[:_MOST_TEXT])


def _not_asked(silent_nodes: Sequence[str]) -> str:
    return f"; nodes that do not answer: {_several(silent_nodes)}" if silent_nodes else ""


def _several(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
