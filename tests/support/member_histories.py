"""Histories of three nodes and one controller, and what must be so whatever happened."""

from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar, cast

import grpc
from enrolled import spec_of
from simulated import SimulatedNode, uuid_of

from agent.core import errors
from agent.core.ids import VolumeId
from agent.extras.controller import routes
from agent.extras.controller.membership import ClusterRecord
from agent.extras.controller.nodes import Nodes, Refused
from agent.extras.kubernetes.objects import CONTENTS, GROUP_CONTENTS, VOLUMES, Keep, Listing
from agent.settings.settings import DRIVER_NAME, TOPOLOGY_KEY

# For how long a node is deleted before what was on it is forgotten, in seconds.
GRACE = 600.0
NAMES = ("a", "b", "c")
T = TypeVar("T")


class Clock:
    """Seconds that go by as a test says."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Memory:
    """An API server's Nodes and PersistentVolumes, in place of Objects and Lists."""

    def __init__(self) -> None:
        # The labels of the Nodes, and the PersistentVolumes, by name.
        self.labels: dict[str, dict[str, str]] = {}
        # How often each Node was made anew.
        self.made_anew: Counter[str] = Counter()
        self.volumes: dict[str, Mapping[str, Any]] = {}
        # VolumeSnapshotContents.
        self.contents: dict[str, Mapping[str, Any]] = {}
        # VolumeGroupSnapshotContents; None where they may not be listed.
        self.group_contents: dict[str, Mapping[str, Any]] | None = None

    def nodes(self) -> Listing:
        # Each cluster has a Node, if only for the API server.
        every = {"control-plane": {}, **self.labels}
        about = [
            {"name": name, "uid": self.uid_of(name), "labels": labels}
            for name, labels in every.items()
        ]
        return Listing([{"metadata": one} for one in about], "1")

    def uid_of(self, name: str) -> str:
        return f"uid-{self.made_anew[name]}-of-{name}"

    def whole(
        self,
        path: str,
        _kind: str,
        *,
        keep: Keep = lambda one: one,
        if_served: bool = False,
        fieldSelector: str = "",  # noqa: N803 - the API's name
    ) -> Listing:
        every = {
            VOLUMES: self.volumes,
            CONTENTS: self.contents,
            GROUP_CONTENTS: self.group_contents,
        }[path]
        if every is None:
            raise errors.ClusterSilent(path, "it answers 403", is_refusal=True)
        if fieldSelector:
            name = fieldSelector.removeprefix("metadata.name=")
            every = {name: every[name]} if name in every else {}
        found = [{"metadata": {"name": name}, **one} for name, one in every.items()]
        return Listing([keep(one) for one in found], "1")

    def find(self, path: str, _kind: str) -> Mapping[str, Any] | None:
        return self.volumes.get(path.rpartition("/")[2])


