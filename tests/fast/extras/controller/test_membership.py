"""Who belongs to the cluster: by Nodes, PersistentVolumes and enrolment, whatever was before."""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import api_server
import chosen
import grpc
import pytest
from callers.test_histories import random_histories
from clustered import Loop
from csi_client import Client
from enrolled import (
    CONTENTS,
    GROUP,
    SPACE,
    Cluster,
    Token,
    add_volume,
    addresses,
    central,
    enrol,
    spec_of,
)
from hypothesis import strategies as st
from member_histories import FIRST, GRACE, NAMES, Clock, History, owner
from simulated import SimulatedNode, uuid_of

from agent.core import errors, ids
from agent.core.ids import VolumeId
from agent.extras.controller import routes
from agent.extras.controller.answer_rules import Row, Untrue
from agent.extras.controller.controller_metrics import Metrics
from agent.extras.controller.controller_process import ClusterController
from agent.extras.controller.enrolment import Enrolment
from agent.extras.controller.membership import ClusterRecord, Deleted, Serving
from agent.extras.controller.node_answers import Answers
from agent.extras.controller.nodes import Node, Nodes, Refused
from agent.extras.kubernetes import access
from agent.extras.kubernetes.objects import GROUP_CONTENTS, Listing, Lists, Objects
from agent.settings.settings import DRIVER_NAME, TOPOLOGY_KEY, Config
from proto import csi_pb2 as csi

UUID = GROUP.partition("@")[2]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def record(server: access.Server, clock: Clock) -> ClusterRecord:
    return ClusterRecord(
        Objects(server), Lists(server), DRIVER_NAME, grace_seconds=GRACE, clock=clock
    )


def identity(name: str) -> VolumeId:
    parsed = VolumeId.parse(f"{GROUP}/{name}")
    assert parsed is not None
    return parsed


def look(record: ClusterRecord, clock: Clock) -> None:
    """Have all be read that is read within two minutes."""
    clock.now += 120
    record.look()


# Who belongs


@pytest.mark.parametrize(
    ("has_label", "is_named", "enrols", "belongs"),
    [
        (False, False, False, False),
        (True, False, False, True),
        (False, True, False, True),
        (False, False, True, True),
        (True, True, True, True),
    ],
)
@pytest.mark.parametrize("has_node", [True, False])
def test_a_node_belongs_while_its_node_exists_and_carver_was_there_once(
    api: Cluster,
    record: ClusterRecord,
    clock: Clock,
    has_label: bool,
    is_named: bool,
    enrols: bool,
    belongs: bool,
    has_node: bool,
) -> None:
    if has_label and has_node:
        api.join("a")
    elif has_node:
        api.add(api_server.NODES, "a")
    if is_named:
        add_volume(api, "pvc-1", "a")
    if enrols:
        record.enrol("a", "10.0.0.1:9810", api.uid_of("a"))
    look(record, clock)
    address = "10.0.0.1:9810" if enrols else ""
    assert addresses(record) == ({"a": address} if belongs and has_node else {})
    api.leave("a")
    look(record, clock)
    assert addresses(record) == {}


def test_a_node_of_a_long_name_is_known_by_its_segment(
    api: Cluster, record: ClusterRecord, clock: Clock
) -> None:
    name = f"{'n' * 70}.example.com"
    api.add(api_server.NODES, name)
    add_volume(api, "pvc-1", ids.node_segment(name))
    look(record, clock)
    assert record.nodes_of(UUID) == {name}
    assert list(addresses(record)) == [name]


@pytest.mark.parametrize("label", [TOPOLOGY_KEY, "kubernetes.io/hostname"])
@pytest.mark.parametrize("is_first", [True, False])
def test_the_labels_of_a_node_do_not_make_it_another(
    api: Cluster, record: ClusterRecord, clock: Clock, label: str, is_first: bool
) -> None:
    """Its kubelet may write them (NodeRestriction)."""
    others = ["a", "b"]
    api.join(*others)
    api.add(api_server.NODES, "thief", metadata={"labels": {TOPOLOGY_KEY: "thief", label: "a"}})
    if is_first:
        api.objects[api_server.NODES].reverse()
    add_volume(api, "pvc-1", "a")
    record.enrol("a", "10.0.0.1:9810", api.uid_of("a"))
    look(record, clock)
    assert addresses(record) == {"a": "10.0.0.1:9810", "b": "", "thief": ""}
    assert record.nodes_of(UUID) == {"a"}
    assert record.node_of(identity("vol-pvc-1"), record.now()) == "a"
    # What it says of itself only keeps another's volumes from being forgotten.
    api.leave("a")
    look(record, clock)
    assert record.nodes_of(UUID) == frozenset()
    assert record.deleted(identity("vol-pvc-1"), record.now()) is None


def test_a_node_that_is_new_is_looked_for_soon(
    api: Cluster, record: ClusterRecord, clock: Clock
) -> None:
    record.look()
    api.add(api_server.NODES, "a")
    record.enrol("a", "10.0.0.1:9810", api.uid_of("a"))
    record.enrol("a", "10.0.0.1:9810", api.uid_of("a"))
    # Until its Node was seen it does not belong.
    assert addresses(record) == {}
    clock.now += 5
    assert record.is_due
    record.look()
    assert addresses(record) == {"a": "10.0.0.1:9810"}
    clock.now += 5
    assert not record.is_due


def test_who_enrols_without_a_node_has_the_nodes_listed_twelve_times_a_minute_at_most(
    api: Cluster, record: ClusterRecord, clock: Clock
) -> None:
    for _ in range(60):
        record.enrol("stranger", "10.0.0.1:9810", "uid-of-none")
        if record.is_due:
            record.look()
        clock.now += 1
    assert len([one for one, _ in api.asked if one == api_server.NODES]) <= 12
    assert addresses(record) == {}


