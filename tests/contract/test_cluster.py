"""The cluster's controller before two services, each with a group of its own, over TLS."""

import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import clustered
import expect
import grpc
import nodes
import pytest
from authority import Authority
from clustered import Cluster, cluster
from real.any import AnyHost

from agent.core import ids
from agent.csi.client import block, of_snapshot, of_volume
from agent.csi.interceptor import STRIPPED
from agent.extras.tls import certificates
from agent.extras.tls.certificates import Certificates
from agent.settings.settings import Config
from proto import csi_pb2 as csi
from proto import csi_pb2_grpc

MIB = 1 << 20
SIZE = 24 * MIB


@pytest.fixture
def two(host: AnyHost, config: Config, tmp_path: Path) -> Iterator[Cluster]:
    with cluster(host, config, tmp_path) as made:
        yield made


def at(two: Cluster, name: str) -> csi.TopologyRequirement:
    """What the provisioner sends of a claim whose pod was put on a node: that node is first."""
    every = [csi.Topology(segments=two.nodes[one].config.here) for one in two.nodes]
    first = csi.Topology(segments=two.nodes[name].config.here)
    return csi.TopologyRequirement(requisite=every, preferred=[first])


def create(two: Cluster, name: str, node: str = "", size: int = SIZE, **more: object) -> csi.Volume:
    """A claim's volume; without a node as for a class that binds immediately."""
    request = csi.CreateVolumeRequest(
        name=name,
        capacity_range=csi.CapacityRange(required_bytes=size),
        volume_capabilities=[block()],
        accessibility_requirements=at(two, node) if node else None,
        **more,  # type: ignore[arg-type]
    )
    return two.client.controller.CreateVolume(request).volume


def where(*volumes: csi.Volume) -> list[str]:
    """The nodes of volumes, as the scheduler is told."""
    places = [each for one in volumes for each in one.accessible_topology]
    return [value for one in places for value in one.segments.values()]


def snapshot_of(two: Cluster, volume: csi.Volume, name: str = "snap-1") -> csi.Snapshot:
    return two.client.snapshot(name, volume.volume_id)


