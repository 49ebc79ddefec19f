"""The nodes of the cluster in the controller's memory: their connections and their volume groups.

Nothing is kept on disk: a controller that starts asks each node again for its volume groups
(GetPluginInfo). The terms of this module:

- A *member* is a node that belongs to the cluster (membership.py), whether it answers or not.
- A node *claims* the volume groups that it named in its last answer to GetPluginInfo, for as long
  as the node is a member. While a node may have further groups on its disks, it also claims the
  groups that it named in earlier answers.
- PersistentVolumes *name* nodes for a volume group, by their node affinity (membership.py).
- A node's claim to a volume group becomes *settled* once no other node claims the group, the
  PersistentVolumes name no other node for the group, and each other member has reported its groups
  to this controller. Members that join later do not unsettle the claim.
- A *conflict* is a volume group that several nodes claim or are named for.

If a claim is settled, everything in the volume group belongs to that node. Otherwise, for each call
about an existing volume or snapshot, the PersistentVolume of that volume is read and decides which
node is called. So the order of events does not matter.

No new volume is made on a node that shares a volume group with another node. While a new member has
reported no groups, new volumes wait two minutes for its report, and no longer: one broken node does
not prevent new volumes on the other nodes.
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
# Seconds between two GetPluginInfo calls to a node that answers and has named all its volume
# groups; and to any other node.
_INTERVAL_SECONDS, _SILENT_INTERVAL_SECONDS = 60.0, 5.0
# Time limit, in seconds, of a GetPluginInfo call, which asks a node for its volume groups.
_PATIENCE_SECONDS = 3.0
# Seconds since the last GetPluginInfo call to a node for which the node is not asked again, if a
# volume group is searched for on all nodes.
_FRESH_SECONDS = 10.0
# Maximum number of GetPluginInfo calls at the same time.
_AT_ONCE = 64
# Maximum number of names, and of volume groups, in an error message.
_MOST_NAMED = 5
# Time limit, in seconds, of one look-up of an id at the API server. The limit is longer than the
# time limit of a CSI call: when the call is repeated, it uses the PersistentVolumes that were read
# for the first call.
_QUESTION_SECONDS = 120.0
# Maximum numbers of characters: of an impossible value in an error; of a node's version and errors;
# of a node's topology, and of its volume groups, as JSON.
_MOST_SHOWN, _MOST_TEXT, _MOST_MANIFEST = 100, 1000, 1 << 16
# Maximum size, in bytes, of a node's answer to GetPluginInfo. A larger answer is not even parsed.
_MOST_BYTES = 4 * _MOST_MANIFEST
# Maximum number of volume groups of a node.
_MOST_GROUPS = 200
# Time, in seconds, for which a member of the cluster counts as new. New volumes wait for so long
# for the member to report its volume groups.
_COMING_SECONDS = 120.0
_NOT_ASKED = "it has not been asked yet"
# Time limit, in seconds, of the calls in flight on a connection that is replaced. The limit is long
# because a stream may last for hours.
_GRACE_SECONDS = 24 * 3600.0
# Type of a function that makes a channel to a node, by the node's name and address.
Connect = Callable[[str, str], grpc.aio.Channel]


def read(path: Path) -> Mapping[str, str]:
    """Return the addresses of the nodes, by their names, from the table `nodes` of a TOML file.

    Raises BadConfig if the file cannot be read, or if a name or an address is invalid.
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
    """Error with which the controller itself answers a call: a gRPC code and a text."""

    def __init__(self, code: grpc.StatusCode, problem: str) -> None:
        super().__init__(problem)
        self.code = code


class NoOwner(Refused):
    """Error UNAVAILABLE: no node that answers has the volume group of an id, or its node left."""

    def __init__(self, problem: str) -> None:
        super().__init__(grpc.StatusCode.UNAVAILABLE, problem)


