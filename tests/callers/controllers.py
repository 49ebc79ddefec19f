"""Two controllers of a cluster in memory, in two pods: each may die at a step, one is asked.

A controller is the real router with the real nodes, over TLS to each machine's real listener. What
is not real is its clock, which is the cluster's, and the way to a node: it leads to wherever that
serves by now, and is cut at once where it is off.
"""

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from authority import Authority
from callers import machines
from callers.api import Api
from callers.attaching import Attacher
from callers.cluster import Backoff, Cluster
from callers.machines import Machine
from callers.objects import StorageClass
from callers.plugin import Plugin
from callers.sidecars import ClusterResizer, Provisioner, Snapshotter
from clustered import Loop

from agent.core.ids import VolumeId
from agent.csi.client import Client
from agent.extras.controller import nodes
from agent.extras.controller.claims import ClaimQuestions, Claims
from agent.extras.controller.membership import Record, Serving
from agent.extras.controller.nodes import Nodes
from agent.extras.controller.router import Router
from agent.extras.tls import certificates
from agent.extras.tls.certificates import Certificates
from agent.settings.settings import DRIVER_NAME, TOPOLOGY_KEY
from agent.settings.values import Address

CLASSES = {
    **machines.CLASSES,
    "now": StorageClass("now", {"carver/class": "fast"}, is_immediate=True),
    "allowed": StorageClass("allowed", {"carver/class": "fast"}, True, ("a", "b")),
}
NAMES = "abc"
_FOR_EVER = 1 << 40


class Line:
    """A channel to a node, for one controller."""

    def __init__(self, controller: "Controller", name: str) -> None:
        self._controller, self._name = controller, name
        # By the ports where it served: to the last one, and those before.
        self._channels: dict[int, grpc.aio.Channel] = {}

    def unary_unary(self, path: str) -> Any:
        async def call(request: bytes, timeout: float | None = None) -> bytes:
            is_counted = not path.endswith("GetPluginInfo")
            if is_counted:
                await self._controller.take_step()
            send: Any = self._connected().unary_unary(path)
            answer: bytes = await send(request, timeout=timeout)
            if is_counted:
                await self._controller.take_step()
            return answer

        return call

    def _connected(self) -> grpc.aio.Channel:
        port = self._controller.machines[self._name].port
        if not port:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.UNAVAILABLE, nothing, nothing, "no route to host"
            )
        if port not in self._channels:
            self._channels[port] = grpc.aio.secure_channel(
                f"127.0.0.1:{port}",
                self._controller.certificates.for_client(),
                certificates.options(certificates.node_name(self._name, DRIVER_NAME)),
            )
        return self._channels[port]

    async def close(self, _grace_seconds: float | None = None) -> None:
        for one in self._channels.values():
            await one.close()


class Volumes(Record):
    """The cluster's PersistentVolumes, as a controller knows them: always the present ones."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def nodes_of(self, group_uuid: str) -> frozenset[str]:
        return frozenset(
            one.node
            for one in self._cluster.volumes()
            if (parsed := VolumeId.parse(one.id)) and parsed.group_uuid == group_uuid
            if one.node in self._cluster.nodes
        )

    def names_deleted(self, group_uuid: str) -> bool:
        return any(
            (parsed := VolumeId.parse(one.id)) is not None
            and parsed.group_uuid == group_uuid
            and one.node not in self._cluster.nodes
            for one in self._cluster.volumes()
        )

    def node_of(self, identity: VolumeId, begun: float) -> str | None:
        every = self._cluster.volumes()
        named = next((one.node for one in every if one.id == str(identity)), None)
        return named if named is None or named in self._cluster.nodes else ""


class Controller:
    """One process: it knows nothing when it starts."""

    def __init__(
        self,
        endpoint: Path,
        found: Certificates,
        every: Mapping[str, Machine],
        loop: Loop,
        api: Api,
        record: Record,
        *,
        attach: bool,
    ) -> None:
        self._attach = attach
        self.certificates, self.machines, self.loop = found, every, loop
        claims = Claims(api.objects, api.lists, DRIVER_NAME, TOPOLOGY_KEY)
        self._questions = ClaimQuestions(claims)
        self._record = record
        # The number of steps after which it dies; a step is a call to a node, or its answer.
        self.dies_after = -1
        self.steps = 0
        self.is_dead = False
        self._server_ends: asyncio.Task[None] | None = None
        loop.run(self._start(endpoint))
        self.client = Client(endpoint)

    async def _start(self, endpoint: Path) -> None:
        self.nodes = Nodes(
            DRIVER_NAME, lambda name, _: cast(grpc.aio.Channel, Line(self, name)), self._record
        )
        self._server = grpc.aio.server()
        questions, attach = self._questions, self._attach
        router = Router(self.nodes, DRIVER_NAME, "0", questions=questions, attach=attach)
        router.add_to(self._server)
        self._server.add_insecure_port(f"unix://{endpoint}")
        await self._server.start()
        self._know_nodes()
        await self._look()

    def _know_nodes(self) -> None:
        self.nodes.set(dict.fromkeys(self.machines, Serving("its address")))

    def forget_nodes(self) -> None:
        """Know no node any more that is not among the machines."""

        async def forget() -> None:
            self._know_nodes()

        self.loop.run(forget())

    async def take_step(self) -> None:
        """Count a step of a call; die at the one that is chosen."""
        if self.steps == self.dies_after:
            self.is_dead = True
            self._end_server(None)
            await asyncio.Event().wait()
        self.steps += 1

    def _end_server(self, grace_seconds: float | None) -> asyncio.Task[None]:
        """End the server once, though it dies at several calls and is stopped afterwards.

        `grpc.aio.Server.stop` destroys the server when its last call has ended, and another `stop`
        that is under way then cancels the calls of a null pointer (grpcio 1.85.1).
        """
        if self._server_ends is None:
            self._server_ends = asyncio.create_task(self._server.stop(grace_seconds))
        return self._server_ends

    def look(self) -> None:
        """What it does each second; then its nodes' answers are waited for."""
        self.loop.run(self._look())

    async def _look(self) -> None:
        self.nodes.ask_due()
        await asyncio.gather(*(one.asking for one in self.nodes if one.asking is not None))

    def stop(self) -> None:
        self.client.__exit__(None, None, None)
        self.loop.run(self._end())

    async def _end(self) -> None:
        await self._end_server(10)
        await self.nodes.close()
        self._questions.stop()