def refused(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    error = cast(grpc.Call, raised.value)
    return error.code(), error.details()


def listed(two: Cluster) -> set[str]:
    """The ids of all volumes. A list waits three seconds for a busy group, then asks to repeat."""
    found = set[str]()

    def is_answered() -> bool:
        try:
            found.update(one.volume_id for one in two.client.volumes())
        except grpc.RpcError as error:
            if cast(grpc.Call, error).code() != grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        return True

    expect.soon(is_answered)
    return found


@pytest.mark.long_on_lvm
def test_a_volume_s_life(two: Cluster) -> None:
    volume = create(two, "pvc-1", "b")
    assert where(volume) == ["b"]
    assert create(two, "pvc-1", "b") == volume
    assert "vol-pvc-1" in two.nodes["b"].names()
    assert "vol-pvc-1" not in two.nodes["a"].names()
    two.client.modify(volume.volume_id, {"carver/readAhead": "1MiB"})
    snapshot = snapshot_of(two, volume)
    # The pods of the restored and the cloned claim were put on the other node.
    restored = create(two, "pvc-2", "a", volume_content_source=of_snapshot(snapshot.snapshot_id))
    cloned = create(two, "pvc-3", "a", volume_content_source=of_volume(volume.volume_id))
    assert where(restored, cloned) == ["b", "b"]
    other = create(two, "pvc-4", "a")
    assert where(other) == ["a"]
    assert two.client.expand(other.volume_id, 2 * SIZE).capacity_bytes == 2 * SIZE
    every = (restored, cloned, other, volume)
    assert listed(two) == {one.volume_id for one in every}
    two.client.delete_snapshot(snapshot.snapshot_id)
    for one in every:
        two.client.delete(one.volume_id)
        two.client.delete(one.volume_id)
    assert two.client.volumes() == []


@pytest.mark.long_on_lvm
def test_snapshots_of_one_node_are_taken_together_and_those_of_two_are_refused(
    two: Cluster,
) -> None:
    first, second = create(two, "pvc-1", "b"), create(two, "pvc-2", "b")
    other = create(two, "pvc-3", "a")
    made = two.client.group_snapshot("group-1", [first.volume_id, second.volume_id])
    assert len(made.snapshots) == 2
    parts = [one.snapshot_id for one in made.snapshots]
    assert two.client.find_group_snapshot(made.group_snapshot_id, parts).ready_to_use
    code, why = refused(
        lambda: two.client.group_snapshot("group-2", [first.volume_id, other.volume_id])
    )
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"{first.volume_id} is on b, {other.volume_id} is on a" in why
    two.client.delete_group_snapshot(made.group_snapshot_id, parts)
    assert two.client.snapshots() == []


@pytest.mark.variation
def test_changed_blocks_are_passed_on(two: Cluster) -> None:
    volume = create(two, "pvc-1", "b")
    node = two.nodes["b"]
    base = snapshot_of(two, volume, "snap-1")
    node.client.stage(volume, node.directory / "staging", block())
    node.host.write_bytes(node.device("vol-pvc-1"), MIB, b"x" * 4096)
    last = snapshot_of(two, volume, "snap-2")
    stub = two.client.stub(csi_pb2_grpc.SnapshotMetadataStub)
    delta = csi.GetMetadataDeltaRequest(
        base_snapshot_id=base.snapshot_id, target_snapshot_id=last.snapshot_id
    )
    found = [one for answer in stub.GetMetadataDelta(delta) for one in answer.block_metadata]
    assert [(one.byte_offset, one.size_bytes) for one in found] == [(MIB, 4096)]
    allocated = csi.GetMetadataAllocatedRequest(snapshot_id="group9@abcdefgh/snap-1")
    code, _ = refused(lambda: list(stub.GetMetadataAllocated(allocated)))
    assert code is grpc.StatusCode.UNAVAILABLE
    node.client.unstage(volume.volume_id, node.directory / "staging")


@pytest.mark.variation
@pytest.mark.parametrize("most", [1, 2, 3, 0])
def test_a_list_has_each_volume_once_page_by_page(two: Cluster, most: int) -> None:
    made = {
        create(two, f"pvc-{number}", node).volume_id
        for number, node in enumerate(("a", "a", "a", "b", "b"))
    }
    found, token = [], ""
    while True:
        request = csi.ListVolumesRequest(max_entries=most, starting_token=token)
        answer = two.client.controller.ListVolumes(request)
        assert not most or len(answer.entries) <= most
        found += [one.volume.volume_id for one in answer.entries]
        token = answer.next_token
        if not token:
            break
    assert sorted(found) == sorted(made)
    assert len({one.split("/")[0] for one in found}) == 2


@pytest.mark.variation
@pytest.mark.parametrize("token", ["nonsense", "c:", "group1@abcdefgh/vol-1"])
def test_a_token_of_no_node_is_refused(two: Cluster, token: str) -> None:
    request = csi.ListVolumesRequest(starting_token=token)
    assert refused(lambda: two.client.controller.ListVolumes(request))[0] is (
        grpc.StatusCode.ABORTED
    )


@pytest.mark.variation
def test_a_node_that_does_not_answer_costs_its_own_calls_only(two: Cluster) -> None:
    lost, kept = create(two, "pvc-1", "a"), create(two, "pvc-2", "b")
    clustered.listener(two.nodes["a"]).stop()
    two.ask()
    for call in (
        lambda: two.client.delete(lost.volume_id),
        lambda: two.client.volumes(),
        lambda: create(two, "pvc-3", "a"),
        lambda: snapshot_of(two, lost),
    ):
        code, why = refused(call)
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "node a (127.0.0.1:" in why
        assert "does not answer" in why
    assert where(create(two, "pvc-4", "b"), create(two, "pvc-5")) == ["b", "b"]
    two.client.delete(kept.volume_id)
    # Also for a controller that never heard of the group.
    two.restart()
    code, why = refused(lambda: two.client.delete(lost.volume_id))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "nodes that do not answer: a" in why


@pytest.mark.variation
def test_a_node_that_left_the_cluster_is_given_up_and_a_silent_one_is_waited_for(
    two: Cluster,
) -> None:
    clustered.listener(two.nodes["b"]).stop()
    two.ask()
    code, why = refused(lambda: create(two, "pvc-1", "b"))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "start it; if it will not come back, delete its Node object" in why
    two.write_nodes("a")
    two.loop.run(two.controller.look())
    code, why = refused(lambda: create(two, "pvc-1", "b"))
    assert (code, why) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "node b has left the cluster: the scheduler is to choose another",
    )
    assert where(create(two, "pvc-1", "a")) == ["a"]
    # A controller that has not heard of all its nodes does not know which have left.
    two.write_nodes()
    two.restart()
    code, _ = refused(lambda: create(two, "pvc-2", "b"))
    assert code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.variation
