"""Kubernetes Events about unhealthy volumes, for kubelets that do not ask for volume health.

Each node that answers is asked periodically for its unhealthy volumes. When a condition of a volume
begins, one Event is written on the claim, and on each pod that uses the claim at that time. When
the node reports that the condition is over, another Event is written on the same objects. Nothing
is kept on disk: after a start of the controller, an Event that is still in the cluster counts as
written. While a node does not answer, its volumes' conditions neither begin nor end.
"""

import asyncio
import enum
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import Any, NamedTuple, TypeVar

import grpc
from google.protobuf.message import Message

from agent.core import errors
from agent.core.ids import VolumeId
from agent.daemon.extra import Extra
from agent.extras.controller.node_answers import Answers
from agent.extras.controller.nodes import Gone, Node, Nodes, NoOwner, problem_of
from agent.extras.controller.volume_users import VolumeUsers
from agent.extras.kubernetes.events import NORMAL, WARNING, Event, Events, Subject
from agent.extras.kubernetes.objects import Lists, Objects
from agent.settings.settings import Config
from agent.work.background import PeriodicTask
from proto import csi_pb2 as csi

_log = logging.getLogger(__name__)
T = TypeVar("T")

_LIST = "/csi.v1.Controller/ControllerListVolumeHealth"
_GET = "/csi.v1.Controller/ControllerGetVolumeHealth"
# Reason of the Event that says that a condition of a volume is over.
ENDED = "ConditionEnded"
# Reason of the Event on a Node that shares a volume group with other nodes.
CONTESTED = "VolumeGroupContested"
# Seconds from the start of the task until nodes are first asked. In this time, nodes enrol.
_FIRST_SECONDS = 30.0
# Time limit, in seconds, of one request to a node, of all pages of a node's list, and of all
# requests to a node about conditions that may be over.
_PATIENCE_SECONDS = 10.0
# Maximum number of nodes that are asked for volume health at the same time.
_AT_ONCE = 16
# Time, in seconds, for which no node must have listed a health condition before it can count as
# over. So a condition that comes and goes has one Event.
_CALM_SECONDS = 300.0
# Seconds until a condition is looked at again if its Event could not be written, for instance as
# the volume has no claim, or if its node says that the condition is not over.
_AGAIN_SECONDS = 600.0
# Time, in seconds, for which health conditions that are over are remembered, to count in later
# Events how often they occurred. The API server keeps Events for the same time by default.
_COUNTED_SECONDS = 3600.0
# Limits of one round of requests to all nodes: the number of conditions that begin, and of those
# that end; and the number of failures. After _MOST_FAILURES failures of the API server the round
# ends. After as many refusals in a namespace, which may be being deleted, no more Events are
# written in that namespace in this round.
_MOST_SAID, _MOST_FAILURES = 200, 5
# Maximum number of characters of a health condition's reason and message; longer texts are cut. In
# Kubernetes' own Events a reason has at most 128 bytes, a note 1,024.
_REASON_CHARACTERS, _MESSAGE_CHARACTERS = 128, 1024
# Maximum number of entries of one page of a node's list of volume health, and of health conditions
# of one node that are kept in memory. Further conditions have no Events.
_OF_A_PAGE, _MOST_OF_A_NODE = 500, 10_000
# Text that is no node's topology segment, for a node whose topology segment is not known.
_NOWHERE = "?"


class _Key(NamedTuple):
    volume_id: str
    reason: str


class _Fate(enum.Enum):
    """What became of a volume's health condition that its node no longer lists."""

    # The node says that the condition lasts, or does not say what became of the condition.
    LASTS = enum.auto()
    # The node says that the condition is over.
    OVER = enum.auto()
    # The condition's volume does not exist any more.
    GONE = enum.auto()


@dataclass
class _Condition:
    """A health condition of a volume that a node reported, and that is not known to be over.

    Times are monotonic, in seconds.
    """

    key: _Key
    node: str
    # The node's topology segment if the volume is not known to be on the node; else empty. With a
    # segment, an Event is written only if the PersistentVolume names that segment.
    segment: str
    status: str
    message: str
    # Whether the node listed its conditions before, without this condition.
    is_new: bool
    # When a node last reported the condition.
    seen_seconds: float = 0.0
    # Earliest time of the next attempt to write the Event that the condition began, or is over.
    due_seconds: float = 0.0
    # The objects that have the Event that the condition began. None before that Event was written.
    subjects: Sequence[Subject] | None = None


