"""Volumes that the controller moves from node to node over TLS, as an evacuation does."""

import itertools
import logging
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import clustered
import configured
import expect
import grpc
import histories
import nodes
import pytest
from clustered import Cluster, channel
from fakes.host import FakeHost
from nodes import Node, volume_of, write
from relay import Relay

from agent.core import errors, tag
from agent.csi.client import block
from agent.extras.controller.controller_metrics import Metrics
from agent.extras.controller.node_moves import NodeFailed
from agent.extras.streams import form, reading
from agent.extras.tls import certificates
from agent.extras.tls.certificates import Certificates
from agent.extras.transfer import grants, node_streams
from agent.extras.transfer.move import Move, Progress
from agent.extras.transfer.moving import Mover
from agent.extras.transfer.receiving import Receiver
from agent.extras.transfer.transfer_service import OF_CONTROLLER, OF_NODES
from proto import carver_pb2 as carver
from proto import csi_pb2 as csi

Code = grpc.StatusCode
TRANSFER = "/carver.v2.Transfer"
EVERY = tuple(
    f"{TRANSFER}/{one.name}" for one in carver.DESCRIPTOR.services_by_name["Transfer"].methods
)
SERVED = {f"{TRANSFER}/{one}" for one in OF_CONTROLLER | OF_NODES}


@contextmanager
def nodes_that_send(tmp_path: Path, *, evacuation: bool = True) -> Iterator[Cluster]:
    config = replace(configured.carver(tmp_path), evacuation=evacuation)
    hosts = {}
    for number, name in enumerate("ab", 1):
        (tmp_path / f"machine-{name}").mkdir()
        hosts[name] = FakeHost(tmp_path / f"machine-{name}", number)
    with clustered.cluster(hosts["a"], config, tmp_path, hosts=hosts) as made:
        yield made


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Cluster]:
    with nodes_that_send(tmp_path) as made:
        yield made


@pytest.fixture
def volume(two: Cluster) -> csi.Volume:
    """A volume of the first node with content, which is not in use."""
    made = volume_of(two.nodes["a"])
    write(two.nodes["a"], "vol-db", random.Random(1))
    two.nodes["a"].client.unstage(made.volume_id, two.nodes["a"].directory / "staging")
    return made


def move(two: Cluster, volume_id: str, layout: str = "linear", **more: Any) -> Move:
    return two.controller.moves.move(volume_id, "a", "b", device_class=layout, **more)


def run(moving: Move) -> None:
    moving.approach()
    assert moving.hand_over()
    moving.complete()


def usable(node: Node) -> int:
    return len(nodes.usable(node))


@pytest.mark.parametrize("layout", ["linear", "thin", "sealed-linear", "sealed-thin"])
def test_a_volume_moves_whole(two: Cluster, layout: str) -> None:
    a, b = two.nodes["a"], two.nodes["b"]
    disk = histories.Disk(a.client, a.service, a.host, layout, "db")
    histories.write_some(disk, random.Random(1))
    said: list[str] = []
    shown: list[Progress] = []
    moving = move(two, disk.id, layout, tell=said.append, show=shown.append)
    with a.host.kernel.opened(disk.device):
        first = moving.approach()
        assert (first.is_moved, first.in_use, first.rounds) == (False, True, 1)
        assert first.is_caught_up
        assert first.changed_bytes > 0
        assert not moving.hand_over()
    histories.write_some(disk, random.Random(2))
    disk.deactivate()
    assert moving.hand_over()
    assert moving.hand_over()
    there = moving.complete()
    assert there["state"] == tag.READY
    assert moving.complete() == there
    assert moving.approach().is_moved
    size = a.service.reports.fresh(a.group).group(a.group).volume("vol-db").size_bytes
    assert b.content("vol-db", size) == a.content("vol-db", size)
    assert {one.done_bytes for one in shown} >= {size}
    assert all(one.done_bytes <= one.size_bytes for one in shown)
    moving.finish()
    assert a.names() == set()
    [moved] = b.client.volumes()
    assert moved.volume_id == there["volume_id"]
    secrets = histories.KEY if layout.startswith(histories.SEALED) else {}
    b.client.stage(moved, b.directory / "staging", block(), secrets)