def test_an_idle_controller_lists_nodes_once_a_minute_and_nothing_else(
    api: Cluster, record: ClusterRecord, clock: Clock
) -> None:
    api.join("a", "b")
    record.look()
    api.asked.clear()
    for second in range(600):
        clock.now += 1
        name = "ab"[second % 2]
        record.enrol(name, "10.0.0.1:9810", api.uid_of(name))
        if record.is_due:
            record.look()
    # The fake has pages of two objects, and one more Node.
    assert [one for one, _ in api.asked] == [api_server.NODES] * 20


def test_persistentvolumes_are_read_again_only_while_they_are_doubted(
    api: Cluster, record: ClusterRecord, clock: Clock
) -> None:
    api.join("a", "b")
    add_volume(api, "pvc-1", "a")
    look(record, clock)
    assert record.nodes_of(UUID) == {"a"}
    api.objects[api_server.VOLUMES].clear()
    add_volume(api, "pvc-1", "b")
    look(record, clock)
    assert record.nodes_of(UUID) == {"a"}
    record.doubt()
    look(record, clock)
    assert record.nodes_of(UUID) == {"b"}
    assert not record.is_due


def test_what_was_known_stays_while_the_api_server_does_not_answer(
    api: Cluster, record: ClusterRecord, clock: Clock
) -> None:
    api.join("a")
    add_volume(api, "pvc-1", "a")
    record.look()
    for path in (api_server.VOLUMES, api_server.NODES):
        record.doubt()
        clock.now += 120
        api.lie(path, *[api_server.status(500)] * 3)
        with pytest.raises(errors.ClusterSilent):
            record.look()
        assert list(addresses(record)) == ["a"]
        assert record.nodes_of(UUID) == {"a"}
    record.look()


def test_an_api_server_without_any_node_says_of_none_that_it_is_deleted(
    api: Cluster, record: ClusterRecord, clock: Clock
) -> None:
    """It has lost its data, as Carver's own pod is on a Node: what was known stays."""
    api.join("a")
    add_volume(api, "pvc-1", "a")
    look(record, clock)
    nodes = api.objects[api_server.NODES]
    known = nodes[:]
    for _ in range(2):
        nodes.clear()
        with pytest.raises(errors.ClusterSilent, match="it has no Node"):
            look(record, clock)
        assert list(addresses(record)) == ["a"]
        clock.now += GRACE
        with pytest.raises(errors.ClusterSilent, match="it has no Node"):
            record.deleted(identity("vol-pvc-1"), record.now())
        nodes += known
        look(record, clock)
        assert record.deleted(identity("vol-pvc-1"), record.now()) is None


@pytest.mark.parametrize(
    "change",
    [
        {"csi": {"driver": "another", "volumeHandle": f"{GROUP}/vol-pvc-1"}},
        {"csi": {"driver": DRIVER_NAME, "volumeHandle": "nonsense"}},
        {"csi": {"driver": DRIVER_NAME}},
        {"csi": None},
        {"nodeAffinity": None},
        {"nodeAffinity": {"required": {"nodeSelectorTerms": []}}},
    ],
)
def test_a_persistentvolume_that_says_nothing_of_a_group_names_no_node(
    api: Cluster, record: ClusterRecord, change: dict[str, Any]
) -> None:
    api.join("a")
    add_volume(api, "pvc-1", "a")
    api.objects[api_server.VOLUMES][0]["spec"] |= change
    record.look()
    assert record.nodes_of(UUID) == frozenset()
    assert record.node_of(identity("vol-pvc-1"), record.now()) is None
    assert record.deleted(identity("vol-pvc-1"), record.now()) is None


# Where the contents of group snapshots and of snapshots are listed, and what would be in one.
of_each_kind_of_content = pytest.mark.parametrize(
    ("path", "name"),
    [(GROUP_CONTENTS, "gsnap-groupsnapshot-1"), (CONTENTS, "snap-snapshot-1")],
)


@pytest.mark.parametrize("code", [403, 404])
@of_each_kind_of_content
def test_without_snapshots_in_the_cluster_no_content_names_a_node(
    api: Cluster, record: ClusterRecord, path: str, name: str, code: int
) -> None:
    """The chart grants no right to list their contents then, and the CRD may be missing."""
    api.join("a")
    add_volume(api, "pvc-1", "a")
    api.lie(path, api_server.status(code))
    assert record.node_of(identity(name), record.now()) is None
    assert [one for one, _ in api.asked].count(path) == 1


@pytest.mark.parametrize("code", [401, 429])
@of_each_kind_of_content
def test_a_content_that_the_api_server_does_not_show_may_name_a_node(
    api: Cluster, record: ClusterRecord, path: str, name: str, code: int
) -> None:
    """As where the controller's token is being renewed, or there are too many requests."""
    api.lie(path, *[api_server.status(code)] * 3)
    with pytest.raises(errors.ClusterSilent, match=str(code)):
        record.node_of(identity(name), record.now())


# What was deleted


def test_the_grace_begins_anew_each_time_that_a_node_is_deleted(
    api: Cluster, record: ClusterRecord, clock: Clock
) -> None:
    """Also if nobody asked for its volumes while its Node was there again."""
    for name in ("pvc-1", "pvc-2"):
        add_volume(api, name, "a")
    record.look()
    clock.now += 30
    assert record.deleted(identity("vol-pvc-1"), record.now()) == Deleted("a", GRACE - 30)
    api.join("a")
    look(record, clock)
    clock.now += 30 * 86400
    look(record, clock)
    api.leave("a")
    assert record.deleted(identity("vol-pvc-2"), record.now()) is None
    clock.now += 30
    assert record.deleted(identity("vol-pvc-2"), record.now()) == Deleted("a", GRACE)
    clock.now += GRACE
    assert record.deleted(identity("vol-pvc-1"), record.now()) == Deleted("a", 0.0)