class Gone(Refused):
    """Error NOT_FOUND: an id names nothing.

    The text is not a valid id, or the node of the id was deleted from the cluster.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(grpc.StatusCode.NOT_FOUND, problem)


class Forgotten(Gone):
    """Error NOT_FOUND: the volume of an id was on a node that was deleted from the cluster."""


def unavailable(problem: str) -> Refused:
    """Return the error UNAVAILABLE with this text, after which the caller retries."""
    return Refused(grpc.StatusCode.UNAVAILABLE, problem)


@dataclass
class Node:
    """A node of the cluster: its connection, and its last answer to GetPluginInfo."""

    name: str
    # The node's address, `host:port`, and the channel to it. Until the node has enrolled, the
    # address is empty and the channel None.
    address: str
    channel: grpc.aio.Channel | None = None
    # The UID of the node's Node object; empty without an API server.
    uid: str = ""
    version: str = ""
    segments: Mapping[str, str] = field(default_factory=dict)
    # The names of the node's volume groups, by the start of their UUIDs as in volume ids.
    groups: Mapping[str, str] = field(default_factory=dict)
    # Whether the node named all its volume groups in its last answer. False if the node has not
    # scanned its disks, or if a disk may have a group that the node does not know. None for an
    # older version of Carver, which does not report that.
    is_whole: bool | None = None
    # Whether kubelet on the node asks for the health of volumes, and shows it in the status of the
    # pods that use them.
    is_watched: bool = False
    # Whether the node has reported its volume groups to this controller after a scan of its disks.
    # True also for an older version of Carver, which does not say whether it has scanned them.
    has_reported: bool = False
    # When the node began to claim each of its volume groups, on the clock of the Record, by the
    # start of the group's UUID.
    claimed: dict[str, float] = field(default_factory=dict)
    # The volume groups that certainly belong to the node: those to which it has a settled claim
    # (see the module). Each is the start of the group's UUID.
    settled: set[str] = field(default_factory=set)
    # When the node last answered a GetPluginInfo call, and when such a call was last sent
    # (monotonic, seconds); 0 for never.
    answered_seconds: float = 0.0
    asked_seconds: float = 0.0
    # Why the last GetPluginInfo call failed, or why its answer was refused; empty if neither.
    # Before the first call to the node's address, the text says that the node was not asked yet.
    problem: str = _NOT_ASKED
    # Number of the node's answers that were refused because they cannot be true. Answers to
    # GetPluginInfo are not counted.
    refused_answers: int = 0
    # When the controller learned of the node (monotonic, seconds).
    joined_seconds: float = field(default_factory=lambda: time.monotonic())
    # The task of the last GetPluginInfo call to the node, which may have ended.
    asking: "asyncio.Task[None] | None" = None

    @property
    def connected(self) -> grpc.aio.Channel:
        """The channel to the node. Raises Refused if the node has not enrolled here."""
        if self.channel is None:
            raise unavailable(
                f"node {self.name} has not enrolled at this controller: see Carver's log there"
            )
        return self.channel

    async def close(self, grace_seconds: float | None = None) -> None:
        """Close the connection to the node, and cancel the calls in flight.

        With `grace_seconds`, the calls in flight may go on for that time.
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
        """Whether the next GetPluginInfo call to the node is due."""
        interval = _SILENT_INTERVAL_SECONDS if self.may_have_more else _INTERVAL_SECONDS
        return not self.asked_seconds or time.monotonic() - self.asked_seconds >= interval

    @property
    def may_have_more(self) -> bool:
        """Whether the node may have volume groups that it did not name.

        True if the node does not answer, or reports that it does not know all its volume groups.
        """
        return bool(self.problem) or self.is_whole is False

    @property
    def has_all_named(self) -> bool:
        """Whether the node answers, and reports that it named all its volume groups.

        False for an older version of Carver, which does not report that.
        """
        return not self.problem and self.is_whole is True

    @property
    def silent_seconds(self) -> float:
        """Time, in seconds, since the node's last answer to GetPluginInfo; 0 if the node answers.

        If the node has never answered, the time counts from when this controller learned of the
        node.
        """
        if not self.problem:
            return 0.0
        return time.monotonic() - max(self.answered_seconds, self.joined_seconds)

    def require_answering(self) -> None:
        """Raise Refused if the node's last GetPluginInfo call had no answer that was accepted.

        Another call to such a node would usually time out.
        """
        if self.problem and self.connected:
            raise unavailable(
                f"node {self.name} ({self.address}) does not answer: {self.problem}; see Carver's"
                " log there. It is asked again every few seconds"
            )