def test_each_call_of_a_move_is_counted_as_a_call_that_is_passed_on(
    two: Cluster, volume: csi.Volume, caplog: pytest.LogCaptureFixture
) -> None:
    records = "agent.extras.controller.call_records"
    caplog.set_level(logging.INFO, records)
    metrics = Metrics(two.controller.nodes)
    moving = move(two, volume.volume_id)
    run(moving)
    with pytest.raises(NodeFailed, match="NOT_FOUND"):
        move(two, f"{volume.volume_id}-other").source.state()
    called = {(one.method, one.node): one for one in two.calls}
    assert all(one.subject.startswith(volume.volume_id) for one in called.values())
    methods = {"BeginMove", "HoldMove", "CommitMove", "CreateSnapshot", "ListSnapshots"}
    assert {method for method, node in called if node == "a"} >= methods
    assert {method for method, node in called if node == "b"} >= {"Pull", "FinishReceive"}
    # The duration of a stream is no time of an answer.
    assert called["Pull", "b"].stream_seconds > 0
    assert not called["Pull", "b"].nodes_seconds
    for one in two.calls:
        metrics.count_call(one)
    text = metrics.text().decode()
    assert 'carver_controller_calls_total{code="OK",method="CommitMove",node="a"} 1.0' in text
    assert 'carver_controller_calls_total{code="NOT_FOUND",method="MoveStatus",node="a"}' in text
    # Few of many calls are logged: those that failed.
    # The nodes log their calls, too, in this process.
    logged = [vars(one)["fields"] for one in caplog.records if one.name == records]
    assert [(one["method"], one["code"]) for one in logged] == [("MoveStatus", "NOT_FOUND")]
    two.nodes_file.write_text("[nodes]\n")
    two.loop.run(two.controller.look())
    with pytest.raises(NodeFailed, match="no node a"):
        moving.source.state()
    assert (two.calls[-1].node, two.calls[-1].code) == ("", Code.UNAVAILABLE)


def test_a_volume_that_moved_is_taken_back(two: Cluster, volume: csi.Volume) -> None:
    content = two.nodes["a"].content("vol-db")
    moving = move(two, volume.volume_id)
    run(moving)
    move(two, volume.volume_id).undo(
        confirmed=lambda _question: True, is_nowhere=lambda _question: False
    )
    assert (usable(two.nodes["a"]), two.nodes["b"].names()) == (1, set())
    assert two.nodes["a"].content("vol-db") == content


def test_a_stream_that_was_cut_off_continues_where_it_ended(
    two: Cluster, volume: csi.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_streams, "PART_BYTES", 64 << 10)
    flush, parts = node_streams._Messages.flush, [200]

    def cut(self: Any) -> None:
        parts[0] -= 1
        if not parts[0]:
            raise OSError("the line is cut")
        flush(self)

    # A whole volume of noise.
    two.nodes["a"].client.stage(volume, two.nodes["a"].directory / "staging", block())
    two.nodes["a"].host.write_bytes(
        two.nodes["a"].device("vol-db"), 0, random.Random(5).randbytes(nodes.SIZE)
    )
    two.nodes["a"].client.unstage(volume.volume_id, two.nodes["a"].directory / "staging")
    with monkeypatch.context() as patched:
        patched.setattr(node_streams._Messages, "flush", cut)
        with pytest.raises(NodeFailed, match="the line is cut"):
            move(two, volume.volume_id).approach()
    offset = move(two, volume.volume_id).destination.status()["offset_bytes"]
    assert 0 < offset < nodes.SIZE
    moving = move(two, volume.volume_id)
    first = moving.approach()
    assert first.changed_bytes == nodes.SIZE - offset
    assert not first.is_caught_up
    assert moving.approach().is_caught_up
    run(moving)
    assert two.nodes["b"].content("vol-db") == two.nodes["a"].content("vol-db")


@pytest.mark.parametrize("layout", ["linear", "sealed-linear"])
@pytest.mark.parametrize("is_late", [False, True])
def test_what_is_there_already_is_not_received_again(
    two: Cluster, monkeypatch: pytest.MonkeyPatch, layout: str, *, is_late: bool
) -> None:
    a, b = two.nodes["a"], two.nodes["b"]
    disk = histories.Disk(a.client, a.service, a.host, layout, "db")
    histories.write_some(disk, random.Random(1))
    moving = move(two, disk.id, layout)
    release = moving.source.begin("b").release
    first, last = moving.source.take(), moving.source.take()
    sent = moving.destination.send(first, "", release, 0, is_verified=True)
    assert (sent.is_equal, sent.data_bytes > 0) == (True, True)
    size = a.service.reports.fresh(a.group).group(a.group).volume("vol-db").size_bytes
    b.transfer.OpenReceived(
        carver.VolumeRequest(volume_id=moving.destination.status()["volume_id"])
    )
    content = b.content("vol-db", size)
    if is_late:
        # The first look at the volume comes before another call has received all.
        monkeypatch.setattr(node_streams, "_received", _blind(node_streams._received))
    again = moving.destination.send(first, "", release, 0, is_verified=True)
    assert not again.is_equal
    assert (again.data_bytes > 0) == is_late
    moving.destination.send(last, first, release, 0, is_verified=False)
    moving.destination.send(last, first, release, 0, is_verified=True)
    assert b.content("vol-db", size) == content
    node = two.controller.nodes.get("b")
    assert node is not None
    assert node.refused_answers == 0

    def is_deactivated() -> bool:
        """The thread that sends closes its snapshot after the last message was received."""
        try:
            disk.deactivate()
        except OSError:
            return False
        return True

    expect.soon(is_deactivated)
    run(move(two, disk.id, layout))