def test_the_grace_does_not_begin_before_the_nodes_were_read(
    api: Cluster, record: ClusterRecord, clock: Clock
) -> None:
    """PersistentVolumes alone say nothing of what Nodes there are."""
    api.join("b")
    add_volume(api, "pvc-1", "a")
    for _ in range(3):
        clock.now += GRACE
        api.lie(api_server.NODES, *[api_server.status(500)] * 3)
        with pytest.raises(errors.ClusterSilent):
            record.look()
    assert record.deleted(identity("vol-pvc-1"), record.now()) == ("a", GRACE)
    clock.now += GRACE
    assert record.deleted(identity("vol-pvc-1"), record.now()) == ("a", 0)


def test_where_a_group_is_named_anew_its_old_node_counts_for_nothing(
    api: Cluster, record: ClusterRecord, clock: Clock
) -> None:
    api.join("b")
    add_volume(api, "pvc-1", "a")
    look(record, clock)
    assert record.deleted(identity("vol-pvc-1"), record.now()) == Deleted("a", GRACE)
    # Its disks are on b, and its PersistentVolume was written anew.
    api.objects[api_server.VOLUMES].clear()
    add_volume(api, "pvc-1", "b")
    clock.now += GRACE
    assert record.deleted(identity("vol-pvc-1"), record.now()) is None
    assert record.deleted(identity("snap-1"), record.now()) is None


@pytest.mark.parametrize("is_there", [True, False])
def test_of_a_group_that_two_nodes_had_each_volume_goes_with_its_own(
    api: Cluster, record: ClusterRecord, clock: Clock, is_there: bool
) -> None:
    add_volume(api, "pvc-1", "a")
    add_volume(api, "pvc-2", "b")
    if is_there:
        api.join("b")
    look(record, clock)
    clock.now += GRACE
    assert record.deleted(identity("vol-pvc-1"), record.now()) == Deleted("a", 0.0)
    expected = None if is_there else Deleted("b", 0.0)
    assert record.deleted(identity("vol-pvc-2"), record.now()) == expected
    # Which of the two a snapshot was on is not known.
    assert record.deleted(identity("snap-1"), record.now()) == expected
    assert record.node_of(identity("vol-pvc-2"), record.now()) == ("b" if is_there else "")


def test_a_node_that_was_named_anew_for_carver_is_not_taken_for_a_deleted_one(
    api: Cluster, record: ClusterRecord
) -> None:
    """Its Node has that name in the label that kubelet made, not as its own."""
    add_volume(api, "pvc-1", "renamed")
    labels = {"topology.lvm.csi.carver/node": "renamed"}
    api.add(api_server.NODES, "machine-7", metadata={"labels": labels})
    assert record.deleted(identity("vol-pvc-1"), record.now()) is None


def test_without_the_setting_nothing_is_forgotten(api: Cluster, server: access.Server) -> None:
    record = ClusterRecord(Objects(server), Lists(server), DRIVER_NAME)
    add_volume(api, "pvc-1", "a")
    record.look()
    assert not record.forgets
    assert record.deleted(identity("vol-pvc-1"), record.now()) is None


def test_the_grace_begins_anew_for_a_node_that_was_back_for_a_short_time(
    api: Cluster, record: ClusterRecord, clock: Clock
) -> None:
    add_volume(api, "pvc-1", "a")
    record.look()
    clock.now += 300
    record.look()
    api.join("a")
    clock.now += 16
    record.look()
    api.leave("a")
    clock.now += 60
    record.look()
    found = record.deleted(identity("vol-pvc-1"), record.now())
    assert found is not None
    assert found.seconds == GRACE
    # Once nothing is waited for, the Nodes are listed each minute again.
    clock.now += GRACE
    record.look()
    clock.now += 59
    assert not record.is_due


@pytest.mark.parametrize("what", ["doubt", "request_early_refresh", "stranger"])
@pytest.mark.parametrize("failures", [1, 3])
def test_a_doubt_outlasts_readings_that_fail(
    api: Cluster, record: ClusterRecord, clock: Clock, what: str, failures: int
) -> None:
    api.join("a")
    look(record, clock)
    path = api_server.NODES if what == "stranger" else api_server.VOLUMES
    if what == "stranger":
        api.add(api_server.NODES, "new")
        record.enrol("new", "10.0.0.1:9810", api.uid_of("new"))
    else:
        getattr(record, what)()
        add_volume(api, "pvc-1", "a")
    api.lie(path, *[api_server.status(403)] * failures)
    for _ in range(failures):
        clock.now += 120
        with pytest.raises(errors.ClusterSilent):
            record.look()
    clock.now += 20
    record.look()
    if what == "stranger":
        assert addresses(record) == {"a": "", "new": "10.0.0.1:9810"}
    else:
        assert record.nodes_of(UUID) == {"a"}


def test_persistentvolumes_that_cannot_be_read_hold_up_no_list_of_the_nodes(
    api: Cluster, record: ClusterRecord, clock: Clock
) -> None:
    record.look()
    record.doubt()
    api.join("a")
    clock.now += 120
    api.lie(api_server.VOLUMES, api_server.status(403))
    with pytest.raises(errors.ClusterSilent):
        record.look()
    assert list(addresses(record)) == ["a"]


def test_a_node_that_was_made_again_is_another_machine(
    api: Cluster, record: ClusterRecord, clock: Clock
) -> None:
    """Also if it was away between two lists only."""
    api.join("a")
    record.enrol("a", "10.0.0.1:9810", api.uid_of("a"))
    look(record, clock)
    assert addresses(record) == {"a": "10.0.0.1:9810"}
    api.leave("a")
    api.join("a")
    look(record, clock)
    assert addresses(record) == {"a": ""}
    record.enrol("a", "10.0.0.2:9810", api.uid_of("a"))
    look(record, clock)
    assert addresses(record) == {"a": "10.0.0.2:9810"}


