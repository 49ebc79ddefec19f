"""The nodes of the cluster as the controller knows them: which answers, and who has which group.

Nothing is kept on disk: each node is asked again after a start. A node claims the groups that it
named in its last answer, for as long as it belongs to the cluster; and those of earlier answers
while it has not looked at all its disks by its last look. PersistentVolumes name nodes, too
(membership.py).

All that is in a group is a node's where that node alone claims it, PersistentVolumes name no other
node for it, and each other member has reported its groups to this controller. Otherwise the id's
own PersistentVolume, read for that call, decides who is called for what exists. So no order of
events counts for that. Nothing new is made on nodes of which several may have a group; new volumes
wait two minutes for a member that has reported no groups, and no longer: one broken node keeps no
volume off the others.
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
# How often a node that answers is asked, and one that does not, or has not looked at its disks.
_INTERVAL_SECONDS, _SILENT_INTERVAL_SECONDS = 60.0, 5.0
_PATIENCE_SECONDS = 3.0
# A node's answer that is younger is not asked for again to find a group.
_FRESH_SECONDS = 10.0
# Nodes that are asked at once.
_AT_ONCE = 64
_MOST_NAMED = 5
# How long a question about an id may take in all: PersistentVolumes that are read for it are kept
# for the call that repeats it.
_QUESTION_SECONDS = 120.0
# Characters that are shown of what a node says and cannot be so, of its version and its errors, and
# the most that its topology and its groups may take.
_MOST_SHOWN, _MOST_TEXT, _MOST_MANIFEST = 100, 1000, 1 << 16
# The most bytes of all that a node says of itself: with more it is not even parsed.
_MOST_BYTES = 4 * _MOST_MANIFEST
# The most groups of a node.
_MOST_GROUPS = 200
# For how long a member that came is waited for, until it has reported its groups.
_COMING_SECONDS = 120.0
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


class Gone(Refused):
    """What an id names does not exist: no volume has such an id, or its node was deleted."""

    def __init__(self, problem: str) -> None:
        super().__init__(grpc.StatusCode.NOT_FOUND, problem)


class Forgotten(Gone):
    """What an id names was on a node that was deleted, and is gone."""


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
    # The UID of its Node; empty without an API server.
    uid: str = ""
    version: str = ""
    segments: Mapping[str, str] = field(default_factory=dict)
    # The names of its volume groups, by the start of their UUIDs as ids have it.
    groups: Mapping[str, str] = field(default_factory=dict)
    # Whether it has looked at all its disks by its last look; None for an older version, which does
    # not say.
    is_whole: bool | None = None
    # Whether its kubelet asks for its volumes' health, and tells the pods that use them.
    is_watched: bool = False
    # Whether it has reported its groups to this controller: all, as far as its version knows.
    has_reported: bool = False
    # Since when (of the record) it claims each of its groups, and those whose claim is settled.
    claimed: dict[str, float] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)
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
        interval = _SILENT_INTERVAL_SECONDS if self.may_have_more else _INTERVAL_SECONDS
        return not self.asked_seconds or time.monotonic() - self.asked_seconds >= interval

    @property
    def may_have_more(self) -> bool:
        """Whether it does not answer, or may have groups on disks that it has not looked at."""
        return bool(self.problem) or self.is_whole is False

    @property
    def has_all_named(self) -> bool:
        """Whether it answers, and has no group but those that it names."""
        return not self.problem and self.is_whole is True

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


# What gRPC says where it drops an answer or an error of a node's: with RESOURCE_EXHAUSTED, after
# which the provisioner has a volume made elsewhere.
_DROPPED = ("larger than max", "metadata size exceeds")


def require_said(node: Node, error: grpc.aio.AioRpcError) -> None:
    """Raise Refused for an error that is no node's, but gRPC's: the call may have succeeded."""
    details = error.details() or ""
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and any(
        one in details for one in _DROPPED
    ):
        raise unavailable(
            f"node {node.name} sends more than gRPC takes: {details}. The call may have been"
            " carried out: repeat it"
        )


def problem_of(error: BaseException) -> str:
    """What is wrong with one node by an error of its call; raises what ends the caller itself.

    Where several nodes are asked, whatever one of them does costs no other.
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
    """Call a node, with the bytes of a request and of its answer.

    Raises AioRpcError, Refused; Untrue where the call ended well without an answer.
    """
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, Any] = node.connected.unary_unary(path)
    try:
        answer = await call(request, timeout=timeout)
    except grpc.aio.AioRpcError as error:
        require_said(node, error)
        raise
    except grpc.aio.UsageError:  # the channel is closed
        raise unavailable(f"node {node.name} left the cluster") from None
    if not isinstance(answer, bytes):
        # grpcio's answer to trailers with the status OK and no message before them is None.
        raise Untrue("the answer", answer, "it has no message")
    return answer