# Texts in the error that gRPC makes of a message from a node that is too large. The code of that
# error is RESOURCE_EXHAUSTED, after which the external-provisioner would make the volume on another
# node.
_DROPPED = ("larger than max", "metadata size exceeds")


def require_node_error(node: Node, error: grpc.aio.AioRpcError) -> None:
    """Raise Refused if a call failed because gRPC does not accept so large an answer or error.

    The node may have carried out the call, so gRPC's code RESOURCE_EXHAUSTED must not be passed on
    as the node's. Nothing is raised for an error of the node itself.
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
    """Return as text what is wrong with a node, by the error of a call to the node.

    CancelledError is raised again if the caller's own task is being cancelled. Any other error is
    returned as text, so that an error of one node does not end calls to other nodes.
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

    `timeout` is in seconds. Raises AioRpcError if the call fails; Refused if the node has no known
    address, left the cluster, or sent a message that is too large; Untrue if the call succeeded
    without an answer.
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
        # grpcio returns None if the node sent the status OK without a message.
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
        # The nodes that ceased to claim a volume group, with the time at which each did so on the
        # clock of the Record, by the start of the group's UUID. PersistentVolumes that were made
        # since the last read may name these nodes.
        self._former_claimants: dict[str, dict[str, float]] = {}
        # A cache of the sorted names of the members that have reported no volume groups, with the
        # set of all members from which the names follow. Each check of a claim needs these names.
        # None if a node may have reported since.
        self._unreported_members: tuple[frozenset[str], Sequence[str]] | None = None
        # The last error that was logged about a volume group that several nodes may have, by the
        # start of the group's UUID.
        self._logged: dict[str, str] = {}
        self._limit = asyncio.Semaphore(_AT_ONCE)
        self._questions = Questions("owners", _QUESTION_SECONDS)
        self._tasks: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Node]:
        """The nodes in the order of their names.

        A scrape of metrics calls this method from its own thread.
        """
        return iter([node for _, node in sorted(self._nodes.items())])

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, name: str) -> Node | None:
        """The node of that name; None if the cluster has no such node."""
        return self._nodes.get(name)

    def set(self, serving: Mapping[str, Serving]) -> None:
        """Make the nodes in `serving`, by name, the nodes of the cluster.

        Other nodes are dropped, with their claims to volume groups. A node that moved to another
        address keeps its groups until it reports that it does not have them any more. A node whose
        Node object was deleted and made anew is another machine: it starts without groups.
        """
        for name, node in list(self._nodes.items()):
            if name not in serving or serving[name].uid != node.uid:
                self._drop(node)
            elif serving[name].address != node.address:
                node.address = serving[name].address
                # Log the address here, not at enrolment: a node may enrol with thousands of
                # addresses, of which only the last one is taken over.
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

        Calls in flight go on over their old connections, for at most _GRACE_SECONDS.
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
        """Run a coroutine in the background, as a task.

        A reference to the task is kept until the task ends, so that it is not garbage-collected.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Close all connections, and cancel the look-ups at the API server that have not begun."""
        self._questions.stop()
        for node in self:
            await node.close()

    def ask_due(self) -> None:
        """Send GetPluginInfo to each node that is due for it, without waiting for the answers."""
        for node in self:
            if node.address and node.is_due:
                self.ask(node)

    def ask(self, node: Node) -> "asyncio.Future[None]":
        """Ask a node for its volume groups (GetPluginInfo); return a future of the call's end.

        One such call per node is in flight at a time, and all callers wait for the same one. If a
        caller is cancelled, the call goes on for the other callers. Errors of the call are kept in
        `Node.problem`, and not raised.
        """
        if node.asking is None or node.asking.done():
            node.asking = asyncio.get_running_loop().create_task(self._ask(node))
        return asyncio.shield(node.asking)

    async def ask_anew(self, node: Node) -> None:
        """Ask a node for its volume groups by a new GetPluginInfo call, and wait for its end.

        A GetPluginInfo call that is in flight already is waited for first, and does not count.
        """
        if node.is_being_asked:
            await self.ask(node)
        await self.ask(node)

    async def owner(self, identity: str, field_name: str) -> Node:
        """Return the node of the volume or snapshot that an id names.

        `field_name` is the request's field with the id, for errors. If no node has a settled claim
        to the id's volume group, nodes and the API server may be asked first.

        Raises Refused for an empty id, if the id's node is not certain, or if it does not answer;
        NoOwner if no node has the volume group; Gone for a text that is no id; Forgotten if the
        id's node was deleted.
        """
        volume_id = VolumeId.parse(identity)
        if volume_id is None:
            # Refuse the call here, and pass it on to no node: the request may contain secrets of
            # another node's volume.
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
        """The node to which a volume group certainly belongs, by a settled claim; None without one.

        `uuid` is the start of the group's UUID, as in volume ids.
        """
        claimants = self._claims.get(uuid, ())
        node = self._nodes[next(iter(claimants))] if len(claimants) == 1 else None
        return node if node is not None and self._is_settled(node, uuid) else None

    def _is_settled(self, node: Node, uuid: str) -> bool:
        """Return whether a node's claim to a volume group is settled: the whole group is its own.

        No other node may claim the group, and PersistentVolumes may name no other node, not even a
        deleted one. A claim becomes settled once all other members have reported their groups, and
        PersistentVolumes were read since the claim began or name the node. It then stays settled
        for as long as the first two conditions hold, also if members join that have reported no
        groups.
        """
        if self._holders(uuid) != {node.name} or self._record.names_deleted(uuid):
            return False
        if uuid not in node.settled and not self._unsettled(node, uuid, self._unreported(node)):
            node.settled.add(uuid)
        return uuid in node.settled

    def _unsettled(self, node: Node, uuid: str, unreported: Sequence[str]) -> str:
        """Return why it is not certain yet that a volume group is the node's; empty if it is.

        The node claims the group, and no other node does. `unreported` are the members that have
        reported no groups, and may have this group. If PersistentVolumes must be read before the
        claim counts, an early read is requested.
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
        """The members other than `node` that have reported no volume groups to this controller.

        Each such member may have any volume group.
        """
        members = self._record.members
        if self._unreported_members is None or self._unreported_members[0] is not members:
            reported = (name for name, member in self._nodes.items() if member.has_reported)
            self._unreported_members = members, sorted(members.difference(reported))
        return [name for name in self._unreported_members[1] if name != node.name]

    def _new_unreported_members(self, node: Node) -> Sequence[str]:
        """The members other than `node` that joined lately, and have reported no volume groups.

        A member joined lately if this controller learned of it less than two minutes ago. Members
        that any PersistentVolume names are left out: at a controller's start they would otherwise
        delay volumes on nodes whose groups are new.
        """
        unreported = (name for name in self._unreported(node) if name not in self._record.named)
        return [name for name in unreported if self.is_new(name)]

    def _should_ask_again(self, uuid: str) -> bool:
        """Return whether to ask all nodes for their groups before a volume group's node is chosen.

        True if no node claims the volume group and PersistentVolumes name no node for it. True also
        if a node that PersistentVolumes name for the group answers, and does not claim the group.
        """
        named_nodes, claimants = self._named(uuid), self._claims.get(uuid, set())
        if not named_nodes:
            return not claimants
        return any(not self._nodes[name].problem for name in named_nodes - claimants)

    async def _owner(self, volume_id: VolumeId, field_name: str) -> Node:
        """Return the node of the volume or snapshot that an id names.

        Raises Refused if the node is not certain. If no claim is settled, another read of
        PersistentVolumes is requested.

        1. If a node's claim to the volume group is settled, return that node.
        2. Read the PersistentVolume of the volume; for a snapshot, the PersistentVolume of its
           source volume. The node that this PersistentVolume names is the id's node.
        3. If there is no such PersistentVolume, no node claims the group, and the group's other
           PersistentVolumes name one node, that node is the id's.
        4. If the id's node is still not known, and no PersistentVolume of the group names a deleted
           node, return the only node that can have the group (`_only_holder`).
        5. If the id's node was deleted, or is still not known, raise NoOwner. If it is not in the
           list of nodes yet, raise Refused.
        6. If the id's node claims the group, or does not answer, return that node.
        7. Otherwise the id's node reports that it does not have the group. Raise Refused if the
           group may be on a disk that the node has not scanned, or if another node claims it; else
           NoOwner.
        """
        uuid = volume_id.group_uuid
        if (settled_owner := self._agreed(uuid)) is not None:
            return settled_owner
        owner_name = await self._asked(self._record.node_of, volume_id)
        # Compute the nodes after the look-up: nodes may have joined or left while it ran.
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

        The method is for ids of volumes without a PersistentVolume. Raises NoOwner if no node has
        the group, Refused if several nodes may have the group, or if the only node's claim does not
        count yet.
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
        """Return the error text for a volume group whose only claim, of `node`, does not count yet.

        `uuid` is the start of the group's UUID. `unreported` are the members of the cluster that
        may have the group, too.
        """
        return (
            f"node {node.name} alone claims volume group {node.groups[uuid]} ({uuid}), and that"
            " does not count yet for what has no PersistentVolume of its own:"
            f" {self._unsettled(node, uuid, unreported)}"
        )

    def _deleted(self, volume_id: VolumeId, field_name: str) -> str:
        """Return the error text for an id whose PersistentVolumes name a node that was deleted."""
        claimants = sorted(self._claims.get(volume_id.group_uuid, ()))
        if not claimants:
            return self._unknown(volume_id, field_name)
        return (
            f"{field_name}: the node that PersistentVolumes name for {volume_id} was deleted, and"
            f" its volume group is on node {' and '.join(claimants)} by now: write its"
            " PersistentVolumes anew (docs/operations.md, Move a group to another node)"
        )

    def _named(self, uuid: str) -> frozenset[str]:
        """The nodes of the cluster in the node affinity of a volume group's PersistentVolumes.

        PersistentVolumes *name* these nodes. Nodes that they may name are returned, too: a node
        that ceased to claim the group after PersistentVolumes were last read may be named by
        PersistentVolumes that were made since. A scrape of metrics calls this method from its own
        thread, so the method must not change anything.
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

        These are the nodes that claim the group, and the nodes that PersistentVolumes of the group
        name, or may name (`_named`).
        """
        return self._named(uuid).union(self._claims.get(uuid, ()))

    def _lasting_holders(self, uuid: str) -> frozenset[str]:
        """The nodes that a volume group may be on, by the last read of PersistentVolumes.

        These are the nodes that claim the group, and the nodes that PersistentVolumes of the group
        name. Nodes that ceased to claim the group since the last read are left out.
        """
        named_nodes = self._record.nodes_of(uuid) & self._nodes.keys()
        return named_nodes.union(self._claims.get(uuid, ()))

    def conflict(self, node: Node, *, is_lasting: bool = False) -> str:
        """Return the error text for those of a node's volume groups that other nodes may have, too.

        Empty if there is no such group. With `is_lasting`, groups are left out if the next read of
        PersistentVolumes may show that no other node has them.
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
        2. None of the node's groups counts as its own yet, because a member that joined lately may
           still report them. After two minutes that member is not waited for any longer: if both
           nodes have the same group, PersistentVolumes name the node that has volumes in it.
        """
        if problem := self.conflict(node):
            return problem
        if self._has_own(node) or not (unreported := self._new_unreported_members(node)):
            return ""
        return self._unproved(node, min(node.groups), unreported)

    def has_no_capacity(self, node: Node) -> bool:
        """Return whether a node's capacity is 0 because no new volume may be made on it.

        Raises Refused if the reason may soon be over: the external-provisioner retries an error at
        once, but keeps a capacity of 0 for minutes.
        """
        problem = self.why_no_new_volumes(node)
        if problem and self._is_transient(node):
            raise unavailable(problem)
        return bool(problem)

    def _is_transient(self, node: Node) -> bool:
        """Return whether the reason that forbids new volumes on a node may soon be over.

        True if the next read of PersistentVolumes may end the conflict about the node's volume
        groups. Without such a conflict, True if members that joined lately have not reported their
        volume groups.
        """
        if self.conflict(node):
            return not self.conflict(node, is_lasting=True)
        return bool(self._new_unreported_members(node))

    def is_new(self, name: str) -> bool:
        """Return whether this controller learned of a member of the cluster within two minutes.

        True also for a member that is not in this list of nodes yet.
        """
        node = self._nodes.get(name)
        return node is None or time.monotonic() - node.joined_seconds < _COMING_SECONDS

    def require_own(self, node: Node) -> None:
        """Raise Refused if a node has volume groups, and none of them counts as its own yet."""
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
        """Return the error text, with a remedy, for a volume group that several nodes may have."""
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
        """Raise Refused if several nodes may have the volume group of an id.

        Raises Refused also if only one node claims the group, and that claim does not count yet.
        `subject` begins the error's text.
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
        """Raise Refused unless a node other than `node` has the volume group of an id as its own.

        This check is for lists from which a volume was removed that the other node must list.
        `subject` begins the error's text.
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

        If PersistentVolumes, as last read, name nodes of the cluster for the group, it is the own
        group of each of these nodes. Otherwise it is the node's own if no other node claims it or
        may be named for it, and if no member that joined lately may still report it.
        """
        named_nodes = self._record.nodes_of(uuid) & self._nodes.keys()
        if named_nodes:
            return node.name in named_nodes
        return self._is_settled(node, uuid) or (
            self._holders(uuid) == {node.name}
            and not self._unsettled(node, uuid, self._new_unreported_members(node))
        )

    async def moved_on(self, node: Node, identity: str, field_name: str) -> Node | None:
        """Return the node to which an id's volume group has moved from `node`.

        None if `node` still has the group, or may have it. First `node` is asked for its volume
        groups, and if it does not have the group, all nodes are asked. Raises NoOwner if no node
        has the group, Refused if the node is not certain.
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
        """Return whether the volume of an id belongs, or may belong, to another node than `node`.

        False if no node may have the id's volume group. If PersistentVolumes name several nodes for
        the group, each volume belongs to the node that the volume's own PersistentVolume names.
        """
        uuid = identity.group_uuid
        if bool(self._holders(uuid)) and not self._is_own(node, uuid):
            return True
        return self.is_anothers(node, identity)

    def is_anothers(self, node: Node, identity: VolumeId) -> bool:
        """Return whether a volume's PersistentVolume, as last read, named another node than `node`.

        `Record.names_another` says for which volumes that is known.
        """
        return self._record.names_another(identity, node.name)

    def is_possible_holder(self, node: Node, identity: VolumeId) -> bool:
        """Return whether a node may have the volume group of an id.

        True if the node claims the group, or if PersistentVolumes of the group name the node, or
        may name it.
        """
        return node.name in self._holders(identity.group_uuid)

    async def _require_not_forgotten(self, volume_id: VolumeId, problem: str) -> None:
        """Raise Forgotten if the node of an id was deleted from the cluster.

        Nothing is raised if the id's node is not known to be deleted, or if the settings do not let
        volumes of deleted nodes count as deleted. Otherwise Forgotten is raised if all of these
        hold, and Refused if one does not hold:

        1. The node has had no Node object for the grace period.
        2. All members of the cluster answer, and have named all their volume groups.
        3. No member claims the id's volume group, or claimed it since PersistentVolumes were last
           read.

        `problem` says why the id has no node, for the errors.
        """
        if not self._record.forgets:
            return
        deleted = await self._asked(self._record.deleted, volume_id, problem)
        if deleted is None:
            return
        # Include the members that are not in this list of nodes yet.
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
        """Raise Refused if a volume whose node was deleted still has VolumeSnapshotContents.

        Snapshots must be deleted before their volume, as on a node that exists: the volume's
        PersistentVolume is the only proof that the snapshots, too, were on the deleted node.
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
        """Run `question`, a method of the Record that asks the API server about an id, in a thread.

        One question for each volume group runs at a time. Raises Refused if the API server refuses
        or does not answer in time, or if a snapshot's source is no volume. `problem` begins the
        error's text.
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
        """The node with these topology segments.

        Raises Refused if no node reported these segments, or if the node that did does not answer.
        """
        for node in self._nodes.values():
            if node.segments and segments.items() <= node.segments.items():
                node.require_answering()
                return node
        silent_nodes = [node.name for node in self if not node.segments]
        raise unavailable(
            f"no node says that its topology is {dict(segments)}{_not_asked(silent_nodes)}"
        )

    def answering(self) -> Sequence[Node]:
        """The nodes whose last GetPluginInfo call had an answer that was accepted."""
        return [node for node in self if not node.problem]

    def require_asked(self) -> None:
        """Raise Refused while a node that joined in the last two minutes has never answered.

        At a controller's start these are all nodes. An earlier controller may have begun to make a
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
        """Return all nodes. Raises Refused if one of them does not answer."""
        for node in self:
            node.require_answering()
        return list(self)

    async def _ask_all(self, fresh_seconds: float = _FRESH_SECONDS) -> None:
        """Ask nodes for their volume groups by GetPluginInfo, and wait for the answers.

        Left out are nodes without a known address, and nodes that were asked less than
        `fresh_seconds` ago and whose call has ended.
        """
        since = time.monotonic() - fresh_seconds
        reachable_nodes = [node for node in self if node.address]
        due_nodes = [
            node for node in reachable_nodes if node.is_being_asked or node.asked_seconds <= since
        ]
        # Ignore exceptions: a GetPluginInfo call is cancelled if its node leaves the cluster, and
        # the answers of the other nodes count.
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
        """Take over a node's answer to GetPluginInfo: its version and its volume groups.

        Nodes that ceased to claim a group, and conflicts about a group, are noted. Raises
        ValueError or RecursionError if the answer cannot be true or cannot be parsed.
        """
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
        # None for an older version of Carver, which does not report whether it named all its volume
        # groups.
        whole_text = manifest.get(routes.IS_WHOLE)
        is_whole = None if whole_text is None else whole_text == routes.YES
        if is_whole is False:
            # Keep the volume groups that the node named before: they may be on disks that the node
            # has not scanned.
            groups = {**node.groups, **groups}
        if len(groups) > _MOST_GROUPS:
            raise ValueError(f"it has more than {_MOST_GROUPS} volume groups")
        # The node has reported its groups if it has scanned its disks, also if it cannot read one
        # of them (IN_PART): it cannot report more.
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
                    # Read PersistentVolumes soon: some may have been made for the volume group
                    # since the last read.
                    self._record.request_early_refresh()
            self._claims.setdefault(uuid, set()).add(node.name)
            # Remove the node from those that ceased to claim the volume group: it claims it now.
            self._former_claimants.get(uuid, {}).pop(node.name, None)
            self._note_conflict(uuid, groups[uuid])
            self._is_settled(node, uuid)

    def _note_conflict(self, uuid: str, group: str) -> None:
        """Log that several nodes may have a volume group, and request a read of PersistentVolumes.

        If only one node may have the group, the last logged error about it is forgotten.

        The error is logged only if the next read of PersistentVolumes cannot end the conflict, and
        not twice in succession with the same text.
        """
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
        """Forget which claims to volume groups ended before PersistentVolumes were last read."""
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
        """Return an error text that names nodes that may have more volume groups than they named.

        The nodes that do not answer come first, then those that have not scanned all their disks.
        """
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
    """Return the error for a text that is no volume id; a node would answer with the same error."""
    if not identity:
        return Refused(grpc.StatusCode.INVALID_ARGUMENT, f"{field_name}: is required")
    return Gone(f"{field_name}: there is no volume or snapshot {identity[:_MOST_SHOWN]!r}")


def _texts(manifest: Mapping[str, str], key: str) -> Mapping[str, str]:
    """Parse the JSON object of texts under a key of the manifest in a GetPluginInfo answer.

    Raises ValueError if the value is too long or is no such object, RecursionError if it is nested
    too deeply.
    """
    text = manifest.get(key, "")
    if len(text) > _MOST_MANIFEST:
        raise ValueError(f"its {key} is longer than {_MOST_MANIFEST} characters")
    texts = json.loads(text)
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ValueError(f"{text[:100]!r} is no JSON object of texts")
    return texts


def _printable(text: str) -> str:
    """Return a node's text for logs and terminals: cut, and with spaces for control characters."""
    return "".join(character if character.isprintable() else " " for character in text[:_MOST_TEXT])


def _not_asked(silent_nodes: Sequence[str]) -> str:
    return f"; nodes that do not answer: {_several(silent_nodes)}" if silent_nodes else ""


def _several(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