def test_who_proved_to_be_an_earlier_node_has_not_enrolled_as_the_next(
    api: Cluster, record: ClusterRecord, clock: Clock
) -> None:
    """Also if its enrolment came while the Nodes were listed, or before the next one was seen."""
    api.join("a")
    earlier = api.uid_of("a")
    look(record, clock)
    api.leave("a")
    api.join("a")
    clock.now += 60
    record.enrol("a", "10.0.0.1:9810", earlier)
    assert addresses(record) == {"a": "10.0.0.1:9810"}
    record.look()
    assert addresses(record) == {"a": ""}
    record.enrol("a", "10.0.0.2:9810", api.uid_of("a"))
    assert addresses(record) == {"a": "10.0.0.2:9810"}
    # The next one enrols before it is seen: it is looked for soon, and does not count before.
    api.leave("a")
    api.join("a")
    record.enrol("a", "10.0.0.2:9810", api.uid_of("a"))
    assert addresses(record) == {"a": ""}
    clock.now += 5
    record.look()
    assert addresses(record) == {"a": "10.0.0.2:9810"}


def test_an_address_is_beside_the_uid_of_the_node_that_enrolled_with_it() -> None:
    """Also where the Nodes are listed by the other thread while the event loop takes them over."""
    with asyncio.Runner() as runner:
        history = History(runner.run)
        earlier, serving = history.known.get("a"), history.record.serving
        assert earlier is not None
        history.node_is_made_anew("a")
        history.record._read_nodes()

        async def take(found: Mapping[str, Serving]) -> Node | None:
            history.known.set(found)
            return history.known.get("a")

        assert runner.run(take(serving)) is earlier
        later = runner.run(take(history.record.serving))
        assert later is not None
        assert (later.address, later.uid) == ("", history.uid_of("a"))


def test_an_enrolment_that_is_dropped_while_the_members_are_read_ends_nothing(
    api: Cluster, record: ClusterRecord, clock: Clock
) -> None:
    """The controller's own loop reads them: with an error there the process would end."""

    class Dropped(dict[str, Any]):
        reads = 0

        def get(self, key: str, default: Any = None) -> Any:
            self.reads += 1
            return self.pop(key, default) if self.reads == 2 else super().get(key, default)

    api.join("a")
    record.enrol("a", "10.0.0.1:9810", api.uid_of("a"))
    look(record, clock)
    record._enrolled = Dropped(record._enrolled)
    assert addresses(record) == {"a": "10.0.0.1:9810"}


def test_of_nodes_that_come_and_go_nothing_is_kept_once_no_persistentvolume_names_them(
    api: Cluster, record: ClusterRecord, clock: Clock
) -> None:
    """As in a cluster that an autoscaler makes larger and smaller each hour."""
    for number in range(20):
        name = f"node-{number}"
        api.join(name)
        add_volume(api, "pvc-1", name)
        record.doubt()
        look(record, clock)
        api.leave(name)
        look(record, clock)
        assert name in record._last_reading.missing
        api.objects[api_server.VOLUMES].clear()
        record.doubt()
        look(record, clock)
    assert not record._last_reading.missing


def test_of_groups_that_two_nodes_claim_in_turn_nothing_is_kept() -> None:
    with asyncio.Runner() as runner:
        history = History(runner.run)
        for number in range(20):
            for name in ("b", "c"):
                history.claims[name] = {f"z{number:03}{one:04}" for one in range(10)}
            history.settle()
        assert len(history.known._logged) == 10


def test_a_node_with_many_groups_does_not_hold_up_the_loop_while_a_member_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of none of its groups it is settled whose it is, and each call to it asks for all."""
    with asyncio.Runner() as runner:
        history = History(runner.run)
        history.act("breaks", "c")
        history.act("restart")
        history.claims["b"] = {f"z{number:07}" for number in range(150)}
        history.settle()
        liar, read = history.known.get("b"), Counter[str]()
        assert liar is not None
        members = ClusterRecord._read_members

        def counted(record: ClusterRecord) -> Any:
            read["members"] += 1
            return members(record)

        def listed(known: Nodes) -> Iterator[Node]:
            read["nodes"] += 1
            return iter(list(known._nodes.values()))

        monkeypatch.setattr(ClusterRecord, "_read_members", counted)
        monkeypatch.setattr(Nodes, "__iter__", listed)
        for _ in range(3):
            assert "may be that of c" in history.known._unsettled(
                liar, "z0000000", history.known._unreported(liar)
            )
            history.known.places(liar)
            history.known.why_no_new_volumes(liar)
        assert read["members"] <= 1
        assert read["nodes"] <= 1


# With the controller


@dataclass
class Site:
    """A controller of a cluster, and the sidecars' client."""

    api: Cluster
    source: Enrolment
    controller: ClusterController
    loop: Loop
    clock: Clock
    client: Client

    def look(self, seconds: float = 120) -> None:
        self.clock.now += seconds
        self.loop.run(self.controller.look())

    def ask(self) -> None:
        async def asked() -> None:
            nodes = self.controller.nodes
            await asyncio.gather(*(nodes.ask(one) for one in nodes if one.address))

        self.loop.run(asked())

    def said(self, call: Any, *arguments: Any) -> str:
        """What a call is refused with; OK if it is not."""
        try:
            call(*arguments)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
        return "OK"


@pytest.fixture
def site(
    api: Cluster,
    config: Config,
    server: access.Server,
    loop: Loop,
    clock: Clock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Site]:
    own = central(config, tmp_path, forget_deleted_nodes=True)
    source = Enrolment(own, Objects(server), Lists(server), SPACE)
    monkeypatch.setattr(source.record, "_clock", clock)
    controller = ClusterController(own, source)
    loop.run(controller.start())
    with Client(own.endpoint) as client:
        yield Site(api, source, controller, loop, clock, client)
    loop.run(controller.stop())


def deletions(client: Client) -> dict[str, Any]:
    return {
        "vol-pvc-1": client.delete,
        "snap-1": client.delete_snapshot,
        "group-1": lambda one: client.group_controller.DeleteVolumeGroupSnapshot(
            csi.DeleteVolumeGroupSnapshotRequest(group_snapshot_id=one)
        ),
    }