def test_capacity_is_that_of_the_node_or_of_all(two: Cluster) -> None:
    def room(node: str = "") -> int:
        request = csi.GetCapacityRequest(volume_capabilities=[block()])
        if node:
            request.accessible_topology.segments.update(two.nodes[node].config.here)
        return int(two.client.controller.GetCapacity(request).available_capacity)

    before = {node: room(node) for node in ("a", "b")}
    create(two, "pvc-1", "a")
    assert room("b") == before["b"]
    assert room("a") == before["a"] - SIZE
    assert room() == room("a") + room("b")
    segments = {two.config.topology_key: "c"}
    request = csi.GetCapacityRequest(accessible_topology=csi.Topology(segments=segments))
    code, why = refused(lambda: two.client.controller.GetCapacity(request))
    assert (code, "no node says that its topology is" in why) == (
        grpc.StatusCode.UNAVAILABLE,
        True,
    )


@pytest.mark.variation
def test_a_volume_that_may_be_anywhere_is_put_where_most_room_is_and_stays_there(
    two: Cluster,
) -> None:
    create(two, "pvc-1", "a", size=4 * SIZE)
    volume = create(two, "pvc-2")
    assert where(volume) == ["b"]
    create(two, "pvc-3", "b", size=6 * SIZE)
    two.restart()
    # By now there is more room on the other.
    assert create(two, "pvc-2") == volume


@pytest.mark.long_on_lvm
def test_a_node_that_starts_says_that_it_has_not_looked_at_its_disks(two: Cluster) -> None:
    """It listens before: a disk that hangs delays no call about others."""
    volume, b = create(two, "pvc-1", "a"), two.nodes["b"]
    # As where the disks of a were attached to b, whose classes do not name that group.
    clustered.listener(b).find_other_groups()
    two.ask()
    node = two.controller.nodes.get("b")
    assert node is not None
    had = dict(node.groups)
    assert len(had) == 2
    assert node.is_whole
    clustered.listener(b).stop()
    b.restart()
    listener = clustered.listener(b)
    listener.serve()
    two.write_nodes()
    two.loop.run(two.controller.look())
    until = time.monotonic() + 60
    while node.is_whole or node.problem:
        assert time.monotonic() < until
        two.ask()
    assert node.groups == had
    listener.find_other_groups()
    two.ask()
    assert node.is_whole
    assert node.groups == had
    assert volume.volume_id.partition("@")[2].partition("/")[0] in had


@pytest.mark.variation
def test_a_full_node_is_refused_and_no_other_is_taken(two: Cluster) -> None:
    code, why = refused(lambda: create(two, "pvc-1", "a", size=1 << 40))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert why.startswith("node a: ")


@pytest.mark.variation
def test_an_id_that_none_can_have_is_answered_as_by_a_node(two: Cluster) -> None:
    two.client.delete("nonsense")
    code, _ = refused(lambda: two.client.volume("nonsense"))
    assert code is grpc.StatusCode.NOT_FOUND
    code, why = refused(lambda: two.client.delete(""))
    assert (code, "volume_id: is required" in why) == (grpc.StatusCode.INVALID_ARGUMENT, True)


@pytest.mark.variation
def test_without_a_certificate_no_call_reaches_a_node(two: Cluster) -> None:
    """As from a tenant's pod."""
    name = certificates.node_name("a", two.config.driver_name)
    credentials = grpc.ssl_channel_credentials(two.authority.certificate)
    options = certificates.options(name)
    with grpc.secure_channel(two.address("a"), credentials, options) as to:
        stub = csi_pb2_grpc.IdentityStub(to)
        code, _ = refused(lambda: stub.GetPluginInfo(csi.GetPluginInfoRequest(), timeout=60))
    assert code is grpc.StatusCode.UNAVAILABLE
    with grpc.insecure_channel(two.address("a")) as to:
        stub = csi_pb2_grpc.IdentityStub(to)
        code, _ = refused(lambda: stub.GetPluginInfo(csi.GetPluginInfoRequest(), timeout=60))
    assert code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.variation
def test_only_the_controller_may_call_a_node(two: Cluster) -> None:
    strangers = {
        "another node": two.directory / "tls-b",
        "another authority": Authority().write(
            two.directory / "stranger", certificates.controller_name(two.config.driver_name)
        ),
    }
    for who, directory in strangers.items():
        shown = Certificates.read(directory)
        if who == "another authority":
            shown = replace(shown, authority=two.authority.certificate)
        name = certificates.node_name("a", two.config.driver_name)
        options = certificates.options(name)
        with grpc.secure_channel(two.address("a"), shown.for_client(), options) as to:
            stub = csi_pb2_grpc.ControllerStub(to)
            request = csi.ListVolumesRequest()
            code, why = refused(lambda: stub.ListVolumes(request, timeout=60))  # noqa: B023
        if who == "another node":
            assert code is grpc.StatusCode.PERMISSION_DENIED
            assert "only controller.lvm.csi.carver may call this node" in why
        else:
            assert code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.variation
