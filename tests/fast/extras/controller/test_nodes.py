"""The controller with simulated nodes: hung, dead, and such as claim another's group."""

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import simulated
from authority import Authority
from hypothesis import example, given
from hypothesis import strategies as st
from relay import Relay
from simulated import SimulatedNode, name_of, uuid_of

from agent.core import errors
from agent.core.ids import VolumeId
from agent.csi.client import of_snapshot
from agent.extras.controller import lists, nodes, placement, routes
from agent.extras.controller.answer_rules import Asked, Row
from agent.extras.controller.controller_metrics import Metrics
from agent.extras.controller.controller_process import ClusterController, Files
from agent.extras.controller.membership import Record, Serving
from agent.extras.controller.node_answers import Answers
from agent.extras.tls import certificates
from agent.settings.settings import DRIVER_NAME, TOPOLOGY_KEY, Config
from proto import carver_pb2 as carver
from proto import csi_pb2 as csi

# A field that this version does not know: number 900, of bytes.
UNKNOWN = b"\xa2\x38\x05newer"


class Named(Record):
    """What PersistentVolumes name, as the test says: of each volume in a group, or of some."""

    def __init__(self) -> None:
        # The nodes by groups, and by volumes where a group has several.
        self.groups: dict[str, set[str]] = {}
        self.volumes: dict[str, str] = {}
        self.doubts = 0
        # Whether PersistentVolumes are not read again; and what happens while that is asked.
        self.is_old = False
        self.meanwhile: Callable[[], object] = lambda: None

    def nodes_of(self, group_uuid: str) -> frozenset[str]:
        return frozenset(self.groups.get(group_uuid, ()))

    def node_of(self, identity: VolumeId, begun: float) -> str | None:
        every = self.groups.get(identity.group_uuid, ())
        return self.volumes.get(str(identity), next(iter(every)) if len(every) == 1 else None)

    def doubt(self) -> None:
        self.doubts += 1

    def is_newer(self, moment: float) -> bool:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        return not self.is_old


class Cluster:
    """Simulated nodes, the controller before them, and a sidecar's channel to it; one loop."""

    def __init__(self, config: Config, authority: Authority, count: int) -> None:
        self.config, self.authority = config, authority
        self.nodes = [SimulatedNode(number) for number in range(count)]
        assert config.tls_directory is not None
        assert config.nodes_file is not None
        self._file, self._directory = config.nodes_file, config.tls_directory.parent
        self.record = Named()

    async def start(self) -> None:
        self.addresses = {
            one.name: await one.start(self.authority, self._directory / "node")
            for one in self.nodes
        }
        self.write(*self.addresses)
        self.begin()
        await self.controller.start()
        await self.ask()
        self.channel = grpc.aio.insecure_channel(f"unix://{self.config.endpoint}")

    def begin(self) -> None:
        """Have a controller that knows nothing yet."""
        source = Files(self.config)
        source.record = self.record
        self.controller = ClusterController(self.config, source)

    def write(self, *names: str) -> None:
        lines = [f'"{one}" = "{self.addresses[one]}"\n' for one in names]
        self._file.write_text("[nodes]\n" + "".join(lines))

    async def ask(self) -> None:
        known = self.controller.nodes
        await asyncio.gather(*map(known.ask, known))

    async def get(self, number: int, seconds: float = 20) -> str:
        """Ask for a volume of a group; the node that answered."""
        call: Any = self.channel.unary_unary("/csi.v1.Controller/ControllerGetVolume")
        request = csi.ControllerGetVolumeRequest(volume_id=f"data@{uuid_of(number)}/vol-1")
        answer = await call(request.SerializeToString(), timeout=seconds)
        volume = csi.ControllerGetVolumeResponse.FromString(answer).volume
        return str(volume.volume_context["carver/node"])

    async def refused(self, number: int, seconds: float = 20) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await self.get(number, seconds)
        return raised.value.code(), str(raised.value.details())

    async def create(self, name: str, source: str = "", seconds: float = 20) -> str:
        """Create a volume that may be anywhere, or a copy; the node that it is on."""
        call: Any = self.channel.unary_unary("/csi.v1.Controller/CreateVolume")
        request = csi.CreateVolumeRequest(
            name=name, volume_content_source=of_snapshot(source) if source else None
        )
        answer = await call(request.SerializeToString(), timeout=seconds)
        volume = csi.CreateVolumeResponse.FromString(answer).volume
        return str(volume.accessible_topology[0].segments[TOPOLOGY_KEY])

    async def room(self, name: str) -> tuple[int, int]:
        """What a node has room for in total, and for the largest volume."""
        call: Any = self.channel.unary_unary("/csi.v1.Controller/GetCapacity")
        request = csi.GetCapacityRequest(accessible_topology=topology(name))
        answer = csi.GetCapacityResponse.FromString(
            await call(request.SerializeToString(), timeout=20)
        )
        return answer.available_capacity, answer.maximum_volume_size.value

    async def refused_new(self, name: str, node: str) -> tuple[grpc.StatusCode, str]:
        """Create a volume on a node, which is refused."""
        call: Any = self.channel.unary_unary("/csi.v1.Controller/CreateVolume")
        request = csi.CreateVolumeRequest(name=name)
        request.accessibility_requirements.preferred.append(topology(node))
        return await _ended(call(request.SerializeToString(), timeout=20))

    async def status(self) -> carver.NodesResponse:
        call: Any = self.channel.unary_unary("/carver.v2.Cluster/Nodes")
        return carver.NodesResponse.FromString(await call(b""))

    async def until_silent(self, node: SimulatedNode) -> None:
        """Wait until the controller knows by itself that a node does not answer."""
        known = self.controller.nodes.get(node.name)
        assert known is not None
        until = time.monotonic() + 5
        while not known.problem:
            assert time.monotonic() < until
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        await self.channel.close()
        for one in self.nodes:
            one.answers.set()
            one.info_answers.set()
            one.creates.set()
        await self.controller.stop()
        for one in self.nodes:
            await one.stop()


def topology(name: str) -> csi.Topology:
    return csi.Topology(segments={TOPOLOGY_KEY: name})


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(placement, "_PATIENCE_SECONDS", 0.5)


@pytest.fixture
def in_cluster(
    config: Config, tmp_path: Path
) -> Callable[[Callable[[Cluster], Awaitable[None]]], None]:
    """Run a test of four nodes in an event loop."""
    authority = Authority()
    own = certificates.controller_name(DRIVER_NAME)
    changes: dict[str, Any] = {
        "endpoint": tmp_path / "csi.sock",
        "tls_directory": authority.write(tmp_path / "controller", own),
        "nodes_file": tmp_path / "nodes.toml",
        "attach": True,
    }
    changed = replace(config, **changes)

    @asynccontextmanager
    async def made() -> AsyncIterator[Cluster]:
        cluster = Cluster(changed, authority, 4)
        await cluster.start()
        try:
            yield cluster
        finally:
            await cluster.stop()

    def run(test: Callable[[Cluster], Awaitable[None]]) -> None:
        async def whole() -> None:
            async with made() as cluster:
                await test(cluster)

        asyncio.run(whole())

    return run


Run = Callable[[Callable[[Cluster], Awaitable[None]]], None]


def test_each_call_is_answered_by_the_node_of_its_group(in_cluster: Run) -> None:
    async def test(cluster: Cluster) -> None:
        for number in (0, 1, 2, 3, 2, 0):
            assert await cluster.get(number) == name_of(number)

    in_cluster(test)


def test_a_hung_node_costs_its_own_calls_and_only_for_a_moment(in_cluster: Run) -> None:
    async def test(cluster: Cluster) -> None:
        hung = cluster.nodes[1]
        hung.answers.clear()
        waiting = [asyncio.create_task(cluster.refused(1, 1)) for _ in range(50)]
        begun = time.monotonic()
        assert await asyncio.gather(*(cluster.get(one) for one in (0, 2, 3))) == [
            name_of(one) for one in (0, 2, 3)
        ]
        assert time.monotonic() - begun < 0.9
        for code, _ in await asyncio.gather(*waiting):
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        # The failure had it asked, and that it did not answer either is known from then on.
        await cluster.until_silent(hung)
        begun = time.monotonic()
        code, why = await cluster.refused(1)
        assert time.monotonic() - begun < 1
        assert code is grpc.StatusCode.UNAVAILABLE
        assert f"node {hung.name} (127.0.0.1:{hung.port}) does not answer: DEADLINE_EXC" in why
        hung.answers.set()
        await cluster.ask()
        assert await cluster.get(1) == hung.name

    in_cluster(test)


def test_a_caller_that_gives_up_has_the_node_s_call_cancelled(in_cluster: Run) -> None:
    async def test(cluster: Cluster) -> None:
        node = cluster.nodes[0]
        node.answers.clear()
        call = asyncio.create_task(cluster.get(0))
        while not node.calls:
            await asyncio.sleep(0.01)
        call.cancel()
        while not node.cancelled:
            await asyncio.sleep(0.01)

    in_cluster(test)


def test_a_node_that_starts_again_is_asked_anew(in_cluster: Run) -> None:
    async def test(cluster: Cluster) -> None:
        node = cluster.nodes[0]
        await node.stop()
        code, why = await cluster.refused(0)
        assert (code, why.startswith(f"node {node.name}")) == (grpc.StatusCode.UNAVAILABLE, True)
        await node.start(cluster.authority, cluster._directory / "node")
        until = time.monotonic() + 20
        while True:
            await cluster.ask()
            known = cluster.controller.nodes.get(node.name)
            assert known is not None
            if not known.problem:
                break
            assert time.monotonic() < until
        assert await cluster.get(0) == node.name

    in_cluster(test)


def test_a_group_that_moved_to_another_node_is_found_there(in_cluster: Run) -> None:
    async def test(cluster: Cluster) -> None:
        first, second = cluster.nodes[:2]
        second.groups |= first.groups
        first.groups = {}
        assert await cluster.get(0) == second.name

    in_cluster(test)


def test_a_copy_is_made_where_its_source_moved_to(in_cluster: Run) -> None:
    async def test(cluster: Cluster) -> None:
        first, second = cluster.nodes[:2]
        second.groups |= first.groups
        first.groups = {}
        source = f"data@{uuid_of(0)}/snap-1"
        assert await cluster.create("new-1", source) == second.name

    in_cluster(test)