def test_what_was_on_a_deleted_node_is_forgotten_after_a_grace(site: Site) -> None:
    add_volume(site.api, "pvc-1", "gone")
    site.api.add(api_server.NODES, "gone")
    site.source.record.doubt()
    site.look()
    for name, delete in deletions(site.client).items():
        said = site.said(delete, f"{GROUP}/{name}")
        assert said.startswith("UNAVAILABLE: node gone has not enrolled"), said
    site.api.leave("gone")
    site.look()
    for name, delete in deletions(site.client).items():
        said = site.said(delete, f"{GROUP}/{name}")
        assert said.startswith("UNAVAILABLE: node gone was deleted"), said
        assert "is believed in 600 s" in said
    site.look(GRACE)
    site.api.lie(api_server.VOLUMES, *[api_server.status(500)] * 3)
    site.clock.now += 60
    assert "the API server does not answer" in site.said(
        site.client.delete_snapshot, f"{GROUP}/snap-1"
    )
    for name, delete in deletions(site.client).items():
        assert site.said(delete, f"{GROUP}/{name}") == "OK"


def calls(client: Client) -> dict[str, Any]:
    """Calls about a volume that is there no more, beside its deletion."""
    volume = f"{GROUP}/vol-pvc-1"
    return {
        "CreateSnapshot": lambda: client.snapshot("snapshot-1", volume),
        "ControllerExpandVolume": lambda: client.expand(volume, 1 << 30),
        "ControllerGetVolume": lambda: client.volume(volume),
        "CreateVolumeGroupSnapshot": lambda: client.group_controller.CreateVolumeGroupSnapshot(
            csi.CreateVolumeGroupSnapshotRequest(name="g", source_volume_ids=[volume])
        ),
        "CreateVolume": lambda: client.controller.CreateVolume(
            csi.CreateVolumeRequest(
                name="pvc-2",
                volume_content_source=csi.VolumeContentSource(
                    volume=csi.VolumeContentSource.VolumeSource(volume_id=volume)
                ),
            )
        ),
    }


@pytest.mark.parametrize("call", list(calls(Any)))  # type: ignore[arg-type]
def test_all_but_deletions_of_what_was_forgotten_are_not_found(site: Site, call: str) -> None:
    """So that the snapshotter, whose call is final then, lets the claim go."""
    add_volume(site.api, "pvc-1", "gone")
    site.source.record.doubt()
    site.look()
    assert site.said(calls(site.client)[call]).startswith("UNAVAILABLE: node gone was deleted")
    site.look(GRACE)
    assert site.said(calls(site.client)[call]).startswith("NOT_FOUND: ")


def test_nothing_is_forgotten_while_a_member_is_silent(site: Site) -> None:
    """Its disks may have been attached to that one."""
    volume = add_volume(site.api, "pvc-1", "gone")
    site.api.join("here")
    site.source.record.doubt()
    site.look()
    site.look(GRACE)
    said = site.said(site.client.delete, volume)
    assert said.startswith("UNAVAILABLE: node gone was deleted")
    assert "may be on another node by now; nodes that do not answer: here" in said


@pytest.mark.parametrize("seconds", [1, 20, 29, 31, 45])
def test_nothing_is_forgotten_while_a_member_is_silent_that_joined_lately(
    site: Site, seconds: int
) -> None:
    """The Nodes are read for the call, and nobody has asked it yet."""
    volume = add_volume(site.api, "pvc-1", "gone")
    site.source.record.doubt()
    site.look()
    site.look(GRACE)
    site.look(60)
    site.api.join("new")
    site.clock.now += seconds
    said = site.said(site.client.delete, volume)
    assert "may be on another node by now; nodes that do not answer: new" in said


def test_a_forgotten_volume_s_snapshots_are_deleted_before_it(site: Site) -> None:
    """Its PersistentVolume is the proof that they were on that node, too."""
    volume = add_volume(site.api, "pvc-1", "gone")

    def content(name: str, driver: str = DRIVER_NAME, **source: str) -> None:
        site.api.add(CONTENTS, name, spec={"driver": driver, "source": source})

    site.source.record.doubt()
    site.look()
    site.look(GRACE)
    content("foreign", "another", volumeHandle=volume)
    content("of-another", volumeHandle=f"{GROUP}/vol-pvc-2")
    content("elsewhere", snapshotHandle="data@ffffffff/snap-7")
    content("its", volumeHandle=volume)
    content("imported", snapshotHandle=f"{GROUP}/snap-7")
    said = site.said(site.client.delete, volume)
    assert said.startswith("FAILED_PRECONDITION: ")
    assert "these VolumeSnapshotContents are left: imported, its" in said
    assert site.said(site.client.delete_snapshot, f"{GROUP}/snap-7") == "OK"
    del site.api.objects[CONTENTS][3:]
    assert site.said(site.client.delete, volume) == "OK"
    # Without the snapshots' CRDs there are none.
    del site.api.objects[CONTENTS]
    site.api.collection = lambda path: (  # type: ignore[method-assign]
        None if path == CONTENTS else Cluster.collection(site.api, path)
    )
    assert site.said(site.client.delete, volume) == "OK"


def test_a_node_whose_carver_ended_stays_a_silent_member(site: Site) -> None:
    """As with a bad image: kubelet took the driver off the CSINode, the Node is there."""
    api = site.api
    api.tokens["t"] = Token()
    api.join("here")
    enrol(api, site.source.port, "t", address="127.0.0.1:1")
    site.look()
    site.ask()
    for _ in range(10):
        site.look(3600)
        [node] = site.controller.nodes
        assert node.problem
        said = site.said(site.client.volumes)
        assert said.startswith("UNAVAILABLE: node here (127.0.0.1:1) does not answer")
        page = Metrics(site.controller.nodes).text().decode()
        assert 'carver_controller_node_answers{node="here"} 0.0' in page