@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_only_tls_1_3_is_spoken(two: Cluster, newest: ssl.TLSVersion) -> None:
    shown = two.directory / "controller"
    ours = ssl.create_default_context(cafile=str(shown / "ca.crt"))
    ours.load_cert_chain(shown / "tls.crt", shown / "tls.key")
    name = certificates.node_name("a", two.config.driver_name)
    clustered.require_only_tls_1_3(ours, newest, clustered.listener(two.nodes["a"]).port, name)


@pytest.mark.variation
def test_a_node_serves_the_controller_nothing_but_its_services(two: Cluster) -> None:
    shown = Certificates.read(two.directory / "controller")
    name = certificates.node_name("a", two.config.driver_name)
    options = certificates.options(name)
    with grpc.secure_channel(two.address("a"), shown.for_client(), options) as to:
        for path in ("/csi.v1.Node/NodeGetInfo", "/carver.v2.Operator/VolumesHere"):
            call: Any = to.unary_unary(path)
            assert refused(lambda: call(b"", timeout=60))[0] is (  # noqa: B023
                grpc.StatusCode.UNIMPLEMENTED
            )


@pytest.mark.variation
def test_a_node_with_another_s_key_is_not_believed(two: Cluster) -> None:
    """Where a stolen key answers at the address of another node."""
    two.nodes_file.write_text(f'[nodes]\na = "{two.address("b")}"\n')
    two.loop.run(two.controller.look())
    two.ask()
    code, _ = refused(lambda: create(two, "pvc-1", "a"))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert two.nodes["b"].names() == set()


@pytest.mark.variation
def test_certificates_are_replaced_without_a_pause(two: Cluster) -> None:
    volume = create(two, "pvc-1", "a")
    driver = two.config.driver_name
    two.authority.write(two.directory / "tls-a", certificates.node_name("a", driver))
    two.authority.write(two.directory / "controller", certificates.controller_name(driver))
    two.loop.run(two.controller.look())
    assert two.client.volume(volume.volume_id).volume.volume_id == volume.volume_id
    two.ask()
    assert all(not one.problem for one in two.controller.nodes)


@pytest.mark.variation
def test_calls_in_flight_end_well_while_an_authority_is_followed_by_another(two: Cluster) -> None:
    driver, volume = two.config.driver_name, create(two, "pvc-1", "a")
    successor = Authority("successor")
    names = {"tls-a": certificates.node_name("a", driver)}
    names |= {"tls-b": certificates.node_name("b", driver)}
    names |= {"controller": certificates.controller_name(driver)}

    def replace_all(signer: Authority, *also: Authority) -> None:
        """As each side reads its files, the nodes first, while calls go on."""
        for directory, name in names.items():
            signer.write(two.directory / directory, name, *also)
            two.loop.run(two.controller.look())
            two.ask()
            assert [one.problem for one in two.controller.nodes] == ["", ""]

    locks = two.nodes["a"].service.context.locks
    waits = threading.Event()
    await_turn = locks._wait_in_queue

    def wait(*names: Any) -> None:
        waits.set()
        await_turn(*names)

    with ThreadPoolExecutor(1) as caller, ExitStack() as held:
        held.enter_context(locks.hold(ids.logical_name(volume.volume_id)))
        locks._wait_in_queue = wait  # type: ignore[method-assign, assignment]
        expanding = caller.submit(two.client.expand, volume.volume_id, 2 * SIZE)
        assert waits.wait(expect.PATIENCE_SECONDS)
        replace_all(two.authority, successor)
        replace_all(successor, two.authority)
        replace_all(successor)
        assert not expanding.done()
        held.close()
        assert expanding.result(expect.PATIENCE_SECONDS).capacity_bytes == 2 * SIZE
    two.client.delete(volume.volume_id)