class HealthEvents(Extra):
    """The periodic background task that asks the nodes for unhealthy volumes and writes Events."""

    def __init__(
        self,
        config: Config,
        nodes: Nodes,
        objects: Objects,
        lists: Lists,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make the background task, which `start` starts.

        `clock` returns the seconds since the epoch, for the times in Events. `monotonic` returns
        the seconds of a clock that is never set, for all intervals.
        """
        self._config, self._nodes, self._monotonic = config, nodes, monotonic
        self._answers = Answers(nodes)
        self._objects, self._lists = objects, lists
        self._events = Events(objects, config.driver_name, clock)
        # The event loop that uses the nodes. It is set by `start`.
        self._loop: asyncio.AbstractEventLoop
        self._conditions: dict[_Key, _Condition] = {}
        # The names of the nodes that listed the conditions of their volumes in an earlier round.
        self._listed_nodes: frozenset[str] = frozenset()
        # How often each health condition of a volume has ended, and when it last ended.
        self._ends: dict[_Key, tuple[int, float]] = {}
        # The text of the last Event on a Node about a volume group that other nodes have, too, by
        # the Node's name.
        self._conflicts: dict[str, str] = {}
        # The names of the nodes whose list failed in the last round; and whether Events could not
        # be written when that was last logged.
        self._silent: frozenset[str] = frozenset()
        self._is_refused = False
        self.task = PeriodicTask(
            "volume health",
            self.look,
            config.health_interval_seconds,
            "cannot look for volumes that are not healthy: %s",
            first_seconds=_FIRST_SECONDS,
        )

    def start(self) -> None:
        """Start the background task that writes Events.

        This method must be called in the event loop that uses the nodes.
        """
        self._loop = asyncio.get_running_loop()
        self.task.start()

    def stop(self) -> None:
        """Stop the task: a round of requests that has begun goes on, and no other round begins."""
        self.task.stop()

    def look(self) -> None:
        """Run one round: ask the nodes for unhealthy volumes, and write Events about changes.

        Changes are conditions that began or are over, and volume groups that several nodes have.
        This method waits for the nodes and the API server, so it must not run in the event loop.
        Raises ClusterRefused if an Event about such a volume group could not be written.
        """
        try:
            reported = self._in_loop(self._ask_all())
            now = self._monotonic()
            self._note(reported, now)
            self._say(reported, now)
            self._warn(self._in_loop(self._found_conflicts()))
        except CancelledError:
            _log.debug("a look at the volumes' health was cut off")

    def _in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # Methods that ask the nodes for health conditions of volumes

    async def _ask_all(self) -> Mapping[str, Sequence[_Condition]]:
        """Ask all nodes that answer for their volumes' health conditions; return these by node.

        The key is the node's name.

        A node whose list fails is left out. A warning is logged when a node's list first fails.
        """
        limit, conditions = asyncio.Semaphore(_AT_ONCE), dict[str, Sequence[_Condition]]()
        problems: dict[str, str] = {}

        async def ask(node: Node) -> None:
            async with limit:
                try:
                    async with asyncio.timeout(_PATIENCE_SECONDS):
                        conditions[node.name] = await self._listed(node)
                except (Exception, asyncio.CancelledError) as error:
                    problems[node.name] = problem_of(error)

        await asyncio.gather(*map(ask, self._nodes.answering()))
        for name in problems.keys() - self._silent:
            text = "node %s does not say which of its volumes are healthy: %s"
            _log.warning(text, name, problems[name])
        self._silent = frozenset(problems)
        return conditions

    async def _listed(self, node: Node) -> Sequence[_Condition]:
        """Return the health conditions of one node's volumes, from all pages of the node's list.

        At most _MOST_OF_A_NODE conditions are returned. Raises what `_asked` raises.
        """
        conditions = list[_Condition]()
        request = csi.ControllerListVolumeHealthRequest(max_entries=_OF_A_PAGE)
        while True:
            answer = await self._asked(node, _LIST, request)
            for health in answer.entries:
                parsed = VolumeId.parse(health.volume_id)
                if parsed is not None:
                    conditions += self._of_volume(node, parsed, health)
                if len(conditions) >= _MOST_OF_A_NODE:
                    return conditions[:_MOST_OF_A_NODE]
            if not answer.next_token:
                return conditions
            request.starting_token = answer.next_token

    async def _asked(self, node: Node, path: str, request: Message) -> Any:
        """Send a request to a node, and return the checked answer.

        Raises AioRpcError if the call fails, Refused if the answer is refused or the node has no
        known address.
        """
        data = request.SerializeToString()
        # Accept an answer from which volumes were removed that another node may have (`in_part`):
        # they must not prevent Events about the node's own volumes.
        _, answer = await self._answers.of(
            *(node, path, request, data, _PATIENCE_SECONDS), in_part=True
        )
        return answer

    def _of_volume(
        self, node: Node, parsed: VolumeId, health: csi.VolumeHealth
    ) -> Sequence[_Condition]:
        is_there = parsed.group_uuid in node.groups and not self._nodes.is_anothers(node, parsed)
        segment = "" if is_there else node.segments.get(self._config.topology_key, _NOWHERE)
        return [
            _Condition(
                _Key(health.volume_id, entry.reason[:_REASON_CHARACTERS]),
                node.name,
                segment,
                _status(entry.status),
                entry.message[:_MESSAGE_CHARACTERS],
                is_new=node.name in self._listed_nodes,
            )
            for entry in health.health_statuses
        ]

    # Methods that write Events about health conditions

    def _note(self, reported: Mapping[str, Sequence[_Condition]], now: float) -> None:
        """Store the health conditions that nodes reported in a round; `now` is the round's time.

        Conditions above a node's limit are forgotten, and so are ends of conditions that are too
        old to be counted.
        """
        for conditions in reported.values():
            for condition in conditions:
                kept_condition = self._conditions.setdefault(condition.key, condition)
                kept_condition.node, kept_condition.segment = condition.node, condition.segment
                kept_condition.status, kept_condition.message, kept_condition.seen_seconds = (
                    condition.status,
                    condition.message,
                    now,
                )
        self._forget(reported)
        listed_nodes = self._listed_nodes.union(reported)
        self._listed_nodes = frozenset(
            name for name in listed_nodes if self._nodes.get(name) is not None
        )
        oldest_end = now - _COUNTED_SECONDS
        self._ends = {key: end for key, end in self._ends.items() if end[1] > oldest_end}

    def _forget(self, nodes: Iterable[str]) -> None:
        """Forget health conditions of nodes that have more than _MOST_OF_A_NODE.

        The conditions of each node that were reported last are kept.
        """
        by_node = {name: list[_Condition]() for name in nodes}
        for condition in self._conditions.values():
            if condition.node in by_node:
                by_node[condition.node].append(condition)
        for conditions in by_node.values():
            conditions.sort(key=lambda condition: condition.seen_seconds, reverse=True)
            for condition in conditions[_MOST_OF_A_NODE:]:
                del self._conditions[condition.key]

    def _say(self, reported: Mapping[str, Sequence[_Condition]], now: float) -> None:
        """Write the Events of health conditions that began, and of those that are over.

        1. A condition begins if it was reported in this round and has no Event yet.
        2. A condition may be over if it was not reported for five minutes, and its node answered in
           this round or left the cluster. `_ended` asks the nodes about such conditions.
        3. Write the Events, at most 200 of each kind. A condition whose Event could not be written
           waits for ten minutes. After several refusals in a namespace, no more Events are written
           in that namespace in this round; after several failures of the API server, no more Events
           at all. Failures are logged, not raised.
        """
        conditions = sorted(self._conditions.values(), key=lambda condition: condition.due_seconds)
        due_conditions = [condition for condition in conditions if condition.due_seconds <= now]
        new_conditions = [
            condition
            for condition in due_conditions
            if condition.subjects is None and condition.seen_seconds == now
        ]
        # Consider only conditions whose node answered in this round, or left the cluster.
        answered_conditions = [
            condition
            for condition in due_conditions
            if condition.node in reported or self._nodes.get(condition.node) is None
        ]
        ending_conditions = [
            condition
            for condition in answered_conditions
            if now - condition.seen_seconds >= _CALM_SECONDS
        ]
        work = [
            (condition, self._beginning(condition)) for condition in _round_robin(new_conditions)
        ]
        if ending_conditions:
            work += self._in_loop(self._ended(_round_robin(ending_conditions)))
        users = VolumeUsers(
            self._objects, self._lists, self._config.driver_name, self._config.topology_key
        )
        problems, refusals = 0, Counter[str]()
        for condition, event in work:
            # Set the time of the next attempt to write the Event, in case this one fails.
            condition.due_seconds = now + _AGAIN_SECONDS
            namespace = ""
            try:
                subjects = self._subjects(condition, users)
                namespace = subjects[0].namespace if subjects else ""
                if refusals[namespace] >= _MOST_FAILURES:
                    # Try this condition in the next round, after those that were not tried yet.
                    condition.due_seconds = now
                    continue
                self._write(condition, event, subjects)
            except (errors.ClusterRefused, errors.ClusterSilent) as error:
                if namespace and error.is_refusal:
                    refusals[namespace] += 1
                else:
                    problems += 1
                if not self._is_refused:
                    why = error.problem if isinstance(error, errors.ClusterSilent) else error
                    _log.error("cannot write Events of volumes' health: %s", why)
                self._is_refused = True
            if problems == _MOST_FAILURES:
                return
        if work and not problems and not refusals.total() and self._is_refused:
            _log.info("Events of volumes' health can be written again")
            self._is_refused = False

    async def _found_conflicts(self) -> Mapping[str, str]:
        """Return the error text of each node whose volume groups other nodes may have, by name."""
        conflicts = {node.name: self._nodes.conflict(node, is_lasting=True) for node in self._nodes}
        return {name: problem for name, problem in conflicts.items() if problem}

    def _warn(self, conflicts: Mapping[str, str]) -> None:
        """Write a warning Event on each Node whose volume groups other nodes have, too.

        `conflicts` has the Events' texts by the Nodes' names. A text that has not changed is not
        written again. Raises ClusterRefused for the first Event that could not be written; the next
        round tries that Event again.
        """
        for name in self._conflicts.keys() - conflicts.keys():
            del self._conflicts[name]
        for name, problem in list(conflicts.items())[:_MOST_SAID]:
            if self._conflicts.get(name) == problem:
                continue
            # Write the Node's name as the UID of the Event's object, as kubelet does: kubectl finds
            # the Events of a Node by that UID.
            subject = Subject("Node", "", name, name)
            event = Event(WARNING, CONTESTED, problem[:_MESSAGE_CHARACTERS], CONTESTED)
            self._events.ensure(subject, event, is_new=True)
            self._conflicts[name] = problem

    async def _ended(
        self, ending_conditions: Sequence[_Condition]
    ) -> list[tuple[_Condition, Event]]:
        """Ask the nodes about health conditions that may be over; return those that are over.

        Each is returned with its Event.

        Conditions that are over without an Event that they began are forgotten, and so are
        conditions whose volume does not exist any more. Conditions that last are looked at again
        after ten minutes. A node is asked for at most ten seconds about its conditions in a round,
        because the Events of all other nodes wait for that.
        """
        limit, ended_events = asyncio.Semaphore(_AT_ONCE), list[tuple[_Condition, Event]]()
        loop, spent_seconds = asyncio.get_running_loop(), defaultdict[str, float](float)

        async def judge(condition: _Condition) -> None:
            async with limit:
                if spent_seconds[condition.node] >= _PATIENCE_SECONDS:
                    # Leave the node's other conditions to the next round: the node's time limit for
                    # this round is used up.
                    return
                start_seconds = loop.time()
                fate, other_reasons = await self._outcome(condition)
                spent_seconds[condition.node] += loop.time() - start_seconds
            if fate is _Fate.LASTS:
                condition.due_seconds = self._monotonic() + _AGAIN_SECONDS
            elif fate is _Fate.OVER and condition.subjects:
                ended_events.append((condition, self._end(condition, other_reasons)))
            else:
                del self._conditions[condition.key]

        await asyncio.gather(*map(judge, ending_conditions))
        return ended_events

    async def _outcome(self, condition: _Condition) -> tuple[_Fate, Sequence[str]]:
        """Ask a volume's node what became of a health condition that the node no longer lists.

        Returns what became of the condition, and the reasons of the volume's present conditions.
        The condition counts as lasting if the node does not answer. The volume counts as gone if
        the node says so, or if the volume has no node and the node that reported it left the
        cluster.

        A node no longer lists a condition also if the node was restarted and has not scanned the
        volume group since.
        """
        request = csi.ControllerGetVolumeHealthRequest(volume_id=condition.key.volume_id)
        try:
            node = await self._nodes.owner(condition.key.volume_id, "volume_id")
            health = (await self._asked(node, _GET, request)).volume_health
        except grpc.aio.AioRpcError as error:
            is_gone = error.code() is grpc.StatusCode.NOT_FOUND
            return (_Fate.GONE if is_gone else _Fate.LASTS), ()
        except NoOwner:
            is_gone = self._nodes.get(condition.node) is None
            return (_Fate.GONE if is_gone else _Fate.LASTS), ()
        except Gone:
            return _Fate.GONE, ()
        except (Exception, asyncio.CancelledError) as error:
            _log.debug(
                "what became of %s is not known: %s", condition.key.volume_id, problem_of(error)
            )
            return _Fate.LASTS, ()
        reasons = [entry.reason for entry in health.health_statuses]
        return (_Fate.LASTS if condition.key.reason in reasons else _Fate.OVER), reasons

    def _subjects(self, condition: _Condition, users: VolumeUsers) -> Sequence[Subject]:
        """Return the claim and the pods on which Events about a condition are written.

        Raises ClusterRefused, ClusterSilent if the API server refuses or does not answer.
        """
        node = self._nodes.get(condition.node)
        is_watched = node is not None and node.is_watched
        return users.of(
            condition.key.volume_id, condition.node, condition.segment, is_watched=is_watched
        )

    def _write(self, condition: _Condition, event: Event, subjects: Sequence[Subject]) -> None:
        """Write an Event about a volume's health condition on the objects in `subjects`.

        If the condition has no Event yet, note that these objects have one now. Otherwise the Event
        says that the condition is over: it is written only on objects that have the first Event,
        and the condition is then forgotten. Raises ClusterRefused if an Event cannot be written.
        """
        if condition.subjects is None:
            for subject in subjects:
                self._events.ensure(subject, event, is_new=condition.is_new)
            if subjects:
                condition.subjects, condition.due_seconds = subjects, 0.0
            return
        for subject in subjects:
            if subject in condition.subjects:
                self._events.ensure(subject, event, is_new=True)
        self._ends[condition.key] = event.times, self._monotonic()
        del self._conditions[condition.key]

    def _beginning(self, condition: _Condition) -> Event:
        message = f"{condition.status}: {condition.message}"
        return self._event(WARNING, condition.key.reason, message, condition)

    def _end(self, condition: _Condition, other_reasons: Sequence[str]) -> Event:
        remaining_text = (
            f"it still has {', '.join(other_reasons)}" if other_reasons else "the volume is healthy"
        )
        return self._event(
            NORMAL, ENDED, f"{condition.key.reason} is over, {remaining_text}", condition
        )

    def _event(self, kind: str, reason: str, message: str, condition: _Condition) -> Event:
        where = f"volume {condition.key.volume_id} on node {condition.node}"
        ends, _ = self._ends.get(condition.key, (0, 0.0))
        key = f"{kind} {condition.key.reason} {condition.key.volume_id}"
        return Event(kind, reason, f"{message}; {where}", key, ends + 1)


def _round_robin(conditions: Iterable[_Condition]) -> Sequence[_Condition]:
    """Return at most 200 of these health conditions, taken from all nodes in turn.

    The first condition of each node comes first, then the second of each node. So no node with many
    conditions keeps those of other nodes out of a round.
    """
    by_node: dict[str, list[_Condition]] = {}
    for condition in conditions:
        by_node.setdefault(condition.node, []).append(condition)
    rows = chain.from_iterable(zip_longest(*by_node.values()))
    return list(islice(filter(None, rows), _MOST_SAID))


def _status(value: int) -> str:
    """Return CSI's name of a VolumeHealthErrorType; the number if this version knows no name."""
    value_descriptor = csi.VolumeHealthErrorType.DESCRIPTOR.values_by_number.get(value)
    return str(value) if value_descriptor is None else value_descriptor.name