def test_a_controller_that_starts_knows_silent_members(site: Site, tmp_path: Path) -> None:
    """It has the same from the API server as the one before."""
    site.api.join("here")
    add_volume(site.api, "pvc-1", "here")
    site.source.record.doubt()
    site.look()
    said = site.said(site.client.delete, f"{GROUP}/vol-pvc-1")
    assert said.startswith("UNAVAILABLE: node here has not enrolled at this controller")
    assert site.said(site.client.volumes) == said


# Histories


_names = st.sampled_from(NAMES)
_actions = st.one_of(
    st.tuples(st.sampled_from(("node_comes", "node_goes", "breaks", "mends")), _names),
    st.tuples(st.sampled_from(("loses_disks", "node_is_made_anew")), _names),
    *(st.tuples(st.sampled_from(("makes", "makes", "steals", "copies")), _names),) * 2,
    st.tuples(st.sampled_from(("removes", "restarts", "looks")), _names),
    st.tuples(st.just("restart")),
    st.tuples(st.just("wait"), st.sampled_from((1, 60, 700))),
)


@pytest.mark.parametrize(
    "actions",
    [
        pytest.param(
            [("node_goes", "a"), ("breaks", "b"), ("wait", 700), ("mends", "b")],
            id="a node is deleted, and another silent",
        ),
        pytest.param(
            [("node_goes", "a"), ("wait", 700), ("node_comes", "a"), ("node_goes", "a")],
            id="a node is deleted twice",
        ),
        pytest.param(
            [("loses_disks", "b"), ("copies", "a"), ("restart",)],
            id="another claims the group whose node has lost it",
        ),
        pytest.param(
            [("breaks", "a"), ("restart",), ("steals", "b"), ("mends", "a")],
            id="another claims the group of a silent node at a controller that has just started",
        ),
        pytest.param(
            [("steals", "b"), ("node_goes", "a"), ("wait", 700), ("loses_disks", "b")],
            id="a deleted node's disks were attached to another",
        ),
        pytest.param(
            [("removes", "a"), ("steals", "b"), ("breaks", "a"), ("makes", "a"), ("restart",)],
            id="a group without volumes is claimed by two",
        ),
        pytest.param(
            [("node_goes", "a"), ("steals", "b"), ("wait", 700), ("restarts", "b"), ("wait", 700)],
            id="the Carver restarts that has the disks of a deleted node",
        ),
        pytest.param(
            [("node_goes", "a"), ("steals", "b"), ("restarts", "b"), ("restart",), ("wait", 700)],
            id="a controller starts while the Carver does that has the disks of a deleted node",
        ),
        pytest.param(
            [("removes", "a"), ("breaks", "a"), ("restart",), ("steals", "b"), ("mends", "a")],
            id="another claims the group without volumes of a silent node at a new controller",
        ),
        pytest.param(
            [("removes", "a"), ("removes", "c"), ("breaks", "c"), ("restart",), ("makes", "a")],
            id="a silent node of which nothing is known",
        ),
        pytest.param(
            [("removes", "a"), ("breaks", "a"), ("node_is_made_anew", "a"), ("steals", "b")],
            id="another claims the group without volumes of a silent node that was made anew",
        ),
    ],
)
def test_the_rule_holds_in_histories_that_could_do_harm(actions: list[tuple[Any, ...]]) -> None:
    with asyncio.Runner() as runner:
        history = History(runner.run)
        for action in actions:
            history.act(*action)
            history.judge()


def test_a_group_that_a_node_gave_up_a_moment_ago_is_not_forgotten() -> None:
    with asyncio.Runner() as runner:
        history = History(runner.run)
        history.act("node_goes", "a")
        history.claims["b"].add(FIRST)
        for _ in range(2):
            history.act("wait", 700)
        said = owner(history, FIRST, f"vol-pvc-{FIRST}")
        assert said.startswith("UNAVAILABLE: ")
        assert "its volume group is on node b by now: write its PersistentVolumes anew" in said
        history.claims["b"].discard(FIRST)
        history.clock.now += 5
        history._run(history._ask())
        said = owner(history, FIRST, f"vol-pvc-{FIRST}")
        assert said.startswith("UNAVAILABLE: ")
        assert "was on another node until a moment ago: b" in said
        history.settle()
        assert owner(history, FIRST, f"vol-pvc-{FIRST}").startswith("NOT_FOUND: ")