def _blind(look: Callable[..., Any]) -> Callable[..., Any]:
    """A look at a volume that sees nothing each first time."""
    looks = [0]

    def seen(*given: Any) -> Any:
        looks[0] += 1
        return look(*given) if looks[0] % 2 == 0 else carver.ReceiveState(state="absent")

    return seen


# Who may call


def code_of(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    error = cast(grpc.Call, raised.value)
    return error.code(), error.details()


def answers(two: Cluster, who: str) -> dict[str, grpc.StatusCode]:
    """By call of the service Transfer: what an empty request gets."""
    with channel(two, who) as to:
        found = {}
        for path in EVERY:
            call: Any = to.unary_stream(path)
            try:
                list(call(b"", timeout=60))
                found[path] = Code.OK
            except grpc.RpcError as error:
                found[path] = cast(grpc.Call, error).code()
        return found


def test_a_node_s_key_without_a_grant_may_call_nothing(two: Cluster) -> None:
    assert set(answers(two, "tls-b").values()) == {Code.PERMISSION_DENIED}
    # Its own key, too.
    assert set(answers(two, "tls-a").values()) == {Code.PERMISSION_DENIED}
    with channel(two, "tls-b") as to:
        for path in ("/csi.v1.Controller/ListVolumes", "/csi.v1.Identity/GetPluginInfo"):
            call: Any = to.unary_unary(path)
            assert code_of(lambda: call(b"", timeout=60))[0] is Code.PERMISSION_DENIED  # noqa: B023


def test_the_controller_may_call_what_a_move_needs(two: Cluster) -> None:
    found = answers(two, "controller")
    assert {path for path, code in found.items() if code is Code.UNIMPLEMENTED} == (
        set(EVERY) - SERVED
    )
    # A stream is for the node with the grant only.
    assert found[f"{TRANSFER}/Send"] is Code.PERMISSION_DENIED


def test_without_the_setting_nothing_is_served(tmp_path: Path) -> None:
    with nodes_that_send(tmp_path, evacuation=False) as two:
        assert set(answers(two, "controller").values()) == {Code.UNIMPLEMENTED}
        assert set(answers(two, "tls-b").values()) == {Code.PERMISSION_DENIED}
        made = volume_of(two.nodes["a"])
        with pytest.raises(NodeFailed, match="UNIMPLEMENTED"):
            move(two, made.volume_id).approach()
        # And not on the socket that only root can open.
        transfer = two.nodes["a"].transfer
        pull = carver.PullRequest(
            name="db",
            release="ab" * 32,
            source=carver.PullSource(node="b", address="x", volume_id="v", snapshot_id="s"),
        )
        code, why = code_of(lambda: list(transfer.Pull(pull)))
        assert (code, "evacuation" in why) == (Code.FAILED_PRECONDITION, True)
        code, _ = code_of(lambda: list(transfer.Send(carver.SendRequest())))
        assert code is Code.PERMISSION_DENIED


class Begun:
    """A move that has begun, with a snapshot, and what the target would ask for."""

    def __init__(self, two: Cluster, volume: csi.Volume) -> None:
        self.two, self.volume = two, volume
        source = move(two, volume.volume_id).source
        self.release = source.begin("b").release
        self.snapshot_id = source.take()
        self.controller = Certificates.read(two.directory / "controller")

    def grant(self, **more: Any) -> carver.Grant:
        given = {
            "volume_id": self.volume.volume_id,
            "source": "a",
            "target": "b",
            **more,
        }
        return grants.new(self.controller, self.two.config.driver_name, **given)

    def ask(self, who: str = "tls-b", **more: Any) -> bytes:
        """Read the whole stream; raises what the node answers."""
        given = {
            "snapshot_id": self.snapshot_id,
            "release": self.release,
            "grant": more.pop("grant", None) or self.grant(),
            **more,
        }
        with channel(self.two, who) as to:
            call: Any = to.unary_stream(
                f"{TRANSFER}/Send",
                request_serializer=carver.SendRequest.SerializeToString,
                response_deserializer=carver.SendPart.FromString,
            )
            found = list(call(carver.SendRequest(**given), timeout=60))
        assert all(len(one.data) <= node_streams.PART_BYTES for one in found)
        return b"".join(one.data for one in found)

    def require_denied(self, why: str, **more: Any) -> None:
        code, details = code_of(lambda: self.ask(**more))
        assert code is Code.PERMISSION_DENIED, details
        assert why in details


@pytest.fixture
def begun(two: Cluster, volume: csi.Volume) -> Begun:
    return Begun(two, volume)


def test_the_target_may_read_the_move_s_snapshots_and_nothing_else(
    two: Cluster, begun: Begun
) -> None:
    assert begun.ask().startswith(form.MAGIC)
    a, volume_id = two.nodes["a"], begun.volume.volume_id
    kept = a.client.snapshot("backup", volume_id).snapshot_id
    other = volume_of(a, name="other")
    of_other = a.client.snapshot(f"move-{begun.release[:12]}-1", other.volume_id).snapshot_id
    two.authority.write(
        two.directory / "tls-c", certificates.node_name("c", two.config.driver_name)
    )
    begun.require_denied("there is no grant", grant=carver.Grant(signature=b"x"))
    begun.require_denied("is for node 'b'", who="tls-c")
    begun.require_denied("is for node 'b'", who="controller")
    begun.require_denied("is for node 'c'", grant=begun.grant(target="c"))
    begun.require_denied("does not move to c", who="tls-c", grant=begun.grant(target="c"))
    begun.require_denied("of node 'b'", grant=begun.grant(source="b"))
    begun.require_denied("does not move to b", grant=begun.grant(volume_id=other.volume_id))
    begun.require_denied("no snapshot of this move", snapshot_id=kept)
    begun.require_denied("no snapshot of this move", base_snapshot_id=kept)
    begun.require_denied("no snapshot of this move", snapshot_id=volume_id)
    begun.require_denied("no snapshot of this move", snapshot_id="")
    begun.require_denied("is of another volume", snapshot_id=of_other)
    begun.require_denied("of another move", release="ab" * 32)
    begun.require_denied("of another move", release="")
    begun.require_denied("at most 32768 bytes", release="a" * 33_000)
    move(two, volume_id).source.undo("")
    begun.require_denied("does not move to b")


def test_a_grant_of_another_time_key_or_form_is_denied(two: Cluster, begun: Begun) -> None:
    driver = two.config.driver_name
    for seconds in (-4000, 4000):
        clock = partial(lambda ahead: time.time() + ahead, seconds)
        old = grants.new(begun.controller, driver, begun.volume.volume_id, "a", "b", clock)
        begun.require_denied("not valid at this time", grant=old)
    begun.controller = Certificates.read(two.directory / "tls-b")
    begun.require_denied("signed by b.node", grant=begun.grant())
    begun.controller = Certificates.read(two.directory / "controller")
    altered = begun.grant()
    altered.text = altered.text.replace(b'"target":"b"', b'"target":"c"')
    begun.require_denied("signature", grant=altered)


def test_few_streams_go_on_at_the_same_time(
    two: Cluster, begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, send = threading.Event(), node_streams._Messages.write
    begun_sends = threading.Semaphore(0)

    def slow(self: Any, data: Any) -> None:
        begun_sends.release()
        assert go_on.wait(expect.PATIENCE_SECONDS)
        send(self, data)

    monkeypatch.setattr(node_streams._Messages, "write", slow)
    monkeypatch.setattr(node_streams, "_FREE_SECONDS", 0.5)
    ended: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: ended.append(begun.ask()))
        for _ in range(node_streams.MOST_AT_ONCE)
    ]
    with ExitStack() as stack:
        stack.callback(go_on.set)
        for one in threads:
            one.start()
        for _ in threads:
            assert begun_sends.acquire(timeout=expect.PATIENCE_SECONDS)
        code, why = code_of(begun.ask)
        assert (code, "Send: the limit of 2 calls" in why) == (Code.RESOURCE_EXHAUSTED, True)
        go_on.set()
        for one in threads:
            one.join(expect.PATIENCE_SECONDS)
    assert len(ended) == 2
    assert begun.ask() == ended[0]