class Central:
    """Three nodes, two controllers, and the sidecars in the pod of the one that leads."""

    def __init__(
        self, directory: Path, classes: Mapping[str, StorageClass], *, attach: bool
    ) -> None:
        self.cluster = Cluster(classes, is_central=True, attaches=attach)
        self.api = Api(self.cluster)
        # Those whose Node object was deleted.
        self._deleted: set[str] = set()
        self.directory, self.loop = directory, Loop()
        self._authority, self._serial = Authority(), itertools.count(1)
        shown = self._authority.write(
            directory / "controller", certificates.controller_name(DRIVER_NAME)
        )
        self._certificates = Certificates.read(shown)
        self.machines: dict[str, Machine] = {}
        for name in NAMES:
            self.install(name)
        self.controllers = [self._controller(), self._controller()]
        self._leader = 0
        self.plugin = Plugin(self.leader.client, self.cluster.answers.append)
        self.cluster.sidecars = [
            kind(self.cluster, "", self.plugin)
            for kind in (Provisioner, Snapshotter, ClusterResizer, *[Attacher] * attach)
        ]
        self.cluster.supervisors.append(self._supervise)

    @property
    def leader(self) -> Controller:
        return self.controllers[self._leader]

    def install(self, name: str) -> None:
        """Have a node of that name, new: one that has it already is gone, and its disks."""
        if (old := self.machines.get(name)) is not None:
            old.stop()
            self.cluster.supervisors.remove(old.ensure_alive)
        shown = certificates.node_name(name, DRIVER_NAME)
        self.machines[name] = machines.machine(
            *(self.cluster, self.directory, name, next(self._serial)),
            controller_address=Address("127.0.0.1", 0),
            tls_directory=self._authority.write(self.directory / "tls" / name, shown),
            attach=self.cluster.attaches,
        )

    def delete_node(self, name: str) -> None:
        """A node is lost for good, and people delete its Node object: its pods go with it.

        The controllers know it as one that is silent, until `forget_deleted`.
        """
        self.machines[name].switch_off(_FOR_EVER)
        self._deleted.add(name)
        del self.cluster.nodes[name]
        for key in [one for one in self.cluster.capacities if one[0] == name]:
            del self.cluster.capacities[key]
        for pod in [one for one in self.cluster.pods if one.node == name]:
            self.cluster.pods.remove(pod)

    def forget_deleted(self) -> None:
        """Have the controllers know the nodes no more that were deleted."""
        for name in self._deleted:
            self.cluster.supervisors.remove(self.machines.pop(name).ensure_alive)
        self._deleted.clear()
        for one in self.controllers:
            one.forget_nodes()

    def run_until_all_answer(self) -> None:
        """Let time go by until all nodes are on, and the controller that leads knows it."""
        assert self.cluster.run_until(
            lambda: (
                not any(
                    [one.node.is_off or one.is_dead for one in self.machines.values()]
                    + [bool(one.problem) for one in self.leader.nodes]
                )
            )
        )

    def let_live(self) -> None:
        """Have all nodes on, with all their groups, and nothing that is yet to die.

        But for those that were deleted.
        """
        self.forget_deleted()
        for machine in self.machines.values():
            machine.switch_on()
            machine.find_again()
            machine.restart()
        for controller in self.controllers:
            controller.dies_after = -1
        self.run_until_all_answer()

    def change_leader(self) -> None:
        """The other controller's sidecars go on, and know only what the API has."""
        self._leader = 1 - self._leader
        self.plugin.client = self.leader.client
        for one in self.cluster.sidecars:
            one.lose()

    def _supervise(self) -> None:
        for number, one in enumerate(self.controllers):
            if one.is_dead:
                one.stop()
                self.controllers[number] = self._controller()
                if number == self._leader:
                    self.change_leader()
            else:
                one.look()

    def _controller(self) -> Controller:
        endpoint = self.directory / f"controller-{next(self._serial)}.sock"
        known = (endpoint, self._certificates, self.machines, self.loop, self.api)
        return Controller(*known, Volumes(self.cluster), attach=self.cluster.attaches)

    def stop(self) -> None:
        for one in self.controllers:
            one.stop()
        for machine in self.machines.values():
            machine.stop()
        self.loop.stop()


@contextmanager
def central(
    directory: Path, classes: Mapping[str, StorageClass] = CLASSES, *, attach: bool = False
) -> Iterator[Central]:
    """The whole, whose controllers' clock is the cluster's."""
    with pytest.MonkeyPatch.context() as patch:
        # Zero until the cluster is there.
        now = Backoff()
        patch.setattr(nodes, "time", SimpleNamespace(monotonic=lambda: now.now + 1.0))
        made = Central(directory, classes, attach=attach)
        now = made.cluster.backoff
        try:
            yield made
        finally:
            made.stop()