@pytest.mark.parametrize("whole", [{}, {routes.IS_WHOLE: ""}, {routes.IS_WHOLE: "no"}])
def test_nothing_is_forgotten_by_a_node_that_does_not_say_that_it_has_looked(
    whole: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by one of an older version, which does not say it at all."""
    true = SimulatedNode._info

    async def info(node: SimulatedNode, data: bytes, context: Any) -> bytes:
        if node.name == "b":
            node.whole = whole
        return await true(node, data, context)

    with asyncio.Runner() as runner:
        history = History(runner.run)
        monkeypatch.setattr(SimulatedNode, "_info", info)
        history.act("node_goes", "a")
        for _ in range(2):
            history.act("wait", 700)
        said = owner(history, FIRST, f"vol-pvc-{FIRST}")
        assert said.startswith("UNAVAILABLE: ")
        assert "nodes that have not looked at all their disks: b" in said
        monkeypatch.undo()
        history.act("wait", 700)
        assert owner(history, FIRST, f"vol-pvc-{FIRST}").startswith("NOT_FOUND: ")


def test_no_volume_of_a_new_one_s_is_taken_for_that_of_a_silent_node() -> None:
    """While that node is waited for: a PersistentVolume would name the thief for good."""
    with asyncio.Runner() as runner:
        history = History(runner.run)
        history.removes("a")
        history.settle()
        history.act("breaks", "a")
        history.act("restart")
        history.act("steals", "b")
        thief = history.known.get("b")
        assert thief is not None
        assert history.known.places(thief) == {f"data@{uuid_of(1)}"}
        asked = Answers(history.known).asked(thief, csi.CreateVolumeRequest(name="evil"))
        made = csi.Volume(
            volume_id=f"data@{FIRST}/vol-evil",
            accessible_topology=[csi.Topology(segments=thief.segments)],
        )
        answer = csi.CreateVolumeResponse(volume=made).SerializeToString()
        with pytest.raises(Untrue):
            Row.of("csi.v1.Controller", "CreateVolume").judge(asked, answer)
        history.act("mends", "a")
        history.claims["b"] = {uuid_of(1)}
        history.settle()
        first = history.known.get("a")
        assert first is not None
        assert not history.known.why_no_new_volumes(first)
        assert owner(history, FIRST, "vol-1") == "a"


def test_what_a_persistentvolume_names_never_goes_elsewhere_by_an_old_reading() -> None:
    """It was made at another controller after this one read them; the thief enrols here first."""
    with asyncio.Runner() as runner:
        history = History(runner.run)
        history.removes("a")
        history.settle()
        history.record = ClusterRecord(
            *(cast(Any, history._memory), cast(Any, history._memory), DRIVER_NAME),
            grace_seconds=GRACE,
            clock=history.clock,
        )
        history.known = Nodes(DRIVER_NAME, history._connect, history.record)
        history.record.look()
        history.volumes[FIRST] = "a"
        history._write()
        history.claims["b"].add(FIRST)
        history.record.enrol("b", "its address", history.uid_of("b"))
        for _ in range(130):
            history.clock.now += 1
            history.record.enrol("b", "its address", history.uid_of("b"))
            if history.record.is_due:
                history.record.look()
            history._run(history._ask())
            assert owner(history, FIRST, f"vol-pvc-{FIRST}") != "b"


def assert_waits_for_c(history: History, node: Node) -> None:
    """For two minutes c, which came a moment ago, may report; a 0 would be kept for minutes."""
    with pytest.raises(Refused, match="it may be that of c"):
        history.known.has_no_capacity(node)
    silent = history.known.get("c")
    assert silent is not None
    silent.joined_seconds -= 120
    assert not history.known.has_no_capacity(node)
    assert not history.known.why_no_new_volumes(node)


def test_a_silent_node_of_which_nothing_is_known_holds_up_groups_without_volumes_only() -> None:
    """New volumes for two minutes, calls for what no PersistentVolume names until it is known."""
    with asyncio.Runner() as runner:
        history = History(runner.run)
        history.removes("b")
        history.removes("c")
        history.settle()
        history.act("breaks", "c")
        a, b = history.known.get("a"), history.known.get("b")
        assert a is not None
        assert b is not None
        # It has told this controller.
        assert not history.known.why_no_new_volumes(b)
        history.act("restart")
        a, b = history.known.get("a"), history.known.get("b")
        assert a is not None
        assert b is not None
        assert not history.known.why_no_new_volumes(a)
        assert (
            "it may be that of c, without any report of its groups"
            in history.known.why_no_new_volumes(b)
        )
        assert not history.known.conflict(b)
        assert_waits_for_c(history, b)
        assert not history.known.has_no_capacity(a)
        said = owner(history, uuid_of(1), "vol-1")
        assert said.startswith("UNAVAILABLE: volume_id: node b alone claims volume group data")
        assert "it may be that of c, without any report of its groups" in said
        assert history.known.places(b) == {f"data@{uuid_of(1)}"}
        # Its PersistentVolume is newer than the last reading.
        history._memory.volumes["pvc-1"] = {"spec": spec_of(f"data@{uuid_of(1)}/vol-pvc-1", "b")}
        assert owner(history, uuid_of(1), "vol-pvc-1") == "b"
        assert owner(history, uuid_of(1), "vol-1").startswith("UNAVAILABLE: ")
        history.act("node_goes", "c")
        assert not history.known.why_no_new_volumes(b)
        assert not history.known.has_no_capacity(b)
        assert owner(history, uuid_of(1), "vol-1") == "b"


def test_a_member_that_came_a_moment_ago_makes_no_capacity_0_of_a_node_that_came_before() -> None:
    """As of a node that gets its disks while others join: each may report in a moment."""
    with asyncio.Runner() as runner:
        history = History(runner.run)
        for one in ("b", "c"):
            history.removes(one)
        history.act("node_goes", "c")
        history.act("loses_disks", "b")
        b = history.known.get("b")
        assert b is not None
        b.joined_seconds -= 3600
        history.node_comes("c")
        history.breaks("c")
        history.labelled.add("c")
        history._memory.labels["c"] = {TOPOLOGY_KEY: "c"}
        history.claims["b"] = {uuid_of(1)}
        history.settle()
        assert_waits_for_c(history, b)


def test_a_group_that_moved_a_moment_ago_makes_no_capacity_0_and_no_alarm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Until PersistentVolumes were read again, within 20 seconds; a 0 is kept for minutes."""
    caplog.set_level(logging.ERROR)
    with asyncio.Runner() as runner:
        history = History(runner.run)
        history.act("removes", "a")
        b = history.known.get("b")
        assert b is not None
        history.claims["a"].discard(FIRST)
        history.claims["b"].add(FIRST)
        history.clock.now += 5
        history._run(history._ask())
        with pytest.raises(Refused, match=f"volume group data .{FIRST}. is on node b"):
            history.known.has_no_capacity(b)
        history.settle()
        assert not history.known.has_no_capacity(b)
        assert not caplog.messages
        # What PersistentVolumes name elsewhere stays so until a person sees to it.
        history.volumes[FIRST] = "a"
        history._write()
        history.record.doubt()
        history.settle()
        assert history.known.has_no_capacity(b)
        [said] = caplog.messages
        assert "is on node b, but PersistentVolumes name a" in said


@pytest.mark.parametrize("name", ["pvc-1", "my-database"])
def test_of_two_named_nodes_each_volume_s_own_is_called_whatever_its_name(name: str) -> None:
    """A PersistentVolume that a person wrote may have any name."""
    with asyncio.Runner() as runner:
        history = History(runner.run)
        history.volumes.clear()
        history._memory.volumes = {
            name: {"spec": spec_of(f"data@{FIRST}/vol-pvc-1", "a")},
            "pvc-2": {"spec": spec_of(f"data@{FIRST}/vol-pvc-2", "b")},
        }
        history.record.doubt()
        history.settle()
        assert owner(history, FIRST, "vol-pvc-1") == "a"
        assert owner(history, FIRST, "vol-pvc-2").startswith("UNAVAILABLE: ")
        # A PersistentVolume that is new is found, too.
        history._memory.volumes["other"] = {"spec": spec_of(f"data@{FIRST}/vol-3", "b")}
        history.clock.now += 31
        assert owner(history, FIRST, "vol-3").startswith("UNAVAILABLE: ")
        # What no PersistentVolume names is where the group is, if the other says that it is not.
        assert owner(history, FIRST, "vol-4") == "a"
        history.act("breaks", "b")
        assert owner(history, FIRST, "vol-4").startswith("UNAVAILABLE: ")
        history.act("mends", "b")
        history.act("restarts", "b")
        assert owner(history, FIRST, "vol-4").startswith("UNAVAILABLE: ")


@pytest.mark.parametrize("name", ["my-database", "its-successor"])
def test_a_persistentvolume_of_any_name_is_read_for_the_call(name: str) -> None:
    """It was written anew a moment ago, under its name or another, after all were listed."""
    with asyncio.Runner() as runner:
        history = History(runner.run)
        history.volumes.clear()
        history.claims["b"].add(FIRST)
        volume = f"data@{FIRST}/vol-pvc-1"
        history._memory.volumes = {"my-database": {"spec": spec_of(volume, "a")}}
        history.record.doubt()
        history.settle()
        assert owner(history, FIRST, "vol-pvc-1") == "a"
        history._memory.volumes = {name: {"spec": spec_of(volume, "b")}}
        assert owner(history, FIRST, "vol-pvc-1") == "b"


def test_a_persistentvolume_of_any_name_that_is_read_slowly_holds_up_no_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor calls about other volume groups."""
    with asyncio.Runner() as runner, ThreadPoolExecutor() as threads:
        history = History(runner.run)
        history._memory.volumes["my-database"] = {"spec": spec_of(f"data@{FIRST}/vol-1", "a")}
        history.record._read_volumes()
        reads, answers = threading.Event(), threading.Event()
        find = history._memory.find

        def slow(path: str, kind: str) -> Any:
            if path.endswith("/my-database"):
                reads.set()
                answers.wait(60)
            return find(path, kind)

        monkeypatch.setattr(history._memory, "find", slow)
        finding = threads.submit(
            history.record.node_of, VolumeId("data", FIRST, "vol-1"), history.record.now()
        )
        try:
            assert reads.wait(60)
            history.clock.now += 60
            threads.submit(history.record.look).result(30)
            other = VolumeId("data", uuid_of(1), "vol-unnamed")
            asked = threads.submit(history.record.node_of, other, history.record.now())
            assert asked.result(30) is None
        finally:
            answers.set()
        assert finding.result(60) == "a"


def test_persistentvolumes_that_take_long_to_read_are_there_for_the_call_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first call gave up meanwhile; read anew for each call they would answer none."""
    with asyncio.Runner() as runner:
        history = History(runner.run)
        whole, read = history._memory.whole, list[str]()

        def slow(path: str, kind: str, **more: Any) -> Listing:
            read.append(path)
            history.clock.now += 45
            return whole(path, kind, **more)

        monkeypatch.setattr(history._memory, "whole", slow)
        history.clock.now += 60
        unnamed = VolumeId("data", FIRST, "vol-unnamed")
        for _ in range(2):
            assert history.record.node_of(unnamed, history.record.now()) is None
            assert history.record.deleted(unnamed, history.record.now()) is None
        assert read == [api_server.VOLUMES]
        history.clock.now += 31
        assert history.record.node_of(unnamed, history.record.now()) is None
        assert read == [api_server.VOLUMES] * 2


@pytest.mark.parametrize("node", ["a", "b"])
def test_of_two_named_nodes_a_snapshot_is_on_its_volume_s(node: str) -> None:
    with asyncio.Runner() as runner:
        history = History(runner.run)
        history.volumes.clear()
        history.claims["b"].add(FIRST)
        history._memory.volumes = {
            "pvc-1": {"spec": spec_of(f"data@{FIRST}/vol-pvc-1", "a")},
            "pvc-2": {"spec": spec_of(f"data@{FIRST}/vol-pvc-2", "b")},
        }
        source = {"volumeHandle": f"data@{FIRST}/vol-pvc-{1 if node == 'a' else 2}"}
        content = {"spec": {"driver": DRIVER_NAME, "source": source}}
        history._memory.contents = {"snapcontent-uid-1": content}
        history.record.doubt()
        history.settle()
        assert owner(history, FIRST, "snap-snapshot-uid-1") == node
        # Of another the volume is not known, and both nodes have the group.
        assert owner(history, FIRST, "snap-snapshot-uid-2").startswith("UNAVAILABLE: ")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("examples", [60, pytest.param(10_000, marks=pytest.mark.long)])
def test_whatever_happens_to_nodes_and_controllers_the_rule_holds(examples: int) -> None:
    """`CARVER_MEMBERSHIP=seed=7,examples=1000` chooses other histories."""
    numbers = chosen.numbers("CARVER_MEMBERSHIP", seed=1, examples=examples, steps=14, shrink=1)

    @random_histories(numbers, _actions)
    def lived(actions: list[tuple[Any, ...]]) -> None:
        history = History(runner.run)
        for action in actions:
            history.act(*action)
            history.judge()

    with asyncio.Runner() as runner:
        lived()