def test_a_stream_waits_for_one_that_is_being_closed(begun: Begun) -> None:
    """The pod may be stopped, so the last round does not wait for the next look."""
    transfer = cast(Any, begun.two.nodes["a"].service.extras["transfer"])
    sends = transfer._node_streams._sends
    for _ in range(node_streams.MOST_AT_ONCE):
        sends.take()
    later = threading.Timer(0.3, sends.give_back)
    later.start()
    assert begun.ask()
    later.join()
    sends.give_back()


def test_a_caller_that_goes_ends_its_stream(
    two: Cluster, begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_streams, "_PROGRESS_SECONDS", 0.05)
    streams = two.nodes["a"].service.extras["transfer"]._node_streams  # type: ignore[attr-defined]
    with channel(two, "tls-b") as to, monkeypatch.context() as patched:
        # More messages than wait anywhere.
        patched.setattr(node_streams, "PART_BYTES", 512)
        call: Any = to.unary_stream(
            f"{TRANSFER}/Send", request_serializer=carver.SendRequest.SerializeToString
        )
        request = carver.SendRequest(
            snapshot_id=begun.snapshot_id, release=begun.release, grant=begun.grant()
        )
        answers_ = call(request)
        next(answers_)
        answers_.cancel()
        expect.soon(lambda: not streams._jobs)
    assert begun.ask().startswith(form.MAGIC)