def test_a_group_that_its_node_no_longer_has_is_never_said_to_be_gone(in_cluster: Run) -> None:
    """As of a node that was installed anew under its old name."""

    async def test(cluster: Cluster) -> None:
        cluster.nodes[0].groups = {"n9999999": "data"}
        code, why = await cluster.refused(0)
        assert code is grpc.StatusCode.UNAVAILABLE
        assert f"no node that answers has volume group data ({uuid_of(0)})" in why

    in_cluster(test)


def test_a_volume_that_may_be_anywhere_waits_for_the_node_that_may_have_it(
    in_cluster: Run,
) -> None:
    async def test(cluster: Cluster) -> None:
        hung = cluster.nodes[3]
        assert await cluster.create("new-1") == hung.name
        hung.creates.clear()
        create = asyncio.create_task(cluster.create("new-2"))
        while "vol-new-2" not in hung.created:
            await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await cluster.create("new-2")
        assert raised.value.code() is grpc.StatusCode.ABORTED
        create.cancel()
        hung.answers.clear()
        await cluster.ask()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await cluster.create("new-2")
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert f"node {hung.name} " in str(raised.value.details())
        # It was not sent there, and goes elsewhere.
        assert await cluster.create("new-3") == name_of(2)
        hung.answers.set()
        hung.creates.set()
        await cluster.ask()
        assert await cluster.create("new-2") == hung.name

    in_cluster(test)


def test_a_volume_that_may_be_anywhere_goes_on_where_it_is_being_filled(in_cluster: Run) -> None:
    """As one that another controller began, and whose extents are zeroed."""

    async def test(cluster: Cluster) -> None:
        filling = cluster.nodes[1]
        filling.fails["ControllerGetVolume"] = grpc.StatusCode.ABORTED
        assert await cluster.create("new-1") == filling.name

    in_cluster(test)


def has_it(node: SimulatedNode) -> None:
    node.created.add("vol-new-1")


def fails_with(code: grpc.StatusCode) -> Callable[[SimulatedNode], None]:
    return lambda node: node.fails.update({"ControllerGetVolume": code})


