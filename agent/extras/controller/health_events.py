"""Kubernetes Events about volumes that are not healthy, for kubelets that do not ask themselves.

Each node that answers lists its unhealthy volumes. A condition is said once, on the claim and on
the pods that use it then, and once more when the node says that it is over. Nothing is kept on
disk: after a start an Event that is still in the cluster counts as said. A node that does not
answer has no conditions begin or end.
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
# The reason of the Event that says that a condition is over.
ENDED = "ConditionEnded"
# The reason of the Event on a Node one of whose volume groups other nodes have, too.
CONTESTED = "VolumeGroupContested"
# When nodes are first asked: they have enrolled by then.
_FIRST_SECONDS = 30.0
_PATIENCE_SECONDS = 10.0
_AT_ONCE = 16
# A condition is over if no look found it for so long, so that one that comes and goes is said once.
_CALM_SECONDS = 300.0
# What could not be said, as of a volume without a claim, is tried again after so long.
_AGAIN_SECONDS = 600.0
# How long what is over is remembered, to count how often it was: as long as the API server keeps
# Events by default.
_COUNTED_SECONDS = 3600.0
# Of one look: conditions that begin or end; failures after which the API server is left alone, and
# refused Events after which no more are written in a namespace, as in one that is being deleted.
_MOST_SAID, _MOST_FAILURES = 200, 5
# What a node may say: of Kubernetes' own events a reason has 128 bytes, a note 1,024.
_REASON_CHARACTERS, _MESSAGE_CHARACTERS = 128, 1024
# How many entries a node is asked for at once, and how many conditions of one node are kept: what
# it says beyond that has no Event.
_OF_A_PAGE, _MOST_OF_A_NODE = 500, 10_000
# A topology segment that no node has.
_NOWHERE = "?"


class _Key(NamedTuple):
    volume_id: str
    reason: str


class _Fate(enum.Enum):
    """What became of a condition: it lasts or is unknown, is over, or is gone with its volume."""

    LASTS = enum.auto()
    OVER = enum.auto()
    GONE = enum.auto()


@dataclass
class _Condition:
    """A condition that was found, and is not known to be over. Seconds are monotonic."""

    key: _Key
    node: str
    # The node's topology segment, if the group is not known to be there; else empty.
    segment: str
    status: str
    message: str
    # Whether an earlier look at the node did not find it.
    is_new: bool
    # The last look that found it.
    seen_seconds: float = 0.0
    # Not before this it is tried to say that it began, or is over.
    due_seconds: float = 0.0
    # What has an Event about it; None before that.
    subjects: Sequence[Subject] | None = None


class HealthEvents(Extra):
    """Asks the nodes periodically, and writes the Events."""

    def __init__(
        self,
        config: Config,
        nodes: Nodes,
        objects: Objects,
        lists: Lists,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` returns the seconds of the epoch, which Events show, and which may be set."""
        self._config, self._nodes, self._monotonic = config, nodes, monotonic
        self._answers = Answers(nodes)
        self._objects, self._lists = objects, lists
        self._events = Events(objects, config.driver_name, clock)
        # The nodes' event loop, after the start.
        self._loop: asyncio.AbstractEventLoop
        self._conditions: dict[_Key, _Condition] = {}
        # The nodes whose volumes were listed before.
        self._looked: frozenset[str] = frozenset()
        # How often a condition was over, and when it was last.
        self._ends: dict[_Key, tuple[int, float]] = {}
        # What was said of nodes whose groups other nodes have, too.
        self._conflicts: dict[str, str] = {}
        # The nodes whose list failed, and whether an Event could not be written.
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
        """Begin; called in the event loop of the nodes."""
        self._loop = asyncio.get_running_loop()
        self.task.start()

    def stop(self) -> None:
        """Begin no further look."""
        self.task.stop()

    def look(self) -> None:
        """Ask the nodes once, and write what is new; waits for the API server, so not in a loop."""
        try:
            found = self._in_loop(self._ask_all())
            now = self._monotonic()
            self._note(found, now)
            self._say(found, now)
            self._warn(self._in_loop(self._found_conflicts()))
        except CancelledError:
            _log.debug("a look at the volumes' health was cut off")

    def _in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # What the nodes say

    async def _ask_all(self) -> Mapping[str, Sequence[_Condition]]:
        """The conditions of volumes by their node's name, of the nodes that answer."""
        turn, found = asyncio.Semaphore(_AT_ONCE), dict[str, Sequence[_Condition]]()
        problems: dict[str, str] = {}

        async def ask(node: Node) -> None:
            async with turn:
                try:
                    async with asyncio.timeout(_PATIENCE_SECONDS):
                        found[node.name] = await self._listed(node)
                except (Exception, asyncio.CancelledError) as error:
                    problems[node.name] = problem_of(error)

        await asyncio.gather(*map(ask, self._nodes.answering()))
        for name in problems.keys() - self._silent:
            text = "node %s does not say which of its volumes are healthy: %s"
            _log.warning(text, name, problems[name])
        self._silent = frozenset(problems)
        return found

    async def _listed(self, node: Node) -> Sequence[_Condition]:
        """The conditions of one node's volumes, of all pages; the first ones of too many."""
        found = list[_Condition]()
        request = csi.ControllerListVolumeHealthRequest(max_entries=_OF_A_PAGE)
        while True:
            answer = await self._asked(node, _LIST, request)
            for one in answer.entries:
                parsed = VolumeId.parse(one.volume_id)
                if parsed is not None:
                    found += self._of_volume(node, parsed, one)
                if len(found) >= _MOST_OF_A_NODE:
                    return found[:_MOST_OF_A_NODE]
            if not answer.next_token:
                return found
            request.starting_token = answer.next_token

    async def _asked(self, node: Node, path: str, request: Message) -> Any:
        """A node's answer. Raises AioRpcError, Refused."""
        data = request.SerializeToString()
        # What two nodes may have costs no Event about what one of them has alone.
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
                _Key(health.volume_id, one.reason[:_REASON_CHARACTERS]),
                node.name,
                segment,
                _status(one.status),
                one.message[:_MESSAGE_CHARACTERS],
                is_new=node.name in self._looked,
            )
            for one in health.health_statuses
        ]

    # What is said of it

    def _note(self, found: Mapping[str, Sequence[_Condition]], now: float) -> None:
        """Take the conditions that were found."""
        for conditions in found.values():
            for one in conditions:
                known = self._conditions.setdefault(one.key, one)
                known.node, known.segment = one.node, one.segment
                known.status, known.message, known.seen_seconds = one.status, one.message, now
        self._forget(found)
        looked = self._looked.union(found)
        self._looked = frozenset(one for one in looked if self._nodes.get(one) is not None)
        lately = now - _COUNTED_SECONDS
        self._ends = {key: one for key, one in self._ends.items() if one[1] > lately}

    def _forget(self, nodes: Iterable[str]) -> None:
        """Forget of each node, above the most, what it named the longest ago."""
        of = {name: list[_Condition]() for name in nodes}
        for one in self._conditions.values():
            if one.node in of:
                of[one.node].append(one)
        for every in of.values():
            every.sort(key=lambda one: one.seen_seconds, reverse=True)
            for one in every[_MOST_OF_A_NODE:]:
                del self._conditions[one.key]

    def _say(self, found: Mapping[str, Sequence[_Condition]], now: float) -> None:
        """Write what began and what is over; what fails is tried again later."""
        every = sorted(self._conditions.values(), key=lambda one: one.due_seconds)
        due = [one for one in every if one.due_seconds <= now]
        begun = [one for one in due if one.subjects is None and one.seen_seconds == now]
        # Only what its node did not name although it answered, or whose node left the cluster.
        left = [one for one in due if one.node in found or self._nodes.get(one.node) is None]
        ending = [one for one in left if now - one.seen_seconds >= _CALM_SECONDS]
        work = [(one, self._beginning(one)) for one in _in_turn(begun)]
        if ending:
            work += self._in_loop(self._ended(_in_turn(ending)))
        users = VolumeUsers(
            self._objects, self._lists, self._config.driver_name, self._config.topology_key
        )
        problems, refusals = 0, Counter[str]()
        for one, event in work:
            # Unless this succeeds.
            one.due_seconds = now + _AGAIN_SECONDS
            namespace = ""
            try:
                subjects = self._subjects(one, users)
                namespace = subjects[0].namespace if subjects else ""
                if refusals[namespace] >= _MOST_FAILURES:
                    # At the next look, after what was not tried yet.
                    one.due_seconds = now
                    continue
                self._write(one, event, subjects)
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
        """What is wrong with nodes' groups that other nodes have, too."""
        every = {one.name: self._nodes.conflict(one, is_lasting=True) for one in self._nodes}
        return {name: problem for name, problem in every.items() if problem}

    def _warn(self, conflicts: Mapping[str, str]) -> None:
        """Write an Event on each Node whose groups other nodes have, too; once while it lasts.

        Raises ClusterRefused; what could not be written is tried again with the next look.
        """
        for name in self._conflicts.keys() - conflicts.keys():
            del self._conflicts[name]
        for name, problem in list(conflicts.items())[:_MOST_SAID]:
            if self._conflicts.get(name) == problem:
                continue
            # Of a Node kubectl shows the Events of this UID, which are kubelet's, too.
            subject = Subject("Node", "", name, name)
            event = Event(WARNING, CONTESTED, problem[:_MESSAGE_CHARACTERS], CONTESTED)
            self._events.ensure(subject, event, is_new=True)
            self._conflicts[name] = problem

    async def _ended(self, ending: Sequence[_Condition]) -> list[tuple[_Condition, Event]]:
        """The Events of conditions that are over by the word of the volumes' nodes.

        Those that nothing is to be said of are forgotten. A node that takes its time for each has
        no more of it than one answer may take: the Events of all others wait for this.
        """
        turn, over = asyncio.Semaphore(_AT_ONCE), list[tuple[_Condition, Event]]()
        loop, spent = asyncio.get_running_loop(), defaultdict[str, float](float)

        async def judge(one: _Condition) -> None:
            async with turn:
                if spent[one.node] >= _PATIENCE_SECONDS:
                    # Its turn is over; what is left has one at the next look.
                    return
                begun = loop.time()
                fate, others = await self._fate(one)
                spent[one.node] += loop.time() - begun
            if fate is _Fate.LASTS:
                one.due_seconds = self._monotonic() + _AGAIN_SECONDS
            elif fate is _Fate.OVER and one.subjects:
                over.append((one, self._end(one, others)))
            else:
                del self._conditions[one.key]

        await asyncio.gather(*map(judge, ending))
        return over

    async def _fate(self, one: _Condition) -> tuple[_Fate, Sequence[str]]:
        """What became of a condition that a list lacks, and the reasons that the volume has.

        A list lacks it also where a node was restarted and has not seen the group since.
        """
        request = csi.ControllerGetVolumeHealthRequest(volume_id=one.key.volume_id)
        try:
            node = await self._nodes.owner(one.key.volume_id, "volume_id")
            health = (await self._asked(node, _GET, request)).volume_health
        except grpc.aio.AioRpcError as error:
            is_gone = error.code() is grpc.StatusCode.NOT_FOUND
            return (_Fate.GONE if is_gone else _Fate.LASTS), ()
        except NoOwner:
            is_gone = self._nodes.get(one.node) is None
            return (_Fate.GONE if is_gone else _Fate.LASTS), ()
        except Gone:
            return _Fate.GONE, ()
        except (Exception, asyncio.CancelledError) as error:
            _log.debug("what became of %s is not known: %s", one.key.volume_id, problem_of(error))
            return _Fate.LASTS, ()
        reasons = [entry.reason for entry in health.health_statuses]
        return (_Fate.LASTS if one.key.reason in reasons else _Fate.OVER), reasons

    def _subjects(self, one: _Condition, users: VolumeUsers) -> Sequence[Subject]:
        """What a condition concerns. Raises ClusterRefused, ClusterSilent."""
        node = self._nodes.get(one.node)
        is_watched = node is not None and node.is_watched
        return users.of(one.key.volume_id, one.node, one.segment, is_watched=is_watched)

    def _write(self, one: _Condition, event: Event, found: Sequence[Subject]) -> None:
        """Write one Event on all that it concerns. Raises ClusterRefused."""
        if one.subjects is None:
            for subject in found:
                self._events.ensure(subject, event, is_new=one.is_new)
            if found:
                one.subjects, one.due_seconds = found, 0.0
            return
        for subject in found:
            if subject in one.subjects:
                self._events.ensure(subject, event, is_new=True)
        self._ends[one.key] = event.times, self._monotonic()
        del self._conditions[one.key]

    def _beginning(self, one: _Condition) -> Event:
        message = f"{one.status}: {one.message}"
        return self._event(WARNING, one.key.reason, message, one)

    def _end(self, one: _Condition, others: Sequence[str]) -> Event:
        rest = f"it still has {', '.join(others)}" if others else "the volume is healthy"
        return self._event(NORMAL, ENDED, f"{one.key.reason} is over, {rest}", one)

    def _event(self, kind: str, reason: str, message: str, one: _Condition) -> Event:
        where = f"volume {one.key.volume_id} on node {one.node}"
        ends, _ = self._ends.get(one.key, (0, 0.0))
        key = f"{kind} {one.key.reason} {one.key.volume_id}"
        return Event(kind, reason, f"{message}; {where}", key, ends + 1)


def _in_turn(conditions: Iterable[_Condition]) -> Sequence[_Condition]:
    """As many as one look says: the first of each node, then the second of each."""
    of: dict[str, list[_Condition]] = {}
    for one in conditions:
        of.setdefault(one.node, []).append(one)
    rows = chain.from_iterable(zip_longest(*of.values()))
    return list(islice(filter(None, rows), _MOST_SAID))


def _status(value: int) -> str:
    """CSI's word, or the number of a newer one."""
    found = csi.VolumeHealthErrorType.DESCRIPTOR.values_by_number.get(value)
    return str(value) if found is None else found.name