@pytest.mark.variation
@pytest.mark.parametrize("side", ["controller", "tls-a"])
@pytest.mark.parametrize("broken", ["tls.key", "tls.crt", "ca.crt", "another's key"])
def test_files_that_are_broken_midway_change_nothing(
    two: Cluster, side: str, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    driver, volume = two.config.driver_name, create(two, "pvc-1", "a")
    name = certificates.node_name("a", driver)
    if side == "controller":
        name = certificates.controller_name(driver)
    if broken == "another's key":
        key = two.authority.write(two.directory / "another", name) / "tls.key"
        (two.directory / side / "tls.key").write_bytes(key.read_bytes())
    else:
        (two.directory / side / broken).write_text("-----BEGIN half a file")
    for _ in range(3):
        two.loop.run(two.controller.look())
    # A connection of a new controller's, or of one that takes the node for another.
    two.controller.nodes.get("a").address = ""  # type: ignore[union-attr]
    two.loop.run(two.controller.look())
    two.ask()
    assert [one.problem for one in two.controller.nodes] == ["", ""]
    assert two.client.volume(volume.volume_id).volume.volume_id == volume.volume_id
    text = "the nodes and certificates stay as they were: "
    assert caplog.text.count(text if side == "controller" else "the certificates stay as") == 1
    assert "PRIVATE" not in caplog.text
    two.authority.write(two.directory / side, name)
    before = Certificates.read(two.directory / "controller")
    two.loop.run(two.controller.look())
    two.ask()
    assert two.controller._certificates == before
    assert [one.problem for one in two.controller.nodes] == ["", ""]


@pytest.mark.variation
def test_secrets_are_in_no_log_of_either_side(
    two: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    hidden = "never-seen-in-a-log"
    with caplog.at_level(logging.DEBUG):
        volume = create(two, "pvc-1", "a", secrets={"passphrase": hidden})
        # Calls that fail have sentences, too.
        refused(lambda: create(two, "pvc-2", "a", size=1 << 40, secrets={"passphrase": hidden}))
        request = csi.DeleteVolumeRequest(volume_id=volume.volume_id, secrets={"key": hidden})
        two.client.controller.DeleteVolume(request)
        call: Any = two.client.channel.unary_unary("/csi.v1.Controller/CreateVolume")
        code, _ = refused(lambda: call(b"\xff" + hidden.encode(), timeout=60))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
    everything = [repr(vars(one)) for one in caplog.records]
    assert any(STRIPPED in one for one in everything), "the node logs requests at this level"
    assert any("node_milliseconds" in one and "pvc-1" in one for one in everything)
    assert not [one for one in everything if hidden in one]


@pytest.mark.variation
def test_large_requests_and_slow_clients_hold_up_no_call(two: Cluster) -> None:
    """From who has a certificate, and from who has none."""
    name = certificates.node_name("a", two.config.driver_name)
    shown = Certificates.read(two.directory / "tls-b")
    host, port = two.address("a").split(":")
    with ExitStack() as ending:
        for number in range(200):
            one = ending.enter_context(socket.create_connection((host, int(port)), timeout=60))
            # Half of them begin a handshake, and say no more.
            one.sendall(b"\x16\x03\x01\x02\x00\x01" if number % 2 else b"")
        channel = grpc.secure_channel(
            two.address("a"), shown.for_client(), certificates.options(name)
        )
        call: Any = ending.enter_context(channel).unary_unary("/csi.v1.Controller/CreateVolume")
        large = csi.CreateVolumeRequest(name="x" * (8 << 20)).SerializeToString()
        code, _ = refused(lambda: call(large, timeout=30))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED

        async def connect_anew() -> None:
            two.controller.nodes.reconnect()

        two.loop.run(connect_anew())
        volume = create(two, "pvc-1", "a")
    two.client.delete(volume.volume_id)


@pytest.mark.variation
def test_the_status_of_all_nodes_is_shown_and_printed_as_json(
    two: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    clustered.listener(two.nodes["a"]).stop()
    two.ask()
    words = ["controller", "status", "--endpoint", str(two.config.endpoint)]

    def shown(*more: str) -> str:
        parsed = nodes.command_line().parse_args([*words, *more])
        assert parsed.run(parsed) == 1
        return capsys.readouterr().out

    lines = shown().splitlines()
    assert lines[0].startswith("2 nodes; the controller's certificate ends in 1 day")
    assert "UNAVAILABLE" in lines[1]
    assert lines[2].endswith(" answers")
    found = json.loads(shown("--json"))
    assert found["certificate_ends_seconds"] > time.time()
    silent, well = found["nodes"]
    assert silent["problem"].startswith("UNAVAILABLE")
    assert well["problem"] == ""
    assert list(well["groups"].values()) == [two.nodes["b"].group]
    assert well["version"] == version("carver")
    assert 0 <= time.time() - well["answered_seconds"] < 60