@pytest.mark.parametrize("out_of", ["nothing", "a claim of two", "what another is named for"])
@pytest.mark.parametrize(
    "says",
    [
        has_it,
        *map(fails_with, (grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE)),
        fails_with(grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
    ids=["has it", "fills it", "silent disk", "slow"],
)
@pytest.mark.parametrize("is_another_unsure", [True, False])
def test_a_volume_that_may_be_anywhere_is_made_on_no_other_while_it_may_be_on_one(
    in_cluster: Run,
    says: Callable[[SimulatedNode], None],
    out_of: str,
    is_another_unsure: bool,
) -> None:
    """As one that an earlier controller made, before the node's group was in doubt."""

    async def test(cluster: Cluster) -> None:
        first, other = cluster.nodes[1:3]
        says(first)
        if out_of == "a claim of two":
            other.groups = dict(first.groups)
        elif out_of == "what another is named for":
            cluster.record.groups[uuid_of(1)] = {other.name}
        if is_another_unsure:
            fails_with(grpc.StatusCode.UNAVAILABLE)(cluster.nodes[3])
        before = [set(one.created) for one in cluster.nodes]
        await cluster.ask()
        [said] = await asyncio.gather(cluster.create("new-1"), return_exceptions=True)
        if isinstance(said, grpc.aio.AioRpcError):
            assert said.code() is grpc.StatusCode.UNAVAILABLE
            assert [one.created for one in cluster.nodes] == before
        else:
            assert (said, out_of) == (first.name, "nothing")

    in_cluster(test)


def test_a_group_that_hangs_on_a_node_that_is_long_known_holds_up_no_volume_that_may_be_anywhere(
    in_cluster: Run,
) -> None:
    """What an earlier controller may have begun there is over by then."""

    async def test(cluster: Cluster) -> None:
        await cluster.ask()
        fails_with(grpc.StatusCode.UNAVAILABLE)(cluster.nodes[1])
        with pytest.raises(grpc.aio.AioRpcError):
            await cluster.create("new-1")
        for one in cluster.controller.nodes:
            one.joined_seconds -= 121
        assert await cluster.create("new-1") != cluster.nodes[1].name

    in_cluster(test)


@pytest.mark.parametrize("allowed", [(1, 2), (0, 1, 2)])
def test_a_volume_that_may_be_anywhere_and_is_not_there_is_made_where_no_group_is_in_doubt(
    in_cluster: Run, allowed: tuple[int, ...]
) -> None:
    async def test(cluster: Cluster) -> None:
        cluster.nodes[2].groups = dict(cluster.nodes[1].groups)
        await cluster.ask()
        request = csi.CreateVolumeRequest(name="new-1")
        for one in allowed:
            request.accessibility_requirements.requisite.append(topology(name_of(one)))
        call: Any = cluster.channel.unary_unary("/csi.v1.Controller/CreateVolume")
        asked = call(request.SerializeToString(), timeout=20)
        if 0 in allowed:
            await asked
            assert "vol-new-1" in cluster.nodes[0].created
        else:
            code, why = await _ended(asked)
            assert code is grpc.StatusCode.UNAVAILABLE
            assert why.startswith("no volume is made on any node that is allowed: nodes ")
            assert f"both claim volume group data ({uuid_of(1)})" in why

    in_cluster(test)


def test_a_volume_that_may_be_anywhere_waits_for_nodes_that_have_not_answered_yet(
    in_cluster: Run,
) -> None:
    """As at a controller's start: an earlier one may have begun it on any of them."""

    async def test(cluster: Cluster) -> None:
        late = cluster.nodes[3]
        names = [one.name for one in cluster.nodes]
        cluster.write(*names[:3])
        await cluster.controller.look()
        late.created.add("vol-new-1")
        late.info_answers.clear()
        cluster.write(*names)
        await cluster.controller.look()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await cluster.create("new-1")
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert f"nodes that do not answer: {late.name}" in str(raised.value.details())
        late.info_answers.set()
        await cluster.ask()
        assert await cluster.create("new-1") == late.name
        # One that does not answer for long is passed over.
        late.info_answers.clear()
        cluster.write(*names[:3])
        await cluster.controller.look()
        cluster.write(*names)
        await cluster.controller.look()
        known = cluster.controller.nodes.get(late.name)
        assert known is not None
        known.joined_seconds -= 120
        assert await cluster.create("new-2") == name_of(2)

    in_cluster(test)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_claim_is_sent_elsewhere_only_where_its_volume_is_not_there(
    in_cluster: Run, is_there: bool
) -> None:
    """An earlier call may have begun it, before another node claimed the group."""

    async def test(cluster: Cluster) -> None:
        both = cluster.nodes[2:]
        both[1].groups = dict(both[0].groups)
        if is_there:
            both[0].created.add("vol-new-1")
        await cluster.ask()
        code, why = await cluster.refused_new("new-1", both[0].name)
        wanted = grpc.StatusCode.UNAVAILABLE if is_there else grpc.StatusCode.RESOURCE_EXHAUSTED
        assert code is wanted
        assert f"both claim volume group data ({uuid_of(2)})" in why

    in_cluster(test)


def test_a_hung_node_holds_up_a_volume_that_may_be_anywhere_for_a_moment(in_cluster: Run) -> None:
    async def test(cluster: Cluster) -> None:
        hung = cluster.nodes[3]
        hung.answers.clear()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await cluster.create("new-1", seconds=5)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert f"node {hung.name} does not say in time" in str(raised.value.details())
        await cluster.until_silent(hung)
        assert await cluster.create("new-1", seconds=5) == name_of(2)

    in_cluster(test)


def test_another_node_s_claim_to_a_group_changes_nothing_for_what_is_there(
    in_cluster: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """PersistentVolumes name the node that has it."""

    async def test(cluster: Cluster) -> None:
        first, thief = cluster.nodes[:2]
        cluster.record.groups[uuid_of(0)] = {first.name}
        thief.groups |= first.groups
        with caplog.at_level(logging.ERROR):
            for _ in range(3):
                await cluster.ask()
        assert caplog.text.count(f"both claim volume group data ({uuid_of(0)})") == 1
        assert await cluster.get(0) == first.name
        # Also while the one that has it does not answer.
        first.answers.clear()
        await cluster.ask()
        code, why = await cluster.refused(0)
        assert (code, first.name in why) == (grpc.StatusCode.UNAVAILABLE, True)
        # And while it does not say that it has it: nothing says that its disks were moved.
        first.answers.set()
        first.groups = {}
        await cluster.ask()
        code, why = await cluster.refused(0)
        assert code is grpc.StatusCode.UNAVAILABLE
        assert f"is on node {thief.name}, but PersistentVolumes name {first.name}" in why
        assert cluster.record.doubts
        # Until its Node is deleted: its disks may be attached to the other.
        cluster.write(*(one.name for one in cluster.nodes[1:]))
        await cluster.controller.look()
        assert await cluster.get(0) == thief.name

    in_cluster(test)


@pytest.mark.parametrize("named", [None, 0, 1])
def test_nothing_is_made_where_a_group_is_claimed_by_two(
    in_cluster: Run, named: int | None
) -> None:
    """Whichever PersistentVolumes name, or neither."""

    async def test(cluster: Cluster) -> None:
        both = cluster.nodes[2:]
        both[1].groups = dict(both[0].groups)
        uuid = uuid_of(2)
        if named is not None:
            cluster.record.groups[uuid] = {both[named].name}
        await cluster.ask()
        said = {uuid: f"both claim volume group data ({uuid})"}[uuid]
        for one in both:
            assert await cluster.room(one.name) == (0, 0)
            code, why = await cluster.refused_new("new-1", one.name)
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert said in why
            assert both[0].name in why
            assert both[1].name in why
            assert "vgchange --uuid" in why
            assert "vgimportclone" in why
        # With the most room they would be chosen.
        assert await cluster.create("new-2") == name_of(1)
        assert not both[0].created | both[1].created
        if named is None:
            code, why = await cluster.refused(2)
            assert (code, said in why) == (grpc.StatusCode.UNAVAILABLE, True)
        else:
            assert await cluster.get(2) == both[named].name
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await cluster.create("new-3", f"data@{uuid}/snap-1")
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert said in str(raised.value.details())
        assert [one.problem for one in (await cluster.status()).nodes if said in one.problem]
        page = Metrics(cluster.controller.nodes).text().decode()
        for one in cluster.nodes:
            count = 1.0 if one in both else 0.0
            assert f'carver_controller_node_contested_groups{{node="{one.name}"}} {count}' in page
        # The copy gets another UUID.
        both[1].groups = {"n0000009": "data"}
        cluster.record.groups.clear()
        await cluster.ask()
        assert await cluster.room(both[0].name) != (0, 0)
        assert await cluster.get(2) == both[0].name

    in_cluster(test)


@pytest.mark.parametrize("is_named", [True, False])
def test_a_node_that_claims_a_group_gives_it_up_and_claims_it_again_gets_nothing_by_that(
    in_cluster: Run, is_named: bool
) -> None:
    """Until PersistentVolumes are read again they may name it, as it had the group."""

    async def test(cluster: Cluster) -> None:
        true, thief = cluster.nodes[:2]
        cluster.record.is_old = True
        if is_named:
            cluster.record.groups[uuid_of(0)] = {true.name}
            cluster.record.volumes[f"data@{uuid_of(0)}/vol-1"] = true.name
        own, volume = dict(thief.groups), VolumeId("data", uuid_of(0), "vol-1")
        for claimed in (own | true.groups, own, own | true.groups, own):
            thief.groups = claimed
            await cluster.ask()
            known = cluster.controller.nodes
            node = known.get(thief.name)
            assert node is not None
            assert known.places(node) == {f"data@{uuid_of(1)}"}
            assert known.is_elsewhere(node, volume)
            if is_named:
                assert await cluster.get(0) == true.name
            else:
                code, _ = await cluster.refused(0)
                assert code is grpc.StatusCode.UNAVAILABLE
        assert thief.calls == []
        cluster.record.is_old = False
        assert await cluster.get(0) == true.name

    in_cluster(test)


def test_a_scrape_and_a_call_look_up_a_group_at_the_same_time(in_cluster: Run) -> None:
    """A scrape has a thread of its own, and may be between any two steps of a call."""

    async def test(cluster: Cluster) -> None:
        first, second = cluster.nodes[:2]
        second.groups |= first.groups
        cluster.record.is_old = True
        await cluster.ask()
        second.groups = {uuid_of(1): "data"}
        await cluster.ask()
        metrics = Metrics(cluster.controller.nodes)
        assert f'contested_groups{{node="{first.name}"}} 1.0' in metrics.text().decode()
        cluster.record.is_old = False
        cluster.record.meanwhile = metrics.text
        assert await cluster.get(0) == first.name

    in_cluster(test)


def test_of_a_group_whose_volumes_are_on_two_nodes_each_volume_has_its_own(
    in_cluster: Run,
) -> None:
    """Both were made from one template, and volumes were made on both."""

    async def test(cluster: Cluster) -> None:
        both = cluster.nodes[:2]
        both[1].groups |= both[0].groups
        cluster.record.groups[uuid_of(0)] = {one.name for one in both}
        await cluster.ask()
        for one in both:
            cluster.record.volumes[f"data@{uuid_of(0)}/vol-1"] = one.name
            assert await cluster.get(0) == one.name
        cluster.record.volumes.clear()
        code, why = await cluster.refused(0)
        assert (code, "both claim" in why) == (grpc.StatusCode.UNAVAILABLE, True)

    in_cluster(test)


def test_a_node_keeps_its_groups_while_its_pod_is_replaced(in_cluster: Run) -> None:
    async def test(cluster: Cluster) -> None:
        first, thief = cluster.nodes[:2]
        cluster.record.groups[uuid_of(0)] = {first.name}
        thief.groups |= first.groups
        await cluster.ask()
        await first.stop()
        first.port = 0
        address = await first.start(cluster.authority, cluster._directory / "node")
        cluster.addresses[first.name] = address
        cluster.write(*cluster.addresses)
        # Until it has said which groups it has.
        first.answers.clear()
        await cluster.controller.look()
        code, _ = await cluster.refused(0)
        assert code is grpc.StatusCode.UNAVAILABLE
        first.answers.set()
        await cluster.ask()
        assert await cluster.get(0) == first.name

    in_cluster(test)


def test_nodes_may_join_and_a_broken_file_changes_nothing(in_cluster: Run) -> None:
    async def test(cluster: Cluster) -> None:
        cluster.write(name_of(0))
        await cluster.controller.look()
        assert [one.name for one in cluster.controller.nodes] == [name_of(0)]
        cluster._file.write_text('[nodes]\n"node-00001" = 7')
        await cluster.controller.look()
        assert [one.name for one in cluster.controller.nodes] == [name_of(0)]
        cluster.write(*cluster.addresses)
        await cluster.controller.look()
        assert await cluster.get(3) == name_of(3)

    in_cluster(test)


@pytest.mark.parametrize("group", [1, 7])
def test_a_call_that_waits_for_a_node_which_leaves_is_answered(in_cluster: Run, group: int) -> None:
    """It waits for the node's answer, or for what all nodes have."""

    async def test(cluster: Cluster) -> None:
        leaving = cluster.nodes[1]
        leaving.answers.clear()
        leaving.asked = False
        # So that what it said at its start is not taken for what it has now.
        for one in cluster.controller.nodes:
            one.asked_seconds -= 60
        waiting = asyncio.create_task(cluster.refused(group, 10))
        while not (leaving.calls if group == 1 else leaving.asked):
            await asyncio.sleep(0.01)
        cluster.write(*(one.name for one in cluster.nodes if one is not leaving))
        begun = time.monotonic()
        known = cluster.controller.nodes.get(leaving.name)
        assert known is not None
        await cluster.controller.look()
        code, why = await waiting
        assert time.monotonic() - begun < 5
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "left the cluster" in why or "no node that answers" in why
        await cluster.controller.nodes.ask(known)
        assert "left the cluster" in known.problem

    in_cluster(test)


@pytest.mark.parametrize("waits_for", ["an unknown group", "a group that moved on"])
def test_a_caller_that_gives_up_takes_no_question_from_the_others(
    in_cluster: Run, monkeypatch: pytest.MonkeyPatch, waits_for: str
) -> None:
    monkeypatch.setattr(nodes, "_PATIENCE_SECONDS", 20.0)

    async def test(cluster: Cluster) -> None:
        first, second = cluster.nodes[:2]
        known = cluster.controller.nodes.get(second.name)
        assert known is not None
        if waits_for == "an unknown group":
            number, owner = 7, second
            second.groups[uuid_of(number)] = "data"
        else:
            number, owner = 1, first
            first.groups |= second.groups
            second.groups = {}
        for one in cluster.controller.nodes:
            one.asked_seconds -= 60
        second.asked = False
        second.info_answers.clear()
        patient = asyncio.create_task(cluster.get(number))
        while not second.asked:
            await asyncio.sleep(0.01)
        hasty = [asyncio.create_task(cluster.get(number, 0.2)) for _ in range(3)]
        for error in await asyncio.gather(*hasty, return_exceptions=True):
            assert isinstance(error, grpc.aio.AioRpcError)
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        # The controller learns of a deadline when it is over, so after its caller has.
        await asyncio.sleep(0.3)
        assert known.is_being_asked
        second.info_answers.set()
        assert await patient == owner.name

    in_cluster(test)


def test_a_node_that_leaves_fails_no_call_about_another_node_s_group(in_cluster: Run) -> None:
    async def test(cluster: Cluster) -> None:
        leaving, has = cluster.nodes[1:3]
        has.groups[uuid_of(7)] = "data"
        for one in cluster.controller.nodes:
            one.asked_seconds -= 60
        leaving.asked = False
        leaving.info_answers.clear()
        waiting = asyncio.create_task(cluster.get(7))
        while not leaving.asked:
            await asyncio.sleep(0.01)
        cluster.write(*(one.name for one in cluster.nodes if one is not leaving))
        await cluster.controller.look()
        assert await waiting == has.name
        leaving.info_answers.set()

    in_cluster(test)


def test_a_list_that_a_node_refuses_names_that_node(in_cluster: Run) -> None:
    async def test(cluster: Cluster) -> None:
        cluster.nodes[1].refuses = True
        call: Any = cluster.channel.unary_unary("/csi.v1.Controller/ListVolumes")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(csi.ListVolumesRequest().SerializeToString(), timeout=20)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert raised.value.details() == f"node {name_of(1)}: a disk does not answer"

    in_cluster(test)


def test_the_answer_of_a_node_that_has_left_counts_for_nothing(in_cluster: Run) -> None:
    async def test(cluster: Cluster) -> None:
        known = cluster.controller.nodes.get(name_of(1))
        assert known is not None
        cluster.write(name_of(0), name_of(2), name_of(3))
        await cluster.controller.look()
        await asyncio.gather(*cluster.controller.nodes._tasks)  # it is closed
        # As if it had been asked before.
        known.channel = cluster.controller._connect(known.name, known.address)
        await cluster.controller.nodes.ask(known)
        code, why = await cluster.refused(1)
        assert (code, "no node that answers" in why) == (grpc.StatusCode.UNAVAILABLE, True)
        await known.channel.close()

    in_cluster(test)


def test_an_unknown_group_is_never_said_to_be_gone(in_cluster: Run) -> None:
    async def test(cluster: Cluster) -> None:
        code, why = await cluster.refused(7)
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "no node that answers has volume group data" in why

    in_cluster(test)


@pytest.mark.parametrize("is_silent", [True, False])
@pytest.mark.parametrize("is_named", [True, False])
def test_of_two_that_claim_a_group_none_is_called_but_the_one_that_is_named(
    in_cluster: Run, is_silent: bool, is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A stolen node's key, and a controller that just started."""

    async def test(cluster: Cluster) -> None:
        true, thief = cluster.nodes[:2]
        if is_named:
            cluster.record.groups[uuid_of(0)] = {true.name}
        thief.groups |= true.groups
        await cluster.controller.stop()
        cluster.config.endpoint.unlink(missing_ok=True)
        if is_silent:
            true.answers.clear()
        cluster.begin()
        await cluster.controller.start()
        await cluster.ask()
        if is_silent and is_named:
            code, why = await cluster.refused(0)
            assert (code, true.name in why) == (grpc.StatusCode.UNAVAILABLE, True)
        elif is_silent:
            # The page says that the calls lie until the true node answers.
            assert await cluster.get(0) == thief.name
        true.answers.set()
        await cluster.ask()
        if is_named:
            assert await cluster.get(0) == true.name
        else:
            code, why = await cluster.refused(0)
            assert code is grpc.StatusCode.UNAVAILABLE
            assert f"nodes {true.name} and {thief.name} both claim" in why
        assert [await cluster.get(one) for one in (1, 2, 3)] == [name_of(one) for one in (1, 2, 3)]
        for _ in range(3):
            await cluster.ask()
        assert caplog.text.count(" claim volume group data ") == 1
        thief.groups = {uuid_of(1): "data"}
        await cluster.ask()
        assert await cluster.get(0) == true.name

    with caplog.at_level(logging.ERROR):
        in_cluster(test)


DEEP = "[" * 100_000


def said(segments: dict[str, str], groups: dict[str, str] | None = None) -> bytes:
    """What the first node says of itself, with these segments and groups."""
    manifest = {
        routes.NODE_ID: name_of(0),
        routes.SEGMENTS: json.dumps(segments),
        routes.GROUPS: json.dumps({uuid_of(0): "data"} if groups is None else groups),
    }
    return csi.GetPluginInfoResponse(name=DRIVER_NAME, manifest=manifest).SerializeToString()


def test_a_node_that_says_another_s_topology_gets_no_claim_and_no_secret_of_that_one(
    in_cluster: Run,
) -> None:
    async def test(cluster: Cluster) -> None:
        thief, victim = cluster.nodes[:2]
        for _ in range(2):
            here = csi.Topology(segments={TOPOLOGY_KEY: victim.name})
            request = csi.CreateVolumeRequest(
                name="new-1",
                secrets={"passphrase": "hidden"},
                accessibility_requirements=csi.TopologyRequirement(preferred=[here]),
            )
            call: Any = cluster.channel.unary_unary("/csi.v1.Controller/CreateVolume")
            await call(request.SerializeToString(), timeout=20)
            capacity = csi.GetCapacityRequest(accessible_topology=here)
            call = cluster.channel.unary_unary("/csi.v1.Controller/GetCapacity")
            answer = csi.GetCapacityResponse.FromString(await call(capacity.SerializeToString()))
            assert answer.available_capacity == victim.number
            assert (thief.created, thief.requests) == (set(), [])
            thief.says = said({TOPOLOGY_KEY: victim.name})
            await cluster.ask()

    in_cluster(test)


@pytest.mark.parametrize(
    ("says", "problem"),
    [
        (b"nonsense", "it answers what Carver does not"),
        (csi.GetPluginInfoResponse(name="another").SerializeToString(), "of driver 'another'"),
        (
            csi.GetPluginInfoResponse(name=DRIVER_NAME, vendor_version="0.0.9").SerializeToString(),
            "its Carver 0.0.9 is of a version without the controller's part: update it",
        ),
        (
            csi.GetPluginInfoResponse(
                name=DRIVER_NAME, manifest={"node": name_of(0), "topology": "{}", "groups": DEEP}
            ).SerializeToString(),
            "it answers what Carver does not",
        ),
        (
            csi.GetPluginInfoResponse(
                name=DRIVER_NAME, manifest={"node": name_of(0), "topology": "{}"}
            ).SerializeToString(),
            "it answers what Carver does not",
        ),
        (
            said({TOPOLOGY_KEY: name_of(1)}),
            f"its topology is \"{{'{TOPOLOGY_KEY}': '{name_of(1)}'}}",
        ),
        (said({TOPOLOGY_KEY: name_of(0), "zone": "z"}), "its topology is"),
        (said({}), "its topology is '{}', not"),
        (said({TOPOLOGY_KEY: name_of(0)}, {"x" * 70_000: "data"}), "groups is longer than 65536"),
        (said({TOPOLOGY_KEY: name_of(0)}, {"n0000000/x": "data"}), "is no volume group"),
        (said({TOPOLOGY_KEY: name_of(0)}, {uuid_of(0): "da\x1bta"}), "is no volume group"),
    ],
    # The order of a map's entries on the wire is another in each process.
    ids=(
        *("nonsense", "another driver", "an older Carver", "too deep", "without groups"),
        *("another's topology", "more than its topology", "no topology"),
        *("too long", "no group's UUID", "no group's name"),
    ),
)
def test_whatever_one_node_says_costs_its_own_calls_only(
    in_cluster: Run, says: bytes, problem: str
) -> None:
    async def test(cluster: Cluster) -> None:
        odd = cluster.nodes[0]
        odd.says = says
        known = cluster.controller.nodes.get(odd.name)
        assert known is not None
        await cluster.controller.nodes.ask(known)
        assert problem in known.problem
        # All nodes are asked for a group that is not known.
        for one in cluster.controller.nodes:
            one.asked_seconds -= 60
        code, why = await cluster.refused(7)
        assert (code, f"do not answer: {odd.name}" in why) == (grpc.StatusCode.UNAVAILABLE, True)
        code, why = await cluster.refused(0)
        assert (code, problem in why) == (grpc.StatusCode.UNAVAILABLE, True)
        assert await cluster.get(1) == name_of(1)
        odd.says = None
        await cluster.ask()
        assert await cluster.get(0) == odd.name

    in_cluster(test)


def test_a_node_that_says_nothing_of_itself_does_not_answer(in_cluster: Run) -> None:
    async def test(cluster: Cluster) -> None:
        odd = cluster.nodes[1]
        odd.empty = {"GetPluginInfo"}
        await cluster.ask()
        known = cluster.controller.nodes.get(odd.name)
        assert known is not None
        assert "the answer is None: it has no message" in known.problem
        code, why = await cluster.refused(1)
        assert (code, odd.name in why) == (grpc.StatusCode.UNAVAILABLE, True)

    in_cluster(test)


def test_what_a_node_says_is_shown_without_control_characters(
    in_cluster: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """On an administrator's terminal and in the log, where it could forge a line."""
    odd = "1\x1b[2J\nerror node node-00001 left"

    async def test(cluster: Cluster) -> None:
        first, second = cluster.nodes[:2]
        first.says = csi.GetPluginInfoResponse(
            name=DRIVER_NAME, vendor_version=odd
        ).SerializeToString()
        second.fails["GetPluginInfo"], second.why = grpc.StatusCode.UNAVAILABLE, odd * 100
        await cluster.ask()
        call: Any = cluster.channel.unary_unary("/carver.v2.Cluster/Nodes")
        answer = carver.NodesResponse.FromString(await call(b""))
        shown = [*(one.version for one in answer.nodes), *(one.problem for one in answer.nodes)]
        assert all(one.isprintable() and len(one) <= 1000 for one in shown)
        assert answer.nodes[0].version == "1 [2J error node node-00001 left"
        assert answer.nodes[1].problem.startswith("UNAVAILABLE: 1 [2J error")
        logged = [one.getMessage() for one in caplog.records if "[2J" in one.getMessage()]
        assert len(logged) == 2
        assert all(one.isprintable() for one in logged)

    with caplog.at_level(logging.WARNING):
        in_cluster(test)


def test_an_older_node_s_version_is_shown(in_cluster: Run) -> None:
    async def test(cluster: Cluster) -> None:
        cluster.nodes[0].says = csi.GetPluginInfoResponse(
            name=DRIVER_NAME, vendor_version="0.0.9"
        ).SerializeToString()
        await cluster.ask()
        call: Any = cluster.channel.unary_unary("/carver.v2.Cluster/Nodes")
        answer = carver.NodesResponse.FromString(await call(b""))
        assert [one.version for one in answer.nodes] == ["0.0.9", "0.1.0", "0.1.0", "0.1.0"]
        assert "update it" in answer.nodes[0].problem

    in_cluster(test)


@pytest.mark.parametrize("method", ["ControllerGetVolume", "CreateVolume", "GetCapacity"])
def test_fields_of_a_newer_version_pass_in_both_directions(in_cluster: Run, method: str) -> None:
    volume = f"data@{uuid_of(2)}/vol-1"
    requests: dict[str, Any] = {
        "ControllerGetVolume": csi.ControllerGetVolumeRequest(volume_id=volume),
        "CreateVolume": csi.CreateVolumeRequest(
            name="new-1", volume_content_source=of_snapshot(f"data@{uuid_of(2)}/snap-1")
        ),
        "GetCapacity": csi.GetCapacityRequest(
            accessible_topology=csi.Topology(segments={TOPOLOGY_KEY: name_of(2)})
        ),
    }

    async def test(cluster: Cluster) -> None:
        node = cluster.nodes[2]
        node.adds = UNKNOWN
        call: Any = cluster.channel.unary_unary(f"/csi.v1.Controller/{method}")
        answer: bytes = await call(requests[method].SerializeToString() + UNKNOWN, timeout=20)
        assert UNKNOWN in node.requests[-1]
        assert UNKNOWN in answer

    in_cluster(test)


async def call_of(cluster: Cluster, service: str, request: Any, seconds: float = 20) -> bytes:
    """Call the controller by the kind of the request; the bytes of the answer."""
    method = type(request).__name__.removesuffix("Request")
    call: Any = cluster.channel.unary_unary(f"/csi.v1.{service}/{method}")
    answer: bytes = await call(request.SerializeToString(), timeout=seconds)
    return answer


def there(number: int, name: str = "vol-new-1", **more: Any) -> csi.Volume:
    """A volume as its node answers."""
    here = csi.Topology(segments={TOPOLOGY_KEY: name_of(number)})
    return csi.Volume(
        volume_id=f"data@{uuid_of(number)}/{name}", accessible_topology=[here], **more
    )


def of_the_first(method: str) -> Any:
    """A request that goes to the first node."""
    volume, snapshot = f"data@{uuid_of(0)}/vol-new-1", f"data@{uuid_of(0)}/snap-1"
    here = csi.Topology(segments={TOPOLOGY_KEY: name_of(0)})
    requests: dict[str, Any] = {
        "CreateVolume": csi.CreateVolumeRequest(
            name="new-1", accessibility_requirements=csi.TopologyRequirement(preferred=[here])
        ),
        "ControllerGetVolume": csi.ControllerGetVolumeRequest(volume_id=volume),
        "ControllerGetVolumeHealth": csi.ControllerGetVolumeHealthRequest(volume_id=volume),
        "ControllerExpandVolume": csi.ControllerExpandVolumeRequest(
            volume_id=volume, capacity_range=csi.CapacityRange(required_bytes=2)
        ),
        "CreateSnapshot": csi.CreateSnapshotRequest(source_volume_id=volume, name="1"),
        "GetSnapshot": csi.GetSnapshotRequest(snapshot_id=snapshot),
        "ListSnapshots": csi.ListSnapshotsRequest(snapshot_id=snapshot),
        "ListVolumes": csi.ListVolumesRequest(),
        "GetCapacity": csi.GetCapacityRequest(accessible_topology=here),
        "CreateVolumeGroupSnapshot": csi.CreateVolumeGroupSnapshotRequest(
            name="1", source_volume_ids=[volume]
        ),
        "GetVolumeGroupSnapshot": csi.GetVolumeGroupSnapshotRequest(
            group_snapshot_id=f"data@{uuid_of(0)}/gsnap-1", snapshot_ids=[snapshot]
        ),
        "DeleteVolumeGroupSnapshot": csi.DeleteVolumeGroupSnapshotRequest(
            group_snapshot_id=f"data@{uuid_of(0)}/gsnap-1",
            snapshot_ids=[f"data@{uuid_of(1)}/snap-1"],
        ),
    }
    return requests[method]


SNAPSHOT_OF_THE_SECOND = csi.Snapshot(
    snapshot_id=f"data@{uuid_of(1)}/snap-1", source_volume_id=f"data@{uuid_of(1)}/vol-1"
)
GROUP_OF_THE_SECOND = csi.VolumeGroupSnapshot(
    group_snapshot_id=f"data@{uuid_of(1)}/gsnap-1", snapshots=[SNAPSHOT_OF_THE_SECOND]
)
FORGED = [
    ("volume.volume_id", csi.CreateVolumeResponse(volume=there(1))),
    ("volume.volume_id", csi.CreateVolumeResponse(volume=there(0, "vol-of-another-claim"))),
    ("volume.volume_id", csi.ControllerGetVolumeResponse(volume=there(1))),
    (
        "volume_health.volume_id",
        csi.ControllerGetVolumeHealthResponse(
            volume_health=csi.VolumeHealth(volume_id=f"data@{uuid_of(1)}/vol-new-1")
        ),
    ),
    ("capacity_bytes", csi.ControllerExpandVolumeResponse(capacity_bytes=1)),
    ("snapshot.snapshot_id", csi.CreateSnapshotResponse(snapshot=SNAPSHOT_OF_THE_SECOND)),
    ("snapshot.snapshot_id", csi.GetSnapshotResponse(snapshot=SNAPSHOT_OF_THE_SECOND)),
    (
        "entries[].snapshot.snapshot_id",
        csi.ListSnapshotsResponse(
            entries=[csi.ListSnapshotsResponse.Entry(snapshot=SNAPSHOT_OF_THE_SECOND)]
        ),
    ),
    (
        "entries[].volume.volume_id",
        csi.ListVolumesResponse(entries=[csi.ListVolumesResponse.Entry(volume=there(1))]),
    ),
    ("available_capacity", csi.GetCapacityResponse(available_capacity=-1)),
    (
        "group_snapshot.group_snapshot_id",
        csi.CreateVolumeGroupSnapshotResponse(group_snapshot=GROUP_OF_THE_SECOND),
    ),
    (
        "group_snapshot.group_snapshot_id",
        csi.GetVolumeGroupSnapshotResponse(group_snapshot=GROUP_OF_THE_SECOND),
    ),
    ("the request's snapshot_ids", csi.DeleteVolumeGroupSnapshotResponse()),
]


async def refuses_the_first_node(cluster: Cluster, method: str, why: str) -> None:
    """The first node's answer is refused by name and counted; the others' calls go on."""
    name, service = name_of(0), "GroupController" if "Group" in method else "Controller"
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call_of(cluster, service, of_the_first(method))
    assert raised.value.code() is grpc.StatusCode.INTERNAL
    said = str(raised.value.details())
    assert said.startswith(f"cannot pass on the answer of node {name} to {method}: {why}")
    assert [one.refused_answers for one in cluster.controller.nodes] == [1, 0, 0, 0]
    assert await cluster.get(1) == name_of(1)


@pytest.mark.parametrize(
    ("field", "answer"), FORGED, ids=[f"{type(one).__name__} {field}" for field, one in FORGED]
)
def test_an_answer_that_names_what_is_another_s_reaches_no_caller(
    in_cluster: Run, field: str, answer: Any
) -> None:
    """A stolen node's key. The error names the node and the field, and is counted."""

    async def test(cluster: Cluster) -> None:
        thief = cluster.nodes[0]
        method = type(answer).__name__.removesuffix("Response")
        thief.forged[method] = answer.SerializeToString()
        await refuses_the_first_node(cluster, method, f"{field} is ")
        # So does what the node answers in good order.
        thief.forged.clear()
        assert await cluster.get(0) == thief.name

    in_cluster(test)


EVERY = [*sorted({type(one).__name__.removesuffix("Response") for _, one in FORGED})]


@pytest.mark.parametrize("method", EVERY)
def test_an_answer_without_a_message_is_refused_and_costs_its_node_s_calls_only(
    in_cluster: Run, method: str
) -> None:
    """The status OK, and nothing before it: grpc.aio gives None."""

    async def test(cluster: Cluster) -> None:
        odd = cluster.nodes[0]
        odd.empty = {method}
        await refuses_the_first_node(cluster, method, "the answer is None")

    in_cluster(test)


@pytest.mark.parametrize("method", ["GetCapacity", "ControllerGetVolume"])
def test_a_volume_that_may_be_anywhere_is_made_though_one_node_answers_nothing(
    in_cluster: Run, method: str
) -> None:
    async def test(cluster: Cluster) -> None:
        cluster.nodes[1].empty = {method}
        assert await cluster.create("new-1") == name_of(3)

    in_cluster(test)


@pytest.mark.parametrize("error", [TypeError("odd"), KeyError("odd"), RecursionError(), OSError()])
def test_whatever_breaks_while_a_node_is_asked_is_that_node_s_problem(
    in_cluster: Run, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """No class of exceptions is foreseen."""

    async def test(cluster: Cluster) -> None:
        known = cluster.controller.nodes
        odd = known.get(name_of(1))
        assert odd is not None

        def fails(node: nodes.Node, said: Any) -> None:
            if node is odd:
                raise error
            believe(node, said)

        believe = known._believe
        monkeypatch.setattr(known, "_believe", fails)
        await cluster.ask()
        assert odd.problem.startswith("it answers what Carver does not: ")
        assert [one.name for one in known.answering()] == [name_of(one) for one in (0, 2, 3)]
        monkeypatch.undo()

        def judge(row: Row, asked: Asked, data: bytes) -> Any:
            if asked.node == odd.name:
                raise error
            return true_judge(row, asked, data)

        true_judge = Row.judge
        monkeypatch.setattr(Row, "judge", judge)
        await cluster.ask()
        assert await cluster.create("new-1") == name_of(3)
        code, why = await cluster.refused(1)
        assert (code, odd.name in why) == (grpc.StatusCode.INTERNAL, True)

    in_cluster(test)


NO_ID = "no id"
# By RPC: a request about what is no id, and how it is answered.
ABOUT_NO_ID: list[tuple[Any, grpc.StatusCode]] = [
    (csi.DeleteVolumeRequest(volume_id=NO_ID), grpc.StatusCode.OK),
    (csi.DeleteSnapshotRequest(snapshot_id=NO_ID), grpc.StatusCode.OK),
    (csi.DeleteVolumeGroupSnapshotRequest(group_snapshot_id=NO_ID), grpc.StatusCode.OK),
    (csi.ListSnapshotsRequest(snapshot_id=NO_ID), grpc.StatusCode.OK),
    (csi.ListSnapshotsRequest(source_volume_id=NO_ID), grpc.StatusCode.OK),
    (csi.ControllerUnpublishVolumeRequest(volume_id=NO_ID), grpc.StatusCode.OK),
    *(
        (one, grpc.StatusCode.NOT_FOUND)
        for one in (
            csi.ControllerGetVolumeRequest(volume_id=NO_ID),
            csi.ControllerGetVolumeHealthRequest(volume_id=NO_ID),
            csi.ControllerExpandVolumeRequest(volume_id=NO_ID),
            csi.ControllerModifyVolumeRequest(volume_id=NO_ID),
            csi.ValidateVolumeCapabilitiesRequest(volume_id=NO_ID),
            csi.ControllerPublishVolumeRequest(volume_id=NO_ID, node_id=name_of(0)),
            csi.CreateSnapshotRequest(source_volume_id=NO_ID),
            csi.GetSnapshotRequest(snapshot_id=NO_ID),
            csi.CreateVolumeGroupSnapshotRequest(source_volume_ids=[NO_ID]),
            csi.GetVolumeGroupSnapshotRequest(group_snapshot_id=NO_ID),
            csi.CreateVolumeRequest(
                name="1", volume_content_source=of_snapshot(NO_ID), secrets={"key": "a tenant's"}
            ),
        )
    ),
]


def test_what_is_no_id_goes_to_no_node(in_cluster: Run) -> None:
    """It may come with secrets, and be scheduled to any node."""
    by_id = {method for fields in routes.FIELDS.values() for method in fields}
    asked = {type(one).__name__.removesuffix("Request") for one, _ in ABOUT_NO_ID}
    assert by_id <= asked

    async def answered(cluster: Cluster, request: Any) -> grpc.StatusCode:
        service = "GroupController" if "Group" in type(request).__name__ else "Controller"
        try:
            assert await call_of(cluster, service, request) == b""
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    async def test(cluster: Cluster) -> None:
        for request, code in ABOUT_NO_ID:
            assert await answered(cluster, request) is code, request
        for one in cluster.nodes:
            assert one.requests == []

    in_cluster(test)


def test_an_empty_id_is_required(in_cluster: Run) -> None:
    async def test(cluster: Cluster) -> None:
        for request in (
            csi.DeleteVolumeRequest(),
            csi.GetSnapshotRequest(),
            csi.CreateVolumeGroupSnapshotRequest(name="g"),
            csi.CreateVolumeRequest(volume_content_source=of_snapshot("")),
        ):
            service = "GroupController" if "Group" in type(request).__name__ else "Controller"
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call_of(cluster, service, request)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert str(raised.value.details()).endswith(": is required")
            assert not any(one.requests for one in cluster.nodes)

    in_cluster(test)


def test_a_page_is_never_larger_than_a_sidecar_takes(in_cluster: Run) -> None:
    """By the name of the node where one alone sends more; gRPC in Go takes 4 MiB."""

    async def test(cluster: Cluster) -> None:
        much = {"volume_context": {f"carver/{one}": "y" * 100 for one in range(30)}}
        for one in cluster.nodes:
            entries = [
                csi.ListVolumesResponse.Entry(volume=there(one.number, f"vol-{at:03}", **much))
                for at in range(500)
            ]
            one.volumes = csi.ListVolumesResponse(entries=entries).SerializeToString()
        assert sum(len(one.volumes) for one in cluster.nodes) > 4 << 20
        seen, token = 0, ""
        while True:
            data = await call_of(
                cluster, "Controller", csi.ListVolumesRequest(starting_token=token)
            )
            assert len(data) < 4 << 20
            page = csi.ListVolumesResponse.FromString(data)
            seen, token = seen + len(page.entries), page.next_token
            if not token:
                break
        assert seen == 2000

    in_cluster(test)


@contextmanager
def endless(node: SimulatedNode) -> Iterator[None]:
    """See that a list is refused which had no end: that node has more than 50 entries."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        yield
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    why = f"node {node.name} lists more than 50 entries"
    assert str(raised.value.details()).startswith(why)


def test_a_list_that_goes_on_without_an_end_ends_with_the_node_s_name(
    in_cluster: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each page is honest by the rules: some entries more, and a token further on."""
    monkeypatch.setattr(lists, "_MOST_OF_A_NODE", 50)

    async def test(cluster: Cluster) -> None:
        odd = cluster.nodes[1]

        async def listed(at: int, token: str) -> csi.ListVolumesResponse:
            entry = csi.ListVolumesResponse.Entry(volume=there(1, f"vol-{at:03}"))
            odd.volumes = csi.ListVolumesResponse(
                entries=[entry] * 3, next_token=f"{at:03}"
            ).SerializeToString()
            request = csi.ListVolumesRequest(starting_token=token, max_entries=3)
            return csi.ListVolumesResponse.FromString(await call_of(cluster, "Controller", request))

        token = ""
        for at in range(16):
            page = await listed(at, token)
            assert len(page.entries) == 3
            token = page.next_token
        with endless(odd):
            await listed(16, token)
        # Other nodes' entries do not count.
        many = [csi.ListVolumesResponse.Entry(volume=there(0))] * 60
        cluster.nodes[0].volumes = csi.ListVolumesResponse(entries=many).SerializeToString()
        odd.volumes = b""
        await call_of(cluster, "Controller", csi.ListVolumesRequest())

    in_cluster(test)


def test_what_is_left_out_of_a_list_counts_as_an_entry_of_its_node(
    in_cluster: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The health of another's volumes, page after page: none of it reaches the caller."""
    monkeypatch.setattr(lists, "_MOST_OF_A_NODE", 50)

    async def test(cluster: Cluster) -> None:
        odd = cluster.nodes[1]
        wrong = [("DATA_LOSS", "DataLoss", "all is lost")]
        odd.unhealthy = {f"data@{uuid_of(0)}/vol-{at:03}": wrong for at in range(200)}
        request = csi.ControllerListVolumeHealthRequest(max_entries=3)
        with endless(odd):
            await call_of(cluster, "Controller", request)
        assert odd.calls.count("ControllerListVolumeHealth") == 17

    in_cluster(test)


def test_a_node_of_many_pages_has_no_other_asked_again_for_each(in_cluster: Run) -> None:
    async def test(cluster: Cluster) -> None:
        odd, *others = cluster.nodes
        wrong = [("DEGRADED", "RaidDegraded", "a disk is missing")]
        odd.unhealthy = {f"data@{uuid_of(0)}/vol-{at:03}": wrong for at in range(30)}
        answer = await call_of(cluster, "Controller", csi.ControllerListVolumeHealthRequest())
        found = csi.ControllerListVolumeHealthResponse.FromString(answer).entries
        assert (len(found), odd.calls.count("ControllerListVolumeHealth")) == (30, 30)
        assert [one.calls.count("ControllerListVolumeHealth") for one in others] == [2, 2, 2]

    in_cluster(test)


def test_what_a_node_says_of_itself_is_not_parsed_where_it_is_too_long(in_cluster: Run) -> None:
    async def test(cluster: Cluster) -> None:
        odd = cluster.nodes[0]
        honest = said(odd.here, odd.groups)
        odd.says = honest
        await cluster.ask()
        assert [one.problem for one in cluster.controller.nodes] == [""] * 4
        more = csi.GetPluginInfoResponse(manifest={f"k{at}": "" for at in range(100_000)})
        odd.says = honest + more.SerializeToString()
        await cluster.ask()
        first, *others = cluster.controller.nodes
        assert "it says more of itself than" in first.problem
        assert [one.problem for one in others] == [""] * 3

    in_cluster(test)


@pytest.mark.parametrize("token", ["node-00001", "node-00001:", "node-00001:x:", "none:0:", ":0:"])
def test_a_token_of_no_list_of_the_controller_s_begins_the_list_anew(
    in_cluster: Run, token: str
) -> None:
    async def test(cluster: Cluster) -> None:
        call: Any = cluster.channel.unary_unary("/csi.v1.Controller/ListVolumes")
        request = csi.ListVolumesRequest(starting_token=token)
        code, why = await _ended(call(request.SerializeToString(), timeout=20))
        assert (code, "list from the start" in why) == (grpc.StatusCode.ABORTED, True)

    in_cluster(test)


@pytest.mark.parametrize("size", [3 << 20, 5 << 20])
def test_a_node_that_sends_too_much_is_named(in_cluster: Run, size: int) -> None:
    async def test(cluster: Cluster) -> None:
        odd = cluster.nodes[1]
        entry = csi.ListVolumesResponse.Entry(volume=there(1))
        entry.volume.volume_context["carver/class"] = "y" * size
        odd.volumes = csi.ListVolumesResponse(entries=[entry]).SerializeToString()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call_of(cluster, "Controller", csi.ListVolumesRequest())
        assert f"node {odd.name} " in str(raised.value.details())
        assert raised.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)

    in_cluster(test)


@pytest.mark.parametrize("size", [1000, 7000, 20_000])
@pytest.mark.parametrize("letter", ["x", "é"])
def test_a_long_error_of_a_node_does_not_become_one_after_which_a_volume_is_made_elsewhere(
    in_cluster: Run, size: int, letter: str
) -> None:
    """GRPC drops it, and says RESOURCE_EXHAUSTED; the volume may be there."""

    async def test(cluster: Cluster) -> None:
        odd = cluster.nodes[0]
        odd.fails["CreateVolume"], odd.why = grpc.StatusCode.DEADLINE_EXCEEDED, letter * size
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call_of(cluster, "Controller", of_the_first("CreateVolume"))
        known = grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE
        assert raised.value.code() in known
        assert f"node {odd.name}" in str(raised.value.details())

    in_cluster(test)


def test_a_list_in_which_a_node_lies_is_refused_and_the_others_are_found_by_id(
    in_cluster: Run,
) -> None:
    """The node neither adds to, nor takes from, nor replaces what others say."""

    async def test(cluster: Cluster) -> None:
        for one in cluster.nodes:
            entry = csi.ListVolumesResponse.Entry(volume=there(one.number, "vol-1"))
            one.volumes = csi.ListVolumesResponse(entries=[entry]).SerializeToString()
        whole = await call_of(cluster, "Controller", csi.ListVolumesRequest())
        assert len(csi.ListVolumesResponse.FromString(whole).entries) == 4
        thief = cluster.nodes[1]
        honest, thief.volumes = thief.volumes, cluster.nodes[2].volumes
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call_of(cluster, "Controller", csi.ListVolumesRequest())
        assert raised.value.code() is grpc.StatusCode.INTERNAL
        assert f"node {thief.name} " in str(raised.value.details())
        assert [await cluster.get(one) for one in (0, 2, 3)] == [name_of(one) for one in (0, 2, 3)]
        thief.volumes = honest
        assert await call_of(cluster, "Controller", csi.ListVolumesRequest()) == whole

    in_cluster(test)


def test_the_health_of_another_s_volumes_is_left_out_of_the_list(in_cluster: Run) -> None:
    """As a node has it whose volume group was attached to another node."""

    async def test(cluster: Cluster) -> None:
        wrong = [("DATA_LOSS", "DataLoss", "all is lost")]
        here, detached = f"data@{uuid_of(0)}/vol-1", "data@n7777777/vol-1"
        cluster.nodes[0].unhealthy = {
            here: wrong,
            f"data@{uuid_of(1)}/vol-1": wrong,
            detached: wrong,
        }
        request = csi.ControllerListVolumeHealthRequest()
        answer = await call_of(cluster, "Controller", request)
        found = csi.ControllerListVolumeHealthResponse.FromString(answer).entries
        assert [one.volume_id for one in found] == [here, detached]
        assert [one.refused_answers for one in cluster.controller.nodes] == [0, 0, 0, 0]

    in_cluster(test)


def test_no_claim_to_another_s_group_makes_the_list_of_health_shorter(in_cluster: Run) -> None:
    """As for the other lists: without PersistentVolumes nobody knows whose the group is."""

    async def test(cluster: Cluster) -> None:
        thief, victim = cluster.nodes[:2]
        sick = f"data@{uuid_of(1)}/vol-1"
        victim.unhealthy[sick] = [("INACCESSIBLE", "PoolFull", "extend it")]
        thief.groups |= victim.groups
        await cluster.ask()
        request = csi.ControllerListVolumeHealthRequest()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call_of(cluster, "Controller", request)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "nodes node-00000 and node-00001 both claim" in str(raised.value.details())
        assert [one.refused_answers for one in cluster.controller.nodes] == [0, 0, 0, 0]
        # Where PersistentVolumes name the victim, it tells.
        cluster.record.groups[uuid_of(1)] = {victim.name}
        thief.unhealthy = {sick: [("DATA_LOSS", "DataLoss", "all is lost")]}
        answer = await call_of(cluster, "Controller", request)
        [found] = csi.ControllerListVolumeHealthResponse.FromString(answer).entries
        assert found.health_statuses[0].reason == "PoolFull"
        # Or has it not: then nobody does.
        victim.groups = {}
        await cluster.ask()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call_of(cluster, "Controller", request)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE

    in_cluster(test)


def test_with_nodes_from_files_the_claim_of_one_alone_counts_at_once(in_cluster: Run) -> None:
    """No PersistentVolume is known there, and one node that is down must not hold up all others."""

    async def test(cluster: Cluster) -> None:
        await cluster.controller.stop()
        cluster.nodes[1].answers.clear()
        cluster.begin()
        await cluster.controller.start()
        await cluster.ask()
        assert await cluster.get(0) == name_of(0)
        # Also a claim to the group of the one that is down.
        cluster.nodes[0].groups |= cluster.nodes[1].groups
        await cluster.ask()
        assert await cluster.get(1) == name_of(0)
        cluster.nodes[1].answers.set()
        await cluster.ask()
        code, why = await cluster.refused(1)
        assert (code, "both claim" in why) == (grpc.StatusCode.UNAVAILABLE, True)

    in_cluster(test)


def test_a_late_answer_from_an_old_address_counts_for_nothing(in_cluster: Run) -> None:
    async def test(cluster: Cluster) -> None:
        node = cluster.nodes[1]
        known = cluster.controller.nodes
        one = known.get(node.name)
        assert one is not None
        node.info_answers.clear()
        node.groups = {"n7777777": "new"}
        asked = asyncio.ensure_future(known.ask(one))
        while one.asking is None or not one.is_being_asked:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        # Nobody is there.
        cluster.addresses[node.name] = "127.0.0.1:1"
        known.set({name: Serving(where) for name, where in cluster.addresses.items()})
        node.info_answers.set()
        await asked
        assert one.problem
        assert one.groups == {uuid_of(1): "data"}

    in_cluster(test)


@pytest.mark.parametrize("count", [200, 201, 3000])
def test_a_node_has_no_more_groups_than_any_has(in_cluster: Run, count: int) -> None:
    """Each is looked into for a volume that may be anywhere."""

    async def test(cluster: Cluster) -> None:
        odd = cluster.nodes[1]
        odd.groups = {f"z{one:07}": "g" for one in range(count)}
        await cluster.ask()
        known = cluster.controller.nodes.get(odd.name)
        assert known is not None
        assert bool(known.problem) is (count > 200)
        assert len(known.groups) <= 200

    in_cluster(test)


def test_a_node_that_has_not_looked_at_its_disks_keeps_its_groups(in_cluster: Run) -> None:
    """Those of earlier answers: its Carver has just started."""

    async def test(cluster: Cluster) -> None:
        node = cluster.nodes[1]
        node.groups, node.whole = {}, {routes.IS_WHOLE: ""}
        await cluster.ask()
        known = cluster.controller.nodes.get(node.name)
        assert known is not None
        assert known.groups == {uuid_of(1): "data"}
        code, why = await cluster.refused(1)
        assert (code, why) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            f"node {node.name}: the group is not here",
        )
        assert known.groups == {uuid_of(1): "data"}
        # What it says without end counts no more than what a node has at most.
        for one in range(300):
            node.groups = {f"z{one:07}": "g"}
            await cluster.controller.nodes.ask(known)
        assert len(known.groups) <= 200
        node.groups, node.whole = {}, {routes.IS_WHOLE: routes.YES}
        await cluster.ask()
        assert known.groups == {}

    in_cluster(test)


def test_a_group_that_a_node_got_a_moment_ago_is_its_own(in_cluster: Run) -> None:
    async def test(cluster: Cluster) -> None:
        node = cluster.nodes[0]
        node.groups["n7777777"] = "new"
        made = there(0)
        made.volume_id = "new@n7777777/vol-new-1"
        node.forged["CreateVolume"] = csi.CreateVolumeResponse(volume=made).SerializeToString()
        answer = await call_of(cluster, "Controller", of_the_first("CreateVolume"))
        assert csi.CreateVolumeResponse.FromString(answer).volume == made
        assert not any(one.refused_answers for one in cluster.controller.nodes)

    in_cluster(test)


@pytest.mark.parametrize("named", [True, False])
def test_no_volume_of_a_copy_that_showed_up_a_moment_ago_reaches_the_provisioner(
    in_cluster: Run, named: bool
) -> None:
    """The node is asked again for that answer, not at its next turn within a minute."""

    async def test(cluster: Cluster) -> None:
        first, second = cluster.nodes[:2]
        if named:
            cluster.record.groups[uuid_of(0)] = {first.name}
        second.groups |= first.groups
        made = there(1)
        made.volume_id = there(0).volume_id
        second.forged["CreateVolume"] = csi.CreateVolumeResponse(volume=made).SerializeToString()
        code, why = await cluster.refused_new("new-1", second.name)
        assert code is grpc.StatusCode.UNAVAILABLE
        assert f"both claim volume group data ({uuid_of(0)})" in why
        # It is there, so the claim goes nowhere else; and nothing else is made on either.
        second.created.add("vol-new-1")
        code, why = await cluster.refused_new("new-1", second.name)
        assert (code, "both claim" in why) == (grpc.StatusCode.UNAVAILABLE, True)
        code, _ = await cluster.refused_new("new-2", first.name)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not any(one.refused_answers for one in cluster.controller.nodes)

    in_cluster(test)


def test_a_node_that_lies_and_then_is_silent_is_found_out_all_the_same(in_cluster: Run) -> None:
    async def test(cluster: Cluster) -> None:
        thief = cluster.nodes[0]
        thief.forged["CreateVolume"] = csi.CreateVolumeResponse(volume=there(1)).SerializeToString()
        thief.info_answers.clear()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call_of(cluster, "Controller", of_the_first("CreateVolume"))
        assert raised.value.code() is grpc.StatusCode.INTERNAL
        assert [one.refused_answers for one in cluster.controller.nodes] == [1, 0, 0, 0]

    in_cluster(test)


def test_a_group_that_was_moved_while_its_node_answered_was_the_node_s(in_cluster: Run) -> None:
    async def test(cluster: Cluster) -> None:
        first, second = cluster.nodes[:2]
        known, answers = cluster.controller.nodes.get(first.name), Answers(cluster.controller.nodes)
        assert known is not None
        answer = csi.ControllerGetVolumeResponse(volume=there(0))
        asked = answers.asked(known, of_the_first("ControllerGetVolume"))
        second.groups |= first.groups
        first.groups = {}
        await cluster.ask()
        path = "/csi.v1.Controller/ControllerGetVolume"
        assert await answers.read(known, path, asked, answer.SerializeToString()) == answer
        assert known.refused_answers == 0

    in_cluster(test)


@pytest.mark.parametrize("named", [None, 0, 1])
def test_an_answer_about_a_group_that_two_nodes_claim_accuses_neither(
    in_cluster: Run, named: int | None
) -> None:
    """The one that PersistentVolumes name is believed; the other may have a copy, and is not."""

    async def test(cluster: Cluster) -> None:
        first, second = cluster.nodes[:2]
        listed = csi.ListVolumesResponse(
            entries=[csi.ListVolumesResponse.Entry(volume=there(0))]
        ).SerializeToString()
        first.volumes = listed
        wrong = [("DATA_LOSS", "DataLoss", "all is lost")]
        first.unhealthy = {there(0).volume_id: wrong}
        second.groups |= first.groups
        if named is not None:
            cluster.record.groups[uuid_of(0)] = {cluster.nodes[named].name}
        await cluster.ask()
        request = csi.ControllerListVolumeHealthRequest()
        if named is None:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call_of(cluster, "Controller", request)
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        else:
            health = await call_of(cluster, "Controller", request)
            found = csi.ControllerListVolumeHealthResponse.FromString(health).entries
            assert len(found) == (named == 0)
        if named == 0:
            assert await call_of(cluster, "Controller", csi.ListVolumesRequest()) == listed
        else:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call_of(cluster, "Controller", csi.ListVolumesRequest())
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "both claim volume group data" in str(raised.value.details())
        assert not any(one.refused_answers for one in cluster.controller.nodes)

    in_cluster(test)


def test_a_stream_ends_where_a_node_lies(in_cluster: Run) -> None:
    async def streamed(cluster: Cluster, answer: Any) -> list[bytes]:
        cluster.nodes[0].forged["GetMetadataAllocated"] = answer.SerializeToString() + UNKNOWN
        call: Any = cluster.channel.unary_stream("/csi.v1.SnapshotMetadata/GetMetadataAllocated")
        request = csi.GetMetadataAllocatedRequest(snapshot_id=f"data@{uuid_of(0)}/snap-1")
        return [one async for one in call(request.SerializeToString(), timeout=20)]

    async def test(cluster: Cluster) -> None:
        block = csi.BlockMetadata(byte_offset=0, size_bytes=4096)
        answer = csi.GetMetadataAllocatedResponse(
            volume_capacity_bytes=4096, block_metadata=[block]
        )
        honest = answer.SerializeToString() + UNKNOWN
        assert await streamed(cluster, answer) == [honest, honest]
        answer.block_metadata[0].byte_offset = -4096
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await streamed(cluster, answer)
        assert raised.value.code() is grpc.StatusCode.INTERNAL
        assert "block_metadata is " in str(raised.value.details())
        assert cluster.controller.nodes.get(name_of(0)).refused_answers == 1  # type: ignore[union-attr]

    in_cluster(test)


@pytest.mark.parametrize("code", list(grpc.StatusCode), ids=lambda one: one.name)
def test_no_error_of_a_node_has_a_call_about_its_volume_carried_out_elsewhere(
    in_cluster: Run, code: grpc.StatusCode
) -> None:
    """A thief may refuse or confirm what is its own; no other node is asked to do it instead."""

    async def test(cluster: Cluster) -> None:
        thief, *others = cluster.nodes
        if code is grpc.StatusCode.OK:
            thief.forged["DeleteVolume"] = b""
        else:
            thief.fails["DeleteVolume"] = code
        # It also claims another's group.
        thief.groups |= others[0].groups
        await cluster.ask()
        for one in others:
            one.forged["DeleteVolume"] = b""
            one.requests.clear()
        own = csi.DeleteVolumeRequest(volume_id=f"data@{uuid_of(0)}/vol-1")
        if code is grpc.StatusCode.OK:
            assert await call_of(cluster, "Controller", own) == b""
        else:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call_of(cluster, "Controller", own)
            assert raised.value.code() is code
            assert f"node {thief.name}: " in str(raised.value.details())
        assert not any(one.requests for one in others)
        thief.requests.clear()
        # What is another's is asked of nobody, or of the one that is named, whatever it says.
        other = csi.DeleteVolumeRequest(volume_id=f"data@{uuid_of(1)}/vol-1")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call_of(cluster, "Controller", other)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert others[0].requests == thief.requests == []
        cluster.record.groups[uuid_of(1)] = {others[0].name}
        assert await call_of(cluster, "Controller", other) == b""
        assert others[0].requests == [other.SerializeToString()]
        assert thief.requests == []

    in_cluster(test)


def test_no_capacity_of_one_node_breaks_the_sum_of_all(in_cluster: Run) -> None:
    async def test(cluster: Cluster) -> None:
        most = (1 << 63) - 1
        cluster.nodes[0].forged["GetCapacity"] = csi.GetCapacityResponse(
            available_capacity=most
        ).SerializeToString()
        answer = await call_of(cluster, "Controller", csi.GetCapacityRequest())
        assert csi.GetCapacityResponse.FromString(answer).available_capacity == most

    in_cluster(test)


def test_a_node_gets_the_secrets_of_its_own_calls_and_of_lists(in_cluster: Run) -> None:
    async def test(cluster: Cluster) -> None:
        first, *others = cluster.nodes
        own, other = f"data@{uuid_of(0)}/vol-new-1", f"data@{uuid_of(1)}/vol-new-1"
        hidden = {"passphrase": "hidden"}

        def has_it(node: SimulatedNode) -> bool:
            return any(b"hidden" in one for one in node.requests)

        for one in cluster.nodes:
            one.forged["DeleteVolume"] = b""
        await call_of(
            cluster, "Controller", csi.DeleteVolumeRequest(volume_id=other, secrets=hidden)
        )
        for number in (1, 2):
            here = csi.Topology(segments={TOPOLOGY_KEY: name_of(number)})
            request = csi.CreateVolumeRequest(
                name="new-1",
                secrets=hidden,
                accessibility_requirements=csi.TopologyRequirement(preferred=[here]),
            )
            await call_of(cluster, "Controller", request)
        assert [has_it(one) for one in cluster.nodes] == [False, True, True, False]
        await call_of(cluster, "Controller", csi.DeleteVolumeRequest(volume_id=own, secrets=hidden))
        assert has_it(first)
        await call_of(cluster, "Controller", csi.ControllerListVolumeHealthRequest(secrets=hidden))
        assert all(map(has_it, others))

    in_cluster(test)


def test_a_node_that_overstates_its_room_draws_volumes_that_may_be_anywhere(
    in_cluster: Run,
) -> None:
    """Each node learns the volume's name: it is asked whether it has it."""

    async def test(cluster: Cluster) -> None:
        thief = cluster.nodes[0]
        answer = csi.GetCapacityResponse()
        answer.maximum_volume_size.value = 1 << 60
        thief.forged["GetCapacity"] = answer.SerializeToString()
        assert await cluster.create("new-1") == thief.name
        assert all(any("vol-new-1" in call for call in one.calls) for one in cluster.nodes)

    in_cluster(test)


def test_a_node_that_left_is_in_no_metric(in_cluster: Run) -> None:
    async def test(cluster: Cluster) -> None:
        measured = Metrics(cluster.controller.nodes)
        cluster.controller._router._observe = measured.count_call
        for number in range(4):
            assert await cluster.get(number) == name_of(number)
        await call_of(cluster, "Controller", csi.ListVolumesRequest())
        cluster.nodes[1].forged["ControllerGetVolume"] = b""
        assert (await cluster.refused(1))[0] is grpc.StatusCode.INTERNAL
        text = measured.text().decode()
        took = "carver_controller_node_answer_duration_seconds_count"
        for number in range(4):
            labels = f'method="ControllerGetVolume",node="{name_of(number)}"'
            assert f'carver_controller_calls_total{{code="OK",{labels}}} 1.0' in text
            refused = f'carver_controller_refused_answers_total{{node="{name_of(number)}"}}'
            assert f"{refused} {float(number == 1)}" in text
            # Asked for a volume, and for its list.
            assert f'{took}{{node="{name_of(number)}"}} {2.0 + (number == 1)}' in text
        cluster.write(*(one.name for one in cluster.nodes if one.number != 1))
        await cluster.controller.look()
        text = measured.text().decode()
        assert name_of(1) not in text
        assert all(name_of(number) in text for number in (0, 2, 3))
        # One that joins again is counted from zero.
        cluster.write(*cluster.addresses)
        await cluster.controller.look()
        await cluster.ask()
        cluster.nodes[1].forged.clear()
        assert await cluster.get(1) == name_of(1)
        assert f'{took}{{node="{name_of(1)}"}} 1.0' in measured.text().decode()

    in_cluster(test)


def test_a_call_ends_whose_node_dies_without_a_word(
    in_cluster: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call has no deadline, and had long been waiting."""
    often = {"grpc.keepalive_time_ms": 100, "grpc.http2.ping_timeout_ms": 300}
    options = tuple((key, often.get(key, value)) for key, value in certificates._OPTIONS)
    monkeypatch.setattr(certificates, "_OPTIONS", options)
    allowed = (
        *(one for one in certificates.SERVER_OPTIONS if "min_ping" not in one[0]),
        ("grpc.http2.min_ping_interval_without_data_ms", 10),
    )
    monkeypatch.setattr(certificates, "SERVER_OPTIONS", allowed)

    async def test(cluster: Cluster) -> None:
        node = cluster.nodes[0]
        async with Relay.to(node.port) as relay:
            cluster.addresses[node.name] = f"127.0.0.1:{relay.port}"
            cluster.write(*cluster.addresses)
            await cluster.controller.look()
            await cluster.ask()
            node.answers.clear()
            call: Any = cluster.channel.unary_unary("/csi.v1.Controller/ControllerGetVolume")
            request = csi.ControllerGetVolumeRequest(volume_id=f"data@{uuid_of(0)}/vol-1")
            waiting = asyncio.create_task(_ended(call(request.SerializeToString())))
            while not node.calls:
                await asyncio.sleep(0.01)
            # Many pings, without other data, are no abuse.
            before = relay.bytes
            async with asyncio.timeout(20):
                while relay.bytes < before + 6 * PING_BYTES:
                    assert not waiting.done()
                    await asyncio.sleep(0.01)
            relay.passes.clear()
            code, why = await asyncio.wait_for(waiting, 20)
            assert (code, node.name in why) == (grpc.StatusCode.UNAVAILABLE, True)
            relay.passes.set()

    in_cluster(test)


# A frame of HTTP/2 with a ping, in a record of TLS.
PING_BYTES = 39


async def _ended(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code(), str(raised.value.details())


def test_no_part_of_an_address_is_taken_for_a_scheme(
    in_cluster: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node says of itself where it is, and gRPC knows unix:PATH."""
    monkeypatch.chdir(tmp_path)

    async def test(cluster: Cluster) -> None:
        reached = asyncio.Event()

        async def connected(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            reached.set()
            writer.close()

        server = await asyncio.start_unix_server(connected, "5")
        cluster.addresses[name_of(0)] = "unix:5"
        cluster.write(*cluster.addresses)
        await cluster.controller.look()
        await cluster.ask()
        assert not reached.is_set()
        assert (await cluster.refused(0))[0] is grpc.StatusCode.UNAVAILABLE
        server.close()

    in_cluster(test)


class Silent:
    """A source that fails as it is told to."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.error: Exception | None = None
        self.hangs = asyncio.Event()
        self.hangs.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    async def look(self) -> None:
        await self.hangs.wait()
        if self.error is not None:
            raise self.error


def test_what_was_known_stays_while_the_api_server_refuses_or_hangs(
    in_cluster: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(cluster: Cluster) -> None:
        source = Silent(Files(cluster.config))
        controller = cluster.controller
        controller._source = source
        for error in (errors.ClusterSilent("the nodes", "no answer"), KeyError("metadata")):
            source.error = error
            for _ in range(5):
                await controller.look()
            assert caplog.text.count(f"stay as they were: {error}") == 1
            assert await cluster.get(0) == name_of(0)
        source.error = None
        await controller.look()
        assert caplog.text.count("can be read again") == 1
        source.hangs.clear()
        looking = asyncio.create_task(controller.look())
        await asyncio.sleep(0)
        # What the health page asks.
        probe: Any = cluster.channel.unary_unary("/csi.v1.Identity/GetPluginInfo")
        assert await probe(b"", timeout=5)
        assert await cluster.get(0) == name_of(0)
        source.hangs.set()
        await looking

    with caplog.at_level(logging.INFO):
        in_cluster(test)


def test_the_controller_s_socket_is_root_s_from_its_first_moment(
    in_cluster: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a mode that is set later leaves a moment")

    monkeypatch.setattr(os, "chmod", refuse)

    async def test(cluster: Cluster) -> None:
        assert cluster.config.endpoint.stat().st_mode & 0o777 == 0o600

    in_cluster(test)


def test_a_node_that_is_silent_from_the_start_is_logged(
    in_cluster: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(cluster: Cluster) -> None:
        cluster.addresses["node-silent"] = "127.0.0.1:1"
        cluster.write(*cluster.addresses)
        await cluster.controller.look()
        for _ in range(3):
            await cluster.ask()
        assert caplog.text.count("node node-silent UNAVAILABLE") == 1

    in_cluster(test)


@pytest.mark.parametrize("count", [0, 3000])
def test_a_node_that_answers_with_another_page_ends_the_list(in_cluster: Run, count: int) -> None:
    """Always the same empty one, or more than it was asked for."""
    entries = [csi.ListVolumesResponse.Entry(volume=csi.Volume(volume_id="x"))] * count
    same = csi.ListVolumesResponse(entries=entries, next_token="" if count else "again")

    async def test(cluster: Cluster) -> None:
        cluster.nodes[1].volumes = same.SerializeToString()
        call: Any = cluster.channel.unary_unary("/csi.v1.Controller/ListVolumes")
        code, why = await _ended(call(b"", timeout=20))
        assert (code, cluster.nodes[1].name in why) == (grpc.StatusCode.INTERNAL, True)

    in_cluster(test)


def test_a_node_is_reached_whatever_the_length_of_its_name(
    in_cluster: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node names have up to 253 characters, and the name of a server in TLS (SNI) up to 255."""
    lengths = (63, 64, 235, 236)

    def long_name(number: int) -> str:
        text = ".".join([f"n{number}" + "x" * 58] * 5)[: lengths[number]]
        return text[:-1] + "e"

    monkeypatch.setattr(simulated, "name_of", long_name)

    async def test(cluster: Cluster) -> None:
        found = {len(one.name): one.problem for one in cluster.controller.nodes}
        assert found == dict.fromkeys(lengths, "")
        assert await cluster.get(3) == long_name(3)

    in_cluster(test)


@given(st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", fullmatch=True))
@example("a" * 253)
def test_the_name_in_a_certificate_fits_tls_and_is_one_node_s(node: str) -> None:
    name = certificates.node_name(node, DRIVER_NAME)
    assert len(name) <= 255
    assert name.endswith(f".node.{DRIVER_NAME}")
    assert (name == f"{node}.node.{DRIVER_NAME}") is (len(node) <= 235)
    assert certificates.node_name(f"{node[:-1]}-x", DRIVER_NAME) != name