# Machines that lose power

# The pings of connections in these tests are so many times as frequent.
_FASTER = 20


def faster(options: Iterable[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    """Options with more frequent pings, and shorter time limits for the answers."""
    of_pings = ("keepalive_time_ms", "keepalive_timeout_ms", "ping_timeout_ms")
    return tuple(
        (key, value // _FASTER if key.endswith(of_pings) else value) for key, value in options
    )


@pytest.mark.parametrize("is_flooding", [True, False], ids=["full of data", "without data"])
@pytest.mark.parametrize("gone", ["a", "b"], ids=["a node of both", "the controller"])
def test_a_machine_that_loses_power_ends_its_streams_within_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str, is_flooding: bool
) -> None:
    """The way to one of both nodes is lost: the target's to the source, or the controller's."""
    monkeypatch.setattr(certificates, "_OPTIONS", faster(certificates._OPTIONS))
    monkeypatch.setattr(certificates, "SERVER_OPTIONS", faster(certificates.SERVER_OPTIONS))
    flush, lost = node_streams._Messages.flush, threading.Event()

    def lose_power(messages: Any) -> None:
        flush(messages)
        put = messages._put
        two.loop.loop.call_soon_threadsafe(relay.passes.clear)
        lost.set()
        while True:
            if is_flooding:
                put(carver.SendPart(data=bytes(1 << 20)))
            else:
                put.__self__.check()
                time.sleep(0.01)

    with nodes_that_send(tmp_path) as two:
        made = volume_of(two.nodes["a"])
        write(two.nodes["a"], "vol-db", random.Random(1))
        two.nodes["a"].client.unstage(made.volume_id, two.nodes["a"].directory / "staging")
        with relayed(two, gone) as relay:
            streams: list[Any] = [
                node.service.extras["transfer"]._node_streams  # type: ignore[attr-defined]
                for node in two.nodes.values()
            ]
            with monkeypatch.context() as patched:
                patched.setattr(node_streams, "PART_BYTES", 4096)
                patched.setattr(node_streams._Messages, "flush", lose_power)
                failing = threading.Thread(target=lambda: code_of(move_of(two, made)))
                failing.start()
                assert lost.wait(expect.PATIENCE_SECONDS)
                began = time.monotonic()
                expect.soon(lambda: not any(one._jobs for one in streams))
                # Time to look for a caller that has gone, and for a machine with other work.
                assert time.monotonic() - began < certificates.GONE_SECONDS / _FASTER + 20
                failing.join(expect.PATIENCE_SECONDS)
            for one in streams:
                for limit in (one._sends, one._pulls):
                    assert limit._free._value == node_streams.MOST_AT_ONCE
            two.loop.loop.call_soon_threadsafe(relay.passes.set)
            two.ask()
            run(move(two, made.volume_id))
        assert two.nodes["b"].content("vol-db") == two.nodes["a"].content("vol-db")


def move_of(two: Cluster, volume: csi.Volume) -> Callable[[], Any]:
    return lambda: move(two, volume.volume_id).approach()


@contextmanager
def relayed(two: Cluster, name: str) -> Iterator[Relay]:
    """Have the controller name another way to a node, which can be lost."""

    async def opened() -> tuple[Any, Relay]:
        way = Relay.to(int(two.address(name).rpartition(":")[2]))
        return way, await way.__aenter__()

    way, relay = two.loop.run(opened())
    lines = [
        f'"{one}" = "{f"127.0.0.1:{relay.port}" if one == name else two.address(one)}"'
        for one in two.nodes
    ]
    two.nodes_file.write_text("\n".join(["[nodes]", *lines, ""]))
    two.loop.run(two.controller.look())
    two.ask()
    try:
        yield relay
    finally:
        two.loop.run(way.__aexit__(None, None, None))


# What is not so


def test_a_volume_of_another_node_is_not_moved(two: Cluster) -> None:
    made = volume_of(two.nodes["b"])
    with pytest.raises(NodeFailed, match="is a volume of node b"):
        move(two, made.volume_id).approach()


def test_a_late_controller_ends_no_other_move_than_its_own(
    two: Cluster, volume: csi.Volume
) -> None:
    a, b = two.nodes["a"], two.nodes["b"]
    late = move(two, volume.volume_id)
    late.approach()
    of_late = late.source.state().release
    # Meanwhile another controller undoes that move, and makes another one.
    move(two, volume.volume_id).undo(
        confirmed=lambda _question: False, is_nowhere=lambda _question: False
    )
    moving = move(two, volume.volume_id)
    moving.approach()

    def require_refused(end: Callable[[str], object]) -> None:
        with pytest.raises(NodeFailed, match="another move") as raised:
            end(of_late)
        assert raised.value.code() is Code.FAILED_PRECONDITION

    received = moving.destination.status()
    require_refused(late.destination.abort)
    assert moving.destination.status() == received
    require_refused(late.source.undo)
    assert moving.hand_over()
    for end in (late.destination.abort, late.take_back, late.source.finish):
        require_refused(end)
    assert (usable(a), moving.source.state().state) == (0, tag.MOVED)
    moving.complete()
    for end in (late.take_back, late.source.finish):
        require_refused(end)
    assert (usable(a), usable(b)) == (0, 1)
    # Its own move it does end, again and again.
    of_moving = moving.source.state().release
    for _ in range(2):
        moving.source.finish(of_moving)
    assert a.names() == set()


def test_a_volume_whose_group_is_missing_does_not_count_as_gone(
    two: Cluster, volume: csi.Volume
) -> None:
    """What is left of it would be forgotten, and come back with the group."""
    moving = move(two, volume.volume_id)
    run(moving)
    lvm2 = cast(FakeHost, two.nodes["a"].host).lvm2
    present = dict(lvm2.groups)
    lvm2.groups.clear()
    with pytest.raises(NodeFailed, match="is not on this node") as raised:
        moving.source.state()
    assert raised.value.code() is Code.FAILED_PRECONDITION
    lvm2.groups.update(present)
    assert moving.source.state().state == tag.MOVED
    moving.finish()
    with pytest.raises(NodeFailed, match="there is no volume") as raised:
        moving.source.state()
    assert raised.value.code() is Code.NOT_FOUND


FLAGS = r"(?<!\w)--\w"


def test_what_the_controller_says_names_no_flag_of_the_command(
    two: Cluster, volume: csi.Volume
) -> None:
    """Its reader has called no command, and some flags are for who has looked at all nodes."""
    why: list[str] = []

    def refused(call: Callable[[], Any]) -> None:
        with pytest.raises(errors.AgentError) as raised:
            call()
        why.append(str(raised.value))

    moving = move(two, volume.volume_id)
    moving.approach()
    refused(lambda: two.controller.moves.move(volume.volume_id, "a", "c").source.begin("c"))
    run(moving)
    b = two.nodes["b"]
    [there] = b.client.volumes()
    onward = two.controller.moves.move(there.volume_id, "b", "a", name="other")
    onward.source.begin("a")
    word = moving.source.state().word
    refused(lambda: moving.destination.withdraw(word))
    onward.source.undo(onward.source.state().release)
    b.client.delete(there.volume_id)
    refused(moving.complete)
    refused(moving.finish)
    refused(lambda: moving.undo(confirmed=lambda _text: True, is_nowhere=lambda _text: False))
    volume_of(b)
    other = move(two, volume.volume_id)
    other.source.undo(other.source.state().release)
    refused(other.approach)
    assert len(why) == 6
    assert not [text for text in why if re.search(FLAGS, text)]


def test_an_absent_volume_may_be_in_a_group_that_is_missing(
    two: Cluster, volume: csi.Volume
) -> None:
    moving = move(two, volume.volume_id)
    assert moving.destination.status()["missing_group"] == ""
    run(moving)
    lvm2 = cast(FakeHost, two.nodes["b"].host).lvm2
    present = dict(lvm2.groups)
    lvm2.groups.clear()
    there = moving.destination.status()
    assert (there["state"], there["missing_group"]) == ("absent", min(present))
    lvm2.groups.update(present)
    assert moving.destination.status()["state"] == tag.READY


def test_a_source_that_lies_moves_nothing(
    two: Cluster, volume: csi.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = Mover._state

    def lie(self: Mover, of: Any) -> carver.MoveState:
        honest = state(self, of)
        honest.state, honest.word = tag.MOVED, "guess"
        return honest

    with monkeypatch.context() as patched:
        patched.setattr(Mover, "_state", lie)
        with pytest.raises(NodeFailed, match="cannot pass on the answer of node a") as raised:
            move(two, volume.volume_id).approach()
        assert raised.value.code() is Code.INTERNAL
        assert "guess" not in str(raised.value)
    node = two.controller.nodes.get("a")
    assert node is not None
    assert node.refused_answers == 1
    assert two.nodes["b"].names() == set()
    run(move(two, volume.volume_id))


def test_a_target_that_lies_gets_nothing(
    two: Cluster, volume: csi.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = Receiver.status

    def lie(self: Receiver, name: str) -> carver.ReceiveState:
        honest = status(self, name)
        honest.volume_id, honest.state = volume.volume_id, tag.RECEIVING
        return honest

    monkeypatch.setattr(Receiver, "status", lie)
    with pytest.raises(NodeFailed, match="in no volume group of node b"):
        move(two, volume.volume_id).approach()
    assert usable(two.nodes["a"]) == 1


@pytest.mark.parametrize("hangs", ["source", "target"])
def test_a_stream_that_makes_no_progress_is_cut_off(
    two: Cluster, volume: csi.Volume, monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    monkeypatch.setattr("agent.extras.controller.node_moves._IDLE_SECONDS", 1.0)
    monkeypatch.setattr(node_streams, "_PROGRESS_SECONDS", 0.05)
    go_on = threading.Event()

    def hang(*_given: Any, **_more: Any) -> Any:
        assert go_on.wait(expect.PATIENCE_SECONDS)
        raise OSError("it hangs no more")

    with monkeypatch.context() as patched:
        if hangs == "source":
            patched.setattr(node_streams._Messages, "flush", hang)
        else:
            patched.setattr(reading, "apply", hang)
        with pytest.raises(NodeFailed, match="no progress for 1 s") as raised:
            move(two, volume.volume_id).approach()
        go_on.set()
    assert raised.value.code() is Code.DEADLINE_EXCEEDED
    monkeypatch.setattr("agent.extras.controller.node_moves._IDLE_SECONDS", 900.0)
    for node in two.nodes.values():
        streams = node.service.extras["transfer"]._node_streams  # type: ignore[attr-defined]
        expect.soon(lambda: not streams._jobs)  # noqa: B023
    run(move(two, volume.volume_id))


def test_a_target_whose_progress_decreases_is_cut_off(
    two: Cluster, volume: csi.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lie(*_given: Any) -> Iterator[carver.PullProgress]:
        yield from (
            carver.PullProgress(done_bytes=done, size_bytes=9) for done in itertools.cycle((5, 4))
        )

    with monkeypatch.context() as patched:
        patched.setattr(node_streams.NodeStreams, "pull", lie)
        with pytest.raises(NodeFailed, match="it was 5 before") as raised:
            move(two, volume.volume_id).approach()
    assert raised.value.code() is Code.INTERNAL
    run(move(two, volume.volume_id))


def test_reading_again_is_progress_of_both_nodes(
    two: Cluster, volume: csi.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_streams, "_at_intervals", lambda tell: tell)
    checked: list[int] = []
    progress = node_streams._Job.progress

    def noted(self: Any) -> carver.PullProgress:
        checked.append(self.checked_there_bytes)
        return progress(self)

    monkeypatch.setattr(node_streams._Job, "progress", noted)
    moving = move(two, volume.volume_id)
    release = moving.source.begin("b").release
    calls = cast(Any, moving.destination)._calls
    lasts: list[Any] = []
    streams = calls.streams

    def kept(*given: Any, **more: Any) -> Any:
        found = streams(*given, **more)
        lasts.extend(found)
        return found

    monkeypatch.setattr(calls, "streams", kept)
    assert moving.destination.send(moving.source.take(), "", release, 0, is_verified=True).is_equal
    assert lasts[0].checked_bytes == 2 * lasts[0].size_bytes
    assert max(checked) == lasts[0].size_bytes


@pytest.mark.parametrize("field", ["volume_id", "snapshot_id", "release", "offset_bytes"])
def test_another_stream_than_was_asked_for_is_not_received(
    two: Cluster, volume: csi.Volume, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    opening = form.opening
    values: dict[str, Any] = {"release": "ab" * 32, "offset_bytes": 512}

    def lie(header: form.Header) -> tuple[bytes, bytes]:
        changes = {field: values.get(field, f"{getattr(header, field)}x")}
        return opening(replace(header, **changes))

    monkeypatch.setattr(form, "opening", lie)
    with pytest.raises(NodeFailed, match=f"its {field} is"):
        move(two, volume.volume_id).approach()
    assert two.nodes["b"].names() == set()


def test_data_that_were_altered_on_the_way_are_not_handed_over(
    two: Cluster, volume: csi.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = node_streams._Messages.flush

    def alter(self: Any) -> None:
        if len(self._waiting) > 5000:
            self._waiting[-1] ^= 1
        flush(self)

    with monkeypatch.context() as patched:
        patched.setattr(node_streams._Messages, "flush", alter)
        with pytest.raises(NodeFailed, match="altered"):
            move(two, volume.volume_id).approach()
    run(move(two, volume.volume_id))


def test_data_that_do_not_get_to_the_disk_are_found(
    two: Cluster, volume: csi.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = reading._parts
    with monkeypatch.context() as patched:
        patched.setattr(reading, "_parts", lambda *given: list(parts(*given))[1:])
        with pytest.raises(errors.NotMoved, match="something else"):
            move(two, volume.volume_id).approach()
    assert two.nodes["b"].names() == set()
    assert usable(two.nodes["a"]) == 1
    moving = move(two, volume.volume_id)
    moving.approach()
    # What is there was changed, and the one that goes on has not seen it to be the same.
    b = two.nodes["b"]
    b.host.write_bytes(b.device("vol-db"), 4096, b"x" * 4096)
    with pytest.raises(errors.NotMoved, match="something else"):
        move(two, volume.volume_id).approach()
    run(move(two, volume.volume_id))
    assert b.content("vol-db") == two.nodes["a"].content("vol-db")


def test_a_hold_that_ends_or_is_another_s_hands_nothing_over(
    two: Cluster, volume: csi.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = two.nodes["a"].service.context.holds._held
    moving = move(two, volume.volume_id)
    moving.approach()
    send = moving.destination.send

    def lose(*given: Any, **more: Any) -> Any:
        held.clear()
        return send(*given, **more)

    with monkeypatch.context() as patched:
        patched.setattr(moving.destination, "send", lose)
        assert not moving.hand_over()
    assert usable(two.nodes["a"]) == 1
    token = moving.source.hold()
    assert not moving.hand_over()
    moving.source.release(token)
    assert moving.hand_over()


def test_a_controller_that_stops_leaves_a_move_to_the_next_one(
    two: Cluster, volume: csi.Volume
) -> None:
    moving = move(two, volume.volume_id)
    moving.approach()
    two.restart()
    with pytest.raises(NodeFailed, match="another one continues"):
        moving.approach()
    run(move(two, volume.volume_id))
    assert (usable(two.nodes["a"]), usable(two.nodes["b"])) == (0, 1)


def test_no_secret_of_a_move_is_logged(
    two: Cluster, volume: csi.Volume, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    moving = move(two, volume.volume_id)
    moving.approach()
    assert moving.hand_over()
    word = moving.source.state().word
    assert len(word) == 32
    moving.complete()
    moving.undo(confirmed=lambda _question: True, is_nowhere=lambda _question: False)
    logged = "\n".join(f"{one.getMessage()} {getattr(one, 'fields', '')}" for one in caplog.records)
    assert {"Send", "Pull", "FinishReceive", "WithdrawReceive"} <= {
        one.fields["method"]
        for one in caplog.records
        if hasattr(one, "fields") and "method" in one.fields
    }
    for secret in (word, "PRIVATE KEY"):
        assert secret not in logged


def test_a_move_that_is_not_wanted_any_more_is_cut_off_and_can_go_on(
    two: Cluster, volume: csi.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.extras.controller.node_moves._LOOK_SECONDS", 0.05)
    monkeypatch.setattr(node_streams, "_PROGRESS_SECONDS", 0.05)
    wanted, go_on, flush = threading.Event(), threading.Event(), node_streams._Messages.flush
    wanted.set()

    def slow(self: Any) -> None:
        """The last round does not get on, until it is not wanted."""
        if two.nodes["a"].service.context.holds._held:
            wanted.clear()
            assert go_on.wait(expect.PATIENCE_SECONDS)
        flush(self)

    moving = move(two, volume.volume_id, is_wanted=wanted.is_set)
    moving.approach()
    with monkeypatch.context() as patched:
        patched.setattr(node_streams._Messages, "flush", slow)
        with pytest.raises(NodeFailed, match="the move is stopped"):
            moving.hand_over()
        go_on.set()
    # What kept the volume from being used has ended.
    assert not two.nodes["a"].service.context.holds._held
    assert usable(two.nodes["a"]) == 1
    with pytest.raises(NodeFailed, match="the move is stopped"):
        moving.approach()
    wanted.set()
    run(moving)