class History:
    """Three nodes, what happens to them, and what must be so whatever happened.

    Each node has a group of its own, of number 0, 1 or 2. `copies` gives a node the group of the
    next, as a machine template does; `steals` has it claim all groups. A node whose Carver
    `restarts` names none until it `looks`.
    """

    def __init__(self, run: Callable[[Coroutine[Any, Any, T]], T]) -> None:
        """`run` runs what is asynchronous, in one loop for all histories."""
        self._run: Any = run
        self._memory, self.clock = Memory(), Clock()
        self.simulated = {one: SimulatedNode(at, name=one) for at, one in enumerate(NAMES)}
        # The Nodes, and those that had Carver.
        self.nodes: set[str] = set()
        self.labelled: set[str] = set()
        self.broken: set[str] = set()
        self.looking: set[str] = set()
        # Those that have told this controller what they have, and the claims that count by
        # themselves, of groups that no PersistentVolume names.
        self.told: set[str] = set()
        self.settled: set[tuple[str, str]] = set()
        self.claims = {name: {uuid_of(number)} for number, name in enumerate(NAMES)}
        # Which node a group's only volume is on, as its PersistentVolume says.
        self.volumes: dict[str, str] = {}
        self.deleted_since: dict[str, float] = {}
        for name in NAMES:
            self.node_comes(name)
        self.restart()
        for name in NAMES:
            self.makes(name)

    def restart(self) -> None:
        """Another controller, which knows nothing; all nodes that can enrol there and answer."""
        self.record = ClusterRecord(
            *(cast(Any, self._memory), cast(Any, self._memory), DRIVER_NAME),
            grace_seconds=GRACE,
            clock=self.clock,
        )
        self.known = Nodes(DRIVER_NAME, self._connect, self.record)
        self.told, self.settled = set(), set()
        self.deleted_since = dict.fromkeys(self.deleted_since, self.clock.now)
        self.settle()

    def _connect(self, name: str, _address: str) -> Any:
        return _Line(self, name)

    # What happens

    def node_comes(self, name: str) -> None:
        if name not in self.nodes:
            self.nodes.add(name)
            self._memory.labels[name] = {}
            self.broken.discard(name)

    def uid_of(self, name: str) -> str:
        """The UID of the Node of a name."""
        return self._memory.uid_of(name)

    def node_is_made_anew(self, name: str) -> None:
        """As for another machine, which has its disks; between two lists of the Nodes."""
        self._memory.made_anew[name] += 1
        self.told.discard(name)

    def node_goes(self, name: str) -> None:
        self.nodes.discard(name)
        self.labelled.discard(name)
        self._memory.labels.pop(name, None)

    def breaks(self, name: str) -> None:
        self.broken.add(name)

    def mends(self, name: str) -> None:
        self.broken.discard(name)

    def restarts(self, name: str) -> None:
        self.looking.add(name)

    def looks(self, name: str) -> None:
        self.looking.discard(name)

    def loses_disks(self, name: str) -> None:
        self.claims[name] = set()

    def steals(self, name: str) -> None:
        self.claims[name] = {uuid_of(number) for number in range(len(NAMES))}

    def copies(self, name: str) -> None:
        self.claims[name].add(uuid_of((NAMES.index(name) + 1) % len(NAMES)))

    def makes(self, name: str) -> None:
        """A volume on a node's own group, if it has none yet, as the controller would have it."""
        uuid = uuid_of(NAMES.index(name))
        if uuid in self.volumes or name not in self.labelled or name in self.broken:
            return
        node = self.known.get(name)
        if node is None or node.problem or self.known.why_no_new_volumes(node):
            return
        if f"data@{uuid}" not in self.known.places(node):
            return
        self.volumes[uuid] = name
        self._write()

    def removes(self, name: str) -> None:
        if self.volumes.pop(uuid_of(NAMES.index(name)), None):
            self._write()
            self.record.doubt()

    def _write(self) -> None:
        self._memory.volumes = {
            f"pvc-{uuid}": {"spec": spec_of(f"data@{uuid}/vol-pvc-{uuid}", name)}
            for uuid, name in self.volumes.items()
        }

    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    def act(self, name: str, *arguments: Any) -> None:
        getattr(self, name)(*arguments)
        self.settle()

    def settle(self) -> None:
        """Let two minutes go by: nodes enrol and are asked, and lists are read."""
        for name in self.nodes - self.broken:
            self.labelled.add(name)
            self._memory.labels[name] = {TOPOLOGY_KEY: name}
        for _ in range(3):
            self.clock.now += 120
            for name in self.nodes - self.broken:
                self.record.enrol(name, "its address", self.uid_of(name))
            if self.record.is_due:
                self.record.look()
            self._run(self._ask())
            self._note()
        for name in NAMES:
            if name in self.nodes:
                self.deleted_since.pop(name, None)
            elif name in self.volumes.values() or name in self.deleted_since:
                self.deleted_since.setdefault(name, self.clock.now)

    async def _ask(self) -> None:
        self.known.set(self.record.serving)
        for one in self.known:
            if one.address:
                await self.known._ask(one)

    def _note(self) -> None:
        """Note who has told what it has, and which claims are settled by that."""
        members = self.record.members
        self.told = (self.told & members) | (members - self.broken - self.looking)
        for uuid in map(uuid_of, range(len(NAMES))):
            claiming = {one.name for one in self.known if uuid in one.groups}
            for name in NAMES:
                if name not in claiming:
                    self.settled.discard((uuid, name))
            holders = claiming | self.record.nodes_of(uuid)
            is_certain = len(holders) == 1 and not self.record.names_deleted(uuid)
            if is_certain and claiming and not self._unknown(claiming):
                self.settled.add((uuid, next(iter(claiming))))

    def _unknown(self, claiming: set[str]) -> frozenset[str]:
        """The members that may have any group, beside those that claim one."""
        return self.record.members - self.told - claiming

    # What must be so

    def judge(self) -> None:
        members = {one.name: one for one in self.known}
        # Silence changes nothing in who belongs.
        assert members.keys() == self.labelled & self.nodes
        for name, node in members.items():
            is_down = name in self.broken
            assert bool(node.problem) is is_down
            # Nothing is known of it by an earlier machine of its name.
            assert node.uid == self.uid_of(name)
        for uuid in map(uuid_of, range(len(NAMES))):
            self._judge(uuid, members.keys())

    def _judge(self, uuid: str, members: Any) -> None:
        claiming = {one for one in members if uuid in self.known.get(one).groups}  # type: ignore[union-attr]
        named = {self.volumes[uuid]} & members if uuid in self.volumes else set()
        called, code = self._run(self._owner(uuid))
        if uuid in self.volumes:
            # No other node is ever called for what a PersistentVolume names, even a deleted one's.
            assert called in (None, *named)
            if named & claiming - self.broken:
                assert called is not None
        elif len(claiming) != 1:
            assert called is None
        else:
            [name] = claiming
            is_settled = (uuid, name) in self.settled
            assert called == (name if is_settled and name not in self.broken else None)
        if called is not None:
            assert called not in self.broken
        holders = claiming | named
        for name in claiming:
            node = self.known.get(name)
            assert node is not None
            if len(holders) > 1:
                assert uuid in self.known.conflict(node)
            # A node may answer about those groups only for which it may be called.
            unnamed = self._unknown(claiming) - self.record.named
            is_certain = (uuid, name) in self.settled or not unnamed
            is_own = name in named if named else claiming == {name} and is_certain
            assert (f"data@{uuid}" in self.known.places(node)) is is_own
            assert self.known.is_elsewhere(node, VolumeId("data", uuid, "any")) is not is_own
        if code is grpc.StatusCode.NOT_FOUND:
            # Forgotten: its Node is gone for long, and all members answer that they have it not.
            name = self.volumes[uuid]
            assert name not in self.nodes
            assert not claiming
            assert not (self.broken | self.looking) & members
            assert self.clock.now - self.deleted_since[name] >= GRACE - 360

    async def _owner(self, uuid: str) -> tuple[str | None, grpc.StatusCode | None]:
        try:
            found = await self.known.owner(f"data@{uuid}/vol-pvc-{uuid}", "volume_id")
        except Refused as error:
            return None, error.code
        return found.name, None


class _Line:
    """The way to a node of a history."""

    def __init__(self, history: History, name: str) -> None:
        self._history, self._name = history, name

    def unary_unary(self, _path: str) -> Any:
        async def call(_request: bytes, timeout: float | None = None) -> bytes:
            if self._name in self._history.broken or self._name not in self._history.nodes:
                nothing = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "down")
            node = self._history.simulated[self._name]
            looks = self._name not in self._history.looking
            groups = self._history.claims[self._name] if looks else ()
            node.groups = dict.fromkeys(groups, "data")
            node.whole = {routes.IS_WHOLE: routes.YES if looks else ""}
            return await node._info(b"", None)

        return call

    async def close(self, _grace_seconds: float | None = None) -> None:
        """Nothing is open."""


def owner(history: History, uuid: str, name: str) -> str:
    """The node that a call about an id goes to, or what it is refused with."""

    async def asked() -> str:
        try:
            return (await history.known.owner(f"data@{uuid}/{name}", "volume_id")).name
        except Refused as error:
            return f"{error.code.name}: {error}"

    return str(history._run(asked()))


FIRST = uuid_of(0)