class Nodes:
    """All nodes of the cluster, for one event loop."""

    def __init__(self, driver_name: str, connect: Connect, record: Record | None = None) -> None:
        self._driver_name, self._connect = driver_name, connect
        self._record = record or Record()
        self._nodes: dict[str, Node] = {}
        # The names of the nodes that claim a group, by the start of the group's UUID.
        self._claims: dict[str, set[str]] = {}
        # The nodes that no longer claim a group, and when they were last found to (of the record):
        # until PersistentVolumes were read again they may name these nodes.
        self._former: dict[str, dict[str, float]] = {}
        # The members, and those that have reported no groups: asked for each group of each node.
        # None where others may have reported since.
        self._unheard: tuple[frozenset[str], Sequence[str]] | None = None
        # What was logged of groups that several nodes have.
        self._logged: dict[str, str] = {}
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self._questions = Questions("owners", _QUESTION_SECONDS)
        self._tasks: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Node]:
        """The nodes in the order of their names; a scrape asks in a thread of its own."""
        return iter([node for _, node in sorted(self._nodes.items())])

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, name: str) -> Node | None:
        """A node by its name; None for one that is not in the cluster."""
        return self._nodes.get(name)

    def set(self, serving: Mapping[str, Serving]) -> None:
        """Make these the nodes of the cluster.

        One that moved to another address keeps its groups until it says that it has them no more.
        One whose Node was deleted and made anew is another machine, which has said nothing yet.
        """
        for name, known in list(self._nodes.items()):
            if name not in serving or serving[name].uid != known.uid:
                self._drop(known)
            elif serving[name].address != known.address:
                known.address = serving[name].address
                # Here, as a node may enrol at thousands of addresses until they are taken over.
                _log.info("node %s serves at %s", name, known.address or "no known address")
                known.problem, known.asked_seconds = _NOT_ASKED, 0.0
                self._replace_channel(known)
        for name, one in serving.items():
            if name not in self._nodes:
                channel = self._channel(name, one.address)
                self._nodes[name] = Node(name, one.address, channel, one.uid)
                if one.address:
                    _log.info("node %s serves at %s", name, one.address)

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
        """Close all connections, and ask the API server no more."""
        self._questions.stop()
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

        Raises Refused if no node has it or if that one does not answer, and for an empty id; Gone
        for one that no volume has, Forgotten if its node was deleted.
        """
        parsed = VolumeId.parse(identity)
        if parsed is None:
            # The call goes to no node: it may have another node's secrets.
            raise _not_an_id(identity, what)
        node = self._agreed(parsed.group_uuid)
        if node is None:
            if self._must_ask(parsed.group_uuid):
                await self._ask_all()
            try:
                node = await self._owner(parsed, what)
            except NoOwner as error:
                await self._require_not_forgotten(parsed, str(error))
                raise
        node.require_answering()
        return node

    def _agreed(self, uuid: str) -> Node | None:
        """The node that has a group with all that is in it, where that is certain."""
        claiming = self._claims.get(uuid, ())
        node = self._nodes[next(iter(claiming))] if len(claiming) == 1 else None
        return node if node is not None and self._is_settled(node, uuid) else None

    def _is_settled(self, node: Node, uuid: str) -> bool:
        """Whether all that is in a group is certainly on a node: from then on, while it is alone.

        No other node claims the group, and PersistentVolumes name no other, not even a deleted one.
        """
        if self._holders(uuid) != {node.name} or self._record.names_deleted(uuid):
            return False
        if uuid not in node.settled and not self._unsettled(node, uuid, self._unreported(node)):
            node.settled.add(uuid)
        return uuid in node.settled

    def _unsettled(self, node: Node, uuid: str, others: Sequence[str]) -> str:
        """Why the only claim to a group does not count yet; empty where it does.

        The group may be that of `others`, which have reported no groups.
        """
        is_named = node.name in self._record.nodes_of(uuid)
        if not is_named and not self._record.is_newer(node.claimed.get(uuid, 0.0)):
            self._record.doubt_claim()
            return "PersistentVolumes, which may name another, are being read"
        if others:
            return (
                f"it may be that of {_several(others)}, without any report of its groups to this"
                " controller. Start Carver there, or delete its Node if it will not come back"
            )
        return ""

    def _unreported(self, node: Node) -> Sequence[str]:
        """The other members that may have any group: they have reported none to this controller."""
        members = self._record.members
        if self._unheard is None or self._unheard[0] is not members:
            known = (one for one, each in self._nodes.items() if each.has_reported)
            self._unheard = members, sorted(members.difference(known))
        return [one for one in self._unheard[1] if one != node.name]

    def _coming(self, node: Node) -> Sequence[str]:
        """Those of the other members without reported groups that came a moment ago.

        Not those that PersistentVolumes name: at a controller's start they keep no volume off a
        node whose groups are new.
        """
        others = (one for one in self._unreported(node) if one not in self._record.named)
        return [one for one in others if self.is_new(one)]

    def _must_ask(self, uuid: str) -> bool:
        """Whether nodes are to be asked once more who has a group, before a call is refused."""
        named, claiming = self._named(uuid), self._claims.get(uuid, set())
        if not named:
            return not claiming
        return any(not self._nodes[one].problem for one in named - claiming)

    async def _owner(self, parsed: VolumeId, what: str) -> Node:
        """The node that an id belongs to. Raises Refused where that is not certain.

        Where more than one node may have the group, its own PersistentVolume decides, or that of a
        snapshot's volume.
        """
        uuid = parsed.group_uuid
        if (agreed := self._agreed(uuid)) is not None:
            return agreed
        own = await self._asked(self._record.node_of, parsed)
        # Nodes may have come or left meanwhile.
        named, claiming = self._named(uuid), self._claims.get(uuid, set())
        self._record.doubt()
        if own is None and not claiming and len(named) == 1:
            [own] = named
        if own is None and not self._record.names_deleted(uuid):
            return self._only_holder(parsed, what)
        if not own:
            raise NoOwner(self._deleted(parsed, what))
        if (node := self._nodes.get(own)) is None:
            raise unavailable(f"{what}: node {own}, which has {parsed}, is not known yet")
        if own in claiming or node.problem:
            return node
        if node.is_whole is False:
            raise unavailable(
                f"{what}: node {own} has not looked at all its disks by its last look, and"
                f" volume group {parsed.group} ({uuid}) may be on one: see Carver's log there"
            )
        if claiming:
            raise unavailable(f"{what}: {self._dispute(parsed.group, uuid)}")
        raise NoOwner(self._unknown(parsed, what))

    def _only_holder(self, parsed: VolumeId, what: str) -> Node:
        """The node of what no PersistentVolume names: that which alone can have its group.

        Raises Refused where another may have it, too.
        """
        uuid = parsed.group_uuid
        named, claiming = self._named(uuid), self._claims.get(uuid, set())
        if not named and not claiming:
            raise NoOwner(self._unknown(parsed, what))
        is_possible = len(claiming) == 1 and (not named or claiming <= named)
        if not is_possible or not all(self._nodes[one].has_all_named for one in named - claiming):
            raise unavailable(f"{what}: {self._dispute(parsed.group, uuid)}")
        node = self._nodes[next(iter(claiming))]
        if self._unsettled(node, uuid, others := self._unreported(node)):
            raise unavailable(f"{what}: {self._unproved(node, uuid, others)}")
        return node

    def _unproved(self, node: Node, uuid: str, others: Sequence[str]) -> str:
        """Why the only claim to a group, which may be that of `others`, does not count yet."""
        return (
            f"node {node.name} alone claims volume group {node.groups[uuid]} ({uuid}), and that"
            " does not count yet for what has no PersistentVolume of its own:"
            f" {self._unsettled(node, uuid, others)}"
        )

    def _deleted(self, parsed: VolumeId, what: str) -> str:
        """What is wrong with an id whose PersistentVolume names a node that was deleted."""
        found = sorted(self._claims.get(parsed.group_uuid, ()))
        if not found:
            return self._unknown(parsed, what)
        return (
            f"{what}: the node that PersistentVolumes name for {parsed} was deleted, and its volume"
            f" group is on node {' and '.join(found)} by now: write its PersistentVolumes anew"
            " (docs/operations.md, Move a group to another node)"
        )

    def _named(self, uuid: str) -> frozenset[str]:
        """The nodes of the cluster that PersistentVolumes of a group name, or may name.

        It changes nothing: a scrape asks in a thread of its own.
        """
        named = self._record.nodes_of(uuid)
        if former := self._former.get(uuid):
            every = tuple(former.items())
            named = named.union(one for one, at in every if not self._record.is_newer(at))
        return frozenset(one for one in named if one in self._nodes)

    def _holders(self, uuid: str) -> frozenset[str]:
        """All nodes that a group may be on: those that claim it and those that are named."""
        return self._named(uuid).union(self._claims.get(uuid, ()))

    def _lasting_holders(self, uuid: str) -> frozenset[str]:
        """The nodes that claim a group, and those that the last reading names."""
        named = self._record.nodes_of(uuid) & self._nodes.keys()
        return named.union(self._claims.get(uuid, ()))

    def conflict(self, node: Node, *, is_lasting: bool = False) -> str:
        """What is wrong with a node's groups that others may have, too; empty if nothing is.

        With `is_lasting` without what is over if PersistentVolumes that are read again say so.
        """
        holders = self._lasting_holders if is_lasting else self._holders
        disputed = [
            (uuid, group) for uuid, group in sorted(node.groups.items()) if len(holders(uuid)) > 1
        ]
        return "; ".join(self._dispute(group, uuid) for uuid, group in disputed[:_MOST_NAMED])

    def no_new(self, node: Node) -> str:
        """Why no volume is made on a node; empty if one may be.

        Either another node may have one of its groups: which group a class uses, only the node
        knows. Or each of its groups may be that of a member that came a moment ago, and may report
        it yet. One that stays silent keeps no volume off another node: if both have the same group,
        PersistentVolumes name the node that has volumes.
        """
        if problem := self.conflict(node):
            return problem
        if self._has_own(node) or not (coming := self._coming(node)):
            return ""
        return self._unproved(node, min(node.groups), coming)

    def has_no_room(self, node: Node) -> bool:
        """Whether a node's capacity is 0 because no volume is made on it.

        Raises Refused where that may be over in a moment: the external-provisioner asks again at
        once, but keeps a 0 for minutes.
        """
        problem = self.no_new(node)
        if problem and self._may_pass(node):
            raise unavailable(problem)
        return bool(problem)

    def _may_pass(self, node: Node) -> bool:
        """Whether what keeps volumes off a node may be over in a moment.

        So it is where only PersistentVolumes that are read again may name another for its groups,
        or while members that came a moment ago have not reported theirs.
        """
        if self.conflict(node):
            return not self.conflict(node, is_lasting=True)
        return bool(self._coming(node))

    def is_new(self, name: str) -> bool:
        """Whether a member came a moment ago: one that is not taken over yet, too."""
        node = self._nodes.get(name)
        return node is None or time.monotonic() - node.joined_seconds < _COMING_SECONDS

    def require_own(self, node: Node) -> None:
        """Raise Refused for a node that has groups, of which none counts as its own yet."""
        if not self._has_own(node):
            raise unavailable(self._unproved(node, min(node.groups), self._coming(node)))

    def _has_own(self, node: Node) -> bool:
        return not node.groups or any(self._is_own(node, uuid) for uuid in node.groups)

    def contested(self, node: Node) -> int:
        """How many of a node's groups other nodes have, too."""
        return sum(len(self._holders(uuid)) > 1 for uuid in node.groups)

    def _dispute(self, group: str, uuid: str) -> str:
        """What is wrong with a group that several nodes may have, and what to do."""
        named, claiming = sorted(self._named(uuid)), sorted(self._claims.get(uuid, ()))
        said = f"PersistentVolumes name {' and '.join(named) or 'none of them'}"
        if len(claiming) < 2:
            return (
                f"volume group {group} ({uuid}) is on node {' and '.join(claiming) or 'none'}, but"
                f" {said}, where it is not known to be, and no volume is made in it: attach its"
                " disks where they were, or write its PersistentVolumes anew (docs/operations.md,"
                " Move a group to another node)"
            )
        return (
            f"nodes {' and '.join(claiming)} both claim volume group {group} ({uuid}), {said}, and"
            " no volume is made on any of these nodes: one has a copy, as of a machine template"
            " or a restored disk. Find out which, and give the copy another UUID (vgchange"
            " --uuid, or vgimportclone); change nothing on a node that PersistentVolumes name"
            " (docs/operations.md, Machine templates and restored disks)"
        )

    def require_undisputed(self, parsed: VolumeId, what: str) -> None:
        """Raise Refused for a group that several nodes may have."""
        holders = self._holders(uuid := parsed.group_uuid)
        if len(holders) > 1:
            raise unavailable(f"{what}: {self._dispute(parsed.group, uuid)}")
        for one in map(self._nodes.__getitem__, holders):
            if uuid in one.groups and not self._is_own(one, uuid):
                raise unavailable(f"{what}: {self._unproved(one, uuid, self._coming(one))}")

    def require_elsewhere(self, node: Node, identity: VolumeId, what: str) -> None:
        """Raise Refused unless another node has the group of an id, and tells of it itself."""
        uuid = identity.group_uuid
        others = [self._nodes[one] for one in self._claims.get(uuid, ()) if one != node.name]
        if not any(self._is_own(one, uuid) for one in others):
            self.require_undisputed(identity, what)
            raise unavailable(f"{what}: {self._dispute(identity.group, uuid)}")

    def places(self, node: Node) -> frozenset[str]:
        """The volume groups that are a node's own, as ids name them: `group@uuid`."""
        return frozenset(
            f"{group}@{uuid}" for uuid, group in node.groups.items() if self._is_own(node, uuid)
        )

    def _is_own(self, node: Node, uuid: str) -> bool:
        """Whether a group is a node's for what is made there from now on, and for what it lists.

        PersistentVolumes name that node; or they name none, and only this node claims the group,
        while no member that may have it too is still expected to report. That they may name a
        node, as it had the group until lately, proves nothing for that node.
        """
        named = self._record.nodes_of(uuid) & self._nodes.keys()
        if named:
            return node.name in named
        return self._is_settled(node, uuid) or (
            self._holders(uuid) == {node.name}
            and not self._unsettled(node, uuid, self._coming(node))
        )

    async def moved_on(self, node: Node, identity: str, what: str) -> Node | None:
        """The node that has the group of an id by now, if that is another; asks the first again.

        Raises NoOwner if the first one no longer has it, and no other does.
        """
        parsed = VolumeId.parse(identity)
        if parsed is None:
            return None
        await self.ask(node)
        if node.may_have_more or parsed.group_uuid in node.groups:
            return None
        await self._ask_all(fresh_seconds=0)
        other = await self._owner(parsed, what)
        return other if other is not node else None

    def is_elsewhere(self, node: Node, identity: VolumeId) -> bool:
        """Whether what an id names is, or may be, another node's; False if no node has its group.

        Of a group that PersistentVolumes of two nodes name, each volume is its own one's.
        """
        uuid = identity.group_uuid
        if bool(self._holders(uuid)) and not self._is_own(node, uuid):
            return True
        return self.is_anothers(node, identity)

    def is_anothers(self, node: Node, identity: VolumeId) -> bool:
        """Whether a volume's own PersistentVolume names another node, by the last reading."""
        return self._record.names_another(identity, node.name)

    def may_have(self, node: Node, identity: VolumeId) -> bool:
        """Whether the group of an id may be a node's: it claims it, or is named for it."""
        return node.name in self._holders(identity.group_uuid)

    async def _require_not_forgotten(self, parsed: VolumeId, problem: str) -> None:
        """Raise Forgotten for what was on a deleted node; Refused while that is not certain.

        Certain is: a PersistentVolume names a node without a Node object, for a while, and all
        members say that they have looked at all their disks, and none of them has the group, or
        had it until lately.
        """
        if not self._record.forgets:
            return
        found = await self._asked(self._record.deleted, parsed, problem)
        if found is None:
            return
        # Also members that were found only now.
        every = self._record.members.union(self._nodes)
        unsure = sorted(
            one for one in every if (m := self._nodes.get(one)) is None or not m.has_all_named
        )
        if unsure:
            raise unavailable(
                f"node {found.segment} was deleted, but {parsed} may be on another node by now"
                f"{self._why_unsure(unsure)}; that it is gone is believed once all nodes answer"
            )
        uuid = parsed.group_uuid
        former = self._former.get(uuid, {})
        if self._claims.get(uuid):
            raise unavailable(problem)
        if not all(map(self._record.is_newer, former.values())):
            self._record.doubt_claim()
            raise unavailable(
                f"node {found.segment} was deleted, but volume group {parsed.group} ({uuid}) was on"
                f" another node until a moment ago: {_several(sorted(former))}"
            )
        if found.seconds:
            raise unavailable(
                f"node {found.segment} was deleted, and {parsed} with it: that is believed in"
                f" {found.seconds:.0f} s, unless the node comes back"
            )
        raise Forgotten(f"{parsed} is forgotten: its node {found.segment} was deleted")

    async def require_no_snapshots(self, identity: str) -> None:
        """Raise Refused if snapshots need the PersistentVolume of a volume that was forgotten.

        As of a volume that is there: its snapshots are deleted first. The PersistentVolume is the
        proof that they, too, were on the node that was deleted.
        """
        parsed = VolumeId.parse(identity)
        if parsed is None:
            return
        found = await self._asked(self._record.snapshots_of, parsed)
        if found:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"cannot forget {identity} yet: its node was deleted, and it goes after its"
                f" snapshots, of which these VolumeSnapshotContents are left: {_several(found)}",
            )

    async def _asked(
        self, ask: Callable[[VolumeId, float], T], identity: VolumeId, problem: str = ""
    ) -> T:
        """Ask the API server about an id, for each volume group one question at a time.

        Raises Refused if the API server does not answer.
        """
        before = f"{problem}; and " if problem else ""
        key, begun = f"volume group {identity.group_uuid}", self._record.now()
        try:
            return await self._questions.ask(key, ask, identity, begun)
        except NotInTime as error:
            raise unavailable(f"{before}cannot look up {identity}: {error}; ask again") from None
        except (errors.ClusterRefused, errors.ClusterSilent) as error:
            raise unavailable(f"{before}the API server does not answer: {error}") from None
        except WrongSource as error:
            raise unavailable(f"{before}cannot look up {identity}: {error}") from None

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

    def require_asked(self) -> None:
        """Raise Refused while members that came a moment ago have not answered at all.

        So it is at a controller's start: an earlier one may have begun anything on them.
        """
        silent = [one.name for one in self if not one.answered_seconds and self.is_new(one.name)]
        if silent:
            raise unavailable(f"not all nodes have answered this controller{_not_asked(silent)}")

    def require_all(self) -> Sequence[Node]:
        """All nodes; raises Refused if one of them does not answer."""
        for one in self:
            one.require_answering()
        return list(self)

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
                address = node.address
                answer = await unary(node, _INFO, b"", _PATIENCE_SECONDS)
                if len(answer) > _MOST_BYTES:
                    raise unavailable(f"it says more of itself than {_MOST_BYTES} bytes")
                said = csi.GetPluginInfoResponse.FromString(answer)
            if self._nodes.get(node.name) is not node:
                raise unavailable(f"node {node.name} left the cluster")
            if node.address != address:
                raise unavailable(_NOT_ASKED)
            self._believe(node, said)
        except Exception as error:
            problem = problem_of(error)
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
        # An older version does not say whether these are all.
        whole = manifest.get(routes.IS_WHOLE)
        is_whole = None if whole is None else whole == routes.YES
        if is_whole is False:
            # Those that it had may be on disks that it has not looked at.
            groups = {**node.groups, **groups}
        if len(groups) > _MOST_GROUPS:
            raise ValueError(f"it has more than {_MOST_GROUPS} volume groups")
        # One that looked, and found a disk that it cannot read, has reported all that it can.
        has_reported = node.has_reported or whole != ""
        if has_reported != node.has_reported:
            node.has_reported, self._unheard = has_reported, None
        node.is_whole = is_whole
        given_up = node.groups.keys() - groups.keys()
        if given_up:
            self._forget_former()
        for uuid in given_up:
            self._give_up(node, uuid)
            node.claimed.pop(uuid, None)
            node.settled.discard(uuid)
            self._former.setdefault(uuid, {})[node.name] = self._record.now()
            self._record.doubt()
        node.segments, node.groups = segments, groups
        node.is_watched = manifest.get(routes.IS_WATCHED) == routes.YES
        for uuid in groups:
            if uuid not in node.claimed:
                node.claimed[uuid] = self._record.now()
                if not self._record.nodes_of(uuid):
                    # They may have been made since the last reading.
                    self._record.doubt_claim()
            self._claims.setdefault(uuid, set()).add(node.name)
            # It claims the group again, and is believed no more than at first.
            self._former.get(uuid, {}).pop(node.name, None)
            self._note_conflict(uuid, groups[uuid])
            self._is_settled(node, uuid)

    def _note_conflict(self, uuid: str, group: str) -> None:
        """Log once that several nodes have a group, unless that may be over in a moment."""
        if len(self._holders(uuid)) < 2:
            self._logged.pop(uuid, None)
            return
        self._record.doubt()
        said = self._dispute(group, uuid)
        if len(self._lasting_holders(uuid)) > 1 and self._logged.get(uuid) != said:
            self._logged[uuid] = said
            _log.error("%s", said)

    def _give_up(self, node: Node, uuid: str) -> None:
        """Take a group from a node that no longer claims it."""
        claiming = self._claims.get(uuid, set())
        claiming.discard(node.name)
        if not claiming:
            self._claims.pop(uuid, None)
            self._logged.pop(uuid, None)

    def _forget_former(self) -> None:
        """Forget who gave up which group before PersistentVolumes were read last."""
        for uuid, former in list(self._former.items()):
            for name, moment in list(former.items()):
                if self._record.is_newer(moment):
                    del former[name]
            if not former:
                del self._former[uuid]

    def _drop(self, node: Node) -> None:
        del self._nodes[node.name]
        self._unheard = None
        for uuid in node.groups:
            self._give_up(node, uuid)
        self._later(node.close())

    def _unknown(self, parsed: VolumeId, what: str) -> str:
        unsure = [one.name for one in self if one.may_have_more]
        return (
            f"{what}: no node that answers has volume group {parsed.group} ({parsed.group_uuid})"
            f"{self._why_unsure(unsure)}. Start Carver on its node, or attach its disks to one"
        )

    def _why_unsure(self, unsure: Sequence[str]) -> str:
        """The names of nodes that may have more than they said, by why they may."""
        looking = [one for one in unsure if (m := self._nodes.get(one)) and not m.problem]
        silent = _not_asked([one for one in unsure if one not in looking])
        if not looking:
            return silent
        return f"{silent}; nodes that have not looked at all their disks: {_several(looking)}"


def _not_an_id(identity: str, what: str) -> Refused:
    """The answer about a text that is no id, as a node gives it."""
    if not identity:
        return Refused(grpc.StatusCode.INVALID_ARGUMENT, f"{what}: is required")
    return Gone(f"{what}: there is no volume or snapshot {identity[:_MOST_SHOWN]!r}")


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
    return f"; nodes that do not answer: {_several(silent)}" if silent else ""


def _several(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
